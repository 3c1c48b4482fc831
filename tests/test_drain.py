"""drain: a place is given back when the engine is seen to have freed it, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from fakes import FakeClient, OpenLease
from kvguard.domain import Demand, Ending, Endpoint, EngineSample
from kvguard.drain import BLIND_STREAM_S, BLIND_WHOLE_S, LONGEST_S, SETTLED_S, Drain
from request_fixtures import until

DEMAND = Demand(prompt_tokens=1, max_new_tokens=1)


class Told(FakeClient):
    """An engine that reports what the test says."""

    def __init__(self) -> None:
        super().__init__(Endpoint(base_url="http://nowhere"))
        self.report = EngineSample(at_s=0.0)
        self.looks = 0

    async def sample(self) -> EngineSample:
        self.looks += 1
        return self.report

    def says(self, **fields: Any) -> None:
        self.report = EngineSample(at_s=0.0, **fields)


@dataclass(eq=False)
class Running:
    sent_at_s: float
    sequences: int = 1


class Bench:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.engine: Told | None = Told()
        self.running: list[Running] = []
        self.drain = Drain(lambda: self.engine, clock=lambda: self.now_s)

    def leaves(self, *, streamed: bool = True) -> OpenLease:
        lease = OpenLease(1, DEMAND)
        self.drain.add(lease, streamed=streamed)  # type: ignore[arg-type]
        return lease

    def runs(self, *, for_s: float) -> None:
        self.running.append(Running(self.now_s - for_s))

    async def looks(self, times: int = 2) -> None:
        """Let the drain look at the engine that often."""
        assert self.engine is not None
        goal = self.engine.looks + times
        await until(lambda: self.engine is not None and self.engine.looks >= goal)


@asynccontextmanager
async def draining() -> AsyncIterator[Bench]:
    bench = Bench()
    task = asyncio.create_task(bench.drain.run(lambda: bench.running))
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_place_is_kept_while_the_engine_runs_more_than_we_know_of() -> None:
    async with draining() as bench:
        assert bench.engine is not None
        bench.runs(for_s=1.0)
        bench.engine.says(running=2, waiting=0)
        lease = bench.leaves()
        assert lease.draining
        await bench.looks()
        assert lease.ending is None
        bench.engine.says(running=1, waiting=0)
        await lease.ended.wait()
        assert lease.ending is Ending.CANCELLED
        assert len(bench.drain) == 0


@pytest.mark.parametrize("report", [{"running": 0, "waiting": 1}, {"busy_slots": frozenset({2})}])
async def test_what_waits_inside_the_engine_or_holds_a_slot_counts(report: dict[str, Any]) -> None:
    async with draining() as bench:
        assert bench.engine is not None
        bench.engine.says(**report)
        lease = bench.leaves()
        await bench.looks()
        assert lease.ending is None
        bench.engine.says(running=0, waiting=0, busy_slots=frozenset())
        await lease.ended.wait()


async def test_a_request_that_was_just_sent_may_not_be_what_the_engine_runs() -> None:
    async with draining() as bench:
        assert bench.engine is not None
        bench.runs(for_s=SETTLED_S / 2)
        bench.engine.says(running=1)
        lease = bench.leaves()
        await bench.looks()
        assert lease.ending is None
        bench.now_s += SETTLED_S
        await lease.ended.wait()


@pytest.mark.parametrize(("streamed", "kept_s"), [(True, BLIND_STREAM_S), (False, BLIND_WHOLE_S)])
async def test_an_engine_that_tells_nothing_is_given_a_fixed_time(streamed: bool, kept_s: float) -> None:
    async with draining() as bench:
        lease = bench.leaves(streamed=streamed)
        bench.now_s += kept_s * 0.9
        await bench.looks()
        assert lease.ending is None
        bench.now_s += kept_s * 0.2
        await lease.ended.wait()


async def test_nothing_drains_for_ever() -> None:
    async with draining() as bench:
        assert bench.engine is not None
        bench.engine.says(running=5)
        lease = bench.leaves()
        await bench.looks()
        bench.now_s += LONGEST_S + 1
        await lease.ended.wait()


async def test_a_backend_life_that_is_over_holds_nothing() -> None:
    async with draining() as bench:
        assert bench.engine is not None
        bench.engine.says(running=5)
        lease = bench.leaves()
        await bench.looks()
        lease.live = False
        await until(lambda: len(bench.drain) == 0)
