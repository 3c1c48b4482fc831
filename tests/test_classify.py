"""`kvguard classify` as a person calls it: a child process, its output and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NO_KV = "ERROR 11-07 02:20:40 [core.py:396] ValueError: No available memory for the cache blocks.\n"


def classify(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvguard.cli_classify", *arguments],
        input=text, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_log_gives_stage_cause_lines_and_remedy(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("INFO fine\n" + NO_KV)
    done = classify(str(log), "--exit", "1")
    assert done.returncode == 0
    for said in ("warmup", "kv_dont_fit", "line 2: ValueError: No available memory", "what to do", "ctx"):
        assert said in done.stdout


def test_json_from_standard_input() -> None:
    done = classify("-", "--exit", "1", "--json", text=NO_KV)
    record = json.loads(done.stdout)
    assert record["cause"] == "kv_dont_fit"
    assert record["memory"] is True
    assert record["rungs"] == ["ctx", "batch", "quant", "gpu_layers"]


def test_a_context_file_carries_signals(tmp_path: Path) -> None:
    context = tmp_path / "context.json"
    context.write_text(json.dumps({"oom_kill": 1, "last_milestone": "ready"}))
    record = json.loads(classify("-", "--signal", "9", "--context", str(context), "--json").stdout)
    assert (record["stage"], record["cause"]) == ("inference", "host_ram_oom_killed")


def test_an_unknown_cause_exits_with_1() -> None:
    assert classify("-", "--exit", "3", text="hello\n").returncode == 1


def test_running_and_well_is_benign() -> None:
    record = json.loads(classify("-", "--running", "--json", text="INFO:  Uvicorn running on x\n").stdout)
    assert record["cause"] == "benign"


@pytest.mark.parametrize(
    "arguments",
    [
        ("/nowhere/engine.log",),
        ("-", "--exit", "often"),
        ("-", "--exit", "1", "--running"),
        ("-", "--context", "/nowhere.json"),
        (),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments: tuple[str, ...]) -> None:
    done = classify(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip()


def test_a_context_that_is_no_object_is_refused(tmp_path: Path) -> None:
    context = tmp_path / "context.json"
    context.write_text("[1]")
    assert classify("-", "--context", str(context)).returncode == 2


def test_bytes_that_are_no_text_and_a_line_without_end_are_read(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff\xfe\x00" * 1_000_000 + b"\n" + NO_KV.encode())
    done = classify(str(log), "--exit", "1", "--json")
    assert json.loads(done.stdout)["cause"] == "kv_dont_fit"
    assert json.loads(done.stdout)["evidence"][0].startswith("line 2:")
