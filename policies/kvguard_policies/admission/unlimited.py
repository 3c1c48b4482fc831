"""Admit everything at once: what happens without a guard, here to compare against."""

from __future__ import annotations

from kvguard.domain import Decision, Demand
from kvguard_policies.admission.ledger import Ledger


class Unlimited(Ledger):
    """Refuses nothing: the engine itself answers what it cannot hold."""

    name = "unlimited"

    def never_fits(self, demand: Demand) -> Decision | None:
        return None

    def decide(self, demand: Demand, key: str = "", *, now_s: float = 0.0) -> Decision:
        return self.go("unlimited", self.reserved_tokens)
