"""Tasks are asked as DCLM asks them, whatever the batches; intervals mean what they say; bits per byte are exact."""

import json
import math
import random
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from decoders import SHAPES, SMALL, trained_like, write_huggingface
from make_sotu_tasks import CORPUS, write_tasks
from transformers import AutoModelForCausalLM

from lm.data.config import PrepareOptions
from lm.data.documents import read_documents
from lm.data.encode import split_hash
from lm.data.prepare import prepare
from lm.data.text_batches import text_batches
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError, RunError
from lm.evaluation.benchmark import Outcome, TaskResult, core, evaluate
from lm.evaluation.bits_per_byte import texts_bits_per_byte
from lm.evaluation.metrics import TokenLoss
from lm.evaluation.prompts import chosen_items, render, tokenize
from lm.evaluation.statistics import Interval, centered, mean_interval, ratio_error, standard_error, wilson
from lm.evaluation.tasks import SHIPPED, Task, read_tasks
from lm.model.decoder import Decoder

WORDS = "the war of a peace and law in our time was made by men who had no fear to say it".split()


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def make_tasks(folder: Path, shots: int = 2, items: int = 14) -> Path:
    """A YAML with a task of each kind, of sentences without sense."""
    draw = random.Random(3)
    made = {
        "multiple_choice": [
            {"query": sentence(draw, 5), "choices": [sentence(draw, 3) + end for end in ("a", "bet", "éé")], "gold": 1}
            for _ in range(items)
        ],
        "schema": [
            {"context_options": [sentence(draw, 3), sentence(draw, 4)], "continuation": sentence(draw, 2), "gold": 0}
            for _ in range(items)
        ],
        "language_modeling": [
            {"context": sentence(draw, 6) + " ", "continuation": sentence(draw, 1)} for _ in range(items)
        ],
    }
    (folder / "eval_data").mkdir(parents=True)
    entries = ""
    for kind, lines in made.items():
        (folder / "eval_data" / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        entries += f"- label: {kind}_x\n  dataset_uri: {kind}.jsonl\n  num_fewshot: [{shots}]\n"
        entries += f"  icl_task_type: {kind}\n"
    entries = entries.replace("multiple_choice\n-", 'multiple_choice\n  continuation_delimiter: "\\nAnswer: "\n-')
    (folder / "tasks.yaml").write_text(f"icl_tasks:\n{entries}")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Task Category,Random baseline\nschema_x,words,50\n")
    return folder / "tasks.yaml"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_char([" ".join(WORDS), "\nAnswer: é"])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[Task]:
    return read_tasks([str(make_tasks(tmp_path_factory.mktemp("tasks")))])


def decoder_of(tokenizer: Tokenizer, **changes) -> Decoder:
    return trained_like(replace(SMALL, vocab_size=tokenizer.vocab_size, max_position_embeddings=512, **changes))


# ---- how sure -------------------------------------------------------------------------------------------------------
def test_wilson_intervals_are_those_of_the_paper():
    """Values of the score interval as Newcombe (1998, Statistics in Medicine 17, table I) prints them."""
    for right, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
                                    (1, 29, 0.0061, 0.1718), (29, 29, 0.8830, 1)):  # fmt: skip
        interval = wilson(right, total)
        assert interval.low == pytest.approx(low, abs=5e-5) and interval.high == pytest.approx(high, abs=5e-5)


def test_standard_errors_are_the_spread_of_repeated_draws():
    draw = np.random.default_rng(0)
    rights = draw.binomial(50, 0.3, size=4000)
    assert np.mean([standard_error(right, 50) for right in rights]) == pytest.approx(np.std(rights / 50), rel=0.05)
    sizes = draw.integers(10, 200, size=(4000, 60))
    nats = sizes * 2.0 + draw.normal(0, 9, size=sizes.shape)
    errors = [ratio_error(a, b) for a, b in zip(nats, sizes, strict=True)]
    assert np.mean(errors) == pytest.approx(np.std(nats.sum(1) / sizes.sum(1)), rel=0.05)
    assert ratio_error(np.array([2.0, 4.0]), np.ones(2)) == pytest.approx(1)  # as that of a mean of two
    assert math.isnan(ratio_error(np.ones(1), np.ones(1))) and standard_error(1, 1) == math.inf


def test_the_interval_of_a_mean_is_as_lopsided_as_those_of_its_parts():
    """Each side is half of the root of the sum of their squares."""
    low, high = mean_interval([0.1, 0.5], [Interval(0.07, 0.2), Interval(0.46, 0.74)])
    assert (0.3 - low, high - 0.3) == (pytest.approx(0.05 / 2), pytest.approx(0.26 / 2))


# ---- files of tasks -------------------------------------------------------------------------------------------------
def test_a_bundle_of_tasks_is_read_with_its_baselines(tmp_path):
    choice, schema, language = read_tasks([str(make_tasks(tmp_path))])
    assert (choice.label, choice.kind, choice.num_fewshot) == ("multiple_choice_x", "multiple_choice", 2)
    assert choice.continuation_delimiter == "\nAnswer: " and schema.continuation_delimiter == " "
    assert (choice.baseline, schema.baseline, language.baseline) == (pytest.approx(1 / 3), 0.5, 0)
    assert len(language.items) == 14
    assert [task.num_fewshot for task in read_tasks([str(tmp_path / "tasks.yaml")], num_fewshot=0)] == [0, 0, 0]
    file = tmp_path / "tasks.yaml"
    file.write_text(file.read_text().replace("[2]", "[0, 3]"))
    found = read_tasks([str(file)])
    assert [task.label for task in found[1:4]] == ["multiple_choice_x_3shot", "schema_x_0shot", "schema_x_3shot"]
    assert found[3].baseline == 0.5 and len(read_tasks([str(file)], num_fewshot=1)) == 3


def test_a_file_of_items_alone_tells_its_kind_by_its_columns(tmp_path):
    make_tasks(tmp_path)
    for kind in ("multiple_choice", "schema", "language_modeling"):
        jsonl = tmp_path / "eval_data" / f"{kind}.jsonl"
        [task] = read_tasks([str(jsonl)])
        assert (task.label, task.kind, task.num_fewshot) == (kind, kind, 0)
        pq.write_table(pa.Table.from_pylist(list(task.items)), tmp_path / "other.parquet")
        [same] = read_tasks([str(tmp_path / "other.parquet")])
        assert same.items == task.items and same.label == "other"


@pytest.mark.parametrize("change, message", [
    (("dataset_uri: schema.jsonl", "dataset_uri: ../../schema.jsonl"), "leads out of"),
    (("dataset_uri: schema.jsonl", "dataset_uri: /etc/hosts"), "leads out of"),
    (("dataset_uri: schema.jsonl", "dataset_uri: nowhere.jsonl"), "there is no nowhere.jsonl"),
    (("icl_task_type: schema", "icl_task_type: generation"), "'generation' is none of multiple_choice"),
    (("num_fewshot: [2]", "num_fewshots: [2]"), "'num_fewshots' is not known here"),
    (("label: schema_x", "label: multiple_choice_x"), "two tasks are called 'multiple_choice_x'"),
    (("icl_tasks:", "tasks:"), "expected a list of tasks under icl_tasks"),
    (("icl_tasks:", "icl_tasks: {"), "cannot be read"),
])  # fmt: skip
def test_a_wrong_file_of_tasks_is_one_clear_line(tmp_path, change, message):
    file = make_tasks(tmp_path / "here")
    shutil.copy(tmp_path / "here/eval_data/schema.jsonl", tmp_path / "schema.jsonl")
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(RequestError, match=message) as error:
        read_tasks([str(file)])
    assert "\n" not in str(error.value)


ITEM = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'  # a good one
WRONG_LINES = [
    ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "item 2: gold 2 is not one of 2"),
    ('{"query": "a", "choices": ["b"], "gold": 0}', "item 2: two texts or more"),
    ('{"query": "a", "choices": ["b", 3], "gold": 0}', "item 2: two texts or more"),
    ('{"query": "a", "choices": ["b", ""], "gold": 0}', "item 2: an answer is empty"),
    ('{"query": "a", "choices": ["b", "c"]}', "item 2: 'gold' of multiple_choice must be of type int"),
    ('{"query": "a", ', "line 2: not a JSON object"),
    ("[1]", "line 2: not a JSON object"),
]


@pytest.mark.parametrize("name, content, message", [
    ("gone.yaml", None, "no such file"), ("empty.jsonl", "", "has no items"),
    ("other.jsonl", '{"text": "a"}\n', "its columns are text"),
    ("embedded:nothing", None, "give embedded:sotu"),
    *(("items.jsonl", ITEM + line, message) for line, message in WRONG_LINES),
])  # fmt: skip
def test_a_wrong_file_or_item_is_named_with_its_place(here, name, content, message):
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(RequestError, match=message):
        read_tasks([name])


# ---- prompts and scores ---------------------------------------------------------------------------------------------
def test_prompts_read_as_dclm_writes_them(tasks, tokenizer):
    """Other items of the task, drawn by the item's number, then the question; a blank line between them."""
    items = chosen_items(tasks[0], None)
    solved = [items[i] for i in random.Random(1234 + 5).sample([i for i in range(14) if i != 5], 2)]
    expected = "".join(f"{item['query']}\nAnswer: {item['choices'][1]}\n\n" for item in solved)
    answers = tokenize(tasks[0].kind, render(tasks[0], items, 5), tokenizer, 512, "eos")
    for prompt, choice in zip(answers, items[5]["choices"], strict=True):
        text = f"{expected}{items[5]['query']}\nAnswer: {choice}"
        assert prompt.ids.tolist() == [tokenizer.eos_id, *tokenizer.encode(text)] and prompt.cut == 0
        assert tokenizer.decode(prompt.ids[prompt.harness_start :]) == " " + choice and prompt.answer == choice
    twice = [*items, *items[:5]]  # an item that is there again is not among its own examples: it has the answer
    for index in range(5):
        (before, _), *_ = render(tasks[0], twice, index)
        assert before.count(items[index]["query"]) == 1
    shuffled = list(tasks[0].items)
    random.Random(1337).shuffle(shuffled)
    assert chosen_items(tasks[0], 6) == shuffled[:6]


@pytest.mark.parametrize("kind, texts", [
    ("multiple_choice", [("The sky is", " blue"), ("The sky is", " blue and red")]),
    ("multiple_choice", [("The sky is", " blue"), ("The sky is", " blue")]),
    ("schema", [("The sky is", " blue"), ("I say that the sky is", " blue")]),
])  # fmt: skip
def test_every_answer_has_a_token_that_is_scored(tokenizer, kind, texts):
    """Also an answer that is the beginning of another, and a prompt that is the end of another."""
    for context in (512, 1):
        for prompt in tokenize(kind, texts, tokenizer, context, "nothing"):
            assert 1 <= prompt.start and max(prompt.start, prompt.dclm_start, prompt.harness_start) < len(prompt.ids)


def pairs_of(task: Task, item) -> list[tuple[str, str]]:
    """Each possible answer of an item after what stands before it."""
    if task.kind == "multiple_choice":
        return [(item["query"], choice) for choice in item["choices"]]
    contexts = [item["context"].strip()] if task.kind == "language_modeling" else item["context_options"]
    return [(context, item["continuation"]) for context in contexts]


def naive(theirs, tokenizer: Tokenizer, task: Task, context: int, begin: str):
    """The same answers by transformers, one prompt after the other, put down as DCLM's rules say."""
    items, mark = list(task.items), task.continuation_delimiter
    random.Random(1337).shuffle(items)
    for number, item in enumerate(items):
        others = [i for i in range(len(items)) if i != number]
        drawn = [items[i] for i in random.Random(1234 + number).sample(others, task.num_fewshot)]
        lead = "".join(mark.join(pairs_of(task, one)[one.get("gold", 0)]) + "\n\n" for one in drawn)
        pairs = [(lead + before + mark, answer) for before, answer in pairs_of(task, item)]
        start = [tokenizer.eos_id] * (begin == "eos")
        rows = [start + tokenizer.encode(before + answer) for before, answer in pairs]
        means, sums, greedy = [], [], []
        for row, (before, _) in zip(rows, pairs, strict=True):
            own = len(start) + len(tokenizer.encode(before.rstrip()))
            if task.kind == "multiple_choice":
                first = next(i for i in range(len(row)) if len({r[i] if i < len(r) else -1 for r in rows}) > 1)
                first = min(first, min(map(len, rows)) - 1)
            elif task.kind == "schema":
                ends = [r[::-1] for r in rows]
                first = len(row) - next(i for i in range(len(row)) if len({e[i] for e in ends if i < len(e)}) > 1)
            else:
                first = own
            cut = max(0, len(row) - context - 1)
            row, first, own = row[cut:], max(1, first - cut), max(1, own - cut)
            with torch.no_grad():
                logits = theirs(torch.tensor([row[:-1]])).logits[0]  # (T, V)
            costs = F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
            means.append(costs[first - 1 :].mean().item())
            sums.append(-costs[own - 1 :].sum().item())
            greedy.append(bool((logits.argmax(-1)[own - 1 :] == torch.tensor(row[own:])).all()))
        if task.kind == "language_modeling":
            yield greedy[0], sums, None, None, None
        else:
            answers = [answer for _, answer in pairs]
            lengths = [1] * len(answers), map(len, answers), (len(answer.encode()) for answer in answers)
            norms = [[total / length for total, length in zip(sums, each, strict=True)] for each in lengths]
            gold = item["gold"]
            yield means.index(min(means)) == gold, sums, *(norm.index(max(norm)) == gold for norm in norms)


def by_harness(outcome: Outcome) -> tuple[bool | None, ...]:
    return outcome.right_harness_sum, outcome.right_harness_per_character, outcome.right_harness_per_byte


@pytest.mark.parametrize("shape", ["llama, untied, grouped heads", "qwen3, windows"])
@pytest.mark.parametrize(("context", "begin"), [(512, "eos"), (512, "nothing"), (40, "eos")])
def test_scores_are_those_of_transformers_by_the_rules_of_dclm(tasks, tokenizer, tmp_path, shape, context, begin):
    """Item by item: what is right by DCLM's rule and the three of lm-evaluation-harness, and every log-likelihood."""
    config = replace(SHAPES[shape], vocab_size=tokenizer.vocab_size, max_position_embeddings=context)
    decoder = trained_like(config)
    theirs = AutoModelForCausalLM.from_pretrained(write_huggingface(decoder, tmp_path)).eval()
    for task, result in zip(tasks, evaluate(decoder, tokenizer, tasks, begin=begin), strict=True):
        expected = list(naive(theirs, tokenizer, task, context, begin))
        for outcome, (right, sums, *rights) in zip(result.outcomes, expected, strict=True):
            assert (outcome.right_dclm, *by_harness(outcome)) == (right, *rights)
            assert outcome.log_likelihoods == pytest.approx(sums, abs=2e-4)
        assert result.truncated == (len(task.items) if context == 40 else 0)
        assert 0 < result.accuracy < 1 or task.kind == "language_modeling"


def test_results_say_what_they_are(tasks, tokenizer):
    results = evaluate(decoder_of(tokenizer), tokenizer, tasks, max_items=9)
    for task, result in zip(tasks, results, strict=True):
        right = sum(outcome.right_dclm for outcome in result.outcomes)
        assert result.items == 9 and result.accuracy == right / 9 and result.interval == wilson(right, 9)
        assert result.centered == centered(result.accuracy, task.baseline)
        assert result.centered_interval.low <= result.centered <= result.centered_interval.high
    nats, tokens = (sum(getattr(outcome, name) for outcome in results[2].outcomes) for name in ("nats", "tokens"))
    assert results[2].perplexity == pytest.approx(math.exp(nats / tokens)) and results[0].perplexity is None
    assert json.loads(json.dumps(results[0].as_dict()))["label"] == "multiple_choice_x"
    mean, interval = core(results)
    assert mean == pytest.approx(sum(result.centered for result in results) / 3)
    assert interval.low < mean < interval.high and core([]) is None
    with pytest.raises(RequestError, match="2 items are too few for 2 few-shot examples and a question"):
        evaluate(decoder_of(tokenizer), tokenizer, tasks, max_items=2)


def same(some: list[TaskResult], others: list[TaskResult], tolerance: float = 1e-4) -> bool:
    pairs = [(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x.outcomes, y.outcomes, strict=True)]
    return all(
        (a.right_dclm, by_harness(a)) == (b.right_dclm, by_harness(b))
        and a.log_likelihoods == pytest.approx(b.log_likelihoods, abs=tolerance) for a, b in pairs
    )  # fmt: skip


def test_the_batch_size_changes_nothing(tasks, tokenizer):
    decoder, told = decoder_of(tokenizer), []
    whole = evaluate(decoder, tokenizer, tasks, progress=lambda *seen: told.append(seen))
    for batch_tokens in (1, 300, 1000):
        assert same(whole, evaluate(decoder, tokenizer, tasks, batch_tokens=batch_tokens))
    assert told[-1] == ("language_modeling_x", 14, 14) and told == sorted(told, key=told.index)


def test_ranks_divide_the_items_and_each_has_all_results_in_their_order(tasks, tokenizer, monkeypatch):
    """Of seven items the first rank asks four; here one rank after the other runs."""
    decoder, asked = decoder_of(tokenizer), ([], [])

    def evaluate_on(rank, gather):
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        return evaluate(decoder, tokenizer, tasks, max_items=7, rank_and_world=(rank, 2))

    for rank in (0, 1):
        evaluate_on(rank, lambda into, own: into.__setitem__(slice(2), [own, asked[rank].append(own) or own]))
    assert [len(outcomes) for rank in asked for outcomes in rank] == [4, 4, 4, 3, 3, 3]
    pairs = zip(*asked, strict=True)
    found = evaluate_on(1, lambda into, own: into.__setitem__(slice(2), next(pairs)))
    assert same(evaluate(decoder, tokenizer, tasks, max_items=7), found)


def test_a_training_is_left_as_it_was(tasks, tokenizer):
    """Dropout is off meanwhile and on again after, random numbers are not touched, and there are no gradients."""
    decoder = decoder_of(tokenizer, dropout=0.4)
    expected = evaluate(decoder, tokenizer, tasks)
    decoder.train()
    decoder.layers[0].eval()
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert same(expected, evaluate(decoder, tokenizer, tasks), tolerance=0)
    assert torch.equal(state, torch.get_rng_state()) and python == random.getstate()
    assert np.array_equal(numpy, np.random.get_state()[1])
    assert decoder.training and decoder.layers[1].training and not decoder.layers[0].training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in decoder.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        halves = evaluate(decoder, tokenizer, tasks)
    assert not same(expected, halves, 0)
    assert halves[0].outcomes[0].log_likelihoods == pytest.approx(expected[0].outcomes[0].log_likelihoods, rel=0.02)


def test_broken_weights_are_an_error_and_no_score(tasks, tokenizer):
    decoder = decoder_of(tokenizer)
    with torch.no_grad():
        decoder.norm.weight[0] = math.nan
    with pytest.raises(RunError, match="not finite"):
        evaluate(decoder, tokenizer, tasks)


# ---- bits per byte --------------------------------------------------------------------------------------------------
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) * (1 + i % 3) for i in range(9)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "tokenizer.json").write_text(tokenizer.text)
    paths = (folder / name for name in ("data", "tokenizer.json"))
    prepare(PrepareOptions([str(folder / "texts.jsonl")], *map(str, paths), val_fraction=0))
    return folder


def test_texts_are_measured_as_validation_and_predict_count_them(corpus, tokenizer):
    """Each token once, windows that do not overlap, and the sums of `TokenLoss`."""
    decoder, counted = decoder_of(tokenizer), TokenLoss()
    options = {"seq_len": 32, "micro_batch": 4, "rows": deque(), "text_key": "text"}
    for batch in text_batches([str(corpus / "texts.jsonl")], tokenizer, **options):
        with torch.no_grad():
            losses = decoder(batch.input_ids, labels=batch.labels).per_token
        counted.update(losses, batch.labels, torch.from_numpy(tokenizer.token_bytes()))
    expected, told = counted.compute(), []
    for batch_tokens in (1, 100, 16_384):
        result = texts_bits_per_byte(
            decoder, tokenizer, [str(corpus / "texts.jsonl")], seq_len=32, batch_tokens=batch_tokens,
            progress=told.append,
        )  # fmt: skip
        assert result.loss == pytest.approx(expected["loss"].item(), rel=1e-6)
        assert result.bits_per_byte == pytest.approx(expected["bits_per_byte"].item(), rel=1e-6)
        assert result.tokens == expected["tokens"] == sum(map(len, TEXTS)) == result.bytes == told[-1]
        assert result.samples == len(TEXTS) and 0 < result.stderr < result.bits_per_byte
        assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_bytes_of_texts_are_those_of_the_texts_whatever_the_tokenizer(tmp_path):
    """Also of signs that a tokenizer drops or does not know."""
    tokenizer = train_char(["abc"])
    (tmp_path / "a.txt").write_text("abc äöü")
    result = texts_bits_per_byte(decoder_of(tokenizer), tokenizer, [str(tmp_path / "a.txt")])
    assert (result.tokens, result.bytes) == (7, 10)
    assert result.bits_per_byte == pytest.approx(result.loss * 7 / 10 / math.log(2))


def test_a_text_of_which_nothing_is_left_is_no_end_of_a_measurement(tmp_path, tokenizer, monkeypatch):
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: [] if text == "no" else encode(self, text))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "no", "de")))
    result = texts_bits_per_byte(decoder_of(tokenizer), tokenizer, [str(tmp_path / "a.jsonl")])
    assert (result.tokens, result.bytes, result.samples) == (5, 7, 3)


def test_the_first_documents_can_be_measured_alone(corpus, tokenizer):
    decoder = decoder_of(tokenizer)
    few = texts_bits_per_byte(decoder, tokenizer, [str(corpus / "texts.jsonl")], max_documents=2)
    assert few.samples == 2 and few.tokens == len(TEXTS[0]) + len(TEXTS[1])


# ---- the tasks in the package ---------------------------------------------------------------------------------------
def test_the_shipped_tasks_are_made_again_to_the_byte(tmp_path):
    write_tasks(tmp_path)
    made = sorted(file.name for file in tmp_path.iterdir())
    assert made == sorted(file.name for file in SHIPPED.iterdir() if file.suffix != ".md")
    for name in made:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), name


def test_the_shipped_tasks_are_of_validation_documents_only():
    """What tiny.yaml trains on holds no right answer with what is before it."""
    trained = "\n".join(text for _, text in read_documents([CORPUS]) if split_hash(text) >= 0.05)
    for task in read_tasks(["embedded:sotu"]):
        assert 100 <= len(task.items) <= 200
        for item in task.items:
            if task.kind == "multiple_choice":
                assert item["query"] not in trained
            elif task.kind == "schema":
                assert f"{item['context_options'][item['gold']]} {item['continuation']}" not in trained
            else:
                assert f"{item['context']} {item['continuation']}" not in trained
