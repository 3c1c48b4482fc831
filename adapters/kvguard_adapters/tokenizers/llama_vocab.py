"""Exact token counts of a GGUF in a child process, for an engine whose own tokenizer has to wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvguard.ports import NotReady, ProtocolError

COUNT_TIMEOUT_S = 60.0
_CHILD = Path(__file__).with_name("llama_vocab_child.py")


class _Answer(msgspec.Struct):
    id: int
    tokens: int | None = None
    error: str = ""


class VocabularyCounter:
    """Asks one child, which is started at the first question and again when it has died."""

    def __init__(self, python: str, model: str) -> None:
        self._command = (python, str(_CHILD), model)
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        """Prompt tokens of a body. Raises NotReady when the child does not answer, else ProtocolError."""
        async with self._lock:
            try:
                async with asyncio.timeout(COUNT_TIMEOUT_S):
                    answer = await self._ask(path, body)
            except (TimeoutError, OSError) as exc:
                await self._end()
                raise NotReady(f"the tokenizer process does not answer: {type(exc).__name__}") from exc
        if answer.tokens is None:
            raise ProtocolError(f"tokens of {path} cannot be counted: {answer.error}")
        return answer.tokens

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _ask(self, path: str, body: Mapping[str, Any]) -> _Answer:
        child = await self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        self._asked += 1
        child.stdin.write(msgspec.json.encode({"id": self._asked, "path": path, "body": body}) + b"\n")
        await child.stdin.drain()
        while True:
            line = await child.stdout.readline()
            if not line:
                raise ConnectionError("the child has ended")
            answer = msgspec.json.decode(line, type=_Answer)
            if answer.id == self._asked:  # an earlier one's asker was cancelled
                return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
