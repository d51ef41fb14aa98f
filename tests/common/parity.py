"""Trains one model in several ways and compares what happened, step by step.

    unsharded    one process, plain tensors, the concatenation of what all ranks see
    torch        torch.distributed.fsdp.fully_shard   on the ranks of this process group
    ours         fsdp2.fully_shard                    on the ranks of this process group

After every step a run has a `Step`: the loss over the whole batch, every full gradient and every
full parameter. `train_sharded` and `train_unsharded` collect them; `assert_equal` and
`assert_close` compare them and say which step, which tensor and by how much.

What to expect of two runs:

- ours and torch's FSDP2: **the same bits** on two ranks. Both compute each rank's gradients from
  the same tensors with the same kernels, and a + b is b + a. On more, the order of a sum matters.
  gloo's reduce-scatter is a ring over blocks of whole 8 bytes, each summed in the order in which it
  travels to its rank. Where a rank's share of the message is whole blocks, the order depends on the
  receiving rank alone, so the bits are still the same (`MLP(out=8)` is built like that). Where not,
  up to `rank` values at the start of a rank's share belong to its neighbour's block. torch sends
  shares of any length, we pad ours: `REORDERED_FP32`.
- ours and unsharded, `slices=True`: each rank's part of the batch is run separately, the gradients
  are summed in rank order. On two ranks that is the same arithmetic, to the bit, mixed precision
  included (a + b is b + a, and a division by 2 is exact). On four, only the order of the sum
  differs: `REORDERED_FP32`.
- ours and unsharded, one forward over the whole batch: other shapes, so kernels that round
  differently: `FP32`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.func import functional_call
from torch.optim import Optimizer

import fsdp2
from fsdp2.testing import counting
from tests.common.models import units

TORCH = torch.distributed.fsdp
OURS = fsdp2
STEPS = 10

Loss = Callable[[nn.Module, Any], Tensor]  # (model, this rank's part of a batch) -> scalar
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


# -- how far two runs may be apart ----------------------------------------------------------------


class Tolerance(NamedTuple):
    """|actual - expected| <= atol + rtol * |expected|, element by element."""

    rtol: float
    atol: float


# One fp32 rounding is 2**-24 = 6e-8 relative. A loss or gradient here is a sum of some hundred
# products of order 1, and other batch shapes take the sum in another order: the error is a few
# roundings of the largest partial sum, so it is absolute where terms cancel. AdamW divides a
# gradient by its own size, so noise in a small gradient reaches the parameter as noise / signal *
# learning rate, and the steps feed it back. Seen: 4e-7 in gradients and parameters, 1e-6 in losses
# of about 3; allowed: some five times that. A gradient left undivided, or a row on the wrong rank,
# is off by a thousand times more.
FP32 = Tolerance(rtol=1e-5, atol=2e-6)

# The same kernels on the same shapes, but a sum of four gradients taken in another order (at most
# three roundings), or an optimizer whose vectorized kernel ends elsewhere, as a shard is shorter
# than the whole. Fed back through steps as above.
REORDERED_FP32 = Tolerance(rtol=1e-5, atol=1e-6)

# The same with parameters cast to bf16. A difference of one fp32 rounding disappears in that cast,
# except next to the boundary between two bf16 values: there a weight changes by 2**-8 of itself,
# and the gradients it feeds, here of scale 0.5, by that share at most.
REORDERED_MIXED = Tolerance(rtol=2**-8, atol=2**-9)


# -- what a run leaves behind ---------------------------------------------------------------------


@dataclass
class Step:
    """One training step as seen from outside: full tensors, by the parameter's name."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor (a collective for a DTensor).

    Not on a GPU: torch's functional all-gather of CUDA tensors crashes with gloo (pytorch#152645).
    """
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def full_all(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """`full` for many in one collective: every rank's shards, put together here.

    Not by redistributing them all without waiting in between: torch's functional collectives
    corrupt the heap with gloo when several are in flight (seen in torch 2.13, without any FSDP).
    Shards travel by way of the CPU, as ranks may have a GPU each.
    """
    tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    shards = [t.to_local().clone().cpu() if isinstance(t, DTensor) else None for t in tensors]
    everyones = _exchange(shards)
    whole = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            joined = assemble([shards[i] for shards in everyones], tensor)
            assert joined.shape == tensor.shape, f"shards of {joined.shape} for {tensor.shape}"
            whole.append(joined.to(tensor.device))
        else:
            whole.append(None if tensor is None else tensor.clone())
    return whole


@lru_cache(maxsize=16)  # torch takes long to say them
def _ranks_of(mesh: DeviceMesh) -> Tensor:
    return mesh.mesh


def _exchange(tensors: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """Every rank's tensors. As bytes: torch takes a millisecond to pickle a tensor and read it."""
    flat = [
        None if t is None else (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for t in tensors
    ]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, flat)
    return [[None if one is None else _tensor_of(*one) for one in others] for others in told]


def _tensor_of(dtype: torch.dtype, shape: torch.Size, data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def assemble(shards: Sequence[Tensor], tensor: DTensor) -> Tensor:
    """The whole of a DTensor from the local tensors of all ranks, in rank order.

    Pieces of pieces are joined first: those of `_StridedShard`, which cuts what the dims behind it
    have cut, then the others from the last mesh dim to the first. Copies must agree.
    """
    placements, mesh = tensor.placements, _ranks_of(tensor.device_mesh)
    found = {tuple(at.tolist()): shards[int(mesh[tuple(at)])] for at in (mesh >= 0).nonzero()}
    strided = [d for d, p in enumerate(placements) if isinstance(p, _StridedShard)]
    plain = [d for d in reversed(range(mesh.ndim)) if d not in strided]
    for axis in (*strided, *plain):
        placement = placements[axis]
        joined: dict[tuple[int, ...], Tensor] = {}
        for at in [at for at in found if at[axis] == 0]:
            pieces = [found[(*at[:axis], i, *at[axis + 1 :])] for i in range(mesh.shape[axis])]
            if placement.is_replicate():
                assert all(torch.equal(piece, pieces[0]) for piece in pieces), "copies differ"
                joined[at] = pieces[0]
            else:
                joined[at] = torch.cat(pieces, dim=placement.dim)  # type: ignore[attr-defined]
        found = joined
    (whole,) = found.values()
    return whole


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    params = dict(model.named_parameters())
    return dict(zip(params, full_all(p.grad for p in params.values()), strict=True))


def full_params(model: nn.Module) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    return dict(zip(params, full_all(params.values()), strict=True))  # type: ignore[arg-type]


def over_ranks(value: Tensor) -> Tensor:
    """The mean of a value over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


# -- the ways to train ----------------------------------------------------------------------------


def world_mesh() -> DeviceMesh:
    """The mesh of all ranks; torch hands out the default process group for it each time."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(
    api: ModuleType, model: nn.Module, *, root: Mapping[str, Any] | None = None, **arguments: Any
) -> nn.Module:
    """Applies `api.fully_shard` to the model's units and then to the model.

    `root` holds arguments for the root alone. Names a policy by `mixed=True`, as each
    implementation has its own class for it.
    """
    arguments.setdefault("mesh", world_mesh())
    if arguments.pop("mixed", False):
        arguments["mp_policy"] = mixed_policy(api)
    for unit in units(model):
        api.fully_shard(unit, **arguments)
    api.fully_shard(model, **{**arguments, **(root or {})})
    return model


def mixed_policy(api: ModuleType) -> Any:
    """Computes in bf16, reduces gradients in fp32."""
    return api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def my_part(batch: Any, rank: int | None = None, size: int | None = None) -> Any:
    """A rank's rows of a batch: a tensor or a tuple of tensors, split evenly on dim 0."""
    rank = dist.get_rank() if rank is None else rank
    size = dist.get_world_size() if size is None else size
    if isinstance(batch, tuple):
        return tuple(my_part(part, rank, size) for part in batch)
    assert batch.shape[0] % size == 0, f"a batch of {batch.shape[0]} for {size} ranks"
    return batch.chunk(size)[rank]


def train_sharded(
    model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, batches: Sequence[Any]
) -> list[Step]:
    """Trains a sharded model on this rank's part of every batch."""
    optimizer = make_optimizer(model.parameters())
    steps = []
    for batch in batches:
        value = loss(model, my_part(batch))
        value.backward()
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(over_ranks(value), grads, full_params(model)))
    for name, param in model.named_parameters():
        assert_equal(full(param), steps[-1].params[name], f"full_tensor() of {name}")
    return steps


def train_unsharded(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    batches: Sequence[Any],
    *,
    slices: bool = False,
    mixed: bool = False,
) -> list[Step]:
    """Trains a plain model in this process alone, on whole batches.

    `slices` runs every rank's part separately and averages, as the ranks do together. `mixed` casts
    the parameters and floating-point inputs to bf16 for the forward; gradients arrive in fp32.
    """
    parts = dist.get_world_size() if slices else 1
    optimizer = make_optimizer(model.parameters())
    steps = []
    for batch in batches:
        total = torch.zeros(())
        for rank in range(parts):
            part = my_part(batch, rank, parts)
            value = loss(Bf16(model) if mixed else model, part)
            value.backward()
            total += value.detach()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= parts
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(total / parts, grads, full_params(model)))
    return steps


class Bf16(nn.Module):
    """Runs a plain fp32 model with its parameters and inputs cast to bf16, through autograd."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cast = {name: param.bfloat16() for name, param in self.model.named_parameters()}
        args = tuple(a.bfloat16() if a.is_floating_point() else a for a in args)
        return functional_call(self.model, cast, args, kwargs)


def regression_loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error, in fp32 whatever the model returns."""
    inputs, targets = part
    return (model(inputs).float() - targets).square().mean()


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross entropy of the next token, in fp32."""
    logits = model(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def regression_batches(
    inputs: int, outputs: int, *, rows: int = 8, steps: int = STEPS
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, inputs, generator=generator),
            torch.randn(rows, outputs, generator=generator),
        )
        for _ in range(steps)
    ]


def language_batches(
    vocab: int, *, rows: int = 8, length: int = 7, steps: int = STEPS
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (rows, length), generator=generator) for _ in range(steps)]


# -- comparisons ----------------------------------------------------------------------------------


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Every tensor in two equal structures has the same dtype, shape and bits."""
    _compare(actual, expected, None, where)


def assert_close(actual: Any, expected: Any, tolerance: Tolerance, where: str = "") -> None:
    """Every tensor in two equal structures has the same dtype and shape and is within tolerance."""
    _compare(actual, expected, tolerance, where)


def _compare(actual: Any, expected: Any, tolerance: Tolerance | None, where: str) -> None:
    if isinstance(expected, Tensor):
        _compare_tensors(actual, expected, tolerance, where)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        assert type(actual) is type(expected), f"{where}: {type(actual)} for {type(expected)}"
        for field in dataclasses.fields(expected):
            name = field.name
            _compare(getattr(actual, name), getattr(expected, name), tolerance, f"{where}.{name}")
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where}: {list(actual)} for {list(expected)}"
        for key in expected:
            _compare(actual[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items for {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            _compare(a, e, tolerance, f"{where}[{i}]")
    else:
        assert actual == expected, f"{where}: {actual!r} for {expected!r}"


def _compare_tensors(
    actual: Any, expected: Tensor, tolerance: Tolerance | None, where: str
) -> None:
    assert isinstance(actual, Tensor), f"{where}: {actual!r} for a tensor"
    assert not isinstance(actual, DTensor), f"{where}: compare full tensors, not shards"
    assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} for {expected.dtype}"
    assert actual.shape == expected.shape, f"{where}: {actual.shape} for {expected.shape}"
    assert expected.isfinite().all(), f"{where}: the expectation itself is not finite"
    if tolerance is None:
        same = torch.equal(actual, expected)
    else:
        same = torch.allclose(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    if not same:
        count = int((actual != expected).sum())
        apart, reach = (actual - expected).abs().max().item(), expected.abs().max().item()
        allowed = "no difference is allowed" if tolerance is None else f"allowed is {tolerance}"
        raise AssertionError(
            f"{where}: {count} of {expected.numel()} elements differ, by up to {apart:.3g} where "
            f"values reach {reach:.3g}; {allowed}"
        )


def assert_like_torch(ours: Any, torchs: Any, *, mixed: bool = False) -> None:
    """The same bits on two ranks; on more, the order of sums may differ."""
    if dist.get_world_size() == 2:
        assert_equal(ours, torchs, "torch")
    else:
        assert_close(ours, torchs, REORDERED_MIXED if mixed else REORDERED_FP32, "torch")


def same_as_torch(scenario: Callable[[ModuleType], Any], *, mixed: bool = False) -> Any:
    """Runs a scenario with fsdp2 and with torch's FSDP2, compares the results, returns ours.

    A scenario gets the module to take `fully_shard` and its friends from, and returns tensors and
    plain values in lists and dicts.
    """
    ours = scenario(OURS)
    assert_like_torch(ours, scenario(TORCH), mixed=mixed)
    return ours


def check_training(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    loss: Loss = regression_loss,
    make_optimizer: MakeOptimizer | None = None,
    elementwise: bool = True,
    torch_too: bool = True,
    **arguments: Any,
) -> list[Step]:
    """Trains `build()` with ours; compares every step with torch's FSDP2 and with unsharded steps.

    `elementwise=False` is for an optimizer that rounds by where a shard ends, `torch_too=False` for
    what torch's FSDP2 cannot do. `arguments` go to `shard`. Returns our steps.
    """
    mixed = arguments.get("mixed", False)
    optimizer = make_optimizer or adamw

    def train(api: ModuleType) -> list[Step]:
        return train_sharded(shard(api, build(), **arguments), optimizer, loss, batches)

    ours = same_as_torch(train, mixed=mixed) if torch_too else train(OURS)
    slices = train_unsharded(build(), optimizer, loss, batches, slices=True, mixed=mixed)
    if dist.get_world_size() == 2 and elementwise:
        assert_equal(ours, slices, "unsharded, by slices")
    else:
        tolerance = REORDERED_MIXED if mixed else REORDERED_FP32
        assert_close(ours, slices, tolerance, "unsharded, by slices")
    if not mixed:
        assert_close(ours, train_unsharded(build(), optimizer, loss, batches), FP32, "unsharded")
    return ours


class ShardwiseAdamW(torch.optim.AdamW):
    """Computes with local tensors; its hooks, groups and states are torch's.

    With DTensors, torch works out for each list of tensors that it has not seen before how it is
    sharded: on a mesh of two dims that is most of the time in which a small model is trained.
    `torchs_adamw` does so.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex


_EXACT: dict[str, Any] = {"lr": 1e-2, "foreach": True}
"""Each element is treated alike, wherever its shard begins: fit for exact comparisons."""

adamw: MakeOptimizer = partial(ShardwiseAdamW, **_EXACT)
torchs_adamw: MakeOptimizer = partial(torch.optim.AdamW, **_EXACT)


# -- what was communicated ------------------------------------------------------------------------

CountCollectives = counting.CountCollectives
