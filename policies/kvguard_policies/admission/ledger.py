"""Who runs now and what each may still take: the books that all admission policies share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvguard.domain import Capacity, Decision, Demand, Ending, EngineSample, PoolKind, Verdict
from kvguard_policies.admission.pricing import Price, price


@dataclass(slots=True, kw_only=True)
class Held:
    """One admitted request. `new_tokens` is what its longest sequence has streamed."""

    price: Price
    key: str
    route: str
    counted: bool
    new_tokens: int = 0

    def advance(self, new_tokens: int) -> int:
        """Note how far it has come; returns the tokens since last time."""
        before = self.new_tokens
        self.new_tokens = min(max(before, new_tokens), self.price.new_tokens)
        return self.new_tokens - before

    @property
    def steps_left(self) -> int:
        """The most steps until it has ended."""
        return self.price.new_tokens - (self.new_tokens if self.counted else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """When a waiting request can start at the latest, and what is left over at that moment."""

    version: int
    head: Demand
    step: int
    spare_tokens: int
    spare_sequences: int


class Ledger:
    """The part of an admission policy that does not depend on its rule; see `ports.AdmissionPolicy`.

    A subclass gives `name` and `room`. What it books is the most that each request may hold, so `reserved`
    never falls short, however the engine schedules.
    """

    name = ""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.reserved_tokens = 0
        self.sequences = 0
        self._capacity: Capacity | None = None
        self._start: _Start | None = None
        self._version = 0

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            raise RuntimeError("an admission policy was asked before it was told a capacity")
        return self._capacity

    # ------------------------------------------------------------ the rule

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        """Whether a request that some day fits may start now."""
        raise NotImplementedError

    # ------------------------------------------------------------ questions

    def never_fits(self, demand: Demand) -> Decision | None:
        priced = price(demand, self.capacity)
        return priced if isinstance(priced, Decision) else None

    def cost_tokens(self, demand: Demand) -> int:
        priced = price(demand, self.capacity)
        return self.capacity.pool_tokens if isinstance(priced, Decision) else priced.tokens

    def decide(self, demand: Demand, key: str = "", *, now_s: float = 0.0) -> Decision:
        priced = price(demand, self.capacity)
        if isinstance(priced, Decision):
            return priced
        if self.sequences + priced.sequences > self.capacity.sequences:
            return self.wait("slots_full")
        return self.room(priced, demand, key, now_s)

    def may_pass(self, head: Demand, candidate: Demand) -> bool:
        """EASY backfill (Lifka 1995): go ahead if it ends before the head starts, or fits beside it then.

        All requests are taken to run to their maximum, one token a step.
        """
        first, other = price(head, self.capacity), price(candidate, self.capacity)
        if isinstance(first, Decision) or isinstance(other, Decision):
            return False
        start = self._start_of(head, first)
        if other.new_tokens < start.step:
            return True
        return other.sequences <= start.spare_sequences and other.tokens <= start.spare_tokens

    def held_tokens(self, lease_id: int) -> int:
        held = self.held.get(lease_id)
        if held is None:
            return 0
        if not held.counted:
            return held.price.tokens
        return held.price.sequences * (held.price.prompt_tokens + held.new_tokens)

    def excess_tokens(self) -> int:
        return 0

    def report(self) -> dict[str, float]:
        return {
            "reserved_tokens": self.reserved_tokens,
            "predicted_peak_tokens": self.reserved_tokens,
            "limit_tokens": self._capacity.pool_tokens if self._capacity else 0,
            "sequences": self.sequences,
        }

    def learned(self) -> Iterable[str]:
        return ()

    def recall(self, text: str) -> None:
        """Nothing is learned, so nothing is recalled."""

    # ------------------------------------------------------------ what came of it

    def resize(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.held.clear()
        self.reserved_tokens = self.sequences = 0
        self._version += 1

    def admit(self, lease_id: int, demand: Demand, key: str) -> None:
        priced = price(demand, self.capacity)
        if isinstance(
            priced, Decision
        ):  # an uncounted prompt that the engine refuses itself: it holds nothing
            priced = Price(prompt_tokens=0, new_tokens=0, sequences=1, tokens=0)
        self._book(lease_id, Held(price=priced, key=key, route=demand.route, counted=demand.counted))

    def reprice(self, lease_id: int, demand: Demand) -> None:
        old = self.held.get(lease_id)
        priced = price(demand, self.capacity)
        if old is None or isinstance(priced, Decision):
            return
        self._unbook(lease_id)
        self._book(
            lease_id,
            Held(
                price=priced, key=old.key, route=demand.route, counted=old.counted, new_tokens=old.new_tokens
            ),
        )

    def progress(self, lease_id: int, new_tokens: int) -> None:
        held = self.held.get(lease_id)
        if held is not None:
            held.advance(new_tokens)

    def drain(self, lease_id: int) -> None:
        held = self.held.get(lease_id)
        if held is not None:
            held.counted = False

    def release(self, lease_id: int, ending: Ending, new_tokens: int | None) -> None:
        self._unbook(lease_id)

    def observe(self, sample: EngineSample) -> None:
        """The books alone rule, unless a policy says otherwise."""

    # ------------------------------------------------------------ helpers

    def shares_pool(self) -> bool:
        return self.capacity.pool_kind is PoolKind.UNIFIED

    def wait(self, reason: str, peak_tokens: int = 0) -> Decision:
        return self._decision(Verdict.WAIT, reason, peak_tokens)

    def go(self, reason: str, peak_tokens: int = 0) -> Decision:
        return self._decision(Verdict.ADMIT, reason, peak_tokens)

    def _decision(self, verdict: Verdict, reason: str, peak_tokens: int) -> Decision:
        return Decision(
            verdict=verdict, reason=reason, peak_tokens=peak_tokens, limit_tokens=self.capacity.pool_tokens
        )

    def _book(self, lease_id: int, held: Held) -> None:
        if lease_id in self.held:
            raise ValueError(f"lease {lease_id} is admitted already")
        self.held[lease_id] = held
        self.reserved_tokens += held.price.tokens
        self.sequences += held.price.sequences
        self._version += 1

    def _unbook(self, lease_id: int) -> Held | None:
        held = self.held.pop(lease_id, None)
        if held is not None:
            self.reserved_tokens -= held.price.tokens
            self.sequences -= held.price.sequences
            self._version += 1
        return held

    def _start_of(self, demand: Demand, priced: Price) -> _Start:
        known = self._start
        if known is None or known.version != self._version or known.head is not demand:
            known = self._start = self._find_start(demand, priced)
        return known

    def _find_start(self, demand: Demand, priced: Price) -> _Start:
        """Let the running requests end one by one until the head fits."""
        capacity = self.capacity
        pool_tokens = capacity.pool_tokens if self.shares_pool() else 1 << 62
        free_tokens = pool_tokens - self.reserved_tokens - priced.tokens
        free_sequences = capacity.sequences - self.sequences - priced.sequences
        step = 0
        ends: Iterable[Held] = sorted(self.held.values(), key=lambda held: held.steps_left)
        for held in ends:
            if free_tokens >= 0 and free_sequences >= 0:
                break
            step = held.steps_left
            free_tokens += held.price.tokens
            free_sequences += held.price.sequences
        return _Start(
            version=self._version, head=demand, step=step,
            spare_tokens=free_tokens, spare_sequences=free_sequences,
        )  # fmt: skip
