r"""Train Llama 3.1 8B on 131,072 tokens: 8 GPUs split each sequence.

torchrun --nproc-per-node 8 long_context.py \
    --weights Llama-3.1-8B --data tokens.bin
torchrun --nproc-per-node 4 long_context.py --tiny --context 2

Outside of attention, a rank has a part of the tokens, and all heads. For
attention, an all-to-all gives it all tokens of a part of the heads
(Ulysses, arXiv 2309.14509), and another one takes them back:

    rank 0   tokens 0 1   heads a b          tokens 0 1 2 3   heads a
    rank 1   tokens 2 3   heads a b    ->    tokens 0 1 2 3   heads b
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
)

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
    default=1,
    help="sequences per step, of all ranks",
)
parser.add_argument("--seq-len", type=int, default=131072)
parser.add_argument(
    "--context", type=int, default=8, help="ranks that split a sequence"
)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.seq_len, args.lr, args.batch_size = 64, 1e-3, 4

gpu = torch.cuda.is_available() and not args.tiny
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
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

parts, data_ranks = args.context, ranks // args.context
mesh = init_device_mesh(
    device.type, (data_ranks, parts), mesh_dim_names=("dp", "context")
)
group = mesh["context"]
data_rank, part = mesh.get_local_rank("dp"), mesh.get_local_rank("context")


def exchange(x, split, join):
    """Send the parts of one dim to the ranks of the context, and join theirs along another."""
    x = x.unflatten(split, (parts, -1)).movedim(split, 0).contiguous()
    x = all_to_all_single_autograd(x, None, None, group)
    return x.movedim(0, join).flatten(join, join + 1)


def attention(
    module, query, key, value, mask, scaling, dropout=0.0, **options
):
    query, key, value = (
        exchange(x, split=1, join=2) for x in (query, key, value)
    )
    mixed = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return exchange(mixed, split=2, join=1).transpose(
        1, 2
    ).contiguous(), None


AttentionInterface.register("ulysses", attention)
config = AutoConfig.from_pretrained(args.weights)
assert config.num_key_value_heads % parts == 0, (
    "--context must divide the heads of keys and values"
)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="ulysses"
    )
policy = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
layers = model.model.layers
# without mesh=: sharded over all ranks, dp and context
for i, layer in enumerate(layers):
    layers[i] = fsdp2.fully_shard(
        checkpoint_wrapper(layer), mp_policy=policy
    )
fsdp2.fully_shard(model, mp_policy=policy)
checkpoint.load_pretrained(model, args.weights)

optimizer = torch.optim.AdamW(
    model.parameters(), lr=args.lr, weight_decay=0.1, fused=True
)
folder = os.path.join(args.out, "steps")
start = (
    checkpoint.load(folder, model, optimizer).step
    if checkpoint.steps(folder)
    else 0
)
tokens = torch.from_file(
    args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32
)
rows = tokens.unfold(0, args.seq_len + 1, args.seq_len)


def batch_of(step):
    """Sequences of this rank's dp; ranks of one context have the same."""
    epoch, at = divmod(step - 1, len(rows) // args.batch_size)
    order = torch.randperm(
        len(rows), generator=torch.Generator().manual_seed(epoch)
    )
    chosen = order[at * args.batch_size :][: args.batch_size][
        data_rank::data_ranks
    ]
    return rows[chosen].to(device).long()


positions = torch.arange(args.seq_len, device=device).chunk(parts)[part][
    None
]
for step in range(start + 1, args.steps + 1):
    batch = batch_of(step)
    inputs, targets = (
        x.chunk(parts, 1)[part] for x in (batch[:, :-1], batch[:, 1:])
    )
    logits = model(
        input_ids=inputs, position_ids=positions, use_cache=False
    ).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    # the mean over all ranks is the mean over all tokens: parts are equal
    loss.backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % (1 if args.tiny else 10) == 0:
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean:.6f}")
    if step % 100 == 0 or step == args.steps:
        checkpoint.save(folder, model, optimizer, step=step, keep=2)
dist.destroy_process_group()
