"""Two steps of ZeRO-3, its checkpoint, and what that should hold. Argument: a folder."""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))

from train import make_model  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler; gloo does
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = make_model()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(2):
    generator = torch.Generator().manual_seed(step)
    loss = engine(torch.randn(4, 6, generator=generator)).square().sum()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(str(folder / "old_checkpoint"))

expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
for name, param in model.named_parameters():
    expected[name] = safe_get_full_fp32_param(param).detach()
    for key in ("exp_avg", "exp_avg_sq"):
        expected[f"{name}:{key}"] = safe_get_full_optimizer_state(param, key)
    expected[f"{name}:step"] = torch.tensor(2.0)
if dist.get_rank() == 0:
    torch.save(expected, folder / "expected.pt")
dist.barrier()
dist.destroy_process_group()
