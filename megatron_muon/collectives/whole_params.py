"""Whole tensors from the ranks that hold them to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_ALIGNMENT = 64
"""Elements; as DDP aligns the parameters in its buffers."""


def gather_whole[T: torch.Tensor](
    owners: Sequence[Sequence[T]],
    group: dist.ProcessGroup,
    value_of: Callable[[T], torch.Tensor],
    take: Callable[[T, torch.Tensor], None],
) -> None:
    """Bring what each rank holds to the others, in one gather a dtype; collective.

    Args:
        owners: What each rank of the group holds; the same lists on every rank.
        group: The ranks.
        value_of: Values of a tensor this rank holds, in the tensor's dtype.
        take: Puts values that came, of the tensor's shape, into a tensor that another rank holds.
    """
    rank = group.rank()
    for dtype in dict.fromkeys(tensor.dtype for held in owners for tensor in held):
        shares = [[tensor for tensor in held if tensor.dtype == dtype] for held in owners]
        for share in shares:
            # Those of odd sizes last: kernels that read what came may want it aligned.
            share.sort(key=lambda tensor: tensor.numel() % _ALIGNMENT != 0)
        device = next(tensor.device for share in shares for tensor in share)
        flats = [
            torch.empty(sum(t.numel() for t in share), dtype=dtype, device=device)
            for share in shares
        ]
        if shares[rank]:
            torch.cat([value_of(t).reshape(-1) for t in shares[rank]], out=flats[rank])
        dist.all_gather(flats, flats[rank], group=group)
        for owner, (share, flat) in enumerate(zip(shares, flats, strict=True)):
            if owner == rank:
                continue
            values = torch.split(flat, [tensor.numel() for tensor in share])
            for tensor, value in zip(share, values, strict=True):
                take(tensor, value.view(tensor.shape))
