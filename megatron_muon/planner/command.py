"""``megatron-muon plan``: what a run will own, move and store, before any rank is started."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_muon.bookkeeping.costs import (
    GIB,
    HARDWARE,
    ON_CUDA,
    ONE_RANK,
    Hardware,
    choose_layout,
    find_hardware,
)
from megatron_muon.bookkeeping.stage import LAYOUTS
from megatron_muon.errors import ConfigurationError
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN, ModelSpec
from megatron_muon.planner.picture import save_picture
from megatron_muon.planner.report import JobReport, make_report
from megatron_muon.planner.sizes import ParallelSizes, check_sizes
from megatron_muon.planner.sources import Source, read_source
from megatron_muon.planner.text import lines_of

_SIZES = {
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "dp": "data-parallel size",
    "cp": "context-parallel size",
    "ep": "expert-parallel size",
    "etp": "expert-tensor-parallel size",
    "vpp": "model chunks of a pipeline stage",
    "first-stage-layers": "layers of the first pipeline stage",
    "last-stage-layers": "layers of the last pipeline stage",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; what follows ``--`` is Megatron's."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help=f"{', '.join(BUILT_IN)}; a Hugging Face config.json; a file of Megatron's flags",
    )
    sizes = parser.add_argument_group("parallel sizes")
    for name, text in _SIZES.items():
        sizes.add_argument(f"--{name}", type=int, default=None, metavar="N", help=text)
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--layout",
        choices=("owner", "flat", "auto"),
        default=None,
        help="layout to plan: owner, flat, or the one with the faster step that fits (the default)",
    )
    plan.add_argument(
        "--wrapping",
        choices=("builder", "provider"),
        default="builder",
        help="how the script's model is wrapped in DDP: by a model config, as in our pretrain_gpt, "
        "which makes buckets on the first stage only, or by a model provider",
    )
    plan.add_argument(
        "--fingerprint", action="store_true", default=None, help="make the fingerprint in any case"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        metavar="MACHINE",
        help=f"{', '.join(HARDWARE)}, or a JSON file of numbers (default {ON_CUDA})",
    )
    for flag, text in (
        ("flops", "TFLOP/s of the products in Newton-Schulz"),
        ("link", "GB/s of a rank between nodes"),
        ("node-link", "GB/s of a rank inside a node"),
        ("memory", "GiB of a rank"),
    ):
        machine.add_argument(f"--{flag}", type=float, default=None, metavar="X", help=text)
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it")
    shown.add_argument(
        "--picture", metavar="FILE", help="draw the ownership map and bars (needs matplotlib)"
    )
    shown.add_argument("--stage", type=int, default=0, help="pipeline stage of the picture")
    shown.add_argument("--rows", type=int, default=8, help="matrices of a stage in the table")


def main(options: argparse.Namespace) -> int:
    """Plan, and say what was planned; ``options.arguments`` holds Megatron's flags."""
    source = read_source(options.source, options.arguments)
    sizes = _sizes(source, options)
    machine = _machine(source, options)
    settings = replace(source.settings, wrapping=options.wrapping)
    layout = options.layout or source.layout or "auto"
    if not 0 <= options.stage < sizes.pp:
        raise ConfigurationError(f"--stage is {options.stage}: the job has {sizes.pp} stages.")
    with _without_collection():
        report = _report(source.model, sizes, settings, layout, machine, options.fingerprint)
        if options.json is not None and options.json != "-":
            _write(Path(options.json), _as_json(report) + "\n")
        if options.picture is not None:
            save_picture(report, Path(options.picture), options.stage)
        as_json = options.json == "-"
        _print(_as_json(report) if as_json else "\n".join(lines_of(report, options.rows)))
    return 0


def _report(
    model: ModelSpec,
    sizes: ParallelSizes,
    settings: PlanSettings,
    layout: str,
    machine: Hardware,
    with_fingerprint: bool | None,
) -> JobReport:
    def planned(kind: str, why: str, fingerprint: bool | None) -> JobReport:
        job = plan_job(model, sizes, replace(settings, layout=kind))
        return make_report(job, machine, why, fingerprint)

    if layout != "auto":
        return planned(layout, "", with_fingerprint)
    check_sizes(model, sizes)
    choice = ONE_RANK
    if max(sizes.dp_cp, sizes.expert_dp) > 1:
        costs = [planned(kind, "", False).costs for kind in LAYOUTS]
        choice = choose_layout(costs, machine.memory_nbytes)
    return planned(choice.layout, choice.why, with_fingerprint)


def _sizes(source: Source, options: argparse.Namespace) -> ParallelSizes:
    given = {
        name: getattr(options, name)
        for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp")
        if getattr(options, name) is not None
    }
    for name in ("first", "last"):
        layers = getattr(options, f"{name}_stage_layers")
        if layers is not None:
            given[f"{name}_layers"] = layers
    return replace(source.sizes, **given)


def _machine(source: Source, options: argparse.Namespace) -> Hardware:
    scales = {
        "flops": ("flops_per_s", 1e12), "link": ("link_nbytes_per_s", 1e9),
        "node_link": ("node_nbytes_per_s", 1e9), "memory": ("memory_nbytes", GIB),
    }  # fmt: skip
    changes: dict[str, float] = {}
    for option, (name, scale) in scales.items():
        value = getattr(options, option)
        if value is None:
            continue
        if not value > 0:
            flag = option.replace("_", "-")
            raise ConfigurationError(f"--{flag} is {value}: expected a number above 0.")
        changes[name] = value * scale
    if options.hardware is None:
        machine = find_hardware(source.hardware, ON_CUDA, "--muon-hardware")
    else:
        machine = find_hardware(options.hardware, ON_CUDA, "--hardware")
    return replace(machine, **changes)  # type: ignore[arg-type]


def _as_json(report: JobReport) -> str:
    return json.dumps(report.to_dict(), indent=1)


def _print(text: str) -> None:
    """Print; a reader that has seen enough, such as ``head``, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigurationError(f"--json {path}: cannot be written ({error}).") from None


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold back the garbage collector: a plan is millions of small objects and has no cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
