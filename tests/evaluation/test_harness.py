"""lm-evaluation-harness loads an exported folder as it is, and gives the same scores."""

import sys
from dataclasses import replace

import pytest
from decoders import SHAPES, trained_like, write_huggingface
from harness import compare

from lm.cli.convert import export
from lm.cli.model_options import ExportOptions
from lm.data.tokenizer_training import train_bpe
from lm.evaluation.tasks import read_tasks

pytest.importorskip("lm_eval")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama, tied", "qwen3, untied"])
def test_the_harness_answers_as_ours(shape, here):
    tasks = read_tasks(["embedded:sotu"], num_fewshot=0)
    texts = [str(item) for task in tasks for item in task.items]
    tokenizer = train_bpe(texts, 600)
    (here / "model").mkdir()
    config = replace(SHAPES[shape], vocab_size=tokenizer.vocab_size, max_position_embeddings=512, rope_scaling=None)
    write_huggingface(trained_like(config), here / "model")
    for name, text in tokenizer.files(512).items():
        (here / "model" / name).write_text(text)
    export(ExportOptions(ckpt_path="model", output="exported"))
    answers = compare(here / "exported", tasks, [sys.executable, "-m", "lm_eval"])
    for task in tasks:
        assert answers[task.label]["largest_difference"] < 1e-3
        assert not any(
            metric["items_that_differ"] for metric in answers[task.label].values() if isinstance(metric, dict)
        )
