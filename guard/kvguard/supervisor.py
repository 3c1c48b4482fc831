"""The backend's state (stopped, starting, confirming, ready, degrading, failed); the Snapshot's only writer.

One task, `run`, owns every transition:

    attempt -> Life.start -> Life.confirm -> READY -> it ends -> diagnose -> next attempt

The same configuration again, once it has served, is confirmed by one short answer: clients are waiting.

After an end, the cases are, in this order:
  1. kvguard is stopping: no next attempt
  2. a request that was known to be dangerous was alone in flight: same configuration again
  3. a memory failure: the ladder's next step, or FAILED when the ladder is used up
  4. a failure at load that a restart cannot cure (missing file, wrong format, ...): FAILED
  5. anything else (killed from outside, crash, hang): same configuration again, after a growing delay;
     FAILED after too many in a row
FAILED stays up and answers 503 with the diagnosis until `retry` is called. A first start that fails for a
reason other than memory raises StartFailed instead, since nobody is served yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential_jitter

from kvguard.domain import (
    Accounts,
    Capacity,
    Cause,
    Evidence,
    Exhausted,
    Failure,
    Knobs,
    Rung,
    Snapshot,
    Stage,
    State,
    Step,
)
from kvguard.events import Events
from kvguard.journal import Record, WhyRecord
from kvguard.life import BackendLife, Confirmation, LifeEnded
from kvguard.ports import BackendError, Ladder
from kvguard.recorder import Recorder

T = TypeVar("T")

STEADY_S = 60.0
"""A life that was ready for so long wipes out the failures before it."""

MAX_RESTARTS = 5
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 30.0
RECHECK_S = 1.0
_delay_s = wait_exponential_jitter(multiplier=FIRST_DELAY_S, max=LAST_DELAY_S, jitter=FIRST_DELAY_S)
_INCURABLE = frozenset(
    {
        Cause.QUANT_FORMAT_MISMATCH,
        Cause.DEPENDENCY_VERSION_MISMATCH,
        Cause.CORRUPT_MODEL,
        Cause.MISSING_FILE,
        Cause.DRIVER_ERROR,
    }
)


class StartFailed(RuntimeError):
    """The first start failed for a reason that no smaller configuration cures."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(in_words(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A configuration to start, and why. `served_as` is its record's id if it has served in this run."""

    knobs: Knobs
    why: WhyRecord
    served_as: str = ""


def degraded_by(wanted: Knobs, now: Knobs) -> tuple[Rung, ...]:
    """The rungs in which a configuration is below what was wanted."""
    all_layers = 1 << 30
    below = {
        Rung.BATCH: now.batch < wanted.batch
        or now.prefill_tokens < wanted.prefill_tokens
        or (now.pool_tokens < wanted.pool_tokens and now.ctx_tokens == wanted.ctx_tokens),
        Rung.CTX: now.ctx_tokens < wanted.ctx_tokens,
        Rung.QUANT: now.quant.bits < wanted.quant.bits,
        Rung.GPU_LAYERS: now.gpu_layers % all_layers < wanted.gpu_layers % all_layers,
    }
    return tuple(rung for rung, is_below in below.items() if is_below)


class Blame(Protocol):
    """What the owner of the requests in flight knows about a death."""

    def in_flight(self, generation: int) -> int:
        """How many requests that life had when it died."""

    def crashed(self, generation: int, *, memory: bool) -> bool:
        """Tell it of a death. True: a suspect was alone in flight, so the configuration is not to blame."""


class NoBlame:
    """Without requests in flight there is nobody to blame."""

    def in_flight(self, generation: int) -> int:
        return 0

    def crashed(self, generation: int, *, memory: bool) -> bool:
        return False


@dataclass(kw_only=True)
class SupervisorParts:
    """What the composition root hands over."""

    first: Attempt
    wanted: Knobs
    make_life: Callable[[Knobs], BackendLife]
    options: Callable[[Knobs], Mapping[Rung, Sequence[Knobs]]]
    predict: Callable[[Knobs], Accounts | None]
    diagnose: Callable[[Evidence], Failure]
    ladder: Ladder
    recorder: Recorder
    events: Events
    usable_bytes: Callable[[], int]
    restartable: bool = True


class Supervisor:
    """Implements `ports.Supervision` for everyone else; `run` is its one task."""

    def __init__(self, parts: SupervisorParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._snapshot = Snapshot(generation=0, state=State.STOPPED)
        self._changed = asyncio.Event()
        self._retry = asyncio.Event()
        self._stop = asyncio.Event()
        self._listeners: list[Callable[[Snapshot], None]] = []
        self._blame: Blame = NoBlame()
        self._planned: asyncio.Future[Attempt] | None = None
        self._restarts = 0
        self._ever_ready = False
        self.life: BackendLife | None = None
        self.last_failure: Failure | None = None

    # ------------------------------------------------------------ for others

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def listen(self, listener: Callable[[Snapshot], None]) -> None:
        """Call `listener` with every snapshot, in order, from the supervisor's task."""
        self._listeners.append(listener)

    def set_blame(self, blame: Blame) -> None:
        self._blame = blame

    async def changed(self, than: Snapshot) -> Snapshot:
        while self._snapshot is than:
            await self._changed.wait()
        return self._snapshot

    async def verdict(self, generation: int) -> Snapshot:
        while True:
            snapshot = self._snapshot
            if snapshot.state in (State.FAILED, State.STOPPED):
                return snapshot
            if snapshot.ready and snapshot.generation > generation:
                return snapshot
            life = self.life
            if snapshot.ready and life is not None and await life.engine.healthy():
                if self._snapshot is snapshot:
                    return snapshot
                continue
            with contextlib.suppress(TimeoutError):  # it may have been too busy to answer: look again
                await asyncio.wait_for(self.changed(than=snapshot), RECHECK_S)

    def change(self, step: Step, why: WhyRecord) -> None:
        """Replace a READY configuration at a quiet moment; ignored at any other time."""
        if self._planned is not None and not self._planned.done():
            self._tell("planned_change", step)
            self._planned.set_result(Attempt(knobs=step.knobs, why=why))

    def retry(self) -> None:
        """Leave FAILED and try the last configuration again."""
        self._retry.set()

    def stop(self) -> None:
        """End the backend; `run` returns when its memory is gone."""
        self._stop.set()

    # ------------------------------------------------------------ the one task

    async def run(self) -> None:
        attempt: Attempt | None = self._parts.first
        try:
            while attempt is not None:
                attempt = await self._live(attempt)
        finally:
            await self._end_life()
            self._publish(State.STOPPED, endpoint=None, capacity=None, detail="stopped")

    async def _live(self, attempt: Attempt) -> Attempt | None:
        """One life, from its start to what comes after it."""
        life = self._parts.make_life(attempt.knobs)
        self.life = life
        self._publish(
            State.STARTING, generation=self._snapshot.generation + 1, knobs=attempt.knobs, capacity=None,
            endpoint=None, degraded_by=degraded_by(self._parts.wanted, attempt.knobs),
            detail="starting the backend",
        )  # fmt: skip
        was_ready, began_s = False, self._clock()
        try:
            capacity = await self._unless_stopped(life.start())
            if capacity is None:
                return None
            self._publish(State.CONFIRMING, endpoint=life.endpoint, detail="checking memory by requests")
            if attempt.served_as:
                if await self._unless_stopped(life.answer()) is None:
                    return None
                self._publish(State.READY, capacity=capacity, config_id=attempt.served_as, detail="ready")
            else:
                confirmation = await self._unless_stopped(life.confirm())
                if confirmation is None:
                    return None
                smaller = await self._smaller_if_over_headroom(life, attempt, confirmation)
                if smaller is not None:
                    return smaller
                await self._ready(life, capacity, attempt, confirmation)
            was_ready, began_s = True, self._clock()
            evidence = await self._unless_stopped(self._ended_or_planned(life))
            if isinstance(evidence, Attempt):
                return await self._change(evidence)
        except LifeEnded as ended:
            evidence = ended.evidence
        except (BackendError, OSError) as exc:  # it could not even be spawned
            self._parts.events.publish("start_failed", level="error", reason=str(exc))
            evidence = Evidence(log_lines=(str(exc),), healthy=False, milestone="started")
        if evidence is None:
            return None
        if was_ready and self._clock() - began_s > STEADY_S:
            self._restarts = 0
        return await self._after(life, attempt, evidence, was_ready=was_ready)

    async def _ended_or_planned(self, life: BackendLife) -> Evidence | Attempt:
        """Wait for the end of a life that serves, or for a change that was asked of it."""
        self._planned = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(life.ended())
        try:
            either: set[asyncio.Future[Any]] = {ended, self._planned}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return self._planned.result() if self._planned.done() and not ended.done() else await ended
        finally:
            self._planned = None
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _change(self, attempt: Attempt) -> Attempt:
        self._publish(State.DEGRADING, detail="changing the configuration at a quiet moment")
        await self._end_life()
        return attempt

    async def _smaller_if_over_headroom(
        self, life: BackendLife, attempt: Attempt, confirmation: Confirmation
    ) -> Attempt | None:
        """What runs, but into the headroom, is not confirmed: the next smaller one, if there is any."""
        own_bytes = confirmation.peak_bytes - confirmation.others_bytes
        over_bytes = own_bytes - self._parts.usable_bytes()
        if over_bytes <= 0 or not self._parts.restartable:
            return None
        failure = Failure(
            stage=Stage.WARMUP,
            causes=(Cause.ACTIVATION_PEAK,),
            confidence=1.0,
            evidence=(f"peak of {own_bytes} bytes is {over_bytes} bytes into the headroom",),
        )
        step = await self._choose_step(life, attempt, failure, over_bytes)
        if isinstance(step, Exhausted):
            self._parts.events.publish("serving_into_headroom", level="warning", over_bytes=over_bytes)
            return None
        evidence = Evidence(milestone="ready", healthy=True, peaks=confirmation.peaks)
        record = await self._record_failure(life, attempt, failure, evidence, was_ready=False)
        self._publish(State.DEGRADING, detail="it runs, but into the headroom")
        await self._end_life()
        return self._take(step, record)

    async def _ready(
        self, life: BackendLife, capacity: Capacity, attempt: Attempt, confirmation: Confirmation
    ) -> None:
        config_id = "attached"
        if self._parts.restartable:
            record = await asyncio.to_thread(
                self._parts.recorder.worked,
                life,
                confirmation,
                predicted=self._parts.predict(attempt.knobs),
                why=attempt.why,
            )
            config_id = record.id
        self._ever_ready = True
        self._publish(State.READY, capacity=capacity, config_id=config_id, detail="ready")

    async def _after(
        self, life: BackendLife, attempt: Attempt, evidence: Evidence, *, was_ready: bool
    ) -> Attempt | None:
        """Decide what follows a life that ended by itself; the numbered cases of the module's docstring."""
        generation = self._snapshot.generation
        if was_ready:
            evidence = _with_requests(evidence, self._blame.in_flight(generation))
        failure = self._parts.diagnose(evidence)
        self.last_failure = failure
        self._publish(State.DEGRADING if failure.is_memory else State.STARTING, detail=in_words(failure))
        self._parts.events.publish(
            "backend_died",
            level="warning",
            generation=generation,
            stage=failure.stage.value,
            cause=failure.cause.value,
            confidence=round(failure.confidence, 2),
            exit=str(evidence.exit or "hung"),
            evidence=list(failure.evidence[:3]),
        )
        alone = self._blame.crashed(generation, memory=failure.is_memory)
        await self._end_life()
        if was_ready:
            attempt = replace(attempt, served_as=self._snapshot.config_id)
        if alone:
            return self._again(attempt, failure, "a suspect request was alone in flight")
        if failure.is_memory and self._parts.restartable:
            record = await self._record_failure(life, attempt, failure, evidence, was_ready=was_ready)
            return await self._step_down(life, attempt, failure, record)
        if failure.stage is Stage.LOAD and failure.cause in _INCURABLE:
            return await self._fail(attempt, failure, in_words(failure))
        self._restarts += 1
        if stop_after_attempt(MAX_RESTARTS)(_nth_try(self._restarts)):
            return await self._fail(attempt, failure, f"{MAX_RESTARTS} deaths in a row: {in_words(failure)}")
        if self._restarts > 1 or not was_ready:  # the first is at once
            delay_s = _delay_s(_nth_try(self._restarts))
            await self._unless_stopped(asyncio.sleep(delay_s))
        return self._again(attempt, failure, f"restart {self._restarts} of {MAX_RESTARTS}")

    def _again(self, attempt: Attempt, failure: Failure, reason: str) -> Attempt | None:
        if self._stop.is_set():
            return None
        self._parts.events.publish("backend_restart", cause=failure.cause.value, reason=reason)
        return replace(attempt, why=WhyRecord(kind="verify", from_id=self._snapshot.config_id))

    async def _record_failure(
        self, life: BackendLife, attempt: Attempt, failure: Failure, evidence: Evidence, *, was_ready: bool
    ) -> Record:
        return await asyncio.to_thread(
            self._parts.recorder.failed,
            life,
            failure,
            evidence,
            predicted=self._parts.predict(attempt.knobs),
            why=attempt.why,
            was_ready=was_ready,
        )

    async def _step_down(
        self, life: BackendLife, attempt: Attempt, failure: Failure, record: Record
    ) -> Attempt | None:
        before = self._parts.predict(attempt.knobs)
        step = await self._choose_step(life, attempt, failure, _missing(before, self._parts.usable_bytes()))
        if isinstance(step, Exhausted):
            self._parts.events.publish("ladder_exhausted", level="error", reason=step.reason)
            return await self._fail(attempt, failure, f"{in_words(failure)} {step.reason}")
        return self._take(step, record)

    async def _choose_step(
        self, life: BackendLife, attempt: Attempt, failure: Failure, need_bytes: int | None
    ) -> Step | Exhausted:
        refuted = await asyncio.to_thread(self._parts.recorder.refuted, life.others_bytes)
        before = self._parts.predict(attempt.knobs)
        step = self._parts.ladder.next(
            failure,
            attempt.knobs,
            await asyncio.to_thread(self._parts.options, attempt.knobs),
            refuted,
            need_bytes=need_bytes,
            frees=lambda knobs: freed_bytes(before, self._parts.predict(knobs)),
        )
        for skip in step.skipped:
            self._parts.events.publish("rung_skipped", rung=skip.rung.value, reason=skip.reason)
        return step

    def _take(self, step: Step, record: Record) -> Attempt:
        self._tell("ladder_step", step, level="warning")
        return Attempt(knobs=step.knobs, why=WhyRecord(kind="degraded", from_id=record.id, rung=step.rung))

    def _tell(self, event: str, step: Step, *, level: str = "info") -> None:
        self._parts.events.publish(
            event,
            level=level,
            rung=step.rung.value,
            reason=step.reason,
            cost=step.cost,
            batch=step.knobs.batch,
            ctx_tokens=step.knobs.ctx_tokens,
            pool_tokens=step.knobs.pool_tokens,
            quant=step.knobs.quant.label,
            gpu_layers=step.knobs.gpu_layers,
            prefill_tokens=step.knobs.prefill_tokens,
        )

    async def _fail(self, attempt: Attempt, failure: Failure, detail: str) -> Attempt | None:
        if not self._ever_ready and not failure.is_memory:
            raise StartFailed(failure)
        self._parts.events.publish("backend_failed", level="error", detail=detail)
        self._publish(State.FAILED, capacity=None, endpoint=None, detail=detail)
        self._retry.clear()
        if await self._unless_stopped(self._retry.wait()) is None:
            return None
        self._restarts = 0
        return attempt

    # ------------------------------------------------------------ pieces

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Wait for `work`; None when `stop` was called first."""
        task = asyncio.ensure_future(work)
        stop_wait = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop_wait}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for pending in (task, stop_wait):
                pending.cancel()
            await asyncio.gather(task, stop_wait, return_exceptions=True)

    async def _end_life(self) -> None:
        life, self.life = self.life, None
        if life is None:
            return
        try:
            await life.stop()
        except BackendError as exc:  # a process that even SIGKILL does not end: say so, and go on
            self._parts.events.publish("backend_stuck", level="error", reason=str(exc))

    def _publish(self, state: State, **changes: object) -> None:
        changes = {"since_s": self._clock(), **changes}
        self._snapshot = self._snapshot.with_(state=state, **changes)
        self._parts.events.publish(
            "backend_state",
            state=state.value,
            generation=self._snapshot.generation,
            detail=self._snapshot.detail,
        )
        for listener in self._listeners:
            listener(self._snapshot)
        self._changed.set()
        self._changed = asyncio.Event()


def _with_requests(evidence: Evidence, in_flight: int) -> Evidence:
    """A death in mid-generation and one of an idle backend leave the same log: only we know which it was."""
    milestone = "decoding" if in_flight else evidence.milestone
    return replace(evidence, requests_in_flight=in_flight, milestone=milestone)


def in_words(failure: Failure) -> str:
    """One line for a person: what happened, and what to do."""
    what = f"{failure.cause.value.replace('_', ' ')} at {failure.stage.value}"
    return f"{what}. {failure.remedy}".strip()


def _nth_try(number: int) -> RetryCallState:
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = number
    return state


def _missing(before: Accounts | None, usable_bytes: int) -> int | None:
    """What the accounts say is missing on the card; None where they say that it fits."""
    if before is None:
        return None
    missing_bytes = before.total_bytes - usable_bytes
    return missing_bytes if missing_bytes > 0 else None


def freed_bytes(before: Accounts | None, after: Accounts | None) -> int:
    """What a configuration frees on the card against another; 1 (something) where nobody can say."""
    if before is None or after is None:
        return 1
    return before.total_bytes - after.total_bytes
