"""Owns each admitted request (body, bytes sent, deadline, crashes seen); the only replayer.

One request's life:

    price -> limiter -> relay -+-> done
               ^               +-> broken -> verdict -+-> the engine lives: its answer, or 502
               |                                      +-> it is gone for good: 503
               +---- head of the queue ---------------+-> a new life: replay, continue, or an error event

The limiter may take a stream back before the engine's pool overflows; that is a break without a verdict.

A client that leaves is cancelled at the engine at once; its lease drains until the engine is seen to be free
(`drain`). A non-streamed request of llama-server runs to its end there: it is not turned into a stream that
could be cancelled, since its answer must reach the client byte for byte as the engine wrote it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from kvguard.api.asgi import ClientGone, Receive, UntilClientGone
from kvguard.api.errors import ErrorReply
from kvguard.continuation import CannotContinue, Joint, check, length_end, plan, read_sent
from kvguard.demand import Dialect, Draft
from kvguard.domain import Capacity, Demand, Ending, PoolKind, Refusal, Snapshot, State
from kvguard.drain import Drain
from kvguard.lease import Lease
from kvguard.limiter import Limiter
from kvguard.metrics import Metrics
from kvguard.ports import Supervision
from kvguard.pricing import Pricer
from kvguard.relay import Broken, Call, Done, Reply, forward
from kvguard.sse import End
from kvguard.upstream import Upstream

SUSPECT_AT_CRASHES = 2
"""Memory crashes that a request must have been in flight at before it runs alone."""

_log = structlog.get_logger("kvguard.inflight")


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One request in flight. Changed by its own task, except for what `Inflight.crashed` writes.

    body            as the client sent it; `call` holds what goes to the engine next
    generation      the backend life that has it, or had it when that broke; -1 while it waits
    must_start_by_s when its wait for a place ends, on the clock of the limiter
    joint           rewrites the events of a continuation
    """

    request_id: str
    key: str
    path: str
    body: bytes
    call: Call
    draft: Draft
    reply: Reply
    arrived_at_s: float
    must_start_by_s: float
    demand: Demand | None = None
    lease: Lease | None = None
    generation: int = -1
    in_engine: bool = False
    sent_at_s: float = 0.0
    attempts: int = 0
    crashes: int = 0
    poisonous: bool = False
    taken_back: bool = False
    joint: Joint | None = None
    ending: Ending = Ending.FAILED
    end: End = field(default_factory=lambda: End(complete=False))

    @property
    def sequences(self) -> int:
        return self.demand.sequences if self.demand is not None else 1

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
        return (flight for flight in self._flights if flight.in_engine)

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
            error = None if flight.taken_back else await self._after_break(flight, outcome)
            if error is None and not flight.reply.finished:
                error = await self._prepare_again(flight)
            if error is not None or flight.reply.finished:
                return error
            flight.generation, flight.taken_back = -1, False

    # ------------------------------------------------------------ admission

    async def _admit(self, flight: Flight) -> Lease | ErrorReply:
        """Wait for a place. Prompts are counted exactly only where the bound would not do:

        1. nothing bounds the prompt, or the bound alone would have the request refused
        2. the bound does not fit beside those that run: then theirs are counted, too
        """
        snapshot = self._p.supervision.snapshot
        if snapshot.state is State.FAILED:
            return backend_failed(snapshot)
        demand = await self._p.pricer.quick(flight.draft, snapshot.capacity)
        if demand is None or _may_never_fit(demand, snapshot.capacity):  # 1
            demand = await self._exact(flight, snapshot.capacity)
        elif not demand.exact and not self._roomy(demand, snapshot.capacity):  # 2
            demand = await self._exact(flight, snapshot.capacity)
            await self._sharpen(snapshot.capacity)
        answer = await self._acquire(flight, demand)
        if isinstance(answer, Refusal) and answer.code == "context_length_exceeded" and not demand.exact:
            answer = await self._acquire(flight, await self._exact(flight, snapshot.capacity))
        return ErrorReply.of(answer) if isinstance(answer, Refusal) else answer

    def _roomy(self, demand: Demand, capacity: Capacity | None) -> bool:
        """Whether the request starts at once even at the price of its bound."""
        if capacity is None or self._p.limiter.waiting:
            return False
        held = [flight.demand for flight in self._flights if flight.lease is not None and flight.demand]
        tokens = sum(_most_tokens(item, capacity) for item in (*held, demand))
        return tokens <= capacity.pool_tokens

    async def _sharpen(self, capacity: Capacity | None) -> None:
        """Count the prompts that run at the price of their bound: they may hold room that nobody needs."""
        for flight in list(self.running()):
            lease = flight.lease
            if flight.demand is None or flight.demand.exact or lease is None:
                continue
            demand = await self._exact(flight, capacity)
            if demand.exact and flight.lease is lease:
                flight.demand = demand
                lease.reprice(demand)

    async def _exact(self, flight: Flight, capacity: Capacity | None) -> Demand:
        return await self._p.pricer.exact(flight.draft, flight.path, flight.body, capacity)

    async def _acquire(self, flight: Flight, demand: Demand) -> Lease | Refusal:
        capacity = self._p.supervision.snapshot.capacity
        if flight.suspect and capacity is not None:
            demand = _alone(demand, capacity)
        answer = await self._p.limiter.acquire(
            demand,
            key=flight.key,
            deadline_s=flight.must_start_by_s,
            body_bytes=len(flight.body),
            request_id=flight.request_id,
            front=flight.attempts > 0,
        )
        flight.demand = demand
        return answer

    # ------------------------------------------------------------ one attempt

    async def _attempt(self, flight: Flight, lease: Lease) -> Done | Broken:
        snapshot = self._p.supervision.snapshot
        flight.generation = lease.generation
        self._p.metrics.waited_s.observe(lease.waited_s)
        if snapshot.generation != lease.generation or snapshot.endpoint is None:
            lease.release(Ending.CANCELLED, 0)
            return Broken(reason="the backend changed meanwhile", never_sent=True)
        flight.attempts += 1
        flight.lease, flight.in_engine, flight.sent_at_s = lease, True, self._p.clock()
        goes_on = self._may_be_taken_back(flight, lease)

        def progress(new_tokens: int) -> None:
            lease.progress(new_tokens)
            if not goes_on:
                lease.forbid_take_back()

        try:
            outcome = await forward(
                self._p.upstream,
                snapshot.endpoint,
                flight.call,
                flight.reply,
                progress=progress,
                rewrite=flight.joint,
            )
        except BaseException:
            self._p.drain.add(lease, streamed=flight.draft.stream)
            task = asyncio.current_task()
            if not flight.taken_back or task is None or task.uncancel() > 0:
                raise
            return Broken(reason="taken back")
        finally:
            lease.forbid_take_back()
            flight.lease, flight.in_engine = None, False
        if isinstance(outcome, Done):
            lease.release(outcome.end.ending, outcome.end.new_tokens)
        else:
            lease.release(Ending.FAILED)
        return outcome

    def _may_be_taken_back(self, flight: Flight, lease: Lease) -> bool:
        """Let the limiter take a stream back. Returns whether that may be after its first event, too."""
        if not flight.draft.stream:
            return False  # some engines would run it to its end all the same
        task = asyncio.current_task()
        assert task is not None

        def take_back() -> None:
            flight.taken_back = True
            task.cancel()

        lease.allow_take_back(take_back)
        try:
            check(flight.path, msgspec.json.decode(flight.body), self._p.dialect)
        except CannotContinue:
            return False
        return True

    # ------------------------------------------------------------ after a break

    async def _after_break(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        """Ask what became of the engine. None with an unfinished reply means: try again.

        1. the verdict does not come in time: 503
        2. no engine any more: 503
        3. the same life goes on: the answer that was held back, the end of a stream that has none, or 502
        4. a new life, and this request alone killed the last one: 400
        5. a new life: again, with a deadline of its own, since it had its place
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
        flight.must_start_by_s = max(flight.must_start_by_s, self._p.clock() + self._p.wait_s)  # 5
        return None

    async def _own_fault(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        if broken.never_sent:
            return None
        if broken.held is not None:
            await flight.reply.release(broken.held)
            return None
        if broken.clean:
            flight.ending = Ending.FINISHED
            await flight.reply.finish()
            return None
        return ErrorReply(
            code="backend_failed", status=502, message=f"The backend broke off the request: {broken.reason}."
        )

    async def _prepare_again(self, flight: Flight) -> ErrorReply | None:
        """Make the next attempt a replay, or a continuation of what the client already has."""
        how = "replayed"
        if flight.reply.sent_bytes:
            try:
                await self._continue(flight)
            except CannotContinue as exc:
                return ErrorReply(
                    code="backend_restarted",
                    message=f"The backend was restarted while it answered, and {exc}, "
                    "so this answer cannot be continued.",
                )
            how = "continued"
        self._p.metrics.replayed.labels(how).inc()
        _log.info(
            f"request_{how}",
            request_id=flight.request_id,
            crashes=flight.crashes,
            taken_back=flight.taken_back,
            sent_bytes=flight.reply.sent_bytes,
        )
        return None

    async def _continue(self, flight: Flight) -> None:
        """Put what was sent behind the prompt, or end an answer that had reached its limit."""
        if flight.reply.transcript is None:
            raise CannotContinue("its events were not kept")
        body = msgspec.json.decode(flight.body)
        check(flight.path, body, self._p.dialect)
        sent = read_sent(flight.path, flight.reply.transcript)
        counted = len(sent.token_ids) if sent.token_ids else await self._p.pricer.tokens_of(sent.text)
        produced = sent.events if counted is None else counted
        limit = flight.draft.max_new_tokens
        if limit is not None and produced >= limit:
            demand = await self._exact(flight, self._p.supervision.snapshot.capacity)
            flight.ending = Ending.TRUNCATED
            await flight.reply.finish(
                length_end(flight.path, body, sent, produced=produced, prompt_tokens=demand.prompt_tokens)
            )
            return
        again = plan(
            flight.path, body, sent, produced=produced, max_new_tokens=limit, dialect=self._p.dialect
        )
        flight.call, flight.joint = replace(flight.call, body=again.body), again.joint

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


def _most_tokens(demand: Demand, capacity: Capacity) -> int:
    """The most that a request may hold at its end."""
    each = capacity.ctx_tokens
    if demand.max_new_tokens is not None:
        each = min(each, demand.prompt_tokens + demand.max_new_tokens)
    return demand.sequences * capacity.rounded(each)


def _alone(demand: Demand, capacity: Capacity) -> Demand:
    """A demand that leaves no room for another: all sequences, and together the tokens of the pool."""
    each = capacity.ctx_tokens
    if capacity.pool_kind is PoolKind.UNIFIED:
        each = min(each, capacity.pool_tokens // capacity.sequences)
    each = each // capacity.block_tokens * capacity.block_tokens
    prompt_tokens = max(0, min(demand.prompt_tokens, each - 1))
    return replace(
        demand,
        sequences=capacity.sequences,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max(0, each - prompt_tokens),
        counted=False,
    )


def _may_never_fit(demand: Demand, capacity: Capacity | None) -> bool:
    """Whether a bound alone would have this request refused."""
    if capacity is None or demand.exact:
        return False
    return demand.prompt_tokens + (demand.max_new_tokens or 1) > capacity.ctx_tokens
