"""``--muon-report``: one JSON file of the whole job, whole at every moment."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_muon.collectives.span import Span
from megatron_muon.optimizer.muon import StepAccount
from megatron_muon.optimizer.report import GROWTH_BETWEEN_WRITES, Report
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.job import run_cases
from megatron_muon.testing.law.model import blocks, logical_shapes
from megatron_muon.testing.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on four ranks: what each rank did, and the report."""
    folder = tmp_path_factory.mktemp("report")
    cases = [
        Case(tp=2, skip_above=300.0, report=str(folder / "grid.json")),
        Case(pp=2, tp=2, report=str(folder / "stages.json")),
    ]
    ranks = run_ranks(run_cases, 4, cases, timeout_s=60, logs=folder)
    return {
        name: (case, [rank[i] for rank in ranks])
        for i, (name, case) in enumerate(zip(("grid", "stages"), cases, strict=True))
    }


@pytest.mark.parametrize("name", ["grid", "stages"])
def test_file_is_whole_after_every_step(runs, name):
    _, ranks = runs[name]
    snapshots = [json.loads(text) for text in ranks[0].snapshots]
    assert [len(snapshot["steps"]) for snapshot in snapshots] == [1, 2, 3]
    for snapshot in snapshots:
        assert set(snapshot) == {"resolved", "routing", "plan", "memory", "steps"}
    assert not any(rank.snapshots for rank in ranks[1:])


@pytest.mark.parametrize("name", ["grid", "stages"])
def test_steps_are_summed_over_all_ranks(runs, name):
    case, ranks = runs[name]
    report = json.loads(ranks[0].snapshots[-1])
    steps = report["steps"]
    assert sum(s["newton_schulz_calls"] for s in steps) == sum(r.newton_schulz_calls for r in ranks)
    assert sum(s["newton_schulz_flops"] for s in steps) == sum(r.newton_schulz_flops for r in ranks)
    assert sum(s["collectives"]["calls"] for s in steps) == sum(r.collectives for r in ranks)
    assert sum(s["collectives"]["bytes"] for s in steps) == sum(r.exchanged_nbytes for r in ranks)
    every_block = sum(map(len, blocks(case).values()))
    for step in steps:
        assert step["skipped"] == (step["newton_schulz_calls"] == 0)
        assert step["newton_schulz_calls"] in (0, every_block)
        assert step["newton_schulz_flops"] in (0, sum(row["flops"] for row in report["routing"]))
        assert (step["peak_scratch_bytes"] > 0) == (not step["skipped"])
        assert set(step["seconds"]) == {"momentum", "exchange", "newton_schulz", "update"}
        assert (min(step["seconds"].values()) > 0) == (not step["skipped"])


def test_skipped_step_is_reported(runs):
    steps = json.loads(runs["grid"][1][0].snapshots[-1])["steps"]
    assert [step["skipped"] for step in steps] == [False, True, False]


@pytest.mark.parametrize("name", ["grid", "stages"])
def test_routing_has_a_row_for_every_parameter_of_the_whole_model(runs, name):
    case, ranks = runs[name]
    rows = {row["name"]: row for row in json.loads(ranks[0].snapshots[-1])["routing"]}
    assert {n: tuple(row["logical_shape"]) for n, row in rows.items()} == logical_shapes(case)
    for parameter, row in rows.items():
        expected = blocks(case).get(parameter, [])
        assert row["optimizer"] == ("muon" if expected else "scalar")
        assert [block["shape"][0] for block in row["blocks"]] == list(map(len, expected))
        assert len(row["owner_ranks"]) == (case.tp if expected else 0)
        assert (row["home"] is not None) == bool(expected)
        assert (row["flops"] > 0) == bool(expected)
    qkv = rows["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [block["name"] for block in qkv["blocks"]] == ["q", "k", "v"]
    assert rows["embedding.word_embeddings.weight"]["reason"] == "embedding or output layer"
    assert rows["decoder.final_layernorm.weight"]["reason"] == "1-dimensional"


def test_plan_and_settings(runs):
    case, ranks = runs["grid"]
    report = json.loads(ranks[0].snapshots[0])
    assert set(report["plan"]) == {
        "fingerprint", "flops_max_over_mean", "numel_max_over_mean", "padding_ratio",
    }  # fmt: skip
    assert report["plan"]["flops_max_over_mean"] >= 1
    assert report["plan"]["padding_ratio"] >= 1
    assert report["resolved"]["momentum"] == case.momentum
    assert report["resolved"]["tp_mode"] == "owner"
    work = {}
    for row in report["routing"]:
        if row["home"] is not None:
            place = (row["home"]["data"], row["home"]["tensor"])
            work[place] = work.get(place, 0) + row["flops"]
    assert report["plan"]["flops_max_over_mean"] == max(work.values()) / (sum(work.values()) / 4)
    done = {(r.dp_rank, r.tp_rank): r.newton_schulz_flops for r in ranks}
    assert done == {place: flops * 2 for place, flops in work.items()}  # one of three was skipped


@pytest.mark.parametrize("name", ["grid", "stages"])
def test_memory_is_that_of_the_rank_with_most(runs, name):
    _, ranks = runs[name]
    memory = json.loads(ranks[0].snapshots[0])["memory"]
    # fp32 weights lie in DDP's buffers, as their gradients do.
    held = [4 * sum(buffer.numel for buffer in rank.buffers) for rank in ranks]
    assert memory == {
        "parameters_bytes": max(held), "gradients_bytes": max(held), "staging_bytes": 0,
        "gather_bytes": 0,
    }  # fmt: skip
    assert not any("MXFP8" in rank.printed for rank in ranks)


@pytest.mark.parametrize("name", ["grid", "stages"])
def test_start_up_block_counts_the_whole_model_once(runs, name):
    case, ranks = runs[name]
    lines = ranks[0].printed.splitlines()
    numel = {n: s[0] * (s[1] if len(s) == 2 else 1) for n, s in logical_shapes(case).items()}
    muon = [numel[parameter] for parameter in blocks(case)]
    settings = " ".join(line.strip() for line in lines if len(line) <= 100)
    resolved = json.loads(ranks[0].snapshots[0])["resolved"]
    for setting in ("momentum", "tp_mode", "layout", "exchange_dtype"):
        assert f"--muon-{setting.replace('_', '-')} {resolved[setting]} " in settings
    assert "--muon-include" not in settings
    assert "None" not in settings
    assert lines[0] == "megatron-muon: Muon is on"
    assert f"  Muon: {len(muon)} parameters, {sum(muon)} elements" in lines
    scalars = len(numel) - len(muon), sum(numel.values()) - sum(muon)
    assert f"  adam: {scalars[0]} parameters, {scalars[1]} elements" in lines
    assert (
        sum(json.loads(ranks[0].snapshots[0])["plan"]["fingerprint"] in line for line in lines) == 1
    )
    assert not any("megatron-muon" in rank.printed for rank in ranks[1:])


def test_long_runs_do_not_write_the_whole_file_at_every_step(tmp_path, monkeypatch):
    report = Report(tmp_path / "report.json", {}, writes=True)
    sizes = []
    monkeypatch.setattr(Report, "write", _count_rows(Report.write, sizes))
    for _ in range(500):
        report.add_step(StepAccount(), False, Span([], torch.device("cpu")))
    assert sizes[:20] == list(range(1, 21))
    assert sum(sizes) < 500 * (2 / GROWTH_BETWEEN_WRITES)
    assert len(json.loads((tmp_path / "report.json").read_text())["steps"]) >= 490


def _count_rows(write, sizes):
    def counting(report):
        sizes.append(len(report.steps))
        write(report)

    return counting


def test_a_report_that_cannot_be_written_any_more_does_not_end_training(tmp_path, caplog):
    folder = tmp_path / "reports"
    folder.mkdir()
    report = Report(folder / "report.json", {}, writes=True)
    report.write()
    (folder / "report.json").unlink()
    folder.rmdir()
    report._write_or_stop()
    report._write_or_stop()
    assert [r.message for r in caplog.records if "cannot be written any more" in r.message] == [
        caplog.records[0].message
    ]
    assert not report.writes
