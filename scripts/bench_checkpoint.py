"""Measure checkpoints on four ranks: memory of a load over the state it loads, seconds, and stock.

    .venv/bin/python scripts/bench_checkpoint.py [--quick] [--json FILE]

A GPT in bf16 is saved and loaded by Megatron's ``dist_checkpointing`` with the state of the
optimizer: of this package with ``--muon-layout owner`` and ``flat`` and without a layout, and of
Megatron's own Muon, which works without one here. Every load is in a fresh process. Its memory is
what the process holds more at one moment of the load than before, when all that is loaded into had
been written to and all modules imported; the ratio is that of the largest rank. Without a layout
the gather of weights that ends a load, which is that of every step, holds them once more. Seconds
are the least of some rounds, in which the four take turns, and have no limit; bytes are those of
the files. The exit status is 1 if a limit is not met.
"""

import contextlib
import ctypes
import gc
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import benchlib
import torch
import torch.distributed as dist
from benchlib import Row, rows_of

from megatron_muon.testing.law.build import leaves, parallel_state
from megatron_muon.testing.ranks import run_ranks

NUM_RANKS = 4
SEQUENCE = 16

MEMORY_LIMIT = 1.15
"""Largest ratio that is accepted of the memory of a load to the state it loads."""
BUCKET_SIZE = 500_000
"""Elements of a bucket: one matrix or two."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model, and the rounds.

    Attributes:
        hidden: Width.
        layers: Layers.
        vocab: Rows of the embedding.
        rounds: Times that each save and load is timed.
    """

    hidden: int
    layers: int
    vocab: int
    rounds: int


FULL, QUICK = Size(768, 16, 4096, 3), Size(384, 20, 2048, 1)


@dataclass(frozen=True)
class Way:
    """Whose optimizer, and with which layout.

    Attributes:
        name: Its name.
        layout: ``--muon-layout``, ``None`` without a layout.
        is_stock: Whether it is Megatron's own.
    """

    name: str
    layout: str | None = None
    is_stock: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether there are buckets, which Megatron makes only where they overlap."""
        return self.layout is not None


WAYS = (Way("owner", "owner"), Way("flat", "flat"), Way("no layout"), Way("stock", is_stock=True))


@dataclass(frozen=True)
class Load:
    """What a rank has measured.

    Attributes:
        seconds: Of the save or the load.
        state_nbytes: Bytes that are loaded into.
        more_nbytes: Bytes more than before that the process has held at one moment.
        of_read_nbytes: The same until the files were read, and weights not yet made of masters.
    """

    seconds: float
    state_nbytes: int = 0
    more_nbytes: int = 0
    of_read_nbytes: int = 0


# --------------------------------------------------------------------------------------------
# On a rank
# --------------------------------------------------------------------------------------------


def save(size: Size, way: Way, folder: str) -> Load:
    """Save, and return how long it took."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training.checkpointing import _clean_metadata_for_serialization

    with _built(size, way) as (chunk, optimizer):
        _write_to_all(chunk, optimizer, 0.5)
        metadata = _metadata(way)
        strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy(), metadata["dp_cp_group"]
        )
        with _timed() as seconds:
            state = _state(chunk, optimizer, metadata)
            dist_checkpointing.save(
                state, folder, strategy,
                content_metadata=_clean_metadata_for_serialization(metadata),
            )  # fmt: skip
        return Load(seconds())


def load(size: Size, way: Way, folder: str) -> Load:
    """Load, and return how long it took and what memory."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    with _built(size, way) as (chunk, optimizer):
        nbytes = _write_to_all(chunk, optimizer, float("nan"))
        _give_back_at_once()
        _load_one(chunk, way, folder)
        gc.collect()
        before = _reset_high_water()
        with _timed() as seconds:
            common = dist_checkpointing.load_common_state_dict(folder)
            metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
            metadata["dp_cp_group"] = _metadata(way)["dp_cp_group"]
            state = _state(chunk, optimizer, metadata, is_loading=True)
            found = dist_checkpointing.load(state, folder)
            of_read = _high_water() - before
            unwrap_model(chunk).load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
        more = _high_water() - before
        assert all(bool((t == 0.5).all()) for t in _tensors(chunk, optimizer))
        return Load(seconds(), nbytes, more, of_read)


def _give_back_at_once() -> None:
    """Let memory that is freed be the system's, and none be kept for later."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)


def _load_one(chunk: Any, way: Way, folder: str) -> None:
    """Load the smallest weight, so that all modules that a load imports are there."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    state = unwrap_model(chunk).sharded_state_dict(metadata=_metadata(way))
    norm = "decoder.final_layernorm.weight"
    dist_checkpointing.load({norm: state[norm]}, folder)


@contextlib.contextmanager
def _built(size: Size, way: Way) -> Iterator[tuple[Any, Any]]:
    """Build the model and the optimizer of this rank."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.training import global_vars, training

    from megatron_muon.integration.install import install

    install(device="cpu", optimizer=not way.is_stock)
    config = TransformerConfig(
        num_layers=size.layers, hidden_size=size.hidden, ffn_hidden_size=4 * size.hidden,
        num_attention_heads=size.hidden // 64, normalization="RMSNorm", add_bias_linear=False,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True, perform_initialization=False, attention_dropout=0.0,
        hidden_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=way.overlaps,
        overlap_param_gather=way.overlaps, bucket_size=BUCKET_SIZE if way.overlaps else None,
    )  # fmt: skip
    args = SimpleNamespace(
        optimizer="muon", use_layer_wise_distributed_optimizer=True, muon_layout=way.layout,
        muon_split_qkv=True, muon_split_gated_fc1=False, muon_split_heads=False,
        muon_exclude=[], muon_include=[],
    )  # fmt: skip
    with parallel_state(1):
        model = GPTModel(
            config, spec, vocab_size=size.vocab, max_sequence_length=SEQUENCE,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
            (chunk,) = training.wrap_model_chunks_with_ddp(
                [Float16Module(config, model)], config, ddp_config,
                use_layer_wise_distributed_optimizer=True,
                use_layer_wise_param_layout=way.layout is not None,
            )  # fmt: skip
        with _quiet():
            optimizer = get_megatron_optimizer(_optimizer_config(way), [chunk])
        yield chunk, optimizer


def _optimizer_config(way: Way) -> Any:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from megatron_muon.optimizer.config import MuonConfig

    values: dict[str, Any] = dict(
        optimizer="muon", lr=0.01, bf16=True, params_dtype=torch.bfloat16,
        use_layer_wise_distributed_optimizer=True, muon_tp_mode="duplicated",
        overlap_param_gather=way.overlaps,
    )  # fmt: skip
    if way.is_stock:
        return OptimizerConfig(**values)
    return MuonConfig(**(values | {"muon_layout": way.layout, "muon_tp_mode": "owner"}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _metadata(way: Way) -> dict[str, Any]:
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    args = Namespace(
        use_distributed_optimizer=False, use_layer_wise_distributed_optimizer=True,
        ckpt_format="torch_dist", dist_ckpt_optim_fully_reshardable=True,
        distrib_optim_fully_reshardable_mem_efficient=False,
    )  # fmt: skip
    metadata: dict[str, Any] = _build_sharded_state_dict_metadata(args)
    return metadata


def _state(chunk: Any, optimizer: Any, metadata: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Return the state as ``megatron.training.checkpointing.generate_state_dict`` makes it."""
    from megatron.core.utils import unwrap_model

    state = {"model": unwrap_model(chunk).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata, **how)
    return state


def _tensors(chunk: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all that a checkpoint has, where this rank holds it."""
    yield from (param.data for param in chunk.parameters())
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            for master in group["params"]:
                yield master.data
                yield from (
                    value for key, value in leaf.optimizer.state[master].items() if key != "step"
                )


def _write_to_all(chunk: Any, optimizer: Any, value: float) -> int:
    """Let all state be in memory; return its bytes."""
    for leaf in leaves(optimizer):
        # Megatron's is made with the first step; it does not save a count of none.
        leaf.init_state_fn(leaf.optimizer, leaf.config)
        if isinstance(leaf.optimizer, torch.optim.Adam):
            for state in leaf.optimizer.state.values():
                state.setdefault("step", torch.ones(()))
    nbytes = 0
    for tensor in _tensors(chunk, optimizer):
        tensor.fill_(value)
        nbytes += tensor.nbytes
    return nbytes


@contextlib.contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Time from when all ranks are there to when all have ended."""
    dist.barrier()
    start = time.perf_counter()
    found: list[float] = []
    yield lambda: found[0]
    dist.barrier()
    found.append(time.perf_counter() - start)


def _reset_high_water() -> int:
    """Let the high-water mark start from what the process holds now, and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _high_water()


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# --------------------------------------------------------------------------------------------
# All ranks
# --------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What was measured of a way.

    Attributes:
        nbytes: Bytes of the files.
        saves: Seconds of each save.
        loads: Seconds of each load.
        ranks: What each rank has measured in the last load.
    """

    nbytes: int
    saves: list[float]
    loads: list[float]
    ranks: list[Load]


def measure(size: Size) -> dict[str, Measured]:
    """Save and load in turns."""
    found = {way.name: Measured(0, [], [], []) for way in WAYS}
    for _ in range(size.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as logs:
                measured = found[way.name]
                for function, seconds in ((save, measured.saves), (load, measured.loads)):
                    measured.ranks = run_ranks(
                        function, NUM_RANKS, size, way, folder, timeout_s=300, logs=Path(logs)
                    )
                    seconds.append(max(rank.seconds for rank in measured.ranks))
                measured.nbytes = sum(
                    file.stat().st_size for file in Path(folder).iterdir() if file.is_file()
                )
    return found


def rows_of_all(found: dict[str, Measured]) -> Iterator[Row]:
    """Yield what is told."""
    stock = found["stock"]
    for name, measured in found.items():
        limit = MEMORY_LIMIT if name in ("owner", "flat") else None
        for what, ratio in (
            ("load", max(1 + r.more_nbytes / r.state_nbytes for r in measured.ranks)),
            ("read", max(1 + r.of_read_nbytes / r.state_nbytes for r in measured.ranks)),
        ):
            yield from rows_of(f"memory of a {what} over the state, {name}", ratio, limit)
    for what in ("saves", "loads"):
        for name, measured in found.items():
            seconds = min(getattr(measured, what))
            yield from rows_of(f"seconds, {what}, {name}", seconds)
            yield from rows_of(f"MB/s, {what}, {name}", measured.nbytes / 1e6 / seconds)
            if name != "stock":
                ratio = seconds / min(getattr(stock, what))
                yield from rows_of(f"time over stock, {what}, {name}", ratio)


def measure_all(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    found = measure(QUICK if quick else FULL)
    state = sum(rank.state_nbytes for rank in found["owner"].ranks) / NUM_RANKS / 1e6
    files = ", ".join(f"{m.nbytes / 1e6:.0f} MB ({name})" for name, m in found.items())
    print(f"{NUM_RANKS} ranks, each with about {state:.0f} MB of state; files of {files}")
    yield from rows_of_all(found)


if __name__ == "__main__":
    sys.exit(benchlib.main(measure_all, __doc__, "a smaller model, one round"))
