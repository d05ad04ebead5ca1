"""The scores of lm-evaluation-harness beside ours: the same checkpoint, the same items, answer by answer.

    python tests/benchmarks/harness.py --checkpoint DIR [--tasks embedded:sotu] [--lm_eval COMMAND] [--output FILE]

DIR is a checkpoint folder, which the harness loads with transformers, on the CPU in fp32. The harness begins a prompt
with nothing, as our tokenizers add no beginning-of-sequence token, so ours is asked with `begin="nothing"`; its
`add_bos_token` changes nothing then. Solved examples are left out, as the harness draws others.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from lm.data.tokenizer import Tokenizer
from lm.evaluation.benchmark import TaskResult, evaluate
from lm.evaluation.prompts import chosen_items
from lm.evaluation.tasks import Item, Task, read_tasks
from lm.inference.pretrained import load_pretrained
from lm.model.decoder import Decoder

METRICS = {  # the harness's name of a metric -> the field of our `Outcome`
    "multiple_choice": {
        "acc": "right_harness_sum",
        "acc_norm": "right_harness_per_character",
        "acc_bytes": "right_harness_per_byte",
    },
    "schema": {"acc": "right_harness_sum"},
    "language_modeling": {"acc": "right_dclm"},
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Compare the scores of lm-evaluation-harness with ours.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--tasks", nargs="+", default=["embedded:sotu"], help="task files")
    parser.add_argument("--lm_eval", default="lm_eval", help="how the harness is called")
    parser.add_argument("--output", type=Path, help="file to write the JSON object to")
    options = parser.parse_args(arguments)
    found = compare(options.checkpoint, read_tasks(options.tasks, num_fewshot=0), shlex.split(options.lm_eval))
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def compare(checkpoint: Path, tasks: list[Task], lm_eval: list[str]) -> dict[str, Any]:
    """Scores of both, and the largest difference between their log-likelihoods, in nats.

    The checkpoint is one that transformers can load; no task has solved examples; `lm_eval` is the harness's command.
    """
    model = load_pretrained(checkpoint, "cpu", torch.float32)
    ours = {result.label: result for result in ask(model.decoder, model.tokenizer, tasks)}
    theirs = harness(checkpoint, tasks, lm_eval)
    return {"checkpoint": str(checkpoint)} | {
        task.label: _side_by_side(task, ours[task.label], theirs[task.label]) for task in tasks
    }


def ask(decoder: Decoder, tokenizer: Tokenizer, tasks: list[Task]) -> list[TaskResult]:
    """Our results, under the conditions of the harness."""
    return evaluate(decoder, tokenizer, tasks, begin="nothing")


def _side_by_side(task: Task, ours: TaskResult, samples: list[dict[str, Any]]) -> dict[str, Any]:
    places = {id(item): place for place, item in enumerate(task.items)}
    order = [places[id(item)] for item in chosen_items(task, None)]  # ours are asked in another order
    pairs = [(outcome, samples[place]) for outcome, place in zip(ours.outcomes, order, strict=True)]
    differences = [
        abs(mine - float(answer[0][0]))
        for outcome, sample in pairs
        for mine, answer in zip(outcome.log_likelihoods, sample["resps"], strict=True)
    ]
    found: dict[str, Any] = {"items": len(pairs), "answers": len(differences), "largest_difference": max(differences)}
    for metric, rule in METRICS[task.kind].items():
        mine = [getattr(outcome, rule) for outcome, _ in pairs]
        theirs = [bool(sample[metric]) for _, sample in pairs]
        found[metric] = {"ours": sum(mine) / len(mine), "harness": sum(theirs) / len(theirs)}
        found[metric]["items_that_differ"] = sum(a != b for a, b in zip(mine, theirs, strict=True))
    return found


def harness(checkpoint: Path, tasks: list[Task], lm_eval: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What the harness logs of every item: label -> items in the order of the file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for task in tasks:
            (place / f"{task.label}.yaml").write_text(yaml.safe_dump(_description(task, place)), encoding="utf-8")
        command = [
            *lm_eval, "--model", "hf", "--model_args", f"pretrained={checkpoint.resolve()},dtype=float32",
            "--tasks", ",".join(task.label for task in tasks), "--include_path", folder, "--device", "cpu",
            "--batch_size", "16", "--log_samples", "--output_path", f"{folder}/out",
        ]  # fmt: skip
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/home"}
        done = subprocess.run(command, env=os.environ | offline, stdout=sys.stderr, check=False)
        if done.returncode:
            sys.exit(f"harness.py: {shlex.join(command)} ended with {done.returncode}")
        return {task.label: _samples(place / "out", task.label) for task in tasks}


def _samples(folder: Path, label: str) -> list[dict[str, Any]]:
    [file] = folder.rglob(f"samples_{label}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted({sample["doc_id"]: sample for sample in samples}.values(), key=lambda sample: sample["doc_id"])


def _description(task: Task, folder: Path) -> dict[str, Any]:
    """A task as the harness describes one. What stands before the blank of the delimiter is of the question."""
    mark = task.continuation_delimiter.rstrip()
    blank = task.continuation_delimiter[len(mark) :]
    items = folder / f"{task.label}.jsonl"
    lines = (json.dumps(_item(task, item, mark, blank)) + "\n" for item in task.items)
    items.write_text("".join(lines), encoding="utf-8")
    columns = {
        "multiple_choice": {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"},
        "schema": {"doc_to_text": "gold", "doc_to_choice": "context_options", "doc_to_target": "continuation"},
        "language_modeling": {"doc_to_text": "context", "doc_to_target": "continuation"},
    }  # fmt: skip
    return columns[task.kind] | {
        "task": task.label, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test", "num_fewshot": 0, "target_delimiter": blank,
        "output_type": "loglikelihood" if task.kind == "language_modeling" else "multiple_choice",
        "metric_list": [{"metric": metric} for metric in METRICS[task.kind]],
    }  # fmt: skip


def _item(task: Task, item: Item, mark: str, blank: str) -> dict[str, Any]:
    if task.kind == "multiple_choice":
        return {**item, "query": item["query"] + mark}
    if task.kind == "schema":
        return {**item, "context_options": [option + mark for option in item["context_options"]]}
    # The harness puts no delimiter before what is not chosen from.
    return {**item, "context": item["context"].strip() + mark, "continuation": blank + item["continuation"]}


if __name__ == "__main__":
    main(sys.argv[1:])
