"""One rank's part of the tests of resharding: a GPT trains, is saved, and is loaded at other sizes.

The model, DDP, the schedule, the state dict and the files are Megatron's own. What a rank holds is
read from the live optimizers, by parameter and place, and not asked of the package.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Tensor
from megatron_muon.testing.law.build import leaves, masters, parallel_state, parameters, states

SEQUENCE, BATCH, MICRO_BATCHES = 8, 96, 2
NUM_TOKENS = 70
"""Words of the vocabulary; what is above is padding."""

STEPS, STEPS_AFTER = 3, 5
"""Steps before a save, and after it or a load."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

LOSS_SCALE = 2.0**13

GARBAGE = {"scale": 3.0, "growth_tracker": 77, "hysteresis_tracker": 77}
"""State of a loss scaler that no run has of itself."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, which is the same wherever it is loaded.

    Sizes are such that the border of a flat shard is no border of rows.
    """

    hidden: int = 36
    ffn: int = 44
    head: int = 10
    groups: int = 2
    layers: int = 2
    tied: bool = False
    gated: bool = True
    bias: bool = False
    experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train it.

    Attributes:
        model: The model.
        vocab: Rows of the embedding, the padding with them.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Virtual stages of a rank.
        ep: Expert-parallel size.
        dp: Data-parallel size.
        layout: ``--muon-layout``, ``none`` for a run without a parameter layout, ``replicated`` for
            one without a distributed optimizer.
        precision: Of the weights.
        momentum_dtype: ``--muon-momentum-dtype``.
        bucket_size: Elements of a bucket, with ``overlap``.
        overlap: Whether gradients and parameters move beside the computation.
        sequence_parallel: ``--sequence-parallel``.
        mxfp8: Whether the linear layers compute in MXFP8.
        mxfp8_gather: Whether their weights are MXFP8 too, with ``--fp8-param-gather``.
        parallel_load: ``--ckpt-fully-parallel-load``.
        exclude: ``--muon-exclude``.
        frozen: Layers that are not trained.
    """

    model: Model = Model()
    vocab: int = 72
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    dp: int = 1
    layout: Literal["owner", "flat", "none", "replicated"] = "owner"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    bucket_size: int | None = None
    overlap: bool = False
    sequence_parallel: bool = False
    mxfp8: bool = False
    mxfp8_gather: bool = False
    parallel_load: bool = False
    exclude: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes."""
        return self.tp * self.pp * self.dp

    @property
    def grid(self) -> tuple[int, int, int | None, int]:
        """Arguments of ``parallel_state``."""
        return self.tp, self.pp, self.vpp, self.ep

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.precision
        ]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train and save, or load and train.

    Attributes:
        way: How.
        save: Folder to save to after :data:`STEPS`.
        load: Folder to load from; everything is garbage before.
        steps: Steps before the save.
        late: Whether the weights are made garbage once more when the file was read: they have to be
            made of the masters.
        steps_after: Steps after the save or the load.
        fault: What is broken on purpose, a key of :data:`FAULTS`.
    """

    way: Way
    save: str | None = None
    load: str | None = None
    steps: int = STEPS
    late: bool = False
    steps_after: int = STEPS_AFTER
    fault: str = "none"


@dataclass
class Kept:
    """What a rank holds where it saved, or when it has loaded.

    Attributes:
        tp_rank: Tensor-parallel rank.
        shapes: Shape of each of its parameters.
        masters: Flat pieces of its masters with where each starts, by name.
        states: State of the same pieces.
        weights: Its weights.
        planes: Bytes of those that are MXFP8.
        scaler: State of the loss scaler.
        losses: Loss of the whole batch in each of the steps after.
    """

    tp_rank: int
    shapes: dict[str, tuple[int, ...]]
    masters: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    states: dict[str, list[tuple[int, dict[str, torch.Tensor]]]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    planes: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)


def run_all(runs: Sequence[Run]) -> list[Kept]:
    """Do one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    kept: dict[Run, Kept] = {}
    for grid in dict.fromkeys(run.way.grid for run in runs):
        with parallel_state(*grid):
            for run in (run for run in runs if run.way.grid == grid):
                with FAULTS[run.fault]():
                    kept[run] = _run(run)
    return [kept[run] for run in runs]


def _run(run: Run) -> Kept:
    training = Training(run.way)
    if run.load is None:
        for _ in range(run.steps):
            training.step()
        training.sync()
        if run.save is not None:
            training.save(Path(run.save))
    else:
        training.poison()
        training.load(Path(run.load), run.late)
    kept = training.kept()
    kept.losses = [training.step() for _ in range(run.steps_after)]
    return kept


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a rank would save.

    Attributes:
        keys: Shape, dtype and replica of every sharded tensor of the optimizer, by key and offset.
        common: All else.
        state: The state it holds, by name.
    """

    keys: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]]
    common: dict[Any, Any]
    state: dict[str, list[tuple[int, dict[str, torch.Tensor]]]]


def look_at_state(ways: Sequence[Way], fault: str = "none") -> list[list[Looked]]:
    """Look at the state at the start, after a step of zeros, and after one of real gradients."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    found: dict[Way, list[Looked]] = {}
    for grid in dict.fromkeys(way.grid for way in ways):
        with parallel_state(*grid), FAULTS[fault]():
            for way in (way for way in ways if way.grid == grid):
                training = Training(way)
                found[way] = [training.looked()]
                for chunk in training.chunks:
                    chunk.zero_grad_buffer()
                assert training.optimizer.step()[0]
                found[way].append(training.looked())
                training.step()
                found[way].append(training.looked())
    return [found[way] for way in ways]


def save_differing_steps(way: Way) -> str:
    """Return how a save fails where one rank has counted one parameter's steps once more."""
    from megatron_muon.errors import CheckpointError
    from megatron_muon.integration.install import install

    install(device="cpu")
    with parallel_state(*way.grid):
        training = Training(way)
        if dist.get_rank() == 1:
            every = [
                s for leaf in leaves(training.optimizer) for s in leaf.optimizer.state.values()
            ]
            next(state["step"] for state in every if "step" in state).add_(1)
        try:
            training.looked()
        except CheckpointError as error:
            return str(error)
    return ""


class Training:
    """A model, its optimizer and its scheduler on this rank."""

    def __init__(self, way: Way) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.way, self.number, self.hooked, self.is_first = way, 0, way.overlap, True
        self.chunks = _wrapped(way)
        with contextlib.redirect_stdout(io.StringIO()):
            self.optimizer = _optimizer(way, self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 0.002, 0.001, 2, 100, "linear", 0.1, 0.1, 100, "constant"
        )
        self.params = dict(parameters(self.chunks))

    # What training does.

    def step(self) -> float:
        """Do what ``train_step`` does; return the loss of the whole batch before it."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if self.is_first and self.hooked:  # the first step goes without, as in Megatron's loop
            self._hook(False)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.way.mxfp8_gather and self.hooked:
            for child in self.optimizer.chained_optimizers:
                if isinstance(child, DistributedOptimizer):
                    child._copy_main_params_to_param_buffer()
        loss = self._forward_and_backward()
        success, _, _ = self.optimizer.step()
        assert success
        self.scheduler.step(increment=1)
        self.number += 1
        if self.is_first and self.way.overlap:
            self._hook(True)
        self.is_first = False
        return loss

    def _hook(self, on: bool) -> None:
        for chunk in self.chunks:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.hooked = on

    def sync(self) -> None:
        """Bring all weights up to date, as before a checkpoint."""
        if self.way.overlap:
            self.optimizer.prepare_model_params_for_param_sync()
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _forward_and_backward(self) -> float:
        from megatron.core import parallel_state as state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        config = get_model_config(self.chunks[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.way.overlap:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        rank, size = state.get_data_parallel_rank(), self.way.dp
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_micro_batches(rank, size) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH // size // MICRO_BATCHES,
            forward_only=False,
        )
        # Only the last stage has them.
        total = torch.tensor(sum(float(loss["loss"]) for loss in losses), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / (MICRO_BATCHES * size * self.way.tp)

    # What a checkpoint does.

    def _args(self) -> Namespace:
        return Namespace(
            ckpt_format="torch_dist", no_save_optim=False, no_save_rng=True,
            use_distributed_optimizer=False,
            use_layer_wise_distributed_optimizer=self.way.layout != "replicated",
            dist_ckpt_optim_fully_reshardable=False,
        )  # fmt: skip

    def _state(self, metadata: dict[str, Any], **how: Any) -> dict[str, Any]:
        from megatron.core.utils import unwrap_model
        from megatron.training.checkpointing import generate_state_dict

        state: dict[str, Any] = generate_state_dict(
            self._args(), unwrap_model(self.chunks), self.optimizer, self.scheduler, None,
            iteration=self.number, optim_sd_kwargs={"metadata": metadata, **how},
            model_sd_kwargs={"metadata": metadata},
        )  # fmt: skip
        return state

    def save(self, folder: Path) -> None:
        """Do what ``save_checkpoint`` does with the flags' defaults; collective."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
        from megatron.training.checkpointing import (
            _build_sharded_state_dict_metadata,
            _clean_metadata_for_serialization,
        )

        metadata = _build_sharded_state_dict_metadata(self._args())
        group = metadata["dp_cp_group"]
        dist_checkpointing.save(
            self._state(metadata), str(folder),
            FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group),
            content_metadata=_clean_metadata_for_serialization(metadata),
        )  # fmt: skip

    def load(self, folder: Path, late: bool = False) -> None:
        """Do what ``load_checkpoint`` does; collective."""
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as state
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelLoadStrategyWrapper,
        )
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
        from megatron.core.utils import unwrap_model

        common = dist_checkpointing.load_common_state_dict(str(folder))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        group = state.get_data_parallel_group(with_context_parallel=True)
        metadata["dp_cp_group"] = group
        strategy = TorchDistLoadShardedStrategy()
        if self.way.parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, group, "broadcast")
        wanted = self._state(metadata, is_loading=True)
        found = dist_checkpointing.load(wanted, str(folder), strategy)
        for i, chunk in enumerate(unwrap_model(self.chunks)):
            chunk.load_state_dict(found["model" if len(self.chunks) == 1 else f"model{i}"])
        if late:
            self._poison_weights()
        self.optimizer.load_state_dict(found["optimizer"])
        self.scheduler.load_state_dict(found["opt_param_scheduler"])
        self.number = found["iteration"]

    # What is looked at.

    def kept(self) -> Kept:
        """Return copies of what this rank holds."""
        from megatron.core import parallel_state as state

        quantized = {n: p for n, p in self.params.items() if isinstance(p, CpuMXFP8Tensor)}
        scaler = self.optimizer.grad_scaler
        return Kept(
            state.get_tensor_model_parallel_rank(),
            shapes={name: tuple(param.shape) for name, param in self._named(self.params).items()},
            masters=self._named(masters(self.optimizer, self.chunks)[0]),
            states=self._named(states(self.optimizer, self.chunks)),
            weights=self._named({name: param.detach().clone() for name, param in self.params.items()
                                 if name not in quantized}),
            planes={n: tuple(plane.clone() for plane in p.planes.each())
                    for n, p in quantized.items()},
            scaler=None if scaler is None else {k: float(v) if isinstance(v, torch.Tensor) else v
                                                for k, v in scaler.state_dict().items()},
        )  # fmt: skip

    def _named[T](self, found: dict[str, T]) -> dict[str, T]:
        """Give the copy of a tied embedding on a last stage the embedding's name."""
        if self.way.model.tied and self.way.pp > 1:
            return {{OUTPUT: EMBEDDING}.get(name, name): value for name, value in found.items()}
        return found

    def looked(self) -> Looked:
        """Return what would be saved; collective."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.training.checkpointing import _build_sharded_state_dict_metadata

        state = self._state(_build_sharded_state_dict_metadata(self._args()))["optimizer"]
        shards = [s for s in nested_values(state) if isinstance(s, ShardedTensor)]
        return Looked(
            keys={
                (s.key, tuple(s.global_offset)):
                (tuple(s.global_shape), tuple(s.local_shape), s.dtype, s.replica_id)
                for s in shards
            },
            common={key: value for key, value in state.items() if key != "state"},
            state=self._named(states(self.optimizer, self.chunks)),
        )  # fmt: skip

    @torch.no_grad()
    def poison(self) -> None:
        """Make garbage of all that a checkpoint restores."""
        self._poison_weights()
        for leaf in leaves(self.optimizer):
            if leaf.is_stub_optimizer:
                continue
            for master, state in leaf.optimizer.state.items():
                master.fill_(float("nan"))
                for key, value in state.items():
                    value.fill_(999.0 if key == "step" else float("nan"))
        if self.optimizer.grad_scaler is not None:
            self.optimizer.grad_scaler.load_state_dict(
                {**GARBAGE, "scale": torch.tensor([GARBAGE["scale"]])}
            )

    @torch.no_grad()
    def _poison_weights(self) -> None:
        for param in self.params.values():
            # MXFP8 has no NaN for a whole block.
            value = 3.0 if isinstance(param, CpuMXFP8Tensor) else float("nan")
            param.copy_(torch.full(param.shape, value, dtype=param.dtype))


def _micro_batches(rank: int, size: int) -> Iterator[torch.Tensor]:
    """Yield a rank's part of the global batch, the same in each step so that it is learned."""
    generator = torch.Generator().manual_seed(5)
    batch = torch.randint(NUM_TOKENS, (BATCH, SEQUENCE + 1), generator=generator)
    yield from batch.chunk(size)[rank].chunk(MICRO_BATCHES)


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def _stages(way: Way) -> list[Any]:
    """Build this rank's stages of the model."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    model = way.model
    config = TransformerConfig(
        num_layers=model.layers, hidden_size=model.hidden, ffn_hidden_size=model.ffn,
        num_attention_heads=4, num_query_groups=model.groups, kv_channels=model.head,
        gated_linear_unit=model.gated, normalization="RMSNorm", add_bias_linear=model.bias,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        tensor_model_parallel_size=way.tp, pipeline_model_parallel_size=way.pp,
        virtual_pipeline_model_parallel_size=way.vpp, pipeline_dtype=way.dtype,
        sequence_parallel=way.sequence_parallel, expert_model_parallel_size=way.ep,
        num_moe_experts=model.experts or None,
        moe_ffn_hidden_size=model.ffn if model.experts else None, moe_router_topk=2,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
        bf16=way.precision == "bf16", fp16=way.precision == "fp16", params_dtype=way.dtype,
        fp8="e4m3" if way.mxfp8 else None, fp8_recipe="mxfp8", fp8_param=way.mxfp8_gather,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(num_experts=model.experts or None, normalization="RMSNorm")
    rank, per_rank = state.get_pipeline_model_parallel_rank(), way.vpp or 1
    with _norms_in_parts():
        stages = [
            GPTModel(
                config, spec, vocab_size=way.vocab, max_sequence_length=SEQUENCE,
                position_embedding_type="rope", share_embeddings_and_output_weights=model.tied,
                pre_process=rank == i == 0,
                post_process=rank + 1 == way.pp and i + 1 == per_rank,
                vp_stage=i if way.vpp else None,
            )
            for i in range(per_rank)
        ]  # fmt: skip
    for layer in (layer for stage in stages for layer in stage.decoder.layers):
        layer.requires_grad_(layer.layer_number - 1 not in way.frozen)
    if way.precision == "fp32":
        return stages
    return [Float16Module(config, stage) for stage in stages]


@contextlib.contextmanager
def _norms_in_parts() -> Iterator[None]:
    """Let torch's norm work on a part of the sequence, as Transformer Engine's and Apex's do.

    All there is to it is the mark by which Megatron adds up its gradients over the parts.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        norm = make(cls, replace(config, sequence_parallel=False), *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    with mock.patch.object(WrappedTorchNorm, "__new__", marked):
        yield


def _wrapped(way: Way) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.utils import get_model_config
    from megatron.training import global_vars, training

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=way.overlap,
        overlap_param_gather=way.overlap, bucket_size=way.bucket_size,
        fp8_param_gather=way.mxfp8_gather,
        reuse_grad_buf_for_mxfp8_param_ag=way.mxfp8_gather,
    )  # fmt: skip
    is_laid_out = way.layout in ("owner", "flat")
    args = SimpleNamespace(
        optimizer="muon", use_layer_wise_distributed_optimizer=way.layout != "replicated",
        muon_layout=way.layout if is_laid_out else None,
        muon_split_qkv=True, muon_split_gated_fc1=False, muon_split_heads=False,
        muon_exclude=list(way.exclude), muon_include=[],
    )  # fmt: skip
    chunks = _stages(way)
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        wrapped: list[Any] = training.wrap_model_chunks_with_ddp(
            chunks,
            get_model_config(chunks[0]),
            config,
            use_layer_wise_distributed_optimizer=way.layout != "replicated",
            use_layer_wise_param_layout=is_laid_out,
            bucket_sizes=[way.bucket_size if way.overlap and not i else None
                          for i in range(len(chunks))],
            disable_bucketing_per_chunk=[i > 0 for i in range(len(chunks))],
        )  # fmt: skip
    return wrapped


def _optimizer(way: Way, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    from megatron_muon.optimizer.config import MuonConfig

    config = MuonConfig(
        optimizer="muon", lr=0.002, min_lr=0.001, weight_decay=0.1, bf16=way.precision == "bf16",
        fp16=way.precision == "fp16", params_dtype=way.dtype, clip_grad=1.0,
        # It grows within the steps before a save.
        initial_loss_scale=LOSS_SCALE, loss_scale_window=2,
        use_layer_wise_distributed_optimizer=way.layout != "replicated",
        overlap_param_gather=way.overlap, fp8_recipe="mxfp8" if way.mxfp8 else None,
        reuse_grad_buf_for_mxfp8_param_ag=way.mxfp8_gather,
        muon_layout=way.layout if way.layout in ("owner", "flat") else None,
        muon_momentum_dtype=way.momentum_dtype, muon_fp32_matmul_prec="highest",
        muon_exclude=list(way.exclude),
    )  # fmt: skip
    return get_megatron_optimizer(config, chunks)


# --------------------------------------------------------------------------------------------
# What is broken on purpose
# --------------------------------------------------------------------------------------------


def _weights_not_renewed() -> Any:
    """Weights are what the model's own part of the checkpoint makes them."""
    from megatron_muon.optimizer.chain import MuonChain

    return mock.patch.object(MuonChain, "_renew_weights", return_value=None)


def _no_state_at_the_start() -> Any:
    """The scalar optimizer makes state when it steps a parameter."""
    from megatron_muon.optimizer import chain

    return mock.patch.object(chain, "init_state")


def _masters_not_loaded() -> Any:
    """Masters stay what they were."""
    from megatron_muon.optimizer.state import request

    want = request.StateRequest.__init__

    def without_masters(self: Any, wanted: Any, *rest: Any) -> None:
        want(self, [w for w in wanted if w.state not in ("fp32_param", "param")], *rest)

    return mock.patch.object(request.StateRequest, "__init__", without_masters)


@contextlib.contextmanager
def _momentum_forgotten() -> Iterator[None]:
    """Momentum starts anew."""
    from megatron_muon.optimizer.chain import MuonChain

    load = MuonChain.load_state_dict

    def forgetful(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for leaf in leaves(self):
            for state in leaf.optimizer.state.values():
                if "momentum_buffer" in state:
                    state["momentum_buffer"].zero_()

    with mock.patch.object(MuonChain, "load_state_dict", forgetful):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no state at the start": _no_state_at_the_start,
    "weights not renewed": _weights_not_renewed,
    "masters not loaded": _masters_not_loaded,
    "momentum forgotten": _momentum_forgotten,
}
"""What breaks a run."""
