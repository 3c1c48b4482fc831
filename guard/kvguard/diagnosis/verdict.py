"""From evidence to a Failure: structured facts first, then the first specific error, then exit codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvguard.diagnosis.facts import (
    answered_well,
    counted_none,
    failed_exit,
    http_failed,
    is_slow,
    oom_kills,
    runs,
    runs_well,
    signal_of,
    speed_now,
    spills,
    usual_speed,
)
from kvguard.diagnosis.first_error import causes_of, first_error, named_near, unique
from kvguard.diagnosis.scan import Finding, Scan
from kvguard.diagnosis.stage import stage_told
from kvguard.domain import MEMORY_CAUSES, MIB, Cause, Evidence, Failure
from kvguard.domain import Phase as MemoryPhase
from kvguard.remedies import advice_for

_SIGKILL, _SIGTERM = 9, 15
_OTHERS_MATTER_BYTES = 512 * MIB

_WINDOWS_DEPENDENCY = frozenset({0xC0000135, 0xC0000139, 0xC000007B, 0xC0000142, 0xC000001D})
_WINDOWS_NO_MEMORY = frozenset({0xC0000017, 0xC000012D})
_WINDOWS_FAULT = frozenset({0xC0000005, 0xC0000409, 0xC0000374})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause with its reasons, before the stage and the advice are added."""

    causes: tuple[Cause, ...]
    confidence: float
    evidence: tuple[str, ...]
    finding: Finding | None = None


def diagnose(evidence: Evidence, scan: Scan | None = None) -> Failure:
    """Say what went wrong, or that nothing did.

    `scan` is a log that was read already (a long one is streamed); `evidence.log_lines` is read after it.
    Pure: looks at nothing but its arguments.
    """
    scan = (scan or Scan()).feed_all(evidence.log_lines)
    scan.feed_all(evidence.http_body.splitlines())
    verdict = _decide(evidence, scan)
    verdict = _with_others(verdict, evidence)
    stage = stage_told(verdict.causes[0], verdict.finding, evidence, scan)
    return Failure(
        stage=stage,
        causes=verdict.causes,
        confidence=verdict.confidence,
        evidence=verdict.evidence,
        remedy=advice_for(verdict.causes),
    )


def _decide(evidence: Evidence, scan: Scan) -> Verdict:
    """Try the numbered cases in order; the first that has an answer gives it."""
    cases: tuple[Callable[[Evidence, Scan], Verdict | None], ...] = (
        _1_kernel_killed_for_memory,
        _2_stopped_on_purpose,
        _3_answers_well,
        _4_first_error,
        _5_spill,
        _6_child_killed,
        _7_exit_alone,
        _8_weak_hint,
        _9_nothing_wrong,
    )
    for case in cases:
        verdict = case(evidence, scan)
        if verdict is not None:
            return verdict
    return Verdict((Cause.UNKNOWN,), 0.2, _effects(scan))


# ---------------------------------------------------------------- the cases


def _1_kernel_killed_for_memory(evidence: Evidence, scan: Scan) -> Verdict | None:
    """The kernel counted a kill in our cgroup, and something of ours died of signal 9, or is gone."""
    if not oom_kills(evidence) or evidence.killed_by_us:
        return None
    killed = [_quote(number, text) for number, text, signal in scan.child_signals if signal == _SIGKILL]
    gone = signal_of(evidence) is not None or killed or _SIGKILL in evidence.child_signals
    if not gone and evidence.healthy is not False and not failed_exit(evidence):
        return None
    counted = f"the kernel counted {oom_kills(evidence)} oom_kill"
    return Verdict((Cause.HOST_RAM_OOM_KILLED,), 0.97, (counted, *killed[:2]))


def _2_stopped_on_purpose(evidence: Evidence, scan: Scan) -> Verdict | None:
    """Someone asked it to stop, and it had not failed before."""
    signal = signal_of(evidence)
    hung = evidence.healthy is False or evidence.canary_ok is False
    told_to_stop = bool(evidence.signal_sender) or (evidence.killed_by_us and not hung)
    by_signal = signal in (_SIGTERM, 2, 1)
    by_itself = scan.stopping and evidence.exit is not None and evidence.exit.code == 0 and not scan.effects
    if not (told_to_stop or by_signal or by_itself) or first_error(scan, evidence) is not None:
        return None
    sender = evidence.signal_sender or ("kvguard" if evidence.killed_by_us else "")
    why = f"signal {signal}" if signal is not None else "a stop"
    return Verdict((Cause.BENIGN,), 0.9, (f"{why} was sent{f' by {sender}' if sender else ''}",))


def _3_answers_well(evidence: Evidence, scan: Scan) -> Verdict | None:
    """It runs and answers: what the log says was overcome, except what the engine swallowed."""
    if not runs_well(evidence) or is_slow(evidence, scan):
        return None
    if spills(evidence, scan):
        return None
    best = first_error(scan, evidence)
    if best is not None and (best.rule.cause is Cause.REQUEST_TOO_LONG or not answered_well(evidence)):
        return None
    overcome = tuple(_quote(f.number, f.text) for f in scan.findings[:2])
    harmless = tuple(_quote(number, text) for number, text in scan.harmless[:2])
    return Verdict((Cause.BENIGN,), 0.85, ("it runs and answers", *overcome, *harmless))


def _4_first_error(evidence: Evidence, scan: Scan) -> Verdict | None:
    best = first_error(scan, evidence)
    if best is None:
        return None
    named = named_near(best, scan)
    causes, sure = causes_of(best, named, evidence, scan)
    return Verdict(causes, sure, _quotes(best, scan), named or best)


def _5_spill(evidence: Evidence, scan: Scan) -> Verdict | None:
    """No error anywhere: memory of the host stands in for the card's, and it shows in the speed."""
    if not spills(evidence, scan):
        return None
    slow = is_slow(evidence, scan)
    reasons = [f"{(evidence.shared_used_bytes or 0) // MIB} MiB of shared memory in use"]
    if slow:
        reasons.append(f"{speed_now(evidence, scan):.2f} tokens/s against {usual_speed(evidence, scan):.2f}")
    also = (Cause.HOST_RAM_OOM_KILLED,) if evidence.commit_limit_reached else ()
    sure = 0.9 if slow or evidence.commit_limit_reached else 0.7
    return Verdict((Cause.SHARED_MEMORY_SPILL, *also), sure, tuple(reasons))


def _6_child_killed(evidence: Evidence, scan: Scan) -> Verdict | None:
    """A child, or the process itself, died of a signal and nothing said why."""
    signals = [(signal, _quote(number, text)) for number, text, signal in scan.child_signals]
    signals = [(s, f"a child ended by signal {s}") for s in evidence.child_signals] + signals
    own = signal_of(evidence)
    if own is not None:
        signals.insert(0, (own, f"ended by signal {own}"))
    for signal, quoted in sorted(signals, key=lambda pair: pair[0] in (6, 15)):
        verdict = _of_signal(signal, quoted, evidence)
        if verdict is not None:
            return verdict
    return None


def _of_signal(signal: int, quoted: str, evidence: Evidence) -> Verdict | None:
    if signal == _SIGKILL:
        if evidence.killed_by_us:  # because it hung: the kill is ours, and tells nothing
            return None
        if counted_none(evidence):
            return Verdict(
                (Cause.UNKNOWN, Cause.HOST_RAM_OOM_KILLED), 0.4, (quoted, "the kernel counted no oom_kill")
            )
        return Verdict((Cause.HOST_RAM_OOM_KILLED,), 0.75, (quoted,))
    if signal == 7:
        if evidence.shm_free_bytes is not None and evidence.shm_free_bytes < 64 * MIB:
            return Verdict((Cause.HOST_RAM_OOM_KILLED, Cause.DRIVER_ERROR), 0.8, (quoted, "/dev/shm is full"))
        sure = 0.85 if evidence.model_file_changed else 0.55
        return Verdict((Cause.CORRUPT_MODEL, Cause.HOST_RAM_OOM_KILLED), sure, (quoted,))
    if signal == 4:
        return Verdict((Cause.DEPENDENCY_VERSION_MISMATCH,), 0.85, (quoted,))
    if signal in (11, 8):
        return Verdict((Cause.DRIVER_ERROR,), 0.6, (quoted,))
    return None


def _7_exit_alone(evidence: Evidence, scan: Scan) -> Verdict | None:
    """Only the exit code is left to go by."""
    code = evidence.exit.code if evidence.exit is not None else None
    if code is None:
        return None
    code &= 0xFFFFFFFF
    said = (f"exit 0x{code:X}" if code > 255 else f"exit {code}",)
    if code in _WINDOWS_NO_MEMORY or (code in _WINDOWS_FAULT and evidence.commit_limit_reached):
        return Verdict((Cause.HOST_RAM_OOM_KILLED,), 0.75, said)
    if code in _WINDOWS_DEPENDENCY:
        return Verdict((Cause.DEPENDENCY_VERSION_MISMATCH,), 0.8, said)
    if code in (126, 127):
        return Verdict((Cause.MISSING_FILE,), 0.7, said)
    if code in _WINDOWS_FAULT:
        return Verdict((Cause.DRIVER_ERROR,), 0.5, said)
    return None


def _8_weak_hint(evidence: Evidence, scan: Scan) -> Verdict | None:
    """A suggestion in the log, where something failed and nothing better was said."""
    if runs(evidence) and evidence.healthy is not False and not http_failed(evidence):
        return None
    hints = [f for f in (*scan.findings, *scan.earlier) if not f.recovered]
    if hints:
        causes, sure = causes_of(hints[0], None, evidence, scan)
        return Verdict(causes, min(sure, 0.6), _quotes(hints[0], scan), hints[0])
    if evidence.host_event:
        return Verdict((Cause.DRIVER_ERROR,), 0.5, (f"host event: {evidence.host_event}",))
    return None


def _9_nothing_wrong(evidence: Evidence, scan: Scan) -> Verdict | None:
    """Still running, or ended with 0, and nothing failed."""
    if http_failed(evidence) or evidence.healthy is False or evidence.canary_ok is False or scan.effects:
        return None
    if runs(evidence) and (evidence.healthy or scan.lines):
        quoted = tuple(_quote(number, text) for number, text in scan.harmless[:2])
        return Verdict((Cause.BENIGN,), 0.75, quoted or ("it runs, and no error stands",))
    if evidence.exit is not None and evidence.exit.code == 0:
        return Verdict((Cause.BENIGN,), 0.7, ("exit 0",))
    return None


# ---------------------------------------------------------------- parts of a verdict


def _with_others(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Name other processes beside the account that did not fit, when they took what is missing.

    What they held before our start was known when the configuration was chosen: only what came on top counts.
    """
    held = evidence.card_used_by_others_bytes or 0
    known = next((p.last_bytes for p in evidence.peaks if p.phase is MemoryPhase.BASELINE), 0)
    if held - known < _OTHERS_MATTER_BYTES or verdict.causes[0] not in MEMORY_CAUSES:
        return verdict
    causes = unique((verdict.causes[0], Cause.MEMORY_HELD_BY_OTHERS, *verdict.causes[1:]))
    said = f"other processes hold {held // MIB} MiB of the card"
    return Verdict(causes, verdict.confidence, (*verdict.evidence, said), verdict.finding)


def _quote(number: int, text: str) -> str:
    return f"line {number}: {text.strip()}" if number else text.strip()


def _quotes(best: Finding, scan: Scan) -> tuple[str, ...]:
    same = [f for f in scan.findings if f.rule.cause is best.rule.cause and f is not best]
    return tuple(_quote(f.number, f.text) for f in (best, *same[:2]))


def _effects(scan: Scan) -> tuple[str, ...]:
    return tuple(_quote(number, text) for number, text in scan.effects[:3])
