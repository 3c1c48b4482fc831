"""Turns a child's output into lines of bounded length, whatever the child writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_LINE_BYTES = 16 << 10
_LINE_END = re.compile(rb"[\r\n]")


class LineCutter:
    """Splits chunks at newlines and carriage returns, so that a progress bar is seen as it moves.

    A longer line is cut and the rest of it dropped; empty lines are dropped; bytes that are not UTF-8 become
    the replacement character.
    """

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self._longest_bytes = longest_bytes
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that this chunk completes."""
        *ends, rest = _LINE_END.split(chunk)
        for end in ends:
            yield from self._take(end)
        self._keep(rest)

    def end(self) -> Iterator[str]:
        """Yield what came after the last line end."""
        yield from self._take(b"")

    def _take(self, end: bytes) -> Iterator[str]:
        self._keep(end)
        line, self._pending = self._pending, b""
        if line:
            yield line.decode(errors="replace")

    def _keep(self, part: bytes) -> None:
        self._pending += part[: self._longest_bytes - len(self._pending)]
