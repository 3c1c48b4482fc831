"""Which error of a log counts, and which account did not fit where it only says that memory is out."""

from __future__ import annotations

from kvguard.diagnosis.facts import http_failed, runs, runs_well
from kvguard.diagnosis.rule import Weight
from kvguard.diagnosis.scan import Finding, Scan
from kvguard.diagnosis.stage import stage_by_context, stage_of_finding
from kvguard.domain import Cause, Evidence, Stage

_BURST_LINES = 80
_CALLER_LINES = 6


def first_error(scan: Scan, evidence: Evidence) -> Finding | None:
    """Give the first error of the log that stands: of the last life, or of the one before it."""
    for life in (scan.findings, scan.earlier if not runs_well(evidence) else []):
        standing = [f for f in life if f.weight >= Weight.GENERIC and not _overcome(f, scan, evidence)]
        if standing:
            return standing[0]
    return None


def _overcome(finding: Finding, scan: Scan, evidence: Evidence) -> bool:
    if finding.swallowed:
        return False
    if finding.recovered:
        return True
    served_after = scan.answered > finding.number
    return (
        finding.memory
        and served_after
        and runs(evidence)
        and not http_failed(evidence)
        and evidence.healthy is not False
    )


def named_near(finding: Finding, scan: Scan) -> Finding | None:
    """Find the line that names the account, near one that says only that memory is out."""
    if finding.weight is not Weight.GENERIC:
        return None
    near = [
        other
        for other in scan.findings
        if other.memory
        and other.weight is Weight.SPECIFIC
        and 0 <= other.number - finding.number <= _BURST_LINES
    ]
    # The innermost function speaks first; its caller, a few lines on, says what the buffer was for.
    return [other for other in near if other.number - near[0].number <= _CALLER_LINES][-1] if near else None


def causes_of(
    finding: Finding, named: Finding | None, evidence: Evidence, scan: Scan
) -> tuple[tuple[Cause, ...], float]:
    """Name the account that did not fit: from a line that names it, else from the stage."""
    rule = finding.rule
    if named is not None:
        return unique((*_refined(named, evidence), *rule.also)), named.rule.sure
    if rule.weight is not Weight.GENERIC:
        return _refined(finding, evidence), rule.sure
    stage = stage_of_finding(finding, scan) or stage_by_context(evidence, scan)
    cause = {Stage.LOAD: Cause.WEIGHTS_DONT_FIT, Stage.WARMUP: Cause.ACTIVATION_PEAK}.get(
        stage or Stage.INFERENCE, Cause.ACTIVATION_PEAK
    )
    if "kv" in finding.frames:
        cause = Cause.KV_DONT_FIT
    return unique((cause, *rule.also)), 0.88 if stage else 0.6


def _refined(finding: Finding, evidence: Evidence) -> tuple[Cause, ...]:
    """A full pool with one request in it is a request that is too long; with several, a pool too small."""
    cause = finding.rule.cause
    if "context size has been exceeded" in finding.text.lower() and evidence.requests_in_flight == 1:
        return (Cause.REQUEST_TOO_LONG, cause)
    return unique((cause, *finding.rule.also))


def unique(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    return tuple(dict.fromkeys(causes))
