"""Loading: a checkpoint that is torn, partial or foreign is one error on all ranks.

Megatron takes a folder without ``metadata.json`` for another format, a missing tracker file for an
empty folder, and ends some of its refusals with exit code 0. Here the folder is looked at before
anything is read, and what the optimizer asks for is looked up in its index.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_muon.checkpoint.files import (
    CheckpointIndex,
    check_files,
    checkpoint_format,
    has_end,
    holds_checkpoint,
    iteration_folder,
    iterations,
    read_index,
    tracked,
)
from megatron_muon.checkpoint.folders import replaced_folders, settle
from megatron_muon.collectives.agreement import gather, raise_together
from megatron_muon.errors import CheckpointError
from megatron_muon.integration.ddp import MUON_NAMES, megatron_args
from megatron_muon.optimizer.state.request import StateRequest

_OTHER_FORMATS = ("torch_dcp", "fsdp_dtensor")
"""Values of ``--ckpt-format`` whose folders are left to Megatron."""

_OWN_RANK_FORMAT = "torch"

_NON_PERSISTENT = "non_persistent"
"""Where ``--non-persistent-ckpt-type global`` saves, in the ``--save`` folder."""

_NOT_STRICT = ("ignore_all", "log_all", "log_unexpected", "return_all", "return_unexpected")
"""Values of ``--dist-ckpt-strictness`` with which a tensor that is not there is left out."""

_NO_OPTIMIZER = (
    "it has no optimizer state: it was saved with --no-save-optim. Add --no-load-optim, with which "
    "the optimizer starts anew, or --finetune, with which training does."
)

_SHOWN = 3

logger = logging.getLogger(__name__)


def is_ours() -> bool:
    """Whether this program trains with Muon, as far as Megatron's arguments tell."""
    args = megatron_args()
    return args is None or args.optimizer in MUON_NAMES


def is_local(path: object) -> bool:
    """Whether a path is one of this machine's files, and not ``msc://...``."""
    return path is not None and "://" not in str(path)


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks, ``None`` before there is one, or where it only pretends."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return dist.group.WORLD


def together[T](work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Do something on all ranks, and fail on all of them if it fails on one; collective.

    Args:
        work: What each rank does; not collective.
        group: The ranks; ``None`` for this process alone.

    Raises:
        CheckpointError: What the file system said to the first rank that has an error.
        MuonError: Another error of that rank, as :func:`raise_together` tells it.
    """

    def told() -> T:
        try:
            return work()
        except OSError as error:
            named = f"{error.filename}: {error.strerror}" if error.filename else f"{error}"
            raise CheckpointError(f"{named}.") from error

    return told() if group is None else raise_together(told, group)


# --------------------------------------------------------------------------------------------
# megatron.training
# --------------------------------------------------------------------------------------------


def finds_whole_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_load_base_checkpoint``: the folder is looked at before it is read.

    Megatron reads it twice, what is common to all ranks first; it is looked at once.
    """

    @functools.wraps(original)
    def _load_base_checkpoint(
        load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
    ) -> Any:
        looks = args.optimizer in MUON_NAMES and is_local(load_dir)
        if looks and (rank0 or not _reads_common_first(args)):
            _look(Path(load_dir), args)
        result = original(load_dir, args, rank0, *rest, **kwargs)
        if looks and rank0 and result[0]:
            together(lambda: _check_common(result[0], Path(result[1]), args), world())
        return result

    return _load_base_checkpoint


def finds_lost_tracker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint_exists``: a folder that has lost its tracker file is no empty one.

    Megatron would go on to ``--pretrained-checkpoint``, and forget what was trained.
    """

    @functools.wraps(original)
    def checkpoint_exists(checkpoints_path: Any) -> Any:
        if is_ours() and is_local(checkpoints_path) and holds_checkpoint(Path(checkpoints_path)):
            iteration_folder(Path(checkpoints_path))
        return original(checkpoints_path)

    return checkpoint_exists


def refuses_to_end_well(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_checkpoint``: what Megatron cannot load does not end with exit code 0."""

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        flag = given.get("load_arg", "load")
        folder = getattr(megatron_args(), flag, None)
        try:
            return original(*args, **kwargs)
        except SystemExit as ended:
            if ended.code in (None, 0):
                raise CheckpointError(
                    f"--{flag} {folder}: Megatron could not load the checkpoint; its last lines "
                    "say why."
                ) from ended
            raise
        except KeyError as error:
            if error.args in (("optimizer",), ("opt_param_scheduler",)):
                raise CheckpointError(f"--{flag} {folder}: {_NO_OPTIMIZER}") from error
            raise

    return load_checkpoint


def _reads_common_first(args: Any) -> bool:
    return bool(args.auto_detect_ckpt_format) or args.ckpt_format in ("torch_dist", "fsdp_dtensor")


def _look(load: Path, args: Any) -> None:
    """Look at the folder that will be loaded; collective."""
    if args.non_persistent_ckpt_type == "local" or args.ckpt_format in _OTHER_FORMATS:
        return
    if "://" in str(args.non_persistent_global_ckpt_dir):
        return
    group = world()
    is_first = _is_first(group)

    def look() -> None:
        # Before there is a group no rank can wait for the first, and each reads the folder itself.
        if is_first or group is None:
            for replaced in replaced_folders(load):
                settle(replaced)
            _check_folder(load, args)

    together(look, group)
    folder = together(lambda: _folder(load, args), group)
    if folder is None and is_first:
        _tell_of_torn(load)
    if group is None:
        return
    seen = gather(str(folder), group)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise CheckpointError(
                f"--load {load}: rank 0 finds {seen[0]} there, rank {rank} finds {other}. Every "
                "node has to see the same folder."
            )
    together(lambda: _check_rank_file(folder), group)


def _is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank, also before there is a group.

    With ``--use-checkpoint-args`` all ranks look at the folder before that.
    """
    return int(os.environ.get("RANK", "0")) == 0 if group is None else group.rank() == 0


def _base(load: Path, args: Any) -> Path:
    """Return whose tracker file Megatron goes by: that of ``--load`` or the non-persistent one.

    Source: training/checkpointing.py:1476-1500, 1646-1683 of megatron-core 0.19.2.

    Raises:
        CheckpointError: One of the two is torn, or the first is lost.
    """
    if args.non_persistent_ckpt_type != "global":
        return load
    beside = Path(args.non_persistent_global_ckpt_dir or load / _NON_PERSISTENT)
    other, name = tracked(beside), tracked(load)
    if other is None:
        return load
    if other == "release":
        raise CheckpointError(f"{beside}: a non-persistent checkpoint cannot be a release.")
    if name is None and not args.ckpt_step and holds_checkpoint(load):
        iteration_folder(load)  # says that its tracker file is lost: it may be the later one
    latest = args.ckpt_step or (-1 if name is None else _iteration(name))
    return beside if _iteration(other) >= latest else load


def _iteration(name: str) -> int:
    return 0 if name == "release" else int(name.removeprefix("iter_"))


def _folder(load: Path, args: Any) -> Path | None:
    """Return the iteration's folder, ``None`` if there is no checkpoint and none has to be.

    Raises:
        CheckpointError: It is not clear which one to load, or it is not there.
    """
    base = _base(load, args)
    if base != load:
        return iteration_folder(base)
    if getattr(args, "ckpt_step", None):
        folder = load / f"iter_{args.ckpt_step:07d}"
        if not folder.is_dir():
            raise CheckpointError(f"--ckpt-step {args.ckpt_step}: there is no folder {folder}.")
        return folder
    if not holds_checkpoint(load):
        if args.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {load}: there is no whole checkpoint, and --exit-on-missing-checkpoint "
                "was given."
            )
        return None
    return iteration_folder(load)


def _check_folder(load: Path, args: Any) -> None:
    """Check all that one rank can check for all of them."""
    folder = _folder(load, args)
    if folder is None:
        return
    found = checkpoint_format(folder)
    _check_format(folder, found, args)
    if found == "torch_dist":
        check_files(read_index(folder))


def _check_format(folder: Path, found: str | None, args: Any) -> None:
    """Check that Megatron will read all of a folder with the flag that was given.

    Of the other format it reads nothing, or the optimizer of one rank for all.
    """
    is_of_ranks = getattr(args, "use_layer_wise_distributed_optimizer", False)
    loads_optimizer = not (args.no_load_optim or args.finetune)
    if found == "torch" and args.ckpt_format != "torch" and is_of_ranks and loads_optimizer:
        raise CheckpointError(
            f"{folder} was saved with --ckpt-format torch: give that flag to load it too."
        )
    if found == "torch_dist" and args.ckpt_format == "torch" and not args.auto_detect_ckpt_format:
        raise CheckpointError(
            f"{folder} was saved with --ckpt-format torch_dist: drop --ckpt-format torch."
        )


@functools.cache
def _tell_of_torn(load: Path) -> None:
    """Say once that the first save to a folder was cut off, if there is anything of it."""
    if torn := iterations(load):
        logger.warning(
            "--load %s: %s is torn, a save was cut off, and there is no whole checkpoint: training "
            "starts anew. The next save of that iteration replaces it.",
            load,
            _some(torn),
        )


def _check_rank_file(folder: Path | None) -> None:
    """Check this rank's own file of a ``--ckpt-format torch`` checkpoint."""
    from megatron.core import parallel_state
    from megatron.training.checkpointing import get_checkpoint_name

    if folder is None or checkpoint_format(folder) != _OWN_RANK_FORMAT:
        return
    if not parallel_state.model_parallel_is_initialized():
        return
    is_release = folder.name == "release"
    file = Path(get_checkpoint_name(str(folder.parent), _iteration(folder.name), is_release))
    if not file.is_file():
        raise CheckpointError(
            f"{file}: this rank's file is missing. A checkpoint of --ckpt-format torch is loaded "
            "at the parallel sizes it was saved at."
        )
    if not has_end(file):
        raise CheckpointError(f"{file}: it is torn. Take an earlier iteration.")


def _check_common(common: Any, folder: Path, args: Any) -> None:
    """Check that what is common to all ranks has what the flags ask for."""
    if folder.name == "release" or args.finetune or not dist.is_initialized():
        return
    if "optimizer" not in common and not args.no_load_optim:
        raise CheckpointError(f"{folder}: {_NO_OPTIMIZER}")
    # Megatron asks for what it would save, checkpointing.py:1343-1358.
    for ending, what, is_saved, is_loaded in (
        ("optim", "the optimizer's state", not args.no_save_optim, not args.no_load_optim),
        ("rng", "random numbers", not args.no_save_rng, not args.no_load_rng),
    ):
        if is_loaded and not is_saved:
            raise CheckpointError(
                f"{folder}: with --no-save-{ending} Megatron does not load {what} either. Drop "
                f"that flag, or add --no-load-{ending} if a new start is meant."
            )
    saved = common.get("args")
    if getattr(saved, "no_save_rng", False) and not args.no_load_rng and dist.get_rank() == 0:
        logger.warning(
            "%s was saved with --no-save-rng: random numbers are those of --seed, as at the start.",
            folder,
        )


# --------------------------------------------------------------------------------------------
# megatron.core.dist_checkpointing
# --------------------------------------------------------------------------------------------


def resolves_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``: what is asked for is found in the index before it is read.

    The optimizer's :class:`StateRequest` is turned to the names that the checkpoint has.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        requests = list(_requests(sharded_state_dict))
        if not (requests or is_ours()) or not is_local(checkpoint_dir):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        given = signature.bind(sharded_state_dict, checkpoint_dir, *args, **kwargs).arguments
        # Without the first, Megatron's own load is no collective either.
        is_collective = given.get("validate_access_integrity", True) or bool(requests)
        group = given.get("process_group") or world() if is_collective else None
        is_strict = _name(given.get("strict")) not in _NOT_STRICT

        def resolve() -> None:
            index = read_index(Path(checkpoint_dir))
            if group is None or group.rank() == 0:
                check_files(index)
            for request in requests:
                request.resolve(index)
            if is_strict:
                _check_keys(sharded_state_dict, index)

        together(resolve, group)
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        for request in requests:
            if request.apart:
                original(
                    dict(enumerate(request.apart)), checkpoint_dir, validate_access_integrity=False
                )
        return loaded

    return load


def _requests(tree: Any) -> Iterator[StateRequest]:
    if isinstance(tree, StateRequest):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _requests(value)


def _tensors(tree: Any) -> Iterator[ShardedTensor]:
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, ShardedTensorFactory):
        # Some copy what they cut; a tensor without memory gives the same keys and shapes.
        probe = torch.empty(tree.data.shape, dtype=tree.data.dtype, device="meta")
        yield from _tensors(tree.build_fn(tree.key, probe, tree.replica_id, tree.flattened_range))
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _check_keys(sharded_state_dict: Any, index: CheckpointIndex) -> None:
    """Check that every tensor asked for is there in its shape.

    Megatron does, but each rank by itself, and the others wait for the one that has ended.
    """
    missing, other = [], []
    for tensor in _tensors(sharded_state_dict):
        stored = index.tensors.get(tensor.key)
        if stored is None:
            missing.append(tensor.key)
        elif stored.shape != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch:
            other.append(f"{tensor.key} {stored.shape}, expected {tuple(tensor.global_shape)}")
    if missing or other:
        told = [
            f"{what} {_some(names)}"
            for what, names in (("it has no", missing), ("its shapes differ:", other))
            if names
        ]
        raise CheckpointError(f"{index.path}: {'; '.join(told)}. It is of another model.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _name(strict: Any) -> str:
    return str(getattr(strict, "value", strict))
