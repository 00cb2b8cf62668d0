"""The MXFP8 bits of the CPU are those of Transformer Engine's rule, for every input there is.

The oracle is written from the definition of E4M3 and from the integer form of the scale in
Transformer Engine's ``ptx.cuh``, in numpy. The quantizer was also compared with NVIDIA's host
functions in ``cuda_fp8.h``: 0 of 16,711,680 casts (every bf16 at every scale) and 0 of 20 million
fp32 scales differ. Of the wrong rules below, the scales differ in 249 to 15,283 of 32,641 and the
codes in 1,016 to 5,840 of 75,776.
"""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_muon.integration import cpu_mxfp8_format
from megatron_muon.integration.cpu_mxfp8_format import BLOCK, Planes, scale_of

CODES = np.arange(256, dtype=np.uint8)
MAX_SECONDS = 1.5
"""For 4096 x 4096 in both directions on one core; 0.1 was measured."""


def e4m3_values():
    """What the 256 codes stand for, by the definition of the format."""
    exponent, mantissa = (CODES >> 3 & 15).astype(int), (CODES & 7).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[(CODES & 0x7F) == 0x7F] = np.nan
    return np.where(CODES & 0x80, -values, values)


def e4m3_codes(values):
    """The nearest code of each float64, ties to the even one, saturated; NaN is 0x7F."""
    table = e4m3_values()[:0x7F]
    magnitude = np.minimum(np.abs(values), table[-1])
    above = np.clip(np.searchsorted(table, magnitude), 1, 0x7E)
    middle = (table[above - 1] + table[above]) / 2
    takes_above = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    codes = np.where(takes_above, above, above - 1).astype(np.uint8)
    codes = np.where(np.signbit(values), codes | 0x80, codes).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def e8m0_scales(amax):
    """Transformer Engine's rule on the bits of fl32(amax * fl32(1/448)); ``amax`` is fp32."""
    with np.errstate(under="ignore", over="ignore"):
        ratio = amax.astype(np.float32) * (np.float32(1) / np.float32(448))
    bits = ratio.view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.minimum(exponent + rounds_up, 254).astype(np.uint8)


def every_bf16():
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def table_of_scale(scale):
    """A matrix with every bf16 that can be in a block of this scale, next to the largest one.

    Each block starts with 448 times the power of two, so that all have the scale.
    """
    top = torch.tensor(448.0 * 2.0 ** (scale - 127)).bfloat16()
    values = every_bf16()
    values = values[(values.abs() <= top) | values.isnan()]
    num_blocks = -(-len(values) // (BLOCK - 1))
    num_rows = -(-num_blocks // BLOCK) * BLOCK
    matrix = top.repeat(num_rows, BLOCK)
    body = matrix[:, 1:].contiguous().view(-1)
    body[: len(values)] = values
    matrix[:, 1:] = body.view(num_rows, BLOCK - 1)
    return matrix


def quantized(matrix):
    planes = Planes.zeros(matrix.shape)
    planes.quantize_(matrix)
    return planes


def wrong_codes_of_table(scales):
    """Codes and scales, of either direction, that are not the oracle's; and how many there are."""
    wrong = total = 0
    for scale in scales:
        matrix = table_of_scale(scale)
        with np.errstate(invalid="ignore"):
            expected = e4m3_codes(matrix.double().numpy() * 2.0 ** (127 - scale))
        for planes, codes in (
            (quantized(matrix), ("rowwise_codes", "rowwise_scales")),
            (quantized(matrix.t()), ("columnwise_codes", "columnwise_scales")),
        ):
            found, found_scales = (getattr(planes, name).numpy() for name in codes)
            found = found if codes[0] == "rowwise_codes" else found.T
            wrong += int((found != expected).sum()) + int((found_scales != scale).sum())
            total += found.size
    return wrong, total


ALL_SCALES = range(247)
"""Those of finite bf16 blocks: 448 * 2^(246 - 127) is the largest such power times 448."""


def test_every_bf16_in_every_block_it_can_be_in_has_its_code():
    wrong, total = wrong_codes_of_table(ALL_SCALES)
    assert wrong == 0
    assert total > 1.6e7


def wrong_scales(function):
    """How many of the scales of every bf16 amax, inf among them, are not the oracle's."""
    amax = every_bf16()[:0x7F81].float()
    return int((function(amax).numpy() != e8m0_scales(amax.numpy())).sum())


def test_every_bf16_amax_has_its_scale():
    assert wrong_scales(scale_of) == 0


def test_the_rule_is_the_ceiling_of_the_logarithm():
    amax = every_bf16()[:0x7F80].double().numpy()
    amax = amax[amax > 2.0**-116]
    exact = np.ceil(np.log2(amax / 448)) + 127
    assert (e8m0_scales(amax) == exact).all()


def test_fp32_amaxes_near_a_power_of_two_and_anywhere_have_their_scales():
    steps = torch.arange(-2000, 2000)
    tops = torch.tensor([448.0 * 2.0**k for k in range(-130, 119)], dtype=torch.float32)
    near = (tops.view(torch.int32)[:, None] + steps).clamp(0, 0x7F800000).int().view(torch.float32)
    anywhere = torch.randint(0, 0x7F800001, (500_000,), generator=torch.Generator().manual_seed(1))
    for amax in (near.flatten(), anywhere.int().view(torch.float32)):
        assert (scale_of(amax).numpy() == e8m0_scales(amax.numpy())).all()


# ------------------------------------------------------------------------------------------------
# What the checks above notice
# ------------------------------------------------------------------------------------------------


def rounded_down(amax):
    """The example of the OCP specification: 2^(floor(log2 amax) - 8)."""
    exponent = torch.frexp(amax)[1] - 1 - 8 + 127
    return exponent.clamp(0, 254).masked_fill(amax == 0, 0).to(torch.uint8)


def rounded_to_nearest(amax):
    exponent = torch.log2(amax / 448).round().add(127).nan_to_num(0, posinf=254, neginf=0)
    return exponent.clamp(0, 254).to(torch.uint8)


def a_power_of_two_rounded_up(amax):
    return (torch.frexp(amax * (1 / 448))[1] + 127).clamp(0, 254).to(torch.uint8)


@pytest.mark.parametrize("function", [rounded_down, rounded_to_nearest, a_power_of_two_rounded_up])
def test_another_scale_is_noticed(function):
    assert wrong_scales(function) > 100


def tiny_blocks_unscaled():
    """As in torchao: blocks of scale 0 are cast as they are."""
    table = cpu_mxfp8_format._TO_UNIT.clone()
    table[0] = 1.0
    return mock.patch.object(cpu_mxfp8_format, "_TO_UNIT", table)


def sign_of_nan_kept():
    return mock.patch.object(cpu_mxfp8_format, "E4M3_NAN", 0xFF)


def rounded_twice():
    """The values are rounded to E5M2 on their way."""
    mul = torch.mul
    return mock.patch.object(
        torch, "mul", lambda *args, **kwargs: mul(*args, **kwargs).to(torch.float8_e5m2).float()
    )


@pytest.mark.parametrize("broken", [tiny_blocks_unscaled, sign_of_nan_kept, rounded_twice])
def test_another_cast_is_noticed(broken):
    with broken():
        assert wrong_codes_of_table((0, 120))[0] > 500


# ------------------------------------------------------------------------------------------------
# Blocks of their own kind
# ------------------------------------------------------------------------------------------------


def block(*values, rest=0.0, dtype=torch.bfloat16):
    """A matrix whose first row starts with these values; all else is ``rest``."""
    matrix = torch.full((BLOCK, BLOCK), rest, dtype=dtype)
    matrix[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return matrix


def first(matrix):
    """Code and scale of the first element, row-wise, and that column-wise they are the same."""
    planes, turned = quantized(matrix), quantized(matrix.t())
    assert torch.equal(planes.rowwise_codes, turned.columnwise_codes.t())
    assert torch.equal(planes.rowwise_scales, turned.columnwise_scales.t())
    return planes.rowwise_codes[0].tolist(), int(planes.rowwise_scales[0, 0])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "codes", "scale"),
    [
        ((0.0, -0.0), (0x00, 0x80), 0),
        ((1.0,), (0x78,), 119),  # 1/448 rounds up to 2^-8; 1 is 256 * 2^-8
        ((448.0, -448.0), (0x7E, 0xFE), 127),
        ((450.0,), (0x76,), 128),  # the next bf16: 225 is 224 in E4M3
        ((NAN, 1.0), (0x7F, 0x78), 119),
        ((-NAN, 1.0), (0x7F, 0x78), 119),
        ((NAN,), (0x7F,), 0),
        ((INF, -INF, 1.0, NAN), (0x7E, 0xFE, 0x00, 0x7F), 254),
        ((2.0**-133,), (0x08,), 0),  # the least bf16, 2^-6 of the least scale
        ((448 * 2.0**-127,), (0x7E,), 0),
        ((450 * 2.0**-127,), (0x76,), 1),
        ((torch.finfo(torch.bfloat16).max,), (0x78,), 247),
    ],
)
def test_a_special_block(values, codes, scale):
    found, found_scale = first(block(*values))
    assert tuple(found[: len(codes)]) == codes
    assert found_scale == scale


def test_a_nan_changes_no_other_element():
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    matrix[5, 7] = 0.01
    clean = quantized(matrix)
    matrix[5, 7] = NAN
    spoilt = quantized(matrix)
    for before, after in zip(clean.each(), spoilt.each(), strict=True):
        assert int((before != after).sum()) == (before.shape == (64, 96))


def test_directions_are_quantized_from_the_matrix_each():
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    matrix *= torch.logspace(-3, 3, 64)[:, None].bfloat16()
    planes = quantized(matrix)
    rebuilt = quantized(planes.dequantize("rowwise"))
    assert not torch.equal(planes.columnwise_codes, rebuilt.columnwise_codes)
    for direction, turned in (("rowwise", matrix), ("columnwise", matrix.t())):
        alone = quantized(turned.contiguous())
        expected = alone.dequantize("rowwise")
        expected = expected if direction == "rowwise" else expected.t()
        assert torch.equal(planes.dequantize(direction), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [1, 96 * 32, 1 << 30])
def test_chunks_and_strides_change_nothing(dtype, chunk):
    matrix = torch.randn(160, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = quantized(matrix[:, :96].contiguous())
    with mock.patch.object(cpu_mxfp8_format, "_CHUNK_NUMEL", chunk):
        found = quantized(matrix[:, :96])
    assert all(map(torch.equal, found.each(), expected.each()))


# ------------------------------------------------------------------------------------------------
# Back
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_every_code_of_every_scale_stands_for_its_value(direction):
    rows, columns = (256, BLOCK) if direction == "rowwise" else (BLOCK, 256)
    for chunk in range(8):
        planes = Planes.zeros((rows, columns))
        codes, scales = (
            (planes.rowwise_codes, planes.rowwise_scales)
            if direction == "rowwise"
            else (planes.columnwise_codes.t(), planes.columnwise_scales.t())
        )
        part = torch.arange(32 * chunk, 32 * (chunk + 1), dtype=torch.uint8)
        codes.copy_(part.expand(256, -1))
        scales.copy_(torch.arange(256, dtype=torch.uint8)[:, None])
        powers = np.ldexp(1.0, np.arange(256) - 127)
        powers[255] = np.nan
        with np.errstate(invalid="ignore"):
            exact = powers[:, None] * e4m3_values()[part.numpy()]
        # bf16 holds them all but for the ends of its range.
        expected = torch.from_numpy(exact).to(torch.float32).to(torch.bfloat16)
        found = planes.dequantize(direction)
        found = found if direction == "rowwise" else found.t()
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("shape", [(32, 48), (16, 32), (32,), (2, 32, 32)])
def test_shapes_without_whole_blocks_are_refused(shape):
    with pytest.raises(ValueError, match="multiple of 32"):
        Planes.zeros(shape)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        Planes.zeros((32, 64)).quantize_(torch.zeros(64, 32))


# ------------------------------------------------------------------------------------------------
# A second opinion, and time
# ------------------------------------------------------------------------------------------------


def ordinary(name):
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(512, 512, generator=generator)
    if name == "normal":
        return normal.bfloat16()
    sign = torch.randn(512, 512, generator=generator).sign()
    return (torch.exp(12 * normal.clamp(-3, 3)) * sign).bfloat16()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["normal", "lognormal"])
def test_torchao_makes_the_same_bits_of_ordinary_blocks(name):
    """In its other modes torchao differs in 14 % to 83 % of the scales of the normal matrix."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    matrix = ordinary(name)
    planes = quantized(matrix)

    def differences(matrix, codes, scales, mode):
        theirs = mx_tensor.to_mx(matrix.contiguous(), torch.float8_e4m3fn, BLOCK, mode)
        their_scales, their_codes = (tensor.view(torch.uint8) for tensor in theirs)
        return int((their_codes != codes).sum()) + int(
            (their_scales.view(scales.shape) != scales).sum()
        )

    modes = mx_tensor.ScaleCalculationMode
    rowwise = (matrix, planes.rowwise_codes, planes.rowwise_scales)
    columnwise = (matrix.t(), planes.columnwise_codes.t(), planes.columnwise_scales.t())
    assert differences(*rowwise, modes.RCEIL) == 0
    assert differences(*columnwise, modes.RCEIL) == 0
    assert differences(*rowwise, modes.FLOOR) > 0


def test_a_large_matrix_is_quantized_quickly():
    matrix = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(5)).bfloat16()
    planes = Planes.zeros(matrix.shape)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        planes.quantize_(matrix)
        seconds = time.process_time() - start
    finally:
        torch.set_num_threads(threads)
    assert seconds < MAX_SECONDS
