"""The law of precision: no loss scale, dtype or number of micro-batches is in the update.

Largest relative Frobenius errors of an update, measured, right and wrong:

* Given gradients, any scale, clipped or not: bit-equal within a grid, and between grids where DDP's
  factor is exact; 7.2e-7 from the oracle. With three data-parallel ranks, where fp16 sums round:
  3.3e-4.
* Backward pass in fp16, scale 1 to 8192: 2.3e-5 in one step of an MLP, 8.8e-3 in three of a GPT,
  where subnormal numbers tip the rounding of others; 2.5e-6 from the oracle, given its gradients.
* Four micro-batches against one: 7.6e-6 in fp32, 6.2e-3 in bf16, 1.3e-3 in fp16; 4.5e-1 where
  each micro-batch is averaged over its own tokens.
* Momentum of gradients of 1e-6: 2.6e-4 at scale 2^16, 2.4e-2 at scale 1, 1.2e-1 if kept in fp16.
* Mutants, the least of all matrices: update divided by the scale 9.8e-1, clipped updates 7.6e-1,
  momentum in fp16 6.8e-2, Newton-Schulz of each micro-batch 5.2e-1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import Replica, blocks, gradients, logical_shapes
from megatron_muon.testing.law.mutants import SCALE_MUTANTS
from megatron_muon.testing.law.reference import errors, run_oracle, violations, whole_masters
from megatron_muon.testing.law.runs import Runs
from megatron_muon.testing.oracle import relative_error

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LAYOUTS = ("owner", "flat")

# Given gradients: multiples of 2^-12 below 2^-3 are normal fp16 numbers at all these scales.

FP16 = Case(layers=1, fp16=True, grads_in_fp32=False, grad_factor=2.0**-7)
SCALES = {
    "2^0": (2.0**0,) * 3,
    "2^4": (2.0**4,) * 3,
    "2^10": (2.0**10,) * 3,
    "2^16": (2.0**16,) * 3,
    "changing": (2.0**4, 2.0**16, 2.0**10),
}
CLIPS = {"no clip": 0.0, "clip far above": 1e6, "clipped": 0.25}
WAYS = {
    "owner": {"layout": "owner"},
    "flat": {"layout": "flat"},
    "no layout": {"wrap": "legacy"},
    "replicated": {"wrap": "replicated"},
}
PLACES = {
    **{
        f"{way} TP{tp} DP{dp}": (tp * dp, replace(FP16, tp=tp, layout=way))
        for way in LAYOUTS
        for tp, dp in ((1, 1), (2, 2), (1, 3))
    },
    **{
        f"{way} TP2 DP2": (4, replace(FP16, tp=2, **WAYS[way]))
        for way in ("no layout", "replicated")
    },
}
ELSEWHERE = {
    **{
        f"{way} TP{tp} DP{dp}": (tp * dp, replace(FP16, tp=tp, layout=way))
        for way in LAYOUTS
        for tp, dp in ((1, 2), (1, 4))
    },
    **{
        f"{way} TP1 DP3 in fp32": (3, replace(FP16, layout=way, grads_in_fp32=True))
        for way in LAYOUTS
    },
}
"""More grids; sums of three ranks are exact enough in fp32 alone."""

GIVEN: dict[str, tuple[int, Case]] = {
    **{
        f"{place}, {clip}, {scale}": (
            num_ranks, replace(case, clip=CLIPS[clip], loss_scales=SCALES[scale])
        )
        for place, (num_ranks, case) in PLACES.items()
        for clip in CLIPS
        for scale in SCALES
        if clip != "clip far above" or scale in ("2^0", "changing")
    },
    **{
        f"{place}, {clip}, 2^10": (
            num_ranks, replace(case, clip=CLIPS[clip], loss_scales=SCALES["2^10"])
        )
        for place, (num_ranks, case) in ELSEWHERE.items()
        for clip in ("no clip", "clipped")
    },
}  # fmt: skip

# Gradients of all precisions and micro-batches, given.

DTYPES = {
    "fp32": {"fp16": False, "grads_in_fp32": True},
    "bf16": {"fp16": False, "bf16": True, "grads_in_fp32": True},
    "fp16": {"loss_scales": SCALES["2^10"]},
}
PRECISIONS = {
    f"{dtype} {way}, {number} micro-batches": (
        4, replace(FP16, tp=2, layout=way, micro_batches=number, **fields),
    )
    for dtype, fields in DTYPES.items()
    for way in LAYOUTS
    for number in (1, 4)
}  # fmt: skip

# What the optimizer writes and keeps.

TINY = {
    f"{way}, {exponent}": (
        4, replace(FP16, tp=2, grad_factor=2.0**-24, loss_scales=(2.0**exponent,) * 3,
                   watched=True, **fields),
    )
    for way, fields in WAYS.items()
    for exponent in (16, 22)
}  # fmt: skip
SMALL = replace(FP16, tp=2, grad_factor=1e-6, watched=True)
SMALL_GRADIENTS = {
    f"small, {way}, {scale}": (
        4, replace(SMALL, layout=way, loss_scales=SCALES[scale]),
    )
    for way in LAYOUTS
    for scale in ("2^0", "2^16")
}  # fmt: skip

# Gradients of a backward pass. AdamW's epsilon is as large as gradients that should be zero, those
# of key biases, and is lifted as the loss.

PERCEPTRON = Case(perceptron=True, backward=True, layers=1, gated=False, bias=False, steps=1)
LIFTED = replace(PERCEPTRON, fp16=True, grads_in_fp32=False, loss_factor=2.0**7)
GPT = Case(backward=True, adam_eps=1e-3)
LIFTED_GPT = replace(
    GPT, fp16=True, grads_in_fp32=False, loss_factor=2.0**3, adam_eps=2.0**3 * GPT.adam_eps
)
BACKWARD_SCALES = (1.0, 16.0, 8192.0)
BACKWARD = {
    **{
        f"{way} TP{tp} DP{dp}, {scale:g}": (
            tp * dp, replace(LIFTED, tp=tp, layout=way, loss_scales=(scale,)),
        )
        for way in LAYOUTS
        for tp, dp in ((1, 1), (2, 2))
        for scale in BACKWARD_SCALES
    },
    **{
        f"GPT {way} TP{tp} DP{dp}, {scale:g}": (
            tp * dp, replace(LIFTED_GPT, tp=tp, layout=way, loss_scales=(scale,) * 3),
        )
        for way in LAYOUTS
        for tp, dp in ((1, 1), (2, 2))
        for scale in (1.0, 8192.0)
    },
}  # fmt: skip

LOSSES = {"mean": {}, "per token": {"per_token": True, "masked": True}}
IN_BACKWARD = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "grads_in_fp32": False, "loss_scales": (2.0**6,) * 3},
}
ACCUMULATED = {
    **{
        f"{dtype}, {loss}, {way} TP{tp} DP{dp}, {number} micro-batches": (
            tp * dp,
            replace(PERCEPTRON, steps=3, tp=tp, layout=way, micro_batches=number,
                    **IN_BACKWARD[dtype], **LOSSES[loss]),
        )
        for dtype in IN_BACKWARD
        for loss in LOSSES
        for way, tp, dp in (("owner", 1, 1), ("owner", 2, 2), ("flat", 2, 2))
        for number in (1, 4)
    },
    **{
        f"GPT, {loss}, {way} TP{tp} DP{dp}, {number} micro-batches": (
            tp * dp,
            replace(GPT, tp=tp, layout=way, micro_batches=number, **LOSSES[loss]),
        )
        for loss in LOSSES
        for way, tp, dp in (("owner", 1, 1), ("owner", 2, 2), ("flat", 2, 2))
        for number in (1, 4)
    },
    **{
        f"masked, not per token, {number} micro-batches": (
            1, replace(PERCEPTRON, steps=3, masked=True, micro_batches=number)
        )
        for number in (1, 4)
    },
}  # fmt: skip

BROKEN: dict[str, tuple[int, Case]] = {
    f"{mutant}, {layout}": (4, replace(case, tp=2, layout=layout, mutant=mutant))
    for layout in LAYOUTS
    for mutant, case in {
        "update divided by the scale": replace(FP16, loss_scales=SCALES["changing"]),
        "clip applied to the update": replace(FP16, loss_scales=SCALES["2^10"], clip=0.25),
        "momentum in fp16": replace(SMALL, loss_scales=SCALES["2^16"]),
        "Newton-Schulz of each micro-batch": replace(
            FP16, loss_scales=SCALES["2^10"], micro_batches=4
        ),
    }.items()
}

RUNS = Runs(
    {**GIVEN, **PRECISIONS, **TINY, **SMALL_GRADIENTS, **BACKWARD, **ACCUMULATED, **BROKEN},
    timeout_s=170,
)

BOUND = 5e-6
"""Above the error of fp32 arithmetic."""

THREE_RANKS_BOUND = 7e-4
"""The same where a third of each gradient is rounded to fp16."""

ACCUMULATION_BOUNDS = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 5e-3, "GPT": 5e-5}
"""Above the error of gradients that are rounded to this dtype in other sums."""

WRONG = 1e-2
"""Parts every fault from every rounding but that of bf16."""


def worst(label, other):
    """The largest error of an update, against another run."""
    return max(errors(RUNS.masters(label), RUNS.masters(other)).values())


# Loss scale and clip.


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("place", PLACES)
def test_loss_scale_changes_no_bit_and_no_norm(place, clip):
    labels = [label for label in GIVEN if label.startswith(f"{place}, {clip}, ")]
    first = RUNS.outcomes(labels[0])[0].grad_norms
    for label in labels:
        assert RUNS.differing(label, labels[0]) == []
        assert all(outcome.grad_norms == first for outcome in RUNS.outcomes(label))
    assert len(labels) == (2 if clip == "clip far above" else 5)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("place", PLACES)
def test_update_at_a_loss_scale_is_that_of_one_process(place, clip):
    bound = THREE_RANKS_BOUND if "DP3" in place else BOUND
    label = f"{place}, {clip}, changing"
    found = violations(RUNS.case(label), RUNS.outcomes(label), bound)
    if "DP3" in place:  # As far as the gradients are.
        found = [line for line in found if not line.startswith("gradient norm")]
    assert found == []


@pytest.mark.parametrize("place", [p for p in (*PLACES, *ELSEWHERE) if "DP3" not in p])
def test_update_without_clip_is_bit_equal_on_every_grid(place):
    assert RUNS.differing(f"{place}, no clip, 2^10", "owner TP1 DP1, no clip, 2^10") == []


@pytest.mark.parametrize("clip", ["no clip", "clipped"])
@pytest.mark.parametrize("place", [p for p in (*PLACES, *ELSEWHERE) if not p.endswith("DP3")])
def test_update_is_the_same_on_every_grid(place, clip):
    """With a clip too, although the norm, which is summed in another order, may differ."""
    assert worst(f"{place}, {clip}, 2^10", f"owner TP1 DP1, {clip}, 2^10") <= 1e-5


def test_clips_are_active_or_not():
    norms = RUNS.outcomes("owner TP1 DP1, no clip, 2^0")[0].grad_norms
    assert all(CLIPS["clipped"] < norm < CLIPS["clip far above"] for norm in norms)
    assert RUNS.differing("owner TP1 DP1, clip far above, 2^0", "owner TP1 DP1, no clip, 2^0") == []
    assert worst("owner TP1 DP1, clipped, 2^0", "owner TP1 DP1, no clip, 2^0") > WRONG


def test_flat_shards_cut_matrices():
    for grid in ("TP2 DP2", "TP1 DP3"):
        places = RUNS.outcomes(f"flat {grid}, no clip, 2^0")[0].places.values()
        assert any(len(place.pieces) > 1 for place in places)


# Backward passes.


@pytest.mark.parametrize("scale", BACKWARD_SCALES[1:])
@pytest.mark.parametrize("place", ["TP1 DP1", "TP2 DP2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_of_a_real_loss_is_not_in_the_update(layout, place, scale):
    label, first = f"{layout} {place}, {scale:g}", f"{layout} {place}, 1"
    assert worst(label, first) <= 1e-4
    norms = [RUNS.outcomes(each)[0].grad_norms[0] for each in (label, first)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("place", ["TP1 DP1", "TP2 DP2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_of_a_real_loss_is_not_in_three_updates_of_a_gpt(layout, place):
    assert worst(f"GPT {layout} {place}, 8192", f"GPT {layout} {place}, 1") <= 1.8e-2


@pytest.mark.parametrize(
    "label", [label for label, (num_ranks, _) in BACKWARD.items() if num_ranks == 1]
)
def test_update_of_a_backward_pass_is_that_of_the_oracle(label):
    """Given the gradients that DDP held, unscaled in fp64."""
    case, (outcome,) = RUNS.case(label), RUNS.outcomes(label)
    grads = [
        {name: grad.double() / case.loss_scales[0] for name, grad in step.items()}
        for step in outcome.grads
    ]
    updates = errors(RUNS.masters(label), run_oracle(case, grads).weights)
    assert updates.keys() == logical_shapes(case).keys()
    assert {name: error for name, error in updates.items() if not error <= 2e-5} == {}


# Accumulation and dtypes.


@pytest.mark.parametrize("label", PRECISIONS)
def test_dtype_and_micro_batches_change_no_bit(label):
    """Gradients are the same numbers, and their sums exact, in all of them."""
    assert RUNS.differing(label, "owner TP2 DP2, no clip, 2^0") == []
    assert violations(RUNS.case(label), RUNS.outcomes(label), BOUND) == []


@pytest.mark.parametrize("label", [label for label in ACCUMULATED if "4 micro" in label])
def test_one_and_four_micro_batches_give_one_update(label):
    """Also where they have different numbers of tokens, one of them none."""
    error = worst(label, label.replace("4 micro", "1 micro"))
    if label.startswith("masked, not per token"):
        assert error > 0.1  # Megatron's mean of means: so the numbers of tokens matter.
    else:
        assert error <= ACCUMULATION_BOUNDS[label.split(",")[0]]


@pytest.mark.parametrize("label", [label for label in ACCUMULATED if "TP2" in label])
def test_update_of_a_real_loss_is_that_of_one_process(label):
    one = label.replace("TP2 DP2", "TP1 DP1").replace("flat", "owner")
    assert worst(label, one) <= ACCUMULATION_BOUNDS[label.split(",")[0]]


@pytest.mark.parametrize("label", [*PRECISIONS, *ACCUMULATED])
def test_newton_schulz_runs_once_a_step(label):
    case = RUNS.case(label)
    matrices = {name: rows for name, rows in blocks(case).items() if name in logical_shapes(case)}
    calls = sum(outcome.newton_schulz_calls for outcome in RUNS.outcomes(label))
    assert calls == case.steps * sum(map(len, matrices.values()))


# What is in fp16.


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_parameters_is_written_in_fp16(way):
    for outcome in RUNS.outcomes(f"{way}, 22"):
        in_fp16 = {write for write in outcome.written if write.dtype == torch.float16}
        # Without a layout owners send their new weights from a flat copy.
        copies = {"elsewhere"} if way == "no layout" else set()
        assert {write.place for write in in_fp16} == {"parameters"} | copies
        assert not [write for write in outcome.written if write.place == "gradients"]
        assert any(write.dtype == torch.float32 for write in outcome.written)


@pytest.mark.parametrize("way", WAYS)
def test_a_large_scale_of_small_gradients_changes_no_bit(way):
    """No product of an update, which is never small, and the scale is stored in fp16."""
    label = f"{way}, 22"
    assert RUNS.differing(label, f"{way}, 16") == []
    assert violations(RUNS.case(label), RUNS.outcomes(label), BOUND) == []


@pytest.mark.parametrize("label", [*TINY, *SMALL_GRADIENTS])
def test_state_is_in_fp32(label):
    states = state_of(label)
    assert {tensor.dtype for state in states for tensor in state.values()} == {torch.float32}
    keys = {frozenset(state) for state in states}
    assert keys == {frozenset({"momentum_buffer"}), frozenset({"exp_avg", "exp_avg_sq", "step"})}


def state_of(label):
    """The optimizer's state of every piece on every rank."""
    return [
        state
        for outcome in RUNS.outcomes(label)
        for pieces in outcome.state.values()
        for _, state in pieces
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_momentum_of_small_gradients_survives(layout):
    assert momentum_error(f"small, {layout}, 2^16") <= 2e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_momentum_of_small_gradients_is_lost_without_a_scale_or_in_fp16(layout):
    """As it has to be, or the gradients are not small enough to say anything."""
    assert momentum_error(f"small, {layout}, 2^0") > WRONG
    assert momentum_error(f"momentum in fp16, {layout}") > WRONG


def momentum_error(label):
    """The largest error of Muon's momentum or AdamW's mean, which have the same factor."""
    case = RUNS.case(label)
    outcomes = [
        replace(
            outcome,
            masters={
                name: [
                    (start, state[key].float())
                    for start, state in pieces
                    for key in ("momentum_buffer", "exp_avg")
                    if key in state
                ]
                for name, pieces in outcome.state.items()
            },
        )
        for outcome in RUNS.outcomes(label)
    ]
    found = whole_masters(case, outcomes)
    expected = {name: torch.zeros_like(m, dtype=torch.float64) for name, m in found.items()}
    for step in range(case.steps):
        for name, grad in gradients(case, Replica(), step).items():
            expected[name] = 0.9 * expected[name] + 0.1 * grad.double()
    return max(relative_error(found[name], mean) for name, mean in expected.items())


# Broken steps.


@pytest.mark.parametrize("label", BROKEN)
def test_broken_step_is_seen(label):
    found = "\n".join(violations(RUNS.case(label), RUNS.outcomes(label), WRONG))
    matrices = [name for name in blocks(RUNS.case(label)) if f"update of {name}" in found]
    assert len(matrices) == len(blocks(RUNS.case(label))), found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spy_sees_a_momentum_in_fp16(layout):
    label = f"momentum in fp16, {layout}"
    written = {
        write.place
        for outcome in RUNS.outcomes(label)
        for write in outcome.written
        if write.dtype == torch.float16
    }
    assert "elsewhere" in written
    assert any(tensor.dtype == torch.float16 for s in state_of(label) for tensor in s.values())


def test_every_mutant_is_tried():
    assert {case.mutant for _, case in BROKEN.values()} > set(SCALE_MUTANTS)
