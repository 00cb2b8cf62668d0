"""The model of the law tests, its gradients, and what a right run must end with.

Names, shards and blocks of a real Megatron GPT are written out here by hand and not asked of the
package, so that a wrong cut or a wrong split cannot be wrong in the same way on both sides.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from megatron_muon.testing.oracle import Oracle, OracleSettings, relative_error

# The matrices are small: two threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)

# No parameter is a multiple of 64 elements, so that every buffer has padding.
HIDDEN, FFN, VOCAB, SEQUENCE = 54, 84, 60, 8
HEADS, GROUPS, HEAD = 4, 2, 14
GROUP_ROWS = HEADS // GROUPS * HEAD + 2 * HEAD


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run of a few steps.

    ``wrap`` is the way to DDP: ``training`` (``wrap_model_chunks_with_ddp``), ``builder``
    (``dist_utils._ddp_wrap``), ``legacy`` (layer-wise without a layout) or ``replicated`` (no
    distributed optimizer at all).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    layers: int = 2
    experts: int = 0
    ep: int = 1
    bf16: bool = False
    wrap: str = "training"
    tp_mode: str = "owner"
    precision: str = "highest"
    nesterov: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.1
    lr: float = 0.05
    split_qkv: bool = True
    clip: float = 0.0
    skip_above: float = math.inf
    overlap_grad: bool = False
    overlap_param: bool = False
    grads_in_fp32: bool = True
    bucket_size: int | None = None
    steps: int = 3
    zero_grads: bool = False
    frozen: str | None = None
    """Pattern of parameters that are not trained."""
    trained: str | None = None
    """Pattern of the only parameters that are trained."""
    mutant: str | None = None
    report: str | None = None

    @property
    def grid(self) -> tuple[int, int, int | None, int]:
        return self.tp, self.pp, self.vpp, self.ep

    @property
    def bias(self) -> bool:
        """Megatron cannot shard an expert's bias."""
        return self.experts == 0

    def trains(self, name: str) -> bool:
        if self.trained is not None and not re.search(self.trained, name):
            return False
        return self.frozen is None or not re.search(self.frozen, name)


def logical_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Whole shape of every parameter by name."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for i in range(case.layers):
        layer = f"decoder.layers.{i}."
        attention = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
            "self_attention.linear_proj.bias": (HIDDEN,),
            "self_attention.linear_qkv.weight": (GROUPS * GROUP_ROWS, HIDDEN),
            "self_attention.linear_qkv.bias": (GROUPS * GROUP_ROWS,),
            "pre_mlp_layernorm.weight": (HIDDEN,),
        }
        shapes |= {layer + name: shape for name, shape in attention.items()}
        if case.experts:
            shapes[layer + "mlp.router.weight"] = (case.experts, HIDDEN)
        experts = [f"experts.local_experts.{j}." for j in range(case.experts)]
        for mlp in [f"{layer}mlp.{expert}" for expert in experts] or [layer + "mlp."]:
            shapes |= {
                mlp + "linear_fc1.weight": (2 * FFN, HIDDEN),
                mlp + "linear_fc1.bias": (2 * FFN,),
                mlp + "linear_fc2.weight": (HIDDEN, FFN),
                mlp + "linear_fc2.bias": (HIDDEN,),
            }
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    return {name: shape for name, shape in shapes.items() if case.bias or "bias" not in name}


def blocks(case: Case) -> dict[str, list[list[int]]]:
    """Rows that are orthogonalized apart, for every matrix that Muon steps."""
    matrices: dict[str, list[list[int]]] = {}
    for name, shape in logical_shapes(case).items():
        if not name.endswith("weight") or len(shape) != 2 or not name.startswith("decoder"):
            continue
        if "linear_qkv" in name and case.split_qkv:
            group_of = [row // GROUP_ROWS for row in range(shape[0])]
            place = [row - GROUP_ROWS * group for row, group in enumerate(group_of)]
            queries = GROUP_ROWS - 2 * HEAD
            matrices[name] = [
                [row for row in range(shape[0]) if place[row] < queries],
                [row for row in range(shape[0]) if queries <= place[row] < queries + HEAD],
                [row for row in range(shape[0]) if queries + HEAD <= place[row]],
            ]
        else:
            matrices[name] = [list(range(shape[0]))]
    return matrices


def shard(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Cut a whole parameter for one tensor-parallel rank."""
    if "linear_fc1" in name:
        gate, up = whole[:FFN], whole[FFN:]
        rows = FFN // size
        mine = slice(rank * rows, (rank + 1) * rows)
        return torch.cat([gate[mine], up[mine]])
    if re.search(r"linear_(proj|fc2)\.weight", name):
        columns = whole.shape[1] // size
        return whole[:, rank * columns : (rank + 1) * columns]
    if re.search(r"linear_qkv|word_embeddings|output_layer", name):
        rows = whole.shape[0] // size
        return whole[rank * rows : (rank + 1) * rows]
    return whole


def unshard(name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put the shards of all tensor-parallel ranks together."""
    if "linear_fc1" in name:
        halves = [s.chunk(2) for s in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    if re.search(r"linear_(proj|fc2)\.weight", name):
        return torch.cat(list(shards), dim=1)
    if re.search(r"linear_qkv|word_embeddings|output_layer", name):
        return torch.cat(list(shards))
    for other in shards[1:]:
        assert torch.equal(other, shards[0]), f"{name} differs between tensor-parallel ranks"
    return shards[0]


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


def gradients(case: Case, replica: int, num_replicas: int, step: int) -> dict[str, torch.Tensor]:
    """Whole gradients of one data-parallel rank, by name."""
    size = 0.0 if case.zero_grads else 1.0
    return {
        name: size * gradient(name, shape, step, *_copies(name, case, replica, num_replicas))
        for name, shape in logical_shapes(case).items()
        if case.trains(name)
    }


def _copies(name: str, case: Case, replica: int, num_replicas: int) -> tuple[int, int]:
    """Return which copy of a parameter a rank has, of how many.

    An expert is on every ``ep``-th rank only; these see the tokens of all.
    """
    if ".experts." not in name:
        return replica, num_replicas
    return replica // case.ep, num_replicas // case.ep


@dataclass
class Outcome:
    """What one rank holds after the last step.

    Masters are flat pieces of this rank's shards, with where each starts in the shard.
    """

    tp_rank: int
    dp_rank: int
    pp_rank: int
    masters: dict[str, list[tuple[int, torch.Tensor]]]
    weights: dict[str, torch.Tensor]
    grad_norms: list[float]
    newton_schulz_calls: int
    newton_schulz_flops: int
    collectives: int
    exchanged_nbytes: int
    owned: set[str]
    printed: str
    snapshots: list[str] = field(default_factory=list)


def reference(case: Case) -> Oracle:
    """Run the oracle through the same steps, in fp64, on the mean gradient.

    ``test_ranks_have_one_mean_gradient`` sees that the mean is that of any number of ranks.
    """
    return _reference(
        replace(
            case, tp=1, pp=1, vpp=None, ep=1, bf16=False, wrap="", tp_mode="", precision="",
            overlap_grad=False, overlap_param=False, grads_in_fp32=True, bucket_size=None,
            mutant=None, report=None,
        )
    )  # fmt: skip


@cache
def _reference(case: Case) -> Oracle:
    shapes = {n: s for n, s in logical_shapes(case).items() if case.trains(n)}
    oracle = Oracle(
        weights={name: initial(name, shape) for name, shape in shapes.items()},
        blocks={name: rows for name, rows in blocks(case).items() if name in shapes},
        settings=OracleSettings(
            lr=case.lr,
            weight_decay=case.weight_decay,
            momentum=case.momentum,
            nesterov=case.nesterov,
            clip=case.clip or None,
            skip_above=case.skip_above,
        ),
    )
    for step in range(case.steps):
        oracle.step([gradients(case, 0, 1, step)])
    return oracle


def whole_masters(case: Case, outcomes: Sequence[Outcome]) -> dict[str, torch.Tensor]:
    """Put the masters of all ranks together; every element must be held, copies must be equal."""
    shapes = {name: s for name, s in logical_shapes(case).items() if case.trains(name)}
    shards = {
        name: [torch.full_like(shard(name, torch.empty(shape), 0, case.tp), torch.nan)
               for _ in range(case.tp)]
        for name, shape in shapes.items()
    }  # fmt: skip
    for outcome in outcomes:
        for name, pieces in outcome.masters.items():
            for start, piece in pieces:
                here = shards[name][outcome.tp_rank].view(-1)[start : start + piece.numel()]
                held = ~here.isnan()
                assert torch.equal(here[held], piece[held]), f"copies of {name} differ"
                here.copy_(piece)
    whole = {name: unshard(name, parts) for name, parts in shards.items()}
    for name, weight in whole.items():
        assert not weight.isnan().any(), f"nobody holds all of {name}"
    return whole


def violations(case: Case, outcomes: Sequence[Outcome], bound: float) -> list[str]:
    """Compare a run with the reference; return what is not as it should be.

    Checked are the update of every parameter, the norm of the gradients, and that every rank
    trains on with exactly the rounded masters.
    """
    oracle, shapes = reference(case), logical_shapes(case)
    masters = whole_masters(case, outcomes)
    expected, got = updates(case, oracle.weights), updates(case, masters)
    found = [
        f"update of {name}: relative error {error:.2e}"
        for name in expected
        if (error := relative_error(got[name], expected[name])) > bound
    ]
    norm = outcomes[0].grad_norms[-1]
    if abs(norm - oracle.grad_norm) > 1e-6 * oracle.grad_norm:
        found.append(f"gradient norm {norm}, expected {oracle.grad_norm}")
    for rank, outcome in enumerate(outcomes):
        for name, weight in outcome.weights.items():
            master = masters[name] if name in masters else initial(name, shapes[name])
            local = shard(name, master, outcome.tp_rank, case.tp)
            if not torch.equal(weight, local.to(weight.dtype)):
                found.append(f"weight of {name} on rank {rank} is not its master's")
    return found


def updates(case: Case, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the steps changed."""
    return {
        name: initial(name, tuple(weight.shape)).double() - weight.double()
        for name, weight in weights.items()
    }
