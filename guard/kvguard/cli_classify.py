"""`kvguard classify`: what a log of a failing engine says, also for people who do not run kvguard."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from kvguard.case import evidence_of, exit_of
from kvguard.diagnosis import Scan, diagnose
from kvguard.diagnosis.normalise import MAX_LINE_CHARS
from kvguard.domain import Cause, ExitStatus, Failure
from kvguard.remedies import route_of

_YES, _NO = 0, 1


def classify(
    log: Annotated[str, typer.Argument(metavar="LOG", help="log file of the engine; - reads standard input")],
    exit_code: Annotated[
        str | None, typer.Option("--exit", metavar="CODE", help="exit code, decimal or 0x...")
    ] = None,
    signal: Annotated[int | None, typer.Option("--signal", min=1, help="signal that ended it")] = None,
    running: Annotated[bool, typer.Option("--running", help="it runs still")] = False,
    context: Annotated[
        Path | None,
        typer.Option("--context", metavar="FILE.json", help="signals: oom_kill, health, http_status, ..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the verdict as JSON")] = False,
) -> None:
    """Say at which stage an engine failed, why, which lines tell it, and what to do.

    Exits with 0 when there is a verdict, 1 when the cause stays unknown, 2 when called wrongly.
    """
    signals = _context(context)
    exit_status = _exit_status(exit_code, signal, running, signals)
    try:
        evidence = evidence_of(signals, exit_status=exit_status)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--context") from error
    failure = diagnose(evidence, _scan(log))
    typer.echo(json.dumps(_as_record(failure), ensure_ascii=False) if as_json else _as_text(failure))
    raise typer.Exit(_NO if failure.cause is Cause.UNKNOWN else _YES)


def _exit_status(
    exit_code: str | None, signal: int | None, running: bool, signals: dict[str, Any]
) -> ExitStatus | None:
    """Read how it ended. Without any option: from the context, else as a process that failed."""
    if sum((exit_code is not None, signal is not None, running)) > 1:
        raise typer.BadParameter("give one of --exit, --signal and --running")
    if running:
        return None
    if signal is not None:
        return ExitStatus(signal=signal)
    said = f"exit {exit_code}" if exit_code is not None else str(signals.get("exit") or "exit 1")
    try:
        return exit_of(said)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--exit") from error


def _context(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint="--context") from error
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}", param_hint="--context") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{path} must hold a JSON object", param_hint="--context")
    return value


def _scan(log: str) -> Scan:
    """Read a log of any length in bounded memory."""
    if log == "-":
        return Scan().feed_all(_lines(sys.stdin.buffer))
    try:
        with open(log, "rb") as file:
            return Scan().feed_all(_lines(file))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {log}: {error.strerror}", param_hint="LOG") from error


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Give lines; of one that is longer than any message, its beginning."""
    fresh = True
    while part := file.readline(4 * MAX_LINE_CHARS):
        if fresh:
            yield part.decode("utf-8", errors="replace")
        fresh = part.endswith(b"\n")


def _as_record(failure: Failure) -> dict[str, Any]:
    route = route_of(failure)
    return {
        "stage": failure.stage,
        "cause": failure.cause,
        "causes": list(failure.causes),
        "confidence": round(failure.confidence, 2),
        "memory": failure.is_memory,
        "evidence": list(failure.evidence),
        "rungs": list(route.rungs),
        "remedy": failure.remedy,
    }


def _as_text(failure: Failure) -> str:
    others = f" (or {', '.join(failure.causes[1:])})" if len(failure.causes) > 1 else ""
    route = route_of(failure)
    lines = [
        f"stage       {failure.stage}",
        f"cause       {failure.cause}{others}",
        f"confidence  {failure.confidence:.0%}",
        "because",
        *(f"  {line}" for line in failure.evidence or ("nothing in the log or the signals tells a cause",)),
        f"what to do  {failure.remedy}",
    ]
    if route.rungs:
        lines.append(f"would help  {', '.join(route.rungs)}")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(classify)
