"""What steps cost on a machine, as frozen numbers, and the choice of a layout by them.

A run and the ``plan`` command choose by this one rule, from the same numbers.

All predictions are bounds from bytes, flops and bandwidths; they order plans and tell what a step
is made of. They are no measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_muon.errors import ConfigurationError

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


ON_CUDA, ON_CPU = "h100", "cpu-gloo"
"""The machine that a run takes itself to be on where none is named."""


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a name"),
    "int": ((int,), "an integer above 0"),
    "float": ((int, float), "a number above 0"),
}
"""Of each type of a machine's fields what a file may say, and how that is called."""


def find_hardware(given: str | None, default: str, flag: str) -> Hardware:
    """Return a machine by its name, or as a JSON file describes it.

    Args:
        given: A name of :data:`HARDWARE`, or a file with an object of numbers named as the fields
            of :class:`Hardware`, of which those that are left out are an H100's; ``None`` for the
            default.
        default: Name of the machine where none is given.
        flag: The flag that gave it, for messages.

    Raises:
        ConfigurationError: It is neither, or the file says something else.
    """
    if given is None or given in HARDWARE:
        return HARDWARE[given or default]
    names = ", ".join(HARDWARE)
    try:
        found: Any = json.loads(Path(given).read_text())
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {given}: no machine of that name ({names}), and no file that can be read "
            f"({error.strerror})."
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{flag} {given}: not JSON ({error}).") from None
    kinds = {field.name: field.type for field in fields(Hardware)}
    known = ", ".join(kinds)
    if not isinstance(found, dict) or not set(found) <= set(kinds):
        more = sorted(set(found) - set(kinds)) if isinstance(found, dict) else "no object"
        raise ConfigurationError(f"{flag} {given}: {more}; expected an object of {known}.")
    for name, value in found.items():
        legal, expected = _KINDS[kinds[name]]
        is_right = isinstance(value, legal) and not isinstance(value, bool)
        if not is_right or (name != "name" and not 0 < value < math.inf):
            raise ConfigurationError(f"{flag} {given}: {name} is {value!r}; expected {expected}.")
    return replace(HARDWARE[ON_CUDA], **{"name": Path(given).stem, **found})


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
            f"{self.layout} sends {_nbytes(self.moved_nbytes)}, computes {_flops(self.flops)}, "
            f"keeps {_nbytes(self.memory_nbytes)} and takes "
            f"{self.seconds * 1e3:.4g} ms"
        )


def _nbytes(number: int) -> str:
    return _scaled(number, 1024, ("bytes", "KiB", "MiB", "GiB"))


def _flops(number: int) -> str:
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:.4g} {unit}"
        number /= step
    return f"{number:.2f} {units[-1]}"


def of_worst(stages: Sequence[LayoutCosts]) -> LayoutCosts:
    """Return what a layout costs the worst rank of several pipeline stages."""
    return LayoutCosts(
        layout=stages[0].layout,
        moved_nbytes=max(stage.moved_nbytes for stage in stages),
        flops=max(stage.flops for stage in stages),
        memory_nbytes=max(stage.memory_nbytes for stage in stages),
        seconds=max(stage.seconds for stage in stages),
    )


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout that was chosen.

    Attributes:
        layout: Its name.
        why: The reason, with the numbers; empty where it was asked for.
    """

    layout: str
    why: str = ""

    def __str__(self) -> str:
        return f"layout {self.layout}: {self.why or 'as asked for'}"


ONE_RANK = LayoutChoice("owner", "one data-parallel rank holds every matrix")
"""The choice where there is none."""


_NOTICEABLE = 0.02
"""Share of a step below which two predictions are equal."""


def choose_layout(costs: Sequence[LayoutCosts], memory_nbytes: int) -> LayoutChoice:
    """Choose the layout of the fastest step that fits; of equally fast ones that of least memory.

    Args:
        costs: The layouts, the preferred one first.
        memory_nbytes: Memory of a rank.
    """
    numbers = "; ".join(map(str, costs)) + ", as predicted for the worst rank of each"
    fitting = [cost for cost in costs if cost.memory_nbytes <= memory_nbytes]
    if not fitting:
        least = min(costs, key=lambda cost: cost.memory_nbytes)
        return LayoutChoice(
            least.layout, f"none fits into {_nbytes(memory_nbytes)}, it keeps least: {numbers}"
        )
    if len(fitting) == 1 < len(costs):
        only = fitting[0].layout
        return LayoutChoice(only, f"it alone fits into {_nbytes(memory_nbytes)}: {numbers}")
    fastest = min(cost.seconds for cost in fitting)
    equal = [cost for cost in fitting if cost.seconds <= fastest * (1 + _NOTICEABLE)]
    best = min(equal, key=lambda cost: cost.memory_nbytes)
    why = "its step is the fastest" if len(equal) == 1 else "of equally fast ones it keeps least"
    if len(equal) > 1 and len({cost.memory_nbytes for cost in equal}) == 1:
        why = "all are equally fast and keep as much"
    return LayoutChoice(best.layout, f"{why}: {numbers}")
