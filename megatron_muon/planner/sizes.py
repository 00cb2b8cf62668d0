"""Parallel sizes of a job, which sizes a model allows, and which layers a pipeline stage has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.models import ModelSpec

MOST_RANKS = 2**17
"""Ranks of a pipeline stage that are planned: the numbers of each are added up one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How many ranks a job has, and what for.

    Ranks of a pipeline stage are numbered as Megatron does: tensor-parallel fastest, then context
    and data; experts see the same ranks as expert-tensor-parallel fastest, then expert-parallel,
    then expert data.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size, without context parallelism.
        cp: Context-parallel size; its ranks share matrices as data-parallel ones do.
        ep: Expert-parallel size.
        etp: Expert-tensor-parallel size, ``None`` for that of ``tp``.
        vpp: Model chunks of a pipeline stage.
        first_layers: Layers of the first stage, ``None`` for as many as the others.
        last_layers: Layers of the last stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def expert_tp(self) -> int:
        """Ranks that cut an expert's matrices."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp_cp(self) -> int:
        """Ranks that share dense matrices."""
        return self.dp * self.cp

    @property
    def num_stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp_cp

    @property
    def expert_dp(self) -> int:
        """Ranks that share an expert's matrices where these have groups of their own."""
        return self.num_stage_ranks // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_stage_ranks * self.pp

    @property
    def experts_apart(self) -> bool:
        """Whether experts are reduced over groups of their own (0.19.2, layers.py:961)."""
        return self.ep > 1 or self.expert_tp != self.tp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"ETP{self.expert_tp}"] if self.expert_tp != self.tp else []
        parts += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        return " ".join(parts)


def check_sizes(model: ModelSpec, sizes: ParallelSizes) -> None:
    """Check that a model can be cut into that many ranks.

    Raises:
        ConfigurationError: It cannot; the message names the flag and what would fit.
    """
    for flag in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"):
        size = getattr(sizes, flag)
        if size is not None and size < 1:
            raise ConfigurationError(f"--{flag} is {size}: expected an integer of 1 or more.")
    for flag, layers in (("first", sizes.first_layers), ("last", sizes.last_layers)):
        if layers is not None and not 1 <= layers <= model.num_layers:
            raise ConfigurationError(
                f"--{flag}-stage-layers is {layers}: expected 1 to {model.num_layers}, the layers "
                f"of {model.name}."
            )
    if sizes.num_stage_ranks > MOST_RANKS:
        factors = [("--tp", sizes.tp), ("--cp", sizes.cp), ("--dp", sizes.dp)]
        product = " x ".join(f"{flag} {size}" for flag, size in factors if size > 1)
        raise ConfigurationError(
            f"{product} is a pipeline stage of {sizes.num_stage_ranks} ranks; expected "
            f"{MOST_RANKS} at most. Give smaller sizes."
        )
    tp = sizes.tp
    _check_cut(model, tp, "--tp", "num_attention_heads", model.num_attention_heads)
    if not model.multi_latent_attention:
        groups = model.num_query_groups
        if groups % tp and tp % groups:
            raise ConfigurationError(
                f"--tp {tp} does not fit {model.name}: its {groups} query groups are neither a "
                f"multiple nor a divisor of it. Give one of {_listed(_divisors(groups))}."
            )
    _check_cut(model, tp, "--tp", "ffn_hidden_size", model.ffn_hidden_size)
    _check_cut(model, tp, "--tp", "padded vocabulary", model.padded_vocab(tp))
    if model.multi_latent_attention and not model.is_te:
        # Transformer Engine's are copied on all ranks.
        _check_cut(model, tp, "--tp", "q_lora_rank", model.q_lora_rank or tp)
        rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
        _check_cut(model, tp, "--tp", "kv_lora_rank + qk_pos_emb_head_dim", rows)
    if model.num_moe_experts:
        _check_experts(model, sizes)
    elif sizes.ep > 1 or sizes.etp not in (None, tp):
        given = [f"--ep {sizes.ep}"] if sizes.ep > 1 else []
        given += [] if sizes.etp in (None, tp) else [f"--etp {sizes.etp}"]
        raise ConfigurationError(
            f"{' and '.join(given)} without effect: {model.name} has no experts. Drop "
            f"{'both' if len(given) > 1 else 'it'}."
        )
    stage_layers(model, sizes, 0)


def stage_layers(model: ModelSpec, sizes: ParallelSizes, pp_rank: int) -> list[range]:
    """Return the layers of each model chunk of a pipeline stage.

    Raises:
        ConfigurationError: The layers cannot be cut into stages, or a stage into chunks.
    """
    counts = _stage_counts(model, sizes)
    if sizes.vpp == 1:
        start = sum(counts[:pp_rank])
        return [range(start, start + counts[pp_rank])]
    if len(set(counts)) > 1:
        raise UnsupportedError(
            f"--vpp {sizes.vpp} with stages of {sorted(set(counts))} layers is not planned: drop "
            "--first-stage-layers and --last-stage-layers, or --vpp."
        )
    if sizes.pp == 1:
        raise ConfigurationError(
            f"--vpp {sizes.vpp} needs several pipeline stages: give a --pp above 1, or drop --vpp."
        )
    if counts[0] % sizes.vpp:
        raise ConfigurationError(
            f"--vpp {sizes.vpp} does not fit {model.name}: a stage of {counts[0]} layers cannot be "
            f"cut into {sizes.vpp} chunks. Give one of {_listed(_divisors(counts[0]))}."
        )
    length = counts[0] // sizes.vpp
    starts = [(chunk * sizes.pp + pp_rank) * length for chunk in range(sizes.vpp)]
    return [range(start, start + length) for start in starts]


def _stage_counts(model: ModelSpec, sizes: ParallelSizes) -> list[int]:
    """Return the layers of each stage; uneven ones as 0.19.2's transformer_block.py:97."""
    pp, layers = sizes.pp, model.num_layers
    if pp > layers:
        raise ConfigurationError(
            f"--pp {pp} does not fit {model.name}: it has {layers} layers, and each stage needs "
            f"one. Give a --pp of at most {layers}, such as {_listed(_divisors(layers)[-4:])}."
        )
    first, last = sizes.first_layers, sizes.last_layers
    ends = {} if first is None else {"--first-stage-layers": first}
    ends |= {} if last is None else {"--last-stage-layers": last}
    middle, left = pp - len(ends), layers - sum(ends.values())
    each = left // middle if middle > 0 else 0
    if each * middle != left or (middle and each < 1) or middle < 0:
        raise ConfigurationError(_uneven_ends(model, pp, ends) if ends else _uneven(model, pp))
    head, tail = [n for n in (first,) if n is not None], [n for n in (last,) if n is not None]
    return head + [each] * middle + tail


def _uneven(model: ModelSpec, pp: int) -> str:
    """Say that layers cannot be cut into stages alike, and what would do."""
    layers = model.num_layers
    each = -(-layers // pp)
    if layers - each * (pp - 1) < 1:
        each = layers // pp
    return (
        f"--pp {pp} does not fit {model.name}: {layers} layers cannot be cut into {pp} stages "
        "alike. Give a --pp that divides them, such as "
        f"{_listed(n for n in _divisors(layers) if n <= max(2 * pp, 8))}, or --last-stage-layers "
        f"{layers - each * (pp - 1)} for {each} layer{'s' * (each > 1)} on each of the others."
    )


def _uneven_ends(model: ModelSpec, pp: int, ends: dict[str, int]) -> str:
    """Say that the layers beside those of the first and last stage do not fit the other stages."""
    left, middle = model.num_layers - sum(ends.values()), pp - len(ends)
    given = " and ".join(f"{flag} {layers}" for flag, layers in ends.items())
    fits = [n + len(ends) for n in _divisors(left)] if left > 0 else []
    advice = f"a --pp of {_listed(fits)}, or " if fits else ""
    return (
        f"{given} with --pp {pp} do not fit {model.name}: of its {model.num_layers} layers they "
        f"leave {left} for {middle} other stages, each of which needs one or more, all the same. "
        f"Give {advice}other numbers of layers."
    )


def _check_experts(model: ModelSpec, sizes: ParallelSizes) -> None:
    _check_cut(model, sizes.ep, "--ep", "num_experts", model.num_moe_experts)
    cuts = "--tp" if sizes.etp is None else "--etp"
    _check_cut(model, sizes.expert_tp, cuts, "moe_ffn_hidden_size", model.moe_ffn_hidden_size)
    if model.moe_shared_expert_intermediate_size:
        _check_cut(
            model, sizes.tp, "--tp", "moe_shared_expert_intermediate_size",
            model.moe_shared_expert_intermediate_size,
        )  # fmt: skip
    need, ranks = sizes.ep * sizes.expert_tp, sizes.num_stage_ranks
    if ranks % need:
        told = "" if sizes.expert_tp == 1 else f" x {cuts} {sizes.expert_tp}"
        helps = sizes.expert_tp > 1 and ranks % sizes.ep == 0
        raise ConfigurationError(
            f"--ep {sizes.ep}{told} does not fit {sizes}: the {ranks} ranks of a pipeline stage "
            f"(TP x CP x DP) are no multiple of {need}. Give a --dp that is a multiple of "
            f"{need // math.gcd(need, sizes.tp * sizes.cp)}{', or --etp 1' if helps else ''}."
        )


def _check_cut(model: ModelSpec, size: int, flag: str, what: str, value: int) -> None:
    if value % size:
        fits = [n for n in _divisors(value) if n <= max(16, 2 * size)]
        raise ConfigurationError(
            f"{flag} {size} does not fit {model.name}: its {what} of {value} cannot be cut into "
            f"{size} equal parts. Give one of {_listed(fits)}."
        )


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _listed(numbers: Iterable[int]) -> str:
    """Return numbers for a message, of many the largest."""
    return ", ".join(map(str, list(numbers)[-12:]))
