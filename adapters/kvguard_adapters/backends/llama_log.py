"""What llama.cpp's server says in its log (at `-lv 4`): milestones, memory, sizes, and what may be shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvguard.domain import MIB, AccountName, Accounts, Basis, Entry

_MILESTONES = (
    (
        "weights_loading",
        re.compile(r"load_tensors: loading model tensors|llama_model_loader: loaded meta data"),
    ),
    (
        "weights_loaded",
        re.compile(r"llama_context: constructing llama_context|llama_init_from_model: n_seq_max"),
    ),
    ("kv_allocated", re.compile(r"sched_reserve: reserving|compute buffer size =")),
    ("warmup", re.compile(r"warming up the model")),
    ("ready", re.compile(r"listening on http|server is listening")),
)


def milestone(line: str) -> str | None:
    return next((name for name, pattern in _MILESTONES if pattern.search(line)), None)


# ---------------------------------------------------------------- memory

_BUFFER = re.compile(
    r"(?:\S+): +(?P<device>\S+) +(?P<what>model|KV|RS|compute|output) buffer size = +(?P<mib>[\d.]+) MiB"
)
_ACCOUNTS: dict[str, tuple[AccountName, str]] = {
    "model": ("weights", "weights"),
    "KV": ("kv", "kv cache"),
    "RS": ("kv", "recurrent state"),
    "compute": ("overhead", "compute buffer"),
    "output": ("overhead", "output buffer"),
}
_NEW_CONTEXT = "llama_context: constructing llama_context"
_HOST_DEVICE = re.compile(r"(?:CPU|BLAS)(?:_\w+)?$|(?:\w+_)?Host$")


def measured(lines: Iterable[str]) -> Accounts | None:
    """The buffers that were allocated, by device; None where the log names none.

    Weights and caches of several models (draft, projector) add up. A compute buffer is printed again each
    time it is reserved, so the last one of a context counts. `--fit` tries contexts with dummy caches of
    0 bytes: what those reserve is not there afterwards.
    """
    sizes: dict[tuple[str, str], int] = {}
    context: dict[tuple[str, str], int] = {}
    for line in lines:
        if _NEW_CONTEXT in line:
            _add(sizes, context)
            context = {}
        elif match := _BUFFER.search(line):
            key, size = (match["device"], match["what"]), round(float(match["mib"]) * MIB)
            if match["what"] == "model":
                sizes[key] = sizes.get(key, 0) + size
            elif match["what"] in ("KV", "RS"):
                context[key] = context.get(key, 0) + size
            else:
                context[key] = size
    _add(sizes, context)
    if not sizes:
        return None
    gpu = any(not is_host(device) for device, _ in sizes)
    return Accounts(
        entries=tuple(
            Entry(
                account=_ACCOUNTS[what][0],
                name=_ACCOUNTS[what][1],
                size_bytes=size,
                basis=Basis.MEASURED,
                on_card=not gpu or not is_host(device),
                note=device,
            )
            for (device, what), size in sizes.items()
        )
    )


def is_host(device: str) -> bool:
    """`CPU`, `CPU_REPACK`, `CPU_Mapped`, and pinned memory such as `CUDA_Host`."""
    return _HOST_DEVICE.match(device) is not None


def _add(sizes: dict[tuple[str, str], int], context: dict[tuple[str, str], int]) -> None:
    caches = [size for (_, what), size in context.items() if what == "KV"]
    if caches and not any(caches):
        return
    for key, size in context.items():
        sizes[key] = sizes.get(key, 0) + size


# ---------------------------------------------------------------- sizes

_SIZE = re.compile(r"llama_context: (?P<name>n_ctx|n_ctx_seq|n_batch|n_ubatch) += (?P<value>\d+)")
_SLOTS = re.compile(
    r"initializing, n_slots = (?P<slots>\d+), n_ctx_slot = (?P<ctx>\d+), kv_unified = '(?P<unified>\w+)'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedSizes:
    """0 and None where the log does not tell."""

    n_ctx: int = 0
    n_batch: int = 0
    slots: int = 0
    slot_ctx: int = 0
    unified: bool | None = None


def printed_sizes(lines: Sequence[str]) -> PrintedSizes:
    """The sizes of the last context that holds one slot at least; a draft model's smaller one does not."""
    slots = next((m for m in map(_SLOTS.search, reversed(lines)) if m), None)
    slot_ctx = int(slots["ctx"]) if slots else 0
    found: dict[str, int] = {}
    context: dict[str, int] = {}
    for line in lines:
        if _NEW_CONTEXT in line:
            context = {}
        elif match := _SIZE.search(line):
            context[match["name"]] = int(match["value"])
            if context.get("n_ctx", 0) >= slot_ctx:
                found = context
    return PrintedSizes(
        n_ctx=found.get("n_ctx", 0),
        n_batch=found.get("n_batch", 0),
        slots=int(slots["slots"]) if slots else 0,
        slot_ctx=slot_ctx,
        unified=slots["unified"] == "true" if slots else None,
    )


# ---------------------------------------------------------------- what may be shown

_PREFIX = re.compile(r"^[\d.]+ [A-Z] ")
_SERVING = re.compile(r"listening on http|server is listening|all slots are idle")
_N = r"-?[\d.]+"
_ENGINE_ERROR = r"(?:Context size has been exceeded|Invalid input batch|Compute error)\."
_FIXED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"slot +release: id +{_N} \| task {_N} \| stop processing: n_tokens = {_N}, truncated = {_N}$",
        rf"slot +print_timing: id +{_N} \| task {_N} \| +total time = +{_N} ms / +{_N} tokens$",
        r"srv +update_slots: all slots are idle$",
        rf"srv +\w+: (?:cancel task|failed to launch slot with (?:\w+ )?task), id_task = {_N}$",
        rf"srv +send_error: task id = {_N}, error: {_ENGINE_ERROR}$",
        rf"srv +\w+: {_ENGINE_ERROR} off = {_N}, n_batch = {_N}, ret = {_N}$",
        r"srv +\w+: failed to find free space in the KV cache, retrying with smaller batch size"
        rf"(?:, (?:off|n_batch|ret) = {_N})+$",
        rf"srv +\w+: purging slot {_N} with {_N} tokens$",
        rf"decode: failed to find a memory slot for batch of size {_N}$",
        rf"ggml_\w+: failed to allocate (?:CPU |CUDA\d+ )?buffer of size {_N}$",
        rf"ggml_\w+: allocating {_N} MiB on device {_N}: cudaMalloc failed: out of memory$",
        r"CUDA error: out of memory$",
        r"terminate called after throwing an instance of '[\w:]+'$",
        r"srv +\S+: operator\(\): cleaning up before exit\.\.\.$",
    )
)
_HEADS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"srv +send_error: task id = {_N}",
        r'srv +\S+: got exception: \{"error":\{"code":\d+',
        r"[\w./-]+\.(?:c|cc|cpp|cu|cuh|h|m):\d+",  # where an assertion failed
    )
)
_KEY = re.compile(r"api_keys?: ")


class LlamaLogFilter:
    """Says what a log may show of one life's output.

    While the model loads the log is free of requests, and all but the key's ending is shown. Afterwards a
    line may quote a prompt (a body that is not JSON, a grammar that does not parse), and a quote may look
    like any line: only those pass that consist of fixed words and numbers, and others are cut down to that.
    """

    def __init__(self) -> None:
        self._serving = False

    def __call__(self, line: str) -> str | None:
        text = _PREFIX.sub("", line)
        if self._serving:
            return _shown(text)
        self._serving = _SERVING.search(text) is not None
        return None if _KEY.search(text) else text


def _shown(text: str) -> str | None:
    if any(pattern.match(text) for pattern in _FIXED):
        return text
    return next((match[0] + " ..." for pattern in _HEADS if (match := pattern.match(text))), None)
