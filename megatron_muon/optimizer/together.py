"""Newton-Schulz of a matrix that no rank holds whole: each step all-reduces a Gram matrix.

For comparison with the exchange with homes (``--muon-tp-mode distributed``): it moves more, and
sums in another order than one process does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.collectives.exchange import reduce_flat
from megatron_muon.optimizer.station import Station
from megatron_muon.orthogonalize.coefficients import coefficients
from megatron_muon.orthogonalize.views import as_matrix, block_views


def orthogonalize_together(station: Station, x: torch.Tensor, matrix: LogicalMatrix) -> None:
    """Orthogonalize the shards of a matrix in place; every rank of the row enters.

    Args:
        station: This rank.
        x: Its shard, ``matrix.local_shape``, fp32; becomes the shard's update.
        matrix: The whole matrix, cut along ``matrix.tp_dim``.
    """
    for block, local in zip(matrix.blocks, matrix.local_blocks(), strict=True):
        if local.batch != block.batch:  # whole heads lie on each rank
            station.orthogonalize([(x, x, (local,))])
            continue
        shapes = block.matrix_shapes(matrix.shape)
        for shape, view in zip(shapes, block_views(x, local), strict=True):
            part = as_matrix(view, local)
            with station.account.phase("newton_schulz"):
                columns = part.mT if matrix.tp_dim == 0 else part
                update = _iterate(station, columns)
                update = update.mT if matrix.tp_dim == 0 else update
                scale = station.settings.orthogonalization.scale(*shape)
                view.copy_((update * scale).reshape(view.shape))
            station.count(part.shape)


def _iterate(station: Station, x: torch.Tensor) -> torch.Tensor:
    """Return the polynomial of a matrix whose columns are spread over the row.

    Args:
        station: This rank.
        x: Its columns, ``(m, n / ranks)`` fp32.
    """
    orthogonalization, group = station.settings.orthogonalization, station.columns.group
    assert group is not None
    dtype = torch.bfloat16 if orthogonalization.matmul_precision == "medium" else torch.float32
    largest = x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1)
    reduce_flat(largest, group, station.wire, dist.ReduceOp.MAX)
    x = x / torch.where(largest == 0, torch.ones_like(largest), largest)
    square = x.square().sum().reshape(1)
    reduce_flat(square, group, station.wire)
    x = (x / torch.where(square == 0, torch.ones_like(square), square).sqrt()).to(dtype)
    triples = coefficients(orthogonalization.coefficient_type, orthogonalization.num_steps)
    for a, b, c in triples:
        gram = x @ x.mT
        reduce_flat(gram.view(-1), group, station.wire)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.float()
