"""Real llama-server failures, made on demand, read by the diagnosis."""

from __future__ import annotations

import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from backend_fixtures import engine_path, free_port
from kvguard.diagnosis import diagnose
from kvguard.domain import Cause, Evidence, ExitStatus, Failure, Stage
from tiny_gguf import write_tiny_llama

pytestmark = pytest.mark.engine

ADDRESS_SPACE_BYTES = 3_000_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path)
    return path


def run(model: Path, *arguments: str, port: int | None = None, limit: bool = False) -> Failure:
    """Start the server, wait for its end, and diagnose what it left."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))

    before: Callable[[], None] | None = limited if limit else None
    done = subprocess.run(
        [engine_path("llama-server"), "-m", str(model), "--host", "127.0.0.1",
         "--port", str(port or free_port()), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False, preexec_fn=before,
    )  # fmt: skip
    lines = tuple(done.stdout.decode(errors="replace").splitlines())
    return diagnose(Evidence(exit=ExitStatus(code=done.returncode), log_lines=lines))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    failure = run(tmp_path / "none.gguf")
    assert (failure.stage, failure.cause) == (Stage.LOAD, Cause.MISSING_FILE)


def test_a_model_that_was_cut_off(model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size * 3 // 4])
    failure = run(cut)
    assert (failure.stage, failure.cause) == (Stage.LOAD, Cause.CORRUPT_MODEL)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html>" * 100)
    failure = run(page)
    assert (failure.stage, failure.cause) == (Stage.LOAD, Cause.CORRUPT_MODEL)


def test_a_port_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        failure = run(model, port=other.getsockname()[1])
    assert (failure.stage, failure.cause) == (Stage.LOAD, Cause.PORT_IN_USE)


def test_a_kv_cache_that_does_not_fit(model: Path) -> None:
    failure = run(model, "-c", "100000000", "-fit", "off", limit=True)
    assert (failure.stage, failure.cause) == (Stage.WARMUP, Cause.KV_DONT_FIT)
    assert failure.is_memory


def test_a_cache_type_that_does_not_go_with_the_rest(model: Path) -> None:
    failure = run(model, "-ctv", "q4_1", "-fa", "off")
    assert (failure.stage, failure.cause) == (Stage.WARMUP, Cause.QUANT_FORMAT_MISMATCH)
    assert not failure.is_memory
