"""Make torch's names of FSDP2 and FSDP1 resolve to fsdp2's (decision 9), for frameworks.

    holder of names                                    before    installed    after
    torch.distributed.fsdp                             torch's   ours         torch's
    torch.distributed.fsdp._fully_shard                torch's   ours         torch's
    torch.distributed._composable.fsdp[.fully_shard]   torch's   ours         torch's
    torch.distributed.pipelining.stage, .schedules     torch's   ours         torch's
    torch.distributed.fsdp.fully_sharded_data_parallel torch's   ours         torch's
    torch.distributed.fsdp.sharded_grad_scaler         torch's   ours         torch's
    torch.nn.utils[.clip_grad]                         torch's   ours         torch's

While names are installed, a parameter that is added to a sharded module, and that no unit manages,
is left as it is with a warning; torch leaves it without one. Frameworks reduce its gradients
themselves. Without `install` it is an error.

Processes that are started in the meantime install as well (`fsdp2.run.startup`): otherwise a
launcher that starts ranks from within a script would mix two implementations in one world.

For FSDP1, the wrapper and its gradient scaler are replaced. Strategies, configurations and wrap
policies remain torch's objects, and fsdp2's wrapper takes them: every importer has the same ones.

``torch.nn.utils.clip_grad_norm_`` remains, and computes the norm with `fsdp2.optim.clipping`:
torch's computation hangs if a rank's shard is empty and the order is ``inf``. This also applies to
code that imported the function before.

Two things remain torch's:
  - ``FSDPModule``, the base of fsdp2's class: ``isinstance`` holds for modules that either
    implementation sharded, for code that imported the name at any time.
  - The modules with torch's implementation, so that modules it sharded before continue to work.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch.distributed.checkpoint.state_dict  # noqa: F401  # before: it keeps torch's wrapper

from fsdp2.checks.registered import Unmanaged
from fsdp2.fsdp1 import FullyShardedDataParallel, ShardedGradScaler
from fsdp2.interop import (
    TORCHS_NAMES,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp2.interop.wrapped import WRAPPER_NAMES
from fsdp2.optim.clipping import clip_grads_with_norm_, get_total_norm
from fsdp2.run.startup import install_children, uninstall_children
from fsdp2.sharding.api import fully_shard
from fsdp2.sharding.module import (
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

HOLDERS = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.pipelining.stage",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
)
"""Modules whose names are replaced. One that is imported later finds ours in the first."""

_NORMS: dict[str, object] = {
    name: public
    for public in (clip_grads_with_norm_, get_total_norm)
    for name in (public.__name__, f"_{public.__name__}")
}

OURS: dict[str, object] = _NORMS | {
    public.__name__: public
    for public in (
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
        UnshardHandle,
        GradientReductionHandle,
        MixedPrecisionPolicy,
        OffloadPolicy,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FullyShardedDataParallel,
        ShardedGradScaler,
    )
}

_replaced: dict[tuple[str, str], object] = {}  # (holder, name): what was there


def install() -> None:
    """Replace ``torch.distributed.fsdp.fully_shard`` and related names by fsdp2's, process-wide.

    Frameworks and scripts written for torch's FSDP2 then run on fsdp2 unchanged. Call it on every
    rank, before they import those names; ``python -m fsdp2.run script.py`` does so. Modules that
    are already sharded do not change. A second call has no effect.

    Python processes that this one starts afterwards also install fsdp2, because ``install``
    prepends one of fsdp2's folders to ``PYTHONPATH``. A process with its own ``PYTHONPATH``, or
    without the environment (``python -E``), does not. If only some ranks have fsdp2, they raise at
    the first forward. For workers of Ray, pass ``runtime_env={"worker_process_setup_hook":
    "fsdp2.install"}``.

    Warns:
        UserWarning: modules imported torch's ``fully_shard`` earlier, and still use it; the message
            names them.

    Example::

        import fsdp2

        fsdp2.install()
        from torch.distributed.fsdp import fully_shard  # is fsdp2.fully_shard
    """
    for holder, name in _held_names():
        found = getattr(holder, name)
        if found is not OURS[name]:
            _replaced[holder.__name__, name] = found
            setattr(holder, name, OURS[name])
    Unmanaged.leave = _leave_unmanaged
    install_children()
    missed = _missed()
    if missed:
        warnings.warn(
            f"torch's FSDP was imported before fsdp2.install() by {', '.join(missed)}, which will "
            f"continue to use it; call install() before that import, or start the script with "
            f"python -m fsdp2.run",
            stacklevel=2,
        )


def uninstall() -> None:
    """Undo `install`: restore every name. Modules that fsdp2 has sharded still work.

    Processes that were started in the meantime keep fsdp2.

    Example::

        fsdp2.install()
        from torch.distributed.fsdp import fully_shard  # fsdp2's
        fsdp2.uninstall()
    """
    for holder, name in _held_names():
        if getattr(holder, name) is OURS[name]:  # otherwise other code has replaced it since
            torchs = TORCHS_NAMES.get(name, WRAPPER_NAMES.get(name))
            before = _replaced.get((holder.__name__, name), torchs)
            setattr(holder, name, before)
    _replaced.clear()
    Unmanaged.leave = None
    uninstall_children()


def _leave_unmanaged(name: str) -> None:
    warnings.warn(
        f"parameter '{name}' was added after fully_shard, so that no unit shards it or reduces its "
        f"gradients; unless a framework does, call shard_new_parameters() on the sharded module "
        f"around it",
        stacklevel=2,
    )


def _held_names() -> Iterator[tuple[ModuleType, str]]:
    """Every name of torch, in every holder that has been imported."""
    for path in HOLDERS:
        holder = sys.modules.get(path)
        if holder is not None:
            yield from ((holder, name) for name in OURS if name in vars(holder))


def _missed() -> list[str]:
    """Modules outside torch that hold torch's ``fully_shard`` or its wrapper under any name."""
    torchs = [TORCHS_NAMES["fully_shard"], WRAPPER_NAMES.get("FullyShardedDataParallel")]
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if not name.startswith(("torch.", "fsdp2."))
        and any(
            value is known
            for value in list(getattr(module, "__dict__", {}).values())
            for known in torchs
            if known is not None
        )
    )
