"""Pairs of settings of which one would have no effect: one table, checked before anything is built.

Any two settings that are in no row of :data:`PAIRS` work together. Also the names that later
Megatrons give to layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_muon.bookkeeping.costs import LayoutChoice
from megatron_muon.errors import ConfigurationError

LATER_LAYOUTS = ("padded", "decoupled", "legacy")
"""What later Megatrons call the layouts of their layer-wise optimizer."""

NEEDS_BUFFER = (
    "--fp8-param-gather with --fp8-recipe mxfp8 needs a buffer to gather through: add "
    "--reuse-grad-buf-for-mxfp8-param-ag, or drop --fp8-param-gather."
)
"""Said before DDP makes buffers, which it cannot, and on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was asked for, as far as pairs depend on it.

    Attributes:
        layout: The layout in use, ``auto`` where it is chosen later.
        layout_given: The layout that a flag or the config names, ``None`` if none does.
        distributed: Whether the optimizer is distributed.
        param_layout: Whether DDP is given a layout (``--no-use-layer-wise-param-layout``).
        tp_mode: Where tensor-parallel matrices are orthogonalized.
        clip: What is clipped.
        clip_grad: Norm above which it is; 0 for never.
        exchange_dtype: Dtype in which momentum and updates travel.
        split_qkv: Whether fused projections are split.
        split_heads: Whether heads are split.
        use_syrk: Whether a kernel is used that tunes itself in each process.
        gathers_early: Whether gathers of weights start in the optimizer's step.
        overlap_param_gather: Whether they overlap with the forward pass.
        borrows_grads: Whether they go through the gradient buffer.
        share_blocks: Whether several ranks work on a block together.
        hardware: Whether a machine is named to choose the layout for.
        ns_kernel: How Newton-Schulz is computed.
        matmul_precision: Precision of its products.
    """

    layout: str
    layout_given: str | None
    distributed: bool
    param_layout: bool
    tp_mode: str
    clip: str
    clip_grad: float
    exchange_dtype: str
    split_qkv: bool
    split_heads: bool
    use_syrk: bool = False
    gathers_early: bool = False
    overlap_param_gather: bool = False
    borrows_grads: bool = False
    share_blocks: bool = False
    hardware: bool = False
    ns_kernel: str = "auto"
    matmul_precision: str = "medium"


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of a pair.

    Attributes:
        phrase: How the command line has it; of a pair's second setting with its preposition.
        is_made: Whether it was chosen.
    """

    phrase: str
    is_made: Callable[[Chosen], bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings that do not work together.

    Attributes:
        first: The one that would have no effect.
        second: The other.
        reason: Why.
        advice: What to change.
    """

    first: Choice
    second: Choice
    reason: str
    advice: str

    def message(self) -> str:
        """Return the error's text."""
        return (
            f"{self.first.phrase} has no effect {self.second.phrase}: {self.reason}. {self.advice}"
        )


def _moves_no_matrix(tp_mode: str) -> Choice:
    return Choice(
        f"with --muon-tp-mode {tp_mode}",
        lambda c: c.tp_mode == tp_mode and not (c.distributed and c.layout == "flat"),
    )


def _repeats_work(tp_mode: str) -> Choice:
    return Choice(f"with --muon-tp-mode {tp_mode}", lambda c: c.tp_mode == tp_mode)


_UNDISTRIBUTED = Choice("without --use-distributed-optimizer", lambda c: not c.distributed)
_NOT_LAID_OUT = Choice(
    "with --no-use-layer-wise-param-layout", lambda c: c.distributed and not c.param_layout
)


def _kernel(name: str, preposition: str = "") -> Choice:
    return Choice(f"{preposition}--muon-ns-kernel {name}", lambda c: c.ns_kernel == name)


_LAYOUTS = (
    Choice("--muon-layout owner", lambda c: c.layout_given == "owner"),
    Choice("--muon-layout flat", lambda c: c.layout_given == "flat"),
    Choice("--muon-layout auto", lambda c: c.layout_given == "auto"),
)
_HARDWARE = Choice("--muon-hardware", lambda c: c.hardware)

_GATHERS_EARLY = Choice("--muon-overlap-param-gather", lambda c: c.gathers_early)

PAIRS: tuple[Pair, ...] = (
    Pair(
        Choice("--muon-clip scalar-only", lambda c: c.clip == "scalar-only"),
        Choice("with --clip-grad 0", lambda c: not c.clip_grad > 0),
        "nothing is clipped",
        "Drop one of the two flags.",
    ),
    Pair(
        Choice("--muon-split-heads", lambda c: c.split_heads),
        Choice("with --muon-no-split-qkv", lambda c: not c.split_qkv),
        "heads are parts of q, k and v, which stay together",
        "Drop one of the two flags.",
    ),
    *(
        Pair(
            Choice("--muon-use-syrk", lambda c: c.use_syrk),
            _repeats_work(tp_mode),
            "ranks that compute the same block have to find the same bits",
            "Drop --muon-use-syrk, or use --muon-tp-mode owner.",
        )
        for tp_mode in ("duplicated", "distributed", "blockwise")
    ),
    *(
        Pair(
            Choice("--muon-share-blocks", lambda c: c.share_blocks),
            _repeats_work(tp_mode),
            "every rank of a tensor-parallel group works on each matrix already",
            "Drop --muon-share-blocks, or use --muon-tp-mode owner.",
        )
        for tp_mode in ("duplicated", "distributed", "blockwise")
    ),
    *(
        Pair(
            _kernel(name),
            Choice("with --muon-share-blocks", lambda c: c.share_blocks),
            "ranks that share a block compute it in the form that its shape is given",
            "Drop one of the two flags.",
        )
        for name in ("standard", "gram", "eigh", "exact")
    ),
    Pair(
        Choice("--muon-use-syrk", lambda c: c.use_syrk),
        _UNDISTRIBUTED,
        "ranks that compute the same block have to find the same bits",
        "Drop --muon-use-syrk, or add --use-distributed-optimizer.",
    ),
    *(
        Pair(
            Choice("--muon-use-syrk", lambda c: c.use_syrk),
            _kernel(name, "with "),
            "no product of that kernel goes through it",
            "Drop one of the two flags.",
        )
        for name in ("eigh", "exact")
    ),
    Pair(
        _kernel("eigh"),
        Choice("with --muon-fp32-matmul-prec medium", lambda c: c.matmul_precision == "medium"),
        "eigenvectors need products in fp32",
        "Add --muon-fp32-matmul-prec highest, or use another --muon-ns-kernel.",
    ),
    *(
        Pair(
            _kernel(name),
            Choice("with --muon-tp-mode distributed", lambda c: c.tp_mode == "distributed"),
            "ranks that share a matrix multiply their shards in the standard form",
            "Drop --muon-ns-kernel, or use --muon-tp-mode owner.",
        )
        for name in ("standard", "gram", "eigh", "exact")
    ),
    *(
        Pair(
            layout,
            _UNDISTRIBUTED,
            "no buffer is cut",
            "Add that flag, or drop --muon-layout.",
        )
        for layout in _LAYOUTS
    ),
    *(
        Pair(
            layout,
            _NOT_LAID_OUT,
            "DDP is then given no layout",
            "Drop one of the two flags.",
        )
        for layout in _LAYOUTS
    ),
    Pair(
        _GATHERS_EARLY,
        _UNDISTRIBUTED,
        "no weights are gathered",
        "Add that flag, or drop --muon-overlap-param-gather.",
    ),
    Pair(
        _GATHERS_EARLY,
        _NOT_LAID_OUT,
        "weights then have no buffer of their own to be gathered in",
        "Drop one of the two flags.",
    ),
    Pair(
        _GATHERS_EARLY,
        Choice("without --overlap-param-gather", lambda c: not c.overlap_param_gather),
        "all weights are gathered at the end of the step",
        "Add that flag, or drop --muon-overlap-param-gather.",
    ),
    Pair(
        _GATHERS_EARLY,
        Choice("with --reuse-grad-buf-for-mxfp8-param-ag", lambda c: c.borrows_grads),
        "the gradient buffer, which the gather borrows, is in use until the step ends",
        "Drop --muon-overlap-param-gather.",
    ),
    *(
        Pair(
            _HARDWARE,
            Choice(f"with {layout.phrase}", layout.is_made),
            "no layout is chosen",
            "Drop --muon-hardware, or use --muon-layout auto.",
        )
        for layout in _LAYOUTS[:2]
    ),
    *(
        Pair(_HARDWARE, second, "no buffer is cut", "Drop --muon-hardware.")
        for second in (_UNDISTRIBUTED, _NOT_LAID_OUT)
    ),
    *(
        Pair(
            Choice("--muon-exchange-dtype bf16", lambda c: c.exchange_dtype == "bf16"),
            _moves_no_matrix(tp_mode),
            "each rank works on its own shard, and no momentum or update travels",
            "Drop --muon-exchange-dtype, or use --muon-tp-mode owner or --muon-layout flat.",
        )
        for tp_mode in ("distributed", "blockwise")
    ),
)
"""Every pair that is refused, in the order in which they are looked for."""


def check_pairs(chosen: Chosen) -> None:
    """Check that no setting is made ineffective by another.

    Raises:
        ConfigurationError: One is; the message names both and what to change.
    """
    pair = _refusal(chosen)
    if pair is not None:
        raise ConfigurationError(pair.message())


def only_layout(chosen: Chosen) -> LayoutChoice | None:
    """Return the layout that all else allows if it is one alone, with what refuses the other."""
    if not (chosen.distributed and chosen.param_layout):
        return None
    refusals = {kind: _refusal(replace(chosen, layout=kind)) for kind in ("owner", "flat")}
    allowed = [kind for kind, refusal in refusals.items() if refusal is None]
    if len(allowed) != 1:
        return None
    other, pair = next((kind, pair) for kind, pair in refusals.items() if pair is not None)
    why = f"{pair.first.phrase} {pair.second.phrase} has no effect in layout {other}"
    return LayoutChoice(allowed[0], why)


def _refusal(chosen: Chosen) -> Pair | None:
    """Return the first pair of which both are chosen."""
    made = (p for p in PAIRS if p.first.is_made(chosen) and p.second.is_made(chosen))
    return next(made, None)


def our_layout(layout: str | None, given: str) -> str | None:
    """Return this package's name of a layout that may be named as later Megatrons name it.

    Args:
        layout: The name, ``None`` for none. One that no version knows is returned as it is.
        given: How it was given, for the message.

    Raises:
        ConfigurationError: There is no such layout here; the message says what to use.
    """
    if layout == "decoupled":
        raise ConfigurationError(
            f"{given}: there is no layout of whole matrices without padding. Use "
            "--muon-layout flat, which has no padding either and cuts matrices."
        )
    if layout == "legacy":
        raise ConfigurationError(
            f"{given} is a run without a layout: name none, and give "
            "--no-use-layer-wise-param-layout; code that builds DDP itself passes it no layout."
        )
    return "owner" if layout == "padded" else layout
