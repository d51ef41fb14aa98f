"""NeMo Automodel's own parallelizer, per-parameter dtypes and pipeline hooks. Arguments: cases."""

import torch
import torch.distributed as dist
from common import language_loss, report_classes, run, tiny_llama, train
from nemo_automodel.components.distributed.parallelizer import apply_fsdp2_sharding_recursively
from nemo_automodel.components.distributed.parallelizer_utils import fully_shard_by_dtype
from nemo_automodel.components.moe.fsdp_mixin import (
    _configure_fsdp_module,
    _run_post_backward_hooks,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def sharded(case):
    model = tiny_llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    if case == "by_dtype":  # one projection computes in float32, all else in bfloat16
        for layer in model.model.layers:
            projection = layer.mlp.down_proj  # such a module casts its own inputs
            projection.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            projection.register_forward_hook(lambda _, args, output: output.bfloat16())
            fully_shard_by_dtype(layer, mesh, policy, None, ("down_proj",))
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        apply_fsdp2_sharding_recursively(model, mesh, policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    head = model._get_fsdp_state()._mp_policy.param_dtype  # as NeMo's losses ask
    assert head is torch.bfloat16
    return model


def by_hand(model, last):
    _configure_fsdp_module(
        model,
        is_last_backward=last,
        reshard_after_backward=last,
        requires_gradient_sync=last,
    )


def main(case):
    """``hooks``: gradients are reduced by hand at the end, as NeMo does in a pipeline's stage."""
    model = sharded(case)
    report_classes(case, model)
    assert isinstance(model.model.layers[0], FSDPModule)

    def loss_of(model, step):
        if case == "hooks":
            by_hand(model, last=False)
        return language_loss(model, step)

    def clip(parameters):
        if case == "hooks":
            by_hand(model, last=True)
            _run_post_backward_hooks(model)()
        return torch.nn.utils.clip_grad_norm_(parameters, 0.5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(case, model, optimizer, range(3), loss_of=loss_of, clip=clip, micros=2)


dist.init_process_group("gloo")
run(main)
