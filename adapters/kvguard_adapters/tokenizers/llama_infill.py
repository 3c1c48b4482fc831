"""Exact prompt tokens of llama.cpp's `/infill`, which cuts what it is given down to a batch.

Source: format_prompt_infill in llama.cpp's tools/server/server-common.cpp (build 0c1e570).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from kvguard_adapters.backends.http import EngineHttp

FRAME_TIMEOUT_S = 5.0
DEFAULT_BATCH_TOKENS = 2048
_MARKERS = 3  # prefix, suffix, middle
_SNIPPET = "\n\n--- snippet ---\n\n"
_EMPTY = {"input_prefix": "", "input_suffix": "", "n_predict": 0, "cache_prompt": False}


class _Evaluated(msgspec.Struct):
    tokens_evaluated: int


class _Tokens(Protocol):
    async def __call__(self, text: Any, /, *, special: bool = True) -> int: ...


class InfillCounter:
    """Needs to know the server's batch and context; asks once what its model puts around an empty prompt."""

    def __init__(self, http: EngineHttp, tokens: _Tokens) -> None:
        self._http = http
        self._tokens = tokens
        self._frame_tokens: int | None = None
        self.batch_tokens = DEFAULT_BATCH_TOKENS
        self.ctx_tokens = 0

    async def count(self, body: Mapping[str, Any]) -> int:
        bos = await self._tokens("")
        names = (
            await self._frame() - _MARKERS - bos
        )  # repository and file, where the model has tokens for them
        extra = names
        for chunk in body.get("input_extra") or ():
            head = f"{chunk.get('filename', 'tmp')}\n" if names else _SNIPPET
            extra += bool(names) + await self._plain(head) + await self._plain(chunk.get("text", ""))
        prefix = await self._plain(body.get("input_prefix", ""))
        suffix = await self._plain(body.get("input_suffix", ""))
        prompt = await self._tokens(body["prompt"]) - bos if body.get("prompt") else 0
        quarter = self.batch_tokens // 4
        return (
            bos
            + _MARKERS
            + prompt
            + min(prefix, 3 * quarter)
            + min(suffix, max(0, quarter - 2 - prompt))
            + min(extra, max(0, self.ctx_tokens - self.batch_tokens + 2))
        )

    async def _plain(self, text: Any) -> int:
        return await self._tokens(text, special=False) if text else 0

    async def _frame(self) -> int:
        if self._frame_tokens is None:
            answer: _Evaluated = await self._http.post(
                "/infill", _EMPTY, _Evaluated, timeout_s=FRAME_TIMEOUT_S
            )
            self._frame_tokens = answer.tokens_evaluated
        return self._frame_tokens
