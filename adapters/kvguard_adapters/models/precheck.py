"""Tell a format fault before minutes of loading, and a quantisation that did not take effect after it.

Before: what config.json declares, against the tensors in the safetensors headers and against what a backend
reads. After: declared bits against the memory that the weights were measured to take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvguard_adapters.models import quantised
from kvguard_adapters.models.safetensors import Tensor, read_header, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a backend reads. `min_capability`: compute capability x 10 that a method needs, where it tells."""

    backend: str
    methods: frozenset[str]
    min_capability: Mapping[str, int]


VLLM = Support(
    backend="vLLM",
    # vllm/model_executor/layers/quantization/__init__.py, 0.32; bitsandbytes and GGUF are built in no more
    methods=frozenset(
        {"awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "fp8", "fbgemm_fp8", "fp_quant"}
        | {"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "compressed-tensors", "quark"}
        | {"experts_int8", "moe_wna16", "torchao", "inc", "auto-round", "mxfp4", "gpt_oss_mxfp4", "humming"}
        | {"deepseek_v4_fp8"}
    ),
    min_capability={"awq": 75, "gptq": 60, "torchao": 75, "mxfp4": 80, "moe_wna16": 70},
)
LLAMA_CPP = Support(backend="llama.cpp", methods=frozenset(), min_capability={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a model will not load, or not as declared, in words for a person."""

    kind: Literal["mislabelled", "unsupported", "not_in_effect"]
    message: str


def check_folder(folder: Path, support: Support, *, capability: int | None = None) -> tuple[Fault, ...]:
    """Check a checkpoint directory. Raises: ModelError when it cannot be read."""
    section = quantised.quantisation(read_json(folder / "config.json"))
    tensors = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in read_header(path)[1]]
    return check_format(section, tensors, support, capability=capability)


def check_format(
    section: Mapping[str, Any], tensors: Iterable[Tensor], support: Support, *, capability: int | None = None
) -> tuple[Fault, ...]:
    """Check the quantisation section of a config.json against tensors and backend. No faults: it may load."""
    tensors = list(tensors)
    faults = [Fault(kind="mislabelled", message=said) for said in _mislabelled(section, tensors)]
    said = _unsupported(quantised.method(section), support, capability)
    if said:
        faults.append(Fault(kind="unsupported", message=said))
    return tuple(faults)


def _mislabelled(section: Mapping[str, Any], tensors: list[Tensor]) -> list[str]:
    said = quantised.mismatch(section, tensors)
    found = [said] if said else []
    name = quantised.method(section)
    by_suffix: dict[str, set[str]] = {}
    for tensor in tensors:
        by_suffix.setdefault(tensor.name.rpartition(".")[2], set()).add(tensor.dtype)
    if name == "awq" and "g_idx" in by_suffix:
        found.append("config.json says awq, but there are g_idx tensors: this is a GPTQ checkpoint")
    if name in ("awq", "gptq") and not by_suffix.get("qweight", {"I32"}) <= {"I32"}:
        found.append(f"config.json says {name}, but qweight is stored as {_listed(by_suffix['qweight'])}")
    if name == "fp8" and not said and not any(t.dtype.startswith("F8") for t in tensors):
        found.append(
            f"config.json says fp8, but no tensor is: weight is stored as {_listed(by_suffix.get('weight'))}"
        )
    return found


def _listed(dtypes: set[str] | None) -> str:
    return ", ".join(sorted(dtypes or {"nothing"}))


def _unsupported(method: str, support: Support, capability: int | None) -> str:
    if not support.methods:
        return f"{support.backend} reads GGUF files, no safetensors: convert the checkpoint, or take a GGUF"
    if not method:
        return ""
    if method not in support.methods:
        return f"{support.backend} does not read {method}: take one of {', '.join(sorted(support.methods))}"
    needed = support.min_capability.get(method, 0)
    if capability is not None and capability < needed:
        return f"{method} needs compute capability {needed / 10:.1f}, this card has {capability / 10:.1f}"
    return ""


_NEAR_16_BIT = 0.85
_CLEARLY_QUANTISED_BITS = 12.0


def check_in_effect(*, declared_bits: float, parameters: int, measured_bytes: int) -> Fault | None:
    """Compare what the weights take with what the declared quantisation promises.

    `declared_bits` is the mean over all weights, `measured_bytes` the weights as the engine reports them.
    """
    full_bytes = 2 * parameters
    if declared_bits > _CLEARLY_QUANTISED_BITS or measured_bytes < _NEAR_16_BIT * full_bytes:
        return None
    expected_bytes = parameters * declared_bits / 8
    return Fault(
        kind="not_in_effect",
        message=f"quantisation not in effect: {declared_bits:g} bits were declared "
        f"({expected_bytes / 2**30:.2f} GiB), the weights take {measured_bytes / 2**30:.2f} GiB, "
        f"as 16 bits would ({full_bytes / 2**30:.2f} GiB)",
    )
