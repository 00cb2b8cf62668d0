"""Muon's flags as a run takes them: legal values, and which do not work together.

The rules are those of :mod:`megatron_muon.optimizer.config`, which needs torch and Megatron; tests
hold every message of the two against each other. Pairs of flags are refused by the run's own table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_muon.bookkeeping.stage import MIN_BUDGET_MIB
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.optimizer.compatibility import (
    LATER_LAYOUTS,
    Chosen,
    check_pairs,
    only_layout,
    our_layout,
)
from megatron_muon.planner.flag_words import Flags, one, one_of, shown


@dataclass(frozen=True, slots=True)
class MuonFlag:
    """What a flag takes.

    Attributes:
        kind: ``str``, ``int``, ``float``, or ``None`` for a switch.
        choices: The words that are legal, empty where it is no choice.
        expected: Which numbers are legal, in words.
        is_legal: Whether a number is.
    """

    kind: type[str] | type[int] | type[float] | None
    choices: tuple[str, ...] = ()
    expected: str = ""
    is_legal: Callable[[float], bool] = math.isfinite


_SWITCH, _TEXT = MuonFlag(None), MuonFlag(str)
_DTYPE = MuonFlag(str, ("fp32", "bf16"))
_RATE = MuonFlag(
    float, expected="a finite number of 0 or more", is_legal=lambda rate: 0 <= rate < math.inf
)

MUON_FLAGS: dict[str, MuonFlag] = {
    "muon-clip": MuonFlag(str, ("global", "scalar-only")),
    "muon-coefficient-type": MuonFlag(
        str, ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4")
    ),
    "muon-exchange-dtype": _DTYPE,
    "muon-exclude": _TEXT,
    "muon-extra-scale-factor": MuonFlag(
        float, expected="a finite number above 0", is_legal=lambda factor: 0 < factor < math.inf
    ),
    "muon-fp32-matmul-prec": MuonFlag(str, ("medium", "high", "highest")),
    "muon-gather-budget-mib": MuonFlag(
        float,
        expected=f"{MIN_BUDGET_MIB} MiB (4 KiB) or more",
        is_legal=lambda budget: MIN_BUDGET_MIB <= budget < math.inf,
    ),
    "muon-hardware": _TEXT,
    "muon-include": _TEXT,
    "muon-layout": MuonFlag(str, ("owner", "flat", "auto")),
    "muon-match-adamw-rms": MuonFlag(
        float,
        expected="a finite number above 0, such as 0.2",
        is_legal=lambda rms: 0 < rms < math.inf,
    ),
    "muon-max-skipped-steps": MuonFlag(
        int, expected="an integer of 0 or more", is_legal=lambda limit: limit >= 0
    ),
    "muon-momentum": MuonFlag(
        float, expected="a factor in [0, 1)", is_legal=lambda factor: 0 <= factor < 1
    ),
    "muon-momentum-dtype": _DTYPE,
    "muon-nesterov": _SWITCH,
    "muon-no-split-qkv": _SWITCH,
    "muon-ns-kernel": MuonFlag(str, ("auto", "standard", "gram", "eigh", "exact")),
    "muon-num-ns-steps": MuonFlag(
        int, expected="an integer of 1 or more", is_legal=lambda steps: steps >= 1
    ),
    "muon-overlap-param-gather": _SWITCH,
    "muon-report": _TEXT,
    "muon-scalar-lr": _RATE,
    "muon-scalar-min-lr": _RATE,
    "muon-scalar-optimizer": MuonFlag(str, ("adam", "lion")),
    "muon-scale-mode": MuonFlag(str, ("spectral", "unit_rms_norm", "shape_scaling")),
    "muon-share-blocks": _SWITCH,
    "muon-split-gated-fc1": _SWITCH,
    "muon-split-heads": _SWITCH,
    "muon-tp-mode": MuonFlag(str, ("owner", "duplicated", "distributed", "blockwise")),
    "muon-use-syrk": _SWITCH,
}
"""Muon's flags, Megatron's and ours."""

LATER_FLAG = "layer-wise-param-layout"
"""A later Megatron's name of the layout, which a run understands."""

GATHERS_EARLY = ("muon-overlap-param-gather", "overlap-param-gather-with-optimizer-step")
"""Our flag, and Megatron's, which a run takes for ours."""


def check_muon_flags(flags: Flags) -> None:
    """Check Muon's flags, and Megatron's that bear on them, as a run does.

    Args:
        flags: All flags, of a run with a distributed optimizer.

    Raises:
        ConfigurationError: A run would refuse them; the message names the flag.
        UnsupportedError: A run would take them, and they are not planned.
    """
    for flag, takes in MUON_FLAGS.items():
        if flag in flags:
            _check_value(flags, flag, takes)
    _check_optimizer(flags)
    _check_scale(flags)
    _check_scalar_rates(flags)
    check_pairs(_with_only_layout(_chosen(flags)))
    mode = one(flags, "muon-tp-mode", "owner")
    if mode != "owner":
        raise UnsupportedError(
            f"--muon-tp-mode {mode} is not planned: its ranks all work on the same matrices. "
            "Drop it."
        )
    if "no-use-layer-wise-param-layout" in flags:
        raise UnsupportedError(
            "--no-use-layer-wise-param-layout is not planned: DDP is then given no layout. Drop it."
        )


def number(flags: Flags, flag: str, default: float = 0.0) -> float:
    """Return the number behind a flag that is none of Muon's.

    Raises:
        ConfigurationError: It is none.
    """
    given = one(flags, flag, str(default))
    try:
        return float(given)
    except ValueError:
        raise ConfigurationError(f"--{flag} is {shown(given)}: expected a number.") from None


def layout_of(flags: Flags) -> str | None:
    """Return the layout that the flags name, also as a later Megatron does.

    Raises:
        ConfigurationError: There is no such layout, or two flags name different ones.
        UnsupportedError: It is a run without a layout.
    """
    layout = one(flags, "muon-layout") if "muon-layout" in flags else None
    if LATER_FLAG not in flags:
        return layout
    one_of(flags, LATER_FLAG, LATER_LAYOUTS)
    given = f"--{LATER_FLAG} {one(flags, LATER_FLAG)}"
    if given.endswith(" legacy"):
        raise UnsupportedError(f"{given} is not planned: it is a run without a layout. Drop it.")
    later = our_layout(one(flags, LATER_FLAG), given)
    if layout not in (None, later) or "no-use-layer-wise-param-layout" in flags:
        other = f"--muon-layout {layout}" if layout not in (None, later) else (
            "--no-use-layer-wise-param-layout"
        )  # fmt: skip
        raise ConfigurationError(
            f"{given} is --muon-layout {later}, and {other} was given: drop one of the two."
        )
    return later


def _check_value(flags: Flags, flag: str, takes: MuonFlag) -> None:
    if takes.kind is None:
        if flags[flag]:
            raise ConfigurationError(
                f"--{flag} is {' '.join(flags[flag])}: expected no value. Drop what follows it."
            )
    elif takes.choices:
        one_of(flags, flag, takes.choices)
    elif takes.kind is not str:
        given = one(flags, flag)
        try:
            value = int(given) if takes.kind is int else float(given)
        except ValueError:
            raise ConfigurationError(
                f"--{flag} is {shown(given)}: expected {takes.expected}."
            ) from None
        if not takes.is_legal(value):
            raise ConfigurationError(f"--{flag} is {value}: expected {takes.expected}.")
    elif flag == "muon-report" and not one(flags, flag):
        raise ConfigurationError("--muon-report is empty: give the name of a file, or drop it.")


def _check_optimizer(flags: Flags) -> None:
    optimizer = one(flags, "optimizer", "muon")
    if optimizer not in ("muon", "dist_muon"):
        raise ConfigurationError(
            f"--optimizer is {optimizer}: expected muon, for which a plan is. To plan the same run "
            "with Muon, give --optimizer muon behind `--`."
        )
    if {"fp16", "bf16"} <= set(flags):
        raise ConfigurationError("--fp16 and --bf16 are both given: drop one of the two.")
    if "use-precision-aware-optimizer" in flags:
        raise ConfigurationError(
            "--use-precision-aware-optimizer does not work with --optimizer muon: drop it. "
            "--muon-momentum-dtype bf16 halves the momentum's memory."
        )
    clip = number(flags, "clip-grad", 1.0)
    if not clip >= 0:
        raise ConfigurationError(
            f"--clip-grad is {clip}: expected a number of 0 or more; 0 clips nothing."
        )


def _check_scale(flags: Flags) -> None:
    if "muon-match-adamw-rms" in flags and (
        one(flags, "muon-scale-mode", "spectral") != "spectral"
        or number(flags, "muon-extra-scale-factor", 1.0) != 1.0
    ):
        raise ConfigurationError(
            "--muon-match-adamw-rms sets the size of updates by itself: drop it, or drop "
            "--muon-scale-mode and --muon-extra-scale-factor."
        )


def _check_scalar_rates(flags: Flags) -> None:
    """Check that the scalar optimizer's rate warms up to it and decays from it."""
    own, least = "muon-scalar-lr" in flags, "muon-scalar-min-lr" in flags
    warmup = number(flags, "lr-warmup-init")
    warms_up = any(number(flags, f"lr-warmup-{unit}") for unit in ("iters", "samples", "fraction"))
    if own and warms_up and warmup > number(flags, "muon-scalar-lr"):
        raise ConfigurationError(
            f"--lr-warmup-init is {warmup}, above --muon-scalar-lr "
            f"{number(flags, 'muon-scalar-lr')}: the scalar optimizer would start above its rate. "
            "Lower the first."
        )
    if least and one(flags, "lr-decay-style", "linear") == "constant":
        raise ConfigurationError(
            "--muon-scalar-min-lr has no effect with --lr-decay-style constant: drop it."
        )
    high = "muon-scalar-lr" if own else "lr"
    low = "muon-scalar-min-lr" if least else "min-lr"
    if not (own or least) or high not in flags:
        return
    most, end = number(flags, high), number(flags, low)
    if end > most:
        raise ConfigurationError(
            f"The learning rate of the scalar optimizer would decay from {most} (--{high}) to "
            f"{end} (--{low}), which is larger: give --muon-scalar-min-lr of at most {most}."
        )


def _chosen(flags: Flags) -> Chosen:
    layout = layout_of(flags)
    return Chosen(
        layout=layout or "auto",
        layout_given=layout,
        distributed=True,
        param_layout="no-use-layer-wise-param-layout" not in flags,
        tp_mode=one(flags, "muon-tp-mode", "owner"),
        clip=one(flags, "muon-clip", "global"),
        clip_grad=number(flags, "clip-grad", 1.0),
        exchange_dtype=one(flags, "muon-exchange-dtype", "fp32"),
        split_qkv="muon-no-split-qkv" not in flags,
        split_heads="muon-split-heads" in flags,
        use_syrk="muon-use-syrk" in flags,
        gathers_early=any(flag in flags for flag in GATHERS_EARLY),
        overlap_param_gather="overlap-param-gather" in flags,
        borrows_grads="reuse-grad-buf-for-mxfp8-param-ag" in flags,
        share_blocks="muon-share-blocks" in flags,
        hardware="muon-hardware" in flags,
        ns_kernel=one(flags, "muon-ns-kernel", "auto"),
        matmul_precision=one(flags, "muon-fp32-matmul-prec", "medium"),
    )


def _with_only_layout(chosen: Chosen) -> Chosen:
    """Return what was chosen with the layout that all else leaves, where it leaves one alone."""
    only = only_layout(chosen) if chosen.layout == "auto" else None
    if only is None:
        return chosen
    if chosen.hardware:
        raise ConfigurationError(
            f"--muon-hardware has no effect: another flag settles on layout {only.layout} "
            f"({only.why}). Drop it."
        )
    return replace(chosen, layout=only.layout)
