"""Names and shards of parameters, on modules that need no process group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.matrix import whole
from megatron_muon.bookkeeping.routing import RoutingRules, SplitRules
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Quantizer
from megatron_muon.integration.install import install, uninstall
from megatron_muon.integration.names import ParamShard, named_parameters, route_parameter


class _Group:
    """Rank 1 of 2."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def _model(*, group_around: bool) -> torch.nn.Module:
    """A linear attention's convolution: cut by tensor parallelism, held by a plain module."""
    model = torch.nn.Module()
    model.mixer = torch.nn.Module()
    if group_around:
        model.mixer.tp_group = _Group()
    model.mixer.conv1d = torch.nn.Conv1d(4, 4, 3, groups=4, bias=False)
    model.mixer.norm = torch.nn.LayerNorm(4)
    weight = model.mixer.conv1d.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    return model


def test_a_plain_module_is_cut_by_the_group_of_the_module_around_it() -> None:
    shards = {e.name: e.shard for e in named_parameters(_model(group_around=True))}
    assert shards["mixer.conv1d.weight"] == ParamShard(0, 1, 2, 1)
    assert shards["mixer.norm.weight"] == ParamShard()


def test_a_cut_weight_without_any_group_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"mixer\.conv1d\.weight"):
        list(named_parameters(_model(group_around=False)))


# Rows that are cut again.


def _part(name: str, *shape: int, tp: bool = False, padding: int = 3) -> torch.nn.Module:
    """A model with one weight of which this rank has the second part of two, filled up."""
    *path, label = name.split(".")
    module = model = torch.nn.Module()
    for step in path:
        module.add_module(step, torch.nn.Module())
        module = module.get_submodule(step)
    if tp:
        module.tp_group = _Group()
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.is_gtp_weight_remat, weight.group, weight.pad_length = True, _Group(), padding
    module.register_parameter(label, weight)
    return model


def test_rows_that_fill_parts_up_are_no_rows_of_the_matrix() -> None:
    (entry,) = named_parameters(_part("decoder.linear.weight", 4, 6))
    matrix = route_parameter(entry, RoutingRules(), SPLITS).matrix
    assert entry.shard == ParamShard(gtp_rank=1, gtp_size=2, gtp_padding=3)
    assert (matrix.shape, matrix.local_shape) == ((5, 6), (4, 6))
    assert (matrix.gtp_size, matrix.gtp_rows) == (2, 4)
    assert matrix.blocks == whole(5)


@pytest.mark.parametrize("rank", range(2))
def test_a_part_is_cut_as_megatron_cuts_it(rank) -> None:
    weight = torch.arange(60.0).view(10, 6)
    shard = ParamShard(0, 1, 2, gtp_rank=rank, gtp_size=2, gtp_padding=3)
    filled = torch.cat([weight[5:], torch.zeros(3, 6)])
    assert torch.equal(shard.cut(weight), filled[4 * rank : 4 * rank + 4])
    assert shard.logical_shape((4, 6)) == (10, 6)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (_part("mlp.experts.linear_fc1.weight", 2, 4, 6),
         r"--expert-tensor-parallel-num-weight-shards cuts once more, is of shape \(2, 4, 6\)"),
        (_part("mlp.linear.bias", 4), "--tensor-parallel-num-weight-shards .* of shape"),
        (_part("mlp.linear.weight", 4, 6, tp=True),
         "whose rows --tensor-parallel-num-weight-shards .* copied on 2 tensor-parallel ranks"),
    ],
)  # fmt: skip
def test_parts_that_are_cut_in_another_way_are_refused(model, says) -> None:
    with pytest.raises(UnsupportedError, match=says):
        list(named_parameters(model))


@pytest.fixture
def mxfp8():
    """Megatron takes the stand-in for a weight of Transformer Engine's."""
    uninstall()
    install(device="cpu")
    yield
    uninstall()


def test_a_part_in_fp8_is_refused(mxfp8) -> None:
    model = _part("mlp.linear.weight", 32, 32)
    kept = vars(model.mlp.linear.weight)
    quantized = CpuMXFP8Quantizer()(torch.ones(32, 32, dtype=torch.bfloat16))
    model.mlp.linear.weight = torch.nn.Parameter(quantized)
    vars(model.mlp.linear.weight).update(kept)
    with pytest.raises(
        UnsupportedError, match=r"mlp\.linear\.weight.* kept in FP8: drop --fp8-par"
    ):
        list(named_parameters(model))


# Cutting and routing.


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_pieces_of_all_ranks_are_the_weight_cut_part_by_part(size, stride, piece, dim) -> None:
    shape = [2, 3, 2]
    shape[dim] = size * stride * piece
    weight = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    pieces = [ParamShard(dim, rank, size, stride).cut(weight) for rank in range(size)]
    lines = weight.split(piece, dim)
    for rank, held in enumerate(pieces):
        expected = [lines[part * size + rank] for part in range(stride)]
        assert torch.equal(held, torch.cat(expected, dim))
        assert ParamShard(dim, rank, size, stride).logical_shape(held.shape) == tuple(shape)


def test_a_weight_that_cannot_be_cut_evenly_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="--tensor-model-parallel-size"):
        ParamShard(0, 0, 2, 2).cut(torch.zeros(6, 2))


CONFIG = SimpleNamespace(
    num_attention_heads=4, num_query_groups=2, kv_channels=2, gated_linear_unit=True,
    moe_ffn_hidden_size=4,
)  # fmt: skip
SPLITS = SplitRules(qkv=True, gated_fc1=True, heads=True)


def _weight(module: torch.nn.Module, label: str, *shape: int, dim: int | None) -> None:
    """Hang a weight into a module, cut along ``dim`` as Megatron marks it."""
    param = torch.nn.Parameter(torch.zeros(shape))
    if dim is not None:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
    module.register_parameter(label, param)


def _experts(name: str, *shape: int, dim: int, interleave: int | None = None, grouped=True):
    """Return the route of one weight of experts, on rank 1 of 2."""
    layer, label = name.split(".")
    model = torch.nn.Module()
    model.config = SimpleNamespace(**vars(CONFIG), moe_mlp_glu_interleave_size=interleave)
    model.mlp = torch.nn.Module()
    model.mlp.experts = torch.nn.Module()
    linear = torch.nn.Module()
    model.mlp.experts.add_module(layer, linear)
    linear.tp_group = _Group()
    if grouped:
        linear.num_gemms = 3
    _weight(linear, label, *shape, dim=dim)
    (entry,) = named_parameters(model)
    return route_parameter(entry, RoutingRules(), SPLITS)


def _row_names(matrix):
    """Name of the block and number of the matrix in it of every row, written row by row."""
    rows = [""] * matrix.shape[0]
    for block in matrix.blocks:
        lines = [row for start, end in block.runs() for row in range(start, end)]
        for i, row in enumerate(lines):
            rows[row] = f"{block.name}{i * block.batch // len(lines)}"
    return " ".join(rows)


def test_stacked_experts_are_seen_as_one_matrix_whose_experts_are_cut_one_by_one() -> None:
    """Three experts of eight rows, of which this rank has gate and up rows, two and two."""
    matrix = _experts("linear_fc1.weight", 3, 4, 5, dim=0).matrix
    assert matrix.name == "mlp.experts.linear_fc1.weight"
    assert matrix.shape == (24, 5)
    assert matrix.local_shape == (12, 5)
    assert (matrix.tp_dim, matrix.tp_size, matrix.tp_stride) == (0, 2, 6)
    assert matrix.expert_tp
    expert = "gate{0} gate{0} gate{0} gate{0} up{0} up{0} up{0} up{0}"
    assert _row_names(matrix) == " ".join(expert.format(e) for e in range(3))


def test_stacked_experts_cut_by_columns_keep_their_rows() -> None:
    matrix = _experts("linear_fc2.weight", 3, 8, 5, dim=1).matrix
    assert (matrix.shape, matrix.local_shape) == ((24, 10), (24, 5))
    assert (matrix.tp_dim, matrix.tp_stride) == (1, 1)
    assert _row_names(matrix) == " ".join(8 * ["expert0"] + 8 * ["expert1"] + 8 * ["expert2"])


def test_a_stack_of_another_module_has_its_own_dimensions() -> None:
    route = _experts("linear_fc1.weight", 3, 4, 5, dim=1, grouped=False)
    assert route.matrix.local_shape == (12, 5)
    assert route.matrix.tp_stride == 6
    assert route.reason == "3 experts"


def test_gate_and_up_that_alternate_are_cut_as_one() -> None:
    matrix = _experts("linear_fc1.weight1", 4, 5, dim=0, interleave=2).matrix
    assert matrix.name == "mlp.experts.1.linear_fc1.weight"
    assert (matrix.shape, matrix.tp_stride) == ((8, 5), 1)
    assert _row_names(matrix) == "gate0 gate0 up0 up0 gate0 gate0 up0 up0"


def test_stacked_biases_of_experts_are_no_matrix() -> None:
    route = _experts("linear_fc1.bias", 3, 4, dim=0)
    assert route.facts.shape == (3, 8)
    assert (route.optimizer, route.reason, route.matrix) == ("scalar", "bias of experts", None)


def test_a_stack_outside_the_experts_is_none() -> None:
    model = _model(group_around=True)
    routes = {
        entry.name: route_parameter(entry, RoutingRules(), SPLITS)
        for entry in named_parameters(model)
    }
    assert routes["mixer.conv1d.weight"].optimizer == "scalar"
    assert routes["mixer.conv1d.weight"].reason == "3-dimensional"


def _dense(label: str, *shape: int, splits: SplitRules = SPLITS):
    model = torch.nn.Module()
    model.config = CONFIG
    model.attention = torch.nn.Module()
    linear = torch.nn.Module()
    model.attention.add_module(label, linear)
    linear.tp_group = _Group()
    _weight(linear, "weight", *shape, dim=0)
    (entry,) = named_parameters(model)
    return route_parameter(entry, RoutingRules(), splits)


def test_heads_are_split_on_the_logical_matrix() -> None:
    """The shard of eight rows holds one of two query groups."""
    route = _dense("linear_qkv", 8, 3)
    group = "q head{} q head{} q head{} q head{} k head{} k head{} v head{} v head{}"
    assert _row_names(route.matrix) == " ".join(
        [group.format(0, 0, 1, 1, 0, 0, 0, 0), group.format(2, 2, 3, 3, 1, 1, 1, 1)]
    )
    assert route.reason == "matrix"


def test_a_warning_stands_in_the_reason() -> None:
    route = _dense("linear_kv_up_proj", 8, 3)
    assert route.matrix.blocks == whole(16)
    assert route.reason.startswith("matrix; WARNING: whole, since --muon-split-heads")
    assert _dense("linear_kv_up_proj", 8, 3, splits=SplitRules()).reason == "matrix"
