"""vLLM's adapter: its environment, arguments, log lines of several versions, and its Prometheus page."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvguard.domain import GIB, MIB, Endpoint, Knobs, PoolKind, Rung, Variant
from kvguard.ports import BackendError, ProtocolError
from kvguard_adapters.backends import Options, memory_share
from kvguard_adapters.backends.vllm import Vllm
from kvguard_adapters.backends.vllm_engine import VllmEngine, pool_of
from kvguard_adapters.backends.vllm_log import VllmLogFilter, measured, milestone, printed_sizes
from kvguard_adapters.backends.vllm_python import VllmPython, find_vllm

KNOBS = Knobs(
    batch=8,
    ctx_tokens=4096,
    pool_tokens=16384,
    pool_kind=PoolKind.UNIFIED,
    quant=Variant(kind="checkpoint", source="/models/m", bits=16, size_bytes=16 * GIB),
    prefill_tokens=2048,
)
FLAGS = [
    ["--model"], ["--served-model-name"], ["--max-num-seqs"], ["--max-num-batched-tokens"],
    ["--max-model-len"], ["--kv-cache-dtype"], ["--quantization", "-q"], ["--cpu-offload-gb"],
    ["--kv-cache-memory-bytes", "--kv-cache-memory"], ["--gpu-memory-utilization"],
    ["--enable-log-requests", "--no-enable-log-requests"],
]  # fmt: skip


class Answers:
    """An interpreter that says what a real one would, kept where the adapter keeps its answers."""

    def __init__(self, cache: Path, flags: list[list[str]] = FLAGS, methods: tuple[str, ...] = ()) -> None:
        self.python = VllmPython(
            path="/venv/bin/python", distribution="vllm", version="0.32.0", entry="server"
        )
        kept = self.python._kept_at()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"flags": flags, "kv_types": ["auto", "fp8"], "quantisations": methods}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def vllm(cache: Path, options: Options | None = None, **more: Any) -> Vllm:
    return Vllm(Answers(cache, **more).python, options)


def arguments(backend: Vllm, knobs: Knobs) -> dict[str, str]:
    words = backend.launch(knobs, port=8123, api_key="key").argv
    return {word: words[i + 1] if i + 1 < len(words) else "" for i, word in enumerate(words)}


# ---------------------------------------------------------------- arguments


def test_knobs_become_arguments_and_the_key_goes_by_the_environment(cache: Path) -> None:
    backend = vllm(cache, Options(model_name="m", pool_bytes=lambda knobs: knobs.pool_tokens * 1024))
    launch = backend.launch(KNOBS, port=8123, api_key="key")
    given = arguments(backend, KNOBS)
    assert given["--max-num-seqs"] == "8"
    assert given["--max-model-len"] == "4096"
    assert given["--max-num-batched-tokens"] == "2048"
    assert given["--kv-cache-memory-bytes"] == str(16384 * 1024)
    assert given["--model"] == "/models/m"
    assert "--kv-cache-dtype" not in given
    assert "--gpu-memory-utilization" not in given
    assert dict(launch.env)["VLLM_API_KEY"] == "key"
    assert "key" not in launch.argv


def test_a_pool_of_unknown_bytes_becomes_a_share_of_the_card(cache: Path) -> None:
    given = arguments(vllm(cache, Options(memory_share=0.61)), KNOBS)
    assert given["--gpu-memory-utilization"] == "0.61"


def test_an_older_cpu_build_is_told_by_its_environment(cache: Path) -> None:
    flags = [names for names in FLAGS if "--kv-cache-memory-bytes" not in names]
    backend = vllm(cache, Options(pool_bytes=lambda knobs: GIB + 1), flags=flags)
    launch = backend.launch(KNOBS, port=8123, api_key="")
    assert dict(launch.env)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_API_KEY" not in dict(launch.env)


def test_layers_that_leave_the_card_become_gigabytes(cache: Path) -> None:
    backend = vllm(cache, Options(layers=32, layer_bytes=400 * MIB))
    assert arguments(backend, replace(KNOBS, gpu_layers=29))["--cpu-offload-gb"] == "1.18"
    assert "--cpu-offload-gb" not in arguments(backend, replace(KNOBS, gpu_layers=-1))
    assert "--cpu-offload-gb" not in arguments(backend, replace(KNOBS, gpu_layers=32))


def test_more_sequences_than_prefill_tokens_still_start(cache: Path) -> None:
    assert arguments(vllm(cache), replace(KNOBS, prefill_tokens=4))["--max-num-batched-tokens"] == "8"


def test_the_users_share_of_the_card_pins_the_pool(cache: Path) -> None:
    options = Options(extra_args=("--gpu-memory-utilization=0.5",), pool_bytes=lambda knobs: 1, min_ctx=1024)
    backend = vllm(cache, options)
    assert backend.pinned == {"pool_tokens"}
    assert "--kv-cache-memory-bytes" not in arguments(backend, KNOBS)
    assert backend.next_steps(KNOBS, Rung.CTX) == ()


def test_a_flag_by_another_spelling_pins_it_too(cache: Path) -> None:
    assert vllm(cache, Options(extra_args=("-q", "fp8"))).pinned == {"quant"}


def test_a_16_bit_checkpoint_is_quantised_while_loading_by_what_the_version_has(cache: Path) -> None:
    options = Options(model_path="/models/m", layers=33)
    (step,) = vllm(cache, options, methods=("awq", "fp8_per_tensor")).next_steps(KNOBS, Rung.QUANT)
    assert (step.quant.kind, step.quant.source, step.quant.size_bytes) == (
        "on_the_fly",
        "fp8_per_tensor",
        8 * GIB,
    )
    given = arguments(vllm(cache, options), step)
    assert given["--quantization"] == "fp8_per_tensor"
    assert given["--model"] == "/models/m"


@pytest.mark.parametrize("methods", [(), ("awq", "gptq")])
def test_without_such_a_method_there_is_no_step(cache: Path, methods: tuple[str, ...]) -> None:
    options = Options(model_path="/models/m", layers=33)
    assert not vllm(cache, options, methods=methods).next_steps(KNOBS, Rung.QUANT)


def test_without_a_gpu_there_are_no_kernels_for_it(cache: Path) -> None:
    backend = vllm(cache, Options(model_path="/models/m"), methods=("fp8_per_tensor",))
    assert not backend.next_steps(KNOBS, Rung.QUANT)


def test_memory_share_is_of_the_total_and_never_more_than_is_free() -> None:
    assert memory_share(80 * GIB, 40 * GIB, 8 * GIB) == 0.4
    assert memory_share(80 * GIB, 4 * GIB, 8 * GIB) == 0.0
    assert memory_share(3, 2, 0) == 0.666


# ---------------------------------------------------------------- its environment


def venv(folder: Path, script: str) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return folder


def test_a_venv_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = venv(tmp_path / "env", """echo noise; echo '["vllm-cpu", "0.32.0", "server"]'""")
    found = find_vllm(str(folder))
    assert (found.distribution, found.version) == ("vllm-cpu", "0.32.0")
    assert found.server() == (str(folder / "bin" / "python"), "-m", "server")
    assert Vllm.version(Vllm(Answers(tmp_path).python)) == "vllm 0.32.0"


def test_the_python_of_the_script_on_path_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = venv(tmp_path / "env", """echo '["vllm", "0.31.0", ""]'""")
    script = folder / "bin" / "vllm"
    script.write_text(f"#!{folder}/bin/python\nimport vllm\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    found = find_vllm()
    assert found.path == str(folder / "bin" / "python")
    assert found.server()[-1] == "serve"


def test_no_vllm_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"no vLLM in .*python.*: name .*--vllm-python PATH"):
        find_vllm(sys.executable)
    with pytest.raises(BackendError, match="neither a python nor a virtual environment"):
        find_vllm(str(tmp_path / "nowhere"))


def test_a_broken_vllm_says_why_and_a_working_one_is_asked_once(tmp_path: Path) -> None:
    broken = venv(tmp_path / "broken", "echo ImportError: libcuda >&2; exit 1")
    python = VllmPython(path=str(broken / "bin/python"), distribution="vllm", version="1", entry="")
    with pytest.raises(BackendError, match="ImportError: libcuda"):
        python.abilities()
    counting = venv(
        tmp_path / "good",
        f"echo asked >> {tmp_path}/asked\n"
        """echo '{"flags": [["--x"]], "kv_types": [], "quantisations": []}'""",
    )
    python = VllmPython(path=str(counting / "bin/python"), distribution="vllm", version="1", entry="")
    assert python.abilities() == python.abilities()
    assert (tmp_path / "asked").read_text() == "asked\n"


# ---------------------------------------------------------------- its log

ONE_LINE = (
    "INFO 12-01 [kv_cache_utils.py:2327] GPU KV cache size: 43,680 tokens, "
    "Maximum concurrency for 32,768 tokens per request: 1.33x"
)
TWO_LINES = [
    "INFO 06-01 [kv_cache_utils.py:634] GPU KV cache size: 43,680 tokens",
    "INFO 06-01 [kv_cache_utils.py:637] Maximum concurrency for 32,768 tokens per request: 1.33x",
]
GPU_LOG = [
    "INFO [api_utils.py:286] non-default args: {'max_num_seqs': 64, 'model': '/m'}",
    "INFO [gpu_model_runner.py:1] Starting to load model /m...",
    "INFO [gpu_model_runner.py:2] Model loading took 14.96 GiB memory and 12.345678 seconds",
    "INFO [gpu_worker.py:3] Available KV cache memory: 10.00 GiB",
    ONE_LINE,
    "INFO [gpu_model_runner.py:4] Graph capturing finished in 20 secs, took 0.50 GiB",
    "INFO [core.py:5] init engine (profile, create kv cache, warmup model) took 60.00 s",
    "INFO:     Application startup complete.",
]


@pytest.mark.parametrize("lines", [[ONE_LINE], TWO_LINES])
def test_the_pool_is_read_in_both_formats(lines: list[str]) -> None:
    assert printed_sizes(lines).pool_tokens == 43_680


def test_milestones_of_a_gpu_start() -> None:
    names = [name for line in GPU_LOG if (name := milestone(line))]
    assert list(dict.fromkeys(names)) == [
        "weights_loading",
        "weights_loaded",
        "kv_allocated",
        "warmup",
        "ready",
    ]


def test_accounts_of_a_gpu_start() -> None:
    accounts = measured(GPU_LOG)
    assert accounts is not None
    assert accounts.weights_bytes == round(14.96 * GIB)
    assert accounts.kv_bytes == 10 * GIB
    assert accounts.overhead_bytes == GIB // 2
    assert printed_sizes(GPU_LOG).sequences == 64


def test_bytes_that_were_given_are_exact() -> None:
    accounts = measured(["non-default args: {'kv_cache_memory_bytes': 12845056}", *GPU_LOG[3:4]])
    assert accounts is not None
    assert accounts.kv_bytes == 12_845_056


def test_while_it_serves_only_fixed_words_and_the_heads_of_others_are_shown() -> None:
    log_filter = VllmLogFilter()
    head = "(EngineCore pid=7) ERROR 12-01 05:09:00 [core.py:402]"
    assert log_filter(f"{head} anything while loading") == f"{head} anything while loading"
    assert log_filter("INFO:     Application startup complete.")
    stats = (
        "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 4.5 tokens/s, "
        "Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%"
    )
    loggers = "(APIServer pid=7) INFO 12-01 05:09:00 [loggers.py:1]"
    assert log_filter(f"{loggers} {stats}") == f"{loggers} {stats}"
    fatal = "EngineCore encountered a fatal error."
    assert log_filter(f"{head} {fatal}") == f"{head} {fatal}"
    assert log_filter(f"{head} Invalid grammar: secret") == f"{head} ..."
    assert log_filter('INFO:     127.0.0.1:1 - "POST /v1/secret HTTP/1.1" 404 Not Found') is None
    assert log_filter("secret") is None
    cuda = f"{head} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. secret"
    assert log_filter(cuda) == f"{head} torch.OutOfMemoryError: CUDA out of memory."


# ---------------------------------------------------------------- its Prometheus page

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1600",num_gpu_blocks="100"} 1.0
"""


class Replies:
    def __init__(self, page: str) -> None:
        self.page = page

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 1024}, {"id": "lora"}]})


@pytest.fixture
async def replies() -> AsyncIterator[tuple[Replies, VllmEngine]]:
    server = Replies(PAGE)
    app = web.Application()
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = VllmEngine(Endpoint(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield server, engine
    await engine.close()
    await runner.cleanup()


def test_the_null_block_is_not_usable() -> None:
    assert pool_of(PAGE) == (1584, 16)
    assert pool_of("") == (0, 1)


async def test_a_sample_adds_up_the_replicas(replies: tuple[Replies, VllmEngine]) -> None:
    sample = await replies[1].sample()
    assert (sample.running, sample.waiting, sample.preemptions_total) == (5, 4, 7)
    assert sample.kv_used_tokens == 792


async def test_capacity_from_the_page_and_the_model_list(replies: tuple[Replies, VllmEngine]) -> None:
    capacity = await replies[1].capacity(KNOBS, GPU_LOG)
    assert (capacity.pool_tokens, capacity.block_tokens, capacity.ctx_tokens) == (1584, 16, 1024)
    assert (capacity.sequences, capacity.overflow) == (64, "preempts")


async def test_without_the_page_the_log_tells_and_without_both_it_is_an_error(
    replies: tuple[Replies, VllmEngine],
) -> None:
    replies[0].page = ""
    assert (await replies[1].capacity(KNOBS, [ONE_LINE])).pool_tokens == 43_680
    with pytest.raises(ProtocolError, match="KV cache"):
        await replies[1].capacity(KNOBS, ())
