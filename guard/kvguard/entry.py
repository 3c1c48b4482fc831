"""The way in: a request is priced, waits for a place, and leaves with a lease or an error.

Prompts are counted exactly only where a decision hangs on it. While the bound of every request fits beside
the others, nobody is counted; when one would have to wait, it and those that run are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from kvguard.api.errors import ErrorReply
from kvguard.domain import Capacity, Demand, PoolKind, Refusal, Snapshot, State
from kvguard.flight import Flight
from kvguard.lease import Lease
from kvguard.limiter import Limiter
from kvguard.ports import Supervision
from kvguard.pricing import Pricer


class Entry:
    """Admits flights; `flights` are all that there are, `running` those with a lease."""

    def __init__(
        self,
        *,
        supervision: Supervision,
        limiter: Limiter,
        pricer: Pricer,
        running: Callable[[], Collection[Flight]],
    ) -> None:
        self._supervision = supervision
        self._limiter = limiter
        self._pricer = pricer
        self._running = running

    async def admit(self, flight: Flight) -> Lease | ErrorReply:
        """Wait for a place. A replay keeps its first price: there may be no engine now that could count."""
        snapshot = self._supervision.snapshot
        if snapshot.state is State.FAILED:
            return backend_failed(snapshot)
        demand = flight.demand
        if demand is None:
            demand = await self._price(flight, snapshot.capacity)
        answer = await self._acquire(flight, demand)
        if isinstance(answer, Refusal) and answer.code == "context_length_exceeded" and not demand.exact:
            demand = await self.exact(flight, self._supervision.snapshot.capacity)
            answer = await self._acquire(flight, demand)
        return answer if isinstance(answer, Lease) else self._refused(flight, answer)

    async def exact(self, flight: Flight, capacity: Capacity | None) -> Demand:
        flight.sharpened = True
        return await self._pricer.exact(flight.draft, flight.path, flight.body, capacity)

    async def _price(self, flight: Flight, capacity: Capacity | None) -> Demand:
        """The cheapest price that decides as the exact one would:

        1. nothing bounds the prompt, or the bound alone would have the request refused: count
        2. the bound does not fit beside those that run: count, theirs too
        3. the bound
        """
        demand = await self._pricer.quick(flight.draft, capacity)
        if demand is None or _may_never_fit(demand, capacity):  # 1
            return await self.exact(flight, capacity)
        if not demand.exact and not self._roomy(demand, capacity):  # 2
            await self._sharpen(capacity)
            return await self.exact(flight, capacity)
        return demand  # 3

    def _roomy(self, demand: Demand, capacity: Capacity | None) -> bool:
        """Whether the request starts at once even at the price of its bound."""
        if capacity is None or self._limiter.waiting:
            return False
        held = [flight.demand for flight in self._running() if flight.demand is not None]
        return sum(_most_tokens(item, capacity) for item in (*held, demand)) <= capacity.pool_tokens

    async def _sharpen(self, capacity: Capacity | None) -> None:
        """Count the prompts that run at the price of their bound: they may hold room that nobody needs."""
        for flight in list(self._running()):
            lease = flight.lease
            if flight.sharpened or lease is None or flight.demand is None or flight.demand.exact:
                continue
            demand = await self.exact(flight, capacity)
            if demand.exact and flight.lease is lease:
                flight.demand = demand
                lease.reprice(demand)

    async def _acquire(self, flight: Flight, demand: Demand) -> Lease | Refusal:
        flight.demand = demand
        capacity = self._supervision.snapshot.capacity
        if flight.suspect and capacity is not None:
            demand = alone(demand, capacity)
        return await self._limiter.acquire(
            demand,
            key=flight.key,
            priority=flight.priority,
            deadline_s=flight.must_start_by_s,
            body_bytes=len(flight.body),
            request_id=flight.request_id,
            front=flight.attempts > 0,
        )

    def _refused(self, flight: Flight, refusal: Refusal) -> ErrorReply:
        if flight.attempts and refusal.code == "overloaded":
            return ErrorReply(
                code="backend_restarted",
                message="The backend was restarted, and did not come back in time. Try again later.",
                status=503,
                retry_after_s=refusal.retry_after_s,
            )
        return ErrorReply.of(refusal)


def backend_failed(snapshot: Snapshot) -> ErrorReply:
    detail = (snapshot.detail or snapshot.state.value).rstrip(".")
    return ErrorReply(code="backend_failed", message=f"The backend is not running: {detail}.")


def alone(demand: Demand, capacity: Capacity) -> Demand:
    """A demand that leaves no room for another: all sequences, and together the tokens of the pool."""
    each = capacity.ctx_tokens
    if capacity.pool_kind is PoolKind.UNIFIED:
        each = min(each, capacity.pool_tokens // capacity.sequences)
    each = max(1, each // capacity.block_tokens * capacity.block_tokens)
    prompt_tokens = min(demand.prompt_tokens, each - 1)
    return replace(
        demand,
        sequences=capacity.sequences,
        prompt_tokens=prompt_tokens,
        max_new_tokens=each - prompt_tokens,
        counted=False,
    )


def _most_tokens(demand: Demand, capacity: Capacity) -> int:
    """The most that a request may hold at its end."""
    each = capacity.ctx_tokens
    if demand.max_new_tokens is not None:
        each = min(each, demand.prompt_tokens + demand.max_new_tokens)
    return demand.sequences * capacity.rounded(each)


def _may_never_fit(demand: Demand, capacity: Capacity | None) -> bool:
    """Whether a bound alone would have this request refused."""
    if capacity is None or demand.exact:
        return False
    return demand.prompt_tokens + (demand.max_new_tokens or 1) > capacity.ctx_tokens
