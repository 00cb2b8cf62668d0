"""MXFP8 weights: what does not work is refused before any work, and again when it is built."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.errors import ConfigurationError
from megatron_muon.integration import preflight
from megatron_muon.integration.install import install
from megatron_muon.integration.quantized import REFUSALS, Storage, problem
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.command_line import parser

MUON = ["--optimizer", "muon", "--use-distributed-optimizer"]
FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
REUSE = "--reuse-grad-buf-for-mxfp8-param-ag"
GATHER = [*FP8, "--fp8-param-gather", REUSE]

# The command line.


@pytest.fixture
def parse(monkeypatch) -> Iterator[Callable[..., Any]]:
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch) as parse:
        yield parse


def test_mxfp8_with_and_without_the_gather_is_let_through(parse):
    assert not parse(*MUON, *FP8).fp8_param_gather
    assert parse(*MUON, *GATHER).reuse_grad_buf_for_mxfp8_param_ag
    assert parse(*MUON, *GATHER, "--overlap-grad-reduce", "--overlap-param-gather").bf16
    assert parse(*MUON, *GATHER, "--no-use-layer-wise-param-layout").fp8_param_gather
    assert parse("--optimizer", "dist_muon", "--use-distributed-optimizer", *GATHER).fp8


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([*MUON, "--fp4-format", "e2m1"], ["--fp4-format", "--fp8-recipe mxfp8"]),
        ([*MUON, "--fp4-format", "e2m1", "--fp4-param-gather"], ["--fp4-param-gather"]),
        ([*MUON, *FP8, "--fp8-param-gather"],
         ["add --reuse-grad-buf-for-mxfp8-param-ag", "drop --fp8-param-gather"]),
        ([*MUON, *FP8, REUSE], [f"{REUSE} has no effect without --fp8-param-gather"]),
        ([*MUON, "--fp8-param-gather"], ["--fp8-param-gather has no effect without --fp8-format"]),
        (["--optimizer", "muon", *GATHER], ["--fp8-param-gather", "--use-distributed-optimizer"]),
        ([*MUON, *GATHER, "--data-parallel-random-init"],
         ["--data-parallel-random-init", "--fp8-param-gather", "not broadcast"]),
        ([*MUON, *GATHER, "--init-model-with-meta-device"],
         ["--init-model-with-meta-device", "--fp8-param-gather"]),
        ([*MUON, *GATHER, "--moe-single-grouped-weight"], ["--moe-single-grouped-weight"]),
        *(([*MUON, "--fp8-format", "hybrid", "--fp8-recipe", recipe, "--fp8-param-gather"],
           ["--fp8-param-gather", "--fp8-recipe mxfp8 only"])
          for recipe in ("delayed", "tensorwise", "blockwise", "custom")),
    ],
    ids=lambda value: " ".join(value[3:]) if value[0] == "--optimizer" else None,
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_flag_to_change(parse, flags, parts):
    with pytest.raises(ConfigurationError) as caught:
        parse(*flags)
    for part in parts:
        assert part in str(caught.value)


CPU_CANNOT = {
    "the default recipe": (["--fp8-format", "hybrid"], "--fp8-recipe delayed needs Transformer"),
    "tensorwise": (["--fp8-format", "e4m3", "--fp8-recipe", "tensorwise"], "tensorwise needs Tra"),
    "output": ([*FP8, "--fp8-output-proj"], "--fp8-output-proj needs Transformer Engine"),
}


@pytest.mark.parametrize("flags", [MUON, ["--optimizer", "adam"]], ids=["muon", "adam"])
@pytest.mark.parametrize("name", CPU_CANNOT)
def test_what_the_cpu_cannot_compute_is_refused_early(parse, name, flags):
    fp8, message = CPU_CANNOT[name]
    with pytest.raises(ConfigurationError, match=message):
        parse(*flags, *fp8)


@pytest.mark.parametrize("name", CPU_CANNOT)
def test_other_recipes_are_transformer_engines_affair_where_it_is(parse, name, monkeypatch):
    monkeypatch.setattr(preflight, "is_cpu_fp8", lambda: False)
    assert parse(*MUON, *CPU_CANNOT[name][0]).fp8


@pytest.mark.parametrize("precision", [["--fp16"], []], ids=["fp16", "fp32"])
def test_other_weights_than_bf16_are_refused(parse, precision):
    with pytest.raises(ConfigurationError, match="Use --bf16, or drop --fp8-param-gather"):
        parse(*MUON, *GATHER, *precision, dropped=["--bf16"])


def test_other_optimizers_are_megatrons_own_affair(parse):
    assert parse("--optimizer", "adam", "--use-distributed-optimizer", *FP8, "--fp8-param-gather")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--ffn-hidden-size", "80"],
         ["mlp.linear_fc1.weight is (80, 64)", "multiples of 32", "--ffn-hidden-size"]),
        (["--swiglu", "--ffn-hidden-size", "80"], ["mlp.linear_fc2.weight is (64, 80)"]),
        (["--ffn-hidden-size", "96", "--tensor-model-parallel-size", "2"],
         ["mlp.linear_fc1.weight is (48, 64)", "--tensor-model-parallel-size"]),
        (["--tensor-model-parallel-size", "4"],
         ["self_attention.linear_qkv.weight is (48, 64)", "--num-query-groups"]),
        (["--group-query-attention", "--num-query-groups", "1", "--kv-channels", "8"],
         ["self_attention.linear_qkv.weight is (48, 64)", "--kv-channels"]),
        (["--kv-channels", "4", "--group-query-attention", "--num-query-groups", "4"],
         ["self_attention.linear_qkv.weight is (48, 64)"]),
        (["--kv-channels", "12", "--num-attention-heads", "8", "--num-query-groups", "8"],
         None),
        (["--hidden-size", "80", "--kv-channels", "32"],
         ["self_attention.linear_qkv.weight is (384, 80)", "--hidden-size"]),
        (["--num-experts", "4", "--moe-ffn-hidden-size", "48", "--disable-bias-linear"],
         ["mlp.experts.linear_fc1.weight is (48, 64)", "--moe-ffn-hidden-size"]),
        (["--num-experts", "4", "--moe-ffn-hidden-size", "64", "--ffn-hidden-size", "48",
          "--disable-bias-linear"], None),
        (["--num-experts", "4", "--moe-ffn-hidden-size", "64", "--ffn-hidden-size", "48",
          "--moe-layer-freq", "[1,0]", "--disable-bias-linear"],
         ["mlp.linear_fc1.weight is (48, 64)"]),
        (["--num-experts", "4", "--moe-ffn-hidden-size", "64", "--disable-bias-linear",
          "--moe-shared-expert-intermediate-size", "16"],
         ["mlp.shared_experts.linear_fc1.weight is (16, 64)"]),
        (["--tensor-model-parallel-size", "2", "--ffn-hidden-size", "64"], None),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else None,
)  # fmt: skip
def test_a_weight_that_has_no_blocks_is_named(parse, flags, parts):
    if parts is None:
        assert parse(*MUON, *GATHER, *flags).fp8
        return
    with pytest.raises(ConfigurationError) as caught:
        parse(*MUON, *GATHER, *flags)
    for part in parts:
        assert part in str(caught.value)


def test_shapes_matter_where_weights_are_mxfp8_in_a_product_too(parse, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"mlp.linear_fc1.weight is \(80, 64\)"):
        parse(*MUON, *FP8, "--ffn-hidden-size", "80")
    assert parse(*MUON, "--ffn-hidden-size", "80").fp8 is None
    monkeypatch.setattr(preflight, "is_cpu_fp8", lambda: False)
    assert parse(*MUON, "--fp8-format", "hybrid", "--ffn-hidden-size", "80").fp8


# The table.

GOOD = {
    "nvfp4": False, "fp8": True, "gathers": True, "recipe": "mxfp8", "reuses": True,
    "distributed": True, "bf16": True, "grouped": False, "random_init": False, "meta_device": False,
}  # fmt: skip


def test_each_row_refuses_what_no_other_does():
    assert problem(Storage(**GOOD)) is None
    for row in REFUSALS:
        assert row.message == row.message.strip()
        assert row.message.endswith(".")
    wrongs = [
        {"nvfp4": True}, {"gathers": False}, {"fp8": False}, {"recipe": "delayed"},
        {"distributed": False}, {"reuses": False}, {"bf16": False}, {"grouped": True},
        {"random_init": True}, {"meta_device": True},
    ]  # fmt: skip
    found = [problem(Storage(**GOOD | wrong)) for wrong in wrongs]
    assert found == [row.message for row in REFUSALS]


# Construction.


def run_scenarios() -> dict[str, str]:
    """On one rank: return what each scenario says, or the error it ends in."""
    from megatron_muon.testing.law.build import parallel_state

    install(device="cpu")
    with parallel_state(1):
        return {name: _said(scenario) for name, (scenario, _) in SCENARIOS.items()}


def _said(scenario: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            scenario()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "built"


def _wrapped(
    layout: bool = True, reuse: bool = True, run: Any = None, frozen: str = "nothing"
) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training import global_vars
    from megatron.training.models.dist_utils import _ddp_wrap

    from megatron_muon.optimizer.masters import is_quantized
    from tests.unit_tests.cpu_mxfp8_job import Run, gpt

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        fp8_param_gather=reuse or run is None,
        reuse_grad_buf_for_mxfp8_param_ag=reuse,
    )
    args = SimpleNamespace(
        optimizer="muon", use_layer_wise_distributed_optimizer=True,
        use_layer_wise_param_layout=layout,
    )  # fmt: skip
    model = gpt(run or Run(gather=True))
    wrapped = Float16Module(model.config, model)
    for param in wrapped.parameters():
        if frozen == "all" or (frozen == "MXFP8" and is_quantized(param)):
            param.requires_grad_(False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        (chunk,) = _ddp_wrap([wrapped], False, ddp_config, False, pg_collection=groups)
    return chunk


def _bf16() -> Any:
    """Wrap a model without MXFP8 weights."""
    from tests.unit_tests.cpu_mxfp8_job import Run

    return _wrapped(reuse=False, run=Run(fp8=False))


def _build(chunk: Any = None, **changes: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    from megatron_muon.optimizer.config import MuonConfig

    fields = dict(
        optimizer="muon", lr=0.01, bf16=True, params_dtype=torch.bfloat16, fp8_recipe="mxfp8",
        use_layer_wise_distributed_optimizer=True, reuse_grad_buf_for_mxfp8_param_ag=True,
    )  # fmt: skip
    return get_megatron_optimizer(
        MuonConfig(**fields | changes), [_wrapped() if chunk is None else chunk]
    )


def _with(module: str, names: dict[str, Any]) -> None:
    """Build where Megatron takes the MXFP8 weights for another kind."""
    chunk = _wrapped()
    with mock.patch.multiple(f"megatron.core.{module}", **names):
        _build(chunk)


def _nvfp4_weights() -> None:
    from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Tensor

    _with("fp4_utils", {"HAVE_TE_FP4_TENSOR_CLASS": True, "FP4_TENSOR_CLASS": CpuMXFP8Tensor})


def _another_recipe() -> None:
    class Other:
        """What no weight is."""

    _with("fp8_utils", {"MXFP8Tensor": Other})


def _grouped_weights() -> None:
    from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Tensor

    data = mock.patch.object(
        CpuMXFP8Tensor, "rowwise_data", torch.zeros(1, dtype=torch.uint8), create=True
    )
    with data:
        _with("fp8_utils", {"HAVE_TE_GROUPED_TENSOR_CLASS": True, "GroupedTensor": CpuMXFP8Tensor})


def _frozen_after_wrapping() -> None:
    chunk = _wrapped()
    frozen = next(p for p in chunk.parameters() if getattr(p, "is_mxfp8_weight", False))
    frozen.requires_grad_(False)
    _build(chunk)


def _model_says(field: str, value: Any, on_ranks: tuple[int, ...] = (0, 1)) -> None:
    chunk = _wrapped()
    if torch.distributed.get_rank() in on_ranks:
        setattr(chunk.config, field, value)
    _build(chunk)


SCENARIOS: dict[str, tuple[Callable[[], Any], str]] = {
    "all is well": (_build, "built"),
    "all is well without a layout": (lambda: _build(_wrapped(layout=False)), "built"),
    "nvfp4": (lambda: _model_says("fp4", "e2m1"), "UnsupportedError: --fp4-format: NVFP4 does"),
    "nvfp4 on one rank": (lambda: _model_says("fp4", "e2m1", (1,)), "UnsupportedError: --fp4-fo"),
    "nvfp4 weights": (_nvfp4_weights, "UnsupportedError: --fp4-format: NVFP4 does not"),
    "another recipe": (_another_recipe, "UnsupportedError: --fp8-param-gather works with --opt"),
    "grouped weights": (_grouped_weights, "UnsupportedError: --moe-single-grouped-weight does no"),
    "meta device": (lambda: _model_says("init_model_with_meta_device", True),
                    "UnsupportedError: --init-model-with-meta-device does not"),
    "no buffer": (lambda: _wrapped(reuse=False), "UnsupportedError: --fp8-param-gather with --fp8"),
    "no buffer without a layout": (lambda: _build(_wrapped(layout=False, reuse=False)),
                                   "UnsupportedError: --fp8-param-gather with --fp8-recipe mxfp8"),
    "no buffer of the optimizer": (lambda: _build(reuse_grad_buf_for_mxfp8_param_ag=False),
                                   "ConfigurationError: DDP's config has reuse_grad_buf_for_mxf"),
    "no buffer of DDP": (lambda: _build(_bf16(), fp8_recipe=None),
                         "ConfigurationError: DDP's config has reuse_grad_buf_for_mxfp8_param_ag"),
    "frozen, and no buffer": (
        lambda: _build(
            _wrapped(reuse=False, frozen="MXFP8"), reuse_grad_buf_for_mxfp8_param_ag=False
        ),
        "built",
    ),
    "all frozen": (lambda: _build(_wrapped(frozen="all")),
                   "ConfigurationError: --optimizer muon: no parameter of the model requires a "),
    "all frozen without a layout": (
        lambda: _build(_wrapped(layout=False, frozen="all")),
        "ConfigurationError: --optimizer muon: no parameter of the model requires a gradient",
    ),
    "frozen after wrapping": (_frozen_after_wrapping,
                              "ConfigurationError: A quantized weight of shape (64, 64) was froz"),
    "not distributed": (
        lambda: _build(_wrapped(layout=False), use_layer_wise_distributed_optimizer=False),
        "UnsupportedError: --fp8-param-gather does not work with --optimizer muon alone: add "
        "--use-distributed-optimizer",
    ),
    "no masters": (lambda: _build(bf16=False, params_dtype=torch.float32),
                   "UnsupportedError: --fp8-param-gather: MXFP8 weights are made of bf16 ones"),
}  # fmt: skip
"""What is built, and how what it says begins."""


@cache
def said() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2, timeout_s=80)


@pytest.mark.distributed
@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", SCENARIOS)
def test_construction_says_the_same_on_every_rank(name):
    first, second = (rank[name] for rank in said())
    assert first.startswith(SCENARIOS[name][1])
    assert first == second
