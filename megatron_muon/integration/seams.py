"""The seams: every name of megatron-core 0.19.2 that this package replaces, and why.

Each row says which name, what takes its place, what would go wrong without it, and which
parameters the name had when the row was written. :func:`check` compares them before anything is
replaced, so that a Megatron that has moved on is refused and not half patched. :func:`describe`
renders a table for the reader (``megatron-muon seams``).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.errors import HostError
from megatron_muon.integration.patching import Patch, Row

_ABSENT = object()
_OWN_PACKAGE = __name__.partition(".")[0]

_CORE = "megatron.core.optimizer"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
_TRAINING = "megatron.training.training"
_ARGUMENTS = "megatron.training.arguments"
_BUILDERS = "megatron.training.models.dist_utils"
_CHECKPOINTS = "megatron.training.checkpointing"
_DIST_CHECKPOINTS = "megatron.core.dist_checkpointing"


@dataclass(frozen=True, slots=True)
class Expected:
    """The parameters a function, or a class's constructor, has to have.

    Attributes:
        parameters: Their names, in order.
        at_least: Whether others may stand among them, as in a data class that grows.
    """

    parameters: tuple[str, ...]
    at_least: bool = False

    def __str__(self) -> str:
        return f"({', '.join(self.parameters)}{', ...' if self.at_least else ''})"

    def fits(self, found: Sequence[str]) -> bool:
        """Whether the parameters found are those expected."""
        if self.at_least:
            return set(self.parameters) <= set(found)
        return tuple(found) == self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam(Patch):
    """A replaced name of Megatron with what it is expected to be.

    Attributes:
        expected: Its parameters; ``None`` where being there is all that is asked.
        copied: Whether other modules may have imported the name for themselves, so that the
            copies made before ``install()`` are replaced too.
    """

    expected: Expected | None
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Reliance:
    """A name that is called or overridden and not replaced; checked with the seams.

    Attributes:
        module: Importable module.
        name: Attribute path inside it.
        expected: Its parameters.
    """

    module: str
    name: str
    expected: Expected


def table() -> list[Seam]:
    """Return the seams that this installation of Megatron has modules for."""
    rows = [
        *_layout_seams(),
        *_factory_seams(),
        *_command_line_seams(),
        *_timer_seams(),
        *_load_seams(),
        *_save_seams(),
    ]
    if not _has_training():
        rows = [row for row in rows if not row.module.startswith("megatron.training")]
    return [*rows, *_copies(rows)]


def check(rows: Iterable[Row]) -> None:
    """Raise unless the installed Megatron is what the rows were written for.

    Args:
        rows: Seams, and rows of the CPU stand-in, of which Megatron's own names must exist.

    Raises:
        HostError: A name is missing or takes other parameters; names every one, as found and as
            expected.
    """
    misfits = list(_misfits(rows))
    if misfits:
        raise HostError(
            "megatron-core is of a known version but not as released; nothing was changed: "
            + "; ".join(misfits)
        )


def describe(rows: Iterable[Row]) -> str:
    """Render a table for the reader: each name, why, who needs it, and how it is checked."""
    return "\n".join(line for row in rows for line in _description(row))


def _description(row: Row) -> Iterator[str]:
    yield row.target
    yield f"    why: {row.why}"
    yield f"    needed by: {row.needed_by}"
    if _is_checked(row):
        expected = getattr(row, "expected", None)
        yield f"    checked: {'exists' if expected is None else f'takes {expected}'}"


def _is_checked(row: Row) -> bool:
    if isinstance(row, Seam):
        return True
    return isinstance(row, Patch) and row.module.startswith("megatron.") and not row.vacant


def _misfits(rows: Iterable[Row]) -> Iterator[str]:
    rows = list(rows)
    for row in rows:
        if isinstance(row, Patch) and _is_checked(row):
            yield from _misfit(row.target, row.holder, getattr(row, "expected", None))
    for needed in RELIED_ON if any(isinstance(row, Seam) for row in rows) else ():
        if _has_training() or not needed.module.startswith("megatron.training"):
            row = _unchanged(needed)
            yield from _misfit(row.target, row.holder, needed.expected)


def _misfit(
    target: str, holder: Callable[[], tuple[Any, str]], expected: Expected | None
) -> Iterator[str]:
    try:
        owner, leaf = holder()
    except (ImportError, AttributeError) as error:
        yield f"{target} cannot be reached ({error})"
        return
    value = getattr(owner, leaf, None)
    if value is None:
        yield f"{target} is missing"
    elif expected is not None:
        found = tuple(inspect.signature(value if callable(value) else type(value)).parameters)
        if not expected.fits(found):
            yield f"{target} takes ({', '.join(found)}), expected {expected}"


def _copies(rows: Sequence[Seam]) -> list[Seam]:
    """Return a row for each module that had imported a replaced name before ``install()``."""
    listed = {row.target for row in rows}
    copies = []
    for row in rows:
        holder, leaf = row.holder() if row.copied else (None, "")
        original = getattr(holder, leaf, _ABSENT)
        for name, module in list(sys.modules.items()):
            holds = (
                original is not _ABSENT and getattr(module, "__dict__", {}).get(leaf) is original
            )
            if holds and name.partition(".")[0] != _OWN_PACKAGE and f"{name}.{leaf}" not in listed:
                listed.add(f"{name}.{leaf}")
                copies.append(
                    Seam(
                        module=name,
                        name=leaf,
                        replace=row.replace,
                        why=f"imported from {row.module} before install()",
                        needed_by=name,
                        expected=row.expected,
                    )
                )
    return copies


def _has_training() -> bool:
    return importlib.util.find_spec("megatron.training") is not None


def _unchanged(needed: Reliance) -> Patch:
    return Patch(
        module=needed.module, name=needed.name, replace=lambda value: value, why="", needed_by=""
    )


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _takes(*parameters: str) -> Expected:
    return Expected(parameters)


RELIED_ON = (
    Reliance(
        _LAYER_WISE,
        "LayerWiseDistributedOptimizer.compute_full_param_layout",
        _takes("params", "bucket_size", "data_parallel_world_size", "ddp_config",
               "expert_data_parallel_world_size"),
    ),
    Reliance(
        _LAYER_WISE,
        "LayerWiseDistributedOptimizer._shard_divisor",
        _takes("data_parallel_world_size", "ddp_config"),
    ),
    Reliance(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._compute_per_buffer_param_layout",
        _takes("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
    ),
    Reliance(
        "megatron.core.distributed.param_and_grad_buffer",
        "group_params_for_buffers",
        _takes("params", "grad_reduce_in_fp32"),
    ),
    Reliance(_ARGUMENTS, "parse_args", _takes("extra_args_provider", "ignore_unknown_args")),
)  # fmt: skip
"""Names that are called or overridden and not replaced."""


def _layout_seams() -> list[Seam]:
    """Return the seams through which DDP gets our routing and our layout."""
    from megatron_muon.integration import ddp
    from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer

    optimizers = [
        Seam(
            module=module,
            name="LayerWiseDistributedOptimizer",
            replace=_value(LayerWiseMuonOptimizer),
            why="owns whole matrices by our layout and orthogonalizes the full matrix under TP",
            needed_by="core/optimizer/__init__.py:_get_megatron_emerging_optimizer",
            expected=_takes("optimizers", "config", "pg_collection", "init_state_fn_list",
                            "model_chunks"),
            copied=True,
        )
        for module in (_CORE, _LAYER_WISE, _TRAINING)
    ]  # fmt: skip
    tags = [
        Seam(
            module=module,
            name="tag_params_for_buffer_routing",
            replace=_value(ddp.tag_params_for_buffer_routing),
            why="one routing decides a parameter's buffer and its optimizer",
            needed_by="training/training.py:wrap_model_chunks_with_ddp",
            expected=_takes("model_chunks"),
            copied=True,
        )
        for module in (_LAYER_WISE, _TRAINING)
    ]
    return [
        *optimizers,
        *tags,
        Seam(
            module=_BUILDERS,
            name="_ddp_wrap",
            replace=ddp.wraps_with_layout,
            why="0.19.2 has no layer-wise branch on the ModelBuilder path",
            needed_by="training/models/dist_utils.py:unimodal_build_distributed_models",
            expected=_takes("model", "data_parallel_random_init", "ddp_config",
                            "overlap_param_gather_with_optimizer_step", "use_megatron_fsdp",
                            "use_torch_fsdp2", "pg_collection"),
            copied=True,
        ),
        Seam(
            module=_BUILDERS,
            name="DistributedOptimizer",
            replace=ddp.dispatches_layout,
            why="_ddp_wrap computes its layout through this name",
            needed_by="training/models/dist_utils.py:_ddp_wrap",
            expected=Expected(("optimizer", "config", "model_chunks"), at_least=True),
        ),
        Seam(
            module="megatron.core.distributed.distributed_data_parallel",
            name="partition_buckets",
            replace=ddp.partitions_by_owner,
            why="a bucket group of two optimizers is gathered before the second has stepped",
            needed_by="core/distributed/distributed_data_parallel.py:DistributedDataParallel",
            expected=_takes("buffers", "force_single_bucket_group",
                            "reduce_scatter_with_fp32_accumulation"),
        ),
        Seam(
            module="megatron.core.distributed.param_and_grad_buffer",
            name="_ParamAndGradBucketGroup.start_param_sync",
            replace=ddp.stages_before_gather,
            why="a gather through a borrowed gradient buffer needs the masters written before it",
            needed_by="core/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup",
            expected=_takes("self", "force_sync"),
        ),
    ]  # fmt: skip


def _factory_seams() -> list[Seam]:
    """Return the seams through which Megatron's factory builds our optimizer."""
    from megatron_muon.integration import factory, params_norm
    from megatron_muon.optimizer.config import MuonConfig

    return [
        Seam(
            module=_CORE,
            name="_get_megatron_emerging_optimizer",
            replace=factory.builds_muon,
            why="the algorithm itself, in every precision; Megatron's refuses fp16",
            needed_by="core/optimizer/__init__.py:get_megatron_optimizer",
            expected=_takes("config", "model_chunks", "config_overrides", "pg_collection"),
            copied=True,
        ),
        Seam(
            module=_TRAINING,
            name="calc_params_l2_norm",
            replace=params_norm.counts_masters,
            why="--log-params-norm mixes masters with rounded and, with overlap, old weights",
            needed_by="training/training.py:training_log",
            expected=Expected(("model",), at_least=True),
        ),
        Seam(
            module=_TRAINING,
            name="OptimizerConfig",
            replace=_value(MuonConfig),
            why="carries our flags from the command line to the optimizer",
            needed_by="training/training.py:get_megatron_optimizer_config",
            expected=Expected(("optimizer", "muon_momentum", "muon_nesterov", "muon_split_qkv",
                               "muon_scale_mode", "muon_extra_scale_factor",
                               "muon_coefficient_type", "muon_num_ns_steps",
                               "muon_fp32_matmul_prec", "muon_tp_mode", "muon_scalar_optimizer",
                               "use_layer_wise_distributed_optimizer"), at_least=True),
        ),
    ]  # fmt: skip


def _command_line_seams() -> list[Seam]:
    """Return the seams that read our flags and say early what cannot run."""
    from megatron_muon.integration import arguments, preflight

    return [
        Seam(
            module=_ARGUMENTS,
            name="add_megatron_arguments",
            replace=arguments.adds_muon_arguments,
            why="our flags, and parser errors in one line",
            needed_by="training/arguments.py:parse_args",
            expected=_takes("parser"),
            copied=True,
        ),
        Seam(
            module=_ARGUMENTS,
            name="validate_args",
            replace=preflight.checks_arguments,
            why="arguments that cannot run are one message before any work starts",
            needed_by="training/arguments.py:parse_and_validate_args",
            expected=_takes("args", "defaults"),
            copied=True,
        ),
        Seam(
            module="megatron.core.parallel_state",
            name="initialize_model_parallel",
            replace=preflight.compares_ranks,
            why="ranks with different flags would hang in a collective",
            needed_by="training/initialize.py:_initialize_distributed",
            expected=Expected(("tensor_model_parallel_size", "local_world_size"), at_least=True),
            copied=True,
        ),
        Seam(
            module="megatron.core.datasets.indexed_dataset",
            name="IndexedDataset.initialize",
            replace=preflight.finds_data_files,
            why="a data path that does not exist is one message that names the missing file",
            needed_by="core/datasets/indexed_dataset.py:IndexedDataset",
            expected=Expected(("self", "path_prefix"), at_least=True),
        ),
    ]


def _timer_seams() -> list[Seam]:
    """Return the seams that show Muon's timers with the others."""
    from megatron_muon.integration import timers

    return [
        Seam(
            module="megatron.core.timers",
            name=f"Timers.{name}",
            replace=timers.shows_phases,
            why="the training loop names the timers that it shows, and does not know Muon's",
            needed_by="training/training.py:training_log",
            expected=Expected(("self", "names", "normalizer", "reset", "barrier"), at_least=True),
        )
        for name in ("log", "write")
    ]


def _load_seams() -> list[Seam]:
    """Return the seams that look at a checkpoint before it is read."""
    from megatron_muon.integration import checkpointing

    return [
        *(
            Seam(
                module=module,
                name="load",
                replace=checkpointing.resolves_requests,
                why="the optimizer asks for what the checkpoint has; what it has not is one error",
                needed_by="training/checkpointing.py:_load_global_dist_base_checkpoint",
                expected=_takes("sharded_state_dict", "checkpoint_dir", "sharded_strategy",
                                "validate_access_integrity", "strict", "verify_integrity",
                                "process_group"),
                copied=True,
            )
            for module in (_DIST_CHECKPOINTS, f"{_DIST_CHECKPOINTS}.serialization")
        ),
        Seam(
            module=_CHECKPOINTS,
            name="_load_base_checkpoint",
            replace=checkpointing.finds_whole_checkpoint,
            why="torn folders are taken for empty ones or for another format",
            needed_by="training/checkpointing.py:load_checkpoint",
            expected=_takes("load_dir", "args", "rank0", "sharded_state_dict",
                            "checkpointing_context", "dp_cp_group", "expt_dp_group",
                            "gpt_compat_layer_maps"),
        ),
        Seam(
            module=_CHECKPOINTS,
            name="checkpoint_exists",
            replace=checkpointing.finds_lost_tracker,
            why="a folder without its tracker file is passed over for --pretrained-checkpoint",
            needed_by="training/checkpointing.py:load_checkpoint",
            expected=_takes("checkpoints_path"),
        ),
        *(
            Seam(
                module=module,
                name="load_checkpoint",
                replace=checkpointing.refuses_to_end_well,
                why="what cannot be loaded ends with exit code 0",
                needed_by="training/training.py:setup_model_and_optimizer",
                expected=Expected(("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
                                  at_least=True),
                copied=True,
            )
            for module in (_CHECKPOINTS, _TRAINING)
        ),
    ]  # fmt: skip


def _save_seams() -> list[Seam]:
    """Return the seams that keep the last whole checkpoint until there is another."""
    from megatron_muon.integration import saving

    strategies = f"{_DIST_CHECKPOINTS}.strategies"
    return [
        *(
            Seam(
                module=module,
                name="save_checkpoint",
                replace=saving.keeps_last_checkpoint,
                why="a save over a folder that holds a checkpoint destroys it first",
                needed_by="training/training.py:save_checkpoint_and_time",
                expected=Expected(("iteration", "model", "non_persistent_ckpt", "release"),
                                  at_least=True),
                copied=True,
            )
            for module in (_CHECKPOINTS, _TRAINING)
        ),
        Seam(
            module=_CHECKPOINTS,
            name="get_checkpoint_name",
            replace=saving.writes_beside,
            why="names the folder that save_checkpoint writes to",
            needed_by="training/checkpointing.py:save_checkpoint",
            expected=Expected(("checkpoints_path", "iteration", "release"), at_least=True),
        ),
        Seam(
            module=_CHECKPOINTS,
            name="maybe_msc",
            replace=saving.writes_whole_trackers,
            why="the tracker file is emptied before it is written",
            needed_by="training/checkpointing.py:save_checkpoint",
            expected=_takes(),
        ),
        Seam(
            module="megatron.training.wandb_utils",
            name="on_save_checkpoint_success",
            replace=saving.names_place_to_wandb,
            why="is told the folder beside, which is renamed by then",
            needed_by="training/checkpointing.py:save_checkpoint",
            expected=_takes("checkpoint_path", "tracker_filename", "save_dir", "iteration"),
            copied=True,
        ),
        *(
            Seam(
                module=module,
                name="save",
                replace=saving.saves_whole,
                why="a failed write is told to all ranks, and an asynchronous one needs copies",
                needed_by="training/checkpointing.py:save_checkpoint",
                expected=Expected(("sharded_state_dict", "checkpoint_dir", "async_sharded_save"),
                                  at_least=True),
                copied=True,
            )
            for module in (_DIST_CHECKPOINTS, f"{_DIST_CHECKPOINTS}.serialization")
        ),
        Seam(
            module=f"{strategies}.filesystem_async",
            name="FileSystemWriterAsync.finish",
            replace=saving.keeps_failure_of_index,
            why="where the first rank cannot write the index, the others wait for it",
            needed_by="core/dist_checkpointing/strategies/state_dict_saver.py"
            ":save_state_dict_async_finalize",
            expected=_takes("self", "metadata", "results"),
        ),
        Seam(
            module=f"{strategies}.filesystem_async",
            name="get_write_results_queue",
            replace=saving.answers_in_process,
            why="a synchronous save starts a process that outlives a rank that is killed",
            needed_by="core/dist_checkpointing/strategies/filesystem_async.py"
            ":FileSystemWriterAsync",
            expected=_takes("mp_mode"),
        ),
        Seam(
            module=f"{_DIST_CHECKPOINTS}.serialization",
            name="save_config",
            replace=saving.keeps_failure_of_config,
            why="where the first rank cannot write metadata.json, the others wait for it",
            needed_by="core/dist_checkpointing/serialization.py:save",
            expected=_takes("config", "checkpoint_dir"),
        ),
        Seam(
            module=f"{strategies}.torch",
            name="MCoreSavePlanner.transform_object",
            replace=saving.copies_for_async,
            why="an asynchronous save shares the memory that training goes on to change",
            needed_by="core/dist_checkpointing/strategies/filesystem_async.py"
            ":FileSystemWriterAsync",
            expected=_takes("self", "write_item", "object"),
        ),
    ]  # fmt: skip
