"""The life of a backend that someone else runs: watched, never started, never stopped."""

from __future__ import annotations

import asyncio
import time

from kvguard.domain import Capacity, Endpoint, Evidence, Knobs, Launch, PhasePeak
from kvguard.life import Confirmation, LifeEnded
from kvguard.ports import Backend, BackendError

POLL_S = 0.5


class AttachedLife:
    """Implements `life.BackendLife` without a process."""

    launch: Launch | None = None
    others_bytes = 0

    def __init__(
        self, backend: Backend, endpoint: Endpoint, knobs: Knobs, *, patience_s: float, hang_timeout_s: float
    ) -> None:
        self.knobs = knobs
        self.endpoint = endpoint
        self.engine = backend.connect(endpoint)
        self._patience_s = patience_s
        self._hang_timeout_s = hang_timeout_s

    async def start(self) -> Capacity:
        """Wait until it answers. Raises LifeEnded when it does not within the patience."""
        began_s = time.monotonic()
        while not await self.engine.healthy():
            if time.monotonic() - began_s > self._patience_s:
                raise LifeEnded(
                    Evidence(healthy=False, http_body=f"nothing healthy answers at {self.endpoint.base_url}")
                )
            await asyncio.sleep(POLL_S)
        try:
            return await self.engine.capacity(self.knobs, ())
        except BackendError as exc:
            raise LifeEnded(Evidence(http_body=str(exc))) from exc

    async def confirm(self, *, full_context: bool = False) -> Confirmation:
        """Nothing is asked of an engine that is not ours."""
        return Confirmation(peaks=(), probes=(), stable=True, start_s=0.0, peak_bytes=0, others_bytes=0)

    async def answer(self) -> bool:
        return True

    async def ended(self) -> Evidence:
        healthy_s = time.monotonic()
        while time.monotonic() - healthy_s < self._hang_timeout_s:
            await asyncio.sleep(POLL_S)
            if await self.engine.healthy():
                healthy_s = time.monotonic()
        return Evidence(
            healthy=False, milestone="ready", http_body="the attached backend does not answer any more"
        )

    async def stop(self, grace_s: float = 10.0) -> None:
        await self.engine.close()

    def load_lines(self) -> tuple[str, ...]:
        return ()

    def peaks(self) -> tuple[PhasePeak, ...]:
        return ()
