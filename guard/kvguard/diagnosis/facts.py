"""Short questions that a diagnosis asks of evidence."""

from __future__ import annotations

from kvguard.diagnosis.scan import Scan
from kvguard.domain import MIB, Evidence

_SPILL_BYTES = 512 * MIB
_SLOW_RATIO = 0.5
_FULL_RATIO = 0.97


def oom_kills(evidence: Evidence) -> int:
    return max(evidence.oom_kills or 0, evidence.exit.oom_kills if evidence.exit else 0)


def counted_none(evidence: Evidence) -> bool:
    return evidence.oom_kills == 0


def signal_of(evidence: Evidence) -> int | None:
    """The signal that ended the process; a shell tells it as 128 + n."""
    if evidence.exit is None:
        return None
    if evidence.exit.signal is not None:
        return evidence.exit.signal
    code = evidence.exit.code or 0
    return code - 128 if 128 < code < 160 else None


def failed_exit(evidence: Evidence) -> bool:
    return evidence.exit is not None and evidence.exit.code != 0


def runs(evidence: Evidence) -> bool:
    return evidence.exit is None


def http_failed(evidence: Evidence) -> bool:
    return evidence.http_status is not None and evidence.http_status >= 400


def answered_well(evidence: Evidence) -> bool:
    return evidence.canary_ok is True or (evidence.http_status is not None and evidence.http_status < 400)


def runs_well(evidence: Evidence) -> bool:
    return (
        runs(evidence)
        and evidence.healthy is True
        and not http_failed(evidence)
        and evidence.canary_ok is not False
    )


def usual_speed(evidence: Evidence, scan: Scan) -> float | None:
    return evidence.baseline_tokens_per_s or (scan.speeds[0] if scan.speeds else None)


def speed_now(evidence: Evidence, scan: Scan) -> float | None:
    return evidence.tokens_per_s or (scan.speeds[-1] if scan.speeds else None)


def is_slow(evidence: Evidence, scan: Scan) -> bool:
    usual, now = usual_speed(evidence, scan), speed_now(evidence, scan)
    return usual is not None and now is not None and now < _SLOW_RATIO * usual


def spills(evidence: Evidence, scan: Scan) -> bool:
    """Host memory stands in for the card's: much of it, or some while the speed has fallen."""
    shared = evidence.shared_used_bytes or 0
    full = is_full(evidence)
    return shared >= _SPILL_BYTES or (is_slow(evidence, scan) and (full or shared >= _SPILL_BYTES // 4))


def is_full(evidence: Evidence) -> bool:
    total, used = evidence.card_total_bytes, evidence.card_used_bytes
    return total is not None and used is not None and used >= _FULL_RATIO * total
