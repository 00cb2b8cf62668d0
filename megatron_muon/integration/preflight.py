"""Checks before any work starts: arguments that cannot run, and ranks that disagree."""

from __future__ import annotations

import argparse
import enum
import functools
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.collectives.agreement import first_difference
from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.arguments import LATER_FLAG, CommandLine, command_line
from megatron_muon.integration.cpu_mxfp8 import is_cpu_fp8, unsupported
from megatron_muon.integration.ddp import MUON_NAMES, megatron_args
from megatron_muon.integration.install import installation
from megatron_muon.integration.quantized import problem, shape_problems, storage_of_arguments
from megatron_muon.optimizer.compatibility import our_layout
from megatron_muon.optimizer.config import FLAGS, resolve

RANK_DEPENDENT = ("rank", "local_rank")
"""Destinations of flags that differ from rank to rank by their meaning."""

NODE_DEPENDENT_ENDINGS = ("_dir", "_cache_path", "_dump_path")
"""Endings of destinations that name a place to write to, which may differ from node to node."""

_TOO_LATE = (
    "install() came after Megatron had parsed its command line: the flags and defaults of "
    "megatron-muon are missing from it. Call megatron_muon.install() in the first lines of the "
    "script, or start it through `python -m megatron_muon run`."
)

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None), enum.Enum, torch.dtype)


def checks_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args``: what cannot run is one message, Megatron's own refusals included."""

    @functools.wraps(original)
    def validate_args(args: Any, defaults: dict[str, Any] | None = None) -> Any:
        if args.optimizer in MUON_NAMES:
            _take_later_layout(args)
            _take_early_gather(args)
        for found in problems(args):
            raise ConfigurationError(found)
        try:
            result = original(args, defaults or {})
        except AssertionError as error:
            refusal = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            raise ConfigurationError(f"Megatron refuses the arguments: {refusal}") from None
        if args.optimizer in MUON_NAMES:
            state = installation()
            settings = resolve(args, state.layout if state else None)
            for found in shape_problems(args):
                raise ConfigurationError(found)
            if settings.max_skipped_steps > 0:
                _leave_nan_to_the_optimizer(args)
        return result

    return validate_args


def _leave_nan_to_the_optimizer(args: Any) -> None:
    """Turn off Megatron's check, which ends training before the optimizer can skip the step."""
    if args.check_for_nan_in_loss_and_grad:
        args.check_for_nan_in_loss_and_grad = False
        if args.rank == 0:
            logger.warning(
                "Megatron's check of losses and gradients for NaN is off: Muon skips such a step. "
                "--muon-max-skipped-steps 0 leaves it on."
            )


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with parsed arguments that Megatron would meet later, or never."""
    yield from _size_problems(args)
    if args.save and args.save_interval is None:
        yield "--save needs --save-interval N, after how many iterations to save: add it."
    if args.optimizer in MUON_NAMES:
        yield from _muon_problems(args)
        yield from _checkpoint_problems(args)
    else:
        for flag in (*FLAGS, LATER_FLAG):
            value = getattr(args, _destination(flag), None)
            # A number of zero is a value that was given, and is equal to False.
            if value is not None and value is not False and value != []:
                yield f"{flag} has no effect with --optimizer {args.optimizer}: drop it."
    if is_cpu_fp8():
        found = unsupported(args)
        if found is not None:
            yield found


def _size_problems(args: argparse.Namespace) -> Iterator[str]:
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    model_size = 1
    for size in sizes.values():
        model_size *= size
    if args.world_size % model_size:
        product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        yield (
            f"{args.world_size} rank{'s' * (args.world_size > 1)} cannot be divided into groups of "
            f"{model_size} ({product}). Start a multiple of {model_size} ranks, as torchrun "
            f"--nproc-per-node {model_size} does, or change a size."
        )


def _muon_problems(args: argparse.Namespace) -> Iterator[str]:
    if not _has_our_flags(args):
        yield _TOO_LATE
    yield from _weight_shard_problems(args)
    found = problem(storage_of_arguments(args))
    if found is not None:
        yield found
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 are both given: drop one of the two."
    if args.use_precision_aware_optimizer:
        yield (
            "--use-precision-aware-optimizer does not work with --optimizer muon: drop it. "
            "--muon-momentum-dtype bf16 halves the momentum's memory."
        )
    yield from _scalar_rate_problems(args)
    if args.muon_report is not None and args.rank == 0:
        if os.path.isdir(args.muon_report):
            yield f"--muon-report {args.muon_report} is a folder: give the name of a file in it."
        folder = os.path.dirname(os.path.abspath(args.muon_report))
        if not os.path.isdir(folder):
            yield (
                f"--muon-report {args.muon_report}: there is no folder {folder}. Make it, or give "
                "a file in a folder that exists."
            )


def _checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what would come to light at the first save, or not at all."""
    if args.save and args.async_save and args.ckpt_format == "torch":
        yield "--async-save does not work with --ckpt-format torch: drop one of the two."
    for flag, folder in (("--save", args.save), ("--load", args.load)):
        if folder and Path(folder).is_file():
            yield f"{flag} {folder} is a file: expected a folder."
    load = Path(args.load) if args.load else None
    if load is not None and re.fullmatch(r"iter_\d{7,}", load.name) and load.is_dir():
        yield (
            f"--load {load} is one iteration of a checkpoint: give --load {load.parent} "
            f"--ckpt-step {int(load.name.removeprefix('iter_'))}."
        )


def _scalar_rate_problems(args: argparse.Namespace) -> Iterator[str]:
    rate, warmup = args.muon_scalar_lr, args.lr_warmup_init
    warms_up = args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction
    if rate is not None and warms_up and warmup > rate:
        yield (
            f"--lr-warmup-init is {warmup}, above --muon-scalar-lr {rate}: the scalar optimizer "
            "would start above its rate. Lower the first."
        )
    if args.muon_scalar_min_lr is not None and args.lr_decay_style == "constant":
        yield "--muon-scalar-min-lr has no effect with --lr-decay-style constant: drop it."


def _weight_shard_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what does not work where Megatron cuts rows again, over ranks of their own."""
    tp: int = args.tensor_model_parallel_size
    for flag, size in (
        ("--tensor-parallel-num-weight-shards", tp),
        ("--expert-tensor-parallel-num-weight-shards", args.expert_tensor_parallel_size or tp),
    ):
        shards = getattr(args, _destination(flag))
        if shards is None or shards <= size:
            continue
        if args.muon_tp_mode in ("distributed", "blockwise"):
            yield (
                f"--muon-tp-mode {args.muon_tp_mode} does not work with {flag} {shards}: use owner "
                f"or duplicated, or drop {flag}."
            )
        if args.fp8_param_gather:
            yield (
                f"--fp8-param-gather does not work with {flag} {shards} and --optimizer muon: drop "
                "one of them."
            )
        for given, folder in (("--save", args.save), ("--load", args.load)):
            if folder:
                yield (
                    f"{given} does not work with {flag} {shards} and --optimizer muon yet: drop "
                    "one of them."
                )


def _take_later_layout(args: argparse.Namespace) -> None:
    """Turn a later Megatron's name of a layout into the flags that mean the same here.

    Raises:
        ConfigurationError: There is no such layout, or another flag says something else.
    """
    name: str | None = getattr(args, _destination(LATER_FLAG), None)
    if name is None:
        return
    given = f"{LATER_FLAG} {name}"
    if not (args.use_distributed_optimizer or args.optimizer == "dist_muon"):
        raise ConfigurationError(
            f"{given} has no effect without --use-distributed-optimizer: add that flag, or drop it."
        )
    if name == "legacy":
        if args.muon_layout is not None:
            raise ConfigurationError(
                f"{given} is --no-use-layer-wise-param-layout, with which --muon-layout "
                f"{args.muon_layout} has no effect: drop one of the two."
            )
        args.use_layer_wise_param_layout = False
        return
    layout = our_layout(name, given)
    if args.muon_layout not in (None, layout) or not args.use_layer_wise_param_layout:
        other = (
            f"--muon-layout {args.muon_layout}"
            if args.use_layer_wise_param_layout
            else "--no-use-layer-wise-param-layout"
        )
        raise ConfigurationError(
            f"{given} is --muon-layout {layout}, and {other} was given: drop one of the two."
        )
    args.muon_layout = layout


def _take_early_gather(args: argparse.Namespace) -> None:
    """Turn Megatron's flag for gathers inside the optimizer's step into ours.

    Megatron's needs virtual pipeline stages, turns off buckets, and is refused with Muon; ours
    needs none of that and does what it is for.
    """
    if args.overlap_param_gather_with_optimizer_step:
        args.overlap_param_gather_with_optimizer_step = False
        args.muon_overlap_param_gather = True
        if args.rank == 0:
            logger.warning(
                "--overlap-param-gather-with-optimizer-step is --muon-overlap-param-gather with "
                "Muon: it needs no virtual pipeline stages and keeps the buckets."
            )


def finds_data_files(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``IndexedDataset.initialize``: a missing file is one message that names it."""

    @functools.wraps(original)
    def initialize(self: Any, path_prefix: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, path_prefix, *args, **kwargs)
        except (AssertionError, OSError) as error:
            for missing in (f"{path_prefix}.idx", f"{path_prefix}.bin"):
                if not os.path.exists(missing):
                    # Its __del__ deletes these and would complain below the message.
                    self.bin_reader = self.index = None
                    raise ConfigurationError(
                        f"--data-path {path_prefix}: there is no file {missing}. Give the path of "
                        "an indexed dataset without its .bin and .idx endings."
                    ) from error
            raise

    return initialize


def compares_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_model_parallel``: all ranks must have been started with the same flags.

    Compared is what the command line gave, not what Megatron made of it, and not the flags that
    the script adds.
    """

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        parsed = command_line()
        # With a local world the caller builds groups on a part of the ranks only.
        if parsed is not None and kwargs.get("local_world_size") is None:
            _compare_ranks(parsed)
        return original(*args, **kwargs)

    return initialize_model_parallel


def _compare_ranks(parsed: CommandLine) -> None:
    world = dist.group.WORLD
    if world is None or dist.get_backend(world) == "fake":
        return
    rows = [
        f"{dest}={value}"
        for dest, value in sorted(parsed.values.items())
        if dest not in RANK_DEPENDENT
        and not dest.endswith(NODE_DEPENDENT_ENDINGS)
        and _is_plain(value)
    ]
    difference = first_difference(rows, "flags", world)
    if difference is not None:
        rank, other, row, other_row = difference
        raise ConfigurationError(
            f"ranks {rank} and {other} were started with different flags: rank {rank} has "
            f"{_as_flag(row, parsed)}, rank {other} has {_as_flag(other_row, parsed)}. Start every "
            "rank with the same command."
        )


def _is_plain(value: object) -> bool:
    """Whether a value prints the same on every rank: no object with an address."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _as_flag(row: str, parsed: CommandLine) -> str:
    if not row:
        return "nothing"
    dest, _, value = row.partition("=")
    spelling = parsed.spellings[dest]
    if value in ("True", "False") or _destination(spelling) != dest:
        return f"{dest} = {value} ({spelling})"
    return f"{spelling} {value}"


def refuse_late_install() -> None:
    """Raise if Megatron has parsed its command line for Muon without our flags.

    Our defaults would be missing, above all that of ``--muon-tp-mode``.
    """
    args = megatron_args()
    if getattr(args, "optimizer", None) in MUON_NAMES and not _has_our_flags(args):
        raise ConfigurationError(_TOO_LATE)


def _has_our_flags(args: argparse.Namespace) -> bool:
    return all(hasattr(args, _destination(flag)) for flag in FLAGS)


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
