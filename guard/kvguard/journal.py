"""The structured log of confirmed and failed configurations: written once, read back by a later start.

JSON lines, one file a card, appended under a file lock and fsynced; a torn last line is skipped by readers
and cut off by the next append. The engine's own load lines are in a side file a record. Questions are
answered from the few fields that they need (`Head`); only what is given back is decoded in full, so that
100,000 records are no burden.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvguard.domain import CardInfo, Knobs
from kvguard.record import (
    SCHEMA,
    BackendRecord,
    CardRecord,
    EventName,
    FailureRecord,
    FileRecord,
    Fingerprint,
    ModelRecord,
    Present,
    Record,
    RequestRecord,
    WhyRecord,
    card_record,
    peaks_by_phase,
    to_builtins,
)

__all__ = [
    "SCHEMA",
    "BackendRecord",
    "CardRecord",
    "EventName",
    "FailureRecord",
    "FileRecord",
    "Fingerprint",
    "Head",
    "Journal",
    "ModelRecord",
    "Present",
    "Record",
    "RequestRecord",
    "WhyRecord",
    "card_record",
    "journal_of",
    "journals",
    "new_id",
    "newest",
    "now_iso",
    "peaks_by_phase",
    "read_all",
    "to_builtins",
]

PREFIX = "journal-"
NEWEST_CONFIGURATIONS = 200
_READ_BYTES = 1 << 20
_EVENTS = frozenset(("config_provisional", "config_confirmed", "config_failed"))


def new_id() -> str:
    """A short id that sorts by time."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of a record that questions are answered from; the rest of the line is not even looked at."""

    id: str
    time: str
    event: str
    card: msgspec.Raw
    backend: msgspec.Raw
    model: msgspec.Raw
    knobs: msgspec.Raw
    schema: int = 1
    others_bytes: int = 0

    @property
    def worked(self) -> bool:
        return self.event != "config_failed"


class Journal:
    """One journal file. Safe for several processes; every method reads what is on disk now.

    `skipped_lines` and `newer_lines` count what the last reading could not use: lines that are no record, and
    records of a newer schema whose event is not known here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.load_lines_dir = path.parent / "load"
        self.skipped_lines = 0
        self.newer_lines = 0

    # ------------------------------------------------------------ writing

    def append(self, record: Record, load_lines: Sequence[str] = ()) -> Record:
        """Write one record durably, whole or not at all. Raises OSError when the disk refuses."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if load_lines:
            self.load_lines_dir.mkdir(exist_ok=True, mode=0o700)
            self._load_lines_path(record.id).write_text("\n".join(load_lines) + "\n")
        line = msgspec.json.encode(record) + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = _heal(descriptor)
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if not size:
            _sync_directory(self.path.parent)
        return record

    def load_lines(self, record_id: str) -> list[str]:
        """The engine's own lines of that start; empty where none were kept."""
        try:
            return self._load_lines_path(record_id).read_text().splitlines()
        except FileNotFoundError:
            return []

    def _load_lines_path(self, record_id: str) -> Path:
        return self.load_lines_dir / f"{Path(record_id).name}.log"

    # ------------------------------------------------------------ reading

    def heads(self) -> Iterator[tuple[Head, bytes]]:
        """Every record's head with its line (for `decode`), oldest first."""
        self.skipped_lines = self.newer_lines = 0
        decode = msgspec.json.Decoder(Head).decode
        try:
            file = self.path.open("rb", buffering=_READ_BYTES)
        except FileNotFoundError:
            return
        with file:
            for line in file:
                try:
                    head = decode(line)
                except msgspec.MsgspecError:
                    self.skipped_lines += line != b"\n"
                    continue
                if head.event in _EVENTS:
                    yield head, line
                elif head.schema > SCHEMA:
                    self.newer_lines += 1
                else:
                    self.skipped_lines += 1

    def decode(self, line: bytes) -> Record | None:
        """The record of a line; None (and counted) where it is none."""
        try:
            return _RECORD.decode(line)
        except (msgspec.MsgspecError, ValueError):
            record = _as_far_as_known(line)
            self.skipped_lines += record is None
            return record

    def records(self) -> list[Record]:
        """All readable records, oldest first."""
        return [record for _, line in self.heads() if (record := self.decode(line)) is not None]

    def find(self, record_id: str) -> Record | None:
        """The record of that id, or None."""
        lines = (line for head, line in self.heads() if head.id == record_id)
        return next(filter(None, map(self.decode, lines)), None)

    def latest(self, fingerprint: Fingerprint, knobs: Knobs) -> Record | None:
        """The newest word on this configuration at this fingerprint, or None."""
        same, knobs_of = _same(fingerprint), _KnobsReader()
        newest: bytes | None = None
        for head, line in self.heads():
            if knobs_of(head) == knobs and same(head):
                newest = line
        return None if newest is None else self.decode(newest)

    def usable(self, fingerprint: Fingerprint, limit: int = NEWEST_CONFIGURATIONS) -> list[Record]:
        """Records of working configurations at this fingerprint, the best to start with first.

        Of each configuration only the newest word counts: one that failed later is gone, unless other
        processes held more memory at that failure than when it worked.
        """
        same, knobs_of = _same(fingerprint), _KnobsReader()
        last: dict[Knobs, tuple[Head, bytes]] = {}
        for head, line in self.heads():
            knobs = knobs_of(head)
            if knobs is None or not same(head):
                continue
            known = last.get(knobs)
            if head.worked or known is None or head.others_bytes <= known[0].others_bytes:
                last[knobs] = head, line
        working = sorted((pair for pair in last.values() if pair[0].worked), key=lambda pair: pair[0].time)
        return [record for _, line in working[: -limit - 1 : -1] if (record := self.decode(line)) is not None]

    def refuted(self, fingerprint: Fingerprint, others_bytes: int) -> list[Knobs]:
        """Configurations whose newest word is a failure while others held no more memory than now."""
        same, knobs_of = _same(fingerprint), _KnobsReader()
        refuted: dict[Knobs, bool] = {}
        for head, _ in self.heads():
            knobs = knobs_of(head)
            if knobs is not None and same(head) and (head.worked or head.others_bytes <= others_bytes):
                refuted[knobs] = not head.worked
        return [knobs for knobs, is_refuted in refuted.items() if is_refuted]


def journal_of(directory: Path, card: CardInfo) -> Journal:
    """The journal of one card under a state directory."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{card.kind}-{card.name}").strip("-").lower()
    return Journal(directory / f"{PREFIX}{slug}-{card.total_bytes}.jsonl")


def journals(directory: Path) -> list[Journal]:
    """The journals of all cards under a state directory."""
    return [Journal(path) for path in sorted(directory.glob(f"{PREFIX}*.jsonl"))]


def newest(
    directory: Path, accept: Callable[[Head], bool], limit: int | None = None
) -> tuple[list[tuple[Journal, Record]], int]:
    """The newest records of all cards that `accept` takes, newest first; and how many lines were unreadable.

    `accept` sees every head, oldest first within a card.
    """
    found: list[tuple[str, Journal, bytes]] = []
    opened = journals(directory)
    for journal in opened:
        accepted = ((head.time, journal, line) for head, line in journal.heads() if accept(head))
        found += deque(accepted, maxlen=limit)
    newest_first = sorted(found, key=lambda item: item[0])[::-1]  # of equal times the later line
    pairs = ((journal, journal.decode(line)) for _, journal, line in newest_first[:limit])
    records = [(journal, record) for journal, record in pairs if record is not None]
    return records, sum(journal.skipped_lines + journal.newer_lines for journal in opened)


def read_all(directory: Path) -> tuple[list[Record], int]:
    """Every record of every card, oldest first, and how many lines were unreadable."""
    records: list[Record] = []
    skipped = 0
    for journal in journals(directory):
        records += journal.records()
        skipped += journal.skipped_lines + journal.newer_lines
    return sorted(records, key=lambda r: r.time), skipped


_RECORD = msgspec.json.Decoder(Record)


class _KnobsReader:
    """Decodes the knobs of a line, each distinct text once: a journal repeats a few of them over and over."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(Knobs)
        self._known: dict[bytes, Knobs | None] = {}

    def __call__(self, head: Head) -> Knobs | None:
        """None where the text is of a newer schema and not understood."""
        text = bytes(head.knobs)
        if text not in self._known:
            try:
                self._known[text] = self._decoder.decode(text)
            except (msgspec.MsgspecError, ValueError):
                self._known[text] = None
        return self._known[text]


def _same(fingerprint: Fingerprint) -> Callable[[Head], bool]:
    """A test for heads of this fingerprint; each distinct text is looked at once."""
    answers: dict[tuple[bytes, bytes, bytes], bool] = {}

    def same(head: Head) -> bool:
        texts = bytes(head.card), bytes(head.backend), bytes(head.model)
        if texts not in answers:
            answers[texts] = _matches(fingerprint, *texts)
        return answers[texts]

    return same


def _matches(fingerprint: Fingerprint, card: bytes, backend: bytes, model: bytes) -> bool:
    try:
        return not fingerprint.changes(
            msgspec.json.decode(card, type=CardRecord),
            msgspec.json.decode(backend, type=BackendRecord),
            msgspec.json.decode(model, type=ModelRecord),
        )
    except msgspec.MsgspecError:
        return False


def _as_far_as_known(line: bytes) -> Record | None:
    """A record of a newer schema without the fields that are not understood; None where it is no record."""
    try:
        raw = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        if msgspec.json.decode(raw["schema"], type=int) <= SCHEMA:
            return None
        values = {}
        for field in msgspec.structs.fields(Record):
            try:
                values[field.name] = msgspec.json.decode(raw[field.encode_name], type=field.type)
            except (KeyError, msgspec.MsgspecError):
                if field.required:
                    return None
        return Record(**values)
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


def _heal(descriptor: int) -> int:
    """Cut off what a writer left that died in the middle of its line; return the file's size.

    SIGKILL ends a write between two pages, so half lines happen. Nobody was told that such a line is written.
    """
    size = os.fstat(descriptor).st_size
    end = _last_line_end(descriptor, size)
    if end < size:
        try:
            _RECORD.decode(os.pread(descriptor, size - end, end))
            return size + os.pwrite(descriptor, b"\n", size)  # whole but for its end
        except (msgspec.MsgspecError, ValueError):
            os.ftruncate(descriptor, end)
    return end


def _last_line_end(descriptor: int, size: int) -> int:
    """Where the last whole line ends."""
    start = size
    while start > 0:
        length = min(start, _READ_BYTES)
        start -= length
        newline = os.pread(descriptor, length, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
