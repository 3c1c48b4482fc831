"""What is known before the first start: model, engine, card, journal, and the configuration to begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvguard import __version__
from kvguard.accounts import EngineName, checkpoint_bytes_of, geometry_of
from kvguard.api.auth import Keys, read_key_file
from kvguard.cgroups import own_cgroups
from kvguard.child import Child
from kvguard.domain import CardInfo, Knobs
from kvguard.events import Events
from kvguard.journal import journal_of
from kvguard.model import ModelError, ModelMeta
from kvguard.planner import usable_bytes
from kvguard.ports import Backend, Card
from kvguard.record import (
    BackendRecord,
    FileRecord,
    Fingerprint,
    ModelRecord,
    WhyRecord,
    card_record,
)
from kvguard.recorder import Recorder
from kvguard.selection import Predictor, asked, attached_knobs, first_attempt, wanted_knobs
from kvguard.settings import Settings
from kvguard.supervisor import Attempt
from kvguard.vllm_accounts import pool_bytes_of
from kvguard_adapters.backends import Options, find_backend
from kvguard_adapters.cards import CgroupCard, ProcessCard, binding_card
from kvguard_adapters.models.demo import demo_model
from kvguard_adapters.models.gguf import read_gguf, read_variants
from kvguard_adapters.models.huggingface import read_checkpoint
from kvguard_adapters.models.variants import smaller_variants
from kvguard_policies.headroom import parse_headroom


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Everything known before the first start. `models[0]` is what was asked for; empty when attached."""

    settings: Settings
    models: tuple[ModelMeta, ...]
    model_name: str
    backend: Backend
    engine: EngineName
    card: Card
    headroom_bytes: int
    usable_bytes: int
    fingerprint: Fingerprint
    recorder: Recorder
    events: Events
    predict: Predictor
    first: Attempt
    wanted: Knobs


def survey(settings: Settings, events: Events) -> Site:
    """Look around and choose what to start. Blocking.

    Raises CannotServe, ModelError, BackendError, CardLost or ValueError with a message for a person.
    """
    models = () if settings.backend.kind == "attach" else _read_models(settings)
    model_name = settings.model.alias or (models[0].name if models else "default")
    card = _card(settings)
    gpu = card.info.kind == "nvml"
    backend = _find_backend(settings, models, model_name, gpu=gpu)
    headroom_bytes = parse_headroom(settings.memory.headroom).of(card.info.total_bytes, card.info.kind)
    usable = usable_bytes(card.read(), headroom_bytes)
    fingerprint = _fingerprint(card.info, backend, models)
    engine: EngineName = "vllm" if backend.name == "vllm" else "llama.cpp"
    recorder = Recorder(
        journal=journal_of(settings.state.directory, card.info),
        fingerprint=fingerprint,
        backend=backend,
        events=events,
        headroom_bytes=headroom_bytes,
        libraries={"kvguard": __version__},
        asked=asked(settings),
    )
    first = (
        first_attempt(
            settings, models, recorder.usable(), recorder.find,
            engine=engine, card=card.info, usable_bytes=usable,
        )
        if models
        else Attempt(knobs=attached_knobs(), why=WhyRecord(kind="verify"))
    )  # fmt: skip
    return Site(
        settings=settings,
        models=models,
        model_name=model_name,
        backend=backend,
        engine=engine,
        card=card,
        headroom_bytes=headroom_bytes,
        usable_bytes=usable,
        fingerprint=fingerprint,
        recorder=recorder,
        events=events,
        predict=Predictor(models, engine=engine, gpu=gpu),
        first=first,
        wanted=(
            wanted_knobs(settings, models, first.knobs, engine=engine, gpu=gpu, usable_bytes=usable)
            if models
            else first.knobs
        ),
    )


def _read_models(settings: Settings) -> tuple[ModelMeta, ...]:
    path = Path(settings.model.path) if settings.model.path else demo_model()
    if not path.exists():
        raise ModelError(f"there is no model at {path}: give the path of a GGUF file or of a checkpoint")
    if (path / "config.json").is_file():
        return (read_checkpoint(path), *(read_checkpoint(other) for other in settings.model.variants))
    if path.is_dir():
        best, *others = sorted(read_variants(path), key=lambda meta: -meta.bits)
        return (best, *(meta for meta in others if meta.name == best.name))
    meta = read_gguf(path)
    return (meta, *smaller_variants(meta, settings.model.variants))


def _find_backend(
    settings: Settings, models: tuple[ModelMeta, ...], model_name: str, *, gpu: bool
) -> Backend:
    def pool_bytes(meta: ModelMeta, knobs: Knobs) -> int:
        return 0 if meta.form == "gguf" else pool_bytes_of(meta, geometry_of(meta), knobs, gpu=gpu)

    has_device = gpu or "--rpc" in settings.backend.extra_args
    options = Options(
        model_name=model_name,
        extra_args=settings.backend.extra_args,
        variants=tuple(meta.variant() for meta in models),
        min_ctx=settings.degrade.min_ctx,
        min_batch=settings.degrade.min_batch,
        layers=models[0].n_layer + 1 if models and has_device else 0,
        layer_bytes=max(models[0].weights.layer_bytes, default=0) if models else 0,
        embedding=bool(models) and models[0].is_embedding,
        model_path=models[0].path if models else "",
        checkpoint_bytes=lambda knobs: _of_model(models, knobs, checkpoint_bytes_of),
        pool_bytes=lambda knobs: _of_model(models, knobs, pool_bytes),
    )
    section = settings.backend
    return find_backend(
        section.kind,
        options,
        llama_server=section.llama_server,
        llama_cpp_python=section.llama_cpp_python,
        vllm_python=section.vllm_python,
        attach=section.attach,
    )


def _of_model(models: tuple[ModelMeta, ...], knobs: Knobs, size_of: Callable[[ModelMeta, Knobs], int]) -> int:
    """A size that depends on the weights which these knobs name; quantised on the fly: on the model's own."""
    meta = next(
        (m for m in models if m.variant().source == knobs.quant.source), models[0] if models else None
    )
    return size_of(meta, knobs) if meta is not None else 0


def _card(settings: Settings) -> Card:
    """The memory that binds: the limit that was asked for, or the smallest that applies here."""
    if settings.memory.limit_bytes is not None:
        return _PlannedLimit(settings.memory.limit_bytes)
    return binding_card(own_cgroups().paths())


class _PlannedLimit(ProcessCard):
    """A cgroup that does not exist yet: its size is known, and nothing is in it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.info = CardInfo(kind="cgroup", name="memory limit", total_bytes=limit_bytes)


def card_of(child: Child, planned: Card) -> Card:
    """What to measure for this child: its own cgroup, its resident memory against a limit, or the card."""
    if child.cgroup is not None:
        return CgroupCard(child.cgroup, name=planned.info.name)
    if child.limit_kind == "rlimit_as":
        return ProcessCard(planned.info.total_bytes)
    return planned


def _fingerprint(info: CardInfo, backend: Backend, models: tuple[ModelMeta, ...]) -> Fingerprint:
    model = ModelRecord(name="attached")
    for meta in models[:1]:
        model = ModelRecord(
            name=meta.name,
            architecture=meta.architecture,
            parameters=meta.parameters,
            files=tuple(FileRecord(name=Path(f.path).name, size_bytes=f.size_bytes) for f in meta.files),
            header_hash=meta.header_hash,
        )
    return Fingerprint(
        card=card_record(info),
        backend=BackendRecord(name=backend.name, version=backend.version()),
        model=model,
    )


def client_keys(settings: Settings) -> Keys:
    secrets = dict(settings.server.api_keys)
    if settings.server.api_key_file is not None:
        secrets |= read_key_file(settings.server.api_key_file)
    return Keys(secrets)
