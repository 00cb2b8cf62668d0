"""What steps cost on a machine, as frozen numbers, and the choice of a layout by them.

All predictions are bounds from bytes, flops and bandwidths; they order plans and tell what a step
is made of. They are no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: What it is called.
        flops_per_s: Sustained rate of the products in Newton-Schulz.
        memory_nbytes_per_s: Bandwidth of a rank's memory.
        node_nbytes_per_s: Bandwidth of a rank to others of its node, each way.
        link_nbytes_per_s: Bandwidth of a rank to other nodes, each way.
        latency_s: Time to start one collective.
        ranks_per_node: Ranks of a node.
        memory_nbytes: Memory of a rank.
    """

    name: str
    flops_per_s: float
    memory_nbytes_per_s: float
    node_nbytes_per_s: float
    link_nbytes_per_s: float
    latency_s: float
    ranks_per_node: int
    memory_nbytes: int


HARDWARE: dict[str, Hardware] = {
    machine.name: machine
    for machine in (
        # 989 TFLOP/s dense bf16 at half of the peak; HBM3 3.35 TB/s; NVLink 450 GB/s each way and
        # one 400 Gb/s InfiniBand port a GPU, both at four fifths. Data sheet of the H100 SXM.
        Hardware(
            name="h100", flops_per_s=495e12, memory_nbytes_per_s=3.35e12, node_nbytes_per_s=360e9,
            link_nbytes_per_s=40e9, latency_s=20e-6, ranks_per_node=8, memory_nbytes=80 * GIB,
        ),
        # One thread of an x86-64 server with fp32 products, and gloo over loopback.
        Hardware(
            name="cpu-gloo", flops_per_s=97e9, memory_nbytes_per_s=10e9, node_nbytes_per_s=1e9,
            link_nbytes_per_s=1e9, latency_s=200e-6, ranks_per_node=8, memory_nbytes=16 * GIB,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the busiest rank of a stage does in one optimizer step; each number is by itself.

    Attributes:
        flops: Newton-Schulz flops.
        data_nbytes: Bytes of momentum and updates that it sends between data-parallel ranks.
        tensor_nbytes: The same inside a tensor-parallel row.
        grad_nbytes: Bytes of gradients that a ring's reduce-scatter sends.
        weight_nbytes: Bytes of weights that a ring's all-gather sends.
        memory_nbytes: Bytes of gradients, momentum and masters that its elementwise work touches.
        collectives: Collectives of the exchange.
    """

    flops: int
    data_nbytes: int
    tensor_nbytes: int
    grad_nbytes: int
    weight_nbytes: int
    memory_nbytes: int
    collectives: int


def predict_seconds(
    work: Work, machine: Hardware, num_stage_ranks: int, tp: int
) -> dict[str, float]:
    """Return the seconds of each part of a step, one after the other and nothing overlapped.

    Args:
        work: What the busiest rank does.
        machine: Where.
        num_stage_ranks: Ranks of a pipeline stage: on one node if it has room for them.
        tp: Ranks of a tensor-parallel row: on one node if it has room for them.
    """
    data = _bandwidth(machine, num_stage_ranks)
    return {
        "newton_schulz": work.flops / machine.flops_per_s,
        "data_exchange": work.data_nbytes / data,
        "tensor_exchange": work.tensor_nbytes / _bandwidth(machine, tp),
        "latency": work.collectives * machine.latency_s,
        "elementwise": work.memory_nbytes / machine.memory_nbytes_per_s,
        "gradient_reduce": work.grad_nbytes / data,
        "weight_gather": work.weight_nbytes / data,
    }


def assumptions(machine: Hardware) -> list[str]:
    """Return what a prediction takes for granted, for the reader."""
    return [
        f"{machine.name}: Newton-Schulz at {machine.flops_per_s / 1e12:g} TFLOP/s in the standard "
        f"form, memory {machine.memory_nbytes_per_s / 1e9:g} GB/s, "
        f"{machine.node_nbytes_per_s / 1e9:g} GB/s inside nodes of {machine.ranks_per_node} ranks, "
        f"{machine.link_nbytes_per_s / 1e9:g} GB/s between them, "
        f"{machine.latency_s * 1e6:g} us a collective",
        "each part is that of its busiest rank; nothing is overlapped, though a run overlaps "
        "reduction and gather with --overlap-grad-reduce and --overlap-param-gather",
        "a pipeline stage lies on one node if it fits; reductions and gathers are rings",
    ]


def _bandwidth(machine: Hardware, num_ranks: int) -> float:
    inside = num_ranks <= machine.ranks_per_node
    return machine.node_nbytes_per_s if inside else machine.link_nbytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """What a layout costs the worst rank of the job.

    Attributes:
        layout: Its name.
        moved_nbytes: Bytes that it sends in a step: gradients, weights and exchange.
        flops: Newton-Schulz flops.
        memory_nbytes: Bytes that it keeps, scratch included.
        seconds: Predicted seconds of a step.
    """

    layout: str
    moved_nbytes: int
    flops: int
    memory_nbytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.layout} sends {self.moved_nbytes / GIB:.2f} GiB, computes "
            f"{self.flops / 1e12:.2f} TFLOP, keeps {self.memory_nbytes / GIB:.2f} GiB and takes "
            f"{self.seconds * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout that was chosen.

    Attributes:
        layout: Its name.
        why: The reason, with the numbers.
    """

    layout: str
    why: str


_NOTICEABLE = 0.02
"""Share of a step below which two predictions are equal."""


def choose_layout(costs: Sequence[LayoutCosts], memory_nbytes: int) -> LayoutChoice:
    """Choose the layout of the fastest step that fits; of equally fast ones that of least memory.

    Args:
        costs: The layouts, the preferred one first.
        memory_nbytes: Memory of a rank.
    """
    numbers = "; ".join(map(str, costs)) + " on its worst rank"
    fitting = [cost for cost in costs if cost.memory_nbytes <= memory_nbytes]
    if not fitting:
        least = min(costs, key=lambda cost: cost.memory_nbytes)
        return LayoutChoice(
            least.layout, f"none fits into {memory_nbytes / GIB:.0f} GiB, it keeps least: {numbers}"
        )
    if len(fitting) == 1 < len(costs):
        only = fitting[0].layout
        return LayoutChoice(only, f"it alone fits into {memory_nbytes / GIB:.0f} GiB: {numbers}")
    fastest = min(cost.seconds for cost in fitting)
    equal = [cost for cost in fitting if cost.seconds <= fastest * (1 + _NOTICEABLE)]
    best = min(equal, key=lambda cost: cost.memory_nbytes)
    why = "its step is the fastest" if len(equal) == 1 else "of equally fast ones it keeps least"
    return LayoutChoice(best.layout, f"{why}: {numbers}")
