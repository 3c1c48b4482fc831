"""A running vLLM server: health, capacity and samples over its HTTP API and its Prometheus page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvguard.domain import Capacity, Endpoint, EngineSample, Knobs
from kvguard.ports import BackendError, ProtocolError
from kvguard_adapters.backends import prometheus
from kvguard_adapters.backends.http import EngineHttp
from kvguard_adapters.backends.vllm_log import printed_sizes
from kvguard_adapters.tokenizers.backend_http import VllmTokenCounter
from kvguard_adapters.tokenizers.huggingface import CheckedCounter

HEALTH_TIMEOUT_S = 5.0
POLL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class VllmEngine:
    """Implements `ports.Engine`."""

    def __init__(self, endpoint: Endpoint, *, sequences: int = 0, model_path: str = "") -> None:
        """`sequences`: how many it runs at once, where its log does not tell.

        `model_path`: the checkpoint whose tokenizer it has, where the knobs name another form of it.
        """
        self._http = EngineHttp(endpoint)
        self._sequences = sequences
        self._model_path = model_path
        self._engine_counter = VllmTokenCounter(self._http)
        self._counter: CheckedCounter | None = None

    async def healthy(self) -> bool:
        """It answers 503 when its engine core has died under a living API server."""
        try:
            await self._http.get_text("/health", timeout_s=HEALTH_TIMEOUT_S)
        except BackendError:
            return False
        return True

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        """The pool from `vllm:cache_config_info`, else the log; the context from the model list."""
        page = await self._http.get_text("/metrics", timeout_s=START_TIMEOUT_S)
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=START_TIMEOUT_S)
        self._count_by(Path(self._model_path or knobs.quant.source), models.data[0].id if models.data else "")
        printed = printed_sizes(log_lines)
        pool_tokens, block_tokens = pool_of(page)
        pool_tokens = pool_tokens or printed.pool_tokens
        if not pool_tokens:
            raise ProtocolError("neither /metrics nor the log tells the size of the KV cache")
        lengths = [model.max_model_len for model in models.data if model.max_model_len]
        ctx = min([*lengths[:1], pool_tokens]) if lengths else printed.max_model_len or knobs.ctx_tokens
        return Capacity(
            pool_tokens=max(pool_tokens, 1),
            ctx_tokens=ctx,
            sequences=printed.sequences or self._sequences or knobs.batch,
            block_tokens=block_tokens,
            overflow="preempts",
            prefill_tokens=printed.prefill_tokens or knobs.prefill_tokens,
        )

    async def sample(self) -> EngineSample:
        """Its gauges are set once a scheduler step, so they may lag by seconds."""
        page = await self._http.get_text("/metrics", timeout_s=POLL_TIMEOUT_S)
        pool_tokens, _ = pool_of(page)
        used = prometheus.mean(page, "vllm:kv_cache_usage_perc")
        return EngineSample(
            at_s=time.monotonic(),
            running=_count(page, "vllm:num_requests_running"),
            waiting=_count(page, "vllm:num_requests_waiting"),
            kv_used_tokens=None if used is None or not pool_tokens else round(used * pool_tokens),
            preemptions_total=_count(page, "vllm:num_preemptions_total"),
        )

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        return await (self._counter or self._engine_counter).count(path, body)

    async def model_names(self) -> Sequence[str]:
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=POLL_TIMEOUT_S)
        return [model.id for model in models.data]

    async def close(self) -> None:
        if self._counter is not None:
            await self._counter.close()
        await self._http.close()

    def _count_by(self, folder: Path, model_name: str) -> None:
        if self._counter is None and (folder / "tokenizer.json").is_file():
            self._counter = CheckedCounter(folder, self._engine_counter, model_name)


def pool_of(page: str) -> tuple[int, int]:
    """Usable tokens of the pool and tokens of a block; 0 and 1 where the page does not tell.

    One block of them all is the null block, which is never handed out.
    """
    config = next(iter(prometheus.labels(page, "vllm:cache_config_info")), {})
    blocks, block_tokens = _number(config, "num_gpu_blocks"), _number(config, "block_size") or 1
    tokens = _number(config, "kv_cache_size_tokens") or blocks * block_tokens
    return (tokens * (blocks - 1) // blocks if blocks > 1 else 0), block_tokens


def _number(config: Mapping[str, str], name: str) -> int:
    text = config.get(name, "")
    return int(text) if text.isdigit() else 0


def _count(page: str, name: str) -> int | None:
    value = prometheus.total(page, name)
    return None if value is None else int(value)
