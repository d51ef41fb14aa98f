r"""Train Llama 3 8B by rewards (GRPO).

7 GPUs train, and one generates with the newest weights.

torchrun --nproc-per-node 8 rl.py \
    --weights Meta-Llama-3-8B-Instruct --prompts prompts.txt
torchrun --nproc-per-node 3 rl.py --tiny
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
)

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--weights", default="weights")
parser.add_argument(
    "--prompts", default="prompts.txt", help="a prompt per line"
)
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument(
    "--samples",
    type=int,
    default=56,
    help="completions per step, of one prompt",
)
parser.add_argument(
    "--new-tokens", type=int, default=512, help="of a completion"
)
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.samples, args.new_tokens, args.lr = 32, 8, 3e-3

gpu = torch.cuda.is_available() and not args.tiny
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, GENERATOR = dist.get_rank(), dist.get_world_size() - 1
# every rank makes it
trainers = DeviceMesh(device.type, list(range(GENERATOR)))
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
dist.barrier()

config = AutoConfig.from_pretrained(args.weights)
if args.tiny:
    torch.manual_seed(0)  # the same prompts on every rank
    prompts, end = torch.randint(3, 256, (args.steps, 4)).tolist(), 2
else:
    tokenizer = AutoTokenizer.from_pretrained(args.weights)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = [tokenizer(line)["input_ids"] for line in file]
    end = tokenizer.eos_token_id


def rewards_of(completions, alive):
    """Replace it: here, the share of a completion's tokens with a small number."""
    return ((completions < config.vocab_size // 2) * alive).sum(
        1
    ) / alive.sum(1)


class Generator:
    """Stands for vLLM or SGLang: its own model, in bf16, on one rank."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(
            args.weights, dtype=torch.bfloat16
        )
        self.model.to(device).eval()

    def receive(self):
        params = dict(self.model.named_parameters())
        name = [None]
        while (
            dist.recv_object_list(name, 0, device=device) is not None
            and name[0]
        ):
            dist.recv(params[name[0]].data, 0)

    def generate(self, prompt):
        made = self.model.generate(
            prompt.expand(args.samples, -1),
            attention_mask=torch.ones_like(prompt).expand(
                args.samples, -1
            ),
            **{
                "do_sample": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
            },
            **{
                "max_new_tokens": args.new_tokens,
                "eos_token_id": end,
                "pad_token_id": end,
            },
        )
        return F.pad(
            made,
            (0, prompt.size(1) + args.new_tokens - made.size(1)),
            value=end,
        )


def send_weights(model):
    """All trainers call it: they gather one unit at a time, and rank 0 sends it in bf16."""
    for name, tensor in fsdp2.full_parameters(
        model, rank0_only=True, dtype=torch.bfloat16
    ):
        dist.send_object_list([name], GENERATOR, device=device)
        dist.send(tensor.contiguous(), GENERATOR)
    if rank == 0:
        dist.send_object_list([None], GENERATOR, device=device)


if rank == GENERATOR:
    generator = Generator()
else:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = fsdp2.fully_shard(
            checkpoint_wrapper(layer), mesh=trainers, mp_policy=policy
        )
    fsdp2.fully_shard(model, mesh=trainers, mp_policy=policy)
    group = trainers.get_group()
    checkpoint.load_pretrained(model, args.weights, process_group=group)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, weight_decay=0.0, fused=True
    )

for step in range(1, args.steps + 1):
    prompt = torch.tensor([prompts[step % len(prompts)]], device=device)
    length = prompt.size(1)
    tokens = prompt.new_empty(args.samples, length + args.new_tokens)
    if rank == GENERATOR:
        tokens = generator.generate(prompt)
    dist.broadcast(tokens, GENERATOR)
    if rank == GENERATOR:
        if step < args.steps:
            generator.receive()
        continue

    completions = tokens[:, length:]
    ended = (completions == end).cumsum(1) - (completions == end).long()
    alive = (ended == 0).float()  # up to the first end, with it
    # every trainer has all: no exchange
    rewards = rewards_of(completions, alive)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    mine = slice(rank, None, GENERATOR)
    logits = model(input_ids=tokens[mine], use_cache=False).logits[
        :, length - 1 : -1
    ]
    chances = -F.cross_entropy(
        logits.float().transpose(1, 2),
        completions[mine],
        reduction="none",
        # one step per generation: the policy that generated is the policy
        # that is trained
    )
    loss = (
        -(advantages[mine, None] * chances * alive[mine]).sum()
        / alive.sum()
        * GENERATOR
    )
    loss.backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step < args.steps:
        send_weights(model)
    if rank == 0:
        print(f"step {step} reward {rewards.mean():.4f}")

if rank != GENERATOR:
    checkpoint.export(
        args.out, model, dtype=torch.bfloat16, process_group=group
    )
    if rank == 0:
        config.save_pretrained(args.out)
dist.barrier()
dist.destroy_process_group()
