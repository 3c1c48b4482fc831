"""The official client against a real llama.cpp server behind kvguard: as direct, only safer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from backend_fixtures import EngineProcess, llama_knobs, running
from fakes import ready
from kvguard.continuation import read_sent
from kvguard.demand import Dialect
from kvguard.domain import Capacity, Knobs
from kvguard.ports import Backend
from kvguard_adapters.backends import Options, find_backend
from kvguard_adapters.models.demo import demo_model
from request_fixtures import Stack, raw_post, serving, until

pytestmark = pytest.mark.engine

TOKENS = 24
GREEDY = {"temperature": 0, "seed": 1}
PROMPT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture(scope="module")
def backend() -> Backend:
    return find_backend("embedded", Options())


@pytest.fixture(scope="module")
def knobs() -> Knobs:
    model = demo_model()
    if model is None:
        pytest.skip("pip install 'kvguard[demo]'")
    return llama_knobs(Path(model), batch=4, ctx_tokens=2048, pool_tokens=4096)


@pytest.fixture(scope="module")
def engine(backend: Backend, knobs: Knobs) -> Iterator[EngineProcess]:
    with running(backend, knobs) as process:
        yield process


@contextlib.asynccontextmanager
async def guarded(process: EngineProcess) -> AsyncIterator[Stack]:
    client = process.backend.connect(process.endpoint)
    try:
        capacity = await client.capacity(process.knobs, process.lines)
        async with serving(
            process.endpoint, client, capacity=capacity, dialect=Dialect.LLAMA_SERVER, wait_s=600.0
        ) as stack:
            yield stack
    finally:
        await client.close()


async def test_an_answer_is_the_same_as_direct(engine: EngineProcess) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, **GREEDY}).encode()
    async with guarded(engine) as stack:
        status, headers, through = await raw_post(stack, "/v1/completions", body)
        direct = await _direct(engine, "/v1/completions", body)
    assert status == 200
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert _lasting(json.loads(through)) == _lasting(json.loads(direct))


async def test_the_synchronous_client_chats(engine: EngineProcess) -> None:
    def chat(url: str) -> Any:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        return client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Say hello."}], max_tokens=5
        )

    async with guarded(engine) as stack:
        answer = await asyncio.to_thread(chat, stack.url)
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


async def test_a_stream_adds_up_to_the_whole_answer(engine: EngineProcess) -> None:
    async with guarded(engine) as stack:
        client = stack.openai()
        whole = await client.completions.create(model="m", prompt=PROMPT, max_tokens=12, **GREEDY)
        stream = await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=12, stream=True, **GREEDY
        )
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].text
        assert len(pieces) > 6
        assert stack.value("kvguard_new_tokens_total") == 24


async def test_more_than_there_are_slots_are_all_answered(engine: EngineProcess) -> None:
    async with guarded(engine) as stack:
        client = stack.openai()

        async def one(number: int) -> int:
            answer = await client.completions.create(
                model="m", prompt=f"{number} " + "word " * 50, max_tokens=5, **GREEDY
            )
            return answer.usage.completion_tokens if answer.usage else 0

        assert all(await asyncio.gather(*map(one, range(6))))
        assert stack.limiter.running == 0


async def test_a_stream_cancelled_half_way_frees_the_engine_and_then_the_place(engine: EngineProcess) -> None:
    async with guarded(engine) as stack:
        stream = await stack.openai().completions.create(
            model="m", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(3):
            await anext(aiter(stream))
        assert stack.limiter.running == 1
        await stream.close()
        await until(lambda: stack.limiter.running == 0)
        assert await _busy(stack) == 0


async def test_a_cancelled_answer_in_one_piece_keeps_its_place_while_the_engine_works(
    engine: EngineProcess,
) -> None:
    async with guarded(engine) as stack:
        asking = asyncio.create_task(
            stack.openai().completions.create(
                model="m", prompt=PROMPT, max_tokens=30, extra_body={"ignore_eos": True}
            )
        )
        await until(lambda: bool(stack.hot.inflight.running()))
        while not await _busy(stack):  # noqa: ASYNC110 the engine has no event for it
            await asyncio.sleep(0.02)
        asking.cancel()
        await until(lambda: stack.limiter.status().draining == 1)
        await until(lambda: stack.limiter.running == 0)
        assert await _busy(stack) == 0


async def test_a_prompt_over_the_context_is_refused_with_exact_numbers(engine: EngineProcess) -> None:
    async with guarded(engine) as stack:
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.openai().completions.create(model="m", prompt="word " * 3000, max_tokens=5)
        assert caught.value.code == "context_length_exceeded"
        counted = await stack.engine.count_tokens("/v1/completions", {"prompt": "word " * 3000})  # type: ignore[union-attr]
        assert f"{counted} in the prompt" in str(caught.value)


async def test_a_prompt_that_its_bound_would_refuse_but_that_fits_is_served(engine: EngineProcess) -> None:
    text = "information " * 300  # 3600 bytes, and some 300 tokens
    async with guarded(engine) as stack:
        answer = await stack.openai().completions.create(model="m", prompt=text, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 700


async def test_the_engines_own_refusal_passes(engine: EngineProcess) -> None:
    body = b'{"input": "text"}'
    async with guarded(engine) as stack:
        through = await raw_post(stack, "/v1/embeddings", body)
        direct = await _direct(engine, "/v1/embeddings", body)
    assert through[0] >= 400
    assert through[2] == direct


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_survives_the_death_of_its_engine(backend: Backend, knobs: Knobs, path: str) -> None:
    """Nothing is lost or doubled at the joint: what follows is what the new engine says behind it.

    (It need not be what the dead one would have said: prefill and decode round differently.)
    """
    with running(backend, knobs) as first, running(backend, knobs) as heir:
        async with guarded(first) as stack:
            stack.supervision.alive = False
            reading = asyncio.create_task(_stream(stack, path, kill_after=(10, first)))
            await stack.supervision.asked.wait()
            (flight,) = stack.hot.inflight._flights
            sent = read_sent(path, flight.reply.transcript or []).text
            stack.die(1)
            stack.engine = heir.backend.connect(heir.endpoint)
            capacity: Capacity | None = stack.supervision.snapshot.capacity
            assert capacity is not None
            stack.become(ready(heir.endpoint, generation=2, capacity=capacity))
            text, usage, reason, ids = await reading
            rest = await _said_behind(heir, path, sent, flight.call.body)
            await stack.engine.close()
        assert stack.value("kvguard_replays_total", how="continued") == 1
        assert len(sent) > 10
        assert text == sent + rest
        assert reason == "length"
        assert usage["completion_tokens"] == TOKENS
        assert usage["total_tokens"] == usage["prompt_tokens"] + TOKENS
        assert len(ids) == 1


async def _stream(
    stack: Stack, path: str, *, kill_after: tuple[int, EngineProcess]
) -> tuple[str, dict[str, int], str, set[str]]:
    client = stack.openai()
    options: Any = {"model": "m", "max_tokens": TOKENS, "stream": True, **GREEDY}
    options |= {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    if "chat" in path:
        messages: Any = [{"role": "user", "content": "Count from one to fifty."}]
        stream: Any = await client.chat.completions.create(messages=messages, **options)
    else:
        stream = await client.completions.create(prompt="One, two, three, four, five,", **options)
    text, usage, reason, ids, pieces = "", {}, "", set(), 0
    async for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage.model_dump() if chunk.usage is not None else usage
        for choice in chunk.choices:
            text += (choice.delta.content if "chat" in path else choice.text) or ""
            reason = choice.finish_reason or reason
            pieces += 1
        if pieces == kill_after[0]:
            kill_after[1].kill()
    return text, usage, reason, ids


async def _said_behind(engine: EngineProcess, path: str, sent: str, body: bytes) -> str:
    """Ask the engine itself, in one piece, for what `body` asked it for as a stream."""
    request = {k: v for k, v in json.loads(body).items() if k not in ("stream", "stream_options")}
    (choice,) = json.loads(await _direct(engine, path, json.dumps(request).encode()))["choices"]
    if "chat" in path:
        content: str = choice["message"]["content"]
        return content.removeprefix(sent)
    text: str = choice["text"]
    return text


async def _busy(stack: Stack) -> int:
    assert stack.engine is not None
    return (await stack.engine.sample()).running or 0


async def _direct(engine: EngineProcess, path: str, body: bytes) -> bytes:
    headers = {"Authorization": f"Bearer {engine.endpoint.api_key}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.endpoint.base_url + path, data=body, headers=headers) as response,
    ):
        return await response.read()


def _lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same request have in common."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    return {k: v for k, v in answer.items() if k not in ("id", "created", "timings")} | {"usage": usage}
