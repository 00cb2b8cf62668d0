"""The numbers of a plan: balance, padding, bytes and memory on known models."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from megatron_muon.bookkeeping.costs import HARDWARE, LayoutCosts, choose_layout
from megatron_muon.bookkeeping.gram_sums import LineRounds, shared_matrices
from megatron_muon.bookkeeping.routing import RoutingRules, SplitRules
from megatron_muon.bookkeeping.schedule import Position, Spread, make_schedule
from megatron_muon.bookkeeping.stage import (
    DEFAULT_BUDGET_NBYTES,
    padding_of,
    stage_loads,
)
from megatron_muon.bookkeeping.units import units_of
from megatron_muon.errors import ConfigurationError
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN, ModelSpec
from megatron_muon.planner.report import make_report
from megatron_muon.planner.sizes import ParallelSizes
from megatron_muon.planner.text import lines_of

GPT2 = BUILT_IN["gpt2-124m"]
H100 = HARDWARE["h100"]
STAGE = {"pp": 8, "ep": 64, "dp": 128, "last_layers": 5}
EXPERTS = ModelSpec(
    name="experts", num_layers=4, hidden_size=48, ffn_hidden_size=64, num_attention_heads=4,
    num_query_groups=2, kv_channels=12, vocab_size=100, num_moe_experts=8, moe_ffn_hidden_size=32,
    moe_layers=(False, True, True, True),
)  # fmt: skip
LATENT = replace(
    EXPERTS, multi_latent_attention=True, q_lora_rank=20, kv_lora_rank=24, qk_head_dim=12,
    qk_pos_emb_head_dim=4, v_head_dim=12,
)  # fmt: skip


def report_of(name, layout="owner", **sizes):
    job = plan_job(BUILT_IN[name], ParallelSizes(**sizes), PlanSettings(layout=layout))
    return make_report(job, H100, with_fingerprint=False)


def muon_buffers(report):
    return [b for stage in report.stages for b in stage.stage.buffers if b.of_matrices]


@pytest.mark.parametrize("layout", ["owner", "flat"])
@pytest.mark.parametrize(
    ("name", "tp", "dp"),
    [
        ("llama3-8b", 4, 4),
        ("llama3-8b", 8, 8),
        ("llama3-70b", 8, 8),
        ("llama3-70b", 8, 16),
        ("qwen3-32b", 8, 16),
    ],
)
def test_the_busiest_rank_has_little_more_than_an_even_share(name, tp, dp, layout):
    report = report_of(name, layout, tp=tp, dp=dp)
    assert report.worst.over_perfect <= 1.05
    assert report.padding <= (1.05 if layout == "owner" else 1.001)


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b", "llama3-70b", "qwen3-32b"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("dp", [2, 4, 16, 32])
def test_the_owner_layout_has_little_padding_where_ranks_have_two_matrices_or_more(name, tp, dp):
    report = report_of(name, tp=tp, dp=dp)
    (buffer,) = muon_buffers(report)
    if len(buffer.layout.places) >= 2 * dp:
        assert report.padding <= 1.05


def test_a_matrix_larger_than_a_shard_is_the_only_reason_for_more():
    report = report_of("llama3-8b", dp=64)
    (buffer,) = muon_buffers(report)
    largest = max(end - start for start, end, _ in buffer.layout.places)
    assert buffer.layout.numel == 64 * largest
    assert 1.07 < report.padding < 1.08


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_the_flat_layout_of_experts_has_no_padding_and_their_owners_none_either(name):
    flat = report_of(name, "flat", **STAGE)
    assert max(padding_of([buffer]) for buffer in muon_buffers(flat)) <= 1.02
    owner = report_of(name, "owner", **STAGE)
    experts = [buffer for buffer in muon_buffers(owner) if buffer.is_expert]
    assert max(padding_of([buffer]) for buffer in experts) <= 1.05


@pytest.mark.parametrize(
    ("name", "tp", "dp", "most"),
    [("gpt2-124m", 1, 4, 0.1), ("llama3-8b", 1, 8, 0.26), ("llama3-8b", 8, 8, 0.26),
     ("llama3-70b", 8, 8, 0.26), ("llama3-8b", 1, 64, 0.05), ("llama3-70b", 8, 64, 0.05),
     ("qwen3-32b", 8, 64, 0.05)],
)  # fmt: skip
def test_the_flat_exchange_is_a_small_part_of_gathering_whole_buckets(name, tp, dp, most):
    stage = report_of(name, "flat", tp=tp, dp=dp).worst
    assert 0 < stage.work.data_nbytes <= most * stage.whole_gather_nbytes


@pytest.mark.full
def test_a_trillion_parameters_in_one_grid_are_balanced():
    report = report_of("kimi-k2", "flat", dp=1024)
    (stage,) = report.stages
    assert len(stage.stage.first_plan.matrices) > 46_000
    assert stage.over_perfect <= 1.01


@pytest.mark.parametrize("layout", ["owner", "flat"])
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        # Latent attention has matrices that every rank of a row holds whole.
        (ParallelSizes(tp=2, dp=5), SplitRules()),
        (ParallelSizes(tp=2, dp=3), SplitRules()),
        (ParallelSizes(tp=2, dp=8, ep=4, etp=1), SplitRules()),
        (ParallelSizes(tp=4, dp=2, ep=2, etp=2), SplitRules(gated_fc1=True)),
    ],
)
def test_bytes_are_those_of_the_schedule_of_every_rank(layout, sizes, splits):
    """The planner adds up pieces; what a rank sends is in the rounds of its own schedule."""
    model = LATENT if sizes.dp == 5 else EXPERTS
    job = plan_job(model, sizes, PlanSettings(layout=layout, splits=splits))
    (stage,) = job.stages
    loads = stage_loads(stage.stage)
    data, tensor, flops = Counter(), Counter(), Counter()
    plan = stage.first_plan
    for grid in {planned.owned.grid for planned in plan.matrices}:
        size, members = stage.grids[grid], plan.on(grid)
        for dp in range(size.dp):
            for tp in range(size.tp):
                position = Position(dp=dp, tp=tp, dp_size=size.dp, tp_size=size.tp)
                schedule = make_schedule(members, position, Spread(True, False), 1 << 40)
                sent = (
                    sum(sum(r.sent) for g in schedule for r in (*g.to_row, *g.from_row)),
                    sum(sum(r.sent) for g in schedule for r in (*g.to_home, *g.from_home)),
                )
                own = sum(p.flops for p in members if (p.home.dp, p.home.tp) == (dp, tp))
                copies = range(sizes.ep) if grid.expert_parallel else [0]
                for copy in copies:
                    rank = (
                        (dp * sizes.ep + copy) * size.tp + tp
                        if grid.expert_parallel
                        else dp * size.tp + tp
                    )
                    data[rank] += sent[0]
                    tensor[rank] += sent[1]
                    flops[rank] += own
    ranks = range(sizes.num_stage_ranks)
    assert loads.data_numel == [data[rank] for rank in ranks]
    assert loads.tensor_numel == [tensor[rank] for rank in ranks]
    assert loads.flops == [flops[rank] for rank in ranks]
    assert sum(loads.data_numel) > 0 or layout == "owner" or sizes.dp != 3


def test_experts_of_every_rank_are_planned_under_their_own_names():
    sizes = ParallelSizes(dp=4, ep=4)
    (stage,) = plan_job(EXPERTS, sizes, PlanSettings()).stages
    names = [{p.matrix.name for p in stage.experts(ep_rank)} for ep_rank in stage.ep_ranks]
    assert len(set.union(*names)) == sum(map(len, names)) == 3 * 8 * 2
    assert stage.plan(1).fingerprint == stage.fingerprint(1) != stage.fingerprint(0)


def test_the_fingerprint_depends_on_every_setting_of_the_plan():
    sizes, settings = ParallelSizes(tp=2, dp=2), PlanSettings()
    prints = [
        plan_job(GPT2, sizes, settings).fingerprint(),
        plan_job(GPT2, replace(sizes, dp=4), settings).fingerprint(),
        plan_job(GPT2, sizes, replace(settings, layout="flat")).fingerprint(),
        plan_job(GPT2, sizes, replace(settings, num_ns_steps=6)).fingerprint(),
        plan_job(GPT2, sizes, replace(settings, splits=SplitRules(heads=True))).fingerprint(),
        plan_job(GPT2, replace(sizes, pp=2), settings).fingerprint(),
        plan_job(
            GPT2, sizes, replace(settings, rules=RoutingRules(exclude=("*fc1*",)))
        ).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)


def test_rules_and_splits_that_apply_to_nothing_are_refused():
    for changes, said in (
        ({"rules": RoutingRules(exclude=("*fc9*",))}, "matches no parameter"),
        ({"splits": SplitRules(gated_fc1=True)}, "--muon-split-gated-fc1 has no effect"),
        ({"rules": RoutingRules(exclude=("*",))}, "none of its 148 parameters is a matrix"),
        ({"layout": "round"}, "--layout 'round'"),
    ):
        with pytest.raises(ConfigurationError, match=said.replace("*", r"\*")):
            plan_job(GPT2, ParallelSizes(), PlanSettings(**changes))


def test_the_default_budget_is_that_of_a_run():
    from megatron_muon.optimizer import station

    assert station.DEFAULT_BUDGET_NBYTES == DEFAULT_BUDGET_NBYTES


def test_memory_is_that_of_buffers_and_of_what_a_rank_holds():
    report = report_of("gpt2-124m", tp=1, dp=4)
    memory = report.stages[0].memory
    padded = sum(b.layout.numel for b in report.stages[0].stage.buffers)
    assert memory.parameters == 2 * padded
    assert memory.gradients == 4 * padded
    assert memory.masters == padded
    muon = sum(b.layout.numel for b in muon_buffers(report))
    assert memory.momentum == pytest.approx(muon + 2 * (padded - muon), rel=1e-6)
    in_fp32 = plan_job(GPT2, ParallelSizes(dp=4), PlanSettings(param_nbytes=4))
    assert make_report(in_fp32, H100).stages[0].memory.masters == 0


def test_the_layout_of_the_faster_step_that_fits_is_chosen():
    owner = LayoutCosts(layout="owner", moved_nbytes=4, flops=1, memory_nbytes=90, seconds=1.0)
    flat = LayoutCosts(layout="flat", moved_nbytes=3, flops=1, memory_nbytes=60, seconds=1.5)
    faster = choose_layout([owner, flat], 100)
    assert faster.layout == "owner"
    assert faster.why.startswith("its step is the fastest: owner sends 4 bytes, computes")
    assert choose_layout([owner, flat], 80).layout == "flat"
    assert choose_layout([owner, flat], 10).why.startswith("none fits into 10 bytes")
    even = replace(flat, seconds=1.01)
    assert choose_layout([owner, even], 100).layout == "flat"


def test_json_has_every_part_and_shares_add_up():
    job = plan_job(EXPERTS, ParallelSizes(tp=2, pp=2, dp=4, ep=2), PlanSettings())
    told = json.loads(json.dumps(make_report(job, H100).to_dict()))
    assert set(told) == {
        "model", "sizes", "layout", "fingerprint", "balance", "padding", "memory", "stages",
        "ownership", "assumptions",
    }  # fmt: skip
    assert told["sizes"]["ranks"] == 16
    assert len(told["stages"]) == 2
    for stage in told["stages"]:
        assert set(stage) == {
            "pipeline_rank", "layers", "matrices", "shared_matrices", "balance", "buffers",
            "bytes", "memory", "step",
        }  # fmt: skip
        assert sum(stage["step"]["shares"].values()) == pytest.approx(1)
        assert stage["memory"]["total_bytes"] == sum(stage["memory"].values()) / 2
    assert len(told["ownership"]) == sum(stage["matrices"] for stage in told["stages"])
    row = told["ownership"][0]
    assert set(row) == {
        "name", "pipeline_rank", "shape", "blocks", "expert_parallel", "bucket", "owners", "home",
        "shared_by", "homes", "flops",
    }  # fmt: skip
    assert told["fingerprint"] == job.fingerprint()


def test_shared_matrices_are_marked_in_text_and_json():
    sizes = ParallelSizes(tp=8, dp=32)
    job = plan_job(BUILT_IN["llama3-70b"], sizes, PlanSettings(share_blocks=True))
    report = make_report(job, H100, with_fingerprint=False)
    said = "\n".join(lines_of(report, 4))
    assert "80 matrices are each shared by several ranks (--muon-share-blocks)" in said
    assert len(re.findall(r"linear_fc1\.weight .* \d+,\d \+1 ", said)) == 1
    assert "counted as split evenly" in said
    told = json.loads(json.dumps(report.to_dict()))
    assert told["stages"][0]["shared_matrices"] == 80
    assert told["stages"][0]["balance"]["flops_max_over_mean"] < 1.17
    for row in told["ownership"]:
        assert row["shared_by"] == len(row["homes"]) == (2 if "fc1" in row["name"] else 1)
        assert row["home"] == row["homes"][0]
    plain = "\n".join(lines_of(report_of("llama3-70b", tp=8, dp=32), 4))
    assert "shared by several" not in plain
    assert "counted as split" not in plain


def test_the_sums_of_gram_matrices_are_counted():
    """Beside the pieces: of two sums of the one shared matrix what its homes send."""
    model = replace(GPT2, num_layers=1)
    rules = RoutingRules(exclude=("*linear_*[!1].weight",))
    sizes = ParallelSizes(dp=4)
    (stage,) = plan_job(model, sizes, PlanSettings(rules=rules, share_blocks=True)).stages
    (planned,) = stage.first_plan.matrices
    assert len(planned.homes) == 4
    numel, owner = planned.matrix.numel, planned.owned.owner
    loads = stage_loads(stage.stage)
    position = Position(dp=0, tp=0, dp_size=4, tp_size=1)
    for dp in range(4):
        at = replace(position, dp=dp)
        shared = shared_matrices(units_of([planned]), range(4), at, in_row=False)
        rounds = LineRounds(dp, 4).sums(shared, 1 << 40)
        sent = 2 * sum(sum(r.sent) for r in (*rounds.gather, *rounds.spread))
        pieces = 3 * numel // 4 if dp == owner else numel // 4
        assert loads.data_numel[dp] == sent + pieces
        assert 0 < sent < 4 * 768**2


def test_text_has_every_part():
    report = report_of("llama3-8b", "flat", tp=2, dp=4)
    said = "\n".join(lines_of(report, 3))
    for part in (
        "llama3-8b: 8.03 B parameters on 8 ranks (TP2 PP1 DP4), layout flat", "padding 1.000",
        "work/bound", "GiB that the busiest rank sends in a step",
        "memory: GiB that the fullest rank keeps, without activations", "exchange, tensor",
        "masters  momentum, moments  scratch", "memory: no activations, workspaces or NCCL buffers",
        "predicted optimizer step of the slowest stage (0), nothing overlapped: ",
        "without forward and backward", "--wrapping builder (buckets on stage 0 only)",
        "decoder.layers.0.mlp.linear_fc1.weight", "and 125 more", "assumptions:",
    ):  # fmt: skip
        assert part in said
    assert re.search(r"linear_fc1\.weight +28672x4096 +dp\d(-\d)? ", said)
    assert "decoder.layers" not in "\n".join(lines_of(report, 0))


@pytest.mark.parametrize(
    ("sizes", "gib", "said"),
    [({"dp": 1}, 80, "39.51 GiB too much"), ({"dp": 8}, 80, "16.68 GiB left for activations"),
     ({"dp": 8}, 63, "0.32 GiB too much"), ({"dp": 1, "pp": 4}, 80, "46.39 GiB left for")],
)  # fmt: skip
def test_what_is_left_of_the_memory_of_the_machine_is_said(sizes, gib, said):
    job = plan_job(BUILT_IN["llama3-70b"], ParallelSizes(tp=8, **sizes), PlanSettings())
    report = make_report(job, replace(H100, memory_nbytes=gib * 2**30), with_fingerprint=False)
    line = f"  of {gib} GiB (h100; --memory sets it), on the worst stage: {said}"
    assert line in "\n".join(lines_of(report, 0))
    memory = report.to_dict()["memory"]
    assert memory["machine_bytes"] == gib * 2**30
    assert memory["left_bytes"] == gib * 2**30 - memory["total_bytes"]
    assert (memory["left_bytes"] < 0) == ("too much" in said)


def test_the_optimizer_alone_is_the_sum_of_the_rows_above_it():
    report = report_of("llama3-8b", tp=8, dp=8)
    lines = list(lines_of(report, 0))
    (at,) = [i for i, line in enumerate(lines) if line.startswith("  optimizer alone")]
    assert [line[2:17].strip() for line in lines[at - 5 : at + 3]] == [
        "Newton-Schulz", "exchange, data", "exchange, tenso", "latency", "elementwise",
        "optimizer alone", "gradient reduce", "weight gather",
    ]  # fmt: skip
    shown = [float(re.search(r"([\d.]+) ms", line)[1]) for line in lines[at - 5 : at + 3]]
    assert shown[5] == pytest.approx(sum(shown[:5]), abs=0.03)
    told = report.to_dict()["stages"][0]["step"]
    assert 1e3 * told["optimizer_seconds"] == pytest.approx(shown[5], abs=0.006)


@pytest.mark.parametrize(
    ("name", "sizes", "share", "said"),
    [
        ("llama3-8b", {"tp": 8, "dp": 8}, False, None),
        ("llama3-8b", {"tp": 8, "dp": 8}, True, "(none is more than a rank's share)"),
        ("gpt2-124m", {"dp": 64}, True, "(none whose sharing lightens the busiest rank)"),
        # Each of the 80 first layers of an MLP is the largest matrix and has a rank of its own.
        ("llama3-70b", {"tp": 8, "dp": 64}, False, "432 of 512 ranks of stage 0 wait for"),
        ("llama3-70b", {"tp": 8, "dp": 64}, True, "160 matrices are each shared by several ranks"),
    ],
)
def test_a_way_to_less_uneven_work_is_named_where_it_helps(name, sizes, share, said):
    settings = PlanSettings(share_blocks=share)
    job = plan_job(BUILT_IN[name], ParallelSizes(**sizes), settings)
    lines = list(lines_of(make_report(job, H100, with_fingerprint=False), 0))
    found = [line for line in lines if "wait for" in line or "shared by several" in line]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert [line.endswith("try `-- --muon-share-blocks`") for line in found if "wait" in line] == (
        [True] if said and "wait" in said else []
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "--overlap-grad-reduce, --wrapping builder (buckets on stage 0 only)"),
        ({"wrapping": "provider"}, "--wrapping provider (buckets on every stage)"),
        ({"overlap": False}, "no --overlap-grad-reduce (no buckets by size)"),
    ],
)
def test_what_the_wrapping_means_for_buckets_is_said(changes, said):
    settings = PlanSettings(bucket_numel=1_000_000, **changes)
    job = plan_job(GPT2, ParallelSizes(pp=2, dp=2), settings)
    report = make_report(job, H100)
    assert said in "\n".join(lines_of(report, 0))
    # A tied embedding has a bucket of its own in any case, among the scalar optimizer's.
    several = [len(buffer.layout.buckets) > 1 for buffer in muon_buffers(report)]
    assert several == ["no --overlap" not in said, "every stage" in said]


def test_text_fits_a_screen_and_neighbouring_stages_alike_are_one_row():
    for name in ("deepseek-v3", "kimi-k2"):
        lines = list(lines_of(report_of(name, "flat", **STAGE), 4, 3))
        assert max(map(len, lines)) <= 100
        assert len(lines) <= 56
        assert len([line for line in lines if re.match(r"1-6 ", line)]) == 3
        assert any(re.match(r"1-6 +8-55 +152 ", line) for line in lines) or name != "kimi-k2"
        assert any(line.startswith("matrices of stage 3, by name") for line in lines)
        assert any(line.startswith("decoder.layers.24.") for line in lines)
    chunked = lines_of(report_of("llama3-8b", pp=4, vpp=2, dp=2), 0)
    assert any(re.match(r"1-3 +4-15,20-31 +32 ", line) for line in chunked)
