"""Names and shards of parameters, on modules that need no process group."""

from __future__ import annotations

import pytest
import torch

from megatron_muon.errors import UnsupportedError
from megatron_muon.integration.names import ParamShard, named_parameters


class _Group:
    """Rank 1 of 2."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def _model(*, group_around: bool) -> torch.nn.Module:
    """A linear attention's convolution: cut by tensor parallelism, held by a plain module."""
    model = torch.nn.Module()
    model.mixer = torch.nn.Module()
    if group_around:
        model.mixer.tp_group = _Group()
    model.mixer.conv1d = torch.nn.Conv1d(4, 4, 3, groups=4, bias=False)
    model.mixer.norm = torch.nn.LayerNorm(4)
    weight = model.mixer.conv1d.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    return model


def test_a_plain_module_is_cut_by_the_group_of_the_module_around_it() -> None:
    shards = {e.name: e.shard for e in named_parameters(_model(group_around=True))}
    assert shards["mixer.conv1d.weight"] == ParamShard(0, 1, 2, 1)
    assert shards["mixer.norm.weight"] == ParamShard()


def test_a_cut_weight_without_any_group_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"mixer\.conv1d\.weight"):
        list(named_parameters(_model(group_around=False)))
