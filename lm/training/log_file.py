"""`log.txt` of a run: every line that `lm` logs, with the time."""

import logging
import time
from contextlib import suppress

from lm.runs.run import Run


class LogFile(logging.FileHandler):
    """A log file for which a full disk is no error; the console has the same lines, and `Run.attempt` warns."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.path / "log.txt", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%SZ")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        logging.getLogger("lm").addHandler(self)

    def write_alone(self, text: str, error: BaseException | None = None) -> None:
        """Write a line, with the traceback of an error, to this file and not to the console."""
        trace = error and (type(error), error, error.__traceback__)
        self.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": text, "exc_info": trace}))

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        logging.getLogger("lm").removeHandler(self)
        with suppress(OSError):
            super().close()
