"""`python -m llama_cpp.server` of llama-cpp-python: one request at a time, all others wait for its lock.

By default any new request, even a list of models, ends a stream that runs; that is switched off here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from kvguard.domain import (
    Accounts,
    Capabilities,
    Capacity,
    Endpoint,
    EngineSample,
    Knobs,
    Launch,
    PoolKind,
    Rung,
    Variant,
)
from kvguard.ports import BackendError, NotReady
from kvguard_adapters.backends import llama_log
from kvguard_adapters.backends.flags import Flags, Option
from kvguard_adapters.backends.http import EngineHttp
from kvguard_adapters.backends.llama_backend import KV_TYPES
from kvguard_adapters.backends.llama_params import llama_params
from kvguard_adapters.backends.options import Options
from kvguard_adapters.backends.steps import next_steps
from kvguard_adapters.tokenizers.llama_vocab import VocabularyCounter

ASK_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 2.0
IDLE_ANSWER_S = 0.25
"""An idle server lists its models within this; one that runs a request, only after it."""
LONGEST_REQUEST_S = 3600.0
START_TIMEOUT_S = 30.0

_GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
_ASK = (
    "import importlib.metadata as m, json, llama_cpp.server.settings as s;"
    "print(json.dumps([m.version('llama-cpp-python'), list(s.Settings.model_fields)]))"
)
_REMEDY = "pip install 'kvguard[llama-cpp]', or name a python that has it with --llama-cpp-python PATH"


class LlamaCppPython:
    """Implements `ports.Backend`."""

    name = "llama-cpp-python"
    capabilities = Capabilities(
        rungs=frozenset(Rung),
        pool_kinds=frozenset({PoolKind.UNIFIED}),
        kv_types=KV_TYPES,
        overflow="serialises",
        cancels_streams=True,
        continues_completions=True,
    )

    def __init__(self, python: str = "", options: Options | None = None) -> None:
        found = shutil.which(os.path.expanduser(python or sys.executable))
        if found is None:
            raise BackendError(
                f"{python} is not an executable file: name a python with --llama-cpp-python PATH"
            )
        self.python = found
        self.options = options or Options()
        self.pinned = self._flags.pinned(_options(_EVERY_KNOB, self.options), self.options.extra_args)

    def version(self) -> str:
        return self._installed[0]

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        extra = self.options.extra_args
        arguments = self._flags.arguments(_options(knobs, self.options), extra, self.pinned)
        # HOST and PORT of our own environment would win over any argument.
        env = [("HOST", "127.0.0.1"), ("PORT", str(port))] + ([("API_KEY", api_key)] if api_key else [])
        own = ("--host", "127.0.0.1", "--port", str(port))
        return Launch(
            argv=(self.python, "-u", "-m", "llama_cpp.server", *arguments, *extra, *own),
            env=tuple(env),
        )

    def connect(self, endpoint: Endpoint) -> LlamaCppPythonEngine:
        return LlamaCppPythonEngine(endpoint, self.python, self.options)

    def milestone(self, line: str) -> str | None:
        return "ready" if _SERVING.search(line) else llama_log.milestone(line)

    def measured(self, log_lines: Sequence[str]) -> Accounts | None:
        return llama_log.measured(log_lines)

    def next_steps(self, knobs: Knobs, rung: Rung) -> Sequence[Knobs]:
        return next_steps(knobs, rung, self.options, self.pinned)

    def log_filter(self) -> Callable[[str], str | None]:
        return _LogFilter()

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        return None

    @property
    def _flags(self) -> Flags:
        return Flags.of_spellings([f"--{name}"] for name in self._installed[1])

    @cached_property
    def _installed(self) -> tuple[str, list[str]]:
        try:
            answer = subprocess.run(
                [self.python, "-c", _ASK],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise BackendError(f"{self.python} has no llama-cpp-python[server]: {_REMEDY}") from exc
        version, fields = json.loads(answer.stdout.splitlines()[-1])
        return version, fields


def _options(knobs: Knobs, options: Options) -> Iterator[Option]:
    p = llama_params(knobs, options)
    yield _option("quant", "model", p.model)
    yield _option("", "model_alias", p.model_alias)
    yield _option("ctx_tokens", "n_ctx", knobs.ctx_tokens)
    yield _option("prefill_tokens", "n_batch", p.n_batch)
    yield _option("prefill_tokens", "n_ubatch", p.n_ubatch)
    yield _option("kv_type", "type_k", _GGML_TYPES[p.cache_type_k])
    yield _option("kv_type", "type_v", _GGML_TYPES[p.cache_type_v])
    yield _option("gpu_layers", "n_gpu_layers", knobs.gpu_layers)
    yield _option("", "flash_attn", "true")  # a quantised V needs it
    yield _option("", "logits_all", "false")  # a row of the vocabulary's size for each token of the context
    yield _option("", "use_mmap", "false")  # mapped weights may be charged to another card
    yield _option("", "use_mlock", "false")
    yield _option("", "interrupt_requests", "false")
    if p.embedding:
        yield _option("", "embedding", "true")
    if knobs.host_cache_bytes:
        yield _option("host_cache_bytes", "cache", "true")
        yield _option("host_cache_bytes", "cache_size", knobs.host_cache_bytes)


def _option(knob: str, name: str, value: object) -> Option:
    return Option(knob=knob, alternatives=((f"--{name}", str(value)),))


_EVERY_KNOB = Knobs(
    batch=1,
    ctx_tokens=1,
    pool_tokens=1,
    pool_kind=PoolKind.UNIFIED,
    quant=Variant(kind="gguf", source="", bits=1),
    host_cache_bytes=1,
)
"""To ask which of them the user's own arguments set."""


# ---------------------------------------------------------------- its log

_SERVING = re.compile(r"Uvicorn running on http")
_ACCESS = re.compile(
    r'INFO: +[\d.:]+ - "(?:GET|POST) /v1/(?:completions|chat/completions|embeddings|models) HTTP/[\d.]+" \d+'
)


class _LogFilter:
    """While it loads, all is shown; afterwards only access lines of known routes: errors quote bodies."""

    def __init__(self) -> None:
        self._serving = False

    def __call__(self, line: str) -> str | None:
        if self._serving:
            access = _ACCESS.match(line)
            return access[0] if access else None
        self._serving = _SERVING.search(line) is not None
        return line


# ---------------------------------------------------------------- a running one


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaCppPythonEngine:
    """Implements `ports.Engine`."""

    def __init__(self, endpoint: Endpoint, python: str, options: Options) -> None:
        self._http = EngineHttp(endpoint)
        self._python = python
        self._counter: VocabularyCounter | None = None
        self._poll: asyncio.Task[Any] | None = None

    async def healthy(self) -> bool:
        """It listens once the model is loaded; this page waits for no lock."""
        try:
            await self._http.get_text("/docs", timeout_s=HEALTH_TIMEOUT_S)
        except BackendError:
            return False
        return True

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        await self._http.get("/v1/models", _Models, timeout_s=START_TIMEOUT_S)
        self._counter = self._counter or VocabularyCounter(self._python, knobs.quant.source)
        printed = llama_log.printed_sizes(log_lines)
        ctx = printed.n_ctx or knobs.ctx_tokens
        return Capacity(
            pool_tokens=ctx,
            ctx_tokens=ctx,
            sequences=1,
            overflow="serialises",
            prefill_tokens=printed.n_batch or knobs.prefill_tokens,
        )

    async def sample(self) -> EngineSample:
        """Busy or not, by whether it lists its models at once. Never more than one such list waits."""
        if self._poll is None or self._poll.done():
            work = self._http.get("/v1/models", _Models, timeout_s=LONGEST_REQUEST_S)
            self._poll = asyncio.create_task(work, name="llama_cpp_python_poll")
        done, _ = await asyncio.wait({self._poll}, timeout=IDLE_ANSWER_S)
        if done:
            self._poll.result()
        return EngineSample(at_s=time.monotonic(), running=0 if done else 1)

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        if self._counter is None:
            raise NotReady("the engine's capacity was not asked for yet")
        return await self._counter.count(path, body)

    async def model_names(self) -> Sequence[str]:
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=START_TIMEOUT_S)
        return [model.id for model in models.data]

    async def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        if self._counter is not None:
            await self._counter.close()
        await self._http.close()
