"""Tiny random GGUF models that real llama.cpp loads: a Llama to chat with, and one of each architecture.

`write_tiny_llama` has a working byte-level tokenizer and a chat template. `write_tiny(path, architecture)`
takes what it writes from data/tiny_archs.json, which make_tiny_archs.py found by asking llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MULTIPLIED = re.compile(
    r"(token_embd|output|attn_(q|k|v|qkv|output|[qk]v?_[ab]\w*)|ffn_\w*(gate|up|down)\w*)\.weight$"
)
MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "r e", "a t", "e n", "o r", "Ġ the", "in g", "an d")
ARCHS_FILE = Path(__file__).parent / "data" / "tiny_archs.json"
VOCAB = 320


def byte_tokens() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + n) for n, byte in enumerate(hidden)})
    return [table[byte] for byte in range(256)]


def vocabulary(size: int) -> list[str]:
    """Bytes, merges and specials, then fillers up to `size`."""
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
    return tokens + [f"<|filler_{n}|>" for n in range(size - len(tokens))]


def add_tokenizer(writer: GGUFWriter, size: int) -> None:
    tokens = vocabulary(size)
    specials = len(byte_tokens()) + len(MERGES)
    kinds = [TokenType.NORMAL if n < specials else TokenType.CONTROL for n in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(specials)
    writer.add_eos_token_id(specials + 3)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Any:
    """A small random tensor as llama.cpp stores it; `shape` in GGML's order, the row length first."""
    values = rng.normal(0.0, 0.1, size=shape[::-1]).astype(np.float32)
    return values if kind == "F32" else quantize(values, GGMLQuantizationType[kind])


def add_tensor(
    writer: GGUFWriter, rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str
) -> None:
    """Only what is multiplied by is quantised: llama.cpp wants norms, biases and state parameters in F32."""
    if name.endswith("tid2eid.weight"):  # a table of token ids, not of weights
        writer.add_tensor(name, np.zeros(shape[::-1], dtype=np.int32))
        return
    block = {"F32": 1, "F16": 1, "BF16": 1}.get(kind, 32 if "_K" not in kind else 256)
    multiplied = MULTIPLIED.search(name) is not None and len(shape) > 1 and shape[0] % block == 0
    kind = kind if multiplied else "F32"
    writer.add_tensor(name, random_tensor(rng, shape, kind), raw_dtype=GGMLQuantizationType[kind])


def write(
    path: Path,
    architecture: str,
    hparams: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    vocab: int,
    kind: str = "F16",
    seed: int = 0,
    name: str = "tiny",
    endian: GGUFEndian = GGUFEndian.LITTLE,
    split_max_tensors: int = 0,
) -> Path:
    """Write one GGUF; `hparams` are keys without the architecture's prefix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture, endianess=endian, split_max_tensors=split_max_tensors)
    writer.add_name(name)
    for key, value in hparams.items():
        add_value(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, vocab)
    rng = np.random.default_rng(seed)
    for tensor, shape in tensors.items():
        add_tensor(writer, rng, tensor, tuple(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value[0], bool | float):
        writer.add_array(key, value)
    else:  # the writer would take int32, and llama.cpp wants its arrays unsigned or signed 32 bit
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.INT32)


def write_tiny_llama(
    path: str | Path,
    *,
    layers: int = 2,
    embd: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ff: int = 128,
    ctx: int = 4096,
    vocab: int = 320,
    tied: bool = False,
    kind: str = "F16",
    seed: int = 0,
    name: str = "tiny-llama",
    endian: GGUFEndian = GGUFEndian.LITTLE,
    split_max_tensors: int = 0,
) -> Path:
    """Write a random Llama that llama-server loads, tokenizes, chats and streams with (nonsense).

    About 0.3 MB as it is; larger shapes make a model that takes memory for real. Returns the path (of a
    split file, the path of which the shards' names are made).
    """
    hparams = {
        "context_length": ctx,
        "embedding_length": embd,
        "block_count": layers,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
        "vocab_size": vocab,
    }
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (embd, vocab), "output_norm.weight": (embd,)}
    if not tied:
        tensors["output.weight"] = (embd, vocab)
    for i in range(layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": (embd,),
            f"blk.{i}.attn_q.weight": (embd, heads * head_dim),
            f"blk.{i}.attn_k.weight": (embd, kv_heads * head_dim),
            f"blk.{i}.attn_v.weight": (embd, kv_heads * head_dim),
            f"blk.{i}.attn_output.weight": (heads * head_dim, embd),
            f"blk.{i}.ffn_norm.weight": (embd,),
            f"blk.{i}.ffn_gate.weight": (embd, ff),
            f"blk.{i}.ffn_up.weight": (embd, ff),
            f"blk.{i}.ffn_down.weight": (ff, embd),
        }
    return write(
        Path(path),
        "llama",
        hparams,
        tensors,
        vocab=vocab,
        kind=kind,
        seed=seed,
        name=name,
        endian=endian,
        split_max_tensors=split_max_tensors,
    )


def architectures() -> dict[str, dict[str, Any]]:
    """Hyperparameters and tensors of every architecture that `write_tiny` can write."""
    found: dict[str, dict[str, Any]] = json.loads(ARCHS_FILE.read_text())
    return found


def tensors_of(spec: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Spell out `blk.*.` (every layer) and `blk.0,2.` (these layers)."""
    tensors: dict[str, tuple[int, ...]] = {}
    for pattern, shape in spec["tensors"].items():
        layered = re.match(r"blk\.([*\d,]+)\.(.+)$", pattern)
        if layered is None:
            tensors[pattern] = tuple(shape)
            continue
        every = range(spec["hparams"]["block_count"])
        layers = every if layered[1] == "*" else [int(n) for n in layered[1].split(",")]
        tensors |= {f"blk.{i}.{layered[2]}": tuple(shape) for i in layers}
    return tensors


def write_tiny(path: str | Path, architecture: str, *, kind: str = "F16", **hparams: Any) -> Path:
    """Write a tiny model of an architecture; `hparams` replace single ones, `__` for `.` in their keys."""
    spec = architectures()[architecture]
    changed = {key.replace("__", "."): value for key, value in hparams.items()}
    return write(
        Path(path), architecture, {**spec["hparams"], **changed}, tensors_of(spec), vocab=VOCAB, kind=kind
    )
