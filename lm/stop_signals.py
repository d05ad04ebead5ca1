"""The signals that end a training: at once before its first step, and then between two steps.

Importing this imports no torch: the signals are caught before that, which takes seconds.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType

from lm.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class GivenUp(BaseException):
    """Raised in the middle of what took too long after a signal. No handler of errors is to take it for one."""


def never() -> bool:
    """Nothing may be given up."""
    return False


class StopSignals:
    """What this process was told.

    Attributes:
        received: the first signal.
        noted: a training is under way that looks at `received` by itself; else a signal raises `Interrupted`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.noted = False
        self._repeatable: Callable[[], bool] = never
        self._patience = 0.0

    def catch(self) -> None:
        """Install the handlers; later calls take back what others have put in their place."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: it runs under nohup
                signal.signal(number, self._handle)

    def note(self, patience: float = 0.0, repeatable: Callable[[], bool] = never) -> None:
        """From here on a signal is noted, and raises nothing at once.

        Args:
            patience: seconds from a signal on, after which `GivenUp` is raised; 0: never.
            repeatable: whether that may be done at this moment; asked once a second.
        """
        self.noted, self._patience, self._repeatable = True, patience, repeatable
        if patience:
            signal.signal(signal.SIGALRM, self._give_up)
        if self.received is not None:
            self._be_patient()

    def over(self) -> None:
        """The exit code is known, and no signal is to change it. While Python ends it gives those that it handles their
        default back, which kills; those that are ignored stay so. Ctrl-C may still end an end that hangs."""
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def forget_patience(self) -> None:
        """Nothing is given up any more. An alarm that went off while Python ends would kill the process."""
        self._repeatable = never  # or what is asked would keep the whole training in memory
        if self._patience:  # else the alarm, if there is one, is somebody else's
            self._patience = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = signal.Signals(number)
        if self.noted:
            self._be_patient()
        elif os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":  # the other ranks end with this one
            raise Interrupted(f"{self.received.name}: ended before the first step; the same command starts again")

    def _be_patient(self) -> None:
        if self._patience:
            signal.setitimer(signal.ITIMER_REAL, self._patience, 1.0)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        if self._repeatable():
            self.forget_patience()
            raise GivenUp


STOP = StopSignals()  # signals are told to a process
