"""The scalar optimizer's state in a checkpoint of stock Megatron that keeps it bucket by bucket.

Stock Megatron's default with a parameter layout (``dp_reshardable``) saves the state of its
``DistributedOptimizer`` as it lies in memory: one flat tensor for each bucket, of all parameters of
one model-parallel rank. Its keys name no parameter. Where each one lies follows from their order,
their sizes and the buckets' sizes, the last of which the file tells, so any data-parallel size and
any bucket size here will do; the tensor- and pipeline-parallel sizes have to be those of the file.

Source: ``DistributedOptimizer._compute_per_buffer_param_layout`` and
``sharded_param_state_dp_reshardable`` of megatron-core 0.19.2 (optimizer/distrib_optimizer.py:507,
1828).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import pad_param_start
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_muon.checkpoint.files import CheckpointIndex, read_object
from megatron_muon.checkpoint.keys import (
    EXP_AVG,
    MASTERS,
    MOMENTUM_BUFFER,
    SHARDED_MASTER,
    STEP,
    canonical,
)
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.muon import OwnedMuon

_GROUP = r"(?:chained_\d+\.)*optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
_BUCKET = re.compile(
    rf"(?P<stem>{_GROUP}\.gbuf_idx_(?P<buffer>\d+)\.dtype_.+\.bucket_idx_(?P<bucket>\d+))"
    r"\.(?P<state>\w+)"
)
_OBJECT = re.compile(rf"{_GROUP}\.optimizer(?:/.*)?")


@dataclass(frozen=True, slots=True)
class Laid:
    """One parameter as the layout sees it.

    Attributes:
        name: Its name, for messages.
        numel: Elements of it on a model-parallel rank.
        is_alone: Whether it has a bucket of its own: the embedding, where it is tied.
    """

    name: str
    numel: int
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Where a parameter's state lies in the file.

    Attributes:
        stem: The tensors' common name, ``<stem>.param``, ``<stem>.exp_avg``, ...
        bucket_numel: Elements of each of them.
        start: Where the parameter starts in them.
    """

    stem: str
    bucket_numel: int
    start: int

    def key(self, state: str) -> str:
        """Return the name of a state, as :mod:`~megatron_muon.checkpoint.keys` calls it."""
        return f"{self.stem}.{SHARDED_MASTER if state in MASTERS else state}"

    def shard(self, state: str, target: torch.Tensor, first: int) -> ShardedTensor:
        """Return a part of a parameter's state as a piece of the bucket, to be loaded in place.

        Args:
            state: Its name.
            target: Where it goes, flat and contiguous.
            first: Which element of the flattened parameter is the first of it.
        """
        return ShardedTensor(
            key=self.key(state),
            data=target,
            dtype=target.dtype,
            local_shape=tuple(target.shape),
            global_shape=(self.bucket_numel,),
            global_offset=(self.start + first,),
            axis_fragmentations=None,
            replica_id=0,
        )


@dataclass(frozen=True, slots=True)
class InBuckets:
    """The scalar state of a checkpoint that keeps it bucket by bucket.

    Attributes:
        places: Where the state of each of this rank's parameters lies.
        step: The scalar optimizer's count of steps, ``None`` if nothing counts them.
    """

    places: Mapping[torch.nn.Parameter, BucketPlace]
    step: int | None


def in_buckets(index: CheckpointIndex) -> bool:
    """Whether a checkpoint keeps the scalar optimizer's state bucket by bucket."""
    return any(_BUCKET.fullmatch(key) for key in index.tensors)


def has_momentum(index: CheckpointIndex) -> bool:
    """Whether a checkpoint has Muon's momentum of any parameter, by stock Megatron or this."""
    found = map(canonical, index.tensors)
    return any(name is not None and name[0] == MOMENTUM_BUFFER for name in found)


def find_in_buckets(
    leaves: Iterable[Any],
    names: Mapping[torch.nn.Parameter, str],
    num_ranks: int,
    index: CheckpointIndex,
) -> InBuckets | None:
    """Return where this rank's scalar state is, ``None`` if the file does not keep it by bucket.

    Args:
        leaves: The innermost of Megatron's wrappers of this run.
        names: Names of the parameters.
        num_ranks: Ranks of this run.
        index: The checkpoint.

    Raises:
        CheckpointError: The checkpoint has no momentum of Muon, which this run needs; or this run
            has no parameter layout, or other tensor- or pipeline-parallel sizes than the
            checkpoint, or another model.
    """
    if not in_buckets(index):
        return None
    leaves = list(leaves)
    # Before anything of the buckets, whose faults are said with advice to save in another form:
    # that would bring no momentum.
    if any(isinstance(leaf.optimizer, OwnedMuon) for leaf in leaves) and not has_momentum(index):
        raise CheckpointError(
            f"{index.path}: it was written by another optimizer (it has no momentum of Muon). Take "
            "its weights alone with --no-load-optim; the learning-rate schedule then starts anew."
        )
    leaf = next((leaf for leaf in leaves if _is_dense_scalar(leaf)), None)
    if leaf is None:
        raise _unfit(index, "this run has no parameter layout, which --muon-layout gives it")
    num_groups = num_ranks // leaf.data_parallel_group.size()
    return InBuckets(
        bucket_places(leaf, names, num_groups, index),
        step_in_buckets(leaf.data_parallel_group_idx, index),
    )


def _is_dense_scalar(leaf: Any) -> bool:
    """Whether an optimizer is the one that stock Megatron has too; it has none for experts."""
    return (
        isinstance(leaf, DistributedOptimizer)
        and not isinstance(leaf.optimizer, OwnedMuon)
        and not leaf.optimizer.param_groups[0]["is_expert_parallel"]
    )


def bucket_places(
    leaf: Any, names: Mapping[torch.nn.Parameter, str], num_groups: int, index: CheckpointIndex
) -> dict[torch.nn.Parameter, BucketPlace]:
    """Return where the state of each parameter of a ``DistributedOptimizer`` lies in the file.

    Args:
        leaf: This run's optimizer of scalar parameters.
        names: Names of the parameters.
        num_groups: Model-parallel ranks of this run: its tensor- times its pipeline-parallel size.
        index: The checkpoint.

    Raises:
        CheckpointError: It was saved at other tensor- or pipeline-parallel sizes, or of another
            model.
    """
    group = leaf.data_parallel_group_idx
    stems = _stems(group, num_groups, index)
    buffers = [buffer.param_index_map for buffer in leaf.buffers]
    if len(buffers) != len(stems):
        raise _unfit(index, f"it has {len(stems)} buffers, this run {len(buffers)}")
    places = {}
    for of_buffer, buckets in zip(buffers, stems, strict=True):
        sizes = [index.tensors[f"{stem}.{EXP_AVG}"].shape[0] for stem in buckets]
        laid = [
            Laid(names[param], end - start, getattr(param, "shared_embedding", False))
            for param, (start, end, _) in of_buffer.items()
        ]
        for param, item, (bucket, start) in zip(
            of_buffer, laid, lay_out(laid, sizes, index), strict=True
        ):
            place = BucketPlace(buckets[bucket], sizes[bucket], start)
            _check_borders(item, place, index)
            places[param] = place
    return places


def lay_out(
    params: Sequence[Laid], sizes: Sequence[int], index: CheckpointIndex
) -> list[tuple[int, int]]:
    """Return bucket and start of each parameter of a buffer, from the sizes of its buckets.

    Args:
        params: The parameters in the order they lie in: backwards from the model's.
        sizes: Elements of each bucket, without the padding at its end.
        index: The checkpoint, for the message.

    Raises:
        CheckpointError: The parameters do not fill these buckets.
    """
    places: list[tuple[int, int]] = []
    bucket = end = 0
    for param in params:
        start = pad_param_start(end)
        if param.is_alone and start:
            # The bucket before it ends where the parameter would have started.
            if bucket >= len(sizes) or start != sizes[bucket]:
                raise _unfit(index, f"no bucket ends before {param.name}")
            bucket, start = bucket + 1, 0
        end = start + param.numel
        if bucket >= len(sizes) or end > sizes[bucket] or (param.is_alone and end != sizes[bucket]):
            raise _unfit(index, f"{param.name} has {param.numel} elements and fits no bucket")
        places.append((bucket, start))
        if end == sizes[bucket]:
            bucket, end = bucket + 1, 0
    if bucket != len(sizes) or end:
        raise _unfit(index, f"its {len(sizes)} buckets hold more than {len(params)} parameters")
    return places


def step_in_buckets(group: int, index: CheckpointIndex) -> int | None:
    """Return the scalar optimizer's count of steps, ``None`` if nothing counts them.

    Args:
        group: This rank among the model-parallel ranks.
        index: The checkpoint.

    Raises:
        CheckpointError: It has several, or the object that has it cannot be read.
    """
    steps = set()
    for key in index.objects:
        match = _OBJECT.fullmatch(key)
        if match is not None and int(match["group"]) == group:
            for state in read_object(index, key):
                steps |= {int(g[STEP]) for g in state["param_groups"] if g.get(STEP) is not None}
    if len(steps) > 1:
        raise CheckpointError(
            f"{index.path}: it has several counts of steps of the scalar optimizer: "
            f"{sorted(steps)}."
        )
    return next(iter(steps), None)


def _stems(group: int, num_groups: int, index: CheckpointIndex) -> list[list[str]]:
    """Return the names of the buckets of each buffer of a model-parallel rank."""
    stems: dict[int, dict[int, str]] = {}
    groups = set()
    for key in index.tensors:
        match = _BUCKET.fullmatch(key)
        if match is None:
            continue
        groups.add(int(match["group"]))
        if int(match["group"]) == group and match["state"] == EXP_AVG:
            stems.setdefault(int(match["buffer"]), {})[int(match["bucket"])] = match["stem"]
    if groups != set(range(num_groups)):
        raise _unfit(
            index,
            f"it is of {len(groups)} model-parallel ranks, this run has {num_groups}",
        )
    return [[of_buffer[i] for i in sorted(of_buffer)] for _, of_buffer in sorted(stems.items())]


def _check_borders(param: Laid, place: BucketPlace, index: CheckpointIndex) -> None:
    """Check that the file's pieces begin and end where a parameter does: it names none."""
    entry = index.metadata.state_dict_metadata[place.key(EXP_AVG)]
    assert isinstance(entry, TensorStorageMetadata)
    borders = {chunk.offsets[0] for chunk in entry.chunks}
    borders |= {chunk.offsets[0] + chunk.sizes[0] for chunk in entry.chunks}
    if not {place.start, place.start + param.numel} <= borders:
        raise _unfit(index, f"{param.name} does not lie at {place.start} of {place.stem}")


def _unfit(index: CheckpointIndex, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{index.path}: it keeps the scalar optimizer's state bucket by bucket, Megatron's default "
        "(dp_reshardable), which only a run of the same model at the same tensor- and "
        f"pipeline-parallel sizes can read: {fault}. Load it in Megatron as it was saved, and save "
        "it there with --dist-ckpt-optim-fully-reshardable."
    )
