"""The degradation ladder: one variable a step, in the user's order, guided by the memory accounts.

How `DegradationLadder.next` chooses:

1. A failure that is not one of memory takes no step.
2. Where the engine itself named the context that fits, go there at once.
3. Else walk the rungs in order, and pass one over when
   a. nothing is left of it: used up, refuted, or held by the user;
   b. the failure's cause says that it cannot help (see `kvguard.remedies`);
   c. by the accounts it frees nothing on the card that ran out;
   d. by the accounts batch and ctx together free less than is missing, and a rung that takes weights off
      the card is left: only that one can cure it.
4. Within the rung take the nearest configuration that frees what is missing (less what the rungs passed over
   under d can still give), else the furthest; without accounts, the nearest. Only configurations that differ
   in a single variable count, unless all of those are refuted.

`strict` turns 2, 3b to 3d and 4 off: every rung, every notch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvguard.domain import Exhausted, Failure, Knobs, PoolKind, Rung, Skip, Step
from kvguard.remedies import route
from kvguard_policies.degradation.prices import Prices
from kvguard_policies.degradation.words import COST, change, changes

Options = Mapping[Rung, Sequence[Knobs]]

PRESETS: Mapping[str, tuple[Rung, ...]] = {
    "default": (Rung.BATCH, Rung.CTX, Rung.QUANT, Rung.GPU_LAYERS),
    "keep-concurrency": (Rung.QUANT, Rung.CTX, Rung.BATCH),
    "single-user": (Rung.CTX, Rung.QUANT, Rung.GPU_LAYERS),
}
ENGINE_GRANULE_TOKENS = 128  # the largest block that an engine rounds a context to


def parse_order(text: str) -> tuple[Rung, ...]:
    """Read a preset's name or any rungs joined by commas, e.g. `quant,ctx,batch`.

    Raises ValueError with the names that are known.
    """
    if text.strip() in PRESETS:
        return PRESETS[text.strip()]
    names = [name.strip() for name in text.split(",")]
    known = [rung.value for rung in Rung]
    for name in names:
        if name not in known:
            raise ValueError(
                f"degradation order {text!r}: {name!r} is no rung; give any of {', '.join(known)} "
                f"joined by commas, or a preset: {', '.join(PRESETS)}"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"degradation order {text!r} names a rung twice; each may appear once")
    return tuple(Rung(name) for name in names)


class DegradationLadder:
    """Implements `kvguard.ports.Ladder`; see the module for how a step is chosen."""

    def __init__(
        self,
        order: Sequence[Rung] = PRESETS["default"],
        *,
        strict: bool = False,
        never: frozenset[Rung] = frozenset(),
        min_ctx_tokens: int = 1,
        min_batch: int = 1,
    ) -> None:
        self.order = tuple(order)
        self._strict = strict
        self._never = never
        self._min_ctx_tokens = min_ctx_tokens
        self._min_batch = min_batch

    def next(
        self,
        failure: Failure,
        current: Knobs,
        options: Options,
        refuted: Sequence[Knobs],
        *,
        need_bytes: int | None = None,
        frees: Callable[[Knobs], int] | None = None,
    ) -> Step | Exhausted:
        """The step to take from `current`; see `kvguard.ports.Ladder.next`."""
        way = route(failure.stage, failure.cause)
        if not way.changes_something:  # 1
            return Exhausted(reason=f"{failure.cause}: not a failure of memory, so nothing is changed")
        left, skipped = self._left(options, refuted)  # 3a
        if self._strict:
            return _first(left, current, skipped)
        jump = self._named_by_engine(failure, current, refuted)
        if jump is not None:  # 2
            return _step(Rung.CTX, current, jump, "the engine names this context as what fits", skipped)
        prices = Prices(left, way, need_bytes, frees)
        for rung, offered in left.items():
            why_not = prices.against(rung)
            if why_not is None:
                chosen, why = prices.choose(rung, _single(current, offered))
                return _step(rung, current, chosen, why, skipped)
            skipped.append(Skip(rung=rung, reason=why_not))
        return _exhausted(skipped)

    def _left(self, options: Options, refuted: Sequence[Knobs]) -> tuple[dict[Rung, list[Knobs]], list[Skip]]:
        """What each rung still offers, in order, and the rungs that offer nothing."""
        left: dict[Rung, list[Knobs]] = {}
        skipped: list[Skip] = []
        for rung in self.order:
            offered = [] if rung in self._never else options.get(rung, ())
            usable = [knobs for knobs in offered if self._allowed(knobs) and knobs not in refuted]
            if usable:
                left[rung] = usable
            else:
                skipped.append(Skip(rung=rung, reason=self._why_empty(rung, bool(offered))))
        return left, skipped

    def _allowed(self, knobs: Knobs) -> bool:
        return knobs.ctx_tokens >= self._min_ctx_tokens and knobs.batch >= self._min_batch

    def _why_empty(self, rung: Rung, offered: bool) -> str:
        if rung in self._never:
            return "held by the user (never)"
        return "all of it is refuted or below the user's limits" if offered else "nothing is left of it"

    def _named_by_engine(self, failure: Failure, current: Knobs, refuted: Sequence[Knobs]) -> Knobs | None:
        fits_tokens = (failure.fits_ctx_tokens or 0) // ENGINE_GRANULE_TOKENS * ENGINE_GRANULE_TOKENS
        if not 0 < fits_tokens < current.ctx_tokens or Rung.CTX not in self.order or Rung.CTX in self._never:
            return None
        sequences = current.batch if current.pool_kind is PoolKind.SPLIT else 1
        jump = replace(current, ctx_tokens=fits_tokens, pool_tokens=fits_tokens * sequences)
        return jump if self._allowed(jump) and jump not in refuted else None


def _first(left: Options, current: Knobs, skipped: Sequence[Skip]) -> Step | Exhausted:
    for rung, offered in left.items():
        return _step(rung, current, _single(current, offered)[0], "next in order (strict)", skipped)
    return _exhausted(skipped)


def _single(current: Knobs, offered: Sequence[Knobs]) -> Sequence[Knobs]:
    """What changes one variable alone: an adapter may offer a micro-batch only below the smallest batch."""
    return [knobs for knobs in offered if len(changes(current, knobs)) == 1] or offered


def _step(rung: Rung, current: Knobs, knobs: Knobs, why: str, skipped: Sequence[Skip]) -> Step:
    return Step(
        rung=rung,
        knobs=knobs,
        reason=f"{change(current, knobs)}: {why}",
        cost=COST[rung],
        skipped=tuple(skipped),
    )


def _exhausted(skipped: Sequence[Skip]) -> Exhausted:
    return Exhausted(
        reason="nothing is left to give up: take a smaller model or quantisation, or a card with more memory",
        skipped=tuple(skipped),
    )
