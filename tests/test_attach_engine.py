"""`kvguard serve --attach` in front of a real engine that is not ours: admission and continuation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from backend_fixtures import llama_case, running
from kvguard.domain import Capacity
from kvguard.lengths import Lengths
from load_fixtures import misled
from serve_fixtures import GuardProcess, guard

pytestmark = pytest.mark.engine

POOL_TOKENS, NEW_TOKENS, BELIEVED_TOKENS = 2048, 900, 500
CAPACITY = Capacity(pool_tokens=POOL_TOKENS, ctx_tokens=POOL_TOKENS, sequences=4)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardProcess]:
    """Believes that three fit at once, which then overrun the pool that they share."""
    folder = tmp_path_factory.mktemp("attach")
    case = llama_case("embedded", folder)
    knobs = replace(
        case.knobs, batch=CAPACITY.sequences, pool_tokens=CAPACITY.pool_tokens, ctx_tokens=CAPACITY.ctx_tokens
    )
    with running(case.backend, knobs) as engine:
        config = folder / "kvguard.toml"
        config.write_text(f'[backend]\nattach_api_key = "{engine.endpoint.api_key}"\n')
        policy = misled(CAPACITY, NEW_TOKENS, believed_tokens=BELIEVED_TOKENS)
        Lengths(policy, folder / "state", "default").keep()
        flags = ("--attach", engine.endpoint.base_url, "--config", str(config))
        with guard(*flags, state_dir=folder / "state") as process:
            process.until_ready()
            yield process


@pytest.mark.parametrize("prompt", ["one two", [5, 6, 7]])
async def test_a_pool_that_is_overrun_loses_no_stream(served: GuardProcess, prompt: Any) -> None:
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=200)

    async def stream(number: int) -> str | None:
        events = await client.completions.create(
            model="default", prompt=prompt, max_tokens=NEW_TOKENS, stream=True, seed=number,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        finish = None
        async for event in events:
            finish = event.choices[0].finish_reason or finish
        return finish

    before = await asyncio.to_thread(over_committed, served)
    async with asyncio.timeout(200):
        ends = await asyncio.gather(*(stream(number) for number in range(4)))
    assert ends == ["length"] * 4
    assert await asyncio.to_thread(over_committed, served) > before


def over_committed(process: GuardProcess) -> int:
    taken_back: int = process.get("/guard/status")[1]["admission"]["taken_back_total"]
    return taken_back + process.written().count("request_overflowed")
