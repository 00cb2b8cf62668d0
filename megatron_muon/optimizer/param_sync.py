"""New weights on their way into a gather that borrows the gradient buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.errors import ConfigurationError
from megatron_muon.optimizer.masters import is_quantized, masters_of, quantize

STAGING = "muon_staging"
"""Attribute of one of DDP's bucket groups: its :class:`Staging`."""


@dataclass(frozen=True, slots=True)
class Staging:
    """What this rank writes into the buffer of a bucket group before each gather of it.

    DDP keeps no bf16 copy of quantized weights: the gather borrows the gradient buffer, which is
    zeroed once every rank has quantized what came. So the masters have to be written again before
    each gather, in training, before an evaluation or a checkpoint.

    Attributes:
        masters: fp32 masters, or pieces.
        places: Where each goes in the buffer that is gathered, flat.
        owned: Quantized weights and masters where no buffer is shared: the owner sends its master
            and quantizes its own weight as the others do.
    """

    masters: list[torch.Tensor]
    places: list[torch.Tensor]
    owned: list[tuple[torch.nn.Parameter, torch.Tensor]]

    @torch.no_grad()
    def stage(self) -> None:
        """Write the masters."""
        if self.places:
            masters = [master.detach().view(-1) for master in self.masters]
            torch._foreach_copy_(self.places, masters)
        quantize(self.owned)

    @property
    def nbytes(self) -> int:
        """Bytes that are written into buffers; without a layout there are none."""
        return sum(place.numel() * place.element_size() for place in self.places)


def install_staging(leaves: Sequence[Any], model_chunks: Sequence[Any]) -> list[Staging]:
    """Let each bucket group with quantized weights stage what this rank steps of it.

    Args:
        leaves: The optimizers that hold masters.
        model_chunks: DDP-wrapped model chunks.

    Returns:
        What was installed.
    """
    held = {param: (leaf, master)
            for leaf in leaves for param, master in masters_of(leaf).items()}  # fmt: skip
    installed = []
    for chunk in model_chunks:
        reuses = getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            staging = _staging(group, held) if reuses else None
            setattr(group, STAGING, staging)
            if staging is not None:
                installed.append(staging)
    return installed


def _check_trained(param: torch.nn.Parameter, bucket: Any) -> None:
    """Refuse a weight that DDP gathers and nobody steps: it would be made of what lies there."""
    if bucket.param_data is not None and is_quantized(param) and not param.requires_grad:
        raise ConfigurationError(
            f"A quantized weight of shape {tuple(param.shape)} was frozen after the model was "
            "wrapped in DDP, which would lose it. Set requires_grad before wrapping."
        )


def _staging(group: Any, held: dict[torch.nn.Parameter, tuple[Any, torch.Tensor]]) -> Staging:
    staging = Staging([], [], [])
    for bucket in group.buckets:
        for param in bucket.params_list:
            if param not in held:
                _check_trained(param, bucket)
                continue
            leaf, master = held[param]
            is_sharded = isinstance(leaf, DistributedOptimizer)
            if bucket.param_data is None:
                if is_quantized(param):
                    staging.owned.append((param, master))
            elif is_quantized(param) or (is_sharded and param.dtype != torch.float32):
                start, _ = bucket.param_to_index[param]
                if is_sharded:
                    start += leaf._get_model_param_range_map(param)["param"].start
                place = bucket.param_data.view(-1)[start : start + master.numel()]
                staging.masters.append(master)
                staging.places.append(place)
    return staging
