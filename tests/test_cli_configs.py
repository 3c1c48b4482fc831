"""`kvguard configs`: what it shows, finds, compares and exports, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvguard import cli_configs
from kvguard.domain import (
    MIB,
    Basis,
    CardInfo,
    Entry,
    Knobs,
    Phase,
    PhasePeak,
    PoolKind,
    Rung,
    Stage,
    Variant,
)
from kvguard.journal import (
    BackendRecord,
    FailureRecord,
    Fingerprint,
    ModelRecord,
    Record,
    WhyRecord,
    card_record,
    journal_of,
)

SMALL = CardInfo(kind="cgroup", name="kvguard/a", total_bytes=600 * MIB)
GPU = CardInfo(kind="nvml", name="NVIDIA H200", total_bytes=140_000 * MIB, driver="560.1")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m [q4].gguf"
    path.write_bytes(b"x" * 1000)
    return path


@pytest.fixture
def state(tmp_path: Path, weights: Path) -> Path:
    """Three records: confirmed on a GPU, confirmed in a cgroup, then failed there with more batch."""
    quant = Variant(kind="gguf", source=str(weights), bits=4.9, label="Q4_K_M", size_bytes=1000)
    knobs = Knobs(batch=4, ctx_tokens=2048, pool_tokens=8192, pool_kind=PoolKind.UNIFIED, quant=quant)
    peak = PhasePeak(
        phase=Phase.LOADED_IDLE,
        peak_bytes=310 * MIB,
        last_bytes=300 * MIB,
        source="cgroup v1",
        interval_s=0.05,
        samples=9,
        started_at=1.0,
        ended_at=2.0,
    )
    shared: dict[str, Any] = {
        "backend": BackendRecord(name="llama-server", version="b1"),
        "model": ModelRecord(name="gemma"),
        "knobs": knobs,
        "memory": (peak,),
        "predicted": (Entry(account="kv", name="cells", size_bytes=84 * MIB, basis=Basis.EXACT),),
        "measured": (Entry(account="kv", name="cells", size_bytes=85 * MIB, basis=Basis.MEASURED),),
        "command": ("llama-server", "-m", str(weights), "-np", "4"),
    }
    gpu = Record(
        id="20261201-000001-aaaaaa",
        time="2026-12-01T00:00:01.000+00:00",
        event="config_confirmed",
        card=card_record(GPU),
        **shared,
    )
    worked = msgspec.structs.replace(
        gpu, id="20261201-000002-bbbbbb", time="2026-12-01T00:00:02.000+00:00", card=card_record(SMALL)
    )
    failed = msgspec.structs.replace(
        worked,
        id="20261201-000003-cccccc",
        time="2026-12-01T00:00:03.000+00:00",
        event="config_failed",
        knobs=replace(knobs, batch=8, pool_tokens=16_384),
        why=WhyRecord(kind="degraded", from_id=worked.id, rung=Rung.BATCH),
        failure=FailureRecord(
            stage=Stage.LOAD, causes=("kv_dont_fit",), confidence=0.9, exit="signal 9, 1 oom_kill"
        ),
        measured=(),
    )
    directory = tmp_path / "state"
    journal_of(directory, GPU).append(gpu)
    journal_of(directory, SMALL).append(worked, ["KV buffer size = 85.00 MiB"])
    journal_of(directory, SMALL).append(failed)
    return directory


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli_configs.app, [str(arg) for arg in args], env={"KVGUARD_STATE_DIR": ""})


def listed(*args: str | Path) -> list[dict[str, Any]]:
    result = run("--json", *args)
    assert result.exit_code in (0, 1)
    return [json.loads(line) for line in result.stdout.splitlines()]


def ids(*args: str | Path) -> list[str]:
    return [record["id"][-6:] for record in listed(*args)]


def test_newest_first_and_filtered(state: Path) -> None:
    assert ids("--state-dir", state) == ["cccccc", "bbbbbb", "aaaaaa"]
    assert ids("--state-dir", state, "--failed") == ["cccccc"]
    assert ids("--state-dir", state, "--card", "h200") == ["aaaaaa"]
    assert ids("--state-dir", state, "--card", "CGROUP", "--limit", "1") == ["cccccc"]
    assert ids("--state-dir", state, "--model", "q4_k") == ["cccccc", "bbbbbb", "aaaaaa"]
    assert ids("--state-dir", state, "--model", "llama") == []
    assert ids("--state-dir", state, "--limit", "0") == ["cccccc", "bbbbbb", "aaaaaa"]


def test_the_state_directory_may_come_from_the_environment(state: Path) -> None:
    result = CliRunner().invoke(cli_configs.app, ["show", "aaaaaa"], env={"KVGUARD_STATE_DIR": str(state)})
    assert result.exit_code == 0


def test_the_table_shows_each_record_as_a_person_reads_it(state: Path) -> None:
    result = run("--state-dir", state)
    assert result.exit_code == 0
    for words in (
        "20261201-000003-cccccc",
        "failed",
        "kv_dont_fit at load signal 9, 1 oom_kill",
        "from 20261201-000002-bbbbbb by batch",
        "nvml NVIDIA H200 136.7 GiB",
        "batch 8",
        "pool 16,384 unified",
        "kv 84.0 MiB / 85.0 MiB",
        "kv 84.0 MiB / -",
        "310.0 MiB",
        "unknown",
    ):
        assert " ".join(words.split()) in _unfolded(result.stdout), words


def _unfolded(table: str) -> str:
    """The table's cells, each as one line, however it was folded."""
    rows: list[list[str]] = [[]]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.replace("┃", "│").split("│")][1:-1]
        if len(cells) < 2:
            rows.append([])
            continue
        rows[-1] = [
            f"{was} {now}".strip() for was, now in zip(rows[-1] or [""] * len(cells), cells, strict=True)
        ]
    return "\n".join(cell for row in rows for cell in row)


def test_show_prints_everything_a_command_to_paste_and_the_load_lines(state: Path, weights: Path) -> None:
    result = run("show", "bbbbbb", "--state-dir", state)
    assert result.exit_code == 0
    assert f"llama-server -m {shlex.quote(str(weights))} -np 4" in result.stdout
    assert "KV buffer size = 85.00 MiB" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    assert ["kv", "", "84.0 MiB", "85.0 MiB", ""] in rows
    assert ["", "cells", "84.0 MiB", "", "exact formula"] in rows
    assert ["loaded_idle", "310.0 MiB", "300.0 MiB", "cgroup v1", "0.05 s", "9"] in rows
    assert "1000 B" in result.stdout
    plain = json.loads(run("--state-dir", state, "show", "bbbbbb", "--json").stdout)
    assert plain["load_lines"] == ["KV buffer size = 85.00 MiB"]
    assert plain["knobs"]["batch"] == 4


def test_an_id_that_is_unknown_or_stands_for_several_is_told(state: Path) -> None:
    unknown = run("show", "zzz", "--state-dir", state)
    assert (unknown.exit_code, "no record zzz in" in unknown.stderr) == (1, True)
    several = run("show", "20261201", "--state-dir", state)
    assert (several.exit_code, "is part of 3 ids" in several.stderr) == (2, True)
    assert run("show", "20261201-000001-aaaaaa", "--state-dir", state).exit_code == 0


def test_diff_names_only_what_differs(state: Path) -> None:
    changed = json.loads(run("diff", "bbbbbb", "cccccc", "--json", "--state-dir", state).stdout)
    assert changed["knobs.batch"] == [4, 8]
    assert changed["failure.causes.0"] == [None, "kv_dont_fit"]
    assert "knobs.ctx_tokens" not in changed
    table = run("diff", "bbbbbb", "cccccc", "--state-dir", state).stdout
    assert "knobs.pool_tokens" in table


def test_exports_are_read_back(state: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("--export", "csv", "--state-dir", state).stdout)))
    assert [(row["batch"], row["predicted_kv_bytes"], row["measured_kv_bytes"]) for row in rows] == [
        ("8", str(84 * MIB), ""),
        ("4", str(84 * MIB), str(85 * MIB)),
        ("4", str(84 * MIB), str(85 * MIB)),
    ]
    markdown = run("--export", "md", "--state-dir", state).stdout.splitlines()
    assert len(markdown) == 5
    assert len({line.count(" | ") for line in (markdown[0], *markdown[2:])}) == 1


def test_what_is_verified_now_is_told_with_the_change_that_ended_it(
    state: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {r["verified_now"] for r in listed("--state-dir", state)} == {None}  # nobody looked
    newest = journal_of(state, SMALL).records()[-1]
    updated = msgspec.structs.replace(
        newest, id="20261201-000004-dddddd", backend=BackendRecord(name="llama-server", version="b2")
    )
    journal_of(state, SMALL).append(updated)
    changes = {r["id"][-6:]: (r["verified_now"], r["changes"]) for r in listed("--state-dir", state)}
    assert changes["bbbbbb"] == (False, ["backend version: b1 -> b2"])
    assert changes["dddddd"] == (None, [])
    assert changes["aaaaaa"] == (None, [])  # another card
    here = Fingerprint(card=updated.card, backend=updated.backend, model=updated.model)
    monkeypatch.setattr(cli_configs, "here", lambda: (here,))
    assert [r["verified_now"] for r in listed("--state-dir", state)] == [True, False, False, False]
    weights.write_bytes(b"other")
    assert listed("--state-dir", state)[0]["changes"] == ["model file: 1000 -> 5 bytes"]
    weights.unlink()
    assert listed("--state-dir", state)[0]["changes"] == [f"model file: {weights} is gone"]


def test_damaged_lines_are_reported_and_the_rest_is_shown(state: Path) -> None:
    with journal_of(state, SMALL).path.open("a") as file:
        file.write("garbage\n")
    result = run("--json", "--state-dir", state)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 3)
    assert "1 lines are damaged" in result.stderr


def test_nothing_recorded_ends_with_1_and_wrong_use_with_2(tmp_path: Path) -> None:
    nothing = run("--state-dir", tmp_path / "none")
    assert (nothing.exit_code, "no configuration is recorded in" in nothing.stderr) == (1, True)
    assert run("--export", "pdf").exit_code == 2
    assert run("--json", "--export", "md").exit_code == 2
    assert run("show").exit_code == 2
