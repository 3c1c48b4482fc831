"""Enforces an admission policy: a bounded, fair queue in front of the engine.

    acquire -> never fits? key's quota? queue full? -> waits its turn -> Lease
                     |            |           |              |
                     +------ Refusal, at once +--------------+-- too late, or fits no more: Refusal

The policy says who may run and the order says whose turn it is; this module asks both and does what they say.
Everything happens in the event loop and nothing awaits between a question and what follows from it, so there
is one writer and no lock.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from kvguard.domain import MIB, Capacity, Demand, Ending, EngineSample, Refusal, Ticket, Verdict
from kvguard.lease import Lease as Lease
from kvguard.ports import AdmissionPolicy, QueueOrder
from kvguard.quota import Allowance, Quota
from kvguard.throughput import DrainRate

RETRY_AFTER_S = (1.0, 120.0)  # the openai client gives up where it is told to wait longer
MAX_PASSERS = 8  # how far behind a head that does not fit the limiter looks
RECENT_DRAINS = 128

_log = structlog.get_logger("kvguard.limiter")


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A request in the queue; `answer` is set exactly once."""

    ticket: Ticket
    request_id: str
    body_bytes: int
    since_s: float
    start_by_s: float
    answer: asyncio.Future[Lease | Refusal]
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStatus:
    request_id: str
    key: str
    priority: int
    position: int
    waited_s: float
    expected_wait_s: float | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterStatus:
    """What `/guard/status` and the metrics show. `policy_report` is the policy's own; see `ports`."""

    policy: str
    generation: int
    paused: bool
    running: int
    draining: int
    waiting: tuple[WaitingStatus, ...]
    queue_bytes: int
    drain_tokens_per_s: float | None
    started_total: int
    taken_back_total: int
    refused_total: Mapping[str, int]
    recent_drains_s: tuple[float, ...]
    policy_report: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class _Counts:
    started: int = 0
    taken_back: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Limiter:
    """Who runs, who waits, who is turned away.

    default_wait_s  longest wait in the queue where a request brings no deadline of its own
    quotas          by key; a key that is not in it has none
    """

    def __init__(
        self,
        *,
        policy: AdmissionPolicy,
        order: QueueOrder,
        clock: Callable[[], float] = time.monotonic,
        max_queue_requests: int = 256,
        max_queue_bytes: int = 256 * MIB,
        default_wait_s: float = 120.0,
        quotas: Mapping[str, Quota] | None = None,
    ) -> None:
        self._policy = policy
        self._order = order
        self._clock = clock
        self._max_queue_requests = max_queue_requests
        self._max_queue_bytes = max_queue_bytes
        self._default_wait_s = default_wait_s
        self._allowances = {key: Allowance(quota, clock()) for key, quota in (quotas or {}).items()}
        self._generation = -1
        self._capacity: Capacity | None = None
        self._first_ctx_tokens = 0
        self._paused = False
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._queue_bytes = 0
        self._rate = DrainRate()
        self._counts = _Counts()
        self._drains_s: deque[float] = deque(maxlen=RECENT_DRAINS)
        self._stuck: Ticket | None = None  # the head that is known not to fit, as long as nothing was freed

    # ------------------------------------------------------------ requests

    async def acquire(
        self,
        demand: Demand,
        *,
        key: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        body_bytes: int = 0,
        request_id: str = "",
        front: bool = False,
    ) -> Lease | Refusal:
        """Wait for a place, or learn at once that there will be none.

        deadline_s  by when it must have started, on the limiter's clock
        front       a replay: ahead of everyone, and free of the queue's bounds, since it was let in before
        Cancelling the caller gives its place up at once.
        """
        now_s = self._clock()
        refusal = self._never_fits(demand) or (None if front else self._no_entry(key, body_bytes, now_s))
        if refusal is not None:
            return self._refused(refusal, request_id, key)
        waiting = self._enqueue(
            demand, key=key, priority=priority, request_id=request_id, body_bytes=body_bytes, front=front,
            start_by_s=now_s + self._default_wait_s if deadline_s is None else deadline_s, now_s=now_s,
        )  # fmt: skip
        self._pump(new=waiting.ticket)
        if not waiting.answer.done():
            refusal = None if front else self._no_waiting(waiting, now_s)
            if refusal is not None:
                self._answer(waiting, refusal)
            else:
                self._set_timer(waiting, now_s)
        return await self._wait_for(waiting)

    async def _wait_for(self, waiting: _Waiting) -> Lease | Refusal:
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if not waiting.answer.done() or waiting.answer.cancelled():
                self._leave(waiting)
                self._pump()
            elif isinstance(lease := waiting.answer.result(), Lease):  # started in the moment of leaving
                lease.release(Ending.CANCELLED, 0)
            raise

    # ------------------------------------------------------------ the supervisor's and the watch's words

    def resize(self, generation: int, capacity: Capacity) -> None:
        """A backend life is ready: leases of older ones are void, and all that wait are judged again.

        The same generation again only corrects the capacity.
        """
        self._capacity = capacity
        self._first_ctx_tokens = self._first_ctx_tokens or capacity.ctx_tokens
        self._policy.resize(capacity)
        if generation == self._generation:
            for lease in self._leases.values():
                self._policy.admit(lease.id, lease.demand, lease.key)
                self._policy.progress(lease.id, lease.new_tokens)
                if lease.draining_since_s is not None:
                    self._policy.drain(lease.id)
        else:
            self._void_leases()
            self._rate = DrainRate()
        self._generation = generation
        self._paused = False
        for waiting in list(self._waiting.values()):
            self._judge_again(waiting)
        self._freed()

    def pause(self) -> None:
        """The backend restarts or drains: nobody starts, the queue is kept."""
        self._paused = True

    def resume(self) -> None:
        """The same backend life goes on."""
        self._paused = False
        self._freed()

    def refuse_all(self, refusal: Refusal) -> None:
        """There will be no backend: everyone who waits is told so."""
        for waiting in list(self._waiting.values()):
            self._answer(waiting, refusal)

    def observe(self, sample: EngineSample) -> None:
        """A look at the engine. The policy may want some of the running ones back."""
        if self._capacity is None:
            return
        self._policy.observe(sample)
        self._take_back_excess()
        self._freed()

    # ------------------------------------------------------------ status

    @property
    def running(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def expected_wait_s(self, request_id: str) -> float | None:
        """What a waiting request may expect; None if it does not wait or nothing is known."""
        for waiting in self._waiting.values():
            if waiting.request_id == request_id:
                return self._rate.wait_s(self._clock(), self._order.ahead_tokens(waiting.ticket))
        return None

    def status(self) -> LimiterStatus:
        now_s = self._clock()
        return LimiterStatus(
            policy=self._policy.name,
            generation=self._generation,
            paused=self._paused,
            running=len(self._leases),
            draining=sum(lease.draining_since_s is not None for lease in self._leases.values()),
            waiting=self._queue_status(now_s),
            queue_bytes=self._queue_bytes,
            drain_tokens_per_s=self._rate.tokens_per_s(now_s),
            started_total=self._counts.started,
            taken_back_total=self._counts.taken_back,
            refused_total=dict(self._counts.refused),
            recent_drains_s=tuple(self._drains_s),
            policy_report=self._policy.report(),
        )

    def _queue_status(self, now_s: float) -> tuple[WaitingStatus, ...]:
        rows, ahead_tokens = [], 0
        for position, ticket in enumerate(self._order.in_order(), start=1):
            waiting = self._waiting[ticket.id]
            rows.append(
                WaitingStatus(
                    request_id=waiting.request_id, key=ticket.key, priority=ticket.priority,
                    position=position, waited_s=now_s - waiting.since_s,
                    expected_wait_s=self._rate.wait_s(now_s, ahead_tokens), tokens=ticket.tokens,
                )
            )  # fmt: skip
            ahead_tokens += ticket.tokens
        return tuple(rows)

    # ------------------------------------------------------------ what a lease reports (lease.Keeper)

    def progressed(self, lease: Lease) -> None:
        self._policy.progress(lease.id, lease.new_tokens)
        self._take_back_excess()

    def repriced(self, lease: Lease) -> None:
        self._policy.reprice(lease.id, lease.demand)
        self._freed()

    def drains(self, lease: Lease) -> None:
        lease.draining_since_s = self._clock()
        if not lease.taken_back:
            self._policy.drain(lease.id)

    def released(self, lease: Lease, ending: Ending, new_tokens: int | None) -> None:
        now_s = self._clock()
        del self._leases[lease.id]
        if lease.draining_since_s is not None:
            lease.drained_s = now_s - lease.draining_since_s
            self._drains_s.append(lease.drained_s)
        self._policy.release(lease.id, ending, new_tokens)
        self._settle(lease, lease.new_tokens if new_tokens is None else new_tokens, now_s)
        self._freed()

    def _settle(self, lease: Lease, new_tokens: int, now_s: float) -> None:
        """Charge the key for what it was given."""
        sequences = lease.demand.sequences
        if new_tokens:
            self._order.served(lease.key, new_tokens * sequences)
        else:
            self._order.refund(lease.demand, lease.key)
        allowance = self._allowances.get(lease.key)
        if allowance is not None:
            allowance.requests -= 1
            allowance.spend(now_s, sequences * (lease.demand.prompt_tokens + new_tokens) if new_tokens else 0)

    # ------------------------------------------------------------ turning away

    def _never_fits(self, demand: Demand) -> Refusal | None:
        decision = None if self._capacity is None else self._policy.never_fits(demand)
        if decision is None:
            return None
        return Refusal(
            code=decision.code or "context_length_exceeded", message=decision.message + self._why_smaller()
        )

    def _why_smaller(self) -> str:
        if self._capacity is None or self._capacity.ctx_tokens >= self._first_ctx_tokens:
            return ""
        return (
            f" The context was reduced from {self._first_ctx_tokens} to {self._capacity.ctx_tokens} tokens, "
            "since the server ran out of memory."
        )

    def _no_entry(self, key: str, body_bytes: int, now_s: float) -> Refusal | None:
        """What needs no look at the policy: the key's quota, and a queue that is full already."""
        allowance = self._allowances.get(key)
        over = allowance.refused(now_s) if allowance is not None else None
        if over is not None:
            return Refusal(
                code="rate_limited", message=f"Rate limit: {over[0]}.", retry_after_s=_retry_after(over[1])
            )
        if self._waiting and self._full(len(self._waiting) + 1, self._queue_bytes + body_bytes):
            return self._overloaded("The queue is full", self._tokens_waiting(), now_s)
        return None

    def _no_waiting(self, waiting: _Waiting, now_s: float) -> Refusal | None:
        """It cannot start now; turn it away if there is no room to wait, or no hope."""
        if self._full(len(self._waiting), self._queue_bytes):
            return self._overloaded("The queue is full", waiting.ticket.tokens, now_s)
        ahead_tokens = self._order.ahead_tokens(waiting.ticket)
        wait_s = self._rate.wait_s(now_s, ahead_tokens)
        left_s = waiting.start_by_s - now_s
        if left_s <= 0 or (wait_s is not None and wait_s > left_s):
            late_tokens = ahead_tokens - round(left_s * (self._rate.tokens_per_s(now_s) or 0.0))
            return self._overloaded("The request cannot start before its deadline", late_tokens, now_s)
        return None

    def _full(self, requests: int, size_bytes: int) -> bool:
        return requests > self._max_queue_requests or size_bytes > self._max_queue_bytes

    def _tokens_waiting(self) -> int:
        """Half of what waits: a retry that comes when the queue is half empty finds a place."""
        return sum(waiting.ticket.tokens for waiting in self._waiting.values()) // 2

    def _overloaded(self, what: str, tokens: int, now_s: float) -> Refusal:
        retry_after_s = _retry_after(self._rate.wait_s(now_s, max(0, tokens)))
        return Refusal(
            code="overloaded",
            message=f"{what}: {len(self._leases)} requests run and {len(self._waiting)} wait. "
            f"Try again in {retry_after_s:.0f} s.",
            retry_after_s=retry_after_s,
        )

    def _refused(self, refusal: Refusal, request_id: str, key: str) -> Refusal:
        self._counts.refused[refusal.code] += 1
        _log.info(
            "request_shed", request_id=request_id, key=key, code=refusal.code, waiting=len(self._waiting),
            running=len(self._leases), retry_after_s=refusal.retry_after_s,
        )  # fmt: skip
        return refusal

    # ------------------------------------------------------------ the queue

    def _enqueue(
        self, demand: Demand, *, key: str, priority: int, request_id: str, body_bytes: int, front: bool,
        start_by_s: float, now_s: float,
    ) -> _Waiting:  # fmt: skip
        ticket = Ticket(
            id=next(self._ids), key=key, priority=priority, demand=demand, tokens=self._cost_tokens(demand),
            front=front,
        )  # fmt: skip
        waiting = _Waiting(
            ticket=ticket, request_id=request_id, body_bytes=body_bytes, since_s=now_s,
            start_by_s=start_by_s, answer=asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        self._waiting[ticket.id] = waiting
        self._queue_bytes += body_bytes
        self._order.push(ticket)
        if key in self._allowances:
            self._allowances[key].requests += 1
        return waiting

    def _cost_tokens(self, demand: Demand) -> int:
        if self._capacity is None:
            return demand.sequences * (demand.prompt_tokens + (demand.max_new_tokens or 0))
        return self._policy.cost_tokens(demand)

    def _set_timer(self, waiting: _Waiting, now_s: float) -> None:
        self._rate.saturated(now_s, waits=True)
        loop = asyncio.get_running_loop()
        waiting.timer = loop.call_later(waiting.start_by_s - now_s, self._too_late, waiting)

    def _too_late(self, waiting: _Waiting) -> None:
        """The prediction was too hopeful."""
        if waiting.answer.done():
            return
        refusal = self._overloaded(
            "The request did not start before its deadline", waiting.ticket.tokens, self._clock()
        )
        self._answer(waiting, refusal)
        self._pump()

    def _judge_again(self, waiting: _Waiting) -> None:
        refusal = self._never_fits(waiting.ticket.demand)
        if refusal is not None:
            self._answer(waiting, refusal)

    def _leave(self, waiting: _Waiting) -> None:
        """Give up a place in the queue."""
        if self._waiting.pop(waiting.ticket.id, None) is None:
            return
        self._order.remove(waiting.ticket)
        self._left(waiting)
        allowance = self._allowances.get(waiting.ticket.key)
        if allowance is not None:
            allowance.requests -= 1

    def _left(self, waiting: _Waiting) -> None:
        self._queue_bytes -= waiting.body_bytes
        if waiting.timer is not None:
            waiting.timer.cancel()
        if self._stuck is waiting.ticket:
            self._stuck = None
        self._rate.saturated(self._clock(), waits=bool(self._waiting))

    def _answer(self, waiting: _Waiting, refusal: Refusal) -> None:
        self._leave(waiting)
        if not waiting.answer.done():
            waiting.answer.set_result(self._refused(refusal, waiting.request_id, waiting.ticket.key))

    # ------------------------------------------------------------ starting

    def _freed(self) -> None:
        """Something may fit now that did not."""
        self._stuck = None
        self._pump()

    def _pump(self, new: Ticket | None = None) -> None:
        """Start whoever's turn it is, as long as they fit; then those who may pass the one that does not.

        `new` is the only one worth a look while the head is known to be stuck.
        """
        if self._paused or self._capacity is None:
            return
        while (head := self._order.head()) is not None and head is not self._stuck:
            if not self._try(head):
                self._stuck, new = head, None
        if head is None:
            return
        for ticket in self._order.passers(MAX_PASSERS):
            if new is not None and ticket is not new:
                continue
            if (
                self._policy.may_pass(head.demand, ticket.demand)
                and self._try(ticket)
                and not self._passable()
            ):
                return

    def _passable(self) -> bool:
        return bool(self._order.passers(1))

    def _try(self, ticket: Ticket) -> bool:
        """Start a waiting request if the policy lets it. True if it is not in the queue any more."""
        waiting = self._waiting[ticket.id]
        if waiting.answer.done():  # its task was cancelled a moment ago, and has not come to say so yet
            self._leave(waiting)
            return True
        now_s = self._clock()
        decision = self._policy.decide(ticket.demand, ticket.key, now_s=now_s)
        if decision.verdict is Verdict.WAIT:
            return False
        if decision.verdict is Verdict.REFUSE:
            self._judge_again(waiting)
            return ticket.id not in self._waiting
        self._start(waiting, now_s)
        _log.debug(
            "request_admitted", request_id=waiting.request_id, key=ticket.key, tokens=ticket.tokens,
            peak_tokens=decision.peak_tokens, limit_tokens=decision.limit_tokens, running=len(self._leases),
        )  # fmt: skip
        return True

    def _start(self, waiting: _Waiting, now_s: float) -> None:
        ticket = waiting.ticket
        del self._waiting[ticket.id]
        self._order.started(ticket)
        self._left(waiting)
        if waiting.timer is not None:
            self._rate.started(now_s, ticket.tokens)
        lease = Lease(
            self, id=ticket.id, generation=self._generation, demand=ticket.demand, key=ticket.key,
            request_id=waiting.request_id, started_s=now_s, waited_s=now_s - waiting.since_s,
        )  # fmt: skip
        self._leases[lease.id] = lease
        self._policy.admit(lease.id, ticket.demand, ticket.key)
        self._counts.started += 1
        waiting.answer.set_result(lease)

    # ------------------------------------------------------------ taking back

    def _take_back_excess(self) -> None:
        """Take the youngest back until what is left fits, less what is on its way out already."""
        excess_tokens = self._policy.excess_tokens()
        if excess_tokens <= 0:
            return
        leases = sorted(self._leases.values(), key=lambda lease: -lease.id)
        excess_tokens -= sum(self._policy.held_tokens(lease.id) for lease in leases if lease.taken_back)
        for lease in leases:
            if excess_tokens <= 0:
                return
            if lease.may_be_taken_back:
                excess_tokens -= self._policy.held_tokens(lease.id)
                self._counts.taken_back += 1
                _log.warning("request_taken_back", request_id=lease.request_id, key=lease.key)
                lease.take_back()

    def _void_leases(self) -> None:
        for lease in self._leases.values():
            lease.void = True
            if lease.key in self._allowances:
                self._allowances[lease.key].requests -= 1
        self._leases.clear()


def _retry_after(wait_s: float | None) -> float:
    least_s, most_s = RETRY_AFTER_S
    return least_s if wait_s is None else min(max(wait_s, least_s), most_s)
