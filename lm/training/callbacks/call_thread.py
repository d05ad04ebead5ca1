"""Calls that a training never waits for, such as those of the config's loggers: each is made in a thread."""

import logging
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger

from lm.errors import first_line
from lm.training.lightning_patches import wrap_methods

log = logging.getLogger(__name__)

CALLS = ("log_hyperparams", "log_metrics", "save", "finalize")  # methods that a training calls
LAST_WAIT = 10.0  # seconds that the end of a training waits for all calls


class CallThread:
    """Makes calls in a thread, in order; the process may end during a call.

    `failed` is called with the exception of a failed call; later calls are still made.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._calls: Queue[Callable[[], Any] | None] = Queue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def finish(self, seconds: float) -> bool:
        """Take no more calls, wait up to `seconds` for the pending ones, and return whether they are done."""
        self._calls.put(None)
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failed(error)


class LoggerThread:
    """Makes the calls of a logger in a thread, in order.

    The methods of the logger itself are replaced, so that callbacks find the same logger in
    `trainer.loggers`. The first failure is logged, and ends the calls.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = type(logger).__name__
        self._over = self._failed = False
        self._thread = CallThread(f"logger {self.name}", self._fail)
        wrap_methods(logger, CALLS, self._queued)

    def _queued(self, name: str, call: Callable[..., Any]) -> Callable[..., None]:
        def put(*args: Any, **kwargs: Any) -> None:
            if self._over:
                return
            self._thread.put(lambda: self._failed or call(*args, **kwargs))
            if name == "finalize":
                self._over = True
                if not self._thread.finish(LAST_WAIT):
                    self._warn(f"did not finish within {LAST_WAIT:g} s")

        return put

    def _fail(self, error: Exception) -> None:
        self._warn(f"failed and gets no more metrics: {first_line(error)}")
        self._over = self._failed = True

    def _warn(self, problem: str) -> None:
        log.warning("logger %s %s; the training continues, and metrics.jsonl has all metrics", self.name, problem)
