"""How fast the queue empties, measured only while something waits."""

from __future__ import annotations

from collections import deque

WINDOW_STARTS = 64
LEAST_STARTS = 4


class DrainRate:
    """Tokens of started requests per second of saturated time: idle hours say nothing about a full engine."""

    def __init__(self) -> None:
        self._starts: deque[tuple[float, int]] = deque(maxlen=WINDOW_STARTS)
        self._saturated_s = 0.0
        self._since_s: float | None = None

    def saturated(self, now_s: float, waits: bool) -> None:
        """Tell whether something waits from now on."""
        if self._since_s is not None:
            self._saturated_s += max(0.0, now_s - self._since_s)
        self._since_s = now_s if waits else None

    def started(self, now_s: float, tokens: int) -> None:
        """A request that had to wait has started."""
        self._starts.append((self._at(now_s), tokens))

    def tokens_per_s(self, now_s: float) -> float | None:
        """None until enough has started to tell. A stall lowers it, as it should."""
        if len(self._starts) < LEAST_STARTS:
            return None
        elapsed_s = self._at(now_s) - self._starts[0][0]
        tokens = sum(tokens for _, tokens in self._starts) - self._starts[0][1]
        return tokens / elapsed_s if elapsed_s > 0 else None

    def wait_s(self, now_s: float, tokens: int) -> float | None:
        """Seconds until so many tokens have started."""
        rate = self.tokens_per_s(now_s)
        return tokens / rate if rate else None

    def _at(self, now_s: float) -> float:
        return self._saturated_s + (now_s - self._since_s if self._since_s is not None else 0.0)
