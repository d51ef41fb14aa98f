"""verl's own FSDP2 helpers (verl/utils/fsdp_utils.py), without Ray. Arguments: cases.

verl's packages import Ray and more when they are imported: those above the helpers are entered bare
here, and what the helpers take of `verl.utils.model`, for adapters alone, is left out.
"""

import importlib.util
import sys
from types import ModuleType

import common
import torch
import torch.distributed as dist
from common import language_loss, rank, report_classes, run, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

for name in ("verl", "verl.utils"):
    found = importlib.util.find_spec(name)
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package
sys.modules["verl.utils.model"] = adapters = ModuleType("verl.utils.model")
adapters.check_exclude_modules = adapters.check_target_modules = None

from verl.utils import fsdp_utils  # noqa: E402

fsdp_utils.get_device_id = lambda: "cpu"  # it looks for accelerators alone

STEPS = 3


def load(case):
    """As verl's workers: rank 0 has the weights, which all shards are loaded from."""
    model = tiny_llama()
    full = model.state_dict() if rank() == 0 else {}
    if rank() > 0:
        model.to("meta")
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    options = {"mesh": mesh, "offload_policy": None, "reshard_after_forward": True}
    if case == "mixed":
        options["mp_policy"] = policy
    if case == "placed":
        options["shard_placement_fn"] = fsdp_utils.get_shard_placement_fn(dist.get_world_size())
    fsdp_utils.apply_fsdp2(model, options, {"forward_prefetch": case == "prefetched"})
    fsdp_utils.fsdp2_load_full_state_dict(model, full, mesh, None)
    return model


def train(case, model, optimizer, steps):
    def clip(parameters):
        return fsdp_utils.fsdp2_clip_grad_norm_(parameters, 0.5)

    common.train(case, model, optimizer, steps, clip=clip)


def main(case):
    model = load(case)
    report_classes(case, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(case, model, optimizer, range(STEPS))
    if case == "resharding":
        for value in (True, False, True):
            fsdp_utils.set_reshard_after_forward(model, value)
            loss = language_loss(model, 0)
            sharded = all(hasattr(param, "placements") for param in model.parameters())
            assert sharded is value, f"{sharded} after set_reshard_after_forward({value})"
            loss.backward()
            optimizer.zero_grad()
            train(case, model, optimizer, range(1))
    fsdp_utils.offload_fsdp2_model_to_cpu(model, empty_cache=False)
    fsdp_utils.load_fsdp2_model_to_gpu(model)
    train(case, model, optimizer, range(STEPS, STEPS + 1))


dist.init_process_group("gloo")
run(main)
