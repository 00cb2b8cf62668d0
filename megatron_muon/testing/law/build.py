"""A real Megatron GPT with the harness's weights, wrapped in DDP, and its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.testing.law.case import Case, is_expert
from megatron_muon.testing.law.model import (
    FFN,
    HEAD,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    initial,
    is_cut_again,
    logical_shapes,
    shard,
)


@contextlib.contextmanager
def parallel_state(
    tp: int, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None,
    gtp: int = 1, egtp: int = 1,
) -> Iterator[None]:  # fmt: skip
    """Make Megatron's process groups, and end them: each holds threads for as long as it lives."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        gtp_remat_size=gtp,
        expert_gtp_remat_size=egtp,
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
    """Return Megatron's config of the model."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=case.groups,
        kv_channels=HEAD,
        attention_output_gate=case.output_gate,
        gated_linear_unit=case.gated,
        activation_func=torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        normalization="RMSNorm",
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        pipeline_dtype=torch.float32,
        add_bias_linear=case.bias,
        num_moe_experts=case.experts or None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expert_tp,
        moe_ffn_hidden_size=FFN if case.experts else None,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        bf16=case.bf16,
        fp16=case.fp16,
        calculate_per_token_loss=case.per_token,
        params_dtype=case.dtype,
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
    """Build this rank's stages of the model, with the initial weights, not wrapped in DDP."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.generalized_tensor_parallelism import update_gtp_config
    from megatron.core.transformer.module import Float16Module

    update_gtp_config(pad_for_alignment=case.gtp_alignment)
    config = transformer_config(case)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = case.pp * (case.vpp or 1)
    chunks: list[torch.nn.Module] = []
    for stage in range(case.vpp or 1):
        index = stage * case.pp + pp_rank
        chunk = (
            Perceptron(config)
            if case.perceptron
            else _gpt(case, config, stage, index == 0, index == num_stages - 1)
        )
        chunks.append(Float16Module(config, chunk) if case.bf16 or case.fp16 else chunk)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_tp_rank = parallel_state.get_expert_tensor_parallel_rank()
    dense_gtp_rank = parallel_state.get_gtp_weight_remat_rank()
    expert_gtp_rank = parallel_state.get_expert_gtp_weight_remat_rank()
    shapes = logical_shapes(case)
    for name, param in parameters(chunks):
        rank = expert_tp_rank if is_expert(name) else tp_rank
        whole = initial(name, shapes[name])
        gtp_rank = expert_gtp_rank if is_expert(name) else dense_gtp_rank
        param.data.copy_(shard(case, name, whole, rank, gtp_rank))
        if is_cut_again(case, name) and is_expert(name):
            # 0.19.2 loses it on the way to the part, and only its layers of Transformer Engine say
            # it anew (extensions/transformer_engine.py:110).
            param.allreduce = case.ep == 1  # type: ignore[attr-defined]
        param.requires_grad_(case.trains(name))
    return chunks


def _gpt(case: Case, config: Any, stage: int, is_first: bool, is_last: bool) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=case.experts or None, normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=stage if case.vpp else None,
    )
    return model


class Perceptron(torch.nn.Module):
    """One MLP of Megatron's, named as that of a GPT's first layer, with a squared error."""

    def __init__(self, config: Any) -> None:
        """Build the MLP."""
        from megatron.core.enums import ModelType
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLP, MLPSubmodules

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        layer: Any = torch.nn.Module()
        layer.layer_number = 1
        layer.mlp = MLP(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ffn_hidden_size=FFN,
        )
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what a pipeline stage before gives; there is none."""

    def forward(
        self, inputs: torch.Tensor, *unused: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the error of each sample, ``(B, S)``, in fp32."""
        outputs, bias = self.decoder.layers[0].mlp(inputs)
        outputs = outputs if bias is None else outputs + bias
        error: torch.Tensor = outputs.float() - labels
        return error.square().mean(-1)


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
    args = SimpleNamespace(
        use_layer_wise_distributed_optimizer=True, optimizer="muon", muon_layout=case.layout,
        muon_split_qkv=case.split_qkv, muon_split_gated_fc1=case.split_gated_fc1,
        muon_split_heads=case.split_heads, muon_exclude=_globs(case.exclude),
        muon_include=_globs(case.include),
    )  # fmt: skip
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        if case.wrap == "builder":
            wrapped: list[Any] = dist_utils._ddp_wrap(
                chunks, False, ddp_config, False,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )  # fmt: skip
        else:
            wrapped = training.wrap_model_chunks_with_ddp(
                chunks,
                transformer_config(case),
                ddp_config,
                use_layer_wise_distributed_optimizer=case.wrap in ("training", "legacy"),
                use_layer_wise_param_layout=case.wrap == "training",
                disable_bucketing_per_chunk=[i > 0 for i in range(len(chunks))],
                # As resolve_ddp_bucket_size (0.19.2, training.py:1552): none without overlap.
                bucket_sizes=[None if i or not case.overlap_grad else case.bucket_size
                              for i in range(len(chunks))],
            )  # fmt: skip
    return wrapped


def optimizer_config(case: Case) -> Any:
    """Return the optimizer's config."""
    from megatron_muon.optimizer.config import MuonConfig

    return MuonConfig(
        optimizer="muon",
        lr=case.lr,
        min_lr=case.lr,
        weight_decay=case.weight_decay,
        bf16=case.bf16,
        fp16=case.fp16,
        loss_scale=case.loss_scales[0] if case.loss_scales else None,
        params_dtype=case.dtype,
        use_layer_wise_distributed_optimizer=case.wrap != "replicated",
        overlap_param_gather=case.overlap_param,
        clip_grad=case.clip,
        grad_norm_skip_threshold=case.skip_above,
        adam_beta2=0.999,
        adam_eps=case.adam_eps,
        muon_momentum=case.momentum,
        muon_nesterov=case.nesterov,
        muon_fp32_matmul_prec=case.precision,
        muon_split_qkv=case.split_qkv,
        muon_tp_mode=case.tp_mode,
        muon_layout=case.layout if case.wrap in ("training", "builder") else None,
        muon_split_gated_fc1=case.split_gated_fc1,
        muon_split_heads=case.split_heads,
        muon_share_blocks=case.share_blocks,
        muon_gather_budget_mib=case.budget_nbytes / 2**20,
        muon_exchange_dtype=case.exchange_dtype,
        muon_overlap_param_gather=case.gathers_early,
        muon_exclude=_globs(case.exclude),
        muon_include=_globs(case.include),
        muon_report=case.report,
    )


def _globs(glob: str | None) -> list[str]:
    return [] if glob is None else [glob]


def build_optimizer(case: Case, chunks: list[Any]) -> Any:
    """Build the optimizer over wrapped chunks, on one rank over permuted groups if asked for."""
    import megatron.core.optimizer as host

    with contextlib.ExitStack() as stack:
        if case.permuted and dist.get_rank() == dist.get_world_size() - 1:
            make_groups = host._get_param_groups
            stack.enter_context(
                mock.patch.object(
                    host, "_get_param_groups",
                    lambda *args, **kwargs: _reverse(make_groups(*args, **kwargs)),
                )
            )  # fmt: skip
        return host.get_megatron_optimizer(optimizer_config(case), chunks)


def _reverse(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": group["params"][::-1]} for group in reversed(groups)]


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the innermost of Megatron's wrappers in a chain of optimizers."""
    if hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            yield from leaves(child)
    else:
        yield optimizer


def find_muons(optimizer: Any) -> Iterator[Any]:
    """Yield this package's torch optimizers inside Megatron's chain."""
    for leaf in leaves(optimizer):
        if type(leaf.optimizer).__name__ == "OwnedMuon":
            yield leaf.optimizer


def masters(
    optimizer: Any, chunks: Sequence[Any]
) -> tuple[dict[str, list[tuple[int, torch.Tensor]]], set[str]]:
    """Read every fp32 master this rank holds, from Megatron's own optimizer objects."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, start, master, _ in _held(optimizer, chunks):
        assert master.dtype == torch.float32
        pieces.setdefault(name, []).append((start, master.detach().flatten().clone()))
    return pieces, set(pieces)


def states(
    optimizer: Any, chunks: Sequence[Any]
) -> dict[str, list[tuple[int, dict[str, torch.Tensor]]]]:
    """Read the optimizer's state of every master this rank holds, piece by piece."""
    found: dict[str, list[tuple[int, dict[str, torch.Tensor]]]] = {}
    for name, start, _, state in _held(optimizer, chunks):
        tensors = {
            key: value.detach().flatten().clone()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        found.setdefault(name, []).append((start, tensors))
    return found


def _held(
    optimizer: Any, chunks: Sequence[Any]
) -> Iterator[tuple[str, int, torch.Tensor, dict[str, Any]]]:
    """Yield name, start in the shard, master and state of every piece this rank holds."""
    names: dict[Any, str] = {param: name for name, param in parameters(chunks)}
    for leaf in leaves(optimizer):
        if leaf.is_stub_optimizer:
            continue
        if hasattr(leaf, "model_float16_groups"):  # DistributedOptimizer
            for param, master in _paired(
                [*leaf.model_float16_groups, *leaf.model_fp32_groups],
                [*leaf.shard_fp32_from_float16_groups, *leaf.shard_fp32_groups],
            ):
                start = leaf._get_model_param_range_map(param)["param"].start
                yield names[param], start, master, leaf.optimizer.state.get(master, {})
        elif hasattr(leaf, "float16_groups"):
            for param, master in _paired(
                [*leaf.float16_groups, *leaf.fp32_from_fp32_groups],
                [*leaf.fp32_from_float16_groups, *leaf.fp32_from_fp32_groups],
            ):
                yield names[param], 0, master, leaf.optimizer.state.get(master, {})
        else:
            for group in leaf.param_groups:
                for param in group["params"]:
                    yield names[param], 0, param, leaf.optimizer.state.get(param, {})


def _paired(
    models: Sequence[Sequence[Any]], masters: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[Any, torch.Tensor]]:
    for model_group, master_group in zip(models, masters, strict=True):
        yield from zip(model_group, master_group, strict=True)
