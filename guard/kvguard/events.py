"""What happened, for people and pages: each event is logged, kept for a while, and sent on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import structlog

Event = dict[str, Any]


class Events:
    """The one place through which decisions of the supervision and tuning loops become visible."""

    def __init__(self, keep: int = 500, backlog: int = 1000) -> None:
        self._ring: deque[Event] = deque(maxlen=keep)
        self._subscribers: set[asyncio.Queue[Event]] = set()
        self._backlog = backlog
        self._log = structlog.get_logger("kvguard")

    def publish(self, name: str, *, level: str = "info", **facts: Any) -> None:
        """Log one event and hand it to every subscriber; a subscriber that lags loses its oldest ones."""
        getattr(self._log, level)(name, **facts)
        event: Event = {"event": name, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
        self._ring.append(event)
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    def recent(self) -> list[Event]:
        return list(self._ring)

    async def subscribe(self) -> AsyncIterator[Event]:
        """Yield every later event until the consumer stops."""
        queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=self._backlog)
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)
