"""What a person types after a first fit, each in a process of its own, on a run that was really trained."""

import json
import math
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from trainings import CORPUS, HERE, lm, trace, write_config

from lm.cli.command import main
from lm.runs.run import Run


@pytest.fixture(scope="module")
def workplace(workplace):
    lm(workplace, "fit", "--config", str(write_config(workplace)))
    return workplace


@pytest.fixture(scope="module")
def run(workplace):
    return Run(workplace / "checkpoints" / "small")


def test_the_run_folder_holds_what_it_promises(workplace, run):
    names = {path.name for path in run.path.iterdir()}
    assert {"config.yaml", "run.json", "state.json", "metrics.jsonl", "best", "last"} <= names
    assert [name for name in names if name.startswith("events.out.tfevents.")]
    assert not any(name.startswith(".") for name in names)
    best = {path.name for path in run.link("best").iterdir()}
    assert best == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "optimizer.safetensors", "trainer.json",
    }  # fmt: skip
    assert list(run.steps())[-1] == 12 and len(run.steps()) <= 2  # last, best, and nothing else
    facts, trained = run.read("run.json"), json.loads((run.link("last") / "trainer.json").read_text())
    assert facts["status"] == "finished" and facts["versions"]["torch"] and facts["step"] == 12
    assert facts["versions"]["lm"] == trained["written_by"] and re.match(r"\d+\.\d+\.\d+(\+|$)", trained["written_by"])
    state = run.read("state.json")
    assert state["status"] == "finished" and state["tokens"] == 12 * 256 and state["metrics"]["val/bpb"] > 0


def test_validate_in_a_fresh_process_says_what_the_fit_said(workplace, run):
    result = lm(workplace, "validate", "--ckpt_path", "best")
    assert "run small, checkpoint checkpoints/small/step-" in result.stderr
    said = {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}
    step = int(run.link("best").name.removeprefix("step-"))
    fitted = next(entry for entry in run.metrics() if entry["step"] == step and "val/loss" in entry)
    for name in ("val/loss", "val/perplexity", "val/bpb"):
        assert said[name] == pytest.approx(fitted[name], abs=1e-3)
    assert math.exp(said["val/loss"]) == pytest.approx(said["val/perplexity"], rel=1e-3)
    assert "test/bpb" in lm(workplace, "test", "--run", "small").stdout


def test_a_run_of_a_gpu_is_validated_without_one(workplace):
    gpus = ("--model.kernels", "on", "--model.attention", "flash", "--trainer.precision", "fp8-rowwise")
    result = lm(workplace, "validate", "--run", "small", *gpus)
    [said] = [line for line in result.stderr.splitlines() if line.startswith("evaluated with what this machine has: ")]
    assert "model.kernels on -> auto" in said and "(no CUDA device" in said and "model.attention flash -> auto" in said
    assert "trainer.precision fp8-rowwise -> bf16-mixed" in said and "val/bpb" in result.stdout


def test_predict_writes_log_probabilities_that_belong_to_the_tokens(workplace, run):
    text = CORPUS.split("\n")[3]
    (workplace / "mine.jsonl").write_text(json.dumps({"body": text}))
    refused = lm(workplace, "predict", "--data.texts", "mine.jsonl", expect=1).stderr
    assert "no key 'text' among 'body'; name it with --text_key, in a config data.prepare.text_key (lm pred" in refused
    result = lm(workplace, "predict", "--data.texts", "mine.jsonl", "--data.text_key", "body")
    path = workplace / result.stdout.strip()
    rows = pq.read_table(path).to_pylist()
    assert "".join("".join(row["tokens"]) for row in rows) == text
    assert [row["start"] for row in rows] == list(range(0, len(text), 32))
    model, tokenizer = hugging_face(run)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]][:33]])
    log_probs = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0]
    assert rows[0]["log_probs"] == pytest.approx(log_probs.tolist(), abs=1e-4)


def hugging_face(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(run.path / "best")
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(folder)


def test_data_show_prints_the_texts_that_a_step_saw(workplace, run):
    shown = json.loads(lm(workplace, "data", "show", "--run", "small", "--step", "7", "--limit", "0", "--json").stdout)
    seen = [entry["tokens"] for entry in trace(workplace) if entry["step"] == 7]
    printed = [token for entry in shown["samples"] for token in entry["token_ids"]]
    assert printed == [token for tokens in seen for token in tokens]
    assert all("".join(entry["documents"]).replace("<|endoftext|>", "\n") for entry in shown["samples"])
    assert any(len(entry["documents"]) > 1 for entry in shown["samples"])
    refused = lm(workplace, "data", "show", "--run", "small", "--step", "13", expect=2)
    assert "has taken steps 1 to 12" in refused.stderr


def test_the_newest_run_is_the_one_that_is_taken(workplace):
    lm(workplace, "fit", "--config", "small.yaml", "--trainer.max_steps", "1", "--model.schedule.warmup_steps", "0")
    assert "run small-2, checkpoint checkpoints/small-2/step-00000001" in lm(workplace, "validate").stderr
    assert "run small, " in lm(workplace, "validate", "--run", "checkpoints/small").stderr
    resumed = lm(workplace, "fit", "--run", "small", "--ckpt_path", "auto")  # with its own config
    assert "the run has finished: all 12 steps are done" in resumed.stderr
    by_path = lm(workplace, "validate", "--ckpt_path", "checkpoints/small/last")
    assert "run small, " in by_path.stderr and "step-00000012" in by_path.stderr


BAD_REQUESTS = {
    "uneven batch": (["--data.micro_batch_size", "3"], "the nearest that fits is 288, or give --data.micro_batch_size 2"),
    "context": (["--data.seq_len", "64"], "longer than model.decoder.max_position_embeddings 32"),
    "name": (["--run", "my run"], "run name 'my run': use letters, digits, '.', '_', '-', '+' and '=' only; it is that of --run"),

    "no such checkpoint": (["--ckpt_path", "somewhere"], "--ckpt_path somewhere: there is no such folder"),
    "mistyped data": (["--data.path", "data/smal"], "data/smal holds no manifest.json: did you mean data/small? Or "),
    "a file of the data": (["--data.path", "data/small/manifest.json"], "is a file: give the prepared folder that it is "
                           "in, data/small"),
    "texts for data": (["--data.path", "texts"], "`lm data prepare --input texts --output texts-tokens` makes shards"),
    "empty source": (["--data.path", "new", "--data.prepare.input", "nothing/"], "nothing"),
    "other texts": (["--data.prepare.input", "mine.txt"], "data/small was made from texts/000.txt, texts/001.txt, texts/002.txt and 117 more, and data.prepare.input has mine.txt"),
    "other preparation": (["--data.prepare.tokenizer", "bpe"], "data/small was made with tokenizer char"),
    "seed": (["--seed_everything", "-1"], "seed_everything -1 must be a whole number from 0 to 4294967295"),
    "no such accelerator": (["--trainer.accelerator", "tpu"], "expected one of 'auto', 'cpu', 'gpu'"),
    "no GPU": (["--trainer.accelerator", "gpu"], "No supported gpu backend found"),

}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_wrong_request_is_one_line_and_leaves_nothing(workplace, name, monkeypatch, capsys):
    if name == "no GPU" and (torch.cuda.is_available() or torch.backends.mps.is_available()):
        pytest.skip("this machine has one")
    arguments, message = BAD_REQUESTS[name]
    monkeypatch.chdir(workplace)
    before = sorted(path.name for path in (workplace / "checkpoints").iterdir())
    assert main(["fit", "--config", "small.yaml", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("lm fit: ") and message in said and "Traceback" not in said
    assert sorted(path.name for path in (workplace / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}])
def test_torch_s_allocator_is_set_up_before_torch_is_imported(tmp_path, own):
    """A torch that tells what it was imported with; what the user has set stays."""
    code = "import os\nprint({k: v for k, v in os.environ.items() if 'ALLOC_CONF' in k}, flush=True)\nos._exit(0)\n"
    (tmp_path / "torch.py").write_text(code)
    ended = subprocess.run([sys.executable, "-m", "lm", "fit", "--config", "tiny.yaml"], capture_output=True, text=True,
                           env={"PYTHONPATH": f"{tmp_path}:{HERE.parent}", **own}, cwd=tmp_path)  # fmt: skip
    assert ended.stdout == f"{own or {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}}\n"
