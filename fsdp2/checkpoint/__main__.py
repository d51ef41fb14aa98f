"""python -m fsdp2.checkpoint ls|show|verify FOLDER [--step N]

ls      steps, their sizes, how many ranks have written them, and what is half-done
show    names, shapes and dtypes of a step
verify  reads every byte; says which files are not what was saved, and exits with 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint.folder import read_manifest, step_folder, steps, unfinished, verify
from fsdp2.checkpoint.state import Reader
from fsdp2.core.config import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp2.checkpoint")
    parser.add_argument("command", choices=["ls", "show", "verify"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, help="default: show the newest, verify all")
    given = parser.parse_args(arguments)
    try:
        if given.command == "ls":
            return _ls(given.folder)
        if given.command == "show":
            return _show(given.folder, given.step)
        return _verify(given.folder, given.step)
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


if __name__ == "__main__":
    sys.exit(main())
