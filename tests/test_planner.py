"""Choosing what fits: the order in which things are given up, the reasons, the limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.accounts import card_layers, predict, refine
from kvguard.domain import GIB, MIB, Accounts, Basis, CardReading, Entry, Knobs, PoolKind
from kvguard.geometry import GeometryError
from kvguard.matrix import CardRow, Measured, matrix
from kvguard.model import ModelMeta, Weights
from kvguard.overhead import Learned, learn
from kvguard.planner import (
    Limits,
    choose,
    default_headroom,
    judge,
    max_batch_of,
    max_ctx_of,
    usable_bytes,
)
from kvguard.sketch import most_parameters, parse_parameters, sketch, weight_bytes
from kvguard.vllm_accounts import checkpoint_kv_type
from kvguard_adapters.models.gguf import read_gguf
from tiny_gguf import write_tiny, write_tiny_llama


def model(
    weights_bytes: int = 4 * GIB,
    *,
    bits: float = 8.0,
    layers: int = 32,
    n_ctx_train: int = 131_072,
    label: str = "",
    architecture: str = "llama",
) -> ModelMeta:
    """A Llama-3-8B whose weights have this size: 131,072 bytes a token in 16 bit."""
    embedding = weights_bytes // 10
    each = (weights_bytes - 2 * embedding) // layers
    hparams: dict[str, Any] = {
        "block_count": layers,
        "context_length": n_ctx_train,
        "embedding_length": 4096,
        "feed_forward_length": 14_336,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
    }
    return ModelMeta(
        name=f"model {label or bits}",
        form="gguf",
        path=f"/models/{label or bits}.gguf",
        architecture=architecture,
        parameters=int(weights_bytes * 8 / bits),
        weights=Weights(
            input_bytes=embedding,
            layer_bytes=(each,) * layers,
            expert_bytes=(0,) * layers,
            output_bytes=embedding,
        ),
        n_ctx_train=n_ctx_train,
        n_vocab=128_256,
        n_layer=layers,
        n_embd=4096,
        hparams=hparams,
        header_hash=label or str(bits),
        quant=label,
    )


def knobs(meta: ModelMeta, **changes: Any) -> Knobs:
    base: dict[str, Any] = {"batch": 1, "ctx_tokens": 4096, "pool_tokens": 4096}
    return Knobs(**{**base, "pool_kind": PoolKind.UNIFIED, "quant": meta.variant(), **changes})


# ---------------------------------------------------------------- accounts


def test_every_entry_says_what_it_rests_on() -> None:
    accounts = predict(model(), knobs(model()))
    basis = {(entry.account, entry.name): entry.basis for entry in accounts.entries}
    assert {b for (account, _), b in basis.items() if account in ("weights", "kv")} == {Basis.EXACT}
    assert basis["overhead", "compute buffers"] is Basis.ESTIMATE
    assert accounts.kv_bytes == 4096 * 131_072
    assert accounts.weights_bytes == model().weights.total_bytes


def test_an_unknown_architecture_makes_its_kv_account_an_estimate_with_a_reason() -> None:
    meta = model(architecture="never-seen")
    kv = [entry for entry in predict(meta, knobs(meta)).entries if entry.account == "kv"]
    assert [entry.basis for entry in kv] == [Basis.ESTIMATE]
    assert "never-seen" in kv[0].note


def test_layers_off_the_card_take_their_weights_and_cache_with_them() -> None:
    meta = model()
    whole = predict(meta, knobs(meta), gpu=True)
    for layers in (0, 1, 5, 33):
        part = predict(meta, knobs(meta, gpu_layers=layers), gpu=True)
        assert part.weights_bytes + _host(part, "weights") == whole.weights_bytes + _host(whole, "weights")
        assert part.kv_bytes + _host(part, "kv") == whole.kv_bytes
    # the output is the last of the layers that llama.cpp counts: one layer on the card is the output alone
    assert predict(meta, knobs(meta, gpu_layers=1), gpu=True).kv_bytes == 0
    assert predict(meta, knobs(meta, gpu_layers=1), gpu=True).weights_bytes == meta.weights.output_bytes
    assert predict(meta, knobs(meta, gpu_layers=2), gpu=True).kv_bytes == whole.kv_bytes // 32
    assert card_layers(meta, -1) == range(33)


def _host(accounts: Accounts, account: Any) -> int:
    return accounts.total_of(account, on_card=False)


def test_a_tied_embedding_is_copied_to_a_gpu_but_not_in_host_memory(tmp_path: Path) -> None:
    meta = read_gguf(write_tiny_llama(tmp_path / "tied.gguf", tied=True))
    embedding = meta.weights.tied_bytes
    assert embedding == meta.weights.input_bytes > 0
    gpu = predict(meta, knobs(meta), gpu=True)
    assert gpu.weights_bytes + _host(gpu, "weights") == meta.weights.total_bytes + embedding
    assert predict(meta, knobs(meta)).weights_bytes == meta.weights.total_bytes
    # these two are loaded twice even there
    twice = read_gguf(write_tiny(tmp_path / "g.gguf", "gemma4"))
    assert predict(twice, knobs(twice)).weights_bytes == twice.weights.total_bytes + twice.weights.tied_bytes


def test_a_dry_run_replaces_the_estimate_and_nothing_exact() -> None:
    meta = model()
    predicted = predict(meta, knobs(meta))
    told = Accounts(
        entries=(
            Entry(account="weights", name="weights", size_bytes=1, basis=Basis.DRY_RUN),
            Entry(account="kv", name="kv cache", size_bytes=2, basis=Basis.DRY_RUN),
            Entry(account="overhead", name="compute buffers", size_bytes=3, basis=Basis.DRY_RUN),
        )
    )
    refined = refine(predicted, told)
    assert (refined.weights_bytes, refined.kv_bytes) == (predicted.weights_bytes, predicted.kv_bytes)
    compute = [entry for entry in refined.entries if entry.name == "compute buffers"]
    assert [(entry.size_bytes, entry.basis) for entry in compute] == [(3, Basis.DRY_RUN)]
    unknown = model(architecture="never-seen")
    assert refine(predict(unknown, knobs(unknown)), told).kv_bytes == 2


def test_what_was_measured_corrects_the_model_of_overhead() -> None:
    meta = model()
    predicted = predict(meta, knobs(meta))
    learned = learn([(predicted, predicted.total_bytes + n * MIB) for n in (40, 60, 500)])
    assert learned == Learned(extra_bytes=60 * MIB, records=3)
    corrected = predict(meta, knobs(meta), learned=learned)
    assert corrected.total_bytes == predicted.total_bytes + 60 * MIB
    assert [e.basis for e in corrected.entries if e.name == "correction"] == [Basis.LEARNED]
    assert learn([]) is None


def test_an_engine_refuses_what_it_does_not_load() -> None:
    with pytest.raises(GeometryError, match="vllm does not load"):
        predict(model(), knobs(model()), "vllm")


def test_a_vllm_configuration_has_its_three_accounts() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
    }
    meta = replace(model(), form="checkpoint", hparams=config, quant="bfloat16")
    wanted = knobs(meta, batch=8, pool_tokens=32_768, prefill_tokens=2048)
    one, two = (predict(meta, wanted, gpu=True, tensor_parallel=tp) for tp in (1, 2))
    assert one.weights_bytes == meta.weights.total_bytes
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, abs=4)
    assert one.kv_bytes == (32_768 // 16 + 1) * 16 * 131_072
    assert two.kv_bytes == one.kv_bytes // 2
    assert {e.basis for e in one.entries if e.account == "weights"} == {Basis.EXACT}
    assert {e.basis for e in two.entries if e.account == "weights"} == {Basis.ESTIMATE}
    with pytest.raises(GeometryError, match="no loader for bitsandbytes"):
        predict(replace(meta, quant="bitsandbytes"), wanted)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "auto"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "odd"}, "auto"),
    ],
)
def test_a_checkpoint_may_quantise_the_cache_by_itself(section: dict[str, Any], kind: str) -> None:
    assert checkpoint_kv_type({"quantization_config": section}) == kind


# ---------------------------------------------------------------- usable memory


def test_usable_memory_is_what_others_leave_minus_headroom() -> None:
    reading = CardReading(at_s=0, total_bytes=24 * GIB, used_bytes=10 * GIB, own_bytes=4 * GIB)
    assert usable_bytes(reading, 2 * GIB) == 16 * GIB
    assert usable_bytes(replace(reading, own_bytes=None), 2 * GIB) == 12 * GIB
    assert usable_bytes(24 * GIB, 2 * GIB) == 22 * GIB
    assert usable_bytes(GIB, 2 * GIB) == 0


def test_headroom_by_default() -> None:
    assert default_headroom(24 * GIB, gpu=True) == 24 * GIB // 10
    assert default_headroom(4 * GIB, gpu=True) == GIB
    assert default_headroom(GIB, gpu=True) == GIB // 2
    assert default_headroom(4 * GIB, gpu=False) == 4 * GIB // 10


def account(weights: int, kv: int, overhead: int) -> Accounts:
    parts: dict[Any, int] = {"weights": weights, "kv": kv, "overhead": overhead}
    return Accounts(
        entries=tuple(
            Entry(account=name, name=name, size_bytes=size, basis=Basis.EXACT) for name, size in parts.items()
        )
    )


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ((5, 3, 2), "fits"),
        ((11, 0, 0), "weights do not fit"),
        ((8, 3, 0), "kv cache insufficient"),
        ((5, 3, 3), "overhead too large"),
        ((11, 9, 9), "weights do not fit"),
    ],
)
def test_the_first_account_that_goes_over_is_named(parts: tuple[int, int, int], verdict: str) -> None:
    assert judge(account(*parts), 10) == verdict


# ---------------------------------------------------------------- choosing


def test_a_large_card_gets_everything_that_was_wished_for() -> None:
    plan = choose([model()], 64 * GIB, 0)
    assert plan.fits
    assert (plan.knobs.batch, plan.knobs.ctx_tokens) == (4, 32_768)
    assert plan.knobs.pool_tokens == 4 * 32_768
    assert plan.knobs.host_cache_bytes == 2 * GIB
    assert plan.accounts.total_bytes <= plan.usable_bytes


def test_a_small_training_context_is_never_exceeded() -> None:
    assert choose([model(n_ctx_train=2048)], 64 * GIB, 0).knobs.ctx_tokens == 2048


def test_memory_is_given_up_in_order() -> None:
    """Pool, then context down to 8192, then micro-batch, then batch, then context to its floor."""
    seen = []
    for part in range(800, 200, -1):
        plan = choose([model()], part * GIB // 50, 0)
        if plan.fits:
            k = plan.knobs
            seen.append((k.ctx_tokens, k.batch, k.prefill_tokens))
            assert plan.accounts.total_bytes <= plan.usable_bytes
            assert k.pool_tokens >= k.ctx_tokens
    steps = list(dict.fromkeys(seen))
    assert steps[0] == (32_768, 4, 512)
    assert [step[0] for step in steps] == sorted((step[0] for step in steps), reverse=True)
    good = [step for step in steps if step[0] == 8192]
    assert good[0] == (8192, 4, 512)
    assert (8192, 4, 128) in good
    assert all(prefill <= 128 for _, batch, prefill in good if batch < 4)
    assert steps[-1][0] == 2048


def test_limits_hold() -> None:
    tight = choose([model()], 5 * GIB, 0, limits=Limits(min_ctx=8192, min_batch=2))
    assert not tight.fits
    assert (tight.knobs.ctx_tokens, tight.knobs.batch) == (8192, 2)
    exact = choose([model()], 5 * GIB, 0, limits=Limits(ctx_tokens=16_384, batch=2, exact=True))
    assert not exact.fits
    assert (exact.knobs.ctx_tokens, exact.knobs.batch) == (16_384, 2)
    assert exact.verdict == "kv cache insufficient"
    assert choose([model()], 64 * GIB, 0, min_ctx=1024, limits=Limits(batch=7)).knobs.batch == 7


def test_weights_are_never_cured_by_a_smaller_context() -> None:
    plan = choose([model(20 * GIB)], 8 * GIB, 0)
    assert plan.verdict == "weights do not fit"
    assert "20.00 GiB" in plan.reason
    assert "not a smaller context" in plan.remedy
    smaller = choose([model(5 * GIB)], int(5.1 * GIB), 0, limits=Limits(min_ctx=8192))
    assert smaller.verdict == "kv cache insufficient"
    assert "context" in smaller.remedy


VARIANTS = [
    model(16 * GIB, bits=16, label="F16"),
    model(8 * GIB, bits=8, label="Q8_0"),
    model(5 * GIB, bits=5, label="Q4_K_M"),
]


@pytest.mark.parametrize(
    ("card_gib", "prefer", "label"),
    [
        (40, "balanced", "F16"),
        (17, "balanced", "Q8_0"),
        (17, "quality", "F16"),
        (9, "balanced", "Q4_K_M"),
        (9, "quality", "Q8_0"),
        (17, "ctx", "Q8_0"),
        (9, "ctx", "Q4_K_M"),
    ],
)
def test_the_variant_is_chosen_by_what_is_preferred(card_gib: int, prefer: Any, label: str) -> None:
    plan = choose(VARIANTS, card_gib * GIB, 0, prefer=prefer)
    assert plan.fits
    assert plan.knobs.quant.label == label


def test_nothing_that_fits_is_answered_with_the_smallest_and_why() -> None:
    plan = choose(VARIANTS, 2 * GIB, 0)
    assert not plan.fits
    assert plan.knobs.quant.label == "Q4_K_M"


def test_layers_leave_a_gpu_only_when_no_variant_fits_whole() -> None:
    whole = choose(VARIANTS, 8 * GIB, 0, gpu=True)
    assert (whole.knobs.quant.label, whole.knobs.gpu_layers) == ("Q4_K_M", -1)
    part = choose(VARIANTS, 4 * GIB, 0, gpu=True)
    assert part.fits
    assert part.knobs.quant.label == "F16"
    assert 0 < part.knobs.gpu_layers < 33
    fixed = choose(VARIANTS, 4 * GIB, 0, gpu=True, limits=Limits(gpu_layers=-1))
    assert not fixed.fits


def test_a_split_pool_has_a_whole_context_for_each_sequence() -> None:
    plan = choose([model()], 12 * GIB, 0, limits=Limits(pool_kind=PoolKind.SPLIT))
    assert plan.fits
    assert plan.knobs.pool_tokens == plan.knobs.batch * plan.knobs.ctx_tokens


def test_how_far_context_and_batch_go() -> None:
    meta = model()
    usable = 10 * GIB
    for batch in (1, 2, 4):
        ctx = max_ctx_of(meta, usable, batch)
        assert 0 < ctx < meta.n_ctx_train
        assert _total(meta, batch, ctx) <= usable < _total(meta, batch, ctx + 256)
    most = max_batch_of(meta, usable, 4096)
    assert _total(meta, most, 4096) <= usable < _total(meta, most + 1, 4096)
    assert max_ctx_of(meta, GIB, 1) == 0
    assert max_batch_of(meta, GIB, 256) == 0
    assert max_ctx_of(model(n_ctx_train=5000), 64 * GIB, 1) == 5000


def _total(meta: ModelMeta, batch: int, ctx: int) -> int:
    return predict(meta, knobs(meta, batch=batch, ctx_tokens=ctx, pool_tokens=ctx * batch)).total_bytes


@settings(deadline=None)
@given(st.integers(1, 1 << 31), st.integers(1, 1 << 31), st.integers(1, 64), st.booleans())
def test_totals_grow_with_context_and_never_turn_negative(a: int, b: int, batch: int, gpu: bool) -> None:
    meta = model()
    small, large = (
        predict(meta, knobs(meta, batch=batch, ctx_tokens=ctx, pool_tokens=ctx * batch), gpu=gpu)
        for ctx in sorted((a, b))
    )
    assert 0 < small.total_bytes <= large.total_bytes
    assert all(entry.size_bytes > 0 for entry in small.entries)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 80 * GIB), st.booleans(), st.sampled_from(["balanced", "quality", "ctx", "batch"]))
def test_a_plan_that_fits_is_within_the_card_and_a_larger_card_carries_no_less(
    card: int, gpu: bool, prefer: Any
) -> None:
    plan = choose(VARIANTS, card, 0, gpu=gpu, prefer=prefer)
    assert plan.fits == (plan.accounts.total_bytes <= card)
    if plan.fits:
        assert choose(VARIANTS, 2 * card, 0, gpu=gpu, prefer=prefer).fits


# ---------------------------------------------------------------- matrix


def test_cells_that_the_journal_measured_are_marked() -> None:
    rows = [CardRow(label=f"{n}GiB", card=n * GIB, gpu=False, headroom_bytes=0) for n in (6, 12, 32)]
    measured = [
        Measured(header_hash="Q8_0", card_total_bytes=12 * GIB, ctx_tokens=12_000, peak_bytes=11 * GIB),
        Measured(header_hash="Q8_0", card_total_bytes=12 * GIB, ctx_tokens=4000, peak_bytes=9 * GIB),
    ]
    cells = matrix(VARIANTS, rows, Limits(), measured)
    assert [[cell.feasible for cell in line] for line in cells] == [
        [False, False, True],
        [False, True, True],
        [True, True, True],
    ]
    assert cells[0][0].plan.verdict == "weights do not fit"
    marked = [(i, j) for i, line in enumerate(cells) for j, cell in enumerate(line) if cell.measured]
    assert marked == [(1, 1)]
    assert cells[1][1].ctx_tokens == 12_000


# ---------------------------------------------------------------- sketches


def test_27_billion_parameters_by_width() -> None:
    parameters = parse_parameters("27B")
    gib = {bits: round(weight_bytes(parameters, bits) / GIB, 1) for bits in (16, 8, 4)}
    assert gib == {16: 50.3, 8: 25.1, 4: 12.6}
    meta = sketch(parameters, 16, layers=60, kv_heads=8, head_dim=128)
    accounts = predict(meta, knobs(meta, ctx_tokens=8192, pool_tokens=8192))
    assert accounts.kv_bytes == 8192 * 245_760
    assert accounts.weights_bytes == 54 * 10**9


def test_a_card_carries_at_most_so_many_parameters() -> None:
    most = most_parameters(24 * GIB)
    assert most[16] == 12 * GIB
    assert most[4] == int(24 * GIB / 0.6)
    for bits, parameters in most.items():
        assert weight_bytes(parameters, bits) <= 24 * GIB


@pytest.mark.parametrize(
    ("text", "parameters"), [("27B", 27 * 10**9), ("1.5b", 1_500_000_000), ("270M", 270 * 10**6), ("7", 7)]
)
def test_numbers_of_parameters_are_read(text: str, parameters: int) -> None:
    assert parse_parameters(text) == parameters


@pytest.mark.parametrize("text", ["", "B", "-3B", "27 billion", "0", "1e9"])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of parameters"):
        parse_parameters(text)


def test_half_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="together"):
        sketch(10**9, 4, layers=3)
