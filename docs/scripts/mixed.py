import os

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard

DIM = 64


class Norm(nn.LayerNorm):
    """Computes in fp32, with fp32 weights, and returns the dtype of its input."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            Norm(DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def say(*words):
    if dist.get_rank() == 0:
        print(*words)


def train(dtype, init_scale):
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(
        *(Block() for _ in range(2)), nn.Linear(DIM, 8)
    ).to(device)
    norms = {
        p
        for m in model.modules()
        if isinstance(m, Norm)
        for p in m.parameters()
    }
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,  # all-gather, forward and backward
        reduce_dtype=torch.float32,  # reduce-scatter
        param_dtype_override_fn=lambda param: (
            param.dtype if param in norms else None
        ),
    )
    for block in model[:-1]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=init_scale, enabled=init_scale > 1
    )

    block = model[0]
    block.up.register_forward_hook(
        lambda module, args, out: seen.update(
            up=module.weight.dtype, norm=block.norm.weight.dtype
        )
    )
    seen, scales = {}, []
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(21):
        x = torch.randn(32, DIM, device=device)
        out = model(x)
        # the loss in fp32
        loss = nn.functional.cross_entropy(
            out.float(), x[:, :8].argmax(-1)
        )
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # before the gradients are clipped
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        # skipped on all ranks if a gradient of any rank is not finite
        scaler.step(optimizer)
        scaler.update()
        grad = block.up.weight.grad
        scales.append(scaler.get_scale())
        if step == 0:
            say(f"{dtype}: gathered {seen}, output {out.dtype}")
            say(f"  shard {block.up.weight.dtype}, gradient {grad.dtype}")
        if step % 10 == 0:
            say(f"  step {step:2}  loss {loss.item():.2f}")
        optimizer.zero_grad()
    if init_scale > 1:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, scales)
        say(
            "  log2 of the scale:",
            [int(torch.tensor(scale).log2()) for scale in scales[:6]],
        )
        say(
            "  the same on all ranks:",
            all(each == scales for each in of_ranks),
        )


gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
train(torch.bfloat16, init_scale=1.0)  # the exponents of fp32: no scaling
train(torch.float16, init_scale=2.0**20)  # too large at first
dist.destroy_process_group()
