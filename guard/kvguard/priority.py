"""Which priority a request has: what its key has, or what its header asks for within that."""

from __future__ import annotations

from collections.abc import Mapping

MOST_PRIORITY = 100
HEADER = b"x-kvguard-priority"


class PriorityError(ValueError):
    """The header cannot be used; the message says why."""


class Priorities:
    """Priorities by key name. With none set any request may ask for any; else only for less than its key has.

    So whoever hands out keys decides who goes first, and a client may still put its own batch work last.
    """

    def __init__(self, by_key: Mapping[str, int] | None = None) -> None:
        self._by_key = dict(by_key or {})

    def of(self, key: str, asked: bytes | None) -> int:
        """Raises PriorityError where the header is no number, or out of range."""
        own = self._by_key.get(key, 0)
        if asked is None:
            return own
        try:
            wanted = int(asked)
        except ValueError:
            wanted = MOST_PRIORITY + 1
        if abs(wanted) > MOST_PRIORITY:
            raise PriorityError(
                f"X-KVGuard-Priority must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
            )
        return min(wanted, own) if self._by_key else wanted
