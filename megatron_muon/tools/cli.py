"""The ``megatron-muon`` command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_muon import __version__
from megatron_muon.errors import HostError, MuonError
from megatron_muon.integration.messages import EXIT_CODE, fail, say_error
from megatron_muon.planner import command as planner
from megatron_muon.tools import golden, inspect_checkpoint

_BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads any more, as a shell gives it."""


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong once a job, not once a rank."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message}\n{self.format_usage().rstrip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    A reader of the output that has seen enough, such as ``head``, ends the command without a word.
    A script under ``run`` keeps its own errors.
    """
    is_script = False
    try:
        try:
            options = _options(sys.argv[1:] if argv is None else argv)
            is_script = options.main is _run
            return _carry_out(options)
        finally:
            if not is_script:
                # Here, and not at Python's end, where nobody catches what it says.
                sys.stdout.flush()
    except BrokenPipeError:
        if is_script:
            raise
        # What is still buffered must go somewhere, or Python complains at its end.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return _BROKEN_PIPE


def _options(argv: Sequence[str]) -> argparse.Namespace:
    arguments, of_script = split_script(argv)
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        advice = planner.advice(unknown) if options.main is planner.main else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    options.arguments = of_script
    return options


def _carry_out(options: argparse.Namespace) -> int:
    try:
        if options.needs_torch:
            _require_torch()
        return int(options.main(options))
    except MuonError as error:
        say_error(str(error))
        return EXIT_CODE


def split_script(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the command line of ``run`` behind SCRIPT: what follows is the script's, untouched.

    That of ``plan`` is cut at ``--``: what follows is Megatron's.

    Args:
        argv: The command line, without the program's name.

    Returns:
        Our part, SCRIPT included, and the script's part.
    """
    if argv and argv[0] == "plan" and "--" in argv:
        position = list(argv).index("--")
        return list(argv[:position]), list(argv[position + 1 :])
    if not argv or argv[0] != "run":
        return list(argv), []
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        if argv[position] == "--":
            position += 1
            break
        position += 2 if argv[position] == "--device" else 1
    return list(argv[: position + 1]), list(argv[position + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron-muon", description="Muon for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron-muon {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a Megatron script, unchanged, with Muon installed",
        usage="megatron-muon run [--device {auto,cpu,cuda}] [--no-optimizer] SCRIPT ARGS...",
        description="Start a Megatron script, unchanged: megatron-muon run pretrain_gpt.py "
        "--optimizer muon ... Under torchrun: torchrun --nproc-per-node 4 -m megatron_muon run "
        "SCRIPT ARGS... What follows SCRIPT is the script's.",
    )
    _add_installation(run)
    run.add_argument("script", metavar="SCRIPT", help="the script; its arguments follow it")
    run.set_defaults(parser=run, main=_run, needs_torch=True)
    seams = commands.add_parser(
        "seams",
        help="show every name that install() replaces, and why",
        description="Show every name that install() replaces: why, which upstream code needs it, "
        "and how it is checked before anything is replaced.",
    )
    _add_installation(seams)
    seams.set_defaults(parser=seams, main=_seams, needs_torch=True)
    plan = commands.add_parser(
        "plan",
        help="show who will own what, how balanced it is, what it moves and stores; no GPU needed",
        usage="megatron-muon plan [SOURCE] [OPTIONS] [-- MEGATRON'S FLAGS]",
        description="Plan a run from names and shapes alone: ownership, balance, padding, bytes "
        "moved, memory and predicted shares of a step. No GPU and no process group are used. "
        "Example: megatron-muon plan llama3-8b --tp 8 --dp 8",
    )
    planner.add_arguments(plan)
    plan.set_defaults(parser=plan, main=planner.main, needs_torch=False)
    held = commands.add_parser(
        "golden",
        help="show, compare or record golden values",
        description="Show a golden file, hold a run to one, or record one.",
    )
    golden.add_arguments(held)
    held.set_defaults(parser=held, main=golden.main, needs_torch=False)
    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds, or compare two",
        description="Show what a checkpoint holds, or compare two. It needs no GPU, starts no "
        "ranks and runs nothing that is in the files.",
    )
    inspect_checkpoint.add_arguments(inspect)
    inspect.set_defaults(parser=inspect, main=inspect_checkpoint.main, needs_torch=True)
    return parser


def _add_installation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu puts Megatron on the CPU and gloo; auto does so where there is no CUDA device",
    )
    parser.add_argument(
        "--no-optimizer",
        action="store_true",
        help="install the CPU stand-in alone, and none of the optimizer's seams",
    )


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise HostError(
            f"torch is not installed for this Python ({sys.executable}). Install it with `pip "
            "install megatron-muon`, which brings torch 2.13 or newer."
        )


def _run(options: argparse.Namespace) -> int:
    from megatron_muon.integration.launch import run_script

    return run_script(options.script, options.arguments, options.device, not options.no_optimizer)


def _seams(options: argparse.Namespace) -> int:
    from megatron_muon.integration.install import seam_tables
    from megatron_muon.integration.seams import describe

    for title, table in seam_tables(options.device, not options.no_optimizer).items():
        print(f"# {title}: {len(table.rows)} rows\n\n{describe(table.rows)}\n")
    print("uninstall() puts the very objects back that were there, in reverse order.")
    return 0
