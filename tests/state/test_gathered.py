"""`gathered`: whole parameters beside those of the model before it was sharded, to the bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2
from fsdp2 import gathered
from tests.common import meshes, models, parity, tensors
from tests.common.errors import raises
from tests.common.offloading import forced_offload
from tests.common.workers import ranks


class Convolutional(nn.Module):
    """A weight whose memory is in another order, and one that is cut on its second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(1, 300_001, dtype=torch.complex64))
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)


def odd() -> Any:
    return models.seeded(models.OddMLP)


def tied() -> Any:
    return models.seeded(partial(models.Transformer, tied=True))


def _values(model: nn.Module) -> dict[str, Tensor]:
    """What a model has under each name, tied names too."""
    return {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def _sharded(model: nn.Module, **arguments: Any) -> Any:
    return parity.shard(parity.OURS, model, **arguments)


def _flat() -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Models, sharded, and their values before."""
    builds: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "uneven": (odd, {}),
        "tied": (tied, {}),
        "mixed": (tied, {"mixed": True}),
        "orders": (lambda: models.seeded(Convolutional), {}),
        "offloaded": (odd, {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)}),
    }
    for name, (build, arguments) in builds.items():
        plain = _values(build())
        with forced_offload() if name == "offloaded" else contextlib.nullcontext():
            yield name, _sharded(build(), **arguments), plain


def _check_whole(model: nn.Module, plain: dict[str, Tensor], held: bool) -> None:
    for name, param in model.named_parameters(remove_duplicate=False):
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor) != held, name
        if held:
            assert type(param.data) is Tensor
            assert param.stride() == plain[name].stride()
            parity.assert_equal(param.detach(), plain[name], name)


def _is_first() -> bool:
    return dist.get_rank() == 0


FLAGS = ("writeback", "rank0_only", "offload_to_cpu")


@ranks(1, 2)
def test_values_and_what_is_written_back() -> None:
    """All models, with all combinations of the flags."""
    for name, model, plain in _flat():
        params = dict(model.named_parameters())
        locals_ = {n: p.to_local().data_ptr() for n, p in params.items()}
        for bits in itertools.product((False, True), repeat=len(FLAGS)):
            flags = dict(zip(FLAGS, bits, strict=True))
            held = _is_first() or not flags["rank0_only"]
            with gathered(model, **flags), torch.no_grad():
                _check_whole(model, plain, held)
                if held:
                    for param in model.parameters():
                        param.copy_(param.logical_not() if param.dtype is torch.bool else param * 2)
            if flags["writeback"]:
                double = {n: ~v if v.dtype is torch.bool else v * 2 for n, v in plain.items()}
                plain = double
            after = dict(model.named_parameters())
            assert all(after[n] is params[n] for n in params), "DTensors are the same objects"
            assert all(after[n].to_local().data_ptr() == locals_[n] for n in params), "in place"
            if name != "orders" or dist.get_world_size() == 1:  # torch's own pads no complex rows
                parity.assert_equal(
                    parity.full_params(model), {n: plain[n] for n in params}, f"{name} {flags}"
                )


def _trained(model: Any) -> Any:
    """A gradient of this rank's part."""
    parity.regression_loss(
        model, parity.my_part(parity.regression_batches(models.DIM, 1)[0])
    ).backward()
    return model


@ranks(1, 2)
def test_gradients() -> None:
    """They are whole beside parameters, written back, dropped, removed and added."""
    model = _trained(_sharded(odd()))
    grads = parity.full_grads(model)
    first, *_ = model.layers
    for rank0_only, cpu, writeback in itertools.product((False, True), repeat=3):
        held = _is_first() or not rank0_only
        with gathered(
            model, rank0_only=rank0_only, offload_to_cpu=cpu, writeback=writeback, with_grads=True
        ):
            for name, param in model.named_parameters():
                if held:
                    parity.assert_equal(param.grad, grads[name], name)
                    param.grad *= 3
            if held:
                first.bias.grad = None
                assert type(model.layers[1].weight.grad) is Tensor
        if writeback:
            grads = {n: None if g is None else g * 3 for n, g in grads.items()}
            grads["layers.0.bias"] = None
        parity.assert_equal(parity.full_grads(model), grads, "after")
        with gathered(model, rank0_only=rank0_only, with_grads=True):
            if held:
                first.bias.grad = torch.ones_like(first.bias)
        grads["layers.0.bias"] = torch.ones(7)
        parity.assert_equal(parity.full_grads(model), grads, "added")
    with gathered(model):
        assert all(param.grad is None for param in model.parameters())
    parity.assert_equal(parity.full_grads(model), grads, "left alone")


@ranks(2)
def test_training_goes_on_as_unsharded() -> None:
    """Optimizers and what is gathered see the new values, also those gathered by an evaluation."""
    plain, model = odd(), _sharded(odd())
    found = []
    for trained, cut in ((plain, lambda batch: batch), (model, parity.my_part)):
        optimizer = torch.optim.AdamW(trained.parameters())
        for batch in parity.regression_batches(models.DIM, 1):
            with torch.no_grad():
                trained(batch[0])
            change = gathered(trained) if trained is model else contextlib.nullcontext()
            with change, torch.no_grad():
                for param in trained.parameters():
                    param.mul_(0.5)
            parity.regression_loss(trained, cut(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found.append(trained(parity.regression_batches(models.DIM, 1)[0][0]))
    torch.testing.assert_close(found[1], found[0])


@ranks(2)
def test_dtype() -> None:
    """Elements that are left alone keep their bits; those that are changed are rounded."""
    model = _trained(_sharded(odd()))
    plain, grads = _values(odd()), parity.full_grads(model)
    for rank0_only in (False, True):
        held = _is_first() or not rank0_only
        with gathered(model, dtype=torch.bfloat16, with_grads=True, rank0_only=rank0_only):
            for name, param in model.named_parameters() if held else ():
                parity.assert_equal(param.detach(), plain[name].bfloat16(), name)
                parity.assert_equal(param.grad, grads[name].bfloat16(), name)
            if held:
                with torch.no_grad():
                    model.layers[1].weight[0, 0] = 1 / 3
        plain["layers.1.weight"][0, 0] = torch.tensor(1 / 3).bfloat16()
        parity.assert_equal(parity.full_params(model), plain, "parameters")
        parity.assert_equal(parity.full_grads(model), grads, "gradients")


@ranks(2)
def test_nested() -> None:
    """An inner context starts from the outer one's values, and leaves its own to that."""
    every = list(itertools.product((False, True), repeat=4))
    for outer0, inner0, outer_writes, inner_writes in every:
        model, plain = _sharded(odd()), _values(odd())
        weight = model.layers[0].weight
        outer = {"rank0_only": outer0, "writeback": outer_writes, "with_grads": True}
        inner = {"rank0_only": inner0, "writeback": inner_writes, "with_grads": True}
        _trained(model)
        grads = parity.full_grads(model)
        with torch.no_grad(), gathered(model, **outer):
            outside = model.layers[0].weight
            if _is_first() or not outer0:
                outside += 1
                outside.grad += 1
            with gathered(model.layers[0], **inner):
                if _is_first() or not inner0:
                    assert model.layers[0].weight is not outside
                    parity.assert_equal(
                        model.layers[0].weight.detach(), plain["layers.0.weight"] + 1
                    )
                    model.layers[0].weight += 2
                    model.layers[0].weight.grad += 2
            assert model.layers[0].weight is outside
            if _is_first() or not outer0:
                more = 3 if inner_writes else 1
                parity.assert_equal(
                    outside.detach(),
                    plain["layers.0.weight"] + 1 + (more - 1),
                    f"in {outer} {inner}",
                )
                before = grads["layers.0.weight"]
                parity.assert_equal(outside.grad, before + 1 + (more - 1), "gradient")
        assert model.layers[0].weight is weight
        if outer_writes:
            change = (lambda t: t + 1 + 2) if inner_writes else (lambda t: t + 1)
            plain["layers.0.weight"] = change(plain["layers.0.weight"])
            grads["layers.0.weight"] = change(grads["layers.0.weight"])
        parity.assert_equal(parity.full_params(model), plain, f"{outer} {inner}")
        parity.assert_equal(parity.full_grads(model), grads, f"{outer} {inner}")


@ranks(2)
def test_which_parameters() -> None:
    model = _sharded(tied())

    def whole() -> set[str]:
        named = model.named_parameters(remove_duplicate=False)
        return {name for name, param in named if not isinstance(param, DTensor)}

    with gathered(model, recurse=False):
        assert whole() == {"embed.weight", "head.weight", "norm.weight", "norm.bias"}
    with gathered(model.blocks[1]):
        assert {name.rpartition(".")[0].split(".")[1] for name in whole()} == {"1"}
    with gathered(model.blocks[1].norm1):
        assert whole() == {"blocks.1.norm1.weight", "blocks.1.norm1.bias"}
    with gathered(model, names={"head.weight", "blocks.0.up.bias"}):
        assert whole() == {"head.weight", "embed.weight", "blocks.0.up.bias"}
        assert model.head.weight is model.embed.weight
    with gathered(model, names=lambda name: name.endswith("norm1.bias")):
        assert whole() == {"blocks.0.norm1.bias", "blocks.1.norm1.bias"}
    assert whole() == set()


@ranks(2)
def test_state_dicts_inside() -> None:
    model, plain = _sharded(tied()), _values(tied())
    other = _values(models.seeded(partial(models.Transformer, tied=True), 1))
    with gathered(model):
        found = model.state_dict()
        parity.assert_equal({n: found[n] for n in plain}, plain, "saved")
        model.load_state_dict({**found, **other})
    parity.assert_equal(
        parity.full_params(model), {n: other[n] for n in parity.full_params(model)}, "loaded"
    )


@ranks(2)
def test_exceptions() -> None:
    """Wherever the body raises, no rank writes, and the model is sharded."""
    model, plain = _sharded(odd()), _values(odd())
    for rank0_only, raising in itertools.product((False, True), ({0}, {1}, {0, 1})):
        mine = dist.get_rank() in raising
        with (
            pytest.raises(KeyError, match="mine") if mine else raises("gathered-other-rank"),
            gathered(model, rank0_only=rank0_only),
            torch.no_grad(),
        ):
            for param in model.parameters():
                if not isinstance(param, DTensor):
                    param.zero_()
            if mine:
                raise KeyError("mine")
        assert all(isinstance(param, DTensor) for param in model.parameters())
        parity.assert_equal(parity.full_params(model), plain, "unchanged")


@ranks(2)
def test_misuse() -> None:
    model, batch = _sharded(odd()), parity.my_part(parity.regression_batches(models.DIM, 1)[0])
    first = model.layers[0]

    def inside(*_: Any) -> None:
        with raises("full-during"), gathered(model):
            pass

    handle = first.register_forward_hook(inside)
    loss = parity.regression_loss(model, batch)
    handle.remove()
    handle = loss.register_hook(inside)
    loss.backward()
    handle.remove()
    with raises("gathered-names"), gathered(model, names="layers.0.weight"):
        pass
    with raises("gathered-unknown-name"), gathered(model, names={"layers.9.weight"}):
        pass
    with raises("gathered-dtype"), gathered(model, dtype="bf16"):  # type: ignore[arg-type]
        pass
    with raises("gathered-ranks-differ"), gathered(model, writeback=_is_first()):
        pass
    with raises("gathered-gradient"):
        if _is_first():
            first.weight.grad = None
        with gathered(model, with_grads=True):
            pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises("gathered-stepped"), gathered(model):
        optimizer.step()
    with raises("gathered-shape"), gathered(model):
        first.weight.data = torch.zeros(2, 2)
    with gathered(model), raises("forward-while-whole"):
        model(batch[0])
    with torch.device("meta"):
        meta = models.OddMLP()
    with raises("still-on-meta"), gathered(_sharded(meta)):
        pass
    parity.regression_loss(model, batch).backward()


@ranks(2)
def test_tensor_subclasses() -> None:
    """They stay what they are: whole ones with the bits of the one that was sharded."""
    build = partial(models.seeded, partial(models.OddMLP, (8, 16, 8)))
    for kind, leaf in ((tensors.Bf16Weight, "_data"), (tensors.Quantized, "_codes")):
        plain = _values(build())

        def made(model: Any, kind: Any = kind) -> Any:
            if kind is tensors.Bf16Weight:
                return tensors.extend(model, kind)
            for layer in model.layers:
                layer.weight = nn.Parameter(tensors.Quantized.of(layer.weight.detach()), False)
            return model

        whole = getattr(made(build()).layers[1].weight.detach(), leaf)
        model = _sharded(made(build()))
        for rank0_only in (False, True):
            held = _is_first() or not rank0_only
            with gathered(model, rank0_only=rank0_only), torch.no_grad():
                weight = model.layers[1].weight
                if held:
                    assert isinstance(weight.detach(), kind)
                    parity.assert_equal(getattr(weight.detach(), leaf), whole, leaf)
                    parity.assert_equal(model.layers[1].bias.detach(), plain["layers.1.bias"])
                    getattr(weight, leaf).mul_(-1)
            whole = -whole
        with gathered(model, writeback=False):
            parity.assert_equal(getattr(model.layers[1].weight.detach(), leaf), whole, "written")
    for layer in model.layers:
        local = layer.weight._local_tensor
        local._scales = local._scales.view(-1)[:1]
    with raises("subclass-parts"), gathered(model):
        pass
    assert all(isinstance(param, DTensor) for param in model.parameters())


@ranks(4)
def test_copies_and_tensor_parallel() -> None:
    """HSDP of 2 x 2, and two shards of two tensor-parallel ranks; both uneven."""

    def parallel() -> Any:
        model = models.seeded(partial(models.Transformer, blocks=1, vocab=14))
        plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
        plan["head"] = ColwiseParallel(use_local_output=False)
        return parallelize_module(model, meshes.mesh("shard", "tp", shape=(2, 2))["tp"], plan)

    plain = _values(models.seeded(partial(models.Transformer, blocks=1, vocab=14)))
    for name in ("hsdp", "tp"):
        if name == "hsdp":
            model = models.seeded(partial(models.Transformer, blocks=1, vocab=14))
            model = _sharded(model, mesh=meshes.hsdp_mesh(2, 2))
        else:
            model = _sharded(parallel(), mesh=meshes.mesh("shard", "tp", shape=(2, 2))["shard"])
            assert model.blocks[0].up.weight.device_mesh.ndim == 2
        for rank0_only, inner0 in itertools.product((False, True), repeat=2):
            held = _is_first() or not rank0_only
            with gathered(model, rank0_only=rank0_only), torch.no_grad():
                if name == "hsdp" or held:
                    _check_whole(model, plain, held)
                outside = set(model.parameters())
                with gathered(model, rank0_only=inner0):
                    # What is no tensor-parallel DTensor has a first rank in each such pair.
                    for param in set(model.parameters()) - outside:
                        param += 1
            plain = {n: v + 1 for n, v in plain.items()}
            parity.assert_equal(
                parity.full_params(model), {n: plain[n] for n in parity.full_params(model)}, name
            )
        plain = _values(models.seeded(partial(models.Transformer, blocks=1, vocab=14)))
    strided = nn.Linear(8, 8, bias=False)
    line = meshes.mesh("shard", "tp", shape=(2, 2))
    rows = DTensor.from_local(torch.zeros(4, 8), line["tp"], [_StridedShard(0, split_factor=2)])
    strided.weight = nn.Parameter(rows)
    with raises("strided-parallel"), gathered(_sharded(strided, mesh=line["shard"])):
        pass
