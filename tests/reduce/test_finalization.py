"""Backwards that the caller ends: `set_manual_backward_finalization` and `finalize_backward`.

Where this torch has them (2.15), each scenario must give its bits; everywhere, those of an
unsharded model that adds up the ranks' gradients in the same order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import GradientReductionHandle
from tests.common import meshes, models, parity
from tests.common.workers import ranks

TORCH_HAS_IT = hasattr(parity.TORCH.FSDPModule, "finalize_backward")
MICRO = 3

mlp = partial(models.seeded, models.MLP)


def _batches(steps: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    flat = parity.regression_batches(models.DIM, 4, steps=steps * MICRO)
    return [flat[i : i + MICRO] for i in range(0, len(flat), MICRO)]


def _one() -> tuple[Tensor, Tensor]:
    part: tuple[Tensor, Tensor] = parity.my_part(_batches()[0][0])
    return part


def _copies() -> DeviceMesh:
    return meshes.hsdp_mesh(2, 1)


def _manual(**arguments: Any) -> Any:
    """A model whose backwards the caller ends."""
    model: Any = parity.shard(parity.OURS, mlp(), **arguments)
    model.set_manual_backward_finalization(True)
    return model


def _assert_like_automatic(model: nn.Module) -> None:
    """It has the gradients of one backward that ends by itself."""
    plain = parity.shard(parity.OURS, mlp())
    parity.regression_loss(plain, _one()).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


def _train(
    api: Any,
    *,
    synced: bool,
    async_op: bool,
    keep: bool = False,
    copies: bool = False,
    mixed: bool = False,
) -> list[Any]:
    """Three micro-batches a step, with or without gradient sync, ended by hand."""
    mesh = {"mesh": meshes.hsdp_mesh(2, 1)} if copies else {}
    model: Any = parity.shard(api, mlp(), mixed=mixed, **mesh)
    optimizer = parity.adamw(model.parameters())
    steps: list[Any] = []
    for step in _batches():
        model.set_manual_backward_finalization(True)
        for batch in step:
            model.set_requires_gradient_sync(synced)
            model.set_reshard_after_backward(not keep)
            parity.regression_loss(model, parity.my_part(batch)).backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) is async_op
        if handle is not None:
            handle.wait()
            handle.wait()
        model.set_manual_backward_finalization(False)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        steps.append(parity.full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(parity.full_params(model))
    return steps


def _unsharded(synced: bool) -> list[Any]:
    """The ranks' micro-batches one by one; with sync, ranks are averaged before micro-batches."""
    model = mlp()
    optimizer = parity.adamw(model.parameters())
    steps: list[Any] = []
    for step in _batches():
        sums: list[dict[str, Tensor]] = []  # an entry for each rank, or for each micro-batch
        order = [(m, r) for m in range(MICRO) for r in range(2)]
        for micro, rank in order if synced else sorted(order, key=lambda pair: pair[1]):
            parity.regression_loss(model, parity.my_part(step[micro], rank, 2)).backward()
            if (synced and rank == 1) or (not synced and micro == MICRO - 1):
                sums.append({n: p.grad for n, p in model.named_parameters()})  # type: ignore[misc]
                model.zero_grad()
        for name, param in model.named_parameters():
            parts = [part[name] / 2 for part in sums]
            param.grad = parts[0]
            for part in parts[1:]:
                param.grad = param.grad + part
        steps.append(parity.full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(parity.full_params(model))
    return steps


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("synced", [False, True], ids=["accumulated", "reduced in backward"])
@ranks(2)
def test_micro_batches(synced: bool, async_op: bool) -> None:
    run = partial(_train, synced=synced, async_op=async_op)
    if TORCH_HAS_IT and not synced:
        ours = parity.same_as_torch(run)
    else:
        ours = run(parity.OURS)
        if TORCH_HAS_IT:  # which keeps what no hook saw until the end, and then reduces the sum
            parity.assert_close(ours, run(parity.TORCH), parity.REORDERED_FP32, "torch")
    parity.assert_close(ours, _unsharded(synced), parity.REORDERED_FP32, "unsharded")


@pytest.mark.parametrize("setting", ["keep", "copies", "mixed"])
@ranks(2)
def test_micro_batches_in_other_settings(setting: str) -> None:
    run = partial(_train, synced=False, async_op=True, **{setting: True})
    ours = parity.same_as_torch(run) if TORCH_HAS_IT else run(parity.OURS)
    if setting != "mixed":
        parity.assert_close(ours, _unsharded(False), parity.REORDERED_FP32, "unsharded")


@ranks(2)
def test_automatic_and_manual_take_turns() -> None:
    """The same steps, whoever ends them, and whatever the mode was before."""
    model, plain = parity.shard(parity.OURS, mlp()), parity.shard(parity.OURS, mlp())
    for manual in (True, False, True):
        for wanted, one in ((manual, model), (False, plain)):
            one.set_manual_backward_finalization(wanted)
            parity.regression_loss(one, _one()).backward()
            if wanted:
                one.finalize_backward()
        parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))
        model.zero_grad()
        plain.zero_grad()


@ranks(2)
def test_gradients_that_autograd_did_not_deliver() -> None:
    """Input gradients first, weight gradients later and by hand, as zero-bubble schedules do."""
    model = _manual(reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    inputs, targets = _one()
    inputs.requires_grad_()
    loss = parity.regression_loss(model, (inputs, targets))
    (to_input,) = torch.autograd.grad(loss, [inputs], retain_graph=True)
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward()

    plain = parity.shard(parity.OURS, mlp())
    inputs.grad = None
    parity.regression_loss(plain, (inputs, targets)).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))
    parity.assert_equal(to_input, inputs.grad)


@ranks(2)
def test_finalize_without_a_backward() -> None:
    """Before the first forward, after a forward, after a backward that reaches no parameter."""
    model: Any = parity.shard(parity.OURS, mlp())
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    handle.wait()
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None
    with torch.no_grad():
        parity.regression_loss(model, _one())
    model.finalize_backward()
    torch.ones(3, requires_grad=True).sum().backward()
    model.finalize_backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(isinstance(param, DTensor) for param in model.parameters())


@ranks(2)
def test_a_handle_dropped_by_a_reset() -> None:
    model = _manual()
    parity.regression_loss(model, _one()).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"dropped by reset_iter_state\(\)"):
            handle.wait()
    model.zero_grad()
    parity.regression_loss(model, _one()).backward()
    model.finalize_backward()
    _assert_like_automatic(model)


@pytest.mark.parametrize("during", ["forward", "backward"])
@ranks(2)
def test_calls_in_the_middle_of_an_iteration(during: str) -> None:
    model = _manual()
    errors: list[str] = []

    def call(*_: Any) -> None:
        for method in (
            model.finalize_backward,
            partial(model.set_manual_backward_finalization, False),
        ):
            with pytest.raises(RuntimeError) as error:
                method()
            errors.append(str(error.value))
        model.set_manual_backward_finalization(True)  # no change

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        if during == "forward":
            call()
        else:
            output.register_hook(call)

    model.layers[1].register_forward_hook(after_forward)
    parity.regression_loss(model, _one()).backward()
    assert len(errors) == 2
    assert all(f"was called during {during}; call it after its end" in text for text in errors)
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())


@ranks(2)
def test_no_reduction_if_sync_is_off() -> None:
    """finalize follows the flags; a later one reduces what this one left."""
    model = _manual()
    model.set_requires_gradient_sync(False)
    parity.regression_loss(model, _one()).backward()
    model.finalize_backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    _assert_like_automatic(model)


@ranks(2)
def test_partial_sums_are_finished_by_finalize() -> None:
    """HSDP: backwards that only reduce-scatter, then one all-reduce at the end."""
    mesh = _copies()
    model = _manual(mesh=mesh)
    model.set_requires_all_reduce(False)
    for batch in _batches()[0]:
        parity.regression_loss(model, parity.my_part(batch)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    plain = parity.shard(parity.OURS, mlp(), mesh=mesh)
    for batch in _batches()[0]:
        parity.regression_loss(plain, parity.my_part(batch)).backward()
    parity.assert_close(parity.full_grads(model), parity.full_grads(plain), parity.REORDERED_FP32)
