"""python -m fsdp2.checkpoint ls|show|verify FOLDER [--step N]
python -m fsdp2.checkpoint convert SOURCE TARGET [--from KIND] [--to KIND] [--step N] [--ranks N]

ls       steps, their sizes, how many ranks have written them, and what is half-done
show     names, shapes and dtypes of a step
verify   reads every byte; says which files are not what was saved, and exits with 1
convert  makes a checkpoint of another kind, a block of a tensor at a time
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint.convert import KINDS, convert
from fsdp2.checkpoint.folder import read_manifest, step_folder, steps, unfinished, verify
from fsdp2.checkpoint.state import Reader
from fsdp2.core.config import CheckpointError

try:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
except ImportError:  # the bar is a convenience
    Progress = None  # type: ignore[assignment,misc]  # asked for before it is used


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp2.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ls", "show", "verify"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--step", type=int, help="default: show the newest, verify all")
    command = commands.add_parser("convert")
    command.add_argument("source", help="a file, a folder, or a pattern of files of ranks")
    command.add_argument("target", type=Path, help="what is made; not there yet")
    command.add_argument("--from", dest="from_kind", choices=KINDS, help="default: recognised")
    command.add_argument("--to", dest="to_kind", choices=KINDS, help="default: by the name")
    command.add_argument("--step", type=int, help="of the source; or to make")
    command.add_argument("--ranks", type=int, default=1, help="files that --to xla makes")
    given = parser.parse_args(arguments)
    try:
        if given.command == "ls":
            return _ls(given.folder)
        if given.command == "show":
            return _show(given.folder, given.step)
        if given.command == "verify":
            return _verify(given.folder, given.step)
        return _convert(given)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


def _ls(folder: Path) -> int:
    for step in steps(folder):
        manifest = read_manifest(folder, step)
        size = sum(length for length, _ in manifest.files.values())
        optimizer = "with" if manifest.has_optimizer else "without"
        print(f"{step:>10}  {size:>15,} bytes  {manifest.ranks} ranks  {optimizer} optimizer")
    for name in unfinished(folder):
        print(f"half-done: {name}")
    return 0


def _show(folder: Path, step: int | None) -> int:
    manifest = read_manifest(folder, step)
    metadata = Reader(step_folder(folder, manifest.step)).read_metadata()
    for name, about in sorted(metadata.state_dict_metadata.items()):
        if isinstance(about, TensorStorageMetadata):
            dtype = str(about.properties.dtype).removeprefix("torch.")
            print(f"{name}  {tuple(about.size)}  {dtype}")
        else:
            print(f"{name}  a value")
    return 0


def _verify(folder: Path, step: int | None) -> int:
    wrong = verify(folder, step)
    for line in wrong:
        print(line)
    if not wrong:
        checked = steps(folder) if step is None else [step]
        print(f"{len(checked)} steps, every byte as it was saved")
    return 1 if wrong else 0


def _convert(given: argparse.Namespace) -> int:
    with _bar() as progress:
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


@contextmanager
def _bar() -> Iterator[Callable[[int, int], object] | None]:
    """Bytes, speed and time on a terminal, where rich is installed."""
    if Progress is None or not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("convert")
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
