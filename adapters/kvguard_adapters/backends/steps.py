"""Smaller configurations, one rung at a time: what each engine's `next_steps` is made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvguard.domain import Knobs, PoolKind, Rung
from kvguard_adapters.backends.options import Options

LEAST_PREFILL_TOKENS = 32
CTX_STEP = 256

_KNOBS_OF = {
    Rung.BATCH: frozenset({"batch", "pool_tokens"}),
    Rung.CTX: frozenset({"ctx_tokens", "pool_tokens"}),
    Rung.QUANT: frozenset({"quant"}),
    Rung.GPU_LAYERS: frozenset({"gpu_layers"}),
}


def next_steps(knobs: Knobs, rung: Rung, options: Options, pinned: frozenset[str]) -> Sequence[Knobs]:
    """Configurations below `knobs` on one rung, nearest first; none where the user pinned what it changes."""
    if _KNOBS_OF[rung] & pinned:
        return tuple(_prefill_steps(knobs)) if rung is Rung.BATCH and "prefill_tokens" not in pinned else ()
    match rung:
        case Rung.BATCH:
            steps = list(_batch_steps(knobs, options.min_batch))
            prefill = () if "prefill_tokens" in pinned else _prefill_steps(steps[-1] if steps else knobs)
            return (*steps, *prefill)
        case Rung.CTX:
            return tuple(_ctx_steps(knobs, options.min_ctx))
        case Rung.QUANT:
            return _quant_steps(knobs, options)
        case Rung.GPU_LAYERS:
            return tuple(_layer_steps(knobs, options.layers))


def _batch_steps(knobs: Knobs, least: int) -> Iterator[Knobs]:
    """Halve the batch, and the pool with it: fewer sequences need fewer tokens."""
    while knobs.batch > max(least, 1):
        batch = max(knobs.batch // 2, least, 1)
        knobs = replace(knobs, batch=batch, pool_tokens=_pool(knobs, batch, knobs.ctx_tokens))
        yield knobs


def _prefill_steps(knobs: Knobs) -> Iterator[Knobs]:
    """The compute buffer grows with the micro-batch, so it is a rung of batch, the last one."""
    while knobs.prefill_tokens // 2 >= LEAST_PREFILL_TOKENS:
        knobs = replace(knobs, prefill_tokens=knobs.prefill_tokens // 2)
        yield knobs


def _ctx_steps(knobs: Knobs, least: int) -> Iterator[Knobs]:
    while knobs.ctx_tokens > least:
        half = -(-(knobs.ctx_tokens // 2) // CTX_STEP) * CTX_STEP
        ctx_tokens = max(min(half, knobs.ctx_tokens - 1), least)
        knobs = replace(knobs, ctx_tokens=ctx_tokens, pool_tokens=_pool(knobs, knobs.batch, ctx_tokens))
        yield knobs


def _pool(knobs: Knobs, batch: int, ctx_tokens: int) -> int:
    """The pool in proportion to what changed; a split one is always whole."""
    if knobs.pool_kind is PoolKind.SPLIT:
        return batch * ctx_tokens
    share = knobs.pool_tokens * batch * ctx_tokens // (knobs.batch * knobs.ctx_tokens)
    return max(share, ctx_tokens)


def _quant_steps(knobs: Knobs, options: Options) -> Sequence[Knobs]:
    smaller = [variant for variant in options.variants if variant.bits < knobs.quant.bits]
    return [replace(knobs, quant=variant) for variant in sorted(smaller, key=lambda v: -v.bits)]


def _layer_steps(knobs: Knobs, layers: int) -> Iterator[Knobs]:
    """One layer less at a time; the ladder takes as many at once as the accounts say are missing."""
    on_card = layers if knobs.gpu_layers < 0 else min(knobs.gpu_layers, layers)
    for left in range(on_card - 1, -1, -1):
        yield replace(knobs, gpu_layers=left)
