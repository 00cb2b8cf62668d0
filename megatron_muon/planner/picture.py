"""A planned job as a picture: who holds which matrix, and bars of what each rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_muon.bookkeeping.costs import GIB
from megatron_muon.errors import ConfigurationError, HostError
from megatron_muon.planner.report import JobReport, StageNumbers

_MAX_ROWS = 400
"""Matrices that the map shows at most; more would be thinner than a line of it."""


def save_picture(report: JobReport, path: Path, pp_rank: int = 0) -> None:
    """Draw one pipeline stage to a file, in the format that its ending says.

    Args:
        report: The report.
        path: The file.
        pp_rank: Which stage.

    Raises:
        HostError: matplotlib is not installed.
        ConfigurationError: The file cannot be written, or its ending is none of a picture's.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise HostError(
            f"--picture {path} needs matplotlib: install it with `pip install '.[report]'` in "
            "the checkout."
        ) from None
    stage = report.stages[pp_rank]
    figure: Any = matplotlib.figure.Figure(figsize=(11, 11), layout="constrained")
    axes = figure.subplots(4, 1, height_ratios=[3, 1, 1, 1])
    figure.suptitle(
        f"{report.job.model.name}, {report.job.sizes}, layout {report.job.settings.layout}: "
        f"pipeline stage {pp_rank}"
    )
    _draw_map(axes[0], stage)
    loads = stage.loads
    exchange = report.job.settings.exchange_nbytes
    sent = [(a + b) * exchange / GIB
            for a, b in zip(loads.data_numel, loads.tensor_numel, strict=True)]  # fmt: skip
    for axis, values, label in (
        (axes[1], [flops / 1e12 for flops in loads.flops], "Newton-Schulz,\nTFLOP"),
        (axes[2], [numel / 1e6 for numel in loads.held], "elements held,\nmillions"),
        (axes[3], sent, "exchange sent,\nGiB"),
    ):
        axis.bar(range(len(values)), values, width=1.0)
        axis.axhline(sum(values) / len(values), color="black", linewidth=0.8, label="mean")
        axis.set_ylabel(label)
        axis.set_xlim(-0.5, len(values) - 0.5)
    axes[1].legend(loc="lower right")
    axes[3].set_xlabel("rank of the stage (tensor-parallel fastest)")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--picture {path}: cannot be written ({error}). Give a .png, .svg or .pdf in a folder "
            "that exists."
        ) from None


def _draw_map(axis: Any, stage: StageNumbers) -> None:
    """Draw a line a matrix: dark where a data-parallel rank holds it, a dot at each home."""
    dense = [p for p in stage.stage.first_plan.matrices if not p.matrix.expert_parallel]
    matrices = (dense or list(stage.stage.first_plan.matrices))[:_MAX_ROWS]
    size = max((stage.stage.grids[p.owned.grid].dp for p in matrices), default=1)
    share = [[0.0] * size for _ in matrices]
    for row, planned in zip(share, matrices, strict=True):
        # Over the most that one rank holds: the share of a matrix that many hold is too pale.
        most = max(piece.range.numel for piece in planned.owned.pieces)
        for piece in planned.owned.pieces:
            row[piece.rank] = piece.range.numel / most
    if matrices:
        axis.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        dots = [(home.dp, i) for i, planned in enumerate(matrices) for home in planned.homes]
        axis.scatter(*zip(*dots, strict=True), s=6, color="crimson", label="home")
        axis.legend(loc="upper right")
    axis.set_ylabel("dense matrices, by name" if dense else "matrices, by name")
    axis.set_xlabel(
        "data-parallel rank (shade: what it holds of the matrix, over what the fullest does)"
    )
