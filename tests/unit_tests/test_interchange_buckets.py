"""Where stock Megatron puts parameters in buckets, found from the sizes of the buckets alone."""

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_muon.checkpoint.files import CheckpointIndex, StoredTensor
from megatron_muon.checkpoint.keys import EXP_AVG, MASTER, SHARDED_MASTER
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.state.stock import (
    BucketPlace,
    Laid,
    bucket_places,
    in_buckets,
    lay_out,
)

INDEX = CheckpointIndex(Path("a_checkpoint"), {}, {}, None)


def params(seed, tied=None):
    """Return parameters in the model's order, of which one may be a tied embedding."""
    draw = random.Random(seed)
    made = [torch.nn.Parameter(torch.empty(draw.randint(1, 700))) for _ in range(12)]
    if tied is not None:
        made[tied].shared_embedding = True
    return made


def of_megatron(made, bucket_size, dp, pads=False):
    """Return Megatron's own layout: bucket and start in it of each, and the buckets' sizes."""
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        made, bucket_size, dp, SimpleNamespace(pad_buckets_for_high_nccl_busbw=pads)
    )
    places = {
        param: (bucket, start - layout.bucket_indices[bucket][0])
        for param, (start, _, bucket) in layout.param_index_map.items()
    }
    return places, layout.per_bucket_numel_unpadded


def laid(places):
    return [
        Laid(f"param {i}", param.numel(), getattr(param, "shared_embedding", False))
        for i, param in enumerate(places)
    ]


@pytest.mark.parametrize("tied", [None, 0, 5, 11])
@pytest.mark.parametrize("bucket_size", [None, 1, 500, 1500, 10**6])
@pytest.mark.parametrize(("dp", "pads"), [(1, False), (3, False), (8, True)])
def test_places_are_those_of_megatron(tied, bucket_size, dp, pads):
    for seed in range(5):
        places, sizes = of_megatron(params(seed, tied), bucket_size, dp, pads)
        assert lay_out(laid(places), sizes, INDEX) == list(places.values())


def test_places_depend_on_the_buckets():
    """Shows that the test above can fail."""
    places, sizes = of_megatron(params(0), 500, 2)
    other, _ = of_megatron(params(0), 1500, 2)
    assert lay_out(laid(places), sizes, INDEX) != list(other.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda items, sizes: (items[:-1], sizes),
        lambda items, sizes: (items[1:], sizes),
        lambda items, sizes: (items, sizes[:-1]),
        lambda items, sizes: (items, [*sizes, 64]),
        lambda items, sizes: (items, [sizes[0] + 1, *sizes[1:]]),
        lambda items, sizes: ([*items, Laid("one more", 3)], sizes),
        lambda items, sizes: ([Laid("half as much", 7), *items[1:]], sizes),
    ],
)
def test_other_parameters_or_buckets_are_refused(change):
    places, sizes = of_megatron(params(1), 900, 2)
    items = laid(places)
    assert lay_out(items, sizes, INDEX)
    with pytest.raises(CheckpointError, match=r"a_checkpoint: .*bucket by bucket"):
        lay_out(*change(items, sizes), INDEX)


def test_a_piece_lies_where_the_parameter_does():
    place = BucketPlace("stem", bucket_numel=1000, start=128)
    target = torch.zeros(10)
    shard = place.shard(MASTER, target, 20)
    assert shard.key == place.key(SHARDED_MASTER) == "stem.param"
    assert place.key(EXP_AVG) == "stem.exp_avg"
    assert (shard.global_shape, shard.global_offset, shard.local_shape) == ((1000,), (148,), (10,))
    assert shard.data is target


STEM = "chained_1.optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(bf, 32).bucket_idx_0"


def index_of(borders, num_groups=1):
    """Return the index of a file with one bucket, in pieces that end at some places."""
    chunks = [
        ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in pairwise(borders)
    ]
    size = torch.Size([borders[-1]])
    entry = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    keys = [f"{STEM.format(group)}.{EXP_AVG}" for group in range(num_groups)]
    tensors = {
        key: StoredTensor(key, tuple(size), torch.float32, ("f",), 4 * size[0]) for key in keys
    }
    return CheckpointIndex(Path("a_checkpoint"), tensors, {}, Metadata(dict.fromkeys(keys, entry)))


def leaf_of(sizes):
    """Return what is asked of a byte-sharded optimizer, over parameters of some sizes."""
    made = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        made[::-1], None, 1, SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
    )
    names = {param: f"param {i}" for i, param in enumerate(made)}
    return SimpleNamespace(data_parallel_group_idx=0, buffers=[layout]), names


def test_a_bucket_is_found_by_its_key_and_its_pieces():
    index = index_of([0, 30, 64, 84])
    assert in_buckets(index)
    assert not in_buckets(INDEX)
    leaf, names = leaf_of([30, 20])
    places = bucket_places(leaf, names, 1, index)
    assert [place.start for place in places.values()] == [0, 64]
    assert {place.stem for place in places.values()} == {STEM.format(0)}


def test_parameters_that_fill_a_bucket_but_lie_elsewhere_are_refused():
    # 50 and 20 elements end where 30 and 20 do.
    leaf, names = leaf_of([50, 20])
    with pytest.raises(CheckpointError, match="param 0 does not lie at 0"):
        bucket_places(leaf, names, 1, index_of([0, 30, 64, 84]))


def test_other_model_parallel_sizes_are_refused():
    leaf, names = leaf_of([30, 20])
    index = index_of([0, 30, 64, 84], num_groups=2)
    with pytest.raises(CheckpointError, match="of 2 model-parallel ranks, this run has 1"):
        bucket_places(leaf, names, 1, index)
    assert bucket_places(leaf, names, 2, index)
