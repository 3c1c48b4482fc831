"""`kvguard configs`: what the journal knows, newest first; one record in full; two records compared.

Exit codes: 0 something was found, 1 nothing was, 2 usage.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvguard.config_views import Changes, details_of, flat, human, table_of, write_csv, write_markdown
from kvguard.journal import Fingerprint, Head, Journal, Record, newest, to_builtins
from kvguard.settings import StateSection
from kvguard.verified import Verifier

WIDE = 180
"""Columns where the output is no terminal, so that nothing is folded without need."""

app = typer.Typer(
    help="Configurations that worked or failed here, newest first.", invoke_without_command=True
)

here: Callable[[], Sequence[Fingerprint]] = tuple
"""What is on this machine now; the composition root may put a function here that looks."""


class Export(StrEnum):
    MD = "md"
    CSV = "csv"


StateDir = Annotated[
    Path | None, typer.Option(envvar="KVGUARD_STATE_DIR", help="Where the journal is.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@app.callback()
def configs(
    ctx: typer.Context,
    card: Annotated[str, typer.Option(help="Only cards whose name or kind contains this.")] = "",
    model: Annotated[str, typer.Option(help="Only models or quants whose name contains this.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only what failed.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many records; 0: all.")] = 50,
    export: Annotated[Export | None, typer.Option(help="Write Markdown or CSV instead of a table.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """List configurations, newest first, with what of them is still verified now."""
    if ctx.invoked_subcommand is not None:
        return
    if as_json and export:
        fail("--json and --export exclude each other", 2)
    directory = state_dir or default_directory()
    verifier = Verifier(here())
    found, unreadable = newest(directory, _filter(verifier, card, model, failed), limit or None)
    if unreadable:
        _stderr().print(f"{unreadable} lines are damaged or of a newer version, and are left out")
    shown = [(record, verifier.changes(record)) for _, record in found]
    if as_json:
        for pair in shown:
            print(json.dumps(_plain(*pair)))
    elif export is Export.CSV:
        write_csv(shown)
    elif export is Export.MD:
        write_markdown(shown)
    elif shown:
        console = _stdout()
        console.print(table_of(shown, width=console.width))
    if not shown:
        fail(f"no {'failed ' if failed else ''}configuration is recorded in {directory}", 1)


@app.command()
def show(ctx: typer.Context, record_id: str, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Print one record in full, with a command line to paste and the engine's own load lines.

    RECORD_ID may be a part of the id that only one record has.
    """
    verifier = Verifier(here())
    journal, record = _find(_directory(ctx, state_dir), record_id, verifier)
    changes = verifier.changes(record)
    lines = journal.load_lines(record.id)
    if as_json:
        print(json.dumps({**_plain(record, changes), "load_lines": lines}))
        return
    _stdout().print(*details_of(record, changes))
    print(f"\ncommand line:\n{shlex.join(record.command) or '(none)'}")
    print("\nload lines:\n" + ("\n".join(lines) or "(none)"))


@app.command()
def diff(ctx: typer.Context, a: str, b: str, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Print the fields in which two records differ."""
    directory, verifier = _directory(ctx, state_dir), Verifier()
    ours, theirs = (dict(flat(to_builtins(_find(directory, part, verifier)[1]))) for part in (a, b))
    changed = [
        name for name in [*ours, *(n for n in theirs if n not in ours)] if ours.get(name) != theirs.get(name)
    ]
    if as_json:
        print(json.dumps({name: [ours.get(name), theirs.get(name)] for name in changed}))
        return
    table = Table("field", str(ours["id"]), str(theirs["id"]))
    for name in changed:
        table.add_row(name, *(escape(human(name, side.get(name))) for side in (ours, theirs)))
    _stdout().print(table)


# ---------------------------------------------------------------- finding


def default_directory() -> Path:
    return StateSection().directory  # type: ignore[call-arg]


def _directory(ctx: typer.Context, state_dir: Path | None) -> Path:
    """`--state-dir` may stand before or after the subcommand."""
    of_group = ctx.parent.params.get("state_dir") if ctx.parent is not None else None
    return state_dir or of_group or default_directory()


def _find(directory: Path, part: str, verifier: Verifier) -> tuple[Journal, Record]:
    """The one record whose id is `part`, or contains it."""

    def accept(head: Head) -> bool:
        verifier.see(head)
        return part in head.id

    found, _ = newest(directory, accept)
    matching = [pair for pair in found if pair[1].id == part] or found
    if not matching:
        fail(f"no record {part} in {directory}", 1)
    if len(matching) > 1:
        fail(f"{part} is part of {len(found)} ids: {', '.join(r.id for _, r in found[:5])}", 2)
    return matching[0]


def _filter(verifier: Verifier, card: str, model: str, failed: bool) -> Callable[[Head], bool]:
    card, model = card.lower(), model.lower()

    def accept(head: Head) -> bool:
        verifier.see(head)
        return (
            (not failed or not head.worked)
            and (not card or card in _words(bytes(head.card), "kind", "name"))
            and (not model or model in _model_words(head))
        )

    return accept


def _model_words(head: Head) -> str:
    quant = _words(bytes(head.knobs), "quant.label", "quant.source")
    return f"{_words(bytes(head.model), 'name')} {quant}"


@lru_cache(maxsize=4096)
def _words(text: bytes, *names: str) -> str:
    values = dict(flat(msgspec.json.decode(text)))
    return " ".join(str(values.get(name, "")) for name in names).lower()


def _plain(record: Record, changes: Changes) -> dict[str, Any]:
    verified = None if changes is None else not changes
    return {**to_builtins(record), "verified_now": verified, "changes": list(changes or ())}


def _stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE)


def _stderr() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


def fail(message: str, code: int) -> NoReturn:
    _stderr().print(f"[bold red]error:[/] {escape(message)}")
    raise typer.Exit(code)
