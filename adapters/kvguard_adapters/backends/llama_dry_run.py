"""Ask llama-server itself what its arguments would take, without loading a weight.

Before it loads anything, llama-server sizes its buffers on a model without data (`--fit`, on by default) and
prints them at verbosity 4, for the very outputs that the server asks for: `llama-fit-params` counts logits of
every position instead (514 MiB against 28 for Gemma 3 270M). The process is ended as soon as it has told.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence

from kvguard.domain import MIB, AccountName, Accounts, Basis, Entry

TIMEOUT_S = 20.0
_TABLE = "common_memory_breakdown_print"
_ROW = re.compile(
    r"\|\s+- (?P<device>\S.*?)\s*\|(?:.*?\()?[^=|]*="
    r"\s*(?P<model>\d+) \+\s*(?P<context>\d+) \+\s*(?P<compute>\d+)"
)
_END = ("projected to use", "successfully fit", "failed to fit", "fitting params to free memory took")
_HOST_DEVICES = ("Host", "CPU", "CPU_REPACK", "CPU_Mapped")
_COLUMNS: tuple[tuple[str, AccountName, str], ...] = (
    ("model", "weights", "weights"),
    ("context", "kv", "kv cache"),
    ("compute", "overhead", "compute buffers"),
)


def dry_run(command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Accounts | None:
    """Run llama-server's own sizing for a full command line; None where it does not tell (or not in time).

    Sizes are whole MiB, rounded down. Without a GPU all of it is host memory, which then is the card.
    """
    lines = _until(command, _END, time.monotonic() + timeout_s)
    return parse(lines)


def parse(lines: Iterable[str]) -> Accounts | None:
    """Read the first memory table among log lines; None where there is none."""
    rows = list(_first_table(lines))
    if not rows:
        return None
    gpu = any(match["device"].split(" ")[0] not in _HOST_DEVICES for match in rows)
    entries = []
    for match in rows:
        device = match["device"]
        on_card = not gpu or device.split(" ")[0] not in _HOST_DEVICES
        for column, account, name in _COLUMNS:
            size = int(match[column]) * MIB
            if size:
                entries.append(
                    Entry(
                        account=account,
                        name=name,
                        size_bytes=size,
                        basis=Basis.DRY_RUN,
                        on_card=on_card,
                        note=device,
                    )
                )
    return Accounts(entries=tuple(entries))


def _first_table(lines: Iterable[str]) -> Iterator[re.Match[str]]:
    """Rows of the first table: later ones are of what was loaded, or of another try."""
    begun = False
    for line in lines:
        if _TABLE in line:
            begun = True
            match = _ROW.search(line)
            if match:
                yield match
        elif begun:
            return


def _until(command: Sequence[str], ends: tuple[str, ...], deadline_s: float) -> list[str]:
    """Lines that a command prints until one of `ends` is among them; it does not outlive this call."""
    argv = [*command, "--fit", "on", "-lv", "4", "--no-warmup"]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as child:
        try:
            return _read(child, ends, deadline_s)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(child: subprocess.Popen[bytes], ends: tuple[str, ...], deadline_s: float) -> list[str]:
    assert child.stdout is not None
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and selector.select(left_s):
            chunk = os.read(child.stdout.fileno(), 65536)
            text += chunk
            if not chunk or any(end.encode() in text for end in ends):
                break
    return text.decode(errors="replace").splitlines()
