"""Flat and transient memory: what views keep, and what they do not share."""

from __future__ import annotations

import pytest
import torch

from fsdp2.core.device.buffers import (
    FlatBuffer,
    SwappedBuffer,
    TransientBuffer,
    absent,
    saved_in,
)

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


# ---- TransientBuffer


def test_views_stay_valid_objects_over_many_lives() -> None:
    buffer = TransientBuffer(64, CPU, "gathered")
    view = buffer.view(torch.float32, 16, (2, 3))
    identity = id(view)
    for value in (1.0, 2.0, 3.0):
        buffer.release()
        assert not buffer.allocated
        assert view.untyped_storage().size() == 0
        buffer.acquire()
        assert buffer.allocated
        view.fill_(value)
        assert view.eq(value).all()
        assert (id(view), tuple(view.shape), view.stride()) == (identity, (2, 3), (3, 1))


# ---- both


def _flat() -> FlatBuffer:
    return FlatBuffer(64, CPU)


def _transient() -> TransientBuffer:
    buffer = TransientBuffer(64, CPU, "gathered")
    buffer.view(torch.uint8, 0, (64,)).zero_()
    return buffer


BOTH = pytest.mark.parametrize("make", [_flat, _transient])


@BOTH
def test_views_of_any_dtype_offset_and_strides(make: type[FlatBuffer]) -> None:
    buffer = make()  # type: ignore[call-arg]  # a function without arguments
    buffer.view(torch.float32, 0, (16,)).copy_(torch.arange(16.0))
    assert buffer.view(torch.float32, 8, (3,)).tolist() == [2, 3, 4]
    assert buffer.view(torch.float32, 0, (2, 3), (8, 2)).tolist() == [[0, 2, 4], [8, 10, 12]]
    assert buffer.view(torch.float32, 4, (2, 2)).tolist() == [[1, 2], [3, 4]]
    assert buffer.view(torch.bfloat16, 4, (2,)).tolist() == [0, 1]  # 1.0: upper half 0x3f80
    assert tuple(buffer.view(torch.int64, 64, (0, 7)).shape) == (0, 7)


@BOTH
def test_version_counters_are_apart(make: type[FlatBuffer]) -> None:
    buffer = make()  # type: ignore[call-arg]  # a function without arguments
    parameter = torch.nn.Parameter(buffer.view(torch.float32, 0, (4,)))
    slot = buffer.view(torch.float32, 0, (4,))
    neighbour = buffer.view(torch.float32, 16, (4,))
    before = parameter._version, neighbour._version
    slot.fill_(3)
    slot.add_(1)
    assert (parameter._version, neighbour._version) == before
    assert slot._version >= 2
    assert parameter.tolist() == [4] * 4


def test_gather_into_an_alias_passes_autograds_check() -> None:
    buffer = TransientBuffer(16, CPU, "gathered")
    slot = buffer.view(torch.float32, 0, (4,))
    parameter = torch.nn.Parameter(buffer.view(torch.float32, 0, (4,)))
    slot.fill_(2)
    loss = (parameter * parameter).sum()  # saves the parameter
    buffer.release()
    buffer.acquire()
    slot.fill_(2)
    loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4] * 4


def test_change_by_the_user_fails_autograds_check() -> None:
    buffer = TransientBuffer(16, CPU, "gathered")
    parameter = torch.nn.Parameter(buffer.view(torch.float32, 0, (4,)))
    loss = (parameter * parameter).sum()
    with torch.no_grad():
        parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@BOTH
def test_made_in_inference_mode_they_serve_training(make: type[FlatBuffer]) -> None:
    with torch.inference_mode():
        buffer = make()  # type: ignore[call-arg]  # a function without arguments
        view = buffer.view(torch.float32, 0, (4,))
    assert not view.is_inference()
    view.fill_(2)
    parameter = torch.nn.Parameter(view)
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4] * 4


# ---- FlatBuffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_pieces_have_storages_of_their_own(dtype: torch.dtype) -> None:
    """So that what is done to a whole storage is done to one parameter."""
    buffer = FlatBuffer(64, CPU)
    whole = buffer.view(torch.uint8, 0, (64,))
    piece = buffer.piece(dtype, 16, (2, 2))
    assert piece.untyped_storage().nbytes() == piece.nbytes
    assert piece.storage_offset() == 0
    assert buffer.piece(dtype, 16, (0, 2)).untyped_storage().nbytes() == 0
    before = piece._version
    whole.fill_(1)
    assert piece.view(torch.uint8).eq(1).all(), "one memory"
    assert piece._version == before
    del buffer, whole
    assert piece.view(torch.uint8).eq(1).all(), "which the piece keeps alive"


# ---- SwappedBuffer


def _swapped() -> tuple[SwappedBuffer, torch.Tensor, torch.nn.Parameter]:
    """A buffer, a view of it, and a parameter over a part of the view, which follows."""
    buffer = SwappedBuffer(64, CPU, "gathered")
    view = buffer.view(torch.float32, 16, (3, 4))
    param = torch.nn.Parameter(view.t()[1:])
    buffer.keep_valid(param)
    return buffer, view, param


def test_what_follows_has_the_memory_of_each_gather() -> None:
    buffer, view, param = _swapped()
    versions = view._version, param._version
    for value in (1.0, 2.0):
        buffer.release()
        assert view.shape == (3, 4)
        assert param.shape == (3, 3)
        assert bool(view.isnan().all())
        assert view.untyped_storage().nbytes() == 4
        buffer.acquire()
        buffer.raw.view(torch.float32).fill_(value)
        assert bool((view == value).all())
        assert param.stride() == (1, 4)
        assert param.data_ptr() == view.data_ptr() + 4
    assert (view._version, param._version) == versions


def test_the_memory_is_gone_unless_somebody_has_it() -> None:
    buffer, view, _ = _swapped()
    assert buffer.references() == 0
    kept = view.detach()
    assert buffer.references() == 1
    kept.fill_(3)
    buffer.release()
    assert buffer.references() == 0
    assert bool((kept == 3).all())
    del kept
    buffer.acquire()
    assert buffer.references() == 0


def test_a_place_in_memory_that_comes_and_goes() -> None:
    buffer, view, param = _swapped()
    place = saved_in(param.detach())
    assert place is not None
    assert saved_in(torch.ones(3)) is None
    buffer.release()
    assert place.tensor() is None
    assert saved_in(view) is None
    buffer.acquire()
    view.copy_(torch.arange(12.0).view(3, 4))
    found = place.tensor()
    assert found is not None
    assert torch.equal(found, param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_absent_is_no_number(dtype: torch.dtype) -> None:
    assert bool(absent(dtype, CPU).float().isnan().all())
