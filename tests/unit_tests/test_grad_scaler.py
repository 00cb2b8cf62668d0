"""The loss scale of Muon is that of Megatron's AdamW, and the same in all children and ranks.

A real optimizer is driven through good and bad batches, and beside it Megatron's own AdamW and a
scaler of Megatron's; their scales and trackers are compared after each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.skipped_job import CLEAN, Bad, Batch, Launches, Script

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

FP16 = Case(fp16=True, layers=1, clip=1.0)
ADAMW = replace(FP16, wrap="replicated")
INSTEAD = (("optimizer", "adam"), ("use_layer_wise_distributed_optimizer", False))

SEQUENCES: dict[str, tuple[int, int, float, float, str]] = {
    # hysteresis, growth window, first scale, floor, good (.) and bad (x) steps
    "falls at the second": (2, 3, 2.0**10, 1.0, ".xx.x..x...x"),
    "falls at once": (1, 2, 2.0**9, 1.0, "x..x....x.xx"),
    "hysteresis is spent": (3, 1000, 2.0**10, 1.0, "x.x.x.x.x..x"),
    "grows": (2, 2, 2.0**4, 1.0, "............"),
    "bad step starts the window anew": (4, 3, 2.0**4, 1.0, "..x..x...x.."),
    "at the floor": (1, 2, 2.0**7, 2.0**5, "xxxxx...xx.x"),
}
EXPECTED = {
    "falls at the second": [1024, 1024, 512, 512, 256, 256, 256, 128, 128, 128, 256, 256],
    "at the floor": [64, 32, 32, 32, 32, 32, 64, 64, 32, 32, 32, 32],
}
"""Scales worked out by hand from Megatron's rules."""

WAYS: dict[str, Case] = {
    "owner": FP16,
    "flat": replace(FP16, layout="flat"),
    "no layout": replace(FP16, wrap="legacy"),
    "no distributed optimizer": ADAMW,
}


def batches(steps: str, rank: int = 0) -> tuple[Batch, ...]:
    """Return a batch for each step; what is bad is of another kind each time."""
    kinds = ("matrix", "scalar", "copy")
    return tuple(
        (Bad(rank, kinds[i % 3]),) if step == "x" else CLEAN for i, step in enumerate(steps)
    )


def config(name: str) -> tuple[tuple[str, Any], ...]:
    hysteresis, window, scale, floor, _ = SEQUENCES[name]
    return (
        ("hysteresis", hysteresis), ("loss_scale_window", window), ("initial_loss_scale", scale),
        ("min_loss_scale", floor), ("muon_max_skipped_steps", 1000),
    )  # fmt: skip


SAVED_AFTER = 5
"""In the middle of a window, with a hysteresis that is partly spent."""

MID_WINDOW = "falls at the second"

SCRIPTS: dict[str, tuple[int, Script]] = {
    **{
        f"{name}, {way}": (
            1, Script(case=case, batches=batches(steps), config=config(name)),
        )
        for name, (*_, steps) in SEQUENCES.items()
        for way, case in WAYS.items()
    },
    **{
        f"{name}, AdamW": (
            1, Script(case=ADAMW, batches=batches(steps), config=(*config(name), *INSTEAD)),
        )
        for name, (*_, steps) in SEQUENCES.items()
    },
    **{
        f"saved, {way}, {change}": (
            2, Script(case=WAYS[way], batches=batches(SEQUENCES[MID_WINDOW][-1], rank=1),
                      config=config(MID_WINDOW), saves_after=SAVED_AFTER, mutant=change),
        )
        for way in ("owner", "no layout", "no distributed optimizer")
        for change in (None, "scaler not loaded")
    },
}  # fmt: skip

RUNS = Launches(SCRIPTS, timeout_s=110)


def scales(label: str) -> list[float]:
    """Return the loss scale after each step, that of all children and ranks."""
    found = [{scale for record in ranks for scale in record.scale} for ranks in RUNS.steps(label)]
    assert [len(scale) for scale in found] == [1] * len(found)
    return [scale.pop() for scale in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_scale_is_that_of_adamw_after_each_step(name, way):
    records = [record for (record,) in RUNS.steps(f"{name}, {way}")]
    adamw = [record for (record,) in RUNS.steps(f"{name}, AdamW")]
    assert scales(f"{name}, {way}") == scales(f"{name}, AdamW")
    assert scales(f"{name}, {way}") == [record.stock_scale for record in records]
    assert [record.trackers for record in records] == [record.trackers for record in adamw]
    assert [bool(r.result and r.result[0]) for r in records] == [
        bool(r.result and r.result[0]) for r in adamw
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_scale_is_what_the_rules_say(name):
    assert scales(f"{name}, owner") == EXPECTED[name]


def test_scale_moves_up_down_and_stays():
    """Or equal scales would say little."""
    assert max(scales("grows, owner")) == 2.0**10
    assert min(scales("hysteresis is spent, owner")) == 2.0**6
    assert min(scales("at the floor, owner")) == 2.0**5
    trackers = {r.trackers for name in SEQUENCES for (r,) in RUNS.steps(f"{name}, owner")}
    assert len(trackers) > 10


@pytest.mark.parametrize("way", ["owner", "no layout"])
def test_every_rank_saves_the_same_scaler(way):
    for ranks in RUNS.steps(f"saved, {way}, None"):
        (saved,) = {record.saved for record in ranks}
        assert "growth_tracker" in saved


@pytest.mark.parametrize("way", ["owner", "no layout", "no distributed optimizer"])
def test_loaded_scaler_goes_on_within_its_window(way):
    resumed = RUNS.steps(f"saved, {way}, None")
    assert scales(f"saved, {way}, None") == scales(f"{MID_WINDOW}, {way}")
    for ranks, (whole,) in zip(resumed, RUNS.steps(f"{MID_WINDOW}, {way}"), strict=True):
        assert {record.trackers for record in ranks} == {whole.trackers}


@pytest.mark.parametrize("way", ["owner", "no layout", "no distributed optimizer"])
def test_scaler_that_is_not_loaded_is_seen(way):
    lost, whole = scales(f"saved, {way}, scaler not loaded"), scales(f"{MID_WINDOW}, {way}")
    assert lost[:SAVED_AFTER] == whole[:SAVED_AFTER]
    assert lost[SAVED_AFTER:] != whole[SAVED_AFTER:]


def facts() -> dict[str, Any]:
    """Return which scaler each precision has, and what is made of it."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from megatron_muon.integration.install import install
    from megatron_muon.optimizer.grad_scaler import SharedGradScaler, can_fall, make_grad_scaler

    install(device="cpu")

    def made(**given: Any) -> tuple[str, float, bool]:
        scaler = make_grad_scaler(OptimizerConfig(**given))
        scale = 1.0 if scaler is None else float(scaler.scale)
        return type(scaler).__name__, scale, can_fall(scaler)

    top: Any = make_grad_scaler(OptimizerConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1))
    shared = SharedGradScaler(top)
    shared.update(True)
    shared.update(True)
    unmoved = float(shared.scale)
    top.update(True)
    return {
        "fp32": made(),
        "bf16": made(bf16=True),
        "fp16": made(fp16=True, initial_loss_scale=16.0),
        "fp16 at the floor": made(fp16=True, initial_loss_scale=2.0, min_loss_scale=2.0),
        "constant": {made(loss_scale=8.0, **given) for given in ({}, {"bf16": True},
                                                                {"fp16": True})},
        "shared": (unmoved, float(shared.scale), float(shared.inv_scale)),
        "same state": shared.state_dict() == top.state_dict(),
    }  # fmt: skip


def test_scaler_of_each_precision():
    (found,) = run_ranks(facts, 1, timeout_s=60)
    assert found == {
        "fp32": ("NoneType", 1.0, False),
        "bf16": ("NoneType", 1.0, False),
        "fp16": ("DynamicGradScaler", 16.0, True),
        "fp16 at the floor": ("DynamicGradScaler", 2.0, False),
        "constant": {("ConstantGradScaler", 8.0, False)},
        "shared": (8.0, 4.0, 0.25),
        "same state": True,
    }
