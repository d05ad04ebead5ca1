"""`on_event`: the program that a run starts when it has ended, such as one that ends the rented machine."""

import json
import logging
import os
import shutil
import subprocess
import sys
from typing import Any

from lm.errors import GuardStop, Interrupted, LmError, RequestError, RunError
from lm.runs.run import Run
from lm.system.files import nonnegative

log = logging.getLogger(__name__)

EVENTS: dict[str, type[LmError] | None] = {  # status of a run that has ended -> the error whose exit code it has
    "finished": None, "stopped": GuardStop, "interrupted": Interrupted, "failed": RunError,
}  # fmt: skip
PATIENCE = 60.0  # seconds that the training waits for the program


def refuse_missing_program(command: list[str]) -> None:
    """Raises:
    RequestError: there is no such program.
    """
    if command and shutil.which(command[0]) is None:
        raise RequestError(f"on_event: no program {command[0]!r} on PATH; a script needs its path and `chmod +x`")


def event_facts(run: Run) -> dict[str, Any]:
    """What the program is told of a run that has ended."""
    described, state, budget = run.read("run.json"), run.read("state.json"), run.read("budget.json")
    last = run.link("last")
    kind = EVENTS.get(described.get("status", ""))
    return {
        "event": described.get("status"), "reason": described.get("reason"),
        "exit_code": kind.exit_code if kind else 0,
        "run": run.name, "path": str(run.path.resolve()), "host": described.get("host"),
        "resume": [sys.executable, "-m", "lm", "fit", "--config", str(run.config.resolve()), "--ckpt_path", "auto"],
        "cwd": os.getcwd(), "tags": described.get("tags", []), "note": described.get("note"),
        "step": state.get("step"), "max_steps": state.get("max_steps"), "tokens": state.get("tokens"),
        "metrics": state.get("metrics", {}), "checkpoint": str(last.resolve()) if last else None,
        "spent_usd": nonnegative(budget.get("spent_usd")), "acceptance": described.get("acceptance"),
    }  # fmt: skip


def announce(run: Run, command: list[str], patience: float = PATIENCE) -> None:
    """Start the program with the facts as JSON on its standard input, and wait for it for a while.

    No shell reads the command. What the program prints goes to standard error; whether it succeeds changes nothing.

    Args:
        run: one that has ended, whose lock is free, so that the program may resume it.
        command: the program and its arguments.
        patience: seconds to wait; a program that takes longer continues by itself.
    """
    facts = json.dumps(event_facts(run)).encode() + b"\n"
    try:
        # A session of its own: Ctrl-C in the training's terminal does not end it.
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), start_new_session=True)
        program.communicate(facts, timeout=patience)
    except subprocess.TimeoutExpired:
        log.info("on_event: %s takes longer than %g s and continues by itself", command[0], patience)
    except OSError as error:
        log.warning("on_event: %s cannot be started: %s", command[0], error.strerror or error)
    else:
        if program.returncode:
            log.warning("on_event: %s ended with exit code %d", command[0], program.returncode)
