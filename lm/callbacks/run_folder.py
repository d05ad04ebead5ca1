"""Claims the run folder when a fit starts, and records how it ended."""

import getpass
import json
import logging
import socket
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm.checkpoint import samples_of, step_of
from lm.data.shards import describe_difference
from lm.errors import GuardStop, Interrupted, LmError, RequestError
from lm.hardware import device_name
from lm.runs import Run, run_facts, write_atomically
from lm.trainer import Trainer

log = logging.getLogger(__name__)

ENDS = {Interrupted: "interrupted", GuardStop: "stopped"}


class RunFolder(Callback):
    """The first callback: data, model and request are checked by now, and everything after it may write.

    Args:
        run: the run that is gone on with; or None for a new one
        name: of this name.
        config: text of the resolved config.
        force: go on with a run though its shards changed.
    """

    def __init__(self, run: Run | None, name: str, config: str, force: bool = False) -> None:
        self._resumed = run
        self._name = name
        self._config = config
        self._force = force
        self._log: logging.Handler | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self._claim(trainer) if trainer.is_global_zero else None
        trainer.run = Run(trainer.strategy.broadcast(path))
        if trainer.is_global_zero:
            self._log = _keep_log(trainer.run)
            _say_where(trainer.run)

    def _claim(self, trainer: Trainer) -> str:
        shards = trainer.datamodule.describe_shards()
        if self._resumed is None:
            run = Run.create(self._name, trainer.default_root_dir)
        else:
            run = self._resumed
            self._refuse_changed_shards(run, shards)
        write_atomically(run.config, self._config)
        write_atomically(run.path / "data.json", json.dumps(shards) + "\n")
        facts, before = run_facts(), {}
        if self._resumed is not None:
            before = run.read("run.json")
            facts["started"] = before.get("started", facts["started"])
            run.append_metrics({"resumed_at": step_of(trainer.ckpt_path)})
        elif trainer.ckpt_path:  # a new run that does not begin from scratch
            facts["began_from"] = str(trainer.ckpt_path)
        # Which samples a step saw: from each `step` on, a global batch of so many samples, the first one `sample`.
        step, sample = (step_of(trainer.ckpt_path), samples_of(trainer.ckpt_path))
        stretches = [stretch for stretch in before.get("stretches", []) if stretch["step"] < step]
        stretches.append({"step": step, "sample": sample, "global_batch": trainer.steps.global_batch})
        device = device_name(trainer.strategy.root_device)
        run.describe(
            id=run.name, name=self._name, status="running", reason=None, device=device, world_size=trainer.world_size,
            stretches=stretches, **facts,
        )
        return str(run.path)

    def _refuse_changed_shards(self, run: Run, shards: dict[str, Any]) -> None:
        before = run.read("data.json")
        if before and before != shards and not self._force:
            differences = {
                split: describe_difference(before.get(split, []), shards.get(split, []))
                for split in sorted(before.keys() | shards.keys())
            }
            difference = "; ".join(f"{split}: {text}" for split, text in differences.items() if text)
            raise RequestError(
                f"the shards changed since {run.path} was started, so its order of samples is gone: {difference}; "
                "put them back, start a new run, or give --force"
            )

    # ---- how it ended -------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reason = "all steps done" if trainer.global_step >= trainer.max_steps else "early stopping"
        self._end(trainer, "finished", reason)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.run is None or not trainer.fitting:
            return
        text = str(exception) if isinstance(exception, LmError) else f"{type(exception).__name__}: {exception}"
        self._end(trainer, ENDS.get(type(exception), "failed"), text)

    def _end(self, trainer: Trainer, status: str, reason: str) -> None:
        if not trainer.is_global_zero:
            return
        trainer.run.describe(status=status, reason=reason, step=trainer.global_step)
        trainer.run.write_state({**trainer.run.read("state.json"), "status": status, "reason": reason})
        if self._log is not None:
            self._log.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": f"{status}: {reason}"}))
            logging.getLogger("lm").removeHandler(self._log)
            self._log.close()
            self._log = None


def _keep_log(run: Run) -> logging.Handler:
    """Have everything that is said also written to `log.txt`, with the time."""
    handler = logging.FileHandler(run.path / "log.txt", encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.getLogger("lm").addHandler(handler)
    return handler


def _say_where(run: Run) -> None:
    """Where the run is written, and how to look at its curves from another machine."""
    here = f"{getpass.getuser()}@{socket.getfqdn()}"
    log.info("run %s", run.path)
    log.info("curves: tensorboard --logdir %s", run.path.parent)
    log.info("from another machine: ssh -N -L 6006:localhost:6006 %s, then http://localhost:6006", here)
