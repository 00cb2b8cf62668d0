"""Newton-Schulz of many blocks: grouped by shape, normalised, and computed by their kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch

from megatron_muon.orthogonalize.arithmetic import Arithmetic
from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.eigenvectors import diagonalize
from megatron_muon.orthogonalize.iteration import Scratch, iterate, segment_lengths
from megatron_muon.orthogonalize.kernels import Kernel, KernelName, choose_kernel
from megatron_muon.orthogonalize.products import (
    STRIP_ROWS,
    Products,
    Symmetric,
    in_strips,
    syrk_applies,
)

BATCH_NBYTES = 1 << 20
"""Bytes of the largest batch, its blocks counted once. The whole of its scratch is two to six times
as large, and a batch that leaves the second-level cache is slower than a smaller one."""

KEPT_NBYTES = 64 << 20
"""Bytes of the largest scratch on a CPU that is kept between calls."""

_ALIGNMENT_NBYTES = 64
TINY = torch.finfo(torch.float32).tiny
"""Least number that is divided by in normalisation."""
_LEAST, _LARGEST = 2.0**-30, 2.0**60
"""Norms between which no square that matters is lost."""


@torch.no_grad()
def orthogonalize_blocks(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    coefficients: Coefficients,
    arithmetic: Arithmetic,
    *,
    batch_nbytes: int = BATCH_NBYTES,
    use_syrk: bool = False,
    kernel_name: KernelName = "auto",
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
        kernel_name: As in :func:`.kernels.choose_kernel`.
    """
    groups: dict[tuple[int, int, torch.device], list[int]] = {}
    for i, x in enumerate(xs):
        if x.numel():
            groups.setdefault((min(x.shape), max(x.shape), x.device), []).append(i)
    for (short, long, device), members in groups.items():
        kernel = choose_kernel(short, long, arithmetic, device.type, kernel_name)
        fitting = max(1, batch_nbytes // (short * long * arithmetic.dtype.itemsize))
        count = min(fitting, len(members)) if kernel.batched else 1
        workspace = _Workspace((count, short, long), kernel, arithmetic, device, use_syrk)
        with _one_thread() if kernel.batched else nullcontext():
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                workspace.run([xs[i] for i in batch], [outs[i] for i in batch], coefficients)
        workspace.memory.give_back()
        del workspace  # before that of the next shape is made


def give_up_scratch() -> None:
    """Give up the memory that is kept for the next call; that call takes new memory."""
    _Memory.kept.clear()


def normalize(x: torch.Tensor) -> None:
    """Divide each block by its Frobenius norm, in place; zero stays zero.

    Blocks whose squares could overflow or underflow are multiplied by a power of two first, which
    changes no digit: its largest magnitude is then at least 1/2 and below 1, or 1e-7 if all its
    numbers were subnormal. On a CPU, where asking is free, this is left out if no block needs it.

    Args:
        x: Blocks, ``([B,] a, b)`` fp32.
    """
    norms = _frobenius(x)
    if x.device.type != "cpu" or not bool(((norms > _LEAST) & (norms < _LARGEST)).all()):
        sides = (-2, -1)
        largest = torch.maximum(x.amax(sides, keepdim=True), x.amin(sides, keepdim=True).neg_())
        mantissa = torch.frexp(largest).mantissa  # infinite or NaN if `largest` is: then all is NaN
        x.mul_(mantissa.div_(largest.clamp_min_(TINY)))
        norms = _frobenius(x)
    x.div_(norms.clamp_min_(TINY))


def _frobenius(x: torch.Tensor) -> torch.Tensor:
    row_norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norms: torch.Tensor = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    return norms


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
        dtype, square = arithmetic.dtype, (count, short, short)
        in_parts = kernel.symmetric == "strips"
        packed, rounding = STRIP_ROWS * short * in_parts, count * short * long * arithmetic.rounds
        work = [(shape, dtype), *[(square, dtype)] * 4]
        work += [((1, 1, packed), dtype), ((1, 1, rounding), torch.bfloat16)]
        # A block is normalised in fp32 where the iteration works only afterwards.
        source = (shape, torch.float32)
        room = max(_nbytes(*source), sum(_nbytes(*tensor) for tensor in work))
        self.memory = memory = _Memory(_nbytes(shape, dtype) + room, device)
        x = memory.take(shape, dtype)
        sources = x if dtype == torch.float32 else memory.view(*source)
        taken = [memory.take(*tensor) for tensor in work]
        if not kernel.batched:
            x, sources, *taken = [tensor[0] for tensor in (x, sources, *taken)]
        other, *squares, strip, flat = taken
        self._kernel, self._x, self._source = kernel, x, sources
        self._growth = arithmetic.largest_growth if kernel.form == "gram" else 0.0
        self._scratch = Scratch(
            other,
            *(in_strips(m, strip.view(-1)) if in_parts else Symmetric(m) for m in squares),
        )
        self._products = Products(
            rounding=flat.view(-1) if arithmetic.rounds else None,
            use_syrk=use_syrk and syrk_applies(short, long, dtype, device),
        )

    def run(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], coefficients: Coefficients
    ) -> None:
        """Orthogonalize at most as many blocks as there is room for, one if not batched."""
        source, x, scratch = self._source, self._x, replace(self._scratch)
        if self._kernel.batched:
            part = slice(len(xs))
            source, x, scratch = source[part], x[part], scratch.part(part)
        torch._foreach_copy_(self._each(source), [_short_first(block) for block in xs])
        normalize(source)
        if x.dtype != source.dtype:
            x.copy_(source)
        self._products.round_(x)
        if self._kernel.form == "eigh":
            result = diagonalize(x, coefficients, scratch, self._products)
        else:
            lengths = segment_lengths(coefficients, self._growth)
            result = iterate(x, coefficients, lengths, scratch, self._products)
        torch._foreach_copy_([_short_first(out) for out in outs], self._each(result))

    def _each(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.unbind()) if self._kernel.batched else (x,)


def _short_first(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.shape[0] > x.shape[1] else x


class _Memory:
    """Memory that tensors are cut from.

    On a CPU the piece last given back is kept for the next call. The C library would return a large
    one to the system, which has to clear each of its pages again: 3 to 7 % of a call's time.
    """

    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self, nbytes: int, device: torch.device) -> None:
        kept = self.kept.pop() if self.kept and device.type == "cpu" else None
        if kept is None or kept.numel() < nbytes:
            kept = None  # before the larger one is made
            kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._flat = kept
        self._used = 0

    def give_back(self) -> None:
        """Keep the piece for the next call if it is small; nothing cut from it may be in use."""
        flat = self._flat
        is_small = flat.device.type == "cpu" and flat.numel() <= KEPT_NBYTES
        if is_small and not flat.is_inference():  # which no later call could write to
            self.kept[:] = [flat]

    def take(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for blocks, ``(B, a, b)``, each of which begins aligned."""
        tensor = self.view(shape, dtype)
        self._used += _nbytes(shape, dtype)
        return tensor

    def view(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return what :meth:`take` would return, and leave it to what is taken next."""
        step = _nbytes((1, *shape[1:]), dtype) // dtype.itemsize
        flat = self._flat[self._used : self._used + _nbytes(shape, dtype)].view(dtype)
        return flat.as_strided(shape, (step, shape[2], 1))


def _nbytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    count, rows, columns = shape
    return count * -(-rows * columns * dtype.itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


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
