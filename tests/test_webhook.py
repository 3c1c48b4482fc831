"""webhook: a real HTTP server is told of each step, and one that fails or hangs delays nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kvguard import webhook
from kvguard.events import Event, Events
from kvguard.settings import SettingsError, load
from kvguard.webhook import Webhook


class Listener:
    """An HTTP server that notes what it is told; it answers with the statuses given, then with 200."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Event] = asyncio.Queue()
        self.statuses: list[int] = []
        self.hold: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        self.told.put_nowait(await request.json())
        if self.hold is not None:
            await self.hold.wait()
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200)

    async def next(self) -> str:
        event = await asyncio.wait_for(self.told.get(), 60)
        return str(event["event"])


class Pauses:
    """Stands for the clock: notes each pause and makes none."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken_s.append(seconds)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener()
    app = web.Application()
    app.router.add_post("/hook", listener.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield listener, f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def telling(url: str, events: Events, pauses: Pauses) -> AsyncIterator[None]:
    task = asyncio.create_task(Webhook(url, events, sleep=pauses).run())
    await asyncio.sleep(0)  # it subscribes
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_step_is_told_in_order_and_nothing_else() -> None:
    events, pauses = Events(), Pauses()
    async with listening() as (listener, url), telling(url, events, pauses):
        events.publish("backend_progress", milestone="loading")
        events.publish("backend_died", cause="host_ram_oom_killed", exit="signal 9, 1 oom_kill")
        events.publish("ladder_step", rung="batch")
        events.publish("config_provisional", config_id="c1")
        first = await asyncio.wait_for(listener.told.get(), 60)
        assert first["cause"] == "host_ram_oom_killed"
        assert {"event", "time", "exit"} <= first.keys()
        assert [await listener.next(), await listener.next()] == ["ladder_step", "config_provisional"]
        assert pauses.taken_s == []


async def test_a_refusal_is_tried_once_more_and_then_let_go() -> None:
    events, pauses = Events(), Pauses()
    async with listening() as (listener, url), telling(url, events, pauses):
        listener.statuses = [500, 500]
        events.publish("backend_died")
        events.publish("ladder_step")
        assert [await listener.next() for _ in range(3)] == ["backend_died", "backend_died", "ladder_step"]
        assert len(pauses.taken_s) == 2  # before the second try, and before the next event


async def test_the_pause_grows_while_nobody_answers_and_is_bounded() -> None:
    events, pauses = Events(), Pauses()
    async with listening() as (listener, url), telling(url, events, pauses):
        listener.statuses = [503] * 20
        for _ in range(11):
            events.publish("ladder_step")
        told = [await listener.next() for _ in range(21)]
        assert told == ["ladder_step"] * 21
        between_s = pauses.taken_s[1::2]
        assert between_s == sorted(between_s)
        assert between_s[-1] == webhook.LONGEST_PAUSE_S


async def test_one_that_hangs_costs_the_oldest_events_and_blocks_nobody() -> None:
    events, pauses = Events(backlog=3), Pauses()
    async with listening() as (listener, url), telling(url, events, pauses):
        listener.hold = asyncio.Event()
        events.publish("backend_died")
        assert await listener.next() == "backend_died"
        for number in range(10):  # returns at once each time: there is nothing to await
            events.publish("ladder_step", number=number)
        listener.hold.set()
        numbers = [(await asyncio.wait_for(listener.told.get(), 60))["number"] for _ in range(3)]
        assert numbers == [7, 8, 9]


def test_only_a_web_address_will_do() -> None:
    assert load(flags={"state": {"on_event": "http://localhost:1/x"}}).state.on_event
    with pytest.raises(SettingsError, match="on_event"):
        load(flags={"state": {"on_event": "ftp://nowhere"}})
