"""Checks before any work starts: arguments that cannot run, and ranks that disagree."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from megatron_muon.collectives.agreement import first_difference
from megatron_muon.integration.ddp import megatron_args
from megatron_muon.integration.messages import fail

RANK_DEPENDENT = {"rank", "local_rank"}


def checks_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args``: what cannot run is one line, Megatron's own refusals included."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Any:
        for problem in problems(args):
            fail(problem)
        try:
            return original(args, defaults or {})
        except AssertionError as error:
            if not str(error):
                raise
            fail(f"Megatron refuses the arguments: {error}")

    return validate_args


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with parsed arguments that Megatron would only meet later."""
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.world_size % model_size:
        yield (
            f"{args.world_size} ranks cannot be divided into groups of {model_size} "
            f"(--tensor-model-parallel-size {args.tensor_model_parallel_size} x "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} x "
            f"--context-parallel-size {args.context_parallel_size}). Start a multiple of "
            f"{model_size} ranks, or change a size."
        )
    for prefix in _data_prefixes(args):
        for suffix in (".idx", ".bin"):
            if "://" not in prefix and not os.path.isfile(prefix + suffix):
                yield (
                    f"--data-path {prefix}: there is no file {prefix + suffix}. Give the path of "
                    "an indexed dataset without its .bin and .idx endings."
                )
    muon = args.optimizer in ("muon", "dist_muon")
    if muon and args.fp16:
        yield (
            "--optimizer muon does not train with --fp16 yet, as megatron-core's does not: use "
            "--bf16."
        )
    if not muon:
        for dest, flag in (("muon_report", "--muon-report"), ("muon_exclude", "--muon-exclude"),
                           ("muon_include", "--muon-include"), ("muon_layout", "--muon-layout")):  # fmt: skip
            if getattr(args, dest, None):
                yield f"{flag} has no effect with --optimizer {args.optimizer}: drop it."


def _data_prefixes(args: argparse.Namespace) -> Iterator[str]:
    for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for word in getattr(args, dest, None) or []:
            if not _is_number(word):
                yield word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def compares_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_model_parallel``: all ranks must have been started with the same flags."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        run = megatron_args()
        world = dist.group.WORLD
        if run is not None and world is not None:
            rows = [
                f"{name}={value!r}"
                for name, value in sorted(vars(run).items())
                if name not in RANK_DEPENDENT
            ]
            digest = sha256("\n".join(rows).encode()).hexdigest()
            difference = first_difference(rows, digest, "flags", world)
            if difference is not None:
                rank, other, row, other_row = difference
                fail(
                    f"ranks {rank} and {other} were started with different flags: rank {rank} has "
                    f"{_as_flag(row)}, rank {other} has {_as_flag(other_row)}. Start every rank "
                    "with the same command."
                )
        return original(*args, **kwargs)

    return initialize_model_parallel


def _as_flag(row: str) -> str:
    if not row:
        return "nothing"
    name, _, value = row.partition("=")
    return f"--{name.replace('_', '-')} {value}"
