"""Requests that kvguard itself sends to an engine to confirm a configuration: fixed filler, known sizes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp

from kvguard.domain import Endpoint

FIRST, FILLER = "Hello", " the"
"""One token each in most vocabularies; in a small one a filler is up to four."""

CALIBRATION_FILLERS = 64

PROBE_TIMEOUT_S = 600.0


def filler_text(fillers: int) -> str:
    """The prompt of a probe."""
    return FIRST + FILLER * max(0, fillers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How many tokens the fixed text and one filler are to the engine that is probed."""

    first_tokens: float = 2.0
    filler_tokens: float = 1.0

    @classmethod
    def of(cls, empty_tokens: int, filled_tokens: int) -> Calibration:
        """From the counts of no fillers and of CALIBRATION_FILLERS."""
        per_filler = (filled_tokens - empty_tokens) / CALIBRATION_FILLERS
        return cls(first_tokens=empty_tokens, filler_tokens=max(per_filler, 1 / 64))

    def fillers(self, prompt_tokens: int) -> int:
        """The most fillers that make a prompt of no more than `prompt_tokens`."""
        return max(0, int((prompt_tokens - self.first_tokens) / self.filler_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the engine said of one probe. `status` 0 means that the connection broke."""

    status: int
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    body: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


async def probe(
    endpoint: Endpoint,
    *,
    model: str,
    fillers: int,
    max_new_tokens: int,
    embedding: bool = False,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> ProbeResult:
    """Ask for a completion (or an embedding) of a filler text; an engine's fault is a result."""
    text = filler_text(fillers)
    path, body = "/v1/completions", {"model": model, "prompt": text, "max_tokens": max_new_tokens}
    if embedding:
        path, body = "/v1/embeddings", {"model": model, "input": text}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    started_s = time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(endpoint.base_url + path, json=body, headers=headers) as response,
        ):
            if response.status != 200:
                return ProbeResult(
                    status=response.status, body=(await response.text(errors="replace"))[:2000]
                )
            usage = (await response.json(content_type=None)).get("usage") or {}
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as exc:
        return ProbeResult(
            status=0, seconds=time.monotonic() - started_s, body=f"{type(exc).__name__}: {exc}"
        )
    return ProbeResult(
        status=200,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        max_new_tokens=max_new_tokens,
        new_tokens=int(usage.get("completion_tokens") or 0),
        seconds=time.monotonic() - started_s,
    )
