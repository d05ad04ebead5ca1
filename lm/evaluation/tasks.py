"""Tasks: questions with their right answers, in the file format of DCLM's `eval_bundle` (arXiv:2406.11794).

A YAML lists tasks under `icl_tasks:`, each with its `label`, its file of items (`dataset_uri`, beside the YAML or below
`eval_data/` beside it), `icl_task_type`, `num_fewshot` and `continuation_delimiter`; `eval_meta_data.csv` beside it
has the percentage that guessing gets. Next, `evaluation/prompts` encodes items as tokens.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from lm.errors import RequestError
from lm.evaluation.public_tasks import PUBLIC_TASKS
from lm.system.parsing import DAMAGE_ERRORS, parse_line, parse_yaml

EMBEDDED = "embedded:"
BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"  # the copy that nanochat uses
FETCH_BUNDLE = f"curl -O {BUNDLE} && unzip eval_bundle.zip"
SHIPPED = Path(__file__).parent.parent / "data" / "tasks"

Kind = Literal["multiple_choice", "schema", "language_modeling"]

# The columns of the items of each kind, and their types.
COLUMNS: dict[Kind, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
CHOSEN_FROM = {"multiple_choice": "choices", "schema": "context_options"}
KEYS = ("label", "dataset_uri", "num_fewshot", "icl_task_type", "continuation_delimiter", "has_categories")

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A list of questions with their right answers.

    Items of `multiple_choice` have a `query`, `choices` and the index of the right choice, `gold`; items of `schema`
    have several `context_options`, of which the right one, `gold`, makes the `continuation` most probable; items of
    `language_modeling` have a `context` and its `continuation`.
    """

    label: str
    kind: Kind
    items: tuple[Item, ...]  # in the order of the file
    num_fewshot: int  # examples before each question
    continuation_delimiter: str  # between a question and its answer
    baseline: float  # expected accuracy of guessing
    source: str  # the file of the items


def read_tasks(paths: Sequence[str], num_fewshot: int | None = None) -> list[Task]:
    """Read the tasks of files, in order; one with several numbers of few-shot examples becomes `LABEL_Nshot` each.

    A path is a YAML with `icl_tasks:`, a `.jsonl` or `.parquet` file of items, whose kind follows from its columns,
    `embedded:sotu`, or the name of a public benchmark, which is read from the Hugging Face Hub. `num_fewshot` replaces
    the number of the files, which is 0 for a file of items.
    """
    known: dict[str, Task] = {}
    names = (name for path in paths for name in ([path] if Path(path).exists() else path.split(",")))
    for task in (task for name in names for task in _read(name, num_fewshot)):
        if task.label in known:
            raise RequestError(
                f"two tasks are called {task.label!r}, in {known[task.label].source} and {task.source}: rename one"
            )
        known[task.label] = task
    return list(known.values())


def _read(path: str, num_fewshot: int | None) -> Iterator[Task]:
    if path in PUBLIC_TASKS and not Path(path).exists():
        public = PUBLIC_TASKS[path]
        yield _task(path, None, public.items(), num_fewshot or 0, " ", None, public.source)
        return
    file = SHIPPED / f"{path.removeprefix(EMBEDDED)}.yaml" if path.startswith(EMBEDDED) else Path(path)
    if not file.is_file():
        names = ", ".join(f"{EMBEDDED}{known.stem}" for known in sorted(SHIPPED.glob("*.yaml")))
        raise RequestError(
            f"tasks {path}: no such file; give {names}, a benchmark ({', '.join(PUBLIC_TASKS)}), a .jsonl or .parquet "
            f"file of your items, or a YAML such as eval_bundle/core.yaml: `{FETCH_BUNDLE}`"
        )
    if file.suffix in (".yaml", ".yml"):
        yield from _from_yaml(file, num_fewshot)
    elif file.suffix in (".jsonl", ".parquet"):
        yield _task(file.stem, None, _items(file), num_fewshot or 0, " ", None, file)
    else:
        raise RequestError(f"tasks {path}: expected a YAML with icl_tasks, a .jsonl or a .parquet file")


# ---- a YAML ---------------------------------------------------------------------------------------------------------


def _from_yaml(file: Path, num_fewshot: int | None) -> Iterator[Task]:
    try:
        entries = [dict(entry) for entry in parse_yaml(file.read_bytes())["icl_tasks"]]
    except (OSError, *DAMAGE_ERRORS) as error:
        raise RequestError(f"{file} cannot be read: expected a list of tasks under icl_tasks ({error})") from error
    baselines = _baselines(file.parent / "eval_meta_data.csv")
    for entry in entries:
        place = f"{file}, task {entry.get('label')!r}"
        if unknown := [key for key in entry if key not in KEYS]:
            raise RequestError(f"{place}: {', '.join(map(repr, unknown))} is not known here; remove it")
        if (kind := entry.get("icl_task_type")) not in COLUMNS:
            raise RequestError(f"{place}: icl_task_type {kind!r} is none of {', '.join(COLUMNS)}")
        requested = entry.get("num_fewshot", 0) if num_fewshot is None else num_fewshot
        label, source = str(entry["label"]), _source(file.parent, entry["dataset_uri"], place)
        shots = requested if isinstance(requested, list) else [requested]
        items = _items(source)
        for count in shots:
            name = label if len(shots) == 1 else f"{label}_{count}shot"
            yield _task(
                name, kind, items, count, entry.get("continuation_delimiter", " "), baselines.get(label), source
            )


def _source(folder: Path, uri: str, place: str) -> Path:
    """The file of items, which must be inside the folder of the YAML."""
    for base in (folder, folder / "eval_data"):
        file = (base / uri).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise RequestError(f"{place}: dataset_uri {uri} leads out of {folder}; move the file into it")
        if file.is_file():
            return file
    raise RequestError(f"{place}: there is no {uri} in {folder} or {folder / 'eval_data'}")


def _baselines(file: Path) -> dict[str, float]:
    """Label -> expected accuracy of guessing, from a table of percentages; empty if there is no table."""
    if not file.exists():
        return {}
    with open(file, encoding="utf-8", newline="") as table:
        return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(table)}


# ---- a file of items -------------------------------------------------------------------------------------------------


def _items(file: Path) -> list[Item]:
    if file.suffix == ".parquet":
        items: list[Item] = pq.read_table(file).to_pylist()
    else:
        lines = [(number, line) for number, line in enumerate(file.read_bytes().split(b"\n"), start=1) if line.strip()]
        items = [parse_line(line) for _, line in lines]
        if {} in items:
            raise RequestError(f"{file}, line {lines[items.index({})][0]}: not a JSON object on one line")
    if not items:
        raise RequestError(f"{file} has no items")
    return items


def _kind(item: Item, source: Path | str) -> Kind:
    for kind, columns in COLUMNS.items():
        if columns.keys() <= item.keys():
            return kind
    expected = "; or ".join(", ".join(columns) for columns in COLUMNS.values())
    raise RequestError(f"{source}: its columns are {', '.join(item)}; a task has {expected}")


def _task(
    label: str,
    kind: Kind | None,
    items: list[Item],
    num_fewshot: int,
    delimiter: str,
    baseline: float | None,
    source: Path | str,
) -> Task:
    kind = kind or _kind(items[0], source)
    for number, item in enumerate(items, start=1):
        _check(item, kind, f"{source}, item {number}")
    if baseline is None:  # mean of 1 / number of answers; guessing never writes a text
        options = CHOSEN_FROM.get(kind)
        baseline = sum(1 / len(item[options]) for item in items) / len(items) if options else 0.0
    return Task(label, kind, tuple(items), num_fewshot, delimiter, baseline, str(source))


def _check(item: Item, kind: Kind, place: str) -> None:
    for column, expected in COLUMNS[kind].items():
        value = item.get(column)
        if type(value) is not expected:
            raise RequestError(f"{place}: {column!r} of {kind} must be of type {expected.__name__}, got {value!r:.40}")
    if kind == "language_modeling":
        if not item["continuation"].strip():
            raise RequestError(f"{place}: the continuation is empty")
        return
    options = item[CHOSEN_FROM[kind]]
    if len(options) < 2 or not all(isinstance(option, str) for option in options):
        raise RequestError(f"{place}: two texts or more are needed to choose from, got {options!r:.60}")
    if not all(options if kind == "multiple_choice" else [item["continuation"]]):
        raise RequestError(f"{place}: an answer is empty")
    if not 0 <= item["gold"] < len(options):
        raise RequestError(f"{place}: gold {item['gold']} is not one of {len(options)} answers, counted from 0")
