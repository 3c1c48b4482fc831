"""Read a log line by line and keep what a verdict needs, in bounded memory.

The first errors of each kind stay latched. What comes later may prove them harmless (a retry that worked, a
later milestone), and an effect never replaces a cause.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvguard.diagnosis.context_rules import (
    AFTER_READY,
    ANSWERED,
    BEFORE_READY,
    EFFECT,
    HARMLESS,
    RECOVERY,
    child_signal,
)
from kvguard.diagnosis.echo import EchoFilter
from kvguard.diagnosis.milestones import Phase, frame_of, phase_of
from kvguard.diagnosis.normalise import Line, lines_of
from kvguard.diagnosis.rule import Rule, Weight, first_match
from kvguard.diagnosis.rules import RULES
from kvguard.domain import MEMORY_CAUSES, Cause

_MAX_FINDINGS = 64
_MAX_QUOTED_CHARS = 400
_RECOVERS_LINES = 12

_STEMS = tuple(
    "err|fail|memory|oom|kill|alloc|cannot|can't|unable|not |n't|invalid|unsupported|unknown|exception|denied|"
    "missing|in use|bind|bus|fault|abort|assert|signal|exit|died|dead|lost|xid|out of|too l|too b|exceed|longer|"
    "insufficient|illegal|mismatch|corrupt|trunc|magic|load|kv|listening|ready|complete|slot|post /|running|reqs|"
    "captur|warm|profil|shut|sigterm|batch|request|n_ctx|n_ubatch|build|args|version|retry|fall|eval|retract|prompt|"
    "<|im_|<start_of|[inst]|content|init|requires|install|undefined|glibc|offline|size|divid|divis|xpu|hsa_|hang|"
    "idle|model|blocks|quant|no such|only|modul|reset|timeout|wrong|found|nccl|sig|space|cancel|refus|swap".split(
        "|"
    )
)
_BLANK = re.compile(r"[.\s#=*-]*$")


@dataclass(slots=True)
class Finding:
    """A rule that matched, where, and what was known of the engine's life at that line."""

    rule: Rule
    number: int
    text: str
    phase: Phase
    frames: frozenset[str]
    weak: bool = False
    recovered: bool = False
    swallowed: bool = False  # in an optional part: a later milestone does not undo it
    before_ready: bool = False  # the engine said later that it is ready

    @property
    def memory(self) -> bool:
        return self.rule.cause in MEMORY_CAUSES

    @property
    def of_device(self) -> bool:
        return Cause.DRIVER_ERROR in (self.rule.cause, *self.rule.also)

    @property
    def weight(self) -> Weight:
        return Weight.HINT if self.weak and self.rule.weight > Weight.HINT else self.rule.weight


@dataclass(slots=True)
class Scan:
    """What a log says. Feed it raw lines; read it when the log is at its end."""

    findings: list[Finding] = field(default_factory=list)
    earlier: list[Finding] = field(default_factory=list)  # of lives before the last one
    phase: Phase = Phase.UNKNOWN
    reached: Phase = Phase.UNKNOWN
    lines: int = 0
    effects: list[tuple[int, str]] = field(default_factory=list)
    child_signals: list[tuple[int, str, int]] = field(default_factory=list)
    failed_before_ready: bool = False
    failed_after_ready: bool = False
    harmless: list[tuple[int, str]] = field(default_factory=list)
    answered: int = 0
    stopping: bool = False
    speeds: list[float] = field(default_factory=list)
    _echo: EchoFilter = field(default_factory=EchoFilter)
    _frames: set[str] = field(default_factory=set)
    _recent: deque[str] = field(default_factory=lambda: deque(maxlen=3))

    def feed_all(self, raw_lines: Iterable[str]) -> Scan:
        for raw in raw_lines:
            self.feed(raw)
        return self

    def feed(self, raw: str) -> None:
        self.lines += 1
        low = raw[:16_384].lower()
        if not self._echo.inside and not any(stem in low for stem in _STEMS):
            return
        for line in lines_of(self.lines, raw):
            self._read(line)

    # ------------------------------------------------------------ one message

    def _read(self, line: Line) -> None:
        text = self._echo.cut(line.text, line.text.lower())
        if not text or _BLANK.match(text):
            return
        low = text.lower()
        self._note_life(text, low, line)
        if HARMLESS.search(text):
            self._keep(self.harmless, line.number, text)
            if RECOVERY.search(text):
                self._recover(line.number)
            return
        recovers = RECOVERY.search(text) is not None
        matched = first_match(RULES, text, low, quiet=line.quiet)
        if matched is None and not recovers:
            matched, text = self._joined(text, line)
        self._recent.append(text)
        if recovers and not (matched and matched.sticky):
            self._recover(line.number)
            return
        if matched is not None:
            self._latch(matched, line, text)
        elif not line.quiet and EFFECT.search(text):
            self._keep(self.effects, line.number, text)

    def _joined(self, text: str, line: Line) -> tuple[Rule | None, str]:
        """Try a message that was wrapped: with the end of the line before it."""
        if not self._recent or line.quiet or len(text) > 300 or len(self._recent[-1]) > 300:
            return None, text
        joined = f"{self._recent[-1]} {text.strip()}"
        matched = first_match(RULES, joined, joined.lower(), quiet=False)
        alone = first_match(RULES, self._recent[-1], self._recent[-1].lower(), quiet=False)
        return (matched, joined) if matched is not None and alone is None else (None, text)

    def _note_life(self, text: str, low: str, line: Line) -> None:
        if low.startswith("traceback (most recent"):
            self._frames.clear()
        if not line.quiet:
            frame = frame_of(text)
            if frame:
                self._frames.add(frame)
        signal = None if line.quiet else child_signal(text)
        if signal is not None and len(self.child_signals) < _MAX_FINDINGS:
            self.child_signals.append((line.number, text[:_MAX_QUOTED_CHARS], signal))
        if BEFORE_READY.search(text):
            self.failed_before_ready = True
        if AFTER_READY.search(text):
            self.failed_after_ready = True
        if ANSWERED.search(text):
            self.answered = line.number
            self._note_speed(text)
        self._enter(phase_of(text), line)

    def _note_speed(self, text: str) -> None:
        match = re.search(r"^ *eval time.{0,80}?([\d.]+) tokens per second", text)
        if match and len(self.speeds) < 10_000:
            self.speeds.append(float(match.group(1)))

    def _enter(self, phase: Phase, line: Line) -> None:
        if phase is Phase.UNKNOWN or line.level == "error":
            return
        if phase is Phase.STARTED and self.reached > Phase.STARTED and self.findings:
            self.earlier = self.findings
            self.findings = []
            self.reached = Phase.UNKNOWN
        if phase is Phase.STOPPING:
            self.stopping = True
        if phase is Phase.LOADING and self.phase >= Phase.LOADED and "draft" in line.text.lower():
            phase = Phase.LOADING
        self.phase = phase
        self.reached = max(self.reached, phase) if phase < Phase.STOPPING else self.reached
        if phase in (Phase.READY, Phase.SERVING, Phase.IDLE):
            self._frames.clear()
            for finding in self.findings:
                before = Phase.UNKNOWN if phase is Phase.READY else Phase.STARTED
                if before <= finding.phase < Phase.READY:
                    finding.before_ready = True
                    finding.recovered |= not finding.swallowed and not finding.of_device

    # ------------------------------------------------------------ what is kept

    def _latch(self, matched: Rule, line: Line, text: str) -> None:
        if len(self.findings) >= _MAX_FINDINGS:
            return
        swallowed = matched.sticky or (self.phase is Phase.LOADED and self._optional_part())
        self.findings.append(
            Finding(
                rule=matched,
                number=line.number,
                text=text[:_MAX_QUOTED_CHARS],
                phase=self.phase,
                frames=frozenset(self._frames),
                weak=line.level == "warning" and not matched.any_level,
                swallowed=swallowed,
            )
        )

    def _optional_part(self) -> bool:
        """A multimodal encoder's warm-up swallows its failure; the first image then kills the server."""
        return any("alloc_compute_meta" in text or "clip" in text.lower() for text in self._recent) or any(
            finding.swallowed for finding in self.findings[-1:]
        )

    def _recover(self, number: int) -> None:
        for finding in self.findings:
            if number - finding.number <= _RECOVERS_LINES and finding.memory:
                finding.recovered = True

    def _keep(self, where: list[tuple[int, str]], number: int, text: str) -> None:
        if len(where) < _MAX_FINDINGS:
            where.append((number, text[:_MAX_QUOTED_CHARS]))
