"""`LanguageModule` and `DataModule` under Lightning's own Trainer: no run folder, and no resume."""

import json
import os
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as lightning
from lightning.fabric.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.training.run_state import RunState
from lm.training.schedule import plan_steps

LEFT_OUT = (
    "under lightning.Trainer there is no run folder, no guard, no gradient clipping and no resume: `lm.Trainer` has "
    "these; validations need val_check_interval=N, check_val_every_n_epoch=None"
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
        if not isinstance(data, DataModule):
            raise RequestError("LanguageModule is trained on an lm.DataModule: give it as datamodule=")
        if stage != "fit":
            return
        self.steps = plan_steps(data, trainer.world_size, trainer.max_steps, None)
        seed = os.environ.get("PL_GLOBAL_SEED")  # of lightning.seed_everything
        data.set_position(global_batch=self.steps.global_batch, seed=int(seed) if seed else None, consumed=0)
        rank_zero_info(LEFT_OUT)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """An epoch, which `limit_train_batches` may end, does not begin the stream again."""
        if self.consumed and not trainer.overfit_batches:
            cast(Any, trainer.train_dataloader).start = self.consumed

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any) -> None:
        every = trainer.log_every_n_steps  # 0, as under `barebones`: never
        if every and trainer.global_step % every == 0:
            pl_module.log_dict(pl_module.logged_metrics())

    def save(self, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["lm"] = {"decoder": json.loads(json.dumps(asdict(module.config)))}  # plain values, for torch.load
        checkpoint.pop("optimizer_states", None)  # without a resume, they serve nothing

    def restore(self, module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning loads the weights, for an evaluation."""
        if module.trainer.state.fn == TrainerFn.FITTING:
            raise RequestError(
                "lightning.Trainer cannot resume a LanguageModule: lm.Trainer can; "
                "LanguageModule.load_from_checkpoint loads the weights alone"
            )
        if DecoderConfig(**checkpoint["lm"]["decoder"]) != module.config:
            raise RequestError("this is a checkpoint of another model: LanguageModule.load_from_checkpoint builds it")
