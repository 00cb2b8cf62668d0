"""Bytes that a rank keeps for weights and gradients, and those that a gather of weights takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.optimizer.masters import is_quantized, planes_of
from megatron_muon.optimizer.param_sync import Staging


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, or the largest of several, each by itself.

    Attributes:
        num_quantized: Quantized weights.
        quantized_nbytes: Their codes and scales.
        plain_nbytes: All other weights, with the padding of the buffers they lie in.
        gradients_nbytes: DDP's gradient buffers.
        staging_nbytes: Masters written before each gather of weights, into gradient buffers and
            those of other weights; it takes no memory of its own.
        gather_nbytes: Scratch of a gather of weights that goes through no buffer: without a layout
            and without overlap.
    """

    num_quantized: int = 0
    quantized_nbytes: int = 0
    plain_nbytes: int = 0
    gradients_nbytes: int = 0
    staging_nbytes: int = 0
    gather_nbytes: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return what the report holds."""
        return {
            "parameters_bytes": self.quantized_nbytes + self.plain_nbytes,
            "gradients_bytes": self.gradients_nbytes,
            "staging_bytes": self.staging_nbytes,
            "gather_bytes": self.gather_nbytes,
        }


def measure_memory(
    model_chunks: Sequence[Any], stagings: Iterable[Staging], gather_nbytes: int
) -> Memory:
    """Add up what this rank keeps.

    Args:
        model_chunks: Model chunks, most often wrapped in DDP.
        stagings: What is written before the gathers.
        gather_nbytes: Scratch of a gather that goes through no buffer.
    """
    # A tied embedding is in two chunks.
    params = list(dict.fromkeys(p for chunk in model_chunks for p in chunk.parameters()))
    quantized = [param for param in params if is_quantized(param)]
    plain = [param for param in params if not is_quantized(param)]
    buffers = [buffer for chunk in model_chunks for buffer in _buffers(chunk)]
    return Memory(
        num_quantized=len(quantized),
        quantized_nbytes=_nbytes(plane for param in quantized for plane in planes_of(param)),
        plain_nbytes=_nbytes(param.detach() for param in plain),
        gradients_nbytes=_nbytes(buffer.grad_data for buffer in buffers),
        staging_nbytes=sum(staging.nbytes for staging in stagings),
        gather_nbytes=gather_nbytes,
    )


def largest(memories: Sequence[Memory]) -> Memory:
    """Return the largest value of each number."""
    return Memory(*(max(getattr(m, name) for m in memories) for name in Memory.__slots__))


def _buffers(chunk: Any) -> Iterator[Any]:
    # What is not wrapped in DDP has a method named buffers.
    if hasattr(chunk, "bucket_groups"):
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each once: a weight may lie in a buffer."""
    storages = {storage.data_ptr(): storage.nbytes()
                for storage in (tensor.untyped_storage() for tensor in tensors)}  # fmt: skip
    return sum(storages.values())
