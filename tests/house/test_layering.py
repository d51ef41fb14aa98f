"""Who may import whom, and who may talk to c10d: read from the source."""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp2
from fsdp2.core import notices
from fsdp2.core.names import clean, clean_as_fsdp1
from tests.common import upper_bounds

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [p for p in FILES if not {"examples", "testing"} & {*p.relative_to(ROOT).parts}]

# The rooms of core, lowest first: each may import the rooms that it names, and the ground floor.
GROUND = ("config", "custom_collectives", "errors", "names", "notices", "pieces", "progress")
ROOMS: dict[str, tuple[str, ...]] = {
    "codecs": (),
    "device": (),
    "layout": ("device",),
    "params": ("codecs", "layout"),
    "gather": ("codecs", "device", "layout", "params"),
    "reduce": ("codecs", "device", "layout", "params"),
    "schedule": ("device", "layout", "params", "gather", "reduce"),
    "modules": ("device", "layout", "params", "schedule"),
}
TESTING = ("device", "layout", "params", "gather", "reduce", "schedule", "modules")
"""What `fsdp2.testing` may import of them."""

C10D = "torch._C._distributed_c10d"

TOUCHING: dict[str, set[str]] = {
    "core.device.backends": {"torch.distributed"},
    "core.device.collectives": {"torch.distributed", C10D},
    "core.device.one_off": {"torch.distributed", "torch.distributed._functional_collectives"},
    "ranks.channels": {"torch.distributed", C10D},
    "ranks.transfers": {"torch.distributed"},
    "core.device.process_groups": {"torch.distributed", "torch.distributed.distributed_c10d"},
    "core.custom_collectives": {"torch.distributed"},
    "comm_memory": {"torch.distributed", "torch.distributed._symmetric_memory"},
    "paper.null_group": {"torch.distributed"},
    "paper.stage": {"torch.distributed"},
    "elastic.contents": {"torch.distributed.checkpoint.stateful"},
    "elastic.transport": {"torch.distributed.checkpoint.stateful"},
    "command.checkpoint": {"torch.distributed.checkpoint.metadata"},
    "command.doctor": {"torch.distributed"},
    "command.selftest": {"torch.distributed"},
    "interop.installing": {"torch.distributed.checkpoint.state_dict"},
}
"""What modules touch c10d, and by what: the device's room, `ranks`, and what else is said here."""

COMMUNICATING = {
    "core.device.collectives",
    "core.device.one_off",
    "ranks.channels",
    "ranks.transfers",
}
"""Modules that call collectives."""

TORCHS_OWN = {
    "interop.identity": {
        "torch.distributed.fsdp",
        "torch.distributed._composable.contract",
        "torch.distributed._composable_state",
        *(f"torch.distributed.fsdp._fully_shard._fsdp_{p}" for p in ("common", "param", "state")),
    },
    "interop.wrapped": {
        "torch.distributed.fsdp",
        "torch.distributed.fsdp.sharded_grad_scaler",
    },
}
"""What imports torch's FSDP, and what of it: its names, and types of stand-ins."""

NAMED_TWICE = {
    **dict.fromkeys(
        ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"),
        "core's own, and a subclass of torch's too in `interop`",
    ),
    "Contents": "of a group, as checksums; of a checkpoint",
    "Reader": "DCP's of a step; of a safetensors file",
    **dict.fromkeys(("Memory", "UnitTimes"), "of a plan; of a timeline"),
    "Operators": "noted on paper, counted in tests",
    "Call": "of a unit; of a process group of notes; of a simulated step",
}
"""Classes of two modules, and why: what is not here has a name of its own."""

COLLECTIVES = re.compile(
    r"_?(all_?gather|reduce_?scatter|all_?reduce|all_?to_?all|broadcast|barrier|gather|scatter"
    r"|send|recv|isend|irecv)(_.*)?"
)
"""Methods of a process group, and functions of torch.distributed, that communicate."""


def _name(path: Path) -> str:
    """fsdp2/core/schedule/group.py -> core.group; fsdp2/__init__.py -> "" """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") of every import, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, module] if module else base)
            for alias in node.names:
                yield module, alias.name


def _imports_of(path: Path) -> set[tuple[str, str]]:
    package = ".".join(("fsdp2", *path.relative_to(ROOT).parts[:-1]))
    return set(_imports(_tree(path), package))


def _below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


ERRORS = "fsdp2.core.errors"
"""Every module may raise: imports of exceptions count nowhere. It imports nothing of fsdp2."""


def _modules_of(path: Path) -> set[str]:
    """Modules that a file imports but `ERRORS`; ``from package import module`` is the module."""
    found = set()
    for module, name in _imports_of(path):
        candidate = ROOT.parent.joinpath(*module.split("."), f"{name}.py")
        found.add(f"{module}.{name}" if name and candidate.is_file() else module)
    return found - {ERRORS}


def test_the_module_of_errors_stands_on_nothing() -> None:
    assert not _own_modules(ROOT / "core" / "errors.py")


def test_relative_imports_are_resolved() -> None:
    tree = ast.parse("from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e import f")
    assert set(_imports(tree, "fsdp2.core")) == {
        ("fsdp2.core", "a"),
        ("fsdp2.core.b", "c"),
        ("fsdp2", "d"),
        ("fsdp2.e", "f"),
    }


def _own_modules(path: Path) -> set[str]:
    """What a file imports of fsdp2, as ``core.gather.program``."""
    return {m.removeprefix("fsdp2.") for m in _modules_of(path) if _below(m, "fsdp2")}


def _rooms_of(path: Path) -> set[str]:
    """Rooms of core, and modules of its ground floor, that a file imports."""
    return {
        module.removeprefix("core.").partition(".")[0]
        for module in _own_modules(path)
        if _below(module, "core")
    }


def test_every_module_of_core_is_in_a_room() -> None:
    core = ROOT / "core"
    rooms = {path.name for path in core.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ROOMS)
    assert {path.stem for path in core.glob("*.py")} == {"__init__", *GROUND}
    text = ast.get_docstring(_tree(core / "__init__.py")) or ""
    named = re.findall(r"^(\w+)(/?) ", text.partition("\n\n")[2], re.MULTILINE)
    assert {room for room, folder in named if folder} == set(ROOMS)
    assert {module for module, folder in named if not folder} == set(GROUND)


@pytest.mark.parametrize(
    ("name", "cleaned", "as_fsdp1"),
    [
        ("layer.weight", "layer.weight", "layer.weight"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b", "a.b"),
        ("_orig_mod.a._orig_mod.b", "a.b", "_orig_mod.a._orig_mod.b"),
        ("_orig_mod._fsdp_wrapped_module.a", "a", "_orig_mod.a"),
        ("orig_mod.a", "orig_mod.a", "orig_mod.a"),
    ],
)
def test_wrappers_names(name: str, cleaned: str, as_fsdp1: str) -> None:
    assert clean(name) == cleaned
    assert clean_as_fsdp1(name) == as_fsdp1


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_one_module_takes_wrappers_out_of_names(path: Path) -> None:
    constants = {node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant)}
    prefixes = {"_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."}
    assert bool(constants & prefixes) == (_name(path) == "core.names")


def test_rooms_are_named_from_the_ground_up() -> None:
    """So that no arrow between rooms points up, and there is no circle."""
    order = list(ROOMS)
    for room, others in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in others)
    assert "reduce" not in ROOMS["gather"]
    assert "gather" not in ROOMS["reduce"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    imported = set()
    for path in (ROOT / "core" / room).glob("*.py"):
        imported |= _rooms_of(path)
        assert all(_below(module, "core") for module in _own_modules(path)), path
    assert imported - {room, *GROUND} <= set(ROOMS[room])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_what_it_names(room: str) -> None:
    imported = set().union(*(_rooms_of(path) for path in (ROOT / "core" / room).glob("*.py")))
    assert set(ROOMS[room]) <= imported


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there(room: str) -> None:
    """Its docstring lists each module of the room, and none that is not there."""
    assert _listed(ROOT / "core" / room) == _modules_in(ROOT / "core" / room)


@pytest.mark.parametrize("room", ["checkpoint", "fsdp1", "full", "paper", "planning", "tracing"])
def test_a_room_above_core_lists_modules_that_are_there(room: str) -> None:
    assert _listed(ROOT / room) <= _modules_in(ROOT / room)


def _modules_in(room: Path) -> set[str]:
    return {path.stem for path in room.glob("*.py")} - {"__init__"}


def _listed(room: Path) -> set[str]:
    """Modules that a room's docstring lists in its second paragraph, one a line."""
    text = ast.get_docstring(_tree(room / "__init__.py")) or ""
    lines = text.split("\n\n")[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return {line.split()[0] for line in lines if not line[indent:].startswith(" ")}


def test_no_public_name_hides_a_module() -> None:
    """``import fsdp2.planning.hardware as h`` finds what a function of that name would hide."""
    for path in FILES:
        name = _name(path)
        if path.stem in ("__main__", "sitecustomize"):  # which run on import
            continue
        full = f"fsdp2.{name}" if name else "fsdp2"
        importlib.import_module(full)
        scope: dict[str, object] = {}
        exec(f"import {full} as found", scope)
        assert scope["found"] is sys.modules[full], full


def test_code_says_which_decisions_it_follows() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    cited = {int(number) for number in re.findall(r"\bdecisions?[\s/#]+0*(\d+)", text)}
    known = {int(path.name[:4]) for path in (ROOT.parent / "docs" / "decisions").glob("0*.md")}
    assert cited == known


def test_no_modules_of_the_package_import_each_other_in_a_circle() -> None:
    above = {_name(path): _own_modules(path) - {_name(path)} for path in FILES}
    while above:
        lowest = [name for name, others in above.items() if not others & above.keys()]
        assert lowest, f"a circle among {sorted(above)}"
        for name in lowest:
            del above[name]


def test_what_decides_does_not_import_the_hooks() -> None:
    assert "core.modules.hooks" not in _own_modules(ROOT / "sharding" / "plan.py")


@pytest.mark.parametrize("path", sorted((ROOT / "testing").rglob("*.py")), ids=_name)
def test_the_testing_room_stands_on_the_core(path: Path) -> None:
    assert _rooms_of(path) <= {*TESTING, *GROUND}
    own = {module for module in _own_modules(path) if not _below(module, "core")}
    others = {"record.notes", "record.replay", "tracing.drawing", "tracing.timeline"}
    others |= {"paper.null_group"}
    assert all(_below(module, "testing") or module in others for module in own)


@pytest.mark.parametrize("path", [p for p in FILES if "testing" not in p.parts], ids=_name)
def test_nobody_runs_on_the_testing_room(path: Path) -> None:
    assert not any(_below(module, "testing") for module in _own_modules(path))


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    for path in [*FILES, *Path(__file__).parents[1].rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^ *(from|import) benchmarks\b", text, re.MULTILINE), path


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("reports", ["fsdp2.tracing.summaries"]),
        ("optim/clipping", ["fsdp2.optim", "fsdp2.optim.norms"]),
        ("optim/norms", ["fsdp2.ranks", "fsdp2.optim.in_backward"]),
        ("optim/runs", []),
        ("optim/in_backward", ["fsdp2.optim.offloaded", "fsdp2.optim.runs"]),
        ("optim/offloaded", ["fsdp2.optim.runs"]),
        ("optim/repoint", []),
        ("wrapper_module", []),
        ("interop/identity", ["fsdp2.sharding"]),
        ("comm_memory", []),
        ("wire", []),
        ("wire_states", []),
        (
            "module",
            [
                *("fsdp2.comm_memory", "fsdp2.interop", "fsdp2.sharding"),
                "fsdp2.wire",
            ],
        ),
        ("api", ["fsdp2.interop", "fsdp2.module", "fsdp2.sharding"]),
    ],
)
def test_public_modules_stand_on_the_core(name: str, others: list[str]) -> None:
    own = {m for m in _modules_of(ROOT / f"{name}.py") if _below(m, "fsdp2")}
    assert any(_below(module, "fsdp2.core") for module in own)
    known = ("fsdp2.core", *others)
    assert all(any(_below(module, each) for each in known) for module in own)


def test_rooms_around_a_step_stand_on_the_core() -> None:
    """They say what lives there, and import those before them; core knows of none."""
    rooms = (("ranks", ()), ("checks", ("ranks",)), ("sharding", ("checks",)))
    for room, others in rooms:
        text = ast.get_docstring(_tree(ROOT / room / "__init__.py")) or ""
        for path in (ROOT / room).glob("*.py"):
            assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path.stem
            known = ("core", room, *others)
            assert all(any(_below(m, each) for each in known) for m in _own_modules(path)), path


def test_who_watches_core_is_there_for_everyone() -> None:
    """Each of `Notice` is named in the table, and most have a function once fsdp2 is there."""
    table = notices.__doc__ or ""
    found = [
        (_name(path).removeprefix("core."), name, value)
        for path in (ROOT / "core").rglob("*.py")
        for name, value in vars(sys.modules.get(f"fsdp2.{_name(path)}", notices)).items()
        if isinstance(value, notices.Notice)
    ]
    assert found
    for module, name, value in found:
        assert re.search(rf"\b{name}\b", table), (module, name)
        assert value.functions or name in ("steps", "zeroed"), (module, name)


def test_what_tests_share_is_on_one_page() -> None:
    """Each module of tests/common, and no other; and tests take modules, not lists of names."""
    common = Path(__file__).parents[1] / "common"
    page = ast.get_docstring(_tree(common / "__init__.py")) or ""
    said = set(re.findall(r"^    (\w+) ", page, re.MULTILINE))
    assert said == {path.stem for path in common.glob("*.py")} - {"__init__"}
    lists = [
        f"{path.name} takes {len(node.names)} names of {node.module}"
        for path in common.parent.rglob("test_*.py")
        for node in _tree(path).body
        if isinstance(node, ast.ImportFrom) and len(node.names) > 2
        if (node.module or "").startswith("tests.common.")
    ]
    assert lists == []


def test_the_room_of_whole_tensors_stands_on_the_core() -> None:
    """And says what lives there."""
    room = ROOT / "full"
    text = ast.get_docstring(_tree(room / "__init__.py")) or ""
    for path in room.glob("*.py"):
        assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path.stem
        for module in _own_modules(path):
            assert any(_below(module, each) for each in ("core", "full", "ranks", "sharding")), path


def test_the_room_of_torchs_clients_says_what_lives_there() -> None:
    """And importing it installs nothing: `installing` stands on what imports this room."""
    room = ROOT / "interop"
    text = ast.get_docstring(_tree(room / "__init__.py")) or ""
    for path in room.iterdir():
        hidden = path.stem.startswith("__")
        assert hidden or re.search(rf"^{path.stem}\b", text, re.MULTILINE), path.stem
    assert _own_modules(room / "__init__.py") == {"interop.identity"}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        (
            "interop/installing",
            [
                *("checks.registered", "api", "fsdp1"),
                *("interop", "interop.startup", "interop.wrapped", "module", "optim.clipping"),
            ],
        ),
        ("run", ["interop.installing"]),
    ],
)
def test_what_replaces_torchs_names_stands_on_public_modules(name: str, others: list[str]) -> None:
    own = {m for m in _modules_of(ROOT / f"{name}.py") if _below(m, "fsdp2")}
    assert own == {f"fsdp2.{other}" for other in others}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("__init__", ["xla.files", "xla.wrapper"]),
        ("consolidate", ["xla.files"]),
        ("files", ["xla.shards"]),
        ("shards", ["core.pieces"]),
        (
            "wrapper",
            [
                *("api", "core.modules.registry", "sharding.meshes"),
                *("interop", "module", "optim.norms", "xla.shards"),
                *("wrap.choices", "wrapper_module"),
            ],
        ),
    ],
)
def test_xlas_interface_stands_on_public_modules(name: str, others: list[str]) -> None:
    """Of core it reads units' flags and makes meshes of groups; files need neither."""
    own = {m for m in _modules_of(ROOT / "xla" / f"{name}.py") if _below(m, "fsdp2")}
    assert own == {f"fsdp2.{other}" for other in others}


def test_fsdp1_says_what_lives_there() -> None:
    """Its docstring names each module; no room below, and nobody in core, knows of it."""
    text = ast.get_docstring(_tree(ROOT / "fsdp1" / "__init__.py")) or ""
    for path in (ROOT / "fsdp1").glob("*.py"):
        assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path.stem
    users = {_name(path) for path in FILES if any(_below(m, "fsdp1") for m in _own_modules(path))}
    assert {name for name in users if not _below(name, "fsdp1")} <= {"", "interop.installing"}


def test_the_room_of_checkpoints_stands_on_public_modules() -> None:
    """And says what lives there; ranks talk through `consensus`, `files` writes, `owning` locks."""
    room = ROOT / "checkpoint"
    text = ast.get_docstring(_tree(room / "__init__.py")) or ""
    others = {"module", "core.config", "core.names", "full.loading"}
    others |= {"core.device.buffers", "core.layout.mesh", "core.modules.registry"}
    others |= {"core.progress", "core.modules.optimizers"}  # what reads shards beside training
    others |= {"ranks.channels", "core.device.process_groups", "core.pieces", "wire_states"}
    for path in room.glob("*.py"):
        assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path.stem
        assert all(_below(m, "checkpoint") or m in others for m in _own_modules(path)), path
        imported = {name for _, name in _imports_of(path)}
        assert not imported & {"members_of", "side_channel"} or path.stem == "consensus"
        called = {ast.unparse(n.func) for n in ast.walk(_tree(path)) if isinstance(n, ast.Call)}
        writing = {"os.rename", "os.unlink", "os.mkdir", "os.rmdir", "os.fsync", "open"}
        assert not called & writing or path.stem in ("files", "owning"), path
    users = {_name(p) for p in FILES if any(_below(m, "checkpoint") for m in _own_modules(p))}
    # The package imports it by name; peers are sent what steps on a disk have.
    above = ("checkpoint", "command", "elastic")
    assert all(any(_below(name, each) for each in above) for name in users)


TRACE: dict[str, set[str]] = {
    "timeline": set(),
    "summaries": {"tracing.timeline"},
    "page": {"tracing.summaries", "tracing.timeline"},
}
"""What modules of `fsdp2.trace` import of fsdp2: the data stands on nothing, not even on torch."""

BINDING = ("states", "recording", "seams", "context", "drawing")
"""Those that stand on the core and on the record besides: what is bound to it, and when."""


def test_the_room_of_timelines_stands_on_its_data() -> None:
    """And says what lives there; nobody in core knows of it."""
    room = ROOT / "tracing"
    text = ast.get_docstring(_tree(room / "__init__.py")) or ""
    for path in room.glob("*.py"):
        named = path.stem.startswith("__") or re.search(rf"\b{path.stem}\b", text)
        assert named, path.stem
    for name, others in TRACE.items():
        assert _own_modules(room / f"{name}.py") - {f"tracing.{name}"} == others
        assert not any(_below(m, "torch") for m in _modules_of(room / f"{name}.py"))
    assert {path.stem for path in room.glob("*.py")} == {"__init__", *TRACE, *BINDING}
    for name in BINDING:
        own = _own_modules(room / f"{name}.py")
        below = ("core", "record", "tracing")
        assert all(any(_below(module, each) for each in below) for module in own)
    users = {_name(path) for path in FILES if any(_below(m, "tracing") for m in _own_modules(path))}
    assert not any(_below(name, "core") for name in users)


def test_the_room_of_the_record_stands_on_lanes_alone() -> None:
    """And says what lives there; nobody in core knows of it."""
    text = ast.get_docstring(_tree(ROOT / "record" / "__init__.py")) or ""
    for path in (ROOT / "record").glob("*.py"):
        assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path.stem
        own = _own_modules(path)
        assert all(_below(m, "record") or m == "core.device.streams" for m in own), path
    users = {_name(path) for path in FILES if any(_below(m, "record") for m in _own_modules(path))}
    rooms = {"paper", "planning", "record", "testing", "tracing"}
    assert {name.partition(".")[0] for name in users} <= rooms


def test_the_rooms_of_paper_and_plans_say_what_lives_there() -> None:
    """Plans stand on paper, public modules and timelines; paper on the core and the record."""
    public = {"api", "reports", "interop", "module", "optim.norms", "wrap", "wrap.choices"}
    known = {"core.config", "core.pieces", "core.device.streams", "core.device.collectives"}
    known |= {"core.device.one_off", "core.device.process_groups"}
    known |= {
        "core.layout.mesh",
        "core.progress",
        "core.modules.registry",
        "core.schedule.observers",
        "core.schedule.unit",
    }
    for room, others in (("paper", set()), ("planning", public | known)):
        text = ast.get_docstring(_tree(ROOT / room / "__init__.py")) or ""
        for path in (ROOT / room).glob("*.py"):
            named = path.stem.startswith("__") or re.search(rf"\b{path.stem}\b", text)
            assert named, path.stem
            for module in _own_modules(path):
                below = ("paper", "record", "core" if room == "paper" else "tracing", room)
                assert module in others or any(_below(module, each) for each in below), path
    users = {_name(p) for p in FILES if any(_below(m, "planning") for m in _own_modules(p))}
    assert {name.partition(".")[0] for name in users} <= {"", "planning", "command"}
    users = {_name(p) for p in FILES if any(_below(m, "paper") for m in _own_modules(p))}
    assert all(name.partition(".")[0] in ("planning", "paper", "testing") for name in users)


def test_the_room_of_the_command_is_the_top() -> None:
    """It says what lives there; nothing imports it; what reads arguments loads no torch."""
    room = ROOT / "command"
    assert _listed(room) == _modules_in(room)
    users = {_name(path) for path in FILES if any(_below(m, "command") for m in _own_modules(path))}
    assert {name for name in users if not _below(name, "command")} == {"__main__"}
    for path in room.glob("*.py"):
        loaded = {m for node in _tree(path).body for m, _ in _imports(node, "") if _is_plain(node)}
        torchs = {module for module in loaded if _below(module, "torch")}
        assert torchs == set() or path.stem == "selftest"
        own = {module for module in loaded if _below(module, "fsdp2")} - {"fsdp2"}
        assert all(_below(module, "fsdp2.command") for module in own), path


def _is_plain(node: ast.stmt) -> bool:
    """Whether it is an import that runs when its module loads."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_only_modules_that_become_fsdp_modules_change_their_class() -> None:
    """Debug, trace and a profiler stand around groups, or are what they run on.

    Debug alone lets freed parameters refuse to be read, which C++ does without a question.
    """
    changing = [
        _name(path)
        for path in FILES
        for node in ast.walk(_tree(path))
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and _is_stored(node))
        or (isinstance(node, ast.Call) and _sets_class(node))
        or (isinstance(node, ast.Subscript) and "'__class__'" in ast.unparse(node.slice))
    ]
    assert set(changing) == {"module", "checks.freed"}


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _sets_class(node: ast.Call) -> bool:
    """``setattr(thing, "__class__", …)``, by whatever name."""
    return any(
        isinstance(given, ast.Constant) and given.value == "__class__" for given in node.args
    )


def test_every_exported_name_exists() -> None:
    exported = set(fsdp2.__all__)
    assert len(exported) == len(fsdp2.__all__)
    assert all(hasattr(fsdp2, name) for name in exported)


def test_examples_use_public_names_only() -> None:
    exported = {*fsdp2.__all__, "__version__"}
    for path in (ROOT / "examples").rglob("*.py"):
        for module, name in _imports_of(path):
            if not _below(module, "fsdp2") or _below(module, "fsdp2.examples"):
                continue
            assert module == "fsdp2", f"{path.name} imports {module}"
            assert name in exported or name == "examples" or not name, f"{path.name}: {name}"


@pytest.mark.parametrize("path", INSIDE, ids=_name)
def test_who_touches_c10d(path: Path) -> None:
    """Besides meshes and DTensors, which are for all, and DCP, which is for checkpoints."""
    allowed = ["torch.distributed.tensor", "torch.distributed.device_mesh"]
    if _below(_name(path), "checkpoint"):
        allowed.append("torch.distributed.checkpoint")
    exactly = {**TOUCHING, **TORCHS_OWN}.get(_name(path), set())
    assert exactly == {
        module
        for module in _modules_of(path)
        if (_below(module, "torch.distributed") or "c10d" in module)
        and not any(_below(module, parent) for parent in allowed)
    }


def test_who_calls_collectives() -> None:
    """Those that do, and no others: the claim is true in both directions."""
    assert {_name(path) for path in INSIDE if _collectives_in(_tree(path))} == COMMUNICATING


def _collectives_in(tree: ast.Module) -> list[str]:
    """Collectives of torch.distributed and of process groups that a module uses."""
    used = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and COLLECTIVES.fullmatch(node.attr):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in ("dist", "distributed", "group", "process_group", "pg", "funcol"):
                used.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and _below(node.module or "", "torch.distributed"):
            used += [a.name for a in node.names if COLLECTIVES.fullmatch(a.name)]
    return used


def test_collectives_are_recognised() -> None:
    text = """
dist.all_reduce(x, group=mesh)
self.group.allreduce([x])
from torch.distributed import barrier
mine.all_reduce(x)
from fsdp2.full import gather
"""
    used = {"barrier", "dist.all_reduce", "self.group.allreduce"}
    assert set(_collectives_in(ast.parse(text))) == used


@pytest.mark.parametrize(
    "name", ["all_gather_single", "_allgather_base", "allreduce", "barrier", "scatter_object_list"]
)
def test_communication_is_recognised(name: str) -> None:
    assert COLLECTIVES.fullmatch(name)


@pytest.mark.parametrize("name", ["size", "rank", "get_backend", "init_process_group"])
def test_other_methods_of_a_group_are_not(name: str) -> None:
    assert not COLLECTIVES.fullmatch(name)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nobody_imports_torchs_own(path: Path) -> None:
    theirs = {m for m in _modules_of(path) if _below(m, "torch.distributed.fsdp")}
    theirs |= {m for m, name in _imports_of(path) if (m, name) == ("torch.distributed", "fsdp")}
    assert theirs == set() or _name(path) in TORCHS_OWN


def test_any_stands_at_boundaries_alone() -> None:
    """What torch leaves untyped, payloads of pickles and of JSON, and arguments of a forward.

    Elsewhere a value that is only handed on is an ``object``, and others have their types.
    """
    lines = (line for path in FILES for line in path.read_text(encoding="utf-8").splitlines())
    said = sum(bool(re.search(r"\bAny\b", line)) for line in lines)
    upper_bounds.hold("lines that say Any", lines=said)


def test_one_name_for_one_thing() -> None:
    """Of classes in the whole package, and of functions in core, where rooms work side by side."""
    found = collections.Counter(
        node.name
        for path in FILES
        for node in _tree(path).body
        if "examples" not in path.parts and not getattr(node, "name", "_").startswith("_")
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef) and _below(_name(path), "core"))
    )
    assert {name for name, count in found.items() if count > 1} <= {*NAMED_TWICE}
