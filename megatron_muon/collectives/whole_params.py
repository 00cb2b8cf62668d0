"""Whole tensors from the ranks that hold them to all others, in bounded scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ALIGNMENT = 64
"""Elements; as DDP aligns the parameters in its buffers."""


@dataclass(frozen=True, slots=True)
class Slice[T: torch.Tensor]:
    """Tensors of one dtype that travel together.

    Attributes:
        owner: The rank that holds them.
        tensors: At least one.
    """

    owner: int
    tensors: tuple[T, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that travel, which are those of the scratch on each rank."""
        return sum(map(_nbytes, self.tensors))


def cut[T: torch.Tensor](owners: Sequence[Sequence[T]], budget_nbytes: int) -> Iterator[Slice[T]]:
    """Yield slices of at most the budget, or of one tensor: the same on every rank, in this order.

    Args:
        owners: What each rank of a group holds; the same lists on every rank.
        budget_nbytes: Bytes of a slice.
    """
    for dtype in dict.fromkeys(tensor.dtype for held in owners for tensor in held):
        for owner, held in enumerate(owners):
            share = [tensor for tensor in held if tensor.dtype == dtype]
            # Those of odd sizes last: kernels that read what came may want it aligned.
            share.sort(key=lambda tensor: tensor.numel() % _ALIGNMENT != 0)
            together: list[T] = []
            nbytes = 0
            for tensor in share:
                nbytes += _nbytes(tensor)
                if together and nbytes > budget_nbytes:
                    yield Slice(owner, tuple(together))
                    together, nbytes = [], _nbytes(tensor)
                together.append(tensor)
            if together:
                yield Slice(owner, tuple(together))


def gather_whole[T: torch.Tensor](
    owners: Sequence[Sequence[T]],
    group: dist.ProcessGroup,
    value_of: Callable[[T], torch.Tensor],
    take: Callable[[T, torch.Tensor], None],
    budget_nbytes: int,
) -> None:
    """Bring what each rank holds to the others, one broadcast a slice; collective.

    Shares differ in size, so an all-gather would be a broadcast of each share, all shares at once.

    Args:
        owners: What each rank of the group holds; the same lists on every rank.
        group: The ranks.
        value_of: Values of a tensor this rank holds; they are rounded to the tensor's dtype.
        take: Puts values that came, of the tensor's shape, into a tensor that another rank holds.
        budget_nbytes: Bytes of scratch; one tensor may take more.
    """
    slices = list(cut(owners, budget_nbytes))
    if group.size() == 1 or not slices:
        return
    # One for all slices: what a backend has sent it may hold for a moment longer.
    scratch = torch.empty(
        max(slice_.nbytes for slice_ in slices),
        dtype=torch.uint8,
        device=slices[0].tensors[0].device,
    )
    for slice_ in slices:
        _broadcast(slice_, group, value_of, take, scratch)


def _broadcast[T: torch.Tensor](
    slice_: Slice[T],
    group: dist.ProcessGroup,
    value_of: Callable[[T], torch.Tensor],
    take: Callable[[T, torch.Tensor], None],
    scratch: torch.Tensor,
) -> None:
    tensors, is_own = slice_.tensors, slice_.owner == group.rank()
    flat = scratch[: slice_.nbytes].view(tensors[0].dtype)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    if is_own:
        torch._foreach_copy_(parts, [value_of(tensor).reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=slice_.owner)
    if not is_own:
        for tensor, part in zip(tensors, parts, strict=True):
            take(tensor, part.view(tensor.shape))


def _nbytes(tensor: torch.Tensor) -> int:
    # What a quantized tensor keeps is less than its values take.
    return tensor.numel() * tensor.dtype.itemsize
