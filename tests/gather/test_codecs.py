"""Codecs: bounds on what a format changes, for every number that a tensor may hold."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp2.core.codecs import codec as known
from tests.common import cases

pytestmark = pytest.mark.alone

TINIEST = 2.0**-149  # of fp32
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 3 * 128 + 5)
INTEGERS = (known.Bytes(), known.Nibbles())
CPU = torch.device("cpu")
CODECS = (
    *INTEGERS,
    known.Whole(),
    known.Rounded(),
    *(known.Rotated(codec, CPU) for codec in INTEGERS),
)
integers = pytest.mark.parametrize("codec", INTEGERS, ids=lambda codec: codec.name)
codecs = pytest.mark.parametrize(
    "codec", CODECS, ids=["int8", "int4", "fp32", "bf16", "int8 rotated", "int4 rotated"]
)


def coded(codec: known.Codec, numbers: torch.Tensor) -> torch.Tensor:
    rows, numel = numbers.shape
    message = torch.full((rows, codec.nbytes(numel)), 255, dtype=torch.uint8)
    codec.encode(message, numbers)
    return message


def through(codec: known.Codec, numbers: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(numbers, math.nan)
    codec.decode(found, coded(codec, numbers))
    return found


def numbers_of(kind: str, numel: int, rows: int = 3, largest: int = 127) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    found = torch.randn(rows, numel, generator=generator)
    if kind == "zeros":
        found.zero_()
    elif kind == "one outlier":
        found[:, numel // 2] = 1e30
    elif kind == "all magnitudes":
        found *= torch.logspace(-44, 38, numel)
    elif kind == "denormals":
        found *= 300 * TINIEST
    elif kind == "the largest":
        found = found.sign() * torch.finfo(torch.float32).max
    elif kind == "halves":  # the middle between two codes
        found = torch.arange(rows * numel).view(rows, numel).remainder(largest) + 0.5
        found[:, 0] = largest
    return found


KINDS = ("normal", "zeros", "one outlier", "all magnitudes", "denormals", "the largest", "halves")


def blocks_of(numbers: torch.Tensor, block: int) -> torch.Tensor:
    missing = -numbers.shape[1] % block
    padded = torch.nn.functional.pad(numbers.double(), (0, missing))
    return padded.unflatten(1, (-1, block))


@integers
@cases.each("numel", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_off_by_half_a_step_at_most(codec: known.Blocks, kind: str, numel: int) -> None:
    numbers = numbers_of(kind, numel, largest=codec.largest)
    found = through(codec, numbers)
    assert found.isfinite().all()
    wrong = blocks_of(found.double() - numbers.double(), codec.block).abs()
    largest = blocks_of(numbers, codec.block).abs().amax(2, keepdim=True)
    facts = torch.finfo(codec.scale_dtype)  # scales are rounded, too
    slack = (1 + facts.eps) * (1 + 2.0**-20)  # and so are quotients and products of fp32
    least = facts.smallest_normal * facts.eps
    bound = largest / (2 * codec.largest) * slack + (codec.largest + 1) / 2 * least
    assert (wrong <= bound).all()


@integers
def test_every_code_comes_back(codec: known.Blocks) -> None:
    """In each place of a block: those of 4 bits share their bytes."""
    whole = torch.arange(-codec.largest, codec.largest + 1).float()
    for shift in range(codec.block):
        numbers = whole.repeat(codec.block)[shift : shift + 3 * codec.block].unsqueeze(0).clone()
        numbers[:, :: codec.block] = codec.largest  # so that scales are 1
        assert torch.equal(through(codec, numbers), numbers)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("denormals", "halves")])
def test_bfloat16_is_off_by_half_a_step_at_most(kind: str) -> None:
    numbers = numbers_of(kind, 1000)
    found = through(known.Rounded(), numbers)
    finite = found.isfinite()  # the largest of fp32 are nearer to infinity
    wrong = (found.double() - numbers.double()).abs()[finite]
    assert (wrong <= numbers.double().abs()[finite] / 256 + 2.0**-134).all()
    assert numbers[~finite].abs().gt(3.38e38).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", known.NUMBERS)
def test_fp32_loses_nothing(kind: str, dtype: torch.dtype) -> None:
    numbers = numbers_of(kind, 1000).to(dtype)
    assert torch.equal(through(known.Whole(), numbers), numbers)


@codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@cases.each("place", [0, 31, 32, 63, 64, 127, 128, 2 * 128 + 3])
def test_what_is_not_finite_stays_visible(codec: known.Codec, bad: float, place: int) -> None:
    numel = 2 * 128 + 4
    block = {
        known.Bytes: 128,
        known.Nibbles: 64,
        known.Whole: 1,
        known.Rounded: 1,
        known.Rotated: 128,
    }[type(codec)]
    numbers = torch.ones(2, numel)
    numbers[1, place] = bad
    found = through(codec, numbers)
    assert not found[1, place].isfinite()
    assert found[0].isfinite().all()
    same = torch.arange(numel) // block == place // block  # a block is one number's, all
    assert found[1, ~same].isfinite().all()
    sums = torch.empty(numel)
    codec.total(sums, coded(codec, numbers))
    assert not sums[place].isfinite()


@codecs
@pytest.mark.parametrize("dtype", known.NUMBERS)
@cases.each("numel", LENGTHS)
def test_sums_are_those_of_the_decoded_rows(
    codec: known.Codec, dtype: torch.dtype, numel: int
) -> None:
    numbers = numbers_of("normal", numel, rows=5).to(dtype)
    message = coded(codec, numbers)
    decoded = torch.empty(5, numel)
    codec.decode(decoded, message)
    expected = decoded[0].clone()
    for row in decoded[1:]:  # in the order of rows
        expected += row
    sums = torch.empty(numel, dtype=dtype)
    codec.total(sums, message)
    close = {"rtol": 1e-6, "atol": 1e-6}
    if isinstance(codec, known.Rotated):  # sums are rotated back, not numbers
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(sums, expected.to(dtype), **close)
    again = torch.empty(numel, dtype=dtype)
    codec.total(again, message)
    assert torch.equal(sums, again)


@codecs
@cases.each("numel", [*LENGTHS, 100_000])
def test_bytes_are_what_is_promised(codec: known.Codec, numel: int) -> None:
    inner = codec
    if isinstance(codec, known.Rotated):  # of whole blocks
        inner, numel = codec._codec, math.ceil(numel / 128) * 128
    exact = {
        "fp32": 4 * numel,
        "bf16": 2 * numel,
        "int8": numel + 4 * math.ceil(numel / 128),
        "int4": (32 + 2) * math.ceil(numel / 64),
    }[inner.name]
    assert exact <= codec.nbytes(numel) < exact + known.ALIGNMENT
    assert codec.nbytes(numel) % known.ALIGNMENT == 0


@codecs
def test_a_row_does_not_depend_on_the_others(codec: known.Codec) -> None:
    numbers = numbers_of("normal", 300)
    if isinstance(codec, known.Rotated):  # but for how a product of matrices is rounded
        pair = (through(codec, numbers)[1:2], through(codec, numbers[1:2]))
        torch.testing.assert_close(*pair, rtol=0, atol=0.6 * codec._codec.largest**-1)
        return
    assert torch.equal(coded(codec, numbers)[1:2], coded(codec, numbers[1:2]))


@codecs
def test_nothing_is_waited_for(codec: known.Codec) -> None:
    """On a device without memory a number that the host reads would raise."""
    if isinstance(codec, known.Rotated):
        codec = known.Rotated(codec._codec, torch.device("meta"))
    numbers = torch.empty(4, 300, device="meta")
    message = torch.empty(4, codec.nbytes(300), dtype=torch.uint8, device="meta")
    codec.encode(message, numbers)
    codec.decode(numbers, message)
    codec.total(torch.empty(300, device="meta"), message)


# ---- rotation


def test_the_rotation_is_orthonormal_and_the_same_for_all() -> None:
    matrix = known.rotation(CPU)
    assert known.rotation(CPU) is matrix
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(128))
    assert matrix.abs().sub(128**-0.5).abs().max() < 1e-7
    signs = (matrix[:, 0] > 0).tolist()  # of Python's generator, whatever torch and machine
    assert sum(sign << i for i, sign in enumerate(signs)) == 0xDE473D943FDC8C54AA2534707388C019


@integers
@cases.each("numel", LENGTHS)
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("denormals", "the largest")]
)
def test_rotated_blocks_are_off_as_much_as_their_rotation(
    codec: known.Blocks, kind: str, numel: int
) -> None:
    """In the length of a block, which a rotation leaves as it is."""
    numbers = numbers_of(kind, numel, largest=codec.largest)
    if kind == "all magnitudes":
        numbers = numbers.clamp(-1e36, 1e36)
    wrong = blocks_of(through(known.Rotated(codec, CPU), numbers).double() - numbers.double(), 128)
    turned = blocks_of(numbers, 128) @ known.rotation(CPU).double()
    largest = turned.unflatten(2, (-1, codec.block)).abs().amax(3)
    steps = (largest / (2 * codec.largest)).square().sum(2) * codec.block
    slack = 1 + torch.finfo(codec.scale_dtype).eps + 2.0**-10
    assert (wrong.square().sum(2).sqrt() <= steps.sqrt() * slack + 2.0**-120).all()


@integers
def test_an_outlier_costs_its_neighbours_less_when_rotated(codec: known.Blocks) -> None:
    numbers = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    numbers[:, 5::128] = 100.0

    def error(by: known.Codec) -> float:
        return float((through(by, numbers) - numbers).square().mean().sqrt())

    assert error(known.Rotated(codec, CPU)) < error(codec) / 1.4


@integers
def test_sums_of_rotated_numbers_are_rotated_back_once(codec: known.Blocks) -> None:
    numbers = numbers_of("normal", 300, rows=4)
    by = known.Rotated(codec, CPU)
    sums = torch.empty(300)
    by.total(sums, coded(by, numbers))
    largest = (blocks_of(numbers, 128) @ known.rotation(CPU).double()).abs().amax()
    # A step each, of 128 numbers at most, in the length of a block
    bound = 4 * float(largest) / (2 * codec.largest) * 128**0.5 * 1.01
    assert (
        blocks_of((sums.double() - numbers.double().sum(0)).unsqueeze(0), 128).norm(dim=-1).max()
        <= bound
    )
