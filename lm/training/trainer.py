"""Lightning's Trainer in the words of pretraining: optimizer steps and tokens, not micro-batches and epochs."""

# pyright: reportAttributeAccessIssue=true

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.runs.checkpoint import read_progress
from lm.runs.run import Run
from lm.system.dataclass_arguments import arguments_from
from lm.system.devices import find_device, peak_flops
from lm.system.hardware import device_name, keep_freed_memory
from lm.system.process import check_launcher
from lm.training.checkpoint_io import FolderCheckpointIO
from lm.training.checks import check_parts, find_problems
from lm.training.config import TrainerConfig
from lm.training.lightning_patches import PatchedTrainer
from lm.training.precision import choose_precision, multiplication_precision
from lm.training.run_state import RunState
from lm.training.schedule import Steps, plan_steps, warmup_and_decay_steps
from lm.training.world import Devices, device_count, devices_of_node, srun_world, torchrun_world

if TYPE_CHECKING:
    from lm.training.callbacks.checkpoints import Checkpoints
    from lm.training.module import LanguageModule

log = logging.getLogger(__name__)


class Trainer(PatchedTrainer):
    """Trains for a number of optimizer steps on a stream that has no end.

    Lightning runs the loop, and calls the hooks of the module and of the callbacks in between. Without them it is

        module.configure_model()                         # builds the decoder, once the data is open
        optimizer = module.configure_optimizers()
        load(ckpt_path)                                  # weights, optimizer, position in the data, random generators
        for batch in datamodule.train_dataloader():      # one global batch: every rank gets its rows
            for part in batch.split(micro_batch_size):   # from here to step(): `training/step.optimizer_step`
                (decoder.losses(part).sum() / targets).backward()     # `targets` of all micro-batches and ranks
            clip_grad_norm_(decoder.parameters(), gradient_clip_val)
            optimizer.step()                             # with the learning rate of `training/schedule`
            if self.validates_after(self.global_step):
                for batch in datamodule.val_dataloader():
                    module.validation_step(batch)
            ...                                          # `callbacks/checkpoints` saves, `callbacks/logging` logs
            if self.global_step == self.max_steps:
                break

    The arguments are the fields of `TrainerConfig`, where each is explained.
    """

    datamodule: DataModule  # Lightning sets it, and does not declare it; nor the next two
    callbacks: list[Callback]
    profiler: Profiler
    lightning_module: "LanguageModule"

    @arguments_from(TrainerConfig, Callback=Callback, Logger=Logger)
    def __init__(self, config: TrainerConfig) -> None:
        self.options = config
        check_launcher()
        torch.set_float32_matmul_precision(config.matmul_precision)
        self.own_loggers = [config.logger] if isinstance(config.logger, Logger) else config.logger or []
        self.run_state = RunState(clip=config.gradient_clip_val)  # Lightning clips nothing here: `training/step` does
        self._new_run = False  # see `load_with`
        self.checkpoint_io = FolderCheckpointIO()
        plugins: list[Any] = [self.checkpoint_io]
        devices, num_nodes = config.devices, config.num_nodes
        if world := torchrun_world() or srun_world():  # a restart of torchrun's `--nnodes 1:2` may change it
            processes, num_nodes = world
            devices = devices if device_count(devices) == processes else processes  # perhaps a list of them
        if SLURMEnvironment.detect() and not torchrun_world():
            # On a signal, lm saves a checkpoint and exits with 75.
            plugins.append(SLURMEnvironment(auto_requeue=False) if world else LightningEnvironment())
        chosen = choose_precision(config.precision, config.accelerator)
        if isinstance(chosen, Precision):
            plugins.append(chosen)
        super().__init__(
            max_steps=1,  # `fit` sets those of the run
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in config.callbacks or ()),
            enable_progress_bar=False,
            enable_model_summary=False,
            precision=chosen if isinstance(chosen, str) else None,
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=choose_strategy(config, devices, num_nodes),
            deterministic=config.deterministic,
            callbacks=config.callbacks,
            default_root_dir=config.default_root_dir,
            plugins=plugins,
        )

    def fit(self, model: "LanguageModule", datamodule: DataModule, ckpt_path: str | None = None) -> None:
        """Train, from scratch or from a checkpoint folder.

        `lm.runs.resume.find_checkpoint` finds the folder that `best`, `last` or `auto` means. A step has the
        `micro_batch_size`, `seq_len` and `global_batch_tokens` of the data.
        """
        check_parts(model, datamodule)
        datamodule.set_position(seq_len=datamodule.options.seq_len or model.config.max_position_embeddings)
        device, _ = find_device("auto" if self.strategy.root_device.type == "cuda" else "cpu")
        options = replace(self.options, num_nodes=self.num_nodes)  # as torchrun or SLURM says
        for problem in find_problems(options, model.options, device):
            raise RequestError(str(problem))
        run_state = self.run_state
        run_state.start, run_state.new_weights = read_progress(ckpt_path), ckpt_path is None
        done = run_state.start.step, run_state.start.samples
        run_state.steps = plan_steps(datamodule, self.world_size, self.options.max_steps, self.options.max_tokens, done)
        max_steps = run_state.steps.max_steps
        warmup_and_decay_steps(max_steps, model.options.schedule)  # refuses a schedule that does not fit
        if run_state.start.step >= max_steps and not run_state.start.pending_validation:
            limit = "max_steps" if self.options.max_tokens is None else "max_tokens"
            past = f" (it is at step {run_state.start.step})" if run_state.start.step > max_steps else ""
            finished = f"all {max_steps} steps are done{past}; to train on, give a larger --trainer.{limit}"
            if self._new_run:
                raise RequestError(f"a new run from {ckpt_path} has nothing to train: {finished}")
            log.info("the run has finished: %s", finished)
            return
        if self.strategy.root_device.type == "cpu":
            keep_freed_memory()
        datamodule.set_position(global_batch=run_state.steps.global_batch, consumed=0)  # a checkpoint sets `consumed`
        self.fit_loop.epoch_loop.max_steps = max_steps
        super().fit(model, datamodule=datamodule, ckpt_path=ckpt_path)

    def save_and_wait(self) -> None:
        self.checkpoint_callback.save(self)
        self.checkpoint_io.drain()

    @property
    def run(self) -> Run:
        """The run's folder, once it is claimed; None before."""
        return self.run_state.run

    @property
    def steps(self) -> Steps:
        """The counts of the run, once a fit starts; None before."""
        return self.run_state.steps

    def log_to(self, *loggers: Logger) -> None:
        """Log to these from now on, and to those of the config."""
        self.loggers = [*loggers, *self.own_loggers]

    def load_with(
        self, optimizer: bool, verified: Path | None = None, other_model: bool = False, new_run: bool = False
    ) -> None:
        """Set how the next checkpoint is loaded: with or without optimizer state; `verified`: a folder whose digests
        were just checked; `other_model`: allow a model that computes something else with the same weights; `new_run`:
        it is not of the run that trains on, so one without steps to train is an error."""
        self.run_state.other_model, self._new_run = other_model, new_run
        self.checkpoint_io.load_optimizer, self.checkpoint_io.verified = optimizer, verified

    @property
    def checkpoint_callback(self) -> "Checkpoints":
        """The callback that takes the run's checkpoints; a user may have one of Lightning's beside it. None without."""
        callback: Any = next((each for each in self.checkpoint_callbacks if hasattr(each, "keep_for_rollback")), None)
        return callback

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights, so that no rank computes alone."""
        return hasattr(self.strategy, "shard")

    @property
    def device_peak(self) -> float | None:
        """Dense peak of one device in floating-point operations a second, the denominator of MFU; None: not known."""
        if self.options.peak_tflops:
            return self.options.peak_tflops * 1e12
        precision = multiplication_precision(str(self.precision), self.options.matmul_precision)
        return peak_flops(device_name(self.strategy.root_device), precision)

    @property
    def fitting(self) -> bool:
        """Whether this is a fit, also while it validates."""
        return self.state.fn == TrainerFn.FITTING

    def validates_after(self, step: int) -> bool:
        due = step % self.options.val_interval == 0 or step >= self.max_steps or self.should_stop
        return due and self.datamodule.has_validation

    @property
    def tokens_seen(self) -> int:
        """Tokens that were trained on, over all ranks and since the beginning of the run."""
        return self.run_state.consumed * self.datamodule.seq_len


def choose_strategy(config: TrainerConfig, devices: Devices, num_nodes: int) -> Strategy | str:
    world_size = devices_of_node(config, devices) * num_nodes
    if world_size == 1 and not torchrun_world():
        return "auto"
    from lm.training.distributed import FullyShardedStrategy, ReplicatedStrategy

    if config.strategy == "fsdp2":
        return FullyShardedStrategy(world_size, config.rank_timeout, config.distributed)
    return ReplicatedStrategy(config.rank_timeout, config.distributed)


warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*The `srun` command is available.*")
