"""Stop signals: SIGTERM, SIGINT, SIGHUP and SIGUSR1 end a run, before its first step at once, then between steps.

Nothing here imports torch, so the signals are handled before the seconds that importing torch takes.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lm.errors import Interrupted
from lm.system.process import rank, under_srun, under_torchrun

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
FINAL_WRITE_SECONDS = 2.0  # for `before_exit`, which writes the run's status


class StopSignals:
    """Records the stop signals of this process, and acts on them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first signal
        self.armed = False  # True: a fit checks `received` between steps; False: the handler raises `Interrupted`
        self.half_time_over = False  # half of the time limit after a signal is over, and the run not finished
        self.saving = False  # a checkpoint is being copied from the device, which may take longer than the limit
        self._finished = threading.Event()  # set when the watchdog need not wait any more

    def catch(self) -> None:
        """Install the handlers; a later call replaces handlers that other code has installed since. Has no effect
        outside of the main thread.

        Before its first step a rank that torchrun started and that is not zero keeps the default action: torchrun ends
        and restarts the ranks of a node together, and waits 30 s for one that does not end by itself.
        """
        if under_torchrun() and rank() and not self.armed or not _in_main_thread():
            return
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Remove the handlers that are installed inside the `with` at its end, such as of a fit in a notebook.

        Does nothing outside of the main thread.
        """
        if not _in_main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            yield
        finally:
            self.disarm()
            for number, handler in before.items():
                signal.signal(number, handler)
            self.received, self.armed, self.half_time_over = None, False, False

    def arm(self, within: float = 0.0, before_exit: Callable[[], None] | None = None) -> None:
        """From now on, record a signal in `received` instead of raising an error.

        Unless `within` is 0, `disarm` must be called within that many seconds of a signal. Otherwise a watchdog thread
        calls `before_exit` and ends the process with exit code 75, whatever the main thread does.
        """
        self.armed, self.half_time_over, self._finished = True, False, threading.Event()
        if within:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # C code writes to it, also while Python cannot run
            if self.received is not None:
                os.write(writer, bytes([self.received]))
            arguments = (reader, within, self._finished, before_exit)
            threading.Thread(target=self._watch, args=arguments, name="stop-watchdog", daemon=True).start()

    def disarm(self) -> None:
        """Stop the watchdog: the run is ending by itself, and its last checkpoint may take any time."""
        self._finished.set()

    def ignore_signals(self) -> None:
        """Ignore all signals but SIGINT from now on, to keep the exit code.

        Python's shutdown restores the default action of signals that have a handler, which kills the process; ignored
        signals stay ignored. Ctrl-C can still end a shutdown that hangs.
        """
        self.disarm()
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = signal.Signals(number)
        if rank():
            if under_srun() and not self.armed:  # which does not end the others with rank zero
                raise SystemExit(Interrupted.exit_code)
            return  # rank zero speaks, and the other ranks end with it
        if not self.armed:
            raise Interrupted(f"{self.received.name}: ended before the first step; the same command starts again")
        with suppress(OSError):  # the terminal was closed; `print` is not safe in a handler
            os.write(2, f"\n{self.received.name}: stopping after this step; Ctrl-C again to end now\n".encode())

    def _watch(
        self, reader: int, within: float, finished: threading.Event, before_exit: Callable[[], None] | None
    ) -> None:
        """Wait for a signal, then for `finished`; end the process if it is not set in time."""
        while not (numbers := set(os.read(reader, 64)) & set(SIGNALS)):  # a byte per signal with a handler
            pass
        self.half_time_over = not finished.wait(within / 2)
        while not finished.wait(within / 2) and self.saving:
            pass
        if finished.is_set():
            return
        self.received = self.received or signal.Signals(numbers.pop())  # the main thread may not have run since
        # `before_exit` writes files and may wait for a lock that the main thread holds.
        deadline = threading.Timer(FINAL_WRITE_SECONDS, os._exit, (Interrupted.exit_code,))
        deadline.daemon = True
        deadline.start()
        try:
            if before_exit is not None:
                before_exit()
        finally:
            os._exit(Interrupted.exit_code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


STOP = StopSignals()  # one for the process: signal handlers belong to a process
