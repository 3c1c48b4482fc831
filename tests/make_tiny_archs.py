"""Find the tensors of a tiny model by asking llama.cpp what it misses; writes data/tiny_archs.json.

    python tests/make_tiny_archs.py ARCHITECTURE [key=JSON ...] [--tensor NAME ...]

Starts from what the file has of this architecture (else of llama's hyperparameters). `--tensor` names one
that the loader calls optional but the graph needs. Needs llama-fit-params beside llama-server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_probe import llama_server
from tiny_gguf import ARCHS_FILE, VOCAB, architectures, tensors_of, write

MOST_TRIES = 2000
_MISSING = re.compile(r"tensor '([^']+)' not found|missing tensor '([^']+)'")
_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected\s+([\d, ]+), got")


def ask(program: Path, model: Path) -> tuple[bool, str]:
    """Size the model once. An abort may lose the last line of the log, so silence is asked again."""
    command = [str(program), "-m", str(model), "-c", "512", "-np", "1", "-fitp", "on"]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    out = ""
    for _ in range(40):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        out = done.stdout
        if done.returncode == 0 or "error loading" in out or "GGML_ASSERT" in out:
            return done.returncode == 0, out
    return False, out


def discover(architecture: str, hparams: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    """Add tensors, and correct their shapes, until llama.cpp sizes the model. Raises: SystemExit."""
    server = llama_server()
    if server is None:
        raise SystemExit("no llama-server: run scripts/engines.py llama.cpp")
    shapes: dict[str, tuple[int, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        for _ in range(MOST_TRIES):
            write(path, architecture, hparams, tensors, vocab=VOCAB)
            fine, out = ask(server.with_name("llama-fit-params"), path)
            if fine:
                return
            missing, wrong = _MISSING.search(out), _SHAPE.search(out)
            if wrong:
                shape = tuple(int(n) for n in wrong[2].replace(" ", "").strip(",").split(","))
                tensors[wrong[1]] = shapes[_suffix(wrong[1])] = shape
            elif missing:
                name = missing[1] or missing[2]
                tensors[name] = shapes.get(_suffix(name), (1,))
            else:
                raise SystemExit(out[-2000:])
    raise SystemExit(f"{architecture}: no end after {MOST_TRIES} tries")


def _suffix(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "blk.", name)


def packed(hparams: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Fold equal tensors of several layers into one entry."""
    layers_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    entries: dict[str, list[int]] = {}
    for name, shape in tensors.items():
        layered = re.match(r"blk\.(\d+)\.(.+)$", name)
        if layered:
            layers_of.setdefault((layered[2], shape), []).append(int(layered[1]))
        else:
            entries[name] = list(shape)
    for (name, shape), layers in layers_of.items():
        every = sorted(layers) == list(range(hparams["block_count"]))
        entries[f"blk.{'*' if every else ','.join(map(str, sorted(layers)))}.{name}"] = list(shape)
    return entries


def main() -> None:
    architecture, *rest = sys.argv[1:]
    known = architectures()
    spec = known.get(architecture, {"hparams": known["llama"]["hparams"], "tensors": {}})
    hparams = dict(spec["hparams"])
    tensors = tensors_of(spec)
    for argument in rest:
        key, _, value = argument.partition("=")
        if value:
            hparams[key] = json.loads(value)
        elif argument != "--tensor":
            tensors[argument] = (1,)
    discover(architecture, hparams, tensors)
    known[architecture] = {"hparams": hparams, "tensors": packed(hparams, tensors)}
    lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    ARCHS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{architecture}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
