"""Public benchmarks: read from the hub by their names, and worded as lm-evaluation-harness words them."""

import io

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import hub_server

from lm.errors import LmError
from lm.evaluation.public_tasks import PUBLIC_TASKS
from lm.evaluation.tasks import read_tasks
from lm.system import remote
from lm.system.hub import hub as hub_of_this_process

ARC = {"question": "Which one?", "choices": {"text": ["x", "y z", "w"], "label": ["1", "2", "3"]}, "answerKey": "2"}
ARC_ITEM = {"query": "Question: Which one?\nAnswer:", "choices": ["x", "y z", "w"], "gold": 1}
# A row of each data set, and the item that prompts of lm-evaluation-harness 0.4.13 amount to, seen by running it.
CASES = {
    "arc_challenge": (ARC, ARC_ITEM),
    "arc_easy": (ARC, ARC_ITEM),
    "boolq": ({"question": "is it", "passage": "P q.", "label": 1},
              {"query": "P q.\nQuestion: is it?\nAnswer:", "choices": ["no", "yes"], "gold": 1}),
    "commonsense_qa": (
        {"question": " Where? ", "choices": {"label": [*"ABCDE"], "text": [*"pqrst"]}, "answerKey": "D"},
        {"query": "Question: Where?\nA. p\nB. q\nC. r\nD. s\nE. t\nAnswer:", "choices": [*"ABCDE"], "gold": 3}),
    "copa": ({"premise": "He fell. ", "choice1": "It hurt.", "choice2": "He slept.", "question": "effect", "label": 0},
             {"query": "He fell therefore", "choices": [" it hurt.", " he slept."], "gold": 0}),
    "hellaswag": (
        {"activity_label": "Roof [x] work", "ctx_a": "A man sits.", "ctx_b": "he", "label": "1",
         "endings": ["is  using a [step] rope.", " waits [title] here "]},
        {"query": "Roof work: A man sits. He", "choices": ["is using a rope.", "waits. here"], "gold": 1}),
    "lambada_openai": ({"text": "a clear stone , he said gabriel"},
                       {"context": "a clear stone , he said", "continuation": "gabriel"}),
    "openbookqa": ({"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
                    "answerKey": " A"},
                   {"query": "The sun is", "choices": ["hot", "cold"], "gold": 0}),
    "piqa": ({"goal": "How to sew", "sol1": "do y.", "sol2": "do z.", "label": 1},
             {"query": "Question: How to sew\nAnswer:", "choices": ["do y.", "do z."], "gold": 1}),
    "sciq": ({"support": " Some text.", "question": "What?", "distractor1": "a", "distractor2": "b", "distractor3": "c",
              "correct_answer": "d"},
             {"query": "Some text.\nQuestion: What?\nAnswer:", "choices": [*"abcd"], "gold": 3}),
    "winogrande": ({"sentence": "Ann beat Eve so _ won.", "option1": "Ann", "option2": "Eve", "answer": "2"},
                   {"context_options": ["Ann beat Eve so Ann", "Ann beat Eve so Eve"], "continuation": "won.",
                    "gold": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def hub():
    """A hub with all of these data sets, of one row each."""
    with hub_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        patch.setattr(remote, "FIRST_PAUSE", 0.02)
        patch.delenv("HF_TOKEN", raising=False)
        hub_of_this_process.cache_clear()
        for name, (row, _) in CASES.items():
            task, file = PUBLIC_TASKS[name], io.BytesIO()
            pq.write_table(pa.Table.from_pylist([row]), file)
            server.commit(task.dataset, {f"{task.config}/{task.split}/0000.parquet": file.getvalue()})
        yield server
    hub_of_this_process.cache_clear()


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_a_benchmark_is_read_by_its_name_and_worded_as_the_harness_words_it(hub, name):
    [task] = read_tasks([name])
    kind = {"lambada_openai": "language_modeling", "winogrande": "schema"}.get(name, "multiple_choice")
    assert (task.label, task.kind, task.num_fewshot) == (name, kind, 0)
    assert list(task.items) == [CASES[name][1]] and task.continuation_delimiter == " "
    assert [task.label for task in read_tasks(["copa,sciq", "piqa"])] == ["copa", "sciq", "piqa"]


def test_a_hub_that_does_not_answer_is_one_line_that_names_the_data_set(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(remote, "FIRST_PAUSE", 9)  # longer than its patience
    hub_of_this_process.cache_clear()
    with pytest.raises(LmError, match="^hf://datasets/baber/piqa.*check the network"):
        read_tasks(["piqa"])
