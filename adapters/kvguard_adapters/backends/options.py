"""What every adapter is told once, beside the knobs: the model's name and forms, and the user's wishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvguard.domain import Knobs, Variant


def _unknown(knobs: Knobs) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Fixed for all lives of a backend.

    model_name       the id under which the engine serves the model
    extra_args       the user's own arguments, passed on unchanged after ours
    variants         other forms of the model that the quant rung may use
    layers           layers that could leave the GPU, the output counted as one; 0: there is no GPU
    layer_bytes      bytes of one layer, for engines that offload by size
    embedding        the model embeds and does not generate
    checkpoint_bytes bytes of one context checkpoint of llama-server; 0 where the model needs none
    model_path       the checkpoint that an on-the-fly quantisation starts from
    pool_bytes       bytes of a KV pool, for engines that are told bytes; 0 where the geometry is unknown
    memory_share     of a GPU, what vLLM may take where `pool_bytes` is unknown; 0.0: its own default
    """

    model_name: str = "default"
    extra_args: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    min_ctx: int = 2048
    min_batch: int = 1
    layers: int = 0
    layer_bytes: int = 0
    embedding: bool = False
    checkpoint_bytes: Callable[[Knobs], int] = _unknown
    model_path: str = ""
    pool_bytes: Callable[[Knobs], int] = _unknown
    memory_share: float = 0.0
