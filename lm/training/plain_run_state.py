"""The state of a training by Lightning's own Trainer, for which there is no run folder."""

import json
import os
from dataclasses import asdict
from hashlib import sha256
from typing import Any, cast

import lightning.pytorch as lightning
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn  # pyright: ignore[reportPrivateImportUsage]
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lm.data.mixture import describe_change
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.runs.config_diff import differences
from lm.training.checkpoint_checks import TRAINING_ONLY
from lm.training.run_state import OTHER_TRAINER, RunState
from lm.training.schedule import plan_steps, warmup_and_decay_steps

LEFT_OUT = (
    "under lightning.Trainer there is no run folder, no guard, no gradient clipping and no resume exact to the "
    "bit, and checkpoints are Lightning's: `lm.Trainer` has these"
)


class PlainRunState(RunState, Callback):
    """The state of a training by a plain Trainer, to which the module adds it as a callback.

    Each batch is an optimizer step there too. Features that only `lm.Trainer` has are left out, which is logged once.
    """

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
            raise RequestError(
                "LanguageModule under lightning.Trainer runs on one device or with DDP, and this is "
                f"{type(trainer.strategy).__name__}: give strategy='ddp', or take lm.Trainer, which has "
                "fsdp2"
            )
        if stage != "fit":
            return
        if trainer.max_steps < 1:
            raise RequestError(
                "the learning-rate schedule needs a number of steps: give lightning.Trainer("
                "max_steps=...); the stream of samples has no epochs"
            )
        self.steps = plan_steps(data, trainer.world_size, trainer.max_steps, None)
        warmup_and_decay_steps(trainer.max_steps, pl_module.options.schedule)
        seed = os.environ.get("PL_GLOBAL_SEED")  # of lightning.seed_everything
        data.set_position(global_batch=self.steps.global_batch, seed=int(seed) if seed else None, consumed=0)
        rank_zero_info(LEFT_OUT)
        if data.has_validation and trainer.check_val_every_n_epoch is not None:
            rank_zero_warn(
                "no validation comes, since the stream of samples has no epochs: give lightning.Trainer("
                "val_check_interval=100, check_val_every_n_epoch=None)"
            )

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """An epoch, which `limit_train_batches` may end, does not begin the stream again."""
        if self.consumed and not trainer.overfit_batches:
            cast(Any, trainer.train_dataloader).start = self.consumed

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any) -> None:
        every = trainer.log_every_n_steps  # 0, as under `barebones`: never
        if every and trainer.global_step % every == 0:
            pl_module.log_dict(pl_module.logged_metrics())

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Explain why Lightning cannot open a checkpoint of `lm.Trainer`, which is a folder."""
        if isinstance(exception, IsADirectoryError):
            exception.add_note(OTHER_TRAINER)

    def save(self, module: Any, checkpoint: dict[str, Any]) -> None:
        optimizer = module.optimizers(use_pl_optimizer=False)
        if checkpoint.get("optimizer_states") and hasattr(optimizer, "gathered_state_dict"):  # of all ranks, as Muon's
            checkpoint["optimizer_states"] = [optimizer.gathered_state_dict(lambda place, tensor: tensor)]
        checkpoint["lm"] = {
            "consumed": self.consumed,
            "mixture": module.trainer.datamodule.describe_mixture(),
            **self._settings(module),
        }

    def restore(self, module: Any, checkpoint: dict[str, Any]) -> None:
        if "lm" not in checkpoint:
            raise RequestError(OTHER_TRAINER)
        if module.decoder is None:  # `load_from_checkpoint`, without a Trainer
            module.build_for_checkpoint(DecoderConfig(**checkpoint["lm"]["decoder"]))
            return
        self.consumed = checkpoint["lm"]["consumed"]
        self._check_same_settings(module, checkpoint["lm"])
        module.trainer.datamodule.set_position(consumed=self.consumed)

    def _settings(self, module: Any) -> dict[str, Any]:
        """What must stay in a resume, as plain values, which torch.load takes without pickle."""
        data = module.trainer.datamodule
        vocabulary = sha256(json.dumps(data.tokenizer.vocabulary, sort_keys=True).encode()).hexdigest()
        settings = {
            "decoder": asdict(module.config),
            "tokenizer": vocabulary,
            "seed": data.seed,
            "document_mask": module.options.document_mask,
            "seq_len": data.seq_len,
            "shuffle_buffer": data.options.shuffle_buffer,
            "reshuffle": data.options.reshuffle,
        }
        return json.loads(json.dumps(settings))

    def _check_same_settings(self, module: Any, saved: dict[str, Any]) -> None:
        now, mixture = self._settings(module), module.trainer.datamodule.describe_mixture()
        if not module.trainer.training:  # an evaluation, of the same model and the same ids
            now, mixture = {name: now[name] for name in ("decoder", "tokenizer")}, None
        changed = differences([now | {name: saved[name] for name in now if name in saved}, now])
        changes = [
            f"{name} was {before}, now {after}"
            for name, (before, after) in changed.items()
            if name.removeprefix("decoder.") not in TRAINING_ONLY
        ]
        if saved.get("mixture") and mixture:
            reason, _ = describe_change(saved["mixture"], mixture, self.consumed)
            changes += [reason] if reason else []
        if changes:
            raise RequestError(
                f"this is a checkpoint of another training: {'; '.join(changes)}; put it back, or take "
                "its weights alone, with LanguageModule.load_from_checkpoint"
            )
