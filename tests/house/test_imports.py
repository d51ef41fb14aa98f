"""What ``import fsdp2`` loads, and what loads when it is first used: in processes of their own."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdp2
from tests.common.errors import raises

pytestmark = pytest.mark.alone

SOURCE = Path(fsdp2.__file__)
HOMES = {**fsdp2._HOMES, **dict.fromkeys(fsdp2._ROOMS, "")}
"""What loads when it is first used, by name: the module that has it."""

LOADED = {"checks", "core", "interop", "sharding"}
"""The modules and rooms of fsdp2 that `fully_shard` needs."""

BY_NAME = {"command", "elastic", "examples", "fsdp1", "planning", "run", "testing", "xla"}
"""Rooms that only those import who want them."""

LEFT_OUT = ("checks.agreement", "checks.groups", "run.installing")
LEFT_OUT += ("interop.wrapped", "sharding.wire", "sharding.wire_states")
"""Modules of those rooms that it does not need."""

TORCHS = "import torch.distributed.fsdp, torch.distributed.tensor"

WATCHED = """if True:
    import json, sys
    from fsdp2 import fully_shard
    from fsdp2.core.notices import Notice
    found = {
        f"{module.removeprefix('fsdp2.core.')}.{name}": [f.__module__ for f in value.functions]
        for module in list(sys.modules) if module.startswith("fsdp2.core")
        for name, value in vars(sys.modules[module]).items() if isinstance(value, Notice)
    }
    print(json.dumps(found))
"""

STEP = """if True:
    import json, sys
    import torch
    import torch.distributed.fsdp, torch.distributed.tensor
    import fsdp2, fsdp2.sharding.api
    from fsdp2.testing.null_group import init_null_group
    init_null_group(1)
    before = set(sys.modules)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    new = [name for name in sys.modules if name not in before and name.startswith("fsdp2")]
    print(json.dumps(new))
"""


EACH = """if True:
    import importlib, json, os
    import torch.distributed.fsdp, torch.distributed.tensor
    import fsdp2
    failed = []
    for names in {names}:
        child = os.fork()
        if not child:
            for name, home in names:
                found = getattr(fsdp2, name)
                module = importlib.import_module(f"fsdp2.{{home or name}}")
                assert found is (getattr(module, name) if home else module)
                assert vars(fsdp2)[name] is found is getattr(fsdp2, name)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(names)
    print(json.dumps(failed))
"""

INSTALLED = """if True:
    import json
    import torch.distributed.fsdp
    before = torch.distributed.fsdp.FullyShardedDataParallel
    import fsdp2
    fsdp2.install()
    import fsdp2.fsdp1
    from torch.distributed.checkpoint import state_dict
    after = torch.distributed.fsdp.FullyShardedDataParallel
    print(json.dumps([state_dict.FSDP is before, after is fsdp2.fsdp1.FullyShardedDataParallel]))
"""


FORKS = f"""if True:
    import json, os, sys, traceback
    {TORCHS}
    sys.stdout.write("[")
    for number, (source, environment) in enumerate(json.loads(sys.argv[1])):
        sys.stdout.write("," * bool(number))
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                os.environ.update(environment)
                exec(source, {{"__name__": "__main__"}})
                sys.stdout.flush()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
    sys.stdout.write("]")
"""
"""Runs each source in a fork of a process that has imported torch's FSDP2, and nothing of ours."""


@functools.cache
def _after_torch() -> list[Any]:
    """What each of `SOURCES` prints as JSON."""
    return list(_alone(FORKS, json.dumps(SOURCES)))


def _printed(source: str, **environment: str) -> Any:
    return _after_torch()[SOURCES.index((source, environment))]


def _alone(source: str, *arguments: str) -> Any:
    """What a process prints as JSON that runs ``source`` and has imported nothing before."""
    variables = {name: value for name, value in os.environ.items() if name != "FSDP2_DEBUG"}
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _new(first: str, then: str) -> str:
    """A source that prints which modules ``then`` loads where ``first`` has run."""
    return f"""if True:
        import json, sys
        {first}
        before = set(sys.modules)
        {then}
        print(json.dumps([name for name in sys.modules if name not in before]))
    """


def _each() -> str:
    """`EACH`, for all public names by module."""
    of_module: dict[str, list[tuple[str, str]]] = {}
    for name, home in HOMES.items():
        of_module.setdefault(home or name, []).append((name, home))
    return EACH.format(names=list(of_module.values()))


TOGETHER = "import fsdp2, json; fsdp2.Levels; print(json.dumps(list(vars(fsdp2))))"
NEEDED = _new(TORCHS, "from fsdp2 import fully_shard")
SOURCES: list[tuple[str, dict[str, str]]] = [
    *((source, {}) for source in (NEEDED, TOGETHER, WATCHED, STEP, _each(), INSTALLED)),
    (STEP, {"FSDP2_DEBUG": "1"}),
]


def test_the_import_alone_loads_nothing() -> None:
    """So that ``fsdp2 --help`` does not wait for torch."""
    assert _alone(_new("import typing", "import fsdp2")) == ["fsdp2"]


@pytest.mark.slow
def test_fully_shard_loads_what_it_needs() -> None:
    """No room above, nothing of torch that its FSDP2 has not loaded, and nothing of Python."""
    new = _printed(NEEDED)
    own = {name.removeprefix("fsdp2.") for name in new if name.startswith("fsdp2.")}
    assert {name.partition(".")[0] for name in own} == LOADED
    assert own.isdisjoint(LEFT_OUT)
    assert {name for name in new if not name.startswith("fsdp2")} == set()


def test_each_room_is_loaded_or_loads_later() -> None:
    there = {path.stem for path in SOURCE.parent.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert there == {*fsdp2._ROOMS, *LOADED, *BY_NAME, "graph"}
    assert {*fsdp2._ROOMS}.isdisjoint(LOADED | BY_NAME)


@pytest.mark.slow
def test_what_fully_shard_loads_of_torch() -> None:
    """FSDP2, for its classes are bases of ours, but not DCP or dynamo."""
    new = set(_alone(_new("import torch", "from fsdp2 import fully_shard")))
    assert "torch.distributed.fsdp" in new
    assert new.isdisjoint({"torch.distributed.checkpoint", "torch._dynamo", "torch._inductor"})


def test_the_first_use_of_one_loads_its_companions() -> None:
    """Compiled code that reads another of them later finds an ordinary attribute."""
    together = {each for names in fsdp2._TOGETHER.values() for each in names}
    assert together <= set(_printed(TOGETHER))


def test_who_watches_core_is_there_after_the_import() -> None:
    """Checks for everyone are told from the start, whatever else is loaded later."""
    assert _printed(WATCHED) == {
        "device.process_groups.first_use": ["fsdp2.checks.presence"],
        "modules.hooks.forward_raised": ["fsdp2.checks.explain"],
        "modules.engine.backward_raised": ["fsdp2.checks.explain"],
        "modules.registrations.gained": ["fsdp2.sharding.state_dicts"],
        "modules.optimizers.changed": ["fsdp2.checks.optimizers"],
        "modules.optimizers.steps": [],
        "modules.registrations.unexpected": ["fsdp2.checks.registered"],
    }


@pytest.mark.parametrize(
    ("environment", "loaded"),
    [({}, []), ({"FSDP2_DEBUG": "1"}, ["agreement", "freed", "groups"])],
)
def test_sharding_and_steps_load_nothing(environment: dict[str, str], loaded: list[str]) -> None:
    """But for checks that the environment asks for, in the first call of `fully_shard`."""
    assert _printed(STEP, **environment) == [f"fsdp2.checks.{name}" for name in loaded]


def test_each_name_loads_alone_and_is_what_its_module_has() -> None:
    """In a process that has used no other module: the order of loading counts for nothing."""
    assert _printed(_each()) == []


def test_names_are_listed_before_they_load() -> None:
    source = """if True:
        import json, sys
        import fsdp2
        before = set(sys.modules)
        print(json.dumps([dir(fsdp2), len(set(sys.modules) - before), dir(fsdp2.tracing)]))
    """
    listed, loaded, of_tracing = _alone(source)
    assert listed == sorted([*fsdp2.__all__, "__version__"])
    assert loaded == 0
    assert of_tracing == sorted(fsdp2.tracing.__all__)


def test_dcp_keeps_torchs_wrapper_whenever_it_is_imported() -> None:
    """`install` replaces names where they are listed, and nowhere else."""
    assert _printed(INSTALLED) == [True, True]


def test_an_unknown_name() -> None:
    with raises("no-such-name") as caught:
        _ = fsdp2.fully_shrad
    assert (caught.value.name, caught.value.obj) == ("fully_shrad", fsdp2)  # for Python's advice
    assert not hasattr(fsdp2, "fully_shrad")


# ---- what type checkers and editors read


def test_types_agree_with_what_loads_later() -> None:
    """The imports under ``TYPE_CHECKING`` are the table, and the public names of `_ROOMS`."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    tests = {ast.unparse(n.test): n for n in tree.body if isinstance(n, ast.If)}
    read: dict[str, str] = {}
    for node in tests["TYPE_CHECKING"].body:
        assert isinstance(node, ast.ImportFrom)
        home = str(node.module).removeprefix("fsdp2").removeprefix(".")
        read |= dict.fromkeys([alias.name for alias in node.names], home)
    assert read == {name: home for name, home in HOMES.items() if name in fsdp2.__all__}


def test_types_know_no_names_but_those() -> None:
    """A ``__getattr__`` that type checkers see would let any name pass."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    assert "__getattr__" not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert "__getattr__" in vars(fsdp2)


def test_each_public_name_loads_later() -> None:
    assert {name for name in fsdp2.__all__ if name not in HOMES} == set()
    named = [*fsdp2._TOGETHER.values(), *fsdp2._LATER.values(), fsdp2._ROOMS]
    assert len(HOMES) == sum(map(len, named)), "a name is in one table"
