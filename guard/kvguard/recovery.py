"""Changes at a quiet moment: a step down before memory runs out, a step up when it is free again.

Looked at every few seconds, while the backend is ready:
  1. another process has pushed the card under its headroom for PRESSURE_S, and nothing runs: a planned step
     down the ladder (while something runs, admission alone shrinks)
  2. the configuration is below what was wanted, nothing has run or waited for `quiet_s`, and the cool-down
     is over: one step up that fits by the accounts and is not refuted
A step up that fails again comes back through the ladder, and doubles the cool-down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvguard.domain import Accounts, Cause, Exhausted, Failure, Knobs, Rung, Snapshot, Stage, Step
from kvguard.ports import Ladder
from kvguard.record import WhyRecord
from kvguard.supervisor import Supervisor, freed_bytes

INTERVAL_S = 2.0
PRESSURE_S = 10.0
CALM_S = 2.0
"""How long nothing must have run before a planned step down."""

Up = Callable[[Knobs, Sequence[Knobs], float], Step | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryParts:
    """What the composition root hands over.

    busy             whether anything runs or waits
    card_free_bytes  free above headroom, negative under pressure, None where unknown
    up               the climbing policy: (now, refuted, seconds) -> a step up or None; it keeps the cool-down
    fell             told when a climbed configuration did not hold
    """

    supervisor: Supervisor
    ladder: Ladder
    options: Callable[[Knobs], Mapping[Rung, Sequence[Knobs]]]
    predict: Callable[[Knobs], Accounts | None]
    refuted: Callable[[], Sequence[Knobs]]
    busy: Callable[[], bool]
    card_free_bytes: Callable[[], int | None]
    up: Up
    fell: Callable[[float], None]
    quiet_s: float
    clock: Callable[[], float] = time.monotonic


class Recovery:
    """One task; stops by cancellation."""

    def __init__(self, parts: RecoveryParts) -> None:
        self._p = parts
        self._busy_s = parts.clock()
        self._calm_s = parts.clock()
        self._climbed_generation = -1

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """One look; the numbered cases of the module's docstring."""
        now_s, snapshot = self._p.clock(), self._p.supervisor.snapshot
        if not snapshot.ready or self._p.busy():
            self._busy_s = now_s
        free = self._p.card_free_bytes()
        if not snapshot.ready or free is None or free >= 0:
            self._calm_s = now_s
        self._note_fall(snapshot, now_s)
        if not snapshot.ready or snapshot.knobs is None:
            return
        quiet_s = now_s - self._busy_s
        if free is not None and now_s - self._calm_s >= PRESSURE_S and quiet_s >= CALM_S:  # 1
            await self._step_down(snapshot.knobs, -free)
        elif snapshot.degraded_by and quiet_s >= self._p.quiet_s:  # 2
            await self._step_up(snapshot, now_s)

    def _note_fall(self, snapshot: Snapshot, now_s: float) -> None:
        if self._climbed_generation >= 0 and snapshot.generation > self._climbed_generation:
            self._climbed_generation = -1
            self._p.fell(now_s)

    async def _step_down(self, knobs: Knobs, need_bytes: int) -> None:
        failure = Failure(
            stage=Stage.IDLE,
            causes=(Cause.HOST_RAM_OOM_KILLED, Cause.MEMORY_HELD_BY_OTHERS),
            confidence=1.0,
            evidence=(f"{need_bytes} bytes of the headroom are in use by other processes",),
        )
        before = self._p.predict(knobs)
        step = self._p.ladder.next(
            failure,
            knobs,
            await asyncio.to_thread(self._p.options, knobs),
            await asyncio.to_thread(self._p.refuted),
            need_bytes=need_bytes,
            frees=lambda smaller: freed_bytes(before, self._p.predict(smaller)),
        )
        self._calm_s = self._p.clock()  # no second step before this one was seen to help or not
        if not isinstance(step, Exhausted):
            self._p.supervisor.change(step, WhyRecord(kind="degraded", rung=step.rung))

    async def _step_up(self, snapshot: Snapshot, now_s: float) -> None:
        assert snapshot.knobs is not None
        refuted = await asyncio.to_thread(self._p.refuted)
        step = self._p.up(snapshot.knobs, refuted, now_s)
        if step is not None:
            self._climbed_generation = snapshot.generation + 1
            self._p.supervisor.change(
                step, WhyRecord(kind="climb", from_id=snapshot.config_id, rung=step.rung)
            )
