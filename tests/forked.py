"""Test equipment: `python -m lm` as a fork of a process that has imported torch and Lightning.

These imports take five seconds of processor time, several times what the very small trainings of the tests take. A
fork is a process with an id, signals, memory and an exit code of its own. It shares the seed of Python's hashes with
the other forks, and what libraries read from the environment while they are imported. The second rank of a training
is a fork too: a child of rank zero, as the process is that rank zero would start.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

# A GPU that was looked at before the fork cannot be used after it.
CAN_FORK = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
MOUNTS_OF = "TESTS_MOUNTS_OF"  # environment variable: a process whose file systems a fork sees


class Fork:
    """A running `python -m lm`, or `python FILE.py` where the first argument is one; the part of `subprocess.Popen` that the tests use.

    Args:
        terminal: a pseudo-terminal that it has in place of pipes.
    """

    def __init__(self, arguments: tuple[str, ...], cwd: Path, env: dict[str, str], terminal: int | None = None) -> None:
        self.args, self.returncode = ("lm", *arguments), None
        if terminal is None:
            ends = os.pipe(), os.pipe()
            self.stdout, self.stderr = (os.fdopen(reader) for reader, _ in ends)
            writers = [writer for _, writer in ends]
        else:
            writers = [os.dup(terminal), os.dup(terminal)]
        self._answers, theirs = socket.socketpair()
        request = json.dumps([arguments, str(cwd), env]).encode()
        with theirs:
            socket.send_fds(_server(), [len(request).to_bytes(4, "big")], [*writers, theirs.fileno()])
        _server().sendall(request)
        for writer in writers:
            os.close(writer)
        self.pid = self._answer()

    def _answer(self) -> int:
        """Receive the process id, later the exit code."""
        return int.from_bytes(self._answers.recv(4), "big", signed=True)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        pool = ThreadPoolExecutor(2)  # so that neither pipe fills up
        pipes = self.stdout, self.stderr
        texts = [pool.submit(lambda pipe=pipe: "" if pipe.closed else pipe.read()) for pipe in pipes]
        pool.shutdown(wait=False)
        self.wait(timeout)
        out, err = (text.result(timeout) for text in texts)
        self.stdout.close()
        self.stderr.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> socket.socket:
    """The connection to the process that forks, which ends when it is closed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    places = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    with theirs:
        process = subprocess.Popen(  # with pipes, so that Python's files know that they cannot seek
            command, pass_fds=[theirs.fileno()], env=env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    atexit.register(process.wait, 60)
    atexit.register(ours.close)
    return ours


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request; returns in the fork, with the arguments of `lm`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a group that this belongs to; the connection ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers below
    while True:
        header, fds, *_ = socket.recv_fds(requests, 4, 3)
        if not header:
            os._exit(0)
        content = b""
        while len(content) < int.from_bytes(header, "big"):
            content += requests.recv(1 << 20)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, err, answers = fds
    pid = os.fork()
    if pid:  # the parent of the process, which watches it
        os.write(answers, pid.to_bytes(4, "big"))
        os.close(out)
        os.close(err)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            os.write(answers, os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if os.isatty(1):
        os.setsid()
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        os.dup2(1, 0)
        sys.stdout.reconfigure(line_buffering=True)
    for fd in fds:
        os.close(fd)
    requests.close()
    arguments, cwd, env = json.loads(content)
    if holder := env.pop(MOUNTS_OF, None):
        enter_mounts(holder)
    sys.path[:1] = [cwd, *env["PYTHONPATH"].split(os.pathsep)]
    enter(cwd, env)
    return arguments


def enter(cwd: str, env: dict[str, str]) -> None:
    """Be a process that was started in a folder with this environment."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # which is looked up in the environment


def enter_mounts(holder: str) -> None:
    """Join the namespaces of users and of file systems of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt"):
        with open(f"/proc/{holder}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {holder}")


class RankPopen(subprocess.Popen):
    """`subprocess.Popen`, which starts the second rank of a training as a fork that is kept ready for it."""

    def __init__(self, args, *rest, env=None, **options):
        if args[0] != sys.executable or (env or {}).get("LOCAL_RANK") != "1" or RankPopen.ready is None:
            super().__init__(args, *rest, env=env, **options)
            return
        self.pid, connection = RankPopen.ready
        self.args, self.returncode, self._child_created, self._waitpid_lock = args, None, True, threading.Lock()
        self.stdin = self.stdout = self.stderr = RankPopen.ready = None
        own_arguments = args[3:] if args[1] == "-m" else args[1:]
        with connection.makefile("w") as request:
            json.dump([own_arguments, os.getcwd(), dict(env)], request)
        connection.close()

    ready: tuple[int, socket.socket] | None = None  # the process, and where it waits for what it is to do


def prepare_rank() -> list[str] | None:
    """Fork a process that waits to be the second rank of this one, and ends with it where there is none.

    Returns, in that fork alone and once it is a rank, its arguments.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        RankPopen.ready, subprocess.Popen = (pid, ours), RankPopen
        return None
    ours.close()
    os.chdir("/")  # it does not count as a process of the folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    content = theirs.makefile().read()
    if not content:
        os._exit(0)
    theirs.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, os.getpgid(os.getppid()))
    arguments, cwd, env = json.loads(content)
    enter(cwd, env)
    return arguments


if __name__ == "__main__":
    import torch.utils.tensorboard  # noqa: F401  which `lm fit` imports late

    import lm.cli.fit  # noqa: F401  and with it all that a fit needs: each fork would take seconds to import it

    gc.freeze()  # a collection would touch, and so copy, all that the forks share

    sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    if (arguments := prepare_rank()) is not None:
        sys.argv[1:] = arguments
    try:
        if sys.argv[1:2] and sys.argv[1].endswith(".py"):  # a file that calls `lm.run`
            sys.argv[:2] = sys.argv[1:2]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module("lm", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    if isinstance(code, str):
        sys.exit(code)
    # As Python ends, but for taking apart every module that the forks share.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
