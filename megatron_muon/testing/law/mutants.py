"""Breaking the step on purpose, so that each law is seen to fail.

Each entry names a fault and patches what a real fault of the kind would be in. A mutant never
leaves a rank out of a collective: the others would wait for it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.testing.mutants import without_effect
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize

_Function = Callable[..., Any]
_Block = Any


@contextlib.contextmanager
def _patched(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``module:name.of.something`` by what ``make`` makes of it."""
    module, _, name = target.rpartition(":")
    holder: Any = importlib.import_module(module)
    *path, leaf = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    with mock.patch.object(holder, leaf, make(getattr(holder, leaf))):
        yield


def _skipped_owner(step: _Function) -> _Function:
    return without_effect(step, dp_rank=1)


def _own_gradient_only(sync: _Function) -> _Function:
    del sync

    def keep(group: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        group.param_gather_dispatched = False

    return keep


def _half_reduced(sync: _Function) -> _Function:
    """Of a matrix that straddles, the second rank's piece is that rank's own gradient."""

    def finish(group: Any, *args: Any, **kwargs: Any) -> None:
        local = [bucket.grad_data.clone() for bucket in group.buckets]
        sync(group, *args, **kwargs)
        if group.intra_distributed_optimizer_instance_rank == 1:
            for bucket, own in zip(group.buckets, local, strict=True):
                numel = own.numel() // group.intra_distributed_optimizer_instance_size
                bucket.grad_data[numel : 2 * numel].copy_(own[numel : 2 * numel])

    return finish


def _over_expert_parallel_ranks(start: _Function) -> _Function:
    """Gradients of experts are summed with those of other experts."""

    def started(group: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        if all(getattr(param, "allreduce", True) for param in group.params):
            return start(group, *args, **kwargs)
        right = group.intra_distributed_optimizer_instance_group
        group.intra_distributed_optimizer_instance_group = (
            parallel_state.get_expert_model_parallel_group()
        )
        try:
            return start(group, *args, **kwargs)
        finally:
            group.intra_distributed_optimizer_instance_group = right

    return started


def _orthogonalizes_in_hook(make_hook: _Function) -> _Function:
    """Newton-Schulz of what each micro-batch adds, as large as it was."""

    def made(ddp: Any, param: Any) -> _Function:
        hook = make_hook(ddp, param)

        def orthogonalizing(*unused: Any) -> Any:
            if getattr(param, "is_managed_by_layer_wise_optimizer", False):
                direction = orthogonalize(param.grad, COEFFICIENTS["quintic"])
                param.grad = direction * param.grad.norm() / direction.norm()
            return hook(*unused)

        return orthogonalizing

    return made


def _stale_piece(to_row: _Function) -> _Function:
    """What came from other ranks is that of the step before."""
    before: dict[tuple[int, int], torch.Tensor] = {}

    def stale(engine: Any, number: int, inputs: Any, shards: Any) -> Generator[None]:
        yield from to_row(engine, number, inputs, shards)
        for i, shard in shards.items():
            if engine.plan[i].owned.owner is None:
                fresh = shard.clone()
                shard.copy_(before.get((id(engine), i), fresh))
                if i in engine._ranges:
                    own = engine._ranges[i]
                    shard[own.start : own.end].copy_(fresh[own.start : own.end])
                before[id(engine), i] = fresh

    return stale


def _shards_in_wrong_order(land: _Function) -> _Function:
    """A home takes one rank's shard for another's, where it gets equal ones from several."""

    def wrong(flight: Any, unpack: _Function) -> None:
        received: dict[Any, list[tuple[Any, torch.Tensor]]] = defaultdict(list)

        def keep(transfer: Any, part: torch.Tensor) -> None:
            received[transfer.index, transfer.range].append((transfer, part.clone()))

        land(flight, keep)
        for shards in received.values():
            for (transfer, _), (_, part) in zip(shards, reversed(shards), strict=True):
                unpack(transfer, part)

    return wrong


def _dropped_home(from_home: _Function) -> _Function:
    """One home gives zeros."""

    def dropped(engine: Any, number: int, results: Any, updates: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            for result in results.values():
                result.zero_()
        return from_home(engine, number, results, updates)

    return dropped


def _same_scratch(take: _Function) -> _Function:
    """Who borrows gets what another still uses."""
    lent: dict[Any, torch.Tensor] = {}

    def taken(arena: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (id(arena), numel, dtype)
        if key not in lent:
            lent[key] = take(arena, numel, dtype, device)
        return lent[key]

    return taken


def _with_blocks(change: Callable[[int, Sequence[_Block]], Sequence[_Block]]) -> Callable[..., Any]:
    """Orthogonalize other blocks, by the rows of the matrix and its own blocks."""

    def make(run: _Function) -> _Function:
        def changed(station: Any, work: Any) -> Any:
            return run(station, [(x, out, change(len(x), blocks)) for x, out, blocks in work])

        return changed

    return make


def _as_one(first: str) -> Callable[[int, Sequence[_Block]], Sequence[_Block]]:
    """Leave a fused weight whole whose first block has this name."""
    from megatron_muon.bookkeeping.matrix import whole

    return lambda rows, blocks: whole(rows) if blocks[0].name == first else blocks


def _heads_together(rows: int, blocks: Sequence[_Block]) -> Sequence[_Block]:
    del rows
    return [replace(block, batch=1) for block in blocks]


def _scale_of_whole(run: _Function) -> _Function:
    def scaled(station: Any, work: Any) -> None:
        from megatron_muon.orthogonalize.views import block_views

        run(station, work)
        for x, out, blocks in work:
            for block in blocks:
                size = max(block.matrix_shape(tuple(x.shape)))
                for view in block_views(out, block):
                    view.mul_(math.sqrt(max(x.shape) / size))

    return scaled


def _cut_as_one(shard_view: _Function) -> _Function:
    return lambda whole, dim, stride, size, rank: shard_view(whole, dim, 1, size, rank)


def _without_decay(apply: _Function) -> _Function:
    return lambda weight, update, lr, weight_decay: apply(weight, update, lr, 0.0)


def _never_advances(advance: _Function) -> _Function:
    return lambda momentum, *blended: advance(momentum.clone(), *blended)


def _without_routers(rows: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    return tuple(row for row in rows if "router" not in row[0])


def _blockwise(settings: _Function) -> _Function:
    return lambda **given: settings(**{**given, "mode": "blockwise"})


_MUON = "megatron_muon.optimizer.muon:"
_ENGINE = "megatron_muon.optimizer.engine:"
_STATION = "megatron_muon.optimizer.station:"
_BLOCKS = _STATION + "Station.orthogonalize"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."
_DDP = "megatron.core.distributed.distributed_data_parallel:"

MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    # Reduction of gradients.
    "no average over data-parallel ranks": lambda: _patched(
        _BUFFERS + "finish_grad_sync", _own_gradient_only
    ),
    "straddling matrix half reduced": lambda: _patched(
        _BUFFERS + "finish_grad_sync", _half_reduced
    ),
    "experts reduced over the wrong group": lambda: _patched(
        _BUFFERS + "start_grad_sync", _over_expert_parallel_ranks
    ),
    "Newton-Schulz of each micro-batch": lambda: _patched(
        _DDP + "DistributedDataParallel._make_backward_post_hook", _orthogonalizes_in_hook
    ),
    # Movement.
    "skipped owner": lambda: _patched(_MUON + "OwnedMuon.step", _skipped_owner),
    "stale piece": lambda: _patched(_ENGINE + "Engine._to_row", _stale_piece),
    "shards in wrong order": lambda: _patched(
        "megatron_muon.collectives.exchange:Flight.land", _shards_in_wrong_order
    ),
    "gate and up cut as one": lambda: _patched(_STATION + "shard_view", _cut_as_one),
    "update of one home dropped": lambda: _patched(_ENGINE + "Engine._from_home", _dropped_home),
    "scratch lent twice": lambda: _patched(
        "megatron_muon.collectives.arena:Arena.take", _same_scratch
    ),
    "bucket groups of two optimizers": lambda: _patched(
        _DDP + "partition_buckets", lambda partition: partition.__wrapped__
    ),
    # Mathematics.
    "qkv as one": lambda: _patched(_BLOCKS, _with_blocks(_as_one("q"))),
    "gate and up as one": lambda: _patched(_BLOCKS, _with_blocks(_as_one("gate"))),
    "heads together": lambda: _patched(_BLOCKS, _with_blocks(_heads_together)),
    "scale of the whole": lambda: _patched(_BLOCKS, _scale_of_whole),
    "blockwise": lambda: _patched(_MUON + "EngineSettings", _blockwise),
    "no decay": lambda: _patched(_MUON + "apply_update", _without_decay),
    "momentum never advances": lambda: _patched(_MUON + "advance_momentum", _never_advances),
    # Routing.
    "router is a matrix": lambda: _patched(
        "megatron_muon.bookkeeping.routing:SCALAR_BY_NAME", _without_routers
    ),
}
"""What breaks the step, by the name of the fault; ``None`` breaks nothing."""


# The decision to skip a step.


@contextlib.contextmanager
def _model_parallel_decision() -> Iterator[None]:
    """Each model-parallel group decides for itself; who skips still takes part in the others' step.

    For steps whose loss scale can fall: else who skips would gather names that others do not.
    """

    def measures(measure: _Function) -> _Function:
        def measured(chain: Any, count_zeros: bool) -> Any:
            from megatron.core import parallel_state

            statistics = measure(chain, count_zeros)
            num_bad = _num_bad(chain.members)
            dist.all_reduce(num_bad, group=parallel_state.get_model_parallel_group())
            return replace(statistics, is_finite=not num_bad)

        return measured

    def steps(_: _Function) -> _Function:
        def step(chain: Any) -> tuple[bool, float | None, int | None]:
            skips = chain.prepare_grads()
            num_steps = torch.tensor(float(not skips))
            dist.all_reduce(num_steps)
            if num_steps:
                for member in chain.members:
                    if member.grad is not None:
                        member.grad.nan_to_num_(0.0, 0.0, 0.0)
                with _undone(chain.leaves) if skips else contextlib.nullcontext():
                    chain.step_with_ready_grads()
            return (False, None, None) if skips else (True, 0.0, None)

        return step

    with (
        _patched(_CHAIN + "MuonChain._measure", measures),
        _patched(_CHAIN + "MuonChain.step", steps),
    ):
        yield


def _num_bad(members: Sequence[Any]) -> torch.Tensor:
    """Return how many members have a gradient that is not finite, shape ()."""
    grads = [member.grad for member in members if member.grad is not None]
    return torch.tensor(float(sum(not bool(grad.isfinite().all()) for grad in grads)))


@contextlib.contextmanager
def _undone(leaves: Sequence[Any]) -> Iterator[None]:
    """Let a step change no master and no state."""
    kept = [
        (tensor, tensor.clone())
        for leaf in leaves
        for group in leaf.optimizer.param_groups
        for param in group["params"]
        for tensor in (param.data, *leaf.optimizer.state.get(param, {}).values())
        if isinstance(tensor, torch.Tensor)
    ]
    yield
    for tensor, old in kept:
        tensor.copy_(old)


@contextlib.contextmanager
def _own_scalers() -> Iterator[None]:
    """Each child unscales by a scaler of its own, which sees the child's overflows only."""

    def prepares(_: _Function) -> _Function:
        def prepare_grads(chain: Any) -> bool:
            from megatron_muon.optimizer.masters import leaves

            children = [list(leaves(child)) for child in chain.chained_optimizers]
            found = torch.zeros(len(children))
            for i, leaf in ((i, leaf) for i, child in enumerate(children) for leaf in child):
                leaf._copy_model_grads_to_main_grads()
                for group in leaf.optimizer.param_groups:
                    for param in group["params"]:
                        if param.grad is not None:
                            param.grad.mul_(leaf.grad_scaler.inv_scale)
                            found[i] += float(not bool(param.grad.isfinite().all()))
            dist.all_reduce(found)
            for number, child in zip(found, children, strict=True):
                for leaf in child:
                    leaf.grad_scaler.update(bool(number))
            chain._statistics = chain._measure(False)
            return not chain._statistics.is_finite

        return prepare_grads

    with (
        _patched("megatron_muon.optimizer.grad_scaler:SharedGradScaler", lambda _: copy.deepcopy),
        _patched(_CHAIN + "MuonChain.prepare_grads", prepares),
    ):
        yield


def _blind(measure: _Function) -> _Function:
    return lambda *args: replace(measure(*args), is_finite=True)


def _copies_unseen(measure: _Function) -> _Function:
    """What is not counted in the norm is not looked at either."""
    return lambda members, *args: measure([m for m in members if m.is_counted], *args)


def _momentum_first(measure: _Function) -> _Function:
    """Momentum of what is finite advances before it is decided."""

    def measured(chain: Any, count_zeros: bool) -> Any:
        for leaf in chain.leaves:
            for param, state in leaf.optimizer.state.items():
                if "momentum_buffer" in state and bool(param.grad.isfinite().all()):
                    state["momentum_buffer"].lerp_(param.grad, 0.1)
        return measure(chain, count_zeros)

    return measured


def _squares_in_fp32(squares: _Function) -> _Function:
    del squares
    return lambda tensors: [tensor.square().sum().double() for tensor in tensors]


_CHAIN = "megatron_muon.optimizer.chain:"

SKIP_MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    "flag reduced over the model-parallel group only": _model_parallel_decision,
    "one scaler per child": _own_scalers,
    "no decision": lambda: _patched(_CHAIN + "MuonChain._measure", _blind),
    "copies not looked at": lambda: _patched(_CHAIN + "measure", _copies_unseen),
    "momentum before the decision": lambda: _patched(
        _CHAIN + "MuonChain._measure", _momentum_first
    ),
    "squares in fp32": lambda: _patched(
        "megatron_muon.optimizer.grad_statistics:squares", _squares_in_fp32
    ),
}
"""What breaks the decision to skip a step, by the name of the fault."""


# Scale, clip and momentum.


def _divided_by_scale(step: _Function) -> _Function:
    def divided(chain: Any) -> Any:
        scale = float(chain.get_loss_scale())
        with _patched(_MUON + "apply_update", lambda apply: _times(apply, lambda: 1 / scale)):
            return step(chain)

    return divided


@contextlib.contextmanager
def _clipped_updates() -> Iterator[None]:
    """Of the matrices it is not the gradients that are clipped but what Newton-Schulz makes."""
    factor = 1.0

    def clips(clip: _Function) -> _Function:
        def clipped(members: Sequence[Any], max_norm: float, norms: Mapping[Any, float]) -> None:
            nonlocal factor
            factor = min(1.0, max_norm / norms[None])
            clip([member for member in members if not member.is_matrix], max_norm, norms)

        return clipped

    with (
        _patched(_CHAIN + "clip", clips),
        _patched(_MUON + "apply_update", lambda apply: _times(apply, lambda: factor)),
    ):
        yield


def _times(apply: _Function, factor: Callable[[], float]) -> _Function:
    return lambda weight, update, lr, decay: apply(weight, factor() * update, lr, decay)


def _momentum_in_fp16(init: _Function) -> _Function:
    def initialized(muon: Any, *args: Any, **kwargs: Any) -> None:
        init(muon, *args, **kwargs)
        muon.momentum_dtype = torch.float16

    return initialized


SCALE_MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    # The fault of optimizers that scale after they have unscaled: tiny steps.
    "update divided by the scale": lambda: _patched(_CHAIN + "MuonChain.step", _divided_by_scale),
    # Newton-Schulz makes all updates of one size: clipping them makes all of them small.
    "clip applied to the update": _clipped_updates,
    # Unscaled gradients are smaller than fp16's normal numbers.
    "momentum in fp16": lambda: _patched(_MUON + "OwnedMuon.__init__", _momentum_in_fp16),
}
"""What breaks the step where loss scale, clip or precision matter, by the name of the fault."""


# Generalized tensor parallelism.


def _with_filled_rows(logical_shape: _Function) -> _Function:
    return lambda shard, local_shape: logical_shape(replace(shard, gtp_padding=0), local_shape)


def _from_the_last(first_row: _Function) -> _Function:
    def of_another(matrix: Any, rank: int) -> int:
        row: int = first_row(matrix, matrix.row_size - 1 - rank)
        return row

    return of_another


GTP_MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "rows of zeros are rows of the matrix": lambda: _patched(
        "megatron_muon.integration.names:ParamShard.logical_shape", _with_filled_rows
    ),
    "parts in wrong order": lambda: _patched(
        "megatron_muon.bookkeeping.matrix:LogicalMatrix._first_row", _from_the_last
    ),
}
"""What breaks the step where rows are cut over ranks of their own, by the name of the fault."""


# Blocks that several ranks share.


def _without_the_last(multiply: _Function) -> _Function:
    """The last rank of the job adds nothing to sums of Gram matrices."""

    def multiplied(part: Any) -> None:
        multiply(part)
        if dist.get_rank() == dist.get_world_size() - 1:
            part.gram.zero_()

    return multiplied


def _by_its_own_norm(normalize: _Function) -> _Function:
    """Each part is divided by its own norm."""

    def normalized(part: Any, sizes: torch.Tensor) -> None:
        (own,) = (sizes[:, 0] == part._largest).nonzero()[:1, 0].tolist()
        normalize(part, sizes[own : own + 1])

    return normalized


_PARTS = "megatron_muon.orthogonalize.parts:"

SHARE_MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "a part in no sum": lambda: _patched(_PARTS + "BlockPart.multiply", _without_the_last),
    "sums of Gram matrices left out": lambda: _patched(
        "megatron_muon.optimizer.shared:_Line._add", lambda _: lambda *args: None
    ),
    "norm of the part": lambda: _patched(_PARTS + "BlockPart.normalize", _by_its_own_norm),
    "scale of the part": lambda: _patched(
        "megatron_muon.bookkeeping.gram_sums:SharedMatrix.shape",
        lambda _: property(lambda matrix: matrix.parts[0].matrix.shape),
    ),
}
"""What breaks the step where several ranks share a block, by the name of the fault."""


# Quantized weights.


def _stages_nothing(stage: _Function) -> _Function:
    del stage
    return lambda staging: None


def _copied_too(copy_main: _Function) -> _Function:
    """Masters are copied to quantized weights after the step, though a gather follows."""

    def copied(wrapper: Any) -> None:
        from megatron_muon.optimizer.masters import is_quantized, masters_of, quantize

        copy_main(wrapper)
        quantize((p, m) for p, m in masters_of(wrapper).items() if is_quantized(p))

    return copied


def _from_quantized(init: _Function) -> _Function:
    """Masters start from what the quantized weights stand for."""

    def initialized(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        init(wrapper, *args, **kwargs)
        for param, master in wrapper._pairs():
            master.data.copy_(param.detach().float())

    return initialized


def _left_dirty(post: _Function) -> _Function:
    """The borrowed buffer keeps what came in it, added to the next gradients."""

    def left(group: Any) -> None:
        came = [(bucket.param_data, bucket.param_data.clone())
                for bucket in group.buckets if bucket.param_data is not None]  # fmt: skip
        post(group)
        for borrowed, values in came:
            borrowed.copy_(values)

    return left


_MASTERS = "megatron_muon.optimizer.masters:MasterOptimizer."

MXFP8_MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no staging": lambda: _patched(
        "megatron_muon.optimizer.param_sync:Staging.stage", _stages_nothing
    ),
    "master copied to quantized weight": lambda: _patched(
        _MASTERS + "_copy_main_params_to_model_params", _copied_too
    ),
    "initial value not used": lambda: _patched(_MASTERS + "__init__", _from_quantized),
    "initial value kept": lambda: _patched(_CHAIN + "forget_initial_values", lambda _: list),
    "borrowed buffer not zeroed": lambda: _patched(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup._post_param_sync",
        _left_dirty,
    ),
    "weights not made after a load": lambda: _patched(
        _CHAIN + "MuonChain._renew_weights", lambda _: lambda chain: None
    ),
}
"""What breaks the gather of quantized weights, by the name of the fault."""
