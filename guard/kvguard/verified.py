"""Whether a record still speaks of the present, and which change made it stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from kvguard.journal import BackendRecord, CardRecord, Fingerprint, Head, ModelRecord, Record


class Verifier:
    """Says what has changed since a record: nothing (verified now), some things, or None where nobody knows.

    It compares with what is `here` now, where that is given; else with the newest record of the same card,
    engine and model, which may prove a change but never that there was none. The weights' file is looked at
    always.
    """

    def __init__(self, here: Sequence[Fingerprint] = ()) -> None:
        self._here = here
        self._last: dict[tuple[str, ...], Fingerprint] = {}
        self._fingerprint_of = lru_cache(maxsize=4096)(_fingerprint)

    def see(self, head: Head) -> None:
        """Take note of a record, oldest first."""
        seen = self._fingerprint_of(bytes(head.card), bytes(head.backend), bytes(head.model))
        if seen is not None:
            self._last[_place(seen)] = seen

    def changes(self, record: Record) -> tuple[str, ...] | None:
        of_file = _file_changes(record)
        if self._here:
            return min((now.changes_from(record) for now in self._here), key=len) + of_file
        own = Fingerprint(card=record.card, backend=record.backend, model=record.model)
        since = self._last.get(_place(own), own).changes_from(record)
        return since + of_file or None


def _place(seen: Fingerprint) -> tuple[str, ...]:
    return seen.card.kind, seen.card.name, str(seen.card.total_bytes), seen.backend.name, seen.model.name


def _fingerprint(card: bytes, backend: bytes, model: bytes) -> Fingerprint | None:
    """None where a newer version wrote what is not understood here."""
    try:
        return Fingerprint(
            card=msgspec.json.decode(card, type=CardRecord),
            backend=msgspec.json.decode(backend, type=BackendRecord),
            model=msgspec.json.decode(model, type=ModelRecord),
        )
    except msgspec.MsgspecError:
        return None


def _file_changes(record: Record) -> tuple[str, ...]:
    variant = record.knobs.quant
    if variant.kind != "gguf" or not variant.size_bytes or len(record.model.files) > 1:
        return ()
    try:
        size_bytes = Path(variant.source).stat().st_size
    except OSError:
        return (f"model file: {variant.source} is gone",)
    if size_bytes == variant.size_bytes:
        return ()
    return (f"model file: {variant.size_bytes} -> {size_bytes} bytes",)
