"""Models as a Hugging Face ``config.json`` describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.flag_words import LARGEST, MOST_LAYERS, shown, size_range
from megatron_muon.planner.models import BUILT_IN, ModelSpec

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_DEEPSEEK_LIKE = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_KNOWN = ("gpt2", *_LLAMA_LIKE, *_DEEPSEEK_LIKE)


class _Config:
    """Reads the fields of a ``config.json`` and says which are missing or wrong."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where

    def need(self, name: str, least: int = 1, most: int = LARGEST) -> int:
        """Return an integer that has to be there.

        Raises:
            ConfigurationError: It is not there, no integer, or too small or large.
        """
        if self._fields.get(name) is None:
            raise ConfigurationError(
                f"{self._where}: {name} is missing; expected an integer, which a model of type "
                f"{self._fields.get('model_type')} needs."
            )
        return self.count(name, 0, least, most)

    def count(self, name: str, default: int, least: int = 1, most: int = LARGEST) -> int:
        """Return an integer, or the default where it is missing or null.

        Raises:
            ConfigurationError: It is no integer, or too small or large.
        """
        value = self._fields.get(name)
        if value is None:
            return default
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not least <= value <= most:
            raise ConfigurationError(
                f"{self._where}: {name} is {shown(value)}; expected {size_range(least, most)}."
            )
        return int(value)

    def switch(self, name: str) -> bool:
        """Return whether something is on; what is missing or null is off.

        Raises:
            ConfigurationError: It is neither true nor false.
        """
        value = self._fields.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise ConfigurationError(
            f"{self._where}: {name} is {shown(value)}; expected true or false."
        )

    def channels(self, hidden: int, heads: int) -> int:
        """Return the rows of a head: those that are given, or hidden ones over heads.

        Raises:
            ConfigurationError: These are no integer.
        """
        if self._fields.get("head_dim") is None and hidden % heads:
            raise ConfigurationError(
                f"{self._where}: a hidden size of {hidden} is no multiple of {heads} attention "
                "heads; expected a multiple, or a head_dim."
            )
        return self.count("head_dim", hidden // heads)


def fields_of(text: str, where: str) -> Mapping[str, Any]:
    """Return the fields of a JSON object.

    Raises:
        ConfigurationError: The text is something else.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON ({error}).") from None
    if not isinstance(fields, dict):
        raise ConfigurationError(
            f"{where}: expected a JSON object, as a model's config.json of Hugging Face is."
        )
    return fields


def from_hugging_face(fields: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the model that a Hugging Face ``config.json`` describes.

    Layers that predict further tokens (``num_nextn_predict_layers``) are left out.

    Raises:
        ConfigurationError: A field is missing or wrong.
        UnsupportedError: The type of the model is not known.
    """
    kind = fields.get("model_type")
    if kind is None:
        raise ConfigurationError(
            f"{where}: model_type is missing; expected one of {', '.join(_KNOWN)}."
        )
    if kind not in _KNOWN:
        raise UnsupportedError(
            f"{where}: models of type {shown(kind)} are not known; those that are: "
            f"{', '.join(_KNOWN)}. Give Megatron's flags of the model."
        )
    given = fields.get("_name_or_path")
    config, name = _Config(fields, where), given if given and isinstance(given, str) else where
    if kind == "gpt2":
        return _gpt2(config, name)
    return (_deepseek if kind in _DEEPSEEK_LIKE else _llama)(config, name, kind)


def _gpt2(config: _Config, name: str) -> ModelSpec:
    hidden, heads = config.need("n_embd"), config.need("n_head")
    return replace(
        BUILT_IN["gpt2-124m"],
        name=name,
        num_layers=config.need("n_layer", most=MOST_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=config.count("n_inner", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=config.channels(hidden, heads),
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
        num_layers=config.need("num_hidden_layers", most=MOST_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=config.need("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.count("num_key_value_heads", heads),
        kv_channels=config.channels(hidden, heads),
        vocab_size=config.need("vocab_size"),
        add_qkv_bias=kind == "qwen2" or config.switch("attention_bias"),
        qk_layernorm=kind.startswith("qwen3"),
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
        **experts,
    )


def _deepseek(config: _Config, name: str, kind: str) -> ModelSpec:
    layers, heads = (
        config.need("num_hidden_layers", most=MOST_LAYERS),
        config.need("num_attention_heads"),
    )
    width, dense = config.need("moe_intermediate_size"), config.need("first_k_dense_replace", 0)
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
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
        multi_latent_attention=True,
        q_lora_rank=config.count("q_lora_rank", 0, 0),
        kv_lora_rank=config.need("kv_lora_rank"),
        qk_head_dim=config.need("qk_nope_head_dim"),
        qk_pos_emb_head_dim=config.need("qk_rope_head_dim"),
        v_head_dim=config.need("v_head_dim"),
        num_moe_experts=config.need("n_routed_experts"),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width * config.count("n_shared_experts", 0, 0),
        moe_layers=tuple(layer >= dense for layer in range(layers)),
    )
