"""Newton-Schulz of a matrix that no rank holds whole: each step all-reduces a Gram matrix.

For comparison with the exchange with homes (``--muon-tp-mode distributed``): it moves more, and
sums in another order than one process does.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.collectives.exchange import reduce_flat
from megatron_muon.optimizer.station import Station
from megatron_muon.orthogonalize.arithmetic import choose_arithmetic, products_in
from megatron_muon.orthogonalize.blocks import TINY
from megatron_muon.orthogonalize.coefficients import coefficients
from megatron_muon.orthogonalize.products import Products, Symmetric
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
    settings, group = station.settings.orthogonalization, station.columns.group
    assert group is not None
    arithmetic = choose_arithmetic(settings.matmul_precision, x.device.type)
    x = _normalized(station, x, group).to(arithmetic.dtype)
    num_rows, num_columns = x.shape
    gram, polynomial = x.new_empty(num_rows, num_rows), x.new_empty(num_rows, num_rows)
    other = torch.empty_like(x)
    largest_numel = num_rows * max(num_rows, num_columns)
    products = Products(
        rounding=torch.empty(largest_numel, dtype=torch.bfloat16, device=x.device)
        if arithmetic.rounds
        else None
    )
    products.round_(x)
    with products_in(settings.matmul_precision):
        for a, b, c in coefficients(settings.coefficient_type, settings.num_steps):
            products.gram(x, Symmetric(gram))
            reduce_flat(gram.view(-1), group, station.wire)
            products.round_(gram)
            products.add(gram, b, gram, gram, c, polynomial)
            products.add(x, a, polynomial, x, 1.0, other)
            x, other = other, x
    return x.float()


def _normalized(station: Station, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Divide by the norm of the whole matrix, as :func:`.blocks.normalize` does."""
    largest = torch.linalg.vector_norm(x, math.inf).reshape(1)
    reduce_flat(largest, group, station.wire, dist.ReduceOp.MAX)
    x = x / largest.clamp_min_(TINY)
    square = torch.linalg.vector_norm(x).square().reshape(1)
    reduce_flat(square, group, station.wire)
    return x.div_(square.sqrt_().clamp_min_(TINY))
