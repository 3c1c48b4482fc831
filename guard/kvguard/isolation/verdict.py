"""From the table of runs to a conclusion: the stated rules in their order, and what was not tested. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.isolation.rules import RULES, Finding, Kind
from kvguard.isolation.table import Run, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What an isolation says.

    kinds       memory short, quant incompatible, dependency mismatch: one or several
    cause       the main cause, of the first rule that applies (or of the one that frees more, see `verdict`)
    evidence    numbers of the runs that say so
    findings    all that apply, the main one first
    reproduced  failures among the runs that tried to reproduce it, and how many those were
    """

    kinds: tuple[Kind, ...]
    cause: str
    says: str
    confidence: float
    evidence: tuple[int, ...]
    next_action: str
    needs_bytes: int | None
    findings: tuple[Finding, ...]
    reproduced: int
    tries: int
    not_tested: tuple[str, ...]
    source: str
    interval_s: float


def verdict(table: Table) -> Conclusion:
    """Apply the rules.

    The first that applies names the main cause. Where quantisation and context both cure, the main cause is
    the one whose cure takes less memory: it frees more.
    The confidence falls where the failure did not come each time.
    """
    findings = [found for rule in RULES if (found := rule(table)) is not None]
    findings = _more_freed_first(findings)
    main = findings[0] if findings else _nothing(table)
    tries = table.reproductions
    failed = sum(not run.ok for run in tries)
    share = failed / len(tries) if failed else 1.0
    source, interval_s = table.scale
    mixed = [
        f"run {run.number} is not compared: {run.points.source} every {run.points.interval_s:g} s"
        for run in table.mixed()
    ]
    return Conclusion(
        kinds=tuple(dict.fromkeys(f.kind for f in findings if f.kind != "none")) or (main.kind,),
        cause=main.cause,
        says=main.says,
        confidence=round(main.confidence * (0.5 + 0.5 * share), 2),
        evidence=main.rows,
        next_action=main.action,
        needs_bytes=main.needs_bytes,
        findings=tuple(findings),
        reproduced=failed,
        tries=len(tries),
        not_tested=(*table.untested, *mixed),
        source=source,
        interval_s=interval_s,
    )


def _more_freed_first(findings: list[Finding]) -> list[Finding]:
    """Put the cure that takes less memory before the other, in the place of the first of them."""
    cures = [f for f in findings if f.rule in ("quant", "context")]
    if len(cures) < 2:
        return findings
    place = findings.index(cures[0])
    rest = [f for f in findings if f not in cures]
    rest[place:place] = sorted(cures, key=lambda f: f.needs_bytes or 0)
    return rest


def _nothing(table: Table) -> Finding:
    return Finding(
        rule="none",
        cause="unknown",
        kind="other",
        says="no rule applies to these runs",
        rows=tuple(run.number for run in table.runs if not run.ok),
        confidence=0.2,
        action="look at the raw error of the first run",
    )


def no_climb(run: Run) -> bool:
    """Whether an out-of-memory was reported though the samples never came near what the run needs.

    Then it went up between two samples: sample faster, and run it again.
    """
    if not run.out_of_memory or not run.points.source:
        return False
    before = run.points.loaded_idle_bytes or run.points.baseline_bytes
    climbed = run.points.peak_bytes - before
    expected = max(run.predicted_bytes - before, 0)
    return climbed < 0.25 * expected if expected else climbed <= 0
