"""The ``megatron-muon`` command."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from megatron_muon import __version__
from megatron_muon.errors import MuonError

EXIT_CODE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print(
            "megatron-muon: error: torch is not installed for this Python "
            f"({sys.executable}). Install it with `pip install megatron-muon`, which brings torch "
            "2.13 or newer.",
            file=sys.stderr,
        )
        return EXIT_CODE
    try:
        return int(options.main(options))
    except MuonError as error:
        print(f"megatron-muon: error: {error}", file=sys.stderr)
        return EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon", description="Muon for Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"megatron-muon {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a Megatron script, unchanged, with Muon installed",
        description="Start a Megatron script, unchanged: megatron-muon run pretrain_gpt.py "
        "--optimizer muon ... Under torchrun: torchrun --nproc-per-node 4 -m megatron_muon run "
        "SCRIPT ARGS...",
    )
    run.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu puts Megatron on the CPU and gloo; auto does so where there is no CUDA device",
    )
    run.add_argument(
        "--no-optimizer",
        action="store_true",
        help="install the CPU stand-in alone, and none of the optimizer's seams",
    )
    run.add_argument("script", metavar="SCRIPT", help="the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    run.set_defaults(main=_run)
    return parser


def _run(options: argparse.Namespace) -> int:
    from megatron_muon.integration.launch import run_script

    return run_script(
        options.script, options.arguments, options.device, not options.no_optimizer
    )
