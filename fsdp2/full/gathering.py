"""`gathered`: parameters that are full for a while, and the write-back of changes.

    enter   ranks compare their arguments ── rows of each go up its levels ── registered, full
    body    reads and writes plain parameters
    leave   ranks exchange how they leave ── rows of each come down ── shards, in place

Contexts nest, and a parameter may be full in several of them: each context has its own tensors, and
writes its changes to the enclosing one, the outermost to the shards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.core.errors import RankMismatchError, ShardingStateError, coded
from fsdp2.core.facts import (
    FORM,
    Counts,
    Form,
    ModuleEntry,
    ShardedParam,
    is_extended,
    store_of,
    uncompiled,
)
from fsdp2.full.selection import (
    MeshRanks,
    Names,
    SelectedParam,
    chosen,
    outdate,
    require_idle,
    require_memory,
    reshard_unless_hidden,
    selected_params,
    settle,
)
from fsdp2.full.unsharding import leaves_of, levels_of, made_whole_together, rebuilt


@dataclass(frozen=True)
class GatheredOptions:
    """The arguments of a call; see `gathered`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    dtype: torch.dtype | None = None


class Hold:
    """One parameter that is full in one context.

    Attributes:
        full: the registered tensor; ``None`` on ranks that do not hold it.
        outer: the hold of the enclosing context, if it holds the parameter too.
    """

    def __init__(
        self, selected: SelectedParam, settings: GatheredOptions, outer: Hold | None
    ) -> None:
        self.selected = selected
        self.outer = outer
        self.full: nn.Parameter | None = None
        self._settings = settings
        self._levels = levels_of(selected.param)
        self._before: nn.Parameter = selected.param.sharded
        if outer is not None and outer.full is not None:
            self._before = outer.full

    @property
    def _everywhere(self) -> bool:
        return not self._settings.rank0_only

    @property
    def has_gradient(self) -> bool:
        """Whether there is one now: on the shards, or in the context around."""
        return self._before.grad is not None

    @property
    def may_open_together(self) -> bool:
        """Whether `gather_leaves` may make it whole: as it arrives, in its own memory."""
        settings = self._settings
        as_it_is = settings.dtype is None and not settings.offload_to_cpu
        return as_it_is and self._everywhere and self.outer is None

    @torch.no_grad()
    def open(self, with_grad: bool, whole: torch.Tensor | None) -> None:
        """Make it whole, unless ``whole`` is that, and register it."""
        with torch.inference_mode(False):
            source = self._before if self.outer is None else self.outer.full
            whole = self._whole(source) if whole is None else whole
            grad = self._whole_gradient(source) if with_grad else None
            if whole is None:
                return
            self.full = _parameter(self.selected.param, whole)
            if grad is not None:
                if grad.dtype != whole.dtype:
                    self.full.grad_dtype = grad.dtype
                self.full.grad = grad
        self._register(self.full)

    def _whole(self, source: torch.Tensor | None) -> torch.Tensor | None:
        """A full tensor in separate memory.

        Args:
            source: the sharded parameter, or what the context around holds here.
        """
        local = self.selected.param.local
        if not is_extended(local):
            return self._made(self._moved(source, local))
        rows = leaves_of(local)
        sources: list[torch.Tensor | None] = [None] * len(rows)
        if self.outer is not None and source is not None:
            sources[:] = leaves_of(source.detach())
        found = [self._moved(each, own) for each, own in zip(sources, rows, strict=True)]
        leaves = [leaf for leaf in found if leaf is not None]
        if len(leaves) < len(rows):
            return None
        if self._settings.offload_to_cpu:
            leaves = [leaf.cpu() for leaf in leaves]
        return rebuilt(local, leaves, self._levels.shape)

    def _whole_gradient(self, source: nn.Parameter | None) -> torch.Tensor | None:
        """The same of its gradient."""
        grad = None if source is None or self.outer is None else source.grad
        return self._made(self._moved(grad, self._gradient_rows()))

    def _gradient_rows(self) -> torch.Tensor:
        """This rank's gradient, or where that is not read or there is none, zeros like it."""
        param = self.selected.param
        before = param.sharded.grad
        if before is not None and self.outer is None:
            return leaves_of(before)[0]
        dtype = param.grad_dtype if before is None else before.dtype
        return leaves_of(param.local)[0].new_zeros(param.local.shape, dtype=dtype)

    def _shown(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor that has ``dtype`` as shards is whole here."""
        if is_extended(self.selected.param.local):
            return dtype
        around = dtype if self.outer is None else self.outer._shown(dtype)
        return _cast_to(around, self._settings.dtype)

    def _moved(self, source: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        """A plain tensor, full if this context holds it.

        Args:
            source: what is whole in the context around, if there is one and it is so here.
            rows: this rank's rows, or where they are not read, anything that looks like them.
        """
        param, levels, outer = self.selected.param, self._levels, self.outer
        if outer is None:
            found = levels.gather(param.laid_out(rows), self._everywhere)
            return None if found is None else _own(param.as_seen(found), rows)
        if outer._everywhere or not self._everywhere:
            held = self._everywhere or levels.is_first
            return source.detach().clone() if held and source is not None else None
        spread = self._spread(source, rows, outer._shown(rows.dtype))
        return spread if source is None else _own(spread, source)

    def _spread(
        self, whole: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Broadcast a tensor that is full on the first rank to all."""
        param = self.selected.param
        laid = None if whole is None else param.laid_out(whole.detach())
        like = param.laid_out(rows.to(dtype))
        return param.as_seen(self._levels.send(laid, like, everywhere=True))

    def _made(self, whole: torch.Tensor | None) -> torch.Tensor | None:
        """On the device and of the dtype that was asked for."""
        if whole is None:
            return None
        device = torch.device("cpu") if self._settings.offload_to_cpu else self._levels.device
        return whole.to(device, _cast_to(whole.dtype, self._settings.dtype))

    # ---- the end

    def problem(self) -> str | None:
        """The problem with the tensor that the body left registered; ``None`` if there is none."""
        if self.full is None:
            return None
        left = self._left()
        shape = tuple(self.selected.param.sharded.shape)
        if tuple(left.shape) != shape:
            return f"is of shape {tuple(left.shape)} now, not {shape}"
        if left.is_meta:
            return "is on the meta device now"
        return None

    def _left(self) -> torch.Tensor:
        """The tensor registered now: the body may have replaced it."""
        assert self.full is not None
        for module, name in self.selected.entries:
            left = module._parameters.get(name)
            if left is not None and left is not self.full:
                return left
        return self.full

    @torch.no_grad()
    def write(self, has_gradient: bool) -> None:
        """Write the contents after the body back to their source, in place.

        Args:
            has_gradient: whether there is one to write, on ranks that hold the parameter.
        """
        with torch.inference_mode(False):
            self._write_parameter(None if self.full is None else self._left().detach())
            if self._settings.with_grads:
                self._write_gradient(has_gradient)

    def _write_parameter(self, left: torch.Tensor | None) -> None:
        local = self.selected.param.local
        rows = leaves_of(local)
        wholes: Sequence[torch.Tensor | None] = [None] * len(rows)
        targets: Sequence[torch.Tensor | None] = wholes
        if left is not None:
            if is_extended(local) and not is_extended(left):
                left = local.new_zeros(left.shape).copy_(left)
            wholes = leaves_of(left)
        if self.outer is not None and self.outer.full is not None:
            targets = leaves_of(self.outer.full.detach())
        for whole, own, target in zip(wholes, rows, targets, strict=True):
            self._put_back(whole, own, target)

    def _write_gradient(self, present: bool) -> None:
        param, outer = self.selected.param, self.outer
        if not present:
            self._before.grad = None
            return
        grad = None if self.full is None else self._left().grad
        rows, target = self._gradient_rows(), None
        if outer is not None and outer.full is not None:
            if outer.full.grad is None:
                outer.full.grad = torch.zeros_like(outer.full)
            target = outer.full.grad
        self._put_back(grad, rows, target)
        if outer is None and param.sharded.grad is None:
            param.sharded.grad = param.gradient_over(rows)

    def _put_back(
        self, whole: torch.Tensor | None, rows: torch.Tensor, target: torch.Tensor | None
    ) -> None:
        """Write a plain tensor to its rows here, or to the one of the context around.

        Args:
            whole: ``None`` where others have it.
            rows: this rank's, or if there is a context around, anything that looks like them.
            target: the tensor of the context around, if it is there and held here.
        """
        shown = self._shown(rows.dtype)
        if self.outer is None:
            _put(self._cut(whole, rows, shown), rows, shown)
            return
        if self.outer._everywhere and not self._everywhere:  # the first rank tells the others
            whole = self._spread(whole, rows, shown)
        if target is not None and whole is not None:
            _put(whole, target, _cast_to(target.dtype, self._settings.dtype))

    def _cut(
        self, whole: torch.Tensor | None, own: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """This rank's rows of ``whole``, as users see them; it is ``None`` where others have it."""
        param, levels = self.selected.param, self._levels
        laid = None if whole is None else param.laid_out(whole)
        if self._everywhere:
            assert laid is not None
            return param.as_seen(levels.cut(laid))
        like = param.laid_out(own).to(dtype)
        return param.as_seen(levels.send(laid, like))

    def close(self, places: Iterable[ModuleEntry]) -> None:
        """Register the earlier parameters again.

        Args:
            places: where this one is registered now; the body may have registered it elsewhere.
        """
        if self.outer is None:
            reshard_unless_hidden(self.selected.group)
        self._register(self._before)
        for module, name in places:
            if self.full is not None and module._parameters[name] is self.full:
                module.register_parameter(name, self._before)

    def left_gradient(self) -> bool:
        """Whether the body left a gradient here."""
        return self.full is not None and self._left().grad is not None

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.selected.entries:
            if module._parameters.get(name) is not None:  # the body may have deleted it
                store_of(module)[name] = param


def _parameter(param: ShardedParam, whole: torch.Tensor) -> nn.Parameter:
    requires_grad = param.sharded.requires_grad and (
        whole.is_floating_point() or whole.is_complex()
    )
    full = nn.Parameter(whole, requires_grad=requires_grad)
    full.__dict__.update(param.attributes)
    full.__dict__[FORM] = Form(weakref.ref(param), gathered=param.name, is_whole=True)
    return full


def _own(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``whole`` in separate memory: on one rank it may be the rows themselves."""
    same = whole.untyped_storage()._cdata == rows.untyped_storage()._cdata
    return whole.clone() if same else whole


def _cast_to(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted`` for floating-point tensors; others keep their dtype."""
    return wanted if wanted is not None and own.is_floating_point else own


def _put(new: torch.Tensor, target: torch.Tensor, shown: torch.dtype) -> None:
    """Write ``new`` to ``target``; elements shown in another dtype that did not change keep their
    bits.

    Args:
        new: values.
        target: the destination.
        shown: the dtype in which the body saw ``target``.
    """
    if shown == target.dtype:
        target.copy_(new)
        return
    new = new.to(target.device, shown)
    kept = new == target.to(shown)
    target.copy_(torch.where(kept, target, new.to(target.dtype)))


# ---- the context

_holds: weakref.WeakKeyDictionary[ShardedParam, list[Hold]] = weakref.WeakKeyDictionary()
"""The contexts that hold a parameter now, the innermost last."""


def is_held(param: ShardedParam) -> bool:
    """Whether a parameter is whole in `gathered`."""
    return param in _holds


def require_released(selection: Iterable[SelectedParam], function: str) -> None:
    """Raise if a parameter is whole in `gathered`, whose changes the shards do not have yet.

    Raises:
        ShardingStateError: it is.
    """
    for selected in selection:
        if selected.param in _holds:
            raise coded(
                ShardingStateError,
                "inside-gathered",
                f"{function}() was called inside gathered(), which holds parameter "
                f"'{selected.names[0]}'; leave the context first",
            )


@contextlib.contextmanager
@uncompiled
def gathered(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    names: Names = None,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Make parameters full: plain tensors, registered in their modules, without rounding.

    Every rank enters and leaves together, with the same arguments, between iterations. Parameters
    are gathered in their own dtype, whatever compute dtype the mixed-precision policy sets. You can
    combine all arguments.

    - *Changes* are written into the shards in place: DTensors stay the same objects, and optimizers
      that hold them see the new values. With ``rank0_only=False``, each rank writes its rows of its
      own full tensor, so make the same change on all ranks.
    - *An exception* in the body, on any rank, drops all changes: the model is sharded as before. If
      the body raised on another rank, this one raises `ShardingStateError`.
    - *Nested* contexts have separate tensors. An inner one starts from the outer one's current
      values, and writes back to them.
    - *Tied* parameters are one object under all their names. *Tensor-parallel* ones are full over
      those ranks, too. *Tensor subclasses* keep their class and dtype.
    - *Registered elsewhere*: what the body moves to another name or module below ``module``, or
      deletes, stays so, as `torch.nn.utils.prune` and parametrizations do it.
    - A module's state dict taken inside holds the full tensors; one loaded inside may be full. Do
      not run a forward, call ``.to()``, or step an optimizer inside.

    The model holds all selected parameters at once. `full_parameters` goes unit by unit.

    Args:
        module: a module with sharded parameters: the model, one unit, or any module in them.
        recurse: ``False`` excludes the parameters of units below. Default ``True``.
        writeback: ``False`` drops changes. Default ``True``.
        rank0_only: only the first rank of each parameter's mesh holds the full tensor. Others keep
            the shards registered, and never hold the rest. Changes on that rank are scattered to
            all. Default ``False``.
        offload_to_cpu: full parameters are in CPU memory, and the device holds one at a time.
            Default ``False``.
        with_grads: reduced gradients are full, too, as ``.grad``. They are written back like
            parameters; one that the body removes or adds is removed or added. Default ``False``.
        names: full names below ``module``, as a set or a predicate. A tied parameter matches by any
            of its names. ``None`` (default): all.
        dtype: floating-point parameters and gradients are cast to it. Elements that the body does
            not change keep all their bits. ``None`` (default): no cast.

    Raises:
        ShardingStateError: a forward or a backward is running; a parameter has no memory yet; an
            optimizer stepped in the body; another rank left with an exception.
        RankMismatchError: ranks pass different arguments.
        ValueError: a name is unknown; a parameter was given another shape in the body.
        TypeError: ``names`` or ``dtype`` has the wrong type.

    Example::

        with fsdp2.gathered(model.head, writeback=True), torch.no_grad():
            model.head.weight /= model.head.weight.norm(dim=1, keepdim=True)
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise coded(
            TypeError,
            "gathered-dtype",
            f"gathered(dtype=…) takes a torch.dtype or None, not {dtype!r}",
        )
    settings = GatheredOptions(writeback, rank0_only, offload_to_cpu, with_grads, dtype)
    selection = selected_params(module, recurse)
    require_idle(selection, "gathered")
    wanted = chosen(selection, names)
    require_memory(wanted)
    ranks = MeshRanks(selected.param for selected in selection)
    steps = Counts.ended_steps
    holds = _open(wanted, settings, ranks)
    try:
        yield
    except BaseException as error:
        # Others wait to hear of it; not of what ends the process.
        if writeback and isinstance(error, Exception):
            ranks.largest([_RAISED, *(0 for _ in holds)])
        _close(holds, module)
        raise
    try:
        if writeback:
            _write(holds, settings, ranks, steps)
    finally:
        _close(holds, module)


_RAISED, _STEPPED, _RESHAPED = 3, 2, 1
"""How a rank leaves; the largest counts."""


def _open(
    selection: Sequence[SelectedParam], settings: GatheredOptions, ranks: MeshRanks
) -> list[Hold]:
    settle([s for s in selection if not _holds.get(s.param)], settings.with_grads)
    holds = [Hold(s, settings, next(iter(_holds.get(s.param, [])[-1:]), None)) for s in selection]
    gradients = [settings.with_grads and hold.has_gradient for hold in holds]
    depths = [len(_holds.get(selected.param, ())) for selected in selection]
    facts = (settings, [selected.names for selected in selection], depths)
    if not ranks.is_alike(facts):
        raise coded(
            RankMismatchError,
            "gathered-ranks-differ",
            "ranks called gathered() with different arguments, or for different parameters; call "
            "it with the same ones on all ranks",
        )
    gradients = _checked_gradients(holds, gradients, settings, ranks)
    opened: list[Hold] = []
    try:
        wholes = _wholes([hold for hold in holds if hold.may_open_together])
        for hold, with_grad in zip(holds, gradients, strict=True):
            hold.open(with_grad, wholes.pop(hold, None))
            _holds.setdefault(hold.selected.param, []).append(hold)
            opened.append(hold)
    except BaseException:
        _close(opened)
        raise
    return holds


def _wholes(holds: Sequence[Hold]) -> dict[Hold, torch.Tensor]:
    """Full tensors of parameters, gathered together."""
    with torch.inference_mode(False):
        params = [hold.selected.param for hold in holds]
        given = [(param, param.local) for param in params]
        found = zip(holds, made_whole_together(given, everywhere=True), strict=True)
        return {hold: whole for hold, whole in found if whole is not None}


def _checked_gradients(
    holds: Sequence[Hold], gradients: list[bool], settings: GatheredOptions, ranks: MeshRanks
) -> list[bool]:
    """Which gradients there are, on all ranks alike."""
    if not settings.with_grads:
        return gradients
    # In a context around this one that is whole on the first rank alone, others have none.
    known = [
        hold.outer is None or hold.outer.full is not None or hold.outer._everywhere
        for hold in holds
    ]
    there = [int(k and g) for k, g in zip(known, gradients, strict=True)]
    absent = [int(k and not g) for k, g in zip(known, gradients, strict=True)]
    most = ranks.largest([*there, *absent])
    for hold, some, none in zip(holds, most[: len(there)], most[len(there) :], strict=True):
        if some and none:
            raise coded(
                RankMismatchError,
                "gathered-gradient",
                f"parameter '{hold.selected.names[0]}' has a gradient on some ranks, but not on "
                f"all; call gathered() without with_grads, or set_reduce_scatter_unused_params "
                f"before backward",
            )
    return [bool(some) for some in most[: len(there)]]


def _write(holds: Sequence[Hold], settings: GatheredOptions, ranks: MeshRanks, steps: int) -> None:
    problems = {h.selected.names[0]: found for h in holds if (found := h.problem()) is not None}
    own = _STEPPED if steps != Counts.ended_steps else _RESHAPED if problems else 0
    gradients = [int(settings.with_grads and hold.left_gradient()) for hold in holds]
    worst, *gradients = ranks.largest([own, *gradients])
    for name, problem in problems.items():
        raise coded(
            ValueError,
            "gathered-shape",
            f"parameter '{name}' {problem}, so gathered() wrote nothing back; copy new values "
            f"into it",
        )
    if worst == _STEPPED:
        raise coded(
            ShardingStateError,
            "gathered-stepped",
            "an optimizer stepped inside gathered(), whose result the write-back would "
            "overwrite, so nothing was written back; step outside gathered(), or pass "
            "writeback=False",
        )
    if worst:
        raise coded(
            ShardingStateError,
            "gathered-other-rank",
            "another rank left gathered() with an exception, so nothing was written back; see "
            "the error of that rank",
        )
    for hold, gradient in zip(holds, gradients, strict=True):
        hold.write(bool(gradient))
    outdate(hold.selected for hold in holds)


def _close(holds: Sequence[Hold], module: nn.Module | None = None) -> None:
    places: dict[nn.Parameter | None, list[ModuleEntry]] = {}
    for inside in () if module is None else module.modules():
        for name, param in inside._parameters.items():
            places.setdefault(param, []).append((inside, name))
    for hold in reversed(holds):
        found = _holds.get(hold.selected.param, [])
        if hold in found:
            found.remove(hold)
            if not found:
                del _holds[hold.selected.param]
        hold.close(places.get(hold.full, ()))
