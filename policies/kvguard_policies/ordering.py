"""Whose turn it is: replays, then priority bands, then fair between keys, then first come.

Fairness is the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each key's counter rises by p for a prompt and by 2 for every new token that it was given, over the key's
weight, and the key with the lowest counter goes next. A key that was away starts at the lowest counter of
those that are here, so that nobody saves up credit.

A later request may pass the head of the queue, which does not fit yet, at most `MAX_PASSES` times; then the
head keeps its place until it starts, whatever the counters say.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from kvguard.domain import Demand, Ticket

MAX_PASSES = 3
NEW_TOKEN_CHARGE = 2.0
MAX_IDLE_KEYS = 1024


class FairOrder:
    """Implements `kvguard.ports.QueueOrder`. `weights` by key: one of weight 2 is given twice the tokens."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, max_passes: int = MAX_PASSES) -> None:
        for key, weight in (weights or {}).items():
            if weight <= 0:
                raise ValueError(f"the weight of key {key!r} must be positive, got {weight}")
        self._weights = dict(weights or {})
        self._max_passes = max_passes
        self._fronts: deque[Ticket] = deque()
        self._bands: dict[int, dict[str, _Line]] = {}  # never an empty band, never an empty line
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the lowest counter at the last start: what a returning key starts from
        self._passes = 0
        self._passed: Ticket | None = None
        self._len = 0

    def __len__(self) -> int:
        return self._len

    # ------------------------------------------------------------ coming and going

    def push(self, ticket: Ticket) -> None:
        self._len += 1
        if ticket.front:
            self._fronts.append(ticket)
            return
        band = self._bands.setdefault(ticket.priority, {})
        line = band.get(ticket.key)
        if line is None:
            self._counters[ticket.key] = max(self._counters.get(ticket.key, 0.0), self._lowest())
            line = band[ticket.key] = _Line()
        line.push(ticket)

    def remove(self, ticket: Ticket) -> None:
        self._len -= 1
        if self._passed is ticket:
            self._passed = None
        if ticket.front:
            self._fronts.remove(ticket)
            return
        band = self._bands[ticket.priority]
        line = band[ticket.key]
        line.remove(ticket)
        if not line.tickets:
            del band[ticket.key]
            if not band:
                del self._bands[ticket.priority]

    def started(self, ticket: Ticket) -> None:
        head = self.head()
        if head is not None and head is not ticket:
            self._passes = self._passes + 1 if self._passed is head else 1
            self._passed = head
        self._floor = max(self._floor, self._lowest())
        self.remove(ticket)
        self._charge(ticket.key, ticket.demand.prompt_tokens * ticket.demand.sequences)
        self._forget_idle()

    def served(self, key: str, new_tokens: int) -> None:
        self._charge(key, NEW_TOKEN_CHARGE * new_tokens)

    def refund(self, demand: Demand, key: str) -> None:
        self._charge(key, -demand.prompt_tokens * demand.sequences)

    # ------------------------------------------------------------ questions

    def head(self) -> Ticket | None:
        if self._fronts:
            return self._fronts[0]
        if not self._bands:
            return None
        top = max(self._bands)
        if self._held_up() and self._passed is not None and self._passed.priority == top:
            return self._passed
        band = self._bands[top]
        return band[min(band, key=self._counters.__getitem__)].first()

    def passers(self, limit: int) -> Sequence[Ticket]:
        head = self.head()
        if head is None or (self._held_up() and self._passed is head):
            return ()
        passers: list[Ticket] = []
        for ticket in self._next_of_each(limit):
            if len(passers) == limit:
                break
            if ticket is not head:
                passers.append(ticket)
        return passers

    def ahead_tokens(self, ticket: Ticket) -> int:
        """A fluid estimate: a key is ahead by as much as its counter must rise to reach our turn."""
        ahead = sum(front.tokens for front in self._fronts if front.id < ticket.id)
        if ticket.front:
            return ahead
        ahead += sum(
            line.tokens
            for priority, band in self._bands.items() if priority > ticket.priority
            for line in band.values()
        )  # fmt: skip
        band = self._bands.get(ticket.priority, {})
        own = band[ticket.key].tokens_before(ticket) if ticket.key in band else 0
        turn = self._counters.get(ticket.key, self._floor) + own / self._weight(ticket.key)
        for key, line in band.items():
            if key != ticket.key:
                lead = (turn - self._counters[key]) * self._weight(key)
                ahead += round(min(line.tokens, max(0.0, lead)))
        return ahead + own

    def in_order(self) -> Sequence[Ticket]:
        order = list(self._fronts)
        for priority in sorted(self._bands, reverse=True):
            band = self._bands[priority]
            turns = [(self._counters[key], key, iter(line.tickets.values())) for key, line in band.items()]
            heapq.heapify(turns)
            while turns:
                counter, key, rest = heapq.heappop(turns)
                ticket = next(rest, None)
                if ticket is not None:
                    order.append(ticket)
                    heapq.heappush(turns, (counter + ticket.tokens / self._weight(key), key, rest))
        return order

    # ------------------------------------------------------------ helpers

    def _held_up(self) -> bool:
        return self._passed is not None and self._passes >= self._max_passes

    def _next_of_each(self, limit: int) -> Iterator[Ticket]:
        """The first of every key before the second of any, so that one key cannot fill the window."""
        yield from self._fronts
        for priority in sorted(self._bands, reverse=True):
            band = self._bands[priority]
            keys = heapq.nsmallest(limit + 1, band, key=self._counters.__getitem__)
            lines = [iter(band[key].tickets.values()) for key in keys]
            while lines:
                for line in list(lines):
                    ticket = next(line, None)
                    if ticket is None:
                        lines.remove(line)
                    else:
                        yield ticket

    def _lowest(self) -> float:
        here = [self._counters[key] for band in self._bands.values() for key in band]
        return min(here, default=self._floor)

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)

    def _charge(self, key: str, tokens: float) -> None:
        self._counters[key] = self._counters.get(key, self._floor) + tokens / self._weight(key)

    def _forget_idle(self) -> None:
        """Drop counters that say nothing more: a key below the floor would start at the floor anyway."""
        if len(self._counters) > MAX_IDLE_KEYS:
            here = {key for band in self._bands.values() for key in band}
            self._counters = {k: c for k, c in self._counters.items() if k in here or c > self._floor}


class _Line:
    """The waiting requests of one key in one band, first come first."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.tokens = 0

    def push(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        self.tokens += ticket.tokens

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.id]
        self.tokens -= ticket.tokens

    def first(self) -> Ticket:
        return next(iter(self.tickets.values()))

    def tokens_before(self, ticket: Ticket) -> int:
        """Nearly always asked of the last one, which has just come."""
        if next(reversed(self.tickets)) == ticket.id:
            return self.tokens - ticket.tokens
        before = 0
        for other in self.tickets.values():
            if other is ticket:
                break
            before += other.tokens
        return before
