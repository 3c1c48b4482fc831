"""Find the largest value that fits in few trials: predict, try, correct the prediction, close the bracket.

Doubling by hand costs a restart a step and lands on a power of two. Here every trial corrects the prediction:
a success by what it measured, a failure by what it must have needed at least. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

FAILURE_STEP = 0.05
"""How much of the usable memory the first failure without a reading adds to the prediction; it doubles."""


@dataclass(kw_only=True)
class Bracket:
    """The search for one variable, e.g. the context at batch 1.

    predict    value -> bytes, monotone
    usable_bytes, least, most, step
    tolerance  stop when the best known value is within this share of the largest that may fit
    """

    predict: Callable[[int], int]
    usable_bytes: int
    least: int
    most: int
    step: int = 256
    tolerance: float = 0.05
    low: int = 0
    high: int | None = None
    correction_bytes: int = 0
    _blind_step: float = field(default=FAILURE_STEP, repr=False)

    def next(self) -> int | None:
        """The value to try; None when the search is over (`low` is the answer, 0: nothing fits)."""
        if self.low >= self.most or (self.high is not None and self.high <= self.least):
            return None
        wanted = self._best_predicted()
        if self.low and wanted <= self.low * (1 + self.tolerance):
            return None
        if self.high is not None:
            gap = self.high - max(self.low, 0)
            if self.low and gap <= max(self.step, self.tolerance * self.high):
                return None
            margin = max(self.step, int(gap * 0.1))
            if not self.low < wanted <= self.high - margin:
                wanted = self.low + gap // 2
        value = self._rounded(wanted)
        return value if value > self.low and (self.high is None or value < self.high) else None

    def worked(self, value: int, peak_bytes: int) -> None:
        """It ran within the usable memory; `peak_bytes` corrects the prediction."""
        self.low = max(self.low, value)
        self.correction_bytes = peak_bytes - self.predict(value)

    def failed(self, value: int, peak_bytes: int | None = None) -> None:
        """It did not; `peak_bytes` where it ran over the usable memory without dying."""
        self.high = value if self.high is None else min(self.high, value)
        if peak_bytes is not None and peak_bytes > self.usable_bytes:
            self.correction_bytes = peak_bytes - self.predict(value)
            return
        must_have_needed = self.usable_bytes - self.predict(value)
        blind = int(self._blind_step * self.usable_bytes)
        self.correction_bytes = max(self.correction_bytes, must_have_needed) + blind
        self._blind_step *= 2

    def _best_predicted(self) -> int:
        """The largest value that fits by the corrected prediction; `least` where none does."""
        low, high = self.least, self.most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(middle) + self.correction_bytes <= self.usable_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _rounded(self, value: int) -> int:
        return max(self.least, min(self.most, value // self.step * self.step))
