"""What a right run ends with, and how far another one is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from megatron_muon.testing.law.case import Case, Outcome
from megatron_muon.testing.law.model import (
    Replica,
    blocks,
    gradients,
    initial,
    is_cut_again,
    logical_shapes,
    shard,
    unshard,
)
from megatron_muon.testing.oracle import Oracle, OracleSettings, relative_error

_NORM_BOUND = 1e-6

_Gradients = Sequence[Mapping[str, torch.Tensor]]


def reference(case: Case) -> Oracle:
    """Run the oracle through the same steps, in fp64, on the mean of the given gradients."""
    return _reference(
        replace(
            case, tp=1, pp=1, vpp=None, ep=1, etp=None, gtp=1, egtp=1,
            gtp_alignment=16, gtp_poisoned=False, bf16=False, fp16=False, loss_scales=(),
            wrap="", tp_mode="", precision="", layout="", budget_nbytes=0, exchange_dtype=None,
            overlap_grad=False, overlap_param=False, grads_in_fp32=True, bucket_size=None,
            share_blocks=False, micro_batches=1, permuted=False, counted=False, watched=False,
            mutant=None, report=None,
        )
    )  # fmt: skip


@cache
def _reference(case: Case) -> Oracle:
    return run_oracle(case, [gradients(case, Replica(), step) for step in range(case.steps)])


def run_oracle(case: Case, steps: _Gradients, dtype: torch.dtype = torch.float64) -> Oracle:
    """Run the oracle through whole gradients.

    Args:
        case: The model and the hyper-parameters.
        steps: The gradients of each step.
        dtype: Arithmetic: fp64, or fp32 to see the size of rounding.
    """
    shapes = {n: s for n, s in logical_shapes(case).items() if case.trains(n)}
    oracle = Oracle(
        weights={name: initial(name, shape) for name, shape in shapes.items()},
        blocks={name: rows for name, rows in blocks(case).items() if name in shapes},
        settings=OracleSettings(
            lr=case.lr,
            weight_decay=case.weight_decay,
            momentum=case.momentum,
            nesterov=case.nesterov,
            clip=case.clip or None,
            skip_above=case.skip_above,
            eps=case.adam_eps,
            dtype=dtype,
        ),
    )
    for grads in steps:
        oracle.step([grads])
    return oracle


def whole_masters(case: Case, outcomes: Sequence[Outcome]) -> dict[str, torch.Tensor]:
    """Put the masters of all ranks together.

    Raises:
        AssertionError: Nobody holds some element, or two copies of one differ.
    """
    whole, wrong = _assemble(case, outcomes)
    assert not wrong, wrong
    return whole


def _assemble(case: Case, outcomes: Sequence[Outcome]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the whole masters, and what is wrong with the pieces they are made of."""
    shapes = {name: s for name, s in logical_shapes(case).items() if case.trains(name)}
    parts = {
        name: [[torch.full_like(shard(case, name, torch.empty(shape), 0), torch.nan)
                for _ in range(case.gtp_of(name) if is_cut_again(case, name) else 1)]
               for _ in range(case.tp_of(name))]
        for name, shape in shapes.items()
    }  # fmt: skip
    wrong = []
    for outcome in outcomes:
        for name, pieces in outcome.masters.items():
            gtp_rank = outcome.gtp_rank_of(name) if is_cut_again(case, name) else 0
            for start, piece in pieces:
                whole = parts[name][outcome.tp_rank_of(name)][gtp_rank].view(-1)
                here = whole[start : start + piece.numel()]
                held = ~here.isnan()
                if not torch.equal(here[held], piece[held]):
                    wrong.append(f"copies of {name} differ")
                here.copy_(piece)
    shards: dict[str, list[torch.Tensor]] = {}
    for name, shape in shapes.items():
        num_rows = len(shard(replace(case, gtp=1, egtp=1), name, torch.empty(shape), 0))
        filled = [torch.cat(of_rank) for of_rank in parts[name]]
        shards[name] = [rows[:num_rows] for rows in filled]
        if any(rows[num_rows:].count_nonzero() for rows in filled):
            wrong.append(f"rows that fill {name} up are not zero")
    wholes = {name: unshard(case, name, of_ranks) for name, of_ranks in shards.items()}
    for name, weight in wholes.items():
        if weight.isnan().any():
            wrong.append(f"nobody holds all of {name}")
        if weight.shape == shards[name][0].shape:
            wrong += [
                f"{name} differs between tensor-parallel ranks"
                for other in shards[name][1:]
                if not torch.equal(other, weight)
            ]
    return wholes, wrong


def violations(case: Case, outcomes: Sequence[Outcome], bound: float) -> list[str]:
    """Compare a run of given gradients with the reference; return what is not as it should be.

    Checked are the update of every parameter, the norm of the gradients, and that every rank
    trains on with exactly the rounded masters.

    Args:
        case: The run.
        outcomes: What each rank holds.
        bound: Largest relative Frobenius error of an update.
    """
    oracle = reference(case)
    masters, found = _assemble(case, outcomes)
    found += [
        f"update of {name}: relative error {error:.2e}"
        for name, error in errors(masters, oracle.weights).items()
        if not error <= bound
    ]
    norm = outcomes[0].grad_norms[-1]
    if abs(norm - oracle.grad_norm) > _NORM_BOUND * oracle.grad_norm:
        found.append(f"gradient norm {norm}, expected {oracle.grad_norm}")
    return found + stale_weights(case, outcomes, masters)


def stale_weights(
    case: Case, outcomes: Sequence[Outcome], masters: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return each rank's weights that are not its masters, rounded."""
    found, shapes = [], logical_shapes(case)
    for rank, outcome in enumerate(outcomes):
        for name, weight in outcome.weights.items():
            master = masters[name] if name in masters else initial(name, shapes[name])
            local = shard(case, name, master, outcome.tp_rank_of(name), outcome.gtp_rank_of(name))
            if not torch.equal(weight, local.to(weight.dtype)):
                found.append(f"weight of {name} on rank {rank} is not its master's")
    return found


def errors(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the relative error of each update, of weights that started as :func:`initial`."""
    return {
        name: relative_error(update(name, got[name]), update(name, weight))
        for name, weight in expected.items()
    }


def update(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return what the steps changed, in fp64."""
    return initial(name, tuple(weight.shape)).double() - weight.double()


def differing(
    case: Case, outcomes: Sequence[Outcome], other: Case, others: Sequence[Outcome]
) -> list[str]:
    """Return the parameters whose masters after two runs are not equal bit for bit."""
    mine, theirs = whole_masters(case, outcomes), whole_masters(other, others)
    return [name for name in mine.keys() | theirs.keys()
            if name not in mine or name not in theirs
            or not torch.equal(mine[name], theirs[name])]  # fmt: skip
