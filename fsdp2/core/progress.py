"""The progress of this process, and the message for a failed collective.

The message has only the count of optimizer steps, which all-gathers need in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from fsdp2.core.errors import CommunicationError, ShardingStateError, coded


class Counts:
    """Counts of this process, which only grow: a look at one tells whether anything was since.

    Ranks share those of steps and of flags, so that all of them gather or bind again, or none does.

    Attributes:
        steps: how often optimizers may have changed parameters: where their steps begin, and where
            they end. Parameters gathered before are out of date.
        ended_steps: the steps that have ended.
        registrations: of parameters and submodules, except by units.
        flag_changes: of ``requires_grad``. A backward looks at the flags only where some changed
            since the last one: autograd drops the gradient of a parameter that does not require one
            at that moment, whatever it did in forward.
        backwards: those that units have taken part in, and whose end was seen.
        hooks: those that users have registered on sharded parameters.
    """

    steps = ended_steps = registrations = flag_changes = backwards = hooks = 0


class ShardReaders:
    """Readers of shards that run during training; code that writes shards first waits for them:
    each of ``waiting`` returns after it has read, and removes itself.
    """

    waiting: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def finish(cls) -> None:
        """Wait until shards may be written: returns at once without readers."""
        for wait in tuple(cls.waiting):
            wait()


def communication_error(
    operation: str, unit: str, error: RuntimeError
) -> CommunicationError | ShardingStateError:
    """The exception to raise after a collective (``"all-gather"``) of a unit raised ``error``.

    `torch.OutOfMemoryError`, which is also a RuntimeError, is returned unchanged. No frame may keep
    either in a local variable: its traceback references the frame, and would keep gathered memory.
    """
    tracer = running_tracer()
    if tracer is not None:
        return tracing_error(f"unit '{unit}'", tracer)
    backward = torch._C._current_graph_task_id() != -1
    likely = ""
    if re.search("timed? ?out|connection|peer|remote", str(error), re.IGNORECASE):
        likely = ", most likely because another rank has ended, is too late or is at another step"
    return coded(
        CommunicationError,
        "collective-failed",
        f"the {operation} of unit '{unit}' failed in {'backward' if backward else 'forward'}, "
        f"iteration {Counts.ended_steps}{likely}; use fsdp2.debug(check_ranks=True) or "
        f"FSDP2_DEBUG=1 to find the cause: {error}",
    )


@contextmanager
def naming_unit(operation: str, unit: str) -> Iterator[None]:
    """Raise `communication_error` for a collective inside that fails, outside of hot paths."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise communication_error(operation, unit, error) from error


def running_tracer() -> str | None:
    """The function of torch's that records operators now; ``None`` if none does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if proxied is None else "make_fx"


def tracing_error(what: str, tracer: str) -> ShardingStateError:
    """The exception to raise where something failed because ``tracer`` traces it."""
    return coded(
        ShardingStateError,
        "traced",
        f"{what} cannot be traced by {tracer}, because no graph can hold the collectives that "
        f"gather its parameters; trace an unsharded model, and load full weights into it",
    )
