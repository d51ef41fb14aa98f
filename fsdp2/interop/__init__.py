"""Objects by which programs written for torch's own FSDP recognize fsdp2's.

identity    base classes, stand-ins, entries in registries; with `wrapped`, the only module that
            imports ``torch.distributed.fsdp``
wrapped     the same for torch's FSDP1

`identity` imports only `fsdp2.core`, and the public modules of fsdp2 import it. `wrapped` is
imported on request.
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
