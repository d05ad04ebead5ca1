"""This process: its exit, its clock, how it was started, and text that is safe to print. Nothing here imports torch."""

import getpass
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn
from weakref import WeakSet

from lm import __version__
from lm.errors import GuardStop, RequestError

# ---- launcher --------------------------------------------------------------------------------------------------------

PARENT = os.getppid()  # the process that started this one; it may have ended by the time this is used
LAUNCHER_PID = "LM_LAUNCHER_PID"  # environment variable: the process of `lm fit` that started this rank
SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as a launcher sets them for the only process


def rank() -> int:
    """The rank of this process, even before there is a process group; 0 for a single process."""
    without_torchrun = "LOCAL_RANK" if LAUNCHER_PID in os.environ else "SLURM_PROCID"
    return int(os.environ.get("RANK" if under_torchrun() else without_torchrun, 0))


def check_launcher() -> None:
    """Raise RequestError if the environment names several processes, and no launcher that we know started this one.

    Otherwise such variables are removed: Lightning would believe them.
    """
    if under_torchrun() or srun_tasks() > 1 or LAUNCHER_PID in os.environ:
        return
    variables = {name: os.environ[name] for name in SINGLE if name in os.environ}
    if any(value != SINGLE[name] for name, value in variables.items()):
        values = " ".join(f"{name}={value}" for name, value in variables.items())
        raise RequestError(
            f"{values} in the environment, and neither torchrun nor srun started this process: start all with "
            f"torchrun; or for this one alone, first `unset {' '.join(variables)}`"
        )
    for name in variables:
        del os.environ[name]


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def srun_tasks() -> int:
    """Number of tasks that srun started, if this process is one or was started by one; 1 without srun.

    A batch script has the variables of its job too, but is a single process.
    """
    return int(os.environ.get("SLURM_NTASKS", 1)) if "SLURM_STEP_ID" in os.environ else 1


def under_srun() -> bool:
    """Whether this process is one of several that srun started."""
    return srun_tasks() > 1 and not under_torchrun() and LAUNCHER_PID not in os.environ


script: Path | None = None  # the script that called `lm.run`, if any
module_class: type | None = None  # the subclass of LanguageModule that commands train, load and evaluate, if any


def command() -> list[str]:
    """The arguments that start this program in a new process."""
    return [sys.executable, *([str(script)] if script else ["-m", "lm"])]


def program(other: Path | None = None) -> str:
    """How to start this program on a command line: `lm`, `python -m lm` or `python my_model.py`.

    `other` is the script to use if this program is not a script, since only a script knows a model's class.
    """
    if (script or other) is not None:
        return shlex.join([Path(sys.executable).name, str(script or other)])
    if Path(sys.argv[0]).name == "lm":
        return "lm" if shutil.which("lm") == sys.argv[0] else shlex.quote(sys.argv[0])
    typed = sys.orig_argv[: sys.orig_argv.index("-m")] if "-m" in sys.orig_argv else [Path(sys.executable).name]
    return f"{shlex.join(typed)} -m lm"


def launch_command(arguments: str, other: Path | None = None) -> str:
    """The shell command that starts all ranks of this run; a comment in it tells what is not known.

    `arguments` are quoted for a shell, such as `fit --config a.yaml`; `other` is as in `program`.
    """
    start, unknown = program(other), []
    srun = srun_tasks() > 1
    if under_torchrun():
        target = shlex.quote(str(script or other)) if script or other else "-m lm"
        nodes, processes = os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
        start = f"torchrun --nnodes {nodes} --nproc_per_node {processes} {target}"
        everywhere = ", on every node" if nodes != "1" and not srun else ""
        unknown.append(f"with the other options of torchrun{everywhere}")
    if srun:
        sizes = {"nodes": "SLURM_NNODES", "ntasks": "SLURM_NTASKS", "ntasks-per-node": "SLURM_NTASKS_PER_NODE"}
        known = [f"--{name} {os.environ[key]}" for name, key in sizes.items() if key in os.environ]
        start = f"srun {' '.join(known)} {start}"
        unknown.append("with the other options of srun")
    return f"{start} {arguments}" + (f"  # {', '.join(unknown)}" if unknown else "")


def import_from_working_directory() -> None:
    """Let a config name callbacks, loggers or optimizers of modules there, with `lm` as with `python -m lm`.

    It is searched last, so that a file there, such as random.py, does not replace a module of Python. The path is
    absolute, because the parser changes to the folder of a config while it reads it.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


_arguments: list[str] | None = None


def arguments() -> list[str]:
    """The arguments that start this process's other ranks and are written to `run.json`: as typed, or as set."""
    return sys.argv[1:] if _arguments is None else _arguments


@contextmanager
def other_arguments(replacement: list[str]) -> Iterator[None]:
    """Inside the `with`, `arguments` are these: of the `fit` that another command ends in."""
    global _arguments
    _arguments = replacement
    try:
        yield
    finally:
        _arguments = None


def code_for_launcher(code: int) -> int:
    """The exit code of this process, given the code it would end with.

    torchrun starts all ranks again, up to `--max_restarts` times, when one exits with a code other than 0. This
    would undo a guard's decision, so a run stopped by a guard ends with 0 there; its status is `stopped`.
    """
    return 0 if under_torchrun() and code == GuardStop.exit_code else code


# ---- exit ------------------------------------------------------------------------------------------------------------

READERS = "lm-read"  # prefix of the names of threads that read data
GRACE = 1.0  # seconds for reads under way when the process ends
_reader_pools: WeakSet[ThreadPoolExecutor] = WeakSet()


def reader_pool(threads: int) -> ThreadPoolExecutor:
    """A thread pool for reads that may never return, such as from an object store that does not answer."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=READERS)
    _reader_pools.add(pool)
    return pool


def leave(code: int) -> NoReturn:
    """Exit with this code without waiting for reads that do not return, unlike Python and pyarrow."""
    for pool in list(_reader_pools):
        pool.shutdown(wait=False, cancel_futures=True)
    readers = [thread for thread in threading.enumerate() if thread.name.startswith(READERS)]
    end = time.monotonic() + GRACE
    for thread in readers:
        thread.join(max(0.0, end - time.monotonic()))
    if not any(thread.is_alive() for thread in readers):
        sys.exit(code)
    with suppress(OSError):  # the terminal or pipe may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---- clock -----------------------------------------------------------------------------------------------------------

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 that never jump: the wall clock when this is imported, plus the time since then.

    A run writes it to its log lines, so that curves over time are right even if the wall clock is set. To judge
    another machine's heartbeat, use the wall clock.
    """
    return _OFFSET + time.monotonic()


# ---- start of the process --------------------------------------------------------------------------------------------


@cache
def lm_version() -> str:
    """The version of this package, and its commit if known: `0.1.0+0b6d58d52`, `.dirty` if files differ."""
    from importlib.metadata import distributions

    commit, folder = "", Path(__file__).parents[2]
    if (folder / ".git").exists():
        commit = _git("-C", str(folder), "describe", "--always", "--abbrev=9", "--dirty=.dirty", "--exclude=*")
    elif installed := next(iter(distributions(name="lm-pretrain")), None):  # pip keeps what it installed from
        source = json.loads(installed.read_text("direct_url.json") or "{}")
        commit = source.get("vcs_info", {}).get("commit_id", "")[:9]
    return f"{__version__}+{commit}" if commit else __version__


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run_facts() -> dict[str, Any]:
    """Where and how a run was started, for `run.json`: versions, command, host, git revision."""
    from importlib.metadata import version

    packages = ("torch", "lightning", "torchmetrics", "safetensors", "tokenizers", "pyarrow", "numpy")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "entered": time.time(),
        "command": [str(script or Path(sys.argv[0]).name), *arguments()],
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "versions": {"lm": lm_version(), **{name: version(name) for name in packages}},
        "git": _git("rev-parse", "HEAD") or None,  # of the working directory
    }


def ssh_options() -> str | None:
    """ssh options that reach this machine, from the ssh session of this process; None without a session."""
    session = os.environ.get("SSH_CONNECTION", "").split()  # address and port of the client, then of this machine
    if len(session) != 4:
        return None
    return ("" if session[3] == "22" else f"-p {session[3]} ") + f"{getpass.getuser()}@{session[2]}"


def seconds_since_process_start() -> float:
    import psutil  # which `lm --help` does not need

    return max(0.0, time.time() - psutil.Process().create_time())


# ---- safe text -------------------------------------------------------------------------------------------------------

# Control characters as visible symbols; line ends and tabs stay.
SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), "␦")


def harmless(text: str) -> str:
    """Replace control characters by visible symbols, so that the text cannot move a terminal's cursor."""
    return text.translate(SYMBOLS)


class HarmlessFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


class ConsoleHandler(logging.StreamHandler):
    """Writes to `sys.stderr`, or `sys.stdout`, as it is at the moment: a progress bar puts its own there."""

    def __init__(self, stream: Literal["stdout", "stderr"] = "stderr") -> None:
        super().__init__()
        self.stream_name = stream
        # A line a log interval, unless a progress bar shows it.
        self.addFilter(lambda record: record.name != "lm.lines" or not sys.stderr.isatty())
        self.setFormatter(HarmlessFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self.stream_name)
        super().emit(record)
