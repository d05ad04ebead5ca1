"""The program of `on_event`: started when a run begins, when its guards find something, and when it ends.

It is started without a shell, with the facts as JSON on its standard input and the most important ones in `LM_EVENT`,
`LM_MESSAGE`, `LM_RUN` and `LM_STEP`. Its output goes to standard error. What goes wrong with it is one line of the log.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from tempfile import TemporaryFile
from typing import Any

from lm.errors import RunError
from lm.runs import postmortem
from lm.runs.facts import read_facts
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.parsing import nonnegative
from lm.system.units import format_count, plural
from lm.training.callback import Callback
from lm.training.callbacks.call_thread import CallThread
from lm.training.callbacks.guards import Finding
from lm.training.callbacks.run_folder import STATUS, RunFolder
from lm.training.config import Action
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

EXIT_CODES = {
    "finished": 0,
    **{status: error.exit_code for error, status in STATUS.items()},
    "failed": RunError.exit_code,
}
RUN_FACTS = ("reason", "path", "host", "tags", "note", "max_steps", "tokens", "metrics", "acceptance")
PATIENCE = 60.0  # seconds that the program may take during a run
PENDING = 10.0  # seconds that the end of a run waits for earlier events
QUIET = 600.0  # seconds between two events of guards
MAX_FINDINGS = 10  # in one event
LONGEST = 100_000  # characters of a variable; Linux takes 128 KiB
STDERR = 2  # where the output goes, also in a notebook, whose sys.stderr is no file


class EventProgram:
    """Starts the program, one at a time and in a thread, so that no step waits for it."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._thread: CallThread | None = None
        self._running: subprocess.Popen | None = None  # during a run
        self._ended = False

    def start(self, run: Run, event: str, message: str, step: int) -> None:
        """Start it soon; after `PATIENCE` seconds it is killed."""
        self._thread = self._thread or CallThread("on_event", partial(log.warning, "on_event: %s"))

        def call() -> None:
            if not self._ended:
                self._run(event_facts(run, event, message, step), PATIENCE, kill=True)

        self._thread.put(call)

    def end(self, run: Run, patience: float) -> None:
        """Start it for a run that has ended, and wait up to `patience` seconds; it may go on after that."""
        if self._thread is not None and not self._thread.finish(min(patience, PENDING)):
            self._ended = True  # what still waits is dropped
            if self._running is not None:
                _kill(self._running)
        self._thread = None
        facts = read_facts(run)
        self._run(event_facts(run, facts["status"], facts["reason"] or "", facts["step"]), patience, kill=False)

    def _run(self, facts: dict[str, Any], patience: float, kill: bool) -> None:
        name = self.command[0]
        about = {f"LM_{key.upper()}": str(facts[key])[:LONGEST] for key in ("event", "message", "run", "step")}
        try:
            with TemporaryFile() as text:
                text.write(json.dumps(facts).encode() + b"\n")
                text.seek(0)
                # In a new session, so that Ctrl-C in the training's terminal does not end it.
                program = subprocess.Popen(
                    self.command, stdin=text, stdout=STDERR, start_new_session=True, env={**os.environ, **about}
                )
        except OSError as error:
            log.warning("on_event: %s cannot be started: %s", name, error.strerror or error)
            return
        self._running = program if kill else None
        try:
            program.wait(patience)
        except subprocess.TimeoutExpired:
            if kill:
                _kill(program)
                program.wait()
                log.warning("on_event: %s was killed, because it took longer than %g s", name, patience)
            else:
                log.info("on_event: %s takes longer than %g s and continues by itself", name, patience)
        else:
            if program.returncode:
                log.warning("on_event: %s ended with exit code %d", name, program.returncode)


def _kill(program: subprocess.Popen) -> None:
    with suppress(OSError):  # it has just ended, or is another user's
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)  # with what it has started


def event_facts(run: Run, event: str, what: str, step: int | None) -> dict[str, Any]:
    """The facts that the program receives about an event; `what` is the first line of its message."""
    facts, last = read_facts(run), run.link("last")
    step = step or 0
    losses = [
        f"{METRICS[name].label} {METRICS[name].shown(facts['metrics'][name])}"
        for name in ("train/loss", "val/loss")
        if name in facts["metrics"]
    ]
    passed = (facts["acceptance"] or {}).get("passed", True) or event != "finished"
    folder, resume = postmortem.folder_of(run, step), run.resume_command()
    lines = [
        what,
        "" if passed else f"not all metrics are as expected: see `lm runs check {run.name}`",
        f"post-mortem: {folder}" if folder.exists() else "",
        f"`{resume}` resumes it" if EXIT_CODES.get(event) and " --ckpt_path " not in what else "",
        ", ".join([f"step {step:,} of {facts['max_steps'] or 0:,}", *losses]),
        f"{facts['path']} on {facts['host']}, {facts['device']}",
    ]
    return {
        "event": event,
        "message": "\n".join(filter(None, lines)).replace("\0", ""),
        "exit_code": EXIT_CODES.get(event),
        "run": run.name,
        "step": step,
        "resume": [sys.executable, "-m", "lm", "fit", "--config", str(run.config.resolve()), "--ckpt_path", "auto"],
        "cwd": os.getcwd(),
        "checkpoint": str(last.resolve()) if last else None,
        "spent_usd": nonnegative((facts["budget"] or {}).get("spent_usd")),
        **{name: facts[name] for name in RUN_FACTS},
    }


class Events(Callback):
    """Tells the program of the run's start and of findings of guards, from rank zero, and has `RunFolder` tell it of
    the end.

    A finding is an event at once; those of the next `QUIET` seconds are one event after that. A finding that ends the
    run is told with its end. It comes after the guards, and after the callbacks that write post-mortems and roll back.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._program = EventProgram(run_folder.options.on_event)
        run_folder.announce = self._program.end
        self._findings: list[Finding] = []  # not told yet
        self._quiet_until = 0.0  # by `time.monotonic`

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        step, steps_left = trainer.global_step, trainer.max_steps - trainer.global_step
        tokens = format_count(trainer.steps.tokens(trainer.max_steps) - trainer.steps.tokens(step))
        self._start(trainer, "resumed" if step else "started", f"{plural(steps_left, 'step')} to go, {tokens} tokens")

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        if trainer.run_state.stop is None and (action != "stop" or trainer.global_step >= trainer.max_steps):
            self._findings.append(Finding(guard, action, message))
            self.on_metrics(trainer)

    def on_metrics(self, trainer: Trainer, *args: Any) -> None:
        if self._findings and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET
            self._tell_findings(trainer)

    def on_fit_end(self, trainer: Trainer, *args: Any) -> None:
        if self._findings and trainer.run is not None:
            self._tell_findings(trainer)

    on_exception = on_fit_end  # pyright: ignore[reportAssignmentType]

    def _tell_findings(self, trainer: Trainer) -> None:
        findings, self._findings = self._findings, []
        lines = [str(finding) for finding in findings[-MAX_FINDINGS:]]
        if len(findings) > MAX_FINDINGS:
            lines.insert(0, f"{len(findings) - MAX_FINDINGS} more before these")
        guards = {finding.guard for finding in findings}
        event = guards.pop() if guards in ({"alert"}, {"budget"}) else "warning"
        self._start(trainer, event, "\n".join(lines))

    def _start(self, trainer: Trainer, event: str, message: str) -> None:
        if trainer.is_global_zero:
            self._program.start(trainer.run, event, message, trainer.global_step)
