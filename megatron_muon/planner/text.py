"""A planned job as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron_muon.bookkeeping.costs import GIB, LayoutChoice, assumptions
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.stage import max_over_mean, padding_of
from megatron_muon.planner.report import (
    MAX_PLANS_TO_FINGERPRINT,
    JobReport,
    StageNumbers,
    job_assumptions,
)

_WIDTH = 100
_PARTS = {
    "newton_schulz": "Newton-Schulz",
    "data_exchange": "exchange, data",
    "tensor_exchange": "exchange, tensor",
    "latency": "latency",
    "elementwise": "elementwise",
    "gradient_reduce": "gradient reduce",
    "weight_gather": "weight gather",
}


def lines_of(report: JobReport, num_rows: int) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        report: The report.
        num_rows: Matrices of the ownership table; of each stage so many.
    """
    job = report.job
    model, sizes = job.model, job.sizes
    yield (
        f"{model.name}: {_count(model.num_parameters)} parameters on {sizes.world_size} ranks "
        f"({sizes}), layout {job.settings.layout}"
    )
    if report.why:
        yield from _wrapped(str(LayoutChoice(job.settings.layout, report.why)))
    yield _fingerprint_line(report)
    yield (
        f"padding {report.padding:.3f} (elements of the matrices' buffers over those of the "
        "matrices)"
    )
    yield ""
    num_shared = sum(stage.num_shared for stage in report.stages)
    if report.job.settings.share_blocks:
        yield f"{num_shared} matrices are each shared by several ranks (--muon-share-blocks)"
        yield ""
    yield from _table(
        ["stage", "layers", "matrices", "work", "of bound", "elements", "idle", "padding"],
        [_balance_row(stage) for stage in report.stages],
    )
    yield "  work, elements: largest rank over the mean; of bound: over what it bears at least,"
    yield "  since one rank orthogonalizes a matrix, or a part of a shared one; idle: ranks without"
    yield "  Newton-Schulz"
    yield ""
    yield from _table(
        ["stage", "GiB sent:", "data", "tensor", "gradients", "weights", "data of whole gather"],
        [_bytes_row(stage) for stage in report.stages],
    )
    yield ""
    yield from _table(
        ["stage", "GiB kept:", "parameters", "gradients", "masters", "momentum", "scratch",
         "total"],
        [_memory_row(stage) for stage in report.stages],
    )  # fmt: skip
    yield ""
    yield from _step_lines(report.worst)
    yield ""
    yield from _ownership_lines(report, num_rows)
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


def _balance_row(stage: StageNumbers) -> list[str]:
    layers = ",".join(f"{r.start}-{r.stop - 1}" for r in stage.stage.layers)
    buffers = [buffer for buffer in stage.stage.buffers if buffer.of_matrices]
    return [
        str(stage.stage.pp_rank),
        layers,
        str(len(stage.stage.first_plan.matrices)),
        f"{stage.over_perfect:.3f}",
        f"{stage.over_bound:.3f}",
        f"{max_over_mean(stage.loads.held):.3f}",
        f"{stage.loads.flops.count(0)} of {len(stage.loads.flops)}",
        " ".join(f"{padding_of([b]):.3f}{' experts' if b.is_expert else ''}" for b in buffers),
    ]


def _bytes_row(stage: StageNumbers) -> list[str]:
    work, gather = stage.work, stage.whole_gather_nbytes
    sent = (work.data_nbytes, work.tensor_nbytes, work.grad_nbytes, work.weight_nbytes)
    share = f"{work.data_nbytes / gather:.3f}" if gather else "-"
    return [str(stage.stage.pp_rank), "", *(f"{n / GIB:.3f}" for n in sent), share]


def _memory_row(stage: StageNumbers) -> list[str]:
    kinds = stage.memory.to_dict().values()
    return [str(stage.stage.pp_rank), "", *(f"{nbytes / GIB:.2f}" for nbytes in kinds)]


def _step_lines(stage: StageNumbers) -> Iterator[str]:
    total = sum(stage.seconds.values()) or 1.0
    yield (
        f"predicted step of the slowest stage ({stage.stage.pp_rank}), nothing overlapped: "
        f"{total * 1e3:.2f} ms"
    )
    for part, seconds in stage.seconds.items():
        share = seconds / total
        bar = "#" * round(40 * share)
        yield f"  {_PARTS[part]:<17}{seconds * 1e3:10.2f} ms {share:6.1%} {bar}".rstrip()


def _ownership_lines(report: JobReport, num_rows: int) -> Iterator[str]:
    if num_rows < 1:
        return
    rows = []
    left_out = 0
    for stage in report.stages:
        matrices = stage.stage.first_plan.matrices
        left_out += max(0, len(matrices) - num_rows)
        for planned in matrices[:num_rows]:
            pieces = planned.owned.pieces
            held = str(pieces[0].rank)
            if len(pieces) > 1:
                held = f"{held}-{pieces[-1].rank}"
            rows.append([
                planned.matrix.name, "x".join(map(str, planned.matrix.shape)), held,
                _homes(planned), f"{planned.flops / 1e9:.1f}",
            ])  # fmt: skip
    yield from _table(["matrix", "shape", "held by data ranks", "home data,tensor", "GFLOP"], rows)
    if left_out:
        yield f"  and {left_out} more; --rows shows more, --json has all"
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
