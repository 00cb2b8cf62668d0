"""A GPT without data whose optimizer is stepped: this package's, and Megatron's own beside it.

Both are built by ``megatron.core.optimizer.get_megatron_optimizer`` over DDP, Megatron's own with
none of this package's seams installed, also while it steps. Gradients are given.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.testing.law.build import parallel_state

GRAD_STD = 1e-5
"""Of the elements of gradients: their norm stays below one, so that no optimizer clips them."""

NUM_GRADS = 2
"""Different gradients, taken in turn."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model.

    Attributes:
        hidden: Width.
        layers: Layers.
        vocab: Rows of the embedding and of the output layer.
        bucket_numel: Elements of a bucket of gradients, ``None`` for one bucket.
        gathers_later: Whether weights are gathered in the forward pass, of which there is none
            here, and not in the step.
    """

    hidden: int = 512
    layers: int = 8
    vocab: int = 1024
    bucket_numel: int | None = None
    gathers_later: bool = False


@dataclass(frozen=True)
class Way:
    """An optimizer.

    Attributes:
        name: Its name.
        tp_mode: ``--muon-tp-mode``.
        precision: ``--muon-fp32-matmul-prec``.
        is_stock: Whether it is Megatron's own.
        exchange: ``--muon-exchange-dtype``.
        layout: ``--muon-layout``.
        more: Other fields of the optimizer's config.
    """

    name: str
    tp_mode: str
    precision: str
    is_stock: bool = False
    exchange: str = "fp32"
    layout: str = "owner"
    more: tuple[tuple[str, Any], ...] = ()


def stock(tp_mode: str, precision: str) -> Way:
    """Return Megatron's own Muon."""
    return Way(f"stock {tp_mode}", tp_mode, precision, is_stock=True)


@dataclass
class Built:
    """An optimizer and its model on this rank.

    Attributes:
        way: Which.
        chunk: The model in DDP.
        optimizer: Megatron's chain of optimizers.
        num_steps: Steps made.
    """

    way: Way
    chunk: Any
    optimizer: Any
    num_steps: int = 0

    def give_gradients(self) -> None:
        """Write the gradients of the next step into DDP's buffers."""
        for i, param in enumerate(self.chunk.parameters()):
            grad = gradients_of(i, tuple(param.shape))[self.num_steps % NUM_GRADS]
            param.main_grad.copy_(grad)

    def step(self) -> float:
        """Step, and return the CPU seconds that all threads of this rank took.

        All ranks begin together; the wait for that is not counted.
        """
        return self.step_with(contextlib.nullcontext())[1]

    def step_with[T](self, watch: contextlib.AbstractContextManager[T]) -> tuple[T, float]:
        """Step inside a context; return what that yields, and the CPU seconds."""
        with installed_for(self.way):
            self.give_gradients()
            dist.barrier()
            with watch as seen:
                start = time.process_time()
                self.optimizer.step()
                seconds = time.process_time() - start
        self.num_steps += 1
        dist.barrier()
        return seen, seconds


_gradients: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}


def gradients_of(index: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the gradients, fp32, of what this rank has of a parameter: the same on DP ranks."""
    from megatron.core import parallel_state as state

    rank = state.get_tensor_model_parallel_rank()
    key = (index, shape)
    if key not in _gradients:
        generator = torch.Generator().manual_seed(index * 1000 + rank)
        _gradients[key] = [
            GRAD_STD * torch.randn(shape, generator=generator) for _ in range(NUM_GRADS)
        ]
    return _gradients[key]


@contextlib.contextmanager
def installed_for(way: Way) -> Iterator[None]:
    """Have the CPU stand-in, and this package's seams only where the optimizer is its own."""
    from megatron_muon.integration import install as installing

    now = installing.installation()
    if now is None or now.optimizer == way.is_stock:
        installing.uninstall()
        installing.install(device="cpu", optimizer=not way.is_stock)
    yield


@contextlib.contextmanager
def built_ways(ways: Sequence[Way], size: Size, tp: int) -> Iterator[list[Built]]:
    """Build each optimizer with a model of its own; all start from the same weights."""
    with installed_for(ways[0]), parallel_state(tp):
        _gradients.clear()
        yield [build(way, size, tp) for way in ways]


def build(way: Way, size: Size, tp: int) -> Built:
    """Build one optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.training import global_vars, training

    with installed_for(way):
        config = transformer_config(size, tp)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, bucket_size=size.bucket_numel,
            overlap_grad_reduce=size.bucket_numel is not None,
            overlap_param_gather=size.gathers_later,
        )  # fmt: skip
        args = SimpleNamespace(
            optimizer="muon", use_layer_wise_distributed_optimizer=True, muon_layout=way.layout,
            muon_split_qkv=True, muon_split_gated_fc1=False, muon_split_heads=False,
            muon_exclude=[], muon_include=[],
        )  # fmt: skip
        with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
            (chunk,) = training.wrap_model_chunks_with_ddp(
                [Float16Module(config, gpt(config, size))], config, ddp_config,
                use_layer_wise_distributed_optimizer=True, use_layer_wise_param_layout=True,
            )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer = get_megatron_optimizer(optimizer_config(way, size), [chunk])
        return Built(way, chunk, optimizer)


def transformer_config(size: Size, tp: int) -> Any:
    """Return Megatron's config of the model."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=size.layers, hidden_size=size.hidden, ffn_hidden_size=4 * size.hidden,
        num_attention_heads=max(4, size.hidden // 64), normalization="RMSNorm",
        add_bias_linear=False, tensor_model_parallel_size=tp, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
        perform_initialization=False, attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip


def gpt(config: Any, size: Size) -> torch.nn.Module:
    """Build this rank's shards of the model, with weights that depend on nothing but the rank."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model: torch.nn.Module = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=size.vocab,
        max_sequence_length=16, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(state.get_tensor_model_parallel_rank())
    for param in model.parameters():
        param.data.copy_(0.02 * torch.randn(param.shape, generator=generator))
    return model


def optimizer_config(way: Way, size: Size) -> Any:
    """Return the config of an optimizer."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from megatron_muon.optimizer.config import MuonConfig

    values: dict[str, Any] = dict(
        optimizer="muon", lr=0.01, bf16=True, params_dtype=torch.bfloat16,
        use_layer_wise_distributed_optimizer=True, muon_tp_mode=way.tp_mode,
        muon_fp32_matmul_prec=way.precision, overlap_param_gather=size.gathers_later,
    )  # fmt: skip
    if way.is_stock:
        return OptimizerConfig(**values)
    return MuonConfig(
        **values, muon_layout=way.layout, muon_exchange_dtype=way.exchange, **dict(way.more)
    )


def masters_by_name(built: Built) -> dict[str, torch.Tensor]:
    """Return what this rank holds of each fp32 master."""
    from megatron_muon.optimizer.masters import leaves, masters_of

    names = {param: name for name, param in built.chunk.named_parameters()}
    return {
        names[param]: master.detach()
        for leaf in leaves(built.optimizer)
        for param, master in masters_of(leaf).items()
    }


def differing(one: Built, other: Built) -> list[str]:
    """Return the parameters whose masters differ in any bit."""
    pairs = masters_by_name(one), masters_by_name(other)
    names = sorted(pairs[0].keys() | pairs[1].keys())
    return [
        name
        for name in names
        if not all(name in each for each in pairs)
        or not torch.equal(*(each[name].view(torch.int32) for each in pairs))
    ]


# --------------------------------------------------------------------------------------------
# Collectives
# --------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather", "all_reduce",
    "reduce_scatter_tensor", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip
"""Functions of ``torch.distributed`` that are watched."""


@dataclass(frozen=True)
class Call:
    """One collective that a step entered.

    Attributes:
        name: Function of ``torch.distributed``.
        nbytes: Bytes that came from other ranks.
        sent_nbytes: Bytes that went to other ranks.
        group: ``tp``, ``dp`` or ``other``.
    """

    name: str
    nbytes: int
    sent_nbytes: int
    group: str


@contextlib.contextmanager
def watched() -> Iterator[list[Call]]:
    """Watch the collectives of a block, whoever calls them."""
    calls: list[Call] = []
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            function = getattr(dist, name)
            stack.enter_context(mock.patch.object(dist, name, _spied(name, function, calls)))
        yield calls


def _spied(name: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    parameters = inspect.signature(function)

    def spied(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        received, sent = moved_nbytes(name, given)
        calls.append(Call(name, received, sent, _name_of(given.get("group"))))
        return function(*args, **kwargs)

    return spied


def moved_nbytes(name: str, given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes that a rank has to receive from others, and those that it sends to them.

    Of an all-reduce and of what is not known, all but this rank's share of the tensor once; a ring
    of all-reduces moves twice that.
    """
    group = given.get("group")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if name == "all_to_all_single":
        output, sent = given["output"], given["input"]
        to_own = (given.get("output_split_sizes") or [output.numel() // size] * size)[rank]
        own = (given.get("input_split_sizes") or [sent.numel() // size] * size)[rank]
        return (
            output.nbytes - to_own * output.itemsize,
            sent.nbytes - own * sent.itemsize,
        )
    if name == "all_gather":
        tensor = given["tensor"]
        return sum(part.nbytes for part in given["tensor_list"]) - tensor.nbytes, tensor.nbytes
    if name == "all_gather_into_tensor":
        tensor = given["input_tensor"]
        return given["output_tensor"].nbytes - tensor.nbytes, tensor.nbytes
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors) * (size - 1) // size
    return nbytes, nbytes


def _name_of(group: Any) -> str:
    from megatron.core import parallel_state as state

    if group is state.get_tensor_model_parallel_group():
        return "tp"
    if group is state.get_data_parallel_group(with_context_parallel=True):
        return "dp"
    return "other"
