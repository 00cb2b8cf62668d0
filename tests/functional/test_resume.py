"""A run that is stopped, saved and resumed in new processes goes on as if it had not been stopped.

The real script trains some steps with dropout. From the step at which another run of the same
arguments was stopped, both have the same losses and gradient norms, and in the end the same
weights, masters, momentum, moments, loss scaler and random states: to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import combinations, product
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional.jobs import MODEL, MUON, ROOT, Job, launch, run_on, torchrun
from tests.functional.saved import Leaves, differences, iteration_folder, read_all

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")
STEPS, STOP = 20, 10
METRICS = ("lm loss", "lm loss validation", "grad-norm", "learning-rate", "loss-scale")
SCALED = "--fp16 --initial-loss-scale 8388608 --loss-scale-window 4"
GATHERED = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather"

AXES: Mapping[str, Mapping[str, str]] = {
    "precision": {
        "bf16": "--bf16",
        "fp16": SCALED,
        "fp32": "",
        "mxfp8": f"{GATHERED} --reuse-grad-buf-for-mxfp8-param-ag",
    },
    "layout": {
        "owner": "--muon-layout owner",
        "flat": "--muon-layout flat",
        "none": "--no-use-layer-wise-param-layout",
        "replicated": "",
    },
    "overlap": {"off": "", "on": "--overlap-grad-reduce --overlap-param-gather"},
    "sizes": {
        "DP2": "",
        "DP3": "",
        "TP2": "--tensor-model-parallel-size 2",
        "TP2xDP2": "--tensor-model-parallel-size 2",
        "EP2": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64",
        "PP2": "--pipeline-model-parallel-size 2",
    },
    "format": {"torch_dist": "", "torch": ""},
    "option": {
        "": "",
        "lion": "--muon-scalar-optimizer lion",
        "bf16 momentum": "--muon-momentum-dtype bf16",
        "random init": "--data-parallel-random-init",
    },
}
"""Every axis, its values and their flags."""

BASE = [
    *(word for word in MODEL if word != "--bf16"), "--mock-data", "--ffn-hidden-size", "128",
    "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--global-batch-size", "6",
    "--train-iters", str(STEPS), "--lr-decay-style", "cosine", "--lr-warmup-iters", "4",
    "--eval-interval", "6", "--eval-iters", "1", "--save-interval", "1000",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a value on each axis."""

    precision: str = "bf16"
    layout: str = "owner"
    overlap: str = "off"
    sizes: str = "DP2"
    format: str = "torch_dist"
    option: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, map(str, self.values))).replace(" ", "_")

    @property
    def values(self) -> tuple[str, ...]:
        """Its value on each axis."""
        return tuple(getattr(self, axis.name) for axis in fields(self))

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return {"DP3": 3, "TP2xDP2": 4}.get(self.sizes, 2)

    @property
    def can_run(self) -> bool:
        """Whether Megatron lets it: only the distributed optimizer gathers weights."""
        return self.layout != "replicated" or self.precision != "mxfp8"

    @property
    def flags(self) -> list[str]:
        """Its part of the command line."""
        words = " ".join(AXES[axis.name][getattr(self, axis.name)] for axis in fields(self)).split()
        words += ["--ckpt-format", self.format, *MUON]
        if self.layout == "replicated":
            only_distributed = ("--overlap-param-gather", "--use-distributed-optimizer")
            words = [word for word in words if word not in only_distributed]
        return words


Curves = Mapping[str, list[tuple[int, float]]]
"""Steps and values of each metric."""

DEFAULT = [
    Cell("bf16", "owner", "on", "TP2xDP2", "torch_dist"),
    Cell("bf16", "flat", "off", "PP2", "torch_dist", "lion"),
    Cell("fp16", "flat", "on", "DP3", "torch_dist"),
    Cell("fp16", "owner", "off", "EP2", "torch", "bf16 momentum"),
    Cell("fp16", "none", "on", "TP2", "torch"),
    Cell("fp32", "none", "off", "DP2", "torch", "random init"),
    Cell("fp32", "replicated", "on", "DP3", "torch_dist"),
    Cell("mxfp8", "flat", "on", "DP2", "torch_dist"),
]


def cover() -> list[Cell]:
    """Return cells in which every two values meet, and some three, beside the default ones.

    Greedy: each next cell has the most that none before it has.
    """
    axes = [axis for axis in AXES if axis != "option"]
    together = [
        *combinations(axes, 2), ("layout", "sizes", "format"), ("precision", "layout", "overlap")
    ]  # fmt: skip
    candidates = [
        cell for cell in (Cell(*values) for values in product(*(AXES[axis] for axis in axes)))
        if cell.can_run
    ]  # fmt: skip

    def has(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
        return {tuple((axis, getattr(cell, axis)) for axis in names) for names in together}

    missing = set().union(*map(has, candidates)) - set().union(*map(has, DEFAULT))
    chosen = []
    while missing:
        chosen.append(max(candidates, key=lambda cell: (len(has(cell) & missing), -cell.num_ranks)))
        missing -= has(chosen[-1])
    return chosen


CELLS = [*DEFAULT, *(pytest.param(cell, marks=pytest.mark.full) for cell in cover())]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a run: each metric as float32 at every step, and where it saved."""

    curves: Curves
    saved: Path
    job: Job = field(repr=False)

    def checkpoint(self, iteration: int = STEPS) -> Leaves:
        """Read what it saved."""
        return read_all(iteration_folder(self.saved, iteration))


def train(folder: Path, cell: Cell, *flags: str, through_torchrun: bool = False) -> Run:
    """Run the script, saving at the end, in processes that end with it."""
    folder.mkdir()
    saved, curves = folder / "saved", folder / "curves"
    line = [*BASE, *cell.flags, "--save", str(saved), "--tensorboard-dir", str(curves), *flags]
    if through_torchrun:
        command = run_on(1, SCRIPT, *line)[0]
        job = torchrun(cell.num_ranks, "megatron_muon", *command, timeout_s=200)
    else:
        job = launch(run_on(cell.num_ranks, SCRIPT, *line), folder / "logs", timeout_s=200)
    assert job.code == 0, job.said
    return Run(read_curves(curves), saved, job)


def read_curves(folder: Path) -> Curves:
    """Read the metrics, without the evaluations after the last step: none flushes their file."""
    (file,) = folder.glob("events.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return {
        name: [
            (event.step, event.value) for event in events.Scalars(name)
            if event.step < STEPS or "validation" not in name
        ]
        for name in METRICS
    }  # fmt: skip


def stop(folder: Path, cell: Cell, **options: bool) -> Run:
    """Run the script to the middle."""
    return train(folder, cell, "--exit-interval", str(STOP), **options)


def resume(folder: Path, cell: Cell, stopped: Run, *flags: str, **options: bool) -> Run:
    """Run the script on from where it stopped."""
    return train(folder, cell, "--load", str(stopped.saved), *flags, **options)


def test_each_value_is_tried_by_default():
    for axis, values in AXES.items():
        assert {getattr(cell, axis) for cell in DEFAULT} == set(values), axis


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_resumed_run_goes_on_to_the_last_bit(cell, tmp_path):
    whole = train(tmp_path / "whole", cell)
    stopped = stop(tmp_path / "stopped", cell)
    resumed = resume(tmp_path / "resumed", cell, stopped)
    assert_goes_on(whole, stopped, resumed)
    assert_holds_all(cell, whole.checkpoint())
    if (cell.sizes, cell.format) == ("TP2", "torch"):
        assert_ranks_hold_the_same(whole.checkpoint())
    if cell.precision == "fp16":
        for half in (stopped, resumed):
            assert len({scale for _, scale in half.curves["loss-scale"]}) > 1


def test_a_run_goes_on_under_torchrun(tmp_path):
    cell = Cell("bf16", "owner", "on", "DP2", "torch_dist")
    whole = train(tmp_path / "whole", cell)
    stopped = stop(tmp_path / "stopped", cell, through_torchrun=True)
    resumed = resume(tmp_path / "resumed", cell, stopped, through_torchrun=True)
    assert_goes_on(whole, stopped, resumed)
    # Each part of a checkpoint is needed for that.
    for number, flag in enumerate(("--no-load-optim", "--no-load-rng")):
        other = resume(tmp_path / f"other{number}", cell, stopped, flag)
        assert other.curves["lm loss"][-1] != whole.curves["lm loss"][-1]
        assert differences(whole.checkpoint(), other.checkpoint())


def test_a_run_goes_on_from_each_state_of_the_loss_scaler(tmp_path):
    """Where no step has been made yet, and where half of what lowers the scale has been seen."""
    cell = Cell("fp16", "owner", "off", "DP2", "torch_dist")
    whole = train(tmp_path / "whole", cell, "--save-interval", "1")
    halfway = [step for step in range(1, STEPS) if "1" in hysteresis(whole.checkpoint(step))]
    first, last = halfway[0], halfway[-1]
    assert first == 1 < last
    for step in (first, last):
        resumed = resume(tmp_path / f"from{step}", cell, whole, "--ckpt-step", str(step))
        for metric, curve in whole.curves.items():
            rest = [(at, value) for at, value in curve if at > step]
            assert resumed.curves[metric] == rest, (step, metric)
        assert differences(whole.checkpoint(), resumed.checkpoint()) == []


def hysteresis(leaves):
    return {value for path, value in leaves.items() if path.endswith("hysteresis_tracker")}


def assert_goes_on(whole, stopped, resumed):
    assert [step for step, _ in whole.curves["lm loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in stopped.curves["lm loss"]] == list(range(1, STOP + 1))
    for metric, curve in whole.curves.items():
        assert stopped.curves[metric] + resumed.curves[metric] == curve, metric
    assert differences(whole.checkpoint(), resumed.checkpoint()) == []


def assert_holds_all(cell, leaves):
    """Two checkpoints without state would be equal too."""
    words = ["momentum_buffer", "exp_avg", "rng_tracker_states", "np_rng_state", "num_steps"]
    words += [] if cell.option == "lion" else ["exp_avg_sq"]
    words += ["growth_tracker", "hysteresis_tracker"] if cell.precision == "fp16" else []
    assert [word for word in words if not any(word in path for path in leaves)] == []
    if cell.format == "torch_dist":
        tensors = {path.removeprefix("/") for path, value in leaves.items() if is_tensor(value)}
        weights = {key for key in tensors if key.endswith("weight") and "optimizer." not in key}
        state = "optimizer.state"
        first = [{f"{state}.{name}.{key}" for name in ("momentum_buffer", "exp_avg")} & tensors
                 for key in weights]  # fmt: skip
        master = [{f"{state}.{name}.{key}" for name in ("fp32_param", "param")} & tensors
                  for key in weights]  # fmt: skip
        assert len(weights) > 6
        assert {len(found) for found in first} == {1}
        assert {bool(found) for found in master} == {cell.precision != "fp32"}


def is_tensor(value):
    return isinstance(value, tuple) and value[0].startswith("torch.")


def assert_ranks_hold_the_same(leaves):
    """Weights that tensor parallelism does not cut; dropout leaves out the same of their inputs."""
    first, second = (
        {
            path.removeprefix(folder): value for path, value in leaves.items()
            if path.startswith(f"{folder}/model_optim_rng.pt/model/") and "norm" in path
        }
        for folder in ("/mp_rank_00", "/mp_rank_01")
    )  # fmt: skip
    assert len(first) > 2
    assert first == second
