"""torchrun on two machines, here two agents on loopback: ranks and machines die, leave and join; the run goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import PLACES, RECORDER, equipment, fit, processes_of, rows_by_step, wait_until, write_config

from lm.runs.run import Run

pytestmark = pytest.mark.fault(26)
RANKS = int(os.environ.get("LM_ELASTIC_RANKS", 1))  # of each agent
STEPS, BATCH = 12, 8  # optimizer steps, samples of each
TOLERANCE = 2e-5  # of losses: with another number of ranks they are added in another order
SETTINGS = {
    "model.decoder.dropout": 0.0, "model.optimizer.lr": 3e-3, "trainer.max_steps": STEPS, "trainer.val_interval": STEPS,
    "trainer.checkpoint_interval": 2, "data.micro_batch_size": 2,
}  # fmt: skip
HELD = {3: "second", 6: "second", 9: "first"}  # before this step this machine waits for what is done to it
SOON = "last_call_timeout=1,join_timeout=90,keep_alive_interval=1"  # the defaults are 30, 600 and 5 seconds


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchrun(folder: Path, *arguments: str, log: str, **environment: str) -> subprocess.Popen:
    """torchrun in a folder; what it and its ranks print is in the file `log`."""
    env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", **environment}
    with open(folder / log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments], cwd=folder, env=env, stdout=file, stderr=file
        )


def agent(folder: Path, port: int, log: str, machine: str) -> subprocess.Popen:
    """The command that is given on each of one or two machines; the first one's agent keeps their meeting point."""
    return torchrun(
        folder, "--nnodes", "1:2", "--nproc_per_node", str(RANKS), "--max_restarts", "3", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_conf", SOON, "--local_addr", "127.0.0.1",
        "-m", "lm", "fit", "--config", "elastic.yaml", "--ckpt_path", "auto",
        log=log, MACHINE=machine, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip


def final_entries(folder: Path) -> dict[int, list[dict]]:
    """Step -> what the ranks saw in it when it was taken for the last time."""
    steps: dict[int, list[dict]] = {}
    for path in folder.glob("trace*.jsonl"):
        for entry in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(entry["step"], []).append(entry)
    newest = {step: max(entry["turn"] for entry in entries) for step, entries in steps.items()}
    return {step: [entry for entry in steps[step] if entry["turn"] == newest[step]] for step in sorted(steps)}


def losses(run: Run) -> dict[tuple[int, str], float]:
    names = ("train/loss", "val/loss")
    return {(entry["step"], name): entry[name] for entry in run.metrics() for name in names if name in entry}


def test_ranks_and_machines_that_die_and_join_change_no_sample(workplace):
    """SIGKILL to a rank; SIGKILL to an agent, whose ranks end and free the run; one machine trains alone; the other
    comes back. The samples of every step are those of an uninterrupted run of one process, and so are its losses."""
    _, straight = fit(workplace, "straight", **SETTINGS)
    (workplace / "trace.jsonl").rename(workplace / "straight.jsonl")
    hold = equipment("waiting.HoldMachine", machines=HELD)
    write_config(workplace, "elastic", **SETTINGS, **{"trainer.callbacks": [RECORDER, hold]})
    run, port = Run(workplace / "checkpoints" / "elastic"), free_port()
    agents = {"first": agent(workplace, port, "first.log", "first")}

    def wait_for_step(step: int) -> int:
        """The process that waits before it."""
        held, until = workplace / f"held-{step}-0", time.monotonic() + 180
        while not held.exists():
            logs = "".join(path.read_text() for path in workplace.glob("*.log"))
            assert time.monotonic() < until and all(each.poll() is None for each in agents.values()), logs
            time.sleep(0.05)
        return int(held.read_text())

    try:
        with socket.socket() as tried:
            wait_until(lambda: not tried.connect_ex(("127.0.0.1", port)))
        agents["second"] = agent(workplace, port, "second.log", "second")
        os.kill(wait_for_step(3), signal.SIGKILL)

        wait_for_step(6)
        (workplace / "alone").touch()
        second = agents.pop("second")
        second.kill()
        second.wait()

        wait_for_step(9)
        assert len(processes_of(workplace)) == 1 + RANKS, "ranks outlived their agent"
        agents["second"] = agent(workplace, port, "third.log", "second")
        assert [each.wait(timeout=180) for each in agents.values()] == [0, 0], (workplace / "first.log").read_text()
    finally:
        for each in agents.values():
            each.kill()
    assert processes_of(workplace) == []

    seen = final_entries(workplace)
    with open(workplace / "final.jsonl", "w") as file:
        file.writelines(json.dumps(entry) + "\n" for entries in seen.values() for entry in entries)
    assert rows_by_step(workplace / "final.jsonl") == rows_by_step(workplace / "straight.jsonl")
    assert [seen[step][0]["samples"] for step in seen] == [[BATCH * i, BATCH * (i + 1)] for i in range(STEPS)]
    sizes = [seen[step][0]["ranks"] for step in seen]
    assert (sizes[1], sizes[7], sizes[-1]) == (2 * RANKS, RANKS, 2 * RANKS)
    assert json.loads((run.path / "last" / "trainer.json").read_text())["cursor"] == {"consumed": STEPS * BATCH}
    assert losses(run) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert run.status() == "finished" and len(run.read("run.json")["stretches"]) >= 4
    assert not (run.path.parent / "elastic-2").exists()


def test_torchrun_does_not_restart_what_a_guard_stopped(workplace):
    """One start of two ranks, one run folder, exit code 0, status `stopped`. SLURM's variables are there as in a job,
    and torchrun's count."""
    stop = {"guards.alerts": {"step >= 3": "stop"}, "trainer.devices": 4, "trainer.num_nodes": 3}
    write_config(workplace, "guarded", **SETTINGS, **stop)
    slurm = {"SLURM_NTASKS": "6", "SLURM_JOB_NAME": "lm", "SLURM_PROCID": "5", "SLURM_LOCALID": "5"}
    started = torchrun(
        workplace, "--standalone", "--nproc_per_node", "2", "--max_restarts", "2", "-m", "lm", "fit", "--config",
        "guarded.yaml", "--ckpt_path", "auto", log="log", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **slurm,
    )  # fmt: skip
    code, said = started.wait(timeout=180), (workplace / "log").read_text()
    run = Run(workplace / "checkpoints" / "guarded")
    assert code == 0 and run.status() == "stopped" and run.read("run.json")["world_size"] == 2, said
    assert said.count("lm fit: ") == 1 and said.count("run checkpoints/guarded") == 1, said
    assert [path.name for path in run.path.parent.iterdir()] == ["guarded"]
