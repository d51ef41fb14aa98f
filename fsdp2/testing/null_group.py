"""The process group whose collectives do nothing, and observers that measure with it.

It lives in `fsdp2.paper.null_group`, as plans use it too; tests and benchmarks find it here.
"""

from __future__ import annotations

from fsdp2.paper.null_group import (
    BACKEND,
    Call,
    CallLog,
    NullGroup,
    NullWork,
    Observer,
    PythonGroup,
    c10d_cost,
    fill_gathered,
    init_null_group,
    null_mesh,
    null_world,
)

__all__ = [
    "BACKEND",
    "Call",
    "CallLog",
    "NullGroup",
    "NullWork",
    "Observer",
    "PythonGroup",
    "c10d_cost",
    "fill_gathered",
    "init_null_group",
    "null_mesh",
    "null_world",
]
