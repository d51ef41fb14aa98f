"""`save`: written beside, synced, listed with hashes, renamed.

1. every rank    __r_0.distcp   written, hashed, synced        .saving-step-N/
2. rank 0        .metadata      written, synced
3. rank 0        manifest.json  written, synced; the folder synced
4. rank 0        rename         .saving-step-N -> step-N; FOLDER synced: now the step exists
5. rank 0        older steps    removed, where `keep` says so
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.checkpoint import files
from fsdp2.checkpoint.folder import (
    MANIFEST,
    Json,
    Manifest,
    PathLike,
    local_path,
    remove_steps,
    saving_folder,
    step_folder,
    steps,
)
from fsdp2.checkpoint.state import Extra, packed, state_of
from fsdp2.checkpoint.together import is_first, together
from fsdp2.core.config import CheckpointError
from fsdp2.core.device.collectives import rank_and_size

Written = tuple[list[WriteResult], dict[str, tuple[int, str]]]


def save(
    folder: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Extra = None,
    keep: int | None = None,
    rng: bool = False,
) -> Path:
    """Save a step, which exists when it is complete and durable, and not before.

    Every rank of the default process group calls it, with the same arguments; without a process
    group one process does. Returns when the step is complete on all. The files are DCP's.

    Args:
        folder: a folder of steps that all ranks see; made if it is not there.
        model: its parameters and persistent buffers are saved, sharded or not.
        optimizer: over parameters of ``model``. Default ``None``: none is saved.
        step: the number of the step, not negative.
        extra: what else the run needs: None, bool, int, float, str, tensors, and lists, tuples and
            dicts with str keys of them. Rank 0's is saved. Tuples come back as lists.
        keep: how many complete steps stay at most; older ones are removed when this one is
            complete. Default ``None``: all stay.
        rng: whether the states of this rank's random number generators are saved: the CPU's, and
            the current accelerator's. Default ``False``.

    Returns:
        The folder of the step; ``torch.distributed.checkpoint`` alone can load from it.

    Raises:
        CheckpointError: on all ranks alike. Complete steps are as they were.

    Example::

        fsdp2.checkpoint.save("run", model, optimizer, step=100, extra={"lr": 0.1}, keep=3)
    """
    root = Path(folder)
    what = f"save('{root}', step={step})"
    told = together(what, lambda: _checked(root, step, extra, keep))
    if any(other != told[0] for other in told):
        raise CheckpointError(
            f"save() got other steps, folders or keep on other ranks ({told}); pass the same on all"
        )
    _, content, tensors = packed(extra)
    if is_first():
        together(what, lambda: _begin(root, step))
    else:
        together(what, lambda: None)
    planner = DefaultSavePlanner()
    plans = together(what, lambda: _plan(planner, model, optimizer, tensors, rng))
    writer = FileSystemWriter(saving_folder(root, step), sync_files=False)  # closing syncs
    disk = writer.fs = files.DurableFiles()
    whole: list[Metadata] = []
    results = together(what, lambda: _write(planner, writer, disk, plans, whole))
    if is_first():
        facts = (step, content, optimizer is not None)
        together(what, lambda: _commit(root, writer, disk, whole[0], results, facts))
        together(what, lambda: _prune(root, step, keep))
    else:
        together(what, lambda: None)
        together(what, lambda: None)
    return step_folder(root, step)


def _checked(root: Path, step: int, extra: Extra, keep: int | None) -> tuple[str, int, int | None]:
    """What ranks must agree on."""
    local_path(root)
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(
            f"save(step=…) takes a whole number that is not negative, not {step!r}"
        )
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"save(keep=…) takes a number of steps from 1, or None, not {keep!r}")
    wrong = packed(extra)[0]
    if wrong is not None:
        raise CheckpointError(
            f"save(extra=…) has a {wrong}, which cannot be loaded without running code; pass None, "
            f"numbers, strings, tensors, and lists and dicts with str keys of them"
        )
    return str(root), step, keep


def _begin(root: Path, step: int) -> None:
    """An empty folder to write into."""
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"'{root}' is a file; pass a folder")
    if step in steps(root):
        raise CheckpointError(
            f"'{root}' has step {step} already; save another, or call "
            f"fsdp2.checkpoint.remove(folder, {step}) before"
        )
    files.make_folders(root)
    for left in (saving_folder(root, step), step_folder(root, step)):
        if left.exists():
            files.remove_tree(left)
    files.DISK.make_folder(saving_folder(root, step))


def _plan(
    planner: DefaultSavePlanner,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensors: dict[str, torch.Tensor],
    rng: bool,
) -> SavePlan:
    state = state_of(model, optimizer, rng)
    if tensors and is_first():
        state["extra"] = tensors
    planner.set_up_planner(state, is_coordinator=is_first())
    return planner.create_local_plan()


def _write(
    planner: DefaultSavePlanner,
    writer: FileSystemWriter,
    disk: files.DurableFiles,
    plans: list[SavePlan],
    whole: list[Metadata],
) -> Written:
    """This rank's file. Every rank makes the same plan for all."""
    finished, metadata = planner.create_global_plan(plans)
    finished = writer.prepare_global_plan(finished)
    whole.append(metadata)
    mine = planner.finish_plan(finished[rank_and_size()[0]])
    results = writer.write_data(mine, planner).wait() if mine.items else []
    return results, disk.written


def _commit(
    root: Path,
    writer: FileSystemWriter,
    disk: files.DurableFiles,
    metadata: Metadata,
    written: list[Written],
    facts: tuple[int, Json, bool],
) -> None:
    """The index, the manifest, and the one rename."""
    step, content, has_optimizer = facts
    writer.finish(metadata, [results for results, _ in written])
    listed = {name: fact for _, part in written for name, fact in part.items()} | disk.written
    manifest = Manifest(
        step=step,
        ranks=len(written),
        files=dict(sorted(listed.items())),
        extra=content,
        has_optimizer=has_optimizer,
        torch=torch.__version__,
    )
    saving = saving_folder(root, step)
    files.write_durably(saving / MANIFEST, manifest.encoded())
    files.DISK.sync_folder(saving)
    files.DISK.rename(saving, step_folder(root, step))
    files.DISK.sync_folder(root)


def _prune(root: Path, step: int, keep: int | None) -> None:
    """Remove older steps; never the newest, and never the one that was just saved."""
    if keep is not None:
        remove_steps(root, [other for other in steps(root)[:-keep] if other != step])
