"""Arguments and misuse: each error names what is wrong and what to do, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from benchmarks.null_group import init_null_group, null_mesh
from fsdp2 import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp2.core.hooks import hooks_of


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(4)
    yield null_mesh(4)
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def _shard_child_after_parent() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    fully_shard(model[0])


def _shard_tied_in_two_units() -> None:
    model = Tied()
    fully_shard(model.embed)
    fully_shard(model)


def _shard_twice() -> None:
    model = fully_shard(nn.Linear(4, 4))
    fully_shard(model)


def _mixed_meta() -> None:
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.empty(4, device="meta"))
    fully_shard(model)


def _non_contiguous() -> None:
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(torch.randn(4, 6).t())
    fully_shard(model)


def _scalar() -> None:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model)


def _meta_forward() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model)
    model(torch.randn(2, 4))


def _place(value: object) -> Callable[[], None]:
    return lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: value)


def _prefetch_plain_module() -> None:
    fully_shard(nn.Linear(4, 4)).set_modules_to_forward_prefetch([nn.Linear(4, 4)])


def _reset_inner() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.randn(2, 4))
    model[0].reset_iter_state()


def _unknown_forward_method() -> None:
    fsdp2.register_fsdp_forward_method(fully_shard(nn.Linear(4, 4)), "generate")


def _list_as_first_forward() -> None:
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(pair)
    pair[0](torch.randn(2, 4))


def _3d_mesh() -> None:
    fully_shard(nn.Linear(4, 4), mesh=null_mesh((1, 2, 2)))


def _optimizer_of_gathered() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with torch.no_grad():
        model(torch.randn(2, 4))  # a root stays gathered
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


MISUSES = {
    "optimizer of gathered": (
        _optimizer_of_gathered,
        fsdp2.ShardingStateError,
        r"SGD holds the gathered parameter 'weight'.*reshard\(\)",
    ),
    "child after parent": (_shard_child_after_parent, ValueError, "'weight'.*children before"),
    "tied in two units": (_shard_tied_in_two_units, ValueError, "'head.weight'.*tied.*fully_shard"),
    "twice": (_shard_twice, ValueError, "already called on this FSDPLinear"),
    "meta and real": (_mixed_meta, ValueError, "'bias' is on the meta device and 'weight' is not"),
    "not contiguous": (_non_contiguous, ValueError, r"'weight' is not contiguous.*contiguous\(\)"),
    "scalar": (_scalar, ValueError, "'scale' is a scalar.*one element"),
    "still on meta": (_meta_forward, fsdp2.ShardingStateError, "'weight'.*meta.*to_empty"),
    "placement kind": (_place(Replicate()), ValueError, "Replicate.*'weight'.*return a"),
    "placement dim": (_place(Shard(2)), ValueError, r"Shard\(2\).*'weight'.*below 2"),
    "prefetch plain": (_prefetch_plain_module, ValueError, "got a Linear.*fully_shard"),
    "reset inner": (_reset_inner, fsdp2.ShardingStateError, "'0', which is not the root"),
    "no such method": (_unknown_forward_method, ValueError, "no method 'generate'"),
    "list first": (_list_as_first_forward, fsdp2.ShardingStateError, "no single root"),
    "3-D mesh": (_3d_mesh, ValueError, r"1-D mesh.*\(1, 2, 2\)"),
    "not a mesh": (lambda: fully_shard(nn.Linear(4, 4), mesh=4), TypeError, "DeviceMesh.*int"),
    "not a module": (lambda: fully_shard([3]), TypeError, "list of modules, not int"),
    "empty list": (lambda: fully_shard([]), ValueError, "empty list"),
    "container": (
        lambda: fully_shard(nn.ModuleList([nn.Linear(4, 4)])),
        ValueError,
        "ModuleList has no forward",
    ),
    "reshard int": (
        lambda: fully_shard(nn.Linear(4, 4), reshard_after_forward=3),
        ValueError,
        "reshard_after_forward=3.*4 ranks",
    ),
    "reshard kind": (
        lambda: fully_shard(nn.Linear(4, 4), reshard_after_forward="yes"),
        ValueError,
        "'yes'",
    ),
    "policy kind": (
        lambda: fully_shard(nn.Linear(4, 4), mp_policy=torch.bfloat16),
        TypeError,
        "MixedPrecisionPolicy.*dtype",
    ),
    "policy dtype": (
        lambda: MixedPrecisionPolicy(param_dtype=torch.int8),
        ValueError,
        "param_dtype=torch.int8",
    ),
    "policy value": (
        lambda: MixedPrecisionPolicy(reduce_dtype="bf16"),
        TypeError,
        "reduce_dtype='bf16'",
    ),
    "offload": (
        lambda: fully_shard(nn.Linear(4, 4), offload_policy=object()),
        TypeError,
        "offload_policy",
    ),
    "set reshard": (
        lambda: fully_shard(nn.Linear(4, 4)).set_reshard_after_forward(2),
        ValueError,
        "takes a bool, not 2",
    ),
    "divide factor": (
        lambda: fully_shard(nn.Linear(4, 4)).set_gradient_divide_factor(0),
        ValueError,
        "positive number, not 0",
    ),
    "deep copy": (lambda: copy.deepcopy(fully_shard(nn.Linear(4, 4))), TypeError, "deep-copied"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    call, kind, message = MISUSES[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("build", [Tied, lambda: nn.Sequential(nn.Linear(4, 4))])
def test_a_refused_call_changes_nothing(build: Callable[[], nn.Module]) -> None:
    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="below 2"):
        fully_shard(model, shard_placement_fn=lambda _: Shard(5))
    assert not isinstance(model, FSDPModule)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    fully_shard(model)  # nothing was left behind that would refuse it
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_class_and_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    names = [name for name, _ in model.named_parameters()]
    assert fully_shard(model) is model
    assert type(model).__name__ == "FSDPSequential"
    order = type(model).__mro__
    assert order[:2] == (type(model), FSDPModule)
    assert order.index(FSDPModule) < order.index(nn.Sequential)
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model[:1]) is nn.Sequential  # a slice is a plain container


def test_list_of_modules_is_one_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pair = [model[0], model[2]]
    assert fully_shard(pair) is pair
    fully_shard(model)
    assert [(r.name, r.num_params) for r in fsdp2.group_reports(model)] == [
        ("(root)", 2),
        ("0, 2", 4),
    ]


def test_int_reshard_values() -> None:
    """The mesh's size means True, 1 means False."""
    fully_shard(nn.Linear(4, 4), reshard_after_forward=4, offload_policy=OffloadPolicy())
    with torch.no_grad():
        freed = fully_shard(nn.Linear(4, 4), reshard_after_forward=4)
        freed(torch.randn(1, 4))
        kept = fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
        kept(torch.randn(1, 4))
    assert isinstance(freed.weight, DTensor)
    assert not isinstance(kept.weight, DTensor)


def test_ignored_and_attributes() -> None:
    model = nn.Linear(4, 4)
    model.weight.tag = "decay"
    fully_shard(model, ignored_params={model.bias})
    assert not isinstance(model.bias, DTensor)
    assert isinstance(model.weight, DTensor)
    assert model.weight.tag == "decay"
    model.unshard()
    assert model.weight.tag == "decay"


def test_plain_modules_have_no_fsdp_methods_but_may_register() -> None:
    plain = nn.Linear(4, 4)
    fsdp2.register_fsdp_forward_method(plain, "anything")  # a no-op, as documented
    assert "anything" not in plain.__dict__


def test_meta_then_to_empty() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    for layer in model:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    model(torch.randn(2, 4)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
    for layer, report in zip(model, fsdp2.group_reports(model), strict=True):
        weight, bias = layer.weight.to_local(), layer.bias.to_local()
        assert 0 < bias.data_ptr() - weight.data_ptr() < report.shard_bytes  # flat again
    assert torch.equal(model[0].weight.to_local(), torch.ones(1, 4))


def test_changing_dtype_after_a_forward() -> None:
    """torch's FSDP2 breaks here; ours lays the group out again."""
    model = fully_shard(nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    model.zero_grad()
    model.to(torch.bfloat16)
    out = model(torch.randn(2, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


def test_kept_parameters_are_gathered_again_after_an_optimizer_step() -> None:
    """torch's FSDP2 runs the next forward with the weights of before the step."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.randn(2, 4))  # gathers, and keeps
        gathers: list[str] = []
        hooks_of(model).unit.groups[0].observer = lambda what, _: gathers.append(what)
        model(torch.randn(2, 4))
        assert gathers == []
        optimizer.step()
        model(torch.randn(2, 4))
        assert gathers == ["reshard", "all_gather", "finish"]
