"""A planned job as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from megatron_muon.bookkeeping.costs import GIB, LayoutChoice, assumptions
from megatron_muon.bookkeeping.homes import FLOPS_TOLERANCE_PERCENT
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.stage import max_over_mean, padding_of
from megatron_muon.planner.report import (
    MAX_PLANS_TO_FINGERPRINT,
    JobReport,
    StageNumbers,
    job_assumptions,
)

_WIDTH = 100
_UNEVEN = 1.5
"""Work of the busiest rank over the mean beyond which a way to less is named."""
_SENT = ("data_exchange", "tensor_exchange", "gradient_reduce", "weight_gather")
_PARTS = {
    "newton_schulz": "Newton-Schulz",
    "data_exchange": "exchange, data",
    "tensor_exchange": "exchange, tensor",
    "latency": "latency",
    "elementwise": "elementwise",
    "gradient_reduce": "gradient reduce",
    "weight_gather": "weight gather",
}


def lines_of(report: JobReport, num_rows: int, pp_rank: int = 0) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        report: The report.
        num_rows: Matrices of the ownership table.
        pp_rank: The pipeline stage that they are of.
    """
    job = report.job
    model, sizes = job.model, job.sizes
    yield (
        f"{model.name}: {_count(model.num_parameters)} parameters on {sizes.world_size} "
        f"rank{'s' * (sizes.world_size > 1)} ({sizes}), layout {job.settings.layout}"
    )
    if report.why:
        yield from _wrapped(str(LayoutChoice(job.settings.layout, report.why)))
    yield _fingerprint_line(report)
    yield (
        f"padding {report.padding:.3f} (elements of the matrices' buffers over those of the "
        "matrices)"
    )
    yield from _sharing_lines(report)
    yield ""
    yield "balance: Newton-Schulz work, and elements of masters and momentum, of the busiest rank"
    yield from _table(
        ["stage", "layers", "matrices", "work/mean", "work/bound", "elements/mean", "idle ranks",
         "padding"],
        _rows(report.stages, _balance_cells, with_layers=True),
    )  # fmt: skip
    yield (
        "  bound: the mean, or the largest matrix or part if more; idle: no matrix; padding: by "
        "buffer"
    )
    yield ""
    yield (
        "GiB that the busiest rank sends in a step (data/whole: over a gather of whole fp32 "
        "buckets)"
    )
    yield from _table(
        ["stage", *(_PARTS[part] for part in _SENT), "data/whole"],
        _rows(report.stages, _sent_cells),
    )
    yield ""
    yield "memory: GiB that the fullest rank keeps, without activations"
    yield from _table(
        ["stage", "parameters", "gradients", "masters", "momentum, moments", "scratch (estimate)",
         "total"],
        _rows(report.stages, _memory_cells),
    )  # fmt: skip
    yield _left_line(report)
    yield ""
    yield from _step_lines(report.worst)
    yield ""
    yield from _ownership_lines(report.stages[pp_rank], num_rows)
    yield "assumptions:"
    for said in (*assumptions(report.machine), *job_assumptions(job)):
        yield from _wrapped(f"- {said}")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _fingerprint_line(report: JobReport) -> str:
    if report.fingerprint is not None:
        return f"plan {report.fingerprint}, as a run prints it at start-up"
    return (
        f"plan: no fingerprint of more than {MAX_PLANS_TO_FINGERPRINT} plans unless --fingerprint "
        "is given"
    )


def _rows(
    stages: Sequence[StageNumbers],
    cells_of: Callable[[StageNumbers], list[str]],
    *,
    with_layers: bool = False,
) -> list[list[str]]:
    """Return the rows of a table; neighbouring stages with the same numbers are one row."""
    rows = []
    for cells, group in groupby(stages, cells_of):
        alike = list(group)
        first, last = alike[0].stage, alike[-1].stage
        named = [_span(first.pp_rank, last.pp_rank)]
        if with_layers:
            chunks = zip(first.layers, last.layers, strict=True)
            named.append(",".join(_span(a.start, b.stop - 1) for a, b in chunks))
        rows.append([*named, *cells])
    return rows


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def _balance_cells(stage: StageNumbers) -> list[str]:
    buffers = [buffer for buffer in stage.stage.buffers if buffer.of_matrices]
    return [
        str(len(stage.stage.first_plan.matrices)),
        f"{stage.over_perfect:.3f}",
        f"{stage.over_bound:.3f}",
        f"{max_over_mean(stage.loads.held):.3f}",
        f"{stage.loads.flops.count(0)} of {len(stage.loads.flops)}",
        " ".join(f"{padding_of([b]):.3f}{' experts' if b.is_expert else ''}" for b in buffers),
    ]


def _sent_cells(stage: StageNumbers) -> list[str]:
    work, gather = stage.work, stage.whole_gather_nbytes
    sent = (work.data_nbytes, work.tensor_nbytes, work.grad_nbytes, work.weight_nbytes)
    share = f"{work.data_nbytes / gather:.3f}" if gather else "-"
    return [*(f"{nbytes / GIB:.3f}" for nbytes in sent), share]


def _memory_cells(stage: StageNumbers) -> list[str]:
    return [f"{nbytes / GIB:.2f}" for nbytes in stage.memory.to_dict().values()]


def _left_line(report: JobReport) -> str:
    machine, left = report.machine, report.left_nbytes / GIB
    said = f"{left:.2f} GiB left for activations" if left >= 0 else f"{-left:.2f} GiB too much"
    return (
        f"  of {machine.memory_nbytes / GIB:.4g} GiB ({machine.name}; --memory sets it), on the "
        f"worst stage: {said}"
    )


def _sharing_lines(report: JobReport) -> Iterator[str]:
    """Say which matrices are shared, or that sharing them is worth a try."""
    stage = max(report.stages, key=lambda each: each.over_perfect)
    if not report.job.settings.share_blocks:
        if stage.over_perfect > _UNEVEN:
            yield (
                f"{stage.num_waiting} of {len(stage.loads.flops)} ranks of stage "
                f"{stage.stage.pp_rank} wait for those with the largest matrices: try "
                "`-- --muon-share-blocks`"
            )
        return
    num_shared = sum(each.num_shared for each in report.stages)
    if num_shared:
        yield f"{num_shared} matrices are each shared by several ranks (--muon-share-blocks)"
        return
    share = 1 + FLOPS_TOLERANCE_PERCENT / 100
    is_small = all(each.largest_over_mean <= share for each in report.stages)
    why = "is more than a rank's share" if is_small else "whose sharing lightens the busiest rank"
    yield f"0 matrices are shared by several ranks (none {why})"


def _step_lines(stage: StageNumbers) -> Iterator[str]:
    total = sum(stage.seconds.values()) or 1.0

    def line(part: str, seconds: float, bar: str = "") -> str:
        return f"  {part:<17}{seconds * 1e3:10.2f} ms {seconds / total:6.1%} {bar}".rstrip()

    yield (
        f"predicted optimizer step of the slowest stage ({stage.stage.pp_rank}), nothing "
        f"overlapped: {total * 1e3:.2f} ms"
    )
    yield (
        "  with the reduction of gradients and the gather of weights, without forward and backward"
    )
    for part, seconds in stage.seconds.items():
        if part == "gradient_reduce":
            yield line("optimizer alone", stage.optimizer_seconds)
        yield line(_PARTS[part], seconds, "#" * round(40 * seconds / total))


def _ownership_lines(stage: StageNumbers, num_rows: int) -> Iterator[str]:
    if num_rows < 1:
        return
    matrices = stage.stage.first_plan.matrices
    rows = []
    for planned in matrices[:num_rows]:
        pieces = planned.owned.pieces
        rows.append([
            planned.matrix.name, "x".join(map(str, planned.matrix.shape)),
            f"dp{_span(pieces[0].rank, pieces[-1].rank)}", _homes(planned),
            f"{planned.flops / 1e9:.1f}",
        ])  # fmt: skip
    yield (
        f"matrices of stage {stage.stage.pp_rank}, by name: data-parallel ranks (dp) that hold "
        "each, home (data,tensor rank)"
    )
    yield from _table(["matrix", "shape", "held by", "home", "GFLOP"], rows)
    if len(matrices) > num_rows:
        yield (
            f"  and {len(matrices) - num_rows} more: --rows shows more, --stage another stage, "
            "--json all"
        )
    yield ""


def _homes(planned: PlannedMatrix) -> str:
    first = f"{planned.home.dp},{planned.home.tp}"
    return f"{first} +{len(planned.homes) - 1}" if planned.sharers else first


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:],
                                                                      strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
