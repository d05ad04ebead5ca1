"""How a run ends before its last step: by a signal or a guard, out of memory, or because its data cannot be read.

`training/lightning_patches` enters the two context managers around a fit; callbacks call `end_run` between two
steps.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from lm.errors import DataError, Interrupted, LmError, RunError
from lm.runs.run import how_to_resume
from lm.system.stop_signals import STOP

if TYPE_CHECKING:
    from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


@contextmanager
def explaining_memory(trainer: "Trainer") -> Iterator[None]:
    """Turn an out-of-memory error into one that lists what needs memory, and `sys.exit(0)` into RunError."""
    try:
        yield
    except SystemExit as error:
        if not error.code:  # the run has failed, which 0 would hide
            raise RunError(
                f"the program was ended by sys.exit({error.code or ''}) after step {trainer.global_step} of the "
                f"training; {how_to_resume(trainer.run)}"
            ) from error
        raise
    except (RuntimeError, MemoryError) as error:
        from lm.training.out_of_memory import is_out_of_memory, out_of_memory_error

        module = trainer.lightning_module
        if module is None or module.config.vocab_size is None or not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, trainer, trainer.memory_before) from error


@contextmanager
def explaining_resume(trainer: "Trainer") -> Iterator[None]:
    """Add how to resume the run to the error of damaged data, or to one raised after a signal."""
    try:
        yield
    except Exception as error:
        STOP.disarm()  # the last checkpoint may take longer than stop_within
        if isinstance(error, DataError) and trainer.fitting:  # the data of the next step cannot be read
            trainer.run_state.pending_validation |= trainer.validating
            if trainer.world_size == 1 and trainer.global_step and trainer.checkpoint_callback is not None:
                trainer.save_and_wait()
                log.info("saved a checkpoint of step %d", trainer.global_step)
            raise DataError(f"{error}; {how_to_resume(trainer.run)}") from error
        if isinstance(error, LmError) or STOP.received is None or not trainer.fitting:
            raise
        # The signal may have ended other processes that this one depends on.
        raise Interrupted(
            f"{STOP.received.name}: ended without a checkpoint, because {type(error).__name__}: {error}; "
            f"{how_to_resume(trainer.run)}"
        ) from error


def end_run(trainer: "Trainer", why: str = "") -> NoReturn:
    """End the run after its last complete step; call it on every rank.

    It saves a checkpoint, unless a guard has stopped the run and requested none. Raises `run_state.stop`, which a guard
    sets; otherwise, after a signal, Interrupted with `why` in its message.
    """
    STOP.disarm()
    run_state, callback, step = trainer.run_state, trainer.checkpoint_callback, trainer.global_step
    saves = callback is not None and step > 0 and (callback.requested or run_state.stop is None)
    if saves:
        trainer.save_and_wait()
    trainer.strategy.barrier()  # torchrun kills all processes when the first one ends
    if run_state.stop is not None:
        raise run_state.stop
    signal = STOP.received.name if STOP.received is not None else "a signal on another rank"
    where = f"after step {step}" if step else "in the first step"
    if saves:
        where += " with a checkpoint"
    if run_state.pending_validation:
        where += ", before its validation was done"
    raise Interrupted(f"{signal}: stopped {where}{why}; {how_to_resume(trainer.run)}")
