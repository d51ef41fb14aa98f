"""Architectures of timm: of each of its modules the model whose name promises least."""

from __future__ import annotations

import inspect

import timm
import torch
from torch import nn

from benchmarks.zoo.instances import BATCH, CLASSES, Instance, NotBuiltError, repeated

_LITTLE = ("test", "atto", "femto", "pico", "nano", "xxs", "xxt", "micro", "_n0", "_s0", "_050")
_LITTLE_TOO = ("tiny", "_ti", "xs", "_t", "mini", "lite", "small", "18", "_s", "b0", "_b1", "_0")


def names() -> list[str]:
    """The model of each of timm's modules whose name promises least."""

    def rank(name: str) -> tuple[int, int, str]:
        tokens = [*_LITTLE, *_LITTLE_TOO]
        return (min([i for i, t in enumerate(tokens) if t in name] or [99]), len(name), name)

    found = []
    for module in timm.list_modules():
        offered = timm.list_models(module=module)
        found += [f"{module}/{each}" for each in sorted(offered, key=rank)[:1]]
    return found


def build(name: str) -> Instance:
    _, _, model_name = name.partition("/")
    why = ""
    for more in ({"img_size": 64}, {}):
        try:
            model = timm.create_model(model_name, pretrained=False, num_classes=CLASSES, **more)
            break
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    else:
        raise NotBuiltError(why)
    channels, size, _ = model.default_cfg.get("input_size", (3, 224, 224))
    size = more.get("img_size") or _smallest_image(model, channels, size)
    first = next(iter(inspect.signature(model.forward).parameters))
    return Instance(
        model, lambda: {first: torch.randn(BATCH, channels, size, size)}, repeated(model)
    )


def _smallest_image(model: nn.Module, channels: int, largest: int) -> int:
    state = torch.random.get_rng_state()
    model.eval()
    for size in (64, 96, 128, largest):
        with torch.no_grad():
            try:
                model(torch.zeros(1, channels, size, size))
            except Exception:
                continue
        torch.random.set_rng_state(state)
        return size
    raise NotBuiltError("no size of an image fits")
