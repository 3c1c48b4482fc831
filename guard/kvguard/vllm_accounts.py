"""Predict the three accounts of a vLLM configuration from a checkpoint's metadata.

Source: vLLM 0.32 v1/worker/gpu_worker.py (what is profiled), v1/core/kv_cache_utils.py (the pool). Weights
and pool are exact; activations, sampler and CUDA graphs are estimates until the engine's log tells them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.domain import MIB, Accounts, Basis, Entry, Knobs
from kvguard.geometry import vllm
from kvguard.geometry.shapes import Fields, Geometry, GeometryError
from kvguard.geometry.vllm import VllmSettings
from kvguard.model import ModelMeta, text_config
from kvguard.overhead import GPU_CONTEXT_BYTES, Learned

PROCESS_BYTES = 1400 * MIB  # API server, engine and worker: Python, torch and vLLM, on the host
NCCL_BYTES = 300 * MIB  # communicators of one rank
GRAPH_BYTES = 8 * MIB  # of one captured batch size, all layers
SAMPLER_COPIES = 3  # float32 logits, sorted probabilities and their indices
UNSUPPORTED = ("bitsandbytes", "gguf")


def vllm_settings(
    meta: ModelMeta, geometry: Geometry, knobs: Knobs, *, gpu: bool, tensor_parallel: int = 1
) -> VllmSettings:
    """The options of vLLM that these knobs become. On CPU: one batch in flight, and larger blocks."""
    config = text_config(meta.hparams)
    state = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "")
    # Kimi's delta attention keeps its recurrent state in float32 unless it is told otherwise
    state = state or ("float32" if geometry.architecture == "kimi_linear" else "")
    cpu_block = vllm.BLOCK_TOKENS if geometry.mla else vllm.CPU_BLOCK_TOKENS
    return VllmSettings(
        max_model_len=knobs.ctx_tokens,
        max_num_batched_tokens=max(knobs.prefill_tokens, 1),
        block_tokens=vllm.BLOCK_TOKENS if gpu else cpu_block,
        kv_type=checkpoint_kv_type(config) if knobs.kv_type in ("f16", "bf16", "auto") else knobs.kv_type,
        state_bytes=4 if "32" in state else 2,
        tensor_parallel=tensor_parallel,
        in_flight_batches=2 if gpu else 1,
        hybrid="chunk" not in {layer.kind for layer in geometry.layers},
    )


def checkpoint_kv_type(config: Mapping[str, Any]) -> str:
    """What "auto" means: a ModelOpt or compressed-tensors checkpoint may bring a quantised KV cache.

    Source: vllm/utils/torch_utils.py get_kv_cache_quant_algo_string; compressed_tensors' kv_cache_scheme.
    """
    section = _mapping(config.get("quantization_config")) or _mapping(config.get("compression_config"))
    inner = _mapping(section.get("quantization")) or section
    scheme = (
        inner.get("kv_cache_scheme") or section.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    )
    if isinstance(scheme, Mapping):
        float_type = {"8": "fp8", "4": "nvfp4"}.get(str(scheme.get("num_bits")))
        scheme = float_type if scheme.get("type") == "float" else None
    return str(scheme).lower() if str(scheme).lower() in ("fp8", "nvfp4") else "auto"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def pool_bytes_of(
    meta: ModelMeta, geometry: Geometry, knobs: Knobs, *, gpu: bool, tensor_parallel: int = 1
) -> int:
    """Bytes for `--kv-cache-memory-bytes` of one rank, so that the pool holds what the knobs say."""
    settings = vllm_settings(meta, geometry, knobs, gpu=gpu, tensor_parallel=tensor_parallel)
    return vllm.pool_bytes(geometry, settings, knobs.pool_tokens) if geometry.layers else 0


def predict_vllm(
    meta: ModelMeta,
    geometry: Geometry,
    knobs: Knobs,
    learned: Learned | None = None,
    *,
    gpu: bool,
    tensor_parallel: int = 1,
) -> Accounts:
    """Predict one rank of vLLM. Raises: GeometryError for what it would refuse."""
    if meta.quant in UNSUPPORTED:
        raise GeometryError(f"{meta.name}: vLLM 0.32 has no loader for {meta.quant}")
    settings = vllm_settings(meta, geometry, knobs, gpu=gpu, tensor_parallel=tensor_parallel)
    return Accounts(
        entries=(
            *_weights(meta, tensor_parallel),
            *_pool(geometry, settings, knobs),
            *_overhead(meta, settings, knobs, learned, gpu=gpu),
        )
    )


def _weights(meta: ModelMeta, tensor_parallel: int) -> list[Entry]:
    """Weights of one rank. Norms and routers are whole on every rank, which makes a share an estimate."""
    weights = meta.weights
    basis = Basis.EXACT if tensor_parallel == 1 else Basis.ESTIMATE
    experts = sum(weights.expert_bytes)
    parts = {
        "token embedding": weights.input_bytes,
        "layers": sum(weights.layer_bytes) - experts,
        "experts": experts,
        "output and towers": weights.output_bytes,
        "latent projections, absorbed": _absorbed_bytes(meta),
    }
    return [
        Entry(account="weights", name=name, size_bytes=-(-size // tensor_parallel), basis=basis)
        for name, size in parts.items()
        if size
    ]


def _absorbed_bytes(meta: ModelMeta) -> int:
    """MLA layers keep W_UK and W_UV dense beside the projection that they come from."""
    fields = Fields(text_config(meta.hparams), meta.name)
    if not fields.has("kv_lora_rank"):
        return 0
    per_head = fields.number("qk_nope_head_dim", 0) + fields.number("v_head_dim", 0)
    heads = fields.number("num_attention_heads", 0)
    return meta.n_layer * heads * fields.number("kv_lora_rank") * per_head * 2


def _pool(geometry: Geometry, settings: VllmSettings, knobs: Knobs) -> list[Entry]:
    size = vllm.pool_bytes(geometry, settings, knobs.pool_tokens) if geometry.layers else 0
    if not size:
        return []
    note = geometry.note or f"{size // vllm.block_bytes(geometry, settings)} blocks"
    return [Entry(account="kv", name="block pool", size_bytes=size, basis=geometry.basis, note=note)]


def _overhead(
    meta: ModelMeta, settings: VllmSettings, knobs: Knobs, learned: Learned | None, *, gpu: bool
) -> list[Entry]:
    """What the profiling run would find: activations of a full batch, the sampler, graphs, the framework."""
    config = Fields(text_config(meta.hparams), meta.name)
    tp, tokens = settings.tensor_parallel, settings.max_num_batched_tokens
    inner = config.number("intermediate_size", 4 * meta.n_embd)
    activations = tokens * (8 * meta.n_embd + 2 * inner // tp) * settings.dtype_bytes
    sampler = min(knobs.batch, tokens) * meta.n_vocab * 4 * SAMPLER_COPIES
    parts = {"activations": activations, "sampler": sampler}
    if gpu:
        sizes = 3 + min(2 * knobs.batch, 512) // 8
        parts |= {"CUDA graphs": sizes * GRAPH_BYTES, "framework context": GPU_CONTEXT_BYTES}
        parts |= {"communicators": NCCL_BYTES} if tp > 1 else {}
    entries = [_entry(name, size) for name, size in parts.items()]
    entries.append(_entry("process", PROCESS_BYTES, on_card=not gpu))
    if learned is not None:
        note = f"from {learned.records} measured"
        entries.append(_entry("correction", learned.extra_bytes, Basis.LEARNED, note=note))
    return entries


def _entry(
    name: str, size_bytes: int, basis: Basis = Basis.ESTIMATE, *, on_card: bool = True, note: str = ""
) -> Entry:
    return Entry(
        account="overhead", name=name, size_bytes=size_bytes, basis=basis, on_card=on_card, note=note
    )
