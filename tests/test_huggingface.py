"""Reading checkpoint directories: sizes, logical parameters, labels that lie, hostile headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvguard.model import ModelError
from kvguard_adapters.models.huggingface import read_checkpoint
from kvguard_adapters.models.safetensors import DTYPE_BITS, read_header

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 128,
    "dtype": "bfloat16",
}
Shape = tuple[int, ...]
EMBEDDING: dict[str, tuple[str, Shape]] = {"model.embed_tokens.weight": ("BF16", (128, 64))}


def safetensors(path: Path, tensors: dict[str, tuple[str, Shape]]) -> Path:
    """Write a file with these types and shapes, data all zero."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for length in shape:
            elements *= length
        size = elements * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))
    return path


def checkpoint(folder: Path, tensors: dict[str, tuple[str, Shape]], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    safetensors(folder / "model.safetensors", tensors)
    return folder


LINEAR = "model.layers.0.mlp.up_proj"
SCHEMES: dict[str, tuple[dict[str, tuple[str, Shape]], dict[str, Any], int]] = {
    # 64 x 128 parameters in one layer, as each scheme stores them
    "bf16": ({f"{LINEAR}.weight": ("BF16", (128, 64))}, {}, 8192),
    "awq": (
        {
            f"{LINEAR}.qweight": ("I32", (64, 16)),
            f"{LINEAR}.qzeros": ("I32", (1, 16)),
            f"{LINEAR}.scales": ("F16", (1, 128)),
        },
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}},
        8192,
    ),
    "gptq": (
        {
            f"{LINEAR}.qweight": ("I32", (16, 128)),
            f"{LINEAR}.qzeros": ("I32", (1, 32)),
            f"{LINEAR}.scales": ("F16", (1, 128)),
            f"{LINEAR}.g_idx": ("I32", (64,)),
        },
        {"quantization_config": {"quant_method": "gptq", "bits": 8}},
        8192,
    ),
    "fp8": (
        {
            f"{LINEAR}.weight": ("F8_E4M3", (128, 64)),
            f"{LINEAR}.weight_scale_inv": ("F32", (1, 1)),
        },
        {"quantization_config": {"quant_method": "fp8"}},
        8192,
    ),
    "compressed-tensors": (
        {
            f"{LINEAR}.weight_packed": ("I32", (128, 8)),
            f"{LINEAR}.weight_scale": ("BF16", (128, 1)),
            f"{LINEAR}.weight_shape": ("I64", (2,)),
        },
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            }
        },
        8192,
    ),
    "nvfp4": (
        {
            f"{LINEAR}.weight": ("U8", (128, 32)),
            f"{LINEAR}.weight_scale": ("F8_E4M3", (128, 4)),
            f"{LINEAR}.weight_scale_2": ("F32", ()),
        },
        {"quantization_config": {"quant_method": "modelopt"}},
        8192,
    ),
    "mxfp4": (
        {
            "model.layers.0.mlp.experts.up_proj_blocks": ("U8", (2, 64, 2, 16)),
            "model.layers.0.mlp.experts.up_proj_scales": ("U8", (2, 64, 2)),
        },
        {"quantization_config": {"quant_method": "mxfp4"}},
        8192,
    ),
    "bitsandbytes": (
        {
            f"{LINEAR}.weight": ("U8", (4096, 1)),
            f"{LINEAR}.weight.absmax": ("F32", (128,)),
            f"{LINEAR}.weight.quant_map": ("F32", (16,)),
            f"{LINEAR}.weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
        },
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        8192,
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_gives_its_logical_parameters_and_every_byte(tmp_path: Path, scheme: str) -> None:
    tensors, config, parameters = SCHEMES[scheme]
    meta = read_checkpoint(checkpoint(tmp_path / "m", {**EMBEDDING, **tensors}, **config))
    assert meta.parameters == parameters + 128 * 64
    _, stored = read_header(tmp_path / "m" / "model.safetensors")
    assert meta.weights.total_bytes == sum(t.size_bytes for t in stored)
    assert meta.weights.layer_bytes[0] == meta.weights.total_bytes - 128 * 64 * 2
    assert meta.warnings == ()
    if scheme != "bf16":
        assert meta.quant == config["quantization_config"]["quant_method"]


@pytest.mark.parametrize(
    ("stored", "claimed", "words"),
    [
        ("awq", None, "names no method"),
        ("mxfp4", None, "names no method"),
        ("bitsandbytes", None, "names no method"),
        ("awq", "gptq", "no g_idx"),
        ("bf16", "awq", "no qweight"),
        ("bf16", "fp8", "not quantised"),
        ("bf16", "compressed-tensors", "not quantised"),
    ],
)
def test_a_label_that_lies_is_found_before_any_launch(
    tmp_path: Path, stored: str, claimed: str | None, words: str
) -> None:
    config = {"quantization_config": {"quant_method": claimed}} if claimed else {}
    meta = read_checkpoint(checkpoint(tmp_path / "m", {**EMBEDDING, **SCHEMES[stored][0]}, **config))
    assert len(meta.warnings) == 1
    assert words in meta.warnings[0]


def test_float32_weights_count_as_the_16_bit_that_run(tmp_path: Path) -> None:
    tensors = {f"{LINEAR}.weight": ("F32", (128, 64))}
    meta = read_checkpoint(checkpoint(tmp_path / "m", tensors, dtype="float32"))
    assert meta.weights.total_bytes == 128 * 64 * 2


def test_experts_towers_and_heads_go_to_their_places(tmp_path: Path) -> None:
    tensors = {
        **EMBEDDING,
        "model.layers.1.mlp.experts.0.up_proj.weight": ("BF16", (4, 4)),
        "model.layers.1.self_attn.q_proj.weight": ("BF16", (8, 4)),
        "model.layers.2.mtp_block.weight": ("BF16", (16, 4)),
        "visual.blocks.0.attn.weight": ("BF16", (32, 4)),
        "lm_head.weight": ("BF16", (128, 64)),
    }
    untied = read_checkpoint(checkpoint(tmp_path / "m", tensors))
    assert untied.weights.expert_bytes == (0, 32)
    assert untied.weights.layer_bytes == (0, 96)
    assert untied.weights.skipped_bytes == 128
    assert untied.weights.output_bytes == 256 + 128 * 64 * 2
    tied = read_checkpoint(checkpoint(tmp_path / "m", tensors, tie_word_embeddings=True))
    assert tied.weights.output_bytes == 256


def test_a_multimodal_configuration_is_read_through_its_text_part(tmp_path: Path) -> None:
    inner = {key: CONFIG[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    outer = {
        "model_type": "some_vlm",
        "text_config": {**inner, "model_type": "qwen3", "num_hidden_layers": 5},
    }
    meta = read_checkpoint(checkpoint(tmp_path / "m", EMBEDDING, **outer))
    assert (meta.n_layer, meta.architecture) == (5, "qwen3")


def test_the_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", EMBEDDING)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert read_checkpoint(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert read_checkpoint(folder).chat_template == "new"


def sharded(folder: Path, shards: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": shards}))
    names = {}
    for n in range(shards):
        file, name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors", f"model.layers.{n}.w.weight"
        safetensors(folder / file, {name: ("BF16", (4, 4))})
        names[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_an_index_of_a_hundred_shards(tmp_path: Path) -> None:
    meta = read_checkpoint(sharded(tmp_path / "m", 100))
    assert meta.weights.layer_bytes == (32,) * 100
    assert len(meta.files) == 100


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", 2)
    safetensors(folder / "consolidated.safetensors", {"tok": ("BF16", (1000,))})
    assert read_checkpoint(folder).weights.total_bytes == 64
    (folder / "model.safetensors.index.json").unlink()
    assert read_checkpoint(folder).weights.total_bytes == 64


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 3 shards are missing, first model-00002"):
        read_checkpoint(folder)


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin"])
def test_an_index_cannot_point_outside(tmp_path: Path, place: str) -> None:
    folder = sharded(tmp_path / "m", 1)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(ModelError, match="no safetensors file of this directory"):
        read_checkpoint(folder)


def raw_header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "claims"),
        (b"\x01\x02", "claims"),
        (raw_header(b"{}", length=1 << 60), "claims"),
        (raw_header(b"{}", length=99), "claims"),
        (raw_header(b"nonsense"), "not valid"),
        (raw_header(b"[1]"), "not valid"),
        (raw_header(b"[" * 5000), "not valid"),
        (raw_header(b'{"w": 3}'), "not valid"),
        (raw_header(entry(dtype="Q99"), data=bytes(4)), "unknown type"),
        (raw_header(entry(offsets=(4, 0)), data=bytes(4)), "lies at"),
        (raw_header(entry(offsets=(-4, 0)), data=bytes(4)), "lies at"),
        (raw_header(entry(offsets=(0, 1 << 62)), data=bytes(4)), "truncated"),
        (raw_header(entry(shape=(2,)), data=bytes(4)), "not those of its shape"),
        (raw_header(entry(shape=(1 << 62, 1 << 62)), data=bytes(4)), "not those of its shape"),
        (raw_header(entry(shape=(-1,)), data=bytes(4)), "shape"),
        (raw_header(entry(shape=[1] * 1000), data=bytes(4)), "shape"),
        (raw_header(entry()[:-1] + b"," + entry()[1:], data=bytes(4)), "twice"),
        (raw_header(entry()[:-1] + b"," + entry().replace(b'"w"', b'"v"')[1:], data=bytes(4)), "overlap"),
    ],
)
def test_a_hostile_safetensors_header_gets_a_clear_error(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_header(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "object is needed"),
        (b'{"num_hidden_layers": 1e99}', "num_hidden_layers"),
        (b'{"num_hidden_layers": -4}', "num_hidden_layers"),
        (b"{}", "num_hidden_layers"),
    ],
)
def test_a_broken_configuration_gets_a_clear_error(tmp_path: Path, config: bytes, words: str) -> None:
    folder = checkpoint(tmp_path / "m", EMBEDDING)
    (folder / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match=words):
        read_checkpoint(folder)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", EMBEDDING)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        read_checkpoint(folder)
    with pytest.raises(ModelError, match="No such file"):
        read_checkpoint(tmp_path / "nowhere")
