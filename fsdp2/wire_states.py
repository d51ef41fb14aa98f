"""What `set_wire_format` adds to the state of training: residuals of error feedback.

    wire_state(model).state_dict()      "residuals.<parameter>"   what its messages have left out
    wire_state(model).load_state_dict(…)   ── copied, or at zero where ranks or layouts differ

It is no part of ``model.state_dict()``, whose names stay the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules.registry import records_below
from fsdp2.core.names import clean
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.schedule.states import SHARDED


class WireState:
    """The state of a model's wire formats, as `torch.distributed.checkpoint` saves what has state.

    Args:
        model: has the units.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """By ``"residuals.<parameter>"`` what is to be added to the next gradients.

        Each is a DTensor of bf16 [ranks, ranks of the shard axis, n], sharded on dim 0 over all
        ranks of the parameter's mesh: each rank has its own residual, for each rank that it sends
        to. They are views: what is written there is what the next backward adds. Empty where no
        unit has error feedback, or no gradients travel. All ranks call it.
        """
        return {f"residuals.{name}": value for name, value in _residuals(self._model)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what another `state_dict` had.

        Residuals of other ranks, or of other pieces of a parameter, are of no use: those begin at
        zero then, and the first rank warns.

        Args:
            state: by name; what the model has not is ignored.
        """
        own = self.state_dict()
        reset = []
        for name, value in own.items():
            found = state.get(name)
            if found is not None and found.shape == value.shape:
                local_of(value).copy_(local_of(found))
            else:
                local_of(value).zero_()
                reset.append(name)
        if reset and (not dist.is_initialized() or dist.get_rank() == 0):
            warn_of_reset("the state", len(reset), len(own))


def wire_state(model: nn.Module) -> WireState:
    """What a run that sends gradients with error feedback must save to go on as if uninterrupted.

    ``fsdp2.checkpoint.save`` and ``load`` do it by themselves. With torch's:

    Example::

        state = {"model": get_model_state_dict(model), "wire": fsdp2.wire_state(model)}
        torch.distributed.checkpoint.save(state, checkpoint_id="step-100")

    Args:
        model: its units are sharded.
    """
    return WireState(model)


def warn_of_reset(of: str, count: int, all_of_them: int) -> None:
    """Say that residuals begin at zero.

    Args:
        of: what they were to be loaded from.
        count: how many.
        all_of_them: how many the model has.
    """
    warnings.warn(
        f"{of} has no residuals of error feedback for {count} of {all_of_them} parameters as they "
        f"are sharded now, over these ranks and in these formats; they begin at zero",
        stacklevel=3,
    )


def _residuals(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    names = {id(param): clean(name) for name, param in model.named_parameters()}
    for record in records_below(model):
        for group in record.unit.own_groups:
            if not group.options.wire.feedback:
                continue
            if group.state is SHARDED:
                group.bind()
            bound = group.bound
            assert bound is not None
            for reduction in bound.reductions:
                feedback = reduction.transport.feedback
                if feedback is None:
                    continue
                for param, columns in zip(reduction.members, feedback.columns(), strict=True):
                    name = names.get(id(param.sharded)) or names.get(id(param.unsharded))
                    yield name or param.name, _over_all_ranks(param, columns)


def _over_all_ranks(param: ShardedParam, columns: Tensor) -> DTensor:
    assert isinstance(param.sharded, DTensor)
    mesh = param.sharded.device_mesh
    local = columns.unsqueeze(0)
    shape = torch.Size([mesh.size(), *columns.shape])
    stride = (columns.numel(), columns.shape[1], 1)
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
