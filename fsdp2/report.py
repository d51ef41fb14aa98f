"""What each group of a sharded model holds: a table for people and for tests.

model ──> [GroupReport("(root)", …), GroupReport("blocks.0", …), …]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fsdp2.core.group import ParamGroup
from fsdp2.core.hooks import hooks_of


@dataclass(frozen=True)
class GroupReport:
    """One parameter group.

    Attributes:
        name: name of its module below the model, "(root)" for the model itself.
        num_params: number of parameters.
        numel: number of elements, over all ranks.
        shard_bytes: bytes of its flat shard on one rank, padding included.
        unsharded_bytes: bytes while it is gathered, padding included.
        padding_bytes: how many of ``shard_bytes`` hold no parameter, on average over ranks.
        transport: how it is gathered: "coalesced", "packed", "local", "extension" (tensor
            subclasses with all-gather hooks, whose bytes are not counted), or several with "+".
        dims: shard dims of the parameters that are not sharded on dim 0 alone, by their name in the
            model; ``shard_placement_fn`` chose them, or dim 0 would have padded too much.
    """

    name: str
    num_params: int
    numel: int
    shard_bytes: int
    unsharded_bytes: int
    padding_bytes: int
    transport: str
    dims: Mapping[str, tuple[int, ...]]


def group_reports(model: nn.Module) -> list[GroupReport]:
    """The groups of every sharded module in ``model``, in the order of registration.

    Args:
        model: a module, sharded or with sharded modules in it.

    Example::

        for group in group_reports(model):
            print(group.name, group.shard_bytes, group.transport)
    """
    names: dict[ParamGroup, list[str]] = {}
    for name, module in model.named_modules():
        hooks = hooks_of(module)
        for group in hooks.unit.groups if hooks is not None else ():
            names.setdefault(group, []).append(name or "(root)")
    params = {param: name for name, param in model.named_parameters()}
    return [_report(group, ", ".join(where), params) for group, where in names.items()]


def _report(group: ParamGroup, name: str, params: Mapping[nn.Parameter, str]) -> GroupReport:
    layout = group.layout
    assert layout is not None
    return GroupReport(
        name=name,
        num_params=len(group.params),
        numel=sum(slot.numel for slot in layout.slots),
        shard_bytes=layout.shard_bytes,
        unsharded_bytes=layout.gathered_bytes,
        padding_bytes=layout.padding_bytes,
        transport=layout.transports,
        dims={
            params.get(param.sharded, param.name): param.cut.dims
            for param in group.params
            if param.cut.dims != (0,)
        },
    )
