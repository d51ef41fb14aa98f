"""Text as bytes: which files are read, how they are split, and which bytes each step trains on.

This module keeps no state. A batch is a pure function of (text, seed, step), so a run that is
resumed at step s sees the same batches as an uninterrupted run, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .flags import UsageError

HELD_OUT_SHARE = 0.1
MAX_BYTES = 1 << 30
# Not its own text: packages installed next to it, and its tests, which some systems leave out.
_NO_STDLIB = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True)
class Corpus:
    """Text split into what is trained on and what is only measured; uint8 [bytes] each.

    `fingerprint` is a hash of both halves: two runs with the same one train on the same text.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    source: str
    fingerprint: str


def load_corpus(path: Path | None, min_bytes: int) -> Corpus:
    """Read `path` (a file or a folder; None: Python's own standard library) and split it.

    `min_bytes` is what each half must hold at least: one sequence and its last target.
    """
    try:
        source, files = _read_files(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    train, held_out = split_files(files, min_bytes)
    if min(len(train), len(held_out)) < min_bytes:
        raise UsageError(
            f"{source} holds too little text: {len(train):,} bytes to train on and "
            f"{len(held_out):,} held out, where each needs at least {min_bytes:,} for one sequence"
        )
    fingerprint = hashlib.blake2b(train, digest_size=12)
    fingerprint.update(hashlib.blake2b(held_out).digest())
    halves = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out)]
    return Corpus(halves[0], halves[1], len(files), source, fingerprint.hexdigest())


def _read_files(path: Path | None) -> tuple[str, dict[str, bytes]]:
    """(what the text is called, file name -> its bytes)."""
    if path is not None and path.is_file():
        return str(path), {path.name: _checked([path])[0].read_bytes()}
    if path is not None and path.exists() and not path.is_dir():
        raise UsageError(f"{path} is neither a file nor a folder")
    root = path or Path(sysconfig.get_paths()["stdlib"])
    skipped, suffix = (_NO_STDLIB, ".py") if path is None else (frozenset(), "")
    files = {name: (root / name).read_bytes() for name in list_files(root, suffix, skipped)}
    if path is None:
        return "Python's standard library", files
    # A zero byte early on: an image, an archive, anything but text.
    return str(path), {name: text for name, text in files.items() if b"\0" not in text[:8192]}


def list_files(root: Path, suffix: str = "", skip: frozenset[str] = frozenset()) -> list[str]:
    """Names of the files below `root` that end with `suffix`, relative, with "/", in sorted order.

    Left out are hidden files and folders, and what lies in a folder of a name in `skip`.
    """

    def stop(error: OSError) -> None:
        raise error

    found = []
    for folder, below, names in os.walk(root, onerror=stop):
        below[:] = [name for name in below if name not in skip and name[0] != "."]
        paths = [Path(folder, name) for name in names if name[0] != "." and name.endswith(suffix)]
        found += [path for path in paths if path.is_file()]
    return sorted(path.relative_to(root).as_posix() for path in _checked(found))


def _checked(paths: list[Path]) -> list[Path]:
    if sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise UsageError(
            f"--data holds more than {MAX_BYTES >> 20} MiB of files; name a smaller one"
        )
    return paths


def split_files(files: dict[str, bytes], min_bytes: int) -> tuple[bytes, bytes]:
    """(train, held-out) text, split by file: a tenth of the bytes is held out.

    Files enter the held-out part in the order of their names' hashes, so the choice looks random
    and hardly changes when a file is added. If that leaves less than `min_bytes` (a single file, or
    a few of very different sizes), the last tenth of all the text is held out instead.
    """
    budget = HELD_OUT_SHARE * sum(map(len, files.values()))
    held_out_names = set()
    size = 0
    for name in sorted(files, key=lambda name: hashlib.blake2b(os.fsencode(name)).digest()):
        if size + len(files[name]) <= budget:
            held_out_names.add(name)
            size += len(files[name])
    if size >= min_bytes:
        names = sorted(files)
        train = b"".join(files[name] for name in names if name not in held_out_names)
        return train, b"".join(files[name] for name in names if name in held_out_names)
    text = b"".join(files[name] for name in sorted(files))
    cut = len(text) - max(int(len(text) * HELD_OUT_SHARE), min(min_bytes, len(text)))
    return text[:cut], text[cut:]


def global_batch(text: Tensor, seed: int, step: int, batch_size: int, seq_len: int) -> Tensor:
    """The whole batch of one step, uint8 [batch_size, seq_len + 1]: tokens and, one on, targets."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    starts = torch.randint(0, text.numel() - seq_len, (batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(seq_len + 1)]


def rank_slice(batch_size: int, grad_accum: int, micro: int, dp_rank: int, dp_size: int) -> slice:
    """Which sequences of the global batch a data-parallel rank handles in micro-batch `micro`.

    batch_size=8, grad_accum=2, dp_size=2:   0 1 | 2 3 || 4 5 | 6 7
                                dp_rank      0     1      0     1
                                micro        0     0      1     1
    """
    share = batch_size // grad_accum // dp_size
    start = (micro * dp_size + dp_rank) * share
    return slice(start, start + share)


def held_out_slices(text: Tensor, seq_len: int, max_sequences: int) -> Tensor:
    """The same evenly spaced slices at every call, uint8 [S, seq_len + 1], S <= `max_sequences`."""
    count = min(max_sequences, text.numel() // (seq_len + 1))
    stride = (text.numel() - seq_len - 1) // max(count - 1, 1)
    starts = torch.arange(count) * stride
    return text[starts[:, None] + torch.arange(seq_len + 1)]


def tokens_and_targets(sequences: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 [B, T + 1] -> int64 tokens [B, T] and targets [B, T] on `device`."""
    on_device = sequences.to(device, torch.int64)
    return on_device[:, :-1], on_device[:, 1:]
