"""How the processes of a training on many devices start, and how all of them end together and with one voice."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lm.errors import GuardStop, Interrupted, LmError, RunError

PATIENCE = 5.0  # seconds that one process gives another to end by itself
LAUNCHER = "LM_LAUNCHER_PID"  # tells a process which one started it


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of a node, and sees to it that all of them end together and with one voice.

    Lightning's own kills the whole group, without a word, five seconds after any process ended with a code that is
    not 0: also while rank zero still writes the checkpoint of a run that was interrupted. Here rank zero speaks for
    all, a rank that fails alone is named, and nobody outlives the process that the user started.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in this process; where nobody else has started the others of this node, start them first.

        Raises:
            RunError: another rank failed; it has said why.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if self.cluster_environment.creates_processes_externally:
            _end_with_launcher()
            return self._follow(function, *args, **kwargs)
        os.environ[LAUNCHER] = str(os.getpid())
        self._call_children_scripts()
        return self._lead(trainer, function, *args, **kwargs)

    def _follow(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Where another process started this one: rank zero tells what all ranks know."""
        if self.cluster_environment.global_rank() == 0:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (Interrupted, GuardStop) as stop:  # all ranks agreed on it
            raise SystemExit(stop.exit_code) from stop
        except Exception:
            # If rank zero has the same error, it ends this process while this one waits; else this one speaks.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(PATIENCE)
            raise

    def _lead(self, trainer: Trainer | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Where this process started the others: wait for them at the end, and end them where it fails."""
        left = threading.Event()
        threading.Thread(target=self._watch, args=(trainer, left), daemon=True, name="ranks").start()
        patience = 0.0
        try:
            result = function(*args, **kwargs)
            patience = PATIENCE
            return result
        except (Interrupted, GuardStop):
            patience = PATIENCE
            raise
        except LmError:
            raise
        except Exception as error:  # perhaps no more than the echo of another rank's end
            left.set()
            late = isinstance(error, RuntimeError) and re.search("timed ?out|timeout", str(error), re.IGNORECASE)
            failure = self._silence(error) if late else self._failure(within=1.0)
            if failure is None:
                raise
            raise failure from error
        finally:
            left.set()
            self._end(patience)

    def _watch(self, trainer: Trainer | None, left: threading.Event) -> None:
        """End a training that waits for a rank which is gone: a collective on a GPU waits for many minutes."""
        while not left.wait(1.0):
            failure = self._failure()
            if failure is None:
                continue
            if left.wait(PATIENCE):
                return
            for callback in trainer.callbacks if trainer else ():
                callback.on_exception(trainer, trainer.lightning_module, failure)
            self._end(0.0)
            print(f"lm: {failure}", file=sys.stderr, flush=True)
            os._exit(failure.exit_code)

    def _failure(self, within: float = 0.0) -> RunError | None:
        """The end of another rank as an error, unless it ended well or stopped as all agreed."""
        until = time.monotonic() + within
        while True:
            for rank, process in enumerate(self.procs, start=1):
                code = process.poll()
                if code not in (None, 0, Interrupted.exit_code, GuardStop.exit_code):
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                    return RunError(f"local rank {rank} {how}; `--ckpt_path auto` goes on from the newest checkpoint")
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def _silence(self, error: Exception) -> RunError:
        """Who did not answer. Those that waited like this process end by themselves; who stays is what they waited for.
        """
        until = time.monotonic() + 2 * PATIENCE  # they wait for this one first, and then take a moment to end
        while time.monotonic() < until and any(process.poll() is None for process in self.procs):
            time.sleep(0.05)
        silent = [f"{rank} (pid {process.pid})" for rank, process in enumerate(self.procs, start=1)
                  if process.poll() is None]  # fmt: skip
        if not silent and (failure := self._failure()) is not None and "was killed" in str(failure):
            return failure
        who = f"local rank {', '.join(silent)}" if silent else "a rank of another node"
        return RunError(
            f"{who} did not answer in time, so it hangs (see trainer.rank_timeout); `--ckpt_path auto` goes on from "
            f"the newest checkpoint; what the wait ended with: {str(error).strip().splitlines()[0]}"
        )

    def _end(self, patience: float) -> None:
        """Wait for the other processes of this node, kill those that stay, and reap all."""
        until = time.monotonic() + patience
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_launcher() -> None:
    """End this process when the one that started it is gone, however that was killed: no orphan keeps a GPU."""
    launcher = int(os.environ.get(LAUNCHER, 0))

    def watch() -> NoReturn:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    if launcher:
        threading.Thread(target=watch, daemon=True, name="launcher").start()
