"""Requests that kvguard itself sends to an engine to confirm a configuration: fixed filler, known sizes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp

from kvguard.domain import Endpoint

FILLER = " the"
"""One token in the vocabularies seen so far; the engine's own `usage` says what it really was."""

PROBE_TIMEOUT_S = 600.0


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
    prompt_tokens: int,
    max_new_tokens: int,
    embedding: bool = False,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> ProbeResult:
    """Ask for a completion (or an embedding) of about `prompt_tokens`; an engine's fault is a result."""
    text = "Hello" + FILLER * max(0, prompt_tokens - 2)
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
