"""The run's folder during training: it is claimed, registered, kept alive by a heartbeat, and closed at the end."""

import json
import logging
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lm.data.catalog import describe_difference
from lm.errors import GuardStop, Interrupted, LmError, RequestError, RunError
from lm.runs.run import Run
from lm.system.files import write_atomically
from lm.system.hardware import device_name, driver_version, memory_bytes
from lm.system.process import run_facts, ssh_options
from lm.system.telemetry import Telemetry
from lm.training.callback import Callback
from lm.training.config import RunOptions
from lm.training.module import LanguageModule
from lm.training.run_state import RunState
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

STATUS = {Interrupted: "interrupted", GuardStop: "stopped"}  # how a run ends with these errors; with others, `failed`
END_PATIENCE = 60.0  # seconds that the end of a run waits for the program of `on_event`
CLAIM_WAIT = 2.0  # seconds for another process to describe a run folder that it has made


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
    _registry_warned: bool = field(default=False, init=False)
    _log: logging.Handler | None = field(default=None, init=False)

    def resume(self, run: Run | None, auto: bool, config: str) -> None:
        """Set the run of the coming fit, if it was not known at construction; the arguments are the fields above."""
        self.resumed, self.auto, self.config, self._ended = run, auto, config, None

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        if stage == "fit":  # before callbacks compare their folders with the checkpoint's
            _make_checkpoint_folders(trainer, self.resumed)

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        path = self._claim(trainer) if trainer.is_global_zero else None
        path, resumed_from = trainer.strategy.broadcast((path, str(trainer.ckpt_path)))
        if Path(str(trainer.ckpt_path)).name != Path(resumed_from).name:
            raise RunError(
                f"rank {trainer.global_rank} found checkpoint {trainer.ckpt_path} and rank zero {resumed_from}: do all "
                f"machines see the same {Path(path).parent}? If a network disk was late, give the same command again"
            )
        trainer.run_state.run = Run(path)
        _make_checkpoint_folders(trainer, trainer.run)
        if trainer.is_global_zero:
            self._log = _open_log(trainer.run)
            log.info("run %s", path)
            log.info("curves: tensorboard --logdir %s", trainer.run.path.parent)
            if options := ssh_options():
                log.info("from your machine: ssh -N -L 6006:localhost:6006 %s, then http://localhost:6006", options)
            self._record(trainer.run)

    def on_fit_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        reason = "all steps done" if trainer.global_step >= trainer.max_steps else "early stopping"
        if trainer.is_global_zero and self.options.expect:
            from lm.runs.expectations import acceptance, expectations

            found = expectations(trainer.run)
            judged = acceptance(found)
            trainer.run.attempt(trainer.run.path / "run.json", lambda: trainer.run.describe(acceptance=judged))
            log.log(logging.INFO if judged["passed"] else logging.WARNING,
                    "%s: %s", "passed" if judged["passed"] else "not passed", "; ".join(map(str, found)))  # fmt: skip
        self._end(trainer, "finished", reason)

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        if trainer.run is None or not trainer.fitting:
            return
        foreseen = isinstance(exception, LmError)
        text = str(exception) if foreseen else f"{type(exception).__name__}: {exception}"
        self._end(trainer, STATUS.get(type(exception), "failed"), text, None if foreseen else exception)
        if not (foreseen or trainer.is_global_zero):  # rank zero ends with another error, if any
            with suppress(OSError):
                self._log = _open_log(trainer.run)
                self._log_end(f"rank {trainer.global_rank} failed: {text}", exception)
        self._close_log()

    def on_cut_off(self, trainer: Trainer, error: Exception) -> None:
        self.on_exception(trainer, trainer.lightning_module, error)
        self.announce_end(patience=0.0)

    def teardown(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Release the lock after the last write. After a failed fit, the process keeps it until it ends."""
        self._close_log()
        if trainer.run is not None:
            trainer.run.release()

    def _claim(self, trainer: Trainer) -> str:
        """Lock the run's folder and describe the run in it; returns its path."""
        shards = trainer.datamodule.describe_shards()
        run = self.resumed or self._new(trainer.default_root_dir)
        try:
            run.hold()
            if self.resumed is not None:
                self._check_not_resumed_elsewhere(run)
                new = self._check_mixture_unchanged(run, trainer)
                self._check_shards_unchanged(run, shards, new)
            self._describe(trainer, run, shards)
        except BaseException as error:  # including a signal
            if self.resumed is None:  # nothing is in it yet, and the name is free again
                shutil.rmtree(run.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunError(f"cannot write to the run folder {run.path}: {error.strerror or error}") from error
            raise
        return str(run.path)

    def _new(self, root: str) -> Run:
        """Make a new folder. If two processes with `--ckpt_path auto` find no run, only one of them may start it."""
        first = Run(Path(root) / self.name)
        until = time.monotonic() + CLAIM_WAIT
        while self.auto and first.path.exists() and not first.read("run.json") and time.monotonic() < until:
            time.sleep(0.05)
        if self.auto and first.read("run.json").get("name") == self.name:
            first.check_not_trained()
            raise RequestError(f"run {first.path} was started by another process just now: the same command resumes it")
        return Run.create(self.name, root)

    def _check_not_resumed_elsewhere(self, run: Run) -> None:
        if run.seen not in (None, run.entered()):
            raise RequestError(
                f"another process has resumed run {run.path} while this one started; the same command resumes from "
                "where that one ended"
            )

    def _describe(self, trainer: Trainer, run: Run, shards: dict[str, Any]) -> None:
        line = f"run: {json.dumps(run.name)}"
        write_atomically(run.config, re.sub("^run: .*$", lambda found: line, self.config, flags=re.M))
        write_atomically(run.path / "data.json", json.dumps(shards) + "\n")
        facts, before, name = run_facts(), {}, self.name
        if self.resumed is not None:
            before = run.read("run.json")
            facts["started"] = before.get("started", facts["started"])
            name = before.get("name") or name  # `small` also for `small-2`: the name that `auto` searches
            run.mark_resume(trainer.run_state.start.step)
        elif trainer.ckpt_path:
            facts["began_from"] = str(trainer.ckpt_path)
        # The samples of a step: after `step`, every step took `global_batch` samples, starting with `sample`.
        start = trainer.run_state.start
        segments = [segment for segment in before.get("stretches", []) if segment["step"] < start.step]
        segments.append({"step": start.step, "sample": start.samples, "global_batch": trainer.steps.global_batch})
        device = device_name(trainer.strategy.root_device)
        machine = {
            "cores": os.cpu_count(), "memory_bytes": memory_bytes("cpu"), "driver": driver_version(),
            "cuda": torch.version.cuda,
        }  # fmt: skip
        run.describe(
            id=run.name, name=name, status="running", reason=None, device=device, world_size=trainer.world_size,
            stretches=segments, turn=Run.next_start(run.path.parent), tags=self.options.tags, note=self.options.note,
            machine=machine, flops_per_token=trainer.lightning_module.flops_per_token(),
            mixture=trainer.datamodule.describe_mixture(),
            rollbacks=[each for each in before.get("rollbacks", []) if each["step"] <= start.step], **facts,
        )  # fmt: skip

    def _check_mixture_unchanged(self, run: Run, trainer: Trainer) -> set[str]:
        """RequestError if the mixture of samples already seen would change; returns the sources added since then."""
        before, now = run.read("run.json").get("mixture"), trainer.datamodule.describe_mixture()
        if before is None or now is None:  # one source: `check_config_changes` compares it
            return set()
        from lm.data.mixture import describe_change

        reason, change = describe_change(before, now, trainer.run_state.start.samples)
        if reason and not self.force:
            raise RequestError(f"the mixture of {run.path} changed: {reason}; put it back, start a new run, or give "
                               "--force")  # fmt: skip
        if change:
            log.info("resume: %s", change)
        return set(now["sources"]) - set(before["sources"])

    def _check_shards_unchanged(self, run: Run, shards: dict[str, Any], new: set[str]) -> None:
        """RequestError if the shards differ from those at the run's start, except in sources that are `new`."""
        before = run.read("data.json")
        if not before and (run.path / "data.json").exists() and not self.force:
            raise RequestError(
                f"{run.path / 'data.json'} is damaged, so it is not known which shards the run saw: put it back, start "
                "a new run, or give --force"
            )
        differences = {
            split: describe_difference(
                before.get(split, []), [entry for entry in shards.get(split, []) if entry[0].split("/")[0] not in new]
            )
            for split in sorted(before.keys() | shards.keys())
        }
        difference = "; ".join(f"{split}: {text}" for split, text in differences.items() if text)
        if before and difference and not self.force:
            raise RequestError(
                f"the shards changed since {run.path} was started, so its order of samples is gone: {difference}; "
                "put them back, start a new run, or give --force"
            )

    def _end(self, trainer: Trainer, status: str, reason: str, unforeseen: BaseException | None = None) -> None:
        if not trainer.is_global_zero:
            return
        run, step = trainer.run, trainer.global_step
        run.attempt(run.path / "run.json", lambda: run.describe(status=status, reason=reason, step=step))
        newest = {"status": status, "reason": reason, "step": step, "tokens": trainer.tokens_seen}
        run.write_state({**run.read("state.json"), **newest})
        self._log_end(f"{status}: {reason}", unforeseen)
        self._record(run)
        self._ended = run

    def announce_end(self, patience: float = END_PATIENCE) -> None:
        """Start the program of `on_event`, if the end of the run was recorded; its lock is then released."""
        if self._ended is not None and self.announce is not None:
            self._ended.release()
            with suppress(OSError):
                self._log = _open_log(self._ended)
            self.announce(self._ended, patience)
            self._close_log()

    def _log_end(self, text: str, unforeseen: BaseException | None) -> None:
        """Write to `log.txt` only how this rank ended, with the traceback of an unforeseen error."""
        if self._log is not None:
            trace = unforeseen and (type(unforeseen), unforeseen, unforeseen.__traceback__)
            self._log.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": text, "exc_info": trace}))

    def _close_log(self) -> None:
        if self._log is not None:
            logging.getLogger("lm").removeHandler(self._log)
            self._log.close()
            self._log = None

    def _record(self, run: Run) -> None:
        if self.register:
            from lm.runs.registry import record_run

            self._registry_warned = not record_run(run, warned=self._registry_warned)


def _make_checkpoint_folders(trainer: Trainer, run: Run | None) -> None:
    """Make the folders of Lightning's ModelCheckpoints: in the run's folder, unless the config names others."""
    default = str(Path(trainer.default_root_dir, "checkpoints"))
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback is trainer.checkpoint_callback:
            continue
        if run is not None and callback.dirpath in (None, default):
            callback.dirpath = str(run.path / "checkpoints")
        if trainer.is_global_zero and callback.dirpath not in (None, default):
            Path(callback.dirpath).mkdir(parents=True, exist_ok=True)


class LogFile(logging.FileHandler):
    """A log file for which a full disk is no error; the console has the same lines, and `Run.attempt` warns."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _open_log(run: Run) -> logging.Handler:
    """Write every log line also to `log.txt`, with the time."""
    handler = LogFile(run.path / "log.txt", encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.getLogger("lm").addHandler(handler)
    return handler


# ---- heartbeat -------------------------------------------------------------------------------------------------------


class Heartbeat(Callback):
    """Writes `heartbeat.json` with the machine's load every `interval` seconds, from a thread of rank zero."""

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.is_global_zero:
            self._end.clear()
            self._thread = threading.Thread(
                target=self._beat, args=(trainer.run_state, Telemetry(_gpus(trainer))), name="heartbeat", daemon=True
            )
            self._thread.start()

    def _beat(self, state: RunState, telemetry: Telemetry | None) -> None:
        """Write heartbeats until the end, despite failures: without them, the run would be taken for dead."""
        _write_heartbeat(state.run, {})  # before the first reading, which may have to wake a driver
        while True:
            try:
                state.machine = telemetry.read() if telemetry else {}
            except Exception as error:
                log.warning("load, temperature and power are missing from now on: %s: %s", type(error).__name__, error)
                telemetry, state.machine = None, {}
            _write_heartbeat(state.run, state.machine)
            if self._end.wait(self.interval):
                return

    def logged_metrics(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        metrics = machine_metrics(trainer.run_state.machine)
        if pl_module.device.type == "cuda":
            metrics["mem/cuda_peak_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        return metrics

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # not for long: a hanging driver must not block the exit
            self._thread = None

    on_exception = teardown


def machine_metrics(machine: dict[str, Any]) -> dict[str, float]:
    """The metrics of a reading: mean load of the GPUs, highest temperature, total power, fullest memory."""

    gpus, cpu, process = machine.get("gpus") or [], [machine.get("cpu", {})], [machine.get("process", {})]
    found = {}
    for metric, one_of, parts, name, unit in (
        ("perf/gpu_load", statistics.fmean, gpus, "load_percent", 1),
        ("perf/gpu_temperature", max, gpus, "temperature_celsius", 1),
        ("perf/gpu_power", sum, gpus, "power_watts", 1),
        ("perf/cpu_load", sum, cpu, "load_percent", 1),
        ("mem/process_gib", sum, process, "memory_bytes", 2**30),
        ("mem/gpu_gib", max, gpus, "memory_used_bytes", 2**30),
    ):
        if values := [part[name] for part in parts if part.get(name) is not None]:
            found[metric] = float(one_of(values)) / unit
    return found


def _gpus(trainer: Trainer) -> list[str]:
    """UUIDs of this node's GPUs used for training, since torch and NVML may number them differently."""
    if trainer.strategy.root_device.type != "cuda":
        return []
    here = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in trainer.device_ids if index in here]


def _write_heartbeat(run: Run, machine: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk, or a folder that is gone: the next checkpoint is an error then
        run.write_heartbeat(machine)
