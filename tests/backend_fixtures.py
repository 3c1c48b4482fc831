"""Real engines as children of the tests: started through their adapters, watched line by line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvguard.domain import MIB, Endpoint, Knobs, PoolKind, Variant
from kvguard.ports import Backend
from kvguard_adapters.backends import Options, find_backend
from tiny_gguf import write_tiny_llama

KEY = "key-that-no-log-may-show"
MODEL_NAME = "tiny"
START_TIMEOUT_S = 200.0
ENGINES_SCRIPT = Path(__file__).parent.parent / "scripts" / "engines.py"

TINY_KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2
"""Of `write_tiny_llama`: K and V of 2 layers with 2 heads of 16, two bytes each."""


def engine_path(part: str) -> str:
    """Where a prepared engine lies; without it the test fails in CI, and is skipped elsewhere."""
    found = subprocess.run(
        [sys.executable, ENGINES_SCRIPT, "path", part], capture_output=True, text=True, check=False
    )
    if found.returncode == 0:
        return found.stdout.strip()
    if os.environ.get("CI"):
        pytest.fail(found.stderr.strip())
    pytest.skip(found.stderr.strip())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EngineProcess:
    """One engine that runs: its endpoint, and all that it printed."""

    def __init__(self, backend: Backend, knobs: Knobs, *, key: str = KEY, port: int | None = None) -> None:
        self.backend, self.knobs = backend, knobs
        self.port = port or free_port()
        self.endpoint = Endpoint(base_url=f"http://127.0.0.1:{self.port}", api_key=key)
        self.launch = backend.launch(knobs, port=self.port, api_key=key)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            self.launch.argv,
            env={**os.environ, **dict(self.launch.env)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_for(
        self, seen: Callable[[list[str]], Any], what: str, timeout_s: float = START_TIMEOUT_S
    ) -> Any:
        """Wait until the output satisfies `seen`; fail, with its end, when it ends or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not (found := seen(self.lines)):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._reader.is_alive():
                    pytest.fail(f"no {what}:\n" + "\n".join(self.lines[-30:]))
                self._changed.wait(min(left_s, 1.0))
        return found

    def wait_ready(self) -> None:
        milestone = self.backend.milestone
        self.wait_for(lambda lines: any(milestone(line) == "ready" for line in lines), "readiness")

    def wait_exit(self, timeout_s: float = START_TIMEOUT_S) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(10)
        return code

    def terminate(self, timeout_s: float = 60.0) -> int:
        self._process.terminate()
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


@contextmanager
def running(backend: Backend, knobs: Knobs, **more: Any) -> Iterator[EngineProcess]:
    engine = EngineProcess(backend, knobs, **more)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


@dataclass(frozen=True, kw_only=True)
class Case:
    """An adapter under contract, and what is special about it."""

    name: str
    backend: Backend
    knobs: Knobs
    kv_bytes_per_token: int
    broken_model: str
    long_answer: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    options: Options = field(default_factory=Options)


def tiny_gguf(folder: Path) -> Path:
    return write_tiny_llama(folder / "tiny.gguf", ctx=4096)


def llama_knobs(model: Path | str, **changes: Any) -> Knobs:
    knobs: dict[str, Any] = {
        "batch": 2,
        "ctx_tokens": 2048,
        "pool_tokens": 3072,
        "pool_kind": PoolKind.UNIFIED,
        "quant": Variant(kind="gguf", source=str(model), bits=16),
        "prefill_tokens": 256,
        "host_cache_bytes": 16 * MIB,
    }
    return Knobs(**{**knobs, **changes})


def llama_case(name: str, folder: Path) -> Case:
    broken = folder / "broken.gguf"
    broken.write_bytes(tiny_gguf(folder).read_bytes()[:20_000])
    binary = engine_path("llama-server") if name == "llama-server" else ""
    backend = find_backend(name, Options(model_name=MODEL_NAME), llama_server=binary)  # type: ignore[arg-type]
    return Case(
        name=name,
        backend=backend,
        knobs=llama_knobs(folder / "tiny.gguf"),
        kv_bytes_per_token=TINY_KV_BYTES_PER_TOKEN,
        broken_model=str(broken),
    )
