"""The supervisor's decision after each kind of end, driven by lives whose moments the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvguard.domain import (
    Accounts,
    Basis,
    Capacity,
    Cause,
    Endpoint,
    Entry,
    Evidence,
    Exhausted,
    ExitStatus,
    Failure,
    Knobs,
    Launch,
    PoolKind,
    Rung,
    Snapshot,
    Stage,
    State,
    Step,
    Variant,
)
from kvguard.events import Events
from kvguard.journal import BackendRecord, CardRecord, Fingerprint, Journal, ModelRecord, WhyRecord
from kvguard.life import Confirmation, LifeEnded
from kvguard.probe import ProbeResult
from kvguard.recorder import Recorder
from kvguard.supervisor import MAX_RESTARTS, Attempt, StartFailed, Supervisor, SupervisorParts

KNOBS = Knobs(
    batch=4,
    ctx_tokens=4096,
    pool_tokens=8192,
    pool_kind=PoolKind.UNIFIED,
    quant=Variant(kind="gguf", source="m.gguf", bits=4.5),
)
CAPACITY = Capacity(pool_tokens=8192, ctx_tokens=4096, sequences=4)
OOM = Evidence(exit=ExitStatus(signal=9, oom_kills=1), milestone="ready")
SEGFAULT = Evidence(exit=ExitStatus(signal=11), milestone="ready")
PROBE = ProbeResult(status=200, prompt_tokens=16, max_new_tokens=16, new_tokens=16, seconds=0.1)


class FakeEngine:
    def __init__(self) -> None:
        self.alive = True

    async def healthy(self) -> bool:
        return self.alive


class ScriptedLife:
    """A life that starts well unless told otherwise, and ends when the test says so."""

    def __init__(
        self, knobs: Knobs, *, start_ends_with: Evidence | None = None, peak_bytes: int = 10
    ) -> None:
        self.knobs = knobs
        self._peak_bytes = peak_bytes
        self.endpoint = Endpoint(base_url="http://127.0.0.1:1")
        self.engine: Any = FakeEngine()
        self.launch = Launch(argv=("engine", "--key"))
        self.others_bytes = 0
        self.stopped = asyncio.Event()
        self._start_ends_with = start_ends_with
        self._end: asyncio.Future[Evidence] = asyncio.get_running_loop().create_future()
        self.confirmed = self.answered = False

    def die(self, evidence: Evidence) -> None:
        self.engine.alive = False
        self._end.set_result(evidence)

    async def start(self) -> Capacity:
        if self._start_ends_with is not None:
            raise LifeEnded(self._start_ends_with)
        return CAPACITY

    async def confirm(self, *, full_context: bool = False) -> Confirmation:
        self.confirmed = True
        return Confirmation(
            peaks=(), probes=(PROBE,), stable=True, start_s=0.1, peak_bytes=self._peak_bytes, others_bytes=0
        )

    async def answer(self) -> bool:
        self.answered = True
        return True

    async def ended(self) -> Evidence:
        return await self._end

    async def stop(self, grace_s: float = 10.0) -> None:
        self.stopped.set()

    def load_lines(self) -> tuple[str, ...]:
        return ("loaded",)

    def peaks(self) -> tuple[()]:
        return ()


class HalveBatch:
    """A ladder of one rung."""

    def next(
        self,
        failure: Failure,
        current: Knobs,
        options: Mapping[Rung, Sequence[Knobs]],
        refuted: Sequence[Knobs],
        **_: object,
    ) -> Step | Exhausted:
        for knobs in options[Rung.BATCH]:
            if knobs not in refuted:
                return Step(rung=Rung.BATCH, knobs=knobs, reason="halve", cost="throughput")
        return Exhausted(reason="Use a smaller model.")


class FakeBackend:
    name = "fake"

    def measured(self, lines: Sequence[str]) -> Accounts | None:
        return None


def diagnose(evidence: Evidence) -> Failure:
    exit_status = evidence.exit
    if exit_status is not None and exit_status.oom_kills:
        cause, stage = Cause.HOST_RAM_OOM_KILLED, Stage.INFERENCE
    elif evidence.http_body == "no such file":
        cause, stage = Cause.MISSING_FILE, Stage.LOAD
    else:
        cause, stage = Cause.UNKNOWN, Stage.INFERENCE
    return Failure(stage=stage, causes=(cause,), confidence=0.9, evidence=("line",), remedy="Do this.")


def halved(knobs: Knobs) -> dict[Rung, list[Knobs]]:
    if knobs.batch == 1:
        return {Rung.BATCH: []}
    return {
        Rung.BATCH: [
            Knobs(
                batch=knobs.batch // 2,
                ctx_tokens=knobs.ctx_tokens,
                pool_tokens=knobs.ctx_tokens,
                pool_kind=knobs.pool_kind,
                quant=knobs.quant,
            )
        ]
    }


class Stand:
    """A supervisor with its journal, and the lives that it made."""

    def __init__(self, directory: Path) -> None:
        self.lives: list[ScriptedLife] = []
        self.start_ends: list[Evidence | None] = []
        self.peaks_bytes: list[int] = []
        self.journal = Journal(directory / "card.jsonl")
        self.events = Events()
        recorder = Recorder(
            journal=self.journal,
            fingerprint=Fingerprint(
                card=CardRecord(kind="cgroup", name="test", total_bytes=1 << 30),
                backend=BackendRecord(name="fake", version="1"),
                model=ModelRecord(name="m"),
            ),
            backend=FakeBackend(),  # type: ignore[arg-type]
            events=self.events,
            headroom_bytes=0,
            libraries={},
        )
        self.supervisor = Supervisor(
            SupervisorParts(
                first=Attempt(knobs=KNOBS, why=WhyRecord(kind="self_tune")),
                wanted=KNOBS,
                make_life=self._make_life,
                options=halved,
                predict=lambda knobs: Accounts(
                    entries=(Entry(account="kv", name="kv", size_bytes=knobs.pool_tokens, basis=Basis.EXACT),)
                ),
                diagnose=diagnose,
                ladder=HalveBatch(),
                recorder=recorder,
                events=self.events,
                usable_bytes=lambda: 1 << 30,
            )
        )

    def _make_life(self, knobs: Knobs) -> ScriptedLife:
        ends = self.start_ends.pop(0) if self.start_ends else None
        peak = self.peaks_bytes.pop(0) if self.peaks_bytes else 10
        self.lives.append(ScriptedLife(knobs, start_ends_with=ends, peak_bytes=peak))
        return self.lives[-1]

    async def until(self, state: State, generation: int = 0) -> Snapshot:
        snapshot = self.supervisor.snapshot
        while snapshot.state is not state or snapshot.generation < generation:
            snapshot = await asyncio.wait_for(self.supervisor.changed(than=snapshot), 5)
        return snapshot


@asynccontextmanager
async def running(stand: Stand) -> AsyncIterator[Stand]:
    task = asyncio.create_task(stand.supervisor.run())
    try:
        yield stand
    finally:
        stand.supervisor.stop()
        await asyncio.wait_for(task, 5)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


async def test_a_good_start_is_recorded_and_published(stand: Stand) -> None:
    async with running(stand):
        snapshot = await stand.until(State.READY)
        assert snapshot.capacity == CAPACITY
        [record] = stand.journal.records()
        assert (record.event, record.id, record.consecutive) == ("config_provisional", snapshot.config_id, 1)
    assert stand.lives[0].stopped.is_set()
    assert stand.supervisor.snapshot.state is State.STOPPED


async def test_memory_death_takes_one_step_and_journals_both_ends(stand: Stand) -> None:
    async with running(stand):
        await stand.until(State.READY)
        stand.lives[0].die(OOM)
        snapshot = await stand.until(State.READY, generation=2)
        assert snapshot.knobs is not None
        assert snapshot.knobs.batch == 2
        assert snapshot.degraded_by == (Rung.BATCH,)
        events = [(r.event, r.knobs.batch) for r in stand.journal.records()]
        assert events == [("config_provisional", 4), ("config_failed", 4), ("config_provisional", 2)]
        last = stand.journal.records()[-1]
        assert last.why is not None
        assert last.why.from_id == stand.journal.records()[1].id


async def test_exhausted_ladder_stays_up_with_the_diagnosis_until_retried(stand: Stand) -> None:
    async with running(stand):
        for generation in (1, 2, 3):
            await stand.until(State.READY, generation=generation)
            stand.lives[-1].die(OOM)
        snapshot = await stand.until(State.FAILED)
        assert "Use a smaller model." in snapshot.detail
        stand.supervisor.retry()
        await stand.until(State.READY, generation=4)


async def test_crash_restarts_the_same_configuration_without_a_step(stand: Stand) -> None:
    async with running(stand):
        await stand.until(State.READY)
        stand.lives[0].die(SEGFAULT)
        snapshot = await stand.until(State.READY, generation=2)
        assert snapshot.knobs == KNOBS
        assert [r.event for r in stand.journal.records()].count("config_failed") == 0


async def test_a_first_start_that_cannot_work_raises(stand: Stand) -> None:
    stand.start_ends = [Evidence(http_body="no such file")]
    with pytest.raises(StartFailed, match=r"missing file at load\. Do this"):
        await stand.supervisor.run()
    assert stand.supervisor.snapshot.state is State.STOPPED


async def test_too_many_deaths_in_a_row_give_up(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvguard.supervisor.FIRST_DELAY_S", 0.001)
    stand.start_ends = [None] + [SEGFAULT] * MAX_RESTARTS
    async with running(stand):
        await stand.until(State.READY)
        stand.lives[0].die(SEGFAULT)
        snapshot = await stand.until(State.FAILED)
        assert f"{MAX_RESTARTS} deaths in a row" in snapshot.detail


async def test_death_of_a_lone_suspect_takes_no_step(stand: Stand) -> None:
    class Suspect:
        def in_flight(self, generation: int) -> int:
            return 1

        def crashed(self, generation: int, *, memory: bool) -> bool:
            return memory

    stand.supervisor.set_blame(Suspect())
    async with running(stand):
        await stand.until(State.READY)
        stand.lives[0].die(OOM)
        snapshot = await stand.until(State.READY, generation=2)
        assert snapshot.knobs == KNOBS


async def test_verdict_tells_a_living_engine_from_a_dead_one(stand: Stand) -> None:
    async with running(stand):
        first = await stand.until(State.READY)
        assert await stand.supervisor.verdict(first.generation) is first
        stand.lives[0].die(OOM)
        second = await asyncio.wait_for(stand.supervisor.verdict(first.generation), 5)
        assert (second.state, second.generation) == (State.READY, 2)


async def test_third_start_in_a_row_confirms(tmp_path: Path) -> None:
    for _ in range(3):
        stand = Stand(tmp_path)
        async with running(stand):
            await stand.until(State.READY)
    assert [r.event for r in stand.journal.records()] == [
        "config_provisional",
        "config_provisional",
        "config_confirmed",
    ]


async def test_what_has_served_serves_again_after_one_answer(stand: Stand) -> None:
    """Clients wait: what was confirmed in this run is not confirmed anew, nor counted as another start."""
    async with running(stand):
        first = await stand.until(State.READY)
        for generation in (2, 3):
            stand.lives[-1].die(SEGFAULT)
            again = await stand.until(State.READY, generation=generation)
            assert (stand.lives[-1].confirmed, stand.lives[-1].answered) == (False, True)
            assert again.config_id == first.config_id
        stand.lives[-1].die(OOM)
        await stand.until(State.READY, generation=4)
        assert (stand.lives[-1].confirmed, stand.lives[-1].answered) == (True, False)
    assert [r.event for r in stand.journal.records()] == [
        "config_provisional",
        "config_failed",
        "config_provisional",
    ]


async def test_a_planned_change_replaces_a_ready_configuration(stand: Stand) -> None:
    async with running(stand):
        await stand.until(State.READY)
        smaller = halved(KNOBS)[Rung.BATCH][0]
        step = Step(rung=Rung.BATCH, knobs=smaller, reason="quiet", cost="one restart")
        stand.supervisor.change(step, WhyRecord(kind="degraded", rung=Rung.BATCH))
        snapshot = await stand.until(State.READY, generation=2)
        assert snapshot.knobs == smaller
        assert stand.lives[0].stopped.is_set()
        assert [r.event for r in stand.journal.records()] == ["config_provisional"] * 2


async def test_a_start_into_the_headroom_is_not_confirmed(stand: Stand) -> None:
    stand.peaks_bytes = [(1 << 30) + 1, 1 << 30]
    async with running(stand):
        snapshot = await stand.until(State.READY)
        assert snapshot.generation == 2
        assert snapshot.knobs is not None
        assert snapshot.knobs.batch == 2
        failed, worked = stand.journal.records()
        assert (failed.event, worked.event) == ("config_failed", "config_provisional")
        assert failed.failure is not None
        assert "1 bytes into the headroom" in failed.failure.evidence[0]


async def test_the_smallest_configuration_serves_into_the_headroom_and_says_so(stand: Stand) -> None:
    stand.peaks_bytes = [1 << 31] * 3
    async with running(stand):
        snapshot = await stand.until(State.READY)
        assert snapshot.knobs is not None
        assert snapshot.knobs.batch == 1
        assert "serving_into_headroom" in [event["event"] for event in stand.events.recent()]
