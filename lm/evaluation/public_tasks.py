"""Public benchmarks by their common names: `lm evaluate --tasks hellaswag,arc_easy`.

A benchmark is a data set of the Hugging Face Hub and a function from its rows to items of `evaluation/tasks`.
Names and wording are those of lm-evaluation-harness 0.4.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from lm.system.sources import list_files, open_file

Row = Mapping[str, Any]


class PublicTask(NamedTuple):
    """The source of a benchmark's rows, and the function that makes an item from a row."""

    dataset: str  # name on the Hub
    config: str
    split: str
    item: Callable[[Row], dict[str, Any]]

    @property
    def source(self) -> str:
        """The folder of its rows in Parquet, on the branch where the Hub converts every public data set."""
        return f"hf://datasets/{self.dataset}@refs/convert/parquet/{self.config}/{self.split}"

    def items(self) -> list[dict[str, Any]]:
        listing = list_files(self.source, patience=5.0)
        files = [open_file(listing.filesystem, file.path, listing.name(file)) for file in listing.files.values()]
        return [self.item(row) for file in files for row in pq.read_table(file).to_pylist()]


def _choose(query: str, choices: list[str], gold: int) -> dict[str, Any]:
    return {"query": query, "choices": choices, "gold": gold}


def _lettered(query: str, row: Row) -> dict[str, Any]:
    """The item of a row whose answers have letters or numbers as labels."""
    return _choose(query, row["choices"]["text"], row["choices"]["label"].index(row["answerKey"].strip()))


def _question(row: Row) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _arc(row: Row) -> dict[str, Any]:
    return _lettered(_question(row), row)


def _hellaswag(row: Row) -> dict[str, Any]:
    def clean(text: str) -> str:  # removes the markup of WikiHow's pages
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return _choose(query, [clean(ending) for ending in row["endings"]], int(row["label"]))


def _lambada(row: Row) -> dict[str, Any]:
    context, _, word = row["text"].rpartition(" ")
    return {"context": context, "continuation": word}


def _winogrande(row: Row) -> dict[str, Any]:
    before, _, after = row["sentence"].partition("_")
    options = [before + row[name] for name in ("option1", "option2")]
    return {"context_options": options, "continuation": after.strip(), "gold": int(row["answer"]) - 1}


def _copa(row: Row) -> dict[str, Any]:
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [f" {row[name][0].lower()}{row[name][1:]}" for name in ("choice1", "choice2")]  # after the usual blank
    return _choose(f"{row['premise'].strip()[:-1]} {link}", choices, row["label"])


def _commonsense_qa(row: Row) -> dict[str, Any]:
    letters = "ABCDE"
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, row["choices"]["text"], strict=True))
    question = f"Question: {row['question'].strip()}\n{listed}\nAnswer:"
    return _choose(question, list(letters), letters.index(row["answerKey"]))


def _piqa(row: Row) -> dict[str, Any]:
    return _choose(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"])


def _sciq(row: Row) -> dict[str, Any]:
    choices = [row[name] for name in ("distractor1", "distractor2", "distractor3", "correct_answer")]
    return _choose(f"{row['support'].lstrip()}\n{_question(row)}", choices, 3)


def _boolq(row: Row) -> dict[str, Any]:
    return _choose(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], int(row["label"]))


PUBLIC_TASKS = {
    "arc_challenge": PublicTask("allenai/ai2_arc", "ARC-Challenge", "test", _arc),
    "arc_easy": PublicTask("allenai/ai2_arc", "ARC-Easy", "test", _arc),
    "boolq": PublicTask("aps/super_glue", "boolq", "validation", _boolq),
    "commonsense_qa": PublicTask("tau/commonsense_qa", "default", "validation", _commonsense_qa),
    "copa": PublicTask("aps/super_glue", "copa", "validation", _copa),
    "hellaswag": PublicTask("Rowan/hellaswag", "default", "validation", _hellaswag),
    "lambada_openai": PublicTask("EleutherAI/lambada_openai", "default", "test", _lambada),
    "openbookqa": PublicTask("allenai/openbookqa", "main", "test", lambda row: _lettered(row["question_stem"], row)),
    "piqa": PublicTask("baber/piqa", "default", "validation", _piqa),
    "sciq": PublicTask("allenai/sciq", "default", "test", _sciq),
    "winogrande": PublicTask("allenai/winogrande", "winogrande_xl", "validation", _winogrande),
}
