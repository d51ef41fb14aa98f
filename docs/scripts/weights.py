import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2

# a rank; bytes of one message; the vocabulary
GENERATOR, BUCKET, TOKENS = 2, 20_000, 16
gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank = dist.get_rank()
trainers = DeviceMesh(device.type, [0, 1])  # every rank makes it


def make_model():
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        for _ in range(4)
    ]
    return nn.Sequential(
        nn.Embedding(TOKENS, 64), *blocks, nn.Linear(64, TOKENS)
    ).to(device)


# first names and shapes, then one flat tensor; an empty bucket is the end
def send(bucket):
    specs = [
        (f"model.{name}", tuple(tensor.shape)) for name, tensor in bucket
    ]
    dist.send_object_list([specs], GENERATOR, device=device)
    if bucket:
        dist.send(
            torch.cat([tensor.flatten() for _, tensor in bucket]),
            GENERATOR,
        )


# both trainers call it; the loop has turns on rank 0 only
def send_weights(model):
    bucket = []
    for name, tensor in fsdp2.full_parameters(
        model, rank0_only=True, dtype=torch.bfloat16
    ):
        bucket.append((name, tensor))
        if sum(tensor.nbytes for _, tensor in bucket) >= BUCKET:
            send(bucket)
            bucket = []
    if rank == 0:
        send(bucket)
        if bucket:
            send([])


def received(sizes):
    box = [None]
    while (
        dist.recv_object_list(box, 0, device=device) is not None and box[0]
    ):
        counts = [torch.Size(shape).numel() for _, shape in box[0]]
        flat = torch.empty(
            sum(counts), dtype=torch.bfloat16, device=device
        )
        dist.recv(flat, 0)
        sizes.append(flat.nbytes)
        for (name, shape), part in zip(box[0], flat.split(counts)):
            yield name, part.view(shape)


# stands for vLLM or SGLang: its own copy, dtype and names
class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model().to(torch.bfloat16).eval()

    @torch.no_grad()
    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].copy_(tensor)

    @torch.inference_mode()
    def generate(self, token, count):
        tokens = [torch.tensor([token], device=device)]
        for _ in range(count):
            tokens.append(self.model(tokens[-1]).argmax(-1))
        return torch.cat(tokens)


torch.manual_seed(0)
if rank == GENERATOR:
    engine = Engine()
else:
    model = make_model()
    for layer in model:
        fsdp2.fully_shard(layer, mesh=trainers)
    fsdp2.fully_shard(model, mesh=trainers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    if rank == GENERATOR:
        sizes = []
        engine.load_weights(received(sizes))
        tokens = engine.generate(1, 8)
        facts = torch.tensor(
            [len(sizes), max(sizes), sum(sizes)], device=device
        )
        dist.send(torch.cat([tokens, facts]), 0)
    else:
        for _ in range(40):  # learn the rule: the token after t is 3 t + 1
            prompt = torch.randint(TOKENS, (64,), device=device)
            loss = nn.functional.cross_entropy(
                model(prompt), (3 * prompt + 1) % TOKENS
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        send_weights(model)
        if rank == 0:
            reply = torch.empty(12, dtype=torch.int64, device=device)
            dist.recv(reply, GENERATOR)
            *tokens, messages, largest, total = reply.tolist()
            print(
                f"update {step}: {messages} messages, {total} bytes, at most {largest} in one"
            )
            print(f"  generated {tokens}")
dist.barrier()  # no rank leaves while another still sends
dist.destroy_process_group()
