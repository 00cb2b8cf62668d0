"""``megatron-muon plan``: what a run will own, move and store, before any rank is started."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
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
from megatron_muon.planner.flag_words import one, parse_flags
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.megatron_flags import SIZE_FLAGS, Source, is_known
from megatron_muon.planner.models import BUILT_IN, ModelSpec
from megatron_muon.planner.picture import save_picture
from megatron_muon.planner.report import MAX_PLANS_TO_FINGERPRINT, JobReport, make_report
from megatron_muon.planner.sizes import ParallelSizes, check_sizes
from megatron_muon.planner.sources import read_source
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

_SCALES = {
    "flops": ("flops_per_s", 1e12, "TFLOP/s"),
    "link": ("link_nbytes_per_s", 1e9, "GB/s"),
    "node_link": ("node_nbytes_per_s", 1e9, "GB/s"),
    "memory": ("memory_nbytes", GIB, "GiB"),
}
"""Of each option that changes a machine the field, and the unit that it is given in."""

_RATES: dict[str, tuple[float, float]] = {
    "flops_per_s": (1e6, 1e21),
    "memory_nbytes_per_s": (1e3, 1e18),
    "node_nbytes_per_s": (1e3, 1e18),
    "link_nbytes_per_s": (1e3, 1e18),
    "latency_s": (1e-15, 1e6),
    "ranks_per_node": (1, 1e9),
    "memory_nbytes": (GIB * 1e-3, GIB * 1e9),
}
"""What a machine can be: beyond, a predicted step would be no number, or a slip goes unseen."""


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
        "--fingerprint",
        action="store_true",
        default=None,
        help=f"make the fingerprint also of more than {MAX_PLANS_TO_FINGERPRINT} different plans",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        metavar="MACHINE",
        help=f"{', '.join(HARDWARE)}, or a JSON file of numbers (default {ON_CUDA})",
    )
    for option, text in (
        ("flops", "of the products in Newton-Schulz"),
        ("link", "of a rank between nodes"),
        ("node_link", "of a rank inside a node"),
        ("memory", "of a rank"),
    ):
        machine.add_argument(
            f"--{option.replace('_', '-')}", type=float, default=None, metavar="X",
            help=f"{_SCALES[option][2]} {text}",
        )  # fmt: skip
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it")
    shown.add_argument(
        "--picture", metavar="FILE", help="draw the ownership map and bars (needs matplotlib)"
    )
    shown.add_argument(
        "--stage",
        type=int,
        default=0,
        metavar="N",
        help="pipeline stage of the table of matrices and of the picture (default 0)",
    )
    shown.add_argument(
        "--rows", type=int, default=4, metavar="N", help="matrices in the table (default 4)"
    )  # fmt: skip


def advice(unknown: Sequence[str]) -> str:
    """Return what to do about arguments that are no options of the command, after its message."""
    if not any(is_known(word.partition("=")[0]) for word in unknown):
        return ""
    return f". Megatron's and Muon's flags stand behind `--`, as in: -- {' '.join(unknown)}"


def main(options: argparse.Namespace) -> int:
    """Plan, and say what was planned; ``options.arguments`` holds Megatron's flags."""
    source = read_source(options.source, options.arguments)
    _check_agreement(options)
    sizes = _sizes(source, options)
    machine = _machine(source, options)
    settings = replace(source.settings, wrapping=options.wrapping)
    layout = options.layout or source.layout or "auto"
    if options.rows < 0:
        raise ConfigurationError(f"--rows is {options.rows}: expected an integer of 0 or more.")
    check_sizes(source.model, sizes)
    if not 0 <= options.stage < sizes.pp:
        legal = "0, the only stage" if sizes.pp == 1 else f"0 to {sizes.pp - 1}"
        raise ConfigurationError(
            f"--stage is {options.stage}: expected {legal}, since --pp is {sizes.pp}."
        )
    with _without_collection():
        report = _report(source.model, sizes, settings, layout, machine, options.fingerprint)
        if options.json is not None and options.json != "-":
            _write(Path(options.json), _as_json(report) + "\n")
        if options.picture is not None:
            save_picture(report, Path(options.picture), options.stage)
        as_json = options.json == "-"
        _print(
            _as_json(report)
            if as_json
            else "\n".join(lines_of(report, options.rows, options.stage))
        )
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
    choice = ONE_RANK
    if max(sizes.dp_cp, sizes.expert_dp) > 1:
        costs = [planned(kind, "", False).costs for kind in LAYOUTS]
        choice = choose_layout(costs, machine.memory_nbytes)
    return planned(choice.layout, choice.why, with_fingerprint)


def _check_agreement(options: argparse.Namespace) -> None:
    """Check that no option of the plan is contradicted by a flag behind ``--``.

    What is in a file of flags an option may change.

    Raises:
        ConfigurationError: One is; the message names both.
    """
    flags = parse_flags(options.arguments)
    names = {flag: name.replace("_layers", "_stage_layers") for flag, name in SIZE_FLAGS.items()}
    names |= {"muon-layout": "layout", "muon-hardware": "hardware"}
    for flag, name in names.items():
        given = getattr(options, name)
        if given is None or flag not in flags:
            continue
        value = one(flags, flag)
        if type(given)(value) != given:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {given} and --{flag} {value} (behind `--`) contradict "
                "each other: drop one of the two."
            )


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
    if options.hardware is None:
        flag, given = "--muon-hardware", source.hardware
    else:
        flag, given = "--hardware", options.hardware
    try:
        machine = find_hardware(given, ON_CUDA, flag)
    except RecursionError:
        raise ConfigurationError(f"{flag} {given}: not JSON (nested too deeply).") from None
    for name, (least, most) in _RATES.items():
        value = getattr(machine, name)
        if not least <= value <= most:
            raise ConfigurationError(
                f"{flag} {given}: {name} is {_short(value)}; expected a number from {least:g} to "
                f"{most:g}."
            )
    changes: dict[str, float] = {}
    for option, (name, scale, unit) in _SCALES.items():
        value = getattr(options, option)
        if value is None:
            continue
        least, most = (bound / scale for bound in _RATES[name])
        if not least <= value <= most:
            raise ConfigurationError(
                f"--{option.replace('_', '-')} is {value}: expected a number from {least:g} to "
                f"{most:g}, in {unit}."
            )
        changes[name] = value * scale
    return replace(machine, **changes)  # type: ignore[arg-type]


def _short(value: float) -> str:
    text = str(value) if value < 1e300 else "too large"
    return text if len(text) <= 40 else f"{text[:40]}..."


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
