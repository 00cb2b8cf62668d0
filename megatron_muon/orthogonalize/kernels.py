"""Which kernel computes Newton-Schulz of a block: one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megatron_muon.orthogonalize.arithmetic import Arithmetic

KernelName = Literal["auto", "standard", "gram", "eigh", "exact"]
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)
"""What ``--muon-ns-kernel`` may be."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a block is computed.

    Attributes:
        form: ``standard`` multiplies the block in each step; ``gram`` iterates on its Gram matrix
            and multiplies the block only where :func:`.iteration.segment_lengths` restarts;
            ``eigh`` decomposes the Gram matrix, see :mod:`.eigenvectors`.
        symmetric: How symmetric products are computed: ``full`` like any other, ``strips`` their
            lower part, mirrored.
        batched: Whether equal blocks are multiplied together, by one thread; otherwise one by one.
    """

    form: Literal["standard", "gram", "eigh"]
    symmetric: Literal["full", "strips"]
    batched: bool


_GRAM_FROM_RATIO = {"fp32": 2, "tf32": 3, "bf16": 3, "bf16_in_fp32": 3}
_STRIPS_FROM_ROWS = {torch.float32: 256, torch.bfloat16: 512}


def choose_kernel(
    rows: int,
    columns: int,
    arithmetic: Arithmetic,
    device_type: str,
    name: KernelName = "auto",
) -> Kernel:
    """Return the kernel of blocks of a shape.

    Nothing else decides, so that a block's result does not depend on which blocks are computed with
    it, on its layout in memory or on the rank that owns it. With ``a <= b`` the sides of the block:

    - The Gram form from ``a`` = 64 where ``b >= 2 a`` in fp32 and ``b >= 3 a`` in bf16 and TF32.
      Time over the standard form, both with strips: 512 x 2048 0.64 (fp32) and 0.80 (bf16),
      512 x 1024 0.83 and 0.93, 512 x 512 1.11 and 1.10. It is later in bf16 because it gains less
      there (it restarts more often) and because on random matrices it doubles the error, from 0.005
      to 0.01; on decaying spectra, where the error is ten times that, it adds none. In fp32 it
      takes 1e-6 to 2e-6. Below 64 it would save flops where calls take most of the time.
    - Strips, on a CPU, from ``a`` = 256 held in fp32 and from 512 held in bf16. Time over full
      products in the standard form: 256 x 256 1.00 and 1.16, 512 x 512 0.85 and 0.90,
      1024 x 1024 0.75 and 0.78. In neither dtype does the mirroring raise the error. Strips of 64
      rows, halving again and again, and other ways to mirror are not faster: a product takes 0.62
      to 0.70 of a full one, of which 0.03 to 0.08 is mirroring.
    - Batches, on a CPU, from ``a`` = 32 to blocks of 128 x 512. Time over one by one: 32 x 64 0.3
      (fp32) and 0.06 (bf16), 128 x 128 0.95 and 0.45, 256 x 256 1.05 and 0.85. Batched and single
      products have the same bits there if one thread computes blocks that begin aligned. In bf16
      they have not up to ``a`` = 16, and on CUDA nothing is known of it.
    - Eigenvectors never: see docs/kernels.md.

    Measured on one thread of a processor with AVX-512 and its bf16 products.

    Args:
        rows: Rows of the block.
        columns: Columns of the block.
        arithmetic: How its products are computed.
        device_type: ``cpu`` or ``cuda``.
        name: ``auto``, or the form that is asked for, which then takes the place of the rule's.

    Raises:
        ValueError: The form cannot be computed in this arithmetic, or is that of another library.
    """
    short, long = sorted((rows, columns))
    is_cpu = device_type == "cpu"
    if name == "auto":
        is_long = short >= 64 and long >= _GRAM_FROM_RATIO[arithmetic.name] * short
        form: Literal["standard", "gram", "eigh"] = "gram" if is_long else "standard"
    elif name == "exact" or (name == "eigh" and arithmetic.dtype != torch.float32):
        raise ValueError(f"{name} is no kernel of {arithmetic.name} here.")
    else:
        form = name
    return Kernel(
        form=form,
        symmetric="strips" if is_cpu and short >= _STRIPS_FROM_ROWS[arithmetic.dtype] else "full",
        batched=is_cpu and 32 <= short <= 128 and long <= 512 and form != "eigh",
    )
