"""The MXFP8 weight of a machine without Transformer Engine.

:class:`CpuMXFP8Tensor` stands where Megatron expects Transformer Engine's ``MXFP8Tensor``: it says
that it is a bf16 tensor and holds bytes only, which every write quantizes again.

In a matrix product the blocks lie along the dimension that is summed over, as the hardware wants
them: ``x @ weight.t()`` of a forward pass takes the row-wise values, ``grad @ weight`` of a
backward pass the column-wise ones. Every other operation sees the row-wise values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from megatron_muon.integration.cpu_mxfp8_format import Planes

_aten = torch.ops.aten


class CpuMXFP8Quantizer:
    """Makes and refills quantized weights; stands for Transformer Engine's ``MXFP8Quantizer``."""

    def __call__(self, matrix: torch.Tensor) -> CpuMXFP8Tensor:
        """Return a new quantized tensor."""
        quantized = CpuMXFP8Tensor(Planes.zeros(matrix.shape), dtype=matrix.dtype)
        return self.update_quantized(matrix, quantized)

    def update_quantized(self, src: torch.Tensor, dst: CpuMXFP8Tensor) -> CpuMXFP8Tensor:
        """Quantize ``src`` into ``dst``; every quantization there is goes through here."""
        dst.planes.quantize_(src.detach())
        return dst


_QUANTIZER = CpuMXFP8Quantizer()


class CpuMXFP8Tensor(torch.Tensor):
    """A matrix of MXFP8 codes and scales that takes part in torch as a bf16 tensor.

    What refers to the same planes sees what is written through any other: ``detach()``, ``.data``
    and views of the same shape.

    Attributes:
        planes: Its bytes.
    """

    planes: Planes

    # Without it torch would turn the plain results of operations into this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Self],
        planes: Planes,
        *,
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ) -> Self:
        """Make a tensor around planes, which it does not copy."""
        device = torch.device("cpu")
        tensor: Self = torch.Tensor._make_wrapper_subclass(
            cls, planes.shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor.planes = planes
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # __new__ has done all; torch.Tensor's would take other arguments.
        del args, kwargs
        super().__init__()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        del kwargs
        return f"{type(self).__name__}({self.dequantize()})"

    # What Megatron and its users read of Transformer Engine's tensor, by the names it has there.

    @property
    def _quantizer(self) -> CpuMXFP8Quantizer:
        return _QUANTIZER

    @property
    def _rowwise_data(self) -> torch.Tensor:
        return self.planes.rowwise_codes

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor:
        return self.planes.rowwise_scales

    @property
    def _columnwise_data(self) -> torch.Tensor:
        return self.planes.columnwise_codes

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor:
        return self.planes.columnwise_scales

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the row-wise values, plain."""
        return self.planes.dequantize("rowwise", dtype or self.dtype)

    def from_float8(self) -> torch.Tensor:
        """Return the values by the name that Megatron uses where there is no Transformer Engine."""
        return self.dequantize()

    def quantize_(self, tensor: torch.Tensor) -> Self:
        """Quantize values into the planes."""
        self._quantizer.update_quantized(tensor, self)
        return self

    def alias(self) -> Self:
        """Return another tensor around the same planes."""
        return type(self)(self.planes, dtype=self.dtype)

    def _get_data(self) -> Any:
        return self.detach()

    def _set_data(self, tensor: torch.Tensor) -> None:
        """Take the planes of a quantized tensor, or quantize a plain one, as there."""
        if isinstance(tensor, CpuMXFP8Tensor):
            self.planes = tensor.planes
        else:
            self.quantize_(tensor)

    data = property(_get_data, _set_data)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation that has one of these tensors among its arguments."""
        del types
        if func.namespace == "c10d":
            raise ValueError(
                f"{func} would send the codes of an MXFP8 weight, which other ranks do not read: "
                "stage its bf16 values in a buffer and send that (without "
                "--data-parallel-random-init no weight is broadcast)."
            )
        rule = _RULES.get(func.overloadpacket, _on_values)
        return rule(func, args, kwargs or {})


def keep_high_precision_init_val(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Keep the value a weight had before it was quantized, and the methods that hand it out.

    They are there only on a weight that keeps one, as on Transformer Engine's: Megatron asks for
    the methods and not for the value.
    """
    attributes: Any = tensor
    attributes._high_precision_init_val = value
    attributes.get_high_precision_init_val = MethodType(_high_precision_init_val, tensor)
    attributes.clear_high_precision_init_val = MethodType(_clear_high_precision_init_val, tensor)


def _high_precision_init_val(self: torch.Tensor) -> torch.Tensor | None:
    return getattr(self, "_high_precision_init_val", None)


def _clear_high_precision_init_val(self: torch.Tensor) -> None:
    if hasattr(self, "_high_precision_init_val"):
        del self._high_precision_init_val


# --------------------------------------------------------------------------------------------
# Operations
# --------------------------------------------------------------------------------------------

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the row-wise values and quantize what it wrote."""
    values: dict[int, torch.Tensor] = {}
    origins: dict[int, CpuMXFP8Tensor] = {}

    def dequantized(argument: Any) -> Any:
        if not isinstance(argument, CpuMXFP8Tensor):
            return argument
        if id(argument) not in values:
            value = argument.dequantize()
            values[id(argument)] = value
            origins[id(value)] = argument
        return values[id(argument)]

    def returned(result: Any) -> Any:
        return origins.get(id(result), result) if isinstance(result, torch.Tensor) else result

    plain_args, plain_kwargs = tree_map(dequantized, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for value in _written(func, plain_args, plain_kwargs):
        if id(value) in origins:
            origins[id(value)].quantize_(value)
    return tree_map(returned, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors among the arguments that an operation writes to."""
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return written


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return args[0].alias()


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return type(args[0])(args[0].planes.map(torch.Tensor.clone), dtype=args[0].dtype)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a quantized tensor: bytes from one, else quantize what broadcasts to its shape."""
    destination, source = args[:2]
    if not isinstance(destination, CpuMXFP8Tensor):
        return _on_values(func, args, kwargs)
    if isinstance(source, CpuMXFP8Tensor):
        for to, plane in zip(destination.planes.each(), source.planes.each(), strict=True):
            to.copy_(plane)
        return destination
    return destination.quantize_(source.expand(destination.shape))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View in the same shape; blocks have no other, as Transformer Engine says of flat views."""
    tensor, shape = args[:2]
    sizes = [old if size == -1 else size for old, size in zip(tensor.shape, shape, strict=False)]
    if len(shape) != tensor.dim() or tuple(sizes) != tuple(tensor.shape):
        raise ValueError(
            f"{func}: an MXFP8 tensor of shape {tuple(tensor.shape)} has no view of shape "
            f"{tuple(shape)}; dequantize() it first"
        )
    return tensor.alias()


def _transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return plain values: a product with the transpose sums over the last dimension."""
    return func(args[0].dequantize(), **kwargs)


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply matrices: a left one's blocks lie along its rows, a right one's along columns."""
    *others, left, right = args
    if isinstance(right, CpuMXFP8Tensor):
        right = right.planes.dequantize("columnwise", right.dtype)
    return _on_values(func, (*others, left, right), kwargs)


_RULES: dict[Any, Rule] = {
    _aten.detach: _alias,
    _aten.alias: _alias,
    _aten.clone: _clone,
    _aten.copy_: _copy,
    _aten.view: _view,
    _aten._unsafe_view: _view,
    _aten.expand: _view,
    _aten.t: _transposed,
    _aten.mm: _product,
    _aten.addmm: _product,
}
