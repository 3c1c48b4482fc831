"""The running requests as arrays, and what they may hold in times to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvguard_policies.admission.survival import AHEAD, Floats

UNSEEN_TOKENS = 2
"""Tokens that a sequence may hold beyond those that were seen: the one in the making, and one on its way."""

BEFORE: Floats = np.concatenate([np.zeros(1, dtype=np.float32), AHEAD[:-1]])
"""The point before each of `AHEAD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request as predictions see it.

    fixed_tokens  what it holds whatever happens
    most_tokens   what it may add to that, one a step
    new_tokens    what was seen of that
    extra_steps   how many steps it may last beyond those that its missing tokens take
    row           of the survival table
    """

    fixed_tokens: int
    most_tokens: int
    new_tokens: int
    extra_steps: int
    row: int

    @property
    def seen_tokens(self) -> int:
        return min(self.most_tokens, self.new_tokens + UNSEEN_TOKENS)

    @property
    def now_tokens(self) -> int:
        return self.fixed_tokens + self.seen_tokens

    @property
    def growth_tokens(self) -> int:
        return self.most_tokens - self.seen_tokens

    @property
    def steps(self) -> int:
        return self.most_tokens - self.new_tokens + self.extra_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Sums over the running requests at each step of `AHEAD` that matters; see `adaptive` for the terms."""

    mean: Floats
    variance: Floats
    third: Floats
    sure: Floats
    count: Floats

    def plus(self, entry: Entry, rows: Floats) -> Outlook:
        """The same with one more request."""
        columns = len(self.mean)
        ahead = AHEAD[:columns]
        held = np.minimum(ahead, np.float32(entry.growth_tokens))
        held += np.float32(entry.now_tokens)
        begun = (BEFORE[:columns] < entry.steps).astype(np.float32)
        held *= begun
        share = held * rows[entry.row, :columns]
        rest = held - share
        spread = share * rest
        return Outlook(
            mean=self.mean + share,
            variance=self.variance + spread,
            third=self.third + spread * (rest - share),
            sure=self.sure + held,
            count=self.count + begun,
        )


class Book:
    """Struct of arrays; a removed row is filled by the last one."""

    def __init__(self, size: int = 64) -> None:
        self._slots: dict[int, int] = {}
        self._ids: list[int] = []
        self._fixed = np.zeros(size, dtype=np.float32)
        self._most = np.zeros(size, dtype=np.float32)
        self._new = np.zeros(size, dtype=np.float32)
        self._extra = np.zeros(size, dtype=np.float32)
        self._row = np.zeros(size, dtype=np.intp)
        self._held: dict[int, int] = {}
        self.now_tokens = 0

    def __len__(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        self._slots.clear()
        self._ids.clear()
        self._held.clear()
        self.now_tokens = 0

    def put(self, lease_id: int, entry: Entry) -> None:
        """Add an entry or replace it."""
        slot = self._slots.get(lease_id)
        if slot is None:
            slot = self._slots[lease_id] = len(self._ids)
            self._ids.append(lease_id)
            if slot == len(self._new):
                self._grow()
        self._fixed[slot] = entry.fixed_tokens
        self._most[slot] = entry.most_tokens
        self._new[slot] = entry.new_tokens
        self._extra[slot] = entry.extra_steps
        self._row[slot] = entry.row
        self.now_tokens += entry.now_tokens - self._held.get(lease_id, 0)
        self._held[lease_id] = entry.now_tokens

    def advance(self, lease_id: int, new_tokens: int, by_tokens: int, row: int) -> None:
        """It has come a little further; the call of every token."""
        slot = self._slots[lease_id]
        self._new[slot] = new_tokens
        self._row[slot] = row
        self._held[lease_id] += by_tokens
        self.now_tokens += by_tokens

    def remove(self, lease_id: int) -> None:
        slot = self._slots.pop(lease_id, None)
        if slot is None:
            return
        self.now_tokens -= self._held.pop(lease_id)
        last = self._ids.pop()
        if last != lease_id:
            end = len(self._ids)
            for array in self._arrays():
                array[slot] = array[end]
            self._ids[slot] = last
            self._slots[last] = slot

    def outlook(self, rows: Floats, columns: int) -> Outlook:
        """Mean, variance, third central moment and certain bound of what is held, before rounding to blocks.

        An entry holds s(t) = now + min(t, growth) with the chance S(t), and nothing after its steps. What
        ends between two points still counts at the later one, so that no peak falls between them.
        """
        n = len(self._ids)
        now, growth, steps = self._states(n)
        ahead = AHEAD[:columns]
        held = np.minimum(ahead, growth[:, None])
        held += now[:, None]
        begun = (BEFORE[:columns] < steps[:, None]).astype(np.float32)
        each = np.ones(n, dtype=np.float32)  # its product with a matrix sums the rows, faster than `sum` does
        share = rows[:, :columns].take(self._row[:n], axis=0)
        held *= begun
        share *= held
        sure = each @ held
        held -= share  # what is left if it has ended
        spread = share * held
        held -= share
        return Outlook(
            mean=each @ share, variance=each @ spread, third=np.einsum("ij,ij->j", spread, held),
            sure=sure, count=each @ begun,
        )  # fmt: skip

    def lockstep_peak(self, rounding: int, extra: Entry | None = None) -> float:
        """The most that can ever be held in lock step, each entry rounded up by `rounding`."""
        now, growth, steps = self._states(len(self._ids))
        if extra is not None:
            now = np.append(now, extra.now_tokens)
            growth, steps = np.append(growth, extra.growth_tokens), np.append(steps, extra.steps)
        return lockstep_peak(now + rounding, growth, steps)

    def _states(self, n: int) -> tuple[Floats, Floats, Floats]:
        """What each holds now, may still add, and the most steps until it has ended."""
        most, new = self._most[:n], self._new[:n]
        seen = np.minimum(most, new + UNSEEN_TOKENS)
        return self._fixed[:n] + seen, most - seen, most - new + self._extra[:n]

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self._fixed, self._most, self._new, self._extra, self._row

    def _grow(self) -> None:
        self._fixed, self._most, self._new, self._extra, self._row = (
            np.concatenate([array, np.zeros_like(array)]) for array in self._arrays()
        )


def quantile(mean: Floats, variance: Floats, third: Floats, z: float) -> Floats:
    """Upper quantile of a sum of independent terms, by its skewness: Wilson and Hilferty's for a gamma law.

    A normal law would be far too hopeful where a few requests may yet get very long, and too careful where
    nearly all are sure to be still running.
    """
    deviation = np.sqrt(np.maximum(variance, 1e-6))
    skew = third / (deviation * deviation * deviation)
    skew = np.where(np.abs(skew) < _NO_SKEW, _NO_SKEW, skew)
    root = np.maximum(1 + skew * (z / 6) - skew * skew / 36, 0.0)
    return np.asarray(mean + deviation * (2 / skew) * (root * root * root - 1))


_NO_SKEW = 1e-3


def lockstep_peak(now: Floats, growth: Floats, steps: Floats) -> float:
    """Bound max over t of sum of (now_i + min(t, growth_i)) [t < steps_i].

    With steps sorted downward the maximum lies just before an end, where the k longest still run and each of
    them that grows has grown by steps_(k) at most.
    """
    if len(now) == 0:
        return 0.0
    order = np.argsort(-steps)
    growing = growth[order]
    grown = np.minimum(np.cumsum(growing), steps[order] * np.cumsum(growing > 0))
    return float((np.cumsum(now[order]) + grown).max())
