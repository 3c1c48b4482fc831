"""Exact token counts from the engine's own endpoints: its tokenizer, its template, its reading of a body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvguard.ports import ProtocolError
from kvguard_adapters.backends.http import Answered, EngineHttp

COUNT_TIMEOUT_S = 60.0
AT_ONCE = 8

_COUNTING_ROUTES = {
    "/v1/chat/completions": "/v1/chat/completions/input_tokens",
    "/chat/completions": "/v1/chat/completions/input_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
    "/responses": "/v1/responses/input_tokens",
    "/v1/messages": "/v1/messages/count_tokens",
}
_PROMPT_FIELDS = {
    "/v1/completions": ("prompt",),
    "/completions": ("prompt",),
    "/completion": ("prompt",),
    "/v1/embeddings": ("input", "content"),
    "/embeddings": ("input", "content"),
    "/embedding": ("input", "content"),
}


class _InputTokens(msgspec.Struct):
    input_tokens: int


class _Templated(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class TokenCounter(Protocol):
    """Counts as an engine counts. Used by that engine's adapter."""

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        """Prompt tokens of the longest sequence of a body. Raises BackendError where it cannot be told."""


class LlamaTokenCounter:
    """llama.cpp's server: its counting routes, else `/apply-template` and `/tokenize`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        if path in _COUNTING_ROUTES:
            return await self._count_chat(path, body)
        if path in _PROMPT_FIELDS:
            prompt = next((body[name] for name in _PROMPT_FIELDS[path] if name in body), None)
            return await self._count_prompts(prompt)
        raise ProtocolError(f"tokens of {path} cannot be counted")

    async def _count_chat(self, path: str, body: Mapping[str, Any]) -> int:
        try:
            counted: _InputTokens = await self._http.post(
                _COUNTING_ROUTES[path], body, _InputTokens, timeout_s=COUNT_TIMEOUT_S
            )
        except Answered as answer:
            if answer.status != 404 or "chat" not in path:
                raise
        else:
            return counted.input_tokens
        templated: _Templated = await self._http.post(  # a server from before the counting routes
            "/apply-template", body, _Templated, timeout_s=COUNT_TIMEOUT_S
        )
        return await self.tokens(templated.prompt)

    async def _count_prompts(self, prompt: Any) -> int:
        """The longest of one or many prompts: text, token ids, both mixed, or an object with a text."""
        prompts = [prompt] if not isinstance(prompt, list) or _holds_ids(prompt) else prompt
        if not prompts:
            raise ProtocolError("the body holds no prompt")
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(item: Any) -> int:
            async with limit:
                return await self._count_prompt(item)

        return max(await asyncio.gather(*map(one, prompts)))

    async def _count_prompt(self, prompt: Any) -> int:
        if isinstance(prompt, dict) and "multimodal_data" not in prompt:
            prompt = prompt.get("prompt_string")
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            return len(prompt)
        if isinstance(prompt, str) or (isinstance(prompt, list) and _holds_ids(prompt)):
            return await self.tokens(prompt)
        raise ProtocolError("the body holds a prompt that cannot be counted")

    async def tokens(self, content: str | Sequence[Any], *, special: bool = True) -> int:
        """Tokens of a text as the server reads a prompt: BOS added, special tokens in it recognised."""
        body = {"content": content, "add_special": special, "parse_special": special}
        answer: _Tokens = await self._http.post("/tokenize", body, _Tokens, timeout_s=COUNT_TIMEOUT_S)
        return len(answer.tokens)


def _holds_ids(prompt: list[Any]) -> bool:
    return any(isinstance(item, int) for item in prompt)
