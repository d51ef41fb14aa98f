"""How programs written for torch's own FSDP find fsdp2, and what they may ask of it.

identity    what torch's clients recognize: base classes, stand-ins, entries in torch's registries;
            with `wrapped`, all that imports ``torch.distributed.fsdp``
wrapped     the same for torch's FSDP1
installing  `fsdp2.install`, `fsdp2.uninstall`: torch's names, replaced and put back
startup     processes that an installed one starts install, too

``python -m fsdp2.run`` is `fsdp2.run`: `installing`, then the user's script.

`identity` stands on `fsdp2.core` alone, and the public modules of fsdp2 stand on it. `wrapped` is
imported by those who need it; so is `installing`, which stands on all that it installs.
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
