"""Weights seeded by name: one initial model for every tensor, pipeline and expert parallel size.

Megatron draws a weight from a random stream that depends on the rank, so a model's first loss
changes with the tensor-parallel size and two runs of different layouts cannot be compared. Here the
values of a parameter depend on its global name, its logical shape and one seed, and on nothing
else: every rank draws the whole logical weight on the CPU and keeps its own piece of it.

The distribution is Megatron's: the `init_method`, `output_layer_init_method` and
`embedding_init_method` of the model's config are called with a generator of their own for each
parameter. Biases are zero and norm weights one (zero where the norm adds the one itself).

The pure part (`parameter_seed`, `parameter_kind`, `draw`) needs torch alone.
`initialize_by_name` applies it to the chunks of a Megatron model, before any wrapper copies the
weights into masters or buffers:

    model_config.pre_wrap_hooks.append(functools.partial(initialize_by_name, seed=1234))

A whole weight is drawn on each rank, so this is for tests and for comparing layouts; a model whose
largest matrix does not fit a rank's host memory cannot use it.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.names import NamedParameter, named_parameters

logger = logging.getLogger(__name__)

Kind = Literal["matrix", "output", "embedding", "logits", "norm", "zero"]
"""How a parameter starts: `matrix` by `init_method`, `output` (a projection back into the residual
stream) by `output_layer_init_method`, `embedding` by `embedding_init_method`, `logits` by the one
that Megatron gives its output layer, `norm` with ones, `zero` with zeros."""

_KIND_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"(word|position|tokentype)_embeddings\.weight", "embedding"),
    (r"output_layer\.weight", "logits"),
    (r"([a-z]+_)*(layer_?norm|norm)\.weight|(e|h)norm\.weight|layer_norm_weight", "norm"),
    (r"router\.(weight|bias)", "matrix"),
    (r"bias|layer_norm_bias", "zero"),
    (r"(linear_proj|linear_fc2|fc2_latent_proj)\.weight", "output"),
    (r"(linear_(qkv|fc1|q|kv|qkv_down_proj)|fc1_latent_proj|eh_proj)\.weight", "matrix"),
    (r"linear_(q|kv)(_down|_up)?_proj\.weight", "matrix"),
    (r"gate_weight", "matrix"),
)
_KINDS = tuple((re.compile(rf"(.*\.)?({tail})"), kind) for tail, kind in _KIND_BY_NAME)


def parameter_seed(name: str, logical_shape: Sequence[int], seed: int) -> int:
    """Return the generator seed of one parameter, a hash of all that its values may depend on."""
    key = f"{seed}\n{name}\n{'x'.join(str(n) for n in logical_shape)}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def parameter_kind(name: str) -> Kind:
    """Return how the parameter `name` starts.

    Raises:
        ConfigurationError: No rule covers the name.
    """
    for pattern, kind in _KINDS:
        if pattern.fullmatch(name):
            return kind
    raise ConfigurationError(
        f"--init-by-name does not know how Megatron initializes {name!r}: drop the flag, or add "
        "the parameter to the rules of megatron_muon.testing.init_by_name"
    )


def draw(
    name: str,
    logical_shape: Sequence[int],
    seed: int,
    init_method: Callable[..., object],
) -> torch.Tensor:
    """Return the whole weight `name` in fp32 on the CPU, drawn from a generator of its own.

    Args:
        name: Global name of the parameter.
        logical_shape: Shape of the whole weight, before any sharding.
        seed: The run's seed.
        init_method: Fills a tensor in place; takes a `generator` as torch's `nn.init` do.

    Raises:
        ConfigurationError: `init_method` does not take a generator.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed(parameter_seed(name, logical_shape, seed))
    full = torch.empty(tuple(logical_shape), dtype=torch.float32, device="cpu")
    try:
        init_method(full, generator=generator)
    except TypeError as error:
        raise ConfigurationError(
            f"--init-by-name cannot seed {name!r}: its init method {init_method!r} must accept "
            f"generator=, as torch.nn.init.normal_ does ({error})"
        ) from error
    return full


@torch.no_grad()
def initialize_by_name[ChunkT: torch.nn.Module](chunks: list[ChunkT], seed: int) -> list[ChunkT]:
    """Give every parameter of the model chunks the values that its name, shape and `seed` say.

    Args:
        chunks: Megatron model chunks, before Float16Module and DDP (a `pre_wrap_hook` of
            Megatron's model configs gets them so).
        seed: The run's seed; equal seeds give equal models.

    Returns:
        The same chunks.

    Raises:
        ConfigurationError: A parameter is of an unknown kind.
        UnsupportedError: A weight has no storage yet or is sharded by more than tensor parallelism.
    """
    count = 0
    for chunk in chunks:
        config = _config_of(chunk)
        for entry in named_parameters(chunk):
            if entry.param.is_meta:
                raise UnsupportedError(
                    f"--init-by-name needs the storage of {entry.name!r}, which is on the meta "
                    "device: drop --init-model-with-meta-device"
                )
            full = _initial_value(chunk, config, entry, seed)
            entry.param.copy_(entry.shard.cut(full))
            count += 1
    logger.info("initialized %d parameters by name, seed %d", count, seed)
    return chunks


def _initial_value(
    chunk: torch.nn.Module, config: Any, entry: NamedParameter, seed: int
) -> torch.Tensor:
    """Return the whole initial weight of `entry`, in fp32 on the CPU."""
    shape = entry.shard.logical_shape(entry.param.shape)
    kind = parameter_kind(entry.name)
    if kind == "zero":
        return torch.zeros(shape, device="cpu")
    if kind == "norm":
        fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
        return fill(shape, device="cpu")
    return draw(entry.name, shape, seed, _init_method(chunk, config, kind))


def _init_method(chunk: torch.nn.Module, config: Any, kind: Kind) -> Callable[..., object]:
    """Return the init method of the config that Megatron's own module would use."""
    if kind == "logits":
        tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        kind = "embedding" if config.use_mup and not tied else "matrix"
    name = {
        "matrix": "init_method",
        "output": "output_layer_init_method",
        "embedding": "embedding_init_method",
    }[kind]
    method: Callable[..., object] = getattr(config, name)
    return method


def _config_of(chunk: torch.nn.Module) -> Any:
    """Return the chunk's TransformerConfig.

    Raises:
        ConfigurationError: The chunk is not a Megatron module.
    """
    config = getattr(chunk, "config", None)
    if not hasattr(config, "output_layer_init_method"):
        raise ConfigurationError(
            f"--init-by-name works on Megatron models, and {type(chunk).__name__} carries no "
            "TransformerConfig as its config"
        )
    return config
