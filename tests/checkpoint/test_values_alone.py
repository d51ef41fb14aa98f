"""Whatever `save` accepts `load` restores, with its type, dtype and value; or `save` refuses it."""

from __future__ import annotations

import collections
import enum
import io
import math
import pathlib
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import checkpoint
from fsdp2.checkpoint import state
from tests.checkpoint.shared import save_by
from tests.common.errors import raises

pytestmark = pytest.mark.alone

Named = collections.namedtuple("Named", "a b")  # as users write it


class Number(enum.IntEnum):
    one = 1


KEPT: list[Any] = [
    *(
        None,
        True,
        3,
        10**40,
        2.5,
        -0.0,
        math.inf,
        1 + 2j,
        "text",
        "\ud800",
        b"\x00x",
        bytearray(b"y"),
    ),
    *([], {}, (), [1, (2, [3])], {"a": {}}, {1: "one", "two": 2}, {(1, 2): 3}),
    *({1, 2}, frozenset({"x"}), range(1, 9, 2), slice(1, None), collections.deque([1, 2], 5)),
    *(collections.Counter({2: 1}), collections.OrderedDict(b=1, a=2)),
    collections.defaultdict(list, {1: [2]}),
    *(torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 3])),
    *(torch.strided, pathlib.Path("a/b")),
    *(np.float64(1.5), np.int8(-3), np.bool_(True), np.str_("é"), np.datetime64("2026-01-01")),
    *(
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.zeros((0, 2)),
        np.array(1.0),
        np.array(["ab"]),
    ),
    *(torch.ones(2, dtype=torch.bfloat16), torch.tensor(3), torch.zeros(0, 2), torch.ones(2) > 0),
    *((torch.ones(2), [torch.zeros(1)]), {"deep": ({"w": torch.ones(1)},)}, [torch.ones(1), {}]),
    [nn.Parameter(torch.ones(2), requires_grad=False)],
    *(random.Random(0).getstate(), np.random.default_rng(0).bit_generator.state),
    np.random.RandomState(0).get_state(),
]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        factories = [getattr(each, "default_factory", None) for each in (a, b)]
        return factories[0] is factories[1] and all(
            _same(k, m) and _same(v, w) for (k, v), (m, w) in pairs
        )
    if isinstance(a, (list, tuple, collections.deque)):
        lengths = [getattr(each, "maxlen", 0) for each in (a, b)]
        return lengths[0] == lengths[1] and all(map(_same, a, b)) and len(a) == len(b)
    return bool(a == b) and repr(a) == repr(b)


class Holds(nn.Module):
    """Has an extra state of any type."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_values_come_back_as_they_were(tmp_path: Path, number: int) -> None:
    """As `extra`, as the extra state of a module, in an optimizer's state and in its options."""
    value = KEPT[number]
    model = Holds(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["it"] = value
    optimizer.param_groups[0]["it"] = value
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=value, rank_extra={"own": value})
    other = Holds()
    fresh = torch.optim.SGD([{"params": other.parameters(), "it": None}], lr=3.0)
    found = checkpoint.load(tmp_path, other, fresh)
    assert _same(found.extra, value)
    assert _same(found.rank_extra, {"own": value})
    assert _same(checkpoint.read_extra(tmp_path, rank=0), {"own": value})
    assert checkpoint.read_extra(tmp_path, rank=1) is None
    assert _same(other.value, value)
    assert _same(fresh.state[other.weight]["it"], value)
    assert _same(fresh.param_groups[0]["it"], value)
    checkpoint.convert(tmp_path, tmp_path / "other", to_kind="steps", step=1)
    if "Parameter" not in repr(value):  # files of tensors alone
        again = Holds()
        assert _same(checkpoint.load(tmp_path / "other", again).extra, value)
        assert _same(again.value, value)


def test_a_stream_of_bytes(tmp_path: Path) -> None:
    """As TransformerEngine's modules have it."""
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    checkpoint.save(tmp_path, Holds(stream), step=1)
    other = Holds()
    checkpoint.load(tmp_path, other)
    assert (other.value.getvalue(), other.value.tell()) == (b"abc", 2)


@pytest.mark.parametrize(
    "value",
    [
        *(
            object(),
            Number.one,
            Named(1, 2),
            Number,
            math.sin,
            (1).__add__,
            type("Str", (str,), {})(),
        ),
        *(
            collections.defaultdict(lambda: 1),
            torch.Generator(),
            torch.channels_last,
            np.array([object()]),
        ),
        *(torch.ones(2).to_sparse(), torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)),
        np.zeros(1, dtype=[("a", "i4")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_load_would_restore_is_refused(tmp_path: Path, value: Any) -> None:
    """By name, wherever it is; nothing is written."""
    model = Holds()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with raises("ckpt-extra") as caught:
        checkpoint.save(tmp_path, model, step=1, extra={"a": [value]})
    assert "'a.0'" in str(caught.value)
    with raises("ckpt-extra"):
        checkpoint.save(tmp_path, model, step=1, rank_extra=value)
    with raises("ckpt-value"):
        checkpoint.save(tmp_path, Holds({"a": value}), step=1)
    if not isinstance(value, Tensor):
        optimizer.state[model.weight]["it"] = value
        with raises("ckpt-value") as caught:
            checkpoint.save(tmp_path, model, optimizer, step=1)
        assert "'optimizer.state.weight.it'" in str(caught.value)
    optimizer.state[model.weight] = {1: 2}
    with raises("ckpt-state-key"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("ckpt-layout", torch.tensor([0.0, 2.0]).to_sparse()),
        ("ckpt-layout", torch.eye(2).to_sparse_csr()),
        ("ckpt-layout", torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8)),
        ("ckpt-subclass", TwoTensor(torch.ones(2), torch.ones(2))),
    ],
    ids=["COO", "CSR", "quantized", "subclass"],
)
def test_tensors_that_no_load_would_restore_are_refused(
    tmp_path: Path, entry: str, value: Tensor
) -> None:
    """They would load into other elements, or other scales, without a word.

    A load has the parameter's rows for a state, and not the codes and scales of a subclass.
    """
    model = Holds()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["it"] = value
    with raises(entry) as caught:
        checkpoint.save(tmp_path, model, optimizer, step=1)
    assert "'optimizer.state.weight.it'" in str(caught.value)
    if entry == "ckpt-layout":
        with raises(entry):
            checkpoint.save(tmp_path, model, step=1, states={"ema": {"it": value}})
        model.register_buffer("it", value)
        with raises(entry):
            checkpoint.save(tmp_path, model, step=1)
    assert checkpoint.steps(tmp_path) == []


class Recoded(TwoTensor):
    """As torchao's NF4: ``clone`` decodes and encodes again, in blocks of another size."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Tensor:
        return Recoded(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.clone.default:
            return cls(args[0].a + 1, args[0].b + 1)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_codes_of_a_subclass_are_saved_as_they_are(tmp_path: Path, call: str) -> None:
    models = [nn.Module(), nn.Module()]
    for model, value in zip(models, (3.0, 0.0), strict=True):
        model.register_buffer("it", Recoded(torch.full((4, 2), value), torch.full((4, 2), value)))
    save_by(call, tmp_path, models[0], step=1)
    with torch.serialization.safe_globals([Recoded]):
        checkpoint.load(tmp_path, models[1])
    assert torch.equal(models[1].it.a, torch.full((4, 2), 3.0))
    assert torch.equal(models[1].it.b, torch.full((4, 2), 3.0))


def test_what_holds_itself_is_refused(tmp_path: Path) -> None:
    value: dict[str, Any] = {}
    value["self"] = [value]
    with raises("ckpt-extra"):
        checkpoint.save(tmp_path, Holds(), step=1, extra=value)


def test_a_class_of_an_older_step_changes_nothing(tmp_path: Path) -> None:
    """Versions before wrote objects of classes, as DCP does; the model is as it was."""
    model = Holds(Number.one)
    with mock.patch.object(state, "is_kept_by_dcp", return_value=True):
        checkpoint.save(tmp_path, model, step=1)
    other = Holds(7)
    other.weight.data.zero_()
    with raises("ckpt-value-code"):
        checkpoint.load(tmp_path, other)
    assert other.value == 7
    assert not other.weight.any()
    names = {"weight": "weight", "_extra_state": None}
    left = checkpoint.load(tmp_path, other, names=names.__getitem__, strict=False).left
    assert left.unexpected == ["model._extra_state"]
    assert other.weight.all()


def test_extra_states_of_older_steps(tmp_path: Path) -> None:
    """Of which DCP's items alone are there: strings as keys, but every value."""
    model = Holds({"seen": 2, "scale": torch.ones(2), "more": [{"a": (1, 2)}]})
    with mock.patch.object(state, "is_kept_by_dcp", return_value=True):
        checkpoint.save(tmp_path, model, step=1)
    other = Holds()
    assert not checkpoint.load(tmp_path, other).left
    assert _same(other.value, model.value)


def test_a_class_is_not_converted(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(1)}, "at": Shard(0)}, checkpoint_id=tmp_path / "dcp")
    with raises("ckpt-convert-value"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "run", to_kind="steps", step=1)


@pytest.mark.parametrize(
    "made",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
        lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=10),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
    ],
)
def test_schedulers_go_on(tmp_path: Path, made: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = made(optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=scheduler.state_dict())
    extra = checkpoint.load(tmp_path, model, optimizer).extra
    assert _same(extra, scheduler.state_dict())
    scheduler.load_state_dict(extra)
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


# ---- states of optimizers


class Master(torch.optim.Optimizer):
    """SGD with fp32 weights beside bf16 ones, a count, and a word."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().float()
                    state["count"] = torch.zeros((), dtype=torch.int64)
                    state["word"], state["range"] = "warm", (0, (1, 2))
                state["master"].sub_(param.grad.float(), alpha=group["lr"])
                state["count"] += 1
                param.copy_(state["master"])


class Asks(Master):
    """Has a ``load_state_dict`` of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Master, Asks])
def test_states_keep_their_dtypes(tmp_path: Path, kind: type[Master]) -> None:
    """And training goes on with the same bits."""

    def train(model: nn.Module, optimizer: Master, steps: int) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 3, generator=generator).bfloat16()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = nn.Linear(3, 2).bfloat16()
    optimizer = kind(model.parameters())
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, model, optimizer, step=3)
    other = nn.Linear(3, 2).bfloat16()
    fresh = kind(other.parameters())
    assert not checkpoint.load(tmp_path, other, fresh).left
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert _same(fresh.state[same][key], value), key
    train(model, optimizer, 3)
    train(other, fresh, 3)
    assert torch.equal(model.weight, other.weight)
