"""Memory devices behind the `Card` protocol."""

from __future__ import annotations

from kvguard.ports import Card
from kvguard_adapters.cards.cgroup import CgroupCard, own_cgroup_with_limit
from kvguard_adapters.cards.host import HostCard, ProcessCard

__all__ = ["CgroupCard", "HostCard", "ProcessCard", "binding_card", "own_cgroup_with_limit"]


def binding_card() -> Card:
    """The smallest memory that binds the engine here: the container's cgroup, or the machine."""
    host = HostCard()
    path = own_cgroup_with_limit()
    if path is not None:
        card = CgroupCard(path, name="container memory")
        if card.info.total_bytes < host.info.total_bytes:
            return card
    return host
