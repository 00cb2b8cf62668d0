"""Newton-Schulz of many blocks: grouped by shape, normalised, and computed by their kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_muon.orthogonalize.arithmetic import Arithmetic
from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.eigenvectors import diagonalize
from megatron_muon.orthogonalize.iteration import (
    Scratch,
    column_width,
    iterate,
    segment_lengths,
)
from megatron_muon.orthogonalize.kernels import Kernel, KernelName, choose_kernel
from megatron_muon.orthogonalize.products import (
    ROUNDING_NUMEL,
    STRIP_ROWS,
    Products,
    Symmetric,
    in_strips,
    syrk_applies,
)

BATCH_NBYTES = 1 << 20
"""Bytes of the largest batch, its blocks counted once. Its whole scratch is two to four times as
large."""

_LEAST_NUMEL_IN_OUT = 1 << 16
"""Elements from which a block is computed in the memory of its result. Views are then made for each
block, which takes too long for smaller ones."""

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
    lender: Lender | None = None,
) -> None:
    """Write the orthogonalized blocks.

    A block's result has the same bits whatever blocks are given with it and however it lies in
    memory: it is computed in aligned, contiguous memory, and how depends on its shape alone.
    (Products of the same numbers at another alignment differ in their last bits.)

    The memory of a result in fp32 is worked in if it lies so itself; :class:`_Workspace` says how.

    Args:
        xs: Blocks, ``(m, n)`` each, fp32 or bf16. Zero gives zero, NaN and infinity give NaN.
        outs: Where the results go, of the same shapes, in any floating-point dtype. Each may share
            memory with its own block, not with others.
        coefficients: The triples of all steps.
        arithmetic: How products are computed.
        batch_nbytes: Bytes of the largest batch; a single block may be larger.
        use_syrk: Whether to multiply by emerging-optimizers' Triton SYRK where it applies.
        kernel_name: As in :func:`.kernels.choose_kernel`.
        lender: Where scratch comes from, ``None`` for memory that is kept between calls.
    """
    groups: dict[tuple[int, int, torch.device], list[int]] = {}
    for i, x in enumerate(xs):
        if x.numel():
            groups.setdefault((min(x.shape), max(x.shape), x.device), []).append(i)
    for (short, long, device), members in groups.items():
        kernel = choose_kernel(short, long, arithmetic, device.type, kernel_name)
        growth = arithmetic.largest_growth if kernel.form == "gram" else 0.0
        task = _Task(
            coefficients,
            segment_lengths(coefficients, growth),
            kernel,
            arithmetic,
            device,
            use_syrk=use_syrk and syrk_applies(short, long, arithmetic.dtype, device),
            lender=_KEPT if lender is None else lender,
        )
        if not kernel.batched and short * long >= _LEAST_NUMEL_IN_OUT:
            for i in members:
                _in_its_result(xs[i], outs[i], task)
        else:
            fitting = max(1, batch_nbytes // (short * long * arithmetic.dtype.itemsize))
            count = min(fitting, len(members)) if kernel.batched else 1
            with _one_thread() if kernel.batched else nullcontext():
                _in_batches(
                    [xs[i] for i in members], [outs[i] for i in members], task,
                    (count, short, long),
                )  # fmt: skip


def _in_its_result(x: torch.Tensor, out: torch.Tensor, task: _Task) -> None:
    """Orthogonalize a block in the memory of its result, if that lies so."""
    memory = _memory_of(out) if _may_be_worked_in(out, x) else None
    is_tall = x.shape[0] > x.shape[1]
    workspace = _Workspace((1, min(x.shape), max(x.shape)), task, is_tall, memory)
    try:
        workspace.run([x], [out])
    finally:
        task.lender.give_back(workspace.memory)


def _in_batches(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    task: _Task,
    shape: tuple[int, int, int],
) -> None:
    """Orthogonalize blocks, as many at a time as ``shape`` says first."""
    workspace = _Workspace(shape, task)
    try:
        for first in range(0, len(xs), shape[0]):
            batch = slice(first, first + shape[0])
            workspace.run(xs[batch], outs[batch])
    finally:
        task.lender.give_back(workspace.memory)


def give_up_scratch() -> None:
    """Give up the memory that is kept for the next call; that call takes new memory."""
    _KEPT.pieces.clear()


def normalize(x: torch.Tensor) -> None:
    """Divide each block by its Frobenius norm, in place; zero stays zero.

    Blocks whose squares could overflow or underflow are multiplied by a power of two first, which
    changes no digit of a normal number: its largest magnitude is then at least 1/2 and below 1, or
    1e-7 if all its numbers were subnormal. On a CPU, where asking is free, this is left out if no
    block needs it.

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


@dataclass(frozen=True, slots=True)
class _Task:
    """What is done to blocks of a shape.

    Attributes:
        coefficients: The triples of all steps.
        lengths: Steps of each segment.
        kernel: How the blocks are computed.
        arithmetic: How products are computed.
        device: Where.
        use_syrk: Whether the Triton SYRK multiplies.
        lender: Where scratch comes from.
    """

    coefficients: Coefficients
    lengths: Sequence[int]
    kernel: Kernel
    arithmetic: Arithmetic
    device: torch.device
    use_syrk: bool
    lender: Lender

    @property
    def num_squares(self) -> int:
        """How many square matrices the kernel works with."""
        return 4 if self.kernel.form == "eigh" or max(self.lengths) > 1 else 2


class _Workspace:
    """Memory for blocks of one shape, and the way through it.

    A block goes from ``source`` (fp32, where it is normalised) to ``narrow`` (the dtype it is
    multiplied in) to ``x`` (short side first, where all steps are taken), and back to ``narrow``.
    Transposing between equal dtypes is twice as fast as between others. There are two pieces of
    memory: the source's, which may be the caller's, and another one. While the steps are taken, all
    of both that ``x`` does not need is free for the square matrices, see :class:`.Scratch`; those
    that find no room there, and all of a wide block in fp32, go to the end of the other piece.
    Where what lies, with bytes an element:

    ===========  =================  =============
    block        source's piece     the other one
    ===========  =================  =============
    fp32, wide   all three (4)
    fp32, tall   source, narrow (4) x (4)
    bf16, wide   source (4)         narrow, x (2)
    bf16, tall   source (4), x (2)  narrow (2)
    ===========  =================  =============
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        task: _Task,
        is_tall: bool = False,
        source_memory: torch.Tensor | None = None,
    ) -> None:
        """Take the memory.

        Args:
            shape: Number of blocks, their shorter and their longer side.
            task: What is done to them.
            is_tall: Whether they are taken and given long side first; otherwise short side first.
            source_memory: Memory for the source, flat and aligned, or ``None`` for new memory.
        """
        self._task = task
        self._is_tall = is_tall
        count, short, long = shape
        dtype, in_parts = task.arithmetic.dtype, task.kernel.symmetric == "strips"
        natural = (count, long, short) if is_tall else shape

        # First where all lies, in bytes: the source's piece from 0, the other one after it.
        other = _nbytes(natural, torch.float32)
        narrow_at = 0 if dtype == torch.float32 else other
        x_at = other - narrow_at if is_tall else narrow_at  # a transpose needs other memory
        nbytes = _nbytes(shape, dtype)
        end = other + nbytes * (other in (narrow_at, x_at))
        in_source = _Stretch(nbytes * (x_at == 0), 4 * count * short * long)  # as much is given
        in_narrow = _Stretch(other + nbytes * (x_at == other), end)
        free = (in_source, in_narrow, _Stretch(end, sys.maxsize))

        square = (count, short, short)
        columns = (count, short, column_width(short, long, task.device.type))
        packed = (1, 1, STRIP_ROWS * short * in_parts)
        rounding = min(count * short * long, max(ROUNDING_NUMEL, long)) * task.arithmetic.rounds
        gram_at = _place(max(_nbytes(square, dtype), _nbytes(columns, dtype)), free)
        squares_at = [_place(_nbytes(square, dtype), free) for _ in range(task.num_squares - 1)]
        packed_at = _place(_nbytes(packed, dtype), free)
        rounding_at = _place(_nbytes((1, 1, rounding), torch.bfloat16), free)

        given = 0 if source_memory is None else other
        self.memory = task.lender.take(free[-1].start - given, torch.uint8, task.device)

        def cut(at: int, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
            if source_memory is not None and at < given:
                tensor = _cut(source_memory, at, shape, dtype)
            else:
                tensor = _cut(self.memory, at - given, shape, dtype)
            return tensor if task.kernel.batched else tensor[0]

        self._source = cut(0, natural, torch.float32)
        self._narrow = self._source if narrow_at == 0 else cut(narrow_at, natural, dtype)
        self._x = cut(x_at, shape, dtype) if is_tall else self._narrow
        strip = cut(packed_at, packed, dtype).view(-1)
        wholes = [cut(at, square, dtype) for at in (gram_at, *squares_at)]
        squares = [in_strips(m, strip) if in_parts else Symmetric(m) for m in wholes]
        gram, polynomial, *others = squares
        factor, product = others or (polynomial, polynomial)
        self._scratch = Scratch(gram, polynomial, factor, product, cut(gram_at, columns, dtype))
        flat = cut(rounding_at, (1, 1, rounding), torch.bfloat16).view(-1) if rounding else None
        self._products = Products(rounding=flat, use_syrk=task.use_syrk)

    def run(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Orthogonalize at most as many blocks as there is room for, one if not batched."""
        task, products = self._task, self._products
        source, narrow, x, scratch = self._source, self._narrow, self._x, replace(self._scratch)
        if task.kernel.batched:
            part = slice(len(xs))
            source, narrow, x = source[part], narrow[part], x[part]
            scratch = scratch.part(part)
        if source.data_ptr() != xs[0].data_ptr():
            self._load([self._turned(block) for block in xs], source, narrow)
        normalize(source)
        if narrow.dtype != source.dtype:
            narrow.copy_(source)
        if self._is_tall:
            x.copy_(narrow.mT)
        products.round_(x)
        if task.kernel.form == "eigh":
            diagonalize(x, task.coefficients, scratch, products)
        else:
            iterate(x, task.coefficients, task.lengths, scratch, products)
        if self._is_tall:
            narrow.copy_(x.mT)
        if narrow.data_ptr() != outs[0].data_ptr():
            torch._foreach_copy_([self._turned(out) for out in outs], self._each(narrow))

    def _load(self, xs: list[torch.Tensor], source: torch.Tensor, narrow: torch.Tensor) -> None:
        """Copy blocks to the source.

        Stacking many takes a third of the time, but only where no dtype is converted.
        """
        dtypes = {x.dtype for x in xs} if self._task.kernel.batched else set()
        if dtypes == {source.dtype}:
            torch.stack(xs, out=source)
        elif dtypes == {narrow.dtype}:
            source.copy_(torch.stack(xs, out=narrow))
        else:
            torch._foreach_copy_(self._each(source), xs)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT if x.shape[0] > x.shape[1] and not self._is_tall else x

    def _each(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.unbind()) if self._task.kernel.batched else (x,)


@dataclass(slots=True)
class _Stretch:
    """Memory from one byte to another that is still free."""

    start: int
    end: int


def _place(nbytes: int, free: Sequence[_Stretch]) -> int:
    """Return the first byte of a place in the first stretch that has room, and take it."""
    stretch = next(each for each in free if each.start + nbytes <= each.end)
    stretch.start += nbytes
    return stretch.start - nbytes


def _cut(
    memory: torch.Tensor, at: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    """View blocks ``(B, a, b)``, each of which begins aligned, from a byte of flat memory."""
    step = _nbytes((1, *shape[1:]), dtype) // dtype.itemsize
    flat = memory[at : at + _nbytes(shape, dtype)].view(dtype)
    return flat.as_strided(shape, (step, shape[2], 1))


def _may_be_worked_in(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the memory of a result can hold the source of its block ``x``."""
    if not (
        out.dtype == torch.float32
        and out.device == x.device
        and out.is_contiguous()
        and out.data_ptr() % _ALIGNMENT_NBYTES == 0
    ):
        return False
    (first, end), (x_first, x_end) = _span(out), _span(x)
    is_same = first == x_first and x.dtype == out.dtype and x.is_contiguous()
    return is_same or x_end <= first or end <= x_first


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and that after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _memory_of(x: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as bytes."""
    return x.detach().view(-1).view(torch.uint8)


class Lender(Protocol):
    """Lends flat memory, such as a :class:`megatron_muon.collectives.arena.Arena`."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lend a flat tensor of so many elements or more; what is in it means nothing."""

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back what :meth:`take` lent."""


class _Kept:
    """Keeps the piece last given back for the next call, on a CPU.

    The C library would return a large one to the system, which has to clear each of its pages
    again: 3 to 7 % of a call's time.
    """

    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = None
        if device.type == "cpu":
            with suppress(IndexError):  # none, or another thread has taken it
                kept = self.pieces.pop()
        if kept is None or kept.numel() < numel or kept.dtype != dtype:
            kept = None  # before the larger one is made
            kept = torch.empty(numel, dtype=dtype, device=device)
        return kept

    def give_back(self, tensor: torch.Tensor) -> None:
        is_small = tensor.device.type == "cpu" and tensor.nbytes <= KEPT_NBYTES
        if is_small and not tensor.is_inference():  # which no later call could write to
            self.pieces[:] = [tensor]


_KEPT = _Kept()


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
