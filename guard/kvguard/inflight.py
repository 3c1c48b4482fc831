"""Owns each admitted request (body, bytes sent, deadline, crashes seen); the only replayer.

One request's life:

    entry (price, wait) -> relay -+-> done
          ^                       +-> broken -+-> the engine lives: its answer, or 502
          |                                   +-> it is gone for good: 503
          +---- head of the queue ------------+-> it is dead: replay, continue, or an error event

The limiter may take a stream back before the engine's pool overflows; that is a break without a question.

A client that leaves is cancelled at the engine at once; its lease drains until the engine is seen to be free
(`drain`). A non-streamed request of llama-server runs to its end there: it is not turned into a stream that
could be cancelled, since its answer must reach the client byte for byte as the engine wrote it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import structlog

from kvguard.api.asgi import ClientGone, Receive, UntilClientGone
from kvguard.api.errors import ErrorReply
from kvguard.continuation import CannotContinue, length_end, may_continue, plan, read_sent
from kvguard.demand import Dialect
from kvguard.domain import Ending, Snapshot, State
from kvguard.drain import Drain
from kvguard.entry import Entry, backend_failed
from kvguard.flight import Flight
from kvguard.lease import Lease
from kvguard.limiter import Limiter
from kvguard.metrics import Metrics
from kvguard.overflow import MOST_OVERFLOWS, is_overflow
from kvguard.ports import Supervision
from kvguard.pricing import Pricer
from kvguard.relay import Broken, Done, Reply, forward
from kvguard.upstream import Upstream

MAX_UNREACHED = 5
"""Times that a living engine may take no connection before the client hears of it."""

_log = structlog.get_logger("kvguard.inflight")


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightParts:
    """What the composition root hands over.

    wait_s        longest wait in the queue
    ping_waiting  keep streams alive while they wait for their first place, which commits their status
    """

    supervision: Supervision
    limiter: Limiter
    pricer: Pricer
    upstream: Upstream
    drain: Drain
    metrics: Metrics
    dialect: Callable[[], Dialect]
    wait_s: float
    ping_waiting: bool = False
    ping_every_s: float = 10.0
    clock: Callable[[], float] = time.monotonic


class Inflight:
    """All requests in flight; implements the supervisor's `Blame`."""

    def __init__(self, parts: InflightParts) -> None:
        self._p = parts
        self.overflows = 0
        self._flights: set[Flight] = set()
        self._placed: set[Flight] = set()
        self._entry = Entry(
            supervision=parts.supervision,
            limiter=parts.limiter,
            pricer=parts.pricer,
            running=lambda: self._placed,
        )

    def __len__(self) -> int:
        return len(self._flights)

    def running(self) -> list[Flight]:
        """Flights that the engine has now."""
        return [flight for flight in self._placed if flight.in_engine]

    def in_flight(self, generation: int) -> int:
        return len(self._victims(generation))

    def _victims(self, generation: int) -> list[Flight]:
        """Flights that this life had, or may have had, when it ended."""
        return [f for f in self._flights if f.generation == generation and not f.unreached]

    def crashed(self, generation: int, *, memory: bool) -> bool:
        """Note a death. True: a suspect was alone in flight, so it and not the configuration is to blame."""
        if not memory:
            return False
        victims = self._victims(generation)
        for flight in victims:
            flight.poisonous = flight.suspect and len(victims) == 1
            flight.crashes += 1
        return any(flight.poisonous for flight in victims)

    async def serve(self, flight: Flight, receive: Receive) -> None:
        """See one request through to its end, whatever happens to the engine or the client."""
        self._flights.add(flight)
        self._p.metrics.inflight += 1
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
            flight.lease = lease
            self._placed.add(flight)
            try:
                error = await self._attempt_with(flight, lease)
            finally:
                flight.lease, flight.generation = None, -1
                self._placed.discard(flight)
            if error is not None or flight.reply.finished:
                return error

    async def _admit(self, flight: Flight) -> Lease | ErrorReply:
        """Wait for a place, and keep the client of a stream from giving up meanwhile."""
        if not flight.draft.stream or not (flight.reply.is_stream or self._p.ping_waiting):
            return await self._entry.admit(flight)
        pings = asyncio.create_task(_ping(flight.reply, self._p.ping_every_s), name="pings")
        try:
            return await self._entry.admit(flight)
        finally:
            pings.cancel()

    async def _attempt_with(self, flight: Flight, lease: Lease) -> ErrorReply | None:
        """One attempt and what follows from it. None with an unfinished reply means: once more.

        The lease is kept until it is known what a break means, so that nobody else runs into a dead engine.
        """
        flight.generation = lease.generation
        outcome = await self._attempt(flight, lease)
        if isinstance(outcome, Done):
            flight.ending, flight.end = outcome.end.ending, outcome.end
            lease.release(outcome.end.ending, outcome.end.new_tokens)
            return None
        if flight.taken_back:
            flight.taken_back = False
            return self._once_more(flight)
        if is_overflow(outcome) and flight.overflows < MOST_OVERFLOWS:
            self._overflowed(flight)
            lease.release(Ending.FAILED)
            return self._once_more(flight)
        try:
            return await self._after_break(flight, outcome)
        finally:
            lease.release(Ending.FAILED)

    # ------------------------------------------------------------ one attempt

    async def _attempt(self, flight: Flight, lease: Lease) -> Done | Broken:
        snapshot = self._p.supervision.snapshot
        self._p.metrics.waited_s.observe(lease.waited_s)
        if snapshot.generation != lease.generation or snapshot.endpoint is None:
            flight.unreached += 1
            return Broken(reason="the backend changed meanwhile", never_sent=True)
        if flight.attempts:
            try:
                await self._prepare_again(flight, snapshot)
            except BaseException:  # the client left: the engine has seen nothing
                lease.release(Ending.CANCELLED, 0)
                raise
            if flight.reply.finished:
                return Done(end=flight.end)
        flight.attempts += 1
        flight.in_engine, flight.sent_at_s = True, self._p.clock()
        try:
            outcome = await forward(
                self._p.upstream,
                snapshot.endpoint,
                flight.call,
                flight.reply,
                progress=self._progress(flight, lease),
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
            flight.in_engine = False
        reached = isinstance(outcome, Done) or not outcome.never_sent
        flight.unreached = 0 if reached else flight.unreached + 1
        return outcome

    def _progress(self, flight: Flight, lease: Lease) -> Callable[[int], None]:
        """Let the limiter take a stream back: until its first event, or longer if it could be continued."""
        if not flight.draft.stream:  # some engines would run it to its end all the same
            return lease.progress
        task = asyncio.current_task()
        assert task is not None

        def take_back() -> None:
            flight.taken_back = True
            task.cancel()

        def first_progress(new_tokens: int) -> None:
            if not may_continue(flight.path, flight.body, self._p.dialect()):
                lease.forbid_take_back()
            lease.progress(new_tokens)

        lease.allow_take_back(take_back)
        return _first_then(first_progress, lease.progress)

    # ------------------------------------------------------------ after a break

    async def _after_break(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        """Ask what became of the engine. None with an unfinished reply means: once more.

        1. the verdict does not come in time: 503
        2. no engine any more: 503
        3. the same life goes on: the answer that was held back, the end of a stream that has none, or 502
        4. it is dead, and this request was alone when it died: 400
        5. it is dead: again, with a deadline of its own, since it had its place
        """
        try:
            async with asyncio.timeout(self._p.wait_s):
                snapshot = await self._fate(flight.generation)
        except TimeoutError:  # 1
            return ErrorReply(
                code="backend_restarted", status=503, retry_after_s=5.0,
                message=f"The backend broke off, and did not recover within {self._p.wait_s:g} s.",
            )  # fmt: skip
        if snapshot.state in (State.FAILED, State.STOPPED):  # 2
            return backend_failed(snapshot)
        if snapshot.ready and snapshot.generation == flight.generation:  # 3
            return await self._own_fault(flight, broken)
        if flight.poisonous:  # 4
            return ErrorReply(
                code="request_poisonous",
                message="The backend ran out of memory while it ran this request alone. "
                "Shorten the prompt or ask for fewer tokens.",
            )
        return self._once_more(flight)  # 5

    def _once_more(self, flight: Flight) -> ErrorReply | None:
        """Let it wait again, with a deadline of its own, since it had its place."""
        flight.must_start_by_s = max(flight.must_start_by_s, self._p.clock() + self._p.wait_s)
        return _refusal_to_continue(flight, self._p.dialect())

    def _overflowed(self, flight: Flight) -> None:
        """The pool was overrun. Next time it starts only where its maximum fits, so that it happens once."""
        self.overflows += 1
        flight.overflows += 1
        if flight.demand is not None:
            flight.demand = replace(flight.demand, counted=False)
        _log.warning("request_overflowed", request_id=flight.request_id, overflows=flight.overflows)

    async def _fate(self, generation: int) -> Snapshot:
        """The supervisor's verdict on a life, or the first snapshot that shows its end.

        A replay does not wait for the next life before it queues: it would find others there first.
        """
        supervision = self._p.supervision
        snapshot = supervision.snapshot
        while snapshot.ready and snapshot.generation == generation:
            verdict = asyncio.ensure_future(supervision.verdict(generation))
            changed = asyncio.ensure_future(supervision.changed(than=snapshot))
            try:
                done, _ = await asyncio.wait({verdict, changed}, return_when=asyncio.FIRST_COMPLETED)
                snapshot = (verdict if verdict in done else changed).result()
                if verdict in done:
                    return snapshot
            finally:
                for task in (verdict, changed):
                    task.cancel()
        return snapshot

    async def _own_fault(self, flight: Flight, broken: Broken) -> ErrorReply | None:
        if broken.never_sent and flight.unreached <= MAX_UNREACHED:
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

    async def _prepare_again(self, flight: Flight, snapshot: Snapshot) -> None:
        """Make the next attempt a replay, or a continuation of what the client already has."""
        how = "continued" if flight.reply.sent_bytes else "replayed"
        if flight.reply.sent_bytes:
            await self._continue(flight, snapshot)
        self._p.metrics.replayed[how] += 1
        _log.info(
            f"request_{how}",
            request_id=flight.request_id,
            crashes=flight.crashes,
            sent_bytes=flight.reply.sent_bytes,
        )

    async def _continue(self, flight: Flight, snapshot: Snapshot) -> None:
        """Put what was sent behind the prompt, or end an answer that had reached its limit."""
        body = msgspec.json.decode(flight.body)
        sent = read_sent(flight.path, flight.reply.transcript or [])
        counted = len(sent.token_ids) if sent.token_ids else await self._p.pricer.tokens_of(sent.text)
        produced = sent.events if counted is None else counted
        limit = flight.draft.max_new_tokens
        if limit is not None and produced >= limit:
            demand = await self._entry.exact(flight, snapshot.capacity)
            last = length_end(flight.path, body, sent, produced=produced, prompt_tokens=demand.prompt_tokens)
            flight.end = replace(flight.end, complete=True, ending=Ending.TRUNCATED, new_tokens=produced)
            await flight.reply.finish(last)
            return
        again = plan(
            flight.path, body, sent, produced=produced, max_new_tokens=limit, dialect=self._p.dialect()
        )
        flight.call, flight.joint = replace(flight.call, body=again.body), again.joint

    # ------------------------------------------------------------ endings

    async def _refuse(self, flight: Flight, error: ErrorReply) -> None:
        self._p.metrics.refused[flight.draft.route.name, error.code] += 1
        _log.info("request_refused", request_id=flight.request_id, code=error.code, key=flight.key)
        await flight.reply.error(error)

    def _account(self, flight: Flight) -> None:
        metrics, route = self._p.metrics, flight.draft.route.name
        metrics.inflight -= 1
        metrics.requests[route, flight.ending.value] += 1
        metrics.duration_s[route].observe(self._p.clock() - flight.arrived_at_s)
        if flight.reply.first_byte_at_s is not None:
            metrics.first_byte_s[route].observe(flight.reply.first_byte_at_s - flight.arrived_at_s)
        metrics.prompt_tokens += flight.end.prompt_tokens or 0
        metrics.new_tokens += flight.end.new_tokens or 0


async def _ping(reply: Reply, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await reply.ping()


def _first_then(first: Callable[[int], None], later: Callable[[int], None]) -> Callable[[int], None]:
    """A callable that is `first` when it is first called."""
    step = first

    def call(value: int) -> None:
        nonlocal step
        now, step = step, later
        now(value)

    return call


def _refusal_to_continue(flight: Flight, dialect: Dialect) -> ErrorReply | None:
    """The error that ends an answer of which the client has a part, unless it can be continued."""
    if not flight.reply.sent_bytes:
        return None
    try:
        if flight.reply.transcript is None:
            raise CannotContinue("it is no stream of events")
        body = msgspec.json.decode(flight.body)
        sent = read_sent(flight.path, flight.reply.transcript)
        plan(flight.path, body, sent, produced=0, max_new_tokens=None, dialect=dialect)
    except CannotContinue as exc:
        return ErrorReply(
            code="backend_restarted",
            message=f"The backend stopped in mid-answer, and the rest is lost: {exc}.",
        )
    return None
