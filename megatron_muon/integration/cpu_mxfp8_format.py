"""MXFP8 on plain tensors: the bits that Transformer Engine makes of a matrix, made on the CPU.

A matrix is cut in blocks of 32 elements, along its last dimension (row-wise) and along its first
(column-wise). A block has one scale, a power of two, and an E4M3 code for each element::

    amax    = largest absolute value in the block; NaN elements do not count
    scale   = ceil(log2(fl32(amax * fl32(1/448)))) + 127, kept within 0 .. 254      (E8M0)
    element = E4M3(x * 2^(127 - scale)), to nearest even, kept within -448 .. 448

The two directions are quantized from the matrix each: columns rebuilt from row-wise values differ.
Transformer Engine pads its scales for the tensor cores; these are not padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

BLOCK = 32
"""Elements that share a scale."""

MAX_E4M3 = 448.0
E4M3_NAN = 0x7F

Direction = Literal["rowwise", "columnwise"]
"""Along which dimension the blocks lie: the last, or the first."""

_BIAS = 127
_MAX_SCALE = 254
_CHUNK_NUMEL = 1 << 17
"""Elements worked on together; their fp32 copies stay in a core's cache."""

# Tables, since exp2 is not exact to the last bit everywhere.
_TO_UNIT = torch.tensor([2.0 ** (_BIAS - scale) for scale in range(255)] + [float("nan")])
_FROM_UNIT = torch.tensor([2.0 ** (scale - _BIAS) for scale in range(255)] + [float("nan")])
_INVERSE_MAX = torch.tensor(1.0, dtype=torch.float32) / MAX_E4M3


@dataclass(frozen=True, slots=True)
class Planes:
    """The bytes of one quantized matrix.

    Attributes:
        rowwise_codes: (M, N) E4M3 codes of the blocks along the last dimension.
        rowwise_scales: (M, N / 32) E8M0 scales of them.
        columnwise_codes: (M, N) E4M3 codes of the blocks along the first dimension, not transposed.
        columnwise_scales: (M / 32, N) E8M0 scales of them.
    """

    rowwise_codes: torch.Tensor
    rowwise_scales: torch.Tensor
    columnwise_codes: torch.Tensor
    columnwise_scales: torch.Tensor

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> Self:
        """Return the planes of a matrix of zeros.

        Raises:
            ValueError: The matrix cannot be cut in blocks.
        """
        check_shape(shape)
        rows, columns = shape
        shapes = (
            (rows, columns),
            (rows, columns // BLOCK),
            (rows, columns),
            (rows // BLOCK, columns),
        )
        return cls(*(torch.zeros(plane, dtype=torch.uint8) for plane in shapes))

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.rowwise_codes.shape

    def each(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the four planes."""
        return (
            self.rowwise_codes,
            self.rowwise_scales,
            self.columnwise_codes,
            self.columnwise_scales,
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return planes made of each plane in turn."""
        return type(self)(*map(function, self.each()))

    def quantize_(self, matrix: torch.Tensor) -> None:
        """Quantize a matrix in both directions, in place.

        Args:
            matrix: (M, N), of any floating-point dtype that fp32 holds exactly.
        """
        if matrix.shape != self.shape:
            raise ValueError(
                f"a matrix of shape {tuple(matrix.shape)} cannot be quantized into planes of shape "
                f"{tuple(self.shape)}"
            )
        rows, columns = self.shape
        step = max(BLOCK, _CHUNK_NUMEL // columns // BLOCK * BLOCK)
        for start in range(0, rows, step):
            self._quantize_rows_(matrix[start : start + step], start)

    def _quantize_rows_(self, matrix: torch.Tensor, start: int) -> None:
        """Quantize whole blocks of rows, of which ``start`` is the first."""
        rows, columns = matrix.shape
        chunk = matrix.to(torch.float32).contiguous()
        here = slice(start, start + rows)
        _quantize_blocks(
            chunk.view(rows, columns // BLOCK, BLOCK),
            2,
            self.rowwise_codes[here].view(rows, columns // BLOCK, BLOCK),
            self.rowwise_scales[here].unsqueeze(2),
        )
        _quantize_blocks(
            chunk.view(rows // BLOCK, BLOCK, columns),
            1,
            self.columnwise_codes[here].view(rows // BLOCK, BLOCK, columns),
            self.columnwise_scales[start // BLOCK : (start + rows) // BLOCK].unsqueeze(1),
        )

    def dequantize(
        self, direction: Direction = "rowwise", dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Return the values that the codes of one direction stand for."""
        rows, columns = self.shape
        if direction == "rowwise":
            blocks = self.rowwise_codes.view(rows, columns // BLOCK, BLOCK)
            scales = self.rowwise_scales.unsqueeze(2)
        else:
            blocks = self.columnwise_codes.view(rows // BLOCK, BLOCK, columns)
            scales = self.columnwise_scales.unsqueeze(1)
        values = blocks.view(torch.float8_e4m3fn).to(torch.float32)
        return values.mul_(_FROM_UNIT[scales.long()]).to(dtype).view(rows, columns)


def check_shape(shape: Sequence[int]) -> None:
    """Raise unless a matrix of this shape can be cut in blocks both ways.

    Raises:
        ValueError: It is no matrix, or a dimension is not a multiple of 32.
    """
    if len(shape) != 2 or any(size % BLOCK for size in shape):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has no MXFP8 form: it takes a matrix with both "
            f"dimensions a multiple of {BLOCK}"
        )


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 scales of blocks, given the largest absolute value of each.

    Args:
        amax: fp32, no NaN.

    Returns:
        uint8, of the same shape.
    """
    ratio = amax * _INVERSE_MAX
    mantissa, exponent = torch.frexp(ratio)
    # ratio = mantissa * 2^exponent with mantissa in [1/2, 1): only 1/2 is a power of two.
    scale = (exponent + _BIAS - (mantissa == 0.5).to(torch.int32)).clamp_(0, _MAX_SCALE)
    scale.masked_fill_(ratio == 0, 0).masked_fill_(ratio.isinf(), _MAX_SCALE)
    return scale.to(torch.uint8)


def _quantize_blocks(
    values: torch.Tensor, dim: int, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantize fp32 blocks that lie along ``dim`` into codes and scales (of size 1 there)."""
    absolute = values.abs()
    amax = absolute.amax(dim, keepdim=True)
    has_nan = bool(amax.isnan().any())
    if has_nan:
        amax = absolute.masked_fill_(absolute.isnan(), 0).amax(dim, keepdim=True)
    scales.copy_(scale_of(amax))
    scaled = torch.mul(values, _TO_UNIT[scales.long()], out=absolute)
    # Transformer Engine saturates; not every version of torch's cast does.
    codes.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-MAX_E4M3, MAX_E4M3))
    if has_nan:
        codes.masked_fill_(values.isnan(), E4M3_NAN)
