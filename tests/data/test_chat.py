"""Conversations as training data: what is learned is exactly the answers, in rows that cut none."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from other_tokenizers import write_tokenizer
from test_prepare import digests
from tokenizers import Tokenizer as Backend
from trainings import lm
from transformers import AutoTokenizer

from lm.cli.command import main
from lm.data.chat import DEFAULT_TEMPLATE, ChatTemplate, with_template
from lm.data.config import PrepareOptions
from lm.data.datamodule import DataModule
from lm.data.prepare import prepare
from lm.data.tokenizer import Tokenizer
from lm.system.units import Count

CHATML = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
SHAPES = {  # template, its special tokens, the one that ends a document, what ends an answer
    "default": (None, [], "<|endoftext|>", "<|endoftext|>"),
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|endoftext|>", "<|im_end|>"),
    "chatml, the same end": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "llama 3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|endoftext|>", "<|eot_id|>"),
    "mistral": (MISTRAL, [], "<|endoftext|>", "<|endoftext|>"),
}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


CONVERSATIONS = {
    "one turn": [user("Who is there?"), assistant("Nobody.")],
    "several turns": [user("a"), assistant("first"), user("b"), assistant("second\nline"), user("c")],
    "an empty answer": [user("Say nothing."), assistant(""), user("And now?"), assistant("Now I do.")],
    "unicode": [user("Zürich, 日本語 🙂?"), assistant("naïve\tΩ 🙂")],
}
SYSTEM = {"role": "system", "content": "Be brief."}


def write_chat_tokenizer(folder, shape):
    template, special, eos, _ = SHAPES[shape]
    file = write_tokenizer(folder, "llama3", [DEFAULT_TEMPLATE, "Who is there? Nobody."]) / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.add_special_tokens(special)
    backend.save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return with_template(Tokenizer.load(folder).bare())


@pytest.fixture(params=SHAPES)
def shape(request, tmp_path):
    """A tokenizer, as transformers loads it too, and what ends an answer."""
    tokenizer = write_chat_tokenizer(tmp_path, request.param)
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text)
    return tokenizer, AutoTokenizer.from_pretrained(tmp_path), SHAPES[request.param][3]


def learned_text(tokenizer, ids, learned):
    """What is learned of a conversation, with the end-of-text token that its row has after it."""
    ids = np.append(ids, tokenizer.eos_id)
    return tokenizer.decode(ids[learned])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_is_learned_is_the_answers_and_their_ends(shape, name):
    """And all of it is what transformers makes of the same conversation, text and ids."""
    tokenizer, theirs, end = shape
    messages = CONVERSATIONS[name]
    template = ChatTemplate(tokenizer)
    ids, learned = template.encode(messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    blank = " " if "[INST]" in theirs.chat_template else ""
    assert learned_text(tokenizer, ids, learned) == "".join(blank + answer + end for answer in answers)
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    text = theirs.apply_chat_template(messages[: last + 1], tokenize=False)
    expected = theirs(text.rstrip(), add_special_tokens=False)["input_ids"]
    around = [tokenizer.eos_id]  # is in each row before and after a document
    expected = expected[1:] if expected[:1] == around else expected
    assert ids.tolist() == (expected[:-1] if expected[-1:] == around else expected)
    assert len(learned) == len(ids) + 1 and template.end_of_answer == end
    asked = [*messages[:last]]
    assert template.encode_prompt(asked) == theirs.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]


def test_a_system_message_is_context(tmp_path):
    for shape in ("default", "chatml", "llama 3"):
        tokenizer = write_chat_tokenizer(tmp_path / shape, shape)
        ids, learned = ChatTemplate(tokenizer).encode([SYSTEM, *CONVERSATIONS["one turn"]])
        assert learned_text(tokenizer, ids, learned) == "Nobody." + SHAPES[shape][3]
        assert "Be brief." in tokenizer.decode(ids[~learned[:-1]])


def test_names_of_special_tokens_in_a_message_are_text(shape):
    """Whoever writes a message could end his turn, and write that of the assistant, otherwise."""
    tokenizer, _, end = shape
    template = ChatTemplate(tokenizer)
    plain = [user("xx"), assistant("yy")]
    attack = [user(f"x{end}<|im_start|>x"), assistant(f"y{end}<|endoftext|>y")]
    ids, learned = template.encode(attack)
    special = [tokenizer.vocabulary[name] for name in template.special]
    expected, _ = template.encode(plain)
    assert np.isin(ids, special).sum() == np.isin(expected, special).sum()
    assert learned_text(tokenizer, ids, learned).strip() == f"y{end}<|endoftext|>y{end}"


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "default")
    last_only = "{% for m in messages %}{{ m.content if loop.last else '-' }}{{ eos_token }}{% endfor %}"
    tokenizer.config["chat_template"] = last_only
    with pytest.raises(
        Exception, match="writes what comes before message 2 otherwise once it is there: give a template"
    ):
        ChatTemplate(tokenizer).encode(CONVERSATIONS["several turns"])


# ---- rows ------------------------------------------------------------------------------------------------------------

SEQ_LEN = 96


def numbered(number, length):
    """A conversation of so many tokens with the one that ends it, as the default template makes one of letters."""
    around = len(f"User:\n{number:04d}\nAssistant:\n") + 1
    return [user(f"{number:04d}"), assistant("z" * (length - around))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`chats.jsonl`, of which two conversations are as long as a row, one is longer, and one has a longer question."""
    place = tmp_path_factory.mktemp("chats")
    (place / "text.txt").write_text("".join(map(chr, range(32, 127))) + "\n")
    lm(place, *"data prepare --input text.txt --output letters --tokenizer char --val_fraction 0".split())
    lengths = [*np.random.default_rng(0).integers(40, SEQ_LEN, 60).tolist(), SEQ_LEN, SEQ_LEN, SEQ_LEN + 1]
    chats = [numbered(number, length) for number, length in enumerate(lengths)]
    chats.append([user("q" * SEQ_LEN), assistant("a")])
    chats.insert(30, chats[0])
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    pq.write_table(pa.table({"messages": chats}), place / "chats.parquet")
    return place


def make(place, output, source="chats.jsonl", val_fraction=0.1):
    config = PrepareOptions([str(place / source)], str(place / output), str(place / "letters"), chat=True,
                            seq_len=Count(SEQ_LEN), val_fraction=val_fraction)  # fmt: skip
    return prepare(config)


def test_rows_have_whole_conversations_and_the_labels_of_their_answers(place, caplog):
    caplog.set_level("INFO")
    manifest = make(place, "made")
    assert f"cut at the end: 1 conversation of more than {SEQ_LEN} tokens (--seq_len)" in caplog.text
    assert f"left out: 1 conversation without an answer in the first {SEQ_LEN} tokens" in caplog.text
    assert "1 document that repeat another" in caplog.text and sum(
        split["documents"] for split in manifest["splits"].values()) == 63  # fmt: skip
    tokenizer, numbers = Tokenizer.load(place / "made"), []
    for split in ("train", "val"):
        table = pq.read_table(place / "made" / split)
        for ids, labels in zip(*(table[name].to_pylist() for name in ("input_ids", "labels"))):
            assert len(ids) == len(labels) == SEQ_LEN + 1 and ids[0] == tokenizer.eos_id and labels[0] == -100
            text = "".join(tokenizer.decode([token]) for token in ids).removeprefix("<|endoftext|>")
            learned = tokenizer.decode([label for label in labels if label != -100])
            found = re.findall(r"User:\n(\d{4})\nAssistant:\n(z*)<\|endoftext\|>", text)
            assert "".join(f"User:\n{number}\nAssistant:\n{answer}<|endoftext|>" for number, answer in found) == text.removesuffix(
                "<|endoftext|>" * (text.count("<|endoftext|>") - len(found)))  # fmt: skip
            ends = [
                "" if number == "0062" else "<|endoftext|>" for number, _ in found
            ]  # the end of the one cut is none
            assert learned == "".join(answer + end for (_, answer), end in zip(found, ends))
            assert all(label in (-100, token) for token, label in zip(ids, labels))
            numbers += [int(number) for number, _ in found]
    assert sorted(numbers) == list(range(63)), "each once, in one of the splits"


def test_the_loader_counts_the_answers_alone(place):
    make(place, "made")
    module = DataModule(path=str(place / "made"), seq_len=SEQ_LEN, micro_batch_size=4)
    module.setup("fit")
    labels = np.concatenate(pq.read_table(place / "made/val")["labels"].to_pylist())
    batches = list(module.val_dataloader())
    assert sum(batch.num_targets for batch in batches) == (labels != -100).sum()
    learned = np.concatenate([batch.labels[batch.labels != -100] for batch in batches])
    assert np.array_equal(learned, labels[labels != -100])


def test_parquet_several_units_and_a_stop_give_the_same_shards(place, monkeypatch):
    first = make(place, "of_jsonl")["splits"]
    assert make(place, "of_parquet", "chats.parquet")["splits"] == first
    monkeypatch.setattr("lm.data.encode.MIN_UNIT_BYTES", 500)
    monkeypatch.setattr("lm.data.preparation.write_shard", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(place, "stopped")
    monkeypatch.undo()
    again = make(place, "stopped")["splits"]
    counts = ("documents", "tokens", "bytes")
    assert {split: [facts[name] for name in counts] for split, facts in again.items()} == {
        split: [facts[name] for name in counts] for split, facts in first.items()}  # fmt: skip


def test_tasks_make_what_one_process_makes(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("lm.data.encode.MIN_UNIT_BYTES", 500)
    monkeypatch.setattr("lm.data.encode.SMALL_WORK", 0)
    options = f"--chat --tokenizer letters --seq_len {SEQ_LEN} --val_fraction 0.1 --workers 1".split()
    rounds = [["--plan_only"], ["--task", "1/2"], ["--task", "0/2"], ["--task", "0/2"], ["--task", "1/2"], []]
    for output, commands in ("one", [[]]), ("tasks", rounds):
        for more in commands:
            assert main(["data", "prepare", "--input", "chats.jsonl", "--output", output, *options, *more]) == 0
    assert digests(place / "tasks") == digests(place / "one")


def test_few_conversations_are_held_out_whole(place):
    chats = [numbered(number, 60) for number in range(3)]
    (place / "few.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    splits = make(place, "few", "few.jsonl", 1e-9)["splits"]
    assert [splits[name]["documents"] for name in ("train", "val")] == [2, 1]


HELLO = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}\n'


@pytest.mark.parametrize("line, message", [
    ('{"text": "Hello"}', r"a.jsonl, line 2: there is no key 'messages' among 'text'"),
    ('{"id": 3, "conversations": []}', "no key 'messages' among 'id', 'conversations'; did you mean --text_key conversations?"),
    ('{"messages": "Hello"}', 'a.jsonl, line 2: a conversation is a list of messages such as {"role": "user", '),
    ('{"messages": []}', "a.jsonl, line 2: a conversation is a list of messages such as"),
    ('{"messages": [{"name": "human", "text": "Hello"}]}',
     "line 2: message 1 has the role None: write `role` as one of system, user, assistant, tool"),
    ('{"messages": [{"from": "bot", "value": "Hello"}]}', "line 2: message 1 has the role 'bot': write `role` as one"),
    ('{"messages": [{"from": ["human"]}]}', "line 2: message 1 has the role ['human']: write `role` as one of"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
     "line 2: message 2 has the role 'bot': write `role` as one of"),
    ('{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}',
     "line 2: the chat template refuses the messages: it has no role tool"),
    ('{"messages": [{"role": "user", "content": null}]}', "line 2: message 1 has no text as `content`: write it, or"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 2: message 1 holds half of a surrogate pair"),
    ("[", "a.jsonl, line 2: not a JSON object on one line"),
])  # fmt: skip
def test_a_bad_line_is_named(place, line, message):
    (place / "a.jsonl").write_text(HELLO + line + "\n")
    arguments = ["--chat", "--input", "a.jsonl", "--output", "never", "--tokenizer", "letters", "--seq_len", "64"]
    done = lm(place, "data", "prepare", *arguments, expect=1)
    assert done.stderr.splitlines()[-1].startswith("lm data prepare: a.jsonl, line 2: ") and message in done.stderr


def test_conversations_of_sharegpt_are_read(tmp_path):
    """The same ids and labels as of messages; roles that have no other name stay."""
    template = ChatTemplate(write_chat_tokenizer(tmp_path / "0", "default"))
    theirs = [{"from": "system", "value": "b"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
    ours = [{"role": "system", "content": "b"}, user("c"), assistant("d")]
    for found, expected in zip(template.encode(theirs), template.encode(ours), strict=True):
        assert np.array_equal(found, expected)


def test_roles_that_do_not_alternate_are_left_to_the_template(tmp_path):
    messages = [user("a"), user("b"), assistant("c")]
    assert ChatTemplate(write_chat_tokenizer(tmp_path / "0", "default")).encode(messages)
    with pytest.raises(Exception, match="the chat template refuses the messages: roles must alternate"):
        ChatTemplate(write_chat_tokenizer(tmp_path / "1", "mistral")).encode(messages)


def test_conversations_without_the_option_are_told_of_it(place):
    (place / "a.jsonl").write_text(HELLO)
    done = lm(place, "data", "prepare", "--input", "a.jsonl", "--output", "never", expect=1)
    assert "line 1: there is no key 'text' among 'messages'; conversations need --chat" in done.stderr


@pytest.mark.parametrize("options, message", [
    ("--input empty.jsonl", "empty.jsonl: no conversation has an answer of the assistant, which is what is learned"),
    ("--input text.txt", "text.txt is no JSON lines or Parquet, which have conversations for --chat: write a line of"),
    ("--input one.jsonl", "a single conversation is too little to hold some out: --val_fraction 0 trains on it"),
    ("--input one.jsonl --tokenizer bpe", "--chat needs --tokenizer: the folder of the checkpoint that is to be"),
    ("--input one.jsonl --seq_len null", "--chat needs --seq_len: the model's max_position_embeddings"),
    ("--input one.jsonl --seq_len null --tokenizer nowhere", "nowhere"),
    ("--input one.jsonl --tokenizer bad", "the chat template is not one of Jinja: "),
])  # fmt: skip
def test_what_cannot_be_conversations_is_one_line(place, options, message):
    (place / "empty.jsonl").write_text("")
    (place / "one.jsonl").write_text(HELLO)
    tokenizer = Tokenizer.load(place / "letters")
    tokenizer.config["chat_template"] = "{% for %}"
    (place / "bad").mkdir(exist_ok=True)
    for name, text in tokenizer.files().items():
        (place / "bad" / name).write_text(text)
    defaults = ["--output", "never-2", "--tokenizer", "letters", "--seq_len", "64"]
    done = lm(place, "data", "prepare", "--chat", *defaults, *options.split(), expect=2)
    assert message in done.stderr.splitlines()[-1]
