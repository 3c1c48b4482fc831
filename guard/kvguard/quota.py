"""What one API key may use: requests at once, and tokens a minute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of a key; None means no limit. Requests that wait count, too."""

    requests: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"quota {name} must be at least 1, got {value}")


class Allowance:
    """What is left of one key's quota: a bucket that holds a minute's tokens, and may go into debt.

    Tokens are known only once they were generated, so a request may overdraw; the next one waits for it.
    """

    def __init__(self, quota: Quota, now_s: float) -> None:
        self._quota = quota
        self._tokens = float(quota.tokens_per_minute or 0)
        self._at_s = now_s
        self.requests = 0

    def refused(self, now_s: float) -> tuple[str, float] | None:
        """Why another request is one too many, and in how many seconds it is not; None if it is allowed."""
        quota = self._quota
        if quota.requests is not None and self.requests >= quota.requests:
            return f"{quota.requests} requests at once are allowed for this key", 1.0
        if quota.tokens_per_minute is not None:
            self._refill(now_s)
            if self._tokens <= 0:
                wait_s = (1 - self._tokens) * 60 / quota.tokens_per_minute
                return f"{quota.tokens_per_minute} tokens a minute are allowed for this key", wait_s
        return None

    def spend(self, now_s: float, tokens: int) -> None:
        if self._quota.tokens_per_minute is not None:
            self._refill(now_s)
            self._tokens -= tokens

    def _refill(self, now_s: float) -> None:
        most = float(self._quota.tokens_per_minute or 0)
        self._tokens = min(most, self._tokens + max(0.0, now_s - self._at_s) * most / 60)
        self._at_s = now_s
