"""The architectures of transformers, timm and diffusers, each as a tiny model with random weights.

Nothing is downloaded. Each library has a module here, of its own; a library is imported only where
it is asked for.

    names("transformers") ──> ["causal/LlamaForCausalLM", ...]
    build("transformers", "causal/LlamaForCausalLM") ──> Instance(model, inputs, blocks)

An architecture whose tiny instance cannot be built or run unsharded is no result of ours; the
table counts it as not built, with the reason.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from benchmarks.zoo.instances import MOST_PARAMETERS, Instance, NotBuiltError
from fsdp2.examples.images import import_torchvision

LIBRARIES = ("transformers", "timm", "diffusers")


def names(library: str) -> list[str]:
    """What of ``library`` is tried; the library must be installed."""
    return _module(library).names()


def build(library: str, name: str) -> Instance:
    """A tiny instance; its weights are drawn from the global random state.

    Raises:
        NotBuiltError: it is too large, or none of the known ways to build it works.
    """
    made: Instance = _module(library).build(name)
    size = sum(p.numel() for p in made.model.parameters())
    if size > MOST_PARAMETERS:
        raise NotBuiltError(f"{size:,} parameters")
    made.model.train()
    return made


def _module(library: str) -> ModuleType:
    import_torchvision()  # they ask for it
    return importlib.import_module(f"benchmarks.zoo.from_{library}")
