"""The folder of a run during training: claimed when a fit starts, described in `run.json`, and closed at the end."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lm.errors import GuardStop, Interrupted, LmError, RequestError, RunError
from lm.runs.run import Run
from lm.system.files import write_atomically
from lm.system.hardware import device_name, driver_version, memory
from lm.system.process import run_facts, ssh_options
from lm.training.callback import Callback
from lm.training.config import RunOptions
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

STATUS = {Interrupted: "interrupted", GuardStop: "stopped"}  # how a run ends with these errors; with others, `failed`
END_PATIENCE = 60.0  # seconds that the end of a run waits for the program of `on_event`
CLAIM_WAIT = 2.0  # seconds for another process to describe a run folder that it has made


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


@dataclass(eq=False, repr=False)
class RunFolder(Callback):
    """Claims the run folder when a fit starts, and records in it and in the registry how the run ended.

    It must be the first callback: data, model and request have been checked, and callbacks after it may write.
    """

    resumed: Run | None  # the run to resume; None: start a new one
    name: str  # name of a new run
    config: str  # text of the resolved config
    force: bool = False  # resume a run even if its shards changed
    auto: bool = False  # if a run of this name has appeared meanwhile, refuse to start a second one
    register: bool = True  # write the run to the user's registry
    options: RunOptions = field(default_factory=RunOptions)  # tags, a note, and actions at the run's end

    # Told of the run and of the seconds to wait, once its end is recorded; set by `callbacks/events`.
    announce: Callable[[Run, float], None] | None = field(default=None, init=False)
    _ended: Run | None = field(default=None, init=False)  # the run, once its end is recorded
    _log: LogFile | None = field(default=None, init=False)

    def resume(self, run: Run | None, auto: bool, config: str) -> None:
        """Set the run of the coming fit, if it was not known at construction; the arguments are the fields above."""
        self.resumed, self.auto, self.config, self._ended = run, auto, config, None

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        if stage == "fit":  # before callbacks compare their folders with the checkpoint's
            make_checkpoint_folders(trainer, self.resumed)

    # ---- a run starts -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        path = self._claim(trainer) if trainer.is_global_zero else None
        path, resumed_from = trainer.strategy.broadcast((path, str(trainer.ckpt_path)))
        if Path(str(trainer.ckpt_path)).name != Path(resumed_from).name:
            raise RunError(
                f"rank {trainer.global_rank} found checkpoint {trainer.ckpt_path} and rank zero {resumed_from}: do all "
                f"machines see the same {Path(path).parent}? If a network disk was late, give the same command again"
            )
        run = trainer.run_state.run = Run(path)
        make_checkpoint_folders(trainer, run)
        if trainer.is_global_zero:
            self._log = LogFile(run)
            log.info("run %s", path)
            log.info("curves: tensorboard --logdir %s", run.path.parent)
            if options := ssh_options():
                log.info("from your machine: ssh -N -L 6006:localhost:6006 %s, then http://localhost:6006", options)
            self._record(run)

    def _claim(self, trainer: Trainer) -> str:
        """Lock the run's folder and describe the run in it; returns its path."""
        data, samples = trainer.datamodule, trainer.run_state.start.samples
        shards = data.describe_shards()
        run = self.resumed or self._new_run(trainer.default_root_dir)
        try:
            run.hold()
            if self.resumed is not None:
                check_not_resumed_elsewhere(run)
                from lm.training.checkpoint_checks import check_same_mixture, check_same_shards

                new_sources = check_same_mixture(run, data, samples, self.force)
                check_same_shards(run, shards, new_sources, self.force)
            self._describe(trainer, run, shards)
        except BaseException as error:  # including a signal
            if self.resumed is None:  # nothing is in it yet, and the name is free again
                shutil.rmtree(run.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunError(f"cannot write to the run folder {run.path}: {error.strerror or error}") from error
            raise
        return str(run.path)

    def _new_run(self, root: str) -> Run:
        """Make a new folder. If two processes with `--ckpt_path auto` find no run, only one of them may start it."""
        first = Run(Path(root) / self.name)
        deadline = time.monotonic() + CLAIM_WAIT
        while self.auto and first.path.exists() and not first.read("run.json") and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.auto and first.read("run.json").get("name") == self.name:
            first.check_not_trained()
            raise RequestError(f"run {first.path} was started by another process just now: the same command resumes it")
        return Run.create(self.name, root)

    def _describe(self, trainer: Trainer, run: Run, shards: dict[str, Any]) -> None:
        run_line = f"run: {json.dumps(run.name)}"
        write_atomically(run.config, re.sub("^run: .*$", lambda match: run_line, self.config, flags=re.M))
        write_atomically(run.path / "data.json", json.dumps(shards) + "\n")
        facts, saved, name = run_facts(), {}, self.name
        start = trainer.run_state.start
        if self.resumed is not None:
            saved = run.read("run.json")
            facts["started"] = saved.get("started", facts["started"])
            name = saved.get("name") or name  # `small` also for `small-2`: the name that `auto` searches
            run.mark_resume(start.step)
        elif trainer.ckpt_path:
            facts["began_from"] = str(trainer.ckpt_path)
        # The samples of a step: after `step`, every step took `global_batch` samples, starting with `sample`.
        segments = [segment for segment in saved.get("stretches", []) if segment["step"] < start.step]
        segments.append({"step": start.step, "sample": start.samples, "global_batch": trainer.steps.global_batch})
        run.describe(
            id=run.name,
            name=name,
            status="running",
            reason=None,
            device=device_name(trainer.strategy.root_device),
            world_size=trainer.world_size,
            stretches=segments,
            turn=Run.next_start(run.path.parent),
            tags=self.options.tags,
            note=self.options.note,
            machine={
                "cores": os.cpu_count(),
                "memory_bytes": memory()["total_bytes"],
                "driver": driver_version(),
                "cuda": torch.version.cuda,
            },
            flops_per_token=trainer.lightning_module.flops_per_token(),
            mixture=trainer.datamodule.describe_mixture(),
            rollbacks=[rollback for rollback in saved.get("rollbacks", []) if rollback["step"] <= start.step],
            **facts,
        )

    # ---- a run ends ---------------------------------------------------------------------------------------------

    def on_fit_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        reason = "all steps done" if trainer.global_step >= trainer.max_steps else "early stopping"
        if trainer.is_global_zero and self.options.expect:
            self._compare_with_expectations(trainer.run)
        self._end(trainer, "finished", reason)

    def _compare_with_expectations(self, run: Run) -> None:
        from lm.runs.expectations import acceptance, expectations

        expected = expectations(run)
        result = acceptance(expected)
        run.attempt(run.path / "run.json", lambda: run.describe(acceptance=result))
        level, verdict = (logging.INFO, "passed") if result["passed"] else (logging.WARNING, "not passed")
        log.log(level, "%s: %s", verdict, "; ".join(map(str, expected)))

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        if trainer.run is None or not trainer.fitting:
            return
        is_expected = isinstance(exception, LmError)
        text = str(exception) if is_expected else f"{type(exception).__name__}: {exception}"
        self._end(trainer, STATUS.get(type(exception), "failed"), text, None if is_expected else exception)
        if not (is_expected or trainer.is_global_zero):  # rank zero ends with another error, if any
            with suppress(OSError):
                self._log = LogFile(trainer.run)
                self._log.write_alone(f"rank {trainer.global_rank} failed: {text}", exception)
        self._close_log()

    def on_cut_off(self, trainer: Trainer, error: Exception) -> None:
        self.on_exception(trainer, trainer.lightning_module, error)
        self.announce_end(patience=0.0)

    def teardown(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Release the lock after the last write. After a failed fit, the process keeps it until it ends."""
        self._close_log()
        if trainer.run is not None:
            trainer.run.release()

    def _end(self, trainer: Trainer, status: str, reason: str, error: BaseException | None = None) -> None:
        if not trainer.is_global_zero:
            return
        run, step = trainer.run, trainer.global_step
        run.attempt(run.path / "run.json", lambda: run.describe(status=status, reason=reason, step=step))
        state = {"status": status, "reason": reason, "step": step, "tokens": trainer.tokens_seen}
        run.write_state({**run.read("state.json"), **state})
        if self._log is not None:
            self._log.write_alone(f"{status}: {reason}", error)
        self._record(run)
        self._ended = run

    def announce_end(self, patience: float = END_PATIENCE) -> None:
        """Start the program of `on_event`, if the end of the run was recorded; its lock is then released."""
        if self._ended is not None and self.announce is not None:
            self._ended.release()
            with suppress(OSError):
                self._log = LogFile(self._ended)
            self.announce(self._ended, patience)
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _record(self, run: Run) -> None:
        if self.register:
            from lm.runs.registry import record_run

            record_run(run)


def check_not_resumed_elsewhere(run: Run) -> None:
    """RequestError if another process has trained the run since this one chose its checkpoint."""
    if run.seen not in (None, run.entered()):
        raise RequestError(
            f"another process has resumed run {run.path} while this one started; the same command resumes from where "
            "that one ended"
        )


def make_checkpoint_folders(trainer: Trainer, run: Run | None) -> None:
    """Make the folders of a user's ModelCheckpoints: in the run's folder, unless the config names others."""
    default = str(Path(trainer.default_root_dir, "checkpoints"))
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback is trainer.checkpoint_callback:
            continue
        if run is not None and callback.dirpath in (None, default):
            callback.dirpath = str(run.path / "checkpoints")
        if trainer.is_global_zero and callback.dirpath not in (None, default):
            Path(callback.dirpath).mkdir(parents=True, exist_ok=True)
