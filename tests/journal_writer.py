"""A process that appends to a journal until it is done or killed; light to import, since tests start many."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from kvguard.journal import Journal
from kvguard.record import Record


def append_many(path: Path, like: Record, name: str, count: int, acks: Connection | None = None) -> None:
    """Append `count` large records and send each one's id when it is on disk."""
    journal = Journal(path)
    for number in range(count):
        record_id = f"{name}-{number}"
        journal.append(msgspec.structs.replace(like, id=record_id, notes=("x" * 20_000,)), ["load line"])
        if acks is not None:
            acks.send(record_id)
