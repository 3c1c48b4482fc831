"""Turns what a backend life has shown into journal records, each of which is an event of the same name."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.domain import Accounts, Entry, Evidence, Failure, Knobs
from kvguard.events import Events
from kvguard.journal import (
    FailureRecord,
    Fingerprint,
    Journal,
    Record,
    RequestRecord,
    WhyRecord,
    new_id,
    now_iso,
    peaks_by_phase,
)
from kvguard.life import BackendLife, Confirmation
from kvguard.ports import Backend

STARTS_TO_CONFIRM = 3
"""Consecutive successful starts after which a configuration counts as confirmed."""


class Recorder:
    """Writes one card's and one model's records. Blocking: call it through `asyncio.to_thread`."""

    def __init__(
        self,
        *,
        journal: Journal,
        fingerprint: Fingerprint,
        backend: Backend,
        events: Events,
        headroom_bytes: int,
        libraries: dict[str, str | None],
        asked: str = "",
    ) -> None:
        self._journal = journal
        self._fingerprint = fingerprint
        self._backend = backend
        self._events = events
        self._headroom_bytes = headroom_bytes
        self._libraries = libraries
        self._asked = asked

    def worked(
        self,
        life: BackendLife,
        confirmation: Confirmation,
        *,
        predicted: Accounts | None,
        why: WhyRecord,
        full_context: bool = False,
        notes: Sequence[str] = (),
    ) -> Record:
        """Record a start that was stable and answered; the third in a row confirms the configuration."""
        consecutive = self._consecutive(life.knobs) + 1
        load_lines = life.load_lines()
        record = self._record(
            life,
            event="config_confirmed" if consecutive >= STARTS_TO_CONFIRM else "config_provisional",
            predicted=predicted,
            measured=self._backend.measured(load_lines),
            why=why,
            notes=notes,
            loaded=True,
            memory=confirmation.peaks,
            consecutive=consecutive,
            start_s=confirmation.start_s,
            decode_tokens_per_s=confirmation.decode_tokens_per_s,
            verified_prompt_tokens=confirmation.prompt_tokens,
            verified_new_tokens=confirmation.new_tokens,
            verified_concurrency=1,
            requests=tuple(
                RequestRecord(
                    prompt_tokens=p.prompt_tokens,
                    max_new_tokens=p.max_new_tokens,
                    new_tokens=p.new_tokens,
                    seconds=round(p.seconds, 3),
                )
                for p in confirmation.probes
            ),
        )
        return self._write(record, load_lines)

    def failed(
        self,
        life: BackendLife,
        failure: Failure,
        evidence: Evidence,
        *,
        predicted: Accounts | None,
        why: WhyRecord,
        was_ready: bool,
    ) -> Record:
        """Record a configuration that failed, with its diagnosis."""
        record = self._record(
            life,
            event="config_failed",
            predicted=predicted,
            measured=self._backend.measured(life.load_lines() or evidence.log_lines),
            why=why,
            loaded=was_ready,
            memory=evidence.peaks,
            failure=FailureRecord(
                stage=failure.stage,
                causes=tuple(cause.value for cause in failure.causes),
                confidence=round(failure.confidence, 3),
                evidence=failure.evidence,
                exit=str(evidence.exit or ""),
            ),
        )
        return self._write(record, evidence.log_lines[:400])

    def usable(self) -> list[Record]:
        return self._journal.usable(self._fingerprint)

    def refuted(self, others_bytes: int) -> list[Knobs]:
        return self._journal.refuted(self._fingerprint, others_bytes)

    def find(self, record_id: str) -> Record | None:
        return self._journal.find(record_id)

    def records(self) -> list[Record]:
        return self._journal.records()

    def _consecutive(self, knobs: Knobs) -> int:
        latest = self._journal.latest(self._fingerprint, knobs)
        return latest.consecutive if latest is not None and latest.worked else 0

    def _record(
        self,
        life: BackendLife,
        *,
        predicted: Accounts | None,
        measured: Accounts | None,
        **fields: object,
    ) -> Record:
        return Record(
            id=new_id(),
            time=now_iso(),
            card=self._fingerprint.card,
            backend=self._fingerprint.backend,
            model=self._fingerprint.model,
            knobs=life.knobs,
            command=life.launch.shown() if life.launch is not None else (),
            predicted=_entries(predicted),
            measured=_entries(measured),
            others_bytes=life.others_bytes,
            headroom_bytes=self._headroom_bytes,
            libraries=self._libraries,
            asked=self._asked,
            **fields,  # type: ignore[arg-type]
        )

    def _write(self, record: Record, load_lines: Sequence[str]) -> Record:
        self._journal.append(record, load_lines)
        failure = record.failure
        self._events.publish(
            record.event,
            level="info" if record.worked else "warning",
            config_id=record.id,
            batch=record.knobs.batch,
            ctx_tokens=record.knobs.ctx_tokens,
            pool_tokens=record.knobs.pool_tokens,
            quant=record.knobs.quant.label,
            gpu_layers=record.knobs.gpu_layers,
            peaks_bytes=peaks_by_phase(record.memory),
            consecutive=record.consecutive,
            **(
                {"stage": failure.stage.value, "causes": failure.causes, "exit": failure.exit}
                if failure
                else {}
            ),
        )
        return record


def _entries(accounts: Accounts | None) -> tuple[Entry, ...]:
    return accounts.entries if accounts is not None else ()
