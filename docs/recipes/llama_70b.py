r"""Train Llama 3 70B on 4 nodes of 8 GPUs: HSDP and tensor parallelism 2.

On each node; and on a CPU, in a minute:
torchrun --nnodes 4 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint node0:29500 \
    llama_70b.py --weights Meta-Llama-3-70B --data tokens.bin
torchrun --nproc-per-node 8 llama_70b.py --tiny

The mesh of 32 ranks, (replicate, shard, tp); a letter is one piece of the parameters:

               node 0               node 1               node 2               node 3
               aA bB cC dD          eE fF gG hH          aA bB cC dD          eE fF gG hH
    replicate  0  0  0  0           0  0  0  0           1  1  1  1           1  1  1  1
    shard      0  1  2  3           4  5  6  7           0  1  2  3           4  5  6  7
    tp         01 01 01 01          01 01 01 01          01 01 01 01          01 01 01 01
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--weights", default="weights")
parser.add_argument(
    "--data", default="tokens.bin", help="int32 tokens, as for llama_8b.py"
)
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument(
    "--batch-size",
    type=int,
    default=16,
    help="sequences per step, of all ranks",
)
parser.add_argument("--seq-len", type=int, default=8192)
parser.add_argument(
    "--replicate", type=int, default=2, help="copies of all shards"
)
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.seq_len, args.lr, args.batch_size = 32, 1e-3, 4

gpu = torch.cuda.is_available() and not args.tiny
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)

if args.tiny and rank == 0 and not os.path.exists(args.weights):
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(
        LlamaConfig(**shape, **heads)
    ).save_pretrained(args.weights)
    (torch.arange(4000) ** 2 % 251).int().numpy().tofile(args.data)
dist.barrier()

# tp last: its ranks are neighbors, which exchange activations in every
# layer.
sizes = (
    args.replicate,
    dist.get_world_size() // args.replicate // args.tp,
    args.tp,
)
mesh = init_device_mesh(
    device.type, sizes, mesh_dim_names=("replicate", "shard", "tp")
)
tp, data_mesh = mesh["tp"], mesh["replicate", "shard"]
data_ranks = data_mesh.size()
# ranks of one tp group read the same sequences
data_rank = rank // args.tp


def batches(step):
    """This rank's batches from a step on, of a file that is mapped into memory."""
    tokens = torch.from_file(
        args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32
    )
    # one more: targets are shifted
    rows = tokens.unfold(0, args.seq_len + 1, args.seq_len)
    sampler = DistributedSampler(
        rows, data_ranks, data_rank, seed=0, drop_last=True
    )
    local = args.batch_size // data_ranks
    epoch, skip = divmod(step, len(sampler) // local)
    while True:
        sampler.set_epoch(epoch)
        order = list(sampler)[skip * local :]
        yield from DataLoader(
            rows, local, sampler=order, drop_last=True, pin_memory=gpu
        )
        epoch, skip = epoch + 1, 0


# Between layers, each rank of a tp group has a part of the sequence:
# Shard(1).
split, whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
LAYER = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts=split, desired_input_kwarg_layouts=whole
    ),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}
# the embedding is whole, because the model derives positions from its
# length
REST = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.0": PrepareModuleInput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        use_local_output=True,
    ),
    "model.norm": SequenceParallel(use_local_output=True),
    "lm_head": ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1),
        use_local_output=False,
    ),
}

config = AutoConfig.from_pretrained(args.weights)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
policy = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
parallelize_module(model, tp, REST)
layers = model.model.layers
for i, layer in enumerate(layers):
    parallelize_module(layer, tp, LAYER)
    layers[i] = fsdp2.fully_shard(
        checkpoint_wrapper(layer), mesh=data_mesh, mp_policy=policy
    )
fsdp2.fully_shard(model, mesh=data_mesh, mp_policy=policy)
# each rank reads its own slices
checkpoint.load_pretrained(model, args.weights)

optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=args.lr,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    fused=True,
)
folder = os.path.join(args.out, "steps")
start = (
    checkpoint.load(folder, model, optimizer).step
    if checkpoint.steps(folder)
    else 0
)
for step, tokens in enumerate(
    islice(batches(start), args.steps - start), start + 1
):
    tokens = tokens.to(device, non_blocking=True).long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    # each rank of a tp group has a part of the vocabulary
    with loss_parallel():
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
    norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % (1 if args.tiny else 10) == 0:
        mean = loss.detach().full_tensor() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean:.6f} norm {norm:.2f}")
    if step % 100 == 0 or step == args.steps:
        saving = checkpoint.async_save(
            folder, model, optimizer, step=step, keep=2
        )
if start < args.steps:
    saving.result()
export = os.path.join(args.out, f"export-{args.steps}")
if not os.path.exists(export):
    checkpoint.export(export, model, dtype=torch.bfloat16)
    if rank == 0:
        config.save_pretrained(export)
dist.barrier()
dist.destroy_process_group()
