"""Formats in which parameters and gradients are sent, by the name that ``--wire`` takes.

A name stands for arguments of `FSDPModule.set_wire_format`. The guide "Train over a slow network"
says what each sends, and what it costs in accuracy.
"""

from __future__ import annotations

from fsdp2.wrap import WireFormat

FORMATS: dict[str, WireFormat] = {
    "exact": {},
    "fp32-sums": {"reduce": "fp32"},
    "bf16-sums": {"reduce": "bf16"},
    "int8-sums": {"reduce": "int8"},
    "int8-weights": {"gather": "int8", "reduce": "bf16"},
    "int8": {"gather": "int8", "reduce": "int8"},
    "int8-differences": {"gather": "int8", "differences": True, "reduce": "int8"},
    "int4-weights": {"gather": "int4", "reduce": "int8"},
    "int4-differences": {"gather": "int4", "differences": True, "reduce": "int8"},
    "int4": {
        "gather": "int4",
        "differences": True,
        "reduce": "int4",
        "feedback": True,
        "rotate": True,
    },
    "int4-naive": {"gather": "int4", "reduce": "int4"},
}
