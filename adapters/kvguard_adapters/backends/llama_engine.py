"""A running llama.cpp server: health, capacity and samples over its native HTTP API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvguard.domain import Capacity, Endpoint, EngineSample, Knobs, PoolKind
from kvguard.ports import BackendError, ProtocolError
from kvguard_adapters.backends.http import EngineHttp
from kvguard_adapters.backends.llama_log import printed_sizes
from kvguard_adapters.tokenizers.backend_http import LlamaTokenCounter

HEALTH_TIMEOUT_S = 2.0
POLL_TIMEOUT_S = 2.0
START_TIMEOUT_S = 30.0


class _Slot(msgspec.Struct):
    id: int
    n_ctx: int
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
        """Slots from `/slots`; the pool, which no endpoint tells, from the log.

        Without a log it is taken for one slot's context, the least it can be, unless the knobs know more.
        """
        slots = await self._slots(START_TIMEOUT_S)
        if not slots:
            raise ProtocolError("/slots shows no slot")
        printed = printed_sizes(log_lines)
        slot_ctx = min(slot.n_ctx for slot in slots)
        unified = knobs.pool_kind is PoolKind.UNIFIED if printed.unified is None else printed.unified
        known = printed.n_ctx or (knobs.pool_tokens if unified else slot_ctx * len(slots))
        batch = printed.n_batch or knobs.prefill_tokens
        ctx = min(slot_ctx, knobs.prefill_tokens) if self._embedding else slot_ctx
        return Capacity(
            pool_tokens=max(known, slot_ctx),
            ctx_tokens=ctx,
            sequences=len(slots),
            pool_kind=PoolKind.UNIFIED if unified else PoolKind.SPLIT,
            overflow="fails_all",
            prefill_tokens=batch,
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
        slots = await self._slots(POLL_TIMEOUT_S)
        busy = [slot for slot in slots if slot.is_processing]
        return EngineSample(
            at_s=time.monotonic(),
            running=len(busy),
            kv_used_tokens=sum(slot.n_prompt_tokens for slot in busy),
            busy_slots=frozenset(slot.id for slot in busy),
        )

    async def _slots(self, timeout_s: float) -> list[_Slot]:
        slots: list[_Slot] = await self._http.get("/slots", list[_Slot], timeout_s=timeout_s)
        return slots
