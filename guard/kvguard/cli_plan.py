"""`kvguard plan`: what fits on a card and why, from the model's own metadata. Needs no engine.

Exit codes: 0 it fits, 1 it does not, 2 usage or a model that cannot be read.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvguard.accounts import geometry_of
from kvguard.domain import Basis, CardReading, PoolKind
from kvguard.geometry import GeometryError
from kvguard.matrix import CardRow, Measured
from kvguard.model import ModelError, ModelMeta
from kvguard.plan_report import Ask, card_report, matrix_report, parameters_report, plan_report
from kvguard.plan_view import show_cards, show_matrix, show_parameters, show_plan
from kvguard.planner import Limits, Prefer
from kvguard.settings import parse_size
from kvguard.sketch import parse_parameters, sketch

EXIT_NO = 1
EXIT_USAGE = 2
USUAL_CARDS = ("8GiB", "12GiB", "16GiB", "24GiB", "32GiB", "48GiB", "80GiB")
PREFER: dict[str, Prefer] = {
    "balanced": "balanced",
    "quality": "quality",
    "context": "ctx",
    "throughput": "batch",
}

measured_cells: Callable[[Sequence[ModelMeta]], Sequence[Measured]] = lambda models: ()  # noqa: E731
"""What the journal has measured of these models; the composition root replaces it."""


class UsageError(ValueError):
    """Options that make no sense together. The message is for a person."""


def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="GGUF files, checkpoint directories, or a directory of variants."),
    ] = None,
    card: Annotated[
        list[str] | None,
        typer.Option(help="Memory of a card, e.g. 24GiB, or `here` (repeatable)."),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="The card is host memory or a cgroup, not a GPU.")
    ] = False,
    headroom: Annotated[
        str | None,
        typer.Option(help="Never handed out. Default: max(1 GiB, 10 %) of a GPU, 10 % of host memory."),
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(help="Tokens of one sequence; nothing smaller is tried.", min=1)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences at once; nothing smaller is tried.", min=1)
    ] = None,
    kv_type: Annotated[str, typer.Option(help="KV cache type: f16, q8_0, q4_0, fp8, ...")] = "f16",
    kv_pool: Annotated[str, typer.Option(help="unified or split.")] = "unified",
    gpu_layers: Annotated[int | None, typer.Option(help="Layers on the GPU; -1: all.", min=-1)] = None,
    prefill: Annotated[int | None, typer.Option(help="Tokens of one prefill pass.", min=1)] = None,
    min_ctx: Annotated[int, typer.Option(help="Never a context under this.", min=1)] = 2048,
    prefer: Annotated[str, typer.Option(help="balanced, context, throughput or quality.")] = "balanced",
    mmproj: Annotated[Path | None, typer.Option(help="Multimodal projector (GGUF).")] = None,
    params: Annotated[str | None, typer.Option(help="No file yet: number of parameters, e.g. 27B.")] = None,
    bits: Annotated[float, typer.Option(help="With --params: bits of a weight.", min=1, max=32)] = 16,
    layers: Annotated[int, typer.Option(help="With --params: layers.", min=0)] = 0,
    kv_heads: Annotated[int, typer.Option(help="With --params: KV heads.", min=0)] = 0,
    head_dim: Annotated[int, typer.Option(help="With --params: dimension of a head.", min=0)] = 0,
    llama_server: Annotated[
        str | None, typer.Option(help="Ask this binary for its compute buffers (it loads nothing).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what fits on a card, what does not and why, before anything is downloaded or loaded.

    Examples:

      kvguard plan model-Q4_K_M.gguf --card 24GiB

      kvguard plan models/ --card 16GiB --card 24GiB

      kvguard plan --params 27B --bits 4 --layers 60 --kv-heads 8 --head-dim 128 --card 24GiB
    """
    try:
        limits = Limits(
            ctx_tokens=ctx,
            batch=batch,
            min_ctx=min_ctx,
            kv_type=kv_type,
            pool_kind=_choice("--kv-pool", kv_pool, {kind.value: kind for kind in PoolKind}),
            gpu_layers=gpu_layers,
            prefill_tokens=prefill,
            exact=ctx is not None or batch is not None,
        )
        chosen = _choice("--prefer", prefer, PREFER)
        rows = [_row(text, headroom, host) for text in card or ()]
        metas = [meta for model in models or () for meta in read_models(model)]
        if params is not None and metas:
            raise UsageError("give a model or --params, not both")
        if params is not None:
            meta = sketch(parse_parameters(params), bits, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
            answer = _sketch_answer(meta, ctx, rows)
        elif not metas:
            answer = _cards_answer(rows)
        elif len(metas) > 1 or len(rows) > 1:
            rows = rows or [_row(text, headroom, host) for text in USUAL_CARDS]
            answer = _matrix_answer(metas, rows, limits, chosen)
        else:
            row = rows[0] if rows else _row("here", headroom, host)
            answer = _plan_answer(metas[0], row, limits, chosen, mmproj, llama_server)
    except (ModelError, GeometryError, UsageError) as exc:
        Console(stderr=True).print(f"[bold red]error:[/] {exc}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from None
    if as_json:
        sys.stdout.write(json.dumps(answer.report, indent=2) + "\n")
    else:
        answer.show(Console(highlight=False), answer.report)
    raise typer.Exit(0 if answer.fits else EXIT_NO)


@dataclass(frozen=True, slots=True)
class Answer:
    """A report, how to draw it, and whether it is a yes."""

    report: dict[str, Any]
    show: Callable[[Console, dict[str, Any]], None]
    fits: bool = True


def _sketch_answer(meta: ModelMeta, ctx: int | None, rows: Sequence[CardRow]) -> Answer:
    contexts = (ctx,) if ctx else (8192, 32_768)
    report = parameters_report(meta, contexts, rows[0] if rows else None)
    return Answer(report, show_parameters, report.get("fits", True))


def _cards_answer(rows: Sequence[CardRow]) -> Answer:
    if not rows:
        raise UsageError("give a model, --card or --params")
    return Answer({"cards": [card_report(row) for row in rows]}, show_cards)


def _matrix_answer(
    metas: Sequence[ModelMeta], rows: Sequence[CardRow], limits: Limits, prefer: Prefer
) -> Answer:
    report = matrix_report(metas, rows, limits, prefer, measured_cells(metas))
    return Answer(report, show_matrix, any(row["choice"] for row in report["rows"]))


def _plan_answer(
    meta: ModelMeta,
    row: CardRow,
    limits: Limits,
    prefer: Prefer,
    mmproj: Path | None,
    llama_server: str | None,
) -> Answer:
    ask = asker(meta, row, llama_server)
    measured = measured_cells([meta])
    report = plan_report(meta, row, limits, prefer, _projector_bytes(mmproj), ask, measured)
    return Answer(report, show_plan, report["fits"])


def _choice(option: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        raise UsageError(f"{option} is one of {', '.join(choices)}, not {value!r}")
    return choices[value]


def _size(option: str, text: str) -> int:
    try:
        return int(str(parse_size(text)))
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}") from exc


def _row(text: str, headroom: str | None, host: bool) -> CardRow:
    """A card of a stated size is a GPU that nobody uses, unless `--host`; `here` is this machine's."""
    reading: CardReading | int
    if text == "here":
        label, reading, gpu = card_here(host)
    else:
        label, reading, gpu = text, _size("--card", text), not host
    total = reading if isinstance(reading, int) else reading.total_bytes
    if headroom is None:
        return CardRow(label=label, card=reading, gpu=gpu)
    if headroom.endswith("%"):
        share = headroom.removesuffix("%").strip()
        if not share.replace(".", "", 1).isdigit() or not 0 <= float(share) < 100:
            raise UsageError(f"--headroom {headroom!r} is no share from 0% to below 100%")
        return CardRow(label=label, card=reading, gpu=gpu, headroom_bytes=int(total * float(share) / 100))
    return CardRow(label=label, card=reading, gpu=gpu, headroom_bytes=_size("--headroom", headroom))


def card_here(host: bool) -> tuple[str, CardReading, bool]:
    """This machine's card as (name, reading, is a GPU): a GPU, else the smallest memory that binds."""
    from kvguard.cgroups import own_cgroups
    from kvguard_adapters.cards import binding_card

    card = binding_card(own_cgroups().paths(), gpu=not host)
    return card.info.name, card.read(), card.info.kind == "nvml"


def asker(meta: ModelMeta, row: CardRow, binary: str | None) -> Ask | None:
    """How to ask an engine about this model: where the user named one, or where our rules do not know it.

    A stated GPU is not this machine's, so its buffers cannot be asked for here.
    """
    unknown = geometry_of(meta).basis is Basis.ESTIMATE
    if meta.form != "gguf" or row.gpu or not (binary or (unknown and shutil.which("llama-server"))):
        return None
    from kvguard.ports import BackendError
    from kvguard_adapters.backends.llama_server import LlamaServer, find_llama_server

    try:
        return LlamaServer(find_llama_server(binary or "")).dry_run
    except BackendError as exc:
        raise UsageError(str(exc)) from exc


def read_models(path: str) -> list[ModelMeta]:
    """Read a GGUF file, a checkpoint directory, or a directory of GGUF variants. Raises: ModelError."""
    from kvguard_adapters.models.gguf import read_gguf, read_variants
    from kvguard_adapters.models.huggingface import read_checkpoint

    place = Path(path)
    if not place.exists():
        raise ModelError(f"{path}: no such file or directory")
    if place.is_file():
        return [read_gguf(place)]
    return [read_checkpoint(place)] if (place / "config.json").is_file() else read_variants(place)


def _projector_bytes(mmproj: Path | None) -> int:
    from kvguard_adapters.models.gguf import projector_bytes

    return projector_bytes(mmproj) if mmproj else 0


if __name__ == "__main__":
    typer.run(plan)
