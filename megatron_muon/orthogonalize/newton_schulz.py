"""Newton-Schulz with the settings of a run: coefficients, precision and the size of the update.

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

from megatron_muon.orthogonalize.arithmetic import choose_arithmetic, products_in
from megatron_muon.orthogonalize.blocks import BATCH_NBYTES, Lender, orthogonalize_blocks
from megatron_muon.orthogonalize.coefficients import Coefficients, coefficients
from megatron_muon.orthogonalize.kernels import KernelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """How a block becomes an update.

    Attributes:
        num_steps: Newton-Schulz steps.
        coefficient_type: Coefficient set, by emerging-optimizers' names.
        scale_mode: Rule for the update's size from the block's whole shape.
        extra_scale_factor: Factor on top of it.
        matmul_precision: ``medium`` multiplies in bf16, ``high`` and ``highest`` in fp32.
        batch_nbytes: Bytes of the largest batch of blocks that are multiplied together.
        use_syrk: Whether bf16 products ``x x^T`` on CUDA go through emerging-optimizers' Triton
            SYRK where it applies. It picks its tiles by timing them, in each process for itself,
            so ranks that compute the same block may find other bits.
        kernel: ``auto`` chooses by :func:`.kernels.choose_kernel`, ``exact`` is
            emerging-optimizers' own ``newton_schulz``, block by block, and the others are forms of
            :class:`.kernels.Kernel`.
    """

    num_steps: int
    coefficient_type: str
    scale_mode: str
    extra_scale_factor: float
    matmul_precision: str
    batch_nbytes: int = BATCH_NBYTES
    use_syrk: bool = False
    kernel: KernelName = "auto"

    def scale(self, rows: int, columns: int) -> float:
        """Factor of the update of a block of shape ``(rows, columns)``."""
        return self.extra_scale_factor * self._scale_of_mode(rows, columns)

    def _scale_of_mode(self, rows: int, columns: int) -> float:
        return float(get_muon_scale_factor(rows, columns, mode=self.scale_mode))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled update, ``(m, n)`` fp32, of one block ``x`` of shape ``(m, n)``."""
        return self.blocks([x])[0]

    def blocks(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        lender: Lender | None = None,
    ) -> Sequence[torch.Tensor]:
        """Return the scaled updates of many blocks: bit for bit those of :meth:`block`.

        Blocks of equal shapes are computed together where that is faster.

        Args:
            xs: Blocks, ``(m, n)`` each, fp32 or bf16, of any shapes.
            outs: Where the updates go, fp32; each may be its block. ``None`` makes new tensors.
            lender: Where scratch comes from, ``None`` for memory that is kept between calls.

        Returns:
            The updates, fp32, in the same order.
        """
        updates = outs
        if updates is None:
            updates = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in xs]
        steps = coefficients(self.coefficient_type, self.num_steps)
        if self.kernel == "exact":
            _orthogonalize_exactly(xs, updates, steps, self.matmul_precision)
            for update in updates:
                if update.numel():  # Megatron multiplies twice, and so rounds twice
                    update.mul_(self._scale_of_mode(*update.shape)).mul_(self.extra_scale_factor)
            return updates
        _orthogonalize_into(
            xs, updates, steps, self.matmul_precision, self.batch_nbytes, self.use_syrk,
            self.kernel, lender,
        )  # fmt: skip
        scaled = [(u, self.scale(*u.shape)) for u in updates if u.numel()]
        scaled = [(update, scale) for update, scale in scaled if scale != 1.0]
        if scaled:
            torch._foreach_mul_([update for update, _ in scaled], [scale for _, scale in scaled])
        return updates


def orthogonalize(
    x: torch.Tensor, steps: Sequence[tuple[float, float, float]], precision: str
) -> torch.Tensor:
    """Return the orthogonalized block, not scaled.

    Args:
        x: The block, ``(m, n)`` fp32 or bf16.
        steps: One ``(a, b, c)`` for each step.
        precision: As in :attr:`Orthogonalization.matmul_precision`.

    Returns:
        A new tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` has another number of dimensions or another dtype.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _orthogonalize_into([x], [out], tuple(steps), precision)
    return out


def _orthogonalize_into(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    steps: Coefficients,
    precision: str,
    batch_nbytes: int = BATCH_NBYTES,
    use_syrk: bool = False,
    kernel: KernelName = "auto",
    lender: Lender | None = None,
) -> None:
    _check(xs)
    device_types = {x.device.type for x in xs}
    with products_in(precision):
        for device_type in sorted(device_types):
            members = [i for i, x in enumerate(xs) if x.device.type == device_type]
            orthogonalize_blocks(
                [xs[i] for i in members],
                [outs[i] for i in members],
                steps,
                choose_arithmetic(precision, device_type),
                batch_nbytes=batch_nbytes,
                use_syrk=use_syrk,
                kernel_name=kernel,
                lender=lender,
            )


@torch.no_grad()
def _orthogonalize_exactly(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], steps: Coefficients, precision: str
) -> None:
    """Orthogonalize as Megatron-Core does: each block in fp32, contiguous, by its library."""
    _check(xs)
    with fp32_matmul_precision(precision):
        for x, out in zip(xs, outs, strict=True):
            if x.numel():
                block = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                out.copy_(newton_schulz(block, len(steps), "custom", list(steps)))


def _check(xs: Sequence[torch.Tensor]) -> None:
    for x in xs:
        if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"Newton-Schulz takes a matrix in fp32 or bf16, got shape {tuple(x.shape)} in "
                f"{x.dtype}. Convert it first."
            )
