"""`kvguard serve` as its user runs it: a real engine, the official client, real memory limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvguard.journal import read_all
from serve_fixtures import GuardProcess, gone, guard
from tiny_gguf import write_tiny_llama

pytestmark = pytest.mark.engine

SECRET_PROMPT = "xyzzy-plugh-1729 is what nobody may read in a log"
NEEDS_CGROUP = pytest.mark.skipif(os.geteuid() != 0, reason="making a memory cgroup needs root here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def heavy_kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 KiB of KV a token: contexts that take memory for real."""
    path = tmp_path_factory.mktemp("model") / "heavy.gguf"
    return write_tiny_llama(path, layers=8, kv_heads=8, heads=8, head_dim=64, ctx=32768)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardProcess]:
    state_dir = tmp_path_factory.mktemp("state")
    with guard(str(model), "--batch", "2", "--log-level", "debug", state_dir=state_dir) as process:
        process.until_ready()
        yield process


def test_the_official_client_chats_streams_and_counts(served: GuardProcess) -> None:
    client = served.client()
    answer = client.chat.completions.create(
        model="default", max_tokens=8, messages=[{"role": "user", "content": SECRET_PROMPT}]
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    events = list(
        client.completions.create(
            model="tiny-llama", prompt=SECRET_PROMPT, max_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 8
    assert [m.id for m in client.models.list()]


async def test_a_stream_that_is_cancelled_half_way_frees_its_place(served: GuardProcess) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="default", prompt="once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    status = await asyncio.to_thread(served.until, lambda s: s["admission"]["running"] == 0)
    assert status["admission"]["waiting"] == []


def test_errors_have_the_shape_and_the_numbers_that_clients_expect(served: GuardProcess) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="default", prompt="word " * 9000, max_tokens=8)
    assert too_long.value.code == "context_length_exceeded"
    assert "4096" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as negative:
        client.completions.create(model="default", prompt="a", max_tokens=-5)
    assert negative.value.code == "invalid_request"
    assert served.get("/health") == (200, served.get("/health")[1])


def test_a_ten_megabyte_prompt_is_refused_and_the_server_goes_on(served: GuardProcess) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="default", prompt="a b" * 3_500_000, max_tokens=8)
    assert client.completions.create(model="default", prompt="a", max_tokens=2).usage is not None


def test_nothing_that_was_asked_is_written_anywhere(served: GuardProcess) -> None:
    served.client().completions.create(model="default", prompt=SECRET_PROMPT, max_tokens=4)
    for text in (served.written(), served.output):
        assert "xyzzy" not in text
        assert "LLAMA_API_KEY" not in text


def test_the_journal_tells_what_was_confirmed_and_the_next_start_uses_it(model: Path, tmp_path: Path) -> None:
    for start in (1, 2, 3):
        with guard(str(model), "--batch", "2", "--ctx", "2048", state_dir=tmp_path) as process:
            process.until_ready()
            assert process.stop() == 0
        records, skipped = read_all(tmp_path)
        assert (len(records), skipped) == (start, 0)
    assert [r.event for r in records] == ["config_provisional", "config_provisional", "config_confirmed"]
    assert records[1].why is not None
    assert records[1].why.from_id == records[0].id
    assert records[0].measured
    assert {"loading", "loaded_idle", "short_request", "micro_batch"} <= {p.phase for p in records[0].memory}


def test_an_engine_that_is_killed_comes_back_and_the_queue_survives(model: Path, tmp_path: Path) -> None:
    with guard(str(model), "--batch", "1", state_dir=tmp_path) as process:
        process.until_ready()
        [engine] = [p for p in process.engine_pids() if "embedded_server" in _command(p)]
        os.kill(engine, signal.SIGKILL)
        process.until_line("backend_died")
        answer = process.client().completions.create(model="default", prompt="hello", max_tokens=4)
        assert answer.usage is not None
        status = process.until(lambda s: s["state"] == "ready")
        assert status["generation"] == 2
        assert status["degraded_by"] == []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_kvguard_goes(model: Path, tmp_path: Path, number: int) -> None:
    with guard(str(model), "--memory-limit", "600MiB", "--batch", "1", state_dir=tmp_path) as process:
        process.until_ready()
        pids = process.engine_pids()
        assert len(pids) >= 2
        code = process.stop(number)
        assert code == (0 if number != signal.SIGKILL else -signal.SIGKILL)
        assert gone(pids)


@pytest.mark.cgroup
@NEEDS_CGROUP
def test_a_context_too_large_for_the_card_walks_the_ladder_until_it_serves(
    heavy_kv_model: Path, tmp_path: Path
) -> None:
    """300 MiB carry no pool of 32,768 tokens at 16 KiB: the kernel kills for real, and kvguard steps down."""
    args = (str(heavy_kv_model), "--memory-limit", "300MiB", "--pool", "32768")
    with guard(*args, state_dir=tmp_path) as process:
        process.until_ready()
        status = process.get("/guard/status")[1]
        assert status["degraded_by"]
        assert status["knobs"]["pool_tokens"] < 32768
        answer = process.client().completions.with_raw_response.create(
            model="default", prompt="hello", max_tokens=4
        )
        assert "degraded" in answer.headers["x-kvguard-config"]
        failed = [r for r in process.records() if r["event"] == "config_failed"]
        assert failed
        assert failed[0]["failure"]["exit"] == "signal 9, 1 oom_kill"
    with guard(*args, state_dir=tmp_path) as again:
        again.until_ready()
        assert again.get("/guard/status")[1]["knobs"] == status["knobs"]
        assert sum(r["event"] == "config_failed" for r in again.records()) == len(failed)


# ---------------------------------------------------------------- what cannot be served


def _cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvguard.cli", *args], capture_output=True, text=True, timeout=120, check=False
    )


def _broken_files(directory: Path) -> dict[str, Path]:
    whole = write_tiny_llama(directory / "whole.gguf").read_bytes()
    files = {
        "text": b"not a model at all",
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "header": whole[:40],
    }
    for name, content in files.items():
        (directory / f"{name}.gguf").write_bytes(content)
    return {name: directory / f"{name}.gguf" for name in files}


@pytest.mark.parametrize("name", ["text", "empty", "half", "header"])
def test_a_broken_file_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    path = _broken_files(tmp_path)[name]
    result = _cli("serve", str(path), "--port", "0", "--state-dir", str(tmp_path / "state"))
    assert result.returncode == 1
    assert "error:" in result.stderr
    assert path.name in result.stderr
    assert "Traceback" not in result.stderr


def test_no_such_path_and_an_empty_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.gguf", tmp_path):
        result = _cli("serve", str(path), "--port", "0", "--state-dir", str(tmp_path / "state"))
        assert (result.returncode, "Traceback" in result.stderr) == (1, False)
        assert str(path) in result.stderr


def test_a_port_in_use_is_told_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = _cli("serve", str(model), "--port", str(port), "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert "--port" in result.stderr


def test_a_card_too_small_for_anything_names_the_account(model: Path, tmp_path: Path) -> None:
    result = _cli("serve", str(model), "--memory-limit", "8MiB", "--port", "0", "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert "What would help" in result.stderr


def test_usage_errors_exit_with_two(model: Path, tmp_path: Path) -> None:
    for flags in (["--memory-limit", "lots"], ["--host", "0.0.0.0"], ["--backend", "nonsense"]):
        result = _cli("serve", str(model), "--state-dir", str(tmp_path), *flags)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr


def test_dry_run_prints_accounts_and_command_and_starts_nothing(model: Path, tmp_path: Path) -> None:
    result = _cli("serve", str(model), "--dry-run", "--json", "--state-dir", str(tmp_path))
    assert result.returncode == 0
    said = json.loads(result.stdout)
    assert said["fits"] is True
    assert said["weights_bytes"] > 0
    assert any("embedded_server" in part or "llama-server" in part for part in said["command"])
    assert not list(tmp_path.glob("*.jsonl"))
