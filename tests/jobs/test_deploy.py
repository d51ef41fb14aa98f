"""The files of deploy/: run here where that can be, and else read as their schedulers do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import checkpoint
from tests.common import jobs

DEPLOY = jobs.ROOT / "deploy"
SMALL = (*jobs.TINY, "--steps", "6", "--batch-size", "8", "--precision", "fp32")
HERE = {"PYTHON": sys.executable, "NPROC": "2"}


# ---- what is read


@pytest.mark.alone
@pytest.mark.parametrize("path", [*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")], ids=str)
def test_bash_reads_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"  # sbatch reads its file


@pytest.mark.alone
def test_the_guide_has_every_file() -> None:
    guide = (jobs.ROOT / "docs" / "guides" / "launching.md").read_text(encoding="utf-8")
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) >= 9
    for path in files:
        assert f"deploy/{path.relative_to(DEPLOY)}" in guide, path


def _yaml(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.alone
def test_kubernetes_files_fit_together() -> None:
    """The fields that the definitions of Kubeflow Trainer and of Kubernetes require."""
    job, runtime = _yaml("kubernetes/trainjob.yaml"), _yaml("kubernetes/runtime.yaml")
    for each, kind in ((job, "TrainJob"), (runtime, "ClusterTrainingRuntime")):
        assert (each["apiVersion"], each["kind"]) == ("trainer.kubeflow.org/v1alpha1", kind)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert set(job["spec"]["trainer"]) <= {
        *("args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode")
    }
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pods = node["template"]["spec"]
    pod = pods["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == node["name"] == "node"  # which the TrainJob's command goes to
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy needs
    codes = [rule["onExitCodes"] for rule in pods["podFailurePolicy"]["rules"][1:]]
    (values,) = ({*each["values"]} for each in codes)
    assert values == {checkpoint.Preemption.exit_code}
    assert {each["containerName"] for each in codes} == {"node"}
    shutdown = int(container["env"][0]["value"])
    assert shutdown < pod["terminationGracePeriodSeconds"]


@pytest.mark.alone
def test_skypilot_starts_again_what_was_saved() -> None:
    task = _yaml("skypilot.yaml")
    assert set(task) <= {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run"}
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [checkpoint.Preemption.exit_code]
    assert {"name", "mode"} == set(task["file_mounts"]["/runs"])


# ---- what is run


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    code, out, err = jobs.Run(*jobs.TRAIN_LM, "--nproc", "2", *SMALL).finish()
    assert code == 0, err
    return dict(jobs.losses_of(out))


def _check_nodes(runs: list[jobs.Run], expected: dict[int, str]) -> None:
    """One run on several nodes: all end well, and rank 0 has printed these losses."""
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0] * len(runs), ended[0][2]
    losses: dict[int, str] = {}
    for _, out, _ in ended:
        losses |= dict(jobs.losses_of(out))
    assert losses == expected


@pytest.mark.ranks
@pytest.mark.exhaustive
def test_torchrun_with_given_numbers(undisturbed: dict[int, str], tmp_path: Path) -> None:
    """Two agents of one rank each; what each rank prints is in a file of its own, too."""
    common = {
        **HERE,
        **{"NPROC": "1", "NODES": "2", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT": str(jobs.free_port()),
        "CHECKPOINT": str(tmp_path / "run"),
    }
    runs = [
        jobs.Run(
            "deploy/torchrun_static.sh",
            *SMALL,
            **{**common, "NODE_RANK": str(rank), "LOGS": str(tmp_path / f"logs{rank}")},
        )
        for rank in range(2)
    ]
    _check_nodes(runs, undisturbed)
    assert checkpoint.steps(tmp_path / "run") == [6]
    (log,) = (tmp_path / "logs0").rglob("stdout.log")
    assert "step 6/6" in log.read_text(encoding="utf-8")


@pytest.mark.ranks
@pytest.mark.extended
def test_kubernetes_command(undisturbed: dict[int, str], tmp_path: Path) -> None:
    """The TrainJob's, as two pods run it: with the variables that Kubeflow Trainer sets."""
    trainer = _yaml("kubernetes/trainjob.yaml")["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    assert words[0] == "python"
    words = [sys.executable, *(word.replace("/fsdp2/", "") for word in words[1:])]
    words = [word.replace("/runs/", f"{tmp_path}/") for word in words]
    words.remove("--activation-checkpointing")
    port = str(jobs.free_port())
    runs = [
        jobs.Run(
            *words,
            *SMALL,
            PET_NNODES="2",
            PET_NPROC_PER_NODE="1",
            PET_NODE_RANK=str(rank),
            PET_MASTER_ADDR="127.0.0.1",
            PET_MASTER_PORT=port,
        )
        for rank in range(trainer["numNodes"])
    ]
    _check_nodes(runs, undisturbed)
    assert checkpoint.steps(tmp_path / "train-lm" / "steps") == [6]


@pytest.mark.ranks
@pytest.mark.extended
def test_skypilots_command(undisturbed: dict[int, str], tmp_path: Path) -> None:
    text = _yaml("skypilot.yaml")["run"].replace("/runs/", f"{tmp_path}/")
    text = text.replace("LOGS=logs", f"LOGS={tmp_path}/logs")
    text = text.replace("--activation-checkpointing", "").rstrip() + f" {' '.join(SMALL)}"
    run = jobs.Run(
        *("bash", "-c", text),
        PYTHON=sys.executable,
        MASTER_PORT=str(jobs.free_port()),
        SKYPILOT_NUM_NODES="1",
        SKYPILOT_NODE_RANK="0",
        SKYPILOT_NUM_GPUS_PER_NODE="2",
        SKYPILOT_NODE_IPS="127.0.0.1",
    )
    _check_nodes([run], undisturbed)


FAKES = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >>"$REQUEUED"; fi',
}
"""SLURM's commands, as one node has them that is there already."""


def _sbatch(folder: Path, *arguments: str) -> jobs.Run:
    """The batch script, as SLURM runs it when there are nodes for it."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return jobs.Run(
        *("bash", "deploy/slurm.sbatch", *jobs.TINY, *arguments),
        **HERE,
        PATH=f"{folder}:{os.environ['PATH']}",
        PORT=str(jobs.free_port()),
        REQUEUED=str(folder / "requeued"),
        CHECKPOINT=str(folder / "run"),
        LOGS=str(folder / "logs"),
        SLURM_JOB_ID="17",
        SLURM_JOB_NODELIST="localhost",
        SLURM_NNODES="1",
        SLURM_SUBMIT_DIR=str(jobs.ROOT),
    )


@pytest.mark.ranks
@pytest.mark.extended
def test_slurm_queues_again_what_it_has_saved(tmp_path: Path) -> None:
    run = _sbatch(tmp_path, "--steps", "200")
    run.wait_for(r"\[default0\]:step +10/")
    run.process.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B: does
    code, out, err = run.finish()
    assert code == 0, err
    assert "saved and queued again" in out
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    saved = checkpoint.steps(tmp_path / "run")[-1]
    assert 10 <= saved < 200

    steps = str(saved + 3)
    code, out, err = _sbatch(tmp_path, "--steps", steps).finish()
    assert code == 0, err
    assert f"at step {saved};" in out
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"  # not once more
    code, _, err = _sbatch(tmp_path, "--steps", steps, "--batch-size", "3").finish()
    assert code == 1, err  # a failure is one


@pytest.mark.ranks
@pytest.mark.extended
def test_a_script_of_ones_own(tmp_path: Path) -> None:
    """Saved by a signal, and resumed: losses as printed, weights to the bit."""

    def run(name: str, *more: str) -> jobs.Run:
        common = {**HERE, "NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}
        return jobs.Run(
            *("deploy/torchrun_static.sh", "--steps", "600", "--every", "50", *more),
            **common,
            TRAIN="deploy/own_script.py",
            MASTER_PORT=str(jobs.free_port()),
            CHECKPOINT=str(tmp_path / name),
            LOGS=str(tmp_path / "logs"),
        )

    code, whole, err = run("whole", "--inside-a-node").finish()
    assert code == 0, err
    first = run("cut", "--inside-a-node")
    first.wait_for(r"\[default0\]:step 50 ")
    os.kill(first.ranks()[1], signal.SIGTERM)
    code, out, err = first.finish()
    assert code == checkpoint.Preemption.exit_code, err
    assert checkpoint.steps(tmp_path / "cut")[-1] < 600
    code, more, err = run("cut", "--inside-a-node").finish()
    assert code == 0, err
    lines = {line for line in (out + more).splitlines() if re.search(r"step \d+[05]0 loss", line)}
    assert lines <= set(whole.splitlines())
    files = [tmp_path / name / "step-00000600" / "__0_0.distcp" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
