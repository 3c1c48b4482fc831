"""The table that an isolation fills: one row a run, each with four memory points and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvguard.domain import MEMORY_CAUSES, Cause, Failure, Knobs, PhasePeak

Variable = Literal[
    "reproduce",
    "batch",
    "quant",
    "ctx",
    "gpu_layers",
    "host_cache",
    "shortest_input",
    "full_weights",
    "combined",
]
Result = Literal["success", "out of memory", "failed"]

BEFORE_WEIGHTS = frozenset({"started", "weights_loading"})
"""Milestones at which not all weights are in memory yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The four memory points of a run, and its highest; None for what it did not live to see.

    All of them are of one source at one interval, so that two runs compare only where both are equal.
    """

    baseline_bytes: int
    loading_peak_bytes: int | None = None
    loaded_idle_bytes: int | None = None
    after_bytes: int | None = None
    peak_bytes: int = 0
    source: str = ""
    interval_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of one configuration with the fixed input.

    sequences        how often the input was sent at the same time
    milestone        how far the engine got before it failed
    failed_at_token  tokens that had been streamed when it failed; None where nothing was streamed
    error            the engine's own words, without any text of a prompt
    trace            (seconds since the start, bytes in use)
    """

    number: int
    variable: Variable
    knobs: Knobs
    sequences: int
    result: Result
    points: Points
    prompt_tokens: int | None = None
    max_new_tokens: int = 0
    new_tokens: int = 0
    milestone: str = "ready"
    failure: Failure | None = None
    failed_at_token: int | None = None
    error: str = ""
    others_bytes: int = 0
    predicted_bytes: int = 0
    host_used_bytes: int = 0
    gpu_utilisation: float | None = None
    tokens_per_s: float | None = None
    seconds: float = 0.0
    peaks: tuple[PhasePeak, ...] = ()
    trace: tuple[tuple[float, int], ...] = ()
    answers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.result == "success"

    @property
    def out_of_memory(self) -> bool:
        return self.result == "out of memory"

    @property
    def cause(self) -> Cause:
        return self.failure.cause if self.failure is not None else Cause.UNKNOWN

    @property
    def needed_bytes(self) -> int:
        """What it needs at least: what was seen, or predicted where it died on the way up."""
        return self.points.peak_bytes if self.ok else max(self.points.peak_bytes, self.predicted_bytes)

    @property
    def before_weights(self) -> bool:
        return not self.ok and self.milestone in BEFORE_WEIGHTS

    @property
    def scale(self) -> tuple[str, float]:
        """What the readings were taken with."""
        return self.points.source, self.points.interval_s

    @property
    def held_by_others(self) -> bool:
        return self.failure is not None and Cause.MEMORY_HELD_BY_OTHERS in self.failure.causes

    @property
    def looks_like_memory(self) -> bool:
        return self.failure is not None and bool(MEMORY_CAUSES & set(self.failure.causes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All runs of one isolation.

    limit_bytes     what the card has
    headroom_bytes  what is never handed out of it
    untested        what could not be tried, and why
    """

    runs: tuple[Run, ...]
    limit_bytes: int
    headroom_bytes: int = 0
    untested: tuple[str, ...] = field(default=())

    @property
    def usable_bytes(self) -> int:
        return self.limit_bytes - self.headroom_bytes

    @property
    def scale(self) -> tuple[str, float]:
        """Source and interval of the comparison: those of the last reproduction; other runs do not count."""
        return self.reproductions[-1].scale if self.reproductions else ("", 0.0)

    @property
    def reproductions(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.variable == "reproduce")

    @property
    def smallest(self) -> tuple[Run, ...]:
        """Runs of the smallest batch with everything else as asked, comparable ones alone."""
        same = [run for run in self._comparable() if run.variable in ("reproduce", "batch")]
        least = min((run.knobs.batch for run in same), default=0)
        return tuple(run for run in same if run.knobs.batch == least)

    def batches(self) -> dict[int, tuple[Run, ...]]:
        """Runs by batch, all else as asked, the smallest batch first."""
        same = [run for run in self._comparable() if run.variable in ("reproduce", "batch")]
        return {
            b: tuple(r for r in same if r.knobs.batch == b) for b in sorted({r.knobs.batch for r in same})
        }

    def of(self, variable: Variable) -> tuple[Run, ...]:
        """Runs that changed this variable alone, comparable ones alone."""
        return tuple(run for run in self._comparable() if run.variable == variable)

    def mixed(self) -> tuple[Run, ...]:
        """Runs that are not compared with the others: their readings were taken otherwise."""
        return tuple(run for run in self.runs if run.points.source and run.scale != self.scale)

    def _comparable(self) -> Iterable[Run]:
        return (run for run in self.runs if not run.points.source or run.scale == self.scale)

    @property
    def base(self) -> Run | None:
        """The failure that is to be explained: first at the smallest batch, else first at a larger."""
        found = [run for runs in self.batches().values() for run in runs if not run.ok]
        return found[0] if found else None


def all_fail(runs: Iterable[Run], how: Callable[[Run], bool] = lambda run: not run.ok) -> bool:
    runs = tuple(runs)
    return bool(runs) and all(map(how, runs))


def all_run(runs: Iterable[Run]) -> bool:
    runs = tuple(runs)
    return bool(runs) and all(run.ok for run in runs)
