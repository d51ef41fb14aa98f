r"""Train Llama 3 8B of Hugging Face on one node of 8 GPUs.

torchrun --nproc-per-node 8 llama_8b.py \
    --weights Meta-Llama-3-8B --data tokens.bin
torchrun --nproc-per-node 2 llama_8b.py --tiny  # on CPU processes, in seconds

--weights: a folder with config.json and safetensors files, as of
    `hf download meta-llama/Meta-Llama-3-8B`
--data: a file of int32 tokens, without a header, as of
    `numpy.array(ids, dtype="int32").tofile(path)`
"""

import argparse
import math
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--weights", default="weights")
parser.add_argument("--data", default="tokens.bin")
parser.add_argument(
    "--out", default="out", help="folder of checkpoints, and of the export"
)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument(
    "--stop",
    type=int,
    help="end the job at this step; the next one resumes",
)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument(
    "--batch-size",
    type=int,
    default=8,
    help="sequences per step, of all ranks",
)
parser.add_argument("--seq-len", type=int, default=8192)
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


def batches(step):
    """This rank's batches from a step on, in the order of a run that was never stopped."""
    tokens = torch.from_file(
        args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32
    )
    # mapped into memory, not read at once
    rows = tokens.unfold(0, args.seq_len, args.seq_len)
    # shuffles
    sampler = DistributedSampler(rows, ranks, rank, seed=0, drop_last=True)
    local = args.batch_size // ranks
    epoch, skip = divmod(step, len(sampler) // local)
    while True:
        sampler.set_epoch(epoch)
        order = list(sampler)[skip * local :]
        yield from DataLoader(
            rows, local, sampler=order, drop_last=True, pin_memory=gpu
        )
        epoch, skip = epoch + 1, 0


def schedule(step):
    """Factor of the learning rate: warm-up, then a cosine down to a tenth."""
    warm_up = args.steps // 50
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(
        math.pi * (step - warm_up) / (args.steps - warm_up)
    )


# Parameters on meta take no memory; fp32 shards are what the optimizer
# steps.
config = AutoConfig.from_pretrained(args.weights)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.config.use_cache = False
policy = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
layers = model.model.layers
for i, layer in enumerate(layers):
    # recompute, compile, shard: in this order
    layer = checkpoint_wrapper(layer)
    layer.compile(
        fullgraph=True, backend="inductor" if gpu else "aot_eager"
    )
    layers[i] = fsdp2.fully_shard(layer, mp_policy=policy)
fsdp2.fully_shard(model, mp_policy=policy)

# gives memory; each rank reads its own slices
checkpoint.load_pretrained(model, args.weights)

optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=args.lr,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    fused=True,
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
folder, start = os.path.join(args.out, "steps"), 0
if checkpoint.steps(folder):
    found = checkpoint.load(folder, model, optimizer)
    scheduler.load_state_dict(found.extra["scheduler"])
    start = found.step

saving, stop, before = None, args.stop or args.steps, time.perf_counter()
for step, tokens in enumerate(
    islice(batches(start), stop - start), start + 1
):
    tokens = tokens.to(device, non_blocking=True).long()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    # each print waits for the device
    if step % (1 if args.tiny else 10) == 0:
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(
                f"step {step} loss {mean:.6f} norm {norm:.2f} {time.perf_counter() - before:.1f} s"
            )
    # written beside the next steps
    if step % args.save_every == 0 or step == stop:
        extra = {"scheduler": scheduler.state_dict()}
        saving = checkpoint.async_save(
            folder, model, optimizer, step=step, extra=extra, keep=2
        )
if saving:
    saving.result()
export = os.path.join(args.out, f"export-{args.steps}")
if stop == args.steps and not os.path.exists(export):
    checkpoint.export(
        export, model, dtype=torch.bfloat16, shard_size="5GB"
    )
    if rank == 0:
        # and the tokenizer's files, from the folder of the weights
        config.save_pretrained(export)
dist.barrier()
dist.destroy_process_group()
