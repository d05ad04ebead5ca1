"""Many devices, a process each: whole models (DDP) or shards of one (FSDP2).

Nothing on a batch's way changes: a rank takes its share of the samples, gradients are averaged over the ranks, and
checkpoints are the same folders as everywhere else, full tensors that rank zero writes and every rank reads. So a run
may stop under one strategy and go on under another.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lm.errors import GuardStop, Interrupted, LmError, RunError

# ---- launcher --------------------------------------------------------------------------------------------------------
# How the processes of a training on many devices start, and how all of them end together and with one voice.

PATIENCE = 5.0  # seconds that one process gives another to end by itself
LAUNCHER = "LM_LAUNCHER_PID"  # tells a process which one started it


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of a node, and sees to it that all of them end together and with one voice.

    Lightning's own kills the whole group, without a word, five seconds after any process ended with a code that is
    not 0: also while rank zero still writes the checkpoint of a run that was interrupted. Here rank zero speaks for
    all, a rank that fails alone is named, and nobody outlives the process that the user started.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in this process; where nobody else has started the others of this node, start them first.

        Raises:
            RunError: another rank failed; it has said why.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if self.cluster_environment.creates_processes_externally:
            _end_with_launcher()
            return self._follow(function, *args, **kwargs)
        os.environ[LAUNCHER] = str(os.getpid())
        self._call_children_scripts()
        return self._lead(trainer, function, *args, **kwargs)

    def _follow(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Where another process started this one: rank zero tells what all ranks know."""
        if self.cluster_environment.global_rank() == 0:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (Interrupted, GuardStop) as stop:  # all ranks agreed on it
            raise SystemExit(stop.exit_code) from stop
        except Exception:
            # If rank zero has the same error, it ends this process while this one waits; else this one speaks.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(PATIENCE)
            raise

    def _lead(self, trainer: Trainer | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Where this process started the others: wait for them at the end, and end them where it fails."""
        left = threading.Event()
        threading.Thread(target=self._watch, args=(trainer, left), daemon=True, name="ranks").start()
        patience = 0.0
        try:
            result = function(*args, **kwargs)
            patience = PATIENCE
            return result
        except (Interrupted, GuardStop):
            patience = PATIENCE
            raise
        except LmError:
            raise
        except Exception as error:  # perhaps no more than the echo of another rank's end
            left.set()
            late = isinstance(error, RuntimeError) and re.search("timed ?out|timeout", str(error), re.IGNORECASE)
            failure = self._silence(error) if late else self._failure(within=1.0)
            if failure is None:
                raise
            raise failure from error
        finally:
            left.set()
            self._end(patience)

    def _watch(self, trainer: Trainer | None, left: threading.Event) -> None:
        """End a training that waits for a rank which is gone: a collective on a GPU waits for many minutes."""
        while not left.wait(1.0):
            failure = self._failure()
            if failure is None:
                continue
            if left.wait(PATIENCE):
                return
            for callback in trainer.callbacks if trainer else ():
                callback.on_exception(trainer, trainer.lightning_module, failure)
            self._end(0.0)
            print(f"lm: {failure}", file=sys.stderr, flush=True)
            os._exit(failure.exit_code)

    def _failure(self, within: float = 0.0) -> RunError | None:
        """The end of another rank as an error, unless it ended well or stopped as all agreed."""
        until = time.monotonic() + within
        while True:
            for rank, process in enumerate(self.procs, start=1):
                code = process.poll()
                if code not in (None, 0, Interrupted.exit_code, GuardStop.exit_code):
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                    return RunError(f"local rank {rank} {how}; `--ckpt_path auto` goes on from the newest checkpoint")
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def _silence(self, error: Exception) -> RunError:
        """Who did not answer. Those that waited like this process end by themselves; who stays is what they waited for.
        """
        until = time.monotonic() + 2 * PATIENCE  # they wait for this one first, and then take a moment to end
        while time.monotonic() < until and any(process.poll() is None for process in self.procs):
            time.sleep(0.05)
        silent = [f"{rank} (pid {process.pid})" for rank, process in enumerate(self.procs, start=1)
                  if process.poll() is None]  # fmt: skip
        if not silent and (failure := self._failure()) is not None and "was killed" in str(failure):
            return failure
        who = f"local rank {', '.join(silent)}" if silent else "a rank of another node"
        return RunError(
            f"{who} did not answer in time, so it hangs (see trainer.rank_timeout); `--ckpt_path auto` goes on from "
            f"the newest checkpoint; what the wait ended with: {str(error).strip().splitlines()[0]}"
        )

    def _end(self, patience: float) -> None:
        """Wait for the other processes of this node, kill those that stay, and reap all."""
        until = time.monotonic() + patience
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_launcher() -> None:
    """End this process when the one that started it is gone, however that was killed: no orphan keeps a GPU."""
    launcher = int(os.environ.get(LAUNCHER, 0))

    def watch() -> NoReturn:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    if launcher:
        threading.Thread(target=watch, daemon=True, name="launcher").start()


# ---- sharding --------------------------------------------------------------------------------------------------------

STARTING = timedelta(minutes=30)  # until they train: each prepares data, reads a checkpoint and builds its model
NCCL_LATER = 60.0  # seconds


class ReplicatedStrategy(DDPStrategy):
    """DDP: every rank holds the whole model, and gradients are averaged with the last micro-batch of a step.

    Args:
        rank_timeout: seconds that ranks wait for one another, once they train.
    """

    def __init__(self, rank_timeout: float) -> None:
        # Nothing in the model is a buffer that ranks could disagree on, and the gradients need no second copy.
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True, timeout=STARTING)
        self.rank_timeout = rank_timeout

    def on_train_start(self) -> None:
        _wait_no_longer(self.rank_timeout)

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2: every rank holds a shard of the parameters, gradients and optimizer state.

    It is Lightning's strategy with our checkpoint folders at both ends.

    Args:
        world_size: devices over all nodes; each holds one shard.
        rank_timeout: seconds that ranks wait for one another, once they train.
    """

    def __init__(self, world_size: int, rank_timeout: float) -> None:
        super().__init__(
            data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False,
            timeout=STARTING,
        )  # fmt: skip
        self.rank_timeout = rank_timeout

    def on_train_start(self) -> None:
        _wait_no_longer(self.rank_timeout)

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def shard(self, decoder: nn.Module) -> None:
        """Shard a decoder in place: a unit a layer, and one for the rest."""
        # The losses that a decoder returns are a view; nothing changes them in place, which is what this warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = self.device_mesh["data_parallel"]
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in here add up gradients and exchange none, as `no_sync` of DDP."""
        decoder = self.lightning_module.decoder
        decoder.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            decoder.set_requires_gradient_sync(True)

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # Lightning's leaves it out here: writes end, and what failed is told

    # ---- checkpoints: full tensors, through the same CheckpointIO as every other strategy -----------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # before `on_fit_start`, as everywhere else: a checkpoint that does not fit leaves no run folder

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights on rank zero, nothing on the others."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full optimizer state by parameter name on rank zero, nothing on the others."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return get_optimizer_state_dict(self.model, optimizer, options=options)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank takes its shard of the full weights that it read."""
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.model, dict(checkpoint["state_dict"]), options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its shard of the full optimizer state that it read."""
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not saved["state"]:  # of an imported model: the optimizer begins anew, and torch would begin at step 1
                continue
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            state = {
                "state": {order[index]: slots for index, slots in saved["state"].items()},
                "param_groups": [
                    {**group, "params": [order[index] for index in group["params"]]} for group in saved["param_groups"]
                ],
            }
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, optimizer, state, options=options)


def _wait_no_longer(seconds: float) -> None:
    """How long ranks wait for one another from now on; torch has no public name for changing it.

    NCCL ends its process without a word when its time is over. The ranks also ask one another on the CPU, after every
    step (`training/callbacks/stopping`): who hears nothing there says so and ends in order, so NCCL waits longer.
    """
    if dist.get_backend() == "nccl":
        seconds += NCCL_LATER
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
