"""What a run shows of itself: logs, ranges in a trace; and that a step pays for neither."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2 import fully_shard
from fsdp2.core.modules.registry import record_of, records_below
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import PROFILER, observers_of
from fsdp2.core.schedule.unit import Phase
from fsdp2.testing.counting import called
from fsdp2.testing.null_group import init_null_group, null_mesh
from tests.common.errors import raises
from tests.common.models import ReadsKept

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    init_null_group(4)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """``forward`` calls ``also`` with the hidden states, in the forward of the root."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.head = nn.Linear(4, 8)
        self.also: Callable[[Model, torch.Tensor], Any] = lambda model, x: x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.also(self, x)
        return x if x is None else self.head(x)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embed.weight) @ self.blocks[1].weight


class Reader(nn.Module):
    """Reads the weight of ``head``, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embed(tokens), self.head.weight)


TOKENS = torch.tensor([1, 2, 3])


def build(depth: int = 2) -> Any:
    model: Any = Model(depth)
    for block in model.blocks:
        fully_shard(block, mesh=null_mesh(4))
    fully_shard(model.head, mesh=null_mesh(4))
    return fully_shard(model, mesh=null_mesh(4))


def step(model: Any) -> None:
    model(TOKENS).sum().backward()
    model.zero_grad()


# ---- a steady step


def test_a_steady_step_neither_logs_nor_marks_nor_explains() -> None:
    model = build()
    for _ in range(2):
        step(model)
    counts, _ = called(lambda: step(model))
    assert counts["fsdp2.core.schedule.group.start_unshard"] == 4 + 3  # the root stays for backward
    extra = (
        "fsdp2.core.layout.logs",
        "fsdp2.core.schedule.observers",
        "fsdp2.checks.explain",
        "fsdp2.core.notices",
        "torch.autograd.prof",
    )
    assert [name for name in counts if name.startswith(extra)] == []
    rare = ("logging.debug", "logging.info", "logging.isEnabledFor")
    assert [counts[name] for name in (*rare, "fsdp2.core.schedule.scheduler.follow_profiler")] == [
        0
    ] * 4


# ---- ranges


def kinds(model: nn.Module) -> set[type]:
    return {type(group) for hooks in records_below(model) for group in hooks.unit.groups}


def ranges_of(run: Callable[[], Any]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return Counter(e.name for e in found.events() if e.name.startswith("fsdp2::"))


def test_ranges_by_unit_name_while_a_profiler_is_active() -> None:
    model = build()
    step(model)
    ranges = ranges_of(lambda: step(model))
    for unit in ("blocks.0", "blocks.1", "head"):
        assert ranges[f"fsdp2::reduce ({unit})"] == 1
        gathers = ranges[f"fsdp2::all_gather ({unit})"]
        assert gathers == ranges[f"fsdp2::wait ({unit})"] >= 1
    assert ranges["fsdp2::reduce (root)"] == ranges["fsdp2::all_gather (root)"] == 1
    assert {name.split(" ")[0] for name in ranges} == {
        "fsdp2::all_gather",
        "fsdp2::wait",
        "fsdp2::reduce",
    }


def test_after_the_profiler_nothing_is_left() -> None:
    model = build()
    for _ in range(2):
        step(model)
    before = called(lambda: step(model))
    ranges_of(lambda: step(model))
    model(TOKENS)  # notices that the profiler is gone
    model.reset_iter_state()
    step(model)
    assert kinds(model) == {ParamGroup}
    assert called(lambda: step(model)) == before


def test_a_profiler_that_starts_between_forward_and_backward() -> None:
    model = build()
    step(model)
    loss = model(TOKENS).sum()
    ranges = ranges_of(loss.backward)
    assert ranges["fsdp2::reduce (blocks.0)"] == 1


def test_groups_that_are_added_while_a_profiler_is_active() -> None:
    model = build()
    step(model)

    def run() -> None:
        step(model)
        model.adapter = nn.Linear(4, 4)
        model.shard_new_parameters()
        step(model)

    ranges = ranges_of(run)
    assert ranges["fsdp2::all_gather (root)"] == 2
    assert ranges["fsdp2::all_gather (root (new))"] == 1


def test_groups_whose_root_grows_when_the_profiler_is_gone() -> None:
    """Another scheduler serves them then, which has seen no profiler."""
    model = build()
    step(model)
    with profile(activities=[ProfilerActivity.CPU]):
        step(model)
    groups = [group for hooks in records_below(model) for group in hooks.unit.groups]
    assert all(list(observers_of(group)) == [PROFILER] for group in groups)
    model.adapter = fully_shard(nn.Linear(4, 4), mesh=null_mesh(4))
    step(model)
    assert kinds(model) == {ParamGroup}


# ---- logging


def messages(caplog: pytest.LogCaptureFixture, name: str, run: Callable[[], Any]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="fsdp2"):
        run()
    return [record.getMessage() for record in caplog.records if record.name == name]


def test_binds_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    first = messages(caplog, "fsdp2.bind", lambda: step(model))
    assert sorted(first) == [
        f"'{unit}' binds: first use" for unit in ("(root)", "blocks.0", "blocks.1", "head")
    ]
    assert messages(caplog, "fsdp2.bind", lambda: step(model)) == []
    model.head.to(torch.float64)
    model.also = lambda model, x: x.double()
    (changed,) = messages(caplog, "fsdp2.bind", lambda: step(model))
    assert changed == (
        "'head' binds: 'head.weight' and 1 more changed from torch.float32 to torch.float64; "
        "'head.weight' and 1 more got other memory"
    )
    model.load_state_dict(model.state_dict())
    assert "'head' binds: parameters may have changed" in messages(
        caplog, "fsdp2.bind", lambda: step(model)
    )
    model.blocks[0].weight.requires_grad_(False)
    assert messages(caplog, "fsdp2.bind", lambda: step(model)) == [
        "'blocks.0' binds its reductions: others take gradients now"
    ]
    model.blocks[0].set_custom_all_gather(Gather())
    assert messages(caplog, "fsdp2.bind", lambda: step(model)) == [
        "'blocks.0' binds: another way to gather was chosen"
    ]


class Gather(fsdp2.AllGather):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


def test_what_is_given_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    step(model)
    model.also = lambda model, x: None  # the head, gathered ahead, is not called
    (unused,) = messages(caplog, "fsdp2.schedule", lambda: model(TOKENS))
    assert unused == "gathered ahead and not used, so it is freed: Unit('head', idle)"
    model.also = lambda model, x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(TOKENS)
    (reset,) = messages(caplog, "fsdp2.schedule", model.reset_iter_state)
    assert reset.startswith("an iteration was given up, everything is freed: [Unit('(root)'")


# ---- sharded parameters among plain tensors


def outside(model: Any, call: Callable[[Any, torch.Tensor], Any]) -> str:
    model.also = call
    with raises("used-outside") as error:
        model(TOKENS)
    model.also = lambda model, x: x
    model.reset_iter_state()
    return str(error.value)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _last(blocks: Any, index: int, x: torch.Tensor) -> torch.Tensor:
    return x @ blocks[index].weight


OUTSIDE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "by the line": (lambda model, x: x @ model.blocks[1].weight, "blocks.1.weight' was"),
    "of the head": (lambda model, x: F.embedding(TOKENS, model.head.weight), "head.weight' was"),
    "given to a helper": (
        lambda model, x: _product(x, model.blocks[1].weight),
        "blocks.1.weight' was",
    ),
    "all, where the code does not tell": (
        lambda model, x: _last(model.blocks, 3, x),
        "blocks.0.weight' or 'blocks.1.weight' or 'blocks.2.weight' or others was",
    ),
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_the_parameter_is_named(how: str) -> None:
    call, named = OUTSIDE[how]
    text = outside(build(5), call)
    assert text.startswith(f"parameter '{named} used outside the forward of its unit '")
    if how == "by the line":
        assert "unit 'blocks.1', where it is sharded; " in text
        assert "aten.mm.default got mixed torch.Tensor and DTensor" in text


GUIDE = Path(fsdp2.__file__).parents[1] / "docs" / "guides" / "debugging.md"

Call = Callable[[torch.Tensor, torch.Tensor], object]

TORCHS: dict[str, Call] = {
    "`aten._foreach_copy_.default got mixed torch.Tensor and DTensor`": (
        lambda param, plain: torch._foreach_copy_([param], [plain])
    ),
    "`aten.copy_.default got mixed torch.Tensor and DTensor`": (  # `resize_token_embeddings`
        lambda param, plain: plain[:3].copy_(param.data[:3])
    ),
    "`AssertionError` without a text": lambda param, _: torch.zeros(()).add_(param.data.sum()),
    "`.numpy() is not supported for tensor subclasses`": lambda param, _: param.detach().numpy(),
}


@pytest.mark.parametrize("words", TORCHS)
def test_messages_of_torch_that_the_guide_explains(words: str) -> None:
    """No hook of ours is around these operators; inside `gathered`, they work."""
    assert words in GUIDE.read_text(encoding="utf-8")
    model, call = build(), TORCHS[words]
    with torch.no_grad(), pytest.raises((RuntimeError, AssertionError)) as caught:
        call(model.head.weight, torch.zeros(8, 4))
    said = str(caught.value).replace(": got", " got")  # the colon is 2.11's
    assert words.strip("`") in (said or "AssertionError` without a text")
    with torch.no_grad(), fsdp2.gathered(model):
        call(model.head.weight, torch.zeros(8, 4))


def test_what_is_said_once_stays_as_it_is() -> None:
    """The exception leaves the forwards of two units and of the root."""
    inner, outer = build(), nn.Sequential()
    outer.append(inner)
    model: Any = fully_shard(nn.Sequential(fully_shard(outer)))
    inner.also = lambda model, x: x @ model.blocks[1].weight
    with raises("used-outside") as error:
        model(TOKENS)
    assert str(error.value).count("(torch: ") == 1


@pytest.mark.parametrize("when", ["at once", "after a step", "after an evaluation"])
@pytest.mark.parametrize("call", ["embed", "forward"])
def test_a_module_of_the_roots_unit_called_on_its_own(call: str, when: str) -> None:
    """While a forward of the root runs, such a module has no hook."""
    model, hooks = build(), []
    model.embed.register_forward_pre_hook(
        lambda module, _: hooks.append(len(module._forward_hooks))
    )
    if when == "after a step":
        step(model)
    elif when == "after an evaluation":
        with torch.no_grad():
            model(TOKENS)
    assert not any(hooks)
    with raises("used-outside") as error, torch.no_grad():
        getattr(model, call)(TOKENS)
    assert str(error.value).startswith("parameter 'embed.weight' was used")
    step(model)
    assert not hooks[-1]


def test_methods_that_were_registered() -> None:
    model = build()
    fsdp2.register_fsdp_forward_method(model, "encode")
    with raises("used-outside") as error:
        model.encode(TOKENS)
    assert str(error.value).startswith("parameter 'blocks.1.weight' was used")


def test_the_ways_out() -> None:
    reader: Any = Reader()
    fully_shard(reader.head)
    fully_shard(reader)
    with raises("used-outside"):
        reader(TOKENS)
    reader.reset_iter_state()
    reader.head.unshard()
    reader(TOKENS).sum().backward()
    reader.head.reshard()
    assert isinstance(reader.head.weight.grad, DTensor)
    model: Any = fully_shard(Model())  # its head is a unit no longer, but in the root's
    model.also = lambda model, x: x + F.linear(x, model.head.weight)[:, :4]
    step(model)


def test_what_a_unit_keeps_of_its_parameters() -> None:
    model: Any = ReadsKept(4)
    for part in model.children():
        fully_shard(part)
    fully_shard(model)
    x = torch.randn(2, 4)
    with raises("used-freed") as error:
        model(x)
    assert str(error.value).startswith("parameter 'keeper.weight', or a view of it, was read")
    model.keeper.keep = torch.clone
    model(x).sum().backward()
    assert isinstance(model.keeper.weight.grad, DTensor)
    model.keeper.keep = torch.t
    model.keeper.set_reshard_after_forward(False)
    model.zero_grad()
    model(x).sum().backward()
    assert isinstance(model.keeper.weight.grad, DTensor)


@pytest.mark.parametrize(
    "message",
    [
        "another error",
        "got mixed torch.Tensor and DTensor",
        "The tensor has a non-zero number of elements, but its data is not allocated yet.",
    ],
)
def test_other_exceptions_stay_as_they_are(message: str) -> None:
    def fail(model: Any, x: torch.Tensor) -> None:
        raise RuntimeError(message)

    model = build()
    model.also = fail
    with pytest.raises(RuntimeError) as error:
        model(TOKENS)
    assert error.value.args == (message,)


def test_a_forward_that_returns_nothing_while_an_exception_is_handled() -> None:
    """The exception is none of its own, though it came through the same module."""
    model = build()
    model.also = lambda model, x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(TOKENS)
    try:
        model(TOKENS)
    except ZeroDivisionError as error:
        model.also = lambda model, x: None
        assert model(TOKENS) is None
        kept = error.args
    assert kept == ("division by zero",)
    assert record_of(model).scheduler.iteration.forward_root is None  # type: ignore[union-attr]  # it has ended


@pytest.mark.parametrize("where", ["root", "block"])
def test_a_users_hook_that_raises_before_ours(where: str) -> None:
    """torch then calls ours with the output; the unit ends as if its forward had."""
    plain = Model()
    target = plain if where == "root" else plain.blocks[0]
    handle = target.register_forward_hook(lambda *_: 1 / 0)
    model: Any = plain
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
    handle.remove()
    step(model)
    counts, _ = called(lambda: step(model))
    assert counts["fsdp2.core.schedule.group.start_unshard"] == 3 + 2
    for unit in record_of(model).scheduler.units:  # type: ignore[union-attr]  # it ran
        assert unit.phase is Phase.IDLE
        assert not unit.is_gathered
        assert not unit.visits
