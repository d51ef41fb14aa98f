"""Low-rank adapters (LoRA): a frozen linear layer, and a narrow trained path parallel to it.

    x [.., in] --base, frozen-------------------------> [.., out]
             '--lora_a--> [.., rank] --lora_b--> x alpha/rank, added

The adapters on every linear layer of the blocks, the norms and the head are trained. The embedding
and the layers below the adapters keep the values that the seed gave them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp2.planning.presets import Block

from .model import generator_of

ALPHA = 16.0


class LoRALinear(nn.Module):
    """base(x) + ALPHA / rank * lora_b(lora_a(x)), with `base` frozen.

    The adapters are linear layers of their own: `fully_shard` and tensor parallelism treat them as
    they treat any other.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.scale = ALPHA / rank
        self.base = base.requires_grad_(False)
        self.lora_a = nn.utils.skip_init(nn.Linear, base.in_features, rank, bias=False, **like)
        self.lora_b = nn.utils.skip_init(nn.Linear, rank, base.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))

    @torch.no_grad()
    def reset_adapters(self, seed: int, name: str) -> None:
        """Fill both; lora_b with zeros, so that training starts from the base layer's output."""
        weight = self.lora_a.weight
        generator = generator_of(f"{name}.lora_a.weight", seed, weight.device)
        weight.normal_(0.0, self.lora_a.in_features**-0.5, generator=generator)
        self.lora_b.weight.zero_()


def adapt(part: nn.Module, rank: int, seed: int, name: str) -> None:
    """Freeze what `part` of the model keeps, and add adapters to a block's linear layers.

    Call it once the part is filled, and before its parameters are sharded in any way.
    """
    if isinstance(part, nn.Embedding):
        part.requires_grad_(False)
    if not isinstance(part, Block):
        return  # the last norm and the head are trained whole
    for path, module in list(part.named_modules()):
        if isinstance(module, nn.Linear):
            adapted = LoRALinear(module, rank)
            adapted.reset_adapters(seed, f"{name}.{path}")
            part.set_submodule(path, adapted)
