"""Admission policies against each other, on the same seeded arrivals in front of a simulated engine.

    python bench/admission.py --trace FILE.csv [--trace ...] [--full] [--json] [--plot FILE.png]

A few minutes at the saturation point; --full takes every load from 0.6 to 2 and longer streams of requests.

A trace has columns TIMESTAMP,ContextTokens,GeneratedTokens or timestamp_ms,input_length,output_length;
without one, lengths are synthetic. What clients asked for as `max_tokens` is in no trace and is assumed in
three ways. The load is in multiples of what an oracle that knows every length sustains. Everyone has the
same fair queue with the TTFT bound as its deadline, so that the arms differ in who may start and in nothing
else; `none` has no queue, and `watermark` is the engine's own rule, given the engine's true usage.

goodput      requests/s that finished within the bounds on TTFT and on the mean time per token
recomputed   tokens thrown away by preemption, or by kvguard taking a request back
over         share of readings in which real usage passed what the policy had predicted
Jain         fairness index over the tokens that four equal keys were given
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from arms import EngineWatermark, Lockstep, Oracle, PastFuture
from kvguard import __version__
from kvguard.domain import Capacity, Demand, Ending, Ticket
from kvguard.limiter import Limiter
from kvguard.ports import AdmissionPolicy
from kvguard_policies.admission import make_policy
from kvguard_policies.admission.adaptive import Z_FAILS_ALL, Adaptive, Z
from kvguard_policies.ordering import FairOrder
from simulator import Engine, EngineModel, Report, Run, simulate
from workloads import MaxTokens, TraceRow, Workload, concatenated, load_trace, synthetic

HERE = Path(__file__).parent
LOADS = (0.6, 0.8, 1.0, 1.3, 2.0)
SATURATION = 1.3
QUICK_REQUESTS, FULL_REQUESTS = 600, 1500
FIXED = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 48)
LONG_SCALE = 16
FLOOD_ROUNDS = 3
WARM_SEED, TUNING_SEED = 777, 888
NO_LIMIT = 1 << 30


# ---------------------------------------------------------------- arms


MakePolicy = Callable[[Engine], AdmissionPolicy]


def arms_of(scenario: Scenario) -> dict[str, MakePolicy]:
    """All arms by name. Those that end in "warm" begin with tables learned from other requests."""
    z = Z if scenario.overflow == "preempts" else Z_FAILS_ALL
    arms: dict[str, MakePolicy] = {
        "none": lambda _e: make_policy("unlimited"),
        "reserve": lambda _e: make_policy("reserve"),
        "lockstep": lambda _e: Lockstep(),
        "past-future": lambda _e: PastFuture(),
        "watermark 0.10": lambda e: EngineWatermark(e, 0.10),
        f"adaptive z={z - 0.8:.1f}": lambda _e: Adaptive(z=z - 0.8),
        "adaptive": lambda _e: make_policy("adaptive"),
        f"adaptive z={z + 0.8:.1f}": lambda _e: Adaptive(z=z + 0.8),
        "adaptive warm": lambda _e: warm(scenario),
        "oracle": lambda _e: Oracle(),
    }
    return arms


def fixed_arm(requests: int) -> MakePolicy:
    return lambda _engine: make_policy(f"fixed:{requests}")


def warm(scenario: Scenario) -> AdmissionPolicy:
    policy = make_policy("adaptive")
    policy.recall(scenario.learned)
    return policy


# ---------------------------------------------------------------- scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A workload, the engine that it is sent to, and what both are worth together."""

    workload: Workload
    overflow: str
    capacity_per_s: float = 0.0
    learned: str = ""
    best_fixed: int = 0

    def model(self) -> EngineModel:
        block_tokens = 16 if self.overflow == "preempts" else 1
        return EngineModel(
            pool_tokens=self.workload.pool_tokens(block_tokens),
            ctx_tokens=self.workload.ctx_tokens,
            block_tokens=block_tokens,
            overflow="preempts" if self.overflow == "preempts" else "fails_all",
        )


def scenarios_of(options: argparse.Namespace) -> list[Workload]:
    """Each trace with three assumptions on max_tokens; one with long outputs; one whose mix changes."""
    traces = {path.stem: load_trace(path) for path in options.trace} or {"synthetic": synthetic()}
    workloads = []
    for name, rows in traces.items():
        longest = max(row.length for row in rows)
        for rule in (
            MaxTokens(kind="fixed", number=_power(longest)),
            MaxTokens(kind="times", number=4),
            MaxTokens(kind="none"),
        ):
            workloads.append(_workload(f"{name}, max {rule}", rows, rule, options))
    name, rows = max(traces.items(), key=lambda item: mean(row.length for row in item[1]))
    longest = LONG_SCALE * max(row.length for row in rows)
    rule = MaxTokens(kind="fixed", number=_power(longest))
    workloads.append(
        replace(
            _workload(f"{name} x{LONG_SCALE}, max {rule}", rows, rule, options),
            length_scale=LONG_SCALE, ctx_tokens=2 * rule.number, concurrency=options.concurrency * 2 / 3,
            ttft_s=60.0, requests=max(100, options.requests // 2),
        )
    )  # fmt: skip
    if len(traces) > 1:
        (a, first), (b, second) = sorted(traces.items())[:2]
        half = options.requests // 2
        rule = MaxTokens(kind="fixed", number=_power(max(row.length for row in [*first, *second])))
        workloads.append(
            _workload(f"{a} then {b}, max {rule}", concatenated(first[:half], second[:half]), rule, options)
        )
    chosen = [w for w in workloads if not options.only or any(text in w.name for text in options.only)]
    if not chosen:
        raise SystemExit(f"--only matches none of: {'; '.join(w.name for w in workloads)}")
    return chosen


def _workload(name: str, rows: Sequence[TraceRow], rule: MaxTokens, options: argparse.Namespace) -> Workload:
    prompts = sorted(row.prompt_tokens for row in rows)
    most = rule.number if rule.kind == "fixed" else 4 * max(row.length for row in rows)
    ctx_tokens = _power(prompts[int(0.99 * len(prompts))] + most)
    return Workload(
        name=name, rows=rows, max_tokens=rule, ctx_tokens=ctx_tokens, concurrency=options.concurrency,
        requests=options.requests,
    )  # fmt: skip


def _power(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One arm on one scenario at one load, for one seed or as the mean over seeds (counts are summed)."""

    goodput_per_s: float
    finished: int
    failed: int
    refused: int
    preemptions: int
    overflows: int
    taken_back: int
    recomputed_tokens: int
    used_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    over_share: float
    jain: float


def measure(
    scenario: Scenario, make: MakePolicy, rate_per_s: float, seed: int, *, queue: bool = True
) -> Result:
    workload = scenario.workload

    def limiter(engine: Engine, clock: Callable[[], float]) -> Limiter:
        return Limiter(
            policy=make(engine), order=FairOrder(), clock=clock, max_queue_requests=NO_LIMIT if queue else 0
        )

    report = simulate(scenario.model(), limiter, workload.arrivals(rate_per_s, seed), ttft_s=workload.ttft_s)
    return _result(report, workload)


def _result(report: Report, workload: Workload) -> Result:
    done = [run for run in report.runs if run.outcome == "done"]
    good = [run for run in done if (run.ttft_s or 0) <= workload.ttft_s and run.tpot_s <= workload.tpot_s]
    started = sorted(run.ttft_s for run in report.runs if run.ttft_s is not None)
    gaps = sorted(run.longest_gap_s for run in report.runs if run.new_tokens)
    readings = report.policy.get("readings", 0.0)
    return Result(
        goodput_per_s=len(good) / report.duration_s,
        finished=len(done),
        failed=sum(run.outcome == "failed" for run in report.runs),
        refused=sum(run.outcome == "refused" for run in report.runs),
        preemptions=report.preemptions,
        overflows=report.overflows,
        taken_back=report.taken_back,
        recomputed_tokens=sum(run.recomputed_tokens for run in report.runs),
        used_share=report.mean_used_share,
        ttft_p50_s=_percentile(started, 0.5),
        ttft_p99_s=_percentile(started, 0.99),
        gap_p99_s=_percentile(gaps, 0.99),
        over_share=report.policy.get("readings_over_prediction", 0.0) / readings if readings else 0.0,
        jain=_jain(report.runs),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _jain(runs: Iterable[Run]) -> float:
    served: dict[str, int] = {}
    for run in runs:
        got = run.arrival.prompt_tokens + 2 * run.new_tokens if run.new_tokens else 0
        served[run.arrival.key] = served.get(run.arrival.key, 0) + got
    squares = sum(tokens * tokens for tokens in served.values())
    return sum(served.values()) ** 2 / (len(served) * squares) if squares else 1.0


SUMMED = ("finished", "failed", "refused", "preemptions", "overflows", "taken_back", "recomputed_tokens")


def averaged(results: Sequence[Result]) -> Result:
    rows = [asdict(result) for result in results]
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return Result(**{name: value if name in SUMMED else value / len(rows) for name, value in total.items()})


# ---------------------------------------------------------------- all runs


_scenarios: list[Scenario] = []  # filled before the workers fork: traces are large, and policies are closures


def prepared(workload: Workload, overflow: str) -> Scenario:
    """Find what the oracle sustains when flooded, the best fixed N, and tables learned on other requests."""
    scenario = Scenario(workload=workload, overflow=overflow)
    rate_per_s = 2.0
    for _ in range(FLOOD_ROUNDS):
        rate_per_s = measure(scenario, lambda _e: Oracle(), 2 * rate_per_s, WARM_SEED).goodput_per_s
    teacher: list[Adaptive] = []

    def taught(_engine: Engine) -> AdmissionPolicy:
        teacher.append(Adaptive())
        return teacher[-1]

    measure(scenario, taught, rate_per_s, WARM_SEED)
    best = max(
        FIXED,
        key=lambda n: measure(scenario, fixed_arm(n), SATURATION * rate_per_s, TUNING_SEED).goodput_per_s,
    )
    return replace(
        scenario, capacity_per_s=rate_per_s, learned="".join(teacher[0].learned()), best_fixed=best
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    scenario: int
    arm: str
    load: float
    seed: int


def work(job: Job) -> Result:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    scenario = _scenarios[job.scenario]
    make = arms_of(scenario).get(job.arm) or fixed_arm(scenario.best_fixed)
    return measure(scenario, make, job.load * scenario.capacity_per_s, job.seed)


def prepare(index_overflow: tuple[int, str]) -> Scenario:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    index, overflow = index_overflow
    return prepared(_workloads[index], overflow)


_workloads: list[Workload] = []


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    _workloads[:] = scenarios_of(options)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
        _scenarios[:] = pool.map(prepare, [(i, options.overflow) for i in range(len(_workloads))])
    jobs = [
        Job(scenario=i, arm=arm, load=load, seed=seed)
        for i, scenario in enumerate(_scenarios)
        for arm in [*arms_of(scenario), "fixed"]
        if not options.arms or arm in options.arms
        for load in options.loads
        for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
        results = list(pool.map(work, jobs, chunksize=4))
    grouped: dict[tuple[int, float, str], list[Result]] = {}
    for job, result in zip(jobs, results, strict=True):
        grouped.setdefault((job.scenario, job.load, job.arm), []).append(result)
    return [
        {
            "scenario": _scenarios[i].workload.name,
            "overflow": options.overflow,
            "capacity_per_s": _scenarios[i].capacity_per_s,
            "load": load,
            "arm": f"fixed:{_scenarios[i].best_fixed} (best)" if arm == "fixed" else arm,
            "seeds": len(each),
            "goodput_by_seed": [result.goodput_per_s for result in each],
            **asdict(averaged(each)),
        }
        for (i, load, arm), each in grouped.items()
    ]


# ---------------------------------------------------------------- the goals


def verdicts(rows: Sequence[Mapping[str, Any]], load: float) -> list[dict[str, Any]]:
    """What adaptive reaches at saturation against the others, scenario by scenario."""
    found = []
    for name in dict.fromkeys(row["scenario"] for row in rows):
        by_arm = {
            row["arm"].split(":")[0]: row for row in rows if row["scenario"] == name and row["load"] == load
        }
        for arm in ("adaptive", "adaptive warm"):
            own = by_arm.get(arm)
            if own is None:
                continue
            ratios = {
                other: own["goodput_per_s"] / by_arm[other]["goodput_per_s"]
                for other in ("reserve", "fixed", "watermark 0.10", "past-future", "oracle")
                if other in by_arm and by_arm[other]["goodput_per_s"] > 0
            }
            harm = {
                key: own[key] for key in ("preemptions", "overflows", "failed", "taken_back", "gap_p99_s")
            }
            oracle = by_arm.get("oracle", {}).get("goodput_per_s", 0.0)
            reach = {other: oracle / by_arm[other]["goodput_per_s"] for other in ratios}
            row = {"scenario": name, "arm": arm, "load": load, **harm, "goodput_over": ratios}
            found.append({**row, "oracle_over": reach, "goals": goals(name, row, reach)})
    return found


def goals(name: str, row: Mapping[str, Any], reach: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each goal with its figure; `in_reach` is whether an oracle that knows every length would hold it."""
    long = f" x{LONG_SCALE}," in name
    wasteful = long or "x need" in name or "none" in name
    least = {
        "reserve": 2.0 if wasteful else 1.3,
        "fixed": 1.15 if long else 0.97,
        "watermark 0.10": 1.15 if long else 0.97,
        "oracle": 0.9,
    }
    found = [
        {
            "goal": f"goodput over {other} at least {bound:g}", "measured": row["goodput_over"][other],
            "held": row["goodput_over"][other] >= bound, "in_reach": reach[other] >= bound,
        }
        for other, bound in least.items() if other in row["goodput_over"]
    ]  # fmt: skip
    harmed = row["preemptions"] + row["overflows"] + row["failed"]
    found.append({"goal": "no preemption, overflow or failure", "measured": harmed, "held": not harmed})
    if long:
        gap_s = row["gap_p99_s"]
        found.append({"goal": "longest gap between tokens under 1 s", "measured": gap_s, "held": gap_s < 1})
    return found


def decision_times_us(running: int = 256, waiting: int = 1000) -> dict[str, float]:
    """Median times of one decision while tokens stream in, of a token, and of finding whose turn it is."""
    policy = Adaptive()
    policy.resize(
        Capacity(pool_tokens=1 << 20, ctx_tokens=16384, sequences=512, block_tokens=16, overflow="preempts")
    )
    demand = Demand(prompt_tokens=500, max_new_tokens=1024)
    for lease_id in range(400):
        policy.admit(lease_id, demand, "")
        policy.release(lease_id, Ending.FINISHED, 1 + 37 * lease_id % 900)
    for lease_id in range(1000, 1000 + running):
        policy.admit(lease_id, demand, "")
        policy.progress(lease_id, 1 + lease_id % 600)
    order = FairOrder()
    decide, token, head = [], [], []
    for turn in range(300):
        begin = time.perf_counter()
        policy.progress(1000 + turn % running, 601 + turn)
        after_token = time.perf_counter()
        policy.decide(demand)
        decided = time.perf_counter()
        token.append(after_token - begin)
        decide.append(decided - after_token)
    for i in range(waiting):
        order.push(Ticket(id=i, key=f"key{i % 16}", priority=0, demand=demand, tokens=1524))
    for _ in range(300):
        begin = time.perf_counter()
        order.head()
        order.passers(8)
        head.append(time.perf_counter() - begin)
    return {
        "decide_us": 1e6 * sorted(decide)[150], "token_us": 1e6 * sorted(token)[150],
        "whose_turn_us": 1e6 * sorted(head)[150], "running": running, "waiting": waiting,
    }  # fmt: skip


# ---------------------------------------------------------------- output


def provenance() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "kvguard": __version__, "commit": commit.stdout.strip(), "python": platform.python_version(),
        "machine": platform.machine(), "cpus": multiprocessing.cpu_count(), "command": " ".join(sys.argv),
    }  # fmt: skip


COLUMNS: Mapping[str, tuple[str, str]] = {
    "goodput_per_s": ("goodput/s", "{:.3f}"),
    "failed": ("failed", "{}"),
    "preemptions": ("preempt.", "{}"),
    "taken_back": ("taken back", "{}"),
    "recomputed_tokens": ("recomputed", "{}"),
    "used_share": ("KV used", "{:.0%}"),
    "ttft_p50_s": ("TTFT p50 s", "{:.2f}"),
    "ttft_p99_s": ("p99 s", "{:.2f}"),
    "gap_p99_s": ("gap p99 s", "{:.2f}"),
    "over_share": ("over", "{:.1%}"),
    "jain": ("Jain", "{:.3f}"),
}


def show(
    rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], times: Mapping[str, float]
) -> None:
    console = Console(width=160)
    for name, load in dict.fromkeys((row["scenario"], row["load"]) for row in rows):
        table = Table(title=f"{name}, load {load:g}", title_justify="left")
        table.add_column("arm")
        for title, _ in COLUMNS.values():
            table.add_column(title, justify="right")
        for row in rows:
            if (row["scenario"], row["load"]) == (name, load):
                table.add_row(row["arm"], *(form.format(row[key]) for key, (_, form) in COLUMNS.items()))
        console.print(table)
    table = Table(title="adaptive at saturation: its goodput over that of ...", title_justify="left")
    for title in (
        "scenario",
        "arm",
        "reserve",
        "best fixed",
        "watermark",
        "past-future",
        "oracle",
        "preempt.",
        "failed",
    ):
        table.add_column(title)
    for row in found:
        over = row["goodput_over"]
        ratios = [f"{over[key]:.2f}" if key in over else "-"
                  for key in ("reserve", "fixed", "watermark 0.10", "past-future", "oracle")]  # fmt: skip
        table.add_row(row["scenario"], row["arm"], *ratios, str(row["preemptions"]), str(row["failed"]))
    console.print(table)
    missed = Table(title="goals that do not hold", title_justify="left")
    for title in ("scenario", "arm", "goal", "measured", "would the oracle hold it"):
        missed.add_column(title)
    for row in found:
        for goal in row["goals"]:
            if not goal["held"]:
                oracle = {True: "yes", False: "no"}.get(goal.get("in_reach"), "-")
                missed.add_row(row["scenario"], row["arm"], goal["goal"], f"{goal['measured']:.2f}", oracle)
    held = sum(goal["held"] for row in found for goal in row["goals"])
    console.print(missed, f"{held} of {sum(len(row['goals']) for row in found)} goals hold")
    console.print({key: round(value, 1) for key, value in times.items()})


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Goodput over load, or bars where there is one load; a panel a scenario. Needs the `bench` extra."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["scenario"] for row in rows))
    loads = sorted({row["load"] for row in rows})
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(6 * across, 4 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(names) :]:
        axes.remove()
    for axes, name in zip(panels, names, strict=False):
        own = [row for row in rows if row["scenario"] == name]
        arms = list(dict.fromkeys(row["arm"] for row in own))
        colours = [colormaps["tab20"](i) for i in range(len(arms))]
        axes.set(title=name)
        if len(loads) == 1:
            axes.barh(arms, [row["goodput_per_s"] for row in own], color=colours)
            axes.invert_yaxis()
            axes.set(xlabel=f"goodput, requests/s, at {loads[0]:g} times capacity")
            continue
        for arm, colour in zip(arms, colours, strict=True):
            points = sorted((row["load"], row["goodput_per_s"]) for row in own if row["arm"] == arm)
            bold = 2.5 if arm.startswith("adaptive") and "=" not in arm else 1.2
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=bold, label=arm,
                      color=colour)  # fmt: skip
        axes.set(xlabel="load over capacity", ylabel="goodput, requests/s", ylim=(0, None))
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=110)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="CSV of a production trace")
    parser.add_argument("--overflow", choices=("preempts", "fails_all"), default="preempts")
    parser.add_argument("--loads", type=numbers, help="multiples of capacity")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--concurrency", type=float, default=24, help="mean requests that the pool holds")
    parser.add_argument("--only", action="append", default=[], help="scenarios whose name holds this")
    parser.add_argument("--arms", action="append", default=[], help="only this arm (repeat for more)")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--full", action="store_true", help="all loads, and more requests")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    options = parser.parse_args()
    options.loads = options.loads or (list(LOADS) if options.full else [SATURATION])
    options.requests = options.requests or (FULL_REQUESTS if options.full else QUICK_REQUESTS)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        rows = run_all(options)
    except (ValueError, OSError) as exc:
        raise SystemExit(f"admission bench: {exc}") from exc
    load = min(options.loads, key=lambda each: abs(each - SATURATION))
    found, times = verdicts(rows, load), decision_times_us()
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        print(
            json.dumps(
                {"provenance": provenance(), "rows": rows, "adaptive": found, "times": times}, indent=1
            )
        )
    else:
        show(rows, found, times)


if __name__ == "__main__":
    main()
