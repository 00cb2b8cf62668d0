"""A gradient that is not finite anywhere skips the step everywhere, and changes nothing.

An inf or a NaN is put into one element of what one rank steps, for every rank and every kind of
parameter in turn. Everything a step may change is hashed before and after it; each rank ends the
step within 20 s or dies; the next clean step ends bit for bit where it does in a run without bad
batches. Each law is seen to fail on a run that is broken on purpose.

Everything is compared bit for bit, save the updates of gradients whose squares are beyond fp32:
their relative error against the fp64 oracle is at most 6.7e-7, that of ordinary gradients, and with
squares in fp32 no step is made at all.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import blocks, is_cut, is_expert, logical_shapes
from megatron_muon.testing.law.mutants import SKIP_MUTANTS
from megatron_muon.testing.law.reference import violations
from megatron_muon.testing.law.runs import Runs
from tests.unit_tests.skipped_job import CLEAN, KINDS, Bad, Batch, Launches, Script

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LAYOUTS = ("owner", "flat")
DENSE = ("matrix", "scalar", "copy")
VALUES = (math.inf, math.nan, -math.inf)

# Gradients of the harness times any of these scales are exact in fp16. A limit of 0: what a lower
# loss scale may mend is never an error.
DYNAMIC = (
    ("initial_loss_scale", 2.0**10), ("min_loss_scale", 2.0**-19), ("loss_scale_window", 1000),
    ("hysteresis", 2), ("muon_max_skipped_steps", 0),
)  # fmt: skip
MANY = (("muon_max_skipped_steps", 1000),)

# With one layer, equal shards cut a matrix.
FP16 = Case(fp16=True, clip=1.0, layers=1)
TP2 = replace(FP16, tp=2)
EXPERTS = replace(FP16, experts=4, ep=2)
OVERLAPPED = replace(TP2, overlap_grad=True, overlap_param=True, bucket_size=6000)
WITHOUT_FP16 = replace(TP2, fp16=False)
LARGE = Case(bf16=True, clip=1.0, layers=1, grad_factor=2.0**83)

IN_BOTH_LAYOUTS: dict[str, tuple[int, Case]] = {
    "DP2": (2, FP16),
    "EP2": (2, EXPERTS),
    "PP2": (2, replace(FP16, pp=2, layers=2)),
    "TP2 DP2": (4, TP2),
    "EP2 DP4": (4, EXPERTS),
    "TP2 EP2, experts not cut": (4, replace(EXPERTS, tp=2, etp=1)),
    "overlapped": (4, OVERLAPPED),
}
PURE: dict[str, tuple[int, Case]] = {
    **{
        f"{name}, {layout}": (num_ranks, replace(case, layout=layout))
        for name, (num_ranks, case) in IN_BOTH_LAYOUTS.items()
        for layout in LAYOUTS
    },
    "TP2": (2, TP2),
    "TP2 PP2": (4, replace(TP2, pp=2, layers=2, layout="flat")),
    "gradients reduced in fp16": (2, replace(FP16, grads_in_fp32=False)),
    "no layout": (2, replace(FP16, wrap="legacy")),
    "no layout, TP2 DP2": (4, replace(TP2, wrap="legacy")),
    "no layout, EP2 DP4": (4, replace(EXPERTS, wrap="legacy")),
    "no distributed optimizer": (4, replace(TP2, wrap="replicated")),
    "no distributed optimizer, EP2": (4, replace(EXPERTS, wrap="replicated")),
    "bf16": (4, replace(WITHOUT_FP16, bf16=True)),
    "bf16, huge": (2, LARGE),
    "bf16, flat": (4, replace(WITHOUT_FP16, bf16=True, layout="flat")),
    "fp32": (4, WITHOUT_FP16),
    "fp32, flat": (4, replace(WITHOUT_FP16, layout="flat")),
    "fp32, no layout": (2, replace(WITHOUT_FP16, tp=1, wrap="legacy")),
    "constant scale": (4, replace(TP2, loss_scales=(1024.0,))),
}
"""Runs with bad batches, with their ranks."""


def bad_batches(num_ranks: int, kinds: Sequence[str]) -> tuple[Batch, ...]:
    """Return a bad batch for each rank and kind; a clean one after each kind, and before all."""
    batches = [CLEAN]
    for i, kind in enumerate(kinds):
        batches += [(Bad(rank, kind, VALUES[(i + rank) % 3]),) for rank in range(num_ranks)]
        batches.append(CLEAN)
    return tuple(batches)


def kinds_of(case: Case) -> tuple[str, ...]:
    return tuple(KINDS) if case.experts else DENSE


def config_of(case: Case) -> tuple[tuple[str, object], ...]:
    return DYNAMIC if case.fp16 and not case.loss_scales else MANY


def clean_of(script: Script) -> Script:
    """Return the same run without its bad batches."""
    return replace(script, batches=tuple(batch for batch in script.batches if not batch))


MUTANT_BATCHES = (CLEAN, (Bad(0, "matrix"),), (Bad(1, "copy", math.nan),), CLEAN)
BROKEN: dict[str, tuple[str, int, Case, str]] = {
    # label: mutant, ranks, case, what is found
    "own decision": (
        "flag reduced over the model-parallel group only", 2, FP16, "step 1: rank 1 did not skip",
    ),
    "own decision, flat": (
        "flag reduced over the model-parallel group only", 4, replace(TP2, layout="flat"),
        r"step 1: rank 2 changed .*master",
    ),
    "own decision, scales": (
        "flag reduced over the model-parallel group only", 4, TP2, "step 1: loss scales",
    ),
    "own scalers": ("one scaler per child", 2, FP16, "step 1: loss scales"),
    "own scalers, flat": (
        "one scaler per child", 2, replace(FP16, layout="flat"), "rank 0 updated 2 scalers",
    ),
    "no decision": (
        "no decision", 2, replace(FP16, fp16=False), "rank 0 has what is not finite",
    ),
    "no decision, bf16": (
        "no decision", 2, replace(FP16, fp16=False, bf16=True), "step 1: rank 1 did not skip",
    ),
    "copies": ("copies not looked at", 2, TP2, "step 2: rank 1 did not skip"),
    "momentum first": (
        "momentum before the decision", 2, FP16, "step 1: rank 0 changed .*momentum_buffer",
    ),
    "momentum first, later": (
        "momentum before the decision", 2, FP16, "step 3: rank 0 .* than without bad batches",
    ),
    "squares in fp32": ("squares in fp32", 2, LARGE, "step 0: rank 0 did not step"),
}  # fmt: skip

# Without a scaler, or where a lower scale cannot mend it.

SMALL = Case(layers=1, bf16=True)
UNMENDABLE: dict[str, tuple[int, Case, tuple[tuple[str, object], ...]]] = {
    "bf16": (2, SMALL, ()),
    "fp32": (2, replace(SMALL, bf16=False, layout="flat"), ()),
    "bf16, constant scale": (2, replace(SMALL, loss_scales=(64.0,)), ()),
    "fp16, constant scale": (2, replace(SMALL, bf16=False, fp16=True, loss_scales=(64.0,)), ()),
    "fp16 at the floor": (
        2, replace(SMALL, bf16=False, fp16=True),
        (("initial_loss_scale", 64.0), ("min_loss_scale", 64.0), ("loss_scale_window", 1000)),
    ),
    "bf16, four ranks": (4, replace(SMALL, layers=2, tp=2, pp=2), ()),
}  # fmt: skip
ONE_BAD = (Bad(1, "scalar", math.nan),)
ROWS = (CLEAN, ONE_BAD, ONE_BAD, CLEAN, ONE_BAD, ONE_BAD, ONE_BAD, CLEAN)
"""Two bad steps in a row, and three."""

ALONE = replace(SMALL, wrap="replicated")
ALONE_BAD = (Bad(0, "matrix"),)
QKV, FC1 = (f"decoder.layers.0.{name}.weight"
            for name in ("self_attention.linear_qkv", "mlp.linear_fc1"))  # fmt: skip
LATER_BAD = (Bad(0, FC1), Bad(1, "scalar"))
TWICE_BAD = (Bad(0, QKV), Bad(1, QKV))

OTHERS: dict[str, tuple[int, Script]] = {
    **{
        f"{label}, limit 2": (
            ranks, Script(case=case, batches=ROWS, config=(*config, ("muon_max_skipped_steps", 2)))
        )
        for label, (ranks, case, config) in UNMENDABLE.items()
    },
    "two stages": (
        4,
        Script(case=TP2, batches=bad_batches(4, ("matrix", "copy")),
               config=DYNAMIC, mutant="reduction in two stages"),
    ),
    "limit 0": (
        2, Script(case=SMALL, batches=(CLEAN, ONE_BAD, CLEAN),
                  config=(("muon_max_skipped_steps", 0),)),
    ),
    "default limit": (1, Script(case=ALONE, batches=11 * (ALONE_BAD,))),
    "falling to the floor": (
        1,
        Script(
            case=replace(ALONE, bf16=False, fp16=True),
            batches=5 * (ALONE_BAD,),
            config=(("initial_loss_scale", 4.0), ("min_loss_scale", 1.0), ("hysteresis", 1),
                    ("muon_max_skipped_steps", 1)),
        ),
    ),
    "two names": (2, Script(case=Case(pp=2, bf16=True), batches=(LATER_BAD,))),
    "one name on two ranks": (2, Script(case=Case(tp=2), batches=(TWICE_BAD,))),
    "norm above the threshold": (
        2,
        Script(
            case=replace(SMALL, trained=r"layers.0.mlp.linear_fc2.weight", skip_above=100.0),
            batches=3 * (CLEAN,),
        ),
    ),
    "report": (2, Script(case=replace(SMALL, report="yes"), batches=(CLEAN, ONE_BAD, CLEAN))),
}  # fmt: skip

# What a loss scale costs.

COUNTED = Case(tp=2, clip=1.0, layers=1, counted=True)
PRECISIONS: dict[str, tuple[Case, tuple[tuple[str, object], ...]]] = {
    "bf16": (replace(COUNTED, bf16=True), ()),
    "bf16, constant scale": (replace(COUNTED, bf16=True, loss_scales=(64.0,)), ()),
    "fp16, dynamic scale": (replace(COUNTED, fp16=True), DYNAMIC),
    "fp16, constant scale": (replace(COUNTED, fp16=True, loss_scales=(64.0,)), ()),
    "fp32": (COUNTED, ()),
    "fp32, constant scale": (replace(COUNTED, loss_scales=(64.0,)), ()),
}
COSTS: dict[str, tuple[int, Script]] = {
    **{
        f"cost of {label}, {layout}": (
            4, Script(case=replace(case, layout=layout), config=config,
                      batches=(CLEAN, CLEAN, (Bad(3, "matrix"),))),
        )
        for label, (case, config) in PRECISIONS.items()
        for layout in LAYOUTS
    },
    **{
        f"cost of {precision}, {layout}, without scaler code": (
            4, Script(case=replace(PRECISIONS[precision][0], layout=layout),
                      batches=(CLEAN, CLEAN), mutant="without scaler code"),
        )
        for precision in ("bf16", "fp32")
        for layout in LAYOUTS
    },
    **{
        f"cost of {label}, one rank": (
            1, Script(case=replace(case, tp=1), config=config, batches=(CLEAN, CLEAN)),
        )
        for label, (case, config) in PRECISIONS.items()
    },
}  # fmt: skip

WITH_CLEAN: dict[str, tuple[int, Script]] = {
    label: (num_ranks, Script(case=case, batches=bad_batches(num_ranks, kinds_of(case)),
                              config=config_of(case)))
    for label, (num_ranks, case) in PURE.items()
} | {
    label: (num_ranks, Script(case=case, batches=MUTANT_BATCHES, mutant=mutant,
                              config=(*config_of(case), ("hysteresis", 1))))
    for label, (mutant, num_ranks, case, _) in BROKEN.items()
} | {
    label: script for label, script in OTHERS.items() if CLEAN in script[1].batches
}  # fmt: skip

RUNS = Launches(
    WITH_CLEAN
    | {f"{label}, clean": (n, clean_of(script)) for label, (n, script) in WITH_CLEAN.items()}
    | OTHERS
    | COSTS,
    timeout_s=170,
)


def wrongs(label: str) -> list[str]:
    """Compare a run with the same without bad batches; return what is not as it should be."""
    script, found, cleans = RUNS.script(label), [], iter(RUNS.steps(f"{label}, clean"))
    has_scaler = script.case.fp16 or bool(script.case.loss_scales)
    num_bad = 0
    for i, (batch, ranks) in enumerate(zip(script.batches, RUNS.steps(label), strict=True)):
        num_bad += bool(batch)
        clean = None if batch else next(cleans)
        scales = {scale for record in ranks for scale in record.scale}
        if scales != {ranks[0].stock_scale}:
            found.append(f"step {i}: loss scales {scales}, Megatron's is {ranks[0].stock_scale}")
        for rank, record in enumerate(ranks):
            where = f"step {i}: rank {rank}"
            if record.error:
                found.append(f"{where} raised {record.error}")
            if batch and record.result != (False, None, None):
                found.append(f"{where} did not skip")
            if batch and record.changed:
                found.append(f"{where} changed {', '.join(record.changed)}")
            if not batch and not (record.result and record.result[0]):
                found.append(f"{where} did not step")
            if clean is not None and record.state != clean[rank].state:
                found.append(f"{where} is elsewhere than without bad batches")
            if not record.is_finite:
                found.append(f"{where} has what is not finite")
            if record.num_updates != has_scaler:
                found.append(f"{where} updated {record.num_updates} scalers")
            if record.num_skipped != num_bad:
                found.append(f"{where} counts {record.num_skipped} skipped steps, not {num_bad}")
    return found


@pytest.mark.parametrize("label", [*PURE, "two stages"])
def test_bad_element_anywhere_skips_the_step_everywhere_and_changes_nothing(label):
    """On every rank; and the next clean step is that of a run that never saw it."""
    assert wrongs(label) == []


@pytest.mark.parametrize("label", BROKEN)
def test_broken_decision_is_seen(label):
    found = "\n".join(wrongs(label))
    assert re.search(BROKEN[label][3], found), found


def test_every_mutant_is_tried():
    assert {mutant for mutant, *_ in BROKEN.values()} == set(SKIP_MUTANTS) - {None}


@pytest.mark.parametrize(
    "label", [label for label, (_, case) in PURE.items() if config_of(case) == DYNAMIC]
)
def test_overflow_that_a_lower_scale_may_mend_is_nothing_to_tell(label):
    """With a limit of no skipped step at all."""
    steps = RUNS.steps(label)
    assert not any(record.logged or record.error for ranks in steps for record in ranks)
    assert steps[-1][0].scale[0] < steps[0][0].scale[0]


# What the runs have to have, for this to say anything.


@pytest.mark.parametrize("label", PURE)
def test_every_rank_and_kind_had_a_bad_element(label):
    case, steps = RUNS.script(label).case, RUNS.steps(label)
    seen: Counter[str] = Counter()
    for batch, ranks in zip(RUNS.script(label).batches, steps, strict=True):
        assert [rank for rank, record in enumerate(ranks) if record.bad] == [b.rank for b in batch]
        for record in ranks:
            for name in record.bad:
                seen.update(kind for kind, pattern in KINDS.items() if re.search(pattern, name))
    assert set(seen) == set(kinds_of(case))
    assert min(seen.values()) >= len(steps[0]) // 2


@pytest.mark.parametrize("label", ["DP2, flat", "TP2 DP2, flat", "EP2 DP4, flat"])
def test_flat_shards_cut_a_matrix(label):
    first = RUNS.steps(label)[0]
    holders = Counter(key for record in first for key in record.state)
    copies = RUNS.script(label).case.tp
    names = blocks(RUNS.script(label).case)
    assert any(holders[f"master {name}"] > copies for name in names)


def test_kinds_are_what_they_are_called():
    for case in (FP16, EXPERTS):
        for name in logical_shapes(case):
            kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, name)]
            assert len(kinds) == 1, name
            assert ("expert" in kinds[0]) == is_expert(name)
            assert kinds[0].endswith("matrix") == (name in blocks(case))
            if kinds[0] == "copy":
                assert not is_cut(name)
            if kinds[0] == "scalar":
                assert is_cut(name)


@pytest.mark.parametrize("label", ["DP2, owner", "DP2, flat"])
def test_calm_matrix_does_not_move_with_its_neighbour_that_overflows(label):
    """Which a step that is kept moves both of."""
    ranks_by_step, batches = RUNS.steps(label), RUNS.script(label).batches
    names = set(blocks(RUNS.script(label).case))
    for batch, ranks in zip(batches, ranks_by_step, strict=True):
        moved = {key for record in ranks for key in record.changed}
        assert {f"momentum_buffer {name}" for name in names} <= moved or batch
        assert {f"master {name}" for name in names} <= moved or batch
        assert {"scheduler"} <= moved or batch
        assert not (moved and batch)
        if batch and batch[0].kind == "matrix":
            (boom,) = (name for record in ranks for name in record.bad)
            assert names - {boom}


# Without a scaler, or where a lower scale cannot mend it.


@pytest.mark.parametrize("label", UNMENDABLE)
def test_too_many_bad_steps_in_a_row_are_an_error_on_every_rank(label):
    label = f"{label}, limit 2"
    steps, cleans = RUNS.steps(label), iter(RUNS.steps(f"{label}, clean"))
    assert [ranks[0].num_skipped for ranks in steps] == [0, 1, 2, 2, 3, 4, 5, 5]
    bad = next(name for record in steps[1] for name in record.bad)
    for i, (batch, ranks) in enumerate(zip(ROWS, steps, strict=True)):
        assert all(record.is_finite for record in ranks)
        assert {record.num_skipped for record in ranks} == {ranks[0].num_skipped}
        if not batch:
            assert [r.state for r in ranks] == [r.state for r in next(cleans)]
            assert all(record.result is not None and record.result[0] for record in ranks)
            assert not any(record.logged or record.error for record in ranks)
            continue
        assert not any(record.changed for record in ranks)
        if i == 6:
            (error,) = {record.error for record in ranks}
            assert error.startswith(
                f"NonFiniteGradientError: The gradient of {bad} has inf or NaN, in 3 steps in a "
                f"row. Weights and optimizer are as they were before. {_advice(label)}"
            )
            assert error.endswith(
                "Look for the cause in the data and the loss, lower the learning rate, or raise "
                "--muon-max-skipped-steps (2)."
            )
            continue
        assert [record.result for record in ranks] == [(False, None, None)] * len(ranks)
        in_a_row, in_all = {1: (1, 1), 2: (2, 2), 4: (1, 3), 5: (2, 4)}[i]
        assert [record.logged for record in ranks] == [
            (f"step skipped: the gradient of {bad} has inf or NaN ({in_a_row} in a row, of 2 "
             f"allowed; {in_all} in all)",),
            *[()] * (len(ranks) - 1),
        ]  # fmt: skip


def _advice(label):
    """What an error begins with that a loss scale may be to blame for."""
    if "constant scale" in label:
        return "--loss-scale "
    return "The loss scale is at its floor, --min-loss-scale " if "floor" in label else "Look for"


def test_limit_of_zero_ends_at_the_first_bad_step():
    before, bad, after = RUNS.steps("limit 0")
    assert not any(record.error for record in (*before, *after))
    assert len({record.error for record in bad}) == 1
    assert re.match(r"NonFiniteGradientError: The gradient of \S+ has inf or NaN\. ", bad[0].error)
    assert "(0)" in bad[0].error
    assert not any(record.changed for record in bad)


def test_default_limit_is_ten():
    errors = [record.error for (record,) in RUNS.steps("default limit")]
    assert errors[:10] == 10 * [""]
    assert "in 11 steps in a row" in errors[10]
    assert "--muon-max-skipped-steps (10)" in errors[10]


def test_row_begins_where_the_scale_cannot_fall_any_more():
    records = [record for (record,) in RUNS.steps("falling to the floor")]
    assert [record.scale[0] for record in records] == [2, 1, 1, 1, 1]
    assert [bool(record.logged) for record in records] == [False, False, True, False, False]
    assert [bool(record.error) for record in records] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("label", "expected"),
    [("two names", f"{FC1} and others"), ("one name on two ranks", QKV)],
)
def test_first_bad_parameter_of_the_model_is_named(label, expected):
    ((first, second),) = RUNS.steps(label)
    assert first.bad
    assert second.bad
    assert first.logged[0].startswith(f"step skipped: the gradient of {expected} has inf or NaN")
    assert second.logged == ()


def test_norm_above_the_threshold_skips_on_every_rank():
    """Also on one that steps nothing of its own."""
    steps = RUNS.steps("norm above the threshold")
    held = [sum(key.startswith("master") for key in record.state) for record in steps[0]]
    assert sorted(held) == [0, 1]
    for first, second in steps:
        assert first.result == second.result
        assert first.num_skipped == second.num_skipped == 0
    results = [first.result for first, _ in steps]
    assert [success for success, _, _ in results] == [True, False, True]
    assert [norm > 100 for _, norm, _ in results] == [False, True, False]
    assert not any(record.changed for record in steps[1])
    assert [len(record.logged) for record in steps[1]] == [1, 0]


def test_report_has_skipped_steps():
    *_, (first, _) = RUNS.steps("report")
    good, bad, again = json.loads(first.report)["steps"]
    assert [step["skipped"] for step in (good, bad, again)] == [False, True, False]
    assert bad["newton_schulz_calls"] == bad["newton_schulz_flops"] == 0
    assert good["newton_schulz_calls"] == again["newton_schulz_calls"] > 0


# Gradients whose squares are beyond fp32 are finite.

HUGE = Runs(
    {
        f"{precision}, {layout}": (
            2, replace(LARGE, bf16=precision == "bf16", layout=layout),
        )
        for precision in ("bf16", "fp32")
        for layout in LAYOUTS
    },
    timeout_s=110,
)  # fmt: skip


@pytest.mark.parametrize("label", HUGE.cases)
def test_huge_finite_gradients_are_clipped_and_stepped(label):
    assert violations(HUGE.case(label), HUGE.outcomes(label), bound=5e-6) == []
    assert min(HUGE.outcomes(label)[0].grad_norms) > 1e25


# What a loss scale costs.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("label", "other"),
    [
        ("bf16, constant scale", "bf16"),
        ("fp16, dynamic scale", "bf16"),
        ("fp16, constant scale", "bf16"),
        ("fp32, constant scale", "fp32"),
    ],
)
def test_loss_scale_adds_no_collective(label, other, layout):
    for scaled, plain in zip(
        RUNS.steps(f"cost of {label}, {layout}")[:2],
        RUNS.steps(f"cost of {other}, {layout}")[:2],
        strict=True,
    ):
        assert [r.collectives for r in scaled] == [r.collectives for r in plain]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("label", PRECISIONS)
def test_one_reduction_a_step_decides_all(label, layout):
    """Of a few numbers; a skipped step has it alone, save where names are told."""
    *clean, bad = RUNS.steps(f"cost of {label}, {layout}")
    for record in (record for ranks in clean for record in ranks):
        reductions = [nbytes for name, nbytes in record.collectives if name == "allreduce_"]
        assert len(reductions) == 1
        assert reductions[0] < 100
        assert len(record.collectives) > 1
    for record in bad:
        names = [name for name, _ in record.collectives]
        assert names[0] == "allreduce_"
        assert (names == ["allreduce_"]) == ("dynamic" in label)
        assert names.count("allreduce_") == 1


@pytest.mark.parametrize("label", PRECISIONS)
def test_one_rank_reduces_nothing(label):
    """What Megatron gathers there is its own."""
    for (record,) in RUNS.steps(f"cost of {label}, one rank"):
        assert {name for name, _ in record.collectives} <= {"allgather_into_tensor_coalesced_"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_scaler_code_changes_no_bit_without_a_scaler(precision, layout):
    plain = RUNS.steps(f"cost of {precision}, {layout}")[:2]
    without = RUNS.steps(f"cost of {precision}, {layout}, without scaler code")
    for ranks, others in zip(plain, without, strict=True):
        assert [r.state for r in ranks] == [r.state for r in others]
        assert [r.result for r in ranks] == [r.result for r in others]
        assert [r.collectives for r in ranks] == [r.collectives for r in others]
