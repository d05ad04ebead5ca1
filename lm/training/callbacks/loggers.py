"""Services that a training never waits for: calls in threads of their own, and Lightning's loggers, which use them."""

import logging
import time
from collections.abc import Callable
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger

from lm.errors import first_line
from lm.training.lightning_patches import wrap_methods

log = logging.getLogger(__name__)

CALLS = ("log_hyperparams", "log_metrics", "save", "finalize")  # that a training makes
WAITING = 10_000  # calls that may wait; more are left out
LATE = 60.0  # seconds without an answer, after which the log says so
LAST_WAIT = 10.0  # seconds that the end of a training waits for all of them


class CallThread:
    """Makes calls in a thread, in their order; the process may end while one is being made.

    `failed` gets the exception of a call that failed; then come the calls after it.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self.began: float | None = None  # when the call that is being made began, by `time.monotonic`
        self._failed = failed
        self._calls: Queue[Callable[[], Any] | None] = Queue(WAITING)
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> bool:
        """Have a call made; returns whether it will be: not where too many wait already."""
        try:
            self._calls.put_nowait(call)
        except Full:
            return False
        return True

    def finish(self, seconds: float) -> bool:
        """Wait so long for the calls to be made, of which there come no more; returns whether they are."""
        try:
            self._calls.put_nowait(None)
        except Full:
            pass
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.began = time.monotonic()
            try:
                call()
            except Exception as error:
                self._failed(error)
            self.began = None


class LoggerThread:
    """Makes the calls of one logger in a thread, in their order.

    The methods of the logger itself are replaced, so that callbacks find the logger that they know in
    `trainer.loggers`. The first call that fails is logged, and is the last one.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = type(logger).__name__
        self._over = self._failed = self._said = False
        self._thread = CallThread(f"logger {self.name}", self._fail)
        wrap_methods(logger, CALLS, self._queued)

    def _queued(self, name: str, call: Callable[..., Any]) -> Callable[..., None]:
        def put(*args: Any, **kwargs: Any) -> None:
            if self._over:
                return
            began = self._thread.began
            if began is not None and time.monotonic() - began > LATE:
                self._warn(f"has not answered for {LATE:g} s")
            if not self._thread.put(partial(self._make, call, *args, **kwargs)):
                self._warn(f"is {WAITING:,} calls behind, and what follows is left out")
            if name == "finalize":
                self._over = True
                if not self._thread.finish(LAST_WAIT):
                    self._warn(f"did not finish within {LAST_WAIT:g} s")

        return put

    def _make(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self._failed:
            call(*args, **kwargs)

    def _fail(self, error: Exception) -> None:
        self._warn(f"failed and gets no more metrics: {first_line(error)}")
        self._over = self._failed = True

    def _warn(self, problem: str) -> None:
        if not self._said:
            log.warning("logger %s %s; the training continues, and metrics.jsonl has all metrics", self.name, problem)
        self._said = True
