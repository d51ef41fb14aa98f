"""Sharded checkpoints that a crash at any moment leaves whole.

    DIR/latest                 the name of the newest complete checkpoint, replaced atomically
    DIR/step-000050/           one checkpoint: files of torch.distributed.checkpoint
    DIR/step-000050/run.json   where the run stood, and what it may be resumed with (`RunState`)
    DIR/.saving-step-000100/   one being written; swept away at the next save

A checkpoint is written beside the good ones, flushed to disk, renamed, and only then named in
`latest`. All ranks must see the same DIR; one run at a time may save into it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .options import Options, UsageError

KEEP = 2
_LATEST = "latest"
_SAVING = ".saving-"
_FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """What a run must know, besides weights and optimizer, to go on as if never interrupted."""

    step: int  # optimizer steps done
    data_position: int  # sequences consumed; the order itself is a function of (seed, step)
    seed: int
    seq_len: int
    batch_size: int
    preset: str
    model: dict[str, int | float]
    text: str  # Corpus.fingerprint
    first_held_out_loss: float  # nats, before the first step
    lora: int | None = None  # rank of the adapters
    format: int = _FORMAT

    @staticmethod
    def of(options: Options, text: str, step: int, first_held_out_loss: float) -> RunState:
        return RunState(
            step=step,
            data_position=step * options.batch_size,
            seed=options.seed,
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            preset=options.preset,
            model=asdict(options.model),
            text=text,
            first_held_out_loss=first_held_out_loss,
            lora=options.lora,
        )


def find(options: Options, text: str) -> tuple[Path, RunState] | None:
    """The checkpoint to resume from, or None for a fresh run. Raises `UsageError`, creates DIR."""
    try:
        return _find(options, text)
    except OSError as error:
        raise UsageError(f"--checkpoint {options.checkpoint}: {error.strerror}") from error


def _find(options: Options, text: str) -> tuple[Path, RunState] | None:
    folder = options.checkpoint
    if folder is None:
        return None
    if options.resume and (folder / _LATEST).exists():
        path, state = _read_latest(folder)
        _check_resumable(path, state, options, text)
        return path, state
    if (folder / _LATEST).exists():
        raise UsageError(
            f"{folder} already holds a checkpoint: add --resume to continue it, or name another "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--checkpoint {folder} cannot be written to")
    return None


def agreed(found: tuple[Path, RunState] | None) -> tuple[Path, RunState] | None:
    """What rank 0 found, on every rank: a shared folder may show others an older state."""
    chosen = [found]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState, rank: int
) -> None:
    """Write one checkpoint; every rank calls this, and returns once it is complete on all."""
    name = f"step-{state.step:06d}"
    saving = folder / f"{_SAVING}{name}"
    if rank == 0:
        _sweep(folder)
        saving.mkdir()
    dist.barrier()
    writer = FileSystemWriter(saving, sync_files=True)
    dcp_save(_state_dict(model, optimizer), storage_writer=writer)  # returns once all ranks wrote
    if rank == 0:
        _write_durably(saving / "run.json", json.dumps(asdict(state), indent=2) + "\n")
        _publish(folder, saving, name)
        _prune(folder, name)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer from `path`, which any number of ranks may have written."""
    state = _state_dict(model, optimizer)
    dcp_load(state, storage_reader=FileSystemReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _read_latest(folder: Path) -> tuple[Path, RunState]:
    try:
        path = folder / (folder / _LATEST).read_text().strip()
        state = RunState(**json.loads((path / "run.json").read_text()))
        (path / ".metadata").stat()  # the index of torch.distributed.checkpoint
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--resume: the checkpoint in {folder} cannot be read ({error})"
        ) from error
    return path, state


def _check_resumable(path: Path, state: RunState, options: Options, text: str) -> None:
    """What fixes the parameters' shapes and the order of the data must be as it was."""
    now = RunState.of(options, text, state.step, state.first_held_out_loss)
    if state.format != _FORMAT:
        raise UsageError(f"--resume: {path} was written in format {state.format}, not {_FORMAT}")
    if state.model != now.model:
        raise UsageError(
            f"--resume: {path} holds a model of another configuration (preset {state.preset}, "
            f"now {options.preset})"
        )
    if state.lora != now.lora:
        was, wanted = (f"--lora {n}" if n else "no --lora" for n in (state.lora, now.lora))
        raise UsageError(
            f"--resume: {path} was trained with {was}, and this run has {wanted}: not the same "
            "parameters"
        )
    for field, option in (("seed", "seed"), ("seq_len", "seq-len"), ("batch_size", "batch-size")):
        was, wanted = getattr(state, field), getattr(now, field)
        if was != wanted:
            raise UsageError(
                f"--resume: {path} was trained with --{option} {was}, not {wanted}, so its losses "
                "could not be continued"
            )
    if state.text != now.text:
        raise UsageError(f"--resume: {path} was trained on other text than this run would read")
    if state.step > options.steps:
        raise UsageError(
            f"--resume: {path} is already at step {state.step}, beyond --steps {options.steps}"
        )


def _publish(folder: Path, saving: Path, name: str) -> None:
    """Give the complete checkpoint its name, then point `latest` at it."""
    _sync(saving)
    final = folder / name
    if final.exists():
        # Complete but never pointed to: an earlier run was killed just before its last line here.
        shutil.rmtree(final)
    os.rename(saving, final)
    _sync(folder)
    pointer = folder / f"{_SAVING}{_LATEST}"
    _write_durably(pointer, name + "\n")
    os.replace(pointer, folder / _LATEST)
    _sync(folder)


def _prune(folder: Path, newest: str) -> None:
    """Keep the newest `KEEP`. Later steps than `newest` belong to a future that was given up."""
    names = sorted(path.name for path in folder.glob("step-*") if path.is_dir())
    for name in [n for n in names if n > newest] + [n for n in names if n <= newest][:-KEEP]:
        # Renamed first: what bears a checkpoint's name is whole, even while it is being deleted.
        doomed = folder / f"{_SAVING}{name}"
        os.rename(folder / name, doomed)
        shutil.rmtree(doomed)


def _sweep(folder: Path) -> None:
    for leftover in folder.glob(f"{_SAVING}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder's entries (its files' names) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
