r"""Train a small Llama from the answers of a large one.

Both models are sharded; one is only evaluated.

torchrun --nproc-per-node 8 distill.py \
    --teacher Meta-Llama-3-8B --student Llama-3.2-1B \
    --data tokens.bin
torchrun --nproc-per-node 2 distill.py --tiny
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument(
    "--teacher", default="teacher", help="folder of weights"
)
parser.add_argument(
    "--student",
    default="student",
    help="folder of weights; the same tokens",
)
parser.add_argument(
    "--data", default="tokens.bin", help="int32 tokens, as for llama_8b.py"
)
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument(
    "--batch-size",
    type=int,
    default=8,
    help="sequences per step, of all ranks",
)
parser.add_argument("--seq-len", type=int, default=4096)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.seq_len, args.lr, args.batch_size = 32, 3e-3, 4

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

if args.tiny and rank == 0 and not os.path.exists(args.data):
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = (
        (args.teacher, {"num_hidden_layers": 3}),
        (args.student, {"num_hidden_layers": 2}),
    )
    for folder, layers in sizes:
        wide = {"initializer_range": 0.2} if folder == args.teacher else {}
        small = LlamaConfig(**shape, **heads, **layers, **wide)
        AutoModelForCausalLM.from_config(small).save_pretrained(folder)
    (torch.arange(4000) ** 2 % 251).int().numpy().tofile(args.data)
dist.barrier()


def load(folder, dtype, trained):
    """A sharded model of its own root: its all-gathers do not depend on the other model's."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(trained).train(trained)
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layer = checkpoint_wrapper(layer) if trained else layer
        layers[i] = fsdp2.fully_shard(layer, mp_policy=policy)
    fsdp2.fully_shard(model, mp_policy=policy)
    checkpoint.load_pretrained(model, folder)
    return model


teacher = load(args.teacher, torch.bfloat16, trained=False)
student = load(args.student, torch.float32, trained=True)
optimizer = torch.optim.AdamW(
    student.parameters(), lr=args.lr, weight_decay=0.1, fused=True
)

# the teacher is not saved: it does not change
folder = os.path.join(args.out, "steps")
start = (
    checkpoint.load(folder, student, optimizer).step
    if checkpoint.steps(folder)
    else 0
)
tokens = torch.from_file(
    args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32
)
rows = tokens.unfold(0, args.seq_len, args.seq_len)


def batch_of(step):
    """This rank's sequences of a step; each epoch has an order of its own."""
    epoch, at = divmod(step - 1, len(rows) // args.batch_size)
    order = torch.randperm(
        len(rows), generator=torch.Generator().manual_seed(epoch)
    )
    chosen = order[at * args.batch_size :][: args.batch_size][rank::ranks]
    return rows[chosen].to(device).long()


for step in range(start + 1, args.steps + 1):
    batch = batch_of(step)
    # no_grad: the teacher keeps nothing for a backward, and its units are
    # resharded at once.
    # Not inference_mode: the loss below saves its outputs for the
    # student's backward.
    with torch.no_grad():
        wanted = teacher(input_ids=batch, use_cache=False).logits.flatten(
            0, 1
        )
        wanted = wanted.float().log_softmax(-1)
    given = student(input_ids=batch, use_cache=False).logits.flatten(0, 1)
    given = given.float().log_softmax(-1)
    loss = F.kl_div(given, wanted, log_target=True, reduction="batchmean")
    loss.backward()
    fsdp2.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % (1 if args.tiny else 10) == 0:
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean:.6f}")
    if step % 100 == 0 or step == args.steps:
        checkpoint.save(folder, student, optimizer, step=step, keep=2)

export = os.path.join(args.out, f"export-{args.steps}")
if not os.path.exists(export):
    checkpoint.export(export, student, dtype=torch.bfloat16)
    if rank == 0:
        student.config.save_pretrained(export)
dist.barrier()
dist.destroy_process_group()
