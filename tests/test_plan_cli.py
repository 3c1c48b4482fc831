"""`kvguard plan` from the outside: numbers, reasons, exit codes, JSON, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvguard import cli_plan
from kvguard.matrix import Measured
from kvguard_adapters.models.gguf import read_gguf
from test_huggingface import sharded
from tiny_gguf import write_tiny_llama

app = typer.Typer()
app.command()(cli_plan.plan)


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def run_json(*args: object, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*args, "--json", code=code))
    return answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plan") / "tiny-F16.gguf")


def test_a_model_that_fits(tiny: Path) -> None:
    text = run(tiny, "--card", "2GiB", "--host")
    for words in (
        "fits",
        "weights",
        "kv",
        "overhead",
        "exact formula",
        "estimate",
        "largest context",
        "GiB usable",
    ):
        assert words in text
    report = run_json(tiny, "--card", "2GiB", "--host")
    assert report["fits"] is True
    assert report["card"]["usable_bytes"] == (2 << 30) - (2 << 30) // 10
    assert report["accounts"]["weights_bytes"] == read_gguf(tiny).weights.total_bytes
    assert report["max_ctx_by_batch"]["1"] == 4096
    assert set(report["max_batch_by_ctx"]) == {"2048", "4096"}


def test_a_model_that_does_not_fit_says_why_and_what_next(tiny: Path) -> None:
    text = run(tiny, "--card", "20MiB", "--host", "--headroom", "0", code=1)
    assert "overhead too large" in text
    assert "next:" in text
    report = run_json(tiny, "--card", "100KiB", "--host", "--headroom", "0%", code=1)
    assert report["verdict"] == "weights do not fit"
    assert "not a smaller context" in report["next"]


def test_what_the_user_fixes_is_not_shrunk(tiny: Path) -> None:
    options = ("--card", "1GiB", "--host", "--ctx", 3000, "--batch", 5, "--kv-pool", "split")
    knobs = run_json(tiny, *options)["knobs"]
    assert (knobs["ctx_tokens"], knobs["batch"], knobs["pool_kind"]) == (3000, 5, "split")
    # 5 x 3072 cells of 2 layers x 2 sides x 2 heads x 16 x 2 bytes
    assert run_json(tiny, *options)["accounts"]["kv_bytes"] == 5 * 3072 * 256


def test_on_a_gpu_embedding_and_layers_may_stay_in_host_memory(tiny: Path) -> None:
    report = run_json(tiny, "--card", "4GiB", "--gpu-layers", 1)
    here = {entry["name"] for entry in report["accounts"]["entries"] if entry["on_card"]}
    there = {entry["name"] for entry in report["accounts"]["entries"] if not entry["on_card"]}
    assert "output" in here
    assert {"layers", "token embedding", "attention"} <= there


def test_a_directory_of_variants_is_a_matrix(tmp_path: Path) -> None:
    for kind in ("F16", "Q8_0", "Q4_0"):
        write_tiny_llama(tmp_path / f"m-{kind}.gguf", kind=kind, embd=512, ff=8192, layers=8)
    report = run_json(tmp_path, "--card", "150MiB", "--card", "1GiB", "--host", "--headroom", 0)
    assert [variant["weights_bytes"] for variant in report["variants"]] == sorted(
        (variant["weights_bytes"] for variant in report["variants"]), reverse=True
    )
    small, large = report["rows"]
    assert [cell["feasible"] for cell in small["cells"]] == [False, False, True]
    assert all(cell["feasible"] and cell["ctx_tokens"] == 4096 for cell in large["cells"])
    assert {cell["basis"] for cell in large["cells"]} == {"predicted"}
    text = run(tmp_path, "--card", "150MiB", "--card", "1GiB", "--host", "--headroom", 0)
    assert "not feasible" in text
    assert "○ 4,096" in text


def test_measured_cells_come_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("F16", "Q8_0"):
        write_tiny_llama(tmp_path / f"m-{kind}.gguf", kind=kind)
    first = Measured(
        header_hash=read_gguf(tmp_path / "m-Q8_0.gguf").header_hash,
        card_total_bytes=1 << 30,
        ctx_tokens=3000,
        peak_bytes=60 << 20,
        predicted_bytes=64 << 20,
    )
    monkeypatch.setattr(cli_plan, "measured_cells", lambda models: [first])
    cells = run_json(tmp_path, "--card", "1GiB", "--host")["rows"][0]["cells"]
    assert [(cell["basis"], cell["ctx_tokens"]) for cell in cells] == [
        ("predicted", 4096),
        ("measured", 3000),
    ]


def test_a_card_without_a_model() -> None:
    both = run_json("--card", "24GiB", "--card", "8GiB")["cards"]
    assert [card["label"] for card in both] == ["24GiB", "8GiB"]
    report = both[0]
    assert report["usable_bytes"] == int(24 * (1 << 30) * 0.9) + 1
    assert report["most_parameters"]["16"] == report["usable_bytes"] // 2
    assert report["most_parameters"]["4"] == int(report["usable_bytes"] / 0.6)
    assert "most parameters" in run("--card", "24GiB")


def test_a_model_without_a_file() -> None:
    shape = ("--layers", 60, "--kv-heads", 8, "--head-dim", 128)
    text = run("--params", "27B", *shape)
    for words in ("50.3 GiB", "25.1 GiB", "12.6 GiB", "245,760 bytes", "1.88 GiB", "7.50 GiB"):
        assert words in text
    fits = run_json("--params", "27B", "--bits", 4, "--card", "24GiB")
    assert fits["fits"] is True
    assert fits["kv_bytes"] == {}
    nope = run_json("--params", "27B", "--bits", 16, "--card", "24GiB", code=1)
    assert "50.29 GiB against 21.60 GiB" in nope["reason"]


def test_a_checkpoint_directory_is_planned_for_vllm(tmp_path: Path) -> None:
    report = run_json(sharded(tmp_path / "m", 3), "--card", "8GiB")
    assert report["model"]["engine"] == "vllm"
    assert report["accounts"]["weights_bytes"] == 96
    assert any(entry["name"] == "block pool" for entry in report["accounts"]["entries"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give a model"),
        (("/no/such/model.gguf", "--card", "1GiB"), "no such file"),
        (("--card", "24 potatoes"), "24 potatoes"),
        (("--card", "24GiB", "--headroom", "120%"), "120%"),
        (("--params", "lots"), "lots"),
        (("--params", "7B", "--layers", "3"), "together"),
        (("--card", "24GiB", "--prefer", "speed"), "--prefer"),
        (("--card", "24GiB", "--kv-pool", "both"), "--kv-pool"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], words: str) -> None:
    assert words in " ".join(run(*args, code=2).split())


def test_a_refused_kv_type_is_usage_not_a_crash(tiny: Path) -> None:
    # the tiny model's heads of 16 are no whole block of 32
    assert "does not divide n_embd_head_k=16" in run(tiny, "--card", "1GiB", "--kv-type", "q8_0", code=2)
    assert "unknown KV type" in run(tiny, "--card", "1GiB", "--kv-type", "q3_9", code=2)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    assert "broken.gguf" in run(path, "--card", "1GiB", code=2).replace("\n", "")


def test_it_runs_as_a_module_on_this_machine(tiny: Path) -> None:
    command = [sys.executable, "-m", "kvguard.cli_plan", str(tiny), "--card", "here", "--host", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert report["card"]["total_bytes"] > 1 << 28
    assert done.returncode == (0 if report["fits"] else 1)


UNKNOWN_ENGINE = """#!{python}
import sys
if "--help" in sys.argv:
    print("-m, --model FNAME  path\\n-c, --ctx-size N  size\\n-np, --parallel N  slots")
else:
    print("x common_memory_breakdown_print: |   - Host |   90 =   1 +  64 +  25 |")
    print("x projected to use 90 MiB", flush=True)
"""


def test_an_architecture_that_we_do_not_know_is_asked_of_the_engine(tmp_path: Path) -> None:
    """A real child process that answers as llama-server does: no real one has an unknown architecture."""
    model = write_tiny_llama(tmp_path / "m.gguf")
    model.write_bytes(
        model.read_bytes()
        .replace(b"llama.", b"xlama.")
        .replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0xlama")
    )
    estimate = run_json(model, "--card", "2GiB", "--host")
    kv = [entry for entry in estimate["accounts"]["entries"] if entry["account"] == "kv"]
    assert [entry["basis"] for entry in kv] == ["estimate"]
    assert "xlama" in kv[0]["note"]
    engine = tmp_path / "llama-server"
    engine.write_text(UNKNOWN_ENGINE.format(python=sys.executable))
    engine.chmod(0o755)
    told = run_json(model, "--card", "2GiB", "--host", "--llama-server", engine)
    assert told["accounts"]["kv_bytes"] == 64 << 20
    assert {e["basis"] for e in told["accounts"]["entries"] if e["account"] == "kv"} == {"engine's dry run"}


def test_an_engine_that_is_not_there_is_named(tiny: Path) -> None:
    text = run(tiny, "--card", "2GiB", "--host", "--llama-server", "/no/such/engine", code=2)
    assert "/no/such/engine" in text
