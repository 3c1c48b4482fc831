"""Leases of requests whose client has left: held until the engine is seen to have freed their place.

An engine notices a closed connection when it next looks: at once in decode, after the batch in prefill, and
at the very end for an answer in one piece. What it reports as running and waiting, less the requests that we
know it has, is what still drains. One task, `run`, frees; others only add.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvguard.domain import Ending, EngineSample
from kvguard.lease import Lease
from kvguard.ports import BackendError, Engine

POLL_S = (0.02, 0.05, 0.1, 0.25, 0.5)
"""Pauses between looks, the last one repeated: a stream in decode is free at once, most others much later."""

SETTLED_S = 0.2
"""A request that was sent so long ago has reached the engine's queue."""

BLIND_STREAM_S = 1.0
BLIND_WHOLE_S = 10.0
"""How long a place is kept where the engine reports nothing: a stream, and an answer in one piece."""

LONGEST_S = 600.0

_log = structlog.get_logger("kvguard.drain")


class Running(Protocol):
    """A request that the engine has."""

    @property
    def sequences(self) -> int: ...

    @property
    def sent_at_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draining:
    lease: Lease
    streamed: bool
    since_s: float


class Drain:
    """Frees the leases that it is given, in time."""

    def __init__(
        self, engine: Callable[[], Engine | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._draining: list[_Draining] = []
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._draining)

    def add(self, lease: Lease, *, streamed: bool) -> None:
        """The client of this lease has left, and its connection to the engine is closed."""
        lease.drain()
        self._draining.append(_Draining(lease=lease, streamed=streamed, since_s=self._clock()))
        self._added.set()

    async def run(self, running: Callable[[], Iterable[Running]]) -> None:
        """Watch the engine while something drains. For the application's task group."""
        while True:
            self._added.clear()
            if not self._draining:
                await self._added.wait()
            looks = 0
            while self._draining:
                if self._added.is_set():
                    self._added.clear()
                    looks = 0
                await asyncio.sleep(POLL_S[min(looks, len(POLL_S) - 1)])
                looks += 1
                await self._look(running)

    async def _look(self, running: Callable[[], Iterable[Running]]) -> None:
        asked_at_s = self._clock()
        ours = {flight for flight in running() if asked_at_s - flight.sent_at_s >= SETTLED_S}
        sample = await self._sample()
        seen = None if sample is None else _in_engine(sample)
        still_ours = sum(flight.sequences for flight in running() if flight in ours)
        free = seen is not None and seen <= still_ours
        for item in [item for item in self._draining if item.since_s <= asked_at_s]:
            if free or not item.lease.live or self._overdue(item, blind=seen is None):
                self._draining.remove(item)
                item.lease.release(Ending.CANCELLED)

    def _overdue(self, item: _Draining, *, blind: bool) -> bool:
        age_s = self._clock() - item.since_s
        if age_s > LONGEST_S:
            _log.warning("drain_gave_up", age_s=round(age_s))
            return True
        return blind and age_s > (BLIND_STREAM_S if item.streamed else BLIND_WHOLE_S)

    async def _sample(self) -> EngineSample | None:
        engine = self._engine()
        if engine is None:
            return None
        try:
            return await engine.sample()
        except BackendError:
            return None


def _in_engine(sample: EngineSample) -> int | None:
    """Sequences that the engine runs or keeps in its own queue; None where it does not tell."""
    running = len(sample.busy_slots) if sample.busy_slots is not None else sample.running
    return None if running is None else running + (sample.waiting or 0)
