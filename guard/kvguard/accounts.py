"""Predict the three accounts of a configuration from a model's metadata alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from kvguard.domain import Accounts, Basis, Entry, Knobs, PoolKind
from kvguard.geometry import Geometry, GeometryError, LlamaSettings, gguf_geometry, hf_geometry, llama_cpp
from kvguard.model import ModelMeta
from kvguard.overhead import Learned, llama_overhead
from kvguard.vllm_accounts import predict_vllm

EngineName = Literal["llama.cpp", "vllm"]

COPIES_EMBEDDING = ("gemma3n", "gemma4")
"""llama.cpp loads a tied embedding twice even in host memory (load_arch_tensors makes the output first)."""


def engine_of(meta: ModelMeta) -> EngineName:
    """The engine that runs a model of this form."""
    return "vllm" if meta.form == "checkpoint" else "llama.cpp"


def geometry_of(meta: ModelMeta) -> Geometry:
    """The geometry of a model on the engine that runs its form of weights. Raises: GeometryError."""
    return _geometry(_Same(meta))


class _Same:
    """A model as a cache key: by identity, since its metadata holds arrays."""

    def __init__(self, meta: ModelMeta) -> None:
        self.meta = meta

    def __hash__(self) -> int:
        return hash((self.meta.path, self.meta.header_hash))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.meta is self.meta


@lru_cache(maxsize=64)
def _geometry(model: _Same) -> Geometry:
    meta = model.meta
    if meta.form == "gguf":
        return gguf_geometry(meta.architecture, meta.hparams)
    return hf_geometry(meta.hparams)


def llama_settings(knobs: Knobs) -> LlamaSettings:
    """The options of llama-server that these knobs become."""
    unified = knobs.pool_kind is PoolKind.UNIFIED
    type_k, _, type_v = knobs.kv_type.partition("/")
    return LlamaSettings(
        ctx_tokens=knobs.pool_tokens if unified else knobs.ctx_tokens * knobs.batch,
        sequences=knobs.batch,
        type_k=type_k,
        type_v=type_v or type_k,
        unified=unified,
        ubatch_tokens=knobs.prefill_tokens,
    )


def predict(
    meta: ModelMeta,
    knobs: Knobs,
    engine: EngineName | None = None,
    learned: Learned | None = None,
    *,
    gpu: bool = False,
    projector_bytes: int = 0,
    tensor_parallel: int = 1,
) -> Accounts:
    """Predict what these knobs take. `gpu`: the card is not the host's own memory.

    Raises: GeometryError for a model or settings that the engine would refuse.
    """
    engine = engine or engine_of(meta)
    if meta.form != "sketch" and engine != engine_of(meta):
        raise GeometryError(f"{engine} does not load {meta.name}: a {meta.form} is for {engine_of(meta)}")
    geometry = geometry_of(meta)
    if engine == "vllm":
        return predict_vllm(meta, geometry, knobs, learned, gpu=gpu, tensor_parallel=tensor_parallel)
    return predict_llama(meta, geometry, knobs, learned, gpu=gpu, projector_bytes=projector_bytes)


def predict_llama(
    meta: ModelMeta,
    geometry: Geometry,
    knobs: Knobs,
    learned: Learned | None = None,
    *,
    gpu: bool = False,
    projector_bytes: int = 0,
) -> Accounts:
    """Predict a llama-server."""
    settings = llama_settings(knobs)
    room = llama_cpp.cells(settings, geometry.n_ctx_train)
    on_card = card_layers(meta, knobs.gpu_layers) if gpu else range(meta.n_layer + 1)
    overhead = llama_overhead(
        meta, geometry, settings, room, gpu=gpu, host_cache_bytes=knobs.host_cache_bytes, learned=learned
    )
    weights = llama_weights(meta, on_card, gpu=gpu, projector_bytes=projector_bytes)
    return Accounts(entries=(*weights, *llama_kv(geometry, settings, on_card), *overhead))


def refine(predicted: Accounts, dry_run: Accounts) -> Accounts:
    """Replace what the engine can size itself: its compute buffers, and a KV account that was an estimate."""
    told = {"compute buffers"}
    entries = [e for e in predicted.entries if not (e.account == "overhead" and e.name in told)]
    fresh = [e for e in dry_run.entries if e.account == "overhead"]
    if any(e.account == "kv" and e.basis is Basis.ESTIMATE for e in entries):
        entries = [e for e in entries if e.account != "kv"]
        fresh += [e for e in dry_run.entries if e.account == "kv"]
    return Accounts(entries=(*entries, *fresh))


def checkpoint_bytes_of(meta: ModelMeta, knobs: Knobs) -> int:
    """Bytes of one of llama-server's context checkpoints; 0 where the model can be rolled back without."""
    return llama_cpp.checkpoint_bytes(geometry_of(meta), llama_settings(knobs))


def card_layers(meta: ModelMeta, gpu_layers: int) -> range:
    """The layers that llama.cpp puts on the card: the last ones, where the very last is the output.

    Source: src/llama-model.cpp load_tensors (i_gpu_start).
    """
    everything = meta.n_layer + 1
    wanted = everything if gpu_layers < 0 else min(gpu_layers, everything)
    return range(everything - wanted, everything)


def llama_weights(meta: ModelMeta, on_card: range, *, gpu: bool, projector_bytes: int = 0) -> list[Entry]:
    """Weights by place. Embeddings stay in host memory; one that is the output too is copied to the card."""
    weights = meta.weights
    parts: dict[tuple[str, bool], int] = {("token embedding", not gpu): weights.input_bytes}
    for layer, (size, experts) in enumerate(zip(weights.layer_bytes, weights.expert_bytes, strict=True)):
        here = layer in on_card
        parts["layers", here] = parts.get(("layers", here), 0) + size - experts
        parts["experts", here] = parts.get(("experts", here), 0) + experts
    output_here = meta.n_layer in on_card
    parts["output", output_here] = weights.output_bytes
    if (gpu and output_here) or (not gpu and meta.architecture in COPIES_EMBEDDING):
        parts["output (copy of the embedding)", True] = weights.tied_bytes
    parts["projector", True] = projector_bytes
    return [
        Entry(account="weights", name=name, size_bytes=size, basis=Basis.EXACT, on_card=here)
        for (name, here), size in parts.items()
        if size
    ]


def llama_kv(geometry: Geometry, settings: LlamaSettings, on_card: range) -> list[Entry]:
    """KV cache and states by kind of layer; each layer's lies where its weights lie."""
    entries = []
    all_here = all(layer.layer in on_card for layer in geometry.by_layer)
    places = [(geometry, True)] if all_here else [(geometry.part(on_card), True)]
    if not all_here:
        places.append((geometry.part(range(on_card.start)), False))
    for part, here in places:
        for name, size in llama_cpp.kv_parts(part, settings):
            entries.append(
                Entry(
                    account="kv",
                    name=name,
                    size_bytes=size,
                    basis=geometry.basis,
                    on_card=here,
                    note=geometry.note,
                )
            )
    return entries
