"""The CPU's MXFP8 weight is a tensor to torch: it has aliases, values, products and gradients."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from megatron_muon.integration.cpu_mxfp8_tensor import (
    CpuMXFP8Quantizer,
    CpuMXFP8Tensor,
    keep_high_precision_init_val,
)

SHAPE = (64, 96)
quantize = CpuMXFP8Quantizer()


def matrix(seed, dtype=torch.bfloat16):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def param():
    return torch.nn.Parameter(quantize(matrix(0)))


def holds(tensor, values):
    """Whether a tensor holds the bytes of these values."""
    expected = quantize(values.to(torch.bfloat16)).planes.each()
    return all(map(torch.equal, tensor.planes.each(), expected))


def same_memory(a, b):
    pairs = zip(a.planes.each(), b.planes.each(), strict=True)
    return [x.data_ptr() == y.data_ptr() for x, y in pairs]


# ------------------------------------------------------------------------------------------------
# What it is
# ------------------------------------------------------------------------------------------------


def test_it_is_a_leaf_parameter_that_says_it_is_bf16(param):
    assert isinstance(param, torch.nn.Parameter)
    assert isinstance(param, CpuMXFP8Tensor)
    assert param.is_leaf
    assert param.requires_grad
    assert (param.dtype, param.shape, param.device.type) == (torch.bfloat16, SHAPE, "cpu")
    assert param.type() == "torch.BFloat16Tensor"
    assert holds(param, matrix(0))
    assert "CpuMXFP8Tensor" in repr(param)


def test_its_bytes_have_the_names_they_have_in_transformer_engine(param):
    assert param._rowwise_data.shape == SHAPE
    assert param._columnwise_data.shape == SHAPE
    assert param._rowwise_scale_inv.shape == (64, 3)
    assert param._columnwise_scale_inv.shape == (2, 96)
    assert {plane.dtype for plane in param.planes.each()} == {torch.uint8}


@pytest.mark.parametrize(
    "alias",
    [
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.data.data,
        lambda p: p.view(SHAPE),
        lambda p: p.view(-1, 96),
        lambda p: p.expand_as(p),
        lambda p: p.bfloat16(),
        lambda p: p.contiguous(),
    ],
)
def test_aliases_share_every_byte(param, alias):
    other = alias(param)
    assert type(other) is CpuMXFP8Tensor
    assert all(same_memory(param, other))
    with torch.no_grad():
        other.detach().copy_(matrix(1))
    assert holds(param, matrix(1))


@pytest.mark.parametrize("copied", [torch.clone, copy.deepcopy, lambda p: pickled(p.detach())])
def test_copies_share_none(param, copied):
    with torch.no_grad():
        other = copied(param)
        assert type(other) is CpuMXFP8Tensor
        assert not any(same_memory(param, other))
        assert holds(other, matrix(0))
        param.copy_(matrix(1))
    assert holds(other, matrix(0))


def pickled(tensor):
    return pickle.loads(pickle.dumps(tensor))


def test_a_saved_parameter_is_loaded_as_one(param):
    file = io.BytesIO()
    torch.save({"weight": param}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["weight"]
    assert type(loaded) is CpuMXFP8Tensor
    assert loaded.requires_grad
    assert holds(loaded, matrix(0))


@pytest.mark.parametrize(
    "flat",
    [
        lambda p: p.view(-1),
        lambda p: p.reshape(-1),
        lambda p: p.flatten(),
        lambda p: p.view(96, 64),
        lambda p: p.expand(2, *SHAPE),
        lambda p: torch._utils._flatten_dense_tensors([p, p]),
    ],
)
def test_other_shapes_are_refused(param, flat):
    with pytest.raises(ValueError, match="no view of shape"):
        flat(param)


@pytest.mark.parametrize(
    "values",
    [
        lambda p: p.dequantize(),
        lambda p: p.from_float8(),
        lambda p: p.float(),
        lambda p: p.half(),
        lambda p: p + 0,
        lambda p: p.t().t(),
        lambda p: p.dequantize(dtype=torch.float32),
    ],
)
def test_its_values_are_plain_tensors(param, values):
    found = values(param.detach())
    assert type(found) is torch.Tensor
    assert torch.equal(found.float(), param.planes.dequantize("rowwise").float())


def test_what_is_made_like_it_is_plain(param):
    for like in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.isnan):
        assert type(like(param)) is torch.Tensor
        assert like(param).shape == SHAPE


# ------------------------------------------------------------------------------------------------
# What is written
# ------------------------------------------------------------------------------------------------


def set_data(param, values):
    param.data = values


WRITES = {
    "copy_": lambda p, v: p.copy_(v),
    "copy_ to data": lambda p, v: p.data.copy_(v),
    "copy_ of fp32": lambda p, v: p.copy_(v.float()),
    "copy_ of a quantized": lambda p, v: p.copy_(quantize(v)),
    "data": set_data,
    "data of a quantized": lambda p, v: set_data(p, quantize(v)),
    "quantizer": lambda p, v: p._quantizer.update_quantized(v, p),
    "quantizer on data": lambda p, v: p._quantizer.update_quantized(v, p.data),
    "foreach": lambda p, v: torch._foreach_copy_([p.data], [v]),
    "zero_ and add_": lambda p, v: p.zero_().add_(v),
    "fill by out": lambda p, v: torch.mul(v, 1.0, out=p.detach()),
    "load_state_dict": lambda p, v: module_of(p).load_state_dict({"weight": v}),
}


def module_of(param):
    module = torch.nn.Module()
    module.weight = param
    return module


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_quantized_in_place(param, name):
    planes = param.planes.each()
    with torch.no_grad():
        WRITES[name](param, matrix(1))
    assert holds(param, matrix(1))
    if name != "data of a quantized":
        assert all(x is y for x, y in zip(param.planes.each(), planes, strict=True))


def test_an_operation_writes_the_values_it_makes(param):
    values = param.dequantize()
    with torch.no_grad():
        assert param.mul_(3.0) is param
        param.sub_(matrix(2))
    expected = quantize(quantize(values * 3.0).dequantize() - matrix(2))
    assert all(map(torch.equal, param.planes.each(), expected.planes.each()))


def test_a_row_is_copied_to_every_row(param):
    with torch.no_grad():
        param.copy_(matrix(1)[0])
    assert holds(param, matrix(1)[:1].expand(SHAPE).contiguous())


def test_a_module_stays_as_it_is_when_it_is_made_bf16(param):
    module = module_of(param)
    module.bfloat16()
    assert module.weight is param
    assert holds(param, matrix(0))


def test_it_is_not_sent(param):
    broadcast = torch.ops.c10d.broadcast_.default
    with pytest.raises(ValueError, match="stage its bf16 values"):
        CpuMXFP8Tensor.__torch_dispatch__(broadcast, (), ([param.data],))


# ------------------------------------------------------------------------------------------------
# Products and gradients
# ------------------------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """As Megatron's local linear layers multiply."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return torch.matmul(inputs, weight.t())

    @staticmethod
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.flatten(0, 1).t().matmul(inputs.flatten(0, 1))


def test_a_product_takes_the_blocks_that_lie_along_the_sum(param):
    # Between rows of the same size the directions hardly differ.
    param.data.copy_(matrix(0) * torch.logspace(-3, 3, 64)[:, None])
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(5, 2, 96, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(5, 2, 64, generator=generator).bfloat16()
    outputs = Linear.apply(inputs, param)
    outputs.backward(grad)
    rowwise, columnwise = (param.planes.dequantize(d) for d in ("rowwise", "columnwise"))
    assert not torch.equal(rowwise, columnwise)
    assert torch.equal(outputs, inputs @ rowwise.t())
    assert torch.equal(inputs.grad, grad @ columnwise)
    assert type(param.grad) is torch.Tensor
    assert torch.equal(param.grad, grad.flatten(0, 1).t() @ inputs.detach().flatten(0, 1))
    assert torch.equal(torch.mm(param.detach(), matrix(3).t()), rowwise @ matrix(3).t())


def test_a_hook_finds_the_gradient_through_expand_as(param):
    """As Megatron's DDP hooks its parameters."""
    seen = []
    accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *unused: seen.append(param.grad.clone()))
    Linear.apply(torch.ones(1, 1, 96).bfloat16(), param).sum().backward()
    assert torch.equal(seen[0], torch.ones(SHAPE).bfloat16())


def test_the_value_from_before_is_kept_until_it_is_cleared(param):
    assert not hasattr(param, "get_high_precision_init_val")
    keep_high_precision_init_val(param, matrix(0))
    assert torch.equal(param.get_high_precision_init_val(), matrix(0))
    for _ in range(2):
        param.clear_high_precision_init_val()
        assert param.get_high_precision_init_val() is None
