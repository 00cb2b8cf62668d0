"""Models, sizes and settings as Megatron's flags describe them."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_muon.bookkeeping.routing import RoutingRules, SplitRules
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.flag_words import LARGEST, MOST_LAYERS, Flags, count, one, one_of, shown
from megatron_muon.planner.job import PlanSettings
from megatron_muon.planner.models import ModelSpec, check_model
from megatron_muon.planner.muon_flags import (
    GATHERS_EARLY,
    LATER_FLAG,
    MUON_FLAGS,
    check_muon_flags,
    layout_of,
    number,
)
from megatron_muon.planner.sizes import ParallelSizes


@dataclass(frozen=True, slots=True)
class Source:
    """What was read.

    Attributes:
        model: The model.
        sizes: Parallel sizes.
        settings: Settings of the plan.
        layout: ``--muon-layout``, ``None`` where it was not given.
        hardware: ``--muon-hardware``, ``None`` where it was not given.
    """

    model: ModelSpec
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    settings: PlanSettings = field(default_factory=PlanSettings)
    layout: str | None = None
    hardware: str | None = None


_MODEL_SIZES: dict[str, str] = {
    flag: flag.replace("-", "_")
    for flag in (
        "num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels vocab-size "
        "padded-vocab-size make-vocab-size-divisible-by max-position-embeddings q-lora-rank "
        "kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim moe-ffn-hidden-size "
        "moe-shared-expert-intermediate-size"
    ).split()
} | {"num-experts": "num_moe_experts"}
_MODEL_WORDS: dict[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "none"),
    "transformer-impl": ("local", "transformer_engine"),
}
_MODEL_SWITCHES: dict[str, tuple[str, bool]] = {
    "swiglu": ("gated_linear_unit", True),
    "untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "disable-bias-linear": ("add_bias_linear", False),
    "add-qkv-bias": ("add_qkv_bias", True),
    "qk-layernorm": ("qk_layernorm", True),
    "attention-output-gate": ("attention_output_gate", True),
    "multi-latent-attention": ("multi_latent_attention", True),
    "moe-grouped-gemm": ("moe_grouped_gemm", True),
    "moe-shared-expert-gate": ("moe_shared_expert_gate", True),
}
SIZE_FLAGS: dict[str, str] = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "decoder-first-pipeline-num-layers": "first_layers",
    "decoder-last-pipeline-num-layers": "last_layers",
}
"""Megatron's flags of the fields of :class:`.sizes.ParallelSizes`."""

_MAY_BE_ZERO = ("num-experts", "q-lora-rank")
_MOST = {"num-layers": MOST_LAYERS, "num-experts": MOST_LAYERS}
_OTHERS = ("num-query-groups", "group-query-attention", "moe-layer-freq", "ddp-bucket-size",
           "overlap-grad-reduce", "ddp-pad-buckets-for-high-nccl-busbw", "bf16", "fp16",
           "accumulate-allreduce-grads-in-fp32", "optimizer", "clip-grad", "overlap-param-gather",
           "reuse-grad-buf-for-mxfp8-param-ag", "lr", "min-lr", "lr-warmup-init",
           "lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction", "lr-decay-style",
           "use-precision-aware-optimizer", "no-use-layer-wise-param-layout",
           LATER_FLAG)  # fmt: skip
_NOT_PLANNED = {
    "mtp-num-layers": "layers that predict further tokens",
    "pipeline-model-parallel-layout": "a pipeline layout of one's own (use "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers)",
    "account-for-embedding-in-pipeline-split": "stages that count the embedding",
    "account-for-loss-in-pipeline-split": "stages that count the loss",
    "tensor-parallel-num-weight-shards": "generalized tensor parallelism",
    "expert-tensor-parallel-num-weight-shards": "generalized tensor parallelism",
    "fp8-param-gather": "weights kept in FP8",
    "fp4-param-gather": "weights kept in FP4",
    "hybrid-layer-pattern": "hybrid models",
    "hybrid-override-pattern": "hybrid models",
    "experimental-attention-variant": "other kinds of attention",
    "moe-latent-size": "latent experts",
    "moe-single-grouped-weight": "experts stacked in one weight",
    "heterogeneous-layers-config-path": "layers that differ",
    "use-megatron-fsdp": "Megatron-FSDP",
    "use-torch-fsdp2": "FSDP2",
    "num-distributed-optimizer-instances": "several optimizer instances",
    "ddp-num-buckets": "buckets by their number (use --ddp-bucket-size)",
    "num-layers-per-virtual-pipeline-stage": "this way to say it (use "
    "--num-virtual-stages-per-pipeline-rank)",
}
"""Flags that change what is planned in ways that are not modelled, with what they mean."""

_KNOWN = (*_MODEL_SIZES, *_MODEL_WORDS, *_MODEL_SWITCHES, *SIZE_FLAGS, *_NOT_PLANNED, *MUON_FLAGS,
          *GATHERS_EARLY, *_OTHERS)  # fmt: skip
"""Flags that are read; all others of Megatron's are passed over."""

_SLIP = 0.93
"""Likeness to a flag that is read from which another one is taken for a slip of the hand: no flag
of Megatron 0.19.2 that is passed over is as close. A test holds this."""

_LATENT_DEFAULTS = {
    "q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
"""Those of Megatron's command line (0.19.2, training/arguments.py:3381)."""


def from_flags(flags: Flags, where: str) -> Source:
    """Return the model that Megatron's flags describe, with Megatron's defaults.

    Flags that are no part of model, sizes or plan (learning rates, data) are passed over.

    Raises:
        ConfigurationError: A flag that the model needs is missing, or one has a wrong value.
        UnsupportedError: A flag asks for what is not planned.
    """
    _check_names(flags, where)
    needed = ("num-layers", "hidden-size", "num-attention-heads")
    missing = [f"--{flag}" for flag in needed if flag not in flags]
    if not {"vocab-size", "padded-vocab-size"} & set(flags):
        missing.append("--vocab-size")
    learned = one(flags, "position-embedding-type", "learned_absolute") == "learned_absolute"
    if learned and "max-position-embeddings" not in flags:
        missing.append("--max-position-embeddings")
    if missing:
        raise ConfigurationError(
            f"{where} does not say {', '.join(missing)}: give what is missing behind `--`."
        )
    layers, hidden, heads = (count(flags, flag, most=_most(flag)) for flag in needed)
    # As Megatron's arguments.py:1280.
    ffn = hidden * 8 // 3 // 64 * 64 if "swiglu" in flags else 4 * hidden
    if not ffn and "ffn-hidden-size" not in flags:
        raise ConfigurationError(
            f"{where}: --hidden-size {hidden} with --swiglu makes Megatron's --ffn-hidden-size 0: "
            "give --ffn-hidden-size."
        )
    if "kv-channels" not in flags and hidden % heads:
        raise ConfigurationError(
            f"{where}: --hidden-size {hidden} is no multiple of --num-attention-heads {heads}: "
            "give --kv-channels."
        )
    model = ModelSpec(
        name=where,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=0,
        position_embedding_type="learned_absolute",
        gated_linear_unit=False,
        add_bias_linear=True,
        normalization="LayerNorm",
        untie_embeddings_and_output_weights=False,
        moe_grouped_gemm=False,
    )
    settings = PlanSettings(overlap="overlap-grad-reduce" in flags)
    if not {"bf16", "fp16"} & set(flags):
        settings = replace(settings, param_nbytes=4)
    elif "fp16" in flags and "accumulate-allreduce-grads-in-fp32" not in flags:
        settings = replace(settings, grad_nbytes=2)
    return with_flags(Source(model, settings=settings), flags, where)


def with_flags(source: Source, flags: Flags, where: str) -> Source:
    """Return a source with what flags say about it in the place of what it said.

    Raises:
        ConfigurationError: A flag has a wrong value, or does not go with another one.
        UnsupportedError: A flag asks for what is not planned.
    """
    _check_names(flags, where)
    for flag, what in _NOT_PLANNED.items():
        if flag in flags and (not flags[flag] or one(flags, flag) not in ("0", "1", "None")):
            raise UnsupportedError(
                f"{where}: --{flag} asks for {what}, which is not planned: drop it to plan the "
                "rest."
            )
    check_muon_flags(flags)
    sizes = {name: count(flags, flag) for flag, name in SIZE_FLAGS.items() if flag in flags}
    model = _model(source.model, flags, where)
    check_model(model)
    return Source(
        model,
        replace(source.sizes, **sizes),
        _settings(source.settings, flags),
        layout_of(flags) or source.layout,
        one(flags, "muon-hardware", "") or source.hardware,
    )


def is_known(word: str) -> bool:
    """Return whether a word of a command line is a flag that is read, or one of Muon's."""
    return word.startswith("--") and (word[2:] in _KNOWN or word.startswith("--muon-"))


def _check_names(flags: Flags, where: str) -> None:
    """Check that no flag is a misspelt one, which would be passed over as others are."""
    for flag in flags:
        if flag in _KNOWN:
            continue
        spelt = flag.replace("_", "-")
        is_muon = spelt.startswith("muon-")
        near = difflib.get_close_matches(
            spelt, MUON_FLAGS if is_muon else _KNOWN, 1, 0.6 if is_muon else _SLIP
        )
        if is_muon or near:
            advice = f"Did you mean --{near[0]}?" if near else "Drop it."
            raise ConfigurationError(f"{where}: there is no flag --{flag}. {advice}")


def _most(flag: str) -> int:
    return _MOST.get(flag, LARGEST)


def _model(model: ModelSpec, flags: Flags, where: str) -> ModelSpec:
    changes: dict[str, Any] = {
        name: count(flags, flag, least=0 if flag in _MAY_BE_ZERO else 1, most=_most(flag))
        for flag, name in _MODEL_SIZES.items()
        if flag in flags
    }
    for flag, words in _MODEL_WORDS.items():
        one_of(flags, flag, words)
        if flag in flags:
            changes[flag.replace("-", "_")] = one(flags, flag)
    changes |= {name: value for flag, (name, value) in _MODEL_SWITCHES.items() if flag in flags}
    is_grouped = model.num_query_groups != model.num_attention_heads
    if "group-query-attention" in flags:
        default = str(model.num_query_groups) if is_grouped else "1"  # Megatron's
        changes["num_query_groups"] = count(flags, "num-query-groups", default)
    elif is_grouped and "num-query-groups" in flags:
        changes["num_query_groups"] = count(flags, "num-query-groups")
    elif not is_grouped and "num-attention-heads" in flags:
        changes["num_query_groups"] = changes["num_attention_heads"]
    if "multi-latent-attention" in flags and not model.multi_latent_attention:
        changes = {**_LATENT_DEFAULTS, **changes}
    layers = changes.get("num_layers", model.num_layers)
    if "moe-layer-freq" in flags:
        changes["moe_layers"] = _moe_layers(one(flags, "moe-layer-freq"), layers)
    changed = replace(model, **changes)
    if changed.moe_layers and len(changed.moe_layers) != layers:
        raise ConfigurationError(
            f"{where}: --moe-layer-freq is a pattern of {len(changed.moe_layers)}; expected one of "
            f"{layers}, the layers of the model."
        )
    if changed.num_moe_experts and not changed.moe_ffn_hidden_size:
        changed = replace(changed, moe_ffn_hidden_size=changed.ffn_hidden_size)
    if not changed.vocab_size:
        changed = replace(changed, vocab_size=changed.padded_vocab_size or 0)
    return changed


def _settings(settings: PlanSettings, flags: Flags) -> PlanSettings:
    nbytes = {"fp32": 4, "bf16": 2}
    changes: dict[str, Any] = {}
    for flag, name in (("muon-num-ns-steps", "num_ns_steps"), ("ddp-bucket-size", "bucket_numel")):
        if flag in flags:
            changes[name] = count(flags, flag)
    if "muon-gather-budget-mib" in flags:
        changes["budget_nbytes"] = int(number(flags, "muon-gather-budget-mib") * 2**20)
    for flag, name in (
        ("muon-exchange-dtype", "exchange_nbytes"), ("muon-momentum-dtype", "momentum_nbytes"),
    ):  # fmt: skip
        if flag in flags:
            changes[name] = nbytes[one(flags, flag)]
    if "overlap-grad-reduce" in flags:
        changes["overlap"] = True
    if "ddp-pad-buckets-for-high-nccl-busbw" in flags:
        changes["high_busbw"] = True
    splits = SplitRules(
        qkv=settings.splits.qkv and "muon-no-split-qkv" not in flags,
        gated_fc1="muon-split-gated-fc1" in flags,
        heads="muon-split-heads" in flags,
    )
    if "grad-reduce-in-bf16" in flags and settings.param_nbytes == 2:
        changes["grad_nbytes"] = 2
    rules = RoutingRules(
        exclude=tuple(flags.get("muon-exclude", ())), include=tuple(flags.get("muon-include", ()))
    )
    return replace(
        settings,
        splits=splits,
        rules=rules,
        share_blocks="muon-share-blocks" in flags,
        by_bucket=any(flag in flags for flag in GATHERS_EARLY),
        products_nbytes=2 if one(flags, "muon-fp32-matmul-prec", "medium") == "medium" else 4,
        **changes,
    )


def _moe_layers(value: str, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every n-th, or a pattern such as ``([0]*3+[1]*58)``.

    As Megatron's ``moe_freq_type`` (0.19.2, training/arguments.py:326).
    """
    try:
        if "[" not in value:
            every = int(value)
            if every < 1:
                raise ValueError
            return tuple(layer % every == 0 for layer in range(num_layers))
        pattern = _evaluate(ast.parse(value.strip(), mode="eval").body)
        if not isinstance(pattern, list) or any(layer not in (0, 1) for layer in pattern):
            raise ValueError
        return tuple(bool(layer) for layer in pattern)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ConfigurationError(
            f"--moe-layer-freq is {shown(value)}: expected an integer of 1 or more, or a pattern "
            "of zeros and ones such as ([0]*3+[1]*58)."
        ) from None


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        sizes = [len(side) if isinstance(side, list) else abs(side) for side in (left, right)]
        if max(sizes) > MOST_LAYERS:
            raise ValueError  # it would be built before it could be found too long
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError
