"""Models as Megatron 0.19.2 builds them: names, whole shapes and cuts of every parameter, in order.

Fields are named as in Megatron's ``TransformerConfig``, so that the code that finds the blocks of a
fused weight reads a :class:`ModelSpec` as it reads Megatron's config. Counts of parameters agree
with what the models' authors publish; see the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.errors import ConfigurationError

MOST_MLPS = 2 * 10**5
"""Layers times experts that are planned; more would take minutes and more memory than there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        name: What it is called in messages.
        num_query_groups: Groups of q heads that share k and v.
        kv_channels: Rows of a head.
        vocab_size: Tokens, before Megatron pads them.
        max_position_embeddings: Rows of a learned position embedding.
        position_embedding_type: ``learned_absolute`` has a parameter, all others none.
        gated_linear_unit: Whether fc1 is gate and up, stacked.
        q_lora_rank: Multi-latent attention: rank of the q projection, 0 for a full one.
        kv_lora_rank: Rank of the k and v projection.
        qk_head_dim: Rows of a q or k head without position.
        qk_pos_emb_head_dim: Rows of a head that carry the position.
        v_head_dim: Rows of a v head.
        num_moe_experts: Routed experts, 0 for none.
        moe_ffn_hidden_size: Width of a routed expert.
        moe_shared_expert_intermediate_size: Width of all shared experts together, 0 for none.
        moe_layers: Whether each layer has experts; empty for all of them.
        transformer_impl: ``transformer_engine`` fuses norms into projections, ``local`` does not.
        moe_grouped_gemm: Whether the experts of a rank are one module.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    make_vocab_size_divisible_by: int = 128
    padded_vocab_size: int | None = None
    max_position_embeddings: int = 0
    position_embedding_type: str = "rope"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    normalization: str = "RMSNorm"
    untie_embeddings_and_output_weights: bool = True
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    num_moe_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_layers: tuple[bool, ...] = ()
    transformer_impl: str = "transformer_engine"
    moe_grouped_gemm: bool = True

    @property
    def is_te(self) -> bool:
        """Whether Transformer Engine's modules are used."""
        return self.transformer_impl == "transformer_engine"

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is experts."""
        return bool(self.num_moe_experts) and (not self.moe_layers or self.moe_layers[layer])

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the embedding: Megatron pads the vocabulary for tensor parallelism."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, without padding of the vocabulary."""
        chunk = chunk_params(self, range(self.num_layers), range(self.num_moe_experts), True, True,
                             self.vocab_size)  # fmt: skip
        return sum(math.prod(param.shape) for param in chunk)


class ModelParam(NamedTuple):
    """A parameter of a model chunk before any cut.

    Attributes:
        name: Global name, as in :func:`megatron_muon.integration.names.named_parameters`.
        shape: Whole shape.
        dim: Dimension that tensor parallelism cuts, ``None`` if it does not.
        stride: Parts stacked along it that are cut one by one.
        expert: Index of the routed expert that it is of, -1 for none.
        is_embedding_or_output: Megatron's mark.
        is_shared: Whether it is a tied embedding, which is reduced over pipeline stages.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    stride: int = 1
    expert: int = -1
    is_embedding_or_output: bool = False
    is_shared: bool = False


def check_model(model: ModelSpec) -> None:
    """Check that the sizes of a model, each of which can be, fit each other.

    Raises:
        ConfigurationError: They do not; the message names both.
    """
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not model.multi_latent_attention and heads % groups:
        raise ConfigurationError(
            f"{model.name}: {heads} attention heads cannot share {groups} query groups (key-value "
            "heads): expected a number of groups that divides the heads."
        )
    if model.position_embedding_type == "learned_absolute" and not model.max_position_embeddings:
        raise ConfigurationError(
            f"{model.name}: --position-embedding-type learned_absolute needs "
            "--max-position-embeddings: add it."
        )
    if model.num_layers * max(1, model.num_moe_experts) > MOST_MLPS:
        raise ConfigurationError(
            f"{model.name}: {model.num_layers} layers of {model.num_moe_experts} experts are more "
            f"than the {MOST_MLPS} experts in all that can be planned. Give fewer."
        )


def chunk_params(
    model: ModelSpec,
    layers: Sequence[int],
    experts: Sequence[int],
    is_first: bool,
    is_last: bool,
    vocab: int,
    tied_apart: bool = False,
) -> Iterator[ModelParam]:
    """Yield the parameters of a model chunk in the order of Megatron's modules.

    Args:
        model: The model.
        layers: Its layers in the chunk.
        experts: Routed experts of the rank.
        is_first: Whether the chunk embeds tokens.
        is_last: Whether it has the final norm and the output layer.
        vocab: Rows of the embedding.
        tied_apart: Whether a tied embedding lies on two pipeline stages.
    """
    embedding = "embedding.word_embeddings.weight"
    hidden, tied = model.hidden_size, not model.untie_embeddings_and_output_weights
    if is_first:
        yield ModelParam(embedding, (vocab, hidden), 0, 1, -1, True, tied and tied_apart)
        if model.position_embedding_type == "learned_absolute":
            name = "embedding.position_embeddings.weight"
            yield ModelParam(name, (model.max_position_embeddings, hidden))
    for layer in layers:
        prefix = f"decoder.layers.{layer}."
        yield from _attention(model, prefix, model.has_experts(layer))
        if model.has_experts(layer):
            yield from _experts(model, prefix, experts)
        else:
            yield from _mlp(model, f"{prefix}mlp.", model.ffn_hidden_size, norm=model.is_te)
    if is_last:
        yield from _norm(model, "decoder.final_layernorm.", hidden)
        if not tied:
            yield ModelParam("output_layer.weight", (vocab, hidden), 0, 1, -1, True)
        elif not is_first:
            yield ModelParam(embedding, (vocab, hidden), 0, 1, -1, True, tied_apart)


def _attention(model: ModelSpec, prefix: str, before_experts: bool) -> Iterator[ModelParam]:
    """Yield the norms and projections of attention (core/transformer/attention.py)."""
    hidden, te = model.hidden_size, model.is_te
    if model.multi_latent_attention or not te:
        yield from _norm(model, f"{prefix}input_layernorm.", hidden)
    attention = f"{prefix}self_attention."
    yield from (_latent if model.multi_latent_attention else _fused)(model, attention)
    if before_experts or not te:
        yield from _norm(model, f"{prefix}pre_mlp_layernorm.", hidden)


def _fused(model: ModelSpec, prefix: str) -> Iterator[ModelParam]:
    hidden, head = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * head
    rows = queries * (2 if model.attention_output_gate else 1) + 2 * model.num_query_groups * head
    yield from _linear(f"{prefix}linear_proj.", hidden, queries, 1, bias=model.add_bias_linear)
    if model.is_te:
        yield from _norm(model, f"{prefix}linear_qkv.layer_norm_", hidden)
    bias = model.add_bias_linear or model.add_qkv_bias
    yield from _linear(f"{prefix}linear_qkv.", rows, hidden, 0, bias=bias)
    if model.qk_layernorm:
        yield from _norm(model, f"{prefix}q_layernorm.", head)
        yield from _norm(model, f"{prefix}k_layernorm.", head)


def _latent(model: ModelSpec, prefix: str) -> Iterator[ModelParam]:
    """Yield the projections of multi-latent attention (core/transformer/multi_latent_attention.py).

    Transformer Engine's down projections are copied on every tensor-parallel rank, and its up
    projections hold the norms before them.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    q_rows = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    kv_rows = heads * (model.qk_head_dim + model.v_head_dim)
    latents = [("q", model.q_lora_rank, 0, q_rows)] if model.q_lora_rank else []
    latents.append(("kv", model.kv_lora_rank, model.qk_pos_emb_head_dim, kv_rows))
    fused = model.is_te and model.qk_layernorm
    yield from _linear(
        f"{prefix}linear_proj.", hidden, heads * model.v_head_dim, 1, bias=model.add_bias_linear
    )
    if not model.q_lora_rank:
        yield from _linear(f"{prefix}linear_q_proj.", q_rows, hidden, 0)
    for letter, rank, more, rows in latents:
        down = None if model.is_te else 0
        yield from _linear(f"{prefix}linear_{letter}_down_proj.", rank + more, hidden, down)
        if fused:
            yield from _norm(model, f"{prefix}linear_{letter}_up_proj.layer_norm_", rank)
        yield from _linear(f"{prefix}linear_{letter}_up_proj.", rows, rank, 0)
    if model.qk_layernorm and not fused:
        for letter, rank, _, _ in latents:
            yield from _norm(model, f"{prefix}{letter}_layernorm.", rank)


def _experts(model: ModelSpec, prefix: str, experts: Sequence[int]) -> Iterator[ModelParam]:
    """Yield router, routed experts and shared ones (core/transformer/moe)."""
    hidden, mlp = model.hidden_size, f"{prefix}mlp."
    yield ModelParam(f"{mlp}router.weight", (model.num_moe_experts, hidden))
    if model.add_bias_linear:
        yield ModelParam(f"{mlp}router.bias", (model.num_moe_experts,))
    members = [
        list(_mlp(model, f"{mlp}experts.{i}.", model.moe_ffn_hidden_size, expert=i))
        for i in experts
    ]
    if model.moe_grouped_gemm and model.is_te:
        for same in zip(*members, strict=True):
            yield from same
    else:
        for member in members:
            yield from member
    if width := model.moe_shared_expert_intermediate_size:
        if model.moe_shared_expert_gate:
            yield ModelParam(f"{mlp}shared_experts.gate_weight", (1, hidden))
        yield from _mlp(model, f"{mlp}shared_experts.", width)


def _mlp(
    model: ModelSpec, prefix: str, width: int, *, norm: bool = False, expert: int = -1
) -> Iterator[ModelParam]:
    gated, bias = 1 + model.gated_linear_unit, model.add_bias_linear
    if norm:
        yield from _norm(model, f"{prefix}linear_fc1.layer_norm_", model.hidden_size)
    yield from _linear(
        f"{prefix}linear_fc1.", gated * width, model.hidden_size, 0, gated, expert, bias
    )
    yield from _linear(f"{prefix}linear_fc2.", model.hidden_size, width, 1, 1, expert, bias)


def _linear(
    prefix: str, rows: int, columns: int, dim: int | None, stride: int = 1, expert: int = -1,
    bias: bool = False,
) -> Iterator[ModelParam]:  # fmt: skip
    yield ModelParam(f"{prefix}weight", (rows, columns), dim, stride, expert)
    if bias:
        yield ModelParam(f"{prefix}bias", (rows,), 0 if dim == 0 else None, stride, expert)


def _norm(model: ModelSpec, prefix: str, width: int) -> Iterator[ModelParam]:
    yield ModelParam(f"{prefix}weight", (width,))
    if model.normalization == "LayerNorm":
        yield ModelParam(f"{prefix}bias", (width,))


def _dense_first(num_layers: int, num_dense: int) -> tuple[bool, ...]:
    return (False,) * num_dense + (True,) * (num_layers - num_dense)


def _latent_model(name: str, heads: int, vocab: int, experts: int, num_dense: int) -> ModelSpec:
    """Return a model of DeepSeek-V3's kind (arXiv:2412.19437, section 4.2)."""
    return ModelSpec(
        name=name, num_layers=61, hidden_size=7168, ffn_hidden_size=18432,
        num_attention_heads=heads, num_query_groups=heads, kv_channels=128, vocab_size=vocab,
        qk_layernorm=True, multi_latent_attention=True, q_lora_rank=1536, kv_lora_rank=512,
        qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, num_moe_experts=experts,
        moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048,
        moe_layers=_dense_first(61, num_dense),
    )  # fmt: skip


BUILT_IN: dict[str, ModelSpec] = {
    model.name: model
    for model in (
        ModelSpec(
            name="gpt2-124m", num_layers=12, hidden_size=768, ffn_hidden_size=3072,
            num_attention_heads=12, num_query_groups=12, kv_channels=64, vocab_size=50257,
            max_position_embeddings=1024, position_embedding_type="learned_absolute",
            gated_linear_unit=False, add_bias_linear=True, normalization="LayerNorm",
            untie_embeddings_and_output_weights=False,
        ),
        ModelSpec(
            name="llama3-8b", num_layers=32, hidden_size=4096, ffn_hidden_size=14336,
            num_attention_heads=32, num_query_groups=8, kv_channels=128, vocab_size=128256,
        ),
        ModelSpec(
            name="llama3-70b", num_layers=80, hidden_size=8192, ffn_hidden_size=28672,
            num_attention_heads=64, num_query_groups=8, kv_channels=128, vocab_size=128256,
        ),
        ModelSpec(
            name="qwen3-32b", num_layers=64, hidden_size=5120, ffn_hidden_size=25600,
            num_attention_heads=64, num_query_groups=8, kv_channels=128, vocab_size=151936,
            qk_layernorm=True,
        ),
        _latent_model("deepseek-v3", 128, 129280, 256, 3),
        _latent_model("kimi-k2", 64, 163840, 384, 1),
    )
}  # fmt: skip
"""Models that the command knows by name, without the layers that predict further tokens."""
