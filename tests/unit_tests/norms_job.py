"""One rank's part of the norm tests: a real GPT, one step, and what the optimizer says of it."""

from __future__ import annotations

import contextlib
import io
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.testing.law import backward
from megatron_muon.testing.law.build import build_model, optimizer_config, parameters, wrap
from megatron_muon.testing.law.build import parallel_state as initialized
from megatron_muon.testing.law.case import Case, is_expert
from megatron_muon.testing.law.model import Replica, blocks, initial, logical_shapes, shard
from megatron_muon.testing.oracle import Oracle, OracleSettings

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

GROUPS = (
    "tp", "pp", "mp", "dp", "dp_cp", "expt_dp", "ep", "expt_tp", "tp_ep_pp", "intra_dist_opt",
)  # fmt: skip
"""All that the optimizer needs of a collection of process groups that was made by hand."""


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    """One step of a model whose norms are measured.

    Attributes:
        tied: Whether the output layer shares the embedding.
        mtp: Pattern of parameters whose gradients have a norm of their own.
        collection: Process groups: ``mpu``, ``by hand`` (the fields :data:`GROUPS`), or ``without
            whole`` (no group of all ranks among them).
    """

    layers: int = 1
    steps: int = 1
    # Megatron decays biases too until a scheduler has told the groups apart.
    weight_decay: float = 0.0
    tied: bool = False
    mtp: str | None = None
    collection: str = "mpu"


@dataclass(frozen=True)
class Expected:
    """What one process computes."""

    grad_norm: float
    mtp_norm: float
    num_zeros: int
    params_norm: float


@dataclass(frozen=True)
class Values:
    """Norm of the main gradients, norm of the parameters, and zeros."""

    grad_norm: float
    params_norm: float
    num_zeros: int


@dataclass(frozen=True)
class Measured:
    """What one rank says.

    Attributes:
        said: What the step returned, and what Megatron's name for the norm of the parameters
            gives after it.
        by_group: ``grad_norms_by_group`` of the step.
        alone: ``get_grad_norm()`` and ``count_zeros()`` called after the step, and the norm of
            the parameters when some of them are no longer trained.
        all_counted: The same if no copy were left out.
        mp_only: The same if the sums went over the model-parallel group alone.
        stock: The same by Megatron's own functions.
        world_collectives: Collectives on the group of all ranks of the job since before the step.
    """

    said: Values
    by_group: dict[str, float]
    alone: Values
    all_counted: Values
    mp_only: Values
    stock: Values
    world_collectives: int


# The model and its gradients.


def shapes(case: NormCase) -> dict[str, tuple[int, ...]]:
    """Whole shape of every parameter of one process, by name."""
    every = logical_shapes(case)
    return {name: shape for name, shape in every.items() if not case.tied or name != OUTPUT}


def seeded(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def whole_gradient(case: NormCase, name: str, replica: int) -> torch.Tensor:
    """Whole gradient of one data-parallel rank, of any size, in the model's dtype.

    An eighth of the elements and one whole bias are zero on all ranks, others on one rank only.
    """
    shape = logical_shapes(case)[name]
    name = EMBEDDING if case.tied and name == OUTPUT else name
    zeros = torch.rand(shape, generator=seeded("zeros", name)) < 0.125
    own_zeros = torch.rand(shape, generator=seeded("zeros", name, replica)) < 0.125
    values = torch.randn(shape, generator=seeded("norm", name, replica))
    if name.endswith("linear_proj.bias"):
        zeros.fill_(True)
    return values.masked_fill(zeros | own_zeros, 0.0).to(case.dtype).float()


def whole_gradients(case: NormCase, replica: Replica, step: int) -> dict[str, torch.Tensor]:
    """Whole gradients of one rank's copy, by name, in the place of the law harness's."""
    return {
        name: whole_gradient(case, name, replica.expert_rank if is_expert(name) else replica.rank)
        for name in logical_shapes(case)
    }


def expected(case: NormCase, num_ranks: int, first: int = 0) -> Expected:
    """Compute on one process, in fp64, from whole parameters and whole gradients.

    Args:
        case: The run.
        num_ranks: How many ranks it has.
        first: The first replica.
    """
    grads: dict[str, torch.Tensor] = {}
    for name in shapes(case):
        if case.trains(name):
            model_ranks = (case.expert_tp * case.ep if is_expert(name) else case.tp) * case.pp
            num_copies = num_ranks // model_ranks
            copies = [whole_gradient(case, name, first + i).double() for i in range(num_copies)]
            grads[name] = sum(copies, torch.zeros(())) / num_copies
    mtp = {name for name in grads if case.mtp is not None and re.search(case.mtp, name)}
    weights = {name: initial(name, shape) for name, shape in shapes(case).items()}
    return Expected(
        grad_norm=norm([grad for name, grad in grads.items() if name not in mtp]),
        mtp_norm=norm([grads[name] for name in mtp]),
        num_zeros=sum(int((grad == 0).sum()) for grad in grads.values()),
        params_norm=norm(list({**weights, **stepped(case, weights, grads, mtp)}.values())),
    )


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def stepped(
    case: NormCase,
    weights: dict[str, torch.Tensor],
    grads: dict[str, torch.Tensor],
    mtp: set[str],
) -> dict[str, torch.Tensor]:
    """Return the trained weights after one step; what has a norm of its own is clipped by it."""
    after = {}
    for names in (grads.keys() - mtp, mtp):
        oracle = Oracle(
            weights={name: weights[name] for name in names},
            blocks={name: rows for name, rows in blocks(case).items() if name in names},
            settings=OracleSettings(
                lr=case.lr, weight_decay=case.weight_decay, momentum=case.momentum,
                nesterov=case.nesterov, clip=case.clip or None, eps=case.adam_eps,
            ),
        )  # fmt: skip
        oracle.step([{name: grads[name] for name in names}])
        after |= oracle.weights
    return after


# One rank's run.


def run_cases(cases: Sequence[NormCase]) -> list[Measured]:
    """Run several cases one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    measured: dict[Case, Measured] = {}
    for grid in dict.fromkeys(case.grid for case in cases):
        with initialized(*grid):
            for case in cases:
                if case.grid == grid:
                    measured[case] = run(case)
    return [measured[case] for case in cases]


def build(case: NormCase) -> list[Any]:
    """Build this rank's stages, tied and tagged as the case says, and wrap them."""
    from megatron.core import parallel_state
    from megatron.core.models import gpt
    from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR

    def tied(*args: Any, **kwargs: Any) -> Any:
        return gpt_model(*args, **{**kwargs, "share_embeddings_and_output_weights": case.tied})

    gpt_model = gpt.GPTModel
    with mock.patch.object(gpt, "GPTModel", tied):
        chunks = build_model(case)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, param in parameters(chunks):
        if case.tied and name == OUTPUT:
            param.data.copy_(shard(case, name, initial(EMBEDDING, shapes(case)[EMBEDDING]), rank))
        if case.mtp is not None and re.search(case.mtp, name):
            setattr(param, GRAD_NORM_GROUP_ATTR, "mtp")
    return wrap(case, chunks)


def given_groups(case: NormCase) -> Any:
    """Return the process groups that the optimizer is given, ``None`` for Megatron's own."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    if case.collection == "mpu":
        return None
    every, by_hand = ProcessGroupCollection.use_mpu_process_groups(), ProcessGroupCollection()
    for name in GROUPS:
        setattr(by_hand, name, getattr(every, name))
    if case.collection == "without whole":
        forget_whole(case, by_hand)
    return by_hand


def forget_whole(case: NormCase, groups: Any) -> None:
    """Leave away the group of all ranks; with a layout Megatron wants to be told that."""
    if case.wrap == "training":
        groups.intra_dist_opt = None
    else:
        del groups.intra_dist_opt


def build_optimizer(case: NormCase, chunks: list[Any], groups: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    config = optimizer_config(case)
    config.log_num_zeros_in_grad = True
    with contextlib.redirect_stdout(io.StringIO()):
        return get_megatron_optimizer(config, chunks, pg_collection=groups)


def run(case: NormCase) -> Measured:
    """Make one step and measure."""
    chunks = build(case)
    optimizer = build_optimizer(case, chunks, given_groups(case))
    with mock.patch.object(backward, "gradients", whole_gradients):
        backward.inject(case, chunks, 0)
    return measured(case, chunks, optimizer)


def measured(case: NormCase, chunks: list[Any], optimizer: Any) -> Measured:
    from megatron.training import training

    assert dist.group.WORLD is not None
    before = dist.group.WORLD._get_sequence_number_for_group()
    success, grad_norm, num_zeros = optimizer.step()
    assert success
    assert {tensor.dtype for m in optimizer.members for tensor in (m.master, m.grad)} <= {
        torch.float32
    }
    said = Values(grad_norm, training.calc_params_l2_norm(chunks), num_zeros)
    return Measured(
        said=said,
        by_group=optimizer.grad_norms_by_group,
        alone=alone(optimizer, chunks),
        all_counted=all_counted(optimizer, chunks),
        mp_only=mp_only(optimizer, chunks),
        world_collectives=dist.group.WORLD._get_sequence_number_for_group() - before,
        stock=stock(case, optimizer, chunks),
    )


def alone(optimizer: Any, chunks: list[Any]) -> Values:
    frozen = [param for name, param in parameters(chunks)
              if param.requires_grad and "linear_proj" in name]  # fmt: skip
    for param in frozen:
        param.requires_grad_(False)
    found = values(optimizer, chunks)
    for param in frozen:
        param.requires_grad_(True)
    return found


def values(optimizer: Any, chunks: list[Any]) -> Values:
    return Values(optimizer.get_grad_norm(), optimizer.params_norm(chunks), optimizer.count_zeros())


def all_counted(optimizer: Any, chunks: list[Any]) -> Values:
    chain, members = type(optimizer), [replace(m, is_counted=True) for m in optimizer.members]
    with (
        mock.patch.object(optimizer, "members", members),
        mock.patch.object(chain, "_is_counted", return_value=True),
        mock.patch.object(chain, "_is_first_copy", return_value=True),
    ):
        return values(optimizer, chunks)


def mp_only(optimizer: Any, chunks: list[Any]) -> Values:
    from megatron.core import parallel_state

    from megatron_muon.collectives.span import Span

    group = Span([parallel_state.get_model_parallel_group()], torch.device("cpu"))
    with mock.patch.object(optimizer, "span", group):
        return values(optimizer, chunks)


def stock(case: NormCase, optimizer: Any, chunks: list[Any]) -> Values:
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.training import global_vars, training

    args = SimpleNamespace(bf16=case.bf16, use_megatron_fsdp=False)
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        params_norm = training.calc_params_l2_norm.__wrapped__(chunks)
    return Values(
        float(ChainedOptimizer.get_grad_norm(optimizer)),
        float(params_norm),
        int(ChainedOptimizer.count_zeros(optimizer)),
    )


def collectives_on_world() -> int:
    """Return how many collectives on all ranks the count sees of one."""
    assert dist.group.WORLD is not None
    before = dist.group.WORLD._get_sequence_number_for_group()
    dist.all_reduce(torch.zeros(1))
    return int(dist.group.WORLD._get_sequence_number_for_group() - before)


# Two models in one job, each on half of the ranks.


def run_two_models(cases: Sequence[NormCase]) -> list[tuple[Measured, bool, int]]:
    """Step each case on two halves of the ranks, with other gradients, and not in step.

    Returns:
        What was measured; whether the next step was made, of which the first model's gradients
        have an inf; and the number of collectives on all ranks in it.
    """
    from megatron_muon.integration.install import install

    install(device="cpu")
    with initialized(1):
        halves = [dist.new_group([first, first + 1]) for first in (0, 2)]
        return [two_models(case, halves[dist.get_rank() // 2]) for case in cases]


def two_models(case: NormCase, own: Any) -> tuple[Measured, bool, int]:
    from megatron.training import training

    half, rank = divmod(dist.get_rank(), 2)
    groups = given_groups(replace(case, collection="by hand"))
    groups.dp = groups.dp_cp = groups.expt_dp = groups.intra_dist_opt = own
    if case.collection == "without whole":
        forget_whole(case, groups)
    replica = Replica(2 * half + rank, 2, 2 * half + rank, 2)
    wrap_chunks = partial(training.wrap_model_chunks_with_ddp, pg_collection=groups)
    with mock.patch.object(training, "wrap_model_chunks_with_ddp", wrap_chunks):
        chunks = build(case)
    optimizer = build_optimizer(case, chunks, groups)
    with (
        mock.patch.object(backward, "gradients", whole_gradients),
        mock.patch.object(backward, "this_replica", return_value=replica),
    ):
        backward.inject(case, chunks, 0)
        found = measured(case, chunks, optimizer)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        backward.inject(case, chunks, 0)
    if half == 0:
        next(iter(chunks[0].parameters())).main_grad.fill_(torch.inf)
    assert dist.group.WORLD is not None
    before = dist.group.WORLD._get_sequence_number_for_group()
    success, _, _ = optimizer.step()
    if half == 1:
        # One more, which the other model does not make.
        optimizer.step()
    return found, success, dist.group.WORLD._get_sequence_number_for_group() - before
