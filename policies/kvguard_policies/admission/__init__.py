"""Who may run now: the rules, by the names that `--admission` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvguard.ports import AdmissionPolicy
from kvguard_policies.admission.adaptive import Adaptive
from kvguard_policies.admission.fixed import Fixed
from kvguard_policies.admission.reserve import Reserve
from kvguard_policies.admission.unlimited import Unlimited

_PLAIN: Mapping[str, Callable[[], AdmissionPolicy]] = {
    "adaptive": Adaptive,
    "reserve": Reserve,
    "unlimited": Unlimited,
}


def make_policy(spec: str) -> AdmissionPolicy:
    """Read "reserve", "adaptive", "fixed:N" or "unlimited". Raises ValueError naming what is known."""
    name, _, number = spec.strip().partition(":")
    if name in _PLAIN and not number:
        return _PLAIN[name]()
    if name == "fixed" and number.isdecimal():
        return Fixed(int(number))
    raise ValueError(
        f"admission {spec!r} is not known: give {', '.join(sorted(_PLAIN))} or fixed:N, e.g. fixed:8"
    )


__all__ = ["Adaptive", "Fixed", "Reserve", "Unlimited", "make_policy"]
