"""One rank's part of the tests of MXFP8 weights on the CPU: a GPT under Megatron's own optimizer.

DDP, bucket groups, ``DistributedOptimizer`` and Adam are Megatron's as released; the steps are
those of ``megatron.training.training.train_step``. Gradients are not clipped: Megatron's norm is a
sum over the pieces of a rank, which lie elsewhere when weights are gathered as MXFP8, and its last
bit moves with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from megatron_muon.integration import cpu_mxfp8
from megatron_muon.integration.cpu_mxfp8_format import Planes
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Quantizer, CpuMXFP8Tensor
from megatron_muon.testing.law.build import parallel_state

HIDDEN, FFN, VOCAB, SEQUENCE, BATCH, STEPS = 64, 128, 32, 8, 2, 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train the model.

    Attributes:
        fp8: Whether the weights of the linear layers are MXFP8.
        gather: Whether they are so between steps, else bf16 and quantized where they are used.
        overlap: Whether gradients and parameters move beside the computation.
        grads_in_fp32: Whether gradients are added up and reduced in fp32.
        tp: Tensor-parallel size.
        experts: Experts of each layer.
        recompute: Whether activations are made again in the backward pass.
        fault: What is broken on purpose, a key of :data:`FAULTS`.
    """

    fp8: bool = True
    gather: bool = False
    overlap: bool = False
    grads_in_fp32: bool = True
    tp: int = 1
    experts: int = 0
    recompute: bool = False
    fault: str = "none"


@dataclass
class Outcome:
    """What a rank saw.

    Attributes:
        losses: Of each step.
        masters: The fp32 piece of each weight that this rank holds, and where it starts.
        first: The same before the first step.
        planes: Codes and scales of every MXFP8 weight, by name.
        values: Every other weight.
        quantizations: Calls of the quantizer in each step.
    """

    losses: list[float]
    masters: dict[str, tuple[int, torch.Tensor]]
    first: dict[str, tuple[int, torch.Tensor]]
    planes: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    quantizations: list[int] = field(default_factory=list)


def run_all(runs: Sequence[Run]) -> list[Outcome]:
    """Train one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    outcomes = {}
    for tp in dict.fromkeys(run.tp for run in runs):
        with parallel_state(tp):
            for run in (run for run in runs if run.tp == tp):
                with FAULTS[run.fault]():
                    outcomes[run] = _train(run)
    return [outcomes[run] for run in runs]


def build_only(changes: dict[str, Any]) -> None:
    """Build the model with other fields of its config."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    with parallel_state(1):
        _model(Run(), changes)


def _model(run: Run, changes: dict[str, Any] | None = None) -> Any:
    from megatron.core.transformer.module import Float16Module

    model = gpt(run, changes)
    return Float16Module(model.config, model)


def gpt(run: Run, changes: dict[str, Any] | None = None, **stage: Any) -> Any:
    """Build the model, or a stage of it.

    Args:
        run: How it is trained.
        changes: Other fields of its config.
        stage: Arguments of ``GPTModel`` that say which stage.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = dict(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=4,
        normalization="RMSNorm", tensor_model_parallel_size=run.tp, add_bias_linear=not run.experts,
        num_moe_experts=run.experts or None, moe_ffn_hidden_size=FFN if run.experts else None,
        moe_router_topk=2, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall", bf16=True, params_dtype=torch.bfloat16,
        fp8="e4m3" if run.fp8 else None, fp8_recipe="mxfp8", fp8_param=run.gather,
        recompute_granularity="full" if run.recompute else None,
        recompute_method="uniform" if run.recompute else None,
        recompute_num_layers=1 if run.recompute else None,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    config = TransformerConfig(**(fields | (changes or {})))
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(num_experts=run.experts or None, normalization="RMSNorm")
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, **stage,
    )  # fmt: skip


def _wrapped(run: Run) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.dist_utils import _ddp_wrap

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.grads_in_fp32, use_distributed_optimizer=True,
        overlap_grad_reduce=run.overlap, overlap_param_gather=run.overlap, bucket_size=20_000,
        fp8_param_gather=run.gather, reuse_grad_buf_for_mxfp8_param_ag=run.gather,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (chunk,) = _ddp_wrap([_model(run)], False, config, False, pg_collection=groups)
    return chunk


def _optimizer(run: Run, chunk: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.01, weight_decay=0.1, bf16=True,
        params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0,
        overlap_param_gather=run.overlap, fp8_recipe="mxfp8" if run.fp8 else None,
        reuse_grad_buf_for_mxfp8_param_ag=run.gather,
    )  # fmt: skip
    return get_megatron_optimizer(config, [chunk])


def _train(run: Run) -> Outcome:
    chunk = _wrapped(run)
    names = {param: name for name, param in chunk.named_parameters()}
    optimizer = _optimizer(run, chunk)
    outcome = Outcome([], {}, dict(_masters(optimizer, names)))
    for step in range(STEPS):
        calls = []
        quantize = CpuMXFP8Quantizer.update_quantized
        counted = mock.patch.object(
            CpuMXFP8Quantizer,
            "update_quantized",
            lambda *args, quantize=quantize, calls=calls: calls.append(1) or quantize(*args),
        )
        with counted:
            outcome.losses.append(_step(run, chunk, optimizer, step))
        outcome.quantizations.append(len(calls))
    if run.overlap:
        optimizer.prepare_model_params_for_param_sync()
        chunk.start_param_sync(force_sync=True)
    outcome.masters = dict(_masters(optimizer, names))
    _look_at_weights(chunk, outcome)
    return outcome


def _step(run: Run, chunk: Any, optimizer: Any, step: int) -> float:
    """Do what ``train_step`` does, with two micro-batches; the first goes without hooks."""
    from megatron.core import parallel_state

    if run.overlap and step == 0:
        chunk.disable_forward_pre_hook(param_sync=False)
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if run.gather and run.overlap and step > 0:
        for child in optimizer.chained_optimizers:
            child._copy_main_params_to_param_buffer()
    generator = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    total = 0.0
    for last in (False, True):
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
        with contextlib.nullcontext() if last else chunk.no_sync():
            loss = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
            (loss / 2).backward()
        total += float(loss)
    chunk.finish_grad_sync()
    assert optimizer.step()[0]
    if run.overlap and step == 0:
        chunk.enable_forward_pre_hook()
    return total


def _masters(optimizer: Any, names: Any) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    for child in getattr(optimizer, "chained_optimizers", [optimizer]):
        for model, main in (
            (child.model_float16_groups, child.shard_fp32_from_float16_groups),
            (child.model_fp32_groups, child.shard_fp32_groups),
        ):
            for params, shards in zip(model, main, strict=True):
                for param, shard in zip(params, shards, strict=True):
                    start = child._get_model_param_range_map(param)["param"].start
                    yield names[param], (start, shard.detach().clone())


def _look_at_weights(chunk: Any, outcome: Outcome) -> None:
    for name, param in chunk.named_parameters():
        if isinstance(param, CpuMXFP8Tensor):
            outcome.planes[name] = param.planes.each()
        else:
            outcome.values[name] = param.detach().clone()


# --------------------------------------------------------------------------------------------
# What is broken on purpose
# --------------------------------------------------------------------------------------------


def _columns_left() -> Any:
    """Weights that are written to keep the column-wise values they had."""
    quantize_ = Planes.quantize_

    def quantize_rows(self: Planes, matrix: torch.Tensor) -> None:
        before = [plane.clone() for plane in self.each()[2:]]
        quantize_(self, matrix)
        if before[0].any():
            for plane, old in zip(self.each()[2:], before, strict=True):
                plane.copy_(old)

    return mock.patch.object(Planes, "quantize_", quantize_rows)


def _no_value_kept() -> Any:
    """Masters start from what the MXFP8 weights stand for."""
    return mock.patch.object(cpu_mxfp8, "keep_high_precision_init_val", return_value=None)


FAULTS: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "columns left": _columns_left,
    "no value kept": _no_value_kept,
}
"""What breaks a run."""
