"""What llama.cpp allocates for a geometry: cells, KV cache, states, and what one request uses of them.

Source: llama.cpp src/llama-context.cpp (constructor), src/llama-kv-cache*.cpp and
src/llama-memory-recurrent.cpp, as vendored by llama-cpp-python 0.3.36. All of it is allocated at the start;
requests only use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.geometry.shapes import Geometry, GeometryError, LayerKV

KV_TYPES: dict[str, tuple[int, int]] = {  # name -> (elements of a block, bytes of a block)
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
CELLS = 256  # every cache is a multiple of this many cells
F32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """The options of llama-server that decide its memory.

    ctx_tokens   `-c`: cells of all sequences together; 0 means the training context
    sequences    `-np`
    unified      `-kvu`: one pool for all; else each sequence has ctx_tokens / sequences
    rollback     states kept to roll back a draft's tokens (speculative decoding), 0 without
    """

    ctx_tokens: int
    sequences: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    unified: bool = True
    swa_full: bool = False
    flash_attn: bool = True
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    rollback: int = 0

    def __post_init__(self) -> None:
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in KV_TYPES:
                raise GeometryError(
                    f"unknown KV type {getattr(self, name)!r}; llama.cpp has {', '.join(KV_TYPES)}"
                )
        if self.ctx_tokens < 0 or self.sequences < 1 or self.ubatch_tokens < 1 or self.batch_tokens < 1:
            raise GeometryError("context, sequences and batch sizes must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """How llama.cpp rounds a context: `context` in all, `sequence` for one, in `streams` planes."""

    context: int
    sequence: int
    streams: int
    ubatch_tokens: int


def pad(value: int, to: int) -> int:
    return -(-value // to) * to


def cells(settings: LlamaSettings, n_ctx_train: int) -> Cells:
    """Round as the constructor of llama_context does. It can round up: `-c 4096 -np 3` gives 4608."""
    asked = settings.ctx_tokens or n_ctx_train
    if asked < 1:
        raise GeometryError("no context size given, and the model names none")
    ubatch = min(asked, settings.batch_tokens, settings.ubatch_tokens)
    context = pad(asked, CELLS)
    if settings.unified:
        return Cells(context=context, sequence=context, streams=1, ubatch_tokens=ubatch)
    sequence = max(pad(context // settings.sequences, CELLS), CELLS)
    return Cells(
        context=sequence * settings.sequences,
        sequence=sequence,
        streams=settings.sequences,
        ubatch_tokens=ubatch,
    )


def row_bytes(kv_type: str, elements: int) -> int:
    """Bytes of one row of a tensor. Raises: GeometryError where it is no whole number of blocks."""
    block, size = KV_TYPES[kv_type]
    if elements % block:
        raise GeometryError(f"a row of {elements} elements is no whole number of {kv_type} blocks of {block}")
    return elements // block * size


def check(geometry: Geometry, settings: LlamaSettings) -> None:
    """Refuse what llama_init_from_model refuses, with its words. Raises: GeometryError."""
    type_k, type_v = settings.type_k, settings.type_v
    if geometry.mla and type_k != type_v:
        raise GeometryError(f"model does not support different K ({type_k}) and V ({type_v}) cache types")
    quantised_v = KV_TYPES[type_v][0] > 1
    if quantised_v and not settings.flash_attn:
        raise GeometryError("quantized V cache requires flash_attn to be enabled")
    if not settings.flash_attn:
        return
    for layer in geometry.layers:
        for side, kv_type, head in (("k", type_k, layer.k_head), ("v", type_v, layer.v_head)):
            block = KV_TYPES[kv_type][0]
            if head % block:
                raise GeometryError(
                    f"{side.upper()} cache type {kv_type} with block size {block} "
                    f"does not divide n_embd_head_{side}={head}"
                )


def token_bytes(geometry: Geometry, layer: LayerKV, settings: LlamaSettings) -> int:
    """Bytes of one cell in all layers of this kind.

    Without flash attention the values are stored transposed, each layer as wide as the widest.
    """
    v_elems = layer.v_elems
    if v_elems and not settings.flash_attn:
        v_elems = max(v_elems, geometry.v_elems_max)
    return layer.count * (row_bytes(settings.type_k, layer.k_elems) + row_bytes(settings.type_v, v_elems))


def state_bytes(layer: LayerKV, settings: LlamaSettings) -> int:
    """Bytes of one sequence's state in all layers of this kind; llama.cpp keeps states in F32."""
    return layer.count * (layer.conv_elems + layer.state_elems) * F32_BYTES * (1 + settings.rollback)


def layer_bytes(geometry: Geometry, layer: LayerKV, settings: LlamaSettings, room: Cells) -> int:
    """Bytes allocated for one kind of layer."""
    if layer.kind == "state":
        return state_bytes(layer, settings) * settings.sequences
    shared = settings.unified and not layer.own_pool
    streams = 1 if shared else settings.sequences
    depth = room.sequence
    if layer.kind in ("window", "chunk") and not settings.swa_full:
        window = layer.window * (settings.sequences if shared else 1)
        depth = pad(min(depth, window + room.ubatch_tokens), CELLS)
    elif layer.kind == "compressed":
        depth = pad(-(-depth // layer.ratio), CELLS)
    return token_bytes(geometry, layer, settings) * depth * streams


def kv_parts(geometry: Geometry, settings: LlamaSettings) -> tuple[tuple[str, int], ...]:
    """Bytes allocated, by the name of the part. Raises: GeometryError for what the engine would refuse."""
    check(geometry, settings)
    room = cells(settings, geometry.n_ctx_train)
    parts: dict[str, int] = {}
    for layer in geometry.layers:
        size = layer_bytes(geometry, layer, settings, room)
        parts[layer.name] = parts.get(layer.name, 0) + size
    return tuple(parts.items())


def kv_bytes(geometry: Geometry, settings: LlamaSettings) -> int:
    """Bytes allocated for keys, values and states together."""
    return sum(size for _, size in kv_parts(geometry, settings))


def checkpoint_bytes(geometry: Geometry, settings: LlamaSettings) -> int:
    """Bytes of one context checkpoint: what cannot be rolled back, that is windows and states.

    llama-server keeps up to `--ctx-checkpoints` of them a slot in host memory; source: tools/server.
    """
    total = 0
    for layer in geometry.layers:
        if layer.kind == "state":
            total += state_bytes(layer, settings)
        elif layer.kind in ("window", "chunk"):
            total += token_bytes(geometry, layer, settings) * layer.window
    return total
