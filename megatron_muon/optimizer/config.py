"""Muon's settings: the flags, Megatron's config with our fields, and the resolved values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_muon.bookkeeping.costs import HARDWARE, ON_CPU, ON_CUDA, find_hardware
from megatron_muon.bookkeeping.routing import SplitRules
from megatron_muon.bookkeeping.stage import DEFAULT_BUDGET_NBYTES, MIN_BUDGET_MIB
from megatron_muon.errors import ConfigurationError
from megatron_muon.optimizer.compatibility import Chosen, check_pairs, only_layout, our_layout
from megatron_muon.optimizer.host_values import check_host_values
from megatron_muon.orthogonalize.kernels import KERNEL_NAMES, KernelName

TPMode = Literal["owner", "duplicated", "distributed", "blockwise"]
TP_MODES: tuple[str, ...] = get_args(TPMode)
LAYOUTS = ("owner", "flat", "auto")
EXCHANGE_DTYPES = ("fp32", "bf16")
MOMENTUM_DTYPES = ("fp32", "bf16")
CLIPS = ("global", "scalar-only")
MATMUL_PRECISIONS = ("medium", "high", "highest")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
SCALAR_OPTIMIZERS = ("adam", "lion")

DEFAULT_MAX_SKIPPED_STEPS = 10
DEFAULT_GATHER_BUDGET_MIB = DEFAULT_BUDGET_NBYTES // 2**20

FLAGS: dict[str, dict[str, Any]] = {
    "--muon-layout": dict(
        choices=LAYOUTS,
        default=None,
        help="How parameters lie in the buckets: every matrix whole inside one owner's shard "
        "(owner), in equal shards that may cut a matrix, whose pieces travel to where it is "
        "orthogonalized (flat), or the one of the two with the faster predicted step that fits "
        "into memory (auto, the default).",
    ),
    "--muon-hardware": dict(
        default=None,
        metavar="MACHINE",
        help=f"What --muon-layout auto predicts for: {', '.join(HARDWARE)}, or a JSON file of "
        f"numbers (default {ON_CUDA}, on a CPU {ON_CPU}).",
    ),
    "--muon-gather-budget-mib": dict(
        type=float,
        default=None,
        metavar="MIB",
        help="What a rank may send and receive in one collective of the optimizer, in MiB; "
        "what is larger travels in rounds. A home holds at most so much of whole matrices at a "
        f"time, or as much as the largest matrix (default {DEFAULT_GATHER_BUDGET_MIB}).",
    ),
    "--muon-exchange-dtype": dict(
        choices=EXCHANGE_DTYPES,
        default=None,
        help="Dtype in which momentum and updates travel between ranks: fp32 (the default), or "
        "bf16, which rounds them and halves the bytes; the result is then no longer bit-equal to "
        "that of one process.",
    ),
    "--muon-momentum-dtype": dict(
        choices=MOMENTUM_DTYPES,
        default=None,
        help="Dtype in which momentum is kept: fp32 (the default), or bf16, which takes half the "
        "memory and rounds it after each step.",
    ),
    "--muon-match-adamw-rms": dict(
        type=float,
        default=None,
        metavar="RMS",
        help="Give every update the root mean square RMS times the learning rate, whatever the "
        "shape; 0.2 matches AdamW's, so that its learning rate and decay can be kept. In the place "
        "of --muon-scale-mode and --muon-extra-scale-factor.",
    ),
    "--muon-clip": dict(
        choices=CLIPS,
        default=None,
        help="What --clip-grad scales down: all gradients (global, the default), or only those of "
        "the scalar optimizer (scalar-only). The norm is that of all gradients in both.",
    ),
    "--muon-scalar-lr": dict(
        type=float,
        default=None,
        metavar="LR",
        help="Learning rate of the scalar optimizer where no override gives one (default: --lr).",
    ),
    "--muon-scalar-min-lr": dict(
        type=float,
        default=None,
        metavar="LR",
        help="Learning rate that the scalar optimizer decays to where no override gives one "
        "(default: --min-lr).",
    ),
    "--muon-max-skipped-steps": dict(
        type=int,
        default=None,
        metavar="N",
        help="Steps in a row that may be skipped because a gradient has inf or NaN and no lower "
        "loss scale can mend it; the next one ends training. 0 ends it at the first (default "
        f"{DEFAULT_MAX_SKIPPED_STEPS}).",
    ),
    "--muon-overlap-param-gather": dict(
        action="store_true",
        help="With --overlap-param-gather, start the gather of a bucket inside the optimizer's "
        "step, when its last matrix is done, and not in the next forward pass.",
    ),
    "--muon-split-gated-fc1": dict(
        action="store_true",
        help="Orthogonalize gate and up of a gated unit's first layer apart.",
    ),
    "--muon-use-syrk": dict(
        action="store_true",
        help="Multiply x x^T in Newton-Schulz by emerging-optimizers' Triton kernel on GPUs that "
        "it supports. It tunes itself in each process, so that the last bits of an update may "
        "depend on the rank that computes it.",
    ),
    "--muon-share-blocks": dict(
        action="store_true",
        help="Let 2, 4 or 8 ranks orthogonalize a matrix together that is one block and more than "
        "an even share of a rank's work. The update is then equal to that of one rank but for "
        "rounding.",
    ),
    "--muon-ns-kernel": dict(
        choices=KERNEL_NAMES,
        default=None,
        help="How Newton-Schulz is computed: by the kernel that is fastest for the block's shape "
        "(auto, the default), always in the standard form, in the Gram form or by eigenvectors of "
        "the Gram matrix (standard, gram, eigh), or by emerging-optimizers' own code block by "
        "block, to the same bits as Megatron's Muon (exact).",
    ),
    "--muon-split-heads": dict(
        action="store_true",
        help="Orthogonalize every head of q, k, v (and an output gate) apart; not the output "
        "projection.",
    ),
    "--muon-exclude": dict(
        action="append",
        default=[],
        metavar="GLOB",
        help="Leave the parameters whose name matches to the scalar optimizer. Repeatable.",
    ),
    "--muon-include": dict(
        action="append",
        default=[],
        metavar="GLOB",
        help="Give the matrices whose name matches to Muon although an attribute or an exclusion "
        "would leave them to the scalar optimizer. Repeatable.",
    ),
    "--muon-report": dict(
        default=None,
        metavar="FILE",
        help="Write settings, routing, plan and one row a step to FILE as JSON.",
    ),
}
"""The command-line flags this package adds, with their argparse options."""


@dataclass
class MuonConfig(OptimizerConfig):
    """Megatron's ``OptimizerConfig`` with this package's fields.

    Megatron's own ``muon_*`` fields keep their names and meaning, save the default of
    ``muon_tp_mode``.
    """

    muon_tp_mode: str = "owner"
    """Where matrices that tensor parallelism cuts are orthogonalized: owner, duplicated,
    distributed or blockwise."""

    muon_layout: str | None = None
    """How parameters lie in the buckets: owner (later Megatrons' padded), flat, or auto, which is
    the one that was chosen when the model was wrapped; None takes the layout of ``install()``, else
    auto."""

    muon_hardware: str | None = None
    """What auto predicts for, a known machine or a JSON file; None is h100, on a CPU cpu-gloo."""

    muon_gather_budget_mib: float | None = None
    """Most memory, in MiB, that the pieces of matrices brought together take; None is 64."""

    muon_exchange_dtype: str | None = None
    """Dtype in which momentum and updates travel, fp32 or bf16; None is fp32."""

    muon_momentum_dtype: str | None = None
    """Dtype in which momentum is kept, fp32 or bf16; None is fp32."""

    muon_match_adamw_rms: float | None = None
    """Root mean square of every update over the learning rate; None scales by the other fields."""

    muon_clip: str | None = None
    """What ``clip_grad`` scales down, global or scalar-only; None is global."""

    muon_scalar_lr: float | None = None
    """Learning rate of the scalar optimizer, None for ``lr``."""

    muon_scalar_min_lr: float | None = None
    """Learning rate that the scalar optimizer decays to, None for ``min_lr``."""

    muon_max_skipped_steps: int | None = None
    """Steps with non-finite gradients in a row before training ends; None is 10."""

    muon_overlap_param_gather: bool = False
    """Whether the gather of a bucket starts in the step, when its last matrix is done."""

    muon_split_gated_fc1: bool = False
    """Whether gate and up of a gated unit's first layer are orthogonalized apart."""

    muon_use_syrk: bool = False
    """Multiply x x^T in Newton-Schulz by emerging-optimizers' Triton kernel on CUDA."""

    muon_share_blocks: bool = False
    """Whether several ranks orthogonalize a block together that is more than a rank's share."""

    muon_ns_kernel: str | None = None
    """How Newton-Schulz is computed, auto, standard, gram, eigh or exact; None is auto."""

    muon_split_heads: bool = False
    """Whether every head of q, k and v is orthogonalized apart."""

    muon_exclude: list[str] = field(default_factory=list)
    """Globs over parameter names that are left to the scalar optimizer."""

    muon_include: list[str] = field(default_factory=list)
    """Globs over parameter names that go to Muon, before exclusions and attributes."""

    muon_report: str | None = None
    """File for the JSON report, None for no report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """Every Muon setting as used, checked once.

    Attributes:
        lr: Base learning rate of the Muon groups.
        weight_decay: Decoupled decay, applied as ``p *= 1 - lr * weight_decay``.
        momentum: EMA factor ``mu`` of ``m = mu m + (1 - mu) g``.
        nesterov: Orthogonalize ``mu m + (1 - mu) g`` in place of ``m``.
        num_ns_steps: Newton-Schulz steps.
        coefficient_type: Name of the coefficient set, as in emerging-optimizers.
        scale_mode: Rule for the update's size from a block's shape.
        extra_scale_factor: Factor on top of it.
        momentum_dtype: Dtype in which momentum is kept, ``fp32`` or ``bf16``.
        clip: What is clipped, ``global`` or ``scalar-only``.
        scalar_lr: Learning rate of the scalar optimizer, ``None`` for that of Megatron.
        scalar_min_lr: Learning rate that it decays to, ``None`` for that of Megatron.
        max_skipped_steps: Steps with non-finite gradients in a row before training ends.
        matmul_precision: ``torch.set_float32_matmul_precision`` inside Newton-Schulz; medium
            multiplies in bf16.
        split_qkv: Orthogonalize q, k and v of a fused projection apart.
        split_gated_fc1: Orthogonalize gate and up of a gated unit's first layer apart.
        split_heads: Orthogonalize every head of q, k and v apart.
        share_blocks: Let several ranks work together on a block that is more than a rank's share.
        use_syrk: Multiply by emerging-optimizers' Triton kernel on CUDA.
        ns_kernel: How Newton-Schulz is computed.
        tp_mode: Where tensor-parallel matrices are orthogonalized.
        layout: How parameters lie in the buckets, None without a distributed optimizer; ``auto``
            until the model is wrapped.
        layout_why: Why that one, empty where it was asked for.
        hardware: What the choice of a layout predicts for, None for the device's kind.
        gather_budget_nbytes: What a rank may send and receive in one collective.
        exchange_dtype: Dtype in which momentum and updates travel, ``fp32`` or ``bf16``.
        gathers_early: Whether the gather of a bucket starts when its last matrix is done.
        scalar_optimizer: Optimizer of everything that is not a matrix.
        exclude: Globs left to the scalar optimizer.
        include: Globs given to Muon.
        report: File for the JSON report.
    """

    lr: float | None
    weight_decay: float
    momentum: float
    nesterov: bool
    num_ns_steps: int
    coefficient_type: str
    scale_mode: str
    extra_scale_factor: float
    momentum_dtype: str
    clip: str
    scalar_lr: float | None
    scalar_min_lr: float | None
    max_skipped_steps: int
    matmul_precision: str
    split_qkv: bool
    split_gated_fc1: bool
    split_heads: bool
    share_blocks: bool
    use_syrk: bool
    ns_kernel: KernelName
    tp_mode: TPMode
    layout: str | None
    layout_why: str
    hardware: str | None
    gather_budget_nbytes: int
    exchange_dtype: str
    gathers_early: bool
    scalar_optimizer: str
    exclude: tuple[str, ...]
    include: tuple[str, ...]
    report: str | None

    @property
    def splits(self) -> SplitRules:
        """Which fused weights are orthogonalized part by part."""
        return SplitRules(
            qkv=self.split_qkv, gated_fc1=self.split_gated_fc1, heads=self.split_heads
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return dataclasses.asdict(self)


def resolve(config: OptimizerConfig, installed_layout: str | None) -> MuonSettings:
    """Check a config and return the settings to use.

    Args:
        config: A :class:`MuonConfig`, Megatron's validated arguments with our flags, or Megatron's
            own class; there ``muon_tp_mode="blockwise"`` is the class's default and is read as
            ``"owner"``.
        installed_layout: The layout given to ``install()``.

    Raises:
        ConfigurationError: A value is not legal; the message names the flag.
    """
    check_host_values(config)
    ours = hasattr(config, "muon_layout")
    tp_mode = config.muon_tp_mode
    if not ours and tp_mode == "blockwise":
        tp_mode = "owner"
    layout_given = getattr(config, "muon_layout", None)
    layout_given = our_layout(layout_given, f"--muon-layout {layout_given}")
    layout = layout_given or installed_layout or "auto"
    if installed_layout is not None and layout != installed_layout:
        raise ConfigurationError(
            f"--muon-layout is {layout}, install() was called with layout={installed_layout!r}: "
            "give the same value to both, or leave one out."
        )
    _one_of("--muon-tp-mode", tp_mode, TP_MODES)
    _one_of("--muon-layout", layout, LAYOUTS)
    _one_of("--muon-scale-mode", config.muon_scale_mode, SCALE_MODES)
    _one_of("--muon-scalar-optimizer", config.muon_scalar_optimizer, SCALAR_OPTIMIZERS)
    _one_of("--muon-fp32-matmul-prec", config.muon_fp32_matmul_prec, MATMUL_PRECISIONS)
    _one_of("--muon-coefficient-type", config.muon_coefficient_type, _coefficient_types())
    if not 0 <= config.muon_momentum < 1:
        raise ConfigurationError(
            f"--muon-momentum is {config.muon_momentum}: expected a factor in [0, 1)."
        )
    num_steps: object = config.muon_num_ns_steps
    if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
        raise ConfigurationError(
            f"--muon-num-ns-steps is {num_steps!r}: expected an integer of 1 or more."
        )
    if not 0 < config.muon_extra_scale_factor < math.inf:
        raise ConfigurationError(
            f"--muon-extra-scale-factor is {config.muon_extra_scale_factor}: expected a finite "
            "number above 0."
        )
    momentum_dtype = getattr(config, "muon_momentum_dtype", None) or "fp32"
    _one_of("--muon-momentum-dtype", momentum_dtype, MOMENTUM_DTYPES)
    clip = getattr(config, "muon_clip", None) or "global"
    _one_of("--muon-clip", clip, CLIPS)
    scale_mode, extra_scale_factor = _scale(config)
    scalar_lr, scalar_min_lr = _scalar_rates(config)
    if getattr(config, "muon_report", None) == "":
        raise ConfigurationError("--muon-report is empty: give the name of a file, or drop it.")
    exchange_dtype = getattr(config, "muon_exchange_dtype", None) or "fp32"
    _one_of("--muon-exchange-dtype", exchange_dtype, EXCHANGE_DTYPES)
    ns_kernel: Any = getattr(config, "muon_ns_kernel", None) or "auto"
    _one_of("--muon-ns-kernel", ns_kernel, KERNEL_NAMES)
    distributed = config.use_layer_wise_distributed_optimizer or config.optimizer == "dist_muon"
    splits = SplitRules(
        qkv=config.muon_split_qkv,
        gated_fc1=getattr(config, "muon_split_gated_fc1", False),
        heads=getattr(config, "muon_split_heads", False),
    )
    gathers_early = getattr(config, "muon_overlap_param_gather", False)
    hardware = getattr(config, "muon_hardware", None)
    find_hardware(hardware, ON_CPU, "--muon-hardware")
    chosen = Chosen(
        layout=layout,
        layout_given=layout_given,
        distributed=distributed,
        param_layout=getattr(config, "use_layer_wise_param_layout", True),
        tp_mode=tp_mode,
        clip=clip,
        clip_grad=config.clip_grad,
        exchange_dtype=exchange_dtype,
        split_qkv=splits.qkv,
        split_heads=splits.heads,
        share_blocks=getattr(config, "muon_share_blocks", False),
        use_syrk=getattr(config, "muon_use_syrk", False),
        gathers_early=gathers_early,
        overlap_param_gather=config.overlap_param_gather,
        borrows_grads=config.reuse_grad_buf_for_mxfp8_param_ag,
        hardware=hardware is not None,
        ns_kernel=ns_kernel,
        matmul_precision=config.muon_fp32_matmul_prec,
    )
    only = only_layout(chosen) if layout == "auto" else None
    if only is not None:
        if hardware is not None:
            raise ConfigurationError(
                f"--muon-hardware has no effect: another flag settles on layout {only.layout} "
                f"({only.why}). Drop it."
            )
        layout = only.layout
        chosen = replace(chosen, layout=layout)
    check_pairs(chosen)
    return MuonSettings(
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        num_ns_steps=config.muon_num_ns_steps,
        coefficient_type=config.muon_coefficient_type,
        scale_mode=scale_mode,
        extra_scale_factor=extra_scale_factor,
        momentum_dtype=momentum_dtype,
        clip=clip,
        scalar_lr=scalar_lr,
        scalar_min_lr=scalar_min_lr,
        max_skipped_steps=_max_skipped_steps(config),
        matmul_precision=config.muon_fp32_matmul_prec,
        split_qkv=splits.qkv,
        split_gated_fc1=splits.gated_fc1,
        split_heads=splits.heads,
        share_blocks=getattr(config, "muon_share_blocks", False),
        use_syrk=getattr(config, "muon_use_syrk", False),
        ns_kernel=ns_kernel,
        tp_mode=tp_mode,
        layout=layout if distributed else None,
        layout_why=only.why if only is not None else "",
        hardware=hardware,
        gather_budget_nbytes=_gather_budget_nbytes(config),
        exchange_dtype=exchange_dtype,
        gathers_early=gathers_early,
        scalar_optimizer=config.muon_scalar_optimizer,
        exclude=tuple(getattr(config, "muon_exclude", None) or ()),
        include=tuple(getattr(config, "muon_include", None) or ()),
        report=getattr(config, "muon_report", None),
    )


def _scale(config: OptimizerConfig) -> tuple[str, float]:
    """Return the scale mode and the factor on top of it.

    A block of m x n that is orthogonal has a root mean square of ``max(m, n) ** -0.5``, and the
    spectral mode scales by ``max(m, n) ** 0.5`` (Moonlight, arXiv:2502.16982, section 2.2).
    """
    rms = getattr(config, "muon_match_adamw_rms", None)
    if rms is None:
        return config.muon_scale_mode, config.muon_extra_scale_factor
    if not 0 < rms < math.inf:
        raise ConfigurationError(
            f"--muon-match-adamw-rms is {rms}: expected a finite number above 0, such as 0.2."
        )
    if config.muon_scale_mode != "spectral" or config.muon_extra_scale_factor != 1.0:
        raise ConfigurationError(
            "--muon-match-adamw-rms sets the size of updates by itself: drop it, or drop "
            "--muon-scale-mode and --muon-extra-scale-factor."
        )
    return "spectral", rms


def _scalar_rates(config: OptimizerConfig) -> tuple[float | None, float | None]:
    """Return the scalar optimizer's own rate and least rate, of which the first is the larger.

    What is not given is Megatron's, which may be too large a least rate for a small rate of its
    own: the rate would then grow while it is said to decay.
    """
    rate, least = _rate("--muon-scalar-lr", config), _rate("--muon-scalar-min-lr", config)
    most = config.lr if rate is None else rate
    end = config.min_lr if least is None else least
    is_own = rate is not None or least is not None
    if is_own and most is not None and end is not None and end > most:
        names = ("--lr" if rate is None else "--muon-scalar-lr",
                 "--min-lr" if least is None else "--muon-scalar-min-lr")  # fmt: skip
        raise ConfigurationError(
            f"The learning rate of the scalar optimizer would decay from {most} ({names[0]}) to "
            f"{end} ({names[1]}), which is larger: give --muon-scalar-min-lr of at most {most}."
        )
    return rate, least


def _rate(flag: str, config: OptimizerConfig) -> float | None:
    rate: float | None = getattr(config, flag.removeprefix("--").replace("-", "_"), None)
    if rate is not None and not 0 <= rate < math.inf:
        raise ConfigurationError(f"{flag} is {rate}: expected a finite number of 0 or more.")
    return rate


def _max_skipped_steps(config: OptimizerConfig) -> int:
    limit: object = getattr(config, "muon_max_skipped_steps", None)
    if limit is None:
        return DEFAULT_MAX_SKIPPED_STEPS
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ConfigurationError(
            f"--muon-max-skipped-steps is {limit!r}: expected an integer of 0 or more."
        )
    return limit


def _gather_budget_nbytes(config: OptimizerConfig) -> int:
    budget_mib: float | None = getattr(config, "muon_gather_budget_mib", None)
    if budget_mib is None:
        budget_mib = DEFAULT_GATHER_BUDGET_MIB
    if not MIN_BUDGET_MIB <= budget_mib < math.inf:
        raise ConfigurationError(
            f"--muon-gather-budget-mib is {budget_mib}: expected {MIN_BUDGET_MIB} MiB "
            "(4 KiB) or more."
        )
    return int(budget_mib * 2**20)


def _coefficient_types() -> tuple[str, ...]:
    """Names of the coefficient sets; ``custom`` needs sets that no flag can give."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import NSCoeffT

    return tuple(name for name in get_args(NSCoeffT) if name != "custom")


def _one_of(flag: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigurationError(f"{flag} is {value!r}: expected one of {', '.join(legal)}.")
