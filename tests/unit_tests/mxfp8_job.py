"""One rank's part of the tests of MXFP8 weights under Muon: real DDP, the factory's optimizer.

The model is that of :mod:`tests.unit_tests.cpu_mxfp8_job`; steps and evaluations are what
``megatron.training.training`` makes of them, with Megatron's own schedule.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.integration.cpu_mxfp8 import MARK
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Quantizer, CpuMXFP8Tensor
from megatron_muon.optimizer.masters import MasterOptimizer, masters_of
from megatron_muon.testing.law.build import masters, parallel_state, parameters
from megatron_muon.testing.law.mutants import MUTANTS, MXFP8_MUTANTS
from tests.unit_tests.cpu_mxfp8_job import BATCH, SEQUENCE, VOCAB, Run, gpt

Event = Literal["step", "evaluation", "skip", "load", "forced in flight", "load in flight"]
"""What happens: a step, an evaluation after three forced syncs, a step whose gradients are NaN on
one rank, and a load of the optimizer's state into weights that are all wrong; a forced sync and a
load while every gather is under way."""

STEPS: tuple[Event, ...] = 6 * ("step",)


@dataclass(frozen=True, kw_only=True)
class MuonRun(Run):
    """One way to train the model.

    Attributes:
        layout: ``None`` is a run without one.
        dp: Data-parallel size.
        pp: Pipeline-parallel size; above 1 each rank has two chunks.
        ep: Expert-parallel size.
        micro_batches: Micro-batches of a step on each rank.
        mxfp8_head: Whether the output layer, which the scalar optimizer owns, is MXFP8.
        bf16_first: Whether the first layer is bf16.
        matrix_first: Whether a matrix comes first, in one bucket with all that is in its buffer.
        poisons: Whether what a gather borrows is filled with NaN before.
        events: What happens in turn.
        fault: What is broken on purpose.
    """

    layout: Literal["owner", "flat"] | None = "owner"
    dp: int = 2
    pp: int = 1
    ep: int = 1
    micro_batches: int = 2
    mxfp8_head: bool = False
    bf16_first: bool = False
    matrix_first: bool = False
    poisons: bool = False
    events: tuple[Event, ...] = STEPS

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes."""
        return self.dp * self.tp * self.pp

    @property
    def grid(self) -> tuple[int, int, int | None, int]:
        """Arguments of ``parallel_state``."""
        return self.tp, self.pp, 2 if self.pp > 1 else None, self.ep


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        tp_rank: Its tensor-parallel rank.
        losses: Of each step and evaluation.
        first: Pieces of the masters that this rank holds, by name, before the first step.
        masters: The same after the last.
        planes: Codes and scales of every MXFP8 weight, by name.
        values: Every other weight.
        quantized: Of each event, how often a weight was quantized, and how many so often.
        kept: Weights whose initial value was kept after the optimizer was made.
        made: Weights whose initial value was kept before.
        dirty: Borrowed buffers that were not zero once what came in them had been taken.
        borrows: Buffers that were looked at.
        loaded: Masters, planes and values after each load.
        norms: Gradient norms.
    """

    tp_rank: int
    losses: list[float] = field(default_factory=list)
    first: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    masters: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    planes: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    quantized: list[dict[int, int]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    dirty: int = 0
    borrows: int = 0
    loaded: list[tuple[Any, Any, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def run_all(runs: Sequence[MuonRun]) -> list[Seen]:
    """Train one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    seen: dict[MuonRun, Seen] = {}
    for grid in dict.fromkeys(run.grid for run in runs):
        with parallel_state(*grid):
            for run in dict.fromkeys(run for run in runs if run.grid == grid):
                fault = None if run.fault == "none" else run.fault
                with {**MUTANTS, **MXFP8_MUTANTS}[fault](), _summing_in_rank_order(run):
                    seen[run] = _Training(run).train()
    return [seen[run] for run in runs]


@contextlib.contextmanager
def _summing_in_rank_order(run: MuonRun) -> Iterator[None]:
    """Let a sum of gradients not depend on where in a buffer they lie.

    With more than two ranks it does with gloo, and without a layout MXFP8 weights have a buffer of
    their own.
    """
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if group is not None and group.size() > 2 and tensor.is_floating_point():
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor, group=group)
            # A sum with zeros is exact in every order.
            tensor.zero_()
            if group.rank() == 0:
                for part in parts:
                    tensor.add_(part)
        return reduce(tensor, *args, **kwargs)

    if run.layout is None and run.dp > 2:
        with mock.patch.object(dist, "all_reduce", all_reduce):
            yield
    else:
        yield


class _Training:
    """A model and its optimizer."""

    def __init__(self, run: MuonRun) -> None:
        from megatron.core import parallel_state as state

        self.run = run
        self.chunks = _wrapped(run)
        self.params = dict(parameters(self.chunks))
        self.mxfp8 = {n: p for n, p in self.params.items() if isinstance(p, CpuMXFP8Tensor)}
        self.seen = Seen(state.get_tensor_model_parallel_rank(), made=self._keeping())
        with contextlib.redirect_stdout(io.StringIO()):
            self.optimizer = _optimizer(run, self.chunks)
        self.seen.kept = self._keeping()
        self.seen.first, _ = masters(self.optimizer, self.chunks)
        self.number = 0
        self.hooked = run.overlap

    def _keeping(self) -> list[str]:
        return [
            name for name, param in self.mxfp8.items()
            if getattr(param, "get_high_precision_init_val", lambda: None)() is not None
        ]  # fmt: skip

    def train(self) -> Seen:
        """Let everything happen."""
        happens = {
            "step": self._step, "evaluation": self._evaluate, "load": self._load,
            "skip": lambda: self._step(skips=True),
            "forced in flight": self._force_in_flight,
            "load in flight": lambda: (self._dispatch(), self._load()),
        }  # fmt: skip
        self._unhook(param_sync=False)  # the first step goes without, as in Megatron's loop
        with _poisoned(self.seen) if self.run.poisons else contextlib.nullcontext():
            for event in self.run.events:
                with self._counted():
                    happens[event]()
            if self.run.overlap:
                with self._counted():
                    self._sync()
        self.seen.masters, _ = masters(self.optimizer, self.chunks)
        self.seen.planes, self.seen.values = self._weights()
        return self.seen

    def _weights(self) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, torch.Tensor]]:
        """Return copies of the bytes of MXFP8 weights and of the values of others."""
        planes = {name: tuple(plane.clone() for plane in param.planes.each())
                  for name, param in self.mxfp8.items()}  # fmt: skip
        values = {name: param.detach().clone()
                  for name, param in self.params.items() if name not in self.mxfp8}  # fmt: skip
        return planes, values

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count how often each weight is quantized."""
        calls: Counter[int] = Counter()
        quantize = CpuMXFP8Quantizer.update_quantized

        def update_quantized(self: Any, src: Any, dst: Any) -> Any:
            calls[id(dst.planes)] += 1
            return quantize(self, src, dst)

        with mock.patch.object(CpuMXFP8Quantizer, "update_quantized", update_quantized):
            yield
        times = Counter(calls[id(param.planes)] for param in self.mxfp8.values())
        self.seen.quantized.append(dict(times))

    # What happens.

    def _step(self, skips: bool = False) -> None:
        """Do what ``train_step`` does."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if self.number:
            self._hook()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.run.gather and self.hooked:
            for child in self.optimizer.chained_optimizers:
                if isinstance(child, DistributedOptimizer):
                    child._copy_main_params_to_param_buffer()
        self._forward(forward_only=False)
        if skips:
            self._spoil()
        success, norm, _ = self.optimizer.step()
        assert success != skips
        if success:
            self.seen.norms.append(norm)
            self.number += 1

    def _spoil(self) -> None:
        """Make the gradients of one rank NaN."""
        if dist.get_rank() == dist.get_world_size() - 1:
            for chunk in self.chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    buffer.grad_data.fill_(float("nan"))

    def _evaluate(self) -> None:
        """Gather three times in a row and run a forward pass."""
        for _ in range(3):
            self._sync()
        self._forward(forward_only=True)

    def _sync(self) -> None:
        """Bring the weights up to date, as before an evaluation or a checkpoint."""
        self.optimizer.prepare_model_params_for_param_sync()
        if self.hooked:
            self._unhook(param_sync=True)
        elif self.run.overlap or self.run.layout is not None:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        else:
            self.optimizer.chained_optimizers[0].allgather_params()

    def _dispatch(self) -> None:
        """Start the gathers of the next forward pass."""
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.start_param_sync()

    def _force_in_flight(self) -> None:
        """Ask for all weights at once while they are on their way."""
        self._dispatch()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)
        self.seen.loaded.append((masters(self.optimizer, self.chunks)[0], *self._weights()))

    def _load(self) -> None:
        """Load the state where all weights are wrong, and the masters that the state has."""
        saved = copy.deepcopy(self.optimizer.state_dict())
        with torch.no_grad():
            for param in self.params.values():
                param.copy_(torch.full(param.shape, 3.0, dtype=param.dtype))
            for leaf in self.optimizer.leaves:
                # Megatron keeps those of its DistributedOptimizer in a file of their own.
                if isinstance(leaf, MasterOptimizer):
                    for master in masters_of(leaf).values():
                        master.fill_(5.0)
        self.optimizer.load_state_dict(saved)
        self.seen.loaded.append((masters(self.optimizer, self.chunks)[0], *self._weights()))

    def _unhook(self, param_sync: bool) -> None:
        if self.hooked:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=param_sync)
        self.hooked = False

    def _hook(self) -> None:
        if self.run.overlap and not self.hooked:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
            self.hooked = True

    def _forward(self, forward_only: bool) -> None:
        """Run this rank's micro-batches through Megatron's schedule."""
        from megatron.core import parallel_state as state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        config = get_model_config(self.chunks[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.run.overlap:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        seed = 100 * self.number + state.get_data_parallel_rank()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_batches(seed) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.run.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        self.seen.losses += [float(loss["loss"]) for loss in losses]


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def _batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def _stages(run: MuonRun) -> list[Any]:
    """Build this rank's stages of the model."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.module import Float16Module

    changes: dict[str, Any] = dict(expert_model_parallel_size=run.ep)
    if run.bf16_first:
        changes |= dict(
            first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0
        )
    stages: list[dict[str, Any]] = [{}]
    if run.pp > 1:
        changes |= dict(
            num_layers=2 * run.pp, pipeline_model_parallel_size=run.pp,
            virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16,
        )  # fmt: skip
        rank = state.get_pipeline_model_parallel_rank()
        stages = [
            dict(vp_stage=i, pre_process=rank == i == 0,
                 post_process=rank + 1 == run.pp and i == 1)
            for i in range(2)
        ]  # fmt: skip
    models = [gpt(run, changes, **stage) for stage in stages]
    if run.mxfp8_head and run.fp8:
        setattr(models[-1].output_layer.weight, MARK, True)
    if run.matrix_first:
        for model in models:
            _put_matrix_first(model)
    return [Float16Module(model.config, model) for model in models]


def _put_matrix_first(model: Any) -> None:
    """Let the decoder come before the embedding, and attention before its norm.

    So is the order of a stage without an embedding, in layers of Transformer Engine's.
    """
    for module, name in (
        (model, "embedding"),
        *((layer, "input_layernorm") for layer in model.decoder.layers),
    ):
        module._modules[name] = module._modules.pop(name)
    assert "linear_proj.weight" in next(iter(model.named_parameters()))[0]


def _wrapped(run: MuonRun) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars
    from megatron.training.models.dist_utils import _ddp_wrap

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.grads_in_fp32, overlap_grad_reduce=run.overlap,
        overlap_param_gather=run.overlap, bucket_size=20_000, fp8_param_gather=run.gather,
        reuse_grad_buf_for_mxfp8_param_ag=run.gather,
    )  # fmt: skip
    args = SimpleNamespace(
        optimizer="muon", use_layer_wise_distributed_optimizer=True, muon_layout=run.layout,
        use_layer_wise_param_layout=run.layout is not None,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        # The fourth argument has no other effect than one bucket for each buffer.
        chunks: list[Any] = _ddp_wrap(
            _stages(run), False, config, run.matrix_first, pg_collection=groups
        )
    return chunks


def _optimizer(run: MuonRun, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    from megatron_muon.optimizer.config import MuonConfig

    config = MuonConfig(
        optimizer="muon", lr=0.01, min_lr=0.01, weight_decay=0.1, bf16=True,
        params_dtype=torch.bfloat16, use_layer_wise_distributed_optimizer=True, clip_grad=1.0,
        overlap_param_gather=run.overlap, fp8_recipe="mxfp8" if run.fp8 else None,
        reuse_grad_buf_for_mxfp8_param_ag=run.gather, muon_layout=run.layout,
        muon_fp32_matmul_prec="highest",
    )  # fmt: skip
    return get_megatron_optimizer(config, chunks)


@contextlib.contextmanager
def _poisoned(seen: Seen) -> Iterator[None]:
    """Fill what each gather borrows with NaN before it is staged, and look at it afterwards."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start, post = Group.start_param_sync, Group._post_param_sync

    def start_param_sync(group: Any, force_sync: bool = False) -> None:
        if group.param_gather_handle is None:
            for borrowed in _borrowed(group):
                borrowed.fill_(float("nan"))
        start(group, force_sync)

    def post_param_sync(group: Any) -> None:
        post(group)
        for borrowed in _borrowed(group):
            seen.borrows += 1
            seen.dirty += bool(borrowed.any())

    with (
        mock.patch.object(Group, "start_param_sync", start_param_sync),
        mock.patch.object(Group, "_post_param_sync", post_param_sync),
    ):
        yield


def _borrowed(group: Any) -> Iterator[torch.Tensor]:
    """Yield what a gather borrows: the place of bf16 values that are quantized, or gradients."""
    for bucket in group.buckets:
        if bucket.param_data is None:
            # A rank alone has nothing to gather.
            if group.intra_distributed_optimizer_instance_size > 1:
                yield bucket.grad_data
        elif all(isinstance(param, CpuMXFP8Tensor) for param in bucket.params):
            yield bucket.param_data
