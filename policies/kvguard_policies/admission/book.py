"""The running requests as arrays, and what they may hold in times to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvguard_policies.admission.survival import AHEAD, Floats

BEFORE: Floats = np.concatenate([np.zeros(1, dtype=np.float32), AHEAD[:-1]])
"""The point before each of `AHEAD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request as predictions see it.

    now     tokens that it holds by now at most, without rounding to blocks
    growth  tokens that it may still add
    steps   the most steps until it has ended
    row     of the survival table
    """

    now: float
    growth: float
    steps: float
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Sums over the running requests at each step of `AHEAD` that matters; see `adaptive` for the terms."""

    mean: Floats
    variance: Floats
    sure: Floats
    count: Floats


class Book:
    """Struct of arrays; a removed row is filled by the last one."""

    def __init__(self, size: int = 64) -> None:
        self._slots: dict[int, int] = {}
        self._ids: list[int] = []
        self._now = np.zeros(size, dtype=np.float32)
        self._growth = np.zeros(size, dtype=np.float32)
        self._steps = np.zeros(size, dtype=np.float32)
        self._row = np.zeros(size, dtype=np.intp)
        self.now_tokens = 0.0

    def __len__(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        self._slots.clear()
        self._ids.clear()
        self.now_tokens = 0.0

    def put(self, lease_id: int, entry: Entry) -> None:
        """Add an entry or replace it."""
        slot = self._slots.get(lease_id)
        if slot is None:
            slot = self._slots[lease_id] = len(self._ids)
            self._ids.append(lease_id)
            if slot == len(self._now):
                self._grow()
            self._now[slot] = 0.0
        self.now_tokens += entry.now - float(self._now[slot])
        self._now[slot] = entry.now
        self._growth[slot] = entry.growth
        self._steps[slot] = entry.steps
        self._row[slot] = entry.row

    def remove(self, lease_id: int) -> None:
        slot = self._slots.pop(lease_id, None)
        if slot is None:
            return
        self.now_tokens -= float(self._now[slot])
        last = self._ids.pop()
        if last != lease_id:
            end = len(self._ids)
            for array in self._arrays():
                array[slot] = array[end]
            self._ids[slot] = last
            self._slots[last] = slot

    def outlook(self, rows: Floats, columns: int) -> Outlook:
        """Mean, variance and certain bound of what is held, before rounding to blocks.

        An entry holds s(t) = now + min(t, growth) with the chance S(t), and nothing after `steps`. The
        certain bound at t covers all times since the point before, so that no peak falls between two points.
        """
        n = len(self._ids)
        ahead = AHEAD[:columns]
        steps = self._steps[:n, None]
        held = np.minimum(ahead, self._growth[:n, None])
        held += self._now[:n, None]
        begun = steps > BEFORE[:columns]
        chance = rows.take(self._row[:n], axis=0)[:, :columns]
        chance = chance * (steps > ahead)
        share = held * chance
        mean = share.sum(axis=0)
        variance = np.einsum("ij,ij->j", share, held) - np.einsum("ij,ij->j", share, share)
        sure = np.einsum("ij,ij->j", held, begun.astype(np.float32))
        return Outlook(mean=mean, variance=variance, sure=sure, count=begun.sum(axis=0, dtype=np.float32))

    def lockstep_peak(self, rounding: float, extra: Entry | None = None) -> float:
        """The most that can ever be held in lock step, each entry rounded up by `rounding`."""
        n = len(self._ids)
        now, growth, steps = self._now[:n] + rounding, self._growth[:n], self._steps[:n]
        if extra is not None:
            now = np.append(now, extra.now + rounding)
            growth, steps = np.append(growth, extra.growth), np.append(steps, extra.steps)
        return lockstep_peak(now, growth, steps)

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self._now, self._growth, self._steps, self._row

    def _grow(self) -> None:
        self._now, self._growth, self._steps, self._row = (
            np.concatenate([array, np.zeros_like(array)]) for array in self._arrays()
        )


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
