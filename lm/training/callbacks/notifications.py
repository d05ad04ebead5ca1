"""Messages to the addresses under `notify:`, with Apprise: the start of a run, findings of its guards, and its end.

Each address has its own thread, so a service that does not answer does not delay a step. Passwords and tokens of an
address are in no log, error or file of the run, except `config.yaml` if the config contains them.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from lm.errors import GuardStop, Interrupted, LmError, RequestError, RunError, first_line
from lm.runs import postmortem
from lm.runs.metrics import METRICS
from lm.runs.run import VARIABLE, hide_address
from lm.system.hardware import device_name
from lm.system.process import rank
from lm.system.stop_signals import STOP
from lm.system.units import format_count, plural
from lm.training.callback import Callback
from lm.training.callbacks.loggers import CallThread
from lm.training.callbacks.logging import RunLog
from lm.training.config import Action
from lm.training.guards import Finding
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

Level = Literal["info", "warning", "error"]
LEVELS = ("info", "warning", "error")
APPRISE = "https://github.com/caronc/apprise"
LAST_WAIT = 10.0  # seconds that the end of a run waits for all addresses together
LEAST_WAIT = 1.0  # seconds that it waits even if `trainer.stop_within` is over
QUIET = 600.0  # seconds between two messages on findings of guards, unless there is a post-mortem
MOST_FINDINGS = 10  # in one message
PARTS = re.compile(r"[?&][^=]*=|[^\w.+-]")  # separators of the parts of an address, and names of options
SECRET = 4  # length from which a part of an address is hidden in Apprise's messages
ENDS: dict[type[BaseException], tuple[str, Level]] = {  # any other end of a run is a failure
    Interrupted: ("interrupted", "warning"), GuardStop: ("stopped by a guard", "error"),
}  # fmt: skip


class Message(NamedTuple):
    level: Level
    title: str
    text: str


# ---- addresses -------------------------------------------------------------------------------------------------------


class _AppriseLog(logging.Handler):
    """Keeps the newest line that Apprise logged in each thread. It may contain a password, so it is not shown."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.newest: dict[int | None, str] = {}  # by thread

    def emit(self, record: logging.LogRecord) -> None:
        self.newest[record.thread] = record.getMessage()


_apprise_log = _AppriseLog()


class Recipient:
    """An address in Apprise's notation, for messages of a level or a more important one.

    `$NAME` in the address is read from the environment. `name` is the address without passwords and tokens, `place` its
    position in the config, for errors.
    """

    def __init__(self, url: str, level: Level, place: str) -> None:
        try:
            import apprise
        except ImportError as error:
            raise RequestError("notify needs the package apprise: `pip install apprise`") from error
        self._logger = logging.getLogger("apprise")
        self._logger.propagate = False
        if _apprise_log not in self._logger.handlers:
            self._logger.addHandler(_apprise_log)
        url = VARIABLE.sub(partial(_from_environment, place), url)
        parts = {part for text in (url, unquote(url)) for part in PARTS.split(text.partition("://")[2])}
        self._secrets = sorted((part for part in parts if len(part) >= SECRET), key=len, reverse=True)
        asset = apprise.AppriseAsset(app_id="lm", app_desc="lm", app_url="")
        self._service = apprise.Apprise.instantiate(url, asset=asset)
        if self._service is None:
            raise RequestError(f"{place}: Apprise cannot read this address; {APPRISE} has the notation of each service")
        self.name, self.level = _without_secrets(self._service.url(privacy=True)), level

    def send(self, message: Message) -> None:
        """Send a message. On failure, RunError has the reason, without any part of the address."""
        _apprise_log.newest.pop(threading.get_ident(), None)
        kind = {"info": "info", "warning": "warning", "error": "failure"}[message.level]
        try:
            # Not `Apprise.notify`: Python would wait for its threads when the process ends.
            sent = self._service.notify(body=message.text, title=message.title, notify_type=kind, body_format="text")
        except Exception as error:
            self._logger.warning("%s: %s", type(error).__name__, first_line(error))
            sent = False
        if not sent:
            reason = _apprise_log.newest.get(threading.get_ident(), "the service did not take it")
            for secret in self._secrets:
                reason = reason.replace(secret, "***")
            raise RunError(reason)


def _from_environment(place: str, found: re.Match) -> str:
    name = found[1] or found[2]
    if value := os.environ.get(name):
        return value
    raise RequestError(f"{place}: ${name} is not set in the environment: export it, or write %24 for a plain `$`")


def _without_secrets(url: str) -> str:
    """Scheme, user and host of an address in Apprise's form without passwords; paths and options may have tokens.

    A host without a dot is a topic or a token instead: only its first and last letters are kept.
    """
    scheme, _, rest = url.partition("://")
    user, at, host = re.split("[/?]", rest, maxsplit=1)[0].rpartition("@")
    shown = host if "." in host or host.startswith("localhost") else f"{host[:1]}...{host[-1:]}"
    return f"{scheme}://{user}{at}{shown}"


def open_recipients(notify: Sequence[Any]) -> list[Recipient]:
    """Open the recipients of a run's messages; none on ranks other than zero.

    Entries are checked here and not by the parser, whose errors would show passwords.
    """
    if rank() != 0:
        return []
    recipients = []
    for number, entry in enumerate(notify, 1):
        entry = {"url": entry} if isinstance(entry, str) else entry
        place = f"notify, entry {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or entry.keys() - {"url", "level"}:
            raise RequestError(f"{place}: give an address, `ntfy://topic`, or {{url: ntfy://topic, level: warning}}")
        level, place = entry.get("level", "info"), f"{place} ({hide_address(entry['url'])})"
        if level not in LEVELS:
            raise RequestError(f"{place}: level {level!r} must be one of {', '.join(LEVELS)}")
        recipients.append(Recipient(entry["url"], level, place))
    return recipients


# ---- events ----------------------------------------------------------------------------------------------------------


class Notifications(Callback):
    """Sends messages about the run, from rank zero.

    A guard's finding is sent at once; findings of the next `QUIET` seconds wait and are sent together, unless one of
    them has a post-mortem, or the run ends. A finding that ends the run is part of the message on its end.

    It comes after the guards, and after the callbacks that write post-mortems and roll back.
    """

    def __init__(self, recipients: Sequence[Recipient]) -> None:
        self._recipients = recipients
        self._threads: dict[Recipient, CallThread] = {}
        self._failed: set[Recipient] = set()  # recipients whose failure was logged
        self._findings: list[str] = []  # findings not sent yet
        self._quiet_until = 0.0  # by `time.monotonic`
        self._post_mortems: set[Path] = set()  # folders that were sent

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        step, left = trainer.global_step, trainer.max_steps - trainer.global_step
        tokens = format_count(trainer.steps.tokens(trainer.max_steps) - trainer.steps.tokens(step))
        event = f"resumed after step {step:,}" if step else "started"
        self._send(trainer, "info", event, [f"{plural(left, 'step')} to go, {tokens} tokens"])

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        ends = trainer.run_state.stop is not None or action == "stop" and trainer.global_step < trainer.max_steps
        if ends or not self._recipients:
            return
        self._findings.append(str(Finding(guard, action, message)))
        folder = self._new_post_mortem(trainer)
        if folder or time.monotonic() >= self._quiet_until:
            self._send_findings(trainer, folder)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
        if time.monotonic() >= self._quiet_until:
            self._send_findings(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._send_findings(trainer)
        ended, loss = trainer.run.read("run.json"), METRICS["val/loss"]
        passed = (ended.get("acceptance") or {}).get("passed", True)
        lines = [ended.get("reason") or "", "" if passed else "not all metrics are as expected: see `lm runs check`"]
        if trainer.run.link("best"):
            lines.append(f"best {loss.label} {loss.shown(trainer.checkpoint_callback.best_loss)}")
        self._send(trainer, "info" if passed else "warning", "finished", lines)
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        if trainer.run is None or not trainer.fitting:
            return
        self._send_findings(trainer)
        event, level = next((end for kind, end in ENDS.items() if isinstance(exception, kind)), ("failed", "error"))
        text, folder, resume = str(exception), self._new_post_mortem(trainer), trainer.run.resume_command()
        lines = [text if isinstance(exception, LmError) else f"{type(exception).__name__}: {text}"]
        lines += [f"post-mortem: {folder}"] * bool(folder) + [f"`{resume}` resumes it"] * (resume not in text)
        self._send(trainer, level, event, lines)
        self._finish(trainer)

    def _new_post_mortem(self, trainer: Trainer) -> Path | None:
        """The folder of a post-mortem of this step, if there is one that was not sent."""
        folder = postmortem.folder_of(trainer.run, trainer.global_step)
        if folder in self._post_mortems or not folder.exists():
            return None
        self._post_mortems.add(folder)
        return folder

    def _send_findings(self, trainer: Trainer, folder: Path | None = None) -> None:
        """Send the waiting findings, with the folder of the newest one's post-mortem."""
        findings, self._findings = self._findings, []
        if not findings:
            return
        self._quiet_until = time.monotonic() + QUIET
        older = len(findings) - MOST_FINDINGS
        lines = [f"{older} more before these"] * (older > 0) + findings[-MOST_FINDINGS:]
        lines += [f"post-mortem: {folder}"] * bool(folder)
        event = findings[0].partition(":")[0] if len(findings) == 1 else f"{len(findings)} findings of guards"
        self._send(trainer, "warning", "post-mortem" if folder else event, lines)

    def _send(self, trainer: Trainer, level: Level, event: str, lines: list[str]) -> None:
        """Queue a message for the recipients of its level, without waiting."""
        to = [one for one in self._recipients if LEVELS.index(level) >= LEVELS.index(one.level)]
        if not to or not trainer.is_global_zero:
            return
        latest = RunLog.of(trainer).latest
        losses = [f"{METRICS[name].label} {METRICS[name].shown(latest[name])}" for name in ("train/loss", "val/loss")
                  if name in latest]  # fmt: skip
        state = ", ".join([f"step {trainer.global_step:,} of {trainer.max_steps:,}", *losses])
        machine = f"{trainer.run.path.resolve()} on {socket.gethostname()}, {device_name(trainer.strategy.root_device)}"
        text = "\n".join(filter(None, [*lines, state, machine]))
        message = Message(level, f"{trainer.run.name}: {event}", text)
        for one in to:
            if one not in self._threads:
                self._threads[one] = CallThread(f"notify {one.name}", partial(self._fail, one))
            self._threads[one].put(partial(one.send, message))

    def _fail(self, to: Recipient, error: Exception) -> None:
        if to not in self._failed:
            log.warning("notify: %s is not reached: %s; the training continues", to.name, first_line(error))
        self._failed.add(to)

    def _finish(self, trainer: Trainer) -> None:
        """Wait until messages are sent; after a signal, no longer than the run may take."""
        until = time.monotonic() + LAST_WAIT
        if STOP.received is not None and trainer.options.stop_within:
            limit = max(STOP.received_at + trainer.options.stop_within, time.monotonic() + LEAST_WAIT)
            until = min(until, limit)
        for to, thread in self._threads.items():
            if not thread.finish(until - time.monotonic()):
                self._fail(to, RunError("no answer when the run ended"))
        self._recipients = []  # the end is sent once
