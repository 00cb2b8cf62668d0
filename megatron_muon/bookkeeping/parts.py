"""Parts of a matrix that several ranks orthogonalize together: its long side, cut.

With sides ``a <= b`` the Gram matrix ``X X^T`` of the block, ``(a, a)``, is the sum of those of its
parts, each ``(a, b / k)``. In what order lines of the long side are summed does not matter, so a
part is made of the same lines *of each shard*: it is then a matrix that tensor parallelism cuts as
it cuts the whole, and that moves as any other does. Of a shard with three long lines on each of two
tensor-parallel ranks and two parts::

    shard of tp 0      shard of tp 1
    | 0 | 1   2 |      | 3 | 4   5 |      part 0: lines 0 and 3, part 1: lines 1, 2, 4 and 5
"""

from __future__ import annotations

from dataclasses import replace

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.homes import MAX_SHARERS
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole


def long_dim(matrix: LogicalMatrix) -> int:
    """Return the dimension of a matrix that is cut into parts: the longer one."""
    return 0 if matrix.shape[0] > matrix.shape[1] else 1


def max_sharers(matrix: LogicalMatrix) -> int:
    """Return how many ranks may work on a matrix together, 1 if it must stay whole.

    It must where it is several blocks, and where generalized tensor parallelism cuts rows, since
    shards are then unequal.
    """
    block, *others = matrix.blocks
    if others or block.batch > 1 or matrix.gtp_size > 1:
        return 1
    return min(MAX_SHARERS, matrix.local_shape[long_dim(matrix)])


def part_lines(matrix: LogicalMatrix, number: int, count: int) -> tuple[int, int]:
    """Return the lines of a shard's long side that are of a part.

    Args:
        matrix: The whole matrix.
        number: Which part.
        count: How many there are, no more than lines.
    """
    length = matrix.local_shape[long_dim(matrix)]
    return number * length // count, (number + 1) * length // count


def part_matrix(matrix: LogicalMatrix, number: int, count: int) -> LogicalMatrix:
    """Return a part as a matrix of its own; the arguments are those of :func:`part_lines`."""
    dim = long_dim(matrix)
    start, end = part_lines(matrix, number, count)
    is_cut = matrix.tp_dim == dim
    length = (end - start) * (matrix.tp_size if is_cut else 1)
    shape = (length, matrix.shape[1]) if dim == 0 else (matrix.shape[0], length)
    return replace(
        matrix,
        name=f"{matrix.name} part {number} of {count}",
        shape=shape,
        blocks=whole(shape[0]),
        tp_stride=1 if is_cut else matrix.tp_stride,
    )


def part_range(matrix: LogicalMatrix, lines: tuple[int, int], range_: ParamRange) -> ParamRange:
    """Return which elements of a part are among flat elements of the shard; may be empty.

    Elements of a part come in the order in which the shard has them, so they are one stretch.

    Args:
        matrix: The whole matrix.
        lines: The part's lines of the shard.
        range_: Flat elements of the shard.

    Returns:
        Flat elements of the part's own shard.
    """
    _, columns = matrix.local_shape
    start, end = lines
    width = end - start

    def num_before(index: int) -> int:
        if long_dim(matrix) == 0:
            return min(max(index - start * columns, 0), width * columns)
        row, column = divmod(index, columns)
        return row * width + min(max(column - start, 0), width)

    return ParamRange(num_before(range_.start), num_before(range_.end))
