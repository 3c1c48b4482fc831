"""Knobs -> the parameters of llama.cpp's server, whichever way it is started.

The fields have the names of `common_params` (and of xllamacpp's `CommonParams`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.domain import MIB, Knobs, PoolKind
from kvguard_adapters.backends.options import Options

ALL_LAYERS = 999
MAX_CHECKPOINTS = 32
LEAST_BATCH_TOKENS = 512
"""The logical batch bounds what `/infill` takes of a file, so it does not shrink with the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaParams:
    """`kv_unified_per_slot` 0 leaves it unset."""

    model: str
    model_alias: str
    n_ctx: int
    n_parallel: int
    kv_unified: bool
    kv_unified_per_slot: int
    n_batch: int
    n_ubatch: int
    cache_type_k: str
    cache_type_v: str
    n_gpu_layers: int
    cache_ram_mib: int
    n_ctx_checkpoints: int
    embedding: bool


def llama_params(knobs: Knobs, options: Options) -> LlamaParams:
    unified = knobs.pool_kind is PoolKind.UNIFIED
    type_k, _, type_v = knobs.kv_type.partition("/")
    cache_ram_mib, checkpoints = host_caches(knobs, options.checkpoint_bytes(knobs))
    return LlamaParams(
        model=knobs.quant.source,
        model_alias=options.model_name,
        n_ctx=knobs.pool_tokens if unified else knobs.batch * knobs.ctx_tokens,
        n_parallel=knobs.batch,
        kv_unified=unified,
        kv_unified_per_slot=knobs.ctx_tokens if unified else 0,
        n_batch=max(knobs.prefill_tokens, LEAST_BATCH_TOKENS),
        n_ubatch=knobs.prefill_tokens,
        cache_type_k=type_k,
        cache_type_v=type_v or type_k,
        n_gpu_layers=ALL_LAYERS if knobs.gpu_layers < 0 else knobs.gpu_layers,
        cache_ram_mib=cache_ram_mib,
        n_ctx_checkpoints=checkpoints,
        embedding=options.embedding,
    )


def host_caches(knobs: Knobs, checkpoint_bytes: int) -> tuple[int, int]:
    """Share out `host_cache_bytes`: prompt cache in MiB, and context checkpoints a slot.

    Checkpoints of live slots are not under the prompt cache's limit, so they get half of the bytes at most.
    """
    per_slot = knobs.batch * checkpoint_bytes
    checkpoints = min(MAX_CHECKPOINTS, knobs.host_cache_bytes // 2 // per_slot) if per_slot else 0
    return (knobs.host_cache_bytes - checkpoints * per_slot) // MIB, checkpoints
