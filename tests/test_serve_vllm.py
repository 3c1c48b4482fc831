"""`kvguard serve` in front of real vLLM: names, answers, refusals, and the death of the engine core."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest

from backend_fixtures import engine_path, tiny_checkpoint
from serve_fixtures import GuardProcess, guard


def write_weights(folder: Path) -> Path:
    """Random Llama weights, in float32, for the checkpoint's own config."""
    config = json.loads((folder / "config.json").read_text())
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv_width = width // heads * kv_heads
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_width, width),
            "self_attn.v_proj": (kv_width, width), "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    values = np.random.default_rng(0).normal(0, 0.02, offset // 4).astype("<f4")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    return folder


pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardProcess]:
    python = engine_path("vllm-python")
    model = write_weights(tiny_checkpoint(tmp_path_factory.mktemp("vllm")))
    args = (str(model), "--backend", "vllm", "--vllm-python", python, "--batch", "4")
    with guard(*args, state_dir=tmp_path_factory.mktemp("state")) as process:
        process.until_ready()
        yield process


def test_it_answers_to_its_own_name_and_to_default(served: GuardProcess) -> None:
    client = served.client()
    models = {model.id: model for model in client.models.list()}
    assert "default" in models
    for name in models:
        answer = client.chat.completions.create(
            model=name, max_tokens=4, messages=[{"role": "user", "content": "hello"}]
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
    capacity = served.get("/guard/status")[1]["capacity"]
    assert models["default"].to_dict()["max_model_len"] == capacity["ctx_tokens"]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(served: GuardProcess) -> None:
    ctx_tokens = served.get("/guard/status")[1]["capacity"]["ctx_tokens"]
    with pytest.raises(openai.BadRequestError, match=str(ctx_tokens)):
        served.client().completions.create(model="default", prompt="hello", max_tokens=ctx_tokens)


def test_a_killed_engine_core_is_noticed_and_replaced(served: GuardProcess) -> None:
    """The API server may outlive its engine: that is a death, too."""
    [core] = [p for p in served.engine_pids() if "EngineCore" in " ".join(psutil.Process(p).cmdline())]
    os.kill(core, signal.SIGKILL)
    served.until_line("backend_died")
    answer = served.client(timeout=400).completions.create(model="default", prompt="hello", max_tokens=4)
    assert answer.usage is not None
    status = served.until(lambda s: s["state"] == "ready")
    assert status["generation"] == 2
    assert status["degraded_by"] == []


def test_nothing_that_was_asked_is_written(served: GuardProcess) -> None:
    served.client().completions.create(model="default", prompt="xyzzy-plugh-1729", max_tokens=2)
    assert "xyzzy" not in served.written() + served.output
