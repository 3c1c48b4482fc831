"""A running llama.cpp server: health, capacity and samples over its native HTTP API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvguard.domain import Capacity, Endpoint, EngineSample, Knobs, PoolKind
from kvguard.ports import BackendError
from kvguard_adapters.backends import prometheus
from kvguard_adapters.backends.http import Answered, EngineHttp
from kvguard_adapters.backends.llama_log import printed_sizes
from kvguard_adapters.tokenizers.backend_http import LlamaTokenCounter
from kvguard_adapters.tokenizers.llama_infill import DEFAULT_BATCH_TOKENS

HEALTH_TIMEOUT_S = 2.0
POLL_TIMEOUT_S = 2.0
START_TIMEOUT_S = 30.0


class _Generation(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    total_slots: int
    default_generation_settings: _Generation


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool = False
    n_prompt_tokens: int = 0  # cells that it holds: prompt tokens done so far, and new ones


class _Model(msgspec.Struct):
    id: str
    meta: dict[str, Any] | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaEngine:
    """Implements `ports.Engine`."""

    def __init__(self, endpoint: Endpoint, *, embedding: bool = False) -> None:
        self._http = EngineHttp(endpoint)
        self._embedding = embedding
        self._counter = LlamaTokenCounter(self._http)
        self._poll: asyncio.Task[EngineSample] | None = None

    async def healthy(self) -> bool:
        try:
            await self._http.get_text("/health", timeout_s=HEALTH_TIMEOUT_S)
        except BackendError:
            return False
        return True

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        """Slots from `/props`; the pool, which no endpoint tells, from the log.

        Without a log it is taken for one slot's context, the least it can be, unless the knobs know more.
        """
        props: _Props = await self._http.get("/props", _Props, timeout_s=START_TIMEOUT_S)
        slots, slot_ctx = props.total_slots, props.default_generation_settings.n_ctx
        printed = printed_sizes(log_lines)
        unified = knobs.pool_kind is PoolKind.UNIFIED if printed.unified is None else printed.unified
        pool = printed.n_ctx or (knobs.pool_tokens if unified else slot_ctx * slots)
        self._counter.infill.ctx_tokens = slot_ctx
        self._counter.infill.batch_tokens = printed.n_batch or DEFAULT_BATCH_TOKENS
        return Capacity(
            pool_tokens=max(pool, slot_ctx),
            ctx_tokens=min(slot_ctx, knobs.prefill_tokens) if self._embedding else slot_ctx,
            sequences=slots,
            pool_kind=PoolKind.UNIFIED if unified else PoolKind.SPLIT,
            overflow="fails_all",
            prefill_tokens=printed.n_batch or knobs.prefill_tokens,
        )

    async def sample(self) -> EngineSample:
        """Busy slots and the cells they hold.

        `/slots` waits behind the current decode batch, so a poll may outlast its caller: the next caller then
        joins it, and there is never more than one.
        """
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._look(), name="llama_slots")
        return await asyncio.shield(self._poll)

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        return await self._counter.count(path, body)

    async def model_names(self) -> Sequence[str]:
        models: _Models = await self._http.get("/v1/models", _Models, timeout_s=POLL_TIMEOUT_S)
        return [model.id for model in models.data]

    async def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        await self._http.close()

    async def _look(self) -> EngineSample:
        try:
            slots: list[_Slot] = await self._http.get("/slots", list[_Slot], timeout_s=POLL_TIMEOUT_S)
        except Answered as answer:
            if answer.status not in (404, 501):
                raise
            return await self._look_without_slots()
        busy = [slot for slot in slots if slot.is_processing]
        return EngineSample(
            at_s=time.monotonic(),
            running=len(busy),
            kv_used_tokens=sum(slot.n_prompt_tokens for slot in busy),
            busy_slots=frozenset(slot.id for slot in busy),
        )

    async def _look_without_slots(self) -> EngineSample:
        """For a server of someone else's, started with `--no-slots`; `--metrics` it may have."""
        page = await self._http.get_text("/metrics", timeout_s=POLL_TIMEOUT_S)
        running = prometheus.total(page, "llamacpp:requests_processing")
        waiting = prometheus.total(page, "llamacpp:requests_deferred")
        return EngineSample(
            at_s=time.monotonic(),
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
        )
