"""`fsdp2 checkpoint`: folders of steps, on a disk or at a URL such as s3://bucket/run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2.command.options import DONE, PROBLEM, Parser, complain, step, subparsers
from fsdp2.command.output import ProgressLine, tell

if TYPE_CHECKING:
    from fsdp2.checkpoint.folder import Manifest

PROG = "fsdp2 checkpoint"

SUMMARY = "manage checkpoints"

COMMANDS = {
    "ls": "list steps with their sizes, replaced steps, and unfinished saves",
    "show": "list names, shapes and dtypes of a step",
    "verify": "read every byte, and list the files that have changed since the save",
    "export": "write a step as a new folder of safetensors files, for Hugging Face's libraries",
    "convert": "convert a checkpoint to another format, one tensor at a time",
    "rm": "remove steps, or unfinished saves; asks first",
}

KINDS = ("steps", "dcp", "torch", "fsdp1", "safetensors")
"""The kinds of `convert`; a test compares them with `fsdp2.checkpoint.converting`."""

DTYPES = ("float32", "float16", "bfloat16", "float64")


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 done, 1 something there is not what was saved, 2 wrong usage, no checkpoint."""
    given = parser().parse_args(arguments)
    from fsdp2.core.errors import CheckpointError

    commands = {"ls": _ls, "show": _show, "verify": _verify, "rm": _rm}
    commands |= {"export": _export, "convert": _convert}
    try:
        return commands[given.command](given)
    except (CheckpointError, OSError) as error:
        return complain(f"{PROG} {given.command}", error)


def parser() -> Parser:
    """The options of `fsdp2 checkpoint`."""
    made = Parser(PROG, "Folders of steps that fsdp2.checkpoint.save wrote.")
    below = subparsers(made, COMMANDS)
    for name in ("ls", "show", "verify", "rm", "export"):
        text = "the folder passed to save(), or a URL such as s3://bucket/run"
        below[name].add_argument("folder", metavar="FOLDER", help=text)
    below["show"].add_argument("--step", type=step, help="the step (the newest)")
    below["verify"].add_argument("--step", type=step, help="the step (all of them)")
    add = below["export"].add_argument
    add("out", type=Path, metavar="OUT", help="the new folder")
    add("--step", type=step, help="the step (the newest)")
    add("--dtype", choices=DTYPES, help="dtype of floating-point tensors (as saved)")
    add("--shard-size", default="5GB", metavar="SIZE", help="maximum size of one file (5GB)")
    add = below["convert"].add_argument
    add("source", metavar="SOURCE", help="a file, a folder, or a pattern of the ranks' files")
    add("target", type=Path, metavar="TARGET", help="the file or folder to create")
    add("--from", dest="from_kind", choices=KINDS, help="the source's kind (default: recognized)")
    add("--to", dest="to_kind", choices=KINDS, help="the target's kind (default: by its name)")
    add("--step", type=step, help="the step of the source, or the step to create")
    text = "prefix to remove from names, such as DDP's 'module.' (none)"
    add("--strip-prefix", default="", metavar="PREFIX", help=text)
    add = below["rm"].add_argument
    chosen = below["rm"].add_mutually_exclusive_group(required=True)
    text = "this step; repeat the option for several steps"
    chosen.add_argument("--step", type=step, action="append", help=text)
    chosen.add_argument(
        "--unfinished", action="store_true", help="the data that crashes left unfinished"
    )
    add("--yes", action="store_true", help="do not ask")
    return made


# ---- looking


def _ls(given: argparse.Namespace) -> int:
    from fsdp2.checkpoint.folder import read_manifest, store_of
    from fsdp2.core.errors import CheckpointError
    from fsdp2.tracing.summaries import table

    steps, broken = [], {}
    with ProgressLine(f"ls {given.folder}"):
        store = store_of(given.folder)
        replaced, unfinished, known = store.replaced(), store.unfinished(), store.steps()
        if not (known or replaced or unfinished):
            read_manifest(store, None)  # raises: it knows what to say
        for number in known:
            try:
                steps.append(read_manifest(store, number))
            except CheckpointError as error:
                broken[number] = str(error)
    code = PROBLEM if broken else DONE
    others = {"replaced": replaced, "unfinished": unfinished}
    facts = {"steps": list(map(_facts, steps)), "broken": broken, **others}
    head = ["step", "size", "files", "ranks", "optimizer", "metric"]
    lines = table(head, list(map(_row, steps))) if steps else []
    for what, found in (("broken", broken), ("replaced", replaced)):
        lines += [f"{what}: step {number}, {why}" for number, why in found.items()]
    lines += [f"unfinished: {name}" for name in unfinished]
    tell(given.json, facts, "\n".join(lines))
    return code


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "step": manifest.step,
        "bytes": _size(manifest),
        "files": len(manifest.files),
        "ranks": manifest.ranks,
        "optimizer": manifest.has_optimizer,
        "metric": manifest.metric,
        "torch": manifest.torch,
    }


def _row(manifest: Manifest) -> list[str]:
    from fsdp2.tracing.summaries import amount

    return [
        *(str(manifest.step), amount(_size(manifest)), str(len(manifest.files))),
        *(str(manifest.ranks), "yes" if manifest.has_optimizer else "no"),
        "-" if manifest.metric is None else f"{manifest.metric:g}",
    ]


def _size(manifest: Manifest) -> int:
    return sum(length for length, _ in manifest.files.values())


def _show(given: argparse.Namespace) -> int:
    with ProgressLine(f"show {given.folder}"):
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from fsdp2.checkpoint.folder import items_of, read_manifest, store_of
        from fsdp2.checkpoint.items import read_index
        from fsdp2.tracing.summaries import table

        store = store_of(given.folder)
        manifest = read_manifest(store, given.step)
        metadata = read_index(items_of(store, manifest)).state_dict_metadata
    tensors = {
        name: (tuple(about.size), str(about.properties.dtype).removeprefix("torch."))
        for name, about in sorted(metadata.items())
        if isinstance(about, TensorStorageMetadata)
    }
    others = sorted(metadata.keys() - tensors.keys())
    told = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in tensors.items()}
    facts = {"step": manifest.step, "tensors": told, "values": others}
    rows = [[name, str(shape), dtype] for name, (shape, dtype) in tensors.items()]
    rows += [[name, "-", "a value"] for name in others]
    tell(given.json, facts, "\n".join(table(["name", "shape", "dtype"], sorted(rows), left=3)))
    return DONE


def _verify(given: argparse.Namespace) -> int:
    from fsdp2.checkpoint.folder import read_manifest, steps, store_of, verify

    checked = steps(given.folder) if given.step is None else [given.step]
    if not checked:
        read_manifest(store_of(given.folder), None)  # raises: it knows what to say
    with ProgressLine(f"verify {given.folder}") as line:
        wrong = verify(given.folder, given.step, progress=line.bytes)
    what = "1 step" if len(checked) == 1 else f"{len(checked)} steps"
    text = "\n".join(wrong) or f"{what}, every byte is unchanged"
    tell(given.json, {"steps": checked, "wrong": wrong}, text)
    return PROBLEM if wrong else DONE


# ---- making


def _export(given: argparse.Namespace) -> int:
    import torch

    from fsdp2.checkpoint.exporting import export
    from fsdp2.tracing.summaries import amount

    with ProgressLine(f"export {given.out}") as line:
        found = export(
            given.out,
            given.folder,
            step=given.step,
            dtype=None if given.dtype is None else getattr(torch, given.dtype),
            shard_size=given.shard_size,
            progress=line.bytes,
        )
    files = "1 file" if len(found.files) == 1 else f"{len(found.files)} files"
    tell(given.json, found, f"{given.out}: {files}, {amount(found.nbytes)}")
    return DONE


def _convert(given: argparse.Namespace) -> int:
    from fsdp2.checkpoint.converting import convert

    with ProgressLine(f"convert {given.target}") as line:
        found = convert(
            given.source,
            given.target,
            from_kind=given.from_kind,
            to_kind=given.to_kind,
            step=given.step,
            strip_prefix=given.strip_prefix,
            progress=line.bytes,
        )
    lines = [f"{found.from_kind} -> {found.to_kind}: {given.target}"]
    if found.left:
        lines.append(f"not in {found.to_kind}: {', '.join(found.left)}")
    tell(given.json, found, "\n".join(lines))
    return DONE


# ---- removing


def _rm(given: argparse.Namespace) -> int:
    from fsdp2.checkpoint.folder import remove, store_of

    store = store_of(given.folder)
    doomed = store.unfinished() if given.unfinished else _checked(given)
    if not doomed:
        return complain(f"{PROG} rm", f"'{store}' has no unfinished data")
    if not given.yes and not _asked(f"remove {', '.join(map(str, doomed))} of '{store}'"):
        return complain(f"{PROG} rm", "nothing was removed; pass --yes to remove without asking")
    gone: list[str] = []
    with ProgressLine(f"rm {given.folder}") as line:
        for each in [None] if given.unfinished else given.step:
            gone += remove(given.folder, each)
            line.say(gone[-1])
    tell(given.json, {"removed": gone}, "\n".join(f"removed {name}" for name in gone))
    return DONE


def _checked(given: argparse.Namespace) -> list[str]:
    """The steps that are named, each with its size; all of them are there, or none goes."""
    from fsdp2.checkpoint.folder import read_manifest, store_of
    from fsdp2.tracing.summaries import amount

    found = [read_manifest(store_of(given.folder), number) for number in given.step]
    return [f"step {each.step} ({amount(_size(each))})" for each in found]


def _asked(what: str) -> bool:
    """Ask at the terminal; ``False`` without one."""
    if not sys.stdin.isatty():
        return False
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
