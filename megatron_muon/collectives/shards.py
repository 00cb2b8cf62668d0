"""Putting tensor-parallel shards together, and cutting a whole matrix into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def assemble(shards: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """Join the shards of all ranks into the whole matrix.

    With ``stride`` parts stacked along ``dim`` (gate and up projections), each shard holds its
    piece of every part; the whole has part after part.

    Args:
        shards: One ``local_shape`` tensor a rank, in rank order.
        dim: The dimension that is cut.
        stride: Stacked parts.
    """
    if stride == 1:
        return torch.cat(tuple(shards), dim=dim)
    pieces = [shard.chunk(stride, dim=dim) for shard in shards]
    return torch.cat([pieces[rank][part] for part in range(stride)
                      for rank in range(len(shards))], dim=dim)  # fmt: skip


def cut(whole: torch.Tensor, dim: int, stride: int, num_ranks: int) -> list[torch.Tensor]:
    """Cut a whole matrix into one shard a rank: the inverse of :func:`assemble`."""
    if stride == 1:
        return list(whole.chunk(num_ranks, dim=dim))
    pieces = whole.chunk(stride * num_ranks, dim=dim)
    return [torch.cat([pieces[part * num_ranks + rank] for part in range(stride)], dim=dim)
            for rank in range(num_ranks)]  # fmt: skip
