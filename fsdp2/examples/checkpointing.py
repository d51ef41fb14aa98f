"""A run's checkpoints: a folder of steps of `fsdp2.checkpoint`, each with the state of the run.

    DIR/step-00000050/   one checkpoint; its manifest has the `RunState`

`fsdp2.checkpoint` determines when a step is complete, and removes partly written steps.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import CheckpointError, checkpoint

from .options import Options, UsageError

_FORMAT = 2


@dataclass(frozen=True)
class RunState:
    """The state, besides weights and optimizer, from which a run continues bit for bit."""

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
    optimizer: str = "adamw"
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
            optimizer=options.optimizer,
        )


def find(options: Options, text: str) -> RunState | None:
    """The checkpoint to resume, or None for a fresh run. Raises `UsageError`, creates DIR."""
    try:
        return _find(options, text)
    except OSError as error:
        raise UsageError(f"--checkpoint {options.checkpoint}: {error.strerror}") from error


def _find(options: Options, text: str) -> RunState | None:
    folder = options.checkpoint
    if folder is None:
        return None
    known = checkpoint.steps(folder)
    if known and options.resume:
        state = _read(folder, known[-1])
        _check_resumable(folder, state, options, text)
        return state
    if known:
        raise UsageError(
            f"{folder} already holds a checkpoint: add --resume to continue it, or name another "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--checkpoint {folder} cannot be written to")
    return None


def agreed(found: RunState | None) -> RunState | None:
    """The checkpoint that rank 0 found, on every rank: a shared folder may be older elsewhere."""
    chosen = [found]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


class Saves:
    """The checkpoints that a run makes; every rank does the same.

    If the options request it, the newest one is written while training continues. Inside the
    context, a signal to any rank makes one more checkpoint at the end of a step: the last one.

    Attributes:
        preempted: whether a signal has ended the run before its last step.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self._folder = options.checkpoint
        self._keep = options.keep
        self._beside = options.checkpoint_async
        self._every, self._last = options.checkpoint_every, options.steps
        self._latest: checkpoint.Saving | None = None
        self._preemption = checkpoint.Preemption() if self._folder is not None else None
        self.preempted = False
        self._inside = ExitStack()
        if self._folder is not None and rank == 0:
            checkpoint.remove(self._folder)  # what an attempt that was killed has left half-done

    def __enter__(self) -> Saves:
        if self._preemption is not None:
            self._inside.enter_context(self._preemption)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    def is_due(self, done: int) -> bool:
        """Whether the run is saved after so many steps; every rank asks once per step."""
        if self._preemption is None:
            return False
        is_last = done == self._last
        self.preempted = self._preemption.agreed() and not is_last
        return self.preempted or is_last or done % self._every == 0

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState) -> None:
        """Save one checkpoint; it is complete on return, unless it is asynchronous."""
        assert self._folder is not None
        save = checkpoint.async_save if self._beside else checkpoint.save
        saving = save(
            self._folder, model, optimizer, step=state.step, extra=asdict(state), keep=self._keep
        )
        self._latest = saving if isinstance(saving, checkpoint.Saving) else None

    def finish(self) -> None:
        """Return when all are complete; raise what the newest has failed with."""
        if self._latest is not None:
            self._latest.result()


def load(folder: Path, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer, from what any number of ranks may have saved."""
    checkpoint.load(folder, model, optimizer, step=state.step)


def _read(folder: Path, step: int) -> RunState:
    try:
        return RunState(**checkpoint.read_extra(folder, step))
    except (CheckpointError, TypeError) as error:
        raise UsageError(
            f"--resume: the checkpoint in {folder} cannot be read ({error})"
        ) from error


def _check_resumable(folder: Path, state: RunState, options: Options, text: str) -> None:
    """Options that fix the parameters' shapes and the order of data must be unchanged."""
    path = f"step {state.step} of {folder}"
    now = RunState.of(options, text, state.step, state.first_held_out_loss)
    if state.format != _FORMAT:
        raise UsageError(f"--resume: {path} was written in format {state.format}, not {_FORMAT}")
    if state.model != now.model:
        raise UsageError(
            f"--resume: {path} holds a model of another configuration (preset {state.preset}, "
            f"now {options.preset})"
        )
    if state.optimizer != now.optimizer:
        raise UsageError(
            f"--resume: {path} was trained with --optimizer {state.optimizer}, not {now.optimizer}"
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
