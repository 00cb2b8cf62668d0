"""Newton-Schulz of many blocks: grouped by shape, normalised, and computed by their kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from megatron_muon.orthogonalize.arithmetic import Arithmetic
from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.iteration import Scratch, iterate, segment_lengths
from megatron_muon.orthogonalize.kernels import Kernel, choose_kernel
from megatron_muon.orthogonalize.products import STRIP_ROWS, Products, syrk_applies

BATCH_NBYTES = 1 << 20
"""Bytes of the largest batch, its blocks counted once. The whole of its scratch is two to six times
as large, and a batch that leaves the second-level cache is slower than a smaller one."""

_ALIGNMENT_NBYTES = 64
TINY = torch.finfo(torch.float32).tiny
"""Least number that is divided by in normalisation."""


@torch.no_grad()
def orthogonalize_blocks(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    coefficients: Coefficients,
    arithmetic: Arithmetic,
    *,
    batch_nbytes: int = BATCH_NBYTES,
    use_syrk: bool = False,
) -> None:
    """Write the orthogonalized blocks.

    A block's result has the same bits whatever blocks are given with it and however it lies in
    memory: it is copied to aligned, contiguous memory, short side first, and its kernel depends on
    its shape alone. (Products of the same numbers at another alignment differ in their last bits.)

    Args:
        xs: Blocks, ``(m, n)`` each, fp32 or bf16. Zero gives zero, NaN and infinity give NaN.
        outs: Where the results go, of the same shapes, in any floating-point dtype.
        coefficients: The triples of all steps.
        arithmetic: How products are computed.
        batch_nbytes: Bytes of the largest batch; a single block may be larger.
        use_syrk: Whether to multiply by emerging-optimizers' Triton SYRK where it applies.
    """
    groups: dict[tuple[int, int, torch.device], list[int]] = {}
    for i, x in enumerate(xs):
        if x.numel():
            groups.setdefault((min(x.shape), max(x.shape), x.device), []).append(i)
    for (short, long, device), members in groups.items():
        kernel = choose_kernel(short, long, arithmetic, device.type)
        fitting = max(1, batch_nbytes // (short * long * arithmetic.dtype.itemsize))
        count = min(fitting, len(members)) if kernel.batched else 1
        workspace = _Workspace((count, short, long), kernel, arithmetic, device, use_syrk)
        with _one_thread() if kernel.batched else nullcontext():
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                workspace.run([xs[i] for i in batch], [outs[i] for i in batch], coefficients)
        del workspace  # before that of the next shape is made


def normalize(x: torch.Tensor) -> None:
    """Divide each block by its Frobenius norm, in place; zero stays zero.

    Dividing by the largest magnitude first keeps squares from overflowing and underflowing. After
    it the norm of a nonzero block is at least 1, or 1e-7 if all its numbers were subnormal, so that
    neither bound below changes a result.

    Args:
        x: Blocks, ``([B,] a, b)`` fp32.
    """
    sides = (-2, -1)
    largest = torch.maximum(x.amax(sides, keepdim=True), x.amin(sides, keepdim=True).neg_())
    x.div_(largest.clamp_min_(TINY))
    row_norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    x.div_(torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True).clamp_min_(TINY))


class _Workspace:
    """Memory for blocks of one shape, and the way through it."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        kernel: Kernel,
        arithmetic: Arithmetic,
        device: torch.device,
        use_syrk: bool,
    ) -> None:
        """Take the memory.

        Args:
            shape: Number of blocks, their shorter and their longer side.
            kernel: Their kernel.
            arithmetic: How products are computed.
            device: Where they are computed.
            use_syrk: Whether to use the Triton SYRK where it applies.
        """
        count, short, long = shape
        dtype = arithmetic.dtype
        self._batched = kernel.batched
        self._growth = arithmetic.largest_growth if kernel.form == "gram" else 0.0
        self._source = aligned(shape, torch.float32, device)
        self._x = self._source if dtype == torch.float32 else aligned(shape, dtype, device)
        self._scratch = Scratch(
            aligned(shape, dtype, device),
            *(aligned((count, short, short), dtype, device) for _ in range(4)),
        )
        self._products = Products(
            strip=torch.empty(STRIP_ROWS * short, dtype=dtype, device=device)
            if kernel.symmetric == "strips"
            else None,
            rounding=torch.empty(count * short * long, dtype=torch.bfloat16, device=device)
            if arithmetic.rounds
            else None,
            use_syrk=use_syrk and syrk_applies(short, long, dtype, device),
        )

    def run(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], coefficients: Coefficients
    ) -> None:
        """Orthogonalize at most as many blocks as there is room for, one if not batched."""
        part = slice(len(xs)) if self._batched else 0
        source, x = self._source[part], self._x[part]
        for block, place in zip(xs, self._each(source), strict=True):
            place.copy_(_short_first(block))
        normalize(source)
        if x.dtype != source.dtype:
            x.copy_(source)
        self._products.round_(x)
        lengths = segment_lengths(coefficients, self._growth)
        result = iterate(x, coefficients, lengths, self._scratch.part(part), self._products)
        for out, place in zip(outs, self._each(result), strict=True):
            _short_first(out).copy_(place)

    def _each(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.unbind() if self._batched else (x,)


def _short_first(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.shape[0] > x.shape[1] else x


def aligned(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for blocks, ``(B, a, b)``, each of which begins aligned."""
    count, rows, columns = shape
    step = _ALIGNMENT_NBYTES // dtype.itemsize
    stride = -(-rows * columns // step) * step
    memory = torch.empty(count * stride, dtype=dtype, device=device)
    return memory.as_strided(shape, (stride, columns, 1))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: several share out a batch otherwise than a single product."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
