"""KV bytes of known models, the traps of both engines, and what must hold for every geometry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.domain import GIB, MIB, Basis
from kvguard.geometry import (
    GeometryError,
    LlamaSettings,
    VllmSettings,
    gguf_geometry,
    hf_geometry,
    kv_bytes,
    kv_parts,
    llama_price,
    vllm_price,
)
from kvguard.geometry.gguf_rules import KNOWN
from kvguard.geometry.llama_cpp import KV_TYPES, cells, checkpoint_bytes
from kvguard.geometry.shapes import Geometry
from kvguard.geometry.vllm import (
    block_bytes,
    block_tokens,
    capacity_tokens,
    groups,
    pool_bytes,
    request_blocks,
)
from tiny_gguf import architectures


def gguf(
    architecture: str, layers: int, heads: int, kv_heads: int | list[int], head_dim: int, **more: Any
) -> Geometry:
    """A geometry from the keys that its GGUF would have; `__` stands for `.`."""
    hparams = {
        "block_count": layers,
        "context_length": 131_072,
        "embedding_length": heads * head_dim,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return gguf_geometry(architecture, hparams)


def hf(model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> Geometry:
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        "max_position_embeddings": 131_072,
    }
    return hf_geometry({**config, **more})


MLA_GGUF = {
    "attention__key_length_mla": 192,
    "attention__value_length_mla": 128,
    "attention__value_length": 512,
}
QWEN3_NEXT = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 4096,
    "ssm__state_size": 128,
    "ssm__group_count": 16,
    "ssm__time_step_rank": 32,
}
GEMMA3_27B = gguf("gemma3", 62, 32, 16, 128, attention__sliding_window=1024)
GPT_OSS_20B = gguf("gpt-oss", 24, 64, 8, 64, attention__sliding_window=128)
LLAMA_8B = gguf("llama", 32, 32, 8, 128)

# name, geometry in llama.cpp, bytes a token while no window is full, and once all are
KNOWN_MODELS: list[tuple[str, Geometry, int, int]] = [
    ("Llama-2-7B", gguf("llama", 32, 32, 32, 128), 524_288, 524_288),
    ("Llama-3.1-8B", LLAMA_8B, 131_072, 131_072),
    ("Llama-3.3-70B", gguf("llama", 80, 64, 8, 128), 327_680, 327_680),
    ("Mistral-Small-3.1-24B", gguf("llama", 40, 32, 8, 128), 163_840, 163_840),
    ("Qwen3-8B", gguf("qwen3", 36, 32, 8, 128), 147_456, 147_456),
    ("Qwen3-32B", gguf("qwen3", 64, 64, 8, 128), 262_144, 262_144),
    ("Qwen3-30B-A3B", gguf("qwen3moe", 48, 32, 4, 128), 98_304, 98_304),
    ("Phi-4-14B", gguf("phi3", 40, 40, 10, 128, attention__sliding_window=2048), 204_800, 204_800),
    ("GLM-4.5", gguf("glm4moe", 93, 96, 8, 128, nextn_predict_layers=1), 376_832, 376_832),
    ("Gemma-3-12B", gguf("gemma3", 48, 16, 8, 256, attention__sliding_window=1024), 393_216, 65_536),
    ("Gemma-3-27B", GEMMA3_27B, 507_904, 81_920),
    ("gpt-oss-20b", GPT_OSS_20B, 49_152, 24_576),
    ("gpt-oss-120b", gguf("gpt-oss", 36, 64, 8, 64, attention__sliding_window=128), 73_728, 36_864),
    ("Llama-4-Scout", gguf("llama4", 48, 40, 8, 128), 196_608, 49_152),
    ("DeepSeek-V3", gguf("deepseek2", 61, 128, 1, 576, **MLA_GGUF), 70_272, 70_272),
    ("Qwen3-Next-80B", gguf("qwen3next", 48, 16, 2, 256, **QWEN3_NEXT), 24_576, 24_576),
    ("a 60-layer example", gguf("llama", 60, 64, 8, 128), 245_760, 245_760),
]


@pytest.mark.parametrize(("name", "geometry", "full", "marginal"), KNOWN_MODELS)
def test_bytes_a_token_of_known_models_on_llama_cpp(
    name: str, geometry: Geometry, full: int, marginal: int
) -> None:
    price = llama_price(geometry, LlamaSettings(ctx_tokens=0))
    assert (price.full_bytes_per_token, price.marginal_bytes_per_token) == (full, marginal)
    assert geometry.basis is Basis.EXACT


MLA_HF = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GDN_HF = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (hf("llama", 32, 32, 8, 128), 131_072),
        (hf("mistral", 32, 32, 8, 128), 131_072),
        (hf("phi3", 40, 40, 10, 128), 204_800),
        (hf("gemma3_text", 62, 32, 16, 128, sliding_window=1024), 507_904),
        (hf("gpt_oss", 24, 64, 8, 64), 49_152),
        (hf("llama4_text", 48, 40, 8, 128), 196_608),
        (hf("deepseek_v3", 61, 128, 128, 0, **MLA_HF), 70_272),
        (hf("qwen3_next", 48, 16, 2, 256, **GDN_HF), 24_576),
    ],
)
def test_bytes_a_token_of_known_models_on_vllm(geometry: Geometry, expected: int) -> None:
    settings = VllmSettings(max_model_len=4096, block_tokens=1, hybrid=False)
    per_token = sum(
        layer.count * (layer.k_elems + layer.v_elems) * settings.dtype_bytes
        for layer in geometry.layers
        if layer.kind != "state"
    )
    assert per_token == expected
    assert geometry.basis is Basis.EXACT


# ---------------------------------------------------------------- llama.cpp's traps


@pytest.mark.parametrize(
    ("ctx", "sequences", "unified", "context", "sequence"),
    [
        (4096, 3, False, 4608, 1536),
        (5000, 4, True, 5120, 5120),
        (300, 2, False, 512, 256),
        (8192, 4, False, 8192, 2048),
        (0, 1, True, 131_072, 131_072),
        (1, 5, False, 1280, 256),
    ],
)
def test_contexts_are_rounded_as_llama_cpp_does(
    ctx: int, sequences: int, unified: bool, context: int, sequence: int
) -> None:
    room = cells(LlamaSettings(ctx_tokens=ctx, sequences=sequences, unified=unified), 131_072)
    assert (room.context, room.sequence) == (context, sequence)


def mib(geometry: Geometry, **settings: Any) -> dict[str, float]:
    return {name: size / MIB for name, size in kv_parts(geometry, LlamaSettings(**settings))}


def test_windows_grow_with_sequences_only_in_a_unified_pool() -> None:
    gemma = gguf("gemma3", 18, 4, 1, 256, attention__sliding_window=512)
    assert mib(gemma, ctx_tokens=8192, sequences=4, unified=False) == {"window": 60, "attention": 24}
    assert mib(gemma, ctx_tokens=8192, sequences=4, unified=True) == {"window": 37.5, "attention": 24}
    assert mib(GEMMA3_27B, ctx_tokens=32_768)["window"] == 624
    # 4 sequences share 4608 cells, not 1536
    assert mib(GEMMA3_27B, ctx_tokens=32_768, sequences=4)["window"] == 624 * 3
    assert mib(GEMMA3_27B, ctx_tokens=32_768, ubatch_tokens=2048)["window"] == 624 * 2
    assert mib(GEMMA3_27B, ctx_tokens=32_768, swa_full=True)["window"] == 32_768 * 52 * 8192 / MIB


def test_layers_that_share_own_nothing() -> None:
    gemma3n = gguf("gemma3n", 35, 8, 2, 256, attention__sliding_window=512)
    assert sum(layer.count for layer in gemma3n.layers) == 20
    gemma4 = gguf(
        "gemma4",
        6,
        8,
        2,
        512,
        attention__sliding_window=512,
        attention__sliding_window_pattern=[True, True, True, False, True, False],
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        attention__shared_kv_layers=2,
    )
    assert {(layer.name, layer.count, layer.k_head) for layer in gemma4.layers} == {
        ("window", 3, 256),
        ("attention", 1, 512),
    }
    # without flash attention every layer's values are as wide as the widest
    on, off = (kv_bytes(gemma4, LlamaSettings(ctx_tokens=512, flash_attn=flag)) for flag in (True, False))
    assert off - on == 3 * 512 * (2 * 512 - 2 * 256) * 2


def test_an_old_conversion_of_an_mla_model_is_71_times_larger() -> None:
    absorbed = gguf("deepseek2", 61, 128, 1, 576, **MLA_GGUF)
    old = gguf("deepseek2", 61, 128, 128, 192, attention__value_length=128)
    settings = LlamaSettings(ctx_tokens=4096)
    assert kv_bytes(old, settings) // kv_bytes(absorbed, settings) == 71
    with pytest.raises(GeometryError, match="different K"):
        kv_bytes(absorbed, LlamaSettings(ctx_tokens=4096, type_k="q8_0", type_v="f16"))


def test_windows_that_llama_cpp_ignores() -> None:
    for architecture in ("phi3", "llama", "qwen2"):
        geometry = gguf(architecture, 4, 8, 8, 128, attention__sliding_window=512)
        assert {layer.kind for layer in geometry.layers} == {"full"}
    assert {layer.kind for layer in gguf("llama4", 8, 8, 8, 64, attention__sliding_window=0).layers} == {
        "full"
    }
    assert gguf("llama4", 8, 8, 8, 64, attention__sliding_window=99).layers[0].window == 8192


def test_hybrids_keep_a_state_for_each_sequence() -> None:
    geometry = gguf("qwen3next", 48, 16, 2, 256, **QWEN3_NEXT)
    one = dict(kv_parts(geometry, LlamaSettings(ctx_tokens=4096)))
    four = dict(kv_parts(geometry, LlamaSettings(ctx_tokens=4096, sequences=4, rollback=2)))
    assert one["state"] == 79_036_416
    assert four["state"] == 79_036_416 * 4 * 3
    assert four["attention"] == one["attention"]
    assert geometry.checkpointed
    assert checkpoint_bytes(geometry, LlamaSettings(ctx_tokens=4096)) == 79_036_416


def test_a_checkpoint_of_gemma_27b_is_416_mib() -> None:
    assert checkpoint_bytes(GEMMA3_27B, LlamaSettings(ctx_tokens=8192)) == 416 * MIB
    assert not LLAMA_8B.checkpointed


def test_a_first_layer_without_heads_leaves_no_head_dimension() -> None:
    geometry = gguf(
        "granitehybrid",
        2,
        4,
        [0, 2],
        32,
        attention__head_count=[0, 4],
        ssm__inner_size=64,
        ssm__state_size=16,
        ssm__conv_kernel=4,
    )
    assert [layer.name for layer in geometry.layers] == ["state"]


def test_quantised_caches_count_their_blocks_and_refuse_what_they_cannot_hold() -> None:
    eight = kv_bytes(LLAMA_8B, LlamaSettings(ctx_tokens=8192))
    assert eight == GIB
    for kind, (block, size) in KV_TYPES.items():
        settings = LlamaSettings(ctx_tokens=8192, type_k=kind, type_v=kind)
        assert kv_bytes(LLAMA_8B, settings) == eight // 2 * size // block
    mixed = kv_bytes(LLAMA_8B, LlamaSettings(ctx_tokens=8192, type_k="q8_0", type_v="q4_0"))
    assert mixed == eight // 2 * 34 // 64 + eight // 2 * 18 // 64
    for head in (80, 72, 40):
        with pytest.raises(GeometryError, match=f"n_embd_head_k={head}"):
            kv_bytes(gguf("llama", 2, 8, 8, head), LlamaSettings(ctx_tokens=512, type_k="q8_0"))
    with pytest.raises(GeometryError, match="requires flash_attn"):
        kv_bytes(LLAMA_8B, LlamaSettings(ctx_tokens=512, type_v="q8_0", flash_attn=False))
    with pytest.raises(GeometryError, match="unknown KV type"):
        LlamaSettings(ctx_tokens=512, type_k="q3_9")


def test_layers_on_and_off_the_card_sum_to_the_whole() -> None:
    settings = LlamaSettings(ctx_tokens=8192, sequences=2)
    whole = kv_bytes(GEMMA3_27B, settings)
    for cut in range(63):
        parts = [GEMMA3_27B.part(range(cut)), GEMMA3_27B.part(range(cut, 62))]
        assert sum(kv_bytes(part, settings) for part in parts) == whole


def test_an_unknown_architecture_is_an_estimate_that_says_so() -> None:
    geometry = gguf("never-seen", 32, 32, 8, 128)
    assert geometry.basis is Basis.ESTIMATE
    assert "never-seen" in geometry.note
    assert hf("never_seen", 32, 32, 8, 128).basis is Basis.ESTIMATE


def test_kimi_k3_is_known() -> None:
    geometry = gguf(
        "kimi-k3",
        4,
        64,
        [0, 0, 0, 1],
        576,
        ssm__conv_kernel=4,
        kda__head_dim=128,
        **MLA_GGUF,
    )
    assert "kimi-k3" in KNOWN
    state, mla = geometry.layers
    assert (state.count, state.conv_elems, state.state_elems) == (3, 3 * 3 * 64 * 128, 128 * 128 * 64)
    assert (mla.count, mla.k_elems, mla.v_elems) == (1, 576, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_count": 0}, "block_count"),
        ({"block_count": 1 << 30}, "block_count"),
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": "many"}, "whole number"),
        ({"attention.head_count_kv": -1}, "whole number"),
        ({"attention.head_count_kv": [8, 8]}, "2 entries for 32 layers"),
        ({"attention.key_length": True}, "whole number"),
    ],
)
def test_broken_metadata_gets_a_clear_error(change: dict[str, Any], words: str) -> None:
    hparams = {"block_count": 32, "attention.head_count": 32, "embedding_length": 4096, **change}
    with pytest.raises(GeometryError, match=words):
        gguf_geometry("llama", hparams)


# ---------------------------------------------------------------- vLLM's traps

GEMMA3_HF = hf("gemma3_text", 62, 32, 16, 128, sliding_window=1024)
GPT_OSS_HF = hf("gpt_oss", 24, 64, 8, 64, sliding_window=128)
SCOUT_HF = hf("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192)


def test_a_pool_of_ten_gib_as_vllm_logs_it() -> None:
    plain, settings = hf("llama", 60, 64, 8, 128), VllmSettings(max_model_len=32_768)
    blocks = 10 * GIB // block_bytes(plain, settings)
    assert (block_bytes(plain, settings), blocks) == (3_932_160, 2730)
    assert capacity_tokens(plain, settings, blocks) == 43_680
    settings = VllmSettings(max_model_len=131_072, max_num_batched_tokens=8192)
    assert [group.layers for group in groups(GPT_OSS_HF, settings)] == [12, 12]
    blocks = 10 * GIB // block_bytes(GPT_OSS_HF, settings)
    assert block_bytes(GPT_OSS_HF, settings) == 393_216
    assert capacity_tokens(GPT_OSS_HF, settings, blocks) == 387_973


def needed_gb(geometry: Geometry, settings: VllmSettings) -> float:
    need = request_blocks(geometry, settings, settings.max_model_len) * block_bytes(geometry, settings)
    return round(need / 1e9, 2)


def test_windows_save_only_with_the_hybrid_manager() -> None:
    settings = VllmSettings(max_model_len=131_072, max_num_batched_tokens=8192)
    assert len(groups(GEMMA3_HF, settings)) == 7
    assert needed_gb(GEMMA3_HF, settings) == 19.30
    assert needed_gb(GEMMA3_HF, replace(settings, hybrid=False)) == 66.57
    assert needed_gb(SCOUT_HF, settings) == 10.07
    assert needed_gb(SCOUT_HF, replace(settings, hybrid=False)) == 25.77


def test_windows_depend_on_what_is_in_flight() -> None:
    settings = VllmSettings(max_model_len=131_072, max_num_batched_tokens=2048)
    small = request_blocks(GEMMA3_HF, settings, 131_072)
    large = request_blocks(GEMMA3_HF, replace(settings, max_num_batched_tokens=8192), 131_072)
    assert small < large


def test_ranks_keep_at_least_one_head_and_mla_is_never_divided() -> None:
    moe, mla = hf("qwen3_moe", 48, 32, 4, 128), hf("deepseek_v3", 61, 128, 128, 0, **MLA_HF)
    for geometry, shares in ((moe, {1: 1, 2: 2, 4: 4, 8: 4}), (mla, {1: 1, 8: 1})):
        whole = block_bytes(geometry, VllmSettings(max_model_len=4096))
        for tp, share in shares.items():
            assert (
                block_bytes(geometry, VllmSettings(max_model_len=4096, tensor_parallel=tp)) == whole // share
            )
    three = hf("llama", 1, 6, 5, 64)
    assert block_bytes(three, VllmSettings(max_model_len=64, tensor_parallel=2)) == 16 * 2 * 2 * 64 * 2


def test_a_hybrids_blocks_grow_until_a_state_fits() -> None:
    geometry = hf("qwen3_next", 48, 16, 2, 256, **GDN_HF)
    settings = VllmSettings(max_model_len=4096)
    assert block_tokens(geometry, settings) == 544
    assert {group.page_bytes for group in groups(geometry, settings)} == {1_114_112}


def test_kv_types_of_vllm() -> None:
    geometry = hf("llama", 32, 32, 8, 128)
    auto = block_bytes(geometry, VllmSettings(max_model_len=64))
    for kind, share in {"fp8_e4m3": 0.5, "fp8_per_token_head": 0.515625, "nvfp4": 0.28125}.items():
        assert block_bytes(geometry, VllmSettings(max_model_len=64, kv_type=kind)) == auto * share
    with pytest.raises(GeometryError, match="unknown KV type"):
        block_bytes(geometry, VllmSettings(max_model_len=64, kv_type="q8_0"))


def test_windows_of_the_whole_model_depend_on_its_switch() -> None:
    def kinds(model_type: str, **more: Any) -> set[str]:
        return {layer.kind for layer in hf(model_type, 4, 8, 8, 64, **more).layers}

    assert kinds("mistral", sliding_window=4096) == {"window"}
    assert kinds("mistral", sliding_window=None) == {"full"}
    assert kinds("qwen2", sliding_window=4096, use_sliding_window=False) == {"full"}
    assert kinds("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=2) == {
        "full",
        "window",
    }
    assert kinds("llama", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64) == {
        "full",
        "window",
    }


def test_a_pool_holds_what_it_was_asked_for_and_its_null_block() -> None:
    geometry, settings = hf("llama", 32, 32, 8, 128), VllmSettings(max_model_len=2048)
    size = pool_bytes(geometry, settings, 8192)
    blocks = size // block_bytes(geometry, settings)
    assert blocks == 8192 // 16 + 1
    assert capacity_tokens(geometry, settings, blocks - 1) >= 8192


# ---------------------------------------------------------------- properties

TINY = {name: gguf_geometry(name, spec["hparams"]) for name, spec in architectures().items()}
GEOMETRIES = [*TINY.values(), *(model[1] for model in KNOWN_MODELS)]
HF_GEOMETRIES = [
    GEMMA3_HF,
    GPT_OSS_HF,
    SCOUT_HF,
    hf("llama", 32, 32, 8, 128),
    hf("qwen3_next", 48, 16, 2, 256, **GDN_HF),
    hf("deepseek_v3", 61, 128, 128, 0, **MLA_HF),
]
some_geometry = st.sampled_from(GEOMETRIES)
contexts = st.integers(1, 1 << 31)
sequences = st.integers(1, 64)


@given(some_geometry, contexts, contexts, sequences, st.booleans())
def test_a_longer_context_never_takes_less(
    geometry: Geometry, a: int, b: int, batch: int, unified: bool
) -> None:
    small, large = (
        kv_bytes(geometry, LlamaSettings(ctx_tokens=ctx, sequences=batch, unified=unified))
        for ctx in sorted((a, b))
    )
    assert 0 <= small <= large


@given(some_geometry, st.integers(1, 1 << 20), sequences, sequences)
def test_more_sequences_of_a_context_each_never_take_less(
    geometry: Geometry, ctx: int, a: int, b: int
) -> None:
    sizes = [
        kv_bytes(geometry, LlamaSettings(ctx_tokens=ctx * n, sequences=n, unified=unified))
        for unified in (True, False)
        for n in sorted((a, b))
    ]
    assert sizes[0] <= sizes[1]
    assert sizes[2] <= sizes[3]


@given(some_geometry, contexts, sequences)
def test_wider_elements_never_take_less(geometry: Geometry, ctx: int, batch: int) -> None:
    if any(layer.k_head % 32 or layer.v_head % 32 for layer in geometry.layers):
        return
    by_width = sorted(KV_TYPES, key=lambda kind: KV_TYPES[kind][1] / KV_TYPES[kind][0])
    sizes = [
        kv_bytes(geometry, LlamaSettings(ctx_tokens=ctx, sequences=batch, type_k=kind, type_v=kind))
        for kind in by_width
    ]
    assert sizes == sorted(sizes)


@given(some_geometry, st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_a_request_is_never_cheaper_for_more_tokens_and_never_negative(
    geometry: Geometry, prompt: int, new: int
) -> None:
    price = llama_price(geometry, LlamaSettings(ctx_tokens=4096))
    assert 0 <= price(prompt, 0) <= price(prompt, new) <= price(prompt, new + 1)


@given(some_geometry, st.integers(1, 1 << 17))
def test_one_sequence_that_fills_its_context_fits_into_what_is_allocated(
    geometry: Geometry, ctx: int
) -> None:
    settings = LlamaSettings(ctx_tokens=ctx)
    assert llama_price(geometry, settings)(ctx, 0) <= kv_bytes(geometry, settings)


@given(st.sampled_from(HF_GEOMETRIES), st.integers(1, 1 << 31), st.integers(1, 1 << 31))
def test_blocks_of_a_request_grow_with_its_tokens(geometry: Geometry, a: int, b: int) -> None:
    settings = VllmSettings(max_model_len=1 << 31)
    few, many = (request_blocks(geometry, settings, tokens) for tokens in sorted((a, b)))
    assert 0 < few <= many


@given(st.sampled_from(HF_GEOMETRIES), st.integers(1, 1 << 20))
def test_the_price_on_vllm_is_its_blocks(geometry: Geometry, tokens: int) -> None:
    settings = VllmSettings(max_model_len=1 << 20)
    blocks = request_blocks(geometry, settings, tokens) * block_bytes(geometry, settings)
    price = vllm_price(geometry, settings)(tokens, 0)
    # a window's ragged edge counts one block more than a short sequence ever needs
    ragged = sum(group.kind == "window" for group in groups(geometry, settings))
    assert blocks - ragged * block_bytes(geometry, settings) <= price <= blocks


ODD = st.sampled_from(
    [None, -1, 0, 1, 2.5, 1 << 70, "text", "", [], [1], [None] * 4, {}, {"a": 1}, True, float("nan")]
)
BASE_HF = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "sliding_window": 128,
    "layer_types": ["full_attention"] * 4,
    "linear_attn_config": {"num_heads": 2, "head_dim": 4, "full_attn_layers": [4]},
    "quantization_config": {"quant_method": "awq"},
    "no_rope_layers": [1, 1, 1, 0],
    "kv_lora_rank": 512,
    "attn_layer_indices": [1],
    "hybrid_override_pattern": "M*M-",
    **GDN_HF,
}
MODEL_TYPES = [
    "llama",
    "gemma3",
    "llama4_text",
    "kimi_linear",
    "bamba",
    "nemotron_h",
    "deepseek_v3",
    "qwen2",
    "?",
]


@given(
    st.sampled_from(MODEL_TYPES),
    st.dictionaries(st.sampled_from(sorted(BASE_HF)), ODD, min_size=1, max_size=4),
)
def test_an_odd_configuration_is_priced_or_refused(model_type: str, changes: dict[str, Any]) -> None:
    try:
        geometry = hf_geometry({**BASE_HF, "model_type": model_type, **changes})
        size = block_bytes(geometry, VllmSettings(max_model_len=4096))
    except GeometryError:
        return
    assert size >= 0


@given(st.sampled_from(sorted(architectures())), st.data())
def test_odd_metadata_is_priced_or_refused(architecture: str, data: st.DataObject) -> None:
    hparams = architectures()[architecture]["hparams"]
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(hparams)), ODD, min_size=1, max_size=4))
    try:
        size = kv_bytes(gguf_geometry(architecture, {**hparams, **changes}), LlamaSettings(ctx_tokens=512))
    except GeometryError:
        return
    assert size >= 0
