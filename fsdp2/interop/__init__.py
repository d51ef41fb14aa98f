"""Interfaces through which programs written for torch's own FSDP find and use fsdp2.

identity    objects that torch's clients recognize: base classes, stand-ins, entries in registries;
            with `wrapped`, the only module that imports ``torch.distributed.fsdp``
wrapped     the same for torch's FSDP1
installing  `fsdp2.install`, `fsdp2.uninstall`: torch's names, replaced and restored
startup     child processes of an installed one install, too

``python -m fsdp2.run`` is `fsdp2.run`: `installing`, then the user's script.

`identity` imports only `fsdp2.core`, and the public modules of fsdp2 import it. `wrapped` is
imported on request, and so is `installing`, which imports everything that it installs.
"""

from fsdp2.interop.identity import (
    TORCHS,
    TORCHS_NAMES,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateStandIn,
    TorchIdentity,
    check_untouched,
    register_with_torch,
    replicated_parameters,
    state_of,
)

__all__ = [
    "TORCHS",
    "TORCHS_NAMES",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "StateStandIn",
    "TorchIdentity",
    "check_untouched",
    "register_with_torch",
    "replicated_parameters",
    "state_of",
]
