"""Format faults told before loading, and a quantisation that did not take effect, told after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvguard.model import ModelError
from kvguard_adapters.models.precheck import (
    LLAMA_CPP,
    VLLM,
    Fault,
    check_folder,
    check_format,
    check_in_effect,
)
from kvguard_adapters.models.safetensors import Tensor

WIDTHS = {"I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}


def tensor(name: str, dtype: str) -> Tensor:
    return Tensor(
        name=f"model.layers.0.mlp.{name}", dtype=dtype, elements=64, dims=1, size_bytes=64 * WIDTHS[dtype]
    )


def kinds(section: dict[str, Any], *tensors: Tensor, capability: int | None = None) -> list[str]:
    return [fault.kind for fault in check_format(section, tensors, VLLM, capability=capability)]


AWQ = (tensor("qweight", "I32"), tensor("qzeros", "I32"), tensor("scales", "F16"))
GPTQ = (*AWQ, tensor("g_idx", "I32"))
FP8 = (tensor("weight", "F8_E4M3"), tensor("weight_scale", "BF16"))
PLAIN = (tensor("weight", "BF16"),)
PACKED = (tensor("weight_packed", "I32"), tensor("weight_scale", "BF16"), tensor("weight_shape", "I32"))


@pytest.mark.parametrize(
    ("method", "tensors"),
    [("awq", AWQ), ("gptq", GPTQ), ("fp8", FP8), ("compressed-tensors", PACKED), ("compressed-tensors", FP8)],
)
def test_a_checkpoint_that_is_what_it_says_has_no_fault(method: str, tensors: tuple[Tensor, ...]) -> None:
    assert kinds({"quant_method": method}, *tensors) == []


def test_a_checkpoint_without_quantisation_has_no_fault() -> None:
    assert kinds({}, *PLAIN) == []


@pytest.mark.parametrize(
    ("section", "tensors"),
    [
        ({"quant_method": "awq"}, GPTQ),
        ({"quant_method": "gptq"}, AWQ),
        ({"quant_method": "gptq"}, PACKED),
        ({"quant_method": "awq"}, PLAIN),
        ({"quant_method": "fp8"}, PLAIN),
        ({"quant_method": "fp8"}, (tensor("weight", "BF16"), tensor("weight_scale", "BF16"))),
        ({"quant_method": "awq"}, (tensor("qweight", "F16"), tensor("scales", "F16"))),
        ({}, AWQ),
    ],
)
def test_a_label_that_the_tensors_contradict_is_told(
    section: dict[str, Any], tensors: tuple[Tensor, ...]
) -> None:
    assert "mislabelled" in kinds(section, *tensors)


def test_a_method_that_the_backend_does_not_read_is_told() -> None:
    section = {"quant_method": "bitsandbytes"}
    faults = check_format(section, (tensor("weight", "U8"), tensor("absmax", "U8")), VLLM)
    assert [fault.kind for fault in faults] == ["unsupported"]
    assert "vLLM does not read bitsandbytes" in faults[0].message


def test_a_card_that_cannot_compute_the_method_is_told() -> None:
    assert kinds({"quant_method": "awq"}, *AWQ, capability=70) == ["unsupported"]
    assert kinds({"quant_method": "awq"}, *AWQ, capability=80) == []


def test_llama_cpp_reads_no_safetensors() -> None:
    assert [fault.kind for fault in check_format({}, PLAIN, LLAMA_CPP)] == ["unsupported"]


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, int]]) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, elements) in tensors.items():
        size = elements * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(position))
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_is_read_from_its_headers(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"a.qweight": ("I32", 8), "a.g_idx": ("I32", 8), "a.scales": ("F16", 8)},
    )
    assert [fault.kind for fault in check_folder(tmp_path, VLLM)] == ["mislabelled"]


def test_a_folder_without_a_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        check_folder(tmp_path, VLLM)


def test_weights_near_their_16_bit_size_were_not_quantised() -> None:
    fault = check_in_effect(declared_bits=4.5, parameters=7_000_000_000, measured_bytes=13_800_000_000)
    assert isinstance(fault, Fault)
    assert fault.kind == "not_in_effect"
    assert "quantisation not in effect" in fault.message


@pytest.mark.parametrize(
    ("bits", "measured"), [(4.5, 4_200_000_000), (8.0, 7_300_000_000), (16.0, 14_000_000_000)]
)
def test_weights_as_small_as_declared_are_fine(bits: float, measured: int) -> None:
    assert check_in_effect(declared_bits=bits, parameters=7_000_000_000, measured_bytes=measured) is None
