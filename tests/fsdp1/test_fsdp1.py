"""FSDP1's wrapper against torch's own on real ranks: the same losses, parameters and schedules."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

import fsdp2.fsdp1 as ours
from fsdp2 import PrefetchTime
from fsdp2.core.layout.mesh import local_of
from fsdp2.fsdp1 import comm_hooks
from fsdp2.testing import counting
from tests.common import parity
from tests.common.cases import in_turn
from tests.common.gradients import unsharded_grads
from tests.common.models import seeded
from tests.common.workers import ranks

CPU = torch.device("cpu")
STRATEGIES = [strategy.name for strategy in ours.ShardingStrategy]
DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Normed(nn.Module):
    """With a batch norm, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(DIM, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.full((2,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


def wrap(api: Any, model: nn.Module, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    """A wrapped model, in the same words for both implementations."""
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    arguments.setdefault("device_id", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return api.FullyShardedDataParallel(
            model,
            sharding_strategy=getattr(api.ShardingStrategy, strategy),
            use_orig_params=True,
            **arguments,
        )


def batches(steps: int, rank: int | None = None) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    for _ in range(steps):
        yield torch.randn(4, DIM, generator=generator)


def train(
    api: Any,
    model: Any,
    steps: int = 3,
    around: Callable[[int], Any] = lambda step: contextlib.nullcontext(),
) -> list[Any]:
    """Losses, gradients and parameters of some steps with AdamW."""
    optimizer = parity.ShardwiseAdamW(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for step, batch in enumerate(batches(steps)):
        context = around(step)
        with context:
            loss = model(batch).float().pow(2).sum()
            loss.backward()
        seen.append(loss.detach().clone())
        if isinstance(context, contextlib.nullcontext):
            seen.append(whole(api, model, grads=True))
            optimizer.step()
            optimizer.zero_grad()
    seen.append(whole(api, model))
    return seen


def whole(api: Any, model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    with api.FullyShardedDataParallel.summon_full_params(model, with_grads=grads, writeback=False):
        found = {name: (param.grad if grads else param) for name, param in model.named_parameters()}
        return {name: t.detach().clone() for name, t in found.items() if t is not None}


def as_torch(
    scenario: Callable[[Any], Any], compare: Callable[[Any, Any], None] = parity.assert_equal
) -> Any:
    """What ``scenario`` returns with our wrapper, compared with torch's."""
    expected = scenario(torchs)
    found = scenario(ours)
    compare(found, expected)
    return found


def close(found: Any, expected: Any) -> None:
    parity.assert_close(found, expected, parity.REORDERED_FP32)


def assert_plain_grads(model: nn.Module, build: Any, loss: Callable[[Any, int], Any]) -> None:
    """A wrapped model has the mean of the gradients that the unwrapped one has of all ranks."""
    plain = unsharded_grads(seeded(build), lambda plain, rank: loss(plain, rank).backward())
    expected = {name: grad for name, grad in plain.items() if grad is not None}
    found = whole(ours, model, grads=True)
    close({name: found[name] for name in expected}, expected)


# ---- strategies


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str) -> None:
    arguments = {}
    if "HYBRID" in strategy:
        arguments["device_mesh"] = init_device_mesh("cpu", (1, 2))
    as_torch(lambda api: train(api, wrap(api, seeded(Net), strategy, **arguments)))


@ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_strategies(strategy: str) -> None:
    """From a mesh, from a pair of groups, and by nodes."""
    mesh = init_device_mesh("cpu", (2, 2))
    as_torch(lambda api: train(api, wrap(api, seeded(Net), strategy, device_mesh=mesh)), close)
    pair = (mesh.get_group(1), mesh.get_group(0))
    model = wrap(ours, seeded(Net), strategy, process_group=pair)
    weight = model.head.weight
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert (model.process_group, model.world_size) == (mesh.get_group(1), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        by_nodes = wrap(ours, seeded(Net), strategy)
    assert by_nodes.head.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    parity.assert_equal(train(ours, by_nodes), train(ours, model))


@ranks(2)
def test_what_strategies_keep_in_memory() -> None:
    """Forward frees the blocks where it should; NO_SHARD has whole rows on each rank."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = wrap(ours, seeded(Net), strategy)
        rows = 12 if strategy == "NO_SHARD" else 6
        weight = model.blocks[0].up.weight
        assert weight.to_local().shape[0] == rows
        model(next(batches(1)))
        is_whole = not isinstance(model.blocks[0].up.weight, DTensor)
        assert is_whole == (strategy == "SHARD_GRAD_OP"), strategy


@ranks(2)
def test_process_group_and_mesh_agree() -> None:
    group = dist.new_group([0, 1])
    by_group = wrap(ours, seeded(Net), process_group=group)
    assert by_group.process_group is group
    by_mesh = wrap(ours, seeded(Net), device_mesh=init_device_mesh("cpu", (2,)))
    parity.assert_equal(train(ours, by_group), train(ours, by_mesh))


# ---- schedules


class Traced(torch.utils._python_dispatch.TorchDispatchMode):
    """What is gathered, reduced and computed in backward, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        for part, word in (("gather", "gather"), ("reduce_scatter", "reduce")):
            if name.startswith("c10d") and part in name:
                self.seen.append(word)
        if "tanh_backward" in name:
            self.seen.append("compute")
        return function(*args, **(kwargs or {}))


@ranks(2)
@pytest.mark.parametrize("when", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_backward_prefetch_is_torchs_schedule(when: str | None) -> None:
    """Three orders of collectives beside compute, the same as torch's from the second step on."""

    def scenario(api: Any) -> list[str]:
        member = None if when is None else getattr(api.BackwardPrefetch, when)
        model = wrap(api, seeded(Net), backward_prefetch=member)
        for batch in batches(2):
            loss = model(batch).sum()
            with Traced() as traced:
                loss.backward()
        return traced.seen

    found = as_torch(scenario)
    first = {
        "BACKWARD_PRE": ["gather", "gather", "compute", "reduce"],
        "BACKWARD_POST": ["gather", "compute", "gather", "reduce"],
        None: ["gather", "compute", "reduce", "gather"],
    }
    assert found[:4] == first[when]


@ranks(2)
@pytest.mark.parametrize("when", ["BACKWARD_POST", None])
def test_backward_prefetch_changes_no_bit(when: str | None) -> None:
    member = None if when is None else ours.BackwardPrefetch[when]
    expected = train(ours, wrap(ours, seeded(Net)))
    model = wrap(ours, seeded(Net), backward_prefetch=member)
    parity.assert_equal(train(ours, model), expected)
    wide = wrap(ours, seeded(Net), backward_prefetch=member)
    wide.set_tuning(prefetch_window=2)
    parity.assert_equal(train(ours, wide), expected)
    as_units = wrap(ours, seeded(Net))
    as_units.set_tuning(backward_prefetch=PrefetchTime.AFTER if when else PrefetchTime.NEVER)
    parity.assert_equal(train(ours, as_units), expected)


# ---- mixed precision


PRECISIONS: dict[str, dict[str, Any]] = {
    "param": {"param_dtype": torch.bfloat16},
    "reduce-fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduce-bf16": {"reduce_dtype": torch.bfloat16},
    "inputs": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True},
}


@ranks(2)
def test_mixed_precision() -> None:
    def scenario(fields: dict[str, Any], api: Any) -> Any:
        precision = api.MixedPrecision(**fields)
        return train(api, wrap(api, seeded(Net), mixed_precision=precision))

    in_turn(PRECISIONS, lambda fields: as_torch(functools.partial(scenario, fields)))


@ranks(2)
def test_batch_norms_stay_in_full_precision() -> None:
    """They get wrappers of their own; buffers are cast, and in state dicts they are not."""

    def scenario(api: Any, policy: Any) -> Any:
        precision = api.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = wrap(api, seeded(Normed), mixed_precision=precision, auto_wrap_policy=policy)
        assert isinstance(model.module.norm, api.FullyShardedDataParallel)
        seen = train(api, model)
        assert model.scale.dtype == torch.bfloat16
        assert model.norm.running_mean.dtype == torch.float32
        return [seen, model.norm.running_mean.clone()]

    for policy in (
        ModuleWrapPolicy({nn.Linear}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=40),
    ):
        as_torch(lambda api, policy=policy: scenario(api, policy))
    model = wrap(
        ours,
        seeded(Normed),
        mixed_precision=ours.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    assert model.state_dict()["scale"].dtype == torch.float32
    alone = ours.MixedPrecision(torch.bfloat16, _module_classes_to_ignore=())
    kept = wrap(ours, seeded(Net), mixed_precision=alone)
    assert len(ours.FSDP.fsdp_modules(kept)) == 4


@ranks(2)
def test_inputs_are_cast_at_the_root_alone() -> None:
    """Unless a wrapper says so for itself; wrapping it again takes the root's place away."""
    seen: list[torch.dtype] = []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].dtype)

    def dtypes(model: nn.Module, batch: Tensor) -> list[torch.dtype]:
        seen.clear()
        model(batch)
        return list(seen)

    bf16, half = torch.bfloat16, torch.float16
    x = next(batches(1))
    for root, cast, expected in ((True, False, bf16), (False, False, None), (False, True, bf16)):
        block = seeded(Block)
        block.register_forward_pre_hook(look)
        precision = ours.MixedPrecision(
            bf16, cast_root_forward_inputs=root, cast_forward_inputs=cast
        )
        model = wrap(ours, block, mixed_precision=precision, auto_wrap_policy=None)
        if expected is None:
            with pytest.raises(RuntimeError, match="dtype"):
                dtypes(model, x)
        else:
            assert dtypes(model, x) == [expected]
    block = seeded(Block)
    block.register_forward_pre_hook(look)
    inner = wrap(ours, block, mixed_precision=ours.MixedPrecision(half), auto_wrap_policy=None)
    outer = ours.MixedPrecision(bf16)
    model = wrap(ours, nn.Sequential(inner), mixed_precision=outer, auto_wrap_policy=None)
    with pytest.raises(RuntimeError, match="dtype"):
        dtypes(model, x)
    assert seen == [bf16]


@ranks(2)
def test_gradients_stay_low() -> None:
    """``keep_low_precision_grads``: torch's dtype and values, and accumulation goes on in it."""

    def scenario(api: Any) -> Any:
        precision = api.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
        model = wrap(api, seeded(Net), mixed_precision=precision)
        (batch,) = batches(1)
        model(batch).float().pow(2).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(grad.dtype == torch.bfloat16 for grad in grads)
        return grads

    first = scenario(ours)
    scenario(torchs)
    (batch,) = batches(1)
    for keeps, times in ((False, 1), (True, 2)):
        precision = ours.MixedPrecision(torch.bfloat16, keep_low_precision_grads=keeps)
        model = wrap(ours, seeded(Net), mixed_precision=precision)
        for _ in range(times):
            model(batch).float().pow(2).sum().backward()
        for found, once in zip(model.parameters(), first, strict=True):
            assert found.grad.dtype == (torch.bfloat16 if keeps else torch.float32)
            parity.assert_equal(found.grad.to_local().bfloat16(), times * once.to_local())
    assert model.clip_grad_norm_(1e9).dtype == torch.bfloat16


# ---- gradients


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_no_sync(strategy: str) -> None:
    def scenario(api: Any) -> Any:
        model = wrap(api, seeded(Net), strategy)
        contexts = {0: model.no_sync, 1: model.no_sync}
        nothing = contextlib.nullcontext
        return train(api, model, 4, lambda step: contexts.get(step, nothing)())

    as_torch(scenario, close)


@ranks(2)
def test_no_sync_keeps_what_strategies_keep_until_backward() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = wrap(ours, seeded(Net), strategy)
        with model.no_sync():
            for batch in batches(3):  # fingerprints of shards are taken from the second on
                with counting.CountCollectives() as found:
                    model(batch).sum().backward()
        assert bool(found.all_gathers) == (strategy == "FULL_SHARD"), strategy


@ranks(2)
def test_accumulation_with_offload() -> None:
    """In and outside of ``no_sync``: torch's adds nothing up there, or refuses."""
    expected: Any = None
    for offload in (False, True):
        model = wrap(ours, seeded(Net), cpu_offload=ours.CPUOffload(offload))
        for step, batch in enumerate(batches(3)):
            with model.no_sync() if step == 0 else contextlib.nullcontext():
                model(batch).pow(2).sum().backward()
        found = whole(ours, model, grads=True)
        expected = expected or found
        parity.assert_equal(found, expected)
    assert_plain_grads(
        model, Net, lambda plain, rank: sum(plain(x).pow(2).sum() for x in batches(3, rank))
    )


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(strategy: str, norm_type: float) -> None:
    def scenario(api: Any) -> Any:
        model = wrap(api, seeded(Net), strategy)
        (batch,) = batches(1)
        model(batch).pow(2).sum().backward()
        total = model.clip_grad_norm_(0.5, norm_type)
        return [total, whole(api, model, grads=True)]

    as_torch(scenario, close)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_communication_hooks(strategy: str) -> None:
    """Default ones reduce as without a hook; compressing ones in 16 bits."""
    sharded = strategy != "NO_SHARD"
    name = "reduce_scatter_hook" if sharded else "allreduce_hook"

    def grads(hook: Any = None, state: Any = None) -> dict[str, Tensor]:
        model = wrap(ours, seeded(Net), strategy)
        if hook is not None:
            model.register_comm_hook(state, hook)
        (batch,) = batches(1)
        model(batch).pow(2).sum().backward()
        return whole(ours, model, grads=True)

    group = dist.group.WORLD
    expected = grads()
    parity.assert_equal(grads(getattr(comm_hooks, name), comm_hooks.DefaultState(group)), expected)
    calls: list[tuple[Any, ...]] = []

    def mine(state: list[Any], grad: Tensor, *output: Tensor) -> None:
        state.append((grad.shape, *(part.shape for part in output)))
        getattr(comm_hooks, name)(comm_hooks.DefaultState(group), grad, *output)

    parity.assert_equal(grads(mine, calls), expected)
    assert len(calls) == 4
    assert all(len(call) == 1 + sharded for call in calls)
    assert all(call[0][0] == 2 * call[1][0] for call in calls if sharded)
    for dtype, hook in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        state = comm_hooks.LowPrecisionState(group)
        found = grads(getattr(comm_hooks, f"{hook}_compress_hook"), state)
        assert all(grad.dtype == torch.float32 for grad in found.values())
        assert all(torch.equal(grad, grad.to(dtype).float()) for grad in found.values())
        error = torch.finfo(dtype).eps * 4
        for key, grad in found.items():
            assert torch.allclose(grad, expected[key], rtol=error, atol=error)


@ranks(2)
def test_sharded_grad_scaler() -> None:
    """One rank's rows overflow: all skip the step, and halve the scale, as torch's do."""

    def scenario(api: Any, kind: Any) -> Any:
        model = wrap(api, seeded(Net))
        scaler = kind("cpu", init_scale=16.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        for step, batch in enumerate(batches(4)):
            loss = model(batch).pow(2).sum()
            scaler.scale(loss).backward()
            if step == 2 and dist.get_rank() == 1:
                grads = [param.grad for param in model.parameters() if param.grad is not None]
                for grad in grads:
                    local_of(grad).fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [torch.tensor(scaler.get_scale()), whole(api, model)]
        return seen

    kinds = {torchs: TorchsScaler, ours: ours.ShardedGradScaler}
    as_torch(lambda api: scenario(api, kinds[api]))
    scaler = ours.ShardedGradScaler("cpu", init_scale=4.0)
    one, (two, three) = torch.ones((), dtype=torch.bfloat16), (torch.ones(1), torch.ones(2))
    scaled = scaler.scale([one, (two, three)])
    assert scaled[0].dtype == torch.bfloat16
    assert type(scaled[1]) is tuple
    assert scaled[0] == 4
    off = ours.ShardedGradScaler("cpu", enabled=False)
    assert off.scale(one) is one


# ---- construction


class Initialised(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)
        nn.init.constant_(self.bias, 1.0)


@ranks(2)
def test_meta_parameters() -> None:
    """``reset_parameters()`` by default, else ``param_init_fn``; block by block."""
    with torch.device("meta"):
        by_default = nn.Sequential(Initialised(DIM, 4), nn.ReLU())
        by_function = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4))
    model = wrap(ours, by_default, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    parity.assert_equal(whole(ours, model)["0.weight"], torch.full((4, DIM), 2.0))
    called: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        called.append(module)
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 3)

    policy = ModuleWrapPolicy({nn.Linear})
    model = wrap(ours, by_function, auto_wrap_policy=policy, param_init_fn=init)
    assert called == [model.module[0].module, model.module, model.module[1]]
    assert all(bool((value == 3).all()) for value in whole(ours, model).values())
    assert all(bool((buffer == 3).all()) for buffer in model.buffers())


@ranks(4)
def test_sync_module_states() -> None:
    """Rank 0's parameters and buffers, over a mesh of one dim and of two."""
    for strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,))
        model = seeded(Normed, seed=dist.get_rank())
        model.scale.fill_(dist.get_rank() + 5)
        policy = ModuleWrapPolicy({nn.BatchNorm1d})
        arguments = {"device_mesh": mesh, "auto_wrap_policy": policy, "sync_module_states": True}
        wrapped = wrap(ours, model, strategy, **arguments)
        expected = seeded(Normed, seed=0)
        parity.assert_equal(whole(ours, wrapped), dict(expected.named_parameters()))
        parity.assert_equal(wrapped.scale, torch.full((2,), 5.0))


@ranks(2)
@pytest.mark.parametrize("how", ["modules", "module states", "parameter states"])
def test_ignored(how: str) -> None:
    """What is ignored stays plain, is not reduced, and is not cast; below wrappers, too."""
    model = seeded(Net)
    left = model.blocks[1].up
    arguments: dict[str, Any] = {
        "modules": {"ignored_modules": [left]},
        "module states": {"ignored_states": [left]},
        "parameter states": {"ignored_states": list(left.parameters())},
    }[how]
    weight = left.weight
    wrapped = wrap(ours, model, **arguments)
    assert left.weight is weight
    assert not isinstance(weight, DTensor)
    assert isinstance(wrapped.blocks[1].down.weight, DTensor)
    (batch,) = batches(1)
    wrapped(batch).sum().backward()
    grads = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(grads, weight.grad)
    assert not torch.equal(*grads)


# ---- what a wrapper offers


@ranks(2)
def test_what_is_inside() -> None:
    model = wrap(ours, nn.Sequential(nn.Linear(DIM, DIM), Block()))
    inner = model.module[1]
    assert isinstance(model, torchs.FullyShardedDataParallel)
    assert isinstance(inner, ours.FSDP)
    assert model[1] is inner
    assert inner.up is inner.module.up
    assert (model.rank, model.world_size) == (dist.get_rank(), 2)
    assert model.check_is_root()
    assert not inner.check_is_root()
    assert ours.FSDP.fsdp_modules(model) == [model, inner]
    assert ours.FSDP.fsdp_modules(nn.Sequential(model), root_only=True) == [model]
    names = ["0.weight", "0.bias", "1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"]
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_parameters("m")] == [f"m.{name}" for name in names]
    assert list(model.state_dict()) == names
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        model.nothing_of_the_kind  # noqa: B018
    normed = wrap(ours, seeded(Normed), auto_wrap_policy=ModuleWrapPolicy({nn.BatchNorm1d}))
    buffers = ["scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [name for name, _ in normed.named_buffers()] == buffers


@ranks(2)
def test_apply_and_summon() -> None:
    """Both show whole parameters; what is written there stays, unless it is not to."""

    def double(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            assert module.weight.shape == (module.out_features, module.in_features)
            with torch.no_grad():
                module.weight.mul_(2)

    def scenario(api: Any) -> Any:
        model = wrap(api, seeded(Net))
        assert model.apply(double) is model
        with api.FullyShardedDataParallel.summon_full_params(model):
            model.head.bias.data.fill_(7)
        with api.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            model.blocks[0].up.weight.data.fill_(9)
        with api.FullyShardedDataParallel.summon_full_params(model, recurse=False):
            assert model.head.weight.shape == (5, DIM)
        return [whole(api, model), train(api, model)]

    as_torch(scenario)
    model = wrap(ours, seeded(Net))
    with ours.FSDP.summon_full_params(model, rank0_only=True, offload_to_cpu=True):
        is_whole = not isinstance(model.head.weight, DTensor)
        assert is_whole == (dist.get_rank() == 0)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_wrappers_put_inside_later(strategy: str, reentrant: bool) -> None:
    """As accelerate does it, which accumulates besides: the wrapper knows its unit all the same."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def scenario(api: Any) -> Any:
        model = wrap(api, seeded(Net), strategy)
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
        policy = ModuleWrapPolicy({Block})
        apply_activation_checkpointing(model, wrapper, auto_wrap_policy=policy)
        assert type(model.blocks[0]._fsdp_wrapped_module) is CheckpointWrapper
        model.apply(lambda module: None)
        contexts = {0: model.no_sync, 1: model.no_sync}
        seen = train(api, model, 4, lambda step: contexts.get(step, contextlib.nullcontext)())
        with api.FullyShardedDataParallel.summon_full_params(model.blocks[0], recurse=False):
            assert model.blocks[0].module.up.weight.shape == (12, DIM)
        state = model.state_dict()
        return [seen[:-1], list(seen[-1].values()), list(state), list(state.values())]

    as_torch(scenario, close)


@ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_clients_put_the_flat_parameter_into_full_precision(frozen: bool) -> None:
    """accelerate's lines for a model that was loaded in bf16 and is trained in mixed precision."""

    def scenario(api: Any) -> Any:
        precision = api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        net = seeded(Net).to(torch.bfloat16)
        for param in net.blocks[1].parameters():
            param.requires_grad_(not frozen)
        model = wrap(api, net, mixed_precision=precision)
        for wrapper in api.FullyShardedDataParallel.fsdp_modules(model):
            assert wrapper._has_params
            param = wrapper._flat_param
            assert (param.dtype, param.device.type) == (torch.bfloat16, "cpu")
            if param.requires_grad:
                assert any(name.endswith("weight") for name in wrapper._flat_param._fqns)
                param.data = param.data.to(torch.float32)
                wrapper._handle._orig_param_dtype = torch.float32
        return train(api, model)

    as_torch(scenario, close)
    empty = wrap(ours, nn.Sequential(Block()))
    assert not empty._has_params
    assert empty._flat_param is None


@ranks(2)
def test_state_dicts_of_wrappers() -> None:
    """Clean names go both ways; torch's checkpoint helpers find DTensors by the same names."""
    model = wrap(ours, seeded(Net))
    other = wrap(ours, seeded(Net, seed=1))
    state = model.state_dict()
    assert set(state) == set(seeded(Net).state_dict())
    other.load_state_dict(state)
    parity.assert_equal(whole(ours, other), whole(ours, model))
    other.blocks[0].load_state_dict(model.blocks[1].state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = batches(1)
    model(batch).sum().backward()
    optimizer.step()
    options = dcp.StateDictOptions(full_state_dict=True)
    weights, states = dcp.get_state_dict(model, optimizer, options=options)
    assert set(weights) == set(state)
    assert set(states["state"]) == set(state)
    parity.assert_equal(weights["head.weight"], whole(ours, model)["head.weight"])
    dcp.set_model_state_dict(other, weights, options=options)
    parity.assert_equal(whole(ours, other), whole(ours, model))


# ---- what torch's FSDP1 cannot do


def frozen() -> nn.Module:
    model = Net()
    model.blocks[0].up.requires_grad_(False)
    return model


def tied() -> nn.Module:
    """Across wrappers: one parameter, its gradient the sum of both uses."""
    model = Net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def squares(model: Any, rank: int) -> Tensor:
    return model(next(batches(1, rank))).pow(2).sum()


def penalty(model: Any, rank: int) -> Tensor:
    """Of gradients: a second backward through the first."""
    x = next(batches(1, rank)).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.pow(2).sum()


@ranks(2)
def test_frozen_and_tied_parameters_and_double_backward() -> None:
    for build, loss in ((frozen, squares), (tied, squares), (Net, penalty)):
        model = wrap(ours, seeded(build))
        loss(model, dist.get_rank()).backward()
        assert_plain_grads(model, build, loss)
        assert (model.blocks[0].up.weight.grad is None) == (build is frozen)


@ranks(2)
def test_a_submodules_own_forward() -> None:
    """Of a wrapper below, and of the module inside of a wrapper."""
    model, plain = wrap(ours, seeded(Net)), seeded(Net)
    (batch,) = batches(1)
    parity.assert_equal(model.blocks[0](batch), plain.blocks[0](batch))
    parity.assert_equal(model.module.blocks[1].module(batch), plain.blocks[1](batch))
    parity.assert_equal(model.module(batch), plain(batch))
    parity.assert_equal(model(batch), plain(batch))


@ranks(2)
def test_parameters_keep_names_and_shapes() -> None:
    """Also without ``use_orig_params``: an optimizer may have groups by name."""
    model = ours.FSDP(seeded(Net), device_id=CPU)
    plain = dict(seeded(Net).named_parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in plain.items()
    }


@ranks(2)
def test_optimizers_made_before() -> None:
    """With ``use_orig_params=True`` they train the model, as with torch's."""

    def scenario(api: Any) -> Any:
        model = seeded(Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped = wrap(api, model)
        for batch in batches(3):
            wrapped(batch).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(api, wrapped)

    as_torch(scenario)
