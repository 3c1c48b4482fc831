"""No request is lost when the backend dies under `kvguard serve`: a real engine, killed for real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvguard.domain import MIB
from recovery_fixtures import (
    DIGITS_ONLY,
    NEEDS_CGROUP,
    container,
    failed_records,
    hog,
    metric,
    run_out_of_memory,
    write_heavy_llama,
)
from serve_fixtures import GuardProcess, guard
from tiny_gguf import write_tiny_llama

pytestmark = pytest.mark.engine

NEW_TOKENS = 700
OPTIONS: dict[str, Any] = {
    "model": "default",
    "temperature": 0,
    "max_tokens": NEW_TOKENS,
    "logit_bias": DIGITS_ONLY,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heavy_llama(tmp_path_factory.mktemp("model") / "heavy.gguf")


class Streamed:
    """One stream as its client sees it."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.under_way = asyncio.Event()

    async def read(self, stream: Any) -> Streamed:
        async for chunk in stream:
            self.chunks.append(chunk)
            if len(self.chunks) >= 5:
                self.under_way.set()
        return self

    @property
    def ids(self) -> set[str]:
        return {chunk.id for chunk in self.chunks}

    @property
    def text(self) -> str:
        choices = [chunk.choices[0] for chunk in self.chunks if chunk.choices]
        return "".join((c.delta.content if hasattr(c, "delta") else c.text) or "" for c in choices)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [chunk.choices[0] for chunk in self.chunks if chunk.choices]
        return [choice.finish_reason for choice in choices if choice.finish_reason]

    @property
    def usage(self) -> tuple[int, int]:
        [usage] = [chunk.usage for chunk in self.chunks if chunk.usage]
        return usage.prompt_tokens, usage.completion_tokens


class Clients:
    """Several clients of one kvguard, of every kind, at once."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.streams: list[Streamed] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def whole(self, prompt: str) -> None:
        self._go(self._client.completions.create(prompt=prompt, **OPTIONS))

    def stream(self, prompt: str, **options: Any) -> None:
        streamed = Streamed()
        self.streams.append(streamed)
        self._go(self._stream(streamed, self._client.completions, prompt=prompt, **options))

    def chat(self, text: str) -> None:
        streamed = Streamed()
        self.streams.append(streamed)
        messages = [{"role": "user", "content": text}]
        self._go(self._stream(streamed, self._client.chat.completions, messages=messages))

    async def _stream(self, streamed: Streamed, resource: Any, **fields: Any) -> Streamed:
        options = {**OPTIONS, "stream": True, "stream_options": {"include_usage": True}, **fields}
        return await streamed.read(await resource.create(**options))

    def _go(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def until_under_way(self) -> None:
        for streamed in self.streams:
            await asyncio.wait_for(streamed.under_way.wait(), 120)

    async def answers(self) -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 240)


async def until(process: GuardProcess, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return await asyncio.to_thread(process.until, condition)


def client_of(process: GuardProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0, timeout=240)


@pytest.mark.cgroup
@NEEDS_CGROUP
async def test_every_client_is_answered_when_the_kernel_kills_the_engine_for_memory(
    model: Path, tmp_path: Path
) -> None:
    args = (str(model), "--memory-limit", "600MiB", "--batch", "4", "--ctx", "4096")
    with guard(*args, state_dir=tmp_path) as process:
        await asyncio.to_thread(process.until_ready)
        async with client_of(process) as client:
            undisturbed = await client.completions.create(prompt="1 and 2 make", **OPTIONS)
            clients = Clients(client)
            clients.stream("1 and 2 make")
            clients.stream("3 and 4 make")
            clients.chat("5 and 6 make what?")
            clients.whole("7 and 8 make")
            await clients.until_under_way()
            for number in range(3):
                clients.whole(f"{number} waits for")
            await until(process, lambda s: len(s["admission"]["waiting"]) == 3)
            await asyncio.to_thread(run_out_of_memory, process)
            answers = await clients.answers()
        assert not [answer for answer in answers if isinstance(answer, BaseException)]
        for streamed in clients.streams:
            assert len(streamed.ids) == 1
            assert streamed.finish_reasons == ["length"]
            assert (streamed.usage[1], len(streamed.text)) == (NEW_TOKENS, NEW_TOKENS)
        assert undisturbed.usage is not None
        assert clients.streams[0].usage[0] == undisturbed.usage.prompt_tokens
        for answer in answers:
            if not isinstance(answer, Streamed):
                assert answer.usage.completion_tokens == NEW_TOKENS
        assert metric(process, "kvguard_replays_total", how="continued") == 3
        assert metric(process, "kvguard_replays_total", how="replayed") == 1
        [record] = failed_records(process)
        assert record["failure"]["exit"] in ("signal 9, 1 oom_kill", "signal 9, 2 oom_kill")  # or both
        assert record["failure"]["stage"] == "inference"
        status = process.get("/guard/status")[1]
        assert (status["generation"], status["degraded_by"]) == (2, ["batch"])


@pytest.mark.cgroup
@NEEDS_CGROUP
def test_a_configuration_that_failed_while_others_held_the_memory_comes_back_when_they_are_gone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,300 MiB carry kvguard and a batch of 8 (512 MiB of KV), but not 800 MiB of a neighbour's too.

    The kernel chooses whom it kills: it must be the engine, not the larger neighbour and not us.
    """
    monkeypatch.setenv("KVGUARD_DEGRADE__QUIET_S", "0.5")
    args = (str(model), "--batch", "8", "--ctx", "4096")
    with container(1300 * MIB) as cgroup, guard(*args, state_dir=tmp_path, inside=cgroup) as process:
        process.until_ready()
        wanted = process.get("/guard/status")[1]["knobs"]
        with hog(cgroup, 800 * MIB) as neighbour:
            try:
                process.until_line("backend_died")
                status = process.until(lambda s: s["state"] == "ready" and s["generation"] > 1)
                assert status["degraded_by"]
            finally:
                neighbour.kill()
        status = process.until(lambda s: s["state"] == "ready" and not s["degraded_by"])
        assert status["knobs"] == wanted
        died = next(line for line in process.lines if "backend_died" in line)
        assert "memory_held_by_others" in died or "other processes hold" in died
        failures = failed_records(process)
        assert failures
        assert all(record["others_bytes"] > 700 * MIB for record in failures)
        assert process.stop() == 0
    with container(1300 * MIB) as cgroup, guard(*args, state_dir=tmp_path, inside=cgroup) as process:
        process.until_ready()
        assert process.get("/guard/status")[1]["knobs"] == wanted


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 32,000 tokens: `n_probs` of all of them take about 2 MB a token of the answer."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "wordy.gguf", vocab=32000, ctx=8192)


@pytest.mark.cgroup
@NEEDS_CGROUP
async def test_one_poisonous_request_is_refused_and_the_innocent_beside_it_are_served(
    wordy_model: Path, tmp_path: Path
) -> None:
    """It makes the engine run out of memory in every configuration, so no step of the ladder helps."""
    args = (str(wordy_model), "--memory-limit", "400MiB", "--batch", "4", "--ctx", "8192")
    with guard(*args, state_dir=tmp_path) as process:
        await asyncio.to_thread(process.until_ready)
        async with client_of(process) as client:
            clients = Clients(client)
            clients.whole("an innocent one")
            clients.stream("another")
            poison = client.completions.create(
                prompt="poison", model="default", max_tokens=4000, temperature=0,
                extra_body={"ignore_eos": True, "n_probs": 32000},
            )  # fmt: skip
            refused, answers = await asyncio.gather(poison, clients.answers(), return_exceptions=True)
        assert isinstance(refused, openai.BadRequestError)
        assert refused.code == "request_poisonous"
        assert isinstance(answers, list)
        assert not [answer for answer in answers if isinstance(answer, BaseException)]
        assert clients.streams[0].finish_reasons == ["length"]
        failures = failed_records(process)
        assert 1 <= len(failures) <= 2
        status = await until(process, lambda s: s["state"] == "ready")
        assert len(failures) == sum("ladder_step" in line for line in process.lines)
        assert status["generation"] == len(failures) + 2
