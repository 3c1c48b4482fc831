"""The policies that are compared, beside those that kvguard ships: rules from elsewhere, and an oracle."""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from kvguard.domain import Decision, Demand, Ending
from kvguard_policies.admission.adaptive import Adaptive
from kvguard_policies.admission.book import lockstep_peak
from kvguard_policies.admission.ledger import Ledger
from kvguard_policies.admission.pricing import Price
from simulator import Engine, KnownDemand


class Lockstep(Adaptive):
    """The sure bound alone: decode is in lock step, nothing is predicted."""

    name = "lockstep"

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        if not self.held:
            return self.go("alone", priced.tokens)
        peak = self._running.lockstep_peak(
            self.capacity.block_tokens - 1, self._entry_of_new(priced, demand, key)
        )
        return (
            self.go("fits", round(peak))
            if peak <= self.capacity.pool_tokens
            else self.wait("full", round(peak))
        )


class _Predicting(Ledger):
    """Admits while the lock-step peak of predicted lengths fits a share of the pool."""

    spare_share = 0.0

    def predicted_left(self, lease_id: int) -> int:
        raise NotImplementedError

    def predicted_new(self, demand: Demand, priced: Price) -> int:
        raise NotImplementedError

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        if not self.held:
            return self.go("alone", priced.tokens)
        left = [self.predicted_left(lease_id) for lease_id in self.held]
        now = [held.price.prompt_tokens + held.new_tokens for held in self.held.values()]
        grown = np.array([*left, self.predicted_new(demand, priced)], dtype=np.float32)
        held_now = np.array([*now, priced.prompt_tokens], dtype=np.float32) + self.capacity.block_tokens - 1
        peak = lockstep_peak(held_now, grown, grown + 1)
        if peak <= self.capacity.pool_tokens * (1 - self.spare_share):
            return self.go("fits", round(peak))
        return self.wait("full", round(peak))


class PastFuture(_Predicting):
    """LightLLM's rule (Gong et al., ASPLOS 2025): lengths are drawn from those that finished lately.

    A running request's length is drawn from the finished ones that were longer; 3 % of the pool is spare.
    """

    name = "past-future"
    spare_share = 0.03

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._past: deque[int] = deque(maxlen=1000)
        self._drawn: dict[int, int] = {}

    def _draw(self, longer_than: int, most: int) -> int:
        longer = [length for length in self._past if length > longer_than]
        return min(self._rng.choice(longer), most) if longer else most

    def predicted_new(self, demand: Demand, priced: Price) -> int:
        return self._draw(0, priced.new_tokens)

    def predicted_left(self, lease_id: int) -> int:
        held = self.held[lease_id]
        drawn = self._drawn.get(lease_id, 0)
        if drawn <= held.new_tokens:
            drawn = self._drawn[lease_id] = self._draw(held.new_tokens, held.price.new_tokens)
        return drawn - held.new_tokens

    def release(self, lease_id: int, ending: Ending, new_tokens: int | None) -> None:
        held = self.held.get(lease_id)
        if held is not None and ending in (Ending.FINISHED, Ending.TRUNCATED):
            self._past.append(new_tokens or held.new_tokens)
        self._drawn.pop(lease_id, None)
        super().release(lease_id, ending, new_tokens)


class Oracle(_Predicting):
    """Knows every length: what no rule can pass by much."""

    name = "oracle"

    def __init__(self) -> None:
        super().__init__()
        self._true: dict[int, int] = {}

    def predicted_new(self, demand: Demand, priced: Price) -> int:
        assert isinstance(demand, KnownDemand)
        return min(demand.length, priced.new_tokens)

    def predicted_left(self, lease_id: int) -> int:
        return self._true[lease_id] - self.held[lease_id].new_tokens

    def admit(self, lease_id: int, demand: Demand, key: str) -> None:
        super().admit(lease_id, demand, key)
        self._true[lease_id] = self.predicted_new(demand, self.held[lease_id].price)


class EngineWatermark(Ledger):
    """The engine's own rule with a bounded queue in front: start while the prompt fits beside what is used.

    Reads the engine's true usage at the moment of the decision, which no proxy could.
    """

    def __init__(self, engine: Engine, watermark: float) -> None:
        super().__init__()
        self.name = f"watermark {watermark:.2f}"
        self._engine = engine
        self._watermark = watermark

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        engine = self._engine
        coming = sum(
            seq.target - seq.computed for seq in [*engine.running, *engine.waiting] if not seq.decodes
        )
        used = engine.used_tokens() + coming + priced.prompt_tokens
        share = 1.0 if engine.idle else 1 - self._watermark
        fits = used <= share * self.capacity.pool_tokens
        return self.go("fits", used) if fits else self.wait("full", used)
