"""Processes that share out work, end with their parent, and leave Ctrl-C to it.

Under `data/prepare`. Tasks are functions of their arguments that write files; results come back in the order of the
tasks, whoever did them.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lm.errors import RunError

SMALL_WORK = 32 * 2**20  # bytes of text; starting processes takes longer than this much work


class Workforce:
    """Runs tasks in processes, or in this one where the work is small.

    Args:
        workers: processes; one a core if None.
        work: bytes of text that there are to do.
    """

    def __init__(self, workers: int | None, work: int) -> None:
        self.workers = _cores() if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None
        if self.workers > 1 and work > SMALL_WORK:
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
            )

    def __enter__(self) -> "Workforce":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
            for process in processes if kind is not None else ():
                process.terminate()

    def run(self, function: Callable[..., Any], tasks: Sequence[tuple], sizes: Sequence[int], doing: str) -> list[Any]:
        """Do all tasks.

        Args:
            function: importable by name; called with the arguments of each task.
            tasks: arguments.
            sizes: work of each, for the progress bar.
            doing: what the bar says.

        Returns:
            The results, in the order of the tasks.

        Raises:
            RunError: a process died.
        """
        columns = (TextColumn(doing), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task(doing, total=sum(sizes))
            if self._pool is None:
                results = []
                for task, size in zip(tasks, sizes, strict=True):
                    results.append(function(*task))
                    progress.advance(bar, size)
                return results
            try:
                size_of = {self._pool.submit(function, *task): size for task, size in zip(tasks, sizes, strict=True)}
                left = set(size_of)
                while left:
                    done, left = wait(left, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        progress.advance(bar, size_of[future])
                return [future.result() for future in size_of]
            except BrokenProcessPool as error:
                raise RunError(
                    "a worker process died, perhaps for want of memory; the same command goes on from here, "
                    "and fewer --workers need less"
                ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A parent that was killed cannot tell its workers to stop."""
    multiprocessing.parent_process().join()
    os._exit(1)
