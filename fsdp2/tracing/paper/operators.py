"""Every operator that runs on ``meta``: what it computes, reads, writes and allocates.

    with Operators(recorder), kernels_of("cuda"): model(batch).sum().backward()

FLOPs are those of `torch.utils.flop_counter`. Bytes are those of the arguments and results. An
operator whose results are all views takes no device time. Operators on tensors of other devices,
such as the step counters of an optimizer, are not recorded.

On ``meta`` torch computes attention by its formula. `kernels_of` replaces it by the kernel that the
device would run: flash or memory-efficient attention on a GPU; on a CPU torch's choice. An RMS norm
is one kernel on a GPU, and a formula elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.paper.values import Following, Values, tensors_in
from fsdp2.tracing.record.notes import HOST, replaced

_aten = torch.ops.aten

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""They allocate, and launch nothing."""

_SPARSE = {"embedding", "index", "index_select", "gather", "select_backward"}
"""They read no more than they write, however large what they read from."""

_INSIDE: dict[str, Callable[[Sequence[Any], Sequence[torch.Tensor]], int]] = {
    "convolution": lambda args, results: int(results[0].nbytes + args[1].nbytes),
    "convolution_backward": lambda args, results: int(args[0].nbytes + args[1].nbytes),
}
"""Bytes that a CPU's kernel allocates: copies of tensors in oneDNN's format. Without them, plans of
convolution models are up to 21 % too low."""

_TAKE_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Operators(Following):
    """Reports every operator in this context to a recorder."""

    def __init__(self, recorder: Recording, values: Values) -> None:
        super().__init__(values)
        self._recorder = recorder

    def run(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        if self._recorder.phase != "optimizer":
            args = self._on_device(func, args)
        answer = self.values.answer(func, args, kwargs)
        result = _run(func, args, kwargs) if answer is None else answer[0]
        results = tensors_in(result)
        if results and not results[0].is_meta:
            return result
        inputs = tensors_in((args, kwargs.values()))
        if not results and not any(tensor.is_meta for tensor in inputs):
            return result
        self._note(func, args, kwargs, result, inputs, results)
        if answer is None:
            self.values.follow(func, args, kwargs, result)
        return result

    def _on_device(self, func: OpOverload, args: tuple[object, ...]) -> tuple[object, ...]:
        """Tensors in CPU memory among those on ``meta``, where the device planned for takes them.

        A CPU has no other memory; a GPU takes indices from there.
        """
        if self._recorder.asynchronous and func._schema.name not in _TAKE_INDICES:
            return args
        tensors = tensors_in(args)
        if len({each.is_meta for each in tensors if each.dim()}) < 2:
            return args
        if func._schema.name == "aten::copy_":
            return args
        moved: tuple[object, ...] = tree_map_only(
            torch.Tensor, lambda each: each if each.is_meta else self.values.put(each), args
        )
        return moved

    def _note(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        recorder = self._recorder
        seen = {recorder.storage(tensor) for tensor in inputs if tensor.is_meta}
        host = bool(seen) and all(map(recorder.is_host, seen))
        made = {recorder.storage(tensor, host) for tensor in results}
        name = func._schema.name.partition("::")[2]
        kind = "compute"
        if name in _FACTORIES or (not func._schema.is_mutable and made <= seen):
            kind = "view"
        flops = nbytes = 0
        if kind == "compute":
            flops = _flops(func, args, kwargs, result)
            written = sum(map(_size, results)) or _mutated(args)
            nbytes = 2 * written if name in _SPARSE else written + sum(map(_size, inputs))
        dtype = next((t.dtype for t in (*results, *inputs) if t.is_meta), torch.float32)
        lane = HOST if host else recorder.lane
        many = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
        inside = 0
        if name in _INSIDE and not recorder.asynchronous:
            inside = recorder.hidden(_INSIDE[name](args, results))
        recorder.operation(lane, name, kind, flops, nbytes, dtype, max(many, 1))
        recorder.free(inside)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Runs an operator on ``meta``, which lacks some operators, or supports only one dtype."""
    if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
        return None  # a whole optimizer step in place
    if func is _aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products by expert, in all dtypes: torch's own on ``meta`` are in bf16.

    With two matrices, it is one product per expert, whose rows of the inner dim ``offs`` ends.
    Otherwise the dim that both have is that of experts, or the tokens of all are in one dim.
    """
    experts = () if offs is None or a.dim() != b.dim() else (len(offs),)
    if a.dim() == b.dim() == 3:
        experts = (a.shape[0],)
    return a.new_empty((*experts, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


def _size(tensor: torch.Tensor) -> int:
    return min(int(tensor.nbytes), int(tensor.untyped_storage().nbytes()))


def _mutated(args: tuple[object, ...]) -> int:
    """For operators that return nothing: the tensors in the first argument, which they write."""
    return sum(map(_size, tensors_in(args[0]))) if args else 0


def _flops(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> int:
    name = func._schema.name
    if "dot_product" in name and "attention" in name:
        return _attention(args, backward="backward" in name)
    if name == "aten::_grouped_mm":
        a, b = args[:2]  # each row of one meets the matrix of its expert
        apart = b.shape[0] if a.dim() == b.dim() == 3 else 1
        return 2 * apart * int(a.shape[-2] * a.shape[-1] * b.shape[-1])
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _attention(args: tuple[Any, ...], backward: bool) -> int:
    """FLOPs of attention without a mask, grouped or not, which some versions of torch do not count.

    Forward has two products of all pairs of tokens, and backward five.
    """
    query, _, value = args[1:4] if backward else args[:3]
    pairs = query.shape[:-1].numel() * value.shape[-2]
    ours, theirs = (3, 2) if backward else (1, 1)
    return 2 * int(pairs) * (ours * query.shape[-1] + theirs * value.shape[-1])


_HALVES = (torch.float16, torch.bfloat16)
_attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
_rms_norm: Callable[..., torch.Tensor] = F.rms_norm


def kernels_of(device_type: str) -> AbstractContextManager[None]:
    """Let attention and RMS norm of ``torch.nn`` run inside what a device would.

    The functions are replaced in their module: a mode would not be there in backward, where
    checkpoints run forwards again.
    """
    attend = functools.partial(_attend_on, device_type)
    rms_norm = _rms_norm if device_type == "cpu" else _rms_norm_on_gpu
    return replaced(F, scaled_dot_product_attention=attend, rms_norm=rms_norm)


def fused_optimizers() -> AbstractContextManager[None]:
    """Let torch's optimizers take ``fused=True`` for parameters on ``meta`` inside."""
    name = "_get_fused_kernels_supported_devices"
    supported: Callable[[], list[str]] = getattr(torch_optimizer, name)
    return replaced(torch_optimizer, **{name: lambda: [*supported(), "meta"]})


def _rms_norm_on_gpu(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """One kernel where dtypes agree, as a layer norm is: torch has no RMS norm on ``meta``.

    That saves one number more for each row.
    """
    if weight is None or weight.dtype != input.dtype:
        return _rms_norm(input, normalized_shape, weight, eps)
    return F.layer_norm(input, list(normalized_shape), weight)


def _attend_on(
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel that a device would choose."""
    given, rest = (query, key, value), (dropout_p, is_causal)
    found: tuple[torch.Tensor, ...] | None = None
    if device_type == "cpu":
        few = [_few(tensor) for tensor in given]
        mask = None if attn_mask is None else torch.zeros((), dtype=attn_mask.dtype)
        if mask is not None:
            mask = mask.expand(*(1,) * (query.dim() - 2), few[0].shape[-2], few[1].shape[-2])
        choose: Any = torch._fused_sdp_choice
        if choose(*few, mask, *rest, scale=scale, enable_gqa=enable_gqa) == 1:
            flash = _aten._scaled_dot_product_flash_attention_for_cpu
            found = flash(*given, *rest, attn_mask=attn_mask, scale=scale)
    elif query.dim() == 4 and attn_mask is None and query.dtype in _HALVES:
        found = _aten._scaled_dot_product_flash_attention(*given, *rest, scale=scale)
    elif query.dim() == 4 and query.shape[1] == key.shape[1]:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        trains = any(tensor.requires_grad for tensor in given)
        thrifty = _aten._scaled_dot_product_efficient_attention
        found = thrifty(*given, attn_mask, trains, *rest, scale=scale)
    if found is None:
        return _attend(*given, attn_mask, *rest, scale=scale, enable_gqa=enable_gqa)
    return found[0]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor in CPU memory of which torch would choose the same kernel."""
    shape = [1, *tensor.shape[1:-2], min(tensor.shape[-2], 8), tensor.shape[-1]]
    made = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
