"""A run is one folder under `checkpoints/`: its config, its live state, its metrics, its checkpoints.

Nothing here imports torch, so that commands which only look at runs answer at once.
"""

import json
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from lm import evaluation_log, run_lock, run_shapes
from lm.documents import fits, number, parse_json, parse_yaml
from lm.errors import RequestError
from lm.run_files import Attempts, append_line, read_lines, write_atomically

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
        return number(facts.get("turn")) or 0, number(facts.get("entered")) or 0.0

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
            holder, taken = run_lock.look(self.path)
        except run_lock.LocksMissing:
            said = {**self.read("state.json"), **self.read("heartbeat.json")}
            holder, taken = run_lock.Holder.of(said), self.status() == "running"
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
            if (holder := run_lock.hold(self.path)) is not None:
                raise self._taken(holder)
        except run_lock.LocksMissing:
            self.refuse_if_trained()

    def _taken(self, holder: run_lock.Holder) -> RequestError:
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
            holder, taken = run_lock.look(self.path)
            if taken or holder.host == here:
                return "running" if taken else "dead"
        except run_lock.LocksMissing:
            pass
        # Nobody can tell, or it was taken on another machine, whose locks may not be seen from here.
        beat = self.read("heartbeat.json")
        entered, time_of_beat = number(facts.get("entered")) or 0.0, number(beat.get("time")) or 0.0
        if time_of_beat >= entered and beat.get("host") == here and not run_lock.exists(beat.get("pid")):
            return "dead"
        return "running" if time.time() - max(time_of_beat, entered) < SILENCE else "dead"

    def describe(self, **facts: Any) -> None:
        """Write or update `run.json`."""
        write_atomically(self.path / "run.json", json.dumps({**self.read("run.json"), **facts}, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """One of the run's JSON files; empty where it is absent or was never finished."""
        try:
            return run_shapes.known(name, parse_json((self.path / name).read_bytes()))
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
        return [line for line in read_lines(self.path / "alerts.jsonl") if fits(line, run_shapes.ALERT)]

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
        return [line for line in lines if fits(line, evaluation_log.SHAPE)]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` by step. After a resume the later line of a step counts, and what a stopped
        run had logged beyond the checkpoint that it was resumed from does not."""
        kept: list[dict[str, Any]] = []
        for line in filter(None, map(run_shapes.measured, read_lines(self.path / "metrics.jsonl"))):
            if "resumed_at" in line:
                kept = [entry for entry in kept if entry["step"] <= line["resumed_at"]]
            else:
                kept.append(line)
        return kept

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self.attempt(self.path / name, lambda: append_line(self.path / name, line))
