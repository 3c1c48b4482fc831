"""Exact token counts from the engine's own endpoints: its tokenizer, its template, its reading of a body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvguard.ports import ProtocolError
from kvguard_adapters.backends.http import Answered, EngineHttp
from kvguard_adapters.tokenizers.llama_infill import InfillCounter

COUNT_TIMEOUT_S = 60.0
AT_ONCE = 8

_CHAT = frozenset({"/v1/chat/completions", "/chat/completions"})
_RESPONSES = frozenset({"/v1/responses", "/responses"})
_MESSAGES = "/v1/messages"
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


class _Count(msgspec.Struct):
    count: int


class TokenCounter(Protocol):
    """Counts as an engine counts. Used by that engine's adapter."""

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        """Prompt tokens of the longest sequence of a body. Raises BackendError where it cannot be told."""


def uncountable(path: str) -> ProtocolError:
    return ProtocolError(f"tokens of this body for {path} cannot be counted")


async def longest(path: str, body: Mapping[str, Any], count: Callable[[Any], Awaitable[int]]) -> int:
    """The most tokens among the prompts of a body: one or many texts, lists of token ids, or objects."""
    prompt = next((body[name] for name in _PROMPT_FIELDS.get(path, ()) if name in body), None)
    prompts = prompt if isinstance(prompt, list) and not _holds_ids(prompt) else [prompt]
    if not prompts or prompt is None:
        raise uncountable(path)
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(item: Any) -> int:
        async with limit:
            return len(item) if _only_ids(item) else await count(item)

    return max(await asyncio.gather(*map(one, prompts)))


def _holds_ids(prompt: list[Any]) -> bool:
    return any(isinstance(item, int) for item in prompt)


def _only_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)


class LlamaTokenCounter:
    """llama.cpp's server: its counting routes, else `/apply-template` and `/tokenize`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.infill = InfillCounter(http, self._tokens)

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        if path in _CHAT:
            return await self._count_chat(body)
        if path in _RESPONSES:
            return await self._ask("/v1/responses/input_tokens", body)
        if path == _MESSAGES:
            return await self._ask("/v1/messages/count_tokens", body)
        if path == "/infill":
            return await self.infill.count(body)
        return await longest(path, body, self._count_prompt)

    async def _count_chat(self, body: Mapping[str, Any]) -> int:
        try:
            return await self._ask("/v1/chat/completions/input_tokens", body)
        except Answered as answer:
            if answer.status != 404:
                raise
        templated: _Templated = await self._http.post(  # a server from before the counting routes
            "/apply-template", body, _Templated, timeout_s=COUNT_TIMEOUT_S
        )
        return await self._tokens(templated.prompt)

    async def _ask(self, route: str, body: Mapping[str, Any]) -> int:
        answer: _InputTokens = await self._http.post(route, body, _InputTokens, timeout_s=COUNT_TIMEOUT_S)
        return answer.input_tokens

    async def _count_prompt(self, prompt: Any) -> int:
        """A text, a list of texts and token ids, or an object with one of them."""
        if isinstance(prompt, dict) and "multimodal_data" not in prompt:
            prompt = prompt.get("prompt_string")
        if not isinstance(prompt, str | list):
            raise ProtocolError("the body holds a prompt that cannot be counted")
        return await self._tokens(prompt)

    async def _tokens(self, content: str | list[Any], *, special: bool = True) -> int:
        """Tokens of a text; `special`: as a prompt, with BOS added and special tokens in it recognised."""
        body = {"content": content, "add_special": special, "parse_special": special}
        answer: _Tokens = await self._http.post("/tokenize", body, _Tokens, timeout_s=COUNT_TIMEOUT_S)
        return len(answer.tokens)


_TOKENIZED_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "tools", "mm_processor_kwargs",
)  # fmt: skip


class VllmTokenCounter:
    """vLLM: `/tokenize`, which renders a chat as the chat route does."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        if path == _MESSAGES:
            counted: _InputTokens = await self._http.post(
                "/v1/messages/count_tokens", body, _InputTokens, timeout_s=COUNT_TIMEOUT_S
            )
            return counted.input_tokens
        if path in _RESPONSES:
            return await self._count_chat({"model": body.get("model"), "messages": _as_chat(path, body)})
        if "messages" in body and "documents" not in body:
            return await self._count_chat(body)

        async def count_text(prompt: Any) -> int:
            if not isinstance(prompt, str):
                raise uncountable(path)
            special = body.get("add_special_tokens", True)
            return await self._tokenize({"prompt": prompt, "add_special_tokens": special})

        return await longest(path, body, count_text)

    async def _count_chat(self, body: Mapping[str, Any]) -> int:
        return await self._tokenize({name: body[name] for name in _TOKENIZED_CHAT_FIELDS if name in body})

    async def _tokenize(self, body: Mapping[str, Any]) -> int:
        answer: _Count = await self._http.post("/tokenize", body, _Count, timeout_s=COUNT_TIMEOUT_S)
        return answer.count


def _as_chat(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat that a `/v1/responses` body becomes, where it holds texts alone."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    extended = any(body.get(name) for name in ("previous_response_id", "tools", "prompt"))
    if extended or not isinstance(items, list) or not all(_is_plain(item) for item in items):
        raise uncountable(path)
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return [*system, *({"role": item["role"], "content": item["content"]} for item in items)]


def _is_plain(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("content"), str) and "role" in item
