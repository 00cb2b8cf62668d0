"""Learning rates and decays: Muon and the scalar optimizer keep their own, through everything.

Megatron's own scheduler warms up, decays and resumes; rates are compared with those worked out by
hand, and updates with the oracle, which is told those rates. Without ``--muon-scalar-lr`` or an
override the updates that should have had one are off by a factor of 0.1 to 3, far above the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import Replica, blocks, gradients, initial, logical_shapes
from megatron_muon.testing.law.reference import errors, whole_masters
from megatron_muon.testing.oracle import Oracle, OracleSettings
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.rates_job import Recipe, run_recipes

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

BOUND = 2e-5
"""Above the rounding of a small update of a large fp32 weight; 5e-6 was measured."""

LR, MIN_LR, DECAY = 0.04, 0.004, 0.2
SCALAR_LR, SCALAR_MIN_LR = 0.01, 0.002
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

PLAIN = Recipe(case=Case(layers=1, lr=LR, weight_decay=DECAY, steps=6), min_lr=MIN_LR)
SCALAR = (("muon_scalar_lr", SCALAR_LR), ("muon_scalar_min_lr", SCALAR_MIN_LR))
OVERRIDES = (
    (f"*{FC1}", (("max_lr", 0.1), ("min_lr", 0.05), ("wd_mult", 0.5))),
    (f"*{FC2}", (("start_wd", 0.3), ("end_wd", 0.4))),
    (f"*{PROJ}", (("max_lr", 0.0), ("min_lr", 0.0))),
    (f"*{EMBEDDING}", (("max_lr", 0.02), ("start_wd", 0.0), ("end_wd", 0.0))),
    (f"*{OUTPUT}", (("min_lr", 0.0), ("wd_mult", 2.0))),
)

RECIPES = {
    "plain": PLAIN,
    "scalar": replace(PLAIN, config=SCALAR),
    "overrides": replace(PLAIN, config=SCALAR, overrides=OVERRIDES),
    "decoupled": replace(PLAIN, config=(*SCALAR, ("decoupled_lr", 0.03))),
    "no scalar rate": replace(PLAIN, config=(("muon_scalar_lr", 0.0), ("muon_scalar_min_lr", 0.0))),
    "no rate": replace(
        PLAIN, case=replace(PLAIN.case, lr=0.0), min_lr=0.0, config=(("muon_scalar_lr", 0.01),)
    ),
    "no decay": replace(PLAIN, case=replace(PLAIN.case, weight_decay=0.0)),
    # Some ranks have no matrix.
    "one matrix": replace(
        PLAIN, case=replace(PLAIN.case, trained=f"{FC2}|norm|embedding"), config=SCALAR
    ),
    "resumed": replace(PLAIN, config=SCALAR, overrides=OVERRIDES, resume_after=3),
}
GRIDS = {
    "one rank": (1, Case()),
    "owner": (2, Case()),
    "flat": (2, Case(layout="flat")),
    "legacy": (2, Case(wrap="legacy")),
    "replicated": (2, Case(wrap="replicated")),
}
NOT_YET = ("resumed", "flat")
"""There are no checkpoints of the flat layout."""


CASES = [(label, grid) for label in RECIPES for grid in GRIDS if (label, grid) != NOT_YET]


def recipe_of(label, grid):
    """The recipe of a label in the layout and wrap of a grid."""
    where, recipe = GRIDS[grid][1], RECIPES[label]
    return replace(recipe, case=replace(recipe.case, layout=where.layout, wrap=where.wrap))


@cache
def launch(num_ranks):
    """What each rank saw of each case of so many ranks."""
    cases = [(label, grid) for label, grid in CASES if GRIDS[grid][0] == num_ranks]
    recipes = [recipe_of(*case) for case in cases]
    with TemporaryDirectory() as logs:
        ranks = run_ranks(run_recipes, num_ranks, recipes, timeout_s=110, logs=Path(logs))
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def trained(label, grid):
    """A recipe, and what each rank saw of it."""
    return recipe_of(label, grid), launch(GRIDS[grid][0])[label, grid]


def shapes_of(case):
    """Shapes of what is trained."""
    return {name: shape for name, shape in logical_shapes(case).items() if case.trains(name)}


# Rates by hand.


@dataclass(frozen=True)
class Schedule:
    """The rates of one parameter."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float

    def lr(self, step):
        # Two steps of warm-up from 0, then linear to the least rate in step 6.
        return (
            self.max_lr * (0, 0.5)[step]
            if step < 2
            else (self.min_lr + (self.max_lr - self.min_lr) * (6 - step) / 4)
        )

    def decay(self, step):
        return self.wd_mult * (self.start_wd + (self.end_wd - self.start_wd) * min(step / 4, 1.0))


def schedule(recipe, name):
    """What a parameter of this name should have, from the recipe alone."""
    config = dict(recipe.config)
    is_matrix = name in blocks(recipe.case)
    given = {
        key: value for glob, fields in recipe.overrides if fnmatch(name, glob)
        for key, value in fields
    }  # fmt: skip
    if "decoupled_lr" in config and name in (EMBEDDING, OUTPUT):
        given["max_lr"] = config["decoupled_lr"]
    rate, least = recipe.case.lr, recipe.min_lr
    if not is_matrix:
        rate = config.get("muon_scalar_lr", rate)
        least = config.get("muon_scalar_min_lr", least)
    is_vector = len(logical_shapes(recipe.case)[name]) == 1
    return Schedule(
        max_lr=given.get("max_lr", rate),
        min_lr=given.get("min_lr", least),
        start_wd=given.get("start_wd", recipe.start_wd),
        end_wd=given.get("end_wd", recipe.case.weight_decay),
        wd_mult=0.0 if is_vector else given.get("wd_mult", 1.0),
    )


@cache
def expected(recipe):
    """The weights that the oracle ends with, told the rates of each parameter at each step."""
    case = recipe.case
    weights = {}
    for name, shape in shapes_of(case).items():
        rates = schedule(recipe, name)
        oracle = Oracle(
            {name: initial(name, shape)},
            {other: rows for other, rows in blocks(case).items() if other == name},
            OracleSettings(lr=0.0, weight_decay=0.0, momentum=case.momentum, nesterov=False),
        )
        for step in range(case.steps):
            oracle.settings = replace(
                oracle.settings, lr=rates.lr(step), weight_decay=rates.decay(step)
            )
            oracle.step([gradients(case, Replica(), step)])
        weights[name] = oracle.weights[name]
    return weights


@pytest.mark.parametrize(("label", "grid"), CASES)
def test_each_parameter_has_its_own_rates(label, grid):
    recipe, ranks = trained(label, grid)
    seen = set()
    for rank in ranks:
        for step, rates in enumerate(rank.rates):
            for name, got in rates.items():
                own = schedule(recipe, name)
                assert got == pytest.approx((own.lr(step), own.decay(step)), rel=1e-12), (
                    name,
                    step,
                )
            seen |= rates.keys()
    assert seen == shapes_of(recipe.case).keys()


@pytest.mark.parametrize(("label", "grid"), [case for case in CASES if case[0] != "resumed"])
def test_updates_are_those_of_the_rates(label, grid):
    recipe, ranks = trained(label, grid)
    masters = whole_masters(recipe.case, [rank.outcome for rank in ranks])
    plain = replace(recipe, case=replace(recipe.case, layout="owner", wrap="training"))
    found = errors(masters, expected(plain))
    assert {name: error for name, error in found.items() if not error <= BOUND} == {}


@pytest.mark.parametrize(("label", "grid"), CASES)
def test_the_learning_rate_shown_is_that_of_muon(label, grid):
    recipe, ranks = trained(label, grid)
    muon = Schedule(recipe.case.lr, recipe.min_lr, 0.0, 0.0, 1.0)
    for rank in ranks:
        assert rank.console == pytest.approx([muon.lr(step) for step in range(6)], rel=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("label", "still"),
    [
        ("overrides", {PROJ}),
        (
            "no scalar rate",
            {name for name in logical_shapes(PLAIN.case) if name not in blocks(PLAIN.case)},
        ),
        ("no rate", set(blocks(PLAIN.case))),
    ],
)
def test_a_rate_of_zero_changes_no_bit(label, still, grid):
    recipe, ranks = trained(label, grid)
    masters = whole_masters(recipe.case, [rank.outcome for rank in ranks])
    unchanged = {
        name for name, weight in masters.items()
        if torch.equal(weight, initial(name, tuple(weight.shape)))
    }  # fmt: skip
    assert unchanged == still


@pytest.mark.parametrize("grid", [grid for label, grid in CASES if label == "resumed"])
def test_momentum_is_resumed_bit_for_bit(grid):
    """And AdamW's moments, where no ``DistributedOptimizer`` keeps them in files of its own."""
    kept = set(blocks(PLAIN.case) if grid in ("one rank", "owner") else logical_shapes(PLAIN.case))
    (_, straight), (_, resumed) = trained("overrides", grid), trained("resumed", grid)
    for one, other in zip(straight, resumed, strict=True):
        held = {name: weight for name, weight in one.outcome.masters.items() if name in kept}
        assert held
        for name, [(_, weight)] in held.items():
            assert torch.equal(weight, other.outcome.masters[name][0][1]), name


def test_another_rate_is_seen():
    """By the rates and by the oracle: each override, and the rates of the scalar optimizer."""
    recipe, ranks = trained("overrides", "owner")
    masters = whole_masters(recipe.case, [rank.outcome for rank in ranks])
    for dropped in range(len(OVERRIDES)):
        fewer = replace(recipe, overrides=OVERRIDES[:dropped] + OVERRIDES[dropped + 1 :])
        name = OVERRIDES[dropped][0].removeprefix("*")
        assert errors(masters, expected(fewer))[name] > 1e-3
    without = errors(masters, expected(replace(recipe, config=())))
    assert without[NORM] > 0.1
