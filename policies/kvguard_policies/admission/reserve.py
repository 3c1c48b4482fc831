"""Admit while the worst case of every admitted request fits the pool: true under any schedule."""

from __future__ import annotations

from kvguard.domain import Decision, Demand
from kvguard_policies.admission.ledger import Ledger
from kvguard_policies.admission.pricing import Price


class Reserve(Ledger):
    """sum over admitted requests of n * blocks(prompt + maximum) stays within the pool.

    In a split pool each sequence has its own part, so that only sequences bind.
    """

    name = "reserve"

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        peak_tokens = self.reserved_tokens + priced.tokens
        if self.shares_pool() and peak_tokens > self.capacity.pool_tokens:
            return self.wait("pool_full", peak_tokens)
        return self.go("fits", peak_tokens)
