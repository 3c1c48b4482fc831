"""Read a log line by line and keep what a verdict needs, in bounded memory.

The first errors of each kind stay latched. What comes later may prove them harmless (a retry that worked, a
later milestone), and an effect never replaces a cause.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvguard.diagnosis.context_rules import Mark
from kvguard.diagnosis.echo import EchoFilter
from kvguard.diagnosis.milestones import Phase
from kvguard.diagnosis.normalise import Line, lines_of
from kvguard.diagnosis.reading import Reader, Reading, read
from kvguard.diagnosis.rule import Rule, Weight
from kvguard.domain import MEMORY_CAUSES, Cause

_MAX_FINDINGS = 64
_MAX_QUOTED_CHARS = 400
_MAX_OF_ONE_RULE = 4
_MAX_JOINED_CHARS = 300
_RECOVERS_LINES = 12

_BLANK = re.compile(r"[.\s#=*-]*$")
_FRAME_LINE = re.compile(r"\s*File \".{1,400}\", line \d+")
_RAISE = re.compile(r"\s*(?:raise|except|assert|return) ")
_EXCEPTION = re.compile(r"\s*(?:[\w.]*(?:Error|Exception|Exit|Interrupt|OutOfResources)\b|\w+Error\()")
_SPEED = re.compile(r"^ *eval time.{0,80}?([\d.]+) tokens per second")


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
    _reader: Reader = field(default_factory=Reader)
    _frames: set[str] = field(default_factory=set)
    _recent: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    _after_frame: bool = False
    _joinable: bool = False  # the last line was loud and matched nothing

    def feed_all(self, raw_lines: Iterable[str]) -> Scan:
        for raw in raw_lines:
            self.feed(raw)
        return self

    def feed(self, raw: str) -> None:
        self.lines += 1
        for line in lines_of(self.lines, raw):
            self._take(line)

    # ------------------------------------------------------------ one message

    def _take(self, line: Line) -> None:
        text = self._echo.cut(line.text, line.text.lower())
        if not text or _BLANK.match(text):
            return
        said = self._reader.read(text, line.level)
        self._note_life(said, line, text)
        if self._is_source(text):
            return
        matched = said.rule
        if matched is None and not said.marks & {Mark.RECOVERY, Mark.HARMLESS}:
            matched, text = self._joined(text, line)
        self._joinable = matched is None and not line.quiet and Mark.HARMLESS not in said.marks
        if Mark.HARMLESS not in said.marks:
            self._recent.append(text)
        if Mark.RECOVERY in said.marks and not (matched and matched.sticky):
            self._recover(line.number)
        elif Mark.HARMLESS in said.marks:
            self._keep(self.harmless, line.number, text)
        elif matched is not None:
            self._latch(matched, line, text)
        elif Mark.EFFECT in said.marks:
            self._keep(self.effects, line.number, text)

    def _is_source(self, text: str) -> bool:
        """Tell a line of code in a traceback: it may hold any wording, and says nothing happened."""
        after_frame, self._after_frame = self._after_frame, False
        if _FRAME_LINE.match(text):
            self._after_frame = True
            return True
        return _RAISE.match(text) is not None or (after_frame and not _EXCEPTION.match(text))

    def _joined(self, text: str, line: Line) -> tuple[Rule | None, str]:
        """Try a message that was wrapped: with the line before it."""
        if line.quiet or not self._joinable or not self._recent:
            return None, text
        if self._recent[-1].endswith((".", ":", ";", "}")):
            return None, text
        if len(text) > _MAX_JOINED_CHARS or len(self._recent[-1]) > _MAX_JOINED_CHARS:
            return None, text
        joined = f"{self._recent[-1]} {text.strip()}"
        matched = read(joined, line.level).rule
        return (matched, joined) if matched is not None else (None, text)

    def _note_life(self, said: Reading, line: Line, text: str) -> None:
        if text.startswith("Traceback (most recent"):
            self._frames.clear()
        if said.frame:
            self._frames.add(said.frame)
        if said.signal is not None and len(self.child_signals) < _MAX_FINDINGS:
            self.child_signals.append((line.number, text[:_MAX_QUOTED_CHARS], said.signal))
        self.failed_before_ready |= Mark.BEFORE_READY in said.marks
        self.failed_after_ready |= Mark.AFTER_READY in said.marks
        if Mark.ANSWERED in said.marks:
            self.answered = line.number
            if match := _SPEED.search(text):
                self._note_speed(float(match.group(1)))
        if said.phase is not Phase.UNKNOWN:
            self._enter(said.phase)

    def _note_speed(self, tokens_per_s: float) -> None:
        """Keep the best speed and the last one."""
        self.speeds = [max([tokens_per_s, *self.speeds]), tokens_per_s]

    def _enter(self, phase: Phase) -> None:
        if phase is Phase.STARTED and self.reached > Phase.STARTED and self.findings:
            self.earlier, self.findings = self.findings, []
            self.reached = Phase.UNKNOWN
        self.stopping |= phase is Phase.STOPPING
        self.phase = phase
        if phase < Phase.STOPPING:
            self.reached = max(self.reached, phase)
        if phase in (Phase.READY, Phase.SERVING, Phase.IDLE):
            self._frames.clear()
            self._overcome_before(phase)

    def _overcome_before(self, phase: Phase) -> None:
        """What failed before the engine got this far did not stop it."""
        first = Phase.UNKNOWN if phase is Phase.READY else Phase.STARTED
        for finding in self.findings:
            if first <= finding.phase < Phase.READY:
                finding.before_ready = True
                finding.recovered |= not finding.swallowed and not finding.of_device

    # ------------------------------------------------------------ what is kept

    def _latch(self, matched: Rule, line: Line, text: str) -> None:
        if not self._has_room_for(matched):
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

    def _has_room_for(self, matched: Rule) -> bool:
        """A storm of one error, or of overcome ones, must not crowd out the next."""
        same = [finding for finding in self.findings if finding.rule is matched]
        overcome = [finding for finding in same if finding.recovered]
        if len(same) >= _MAX_OF_ONE_RULE and overcome:
            self.findings.remove(overcome[0])
            return True
        return len(same) < _MAX_OF_ONE_RULE and len(self.findings) < _MAX_FINDINGS

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
