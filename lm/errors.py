"""How a command ends: every failure that is foreseen is one of these, one clear line and an exit code.

0 finished; 1 failed; 2 the request is wrong; 3 stopped by a guard; 75 interrupted with a checkpoint.
"""


class LmError(Exception):
    """A foreseen failure. Its message says what was wrong, where, and what to do; no traceback is shown."""

    exit_code = 1


class RunError(LmError):
    """Something failed while the work was under way (a corrupt shard, a full disk)."""

    exit_code = 1


class DataError(RunError):
    """Training data could not be read. No step was under way, so the weights are those of the last whole step."""


class RequestError(LmError):
    """What was asked for is wrong (a config, a path, a flag); nothing was done."""

    exit_code = 2


class GuardStop(LmError):
    """A guard that the user configured stopped the run."""

    exit_code = 3


class Interrupted(LmError):
    """A signal stopped the run after a checkpoint; run again with `--ckpt_path auto` to go on."""

    exit_code = 75
