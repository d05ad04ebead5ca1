"""The processes of a training on several devices: how they start, end together and report one error.

A node's are started by this program, by torchrun or by srun. `training/distributed` has what they compute together.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lightning.pytorch import Trainer

from lm.errors import GuardStop, Interrupted, LmError, RequestError, RunError
from lm.runs.run import how_to_resume
from lm.system.process import LAUNCHER_PID, PARENT, arguments, code_for_launcher, under_torchrun
from lm.training.lightning_patches import ScriptLauncher
from lm.training.world import EXIT_WAIT


class Launcher(ScriptLauncher):
    """Starts the other processes of a node; all of them end together and report one error.

    Lightning's own kills the whole group, without a message, five seconds after any process ended with a code that is
    not 0: also while rank zero still writes the checkpoint of a run that was interrupted. Here rank zero reports for
    all, a rank that fails alone is named, and no process outlives the one that the user started.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in this process, after starting the others of this node unless torchrun or SLURM has."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.share_cores()
        if self.cluster_environment.creates_processes_externally:
            launcher = int(os.environ.get(LAUNCHER_PID, PARENT if under_torchrun() else 0))
            if launcher:
                exit_with(launcher)
            return self._follow(function, *args, **kwargs)
        os.environ[LAUNCHER_PID] = str(os.getpid())
        self._trainer = trainer
        self.start_others()
        return self._lead(function, *args, **kwargs)

    def start_others(self) -> None:
        """Start the other processes of this node with this program's arguments, or those of `other_arguments`."""
        place = self.cluster_environment
        os.environ |= {
            "MASTER_ADDR": place.main_address,
            "MASTER_PORT": str(place.main_port),
            "NODE_RANK": str(place.node_rank()),
            "LOCAL_RANK": str(place.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        module = sys.modules["__main__"].__spec__
        start = ["-m", module.name] if module else [os.path.abspath(sys.argv[0])]
        for rank in range(1, self.num_processes):
            command = [sys.executable, *start, *arguments()]
            self.procs.append(subprocess.Popen(command, env=os.environ | {"LOCAL_RANK": str(rank)}))

    def _follow(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `function` in a process that another one started; only rank zero reports what all ranks agreed on."""
        try:
            check_restarts()
            return function(*args, **kwargs)
        except Exception as error:
            if self.cluster_environment.global_rank() == 0:
                raise
            if isinstance(error, Interrupted | GuardStop):  # all ranks agreed on it
                raise SystemExit(code_for_launcher(error.exit_code)) from error
            # If rank zero has the same error, it kills this process while it waits; else this one reports it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(EXIT_WAIT)
            raise

    def _lead(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `function` in the process that started the others: wait for them at the end, kill them if it fails."""
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), daemon=True, name="ranks").start()
        wait = 0.0
        try:
            result = function(*args, **kwargs)
            wait = EXIT_WAIT
            return result
        except LmError as error:
            wait = EXIT_WAIT if isinstance(error, Interrupted | GuardStop) else 0.0
            raise
        except Exception as error:  # perhaps caused by another rank's exit
            done.set()
            timed_out = isinstance(error, RuntimeError) and re.search("timed ?out|timeout", str(error), re.IGNORECASE)
            failure = self._name_hung_rank(error) if timed_out else self._failure(within=1.0)
            if failure is None:
                raise
            raise failure from error
        finally:
            done.set()
            self._end(wait)

    def _watch(self, done: threading.Event) -> None:
        """End a training soon after a rank has failed: a collective on a GPU would wait for it for many minutes."""
        while not done.wait(1.0):
            failure = self._failure()
            if failure is None:
                continue
            if done.wait(EXIT_WAIT):
                return
            if trainer := self._trainer:
                for callback in trainer.callbacks:
                    callback.on_exception(trainer, trainer.lightning_module, failure)
            self._end(0.0)
            print(f"lm: {failure}", file=sys.stderr, flush=True)
            os._exit(failure.exit_code)

    def _failure(self, within: float = 0.0) -> RunError | None:
        """An error that names a rank which failed or was killed; None where none has."""
        until = time.monotonic() + within
        while True:
            for rank, process in enumerate(self.procs, start=1):
                code = process.poll()
                if code not in (None, 0, Interrupted.exit_code, GuardStop.exit_code):
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                    return RunError(f"local rank {rank} {how}; {self._how_to_resume()}")
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def _name_hung_rank(self, error: Exception) -> RunError:
        """Which rank did not answer: ranks that waited for it, as this one did, end by themselves; it does not."""
        until = time.monotonic() + 2 * EXIT_WAIT  # they wait for this one first, and then take a moment to end
        while time.monotonic() < until and any(process.poll() is None for process in self.procs):
            time.sleep(0.05)
        processes = enumerate(self.procs, start=1)
        hung = [f"{rank} (pid {process.pid})" for rank, process in processes if process.poll() is None]
        if not hung and (failure := self._failure()) is not None and "was killed" in str(failure):
            return failure
        who = f"local rank {', '.join(hung)}" if hung else "a rank of another node"
        return RunError(
            f"{who} did not answer in time, so it hangs (see trainer.rank_timeout); {self._how_to_resume()}; "
            f"the wait ended with: {str(error).strip().splitlines()[0]}"
        )

    def _how_to_resume(self) -> str:
        return how_to_resume(getattr(self._trainer, "run", None))

    def _end(self, wait: float) -> None:
        """Wait for the other processes of this node, kill those that stay, and reap all."""
        until = time.monotonic() + wait
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def exit_with(launcher: int) -> None:
    """End this process when `launcher`, the one that started it, is gone, however it was killed: no orphan keeps a GPU
    or a lock."""

    def watch() -> NoReturn:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


def check_restarts() -> None:
    """Refuse to begin where torchrun's restarts would not work.

    By default its ranks find one another through a store that outlives them: after a restart they read the addresses
    of ranks that are gone, and a machine that joins finds nothing (pytorch#135712).
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if under_torchrun() and restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RequestError(
            f"torchrun --max_restarts {restarts}: its restarts fail or hang as long as ranks share its store: "
            "`export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on every machine, and give the command again"
        )
