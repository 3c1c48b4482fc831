"""At which stage of an engine's life something failed."""

from __future__ import annotations

import re

from kvguard.diagnosis.facts import http_failed, runs
from kvguard.diagnosis.milestones import Phase, phase_named, stage_of
from kvguard.diagnosis.scan import Finding, Scan
from kvguard.domain import Cause, Evidence, Stage

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


def stage_told(cause: Cause, finding: Finding | None, evidence: Evidence, scan: Scan) -> Stage:
    """Place a failure: by the line that told it, else by the milestone, else where its cause is usual."""
    if cause is Cause.BENIGN:
        return _benign_stage(evidence, scan)
    if finding is not None:
        found = stage_of_finding(finding, scan)
        if found is not None:
            return found
    if evidence.requests_in_flight == 0 and max(scan.reached, phase_named(evidence.milestone)) >= Phase.READY:
        return Stage.IDLE
    stage = stage_by_context(evidence, scan) or _USUAL_STAGE.get(cause, Stage.INFERENCE)
    # an engine may die before it logs the request that it was just given
    return Stage.INFERENCE if stage is Stage.IDLE and evidence.requests_in_flight else stage


def stage_of_finding(finding: Finding, scan: Scan) -> Stage | None:
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


def stage_by_context(evidence: Evidence, scan: Scan) -> Stage | None:
    told = phase_named(evidence.milestone)
    if told > Phase.STARTED:
        return stage_of(told) if told >= scan.phase or scan.phase is Phase.STOPPING else stage_of(scan.phase)
    if scan.failed_after_ready and not scan.failed_before_ready:
        return Stage.INFERENCE
    if scan.phase not in (Phase.UNKNOWN, Phase.STOPPING):
        return stage_of(scan.phase)
    if scan.failed_before_ready:
        return Stage.LOAD
    return Stage.INFERENCE if http_failed(evidence) else None


_OF_LOADING = re.compile(
    r"mlock|MEMLOCK|pinned|madvise|HEAD failed|preset|register cu|VirtualLock", re.IGNORECASE
)


def _benign_stage(evidence: Evidence, scan: Scan) -> Stage:
    if scan.stopping or scan.phase is Phase.IDLE or not runs(evidence):
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
