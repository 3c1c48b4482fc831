"""What one request uses of the KV memory: called for every request, so all that can be is computed before."""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.geometry import llama_cpp, vllm
from kvguard.geometry.llama_cpp import LlamaSettings
from kvguard.geometry.shapes import Geometry
from kvguard.geometry.vllm import VllmSettings


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes that a sequence of n tokens uses: fixed + sum of slope x min(ceil(tokens / ratio), limit).

    A call takes about a microsecond.
    """

    fixed_bytes: int
    block_tokens: int
    slopes: tuple[tuple[int, int, int], ...]  # (bytes a cell, tokens a cell, most tokens)

    def __call__(self, prompt_tokens: int, max_new_tokens: int) -> int:
        tokens = prompt_tokens + max_new_tokens
        block = self.block_tokens
        if block > 1:
            tokens = -(-tokens // block) * block
        total = self.fixed_bytes
        for cell_bytes, ratio, limit in self.slopes:
            held = tokens if tokens < limit else limit
            total += cell_bytes * (-(-held // ratio))
        return total

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes of one more token while no window is full."""
        return sum(cell // ratio for cell, ratio, _ in self.slopes)

    @property
    def marginal_bytes_per_token(self) -> int:
        """Bytes of one more token once every window is full."""
        return sum(cell // ratio for cell, ratio, limit in self.slopes if limit == UNLIMITED)


UNLIMITED = 1 << 62


def llama_price(geometry: Geometry, settings: LlamaSettings) -> Price:
    """Price one request on llama.cpp, where it takes no new memory but cells of what is allocated."""
    fixed, slopes = 0, []
    for layer in geometry.layers:
        if layer.kind == "state":
            fixed += llama_cpp.state_bytes(layer, settings)
            continue
        bounded = layer.kind in ("window", "chunk") and not settings.swa_full
        limit = layer.window if bounded else UNLIMITED
        slopes.append((llama_cpp.token_bytes(geometry, layer, settings), layer.ratio, limit))
    return Price(fixed, 1, tuple(slopes))


def vllm_price(geometry: Geometry, settings: VllmSettings) -> Price:
    """Price one request on vLLM: whole blocks of every group, each as wide as the pool's block.

    A group of windows holds at most its window, what is in flight, and one block more for its ragged edge.
    """
    block = vllm.block_bytes(geometry, settings)
    fixed, slopes = 0, []
    for group in vllm.tables(geometry, settings):
        if group.kind == "state":
            fixed += block
        elif group.kind in ("window", "chunk"):
            most = group.blocks(1 << 40, settings.in_flight_tokens) * group.block_tokens
            slopes.append((block, group.block_tokens, most))
        else:
            slopes.append((block, group.block_tokens, UNLIMITED))
    return Price(fixed, 1, tuple(slopes))
