"""`save`, `async_save`: staged, written to a temporary folder, synced, listed with hashes, renamed.

1. every rank    the state to save, by name; copied during training for `async_save`
2. every rank    __r_0.distcp   written, synced               .saving-step-N-TOKEN/
3. all           tell rank 0 what they have written, or why not                    one exchange
4. rank 0        .metadata, manifest.json                     written, synced; the folder synced
5. rank 0        rename         .saving-step-N-TOKEN -> step-N; FOLDER synced: now the step exists
6. rank 0        older steps    removed, if `keep` requires it (`retention`); and tells all

On a store (`remote`), step 2 puts files under a name that contains the attempt's token, and the
manifest, put last, replaces step 5.

The first save plans which rank writes which data, in one more exchange before 2, and so does a save
after a rank's layout has changed: a rank that has no plan for its layout says so in 3.

Two asynchronous saves may overlap in 1, but not in 2 to 6, so that ranks exchange in the order of
the calls.

    call 1   copy to memory 0 | 2 … 6 |
    call 2                copy to memory 1 | 2 … 6 |
    call 3                  waits ……. | copy to memory 0 | 2 … 6 |
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint import files
from fsdp2.checkpoint.consensus import Call, Outcome
from fsdp2.checkpoint.folder import Manifest, store_of
from fsdp2.checkpoint.items import file_of, index_of, write_items
from fsdp2.checkpoint.owning import LEASE
from fsdp2.checkpoint.retention import (
    Keep,
    branch,
    checked,
    left_behind,
    note_save,
    origin_of,
    prune,
)
from fsdp2.checkpoint.snapshots import Nested, named_buffers, named_parameters
from fsdp2.checkpoint.staging import Copy, HostMemory, State, plain, watch_loads, watch_optimizers
from fsdp2.checkpoint.state import (
    Models,
    Optimizers,
    States,
    as_list,
    as_module,
    as_states,
    check_step,
    first_of,
    rng_states,
    state_of,
)
from fsdp2.checkpoint.stores import INDEX, AnyPath, Attempt, PathLike, Store
from fsdp2.checkpoint.tensors import bytes_of
from fsdp2.checkpoint.values import Packed, Value
from fsdp2.core.errors import CheckpointError, checkpoint_error, coded, resaid
from fsdp2.core.facts import LostRankError, ProcessGroup, SideChannel
from fsdp2.sharding.wire_states import RESIDUALS, WireState

_HELD_IN = ("model", "buffers")  # persistent buffers, and others if asked for
LOG = logging.getLogger("fsdp2.checkpoint")

Facts = tuple[str, int, Keep | None, tuple[object, ...]]
"""Facts on which ranks must agree: folder, step, keep, DTensors in ``extra``."""

Stepped = tuple[str, bytes]
"""The first parameter that an optimizer steps, and a digest of the names of all."""

Layout = list[tuple[str, object]]
"""By name, what a plan depends on: of a DTensor its spec, of a tensor its shape and dtype."""


def save(
    folder: PathLike,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    extra: Value = None,
    keep: int | Keep | None = None,
    metric: float | None = None,
    rng: bool = False,
    buffers: bool = False,
    rank_extra: Value = None,
    trainable: bool = False,
    states: States | None = None,
    process_group: ProcessGroup | None = None,
) -> AnyPath:
    """Save a step, which exists only when it is complete and durable.

    Every rank of the process group calls it, with the same arguments; without a process group, a
    single process does. It returns when the step is complete on all ranks. The files are in DCP's
    format.

    Args:
        folder: a folder of steps that all ranks see; created if it does not exist. Or a URL of a
            store, as "s3://bucket/run", which needs the package ``fsspec`` and the store's own.
        model: its parameters and persistent buffers are saved, sharded or not, and extra states of
            modules. Or several models by name, as {"actor": …, "critic": …}.
        optimizer: over parameters of ``model``; or a list of optimizers that have no parameter in
            common. Default ``None``: none is saved.
        step: the number of the step, not negative.
        extra: other state of the run: the ``state_dict()`` of a scheduler, a scaler, a data loader.
            Supported types: None, bool, int, float, complex, str, bytes, tensors, dtypes, devices,
            paths, ``BytesIO``, numpy numbers and arrays, and lists, tuples, sets, deques, dicts,
            ``Counter``, ``OrderedDict`` and ``defaultdict`` of them, with keys of these types; all
            come back unchanged. Rank 0's value is saved; for DTensors, which come back as full
            tensors, every rank's part.
        keep: the maximum number of complete steps. Older ones are removed when this one is
            complete: first those that a branch has replaced; if a step is a link, only the link. A
            `Keep` also keeps the best ones. A step that cannot be removed causes a warning, and the
            next save tries again. Default ``None``: all steps stay.
        metric: of this step, for ``Keep(best=…)`` and `best_step`; rank 0's value is saved. Default
            ``None``: the step is never one of the best.
        rng: whether to save the states of this rank's random number generators: the CPU's, and the
            current accelerator's. Default ``False``.
        buffers: whether to save non-persistent buffers, too. Default ``False``.
        rank_extra: as ``extra``, but each rank's own: a data loader's position. No DTensors.
            Default ``None``.
        trainable: whether to exclude parameters that do not require a gradient, such as the frozen
            base of adapters; `load` then leaves frozen ones unchanged. Default ``False``.
        states: further tensors by the name of the state and by name: averages of weights as {"ema":
            {name: tensor}}, DTensors or not. Default ``None``: none.
        process_group: the ranks that call it, if these are not all: a group of
            ``torch.distributed`` that contains every rank of the model's meshes, or a complete
            replica. Ranks, including rank 0, are counted within it. Default ``None``: the default
            process group.

    Returns:
        The folder of the step: a `Path`; for a store, an object whose ``str`` is its URL and which
            opens its files. ``torch.distributed.checkpoint`` can load from it.

    Raises:
        CheckpointError: on all ranks. Complete steps stay unchanged.

    Example::

        fsdp2.checkpoint.save("run", model, optimizer, step=100, extra={"lr": 0.1}, keep=3)
    """
    given = folder, model, optimizer, step, extra, keep, metric, rng, buffers, rank_extra
    asked = _Asked(*given, trainable, states)
    return _Save("save", asked, process_group).start().result()


def async_save(
    folder: PathLike,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    extra: Value = None,
    keep: int | Keep | None = None,
    metric: float | None = None,
    rng: bool = False,
    buffers: bool = False,
    rank_extra: Value = None,
    trainable: bool = False,
    states: States | None = None,
    process_group: ProcessGroup | None = None,
) -> Saving:
    """As `save`, while training continues: it saves the values at the time of the call.

    It returns before the copy has ended. A thread copies shards and the optimizer's states to host
    memory (on an accelerator, on a separate stream) while the next forward computes. The first
    operation that may write them waits for the rest of the copy: an optimizer's step, `load`,
    ``load_state_dict``, and fsdp2's own writes. Buffers and values are copied during the call.
    Before you write parameters in any other way, call ``wait_staged()`` on the result: after an
    in-place write the save fails, and a write through ``.data`` is not detected.

    The next call does not wait until this save is durable: it copies to a second host buffer, and
    is written after this one. The call after that waits for this one. The host memory is one copy
    of this rank's shards, and a second one once two saves overlap; it is kept. At the end of the
    process, Python waits for both. Call ``result()`` of the last save before
    ``destroy_process_group()``.

    A failed save does not prevent the next one, and is always reported. If the next was called
    before ``result()`` of the failed one, ``result()`` of the next also raises, once. If you called
    ``result()`` of neither, the call after the next raises. Each `save` raises, too.

    Args:
        folder: as for `save`, like all other arguments.
        model: as for `save`.
        optimizer: as for `save`.
        step: as for `save`.
        extra: as for `save`.
        keep: as for `save`.
        metric: as for `save`.
        rng: as for `save`.
        buffers: as for `save`.
        rank_extra: as for `save`.
        trainable: as for `save`.
        states: as for `save`; copied during the call.
        process_group: as for `save`.

    Returns:
        A handle. It raises errors, or a later save does, on all ranks.

    Raises:
        CheckpointError: the last save but one has failed, and its ``result()`` was never called.

    Example::

        saving = fsdp2.checkpoint.async_save("run", model, optimizer, step=100, keep=3)
        train_on()
        saving.result()
    """
    given = folder, model, optimizer, step, extra, keep, metric, rng, buffers, rank_extra
    asked = _Asked(*given, trainable, states)
    return _Save("async_save", asked, process_group).start()


class _Asked(NamedTuple):
    """The arguments of `save`."""

    folder: PathLike
    model: Models
    optimizer: Optimizers | None
    step: int
    extra: Value
    keep: int | Keep | None
    metric: float | None
    rng: bool
    buffers: bool
    rank_extra: Value
    trainable: bool
    states: States | None


@dataclass
class _Failure:
    """The error of a failed save, and whether this rank's user has seen it."""

    error: CheckpointError
    told: bool = False


class Saving:
    """A running save.

    Attributes:
        step: the number of the step.
    """

    def __init__(self, step: int, copy: Copy | None) -> None:
        self.step = step
        self._copy = copy
        self._ended = threading.Event()
        self._path: AnyPath | None = None  # if the step is durable
        self._failure: _Failure | None = None
        self._failed_before: _Failure | None = None  # of the save before, if reported here
        self._thread: threading.Thread | None = None

    @property
    def staged(self) -> bool:
        """Whether shards are in host memory, so that no operation waits for them any more."""
        return self._copy is None or self._copy.done.is_set()

    @property
    def durable(self) -> bool:
        """Whether the step is complete and durable."""
        return self._path is not None

    def wait_staged(self) -> None:
        """Wait until parameters and states may be written in any way."""
        if self._copy is not None:
            self._copy.done.wait()

    def result(self, timeout: float | None = None) -> AnyPath:
        """Wait until the step is durable; return its folder.

        Args:
            timeout: in seconds. Default ``None``: none.

        Raises:
            CheckpointError: it has failed, on all ranks. Or it is durable, but the save before it
                has failed, and was still running at the call; this is raised once.
            TimeoutError: it has not ended yet.
        """
        if not self._wait(timeout):
            raise coded(
                TimeoutError,
                "ckpt-not-yet",
                f"step {self.step} is not durable after {timeout} seconds; wait longer",
            )
        before, self._failed_before = self._failed_before, None
        if before is not None:
            before.told = True
        if self._failure is not None:
            self._failure.told = True
            error = self._failure.error
            if before is not None:
                raise checkpoint_error(
                    "ckpt-both-failed",
                    f"step {self.step} has failed ({error}), and so has the save before it "
                    f"({before.error}); correct the cause and save again",
                ) from error
            raise self._failure.error
        if before is not None:
            raise checkpoint_error(
                "ckpt-before-failed",
                f"step {self.step} is durable, but the save before it has failed "
                f"({before.error}); continue training, or save again",
            ) from before.error
        assert self._path is not None
        return self._path

    def _wait(self, timeout: float | None = None) -> bool:
        """Whether it is over; then its thread is, too."""
        if not self._ended.wait(timeout):
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def _run(self, job: Callable[[], None]) -> None:
        thread = threading.Thread(target=job, name=f"fsdp2 saves step {self.step}")
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left: the call does it, others wait for it
            self._thread = None
            LOG.warning("no thread can be started, so that training waits for step %d", self.step)
            job()

    def _finish(self) -> None:
        self._ended.set()


# ---- what is kept from save to save


@dataclass
class _WritePlan:
    """The plan of which rank writes which data, valid while every rank's layout is the same."""

    token: str  # rank 0's name for it, and for the temporary folder
    mine: SavePlan  # this rank's part
    metadata: Metadata | None  # on rank 0


class _Process:
    """The state of this process: plans by layout, host memory, and running saves."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.latest: list[Saving] = []
        self._memories = [HostMemory(), HostMemory()]
        self._plans: list[tuple[Layout, object, _WritePlan]] = []

    def wait(self, overlaps: int, call: Call, channel: SideChannel) -> None:
        """Wait for all but some earlier saves, and raise errors that this rank's user has not seen.

        Only the order of calls determines what is waited for, so that ranks raise in the same way.
        A rank that has asked for the result continues to save, and gets the error there.
        """
        for saving in self.latest[: len(self.latest) - overlaps]:
            saving._wait()
            failure = saving._failure
            if failure is not None and not failure.told:
                self.finish()
                failure.told = True
                failed: Outcome[None] = Outcome(sentence=str(failure.error))
                call.agree(channel, failed, failure.error, lambda _: ())

    def finish(self) -> None:
        """Wait for all saves; what they have failed with is raised by the next, not here."""
        for saving in self.latest:
            saving._wait()

    def free_memory(self) -> HostMemory:
        """A buffer that no save uses: there are two, and all saves but the latest have ended."""
        copies = [saving._copy for saving in self.latest if not saving._ended.is_set()]
        used = [copy.memory for copy in copies if copy is not None]
        return next(memory for memory in self._memories if memory not in used)

    def plan_of(self, layout: Layout, channel: SideChannel) -> _WritePlan | None:
        for known, of, plan in self._plans:
            if of is channel and known == layout:
                return plan
        return None

    def remember(self, layout: Layout, channel: SideChannel, plan: _WritePlan) -> None:
        others = [kept for kept in self._plans if kept[1] is channel and kept[0] != layout]
        self._plans = [*others[-_PLANS:], (layout, channel, plan)]

    def forget(self, layout: Layout, channel: SideChannel) -> None:
        """Plan again in the next save, which then has a separate folder."""
        self._plans = [kept for kept in self._plans if kept[1] is not channel or kept[0] != layout]


_OVERLAPS = 1
"""Number of saves that may still run when another asynchronous one begins."""

_PLANS = 3
"""Plans of other layouts that are kept, where a process saves several models in turn."""

_process = _Process()


def end_saves() -> None:
    """Wait for running saves; the next save raises their errors, not this call."""
    _process.finish()


# ---- one save, on one rank


class _Source(DefaultSavePlanner):
    """Takes what is written from staged rows, which are plain tensors."""

    def lookup_object(self, index: MetadataIndex) -> object:
        return self.state_dict[index.fqn]


@dataclass
class _Written:
    """A rank's message about one attempt."""

    facts: Facts
    stepped: Stepped | None
    token: str | None  # of the plan that it has followed
    results: list[WriteResult]
    files: dict[str, files.Fact]
    buffers: dict[str, int]  # checksums of those of which one rank's are saved
    local: SavePlan | None = None  # this rank's proposal
    before: str | None = None


@dataclass
class _Answer:
    """Rank 0's answer: done, or a new plan, or (neither) a request that all make one."""

    is_done: bool = False
    plan: _WritePlan | None = None
    before: str | None = None


class _Save:
    """A save on one rank."""

    def __init__(self, caller: str, asked: _Asked, process_group: ProcessGroup | None) -> None:
        self._beside = caller == "async_save"  # whether training continues
        self._step = asked.step
        self._call = Call(f"{caller}('{asked.folder}', step={asked.step})", process_group)
        self._channel = self._call.channel()
        _process.wait(_OVERLAPS if self._beside else 0, self._call, self._channel)
        self._before = _process.latest[-1] if _process.latest else None
        # As it is at the call: later it would be a matter of who is faster.
        failure = None if self._before is None else self._before._failure
        self._knows = failure is not None and failure.told
        self._store: Store
        self._model = first_of(asked.model)
        self._keep: Keep | None = None
        self._metric: float | None = None
        self._extra: Packed
        self._stepped: Stepped | None = None
        self._planner = DefaultSavePlanner()
        self._state: Nested = {}
        self._layout: Layout = []
        self._buffers: list[str] = []
        self._copy: Copy | None = None
        self._plan: _WritePlan | None = None
        self._tried: Attempt | None = None  # of the plan
        self._untold: _Failure | None = None  # of the save before
        self._local = False  # whether to tell what this rank would write
        self._held = ExitStack()  # on rank 0, the folder
        self._is_ours: Callable[[], bool] | None = None  # once the folder is held
        self._taken, self._cause = self._call.attempt(lambda: self._take(asked))

    # ---- in the call

    def _take(self, asked: _Asked) -> None:
        """Take note of all that is saved."""
        check_step("save", self._step)
        self._keep, self._metric = checked(asked.keep, asked.metric)
        model, optimizers = as_module(asked.model), as_list(asked.optimizer)
        states = as_states(asked.states)
        self._store = store_of(asked.folder)
        extra, own = _packed("extra", asked.extra), _packed("rank_extra", asked.rank_extra)
        self._extra = extra
        state = state_of(model, optimizers, states, asked.buffers, asked.trainable)
        if optimizers:
            stepped = [name for g in state["optimizer"]["param_groups"] for name in g["params"]]
            digest = hashlib.sha256("\n".join(stepped).encode()).digest()
            self._stepped = (stepped[0] if stepped else "none", digest)
        if asked.rng:
            state["rng"] = {str(self._call.rank): rng_states()}
        if wire := self._of_these_ranks(WireState(model).state_dict()):
            state["wire"] = wire
        state["extra"] = {
            name: value
            for name, value in extra.tensors.items()
            if self._call.is_first or isinstance(value, DTensor)
        }
        if asked.rank_extra is not None:
            content = {"content": json.dumps(own.content), **own.tensors}
            state["rank_extra"] = {str(self._call.rank): content}
        self._planner.set_up_planner(state, is_coordinator=self._call.is_first)
        self._state = flat = self._planner.state_dict
        self._layout = [(name, _facts_of(value)) for name, value in flat.items()]
        names = [f"{kind}.{name}" for name, _ in named_buffers(model) for kind in _HELD_IN]
        self._buffers = [name for name in names if type(flat.get(name)) is Tensor]
        if self._beside:
            watch_optimizers()
            watch_loads(model)
            trained = {k: v for k, v in flat.items() if k.startswith("optimizer.state.")}
            trained |= {f"model.{name}": param for name, param in named_parameters(model)}
            self._copy = _copied(flat, trained)

    def _of_these_ranks(self, wire: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Residuals are those of each rank: a replica by itself has some, which no load takes."""
        return {
            name: value
            for name, value in wire.items()
            if isinstance(value, DTensor)
            if not name.startswith(RESIDUALS) or value.device_mesh.size() <= self._call.size
        }

    def start(self) -> Saving:
        """Write, now or in a thread of its own."""
        self._saving = saving = Saving(self._step, self._copy)
        _process.latest = [*_process.latest[-1:], saving]
        if self._beside:
            saving._run(self._run)
        else:
            self._run()
        return saving

    # ---- beside training

    def _run(self) -> None:
        saving = self._saving
        try:
            if self._copy is not None and self._cause is None:
                self._taken, self._cause = self._call.attempt(self._copy.run)
            self._follow()
            saving._path = self._save()
        except CheckpointError as error:
            saving._failure, saving._failed_before = _Failure(error), self._untold
            if self._copy is not None:
                LOG.error("%s", error)  # in case that nobody asks
        except BaseException as error:
            failed = resaid(CheckpointError, str(error))
            saving._failure, saving._failed_before = _Failure(failed), self._untold
            raise
        finally:
            self._held.close()
            if self._copy is not None:
                self._copy.staged = {}
            saving._finish()

    def _follow(self) -> None:
        """Wait for the save before: ranks exchange, and plan, in the order of the calls."""
        before, self._before = self._before, None
        if before is not None:
            before._wait()
            self._untold = None if self._knows else before._failure
        plan = _process.plan_of(self._layout, self._channel)
        if plan is not None and self._cause is None:
            self._follow_plan(plan)

    def _follow_plan(self, plan: _WritePlan) -> None:
        self._plan, self._tried = plan, self._store.attempt(self._step, plan.token)

    def _save(self) -> AnyPath:
        try:
            while True:
                own: Outcome[_Written] = Outcome(sentence=self._taken.sentence)
                cause = self._cause
                if cause is None:
                    own, cause = self._call.attempt(self._attempt)
                answer = self._call.agree(self._channel, own, cause, self._decide)
                if answer.is_done:
                    note_save(self._model, self._store, self._step)
                    if answer.before is not None:
                        error = CheckpointError(answer.before)
                        self._saving._failed_before = self._untold or _Failure(error)
                    assert self._tried is not None
                    return self._tried.path
                if self._tried is not None:
                    self._tried.clear(self._call.rank)
                self._local = answer.plan is None
                if answer.plan is not None:
                    self._follow_plan(answer.plan)
                    _process.remember(self._layout, self._channel, answer.plan)
        except CheckpointError as error:
            # Ranks clear at their own pace, maybe when others are in the next save already.
            _process.forget(self._layout, self._channel)
            # Unless rank 0 has decided so, it may be about to commit what this rank has written.
            alone = not self._call.is_first and isinstance(error.__cause__, LostRankError)
            if self._tried is not None and not alone:
                self._tried.give_up(self._call.rank)
            raise

    def _attempt(self) -> _Written:
        """Write this rank's file, or say that there is no plan."""
        facts = (str(self._store), self._step, self._keep, tuple(self._extra.shared))
        self._begin()
        tried = self._tried
        if self._local or self._plan is None or tried is None:
            local = self._planner.create_local_plan()
            return _Written(
                facts, self._stepped, None, [], {}, dict.fromkeys(self._buffers, 0), local
            )
        source = _Source()
        tried.begin()
        staged = self._state if self._copy is None else self._copy.staged
        mine = self._plan.mine
        source.state_dict = {i.index.fqn: plain(staged[i.index.fqn]) for i in mine.items}
        results: list[WriteResult] = []
        if mine.items:
            name = file_of(self._call.rank)
            with tried.create(name) as stream:
                results = write_items(stream, name, mine, source)
        before = None if self._untold is None else str(self._untold.error)
        token = self._plan.token
        sums = {name: _checksum(plain(staged[name])) for name in self._buffers}
        return _Written(facts, self._stepped, token, results, tried.written, sums, before=before)

    def _begin(self) -> None:
        """See that the step may be written; rank 0 holds the folder, and clears it of old tries."""
        store, step = self._store, self._step
        if store.has(step):
            store.require_free(step, {*left_behind(store, self._origin()), *store.replaced()})
        store.prepare()
        if self._call.is_first and self._is_ours is None:
            self._is_ours = self._held.enter_context(store.hold())
            store.sweep(step, tuple(_process.tokens))

    # ---- on rank 0

    def _decide(self, told: list[_Written]) -> Sequence[_Answer]:
        facts = [written.facts for written in told]
        if any(other != facts[0] for other in facts):
            raise checkpoint_error(
                "ckpt-ranks-differ",
                f"save() got different steps, folders, keep or DTensors in extra on different "
                f"ranks ({facts}); pass the same on all ranks",
            )
        _require_one_optimizer([written.stepped for written in told])
        plans = [written.local for written in told]
        if all(plan is not None for plan in plans):
            buffers = {name for written in told for name in written.buffers}
            return self._plan_for([plan for plan in plans if plan is not None], buffers)
        if told[0].token is None or any(written.token != told[0].token for written in told):
            return [_Answer()] * len(told)
        self._commit(told)
        _warn_of_buffers([written.buffers for written in told])
        prune(self._store, self._step, self._keep)
        before = next((written.before for written in told if written.before is not None), None)
        return [_Answer(is_done=True, before=before)] * len(told)

    def _plan_for(self, local: list[SavePlan], buffers: set[str]) -> list[_Answer]:
        _check_parts(local)
        planner = DefaultSavePlanner()
        finished, metadata = planner.create_global_plan(_values_of_the_first(local, buffers))
        token = secrets.token_hex(4)
        _process.tokens.append(token)
        return [
            _Answer(plan=_WritePlan(token, mine, None if rank else metadata))
            for rank, mine in enumerate(finished)
        ]

    def _commit(self, told: list[_Written]) -> None:
        """The index and the manifest: then the step is there."""
        assert self._plan is not None
        assert self._plan.metadata is not None
        assert self._tried is not None
        places = {each.index: each.storage_data for written in told for each in written.results}
        index = index_of(self._plan.metadata, places)
        listed = {name: fact for written in told for name, fact in written.files.items()}
        listed[INDEX] = files.fact_of(index)
        tried = self._tried
        inside = f"{tried.folder}/" if tried.folder else ""
        manifest = Manifest(
            step=self._step,
            ranks=len(told),
            files={inside + name: fact for name, fact in sorted(listed.items())},
            extra=self._extra.content,
            has_optimizer=self._stepped is not None,
            torch=torch.__version__,
            metric=self._metric,
        )
        if self._is_ours is not None and not self._is_ours():
            raise checkpoint_error(
                "ckpt-taken-over",
                f"another job has taken over '{self._store}', because it saw no sign of this one "
                f"for {LEASE} seconds; stop one of the two, or give each its own folder",
            )
        replaced = branch(self._store, self._step, self._origin())
        try:
            tried.commit(index, manifest.encoded())
        except BaseException:
            with suppress(Exception):  # of each store's own classes
                self._store.reinstate(replaced)
            raise

    def _origin(self) -> int | None:
        """Determined after the save before, which may be the first of the branch."""
        return origin_of(self._model, self._store)


def _copied(state: State, beside: State) -> Copy:
    """Begin to copy; where there is no memory for a second copy, after the first is done with."""
    try:
        return Copy(state, beside, _process.free_memory())
    except MemoryError:
        _process.finish()
        return Copy(state, beside, _process.free_memory())


def _check_parts(plans: list[SavePlan]) -> None:
    """Raise unless the ranks have all of each tensor: a group may have some of a mesh's ranks."""
    parts = {item.index: item for plan in plans for item in plan.items}
    sizes: dict[str, int] = {}
    found: dict[str, int] = {}
    for index, item in parts.items():
        if item.tensor_data is not None:
            sizes[index.fqn] = item.tensor_data.size.numel()
            found[index.fqn] = found.get(index.fqn, 0) + item.tensor_data.chunk.sizes.numel()
    for name, size in sizes.items():
        if found[name] < size:
            raise checkpoint_error(
                "ckpt-parts",
                f"the ranks that save have only {found[name]} of {size} elements of '{name}'; "
                f"pass a process_group with all ranks of the model's meshes, or with a complete "
                f"replica",
            )


def _values_of_the_first(plans: list[SavePlan], buffers: set[str]) -> list[SavePlan]:
    """Buffers, values and tensors in them are the first rank's, so that they fit together."""
    seen: set[MetadataIndex] = set()
    found = []
    for plan in plans:
        items = [item for item in plan.items if item.index not in seen]
        seen |= {
            item.index
            for item in plan.items
            if item.index.fqn in buffers or _is_of_a_value(item, plan.planner_data)
        }
        found.append(replace(plan, items=items))
    return found


def _is_of_a_value(item: WriteItem, paths: Mapping[str, tuple[Any, ...]]) -> bool:
    if item.type is not WriteItemType.TENSOR:
        return item.type is WriteItemType.BYTE_IO
    path = paths[item.index.fqn]
    inside = {"model": 2, "optimizer": 3 if path[1] == "param_groups" else 4, "values": 0}
    return len(path) > inside.get(path[0], len(path))


def _packed(argument: str, value: Value) -> Packed:
    found = Packed(value)
    wrong = found.wrong[:1]
    if argument == "rank_extra" and found.shared:
        wrong.append(f"a DTensor at '{found.shared[0][0]}'")
    if wrong:
        raise checkpoint_error(
            "ckpt-extra",
            f"save({argument}=…) has {wrong[0]}, which cannot be loaded without running code, or "
            f"not on other ranks; pass numbers, strings, bytes, tensors, numpy arrays, and "
            f"containers of them",
        )
    return found


def _require_one_optimizer(stepped: Sequence[Stepped | None]) -> None:
    """A step has one list of groups: of another one, no states could be loaded."""
    for rank, other in enumerate(stepped):
        if other != stepped[0]:
            firsts = [None if each is None else each[0] for each in (stepped[0], other)]
            raise checkpoint_error(
                "ckpt-optimizers-differ",
                f"save() got optimizers over different parameters: the first one is '{firsts[0]}' "
                f"on rank 0 and '{firsts[1]}' on rank {rank}; save the ranks of each pipeline "
                f"stage in a folder of their own, with process_group=…",
            )


def _checksum(buffer: object) -> int:
    assert isinstance(buffer, Tensor)
    rows = buffer.detach().cpu().contiguous()
    return zlib.crc32(bytes_of(rows))


def _warn_of_buffers(told: Sequence[Mapping[str, int]]) -> None:
    """Running statistics of each rank's batches, for example, which nothing averages."""
    first: dict[str, int] = {}
    differing: dict[str, int] = {}
    for rank, sums in enumerate(told):
        for name, found in sums.items():
            if told[first.setdefault(name, rank)][name] != found:
                differing.setdefault(name, rank)
    if differing:
        name, rank = next(iter(differing.items()))
        more = f", and so do {len(differing) - 1} more" if len(differing) > 1 else ""
        warnings.warn(
            f"save() has stored the buffer '{name.partition('.')[2]}' of rank {first[name]}, which "
            f"differs on rank {rank}{more}; make buffers equal before save(), for example by "
            f"nn.SyncBatchNorm or an all-reduce, or save each rank's in rank_extra",
            stacklevel=2,
        )


def _facts_of(value: object) -> object:
    """The facts on which a plan depends."""
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.layout
    return None
