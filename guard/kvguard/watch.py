"""Looks at the running engine twice a second and tells the limiter what it saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvguard.domain import EngineSample
from kvguard.life import BackendLife
from kvguard.ports import BackendError, Supervision

INTERVAL_S = 0.5


class Watch:
    """One task; stops by cancellation."""

    def __init__(
        self,
        *,
        supervision: Supervision,
        life: Callable[[], BackendLife | None],
        card_free_bytes: Callable[[], int | None],
        observe: Callable[[EngineSample], None],
        overflows: Callable[[], int] = lambda: 0,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._supervision = supervision
        self._life = life
        self._card_free_bytes = card_free_bytes
        self._observe = observe
        self._overflows = overflows
        self._interval_s = interval_s
        self.last: EngineSample | None = None

    async def run(self) -> None:
        while True:
            snapshot = self._supervision.snapshot
            life = self._life()
            if not snapshot.ready or life is None:
                self.last = None
                await self._supervision.changed(than=snapshot)
                continue
            try:
                sample = await life.engine.sample()
            except BackendError:  # busy or dying: the supervisor decides which
                sample = None
            if sample is not None and self._supervision.snapshot is snapshot:
                self.last = replace(
                    sample,
                    card_free_bytes=self._card_free_bytes(),
                    overflows_total=(sample.overflows_total or 0) + self._overflows(),
                )
                self._observe(self.last)
            await asyncio.sleep(self._interval_s)
