"""One rank's part of the construction tests: each scenario builds, or says why not."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.testing.law.build import (
    build_model,
    find_muons,
    leaves,
    optimizer_config,
    parallel_state,
    parameters,
    transformer_config,
    wrap,
)
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import FFN, HIDDEN

TAG = "is_managed_by_layer_wise_optimizer"
TP2 = Case(tp=2)
DP2 = Case()


def run_scenarios(names: Sequence[str]) -> dict[str, str]:
    """Return for each scenario what it says, or the error it ends in."""
    import megatron_muon

    results: dict[str, str] = {}
    if "wrapped before install" in names:
        megatron_muon.install(device="cpu", optimizer=False)
        with parallel_state(1):
            results["wrapped before install"] = said(wrapped_before_install)
    megatron_muon.install(device="cpu")
    for tp in (1, 2, 4):
        chosen = [n for n in names if n in SCENARIOS and SCENARIOS[n][0] == tp]
        if chosen:
            with parallel_state(tp):
                results |= {name: said(SCENARIOS[name][1]) for name in chosen}
    return results


def said(scenario: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result = scenario()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return str(result if result is not None else [str(w.message) for w in seen])


def build(case: Case, chunks: list[Any] | None = None, **changes: Any) -> Any:
    """Build the optimizer over a wrapped model; changes go into its config."""
    from megatron.core.optimizer import get_megatron_optimizer

    chunks = wrap(case, build_model(case)) if chunks is None else chunks
    config = optimizer_config(case)
    for name, value in changes.items():
        setattr(config, name, value)
    return get_megatron_optimizer(config, chunks)


def wrap_by_hand(case: Case, layout: Callable[..., Any] | None, tagged: bool = True) -> list[Any]:
    """Wrap in DDP as code does that builds it itself."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import layer_wise_optimizer

    chunks = build_model(case)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    if tagged:
        layer_wise_optimizer.tag_params_for_buffer_routing(chunks)
    params = [param for _, param in parameters(chunks)]
    given = {} if layout is None else {"full_param_layout": layout(params, ddp_config)}
    return [DistributedDataParallel(transformer_config(case), ddp_config, chunks[0], **given)]


def published_layout(params: list[Any], ddp_config: Any, num_shards: int = 0) -> Any:
    from megatron.core.optimizer import layer_wise_optimizer

    return layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
        params, None, num_shards or dist.get_world_size(), ddp_config
    )


# Wrapping.


def wrapped_before_install() -> None:
    import megatron_muon

    chunks = wrap(DP2, build_model(DP2))
    megatron_muon.uninstall()
    megatron_muon.install(device="cpu")
    build(DP2, chunks)


def bytes_layout() -> None:
    build(DP2, wrap_by_hand(DP2, None))


def untagged_layout() -> None:
    build(DP2, wrap_by_hand(DP2, published_layout, tagged=False))


def by_hand() -> str:
    build(DP2, wrap_by_hand(DP2, published_layout))
    return "built"


def another_shard_count() -> None:
    build(DP2, wrap_by_hand(DP2, lambda params, config: published_layout(params, config, 4)))


def another_buffer() -> None:
    chunks = wrap(DP2, build_model(DP2))
    buffer = next(b for b in chunks[0].buffers if b.params[0].is_managed_by_layer_wise_optimizer)
    buffer.param_index_map = dict(buffer.param_index_map)
    build(DP2, chunks)


def changed_after_wrapping() -> None:
    chunks = wrap(DP2, build_model(DP2))
    param = dict(parameters(chunks))["decoder.layers.0.mlp.linear_fc2.weight"]
    param.use_muon = False  # type: ignore[attr-defined]
    build(DP2, chunks)


def reduced_by_shards() -> None:
    chunks = wrap(DP2, build_model(DP2))
    build(DP2, chunks, use_layer_wise_distributed_optimizer=False, muon_layout=None)


def uneven_gathers() -> str:
    """Without a layout a bucket's parameters are of different sizes on each owner."""
    case = replace(DP2, wrap="legacy", overlap_param=True, overlap_grad=True)
    build(case, wrap(case, build_model(case)))
    return "built"


def two_models_of_one_name() -> None:
    case = replace(DP2, wrap="replicated")
    build(case, [*wrap(case, build_model(case)), *wrap(case, build_model(case))])


# Settings.


def unequal_routes() -> None:
    chunks = build_model(DP2)
    if dist.get_rank() == 1:
        param = dict(parameters(chunks))["decoder.layers.1.self_attention.linear_proj.weight"]
        param.use_muon = False  # type: ignore[attr-defined]
    build(DP2, wrap(DP2, chunks))


def unequal_owners() -> None:
    """Rank 1 lays two matrices of one shape out in the other's place."""
    from megatron_muon.optimizer import param_layout

    original = param_layout._as_megatron

    def swapped(*args: Any) -> Any:
        made = original(*args)
        if dist.get_rank() == 1:
            places, shape = made.param_index_map, (2 * FFN, HIDDEN)
            first, second = [param for param in places if tuple(param.shape) == shape]
            places[first], places[second] = places[second], places[first]
        return made

    with mock.patch.object(param_layout, "_as_megatron", swapped):
        build(DP2, wrap(DP2, build_model(DP2)))


def unequal_settings() -> None:
    build(DP2, muon_num_ns_steps=5 + dist.get_rank())


def unequal_scalar_settings() -> None:
    build(DP2, clip_grad=float(dist.get_rank()))


def report_on_one_rank() -> None:
    build(DP2, muon_report="report.json" if dist.get_rank() else None)


def report_in_no_folder() -> None:
    build(DP2, muon_report="/no/such/folder/report.json")


def no_matrix() -> None:
    chunks = build_model(DP2)
    for _, param in parameters(chunks):
        param.use_muon = False  # type: ignore[attr-defined]
    build(DP2, wrap(DP2, chunks))


def frozen_matrices() -> str:
    """The scalar optimizer trains the rest, as a user who freezes all matrices asks for."""
    optimizer = build(replace(DP2, trained="layernorm|bias|embedding"))
    assert not list(find_muons(optimizer))
    return type(optimizer.chained_optimizers[0]).__name__


def exclude_nothing() -> None:
    build(replace(DP2, wrap="replicated"), muon_exclude=["*.linear_fc3.*"])


def include_vector() -> None:
    build(replace(DP2, wrap="replicated"), muon_include=["*final_layernorm.weight"])


def exclude_too_late() -> None:
    build(DP2, muon_exclude=["*linear_fc1*"])


def exclude_by_flag() -> str:
    """The flags reach both the tags and the optimizer."""
    case = replace(DP2, exclude="*linear_fc1*", include="output_layer.weight")
    chunks = wrap(case, build_model(case))
    optimizer = build(case, chunks)
    names = {param: name for name, param in parameters(chunks)}
    stepped = {names[p] for p in optimizer.chained_optimizers[0].dist_metas}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, stepped)
    return ",".join(sorted(set().union(*everywhere)))


def other_rules_on_the_same_model() -> str:
    case = replace(DP2, wrap="replicated")
    chunks = wrap(case, build_model(case))
    build(case, chunks)
    build(case, chunks, muon_exclude=["*linear_fc1*"])
    return "built twice"


def no_tags_without_a_layout() -> str:
    """Megatron's path without a layout takes a tagged scalar bucket for another optimizer's."""
    chunks = wrap(replace(DP2, wrap="legacy"), build_model(DP2))
    build(replace(DP2, wrap="legacy"), chunks)
    tagged = [name for name, p in parameters(chunks) if hasattr(p, TAG)]
    return str(tagged)


def fp16() -> str:
    """The children read the scale of the one scaler, and cannot change it."""
    case = replace(DP2, fp16=True)
    optimizer = build(case, wrap(case, build_model(case)), initial_loss_scale=65536.0, hysteresis=1)
    scales = []
    for leaf in leaves(optimizer):
        leaf.grad_scaler.update(True)
        scales.append(float(leaf.get_loss_scale()))
    return f"{float(optimizer.get_loss_scale())} {scales}"


def precision_aware() -> None:
    build(DP2, use_precision_aware_optimizer=True, use_distributed_optimizer=True)


def gather_with_the_step() -> None:
    build(DP2, overlap_param_gather_with_optimizer_step=True)


def cpu_offload() -> None:
    build(DP2, optimizer_cpu_offload=True)


def shards_of_query_groups() -> None:
    build(replace(Case(tp=4), tp_mode="distributed"))


def plain_config() -> str:
    """Megatron's own config class: its default mode is read as owner."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="muon", lr=0.1, use_layer_wise_distributed_optimizer=True, muon_momentum=0.5
    )
    chunks = wrap(TP2, build_model(TP2))
    (muon,) = find_muons(get_megatron_optimizer(config, chunks))
    return f"{muon.settings.tp_mode} {muon.settings.momentum} {muon.settings.exclude}"


def deprecated_name() -> str:
    chunks = wrap(DP2, build_model(DP2))
    optimizer = build(
        DP2, chunks, optimizer="dist_muon", use_layer_wise_distributed_optimizer=False
    )
    (muon,) = find_muons(optimizer)
    return f"{muon.settings.layout} {type(optimizer.chained_optimizers[0]).__name__}"


def overrides_of_the_caller() -> str:
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    config = optimizer_config(DP2)
    overrides = get_standard_config_overrides(config)
    before = dict(overrides)
    get_megatron_optimizer(config, wrap(DP2, build_model(DP2)), overrides)
    return str(overrides == before)


def overlap_of_ddp_only() -> None:
    build(replace(DP2, overlap_param=True, overlap_grad=True), overlap_param_gather=False)


def overlap_of_the_optimizer_only() -> None:
    build(replace(DP2, wrap="legacy"), overlap_param_gather=True)


def overlap_on_one_rank_only() -> None:
    build(DP2, overlap_param_gather=dist.get_rank() == 1)


def overlap_of_both() -> str:
    overlaps = []
    for overlap in (False, True):
        case = replace(DP2, overlap_param=overlap, overlap_grad=overlap)
        overlaps.append(build(case).chained_optimizers[0].overlap_param_gather)
    return str(overlaps)


def later_name_of_a_layout() -> str:
    (muon,) = find_muons(build(DP2, muon_layout="padded"))
    return str(muon.settings.layout)


def decoupled_layout() -> None:
    build(DP2, muon_layout="decoupled")


def momentum_is_made_at_once() -> str:
    (muon,) = find_muons(build(replace(DP2, bf16=True)))
    params = [param for group in muon.param_groups for param in group["params"]]
    buffers = [muon.state[param]["momentum_buffer"] for param in params]
    assert all(buffer.dtype == torch.float32 for buffer in buffers)
    return str(len(buffers) > 0 and len(buffers) == len(muon.state))


def records_of_owned_matrices() -> str:
    """Every rank has the record of what it owns: whole, local, and where DDP has it."""
    chunks = wrap(TP2, build_model(TP2))
    layer_wise = build(TP2, chunks).chained_optimizers[0]
    for param, meta in layer_wise.dist_metas.items():
        buffer = chunks[0].buffers[meta.buffer_idx]
        start, end = meta.global_range
        assert meta.local_range == meta.global_range
        assert meta.shape == tuple(param.shape)
        assert param.data_ptr() == buffer.param_data[start:end].data_ptr()
        assert buffer.bucket_indices[meta.bucket_idx][0] <= start
        assert meta.tp_split_dim == param.partition_dim
    return str(len(layer_wise.dist_metas))


SCENARIOS: dict[str, tuple[int, Callable[[], Any]]] = {
    **{
        scenario.__name__.replace("_", " "): (1, scenario)
        for scenario in (
            bytes_layout, untagged_layout, by_hand, another_shard_count, another_buffer,
            changed_after_wrapping, reduced_by_shards, uneven_gathers, two_models_of_one_name,
            unequal_routes, unequal_owners, unequal_settings, unequal_scalar_settings,
            report_on_one_rank, report_in_no_folder, no_matrix, exclude_nothing,
            include_vector, no_tags_without_a_layout, exclude_too_late, exclude_by_flag,
            other_rules_on_the_same_model,
            fp16, precision_aware, gather_with_the_step, cpu_offload, deprecated_name,
            overrides_of_the_caller, overlap_of_ddp_only, overlap_of_the_optimizer_only,
            overlap_on_one_rank_only, overlap_of_both, later_name_of_a_layout, decoupled_layout,
            momentum_is_made_at_once, frozen_matrices,
        )
    },
    "plain config": (2, plain_config),
    "records of owned matrices": (2, records_of_owned_matrices),
    "shards of query groups": (4, shards_of_query_groups),
}  # fmt: skip
