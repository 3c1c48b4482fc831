"""What is started first: the journal's word under the same wishes, else the planner's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvguard.domain import MIB, CardInfo, Knobs
from kvguard.journal import BackendRecord, CardRecord, ModelRecord, Record, new_id, now_iso
from kvguard.model import ModelMeta
from kvguard.selection import CannotServe, asked, first_attempt, wanted_knobs, with_fixed
from kvguard.settings import Settings, load
from kvguard_adapters.models.gguf import read_gguf
from tiny_gguf import write_tiny_llama

CARD = CardInfo(kind="cgroup", name="memory limit", total_bytes=600 * MIB)


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> ModelMeta:
    return read_gguf(write_tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf", ctx=8192))


def settings(**knobs: object) -> Settings:
    return load(None, {"knobs": knobs} if knobs else {})


def record(knobs: Knobs, said: str) -> Record:
    return Record(
        id=new_id(),
        time=now_iso(),
        event="config_provisional",
        card=CardRecord(kind="cgroup", name="memory limit", total_bytes=600 * MIB),
        backend=BackendRecord(name="embedded"),
        model=ModelRecord(name="tiny"),
        knobs=knobs,
        asked=said,
    )


def choose(meta: ModelMeta, chosen: Settings, known: list[Record]) -> tuple[Knobs, str]:
    attempt = first_attempt(
        chosen,
        [meta],
        known,
        lambda record_id: next((r for r in known if r.id == record_id), None),
        engine="llama.cpp",
        card=CARD,
        usable_bytes=540 * MIB,
    )
    return attempt.knobs, attempt.why.from_id


def test_without_a_journal_the_planner_chooses_within_the_card(meta: ModelMeta) -> None:
    knobs, from_id = choose(meta, settings(), [])
    assert (knobs.ctx_tokens, knobs.batch, from_id) == (8192, 4, "")


def test_what_worked_is_used_again_under_the_same_wishes_only(meta: ModelMeta) -> None:
    planned, _ = choose(meta, settings(), [])
    known = record(replace(planned, batch=2), asked(settings()))
    assert choose(meta, settings(), [known]) == (known.knobs, known.id)
    knobs, from_id = choose(meta, settings(ctx_tokens=2048), [known])
    assert (knobs.ctx_tokens, from_id) == (2048, "")
    small = record(replace(planned, batch=1, ctx_tokens=512, pool_tokens=512), asked(settings(batch=1)))
    assert choose(meta, settings(), [small])[1] == ""


def test_a_record_of_weights_that_are_gone_is_passed_over(meta: ModelMeta) -> None:
    planned, _ = choose(meta, settings(), [])
    gone = replace(planned, quant=replace(planned.quant, source="/gone.gguf"))
    assert choose(meta, settings(), [record(gone, asked(settings()))])[1] == ""


def test_a_configuration_is_served_by_its_id(meta: ModelMeta) -> None:
    planned, _ = choose(meta, settings(), [])
    known = record(replace(planned, batch=3), "whatever was asked then")
    assert choose(meta, settings(config_id=known.id), [known])[0].batch == 3
    with pytest.raises(CannotServe, match="no configuration nonsense"):
        choose(meta, settings(config_id="nonsense"), [known])


def test_nothing_fits_names_the_account_and_the_remedy(meta: ModelMeta) -> None:
    with pytest.raises(
        CannotServe, match=r"(too large|insufficient|do not fit) on memory limit .*What would help"
    ):
        first_attempt(
            settings(), [meta], [], lambda _: None, engine="llama.cpp", card=CARD, usable_bytes=4 * MIB
        )


def test_a_fixed_pool_bounds_the_context(meta: ModelMeta) -> None:
    planned, _ = choose(meta, settings(), [])
    assert with_fixed(settings(pool_tokens=4096), planned).ctx_tokens == 4096
    with pytest.raises(CannotServe, match="below --ctx"):
        with_fixed(settings(pool_tokens=4096, ctx_tokens=8192), planned)


def test_wanted_is_the_plan_whatever_the_journal_starts_with(meta: ModelMeta) -> None:
    planned, _ = choose(meta, settings(), [])
    wanted = wanted_knobs(
        settings(), [meta], replace(planned, batch=1), engine="llama.cpp", gpu=False, usable_bytes=540 * MIB
    )
    assert wanted == planned


def test_wishes_are_compared_whatever_their_order(tmp_path: Path) -> None:
    one = load(None, {"knobs": {"batch": 2, "ctx_tokens": 512}, "degrade": {"min_ctx": 256}})
    other = load(None, {"degrade": {"min_ctx": 256}, "knobs": {"ctx_tokens": 512, "batch": 2}})
    assert asked(one) == asked(other) != asked(settings())
