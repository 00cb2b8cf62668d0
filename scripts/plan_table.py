"""Print the table of predicted steps in docs/performance.md, from ``megatron-muon plan``.

    .venv/bin/python scripts/plan_table.py

Each row is one run of the command with ``--layout auto`` and ``--json``.
"""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from megatron_muon.tools import cli

GIB = 2**30

ROWS = tuple(
    line.split()
    for line in """\
gpt2-124m --tp 2 --dp 4
gpt2-124m --dp 64
llama3-8b --tp 8 --dp 8
llama3-8b --tp 2 --dp 128
llama3-8b --tp 8 --dp 512
llama3-70b --tp 8 --dp 64
llama3-70b --tp 8 --pp 4 --dp 128
qwen3-32b --tp 8 --dp 16
qwen3-32b --tp 8 --pp 4 --dp 128
deepseek-v3 --pp 8 --last-stage-layers 5 --dp 128 --ep 64
deepseek-v3 --pp 8 --last-stage-layers 5 --dp 512 --ep 64
kimi-k2 --pp 8 --last-stage-layers 5 --dp 128 --ep 64
kimi-k2 --pp 8 --last-stage-layers 5 --dp 512 --ep 64""".splitlines()
)
"""Models and sizes, up to 4096 ranks."""

HEAD = """\
| model and sizes | ranks | layout | work | memory GiB | step ms | Newton-Schulz | exchange \
| latency | elementwise | gradients | weights |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def planned(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the command says of a model at some sizes."""
    with redirect_stdout(io.StringIO()) as shown:
        status = cli.main(["plan", *arguments, "--layout", "auto", "--json", "-"])
    if status:
        raise SystemExit(status)
    report: dict[str, Any] = json.loads(shown.getvalue())
    return report


def line_of(report: dict[str, Any]) -> str:
    """Return a row of the table: the whole job, and the shares of its slowest stage."""
    sizes = report["sizes"]
    stage = max(report["stages"], key=lambda each: sum(each["step"]["seconds"].values()))
    shares = stage["step"]["shares"]
    named = [f"{name.upper()}{sizes[name]}" for name in ("tp", "pp", "dp") if sizes[name] > 1]
    named += [f"EP{sizes['ep']}"] if sizes["ep"] > 1 else []
    percent = [
        shares["newton_schulz"], shares["data_exchange"] + shares["tensor_exchange"],
        shares["latency"], shares["elementwise"], shares["gradient_reduce"],
        shares["weight_gather"],
    ]  # fmt: skip
    cells = [
        f"{report['model']['name']} {' '.join(named)}", str(sizes["ranks"]),
        report["layout"]["kind"], f"{report['balance']['flops_max_over_mean']:.2f}",
        f"{report['memory']['total_bytes'] / GIB:.1f}",
        f"{1e3 * sum(stage['step']['seconds'].values()):.1f}",
        *(f"{share:.0%}" for share in percent),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield from HEAD.splitlines()
    yield from map(line_of, map(planned, ROWS))


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
