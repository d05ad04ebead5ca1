"""`LanguageModule` and `DataModule` under a plain `lightning.Trainer`, and so in a custom `LightningCLI`.

A batch is an optimizer step there too. What only `training/trainer.Trainer` has is left out, which the log says once:
the run folder with checkpoints that are Hugging Face models, guards, gradient clipping, a resume exact to the bit.
"""

import json
import os
from dataclasses import asdict
from typing import Any

import lightning.pytorch as lightning
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lm.data.loader import Cursor
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.training.run_state import OTHER_TRAINER, RunState
from lm.training.schedule import plan_steps, warmup_and_decay_steps

LEFT_OUT = ("under lightning.Trainer there is no run folder, no guard, no gradient clipping and no resume exact to the "
            "bit, and checkpoints are Lightning's: `lm.Trainer` has these")  # fmt: skip


class PlainRunState(RunState, Callback):
    """The state of a training by a plain Trainer, to which the module adds it as a callback."""

    def samples_of_run(self, trainer: lightning.Trainer) -> int:
        data = trainer.datamodule
        batch = data.global_batch_tokens or data.micro_batch_size * data.seq_len
        return max(1, max(trainer.max_steps, 1) * batch // data.seq_len)

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Find the counts of the run; called once the data is open."""
        data = trainer.datamodule
        if not hasattr(data, "token_bytes"):
            raise RequestError("LanguageModule is trained on an lm.data.datamodule.DataModule: give it as datamodule=")
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise RequestError("LanguageModule under lightning.Trainer runs on one device or with DDP, and this is "
                               f"{type(trainer.strategy).__name__}: give strategy='ddp', or take lm.Trainer, which has "
                               "fsdp2")  # fmt: skip
        if stage != "fit":
            return
        if trainer.max_steps < 1:
            raise RequestError("the learning-rate schedule needs a number of steps: give lightning.Trainer("
                               "max_steps=...); the stream of samples has no epochs")  # fmt: skip
        self.steps = plan_steps(
            seq_len=data.seq_len, micro_batch_size=data.micro_batch_size, global_batch_tokens=data.global_batch_tokens,
            world_size=trainer.world_size, max_steps=trainer.max_steps, max_tokens=None,
        )  # fmt: skip
        warmup_and_decay_steps(trainer.max_steps, pl_module.options.schedule)
        seed = os.environ.get("PL_GLOBAL_SEED")  # of lightning.seed_everything
        data.set_position(global_batch=self.steps.global_batch, seed=None if seed is None else int(seed))
        rank_zero_info(LEFT_OUT)
        if data.has_validation and trainer.check_val_every_n_epoch is not None:
            rank_zero_warn("no validation comes, since the stream of samples has no epochs: give lightning.Trainer("
                           "val_check_interval=100, check_val_every_n_epoch=None)")  # fmt: skip

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(pl_module.logged_metrics())

    def save(self, module: Any, checkpoint: dict[str, Any]) -> None:
        decoder = json.loads(json.dumps(asdict(module.config)))  # plain values, which torch.load takes without pickle
        checkpoint["lm"] = {"consumed": self.cursor.end if self.cursor else 0, "decoder": decoder}

    def restore(self, module: Any, checkpoint: dict[str, Any]) -> None:
        if "lm" not in checkpoint:
            raise RequestError(OTHER_TRAINER)
        if module.decoder is None:  # `load_from_checkpoint`, without a Trainer
            module.build_for_checkpoint(DecoderConfig(**checkpoint["lm"]["decoder"]))
        else:
            self.cursor = Cursor(start=0, end=checkpoint["lm"]["consumed"])
            module.trainer.datamodule.set_position(consumed=self.cursor.end)
