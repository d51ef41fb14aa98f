"""Memory of what is sent in fewer bytes, or kept, is used in order: random models on paper."""

from __future__ import annotations

import pytest

from fsdp2.core.config import Wire
from fsdp2.core.gather import coded, segments
from tests.common import scenarios

pytestmark = pytest.mark.alone

FED = Wire(reduce="int4", rotate=True, feedback=True)
GATHERS = ("steady", "changing", "offloaded")
REDUCTIONS = ("steady", "accumulation", "replicated", "changing")

CASES = [
    (segments.ROWS, Wire(differences=True), (*GATHERS, "stepping")),  # all are sent as they are
    (coded.MESSAGES, Wire(gather="int8"), GATHERS),
    (
        coded.DIFFERENCES,
        Wire(gather="int4", differences=True),
        (*GATHERS, "stepping", "stepping_between"),
    ),
    *(("coded gradients", Wire(reduce=name), REDUCTIONS) for name in ("bf16", "int8", "int4")),
    *((buffer, FED, (*REDUCTIONS, "partial")) for buffer in ("coded gradients", "residuals")),
]


@pytest.mark.parametrize(
    ("buffer", "wire", "scenario"),
    [
        pytest.param(buffer, wire, scenario, id=f"{buffer} {wire.gather} {wire.reduce} {scenario}")
        for buffer, wire, chosen in CASES
        for scenario in chosen
    ],
)
def test_it_is_used_in_order(
    buffer: str, wire: Wire, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scenarios.staged_in_order(scenario, buffer, monkeypatch, wire=wire)
