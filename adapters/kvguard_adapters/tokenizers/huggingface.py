"""Token counts in process, by a checkpoint's own `tokenizer.json` and chat template.

The engine is asked to count the same samples once; where they differ, it counts everything itself. What is
not plain text (tools, images, a template of the request's own) it always counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from kvguard.ports import BackendError
from kvguard_adapters.tokenizers.backend_http import TokenCounter, longest

_CHAT_ROUTES = frozenset({"/v1/chat/completions", "/chat/completions"})
_PLAIN_CHAT_FIELDS = frozenset({"role", "content", "name"})
_CHANGES_THE_PROMPT = (
    "tools", "functions", "documents", "chat_template", "chat_template_kwargs", "add_special_tokens",
    "add_generation_prompt", "continue_final_message", "reasoning_effort", "truncate_prompt_tokens",
    "prompt_embeds", "mm_processor_kwargs", "messages_format",
)  # fmt: skip
_SAMPLES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": " The quick brown fox,\n\tünïcödé 你好 🎉 <s> 12345"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello, world"}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Öne\n"},
                {"role": "assistant", "content": "two "},
                {"role": "user", "content": " three"},
            ]
        },
    ),
)

_log = structlog.get_logger("kvguard.tokenizers")


class Unusable(RuntimeError):
    """A checkpoint whose tokens cannot be counted here; the message says why."""


class Checkpoint:
    """Tokenizer and chat template of one checkpoint directory. Blocking, and slow to make."""

    def __init__(self, folder: Path) -> None:
        """Raises Unusable."""
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer
        except ImportError as exc:
            raise Unusable(f"{exc.name} is not installed") from exc
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
            template = _template(folder, config)
        except Exception as exc:  # `tokenizers` raises bare Exception for what it cannot read
            raise Unusable(f"{folder}: {exc}") from exc
        self._special = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)

    def chat(self, messages: list[dict[str, Any]]) -> int:
        """Raises Unusable when the template refuses these messages."""
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except Exception as exc:  # a template may fail with whatever its own operations raise
            raise Unusable(f"the chat template fails: {type(exc).__name__}") from exc
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


class CheckedCounter:
    """Counts by the checkpoint what it counts as the engine does, and asks the engine for the rest."""

    def __init__(self, folder: Path, engine: TokenCounter, model_name: str) -> None:
        self._folder = folder
        self._engine = engine
        self._model_name = model_name
        self._checkpoint: asyncio.Task[Checkpoint | None] | None = None

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        if not _is_plain(path, body):
            return await self._engine.count(path, body)
        if self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._checked(), name="tokenizer_check")
        checkpoint = await asyncio.shield(self._checkpoint)
        if checkpoint is not None:
            with contextlib.suppress(Unusable):
                return await _count(checkpoint, path, body)
        return await self._engine.count(path, body)

    async def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.cancel()
            await asyncio.gather(self._checkpoint, return_exceptions=True)

    async def _checked(self) -> Checkpoint | None:
        """Load it and compare with the engine; None where it is not to be trusted."""
        try:
            checkpoint = await asyncio.to_thread(Checkpoint, self._folder)
            for path, body in _SAMPLES:
                ours = await _count(checkpoint, path, body)
                theirs = await self._engine.count(path, {"model": self._model_name, **body})
                if ours != theirs:
                    _log.warning("tokenizer_differs", path=path, own_tokens=ours, engine_tokens=theirs)
                    return None
        except Unusable as exc:
            _log.info("tokenizer_unusable", reason=str(exc))
            return None
        except BackendError as exc:
            _log.info("tokenizer_unchecked", reason=type(exc).__name__)
            return None
        return checkpoint


async def _count(checkpoint: Checkpoint, path: str, body: Mapping[str, Any]) -> int:
    if path in _CHAT_ROUTES:
        return await asyncio.to_thread(checkpoint.chat, body["messages"])

    async def count_text(text: str) -> int:
        return await asyncio.to_thread(checkpoint.text, text)

    return await longest(path, body, count_text)


def _is_plain(path: str, body: Mapping[str, Any]) -> bool:
    if any(body.get(name) is not None for name in _CHANGES_THE_PROMPT):
        return False
    if path in _CHAT_ROUTES:
        messages = body.get("messages")
        return isinstance(messages, list) and all(_is_plain_message(message) for message in messages)
    return path == "/v1/completions" and _is_text(body.get("prompt"))


def _is_plain_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and set(message) <= _PLAIN_CHAT_FIELDS
        and isinstance(message.get("content"), str)
    )


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(isinstance(item, str) for item in prompt)
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """A file of its own wins over the configuration, where it may be one of several, by name."""
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.exists() else config.get("chat_template") or ""
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default", "")
    return str(template)


def _text(token: Any) -> Any:
    """A special token as text, whether it is written as text or with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _refuse(message: str) -> None:
    raise ValueError(message)
