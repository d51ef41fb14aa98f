"""benchmarks/step.py and instructions.py: what is compared with what. No time is asserted."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import instructions, models, step

pytestmark = pytest.mark.alone


def test_models_have_the_parameters_they_are_named_for() -> None:
    for name, billions in (("1.1b", 1.10), ("2.8b", 2.83), ("1.9b-moe", 1.92)):
        with torch.device("meta"):
            found = models.Decoder(models.PRESETS[name]).parameters()
        assert round(sum(param.numel() for param in found) / 1e9, 2) == billions
    numbers = [stack.parameters for stack in step.STACKS.values()]
    assert numbers == [288, 1152, 3200, 600, 1000, 288, 288, 416, 72]
    for name in ("300x1-3", "lora"):
        model = step.make_stack(name, 1)
        assert len(list(model.parameters())) == step.STACKS[name].parameters
    assert len(step.make_stack("300x1-3", 60).blocks) == 5


def test_a_decoder_of_experts_trains() -> None:
    model = models.Decoder(models.PRESETS["tiny-moe"])
    model.reset_parameters()
    model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_what_is_added_is_compared() -> None:
    few = {"none": 1.0, "torch": 11.0, "fsdp2": 2.0}
    many = {"none": 4.0, "torch": 54.0, "fsdp2": 8.0}
    rounds = {
        f"{name}, fp32, {variant}": {"host": [value]}
        for name, each in (("32x9", few), ("128x9", many))
        for variant, value in each.items()
    }
    assert {label: found.median for label, found in step.ratios_of(rounds).items()} == {
        "32x9, fp32: (fsdp2 - none) / (torch - none)": 0.1,
        "128x9, fp32: (fsdp2 - none) / (torch - none)": 0.08,
        "fp32, torch: added a block, 128x9 / 32x9": 1.25,
        "fp32, fsdp2: added a block, 128x9 / 32x9": 1.0,
    }


def test_world_sizes_are_compared() -> None:
    steps = {"none": 1.0, "torch@8": 3.0, "fsdp2@8": 2.0, "torch@16": 5.0, "fsdp2@16": 3.0}
    rounds = {f"tall, fp32, {variant}": {"host": [value]} for variant, value in steps.items()}
    assert {label: found.median for label, found in step.ratios_of(rounds).items()} == {
        "tall, fp32: (fsdp2 - none) / (torch - none)@8": 0.5,
        "tall, fp32: (fsdp2 - none) / (torch - none)@16": 0.5,
        "tall, fp32, torch: 16 ranks / 8": 5 / 3,
        "tall, fp32, fsdp2: 16 ranks / 8": 1.5,
    }


def test_decoders_are_compared_in_what_targets_are_stated_in() -> None:
    def figures(device: float, allocated: int) -> dict[str, list[float]]:
        return {"device": [device], "host": [1.0], "allocated": [allocated]}

    each = {"none": figures(4.0, 8), "torch": figures(6.0, 5), "fsdp2": figures(5.0, 4)}
    rounds = {f"1.1b, mixed, {variant}": found for variant, found in each.items()}
    assert {label: found.median for label, found in step.ratios_of(rounds).items()} == {
        "1.1b, mixed, torch / none, device": 1.5,
        "1.1b, mixed, fsdp2 / none, device": 1.25,
        "1.1b, mixed, fsdp2 / torch, device": 5 / 6,
        "1.1b, mixed, fsdp2 / torch, host": 1.0,
        "1.1b, mixed, fsdp2 / torch, allocated": 0.8,
    }


@pytest.mark.parametrize(
    ("logits", "sound"), [(1.1, True), (0.001, False), (1e20, False), (math.nan, False)]
)
def test_a_variant_with_other_logits_than_none_is_flagged(logits: float, sound: bool) -> None:
    none = {"device": [1.0, 1.0], "logits": [0.9, 0.9]}
    fsdp2 = {"device": [1.0, 1.0], "logits": [0.9, logits]}
    found = step.unsound({"1.1b, mixed, none": none, "1.1b, mixed, fsdp2": fsdp2})
    flagged = [] if sound else ["UNSOUND: 1.1b, mixed, fsdp2"]
    assert [sentence.split(": logits")[0] for sentence in found] == flagged
    alone = step.unsound({"1.1b, mixed, fsdp2": fsdp2})
    assert bool(alone) is math.isnan(logits)  # nothing to compare with
    assert not step.unsound({"tiny, fp32, fsdp2": {"wall": [1.0], "logits": [math.nan]}})


def test_models_with_a_plus_take_turns() -> None:
    options = step.parse(["--models", "32x9+128x9,llama", "--device", "cuda"])
    assert options.models == [["32x9", "128x9"], ["llama"]]
    assert options.precision == ["mixed"]
    assert step.parse([]).precision == ["fp32"]


def test_instructions_belong_to_the_child_that_ran_them() -> None:
    printed = [json.dumps({"pid": 10 + n, "label": "a", "steps": n}) for n in (0, 4)]
    # valgrind 3.19, and the format since 3.22; the parent comes last
    counted = ["==10== I   refs:      1,000", "==14== I refs:        3,000", "==1== I refs: 9,999"]
    found = instructions.parsed("\n".join([*printed, "else"]), "\n".join(counted))
    assert found == {("a", 0): 1000, ("a", 4): 3000}
