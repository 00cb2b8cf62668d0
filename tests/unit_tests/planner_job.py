"""One rank's part of the planner's tests: what a real run plans, and what Megatron builds."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.testing.law.build import build_model, build_optimizer, parallel_state, wrap
from megatron_muon.testing.law.case import Case


def fingerprints(cases: Sequence[Case]) -> list[str]:
    """Return for each case the fingerprint in the block that a run prints, on the first rank."""
    import megatron_muon

    megatron_muon.install(device="cpu")
    found = []
    for case in cases:
        with parallel_state(case.tp, case.pp, case.vpp, case.ep, case.etp):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                build_optimizer(case, wrap(case, build_model(case)))
        found += re.findall(r"  plan ([0-9a-f]{16}): ", said.getvalue())
    return found


class NoAttention(torch.nn.Module):
    """Stands for the part of attention that has no parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def chunk(changes: dict[str, Any], latent: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each parameter of Megatron's GPT, in its order."""
    import megatron_muon

    megatron_muon.install(device="cpu")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_muon.integration.names import named_parameters

    learned = changes.pop("learned", False)
    tied = changes.pop("tied", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=2, num_attention_heads=4, use_cpu_initialization=True, **changes
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    )
    if latent:
        # 0.19.2's attention without Transformer Engine refuses the arguments of this one's heads;
        # it has no parameters.
        spec.submodules.self_attention.submodules.core_attention = NoAttention
    with parallel_state(1):
        model = GPTModel(
            config, spec, vocab_size=128, max_sequence_length=16,
            position_embedding_type="learned_absolute" if learned else "rope",
            share_embeddings_and_output_weights=tied,
        )  # fmt: skip
        return [(entry.name, tuple(entry.param.shape)) for entry in named_parameters(model)]
