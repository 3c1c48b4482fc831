"""Owns each admitted request (body, bytes sent, deadline, crashes seen); the only replayer.

One request's life:

    price -> limiter -> relay -+-> done
               ^               +-> broken -> verdict -+-> the engine lives: its answer, or 502
               |                                      +-> it is gone for good: 503
               +---- head of the queue ---------------+-> a new life: replay, continue, or an error event

A client that leaves is cancelled at the engine at once; its lease drains until the engine is seen to be free
(`drain`). A non-streamed request of llama-server runs to its end there: it is not turned into a stream that
could be cancelled, since its answer must reach the client byte for byte as the engine wrote it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kvguard.api.asgi import ClientGone, Receive, UntilClientGone
from kvguard.api.errors import ErrorReply
from kvguard.demand import Dialect, Draft
from kvguard.domain import Capacity, Demand, Ending, Refusal, Snapshot, State
from kvguard.drain import Drain
from kvguard.metrics import Metrics
from kvguard.ports import Supervision
from kvguard.pricing import Pricer
from kvguard.relay import Broken, Call, Done, Reply, forward
from kvguard.sse import End
from kvguard.upstream import Upstream

if TYPE_CHECKING:
    from kvguard.limiter import Lease, Limiter

SUSPECT_AT_CRASHES = 2
"""Memory crashes that a request must have been in flight at before it runs alone."""

_log = structlog.get_logger("kvguard.inflight")


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One request in flight. Changed by its own task, except for what `Inflight.crashed` writes."""

    request_id: str
    key: str
    path: str
    call: Call
    draft: Draft
    reply: Reply
    arrived_at_s: float
    must_start_by_s: float
    priority: int = 0
    sequences: int = 1
    generation: int = -1  # the backend life that it runs on; -1 while it waits
    sent_at_s: float = 0.0
    attempts: int = 0
    crashes: int = 0
    poisonous: bool = False
    ending: Ending = Ending.FAILED
    end: End = field(default_factory=lambda: End(complete=False))

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT_AT_CRASHES


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightParts:
    """What the composition root hands over. `wait_s` is the longest wait in the queue."""

    supervision: Supervision
    limiter: Limiter
    pricer: Pricer
    upstream: Upstream
    drain: Drain
    metrics: Metrics
    dialect: Dialect
    wait_s: float
    clock: Callable[[], float] = time.monotonic


class Inflight:
    """All requests in flight; implements the supervisor's `Blame`."""

    def __init__(self, parts: InflightParts) -> None:
        self._p = parts
        self._flights: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def running(self) -> Iterator[Flight]:
        """Flights that the engine has now."""
        return (flight for flight in self._flights if flight.generation >= 0)

    def crashed(self, generation: int, *, memory: bool) -> bool:
        """Note a death. True: a suspect was alone in flight, so it and not the configuration is to blame."""
        victims = [flight for flight in self._flights if flight.generation == generation]
        if not memory:
            return False
        for flight in victims:
            flight.poisonous = flight.suspect and len(victims) == 1
            flight.crashes += 1
        return any(flight.poisonous for flight in victims)

    async def serve(self, flight: Flight, receive: Receive) -> None:
        """See one request through to its end, whatever happens to the engine or the client."""
        self._flights.add(flight)
        self._p.metrics.inflight.inc()
        try:
            async with UntilClientGone(receive):
                error = await self._fly(flight)
                if error is not None:
                    await self._refuse(flight, error)
        except ClientGone:
            flight.ending = Ending.CANCELLED
        finally:
            self._flights.discard(flight)
            self._account(flight)

    async def _fly(self, flight: Flight) -> ErrorReply | None:
        """Attempts until one succeeds. Returns the error for the client, None when it has its answer."""
        while True:
            lease = await self._admit(flight)
            if isinstance(lease, ErrorReply):
                return lease
            outcome = await self._attempt(flight, lease)
            if isinstance(outcome, Done):
                flight.ending, flight.end = outcome.end.ending, outcome.end
                return None
            error = await self._after_break(flight, outcome)
            if error is not None or flight.reply.finished:
                return error
            flight.generation = -1
            self._p.metrics.replayed.labels("replayed").inc()
            _log.info("request_replayed", request_id=flight.request_id, crashes=flight.crashes)

    # ------------------------------------------------------------ admission

    async def _admit(self, flight: Flight) -> Lease | ErrorReply:
        """Wait for a place. The prompt is counted exactly only where the bound would not do."""
        snapshot = self._p.supervision.snapshot
        if snapshot.state is State.FAILED:
            return backend_failed(snapshot)
        demand = await self._p.pricer.quick(flight.draft, snapshot.capacity)
        if demand is None or _may_never_fit(demand, snapshot.capacity):
            demand = await self._exact(flight, snapshot.capacity)
        answer = await self._acquire(flight, demand)
        if isinstance(answer, Refusal) and answer.code == "context_length_exceeded" and not demand.exact:
            answer = await self._acquire(flight, await self._exact(flight, snapshot.capacity))
        return ErrorReply.of(answer) if isinstance(answer, Refusal) else answer

    async def _exact(self, flight: Flight, capacity: Capacity | None) -> Demand:
        return await self._p.pricer.exact(flight.draft, flight.path, flight.call.body, capacity)

    async def _acquire(self, flight: Flight, demand: Demand) -> Lease | Refusal:
        flight.sequences = demand.sequences
        return await self._p.limiter.acquire(
            demand,
            key=flight.key,
            priority=flight.priority,
            deadline_s=flight.must_start_by_s,
            body_bytes=len(flight.call.body),
            request_id=flight.request_id,
            front=flight.attempts > 0,
        )

    # ------------------------------------------------------------ one attempt

    async def _attempt(self, flight: Flight, lease: Lease) -> Done | Broken:
        snapshot = self._p.supervision.snapshot
        flight.generation, flight.sent_at_s = lease.generation, self._p.clock()
        if snapshot.generation != lease.generation or snapshot.endpoint is None:
            lease.release(Ending.CANCELLED)
            return Broken(reason="the backend changed before the request was sent")
        flight.attempts += 1
        try:
            outcome = await forward(
                self._p.upstream, snapshot.endpoint, flight.call, flight.reply, lease.progress
            )
        except BaseException:
            self._p.drain.add(lease, streamed=flight.draft.stream)
            raise
        if isinstance(outcome, Done):
            lease.release(outcome.end.ending, outcome.end.new_tokens)
        else:
            lease.release(Ending.FAILED)
        return outcome

    async def _after_break(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        """Ask what became of the engine. None with an unfinished reply means: try again.

        1. the verdict does not come in time: 503
        2. no engine any more: 503
        3. the same life goes on: the answer that was held back, the end of a stream that has none, or 502
        4. a new life, and this request alone killed the last one: 400
        5. a new life, and the client has seen nothing yet: again
        6. a new life, and the client has seen a part: an error event
        """
        try:
            async with asyncio.timeout(self._p.wait_s):
                snapshot = await self._p.supervision.verdict(flight.generation)
        except TimeoutError:  # 1
            return ErrorReply(
                code="backend_restarted", status=503, retry_after_s=5.0,
                message=f"The backend did not come back within {self._p.wait_s:g} s. Try again later.",
            )  # fmt: skip
        if snapshot.state in (State.FAILED, State.STOPPED):  # 2
            return backend_failed(snapshot)
        if snapshot.generation == flight.generation:  # 3
            return await self._own_fault(flight, broken)
        if flight.poisonous:  # 4
            return ErrorReply(
                code="request_poisonous",
                message="The backend ran out of memory while it ran this request alone. "
                "Shorten the prompt or ask for fewer tokens.",
            )
        flight.must_start_by_s = max(flight.must_start_by_s, self._p.clock() + self._p.wait_s)
        if flight.reply.sent_bytes == 0:  # 5
            return None
        return ErrorReply(  # 6
            code="backend_restarted",
            message="The backend was restarted while it answered, and this answer cannot be continued.",
        )

    async def _own_fault(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        if broken.held is not None:
            if flight.reply.started:
                await flight.reply.finish(broken.held.body)
            else:
                await flight.reply.whole(broken.held.status, broken.held.headers, broken.held.body)
            return None
        if broken.clean:
            flight.ending = Ending.FINISHED
            await flight.reply.finish()
            return None
        return ErrorReply(
            code="backend_failed", status=502, message=f"The backend broke off the request: {broken.reason}."
        )

    # ------------------------------------------------------------ endings

    async def _refuse(self, flight: Flight, error: ErrorReply) -> None:
        self._p.metrics.refused.labels(flight.draft.route.name, error.code).inc()
        _log.info("request_refused", request_id=flight.request_id, code=error.code, key=flight.key)
        await flight.reply.error(error)

    def _account(self, flight: Flight) -> None:
        metrics, route = self._p.metrics, flight.draft.route.name
        metrics.inflight.dec()
        metrics.requests.labels(route, flight.ending.value).inc()
        metrics.duration_s.labels(route).observe(self._p.clock() - flight.arrived_at_s)
        if flight.reply.first_byte_at_s is not None:
            metrics.first_byte_s.labels(route).observe(flight.reply.first_byte_at_s - flight.arrived_at_s)
        metrics.prompt_tokens.inc(flight.end.prompt_tokens or 0)
        metrics.new_tokens.inc(flight.end.new_tokens or 0)


def backend_failed(snapshot: Snapshot) -> ErrorReply:
    return ErrorReply(
        code="backend_failed",
        message=f"The backend is not running: {snapshot.detail or snapshot.state.value}.",
    )


def _may_never_fit(demand: Demand, capacity: Capacity | None) -> bool:
    """Whether a bound alone would have this request refused."""
    if capacity is None or demand.exact:
        return False
    return demand.prompt_tokens + (demand.max_new_tokens or 1) > capacity.ctx_tokens
