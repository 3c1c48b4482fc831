"""Structured signals as a context file carries them -> Evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvguard.domain import MIB, Evidence, ExitStatus

_EXIT = re.compile(r"(?:exit|code)?\s*:?\s*(-?(?:0x[0-9a-fA-F]+|\d+))$")
_SIGNAL = re.compile(r"signal\s*:?\s*(\d+)$")


def exit_of(said: str, oom_kills: int = 0) -> ExitStatus | None:
    """Read `running`, `exit 137`, `exit 0xC0000005` or `signal 9`. Raises ValueError for anything else."""
    said = said.strip().lower()
    if said in ("", "running", "alive"):
        return None
    if match := _SIGNAL.match(said):
        return ExitStatus(signal=int(match.group(1)), oom_kills=oom_kills)
    if match := _EXIT.match(said):
        code = int(match.group(1), 0)
        if -64 < code < 0:
            return ExitStatus(signal=-code, oom_kills=oom_kills)
        return ExitStatus(code=code, oom_kills=oom_kills)
    raise ValueError(f"exit must be 'running', 'exit N' or 'signal N', got {said!r}")


def evidence_of(
    context: Mapping[str, Any], *, exit_status: ExitStatus | None, log_lines: Iterable[str] = ()
) -> Evidence:
    """Make Evidence of a context. Keys that nothing here knows are left out, so that a newer file works.

    Raises ValueError naming the key whose value is of the wrong kind.
    """
    oom_kills = _number(context, "cgroup_oom_kill_delta", "oom_kill", "oom_kills", "oom_kill_count")
    if context.get("oom_killed_flag") is True and not oom_kills:
        oom_kills = 1
    sender = _sender(context)
    return Evidence(
        exit=exit_status,
        milestone=str(context.get("last_milestone") or context.get("milestone") or "started"),
        log_lines=tuple(log_lines),
        http_status=_number(context, "http_status"),
        http_body=str(context.get("http_body") or ""),
        healthy=_health(context.get("health", context.get("healthy"))),
        killed_by_us=sender in ("supervisor", "kvguard"),
        card_total_bytes=_mib(context, "dedicated_total_mib", "gpu_total_mib"),
        card_used_bytes=_mib(context, "dedicated_used_mib", "gpu_used_mib"),
        card_used_by_others_bytes=_mib(context, "gpu_foreign_mib", "foreign_mib"),
        oom_kills=oom_kills,
        signal_sender=sender,
        requests_in_flight=_number(context, "requests_in_flight"),
        canary_ok=_health(context.get("canary")),
        tokens_per_s=_real(context, "tg_tps", "tokens_per_s"),
        baseline_tokens_per_s=_real(context, "baseline_tg_tps", "baseline_tokens_per_s"),
        shared_used_bytes=_mib(context, "shared_used_mib", "gtt_used_mib", "shared_gpu_used_mib"),
        commit_limit_reached=context.get("commit_limit_reached") is True,
        shm_free_bytes=_number(context, "shm_free_bytes"),
        model_file_changed=context.get("file_size_changed") is True,
        host_event=str(context.get("host_event") or ""),
    )


def _first(context: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    return next(((name, context[name]) for name in names if context.get(name) is not None), ("", None))


def _real(context: Mapping[str, Any], *names: str) -> float | None:
    name, value = _first(context, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _number(context: Mapping[str, Any], *names: str) -> int | None:
    value = _real(context, *names)
    return None if value is None else int(value)


def _mib(context: Mapping[str, Any], *names: str) -> int | None:
    value = _real(context, *names)
    return None if value is None else int(value * MIB)


def _health(value: object) -> bool | None:
    """200 or true: it answers; another status, or a word such as `timeout` or `refused`: it does not."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value == 200
    return str(value).lower() in ("ok", "200", "healthy", "pass", "passed")


def _sender(context: Mapping[str, Any]) -> str:
    for name, value in context.items():
        if name in ("supervisor_sent", "kvguard_sent") and value:
            return "supervisor"
        if name in ("signal_sender", "signal_from", "sent_by") and value:
            return str(value).lower()
    return ""
