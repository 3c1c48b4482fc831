"""llama.cpp's server out of the `xllamacpp` wheel, in a child process of its own: needs no compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from importlib.metadata import version as installed_version

from kvguard.domain import Accounts, Knobs, Launch
from kvguard.ports import BackendError
from kvguard_adapters.backends.llama_backend import LlamaBackend
from kvguard_adapters.backends.llama_dry_run import dry_run
from kvguard_adapters.backends.llama_params import llama_params
from kvguard_adapters.backends.options import Options

_REMEDY = "pip install 'kvguard[embedded]', or name a llama-server with --llama-server PATH"


def is_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


class Embedded(LlamaBackend):
    """Implements `ports.Backend`."""

    name = "embedded"

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options or Options())
        if not is_installed():
            raise BackendError(f"the embedded engine is not installed: {_REMEDY}")
        if self.options.extra_args:
            raise BackendError(
                "the embedded engine takes no arguments after --: use --backend llama-server for them"
            )

    def version(self) -> str:
        return f"xllamacpp {installed_version('xllamacpp')}"

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        params = json.dumps(dataclasses.asdict(llama_params(knobs, self.options)))
        module = "kvguard_adapters.backends.embedded_server"
        return Launch(
            argv=(sys.executable, "-m", module, "--port", str(port), "--params", params),
            env=(("LLAMA_API_KEY", api_key),) if api_key else (),
        )

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        return dry_run(self.launch(knobs, port=0, api_key="").argv)
