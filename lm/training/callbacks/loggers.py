"""Lightning's loggers beside TensorBoard and `metrics.jsonl`: they get the same metrics, in a thread of their own.

A logger may write to a service that fails or does not answer; a training does not stop or wait for it.
"""

import logging
import time
from collections.abc import Callable
from queue import Full, Queue
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger

from lm.errors import first_line

log = logging.getLogger(__name__)

CALLS = ("log_hyperparams", "log_metrics", "save", "finalize")  # that a training makes
WAITING = 10_000  # calls that may wait; more are left out
LATE = 60.0  # seconds without an answer, after which the log says so
LAST_WAIT = 10.0  # seconds that the end of a training waits for all of them


class LoggerThread:
    """Makes the calls of one logger in a thread, in their order.

    The methods of the logger itself are replaced, so that callbacks find the logger that they know in
    `trainer.loggers`. The first call that fails is logged, and is the last one.

    Args:
        logger: any of Lightning's, or one's own.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = type(logger).__name__
        self._calls: Queue[tuple[Callable[..., Any], tuple, dict] | None] = Queue(WAITING)
        self._began: float | None = None  # when the call that is being made began
        self._over = self._said = False
        for name in CALLS:
            setattr(logger, name, self._queued(getattr(logger, name), last=name == "finalize"))
        self._thread = Thread(target=self._run, name=f"logger {self.name}", daemon=True)
        self._thread.start()

    def _queued(self, call: Callable[..., Any], last: bool) -> Callable[..., None]:
        def put(*args: Any, **kwargs: Any) -> None:
            if self._over:
                return
            began = self._began
            if began is not None and time.monotonic() - began > LATE:
                self._warn(f"has not answered for {LATE:g} s")
            try:
                self._calls.put_nowait((call, args, kwargs))
            except Full:
                self._warn(f"is {WAITING:,} calls behind, and what follows is left out")
            if last:
                self._finish()

        return put

    def _finish(self) -> None:
        self._over = True
        try:
            self._calls.put_nowait(None)
        except Full:
            pass
        self._thread.join(LAST_WAIT)
        if self._thread.is_alive():
            self._warn(f"did not finish within {LAST_WAIT:g} s")

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, args, kwargs = item
            self._began = time.monotonic()
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._warn(f"failed and gets no more metrics: {first_line(error)}")
                self._over = True
                return
            self._began = None

    def _warn(self, problem: str) -> None:
        if not self._said:
            log.warning("logger %s %s; the training continues, and metrics.jsonl has all metrics", self.name, problem)
        self._said = True
