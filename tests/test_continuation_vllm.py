"""continuation on real vLLM: a stream that was taken back goes on as vLLM itself would go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from backend_fixtures import EngineProcess, running, vllm_case
from kvguard.continuation import read_sent
from kvguard.demand import Dialect
from request_fixtures import Stack, raw_post, serving, until

pytestmark = pytest.mark.engine

JSON = {"Content-Type": "application/json"}
TOKENS = 1500  # long enough to be taken back on the way


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    case = vllm_case(tmp_path_factory.mktemp("vllm"), float32=True)
    with running(case.backend, case.knobs) as process:
        yield process


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "one two three"}),
        ("/v1/completions", {"prompt": [5, 6, 7], "return_token_ids": True}),
    ],
)
async def test_nothing_is_lost_or_doubled(engine: EngineProcess, path: str, prompt: dict[str, Any]) -> None:
    fields = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    client = engine.backend.connect(engine.endpoint)
    async with asyncio.timeout(200):
        while not await client.healthy():  # noqa: ASYNC110 it listens a moment after it says so
            await asyncio.sleep(0.1)
    capacity = await client.capacity(engine.knobs, engine.lines)
    async with serving(
        engine.endpoint, client, capacity=capacity, dialect=Dialect.VLLM, wait_s=600.0
    ) as stack:
        asking = asyncio.create_task(raw_post(stack, path, json.dumps(fields | stream).encode(), **JSON))
        await until(lambda: _begun(stack, path) or asking.done())
        assert not asking.done(), asking.result()
        (flight,) = stack.hot.inflight.running()
        assert flight.lease is not None
        flight.lease.take_back()
        await until(lambda: flight.joint is not None)
        first = read_sent(path, list(flight.reply.transcript or [])).text
        again = {k: v for k, v in json.loads(flight.call.body).items() if k not in stream}
        status, _, answer = await asking
        assert status == 200
        _, _, rest = await raw_post(stack, path, json.dumps(again).encode(), **JSON)
        assert stack.value("kvguard_replays_total", how="continued") == 1
    await client.close()
    (choice,) = json.loads(rest)["choices"]
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    assert len(first) > 0
    assert read_sent(path, [answer]).text == first + _text(choice)
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == TOKENS


def _begun(stack: Stack, path: str) -> bool:
    """Whether some text was sent; a token that is a part of a character has none."""
    running = stack.hot.inflight.running()
    return any(len(read_sent(path, list(flight.reply.transcript or [])).text) > 20 for flight in running)


def _text(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
