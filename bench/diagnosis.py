"""Accuracy of the diagnosis on labelled outputs: one line a mistake, then a table by cause.

    python bench/diagnosis.py --cases tests/data/failures.jsonl

A line of the file is a JSON object: `log`, `exit`, `stage`, `cause`, and optionally `ctx` (structured
signals) and `also` (other causes that count as right). `[... N lines ...]` in a log is that much filler.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvguard.case import evidence_of, exit_of
from kvguard.diagnosis import diagnose
from kvguard.domain import MEMORY_CAUSES, Cause, Failure, Stage

_ALIASES = {
    "activation_peak/fragmentation": "activation_peak",
    "missing_file/bad_path": "missing_file",
    "driver/cuda_error_not_oom": "driver_error",
    "warmup/profile": "warmup",
}
_FILLER = re.compile(r"\[\.\.\. (\d+) lines \.\.\.\]")
_CONFIDENT = 0.7


@dataclass(frozen=True, slots=True)
class Case:
    """A labelled output, and what the diagnosis says of it."""

    case_id: str
    stage: Stage
    cause: Cause
    right: frozenset[Cause]
    failure: Failure

    @property
    def cause_right(self) -> bool:
        return self.failure.cause in self.right

    @property
    def stage_right(self) -> bool:
        return self.failure.stage is self.stage

    @property
    def memory_mistaken(self) -> bool:
        """A memory failure that is called something else with high confidence."""
        return (
            self.cause in MEMORY_CAUSES
            and not self.cause_right
            and self.failure.cause not in MEMORY_CAUSES
            and self.failure.confidence >= _CONFIDENT
        )

    @property
    def false_alarm(self) -> bool:
        return self.cause is Cause.BENIGN and not self.cause_right


def _name(label: str) -> str:
    return _ALIASES.get(label, label)


def expanded(log: str) -> Iterator[str]:
    """Give the lines of a log, with filler in place of what was left out."""
    for line in log.splitlines():
        match = _FILLER.fullmatch(line.strip())
        if match:
            yield from (
                f'  File "/opt/app/module_{i}.py", line {i}, in step_{i}' for i in range(int(match[1]))
            )
        else:
            yield line


def judged(record: dict[str, Any]) -> Case:
    """Diagnose one labelled output."""
    evidence = evidence_of(
        record.get("ctx") or {}, exit_status=exit_of(record["exit"]), log_lines=expanded(record["log"])
    )
    cause = Cause(_name(record["cause"]))
    also = {Cause(_name(label)) for label in record.get("also", ())}
    return Case(
        case_id=record["id"],
        stage=Stage(_name(record["stage"])),
        cause=cause,
        right=frozenset({cause, *also}),
        failure=diagnose(evidence),
    )


def load(path: Path) -> list[Case]:
    with path.open(encoding="utf-8") as file:
        return [judged(json.loads(line)) for line in file if line.strip()]


def summary(cases: list[Case]) -> dict[str, Any]:
    total = len(cases)
    return {
        "cases": total,
        "cause_right": sum(c.cause_right for c in cases),
        "stage_right": sum(c.stage_right for c in cases),
        "both_right": sum(c.cause_right and c.stage_right for c in cases),
        "memory_called_something_else": sum(c.memory_mistaken for c in cases),
        "benign_called_a_failure": sum(c.false_alarm for c in cases),
    }


def report(cases: list[Case]) -> None:
    for case in cases:
        if not (case.cause_right and case.stage_right):
            failure = case.failure
            print(
                f"{case.case_id}: is {case.stage}/{case.cause}, told {failure.stage}/"
                f"{','.join(failure.causes)} ({failure.confidence:.2f}): {' | '.join(failure.evidence)[:160]}"
            )
    print(f"\n{'cause':32} {'cases':>5} {'cause':>6} {'stage':>6}")
    counted = Counter(case.cause for case in cases)
    for cause in sorted(counted):
        of_cause = [case for case in cases if case.cause is cause]
        right = sum(case.cause_right for case in of_cause)
        print(f"{cause:32} {len(of_cause):5} {right:6} {sum(case.stage_right for case in of_cause):6}")
    for name, value in summary(cases).items():
        share = f"  {100 * value / len(cases):.1f} %" if name.endswith("right") else ""
        print(f"{name:32} {value:5}{share}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, required=True, help="JSON lines of labelled outputs")
    parser.add_argument("--only", type=Path, help="JSON list of ids to look at")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON alone")
    arguments = parser.parse_args()
    cases = load(arguments.cases)
    if arguments.only:
        chosen = set(json.loads(arguments.only.read_text(encoding="utf-8")))
        cases = [case for case in cases if case.case_id in chosen]
    if arguments.json:
        print(json.dumps(summary(cases)))
    else:
        report(cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
