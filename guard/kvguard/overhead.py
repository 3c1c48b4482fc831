"""What an engine takes beside weights and KV: modelled, marked an estimate, corrected by what was measured.

The engine itself knows better: its dry run or its log replaces these numbers wherever there is one.
Coefficients were fitted to llama-server (llama-cpp-python 0.3.36) on CPU; bench/accounts.py shows the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvguard.domain import MIB, Accounts, Basis, Entry
from kvguard.geometry.llama_cpp import Cells, LlamaSettings, pad
from kvguard.geometry.shapes import Geometry
from kvguard.model import ModelMeta

PROCESS_BYTES = 24 * MIB  # llama-server with no vocabulary: code, libraries, threads, HTTP
TOKEN_BYTES = 70  # of each vocabulary entry: hash nodes, score, type, cached pieces
TEXT_COPIES = 12  # of a token's text: long ones leave the string itself for the heap, several times
MERGE_BYTES = 150  # of each BPE merge: a hash node with two strings
GPU_CONTEXT_BYTES = 450 * MIB  # CUDA context, cuBLAS workspace and memory pool; 300 to 600 MiB seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What measured records say of a model of overhead: the median of measured minus predicted."""

    extra_bytes: int
    records: int


def learn(records: Sequence[tuple[Accounts, int]]) -> Learned | None:
    """Learn from pairs of predicted accounts and the measured peak of our whole share; None without any."""
    errors = [measured - predicted.total_bytes for predicted, measured in records]
    return Learned(extra_bytes=int(median(errors)), records=len(errors)) if errors else None


def compute_bytes(meta: ModelMeta, geometry: Geometry, settings: LlamaSettings, room: Cells) -> int:
    """Estimate llama.cpp's compute buffer: attention masks plus the widest moment of one micro-batch.

    The masks are exact (2 bytes a cell and token, F16); the rest is a fit, since only the engine's own graph
    allocator knows which tensors live at the same time.
    """
    ubatch = room.ubatch_tokens
    mask_cells = sum(_mask_cells(geometry, settings, room))
    attention = 0 if settings.flash_attn else heads(meta.hparams) * room.sequence
    # lightning indexers score every cell; block-sparse ones (MSA) score blocks
    indexed = geometry.mla and any(layer.name == "indexer" for layer in geometry.layers)
    scores = attention + (2 * room.sequence if indexed else 0)
    widest = ubatch * (2 * mask_cells + 4 * (_token_width(meta, geometry) + scores))
    logits = meta.n_vocab * min(ubatch, settings.sequences) * 4
    return max(widest, logits + 2 * ubatch * mask_cells)


def _token_width(meta: ModelMeta, geometry: Geometry) -> int:
    """Numbers that one token needs at the widest moment: residual stream, norm, feed-forward in and out."""
    kv_width = max((layer.k_elems + layer.v_elems for layer in geometry.layers), default=0)
    per_layer = 256 if meta.architecture == "gemma3n" else 0
    per_layer = max(per_layer, _largest(meta.hparams.get("embedding_length_per_layer_input")))
    width = 4 * meta.n_embd + 3 * feed_forward_width(meta.hparams) + kv_width
    return max(width, 4 * per_layer * meta.n_layer)


def _mask_cells(geometry: Geometry, settings: LlamaSettings, room: Cells) -> list[int]:
    """Cells that one token's mask covers: one mask for all full layers, one for all windows."""
    depths = {}
    for layer in geometry.layers:
        if layer.kind == "full":
            depths["full"] = room.sequence
        elif layer.kind in ("window", "chunk"):
            shared = settings.sequences if settings.unified else 1
            window = layer.window * shared + room.ubatch_tokens
            depths["window"] = room.sequence if settings.swa_full else pad(min(room.sequence, window), 256)
        elif layer.kind == "compressed":
            depths[f"compressed {layer.ratio}"] = pad(room.sequence // layer.ratio, 256)
    return list(depths.values())


def feed_forward_width(hparams: Any) -> int:
    """Width of one token's feed-forward: the dense one, or all its experts together."""
    dense = _largest(hparams.get("feed_forward_length"))
    used = _largest(hparams.get("expert_used_count"))
    expert = _largest(hparams.get("expert_feed_forward_length")) or (dense if used else 0)
    shared = _largest(hparams.get("expert_shared_feed_forward_length"))
    return max(dense, used * expert + shared)


def heads(hparams: Any) -> int:
    return _largest(hparams.get("attention.head_count"))


def _largest(value: Any) -> int:
    numbers = value if isinstance(value, list | tuple) else (value,)
    return max((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), default=0)


def output_bytes(meta: ModelMeta, settings: LlamaSettings) -> int:
    """llama.cpp's output buffer: logits of one token a sequence, as llama-server asks for them."""
    return meta.n_vocab * settings.sequences * 4


def process_bytes(meta: ModelMeta) -> int:
    """Estimate what the server's process holds besides buffers: mostly its vocabulary."""
    vocabulary = meta.n_vocab * TOKEN_BYTES + TEXT_COPIES * meta.token_text_bytes
    vocabulary += meta.merges * MERGE_BYTES
    return PROCESS_BYTES + vocabulary


def llama_overhead(
    meta: ModelMeta,
    geometry: Geometry,
    settings: LlamaSettings,
    room: Cells,
    *,
    gpu: bool,
    host_cache_bytes: int,
    learned: Learned | None = None,
) -> list[Entry]:
    """List the overhead of a llama-server. On a GPU, process, output and prompt cache are host memory."""
    compute = compute_bytes(meta, geometry, settings, room)
    entries = [
        _entry("compute buffers", compute, Basis.ESTIMATE),
        _entry("output buffer", output_bytes(meta, settings), Basis.EXACT, on_card=not gpu),
        _entry("process and vocabulary", process_bytes(meta), Basis.ESTIMATE, on_card=not gpu),
        _entry("prompt cache and checkpoints", host_cache_bytes, Basis.LIMIT, on_card=not gpu),
    ]
    if gpu:
        entries.append(_entry("framework context", GPU_CONTEXT_BYTES, Basis.ESTIMATE))
    if learned is not None:
        note = f"from {learned.records} measured"
        entries.append(_entry("correction", learned.extra_bytes, Basis.LEARNED, note=note))
    return [entry for entry in entries if entry.size_bytes]


def _entry(name: str, size_bytes: int, basis: Basis, *, on_card: bool = True, note: str = "") -> Entry:
    return Entry(
        account="overhead", name=name, size_bytes=size_bytes, basis=basis, on_card=on_card, note=note
    )
