"""What a rule is: one wording of one cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from kvguard.domain import Cause, Stage


class Weight(IntEnum):
    """How much a matching line says.

    EFFECT    something died or failed; names no cause (worker death, EngineDeadError, failed to load model)
    HINT      suggests a cause, believed only where nothing better was said
    GENERIC   an allocation failed; which account did not fit is told by the phase or by lines near it
    SPECIFIC  names its cause
    """

    EFFECT = 0
    HINT = 1
    GENERIC = 2
    SPECIFIC = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """One wording of one cause.

    stage      where the wording itself tells it
    also       causes that the wording leaves possible
    any_level  counts on info and debug lines too (an HTTP 400 is no error to the server that logs it)
    sticky     a later milestone does not make it harmless
    sure       confidence when nothing contradicts it
    """

    cause: Cause
    pattern: re.Pattern[str]
    weight: Weight = Weight.SPECIFIC
    stage: Stage | None = None
    also: tuple[Cause, ...] = ()
    any_level: bool = False
    sticky: bool = False
    sure: float = 0.92


def rule(
    cause: Cause,
    pattern: str,
    *,
    weight: Weight = Weight.SPECIFIC,
    stage: Stage | None = None,
    also: tuple[Cause, ...] = (),
    any_level: bool = False,
    sticky: bool = False,
    sure: float = 0.92,
) -> Rule:
    """Make a rule; the pattern ignores case."""
    return Rule(
        cause=cause,
        pattern=re.compile(pattern, re.IGNORECASE),
        weight=weight,
        stage=stage,
        also=also,
        any_level=any_level,
        sticky=sticky,
        sure=sure,
    )
