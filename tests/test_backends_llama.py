"""llama.cpp's adapters: flags of different versions, log lines, next steps, polls, infill."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import tiny_gguf
from backend_fixtures import KEY, MODEL_NAME, EngineProcess, engine_path, free_port, llama_knobs, running
from kvguard.domain import MIB, Endpoint, Knobs, PoolKind, Rung, Variant
from kvguard.ports import BackendError, NotReady, ProtocolError
from kvguard_adapters.backends import Options, find_backend
from kvguard_adapters.backends.embedded import Embedded
from kvguard_adapters.backends.flags import Flags, Option
from kvguard_adapters.backends.llama_engine import LlamaEngine
from kvguard_adapters.backends.llama_log import LlamaLogFilter, measured, printed_sizes
from kvguard_adapters.backends.llama_params import host_caches, llama_params
from kvguard_adapters.backends.llama_server import LlamaServer
from kvguard_adapters.backends.steps import next_steps

KNOBS = llama_knobs("/models/m.gguf")

NEW_HELP = """
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-np,   --parallel N                     number of server slots
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer (default: enabled if --parallel is auto)
--kv-unified-per-slot N                 context limit per parallel slot
-lm,   --load-mode MODE                 model loading mode
-a,    --alias STRING                   set model name aliases
"""
OLD_HELP = """
-c,    --ctx-size N                     size of the prompt context
-np,   --parallel N                     number of parallel sequences to decode (default: 1)
--no-mmap                               do not memory-map model
"""
OPTIONS = (
    Option(knob="batch", alternatives=(("-np", "4"),)),
    Option(knob="pool_tokens", alternatives=(("-c", "8192"),)),
    Option(knob="ctx_tokens", alternatives=(("--kv-unified-per-slot", "2048"),)),
    Option(knob="", alternatives=(("--load-mode", "none"), ("--no-mmap",))),
)


# ---------------------------------------------------------------- flags


def test_flags_are_spelled_as_the_version_knows_them() -> None:
    new = Flags.of_help(NEW_HELP).arguments(OPTIONS, ())
    assert new == ["-np", "4", "-c", "8192", "--kv-unified-per-slot", "2048", "--load-mode", "none"]
    assert Flags.of_help(OLD_HELP).arguments(OPTIONS, ()) == ["-np", "4", "-c", "8192", "--no-mmap"]


@pytest.mark.parametrize("extra", [("--parallel", "8"), ("-np", "8"), ("--parallel=8",)])
def test_a_flag_of_the_user_wins_under_any_spelling_and_pins_its_knob(extra: tuple[str, ...]) -> None:
    flags = Flags.of_help(NEW_HELP)
    pinned = flags.pinned(OPTIONS, extra)
    assert pinned == {"batch"}
    assert "-np" not in flags.arguments(OPTIONS, extra, pinned)
    assert "-c" in flags.arguments(OPTIONS, extra, pinned)


def test_a_description_that_names_another_flag_is_not_a_spelling() -> None:
    assert Flags.of_help(NEW_HELP).pinned(OPTIONS, ("--kv-unified",)) == frozenset()


# ---------------------------------------------------------------- parameters


def test_unified_pool_carries_the_context_of_a_slot() -> None:
    params = llama_params(KNOBS, Options())
    assert (params.n_ctx, params.kv_unified, params.kv_unified_per_slot) == (3072, True, 2048)


def test_split_pool_is_batch_times_context() -> None:
    params = llama_params(replace(KNOBS, pool_kind=PoolKind.SPLIT, batch=3, pool_tokens=6144), Options())
    assert (params.n_ctx, params.kv_unified, params.kv_unified_per_slot) == (6144, False, 0)


def test_kv_type_may_name_keys_and_values_apart() -> None:
    params = llama_params(replace(KNOBS, kv_type="q8_0/q4_0"), Options())
    assert (params.cache_type_k, params.cache_type_v) == ("q8_0", "q4_0")


def test_a_small_micro_batch_leaves_the_logical_batch_alone() -> None:
    params = llama_params(replace(KNOBS, prefill_tokens=32), Options())
    assert (params.n_ubatch, params.n_batch) == (32, 512)


@given(cache=st.integers(0, 1 << 34), batch=st.integers(1, 64), checkpoint=st.integers(0, 1 << 29))
def test_host_caches_never_exceed_their_bound(cache: int, batch: int, checkpoint: int) -> None:
    ram_mib, checkpoints = host_caches(replace(KNOBS, batch=batch, host_cache_bytes=cache), checkpoint)
    assert ram_mib * MIB + checkpoints * batch * checkpoint <= cache
    assert 0 <= checkpoints <= 32


def test_no_room_means_no_cache_and_no_checkpoints() -> None:
    assert host_caches(replace(KNOBS, host_cache_bytes=0), 5 * MIB) == (0, 0)


# ---------------------------------------------------------------- steps

VARIANTS = tuple(Variant(kind="gguf", source=name, bits=bits) for name, bits in (("q2", 2.6), ("q4", 4.8)))


def test_batch_halves_with_the_pool_and_then_the_micro_batch() -> None:
    knobs = replace(KNOBS, batch=4, ctx_tokens=2048, pool_tokens=8192, prefill_tokens=128)
    steps = next_steps(knobs, Rung.BATCH, Options(), frozenset())
    assert [(s.batch, s.pool_tokens, s.prefill_tokens) for s in steps] == [
        (2, 4096, 128),
        (1, 2048, 128),
        (1, 2048, 64),
        (1, 2048, 32),
    ]


def test_context_halves_to_the_least_with_the_pool() -> None:
    knobs = replace(KNOBS, batch=2, ctx_tokens=8192, pool_tokens=12288)
    steps = next_steps(knobs, Rung.CTX, Options(min_ctx=3000), frozenset())
    assert [(s.ctx_tokens, s.pool_tokens) for s in steps] == [(4096, 6144), (3000, 4500)]


def test_quant_takes_smaller_variants_largest_first() -> None:
    steps = next_steps(KNOBS, Rung.QUANT, Options(variants=VARIANTS), frozenset())
    assert [step.quant.source for step in steps] == ["q4", "q2"]


def test_layers_leave_the_card_one_by_one() -> None:
    steps = next_steps(replace(KNOBS, gpu_layers=-1), Rung.GPU_LAYERS, Options(layers=3), frozenset())
    assert [step.gpu_layers for step in steps] == [2, 1, 0]
    assert next_steps(KNOBS, Rung.GPU_LAYERS, Options(), frozenset()) == ()


@pytest.mark.parametrize("pinned", ["ctx_tokens", "pool_tokens"])
def test_a_pinned_knob_has_no_steps(pinned: str) -> None:
    knobs = replace(KNOBS, ctx_tokens=8192, pool_tokens=16384)
    assert next_steps(knobs, Rung.CTX, Options(), frozenset({pinned})) == ()


@given(
    batch=st.integers(1, 64),
    ctx=st.integers(256, 1 << 17),
    share=st.floats(1.0, 64.0),
    kind=st.sampled_from(PoolKind),
    least=st.integers(1, 4096),
)
def test_every_step_is_a_valid_smaller_configuration(
    batch: int, ctx: int, share: float, kind: PoolKind, least: int
) -> None:
    pool = batch * ctx if kind is PoolKind.SPLIT else int(ctx * share)
    knobs = replace(KNOBS, batch=batch, ctx_tokens=ctx, pool_tokens=pool, pool_kind=kind)
    for rung in (Rung.BATCH, Rung.CTX):
        before = knobs
        for step in next_steps(knobs, rung, Options(min_ctx=least), frozenset()):
            assert step != before
            assert step.pool_tokens <= before.pool_tokens
            assert step.ctx_tokens >= min(least, ctx)
            before = step


# ---------------------------------------------------------------- the log

GPU_LOG = """
0.00.100.000 I llama_context: constructing llama_context
0.00.100.001 I llama_context: n_ctx                 = 131072
0.00.100.002 I llama_kv_cache:      CUDA0 KV buffer size =     0.00 MiB
0.00.100.003 I sched_reserve:      CUDA0 compute buffer size =   900.00 MiB
0.00.200.000 I load_tensors: offloaded 19/19 layers to GPU
0.00.200.001 I load_tensors:   CPU_Mapped model buffer size =   100.00 MiB
0.00.200.002 I load_tensors:        CUDA0 model buffer size =   200.50 MiB
0.00.300.000 I llama_context: constructing llama_context
0.00.300.001 I llama_context: n_ctx                 = 8192
0.00.300.002 I llama_context: n_batch               = 512
0.00.300.003 I llama_context:  CUDA_Host  output buffer size =     4.00 MiB
0.00.300.004 I llama_kv_cache:      CUDA0 KV buffer size =    24.00 MiB
0.00.300.005 I llama_kv_cache:      CUDA0 KV buffer size =    60.00 MiB
0.00.300.006 I sched_reserve:      CUDA0 compute buffer size =    28.00 MiB
0.00.300.007 I sched_reserve:  CUDA_Host compute buffer size =     2.00 MiB
0.00.300.008 I sched_reserve:      CUDA0 compute buffer size =    30.00 MiB
0.00.400.000 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 2048, kv_unified = 'true'
""".splitlines()


def test_buffers_are_told_by_device_and_those_of_a_dry_context_are_left_out() -> None:
    accounts = measured(GPU_LOG)
    assert accounts is not None
    assert accounts.weights_bytes == int(200.5 * MIB)
    assert accounts.kv_bytes == 84 * MIB
    assert accounts.overhead_bytes == 30 * MIB
    assert accounts.host_bytes == 106 * MIB


def test_sizes_are_those_of_the_context_that_serves() -> None:
    sizes = printed_sizes(
        [*GPU_LOG, "llama_context: constructing llama_context", "llama_context: n_ctx = 512"]
    )
    assert (sizes.n_ctx, sizes.n_batch, sizes.slots, sizes.slot_ctx) == (8192, 512, 4, 2048)
    assert sizes.unified is True


def test_a_log_without_memory_lines_measures_nothing() -> None:
    assert measured(["srv llama_server: listening on http://127.0.0.1:1"]) is None
    assert printed_sizes([]).n_ctx == 0


SHOWN_WHILE_SERVING = [
    "decode: failed to find a memory slot for batch of size 512",
    "srv    send_error: task id = 7, error: Context size has been exceeded.",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 921.00 MiB on device 0: cudaMalloc failed: "
    "out of memory",
    "slot      release: id  3 | task 2 | stop processing: n_tokens = 32, truncated = 0",
]
HIDDEN_WHILE_SERVING = [
    "slot      release: id  3 | task 2 | stop processing: n_tokens = 32, truncated = 0 secret words",
    "I load: secret words",
    "secret words",
    "terminate called after throwing an instance of 'secret words'",
]


@pytest.mark.parametrize("prefix", ["", "0.01.337.147 I "])
def test_while_it_serves_only_fixed_words_and_numbers_are_shown(prefix: str) -> None:
    log_filter = LlamaLogFilter()
    assert log_filter("0.00.003.783 I srv  init_listene: api_keys: ****krit") is None
    assert log_filter("0.00.731.434 I print_info: general.name = Gemma") == "print_info: general.name = Gemma"
    assert log_filter("0.01.059.222 I srv  llama_server: listening on http://127.0.0.1:1")
    for line in SHOWN_WHILE_SERVING:
        assert log_filter(prefix + line) == line
    for line in HIDDEN_WHILE_SERVING:
        assert log_filter(prefix + line) is None


def test_an_error_is_cut_before_what_it_quotes() -> None:
    log_filter = LlamaLogFilter()
    log_filter("srv  llama_server: listening on http://127.0.0.1:1")
    quoting = 'srv    operator(): got exception: {"error":{"code":500,"message":"last read: secret"}}'
    assert log_filter(quoting) == 'srv    operator(): got exception: {"error":{"code":500 ...'
    assert (
        log_filter("/src/ggml/src/ggml.c:123: GGML_ASSERT(secret) failed") == "/src/ggml/src/ggml.c:123 ..."
    )


# ---------------------------------------------------------------- finding an engine


def executable(path: Path, script: str) -> Path:
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_server_on_path_comes_before_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(find_backend(), Embedded)
    executable(tmp_path / "llama-server", f"#!/bin/sh\n/bin/cat <<'END'\n{OLD_HELP}\nEND\n")
    found = find_backend()
    assert isinstance(found, LlamaServer)
    assert found.binary == str(tmp_path / "llama-server")


def test_an_old_server_is_not_given_flags_that_it_does_not_have(tmp_path: Path) -> None:
    server = executable(tmp_path / "old-server", f"#!/bin/sh\n/bin/cat <<'END'\n{OLD_HELP}\nEND\n")
    launch = LlamaServer(str(server)).launch(KNOBS, port=8123, api_key=KEY)
    assert launch.argv == (
        str(server), "-np", "2", "-c", "3072", "--no-mmap", "--host", "127.0.0.1", "--port", "8123",
    )  # fmt: skip
    assert dict(launch.env) == {"LLAMA_API_KEY": KEY}


def test_what_is_no_engine_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="--llama-server PATH"):
        find_backend("llama-server", llama_server=str(tmp_path / "nowhere"))
    with pytest.raises(BackendError, match="exit 3, no such library"):
        LlamaServer(str(executable(tmp_path / "bad", "#!/bin/sh\necho no such library >&2\nexit 3\n")))
    with pytest.raises(BackendError, match="does not name one"):
        LlamaServer(str(executable(tmp_path / "other", "#!/bin/sh\necho hello\n"))).version()
    with pytest.raises(BackendError, match="--llama-cpp-python PATH"):
        find_backend("llama-cpp-python", llama_cpp_python=str(tmp_path / "nowhere"))
    with pytest.raises(BackendError, match="http://HOST:PORT"):
        find_backend("attach", attach="localhost:8080")
    with pytest.raises(BackendError, match="--backend llama-server"):
        find_backend("embedded", Options(extra_args=("--swa-full",)))


# ---------------------------------------------------------------- polls


class SlowSlots:
    """A server whose `/slots` waits until it is let go, as behind a long decode batch."""

    def __init__(self) -> None:
        self.asked = 0
        self.came = asyncio.Event()
        self.release = asyncio.Event()

    async def slots(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.came.set()
        await self.release.wait()
        return web.json_response([{"id": 0, "is_processing": True, "n_prompt_tokens": 9}, {"id": 1}])

    async def no_slots(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": 501}}, status=501)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="llamacpp:requests_processing 2\nllamacpp:requests_deferred 5\n")


@pytest.fixture
async def slow() -> AsyncIterator[tuple[SlowSlots, str]]:
    server = SlowSlots()
    app = web.Application()
    app.router.add_get("/slots", server.slots)
    app.router.add_get("/off/slots", server.no_slots)
    app.router.add_get("/off/metrics", server.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    server.release.set()
    await runner.cleanup()


async def test_polls_never_overlap_even_when_a_caller_gives_up(slow: tuple[SlowSlots, str]) -> None:
    server, url = slow
    engine = LlamaEngine(Endpoint(base_url=url))
    first = asyncio.create_task(engine.sample())
    await server.came.wait()
    first.cancel()
    others = [asyncio.create_task(engine.sample()) for _ in range(5)]
    await asyncio.sleep(0)
    server.release.set()
    samples = await asyncio.gather(*others)
    assert server.asked == 1
    assert {sample.busy_slots for sample in samples} == {frozenset({0})}
    assert samples[0].kv_used_tokens == 9
    await engine.close()


async def test_without_slots_the_metrics_tell(slow: tuple[SlowSlots, str]) -> None:
    engine = LlamaEngine(Endpoint(base_url=slow[1] + "/off"))
    sample = await engine.sample()
    assert (sample.running, sample.waiting, sample.busy_slots) == (2, 5, None)
    await engine.close()


async def test_what_is_not_understood_is_a_protocol_error_and_what_is_not_there_not_ready(
    slow: tuple[SlowSlots, str],
) -> None:
    engine = LlamaEngine(Endpoint(base_url=slow[1]))
    with pytest.raises(ProtocolError, match="HTTP 404"):
        await engine.model_names()
    await engine.close()
    nobody = LlamaEngine(Endpoint(base_url="http://127.0.0.1:9"))
    with pytest.raises(NotReady):
        await nobody.sample()
    await nobody.close()


# ---------------------------------------------------------------- real engine, special models


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A model that knows fill-in-the-middle, on a server with a small batch."""
    specials = tiny_gguf.SPECIALS
    tiny_gguf.SPECIALS = (*specials, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    try:
        model = tiny_gguf.write_tiny_llama(tmp_path_factory.mktemp("coder") / "coder.gguf", ctx=4096)
    finally:
        tiny_gguf.SPECIALS = specials
    backend = LlamaServer(engine_path("llama-server"), Options(model_name=MODEL_NAME))
    with running(backend, llama_knobs(model)) as started:
        yield started


INFILLS: list[dict[str, Any]] = [
    {"input_prefix": "def f(x):\n", "input_suffix": "\n    return y\n"},
    {"input_prefix": "a " * 900, "input_suffix": "b " * 900},
    {"input_prefix": "", "input_suffix": "", "prompt": "    y = "},
    {
        "input_prefix": "import os\n",
        "input_suffix": "",
        "prompt": "x",
        "input_extra": [{"filename": "lib.py", "text": "def g():\n    pass\n"}, {"text": "z " * 1200}],
    },
]


@pytest.mark.engine
@pytest.mark.parametrize("body", INFILLS)
async def test_infill_count_is_what_the_engine_prefills(coder: EngineProcess, body: dict[str, Any]) -> None:
    engine = coder.backend.connect(coder.endpoint)
    await engine.capacity(coder.knobs, coder.lines)
    answer = await post(coder, "/infill", {**body, "n_predict": 1})
    assert await engine.count_tokens("/infill", body) == prompt_tokens(answer)
    await engine.close()


def prompt_tokens(answer: dict[str, Any]) -> int:
    """As each of the server's dialects reports them."""
    usage = answer.get("usage") or {}
    if "input_tokens" in usage:
        return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))
    return int(usage["prompt_tokens"] if usage else answer["tokens_evaluated"])


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "What is it?"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "max_tokens": 1}),
    ("/chat/completions", {"messages": [USER, {"role": "assistant", "content": "It is"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "What is it?", "instructions": "Be short.", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": [USER], "system": "Be short.", "max_tokens": 1}),
    ("/v1/completions", {"prompt": [5, "mixed", 7], "max_tokens": 1}),
    ("/completion", {"prompt": {"prompt_string": "in an object"}, "n_predict": 1}),
]


async def post(started: EngineProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(started.endpoint.base_url + path, json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer  # type: ignore[no-any-return]


@pytest.mark.engine
@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
async def test_every_dialect_is_counted_as_the_engine_does(
    coder: EngineProcess, path: str, body: dict[str, Any]
) -> None:
    engine = coder.backend.connect(coder.endpoint)
    assert await engine.count_tokens(path, body) == prompt_tokens(await post(coder, path, body))
    await engine.close()


@pytest.mark.engine
def test_layers_on_a_card_are_told_apart_from_those_in_host_memory(tmp_path: Path, rpc_card: str) -> None:
    model = tiny_gguf.write_tiny_llama(tmp_path / "tiny.gguf", layers=4, embd=128, ff=512, ctx=4096)
    options = Options(model_name=MODEL_NAME, extra_args=("--rpc", rpc_card), layers=5)
    backend = LlamaServer(engine_path("llama-server"), options)
    knobs = llama_knobs(model, gpu_layers=-1)
    fewer = backend.next_steps(knobs, Rung.GPU_LAYERS)[1]
    accounts = []
    for each in (knobs, fewer):
        with running(backend, each) as started:
            accounts.append(backend.measured(started.lines))
    whole, part = accounts
    assert whole is not None
    assert part is not None
    assert fewer.gpu_layers == 3
    assert whole.weights_bytes > part.weights_bytes > 0
    assert whole.kv_bytes > part.kv_bytes > 0
    assert part.host_bytes > whole.host_bytes > 0


@pytest.fixture
def rpc_card() -> Iterator[str]:
    """A device that is another process, as a GPU is: it has its own buffers."""
    port = free_port()
    command = [engine_path("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not listens(port):
                assert server.poll() is None
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.engine
async def test_an_embedding_server_takes_what_fits_its_micro_batch(tmp_path: Path) -> None:
    model = tiny_gguf.write_tiny_llama(tmp_path / "tiny.gguf", ctx=4096)
    options = Options(model_name=MODEL_NAME, embedding=True, extra_args=("--pooling", "mean"))
    backend = LlamaServer(engine_path("llama-server"), options)
    with running(backend, llama_knobs(model)) as started:
        engine = backend.connect(started.endpoint)
        capacity = await engine.capacity(started.knobs, started.lines)
        assert capacity.ctx_tokens == started.knobs.prefill_tokens
        for given in ("a text", [1, 2, 3]):
            answer = await post(started, "/v1/embeddings", {"input": given})
            assert await engine.count_tokens("/v1/embeddings", {"input": given}) == prompt_tokens(answer)
        assert await engine.count_tokens("/v1/embeddings", {"input": ["a", "abc def"]}) == 8
        await post(started, "/v1/embeddings", {"input": list(range(capacity.ctx_tokens))})
        with pytest.raises(AssertionError, match="too large"):
            await post(started, "/v1/embeddings", {"input": [1] * (capacity.ctx_tokens + 1)})
        await engine.close()


@pytest.mark.engine
def test_pinned_flags_reach_the_real_server_unchanged(tmp_path: Path) -> None:
    model = tiny_gguf.write_tiny_llama(tmp_path / "tiny.gguf", ctx=4096)
    options = Options(model_name=MODEL_NAME, extra_args=("-np", "3", "--cache-ram", "7"))
    backend = LlamaServer(engine_path("llama-server"), options)
    assert backend.pinned == {"batch", "host_cache_bytes"}
    assert backend.next_steps(replace(KNOBS, batch=8), Rung.BATCH)[0].batch == 8

    async def slots(started: EngineProcess) -> int:
        engine = backend.connect(started.endpoint)
        capacity = await engine.capacity(started.knobs, started.lines)
        await engine.close()
        return capacity.sequences

    knobs: Knobs = llama_knobs(model)
    with running(backend, knobs) as started:
        assert asyncio.run(slots(started)) == 3
        assert any("size limit: 7 MiB" in line for line in started.lines)
