"""The verdict of an isolation, rule by rule, on hand-made tables of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvguard.domain import MIB, Cause, Failure, Knobs, PoolKind, Stage, Variant
from kvguard.isolation.rules import RULES
from kvguard.isolation.slope import slope_of
from kvguard.isolation.table import Points, Run, Table
from kvguard.isolation.verdict import no_climb, verdict

Q8 = Variant(kind="gguf", source="q8", bits=8.5, label="Q8_0")
Q4 = Variant(kind="gguf", source="q4", bits=4.5, label="Q4_K_M")
F16 = Variant(kind="gguf", source="f16", bits=16, label="F16")
KNOBS = Knobs(batch=1, ctx_tokens=8192, pool_tokens=8192, pool_kind=PoolKind.UNIFIED, quant=Q8)


def run(
    number: int, variable: Any = "reproduce", *, peak: int = 500, idle: int | None = None, **more: Any
) -> Run:
    knobs = replace(KNOBS, **{k: more.pop(k) for k in ("quant", "gpu_layers", "batch") if k in more})
    if "ctx" in more:
        knobs = replace(knobs, ctx_tokens=more["ctx"], pool_tokens=more.pop("ctx"))
    scale = more.pop("source", "cgroup v2")
    points = Points(
        baseline_bytes=0, peak_bytes=peak * MIB, source=scale,
        loaded_idle_bytes=None if idle is None else idle * MIB,
    )  # fmt: skip
    return Run(
        number=number, variable=variable, knobs=knobs, sequences=1, points=points,
        **{"result": "success", **more},
    )  # fmt: skip


def oom(number: int, variable: Any = "reproduce", *, stage: Stage = Stage.LOAD, **more: Any) -> Run:
    failure = Failure(stage=stage, causes=(Cause.KV_DONT_FIT,), confidence=0.9, evidence=(), remedy="less")
    given = {"result": "out of memory", "failure": failure, "milestone": "weights_loaded", **more}
    return run(number, variable, **given)


def broken(
    number: int, variable: Any = "reproduce", cause: Cause = Cause.QUANT_FORMAT_MISMATCH, **more: Any
) -> Run:
    failure = Failure(stage=Stage.LOAD, causes=(cause,), confidence=0.9, evidence=(), remedy="another")
    return run(number, variable, result="failed", failure=failure, milestone="started", peak=10, **more)


CASES: dict[str, tuple[list[Run], str, str, tuple[int, ...]]] = {
    "nothing failed": ([run(1), run(2)], "not_reproduced", "none", (1, 2)),
    "a lower quant runs with a lower peak": (
        [oom(1), oom(2), oom(3, "ctx", ctx=4096), run(4, "quant", quant=Q4, peak=300)],
        "quant", "memory short", (1, 2, 4),
    ),
    "a lower quant runs with the same peak": (
        [oom(1), run(2, "quant", quant=Q4, peak=490)], "kv_dont_fit", "memory short", (1,),
    ),
    "more batch breaks": (
        [run(1), run(2, "batch"), oom(3, "batch", batch=2), oom(4, "batch", batch=2)],
        "batch", "memory short", (1, 2, 3, 4),
    ),
    "half the context cures": (
        [oom(1), run(2, "ctx", ctx=4096, peak=300), oom(3, "quant", quant=Q4)],
        "context", "memory short", (1, 2),
    ),
    "both cure, the context frees more": (
        [oom(1), run(2, "ctx", ctx=4096, peak=300), run(3, "quant", quant=Q4, peak=400)],
        "context", "memory short", (1, 2),
    ),
    "both cure, the quant frees more": (
        [oom(1), run(2, "ctx", ctx=4096, peak=400), run(3, "quant", quant=Q4, peak=300)],
        "quant", "memory short", (1, 3),
    ),
    "only both together help": (
        [oom(1), oom(2, "ctx", ctx=4096), oom(3, "quant", quant=Q4),
         run(4, "combined", ctx=4096, quant=Q4, peak=300)],
        "combined", "memory short", (1, 3, 2, 4),
    ),
    "fails before the weights are in": (
        [oom(1, milestone="weights_loading"), oom(2, milestone="weights_loading")],
        "weights", "memory short", (1, 2),
    ),
    "loaded and idle it is full": (
        [oom(1, stage=Stage.INFERENCE, idle=560, milestone="ready")], "capacity", "memory short", (1,),
    ),
    "even the shortest input fails at load": (
        [oom(1), oom(2, "shortest_input")], "capacity", "memory short", (1, 2),
    ),
    "only the normal input fails": (
        [oom(1, stage=Stage.INFERENCE), run(2, "shortest_input")], "peak", "memory short", (1, 2),
    ),
    "half the context does not help": (
        [oom(1), oom(2, "ctx", ctx=4096)], "weights", "memory short", (2,),
    ),
    "fewer layers do not help": (
        [oom(1), oom(2, "gpu_layers", gpu_layers=4)], "context", "memory short", (1, 2),
    ),
    "fails in mid-generation": (
        [oom(1, stage=Stage.INFERENCE, failed_at_token=37)], "kv_growth", "memory short", (1,),
    ),
    "without the prompt cache it runs": (
        [oom(1), run(2, "host_cache")], "prompt_cache", "memory short", (1, 2),
    ),
    "others hold what is missing": (
        [oom(1, others_bytes=200 * MIB, predicted_bytes=450 * MIB)], "held_by_others", "memory short", (1,),
    ),
    "slow while the card is full": (
        [run(1, peak=560, tokens_per_s=2.0), run(2, "ctx", ctx=4096, peak=300, tokens_per_s=20.0)],
        "slow_spill", "memory short", (1, 2),
    ),
    "the format is wrong": ([broken(1), broken(2)], "quant_format", "quant incompatible", (1, 2)),
    "the file is damaged": ([broken(1, cause=Cause.CORRUPT_MODEL)], "damaged_file", "other", (1,)),
    "only the quantised weights fail": (
        [broken(1), run(2, "full_weights", quant=F16)], "format_against_loader", "quant incompatible", (1, 2),
    ),
    "16-bit weights fail alike": (
        [broken(1), broken(2, "full_weights", quant=F16)],
        "dependency_versions", "dependency mismatch", (1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_rule_names_its_cause_with_its_rows(name: str) -> None:
    runs, cause, kind, rows = CASES[name]
    said = verdict(Table(runs=tuple(runs), limit_bytes=600 * MIB, headroom_bytes=60 * MIB))
    assert (said.cause, said.kinds[0], said.evidence) == (cause, kind, rows)


def test_every_rule_is_the_main_one_somewhere_or_stands_beside() -> None:
    heard = {
        finding.rule
        for runs, *_ in CASES.values()
        for finding in verdict(
            Table(runs=tuple(runs), limit_bytes=600 * MIB, headroom_bytes=60 * MIB)
        ).findings
    }
    near = verdict(Table(runs=(run(1, peak=560), oom(2, "batch", batch=2)), limit_bytes=600 * MIB))
    heard |= {finding.rule for finding in near.findings}
    cured = verdict(Table(runs=(oom(1), run(2, "gpu_layers", gpu_layers=4)), limit_bytes=600 * MIB))
    heard |= {finding.rule for finding in cured.findings}
    assert heard == {rule.__name__ for rule in RULES}


def test_a_failure_that_comes_at_times_is_less_sure() -> None:
    always = verdict(Table(runs=(oom(1), oom(2), oom(3)), limit_bytes=600 * MIB))
    at_times = verdict(Table(runs=(oom(1), run(2), oom(3)), limit_bytes=600 * MIB))
    assert (always.reproduced, at_times.reproduced, at_times.tries) == (3, 2, 3)
    assert at_times.confidence < always.confidence


def test_readings_of_another_source_are_not_compared() -> None:
    cured = run(2, "quant", quant=Q4, peak=300, source="resident")
    said = verdict(Table(runs=(oom(1), cured), limit_bytes=600 * MIB))
    assert said.cause == "kv_dont_fit"
    assert any("run 2 is not compared" in line for line in said.not_tested)


def test_an_out_of_memory_without_a_climb_is_told() -> None:
    assert no_climb(oom(1, peak=20, predicted_bytes=500 * MIB))
    assert not no_climb(oom(1, peak=450, predicted_bytes=500 * MIB))
    assert not no_climb(run(1, peak=20, predicted_bytes=500 * MIB))


def test_the_slope_over_batch() -> None:
    straight = slope_of({1: [100, 100], 2: [200], 4: [400]})
    assert straight is not None
    assert (straight.bytes_per_sequence, straight.linear) == (100, True)
    bent = slope_of({1: [100], 2: [110], 4: [400]})
    assert bent is not None
    assert bent.linear is False
    two = slope_of({1: [100], 2: [200]})
    assert two is not None
    assert two.linear is None
    assert slope_of({1: [100, 101]}) is None
