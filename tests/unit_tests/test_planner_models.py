"""The models that the planner knows: their published sizes, and Megatron's own names and shapes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_muon.bookkeeping.buffers import flat_layout, owner_layout
from megatron_muon.bookkeeping.layout import LayoutItem
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.models import BUILT_IN, ModelSpec, chunk_params
from megatron_muon.planner.sizes import ParallelSizes, check_sizes, stage_layers
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests import planner_job

SMALL = ModelSpec(
    name="small", num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4,
    num_query_groups=2, kv_channels=6, vocab_size=128, transformer_impl="local",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2-124m", 124.4e6),
        ("llama3-8b", 8.03e9),
        ("llama3-70b", 70.6e9),
        ("qwen3-32b", 32.76e9),
        ("deepseek-v3", 671e9),
        # By its config.json; the paper rounds to 1.04 T (arXiv:2507.20534).
        ("kimi-k2", 1026.4e9),
    ],
)
def test_a_built_in_model_has_the_parameters_that_are_published(name, published):
    assert BUILT_IN[name].num_parameters == pytest.approx(published, rel=1e-3)


def test_a_model_with_another_width_has_not():
    model = replace(BUILT_IN["llama3-8b"], ffn_hidden_size=14336 + 256)
    assert model.num_parameters != pytest.approx(8.03e9, rel=1e-3)


MEGATRON = {
    "dense": (SMALL, {}, False),
    "GPT-2": (
        replace(
            SMALL, gated_linear_unit=False, add_bias_linear=True, normalization="LayerNorm",
            position_embedding_type="learned_absolute", max_position_embeddings=16,
            untie_embeddings_and_output_weights=False,
        ),
        {"learned": True, "tied": True},
        False,
    ),
    "norms of q and k, output gate": (
        replace(SMALL, qk_layernorm=True, attention_output_gate=True, add_qkv_bias=True),
        {},
        False,
    ),
    "experts": (
        replace(
            SMALL, num_moe_experts=3, moe_ffn_hidden_size=20,
            moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True,
        ),
        {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"},
        False,
    ),
    "latent attention": (
        replace(
            SMALL, multi_latent_attention=True, q_lora_rank=10, kv_lora_rank=12, qk_head_dim=6,
            qk_pos_emb_head_dim=4, v_head_dim=8, qk_layernorm=True, num_query_groups=4,
        ),
        {"rope_type": "rope"},
        True,
    ),
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("case", MEGATRON)
def test_names_shapes_and_order_are_megatrons(case):
    model, changes, latent = MEGATRON[case]
    fields = {
        name: getattr(model, name)
        for name in (
            "hidden_size ffn_hidden_size num_query_groups kv_channels gated_linear_unit "
            "add_bias_linear add_qkv_bias qk_layernorm attention_output_gate normalization"
        ).split()
    }
    if model.num_moe_experts:
        fields |= {
            name: getattr(model, name)
            for name in (
                "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size "
                "moe_shared_expert_gate"
            ).split()
        }
    if latent:
        fields |= {
            name: getattr(model, name)
            for name in (
                "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
            ).split()
        }
    (built,) = run_ranks(planner_job.chunk, 1, {**fields, **changes}, latent)
    ours = chunk_params(model, range(2), range(model.num_moe_experts), True, True, 128)
    assert [(param.name, param.shape) for param in ours] == built


def test_only_the_first_and_last_chunk_have_embedding_and_output_layer():
    model = replace(SMALL, untie_embeddings_and_output_weights=False)
    for is_first, is_last, expected in (
        (True, False, {"embedding.word_embeddings.weight"}),
        (False, False, set()),
        (False, True, {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}),
    ):
        params = list(chunk_params(model, [1], [], is_first, is_last, 128, tied_apart=True))
        assert {p.name for p in params if "layers" not in p.name} == expected
        assert all("layers.1." in p.name for p in params if "layers" in p.name)
        assert all(p.is_shared == ("embedding" in p.name) for p in params)


@pytest.mark.parametrize("bucket", [None, 700, 3000])
@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("high_busbw", [False, True])
def test_layouts_are_those_that_megatron_and_training_make(bucket, shards, high_busbw):
    import torch

    from megatron_muon.integration.cpu import import_megatron

    import_megatron()
    from megatron.core.optimizer import distrib_optimizer

    from megatron_muon.optimizer.param_layout import _owner_layout

    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=high_busbw)
    shapes = [(30, 20), (7, 9), (64, 10), (1, 1), (50, 33), (13, 8)]
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    params[2].shared_embedding = True
    items = [LayoutItem(math.prod(shape), 0, shape == (64, 10)) for shape in shapes]
    flat = flat_layout(items, bucket, shards, high_busbw)
    theirs = distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout(
        params, bucket, shards, config
    )
    assert list(flat.places) == [theirs.param_index_map[param] for param in params]
    assert list(flat.buckets) == theirs.bucket_indices

    from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole

    items = [
        replace(item, flops=LogicalMatrix("", shape, whole(shape[0])).ns_flops(1))
        for item, shape in zip(items, shapes, strict=True)
    ]
    owner = owner_layout(items, bucket, shards, high_busbw)
    trained = _owner_layout(params, bucket, shards, config)
    assert owner.numel == trained.numel
    assert list(owner.places) == [
        (p.range.start, p.range.end, p.bucket_idx) for p in trained.placements
    ]


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("llama3-8b", {"tp": 3}, "--tp 3 does not fit llama3-8b: its num_attention_heads of 32"),
        ("qwen3-32b", {"tp": 12}, "num_attention_heads of 64 cannot be cut into 12"),
        ("llama3-8b", {"pp": 7}, "Give a --pp that divides them, such as 1, 2, 4, 8, or --last-s"),
        ("deepseek-v3", {"pp": 8, "dp": 128, "ep": 64}, "--last-stage-layers 5 for 8 layers"),
        ("kimi-k2", {"ep": 7, "dp": 7}, "--ep 7 does not fit kimi-k2: its num_experts of 384"),
        ("kimi-k2", {"ep": 64, "dp": 3}, "Give a --dp that is a multiple of 64"),
        ("kimi-k2", {"ep": 2, "tp": 2, "etp": 2}, "Give a --dp that is a multiple of 2"),
        ("llama3-8b", {"ep": 2, "dp": 2}, "llama3-8b has no experts"),
        ("llama3-8b", {"vpp": 2}, "--vpp 2 needs several pipeline stages"),
        ("llama3-8b", {"pp": 2, "vpp": 3}, "a stage of 16 layers cannot be cut into 3 chunks"),
        ("llama3-8b", {"pp": 64}, "--pp 64 does not fit"),
        ("llama3-8b", {"dp": 0}, "--dp is 0: expected an integer of 1 or more"),
        ("llama3-8b", {"pp": 33}, "each stage needs one. Give a --pp of at most 32, such as 4, 8,"),
        ("llama3-8b", {"pp": 5}, "or --last-stage-layers 4 for 7 layers on each of the others"),
        (
            "llama3-8b",
            {"pp": 2, "first_layers": 40},
            "--first-stage-layers is 40: expected 1 to 32",
        ),
        (
            "llama3-8b",
            {"pp": 4, "first_layers": 5, "last_layers": 4},
            "leave 23 for 2 other stages, each of which needs one or more, all the same. Give a "
            "--pp of 3, 25",
        ),
        ("llama3-8b", {"first_layers": 4}, "leave 28 for 0 other stages"),
        ("deepseek-v3", {"tp": 8, "dp": 8, "ep": 64}, "multiple of 64, or --etp 1"),
        ("llama3-8b", {"dp": 10**12}, "expected 131072 at most"),
    ],
)
def test_impossible_sizes_are_explained(model, sizes, said):
    with pytest.raises(ConfigurationError) as caught:
        check_sizes(BUILT_IN[model], ParallelSizes(**sizes))
    assert said in str(caught.value)


def test_uneven_stages_with_chunks_are_refused():
    with pytest.raises(UnsupportedError, match="stages of"):
        check_sizes(BUILT_IN["llama3-8b"], ParallelSizes(pp=2, vpp=2, first_layers=10))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pp": 2}, [[range(16)], [range(16, 32)]]),
        ({"pp": 2, "last_layers": 10}, [[range(22)], [range(22, 32)]]),
        (
            {"pp": 2, "vpp": 2},
            [[range(8), range(16, 24)], [range(8, 16), range(24, 32)]],
        ),
    ],
)
def test_layers_of_stages_and_chunks(sizes, expected):
    given = ParallelSizes(**sizes)
    assert [stage_layers(BUILT_IN["llama3-8b"], given, r) for r in range(2)] == expected
