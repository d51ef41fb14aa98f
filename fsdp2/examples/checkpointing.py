"""A run's checkpoints: a folder of steps of `fsdp2.checkpoint`, each with the facts of the run.

    DIR/step-00000050/   one checkpoint; its ``extra`` has ``alike``, the facts that a resumed run
                         shares: those that fix the shapes of parameters and the order of data

`fsdp2.checkpoint` determines when a step is complete, and removes partly written steps.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint
from fsdp2.errors import CheckpointError

from .flags import UsageError
from .options import Options

Facts = dict[str, object]


def facts_of(options: Options, text: str) -> Facts:
    """The facts of a run of `train_lm`; `text` is `Corpus.fingerprint`."""
    names = ("preset", "lora", "optimizer", "seed", "seq_len", "batch_size")
    return {name: getattr(options, name) for name in names} | {"text": text}


def find(folder: Path | None, resume: bool, alike: Facts) -> int | None:
    """The step to resume, or None for a fresh run. Raises `UsageError`, creates the folder."""
    if folder is None:
        return None
    try:
        known = checkpoint.steps(folder)
        if known and not resume:
            raise UsageError(
                f"{folder} already holds a checkpoint: add --resume to continue it, or name "
                "another folder"
            )
        if known:
            was = checkpoint.read_extra(folder, known[-1])["alike"]
            _check_alike(f"step {known[-1]} of {folder}", was, alike)
            return known[-1]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--checkpoint {folder}: {error.strerror}") from error
    except (CheckpointError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume: the checkpoint in {folder} cannot be read ({error})"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--checkpoint {folder} cannot be written to")
    return None


def _check_alike(path: str, was: Facts, now: Facts) -> None:
    for name, wanted in now.items():
        if was.get(name) != wanted:
            raise UsageError(
                f"--resume: {path} is of a run with another {name} ({was.get(name)}, not "
                f"{wanted}), so it could not be continued"
            )


def load(
    folder: Path, step: int | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> checkpoint.Loaded | None:
    """Load the step that rank 0 has found: a shared folder may be older elsewhere."""
    chosen = [step]
    dist.broadcast_object_list(chosen, src=0)
    return None if chosen[0] is None else checkpoint.load(folder, model, optimizer, step=chosen[0])


class Saves(ExitStack):
    """The checkpoints that a run of `train_lm` makes; every rank does the same.

    If the options request it, the newest one is written while training continues. Inside the
    context, a signal to any rank makes one more checkpoint at the end of a step: the last one.
    `preempted` then says so.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._latest: checkpoint.Saving | None = None
        self._preemption: checkpoint.Preemption | None = None
        self.preempted = False
        if options.checkpoint is not None:
            self._preemption = self.enter_context(checkpoint.Preemption())
            if options.rank == 0:
                checkpoint.remove(options.checkpoint)  # what a killed attempt has left half-done

    def is_due(self, done: int) -> bool:
        """Whether the run is saved after so many steps; every rank asks once per step."""
        if self._preemption is None:
            return False
        is_last = done == self._options.steps
        self.preempted = self._preemption.agreed() and not is_last
        return self.preempted or is_last or done % self._options.checkpoint_every == 0

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: Facts
    ) -> None:
        """Save one checkpoint; it is complete on return, unless it is asynchronous."""
        folder, keep = self._options.checkpoint, self._options.keep
        assert folder is not None
        save = checkpoint.async_save if self._options.checkpoint_async else checkpoint.save
        saving = save(folder, model, optimizer, step=step, extra=extra, keep=keep)
        self._latest = saving if isinstance(saving, checkpoint.Saving) else None

    def finish(self) -> None:
        """Return when all are complete; raise what the newest has failed with."""
        if self._latest is not None:
            self._latest.result()
