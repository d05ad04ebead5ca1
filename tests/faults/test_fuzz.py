"""Whatever a file says that `lm` is given, it says in one line what is wrong with it, or does what is right.

A thousand configs are read as `plan` and `fit` read them, and a thousand damaged files by the commands and readers
that meet them. No traceback, no hang, no memory that grows without end.
"""

import contextlib
import copy
import io
import json
import os
import shutil

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mutations import NUMBERS, TEXTS, VALUES, bounds, changed, damaged, examples
from trainings import CONFIG

from lm.cli import fit, request
from lm.cli.classes_by_path import with_classes
from lm.cli.command import main
from lm.cli.options import all_options
from lm.cli.plan_facts import examine
from lm.data.shards import Shards
from lm.errors import LmError
from lm.evaluation.tasks import read_tasks
from lm.inference.pretrained import load_pretrained
from lm.runs.checkpoint import read_folder
from lm.runs.trainer_json import find_damage
from lm.training.budget import Sidecar

pytestmark = pytest.mark.fault(25)
LONGEST = 1000  # characters of a message
KEYS = sorted({option.name for option in all_options("plan")} - {"config", "trainer.callbacks"})
BASE = copy.deepcopy(CONFIG)
del BASE["trainer"]["callbacks"]


def is_refused(work, others: type[Exception] = LmError) -> bool:
    """Whether it was refused, with one line; anything but these errors that it raises fails the test.

    Of files that other programs wrote, and that are damaged, the error of a library will do: `lm` makes a line of it.
    """
    try:
        with bounds():
            work()
    except LmError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < LONGEST, str(error)
        return True
    except others:
        return True
    return False


def command(*arguments: str) -> bool:
    """As `is_refused`, of a command; with --debug nothing that was not foreseen is made a line of."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return is_refused(lambda: main([*arguments, "--debug"]))


class Parsed(fit.TrainingCLI):
    """`lm fit` up to the moment at which it would begin to train."""

    def _run_subcommand(self, subcommand):
        pass


@pytest.fixture(scope="module")
def place(uninterrupted, tmp_path_factory):
    """A copy of the trained folder, and the working directory."""
    folder = tmp_path_factory.mktemp("fuzz") / "work"
    shutil.copytree(uninterrupted, folder, symlinks=True)
    before, root = os.getcwd(), fit.TrainingCLI
    os.chdir(folder)
    fit.TrainingCLI = Parsed
    yield folder
    fit.TrainingCLI = root
    os.chdir(before)


# ---- configs ---------------------------------------------------------------------------------------------------------
@st.composite
def configs(draw):
    """A sound config with one to three keys changed, or unknown, or gone; or a text that was damaged."""
    if not draw(st.integers(0, 5)):
        return draw(damaged(yaml.safe_dump(BASE).encode()))
    config = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.one_of(*[st.sampled_from(KEYS)] * 5, TEXTS)).split(".")
        inside = config
        for key in path:
            inside = inside.setdefault(key, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[last] = draw(st.one_of(NUMBERS, NUMBERS, VALUES))
    return yaml.dump(config, allow_unicode=draw(st.booleans())).encode("utf-8", "surrogatepass")


@examples(500)
@given(text=configs())
def test_a_config_of_any_kind_is_planned_or_refused(place, text):
    (place / "any.yaml").write_bytes(text)

    def plan():
        asked = request.read("plan", ["--config", "any.yaml"])
        json.dumps(examine(with_classes(asked), asked.command_options))

    is_refused(plan)


@examples(60)
@given(text=configs())
def test_a_fit_reads_any_config_or_refuses_it(place, text):
    (place / "any.yaml").write_bytes(text)
    command("fit", "--config", "any.yaml")


# ---- files -----------------------------------------------------------------------------------------------------------
def altered(path, as_json=False):
    """Strategy of what a file may have become: damaged bytes, or a JSON of other values."""
    whole = path.read_bytes()
    if not as_json:
        return damaged(whole)
    return st.one_of(damaged(whole), changed(json.loads(whole)).map(lambda value: json.dumps(value).encode()))


def each_file(folder, names):
    """Strategy of (name, content): one of the files of a folder, altered."""
    return st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), altered(folder / name, name.endswith(".json")))
    )


@contextlib.contextmanager
def in_place_of(path, content):
    """A file has another content for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield content == before
    finally:
        path.write_bytes(before)


CHECKPOINT = ["config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json",
              "tokenizer_config.json", "trainer.json"]  # fmt: skip


@examples(250)
@given(data=st.data())
def test_no_damage_to_a_checkpoint_goes_unseen(place, data):
    """Every byte of every file counts."""
    folder = (place / "checkpoints/small/last").resolve()
    name, content = data.draw(each_file(folder, CHECKPOINT))
    with in_place_of(folder / name, content) as same:
        assert (find_damage(folder) is None) == same
        assert is_refused(lambda: read_folder(folder)) != same
        assert is_refused(lambda: load_pretrained(folder, "cpu")) != same


@examples(250)
@given(data=st.data())
def test_a_model_of_others_is_used_or_refused(place, data):
    """Files without digests: their weights and tokenizer are read by libraries that were written in other languages."""
    folder = place / "model"
    if not folder.exists():
        names = [name for name in CHECKPOINT if name not in ("trainer.json", "optimizer.safetensors")]
        folder.mkdir()
        for name in names:
            shutil.copy(place / "checkpoints/small/last" / name, folder / name)
    name, content = data.draw(each_file(folder, sorted(path.name for path in folder.iterdir())))
    with in_place_of(folder / name, content):
        is_refused(lambda: load_pretrained(folder, "cpu").generate("The", max_new_tokens=2), Exception)


@examples(250)
@given(data=st.data())
def test_a_prepared_folder_has_its_tokens_or_is_refused(place, data):
    """Shards or their manifest were damaged: the tokens are those that were written, or there are none."""
    folder = place / "data/small"
    whole = tokens(folder / "train")
    name, content = data.draw(each_file(folder, ["manifest.json", "train/00000.parquet", "tokenizer.json"]))
    with in_place_of(folder / name, content):
        found = []
        if not is_refused(lambda: found.append(tokens(folder / "train")), Exception):
            assert found == [whole]


def tokens(folder):
    shards = Shards.open(str(folder))
    return [shards.read(index).tolist() for index in range(len(shards.index.blocks))]


@examples(100)
@given(data=st.data())
def test_shards_of_others_are_read_or_refused(place, data):
    folder = place / "other"
    folder.mkdir(exist_ok=True)
    shutil.copy(place / "data/small/val/00000.parquet", folder / "a.parquet")
    (folder / "a.parquet").write_bytes(data.draw(altered(folder / "a.parquet")))
    is_refused(lambda: tokens(folder), Exception)


RUN = ["run.json", "state.json", "heartbeat.json", "data.json", "metrics.jsonl", "alerts.jsonl", "evaluations.jsonl",
       "config.yaml", "log.txt"]  # fmt: skip
LOOKS = [
    ["monitor", "small", "--json"], ["monitor", "small"], ["runs", "ls"], ["runs", "ls", "--json"],
    ["runs", "show", "small"], ["runs", "compare", "small", "small"], ["runs", "rebuild"],
    ["data", "show", "--run", "small", "--step", "2"], ["plan", "--config", "checkpoints/small/config.yaml"],
    ["fit", "--config", "small.yaml", "--ckpt_path", "auto"],
]  # fmt: skip


@examples(250)
@given(data=st.data())
def test_a_run_is_looked_at_whatever_its_files_say(place, data):
    """The files that a run keeps up while it trains, which a full disk or a kill may have left in any state."""
    folder = place / "checkpoints/small"
    if not (folder / "alerts.jsonl").exists():
        alert = {"step": 3, "time": 1.7e9, "guard": "alert", "action": "warn", "message": "loss > 1"}
        task = {"accuracy": 0.5, "centered": 0.1, "interval": [0.4, 0.6], "baseline": 0.2, "items": 9, "num_fewshot": 0}
        texts = {"bits_per_byte": 1.5, "loss": 2.5, "tokens": 100}
        found = {"step": 12, "checkpoint": "step-00000012", "time": 1.7e9, "tasks": {"a": task}, "core": 0.1,
                 "core_interval": [0.0, 0.2], "texts": {"b": texts}, "settings": {}}  # fmt: skip
        (folder / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
        (folder / "evaluations.jsonl").write_text(json.dumps(found) + "\n")
    name, content = data.draw(lines_or_file(folder))
    look = data.draw(st.sampled_from(LOOKS))
    with in_place_of(folder / name, content):
        command(*look)


@st.composite
def lines_or_file(draw, folder):
    """One of a run's files, altered; of one with a JSON a line sometimes a line's values."""
    name = draw(st.sampled_from(RUN))
    if name.endswith(".jsonl") and draw(st.booleans()):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = draw(changed(lines[number]))
        return name, "".join(json.dumps(line) + "\n" for line in lines).encode()
    return name, draw(altered(folder / name, name.endswith(".json")))


@examples(100)
@given(data=st.data())
def test_a_registry_of_any_bytes_is_set_aside_or_refused(place, data):
    """The runs themselves are in their folders, and are found again."""
    registry = place / "runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LM_REGISTRY", str(registry))
        for file in place.glob("runs.db*"):
            file.unlink()
        assert not command("runs", "rebuild")
        registry.write_bytes(data.draw(altered(registry)))
        command("runs", "ls", "--json")
        command("runs", "show", "small")
        command("runs", "rebuild")


TASKS = {"icl_tasks": [{"label": "a", "dataset_uri": "items.jsonl", "icl_task_type": "multiple_choice",
                        "num_fewshot": [0]}]}  # fmt: skip
ITEM = {"query": "which", "choices": ["one", "two"], "gold": 0}
SPENT = {"spent_usd": 1.5, "cap_usd": 100.0, "gpu_rate_usd_per_hr": 2.0, "last_update_utc": "2026-01-01T00:00:00+00:00"}


@examples(200)
@given(data=st.data())
def test_tasks_and_a_budget_of_any_kind_are_read_or_refused(place, data):
    """What other programs and people write."""
    files = {"tasks.yaml": TASKS, "items.jsonl": ITEM, "budget.json": SPENT}
    for name, document in files.items():
        (place / name).write_text(json.dumps(document))
    (place / "eval_meta_data.csv").write_text("Eval Task,Random baseline\na,50\n")
    name = data.draw(st.sampled_from([*files, "eval_meta_data.csv"]))
    (place / name).write_bytes(data.draw(altered(place / name, name != "eval_meta_data.csv")))
    is_refused(lambda: read_tasks(["tasks.yaml"]), Exception)
    is_refused(lambda: read_tasks(["items.jsonl"]), Exception)
    content, wrong = Sidecar(place / "budget.json").read()
    assert content is None or wrong is None
