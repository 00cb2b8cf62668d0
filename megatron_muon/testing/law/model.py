"""The model of the law harness and its gradients.

Names, shapes, shards and blocks of a real Megatron GPT are written out here by hand and not asked
of the package, so that a wrong cut or a wrong split cannot be wrong in the same way on both sides.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megatron_muon.testing.law.case import Case, is_expert

# The matrices are small: two threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)

# No shard of a parameter is a multiple of 64 elements at any tensor-parallel size up to 8, so that
# every buffer has padding.
HIDDEN, FFN, VOCAB, SEQUENCE = 54, 88, 72, 8
HEADS, HEAD = 8, 14

CUT_COLUMNS = r"linear_(proj|fc2)\.weight"
CUT_ROWS = r"linear_qkv|linear_fc1|word_embeddings|output_layer"


@dataclass(frozen=True, slots=True)
class Replica:
    """Which copy of the dense parameters and of its experts a rank has, of how many."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1


def qkv_widths(case: Case) -> dict[str, int]:
    """Rows of each part of the fused projection in one query group, in order."""
    queries = HEADS // case.groups * HEAD
    gate = {"gate": queries} if case.output_gate else {}
    return {"q": queries, **gate, "k": HEAD, "v": HEAD}


def logical_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Whole shape of every parameter by name."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    qkv_rows = case.groups * sum(qkv_widths(case).values())
    fc1_rows = (2 if case.gated else 1) * FFN
    for i in range(case.layers):
        layer = f"decoder.layers.{i}."
        attention = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
            "self_attention.linear_proj.bias": (HIDDEN,),
            "self_attention.linear_qkv.weight": (qkv_rows, HIDDEN),
            "self_attention.linear_qkv.bias": (qkv_rows,),
            "pre_mlp_layernorm.weight": (HIDDEN,),
        }
        shapes |= {layer + name: shape for name, shape in attention.items()}
        if case.experts:
            shapes[layer + "mlp.router.weight"] = (case.experts, HIDDEN)
            shapes[layer + "mlp.router.bias"] = (case.experts,)
        experts = [f"experts.local_experts.{j}." for j in range(case.experts)]
        for mlp in [f"{layer}mlp.{expert}" for expert in experts] or [layer + "mlp."]:
            shapes |= {
                mlp + "linear_fc1.weight": (fc1_rows, HIDDEN),
                mlp + "linear_fc1.bias": (fc1_rows,),
                mlp + "linear_fc2.weight": (HIDDEN, FFN),
                mlp + "linear_fc2.bias": (HIDDEN,),
            }
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    return {
        name: shape
        for name, shape in shapes.items()
        if (case.bias or "bias" not in name) and (not case.perceptron or "mlp." in name)
    }


def blocks(case: Case) -> dict[str, list[list[int]]]:
    """Rows that are orthogonalized apart, for every matrix that Muon steps."""
    matrices: dict[str, list[list[int]]] = {}
    for name, shape in logical_shapes(case).items():
        if re.search(r"^decoder\..*linear_\w+\.weight", name):
            rows = list(range(shape[0]))
            if "linear_qkv" in name and case.split_qkv:
                matrices[name] = _qkv_parts(case)
            elif "linear_fc1" in name and case.gated and case.split_gated_fc1:
                matrices[name] = [rows[:FFN], rows[FFN:]]
            else:
                matrices[name] = [rows]
    return matrices


def _qkv_parts(case: Case) -> list[list[int]]:
    """Rows of q, of an output gate, of k and of v: over all groups, or head by head."""
    widths = qkv_widths(case)
    period, start, parts = sum(widths.values()), 0, []
    for width in widths.values():
        rows = [
            group * period + start + row for group in range(case.groups) for row in range(width)
        ]
        length = HEAD if case.split_heads else len(rows)
        parts += [rows[low : low + length] for low in range(0, len(rows), length)]
        start += width
    return parts


def is_cut_again(case: Case, name: str) -> bool:
    """Whether generalized tensor parallelism cuts the rows of a parameter's shards once more."""
    return case.gtp_of(name) > 1 and is_cut(name) and name.endswith("weight")


def shard(
    case: Case, name: str, whole: torch.Tensor, rank: int, gtp_rank: int = 0, fill: float = 0.0
) -> torch.Tensor:
    """Cut a whole parameter for one rank of those that cut it.

    Args:
        case: The run.
        name: The parameter.
        whole: Its values.
        rank: Rank among those that cut it.
        gtp_rank: Rank among those that cut the rows of what that rank has once more.
        fill: What the rows below the last one have.
    """
    part = _tp_shard(case, name, whole, rank)
    if not is_cut_again(case, name):
        return part
    size = case.gtp_of(name)
    num_filled = -len(part) % (size * case.gtp_alignment)
    filled = torch.cat([part, torch.full_like(part[:1], fill).repeat(num_filled, 1)])
    rows = len(filled) // size
    return filled[gtp_rank * rows : (gtp_rank + 1) * rows]


def _tp_shard(case: Case, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    size = case.tp_of(name)
    if "linear_fc1" in name and case.gated:
        gate, up = whole[:FFN], whole[FFN:]
        rows = FFN // size
        mine = slice(rank * rows, (rank + 1) * rows)
        return torch.cat([gate[mine], up[mine]])
    if re.search(CUT_COLUMNS, name):
        columns = whole.shape[1] // size
        return whole[:, rank * columns : (rank + 1) * columns]
    if re.search(CUT_ROWS, name):
        rows = whole.shape[0] // size
        return whole[rank * rows : (rank + 1) * rows]
    return whole


def unshard(case: Case, name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put the shards of all ranks that cut a parameter together; of one not cut, take the first."""
    if "linear_fc1" in name and case.gated:
        halves = [s.chunk(2) for s in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    if re.search(CUT_COLUMNS, name):
        return torch.cat(list(shards), dim=1)
    if re.search(CUT_ROWS, name):
        return torch.cat(list(shards))
    return shards[0]


def is_cut(name: str) -> bool:
    """Whether tensor parallelism cuts a parameter."""
    return re.search(f"{CUT_COLUMNS}|{CUT_ROWS}", name) is not None


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@cache
def initial(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Whole initial weight: exact in bf16, so that masters start from it in every precision."""
    generator = _generator("weight", name)
    if len(shape) == 1:
        return 1.0 + torch.randint(-16, 17, shape, generator=generator) / 64
    return torch.randint(-32, 33, shape, generator=generator) / 128


@cache
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of the global batch of every step, ``(48, SEQUENCE)`` each.

    48 sequences can be dealt to 1, 2, 3 and 4 ranks in 1 and in 4 micro-batches. They are more
    tokens than twice the longest side of a matrix: gradients of fewer have a small rank, and
    Newton-Schulz makes noise of it.
    """
    shape = (48, SEQUENCE)
    return (
        torch.randint(VOCAB, shape, generator=_generator("tokens")),
        torch.randint(VOCAB, shape, generator=_generator("labels")),
    )


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a perceptron, ``(48, SEQUENCE, HIDDEN)`` each."""
    shape = (48, SEQUENCE, HIDDEN)
    return (
        torch.randn(shape, generator=_generator("inputs")),
        torch.randn(shape, generator=_generator("targets")),
    )


@cache
def counted_tokens(masked: bool) -> torch.Tensor:
    """Return which tokens of the global batch count, ``(48, SEQUENCE)``.

    All, or one less from each six sequences to the next: no two micro-batches of a rank have as
    many, and the last one may have none.
    """
    shape = tokens()[0].shape
    num_counted = SEQUENCE - 1 - torch.arange(shape[0]) // 6 if masked else torch.tensor(SEQUENCE)
    return (torch.arange(SEQUENCE) < num_counted.view(-1, 1)).expand(shape)


@cache
def gradient(
    name: str, shape: tuple[int, ...], step: int, replica: int, num_replicas: int
) -> torch.Tensor:
    """Whole gradient of one data-parallel rank.

    Small multiples of a power of two, so that sums are exact, also in bf16. Ranks differ by terms
    that cancel: the mean is the same for every number of ranks, and no rank alone has it. It has
    no zeros, which AdamW would turn into the sign of a rounding error. Its size changes from step
    to step, so that clipping does.
    """

    def draw(*key: object) -> torch.Tensor:
        generator = _generator("gradient", name, step, *key)
        sign = 1 - 2 * torch.randint(0, 2, shape, generator=generator)
        return sign * torch.randint(1, 17, shape, generator=generator) / (16, 4, 32)[step % 3]

    mean = draw()
    if num_replicas == 1:
        return mean
    if num_replicas % 2 == 0:
        return mean + (draw(replica // 2) if replica % 2 == 0 else -draw(replica // 2))
    if replica < num_replicas - 1:
        return mean + draw(replica)
    return mean - sum(draw(other) for other in range(num_replicas - 1))


def micro_batch(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return what one of several micro-batches adds to a gradient.

    The parts differ, and add up without rounding: all but the last are the gradient with its
    columns (or elements) moved, as large as itself.
    """
    if count == 1:
        return whole
    if index < count - 1:
        return whole.roll(index + 1, -1)
    return whole - sum(whole.roll(other + 1, -1) for other in range(count - 1))


def gradients(case: Case, replica: Replica, step: int) -> dict[str, torch.Tensor]:
    """Whole gradients of one rank's copy, by name."""
    size = 0.0 if case.zero_grads else case.grad_factor
    return {
        name: size * gradient(
            name, shape, step,
            *((replica.expert_rank, replica.expert_size) if is_expert(name)
              else (replica.rank, replica.size)),
        )
        for name, shape in logical_shapes(case).items()
        if case.trains(name)
    }  # fmt: skip
