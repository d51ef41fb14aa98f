"""The command as a whole: what it says of itself, how it ends, and what that loads."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2
from fsdp2.command import checkpoint, main, trace
from tests.common.combinations import often

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parents[1]

HELPS = [
    [],
    *([name] for name in main.NAMES),
    *(["trace", name] for name in trace.COMMANDS),
    *(["checkpoint", name] for name in checkpoint.COMMANDS),
]
"""Whatever has a ``--help``."""

ALL_HELPS = """if True:
    import contextlib, io, json, sys
    from fsdp2.command.main import main
    said = []
    for given in json.loads(sys.argv[1]):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            try:
                main([*given, "--help"])
            except SystemExit as ended:
                said.append([ended.code, text.getvalue()])
    loaded = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([said, sorted(loaded & {"torch", "numpy", "rich"})]))
"""


def test_every_help_is_there_without_torch() -> None:
    """Each ends with 0, begins with how it is called, and writes options with dashes.

    Each subcommand that prints has ``--json``.
    """
    command = [sys.executable, "-c", ALL_HELPS, json.dumps(HELPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said, loaded = json.loads(done.stdout)
    assert loaded == []
    assert len(said) == len(HELPS)
    for given, (code, text) in zip(HELPS, said, strict=True):
        assert code == 0, given
        assert " ".join(["fsdp2", *given]) in text
        options = [word for word in text.replace("[", " ").split() if word.startswith("--")]
        assert given in ([], ["run"], ["trace"], ["checkpoint"]) or "--json" in text, given
        assert not any("_" in word for word in options), options
    everything = said[0][1]
    for name in main.NAMES:
        assert f"\n  {name} " in everything
    for name, module in (("trace", trace), ("checkpoint", checkpoint)):
        below = said[1 + main.NAMES.index(name)][1]
        for each, text in module.COMMANDS.items():
            assert f"  {f'{name} {each}':<20}{text}\n" in everything
            assert f"\n    {each} " in below


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the following arguments are required: COMMAND; see fsdp2 --help"),
        (["paln"], "invalid choice: 'paln'"),
        (["trace"], "fsdp2 trace: the following arguments are required: COMMAND"),
        (["trace", "view"], "fsdp2 trace view: the following arguments are required: FILE"),
        (["plan", "tiny", "--ran", "4"], "unrecognized arguments: --ran"),
        (["plan", "tiny", "--batch_size", "4"], "unrecognized arguments: --batch_size"),
        (["checkpoint", "rm", "run"], "one of the arguments --step --unfinished is required"),
        (["doctor", "--ranks", "0"], "takes a whole number of at least 1, not '0'"),
        (["examples", "nope"], "invalid choice: 'nope'"),
        (["run"], "name a script, or -m and a module; see fsdp2 run --help"),
        (["run", "/no/such.py"], "fsdp2 run: there is no script '/no/such.py'; name a script"),
        (["run", str(Path(__file__).parent)], "there is no script"),
        (["run", "-m", "no.such"], "fsdp2 run: there is no module 'no.such' that can be run"),
    ],
)
def test_wrong_usage_is_one_sentence(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(given)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("name", often(["fsdp2.nope", "fsdp2.core"]))
def test_a_module_that_cannot_be_run_is_one_sentence(name: str) -> None:
    """In a process of its own: names are installed before packages are imported."""
    given = [sys.executable, "-m", "fsdp2.run", "-m", name]
    ended = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"fsdp2 run: there is no module '{name}' that can be run; name" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["plan", "tiny", "--trace", "/no/such/step.json"], "fsdp2 plan: [Errno 2] No such file"),
        (["plan", "tiny", "--hardware", "abacus"], "fsdp2 plan: hardware='abacus' is neither one"),
        (
            ["calibrate", "--output", "/no/such/m.json"],
            "fsdp2 calibrate: '/no/such' is not a folder",
        ),
        (["trace", "summary", "/no/such.json"], "fsdp2 trace summary: [Errno 2] No such file"),
    ],
)
def test_files_that_cannot_be_are_one_sentence(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(given) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(said)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("given", [[], ["plan"], ["checkpoint", "ls"], ["doctor"]])
def test_versions(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*given, "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fsdp2 {fsdp2.__version__}\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As with ``fsdp2 plan --list | head``: nothing on stderr."""
    program = """if True:
        import sys
        from fsdp2.command import main, trace
        trace.main = lambda given: print("many words " * 100_000) or 0
        sys.exit(main.main(["trace"]))
    """
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(trace, "main", interrupted)
    assert main.main(["trace", "view", "step.json"]) == 130


def test_the_console_script_and_the_module_are_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"fsdp2": "fsdp2.command.main:main"}
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("fsdp2", run_name="__main__")
    assert capsys.readouterr().out.startswith("fsdp2 ")


# ---- examples and run


def test_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["examples"]) == 0
    said = capsys.readouterr().out
    assert "train_lm          Train a small language model" in said
    assert "`" not in said
    assert main.main(["examples", "--json"]) == 0
    assert {"train_lm", "train_digits", "vit_10b"} <= json.loads(capsys.readouterr().out).keys()


@pytest.mark.parametrize("name", ["train_lm", "train-lm"])
def test_an_example_takes_its_own_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.delitem(sys.modules, "fsdp2.examples.train_lm", raising=False)
    with pytest.raises(SystemExit) as ended:
        main.main(["examples", name, "--help"])
    assert ended.value.code == 0
    assert "--activation-checkpointing" in capsys.readouterr().out


def test_a_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module is found in the current folder, as ``python -m`` finds it."""
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom torch.distributed.fsdp import fully_shard\n"
        "print(fully_shard.__module__, sys.argv[1:])\nsys.exit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["/the/folder/of/the/command", *sys.path])
    try:
        for given in (["mine.py"], ["-m", "mine"]):
            with pytest.raises(SystemExit) as ended:
                main.main(["run", *given, "--help"])
            assert ended.value.code == 3
            assert capsys.readouterr().out == "fsdp2.sharding.api ['--help']\n"
    finally:
        fsdp2.uninstall()
