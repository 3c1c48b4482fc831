"""Doubles that other tests may use: a supervisor that is told what to say, and engines as child processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from kvguard.domain import Capacity, Demand, Ending, Endpoint, EngineSample, Knobs, Snapshot, State
from kvguard.ports import NotReady

CAPACITY = Capacity(pool_tokens=8192, ctx_tokens=2048, sequences=4)
FAKE_KEY = "the-engines-own-key"


class FakeSupervision:
    """`ports.Supervision` with a snapshot that the test sets; waiters wake at each one."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._snapshot = snapshot or Snapshot(generation=0, state=State.STARTING)
        self._changed = asyncio.Event()
        self._listeners: list[Any] = []
        self.alive = True  # what a verdict says of the present life
        self.asked = asyncio.Event()  # set once a verdict was asked for

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def listen(self, listener: Any) -> None:
        self._listeners.append(listener)

    def set(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        for listener in self._listeners:
            listener(snapshot)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, than: Snapshot) -> Snapshot:
        while self._snapshot is than:
            await self._changed.wait()
        return self._snapshot

    async def verdict(self, generation: int) -> Snapshot:
        self.asked.set()
        while True:
            snapshot = self._snapshot
            if snapshot.state in (State.FAILED, State.STOPPED):
                return snapshot
            if snapshot.ready and (snapshot.generation > generation or self.alive):
                return snapshot
            await self.changed(than=snapshot)


def ready(endpoint: Endpoint, *, generation: int = 1, capacity: Capacity = CAPACITY) -> Snapshot:
    return Snapshot(
        generation=generation, state=State.READY, capacity=capacity, endpoint=endpoint, config_id="cfg1"
    )


class EngineChild:
    """`fake_engine.py` as a child process."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: Endpoint) -> None:
        self.process = process
        self.endpoint = endpoint

    @classmethod
    async def start(cls, *, life: int = 1, api_key: str = FAKE_KEY) -> EngineChild:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("fake_engine.py")),
            f"--life={life}",
            f"--api-key={api_key}",
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        port = int((await process.stdout.readline()).decode())
        return cls(process, Endpoint(base_url=f"http://127.0.0.1:{port}", api_key=api_key))

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def state(self) -> dict[str, Any]:
        return await _get(self.endpoint, "/fake/state")

    async def release(self) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.endpoint.base_url + "/fake/release") as response,
        ):
            response.raise_for_status()


class FakeClient:
    """`ports.Engine` for an EngineChild: a word is a token."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.counted: list[str] = []

    async def healthy(self) -> bool:
        return True

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        return CAPACITY

    async def sample(self) -> EngineSample:
        state = await _get(self.endpoint, "/fake/state")
        return EngineSample(at_s=0.0, running=state["running"], waiting=0)

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        self.counted.append(path)
        text = body.get("prompt") or " ".join(str(m.get("content")) for m in body.get("messages", []))
        return len(str(text).split())

    async def model_names(self) -> Sequence[str]:
        return ["fake"]

    async def close(self) -> None:
        pass


async def _get(endpoint: Endpoint, path: str) -> dict[str, Any]:
    try:
        async with aiohttp.ClientSession() as session, session.get(endpoint.base_url + path) as response:
            return await response.json()  # type: ignore[no-any-return]
    except aiohttp.ClientError as exc:
        raise NotReady(str(exc)) from exc


class OpenLease:
    """A lease that notes what the request path told it."""

    def __init__(self, generation: int, demand: Demand) -> None:
        self.generation = generation
        self.demand = demand
        self.new_tokens = 0
        self.draining = False
        self.live = True
        self.ended = asyncio.Event()
        self.ending: Ending | None = None

    def progress(self, new_tokens: int) -> None:
        self.new_tokens = new_tokens

    def reprice(self, demand: Demand) -> None:
        self.demand = demand

    def drain(self) -> None:
        self.draining = True

    def release(self, ending: Ending, new_tokens: int | None = None) -> None:
        assert self.ending is None, "released twice"
        self.ending = ending
        self.ended.set()
