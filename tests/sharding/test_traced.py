"""What traces a sharded model: it says so, and the model is as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp2 import fully_shard
from fsdp2.core.progress import communication_error
from tests.common import models
from tests.common.errors import raises
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

TRACERS: dict[str, Callable[[Any, Tensor], object]] = {
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "jit.trace_module": lambda model, x: torch.jit.trace_module(model, {"forward": x}),
    "export": lambda model, x: torch.export.export(model, (x,), strict=False),
}


def _three() -> Any:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


@ranks(2)
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_traces_says_so(tracer: str) -> None:
    x = torch.ones(2, 4)
    for own in (True, False):  # whether the root has parameters
        plain, model = models.seeded(_three), models.seeded(_three)
        for layer in model[own:]:
            fully_shard(layer)
        fully_shard(model).eval()
        for _ in range(2):  # before the first forward, and after one
            with torch.no_grad(), raises("traced"):
                TRACERS[tracer](model, x)
            torch.testing.assert_close(model(x), plain(x))
        with raises("not-scriptable"):
            torch.jit.script(model)


@ranks(2)
def test_torchs_error_about_what_it_cannot_trace() -> None:
    """Explained where it leaves the forward, with its own class."""
    model = fully_shard(_three())
    with pytest.raises(Exception, match="cannot be traced by make_fx") as error:
        make_fx(model, tracing_mode="fake")(torch.ones(2, 4))
    assert getattr(error.value, "code", None) == "traced"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("text", "blames"),
    [
        ("Connection closed by peer [127.0.0.1]:5", True),
        ("Timed out waiting 30000ms for recv operation to complete", True),
        ("Invalid scalar type", False),
        ("NCCL error: unhandled cuda error, out of resources", False),
    ],
)
def test_another_rank_is_named_only_where_the_backend_says_so(text: str, blames: bool) -> None:
    with raises("collective-failed") as error:
        raise communication_error("all-gather", "blocks.0", RuntimeError(text))
    assert ("another rank" in str(error.value)) is blames
