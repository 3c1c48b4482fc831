"""Real engines as children of the tests: started through their adapters, watched line by line."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvguard.domain import MIB, AccountName, Endpoint, Knobs, PoolKind, Variant
from kvguard.ports import Backend
from kvguard_adapters.backends import Options, find_backend
from tiny_gguf import CHAT_TEMPLATE, write_tiny_llama

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

    def wait_group_gone(self, timeout_s: float = 30.0) -> None:
        """Helpers of an engine may end a moment after it; what is dead but not reaped is gone."""
        members = [process for process in psutil.process_iter() if _group_of(process) == self.pid]
        _, alive = psutil.wait_procs(members, timeout_s)
        left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not left, left

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


def _group_of(process: psutil.Process) -> int | None:
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return os.getpgid(process.pid)
    return None


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
    """An adapter under contract, and what is special about its engine.

    long_answer  makes it generate to max_tokens
    prints       the accounts that it prints where there is no GPU
    many_prompts whether one request may hold several, or token ids
    quotes_bodies  whether its own log does
    counts_in_process  whether tokens of plain texts are counted without the engine
    """

    name: str
    backend: Backend
    knobs: Knobs
    kv_bytes: int
    broken_model: str
    kind: str = "llama-server"
    long_answer: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    prints: frozenset[AccountName] = frozenset({"weights", "kv", "overhead"})
    many_prompts: bool = True
    quotes_bodies: bool = True
    counts_in_process: bool = False


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
    knobs = llama_knobs(folder / "tiny.gguf")
    return Case(
        name=name,
        backend=find_backend(name, Options(model_name=MODEL_NAME), llama_server=binary),  # type: ignore[arg-type]
        knobs=knobs,
        kv_bytes=knobs.pool_tokens * TINY_KV_BYTES_PER_TOKEN,
        broken_model=str(broken),
    )


def llama_cpp_python_case(folder: Path) -> Case:
    python = engine_path("llama-cpp-python")
    case = llama_case("embedded", folder)
    knobs = replace(case.knobs, batch=1, pool_tokens=case.knobs.ctx_tokens)
    return replace(
        case,
        name="llama-cpp-python",
        backend=find_backend("llama-cpp-python", Options(model_name=MODEL_NAME), llama_cpp_python=python),
        knobs=knobs,
        kv_bytes=knobs.pool_tokens * TINY_KV_BYTES_PER_TOKEN,
        kind="openai",
        long_answer={"logit_bias": {str(ord("a")): 100}},  # it holds back bytes that are no text yet
        many_prompts=False,
        counts_in_process=True,
    )


VLLM_BLOCK_TOKENS = 128
VLLM_KV_BYTES_PER_TOKEN = 2 * 4 * 4 * 32 * 2


def vllm_pool_bytes(knobs: Knobs) -> int:
    """One block is never handed out."""
    blocks = -(-knobs.pool_tokens // VLLM_BLOCK_TOKENS) + 1
    return blocks * VLLM_BLOCK_TOKENS * VLLM_KV_BYTES_PER_TOKEN


def tiny_checkpoint(folder: Path) -> Path:
    """A Llama without weights (`--load-format dummy` draws them), its tokenizer and a chat template."""
    spec = importlib.util.spec_from_file_location("engines", ENGINES_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    engines = importlib.util.module_from_spec(spec)
    sys.modules["engines"] = engines
    spec.loader.exec_module(engines)
    engines.write_tiny_llama(folder / "tiny-checkpoint")
    (folder / "tiny-checkpoint" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder / "tiny-checkpoint"


def vllm_case(folder: Path, *, float32: bool = False) -> Case:
    """A tiny Llama; `float32` where the same text must come again: the logits of bfloat16 are often equal."""
    python = engine_path("vllm-python")
    pool_bytes = (lambda knobs: 2 * vllm_pool_bytes(knobs)) if float32 else vllm_pool_bytes
    (folder / "empty").mkdir()
    knobs = Knobs(
        batch=2,
        ctx_tokens=2048,
        pool_tokens=3072,
        pool_kind=PoolKind.UNIFIED,
        quant=Variant(kind="checkpoint", source=str(tiny_checkpoint(folder)), bits=16),
        prefill_tokens=256,
    )
    extra = ("--load-format", "dummy", "--enforce-eager", "--dtype", "float32" if float32 else "bfloat16")
    options = Options(model_name=MODEL_NAME, extra_args=extra, pool_bytes=pool_bytes)
    return Case(
        name="vllm",
        backend=find_backend("vllm", options, vllm_python=python),
        knobs=knobs,
        kv_bytes=pool_bytes(knobs),
        broken_model=str(folder / "empty"),
        kind="vllm",
        prints=frozenset({"kv"}),
        quotes_bodies=False,
        counts_in_process=True,
    )


def make_case(name: str, folder: Path) -> Case:
    if name == "vllm":
        return vllm_case(folder)
    if name == "llama-cpp-python":
        return llama_cpp_python_case(folder)
    return llama_case(name, folder)
