"""What a model keeps of the tokens it has seen: one entry for each kind of layer.

A geometry is a fact of the model as one engine runs it (llama.cpp ignores windows that vLLM honours);
what it costs is computed from it and that engine's settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvguard.domain import Basis

LayerKind = Literal["full", "window", "chunk", "compressed", "state"]


class GeometryError(ValueError):
    """An engine would refuse this model or these settings. The message is for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """What one layer keeps, or `count` layers that keep the same.

    layer        which one it is; of no meaning where count counts several
    kind         full: every token; window, chunk: the last `window` tokens; compressed: one cell for each
                 `ratio` tokens; state: a fixed size a sequence, however long it is
    k_elems      elements of a token's key row, all KV heads (MLA: latent + rope); v_elems likewise, 0 if none
    k_head       elements of one head's key: a quantised cache must divide it into whole blocks
    kv_heads     what tensor parallelism divides (1 for MLA: every rank keeps the whole)
    conv_elems, state_elems  of a state: its convolution and its recurrent part, each a sequence
    own_pool     never shared between sequences, even where the engine's pool is
    token_bytes  fixed bytes a token whatever the KV type, else 0
    """

    name: str
    kind: LayerKind
    layer: int = 0
    count: int = 1
    k_elems: int = 0
    v_elems: int = 0
    k_head: int = 0
    v_head: int = 0
    kv_heads: int = 1
    window: int = 0
    ratio: int = 1
    conv_elems: int = 0
    state_elems: int = 0
    own_pool: bool = False
    token_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A model's layers as an engine keeps them.

    layers   equal ones counted; by_layer: each by itself, for engines that spread layers over devices
    basis    EXACT where the architecture is known, else ESTIMATE with the reason in `note`
    mla      keys and values share one latent: an engine may refuse different types for them
    source   where the rule comes from
    """

    architecture: str
    layers: tuple[LayerKV, ...]
    by_layer: tuple[LayerKV, ...] = field(default=(), repr=False)
    n_ctx_train: int
    mla: bool = False
    v_elems_max: int = 0
    basis: Basis = Basis.EXACT
    note: str = ""
    source: str = ""

    def part(self, layers: Container[int]) -> Geometry:
        """The same model with only these layers' caches."""
        kept = tuple(entry for entry in self.by_layer if entry.layer in layers)
        return replace(self, layers=collapse(kept), by_layer=kept)

    @property
    def grows(self) -> bool:
        """True where longer sequences need more memory."""
        return any(layer.kind in ("full", "compressed") for layer in self.layers)

    @property
    def checkpointed(self) -> bool:
        """True where llama-server keeps context checkpoints: a part of the past cannot be rolled back to."""
        return any(layer.kind != "full" for layer in self.layers)


def collapse(layers: Iterable[LayerKV]) -> tuple[LayerKV, ...]:
    """Count equal layers, in order of first appearance; drop those that keep nothing."""
    counts: Counter[LayerKV] = Counter()
    for layer in layers:
        if layer.k_elems or layer.v_elems or layer.conv_elems or layer.state_elems or layer.token_bytes:
            counts[replace(layer, layer=0, count=1)] += layer.count
    return tuple(replace(layer, count=count) for layer, count in counts.items())


class Fields:
    """Typed access to a model's configuration; what is missing or of the wrong type gets a clear error."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self.values, self.what = values, what

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number, not negative and no larger than any real model's."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            found = "is missing" if value is None else f"is {str(value)[:60]!r}"
            raise GeometryError(f"{self.what}: {key} {found}, a whole number is needed")
        return value

    def per_layer(self, key: str, layers: int, default: list[int] | None = None) -> list[int]:
        """One number a layer, from an array or from a number that is the same for all."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list | tuple):
            if len(value) != layers:
                raise GeometryError(f"{self.what}: {key} has {len(value)} entries for {layers} layers")
            return [Fields({key: int(v) if isinstance(v, bool) else v}, self.what).number(key) for v in value]
        return [self.number(key)] * layers

    def listed(self, key: str) -> list[Any]:
        """A list, empty where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise GeometryError(f"{self.what}: {key} is {str(value)[:60]!r}, a list is needed")
        return list(value)

    def section(self, key: str) -> Fields:
        """The fields of a nested object, none where the key is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise GeometryError(f"{self.what}: {key} is {str(value)[:60]!r}, an object is needed")
        return Fields(value or {}, f"{self.what} {key}")
