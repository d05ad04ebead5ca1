"""From a model that continues texts to one that answers: `lm fit` on conversations, and `lm generate --chat`."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import llama_cpp
import pytest
import torch
from gguf import GGUFReader
from terminal import Terminal, plain
from trainings import CONFIG, PLACES, fit, lm, validations, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm import load_model
from lm.data.chat import DEFAULT_TEMPLATE
from lm.runs.run import Run

QUESTIONS = {"Who is in the village?": "The captain.", "And who is on the river?": "The senate, they say.",
             "What was lost?": "Nothing at all."}  # fmt: skip
PAGE = Path(__file__).parents[2] / "configs/finetune/README.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`models/base`, a model that continues texts, and `chat`, a run from its weights on three questions, with their answers."""
    place = tmp_path_factory.mktemp("chat")
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
             for question, answer in QUESTIONS.items()]  # fmt: skip
    chats += [[*one, *other] for one in chats for other in chats if one != other]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = {
        **CONFIG["data"],
        "prepare": {"input": ["embedded:sotu"], "tokenizer": "bpe", "vocab_size": 512, "sample_bytes": 10**6},
    }
    shape = {
        "model.decoder.max_position_embeddings": 128,
        "data": {**data, "global_batch_tokens": 1024, "val_tokens": 1024},
    }
    fit(place, "base", **shape, **{"trainer.max_steps": 4, "trainer.callbacks": None})
    lm(place, "import", "--input", "checkpoints/base/best", "--output", "models/base")
    prepare = ("--chat", "--input", "chats.jsonl", "--output", "data/chat", "--tokenizer", "models/base")
    lm(place, "data", "prepare", *prepare)
    changes = {
        "trainer.max_steps": 80,
        "trainer.val_interval": 20,
        "trainer.checkpoint_interval": 20,
        "trainer.callbacks": None,
    }
    tuned = {"path": "data/chat", "micro_batch_size": 4, "global_batch_tokens": 512}
    write_config(place, "chat", **changes, data=tuned)
    arguments = ("--config", "models/base/model.yaml", "--ckpt_path", "models/base")
    lm(place, "fit", "--config", "chat.yaml", *arguments, "--model.decoder.dropout", "0")
    return place


def losses_of(folder, messages):
    """Mean losses of the questions and of the answers of a conversation, by transformers and the text alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder.parents[2] / "data/chat")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, return_tensors="pt")
    answers = [match.span(1) for match in re.finditer(r"Assistant:\n(.*?<\|endoftext\|>)", text, re.DOTALL)]
    is_answer = torch.tensor([any(begin <= first < end for begin, end in answers)
                              for first, _ in encoded["offset_mapping"][0].tolist()])  # fmt: skip
    with torch.no_grad():
        log_p = model(encoded["input_ids"]).logits[0, :-1].log_softmax(-1)
    losses = -log_p.gather(1, encoded["input_ids"][0, 1:, None])[:, 0]
    return losses[~is_answer[1:]].mean().item(), losses[is_answer[1:]].mean().item()


def test_a_fit_lowers_the_loss_of_the_answers_alone(place):
    """Of a conversation from the training data; the questions are only context, and stay as unlikely as they were."""
    run = Run(place / "checkpoints/chat")
    messages = [message for question, answer in QUESTIONS.items()
                for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})]  # fmt: skip
    before, after = (losses_of(folder, messages[:4]) for folder in (place / "checkpoints/base/best", run.path / "last"))
    assert before[1] > 5 and after[1] < 0.5 and after[0] > 5
    by_step = validations(run)
    assert list(by_step) == [20, 40, 60, 80] and by_step[80] < by_step[20] < before[1]


def test_prompts_are_answered_in_one_conversation(place):
    """With the words that it was trained on, and nothing else on standard output."""
    options = ("--run", "chat", "--temperature", "0")
    done = lm(place, "generate", "--chat", *options, "--prompt", *QUESTIONS)
    assert done.stdout.splitlines()[:2] == list(QUESTIONS.values())[:2] and "ended by eos" in done.stderr
    piped = subprocess.run([sys.executable, "-m", "lm", "generate", "--chat", *options], cwd=place, text=True, check=True,
                           input="What was lost?\n\nWho is in the village?\n", capture_output=True,
                           env={**os.environ, "PYTHONPATH": PLACES})  # fmt: skip
    assert piped.stdout == "Nothing at all.\nThe captain.\n"


def test_a_conversation_on_a_terminal(place):
    terminal = Terminal(place, "-m", "lm", "generate", "--chat", "--run", "chat", "--temperature", "0", fork=True)
    terminal.wait_for("> ")
    terminal.type("Who is in the village?\n")
    assert "The captain.\n" in plain(terminal.wait_for("> ")).replace("\r", "")
    terminal.type("x" * 2000 + "\n")
    assert "leaves no room for a new token" in plain(terminal.wait_for("> "))
    terminal.type("\n")
    assert "a new conversation" in terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_an_answer_ends_where_the_template_ends_it(place, tmp_path):
    """Not at a token that ends documents, if the template has another text."""
    model = load_model(place / "checkpoints/chat")
    for name, text in model.tokenizer.files().items():
        (tmp_path / name).write_text(text)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model.path.resolve() / name)
    (tmp_path / "chat_template.jinja").write_text(
        DEFAULT_TEMPLATE.replace("message['content'] + eos_token", "message['content'] + 'ing'")
    )
    options = ("--ckpt_path", str(tmp_path), "--temperature", "0", "--prompt", "What was lost?")
    done = lm(place, "generate", "--chat", *options, "--ignore_eos", "--max_new_tokens", "20")
    assert done.stdout == "Noth\n" and "ended by stop" in done.stderr


@pytest.mark.parametrize("command, message", [
    ("generate --chat --run base --prompt a", "/step-00000004: the tokenizer has no chat template: train the model on"),
    ("generate --chat --run chat --prompt a --json", "--chat answers one text at a time: leave --json and --num_samples out"),
    ("plan --config chat.yaml --config models/base/model.yaml --model.document_mask true",
     "model.document_mask separates the turns of a conversation, whose answers end with the end-of-text token"),
    ("chat --run chat", "did you mean `lm generate --chat --run chat`?"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(place, command, message):
    done = lm(place, *command.split(), expect=2)
    assert message in done.stdout + done.stderr.splitlines()[-1]


def test_the_template_goes_to_exports_and_llama_cpp_writes_the_same_prompt(place, tmp_path):
    done = lm(place, "export", "--run", "chat", "--output", str(tmp_path / "hf"))
    assert "trained from the weights of another model on conversations" in (tmp_path / "hf/README.md").read_text(), (
        done.stderr
    )
    card = (tmp_path / "hf/README.md").read_text()
    assert "- conversational" in card and 'assistant([{"role": "user", "content": "Hello"}]' in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    lm(place, "export", "--run", "chat", "--output", str(tmp_path / "gguf"), "--format", "gguf")
    file = tmp_path / "gguf/gguf.gguf"
    assert GGUFReader(file).fields["tokenizer.chat_template"].contents() == DEFAULT_TEMPLATE
    modelfile = (tmp_path / "gguf/Modelfile").read_text()  # the same text in Go's language of templates
    assert f'TEMPLATE """{tokenizer.eos_token}{{{{ range .Messages }}}}' in modelfile
    assert modelfile.endswith('{{ end }}{{ end }}Assistant:\n"""\n')
    pytest.importorskip("xllamacpp")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]  # fmt: skip
    theirs = llama_cpp.write_prompt(file, messages)
    assert theirs == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.slow
def test_the_commands_of_the_page_work(tmp_path):
    """As typed, but for the number of steps; those of TRL where it is installed."""
    with_lm, with_trl = PAGE.read_text().partition("## With TRL")[::2]
    few = "--trainer.max_steps 4 --trainer.val_interval 2 --trainer.checkpoint_interval 2 --data.val_tokens 1024"
    text = with_lm.replace("tiny.yaml\nlm", f"tiny.yaml {few}\nlm").replace("tiny-chat\n", f"tiny-chat {few}\n", 1)
    assert text.count(few) == 2
    if find_spec("trl"):
        text += with_trl.replace("max_steps=100", "max_steps=4")
    said = ""
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        shell = ["bash", "-ec", f'lm() {{ "{sys.executable}" -m lm "$@"; }}\n{block}']
        done = subprocess.run(
            shell if language == "sh" else [sys.executable, "-c", block],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": PLACES}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr[-4000:]}"
        said += done.stderr
    assert (tmp_path / "tiny-chat-gguf/tiny-chat-gguf.gguf").exists()
    assert said.count("tokens/s, the first after") == (3 if find_spec("trl") else 2)
