"""Tensor subclasses with all-gather hooks, of the kinds that people write.

Bf16Weight      fp32 rows that travel as bf16                       one input, pads itself
Scaled          fp32 rows that travel as int8 with a scale a row    two inputs of two dtypes
Aliased         rows that travel as they are; no copy afterwards    (mesh) alone
Twofold         the same, and gathered parameters of the class
Quantized       int8 rows and scales, frozen                        no master weight
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten

CALLS: list[tuple[str, Any]] = []
"""What was called, with what: (hook, arguments that tests look at)."""


class Wrapped(Tensor):
    """Plain data behind a class; every operator runs on the data, these return the class."""

    KEEPS: ClassVar = {
        aten.detach.default,
        aten.clone.default,
        aten.split.Tensor,
        aten.new_zeros.default,
        aten.new_empty.default,
        aten.empty_like.default,
        aten.slice.Tensor,
        aten.view.default,
        aten._to_copy.default,
        aten._pin_memory.default,
        aten.alias.default,
        aten.as_strided.default,
    }

    @staticmethod
    def __new__(cls, data: Tensor, **options: Any) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data: Tensor, **options: Any) -> None:
        self._data = data
        self._options = options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wrapped = [a for a in args if isinstance(a, Wrapped)]
        options = wrapped[0]._options if wrapped else {}
        args_, kwargs_ = tree_map(
            lambda t: t._data if isinstance(t, Wrapped) else t, (args, kwargs or {})
        )
        result = func(*args_, **kwargs_)
        if func._schema.name.endswith("_") and isinstance(args[0], Wrapped):
            return args[0]  # in place
        if func in cls.KEEPS:
            return tree_map(lambda t: cls(t, **options) if isinstance(t, Tensor) else t, result)
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], self._options

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], options: Any, *_: Any) -> Wrapped:
        return cls(inner["_data"], **options)


def padded(rows: Tensor, outer_size: torch.Size, ranks: int) -> Tensor:
    """Rows with zeros behind them, as many as a rank with whole rows has."""
    whole = math.ceil(outer_size[0] / ranks)
    if rows.size(0) == whole:
        return rows
    target = rows.new_zeros(whole, *rows.shape[1:])
    target[: rows.size(0)].copy_(rows)
    return target


def local_of(out: Tensor) -> Tensor:
    return out._local_tensor if isinstance(out, DTensor) else out


class Bf16Weight(Wrapped):
    """Travels as bf16; computes in param_dtype. Option pad=False leaves odd shards alone."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        CALLS.append(("pre", (mesh.size(), tuple(outer_size), outer_stride, type(module).__name__)))
        assert hasattr(mp_policy, "param_dtype")
        assert not torch.is_grad_enabled()
        if self._options.get("fails"):
            raise RuntimeError("the hook failed")
        rows = self._data.to(torch.bfloat16)
        if self._options.get("pad", True):
            rows = padded(rows, outer_size, mesh.size())
        return (rows,), outer_size

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        CALLS.append(("post", (param_dtype, out is not None)))
        (rows,) = outputs
        assert rows.dtype == torch.bfloat16
        if out is None:
            gathered = rows[: metadata[0]].to(param_dtype, copy=True)
            return gathered, (gathered,)
        out = local_of(out)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(rows[: metadata[0]])
        return None


class ReleasingWeight(Bf16Weight):
    """Does not need what it was gathered from."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Scaled(Wrapped):
    """Travels as int8 with an fp32 scale a row."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        rows = padded(self._data, outer_size, mesh.size())
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-12).float() / 127
        return [(rows / scales).round().to(torch.int8), scales], None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        gathered = (codes * scales).to(param_dtype)
        if out is None:
            return gathered, [gathered]
        out = local_of(out)
        self._fill(out, gathered[: out.size(0)])
        return None

    def _fill(self, out: Tensor, gathered: Tensor) -> None:
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(gathered)


class Careless(Scaled):
    """Leaves grad mode and version counters to whoever calls it; torch's FSDP2 does not."""

    def _fill(self, out: Tensor, gathered: Tensor) -> None:
        out.copy_(gathered)


class Twofold(Wrapped):
    """The gathered parameter is of the class too, over an output of the all-gather."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (rows,) = outputs
        if out is None:
            return Twofold(rows), (rows,)
        assert out._data.untyped_storage()._cdata == rows.untyped_storage()._cdata
        return None


class Aliased(Wrapped):
    """Travels as it is; the gathered parameter is the all-gather's output. (mesh) alone."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), ("metadata", mesh.size())

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata[0] == "metadata"
        (rows,) = outputs
        if out is None:
            return rows, ()
        assert rows.untyped_storage()._cdata == local_of(out).untyped_storage()._cdata
        return None


class Quantized(Tensor):
    """int8 rows and an fp32 scale a row, seen as fp32; nothing can be computed with it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self._codes = codes
        self._scales = scales

    def __repr__(self) -> str:
        return f"Quantized({tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        this = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.view.default):
            return cls(this._codes, this._scales)
        if func is aten.new_zeros.default:
            size = args[1]
            return cls(this._codes.new_zeros(size), this._scales.new_zeros(size[0], 1))
        if func in (aten.slice.Tensor, aten.split.Tensor):
            codes, scales = func(this._codes, *args[1:]), func(this._scales, *args[1:])
            if isinstance(codes, Tensor):
                return cls(codes, scales)
            return [cls(c, s) for c, s in zip(codes, scales, strict=True)]
        if func is aten.copy_.default:
            this._codes.copy_(args[1]._codes)
            this._scales.copy_(args[1]._scales)
            return this
        raise NotImplementedError(f"{func} of Quantized")

    @classmethod
    def of(cls, weight: Tensor) -> Quantized:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def dequantize(self) -> Tensor:
        return self._codes * self._scales

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        ranks = mesh.size()
        return (
            padded(self._codes, outer_size, ranks),
            padded(self._scales, outer_size, ranks),
        ), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        gathered = (codes * scales).to(param_dtype)
        if out is None:
            return gathered, (gathered,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(gathered[: out.size(0)])
        return None


def extend(model: nn.Module, kind: type[Wrapped], **options: Any) -> nn.Module:
    """Gives every 2-D parameter of the model the subclass."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.ndim == 2:
                extended = kind(param.detach(), **options)
                module._parameters[name] = nn.Parameter(extended, param.requires_grad)
    return model


def plain(tensor: Tensor | None) -> Tensor | None:
    """A copy of a shard (or of a gradient's) without its classes."""
    if tensor is None:
        return None
    local = local_of(tensor.detach())
    return (local._data if isinstance(local, Wrapped) else local).clone()
