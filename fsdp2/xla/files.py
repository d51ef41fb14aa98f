"""Per-rank files are merged into one full file.

    prefix_rank-0-of-2.pth   {'model': rows, 'shard_metadata': whose}   ┐
    prefix_rank-1-of-2.pth   {'model': rows, 'shard_metadata': whose}   ┘ ──> {'model': tensors}

All files are opened and compared before anything is written. They are mapped, not read: memory
holds the pages of one tensor at a time. The full tensors of the output are also mapped, in an
unnamed scratch file next to it. The full file appears under its name when it is complete.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch

from fsdp2.core.errors import coded
from fsdp2.core.facts import piece_of
from fsdp2.xla.shards import ShardInfo, ShardMetadata, check_metadata, local_shape

StateDict = Mapping[str, Any]
Allocate = Callable[..., torch.Tensor]


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[StateDict], shard_metadata: ShardMetadata
) -> dict[str, Any]:
    """Merge all ranks' state dicts into that of the unwrapped model.

    Args:
        state_dict_list: each rank's ``model.state_dict()``, in the order of ranks.
        shard_metadata: ``model.get_shard_metadata()`` of any rank.

    Returns:
        The full state dict: names and shapes of the unwrapped model, plain tensors on the CPU, in
            the dtypes of the shards. Buffers are rank 0's, in their dtypes before ``buffer_dtype``.
            Parameters that are tied in every state dict are one tensor.

    Raises:
        ValueError: a state dict is missing, or differs from the metadata; before any tensor is
            created.

    Example::

        full = consolidate_sharded_state_dicts([c["model"] for c in ckpts], metadata)
        model.load_state_dict(full)
    """
    metadata = check_metadata(shard_metadata, "shard_metadata")
    if len(state_dict_list) != metadata["world_size"]:
        raise coded(
            ValueError,
            "xla-number",
            f"got {len(state_dict_list)} state dicts, but the model was sharded over "
            f"{metadata['world_size']} ranks; pass one per rank, in the order of ranks",
        )
    names = [f"the state dict of rank {rank}" for rank in range(len(state_dict_list))]
    _check_models(state_dict_list, names, metadata)
    return _joined(state_dict_list, metadata, torch.empty)


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[dict[str, Any], str | None]:
    """Merge the files of all ranks into one that the unwrapped model loads.

    Each file is a dict that ``torch.save`` wrote on one rank, with ``model.state_dict()`` under
    "model" and ``model.get_shard_metadata()`` under "shard_metadata"; other entries are ignored. It
    is loaded with ``weights_only=True``.

    Args:
        ckpt_prefix: the prefix of the names of all files.
        ckpt_suffix: the rest of the names, a ``glob`` pattern. Default "*.pth".
        save_path: the full file; by default ``ckpt_prefix + "_consolidated.pth"``. An existing file
            is replaced. It never counts as a rank's.
        save_model: whether to write the full file. Default ``True``. It holds {'model': full state
            dict}.

    Returns:
        The full state dict, as for `consolidate_sharded_state_dicts`, and the path of the full
        file; ``None`` instead if none was written.

    Raises:
        FileNotFoundError: no file matches, or that of a rank is missing.
        ValueError: a file cannot be read, is not a rank's, or belongs to other files. Nothing was
            written in this case.

    Example::

        consolidate_sharded_model_checkpoints("/tmp/mnist/final_ckpt", "_rank-*-of-*.pth")
    """
    target = save_path or f"{ckpt_prefix}_consolidated.pth"
    pattern = ckpt_prefix + ckpt_suffix
    paths = [path for path in sorted(glob(pattern)) if Path(path) != Path(target)]
    if not paths:
        raise coded(
            FileNotFoundError,
            "xla-no-files",
            f"no file name matches '{pattern}'; pass the ckpt_prefix and the ckpt_suffix with "
            f"which the ranks saved",
        )
    files = [(path, _read(path)) for path in paths]
    metadata = {path: check_metadata(file.get("shard_metadata"), path) for path, file in files}
    _check_ranks(metadata, pattern)
    files.sort(key=lambda file: metadata[file[0]]["rank"])
    ordered = [path for path, _ in files]
    models = [file["model"] for _, file in files]
    first = metadata[ordered[0]]
    _check_alike([metadata[path] for path in ordered], ordered)
    _check_models(models, ordered, first)
    if not save_model:
        return _joined(models, first, torch.empty), None
    full = _joined(models, first, functools.partial(_mapped, Path(target)))
    _write(Path(target), {"model": full})
    return full, target


def _mapped(target: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose pages are those of an unnamed file next to ``target``."""
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.empty(shape, dtype=dtype)
    path = target.with_name(f".{target.name}.scratch-{os.getpid()}")
    try:
        flat = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
    finally:
        path.unlink(missing_ok=True)  # the map keeps what it needs
    return flat.view(shape)


def _joined(
    models: Sequence[StateDict], metadata: ShardMetadata, allocate: Allocate
) -> dict[str, object]:
    """Full tensors, one after the other; tied ones once."""
    full: dict[str, object] = {}
    made: dict[object, torch.Tensor] = {}
    for name, value in models[0].items():
        info = metadata["shard_info"].get(name)
        if info is None:
            full[name] = _buffer(value, metadata["buffer_info"].get(name))
            continue
        pieces = [model[name] for model in models]
        place = tuple((piece.data_ptr(), tuple(piece.shape)) for piece in pieces)
        tied = made.get(place) if all(piece.numel() for piece in pieces) else None
        full[name] = made[place] = _whole(pieces, info, allocate) if tied is None else tied
    return full


def _buffer(value: object, dtype: str | None) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value if dtype is None else value.to(getattr(torch, dtype))


def _whole(pieces: Sequence[torch.Tensor], info: ShardInfo, allocate: Allocate) -> torch.Tensor:
    shape, dim = tuple(info["shape"]), info["dim"]
    found = allocate(shape, dtype=pieces[0].dtype)
    with torch.no_grad():
        for rank, piece in enumerate(pieces):
            start, rows = piece_of(shape[dim], len(pieces), rank)
            found.narrow(dim, start, rows).copy_(piece)
    return found


# ---- reading and writing


def _read(path: str) -> dict[str, Any]:
    """A rank's saved state; tensors are mapped if the file allows it."""
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"  # not one of the older format
    try:
        found = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise coded(
            ValueError,
            "xla-unreadable",
            f"'{path}' cannot be loaded, because it is incomplete or holds more than tensors and "
            f"plain values; save that rank's file again",
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), Mapping):
        raise coded(
            ValueError,
            "xla-no-model",
            f"'{path}' holds no 'model', so it is not a rank's file; choose a ckpt_suffix that "
            f"does not match it",
        )
    return found


def _write(target: Path, value: object) -> None:
    """Write a temporary file, and rename it when it is complete."""
    saving = target.with_name(f".{target.name}.saving-{os.getpid()}")
    try:
        with saving.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        saving.replace(target)
    finally:
        saving.unlink(missing_ok=True)


# ---- checks


def _check_ranks(metadata: Mapping[str, ShardMetadata], pattern: str) -> None:
    """One file of each rank, all of the same number of ranks."""
    seen: dict[int, str] = {}
    (first, told), *others = metadata.items()
    size = told["world_size"]
    for path, other in others:
        if other["world_size"] != size:
            raise coded(
                ValueError,
                "xla-world-sizes",
                f"'{first}' was saved by one of {size} ranks, but '{path}' by one of "
                f"{other['world_size']} ranks; choose a ckpt_suffix that matches the files of one "
                f"run only",
            )
    for path, found in metadata.items():
        if found["rank"] in seen:
            raise coded(
                ValueError,
                "xla-rank-twice",
                f"'{seen[found['rank']]}' and '{path}' were both saved by rank {found['rank']}; "
                f"choose a ckpt_suffix that matches the files of one run only",
            )
        seen[found["rank"]] = path
    missing = sorted(set(range(size)) - set(seen))
    if missing:
        raise coded(
            FileNotFoundError,
            "xla-missing",
            f"'{pattern}' matches the files of {len(seen)} of {size} ranks, but those of ranks "
            f"{missing} are missing; copy them there",
        )


def _check_alike(metadata: Sequence[ShardMetadata], names: Sequence[str]) -> None:
    """All ranks describe one model."""
    infos = [each["shard_info"] for each in metadata]
    for other, name in zip(infos[1:], names[1:], strict=True):
        if other != infos[0]:
            wrong = next(p for p in {**infos[0], **other} if infos[0].get(p) != other.get(p))
            raise coded(
                ValueError,
                "xla-other-model",
                f"'{names[0]}' and '{name}' differ in parameter '{wrong}', so they belong to "
                f"different models; choose a ckpt_suffix that matches the files of one run only",
            )


def _check_models(
    models: Sequence[StateDict], names: Sequence[str], metadata: ShardMetadata
) -> None:
    """Every state dict has what the metadata says, in the same dtypes."""
    for rank, (model, name) in enumerate(zip(models, names, strict=True)):
        absent = {*models[0], *metadata["shard_info"]} - set(model)
        extra = set(model) - set(models[0])
        if absent or extra:
            raise coded(
                ValueError,
                "xla-names",
                f"'{min(absent or extra)}' is missing in '{name if absent else names[0]}', but "
                f"not in other ranks' state dicts; save the files of all ranks in the same step",
            )
        for param, info in metadata["shard_info"].items():
            piece, like = model[param], models[0][param]
            shape = local_shape(info, len(models), rank)
            if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != shape:
                raise coded(
                    ValueError,
                    "xla-piece",
                    f"'{param}' in '{name}' is not rank {rank}'s piece {shape} of "
                    f"{tuple(info['shape'])}; save the result of the wrapper's state_dict()",
                )
            if piece.dtype != like.dtype:
                raise coded(
                    ValueError,
                    "xla-dtypes",
                    f"'{param}' is {piece.dtype} in '{name}', but {like.dtype} in '{names[0]}'; "
                    f"save all ranks' files in the same step",
                )
