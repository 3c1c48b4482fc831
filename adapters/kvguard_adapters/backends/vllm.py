"""vLLM in a Python environment of its own: knobs become the arguments that its version takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvguard.domain import GIB, Accounts, Capabilities, Endpoint, Knobs, Launch, PoolKind, Rung, Variant
from kvguard_adapters.backends import vllm_log
from kvguard_adapters.backends.flags import Flags, Option
from kvguard_adapters.backends.options import Options
from kvguard_adapters.backends.steps import next_steps
from kvguard_adapters.backends.vllm_engine import VllmEngine
from kvguard_adapters.backends.vllm_python import VllmPython

ON_THE_FLY = (("fp8_per_tensor", 8.0), ("mxfp8", 8.25), ("fp8", 8.0))
"""Methods that quantise a 16-bit checkpoint while loading, by preference, with the bits of a weight.

Those that only quantise experts are not here. The CPU build lists them too, but has no kernels for them.
"""
_MODEL_TYPES = ("f16", "bf16", "f32", "auto")


class Vllm:
    """Implements `ports.Backend`."""

    name = "vllm"

    def __init__(self, python: VllmPython, options: Options | None = None) -> None:
        self.python = python
        self.options = options or Options()
        self._abilities = python.abilities()
        self._flags = Flags.of_spellings(self._abilities.flags)
        self.pinned = self._flags.pinned(_EVERY_OPTION, self.options.extra_args)
        self.capabilities = Capabilities(
            rungs=frozenset(Rung),
            pool_kinds=frozenset({PoolKind.UNIFIED}),
            kv_types=tuple(self._abilities.kv_types),
            overflow="preempts",
            reports_kv_usage=True,
            continues_completions=True,
            continues_chat=True,
        )

    def version(self) -> str:
        return f"{self.python.distribution} {self.python.version}"

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        extra = self.options.extra_args
        arguments = self._flags.arguments(_options(knobs, self.options), extra, self.pinned)
        own = ("--host", "127.0.0.1", "--port", str(port))
        return Launch(argv=(*self.python.server(), *arguments, *extra, *own), env=self._env(knobs, api_key))

    def connect(self, endpoint: Endpoint) -> VllmEngine:
        return VllmEngine(endpoint, model_path=self.options.model_path)

    def milestone(self, line: str) -> str | None:
        return vllm_log.milestone(line)

    def measured(self, log_lines: Sequence[str]) -> Accounts | None:
        return vllm_log.measured(log_lines)

    def next_steps(self, knobs: Knobs, rung: Rung) -> Sequence[Knobs]:
        return next_steps(
            knobs, rung, replace(self.options, variants=self._variants(knobs.quant)), self.pinned
        )

    def log_filter(self) -> Callable[[str], str | None]:
        return vllm_log.VllmLogFilter()

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        return None

    def _variants(self, current: Variant) -> tuple[Variant, ...]:
        """Those of the user, and what this version on a GPU makes of a 16-bit checkpoint while loading it."""
        methods = self._abilities.quantisations
        method = next(((name, bits) for name, bits in ON_THE_FLY if name in methods), None)
        whole = current.kind == "checkpoint" and current.bits >= 16
        if method is None or not whole or not self.options.layers or not self.options.model_path:
            return self.options.variants
        name, bits = method
        made = Variant(
            kind="on_the_fly",
            source=name,
            bits=bits,
            label=name,
            size_bytes=round(current.size_bytes * bits / current.bits),
        )
        return (*self.options.variants, made)

    def _env(self, knobs: Knobs, api_key: str) -> tuple[tuple[str, str], ...]:
        env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if api_key:
            env["VLLM_API_KEY"] = api_key  # any user of the machine can read argv
        if Path(_model(knobs, self.options)).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        pool_bytes = self.options.pool_bytes(knobs)
        if pool_bytes and not self._flags.knows("--kv-cache-memory-bytes"):
            env["VLLM_CPU_KVCACHE_SPACE"] = str(-(-pool_bytes // GIB))
        return tuple(env.items())


def memory_share(total_bytes: int, free_bytes: int, headroom_bytes: int) -> float:
    """What `--gpu-memory-utilization` may be: vLLM refuses more than is free when it starts."""
    usable = max(0, free_bytes - headroom_bytes)
    return usable * 1000 // total_bytes / 1000


def _model(knobs: Knobs, options: Options) -> str:
    return options.model_path if knobs.quant.kind == "on_the_fly" else knobs.quant.source


def _options(knobs: Knobs, options: Options) -> Iterator[Option]:
    yield _option("quant", "--model", _model(knobs, options))
    # the first name is the model's own; "default" is the one that any client may use
    names = dict.fromkeys((options.model_name, "default"))
    yield _option("", "--served-model-name", *names)
    yield _option("batch", "--max-num-seqs", knobs.batch)
    yield _option("prefill_tokens", "--max-num-batched-tokens", max(knobs.prefill_tokens, knobs.batch))
    yield _option("ctx_tokens", "--max-model-len", knobs.ctx_tokens)
    if knobs.kv_type not in _MODEL_TYPES:
        yield _option("kv_type", "--kv-cache-dtype", knobs.kv_type)
    if knobs.quant.kind == "on_the_fly":
        yield _option("quant", "--quantization", knobs.quant.source)
    if 0 <= knobs.gpu_layers < options.layers:
        left_out = (options.layers - knobs.gpu_layers) * options.layer_bytes
        yield _option("gpu_layers", "--cpu-offload-gb", f"{-(-left_out * 100 // GIB) / 100:.2f}")
    pool_bytes = options.pool_bytes(knobs)
    if pool_bytes:
        yield _option("pool_tokens", "--kv-cache-memory-bytes", pool_bytes)
    elif options.memory_share:
        yield _option("pool_tokens", "--gpu-memory-utilization", options.memory_share)
    yield _option("", "--disable-uvicorn-access-log")
    yield Option(knob="", alternatives=(("--no-enable-log-requests",), ("--disable-log-requests",)))


def _option(knob: str, *words: object) -> Option:
    return Option(knob=knob, alternatives=(tuple(map(str, words)),))


_EVERY_OPTION = tuple(
    Option(knob=knob, alternatives=((flag,),))
    for knob, flag in (
        ("quant", "--model"),
        ("quant", "--quantization"),
        ("batch", "--max-num-seqs"),
        ("prefill_tokens", "--max-num-batched-tokens"),
        ("ctx_tokens", "--max-model-len"),
        ("kv_type", "--kv-cache-dtype"),
        ("gpu_layers", "--cpu-offload-gb"),
        ("pool_tokens", "--kv-cache-memory-bytes"),
        ("pool_tokens", "--gpu-memory-utilization"),
        ("pool_tokens", "--num-gpu-blocks-override"),
    )
)
"""To ask which knobs the user's own arguments set."""
