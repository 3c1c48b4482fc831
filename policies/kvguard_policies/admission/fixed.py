"""Admit N requests at a time, whatever they hold: what many people do by hand, here to compare against."""

from __future__ import annotations

from kvguard.domain import Decision, Demand
from kvguard_policies.admission.ledger import Ledger
from kvguard_policies.admission.pricing import Price


class Fixed(Ledger):
    """Can overflow the pool."""

    def __init__(self, requests: int) -> None:
        if requests < 1:
            raise ValueError(f"fixed admission needs at least 1 request, got {requests}")
        super().__init__()
        self.name = f"fixed:{requests}"
        self._requests = requests

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        if len(self.held) >= self._requests:
            return self.wait("requests_full", self.reserved_tokens)
        return self.go("fits", self.reserved_tokens + priced.tokens)
