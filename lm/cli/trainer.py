"""`lm.Trainer`: the Trainer of a Python program, with the run folder, checkpoints and guards of `lm fit`."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from lm.cli.fit import check_one_device_in_notebook, in_notebook, log_resumable_run, quiet_lightning
from lm.cli.start_checks import StartChecks
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.runs.config_diff import describe_changes
from lm.runs.find import find_run
from lm.runs.resume import check_config_changes, find_checkpoint
from lm.system import process
from lm.system.dataclass_arguments import build_options
from lm.system.process import ConsoleHandler
from lm.system.stop_signals import STOP
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.callbacks.summary import Summary
from lm.training.checks import check_parts, kind_of
from lm.training.config import RunOptions, TrainerConfig, sections_of_callbacks
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer as BareTrainer


class Trainer(BareTrainer):
    """`training/trainer.Trainer` with all that `lm fit` does: a run folder, checkpoints, guards, signals, resume.

    Args:
        run: name of the run.
        about: tags, a note, and what to do at the end of the run.
        callbacks: additional callbacks.
        options: the fields of `training/config.TrainerConfig`, as under `trainer` in a config, but with 0 for
            `stop_within` if it is not given; and other sections of a config, such as `guards=GuardsConfig(...)`,
            `samples`, `evaluation`.
    """

    def __init__(
        self, run: str = "run", *, about: RunOptions | None = None, callbacks: Sequence[Callback] = (), **options: Any
    ) -> None:
        sections = sections_of_callbacks(options)
        trainer_options = {name: value for name, value in options.items() if name not in sections}
        trainer_options.setdefault("stop_within", 0.0)  # the program around it does not end with the run
        config = build_options(TrainerConfig, "lm.Trainer", **trainer_options)
        self._name, self._sections, self._about = run, sections, about or RunOptions()
        quiet_lightning()
        self._folder = RunFolder(None, run, "", options=self._about)
        self._checks = StartChecks(sections)
        standard = standard_callbacks(config, self._folder, sections)
        super().__init__(**vars(replace(config, callbacks=[*callbacks, *standard, Summary(), self._checks])))

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        force: bool = False,
    ) -> None:
        """Train a `LanguageModule` on a `DataModule`; on several devices all processes run the same script.

        `ckpt_path`, `force` and the errors are those of `lm.fit`.
        """
        check_one_device_in_notebook(self)
        check_parts(model, datamodule)
        if self.run is not None and ckpt_path is None:
            raise RequestError(f"this Trainer has trained run {self.run.path}: make another lm.Trainer for another run")
        reference = None if ckpt_path is None else str(ckpt_path)
        auto, root = reference == "auto", self.default_root_dir
        if reference is None:
            log_resumable_run(root, self._name)
        checkpoint, resumed = find_checkpoint(reference, self._name, root, named=auto, command="fit")
        seed = os.environ.get("PL_GLOBAL_SEED")  # of lightning.seed_everything
        seq_len = datamodule.options.seq_len or model.config.max_position_embeddings
        datamodule.set_position(seed=None if seed is None else int(seed), seq_len=seq_len)
        config = self._config(model, datamodule)
        changed = check_config_changes(resumed, config, force) if resumed and checkpoint else {}
        self._folder.resume(resumed, auto, yaml.safe_dump({"run": self._name, **config}, sort_keys=False))
        self._checks.set_run(resumed, force, describe_changes(resumed, changed))
        self.load_with(optimizer=True, verified=checkpoint, other_model=force, new_run=resumed is None)
        with class_of_models(type(model)), logging_to_console(), STOP.borrowed():
            try:
                super().fit(model, datamodule, ckpt_path=checkpoint and str(checkpoint))
            finally:
                self._folder.announce_end()

    def _config(self, model: LanguageModule, data: DataModule) -> dict[str, Any]:
        """What this run was made with, as a config of `lm fit` has it, without callbacks and loggers: objects."""
        from lm.model.custom import plain_arguments

        trainer = asdict(replace(self.options, callbacks=None, logger=None))
        options = asdict(model.options) | plain_arguments(type(model), model.hparams)
        sections = {name: asdict(section) for name, section in self._sections.items()}
        config = {"seed_everything": data.seed, "trainer": trainer, "model": options}
        config |= {"data": asdict(data.options) | {"seq_len": data.seq_len}, **sections, **asdict(self._about)}
        return json.loads(json.dumps(config, default=str))

    def validate(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Measure the validation loss of the model as it is, or of a checkpoint of the run: `best`, `last`, a folder.

        Returns:
            `val/loss` in nats a token, `val/bpb` in bits per byte, `val/perplexity`.
        """
        return self._evaluate(super().validate, model, datamodule, ckpt_path)

    def test(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """As `validate`, on all of the test data: `test/loss` and so on."""
        return self._evaluate(super().test, model, datamodule, ckpt_path)

    def _evaluate(
        self,
        stage: Callable[..., list[Mapping[str, float]]],
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None,
    ) -> dict[str, float]:
        if ckpt_path in ("best", "last"):
            owner = self.run or find_run(self._name, self.default_root_dir)
            ckpt_path = owner.checkpoint(str(ckpt_path))
        check_parts(model, datamodule)
        datamodule.set_position(seq_len=datamodule.options.seq_len or model.config.max_position_embeddings)
        self.load_with(optimizer=False)
        stage(model, datamodule=datamodule, ckpt_path=ckpt_path and str(ckpt_path), verbose=False)
        return {name: value.item() for name, value in self.callback_metrics.items()}


@contextmanager
def class_of_models(kind: type | None) -> Iterator[None]:
    """Inside the `with`, models are built by this subclass of `LanguageModule`, if one is given."""
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, LanguageModule)):
        raise RequestError(f"module is {kind_of(kind)}, and has to be a subclass of lm.LanguageModule")
    before = process.module_class
    process.module_class = kind or before
    try:
        yield
    finally:
        process.module_class = before


@contextmanager
def logging_to_console() -> Iterator[None]:
    """Inside the `with`, progress is printed as the commands print it, where the program has set up no logging."""
    # A notebook shows standard error as if it were errors.
    logger, handler = logging.getLogger("lm"), ConsoleHandler("stdout" if in_notebook() else "stderr")
    if logger.hasHandlers() or logger.level != logging.NOTSET:
        yield
        return
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
