"""Generalized tensor parallelism, which cuts rows over ranks of their own.

The models are Megatron's: it makes the groups, cuts the weights and puts the rows of zeros there.
Gradients are given, since its layers need Transformer Engine to multiply. The reference knows
whole matrices alone, and no rows of zeros.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import initial, logical_shapes, shard
from megatron_muon.testing.law.mutants import GTP_MUTANTS
from megatron_muon.testing.law.reference import reference, violations
from megatron_muon.testing.law.runs import Runs
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.command_line import parser
from tests.unit_tests.gtp_job import SCENARIOS, run_scenarios

MUON = ["--optimizer", "muon", "--use-distributed-optimizer"]
SHARDS = "--tensor-parallel-num-weight-shards"
EXPERT_SHARDS = "--expert-tensor-parallel-num-weight-shards"


# The law.

BOUND = 1e-5
"""Largest relative error of an update; measured are 1e-6 at most."""

WRONG = 1e-2
"""Parts every fault from every rounding."""

GTP = Case(gtp=2, layers=1)
TP = replace(GTP, tp=2)
EMPTY = replace(GTP, gtp=4, gtp_alignment=32)
"""Of 54 rows two of four ranks have none, only what fills them up."""
UNSPLIT = replace(GTP, split_qkv=False)

LAW: dict[str, tuple[int, Case]] = {
    "owner": (2, GTP),
    "flat": (2, replace(GTP, layout="flat")),
    "every rank of the row": (2, replace(GTP, tp_mode="duplicated")),
    "without a layout": (2, replace(GTP, wrap="legacy")),
    "without a distributed optimizer": (2, replace(GTP, wrap="replicated")),
    "heads, gate and up, Nesterov": (
        2, replace(GTP, split_heads=True, split_gated_fc1=True, nesterov=True),
    ),
    "bf16, small budget": (2, replace(GTP, bf16=True, budget_nbytes=2**12)),
    "clipped": (2, replace(GTP, clip=0.5)),
    "rows of zeros with gradients": (2, replace(GTP, gtp_poisoned=True, weight_decay=1.0)),
    "tensor parallel": (4, TP),
    "tensor parallel, flat": (4, replace(TP, layout="flat")),
    "tensor parallel, every rank of the row": (4, replace(TP, tp_mode="duplicated")),
    "tensor parallel, rows of zeros with gradients": (4, replace(TP, gtp_poisoned=True)),
    "data parallel": (4, GTP),
    "data parallel, flat": (4, replace(GTP, layout="flat")),
    "data parallel, flat, overlap": (
        4, replace(GTP, layout="flat", overlap_grad=True, bucket_size=6000, micro_batches=4),
    ),
    "data parallel, copies": (4, replace(GTP, wrap="replicated")),
    "experts that are not cut": (4, replace(GTP, experts=4, ep=2)),
    "experts that are cut": (4, replace(GTP, experts=4, ep=2, egtp=2)),
    "experts that are cut, flat": (
        4, replace(GTP, gtp=1, experts=4, ep=2, egtp=2, layout="flat", gtp_poisoned=True),
    ),
    "ranks without a row": (4, EMPTY),
    "ranks without a row, flat": (4, replace(EMPTY, layout="flat")),
    "ranks without a row, with gradients": (4, replace(EMPTY, gtp_poisoned=True)),
    "two stages": (4, replace(GTP, pp=2, layers=2)),
}  # fmt: skip

BROKEN: dict[str, tuple[str, int, Case, str]] = {
    # label: mutant, ranks, case, what is found
    "scale of the filled shape": (
        "rows of zeros are rows of the matrix", 2, UNSPLIT, "linear_fc1.weight: relative",
    ),  # 0.04
    "rows of zeros move": (
        "rows of zeros are rows of the matrix", 2, replace(UNSPLIT, gtp_poisoned=True),
        "rows that fill .*linear_proj.weight up are not zero",
    ),
    "order": ("parts in wrong order", 2, GTP, "linear_fc2.weight: relative"),  # 0.5
    "order, tensor parallel": ("parts in wrong order", 4, TP, "linear_proj.weight: relative"),
}  # fmt: skip

RUNS = Runs(
    {**LAW, "one process": (1, replace(GTP, gtp=1))}
    | {label: (ranks, replace(case, mutant=mutant))
           for label, (mutant, ranks, case, _) in BROKEN.items()},
    timeout_s=150,
)  # fmt: skip

law = [pytest.mark.distributed, pytest.mark.timeout(180)]


def found(label, bound):
    """What is not as it should be; of gradients that are no part of a matrix the norm has more."""
    case = RUNS.case(label)
    wrong = violations(case, RUNS.outcomes(label), bound)
    return [text for text in wrong if not (case.gtp_poisoned and "gradient norm" in text)]


@pytest.mark.parametrize("label", [pytest.param(label, marks=law) for label in LAW])
def test_updates_are_those_of_whole_matrices_and_rows_of_zeros_stay_zero(label):
    assert found(label, BOUND) == []


AS_ONE_PROCESS = ("owner", "flat", "without a layout", "tensor parallel, flat", "data parallel",
                  "ranks without a row")  # fmt: skip


@pytest.mark.parametrize("label", [pytest.param(label, marks=law) for label in AS_ONE_PROCESS])
def test_masters_are_those_of_one_process_to_the_last_bit(label):
    assert RUNS.differing(label, "one process") == []


@pytest.mark.parametrize("label", [pytest.param(label, marks=law) for label in BROKEN])
def test_the_law_fails_when_the_cut_is_wrong(label):
    *_, expected = BROKEN[label]
    wrong = found(label, WRONG)
    assert any(re.search(expected, text) for text in wrong), wrong


def test_every_fault_is_tried():
    assert {mutant for mutant, *_ in BROKEN.values()} == set(GTP_MUTANTS)


def test_the_cases_have_rows_of_zeros_and_ranks_without_a_row():
    """What the names of the cases say, of a matrix cut by columns and one cut by rows."""
    for case, name, held in (
        (GTP, "self_attention.linear_proj.weight", [32, 22]),
        (GTP, "mlp.linear_fc1.weight", [96, 80]),
        (TP, "self_attention.linear_proj.weight", [32, 22]),
        (TP, "mlp.linear_fc1.weight", [48, 40]),
        (EMPTY, "self_attention.linear_proj.weight", [32, 22, 0, 0]),
    ):
        name = f"decoder.layers.0.{name}"
        whole = initial(name, logical_shapes(case)[name]).abs() + 1
        parts = [shard(case, name, whole, 0, rank) for rank in range(case.gtp)]
        assert [int(part.any(1).sum()) for part in parts] == held
        assert len({part.shape for part in parts}) == 1
    assert reference(GTP).weights["decoder.layers.0.mlp.linear_fc1.weight"].shape == (176, 54)


@pytest.mark.parametrize("label", [pytest.param(label, marks=law) for label in ("owner", "flat")])
def test_rows_of_zeros_do_not_travel(label):
    """On one data-parallel rank: to the home what it does not have, and as much of the update."""
    case, outcomes = RUNS.case(label), RUNS.outcomes(label)
    elements = 0
    for name, place in outcomes[0].places.items():
        whole = torch.ones(logical_shapes(case)[name])
        held = [int(shard(case, name, whole, 0, rank).sum()) for rank in range(case.gtp)]
        assert sum(held) == place.numel
        elements += 2 * (place.numel - held[place.home[1]])
    assert sum(outcome.exchanged_nbytes for outcome in outcomes) == case.steps * 4 * elements


# What is refused.


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch) as parse:
        yield parse


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ([SHARDS, "2"], SHARDS),
        (["--tensor-model-parallel-size", "2", SHARDS, "4"], SHARDS),
        ([EXPERT_SHARDS, "2"], EXPERT_SHARDS),
        (["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1",
          EXPERT_SHARDS, "2"], EXPERT_SHARDS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.parametrize(
    "other", [["--muon-tp-mode", "distributed"], ["--muon-tp-mode", "blockwise"]], ids=" ".join
)
def test_a_mode_that_needs_equal_shards_is_refused_before_any_work(parse, flags, flag, other):
    with pytest.raises(ConfigurationError, match=rf"{' '.join(other)} does not work with {flag} "):
        parse(*MUON, *flags, *other)


def test_weights_in_fp8_are_refused_before_any_work(parse):
    mxfp8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather".split()
    with pytest.raises(ConfigurationError, match=f"--fp8-param-gather does not work with {SHARDS}"):
        parse(*MUON, *mxfp8, SHARDS, "2")


@pytest.mark.parametrize("flag", ["--save", "--load"])
def test_checkpoints_are_refused_before_any_work(parse, flag):
    with pytest.raises(ConfigurationError, match=f"{flag} does not work with {SHARDS} 2"):
        parse(*MUON, flag, "x", "--save-interval", "1", SHARDS, "2")


def test_as_many_shards_as_tensor_parallelism_makes_are_let_through(parse):
    flags = ["--tensor-model-parallel-size", "2", SHARDS, "2", EXPERT_SHARDS, "2"]
    args = parse(*MUON, *flags, "--muon-tp-mode", "blockwise")
    assert (args.gtp_weight_remat_size, args.expert_gtp_weight_remat_size) == (1, 1)


def test_more_shards_are_let_through(parse):
    args = parse(*MUON, "--tensor-model-parallel-size", "2", SHARDS, "4")
    assert args.gtp_weight_remat_size == 2


NO_SHARDS = (
    "ConfigurationError: decoder.layers.0.mlp.linear_fc1.weight: its rows are cut over 2 ranks"
)
SAID = {
    "as megatron cuts": ["True (32, 64) 24 32+0", "True (32, 64) 24 8+24"],
    "ranks without a weight that is cut": ["homes in rows of 1: {0}"],
    "orthogonalization of shards": [NO_SHARDS],
    "orthogonalization of shards alone": [NO_SHARDS],
    "other groups than the model has": [f"UnsupportedError: decoder.layers.0.self_attention"
                                        f".linear_proj.weight: {SHARDS} cuts its rows over the "
                                        "ranks [0, 1], the optimizer's process groups name [0]."],
    "gradients summed over ranks with other rows": [
        f"UnsupportedError: decoder.layers.0.self_attention.linear_proj.weight: {SHARDS} cuts its "
        "rows over the ranks [0, 1], and its gradients are summed over [0, 1]"
    ],
    "ranks in another order": ["UnsupportedError: Generalized tensor parallelism: the ranks that"],
    "a part of the job": ["UnsupportedError: Generalized tensor parallelism: the ranks that"],
}  # fmt: skip
"""How what each rank says begins; one text for all ranks that say the same."""


@cache
def said() -> list[dict[str, str]]:
    with TemporaryDirectory() as logs:
        return run_ranks(run_scenarios, 2, timeout_s=60, logs=Path(logs))


@pytest.mark.distributed
@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_said_where_megatron_has_cut(name):
    texts = [rank[name] for rank in said()]
    begins = SAID[name] * (2 // len(SAID[name]))
    assert all(map(str.startswith, texts, begins)), texts
    assert (
        len(SAID[name]) == 2
        or texts[1].replace("[1]", "[0]").replace("[(1,)]", "[(0,)]") == (texts[0])
    )
