"""Weights kept in MXFP8 by Transformer Engine's own classes, on a GPU that has MXFP8."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0),
        reason="needs a GPU with MXFP8 (compute capability 10.0)",
    ),
]

STEPS = 3


@pytest.fixture
def one_rank(monkeypatch):
    """Megatron on one GPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from megatron_muon.integration.install import install, uninstall

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():  # fmt: skip
        monkeypatch.setitem(os.environ, name, value)
    install(device="cuda")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    uninstall()


def trained(overlap):
    """Train a small GPT; return its losses, chunk and optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.training.models.dist_utils import _ddp_wrap

    from megatron_muon.integration.ddp import tag_params_for_buffer_routing
    from megatron_muon.optimizer.config import MuonConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, bf16=True,
        params_dtype=torch.bfloat16, fp8="e4m3", fp8_recipe="mxfp8", fp8_param=True,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False,
    )  # fmt: skip
    torch.manual_seed(1)
    with get_fp8_context(config, is_init=True):
        model = GPTModel(
            config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=128,
            max_sequence_length=32, position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
    chunk = Float16Module(config, model.cuda())
    tag_params_for_buffer_routing([chunk])
    (chunk,) = _ddp_wrap(
        [chunk], False,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, fp8_param_gather=True,
            overlap_param_gather=overlap, overlap_grad_reduce=overlap,
            reuse_grad_buf_for_mxfp8_param_ag=True,
        ),
        False, pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    optimizer = get_megatron_optimizer(
        MuonConfig(
            optimizer="muon", lr=1e-2, min_lr=1e-2, bf16=True, params_dtype=torch.bfloat16,
            use_layer_wise_distributed_optimizer=True, overlap_param_gather=overlap,
            fp8_recipe="mxfp8", reuse_grad_buf_for_mxfp8_param_ag=True,
        ),
        [chunk],
    )  # fmt: skip
    tokens = torch.arange(4 * 32, device="cuda").view(4, 32) % 128
    positions = torch.arange(32, device="cuda").expand(4, -1)
    losses = []
    for _ in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = chunk(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        chunk.finish_grad_sync()
        assert optimizer.step()[0]
        losses.append(float(loss))
    chunk.start_param_sync(force_sync=True)
    return losses, chunk, optimizer


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_those_of_their_masters(one_rank, overlap):
    from megatron_muon.optimizer.masters import is_quantized, masters_of

    losses, chunk, optimizer = trained(overlap)
    assert losses[-1] < losses[0]
    masters = {p: m for leaf in optimizer.leaves for p, m in masters_of(leaf).items()}
    quantized = [param for param in chunk.parameters() if is_quantized(param)]
    assert quantized
    for param in quantized:
        expected = param.data._quantizer(masters[param].view(param.shape).bfloat16())
        assert torch.equal(param.data._rowwise_data, expected._rowwise_data)
        assert torch.equal(param.data._columnwise_data, expected._columnwise_data)
