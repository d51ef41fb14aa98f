"""Selection of the modules of a model that become units.

policies     rules that select modules: by class, by size, by a function of the user
choices      the selection of a policy in a model: the modules, bottom-up, with their options
sharding     `shard_model`: the selected modules and the model itself, by a strategy
deferring    `deferred`: a model that is sharded while it is constructed
wrapper_module  a module around a unit: the base of FSDP1's and XLA's wrappers
annotations  `enable_wrap` and `wrap`: modules that a model's own code marks

The names, arguments and selections match ``torch.distributed.fsdp.wrap``. Policies of torch are
accepted by their interface: nothing here imports torch's FSDP.

Example::

    from fsdp2.wrap import ModuleWrapPolicy

    for choice in chosen_modules(model, ModuleWrapPolicy({Block})):
        fully_shard(choice.module, **choice.options)
"""

from fsdp2.sharding.wire import WireFormat
from fsdp2.wrap.annotations import enable_wrap, wrap
from fsdp2.wrap.choices import Choice, chosen_modules
from fsdp2.wrap.deferring import deferred
from fsdp2.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    any_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fsdp2.wrap.sharding import Strategy, shard_model

__all__ = [
    "Choice",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Strategy",
    "WireFormat",
    "always_wrap_policy",
    "any_wrap_policy",
    "chosen_modules",
    "deferred",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "shard_model",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
