"""Memory that is never handed out: room for what no account can predict."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvguard.domain import GIB, MIB

_SCALES = {"kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_HEADROOM = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]ib)?\s*$", re.IGNORECASE)
DEFAULT_SHARE = 0.10
GPU_LEAST_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A size, a share of the card, or the card's own default where neither is given."""

    size_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share < 1:
            raise ValueError(f"headroom must be from 0 % to less than 100 %, got {self.share:.0%}")

    def of(self, total_bytes: int, card_kind: str) -> int:
        """Bytes to keep free on a card. Raises ValueError where nothing would be left."""
        if self.size_bytes is not None:
            if self.size_bytes >= total_bytes:
                raise ValueError(
                    f"headroom of {self.size_bytes} bytes leaves nothing of a card of {total_bytes} bytes"
                )
            return self.size_bytes
        if self.share is not None:
            return int(self.share * total_bytes)
        return headroom_bytes(total_bytes, card_kind)


def parse_headroom(text: str | None) -> Headroom:
    """Read "2GiB", "10%" or a number of bytes; None or nothing means the card's default.

    Raises ValueError naming the text.
    """
    if text is None or not text.strip():
        return Headroom()
    match = _HEADROOM.match(text)
    if match is None:
        raise ValueError(f"headroom {text!r} is neither a size nor a share: write e.g. 2GiB, 512MiB or 10%")
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        return Headroom(share=number / 100)
    return Headroom(size_bytes=int(number * _SCALES.get(unit, 1)))


def headroom_bytes(total_bytes: int, card_kind: str) -> int:
    """The default: 10 % of a cgroup, host or stated limit, and at least 1 GiB of a GPU.

    A GPU keeps more, since its context, libraries and fragmentation appear in nobody's account. A small one
    keeps at most half, so that something is left to hand out.
    """
    share_bytes = int(DEFAULT_SHARE * total_bytes)
    if card_kind != "nvml":
        return share_bytes
    return min(max(GPU_LEAST_BYTES, share_bytes), total_bytes // 2)
