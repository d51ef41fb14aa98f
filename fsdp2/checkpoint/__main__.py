"""python -m fsdp2.checkpoint ls|show|verify FOLDER [--step N]
python -m fsdp2.checkpoint convert SOURCE TARGET [--from KIND] [--to KIND] [--step N] [--ranks N]
python -m fsdp2.checkpoint export FOLDER OUT [--step N] [--dtype bfloat16] [--shard-size 5GB]

ls       steps, their sizes, how many ranks have written them, what is replaced, and half-done
show     names, shapes and dtypes of a step
verify   reads every byte; says which files are not what was saved, and exits with 1
convert  makes a checkpoint of another kind, a block of a tensor at a time
export   a step as a new folder OUT of safetensors files, which Hugging Face's libraries load
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint.converting import KINDS, convert
from fsdp2.checkpoint.exporting import export
from fsdp2.checkpoint.folder import (
    Progress,
    items_of,
    read_manifest,
    steps,
    store_of,
    verify,
)
from fsdp2.checkpoint.state import Reader
from fsdp2.core.errors import CheckpointError

_DTYPES = ("float32", "float16", "bfloat16", "float64")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp2.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ls", "show", "verify"):
        command = commands.add_parser(name)
        command.add_argument("folder", help="or a URL, as s3://bucket/run")
        command.add_argument("--step", type=int, help="default: show the newest, verify all")
    command = commands.add_parser("convert")
    command.add_argument("source", help="a file, a folder, or a pattern of files of ranks")
    command.add_argument("target", type=Path, help="what is made; not there yet")
    command.add_argument("--from", dest="from_kind", choices=KINDS, help="default: recognised")
    command.add_argument("--to", dest="to_kind", choices=KINDS, help="default: by the name")
    command.add_argument("--step", type=int, help="of the source; or to make")
    command.add_argument("--ranks", type=int, default=1, help="files that --to xla makes")
    command = commands.add_parser("export")
    command.add_argument("folder", help="or a URL, as s3://bucket/run")
    command.add_argument("out", type=Path, help="the new folder")
    command.add_argument("--step", type=int, help="default: the newest")
    command.add_argument(
        "--dtype", choices=_DTYPES, help="of floating-point tensors; default: as saved"
    )
    command.add_argument("--shard-size", default="5GB", help="of a file, at most (5GB)")
    given = parser.parse_args(arguments)
    try:
        if given.command == "ls":
            return _ls(given.folder)
        if given.command == "show":
            return _show(given.folder, given.step)
        if given.command == "verify":
            return _verify(given.folder, given.step)
        if given.command == "export":
            return _export(given)
        return _convert(given)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


def _ls(folder: str) -> int:
    store = store_of(folder)
    for step in store.steps():
        manifest = read_manifest(store, step)
        size = sum(length for length, _ in manifest.files.values())
        optimizer = "with" if manifest.has_optimizer else "without"
        metric = "" if manifest.metric is None else f"  metric {manifest.metric:g}"
        about = f"{manifest.ranks} ranks  {optimizer} optimizer{metric}"
        print(f"{step:>10}  {size:>15,} bytes  {about}")
    for step, why in store.replaced().items():
        print(f"replaced: step {step}, {why}")
    for name in store.unfinished():
        print(f"half-done: {name}")
    return 0


def _show(folder: str, step: int | None) -> int:
    store = store_of(folder)
    manifest = read_manifest(store, step)
    metadata = Reader(items_of(store, manifest)).read_metadata()
    for name, about in sorted(metadata.state_dict_metadata.items()):
        if isinstance(about, TensorStorageMetadata):
            dtype = str(about.properties.dtype).removeprefix("torch.")
            print(f"{name}  {tuple(about.size)}  {dtype}")
        else:
            print(f"{name}  a value")
    return 0


def _verify(folder: str, step: int | None) -> int:
    with _shown(f"verify {folder}") as progress:
        wrong = verify(folder, step, progress=progress)
    for line in wrong:
        print(line)
    if not wrong:
        checked = steps(folder) if step is None else [step]
        print(f"{len(checked)} steps, every byte as it was saved")
    return 1 if wrong else 0


def _convert(given: argparse.Namespace) -> int:
    with _shown(f"convert {given.target}") as progress:
        found = convert(
            given.source,
            given.target,
            from_kind=given.from_kind,
            to_kind=given.to_kind,
            step=given.step,
            ranks=given.ranks,
            progress=progress,
        )
    print(f"{found.from_kind} -> {found.to_kind}: {given.target}")
    if found.left:
        print(f"not in {found.to_kind}: {', '.join(found.left)}")
    return 0


def _export(given: argparse.Namespace) -> int:
    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    with _shown(f"export {given.out}") as progress:
        found = export(
            given.out,
            given.folder,
            step=given.step,
            dtype=dtype,
            shard_size=given.shard_size,
            progress=progress,
        )
    print(f"{given.out}: {len(found.files)} files, {found.nbytes:,} bytes")
    return 0


@contextmanager
def _shown(title: str) -> Iterator[Progress]:
    """A bar where rich is installed, else a line at each tenth; on stderr."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield _lines(title)
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> Progress:
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        tenth = 10 * done // max(1, total)
        if tenth > said:
            said = tenth
            print(f"{title}: {done:,} of {total:,} bytes", file=sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    sys.exit(main())
