"""Newton-Schulz on the logical blocks of a whole matrix.

References:
    Muon: https://kellerjordan.github.io/posts/muon/
    Size of the update: https://arxiv.org/abs/2502.16982, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.bookkeeping.matrix import LogicalBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """How a block becomes an update.

    Attributes:
        num_steps: Newton-Schulz steps.
        coefficient_type: Coefficient set, by emerging-optimizers' names.
        scale_mode: Rule for the update's size from the block's whole shape.
        extra_scale_factor: Factor on top of it.
        matmul_precision: ``medium`` multiplies in bf16, ``high`` and ``highest`` in fp32.
    """

    num_steps: int
    coefficient_type: str
    scale_mode: str
    extra_scale_factor: float
    matmul_precision: str

    def scale(self, rows: int, columns: int) -> float:
        """Factor of the update of a block of shape ``(rows, columns)``."""
        return self.extra_scale_factor * float(
            get_muon_scale_factor(rows, columns, mode=self.scale_mode)
        )

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled update, ``(m, n)`` fp32, of one block ``x`` of shape ``(m, n)``."""
        with fp32_matmul_precision(self.matmul_precision):
            orthogonal: torch.Tensor = newton_schulz(x, self.num_steps, self.coefficient_type)
        return orthogonal * self.scale(*x.shape)

    def matrix(self, x: torch.Tensor, blocks: Sequence[LogicalBlock]) -> torch.Tensor:
        """Return the update of a whole matrix, block by block.

        Args:
            x: The matrix, ``(M, N)`` fp32.
            blocks: Its logical blocks; together they cover its rows once.

        Returns:
            The update, ``(M, N)`` fp32.
        """
        if len(blocks) == 1 and blocks[0].num_rows == x.shape[0]:
            return self.block(x)
        update = torch.empty_like(x)
        for block in blocks:
            rows = block_rows(x, block)
            block_rows(update, block).copy_(
                self.block(rows.reshape(block.num_rows, -1)).view(rows.shape)
            )
        return update


def block_rows(x: torch.Tensor, block: LogicalBlock) -> torch.Tensor:
    """View the rows of a block, ``(count, run, N)``, of an ``(M, N)`` matrix."""
    row, column = x.stride()
    return x.as_strided(
        (block.count, block.run, x.shape[1]),
        (block.period * row, row, column),
        x.storage_offset() + block.start * row,
    )
