"""Lightning's Trainer in the words of pretraining: optimizer steps and tokens, not micro-batches and epochs."""

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy

from lm.data.datamodule import DataModule
from lm.errors import DataError, Interrupted, LmError, RequestError, require_at_least
from lm.runs.checkpoint import read_progress
from lm.runs.mirror import Mirror, refuse_remote_root
from lm.runs.run import Run
from lm.system.hardware import device_name, keep_freed_memory, peak_flops, process_bytes
from lm.system.stop_signals import STOP
from lm.system.units import Count, plural
from lm.training.callback import refuse_callbacks
from lm.training.checkpoint_state import FolderCheckpointIO
from lm.training.distributed import (
    DistributedConfig,
    FullyShardedStrategy,
    ReplicatedStrategy,
    Sharding,
    how_to_resume,
    srun_world,
    torchrun_world,
)
from lm.training.lightning_patches import PatchedTrainer, report_path
from lm.training.out_of_memory import is_out_of_memory, out_of_memory_error
from lm.training.precision import (
    Float8Precision,
    Precision,
    choose_precision,
    multiplication_precision,
    refuse_matmul_precision,
)
from lm.training.run_state import RunState
from lm.training.schedule import Steps, plan_steps, warmup_and_decay_steps

log = logging.getLogger(__name__)
YEAR = 365 * 24 * 3600  # seconds
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler}


@dataclass
class EarlyStoppingConfig:
    """When to stop before the steps are done.

    Args:
        patience: Validations in a row without a new best before the run stops; none: never.
        min_delta: How much lower the validation loss must be to count as a new best, here and for the best checkpoint.
    """

    patience: int | None = None
    min_delta: float = 0.0


class Trainer(PatchedTrainer):
    """Trains for a number of optimizer steps on a stream that has no end.

    Args:
        max_steps: Optimizer steps of the run; or
        max_tokens: tokens of the run, rounded up to whole steps.
        val_interval: Optimizer steps between validations; the last step is always validated.
        checkpoint_interval: Optimizer steps between checkpoints.
        keep_checkpoints: How many of the newest checkpoints are kept beside the best.
        keep_every: Checkpoints of steps that are multiples of this are taken too, and kept for good; none: none.
        stop_within: Seconds that the run may take after a signal, on a single device. A step that is not done in half
            of them is dropped; after all of them the process ends, and the newest checkpoint is the one to resume from.
            0: as long as it takes.
        log_interval: Optimizer steps between log lines.
        histogram_interval: Optimizer steps between histograms of the weights in TensorBoard; none: no histograms.
        early_stopping: When to stop before the steps are done; off unless a patience is given.
        gradient_clip_val: Largest global norm of the gradient; none: no clipping.
        precision: Number format. A half precision that a CPU does not do well becomes one that it does. The FP8 ones
            multiply the blocks' matrices in FP8 and do the rest as bf16-mixed does, with a scale for each matrix
            (tensorwise) or for each of its rows (rowwise); Ada, Hopper and later.
        fp8_keep: Matrices that FP8 leaves in bf16, as patterns of their names, such as `layers.0.*` or `*.down_proj`;
            those of the last block if not given.
        accelerator: Where to train; `gpu` is CUDA or, on a Mac, MPS.
        devices: How many devices of a node, or which. Under `torchrun` its `--nproc_per_node` counts, under `srun` its
            tasks.
        num_nodes: How many nodes. Under `torchrun` or `srun` its `--nnodes` or `--nodes` counts.
        matmul_precision: How fp32 matrices are multiplied on a GPU: `high` as TF32, which keeps 10 bits of the
            mantissa and is several times faster; `medium` in bf16 where that exists. For precision 32-true.
        peak_tflops: Peak of a device in this precision, for MFU: dense TFLOP/s with fp32 accumulation; that of the
            table of devices if not given.
        strategy: Over several devices: `ddp` has a whole model on each, `fsdp2` a shard, and with `hsdp` the devices of
            a node share a model. `auto` is `ddp`.
        distributed: What devices exchange: reduce_dtype, bucket_mb, reshard, prefetch.
        rank_timeout: Seconds that ranks wait for one another before the run ends; longer than anything that one of
            them does alone, such as an evaluation.
        deterministic: Refuse operations whose result may differ from run to run.
        detect_anomaly: Find the operation that made a NaN; slow.
        profiler: One of Lightning's profilers: `simple` or `advanced`. Its report is a file in the run's folder.
        logger: One or several of Lightning's loggers, beside TensorBoard and `metrics.jsonl`.
        callbacks: More Lightning callbacks.
        default_root_dir: Folder of the runs, on a disk.
        mirror: An object store that has a copy of each run: `s3://bucket/folder`, `gs://...`, `file:///...`. It is
            updated after each checkpoint, in the background. A run that is to be resumed comes from there where the
            folder on the disk is gone or older.
    """

    def __init__(
        self,
        max_steps: Count | None = None,
        max_tokens: Count | None = None,
        val_interval: Count = Count(250),
        checkpoint_interval: Count = Count(250),
        keep_checkpoints: int = 1,
        keep_every: Count | None = None,
        stop_within: float = 15.0,
        log_interval: Count = Count(10),
        histogram_interval: Count | None = None,
        early_stopping: EarlyStoppingConfig = EarlyStoppingConfig(),
        gradient_clip_val: float | None = 1.0,
        precision: Precision = "32-true",
        fp8_keep: list[str] | None = None,
        accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        matmul_precision: Literal["highest", "high", "medium"] = "highest",
        peak_tflops: float | None = None,
        strategy: Sharding = "auto",
        distributed: DistributedConfig = DistributedConfig(),
        rank_timeout: float = 1800.0,
        deterministic: bool = False,
        detect_anomaly: bool = False,
        profiler: Literal["simple", "advanced"] | None = None,
        logger: Logger | list[Logger] | None = None,
        callbacks: list[Callback] | None = None,
        default_root_dir: str = "checkpoints",
        mirror: str | None = None,
    ) -> None:
        refuse_remote_root(default_root_dir)
        require_at_least(
            1, "trainer.", val_interval=val_interval, checkpoint_interval=checkpoint_interval,
            log_interval=log_interval, histogram_interval=histogram_interval, keep_checkpoints=keep_checkpoints,
            keep_every=keep_every, **{"early_stopping.patience": early_stopping.patience}, num_nodes=num_nodes,
        )  # fmt: skip
        if not 0 <= stop_within <= YEAR:
            raise RequestError(f"trainer.stop_within {stop_within} is a number of seconds: from 0 to {YEAR:,}")
        if not 0 < rank_timeout <= YEAR:
            raise RequestError(f"trainer.rank_timeout {rank_timeout} is a number of seconds: more than 0, to {YEAR:,}")
        if peak_tflops is not None and not 0 < peak_tflops < math.inf:
            raise RequestError(f"trainer.peak_tflops {peak_tflops} must be above 0")
        refuse_accelerator(accelerator)
        refuse_callbacks(callbacks or [])
        torch.set_float32_matmul_precision(matmul_precision)
        self.matmul_precision = matmul_precision
        self.peak_tflops = peak_tflops
        self.sharding, self.distributed = strategy, distributed
        self._wanted = {"max_steps": max_steps, "max_tokens": max_tokens}
        self.val_interval = val_interval
        self.checkpoint_interval = checkpoint_interval
        self.keep_checkpoints = keep_checkpoints
        self.stop_within = stop_within
        self.rank_timeout = rank_timeout
        self.log_interval = log_interval
        self.histogram_interval = histogram_interval
        self.early_stopping = early_stopping
        self.own_loggers = [logger] if isinstance(logger, Logger) else logger or []
        self.mirror = Mirror(mirror) if mirror else None
        self.run_state = RunState(clip=gradient_clip_val)  # Lightning clips nothing here: `training/step` does
        self._memory_before: int | None = None  # bytes of this process when the training began
        self.checkpoint_io = FolderCheckpointIO()
        plugins: list[Any] = [self.checkpoint_io]
        if torchrun := torchrun_world():
            devices, num_nodes = _as_started("torchrun", torchrun, devices, num_nodes)
        elif srun := srun_world():
            devices, num_nodes = _as_started("srun", srun, devices, num_nodes)
            plugins.append(SLURMEnvironment(auto_requeue=False))  # ours saves and exits 75
        elif SLURMEnvironment.detect():
            plugins.append(LightningEnvironment())
        chosen = choose_precision(precision, fp8_keep, accelerator)
        if isinstance(chosen, Float8Precision):
            plugins.append(chosen)
        super().__init__(
            max_steps=1,  # set anew when a fit starts
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks or ()),
            enable_progress_bar=False,
            enable_model_summary=False,
            precision=chosen if isinstance(chosen, str) else None,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=_strategy(strategy, _devices(accelerator, devices), num_nodes, rank_timeout, distributed),
            deterministic=deterministic,
            detect_anomaly=detect_anomaly,
            profiler=PROFILERS[profiler](filename="profile") if profiler in PROFILERS else profiler,
            callbacks=callbacks,
            default_root_dir=default_root_dir,
            plugins=plugins,
        )
        environment = getattr(self.strategy, "cluster_environment", None)
        if num_nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
            raise RequestError(
                f"trainer.num_nodes {num_nodes}: the nodes do not find one another: start the command on each with "
                f"`torchrun --nnodes {num_nodes}`, or with `srun --nodes {num_nodes}`, or give --trainer.num_nodes 1"
            )
        if isinstance(chosen, Float8Precision):
            chosen.refuse_device(self.strategy.root_device)

    def fit(self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None) -> None:
        """Train, from scratch or from a checkpoint.

        Args:
            model: The module to train.
            datamodule: Its data; its `seq_len`, `micro_batch_size` and `global_batch_tokens` give the step.
            ckpt_path: A checkpoint folder to resume from; `lm.runs.resume.find_checkpoint` finds the one that `best`,
                `last` or `auto` means.

        Raises:
            RequestError: the batch does not come out even, and the arithmetic is in the message; an option changes
                nothing; or the model or the data is not ours.
        """
        refuse_parts(model, datamodule)
        state = self.run_state
        datamodule.set_position(seq_len=datamodule.seq_len or model.config.max_position_embeddings)
        refuse_matmul_precision(self.matmul_precision, str(self.precision))
        self.distributed.refuse(self.sharding, self.world_size, self.num_nodes, str(self.precision))
        state.steps = plan_steps(
            seq_len=datamodule.seq_len,
            micro_batch_size=datamodule.micro_batch_size,
            global_batch_tokens=datamodule.global_batch_tokens,
            world_size=self.world_size,
            **self._wanted,
        )
        warmup_and_decay_steps(state.steps.max_steps, model.schedule_config)  # refuses a schedule that does not fit
        log.info(str(state.steps))
        state.start = read_progress(ckpt_path)
        if state.start.step >= state.steps.max_steps and not state.start.pending_validation:
            log.info("the run has finished: all %d steps are done", state.steps.max_steps)
            return
        if self.checkpoint_callback is None:
            log.warning(
                "this Trainer takes no checkpoints and writes nothing: give it `callbacks=standard_callbacks(...)`, as "
                "lm/training/README.md shows under `Train from Python`, or train with `lm fit`"
            )
        if self.strategy.root_device.type == "cpu":
            keep_freed_memory()
        datamodule.set_position(global_batch=state.steps.global_batch)
        self.fit_loop.epoch_loop.max_steps = state.steps.max_steps
        super().fit(model, datamodule=datamodule, ckpt_path=ckpt_path)

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        """Says what needs how much memory where there is not enough."""
        try:
            yield
        except Exception as error:
            module = self.lightning_module
            if module is None or module.config.vocab_size is None or not is_out_of_memory(error):
                raise
            raise out_of_memory_error(error, self, self._memory_before) from error

    @contextmanager
    def around_stage(self) -> Iterator[None]:
        """Says how to resume a run that ends by damaged data or a signal."""
        self._memory_before = process_bytes()
        try:
            yield
            if self.profiler.filename:  # Lightning writes its report in a moment
                self.profiler.dirpath = self.run.path if self.run else self.default_root_dir
                log.info("profile: %s", report_path(self.profiler))
        except Exception as error:
            STOP.disarm()  # the last checkpoint may take longer than stop_within
            if isinstance(error, DataError) and self.fitting:
                self._save_last_step()
                raise DataError(f"{error}; {how_to_resume(self)}") from error
            if isinstance(error, LmError) or STOP.received is None or not self.fitting:
                raise
            # The signal may have ended other processes that this one depends on.
            raise Interrupted(
                f"{STOP.received.name}: ended without a checkpoint, because {type(error).__name__}: {error}; "
                f"{how_to_resume(self)}"
            ) from error

    @property
    def run(self) -> Run | None:
        """The run's folder, once it is claimed."""
        return self.run_state.run

    @property
    def steps(self) -> Steps | None:
        """The counts of the run, once a fit starts."""
        return self.run_state.steps

    def log_to(self, *loggers: Logger) -> None:
        """Log to these from now on, and to those of the config."""
        self.loggers = [*loggers, *self.own_loggers]

    def load_with(self, optimizer: bool, verified: Path | None = None) -> None:
        """How the next checkpoint is read.

        Args:
            optimizer: also the optimizer's state, which a fit needs.
            verified: a folder whose files have been compared with their digests.
        """
        self.checkpoint_io.load_optimizer, self.checkpoint_io.verified = optimizer, verified

    @property
    def samples_of_run(self) -> int:
        """About how many samples the config asks for, the same in a fit and in an evaluation."""
        data = self.datamodule
        if self._wanted["max_tokens"] is not None:
            return max(1, self._wanted["max_tokens"] // data.seq_len)
        batch = data.global_batch_tokens or data.micro_batch_size * data.seq_len
        return max(1, (self._wanted["max_steps"] or 1) * batch // data.seq_len)

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The callback that takes the run's checkpoints; a user may have one of Lightning's beside it."""
        return next((each for each in self.checkpoint_callbacks if hasattr(each, "request")), None)

    @property
    def device_peak(self) -> float | None:
        """Dense peak of one device in floating-point operations a second, the denominator of MFU; None: not known."""
        if self.peak_tflops:
            return self.peak_tflops * 1e12
        precision = multiplication_precision(str(self.precision), self.matmul_precision)
        return peak_flops(device_name(self.strategy.root_device), precision)

    @property
    def fitting(self) -> bool:
        """Whether this is a fit, also while it validates."""
        return self.state.fn == lightning.trainer.states.TrainerFn.FITTING

    def end_run(self, why: str = "") -> NoReturn:
        """End the run after its last whole step, with a checkpoint unless a guard wants none; call it on every rank.

        Raises:
            GuardStop: the state's `stop` is why.
            Interrupted: a signal is; `why` the message says more.
        """
        STOP.disarm()
        state = self.run_state
        if (self.checkpoint_callback.requested or state.stop is None) and self.global_step:
            self.checkpoint_callback.save(self)
            self.checkpoint_io.drain()
        if state.uploads is not None:
            state.uploads.wait(self.stop_within)
        self.strategy.barrier()  # torchrun kills all processes when the first one ends
        if state.stop is not None:
            raise state.stop
        signal = STOP.received.name if STOP.received is not None else "a signal on another rank"
        where = f"after step {self.global_step} with a checkpoint" if self.global_step else "in the first step"
        if state.pending_validation:
            where += ", before its validation was done"
        raise Interrupted(f"{signal}: stopped {where}{why}; {how_to_resume(self)}")

    def _save_last_step(self) -> None:
        """Take a checkpoint though the run fails, because the data of the next step cannot be read."""
        self.run_state.pending_validation |= self.validating
        if self.world_size == 1 and self.global_step and self.checkpoint_callback is not None:
            self.checkpoint_callback.save(self)
            self.checkpoint_io.drain()
            log.info("saved a checkpoint of step %d", self.global_step)

    def validates_after(self, step: int) -> bool:
        """Whether a validation follows this optimizer step."""
        due = step % self.val_interval == 0 or step >= self.max_steps or self.should_stop
        return due and self.datamodule.has_validation

    @property
    def tokens_seen(self) -> int:
        """Tokens that were trained on, over all ranks and since the beginning of the run."""
        cursor = self.run_state.cursor
        return cursor.end * self.datamodule.seq_len if cursor else 0


def refuse_parts(model: Any, datamodule: Any) -> None:
    """Raise RequestError for a model or data of another kind than this Trainer trains."""
    if isinstance(model, type) or not hasattr(model, "build_decoder"):  # its class imports this module
        raise RequestError(f"lm.Trainer trains an lm.LanguageModule, and this is {kind_of(model)}: build your model "
                           "in `build_decoder` of a subclass, or take lightning.Trainer")  # fmt: skip
    if not isinstance(datamodule, DataModule):
        raise RequestError(f"lm.Trainer takes its data from an lm.DataModule, and this is {kind_of(datamodule)}: give "
                           "lm.DataModule(path), with a folder of `lm.prepare`")  # fmt: skip


def kind_of(value: Any) -> str:
    """What a value is, for a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def refuse_accelerator(accelerator: str) -> None:
    """Raise RequestError where this machine has no such device."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present["gpu"] = any(present.values())
    if not present.get(accelerator, True):
        raise RequestError(
            f"trainer.accelerator {accelerator}: PyTorch finds no such device on this machine: give "
            "--trainer.accelerator cpu, or auto"
        )


def _as_started(
    launcher: str, world: tuple[int, int], devices: int | str | list[int], num_nodes: int
) -> tuple[int | str | list[int], int]:
    """`devices` and `num_nodes` of the processes that were started: with torchrun's `--nnodes 1:2` they change."""
    processes, nodes = world
    given = device_count(devices)
    if given not in (None, processes) or num_nodes not in (1, nodes):
        log.info("%s started %s x %s: trainer.devices %s and trainer.num_nodes %d do not count", launcher,
                 plural(nodes, "node"), plural(processes, "process"), devices, num_nodes)  # fmt: skip
    return devices if given == processes else processes, nodes


def device_count(devices: int | str | list[int]) -> int | None:
    """How many devices of a node are named; None: all of them."""
    if isinstance(devices, str) and "," in devices:
        devices = [index for index in devices.split(",") if index.strip().isdigit()]
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def _devices(accelerator: str, devices: int | str | list[int]) -> int:
    """How many devices of a node are asked for."""
    count = device_count(devices)
    if count is not None:
        return count
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else 1


def _strategy(
    name: Sharding, devices: int, num_nodes: int, rank_timeout: float, options: DistributedConfig
) -> Strategy | str:
    world_size = devices * num_nodes
    if world_size == 1 and not torchrun_world():
        return "auto"
    if name in ("fsdp2", "hsdp"):
        return FullyShardedStrategy(world_size, rank_timeout, options, replicas=num_nodes if name == "hsdp" else 1)
    return ReplicatedStrategy(rank_timeout, options)


warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*The `srun` command is available.*")
