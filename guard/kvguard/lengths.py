"""Keeps what a policy has learned of output lengths in the state directory, from one start to the next.

Counts by class of request only: routes, buckets of `max_tokens` and names of keys, never a text. A file that
cannot be read, or is not of this form, is as good as none: the policy then starts as if it knew nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import structlog

from kvguard.ports import AdmissionPolicy

INTERVAL_S = 60.0

_log = structlog.get_logger("kvguard.lengths")


class Lengths:
    """One file a model, since another model answers at other lengths. One task writes it."""

    def __init__(
        self, policy: AdmissionPolicy, directory: Path, model_name: str, *, interval_s: float = INTERVAL_S
    ) -> None:
        self._policy = policy
        self._path = directory / f"lengths-{re.sub(r'[^A-Za-z0-9._-]+', '_', model_name)[:100]}.json"
        self._interval_s = interval_s
        self._kept = ""

    def recall(self) -> None:
        """Give the policy what an earlier start has learned."""
        try:
            text = self._path.read_text(encoding="utf-8")
            self._policy.recall(text)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exc:
            _log.warning("lengths_not_recalled", path=str(self._path), reason=str(exc))
            return
        self._kept = "".join(self._policy.learned())
        _log.info("lengths_recalled", path=str(self._path), size_bytes=len(text))

    async def run(self) -> None:
        """Write now and then; never returns. Gives way between pieces: a table may be long."""
        while True:
            await asyncio.sleep(self._interval_s)
            pieces = []
            for piece in self._policy.learned():
                pieces.append(piece)
                await asyncio.sleep(0)
            if self._is_new("".join(pieces)):
                await asyncio.to_thread(self._write, self._kept)

    def keep(self) -> None:
        """Write what is new, now. For the end."""
        if self._is_new("".join(self._policy.learned())):
            self._write(self._kept)

    def _is_new(self, learned: str) -> bool:
        changed = learned != self._kept
        self._kept = learned
        return changed and bool(learned)

    def _write(self, text: str) -> None:
        """Whole or not at all, also where another process writes the same file."""
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, self._path)
        except OSError as exc:
            _log.warning("lengths_not_kept", path=str(self._path), reason=str(exc))
            with contextlib.suppress(OSError):
                fresh.unlink()
