"""Flat and transient memory: what views keep, and what they do not share."""

from __future__ import annotations

import pytest
import torch

from fsdp2.core.device.buffers import (
    FlatBuffer,
    SwappedBuffer,
    TransientBuffer,
    absent,
    row_major,
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


def test_views_made_before_and_after_a_release_see_the_same_memory() -> None:
    buffer = TransientBuffer(32, CPU, "gathered")
    first = buffer.view(torch.float32, 0, (8,))
    buffer.release()
    buffer.acquire()
    second = buffer.view(torch.float32, 16, (4,))
    second.fill_(5)
    assert first.tolist()[4:] == [5] * 4
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_no_view_of_memory_that_is_not_there() -> None:
    buffer = TransientBuffer(32, CPU, "gathered block")
    buffer.release()
    with pytest.raises(AssertionError, match="gathered block is not allocated"):
        buffer.view(torch.float32, 0, (8,))


def test_acquire_and_release_twice_do_no_harm() -> None:
    buffer = TransientBuffer(32, CPU, "gathered")
    view = buffer.view(torch.float32, 0, (8,))
    view.fill_(4)
    buffer.acquire()
    assert view.eq(4).all()
    buffer.release()
    buffer.release()
    assert not buffer.allocated


def test_empty_buffer_is_always_allocated() -> None:
    buffer = TransientBuffer(0, CPU, "gathered")
    view = buffer.view(torch.float32, 0, (0, 4))
    buffer.release()
    assert buffer.allocated
    buffer.acquire()
    assert tuple(view.shape) == (0, 4)


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


def test_refilled_in_inference_mode() -> None:
    buffer = TransientBuffer(16, CPU, "gathered")
    view = buffer.view(torch.float32, 0, (4,))
    buffer.release()
    with torch.inference_mode():
        buffer.acquire()
        view.fill_(2)
    assert view.tolist() == [2] * 4
    assert not view.is_inference()


# ---- FlatBuffer


def test_flat_buffer_starts_with_zeros_in_one_storage() -> None:
    buffer = FlatBuffer(64, CPU)
    views = [buffer.view(torch.float32, offset, (4,)) for offset in range(0, 64, 16)]
    assert all(view.eq(0).all() for view in views)
    pointers = {view.untyped_storage().data_ptr() for view in views}
    assert pointers == {buffer.storage.data_ptr()}
    assert (buffer.nbytes, buffer.device) == (64, CPU)


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


def test_pieces_without_memory() -> None:
    piece = FlatBuffer(64, torch.device("meta")).piece(torch.float32, 16, (2, 2))
    assert piece.is_meta
    assert tuple(piece.shape) == (2, 2)
    with torch.inference_mode():
        piece = FlatBuffer(64, CPU).piece(torch.float32, 16, (2, 2))
    assert not piece.is_inference()


def test_flat_buffer_on_meta_has_shapes_only() -> None:
    view = FlatBuffer(64, torch.device("meta")).view(torch.float32, 16, (2, 2))
    assert view.is_meta
    assert tuple(view.shape) == (2, 2)


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


def test_what_is_dead_or_not_over_it_does_not_follow() -> None:
    buffer, view, param = _swapped()
    other = torch.ones(4)
    buffer.keep_valid(other)
    del view
    for _ in range(2):
        buffer.release()
        assert bool((other == 1).all())
        buffer.acquire()
    assert param.untyped_storage().data_ptr() == buffer.raw.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_absent_is_no_number(dtype: torch.dtype) -> None:
    assert bool(absent(dtype, CPU).float().isnan().all())


def test_other_dtypes_that_are_absent() -> None:
    assert absent(torch.int64, CPU).item() == -1
    assert absent(torch.bool, CPU).item() is False


@pytest.mark.parametrize("kind", [TransientBuffer, SwappedBuffer])
def test_views_are_as_those_that_are_made_one_by_one(kind: type[TransientBuffer]) -> None:
    buffer = kind(256, CPU, "test")
    places = [row_major((2, 3), 0), row_major((4,), 6), ((2, 2), (1, 2), 10), row_major((0, 3), 14)]
    many = buffer.views(torch.float32, 64, places)
    for view, (shape, strides, start) in zip(many, places, strict=True):
        one = buffer.view(torch.float32, 64 + 4 * start, shape, strides)
        assert (view.shape, view.stride()) == (one.shape, one.stride())
        assert view.storage_offset() == one.storage_offset()
        assert view.untyped_storage()._cdata == one.untyped_storage()._cdata
        assert not view._is_view()
        assert view._version == 0
    many[0].fill_(1.0)
    assert [view._version for view in many] == [1, 0, 0, 0]  # a counter each (invariant I4)
    buffer.release()
    buffer.acquire()
    many[0].fill_(2.0)
    assert buffer.view(torch.float32, 64, (2, 3)).eq(2.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_pieces_have_storages_and_strides_of_their_own(dtype: torch.dtype) -> None:
    buffer = FlatBuffer(256, CPU)
    places = [(0, (1, 5)), (8, (3, 1)), (12, (0, 4)), (12, (2, 2))]
    for piece, (start, shape) in zip(buffer.pieces(dtype, 16, 16, places), places, strict=True):
        assert tuple(piece.shape) == shape
        assert piece.stride() == torch.empty(shape).stride()
        assert piece.untyped_storage().nbytes() == piece.numel() * dtype.itemsize
        assert piece.storage_offset() == 0
        assert piece._base is None
        piece.fill_(1)
        whole = buffer.view(dtype, 16 + start * dtype.itemsize, shape)
        assert torch.equal(whole, piece)
