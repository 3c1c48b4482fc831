"""Run real vLLM on tiny random models and print what it allocated. Runs in vLLM's own environment.

    python tests/vllm_tiny.py FAMILY FOLDER POOL_BYTES

writes FOLDER/config.json and prints one JSON line: blocks, tokens of a block, tokens of the pool.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **MOE},
    "mistral_window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 256,
    },
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 256},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 14,
        "sliding_window": 256,
        "query_pre_attn_scalar": 32,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 8,
        "head_dim": None,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        "num_hidden_layers": 6,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "block_dim": 256,
        "block_ff_dim": 512,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        **MOE,
    },
}


def config_of(family: str) -> dict[str, Any]:
    return {key: value for key, value in {**BASE, **FAMILIES[family]}.items() if value is not None}


def main() -> None:
    family, folder, pool_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(family)))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=pool_bytes,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    print(
        "RESULT "
        + json.dumps(
            {
                "blocks": cache.num_gpu_blocks,
                "block_tokens": cache.block_size,
                "pool_tokens": getattr(cache, "kv_cache_size_tokens", None),
                "in_flight_tokens": config.max_in_flight_tokens,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
