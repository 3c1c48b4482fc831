"""The child process of the embedded engine: llama.cpp's server on loopback until SIGTERM.

    python -m kvguard_adapters.backends.embedded_server --port 8080 --params '{"model": "m.gguf", ...}'

The API key comes in LLAMA_API_KEY, as with llama-server. Exits with 1 when the model cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

import xllamacpp

MEMORY_LINES = 4
"""The verbosity at which buffers are printed. The next one prints prompts."""

_ENDS = {signal.SIGTERM, signal.SIGINT}


def main() -> int:
    arguments = _parse()
    # Blocked before the server makes its threads: they inherit it, so that the signal waits for `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        server = xllamacpp.Server(_params(arguments))
    except (RuntimeError, ValueError) as exc:
        print(f"error: the server did not start: {exc}", file=sys.stderr, flush=True)
        return 1
    # not llama.cpp's own words for being ready: its log is written behind, and this would overtake it
    print(f"embedded server at {server.listening_address}", flush=True)
    signal.sigwait(_ENDS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)  # a second one: at once
    del server
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="embedded_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--params", type=json.loads, required=True, help="JSON of xllamacpp.CommonParams")
    parser.add_argument("--fit", choices=("on", "off"), default="off")
    parser.add_argument("-lv", dest="verbosity", type=int, default=MEMORY_LINES)
    parser.add_argument("--no-warmup", dest="warmup", action="store_false")
    return parser.parse_args()


def _params(arguments: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    given: dict[str, Any] = arguments.params
    params.model.path = given.pop("model")
    params.model_alias = {given.pop("model_alias")}
    for name in ("cache_type_k", "cache_type_v"):
        setattr(params, name, xllamacpp.ggml_type[f"GGML_TYPE_{given.pop(name).upper()}"])
    for name, value in given.items():
        setattr(params, name, value)
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    key = os.environ.pop("LLAMA_API_KEY", "")
    params.api_keys = [key] if key else []
    # Mapped weights are page cache: charged to whoever read them first, perhaps not to this card.
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.fit_params = arguments.fit == "on"
    params.verbosity = arguments.verbosity
    threads = os.environ.get("LLAMA_ARG_THREADS")  # as llama-server reads it
    if threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.warmup = arguments.warmup
    params.endpoint_metrics = True
    params.ui = False
    params.offline = True
    return params


if __name__ == "__main__":
    sys.exit(main())
