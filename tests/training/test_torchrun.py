"""What a rank does differently when torchrun started it, and the job files that start torchrun."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lm.cli.config_files import find_config
from lm.cli.settings import check_names, read_options
from lm.errors import RequestError, RunError
from lm.system import process
from lm.system.process import code_for_launcher, rank
from lm.system.stop_signals import SIGNALS, StopSignals
from lm.training.callbacks.run_folder import RunFolder
from lm.training.launcher import check_restarts
from lm.training.run_state import RunState
from lm.training.trainer import Trainer
from lm.training.world import srun_world

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "configs" / "launch"
# Of sbatch(1), with what their values may be.
SBATCH = {
    "job-name": r"\w+", "nodes": r"\d+(-\d+)?", "ntasks-per-node": r"\d+", "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+", "time": r"(\d+-)?\d+(:\d\d){0,2}", "signal": r"([RB]+:)?(\w+)(@\d+)?", "requeue": "",
    "open-mode": "append|truncate", "output": r"[\w%.-]+",
}  # fmt: skip


@pytest.fixture
def torchrun(monkeypatch):
    """The variables that torchrun sets for rank one of two machines with two processes each."""
    variables = {
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(("devices", "num_nodes"), [("auto", 1), (2, 2), (8, 1), ("auto", 3)])
def test_the_processes_that_torchrun_started_count(torchrun, devices, num_nodes):
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=devices, num_nodes=num_nodes)
    assert (trainer.world_size, trainer.num_nodes) == (4, 2)


@pytest.fixture
def srun(monkeypatch):
    """The variables that srun sets for the last of two tasks on each of two nodes."""
    variables = {
        "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "lm", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    }  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_tasks_that_srun_started_are_ranks(srun):
    assert srun_world() == (2, 2) and rank() == 3
    srun.setenv("SLURM_JOB_NAME", "bash")  # a shell in an allocation
    assert srun_world() is None
    srun.setenv("SLURM_JOB_NAME", "lm")
    srun.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(RequestError, match="srun started 4 tasks on 2 nodes: give it --ntasks-per-node"):
        srun_world()
    srun.delenv("SLURM_STEP_ID")  # a batch script without srun
    assert srun_world() is None


def test_a_command_to_resume_is_of_torchrun(torchrun):
    said = "torchrun --nnodes 2 --nproc_per_node 2 -m lm fit  # with the other options of torchrun, on every node"
    assert process.launch_command("fit").startswith(said)
    torchrun.setenv("SLURM_STEP_ID", "0")
    torchrun.setenv("SLURM_NTASKS", "2")
    assert process.launch_command("fit").startswith("srun --ntasks 2 torchrun --nnodes 2 ")
    assert "every node" not in process.launch_command("fit")


def test_a_command_to_resume_has_the_sizes_of_srun(srun):
    srun.setattr(sys, "argv", ["lm"])
    said = process.launch_command("fit")
    assert said.startswith("srun --nodes 2 --ntasks 4 --ntasks-per-node 2 ")
    assert said.endswith("lm fit  # with the other options of srun")


def test_a_job_of_one_task_trains_on_all_the_devices_that_are_asked_for(srun):
    srun.setenv("SLURM_NTASKS", "1")
    srun.setenv("SLURM_PROCID", "0")
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=2)
    assert trainer.world_size == 2 and not trainer.strategy.cluster_environment.creates_processes_externally


def test_restarts_that_would_hang_are_refused_before_training(torchrun):
    with pytest.raises(RequestError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts()
    torchrun.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # as torchrun has it with that variable
    check_restarts()
    torchrun.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchrun.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_restarts()


def test_only_a_guards_stop_ends_with_0_under_torchrun(torchrun):
    assert [code_for_launcher(code) for code in (0, 1, 2, 3, 75)] == [0, 1, 2, 0, 75]
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert code_for_launcher(3) == 3


def test_before_the_first_step_a_signal_ends_a_rank_that_is_not_zero(torchrun):
    """torchrun would wait half a minute for it; later it finishes the step, as every rank does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signals = StopSignals()
    try:
        signals.catch()
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
        signals.arm()
        signals.catch()
        assert signal.getsignal(signal.SIGTERM) == signals._handle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ranks_that_found_different_checkpoints_do_not_train(torchrun):
    class Strategy:
        broadcast = staticmethod(lambda value: ("checkpoints/one", "/disk-of-zero/checkpoints/one/step-00000004"))

    class Trainer:
        is_global_zero, global_rank, strategy, ckpt_path = False, 1, Strategy, "checkpoints/one/step-00000002"
        default_root_dir, checkpoint_callbacks, run_state, run = "checkpoints", [], RunState(), None

    folder = RunFolder(None, "one", "")
    with pytest.raises(RunError, match="rank 1 found checkpoint .*step-00000002 and rank zero .*step-00000004"):
        folder.on_fit_start(Trainer, None)
    Trainer.ckpt_path = "/my-disk/checkpoints/one/step-00000004"
    folder.on_fit_start(Trainer, None)
    assert str(Trainer.run_state.run.path) == "checkpoints/one"


# ---- job files -------------------------------------------------------------------------------------------------------
def fit_arguments(script: str) -> list[str]:
    """What stands after `fit` in a job file's command, without the shell's own."""
    command = re.search(r"-m lm fit (.*?[^\\])\n", script, re.DOTALL)[1].replace('"$@"', "")
    return command.replace("\\\n", " ").replace('"', "").split()


def test_the_slurm_job_asks_for_what_sbatch_knows():
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", (JOBS / "slurm.sh").read_text(), re.MULTILINE)
    assert len(lines) == (JOBS / "slurm.sh").read_text().count("#SBATCH") == len(dict(lines))
    for name, value in lines:
        assert re.fullmatch(SBATCH[name], value), (name, value)
    assert dict(lines)["signal"].startswith("TERM@")  # torchrun passes SIGTERM on; SIGUSR1 would kill it


@pytest.mark.parametrize(("status", "code", "expected", "requeued"), [
    ("interrupted", 1, 75, "requeue 7"), ("finished", 0, 0, ""), ("failed", 1, 1, ""), ("stopped", 0, 0, ""),
])  # fmt: skip
def test_the_slurm_job_goes_back_into_the_queue_only_where_the_run_was_interrupted(
    tmp_path, status, code, expected, requeued
):
    """With SLURM's two commands, and torchrun, replaced by scripts that say how they were called."""
    run = tmp_path / "checkpoints" / "mine"
    scripts = {
        "scontrol": '[ "$1" = show ] && echo node-a && echo node-b || echo "$@" >> requeued',
        "srun": 'echo "$@" > started; shift; exec "$@"',  # after its one option
        "torchrun": f'mkdir -p {run}; echo \'{{"status": "{status}"}}\' > {run}/run.json; exit {code}',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    os.symlink(sys.executable, tmp_path / "python")
    env = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "h100:8",
        "SLURM_CPUS_PER_TASK": "32",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(JOBS / "slurm.sh"), "mine.yaml", "--seed_everything", "5"], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == expected and f"run mine: {status}" in done.stdout, done.stderr
    assert (tmp_path / "requeued").read_text().strip() == requeued if requeued else not (tmp_path / "requeued").exists()
    started = (tmp_path / "started").read_text()
    assert started.startswith("--cpus-per-task=32 torchrun --nnodes 2 --nproc_per_node 8")
    assert "--rdzv_endpoint node-a:29500" in started
    assert started.strip().endswith("fit --config mine.yaml --ckpt_path auto --seed_everything 5")


@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
def test_the_commands_of_a_job_file_are_ones_that_lm_knows(name, tmp_path):
    text = (JOBS / name).read_text()
    if name.endswith(".yaml"):
        task = yaml.safe_load(text)
        assert task["resources"]["use_spot"] and find_config(task["envs"]["CONFIG"]).exists()
        text = task["run"]
        assert task["file_mounts"]["/bucket"]["mode"] == "MOUNT_CACHED"
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True)
    arguments = fit_arguments(text)
    check_names("fit", read_options("fit", arguments[2:]))
    assert "--ckpt_path auto" in " ".join(arguments)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
