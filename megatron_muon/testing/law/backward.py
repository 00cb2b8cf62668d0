"""Gradients reach DDP: given ones through its hooks, or by Megatron's own schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from megatron_muon.testing.law.build import parameters
from megatron_muon.testing.law.case import Case, is_expert
from megatron_muon.testing.law.model import (
    SEQUENCE,
    Replica,
    blocks,
    counted_tokens,
    gradients,
    is_cut_again,
    micro_batch,
    samples,
    shard,
    tokens,
)


def this_replica() -> Replica:
    """Return which copies of the parameters this rank has."""
    from megatron.core import parallel_state as state

    # Ranks that cut rows once more are given the same gradient here; in training theirs differ, and
    # are averaged before those that the optimizer sees.
    return Replica(
        state.get_data_parallel_rank(with_gtp_remat=False),
        state.get_data_parallel_world_size(with_gtp_remat=False),
        state.get_expert_data_parallel_rank(with_gtp_remat=False),
        state.get_expert_data_parallel_world_size(with_gtp_remat=False),
    )


def inject(case: Case, chunks: Sequence[Any], step: int) -> None:
    """Give every parameter its gradient, as the backward pass of each micro-batch does.

    The gradients go through autograd, so that DDP's own hooks add them up and start reductions.
    """
    from megatron.core import parallel_state as state

    replica = this_replica()
    loss_scale = case.loss_scales[step] if case.loss_scales else 1.0
    wholes = gradients(case, replica, step)
    # Megatron divides by the data-parallel size also where fewer ranks have a copy of an expert:
    # each of these sees the tokens of several.
    of_experts = replica.size / replica.expert_size
    tp_rank = state.get_tensor_model_parallel_rank()
    expert_tp_rank = state.get_expert_tensor_parallel_rank()
    dense_gtp_rank = state.get_gtp_weight_remat_rank()
    expert_gtp_rank = state.get_expert_gtp_weight_remat_rank()
    for index in range(case.micro_batches):
        is_last = index == case.micro_batches - 1
        for chunk in reversed(chunks):
            trained, grads, cut = [], [], []
            for name, param in parameters([chunk]):
                if param.requires_grad:
                    part = micro_batch(wholes[name], index, case.micro_batches)
                    rank = expert_tp_rank if is_expert(name) else tp_rank
                    scale = of_experts if is_expert(name) else 1.0
                    gtp_rank = expert_gtp_rank if is_expert(name) else dense_gtp_rank
                    is_poisoned = case.gtp_poisoned and name in blocks(case)
                    local = shard(case, name, part, rank, gtp_rank, float(is_poisoned))
                    grad = (scale * loss_scale * local).to(param.dtype)
                    if is_cut_again(case, name):
                        cut.append((param, grad))
                        continue
                    trained.append(param.view_as(param))
                    grads.append(grad)
            with contextlib.nullcontext() if is_last else chunk.no_sync():
                torch.autograd.backward(trained, grads)
                _add_parts(cut)
    for chunk in chunks:
        chunk.finish_grad_sync()


def _add_parts(cut: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Add gradients of parts of weights as Megatron does, past autograd.

    As 0.19.2, tensor_parallel/generalized_tensor_parallelism.py:1502.
    """
    for param, grad in cut:
        param.main_grad.add_(grad)
    for param, _ in cut:
        param._handle_megatron_grad_accum(param)


def forward(chunk: Any) -> None:
    """Run a forward pass, whose hooks gather the parameters."""
    inputs = torch.arange(SEQUENCE).unsqueeze(0)
    # MoE layers refuse to train without sequence parallelism, not to be evaluated.
    chunk.eval()
    with torch.no_grad():
        chunk(inputs, _positions(1), _mask())
    chunk.train()


def forward_and_backward(case: Case, chunk: Any, optimizer: Any) -> None:
    """Run this rank's micro-batches of the global batch through Megatron's schedule."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlap_grad:
        config.no_sync_func = chunk.no_sync
    replica = this_replica()
    with _cloned_outputs():
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, case),
            data_iterator=_micro_batches(case, replica),
            model=[chunk],
            num_microbatches=case.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=len(tokens()[0]) // (replica.size * case.micro_batches),
        )


@contextlib.contextmanager
def _cloned_outputs() -> Iterator[None]:
    """Let an expert's bias be added: Megatron does it in place to what may be a view.

    autograd refuses that (0.19.2, transformer/mlp.py:354) without tensor and expert parallelism,
    which is the run on one process that others are compared with.
    """
    from megatron.core.tensor_parallel import layers

    reduce = layers.reduce_from_tensor_model_parallel_region

    def cloned(*args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = reduce(*args, **kwargs)
        return output.clone()

    with mock.patch.object(layers, "reduce_from_tensor_model_parallel_region", cloned):
        yield


def _forward_step(case: Case, batches: Iterator[Sequence[torch.Tensor]], model: Any) -> Any:
    inputs, labels, counted = next(batches)
    losses = model(inputs, _positions(len(inputs)), _mask(), labels=labels)

    def loss(output: torch.Tensor) -> tuple[Any, ...]:
        if case.per_token or case.masked:
            total = case.loss_factor * (output.float() * counted).sum()
            return total, counted.sum().int(), {"lm loss": total.detach()}
        mean = case.loss_factor * output.float().mean()
        return mean, {"lm loss": mean.detach()}

    return losses, loss


def _micro_batches(case: Case, replica: Replica) -> Iterator[Sequence[torch.Tensor]]:
    """Yield inputs, labels and which tokens count, of each micro-batch of a rank."""
    batch = (*(samples() if case.perceptron else tokens()), counted_tokens(case.masked))
    own = [whole.chunk(replica.size)[replica.rank] for whole in batch]
    yield from zip(*(part.chunk(case.micro_batches) for part in own), strict=True)


def _positions(num_sequences: int) -> torch.Tensor:
    return torch.arange(SEQUENCE).expand(num_sequences, -1)


def _mask() -> torch.Tensor:
    return torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril().logical_not()
