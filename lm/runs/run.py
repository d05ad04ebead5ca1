"""A run is one folder under `checkpoints/`: its config, its live state, its metrics, its checkpoints, its lock.

Nothing here imports torch, so that commands which only look at runs answer at once.
"""

import errno
import json
import logging
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.system.files import (
    Attempts,
    append_line,
    fits,
    nonnegative,
    parse_json,
    parse_yaml,
    read_lines,
    write_atomically,
)

# ---- run shapes ------------------------------------------------------------------------------------------------------
# What the files of a run say, and the shape of each fact: what has another shape is not known, whatever damaged it.
#
# `Run.read` and `Run.metrics` give what passed here, so that nobody who looks at a run has to ask again.


def is_number(value: Any) -> bool:
    """Also one that is not finite, as a loss may be."""
    return type(value) in (int, float)


def is_empty(value: Any) -> bool:
    """What is said of a machine where it cannot be read."""
    return value == {}


TEXT, NUMBER = (str, None), (float, None)
GPU = {
    **dict.fromkeys(("load_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts",
                     "power_limit_watts"), NUMBER), "index": (int, None), "clocks_limited_by": ([str], None),
}  # fmt: skip

# file -> fact -> its shape, as `documents.fits` has it; other facts are nobody's to rely on, and stay as they are
SHAPES: dict[str, dict[str, Any]] = {
    "run.json": {
        "id": str, "name": str, "status": str, "reason": TEXT, "device": TEXT, "world_size": int, "turn": int,
        "started": str, "entered": float, "command": [str], "host": str, "python": str, "versions": {...: str},
        "git": TEXT, "step": int, "began_from": TEXT, "left_behind": [TEXT],
        "stretches": [{"step": int, "sample": int, "global_batch": int}],
        "rollbacks": [{"step": int, "to": int}], "injected": {"steps": [int]},
    },
    "state.json": {
        "run": str, "status": str, "reason": TEXT, "phase": TEXT, "step": int, "max_steps": int, "tokens": int,
        "max_tokens": (int, None), "metrics": {...: (is_number, None)}, "eta_seconds": NUMBER, "pid": int, "host": str,
        "time": float,
    },
    "heartbeat.json": {
        "time": float, "pid": int, "host": str,
        "machine": (is_empty, {
            "cpu": {"load_percent": NUMBER}, "memory": {"used_bytes": NUMBER, "total_bytes": NUMBER},
            "process": {"memory_bytes": NUMBER}, "gpus": ([GPU], None),
        }),
    },
}  # fmt: skip

ALERT_SHAPE = {"step": int, "time": float, "guard": str, "action": str, "message": str}  # a line of alerts.jsonl


def valid_facts(file: str, document: Any) -> dict[str, Any]:
    """The facts of a file that have their shape; none where it is no object."""
    if not isinstance(document, dict):
        return {}
    shapes = SHAPES.get(file, {})
    return {name: fact for name, fact in document.items() if name not in shapes or fits(fact, shapes[name])}


def valid_metrics(line: dict[str, Any]) -> dict[str, Any] | None:
    """What counts of a line of `metrics.jsonl`: its numbers, also those that are not finite; None where it says neither
    its step nor from which one the run was gone on with."""
    numbers = {name: value for name, value in line.items() if is_number(value)}
    whole = [type(numbers[name]) is int for name in ("step", "resumed_at") if name in numbers]
    return numbers if whole and all(whole) else None


# ---- evaluation log --------------------------------------------------------------------------------------------------
# What an evaluation found, as a run keeps it: a line of `evaluations.jsonl`, metrics for curves, sentences for people.
#
# `training/callbacks/evaluation` writes it while a run trains, `lm evaluate` afterwards; `Run.evaluations` reads it.
# Nothing here imports torch, so that commands which only look at runs answer at once.

Evaluation = dict[str, Any]
EVALUATION_SHAPE = {  # what readers rely on
    "step": (int, None), "checkpoint": (str, None), "time": float, "core": (float, None),
    "core_interval": ([float], None), "settings": {},
    "tasks": {...: {"accuracy": float, "centered": float, "interval": [float], "baseline": float, "items": int,
                    "num_fewshot": int}},
    "texts": {...: {"bits_per_byte": (float, None), "loss": (float, None), "tokens": int}},
}  # fmt: skip


def record(
    step: int | None,
    checkpoint: str | None,
    tasks: Mapping[str, Mapping[str, Any]],
    core: tuple[float, tuple[float, float]] | None,
    texts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Evaluation:
    """What there is to keep of an evaluation, ready for JSON; `Run.evaluations` says what is in it.

    Args:
        step: the optimizer step that the model is of; None for a model of others.
        checkpoint: the name of its folder; None while a run trains.
        tasks: name -> the fields of its `TaskResult`.
        core: of these tasks, with its interval.
        texts: name of texts or shards -> the fields of its `CorpusResult`.
        settings: what was asked for.
    """
    return _finite({
        "step": step,
        "checkpoint": checkpoint,
        "time": time.time(),
        "tasks": tasks,
        "core": core[0] if core else None,
        "core_interval": core[1] if core else None,
        "texts": texts,
        "settings": settings,
    })


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def merge_evaluations(evaluations: Sequence[Evaluation], step: int | None = None) -> Evaluation | None:
    """All that is known of one step's model as one evaluation.

    Of each task and text the result of the most items or tokens counts, the newest of several; the mean of centred
    accuracies is that of the evaluation of the most items.

    Args:
        evaluations: `Run.evaluations()`.
        step: whose; that of the newest evaluation if not given.

    Returns:
        None where there is none.
    """
    step = evaluations[-1]["step"] if step is None and evaluations else step
    of_step = [evaluation for evaluation in evaluations if evaluation["step"] == step]
    if not of_step:
        return None
    best: dict[str, dict[str, Any]] = {"tasks": {}, "texts": {}}
    for kind, size in (("tasks", "items"), ("texts", "tokens")):
        for name, result in ((name, result) for each in of_step for name, result in each[kind].items()):
            if name not in best[kind] or result[size] >= best[kind][name][size]:
                best[kind][name] = result
    largest = max(reversed(of_step), key=lambda each: sum(task["items"] for task in each["tasks"].values()))
    return {**of_step[-1], **best, "core": largest["core"], "core_interval": largest["core_interval"]}


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that make curves, by the names that they have in TensorBoard and `metrics.jsonl`."""
    found: dict[str, float] = {}
    for name, task in evaluation["tasks"].items():
        found[f"eval/{name}/accuracy"] = task["accuracy"]
        found[f"eval/{name}/centered"] = task["centered"]
    if evaluation["core"] is not None:
        found["eval/core"] = evaluation["core"]
    found |= {f"eval/{name}/bpb": texts["bits_per_byte"] for name, texts in evaluation["texts"].items()}
    return {name: value for name, value in found.items() if value is not None}


def describe_evaluation(evaluation: Evaluation | None) -> list[str]:
    """An evaluation in lines: when, the mean, and each task and text, with 95 % intervals."""
    if evaluation is None:
        return []
    lines = [f"step {evaluation['step']:,}" + core_sentence(evaluation)]
    for name, task in evaluation["tasks"].items():
        low, high = task["interval"]
        lines.append(
            f"{name}: {task['accuracy']:.1%} right ({low:.1%} to {high:.1%}), guessing {task['baseline']:.1%}, "
            f"centred {task['centered']:.3f}; {task['items']:,} items, {task['num_fewshot']} shots"
        )
    for name, texts in evaluation["texts"].items():
        bits = "" if texts["bits_per_byte"] is None else f"{texts['bits_per_byte']:.4f} bits a byte, "
        loss = "not finite" if texts["loss"] is None else f"{texts['loss']:.4f}"
        lines.append(f"{name}: {bits}loss {loss} over {texts['tokens']:,} tokens")
    return lines


def core_sentence(evaluation: Evaluation) -> str:
    """`, mean centred accuracy 0.0123 (-0.004 to 0.029)`; nothing where there is none."""
    if evaluation["core"] is None:
        return ""
    low, high = evaluation["core_interval"]
    return f", mean centred accuracy {evaluation['core']:.4f} ({low:.4f} to {high:.4f})"


# ---- run lock --------------------------------------------------------------------------------------------------------
# One process trains a run at a time: it holds `run.lock` in the run's folder.
#
# It is a POSIX record lock (fcntl(2)): the system lets go of it however the process ends, so the lock of a dead one is
# free at once, whoever has its number by then; children that were forked to read data do not inherit it and keep
# nothing; and on a shared file system it holds between machines. A process loses such a lock as soon as it closes *any*
# descriptor of the file, so nobody here opens a file that this process holds.
#
# Where a file system has no locks, nothing is held, and whoever asks gets `LocksMissing`.

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

FILE = "run.lock"
TAKEN = (errno.EAGAIN, errno.EACCES)
# struct flock: how it is laid out, and where the kind of the lock stands in it.
LAYOUT, KIND = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)

_held: dict[str, int] = {}  # resolved folder -> descriptor of its lock, which stays open while this process has it


class LocksMissing(Exception):
    """The lock does not tell: the file system has none, or nobody ever took it here."""


class Holder(NamedTuple):
    """Who trains a run, as far as it is known."""

    pid: int | None
    host: str | None
    since: float | None  # seconds since 1970

    @classmethod
    def of(cls, found: Any) -> "Holder":
        """Out of a file that may hold anything."""
        found = found if isinstance(found, dict) else {}
        pid, host, since = found.get("pid"), found.get("host"), nonnegative(found.get("since"))
        return cls(pid if isinstance(pid, int) else None, host if isinstance(host, str) else None, since)

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "another process"
        host = f" on {self.host}" if self.host else ""
        plausible = self.since is not None and self.since < 1e11
        since = time.strftime(" since %Y-%m-%d %H:%M:%SZ", time.gmtime(self.since)) if plausible else ""
        return process + host + since


def hold(folder: Path) -> Holder | None:
    """Take the lock of a run, until this process ends or lets go of it.

    Returns:
        None where this process has it now; else who has.

    Raises:
        LocksMissing: there are no locks here.
        OSError: the file cannot be made: the folder is gone, or is read-only.
    """
    key = str(folder.resolve())
    if key in _held:
        return None
    if fcntl is None:
        raise LocksMissing("this system has no locks")
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(descriptor)
        os.close(descriptor)
        if error.errno in TAKEN:
            return holder
        raise LocksMissing(error.strerror) from error
    _held[key] = descriptor
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(Holder(os.getpid(), socket.gethostname(), time.time())._asdict()).encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds, and only who has it is not known
    return None


def release(folder: Path) -> None:
    """Let go of the lock, if this process has it."""
    descriptor = _held.pop(str(folder.resolve()), None)
    if descriptor is not None:
        os.close(descriptor)


def look(folder: Path) -> tuple[Holder, bool]:
    """Who had the lock of a run last, and whether it is still taken. Nothing is taken here, not for a moment.

    Raises:
        LocksMissing: it cannot be told.
    """
    key = str(folder.resolve())
    if key in _held:
        return _read(_held[key]), True
    if fcntl is None:
        raise LocksMissing("this system has no locks")
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError as error:
        raise LocksMissing(error.strerror) from error
    try:
        fields = [0] * 5
        fields[KIND] = fcntl.F_WRLCK
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(LAYOUT, *fields))
        return _read(descriptor), struct.unpack(LAYOUT, answer)[KIND] != fcntl.F_UNLCK
    except OSError as error:
        raise LocksMissing(error.strerror) from error
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Holder:
    try:
        return Holder.of(parse_json(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError):
        return Holder.of(None)


def exists(pid: int | None) -> bool:
    """Whether a process of this machine is there; where it cannot be told, yes."""
    try:
        os.kill(pid, 0)
        return True
    except (OSError, TypeError, OverflowError) as error:  # somebody else's, or none is known
        return not isinstance(error, ProcessLookupError)


# ---- runs ------------------------------------------------------------------------------------------------------------
# A run is one folder under `checkpoints/`: its config, its live state, its metrics, its checkpoints.
#
# Nothing here imports torch, so that commands which only look at runs answer at once.

log = logging.getLogger(__name__)

ROOT = Path("checkpoints")
STEP = re.compile(r"step-(\d{8,})")
SILENCE = 30.0  # seconds without a heartbeat after which a run is taken for dead


class Run:
    """One run folder.

    Args:
        path: `checkpoints/<run>`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.attempt = Attempts()  # for what a training can do without
        self.seen: tuple[float, float] | None = None  # what `entered` said when it was seen that nobody trains it

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The file of the resolved config that the run was started with."""
        return self.path / "config.yaml"

    def settings(self) -> dict[str, Any]:
        """What stands in the resolved config; {} where it cannot be read."""
        try:
            found = parse_yaml(self.config.read_bytes())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def started_in(self) -> Path:
        """The folder that the run was started from, which the relative paths of its config are relative to.

        It is told from where the run lies; the working directory, where the folder of the runs was moved.
        """
        trainer = self.settings().get("trainer")
        given = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
        root = Path(given) if isinstance(given, str) else ROOT
        runs = self.path.resolve().parent
        if not root.is_absolute() and runs.parts[-len(root.parts) :] == root.parts:
            return Path(*runs.parts[: -len(root.parts)])
        return Path.cwd()

    # ---- choosing one -------------------------------------------------------------------------------------------

    @classmethod
    def all(cls, root: Path | str = ROOT) -> list["Run"]:
        """Every run under `root`, in the order in which they were started or last gone on with."""
        runs = [cls(file.parent) for file in Path(root).glob("*/run.json")]
        return sorted(runs, key=lambda run: (*run.entered(), run.name))

    def entered(self) -> tuple[float, float]:
        """The number and the time at which it was started or last gone on with: no two sessions have the same."""
        facts = self.read("run.json")
        return nonnegative(facts.get("turn")) or 0, nonnegative(facts.get("entered")) or 0.0

    @classmethod
    def next_turn(cls, root: Path | str) -> int:
        """What who starts a run or goes on with one notes as `turn`: a clock may have been set back since the last."""
        return 1 + int(max((run.entered()[0] for run in cls.all(root)), default=0))

    @classmethod
    def newest(cls, root: Path | str = ROOT, name: str | None = None) -> "Run | None":
        """That one of `name`, `name-2`, `name-3` ... which was started last; of all runs without a name."""
        runs = [run for run in cls.all(root) if name in (None, run.read("run.json").get("name"))]
        return runs[-1] if runs else None

    @classmethod
    def named(cls, name: str, root: Path | str = ROOT) -> "Run":
        """The run of exactly this name.

        Raises:
            RequestError: there is none; the message lists those there are.
        """
        run = cls(Path(root) / name)
        if not (run.path / "run.json").exists():
            others = ", ".join(other.name for other in cls.all(root)) or "none yet: start one with `lm fit`"
            raise RequestError(f"no run {name!r} under {root}; there are: {others}")
        return run

    @classmethod
    def of(cls, checkpoint: Path) -> "Run | None":
        """The run that a checkpoint's folder lies in; None for other folders."""
        run = cls(checkpoint.resolve().parent)
        return run if (checkpoint / "trainer.json").exists() and (run.path / "run.json").exists() else None

    def refuse_if_trained(self) -> None:
        """Refuse to go on with a run that a process is training now.

        Raises:
            RequestError: one is; the message says which.
        """
        self.seen = self.seen or self.entered()
        try:
            holder, taken = look(self.path)
        except LocksMissing:
            said = {**self.read("state.json"), **self.read("heartbeat.json")}
            holder, taken = Holder.of(said), self.status() == "running"
        if (taken or self._beats_elsewhere()) and holder.pid != os.getpid():
            raise self._taken(holder)

    def _beats_elsewhere(self) -> bool:
        """Whether a process of another machine trains the run though its lock looks free from here: some shared file
        systems keep locks to each machine. A beat that is still to be seen as fresh is waited for."""
        beat = self.read("heartbeat.json")
        if beat.get("host") in (None, socket.gethostname()) or self.status() != "running":
            return False
        log.info("waiting to see whether a process on %s still trains %s: %.0f s at most", beat["host"], self, SILENCE)
        while self.status() == "running":
            if self.read("heartbeat.json").get("time") != beat.get("time"):
                return True
            time.sleep(1)
        return False

    def hold(self) -> None:
        """Be the one process that trains this run, until it ends.

        Raises:
            RequestError: another one is; the message says which.
            OSError: the folder cannot be written to.
        """
        try:
            if (holder := hold(self.path)) is not None:
                raise self._taken(holder)
        except LocksMissing:
            self.refuse_if_trained()

    def _taken(self, holder: Holder) -> RequestError:
        cure = f"wait for its end, or stop it{f' (`kill {holder.pid}`)' * bool(holder.pid)}, and give the command again"
        return RequestError(f"run {self.path} is being trained by {holder}: {cure}")

    @classmethod
    def create(cls, name: str, root: Path | str = ROOT) -> "Run":
        """Claim a new folder: `name`, else `name-2`, `name-3` ...; an existing one is never overwritten.

        Raises:
            RequestError: the name would climb out of the root, or the folder cannot be made.
        """
        if not re.fullmatch(r"[\w][\w.+=-]*", name):
            raise RequestError(f"run name {name!r}: use letters, digits, '.', '_', '-', '+' and '=' only")
        for attempt in range(1, 10_000):
            path = Path(root) / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                continue
            except OSError as error:
                raise RequestError(f"cannot make the run folder {path}: {error.strerror}") from error
        raise RequestError(f"{root} holds ten thousand runs named {name}; choose another with --run")

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def steps(self) -> dict[int, Path]:
        """The complete checkpoints by optimizer step, in order."""
        found = {int(match[1]): path for path in self.path.glob("step-*") if (match := STEP.fullmatch(path.name))}
        return {step: found[step] for step in sorted(found) if (found[step] / "trainer.json").exists()}

    def link(self, name: str) -> Path | None:
        """What `best` or `last` points to; None where there is none or it dangles."""
        link = self.path / name
        return link.parent / os.readlink(link) if link.is_symlink() and link.exists() else None

    def checkpoint(self, name: str | None = None) -> Path:
        """The folder behind `best`, `last` or `step-...`; the best if not given, or the last where none was validated.

        Raises:
            RequestError: there is none.
        """
        name = name or ("best" if self.link("best") else "last")
        path = self.link(name) if name in ("best", "last") else self.path / name
        if path is None or not (path / "trainer.json").exists():
            have = ", ".join(path.name for path in self.steps().values()) or "no checkpoint yet"
            raise RequestError(f"run {self.path} has no {name!r} checkpoint; it has: {have}")
        return path

    # ---- what the run says of itself ----------------------------------------------------------------------------

    def status(self) -> str:
        """How it is doing.

        Returns:
            `running`; `dead`, where it says so and its process is gone or has given no sign of life for a while;
            `finished`, `stopped` by a guard, `interrupted` by a signal, `failed`; `unknown`.
        """
        facts = self.read("run.json")
        said = facts.get("status", "unknown")
        if said != "running":
            return said if isinstance(said, str) else "unknown"
        here = socket.gethostname()
        try:
            holder, taken = look(self.path)
            if taken or holder.host == here:
                return "running" if taken else "dead"
        except LocksMissing:
            pass
        # Nobody can tell, or it was taken on another machine, whose locks may not be seen from here.
        beat = self.read("heartbeat.json")
        entered, time_of_beat = nonnegative(facts.get("entered")) or 0.0, nonnegative(beat.get("time")) or 0.0
        if time_of_beat >= entered and beat.get("host") == here and not exists(beat.get("pid")):
            return "dead"
        return "running" if time.time() - max(time_of_beat, entered) < SILENCE else "dead"

    def describe(self, **facts: Any) -> None:
        """Write or update `run.json`."""
        write_atomically(self.path / "run.json", json.dumps({**self.read("run.json"), **facts}, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """One of the run's JSON files; empty where it is absent or was never finished."""
        try:
            return valid_facts(name, parse_json((self.path / name).read_bytes()))
        except (OSError, ValueError):
            return {}

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace `state.json`, the live state that `lm monitor` reads, if it can be written."""
        path = self.path / "state.json"
        self.attempt(path, lambda: write_atomically(path, json.dumps(state) + "\n", durable=False))

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Add one line to `metrics.jsonl`, if it can be written."""
        self._append("metrics.jsonl", metrics)

    def mark_resume(self, step: int) -> None:
        """Have `metrics.jsonl` say that the run goes on from a step, so that what came after it counts no more; an
        OSError where it cannot."""
        append_line(self.path / "metrics.jsonl", {"resumed_at": step})

    def append_alert(self, alert: dict[str, Any]) -> None:
        """Add one line to `alerts.jsonl`, if it can be written: `step`, `time`, `guard`, `action`, `message`."""
        self._append("alerts.jsonl", alert)

    def alerts(self) -> list[dict[str, Any]]:
        """What guards had to say, oldest first."""
        return [line for line in read_lines(self.path / "alerts.jsonl") if fits(line, ALERT_SHAPE)]

    def append_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Add one line to `evaluations.jsonl`.

        Raises:
            OSError: it cannot be written.
        """
        append_line(self.path / "evaluations.jsonl", evaluation)

    def evaluations(self) -> list[dict[str, Any]]:
        """How good the run's model was found to be on tasks and texts, the newest evaluation last.

        Each has `step`, `checkpoint` (the name of its folder; None while training), `time`, `tasks` (by name, with
        `accuracy`, `centered` and so on), `core` (the mean of `centered`; None where there is none), `texts` (by name,
        with `bits_per_byte` and so on) and `settings`.
        """
        lines = read_lines(self.path / "evaluations.jsonl")
        return [line for line in lines if fits(line, EVALUATION_SHAPE)]

    def metrics(self, name: str = "") -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` by step, without those that were logged after the checkpoint of a later resume.

        Args:
            name: only the lines with this metric; the others, of which there may be very many, are not parsed.
        """
        kept: list[dict[str, Any]] = []
        lines = read_lines(self.path / "metrics.jsonl", (f'"{name}"', '"resumed_at"') if name else ("",))
        for line in filter(None, map(valid_metrics, lines)):
            if "resumed_at" in line:
                kept = [entry for entry in kept if entry["step"] <= line["resumed_at"]]
            else:
                kept.append(line)
        return kept

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self.attempt(self.path / name, lambda: append_line(self.path / name, line))
