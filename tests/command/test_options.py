"""Options that all commands share."""

from __future__ import annotations

import argparse

import pytest

from fsdp2.checkpoint import converting
from fsdp2.command import checkpoint, doctor, options
from tests.command.test_main import ROOT
from tests.common import errors

pytestmark = pytest.mark.alone


def test_numbers() -> None:
    assert (options.count("3"), options.step("0"), options.positive("0.5")) == (3, 0, 0.5)
    for kind, text in (
        (options.count, "0"),
        (options.count, "2.5"),
        (options.step, "-1"),
        (options.positive, "0"),
        (options.positive, "nan"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(text)
        errors.assert_said("command-argument", str(caught.value))


def test_facts_that_are_named_without_torch() -> None:
    """They are the same as where they belong."""
    assert checkpoint.KINDS == converting.KINDS
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={doctor.PYTHON[0]}.{doctor.PYTHON[1]}"' in project
    assert f'"torch>={doctor.TORCH[0]}.{doctor.TORCH[1]}' in project
