"""Which layers of a GGUF model keep what in llama.cpp.

Source: llama.cpp, src/llama-model.cpp (load_hparams, create_memory), src/llama-hparams.cpp and the
load_arch_hparams of src/models/*.cpp, as vendored by llama-cpp-python 0.3.36. Keys are GGUF metadata keys
without the architecture's prefix. An architecture that is in no table is an estimate, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvguard.domain import Basis
from kvguard.geometry.shapes import Fields, Geometry, GeometryError, LayerKV, collapse

SOURCE = "llama.cpp src/llama-model.cpp create_memory"
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN = _names(
    """
    llama deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo codeshell orion internlm2
    minicpm minicpm3 gemma starcoder2 xverse command-r dbrx olmo olmoe openelm arctic deepseek deepseek2
    deepseek2-ocr chatglm glm4 glm4moe bitnet jais jais2 nemotron exaone granite granitemoe chameleon
    plm bailingmoe bailingmoe2 dots1 arcee ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl
    hy_v3 smollm3 seed_oss grovemoe apertus minimax-m2 cogvlm pangu-embedded mistral3 mistral4 paddleocr
    llama-embed maincoder
    """
)
"""Every layer keeps every token: MHA, GQA, MQA, per-layer KV heads, and MLA where its keys are there."""

NO_CACHE = _names(
    """
    bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert wavtokenizer-dec modern-
    bert gemma-embedding dream llada llada-moe rnd1 clip
    """
)

RECURRENT = _names(
    """
    mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7
    """
)


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How an architecture chooses its sliding-window layers when the file gives no array.

    period       every period-th layer is dense; 0: the array is required
    default      the window where the key is missing; None: then there is none
    forced       the window whatever the key says (0: the key counts)
    """

    period: int
    dense_first: bool = False
    default: int | None = None
    forced: int = 0


WINDOWED: dict[str, WindowRule] = {
    "gemma2": WindowRule(2, default=4096),
    "gemma3": WindowRule(6),
    "gemma3n": WindowRule(5),
    "gemma4": WindowRule(0),
    "gpt-oss": WindowRule(2),
    "llama4": WindowRule(4, default=8192, forced=8192),
    "cohere2": WindowRule(4),
    "cohere2moe": WindowRule(4, dense_first=True),
    "laguna": WindowRule(4, dense_first=True),
    "smallthinker": WindowRule(4, dense_first=True, forced=4096),
    "exaone4": WindowRule(4, default=4096),
    "exaone-moe": WindowRule(4, default=128),
    "olmo2": WindowRule(4),
    "afmoe": WindowRule(4),
    "mellum": WindowRule(4),
    "muse-glimmer": WindowRule(4),
    "plamo3": WindowRule(8),
    "step35": WindowRule(0),
    "mimo2": WindowRule(0),
    "maple": WindowRule(0),
    "granite_swa": WindowRule(0),
    "spark2_5": WindowRule(0),
}


class _Model:
    """The hyperparameters as llama.cpp resolves them; one instance a call."""

    def __init__(self, architecture: str, hparams: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self.fields = f = Fields(hparams, f"{architecture} metadata")
        self.all_layers = f.number("block_count")
        if not 0 < self.all_layers <= MAX_LAYERS:
            raise GeometryError(f"{architecture} metadata: block_count is {self.all_layers}")
        self.layers = self.all_layers - min(f.number("nextn_predict_layers", 0), self.all_layers)
        self.n_embd = f.number("embedding_length", 0)
        self.heads = f.per_layer("attention.head_count", self.all_layers, [0] * self.all_layers)
        self.kv_heads = f.per_layer("attention.head_count_kv", self.all_layers, self.heads)
        # llama.cpp divides by the first layer's head count, even where that layer has none (then: 0)
        head = self.n_embd // self.heads[0] if self.heads[0] else 0
        self.head_k = f.number("attention.key_length", head) if self.heads[0] else 0
        self.head_v = f.number("attention.value_length", head) if self.heads[0] else 0
        self.head_k_swa = f.number("attention.key_length_swa", self.head_k)
        self.head_v_swa = f.number("attention.value_length_swa", self.head_v)
        self.mla = bool(f.number("attention.key_length_mla", 0) and f.number("attention.value_length_mla", 0))
        self.window, self.is_window = self._windows()
        self.kind_of_window = "chunk" if architecture == "llama4" else "window"

    def _windows(self) -> tuple[int, list[bool]]:
        """The window and the layers that have it; phi3's key is ignored by llama.cpp."""
        none = [False] * self.all_layers
        rule = WINDOWED.get(self.architecture)
        f = self.fields
        if rule is None or (self.architecture == "exaone4" and self.layers != 64):
            return 0, none
        window = f.number("attention.sliding_window", rule.default or 0)
        if window == 0:
            return 0, none
        pattern = f.values.get("attention.sliding_window_pattern")
        if isinstance(pattern, list | tuple):
            if len(pattern) not in (self.layers, self.all_layers):
                raise GeometryError(
                    f"{self.architecture} metadata: the window pattern has {len(pattern)} entries"
                )
            marks = [bool(mark) for mark in pattern]
            return rule.forced or window, (marks + none)[: self.all_layers]
        if rule.period == 0:
            raise GeometryError(f"{self.architecture} metadata: attention.sliding_window_pattern is missing")
        period = f.number("attention.sliding_window_pattern", rule.period)
        trunk = [_is_window(layer, period, rule.dense_first) for layer in range(self.layers)]
        return rule.forced or window, trunk + none[self.layers :]

    def attention(self, layer: int) -> LayerKV:
        """The cache of one attention layer (src/llama-kv-cache.cpp)."""
        windowed, kv_heads = self.is_window[layer], self.kv_heads[layer]
        head_k, head_v = (self.head_k_swa, self.head_v_swa) if windowed else (self.head_k, self.head_v)
        return LayerKV(
            name="window" if windowed else "mla" if self.mla else "attention",
            layer=layer,
            kind="full" if not windowed else "chunk" if self.kind_of_window == "chunk" else "window",
            k_elems=head_k * kv_heads,
            v_elems=0 if self.mla else head_v * kv_heads,
            k_head=head_k,
            v_head=head_v,
            kv_heads=max(kv_heads, 1),
            window=self.window if windowed else 0,
        )

    def state(self, layer: int) -> LayerKV:
        """The recurrent state of one layer: n_embd_r and n_embd_s of src/llama-hparams.cpp."""
        f, heads = self.fields, self.heads[0]
        conv = max(f.number("ssm.conv_kernel", 0) - 1, 0)
        if f.number("wkv.head_size", 0):
            r = f.number("token_shift_count", 2) * self.n_embd
            s = self.n_embd * f.number("wkv.head_size")
        elif f.number("shortconv.l_cache", 0):
            r, s = self.n_embd * (f.number("shortconv.l_cache") - 1), 0
        elif f.number("kda.head_dim", 0):
            head = f.number("kda.head_dim")
            r, s = 3 * (conv if f.number("ssm.conv_kernel", 0) else 3) * heads * head, head * head * heads
        elif self.architecture == "minimax-01":
            r, s = 0, self.head_k * self.head_k * heads
        else:
            inner, size = f.number("ssm.inner_size"), f.number("ssm.state_size")
            # Mamba-1 has no groups, whatever its file says
            groups = 0 if self.architecture in ("mamba", "jamba") else f.number("ssm.group_count", 0)
            r = conv * (inner + 2 * groups * size)
            s = inner * size
        return LayerKV(name="state", kind="state", layer=layer, conv_elems=r, state_elems=s)

    def indexer(self, layer: int, factor: int = 1) -> LayerKV:
        """The keys of a sparse attention's indexer: one head, no values."""
        size = self.fields.number("attention.indexer.key_length") * factor
        return LayerKV(name="indexer", kind="full", layer=layer, k_elems=size, k_head=size)


def _is_window(layer: int, period: int, dense_first: bool) -> bool:
    """llama_hparams::set_swa_pattern: period 0 means all, 1 means none."""
    if period == 0:
        return True
    return layer % period != 0 if dense_first else layer % period < period - 1


def gguf_geometry(architecture: str, hparams: Mapping[str, Any]) -> Geometry:
    """Compute the geometry that llama.cpp gives a model. Raises: GeometryError for broken metadata."""
    model = _Model(architecture, hparams)
    rule = _RULES.get(architecture)
    basis, note = Basis.EXACT, ""
    if rule is None:
        rule, basis = _plain, Basis.ESTIMATE
        note = f"architecture {architecture!r} is not known: priced as plain attention in every layer"
    by_layer = tuple(rule(model))
    head_v = [model.head_v_swa if windowed else model.head_v for windowed in model.is_window]
    return Geometry(
        architecture=architecture,
        layers=collapse(by_layer),
        by_layer=by_layer,
        n_ctx_train=model.fields.number("context_length", 0),
        mla=model.mla or architecture == "deepseek4",
        v_elems_max=max(head * heads for head, heads in zip(head_v, model.kv_heads, strict=True)),
        basis=basis,
        note=note,
        source=SOURCE,
    )


# ---------------------------------------------------------------- the families

_Rule = Callable[[_Model], list[LayerKV]]


def _none(model: _Model) -> list[LayerKV]:
    return []


def _plain(model: _Model) -> list[LayerKV]:
    return [model.attention(layer) for layer in range(model.layers)]


def _gemma3n(model: _Model) -> list[LayerKV]:
    """Only the first 20 layers own a cache, the others read theirs."""
    return _plain(model)[:20]


def _gemma4(model: _Model) -> list[LayerKV]:
    return _plain(model)[: model.all_layers - model.fields.number("attention.shared_kv_layers", 0)]


def _granite_switch(model: _Model) -> list[LayerKV]:
    """One more layer with a single head routes tokens to adapters."""
    head = LayerKV(
        name="router",
        kind="full",
        layer=model.layers,
        k_elems=model.head_k,
        v_elems=model.head_v,
        k_head=model.head_k,
        v_head=model.head_v,
    )
    return [*_plain(model), head]


def _nanbeige(model: _Model) -> list[LayerKV]:
    """The same weights run several times, each time with a cache of its own."""
    return _plain(model) * model.fields.number("num_loops", 1)


def _recurrent(model: _Model) -> list[LayerKV]:
    return [model.state(i) for i in range(model.layers)]


def _hybrid_by_heads(model: _Model) -> list[LayerKV]:
    """A layer without KV heads is recurrent."""
    return [model.attention(i) if model.kv_heads[i] else model.state(i) for i in range(model.layers)]


def _lfm2(model: _Model) -> list[LayerKV]:
    """Its window, where the file has one, holds for every attention layer."""
    model.window = model.fields.number("attention.sliding_window", 0)
    model.is_window = [model.window > 0 and heads > 0 for heads in model.kv_heads]
    return _hybrid_by_heads(model)


def _both(model: _Model) -> list[LayerKV]:
    """Falcon-H1: every layer has attention and a state."""
    return _plain(model) + _recurrent(model)


def _nemotron_h(model: _Model) -> list[LayerKV]:
    """Layers with a feed-forward keep nothing; of the others, those without KV heads are recurrent."""
    ff = model.fields.per_layer("feed_forward_length", model.all_layers, [0] * model.all_layers)
    return [layer for layer in _hybrid_by_heads(model) if ff[layer.layer] == 0]


def _interval(default: int) -> _Rule:
    """All layers are recurrent but every n-th, unless the file names them."""

    def rule(model: _Model) -> list[LayerKV]:
        interval = max(model.fields.number("full_attention_interval", default), 1)
        fallback = [int((i + 1) % interval != 0) for i in range(model.all_layers)]
        marks = model.fields.per_layer("attention.recurrent_layers", model.all_layers, fallback)
        return [model.state(i) if marks[i] else model.attention(i) for i in range(model.layers)]

    return rule


def _qwen4exp(model: _Model) -> list[LayerKV]:
    layers = _interval(4)(model)
    indexed = [model.indexer(layer.layer) for layer in layers if layer.kind == "full"]
    ple = model.fields.listed("ple.layers")
    return layers + indexed + [_ple_history(model, int(i)) for i in ple]


def _ple_history(model: _Model, layer: int) -> LayerKV:
    f = model.fields
    rows = (f.number("ple.conv_kernel") - 1) * f.number("ple.ngram_size")
    elems = rows * f.number("hyper_connection.count") * model.n_embd
    return LayerKV(name="history", kind="state", layer=layer, conv_elems=elems)


def _indexed(model: _Model) -> list[LayerKV]:
    """DeepSeek-V3.2 and its like: each layer with an indexer of its own keeps that one's keys as well."""
    types = model.fields.listed("attention.indexer.types")
    full = [1] * model.layers if model.architecture == "deepseek32" or not types else types
    if model.architecture == "hy_v4" and not model.fields.number("attention.indexer.top_k", 0):
        return _plain(model)
    if len(full) < model.layers:
        raise GeometryError(f"{model.architecture} metadata: attention.indexer.types is too short")
    return _plain(model) + [model.indexer(i) for i in range(model.layers) if full[i]]


def _glm5_next(model: _Model) -> list[LayerKV]:
    types = model.fields.per_layer("attention.indexer.types", model.layers, [1] * model.layers)
    layers = _hybrid_by_heads(model)
    return layers + [model.indexer(i, 3) for i in range(model.layers) if model.kv_heads[i] and types[i]]


def _minimax_m3(model: _Model) -> list[LayerKV]:
    """Sparse layers keep an indexer's keys, and values of the model's own value length beside them."""
    lead = model.fields.number("leading_dense_block_count", 0)
    sparse = [
        replace(model.indexer(i), v_elems=model.head_v, v_head=model.head_v)
        for i in range(lead, model.all_layers)
    ]
    return _plain(model) + sparse


def _deepseek4(model: _Model) -> list[LayerKV]:
    """DeepSeek-V4: a window of raw keys, compressed keys and the compressors' states; never shared.

    Source: src/llama-kv-cache-dsv4.cpp, ratios 4 (with an indexer) and 128.
    """
    f, head = model.fields, model.head_k
    ratios = f.per_layer("attention.compress_ratios", model.all_layers)
    window, index = f.number("attention.sliding_window"), f.number("attention.indexer.key_length")
    layers = []
    for i, ratio in enumerate(ratios[: model.layers]):
        raw = LayerKV(name="window", kind="window", layer=i, k_elems=head * model.kv_heads[i], k_head=head)
        layers.append(replace(raw, window=window, own_pool=True))
        if ratio in (4, 128):
            compressed = replace(raw, name="compressed", kind="compressed", ratio=ratio, own_pool=True)
            rows = [16 * head, 16 * index] if ratio == 4 else [128 * head]
            states = [LayerKV(name="compressor", kind="state", layer=i, state_elems=2 * n) for n in rows]
            layers += [compressed, *states]
            if ratio == 4:
                layers.append(replace(compressed, name="indexer", k_elems=index, k_head=index))
    return layers


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(PLAIN, _plain),
    **dict.fromkeys(NO_CACHE, _none),
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(WINDOWED, _plain),
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "graniteswitch": _granite_switch,
    "nanbeige": _nanbeige,
    **dict.fromkeys(
        ("jamba", "granitehybrid", "plamo2", "kimi-linear", "kimi-k3", "bailingmoe3", "lfm2moe"),
        _hybrid_by_heads,
    ),
    "lfm2": _lfm2,
    "falcon-h1": _both,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _interval(4),
    "qwen35": _interval(4),
    "qwen35moe": _interval(4),
    "minimax-01": _interval(8),
    "qwen4exp": _qwen4exp,
    "deepseek32": _indexed,
    "glm-dsa": _indexed,
    "hy_v4": _indexed,
    "glm5-next": _glm5_next,
    "minimax-m3": _minimax_m3,
    "deepseek4": _deepseek4,
}
KNOWN = frozenset(_RULES)
