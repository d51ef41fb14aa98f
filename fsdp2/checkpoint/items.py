"""Writes DCP's files: a rank's items one after another, and the index of their positions.

    __0_0.distcp   [ archive of torch.save | archive | … ]     .metadata   name, box -> file, offset

`torch.distributed.checkpoint` writes the same. This module does not copy rows that are views of a
larger buffer, and renames nothing: if the file is new, so is its folder.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import IO, cast

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.checkpoint import files
from fsdp2.checkpoint.archives import ALIGNMENT, write_archive
from fsdp2.checkpoint.staging import copied
from fsdp2.checkpoint.stores import Attempt


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"__{rank}_0{filesystem.DEFAULT_SUFFIX}"


def write_items(
    rank: int, plan: SavePlan, planner: SavePlanner, attempt: Attempt
) -> list[WriteResult]:
    """Write what a plan says into this rank's file, which is durable then; no file for nothing."""
    if not plan.items:
        return []
    name, found = file_of(rank), []
    with attempt.create(name) as stream:
        for item in plan.items:
            begin = stream.tell()
            value = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                stream.write(cast(BytesIO, value).getbuffer())
            else:
                _write_tensor(stream, cast(torch.Tensor, value))
            length = stream.tell() - begin
            place = filesystem._StorageInfo(name, begin, length)
            found.append(WriteResult(item.index, length, place))
    return found


def _write_tensor(stream: files.Summed, value: torch.Tensor) -> None:
    rows = value.detach().cpu()
    if type(rows) in (torch.Tensor, nn.Parameter) and _is_strided(rows):
        write_archive(stream.write, rows)
    else:  # a class of the user's, sparse ones: torch knows how
        torch.save(copied(rows), cast(IO[bytes], stream))


@functools.lru_cache(4096)
def framing_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The bytes that `write_items` puts before the values of a tensor, and the size of all but the
    values.

    If an item begins with these bytes and has this length, its values follow them: it is read
    without a parser.
    """
    whole, before = io.BytesIO(), 0
    like = torch.empty(shape, dtype=dtype, device="meta")
    over = like.nbytes % ALIGNMENT

    def data_of(_: torch.Tensor) -> Iterator[bytes]:
        """The part of the values that determines the bytes after them."""
        nonlocal before
        before = whole.tell()
        yield bytes(over)

    write_archive(whole.write, like, data_of)
    return whole.getvalue()[:before], len(whole.getvalue()) - over


def _is_strided(rows: torch.Tensor) -> bool:
    return rows.layout is torch.strided and not rows.is_quantized


def index_of(metadata: Metadata, places: Mapping[MetadataIndex, object]) -> bytes:
    """DCP's index: ``metadata``, and where each item is."""
    whole = replace(metadata, storage_data=places, version=filesystem.CURRENT_DCP_VERSION)
    return pickle.dumps(whole)
