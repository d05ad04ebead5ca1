"""A run is one folder under `checkpoints/`: its config, its live state, its metrics, its checkpoints.

Nothing here imports torch, so that commands which only look at runs answer at once.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm import __version__
from lm.errors import RequestError

ROOT = Path("checkpoints")
STEP = re.compile(r"step-(\d{8,})")
SILENCE = 30.0  # seconds without a heartbeat after which a run is taken for dead


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file so that a reader sees the old or the new text and never a part.

    Args:
        durable: wait until it would survive a power cut, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


class Run:
    """One run folder.

    Args:
        path: `checkpoints/<run>`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

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
        import yaml

        try:
            # The loader in C is ten times as fast, and not in every build of PyYAML.
            return yaml.load(self.config.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
        except (OSError, yaml.YAMLError):
            return {}

    def started_in(self) -> Path:
        """The folder that the run was started from, which the relative paths of its config are relative to.

        It is told from where the run lies; the working directory, where the folder of the runs was moved.
        """
        root = Path(self.settings().get("trainer", {}).get("default_root_dir") or ROOT)
        runs = self.path.resolve().parent
        if not root.is_absolute() and runs.parts[-len(root.parts) :] == root.parts:
            return Path(*runs.parts[: -len(root.parts)])
        return Path.cwd()

    # ---- choosing one -------------------------------------------------------------------------------------------

    @classmethod
    def all(cls, root: Path | str = ROOT) -> list["Run"]:
        """Every run under `root`, by the time it was started or last gone on with, oldest first."""
        runs = [cls(file.parent) for file in Path(root).glob("*/run.json")]
        return sorted(runs, key=lambda run: (run.read("run.json").get("entered", 0), run.name))

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
            return said
        beat = self.read("heartbeat.json")
        of_this_session = beat.get("time", 0.0) >= facts.get("entered", 0.0)
        if of_this_session and beat.get("host") == socket.gethostname() and not _exists(beat.get("pid")):
            return "dead"
        last = max(beat.get("time", 0.0), facts.get("entered", 0.0))
        return "running" if time.time() - last < SILENCE else "dead"

    def describe(self, **facts: Any) -> None:
        """Write or update `run.json`."""
        write_atomically(self.path / "run.json", json.dumps({**self.read("run.json"), **facts}, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """One of the run's JSON files; empty where it is absent or was never finished."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace `state.json`, the live state that `lm monitor` reads."""
        write_atomically(self.path / "state.json", json.dumps(state) + "\n", durable=False)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Add one line to `metrics.jsonl`."""
        self._append("metrics.jsonl", metrics)

    def append_alert(self, alert: dict[str, Any]) -> None:
        """Add one line to `alerts.jsonl`: `step`, `time`, `guard`, `action`, `message`."""
        self._append("alerts.jsonl", alert)

    def alerts(self) -> list[dict[str, Any]]:
        """What guards had to say, oldest first."""
        return list(self._lines("alerts.jsonl"))

    def append_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Add one line to `evaluations.jsonl`."""
        self._append("evaluations.jsonl", evaluation)

    def evaluations(self) -> list[dict[str, Any]]:
        """How good the run's model was found to be on tasks and texts, the newest evaluation last.

        Each has `step`, `checkpoint` (the name of its folder; None while training), `time`, `tasks` (by name, with
        `accuracy`, `centered` and so on), `core` (the mean of `centered`; None where there is none), `texts` (by name,
        with `bits_per_byte` and so on) and `settings`.
        """
        return list(self._lines("evaluations.jsonl"))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` by step. After a resume the later line of a step counts, and what a stopped
        run had logged beyond the checkpoint that it was resumed from does not."""
        kept: list[dict[str, Any]] = []
        for line in self._lines("metrics.jsonl"):
            if "resumed_at" in line:
                kept = [entry for entry in kept if entry["step"] <= line["resumed_at"]]
            else:
                kept.append(line)
        return kept

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self.path / name, "ab+") as file:
            if file.tell():  # a kill may have cut the last line short
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write((json.dumps(line) + "\n").encode())

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # a line that a kill cut short
                continue


def _exists(pid: int | None) -> bool:
    """Whether a process of this machine is there; where it cannot be told, yes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError):  # somebody else's; or none is known
        return True
    return True


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def run_facts() -> dict[str, Any]:
    """What `run.json` records of where and how a run was started: versions, command, host, git revision."""
    from importlib.metadata import version

    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        revision = git.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        revision = ""
    packages = ("torch", "lightning", "torchmetrics", "safetensors", "tokenizers", "pyarrow", "numpy")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "entered": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "versions": {"lm": __version__, **{name: version(name) for name in packages}},
        "git": revision or None,
    }
