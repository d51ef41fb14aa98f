"""The facts of the engine that rooms above it stand on: the only module of core that they import.

units       `Unit`, `UnitRecord`, `records_below`: what `fully_shard` made, and of which modules
groups      `ParamGroup`, `ShardedParam`: parameters that are gathered together, and their forms
layouts     `Slot`, `Segment`, `MeshAxes`: the position of every element, and the meshes
operations  `Streams`, `Kernels`, `GroupCollectives`: what a step runs on, and who observes it
ranks       `members_of`, `sum_over`, `gather_numbers`: exchanges outside of steps

Neither the core nor the rooms that `fully_shard` needs import it: the first satellite loads it.
Exceptions come from `fsdp2.core.errors`. A room above core that needs one
more name adds it here, so that this page shows what a change of the engine may break
(tests/house/test_layering.py). Every import here is an export (pyproject.toml).
"""

from __future__ import annotations

from fsdp2.core.codecs.codec import codec_of
from fsdp2.core.config import CPUOffloadPolicy, MixedPrecisionPolicy, Wire
from fsdp2.core.custom_collectives import ReduceScatter
from fsdp2.core.device.backends import Traits, know
from fsdp2.core.device.buffers import FlatBuffer, TransientBuffer, all_buffers, separate
from fsdp2.core.device.channels import (
    LostRankError,
    SideChannel,
    Vote,
    broadcast_from_first,
    exchange_messages,
    gather_to_first,
    members_of,
    scatter_from_first,
    side_channel,
    sum_over,
)
from fsdp2.core.device.collectives import (
    GroupCollectives,
    Launch,
    ReduceKind,
    Work,
    gather_numbers,
    largest_over,
    run_all_gather,
    run_barrier,
)
from fsdp2.core.device.kernels import FusedKernels, Kernels, Stage, Tensors, kernels_for, rehearsing
from fsdp2.core.device.process_groups import (
    ProcessGroup,
    current_world,
    default_group,
    new_groups,
    rank_and_size,
    ranks_of,
    serves,
)
from fsdp2.core.device.streams import (
    COMPUTE,
    COPY_IN,
    REDUCE,
    DeviceStreams,
    Event,
    Lane,
    Streams,
    make_streams,
)
from fsdp2.core.layout.layout import COLLECTIVE_ALIGN_BYTES, Cut, Segment, Slot, Transport
from fsdp2.core.layout.levels import own_slot
from fsdp2.core.layout.mesh import (
    MeshAxes,
    default_mesh,
    device_of,
    local_of,
    locals_of,
    part_at,
    part_of,
    with_dtype,
    wrap_local,
)
from fsdp2.core.modules.containers import cast
from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.core.modules.engine import after_backward, functions_of_shards
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.optimizers import changed as optimizer_changed
from fsdp2.core.modules.optimizers import steps, watch_steps
from fsdp2.core.modules.registrations import Owners, follow_replaced
from fsdp2.core.modules.registry import (
    UnitRecord,
    managed_modules,
    record_of,
    record_of_unit,
    records_below,
    require_record,
    start,
    units_by_param,
    walk,
)
from fsdp2.core.names import clean, clean_as_fsdp1
from fsdp2.core.params.gradients import Gradients, gradients_of
from fsdp2.core.params.param import (
    FORM,
    Form,
    ModuleEntry,
    ShardedParam,
    form_of,
    gathered_name,
    is_extended,
    store_of,
)
from fsdp2.core.pieces import piece_of, round_up
from fsdp2.core.progress import Counts, ShardReaders, communication_error
from fsdp2.core.reduce.feedback import DTYPE
from fsdp2.core.reduce.reduction import Jobs, views_of
from fsdp2.core.reduce.spec import ReductionSpec, is_direct, lay_flat, plan_division, reduction_spec
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observer, Run
from fsdp2.core.schedule.scheduler import Scheduler, window_of
from fsdp2.core.schedule.states import HIDDEN
from fsdp2.core.schedule.unit import (
    BACKWARD,
    FORWARD,
    Phase,
    PrefetchTime,
    Unit,
    all_groups,
    all_units,
    free_if_outdated,
    operations_of,
    put_around,
    unit_of,
    watching,
)
