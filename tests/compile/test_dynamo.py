"""What ``torch.compile`` is kept out of, and that nothing is paid for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fsdp2
from fsdp2.core.modules import dynamo as marks
from fsdp2.core.modules.dynamo import see_through, uncompiled, uncompiled_methods
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.saved import SavingUnitHooks
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.testing.null_group import null_world

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _calls(function: Callable[[], Any]) -> int:
    """Python functions that a call of ``function`` enters, itself included."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_a_marked_function_is_the_same_function() -> None:
    def function() -> int:
        return 3

    code = function.__code__
    assert uncompiled(function) is function
    assert function.__code__ is code
    assert _calls(function) == 1
    assert _calls(torch.compiler.disable(lambda: 3)) > 1, "a wrapper would show in the count"


def test_every_hook_and_method_is_marked() -> None:
    own = (UnitHooks, SavingUnitHooks)
    for cls in (*own, fsdp2.FSDPModule, fsdp2.UnshardHandle):
        methods = {
            name: value
            for name, value in vars(cls).items()
            if isinstance(value, FunctionType) and not name.startswith("__")
        }
        assert methods
        for name, method in methods.items():
            assert getattr(method, "_torchdynamo_disable", False), f"{cls.__name__}.{name}"
            assert not hasattr(method, "__wrapped__"), f"{cls.__name__}.{name} is wrapped"


def test_what_autograd_calls_of_the_scheduler_is_marked() -> None:
    with null_world(2):
        fsdp2.fully_shard(torch.nn.Linear(4, 4))(torch.ones(2, 4))
    assert Scheduler.exit_backward._torchdynamo_disable  # type: ignore[attr-defined]  # by the mark


def test_special_methods_and_other_attributes_are_left_alone() -> None:
    class Marked:
        value = 3

        def __init__(self) -> None:
            self.calls = 0

        def method(self) -> int:
            return self.value

        @property
        def prop(self) -> int:
            return self.value

    uncompiled_methods(Marked)
    assert Marked.method._torchdynamo_disable
    assert not hasattr(Marked.__init__, "_torchdynamo_disable")
    assert (Marked().method(), Marked().prop) == (3, 3)


def test_nothing_below_a_marked_function_is_compiled() -> None:
    """Neither its own frame nor those that it calls, met by dynamo from compiled code."""

    def below(x: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return _double(x)

    @uncompiled
    def marked(x: torch.Tensor) -> torch.Tensor:
        return below(x)

    counter = CompileCounter()

    @torch.compile(backend=counter)
    def run(x: torch.Tensor) -> torch.Tensor:
        return marked(x.sin()).cos()

    x = torch.ones(3)
    assert torch.equal(run(x), (x.sin() * 2).cos())
    assert (counter.frame_count, counter.op_count) == (2, 2)  # sin before, cos behind


def test_fullgraph_names_the_reason() -> None:
    @uncompiled
    def marked(x: torch.Tensor) -> torch.Tensor:
        return x

    def run(x: torch.Tensor) -> torch.Tensor:
        return marked(x + 1)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="fsdp2 gathers, frees and reduces"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(3))


def test_what_a_transparent_wrapper_calls_is_compiled() -> None:
    counter = CompileCounter()

    @uncompiled
    def hook() -> None:
        pass

    def wrapper(x: torch.Tensor) -> torch.Tensor:
        hook()
        return _double(x)

    assert see_through(wrapper) is wrapper
    compiled = torch.compile(wrapper, backend=counter)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert (counter.frame_count, counter.op_count) == (1, 1)


def test_without_marks_in_torch_the_public_wrapper_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_skip", lambda function, recursive: False)

    def function(x: torch.Tensor) -> torch.Tensor:
        return _double(x)

    wrapped = uncompiled(function)
    assert wrapped is not function
    counter = CompileCounter()
    run = torch.compile(lambda x: wrapped(x.sin()).cos(), backend=counter)
    x = torch.ones(3)
    assert torch.equal(run(x), (x.sin() * 2).cos())
    assert (counter.frame_count, counter.op_count) == (2, 2)
