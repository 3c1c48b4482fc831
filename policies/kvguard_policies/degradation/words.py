"""Words for a step: what it changes and what it costs the user."""

from __future__ import annotations

from kvguard.domain import MIB, Knobs, Rung

COST = {
    Rung.BATCH: "throughput: fewer requests, or fewer prompt tokens at a time",
    Rung.CTX: "the longest input that can be served",
    Rung.QUANT: "output quality: rerun your regression checks",
    Rung.GPU_LAYERS: "speed, and host memory for the layers that leave the card",
}


def changes(was: Knobs, now: Knobs) -> list[str]:
    """What differs, e.g. `batch 8 -> 4`; the pool follows, and is named only where it is alone."""
    pairs = [
        ("batch", was.batch, now.batch),
        ("prefill_tokens", was.prefill_tokens, now.prefill_tokens),
        ("ctx_tokens", was.ctx_tokens, now.ctx_tokens),
        ("quant", _label(was), _label(now)),
        ("gpu_layers", was.gpu_layers, now.gpu_layers),
    ]
    changed = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    return changed or [f"pool_tokens {was.pool_tokens} -> {now.pool_tokens}"]


def change(was: Knobs, now: Knobs) -> str:
    return ", ".join(changes(was, now))


def _label(knobs: Knobs) -> str:
    return knobs.quant.label or knobs.quant.source


def mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"
