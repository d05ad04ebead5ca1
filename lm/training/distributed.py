"""Training on several devices, one process per device: a whole model on each (DDP) or shards of one (FSDP2).

A rank takes its rows of every global batch, and gradients are averaged over the ranks. Checkpoints are the same folders
under every strategy: full tensors, which rank zero writes. So a run may stop under one strategy and resume under
another.
"""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection  # pyright: ignore[reportPrivateImportUsage]
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future
from torch.optim import Optimizer

from lm.errors import LmError
from lm.model.decoder import initialize
from lm.runs.checkpoint import TENSORS
from lm.training.config import DistributedConfig
from lm.training.launcher import Launcher
from lm.training.lightning_patches import OwnLauncher, set_group_timeout

START_TIMEOUT = timedelta(minutes=30)  # before training: ranks prepare data, read a checkpoint, build the model


class RanksTogether(OwnLauncher):
    """Base of both strategies: the launcher, and the timeout of communication between ranks."""

    launcher_class = Launcher
    rank_timeout: float  # seconds

    def on_train_start(self) -> None:
        """Set the timeout of communication during the training.

        NCCL ends its process without a message at its timeout. The ranks also exchange a flag on the CPU after every
        step (`callbacks/stopping`); a timeout there is reported and ends the run in order, so NCCL waits a minute
        longer.
        """
        spare = 60 if dist.get_backend() == "nccl" else 0
        set_group_timeout(timedelta(seconds=self.rank_timeout + spare))


class ReplicatedStrategy(RanksTogether, DDPStrategy):
    """DDP: every rank holds the whole model, and gradients are averaged with the last micro-batch of a step."""

    def __init__(self, rank_timeout: float, options: DistributedConfig) -> None:
        # Buffers of the model cannot differ between ranks, and gradients need no copy outside of DDP's buckets.
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True, timeout=START_TIMEOUT)
        self.rank_timeout = rank_timeout
        self.options = options

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.options.reduce_dtype == "bf16":
            self.model.register_comm_hook(None, _add_in_bf16)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full optimizer state on rank zero, by `gathered_state_dict` if the optimizer divides it over ranks."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        gather = getattr(optimizer, "gathered_state_dict", None)
        if gather is None:
            return optimizer.state_dict()
        with self.checkpoint_io.copying() as copy_to_host:
            return gather(copy_to_host)


def _add_in_bf16(state: None, bucket: dist.GradBucket) -> Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """torch's `bf16_compress_hook` under another name: DDP refuses it by name with gloo, although gloo supports it."""
    return bf16_compress_hook(None, bucket)


class FullyShardedStrategy(RanksTogether, ModelParallelStrategy):
    """FSDP2: every rank holds a shard of the parameters, gradients and optimizer state."""

    def __init__(self, world_size: int, rank_timeout: float, options: DistributedConfig = DistributedConfig()) -> None:
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=START_TIMEOUT,
        )
        self.rank_timeout = rank_timeout
        self.options = options
        self._example: dict[Any, Any] | None = None  # state of an optimizer with its sharding, while one is loaded

    def shard(self, decoder: Any) -> None:
        """Shard a decoder in place: one FSDP unit for each layer, and one for the rest.

        A decoder on the meta device is initialized here, matrix by matrix, so that no device ever holds all weights.
        """
        # The losses that a decoder returns are a view. The warning is about changing it in place, which nothing does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        on_meta = any(weight.is_meta for weight in decoder.parameters())
        if on_meta:  # each part draws what it does on a real device, so random numbers are those of one process
            for part in decoder.modules():
                if hasattr(part, "reset_parameters"):
                    deepcopy(part).to_empty(device=self.root_device).reset_parameters()
        settings: Any = dict(mesh=self.device_mesh["data_parallel"], mp_policy=self._mixed_precision())
        for layer in getattr(decoder, "layers", ()):  # a custom model may have none
            fully_shard(layer, **settings)
        fully_shard(decoder, **settings, reshard_after_forward=False)  # its backward pass comes at once
        if on_meta:
            decoder.to_empty(device=self.root_device)
            initialize(decoder, _whole_weights(decoder))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a custom model on the device, so its random numbers are as under DDP; Lightning makes it on the CPU."""
        with self.root_device, super().tensor_init_context(empty_init):
            yield

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        """With mixed precision, gather weights in half precision and reduce gradients in fp32, or in `reduce_dtype`.

        Shards stay fp32. Inputs keep their precision: angles of the rotary embedding are fp32. Unlike under
        DDP, norm weights are rounded too: FSDP2 does not reduce gradients of several dtypes in one unit. Norms in units
        of their own would need forward hooks, which fused blocks do not run, since they read the weights directly.
        """
        reduce_dtype = torch.bfloat16 if self.options.reduce_dtype == "bf16" else None
        if not isinstance(self.precision_plugin, MixedPrecision):
            return MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        half = torch.float16 if self.precision_plugin.precision == "16-mixed" else torch.bfloat16
        reduce_dtype = reduce_dtype or torch.float32
        return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce_dtype, cast_forward_inputs=False)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them over ranks, like DDP's `no_sync`."""
        decoder = self.lightning_module.decoder
        decoder.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            decoder.set_requires_gradient_sync(True)

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # which Lightning's strategy leaves out

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # before `on_fit_start`, as everywhere else: a checkpoint that does not fit leaves no run folder

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights on rank zero, nothing on the others."""
        return self._gathered("weights", self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full optimizer state on rank zero, nothing on the others.

        torch's `get_optimizer_state_dict` knows state of parameters alone, and takes a step where there is none yet.
        """
        return self._gathered("optimizer", getattr(optimizer, "optimizer", optimizer).state_dict())

    def _gathered(self, kind: str, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the full tensors of a state in rank zero's memory for checkpoints; no device holds two at a time."""
        places = itertools.count()

        def gathered(value: Tensor) -> Tensor | None:
            full = value.full_tensor() if isinstance(value, DTensor) else value  # on every rank
            return copy_to_host((kind, next(places)), full) if self.is_global_zero else None

        with self.checkpoint_io.copying() as copy_to_host:
            state = apply_to_collection(state, Tensor, gathered)
        return state if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the checkpoint on rank zero; the other ranks get its content with meta tensors instead of tensors."""
        content, sent = {}, {}
        if self.is_global_zero:
            try:
                content = self.checkpoint_io.load_checkpoint(checkpoint_path)
                sent = content | {
                    key: {name: tensor.to("meta") if tensor.ndim else tensor for name, tensor in content[key].items()}
                    for key in TENSORS
                    if key in content
                }
            except LmError as error:
                sent = error
        sent = self.broadcast(sent)
        if isinstance(sent, LmError):
            raise sent
        return content or sent

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank gets its shard of the full weights that rank zero has read."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
        weights = dict(checkpoint["state_dict"]) if self.is_global_zero else {}
        set_model_state_dict(self.model, weights, options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank gets its shard of the full optimizer state that rank zero has read."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                key: {
                    slot: apply_to_collection(value, Tensor, self._sharded, optimizer, parameters[key], slot)
                    for slot, value in slots.items()
                }
                if isinstance(key, int)
                else apply_to_collection(slots, Tensor, Tensor.to, self.root_device)
                for key, slots in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})
            self._example = None

    def _sharded(self, value: Tensor, optimizer: Optimizer, parameter: nn.Parameter, slot: str) -> Tensor:
        """Shard state like its parameter; if the shapes differ, like the state that a step of the optimizer makes."""
        if isinstance(value, DTensor) or value.ndim == 0:
            return value
        like = parameter
        if value.shape != parameter.shape:
            self._example = self._example or optimizer.state or self._state_after_step()
            like = self._example.get(parameter, {}).get(slot)
        device = self.root_device
        full = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
        if isinstance(like, DTensor):
            return distribute_tensor(full, like.device_mesh, like.placements)
        dist.broadcast(full, src=0)
        return full.cpu()

    def _state_after_step(self) -> dict[Any, Any]:
        """State of a new optimizer after a step, which leaves the weights as they were."""
        optimizer = self.lightning_module.configure_optimizers()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with torch.no_grad():
            for parameter, weights in zip(parameters, before, strict=True):
                parameter.copy_(weights)
                parameter.grad = None
        return optimizer.state


def _whole_weights(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield an empty full tensor per weight of a sharded decoder; rank zero's values are then put into the shards."""
    for name, shard in decoder.named_parameters():
        full = shard.to_local().new_empty(shard.shape)
        yield name, full
        shard.copy_(distribute_tensor(full, shard.device_mesh, shard.placements))
