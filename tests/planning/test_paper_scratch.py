"""What kernels of this CPU allocate inside is what plans count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.paper import recurrent
from fsdp2.paper.scratch import on_cpu
from fsdp2.paper.values import tensors_in

pytestmark = pytest.mark.alone

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
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in results}
    return peak - sum(each.nbytes() for each in storages.values()), results


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


@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "width"), [(16, 8, 40, 100), (3, 128, 256, 64)]
)
@pytest.mark.parametrize("biases", [True, False])
def test_lstms_keep_and_allocate_what_plans_count(
    steps: int, batch: int, inputs: int, width: int, biases: bool
) -> None:
    """OneDNN's workspace to the byte, and what its two kernels have inside within 10 %."""
    weights = [torch.zeros(4 * width, n) for n in (inputs, width)]
    weights += [torch.zeros(4 * width)] * 2 if biases else [torch.zeros_like(w) for w in weights]
    x, state = torch.zeros(steps, batch, inputs), torch.zeros(batch, width)
    args = (x, *weights, state, state, False, [], 2, width, 1, biases, False, False, True)
    forward: Any = _aten.mkldnn_rnn_layer.default
    inside, results = _allocated_inside(lambda: forward(*args))
    said = recurrent.run(recurrent.FORWARD, _on_meta(args))
    assert [(each.shape, each.dtype) for each in said] == [(r.shape, r.dtype) for r in results]
    assert on_cpu(recurrent.FORWARD, args, results) == pytest.approx(inside, rel=0.1)

    given = (x, *weights, state, state, *results[:3], results[0], state, state)
    given += (False, 2, width, 1, biases, True, False, [], False, results[3])
    backward: Any = _aten.mkldnn_rnn_layer_backward.default
    inside, results = _allocated_inside(lambda: backward(*given))
    said = recurrent.run(recurrent.BACKWARD, _on_meta(given))
    assert [each.shape for each in said] == [each.shape for each in results]
    assert on_cpu(recurrent.BACKWARD, given, results) == pytest.approx(inside, rel=0.1)


def _on_meta(args: tuple[Any, ...]) -> list[Any]:
    return [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "batch_first": True},
        {"bidirectional": True, "num_layers": 2, "dropout": 0.5},
        {"proj_size": 4},
    ],
)
def test_an_lstm_runs_by_the_operators_of_the_cpu(options: dict[str, Any]) -> None:
    """Those that a real one calls; without a batch, too; and torch's own again afterwards."""
    called = []
    for device in ("cpu", "meta"):
        model = torch.nn.LSTM(8, 16, device=device, **options)
        for shape in ((5, 3, 8), (5, 8)):
            with recurrent.onednns() if device == "meta" else nullcontext(), _Names() as names:
                found = model(torch.zeros(shape, device=device))
            wanted = [name for name in names.found if "mkldnn" in name]
            called.append((wanted, found[0].shape, [each.shape for each in found[1]]))
    assert called[:2] == called[2:]
    assert bool(called[0][0]) == ("proj_size" not in options)
    with _Names() as names:
        torch.nn.LSTM(8, 16, device="meta")(torch.zeros(5, 8, device="meta"))
    assert not any("mkldnn" in name for name in names.found)


class _Names(TorchDispatchMode):
    """Notes operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_packed_sequences_have_no_kernel_of_onednn() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(4, 8), torch.zeros(3, 8)])
    with recurrent.onednns(), _Names() as names:
        torch.nn.LSTM(8, 16)(packed)
    assert not any("mkldnn" in name for name in names.found)
