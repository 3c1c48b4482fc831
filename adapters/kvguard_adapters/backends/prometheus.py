"""Read a few series out of a Prometheus text page, which engines make too long to parse twice a second."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def total(page: str, name: str) -> float | None:
    """Sum of all series of one metric (engines number their replicas); None where there is none."""
    values = [float(value) for _, value in _series(page, name)]
    return sum(values) if values else None


def mean(page: str, name: str) -> float | None:
    values = [float(value) for _, value in _series(page, name)]
    return sum(values) / len(values) if values else None


def labels(page: str, name: str) -> list[dict[str, str]]:
    """The labels of each series of an information metric."""
    return [dict(_LABEL.findall(text)) for text, _ in _series(page, name)]


def _series(page: str, name: str) -> Iterator[tuple[str, str]]:
    pattern = rf"^{re.escape(name)}(\{{.*\}})? (\S+)$"
    return ((match[1] or "", match[2]) for match in re.finditer(pattern, page, re.MULTILINE))
