"""What the engine says of itself, turned into how careful to be."""

from __future__ import annotations

from kvguard.domain import EngineSample

STALE_S = 2.0
TRUST_LOW_AFTER_SAMPLES = 200
LEAST_RATIO = 0.5
RISE_WEIGHT, FALL_WEIGHT = 0.2, 0.01
LEAST_SHARE = 0.05
BRAKE_SHARE = 0.97
BRAKE_STEPS = 16
Z_STEP = 0.5
Z_MOST_ABOVE = 3.0
Z_FALL_PER_S = 0.5 / 300
USED_SHARE = 0.8


class Feedback:
    """Care z, the ratio of real to booked usage, and a brake.

    z      rises by 0.5 with every reading that shows a new preemption or overflow, and falls by as much in
           five minutes, but only while the limit is really used: quiet hours prove nothing
    ratio  real over booked tokens: prefix sharing lowers it, overhead raises it; below 1 it is believed only
           after 200 readings
    """

    def __init__(self, z: float) -> None:
        self._least_z = z
        self.z = z
        self.violations = 0
        self._ratio = 1.0
        self._readings = 0
        self._last: EngineSample | None = None
        self._events: int | None = None

    def floor(self, z: float) -> None:
        """Never be less careful than this."""
        self._least_z = z
        self.z = max(self.z, z)

    def restart(self) -> None:
        """A new engine counts from zero; what was learned of care stays."""
        self._last = self._events = None

    @property
    def ratio(self) -> float:
        least = LEAST_RATIO if self._readings >= TRUST_LOW_AFTER_SAMPLES else 1.0
        return max(least, self._ratio)

    def observe(
        self, sample: EngineSample, *, booked_tokens: float, pool_tokens: int, peak_share: float
    ) -> None:
        """Take a reading. `peak_share` is the predicted peak over the pool.

        `booked_tokens` is 0 where the books cannot be compared: a prompt that is booked in full and prefilled
        in part would look like sharing.
        """
        before, self._last = self._last, sample
        events = _sum(sample.preemptions_total, sample.overflows_total)
        fresh = 0 if events is None or self._events is None else events - self._events
        self._events = events if events is not None else self._events
        if fresh > 0:
            self.violations += fresh
            self.z = min(self.z + Z_STEP, self._least_z + Z_MOST_ABOVE)
        elif before is not None and peak_share >= USED_SHARE:
            elapsed_s = max(0.0, sample.at_s - before.at_s)
            self.z = max(self._least_z, self.z - Z_FALL_PER_S * min(elapsed_s, STALE_S))
        if sample.kv_used_tokens is not None and booked_tokens >= LEAST_SHARE * pool_tokens:
            gap = sample.kv_used_tokens / booked_tokens - self._ratio
            self._ratio += (RISE_WEIGHT if gap > 0 else FALL_WEIGHT) * gap
            self._readings += 1

    def brake(self, now_s: float, *, sequences: int, pool_tokens: int) -> str:
        """Why nobody may start now, whatever is predicted; empty if nothing speaks against it."""
        last = self._last
        if last is None:
            return ""
        if last.card_free_bytes is not None and last.card_free_bytes < 0:
            return "card_full"
        if last.kv_used_tokens is None:
            return ""
        if now_s - last.at_s > STALE_S:
            return "metrics_stale"
        if last.kv_used_tokens + sequences * BRAKE_STEPS > BRAKE_SHARE * pool_tokens:
            return "usage_high"
        return ""


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
