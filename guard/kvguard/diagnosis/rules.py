"""All rules in the order in which they are tried: the narrow before the wide."""

from __future__ import annotations

from kvguard.diagnosis.fault_rules import CRASHES, DEVICE, FILES, FORMAT, IMPORTS, PORT, REQUEST, VERSIONS
from kvguard.diagnosis.memory_rules import ACCOUNTS, GENERIC, HOST, KERNEL
from kvguard.diagnosis.pattern_table import PatternTable
from kvguard.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    *KERNEL,
    *PORT,
    *REQUEST,
    *CRASHES,
    *ACCOUNTS,
    *HOST,
    *GENERIC,
    *IMPORTS,
    *FORMAT,
    *VERSIONS,
    *FILES,
    *DEVICE,
)

_TABLE = PatternTable([rule.pattern for rule in RULES])


def first_match(text: str, *, quiet: bool) -> Rule | None:
    """Give the first rule that a message satisfies; `quiet` where its writer calls it information."""
    return next((RULES[i] for i in _TABLE.matches(text) if RULES[i].any_level or not quiet), None)
