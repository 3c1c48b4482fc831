"""The answer of `kvguard plan` as plain data: the same dict is printed as JSON and drawn as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvguard.accounts import engine_of, geometry_of, refine
from kvguard.domain import GIB, Accounts, Knobs
from kvguard.geometry import LlamaSettings, Price, VllmSettings, llama_price, vllm_price
from kvguard.matrix import CardRow, Cell, Measured, matrix
from kvguard.model import ModelMeta
from kvguard.planner import Limits, Plan, Prefer, choose, judged, max_batch_of, max_ctx_of
from kvguard.sketch import REAL_BITS, most_parameters, weight_bytes

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)


def card_report(row: CardRow) -> dict[str, Any]:
    """What a card offers: its usable memory, and the most parameters that it carries."""
    return {
        "label": row.label,
        "kind": "gpu" if row.gpu else "host",
        "total_bytes": row.total_bytes,
        "headroom_bytes": row.headroom,
        "used_by_others_bytes": row.total_bytes - row.headroom - row.usable_bytes,
        "usable_bytes": row.usable_bytes,
        "most_parameters": {str(bits): n for bits, n in most_parameters(row.usable_bytes).items()},
    }


def model_report(meta: ModelMeta) -> dict[str, Any]:
    """What the model's own files say."""
    geometry = geometry_of(meta)
    price = token_price(meta)
    return {
        "name": meta.name,
        "path": meta.path,
        "form": meta.form,
        "engine": engine_of(meta),
        "architecture": meta.architecture,
        "parameters": meta.parameters,
        "quant": meta.quant,
        "bits": round(meta.bits, 3),
        "weights_bytes": meta.weights.total_bytes,
        "expert_bytes": sum(meta.weights.expert_bytes),
        "files": len(meta.files),
        "header_hash": meta.header_hash,
        "layers": meta.n_layer,
        "vocabulary": meta.n_vocab,
        "ctx_train": meta.n_ctx_train,
        "kv_bytes_per_token": price.full_bytes_per_token,
        "kv_bytes_per_token_marginal": price.marginal_bytes_per_token,
        "kv_fixed_bytes_per_sequence": price.fixed_bytes,
        "kv_basis": geometry.basis.value,
        "kv_note": geometry.note,
        "warnings": list(meta.warnings),
    }


def token_price(meta: ModelMeta) -> Price:
    """The price of one request in the model's own KV type, on the engine that runs it."""
    geometry = geometry_of(meta)
    if engine_of(meta) == "vllm":
        # one token a block: the slope itself, without rounding up to blocks
        return vllm_price(geometry, VllmSettings(max_model_len=1 << 20, block_tokens=1, hybrid=False))
    return llama_price(geometry, LlamaSettings(ctx_tokens=meta.n_ctx_train or 4096))


def accounts_report(accounts: Accounts) -> dict[str, Any]:
    """The three accounts, line by line."""
    return {
        "weights_bytes": accounts.weights_bytes,
        "kv_bytes": accounts.kv_bytes,
        "overhead_bytes": accounts.overhead_bytes,
        "total_bytes": accounts.total_bytes,
        "host_bytes": accounts.host_bytes,
        "entries": [
            {
                "account": entry.account,
                "name": entry.name,
                "bytes": entry.size_bytes,
                "basis": entry.basis.value,
                "on_card": entry.on_card,
                "note": entry.note,
            }
            for entry in accounts.entries
        ],
    }


Ask = Callable[[Knobs], Accounts | None]
"""Asks an installed engine what knobs would take, without allocating; None where it cannot tell."""


def plan_report(
    meta: ModelMeta,
    row: CardRow,
    limits: Limits,
    prefer: Prefer = "balanced",
    projector_bytes: int = 0,
    ask: Ask | None = None,
    measured: Sequence[Measured] = (),
) -> dict[str, Any]:
    """One model on one card: accounts, verdict, and how far context and batch could go."""
    plan = choose(
        [meta],
        row.card,
        row.headroom,
        prefer=prefer,
        limits=limits,
        gpu=row.gpu,
        projector_bytes=projector_bytes,
    )
    told = ask(plan.knobs) if ask is not None else None
    if told is not None:
        plan = judged(plan, refine(plan.accounts, told))
    most = meta.n_ctx_train or CONTEXTS[-1]
    contexts = [ctx for ctx in CONTEXTS if ctx <= most] or [most]
    return {
        "model": model_report(meta),
        "card": card_report(row),
        **verdict_report(plan),
        "accounts": accounts_report(plan.accounts),
        "max_ctx_by_batch": {
            str(n): max_ctx_of(meta, row.usable_bytes, n, limits, gpu=row.gpu) for n in BATCHES
        },
        "max_batch_by_ctx": {
            str(ctx): max_batch_of(meta, row.usable_bytes, ctx, limits, gpu=row.gpu) for ctx in contexts
        },
        "measured": [
            {"ctx_tokens": m.ctx_tokens, "peak_bytes": m.peak_bytes, "predicted_bytes": m.predicted_bytes}
            for m in measured
            if m.is_of(meta, row)
        ],
    }


def verdict_report(plan: Plan) -> dict[str, Any]:
    knobs = plan.knobs
    return {
        "fits": plan.fits,
        "verdict": plan.verdict,
        "reason": plan.reason,
        "next": plan.remedy,
        "free_bytes": plan.usable_bytes - plan.accounts.total_bytes,
        "knobs": {
            "batch": knobs.batch,
            "ctx_tokens": knobs.ctx_tokens,
            "pool_tokens": knobs.pool_tokens,
            "pool_kind": knobs.pool_kind.value,
            "kv_type": knobs.kv_type,
            "gpu_layers": knobs.gpu_layers,
            "prefill_tokens": knobs.prefill_tokens,
            "host_cache_bytes": knobs.host_cache_bytes,
        },
    }


def matrix_report(
    variants: Sequence[ModelMeta],
    rows: Sequence[CardRow],
    limits: Limits,
    prefer: Prefer = "balanced",
    measured: Sequence[Measured] = (),
) -> dict[str, Any]:
    """Several variants on several cards, and the choice for each card."""
    cells = matrix(variants, rows, limits, measured)
    table = []
    for row, line in zip(rows, cells, strict=True):
        choice = choose(variants, row.card, row.headroom, prefer=prefer, limits=limits, gpu=row.gpu)
        table.append(
            {
                "card": card_report(row),
                "choice": (choice.knobs.quant.label or choice.meta.name) if choice.fits else None,
                "cells": [_cell_report(cell) for cell in line],
            }
        )
    return {"variants": [model_report(meta) for meta in variants], "rows": table}


def _cell_report(cell: Cell) -> dict[str, Any]:
    return {
        "variant": cell.plan.knobs.quant.label or cell.plan.meta.name,
        "feasible": cell.feasible,
        "ctx_tokens": cell.ctx_tokens,
        "verdict": cell.plan.verdict,
        "reason": cell.plan.reason,
        "basis": "measured" if cell.measured else "predicted",
        "weights_bytes": cell.plan.accounts.weights_bytes,
    }


def parameters_report(meta: ModelMeta, contexts: Sequence[int], row: CardRow | None) -> dict[str, Any]:
    """A model that is only a number of parameters: weights by width, KV by context."""
    price = token_price(meta)
    report = {
        "parameters": meta.parameters,
        "bits": round(meta.bits, 3),
        "weights_bytes": {str(bits): weight_bytes(meta.parameters, bits) for bits in (16, 8, 4)},
        "real_formats_bytes": {name: weight_bytes(meta.parameters, bits) for name, bits in REAL_BITS.items()},
        "kv_bytes_per_token": price.full_bytes_per_token,
        "kv_bytes": {str(ctx): price(ctx, 0) for ctx in contexts} if price.full_bytes_per_token else {},
    }
    if row is not None:
        card = card_report(row)
        weights = meta.weights.total_bytes
        report |= {"card": card, "fits": weights <= row.usable_bytes}
        report["reason"] = (
            ""
            if report["fits"]
            else f"weights of {weights / GIB:.2f} GiB against {row.usable_bytes / GIB:.2f} GiB usable"
        )
    return report
