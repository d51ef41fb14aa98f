"""Every block of Python in the docs runs, or says why it does not; so do examples of docstrings.

A block runs in the setting of `tests.house.guide_setting`, after the blocks before it on its page:
what they define stays, but each block has a new model. A block of ``diff`` runs as it is after the
change. A comment right before a block says what it needs besides, or why it does not run:

    <!-- given: nodes = 8 -->
    <!-- not run: it needs four GPUs -->

A whole script, marked ``<!-- script: train.py, 2 ranks -->``, is for `tests.common.page_scripts`.
"""

from __future__ import annotations

import doctest
import inspect
import logging
import pkgutil
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fsdp2
import fsdp2.elastic
from tests.house import guide_setting

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]

ELSEWHERE = {"docs/errors.md": "test_explained_errors.py"}
"""Pages whose blocks another test of this folder runs."""

MANY_RANKS = ("first_model.md", "hsdp.md", "tensor_parallel.md", "wrapping.md")
"""Pages of meshes: their blocks run over a null group of 32 ranks, others over one real rank."""

SHARDS = re.compile(r"fully_shard\(|shard_model\(|FSDP\(|deferred\(|\bshard\(|from_local\(")
"""How a block looks that is given a model which is not sharded yet."""

STARTS = re.compile(r"init_process_group\(|fsdp2\.plan\(")
"""How a block looks at the top of a page that is a whole script, or needs no process group."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<what>given|not run|script): (?P<text>(?:(?!-->).)+?) -->\n+)?"
    r"^```(?P<kind>python|diff)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page: its code, what runs before it, and whether it runs."""

    name: str
    code: str
    given: str = ""
    runs: bool = True


def _blocks(page: str) -> list[Block]:
    found = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for number, block in enumerate(_BLOCK.finditer(text)):
        code = block["code"]
        if block["kind"] == "diff":
            kept = (line for line in code.splitlines() if not line.startswith("-"))
            code = "\n".join(line[1:] for line in kept)
        given = textwrap.dedent(block["text"]) if block["what"] == "given" else ""
        found.append(
            Block(f"{page}[{number}]", code, given, block["what"] not in ("not run", "script"))
        )
    return found


_ALL = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
PAGES = {page: found for page in _ALL if page not in ELSEWHERE and (found := _blocks(page))}


def test_every_block_is_found() -> None:
    """A block inside of a list, or with another info string, would not be."""
    for page, blocks in PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert len(re.findall(r"^\s*```(?:py|diff)", text, re.MULTILINE)) == len(blocks), page


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Blocks switch checks on, install fsdp2 and set loggers up."""
    level = logging.getLogger("fsdp2").level
    yield
    fsdp2.debug(check_ranks=False, check_nan=False, check_writes=False)
    fsdp2.uninstall()
    logging.getLogger("fsdp2").setLevel(level)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    to_run = [block for block in PAGES[page] if block.runs]
    while to_run and STARTS.search(to_run[0].code):
        script = to_run.pop(0)
        exec(compile(script.code, script.name, "exec"), {"__name__": "a_script"})
    defined: dict[str, Any] = {}
    with guide_setting.process_group(32 if page.endswith(MANY_RANKS) else 1):
        for block in to_run:
            folder = tmp_path / block.name.rpartition("[")[2].rstrip("]")
            folder.mkdir()
            monkeypatch.chdir(folder)
            _run(block, defined)


def _run(block: Block, defined: dict[str, Any]) -> None:
    given = guide_setting.names(sharded=not SHARDS.search(block.code))
    names = {**given, **{key: value for key, value in defined.items() if key not in given}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block.given, f"given to {block.name}", "exec"), names)
        exec(compile(block.code, block.name, "exec"), names)
    defined.update({key: value for key, value in names.items() if key not in given})


# ---- docstrings


def _examples() -> Iterator[Block]:
    """The examples of the names that the API reference has, and of their methods."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = _resolved(name)
            members = vars(found).items() if isinstance(found, type) else ()
            public = [(f"{name}.{key}", value) for key, value in members if key[0] != "_"]
            for owner, value in [(name, found), *public]:
                text = inspect.getdoc(value) if callable(value) else None
                for number, code in enumerate(_EXAMPLE.findall(text or "")):
                    yield Block(f"{owner}[{number}]", textwrap.dedent(code))


def _resolved(name: str) -> Any:
    return pkgutil.resolve_name(name.partition("[")[0])


_EXAMPLE = re.compile(r"^Example::\n((?:\n| +[^\n]*(?:\n|\Z))+)", re.MULTILINE)
EXAMPLES = {example.name: example for example in _examples()}


_TRACED = """
for name in ("step", "plan"):
    with fsdp2.trace(f"{name}.json"):
        step(model, batch)
"""
_WRAPPED = """
import fsdp2.fsdp1
FSDP = fsdp2.fsdp1.FullyShardedDataParallel
plain_model = Model()
plain_optimizer = torch.optim.AdamW(plain_model.parameters())
model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}))
optimizer = torch.optim.AdamW(model.parameters())
step(model, batch)
optimizer.step()
"""
_XLA = """
import fsdp2.xla
model = fsdp2.xla.XlaFullyShardedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
loss = model(batch)
first = second = batch
"""
_PLANNED = """
dist.destroy_process_group()
make_batch = lambda: torch.zeros(4, 8, dtype=torch.int64)
"""
_STEPS = """
for number in (100, 200):
    loss = float(number)
    checkpoint.save("run", model, optimizer, step=number, extra={"epoch": 3}, metric=loss)
"""
GIVEN = {
    "fsdp2.checkpoint.async_save": "train_on = lambda: None",
    "fsdp2.checkpoint": _STEPS,
    "fsdp2.checkpoint.export": "from unittest.mock import MagicMock; transformers = MagicMock()",
    "fsdp2.checkpoint.snapshot": """
model = nn.Module()
model.blocks = nn.ModuleList([fully_shard(nn.Linear(4, 4))])
""",
    "fsdp2.checkpoint.save": "",
    "fsdp2.checkpoint.Keep": "loss = 1.0",
    "fsdp2.checkpoint.Preemption": "start, steps, train = 0, 2, lambda step: None",
    "fsdp2.fsdp1": _WRAPPED,
    "fsdp2.fsdp1.FullyShardedDataParallel[0]": "model = Model()",
    "fsdp2.fsdp1.FullyShardedDataParallel.optim_state_dict_to_load": _WRAPPED
    + "states = FSDP.optim_state_dict(model, optimizer)",
    "fsdp2.fsdp1.ShardedGradScaler": "loss = model(batch)",
    "fsdp2.FSDPMeshInfo": """
mesh = init_device_mesh("cuda", (32,), mesh_dim_names=("expert_shard",))
""",
    "fsdp2.FSDPModule.set_all_reduce_hook": "more_replicas = None",
    "fsdp2.FSDPModule.set_custom_reduce_scatter": """
class Logged(fsdp2.ReduceScatter):
    def allocate(self, size, *, dtype, device): ...
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False): ...
""",
    "fsdp2.FSDPModule.set_custom_all_gather": """
class Logged(fsdp2.AllGather):
    def allocate(self, size, *, dtype, device): ...
    def __call__(self, output_tensor, input_tensor, group, async_op=False): ...
""",
    "fsdp2.load_from_rank0": 'torch.save(Model().state_dict(), "model.pt")',
    "fsdp2.clip_grad_norm_": "loss = model(batch)",
    "fsdp2.optim.clip_grads_with_norm_": """
step(model, batch)
grads, stages = [param.grad for param in model.parameters() if param.grad is not None], None
""",
    "fsdp2.optim.get_total_norm": "step(model, batch)",
    "fsdp2.trace": _TRACED,
    "fsdp2.tracing.Timeline": "from fsdp2.tracing import Timeline" + _TRACED,
    "fsdp2.tracing": _TRACED,
    "fsdp2.checkpoint.WireState": """
from torch.distributed.checkpoint.state_dict import get_model_state_dict
""",
    "fsdp2.wrap.any_wrap_policy": "by_class = by_size = fsdp2.wrap.always_wrap_policy",
    "fsdp2.wrap.lambda_auto_wrap_policy": "chosen = set()",
    "fsdp2.wrap.wrap[0]": "self, Block = nn.Module(), lambda dim: nn.Linear(dim, dim)",
    "fsdp2.plan": _PLANNED,
    "fsdp2.planning.Plan": _PLANNED
    + "plan = fsdp2.plan(make_model, make_batch, units={Block}, mesh=4)",
    "fsdp2.xla": _XLA,
    "fsdp2.xla.XlaFullyShardedDataParallel[0]": """
model = nn.Sequential()
model.block = nn.Linear(32, 32)
""",
    "fsdp2.xla.XlaFullyShardedDataParallel.execute_sharding": """
model, full = Model(), Model().state_dict()
""",
}
"""What runs before an example: of its name, or of the longest beginning of it that is here."""

NOT_RUN = {
    "fsdp2.FSDPModule.set_post_optim_event[0]": "it needs a stream of a GPU",
    "fsdp2.FSDPModule.set_symm_mem_for_comm[0]": "it needs NCCL",
    "fsdp2.checkpoint.load[0]": "it loads a step of a model with other names",
    "fsdp2.checkpoint.load_pretrained[0]": "it loads weights of Llama",
    "fsdp2.DataParallelMeshDims[0]": "its model must be DTensors on the mesh",
    "fsdp2.xla.consolidate_sharded_model_checkpoints[0]": "it joins files of several ranks",
    "fsdp2.xla.consolidate_sharded_state_dicts[0]": "the same",
    **{
        f"fsdp2.elastic.{name}[0]": "it needs torchft and several groups"
        for name in fsdp2.elastic.__all__
        if name not in ("Manager", "Steps")
    },
}
"""Examples that do not run, and why."""


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NOT_RUN])
def test_the_example_of_a_docstring_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[name].code
    if ">>>" in code:
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    before = [given for given in GIVEN if name.startswith(given)]
    given = GIVEN[max(before, key=len)] if before else ""
    room = _resolved(".".join(name.split(".")[:2]))
    known = {**vars(fsdp2), **(vars(room) if inspect.ismodule(room) else {})}
    many = name.startswith("fsdp2.FSDPMeshInfo")
    with warnings.catch_warnings(), guide_setting.process_group(32 if many else 1):
        warnings.simplefilter("ignore")
        names = {**known, **guide_setting.names(sharded=not SHARDS.search(code))}
        exec(compile(given, f"given to {name}", "exec"), names)
        exec(compile(code, name, "exec"), names)


def test_each_public_name_and_method_has_an_example() -> None:
    runs = [block for blocks in PAGES.values() for block in blocks if block.runs]
    code = "\n".join(block.code for block in (*runs, *EXAMPLES.values()))
    methods = [rf"\.{name}\(" for name in vars(fsdp2.FSDPModule) if name[0] != "_"]
    names = [rf"\b{name}\b" for name in fsdp2.__all__]
    assert [name for name in (*names, *methods) if not re.search(name, code)] == []


def test_what_does_not_run_is_there() -> None:
    assert set(NOT_RUN) <= set(EXAMPLES)
    assert all(any(name.startswith(given) for name in EXAMPLES) for given in GIVEN)
