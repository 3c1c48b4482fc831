"""The structured log of confirmed and failed configurations: written once, read back by a later start.

JSON lines, one file a card, appended under a file lock and fsynced; a torn last line is healed by the next
append and skipped by readers. The engine's own load lines are in a side file a record, so that reading
100,000 records stays fast.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvguard.domain import CardInfo, Entry, Knobs, PhasePeak, Rung, Stage

SCHEMA = 1
EventName = Literal["config_provisional", "config_confirmed", "config_failed"]


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored, so that a newer schema is read as far as it is known."""


class CardRecord(_Struct):
    kind: str
    name: str
    total_bytes: int
    driver: str = ""


class BackendRecord(_Struct):
    name: str
    version: str = ""


class FileRecord(_Struct):
    name: str
    size_bytes: int


class ModelRecord(_Struct):
    name: str
    architecture: str = ""
    parameters: int = 0
    files: tuple[FileRecord, ...] = ()
    header_hash: str = ""


class RequestRecord(_Struct):
    """Sizes of one request that the configuration served; never its text."""

    prompt_tokens: int
    max_new_tokens: int
    new_tokens: int
    seconds: float


class WhyRecord(_Struct):
    """Why this configuration was tried."""

    kind: Literal["self_tune", "degraded", "verify", "climb"]
    from_id: str = ""
    rung: Rung | None = None


class FailureRecord(_Struct):
    stage: Stage
    causes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...] = ()
    exit: str = ""
    tokens_produced: int | None = None
    reproduced: int = 1
    tries: int = 1


class Record(_Struct):
    """One journal line. Times are UTC ISO 8601; sizes are bytes."""

    id: str
    time: str
    event: EventName
    card: CardRecord
    backend: BackendRecord
    model: ModelRecord
    knobs: Knobs
    schema: int = SCHEMA
    command: tuple[str, ...] = ()
    memory: tuple[PhasePeak, ...] = ()
    predicted: tuple[Entry, ...] = ()
    measured: tuple[Entry, ...] = ()
    others_bytes: int = 0
    headroom_bytes: int = 0
    verified_prompt_tokens: int = 0
    verified_new_tokens: int = 0
    verified_concurrency: int = 0
    consecutive: int = 0
    loaded: bool = False
    start_s: float | None = None
    decode_tokens_per_s: float | None = None
    requests: tuple[RequestRecord, ...] = ()
    libraries: dict[str, str | None] = {}
    why: WhyRecord | None = None
    failure: FailureRecord | None = None
    notes: tuple[str, ...] = ()

    @property
    def worked(self) -> bool:
        return self.event != "config_failed"


class Fingerprint(_Struct):
    """What must be equal for a record to speak of the present: card, driver, engine, model."""

    card: CardRecord
    backend: BackendRecord
    model: ModelRecord

    def changes_from(self, record: Record) -> tuple[str, ...]:
        """Name what differs between the record and now; empty: the record is verified."""
        pairs = (
            ("card", record.card.name, self.card.name),
            ("card kind", record.card.kind, self.card.kind),
            ("card memory", record.card.total_bytes, self.card.total_bytes),
            ("driver", record.card.driver, self.card.driver),
            ("backend", record.backend.name, self.backend.name),
            ("backend version", record.backend.version, self.backend.version),
            ("model", record.model.name, self.model.name),
        )
        return tuple(f"{what}: {was} -> {now}" for what, was, now in pairs if was != now)


def card_record(info: CardInfo) -> CardRecord:
    return CardRecord(kind=info.kind, name=info.name, total_bytes=info.total_bytes, driver=info.driver)


def new_id() -> str:
    """A short id that sorts by time."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Journal:
    """One journal file. Safe for several processes; every method reads what is on disk now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.load_lines_dir = path.parent / "load"
        self.skipped_lines = 0
        self._decoder = msgspec.json.Decoder(Record)

    def append(self, record: Record, load_lines: Sequence[str] = ()) -> Record:
        """Write one record durably. Raises OSError when the disk refuses."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if load_lines:
            self.load_lines_dir.mkdir(exist_ok=True, mode=0o700)
            (self.load_lines_dir / f"{record.id}.log").write_text("\n".join(load_lines) + "\n")
        line = msgspec.json.encode(record) + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer died in the middle of its line
            _write_all(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return record

    def records(self) -> list[Record]:
        """All readable records, oldest first; `skipped_lines` then counts the others."""
        self.skipped_lines = 0
        return list(self._read())

    def _read(self) -> Iterator[Record]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.split(b"\n"):
            if not line:
                continue
            try:
                yield self._decoder.decode(line)
            except (msgspec.MsgspecError, ValueError):
                self.skipped_lines += 1

    def load_lines(self, record_id: str) -> list[str]:
        try:
            return (self.load_lines_dir / f"{Path(record_id).name}.log").read_text().splitlines()
        except FileNotFoundError:
            return []

    def usable(self, fingerprint: Fingerprint) -> list[Record]:
        """Records of working configurations at this fingerprint, the best to start with first.

        Of each configuration only the newest word counts: one that failed later is gone, unless other
        processes held more memory at that failure than when it worked.
        """
        latest: dict[Knobs, Record] = {}
        for record in self.records():
            if fingerprint.changes_from(record):
                continue
            known = latest.get(record.knobs)
            if record.worked or known is None or record.others_bytes <= known.others_bytes:
                latest[record.knobs] = record
        working = [record for record in latest.values() if record.worked]
        return sorted(working, key=lambda r: r.time, reverse=True)

    def refuted(self, fingerprint: Fingerprint, others_bytes: int) -> list[Knobs]:
        """Configurations that failed here while others held no more memory than now."""
        refuted: dict[Knobs, bool] = {}
        for record in self.records():
            if fingerprint.changes_from(record):
                continue
            if record.worked:
                refuted[record.knobs] = False
            elif record.failure is not None and record.others_bytes <= others_bytes:
                refuted[record.knobs] = True
        return [knobs for knobs, is_refuted in refuted.items() if is_refuted]


def journal_of(directory: Path, card: CardInfo) -> Journal:
    """The journal of one card under a state directory."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{card.kind}-{card.name}").strip("-").lower()
    return Journal(directory / f"{slug}-{card.total_bytes}.jsonl")


def read_all(directory: Path) -> tuple[list[Record], int]:
    """Every record of every card under a state directory, oldest first, and how many lines were unreadable."""
    records: list[Record] = []
    skipped = 0
    for path in sorted(directory.glob("*.jsonl")):
        journal = Journal(path)
        records += journal.records()
        skipped += journal.skipped_lines
    return sorted(records, key=lambda r: r.time), skipped


def to_builtins(record: Record) -> dict[str, Any]:
    """Plain types, for JSON output and structlog."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def peaks_by_phase(peaks: Iterable[PhasePeak]) -> dict[str, int]:
    return {peak.phase.value: peak.peak_bytes for peak in peaks}


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
