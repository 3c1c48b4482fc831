"""Diagnosis on labelled outputs, and the rules of reading that no single output shows."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvguard.case import evidence_of, exit_of
from kvguard.diagnosis import Scan, diagnose
from kvguard.domain import Cause, Evidence, ExitStatus, Failure, Phase, PhasePeak, Stage
from kvguard.remedies import TABLE, as_markdown, route, route_of

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
MIB = 1 << 20
TORCH_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity"
)
DIED = ExitStatus(code=1)


def _bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_diagnosis", ROOT / "bench" / "diagnosis.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _bench()


def told(*lines: str, exit: ExitStatus | None = DIED, **signals: object) -> Failure:
    return diagnose(Evidence(exit=exit, log_lines=lines, **signals))  # type: ignore[arg-type]


# ---------------------------------------------------------------- labelled outputs


@pytest.mark.parametrize("name", ["failures.jsonl", "wordings.jsonl"])
def test_stage_and_cause_are_right_on_95_percent_of_labelled_outputs(name: str) -> None:
    got = bench.summary(bench.load(DATA / name))
    assert got["cases"] >= 100
    assert got["both_right"] >= 0.95 * got["cases"], got


@pytest.mark.parametrize("name", ["failures.jsonl", "wordings.jsonl"])
def test_no_memory_failure_is_surely_something_else_and_no_benign_one_a_failure(name: str) -> None:
    cases = bench.load(DATA / name)
    assert [case.case_id for case in cases if case.memory_mistaken or case.false_alarm] == []


def test_every_verdict_on_labelled_outputs_quotes_its_reason() -> None:
    for case in bench.load(DATA / "failures.jsonl"):
        assert case.failure.evidence, case.case_id
        assert case.failure.remedy, case.case_id
        assert 0 < case.failure.confidence < 1


# ---------------------------------------------------------------- structured evidence first


def test_a_counted_oom_kill_outweighs_the_log() -> None:
    failure = told(
        "ERROR something: CUDA error: an illegal memory access was encountered",
        exit=ExitStatus(signal=9, oom_kills=1),
    )
    assert failure.cause is Cause.HOST_RAM_OOM_KILLED
    assert failure.confidence > 0.9


def test_sigkill_where_the_kernel_counted_no_kill_is_not_called_memory() -> None:
    assert told(exit=ExitStatus(signal=9), oom_kills=0).cause is Cause.UNKNOWN
    assert told(exit=ExitStatus(signal=9)).cause is Cause.HOST_RAM_OOM_KILLED


def test_a_stop_that_was_asked_for_is_benign_unless_something_failed_before() -> None:
    stopped = ExitStatus(signal=15)
    assert told("INFO:     Shutting down", exit=stopped).cause is Cause.BENIGN
    assert told(f"ERROR [core.py:1] {TORCH_OOM}", exit=stopped).is_memory


def test_an_engine_that_hung_and_was_killed_for_it_is_not_benign() -> None:
    failure = told(exit=ExitStatus(signal=9), killed_by_us=True, healthy=False, milestone="ready")
    assert failure.cause is Cause.UNKNOWN
    assert failure.stage is Stage.INFERENCE


@pytest.mark.parametrize(
    ("signal", "cause"),
    [(4, Cause.DEPENDENCY_VERSION_MISMATCH), (7, Cause.CORRUPT_MODEL), (11, Cause.DRIVER_ERROR)],
)
def test_a_signal_alone_suggests_a_cause(signal: int, cause: Cause) -> None:
    assert told(exit=ExitStatus(signal=signal)).cause is cause


def test_a_childs_exit_in_the_log_counts_as_a_signal() -> None:
    line = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}"
    assert told(line).cause is Cause.HOST_RAM_OOM_KILLED
    assert told(line.replace("-9", "-11")).cause is Cause.DRIVER_ERROR


def test_nothing_at_all_is_unknown() -> None:
    failure = told("hello")
    assert failure.cause is Cause.UNKNOWN
    assert failure.confidence < 0.5


# ---------------------------------------------------------------- the stage


@pytest.mark.parametrize(
    ("before", "stage", "cause"),
    [
        ("INFO 01-01 00:00:00 [g.py:1] Starting to load model m...", Stage.LOAD, Cause.WEIGHTS_DONT_FIT),
        ("INFO [g.py:1] Model loading took 20.44 GiB", Stage.WARMUP, Cause.ACTIVATION_PEAK),
        ("INFO:     Application startup complete.", Stage.INFERENCE, Cause.ACTIVATION_PEAK),
        ('  File "w.py", line 1, in _allocate_kv_cache_tensors', Stage.WARMUP, Cause.KV_DONT_FIT),
        ('  File "w.py", line 1, in profile_run', Stage.WARMUP, Cause.ACTIVATION_PEAK),
        ('  File "w.py", line 1, in load_weights', Stage.LOAD, Cause.WEIGHTS_DONT_FIT),
    ],
)
def test_the_phase_tells_which_account_did_not_fit(before: str, stage: Stage, cause: Cause) -> None:
    failure = told(before, f"ERROR 01-01 00:00:01 [core.py:1] {TORCH_OOM}")
    assert (failure.stage, failure.cause) == (stage, cause)


def test_the_milestone_stands_in_where_the_log_tells_no_phase() -> None:
    assert told(TORCH_OOM, milestone="weights_loading").cause is Cause.WEIGHTS_DONT_FIT
    assert told(TORCH_OOM, milestone="decoding").cause is Cause.ACTIVATION_PEAK


def test_a_shape_or_device_mismatch_in_a_forward_pass_is_not_memory() -> None:
    for line in (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (512x4096 and 1x8388608)",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
    ):
        failure = told("INFO:     Application startup complete.", line)
        assert not failure.is_memory
        assert not route_of(failure).rungs


# ---------------------------------------------------------------- which line counts


def test_the_first_specific_error_stays_and_effects_never_replace_it() -> None:
    failure = told(
        "ERROR [engine.py:1] MQLLMEngine is already dead, terminating server process",
        "ERROR [core.py:1] EngineCore encountered a fatal error.",
        f"ERROR [core.py:1] {TORCH_OOM}",
        "ERROR NCCL error: unhandled system error",
        "OSError: [Errno 98] Address already in use",
    )
    assert failure.cause is Cause.ACTIVATION_PEAK
    assert "line 3" in failure.evidence[0]


def test_an_allocation_that_a_retry_or_a_later_milestone_made_good_does_not_count() -> None:
    oom = "E buffer_type_alloc_buffer: allocating 1 MiB on device 0: cudaMalloc failed: out of memory"
    later = "I srv  llama_server: model loaded"
    assert (
        told("load_tensors: loading model tensors", oom, later, exit=None, healthy=True).cause is Cause.BENIGN
    )
    assert told("load_tensors: loading model tensors", oom).cause is Cause.WEIGHTS_DONT_FIT


def test_source_lines_of_a_traceback_are_not_what_happened() -> None:
    failure = told(
        "Traceback (most recent call last):",
        '  File "hub.py", line 20, in check',
        '    raise ValueError(f"Unknown quantization method: {name}")',
        '  File "worker.py", line 7, in load_model',
        "    except torch.OutOfMemoryError:  # CUDA out of memory",
        "FileNotFoundError: [Errno 2] No such file or directory: '/m/model.safetensors'",
    )
    assert failure.cause is Cause.MISSING_FILE
    assert "line 6" in failure.evidence[0]


def test_a_storm_of_overcome_errors_does_not_crowd_out_the_last_one() -> None:
    storm = (
        "W decode: failed to find a memory slot for batch of size 1024",
        "W srv decode: failed to find free space in the KV cache, retrying with smaller batch size",
    ) * 300
    failure = told(*storm, "E CUDA error: an illegal memory access was encountered")
    assert failure.cause is Cause.DRIVER_ERROR


def test_only_the_last_life_in_a_log_counts() -> None:
    failure = told(
        "INFO [api.py:1] vLLM API server version 0.9",
        "INFO Starting to load model m",
        f"ERROR [core.py:1] {TORCH_OOM}",
        "INFO [api.py:1] vLLM API server version 0.9",
        "INFO Starting to load model m",
        "ERROR ValueError: Unknown quantization method: foo.",
    )
    assert failure.cause is Cause.QUANT_FORMAT_MISMATCH


@pytest.mark.parametrize(
    "lines",
    [
        (f"INFO logger.py:37] Received request c-1: prompt: 'why {TORCH_OOM}', params: SamplingParams(n=1)",),
        (f'{{"role": "user", "content": "why {TORCH_OOM}"}}',),
        (f'DEBUG body: {{"messages": [{{"role": "user", "content": "{TORCH_OOM}"}}]}}',),
        ("<|im_start|>user", TORCH_OOM, "what is it?<|im_end|>", "<|im_start|>assistant"),
        (f"prompt: {TORCH_OOM}",),
        ("[INST] my log says", TORCH_OOM, "[/INST] You ran out of memory."),
    ],
)
def test_what_a_user_wrote_is_never_evidence(lines: tuple[str, ...]) -> None:
    assert told(*lines).cause is Cause.UNKNOWN
    assert told(*lines, exit=None).cause is Cause.BENIGN


def test_a_prompt_without_its_end_does_not_hide_the_engines_own_words() -> None:
    lines = ("<|im_start|>user", "hello", "srv  update_slots: id 0", f"ERROR [core.py:1] {TORCH_OOM}")
    assert told(*lines).is_memory


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "\x1b[31mERROR\x1b[0m \x1b[90m11-20 10:11:58\x1b[0m \x1b[90m[core.py:1510]\x1b[0m ",
        "(EngineCore pid=3318) ERROR 11-20 09:12:57 [core.py:1510] ",
        "2025-11-06T05:41:02.118Z stderr F ERROR ",
        "vllm-1  | (VllmWorker rank=2 pid=5120) ERROR 06-10 03:52:10 [multiproc_executor.py:487] ",
        "Nov 06 12:00:00 host llama-server[4411]: 0.04.391.775 E ",
        "Loading: 10%\rLoading: 20%\r[rank0]: ",
        "[2025-11-12 08:44:00 TP0] ",
    ],
)
def test_prefixes_of_loggers_change_nothing(prefix: str) -> None:
    message = "ValueError: No available memory for the cache blocks."
    failure = told(prefix + message)
    assert failure.cause is Cause.KV_DONT_FIT
    assert failure.evidence == (f"line 1: {message}",)


@pytest.mark.parametrize(
    "line",
    [
        '{"level":"ERROR","message":"ValueError: No available memory for the cache blocks."}',
        '{"log":"ValueError: No available memory for the cache blocks.\\n","stream":"stderr"}',
        '{"level":"ERROR","fields":{"message":"x\\nValueError: No available memory for the cache blocks."}}',
        '{"error":{"message":"No available memory for the cache blocks.","code":500}}',
    ],
)
def test_json_logs_are_read(line: str) -> None:
    assert told(line).cause is Cause.KV_DONT_FIT


def test_a_message_wrapped_over_two_lines_is_read() -> None:
    assert told("ERROR ValueError: No available memory", "for the cache blocks.").cause is Cause.KV_DONT_FIT


# ---------------------------------------------------------------- others, spill


def _baseline(used_bytes: int) -> tuple[PhasePeak, ...]:
    return (
        PhasePeak(
            phase=Phase.BASELINE, peak_bytes=used_bytes, last_bytes=used_bytes, source="nvml",
            interval_s=0.05, samples=9, started_at=0.0, ended_at=1.0,
        ),
    )  # fmt: skip


def test_memory_that_others_took_after_the_choice_takes_no_step() -> None:
    oom = f"ERROR {TORCH_OOM}"
    grown = told(oom, card_used_by_others_bytes=9000 * MIB, peaks=_baseline(1000 * MIB))
    assert Cause.MEMORY_HELD_BY_OTHERS in grown.causes
    assert not grown.is_memory
    assert not route_of(grown).rungs
    steady = told(oom, card_used_by_others_bytes=9000 * MIB, peaks=_baseline(8900 * MIB))
    assert steady.is_memory
    assert route_of(steady).rungs


def test_a_spill_is_told_by_shared_memory_and_speed() -> None:
    slow = told(
        exit=None, healthy=True, shared_used_bytes=3000 * MIB, tokens_per_s=2.0, baseline_tokens_per_s=30.0
    )
    assert slow.cause is Cause.SHARED_MEMORY_SPILL
    fine = told("INFO ok", exit=None, healthy=True, shared_used_bytes=90 * MIB, tokens_per_s=29.0,
                baseline_tokens_per_s=30.0)  # fmt: skip
    assert fine.cause is Cause.BENIGN


# ---------------------------------------------------------------- a long log


def test_a_scan_fed_line_by_line_gives_what_the_whole_log_gives() -> None:
    lines = ["INFO Starting to load model m", *["INFO x"] * 100, f"ERROR {TORCH_OOM}"]
    scan = Scan()
    for line in lines:
        scan.feed(line)
    assert diagnose(Evidence(exit=DIED), scan) == told(*lines)


def test_what_a_scan_keeps_does_not_grow_with_the_log() -> None:
    scan = Scan()
    for number in range(3000):
        scan.feed(f"ERROR {number} failed: {TORCH_OOM}")
        scan.feed(f"ERROR worker {number} died, exit code: -9")
        scan.feed("W Sequence is preempted by PreemptionMode.RECOMPUTE")
    kept = len(scan.findings) + len(scan.effects) + len(scan.child_signals) + len(scan.harmless)
    assert kept < 300


# ---------------------------------------------------------------- remedies


def test_every_pair_of_stage_and_cause_has_a_route_and_only_memory_takes_steps() -> None:
    assert set(TABLE) == {(stage, cause) for stage in Stage for cause in Cause}
    for (stage, cause), found in TABLE.items():
        memory = Failure(stage=stage, causes=(cause,), confidence=1.0, evidence=()).is_memory
        assert bool(found.rungs) == memory
        assert found.advice
        assert len(set(found.rungs)) == len(found.rungs)


def test_weights_that_do_not_fit_are_not_answered_with_batch_or_context() -> None:
    assert route(Stage.LOAD, Cause.WEIGHTS_DONT_FIT).rungs == ("quant", "gpu_layers")


def test_the_documented_table_is_the_one_in_use() -> None:
    assert as_markdown() in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------- context files


def test_exits_are_read() -> None:
    assert exit_of("running") is None
    assert exit_of("exit 0xC0000005") == ExitStatus(code=0xC0000005)
    assert exit_of("signal 9", 2) == ExitStatus(signal=9, oom_kills=2)
    assert exit_of("exit -9") == ExitStatus(signal=9)
    with pytest.raises(ValueError, match="exit must be"):
        exit_of("sometimes")


def test_a_context_with_a_wrong_value_names_the_key() -> None:
    with pytest.raises(ValueError, match="http_status"):
        evidence_of({"http_status": "many"}, exit_status=None)
    assert evidence_of({"new_key": 1}, exit_status=None) == Evidence()


def test_an_engine_that_dies_with_requests_is_not_idle_whatever_its_last_line_says() -> None:
    lines = ("srv  llama_server: model loaded", "srv  update_slots: all slots are idle")
    killed = Evidence(exit=ExitStatus(signal=9, oom_kills=1), log_lines=lines, milestone="decoding")
    assert diagnose(replace(killed, requests_in_flight=3)).stage is Stage.INFERENCE
    assert diagnose(replace(killed, requests_in_flight=0, milestone="ready")).stage is Stage.IDLE
