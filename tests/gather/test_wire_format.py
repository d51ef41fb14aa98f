"""`set_wire_format`: fewer bytes on the wire, the same bits on all ranks, and what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from tests.common import combinations, meshes, models, tensors
from tests.common.errors import raises
from tests.common.workers import ranks

FED = "int4 rotate feedback"
FORMATS = [("int8", None), (None, "bf16"), (None, "int8"), ("int8", "int8"), ("int8", "bf16")]
FORMATS += [(None, FED), ("int8 differences", None), ("int4 differences", FED)]
formats = pytest.mark.parametrize(("gather", "reduce"), FORMATS)
ONE_EACH = [("int8", "bf16"), ("int4 differences", FED)]
"""A format of each kind: where what is around it costs much, others are extended."""
seldom_others = pytest.mark.parametrize(
    ("gather", "reduce"),
    combinations.often([*ONE_EACH, *(f for f in FORMATS if f not in ONE_EACH)], len(ONE_EACH)),
)
WIRE = {f"{gather}-{reduce}": (gather, reduce) for gather, reduce in FORMATS}
HALF = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Odd shapes: no number of ranks divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(33)
        self.up = nn.Linear(33, 65)
        self.down = nn.Linear(65, 33, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return done


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(33, 7))


def coded(model: fsdp2.FSDPModule, gather: str | None, reduce: str | None) -> None:
    """Choose formats; behind each stand names of options."""
    weights, _, kept = (gather or "").partition(" ")
    gradients, _, options = (reduce or "").partition(" ")
    chosen = dict.fromkeys([*kept.split(), *options.split()], True)
    model.set_wire_format(
        gather=weights or None, reduce=gradients or None, **chosen, exact_below=100
    )


def sharded(gather: str | None, reduce: str | None, **arguments: Any) -> nn.Sequential:
    model = build()
    for block in model:
        if isinstance(block, Block):
            fsdp2.fully_shard(block, **arguments)
    fsdp2.fully_shard(model, **arguments)
    coded(model, gather, reduce)
    return model


def by_columns(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def batch(step: int = 0, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 33, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def gathered_weights(model: nn.Sequential) -> dict[str, Tensor]:
    """As units compute with them."""
    found = {}
    for unit in (model[0], model[1], model):
        unit.unshard()
        for name, param in unit.named_parameters():
            if not isinstance(param, DTensor):
                found[f"{id(unit)} {name}"] = param.detach().clone()
        unit.reshard()
    return {f"{i}": value for i, value in enumerate(found.values())}


def everyones(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    params = model.named_parameters()
    return {name: p.grad.full_tensor() for name, p in params if p.grad is not None}


def bound(reduce: str | None, usual: float) -> float:
    """How far gradients may be off: 4 bits leave out more of the first ones."""
    return 0.4 if reduce == FED else usual


def off(found: Tensor, exact: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return float((found - exact).detach().abs().max() / exact.detach().abs().max())


def assert_near(
    model: nn.Module, exact: nn.Module, reduce: str | None, usual: float = 0.05
) -> None:
    """Of the gradients of each parameter; both models have the same."""
    found, expected = full_gradients(model), full_gradients(exact)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert off(value.float(), expected[name].float()) < bound(reduce, usual), name


@ranks(2, extended=(3, 4))
@pytest.mark.parametrize("mixed", [False, True])
def test_all_ranks_compute_with_the_same_bits(mixed: bool) -> None:
    policy = HALF if mixed else fsdp2.MixedPrecisionPolicy()
    model = sharded("int8", None, mp_policy=policy)
    exact = {name: param.full_tensor() for name, param in model.named_parameters()}
    for value in gathered_weights(model).values():
        first, *others = everyones(value.float())
        assert all(torch.equal(first, other) for other in others)
        if value.ndim == 2:
            original = next(p for p in exact.values() if p.shape == value.shape)
            assert value.shape == original.shape
    for name, param in model.named_parameters():  # what the optimizer has is as it was
        assert torch.equal(param.full_tensor(), exact[name])


@ranks(2, extended=(3, 4))
def test_gathered_weights_are_near_and_small_ones_exact() -> None:
    model = sharded("int8", None)
    exact = dict(build().named_parameters())
    model[0].unshard()
    found = dict(model[0].named_parameters())
    assert torch.equal(found["norm.weight"], exact["0.norm.weight"])
    assert torch.equal(found["up.bias"], exact["0.up.bias"])
    for name in ("up.weight", "down.weight"):
        assert not torch.equal(found[name], exact[f"0.{name}"])
        # Neighbours of another parameter may share a block: those of "up" are the largest.
        wrong = (found[name] - exact[f"0.{name}"]).abs().max()
        assert wrong <= exact["0.up.weight"].abs().max() / 254 * 1.001


@ranks(2, extended=(3, 4))
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_sums_of_bf16_are_those_of_fp32_of_rounded_gradients(sums: torch.dtype) -> None:
    """To the bit: a division by ranks behind the sum."""
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=sums)
    model = sharded(None, "bf16", mp_policy=policy)
    loss_of(model, batch()).backward()
    parts = []
    for rank in range(dist.get_world_size()):
        plain = build()
        loss_of(plain, batch(rank=rank)).backward()
        parts.append({name: param.grad for name, param in plain.named_parameters()})
    coded = 0
    for name, found in full_gradients(model).items():
        if found.numel() < 100:
            continue
        coded += 1
        rows = torch.stack([part[name].to(sums).bfloat16() for part in parts])
        expected = rows.sum(0, dtype=torch.float32).to(sums) / len(parts)
        assert torch.equal(found, expected.float()), name
    assert coded == 5


@ranks(2, extended=(3, 4))
@formats
def test_training_stays_beside_exact_training(gather: str | None, reduce: str | None) -> None:
    def train(model: nn.Sequential) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(8):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    exact, found = train(sharded(None, None)), train(sharded(gather, reduce))
    assert found != exact
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0)
    assert found == train(sharded(gather, reduce))  # and the same each time


@ranks(4)
@formats
def test_replicas(gather: str | None, reduce: str | None) -> None:
    """Shards travel in fewer bytes; sums over replicas are exact."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, exact = sharded(gather, reduce, mesh=mesh), sharded(None, None, mesh=mesh)
    for each in (model, exact):
        loss_of(each, batch()).backward()
    assert_near(model, exact, reduce)
    for found in full_gradients(model).values():
        first, *others = everyones(found)
        assert all(torch.equal(first, other) for other in others)


@ranks(2)
@pytest.mark.parametrize("policy", [None, HALF], ids=["fp32", "mixed"])
def test_fp32_sums_are_those_of_a_reduce_scatter(policy: fsdp2.MixedPrecisionPolicy | None) -> None:
    """To the bit: a + b is b + a, and nothing is rounded."""
    given = {} if policy is None else {"mp_policy": policy}
    seen = []
    for reduce in (None, "fp32"):
        model = sharded(None, reduce, **given)
        model(batch()).float().square().mean().backward()
        seen.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *seen))


@ranks(2)
@combinations.each_once(wire=WIRE, sync=[True, False])
def test_accumulation(wire: tuple[str | None, str | None], sync: bool) -> None:
    gather, reduce = wire
    model, exact = sharded(gather, reduce), sharded(None, None)
    for each in (model, exact):
        for step in range(3):
            each.set_requires_gradient_sync(sync or step == 2)
            loss_of(each, batch(step)).backward()
    assert_near(model, exact, reduce)


SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "smaller group": {"reshard_after_forward": 1},
    "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": HALF},
    "columns": {"shard_placement_fn": by_columns},
}
HALVES = {"half": {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.float16, torch.float16)}}


@ranks(2, extended=(4,))
@combinations.each_once(wire=WIRE, arguments=SETTINGS | HALVES)
def test_settings(wire: tuple[str | None, str | None], arguments: dict[str, Any]) -> None:
    gather, reduce = wire
    model, exact = sharded(gather, reduce, **arguments), sharded(None, None, **arguments)
    for each in (model, exact):
        for step in range(2):  # gradients of the second are added
            loss_of(each, batch(step)).backward()
    assert_near(model, exact, reduce, 0.08)


@ranks(2)
@pytest.mark.parametrize("reduce", ["int8", FED])
def test_ties_and_frozen_parameters(reduce: str) -> None:
    def make(gather: str | None, reduce: str | None) -> nn.Sequential:
        model = build()
        model[1].up.weight = model[0].up.weight
        model[0].down.weight.requires_grad_(False)
        for block in model[:2]:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        coded(model, gather, reduce)
        return model

    model, exact = make("int8", reduce), make(None, None)
    for each in (model, exact):
        loss_of(each, batch()).backward()
        assert each[0].down.weight.grad is None
    assert_near(model, exact, reduce)


class Either(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        done: Tensor = self.layers[which](x)
        return done


@ranks(2)
@pytest.mark.parametrize("reduce", ["bf16", "int8", "int4 feedback", FED])
def test_a_gradient_that_one_rank_lacks(reduce: str) -> None:
    model = models.seeded(Either)
    fsdp2.fully_shard(model)
    coded(model, None, reduce)
    model(torch.ones(2, 33), dist.get_rank()).sum().backward()
    for layer in model.layers:  # a mean of ones times two rows, and of nothing
        assert off(layer.weight.grad.full_tensor(), torch.ones(33, 33)) < bound(reduce, 0.01)
    model.zero_grad()
    model(torch.ones(2, 33), 0).sum().backward()
    assert model.layers[1].weight.grad is None


@ranks(2)
def test_it_can_be_changed_and_taken_back() -> None:
    model = sharded("int8", "int8")
    loss_of(model, batch()).backward()
    coded = full_gradients(model)
    model.zero_grad()
    model.set_wire_format()
    loss_of(model, batch()).backward()
    plain = sharded(None, None)
    loss_of(plain, batch()).backward()
    for (name, found), expected in zip(
        full_gradients(model).items(), full_gradients(plain).values(), strict=True
    ):
        assert torch.equal(found, expected), name
        assert coded[name].numel() < 100 or not torch.equal(coded[name], expected), name
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    model.set_wire_format(gather="int8", exact_below=100)
    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    loss_of(model, batch()).backward()
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name])


@ranks(2)
def test_what_the_user_names_stays_exact() -> None:
    seen = []

    def exact(name: str, param: nn.Parameter) -> bool:
        assert isinstance(param, nn.Parameter)
        seen.append(name)
        return "down" in name

    model = build()
    for block in model[:2]:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    model.set_wire_format(gather="int8", exact=exact, exact_below=100)
    assert sorted(seen) == [
        "0.down.weight",
        "0.up.weight",
        "1.down.weight",
        "1.up.weight",
        "2.weight",
    ]
    model[0].unshard()
    plain = dict(build().named_parameters())
    found = dict(model[0].named_parameters())
    assert torch.equal(found["down.weight"], plain["0.down.weight"])
    assert not torch.equal(found["up.weight"], plain["0.up.weight"])


@ranks(1, 2)
def test_one_rank_sends_nothing() -> None:
    model = sharded("int8", "int8")
    loss_of(model, batch()).backward()
    plain = sharded(None, None)
    loss_of(plain, batch()).backward()
    same = [
        torch.equal(found, expected)
        for found, expected in zip(
            full_gradients(model).values(), full_gradients(plain).values(), strict=True
        )
    ]
    assert all(same) == (dist.get_world_size() == 1)


@ranks(2)
@pytest.mark.parametrize("side", ["gather", "reduce"])
def test_refusals_change_nothing(side: str) -> None:
    model = build()
    model[0].up.double()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    with raises("wire-format-unknown"):
        model.set_wire_format(**{side: "int3"})
    with raises("wire-format-differences"):
        model.set_wire_format(reduce="int8", differences=True, exact_below=100)
    with raises("wire-format-dtype"):
        model.set_wire_format(**{side: "int8"}, exact_below=100)
    assert not any(
        param.exact or group.options.wire.gather or group.options.wire.reduce
        for record in model._records(True)
        for group in record.unit.own_groups
        for param in group.params
    )
    model.set_wire_format(**{side: "int8"}, exact=lambda name, _: "up" in name)


@ranks(2)
def test_a_subclass_that_says_what_is_gathered() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = nn.Parameter(tensors.Bf16Weight(torch.ones(64, 64)))
    fsdp2.fully_shard(model)
    with raises("wire-format-extension"):
        model.set_wire_format(gather="int8", exact_below=100)
    model.set_wire_format(reduce="bf16", exact_below=100)


@ranks(4)
@seldom_others
def test_tensor_parallel(gather: str | None, reduce: str | None) -> None:
    """Shards of one tensor-parallel rank's part travel; the other axis is as ever."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def train(gather: str | None, reduce: str | None) -> dict[str, Tensor]:
        model = models.seeded(meshes.ParallelModel)
        meshes.parallelize(model, mesh["model"], "sequence")
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh["data"])
        fsdp2.fully_shard(model, mesh=mesh["data"])
        coded(model, gather, reduce)
        ids = torch.randint(model.embed.num_embeddings, (2, 9))
        meshes.parallel_loss(model, ids).backward()
        return full_gradients(model)

    torch.manual_seed(dist.get_rank() // 2)
    state = torch.get_rng_state()
    found = train(gather, reduce)
    torch.set_rng_state(state)
    for name, expected in train(None, None).items():
        assert off(found[name], expected) < bound(reduce, 0.1), name


@ranks(2)
@seldom_others
def test_compiled_blocks(gather: str | None, reduce: str | None) -> None:
    def train(compiled: bool) -> list[Tensor]:
        model = build()
        for block in model[:2]:
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        coded(model, gather, reduce)
        for step in range(2):
            loss_of(model, batch(step)).backward()
        return list(full_gradients(model).values())

    for found, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@ranks(2)
@pytest.mark.parametrize(
    "others",
    [("bf16", "int8"), ("int8", "int4"), ("int4", "int4 rotate"), ("int4", "int4 feedback")],
)
def test_ranks_that_choose_otherwise_are_named(others: tuple[str, str]) -> None:
    with fsdp2.debug(check_ranks=True):
        model = build()
        fsdp2.fully_shard(model)
        coded(model, None, others[dist.get_rank()])
        with pytest.raises(fsdp2.errors.RankMismatchError, match="set_wire_format"):
            loss_of(model, batch()).backward()


@ranks(2)
def test_several_backwards_and_dtypes_feed_back() -> None:
    """Nothing is left out over steps, of parameters of two dtypes; an exception between."""

    def train(reduce: str | None) -> dict[str, Tensor]:
        model = build()
        model[1].to(torch.bfloat16)
        fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16))
        coded(model, None, reduce)
        for step in range(10):
            if step == 5:
                with pytest.raises(RuntimeError, match=r"shape|size"):
                    model(torch.ones(2, 34))
            loss_of(model, batch(0)).backward()
        return full_gradients(model)

    exact = train(None)
    wrong = {
        n: {k: off(v, exact[k]) for k, v in train(n).items()} for n in ("int4", "int4 feedback")
    }
    names = [name for name, value in exact.items() if value.numel() >= 100]
    assert sum(wrong["int4 feedback"][n] for n in names) < sum(wrong["int4"][n] for n in names) / 3
