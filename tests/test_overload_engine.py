"""What happens when far more is asked than fits: a real llama.cpp server, its own pool, its own failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from kvguard.domain import Capacity
from kvguard.lengths import Lengths
from load_fixtures import ask, best_rate_per_s, misled, storm
from serve_fixtures import GuardProcess, guard
from tiny_gguf import write_tiny_llama

pytestmark = pytest.mark.engine

POOL_TOKENS, SLOTS, NEW_TOKENS = 3072, 8, 1200
BELIEVED_TOKENS = 700
CAPACITY = Capacity(pool_tokens=POOL_TOKENS, ctx_tokens=2048, sequences=SLOTS)

CONFIG = f"""
[knobs]
batch = {SLOTS}
ctx_tokens = 2048
pool_tokens = {POOL_TOKENS}
pool_kind = "unified"
[admission]
queue_requests = 16
[model]
alias = "tiny"
[state]
log_level = "info"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[GuardProcess]:
    (tmp_path / "kvguard.toml").write_text(CONFIG)
    Lengths(misled(CAPACITY, NEW_TOKENS, believed_tokens=BELIEVED_TOKENS), tmp_path, "tiny").keep()
    with guard(str(model), "--config", str(tmp_path / "kvguard.toml"), state_dir=tmp_path) as process:
        process.until_ready()
        yield process


def admission(process: GuardProcess) -> dict[str, Any]:
    status: dict[str, Any] = process.get("/guard/status")[1]["admission"]
    return status


async def test_when_every_prediction_is_wrong_nothing_fails(served: GuardProcess) -> None:
    """Believes that four fit at once, then each runs to its maximum, and three overflow the pool."""
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=200)

    async def stream(number: int) -> int:
        events = await client.completions.create(
            model="m", prompt=f"number {number}", max_tokens=NEW_TOKENS, stream=True, seed=number,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        finish, tokens = None, 0
        async for event in events:
            if event.choices:
                finish = event.choices[0].finish_reason or finish
            if event.usage is not None:
                tokens = event.usage.completion_tokens
        assert finish == "length"
        return tokens

    async with asyncio.timeout(200):
        tokens = await asyncio.gather(*(stream(number) for number in range(2 * SLOTS)))
    # Text that is continued is counted anew by the tokenizer, and random bytes come out as fewer tokens.
    assert min(tokens) >= NEW_TOKENS
    state = await asyncio.to_thread(admission, served)
    overflowed = served.written().count("request_overflowed")
    assert state["taken_back_total"] + overflowed > 0, "nothing was over-committed: this run shows nothing"


async def test_far_more_load_than_fits_is_answered_and_leaves_no_trace(served: GuardProcess) -> None:
    body = {"model": "m", "prompt": "once", "max_tokens": 64, "ignore_eos": True}
    best = await best_rate_per_s(served.url, body, clients=SLOTS, seconds=2)
    process = psutil.Process(served.process.pid)
    await storm(served.url, [body], rate_per_s=10 * best, seconds=1)
    before_bytes = process.memory_info().rss
    result = await storm(served.url, [body], rate_per_s=10 * best, seconds=4)
    assert [answer for answer in result.answers if not answer.in_order] == []
    assert {"200", "503 overloaded"} == set(result.counts())
    assert process.memory_info().rss - before_bytes < 16 << 20
    assert result.served / result.seconds > 0.5 * best  # on two cores that all share
    state = await asyncio.to_thread(admission, served)
    assert (state["running"], state["waiting"]) == (0, [])
    async with aiohttp.ClientSession() as session:
        first = await ask(session, served.url, {**body, "max_tokens": 1})
    assert first.served
    assert first.took_s < 1
