"""NVIDIA's megatron-fsdp (PyPI; measured with 0.6.1) as a peer, where it is installed.

    model, on the device ── wrap ──> MegatronFSDP(model), parameters DTensors over (shard, tp of 1)

It takes the whole model at once and is told which classes are units. It knows CUDA alone: on a CPU
its streams and events are stand-ins that do nothing (`STAND_INS`), which costs less than
real ones do, so that its host time there is, if anything, too low. fsdp2 and torch's FSDP2 call
nothing but methods that do nothing there, too.

Its gradients live in buffers of its own, to be zeroed besides `zero_grad`; `wrap` does both in
`model.zero_grad`, as its own `fully_shard_optimizer` does in `optimizer.zero_grad`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import types
import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp2.testing.null_group import null_mesh

PACKAGE = "megatron_fsdp"


def is_installed() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def wrap(model: nn.Module, mixed: bool, world_size: int, device: torch.device) -> nn.Module:
    """Shard a model's blocks and what is left of it, as `fully_shard` on each would.

    Args:
        model: on ``device``, in the compute dtype.
        mixed: keep fp32 parameters for the optimizer and reduce gradients in fp32.
        world_size: ranks of the null group.
        device: where it computes.
    """
    if not is_installed():
        raise ModuleNotFoundError(
            "the variant 'megatron' needs megatron-fsdp: pip install megatron-fsdp"
        )
    if device.type == "cpu":
        _without_cuda()
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # that the device is not CUDA's
    warnings.filterwarnings("ignore", "Transformer Engine and Apex")
    warnings.filterwarnings("ignore", category=FutureWarning)  # c10d's new names, at each call
    fully_shard = importlib.import_module(f"{PACKAGE}.fully_shard")
    buffers = importlib.import_module(f"{PACKAGE}.param_and_grad_buffer")
    precision = importlib.import_module(f"{PACKAGE}.mixed_precision")
    kept = torch.float32 if mixed else None
    # It looks at all ranks' pieces to see that they make a whole: there is one rank alone here.
    with mock.patch.object(buffers, "validate_uneven_dtensor"):
        wrapped = fully_shard.fully_shard_model(
            model,
            device_mesh=null_mesh((world_size, 1), device.type, mesh_dim_names=("shard", "tp")),
            dp_shard_dim="shard",
            tp_dim="tp",
            fsdp_unit_modules=[type(model.blocks[0])],
            device=device,
            mixed_precision_policy=precision.MixedPrecisionPolicy(
                main_params_dtype=kept, main_grads_dtype=kept, grad_comm_dtype=kept
            ),
            preproc_state_dict_for_dcp_ckpt=False,
        )
    wrapped.zero_grad = types.MethodType(_zero_grad, wrapped)
    return wrapped


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    nn.Module.zero_grad(self, set_to_none)
    self.zero_grad_buffer()


class _Idle:
    """Stands for a stream, an event and the context of either: nothing happens."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event or _IDLE

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


_IDLE = _Idle()


STAND_INS: dict[tuple[Any, str], Any] = {
    (torch.cuda, "Stream"): _Idle,
    (torch.cuda, "Event"): _Idle,
    (torch.cuda, "stream"): lambda stream: _IDLE,
    (torch.cuda, "current_stream"): lambda: _IDLE,
    (torch.cuda, "current_device"): lambda: 0,
    (torch.cuda, "synchronize"): lambda: None,
    (torch.cuda, "empty_cache"): lambda: None,
    (torch.Tensor, "record_stream"): lambda self, stream: None,
}
"""What the package calls of CUDA: whose attribute, its name, and what does nothing in its place."""


def _without_cuda() -> None:
    """Replace it, in this process for good: a worker does no more."""
    for (owner, name), stand_in in STAND_INS.items():
        setattr(owner, name, stand_in)
