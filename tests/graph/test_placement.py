"""Where graphs launch and wait, what graph mode refuses, and what it leaves behind."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch.func import functional_call

import fsdp2
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.graph import placement
from fsdp2.graph.operators import Exchange
from fsdp2.testing.null_group import CallLog, null_world
from tests.common import compiling, models
from tests.common.errors import raises

pytestmark = pytest.mark.alone

LAUNCHES = {
    torch.ops.fsdp2.all_gather.default: "unshard",
    torch.ops.fsdp2.reduce_scatter.default: "reduce",
}
WAIT = torch.ops.fsdp2.wait.default
EAGERLY: dict[str, Any] = {"options": {"compiler": "aot_eager"}}


@pytest.fixture(autouse=True)
def calls() -> Iterator[CallLog]:
    log = CallLog()
    with null_world(4, observer=log):
        yield log


def _sharded(blocks: int = 3, **arguments: Any) -> Any:
    model = models.seeded(lambda: compiling.Stack(blocks))
    for block in model.blocks:
        fsdp2.fully_shard(block, **arguments)
    return fsdp2.fully_shard(model)


def _graphs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of the forward and the backward: collectives by unit, and where something is computed."""
    found: list[list[str]] = []
    place: Callable[[fx.Graph], None] = placement.place

    def note(graph: fx.Graph) -> None:
        place(graph)
        _assert_chained(graph)
        steps: list[str] = []
        launched: dict[str, str] = {}
        for node in graph.nodes:
            name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
            if node.target in LAUNCHES:
                if node.args[0]:
                    steps.append(f"end {launched[str(node.args[0])]}")
                unit = node.args[4].partition("#")[0].removeprefix("blocks.")
                launched[str(node.args[2])] = f"{LAUNCHES[node.target]} {unit}"
                steps.append(f"start {LAUNCHES[node.target]} {unit}")
            elif node.target is WAIT:
                steps.append(f"end {launched[str(node.args[0])]}")
            elif name.endswith("mm") and steps[-1:] != ["compute"]:
                steps.append("compute")
        found.append(steps)

    monkeypatch.setattr(placement, "place", note)
    fsdp2.graph_mode(model, compile=EAGERLY)
    with compiling.fresh_dynamo():
        model(torch.randn(2, models.DIM)).sum().backward()
    return found


def _assert_chained(graph: fx.Graph) -> None:
    """Each collective reads what the one before it writes, so that compilers keep the order; what
    waits reads what the collective reads, so that they keep its memory."""
    before: Any = None
    read: dict[str, object] = {}
    for node in graph.nodes:
        if node.target in LAUNCHES or node.target is WAIT:
            assert node.args[-1] is before
            ended, held = node.args[:2]
            assert held == (read.pop(str(ended)) if ended else [])
            if node.target in LAUNCHES:
                ended, read[str(node.args[2])] = node.args[2:4]
            before = ended[0]
    assert not read


FORWARD = """
start unshard (root)
end unshard (root)
start unshard 0
end unshard 0
start unshard 1
end unshard 1
start unshard 2
end unshard 2
"""

BACKWARD = """
start unshard 2
end unshard 2
start unshard 1
start reduce 2
end unshard 1
start unshard 0
end reduce 2
start reduce 1
end unshard 0
end reduce 1
start reduce 0
end reduce 0
start reduce (root)
end reduce (root)
"""


def _collectives(steps: list[str]) -> list[str]:
    return [step for step in steps if step != "compute"]


def _behind_compute(steps: list[str]) -> list[str]:
    """Collectives that run while something is computed."""
    starts = {s.removeprefix("start "): at for at, s in enumerate(steps) if s.startswith("start")}
    ends = {s.removeprefix("end "): at for at, s in enumerate(steps) if s.startswith("end")}
    return [name for name in starts if "compute" in steps[starts[name] : ends[name]]]


def test_collectives_are_placed_as_the_engine_places_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather ahead of each unit's compute; a reduction waited for one unit later.

    So at most two units besides the root, which stays, are gathered.
    """
    forward, backward = _graphs(_sharded(), monkeypatch)
    assert _collectives(forward) == FORWARD.split("\n")[1:-1]
    assert _collectives(backward) == BACKWARD.split("\n")[1:-1]
    assert _behind_compute(forward) == ["unshard 0", "unshard 1", "unshard 2"]
    hidden = ["unshard 2", "unshard 1", "reduce 2", "unshard 0", "reduce 1", "reduce 0"]
    assert _behind_compute(backward) == hidden


@pytest.mark.parametrize("pack_below", [0, 1 << 40], ids=["coalesced", "packed"])
def test_at_most_two_blocks_are_gathered(monkeypatch: pytest.MonkeyPatch, pack_below: int) -> None:
    """Besides the root: outputs of all-gathers that are alive when one is launched."""
    alive: set[int] = set()
    peaks: list[int] = []
    launch = Exchange.all_gather

    def note(self: Exchange, sent: list[Tensor], outputs: list[Tensor]) -> None:
        launch(self, sent, outputs)
        if "root" not in self.key:
            number = next(numbers)
            alive.add(number)
            weakref.finalize(outputs[0].untyped_storage(), alive.discard, number)
            peaks.append(len(alive))

    numbers = itertools.count()
    model = _sharded(4)
    model.set_tuning(pack_below=pack_below)
    fsdp2.graph_mode(model, compile=EAGERLY)
    with compiling.fresh_dynamo():
        for _ in range(2):
            monkeypatch.setattr(Exchange, "all_gather", note)
            model(torch.randn(2, models.DIM)).sum().backward()
    assert max(peaks) == 2
    assert len(peaks) == 2 * 2 * 4
    assert not alive


@pytest.mark.extended
def test_memory_that_a_running_collective_reads_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor gives a buffer to the next value as soon as nothing in the graph reads it."""
    from torch._inductor.codegen.wrapper import AllocateLine

    class Running:
        def __init__(self, unit: str, kind: object, written: Any, read: Any) -> None:
            for tensor in written:
                tensor.uniform_()
            self._read = [(tensor, tensor.clone()) for tensor in read]

        def wait(self) -> None:
            for now, launched in self._read:
                assert torch.equal(now, launched)
            waited.append(len(self._read))

    waited: list[int] = []
    monkeypatch.setattr(GroupCollectives, "launch_behind", lambda _, *given: Running(*given))
    monkeypatch.setattr(AllocateLine, "should_reuse_buffer", lambda *_: True)
    for dtype in (torch.float32, torch.bfloat16):
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
        model = _sharded(mp_policy=policy)
        model.set_tuning(pack_below=0)
        fsdp2.graph_mode(model, compile=True)
        waited.clear()
        with compiling.fresh_dynamo(), torch._inductor.config.patch(fx_graph_cache=False):
            model(torch.randn(2, models.DIM)).sum().backward()
        assert len(waited) == 4 + 3 + 4


@pytest.mark.parametrize("pack_below", [0, 1 << 40], ids=["coalesced", "packed"])
def test_collectives_are_as_many_and_as_large_as_with_hooks(
    calls: CallLog, pack_below: int
) -> None:
    """Of a steady step, whoever runs it. Reduced from where they are, hooks also send marks."""
    found = []
    for mode in ("hooks", "eager", "compiled"):
        model = _sharded()
        model.set_tuning(pack_below=pack_below)
        if mode != "hooks":
            fsdp2.graph_mode(model, compile=EAGERLY if mode == "compiled" else False)
        with compiling.fresh_dynamo():
            for _ in range(2):
                calls.clear()
                model(torch.randn(2, models.DIM)).sum().backward()
        sized = [(call.name, call.nbytes if pack_below else 0) for call in calls]
        found.append(sorted(sized))
    assert found[0] == found[1] == found[2]
    assert any("coalesced" in name for name, _ in found[0]) is not bool(pack_below)


def test_what_stays_gathered_is_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _graphs(_sharded(reshard_after_forward=False), monkeypatch)
    assert _collectives(forward) == FORWARD.split("\n")[1:-1]
    assert not [step for step in backward if "unshard" in step]


def test_eager_backward_gathers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit but the root, once; and nothing of it is left afterwards."""
    model = _sharded()
    fsdp2.graph_mode(model)
    seen: list[str] = []
    launch = Exchange.all_gather

    def note(self: Exchange, *given: list[Tensor]) -> None:
        seen.append(self.unit.title)
        launch(self, *given)

    monkeypatch.setattr(Exchange, "all_gather", note)
    blocks = [f"blocks.{i}" for i in range(3)]
    for _ in range(2):
        model(torch.randn(2, models.DIM)).sum().backward()
        assert seen == ["(root)", *blocks, *reversed(blocks)]
        seen.clear()


def test_the_mode_changes_at_any_step() -> None:
    """Hooks, graph mode, hooks: one optimizer, and the same objects."""
    model = _sharded()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.1)
    for enabled in (False, True, False, True):
        fsdp2.graph_mode(model, enabled)
        model(torch.randn(2, models.DIM)).sum().backward()
        assert all(param.grad is not None for param in params)
        optimizer.step()
        optimizer.zero_grad()
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    for forward in (None, lambda x: x):
        if forward is not None:
            model.forward = forward  # somebody's, which comes back
            fsdp2.graph_mode(model)
        assert "forward" in vars(model)
        fsdp2.graph_mode(model, enabled=False)
        assert vars(model).get("forward") is forward


def test_other_dtypes_after_the_call() -> None:
    """Eagerly they are followed; a graph would have the former ones."""
    model = _sharded()
    fsdp2.graph_mode(model)
    model.to(torch.float64)
    run = torch.compile(model, fullgraph=True, backend="fsdp2", **EAGERLY)
    said = re.escape("graph-mode-dtype")  # in dynamo's error
    with compiling.fresh_dynamo(), pytest.raises(TorchRuntimeError, match=said):
        run(torch.randn(2, models.DIM, dtype=torch.float64))
    for _ in range(2):
        output = model(torch.randn(2, models.DIM, dtype=torch.float64))
        assert output.dtype is torch.float64
    output.sum().backward()
    assert all(param.grad.dtype is torch.float64 for param in model.parameters())


def test_groups_enter_a_graph_in_place_of_parameters() -> None:
    """As a row and a handle each: torch guards and saves no single parameter."""
    given: list[int] = []

    def note(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(len(inputs))
        return placement.compile_graphs(graph, inputs, **EAGERLY)

    model = _sharded(blocks=3)
    fsdp2.graph_mode(model, compile={"backend": note})
    with compiling.fresh_dynamo():
        model(torch.randn(2, models.DIM))
    assert given == [1 + 2 * (3 + 1)]


def test_changes_compile_anew() -> None:
    """Of the layout, of dtypes, and of what trains: once each. The root's forward is compiled."""
    model = _sharded(2)
    fsdp2.graph_mode(model, compile=EAGERLY)

    def step(dtype: torch.dtype = torch.float32) -> int:
        counters.clear()
        model(torch.randn(2, models.DIM, dtype=dtype)).sum().backward()
        return counters["stats"]["unique_graphs"]

    with compiling.fresh_dynamo():
        assert [step(), step()] == [1, 0]
        model.set_tuning(pack_below=0)
        assert [step(), step()] == [1, 0]
        model.blocks[0].requires_grad_(False)
        assert [step(), step()] == [1, 0]
        model.blocks[1].requires_grad_(False)
        model.to(torch.float64)
        assert [step(torch.float64), step(torch.float64)] == [1, 0]
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float64}


def test_a_graph_of_another_layout_is_not_used() -> None:
    """Keys, which torch's caches on disk know, hold what operators return; a change is noticed."""
    model = _sharded(2)
    fsdp2.graph_mode(model)
    inputs = torch.randn(2, models.DIM)
    run = torch.compile(model, fullgraph=True, backend="fsdp2", **EAGERLY)
    with compiling.fresh_dynamo():
        run(inputs).sum().backward()
        model.set_tuning(pack_below=0)
        with raises("graph-mode-changed"):
            run(inputs)
        fsdp2.graph_mode(model)
        run(inputs).sum().backward()
    policies = [{}, {"mp_policy": fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}]
    digests = []
    for policy in [*policies, *policies]:
        other = _sharded(**policy)
        fsdp2.graph_mode(other)
        hook = next(iter(other.blocks[0]._forward_pre_hooks.values()))
        digests.append(hook.__self__._exchanges[0].key.partition(" ")[2])
    assert digests[0] == digests[2] != digests[1] == digests[3]


def test_a_failed_forward_leaves_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded()
    fsdp2.graph_mode(model)
    params = list(model.parameters())

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1], "run", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            model(torch.randn(2, models.DIM))
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    model(torch.randn(2, models.DIM)).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("compile", [False, EAGERLY], ids=["eager", "compiled"])
def test_shards_written_before_backward_raise(compile: Any) -> None:
    """Before a gradient is set: backward has gathered other parameters than forward."""
    model = _sharded()
    fsdp2.graph_mode(model, compile=compile)
    with compiling.fresh_dynamo():
        loss = model(torch.randn(2, models.DIM)).sum()
        with torch.no_grad():
            model.blocks[2].up.weight.to_local().add_(1)
        with raises("graph-mode-written"):
            loss.backward()
        assert not compile or all(param.grad is None for param in model.parameters())


def test_a_compiled_forward_that_replaces_parameters_raises() -> None:
    """Its graph would gather the unit's own; eagerly it is what the unit computes with."""
    model = _sharded()
    block = model.blocks[1]
    given = {name: 2 * param.full_tensor() for name, param in block.named_parameters()}
    model.forward = lambda x: functional_call(block, given, x)
    inputs = torch.randn(2, models.DIM)
    fsdp2.graph_mode(model)
    model(inputs)
    fsdp2.graph_mode(model, compile=EAGERLY)
    with compiling.fresh_dynamo(), raises("graph-mode-replaced"):
        model(inputs)


def test_a_backward_behind_a_forward_with_other_values_raises() -> None:
    """It would gather what that forward gathered."""
    model = _sharded()
    fsdp2.graph_mode(model, compile=EAGERLY)
    with compiling.fresh_dynamo():
        loss = model(torch.randn(2, models.DIM)).sum()
        with torch.no_grad():
            model.blocks[2].up.weight.to_local().add_(1)
        model(torch.randn(2, models.DIM))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _tied_over_units() -> Any:
    model = models.seeded(lambda: compiling.Stack(2))
    model.blocks[1].up.weight = model.blocks[0].up.weight
    for block in model.blocks:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model)


def _that(change: Callable[[Any], object]) -> Any:
    model = _sharded()
    change(model)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: _sharded(reshard_after_forward=2),
        lambda: _that(lambda model: model.set_wire_format(gather="int8", exact_below=0)),
        lambda: _that(lambda model: model.set_requires_gradient_sync(False)),
        lambda: _that(lambda model: model.blocks[0].set_all_reduce_hook(lambda flat: None)),
        lambda: _that(lambda model: model(torch.randn(2, models.DIM))).blocks[0],
        _tied_over_units,
    ],
    ids=["smaller group", "format", "no sync", "hook", "a part", "tied over units"],
)
def test_refused(make: Callable[[], Any]) -> None:
    with raises("graph-mode-refuses"):
        fsdp2.graph_mode(make())


def test_no_communication_is_refused_in_backward() -> None:
    model = _sharded()
    fsdp2.graph_mode(model)
    model.set_requires_gradient_sync(False)
    loss = model(torch.randn(2, models.DIM)).sum()
    with raises("graph-mode-no-sync"):
        loss.backward()


def test_gradients_of_shards_ask_for_graph_mode() -> None:
    model = _sharded()
    loss = model(torch.randn(2, models.DIM)).sum()
    with raises("grad-of-shard"):
        torch.autograd.grad(loss, [*model.parameters()])
    model.reset_iter_state()


def test_a_graph_of_another_model_is_refused() -> None:
    with raises("graph-of-another-model"):
        torch.ops.fsdp2.unshard([torch.ones(2)], "gone#0", [0], False)


def test_an_unknown_compiler_is_refused() -> None:
    with raises("graph-mode-compiler"):
        placement.compile_graphs(
            fx.GraphModule(nn.Module(), fx.Graph()), [], options={"compiler": "x"}
        )
