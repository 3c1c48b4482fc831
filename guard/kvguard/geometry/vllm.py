"""What vLLM allocates for a geometry: groups of layers, bytes a block, blocks a request.

Source: vLLM 0.32, v1/kv_cache_interface.py and v1/core/kv_cache_utils.py. vLLM allocates one pool; every
group of layers draws its blocks from it, and one block is as wide as the widest group.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from kvguard.geometry.shapes import Geometry, GeometryError, LayerKV

BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """The options of vLLM that decide its KV memory, on one rank.

    kv_type            auto (the model's type), fp8*, int8_per_token_head, fp8_per_token_head, nvfp4
    in_flight_batches  2 with async scheduling, else the pipeline's length
    hybrid             False: windows are kept in full (`--disable-hybrid-kv-cache-manager`)
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    block_tokens: int = BLOCK_TOKENS
    kv_type: str = "auto"
    dtype_bytes: int = 2
    conv_bytes: int = 2
    state_bytes: int = 2
    tensor_parallel: int = 1
    in_flight_batches: int = 2
    hybrid: bool = True

    @property
    def in_flight_tokens(self) -> int:
        return self.in_flight_batches * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table. `page_bytes`: one layer's block, padded to the common size."""

    kind: str
    layers: int
    block_tokens: int
    page_bytes: int
    window: int = 0

    def blocks(self, tokens: int, in_flight_tokens: int) -> int:
        """The most blocks that one sequence of `tokens` ever holds."""
        if self.kind == "state":
            return 1
        if self.kind == "window":
            held = min(self.window - 1 + in_flight_tokens, tokens)
            return -(-held // self.block_tokens) + 1
        if self.kind == "chunk":
            tokens = min(self.window + in_flight_tokens, tokens)
        return -(-tokens // self.block_tokens)


def element_bytes(kv_type: str, head: int, dtype_bytes: int) -> float:
    """Bytes of one element of a head's row, its share of the scales included."""
    if kv_type == "auto":
        return dtype_bytes
    if kv_type in ("bfloat16", "float16", "half"):
        return 2
    if kv_type in ("int8_per_token_head", "fp8_per_token_head"):
        return 1 + 4 / head
    if kv_type == "nvfp4":
        return 1 / 2 + 1 / 16
    if kv_type.startswith("fp8") or kv_type == "int8":
        return 1
    raise GeometryError(f"unknown KV type {kv_type!r} for vLLM")


def token_bytes(layer: LayerKV, settings: VllmSettings) -> int:
    """Bytes of one token in one such layer on one rank; a rank keeps at least one KV head."""
    if layer.token_bytes:
        return layer.token_bytes
    heads = max(1, layer.kv_heads // settings.tensor_parallel)
    key = layer.k_elems // layer.kv_heads * heads
    value = layer.v_elems // layer.kv_heads * heads
    key_bytes = key * element_bytes(settings.kv_type, max(layer.k_head, 1), settings.dtype_bytes)
    value_bytes = value * element_bytes(settings.kv_type, max(layer.v_head, 1), settings.dtype_bytes)
    return round(key_bytes + value_bytes)


def state_bytes(layer: LayerKV, settings: VllmSettings) -> int:
    """Bytes of one sequence's state in one such layer on one rank."""
    tp = settings.tensor_parallel
    conv = layer.conv_elems // tp * settings.conv_bytes
    return conv + layer.state_elems // tp * settings.state_bytes


def block_tokens(geometry: Geometry, settings: VllmSettings) -> int:
    """Tokens of a block, grown for hybrids until attention's page holds a state (platforms/interface.py)."""
    states = [state_bytes(layer, settings) for layer in geometry.layers if layer.kind == "state"]
    attention = [token_bytes(layer, settings) for layer in geometry.layers if layer.kind == "full"]
    if not states or not attention:
        return settings.block_tokens
    step = max(settings.block_tokens, 128) if geometry.mla else settings.block_tokens
    return step * -(-max(states) // (step * attention[0]))


def groups(geometry: Geometry, settings: VllmSettings) -> list[Group]:
    """Sort layers into groups as get_kv_cache_groups does."""
    tokens = block_tokens(geometry, settings)
    kinds: dict[Group, int] = defaultdict(int)
    promote = not settings.hybrid and any(layer.kind == "full" for layer in geometry.layers)
    for layer in geometry.layers:
        page = (
            state_bytes(layer, settings) if layer.kind == "state" else tokens * token_bytes(layer, settings)
        )
        kind = "full" if promote and layer.kind in ("window", "chunk") else layer.kind
        window = layer.window if kind == layer.kind else 0
        kinds[Group(kind=kind, layers=0, block_tokens=tokens, page_bytes=page, window=window)] += layer.count
    if len({(group.kind, group.window) for group in kinds}) <= 1:
        # one kind: a single group, as wide as all its layers together
        return [replace(group, layers=count) for group, count in kinds.items()]
    return _same_pages(kinds)


def _same_pages(kinds: dict[Group, int]) -> list[Group]:
    """Give all groups one page size and one number of layers (_get_kv_cache_groups_uniform_page_size)."""
    largest = max(group.page_bytes for group in kinds)
    unified: dict[Group, int] = defaultdict(int)
    for group, count in kinds.items():
        divides = group.kind != "state" and largest % group.page_bytes == 0
        tokens = group.block_tokens * (largest // group.page_bytes if divides else 1)
        unified[replace(group, page_bytes=largest, block_tokens=tokens)] += count
    least, most = min(unified.values()), max(unified.values())
    size = most if most < least * 1.5 else least
    found = []
    for group, count in unified.items():
        found += [replace(group, layers=min(size, count))] * -(-count // size)
    return found


def block_bytes(geometry: Geometry, settings: VllmSettings) -> int:
    """Bytes of one block of the pool: the widest group's pages."""
    found = groups(geometry, settings)
    if not found:
        return 0
    if len({(group.kind, group.window) for group in found}) == 1:
        return sum(group.page_bytes * group.layers for group in found)
    return max(group.page_bytes * group.layers for group in found)


def tables(geometry: Geometry, settings: VllmSettings) -> list[Group]:
    """The groups that draw blocks: layers of one kind, however wide each is, share one table."""
    found = groups(geometry, settings)
    return found[:1] if len({(group.kind, group.window) for group in found}) == 1 else found


def request_blocks(geometry: Geometry, settings: VllmSettings, tokens: int) -> int:
    """The most blocks that one sequence of `tokens` ever holds, over all groups."""
    held = (group.blocks(tokens, settings.in_flight_tokens) for group in tables(geometry, settings))
    return sum(held)


def capacity_tokens(geometry: Geometry, settings: VllmSettings, blocks: int) -> int:
    """The "KV cache size" that vLLM logs for a pool of `blocks`."""
    each = request_blocks(geometry, settings, settings.max_model_len)
    return int(blocks / each * settings.max_model_len) if each else 0


def pool_bytes(geometry: Geometry, settings: VllmSettings, pool_tokens: int) -> int:
    """Bytes for `--kv-cache-memory-bytes` so that sequences of max_model_len with `pool_tokens` together fit.

    One block more: vLLM never hands out its null block, and an exactly fitting request would fail.
    """
    each = request_blocks(geometry, settings, settings.max_model_len)
    whole = -(-pool_tokens * each // max(settings.max_model_len, 1))
    return (max(whole, each) + 1) * block_bytes(geometry, settings)
