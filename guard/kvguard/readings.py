"""What a meter has seen: the peak of each named phase, a bounded history, and whether memory is at rest.

No clock and no thread of its own; times come with each reading.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvguard.domain import MIB, CardReading, Phase, PhasePeak

HISTORY_INTERVAL_S = 1.0
HISTORY_S = 3600
RECENT_S = 60.0
FEWEST_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far readings may lie apart and still count as memory at rest: the larger of the two."""

    size_bytes: int = 8 * MIB
    ratio: float = 0.01

    def of(self, used_bytes: int) -> float:
        return max(self.size_bytes, self.ratio * used_bytes)


@dataclass(slots=True)
class _Open:
    """The phase that is being measured."""

    phase: Phase
    started_at: float
    peak_bytes: int = 0
    last_bytes: int = 0
    samples: int = 0
    source: str = ""


class Readings:
    """The memory of one meter. `at` is unix time, `at_s` monotonic."""

    def __init__(self, *, interval_s: float, at: float) -> None:
        self._interval_s = interval_s
        self._open = _Open(Phase.BASELINE, at)
        self._closed: list[PhasePeak] = []
        self._history: deque[tuple[float, int]] = deque(maxlen=int(HISTORY_S / HISTORY_INTERVAL_S))
        self._recent: deque[tuple[float, int]] = deque()
        self.last: CardReading | None = None

    def begin(self, phase: Phase, at: float) -> None:
        """End the present phase and begin another. One without any sample leaves no trace."""
        if self._open.samples:
            self._closed.append(self._peak(at))
        self._open = _Open(phase, at)

    def add(self, reading: CardReading, *, at: float, at_s: float) -> None:
        self.last = reading
        used, present = reading.used_bytes, self._open
        present.samples += 1
        present.last_bytes = used
        if used >= present.peak_bytes:
            present.peak_bytes, present.source = used, reading.source
        self._recent.append((at_s, used))
        while self._recent[0][0] < at_s - RECENT_S:
            self._recent.popleft()
        self._remember(used, at)

    def _remember(self, used_bytes: int, at: float) -> None:
        """One point of history a second: the highest of it."""
        if self._history and at - self._history[-1][0] < HISTORY_INTERVAL_S:
            began, highest = self._history.pop()
            self._history.append((began, max(highest, used_bytes)))
        else:
            self._history.append((at, used_bytes))

    def peaks(self, at: float) -> tuple[PhasePeak, ...]:
        """All phases that ended, and the present one as far as it is."""
        return (*self._closed, *([self._peak(at)] if self._open.samples else []))

    def history(self) -> list[tuple[float, int]]:
        return list(self._history)

    def at_rest(self, *, since_s: float, now_s: float, window_s: float, tolerance: Tolerance) -> bool:
        """Whether all readings of the last `window_s` lie close together; none before `since_s` count."""
        if now_s - since_s < window_s:
            return False
        window = [used for at_s, used in self._recent if at_s >= now_s - window_s]
        return len(window) >= FEWEST_SAMPLES and max(window) - min(window) <= tolerance.of(max(window))

    def _peak(self, at: float) -> PhasePeak:
        return PhasePeak(
            phase=self._open.phase,
            peak_bytes=self._open.peak_bytes,
            last_bytes=self._open.last_bytes,
            source=self._open.source,
            interval_s=self._interval_s,
            samples=self._open.samples,
            started_at=self._open.started_at,
            ended_at=at,
        )
