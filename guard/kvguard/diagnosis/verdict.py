"""From evidence to a Failure: structured facts first, then the first specific error, then exit codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvguard.diagnosis.milestones import Phase, phase_named, stage_of
from kvguard.diagnosis.rule import Weight
from kvguard.diagnosis.scan import Finding, Scan
from kvguard.domain import MEMORY_CAUSES, MIB, Cause, Evidence, Failure, Stage
from kvguard.domain import Phase as MemoryPhase
from kvguard.remedies import advice_for

_SIGKILL, _SIGTERM = 9, 15
_OTHERS_MATTER_BYTES = 512 * MIB
_SPILL_BYTES = 512 * MIB
_SLOW_RATIO = 0.5
_FULL_RATIO = 0.97
_BURST_LINES = 80
_CALLER_LINES = 6

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
    stage = _stage(verdict, evidence, scan)
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
    if not _oom_kills(evidence) or evidence.killed_by_us:
        return None
    killed = [_quote(number, text) for number, text, signal in scan.child_signals if signal == _SIGKILL]
    gone = _signal(evidence) is not None or killed or _SIGKILL in evidence.child_signals
    if not gone and evidence.healthy is not False and not _failed_exit(evidence):
        return None
    counted = f"the kernel counted {_oom_kills(evidence)} oom_kill"
    return Verdict((Cause.HOST_RAM_OOM_KILLED,), 0.97, (counted, *killed[:2]))


def _2_stopped_on_purpose(evidence: Evidence, scan: Scan) -> Verdict | None:
    """Someone asked it to stop, and it had not failed before."""
    signal = _signal(evidence)
    hung = evidence.healthy is False or evidence.canary_ok is False
    told_to_stop = bool(evidence.signal_sender) or (evidence.killed_by_us and not hung)
    by_signal = signal in (_SIGTERM, 2, 1)
    by_itself = scan.stopping and evidence.exit is not None and evidence.exit.code == 0 and not scan.effects
    if not (told_to_stop or by_signal or by_itself) or _best(scan, evidence) is not None:
        return None
    sender = evidence.signal_sender or ("kvguard" if evidence.killed_by_us else "")
    why = f"signal {signal}" if signal is not None else "a stop"
    return Verdict((Cause.BENIGN,), 0.9, (f"{why} was sent{f' by {sender}' if sender else ''}",))


def _3_answers_well(evidence: Evidence, scan: Scan) -> Verdict | None:
    """It runs and answers: what the log says was overcome, except what the engine swallowed."""
    if not _runs_well(evidence) or _is_slow(evidence, scan):
        return None
    if _spills(evidence, scan):
        return None
    best = _best(scan, evidence)
    if best is not None and (best.rule.cause is Cause.REQUEST_TOO_LONG or not _answered_well(evidence)):
        return None
    overcome = tuple(_quote(f.number, f.text) for f in scan.findings[:2])
    harmless = tuple(_quote(number, text) for number, text in scan.harmless[:2])
    return Verdict((Cause.BENIGN,), 0.85, ("it runs and answers", *overcome, *harmless))


def _4_first_error(evidence: Evidence, scan: Scan) -> Verdict | None:
    best = _best(scan, evidence)
    if best is None:
        return None
    named = _named_near(best, scan)
    causes, sure = _causes_of(best, named, evidence, scan)
    return Verdict(causes, sure, _quotes(best, scan), named or best)


def _5_spill(evidence: Evidence, scan: Scan) -> Verdict | None:
    """No error anywhere: memory of the host stands in for the card's, and it shows in the speed."""
    if not _spills(evidence, scan):
        return None
    slow = _is_slow(evidence, scan)
    reasons = [f"{(evidence.shared_used_bytes or 0) // MIB} MiB of shared memory in use"]
    if slow:
        reasons.append(f"{_speed(evidence, scan):.2f} tokens/s against {_baseline(evidence, scan):.2f}")
    also = (Cause.HOST_RAM_OOM_KILLED,) if evidence.commit_limit_reached else ()
    sure = 0.9 if slow or evidence.commit_limit_reached else 0.7
    return Verdict((Cause.SHARED_MEMORY_SPILL, *also), sure, tuple(reasons))


def _6_child_killed(evidence: Evidence, scan: Scan) -> Verdict | None:
    """A child, or the process itself, died of a signal and nothing said why."""
    signals = [(signal, _quote(number, text)) for number, text, signal in scan.child_signals]
    signals = [(s, f"a child ended by signal {s}") for s in evidence.child_signals] + signals
    own = _signal(evidence)
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
        if _counted_none(evidence):
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
    if _runs(evidence) and evidence.healthy is not False and not _http_failed(evidence):
        return None
    hints = [f for f in (*scan.findings, *scan.earlier) if not f.recovered]
    if hints:
        causes, sure = _causes_of(hints[0], None, evidence, scan)
        return Verdict(causes, min(sure, 0.6), _quotes(hints[0], scan), hints[0])
    if evidence.host_event:
        return Verdict((Cause.DRIVER_ERROR,), 0.5, (f"host event: {evidence.host_event}",))
    return None


def _9_nothing_wrong(evidence: Evidence, scan: Scan) -> Verdict | None:
    """Still running, or ended with 0, and nothing failed."""
    if _http_failed(evidence) or evidence.healthy is False or evidence.canary_ok is False or scan.effects:
        return None
    if _runs(evidence) and (evidence.healthy or scan.lines):
        quoted = tuple(_quote(number, text) for number, text in scan.harmless[:2])
        return Verdict((Cause.BENIGN,), 0.75, quoted or ("it runs, and no error stands",))
    if evidence.exit is not None and evidence.exit.code == 0:
        return Verdict((Cause.BENIGN,), 0.7, ("exit 0",))
    return None


# ---------------------------------------------------------------- the first error


def _best(scan: Scan, evidence: Evidence) -> Finding | None:
    """Give the first error of the log that stands: of the last life, or of the one before it."""
    for life in (scan.findings, scan.earlier if not _runs_well(evidence) else []):
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
        and _runs(evidence)
        and not _http_failed(evidence)
        and evidence.healthy is not False
    )


def _named_near(finding: Finding, scan: Scan) -> Finding | None:
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


def _causes_of(
    finding: Finding, named: Finding | None, evidence: Evidence, scan: Scan
) -> tuple[tuple[Cause, ...], float]:
    """Name the account that did not fit: from a line that names it, else from the stage."""
    rule = finding.rule
    if named is not None:
        return _unique((*_refined(named, evidence), *rule.also)), named.rule.sure
    if rule.weight is not Weight.GENERIC:
        return _refined(finding, evidence), rule.sure
    stage = _stage_of_finding(finding, scan) or _stage_by_context(evidence, scan)
    cause = {Stage.LOAD: Cause.WEIGHTS_DONT_FIT, Stage.WARMUP: Cause.ACTIVATION_PEAK}.get(
        stage or Stage.INFERENCE, Cause.ACTIVATION_PEAK
    )
    if "kv" in finding.frames:
        cause = Cause.KV_DONT_FIT
    return _unique((cause, *rule.also)), 0.88 if stage else 0.6


def _refined(finding: Finding, evidence: Evidence) -> tuple[Cause, ...]:
    """A full pool with one request in it is a request that is too long; with several, a pool too small."""
    cause = finding.rule.cause
    if "context size has been exceeded" in finding.text.lower() and evidence.requests_in_flight == 1:
        return (Cause.REQUEST_TOO_LONG, cause)
    return _unique((cause, *finding.rule.also))


def _with_others(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Name other processes beside the account that did not fit, when they took what is missing.

    What they held before our start was known when the configuration was chosen: only what came on top counts.
    """
    held = evidence.card_used_by_others_bytes or 0
    known = next((p.last_bytes for p in evidence.peaks if p.phase is MemoryPhase.BASELINE), 0)
    if held - known < _OTHERS_MATTER_BYTES or verdict.causes[0] not in MEMORY_CAUSES:
        return verdict
    causes = _unique((verdict.causes[0], Cause.MEMORY_HELD_BY_OTHERS, *verdict.causes[1:]))
    said = f"other processes hold {held // MIB} MiB of the card"
    return Verdict(causes, verdict.confidence, (*verdict.evidence, said), verdict.finding)


# ---------------------------------------------------------------- the stage


_USUAL_STAGE = {
    Cause.WEIGHTS_DONT_FIT: Stage.LOAD,
    Cause.KV_DONT_FIT: Stage.WARMUP,
    Cause.HOST_RAM_OOM_KILLED: Stage.LOAD,
    Cause.MEMORY_HELD_BY_OTHERS: Stage.LOAD,
    Cause.QUANT_FORMAT_MISMATCH: Stage.LOAD,
    Cause.DEPENDENCY_VERSION_MISMATCH: Stage.LOAD,
    Cause.CORRUPT_MODEL: Stage.LOAD,
    Cause.MISSING_FILE: Stage.LOAD,
    Cause.PORT_IN_USE: Stage.LOAD,
}


def _stage(verdict: Verdict, evidence: Evidence, scan: Scan) -> Stage:
    if verdict.causes[0] is Cause.BENIGN:
        return _benign_stage(evidence, scan)
    if verdict.finding is not None:
        found = _stage_of_finding(verdict.finding, scan)
        if found is not None:
            return found
    if evidence.requests_in_flight == 0 and max(scan.reached, phase_named(evidence.milestone)) >= Phase.READY:
        return Stage.IDLE
    return _stage_by_context(evidence, scan) or _USUAL_STAGE.get(verdict.causes[0], Stage.INFERENCE)


def _stage_of_finding(finding: Finding, scan: Scan) -> Stage | None:
    """The wording tells it, else the stack, else the phase that the engine was in."""
    by_phase = stage_of(finding.phase)
    rule = finding.rule
    if rule.cause is Cause.PORT_IN_USE:  # a server that could not bind never was ready, whatever it said
        return Stage.WARMUP if finding.phase >= Phase.LOADED else Stage.LOAD
    failed_later = scan.failed_after_ready and not scan.failed_before_ready
    if rule.stage is Stage.LOAD and finding.phase is not Phase.LOADING and failed_later:
        return Stage.INFERENCE
    if rule.stage is not None:
        return Stage.INFERENCE if by_phase is Stage.INFERENCE and rule.stage is Stage.WARMUP else rule.stage
    frames = finding.frames if by_phase in (None, Stage.LOAD, Stage.WARMUP) else frozenset()
    for frame, stage in (("kv", Stage.WARMUP), ("warmup", Stage.WARMUP), ("load", Stage.LOAD)):
        if frame in frames:
            return stage
    if "forward" in frames and (by_phase is not None or scan.failed_before_ready):
        return Stage.WARMUP  # a forward pass before it is ready
    if by_phase is not None:
        return by_phase
    if finding.before_ready:
        return Stage.LOAD
    return Stage.INFERENCE if {"inference", "forward"} & finding.frames else None


def _stage_by_context(evidence: Evidence, scan: Scan) -> Stage | None:
    told = phase_named(evidence.milestone)
    if told > Phase.STARTED:
        return stage_of(told) if told >= scan.phase or scan.phase is Phase.STOPPING else stage_of(scan.phase)
    if scan.failed_after_ready and not scan.failed_before_ready:
        return Stage.INFERENCE
    if scan.phase not in (Phase.UNKNOWN, Phase.STOPPING):
        return stage_of(scan.phase)
    if scan.failed_before_ready:
        return Stage.LOAD
    return Stage.INFERENCE if _http_failed(evidence) else None


_OF_LOADING = re.compile(
    r"mlock|MEMLOCK|pinned|madvise|HEAD failed|preset|register cu|VirtualLock", re.IGNORECASE
)


def _benign_stage(evidence: Evidence, scan: Scan) -> Stage:
    if scan.stopping or scan.phase is Phase.IDLE or not _runs(evidence):
        return Stage.IDLE
    if scan.reached >= Phase.SERVING or evidence.http_status is not None:
        return Stage.INFERENCE
    if scan.harmless and _OF_LOADING.search(scan.harmless[0][1]):
        return Stage.LOAD
    if scan.reached >= Phase.LOADED:
        return Stage.WARMUP
    if scan.reached is Phase.UNKNOWN:
        return Stage.INFERENCE
    return Stage.LOAD


# ---------------------------------------------------------------- small questions


def _oom_kills(evidence: Evidence) -> int:
    return max(evidence.oom_kills or 0, evidence.exit.oom_kills if evidence.exit else 0)


def _counted_none(evidence: Evidence) -> bool:
    return evidence.oom_kills == 0


def _signal(evidence: Evidence) -> int | None:
    """The signal that ended the process; a shell tells it as 128 + n."""
    if evidence.exit is None:
        return None
    if evidence.exit.signal is not None:
        return evidence.exit.signal
    code = evidence.exit.code or 0
    return code - 128 if 128 < code < 160 else None


def _failed_exit(evidence: Evidence) -> bool:
    return evidence.exit is not None and evidence.exit.code != 0


def _runs(evidence: Evidence) -> bool:
    return evidence.exit is None


def _http_failed(evidence: Evidence) -> bool:
    return evidence.http_status is not None and evidence.http_status >= 400


def _answered_well(evidence: Evidence) -> bool:
    return evidence.canary_ok is True or (evidence.http_status is not None and evidence.http_status < 400)


def _runs_well(evidence: Evidence) -> bool:
    return (
        _runs(evidence)
        and evidence.healthy is True
        and not _http_failed(evidence)
        and evidence.canary_ok is not False
    )


def _baseline(evidence: Evidence, scan: Scan) -> float | None:
    return evidence.baseline_tokens_per_s or (scan.speeds[0] if scan.speeds else None)


def _speed(evidence: Evidence, scan: Scan) -> float | None:
    return evidence.tokens_per_s or (scan.speeds[-1] if scan.speeds else None)


def _is_slow(evidence: Evidence, scan: Scan) -> bool:
    baseline, speed = _baseline(evidence, scan), _speed(evidence, scan)
    return baseline is not None and speed is not None and speed < _SLOW_RATIO * baseline


def _spills(evidence: Evidence, scan: Scan) -> bool:
    """Host memory stands in for the card's: much of it, or some while the speed has fallen."""
    shared = evidence.shared_used_bytes or 0
    full = _is_full(evidence)
    return shared >= _SPILL_BYTES or (_is_slow(evidence, scan) and (full or shared >= _SPILL_BYTES // 4))


def _is_full(evidence: Evidence) -> bool:
    total, used = evidence.card_total_bytes, evidence.card_used_bytes
    return total is not None and used is not None and used >= _FULL_RATIO * total


def _unique(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    return tuple(dict.fromkeys(causes))


def _quote(number: int, text: str) -> str:
    return f"line {number}: {text.strip()}" if number else text.strip()


def _quotes(best: Finding, scan: Scan) -> tuple[str, ...]:
    same = [f for f in scan.findings if f.rule.cause is best.rule.cause and f is not best]
    return tuple(_quote(f.number, f.text) for f in (best, *same[:2]))


def _effects(scan: Scan) -> tuple[str, ...]:
    return tuple(_quote(number, text) for number, text in scan.effects[:3])
