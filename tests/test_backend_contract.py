"""The contract that every adapter keeps, on its real engine.

One engine of each kind is started for the whole module; tests that end one start their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backend_fixtures import KEY, MODEL_NAME, Case, EngineProcess, free_port, make_case, running
from kvguard.domain import Endpoint, EngineSample, PoolKind, Rung
from kvguard.ports import BackendError, Engine, NotReady
from kvguard_adapters.backends import find_backend
from kvguard_adapters.backends.attach import Attach

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MARKER = "XyzzyMarker"
MILESTONES = ("weights_loading", "weights_loaded", "kv_allocated", "warmup", "ready")


@pytest.fixture(scope="module", params=["embedded", "llama-server", "llama-cpp-python", "vllm"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return make_case(request.param, folder)


@pytest.fixture(scope="module")
def process(case: Case) -> Iterator[EngineProcess]:
    with running(case.backend, case.knobs) as started:
        yield started


@pytest.fixture
async def engine(case: Case, process: EngineProcess) -> AsyncIterator[Engine]:
    client = case.backend.connect(process.endpoint)
    await until_healthy(client)
    await client.capacity(case.knobs, process.lines)  # always asked first
    yield client
    await client.close()


def client_of(process: EngineProcess) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        process.endpoint.base_url,
        headers={"Authorization": f"Bearer {KEY}"},
        connector=aiohttp.TCPConnector(force_close=True),
    )


@pytest.fixture
async def http(process: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with client_of(process) as session:
        yield session


async def until_healthy(engine: Engine) -> None:
    """An engine may say that it is ready a moment before it listens."""
    while not await engine.healthy():
        pass


async def ask(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json={"model": MODEL_NAME, **body}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer  # type: ignore[no-any-return]


async def settled(engine: Engine, running: int) -> EngineSample:
    """Wait until the engine itself says that so many requests run."""
    while (sample := await engine.sample()).running != running:
        pass
    return sample


# ---------------------------------------------------------------- before the start


def test_version_is_told(case: Case) -> None:
    assert any(character.isdigit() for character in case.backend.version())


def test_command_line_is_for_loopback_and_holds_no_key(case: Case) -> None:
    launch = case.backend.launch(case.knobs, port=18123, api_key=KEY)
    assert "18123" in launch.argv
    assert not any(KEY in word for word in launch.argv)
    assert "0.0.0.0" not in launch.argv


@pytest.mark.parametrize("rung", list(Rung))
def test_each_step_is_smaller_in_its_rung_alone(case: Case, rung: Rung) -> None:
    may_change = {
        Rung.BATCH: {"batch", "pool_tokens", "prefill_tokens"},
        Rung.CTX: {"ctx_tokens", "pool_tokens"},
        Rung.QUANT: {"quant"},
        Rung.GPU_LAYERS: {"gpu_layers"},
    }[rung]
    before = replace(case.knobs, batch=8, ctx_tokens=16384, pool_tokens=32768)
    steps = case.backend.next_steps(before, rung)
    if rung in (Rung.BATCH, Rung.CTX):
        assert steps
    for step in steps:
        assert {name for name in before.__dataclass_fields__ if getattr(step, name) != getattr(before, name)}
        for name in before.__dataclass_fields__:
            if name not in may_change:
                assert getattr(step, name) == getattr(before, name)
            elif name != "quant":
                assert getattr(step, name) <= getattr(before, name)
        before = step


# ---------------------------------------------------------------- a life


def test_milestones_come_in_order_and_end_ready(case: Case, process: EngineProcess) -> None:
    deadline_s = time.monotonic() + 30  # the engine may answer before its log is written
    while not any(case.backend.milestone(line) == "ready" for line in list(process.lines)):
        assert time.monotonic() < deadline_s, process.lines[-20:]
        time.sleep(0.02)
    seen = [name for line in list(process.lines) if (name := case.backend.milestone(line))]
    firsts = list(dict.fromkeys(seen))
    assert firsts == [name for name in MILESTONES if name in firsts]
    assert {"weights_loading", "kv_allocated", "ready"} <= set(firsts)


async def test_capacity_is_what_the_knobs_asked_for(
    case: Case, process: EngineProcess, engine: Engine
) -> None:
    capacity = await engine.capacity(case.knobs, process.lines)
    assert capacity.pool_tokens == case.knobs.pool_tokens
    assert capacity.ctx_tokens == case.knobs.ctx_tokens
    assert capacity.sequences == case.knobs.batch
    assert capacity.overflow == case.backend.capabilities.overflow


def test_printed_kv_is_the_formula(case: Case, process: EngineProcess) -> None:
    accounts = case.backend.measured(process.lines)
    assert accounts is not None
    assert accounts.kv_bytes == pytest.approx(case.kv_bytes, abs=8192)  # the log rounds to 0.01 MiB
    assert {entry.account for entry in accounts.entries if entry.size_bytes} == case.prints


def test_dry_run_tells_the_same_as_the_start(case: Case, process: EngineProcess) -> None:
    told, measured = case.backend.dry_run(case.knobs), case.backend.measured(process.lines)
    if told is None:
        pytest.skip("this engine has no dry run")
    assert measured is not None
    assert told.total_bytes == pytest.approx(measured.total_bytes, abs=4 << 20)


async def test_it_is_healthy_and_names_its_model_first(engine: Engine) -> None:
    assert await engine.healthy()
    assert (await engine.model_names())[0] == MODEL_NAME


# ---------------------------------------------------------------- tokens

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello, world"}]},
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Ünïcödé 你好 🎉"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three <|im_end|> four"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
]
PROMPTS: list[Any] = [
    "Once upon a time",
    " ",
    "the <|im_start|> special",
    [72, 101, 108, 108, 111],
    ["one prompt", "and a longer second prompt", "x"],
    [[72, 101], [108, 108, 111, 33]],
    "word " * 300,
]


@pytest.mark.parametrize("body", CHATS)
async def test_chat_count_is_what_the_engine_prefills(
    engine: Engine, http: aiohttp.ClientSession, body: dict[str, Any]
) -> None:
    answer = await ask(http, "/v1/chat/completions", {**body, "max_tokens": 1})
    assert await engine.count_tokens("/v1/chat/completions", body) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt)[:20])
async def test_prompt_count_is_what_the_engine_prefills(
    case: Case, engine: Engine, http: aiohttp.ClientSession, prompt: Any
) -> None:
    """The longest of several prompts, each of which is asked alone."""
    if isinstance(prompt, list) and not case.many_prompts:
        pytest.skip("this server takes one text a request")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    used = []
    for one in prompt if several else [prompt]:
        answer = await ask(http, "/v1/completions", {"prompt": one, "max_tokens": 1})
        used.append(answer["usage"]["prompt_tokens"])
    assert await engine.count_tokens("/v1/completions", {"prompt": prompt}) == max(used)


async def test_what_cannot_be_counted_is_an_error_not_a_guess(engine: Engine) -> None:
    with pytest.raises(BackendError):
        await engine.count_tokens("/v1/completions", {"prompt": {"neither": "text nor ids"}})
    with pytest.raises(BackendError):
        await engine.count_tokens("/v1/audio/transcriptions", {})


# ---------------------------------------------------------------- under way


async def test_a_stream_is_seen_running_and_gone_when_cancelled(
    case: Case, engine: Engine, http: aiohttp.ClientSession
) -> None:
    await settled(engine, 0)
    body = {"model": MODEL_NAME, "prompt": "Go", "max_tokens": 1900, "stream": True, **case.long_answer}
    async with http.post("/v1/completions", json=body) as response:
        await response.content.readany()
        sample = await settled(engine, 1)
        if case.backend.capabilities.reports_kv_usage:
            assert sample.kv_used_tokens
        if case.backend.capabilities.reports_slots:
            assert sample.busy_slots is not None
            assert len(sample.busy_slots) == 1
        response.close()
    await settled(engine, 0)


async def test_samples_asked_at_once_all_answer(engine: Engine) -> None:
    samples = await asyncio.gather(*(engine.sample() for _ in range(20)))
    assert all(sample.at_s > 0 for sample in samples)


async def test_wrong_key_is_an_error_that_does_not_quote_it(case: Case, process: EngineProcess) -> None:
    client = case.backend.connect(Endpoint(base_url=process.endpoint.base_url, api_key="wrong-key"))
    with pytest.raises(BackendError) as caught:
        await client.capacity(case.knobs, process.lines)
    assert "wrong-key" not in str(caught.value)
    await client.close()


QUOTED: list[tuple[str, str]] = [
    (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": MARKER}], "max_tokens": 2}),
    ),
    ("/v1/completions", json.dumps({"prompt": f"{MARKER} " * 20, "max_tokens": 2, "stream": True})),
    ("/v1/completions", f'{{"prompt": "{MARKER}", broken'),
    ("/v1/chat/completions", json.dumps({"messages": MARKER})),
    ("/v1/completions", json.dumps({"prompt": MARKER, "max_tokens": MARKER})),
    ("/v1/completions", json.dumps({"prompt": f"{MARKER} " * 4000, "max_tokens": 2})),
    (f"/v1/{MARKER}", "{}"),
    (
        "/v1/completions",
        json.dumps(
            {"prompt": "x", "max_tokens": 2, "grammar": f"{MARKER} ::= bad (\nI load: {MARKER}\n{MARKER}"}
        ),
    ),
]
"""Bodies that engines are known to quote. The last, a grammar that looks like log lines, may kill them."""


async def test_prompts_and_keys_never_pass_the_log_filter(case: Case) -> None:
    with running(case.backend, case.knobs) as started:
        client = case.backend.connect(started.endpoint)
        await until_healthy(client)
        await client.close()
        async with client_of(started) as http:
            for path, body in QUOTED:
                with contextlib.suppress(aiohttp.ClientError):
                    await post_raw(http, path, body)
        started.terminate()
        log_filter = case.backend.log_filter()
        shown = [text for line in started.lines if (text := log_filter(line))]
        assert shown
        assert any(MARKER in line for line in started.lines) == case.quotes_bodies
        assert not any(MARKER in line or KEY in line for line in shown)


async def post_raw(http: aiohttp.ClientSession, path: str, body: str) -> None:
    with contextlib.suppress(ValueError):  # vLLM wants the model's name where there is one
        body = json.dumps({"model": MODEL_NAME, **json.loads(body)})
    async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        await response.read()


# ---------------------------------------------------------------- attached to from outside


async def test_attached_it_is_recognised_and_tells_the_same(
    case: Case, process: EngineProcess, engine: Engine
) -> None:
    backend = find_backend("attach", attach=f"{process.endpoint.base_url}/v1")
    assert isinstance(backend, Attach)
    assert backend.url == process.endpoint.base_url
    client = backend.connect(process.endpoint)
    assert await client.healthy()
    assert backend.kind == case.kind
    assert await client.model_names() == await engine.model_names()
    assert (await client.sample()).at_s > 0
    own = await engine.capacity(case.knobs, process.lines)
    seen = await client.capacity(case.knobs, ())
    assert seen.ctx_tokens == own.ctx_tokens
    assert seen.pool_tokens == own.pool_tokens
    if case.kind != "openai":
        assert await client.count_tokens("/v1/chat/completions", CHATS[0]) == await engine.count_tokens(
            "/v1/chat/completions", CHATS[0]
        )
    await client.close()


async def test_attached_to_nothing_it_is_not_healthy() -> None:
    backend = find_backend("attach", attach=f"http://127.0.0.1:{free_port()}")
    client = backend.connect(Endpoint(base_url=backend.url))  # type: ignore[attr-defined]
    assert not await client.healthy()
    with pytest.raises(NotReady):
        await client.sample()
    await client.close()


# ---------------------------------------------------------------- ends


async def test_sigterm_ends_it_cleanly_and_then_nothing_answers(case: Case) -> None:
    with running(case.backend, case.knobs) as started:
        client = case.backend.connect(started.endpoint)
        await until_healthy(client)
        await client.capacity(case.knobs, started.lines)
        counted = await client.count_tokens("/v1/chat/completions", CHATS[1])
        started.terminate()
        assert not await client.healthy()
        with pytest.raises(NotReady):
            await client.sample()
        if case.counts_in_process:
            assert await client.count_tokens("/v1/chat/completions", CHATS[1]) == counted
        else:
            with pytest.raises(NotReady):
                await client.count_tokens("/v1/chat/completions", CHATS[1])
        await client.close()
        started.wait_group_gone()


def test_a_broken_model_ends_the_start_with_an_error(case: Case) -> None:
    knobs = replace(case.knobs, quant=replace(case.knobs.quant, source=case.broken_model))
    failed = EngineProcess(case.backend, knobs)
    try:
        assert failed.wait_exit() != 0
        assert not any(case.backend.milestone(line) == "ready" for line in failed.lines)
    finally:
        failed.kill()


def test_a_port_in_use_ends_the_start_with_an_error(case: Case, process: EngineProcess) -> None:
    failed = EngineProcess(case.backend, case.knobs, port=process.port)
    try:
        assert failed.wait_exit() != 0
    finally:
        failed.kill()


async def test_a_split_pool_is_told_apart(case: Case) -> None:
    if PoolKind.SPLIT not in case.backend.capabilities.pool_kinds:
        pytest.skip("this engine has one pool")
    knobs = replace(case.knobs, pool_kind=PoolKind.SPLIT, ctx_tokens=1024, pool_tokens=2048)
    with running(case.backend, knobs) as started:
        client = case.backend.connect(started.endpoint)
        await until_healthy(client)
        capacity = await client.capacity(knobs, started.lines)
        await client.close()
    assert capacity.pool_kind is PoolKind.SPLIT
    assert (capacity.pool_tokens, capacity.ctx_tokens, capacity.sequences) == (2048, 1024, 2)
