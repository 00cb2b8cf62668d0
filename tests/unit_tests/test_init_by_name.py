"""The law: initial values depend on a parameter's name, logical shape and seed, and no more."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.names import SHARED_EMBEDDING_NAME, named_parameters
from megatron_muon.integration.names import ParamShard as Shard
from megatron_muon.testing.init_by_name import (
    draw,
    initialize_by_name,
    parameter_kind,
    parameter_seed,
)

NORMAL = functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)

SHARDED_CASES = [
    pytest.param((32, 12), 0, 1, id="column"),
    pytest.param((12, 32), 1, 1, id="row"),
    pytest.param((32, 12), 0, 2, id="gated"),
    pytest.param((64, 12), 0, 1, id="embedding"),
    pytest.param((32,), 0, 2, id="gated_bias"),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


class Group:
    """A process group's place, without the process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def config(**changes: Any) -> SimpleNamespace:
    settings = {
        "init_method": NORMAL,
        "output_layer_init_method": functools.partial(NORMAL, std=0.002),
        "embedding_init_method": functools.partial(NORMAL, std=0.2),
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "use_mup": False,
    }
    return SimpleNamespace(**settings | changes)


class Linear(torch.nn.Module):
    """A weight with the attributes that Megatron's parallel layers set."""

    def __init__(self, full: tuple[int, ...], dim: int | None, group: Group, cfg: Any) -> None:
        super().__init__()
        self.config, self.tp_group = cfg, group
        local = [n // group.size() if d == dim else n for d, n in enumerate(full)]
        self.weight: Any = torch.nn.Parameter(torch.full(local, float("nan")))
        self.weight.tensor_model_parallel = dim is not None
        if dim is not None:
            self.weight.partition_dim, self.weight.partition_stride = dim, 1


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), float("nan")))
        self.bias = torch.nn.Parameter(torch.full((8,), float("nan")))


class Layer(torch.nn.Module):
    def __init__(self, layer_number: int, group: Group, cfg: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = Norm()
        self.linear_qkv = Linear((24, 8), 0, group, cfg)
        self.linear_proj = Linear((8, 24), 1, group, cfg)
        self.linear_fc1 = Linear((32, 8), 0, group, cfg)
        self.linear_fc2 = Linear((8, 16), 1, group, cfg)


class Chunk(torch.nn.Module):
    """A pipeline stage with `layers` (1-based global numbers) of a tiny model."""

    def __init__(
        self, layers: range, *, tp: Group | None = None, pre: bool = True, **changes: Any
    ) -> None:
        super().__init__()
        tp = tp or Group(0, 1)
        self.config = config(**changes)
        self.share_embeddings_and_output_weights = not pre
        if pre:
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = Linear((16, 8), 0, tp, self.config)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(Layer(n, tp, self.config) for n in layers)
        if not pre:
            self.output_layer = Linear((16, 8), 0, tp, self.config)
            self.output_layer.weight.shared_embedding = True


def weights(*chunks: Chunk, seed: int = 7) -> dict[str, torch.Tensor]:
    initialize_by_name(list(chunks), seed)
    return {e.name: e.param.detach() for chunk in chunks for e in named_parameters(chunk)}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("shape", "dim", "stride"), SHARDED_CASES)
def test_shards_of_every_tp_size_are_pieces_of_one_weight(
    shape: tuple[int, ...], dim: int, stride: int, size: int
) -> None:
    full = draw("w", shape, 1, NORMAL)
    shards = [Shard(dim, rank, size, stride) for rank in range(size)]
    pieces = [shard.cut(full) for shard in shards]
    assert {shards[0].logical_shape(piece.shape) for piece in pieces} == {shape}
    parts = [piece.chunk(stride, dim) for piece in pieces]
    whole = torch.cat([part[i] for i in range(stride) for part in parts], dim)
    assert torch.equal(bits(whole), bits(full))


def test_a_gated_weight_cut_as_if_it_were_plain_is_another_shard() -> None:
    full = draw("w", (32, 12), 1, NORMAL)
    gated, plain = Shard(0, 1, 2, stride=2).cut(full), Shard(0, 1, 2).cut(full)
    assert torch.equal(gated, torch.cat([full[8:16], full[24:32]]))
    assert not torch.equal(gated, plain)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("shape", "dim", "stride"), SHARDED_CASES[:4])
def test_a_shard_is_cut_as_megatron_cuts_it(
    shape: tuple[int, int], dim: int, stride: int, size: int
) -> None:
    full = draw("w", shape, 1, NORMAL)
    for rank in range(size):
        ours = Shard(dim, rank, size, stride).cut(full)
        theirs = torch.nn.Parameter(torch.empty_like(ours))
        _initialize_affine_weight_cpu(
            theirs,
            *shape,
            ours.shape[dim],
            dim,
            lambda weight: weight.copy_(full),
            stride=stride,
            rank=rank,
            world_size=size,
        )
        assert torch.equal(ours, theirs)


def test_uneven_cut_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(ConfigurationError, match="--tensor-model-parallel-size"):
        Shard(0, 0, 4, stride=2).cut(torch.zeros(12, 3))


def test_values_depend_on_name_shape_and_seed_and_on_nothing_else() -> None:
    reference = draw("a.weight", (8, 8), 1, NORMAL)
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(draw("a.weight", (8, 8), 1, NORMAL), reference)
    assert not torch.equal(draw("b.weight", (8, 8), 1, NORMAL), reference)
    assert not torch.equal(draw("a.weight", (8, 8), 2, NORMAL), reference)
    assert not torch.equal(draw("a.weight", (8, 9), 1, NORMAL)[:, :8], reference)
    seeds = {
        parameter_seed(*key) for key in [("a", (1, 23), 4), ("a", (12, 3), 4), ("a", (1, 2), 34)]
    }
    assert len(seeds) == 3


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    draw("w", (8, 8), 1, NORMAL)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_init_method_without_a_generator_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="generator="):
        draw("w", (8, 8), 1, lambda weight: weight.zero_())


@pytest.mark.parametrize("tp", [2, 4])
def test_model_is_the_same_at_every_tp_size(tp: int) -> None:
    whole = weights(Chunk(range(1, 3)))
    ranks = [weights(Chunk(range(1, 3), tp=Group(rank, tp))) for rank in range(tp)]
    for name, full in whole.items():
        dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
        stride = 2 if name.endswith("linear_fc1.weight") else 1
        for rank in range(tp):
            same = full.ndim == 1
            expected = full if same else Shard(dim, rank, tp, stride).cut(full)
            assert torch.equal(bits(ranks[rank][name]), bits(expected)), name


def test_model_is_the_same_at_every_pp_size() -> None:
    whole = weights(Chunk(range(1, 5)))
    stages = weights(Chunk(range(1, 3)), Chunk(range(3, 5), pre=False))
    assert whole.keys() == stages.keys()
    for name in whole:
        assert torch.equal(bits(whole[name]), bits(stages[name])), name
    assert "decoder.layers.3.linear_qkv.weight" in whole


def test_local_layer_numbers_would_repeat_layers() -> None:
    """Negative control: the numbering is what keeps the stages' layers apart."""
    stage = Chunk(range(3, 5), pre=False)
    global_names = {e.name for e in named_parameters(stage)}
    local_names = {name for name, _ in stage.named_parameters()}
    assert "decoder.layers.0.linear_qkv.weight" in local_names - global_names
    first = weights(Chunk(range(1, 3)))["decoder.layers.0.linear_qkv.weight"]
    third = weights(stage)["decoder.layers.2.linear_qkv.weight"]
    assert not torch.equal(first, third)


def test_tied_embedding_of_the_last_stage_is_that_of_the_first() -> None:
    first, last = Chunk(range(1, 2)), Chunk(range(2, 3), pre=False)
    assert torch.equal(weights(first)[SHARED_EMBEDDING_NAME], weights(last)[SHARED_EMBEDDING_NAME])


def test_every_kind_follows_the_init_methods_of_megatron() -> None:
    values = weights(Chunk(range(1, 2)))
    layer = "decoder.layers.0."
    assert (values[layer + "input_layernorm.weight"] == 1).all()
    assert (values[layer + "input_layernorm.bias"] == 0).all()
    for name, std in [
        (layer + "linear_qkv.weight", 0.02),
        (layer + "linear_fc1.weight", 0.02),
        (layer + "linear_proj.weight", 0.002),
        (layer + "linear_fc2.weight", 0.002),
        (SHARED_EMBEDDING_NAME, 0.2),
    ]:
        assert values[name].std().item() == pytest.approx(std, rel=0.25), name
    zero_centered = weights(Chunk(range(1, 2), layernorm_zero_centered_gamma=True))
    assert (zero_centered[layer + "input_layernorm.weight"] == 0).all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "norm"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", "zero"),
        ("decoder.layers.3.self_attention.linear_qkv.bias", "zero"),
        ("decoder.layers.3.self_attention.q_layernorm.weight", "norm"),
        ("decoder.layers.3.self_attention.linear_kv_up_proj.weight", "matrix"),
        ("decoder.layers.3.mlp.router.weight", "matrix"),
        ("decoder.layers.3.mlp.router.bias", "matrix"),
        ("decoder.layers.3.mlp.experts.5.linear_fc2.weight", "output"),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", "matrix"),
        ("decoder.final_layernorm.weight", "norm"),
        ("embedding.position_embeddings.weight", "embedding"),
        ("mtp.layers.0.hnorm.weight", "norm"),
        ("mtp.layers.0.eh_proj.weight", "matrix"),
        ("output_layer.weight", "logits"),
    ],
)
def test_names_of_megatron_are_known(name: str, kind: str) -> None:
    assert parameter_kind(name) == kind


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mixer.A_log", "decoder.weight", "my_linear_fc1"]
)
def test_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        parameter_kind(name)


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
def test_experts_are_numbered_in_the_whole_model(grouped: bool) -> None:
    def expert_chunk(ep: Group) -> torch.nn.Module:
        chunk = torch.nn.Module()
        chunk.config = config()
        chunk.mlp = torch.nn.Module()
        chunk.mlp.experts = experts = torch.nn.Module()
        experts.num_local_experts, experts.ep_group = 4 // ep.size(), ep
        if grouped:
            experts.linear_fc1 = torch.nn.Module()
            for i in range(experts.num_local_experts):
                weight = torch.nn.Parameter(torch.zeros(8, 4))
                experts.linear_fc1.register_parameter(f"weight{i}", weight)
        else:
            experts.local_experts = torch.nn.ModuleList()
            for _ in range(experts.num_local_experts):
                expert = torch.nn.Module()
                expert.linear_fc1 = Linear((8, 4), None, Group(0, 1), chunk.config)
                experts.local_experts.append(expert)
        return chunk

    def values(ep: Group) -> dict[str, torch.Tensor]:
        chunk = expert_chunk(ep)
        initialize_by_name([chunk], 3)
        return {e.name: e.param.detach() for e in named_parameters(chunk)}

    whole = values(Group(0, 1))
    halves = values(Group(0, 2)) | values(Group(1, 2))
    assert list(whole) == [f"mlp.experts.{i}.linear_fc1.weight" for i in range(4)]
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert not torch.equal(
        whole["mlp.experts.0.linear_fc1.weight"], halves["mlp.experts.2.linear_fc1.weight"]
    )


def test_bf16_weights_are_the_rounded_fp32_ones() -> None:
    rounded = weights(Chunk(range(1, 2)).bfloat16())
    exact = weights(Chunk(range(1, 2)))
    for name in exact:
        assert torch.equal(rounded[name], exact[name].bfloat16()), name


def test_what_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="TransformerConfig"):
        initialize_by_name([torch.nn.Linear(2, 2)], 1)
    with torch.device("meta"):
        chunk = Chunk(range(1, 2))
    with pytest.raises(UnsupportedError, match="--init-model-with-meta-device"):
        initialize_by_name([chunk], 1)
    chunk = Chunk(range(1, 2))
    chunk.decoder.layers[0].linear_qkv.tp_group = None
    with pytest.raises(UnsupportedError, match="linear_qkv"):
        initialize_by_name([chunk], 1)
