"""Samples a card at 20 Hz or faster and keeps the peak of each named phase, with its source and interval."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvguard.domain import MIB, CardReading, Phase, PhasePeak
from kvguard.ports import Card, CardLost

HISTORY_INTERVAL_S = 1.0
HISTORY_S = 3600
STABLE_TOLERANCE_BYTES = 8 * MIB
STABLE_TOLERANCE_RATIO = 0.01


@dataclass(slots=True)
class _Open:
    """The phase that is being measured."""

    phase: Phase
    started_at: float
    peak_bytes: int = 0
    last_bytes: int = 0
    samples: int = 0


class Meter:
    """One card's readings, taken in a thread of its own: a slow driver never stalls the event loop."""

    def __init__(
        self,
        card: Card,
        *,
        interval_s: float = 0.05,
        own_pids: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self._card = card
        self._interval_s = interval_s
        self._own_pids = own_pids
        self._lock = threading.Lock()
        self._open = _Open(Phase.BASELINE, time.time())
        self._closed: list[PhasePeak] = []
        self._history: deque[tuple[float, int]] = deque(maxlen=int(HISTORY_S / HISTORY_INTERVAL_S))
        self._last: CardReading | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: CardLost | None = None

    async def start(self) -> None:
        """Take the first reading and go on in the background. Raises CardLost."""
        await asyncio.to_thread(self._sample)
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._quit.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)

    async def phase(self, phase: Phase) -> None:
        """End the present phase with a reading, however short it was, and begin another."""
        with contextlib.suppress(CardLost):
            await asyncio.to_thread(self._sample)
        with self._lock:
            self._close()
            self._open = _Open(phase, time.time())

    def peaks(self) -> tuple[PhasePeak, ...]:
        """All phases that ended, and the present one as far as it is."""
        with self._lock:
            present = self._peak(self._open)
            return (*self._closed, *([present] if self._open.samples else []))

    def history(self) -> list[tuple[float, int]]:
        """Used bytes over the last hour, one a second: (unix time, bytes)."""
        with self._lock:
            return list(self._history)

    @property
    def last(self) -> CardReading | None:
        return self._last

    @property
    def used_bytes(self) -> int:
        return self._last.used_bytes if self._last is not None else 0

    @property
    def total_bytes(self) -> int:
        return self._card.info.total_bytes

    async def stable(self, window_s: float, *, timeout_s: float) -> bool:
        """Wait until the readings of a whole window lie close together; False when they never do."""
        deadline_s = time.monotonic() + timeout_s
        began_s = time.monotonic()
        while time.monotonic() < deadline_s:
            await asyncio.sleep(self._interval_s)
            with self._lock:
                window = [used for at_s, used in self._recent if at_s > time.monotonic() - window_s]
            if time.monotonic() - began_s < window_s or len(window) < 3:
                continue
            tolerance = max(STABLE_TOLERANCE_BYTES, STABLE_TOLERANCE_RATIO * max(window))
            if max(window) - min(window) <= tolerance:
                return True
        return False

    # ------------------------------------------------------------ the sampling thread

    def _run(self) -> None:
        while not self._quit.wait(self._interval_s):
            try:
                self._sample()
            except CardLost as exc:
                self.lost = exc
                return

    def _sample(self) -> None:
        reading = self._card.read(self._own_pids())
        now_s = time.monotonic()
        with self._lock:
            self._last = reading
            self._open.samples += 1
            self._open.last_bytes = reading.used_bytes
            self._open.peak_bytes = max(self._open.peak_bytes, reading.used_bytes)
            self._recent.append((now_s, reading.used_bytes))
            while self._recent and self._recent[0][0] < now_s - 10.0:
                self._recent.popleft()
            if not self._history or time.time() - self._history[-1][0] >= HISTORY_INTERVAL_S:
                self._history.append((time.time(), reading.used_bytes))

    def _close(self) -> None:
        if self._open.samples:
            self._closed.append(self._peak(self._open))

    def _peak(self, one: _Open) -> PhasePeak:
        return PhasePeak(
            phase=one.phase,
            peak_bytes=one.peak_bytes,
            last_bytes=one.last_bytes,
            source=self._last.source if self._last is not None else "",
            interval_s=self._interval_s,
            samples=one.samples,
            started_at=one.started_at,
            ended_at=time.time(),
        )
