"""The arithmetic of benchmarks/padding.py, on cases that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import padding
from benchmarks.public_models import MODELS, UnitShapes, gpt_oss_experts

BLOCK = MODELS["GPT-OSS-120B"]["block"]
EXPERTS = UnitShapes(1, gpt_oss_experts(128, 2880, 2880))


def per_cent(share: float) -> int:
    return round(share * 100)


def test_torchs_rule_a_parameter() -> None:
    assert padding.torch_padded([(4, 3)], 2) == 12
    assert padding.torch_padded([(5, 3)], 2) == 18  # 3 rows a rank
    assert padding.torch_padded([(3,)], 8) == 8  # a rank at least one row, also where there is none
    assert padding.torch_padded([(5, 3), (3,)], 2) == 18 + 4


def test_torchs_collective_is_a_multiple_of_16_bytes_by_chance() -> None:
    assert padding.torch_aligned([(16, 8)], 2)  # 64 elements of bf16 a rank
    assert not padding.torch_aligned([(16, 8), (2,)], 2)


@pytest.mark.parametrize(("ranks", "experts", "block"), [(256, 100, 99), (1024, 700, 694)])
def test_fused_experts_on_dim_0(ranks: int, experts: int, block: int) -> None:
    """128 experts on 256 ranks: every rank holds a whole one, so that half of all are padding.

    In a block, whose other parameters pad next to nothing, that is 99 % of its bytes. We shard them
    on another dim, or if that is allowed on two.
    """
    assert per_cent(padding.padding([EXPERTS], ranks).torch) == experts
    assert per_cent(padding.padding([BLOCK], ranks).torch) == block
    assert per_cent(padding.padding([BLOCK], ranks).ours) == {256: 4, 1024: 7}[ranks]
    both = padding.padding([EXPERTS], ranks)
    assert both.two_dims < 0.001
    assert both.two_dims_packed < 0.001  # a band has one row: gathered straight into its place


@pytest.mark.parametrize("ranks", padding.WORLD_SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_on_two_dims_no_model_pads_more_than_three_per_cent(model: str, ranks: int) -> None:
    assert padding.padding(list(MODELS[model].values()), ranks).two_dims < 0.03


def test_ours_is_exact_for_small_units() -> None:
    even = padding.padding([UnitShapes(3, {"w": (16, 8)})], 2)
    assert (even.ours, even.gathered, even.torch, even.packed) == (0.0, 0.0, 0.0, 0.0)
    # 3 rows of 8 on 2 ranks: 2 a rank, 4 rows in all
    uneven = padding.padding([UnitShapes(1, {"w": (3, 8)})], 2)
    assert uneven.ours == uneven.torch == pytest.approx(1 / 3)
    assert uneven.gathered == pytest.approx(256 / 48 - 1)  # 64 bytes of bf16 in a slot of 256
    # rows of 2 bytes travel packed, and the segment is padded once: 8 elements of bf16 a rank
    odd = padding.padding([UnitShapes(1, {"a": (3,), "b": (3,)})], 2)
    assert odd.ours == pytest.approx(16 / 6 - 1)
    assert odd.torch == pytest.approx(8 / 6 - 1)
    assert odd.packed == 1.0


def test_units_count_as_often_as_the_model_has_them() -> None:
    even, uneven = {"w": (16, 8)}, {"w": (3, 8)}
    both = padding.padding([UnitShapes(2, even), UnitShapes(4, uneven)], 2)
    assert both.torch == pytest.approx(4 * 8 / (2 * 128 + 4 * 24))


@pytest.mark.parametrize("ranks", padding.WORLD_SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_every_collective_moves_a_multiple_of_16_bytes_a_rank(model: str, ranks: int) -> None:
    for unit in MODELS[model].values():
        for cut in (padding.one_dim, padding.two_dims):
            nbytes = padding.collective_bytes(unit.params, ranks, cut)
            assert len(nbytes) >= 2  # gathered and reduced
            assert [size for size in nbytes if size % 16] == []


def test_models_have_the_parameters_they_are_named_for() -> None:
    def billions(model: str) -> float:
        units = MODELS[model].values()
        elements = sum(u.times * padding.torch_padded(u.params.values(), 1) for u in units)
        return round(elements / 1e9, 1)

    assert [billions(model) for model in MODELS] == [8.0, 4.0, 116.8]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "padding.json"
    padding.main(["--models", "GPT-OSS-120B", "--world-size", "256", "--json", str(file)])
    assert "GPT-OSS-120B    256    3.64" in capsys.readouterr().out
    (result,) = json.loads(file.read_text())["results"]
    assert (result["model"], result["ranks"], result["aligned"]) == ("GPT-OSS-120B", 256, True)
