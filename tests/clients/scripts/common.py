"""What the clients' scripts share: tiny models, data, steps, and the lines that tests read."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

VOCABULARY = 64
SCRATCH = os.environ.get("SCRATCH", ".")


def tiny_llama(**config):
    """A random Llama of two layers, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))


def lora():
    """Adapters of a `tiny_llama`, from the same random state on every rank."""
    from peft import LoraConfig

    torch.manual_seed(1)
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def tokens(step, rows=2, length=8):
    """Each rank's own batch of a step. [rows, length], int64"""
    generator = torch.Generator().manual_seed(1000 * step + rank())
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def language_loss(model, step):
    """A language model's loss on this rank's batch of a step."""
    batch = tokens(step)
    return model(input_ids=batch, labels=batch).loss


def train(case, model, optimizer, steps, loss_of=language_loss, clip=None, micros=1, after=None):
    """Steps of an optimizer; reports each loss, and each norm where ``clip(parameters)`` is one."""
    for step in steps:
        for micro in range(micros):
            loss = loss_of(model, micros * step + micro)
            report_loss(case, loss)
            loss.backward()
        if clip is not None:
            report_loss(case, clip(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()


def rank():
    return dist.get_rank()


def report_loss(case, loss):
    """Print rank 0's loss, to the bit; a DTensor's is the whole."""
    loss = float(getattr(loss, "full_tensor", lambda: loss)())
    if rank() == 0:
        sys.stdout.write(f"loss {case} {loss.hex()}\n")
        sys.stdout.flush()


def report_classes(case, model, number=None):
    """Print whose the first sharded module in a model is, on each rank.

    ``number`` tells ranks apart where they are of several process groups.
    """
    number = rank() if number is None else number
    kinds = (FSDPModule, FullyShardedDataParallel)
    sharded = next(module for module in model.modules() if isinstance(module, kinds))
    if isinstance(sharded, FullyShardedDataParallel):
        sharded = sharded.module
    owners = {cls.__module__.partition(".")[0] for cls in type(sharded).__mro__}
    owner = "fsdp2" if "fsdp2" in owners else "torch"
    sys.stdout.write(f"classes {case} {number} {owner}\n")  # in one piece: ranks may share it
    sys.stdout.flush()


def run(main):
    """Call ``main`` with each case that the command line names, and end the script."""
    for case in sys.argv[1:]:
        main(case)
    finish()


def finish():
    """The last line of a script."""
    if dist.is_initialized():
        dist.barrier()
    sys.stderr.flush()
    sys.stdout.write("finished\n")
    sys.stdout.flush()
    os._exit(0)  # gloo and a DeviceMesh may abort an ordinary exit


def fsdp_on_cpu():
    """Let accelerate use FSDP on a CPU: one flag of its state, set for accelerators only."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type != DistributedType.FSDP:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def fsdp1_on_cpu():
    """Let accelerate's device be "cpu", not "cpu:0", which torch's FSDP1 takes for another."""
    from accelerate.state import AcceleratorState, PartialState

    for state in (AcceleratorState, PartialState):
        state._shared_state["device"] = torch.device("cpu")
