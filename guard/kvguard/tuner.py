"""Self-tune on a card: predict, bracket the context at batch 1, spend what is left, confirm by restarts.

One variable at a time, so that a limit can be attributed:

  1. the largest context of one sequence, in few full restarts (`bracket`)
  2. the planner chooses again with the prediction corrected by what was measured
  3. that configuration is restarted until it has passed often enough in a row, with a request that fills the
     context; where it fails, the correction grows and step 2 is taken again

Each trial: memory back to baseline, full restart, load, stable reading, short request, a full micro-batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvguard.bracket import Bracket
from kvguard.domain import Accounts, Evidence, Failure, Knobs, PhasePeak
from kvguard.journal import WhyRecord
from kvguard.life import BackendLife, Confirmation, LifeEnded
from kvguard.recorder import Recorder

MAX_ADJUSTMENTS = 3
SLOW_RATIO = 0.5

Result = Literal["success", "out of memory", "over headroom", "slow", "failed"]


class TuneFailed(RuntimeError):
    """A trial failed for a reason that is not memory; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One restart of one configuration, and what came of it."""

    number: int
    purpose: str
    knobs: Knobs
    result: Result
    predicted_bytes: int
    peak_bytes: int
    peaks: tuple[PhasePeak, ...]
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome. `knobs` None: nothing fits, or the budget ran out before anything was confirmed."""

    knobs: Knobs | None
    trials: tuple[Trial, ...]
    largest_ctx_tokens: int
    search_restarts: int
    seconds: float
    confirmed: bool
    correction_bytes: int
    stopped: str = ""


@dataclass(kw_only=True)
class TunerParts:
    """What the composition root hands over.

    start    the planner's first choice: its variant, KV type and micro-batch hold for the search
    refine   the planner again, with so many bytes less to spend and no larger context; None: nothing fits
    on_trial called before (Trial None) and after each trial, for progress
    """

    start: Knobs
    usable_bytes: int
    most_ctx_tokens: int
    min_ctx_tokens: int
    make_life: Callable[[Knobs], BackendLife]
    predict: Callable[[Knobs], Accounts | None]
    refine: Callable[[int, int], Knobs | None]
    diagnose: Callable[[Evidence], Failure]
    notes: Recorder
    repeats: int = 3
    budget_s: float = float("inf")
    spills: bool = False
    on_trial: Callable[[str, Knobs, Trial | None], None] = field(default=lambda purpose, knobs, trial: None)


class Tuner:
    """One tuning run. Cancel it at any moment: the trial's process ends with it."""

    def __init__(self, parts: TunerParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._p = parts
        self._clock = clock
        self._began_s = clock()
        self._trials: list[Trial] = []
        self._baseline_rate: float | None = None

    async def run(self) -> Tuned:
        """Search, choose, confirm. Raises TuneFailed."""
        bracket = await self._search_ctx()
        searched = len(self._trials)
        if not bracket.low:
            return self._tuned(None, bracket, searched, stopped=self._why_stopped() or "no context fits")
        correction = bracket.correction_bytes
        for _ in range(MAX_ADJUSTMENTS):
            knobs = self._p.refine(max(correction, 0), bracket.low)
            if knobs is None or self._why_stopped():
                break
            last = await self._confirm(knobs)
            if last is None:
                return self._tuned(knobs, bracket, searched, confirmed=True)
            if self._why_stopped():
                break
            over = last.peak_bytes - self._p.usable_bytes if last.result == "over headroom" else 0
            correction = max(correction, 0) + max(over, self._p.usable_bytes // 20)
        return self._tuned(None, bracket, searched, stopped=self._why_stopped() or "nothing was confirmed")

    async def ctx_ladder(self, contexts: Sequence[int]) -> Tuned:
        """The plain ladder: batch 1, a full restart a step, up to the first that does not fit."""
        one = replace(self._p.start, batch=1, host_cache_bytes=0)
        largest = 0
        for ctx in sorted(contexts):
            if self._why_stopped():
                break
            trial = await self._trial("ctx ladder", _with_ctx(one, ctx), full_context=True)
            if trial.result != "success":
                break
            largest = ctx
        return self._tuned(None, None, len(self._trials), largest_ctx_tokens=largest)

    async def largest_ctx(self) -> Tuned:
        """Only the search of step 1."""
        bracket = await self._search_ctx()
        return self._tuned(None, bracket, len(self._trials), stopped=self._why_stopped())

    async def _search_ctx(self) -> Bracket:
        """Largest context at batch 1."""
        one = replace(self._p.start, batch=1, host_cache_bytes=0)
        bracket = Bracket(
            predict=lambda ctx: self._total(_with_ctx(one, ctx)),
            usable_bytes=self._p.usable_bytes,
            least=min(self._p.min_ctx_tokens, self._p.most_ctx_tokens),
            most=self._p.most_ctx_tokens,
        )
        while (ctx := bracket.next()) is not None and not self._why_stopped():
            trial = await self._trial("largest ctx at batch 1", _with_ctx(one, ctx))
            if trial.result == "success":
                bracket.worked(ctx, trial.peak_bytes)
            else:
                bracket.failed(ctx, trial.peak_bytes if trial.result == "over headroom" else None)
        return bracket

    async def _confirm(self, knobs: Knobs) -> Trial | None:
        """Restart until it has passed often enough in a row; the trial that failed, or None."""
        for repeat in range(1, self._p.repeats + 1):
            trial = await self._trial(
                f"confirm {repeat} of {self._p.repeats}", knobs, full_context=repeat == 1
            )
            if trial.result != "success" or (self._why_stopped() and repeat < self._p.repeats):
                return trial
        return None

    async def _trial(self, purpose: str, knobs: Knobs, *, full_context: bool = False) -> Trial:
        self._p.on_trial(purpose, knobs, None)
        began_s = self._clock()
        life = self._p.make_life(knobs)
        predicted = self._p.predict(knobs)
        why = WhyRecord(kind="self_tune")
        result: Result = "success"
        detail = ""
        try:
            await life.start()
            confirmation = await life.confirm(full_context=full_context)
        except LifeEnded as ended:
            failure = self._p.diagnose(ended.evidence)
            result = "out of memory" if failure.is_memory else "failed"
            detail = f"{failure.cause.value} at {failure.stage.value}. {failure.remedy}"
            await asyncio.to_thread(
                self._p.notes.failed, life, failure, ended.evidence,
                predicted=predicted, why=why, was_ready=False,
            )  # fmt: skip
        else:
            result, detail = self._judge(confirmation)
            if result == "success":
                await asyncio.to_thread(
                    self._p.notes.worked, life, confirmation, predicted=predicted, why=why
                )
        finally:
            await asyncio.shield(life.stop())
        peaks = life.peaks()
        trial = Trial(
            number=len(self._trials) + 1,
            purpose=purpose,
            knobs=knobs,
            result=result,
            predicted_bytes=predicted.total_bytes if predicted else 0,
            peak_bytes=max((p.peak_bytes for p in peaks), default=0),
            peaks=peaks,
            seconds=round(self._clock() - began_s, 2),
            detail=detail,
        )
        self._trials.append(trial)
        self._p.on_trial(purpose, knobs, trial)
        if result == "failed":
            raise TuneFailed(detail)
        return trial

    def _judge(self, confirmation: Confirmation) -> tuple[Result, str]:
        if confirmation.peak_bytes - confirmation.others_bytes > self._p.usable_bytes:
            return "over headroom", "it ran, but into the headroom"
        rate = confirmation.decode_tokens_per_s
        self._baseline_rate = self._baseline_rate or rate
        if self._p.spills and rate and self._baseline_rate and rate < SLOW_RATIO * self._baseline_rate:
            return "slow", f"{rate:.1f} tokens/s against {self._baseline_rate:.1f}: it spills out of the card"
        return "success", ""

    def _total(self, knobs: Knobs) -> int:
        accounts = self._p.predict(knobs)
        return accounts.total_bytes if accounts is not None else 0

    def _why_stopped(self) -> str:
        return "the budget is used up" if self._clock() - self._began_s > self._p.budget_s else ""

    def _tuned(
        self,
        knobs: Knobs | None,
        bracket: Bracket | None,
        searched: int,
        *,
        confirmed: bool = False,
        stopped: str = "",
        largest_ctx_tokens: int = 0,
    ) -> Tuned:
        return Tuned(
            knobs=knobs,
            trials=tuple(self._trials),
            largest_ctx_tokens=bracket.low if bracket is not None else largest_ctx_tokens,
            search_restarts=searched,
            seconds=round(self._clock() - self._began_s, 2),
            confirmed=confirmed,
            correction_bytes=bracket.correction_bytes if bracket is not None else 0,
            stopped=stopped,
        )


def _with_ctx(knobs: Knobs, ctx_tokens: int) -> Knobs:
    return replace(knobs, ctx_tokens=ctx_tokens, pool_tokens=ctx_tokens)
