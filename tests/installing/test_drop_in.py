"""What torch's FSDP2 does and few programs ask for: the same here, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import fsdp2
from tests.common import gradients, meshes, models, parity, tensors
from tests.common.errors import raises
from tests.common.workers import ranks

X = torch.linspace(-1, 1, 4 * models.DIM).view(4, models.DIM)


def _inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    """Other ones on each rank."""
    return (X + dist.get_rank()).to(dtype)


def _three_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(models.DIM, models.DIM) for _ in range(3)])


# -- conversions of a model that has gradients ----------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "there and back": lambda model: model.double().float(),
    "a submodule": lambda model: model[1].double(),
}


@ranks(2)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_take_gradients_along(conversion: str, stepped: bool) -> None:
    """Units of three and more parameters, whose old gradients are used again."""

    def convert(model: nn.Module) -> list[Any]:
        optimizer = parity.adamw(model.parameters())
        for _ in range(2):
            model.zero_grad()
            model(_inputs()).square().sum().backward()
        if stepped:
            optimizer.step()
        CONVERSIONS[conversion](model)
        return [(param.dtype, param.grad.dtype) for param in model.parameters()]

    def scenario(api: ModuleType) -> Any:
        model = parity.shard(api, models.seeded(_three_layers))
        dtypes = convert(model)
        return dtypes, parity.full_grads(model), parity.full_params(model)

    parity.same_as_torch(scenario)
    if conversion == "a submodule":
        return
    model = parity.shard(parity.OURS, models.seeded(_three_layers))
    dtypes = convert(model)
    before, params = parity.full_grads(model), parity.full_params(model)
    model(_inputs(dtypes[0][0])).square().sum().backward()  # torch refuses to
    plain = models.seeded(_three_layers).to(dtypes[0][0])
    plain.load_state_dict(params)

    def compute(plain: nn.Module, rank: int) -> None:
        plain((X + rank).to(dtypes[0][0])).square().sum().backward()

    added = gradients.unsharded_grads(plain, compute)
    parity.assert_equal(
        parity.full_grads(model), {name: before[name] + added[name] for name in added}
    )


# -- transforms of torch.func as a unit's first forward -------------------------------------------

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f, x: vjp(f, x)[0],
    "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
}


Run = Callable[[nn.Module, Tensor], Any]
"""Runs a forward and backward of a model on a rank's inputs; returns what to compare."""


def _as_unsharded(
    build: Callable[[], nn.Module], run: Run, mixed: bool = False, **arguments: Any
) -> None:
    """And as torch's FSDP2, which can from 2.13 on."""

    def scenario(api: ModuleType) -> Any:
        model = parity.shard(api, models.seeded(build), mixed=mixed, **arguments)
        return run(model, _inputs()), parity.full_grads(model)

    found, grads = (
        parity.same_as_torch(scenario) if meshes.TORCH_VERSION >= (2, 13) else scenario(parity.OURS)
    )
    plain = models.seeded(build)
    reference = parity.Bf16(plain) if mixed else plain
    parity.assert_equal(found, run(reference, _inputs()))
    gradients.assert_like_unsharded(grads, plain, lambda _, rank: run(reference, X + rank))


@ranks(2)
@pytest.mark.parametrize("reshard", [False, 1])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_first_forward_inside_a_transform(transform: str, mixed: bool, reshard: Any) -> None:
    def run(model: nn.Module, x: Tensor) -> Any:
        found = TRANSFORMS[transform](model, x)
        model(x).square().sum().backward()
        return found

    _as_unsharded(models.MLP, run, mixed=mixed, reshard_after_forward=reshard)


class _Sum(nn.Module):
    """Two inputs, by position or name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) * self.linear(2 * y)


@ranks(2)
def test_a_transform_of_units_with_several_inputs() -> None:
    def run(model: nn.Module, x: Tensor) -> Any:
        by_both = grad(lambda x, y: model(x, y=y).sum(), argnums=(0, 1))(x, x)
        model(x, x).sum().backward()
        return list(by_both)

    _as_unsharded(_Sum, run)


class _Unit(nn.Linear):
    is_unit = True


class _Mapped(nn.Module):
    """Units that run inside of ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Unit(models.DIM, models.DIM), _Unit(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return vmap(self.second)(torch.tanh(vmap(self.first)(x)))


@ranks(2)
@pytest.mark.parametrize("outside", [False, True])
def test_a_backward_of_what_vmap_made(outside: bool) -> None:
    """Its outputs say, inside, that they need no gradients."""

    def run(model: nn.Module, x: Tensor) -> Any:
        x = x.unsqueeze(1).requires_grad_()
        (vmap(model)(x.unsqueeze(1)) if outside else model(x)).square().sum().backward()
        return x.grad

    _as_unsharded(_Mapped, run)


# -- parameters of other kinds --------------------------------------------------------------------


class _Spectral(nn.Module):
    """Multiplies in the frequency domain, as Fourier neural operators do."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(5, models.DIM, dtype=dtype))
        self.even = nn.Parameter(torch.randn(8, models.DIM, dtype=dtype))
        self.scale = nn.Parameter(
            torch.randn(models.DIM, dtype=torch.zeros((), dtype=dtype).real.dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x.to(self.scale.dtype) * self.scale)
        return torch.cat([spectrum @ self.odd.T, spectrum @ self.even.T], -1).abs()


@ranks(2, 4)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype, copies: int) -> None:
    """Backends know no complex numbers; `reduce_dtype` is for real ones."""
    size = dist.get_world_size()
    plain, model = models.seeded(lambda: _Spectral(dtype)), models.seeded(lambda: _Spectral(dtype))
    mesh = meshes.hsdp_mesh(copies, size // copies) if copies > 1 else parity.world_mesh()
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=policy)
    for rank in range(size):
        (plain(X + rank).sum() / size).backward()
    model(_inputs()).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert {
        name: grad.dtype for name, grad in parity.full_grads(model).items() if grad is not None
    } == {name: param.dtype for name, param in plain.named_parameters()}
    found = {
        name: torch.view_as_real(g)
        for name, g in parity.full_grads(model).items()
        if g.is_complex()
    }
    wanted = {name: torch.view_as_real(g) for name, g in expected.items() if g.is_complex()}
    parity.assert_close(found, wanted, parity.FP32)
    parity.assert_close(parity.full_grads(model)["scale"], expected["scale"], parity.FP32)


class _ComplexPair(tensors.Wrapped):
    """Complex rows that travel as real ones, by hooks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (torch.view_as_real(self._data),), None

    def fsdp_post_all_gather(self, outputs: Any, *_: Any, out: Any = None) -> Any:
        return None if out is not None else (torch.view_as_complex(outputs[0]), outputs)


@ranks(2)
def test_complex_parameters_with_all_gather_hooks() -> None:
    plain, model = models.seeded(_Spectral), models.seeded(_Spectral)
    model.even = nn.Parameter(_ComplexPair(model.even.detach()), requires_grad=False)
    fsdp2.fully_shard(model, mesh=parity.world_mesh())
    parity.assert_equal(model(X).detach(), plain(X).detach())


@ranks(2)
def test_parameters_that_are_on_their_way() -> None:
    """A DTensor whose local tensor is waited for at its first use."""
    both = meshes.mesh("dp", "tp", shape=(1, 2))
    pieces = distribute_tensor(X.clone(), both["tp"], [Shard(0)])
    layer = nn.Linear(models.DIM, 4, bias=False)
    layer.weight = nn.Parameter(pieces.redistribute(placements=[Replicate()], async_op=True))
    assert type(layer.weight._local_tensor) is AsyncCollectiveTensor
    fsdp2.fully_shard(layer, mesh=both["dp"])
    parity.assert_equal(parity.full(layer.weight), X)


class _Pair(tensors.Wrapped):
    """Wraps another tensor and has no all-gather hooks, until somebody gives an object some."""


@ranks(2)
def test_hooks_that_are_given_after_meta_init() -> None:
    """What wraps other tensors stays what it is until its hooks are there."""
    layer = tensors.extend(nn.Linear(models.DIM, models.DIM, bias=False, device="meta"), _Pair)
    model: Any = fsdp2.fully_shard(layer, mesh=parity.world_mesh())
    assert type(model.weight.to_local()) is _Pair
    model.to_empty(device="cpu")
    local = model.weight._local_tensor
    assert type(local) is _Pair
    torch.nn.init.constant_(local._data, dist.get_rank() + 1)
    with raises("hooks-missing"):
        model(_inputs())
    pre, post = _travel(local)
    for name, hook in (("fsdp_pre_all_gather", pre), ("fsdp_post_all_gather", post)):
        setattr(local, name, hook)
        with raises("hooks-missing"):  # one of two
            model(_inputs())
        delattr(local, name)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    expected = torch.cat(
        [
            torch.full((models.DIM // 2, models.DIM), 1.0),
            torch.full((models.DIM // 2, models.DIM), 2.0),
        ]
    )
    parity.assert_equal(model(_inputs()).detach(), _inputs() @ expected.T)


def _travel(local: Any) -> tuple[Any, Any]:
    def pre(mesh: Any) -> Any:
        return (local._data,), None

    def post(outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    return pre, post


# -- what changes between forward and backward ----------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("waiting", ["unreduced", "partial sums", "finalize"])
def test_gradients_of_before_are_not_lost_by_freezing(waiting: str) -> None:
    """What an earlier backward left is delivered, and only that: as without sharding."""
    size = dist.get_world_size()
    data = meshes.hsdp_mesh(2, size // 2) if waiting == "partial sums" else parity.world_mesh()
    plain, model = models.seeded(_three_layers), models.seeded(_three_layers)
    fsdp2.fully_shard(model, mesh=data, reshard_after_forward=True)
    model.set_manual_backward_finalization(waiting == "finalize")
    if waiting == "partial sums":
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    model(_inputs()).square().sum().backward()
    model.set_requires_gradient_sync(True)
    if waiting == "finalize":
        model[1].requires_grad_(False)
        model.finalize_backward()
    else:
        loss = model(_inputs()).square().sum()
        model[1].requires_grad_(False)
        loss.backward()
    for frozen in (False, True)[: 1 if waiting == "finalize" else 2]:
        plain[1].requires_grad_(not frozen)
        for rank in range(size):
            (plain(X + rank).square().sum() / size).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    found = parity.full_grads(model)
    if waiting == "unreduced":  # both are in one sum by then: nothing is lost
        for name in ("1.weight", "1.bias"):
            assert found.pop(name) is not None
            del expected[name]
    parity.assert_close(found, expected, parity.FP32)


@ranks(2)
@pytest.mark.parametrize("kept", [False, True])
def test_some_of_a_unit_frozen_between_forward_and_backward(kept: bool) -> None:
    """Old gradients that are used again, or kept, are given to those that train."""
    model = models.seeded(_three_layers)
    model = fsdp2.fully_shard(model, mesh=parity.world_mesh(), reshard_after_forward=True)
    model.set_tuning(keep_gradients=kept)
    names = [name for name, _ in model.named_parameters()]
    model(_inputs()).square().sum().backward()
    wanted = parity.full_grads(model)
    for frozen in (names[-1], names[0], None, names[2]):
        model.zero_grad()
        loss = model(_inputs()).square().sum()
        if frozen is not None:
            model.get_parameter(frozen).requires_grad_(False)
        loss.backward()
        parity.assert_equal(
            parity.full_grads(model), {**wanted, **({frozen: None} if frozen else {})}
        )
        model.requires_grad_(True)


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Counted(_Allocates, fsdp2.AllGather):
    count = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self.count += 1
        dist.all_gather_into_tensor(output_tensor, input_tensor, group)


@ranks(2)
def test_another_way_to_gather_from_backward_on() -> None:
    """What is set between forward and backward counts from the next gather on."""
    model, comm = models.seeded(models.MLP), _Counted()
    fsdp2.fully_shard(model, mesh=parity.world_mesh(), reshard_after_forward=True)
    loss = model(_inputs()).square().sum()
    model.set_custom_all_gather(comm)
    loss.backward()
    assert comm.count == 1


@ranks(2)
def test_parameters_replaced_after_a_backward_that_raised() -> None:
    model = parity.shard(parity.OURS, models.seeded(_three_layers), reshard_after_forward=True)
    hidden: list[Tensor] = []
    model[0].register_forward_hook(lambda _, inputs, output: hidden.append(output))
    loss = model(_inputs()).square().sum()
    hidden[0].register_hook(_raise)  # in the middle of the unit's backward
    with pytest.raises(ArithmeticError):
        loss.backward()
    model.reshard()
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(torch.full_like(param, 7)))
    model.unshard()
    assert all(bool((param == 7).all()) for param in model.parameters())


def _raise(gradient: Tensor) -> None:
    raise ArithmeticError


@ranks(1, 2)
def test_writes_to_gathered_parameters() -> None:
    """Only shards are for good, so they are refused; on one rank the gathered one is the shard."""
    model = parity.shard(parity.OURS, models.seeded(lambda: nn.Linear(models.DIM, models.DIM)))
    before = parity.full(model.weight)
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(7)
    if dist.get_world_size() == 1:
        model.reshard()
        parity.assert_equal(parity.full(model.weight), torch.full_like(before, 7))
        return
    with raises("written-unsharded"):
        model.reshard()
    model.reshard()  # to drop it
    parity.assert_equal(parity.full(model.weight), before)
    with fsdp2.gathered(model), torch.no_grad():
        model.weight.fill_(7)
    parity.assert_equal(parity.full(model.weight), torch.full_like(before, 7))


# -- small things ---------------------------------------------------------------------------------


class _Sized(nn.Sequential):
    """Needs arguments before it exists."""

    def __new__(cls, *layers: nn.Module) -> Any:
        made = super().__new__(cls)
        made.__dict__["made_with"] = len(layers)
        return made


@ranks(2)
def test_slices_of_containers_whose_new_takes_arguments() -> None:
    def scenario(api: ModuleType) -> Any:
        model = parity.shard(api, _Sized(*[nn.Linear(models.DIM, models.DIM) for _ in range(3)]))
        return type(model[:2]).__name__, model[:2].made_with

    assert parity.same_as_torch(scenario) == ("_Sized", 1)  # torch passes one dict


class _Recorded(_Allocates, fsdp2.ReduceScatter):
    def __init__(self) -> None:
        self.ops: list[Any] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = 0
    ) -> None:
        self.ops.append(op)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)


@ranks(2)
def test_the_op_of_a_custom_reduce_scatter() -> None:
    """A member of the enum, which compares, hashes and has a name."""
    model, ours = parity.shard(parity.OURS, models.seeded(models.MLP)), _Recorded()
    model.set_custom_reduce_scatter(ours)
    for factor in (None, 3.0, None):
        model.set_gradient_divide_factor(factor)
        model(_inputs()).sum().backward()
    known = {dist.ReduceOp.SUM: "SUM", dist.ReduceOp.AVG: "AVG"}
    assert len(ours.ops) == 3
    assert all(op is getattr(dist.ReduceOp, known[op]) for op in ours.ops)
    assert ours.ops[0] is ours.ops[2]


@ranks(2)
def test_hooks_and_factors_that_are_taken_away() -> None:
    def scenario(api: ModuleType) -> Any:
        model = parity.shard(api, models.seeded(lambda: nn.Linear(models.DIM, models.DIM)))
        found = []
        for hook in (None, lambda gradient: gradient.zero_(), None):
            model.zero_grad()
            model.set_all_reduce_hook(hook)
            model(_inputs()).sum().backward()
            found.append(parity.full_all([param.grad for param in model.parameters()]))
        return found

    found = parity.same_as_torch(scenario)
    parity.assert_equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[1][0])
    model = parity.shard(parity.OURS, models.seeded(lambda: nn.Linear(models.DIM, models.DIM)))
    for factor in (None, 1.0, None):
        model.zero_grad()
        model.set_gradient_divide_factor(factor)
        model(_inputs()).sum().backward()
        assert all(isinstance(param.grad, DTensor) for param in model.parameters())
        grads = parity.full_all([param.grad for param in model.parameters()])
        expected = found[0] if factor is None else [2 * tensor for tensor in found[0]]
        parity.assert_equal(grads, expected)


# -- functional_call, which registers nothing and puts back what it found --------------------------


def _others(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Averages of parameters, say, to evaluate with."""
    params = parity.full_params(model) if kind == "whole" else dict(model.named_parameters())
    return {name: 2 * param.detach() for name, param in params.items()}


@ranks(2)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("when", ["at first", "after a step", "after an evaluation"])
def test_functional_call_with_other_parameters(kind: str, when: str) -> None:
    """They were ignored by units that gather, or taken for the parameters from then on."""
    model = parity.shard(parity.OURS, models.MLP())
    if when != "at first":
        model(_inputs()).sum().backward()
        model.zero_grad()
    before = parity.full_params(model)
    others = _others(model, kind)
    with torch.no_grad():
        if when == "after an evaluation":
            model(_inputs())
        for _ in range(2):
            with raises("replaced-parameter"):
                functional_call(model, others, (_inputs(),))
        model.reshard()
        parity.assert_equal(parity.full_params(model), before)
    model(_inputs()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_functional_call_with_its_own_parameters(reshard_after_forward: bool | None) -> None:
    """The root stays gathered by an evaluation; what was found before it is sharded.

    torch writes to the dictionary what the modules hold after the call: the gathered ones.
    """
    model = parity.shard(parity.OURS, models.MLP(), reshard_after_forward=reshard_after_forward)
    own, written = dict(model.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        outputs = [functional_call(model, dict(own), (_inputs(),)) for _ in range(2)]
        outputs += [functional_call(model, written, (_inputs(),)) for _ in range(2)]
        outputs += [model(_inputs()), functional_call(model, dict(own), (_inputs(),))]
    model(_inputs()).sum().backward()
    outputs.append(functional_call(model, written, (_inputs(),)).detach())
    parity.assert_equal(outputs[1:], outputs[:1] * 6)
    assert all(param.grad is not None for param in own.values())
