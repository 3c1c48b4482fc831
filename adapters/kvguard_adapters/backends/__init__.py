"""Inference engines behind the `Backend` protocol."""

from __future__ import annotations

import shutil
from typing import Literal

from kvguard.ports import Backend, BackendError
from kvguard_adapters.backends import embedded
from kvguard_adapters.backends.attach import Attach
from kvguard_adapters.backends.embedded import Embedded
from kvguard_adapters.backends.llama_cpp_python import LlamaCppPython
from kvguard_adapters.backends.llama_server import LlamaServer, find_llama_server
from kvguard_adapters.backends.options import Options
from kvguard_adapters.backends.vllm import Vllm, memory_share
from kvguard_adapters.backends.vllm_python import find_vllm

Kind = Literal["auto", "llama-server", "embedded", "llama-cpp-python", "vllm", "attach"]

__all__ = ["Kind", "Options", "find_backend", "memory_share"]


def find_backend(
    kind: Kind = "auto",
    options: Options | None = None,
    *,
    llama_server: str = "",
    llama_cpp_python: str = "",
    vllm_python: str = "",
    attach: str = "",
) -> Backend:
    """Find the engine to run. Blocking: it asks engines for their version and flags.

    auto takes llama-server from PATH (or the one named), else the embedded one. Raises BackendError with the
    remedy when there is none.
    """
    options = options or Options()
    match kind:
        case "llama-server":
            return LlamaServer(find_llama_server(llama_server), options)
        case "embedded":
            return Embedded(options)
        case "llama-cpp-python":
            return LlamaCppPython(llama_cpp_python, options)
        case "vllm":
            return Vllm(find_vllm(vllm_python), options)
        case "attach":
            return Attach(attach)
        case "auto":
            return _default(options, llama_server)


def _default(options: Options, llama_server: str) -> Backend:
    if llama_server or shutil.which("llama-server"):
        return LlamaServer(find_llama_server(llama_server), options)
    if embedded.is_installed():
        return Embedded(options)
    raise BackendError(
        "no engine found: put llama-server on PATH (or name it with --llama-server PATH), "
        "or pip install 'kvguard[embedded]'"
    )
