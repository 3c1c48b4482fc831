"""What a model's own files say of it, read without loading a weight.

Readers (GGUF, Hugging Face) fill ModelMeta; geometry and planner compute from it. Bytes are of the tensors
as stored, by their real types: a file's label ("Q4_K_M") is never believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvguard.domain import Variant


class ModelError(ValueError):
    """A model's files are missing, broken or of a kind that we do not know. The message is for a person."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration, else the whole."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config({"model_type": config.get("model_type"), **inner})
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One file of a model."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of the tensors, by the place that an engine gives them.

    input_bytes   token and position embeddings: llama.cpp keeps them in host memory
    layer_bytes   one number a layer, experts included
    expert_bytes  the experts' part of each layer
    output_bytes  final norm, output projection and the like
    tied_bytes    the token embedding, where it is the output projection too (no tensor of its own)
    skipped_bytes stored in the file but not loaded by default (multi-token prediction layers)
    """

    input_bytes: int = 0
    layer_bytes: tuple[int, ...] = ()
    expert_bytes: tuple[int, ...] = ()
    output_bytes: int = 0
    tied_bytes: int = 0
    skipped_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that are loaded; a tied embedding counts once."""
        return self.input_bytes + sum(self.layer_bytes) + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeta:
    """All that the accounts of a model need.

    form       a GGUF file, a checkpoint directory, or a sketch that no file exists of yet
    hparams    gguf: the metadata under `<architecture>.`, prefix removed; checkpoint: its text config
    quant      what the files hold, e.g. "Q4_K_M" or "awq"
    token_text_bytes  bytes of all tokens' text: what a loaded vocabulary costs grows with it
    """

    name: str
    form: Literal["gguf", "checkpoint", "sketch"]
    path: str
    architecture: str
    parameters: int
    weights: Weights
    n_ctx_train: int
    n_vocab: int
    n_layer: int
    n_embd: int
    hparams: Mapping[str, Any] = field(repr=False)
    files: tuple[ModelFile, ...] = ()
    header_hash: str = ""
    quant: str = ""
    tensor_types: tuple[tuple[str, int], ...] = ()  # (type, bytes), the largest first
    chat_template: str | None = field(default=None, repr=False)
    add_bos: bool | None = None
    token_text_bytes: int = 0
    merges: int = 0
    is_embedding: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def bits(self) -> float:
        """Mean bits a parameter."""
        stored = self.weights.total_bytes + self.weights.skipped_bytes
        return 8 * stored / self.parameters if self.parameters else 0.0

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)

    def variant(self) -> Variant:
        """This form of the weights, as a configuration names it."""
        kind: Literal["gguf", "checkpoint"] = "gguf" if self.form == "gguf" else "checkpoint"
        return Variant(
            kind=kind,
            source=self.path or self.name,
            bits=self.bits or 16.0,
            label=self.quant,
            size_bytes=self.size_bytes or self.weights.total_bytes,
        )
