"""A small real Llama whose answers have any length that one wants: a prompt's last token decides it.

Token k is followed by token k + 1 and the last one ends the answer, so a prompt that ends in token
`LAST - n` is answered with n tokens, whatever `max_tokens` a client asks for. Embeddings are random signs,
and the output matrix holds the embedding of k in row k + 1; attention and feed-forward are computed in full
and multiplied by nothing. Every token has a text of its own, so that text can be tokenized again.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_gguf import byte_tokens

VOCAB, BYTES = 4096, 256
LAST = VOCAB - 1
LONGEST = LAST - BYTES
EMBD, HEADS, KV_HEADS, HEAD_DIM, FF, CTX = 512, 8, 4, 64, 1536, 8192
KV_BYTES_PER_TOKEN_LAYER = 2 * KV_HEADS * HEAD_DIM * 2


def prompt_for(prompt_tokens: int, length: int, rng: random.Random) -> list[int]:
    """Random tokens, then the one that is followed by an answer of `length` tokens, its end included."""
    if not 1 <= length <= LONGEST:
        raise ValueError(f"an answer has 1 to {LONGEST} tokens, not {length}")
    return [*rng.choices(range(BYTES), k=max(0, prompt_tokens - 1)), LAST - length]


def texts() -> list[str]:
    return [*byte_tokens(), *(f"t{token:x};" for token in range(BYTES, LAST)), "<end>"]


def _tensors(layers: int) -> dict[str, Any]:
    """By the names of Hugging Face; rows are outputs."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(0.0, 0.02, size=shape).astype(np.float16)

    embedding = rng.choice(np.array([-1, 1], dtype=np.float16), size=(VOCAB, EMBD))
    ones = np.ones(EMBD, dtype=np.float32)
    found = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": np.roll(embedding, 1, axis=0),
        "model.norm.weight": ones,
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        found |= {
            f"{at}input_layernorm.weight": ones,
            f"{at}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, EMBD),
            f"{at}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, EMBD),
            f"{at}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, EMBD),
            f"{at}self_attn.o_proj.weight": np.zeros((EMBD, HEADS * HEAD_DIM), dtype=np.float16),
            f"{at}post_attention_layernorm.weight": ones,
            f"{at}mlp.gate_proj.weight": normal(FF, EMBD),
            f"{at}mlp.up_proj.weight": normal(FF, EMBD),
            f"{at}mlp.down_proj.weight": np.zeros((EMBD, FF), dtype=np.float16),
        }
    return found


GGUF_NAMES = (
    ("model.embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm"),
    ("model.layers.", "blk."), ("input_layernorm", "attn_norm"), ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)  # fmt: skip


def write_gguf(path: Path, *, layers: int) -> Path:
    """Write it for llama.cpp."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("chain")
    for key, value in {
        "context_length": CTX, "embedding_length": EMBD, "block_count": layers, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCAB,
        "rope.dimension_count": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts())
    kinds = [TokenType.NORMAL] * BYTES + [TokenType.USER_DEFINED] * (LAST - BYTES) + [TokenType.CONTROL]
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(LAST)
    writer.add_eos_token_id(LAST)
    writer.add_add_bos_token(False)
    for name, tensor in _tensors(layers).items():
        for theirs, ours in GGUF_NAMES:
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_checkpoint(folder: Path, *, layers: int) -> Path:
    """Write it for vLLM."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": EMBD, "intermediate_size": FF, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": CTX, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": LAST, "eos_token_id": LAST,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = texts()
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": token, "content": words[token], "special": token == LAST, **plain}
        for token in range(BYTES, VOCAB)
    ]
    model = {"type": "BPE", "vocab": {word: token for token, word in enumerate(words)}, "merges": []}
    tokenizer = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": model,
    }  # fmt: skip
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<end>", "eos_token": "<end>"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    _write_safetensors(folder / "model.safetensors", _tensors(layers))
    return folder


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    kinds = {"float16": "F16", "float32": "F32"}
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": kinds[str(tensor.dtype)], "shape": tensor.shape, "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)
