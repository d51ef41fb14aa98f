"""What kernels of this CPU allocate inside is what plans count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp2.paper.scratch import on_cpu
from fsdp2.paper.values import tensors_in

_aten = torch.ops.aten


def _allocated_inside(run: Callable[[], Any]) -> tuple[int, list[torch.Tensor]]:
    """Bytes at the peak beyond what is returned, as torch's profiler adds them up."""
    run()
    with torch.profiler.profile(profile_memory=True) as profiler:
        results = tensors_in(run())
    kineto: Any = profiler.profiler
    events = kineto.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    return peak - sum(each.untyped_storage().nbytes() for each in results), results


def _cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, weight, bias = torch.randn(16, 32, 32, 32), torch.randn(32, 32, 3, 3), torch.randn(32)
    strides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    mean, scale = torch.zeros(32), torch.ones(32)
    q = torch.randn(8, 4, 64, 32)
    out, log = _aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[:2]
    wanted, first = [True, True, True], [False, True, True]
    back = _aten.convolution_backward.default
    norm = (x, x, scale, mean, scale, mean, scale, True, 1e-5, wanted)
    attended = (q, q, q, q, out, log, 0.0, False)
    flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return {
        "a convolution": (_aten.convolution.default, (x, weight, bias, *strides)),
        "its backward": (back, (x, x, weight, [32], *strides, wanted)),
        "its backward without the input's": (back, (x, x, weight, [32], *strides, first)),
        "a batch norm's": (_aten.native_batch_norm_backward.default, norm),
        "attention's": (flash, attended),
        "a linear's, nothing": (_aten.mm.default, (torch.randn(512, 64), torch.randn(64, 256))),
        "a layer norm's, nothing": (
            _aten.native_layer_norm.default,
            (torch.randn(512, 256), [256], torch.ones(256), torch.ones(256), 1e-5),
        ),
        "a softmax's, nothing": (_aten._softmax.default, (torch.randn(512, 256), 1, False)),
    }


@pytest.mark.parametrize("case", list(_cases()))
def test_kernels_allocate_what_plans_count(case: str) -> None:
    """Within 10 % of what the operator moves; threads have buffers of their own, of some kB."""
    run, args = _cases()[case]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        inside, results = _allocated_inside(lambda: run(*args))
    finally:
        torch.set_num_threads(threads)
    said = on_cpu(run._schema.name.removeprefix("aten::"), args, results)
    moved = sum(each.nbytes for each in (*tensors_in(args), *results))
    assert abs(said - inside) <= 0.1 * moved, (said, inside)
