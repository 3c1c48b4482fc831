"""Read a Hugging Face checkpoint directory: its configuration and the headers of its shards, no weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvguard.model import ModelError, ModelFile, ModelMeta, Weights, text_config
from kvguard_adapters.models import quantised
from kvguard_adapters.models.safetensors import Tensor, read_header, read_json

MAX_SHARDS = 2000
_LAYER = re.compile(r"\.(?:layers|h|blocks|layer|block)\.(\d+)\.")
_EXPERTS = (".experts.", "_experts.", ".experts_")
_TOWERS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|mm_projector|audio_tower"
    r"|embed_vision|embed_audio|vision_embed_tokens)\."
)
_EMBEDDINGS = re.compile(r"(?:embed_tokens|embed_in|wte|wpe|word_embeddings|tok_embeddings|embeddings)\.")
_FLOATS = ("F32", "F16", "BF16", "F64")
_DTYPE_BYTES = {"float32": 2, "float16": 2, "bfloat16": 2, "float64": 2}  # vLLM runs float32 as 16 bit


def read_checkpoint(folder: str | Path) -> ModelMeta:
    """Read a directory with config.json and safetensors. Raises: ModelError."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    text = text_config(config)
    paths = _shards(folder)
    digest = hashlib.sha256()
    tensors: list[Tensor] = []
    for path in paths:
        raw, found = read_header(path)
        digest.update(raw)
        tensors += found
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise ModelError(f"{folder}: a tensor appears in two shards")
    section = quantised.quantisation(config)
    bits = quantised.weight_bits(section)
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    if not 0 < layers < 10_000:
        raise ModelError(f"{folder}/config.json: num_hidden_layers is {layers}")
    warning = quantised.mismatch(section, tensors)
    types: dict[str, int] = {}
    for tensor in tensors:
        types[tensor.dtype] = types.get(tensor.dtype, 0) + tensor.size_bytes
    return ModelMeta(
        name=folder.resolve().name,
        form="checkpoint",
        path=str(folder),
        architecture=str(text.get("model_type") or config.get("model_type") or ""),
        parameters=sum(quantised.logical_elements(tensor, bits, names) for tensor in tensors),
        weights=weigh(tensors, n_layer=layers, dtype_bytes=_dtype_bytes(config), tied=_tied(config, text)),
        n_ctx_train=_number(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        n_vocab=_number(text, "vocab_size"),
        n_layer=layers,
        n_embd=_number(text, "hidden_size", "n_embd", "d_model"),
        hparams={**config, "text_config": text} if text is not config else config,
        files=tuple(ModelFile(path=str(path), size_bytes=path.stat().st_size) for path in paths),
        header_hash=digest.hexdigest(),
        quant=quantised.method(section) or str(config.get("dtype") or config.get("torch_dtype") or ""),
        tensor_types=tuple(sorted(types.items(), key=lambda item: -item[1])),
        chat_template=_chat_template(folder),
        is_embedding=_is_embedding(config),
        warnings=(warning,) if warning else (),
    )


def weigh(tensors: list[Tensor], *, n_layer: int, dtype_bytes: int, tied: bool) -> Weights:
    """Sort tensors by place, with the bytes that they take in vLLM: floats in the model's own type."""
    layers, experts = [0] * n_layer, [0] * n_layer
    input_bytes = output_bytes = skipped_bytes = 0
    for tensor in tensors:
        size = runtime_bytes(tensor, dtype_bytes)
        in_layer = _LAYER.search(tensor.name)
        # nearly all tensors are these, and a large model has a hundred thousand
        in_text = tensor.name.startswith("model.layers.")
        if not in_text and _TOWERS.search(tensor.name):
            output_bytes += size
        elif tensor.name.startswith("mtp.") or (in_layer and int(in_layer[1]) >= n_layer):
            skipped_bytes += size
        elif in_layer:
            layers[int(in_layer[1])] += size
            if any(part in tensor.name for part in _EXPERTS):
                experts[int(in_layer[1])] += size
        elif _EMBEDDINGS.search(tensor.name):
            input_bytes += size
        elif tied and tensor.name.endswith("lm_head.weight"):
            skipped_bytes += size
        else:
            output_bytes += size
    return Weights(
        input_bytes=input_bytes,
        layer_bytes=tuple(layers),
        expert_bytes=tuple(experts),
        output_bytes=output_bytes,
        skipped_bytes=skipped_bytes,
    )


def runtime_bytes(tensor: Tensor, dtype_bytes: int) -> int:
    """Bytes in memory: an unquantised float is converted to the model's type, all else stays as it is."""
    if tensor.dtype in _FLOATS and not quantised.is_helper(tensor.name):
        return tensor.elements * dtype_bytes
    return tensor.size_bytes


def _shards(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else all safetensors files but duplicates."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(folder, index)
    single = folder / "model.safetensors"
    found = [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith("consolidated")]
    paths = [single] if single.is_file() else found
    if not paths:
        raise ModelError(f"{folder}: no safetensors files in this directory")
    return paths


def _indexed(folder: Path, index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index}: no weight_map of tensor names to files")
    files = sorted(set(names.values()))
    if len(files) > MAX_SHARDS:
        raise ModelError(f"{index}: {len(files)} shards")
    outside = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise ModelError(f"{index}: {outside[0][:80]!r} is no safetensors file of this directory")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(files)} shards are missing, first {missing[0]}")
    return [folder / name for name in files]


def _number(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return max(value, 0)
    return 0


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    name = config.get("dtype") or config.get("torch_dtype")
    return _DTYPE_BYTES.get(str(name), 2)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _is_embedding(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    return any("ForSequenceClassification" in str(name) or str(name).endswith("Model") for name in names)


def _chat_template(folder: Path) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file() and jinja.stat().st_size < 1 << 20:
        return jinja.read_text(errors="replace")
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None
