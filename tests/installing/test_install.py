"""`fsdp2.install()`: whose names torch's FSDP2 modules hold, before, meanwhile and after."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp._fully_shard
import torch.distributed.pipelining
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.interop import TORCHS_NAMES
from fsdp2.interop.wrapped import WRAPPER_NAMES
from fsdp2.run.__main__ import main
from fsdp2.run.installing import HOLDERS, OURS
from fsdp2.run.startup import FOLDER, sitecustomize
from fsdp2.testing.null_group import init_null_group, null_mesh

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parents[1]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(2)
    yield null_mesh(2)
    dist.destroy_process_group()


@pytest.fixture
def installed() -> Iterator[None]:
    _install()
    yield
    fsdp2.uninstall()


def _install() -> None:
    with warnings.catch_warnings():  # other tests of this process have imported torch's
        warnings.simplefilter("ignore", UserWarning)
        fsdp2.install()


def _holders() -> dict[str, ModuleType]:
    return {path: importlib.import_module(path) for path in HOLDERS}


def _names() -> dict[str, dict[str, Any]]:
    return {path: dict(vars(holder)) for path, holder in _holders().items()}


# -- names ----------------------------------------------------------------------------------------


def test_names_are_ours_but_the_class_that_is_asked_for(installed: None) -> None:
    for path, holder in _holders().items():
        found = {name: vars(holder)[name] for name in OURS if name in vars(holder)}
        assert found, f"{path} holds nothing"
        assert all(found[name] is OURS[name] for name in found), path
    for path in ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard"):
        for name in torchs._fully_shard.__all__:
            found = getattr(importlib.import_module(path), name)
            assert found is getattr(fsdp2, name) or name == "FSDPModule", f"{path}.{name}"
    assert torchs.FSDPModule is TORCHS_NAMES["FSDPModule"]
    assert issubclass(fsdp2.FSDPModule, torchs.FSDPModule)


def test_installing_twice_and_uninstalling_is_as_if_nothing_had_been() -> None:
    before = _names()
    _install()
    once = _names()
    _install()
    assert _names() == once != before
    fsdp2.uninstall()
    assert _names() == before
    fsdp2.uninstall()
    assert _names() == before


@pytest.mark.parametrize("since", [False, True])
def test_what_somebody_else_puts_there_stays(since: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    if since:
        _install()
    monkeypatch.setattr(torchs, "fully_shard", theirs)
    if not since:
        _install()
        assert torchs.fully_shard is fsdp2.fully_shard
    fsdp2.uninstall()
    assert torchs.fully_shard is theirs


def test_holders_imported_meanwhile_are_torchs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "torch.distributed.pipelining.schedules"
    monkeypatch.delitem(sys.modules, path)
    _install()
    late: Any = ModuleType(path)
    late.fully_shard = torchs.fully_shard
    monkeypatch.setitem(sys.modules, path, late)
    fsdp2.uninstall()
    assert late.fully_shard is torchs.fully_shard is TORCHS_NAMES["fully_shard"]


@pytest.mark.parametrize(
    "name", ["fully_shard", "FullyShardedDataParallel"], ids=["FSDP2", "FSDP1"]
)
def test_modules_that_imported_torchs_before_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: Any = ModuleType("an_early_framework")
    early.shard = {**TORCHS_NAMES, **WRAPPER_NAMES}[name]
    monkeypatch.setitem(sys.modules, "an_early_framework", early)
    with pytest.warns(UserWarning, match=r"before fsdp2\.install\(\) by .*an_early_framework"):
        fsdp2.install()
    fsdp2.uninstall()


# -- what is asked of modules and policies --------------------------------------------------------


def test_modules_are_recognised_whoever_sharded_them_and_when(mesh: DeviceMesh) -> None:
    imported_before = torchs.FSDPModule
    before = [
        torchs.fully_shard(nn.Linear(4, 4), mesh=mesh),
        fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh),
    ]
    _install()
    try:
        after = torchs.fully_shard(nn.Linear(4, 4), mesh=mesh)
        for module in [*before, after]:
            assert isinstance(module, torchs.FSDPModule)
            assert isinstance(module, imported_before)
            assert torchs.fully_shard.state(module) is not None
        assert isinstance(after, fsdp2.FSDPModule)
        before[0](torch.ones(2, 4)).sum().backward()  # torch's goes on
        assert isinstance(before[0].weight.grad, DTensor)
    finally:
        fsdp2.uninstall()
    after(torch.ones(2, 4)).sum().backward()  # so does ours
    assert isinstance(after.weight.grad, DTensor)


def test_state_of_a_plain_module_is_none() -> None:
    assert fsdp2.fully_shard.state(nn.Linear(1, 1)) is None


POLICIES = [name for name in OURS if name.endswith("Policy")]


def test_policies_are_recognised_whoever_made_them() -> None:
    for name in POLICIES:
        for cls in (OURS[name], TORCHS_NAMES[name]):
            assert isinstance(cls(), OURS[name]), name
            assert isinstance(cls(), TORCHS_NAMES[name]), name
            assert not isinstance(object(), cls), name
    assert isinstance(torchs.CPUOffloadPolicy(), fsdp2.OffloadPolicy)
    assert not isinstance(torchs.OffloadPolicy(), fsdp2.CPUOffloadPolicy)
    assert not isinstance(torchs.MixedPrecisionPolicy(), fsdp2.OffloadPolicy)

    class Mine(fsdp2.MixedPrecisionPolicy): ...

    assert not isinstance(torchs.MixedPrecisionPolicy(), Mine)


def test_a_policy_from_before_is_taken_after(mesh: DeviceMesh) -> None:
    policy = torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    _install()
    try:
        model = torchs.fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
    finally:
        fsdp2.uninstall()
    found = fsdp2.report(model).groups[0].mp_policy
    assert found == fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16


def test_torchs_takes_our_policies(mesh: DeviceMesh) -> None:
    """By its own checks of types, which would leave out in silence what they do not know."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = torchs.fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
    assert model(torch.ones(2, 4)).dtype == torch.float64


# -- parameters that nobody manages ---------------------------------------------------------------


def test_added_parameters_are_left_alone_with_a_warning_while_installed(
    mesh: DeviceMesh, installed: None
) -> None:
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
    model.extra = nn.Parameter(torch.ones(4))
    model.register_forward_hook(lambda module, _, output: output * module.extra)
    with pytest.warns(UserWarning, match=r"'extra' was added after fully_shard.*shard_new_param"):
        model(torch.ones(2, 4)).sum().backward()
    assert not isinstance(model.extra.grad, DTensor)
    assert model.extra.grad is not None
    fsdp2.uninstall()
    model.other = nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match=r"'extra' was added after fully_shard"):
        model(torch.ones(2, 4))


# -- processes that are started meanwhile ---------------------------------------------------------

CHILD = """
import sys
from torch.distributed.fsdp import fully_shard
hidden = getattr(sys.modules.get("sitecustomize"), "HIDDEN", None)
print(fully_shard.__module__, hidden, *sys.argv[1:])
print(*(folder for folder in sys.path if "startup" in folder))
"""


def _start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.extended
@pytest.mark.slow
def test_processes_that_are_started_meanwhile_install_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of their own, from which this process's fsdp2 is not found by its name."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("HIDDEN = 'hidden'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    _install()
    _install()
    started = [_start(tmp_path, "child.py", "a"), _start(tmp_path, "-E", "child.py")]
    fsdp2.uninstall()
    assert os.environ["PYTHONPATH"] == str(tmp_path / "hidden")
    started.append(_start(tmp_path, "child.py"))
    said = [process.communicate(timeout=300)[0].splitlines() for process in started]
    torchs_module = TORCHS_NAMES["fully_shard"].__module__
    assert said[0] == ["fsdp2.sharding.api hidden a", ""]
    assert said[1] == [f"{torchs_module} None", ""], "it was told to read no environment"
    assert said[2] == [f"{torchs_module} hidden", ""], "it was started after uninstall()"


def test_an_environment_without_a_path_is_without_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    _install()
    assert os.environ["PYTHONPATH"] == FOLDER
    fsdp2.uninstall()
    assert "PYTHONPATH" not in os.environ
    monkeypatch.setenv("PYTHONPATH", f"mine{os.pathsep}")  # the second is the current folder
    _install()
    fsdp2.uninstall()
    assert os.environ["PYTHONPATH"] == f"mine{os.pathsep}"


def test_what_a_childs_import_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing fsdp2 first, torch's first, or neither: as `sitecustomize` finds them."""
    watch = sitecustomize.Watch()
    assert watch.find_spec("torch.distributed") is None
    spec = watch.find_spec("fsdp2")
    assert spec is not None
    assert Path(str(spec.origin)) == ROOT / "fsdp2" / "__init__.py"
    monkeypatch.delitem(sys.modules, "fsdp2")
    monkeypatch.setattr(importlib, "import_module", _unimportable)
    with pytest.warns(RuntimeWarning, match=r"cannot be imported here.*give both the same"):
        sitecustomize._import_ours(torchs)


def _unimportable(name: str) -> NoReturn:
    raise ImportError(name)


# -- python -m fsdp2.run --------------------------------------------------------------------------

SCRIPT = """
import os, sys
from torch.distributed.fsdp import fully_shard
from neighbour import VALUE
print(__name__, fully_shard.__module__, VALUE, sys.argv, os.path.basename(__file__))
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "scripts"
    package.mkdir()
    (package / "script.py").write_text(SCRIPT)
    (package / "neighbour.py").write_text("VALUE = 'found'")
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `fsdp2.run` as ``python -m`` would, in this process; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(SystemExit) as exit_:
            main()
    fsdp2.uninstall()
    status: int = exit_.value.code
    return status


def _run_apart(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, in ``folder``."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        (".", ["scripts/script.py", "-m", "--flag"]),
        (".", ["link.py"]),  # Python follows it to the neighbours of its script
        ("scripts", ["-m", "script", "a"]),
    ],
    ids=["script", "link", "module"],
)
def test_a_script_runs_as_it_would_without_us(
    where: str,
    arguments: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "link.py").symlink_to(folder / "scripts" / "script.py")
    monkeypatch.chdir(folder / where)
    assert _run(monkeypatch, *arguments) == 3
    file = folder / "scripts" / "script.py"
    seen = [str(file), "a"] if arguments[0] == "-m" else arguments
    name = "link.py" if arguments == ["link.py"] else "script.py"
    assert capsys.readouterr().out == f"__main__ fsdp2.sharding.api found {seen} {name}\n"


def test_a_safe_path_stays_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``python -P`` the script's folder is not searched; what is first is the user's."""

    class Safe:
        safe_path = True
        flags = sys.flags

        def __getattr__(self, name: str) -> object:
            return getattr(self.flags, name)

    (folder / "scripts" / "script.py").write_text("import sys; print(sys.path[0]); sys.exit(0)")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "flags", Safe())
    assert _run(monkeypatch, "scripts/script.py") == 0
    assert capsys.readouterr().out == f"{folder}\n"


@pytest.mark.extended
def test_a_process_of_its_own(folder: Path) -> None:
    done = _run_apart(folder, "-m", "fsdp2.run", "scripts/script.py")
    expected = "__main__ fsdp2.sharding.api found ['scripts/script.py'] script.py\n"
    assert (done.stdout, done.returncode) == (expected, 3), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["-m"], 2), (["--what"], 2), (["--help"], 0), (["-h"], 0)]
)
def test_without_a_script_it_says_what_it_takes(
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert "fsdp2 run script.py" in printed.out if code == 0 else "name a script" in printed.err
    assert torchs.fully_shard is TORCHS_NAMES["fully_shard"], "nothing was installed"
