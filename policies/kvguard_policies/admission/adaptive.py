"""Admit while an upper bound on the future peak of the pool fits; the bound learns how long outputs get.

For a running request let a be the tokens that it holds now, growth what it may still add, and r the most
steps until it ends. Decode is in lock step, so t steps from now it holds s(t) = a + min(t, growth) if it
still runs, else nothing. Two bounds on the sum over all requests:

    sure    D(t) = sum s(t) [t < r]                     holds whatever the lengths turn out to be
    likely  P(t) = quantile of a sum of independent s with chance S+ each, S+ from `survival`

A request is admitted if with it min(D(t), P(t)) stays within the pool at all t. Until there is evidence S+ is
1 and both are the same: the sure bound, which is never above reserving every maximum. `feedback` scales P by
what the engine is seen to use, raises z when it preempts, and stops admission when readings say so.

Requests whose tokens cannot be seen, which drain, or which have several sequences count at their maximum.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvguard.domain import Capacity, Decision, Demand, Ending, EngineSample, Work
from kvguard_policies.admission.book import Book, Entry, Outlook, quantile
from kvguard_policies.admission.feedback import Feedback
from kvguard_policies.admission.ledger import Held, Ledger
from kvguard_policies.admission.pricing import Price
from kvguard_policies.admission.survival import AHEAD, Z_CURVE, Follow, Survival, labels

Z = 3.6
Z_FAILS_ALL = 3.8
SPARE_SHARE = 0.02
TAKE_BACK_STEPS = 24
"""Steps that an engine goes on for until it notices that a request was cancelled, and by how many the count
of a stream's tokens may be behind (`kvguard.relay` tells of every 16th)."""

CERTAIN_ROW = 0


class Adaptive(Ledger):
    """Implements `kvguard.ports.AdmissionPolicy`; see the module. `z` None: by what an overflow costs."""

    name = "adaptive"

    def __init__(
        self, *, z: float | None = None, z_curve: float = Z_CURVE, spare_share: float = SPARE_SHARE
    ) -> None:
        super().__init__()
        self._z = z
        self._spare_share = spare_share
        self._survival = Survival(z_curve=z_curve)
        self._feedback = Feedback(Z if z is None else z)
        self._running = Book()
        self._follows: dict[int, Follow] = {}
        self._lags: dict[int, int] = {}
        self._unstarted_tokens = 0
        self._columns = len(AHEAD)
        self._outlook: Outlook | None = None
        self._peak_tokens = 0.0
        self._readings = self._exceeded = 0
        self._hidden_tokens = self._hidden_growth_tokens = 0

    # ------------------------------------------------------------ the rule

    def room(self, priced: Price, demand: Demand, key: str, now_s: float) -> Decision:
        """Decide on a request that some day fits.

        1. Nothing runs: whatever is left of the pool is all for it.
        2. Parts of their own: only sequences bind.
        3. The engine or the card says stop.
        4. Likely to fit at every time to come, or sure to fit.
        """
        if not self.held:  # 1
            return self.go("alone", priced.tokens)
        if not self.shares_pool():  # 2
            return self.go("fits", self.reserved_tokens + priced.tokens)
        braked = self._feedback.brake(now_s, sequences=self.sequences, pool_tokens=self.capacity.pool_tokens)
        if braked:  # 3
            return self.wait(braked, round(self._peak_tokens))
        entry = self._entry_of_new(priced, demand, key)
        peak_tokens = self._peak(self._current().plus(entry, self._survival.rows))
        limit_tokens = self._limit_tokens(self.sequences + priced.sequences)
        if peak_tokens <= limit_tokens * (1 - self._spare_share):  # 4
            return self.go("likely_fits", round(peak_tokens))
        sure_tokens = self._running.lockstep_peak(self.capacity.block_tokens - 1, entry)
        if sure_tokens <= limit_tokens:
            return self.go("surely_fits", round(sure_tokens))
        return self.wait("pool_full", round(peak_tokens))

    def _peak(self, outlook: Outlook) -> float:
        """max over t of min(D(t), P(t)). Rounding to blocks adds a block at most, half of one mostly."""
        block = self.capacity.block_tokens - 1
        likely = quantile(outlook.mean, outlook.variance, outlook.third, self._feedback.z)
        likely += 0.5 * block * outlook.count
        return float(np.minimum(outlook.sure + block * outlook.count, self._feedback.ratio * likely).max())

    def _limit_tokens(self, sequences: int) -> int:
        """What may be used: where requests are taken back before an overflow, less the room that takes."""
        takes_back = self.capacity.overflow == "fails_all"
        return self.capacity.pool_tokens - (TAKE_BACK_STEPS * sequences if takes_back else 0)

    def _current(self) -> Outlook:
        if self._outlook is None:
            self._outlook = self._running.outlook(self._survival.rows, self._columns)
        return self._outlook

    # ------------------------------------------------------------ what came of it

    def resize(self, capacity: Capacity) -> None:
        super().resize(capacity)
        self._running.clear()
        self._follows.clear()
        self._lags.clear()
        self._unstarted_tokens = 0
        self._hidden_tokens = self._hidden_growth_tokens = 0
        self._outlook = None
        self._columns = min(len(AHEAD), int(np.searchsorted(AHEAD, 2 * capacity.ctx_tokens)) + 1)
        self._feedback.restart()
        if self._z is None:
            self._feedback.floor(Z_FAILS_ALL if capacity.overflow == "fails_all" else Z)

    def admit(self, lease_id: int, demand: Demand, key: str) -> None:
        super().admit(lease_id, demand, key)
        held = self.held[lease_id]
        self._lags[lease_id] = self._lag(held.price)
        self._unstarted_tokens += held.price.prompt_tokens * held.price.sequences
        if demand.work is Work.GENERATE and held.price.sequences == 1:
            self._follows[lease_id] = self._survival.follow(labels(demand.route, demand.max_new_tokens, key))
        self._put(lease_id, held)
        if self.shares_pool():
            self._peak_tokens = self._peak(self._current())

    def reprice(self, lease_id: int, demand: Demand) -> None:
        before = self.held.get(lease_id)
        super().reprice(lease_id, demand)
        if before is not None:
            if lease_id in self._lags:
                self._unstarted_tokens -= before.price.prompt_tokens * before.price.sequences
                after = self.held[lease_id].price
                self._unstarted_tokens += after.prompt_tokens * after.sequences
            self._put(lease_id, self.held[lease_id])

    def progress(self, lease_id: int, new_tokens: int) -> None:
        held = self.held.get(lease_id)
        if held is None or new_tokens <= held.new_tokens:
            return
        by_tokens = held.advance(new_tokens)
        follow = self._follows.get(lease_id)
        if follow is None or not held.counted:
            return
        self._survival.reached(follow, held.new_tokens)
        if lease_id in self._lags:
            self._has_started(lease_id, held)
            self._put(lease_id, held)
        else:
            self._running.advance(lease_id, held.new_tokens, by_tokens, self._survival.row_at(follow))
            self._outlook = None

    def drain(self, lease_id: int) -> None:
        super().drain(lease_id)
        if lease_id in self.held:
            self._put(lease_id, self.held[lease_id])

    def release(self, lease_id: int, ending: Ending, new_tokens: int | None) -> None:
        held = self.held.get(lease_id)
        super().release(lease_id, ending, new_tokens)
        if held is None:
            return
        self._has_started(lease_id, held)
        self._running.remove(lease_id)
        self._outlook = None
        follow = self._follows.pop(lease_id, None)
        length = held.new_tokens if new_tokens is None else new_tokens
        if follow is None:
            return
        if ending is Ending.FINISHED and (held.counted or new_tokens is not None):
            self._survival.finished(follow, length)
        else:
            self._survival.reached(follow, length)

    def observe(self, sample: EngineSample) -> None:
        if self._capacity is None:
            return
        pool_tokens = self.capacity.pool_tokens
        if sample.kv_used_tokens is not None:
            self._readings += 1
            self._exceeded += sample.kv_used_tokens > max(self._peak_tokens, self._running.now_tokens)
            hidden_tokens = max(0, sample.kv_used_tokens - self._running.now_tokens)
            self._hidden_growth_tokens = max(0, hidden_tokens - self._hidden_tokens)
            self._hidden_tokens = hidden_tokens
        self._feedback.observe(
            sample,
            booked_tokens=0 if self._unstarted_tokens else self._running.now_tokens,
            pool_tokens=pool_tokens,
            peak_share=self._peak_tokens / pool_tokens,
        )

    def excess_tokens(self) -> int:
        """Overflow fails every running request, so it is averted where it is near.

        An event of a stream may hold more than one token (incomplete UTF-8, stop strings and tool calls are
        held back), so what the last reading showed beyond the books is added, and its growth once more.
        """
        capacity = self._capacity
        if capacity is None or capacity.overflow != "fails_all" or not self.shares_pool():
            return 0
        hidden_tokens = self._hidden_tokens + self._hidden_growth_tokens
        now_tokens = self._running.now_tokens + hidden_tokens
        soon_tokens = min(now_tokens + self.sequences * TAKE_BACK_STEPS, self.reserved_tokens)
        return max(0, soon_tokens - capacity.pool_tokens)

    def report(self) -> dict[str, float]:
        return {
            **super().report(),
            "predicted_peak_tokens": self._peak_tokens,
            "booked_tokens": self._running.now_tokens,
            "z": self._feedback.z,
            "usage_ratio": self._feedback.ratio,
            "violations": self._feedback.violations,
            "readings": self._readings,
            "readings_over_prediction": self._exceeded,
        }

    # ------------------------------------------------------------ what was learned

    def learned(self) -> Iterable[str]:
        return self._survival.to_json()

    def recall(self, text: str) -> None:
        self._survival.load_json(text)

    # ------------------------------------------------------------ helpers

    def _has_started(self, lease_id: int, held: Held) -> None:
        if self._lags.pop(lease_id, None) is not None:
            self._unstarted_tokens -= held.price.prompt_tokens * held.price.sequences

    def _lag(self, priced: Price) -> int:
        """The most steps until its first token: all prompts in front of it are prefilled first."""
        tokens = self._unstarted_tokens + priced.prompt_tokens * priced.sequences
        return -(-tokens // self.capacity.prefill_tokens) + 1

    def _entry_of_new(self, priced: Price, demand: Demand, key: str) -> Entry:
        lag = self._lag(priced)
        row = CERTAIN_ROW
        if demand.counted and priced.sequences == 1:
            index = self._survival.index_for(labels(demand.route, demand.max_new_tokens, key))
            row = self._survival.row_of(index, 0, lag)
        return _entry(priced, new_tokens=0, lag=lag, row=row)

    def _put(self, lease_id: int, held: Held) -> None:
        follow = self._follows.get(lease_id)
        lag = self._lags.get(lease_id, 0)
        row = CERTAIN_ROW
        if follow is not None and held.counted:
            row = self._survival.row_of(follow.index, held.new_tokens, lag)
        self._running.put(lease_id, _entry(held.price, new_tokens=held.new_tokens, lag=lag, row=row))
        self._outlook = None


def _entry(priced: Price, *, new_tokens: int, lag: int, row: int) -> Entry:
    prompt_tokens, most_tokens, n = priced.prompt_tokens, priced.new_tokens, priced.sequences
    if row == CERTAIN_ROW:
        return Entry(
            fixed_tokens=n * (prompt_tokens + most_tokens), most_tokens=0, new_tokens=0,
            extra_steps=most_tokens + lag + 1, row=row,
        )  # fmt: skip
    return Entry(
        fixed_tokens=prompt_tokens,
        most_tokens=most_tokens,
        new_tokens=new_tokens,
        extra_steps=lag + 1,
        row=row,
    )
