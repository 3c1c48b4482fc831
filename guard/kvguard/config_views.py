"""Journal records as a person or a spreadsheet reads them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvguard.domain import Entry
from kvguard.journal import Record, to_builtins
from kvguard.settings import format_size

Changes = tuple[str, ...] | None
"""What has changed since a record: nothing (verified now), these things, or None where nobody knows."""

NARROW = 120
"""Columns under which the table is stacked."""

Shown = tuple[Record, Changes]


def now_in_words(changes: Changes) -> str:
    if changes is None:
        return "unknown: not looked at"
    return "no: " + "; ".join(changes) if changes else "yes"


def table_of(shown: Sequence[Shown], *, width: int) -> Table:
    """Seven columns, or three where the terminal is narrow; `shown` is not empty."""
    headings = [
        "when, id",
        "event, why",
        "model, card",
        "knobs",
        "predicted / measured",
        "peak",
        "verified now",
    ]
    rows = [_cells(*pair) for pair in shown]
    if width < NARROW:
        headings = ["when, what, why", "model, card, knobs", "memory, verified now"]
        rows = [["\n".join(row[:2]), "\n".join(row[2:4]), "\n".join(row[4:])] for row in rows]
    table = Table(show_lines=True, highlight=False)
    table.add_column(headings[0], overflow="fold", min_width=len(shown[0][0].id))
    for heading in headings[1:]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(record: Record, changes: Changes) -> list[str]:
    row = dict(_row(record, changes))
    color = "green" if record.worked else "red"
    return [
        f"{row['time']}\n{escape(record.id)}",
        f"[{color}]{row['event'].removeprefix('config_')}[/] {escape(row['why'])}".strip(),
        escape(f"{row['model']}\n{row['quant']}\n{row['card']}"),
        f"batch {row['batch']}\nctx {row['ctx']}\npool {row['pool']}\nkv {escape(row['kv type'])}",
        "\n".join(f"{name} {row[name]}" for name in ("weights", "kv", "overhead")),
        f"peak {row['peak']}",
        escape(row["verified now"]),
    ]


def details_of(record: Record, changes: Changes) -> list[Table]:
    """One record in full: its fields, its three accounts predicted and measured, its phases."""
    fields = Table(show_header=False, box=None, pad_edge=False)
    apart = ("command", "memory.", "predicted.", "measured.")
    for name, value in flat(to_builtins(record)):
        if value != "" and not name.startswith(apart):
            fields.add_row(escape(name), escape(human(name, value)))
    fields.add_row("verified now", escape(now_in_words(changes)))
    accounts = Table("account", "part", "predicted", "measured", "basis")
    for account in ("weights", "kv", "overhead"):
        predicted, measured = _account(record.predicted, account), _account(record.measured, account)
        accounts.add_row(f"[bold]{account}[/]", "", f"[bold]{predicted}[/]", f"[bold]{measured}[/]", "")
        for entries, column in ((record.predicted, 2), (record.measured, 3)):
            for entry in (e for e in entries if e.account == account):
                cells = ["", escape(entry.name), "", "", entry.basis.value + _where(entry)]
                cells[column] = format_size(entry.size_bytes)
                accounts.add_row(*cells)
    phases = Table("phase", "peak", "last", "source", "interval", "samples")
    for peak in record.memory:
        phases.add_row(
            peak.phase.value,
            format_size(peak.peak_bytes),
            format_size(peak.last_bytes),
            escape(peak.source),
            f"{peak.interval_s:g} s",
            str(peak.samples),
        )
    return [fields, accounts, phases]


def _where(entry: Entry) -> str:
    return "" if entry.on_card else ", in host memory"


def _row(record: Record, changes: Changes) -> Iterator[tuple[str, str]]:
    """One record as a person reads it; the columns of the Markdown table too."""
    knobs, quant = record.knobs, record.knobs.quant
    layers = "" if knobs.gpu_layers == -1 else f", {knobs.gpu_layers} layers on the card"
    yield "time", _local(record.time)
    yield "id", record.id
    yield "event", record.event
    yield "model", record.model.name
    yield "quant", quant.label or Path(quant.source).name
    yield "card", f"{record.card.kind} {record.card.name} {format_size(record.card.total_bytes)}"
    yield "batch", str(knobs.batch)
    yield "ctx", f"{knobs.ctx_tokens:,}"
    yield "pool", f"{knobs.pool_tokens:,} {knobs.pool_kind.value}{layers}"
    yield "kv type", knobs.kv_type
    for account in ("weights", "kv", "overhead"):
        yield account, f"{_account(record.predicted, account)} / {_account(record.measured, account)}"
    yield "peak", format_size(peak_bytes) if (peak_bytes := _peak_bytes(record)) else "-"
    yield "why", _why(record)
    yield "verified now", now_in_words(changes)


def _account(entries: tuple[Entry, ...], account: str) -> str:
    if not entries:
        return "-"
    return format_size(sum(e.size_bytes for e in entries if e.account == account and e.on_card))


def _peak_bytes(record: Record) -> int:
    return max((peak.peak_bytes for peak in record.memory), default=0)


def _why(record: Record) -> str:
    why, failure = record.why, record.failure
    words = [] if why is None else [why.kind.replace("_", " ")]
    if why is not None and why.from_id:
        words.append(f"from {why.from_id}" + (f" by {why.rung.value}" if why.rung else ""))
    if failure is not None:
        words.append(f"{', '.join(failure.causes)} at {failure.stage.value} {failure.exit}".strip())
    return "; ".join(words)


def _local(time: str) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def write_markdown(shown: Sequence[Shown]) -> None:
    rows = [dict(_row(*pair)) for pair in shown]
    if rows:
        print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(value.replace("|", "\\|") for value in row.values()) + " |")


def write_csv(shown: Sequence[Shown]) -> None:
    """Bytes and tokens as plain numbers, for a spreadsheet."""
    rows = [_numbers(*pair) for pair in shown]
    if rows:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _numbers(record: Record, changes: Changes) -> dict[str, object]:
    knobs = record.knobs
    words = dict(_row(record, changes))
    accounts = {
        f"{side}_{account}_bytes": sum(e.size_bytes for e in entries if e.account == account and e.on_card)
        if entries
        else ""
        for side, entries in (("predicted", record.predicted), ("measured", record.measured))
        for account in ("weights", "kv", "overhead")
    }
    return {
        "time": record.time,
        "id": record.id,
        "event": record.event,
        "model": record.model.name,
        "quant": words["quant"],
        "card_kind": record.card.kind,
        "card": record.card.name,
        "card_bytes": record.card.total_bytes,
        "backend": record.backend.name,
        "backend_version": record.backend.version,
        "batch": knobs.batch,
        "ctx_tokens": knobs.ctx_tokens,
        "pool_tokens": knobs.pool_tokens,
        "kv_type": knobs.kv_type,
        "gpu_layers": knobs.gpu_layers,
        **accounts,
        "peak_bytes": _peak_bytes(record) or "",
        "why": words["why"],
        "verified_now": words["verified now"],
    }


def flat(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """A record's fields with dotted names, e.g. `memory.0.peak_bytes`; empty parts are left out."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from flat(part, f"{name}.{number}")
    elif value is not None:
        yield name, value


def human(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{format_size(value)} ({value:,})" if abs(value) >= 1024 else f"{value} B"
    return str(value)
