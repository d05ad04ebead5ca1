"""`LanguageModule` and `DataModule` under a plain `lightning.Trainer`, and so in a `LightningCLI` of one's own.

A batch is an optimizer step there too. What only `training/trainer.Trainer` has is left out, which the log says once:
the run folder with checkpoints that are Hugging Face models, guards, gradient clipping, a resume exact to the bit.
"""

import os
from typing import Any

import lightning.pytorch as lightning
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lm.errors import RequestError
from lm.training.schedule import plan_steps, warmup_and_decay_steps

LEFT_OUT = ("under lightning.Trainer there is no run folder, no guard, no gradient clipping and no resume exact to the "
            "bit, and checkpoints are Lightning's: `lm.Trainer` has these")  # fmt: skip


def adopt(trainer: lightning.Trainer, module: Any, stage: str) -> None:
    """Give a plain Trainer what the module and the data ask a Trainer for; called once the data is open.

    Raises:
        RequestError: something is missing that a training needs, or the strategy is not one that works.
    """
    data = trainer.datamodule
    if not hasattr(data, "token_bytes"):
        raise RequestError("LanguageModule is trained on an lm.data.datamodule.DataModule: give it as datamodule=")
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise RequestError("LanguageModule under lightning.Trainer runs on one device or with DDP, and this is "
                           f"{type(trainer.strategy).__name__}: give strategy='ddp', or take lm.Trainer, which has "
                           "fsdp2")  # fmt: skip
    trainer.max_grad_norm, trainer.pending_validation, trainer.stop_within = None, False, 0.0
    batch = data.global_batch_tokens or data.micro_batch_size * data.seq_len
    trainer.samples_of_run = max(1, max(trainer.max_steps, 1) * batch // data.seq_len)
    if stage != "fit":
        return
    if trainer.max_steps < 1:
        raise RequestError("the learning-rate schedule needs a number of steps: give lightning.Trainer(max_steps=...); "
                           "the stream of samples has no epochs")  # fmt: skip
    trainer.steps = plan_steps(
        seq_len=data.seq_len, micro_batch_size=data.micro_batch_size, global_batch_tokens=data.global_batch_tokens,
        world_size=trainer.world_size, max_steps=trainer.max_steps, max_tokens=None,
    )  # fmt: skip
    warmup_and_decay_steps(trainer.max_steps, module.schedule_config)
    data.global_batch = trainer.steps.global_batch
    data.seed = int(os.environ.get("PL_GLOBAL_SEED", data.seed))  # of lightning.seed_everything
    rank_zero_info(LEFT_OUT)
    if data.has_validation and trainer.check_val_every_n_epoch is not None:
        rank_zero_warn("no validation comes, since the stream of samples has no epochs: give lightning.Trainer("
                       "val_check_interval=100, check_val_every_n_epoch=None)")  # fmt: skip
