"""llama.cpp's `llama-server`, any binary: knobs become the flags that its version knows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cached_property

from kvguard.domain import Accounts, Knobs, Launch
from kvguard.ports import BackendError
from kvguard_adapters.backends.flags import Flags, Option
from kvguard_adapters.backends.llama_backend import LlamaBackend
from kvguard_adapters.backends.llama_dry_run import dry_run
from kvguard_adapters.backends.llama_params import LlamaParams, llama_params
from kvguard_adapters.backends.options import Options

ASK_TIMEOUT_S = 30.0
MEMORY_LINES = "4"
"""The verbosity at which buffers are printed. The next one prints prompts."""


def find_llama_server(path: str = "") -> str:
    """The binary that was named, else the one on PATH. Raises BackendError with the remedy."""
    found = shutil.which(os.path.expanduser(path or "llama-server"))
    if found is None:
        where = f"{path} is not an executable file" if path else "there is no llama-server on PATH"
        raise BackendError(f"{where}: name a binary with --llama-server PATH, or use --backend embedded")
    return found


class LlamaServer(LlamaBackend):
    """Implements `ports.Backend`."""

    name = "llama-server"

    def __init__(self, binary: str, options: Options | None = None) -> None:
        super().__init__(options or Options())
        self.binary = binary
        self.pinned = self._flags.pinned(_EVERY_OPTION, self.options.extra_args)

    def version(self) -> str:
        return self._version

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        extra = self.options.extra_args
        arguments = self._flags.arguments(_options(llama_params(knobs, self.options)), extra, self.pinned)
        return Launch(
            argv=(self.binary, *arguments, *extra, "--host", "127.0.0.1", "--port", str(port)),
            env=(("LLAMA_API_KEY", api_key),) if api_key else (),  # any user of the machine can read argv
        )

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        return dry_run(self.launch(knobs, port=0, api_key="").argv)

    @cached_property
    def _flags(self) -> Flags:
        return Flags.of_help(self._ask("--help"))

    @cached_property
    def _version(self) -> str:
        match = re.search(r"^version: (.+)$", self._ask("--version"), re.MULTILINE)
        if match is None:
            raise BackendError(f"{self.binary} --version does not name one: is it llama-server?")
        return match[1]

    def _ask(self, flag: str) -> str:
        command = [self.binary, flag]
        try:
            answer = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise BackendError(
                f"{' '.join(command)} does not run ({_reason(exc)}): name another with --llama-server PATH"
            ) from exc
        return (answer.stdout + answer.stderr).decode(errors="replace")


def _reason(exc: Exception) -> str:
    if isinstance(exc, subprocess.CalledProcessError):
        tail = bytes(exc.stderr or b"").decode(errors="replace").strip().splitlines()
        return f"exit {exc.returncode}" + (f", {tail[-1]}" if tail else "")
    return str(exc)


def _options(p: LlamaParams) -> Iterator[Option]:
    """In the order in which a person would write them."""
    yield _option("quant", "-m", p.model)
    yield _option("", "--alias", p.model_alias)
    yield _option("batch", "-np", p.n_parallel)
    yield _option("pool_tokens", "-c", p.n_ctx)
    yield _option("pool_kind", "-kvu" if p.kv_unified else "-no-kvu")
    if p.kv_unified_per_slot:
        yield _option("ctx_tokens", "--kv-unified-per-slot", p.kv_unified_per_slot)
    yield _option("prefill_tokens", "-b", p.n_batch)
    yield _option("prefill_tokens", "-ub", p.n_ubatch)
    yield _option("kv_type", "-ctk", p.cache_type_k)
    yield _option("kv_type", "-ctv", p.cache_type_v)
    yield _option("gpu_layers", "-ngl", p.n_gpu_layers)
    yield _option("host_cache_bytes", "--cache-ram", p.cache_ram_mib)
    yield _option("host_cache_bytes", "--ctx-checkpoints", p.n_ctx_checkpoints)
    if p.embedding:
        yield _option("", "--embeddings")
    # Mapped weights are page cache: charged to whoever read them first, perhaps not to this card.
    yield Option(knob="", alternatives=(("--load-mode", "none"), ("--no-mmap",)))
    yield _option("", "--fit", "off")  # it reads the machine's memory, not the cgroup's
    yield _option("", "-lv", MEMORY_LINES)
    yield _option("", "--metrics")
    yield _option("", "--slots")
    yield Option(knob="", alternatives=(("--no-ui",), ("--no-webui",)))
    yield _option("", "--offline")


def _option(knob: str, *words: object) -> Option:
    return Option(knob=knob, alternatives=(tuple(map(str, words)),))


_EVERY_OPTION = tuple(
    _options(
        LlamaParams(
            model="",
            model_alias="",
            n_ctx=0,
            n_parallel=0,
            kv_unified=True,
            kv_unified_per_slot=1,
            n_batch=0,
            n_ubatch=0,
            cache_type_k="",
            cache_type_v="",
            n_gpu_layers=0,
            cache_ram_mib=0,
            n_ctx_checkpoints=0,
            embedding=True,
        )
    )
)
"""To ask which knobs the user's own arguments set."""
