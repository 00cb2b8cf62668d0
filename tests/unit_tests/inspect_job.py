"""Two ranks save small checkpoints with Megatron's own code, for the tests of what reads them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WEIGHT = "decoder.layers.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
MOMENTUM = f"optimizer.state.momentum_buffer.{WEIGHT}"
MASTER = f"optimizer.state.fp32_param.{WEIGHT}"
NORM_MASTER = f"optimizer.state.param.{NORM}"
NORM_COPIED = f"optimizer.state.fp32_param.{NORM}"
NORM_MEAN = f"optimizer.state.exp_avg.{NORM}"
RNG = "rng_state"


def tensors() -> dict[str, torch.Tensor]:
    """Return the whole tensors, as one process in plain torch has them."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    master, norm = draw(2, 6, 4), draw(4)
    return {
        WEIGHT: master.bfloat16(),
        NORM: norm.bfloat16(),
        MOMENTUM: draw(2, 6, 4),
        MASTER: master,
        NORM_MASTER: norm,
        NORM_MEAN: draw(4),
    }


def common(**changed: Any) -> dict[str, Any]:
    """Return the common state of a run in bf16, with arguments changed."""
    args = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 2,
        "bf16": True,
        "fp16": False,
        "consumed_train_samples": 28,
        "lr": 2e-3,
    }
    record = {
        "version": 1,
        "precision": "bf16",
        "plan": ["0123abcd"],
        "settings": {"layout": "flat"},
    }
    return {
        "args": Namespace(**args | changed),
        "iteration": 7,
        "opt_param_scheduler": {"num_steps": 28, "lr_decay_style": "linear"},
        "optimizer": {
            0: {"optimizer": {"param_groups": [{"momentum": 0.95}], "muon": record}},
            1: {
                "optimizer": {
                    "param_groups": [{"betas": (0.9, 0.95)}],
                    "state": {"common_step": torch.tensor(7.0)},
                }
            },
        },
    }


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint to save.

    Attributes:
        folder: Where to.
        tensors: Whole tensors by key; of three dimensions, in halves by rank.
        common: The common state.
        seed: What the generator's state is made of.
        rng_ranks: Tensor-parallel ranks that have a generator of their own, 1 or 2.
    """

    folder: str
    tensors: dict[str, torch.Tensor] = field(default_factory=tensors)
    common: dict[str, Any] = field(default_factory=common)
    seed: int = 3
    rng_ranks: int = 2


def save(*checkpoints: Saved) -> None:
    """Save checkpoints, one after the other; on two ranks."""
    import megatron_muon

    megatron_muon.install(device="cpu")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for checkpoint in checkpoints:
        shards: dict[str, Any] = {}
        for key, value in checkpoint.tensors.items():
            if value.dim() == 3:
                half = value.chunk(num_ranks, dim=1)[rank].clone()
                shards[key] = ShardedTensor.from_rank_offsets(key, half, (1, rank, num_ranks))
            else:
                shards[key] = ShardedTensor.from_rank_offsets(key, value.clone(), replica_id=rank)
        tp_rank = rank % checkpoint.rng_ranks
        shards[RNG] = ShardedObject(
            RNG,
            {"seed": torch.tensor([checkpoint.seed, tp_rank])},
            (1, checkpoint.rng_ranks),
            (0, tp_rank),
            replica_id=rank // checkpoint.rng_ranks,
        )
        Path(checkpoint.folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**checkpoint.common, "model": shards}, checkpoint.folder)
