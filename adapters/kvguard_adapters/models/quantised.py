"""What the tensors of a quantised checkpoint stand for: logical parameters, and whether its label is true.

Packed tensors hold several parameters an element; scales and zero points hold none. Schemes: AWQ, GPTQ, FP8,
compressed-tensors, ModelOpt (NVFP4), MXFP4 and bitsandbytes, by the names that each one gives its tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvguard_adapters.models.safetensors import DTYPE_BITS, Tensor

_HELPERS = (
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".input_global_scale",
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".SCB",
    "_scales",
)
_PACKED_32 = (".qweight", ".weight_packed")  # I32: 32 / bits parameters an element


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantisation section of a config.json, wherever its scheme puts it; empty without one."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, Mapping) and found:
                return found
    return {}


def method(section: Mapping[str, Any]) -> str:
    """The scheme's name as vLLM normalises it."""
    producer = section.get("producer")
    name = str(section.get("quant_method") or "").lower()
    if not name and isinstance(producer, Mapping):
        name = str(producer.get("name") or "").lower()
    return name.replace("compressed_tensors", "compressed-tensors")


def weight_bits(section: Mapping[str, Any]) -> int:
    """Bits of a packed weight; 4 where the section does not tell, as nearly all are."""
    for key in ("bits", "w_bit"):
        if isinstance(section.get(key), int):
            return int(section[key])
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    return 4


def is_helper(name: str) -> bool:
    """True for scales, zero points and the like: bytes without parameters."""
    return name.endswith(_HELPERS) or ".quant_state." in name or ".nested_" in name


def logical_elements(tensor: Tensor, bits: int, names: Collection[str]) -> int:
    """Parameters that a tensor stands for."""
    if is_helper(tensor.name):
        return 0
    if tensor.dtype not in ("I32", "U8"):
        return tensor.elements
    if tensor.name.endswith(_PACKED_32):
        return tensor.elements * DTYPE_BITS[tensor.dtype] // bits
    half_bytes = (
        tensor.name.endswith("_blocks")
        or tensor.name + ".absmax" in names
        or tensor.name.removesuffix(".weight") + ".weight_scale_2" in names
    )
    return tensor.elements * 2 if half_bytes else tensor.elements


def mismatch(section: Mapping[str, Any], tensors: Iterable[Tensor]) -> str:
    """Say how label and tensors disagree, in words; empty where they agree.

    A checkpoint that is mislabelled is found here, before an engine fails on it.
    """
    name = method(section)
    suffixes = {_suffix(tensor.name) for tensor in tensors}
    packed = suffixes & {"qweight", "weight_packed", "absmax", "SCB"} or {
        suffix for suffix in suffixes if suffix.endswith("_blocks")
    }
    scaled = suffixes & {"weight_scale", "weight_scale_inv", "scales"}
    if not name:
        return f"the tensors are quantised ({', '.join(sorted(packed))}), config.json names no method" * bool(
            packed
        )
    needs = {
        "gptq": {"qweight", "g_idx"},
        "awq": {"qweight"},
        "bitsandbytes": {"absmax", "SCB"},
    }.get(name, set())
    if needs and not (needs <= suffixes if name != "bitsandbytes" else needs & suffixes):
        return f"config.json says {name}, but there is no {' or '.join(sorted(needs - suffixes))} tensor"
    if name in ("fp8", "compressed-tensors", "modelopt") and not (scaled or packed):
        return f"config.json says {name}, but no tensor has a scale: the weights are not quantised"
    return ""


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
