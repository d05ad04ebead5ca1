"""Many devices, a process each: whole models (DDP) or shards of one (FSDP2).

Nothing on a batch's way changes: a rank takes its share of the samples, gradients are averaged over the ranks, and
checkpoints are the same folders as everywhere else, full tensors that rank zero writes and every rank reads. So a run
may stop under one strategy and go on under another.
"""

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
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

from lm.launcher import Launcher

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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Exchange gradients only with the last micro-batch of an optimizer step."""
        trainer = self.lightning_module.trainer
        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self.lightning_module.decoder.set_requires_gradient_sync(last)

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
    step (`callbacks/interrupt`): who hears nothing there says so and ends in order, so NCCL waits longer than that.
    """
    if dist.get_backend() == "nccl":
        seconds += NCCL_LATER
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
