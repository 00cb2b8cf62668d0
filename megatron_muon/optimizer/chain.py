"""The outermost optimizer: one loss scale, one decision a step, one norm over all children."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    GRAD_NORM_GROUP_ATTR,
    ChainedOptimizer,
)
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.timers import Timer
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import nvtx_range_pop, nvtx_range_push

from megatron_muon.collectives.span import Span
from megatron_muon.errors import NonFiniteGradientError
from megatron_muon.optimizer.account import PHASES, TIMER_LEVEL, label_of
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.early_gathers import EarlyGathers
from megatron_muon.optimizer.grad_scaler import can_fall
from megatron_muon.optimizer.grad_statistics import (
    GradStatistics,
    Member,
    clip,
    first_non_finite,
    measure,
    squares,
)
from megatron_muon.optimizer.masters import (
    WholeFP32Optimizer,
    forget_initial_values,
    leaves,
    masters_of,
)
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.param_sync import install_staging
from megatron_muon.optimizer.state.chain_state import ChainState
from megatron_muon.optimizer.state.held import init_state

logger = logging.getLogger(__name__)


class MuonChain(ChainedOptimizer):
    """Muon over the matrices and scalar optimizers over all else, stepped as one.

    A step, in every precision:

    1. Every child copies its gradients to fp32 main gradients; all are divided by the loss scale.
    2. One reduction over all ranks that step a part of the model gives the norm, the zeros and
       whether all gradients are finite.
    3. The scaler is updated, once. If a gradient is not finite, no child steps, on any rank.
    4. Gradients are clipped, and every child steps.

    Attributes:
        grad_scaler: The only loss scaler; ``None`` without a loss scale.
        span: All ranks that step a part of the model.
        num_skipped: Steps skipped because a gradient was not finite.
        saved: What the children have to keep in a checkpoint.
    """

    def __init__(
        self,
        children: Sequence[Any],
        names: Mapping[torch.nn.Parameter, str],
        groups: Any,
        settings: MuonSettings,
        grad_scaler: MegatronGradScaler | None,
        device: torch.device,
        model_chunks: Sequence[Any],
        ranks: dist.ProcessGroup,
    ) -> None:
        """Take charge of the children.

        Args:
            children: Megatron's optimizers, the same on every rank.
            names: Name of each trained parameter of this rank, in the model's order.
            groups: Process groups of the model.
            settings: The resolved settings.
            grad_scaler: The scaler that the children share.
            device: Where the parameters are.
            model_chunks: The model's chunks.
            ranks: All ranks of the model.
        """
        super().__init__(list(children))
        self.settings, self._groups = settings, groups
        self.leaves = [leaf for leaf in leaves(self) if not leaf.is_stub_optimizer]
        self.grad_scaler = grad_scaler
        self._no_scale = torch.ones(1, dtype=torch.float32, device=device)
        self.span = Span(spanning_groups(groups), device)
        self._is_replicated = not any(
            isinstance(child, LayerWiseDistributedOptimizer | DistributedOptimizer)
            for child in self.chained_optimizers
        )
        self._trained = names.keys()
        order = {param: (place, name) for place, (param, name) in enumerate(names.items())}
        self.members = [
            Member(
                name=order[param][1],
                order=order[param][0],
                master=master,
                norm_group=getattr(param, GRAD_NORM_GROUP_ATTR, None),
                is_counted=self._is_counted(param),
                is_matrix=isinstance(leaf.optimizer, OwnedMuon),
            )
            for leaf in self.leaves
            for param, master in masters_of(leaf).items()
        ]
        for leaf in self.leaves:
            init_state(leaf)
        muons = [leaf.optimizer for leaf in self.leaves if isinstance(leaf.optimizer, OwnedMuon)]
        self._accounts = [muon.account for muon in muons]
        for account in self._accounts:
            account.ranges = nvtx_range_push, nvtx_range_pop
        self.saved = ChainState(
            self.leaves,
            {param: name for param, (_, name) in order.items()},
            grad_scaler,
            ranks,
            is_fp32=not (self.config.bf16 or self.config.fp16),
            is_replicated=self._is_replicated,
        )
        self._let_the_last_gather()
        forget_initial_values(model_chunks)
        self._wrapped_chunks = [chunk for chunk in model_chunks if hasattr(chunk, "bucket_groups")]
        self.stagings = install_staging(self.leaves, self._wrapped_chunks)
        self._early_gathers: EarlyGathers | None = None
        self.num_skipped = 0
        self._num_in_a_row = 0
        self._statistics: GradStatistics | None = None
        self._error: NonFiniteGradientError | None = None

    def _disable_deferred_mxfp8_param_sync(self) -> None:
        """Go back to what is the rule here; Megatron would have all scalar optimizers gather."""
        self._let_the_last_gather()

    def _let_the_last_gather(self) -> None:
        """Let one scalar optimizer gather when all have stepped: it takes the buckets of all."""
        scalars = [c for c in self.chained_optimizers if isinstance(c, DistributedOptimizer)]
        for child in scalars:
            child._defer_param_sync = child is not scalars[-1]

    def get_loss_scale(self) -> torch.Tensor:
        """Return the factor on the loss, fp32 of shape (1,)."""
        return self._no_scale if self.grad_scaler is None else self.grad_scaler.scale

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the first child's process group of gradient statistics; :attr:`span` is used."""
        return self.chained_optimizers[0].get_grad_stats_parallel_group()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Unscale all gradients in fp32, measure them, and update the loss scale; collective.

        Returns:
            Whether a gradient is not finite, on any rank.
        """
        self._error = None
        with self._timer("optimizer-copy-to-main-grad"):
            for leaf in self.leaves:
                leaf._copy_model_grads_to_main_grads()
        with self._timer("optimizer-unscale-and-check-inf"):
            grads = [member.grad for member in self.members if member.grad is not None]
            if self.grad_scaler is not None and grads:
                torch._foreach_mul_(grads, self.grad_scaler.inv_scale.view(()))
            statistics = self._measure(self.config.log_num_zeros_in_grad)
        self._statistics = statistics
        # A dynamic scale that can still fall is the first to blame, and mends itself.
        is_fault = not statistics.is_finite and not can_fall(self.grad_scaler)
        if self.grad_scaler is not None:
            self.grad_scaler.update(not statistics.is_finite)
        if statistics.is_finite:
            self._num_in_a_row = 0
        else:
            self.num_skipped += 1
        if is_fault:
            self._tell_skip()
        return not statistics.is_finite

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Step all children, or none on any rank; collective.

        Returns:
            Whether the step was made, and the norm and the zeros of the raw gradients, ``None``
            where a gradient is not finite.

        Raises:
            NonFiniteGradientError: Gradients were not finite in too many steps in a row, and no
                loss scale can mend it. Nothing was changed by any of these steps.
        """
        self.grad_norms_by_group: dict[str, float] = {}
        if self.prepare_grads():
            self._end_early_gathers()
            if self._error is not None:
                raise self._error
            return False, None, None
        assert self._statistics is not None
        norms, num_zeros = self._statistics.norms, self._statistics.num_zeros
        self.grad_norms_by_group = {group: norm for group, norm in norms.items() if group}
        with self._timer("optimizer-clip-main-grad"):
            if self.config.clip_grad > 0.0:
                clip(self._clipped(), self.config.clip_grad, norms)
        norm = norms[None]
        threshold = self.config.grad_norm_skip_threshold
        if math.isfinite(threshold) and norm > threshold:
            if self.span.is_first:
                logger.warning("step skipped: the gradient norm %g is above %g.", norm, threshold)
            self._end_early_gathers()
            return False, norm, num_zeros
        return self.step_with_ready_grads(), norm, num_zeros

    def gather_early(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Let each gather of weights begin in the step, when the last matrix of it is done.

        Args:
            names: Name of every matrix of this pipeline stage.
        """
        muons = [leaf for leaf in self.leaves if isinstance(leaf.optimizer, OwnedMuon)]
        self._early_gathers = EarlyGathers(muons, self._wrapped_chunks, names)
        for leaf in muons:
            leaf.optimizer.done = self._early_gathers.done

    def _end_early_gathers(self) -> None:
        """End gathers of the last step that no forward pass has waited for; collective.

        DDP forgets between steps that they were started, and would start them once more.
        """
        if self._early_gathers is not None:
            self._finish_gathers()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all children with the gradients as they are; collective.

        Megatron's timers, if it has any of this level, get the seconds of Muon's phases after the
        step: to start and stop one would wait for the device each time, and end all overlap.
        """
        timers = self._phase_timers()
        for account in self._accounts:
            account.is_read |= bool(timers)
        self._end_early_gathers()
        early = self._early_gathers
        with nullcontext() if early is None else early.step():
            success = super().step_with_ready_grads()
        for phase, timer in timers.items():
            seconds = sum(account.seconds.get(phase, 0.0) for account in self._accounts)
            timer.set_elapsed(timer.elapsed(reset=False) + seconds)
        return bool(success)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the norm of all main gradients as they are now; collective."""
        return self._measure(count_zeros=False).norms[None]

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip what is clipped in a step, and return the norm of all main gradients; collective."""
        norms = self._measure(count_zeros=False).norms
        clip(self._clipped(), clip_grad, norms)
        return norms[None]

    @torch.no_grad()
    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        norms = self._measure(count_zeros=False).norms
        self.grad_norms_by_group = {group: norm for group, norm in norms.items() if group}
        return self.grad_norms_by_group

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Whether any rank steps parameters of a group with a norm of its own; collective."""
        return grad_norm_group in self._compute_grad_norms_by_group()

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return the zeros among all main gradients as they are now; collective."""
        num_zeros = self._measure(count_zeros=True).num_zeros
        assert num_zeros is not None
        return num_zeros

    @torch.no_grad()
    def params_norm(self, model_chunks: Sequence[Any]) -> float:
        """Return the 2-norm of all parameters, from fp32 masters where they are trained.

        Each parameter counts once, as in one process; collective.

        Args:
            model_chunks: The model chunks of this rank, which also have what is not trained.
        """
        sums = squares([member.master for member in self.members if member.is_counted])
        for chunk in model_chunks:
            for param in chunk.parameters():
                if (
                    param not in self._trained
                    and self._is_counted(param)
                    and self._is_first_copy(param)
                ):
                    sums += squares([param.detach().float()])
        total = torch.stack(sums).sum() if sums else 0.0
        return math.sqrt(self.span.sum([total])[0])

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds, for the same ranks again; tensors are the live ones."""
        return self.saved.of_rank()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: MutableMapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[Any, Any]:
        """Return the state for Megatron's ``torch_dist`` format; collective.

        Args:
            model_sharded_state_dict: The model's, of all chunks, with the parameters themselves.
            is_loading: Whether it is to be loaded into, in place, and then given to
                :meth:`load_state_dict`.
            metadata: Megatron's description of the checkpoint; when saving it is told that
                scalar state is fully reshardable, which is the only form here.
            kwargs: Of Megatron's other optimizers.
        """
        del kwargs
        if is_loading:
            return self.saved.request(model_sharded_state_dict)
        return self.saved.sharded(model_sharded_state_dict, metadata)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Load the optimizers' states, and make all weights of the loaded masters; collective.

        A checkpoint of the model holds what its weights were rounded or quantized to, and weights
        quantized again from that are not those of the masters.

        Args:
            state_dict: Of :meth:`state_dict`, or what was loaded for :meth:`sharded_state_dict`.

        Raises:
            CheckpointError: Something is missing or of another model; the same on every rank.
        """
        self.saved.load(state_dict)
        self._renew_weights()

    def _finish_gathers(self) -> None:
        """End the gathers that are under way, which are of the weights before; collective."""
        for chunk in self._wrapped_chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    @torch.no_grad()
    def _renew_weights(self) -> None:
        """Make all weights of the masters, on every rank; collective."""
        self._finish_gathers()
        for leaf in self.leaves:
            is_staged = isinstance(leaf, DistributedOptimizer) and (
                self.config.reuse_grad_buf_for_mxfp8_param_ag
            )
            if not is_staged and not isinstance(leaf, WholeFP32Optimizer):
                leaf._copy_main_params_to_model_params()
        if self._is_replicated:
            return
        first = self.chained_optimizers[0]
        if getattr(first, "layerwise_param_sync_via_bucket_group", True):
            for chunk in self._wrapped_chunks:
                chunk.start_param_sync(force_sync=True)
        else:
            first.allgather_params()

    def save_state_dict_to_file(self, filename: str) -> None:
        """Save what this rank holds, for Megatron's ``torch`` format; collective.

        Args:
            filename: Megatron's, in the iteration's folder, by data-parallel rank.
        """
        self.saved.save_file(self._file_of_rank(filename))

    @torch.no_grad()
    def load_state_dict_from_file(self, filename: str) -> None:
        """Load what :meth:`save_state_dict_to_file` wrote, as :meth:`load_state_dict` does."""
        self.saved.load_file(self._file_of_rank(filename))
        self._renew_weights()

    def _file_of_rank(self, filename: str) -> Path:
        """Return a file of this rank's own; context-parallel ranks share Megatron's."""
        path, group = Path(filename), getattr(self._groups, "cp", None)
        if group is None or group.size() == 1:
            return path
        return path.with_name(f"{path.stem}_{group.rank()}{path.suffix}")

    def _measure(self, count_zeros: bool) -> GradStatistics:
        return measure(self.members, self.span, count_zeros)

    def _clipped(self) -> list[Member]:
        """Return what clipping scales."""
        if self.settings.clip == "global":
            return self.members
        return [member for member in self.members if not member.is_matrix]

    def _tell_skip(self) -> None:
        """Say which gradient made this step a skipped one, an error after too many; collective.

        The error is for :meth:`step` to raise: a caller that prepares several optimizers has others
        that wait for it.
        """
        self._num_in_a_row += 1
        stage = 0 if getattr(self._groups, "pp", None) is None else self._groups.pp.rank()
        name = first_non_finite(self.members, stage, self.span)
        limit = self.settings.max_skipped_steps
        if self._num_in_a_row > limit:
            self._error = NonFiniteGradientError(
                f"The gradient of {name} has inf or NaN"
                + (f", in {self._num_in_a_row} steps in a row" if limit else "")
                + f". Weights and optimizer are as they were before. {self._advice()}Look for the "
                "cause in the data and the loss, lower the learning rate, or raise "
                f"--muon-max-skipped-steps ({limit})."
            )
        elif self.span.is_first:
            logger.warning(
                "step skipped: the gradient of %s has inf or NaN (%d in a row, of %d allowed; "
                "%d in all)",
                name, self._num_in_a_row, limit, self.num_skipped,
            )  # fmt: skip

    def _advice(self) -> str:
        """Say what to do about the loss scale, if there is one."""
        if self.grad_scaler is None:
            return ""
        scale = float(self.grad_scaler.scale)
        if isinstance(self.grad_scaler, DynamicGradScaler):
            return f"The loss scale is at its floor, --min-loss-scale {scale:g}: lower that. "
        return f"--loss-scale {scale:g} may be too large: lower it, or drop it for a dynamic one. "

    def _is_counted(self, param: torch.nn.Parameter) -> bool:
        """Whether what this rank has of a parameter counts here and is no copy."""
        return bool(
            param_is_not_shared(param)
            and param_is_not_gtp_duplicate(param)
            and param_is_not_tensor_parallel_duplicate(
                param,
                tp_group=self._groups.tp,
                expert_tp_group=getattr(self._groups, "expt_tp", None),
            )
            and (not self._is_replicated or self._is_first_copy(param))
        )

    def _is_first_copy(self, param: torch.nn.Parameter) -> bool:
        """Whether this is the first of the data-parallel ranks that have a parameter."""
        is_dense = getattr(param, "allreduce", True)
        group = self._groups.dp_cp if is_dense else self._groups.expt_dp
        return group is None or group.rank() == 0

    def _phase_timers(self) -> dict[str, Timer]:
        """Return Megatron's timer of each phase of Muon's step, none below their level."""
        if self.config.timers is None:
            return {}
        found = {
            phase: self.config.timers(label_of(phase), log_level=TIMER_LEVEL) for phase in PHASES
        }
        return {phase: timer for phase, timer in found.items() if isinstance(timer, Timer)}

    @contextmanager
    def _timer(self, name: str) -> Iterator[None]:
        """Time a part of the step with Megatron's timer of that name, if it has timers."""
        timers = self.config.timers
        if timers is not None:
            timers(name, log_level=1).start(barrier=self.config.barrier_with_L1_time)
        try:
            yield
        finally:
            if timers is not None:
                timers(name).stop()


def ranks_of(groups: Any) -> dist.ProcessGroup:
    """Return one group of all ranks of the model; where there is none, of the whole job."""
    spanning = spanning_groups(groups)
    world = dist.group.WORLD
    assert world is not None
    return spanning[0] if len(spanning) == 1 else world


def spanning_groups(groups: Any) -> list[dist.ProcessGroup]:
    """Return process groups that together span all ranks of the model."""
    model_parallel = getattr(groups, "mp", None)
    model = [groups.tp, groups.pp, getattr(groups, "gtp_remat", None)]
    if model_parallel is not None:
        model = [model_parallel]
    parts = [group for group in (*model, groups.dp_cp) if group is not None]
    whole = getattr(groups, "intra_dist_opt", None)
    if whole is not None and whole.size() == math.prod(group.size() for group in parts):
        return [whole]
    # Several optimizer instances, or groups made by hand.
    return parts
