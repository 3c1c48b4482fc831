"""`GET /v1/models` with what is really served: a context that was cut must not stay a secret."""

from __future__ import annotations

from typing import Any

import msgspec

from kvguard.domain import Snapshot

PATHS = frozenset({"/v1/models", "/models"})
ANY_MODEL = "default"
"""The name under which clients may ask for whatever is served."""


def describe(body: bytes, snapshot: Snapshot) -> bytes:
    """The engine's list with the served context and configuration in each model, and `default` as a model.

    Everything else is kept; a body that is no such list comes back as it is.
    """
    try:
        listing = msgspec.json.decode(body)
        models = listing["data"]
        if snapshot.capacity is None or not all(isinstance(model["id"], str) for model in models):
            return body
    except (msgspec.DecodeError, KeyError, TypeError):
        return body
    described = [{**model, **_served(snapshot)} for model in models]
    if described and not any(model["id"] == ANY_MODEL for model in described):
        described.append({**described[0], "id": ANY_MODEL})
    return msgspec.json.encode({**listing, "data": described})


def _served(snapshot: Snapshot) -> dict[str, Any]:
    assert snapshot.capacity is not None
    ctx_tokens = snapshot.capacity.ctx_tokens
    return {
        "max_model_len": ctx_tokens,
        "kvguard": {
            "config_id": snapshot.config_id,
            "degraded_by": [rung.value for rung in snapshot.degraded_by],
            "ctx_tokens": ctx_tokens,
            "batch": snapshot.capacity.sequences,
        },
    }
