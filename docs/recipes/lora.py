r"""Train LoRA adapters of peft on Llama 3 8B.

--nf4 stores the base in 4 bits (QLoRA).

torchrun --nproc-per-node 8 lora.py \
    --weights Meta-Llama-3-8B --data tokens.bin [--nf4]
torchrun --nproc-per-node 2 lora.py --tiny [--nf4]
"""

import argparse
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument(
    "--weights", default="weights", help="folder of the base"
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
parser.add_argument("--seq-len", type=int, default=8192)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--nf4", action="store_true", help="needs torchao")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.seq_len, args.lr, args.batch_size = 32, 1e-2, 4

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


def to_4_bits(layer, name):
    """Load one whole layer and quantize its matrices: NF4 must be made before it is sharded."""
    from torchao.quantization import NF4Tensor

    layer.to_empty(device=device)
    checkpoint.load_pretrained(
        layer, args.weights, names=lambda key: name + key, strict=False
    )
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            weight = NF4Tensor.from_tensor(
                module.weight.detach(), 64, 16 if args.tiny else 256
            )
            module.weight = nn.Parameter(weight, requires_grad=False)


# 1. The base: frozen, in bf16, and sharded before its weights are read.
config = AutoConfig.from_pretrained(args.weights)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.requires_grad_(False)
model.gradient_checkpointing_enable({"use_reentrant": False})
policy = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
layers, done = model.model.layers, set()
for i, layer in enumerate(layers):
    if args.nf4:
        to_4_bits(layer, f"model.layers.{i}.")
        done |= {f"model.layers.{i}.{name}" for name in layer.state_dict()}
    fsdp2.fully_shard(layer, mp_policy=policy)
fsdp2.fully_shard(model, mp_policy=policy)
names = (
    {"names": lambda name: None if name in done else name, "strict": False}
    if done
    else {}
)
checkpoint.load_pretrained(model, args.weights, **names)

# 2. The adapters, in fp32: peft adds them to the sharded base, and each
# layer's unit takes its own.
torch.manual_seed(0)  # the same adapters on every rank
adapted = get_peft_model(
    model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
)
for layer in layers:
    layer.shard_new_parameters()
adapters = {
    name: param
    for name, param in adapted.named_parameters()
    if param.requires_grad
}
optimizer = torch.optim.AdamW(adapters.values(), lr=args.lr, fused=True)

# 3. Train. A checkpoint has adapters and their states, without the base.
folder = os.path.join(args.out, "steps")
start = (
    checkpoint.load(folder, adapted, optimizer).step
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
    loss = adapted(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    fsdp2.clip_grad_norm_(adapters.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % (1 if args.tiny else 10) == 0:
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean:.6f}")
    if step % 100 == 0 or step == args.steps:
        checkpoint.save(
            folder, adapted, optimizer, step=step, trainable=True, keep=2
        )

# 4. The adapters, as peft saves them; all ranks gather, rank 0 writes.
state = {
    name: param.full_tensor().cpu() for name, param in adapters.items()
}
if rank == 0:
    adapter = os.path.join(args.out, f"adapter-{args.steps}")
    adapted.save_pretrained(
        adapter, state_dict=state, save_embedding_layers=False
    )

# 5. The base with the adapters in it, one layer at a time, as files for
# from_pretrained.
merged = os.path.join(args.out, f"merged-{args.steps}")
# With NF4, merge into the bf16 base, with peft: see the page.
if not args.nf4 and not os.path.exists(merged):
    for layer in layers:
        with fsdp2.gathered(layer), torch.no_grad():
            for module in layer.modules():
                if isinstance(module, LoraLayer):
                    module.merge()
    checkpoint.export(
        merged,
        model,
        names=lambda name: (
            None if "lora_" in name else name.replace(".base_layer", "")
        ),
    )
    if rank == 0:
        config.save_pretrained(merged)
dist.barrier()
dist.destroy_process_group()
