"""What the journal writes of one configuration, and when that still speaks of the present.

Unknown fields are ignored when read, so that a newer schema is read as far as it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from kvguard.domain import CardInfo, Entry, Knobs, PhasePeak, Rung, Stage

SCHEMA = 1
EventName = Literal["config_provisional", "config_confirmed", "config_failed"]


class CardRecord(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    name: str
    total_bytes: int
    driver: str = ""


class BackendRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str = ""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size_bytes: int


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str = ""
    parameters: int = 0
    files: tuple[FileRecord, ...] = ()
    header_hash: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one request that the configuration served; never its text."""

    prompt_tokens: int
    max_new_tokens: int
    new_tokens: int
    seconds: float


class WhyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why this configuration was tried."""

    kind: Literal["self_tune", "degraded", "verify", "climb"]
    from_id: str = ""
    rung: Rung | None = None


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    causes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...] = ()
    exit: str = ""
    tokens_produced: int | None = None
    reproduced: int = 1
    tries: int = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
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
    asked: str = ""  # what the user had fixed, so that a start without it chooses anew
    notes: tuple[str, ...] = ()

    @property
    def worked(self) -> bool:
        return self.event != "config_failed"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for a record to speak of the present: card, driver, engine, model."""

    card: CardRecord
    backend: BackendRecord
    model: ModelRecord

    def changes_from(self, record: Record) -> tuple[str, ...]:
        """Name what differs between the record and now; empty: the record is verified."""
        return self.changes(record.card, record.backend, record.model)

    def changes(self, card: CardRecord, backend: BackendRecord, model: ModelRecord) -> tuple[str, ...]:
        pairs = [
            ("card", card.name, self.card.name),
            ("card kind", card.kind, self.card.kind),
            ("card memory", card.total_bytes, self.card.total_bytes),
            ("driver", card.driver, self.card.driver),
            ("backend", backend.name, self.backend.name),
            ("backend version", backend.version, self.backend.version),
            ("model", model.name, self.model.name),
        ]
        if model.header_hash and self.model.header_hash:
            pairs.append(("model file", model.header_hash[:12], self.model.header_hash[:12]))
        return tuple(f"{what}: {was} -> {now}" for what, was, now in pairs if was != now)


OTHERS_GREW_BYTES = 64 << 20
"""Other processes' memory moves by less than this without meaning anything."""


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What may drift at an equal fingerprint; None and 0 where it is not known."""

    others_bytes: int | None = None
    source: str = ""
    longest_prompt_tokens: int = 0

    def changes_from(self, record: Record) -> tuple[str, ...]:
        """Name what has drifted since the record was written."""
        changes = []
        others_bytes = self.others_bytes
        if others_bytes is not None and others_bytes > record.others_bytes + OTHERS_GREW_BYTES:
            changes.append(f"memory held by others: {record.others_bytes} -> {others_bytes} bytes")
        sources = {peak.source for peak in record.memory}
        if self.source and sources and sources != {self.source}:
            changes.append(f"source of readings: {', '.join(sorted(sources))} -> {self.source}")
        if record.worked and self.longest_prompt_tokens > record.verified_prompt_tokens:
            changes.append(
                f"longer input: {record.verified_prompt_tokens} -> {self.longest_prompt_tokens} prompt tokens"
            )
        return tuple(changes)


def card_record(info: CardInfo) -> CardRecord:
    return CardRecord(kind=info.kind, name=info.name, total_bytes=info.total_bytes, driver=info.driver)


def to_builtins(record: Record) -> dict[str, Any]:
    """Plain types, for JSON output and structlog."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def peaks_by_phase(peaks: Iterable[PhasePeak]) -> dict[str, int]:
    return {peak.phase.value: peak.peak_bytes for peak in peaks}


def schema_text() -> str:
    """The JSON Schema of a record, as `docs/journal.schema.json` holds it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Record)}
    return json.dumps(schema, indent=2) + "\n"
