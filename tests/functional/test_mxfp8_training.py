"""The real script trains with gathered MXFP8 weights as with bf16 ones quantized where used.

Losses, validation losses, norms of gradients and of parameters are float32 and equal to the last
bit: whether weights are gathered as MXFP8, whether that overlaps, and where they lie.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megatron_muon.testing.golden import Mutant
from megatron_muon.testing.training import train
from tests.functional.jobs import MODEL, MUON

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

STEPS, INTERVAL = 20, 5
FLAGS = [
    *MODEL, *MUON, "--mock-data", "--ffn-hidden-size", "128", "--train-iters", str(STEPS),
    "--eval-interval", str(INTERVAL), "--eval-iters", "1", "--log-params-norm",
    "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8",
]  # fmt: skip
METRICS = ("lm loss", "lm loss validation", "grad-norm", "params-norm")

MODELS: dict[str, tuple[int, list[str]]] = {
    "dense": (2, []),
    "TP2": (4, ["--tensor-model-parallel-size", "2"]),
    "experts": (
        2,
        ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2",
         "--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "64"],
    ),
    "first layer in bf16": (
        2,
        ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "1",
         "--num-layers-at-end-in-bf16", "0"],
    ),
}  # fmt: skip
"""Number of ranks and flags."""
LAYOUTS = {
    "owner": ["--muon-layout", "owner"], "flat": ["--muon-layout", "flat"],
    # A budget below most weights: they are gathered one or a few at a time.
    "none": ["--no-use-layer-wise-param-layout", "--muon-gather-budget-mib", "0.02"],
}  # fmt: skip
GATHER = ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]

Way = tuple[str, bool, bool]
"""Layout, whether weights are gathered as MXFP8, whether that overlaps."""

REFERENCE: Way = ("owner", False, False)
WAYS: list[Way] = [
    (layout, gathers, overlaps) for layout in LAYOUTS
    for gathers in (False, True) for overlaps in (False, True)
    if (layout, gathers, overlaps) != REFERENCE
]  # fmt: skip
DEFAULT = {("owner", True, False), ("owner", True, True), ("none", True, False)}
"""What is trained unless everything is: of each part of the repair, one run that needs it."""

Curves = dict[str, list[tuple[int, float]]]


class _Runs:
    """Runs of this session, each trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves: dict[tuple[str, Way], Curves] = {}

    def curves(self, model: str, way: Way) -> Curves:
        if (model, way) not in self._curves:
            folder = self.folder_of(model, way)
            self._curves[model, way] = run(model, way, folder, None)
        return self._curves[model, way]

    def folder_of(self, model: str, way: Way) -> Path:
        return self.folder / "_".join([model, *map(str, way)]).replace(" ", "_")


def run(model: str, way: Way, folder: Path, mutant: Mutant | None) -> Curves:
    """Train and return every metric, as float32 at each step it was written for."""
    layout, gathers, overlaps = way
    num_ranks, flags = MODELS[model]
    flags = [*FLAGS, *flags, *LAYOUTS[layout], *gathers * GATHER, *overlaps * OVERLAP]
    report = ["--muon-report", str(folder / "report.json")]
    train([*flags, *report], num_ranks, folder, mutant=mutant, timeout_s=200)
    return read_curves(folder / "tensorboard")


def read_curves(folder: Path) -> Curves:
    """Read the metrics; at the last step two evaluations write the validation loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.glob("events.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    curves = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in METRICS}
    evaluations = [*range(INTERVAL, STEPS + 1, INTERVAL), STEPS, STEPS]
    for name, points in curves.items():
        steps = evaluations if "validation" in name else list(range(1, STEPS + 1))
        assert [step for step, _ in points] == steps, name
    return curves


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> _Runs:
    """Runs of this session."""
    return _Runs(tmp_path_factory.mktemp("mxfp8"))


def _marked(model: str, way: Way) -> object:
    runs_always = way in DEFAULT if model == "dense" else way == ("owner", True, True)
    marks = [] if runs_always and model != "TP2" else [pytest.mark.full]
    layout, gathers, overlaps = way
    words = [model, layout, *gathers * ["gathered"], *overlaps * ["overlapped"]]
    return pytest.param(model, way, marks=marks, id=", ".join(words))


@pytest.mark.parametrize(
    ("model", "way"), [_marked(model, way) for model in MODELS for way in WAYS]
)
def test_gather_overlap_and_layout_change_no_bit(model: str, way: Way, runs: _Runs) -> None:
    assert runs.curves(model, way) == runs.curves(model, REFERENCE)


def test_weights_without_mxfp8_have_other_losses(runs: _Runs, tmp_path: Path) -> None:
    """Shows that the quantized weights are used, from the first step on."""
    bf16 = run("dense", ("owner", True, True), tmp_path, "unquantized-weights")
    assert bf16["lm loss"][0] != runs.curves("dense", REFERENCE)["lm loss"][0]


def test_weights_that_are_not_staged_are_noticed(runs: _Runs, tmp_path: Path) -> None:
    """Shows that the comparison can fail: without an overlap, weights become what gradients are."""
    wrong = run("dense", ("owner", True, True), tmp_path, "unstaged-weights")
    reference = runs.curves("dense", REFERENCE)
    assert wrong["lm loss"][0] == reference["lm loss"][0]
    assert all(a != b for a, b in zip(wrong["lm loss"][2:], reference["lm loss"][2:], strict=True))


def test_bytes_are_said_and_reported(runs: _Runs) -> None:
    """Codes and scales of both directions take 2 + 2/32 bytes an element, bf16 weights 2."""
    numel = 2 * 64 * (128 + 64 + 2 * 128 + 128)
    gathered: Way = ("owner", True, True)
    said, memory = {}, {}
    for way in (REFERENCE, gathered):
        runs.curves("dense", way)
        folder = runs.folder_of("dense", way)
        said[way] = (folder / "logs" / "rank0.log").read_text()
        memory[way] = json.loads((folder / "report.json").read_text())["memory"]
    parts = set(memory[gathered])
    assert parts == {"parameters_bytes", "gradients_bytes", "staging_bytes", "gather_bytes"}
    assert "MXFP8 weights" not in said[REFERENCE]
    assert (
        f"largest rank: 8 MXFP8 weights of {numel * 2 + numel // 16} bytes in all" in said[gathered]
    )
    assert f" {memory[gathered]['staging_bytes']} bytes are staged" in said[gathered]
    for text in said.values():
        assert "the CPU's MXFP8 stands in for Transformer Engine's" in text
    assert memory[REFERENCE]["staging_bytes"] == 0
    assert memory[REFERENCE]["gather_bytes"] == 0
    assert memory[gathered]["staging_bytes"] >= numel  # half of the weights, 2 bytes each
    assert memory[gathered]["gradients_bytes"] == memory[REFERENCE]["gradients_bytes"]
    more = memory[gathered]["parameters_bytes"] - memory[REFERENCE]["parameters_bytes"]
    assert more == numel // 16


def test_a_run_without_a_layout_says_so_and_what_its_gathers_take(runs: _Runs) -> None:
    """No weight of 0.02 MiB or more is gathered with another."""
    way: Way = ("none", True, False)
    runs.curves("dense", way)
    folder = runs.folder_of("dense", way)
    report = json.loads((folder / "report.json").read_text())
    said = (folder / "logs" / "rank0.log").read_text()
    largest = max(math.prod(row["logical_shape"]) for row in report["routing"])
    assert report["resolved"]["layout"] is None
    (settings,) = re.findall(r"^  settings: .*(?:\n {12}.*)*", said, re.MULTILINE)
    assert "--muon-gather-budget-mib 0.02" in settings
    assert "--muon-layout" not in settings
    assert report["memory"]["gather_bytes"] == 2 * largest > 0.02 * 2**20
    assert f"which takes {2 * largest} of scratch" in said
