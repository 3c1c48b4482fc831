"""`/v1/models`: the context and the configuration that are really served, beside all that the engine says."""

from __future__ import annotations

import json

import pytest

from kvguard.api.models import describe
from kvguard.domain import Capacity, Rung, Snapshot, State
from request_fixtures import fake_stack

SERVED = Snapshot(
    generation=2,
    state=State.READY,
    capacity=Capacity(pool_tokens=4096, ctx_tokens=2048, sequences=2),
    config_id="cfg-7",
    degraded_by=(Rung.BATCH, Rung.CTX),
)
KVGUARD = {"config_id": "cfg-7", "degraded_by": ["batch", "ctx"], "ctx_tokens": 2048, "batch": 2}


def test_each_model_says_what_is_served_and_keeps_what_the_engine_said() -> None:
    body = {
        "object": "list",
        "models": [{"name": "m"}],
        "data": [{"id": "m", "meta": {"n_ctx_train": 9}, "max_model_len": 9}],
    }
    listing = json.loads(describe(json.dumps(body).encode(), SERVED))
    assert listing["models"] == [{"name": "m"}]
    own, any_model = listing["data"]
    assert own == {"id": "m", "meta": {"n_ctx_train": 9}, "max_model_len": 2048, "kvguard": KVGUARD}
    assert any_model == {**own, "id": "default"}


def test_default_is_not_listed_twice() -> None:
    listing = json.loads(describe(b'{"data": [{"id": "default"}]}', SERVED))
    assert [model["id"] for model in listing["data"]] == ["default"]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"data": 3}', b'{"data": [{}]}', b'{"x": 1}'])
def test_what_is_no_list_of_models_is_left_alone(body: bytes) -> None:
    assert describe(body, SERVED) == body


async def test_the_official_client_reads_it() -> None:
    async with fake_stack() as (stack, _):
        models = (await stack.openai().models.list()).data
        assert [model.id for model in models] == ["fake", "default"]
        for model in models:
            fields = model.model_dump()
            assert fields["max_model_len"] == 2048
            assert fields["kvguard"]["config_id"] == "cfg1"
            assert fields["kvguard"]["degraded_by"] == []
