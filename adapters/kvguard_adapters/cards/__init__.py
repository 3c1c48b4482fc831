"""Memory devices behind the `Card` protocol, and which of them binds."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvguard.ports import Card, CardLost
from kvguard_adapters.cards.cgroup import CgroupCard
from kvguard_adapters.cards.host import HostCard, ProcessCard
from kvguard_adapters.cards.nvml import NoGpu, NvmlCard, nvml_card

__all__ = ["CgroupCard", "HostCard", "NvmlCard", "ProcessCard", "binding_card", "detect_cards"]

AMD_DRIVER = Path("/sys/module/amdgpu")


def binding_card(cgroups: Iterable[Path], *, gpu: bool = True) -> Card:
    """The memory that runs out first: that of the GPUs, else the smallest of container and machine.

    cgroups  those that kvguard itself is in
    gpu      False for an engine that uses none
    """
    return detect_cards(cgroups, gpu=gpu)[0]


def detect_cards(
    cgroups: Iterable[Path],
    *,
    gpu: bool = True,
    environ: Mapping[str, str] = os.environ,
    amd_driver: Path = AMD_DRIVER,
) -> tuple[Card, ...]:
    """All cards that apply, the one that binds first.

    Those of host memory say in their `detail` why no GPU is among them.
    """
    gpus: list[Card] = []
    detail = ""
    if gpu:
        try:
            gpus.append(nvml_card(environ))
        except NoGpu as exc:
            detail = "; ".join([str(exc), *_others(amd_driver)])
    host_side: list[Card] = [HostCard(detail=detail), *_containers(cgroups, detail)]
    return (*gpus, *sorted(host_side, key=lambda card: card.info.total_bytes))


def _containers(cgroups: Iterable[Path], detail: str) -> Iterable[Card]:
    for path in cgroups:
        try:
            yield CgroupCard(path, name="container memory", shared=True, detail=detail)
        except CardLost:  # no limit there
            continue


def _others(amd_driver: Path) -> Iterable[str]:
    """A word on each GPU that we cannot measure."""
    if amd_driver.exists():
        yield "AMD GPUs are not supported yet, host memory used"
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        yield "Apple GPUs are not supported yet, host memory used"
