"""The planner plans what a run plans: its fingerprint is that of real Megatron models."""

from functools import cache

import pytest

from megatron_muon.bookkeeping.routing import RoutingRules, SplitRules
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import ModelSpec
from megatron_muon.planner.sizes import ParallelSizes
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import FFN, HEAD, HEADS, HIDDEN, VOCAB
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.planner_job import fingerprints

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

BUCKETS = {"overlap_grad": True, "bucket_size": 5000}
SHARED = {"layers": 1, "exclude": "*linear_*[!1].weight", "share_blocks": True}
CASES = {
    "owner layout": Case(),
    "flat layout in buckets": Case(layout="flat", **BUCKETS),
    "tensor parallel": Case(tp=2),
    "heads and gates apart": Case(
        groups=4, output_gate=True, split_heads=True, split_gated_fc1=True, **BUCKETS
    ),
    "an exclusion": Case(exclude="*fc1*"),
    "two stages": Case(pp=2),
    "two stages in buckets, by a provider": Case(pp=2, layout="flat", **BUCKETS),
    "two stages in buckets, by a builder": Case(pp=2, layout="flat", wrap="builder", **BUCKETS),
    "two stages of two chunks": Case(pp=2, vpp=2, layers=4),
    "a matrix that two ranks of a row share": Case(tp=2, **SHARED),
    "a matrix that two ranks of a column share": Case(layout="flat", **SHARED),
    "experts": Case(experts=4, gated=False),
    "experts of two ranks": Case(experts=4, ep=2, bias=False),
    "experts of two ranks, flat": Case(experts=4, ep=2, bias=False, layout="flat"),
    "experts that tensor parallelism does not cut": Case(experts=4, tp=2, etp=1, bias=False),
}


@cache
def printed():
    return dict(zip(CASES, run_ranks(fingerprints, 2, list(CASES.values()))[0], strict=True))


def planned(case):
    model = ModelSpec(
        name="law", num_layers=case.layers, hidden_size=HIDDEN, ffn_hidden_size=FFN,
        num_attention_heads=HEADS, num_query_groups=case.groups, kv_channels=HEAD,
        vocab_size=VOCAB, padded_vocab_size=VOCAB, gated_linear_unit=case.gated,
        add_bias_linear=case.bias, attention_output_gate=case.output_gate,
        num_moe_experts=case.experts, moe_ffn_hidden_size=FFN, transformer_impl="local",
    )  # fmt: skip
    sizes = ParallelSizes(
        tp=case.tp, pp=case.pp, dp=2 // (case.tp * case.pp), ep=case.ep, etp=case.etp,
        vpp=case.vpp or 1,
    )  # fmt: skip
    settings = PlanSettings(
        layout=case.layout,
        overlap=case.overlap_grad,
        bucket_numel=case.bucket_size,
        wrapping="builder" if case.wrap == "builder" else "provider",
        splits=SplitRules(
            qkv=case.split_qkv, gated_fc1=case.split_gated_fc1, heads=case.split_heads
        ),
        rules=RoutingRules(exclude=(case.exclude,) if case.exclude else ()),
        share_blocks=case.share_blocks,
    )
    return plan_job(model, sizes, settings)


@pytest.mark.parametrize("name", CASES)
def test_the_fingerprint_is_that_of_a_run(name):
    assert planned(CASES[name]).fingerprint() == printed()[name]


def test_shared_matrices_are_shared():
    for name, case in CASES.items():
        (stage, *_) = planned(case).stages
        shared = [len(item.homes) for item in stage.first_plan.matrices if item.sharers]
        assert shared == ([2] if "share" in name else [])


def test_every_case_has_a_plan_of_its_own():
    assert len(set(printed().values())) == len(CASES)
