"""How the peak grows with the batch: bytes a sequence, and whether that is a straight line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LINEAR_RESIDUAL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """`linear` None: two points are always on a line."""

    bytes_per_sequence: int
    linear: bool | None


def slope_of(peaks: Mapping[int, Sequence[int]]) -> Slope | None:
    """Least squares over batch -> peak bytes of each run; None for fewer than two batches.

    Linear: no point lies further off the line than a tenth of the whole rise.
    """
    points = [(batch, peak) for batch, found in peaks.items() for peak in found]
    batches = {batch for batch, _ in points}
    if len(batches) < 2:
        return None
    x, y = np.array(points, dtype=float).T
    rise, start = np.polyfit(x, y, 1)
    span = float(y.max() - y.min())
    off = float(np.abs(y - (rise * x + start)).max())
    linear = None if len(batches) < 3 else off <= LINEAR_RESIDUAL * span or span == 0
    return Slope(bytes_per_sequence=round(rise), linear=linear)
