"""The queue as clients see it, through `kvguard serve` in front of a real llama.cpp server.

The one place is taken by a request that goes on until it is let go, so that what the others get is decided
by the queue alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from serve_fixtures import GuardProcess, guard
from tiny_gguf import write_tiny_llama

pytestmark = pytest.mark.engine

SECRETS = {"gold": "sk-gold", "web": "sk-web", "batch": "sk-batch", "plain": "sk-plain", "small": "sk-small"}
CONFIG = """
[server]
api_keys = {gold = "sk-gold", web = "sk-web", batch = "sk-batch", plain = "sk-plain", small = "sk-small"}
[admission]
queue_keepalive = true
queue_requests = 8
weights = {gold = 4.0}
priorities = {gold = 5, plain = 5, web = 5, small = 5}
quotas = {small = {requests = 1}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardProcess]:
    state_dir = tmp_path_factory.mktemp("state")
    config = state_dir / "kvguard.toml"
    config.write_text(CONFIG)
    with guard(
        str(model), "--config", str(config), "--batch", "1", "--ctx", "4096", state_dir=state_dir
    ) as process:
        process.until_ready()
        yield process


class Queue:
    """A queue behind a place that is taken, and the order in which its requests began to be answered."""

    def __init__(self, process: GuardProcess, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.started: list[str] = []
        self.tasks: list[asyncio.Task[tuple[int, Any, Any]]] = []

    async def send(self, name: str, key: str, *, tokens: int = 4, **headers: str) -> None:
        """Send a request and wait until it waits."""
        before = len(await self.waiting())
        self.tasks.append(asyncio.create_task(self._ask(name, key, tokens, headers)))
        await self.until_waiting(before + 1)

    async def _ask(self, name: str, key: str, tokens: int, headers: dict[str, str]) -> tuple[int, Any, Any]:
        body = {"model": "default", "prompt": name, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with self.session.post(
            self.process.url + "/v1/completions", json=body, headers=_authorized(key, name, headers)
        ) as answer:
            text = b""
            async for chunk in answer.content.iter_any():
                text += chunk
                if b"data: {" in text and name not in self.started:
                    self.started.append(name)
            return answer.status, text, answer.headers

    async def waiting(self) -> list[dict[str, Any]]:
        status = await asyncio.to_thread(self.process.get, "/guard/status")
        rows: list[dict[str, Any]] = status[1]["admission"]["waiting"]
        return rows

    async def until_waiting(self, number: int) -> list[dict[str, Any]]:
        rows = (
            await asyncio.to_thread(
                self.process.until, lambda status: len(status["admission"]["waiting"]) == number
            )
        )["admission"]["waiting"]
        return list(rows)


def _refused(answer: tuple[int, Any]) -> int:
    return int(answer[1]["admission"]["refused_total"].get("overloaded", 0))


def _authorized(key: str, request_id: str, headers: dict[str, str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[key]}", "X-Request-Id": request_id, **headers}


@contextlib.asynccontextmanager
async def queue_behind_one(process: GuardProcess) -> AsyncIterator[Queue]:
    """The place is taken until the block ends; then the queue is served to its end."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        blocker = await session.post(
            process.url + "/v1/completions", json=body, headers=_authorized("web", "blocker", {})
        )
        assert blocker.status == 200
        await blocker.content.readany()
        queue = Queue(process, session)
        try:
            yield queue
            blocker.close()
            async with asyncio.timeout(60):
                await asyncio.gather(*queue.tasks)
        finally:
            blocker.close()
            for task in queue.tasks:
                task.cancel()
            await asyncio.gather(*queue.tasks, return_exceptions=True)
            await asyncio.to_thread(process.until, lambda s: s["admission"]["running"] == 0)


async def test_priority_by_key_and_by_header_decides_who_goes_first(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        await queue.send("batch", "batch", **{"X-KVGuard-Priority": "50"})  # may not: it has 0
        await queue.send("modest", "web", **{"X-KVGuard-Priority": "-1"})
        await queue.send("web", "web")
        rows = await queue.waiting()
        assert [(row["request_id"], row["priority"], row["position"]) for row in rows] == [
            ("web", 5, 1), ("batch", 0, 2), ("modest", -1, 3),
        ]  # fmt: skip
    assert queue.started == ["web", "batch", "modest"]


async def test_a_priority_that_is_none_is_a_bad_request(served: GuardProcess) -> None:
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="sk-web", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(
            model="m", prompt="a", max_tokens=2, extra_headers={"X-KVGuard-Priority": "urgent"}
        )
    assert "X-KVGuard-Priority" in refused.value.message


async def test_a_key_of_more_weight_is_given_more_while_both_wait(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        for number in range(4):
            await queue.send(f"plain{number}", "plain", tokens=64)
        for number in range(4):
            await queue.send(f"gold{number}", "gold", tokens=64)
    last = max(queue.started.index(f"gold{number}") for number in range(4))
    assert last <= 5, (
        queue.started
    )  # with equal weights the two take turns, and the last one is sixth or later
    assert queue.started.index("gold0") <= 1


async def test_a_key_over_its_quota_is_told_so_and_others_are_not(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        await queue.send("first", "small")
        status, error, headers = await queue._ask("second", "small", 4, {})
        assert (status, json.loads(error)["error"]["code"]) == (429, "rate_limited")
        assert float(headers["Retry-After"]) >= 1
        await queue.send("other", "web")
    assert set(queue.started) == {"first", "other"}


async def test_a_stream_that_cannot_start_before_its_deadline_is_refused(served: GuardProcess) -> None:
    """Before the first keep-alive the refusal is still an error of its own."""
    async with queue_behind_one(served) as queue:
        begun_s = time.monotonic()
        status, text, headers = await queue._ask("late", "web", 4, {"x-slo-ttft-ms": "300"})
        assert time.monotonic() - begun_s < 5
        assert (status, json.loads(text)["error"]["code"]) == (503, "overloaded")
        assert 1 <= float(headers["Retry-After"]) <= 120


async def test_a_full_queue_is_refused_at_once_and_the_rest_is_served(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        for number in range(8):
            await queue.send(f"in{number}", "web")
        begun_s = time.monotonic()
        status, error, headers = await queue._ask("out", "web", 4, {})
        assert time.monotonic() - begun_s < 1
        assert (status, json.loads(error)["error"]["code"]) == (503, "overloaded")
        assert 1 <= float(headers["Retry-After"]) <= 120
    assert queue.started == [f"in{number}" for number in range(8)]


async def test_the_wait_is_told_once_the_queue_has_moved(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        for number in range(8):
            await queue.send(f"a{number}", "web")
    async with queue_behind_one(served) as queue:
        await queue.send("first", "web")
        await queue.send("second", "web")
        first, second = await queue.waiting()
        assert first["expected_wait_s"] == 0
        assert second["expected_wait_s"] > 0
        assert second["waited_s"] >= 0


async def test_a_client_that_leaves_the_queue_frees_its_place_within_100_ms(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        await queue.send("leaves", "web")
        queue.tasks.pop().cancel()
        left_s = time.monotonic()
        while await queue.waiting():
            assert time.monotonic() - left_s < 0.1 + 0.1  # asking takes its time, too


async def test_the_official_client_retries_when_it_is_told_to(served: GuardProcess) -> None:
    async with queue_behind_one(served) as queue:
        for number in range(8):
            await queue.send(f"b{number}", "web")
        before = _refused(await asyncio.to_thread(served.get, "/guard/status"))
        client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="sk-gold", max_retries=5)
        asked = asyncio.create_task(client.completions.create(model="m", prompt="a", max_tokens=2))
        await asyncio.to_thread(served.until, lambda status: _refused((200, status)) > before)
    answer = await asyncio.wait_for(asked, 60)
    assert answer.usage is not None


def test_what_was_learned_of_lengths_survives_a_restart_and_holds_no_text(
    model: Path, tmp_path: Path
) -> None:
    args = (str(model), "--batch", "4", "--ctx", "2048")
    with guard(*args, state_dir=tmp_path) as process:
        process.until_ready()
        for _ in range(6):
            process.client().completions.create(model="m", prompt="xyzzy", max_tokens=40)
        assert process.stop() == 0
    (file,) = tmp_path.glob("lengths-*.json")
    first = json.loads(file.read_text())
    assert "xyzzy" not in file.read_text()
    with guard(*args, "--log-level", "info", state_dir=tmp_path) as process:
        process.until_ready()
        assert process.stop() == 0
        assert "lengths_recalled" in process.output
    assert json.loads(file.read_text())["curves"] == first["curves"]
