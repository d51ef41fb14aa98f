"""Norms and clipping: like no sharding, like torch's where torch's works, and on mixes of meshes.

Tolerance: a norm of some hundred elements is a sum in another order than the unsharded one, at most
some ten roundings of 2**-24 each, and a root; a clipped gradient is one more multiplication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from tests.common import meshes, models, parallelisms, parity, workers
from tests.common.cases import in_turn

pytestmark = pytest.mark.ranks

CLOSE = parity.Tolerance(rtol=2e-6, atol=0.0)
SUMMED = parity.Tolerance(rtol=1e-5, atol=1e-7)  # the gradients too are sums in another order
HALF = parity.Tolerance(
    rtol=2**-7, atol=0.0
)  # bf16: the factor and the product are rounded to 2**-9
NORMS = (2.0, 1.0, math.inf, 3.0)
SMALLEST = (-math.inf, -2.0)  # of which the smallest elements count most

Spread = Sequence[Placement]


def trained(
    api: Any, build: Callable[[], nn.Module] = models.OddMLP, outputs: int = 1
) -> nn.Module:
    """A model with gradients of one step; `api` None: not sharded, over the whole batch."""
    (batch,) = parity.regression_batches(models.DIM, outputs, steps=1)
    model = models.seeded(build)
    if api is not None:
        model = parity.shard(api, model)
        batch = parity.my_part(batch)
    parity.regression_loss(model, batch).backward()
    return model


def parameter(
    seed: int, shape: tuple[int, ...], mesh: DeviceMesh | None, *spread: Placement
) -> Any:
    """A parameter with a gradient, both from a seed; and the same without sharding."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, *shape, generator=generator)
    plain = nn.Parameter(values[0].clone())
    plain.grad = values[1].clone()
    if mesh is None:
        sharded = nn.Parameter(values[0].clone())
        sharded.grad = values[1].clone()
    else:
        sharded = nn.Parameter(part(values[0], mesh, spread))
        sharded.grad = part(values[1], mesh, spread)
    return sharded, plain


def part(whole: Tensor, mesh: DeviceMesh, spread: Spread) -> DTensor:
    """This rank's part of a tensor that every rank has; no communication."""
    return distribute_tensor(whole, mesh, spread, src_data_rank=None)


def grads_of(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's local gradients."""
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]


def local_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of `whole`, as `like` is spread."""
    if not isinstance(like, DTensor):
        return whole
    return part(whole, like.device_mesh, like.placements).to_local()


def assert_same_on_all_ranks(value: Tensor) -> None:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    for other in everyones:
        parity.assert_equal(other, value, "another rank's norm")


def check(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], **arguments: Any) -> None:
    """Clips parameters and their plain twins; compares norms and gradients."""
    sharded, plain = [s for s, _ in pairs], [p for _, p in pairs]
    p = arguments.get("norm_type", 2.0)
    by_tensors = fsdp2.optim.get_total_norm([p.grad for p in sharded], norm_type=p)
    actual = fsdp2.clip_grad_norm_(sharded, 0.5, **arguments)
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, **arguments)
    assert expected > 0.5, "clipping had something to do"
    assert type(actual) is Tensor
    assert actual.shape == ()
    parity.assert_close(actual, expected, CLOSE, f"norm {p}")
    parity.assert_equal(by_tensors, actual, "get_total_norm of the gradients")
    assert_same_on_all_ranks(actual)
    clipped = [local_of(b.grad, a.grad) for a, b in pairs]
    parity.assert_close(grads_of(sharded), clipped, CLOSE, f"gradients clipped by norm {p}")


def assert_clips(
    model: nn.Module,
    plain: nn.Module,
    norm_type: Any,
    clip: Callable[..., Any],
    foreach: bool | None = None,
) -> Tensor:
    """Clips a model as torch does the unsharded one; its norm."""
    found = clip(model.parameters(), 0.1, norm_type, foreach=foreach)
    actual = found.full_tensor() if isinstance(found, DTensor) else found
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert expected > 0.1 or norm_type not in NORMS, "clipping had something to do"
    parity.assert_close(actual, expected, SUMMED, f"norm {norm_type}")
    assert_same_gradients(model, plain, f"clipped by norm {norm_type}")
    return found


def assert_same_gradients(model: nn.Module, plain: nn.Module, where: str) -> None:
    parity.assert_close(parity.full_grads(model), parity.full_grads(plain), SUMMED, where)


# -- one mesh -------------------------------------------------------------------------------------


@workers.ranks(2, extended=(4,))
def test_a_sharded_model() -> None:
    """Uneven rows and ranks without any; ours and torch's function, both on our gradients."""
    cases = itertools.product(("ours", "torch"), (None, True, False), (2.0, 1.0, math.inf))
    in_turn({str(case): case for case in cases}, _check_sharded)
    model = trained(parity.OURS)
    before = parity.full_grads(model)
    fsdp2.clip_grad_norm_(model.parameters(), 1e6)
    parity.assert_equal(parity.full_grads(model), before, "below the limit")


def _check_sharded(case: tuple[str, bool | None, float]) -> None:
    whose, foreach, norm_type = case
    clip = {"ours": fsdp2.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}[whose]
    # Torch's has no largest element of a rank's zero rows, and raises there.
    even = whose == "torch" and norm_type == math.inf
    build, outputs = (models.MLP, 4) if even else (models.OddMLP, 1)
    model, plain = trained(parity.OURS, build, outputs), trained(None, build, outputs)
    assert_clips(model, plain, norm_type, clip, foreach)


def _check_parallelism(name: str) -> None:
    parallelism, plain = parallelisms.PARALLELISMS[name], parallelisms.PARALLELISMS["plain"]
    (batch,) = parallelisms.ladder_batches(1)

    def clip(*args: Any, foreach: Any) -> Tensor:
        with parity.CountCollectives() as counter:
            norm = fsdp2.clip_grad_norm_(*args, foreach=foreach)
        assert counter.counts["all_reduce"] == counter.total == (2 if name == "tp" else 1)
        return norm

    for norm_type in (2.0, 1.0, math.inf):
        model, whole = parallelism.shard(parity.OURS, parallelisms.ladder()), parallelisms.ladder()
        parity.regression_loss(model, parallelism.part(batch)).backward()
        parity.regression_loss(whole, plain.part(batch)).backward()
        assert_same_on_all_ranks(assert_clips(model, whole, norm_type, clip))


@pytest.mark.parametrize("name", ["flat2", "hsdp", "tp"])
def test_a_model_on_any_mesh(name: str) -> None:
    workers.run_on_ranks(parallelisms.PARALLELISMS[name].ranks, _check_parallelism, name)


# -- several meshes -------------------------------------------------------------------------------


def _replicas() -> list[tuple[nn.Parameter, nn.Parameter]]:
    """HSDP's placements: reduced over the shard dim alone, equal to the bit on all replicas."""
    mesh = meshes.hsdp_mesh(2, 2)
    return [parameter(i, (5, 3), mesh, Replicate(), Shard(i % 2)) for i in range(4)]


def _experts() -> list[tuple[nn.Parameter, nn.Parameter]]:
    """On another mesh: torch's refuses to mix them; ours reduces both over ("dp",) at once."""
    dense = meshes.mesh("dp", shape=(4,))
    sparse = meshes.mesh("ep", "efsdp", shape=(2, 2))
    return [
        parameter(0, (4, 6, 3), sparse, Shard(0), Shard(1)),
        parameter(1, (7, 3), dense, Shard(0)),
        parameter(2, (4, 5, 2), sparse, Shard(0), Shard(1)),
        parameter(3, (3,), dense, Replicate()),
        parameter(4, (3,), None),
    ]


def _experts_alone() -> list[tuple[nn.Parameter, nn.Parameter]]:
    """A 2-D mesh without a dense one: one collective a dim."""
    sparse = meshes.mesh("ep", "efsdp", shape=(2, 2))
    return [
        parameter(0, (4, 6, 3), sparse, Shard(0), Shard(1)),
        parameter(1, (6, 3), sparse, Shard(0), Shard(0)),
    ]


def _sub_meshes() -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Tensor parallel and not, some on both dims, some on one; equal groups are joined."""
    mesh = meshes.mesh("shard", "tp", shape=(2, 2))
    return [
        parameter(0, (6, 4), mesh, Shard(1), Shard(0)),
        parameter(1, (6, 4), mesh["shard"], Shard(0)),
        parameter(2, (5,), mesh, Shard(0), Replicate()),
        parameter(3, (5, 2), mesh["tp"], Shard(0)),
        parameter(4, (5, 2), mesh, Replicate(), Replicate()),
        parameter(5, (5, 2), None),
    ]


@workers.ranks(4)
def test_parameters_of_several_meshes() -> None:
    """In as few collectives as there are dims on which anything is sharded."""
    for build, collectives in (
        (_replicas, 1),
        (_experts, 1),
        (_experts_alone, 2),
        (_sub_meshes, 2),
    ):
        for norm_type in NORMS if build is _experts else (2.0, math.inf):
            with parity.CountCollectives() as counter:
                fsdp2.optim.get_total_norm([sharded.grad for sharded, _ in build()], norm_type)
            assert counter.total == collectives, build.__name__
            for foreach in (None, True, False) if build is _experts else (None,):
                check(build(), norm_type=norm_type, foreach=foreach)
    for norm_type in SMALLEST:
        actual = fsdp2.optim.get_total_norm([sharded.grad for sharded, _ in _experts()], norm_type)
        expected = torch.nn.utils.get_total_norm([whole.grad for _, whole in _experts()], norm_type)
        parity.assert_close(actual, expected, CLOSE, f"norm {norm_type}")
    with pytest.raises(RuntimeError):
        torch.nn.utils.clip_grad_norm_([sharded for sharded, _ in _experts()], 0.5)


@workers.ranks(4)
def test_tensor_parallel_gradients_spread_unlike_their_parameters() -> None:
    """A row-wise embedding's gradient is whole where the parameter is sharded: counted once."""
    mesh = meshes.mesh("shard", "tp", shape=(2, 2))
    for norm_type in NORMS:
        sharded, plain = parameter(0, (6, 4), mesh, Replicate(), Shard(0))
        sharded.grad = part(plain.grad, mesh, [Replicate(), Replicate()])
        other = parameter(1, (6, 4), mesh, Shard(0), Shard(1))
        if norm_type == 2.0:
            model = nn.Sequential(nn.Embedding(8, 4))
            layout = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(model, mesh["tp"], {"0": layout})
            model(torch.arange(8)).sum().backward()
            assert model[0].weight.grad.placements == (Replicate(),), "as torch does"
            parity.assert_close(
                fsdp2.optim.get_total_norm([p.grad for p in model.parameters()]),
                fsdp2.clip_grad_norm_(model.parameters(), 1.0),
                CLOSE,
            )
        expected = torch.nn.utils.get_total_norm([plain.grad, other[1].grad], norm_type)
        actual = fsdp2.clip_grad_norm_([sharded, other[0]], 0.5, norm_type)
        parity.assert_close(actual, expected, CLOSE, f"norm {norm_type}")
        assert_same_on_all_ranks(actual)


# -- missing gradients ----------------------------------------------------------------------------


@workers.ranks(4)
def test_gradients_may_be_missing_on_some_ranks() -> None:
    """Every rank runs the same collectives, of the same sizes: the ranks would hang otherwise."""
    dense = meshes.mesh("dp", shape=(4,))
    mesh = meshes.mesh("shard", "tp", shape=(2, 2))
    pairs = [
        parameter(0, (6, 4), mesh, Shard(1), Shard(0)),
        parameter(1, (8, 4), dense, Shard(0)),
        parameter(2, (6, 4), mesh["tp"], Shard(0)),
        parameter(3, (6, 4), mesh, Shard(0), Replicate()),
    ]
    sharded = [s for s, _ in pairs]
    rank = dist.get_rank()
    if rank in (0, 3):
        sharded[0].grad = None
    if rank == 1:
        for param in sharded[:2]:
            param.grad = None
    sharded[3].grad = None
    held: list[Any] = [None] * 4
    mine = [None if p.grad is None else p.grad.to_local().flatten() for p in sharded]
    dist.all_gather_object(held, mine)
    # Two pairs of ranks hold the same halves of the third: ranks 0 and 1 have both of them.
    parts = [t for r in range(4) for t in held[r][:2] if t is not None]
    parts += [held[0][2], held[1][2]]
    for norm_type in NORMS:
        actual = fsdp2.clip_grad_norm_(sharded, 1e6, norm_type)
        expected = torch.linalg.vector_norm(torch.cat(parts), norm_type)
        parity.assert_close(actual, expected, CLOSE, f"norm {norm_type}")
        assert_same_on_all_ranks(actual)


@workers.ranks(2)
def test_no_gradients_at_all() -> None:
    model = parity.shard(parity.OURS, models.seeded(models.MLP))
    with parity.CountCollectives() as counter:
        norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    parity.assert_equal(norm, torch.tensor(0.0), "norm")
    assert counter.total == 1
    parity.assert_equal(fsdp2.clip_grad_norm_([], 1.0), torch.tensor(0.0), "no parameters")
    parity.assert_equal(fsdp2.optim.get_total_norm([]), torch.tensor(0.0), "no tensors")


@workers.ranks(2, extended=(4,))
@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_functions_while_installed(foreach: bool | None) -> None:
    """Any order, shards that are empty on some rank, and whoever imported torch's before."""
    early = torch.nn.utils.clip_grad_norm_
    fsdp2.install()
    try:
        for norm_type in (*NORMS, *SMALLEST, 0.0, "inf"):
            model, plain = trained(parity.OURS), trained(None)
            rows = [param.to_local().numel() for param in model.parameters()]
            assert dist.get_rank() == 0 or 0 in rows
            found = assert_clips(model, plain, norm_type, early, foreach)
            assert isinstance(found, DTensor)  # as torch's
            grads = [param.grad for param in model.parameters()]
            norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm, foreach)
            torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 1e-3, norm.full_tensor())
            assert_same_gradients(model, plain, f"scaled by {norm_type}")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded, _ = parameter(0, (1, 3), mesh, Shard(0))
        sharded.grad.mul_(math.nan)
        assert early(sharded, 1.0, math.inf).full_tensor().isnan()
        assert early(sharded, 1.0, -math.inf).full_tensor().isnan()
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        assert float(torch.nn.utils.get_total_norm([partial])) > 0  # torch adds it up
    finally:
        fsdp2.uninstall()


# -- values that are not finite, other dtypes -----------------------------------------------------


@workers.ranks(2, extended=(4,))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_value_on_one_rank(bad: float) -> None:
    """All ranks learn of it, whatever the norm; a maximum must not lose a NaN."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for norm_type in NORMS:
        for where in range(dist.get_world_size()):
            sharded, _ = parameter(0, (8, 2), mesh, Shard(0))
            other, _ = parameter(1, (8, 2), mesh, Shard(0))
            if dist.get_rank() == where:
                sharded.grad.to_local()[0, 0] = bad
            before = [grad.clone() for grad in grads_of([sharded, other])]
            with pytest.raises(RuntimeError, match="error_if_nonfinite"):
                fsdp2.clip_grad_norm_([sharded, other], 1.0, norm_type, error_if_nonfinite=True)
            now = grads_of([sharded, other])
            for old, new in zip(before, now, strict=True):
                parity.assert_equal(new.nan_to_num(), old.nan_to_num(), "untouched")
            norm = fsdp2.clip_grad_norm_([sharded, other], 1.0, norm_type)
            assert norm.isnan() if math.isnan(bad) else norm.isposinf()


@workers.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Low precision is summed in float32: past float16's range, and to float32's precision."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(64, 8, generator=generator) * 1e4).to(dtype)
    for foreach in (True, False):
        param = nn.Parameter(part(torch.zeros(64, 8, dtype=dtype), mesh, [Shard(0)]))
        param.grad = part(whole, mesh, [Shard(0)])
        norm = fsdp2.clip_grad_norm_(param, 1e4, foreach=foreach)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        expected = torch.linalg.vector_norm(whole.to(wide))
        close = parity.Tolerance(rtol=1e-14, atol=0) if dtype is torch.float64 else CLOSE
        parity.assert_close(norm, expected, close, "norm")
        assert param.grad.dtype == dtype
        clipped = whole.to(wide) * (1e4 / expected)
        local = local_of(clipped, param.grad)
        parity.assert_close(param.grad.to_local().to(wide), local, HALF, "clipped")


@workers.ranks(2)
def test_dtypes_together() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params, plain = [], []
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        whole = torch.randn(6, 3, generator=torch.Generator().manual_seed(i)).to(dtype)
        param = nn.Parameter(part(whole, mesh, [Shard(0)]))
        param.grad = part(whole, mesh, [Shard(0)])
        params.append(param)
        plain.append(whole.double())
    norm = fsdp2.clip_grad_norm_(params, 1.0)
    expected = torch.nn.utils.get_total_norm(plain)
    parity.assert_close(norm, expected, CLOSE, "norm")
    assert norm.dtype == torch.float64


# -- arguments ------------------------------------------------------------------------------------


@workers.ranks(2)
def test_arguments() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, plain = parameter(0, (8, 2), mesh, Shard(0))
    for invalid in (0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            fsdp2.clip_grad_norm_(sharded, 1.0, invalid)
    expected = torch.nn.utils.get_total_norm(plain.grad)
    parity.assert_close(fsdp2.optim.get_total_norm(sharded.grad), expected, CLOSE, "one tensor")
    parity.assert_close(
        fsdp2.optim.get_total_norm(sharded.grad, "inf"), plain.grad.abs().max(), CLOSE
    )
    generated = fsdp2.clip_grad_norm_((p for p in [sharded]), 1e6)
    parity.assert_close(generated, expected, CLOSE, "a generator")
    assert not generated.requires_grad
