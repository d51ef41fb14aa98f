"""What the clients' scripts share: tiny models, data, and the lines that tests read."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

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


def tokens(step, rows=2, length=8):
    """Each rank's own batch of a step. [rows, length], int64"""
    generator = torch.Generator().manual_seed(1000 * step + rank())
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def rank():
    return dist.get_rank()


def report_loss(case, loss):
    """Print rank 0's loss, to the bit."""
    if rank() == 0:
        sys.stdout.write(f"loss {case} {float(loss).hex()}\n")
        sys.stdout.flush()


def report_classes(case, model, number=None):
    """Print where the classes of the first sharded module in a model come from, on each rank.

    ``number`` tells ranks apart where they are of several process groups.
    """
    number = rank() if number is None else number
    sharded = next(module for module in model.modules() if isinstance(module, FSDPModule))
    modules = " ".join(cls.__module__ for cls in type(sharded).__mro__)
    sys.stdout.write(f"classes {case} {number} {modules}\n")  # in one piece: ranks may share it
    sys.stdout.flush()


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
