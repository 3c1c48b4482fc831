"""All rules in the order in which they are tried: the narrow before the wide."""

from __future__ import annotations

from kvguard.diagnosis.fault_rules import CRASHES, DEVICE, FILES, FORMAT, IMPORTS, PORT, REQUEST, VERSIONS
from kvguard.diagnosis.memory_rules import ACCOUNTS, GENERIC, HOST, KERNEL
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
