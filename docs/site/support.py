"""The support matrix: which tests run a feature, read from the tests without running them.

A test counts for CPU ranks if it is marked ``ranks`` or ``clients``; in tests/accelerator for the
simulated accelerator; in tests/gpu for a GPU. A test that does not exist is an error. Versions of
torch are those that CI installs.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FEATURES: dict[str, tuple[str, ...]] = {
    "Training with the results of torch's FSDP2": (
        "parity/test_train_parity",
        "parity/test_random_programs",
        "parity/test_written_programs",
        "gpu/test_parity::test_same_bits_as_torch",
        "accelerator/test_lanes::test_same_bits_as_on_the_cpu",
        "accelerator/test_without_streams::test_same_bits_as_on_the_cpu",
    ),
    "Mixed precision": (
        "precision/test_precision",
        "precision/test_dtypes",
        "precision/test_input_casts",
        "accelerator/test_lanes::test_same_bits_as_on_the_cpu",
        "gpu/test_parity::test_same_bits_as_torch",
    ),
    "Accumulation of gradients": (
        "reduce/test_accumulation",
        "accelerator/test_lanes::test_accumulating",
        "gpu/test_parity::test_checkpointing_and_accumulation",
    ),
    "Activation checkpointing": (
        "autograd/test_activation_checkpointing",
        "accelerator/test_without_streams::test_checkpoints_around_units_keep_nothing_but_inputs",
        "gpu/test_parity::test_checkpointing_and_accumulation",
    ),
    "HSDP": ("meshes/test_hsdp", "accelerator/test_lanes::test_replicated"),
    "Levels": ("meshes/test_levels", "accelerator/test_lanes::test_levels"),
    "Tensor parallelism": ("meshes/test_tensor_parallel",),
    "Expert parallelism": ("meshes/test_expert_parallel",),
    "Pipeline parallelism": ("meshes/test_pipeline",),
    "Context parallelism": ("recipes/test_recipes::test_long_context",),
    "Uneven shards, shards on dims other than 0": (
        "sharding/test_shapes",
        "sharding/test_two_dims",
    ),
    "Small parameters that stay replicated": (
        "meshes/test_whole",
        "accelerator/test_lanes::test_accumulating",
    ),
    "Tied parameters": ("ties/test_ties",),
    "Frozen parameters, LoRA": (
        "reduce/test_gradients::test_freezing_within_and_across_groups",
        "reduce/test_frozen_between",
        "recipes/test_recipes::test_lora",
    ),
    "QLoRA with torchao": ("recipes/test_recipes::test_qlora",),
    "CPU offload": ("offload/test_offload", "accelerator/test_lanes::test_same_bits_as_on_the_cpu"),
    "Gradient norms and clipping": ("optim/test_norms", "gpu/test_norms::test_clip"),
    "FlatOptimizer": (
        "optim/test_flat",
        "accelerator/test_offloaded_states::test_the_same_bits_and_no_race",
    ),
    "Optimizer steps in backward": (
        "optim/test_flat::test_gradients_of_few_units_exist_at_a_time",
        "optim/test_flat::test_what_needs_all_gradients_is_refused",
        "optim/test_flat::test_what_a_class_writes_into_its_groups",
        "accelerator/test_lanes::test_steps_in_backward",
    ),
    "Optimizer states in CPU memory": (
        "optim/test_flat::test_state_dicts_are_exchanged",
        "optim/test_flat::test_gradients_of_few_units_exist_at_a_time",
        "accelerator/test_offloaded_states",
    ),
    "Muon": ("optim/test_muon", "optim/test_muon_states"),
    "EMA": ("optim/test_ema",),
    "torch.compile of blocks": (
        "compile/test_compiled_ranks",
        "accelerator/test_lanes::test_compiled_blocks",
        "gpu/test_compile::test_inductor_matches_eager",
    ),
    "CUDA graphs": ("gpu/test_compile::test_cuda_graphs_replay_where_memory_is_kept",),
    "Graph mode": ("graph/test_graph_mode", "graph/test_derivatives"),
    "Second derivatives": (
        "autograd/test_derivatives",
        "autograd/test_second_backwards",
        "graph/test_derivatives",
        "accelerator/test_without_streams::test_derivatives_and_sparse_tensors",
    ),
    "Wire formats": (
        "gather/test_wire_format",
        "gather/test_differences_ranks",
        "checkpoint/test_wire_state",
    ),
    "All-gather hooks of tensor subclasses": (
        "gather/test_extensions",
        "gather/test_int8_all_gather",
    ),
    "Collectives of your own": ("gather/test_custom_comm",),
    "Explicit prefetch": (
        "gather/test_prefetch",
        "accelerator/test_lanes::test_units_that_are_gathered",
    ),
    "Checkpoints on another number of ranks": (
        "checkpoint/test_checkpoints",
        "checkpoint/test_checkpoint_groups",
        "checkpoint/test_checkpoint_shards",
    ),
    "Asynchronous checkpoints": (
        "checkpoint/test_async_saves",
        "accelerator/test_lanes::test_a_save_beside_training",
    ),
    "Checkpoints in object stores": ("checkpoint/test_checkpoint_urls",),
    "Export to and import from safetensors": ("checkpoint/test_pretrained",),
    "State dicts, DCP": ("state/test_state_dict", "state/test_state_dict_options"),
    "Preemption": ("checkpoint/test_preemption", "jobs/test_preempted"),
    "Replica groups that fail and heal": (
        "elastic/test_groups",
        "clients/test_replica_groups",
        "clients/test_killed_groups",
        "accelerator/test_healing_on_device::test_the_same_bits_on_the_same_devices",
    ),
    "Full tensors": (
        "state/test_full_tensors",
        "state/test_gathered",
        "accelerator/test_lanes::test_whole_tensors",
    ),
    "Exceptions on all ranks": ("schedule/test_exceptions", "schedule/test_recovery"),
    "Check for ranks that disagree": (
        "ranks/test_ranks",
        "gpu/test_debug::test_ranks_that_disagree_raise",
    ),
    "Timelines": ("tracing/test_trace_ranks", "accelerator/test_trace::test_lanes_are_streams"),
    "FSDP1's wrapper": ("fsdp1/test_fsdp1", "fsdp1/test_fsdp1_states"),
    "XLA's wrapper": ("xla/test_xla",),
    "Scripts for torch's FSDP2, unchanged": ("installing/test_drop_in",),
    "accelerate, Trainer, trl, Lightning": (
        "clients/test_clients",
        "recipes/test_recipes::test_accelerate",
    ),
    "NCCL with one rank": ("gpu/test_nccl::test_a_model_trains_as_if_it_were_not_sharded",),
    "NCCL with several ranks": (),
    "Several machines": (),
    "Windows and macOS": (),
}
"""Rows of the matrix: modules of tests, or single tests of them. A row without one is untested."""

COLUMNS = {"ranks": "CPU ranks", "accelerator": "simulated accelerator", "gpu": "GPU"}

_CI = (ROOT / ".github" / "workflows" / "ci.yml", ROOT / ".ci" / "run")


@dataclass(frozen=True)
class Test:
    """A test function, and what runs it."""

    path: str
    name: str
    kind: str
    late: bool


def versions() -> tuple[list[str], list[str]]:
    """Versions of torch on which CI runs the default tests, and those for all other tests."""
    workflow, script = (path.read_text(encoding="utf-8") for path in _CI)
    every = re.findall(r"install --quiet torch==(\d+\.\d+)", script)
    found = {*re.findall(r'- \{ torch: "([\d.]+)"', workflow), *every}
    return sorted(found), sorted({*every})


def _marks(nodes: list[ast.expr]) -> Iterator[str]:
    """The name of each mark among decorators, or in the value of ``pytestmark``."""
    for node in nodes:
        if isinstance(node, ast.List):
            yield from _marks(node.elts)
        call = node.func if isinstance(node, ast.Call) else node
        if isinstance(call, ast.Attribute | ast.Name):
            yield call.attr if isinstance(call, ast.Attribute) else call.id


@functools.cache
def tests_of(module: str) -> list[Test]:
    """The test functions of a module, as "meshes/test_hsdp"."""
    source = f"tests/{module}.py"
    body = ast.parse((ROOT / source).read_text(encoding="utf-8")).body
    whole = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    folder = module.partition("/")[0]
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            marks = {*_marks([*whole, *node.decorator_list])}
            kind = folder if folder in COLUMNS else "ranks" if marks & _RANKS else "alone"
            late = bool(marks & {"extended", "exhaustive", "clients"})
            found.append(Test(source, node.name, kind, late))
    return found


_RANKS = {"ranks", "clients"}


def tests(feature: str) -> list[Test]:
    """The tests of a feature; raises if one of those that are named is not there."""
    found: list[Test] = []
    for named in FEATURES[feature]:
        module, _, name = named.partition("::")
        own = [test for test in tests_of(module) if name in ("", test.name)]
        if not own:
            raise LookupError(f"{feature}: there is no test {named}")
        found += own
    return found


def table(repository: str) -> str:
    """The matrix in Markdown; a count of tests links to the first file that has them."""
    default, every = (", ".join(each) for each in versions())
    lines = [f"| feature | {' | '.join(COLUMNS.values())} | torch |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        own = tests(feature)
        cells = []
        for kind in COLUMNS:
            counted = [test for test in own if test.kind == kind]
            count = "1 test" if len(counted) == 1 else f"{len(counted)} tests"
            written = " written" if kind == "gpu" else ""
            path = counted[0].path if counted else ""
            cells.append(f"[{count}{written}]({repository}/blob/main/{path})" if path else "-")
        ran = [test for test in own if test.kind not in ("gpu", "alone")]
        on = default if not all(test.late for test in ran) else every
        lines.append(f"| {feature} | {' | '.join(cells)} | {on if ran else '**untested**'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(".."))
