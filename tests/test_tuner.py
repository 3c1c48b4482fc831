"""Self-tune on a real card (a memory cgroup) with a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvguard.journal import read_all
from tiny_gguf import write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.cgroup,
    pytest.mark.skipif(os.geteuid() != 0, reason="making a memory cgroup needs root here"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 KiB of KV a token."""
    path = tmp_path_factory.mktemp("model") / "heavy.gguf"
    return write_tiny_llama(path, layers=8, kv_heads=8, heads=8, head_dim=64, ctx=32768)


def tune(model: Path, state_dir: Path, *args: str) -> tuple[int, dict[str, Any]]:
    result = subprocess.run(
        [
            sys.executable, "-m", "kvguard.cli", "tune", str(model), "--memory-limit", "128MiB",
            "--state-dir", str(state_dir), "--json", *args,
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_tune_brackets_the_context_and_confirms_what_it_chose(model: Path, tmp_path: Path) -> None:
    code, said = tune(model, tmp_path, "--repeats", "1", "--min-ctx", "1024")
    assert code == 0
    assert said["confirmed"]
    assert said["search_restarts"] <= 4
    assert 1024 < said["largest_ctx_tokens"] < 32768
    usable = said["usable_bytes"]
    tried = [t for t in said["trials"] if t["purpose"].startswith("largest")]
    good = [t for t in tried if t["result"] == "success"]
    assert all(t["peak_bytes"] <= usable for t in good)
    assert max(t["knobs"]["ctx_tokens"] for t in good) == said["largest_ctx_tokens"]
    records, _ = read_all(tmp_path)
    assert records[-1].knobs.ctx_tokens == said["knobs"]["ctx_tokens"]
    assert records[-1].verified_prompt_tokens > 0.9 * said["knobs"]["ctx_tokens"]


def test_the_plain_ladder_stops_at_the_first_step_that_does_not_fit(model: Path, tmp_path: Path) -> None:
    code, said = tune(model, tmp_path, "--ctx-ladder", "1024,2048,32768")
    assert code == 0
    assert [t["result"] for t in said["trials"]][:2] == ["success", "success"]
    assert said["trials"][2]["result"] in ("out of memory", "over headroom")
    assert said["largest_ctx_tokens"] == 2048
