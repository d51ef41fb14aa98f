"""A model that is sharded while it is constructed: one full block at a time.

    with deferred(mesh, {Block}):
        model = Model()
          Block.__init__ ... ends ──> initialized ── fully_shard(block) ──> only its shards stay
          Block.__init__ ... ends ──> …
    end of the context ──> fully_shard(model)

Constructors run in their usual order, on full tensors, on every rank: they draw the same random
numbers as without sharding, so the weights are bitwise identical. In the context, every module
class reports the end of its constructor, and ``apply`` unshards modules, block by block.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import device_of, managed_modules, record_of, require_record
from fsdp2.full.gathering import gathered
from fsdp2.sharding.api import fully_shard, plan_calls
from fsdp2.sharding.module import FSDPModule
from fsdp2.wrap import choices

T = TypeVar("T")

Policy = choices.Policy | type[nn.Module] | Callable[[nn.Module], bool]
"""A selection of units: as for `shard_model`, one class, or a function of a module."""


@contextlib.contextmanager
def deferred(
    mesh: DeviceMesh | None,
    policy: Policy,
    init_fn: Callable[[nn.Module], object] | None = None,
    **fully_shard_options: object,
) -> Iterator[None]:
    """Shard a model while it is constructed: each block is constructed, initialized, sharded and
    freed.

    Inside the context, a module that ``policy`` selects is sharded when its constructor ends. The
    enclosing modules are sharded when the context ends, with the remaining parameters: embeddings,
    heads. Select those in the policy, too, if they are large. At any time this rank holds its
    shards, one block, and the parameters that are sharded at the end.

    The weights equal those of a model constructed without the context, bitwise, if all ranks
    start from one seed, because constructors run in full and in order. Two forms of initialization
    may access blocks that are sharded already:

    - ``self.apply(init)`` in a constructor: each block is unsharded meanwhile.
    - A method ``_init_weights``, as in transformers' models: the module passed to it is unsharded.

    A constructor must not write into blocks in other ways, which raises at the end.

    Run it on every rank in the same way. Do not run the model inside. Tie parameters inside a
    constructor or after the context.

    Args:
        mesh: as for `fully_shard`; ``None`` for all ranks.
        policy: as for `shard_model`, one class, or a function that returns whether a module becomes
            a unit. A function with the arguments ``module``, ``recurse`` and ``nonwrapped_numel``
            is called with ``recurse=False``. `CustomPolicy` may give a module its own options.
        init_fn: called with each module of a block, the block first, before the block is sharded,
            to initialize the parameters that the module itself holds. Required if they are on the
            meta device: they get memory first. ``None`` (default): constructors initialize.
        fully_shard_options: further arguments of each `fully_shard` call.

    Raises:
        TypeError: ``policy`` is none of these.
        ValueError: a parameter is on the meta device without an ``init_fn``.
        ShardingStateError: a block's parameter was written after the block was sharded.

    The arguments are checked before anything is constructed. Each block is planned before it is
    initialized, and the remaining parameters are planned together at the end. Errors that only a
    later constructor or ``init_fn`` reveals are raised when it has run.

    Example::

        torch.manual_seed(0)
        with fsdp2.wrap.deferred(mesh, {Block}):
            model = Transformer(config)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    options = {**fully_shard_options, "mesh": mesh}
    construction = _Construction(_full_policy(policy), init_fn, options)
    plan_calls([(nn.Module(), options)])  # of the arguments alone
    with _watched(construction):
        yield
    construction.finish()


class _Construction:
    """The modules under construction, and the units created from them."""

    def __init__(
        self,
        policy: choices.Policy,
        init_fn: Callable[[nn.Module], object] | None,
        arguments: dict[str, Any],
    ) -> None:
        self._policy = policy
        self._init_fn = init_fn
        self._arguments = arguments
        self._open: list[nn.Module] = []
        self._outermost: list[nn.Module] = []
        self._holders: dict[int, weakref.ref[nn.Module]] = {}  # units, by their shards' ids
        self._versions: weakref.WeakKeyDictionary[nn.Module, list[int]]
        self._versions = weakref.WeakKeyDictionary()

    def construct(self, module: nn.Module, initialise: Callable[[], object]) -> None:
        """Run a constructor; shard what it has made, if that is a unit."""
        if any(module is each for each in self._open):
            initialise()  # of a base class
            return
        self._open.append(module)
        try:
            initialise()
        finally:
            self._open.pop()
        if isinstance(module, FSDPModule) or not hasattr(module, "_parameters"):
            return
        left = _unsharded_numel(module)
        options = choices.options_for(module, self._policy, numel=left, options=self._arguments)
        if options is not None:
            self._shard(module, options)
        elif not self._open:
            self._outermost.append(module)

    def _shard(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._check_ahead([(module, options)])
        self._initialise(module)
        fully_shard(module, **options)
        self._holders.update({id(param): weakref.ref(module) for param in _shards(module)})
        self._note([module])

    def apply(self, module: nn.Module, run: Callable[[], T]) -> T:
        """Run what initializes a module, with what is sharded of its own whole meanwhile."""
        units = {
            prefix + key: unit
            for member, prefix in managed_modules((module,))
            for key, param in member._parameters.items()
            if (unit := self._unit_of(param)) is not None
        }
        if not units:
            return run()
        self._check(units.values())
        with gathered(module, recurse=False, names=set(units)):
            result = run()
        self._note(units.values())
        return result

    def _unit_of(self, param: nn.Parameter | None) -> nn.Module | None:
        """The unit that holds this shard."""
        reference = self._holders.get(id(param))
        return None if reference is None else reference()

    def _note(self, units: Iterable[nn.Module]) -> None:
        """Remember how often units' shards were written."""
        for unit in units:
            self._versions[unit] = [param._version for param in _shards(unit)]

    def _check_ahead(self, calls: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        """Raise what is known before parameters have memory and values; changes nothing."""
        for module, _ in calls if self._init_fn is None else ():
            for member, prefix in managed_modules((module,)):
                _check_memory(member, prefix)
        plan_calls(calls, ahead=True)

    def _initialise(self, module: nn.Module) -> None:
        init_fn = self._init_fn
        for member, _ in managed_modules((module,)):
            self._materialise(member)
        if init_fn is not None:
            with torch.no_grad():
                for member, _ in list(managed_modules((module,))):
                    init_fn(member)

    def _materialise(self, member: nn.Module) -> None:
        mesh = self._arguments["mesh"]
        device = torch.device("cpu") if mesh is None else device_of(mesh)
        for key, param in member._parameters.items():
            if param is None or not param.is_meta:
                continue
            made = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            made.__dict__.update(param.__dict__)
            member._parameters[key] = made
        for key, buffer in member._buffers.items():
            if buffer is not None and buffer.is_meta:
                member._buffers[key] = torch.empty_like(buffer, device=device)

    def finish(self) -> None:
        """Shard what is left of the outermost modules."""
        inner = {below for m in self._outermost for below in list(m.modules())[1:]}
        left = [m for m in self._outermost if m not in inner and record_of(m) is None]
        self._check(list(self._versions))
        self._check_ahead([(module, self._arguments) for module in left])
        for module in left:
            self._initialise(module)
            fully_shard(module, **self._arguments)
        self._check(list(self._versions))

    def _check(self, units: Iterable[nn.Module]) -> None:
        """Raise if shards of units were written since."""
        for unit in units:
            if self._versions[unit] != [param._version for param in _shards(unit)]:
                name = require_record(unit).unit.title
                raise coded(
                    ShardingStateError,
                    "deferred-written",
                    f"a constructor wrote into '{name}' after fsdp2 had sharded it, which does "
                    f"not give the values that an unsharded block would get; initialise it in its "
                    f"own constructor, with self.apply(…), or in deferred(init_fn=…)",
                )


def _check_memory(member: nn.Module, prefix: str) -> None:
    for key, param in member._parameters.items():
        if param is not None and param.is_meta:
            name = prefix + key
            raise coded(
                ValueError,
                "deferred-meta",
                f"parameter '{name}' is on the meta device, so its constructor gave it no values; "
                f"pass deferred(init_fn=…), or construct without the meta device, because only "
                f"one block at a time is unsharded",
            )


def _shards(unit: nn.Module) -> list[nn.Parameter]:
    """A unit's own; torch counts writes to each."""
    groups = require_record(unit).unit.own_groups
    return [param.sharded for group in groups for param in group.params]


def _full_policy(policy: Any) -> choices.Policy:
    """A policy of any kind as one that `shard_model` takes."""
    if isinstance(policy, type):
        return [policy]
    if callable(policy) and not hasattr(policy, "_run_policy"):
        known = inspect.signature(policy).parameters
        if not {"nonwrapped_numel", "unwrapped_params"} & set(known):
            return lambda module, recurse, nonwrapped_numel: bool(policy(module))
    choices.check_policy(policy)
    found: choices.Policy = policy
    return found


def _unsharded_numel(module: nn.Module) -> int:
    return choices.numel_of(p for p in module.parameters() if not isinstance(p, DTensor))


# ---- what is watched


@contextlib.contextmanager
def _watched(construction: _Construction) -> Iterator[None]:
    """Constructors of all module classes tell when they end; ``apply`` gathers units."""
    replaced: list[tuple[type, str, object]] = []

    def replace(kind: type, name: str, method: object) -> None:
        replaced.append((kind, name, kind.__dict__[name]))
        setattr(kind, name, method)

    def watch(kind: type) -> None:
        if "__init__" in kind.__dict__ and kind is not nn.Module:
            replace(kind, "__init__", _constructing(kind.__dict__["__init__"], construction))
        if inspect.isfunction(kind.__dict__.get(_INITIALISER)):
            replace(kind, _INITIALISER, _initialising(kind.__dict__[_INITIALISER], construction))

    plain_apply = nn.Module.apply
    for kind in _subclasses(nn.Module):
        watch(kind)

    # Of a model file that is imported only now.
    def made(cls: type[nn.Module], /, **kwargs: object) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        watch(cls)

    setattr(nn.Module, "__init_subclass__", classmethod(made))  # noqa: B010  # as below

    @functools.wraps(plain_apply)
    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        return construction.apply(self, lambda: plain_apply(self, fn))

    setattr(nn.Module, "apply", apply)  # noqa: B010  # mypy knows the method
    try:
        yield
    finally:
        setattr(nn.Module, "apply", plain_apply)  # noqa: B010
        delattr(nn.Module, "__init_subclass__")
        for kind, name, original in replaced:
            setattr(kind, name, original)


_INITIALISER = "_init_weights"
"""Method that initializes the module that it is given, as of transformers' models."""


def _constructing(original: Callable[..., None], construction: _Construction) -> object:
    @functools.wraps(original)
    def construct(self: nn.Module, *args: object, **kwargs: object) -> None:
        construction.construct(self, lambda: original(self, *args, **kwargs))

    return construct


def _initialising(original: Callable[..., T], construction: _Construction) -> object:
    @functools.wraps(original)
    def initialise(self: nn.Module, *args: object, **kwargs: object) -> T:
        module = args[0] if args and isinstance(args[0], nn.Module) else self
        return construction.apply(module, lambda: original(self, *args, **kwargs))

    return initialise


def _subclasses(kind: type) -> list[type]:
    found: dict[type, None] = {}
    waiting: list[type] = [kind]
    while waiting:
        below: list[type] = waiting.pop().__subclasses__()
        for each in below:
            if each not in found:
                found[each] = None
                waiting.append(each)
    return list(found)
