"""`lm runs`: what a person sees of runs, compares, hands on and removes."""

import csv
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from processor_time import run_python
from run_folders import write_run
from safetensors.torch import load_file
from terminal import Terminal
from trainings import fit, lm, make_workplace

from lm.cli.charts import MARKERS, chart
from lm.cli.runs_compare import export
from lm.errors import RequestError, RunError
from lm.runs import registry
from lm.runs.history import Series
from lm.runs.run import Run
from lm.system.arguments import call

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A registry of this test alone, and a working directory."""
    monkeypatch.setenv("LM_REGISTRY", str(tmp_path / "home" / "runs.db"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that was really trained."""
    return fit(make_workplace(tmp_path_factory.mktemp("runs")))[1]


def make(name="a", root="checkpoints", status="finished", entered=None, steps=40, lr=0.1, seed=7, more=(), **facts):
    """A run whose training loss falls to 0.325 and whose validation loss is 2.1 in the end."""
    lines = [{"step": step, "train/loss": 9 / step + lr, "perf/tokens_per_second": 1e4, "optim/grad_norm": 1.0}
             for step in range(1, steps + 1)]  # fmt: skip
    changes = {"model.optimizer.lr": lr, "seed_everything": seed}
    return write_run(root, name, [*lines, {"step": steps, "val/loss": 2.0 + lr}, *more], status, entered,
                     changes=changes, **facts)  # fmt: skip


def runs(*arguments, cwd=None, **options):
    """`lm runs ...` with its output in a pipe."""
    return lm(cwd or Path.cwd(), "runs", *arguments, **options)


def in_terminal(*arguments, answer=""):
    """`lm runs ...` on a terminal, where a person types `answer`; what the terminal shows."""
    terminal = Terminal(Path.cwd(), "-m", "lm", "runs", *arguments)
    terminal.type(answer)
    terminal.end()
    return terminal.output.decode()


# ---- ls --------------------------------------------------------------------------------------------------------------
def test_ls_shows_every_run_newest_last_within_80_columns(place):
    make("finished", entered=1e9)
    make("elsewhere", root=place.parent / "other" / "checkpoints", entered=2e9 - 1e9 + 5)
    registry.record_run(Run(place.parent / "other" / "checkpoints" / "elsewhere"))
    make("a-name-that-is-longer-than-any-table-of-80-columns-has-room-for", entered=time.time() - 7300)
    make("stopped", status="stopped", reason="loss > 10 for a reason that goes on and on " * 4, entered=1.5e9)
    make("killed", status="running", entered=time.time() - 3600)
    alive = make("alive", status="running", entered=time.time() - 3000)
    alive.write_heartbeat({})
    lines = runs("ls").stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("/")) <= 80  # a path is whole, however long
    text = "\n".join(lines)
    order = [text.index(f"\n{name}") for name in ("finished", "stopped", "a-name-that", "killed", "alive", "elsewhere")]
    assert order == sorted(order) and str(place.parent / "other" / "checkpoints") in lines
    row = {line.split()[0]: line for line in lines}
    assert re.search(r"alive +running +40/50 +2\.1 +0\.325 +10K +50 min", row["alive"])
    assert " dead " in row["killed"] and re.search(r"\na-name-that-\S+  finished .* 2 h\n", text)
    assert "stopped: loss >" in row["stopped"] and "…" in text


def test_ls_tells_what_the_folders_say_with_colours_on_a_terminal_alone(place):
    run = make(status="running")
    registry.record_run(run)  # which remembers it as running
    run.describe(status="failed", reason="after that")
    (found,) = json.loads(runs("ls", "--json").stdout)
    assert (found["status"], found["reason"]) == ("failed", "after that") and not COLOUR.search(runs("ls").stdout)
    shown = in_terminal("ls")
    assert "\x1b[31mfailed" in shown and all(len(COLOUR.sub("", line)) <= 80 for line in shown.splitlines())


def test_ls_leaves_removed_runs_out_and_says_which_cannot_be_reached(place):
    kept, removed = make("kept"), make("removed")
    away = make("away", root=place.parent / "disk" / "checkpoints")
    registry.note([kept, removed, away])
    (removed.path / "run.json").unlink()
    (place.parent / "disk").rename(place.parent / "unplugged")
    found = {run["name"]: run["status"] for run in json.loads(runs("ls", "--json").stdout)}
    assert found == {"kept": "finished", "away": "gone"}
    assert {row["name"] for row in registry.known_runs()} == {"kept", "away"}


def test_ls_works_without_a_registry_and_without_runs(place, monkeypatch):
    assert "no runs under checkpoints" in runs("ls").stdout and runs("ls", "--json").stdout == "[]\n"
    make()
    assert "\na " in runs("ls").stdout
    monkeypatch.setenv("LM_REGISTRY", str(place / "checkpoints"))
    done = runs("ls")
    assert "\na " in done.stdout and "cannot be read" in done.stderr


def test_ls_shows_all_runs_of_this_folder_and_the_newest_twenty_of_others_unless_all_are_wanted(place):
    for index in range(23):
        make(f"r{index}", entered=float(index + 1), steps=1)
    assert all(f"\nr{index} " in runs("ls").stdout for index in (0, 22))
    registry.note(Run.all())
    (place / "new").mkdir()
    text = runs("ls", cwd=place / "new").stdout
    assert text.startswith("no runs under checkpoints: start one with `lm fit --config tiny.yaml`\n")
    assert "3 older runs of other folders: --all shows them" in text and "r3 " in text and "r2 " not in text
    assert "r2 " in runs("ls", "--all", cwd=place / "new").stdout
    for index in (0, 1):
        shutil.rmtree(place / "checkpoints" / f"r{index}")
    assert "\n1 older run of other folders" in runs("ls", cwd=place / "new").stdout


def test_the_last_step_is_that_of_the_last_checkpoint_where_a_kill_left_the_log_behind(place):
    run = make(status="running", steps=40)
    (run.path / "step-00000044").mkdir()
    (run.path / "step-00000044" / "trainer.json").touch()
    (run.path / "last").symlink_to("step-00000044")
    assert re.search("dead +44/50", runs("ls").stdout) and "step 44 of 50" in runs("show", "a").stdout


def test_ls_answers_at_once_without_torch(place):
    registry.note([make(f"r{index}") for index in range(30)])
    code = "import sys; from lm.cli.command import main; assert main(['runs', 'ls']) == 0;"
    code += "assert not {'torch', 'lightning', 'numpy', 'pyarrow'} & set(sys.modules)"
    assert run_python(code)[1] < 2  # usually a fifth of a second


# ---- show ------------------------------------------------------------------------------------------------------------
def test_show_puts_all_that_matters_on_a_page(trained):
    text = runs("show", str(trained.path)).stdout
    steps = [int(path.name.removeprefix("step-")) for path in trained.steps().values()]
    state, facts = trained.read("state.json"), trained.read("run.json")
    for part in (
        "small  finished: all steps done", "step 12 of 12 (100%), 3.07K tokens", f"step {max(steps)} (", "last, ",
        f"{state['metrics']['val/bpb']:.4f}", "model.decoder.num_hidden_layers 2,",
        "model.optimizer.lr 0.01,", "data.global_batch_tokens 256,", "lm fit --config", f"on {facts['host']}",
        f"torch {facts['versions']['torch']}", " of training over all sessions", " FLOPs",
    ):  # fmt: skip
        assert part in text, part
    weights = load_file(trained.path / "last" / "model.safetensors")
    found = json.loads(runs("show", str(trained.path), "--json").stdout)
    assert found["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert found["curves"]["train/loss"]["first_step"] == 1 and found["curves"]["train/loss"]["last_step"] == 12
    assert found["config"]["model"]["optimizer"]["lr"] == 0.01


def test_the_command_that_show_ends_with_works_from_any_folder(trained, place):
    before = trained.read("run.json")
    trained.describe(status="interrupted", reason="SIGTERM")
    command = runs("show", str(trained.path), fresh=True).stdout.splitlines()[-1].removeprefix("next").strip()
    trained.describe(**before)
    home, _, rest = command.partition(" && ")
    assert home == f"cd {trained.path.parent.parent.resolve()}"
    program = f"{sys.executable} -m lm"
    assert rest == f"{program} fit --config checkpoints/small/config.yaml --ckpt_path auto"
    folder = home.removeprefix("cd ")
    assert "all 12 steps are done" in lm(Path(folder), *rest.split()[3:]).stderr
    finished = runs("show", "small", cwd=folder, fresh=True).stdout.splitlines()[-1].removeprefix("next").strip()
    assert finished == f"{program} validate --ckpt_path checkpoints/small/best"


def test_show_has_alerts_samples_costs_and_post_mortems(place):
    run = make(status="stopped", reason="loss > 10\x1b[2J")
    alert = {"time": 0.0, "guard": "alert", "action": "warn", "message": "loss [bold] > 9"}
    for step in range(7):
        run.append("alerts.jsonl", {"step": step, **alert})
    samples = [{"step": 1, "prompt": "earlier", "text": "!"},
               {"step": 9, "prompt": "The [red]", "text": "state\nof\x1b[2J"}]  # fmt: skip
    (run.path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)) + '\n{"st')
    (run.path / "budget.json").write_text(json.dumps({"spent_usd": 1.5, "cap_usd": 20}))
    (run.path / "postmortem-00000007").mkdir()
    text = runs("show", "a").stdout
    assert "2 before these" in text and "step 6, alert: loss [bold] > 9 (warn)" in text
    assert "step 9: The [red] state of␛[2J" in text and "earlier" not in text
    assert "\x1b" not in text + runs("ls").stdout  # what a model wrote does nothing to the terminal
    assert "spent_usd 1.50, cap_usd 20.00" in text and "postmortem-00000007" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])  # the command comes last, in one piece


def test_show_has_time_operations_speed_load_and_pauses_over_all_sessions(place):
    write_run("checkpoints", flops_per_token=2e6, lines=[
        {"step": step, "tokens": step * 100, "time": 1e9 + step * 3, "perf/gpu_load": load, "perf/data_wait": 0.25,
         "perf/tokens_per_second": 50.0, "perf/mfu": 0.4, "perf/mfu_full_attention": 0.42}
        for step, load in ((10, 80.0), (20, 90.0))
    ])  # fmt: skip
    found = json.loads(runs("show", "a", "--json").stdout)
    assert found["seconds"] == {"computing": 30.0, "waiting for data": 10.0, "pauses": 10.0} and found["flops"] == 4e9
    shown = " ".join(runs("show", "a").stdout.split())
    for words in (
        "time 40 s of training over all sessions, 25.0% of it waiting for data; 10 s of pauses", "4e+09 FLOPs",
        "mean GPU load 85%", "median MFU: 40.0% by what attention attends to; 42.0% by its full length",
    ):  # fmt: skip
        assert words in shown


def test_show_has_the_time_of_a_branch_without_that_of_its_trunk(place):
    """64 samples of 32 tokens were the trunk's, and the branch has as many steps at 64 tokens a second."""
    write_run("checkpoints", lines=[{"step": 20, "tokens": 2048 + 640, "perf/tokens_per_second": 64.0}],
              stretches=[{"step": 10, "sample": 64, "global_batch": 2}], changes={"data.seq_len": 32})  # fmt: skip
    assert json.loads(runs("show", "a", "--json").stdout)["seconds"]["computing"] == 10.0


def test_show_of_a_run_that_has_only_just_begun(place):
    run = Run.create("a", "checkpoints")
    run.describe(id="a", name="a", status="running", entered=time.time())
    assert "no step yet" in runs("show", "a").stdout


# ---- compare ---------------------------------------------------------------------------------------------------------
def test_compare_draws_both_and_shows_only_what_differs(place):
    make("slow", lr=0.1), make("fast", lr=0.2, steps=30)
    done = runs("compare", "slow", "fast", "--png", "both.png")
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines[0]) == 80
    assert lines[0].split() == ["train/loss", "o", "slow", "x", "fast"]
    plot = "\n".join(lines[1:20])
    assert plot.count("o") > 1 and plot.count("x") > 1 and not COLOUR.search(done.stdout)
    assert re.search(r"o +slow \(best\) +finished +0\.325 +0\.325 +40 +2\.1", done.stdout)
    settings = done.stdout[done.stdout.index("setting") :].splitlines()[1:]
    assert [line.split() for line in settings] == [["model.optimizer.lr", "0.1", "0.2"]]
    assert (place / "both.png").read_bytes().startswith(b"\x89PNG") and "the chart is in both.png" in done.stderr
    assert "\x1b[36m" in in_terminal("compare", "slow", "fast")


def test_compare_names_no_best_run_where_the_validation_texts_differ(place):
    make("a"), make("b", lr=0.2)
    config = Run("checkpoints/b").config
    config.write_text(config.read_text() + "data: {path: data/other}\n")
    said = runs("compare", "a", "b").stdout
    assert "(best)" not in said and "data.path differ" in said


def test_a_sweep_is_compared_by_a_pattern(place):
    for name, lr in (("lr-high", 0.2), ("lr-low", 0.003), ("lr-mid", 0.01), ("other", 0.5)):
        make(name, lr=lr)
    found = json.loads(runs("compare", "lr-mid", "lr-[lm]*", "--json").stdout)
    assert {one["run"] for one in found["runs"]} == {"lr-mid", "lr-low"}
    assert "other" not in runs("compare", "lr-*").stdout
    assert "no run 'x-*' under checkpoints" in runs("compare", "x-*", expect=2).stderr


def test_compare_takes_another_metric_and_another_axis(place):
    make("a"), make("b", lr=0.2)
    found = json.loads(runs("compare", "a", "b", "--x", "tokens", "--json").stdout)
    raw = [line["train/loss"] for line in Run("checkpoints/a").metrics() if "train/loss" in line]
    assert found["curves"]["a"]["x"][:2] == [256, 512] and found["curves"]["a"]["y"] == raw
    hours = json.loads(runs("compare", "a", "b", "--x", "time", "--json").stdout)["curves"]["b"]["x"]
    assert hours[0] == 0 and hours[-1] == pytest.approx(39 * 9 / 3600)
    assert "val/loss" in runs("compare", "a", "b", "--metric", "val/loss").stdout.splitlines()[0]


@pytest.mark.parametrize("arguments, message", [
    (["a"], "two runs or more"), ([], "two runs or more"), (["a", "a"], "two runs or more"), (["a", "c"], "no run 'c'"),
    (["a", "b", "--metric", "train/los"], "did you mean 'train/loss'"),
    (["a", "b", "--metric", "loss"], "nothing logs a metric 'loss'; did you mean 'train/loss'?"),
    (["a", "b", "--x", "epoch"], "x: "),
])  # fmt: skip
def test_compare_refuses_in_one_line(place, arguments, message):
    make("a"), make("b")
    assert message in runs("compare", *arguments, expect=2).stderr.splitlines()[-1]


# ---- export ----------------------------------------------------------------------------------------------------------
def test_an_export_holds_the_run_and_its_weights_byte_for_byte(trained, place):
    runs("export", str(trained.path), "--output", "out")
    out = place / "out"
    names = {path.name for path in out.iterdir() if not path.name.startswith("events.")}
    assert names == {
        "manifest.json", "metrics.csv", "metrics.parquet", "loss.png", "norms.png", "throughput.png",
        "final.safetensors", "config.yaml",
    }  # fmt: skip
    last = trained.link("last")
    assert (out / "final.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    for events in trained.path.glob("events.*"):
        assert (out / events.name).read_bytes() == events.read_bytes()
    assert len(list(out.glob("events.*"))) > 0
    manifest = json.loads((out / "manifest.json").read_text())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    assert manifest["files"] == {name: sha for name, sha in digests.items() if name != "manifest.json"}
    assert manifest["checkpoint"] == {"step": 12, "sha256": digests["final.safetensors"]}
    assert manifest["config_sha256"] == digests["config.yaml"] and manifest["seed"] == 7
    facts, machine = trained.read("run.json"), manifest["machine"]
    assert machine["device"] == facts["device"] and manifest["command"] == facts["command"]
    assert machine["cores"] == os.cpu_count() and {"driver", "cuda", "memory_bytes"} <= machine.keys()
    assert manifest["versions"]["torch"] == facts["versions"]["torch"] and manifest["tokens"] == 12 * 256
    assert list(place.iterdir()) == [out]


def test_exported_metrics_are_exact_in_both_tables(trained, place):
    export(str(trained.path), "out", checkpoint="none")
    with open("out/metrics.csv", newline="") as file:
        rows = [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    table = pq.read_table("out/metrics.parquet").to_pylist()
    assert rows == [(row["step"], row["name"], row["value"]) for row in table]
    assert rows == sorted(rows) and len({row[:2] for row in rows}) == len(rows)
    logged = {(line["step"], name): value for line in trained.metrics() for name, value in line.items() if "/" in name}
    assert {(step, name): value for step, name, value in rows if "/" in name and name != "data/tokens"} == logged
    assert not (place / "out" / "final.safetensors").exists()


def test_an_export_is_refused_or_whole(trained, place):
    (place / "full").mkdir()
    (place / "full" / "file").write_text("mine")
    with pytest.raises(RequestError, match="not an empty folder"):
        export(str(trained.path), "full")
    assert (place / "full" / "file").read_text() == "mine"
    weights = trained.link("last") / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RunError, match="is damaged"):
            export(str(trained.path), "out")
    finally:
        weights.write_bytes(whole)
    assert [path.name for path in place.iterdir()] == ["full"]
    (place / "empty").mkdir()
    export(str(trained.path), "empty", checkpoint="best")
    best = trained.link("best") / "model.safetensors"
    assert (place / "empty" / "final.safetensors").read_bytes() == best.read_bytes()


# ---- rebuild ---------------------------------------------------------------------------------------------------------
def test_a_rebuilt_registry_is_the_one_that_was_lost(place):
    here, there = make("a"), make("b", root=place.parent / "other")
    registry.note([here, there])
    before = registry.known_runs()
    file = Path(os.environ["LM_REGISTRY"])
    runs("rebuild")  # from the folders that it knows
    assert registry.known_runs() == before
    for part in file.parent.iterdir():
        part.unlink()
    assert runs("rebuild", "../other").stdout.endswith("runs.db has 2 runs\n")
    assert registry.known_runs() == before
    shutil.rmtree(there.path)
    assert runs("rebuild").stdout.endswith("runs.db has 1 run\n")
    assert "not a folder" in runs("rebuild", "nowhere", expect=2).stderr


# ---- the chart and the command line ----------------------------------------------------------------------------------
def test_a_chart_is_exactly_as_large_as_asked_for():
    series = [Series("one", [1, 2, 9], [2.0, float("nan"), 4]), Series("y" * 40, [1, 2, 9], [3.0, 1, float("inf")])]
    for width in range(1, 90, 7):
        for height in range(1, 24, 3):
            for some in (series, series[:1], [], [Series("flat", [5], [1.0])]):
                lines = chart(some, width, height, "step", "loss").plain.split("\n")
                assert [len(line) for line in lines] == [width] * height


def test_a_chart_shows_where_a_curve_goes():
    """A falling line begins at the top left and ends at the bottom right; the axes have its numbers."""
    lines = chart([Series("a", range(101), [100.0 - x for x in range(101)])], 60, 14, x_label="step").plain.split("\n")
    assert lines[0][:5] == "100┤⠉" and not lines[0][30:].strip() and not lines[11][4:30].strip()
    assert lines[11].rstrip()[-1] == lines[11][59] == "⣀" and lines[11].startswith("  0┤")
    assert lines[13].split() == ["0", "20", "40", "60", "80", "step"]
    gap = chart([Series("a", [0, 1, 2, 3], [1.0, float("nan"), float("nan"), 1.0])], 40, 5).plain.split("\n")
    assert sum(ord(character) > 0x2800 and ord(character) < 0x2900 for line in gap for character in line) == 2


def test_curves_of_a_chart_differ_without_colour():
    series = [Series(f"c{index}", range(80), [float(index)] * 80) for index in range(6)]
    lines = chart(series, 80, 20, title="loss").plain.split("\n")
    for marker, one in zip(MARKERS, series, strict=False):
        assert f"{marker} {one.name}" in lines[0] and any(line.count(marker) > 2 for line in lines[1:])


def test_a_command_takes_a_list_of_names_wherever_they_stand():
    def command(names: list[str], depth: int = 1, loud: bool = False) -> None:
        return names, depth, loud

    for line in ("a b 3 --depth 2 --loud", "--depth 2 a --loud b 3", "--loud --depth=2 a b 3"):
        assert call(command, line.split(), prog="x") == (["a", "b", "3"], 2, True)
    assert call(command, [], prog="x") == ([], 1, False)
    with pytest.raises(RequestError, match="did you mean 'depth'"):
        call(command, ["a", "--deph", "2"], prog="x")
