"""Accounts before there is a file: a model by its number of parameters, and a card by what it could carry."""

from __future__ import annotations

import re
from typing import Any

from kvguard.model import ModelError, ModelMeta, Weights

PARAMETERS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

# Bytes of a parameter with room for scales, zero points and embeddings that stay unquantised (about 10 %)
LOOSE_BYTES = {16: 2.0, 8: 1.1, 4: 0.6}
# What files of these formats really hold a weight, scales included (ggml block sizes)
REAL_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5}


def parse_parameters(text: str) -> int:
    """Read "27B", "270M" or a plain number. Raises: ModelError naming the text."""
    match = PARAMETERS.match(text)
    if match is None or float(match[1]) == 0:
        raise ModelError(f"{text!r} is no number of parameters: write e.g. 27B, 1.5B or 270M")
    return round(float(match[1]) * _SCALES[match[2].lower()])


def weight_bytes(parameters: int, bits: float) -> int:
    """Bytes of the weights alone at a nominal width: a floor, since real formats add scales."""
    return round(parameters * bits / 8)


def most_parameters(usable_bytes: int) -> dict[int, int]:
    """The most parameters that a card carries, by bits: a loose bound, weights and nothing else."""
    return {bits: int(usable_bytes / each) for bits, each in LOOSE_BYTES.items()}


def sketch(
    parameters: int,
    bits: float,
    *,
    layers: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    ctx_train: int = 0,
) -> ModelMeta:
    """A model that no file exists of yet. Without its three shapes it has no KV account.

    Raises: ModelError where only some of the shapes are given.
    """
    given = [bool(layers), bool(kv_heads), bool(head_dim)]
    if any(given) and not all(given):
        raise ModelError("the KV account needs --layers, --kv-heads and --head-dim together")
    size = weight_bytes(parameters, bits)
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers or 1,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": kv_heads * head_dim,
        "max_position_embeddings": ctx_train,
    }
    return ModelMeta(
        name=f"{parameters / 1e9:g}B at {bits:g} bit",
        form="sketch",
        path="",
        architecture="llama",
        parameters=parameters,
        weights=Weights(layer_bytes=(size,), expert_bytes=(0,)),
        n_ctx_train=ctx_train,
        n_vocab=0,
        n_layer=layers or 1,
        n_embd=0,
        hparams=config,
        quant=f"{bits:g} bit",
    )
