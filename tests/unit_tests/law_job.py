"""One rank's part of a law test: a real GPT, real DDP, real factory, known gradients."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit_tests.law_model import (
    FFN,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    Case,
    Outcome,
    gradients,
    initial,
    logical_shapes,
    shard,
)
from tests.unit_tests.law_mutants import MUTANTS


def run_cases(cases: Sequence[Case]) -> list[Outcome]:
    """Run several cases one after the other on this rank."""
    import megatron_muon

    megatron_muon.install(device="cpu")
    outcomes: dict[Case, Outcome] = {}
    for grid in dict.fromkeys(case.grid for case in cases):
        with parallel_state(*grid):
            for case in cases:
                if case.grid == grid:
                    with MUTANTS[case.mutant]():
                        outcomes[case] = _train(case)
    return [outcomes[case] for case in cases]


@contextlib.contextmanager
def parallel_state(tp: int, pp: int = 1, vpp: int | None = None, ep: int = 1) -> Iterator[None]:
    """Make Megatron's process groups, and end them: each holds threads for as long as it lives."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=vpp, expert_model_parallel_size=ep
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def transformer_config(case: Case) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        pipeline_dtype=torch.float32,
        add_bias_linear=case.bias,
        num_moe_experts=case.experts or None,
        expert_model_parallel_size=case.ep,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def build_model(case: Case) -> list[torch.nn.Module]:
    """Build this rank's stages of the GPT, with the initial weights, not wrapped in DDP."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(case)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = case.pp * (case.vpp or 1)
    chunks: list[torch.nn.Module] = []
    for stage in range(case.vpp or 1):
        index = stage * case.pp + pp_rank
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=case.experts or None, normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=index == 0,
            post_process=index == num_stages - 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage if case.vpp else None,
        )
        chunks.append(Float16Module(config, chunk) if case.bf16 else chunk)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), case.tp
    shapes = logical_shapes(case)
    for name, param in parameters(chunks):
        param.data.copy_(shard(name, initial(name, shapes[name]), rank, size))
        param.requires_grad_(case.trains(name))
    return chunks


def parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter under its name in the whole model."""
    for chunk in chunks:
        inner: Any = chunk
        while not hasattr(inner, "decoder"):
            inner = inner.module
        numbers = [layer.layer_number - 1 for layer in inner.decoder.layers]
        for name, param in inner.named_parameters():
            words = name.split(".")
            for i, (before, word) in enumerate(pairwise(words)):
                if before == "layers":
                    words[i + 1] = str(numbers[int(word)])
                elif before == "local_experts":
                    mlp = inner.get_submodule(".".join(name.split(".")[: i - 1]))
                    words[i + 1] = str(mlp.local_expert_indices[int(word)])
            yield ".".join(words), param


def wrap(case: Case, chunks: list[torch.nn.Module]) -> list[Any]:
    """Wrap in DDP the way ``case.wrap`` says."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars, training
    from megatron.training.models import dist_utils

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grads_in_fp32,
        overlap_grad_reduce=case.overlap_grad,
        overlap_param_gather=case.overlap_param,
        bucket_size=case.bucket_size,
    )
    if case.wrap == "builder":
        args = SimpleNamespace(use_layer_wise_distributed_optimizer=True, optimizer="muon")
        with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
            return dist_utils._ddp_wrap(
                chunks, False, ddp_config, False,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )  # fmt: skip
    return training.wrap_model_chunks_with_ddp(
        chunks,
        transformer_config(case),
        ddp_config,
        use_layer_wise_distributed_optimizer=case.wrap in ("training", "legacy"),
        use_layer_wise_param_layout=case.wrap == "training",
        disable_bucketing_per_chunk=[i > 0 for i in range(len(chunks))],
        bucket_sizes=[None if i or not case.overlap_grad else case.bucket_size
                      for i in range(len(chunks))],
    )  # fmt: skip


def optimizer_config(case: Case) -> Any:
    from megatron_muon import MuonConfig

    return MuonConfig(
        optimizer="muon",
        lr=case.lr,
        min_lr=case.lr,
        weight_decay=case.weight_decay,
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        use_layer_wise_distributed_optimizer=case.wrap != "replicated",
        overlap_param_gather=case.overlap_param,
        clip_grad=case.clip,
        grad_norm_skip_threshold=case.skip_above,
        adam_beta2=0.999,
        muon_momentum=case.momentum,
        muon_nesterov=case.nesterov,
        muon_fp32_matmul_prec=case.precision,
        muon_split_qkv=case.split_qkv,
        muon_tp_mode=case.tp_mode,
        muon_report=case.report,
    )


def _train(case: Case) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chunks = wrap(case, build_model(case))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        optimizer = get_megatron_optimizer(optimizer_config(case), chunks)
    scheduler = OptimizerParamScheduler(
        optimizer, case.lr, case.lr, case.lr, 0, 100, "constant", case.weight_decay,
        case.weight_decay, 100, "constant",
    )  # fmt: skip
    muons = list(find_muons(optimizer))
    calls = flops = collectives = nbytes = 0
    norms, snapshots = [], []
    for step in range(case.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if case.overlap_param and case.pp == 1:
            _forward(chunks[0])
        _inject(case, chunks, step)
        success, norm, _ = optimizer.step()
        assert success == (norm <= case.skip_above)
        scheduler.step(increment=1)
        norms.append(float(norm))
        for muon in muons:
            calls += muon.account.newton_schulz_calls
            flops += muon.account.newton_schulz_flops
            collectives += muon.account.traffic.calls
            nbytes += muon.account.traffic.nbytes
        if case.report is not None and dist.get_rank() == 0:
            with open(case.report) as report:
                snapshots.append(report.read())
    if case.overlap_param:
        _gather_params(chunks)
    masters, owned = _masters(optimizer, chunks)
    return Outcome(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        masters=masters,
        weights={name: param.detach().clone() for name, param in parameters(chunks)},
        grad_norms=norms,
        newton_schulz_calls=calls,
        newton_schulz_flops=flops,
        collectives=collectives,
        exchanged_nbytes=nbytes,
        owned=owned,
        printed=printed.getvalue(),
        snapshots=snapshots,
    )


def _forward(chunk: Any) -> None:
    """Run a forward pass, whose hooks gather the parameters."""
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril().logical_not()
    with torch.no_grad():
        chunk(tokens, tokens, mask)


def _gather_params(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def _inject(case: Case, chunks: Sequence[Any], step: int) -> None:
    """Put this rank's gradients into DDP's buffers, as backward does, and reduce them."""
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    grads = gradients(case, replica, parallel_state.get_data_parallel_world_size(), step)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, param in reversed(list(parameters([chunk]))):
            if not param.requires_grad:
                continue
            tokens_of = case.ep if ".experts." in name else 1
            param.main_grad.copy_(tokens_of * shard(name, grads[name], rank, case.tp))
            if case.overlap_grad:
                chunk.param_to_bucket_group[param].register_grad_ready(param)
    for chunk in chunks:
        chunk.finish_grad_sync()


def find_muons(optimizer: Any) -> Iterator[Any]:
    """Find our torch optimizers inside Megatron's chain."""
    for child in getattr(optimizer, "chained_optimizers", ()):
        yield from find_muons(child)
    inner = None if hasattr(optimizer, "chained_optimizers") else optimizer.optimizer
    if type(inner).__name__ == "OwnedMuon":
        yield inner


def _leaves(optimizer: Any) -> Iterator[Any]:
    if hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            yield from _leaves(child)
    else:
        yield optimizer


def _masters(
    optimizer: Any, chunks: Sequence[Any]
) -> tuple[dict[str, list[tuple[int, torch.Tensor]]], set[str]]:
    """Read every fp32 master this rank holds, from Megatron's own optimizer objects."""
    names = {param: name for name, param in parameters(chunks)}
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def add(param: Any, start: int, master: torch.Tensor) -> None:
        assert master.dtype == torch.float32
        pieces.setdefault(names[param], []).append((start, master.detach().flatten().clone()))

    for leaf in _leaves(optimizer):
        if leaf.is_stub_optimizer:
            continue
        if hasattr(leaf, "model_float16_groups"):  # DistributedOptimizer
            pairs = (
                (leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups),
                (leaf.model_fp32_groups, leaf.shard_fp32_groups),
            )
            for models, shards in pairs:
                for model_group, shard_group in zip(models, shards, strict=True):
                    for param, master in zip(model_group, shard_group, strict=True):
                        add(param, leaf._get_model_param_range_map(param)["param"].start, master)
        elif hasattr(leaf, "float16_groups"):
            for models, masters in (
                (leaf.float16_groups, leaf.fp32_from_float16_groups),
                (leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups),
            ):
                for model_group, master_group in zip(models, masters, strict=True):
                    for param, master in zip(model_group, master_group, strict=True):
                        add(param, 0, master)
        else:
            for group in leaf.param_groups:
                for param in group["params"]:
                    add(param, 0, param)
    return pieces, set(pieces)
