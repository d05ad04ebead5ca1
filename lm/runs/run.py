"""A run is one folder under `checkpoints/`: its config, its live state, its metrics, its checkpoints, its lock.

Nothing here imports torch, so that commands which only look at runs answer at once.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shlex
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm.errors import RequestError
from lm.runs.metrics import check_metric, numbers, valid_metrics
from lm.runs.schema import add_metrics, is_alert, session, valid_facts
from lm.runs.trainer_json import best_name
from lm.system.files import Attempts, append_line, read_lines, remove_stale, stated_digest, write_atomically
from lm.system.parsing import DAMAGE_ERRORS, nonnegative, parse_json, parse_yaml
from lm.system.process import launch_command, program
from lm.system.removed_options import drop_removed

log = logging.getLogger(__name__)

ROOT = Path("checkpoints")
STEP = re.compile(r"step-(\d{8,})")
HALF_WRITTEN = re.compile(r"\.(last|best|\w+\.json|\w+\.yaml)[.-](\d+)")  # a file or link that was to replace another
REFERENCES = ("best", "last", "auto")  # names of a run's checkpoints, beside those of steps
SILENCE = 30.0  # seconds without a heartbeat after which a run counts as dead
LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems without locks

_held: dict[str, Any] = {}  # resolved folder of a run -> the lock that this process holds


class Run:
    """One run folder, `checkpoints/<run>`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.attempt = Attempts()  # writes that may fail without ending the run
        self.seen: tuple[float, float] | None = None  # `entered()` when `check_not_trained` found the run free

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
        """The resolved config; {} where it cannot be read, and without groups that are damaged."""
        try:
            config = parse_yaml(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(config, dict):
            return {}
        drop_removed(config)
        groups = ("trainer", "model", "data")
        return {key: value for key, value in config.items() if key not in groups or isinstance(value, dict)}

    def started_in(self) -> Path:
        """The folder that the relative paths of the run's config are relative to.

        It follows from the run's folder and `trainer.default_root_dir`; where the folder of runs has been moved, it is
        the working directory.
        """
        setting = self.settings().get("trainer", {}).get("default_root_dir")
        root = Path(setting) if isinstance(setting, str) else ROOT
        runs = self.path.resolve().parent
        if not root.is_absolute() and runs.parts[-len(root.parts) :] == root.parts:
            return Path(*runs.parts[: -len(root.parts)])
        return Path.cwd()

    @property
    def script(self) -> Path | None:
        """The script that trained the run by `lm.run` and defines its model; None for a run of `lm fit`."""
        program, *arguments = self.read("run.json").get("command") or [""]
        is_script = program.endswith(".py") and Path(program).name != "__main__.py"
        return Path(program) if is_script and arguments[:1] in (["fit"], ["branch"]) else None

    def resume_command(self, checkpoint: str = "auto") -> str:
        """The command that resumes the run from a checkpoint, with the config that it has stored."""
        force = " --force" if "--force" in self.read("run.json").get("command", []) else ""
        change_folder, path = self._from_its_folder()
        config = shlex.quote(str(path / "config.yaml"))
        return change_folder + launch_command(f"fit --config {config} --ckpt_path {checkpoint}{force}", self.script)

    def no_checkpoint(self) -> RequestError:
        """The error for a run without checkpoints, with the fix."""
        fix = "wait for its first" if self.status() == "running" else f"`{self.resume_command()}` trains it"
        return RequestError(f"run {self.path} has no checkpoint yet: {fix}")

    def validate_command(self) -> str:
        """The command that validates the best checkpoint on the run's data."""
        change_folder, path = self._from_its_folder()
        return f"{change_folder}{program(self.script)} validate --ckpt_path {shlex.quote(str(path / 'best'))}"

    def _from_its_folder(self) -> tuple[str, Path]:
        """A shell command that changes to the folder the run was started in, and the run's path relative to it."""
        path, began = self.path.resolve(), self.started_in()
        change_folder = "" if began == Path.cwd() else f"cd {shlex.quote(str(began))} && "
        return change_folder, path.relative_to(began) if path.is_relative_to(began) else path

    # ---- finding and making runs --------------------------------------------------------------------------------

    @classmethod
    def all(cls, root: Path | str = ROOT, name: str | None = None) -> list["Run"]:
        """Every run under `root`, or `name`, `name-2`, `name-3` ..., in the order of their last start or resume."""
        runs = [cls(file.parent) for file in Path(root).glob("*/run.json")]
        runs = [run for run in runs if name in (None, run.read("run.json").get("name"))]
        return sorted(runs, key=lambda run: (*run.entered(), run.name))

    def entered(self) -> tuple[float, float]:
        """The number and the time of the run's last start or resume: unique for each session."""
        return session(self.read("run.json"))

    @classmethod
    def next_start(cls, root: Path | str) -> int:
        """The number of the next session, `turn` in run.json; times are not enough, since clocks are set back."""
        return 1 + int(max((run.entered()[0] for run in cls.all(root)), default=0))

    @classmethod
    def of(cls, checkpoint: Path) -> "Run | None":
        """The run that a checkpoint's folder is in; None for other folders, such as an import there."""
        run = cls(checkpoint.resolve().parent)
        written = (checkpoint / "trainer.json").exists() and (run.path / "run.json").exists()
        return run if written and STEP.fullmatch(checkpoint.resolve().name) else None

    @classmethod
    def create(cls, name: str, root: Path | str = ROOT) -> "Run":
        """Claim a new folder: `name`, else `name-2`, `name-3` ..., the first that is not there."""
        check_run_name(name)
        path, attempt = Path(root) / name, 1
        while True:
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                attempt += 1
                path = Path(root) / f"{name}-{attempt}"
            except OSError as error:
                raise RequestError(f"cannot make the run folder {path}: {error.strerror}") from error

    # ---- one process trains a run -------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold `run.lock` until this process ends, so that no other process trains the run.

        The system releases the lock however the process ends, so the run of a dead process is free at once.
        RequestError where another process trains it, OSError where the folder cannot be written to.
        """
        from filelock import FileLock, Timeout  # takes a while to import

        key = str(self.path.resolve())
        if key in _held:
            return
        lock = FileLock(self.path / LOCK, timeout=1, thread_local=False)  # waits, as `is_locked` holds it for a moment
        try:
            lock.acquire()
        except Timeout:
            raise self.is_being_trained() from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.check_not_trained()
            return
        _held[key] = lock
        with suppress(OSError):  # a full disk: the lock holds, but nobody knows its holder
            self.write_heartbeat({})

    def release(self) -> None:
        if lock := _held.pop(str(self.path.resolve()), None):
            lock.release()

    def is_locked(self) -> bool | None:
        """Whether a process holds the lock; None where there is no lock file, or no locks on this file system."""
        try:
            with open(self.path / LOCK, "rb") as file:  # filelock uses flock too; shared locks do not conflict
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return None

    def check_not_trained(self) -> None:
        """Raise RequestError where a process is training the run now; the message says which."""
        self.seen = self.seen or self.entered()
        locked = self.is_locked()  # None also where the run was copied from a machine that is gone
        # Some shared file systems keep locks per machine: the run may be trained though its lock looks free here.
        elsewhere = self.read("heartbeat.json").get("host") not in (None, socket.gethostname())
        trained = locked or (locked is None or elsewhere) and self.beats()
        if trained and self._holder().get("pid") != os.getpid():
            raise self.is_being_trained()

    def beats(self) -> bool:
        """Wait for the next heartbeat of a run that may be trained; whether one came within `SILENCE` seconds."""
        beat, until = self.read("heartbeat.json"), time.monotonic() + SILENCE
        if self.status() != "running":
            return False
        host = beat.get("host", "another machine")
        log.info("waiting to see whether a process on %s still trains %s: %.0f s at most", host, self.path, SILENCE)
        while self.status() == "running" and time.monotonic() < until:
            if self.read("heartbeat.json").get("time") != beat.get("time"):
                return True
            time.sleep(1)
        return False

    def _holder(self) -> dict[str, Any]:
        """`pid` and `host` of the process that trains the run, or of the last one that did."""
        return {**self.read("state.json"), **self.read("heartbeat.json")}

    def is_being_trained(self) -> RequestError:
        """The error for a second process that would train this run."""
        pid, host = self._holder().get("pid"), self._holder().get("host")
        holder = (f"process {pid}" if pid else "another process") + (f" on {host}" if host else "")
        stop = f"stop it (`kill {pid}`)" if pid else "stop it"
        return RequestError(
            f"run {self.path} is being trained by {holder}: wait for its end, or {stop}, and give the command again"
        )

    def write_heartbeat(self, machine: dict[str, Any]) -> None:
        """Replace `heartbeat.json`, the sign of life of the training process; `machine` is `Telemetry.read()` or {}."""
        beat = {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "machine": machine}
        write_atomically(self.path / "heartbeat.json", json.dumps(beat) + "\n", durable=False)

    def status(self) -> str:
        """The run's state, even if its process could not record that it ended.

        `running`; `dead`, if run.json says `running` but the process is gone or has been silent for a while;
        `finished`; `stopped` by a guard; `interrupted` by a signal; `failed`; `unknown`.
        """
        facts = self.read("run.json")
        if facts.get("status") != "running":
            return facts.get("status", "unknown")
        beat, locked = self.read("heartbeat.json"), self.is_locked()
        on_this_machine = beat.get("host") == socket.gethostname()
        if locked or locked is False and on_this_machine:
            return "running" if locked else "dead"
        # There are no locks, or the last process was on another machine, whose lock may not be visible here.
        entered, beaten = session(facts)[1], nonnegative(beat.get("time")) or 0.0
        if on_this_machine and beaten >= entered and not process_exists(beat.get("pid")):
            return "dead"
        return "running" if time.time() - max(beaten, entered) < SILENCE else "dead"

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def steps(self) -> dict[int, Path]:
        """The complete checkpoints by optimizer step, in order."""
        folders = {int(match[1]): path for path in self.path.glob("step-*") if (match := STEP.fullmatch(path.name))}
        return {step: folders[step] for step in sorted(folders) if (folders[step] / "trainer.json").exists()}

    def remove_half_written(self) -> None:
        """Remove files, links and checkpoints that a killed session left incomplete."""
        remove_stale(self.path / "step-*")
        for path in self.path.iterdir():
            half = HALF_WRITTEN.fullmatch(path.name)
            if half and int(half[2]) != os.getpid():
                path.unlink(missing_ok=True)

    def stale_checkpoints(self) -> list[Path]:
        """The checkpoints of steps that were repeated, because the run was resumed from an earlier checkpoint."""
        digests = self.read("run.json").get("left_behind", [])
        return [path for path in self.steps().values() if stated_digest(path / "trainer.json") in digests]

    def link(self, name: str) -> Path | None:
        """The checkpoint that `best` or `last` points to; None if there is no such link or its target is gone.

        A copied run may have folders instead of links, or neither: the checkpoint is found all the same.
        """
        link = self.path / name
        if link.is_symlink():
            return link.parent / os.readlink(link) if link.exists() else None
        steps, stale = self.steps().values(), self.stale_checkpoints()
        if link.is_dir():
            copied = stated_digest(link / "trainer.json")
            return next((path for path in steps if stated_digest(path / "trainer.json") == copied), None)
        last = next((path for path in reversed(steps) if path not in stale), None)
        if last is None or name == "last":
            return last
        with suppress(OSError, *DAMAGE_ERRORS):
            best = best_name(parse_json((last / "trainer.json").read_bytes()))
            return next((path for path in steps if path.name == best), None)
        return None

    def checkpoint(self, name: str | None = None) -> Path:
        """The folder behind `best`, `last` or `step-...`; without a name the best, else the last."""
        name = name or ("best" if self.link("best") else "last")
        path = self.link(name) if name in ("best", "last") else self.path / name
        if path is None or not (path / "trainer.json").exists():
            have = ", ".join(path.name for path in self.steps().values()) or "none"
            if not self.steps():
                raise self.no_checkpoint()
            raise RequestError(f"run {self.path} has no checkpoint {name!r}; it has: {have}")
        return path

    # ---- its files ----------------------------------------------------------------------------------------------

    def describe(self, **facts: Any) -> None:
        """Write or update `run.json`."""
        write_atomically(self.path / "run.json", json.dumps({**self.read("run.json"), **facts}, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """Read one of the run's JSON files; empty if it is absent or damaged."""
        try:
            facts = valid_facts(name, parse_json((self.path / name).read_bytes()))
        except (OSError, ValueError):
            return {}
        return {**facts, "metrics": numbers(facts["metrics"])} if "metrics" in facts else facts

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace `state.json`, the live state that `lm monitor` reads, if it can be written."""
        path = self.path / "state.json"
        self.attempt(path, lambda: write_atomically(path, json.dumps(state) + "\n", durable=False))

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, `alerts.jsonl` or another file of the run, if it can be written."""
        self.attempt(self.path / name, lambda: append_line(self.path / name, line))

    def mark_resume(self, step: int) -> None:
        """Add to `metrics.jsonl` that the run resumes from a step: earlier lines of later steps no longer count."""
        append_line(self.path / "metrics.jsonl", {"resumed_at": step})

    def alerts(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.path / "alerts.jsonl") if is_alert(line)]

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the run's model on tasks and texts, the newest last.

        Each has `step`, `checkpoint` (the name of its folder; None while training), `time`, `tasks` (by name, with
        `accuracy`, `centered` and so on), `core` (the mean of `centered`; None where there is none), `texts` (by name,
        with `bits_per_byte` and so on) and `settings`.
        """
        from lm.runs.evaluations import is_evaluation

        return [line for line in read_lines(self.path / "evaluations.jsonl") if is_evaluation(line)]

    def metrics(self, name: str = "") -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` by step, without lines that a resume from an earlier checkpoint made obsolete.

        With a name, only the lines with this metric; the other lines, of which there may be very many, are not parsed.
        """
        current: list[dict[str, Any]] = []
        lines = read_lines(self.path / "metrics.jsonl", (f'"{name}"', '"resumed_at"') if name else ("",))
        for line in filter(None, map(valid_metrics, lines)):
            if not name or name in line or "resumed_at" in line:
                add_metrics(current, line)
        if name and not current:
            check_metric(name)
        return current


def how_to_resume(run: Run | None) -> str:
    """The part of a message that says how to resume a run; None: it has no folder yet."""
    return "give the same command again" if run is None else f"`{run.resume_command()}` resumes it"


def is_of_a_run(reference: str | None) -> bool:
    """Whether a `--ckpt_path` names a checkpoint of a run, rather than a folder."""
    return reference in (None, *REFERENCES) or STEP.fullmatch(reference) is not None


def check_run_name(name: str) -> None:
    """Raise RequestError for a run name with characters that could lead out of the folder of runs."""
    if not re.fullmatch(r"[\w][\w.+=-]*", name):
        raise RequestError(
            f"run name {name!r}: use letters, digits, '.', '_', '-', '+' and '=' only; it is that of --run, or of the "
            "config's file"
        )


def process_exists(pid: int | None) -> bool:
    """Whether a process of this machine is alive; true if that cannot be determined."""
    try:
        os.kill(pid, 0)
        return True
    except (OSError, TypeError, OverflowError) as error:  # another user's process, or no valid number
        return not isinstance(error, ProcessLookupError)
