#!/usr/bin/env python3
"""Why kvguard exists, on real engines: the same load on llama-server alone and through kvguard.

Three cases, each in a memory cgroup of the stated size (the card):

  overflow  six requests at once on a unified pool of 2,048 tokens with 4 slots
  growth    sixty chats of about 1,200 tokens, one to four at a time
  start     a start with everything left to the engine or to kvguard

Both sides run the same binary with the same model and load mode, read back from the command lines that really
ran (a page cache that was warm before would decide the result with another load mode). Needs root, or a
delegated memory cgroup. Exit code: 0 when kvguard answered everything, else 1; 2 when it cannot run here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from kvguard import __version__
from kvguard.domain import MIB
from kvguard.journal import read_all
from kvguard_adapters.models.demo import demo_model

REPO = Path(__file__).resolve().parent.parent
START_S = 240.0
STOP_S = 40.0
REQUEST_S = 900.0
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


class CannotRun(Exception):
    """This machine lacks something; the message says what."""


# ---------------------------------------------------------------- what is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of equal size and different text. `prompt_words` are about as many tokens."""

    route: str
    requests: int
    at_once: int
    prompt_words: int
    new_tokens: int

    def body(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)
        text = f"{number}: " + " ".join(rng.choices(WORDS, k=self.prompt_words))
        sizes = {"max_tokens": self.new_tokens, "ignore_eos": True, "temperature": 0}
        if self.route == "chat/completions":
            return {"messages": [{"role": "user", "content": text}], **sizes}
        return {"prompt": text, **sizes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    shows: str
    card_bytes: int
    load: Load
    alone: tuple[str, ...]
    guarded: tuple[str, ...]


CASES = (
    Case(
        name="overflow",
        shows="6 at once, 700 + 300 tokens, pool of 2,048 tokens, 4 slots, 1 GiB card",
        card_bytes=1024 * MIB,
        load=Load(route="completions", requests=6, at_once=6, prompt_words=700, new_tokens=300),
        alone=("-c", "2048", "-np", "4", "--kv-unified"),
        guarded=("--pool", "2048", "--ctx", "2048", "--batch", "4", "--kv-pool", "unified"),
    ),
    Case(
        name="growth",
        shows="60 chats of 1,200 tokens, 4 at a time, 600 MiB card",
        card_bytes=600 * MIB,
        load=Load(route="chat/completions", requests=60, at_once=4, prompt_words=1200, new_tokens=16),
        alone=("-c", "8192", "-np", "4"),
        guarded=(),
    ),
    Case(
        name="start",
        shows="a plain start and one request, 400 MiB card",
        card_bytes=400 * MIB,
        load=Load(route="completions", requests=1, at_once=1, prompt_words=50, new_tokens=16),
        alone=("--fit", "on"),
        guarded=(),
    ),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one side did with one case."""

    case: str
    side: str
    command: str
    asked: int
    answered: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    engine_exit: str = "running"
    oom_kills: int = 0
    load_mode: str = "?"
    start_s: float | None = None
    load_s: float | None = None


# ---------------------------------------------------------------- a card made of a memory cgroup


class CgroupCard:
    """A memory cgroup of our own, v1 or v2, for the engine that runs alone."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        self._v1 = v1.is_dir()
        self.path = (v1 if self._v1 else Path("/sys/fs/cgroup")) / name
        try:
            self.path.mkdir()
            if self._v1:
                self._write("memory.limit_in_bytes", limit_bytes)
                self._write("memory.swappiness", 0)
            else:
                self._write("memory.max", limit_bytes)
                self._write("memory.swap.max", 0)
        except OSError as exc:
            self.remove()
            raise CannotRun(
                f"no memory cgroup can be made at {self.path}: {exc.strerror}; run as root"
            ) from exc

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line that enters the cgroup first, and then becomes `argv`."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *argv]

    def oom_kills(self) -> int:
        events = self.path / ("memory.oom_control" if self._v1 else "memory.events")
        counts = dict(line.split() for line in events.read_text().splitlines())
        return int(counts["oom_kill"])

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


# ---------------------------------------------------------------- processes


@contextlib.asynccontextmanager
async def running(argv: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child in a session of its own; asked to end, then killed, when the block is left."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield child
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), STOP_S)


async def healthy(url: str, child: asyncio.subprocess.Process) -> bool:
    """Wait until it would serve; False when it ended or took too long."""
    deadline_s = time.monotonic() + START_S
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while child.returncode is None and time.monotonic() < deadline_s:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(0.1)
    return False


async def send(url: str, load: Load, outcome: Outcome) -> None:
    """Send the load and count what came back."""
    gate = asyncio.Semaphore(load.at_once)
    errors: Counter[str] = Counter()

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        async with gate:
            try:
                async with session.post(f"{url}/v1/{load.route}", json=load.body(number)) as answer:
                    body = await answer.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as exc:
                errors[type(exc).__name__] += 1
                return
        if answer.status != 200:
            errors[f"HTTP {answer.status}: {body['error']['message']}"] += 1
            return
        outcome.answered += 1
        outcome.prompt_tokens = max(outcome.prompt_tokens, body["usage"]["prompt_tokens"])
        outcome.new_tokens = max(outcome.new_tokens, body["usage"]["completion_tokens"])

    began_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(one(session, number) for number in range(load.requests)))
    outcome.load_s = round(time.monotonic() - began_s, 1)
    outcome.errors = dict(errors)


async def try_it(argv: Sequence[str], log: Path, port: int, load: Load, outcome: Outcome) -> None:
    url = f"http://127.0.0.1:{port}"
    began_s = time.monotonic()
    async with running(argv, log) as child:
        if await healthy(url, child):
            outcome.start_s = round(time.monotonic() - began_s, 1)
            await send(url, load, outcome)
        if outcome.answered < load.requests:  # an engine that was killed is seen to end a moment later
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), 2)
        if child.returncode is not None:
            outcome.engine_exit = exit_in_words(child.returncode)


def exit_in_words(returncode: int) -> str:
    return f"killed, rc {128 - returncode}" if returncode < 0 else f"ended, rc {returncode}"


# ---------------------------------------------------------------- the two sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What both sides run."""

    server: str
    model: Path
    arguments: tuple[str, ...] = ()


def alone(case: Case, engine: Engine, folder: Path) -> Outcome:
    port = free_port()
    argv = [engine.server, "-m", str(engine.model), "--port", str(port), "--load-mode", "none", *case.alone]
    argv += engine.arguments
    outcome = Outcome(case=case.name, side="alone", command=shown(argv), asked=case.load.requests)
    outcome.load_mode = load_mode(argv)
    card = CgroupCard(f"kvguard-demo-{os.getpid()}", case.card_bytes)
    try:
        asyncio.run(try_it(card.inside(argv), folder / f"{case.name}-alone.log", port, case.load, outcome))
        outcome.oom_kills = card.oom_kills()
    finally:
        card.remove()
    return outcome


def guarded(case: Case, engine: Engine, folder: Path) -> Outcome:
    port, state = free_port(), folder / f"{case.name}-state"
    limit = f"{case.card_bytes // MIB}MiB"
    arguments = ["serve", str(engine.model), "--memory-limit", limit, "--llama-server", engine.server]
    arguments += case.guarded
    arguments += ["--deadline", f"{REQUEST_S:.0f}"]  # as patient as the clients are, on a slow machine too
    own = ["--port", str(port), "--state-dir", str(state)]
    passed_on = ["--", *engine.arguments] if engine.arguments else []
    argv = [sys.executable, "-m", "kvguard.cli", *arguments, *own, *passed_on]
    command = shown(["kvguard", *arguments, *passed_on])
    outcome = Outcome(case=case.name, side="kvguard", command=command, asked=case.load.requests)
    asyncio.run(try_it(argv, folder / f"{case.name}-kvguard.log", port, case.load, outcome))
    deaths = [event for event in events(state) if event.get("event") == "backend_died"]
    outcome.oom_kills = sum("oom_kill" in str(event.get("exit")) for event in deaths)
    records, _ = read_all(state)
    if records:
        outcome.load_mode = load_mode(records[-1].command)
    return outcome


def events(state: Path) -> Iterator[dict[str, Any]]:
    log = state / "log" / "kvguard.jsonl"
    for line in log.read_text().splitlines() if log.exists() else ():
        yield json.loads(line)


def load_mode(argv: Sequence[str]) -> str:
    """The load mode of a llama-server command line."""
    given = [value for name, value in pairwise(argv) if name in ("-lm", "--load-mode")]
    return given[-1] if given else "auto"


def shown(argv: Sequence[str]) -> str:
    """The command line with bare file names, for the table."""
    return shlex.join(Path(part).name if part.startswith("/") else part for part in argv)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------- report


def table_of(outcomes: Sequence[Outcome]) -> Table:
    table = Table(show_lines=True)
    for heading in ("case", "side", "answered", "errors", "engine", "start, load", "load mode", "command"):
        table.add_column(heading, overflow="fold")
    shows = {case.name: case.shows for case in CASES}
    for outcome in outcomes:
        color = "green" if outcome.answered == outcome.asked else "red"
        oom = f", {outcome.oom_kills} oom_kill" if outcome.oom_kills else ""
        table.add_row(
            f"{outcome.case}: {shows[outcome.case]}",
            outcome.side,
            f"[{color}]{outcome.answered} of {outcome.asked}[/]",
            "\n".join(f"{count} x {what}" for what, count in outcome.errors.items()) or "-",
            outcome.engine_exit + oom,
            f"{in_seconds(outcome.start_s)}, {in_seconds(outcome.load_s)}",
            outcome.load_mode,
            outcome.command,
        )
    return table


def in_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False
    )
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "kvguard": __version__,
        "commit": commit.stdout.strip(),
    }


def find_server(named: str) -> str:
    """The binary that both sides run: named, or the one that `make engines` prepared."""
    if named:
        return named
    asked = subprocess.run(
        [sys.executable, REPO / "scripts" / "engines.py", "path", "llama-server"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise CannotRun(f"{asked.stderr.strip()}; or name one by --llama-server")
    return asked.stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same load on llama-server alone and through kvguard.")
    parser.add_argument("--llama-server", default="", help="binary to use; default: the prepared one")
    parser.add_argument("--threads", type=int, help="engine threads on both sides; fewer on a busy machine")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="default: all")
    parser.add_argument("--side", choices=["alone", "kvguard"], action="append", help="default: both")
    parser.add_argument("--keep", type=Path, help="keep logs and state in this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def run(arguments: argparse.Namespace, folder: Path, console: Console) -> list[Outcome]:
    threads = ("--threads", str(arguments.threads)) if arguments.threads else ()
    engine = Engine(server=find_server(arguments.llama_server), model=demo_model(), arguments=threads)
    outcomes = []
    for case in CASES:
        if arguments.case and case.name not in arguments.case:
            continue
        for side, make in (("alone", alone), ("kvguard", guarded)):
            if not arguments.side or side in arguments.side:
                console.print(f"{case.name}, {side}: {case.shows} ...")
                outcomes.append(make(case, engine, folder))
    return outcomes


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that children and cgroups go either way
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="kvguard-demo-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            outcomes = run(arguments, folder, console)
        except CannotRun as exc:
            console.print(f"[bold red]error:[/] {exc}")
            return 2
        except KeyboardInterrupt:
            console.print("interrupted: engines and cgroups are gone")
            return 130
    if arguments.json:
        print(json.dumps({"machine": machine(), "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        Console(width=None if sys.stdout.isatty() else 180).print(table_of(outcomes))
    lost = [o for o in outcomes if o.side == "kvguard" and o.answered < o.asked]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
