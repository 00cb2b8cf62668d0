"""Every kernel of Newton-Schulz, against the oracle in fp64 and against each other bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from unittest import mock

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch.profiler import ProfilerActivity, profile

from megatron_muon.errors import ConfigurationError
from megatron_muon.orthogonalize import blocks as blocks_module
from megatron_muon.orthogonalize.arithmetic import (
    BF16,
    BF16_IN_FP32,
    FP32,
    TF32,
    choose_arithmetic,
)
from megatron_muon.orthogonalize.blocks import normalize, orthogonalize_blocks
from megatron_muon.orthogonalize.coefficients import coefficients
from megatron_muon.orthogonalize.iteration import segment_lengths
from megatron_muon.orthogonalize.kernels import Kernel, choose_kernel
from megatron_muon.orthogonalize.products import Products, Symmetric, in_strips, syrk_applies
from megatron_muon.testing.oracle import orthogonalize, relative_error

ARITHMETICS = {a.name: a for a in (FP32, BF16, BF16_IN_FP32)}
QUINTIC = coefficients("quintic", 5)
KERNELS = [
    Kernel(form, symmetric, batched)
    for form in ("standard", "gram")
    for symmetric, batched in (("full", False), ("strips", False), ("full", True))
]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spectrum(kind, rows, columns):
    """A matrix of random directions whose singular values fall as asked."""
    if kind == "random":
        return draw(rows, columns)
    count = min(rows, columns)
    values = {
        "decaying": torch.logspace(0, -6, count, dtype=torch.float64),
        "rank one": (torch.arange(count) == 0).double(),
        "power law": torch.arange(1, count + 1).double() ** -2,
    }[kind]
    left, right = (
        torch.linalg.qr(draw(side, count, seed=seed).double())[0]
        for seed, side in ((1, rows), (2, columns))
    )
    return ((left * values) @ right.T).float()


def compute(xs, arithmetic, kernel=None, steps=QUINTIC, **options):
    outs = [torch.full(x.shape, math.nan) for x in xs]
    choose = choose_kernel if kernel is None else lambda *_: kernel
    with mock.patch.object(blocks_module, "choose_kernel", choose):
        orthogonalize_blocks(xs, outs, steps, arithmetic, **options)
    return outs


def stock_error(x, precision, expected, name="quintic", num_steps=5):
    with fp32_matmul_precision(precision):
        return relative_error(muon_utils.newton_schulz(x, num_steps, name), expected)


# The coefficients and how they are cut into segments.


@pytest.mark.parametrize("name", sorted(muon_utils._COEFFICIENT_SETS))
def test_coefficients_are_those_of_emerging_optimizers(name):
    num_triples = len(muon_utils._COEFFICIENT_SETS[name])
    for num_steps in (1, num_triples, num_triples + 1, 2 * num_triples + 3):
        taken = []

        def record(x, a, b, c, tp_group, taken=taken):
            taken.append((a, b, c))
            return x

        with mock.patch.object(muon_utils, "newton_schulz_step", record):
            muon_utils.newton_schulz(torch.ones(2, 2), num_steps, name)
        assert coefficients(name, num_steps) == tuple(taken)


@pytest.mark.parametrize(("name", "num_steps"), [("custom", 5), ("cubic", 5), ("quintic", 0)])
def test_other_coefficients_are_refused(name, num_steps):
    with pytest.raises(ConfigurationError, match="--muon-"):
        coefficients(name, num_steps)


def test_segments_restart_before_errors_grow_too_far():
    assert segment_lengths(QUINTIC, FP32.largest_growth) == [3, 2]
    assert segment_lengths(QUINTIC, BF16.largest_growth) == [1, 2, 2]
    assert segment_lengths(QUINTIC, 0.0) == [1] * 5
    assert segment_lengths(QUINTIC, math.inf) == [5]
    for name in muon_utils._COEFFICIENT_SETS:
        for arithmetic in (FP32, TF32, BF16):
            steps = coefficients(name, 12)
            lengths = segment_lengths(steps, arithmetic.largest_growth)
            assert sum(lengths) == 12
            for i, length in enumerate(lengths):
                start = sum(lengths[:i])
                growth = math.prod(a for a, _, _ in steps[start : start + length - 1])
                assert growth <= arithmetic.largest_growth


# Errors.


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("kind", ["random", "decaying", "rank one"])
def test_every_kernel_is_near_the_oracle(kind, kernel):
    for shape in ((160, 480), (200, 130)):
        x = spectrum(kind, *shape)
        expected = orthogonalize(x.double(), QUINTIC)
        limit = {"random": 2e-5, "decaying": 5e-5, "rank one": 2e-4}[kind]
        (got,) = compute([x], FP32, kernel)
        assert relative_error(got, expected) < limit
        stock = stock_error(x, "medium", expected)
        allowed = 2.5 if kind == "random" and kernel.form == "gram" else 1.02
        for arithmetic in (BF16, BF16_IN_FP32):
            (got,) = compute([x], arithmetic, kernel)
            assert relative_error(got, expected) < allowed * stock
            if kind == "random":
                assert relative_error(got, expected) > 1e-3  # these are bf16 products


@pytest.mark.parametrize("name", sorted(muon_utils._COEFFICIENT_SETS))
def test_the_gram_form_restarts_in_time_for_every_set(name):
    num_steps = len(muon_utils._COEFFICIENT_SETS[name])
    if name in ("simple", "quintic"):
        num_steps = 5
    steps = coefficients(name, num_steps)
    for kind in ("decaying", "rank one"):
        x = spectrum(kind, 96, 288)
        expected = orthogonalize(x.double(), steps)
        for arithmetic, precision in ((FP32, "highest"), (BF16_IN_FP32, "medium")):
            (got,) = compute([x], arithmetic, Kernel("gram", "full", False), steps)
            stock = stock_error(x, precision, expected, name, num_steps)
            allowed = max(1e-3, 1.3 * stock) if arithmetic is FP32 else 1.05 * stock
            assert relative_error(got, expected) < allowed


def test_without_a_restart_the_gram_form_fails():
    x = spectrum("rank one", 160, 480)
    careless = dataclasses.replace(FP32, largest_growth=math.inf)
    (got,) = compute([x], careless, Kernel("gram", "strips", False))
    assert not relative_error(got, orthogonalize(x.double(), QUINTIC)) < 1e-3


@pytest.mark.parametrize("shape", [(256, 640), (520, 300), (48, 40)])
@pytest.mark.parametrize("kind", ["random", "decaying", "power law", "rank one"])
def test_the_kernel_chosen_for_a_shape_is_near_the_oracle(kind, shape):
    x = spectrum(kind, *shape)
    expected = orthogonalize(x.double(), QUINTIC)
    limit = {"random": 2e-5, "decaying": 5e-5, "power law": 1e-4, "rank one": 2e-4}[kind]
    assert relative_error(compute([x], FP32)[0], expected) < limit
    for arithmetic in (BF16, BF16_IN_FP32):
        allowed = 2.5 if kind == "random" else 1.05
        (got,) = compute([x], arithmetic)
        assert relative_error(got, expected) < allowed * stock_error(x, "medium", expected)


# Eigenvectors of the Gram matrix.


@pytest.mark.parametrize("shape", [(160, 480), (300, 280), (48, 40), (1, 9)])
@pytest.mark.parametrize("kind", ["random", "decaying", "power law", "rank one"])
def test_eigenvectors_are_near_the_oracle(kind, shape):
    x = spectrum(kind, *shape)
    decaying = 1e-4 if min(shape) >= 160 else 4e-4
    limit = {"random": 2e-5, "decaying": decaying, "power law": 4e-4, "rank one": 1e-3}[kind]
    (got,) = compute([x], FP32, kernel_name="eigh")
    assert relative_error(got, orthogonalize(x.double(), QUINTIC)) < limit


def test_an_eigendecomposition_in_fp32_would_err_too_far():
    x = spectrum("power law", 160, 480)
    decompose = torch.linalg.eigh

    def in_fp32(gram):
        return tuple(part.double() for part in decompose(gram.float()))

    with mock.patch.object(torch.linalg, "eigh", in_fp32):
        (got,) = compute([x], FP32, kernel_name="eigh")
    assert relative_error(got, orthogonalize(x.double(), QUINTIC)) > 1e-3


def test_the_standard_form_takes_the_place_of_eigenvectors_that_are_not_found():
    xs = [draw(40, 60, seed=i) for i in range(2)]
    decompose, calls = torch.linalg.eigh, []

    def fail_once(gram):
        calls.append(gram.shape)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return decompose(gram)

    with mock.patch.object(torch.linalg, "eigh", fail_once):
        got = compute(xs, FP32, kernel_name="eigh")
    assert torch.equal(got[0], compute(xs, FP32, Kernel("standard", "full", False))[0])
    assert torch.equal(got[1], compute(xs[1:], FP32, kernel_name="eigh")[0])
    assert len(calls) == 2


def test_eigenvectors_do_not_depend_on_other_blocks(num_threads):
    shapes = [(32, 64), (64, 32), (32, 64), (100, 300), (260, 530), (7, 33)]
    xs = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    xs += [torch.zeros(32, 64), torch.full((32, 64), math.nan), draw(32, 64) * math.inf]
    together = compute(xs, FP32, kernel_name="eigh")
    for x, got in zip(xs[:6], together, strict=False):
        for other in (x, *layouts(x)):
            assert torch.equal(got, compute([other], FP32, kernel_name="eigh")[0])
    assert not together[6].any()
    assert together[7].isnan().all()
    assert together[8].isnan().all()


def test_eigenvectors_are_no_kernel_of_bf16():
    for name, arithmetic in (("eigh", BF16), ("exact", FP32)):
        with pytest.raises(ValueError, match="no kernel"):
            choose_kernel(64, 64, arithmetic, "cpu", name)


# Normalisation.


def test_blocks_that_need_care_do_not_change_the_others():
    """Which way a block is normalised depends on those beside it, its bits do not."""
    x = draw(40, 60)
    expected, among = x.clone(), torch.stack([x, x * 1e30, x * 1e-30, torch.zeros_like(x)])
    normalize(expected)
    normalize(among)
    assert torch.equal(among[0], expected)
    for i in (1, 2):
        assert among[i].norm() == pytest.approx(1.0)
    assert not among[3].any()


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_the_size_of_the_input_does_not_matter(arithmetic):
    x = draw(40, 60)
    (expected,) = compute([x], arithmetic)
    for exponent in (-66, -40, -1, 1, 40, 60):
        assert torch.equal(compute([x * 2.0**exponent], arithmetic)[0], expected)
    for factor in (1e-20, 1e-18, 1e-9, 3.0, 1e9, 1e18, 1e20):
        (got,) = compute([x * factor], arithmetic)
        # A last bit of the input may turn a rounding to bf16.
        assert relative_error(got, expected) < (1e-5 if arithmetic is FP32 else 1e-2)


def test_subnormal_numbers_are_normalised():
    x = torch.tensor([[1e-42, 0.0], [0.0, 1e-42]])
    normalize(x)
    assert x.norm() == pytest.approx(1.0)
    assert x[0, 1] == 0


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("shape", [(5, 3), (32, 64), (1, 7)])
def test_zero_stays_zero_and_what_is_not_finite_becomes_nan(shape, arithmetic):
    zero, infinite, nan, finite = torch.zeros(shape), draw(*shape), draw(*shape), draw(*shape)
    infinite[-1, 0] = -math.inf
    nan[0, -1] = math.nan
    got = compute([zero, infinite, nan, finite], arithmetic)
    assert torch.equal(got[0], zero)
    assert got[1].isnan().all()
    assert got[2].isnan().all()
    assert torch.equal(got[3], compute([finite], arithmetic)[0])
    assert got[3].isfinite().all()


# The same bits, alone and among others.


def layouts(x):
    """The same numbers, lying otherwise in memory."""
    yield x.T.contiguous().T
    yield torch.cat([torch.full_like(x, math.nan), x])[x.shape[0] :]
    yield torch.nn.functional.pad(x, (1, 2))[:, 1:-2]


@pytest.fixture(params=[1, 4])
def num_threads(request):
    """As many threads; with four, products of 40 x 64 in a batch differ from single ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


SIDES = (1, 2, 3, 7, 16, 17, 31, 32, 33, 40, 48, 63, 64)
SWEEP = [(a, b) for i, a in enumerate(SIDES) for b in (a, a + 1, 4 * a - 1, 100, 128)[i % 2 :: 2]]
SWEEP = [(a, b) for a, b in SWEEP if b <= 128]


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_a_block_has_the_same_bits_alone_and_among_others(arithmetic, num_threads):
    xs = [draw(*shape, seed=i) for shape in SWEEP for i in range(3)]
    xs += [x.T for x in xs[::3]]
    for x, got in zip(xs, compute(xs, arithmetic), strict=True):
        assert torch.equal(got, compute([x], arithmetic)[0]), x.shape


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("shape", [(64, 256), (100, 300), (127, 129), (128, 512), (260, 530)])
def test_a_larger_block_has_the_same_bits_too(shape, arithmetic, num_threads):
    xs = [draw(*shape, seed=i) for i in range(3)]
    xs += [x.T for x in xs]
    together = compute(xs, arithmetic, batch_nbytes=1 << 30)
    for x, got in zip(xs, together, strict=True):
        assert torch.equal(got, compute([x], arithmetic)[0])


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("shape", [(7, 33), (33, 100), (65, 32)])
def test_the_layout_of_a_block_does_not_matter(shape, arithmetic):
    x = draw(*shape)
    (expected,) = compute([x], arithmetic)
    for other in layouts(x):
        assert torch.equal(compute([other, x, other], arithmetic)[2], expected)
        assert torch.equal(compute([other], arithmetic)[0], expected)


def places(x):
    """Name and give tensors of a block's shape, in memory of every kind."""
    rows, columns = x.shape
    unaligned = torch.empty(x.numel() + 1)[1:].view(x.shape)
    assert unaligned.data_ptr() % 64
    yield "aligned", torch.empty(x.shape)
    yield "unaligned", unaligned
    yield "scattered rows", torch.empty(rows, columns + 3)[:, 3:]
    yield "transposed", torch.empty(columns, rows).T


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("shape", [(7, 9999), (128, 520), (257, 701), (512, 544)])
@pytest.mark.parametrize("is_tall", [False, True], ids=["wide", "tall"])
def test_a_result_may_go_anywhere(is_tall, shape, arithmetic, num_threads):
    """Where there is room the steps are taken in its memory: the bits must not tell."""
    x = draw(*reversed(shape) if is_tall else shape).bfloat16().float()
    (expected,) = compute([x], arithmetic)
    assert relative_error(expected, orthogonalize(x.double(), QUINTIC)) < 2e-2
    other = draw(*x.shape, seed=1)
    with_other = other.clone()
    for name, place in places(x):
        for y in (x, x.bfloat16(), *layouts(x)):
            place.fill_(math.nan)
            orthogonalize_blocks([y], [place], QUINTIC, arithmetic)
            assert torch.equal(place, expected), name
        place.copy_(x)
        orthogonalize_blocks([with_other, place], [with_other, place], QUINTIC, arithmetic)
        assert torch.equal(place, expected), f"{name}, in place"
        with_other.copy_(other)
    narrow = torch.empty_like(x, dtype=torch.bfloat16)
    orthogonalize_blocks([x], [narrow], QUINTIC, arithmetic)
    assert torch.equal(narrow, expected.bfloat16())


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_a_result_may_overlap_its_block(arithmetic):
    x = draw(288, 288)
    (expected,) = compute([x], arithmetic)
    turned = x.T.contiguous()
    orthogonalize_blocks([turned.T], [turned], QUINTIC, arithmetic)
    assert torch.equal(turned, expected)
    memory = torch.empty(x.numel() + 16)  # 64 bytes apart
    shifted = memory[16:].view(x.shape).copy_(x)
    orthogonalize_blocks([shifted], [memory[:-16].view(x.shape)], QUINTIC, arithmetic)
    assert torch.equal(memory[:-16].view(x.shape), expected)
    narrow = memory.view(torch.bfloat16)[: x.numel()].view(x.shape).copy_(x)
    (expected,) = compute([narrow], arithmetic)
    orthogonalize_blocks([narrow], [memory[:-16].view(x.shape)], QUINTIC, arithmetic)
    assert torch.equal(memory[:-16].view(x.shape), expected)


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("shape", [(260, 700), (700, 260)])
def test_a_large_block_that_needs_care_may_be_computed_in_place(shape, arithmetic):
    x = draw(*shape)
    (expected,) = compute([x], arithmetic)
    for exponent in (-100, 100):
        scaled = x * 2.0**exponent
        orthogonalize_blocks([scaled], [scaled], QUINTIC, arithmetic)
        assert torch.equal(scaled, expected)
    zero, infinite = torch.zeros(shape), x.clone()
    infinite[-1, 0] = math.inf
    orthogonalize_blocks([zero, infinite], [zero, infinite], QUINTIC, arithmetic)
    assert not zero.any()
    assert infinite.isnan().all()


def peak_nbytes(run):
    """The most bytes that torch's allocator has handed out at one moment of a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize(("arithmetic", "most"), [(BF16, 2.7), (FP32, 4.4), (BF16_IN_FP32, 4.9)])
@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512)])
def test_a_block_in_place_takes_little_other_memory(shape, arithmetic, most):
    """Beside the matrix: in bf16 the block itself, in fp32 four square matrices, and a strip.

    The library that multiplies in bf16 takes up to 0.4 more for itself.
    """
    x = draw(*shape)
    blocks_module.give_up_scratch()
    peak = peak_nbytes(lambda: orthogonalize_blocks([x], [x], QUINTIC, arithmetic))
    assert most / 2 < peak / x.numel() <= most


def test_batches_are_bounded_in_bytes():
    xs = [draw(32, 64, seed=i) for i in range(11)]
    expected = compute(xs, FP32)
    seen = []
    iterate = blocks_module.iterate

    def record(x, *rest):
        seen.append(x.shape[0])
        return iterate(x, *rest)

    with mock.patch.object(blocks_module, "iterate", record):
        for batch_nbytes, counts in ((1, [1] * 11), (4 * 32 * 64 * 4, [4, 4, 3]), (1 << 20, [11])):
            seen.clear()
            got = compute(xs, FP32, batch_nbytes=batch_nbytes)
            assert seen == counts
            assert all(map(torch.equal, got, expected))


def test_what_is_left_in_memory_does_not_matter():
    xs = [draw(*shape, seed=i) for i, shape in enumerate([(300, 900), (64, 64), (7, 5)])]
    for arithmetic in ARITHMETICS.values():
        expected = compute(xs, arithmetic)
        (kept,) = blocks_module._KEPT.pieces
        kept.fill_(255)  # NaN in every dtype
        assert all(map(torch.equal, compute(xs, arithmetic), expected))
        with mock.patch.object(blocks_module, "KEPT_NBYTES", 0):
            kept.resize_(0)
            assert all(map(torch.equal, compute(xs, arithmetic), expected))
            assert not blocks_module._KEPT.pieces


def test_the_kernel_is_chosen_from_shape_arithmetic_and_device_alone():
    for rows, columns in ((1, 1), (32, 64), (64, 32), (128, 128), (300, 900), (1024, 1024)):
        for arithmetic in (*ARITHMETICS.values(), TF32):
            kernel = choose_kernel(rows, columns, arithmetic, "cpu")
            assert kernel == choose_kernel(columns, rows, arithmetic, "cpu")
            assert not (kernel.batched and kernel.symmetric == "strips")
            on_gpu = choose_kernel(rows, columns, arithmetic, "cuda")
            assert on_gpu == Kernel(kernel.form, "full", False)
            for form in ("standard", "gram"):
                asked = choose_kernel(rows, columns, arithmetic, "cpu", form)
                assert asked == dataclasses.replace(kernel, form=form)
    assert choose_kernel(512, 2048, FP32, "cpu") == Kernel("gram", "strips", False)
    assert choose_kernel(1024, 1024, BF16, "cpu") == Kernel("standard", "strips", False)
    assert choose_kernel(32, 64, BF16, "cpu") == Kernel("standard", "full", True)
    assert choose_kernel(16, 64, FP32, "cpu") == Kernel("standard", "full", False)


# Products.


def test_the_arithmetic_is_chosen_by_precision_and_processor():
    assert choose_arithmetic("highest", "cpu") is FP32
    assert choose_arithmetic("high", "cuda") is TF32
    assert choose_arithmetic("medium", "cuda") is BF16
    assert choose_arithmetic("medium", "cpu") in (BF16, BF16_IN_FP32)


def test_numbers_of_bf16_held_in_fp32_multiply_as_bf16_does():
    base, left, right = (draw(*s).bfloat16() for s in ((30, 70), (30, 30), (30, 70)))
    exact = 0.7 * base.double() + 2 * (left.double() @ right.double())
    rounding, out = torch.empty(30 * 70, dtype=torch.bfloat16), torch.empty(30, 70)
    products = Products(rounding=rounding)
    products.add(base.float(), 0.7, left.float(), right.float(), 2.0, out)
    assert torch.equal(out, out.bfloat16().float())
    same = out.double() == exact.bfloat16().double()  # all but ties that fp32 sums turned
    assert same.double().mean() > 0.98
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [1, 128, 300])
def test_symmetric_products_are_mirrored(side, dtype):
    x, other = draw(side, 40).to(dtype), draw(side, 40, seed=1).to(dtype)
    packed, products = torch.empty(128 * side, dtype=dtype), Products()
    got, expected, base = (torch.full((side, side), math.nan, dtype=dtype) for _ in range(3))
    strips, factor, other_base = (in_strips(m, packed) for m in (got, expected, base))
    products.gram(x, strips)
    products.gram(x, Symmetric(expected))
    assert torch.equal(got, got.T)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    products.gram(other, Symmetric(base))
    products.add_symmetric(other_base, -0.5, factor, factor, 0.25, strips)
    assert torch.equal(got, got.T)
    full = -0.5 * base.double() + 0.25 * expected.double() @ expected.double()
    assert relative_error(got, full) < tolerance


def test_syrk_needs_cuda():
    assert not syrk_applies(64, 128, torch.bfloat16, torch.device("cpu"))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("shape", [(1, 5), (33, 100), (256, 1024), (512, 512)])
@pytest.mark.parametrize("kind", ["random", "decaying", "rank one"])
def test_on_cuda_it_is_near_the_oracle(kind, shape, precision):
    x = spectrum(kind, *shape)
    expected = orthogonalize(x.double(), QUINTIC)
    out = torch.empty_like(x, device="cuda")
    with fp32_matmul_precision(precision):
        orthogonalize_blocks([x.cuda()], [out], QUINTIC, choose_arithmetic(precision, "cuda"))
        stock = relative_error(muon_utils.newton_schulz(x.cuda(), 5, "quintic").cpu(), expected)
    limit = max(1e-3, stock) if precision == "highest" else 3 * stock + 1e-3
    assert relative_error(out.cpu(), expected) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 128), (256, 1024), (512, 512)])
def test_syrk_is_near_the_oracle(shape):
    device = torch.device("cuda")
    if not syrk_applies(*shape, torch.bfloat16, device):
        pytest.skip("emerging-optimizers has no SYRK for this GPU")
    x = draw(*shape)
    out = torch.empty_like(x, device=device)
    orthogonalize_blocks([x.cuda()], [out], QUINTIC, BF16, use_syrk=True)
    assert relative_error(out.cpu(), orthogonalize(x.double(), QUINTIC)) < 3e-2


@pytest.mark.gpu
def test_on_cuda_a_block_has_the_same_bits_alone_and_among_others():
    xs = [draw(*shape, seed=i).cuda() for i, shape in enumerate([(32, 64)] * 9 + [(300, 128)] * 3)]
    for arithmetic in (FP32, BF16):
        together = [torch.empty_like(x) for x in xs]
        orthogonalize_blocks(xs, together, QUINTIC, arithmetic)
        for x, expected in zip(xs, together, strict=True):
            alone = torch.empty_like(x)
            orthogonalize_blocks([x], [alone], QUINTIC, arithmetic)
            assert torch.equal(alone, expected)
