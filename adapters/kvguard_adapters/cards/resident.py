"""Resident memory of processes; pages that they share count once for each."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum of the resident sets; a process that is gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total
