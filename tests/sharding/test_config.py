"""Policies are frozen values that refuse what cannot work, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy, errors

pytestmark = pytest.mark.alone


def test_default_policy_changes_nothing() -> None:
    policy = MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_dtypes(field: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        arguments: dict[str, Any] = {field: dtype}
        assert getattr(MixedPrecisionPolicy(**arguments), field) is dtype
    for value in ("bfloat16", float, 16):
        with pytest.raises(TypeError, match=rf"{field}={value!r}.* is not a torch.dtype; pass "):
            MixedPrecisionPolicy(**{field: value})
    for value in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"{field}={value}\) is not a floating-point dtype"):
            MixedPrecisionPolicy(**{field: value})


def test_state_errors_are_runtime_errors() -> None:
    assert issubclass(errors.ShardingStateError, RuntimeError)
