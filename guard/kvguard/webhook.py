"""Tells a URL of each step, one POST an event, in order; kvguard itself never waits for it.

Who answers slowly or not at all loses events and delays nobody: a bounded queue drops its oldest, each event
is tried TRIES times, and after one that failed a pause grows, so that a dead address is not hammered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import structlog
from tenacity import AsyncRetrying, RetryError, stop_after_attempt, wait_exponential

from kvguard.events import Event, Events

TOLD = frozenset({"backend_died", "backend_failed", "ladder_step", "ladder_exhausted"})
TOLD_PREFIX = "config_"
TRIES = 2
TIMEOUT_S = 5.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

_log = structlog.get_logger("kvguard.webhook")


class Webhook:
    """One task, `run`; stops by cancellation."""

    def __init__(
        self, url: str, events: Events, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._url = url
        self._events = events
        self._sleep = sleep
        self._failures = 0

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async for event in self._events.subscribe():
                if event["event"] in TOLD or event["event"].startswith(TOLD_PREFIX):
                    await self._tell(session, event)

    async def _tell(self, session: aiohttp.ClientSession, event: Event) -> None:
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(TRIES), wait=wait_exponential(PAUSE_S), sleep=self._sleep
            ):
                with attempt:
                    await self._post(session, event)
        except RetryError as failed:
            self._failures += 1
            reason = failed.last_attempt.exception()
            _log.warning("webhook_failed", told=event["event"], reason=str(reason) or type(reason).__name__)
            await self._sleep(min(PAUSE_S * 2**self._failures, LONGEST_PAUSE_S))
        else:
            self._failures = 0

    async def _post(self, session: aiohttp.ClientSession, event: Event) -> None:
        async with session.post(self._url, json=event, allow_redirects=False) as answer:
            answer.raise_for_status()
