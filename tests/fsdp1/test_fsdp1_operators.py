"""Optimizers and loops written for torch's FSDP1, on parameters of our wrapper.

Compared with the unsharded model on all ranks' inputs: parameters of even and of uneven rows, and
of fewer rows than ranks. Tolerance: sums over rows are made in another order.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fsdp2
from fsdp2.fsdp1 import FSDP, ShardingStrategy
from tests.common import parity
from tests.common.errors import raises
from tests.common.models import seeded
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

CLOSE = parity.Tolerance(rtol=2e-5, atol=1e-6)
DIM = 6


class Net(nn.Module):
    """Weights of 8, 5 and 1 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(DIM, 8), nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def wrapped(**arguments: Any) -> Any:
    model = seeded(Net)
    arguments |= {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.second = FSDP(model.second, **arguments)
    return FSDP(model, **arguments)


def inputs(step: int = 0) -> Tensor:
    """A batch for each rank."""
    return torch.randn(dist.get_world_size(), 4, DIM, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int = 0) -> Tensor:
    """Of the mean over ranks; the unsharded model computes all of it."""
    x = inputs(step)
    if isinstance(model, FSDP):
        loss = model(x[dist.get_rank()]).square().mean()
    else:
        loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def pairs(sharded: nn.Module, plain: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return list(zip(sharded.parameters(), plain.parameters(), strict=True))


def check(sharded: nn.Module, plain: nn.Module, where: str = "") -> None:
    for name, (ours, expected) in enumerate(pairs(sharded, plain)):
        parity.assert_close(parity.full(ours), expected, CLOSE, f"{where} parameter {name}")


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, 0.05, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.05, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "adamax foreach": lambda p: torch.optim.Adamax(p, 0.01, foreach=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, 0.01, foreach=False, differentiable=False),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05),
    "asgd foreach": lambda p: torch.optim.ASGD(p, 0.05, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "nadam foreach": lambda p: torch.optim.NAdam(p, 0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "radam foreach": lambda p: torch.optim.RAdam(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, eps=1e-3),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(
        p, 0.01, centered=True, eps=1e-3, foreach=True
    ),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "rprop foreach": lambda p: torch.optim.Rprop(p, 0.01, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "sgd fused nesterov": lambda p: torch.optim.SGD(
        p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "sgd maximize": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, maximize=True, foreach=True),
}


@ranks(2, extended=(3, 4))
def test_optimizers_of_torch() -> None:
    for name, make in OPTIMIZERS.items():
        sharded, plain = wrapped(), seeded(Net)
        steps = [(model, make(list(model.parameters()))) for model in (sharded, plain)]
        for step in range(4):
            for model, optimizer in steps:
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        check(sharded, plain, name)
        for state in steps[0][1].state.values():
            for value in state.values():
                assert not isinstance(value, DTensor) or not value.is_inference()


@ranks(2)
def test_matrices_of_muon() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        backward(model)
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.05).step()
    for ours, expected in pairs(sharded, plain):
        parity.assert_close(
            parity.full(ours), expected, parity.Tolerance(rtol=0, atol=0.01)
        )  # it computes in bf16


@ranks(2, extended=(3,))
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    """Ranks with losses of their own evaluate the model equally often, and as the unsharded one."""
    counts = []
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.3, max_iter=6, line_search_fn=search, tolerance_change=1e-4
        )
        count = 0

        def closure(model: nn.Module = model, made: Any = optimizer) -> Tensor:
            nonlocal count
            count += 1
            made.zero_grad()
            return backward(model)

        first = optimizer.step(closure)
        optimizer.step(closure)
        counts.append((count, first))
    assert counts[0][0] == counts[1][0]
    parity.assert_close(counts[0][1], counts[1][1], CLOSE, "the loss that step() returns")
    for ours, expected in pairs(sharded, plain):
        parity.assert_close(parity.full(ours), expected, parity.Tolerance(rtol=1e-3, atol=1e-4))


# ---- loops that read

READS: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "parameters_to_vector": parameters_to_vector,
    "cat": lambda tensors: torch.cat([t.reshape(-1) for t in tensors]),
    "flatten": lambda tensors: [t.flatten() for t in tensors],
    "ravel": lambda tensors: [t.ravel().sum() for t in tensors],
    "quantile": lambda tensors: [torch.quantile(t, 0.9) for t in tensors],
    "nanquantile": lambda tensors: [torch.nanquantile(t, 0.3) for t in tensors],
    "median": lambda tensors: [t.median() for t in tensors],
    "kthvalue": lambda tensors: [t.flatten().kthvalue(1).values for t in tensors],
    "topk": lambda tensors: [t.abs().flatten().topk(1).values for t in tensors],
    "sort": lambda tensors: [t.flatten().sort().values for t in tensors],
    "unique": lambda tensors: [t.unique() for t in tensors],
    "nonzero": lambda tensors: [(t > 0).nonzero() for t in tensors],
    "masked_select": lambda tensors: [t[t > 0] for t in tensors],
    "histc": lambda tensors: [torch.histc(t, 5) for t in tensors],
    "histogram": lambda tensors: [torch.histogram(t.cpu(), 5).hist for t in tensors],
    "allclose": lambda tensors: [torch.allclose(t, t + 1e-9) for t in tensors],
    "isnan": lambda tensors: [bool(torch.isnan(t).any()) for t in tensors],
    "isfinite": lambda tensors: [bool(torch.isfinite(t).all()) for t in tensors],
    "max item": lambda tensors: [t.abs().max().item() for t in tensors],
    "min item": lambda tensors: [float(t.min()) for t in tensors],
    "amax": lambda tensors: [(t.amax(), t.amin(dim=0)) for t in tensors],
    "aminmax": lambda tensors: [t.aminmax() for t in tensors],
    "argmax": lambda tensors: [(t.argmax().item(), t.flatten().argmin()) for t in tensors],
    "max dim": lambda tensors: [(t.max(dim=0).values, t.min(dim=0).indices) for t in tensors],
    "inf norm": lambda tensors: [
        (t.norm(p), torch.linalg.vector_norm(t, p))
        for t in tensors
        for p in (float("inf"), -float("inf"), 0, 1, 3, -1)
    ],
    "foreach norm": lambda tensors: torch._foreach_norm(tensors, float("inf")),
    "prod": lambda tensors: [(t.prod(), t.mean(), t.var(unbiased=False)) for t in tensors],
    "logsumexp": lambda tensors: [(t.logsumexp(0), t.softmax(0), t.cummax(0)) for t in tensors],
    "mode": lambda tensors: [(t.flatten().mode().values, t.count_nonzero()) for t in tensors],
    "std item": lambda tensors: [t.std(unbiased=False).item() for t in tensors],
    "norm": lambda tensors: torch.stack([t.norm() ** 2 for t in tensors]).sum().sqrt(),
    "cosine": lambda tensors: [
        torch.cosine_similarity(t.flatten(), t.flatten() + 1, dim=0) for t in tensors
    ],
    "dot": lambda tensors: [t.flatten().dot(t.flatten()) for t in tensors],
    "einsum": lambda tensors: [torch.einsum("i,i->", t.flatten(), t.flatten()) for t in tensors],
    "cdist": lambda tensors: [torch.cdist(t, t) for t in tensors if t.dim() == 2],
    "rows": lambda tensors: [list(t)[-1] for t in tensors],
    "unbind": lambda tensors: [t.unbind(0)[0] for t in tensors],
    "indexed": lambda tensors: [t[torch.tensor([0])] for t in tensors],
    "gathered": lambda tensors: [
        t.gather(0, torch.zeros(1, 3, dtype=torch.long)) for t in tensors if t.dim() == 2
    ],
    "selected": lambda tensors: [t.index_select(0, torch.tensor([0, 0])) for t in tensors],
    "taken": lambda tensors: [t.take(torch.tensor([1, 0])) for t in tensors if t.numel() > 1],
    "embedded": lambda tensors: [
        nn.functional.embedding(torch.tensor([0]), t) for t in tensors if t.dim() == 2
    ],
    "beside plain": lambda tensors: [t + torch.arange(t.numel()).view(t.shape) for t in tensors],
    "svd": lambda tensors: [torch.linalg.svdvals(t) for t in tensors if t.dim() == 2],
    "expanded": lambda tensors: [t.unsqueeze(0).expand(2, *t.shape).reshape(-1) for t in tensors],
    "split": lambda tensors: [torch.cat(t.flatten().split(3)) for t in tensors],
    "cumsum": lambda tensors: [t.flatten().cumsum(0) for t in tensors],
    "formatted": lambda tensors: [f"{t.abs().max().sqrt().square():.2f}" for t in tensors],
}


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):  # named ones, too
        return [_as_plain(each) for each in value]
    if isinstance(value, Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole.detach())
    return torch.tensor(value) if isinstance(value, float) else value


@ranks(2, extended=(3, 4))
def test_loops_that_read() -> None:
    """Gradients and parameters, under ``no_grad`` as such loops are, and without."""
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        backward(model)
    for name, read in READS.items():
        for grads in (False, True):
            found, expected = (
                _as_plain(read([p.grad if grads else p.detach() for p in model.parameters()]))
                for model in (sharded, plain)
            )
            assert type(found) is type(expected)
            parity.assert_close(found, expected, CLOSE, name)


@ranks(2)
def test_regularizers_of_flattened_parameters() -> None:
    """Their gradients are those of the unsharded model."""
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        backward(model)
        penalty = torch.cat([p.view(-1) for p in model.parameters()]).square().sum()
        (0.1 * penalty).backward()
        torch.optim.SGD(model.parameters(), 0.1, foreach=False).step()
    check(sharded, plain)


# ---- loops that write


def _noise(params: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in params:
        param.grad.add_(torch.randn(param.grad.shape, generator=generator) * 0.1)


def _plain_gradients(params: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(2)
    for param in list(params)[::2]:
        param.grad = torch.randn(param.shape, generator=generator)


def _noise_on_views(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad.view(-1).add_(torch.arange(param.grad.numel()))


def _sparsify(params: Sequence[Tensor]) -> None:
    for param in params:
        flat = param.grad.view(-1)
        flat[flat.abs().topk(1).indices] = 0.0


def _mask(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad[param.grad > 0] = 0.5
        param.mul_((torch.arange(param.numel()).view(param.shape) % 2).float())


def _rows(params: Sequence[Tensor]) -> None:
    for param in params:
        param[0] = 2.0
        param[0].mul_(1.5)
        param[-1:].add_(1.0)
        param.narrow(0, 0, 1).sub_(0.25)
        param.index_fill_(0, torch.tensor([0]), 3.0)


def _columns(params: Sequence[Tensor]) -> None:
    for param in params:
        if param.dim() == 2:
            param[:, 1].zero_()
            param[0, 2] = 7.0
            param.t()[0].fill_(5.0)
            param.diagonal().add_(1.0)


def _vectors(params: Sequence[Tensor]) -> None:
    vector_to_parameters(parameters_to_vector(params) * 0.5, params)


def _data(params: Sequence[Tensor]) -> None:
    for param in params:
        param.data = param.data * 0.9
        param.data = torch.arange(param.numel()).view(param.shape) + param.data
        param.grad.data = param.grad.data.clamp(min=0)
        param.data.mul_(2)
        param.data.copy_(torch.linspace(0, 1, param.numel()).view(param.shape))


def _accumulators(params: Sequence[Tensor]) -> None:
    """Plain tensors that DTensors are added to, and given back."""
    for param in params:
        plain = torch.zeros(param.shape)
        plain.add_(param.grad, alpha=2)
        plain.lerp_(param, 0.5)
        torch._foreach_add_([plain], [param])
        other = torch.empty(param.shape)
        other.copy_(param)
        param.copy_(plain - other)


def _cumulative(params: Sequence[Tensor]) -> None:
    for param in params:
        param.cumsum_(0)
        param.grad.flatten().cumsum_(0)
        param.masked_scatter_(param > 0, torch.arange(param.numel()).float())


def _out(params: Sequence[Tensor]) -> None:
    for param in params:
        torch.mul(param, 2, out=param)
        if param.dim() == 2:
            nn.init.eye_(param)
            torch.eye(*param.shape, out=param.grad)
        torch.nn.utils.clip_grad_value_([param], 0.2)
        nn.init.constant_(param[:1], 0.25)


WRITES = [
    *(
        _noise,
        _plain_gradients,
        _noise_on_views,
        _sparsify,
        _mask,
        _rows,
        _columns,
        _vectors,
        _data,
    ),
    *(_accumulators, _cumulative, _out),
]


@ranks(2, extended=(3, 4))
def test_loops_that_write() -> None:
    for number, write in enumerate(WRITES):
        sharded, plain = wrapped(), seeded(Net)
        way = (dict[str, Any](), {"fused": True}, {"foreach": True})[number % 3]
        for model in (sharded, plain):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **way)
            for step in range(2):
                backward(model, step)
                with torch.no_grad():
                    write(list(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
        check(sharded, plain, write.__name__)
        parity.assert_close(  # what a forward gathers is what was written
            sharded(inputs()[0]), plain(inputs()[0]), parity.Tolerance(rtol=1e-4, atol=1e-5)
        )


@ranks(2)
def test_views_show_what_rows_are_now() -> None:
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        backward(model)
        weight = model.second.weight
        with torch.no_grad():
            flat, other, row = weight.view(-1), weight.flatten(), weight[4]
            part = flat[3:17]
            weight.data.mul_(2)
            torch.optim.SGD(model.parameters(), 0.1).step()
            flat.mul_(3)
            other.add_(1)
            part.copy_(torch.arange(14))
            part[:2].zero_()
            row.neg_()
            flat[5] = 9.0
            flat.view(8, 5).t()[0] = flat[:8] + other[-8:]
            total = flat.sum() + row.sum() + part.mean()
        torch.optim.SGD(model.parameters(), 0.1).step()
        flat.detach().mul_(total.detach())
    check(sharded, plain)


# ---- what is refused


@ranks(2)
def test_what_a_rank_has_a_part_of() -> None:
    """Nothing is sent: a rank may ask alone."""
    model = wrapped()
    backward(model)
    weight = next(p for p in model.parameters() if p.shape == (5, 8))
    if dist.get_rank() == 0:
        for tensor in (weight.detach(), weight.grad):
            for values in (lambda t: t.numpy(), lambda t: t.tolist(), np.asarray):
                with raises("values-of-a-shard"):
                    values(tensor)
        for number in (weight.grad.norm(), weight.detach().sum(), weight.grad.count_nonzero()):
            for read in (lambda t: t.item(), float):
                with raises("item-of-a-summand"):
                    read(number)
        with raises("values-of-a-shard"):
            format(weight.grad.norm(), ".2f")
    with raises("operator-unknown"):
        torch.poisson(weight.detach().abs())
    with raises("operator-unknown"):
        dist.all_reduce(weight.grad)
    with raises("data-of-another-kind"):
        weight.data = weight.data.to(torch.bfloat16)
    with raises("data-of-another-kind"):
        weight.data = torch.zeros(3)
    array = weight.detach().std().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[()] = 1.0


@ranks(4)
@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
def test_other_strategies(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (4,) if strategy == "NO_SHARD" else (2, 2))
    for write in (_noise, _rows, _vectors, _data):
        sharded = wrapped(sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
        plain = seeded(Net)
        for model in (sharded, plain):
            backward(model)
            with torch.no_grad():
                write(list(model.parameters()))
            torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
        check(sharded, plain, write.__name__)
    backward(sharded)
    assert float(next(sharded.parameters()).grad.abs().max()) > 0


@ranks(2)
def test_only_while_there_are_wrappers() -> None:
    """Units of `fully_shard`, and DTensors of others' meshes, are as without."""
    gc.collect()
    dispatcher: Any = DTensor._op_dispatcher
    before = [dict(vars(each)) for each in (dispatcher, type(dispatcher), DTensor)]
    model = wrapped()
    mesh = init_device_mesh("cpu", (1, 2))
    odd = distribute_tensor(torch.randn(5, 4), mesh, [Replicate(), Shard(0)])
    with pytest.raises(RuntimeError, match="flatten unevenly"):
        odd.view(-1)
    assert isinstance(odd.norm().item(), float)
    del model
    gc.collect()
    assert [dict(vars(each)) for each in (dispatcher, type(dispatcher), DTensor)] == before
    assert not dispatcher._allow_implicit_replication
    unit = fsdp2.fully_shard(seeded(Net))
    with pytest.raises(RuntimeError, match="flatten unevenly"):
        unit.second.weight.view(-1)


MIXED = "got mixed torch.Tensor and DTensor"

# Each of a sharded tensor, a whole one of its shape, a mask of it and an index of it.
BESIDE_A_PLAIN_TENSOR: dict[str, Callable[[Any, Any, Any, Any], object]] = {
    "add": lambda own, other, mask, index: own + other,
    "add in front": lambda own, other, mask, index: other + own,
    "add_": lambda own, other, mask, index: own.clone().add_(other),
    "copy_": lambda own, other, mask, index: own.clone().copy_(other),
    "addcmul": lambda own, other, mask, index: torch.addcmul(own, other, other, value=2),
    "lerp": lambda own, other, mask, index: torch.lerp(own, other, 0.5),
    "foreach": lambda own, other, mask, index: torch._foreach_add([own, own], [other, other]),
    "cat": lambda own, other, mask, index: torch.cat([own, other]),
    "stack": lambda own, other, mask, index: torch.stack([other, own]),
    "linear": lambda own, other, mask, index: nn.functional.linear(own, other),
    "mm": lambda own, other, mask, index: other.T @ own,
    "mse": lambda own, other, mask, index: nn.functional.mse_loss(own, other),
    "equal": lambda own, other, mask, index: torch.equal(own, other),
    "where": lambda own, other, mask, index: torch.where(mask, own, own),
    "masked_fill": lambda own, other, mask, index: own.masked_fill(mask, 0.0),
    "index": lambda own, other, mask, index: own[index],
    "embedding": lambda own, other, mask, index: nn.functional.embedding(index, own),
}


def _beside(dtensor: Any, of_others: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """What each operator raises on a DTensor beside tensors that ``of_others`` makes."""
    whole = torch.ones(dtensor.shape)
    others = [of_others(each) for each in (whole, whole > 0, torch.tensor([0, 2]))]
    raised = {}
    for name, call in BESIDE_A_PLAIN_TENSOR.items():
        try:
            call(dtensor, *others)
        except RuntimeError as error:
            raised[name] = str(error)
    return raised


@ranks(2)
@pytest.mark.parametrize("known", [False, True])
def test_plain_tensors_beside_dtensors_of_others(known: bool) -> None:
    """torch's error is raised as without a wrapper, by operators that are known to DTensor, too."""
    wrapper, unit = wrapped(), fsdp2.fully_shard(seeded(Net))
    mesh = unit.second.weight.device_mesh
    whole = torch.randn(5, 8)
    of_mesh = {
        "parameter": unit.second.weight.detach(),
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "of another mesh": distribute_tensor(
            whole, init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(1)]
        ),
    }
    for kind, dtensor in of_mesh.items():
        for _ in range(2 if known else 0):  # with a replicated DTensor in place of the plain one
            _beside(
                dtensor,
                lambda plain, mesh=dtensor.device_mesh: distribute_tensor(
                    plain, mesh, [Replicate()] * mesh.ndim
                ),
            )
        raised = _beside(dtensor, lambda plain: plain)
        assert list(raised) == list(BESIDE_A_PLAIN_TENSOR), kind
        assert all(MIXED in text for text in raised.values()), (kind, raised)
    assert _beside(wrapper.second.weight.detach(), lambda plain: plain) == {}


@ranks(2)
def test_plain_tensors_that_a_user_allows() -> None:
    """Inside torch's `implicit_replication`: of all meshes; after it of the wrapper's still."""
    wrapper, unit = wrapped(), fsdp2.fully_shard(seeded(Net))
    own, other = wrapper.second.weight.detach(), unit.second.weight.detach()
    noise = torch.ones(5, 8)
    for _ in range(2):
        with implicit_replication():
            assert torch.equal(parity.full(other + noise), parity.full(other) + noise)
            assert torch.equal(parity.full(own + noise), parity.full(own) + noise)
        with pytest.raises(RuntimeError, match=MIXED):
            other + noise
        assert torch.equal(parity.full(own + noise), parity.full(own) + noise)


@ranks(2)
def test_a_wrapper_that_another_thread_frees() -> None:
    """torch's switch for plain tensors is of each thread: one that frees a wrapper leaves ours."""
    models = [wrapped()]
    gc.collect()
    unit = fsdp2.fully_shard(seeded(Net))

    def free() -> None:
        models.clear()
        gc.collect()

    thread = threading.Thread(target=free)
    thread.start()
    thread.join()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MIXED):
            unit.second.weight + torch.ones(5, 8)
        models.append(wrapped())
        weight = models[0].second.weight.detach()
        assert torch.equal(parity.full(weight + 1.0), parity.full(weight + torch.ones(5, 8)))
        models.clear()
        gc.collect()
    assert not torch._C._get_dtensor_allow_implicit_replication()


@ranks(2)
def test_methods_of_others_dtensors() -> None:
    """`numpy`, `tolist` and `format` are DTensor's own for tensors of other meshes."""
    unit = fsdp2.fully_shard(seeded(Net))
    mesh = unit.second.weight.device_mesh
    scalar = distribute_tensor(torch.ones(()), mesh, [Replicate()])
    tensors = [unit.second.weight.detach(), scalar]

    def seen(read: Callable[[Any], object], tensor: Tensor) -> str:
        try:
            return repr(read(tensor))
        except Exception as error:
            return repr(error)

    reads = [
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: format(t, ".2f"),
        lambda t: f"{t}",
    ]
    without = [seen(read, tensor) for read in reads for tensor in tensors]
    wrapper = wrapped()
    assert [seen(read, tensor) for read in reads for tensor in tensors] == without
    with raises("values-of-a-shard"):
        wrapper.second.weight.tolist()


@ranks(2)
def test_copies_of_parameters() -> None:
    """An average of weights, kept as clones, swapped in for an evaluation, and back."""
    sharded, plain = wrapped(), seeded(Net)
    for model in (sharded, plain):
        average = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for kept, param in zip(average, model.parameters(), strict=True):
                    kept.mul_(0.9).add_(param, alpha=0.1)
        for kept, param in zip(average, model.parameters(), strict=True):
            param.data, param.grad = kept.clone(), None
    check(sharded, plain)
    assert copy.copy(sharded.second.weight).shape == (5, 8)
