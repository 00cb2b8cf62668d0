"""Where a model and its sizes come from: a name, a Hugging Face config, or Megatron's flags."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_muon.bookkeeping.routing import RoutingRules, SplitRules
from megatron_muon.bookkeeping.stage import MIN_BUDGET_MIB
from megatron_muon.errors import ConfigurationError, HostError, UnsupportedError
from megatron_muon.planner.job import PlanSettings
from megatron_muon.planner.models import BUILT_IN, ModelSpec
from megatron_muon.planner.sizes import ParallelSizes

Flags = Mapping[str, Sequence[str]]
"""The values behind each flag, by its name without dashes; none behind a switch."""


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


def read_source(given: str | None, flags: Sequence[str]) -> Source:
    """Return the model that a name or file says, changed by Megatron's flags.

    Args:
        given: A built-in name, a Hugging Face ``config.json`` or its folder, a file of Megatron's
            flags (words, a shell script's array, or YAML with ``MODEL_ARGS``), or ``None`` where
            the flags say all.
        flags: Megatron's flags and ours, as on a command line.

    Raises:
        ConfigurationError: It is none of these, or something is missing; the message names it.
        UnsupportedError: The model has a part that is not planned.
    """
    more = parse_flags(flags)
    if given is None:
        if not more:
            raise ConfigurationError(
                f"no model: give one of {', '.join(BUILT_IN)}, a config.json, a file of Megatron's "
                "flags, or these flags behind `--`."
            )
        return from_flags(more, "the command line")
    if given in BUILT_IN:
        return _changed(Source(BUILT_IN[given]), more, given)
    path = Path(given)
    if path.is_dir():
        names = ("config.json", "model_config.yaml")
        path = next((path / name for name in names if (path / name).is_file()), path)
    if not path.is_file():
        raise ConfigurationError(
            f"{given}: no such file, and no built-in model; those are {', '.join(BUILT_IN)}."
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{given}: cannot be read as text ({error}).") from None
    if path.suffix == ".json":
        return _changed(Source(from_hugging_face(_as_json(text, given), given)), more, given)
    words = _yaml_words(text, given) if path.suffix in (".yaml", ".yml") else _words(text, given)
    # Of a flag that is given twice the last counts, as for Megatron.
    return from_flags({**parse_flags(words), **more}, given)


def parse_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the values behind each flag; those of a repeated ``--muon-exclude`` add up."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            name = name.replace("_", "-")
            kept = found.get(name, []) if name in ("muon-exclude", "muon-include") else []
            found[name] = [*kept, *([value] if has_value else [])]
        elif word == _END:
            name = ""
        elif name:
            found[name].append(word)
    return found


# Megatron's flags ---------------------------------------------------------------------------------

_END = ""
"""Stands for what ends the values of a flag in a shell script."""

_OF_SHELL = re.compile(r"[()]|[A-Za-z_]\w*\+?=.*|\$\{\w+\[@\]\}")
"""Brackets of an array, an assignment, an array that is passed on."""

_Rule = tuple[str, Callable[[str, str], Any]]


def _integer(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"--{flag} is {value!r}: expected an integer.") from None


def _text(flag: str, value: str) -> str:
    return value


_MODEL_VALUES: dict[str, _Rule] = {
    flag: (flag.replace("-", "_"), _integer)
    for flag in (
        "num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels vocab-size "
        "padded-vocab-size make-vocab-size-divisible-by max-position-embeddings q-lora-rank "
        "kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim moe-ffn-hidden-size "
        "moe-shared-expert-intermediate-size"
    ).split()
} | {
    "num-experts": ("num_moe_experts", _integer),
    "normalization": ("normalization", _text),
    "position-embedding-type": ("position_embedding_type", _text),
    "transformer-impl": ("transformer_impl", _text),
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
_SIZES: dict[str, str] = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "decoder-first-pipeline-num-layers": "first_layers",
    "decoder-last-pipeline-num-layers": "last_layers",
}
_NOT_PLANNED = {
    "mtp-num-layers": "layers that predict further tokens",
    "pipeline-model-parallel-layout": "a pipeline layout of one's own (use "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers)",
    "account-for-embedding-in-pipeline-split": "stages that count the embedding",
    "account-for-loss-in-pipeline-split": "stages that count the loss",
    "tensor-parallel-num-weight-shards": "generalized tensor parallelism",
    "expert-tensor-parallel-num-weight-shards": "generalized tensor parallelism",
    "fp8-param-gather": "weights kept in FP8",
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

MUON_FLAGS = frozenset(
    """muon-clip muon-coefficient-type muon-exchange-dtype muon-exclude muon-extra-scale-factor
    muon-fp32-matmul-prec muon-gather-budget-mib muon-hardware muon-include muon-layout
    muon-match-adamw-rms muon-max-skipped-steps muon-momentum muon-momentum-dtype muon-nesterov
    muon-no-split-qkv muon-ns-kernel muon-num-ns-steps muon-overlap-param-gather muon-report
    muon-scalar-lr muon-scalar-min-lr muon-scalar-optimizer muon-scale-mode muon-share-blocks
    muon-split-gated-fc1 muon-split-heads muon-tp-mode muon-use-syrk""".split()
)
"""Muon's flags, Megatron's and ours; a misspelt one would be passed over as others are."""

_LATENT_DEFAULTS = {
    "q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
"""Megatron's (0.19.2, transformer/transformer_config.py:2909)."""


def from_flags(flags: Flags, where: str) -> Source:
    """Return the model that Megatron's flags describe, with Megatron's defaults.

    Flags that are no part of model, sizes or plan (learning rates, data) are passed over.

    Raises:
        ConfigurationError: A flag that the model needs is missing, or one has a wrong value.
        UnsupportedError: A flag asks for what is not planned.
    """
    needed = ("num-layers", "hidden-size", "num-attention-heads")
    missing = [f"--{flag}" for flag in needed if flag not in flags]
    if not {"vocab-size", "padded-vocab-size"} & set(flags):
        missing.append("--vocab-size")
    learned = _one(flags, "position-embedding-type", "learned_absolute") == "learned_absolute"
    if learned and "max-position-embeddings" not in flags:
        missing.append("--max-position-embeddings")
    if missing:
        raise ConfigurationError(
            f"{where} does not say {', '.join(missing)}: give what is missing behind `--`."
        )
    layers, hidden, heads = (_integer(flag, _one(flags, flag)) for flag in needed)
    swiglu, latent = "swiglu" in flags, "multi-latent-attention" in flags
    experts = _integer("num-experts", _one(flags, "num-experts", "0"))
    # As Megatron's arguments.py:1280.
    ffn = hidden * 8 // 3 // 64 * 64 if swiglu else 4 * hidden
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
        num_moe_experts=experts,
        **(_LATENT_DEFAULTS if latent else {}),  # type: ignore[arg-type]
    )
    settings = PlanSettings(overlap="overlap-grad-reduce" in flags)
    if not {"bf16", "fp16"} & set(flags):
        settings = replace(settings, param_nbytes=4)
    elif "fp16" in flags and "accumulate-allreduce-grads-in-fp32" not in flags:
        settings = replace(settings, grad_nbytes=2)
    source = _changed(Source(model, settings=settings), flags, where)
    model = source.model
    if experts and not model.moe_ffn_hidden_size:
        model = replace(model, moe_ffn_hidden_size=model.ffn_hidden_size)
    if not model.vocab_size:
        model = replace(model, vocab_size=model.padded_vocab_size or 0)
    return replace(source, model=model)


def _changed(source: Source, flags: Flags, where: str) -> Source:
    """Return a source with what flags say about it in the place of what it said."""
    for flag, what in _NOT_PLANNED.items():
        if flag in flags and _one(flags, flag, "") not in ("0", "1", "None"):
            raise UnsupportedError(
                f"{where}: --{flag} asks for {what}, which is not planned: drop it to plan the "
                "rest."
            )
    for flag in flags:
        if flag.startswith("muon-") and flag not in MUON_FLAGS:
            near = difflib.get_close_matches(flag, MUON_FLAGS, n=1)
            advice = f"Did you mean --{near[0]}?" if near else "Drop it."
            raise ConfigurationError(f"{where}: there is no flag --{flag}. {advice}")
    model: dict[str, Any] = {}
    for flag, (name, convert) in _MODEL_VALUES.items():
        if flag in flags:
            model[name] = convert(flag, _one(flags, flag))
    for flag, (name, value) in _MODEL_SWITCHES.items():
        if flag in flags:
            model[name] = value
    if "num-query-groups" in flags and "group-query-attention" in flags:
        groups = _one(flags, "num-query-groups")
        model["num_query_groups"] = _integer("num-query-groups", groups)
    layers = model.get("num_layers", source.model.num_layers)
    if "moe-layer-freq" in flags:
        model["moe_layers"] = _moe_layers(_one(flags, "moe-layer-freq"), layers)
    moe_layers = model.get("moe_layers", source.model.moe_layers)
    if moe_layers and len(moe_layers) != layers:
        raise ConfigurationError(
            f"{where}: --moe-layer-freq says {len(moe_layers)} layers, the model has {layers}."
        )
    _one_of(flags, "transformer-impl", ("local", "transformer_engine"))
    _one_of(flags, "normalization", ("LayerNorm", "RMSNorm"))
    sizes = {name: _integer(flag, _one(flags, flag)) for flag, name in _SIZES.items()
             if flag in flags}  # fmt: skip
    return Source(
        replace(source.model, **model),
        replace(source.sizes, **sizes),
        _settings(source.settings, flags),
        _one(flags, "muon-layout", "") or source.layout,
        _one(flags, "muon-hardware", "") or source.hardware,
    )


def _settings(settings: PlanSettings, flags: Flags) -> PlanSettings:
    _one_of(flags, "muon-layout", ("owner", "flat", "auto"))
    dtypes = {"fp32": 4, "bf16": 2}
    for flag in ("muon-exchange-dtype", "muon-momentum-dtype"):
        _one_of(flags, flag, tuple(dtypes))
    if _one(flags, "muon-tp-mode", "owner") != "owner":
        raise UnsupportedError(
            f"--muon-tp-mode {_one(flags, 'muon-tp-mode')} is not planned: its ranks all work on "
            "the same matrices. Drop it."
        )
    changes: dict[str, Any] = {}
    for flag, name in (("muon-num-ns-steps", "num_ns_steps"), ("ddp-bucket-size", "bucket_numel")):
        if flag in flags:
            changes[name] = _integer(flag, _one(flags, flag))
            if changes[name] < 1:
                raise ConfigurationError(
                    f"--{flag} is {changes[name]}: expected an integer of 1 or more."
                )
    if "muon-gather-budget-mib" in flags:
        changes["budget_nbytes"] = _budget_nbytes(_one(flags, "muon-gather-budget-mib"))
    for flag, name in (
        ("muon-exchange-dtype", "exchange_nbytes"), ("muon-momentum-dtype", "momentum_nbytes"),
    ):  # fmt: skip
        if flag in flags:
            changes[name] = dtypes[_one(flags, flag)]
    if "overlap-grad-reduce" in flags:
        changes["overlap"] = True
    if "ddp-pad-buckets-for-high-nccl-busbw" in flags:
        changes["high_busbw"] = True
    splits = SplitRules(
        qkv=settings.splits.qkv and "muon-no-split-qkv" not in flags,
        gated_fc1="muon-split-gated-fc1" in flags,
        heads="muon-split-heads" in flags,
    )
    rules = RoutingRules(
        exclude=tuple(flags.get("muon-exclude", ())), include=tuple(flags.get("muon-include", ()))
    )
    return replace(
        settings,
        splits=splits,
        rules=rules,
        share_blocks="muon-share-blocks" in flags,
        by_bucket="muon-overlap-param-gather" in flags,
        **changes,
    )


def _budget_nbytes(value: str) -> int:
    """Return ``--muon-gather-budget-mib`` in bytes, refused where a run refuses it."""
    try:
        budget_mib = float(value)
    except ValueError:
        budget_mib = math.nan
    if not MIN_BUDGET_MIB <= budget_mib < math.inf:
        raise ConfigurationError(
            f"--muon-gather-budget-mib is {value!r}: expected {MIN_BUDGET_MIB} MiB (4 KiB) or more."
        )
    return int(budget_mib * 2**20)


def _one(flags: Flags, flag: str, default: str | None = None) -> str:
    """Return the one value of a flag."""
    if flag not in flags and default is not None:
        return default
    values = flags[flag]
    if len(values) != 1:
        if not values and default is not None:
            return default
        found = " ".join(values) or "nothing"
        raise ConfigurationError(f"--{flag} is {found}: expected one value.")
    return values[0]


def _one_of(flags: Flags, flag: str, legal: tuple[str, ...]) -> None:
    if flag in flags and _one(flags, flag) not in legal:
        raise ConfigurationError(
            f"--{flag} is {_one(flags, flag)!r}: expected one of {', '.join(legal)}."
        )


def _moe_layers(value: str, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every n-th, or a pattern such as ``([0]*3+[1]*58)``.

    As Megatron's ``moe_freq_type`` (0.19.2, training/arguments.py:326).
    """
    try:
        if "[" not in value:
            every = int(value)
            return tuple(layer % every == 0 for layer in range(num_layers))
        pattern = _evaluate(ast.parse(value, mode="eval").body)
        if not isinstance(pattern, list):
            raise ValueError
        return tuple(bool(layer) for layer in pattern)
    except (ValueError, SyntaxError, ZeroDivisionError, TypeError):
        raise ConfigurationError(
            f"--moe-layer-freq is {value!r}: expected an integer, or a pattern of zeros and ones "
            "such as ([0]*3+[1]*58)."
        ) from None


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError


def _words(text: str, where: str) -> list[str]:
    """Return the words of a file of flags, also of those in a shell script's arrays."""
    try:
        words = [_END if _OF_SHELL.fullmatch(word) else word
                 for word in shlex.split(text.replace("\\\n", " "), comments=True)]  # fmt: skip
    except ValueError as error:
        raise ConfigurationError(f"{where}: not a list of flags ({error}).") from None
    if not any(word.startswith("--") for word in words):
        raise ConfigurationError(f"{where}: has no flag of Megatron's, such as --num-layers 32.")
    return words


def _yaml_words(text: str, where: str) -> list[str]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise HostError(f"{where}: reading YAML needs the package pyyaml: install it.") from None
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where}: not YAML ({' '.join(str(error).split())}).") from None
    values = fields.get("MODEL_ARGS", fields) if isinstance(fields, dict) else None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{where}: expected flags and values, or MODEL_ARGS with these.")
    words: list[str] = []
    for flag, value in values.items():
        if value is False or value is None:
            continue
        words.append(f"--{str(flag).removeprefix('--')}")
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


# Hugging Face -------------------------------------------------------------------------------------

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_DEEPSEEK_LIKE = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_KNOWN = ("gpt2", *_LLAMA_LIKE, *_DEEPSEEK_LIKE)


class _Config:
    """Reads the fields of a ``config.json`` and says which are missing."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where

    def need(self, name: str) -> int:
        """Return an integer that has to be there.

        Raises:
            ConfigurationError: It is not there, or no integer.
        """
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            found = "is missing" if value is None else f"is {value!r}"
            raise ConfigurationError(
                f"{self._where}: {name} {found}; expected an integer, which a model of type "
                f"{self._fields.get('model_type')} needs."
            )
        return value

    def get(self, name: str, default: Any) -> Any:
        """Return a value, or the default where it is missing or null."""
        value = self._fields.get(name)
        return default if value is None else value


def from_hugging_face(fields: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the model that a Hugging Face ``config.json`` describes.

    Layers that predict further tokens (``num_nextn_predict_layers``) are left out.

    Raises:
        ConfigurationError: A field is missing.
        UnsupportedError: The type of the model is not known.
    """
    kind = fields.get("model_type")
    if kind is None:
        raise ConfigurationError(
            f"{where}: model_type is missing; expected one of {', '.join(_KNOWN)}."
        )
    if kind not in _KNOWN:
        raise UnsupportedError(
            f"{where}: models of type {kind!r} are not known; those that are: {', '.join(_KNOWN)}. "
            "Give Megatron's flags of the model."
        )
    config, name = _Config(fields, where), str(fields.get("_name_or_path") or where)
    if kind == "gpt2":
        return _gpt2(config, name)
    return (_deepseek if kind in _DEEPSEEK_LIKE else _llama)(config, name, kind)


def _gpt2(config: _Config, name: str) -> ModelSpec:
    hidden, heads = config.need("n_embd"), config.need("n_head")
    return replace(
        BUILT_IN["gpt2-124m"],
        name=name,
        num_layers=config.need("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=config.get("n_inner", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=config.need("vocab_size"),
        max_position_embeddings=config.need("n_positions"),
    )


def _llama(config: _Config, name: str, kind: str) -> ModelSpec:
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    experts: dict[str, Any] = {}
    if kind == "mixtral":
        experts = {"num_moe_experts": config.need("num_local_experts"),
                   "moe_ffn_hidden_size": config.need("intermediate_size")}  # fmt: skip
    elif kind == "qwen3_moe":
        experts = {"num_moe_experts": config.need("num_experts"),
                   "moe_ffn_hidden_size": config.need("moe_intermediate_size")}  # fmt: skip
    return ModelSpec(
        name=name,
        num_layers=config.need("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=config.need("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads", heads),
        kv_channels=config.get("head_dim", hidden // heads),
        vocab_size=config.need("vocab_size"),
        add_qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        qk_layernorm=kind.startswith("qwen3"),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        **experts,
    )


def _deepseek(config: _Config, name: str, kind: str) -> ModelSpec:
    layers, heads = config.need("num_hidden_layers"), config.need("num_attention_heads")
    width, dense = config.need("moe_intermediate_size"), config.need("first_k_dense_replace")
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=config.need("hidden_size"),
        ffn_hidden_size=config.need("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=config.need("qk_nope_head_dim"),
        vocab_size=config.need("vocab_size"),
        qk_layernorm=True,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        multi_latent_attention=True,
        q_lora_rank=config.get("q_lora_rank", 0),
        kv_lora_rank=config.need("kv_lora_rank"),
        qk_head_dim=config.need("qk_nope_head_dim"),
        qk_pos_emb_head_dim=config.need("qk_rope_head_dim"),
        v_head_dim=config.need("v_head_dim"),
        num_moe_experts=config.need("n_routed_experts"),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width * config.get("n_shared_experts", 0),
        moe_layers=tuple(layer >= dense for layer in range(layers)),
    )


def _as_json(text: str, where: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}: not JSON ({error}).") from None
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where}: expected a JSON object.")
    return fields
