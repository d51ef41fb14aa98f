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
from fsdp2.core import facts, notices
from fsdp2.core.names import clean, clean_as_fsdp1
from tests.common import cases, upper_bounds

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [p for p in FILES if not {"examples", "testing"} & {*p.relative_to(ROOT).parts}]

# The rooms of core, lowest first: each may import the rooms that it names, and the ground floor.
GROUND = ("config", "custom_collectives", "errors", "names", "notices", "pieces", "progress")
FACTS = "facts"
"""The page that rooms above core import; on the roof of core."""
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
C10D, FUNCTIONAL = "torch._C._distributed_c10d", "torch.distributed._functional_collectives"

TOUCHING: dict[str, set[str]] = {
    "core.device.backends": {"torch.distributed"},
    "core.device.collectives": {"torch.distributed", C10D, FUNCTIONAL},
    "core.device.channels": {"torch.distributed", C10D},
    "core.device.process_groups": {"torch.distributed", "torch.distributed.distributed_c10d"},
    "core.custom_collectives": {"torch.distributed"},
    "core.device.comm_memory": {"torch.distributed", "torch.distributed._symmetric_memory"},
    "tracing.paper.null_group": {"torch.distributed"},
    "tracing.paper.stage": {"torch.distributed"},
    "elastic.contents": {"torch.distributed.checkpoint.stateful"},
    "elastic.transport": {"torch.distributed.checkpoint.stateful"},
    "fsdp1.state_dicts": {"torch.distributed._shard.sharded_tensor.api"},
    "command.checkpoint": {"torch.distributed.checkpoint.metadata"},
    "command.doctor": {"torch.distributed"},
    "command.selftest": {"torch.distributed"},
    "fsdp1.comm_hooks": {"torch.distributed.algorithms._comm_hooks.default_hooks"},
    "run.installing": {"torch.distributed.checkpoint.state_dict"},
}
"""What modules touch c10d, and by what: the device's room, and what else is said here."""

COMMUNICATING = {
    "core.device.collectives",
    "core.device.channels",
    "fsdp1.comm_hooks",  # torch's, which call them
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
    "Memory": "of a plan; of a timeline",
    "Operators": "noted on paper, counted in tests",
    "Call": "of a unit; of a public function by all ranks; of a null group; of a simulated step",
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


@functools.cache
def _imports_of(path: Path) -> set[tuple[str, str]]:
    package = ".".join(("fsdp2", *path.relative_to(ROOT).parts[:-1]))
    return set(_imports(_tree(path), package))


def _below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


ERRORS = "fsdp2.core.errors"
"""Every module may raise: imports of exceptions count nowhere. It imports nothing of fsdp2."""


@functools.cache
def _modules_of(path: Path) -> set[str]:
    """Modules that a file imports but `ERRORS`; ``from package import module`` is the module."""
    found = set()
    for module, name in _imports_of(path):
        candidate = ROOT.parent.joinpath(*module.split("."), f"{name}.py")
        found.add(f"{module}.{name}" if name and candidate.is_file() else module)
    return found - {ERRORS}


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
    assert {path.stem for path in core.glob("*.py")} == {"__init__", FACTS, *GROUND}
    text = ast.get_docstring(_tree(core / "__init__.py")) or ""
    named = re.findall(r"^(\w+)(/?) ", text.partition("\n\n")[2], re.MULTILINE)
    assert {room for room, folder in named if folder} == set(ROOMS)
    assert {module for module, folder in named if not folder} == {FACTS, *GROUND}


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


@cases.each("path", FILES)
def test_one_module_takes_wrappers_out_of_names(path: Path) -> None:
    constants = {node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant)}
    prefixes = {"_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."}
    assert bool(constants & prefixes) == (_name(path) == "core.names")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    """Those that it names, which are above it in `ROOMS`; and it uses each of them."""
    imported = set()
    for path in (ROOT / "core" / room).glob("*.py"):
        imported |= _rooms_of(path)
        assert all(_below(module, "core") for module in _own_modules(path)), path
    assert imported - {room, *GROUND} == set(ROOMS[room])
    assert set(ROOMS[room]) <= {*list(ROOMS)[: list(ROOMS).index(room)]}
    assert not {room, *ROOMS[room]} >= {"gather", "reduce"} or room not in ("gather", "reduce")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there(room: str) -> None:
    """Its docstring lists each module of the room, and none that is not there."""
    assert _listed(ROOT / "core" / room) == _modules_in(ROOT / "core" / room)


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


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    for path in [*FILES, *Path(__file__).parents[1].rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^ *(from|import) benchmarks\b", text, re.MULTILINE), path


def test_who_watches_core_is_there_for_everyone() -> None:
    """Each of `Notice` is named in the table, and most have a function once fsdp2 is there."""
    table = notices.__doc__ or ""
    found = [
        (_name(path).removeprefix("core."), name, value)
        for path in (ROOT / "core").rglob("*.py")
        if path.stem != FACTS  # which has them by other names, too
        for name, value in vars(sys.modules.get(f"fsdp2.{_name(path)}", notices)).items()
        if isinstance(value, notices.Notice)
    ]
    assert found
    for module, name, value in found:
        assert re.search(rf"\b{name}\b", table), (module, name)
        assert value.functions or name == "steps", (module, name)


def test_what_tests_share_is_on_one_page() -> None:
    """Each module of tests/common, and no other; and tests take modules, not lists of names."""
    common = Path(__file__).parents[1] / "common"
    page = ast.get_docstring(_tree(common / "__init__.py")) or ""
    said = set(re.findall(r"^    (\w+) ", page, re.MULTILINE))
    assert said == {path.stem for path in common.glob("*.py")} - {"__init__"}
    taken = re.compile(r"^from tests\.common\.\w+ import (\([^)]*\)|.*)", re.MULTILINE)
    lists = [
        f"{path.name} takes {names}"
        for path in common.parent.rglob("test_*.py")
        for names in taken.findall(path.read_text(encoding="utf-8"))
        if names.strip("(), \n").count(",") > 1
    ]
    assert lists == []


FLOORS = (
    {"core"},
    {"checks", "errors", "full", "graph", "interop", "tracing"},
    {"optim", "sharding", "testing"},
    {"checkpoint", "wrap"},
    {"elastic", "fsdp1", "planning", "xla"},
    {"run"},
    {""},
    {"__main__", "command", "examples"},
)
"""The rooms of the package, lowest first: a room imports only rooms below it. ``""`` is `fsdp2`."""

SATELLITES = {*FLOORS[3], *FLOORS[4], "command", "full", "graph", "optim", "run", "tracing"}
"""Rooms that a step does without: of core they import its facts, and its errors as everyone."""


def _room(module: str) -> str:
    return "" if module == "fsdp2" else module.partition(".")[0]


def test_the_house_has_nine_floors_with_the_benchmarks() -> None:
    """And twenty rooms at most, each on one of them, besides the page of errors."""
    rooms = [room for floor in FLOORS for room in floor]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert sorted(rooms) == sorted({*folders, "", "__main__", "errors"})
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "errors"}
    assert len(FLOORS) == 8
    assert len(rooms) <= 21


@cases.each("path", FILES)
def test_imports_point_down(path: Path) -> None:
    """Those inside functions, and those of type checkers, too."""
    height = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    own = _room(_name(path))
    for module in _own_modules(path):
        room = _room(module)
        below = height[room] < height[own] or (own, room) == ("__main__", "command")
        assert room == own or below, f"{_name(path)} imports {module}"


@cases.each("path", FILES)
def test_satellites_stand_on_the_facts_of_the_engine(path: Path) -> None:
    """`core.facts` has all that they use of core. The rooms of a step do not load it."""
    own = {module for module in _own_modules(path) if _below(module, "core")}
    if _room(_name(path)) in SATELLITES:
        assert own <= {"core.facts"}
    else:
        assert "core.facts" not in own


def test_the_facts_are_used() -> None:
    """Each name on the page has a user outside of core."""
    imported = {pair for path in FILES for pair in _imports_of(path)}
    exported = {name for name in vars(facts) if not name.startswith("__")} - {"annotations"}
    assert {name for module, name in imported if module == "fsdp2.core.facts"} == exported


@pytest.mark.parametrize("room", sorted({*SATELLITES, *FLOORS[1], "sharding"} - {"errors"}))
def test_a_room_above_core_says_what_lives_there(room: str) -> None:
    text = ast.get_docstring(_tree(ROOT / room / "__init__.py")) or ""
    for name in _modules_in(ROOT / room):
        assert re.search(rf"\b{name}\b", text), name


def test_data_of_traces_needs_no_torch() -> None:
    """`fsdp2 trace` and pages read files on machines without one."""
    for name in ("timeline", "summaries", "page"):
        modules = _modules_of(ROOT / "tracing" / f"{name}.py")
        assert not any(_below(m, "torch") or _below(m, "fsdp2.core") for m in modules), name


def test_commands_parse_arguments_before_torch_loads() -> None:
    for path in (ROOT / "command").glob("*.py"):
        loaded = {m for node in _tree(path).body for m, _ in _imports(node, "") if _is_plain(node)}
        assert not any(_below(m, "torch") for m in loaded) or path.stem == "selftest", path
        own = {module for module in loaded if _below(module, "fsdp2")} - {"fsdp2"}
        assert all(_below(module, "fsdp2.command") for module in own), path


def _is_plain(node: ast.stmt) -> bool:
    """Whether it is an import that runs when its module loads."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_one_module_of_checkpoints_writes_and_one_communicates() -> None:
    """A crash between two of `files`' calls is tried in tests; other writes would be missed."""
    for path in (ROOT / "checkpoint").glob("*.py"):
        imported = {name for _, name in _imports_of(path)}
        assert not imported & {"members_of", "side_channel"} or path.stem == "consensus", path
        called = {ast.unparse(n.func) for n in ast.walk(_tree(path)) if isinstance(n, ast.Call)}
        writing = {"os.rename", "os.unlink", "os.mkdir", "os.rmdir", "os.fsync", "open"}
        assert not called & writing or path.stem in ("files", "owning"), path


def test_only_modules_that_become_fsdp_modules_change_their_class() -> None:
    """Debug, trace and a profiler stand around groups.

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
    assert set(changing) == {"sharding.module", "checks.freed"}


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _sets_class(node: ast.Call) -> bool:
    """``setattr(thing, "__class__", …)``, by whatever name."""
    return any(
        isinstance(given, ast.Constant) and given.value == "__class__" for given in node.args
    )


def test_every_exported_name_exists() -> None:
    exported = set(fsdp2.__all__)
    assert len(exported) == len(fsdp2.__all__) <= 36, "a new name takes the place of another"
    assert sum(name[0] != "_" for name in vars(fsdp2.FSDPModule)) <= 30, "and so does a method"
    assert all(hasattr(fsdp2, name) for name in exported)


def test_examples_use_public_names_only() -> None:
    by_name = ("elastic", "examples", "xla")
    for path in (ROOT / "examples").rglob("*.py"):
        for module, name in _imports_of(path):
            known = ("fsdp2.examples", "fsdp2.planning.presets")
            if not _below(module, "fsdp2") or any(_below(module, each) for each in known):
                continue
            assert module.count(".") <= 1, f"{path.name} imports {module}"
            exported = {"__version__", *importlib.import_module(module).__all__}
            allowed = name in exported or (module == "fsdp2" and name in by_name)
            assert allowed or not name, f"{path.name}: {name} of {module}"


@cases.each("path", INSIDE)
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


@cases.each("path", FILES)
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
