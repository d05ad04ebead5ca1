"""Test equipment: real trainings of a very small model, in processes of their own."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from forked import CAN_FORK, Fork

from lm.runs.run import Run

# The test equipment, lm, which may not be installed, and packages that are not: PYTHONPATH for other processes.
HERE = Path(__file__).parent
PLACES = os.pathsep.join(filter(None, [
    *map(str, (HERE.parent, HERE, *(path for path in HERE.iterdir() if path.is_dir()))), os.environ.get("PYTHONPATH"),
]))  # fmt: skip
CORPUS = "\n".join(
    f"Chapter {i}. The {a} of the {b} was {c}, and so the {b} had no {a} of its own."
    for i, (a, b, c) in enumerate(
        (a, b, c)
        for a in ("letter", "answer", "garden", "weight")
        for b in ("captain", "village", "engine", "river", "senate")
        for c in ("lost", "found", "sold", "broken", "kept", "hidden")
    )
)
RECORDER = {"class_path": "recorder.Recorder"}
# Steps of 2 micro-batches of 4 x 32 tokens; a validation every 4 steps; a checkpoint every 3.
CONFIG: dict[str, Any] = {
    "seed_everything": 7,
    "trainer": {
        "max_steps": 12, "val_interval": 4, "checkpoint_interval": 3, "log_interval": 1, "accelerator": "cpu",
        "callbacks": [RECORDER],
    },
    "model": {
        "decoder": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 64, "max_position_embeddings": 32, "dropout": 0.1,
        },
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
    },
    "data": {
        "path": "data/small",
        "prepare": {"input": ["texts"], "tokenizer": "char", "val_fraction": 0.2},
        "micro_batch_size": 4, "global_batch_tokens": 256, "val_tokens": 512,
    },
}  # fmt: skip


def make_workplace(folder: Path, prepared: str | None = None) -> Path:
    """A folder with texts to train on, from which `lm` is run; `prepared` is a folder in it for shards of them."""
    (folder / "texts").mkdir(parents=True)
    for index, text in enumerate(CORPUS.split("\n")):
        (folder / "texts" / f"{index:03d}.txt").write_text(text + "\n")
    if prepared:
        prepare = ("--tokenizer", "char", "--val_fraction", "0.2", "--output", prepared)
        lm(folder, "data", "prepare", "--input", "texts", *prepare)
    return folder


def write_config(folder: Path, name: str = "small", **changes: Any) -> Path:
    """`CONFIG` with dotted keys changed, e.g. `**{"trainer.max_steps": 4}`."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


# Environment variables that nothing reads while it is imported.
READ_LATE = (
    "AWS_", "GROUP_WORLD_SIZE", "LM_REGISTRY", "LOCAL_WORLD_SIZE", "SLURM_", "TESTS_MOUNTS_OF", "TMPDIR",
    "TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


def start(folder: Path, *arguments: str, fresh: bool = False, **environment: str) -> subprocess.Popen | Fork:
    """`python -m lm ...`, or `python FILE.py ...`, in a folder, with the test equipment importable and one thread.

    Args:
        fresh: in a process that has imported nothing before, as it is where `environment` has what imports may read.
    """
    env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", **environment}
    if CAN_FORK and not fresh and all(name.startswith(READ_LATE) for name in environment):
        return Fork(arguments, folder, env)
    return subprocess.Popen(
        [sys.executable, *([] if arguments[0].endswith(".py") else ["-m", "lm"]), *arguments], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def lm(folder: Path, *arguments: str, expect: int | None = 0, timeout: int = 240, **environment: str):
    """Run `python -m lm ...` to its end and check its exit code; returns it with its output."""
    process = start(folder, *arguments, **environment)
    out, err = process.communicate(timeout=timeout)
    assert expect is None or process.returncode == expect, f"exit {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def in_ranks(folder: Path, world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)`, of a test file, in so many processes at once."""
    (folder / "call.pickle").write_bytes(pickle.dumps((function, arguments)))
    script = str(HERE / "call_in_rank.py")
    ranks = [start(folder, script, "call.pickle", str(rank)) for rank in range(world)]
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(said)


def equipment(name: str, /, **init_args: Any) -> dict[str, Any]:
    """A callback as a config names it, such as `equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=9)`."""
    return {"class_path": name, "init_args": init_args}


def fit(
    folder: Path, name: str = "small", *arguments: str, callbacks: Sequence[dict] = (), program: Sequence[str] = (),
    expect: int | None = 0, environment: Mapping[str, str] = {}, **changes: Any,
):  # fmt: skip
    """Train with `CONFIG` so changed; returns the ended process and the run. The trace begins anew with a new run.

    Args:
        callbacks: equipment, beside the recorder.
        program: a file that calls `lm.run`, in place of `python -m lm`.
    """
    if "--ckpt_path" not in arguments:
        for path in folder.glob("trace*.jsonl"):
            path.unlink()
    if callbacks:
        changes["trainer.callbacks"] = [*CONFIG["trainer"]["callbacks"], *callbacks]
    config = write_config(folder, name, **changes)
    ended = lm(folder, *program, "fit", "--config", config.name, *arguments, expect=expect, **environment)
    return ended, Run(folder / "checkpoints" / name)


def trace(folder: Path, file: str = "trace.jsonl") -> list[dict[str, Any]]:
    """What `Recorder` saw in this folder, in order: one entry a micro-batch."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def losses(folder: Path, file: str = "trace.jsonl") -> dict[tuple[int, int], str]:
    """The loss of each micro-batch that counted in the end, exactly: (step, micro-batch) -> hexadecimal."""
    return {(entry["step"], entry["micro"]): entry["loss"] for entry in trace(folder, file)}


def expected(folder: Path) -> dict[tuple[int, int], str]:
    """As `losses`, of the uninterrupted run whose trace was put aside as `expected.jsonl`."""
    return losses(folder, "expected.jsonl")


def rows_by_step(*traces: Path) -> dict[int, list[list[int]]]:
    """Step -> its rows of 33 tokens, sorted: which rank had which, and when, depends on the number of ranks."""
    steps: dict[int, list[list[int]]] = {}
    for path in traces:
        for entry in trace(path.parent, path.name):
            tokens = entry["tokens"]
            steps.setdefault(entry["step"], []).extend(tokens[at : at + 33] for at in range(0, len(tokens), 33))
    return {step: sorted(rows) for step, rows in steps.items()}


def validations(run: Run) -> dict[int, float]:
    return {line["step"]: line["val/loss"] for line in run.metrics("val/loss")}


def wait_until(condition: Callable[[], Any], *processes: Any, seconds: float = 120) -> None:
    """Wait for what processes are to bring about, and fail with what one of them said if it ends before."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            for process in processes:
                process.kill()
            raise AssertionError([process.communicate() for process in processes])
        time.sleep(0.05)


def processes_of(folder: Path, patience: float = 0.0) -> list[int]:
    """Live processes that were started in a folder; those that do not end within so many seconds."""
    until = time.monotonic() + patience
    while (found := _living_in(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _living_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve() and (entry / "stat").read_text().split(") ")[-1][0] != "Z":
                found.append(int(entry.name))
        except OSError:
            continue
    return found
