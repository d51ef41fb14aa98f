"""``FSDP2_DEBUG``: the checks that the environment requests of `fsdp2.debug`, read once."""

from __future__ import annotations

import functools
import os

from fsdp2.core.errors import coded

ENVIRONMENT = "FSDP2_DEBUG"


@functools.cache
def asks_for_ranks() -> bool:
    """Whether ranks are to agree on each step."""
    value = os.environ.get(ENVIRONMENT, "0")
    if value not in ("", "0", "1"):
        raise coded(
            ValueError,
            "debug-environment",
            f"{ENVIRONMENT}={value} is neither 0 nor 1; set {ENVIRONMENT}=1 to let ranks "
            f"agree on each step, or leave it out",
        )
    return value == "1"
