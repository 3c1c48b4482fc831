"""The demo on a real engine: what kills the engine alone, kvguard serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

REPO = Path(__file__).parent.parent


@pytest.mark.engine
@pytest.mark.cgroup
@pytest.mark.timeout(900)
def test_a_start_that_is_killed_alone_serves_through_kvguard(tmp_path: Path) -> None:
    server = subprocess.run(
        [sys.executable, REPO / "scripts" / "engines.py", "path", "llama-server"],
        capture_output=True,
        text=True,
        check=False,
    )
    if server.returncode:
        message = server.stderr.strip()
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    ran = subprocess.run(
        [sys.executable, REPO / "bench" / "demo.py", "--case", "start", "--json", "--keep", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 2 and "no memory cgroup" in ran.stderr and not os.environ.get("CI"):
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    alone, guarded = json.loads(ran.stdout)["outcomes"]
    assert (alone["answered"], alone["engine_exit"], alone["oom_kills"]) == (0, "killed, rc 137", 1)
    assert (guarded["answered"], guarded["engine_exit"], guarded["oom_kills"]) == (1, "running", 0)
    assert alone["load_mode"] == guarded["load_mode"] == "none"
    schema = json.loads((REPO / "docs" / "journal.schema.json").read_text())
    (journal,) = (tmp_path / "start-state").glob("journal-*.jsonl")
    for line in journal.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
