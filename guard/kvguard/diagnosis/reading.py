"""What one message says by itself, whatever came before it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvguard.diagnosis.context_rules import Mark, child_signal, marks_of
from kvguard.diagnosis.milestones import Phase, frame_of, phase_of
from kvguard.diagnosis.rule import Rule
from kvguard.diagnosis.rules import first_match


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A message, read. `rule` is the error that it words; None for most."""

    rule: Rule | None = None
    marks: frozenset[Mark] = frozenset()
    phase: Phase = Phase.UNKNOWN
    frame: str = ""
    signal: int | None = None


def read(text: str, level: str) -> Reading:
    """Read one message. Info and debug lines are believed only where they tell of phases or of requests."""
    quiet = level in ("info", "debug")
    marks = marks_of(text)
    return Reading(
        rule=None if Mark.HARMLESS in marks else first_match(text, quiet=quiet),
        marks=marks - {Mark.EFFECT} if quiet else marks,
        phase=Phase.UNKNOWN if level == "error" else phase_of(text),
        frame="" if quiet else frame_of(text),
        signal=None if quiet else child_signal(text),
    )


# A run of digits counts as one number, except zero (`Running: 0 reqs`) and three digits (an HTTP status).
_NUMBER = re.compile(r"(?<!\d)(?!\d{3}(?!\d))\d*[1-9]\d*")
_NUMBERED = ("rrno", "exit", "signal", "code", "rror")  # here the number is the message
_MAX_SHAPES = 20_000
_MAX_SHAPE_CHARS = 512


class Reader:
    """Reads messages, each shape of them once: a long log says the same with other numbers."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Reading] = {}

    def read(self, text: str, level: str) -> Reading:
        if len(text) > _MAX_SHAPE_CHARS or any(word in text for word in _NUMBERED):
            return read(text, level)
        shape = (_NUMBER.sub("7", text), level)
        known = self._known.get(shape)
        if known is None:
            known = read(text, level)
            if len(self._known) >= _MAX_SHAPES:
                self._known.clear()
            self._known[shape] = known
        return known
