"""The way back up: towards the configuration that was wanted, one variable at a time.

What was sacrificed last was valued most, so it comes back first. `climb` takes a single step, at a quiet
moment, when memory is free again or a smaller quantisation affords more; a cool-down holds it back, and
doubles each time a climb fell again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvguard.domain import Knobs, Rung, Skip, Step, Variant
from kvguard_policies.degradation.words import change

Fits = Callable[[Knobs], bool]

FIRST_WAIT_S = 300.0
LONGEST_WAIT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoolDown:
    """How long to hold still before the next climb. A value: each event makes the next one."""

    wait_s: float = FIRST_WAIT_S
    until_s: float = 0.0

    def over(self, now_s: float) -> bool:
        return now_s >= self.until_s

    def fell(self, now_s: float) -> CoolDown:
        """A climb did not hold: wait, and twice as long the next time; after a good day, anew."""
        wait_s = FIRST_WAIT_S if now_s - self.until_s >= LONGEST_WAIT_S else self.wait_s
        return CoolDown(wait_s=min(2 * wait_s, LONGEST_WAIT_S), until_s=now_s + wait_s)


def climb(
    order: Sequence[Rung],
    wanted: Knobs,
    now: Knobs,
    fits: Fits,
    refuted: Sequence[Knobs],
    *,
    cool_down: CoolDown,
    now_s: float,
    variants: Sequence[Variant] = (),
) -> Step | None:
    """One step back up from `now` towards `wanted`, or None while it is too early or nothing fits.

    The caller makes sure that nothing runs or waits. `variants` are the forms between the two quants.
    """
    if not cool_down.over(now_s):
        return None
    skipped: list[Skip] = []
    for rung in reversed(order):
        offered = list(_upward(rung, now, wanted, variants))
        for knobs in offered:
            if fits(knobs) and knobs not in refuted:
                return Step(
                    rung=rung,
                    knobs=knobs,
                    reason=f"{change(now, knobs)}: by the accounts it fits again",
                    cost="one restart",
                    skipped=tuple(skipped),
                )
        if offered:
            skipped.append(Skip(rung=rung, reason="does not fit by the accounts, or is refuted"))
    return None


def _upward(rung: Rung, now: Knobs, wanted: Knobs, variants: Sequence[Variant]) -> Iterator[Knobs]:
    """Configurations above `now` in this rung alone, not above `wanted`, the largest first."""
    if rung is Rung.BATCH:
        for batch in _doublings(now.batch, wanted.batch):
            yield replace(now, batch=batch, pool_tokens=_pool(now, wanted, batch / now.batch))
        for prefill_tokens in _doublings(now.prefill_tokens, wanted.prefill_tokens):
            yield replace(now, prefill_tokens=prefill_tokens)
    elif rung is Rung.CTX:
        for ctx_tokens in _doublings(now.ctx_tokens, wanted.ctx_tokens):
            pool_tokens = max(ctx_tokens, _pool(now, wanted, ctx_tokens / now.ctx_tokens))
            yield replace(now, ctx_tokens=ctx_tokens, pool_tokens=pool_tokens)
    elif rung is Rung.QUANT:
        between = {v for v in (*variants, wanted.quant) if now.quant.bits < v.bits <= wanted.quant.bits}
        for variant in sorted(between, key=lambda v: v.bits, reverse=True):
            yield replace(now, quant=variant)
    elif now.gpu_layers != -1:
        yield from _more_layers(now, wanted)


def _more_layers(now: Knobs, wanted: Knobs) -> Iterator[Knobs]:
    """All that was wanted, then fewer; how many layers the model has is not known here (-1 means all)."""
    if wanted.gpu_layers == -1 or now.gpu_layers < wanted.gpu_layers:
        yield replace(now, gpu_layers=wanted.gpu_layers)
    for more in (64, 32, 16, 8, 4, 2, 1):
        if wanted.gpu_layers == -1 or now.gpu_layers + more < wanted.gpu_layers:
            yield replace(now, gpu_layers=now.gpu_layers + more)


def _doublings(low: int, high: int) -> list[int]:
    """High, then the doublings of low below it, downwards; low itself is not among them."""
    steps = []
    while low < high:
        low = min(2 * low, high)
        steps.append(low)
    return steps[::-1]


def _pool(now: Knobs, wanted: Knobs, factor: float) -> int:
    """The pool grows with the variable, and not over the one that was wanted."""
    return max(now.pool_tokens, min(wanted.pool_tokens, round(now.pool_tokens * factor)))
