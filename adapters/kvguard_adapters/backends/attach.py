"""A backend that someone else runs: its kind is found out over HTTP, and nothing of it is ever changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
)
from kvguard.ports import BackendError, Engine, NotReady, ProtocolError
from kvguard_adapters.backends.http import Answered, EngineHttp
from kvguard_adapters.backends.llama_engine import LlamaEngine
from kvguard_adapters.backends.vllm_engine import VllmEngine

SNIFF_TIMEOUT_S = 5.0
VLLM_SEQUENCES = 256
"""vLLM's default, which no endpoint tells. What is too much for it waits inside it and harms nobody."""

AttachedKind = Literal["llama-server", "vllm", "openai"]


class Attach:
    """Implements `ports.Backend`. `kind` is None until the backend has answered for the first time."""

    name = "attach"
    pinned: frozenset[str] = frozenset(Knobs.__dataclass_fields__)
    capabilities = Capabilities(
        rungs=frozenset(),
        pool_kinds=frozenset(PoolKind),
        kv_types=(),
        overflow="fails_all",  # the worst, until its capacity says what it does
        restartable=False,
    )

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise BackendError(f"--attach {url!r} is not a URL: write http://HOST:PORT of a running backend")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind: AttachedKind | None = None

    def version(self) -> str:
        return self.kind or "unknown"

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        raise BackendError(f"the backend at {self.url} is not ours to start")

    def connect(self, endpoint: Endpoint) -> AttachedEngine:
        return AttachedEngine(self, endpoint)

    def milestone(self, line: str) -> str | None:
        return None

    def measured(self, log_lines: Sequence[str]) -> Accounts | None:
        return None

    def next_steps(self, knobs: Knobs, rung: Rung) -> Sequence[Knobs]:
        return ()

    def log_filter(self) -> Callable[[str], str | None]:
        return lambda line: None

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        return None


async def sniff(http: EngineHttp) -> AttachedKind:
    """Find out what answers. Raises NotReady when nothing does, ProtocolError when it is no such server."""
    page = await _try(http, "/metrics")
    if "vllm:" in page:
        return "vllm"
    if "llamacpp:" in page or "total_slots" in await _try(http, "/props"):
        return "llama-server"
    await http.get("/v1/models", _Models, timeout_s=SNIFF_TIMEOUT_S)
    return "openai"


async def _try(http: EngineHttp, path: str) -> str:
    try:
        return await http.get_text(path, timeout_s=SNIFF_TIMEOUT_S)
    except Answered:
        return ""


class AttachedEngine:
    """Implements `ports.Engine` by the adapter of the kind that answers."""

    def __init__(self, backend: Attach, endpoint: Endpoint) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._engine: Engine | None = None

    async def healthy(self) -> bool:
        try:
            return await (await self._found()).healthy()
        except BackendError:
            return False

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        return await (await self._found()).capacity(knobs, log_lines)

    async def sample(self) -> EngineSample:
        return await (await self._found()).sample()

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        return await (await self._found()).count_tokens(path, body)

    async def model_names(self) -> Sequence[str]:
        return await (await self._found()).model_names()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def _found(self) -> Engine:
        if self._engine is None:
            http = EngineHttp(self._endpoint)
            try:
                self._backend.kind = await sniff(http)
            finally:
                await http.close()
            self._engine = _ENGINES[self._backend.kind](self._endpoint)
        return self._engine


# ---------------------------------------------------------------- any server with OpenAI's routes


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAiEngine:
    """A server that has `/v1/models`; its capacity is what the user says of it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._http = EngineHttp(endpoint)

    async def healthy(self) -> bool:
        try:
            await self.model_names()
        except BackendError:
            return False
        return True

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=SNIFF_TIMEOUT_S)
        lengths = [length for m in models.data if (length := m.max_model_len or m.context_length)]
        ctx = lengths[0] if lengths else knobs.ctx_tokens
        return Capacity(
            pool_tokens=max(knobs.pool_tokens, ctx),
            ctx_tokens=ctx,
            sequences=knobs.batch,
            overflow="fails_all",
        )

    async def sample(self) -> EngineSample:
        if not await self.healthy():
            raise NotReady("the attached backend does not list its models")
        return EngineSample(at_s=time.monotonic())

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        raise ProtocolError("this backend has no known way to count tokens")

    async def model_names(self) -> Sequence[str]:
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=SNIFF_TIMEOUT_S)
        return [model.id for model in models.data]

    async def close(self) -> None:
        await self._http.close()


_ENGINES: dict[AttachedKind, Callable[[Endpoint], Engine]] = {
    "llama-server": LlamaEngine,
    "vllm": lambda endpoint: VllmEngine(endpoint, sequences=VLLM_SEQUENCES),
    "openai": OpenAiEngine,
}
