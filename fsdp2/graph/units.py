"""A unit in graph mode: what its forward reads is a function of its shards.

    enter    shards that are registered ── fsdp2::unshard ──> registered in their place
    leave    the shards are registered again

Both stand where the hooks of `UnitHooks` stood, which come back when graph mode ends. They only
read and write ``_parameters``, so that dynamo traces them. Around the root they stand in
``forward``: dynamo compiles no hooks of the module that it is given.

Eagerly, autograd saves no unsharded parameter of a unit that reshards after forward: it saves which
one it was, and backward gathers again. In a compiled graph a checkpoint around ``unshard`` does the
same: the partitioner computes again what is inside of one.

Anything else that is registered is used as it is: parameters that you have gathered, or that
`torch.func.functional_call` was given.
"""

from __future__ import annotations

import gc
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import ModuleEntry, ShardedParam, UnitHooks
from fsdp2.graph.edge import Edge, Given, Place
from fsdp2.graph.operators import Exchange, unshard

F = TypeVar("F", bound=Callable[..., object])
Hooks = dict[int, Callable[..., object]]
Compiler = Callable[[Callable[..., object]], Callable[..., object]]
Kept = tuple["Gathered", int]
"""A parameter that backward gathers again: its group, and its position there."""


def _constant(function: F) -> F:
    """Let dynamo take what a function returns as it is.

    It guards all else that it reads: a dozen facts per parameter, which each step would look at.
    """
    torch.compiler.assume_constant_result(function)
    return function


class Gathered:
    """The shards of a group that a forward has gathered, for its backward.

    Args:
        exchange: the group.
        shards: the local shards.
        trained: positions of those that require grad.
    """

    def __init__(self, exchange: Exchange, shards: Sequence[Tensor], trained: list[int]) -> None:
        self._exchange, self._trained = exchange, trained
        self._shards = [shard.detach() for shard in shards]
        self._versions = [shard._version for shard in shards]
        self._again: list[Tensor] | None = None

    def again(self, index: int) -> Tensor:
        """A parameter of the group, gathered once per backward."""
        if self._again is None:
            self._exchange.check_versions(self._shards, self._versions)
            with torch.no_grad():
                self._again = unshard(self._shards, self._exchange.key, self._trained, False)
            Variable._execution_engine.queue_callback(self._forget)
        return self._again[index]

    def _forget(self) -> None:
        self._again = None


class _Local(torch.autograd.Function):
    """``to_local()``, whose derivative torch before 2.13 leaves out of the next derivative."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: DTensor) -> Tensor:
        ctx.spec = value._spec  # type: ignore[attr-defined]  # a context takes any
        return value._local_tensor.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> DTensor:
        return _of_local(gradient, ctx.spec)  # type: ignore[attr-defined]  # see above


class GraphUnit:
    """The hooks of a unit in graph mode.

    Args:
        record: the unit's hooks, in whose place these are called until `end`.
    """

    def __init__(self, record: UnitHooks) -> None:
        self.unit, self._modules = record.unit, record.modules
        precision = record.unit.options.precision
        self._cast_to, self._output_dtype = record.cast_to, precision.output_dtype
        self._exchanges = [Exchange(record.unit, group) for group in record.unit.own_groups]
        self._params = [exchange.group.params for exchange in self._exchanges]
        self._places: list[list[list[ModuleEntry]]] = [
            [list(param.entries) for param in params] for params in self._params
        ]
        self._held: tuple[tuple[list[list[ModuleEntry]], list[DTensor]], ...] = ()
        self._still_to_run = 0
        self._pushed = False
        self._inner: list[GraphUnit] = []
        self._compiled: Callable[..., object] = self.run
        self._edge: Edge | None = None
        self._found: tuple[object, ...] = ()
        self._given: list[Given | None] = [None] * len(self._exchanges)
        self._expected: list[object] = []
        self._patched: object = None
        """The forward that somebody had set on the root, as accelerate does."""
        self._forward: Callable[..., object] = record.modules[0].forward
        self._replaced: list[tuple[Hooks, int, Callable[..., object]]] = []
        for module in record.modules:
            tables: list[tuple[Hooks, Callable[..., object]]] = [
                (module._forward_pre_hooks, self.enter),
                (module._forward_hooks, self.leave),
            ]
            for hooks, ours in tables:
                for key, hook in [*hooks.items()]:
                    if getattr(hook, "__self__", None) is record:
                        self._replaced.append((hooks, key, hook))
                        hooks[key] = ours

    def begin_here(self, inner: Sequence[GraphUnit], compiler: Compiler | None) -> None:
        """Make its module the one that users call.

        Args:
            inner: the units below it, which end with its forward in any case.
            compiler: makes its forward another; ``None``: run eagerly.
        """
        self._inner = [*inner]
        for hooks, key, _ in self._replaced:
            del hooks[key]
        attributes = self._modules[0].__dict__
        self._patched = attributes.get("forward")
        attributes["forward"] = self.forward
        if compiler is not None:
            self._compiled = compiler(self.run)
            self._edge = Edge([group for unit in [self, *inner] for group in unit._groups()])

    def end(self) -> None:
        """Put the hooks back that ran before."""
        attributes = self._modules[0].__dict__
        if attributes.get("forward") == self.forward:
            del attributes["forward"]
            if self._patched is not None:
                attributes["forward"] = self._patched
        for hooks, key, hook in self._replaced:
            hooks[key] = hook

    def _groups(self) -> list[tuple[Exchange, list[Place]]]:
        pairs = zip(self._exchanges, self._places, strict=True)
        return [
            (exchange, [own[0] if own else None for own in places]) for exchange, places in pairs
        ]

    # ---- forward

    def forward(self, *args: object, **kwargs: object) -> object:
        """The root's forward."""
        if self._edge is None or torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        units = [self, *self._inner]
        entries = iter(self._edge.enter())
        try:
            for unit in units:
                found = [next(entries) for _ in unit._exchanges]
                unit._given = [given for given, _ in found]
                unit._expected = [one for _, expected in found for one in expected]
            graphs = counters["stats"]["unique_graphs"]
            output = self._compiled(*args, **kwargs)
            if counters["stats"]["unique_graphs"] != graphs:
                gc.collect()  # dynamo leaves cycles with the handles, which `.to()` trips over
            for unit in units:
                unit._check_found()
        finally:
            for unit in units:
                unit._given, unit._found = [None] * len(unit._exchanges), ()
        return output

    def _check_found(self) -> None:
        """Raise if the graph gathered shards where its forward had other parameters."""
        if not all(map(operator.is_, self._found, itertools.cycle(self._expected))):
            raise coded(
                ShardingStateError,
                "graph-mode-replaced",
                f"the compiled forward replaces parameters of unit '{self.unit.title}' while "
                f"it runs, as torch.func.functional_call does; call functional_call around the "
                f"model, or graph_mode(model) without compile",
            )

    def run(self, *args: object, **kwargs: object) -> object:
        """The same, eagerly or traced."""
        module = self._modules[0]
        args, kwargs = self.enter(module, args, kwargs)
        try:
            output = self._forward(*args, **kwargs)
        finally:
            for unit in self._inner:
                unit.restore()
            self.restore()
        return output if self._output_dtype is None else _cast(output, self._output_dtype)

    def enter(self, module: nn.Module, args: object, kwargs: object) -> tuple[Any, Any]:
        """Register the unsharded parameters; cast inputs."""
        if not self._still_to_run:
            self._still_to_run = len(self._modules)
            self._gather()
        if self._cast_to is not None:
            args, kwargs = _cast((args, kwargs), self._cast_to)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Register the shards, when the last module of the unit has run; cast outputs."""
        self._still_to_run -= 1
        if not self._still_to_run:
            self.restore()
        return output if self._output_dtype is None else _cast(output, self._output_dtype)

    def restore(self) -> None:
        """Register what was registered before."""
        self._still_to_run = 0
        if self._pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._pushed = False
        for places, held in self._held:
            for index, entries in enumerate(places):
                for owner, name in entries:
                    owner._parameters[name] = held[index]  # type: ignore[assignment]  # as it was
        self._held = ()

    def _gather(self) -> None:
        frees = self.unit.frees_after_forward
        compiling = torch.compiler.is_compiling()
        kept: dict[int, Kept] = {}
        for number, exchange in enumerate(self._exchanges):
            places = self._traced_places(number) if compiling else self._places[number]
            given = self._given[number]
            found: list[Any] = [  # its own where none is registered
                entries[0][0]._parameters[entries[0][1]] if entries else param.sharded
                for entries, param in zip(places, self._params[number], strict=True)
            ]
            shards: list[Tensor] = []
            forms = self._other_forms(number)
            if given is not None:  # dynamo looks at nothing of what is found, and guards nothing
                text, entered = given
                # The first item is no constant, which dynamo would look for among the others.
                self._found = (*self._found, entered[0], *found)
                trained = [int(index) for index in text.split()]
            elif not all(isinstance(value, DTensor) for value in found):
                continue
            else:
                if compiling:
                    shards = [value.to_local() for value in found]
                else:
                    exchange.follow()
                    shards = [_Local.apply(value) for value in found]
                for index in forms:
                    shards[index] = self._params[number][index].laid_out(shards[index])
                trained = [index for index, value in enumerate(found) if value.requires_grad]
                entered = shards
            key, flat = exchange.key, given is not None
            if compiling and frees:
                full = checkpoint(_unshard, key, trained, flat, *entered, use_reentrant=False)
            else:
                full = _unshard(key, trained, flat, *entered)
            if frees and not compiling and trained and torch.is_grad_enabled():
                gathered = Gathered(exchange, shards, trained)
                for index, value in enumerate(full):
                    kept[value.untyped_storage()._cdata] = gathered, index
            for index, entries in enumerate(places):
                value = full[index] if index in trained else full[index].detach()
                if index in forms:
                    value = _seen(self._params[number][index], value)
                for owner, name in entries:
                    owner._parameters[name] = value
            # Another tuple: dynamo would fill a list again behind each run of the graph.
            self._held = (*self._held, (places, found))
        if kept:
            self._save_none_of(kept)

    @_constant
    def _other_forms(self, number: int) -> tuple[int, ...]:
        """Parameters of a group whose dims are in another order, or which are DTensors."""
        params = enumerate(self._params[number])
        return tuple(i for i, p in params if p.order is not None or p.parallel is not None)

    @_constant
    def _paths(self, number: int) -> tuple[tuple[tuple[int, str, str], ...], ...]:
        """The places of a group's parameters: module of the unit, path below it, name."""
        paths = {
            module: (at, path)
            for at, root in enumerate(self._modules)
            for path, module in root.named_modules()
        }
        return tuple(
            tuple((*paths[owner], name) for owner, name in entries)
            for entries in self._places[number]
        )

    def _traced_places(self, number: int) -> list[list[ModuleEntry]]:
        return [
            [(self._modules[at].get_submodule(path), name) for at, path, name in entries]
            for entries in self._paths(number)
        ]

    def _save_none_of(self, kept: dict[int, Kept]) -> None:
        """Let autograd save which of these parameters it needs; all else as before."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if around is not None and around[0].__module__ == "torch.utils.checkpoint":
            return  # which saves none of them, and runs `enter` again

        def pack(tensor: Tensor) -> object:
            known = kept.get(tensor.untyped_storage()._cdata) if _has_storage(tensor) else None
            if known is None:
                return tensor if around is None else around[0](tensor)
            return (*known, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, tuple) and saved and isinstance(saved[0], Gathered):
                gathered, index, *view = saved
                return gathered.again(index).as_strided(*view)
            found: Tensor = saved if around is None else around[1](saved)
            return found

        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._pushed = True


def _unshard(key: str, trained: list[int], flat: bool, *given: Tensor) -> list[Tensor]:
    full: list[Tensor] = torch.ops.fsdp2.unshard(list(given), key, trained, flat)
    return full


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _seen(param: ShardedParam, gathered: Tensor) -> Tensor:
    """A gathered parameter as the module knows it: a DTensor if it was one before sharding."""
    gathered, spec = param.as_seen(gathered), param.parallel
    return gathered if spec is None else _of_local(gathered, spec)


def _of_local(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor, as autograd sees it."""
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors inside of containers that torch knows, in another dtype."""

    def to_dtype(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(to_dtype, values)
