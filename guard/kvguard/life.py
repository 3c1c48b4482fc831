"""One life of a backend, from spawn to the last byte of its memory; used by the supervisor and the tuner.

A life is started, confirmed, watched and stopped once. Whatever ends it early is raised as LifeEnded with
the evidence that diagnosis needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvguard.child import Child
from kvguard.domain import (
    MIB,
    Capacity,
    Endpoint,
    Evidence,
    ExitStatus,
    Knobs,
    Launch,
    Phase,
    PhasePeak,
)
from kvguard.meter import Meter
from kvguard.ports import Backend, BackendError, Card, CardLost, Engine, NotReady
from kvguard.probe import CALIBRATION_FILLERS, Calibration, ProbeResult, filler_text, probe

T = TypeVar("T")

HEAD_LINES = 3000
TAIL_LINES = 1000
POLL_S = 0.05
STABLE_WINDOW_S = 0.5
STABLE_TIMEOUT_S = 60.0
SHORT_PROMPT_TOKENS = 16
SHORT_NEW_TOKENS = 16


class LifeEnded(Exception):
    """The backend ended, or could not do what was asked; `evidence` says what was seen."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__(str(evidence.exit or evidence.http_body or "backend ended"))
        self.evidence = evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What one start of a configuration has shown."""

    peaks: tuple[PhasePeak, ...]
    probes: tuple[ProbeResult, ...]
    stable: bool
    start_s: float
    peak_bytes: int
    others_bytes: int
    decode_tokens_per_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return max((p.prompt_tokens for p in self.probes), default=0)

    @property
    def new_tokens(self) -> int:
        return max((p.new_tokens for p in self.probes), default=0)


class LogBuffer:
    """The first and the last lines of a child's output, in bounded memory."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if len(self._head) < HEAD_LINES:
            self._head.append(line)
        else:
            self._tail.append(line)

    def lines(self) -> tuple[str, ...]:
        return (*self._head, *self._tail)


class BackendLife(Protocol):
    """What the supervisor needs of a life; an attached backend has one without a process."""

    knobs: Knobs
    endpoint: Endpoint
    engine: Engine
    launch: Launch | None
    others_bytes: int

    async def start(self) -> Capacity:
        """Spawn and wait until it is healthy. Raises LifeEnded."""

    async def confirm(self, *, full_context: bool = False) -> Confirmation:
        """Stable memory, a short request, one that fills a micro-batch. Raises LifeEnded."""

    async def answer(self) -> bool:
        """One short request, where everything else is known already. Raises LifeEnded."""

    async def ended(self) -> Evidence:
        """Wait until it is dead or hung."""

    async def stop(self, grace_s: float = 10.0) -> None:
        """End it and wait until its memory is gone."""

    def load_lines(self) -> tuple[str, ...]:
        """What the engine printed while it started."""

    def peaks(self) -> tuple[PhasePeak, ...]:
        """Memory peaks by phase so far."""


@dataclass(kw_only=True)
class LifeSettings:
    """What is the same for every life of a backend."""

    backend: Backend
    run_dir: Path
    memory_limit_bytes: int | None
    card_of: Callable[[Child], Card]
    embedding: bool = False
    stall_timeout_s: float = 120.0
    hang_timeout_s: float = 60.0
    sample_interval_s: float = 0.05
    on_line: Callable[[str], None] = field(default=lambda line: None)
    on_progress: Callable[[str], None] = field(default=lambda milestone: None)
    on_limit: Callable[[str, str], None] = field(default=lambda kind, reason: None)


class Life:
    """A backend process of ours."""

    def __init__(self, settings: LifeSettings, knobs: Knobs) -> None:
        self.knobs = knobs
        self.others_bytes = 0
        self.launch: Launch | None = None
        self._settings = settings
        self._filter = settings.backend.log_filter()
        self._log = LogBuffer()
        self._milestone = "started"
        self._load_end = 0
        self._child: Child | None = None
        self._card: Card | None = None
        self._meter: Meter | None = None
        self._killed_by_us = False
        self._start_s = 0.0

    # ------------------------------------------------------------ start

    async def start(self) -> Capacity:
        started_s = time.monotonic()
        port, api_key = _free_port(), os.urandom(24).hex()
        self.endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}", api_key=api_key)
        self.engine = self._settings.backend.connect(self.endpoint)
        self.launch = self._settings.backend.launch(self.knobs, port=port, api_key=api_key)
        self._child = await Child.spawn(
            self.launch,
            memory_limit_bytes=self._settings.memory_limit_bytes,
            run_dir=self._settings.run_dir,
            on_line=self._on_line,
        )
        self._settings.on_limit(self._child.limit_kind, self._child.limit_reason)
        self._card = card = self._settings.card_of(self._child)
        # a cgroup of its own counts by itself; looking at each process 20 times a second is not free
        own_pids = (lambda: ()) if self._child.cgroup is not None else self._child.pids
        self._meter = Meter(card, interval_s=self._settings.sample_interval_s, own_pids=own_pids)
        self.others_bytes = await asyncio.to_thread(_held_by_others, card, self._child)
        await self._meter.start()
        await self._meter.switch(Phase.LOADING)
        await self._or_end(self._until_healthy())
        capacity = await self._or_end(self.engine.capacity(self.knobs, self._log.lines()))
        self._milestone, self._load_end = "ready", self._log.count
        self._start_s = time.monotonic() - started_s
        return capacity

    def _on_line(self, raw: str) -> None:
        """Keep what may be shown: an engine quotes prompts, and nothing of them goes further than here."""
        line = self._filter(raw)
        if line is None:
            return
        self._log.add(line)
        self._settings.on_line(line)
        milestone = self._settings.backend.milestone(line)
        if milestone and milestone != self._milestone and self._milestone != "ready":
            self._milestone = milestone
            self._settings.on_progress(milestone)

    async def _until_healthy(self) -> None:
        """Poll; give up only when neither the log, the memory nor the processor time has moved for long."""
        moved_s, seen = time.monotonic(), self._progress_mark()
        while not await self.engine.healthy():
            mark = self._progress_mark()
            if mark != seen:
                moved_s, seen = time.monotonic(), mark
            elif time.monotonic() - moved_s > self._settings.stall_timeout_s:
                await self._kill()
                raise LifeEnded(self._evidence(healthy=False, body="no progress while starting"))
            await asyncio.sleep(POLL_S)

    def _progress_mark(self) -> tuple[int, int, int]:
        assert self._child is not None
        assert self._meter is not None
        return self._log.count, self._meter.used_bytes // MIB, int(self._child.cpu_s())

    # ------------------------------------------------------------ confirm

    async def confirm(self, *, full_context: bool = False) -> Confirmation:
        assert self._meter is not None
        await self._meter.switch(Phase.LOADED_IDLE)
        stable = await self._or_end(self._meter.stable(STABLE_WINDOW_S, timeout_s=STABLE_TIMEOUT_S))
        ctx = self.knobs.ctx_tokens
        steps = [
            (Phase.SHORT_REQUEST, min(SHORT_PROMPT_TOKENS, ctx // 2), SHORT_NEW_TOKENS),
            (Phase.MICRO_BATCH, min(self.knobs.prefill_tokens + 8, ctx - 2 * SHORT_NEW_TOKENS), 4),
        ]
        if full_context:
            steps.append((Phase.FULL_CONTEXT, ctx - 2 * SHORT_NEW_TOKENS, SHORT_NEW_TOKENS))
        model = await self._model_name()
        calibration = await self._or_end(self._calibrate())
        probes = []
        for phase, prompt_tokens, new_tokens in steps:
            await self._meter.switch(phase)
            probes.append(await self._probe(model, calibration.fillers(prompt_tokens), new_tokens))
        await self._meter.switch(Phase.SERVING)
        peaks = self.peaks()
        short = probes[0]
        return Confirmation(
            peaks=peaks,
            probes=tuple(probes),
            stable=bool(stable),
            start_s=self._start_s,
            peak_bytes=max((p.peak_bytes for p in peaks), default=0),
            others_bytes=self.others_bytes,
            decode_tokens_per_s=short.new_tokens / short.seconds
            if short.seconds and short.new_tokens
            else None,
        )

    async def answer(self) -> bool:
        assert self._meter is not None
        await self._meter.switch(Phase.SHORT_REQUEST)
        await self._probe(await self._model_name(), 0, 1)
        await self._meter.switch(Phase.SERVING)
        return True

    async def _model_name(self) -> str:
        return (await self._or_end(self.engine.model_names()) or ["default"])[0]

    async def _calibrate(self) -> Calibration:
        """Ask the engine how many tokens the filler text is; a guess where it cannot count."""
        path, field_name = (
            ("/v1/embeddings", "input") if self._settings.embedding else ("/v1/completions", "prompt")
        )
        try:
            counts = [
                await self.engine.count_tokens(path, {field_name: filler_text(fillers)})
                for fillers in (0, CALIBRATION_FILLERS)
            ]
        except BackendError:
            return Calibration()
        return Calibration.of(*counts)

    async def _probe(self, model: str, fillers: int, new_tokens: int) -> ProbeResult:
        result = await self._or_end(
            probe(
                self.endpoint,
                model=model,
                fillers=fillers,
                max_new_tokens=new_tokens,
                embedding=self._settings.embedding,
            )
        )
        if result.ok:
            return result
        assert self._child is not None
        with contextlib.suppress(TimeoutError):  # a broken connection is most often its death
            await asyncio.wait_for(self._child.wait(), 5.0 if result.status == 0 else 0.5)
        await self._kill()
        raise LifeEnded(self._evidence(http_status=result.status or None, body=result.body))

    # ------------------------------------------------------------ end

    async def ended(self) -> Evidence:
        """Wait for its death, or for a health check that fails for `hang_timeout_s` on end."""
        assert self._child is not None
        exit_wait = asyncio.ensure_future(self._child.wait())
        unhealthy_since_s: float | None = None
        try:
            while True:
                done, _ = await asyncio.wait({exit_wait}, timeout=1.0)
                if done:
                    return self._evidence()
                if await self.engine.healthy():
                    unhealthy_since_s = None
                    continue
                unhealthy_since_s = unhealthy_since_s or time.monotonic()
                if time.monotonic() - unhealthy_since_s > self._settings.hang_timeout_s and not done:
                    await self._kill()
                    return self._evidence(healthy=False, body="engine does not answer its health check")
        finally:
            exit_wait.cancel()

    async def stop(self, grace_s: float = 10.0) -> None:
        if self._child is not None:
            await self._child.stop(grace_s)
            await self._child.memory_gone()
        if self._meter is not None:
            await self._meter.stop()
        if self.launch is not None:
            await self.engine.close()

    async def _kill(self) -> None:
        assert self._child is not None
        self._killed_by_us = self._child.status is None
        await self._child.stop(0.5)

    async def _or_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` unless the child ends first. Raises LifeEnded."""
        assert self._child is not None
        task = asyncio.ensure_future(work)
        exit_wait = asyncio.ensure_future(self._child.wait())
        try:
            await asyncio.wait({task, exit_wait}, return_when=asyncio.FIRST_COMPLETED)
            if exit_wait.done() and not (task.done() and task.exception() is None):
                raise LifeEnded(self._evidence())
            try:
                return await task
            except NotReady as exc:
                raise LifeEnded(self._evidence(healthy=False, body=str(exc))) from exc
        finally:
            for pending in (task, exit_wait):
                pending.cancel()
            await asyncio.gather(task, exit_wait, return_exceptions=True)

    # ------------------------------------------------------------ what is known

    def load_lines(self) -> tuple[str, ...]:
        return self._log.lines()[: self._load_end or None]

    def peaks(self) -> tuple[PhasePeak, ...]:
        return self._meter.peaks() if self._meter is not None else ()

    @property
    def meter(self) -> Meter | None:
        return self._meter

    @property
    def child(self) -> Child | None:
        return self._child

    def _evidence(
        self, *, healthy: bool | None = None, http_status: int | None = None, body: str = ""
    ) -> Evidence:
        """What is known at its end; what others hold is read now, when its own memory is free again."""
        assert self._child is not None
        status: ExitStatus | None = self._child.status
        if self._card is not None and status is not None:
            with contextlib.suppress(CardLost):
                self.others_bytes = _held_by_others(self._card, self._child)
        return Evidence(
            exit=status,
            milestone=self._milestone,
            log_lines=self._log.lines(),
            http_status=http_status,
            http_body=body,
            healthy=healthy,
            killed_by_us=self._killed_by_us,
            card_total_bytes=self._meter.total_bytes if self._meter is not None else None,
            card_used_by_others_bytes=self.others_bytes,
            peaks=self.peaks(),
            oom_kills=_oom_kills(self._child, status),
        )


def _oom_kills(child: Child, status: ExitStatus | None) -> int | None:
    """The kernel's count: of the child's own cgroup while it lives, else what its end was reported with."""
    counted = child.oom_kills()
    if counted is None and status is not None:
        return status.oom_kills
    return counted


def _held_by_others(card: Card, child: Child) -> int:
    reading = card.read(child.pids())
    return max(0, reading.used_bytes - (reading.own_bytes or 0))


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port
