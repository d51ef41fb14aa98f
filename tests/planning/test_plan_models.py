"""What models do besides arithmetic, on paper: constants that they ask for, devices, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp2
from fsdp2.planning import Plan
from fsdp2.tracing.record.notes import Operation
from tests.common.errors import raises

pytestmark = pytest.mark.alone

DIM = 8


class Module(nn.Module):
    """Calls a function behind its layer."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return self.run(y)


def planned(run: Callable[[Tensor], Tensor], hardware: str = "h100") -> Plan:
    def make() -> nn.Module:
        return nn.Sequential(Module(run), Module(run))

    return fsdp2.plan(make, lambda: torch.zeros(4, DIM), units={Module}, mesh=4, hardware=hardware)


# ---- what follows from constants


def _positions_are_in_a_row(y: Tensor) -> Tensor:
    positions = torch.arange(4, device=y.device).unsqueeze(0)
    assert bool((positions.diff() == 1).all())
    return y


def _reads_numbers(y: Tensor) -> Tensor:
    rates = torch.linspace(0, 0.5, 3, device=y.device).tolist()
    assert rates == [0, 0.25, 0.5]
    return y * rates[1]


def _counts(y: Tensor) -> Tensor:
    mask = torch.ones(4, dtype=torch.bool, device=y.device)
    mask[1] = False
    assert mask.nonzero().shape == (3, 1)
    return y[: int(mask.sum())]


def _to_the_cpu(y: Tensor) -> Tensor:
    lengths = torch.tensor([1, 2, 1], device=y.device).cpu()
    assert not lengths.is_meta
    return torch.cat([part * 2 for part in y.split(lengths.tolist())])


def _repeats(y: Tensor) -> Tensor:
    times = torch.tensor([1, 3], device=y.device)
    ends = times.cumsum(0)
    assert int(ends[-1]) == 4
    return torch.arange(2, device=y.device).repeat_interleave(times).unsqueeze(1) + y


def _names_a_gpu(y: Tensor) -> Tensor:
    assert y.to("cuda").is_meta
    assert y.cuda().is_meta
    return y + torch.ones(DIM, device="cuda:0") + torch.ones(DIM, device=torch.device("cuda", 1))


@pytest.mark.parametrize(
    "run",
    [_positions_are_in_a_row, _reads_numbers, _counts, _to_the_cpu, _repeats, _names_a_gpu],
)
@pytest.mark.parametrize("hardware", ["h100", "epyc-2core"])
def test_what_follows_from_constants_may_be_asked_for(
    run: Callable[[Tensor], Tensor], hardware: str
) -> None:
    made = planned(run, hardware)
    assert made.rehearsal.units == ("(root)", "0", "1")


def test_a_model_may_ask_for_constants_where_it_is_made() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = torch.linspace(0, 0.1, 4).tolist()
            self.scale = float(torch.ones(3).sum())
            self.layer = nn.Linear(DIM, DIM)
            self.register_buffer("mask", torch.tensor([1, 0]).repeat(4))

        def forward(self, x: Tensor) -> Tensor:
            mask: Any = self.mask
            assert int(mask.sum()) == 4
            y: Tensor = self.layer(x)
            return y * mask * self.scale * self.rates[3]

    for model in (Deep, Deep()):  # made on paper, and a real one's buffers
        made = fsdp2.plan(model, lambda: torch.zeros(4, DIM), mesh=4)
        assert made.flops > 0


def test_a_constant_of_the_cpu_is_one_of_the_device_there() -> None:
    made = planned(lambda y: y + torch.ones(DIM, device="cpu"), "epyc-2core")
    assert made.flops > 0
    taken = planned(lambda y: y[torch.tensor([0, 1], device="cpu")])  # a GPU takes such indices
    assert taken.flops > 0


def test_devices_are_named_in_forwards_that_run_again() -> None:
    made = planned(_names_a_gpu).with_(checkpointing=True)
    assert made.settings.checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_expert_are_planned_in_all_dtypes(dtype: torch.dtype) -> None:
    """Each token meets one of 4 experts, in both directions; no layer's products are in them."""
    experts, tokens = 4, 16

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(experts, DIM, 16, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.full((experts,), tokens // experts, device=x.device).cumsum(0)
            y = F.grouped_mm(x, self.weight, offs=ends.to(torch.int32))
            assert y.shape == (tokens, 16)
            return y

    made = fsdp2.plan(
        lambda: nn.Sequential(Grouped()),
        lambda: torch.zeros(tokens, DIM, dtype=dtype, requires_grad=True),
        mesh=2,
    )
    operations: list[Operation] = list(made.rehearsal.recording.operations)
    found = [n.flops for n in operations if n.name == "_grouped_mm"]
    assert found == [2 * tokens * DIM * 16] * 3


def test_plans_do_not_depend_on_plans_before_them() -> None:
    """Constants that an earlier model shares, until it is collected, are counted all the same."""
    first, second = planned(F.relu), planned(F.relu)
    assert first.memory.peak.live == second.memory.peak.live
    assert first.memory.before.categories == second.memory.before.categories


# ---- what is refused, with the module and the line


def _line(text: str) -> str:
    """`this file:line` of the first line that contains it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def _branches(y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def _mixes(y: Tensor) -> Tensor:
    return torch.ones(DIM, device="cpu") * y


def _autocasts(y: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return y @ y.T


def _attends(y: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    flexible: Tensor = flex_attention(*y.view(3, 1, 1, -1, DIM))  # type: ignore[arg-type,assignment]  # three
    return flexible


def _asks_cuda(y: Tensor) -> Tensor:
    return y * torch.cuda.current_device()


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "plan-values": (_branches, "return y if y.sum() > 0"),
    "plan-memory": (_mixes, "return torch.ones(DIM, device="),
    "plan-autocast": (_autocasts, 'with torch.autocast("cuda"'),
    "plan-cuda": (_asks_cuda, "return y * torch.cuda"),
}
"""What a module does, and where that is written."""


@pytest.mark.parametrize("entry", REFUSED)
def test_a_refusal_names_the_module_and_the_line(entry: str) -> None:
    if entry == "plan-cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run, text = REFUSED[entry]
    with raises(entry) as found:
        planned(run)
    assert re.match(rf"module '[01]' \({re.escape(_line(text))}\) ", str(found.value))


def test_flex_attention_is_refused() -> None:
    with raises("plan-flex-attention"):
        fsdp2.plan(Module(_attends), lambda: torch.zeros(6, DIM), mesh=2)


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_autocast_that_is_off_is_planned(device: str | None) -> None:
    """By the name of a device, or of the device of what is computed, as rotary embeddings do."""

    def run(y: Tensor) -> Tensor:
        name = device or y.device.type
        assert not torch.is_autocast_enabled(name)
        assert torch.get_autocast_dtype(name).itemsize == 2
        with torch.autocast(device_type=name, enabled=False):
            return y * 2

    assert planned(run).flops > 0


def test_autocast_that_is_on_is_refused() -> None:
    outer = torch.autocast("cpu", torch.bfloat16)
    with raises("plan-autocast"):
        planned(lambda y: _inside(outer, y))
    with torch.autocast("cpu", torch.bfloat16):  # as it was
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def _inside(context: Any, y: Tensor) -> Tensor:
    with context:
        return y * 2


def test_what_is_in_no_module_is_named_too() -> None:
    def asks() -> nn.Module:
        return nn.Linear(DIM, int(torch.rand(3).sum()))

    with raises("plan-values") as found:
        fsdp2.plan(asks, lambda: torch.zeros(4, DIM), mesh=2)
    assert str(found.value).startswith(f"make_model ({_line('int(torch.rand(3)')})")
    with raises("plan-values") as found:
        fsdp2.plan(
            *(lambda: nn.Linear(DIM, DIM), lambda: torch.zeros(4, DIM)),
            loss=lambda model, batch: model(batch).mean() * model(batch).mean().item(),
        )
    assert str(found.value).startswith("loss (")


def test_an_optimizer_is_one() -> None:
    make: Any = lambda params: [torch.optim.AdamW(params)]  # noqa: E731  # it is what users pass
    with raises("plan-optimizer"):
        fsdp2.plan(nn.Linear(DIM, DIM), lambda: torch.zeros(4, DIM), optimizer=make)


def test_what_a_run_would_raise_too_is_raised_as_it_is() -> None:
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        fsdp2.plan(nn.Linear(DIM, DIM), lambda: None)
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        fsdp2.plan(nn.Linear(DIM, DIM), lambda: torch.zeros(4, DIM + 1))
