"""One run of the law harness, and what a rank holds after it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run of a few steps; the data-parallel size is what is left of the ranks.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Virtual pipeline stages of a rank.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts, ``None`` for ``tp``.
        gtp: Ranks over which generalized tensor parallelism cuts the rows of each weight's shard.
        egtp: The same of weights of experts.
        gtp_alignment: Rows of which each of these parts has a multiple.
        gtp_poisoned: Whether the rows of zeros that fill up parts of matrices have gradients.
        layers: Transformer layers.
        groups: Query groups, of 8 heads.
        gated: Whether the MLP is a gated unit.
        output_gate: Whether attention has an output gate.
        experts: Experts a layer, 0 for a dense model.
        perceptron: Whether the model is no GPT but one MLP with a squared error, whose backward
            pass rounds little; only with ``backward``.
        bias: Whether linear layers have biases; Megatron cannot cut those of experts.
        bf16: Whether the model is in bf16.
        fp16: Whether the model is in fp16.
        loss_scales: Loss scale of each step, constant within it; empty for Megatron's own choice.
        grad_factor: Factor on all given gradients; a power of two rounds none.
        loss_factor: Factor on the loss of ``backward``, which lifts its fp16 gradients out of the
            subnormal numbers.
        wrap: The way to DDP: ``training`` (``wrap_model_chunks_with_ddp``), ``builder``
            (``dist_utils._ddp_wrap``), ``legacy`` (layer-wise without a layout) or ``replicated``
            (no distributed optimizer at all).
        layout: ``--muon-layout``.
        budget_nbytes: ``--muon-gather-budget-mib``, in bytes.
        exchange_dtype: ``--muon-exchange-dtype``.
        tp_mode: ``--muon-tp-mode``.
        precision: ``--muon-fp32-matmul-prec``.
        share_blocks: ``--muon-share-blocks``.
        bucket_size: Elements of a bucket; Megatron asks for it only where ``overlap_grad`` is.
        overlap_grad: ``--overlap-grad-reduce``.
        overlap_param: ``--overlap-param-gather``.
        gathers_early: ``--muon-overlap-param-gather``.
        grads_in_fp32: Whether gradients are reduced in fp32.
        micro_batches: Micro-batches whose gradients add up.
        backward: Whether gradients come from forward and backward passes; else they are given.
        per_token: ``--calculate-per-token-loss``.
        masked: Whether some tokens of ``backward`` do not count, in each micro-batch another
            number.
        steps: Optimizer steps.
        zero_grads: Whether all gradients are zero.
        frozen: Pattern of parameters that are not trained.
        trained: Pattern of the only parameters that are trained.
        exclude: ``--muon-exclude``, one glob.
        include: ``--muon-include``, one glob.
        permuted: Whether one rank has its parameter groups and parameters in another order.
        counted: Whether flops are counted, which takes time.
        watched: Whether it is recorded what the optimizer writes, and its state is kept.
        mutant: How the run is broken on purpose.
        report: ``--muon-report``.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    gtp: int = 1
    egtp: int = 1
    gtp_alignment: int = 16
    gtp_poisoned: bool = False
    layers: int = 2
    groups: int = 2
    gated: bool = True
    output_gate: bool = False
    experts: int = 0
    perceptron: bool = False
    bias: bool = True
    bf16: bool = False
    fp16: bool = False
    loss_scales: tuple[float, ...] = ()
    grad_factor: float = 1.0
    loss_factor: float = 1.0
    wrap: str = "training"
    layout: str = "owner"
    budget_nbytes: int = 64 * 2**20
    exchange_dtype: str | None = None
    tp_mode: str = "owner"
    precision: str = "highest"
    nesterov: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.1
    lr: float = 0.05
    adam_eps: float = 1e-8
    split_qkv: bool = True
    split_gated_fc1: bool = False
    split_heads: bool = False
    share_blocks: bool = False
    clip: float = 0.0
    skip_above: float = math.inf
    bucket_size: int | None = None
    overlap_grad: bool = False
    overlap_param: bool = False
    gathers_early: bool = False
    grads_in_fp32: bool = True
    micro_batches: int = 1
    backward: bool = False
    per_token: bool = False
    masked: bool = False
    steps: int = 3
    zero_grads: bool = False
    frozen: str | None = None
    trained: str | None = None
    exclude: str | None = None
    include: str | None = None
    permuted: bool = False
    counted: bool = False
    watched: bool = False
    mutant: str | None = None
    report: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    @property
    def grid(self) -> tuple[int, int, int | None, int, int, int, int]:
        """Sizes from which Megatron's process groups are made."""
        return self.tp, self.pp, self.vpp, self.ep, self.expert_tp, self.gtp, self.egtp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    def tp_of(self, name: str) -> int:
        """Return the ranks that cut a parameter, if it is one that is cut."""
        return self.expert_tp if is_expert(name) else self.tp

    def gtp_of(self, name: str) -> int:
        """Return the ranks that cut the rows of a weight's shard, if it is one that is cut."""
        return self.egtp if is_expert(name) else self.gtp

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained."""
        if self.trained is not None and not re.search(self.trained, name):
            return False
        return self.frozen is None or not re.search(self.frozen, name)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert."""
    return ".experts." in name


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that Muon entered in its step.

    Attributes:
        name: Function of ``torch.distributed``.
        sent_nbytes: Bytes given to it.
        received_nbytes: Bytes that came from other ranks.
        scratch_nbytes: Bytes of both of its buffers.
    """

    name: str
    sent_nbytes: int
    received_nbytes: int
    scratch_nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one matrix is worked on.

    Attributes:
        home: Data- and tensor-parallel rank that orthogonalizes it, the first of several.
        pieces: Elements of the shard that each data-parallel rank holds.
        numel: Elements of the whole.
        is_cut: Whether tensor parallelism cuts it.
        homes: All ranks that work on it.
    """

    home: tuple[int, int]
    pieces: tuple[tuple[int, int], ...]
    numel: int
    is_cut: bool
    homes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """Elements of one of DDP's buffers: in all, and without padding."""

    numel: int
    unpadded_numel: int
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Write:
    """Tensors that an optimizer's step wrote.

    Attributes:
        dtype: Their dtype.
        place: ``parameters`` or ``gradients``, where DDP holds them, or ``elsewhere``.
        operator: What wrote them.
    """

    dtype: torch.dtype
    place: str
    operator: str


@dataclass
class Outcome:
    """What one rank holds after the last step.

    Attributes:
        tp_rank: Tensor-parallel rank.
        expert_tp_rank: Tensor-parallel rank of its experts.
        dp_rank: Data-parallel rank.
        expert_dp_rank: Data-parallel rank of its experts.
        pp_rank: Pipeline stage.
        gtp_rank: Rank among those that cut rows once more.
        expert_gtp_rank: Rank among those that cut rows of experts once more.
        masters: Flat pieces of this rank's shards, with where each starts in the shard.
        weights: The model's own weights.
        grad_norms: Norm of the gradients in each step, as Megatron says.
        grads: Gradients of each step as DDP holds them; only of one process, from ``backward``.
        newton_schulz_calls: Blocks orthogonalized, as the package counts.
        newton_schulz_flops: Their flops in the standard form.
        matmul_flops: Flops of matrix products inside Muon's step, as torch counts.
        collectives: Collectives of Muon, as the package counts.
        exchanged_nbytes: Bytes received from other ranks in them.
        spied: The same collectives seen from outside, step by step.
        places: Where each matrix is worked on, by its name in the plan.
        owned: Parameters this rank holds a master of.
        buffers: DDP's buffers.
        printed: What the factory printed.
        snapshots: The report after each step.
        written: What the optimizer's steps wrote, of a case that is ``watched``.
        state: Optimizer state of each piece in ``masters``, of a case that is ``watched``.
    """

    tp_rank: int
    expert_tp_rank: int
    dp_rank: int
    expert_dp_rank: int
    pp_rank: int
    gtp_rank: int
    expert_gtp_rank: int
    masters: dict[str, list[tuple[int, torch.Tensor]]]
    weights: dict[str, torch.Tensor]
    grad_norms: list[float]
    grads: list[dict[str, torch.Tensor]]
    newton_schulz_calls: int
    newton_schulz_flops: int
    matmul_flops: int
    collectives: int
    exchanged_nbytes: int
    spied: list[list[Collective]]
    places: dict[str, Place]
    owned: set[str]
    buffers: list[BufferFacts]
    printed: str
    snapshots: list[str] = field(default_factory=list)
    written: set[Write] = field(default_factory=set)
    state: dict[str, list[tuple[int, dict[str, torch.Tensor]]]] = field(default_factory=dict)

    def tp_rank_of(self, name: str) -> int:
        """Return this rank among those that cut a parameter."""
        return self.expert_tp_rank if is_expert(name) else self.tp_rank

    def gtp_rank_of(self, name: str) -> int:
        """Return this rank among those that cut the rows of a weight's shard."""
        return self.expert_gtp_rank if is_expert(name) else self.gtp_rank
