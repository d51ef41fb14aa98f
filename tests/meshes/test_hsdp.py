"""HSDP: sharded along one mesh dim, copied along another; against torch and one plain process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from tests.common import combinations, meshes, models, parity
from tests.common.backends import packs
from tests.common.workers import ranks

SHAPES = {
    "shard only": lambda n: (1, n),
    "copies only": lambda n: (n, 1),
    "both": lambda n: (2, n // 2),
}


def _mesh(kind: str) -> Any:
    return meshes.hsdp_mesh(*SHAPES[kind](dist.get_world_size()))


def _order_matters(kind: str, mixed: bool = False) -> parity.Tolerance | None:
    """Sums over two ranks have one order; over four, gloo's order depends on the message."""
    if dist.get_world_size() == 2 or kind == "both":
        return None
    return parity.REORDERED_MIXED if mixed else parity.REORDERED_FP32


# -- training -------------------------------------------------------------------------------------

MLP = partial(models.seeded, models.MLP)


def check(
    build: Any,
    steps: Any,
    kind: str,
    *,
    before: meshes.Before | None = None,
    change: Callable[[Any], object] | None = None,
    choose: meshes.Before | None = None,
    torch_too: bool = True,
    policy: dict[str, Any] | None = None,
    divide: float | None = None,
    tolerance: parity.Tolerance = parity.FP32,
    mixed: bool = False,
    **training: Any,
) -> None:
    """Trains as torch does, to the bit where sums have one order, and as the unsharded model.

    `change` is what happens to a sharded model; `choose`, to each before a micro-batch; `before`,
    to sharded ones. `divide` is what sums are divided by.
    """

    def prepare(model: Any, number: int, last: bool) -> None:
        for act in (choose, before):
            if act is not None:
                act(model, number, last)

    def scenario(api: Any) -> Any:
        own = {} if policy is None else {"mp_policy": api.MixedPrecisionPolicy(**policy)}
        model = parity.shard(api, build(), mesh=_mesh(kind), mixed=mixed, **own)
        if change is not None:
            change(model)
        return meshes.train_micro(model, steps, before=prepare, **training)

    order = _order_matters(kind, mixed)
    ours = meshes.like_torch(scenario, order) if torch_too else scenario(parity.OURS)
    plain = meshes.train_plain(
        build(), steps, before=choose, divide=divide, mixed=mixed, **training
    )
    parity.assert_close(ours, plain, tolerance, f"unsharded, {kind}, divided by {divide}")


@ranks(4, extended=(2,))
@pytest.mark.parametrize("kind", SHAPES)
def test_training(kind: str) -> None:
    """By torch's AdamW, whose operators get the DTensors themselves."""
    build = partial(models.seeded, partial(models.Transformer, blocks=1))
    steps = [[batch] for batch in parity.language_batches(13, steps=3)]
    check(build, steps, kind, loss=parity.language_loss, make_optimizer=parity.torchs_adamw)


@ranks(4)
@pytest.mark.parametrize("kind", ["both", "copies only"])
def test_training_mixed(kind: str) -> None:
    build, steps = partial(models.seeded, models.Nested), meshes.micro_batches(models.DIM, 3)
    check(build, steps, kind, mixed=True, tolerance=parity.REORDERED_MIXED)


@ranks(4, extended=(2,))
@pytest.mark.parametrize("kind", SHAPES)
def test_placements(kind: str) -> None:
    """Copies first, then rows; on the mesh that was given, dims of size 1 included."""
    model = parity.shard(parity.OURS, MLP(), mesh=_mesh(kind))
    rows = models.DIM // _mesh(kind)["shard"].size()
    for layer in model.layers:
        assert layer.weight.placements == (Replicate(), Shard(0))
        assert layer.weight.device_mesh == _mesh(kind)
        assert layer.weight.to_local().shape == (rows, models.DIM)


@ranks(1)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_one_rank(mixed: bool) -> None:
    """A mesh of one rank in both dims: no collective, the same bits as no sharding at all."""
    steps = meshes.micro_batches(models.DIM, 4, micro=2)
    flags = meshes.flags_in_turn(meshes.Flags(all_reduce=False), meshes.Flags())
    with parity.CountCollectives() as count:
        model = parity.shard(parity.OURS, MLP(), mesh=meshes.hsdp_mesh(1, 1), mixed=mixed)
        model(steps[0][0][0]).sum().backward()
    assert count.total == 0
    exact = parity.Tolerance(0, 0)
    check(MLP, steps, "shard only", before=flags, mixed=mixed, tolerance=exact)


# -- several micro-batches ------------------------------------------------------------------------

NO, PARTIAL, FULL = meshes.Flags(False, False), meshes.Flags(all_reduce=False), meshes.Flags()

TURNS = {
    "partial sums": (PARTIAL, PARTIAL, FULL),
    "no sync": (NO, NO, FULL),
    "no sync, then partial": (NO, PARTIAL, FULL),
    "partial, then no sync": (PARTIAL, NO, FULL),
    "every one": (FULL, FULL, FULL),
    "whole ones between": (PARTIAL, FULL, FULL),
    "all-reduce allowed without sync": (meshes.Flags(False, True), PARTIAL, FULL),
}


@ranks(4, extended=(2,))
@pytest.mark.parametrize("turns", combinations.often([*TURNS], default=3))
def test_accumulation(turns: str) -> None:
    """Whatever each micro-batch communicates, the sum over them is the same."""
    steps = meshes.micro_batches(models.DIM, 4, micro=3, steps=2)
    for kind in ("both", "copies only") if dist.get_world_size() == 4 else ("copies only",):
        check(MLP, steps, kind, before=meshes.flags_in_turn(*TURNS[turns]))


USED = {
    "in the first only": (("a", "b"), ("a",), ("a",)),
    "in the second only": (("a",), ("a", "b"), ("a",)),
    "in the last only": (("a",), ("a",), ("a", "c")),
    "different ones": (("a",), ("b",), ("c",)),
    "in none": (("a",), ("a",), ("a",)),
}


@ranks(2)
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("turns", ["partial sums", "no sync", "partial, then no sync"])
def test_units_used_in_some_micro_batches(used: str, turns: str) -> None:
    """torch leaves partial sums of units that the last micro-batch does not use for the next step;
    here they are delivered in this one, so the unsharded model is the judge."""

    def choose(model: Any, number: int, last: bool) -> None:
        model.active = USED[used][number]

    steps = meshes.micro_batches(models.DIM, 2, micro=3, steps=2)
    flags = meshes.flags_in_turn(*TURNS[turns])
    build = partial(models.seeded, models.Choosy)
    check(build, steps, "copies only", before=flags, choose=choose, torch_too=False)


@ranks(4, extended=(2,))
@pytest.mark.parametrize("zeros", [False, True], ids=["absent", "zeros"])
def test_parameters_used_in_some_micro_batches(zeros: bool) -> None:
    """Within a unit that always runs: one half in the first micro-batch, the other in the last."""

    def choose(model: Any, number: int, last: bool) -> None:
        model.used = ("left", "right")[number]

    check(
        partial(models.seeded, partial(models.Forked, "tuple")),
        meshes.micro_batches(models.DIM, 2, micro=2, steps=2),
        "both",
        before=meshes.flags_in_turn(PARTIAL, FULL),
        change=lambda model: model.set_reduce_scatter_unused_params(zeros),
        choose=choose,
        torch_too=False,
    )


@ranks(2)
def test_recovery_drops_partial_sums() -> None:
    model = parity.shard(parity.OURS, MLP(), mesh=meshes.hsdp_mesh(2, 1))
    fresh = parity.shard(parity.OURS, MLP(), mesh=meshes.hsdp_mesh(2, 1))
    first, second = (
        parity.my_part(batch) for batch in parity.regression_batches(models.DIM, 4, steps=2)
    )
    PARTIAL.set_on(model)
    parity.regression_loss(model, first).backward()
    model.reset_iter_state()
    FULL.set_on(model)
    parity.regression_loss(model, second).backward()
    parity.regression_loss(fresh, second).backward()
    parity.assert_equal(
        parity.full_grads(model), parity.full_grads(fresh), "without the first micro-batch"
    )


@ranks(4, extended=(2,))
def test_what_changes_while_partial_sums_wait_counts_afterwards() -> None:
    """A divide factor set meanwhile is not forgotten."""
    model = parity.shard(parity.OURS, MLP(), mesh=_mesh("both"))
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
    FULL.set_on(model)
    parity.regression_loss(model, batch).backward()
    mean = parity.full_grads(model)
    model.zero_grad()
    PARTIAL.set_on(model)
    parity.regression_loss(model, batch).backward()
    for unit in (model, *model.layers):
        unit.set_gradient_divide_factor(1.0)
    FULL.set_on(model)
    parity.regression_loss(model, batch).backward()
    model.zero_grad()
    parity.regression_loss(model, batch).backward()
    total = {name: grad * dist.get_world_size() for name, grad in mean.items()}
    parity.assert_close(parity.full_grads(model), total, parity.REORDERED_FP32, "sums")


# -- divisions ------------------------------------------------------------------------------------


@ranks(4, extended=(2,))
@combinations.each_once(kind=["both", "copies only"], force_sum=[False, True])
def test_divide_factors(kind: str, force_sum: bool) -> None:
    """torch needs PREMUL_SUM for most of these, which gloo has not: unsharded is the judge.

    It can do the factor that is the number of shards: an average over them, a sum over copies.
    """
    steps = meshes.micro_batches(models.DIM, 4, steps=2)
    shards = float(_mesh(kind)["shard"].size())
    for factor in {None, 1.0, shards, 3.0, float(dist.get_world_size())}:
        torch_too = factor == shards > 1 and not force_sum

        def change(model: Any, factor: float | None = factor, torch_too: bool = torch_too) -> None:
            for unit in (model, *model.layers):
                unit.set_force_sum_reduction_for_comms(force_sum)
                if factor is not None and torch_too:
                    unit.set_gradient_divide_factor(factor)
                elif factor is not None:
                    unit.set_reduce_scatter_divide_factor(factor)  # as older code calls it

        check(MLP, steps, kind, change=change, divide=factor, torch_too=torch_too)


# One rounding of the reduce dtype in each of at most four addends and sums, relative to gradients
# of scale 0.1 to 1, fed back through AdamW, which divides a gradient by its own size.
COARSE = {
    torch.float16: parity.Tolerance(2**-9, 2**-10),
    torch.bfloat16: parity.Tolerance(2**-6, 2**-7),
    torch.float64: parity.FP32,
}


@ranks(4, extended=(2,))
@pytest.mark.parametrize("dtype", list(COARSE), ids=str)
def test_reduce_dtypes(dtype: torch.dtype) -> None:
    check(
        MLP,
        meshes.micro_batches(models.DIM, 4, micro=2, steps=2),
        "both" if dist.get_world_size() == 4 else "copies only",
        before=meshes.flags_in_turn(PARTIAL, FULL),
        policy={"reduce_dtype": dtype},
        tolerance=COARSE[dtype],
        make_optimizer=_sgd,
    )


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# -- hooks ----------------------------------------------------------------------------------------


@packs
@ranks(4, extended=(2,))
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "no copies"])
def test_all_reduce_hook(copies: bool) -> None:
    """It sees what the last collective made, and what it does to it reaches `.grad`."""
    build = partial(models.seeded, partial(nn.Linear, models.DIM, 8))
    size = dist.get_world_size()
    shape = (2, size // 2) if copies else (1, size)
    arguments = {"mesh": meshes.hsdp_mesh(*shape) if copies else meshes.hsdp_mesh(*shape)["shard"]}
    batch = parity.my_part(parity.regression_batches(models.DIM, 8, steps=1)[0])

    def scenario(api: Any) -> Any:
        seen: list[Tensor] = []

        def hook(flat: Tensor) -> None:
            seen.append(flat.clone())
            flat.mul_(2)

        model: Any = parity.shard(api, build(), **arguments)
        model.set_all_reduce_hook(hook)
        for _ in range(2):
            parity.regression_loss(model, batch).backward()
        assert len(seen) == 2
        local = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        return [flat[: local.numel()] for flat in seen], parity.full_grads(model)

    (seen, grads) = scenario(parity.OURS)
    plain = parity.shard(parity.OURS, build(), **arguments)
    parity.regression_loss(plain, batch).backward()
    quadrupled = {name: grad * 4 for name, grad in parity.full_grads(plain).items()}
    parity.assert_equal(grads, quadrupled, "two backwards, doubled")
    local = torch.cat([p.grad.to_local().flatten() for p in plain.parameters()])
    parity.assert_equal(seen, [local, local], "what the hook saw")
    meshes.like_torch(scenario, _order_matters("both" if copies else "shard only"))


@ranks(4, extended=(2,))
def test_post_accumulate_hooks_fire_once_the_copies_agree() -> None:
    model: Any = parity.shard(parity.OURS, MLP(), mesh=_mesh("both"))
    fired: dict[str, int] = {}
    for name, param in model.named_parameters():

        def hook(param: Tensor, name: str = name) -> None:
            assert param.grad is not None
            fired[name] = fired.get(name, 0) + 1

        param.register_post_accumulate_grad_hook(hook)
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
    for flags in (NO, PARTIAL, FULL):
        assert not fired
        flags.set_on(model)
        parity.regression_loss(model, batch).backward()
    assert fired == dict.fromkeys(dict(model.named_parameters()), 1)


# -- what is communicated -------------------------------------------------------------------------


@packs
@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_one_flat_all_reduce_a_group(mixed: bool) -> None:
    model = parity.shard(parity.OURS, MLP(), mesh=_mesh("both"), mixed=mixed)
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
    groups = 1 + len(model.layers)

    def run(flags: meshes.Flags) -> parity.CountCollectives:
        flags.set_on(model)
        with parity.CountCollectives() as count:
            parity.regression_loss(model, batch).backward()
        return count

    parity.regression_loss(model, batch).backward()
    model.zero_grad()
    for flags, scatters, reduces in ((NO, 0, 0), (PARTIAL, groups, 0), (FULL, groups, groups)):
        counts = run(flags).counts
        assert (counts["reduce_scatter"], counts["all_reduce"]) == (scatters, reduces), flags
    shards = sum(param.to_local().numel() for param in model.parameters())
    marks, padding = groups * 2, groups * 3  # one a parameter, up to whole 16 bytes
    assert shards <= run(FULL).elements["all_reduce"] <= shards + marks + padding


@ranks(2)
def test_parameters_frozen_and_thawed_while_partial_sums_wait() -> None:
    """Sums that wait belong to the parameters of their backward; new ones are not lost either."""
    batches = parity.regression_batches(models.DIM, 4, steps=2)

    def toggle(model: Any, number: int) -> None:
        model.layers[1].bias.requires_grad_(number == 1)
        model.layers[1].weight.requires_grad_(number == 0)

    model, plain = parity.shard(parity.OURS, MLP(), mesh=meshes.hsdp_mesh(2, 1)), MLP()
    for number, batch in enumerate(batches):
        toggle(model, number)
        toggle(plain, number)
        (PARTIAL, FULL)[number].set_on(model)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        for rank in range(2):
            (parity.regression_loss(plain, parity.my_part(batch, rank, 2)) / 2).backward()
    parity.assert_close(
        parity.full_grads(model), parity.full_grads(plain), parity.FP32, "unsharded"
    )
