"""Which weights are MXFP8 on the CPU, how they become so, and that Megatron knows them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_muon.errors import ConfigurationError
from megatron_muon.integration import cpu_mxfp8
from megatron_muon.integration.cpu_mxfp8 import MARK, building_mxfp8_layers, quantize_weights
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Quantizer, CpuMXFP8Tensor
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.standing import standing_in


def marked_linear(dtype=torch.bfloat16):
    module = torch.nn.Linear(64, 32, dtype=dtype)
    setattr(module.weight, MARK, True)
    return module


def test_where_transformer_engine_is_there_is_nothing_to_stand_in_for():
    from megatron.core import fp8_utils

    assert cpu_mxfp8.table()
    with mock.patch.object(fp8_utils, "HAVE_TE", True):
        assert cpu_mxfp8.table() == []


def test_megatron_knows_the_class_while_the_stand_in_is_in_force():
    from megatron.core import fp8_utils

    param = torch.nn.Parameter(CpuMXFP8Quantizer()(torch.randn(32, 64).bfloat16()))
    plain = torch.nn.Parameter(torch.zeros(32, 64))

    def answers():
        return [
            function(tensor)
            for tensor in (param, param.data, plain)
            for function in (fp8_utils.is_float8tensor, fp8_utils.is_mxfp8tensor)
        ]

    before = answers()
    with standing_in():
        assert answers() == [True] * 4 + [False] * 2
        assert not fp8_utils.is_grouped_tensor(param)
        assert not fp8_utils.is_grouped_mxfp8tensor(param)
        assert torch.equal(fp8_utils.dequantize_fp8_tensor(param), param.dequantize())
        fp8_utils.copy_tensor_to_quantized_param(param, torch.ones(32 * 64).bfloat16())
        assert torch.equal(param.dequantize(), torch.ones(32, 64).bfloat16())
    assert before == answers() == [False] * 6


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_marked_weight_becomes_mxfp8_with_all_its_attributes(with_gradients):
    module = marked_linear()
    weight, value = module.weight, module.weight.detach().clone()
    weight.partition_dim, weight.allreduce = 1, False
    with torch.set_grad_enabled(with_gradients):
        quantize_weights(module)
    assert isinstance(module.weight, CpuMXFP8Tensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert (module.weight.partition_dim, module.weight.allreduce) == (1, False)
    assert getattr(module.weight, MARK)
    assert type(module.bias) is torch.nn.Parameter
    expected = CpuMXFP8Quantizer()(value).planes.each()
    assert all(map(torch.equal, module.weight.planes.each(), expected))
    assert hasattr(module.weight, "get_high_precision_init_val") == with_gradients
    if with_gradients:
        assert torch.equal(module.weight.get_high_precision_init_val(), value)


def test_a_frozen_weight_stays_frozen():
    module = marked_linear()
    module.weight.requires_grad_(False)
    quantize_weights(module)
    assert not module.weight.requires_grad


def test_a_shared_weight_stays_shared_and_a_second_time_changes_nothing():
    module = torch.nn.ModuleList([marked_linear(), torch.nn.Linear(64, 32)])
    module[1].weight = module[0].weight
    quantize_weights(module)
    shared = module[0].weight
    assert module[1].weight is shared
    quantize_weights(module)
    assert module[0].weight is shared
    assert module[1].weight is shared


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_weights_than_bf16_are_refused(dtype):
    with pytest.raises(ConfigurationError, match="Use --bf16"):
        quantize_weights(marked_linear(dtype))


def layer_job():
    """On one rank: what Megatron's layers and checkpoints make of marks."""
    from megatron_muon.integration.install import install
    from megatron_muon.testing.law.build import parallel_state

    install(device="cpu")
    with parallel_state(1):
        _check_layers()
        _check_wrapper()


def _config(**fields):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=True, fp8="e4m3",
        fp8_recipe="mxfp8", gradient_accumulation_fusion=False, **fields,
    )  # fmt: skip


def _linear(config):
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        64, 96, config=config, init_method=torch.nn.init.normal_, bias=False,
        input_is_parallel=True, skip_bias_add=False,
    )  # fmt: skip


def _check_layers():
    config = _config()
    plain = _linear(config)
    with building_mxfp8_layers():
        marked = _linear(config)
    assert not hasattr(plain.weight, MARK)
    assert getattr(marked.weight, MARK)
    inputs = torch.randn(3, 2, 64).bfloat16().requires_grad_()
    grad = torch.randn(3, 2, 96).bfloat16()
    marked.weight.data.mul_(torch.logspace(-3, 3, 96)[:, None])
    planes = CpuMXFP8Quantizer()(marked.weight).planes
    outputs = marked(inputs)[0]
    outputs.backward(grad)
    assert torch.equal(outputs, inputs @ planes.dequantize("rowwise").t())
    assert torch.equal(inputs.grad, grad @ planes.dequantize("columnwise"))
    wanted = grad.flatten(0, 1).t() @ inputs.detach().flatten(0, 1)
    assert torch.equal(marked.weight.grad, wanted)
    # In evaluation, and with a frozen weight, the values are the same.
    with torch.no_grad():
        assert torch.equal(marked(inputs)[0], outputs)
    marked.weight.requires_grad_(False)
    inputs.grad = None
    marked(inputs)[0].backward(grad)
    assert torch.equal(inputs.grad, grad @ planes.dequantize("columnwise"))


def _check_wrapper():
    """Float16Module makes marked weights MXFP8 where it is told to, and only there."""
    from megatron.core.transformer.module import Float16Module

    for fp8_param in (False, True):
        config = _config(fp8_param=fp8_param)
        with building_mxfp8_layers():
            model = torch.nn.Sequential(_linear(config))
        model.append(_linear(config))
        Float16Module(config, model)
        assert isinstance(model[0].weight, CpuMXFP8Tensor) == fp8_param
        assert not isinstance(model[1].weight, CpuMXFP8Tensor)


@pytest.mark.distributed
def test_marks_are_made_and_used_by_megatrons_layers():
    run_ranks(layer_job, 1, timeout_s=60.0)


def test_checkpoints_take_values():
    param = torch.nn.Parameter(CpuMXFP8Quantizer()(torch.randn(32, 64).bfloat16()))
    entry, plain = SimpleNamespace(data=param), SimpleNamespace(data=torch.zeros(2))
    seen = []
    with standing_in():
        save = cpu_mxfp8._takes_values(lambda state, folder: seen.append((state, folder)))
        save({"weight": entry, "bias": plain}, "folder")
    assert seen[0][1] == "folder"
    assert torch.equal(entry.data, param.dequantize())
    assert type(entry.data) is torch.Tensor
    assert plain.data.shape == (2,)


def test_the_torch_format_holds_values():
    weight = CpuMXFP8Quantizer()(torch.randn(32, 64).bfloat16())
    state, plain = {"weight": weight}, {"step": weight}
    with standing_in():
        generate = cpu_mxfp8._gives_values(lambda: {"model0": state, "optimizer": plain})
        made = generate()
    assert type(made["model0"]["weight"]) is torch.Tensor
    assert torch.equal(made["model0"]["weight"], weight.dequantize())
    assert made["optimizer"]["step"] is weight
