import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.quantization import NF4Tensor
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (
    linear_nf4,
)

from fsdp2 import checkpoint, fully_shard

DIM, RANK, ALPHA = 256, 8, 16


class LoRALinear(nn.Module):
    """A frozen linear layer in 4 bits, and a trained path of a small rank that is added to it."""

    def __init__(self, base):
        super().__init__()
        self.weight = nn.Parameter(
            NF4Tensor.from_tensor(base.weight.detach(), 64, 256), False
        )
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)  # starts as the base

    def forward(self, x):
        return linear_nf4(x, self.weight) + ALPHA / RANK * self.b(
            self.a(x)
        )

    def merged(self):
        """The full weight with the adapter in it, while the layer is gathered."""
        return (
            self.weight.to(torch.float32)
            + ALPHA / RANK * self.b.weight @ self.a.weight
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def kept(params):
    """Bytes of this rank's rows."""
    total = 0
    for param in params:
        local = (
            param.to_local()
            if isinstance(param, DTensor)
            else param.detach()
        )
        if isinstance(local, NF4Tensor):
            parts = (
                local.quantized_data,
                local.quantized_scalers,
                local.quantization_factor,
            )
            total += sum(part.nbytes for part in parts)
        else:
            total += local.nbytes
    return total


gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")


def build():
    # the same weights on every rank; load those of your base here
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(device)
    before = kept(model.parameters())
    for block in model:
        block.up, block.down = (
            LoRALinear(block.up).to(device),
            LoRALinear(block.down).to(device),
        )
        fully_shard(block)
    return fully_shard(model), before


model, before = build()
base = [param for param in model.parameters() if not param.requires_grad]
adapters = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
if dist.get_rank() == 0:
    print(f"base in fp32        {before:>9,} bytes")
    print(f"base in 4 bits      {kept(base):>9,} bytes on this rank")
    print(f"adapters in fp32    {kept(adapters):>9,} bytes on this rank")

torch.manual_seed(1 + dist.get_rank())  # different data on every rank
x = torch.randn(64, DIM, device=device)
for step in range(21):
    loss = (model(x) - x.roll(1, -1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step:2}  loss {loss.item():.3f}")
with torch.no_grad():
    expected = model(x)

# without the base
checkpoint.save("adapters", model, step=21, trainable=True)
second, _ = build()
checkpoint.load("adapters", second)
with torch.no_grad():
    loaded = second(x)

# adapters merged, in fp32
plain = nn.Sequential(*(Block() for _ in range(4))).to(device)
for block, own in zip(model, plain, strict=True):
    block.unshard()
    with torch.no_grad():
        own.up.weight.copy_(block.up.merged())
        own.down.weight.copy_(block.down.merged())
    block.reshard()
if dist.get_rank() == 0:
    files = [
        os.path.join(at, name)
        for at, _, names in os.walk("adapters")
        for name in names
    ]
    print(
        f"checkpoint of adapters: {sum(map(os.path.getsize, files)) / 2**20:.2f} MiB"
    )
    print("adapters loaded over the base:", torch.equal(loaded, expected))
    print("merged model:", torch.allclose(plain(x), expected, atol=1e-3))
dist.destroy_process_group()
