"""Reading a checkpoint without this package and without Megatron's loader, to the last bit.

Tests hold the product's checkpoints to this reader: torch's own, in one process without a process
group.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Leaves = dict[str, Any]
"""Every value by the path that leads to it; tensors and arrays as dtype, shape and bytes."""


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Return where Megatron saves an iteration."""
    return folder / f"iter_{iteration:07d}"


def read_all(folder: Path) -> Leaves:
    """Read everything in the folder of one iteration, of either format.

    Left out are the run's arguments: they hold paths, and where to stop.
    """
    if (folder / ".metadata").is_file():
        tree = _read_distributed(folder)
    else:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        tree = {str(path.relative_to(folder)): _load(path) for path in files}
    return dict(_leaves("", tree))


def differences(one: Leaves, other: Leaves) -> list[str]:
    """Return the paths of what only one of two has or what differs in any bit."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def _read_distributed(folder: Path) -> dict[str, Any]:
    """Read every tensor and object of a ``torch_dist`` checkpoint."""
    reader = checkpoint.FileSystemReader(folder)
    state: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        if isinstance(item, TensorStorageMetadata) else None
        for key, item in reader.read_metadata().state_dict_metadata.items()
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        checkpoint.load(state, storage_reader=reader, no_dist=True)
    common = folder / "common.pt"
    return state | ({"common": _load(common)} if common.is_file() else {})


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, argparse.Namespace):
        return
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, (str(value.dtype), tuple(value.shape), data)
    elif isinstance(value, np.ndarray):
        yield path, (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}", item)
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for position, item in enumerate(value):
            yield from _leaves(f"{path}/{position}", item)
    elif isinstance(value, str | bytes | int | float | np.generic | Enum | None):
        yield path, repr(value)  # a NaN equals itself, and 1 is not 1.0
    else:
        yield from _leaves(f"{path}/{type(value).__name__}", vars(value))
