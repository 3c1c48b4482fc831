"""Load on a running kvguard: open loop, as many clients as it takes, and what became of each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvguard.domain import Capacity, Demand, Ending
from kvguard_policies.admission.adaptive import Adaptive

PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request's end, on the clock of the client; `status` 0 is a broken connection."""

    status: int
    code: str
    begun_s: float
    took_s: float
    retry_after_s: float | None
    new_tokens: int

    @property
    def served(self) -> bool:
        return self.status == 200 and not self.code

    @property
    def in_order(self) -> bool:
        """Served, or refused as a client can deal with."""
        return self.served or (self.status == 503 and bool(self.code) and (self.retry_after_s or 0) >= 1)


@dataclass(slots=True, kw_only=True)
class Storm:
    """What a stretch of load came to."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def served(self) -> int:
        return sum(answer.served for answer in self.answers)

    def counts(self) -> Counter[str]:
        return Counter(f"{answer.status} {answer.code}".strip() for answer in self.answers)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    begun_s = time.monotonic()
    status, code, retry_after_s, new_tokens = 0, "", None, 0
    try:
        async with session.post(url + "/v1/completions", json=body) as answer:
            status = answer.status
            said = answer.headers.get("Retry-After")
            retry_after_s = float(said) if said else None
            data = json.loads(await answer.read())
            code = data.get("error", {}).get("code", "")
            new_tokens = data.get("usage", {}).get("completion_tokens", 0)
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        code = type(exc).__name__
    return Answer(
        status=status, code=code, begun_s=begun_s, took_s=time.monotonic() - begun_s,
        retry_after_s=retry_after_s, new_tokens=new_tokens,
    )  # fmt: skip


async def best_rate_per_s(url: str, body: dict[str, Any], *, clients: int, seconds: float) -> float:
    """What it serves when just as many ask as can run, each again as soon as it has its answer."""
    end_s = time.monotonic() + seconds
    done = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while time.monotonic() < end_s:
            done += (await ask(session, url, body)).served

    begun_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return done / (time.monotonic() - begun_s)


async def storm(url: str, bodies: Sequence[dict[str, Any]], *, rate_per_s: float, seconds: float) -> Storm:
    """Open loop: requests at a steady rate whatever comes back, and all answers to them.

    `seconds` of the result is the time until the last one that was served.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    begun_s = time.monotonic()
    tasks: list[asyncio.Task[Answer]] = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for number in range(int(rate_per_s * seconds)):
            due_s = begun_s + number / rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(session, url, bodies[number % len(bodies)])))
        answers = list(await asyncio.gather(*tasks))
    ends_s = [answer.begun_s + answer.took_s for answer in answers if answer.served]
    return Storm(answers=answers, seconds=max(ends_s, default=begun_s) - begun_s)


def misled(capacity: Capacity, max_new_tokens: int, *, believed_tokens: int) -> Adaptive:
    """A policy that has seen no answer end later than `believed_tokens`, as an earlier start may have.

    Nor much earlier: as long as one that runs has not got there, others are admitted beside it.
    """
    policy = Adaptive()
    policy.resize(capacity)
    demand = Demand(route="completions", prompt_tokens=10, max_new_tokens=max_new_tokens)
    for lease_id in range(3000):
        policy.admit(lease_id, demand, "anonymous")
        policy.release(lease_id, Ending.FINISHED, believed_tokens - lease_id % 100)
    return policy
