"""Parallel sizes of a job, which sizes a model allows, and which layers a pipeline stage has."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.models import ModelSpec


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
            raise ConfigurationError(f"--{flag} is {size}: expected 1 or more.")
    tp = sizes.tp
    _check_cut(model, tp, "--tp", "num_attention_heads", model.num_attention_heads)
    if not model.multi_latent_attention:
        groups = model.num_query_groups
        if groups % tp and tp % groups:
            raise ConfigurationError(
                f"--tp {tp} does not fit {model.name}: its {groups} query groups are neither a "
                f"multiple nor a divisor of it. Give one of {_divisors(groups)}."
            )
    _check_cut(model, tp, "--tp", "ffn_hidden_size", model.ffn_hidden_size)
    if model.multi_latent_attention and not model.is_te:
        # Transformer Engine's are copied on all ranks.
        _check_cut(model, tp, "--tp", "q_lora_rank", model.q_lora_rank or tp)
        rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
        _check_cut(model, tp, "--tp", "kv_lora_rank + qk_pos_emb_head_dim", rows)
    if model.num_moe_experts:
        _check_experts(model, sizes)
    elif sizes.ep > 1 or sizes.etp not in (None, tp):
        raise ConfigurationError(
            f"--ep {sizes.ep} and --etp {sizes.expert_tp}: {model.name} has no experts. Drop both."
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
    if sizes.pp == 1 or counts[0] % sizes.vpp:
        raise ConfigurationError(
            f"--vpp {sizes.vpp} does not fit {model.name}: a stage of {counts[0]} layers cannot be "
            f"cut into {sizes.vpp} chunks, or there is one stage only. Give a divisor of the "
            "stage's layers and --pp above 1."
        )
    length = counts[0] // sizes.vpp
    starts = [(chunk * sizes.pp + pp_rank) * length for chunk in range(sizes.vpp)]
    return [range(start, start + length) for start in starts]


def _stage_counts(model: ModelSpec, sizes: ParallelSizes) -> list[int]:
    """Return the layers of each stage; uneven ones as 0.19.2's transformer_block.py:97."""
    pp, left = sizes.pp, model.num_layers
    ends = [n for n in (sizes.first_layers, sizes.last_layers) if n is not None]
    middle, left = pp - len(ends), left - sum(ends)
    if left < 0 or middle < 0 or (left % middle if middle else left):
        hint = ""
        if not ends and pp > 1:
            each = -(-model.num_layers // pp)
            last = model.num_layers - each * (pp - 1)
            if last < 1:
                each, last = (
                    model.num_layers // pp,
                    model.num_layers - model.num_layers // pp * (pp - 1),
                )
            hint = f", or --last-stage-layers {last} for {each} layers on each of the others"
        given = f" with {sum(ends)} on the stages that were given" if ends else ""
        fits = [n for n in _divisors(model.num_layers) if n <= max(2 * pp, 8)]
        raise ConfigurationError(
            f"--pp {pp} does not fit {model.name}: {model.num_layers} layers{given} cannot be cut "
            f"into {pp} stages alike. Give a --pp that divides them, such as "
            f"{', '.join(map(str, fits))}{hint}."
        )
    counts = [left // middle if middle else 0] * pp
    if sizes.first_layers is not None:
        counts[0] = sizes.first_layers
    if sizes.last_layers is not None:
        counts[-1] = sizes.last_layers
    if min(counts) < 1:
        raise ConfigurationError(
            f"--pp {pp} does not fit {model.name}: a stage of its {model.num_layers} layers would "
            "have none. Give a smaller --pp."
        )
    return counts


def _check_experts(model: ModelSpec, sizes: ParallelSizes) -> None:
    _check_cut(model, sizes.ep, "--ep", "num_experts", model.num_moe_experts)
    _check_cut(model, sizes.expert_tp, "--etp", "moe_ffn_hidden_size", model.moe_ffn_hidden_size)
    if model.moe_shared_expert_intermediate_size:
        _check_cut(
            model, sizes.tp, "--tp", "moe_shared_expert_intermediate_size",
            model.moe_shared_expert_intermediate_size,
        )  # fmt: skip
    if sizes.num_stage_ranks % (sizes.ep * sizes.expert_tp):
        raise ConfigurationError(
            f"--ep {sizes.ep} x --etp {sizes.expert_tp} does not fit {sizes}: the "
            f"{sizes.num_stage_ranks} ranks of a pipeline stage (TP x CP x DP) are no multiple of "
            f"{sizes.ep * sizes.expert_tp}. Give a --dp that is a multiple of "
            f"{_least_dp(sizes)}, or --etp 1."
        )


def _least_dp(sizes: ParallelSizes) -> int:
    need, dp = sizes.ep * sizes.expert_tp, 1
    while sizes.tp * sizes.cp * dp % need:
        dp += 1
    return dp


def _check_cut(model: ModelSpec, size: int, flag: str, what: str, value: int) -> None:
    if value % size:
        fits = [n for n in _divisors(value) if n <= max(16, 2 * size)]
        raise ConfigurationError(
            f"{flag} {size} does not fit {model.name}: its {what} of {value} cannot be cut into "
            f"{size} equal parts. Give one of {', '.join(map(str, fits))}."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
