"""Where a run is written down: TensorBoard, `metrics.jsonl`, `state.json`, and a line for the person watching."""

import logging
import math
import os
import socket
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm import steady_clock
from lm.quantities import format_count
from lm.trainer import Trainer

lines = logging.getLogger("lm.lines")  # the command line shows them where there is no progress bar


class RunLog(Callback):
    """Writes every metric once, under the optimizer step that it belongs to.

    It asks the module and every callback that has `logged_metrics` what there is to say, so that each concern stays
    in its own file, and tells it to those that have `on_metrics`, on every rank. What is not finite is told and not
    written: JSON has no word for it.

    Args:
        interval: optimizer steps between log lines.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.latest: dict[str, Any] = {}
        self._began = (0.0, 0)
        self._settled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = (time.monotonic(), trainer.global_step)
        self.write_state(trainer, "running")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if step is None or (step % self.interval and step != trainer.max_steps):
            return
        metrics = pl_module.logged_metrics()
        for callback in trainer.callbacks:
            if hasattr(callback, "logged_metrics"):
                metrics |= callback.logged_metrics(trainer, pl_module)
        self.tell(trainer, pl_module, metrics)
        if not self._settled:  # what the first steps took says nothing of the rest: compilation, a cold cache
            self._began, self._settled = (time.monotonic(), step), True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            self.write_state(trainer, "running", phase="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            names = ("val/loss", "val/perplexity", "val/bpb")
            self.tell(trainer, pl_module, {name: trainer.callback_metrics[name].item() for name in names})

    def tell(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Write a line of metrics of this step, and tell it to the callbacks; to be called on every rank.

        Args:
            metrics: by name, all of one kind: of a validation, of an evaluation, or of training.
        """
        if trainer.is_global_zero:
            self._write(trainer, metrics)
        for callback in trainer.callbacks:
            if hasattr(callback, "on_metrics"):
                callback.on_metrics(trainer, pl_module, metrics)

    def _write(self, trainer: Trainer, told: dict[str, float]) -> None:
        metrics = {name: value for name, value in told.items() if math.isfinite(value)}
        step = trainer.global_step
        tokens = trainer.tokens_seen
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, "data/tokens": tokens}, step=step)
        trainer.run.append_metrics({"step": step, "tokens": tokens, "time": steady_clock.now(), **metrics})
        kinds = {_kind(name) for name in told}
        others = {name: value for name, value in self.latest.items() if _kind(name) not in kinds}
        self.latest = others | metrics  # what the newest line of its kind does not have is not known any more
        self.write_state(trainer, "running")
        lines.info(line(step, trainer.max_steps, metrics))

    def write_state(self, trainer: Trainer, status: str, phase: str = "training") -> None:
        """Replace `state.json`; `phase` is what the run is at: `training`, `validating` or `evaluating`."""
        if not trainer.is_global_zero:
            return
        step, (since, first) = trainer.global_step, self._began
        seconds_a_step = (time.monotonic() - since) / (step - first) if step > first else None
        trainer.run.write_state({
            "run": trainer.run.name,
            "status": status,
            "phase": phase,
            "step": step,
            "max_steps": trainer.max_steps,
            "tokens": trainer.tokens_seen,
            "max_tokens": trainer.max_steps * trainer.steps.tokens_per_step,
            "metrics": self.latest,
            "eta_seconds": (trainer.max_steps - step) * seconds_a_step if seconds_a_step else None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        })


def _kind(name: str) -> str:
    """Which lines a metric stands in: those of validations, of evaluations, or all others."""
    group = name.split("/")[0]
    return group if group in ("val", "eval") else "train"


def line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """A log line for people."""
    shown = {
        "loss": ("train/loss", "{:.4f}"),
        "lr": ("optim/lr", "{:.2e}"),
        "grad norm": ("optim/grad_norm", "{:.2f}"),
        "validation loss": ("val/loss", "{:.4f}"),
        "perplexity": ("val/perplexity", "{:.2f}"),
        "bits per byte": ("val/bpb", "{:.4f}"),
        "mean centred accuracy": ("eval/core", "{:.4f}"),
        "MFU": ("perf/mfu", "{:.1%}"),
    }
    parts = [f"{name} {form.format(metrics[key])}" for name, (key, form) in shown.items() if key in metrics]
    if "eval/core" not in metrics:
        accuracies = {name: value for name, value in metrics.items() if name.endswith("/accuracy")}
        short = {name.removeprefix("eval/").removesuffix("/accuracy"): value for name, value in accuracies.items()}
        parts += [f"{name} {value:.1%}" for name, value in short.items()]
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['perf/tokens_per_second'])} tokens/s")
    return f"step {step}/{max_steps}  " + "  ".join(parts)
