"""kvguard's request path, served over a real socket, in front of an engine that is a child process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import uvicorn

from fakes import CAPACITY, EngineChild, FakeClient, FakeSupervision, ready
from kvguard.api.admin import AdminParts, make_admin
from kvguard.api.auth import Keys
from kvguard.api.openai import GuardApp, GuardSettings
from kvguard.demand import Dialect
from kvguard.domain import Capacity, Endpoint, Refusal, Snapshot, State
from kvguard.events import Events
from kvguard.limiter import Limiter
from kvguard.metrics import Metrics
from kvguard.ports import Engine
from kvguard_policies.admission import Reserve
from kvguard_policies.ordering import FairOrder


@dataclass(kw_only=True)
class Stack:
    """Everything between a client and an engine."""

    url: str
    supervision: FakeSupervision
    limiter: Limiter
    hot: GuardApp
    metrics: Metrics
    events: Events
    engine: Engine | None = None
    app: Any = None

    def become(self, snapshot: Snapshot) -> None:
        """What the supervisor's listener does in the application."""
        if snapshot.ready and snapshot.capacity is not None:
            self.limiter.resize(snapshot.generation, snapshot.capacity)
        else:
            self.limiter.pause()
        if snapshot.state is State.FAILED:
            self.limiter.refuse_all(Refusal(code="backend_failed", message=snapshot.detail))
        self.supervision.set(snapshot)

    def die(self, generation: int, *, memory: bool = True) -> bool:
        """A backend life ends, as the supervisor would tell it."""
        self.become(self.supervision.snapshot.with_(state=State.STARTING, endpoint=None))
        return self.hot.inflight.crashed(generation, memory=memory)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "api_key": "none", **options}
        return openai.AsyncOpenAI(base_url=self.url + "/v1", **options)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def serving(
    endpoint: Endpoint,
    engine: Engine | None,
    *,
    capacity: Capacity = CAPACITY,
    dialect: Dialect = Dialect.VLLM,
    keys: dict[str, str] | None = None,
    admin_keys: dict[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    limiter = Limiter(policy=Reserve(), order=FairOrder(), **options.pop("limiter", {}))
    supervision = FakeSupervision()
    metrics, events = Metrics(), Events()
    stack: Stack
    settings = GuardSettings(keys=Keys(keys or {}), dialect=lambda: dialect, **options)
    hot = GuardApp(
        supervision=supervision,
        limiter=limiter,
        engine=lambda: stack.engine,
        settings=settings,
        metrics=metrics,
    )
    parts = AdminParts(
        supervision=supervision,
        metrics=metrics,
        events=events,
        admin_keys=Keys(admin_keys or {}),
        status=lambda: {"running": limiter.running},
        configs=list,
        plan=_plan,
    )
    config = uvicorn.Config(
        make_admin(parts, hot), port=0, log_level="warning", access_log=False,
        server_header=False, date_header=False, lifespan="off",
    )  # fmt: skip
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        background = tasks.create_task(hot.run(), name="request-path")
        running = tasks.create_task(server.serve(), name="server")
        await server.up.wait()
        port = server.servers[0].sockets[0].getsockname()[1]
        stack = Stack(
            url=f"http://127.0.0.1:{port}", supervision=supervision, limiter=limiter, hot=hot,
            metrics=metrics, events=events, engine=engine, app=config.app,
        )  # fmt: skip
        stack.become(ready(endpoint, capacity=capacity))
        try:
            yield stack
        finally:
            server.should_exit = server.force_exit = True
            await running
            background.cancel()
            await hot.close()


@contextlib.asynccontextmanager
async def fake_stack(**options: Any) -> AsyncIterator[tuple[Stack, EngineChild]]:
    child = await EngineChild.start()
    try:
        async with serving(child.endpoint, FakeClient(child.endpoint), **options) as stack:
            yield stack, child
    finally:
        await child.stop()


@contextlib.asynccontextmanager
async def reborn(stack: Stack, child: EngineChild) -> AsyncIterator[EngineChild]:
    """Wait until `child` is dead and somebody asks for the verdict, then start its next life."""
    await child.process.wait()
    await stack.supervision.asked.wait()
    stack.supervision.asked.clear()
    generation = stack.supervision.snapshot.generation
    stack.die(generation)
    heir = await EngineChild.start(life=generation + 1)
    try:
        stack.engine = FakeClient(heir.endpoint)
        stack.become(ready(heir.endpoint, generation=generation + 1))
        yield heir
    finally:
        await heir.stop()


async def raw_post(stack: Stack, path: str, body: bytes, **headers: str) -> tuple[int, Any, bytes]:
    """POST as it is. Returns status, headers and body."""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(stack.url + path, data=body, headers=headers) as response,
    ):
        return response.status, response.headers, await response.read()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until a condition holds that nothing signals."""
    async with asyncio.timeout(200):
        while not condition():  # noqa: ASYNC110 there is no event to wait for
            await asyncio.sleep(0.005)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave the signals to pytest."""
        yield


async def _plan(_: dict[str, str]) -> dict[str, Any]:
    return {}
