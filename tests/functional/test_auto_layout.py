"""The layout that a run chooses is the one that ``megatron-muon plan`` says, by the same words."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megatron_muon.bookkeeping.costs import HARDWARE, choose_layout, find_hardware
from megatron_muon.planner.flag_words import parse_flags
from megatron_muon.planner.job import plan_job
from megatron_muon.planner.megatron_flags import from_flags
from megatron_muon.planner.report import make_report
from megatron_muon.planner.sizes import ParallelSizes
from megatron_muon.tools import cli
from tests.functional.jobs import MODEL, MUON, ROOT, launch, run_on

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")
FLAGS = [*MODEL, *MUON, "--mock-data", "--transformer-impl", "local"]
STAGES = "--pipeline-model-parallel-size 2".split()
ONE_MATRIX_FIRST = [
    word
    for glob in ("*layers.0.self_attention*", "*linear_fc2*")
    for word in ("--muon-exclude", glob)
]
"""Leave the first stage one matrix, which its owner would hold alone, and the second one of as many
elements as the others."""
EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2
--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64""".split()


def chosen(tmp_path: Path, ranks: int, flags: list[str]) -> tuple[str, str, str]:
    """Layout and reason in a run's report, and what the run printed."""
    report = tmp_path / "report.json"
    job = launch(
        run_on(ranks, SCRIPT, *FLAGS, *flags, "--muon-report", str(report)), tmp_path / "logs",
        timeout_s=150,
    )  # fmt: skip
    assert job.code == 0, job.said
    told = json.loads(report.read_text())["resolved"]
    return told["layout"], told["layout_why"], job.said


def planned(flags: list[str], dp: int, *options: str) -> tuple[str, str]:
    """Layout and reason of the plan command for the same flags."""
    said = StringIO()
    line = ["plan", "--dp", str(dp), "--json", "-", *options, "--", *FLAGS, *flags]
    with redirect_stdout(said):
        assert cli.main(line) == 0
    told = json.loads(said.getvalue())["layout"]
    return told["kind"], told["why"]


def slow_memory(tmp_path: Path) -> str:
    """A machine on which elements that a rank holds cost most, so that even shares win."""
    path = tmp_path / "slow-memory.json"
    path.write_text('{"memory_nbytes_per_s": 1e6, "latency_s": 1e-9}')
    return str(path)


def test_stages_that_would_choose_apart_choose_together_as_planned(tmp_path):
    machine = slow_memory(tmp_path)
    flags = [*STAGES, *ONE_MATRIX_FIRST, "--muon-hardware", machine]
    source = from_flags(parse_flags([*FLAGS, *flags]), "test")
    hardware = find_hardware(machine, "cpu-gloo", "--muon-hardware")
    costs = []
    for layout in ("owner", "flat"):
        settings = type(source.settings)(layout=layout, overlap=False, rules=source.settings.rules)
        report = make_report(
            plan_job(source.model, ParallelSizes(pp=2, dp=2), settings), hardware, "", False
        )
        costs.append([stage.costs.in_all(layout) for stage in report.stages])
    pairs = zip(*costs, strict=True)
    alone = [choose_layout(pair, hardware.memory_nbytes).layout for pair in pairs]
    assert alone == ["flat", "owner"]
    layout, why, said = chosen(tmp_path, 4, flags)
    assert (layout, why) == planned(flags, 2)
    assert f"  layout {layout}: " in said


def test_a_run_trains_in_the_layout_it_chose_experts_included(tmp_path):
    flags = [*EXPERTS, "--muon-hardware", slow_memory(tmp_path), "--muon-exclude", "*layers.0.*"]
    layout, why, _ = chosen(tmp_path, 2, flags)
    assert (layout, why) == planned(flags, 2)
    assert layout == "flat"


def test_where_no_machine_is_named_a_cpu_run_chooses_for_a_cpu(tmp_path):
    layout, why, _ = chosen(tmp_path, 2, [])
    assert (layout, why) == planned([], 2, "--hardware", "cpu-gloo")
    assert why
    assert (layout, why) != planned([], 2, "--hardware", "h100")
    assert HARDWARE["h100"].link_nbytes_per_s > HARDWARE["cpu-gloo"].link_nbytes_per_s
