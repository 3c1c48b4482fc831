"""Which layers of a Hugging Face checkpoint keep what in vLLM.

Source: vLLM 0.32, transformers_utils/model_arch_config_convertor.py (heads, MLA), model_executor/models/*.py
(windows), model_executor/layers/mamba/mamba_utils.py (states), and the defaults of transformers'
configuration classes where config.json leaves `layer_types` out. A model type in no table is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvguard.domain import Basis
from kvguard.geometry.shapes import Fields, Geometry, GeometryError, LayerKind, LayerKV, collapse
from kvguard.model import text_config

SOURCE = "vllm/transformers_utils/model_arch_config_convertor.py"
MAX_LAYERS = 1024


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN = _names(
    """
    llama mistral mistral3 mixtral qwen qwen2 qwen2_moe qwen2_5_vl qwen2_5_vl_text qwen2_vl
    qwen2_vl_text qwen3 qwen3_moe qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text gemma phi phi3
    phimoe falcon gpt2 gpt_neox gptj gpt_bigcode bloom mpt opt stablelm starcoder2 internlm2 internlm3
    baichuan chatglm glm glm4 glm4_moe cohere command-r dbrx olmo olmo2 olmoe granite granitemoe
    granitemoeshared nemotron deepseek deci nemotron-nas exaone hunyuan_v1_dense hunyuan_v1_moe ernie4_5
    ernie4_5_moe smollm3 seed_oss minicpm minimax_m2 arcee apertus dots1 solar xverse orion ministral
    pixtral bailing_moe
    """
)
WINDOWED = _names(
    """
    gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt_oss cohere2 olmo3 exaone4
    llama4 llama4_text afmoe step3p5 ministral3
    """
)
MLA = _names(
    """
    axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite kimi_k2 longcat_flash
    pangu_ultra_moe minicpm3 dots3_note kimi_linear bailing_hybrid
    """
)
# every how many layers one is dense, where config.json has no layer_types (transformers' defaults)
PATTERN = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "cohere2": 4,
    "gpt_oss": 2,
}
WINDOW_DEFAULT = {"gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128}
HEAD_DIM_DEFAULT = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma3": 256, "gpt_oss": 64}


class _Config:
    """The configuration as vLLM resolves it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = text_config(config)
        self.type = str(self.values.get("model_type") or "")
        self.fields = f = Fields(self.values, f"{self.type or 'model'} config.json")
        self.layers = self._first("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if not 0 < self.layers <= MAX_LAYERS:
            raise GeometryError(f"{self.type} config.json: {self.layers} layers")
        self.heads = self._first("num_attention_heads", "n_head", "num_heads", "n_heads", default=0)
        self.hidden = self._first("hidden_size", "n_embd", "d_model", default=0)
        self.kv_heads = self._kv_heads()
        derived = self.hidden // self.heads if self.heads else 0
        self.head_dim = f.number("head_dim", 0) or HEAD_DIM_DEFAULT.get(self.type, 0) or derived

    def _first(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            if self.fields.has(key):
                return self.fields.number(key)
        return self.fields.number(keys[0], default)

    def _kv_heads(self) -> int:
        if self.type == "falcon" and not self.values.get("new_decoder_architecture"):
            return 1 if self.values.get("multi_query", True) else self.heads
        if self.type in ("gpt_bigcode", "starcoder") and self.values.get("multi_query"):
            return 1
        names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
        return self._first(*names, "num_attention_groups", default=self.heads)

    @property
    def is_mla(self) -> bool:
        return self.type in MLA and self.fields.has("kv_lora_rank")

    def attention(self, layer: int) -> LayerKV:
        """One layer of full attention, or of MLA's single latent head."""
        if self.is_mla:
            latent = self.fields.number("kv_lora_rank") + self.fields.number("qk_rope_head_dim", 0)
            return LayerKV(name="mla", kind="full", layer=layer, k_elems=latent, k_head=latent)
        width = self.kv_heads * self.head_dim
        value = self.fields.number("v_head_dim", 0) if self.type in ("mimo_v2", "step3p5") else 0
        return LayerKV(
            name="attention",
            kind="full",
            layer=layer,
            k_elems=width,
            v_elems=self.kv_heads * value if value else width,
            k_head=self.head_dim,
            v_head=value or self.head_dim,
            kv_heads=max(self.kv_heads, 1),
        )

    def local(self, layer: int, window: int, kind: str = "window") -> LayerKV:
        """The same layer, of which only the last `window` tokens are kept."""
        kept: LayerKind = "chunk" if kind == "chunk" else "window"
        return replace(self.attention(layer), name="window", kind=kept, window=window)

    def layer_types(self) -> list[str]:
        """One word a layer; from the file, else by the model type's default."""
        types = self.values.get("layer_types") or self.values.get("layers_block_type")
        if isinstance(types, list | tuple) and all(isinstance(word, str) for word in types):
            if len(types) < self.layers:
                raise GeometryError(f"{self.type} config.json: layer_types has {len(types)} entries")
            return list(types[: self.layers])
        period = self.fields.number("sliding_window_pattern", PATTERN.get(self.type, 0))
        if self.type in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"):
            every = self.fields.number("full_attention_interval", 4)
            return [_pick(i, every, "linear_attention") for i in range(self.layers)]
        if self.type == "llama4_text":
            return self._llama4_types()
        if period and self.type in WINDOWED:
            return [_pick(i, period, "sliding_attention") for i in range(self.layers)]
        return self._uniform_types()

    def _llama4_types(self) -> list[str]:
        rope = self.fields.listed("no_rope_layers")
        step = self.fields.number("no_rope_layer_interval", 4)
        chunked = [bool(flag) for flag in rope] or [(i + 1) % step != 0 for i in range(self.layers)]
        if len(chunked) != self.layers:
            raise GeometryError(f"{self.type} config.json: no_rope_layers has {len(chunked)} entries")
        return ["chunked_attention" if flag else "full_attention" for flag in chunked]

    def _uniform_types(self) -> list[str]:
        """Mistral-like: a window holds for every layer; Qwen2's only where it is switched on."""
        window = self.values.get("sliding_window")
        if not window or self.values.get("use_sliding_window") is False:
            return ["full_attention"] * self.layers
        if self.type.startswith(("qwen2", "qwen3")):
            # Qwen's switch is off by default, and its window spares the first max_window_layers
            if not self.values.get("use_sliding_window"):
                return ["full_attention"] * self.layers
            first = self.fields.number("max_window_layers", self.layers)
            return ["sliding_attention" if i >= first else "full_attention" for i in range(self.layers)]
        return ["sliding_attention"] * self.layers


def _pick(layer: int, period: int, word: str) -> str:
    return "full_attention" if (layer + 1) % period == 0 else word


def hf_geometry(config: Mapping[str, Any]) -> Geometry:
    """Compute the geometry that vLLM gives a checkpoint. Raises: GeometryError for broken configurations."""
    model = _Config(config)
    state = _STATES.get(model.type)
    known = state is not None or model.type in PLAIN | WINDOWED | MLA
    by_layer = tuple(layer for i, word in enumerate(model.layer_types()) for layer in _layer(model, i, word))
    if state is not None:
        by_layer = tuple(_hybrid(model, state))
    shared = model.fields.number("num_kv_shared_layers", 0)
    by_layer = tuple(layer for layer in by_layer if layer.layer < model.layers - shared)
    note = (
        "" if known else f"model type {model.type!r} is not known: priced by its configuration's usual keys"
    )
    lengths = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    return Geometry(
        architecture=model.type,
        layers=collapse(by_layer),
        by_layer=by_layer,
        n_ctx_train=model._first(*lengths, default=0),
        mla=model.is_mla,
        basis=Basis.EXACT if known else Basis.ESTIMATE,
        note=note,
        source=SOURCE,
    )


def _layer(model: _Config, layer: int, word: str) -> list[LayerKV]:
    """What one layer keeps, from its word in layer_types."""
    if word in ("sliding_attention", "chunked_attention"):
        chunked = word == "chunked_attention"
        key = "attention_chunk_size" if chunked else "sliding_window"
        default = 8192 if chunked else WINDOW_DEFAULT.get(model.type)
        window = model.fields.number(key, default)
        if window == 0:
            return [model.attention(layer)]
        # Cohere counts the present token apart from its window
        window += model.type == "cohere2"
        return [model.local(layer, window, "chunk" if chunked else "window")]
    entry = model.attention(layer)
    indexer = LayerKV(name="indexer", kind="full", layer=layer, token_bytes=132)
    if model.type in ("deepseek_v32", "glm_moe_dsa") and model.fields.has("index_head_dim"):
        return [entry, indexer]
    return [_gemma4_full(model, entry)]


def _gemma4_full(model: _Config, layer: LayerKV) -> LayerKV:
    """Gemma 4's global layers have heads of another size and number."""
    if not model.type.startswith("gemma4") or not model.fields.has("global_head_dim"):
        return layer
    heads = model.fields.number("num_global_key_value_heads", 0) or model.kv_heads
    head = model.fields.number("global_head_dim")
    return replace(
        layer, k_elems=heads * head, v_elems=heads * head, k_head=head, v_head=head, kv_heads=heads
    )


# ---------------------------------------------------------------- recurrent and hybrid

_StateOf = Callable[[_Config], tuple[int, int]]  # elements of (convolution, recurrent) state
_STATE_WORDS = _names("linear_attention mamba mamba2 conv recurrent M linear kda")
_BOTH_WORDS = _names("hybrid parallel_hybrid")
_NOTHING_WORDS = _names("mlp moe - E")


def _hybrid(model: _Config, state: _StateOf) -> list[LayerKV]:
    conv, recurrent = state(model)
    layers = []
    for i, word in enumerate(_hybrid_words(model)):
        if word in _NOTHING_WORDS:
            continue
        if word in _STATE_WORDS or word in _BOTH_WORDS:
            layers.append(
                LayerKV(name="state", kind="state", layer=i, conv_elems=conv, state_elems=recurrent)
            )
        if word not in _STATE_WORDS:
            layers.append(model.attention(i))
    return layers


def _hybrid_words(model: _Config) -> list[str]:
    """One word a layer, from whichever key the model type uses."""
    values, f = model.values, model.fields
    if model.type in ("mamba", "falcon_mamba", "mamba2"):
        return ["mamba"] * model.layers
    if model.type == "falcon_h1":
        return ["hybrid"] * model.layers
    if model.type == "jamba":
        period, offset = f.number("attn_layer_period", 8), f.number("attn_layer_offset", 4)
        return ["attention" if i % period == offset else "mamba" for i in range(model.layers)]
    if model.type == "bamba" and isinstance(values.get("attn_layer_indices"), list):
        return ["attention" if i in values["attn_layer_indices"] else "mamba" for i in range(model.layers)]
    if model.type == "nemotron_h":
        pattern = str(values.get("hybrid_override_pattern") or "")
        return list(pattern.ljust(model.layers, "-"))[: model.layers] if pattern else model.layer_types()
    if model.type == "kimi_linear":
        full = f.section("linear_attn_config").listed("full_attn_layers")
        return ["attention" if i + 1 in full else "kda" for i in range(model.layers)]
    if model.type in ("lfm2", "lfm2_moe") and isinstance(values.get("full_attn_idxs"), list):
        return ["attention" if i in values["full_attn_idxs"] else "conv" for i in range(model.layers)]
    return model.layer_types()


def _mamba1(model: _Config) -> tuple[int, int]:
    f = model.fields
    size = model._first("state_size", "mamba_d_state", default=16)
    kernel = model._first("conv_kernel", "mamba_d_conv", default=4)
    expand = model._first("expand", "mamba_expand", default=2)
    inner = f.number("intermediate_size", 0) if model.type in ("mamba", "falcon_mamba") else 0
    inner = inner or expand * model.hidden
    return inner * (kernel - 1), inner * size


def _mamba2(model: _Config) -> tuple[int, int]:
    size = model._first("state_size", "mamba_d_state", "ssm_state_size", default=128)
    kernel = model._first("conv_kernel", "mamba_d_conv", default=4)
    groups = model._first("n_groups", "mamba_n_groups", default=1)
    heads = model._first("mamba_num_heads", "mamba_n_heads", "num_heads")
    head = model._first("mamba_head_dim", "mamba_d_head", "head_dim", default=64)
    inner = heads * head
    return (inner + 2 * groups * size) * (kernel - 1), inner * size


def _gated_delta(model: _Config) -> tuple[int, int]:
    f = model.fields
    keys = f.number("linear_num_key_heads") * f.number("linear_key_head_dim")
    values = f.number("linear_num_value_heads") * f.number("linear_value_head_dim")
    kernel = f.number("linear_conv_kernel_dim", 4)
    return (2 * keys + values) * (kernel - 1), values * f.number("linear_key_head_dim")


def _short_conv(model: _Config) -> tuple[int, int]:
    width = model._first("conv_dim", "hidden_size")
    return width * (model.fields.number("conv_L_cache", 3) - 1), 0


def _kda(model: _Config) -> tuple[int, int]:
    inner = model.fields.section("linear_attn_config")
    heads, head = inner.number("num_heads"), inner.number("head_dim")
    return 3 * heads * head * (inner.number("short_conv_kernel_size", 4) - 1), heads * head * head


_STATES: dict[str, _StateOf] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _mamba1),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"), _mamba2),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
    "kimi_linear": _kda,
}
