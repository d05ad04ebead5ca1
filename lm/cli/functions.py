"""What the commands do, in Python: `lm.prepare`, `lm.fit`, `lm.evaluate` and `lm.generate`, which return values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule

from lm.cli.config_files import find_config, read_config
from lm.cli.fit import fit as train
from lm.cli.options import all_options, option_groups
from lm.cli.request import make_request
from lm.cli.settings import check_names, combine, dotted
from lm.cli.trainer import class_of_models, logging_to_console
from lm.data.config import PrepareOptions
from lm.runs.run import Run
from lm.system.dataclass_arguments import build_options
from lm.system.process import import_from_working_directory
from lm.system.stop_signals import STOP

if TYPE_CHECKING:
    import torch

    from lm.inference.completion import Written
    from lm.inference.pretrained import Pretrained


def prepare(input: str | Sequence[str], output: str | Path, **options: Any) -> dict[str, Any]:
    """Tokenize texts into a folder of Parquet shards, as `lm data prepare` does; a finished folder is left unchanged.

    Args:
        input: files, folders, globs or URLs of text, or `embedded:sotu`.
        output: the folder to create.
        options: other options of `lm data prepare`, such as `vocab_size`.

    Returns:
        The folder's manifest: `splits` with the tokens, documents and bytes of each, and the inputs it was made from.
    """
    from lm.data.prepare import prepare as make_shards

    inputs = [input] if isinstance(input, str) else list(input)
    config = build_options(PrepareOptions, "lm.prepare", input=inputs, output=str(output), **options)
    with logging_to_console():
        return make_shards(config)


def fit(
    config: str | Path | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    run: str | None = None,
    ckpt_path: str | Path | None = None,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
    module: type[LightningModule] | None = None,
) -> Run:
    """Train a model in this process, as `lm fit` does.

    Ctrl-C, or a notebook's interrupt button, ends it with a checkpoint after the current optimizer step, however long
    that step takes (`trainer.stop_within` is 0 unless it is given here).

    Args:
        config: a YAML file, which is looked up in `configs/` too; or its content.
        options: overrides of the config: `{"trainer.max_steps": 100}`, or `{"trainer": {"max_steps": 100}}`.
        run: name of the run; by default that of the file, or `run`.
        ckpt_path: a checkpoint to resume from: a folder, `best`, `last`, or `auto`, the newest one there is.
        force: train even if `lm plan` finds an error, and resume even if the config differs from the run's.
        callbacks: additional callbacks, besides those of the config.
        module: for a custom model, its subclass of `LanguageModule`; the one given to `lm.run` if not given.

    Returns:
        The run; `run.checkpoint()` is its best checkpoint, and `run.metrics("val/loss")` its validations.

    Raises:
        RequestError: the config is wrong, or a guard of `lm plan` refuses it.
        GuardStop: a guard has stopped the run. RunError: it failed. Interrupted: a signal ended it; `auto` resumes.
    """
    groups = option_groups(option.name for option in all_options("fit"))
    typed = {"trainer.stop_within": 0.0, **dict(dotted(_plain(options or {}), groups))}
    typed |= {name: str(value) for name, value in {"run": run, "ckpt_path": ckpt_path}.items() if value is not None}
    with class_of_models(module), logging_to_console(), STOP.borrowed():
        import_from_working_directory()
        if isinstance(config, Mapping):
            name, document = "run", _plain(config)
        else:
            file = find_config(str(config))
            name, document = file.stem, read_config(file)
        check_names("fit", dict.fromkeys(typed, "").items(), {f"{name}.yaml": document})
        request = make_request("fit", combine("fit", [document], [*typed.items(), ("force", force)]), name)
        return train(request, callbacks)  # pyright: ignore[reportReturnType]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a YAML file has them: a path as text, a number of numpy or torch as one of Python."""
    text = json.dumps(settings, default=lambda value: value.item() if hasattr(value, "item") else str(value))
    return json.loads(text)


def evaluate(
    model: "str | Path | Pretrained",
    *,
    tasks: str | Sequence[str] = (),
    texts: str | Sequence[str] = (),
    device: "str | torch.device | None" = None,
    module: type[LightningModule] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model on tasks or texts, as `lm evaluate` does, and store the result with its run.

    Args:
        model: name or folder of a run, whose best checkpoint is used; a checkpoint; or a loaded model.
        tasks, texts, options: those of `lm evaluate`, such as `max_items` and `num_fewshot`.
        device: device to compute on, if `model` is not loaded; the GPU if there is one.
        module: for a custom model that is not loaded, its subclass of `LanguageModule`.

    Returns:
        What `lm evaluate --json` prints: `tasks`, each with accuracy and confidence interval, `texts` with bits per
        byte, and `core` if all tasks of a suite were evaluated.
    """
    from lm.cli.evaluate import measure
    from lm.cli.model_options import EvaluateOptions
    from lm.inference.pretrained import Pretrained, load_pretrained

    tasks, texts = ([each] if isinstance(each, str) else list(each) for each in (tasks, texts))
    config = build_options(EvaluateOptions, "lm.evaluate", tasks=tasks, texts=texts, **options)
    return measure(
        config, lambda: model if isinstance(model, Pretrained) else load_pretrained(model, device, module=module)
    )


def generate(
    model: "str | Path | Pretrained",
    prompts: str | Sequence[str],
    *,
    module: type[LightningModule] | None = None,
    **options: Any,
) -> "list[Written]":
    """Continue prompts, as `lm generate` does.

    Args:
        model: name or folder of a run, whose best checkpoint is used; a checkpoint; or a loaded model.
        prompts: one text or several.
        module: for a custom model that is not loaded, its subclass of `LanguageModule`.
        options: options of `Pretrained.generate`: `max_new_tokens`, `sampling`, `stop`, `seed` and so on.

    Returns:
        For each prompt: `text`, the continuation without the prompt; its tokens; and why it ended.
    """
    from lm.inference.pretrained import Pretrained, load_pretrained

    loaded = model if isinstance(model, Pretrained) else load_pretrained(model, module=module)
    return loaded.generate(prompts, **options)
