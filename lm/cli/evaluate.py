"""`lm evaluate`: accuracy of a checkpoint on tasks, and bits per byte on texts.

The result is kept with the run of the checkpoint: in `evaluations.jsonl`, in the registry, and in TensorBoard at the
checkpoint's step.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lm.cli.model_options import EvaluateOptions
from lm.data.text_files import find_files
from lm.evaluation import benchmark
from lm.evaluation.bits_per_byte import texts_bits_per_byte
from lm.evaluation.tasks import read_tasks
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.runs import registry
from lm.runs.evaluations import (
    Evaluation,
    describe_evaluation,
    evaluation_metrics,
    evaluation_record,
    merge_evaluations,
)
from lm.runs.resume import chosen_model
from lm.runs.run import Run
from lm.system.process import harmless

log = logging.getLogger(__name__)

Bar = Callable[..., None]  # takes a name, how much of it is done, and how much there is, where that is known


def evaluate(options: EvaluateOptions) -> None:
    def load() -> Pretrained:
        chosen = chosen_model(options.run, options.ckpt_path, options.root)
        return load_pretrained(chosen, options.device, options.dtype)

    evaluation = measure(options, load)
    if options.json:
        print(json.dumps(evaluation, ensure_ascii=False))
        return
    for line in (evaluation["model"], *describe_evaluation(evaluation), f"in {evaluation['seconds']:.1f} s"):
        if line:
            print(harmless(line))


def measure(options: EvaluateOptions, load: Callable[[], Pretrained]) -> dict[str, Any]:
    """What `lm evaluate --json` prints for a model, which is loaded only when tasks and texts are there."""
    questions = read_tasks(options.tasks, options.num_fewshot)
    for source in options.texts:
        find_files([source])
    model = load()
    owner = Run.of(model.path)
    began = time.monotonic()
    with progress_bars() as bar:
        choices = {name: getattr(options, name) for name in ("batch_tokens", "max_items", "begin")}
        results = benchmark.evaluate(model.decoder, model.tokenizer, questions, **choices, progress=bar)
        texts = measure_texts(model, owner, options, bar)
    settings = {name: getattr(options, name) for name in ("tasks", "texts", "max_items", "num_fewshot", "begin")}
    settings |= {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    by_task = {result.label: result.as_dict() for result in results}
    checkpoint = model.path.resolve().name
    evaluation = evaluation_record(model.step, checkpoint, by_task, benchmark.core(results), texts, settings)
    if owner is not None and model.step is not None:
        try:
            keep_evaluation(owner, evaluation)
        except OSError as error:
            log.warning("the evaluation is not kept with run %s: %s", owner.path, error)
    return evaluation | {"run": owner and owner.name, "model": str(model.path), "seconds": time.monotonic() - began}


def measure_texts(model: Pretrained, run: Run | None, options: EvaluateOptions, bar: Bar) -> dict[str, dict[str, Any]]:
    """The fields of `CorpusResult` of each text by a short name, in windows as long as those of the run's training."""
    seq_len = run.settings().get("data", {}).get("seq_len") if run else None
    limits = {"max_documents": options.max_items, "batch_tokens": options.batch_tokens}
    measure = partial(texts_bits_per_byte, model.decoder, model.tokenizer, text_key=options.text_key, seq_len=seq_len)
    return {
        name: asdict(measure([source], progress=partial(bar, name), **limits))
        for name, source in zip(short_names(options.texts), options.texts)
    }


def short_names(sources: Sequence[str]) -> list[str]:
    """The last part of each path that is not a pattern, without its suffix; the whole path where two are alike."""
    names = []
    for source in sources:
        plain = [part for part in source.removeprefix("embedded:").split("/") if part and not set(part) & set("*?[")]
        names.append(plain[-1].split(".")[0] if plain else "")
    return [name if name and names.count(name) == 1 else source for name, source in zip(names, sources, strict=True)]


@contextmanager
def progress_bars() -> Iterator[Bar]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def show(name: str, done: int, total: int | None = None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(harmless(name))
            progress.update(bars[name], completed=done, total=total)

        yield show


def keep_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Write an evaluation to the run's folder, to TensorBoard at its step, and to the registry.

    Points of later steps are written again after it: when a point of an earlier step follows, TensorBoard drops the
    later ones from a curve.
    """
    run.append("evaluations.jsonl", evaluation)
    evaluations = run.evaluations()
    points = {one["step"]: evaluation_metrics(merge_evaluations(evaluations, one["step"])) for one in evaluations}
    from lm.training.callbacks.tensorboard import EventFile  # Lightning takes seconds

    events = EventFile(run)
    for step in sorted(step for step in points if step >= evaluation["step"]):
        events.log_metrics(points[step], step)
    events.experiment.close()
    registry.record_run(run)
