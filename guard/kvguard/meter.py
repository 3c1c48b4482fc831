"""Samples a card at 20 Hz or faster, in a thread of its own: a slow driver never stalls the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from kvguard.domain import CardReading, Phase, PhasePeak
from kvguard.ports import Card, CardLost
from kvguard.readings import Readings, Tolerance

LOST_RETRY_S = 1.0
"""How often a card that does not answer is tried again."""

JOIN_PATIENCE_S = 5.0


class Meter:
    """One card's readings. `lost` is set while the card does not answer.

    clock  monotonic seconds, for windows; wall  unix time, for what is written down
    """

    def __init__(
        self,
        card: Card,
        *,
        interval_s: float = 0.05,
        own_pids: Callable[[], Sequence[int]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._card = card
        self._interval_s = interval_s
        self._own_pids = own_pids
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._readings = Readings(interval_s=interval_s, at=wall())
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampled = asyncio.Event()
        self.lost: CardLost | None = None

    async def start(self) -> None:
        """Take the first reading and go on in the background. Raises CardLost."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._sample)
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._quit.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, JOIN_PATIENCE_S)

    def phase(self, phase: Phase) -> None:
        """End the present phase and begin another."""
        with self._lock:
            self._readings.begin(phase, self._wall())

    async def switch(self, phase: Phase) -> None:
        """`phase`, after one more reading: a phase shorter than the interval is still seen."""
        with contextlib.suppress(CardLost):
            await asyncio.to_thread(self._sample)
        self.phase(phase)

    def peaks(self) -> tuple[PhasePeak, ...]:
        """All phases that ended, and the present one as far as it is."""
        with self._lock:
            return self._readings.peaks(self._wall())

    def history(self) -> list[tuple[float, int]]:
        """Used bytes over the last hour, the highest of each second: (unix time, bytes)."""
        with self._lock:
            return self._readings.history()

    @property
    def last(self) -> CardReading | None:
        return self._readings.last

    @property
    def used_bytes(self) -> int:
        last = self.last
        return last.used_bytes if last is not None else 0

    @property
    def others_bytes(self) -> int | None:
        """What is not ours of the memory in use; None where that cannot be told apart."""
        last = self.last
        return None if last is None or last.own_bytes is None else max(0, last.used_bytes - last.own_bytes)

    @property
    def total_bytes(self) -> int:
        return self._card.info.total_bytes

    async def stable(self, window_s: float, *, timeout_s: float, tolerance: Tolerance | None = None) -> bool:
        """Wait until the readings of a whole window lie close together.

        False when they never do, or when the card is lost.
        """
        since_s = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.lost is None:
                    if self._at_rest(since_s, window_s, tolerance or Tolerance()):
                        return True
                    self._sampled.clear()
                    await self._sampled.wait()
        return False

    def _at_rest(self, since_s: float, window_s: float, tolerance: Tolerance) -> bool:
        with self._lock:
            return self._readings.at_rest(
                since_s=since_s, now_s=self._clock(), window_s=window_s, tolerance=tolerance
            )

    # ------------------------------------------------------------ the sampling thread

    def _run(self) -> None:
        """Keep the pace whatever a reading takes; a lost card is looked for at leisure."""
        next_s = time.monotonic()
        while True:
            next_s = max(time.monotonic(), next_s + (LOST_RETRY_S if self.lost else self._interval_s))
            if self._quit.wait(next_s - time.monotonic()):
                return
            try:
                self._sample()
                self.lost = None
            except CardLost as exc:
                self.lost = exc
            self._tell()

    def _sample(self) -> None:
        reading = self._card.read(self._own_pids())
        with self._lock:
            self._readings.add(reading, at=self._wall(), at_s=self._clock())

    def _tell(self) -> None:
        """Wake whoever waits for a reading."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                self._loop.call_soon_threadsafe(self._sampled.set)
