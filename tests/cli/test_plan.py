"""`lm plan` says on one page what a config means, and finds what would make a run fail or be worth nothing."""

import json
import os
import re
import shutil
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from shard_files import write_rows
from trainings import fit, lm, start, write_config

from lm.cli.command import main
from lm.system.devices import peak_flops

CONFIGS = Path(__file__).parent.parent.parent / "configs"
PLAIN = {"trainer.callbacks": None, "trainer.accelerator": "auto"}


@pytest.fixture
def planned(prepared, monkeypatch, capsys):
    """Run `lm plan` on a changed config: exit code, JSON object, and what went to standard error."""
    monkeypatch.chdir(prepared)

    def run(*options, **changes):
        write_config(prepared, **{**PLAIN, **changes})
        code = main(["plan", "--config", "small.yaml", "--device", "h200", "--json", *options])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out.startswith("{") else out, err

    return run


@pytest.fixture
def bench(planned, prepared):
    """The option with a result of `lm bench step` on the model of the config."""
    model = {"parameters": planned()[1]["model"]["parameters"]["total"], "seq_len": 32}

    def write(**measured):
        (prepared / "bench.json").write_text(json.dumps(model | measured))
        return "--bench", "bench.json"

    return write


def found(planned_run, level):
    """The findings of a level, as one text each."""
    return [f"{one['what']} {one['cure']}" for one in planned_run[1]["findings"] if one["level"] == level]


def test_a_document_mask_without_documents_is_said(planned, prepared):
    """And not where documents end, as in prepared data; the memory is that of as many sequences."""
    changes = {"data.micro_batch_size": 256, "data.global_batch_tokens": None, "trainer.precision": "bf16-mixed"}
    plain, masked = planned(**changes), planned(**changes, **{"model.document_mask": True})
    assert not [text for text in found(masked, "warning") if "document_mask" in text]
    assert masked[1]["data"]["train"]["documents_per_token"] > 0
    assert masked[1]["memory"]["working"] > plain[1]["memory"]["working"]
    (prepared / "endless").mkdir()
    write_rows(prepared / "endless" / "a.parquet", [list(range(3, 30)) * 40])
    data = {"data.path": None, "data.prepare": None, "data.train": "endless", "data.tokenizer": "data/small"}
    said = found(planned(**{"model.document_mask": True, **data}), "warning")
    assert [text for text in said if "model.document_mask does nothing" in text]


# ---- the page --------------------------------------------------------------------------------------------------------
def test_a_page_that_a_person_can_read(prepared):
    write_config(prepared, **PLAIN)
    before = sorted(os.walk(prepared))
    begun = time.monotonic()
    shown = lm(prepared, "plan", "--config", "small.yaml", "--device", "a100", "--rate_usd_per_hr", "2").stdout
    assert time.monotonic() - begun < 60  # a few seconds, on a machine with nothing else to do
    assert sorted(os.walk(prepared)) == before
    for part in ("model ", "data ", "steps ", "memory ", "time ", "disk ", "ready"):
        assert any(line.startswith(part) for line in shown.splitlines()), part
    assert "4 x 32 tokens x 2 micro-batches x 1 rank = 256 tokens a step" in shown
    assert re.search(
        r"^disk +(.+) a checkpoint, .*\n +\1 of memory, to write it while training goes on$",
        shown,
        re.MULTILINE,
    )
    assert "USD" in shown and "NVIDIA A100-SXM4-80GB" in shown
    assert max(map(len, shown.splitlines())) < 180


def test_the_same_facts_for_programs(planned):
    code, facts, err = planned()
    assert code == 0 and facts["ready"] and err == ""
    assert facts["steps"]["tokens"] == 12 * 256 and facts["steps"]["warmup_steps"] == 2
    assert facts["steps"]["epochs"] == pytest.approx(12 * 8 / facts["data"]["train"]["windows"])
    assert facts["model"]["parameters"]["total"] > 0 and facts["model"]["vocab_size"] > 10
    parts = ("weights", "gradients", "optimizer", "casts", "activations", "working")
    assert facts["memory"]["peak"] == sum(facts["memory"][part] for part in parts)
    rate = facts["time"]["tokens_per_second"] * facts["model"]["flops_per_token"]
    assert rate == pytest.approx(0.4 * peak_flops("NVIDIA H200", "32-true"))
    model, time = facts["model"], facts["time"]
    more = model["flops_per_token_full_attention"] / model["flops_per_token"]
    assert more > 1 and time["mfu_full_attention"] / time["mfu"] == pytest.approx(more)
    assert facts["disk"]["at_once"] == 3 * facts["disk"]["checkpoint"] < facts["disk"]["free"]


def test_time_and_cost_follow_from_what_is_given(planned, bench):
    _, assumed, _ = planned("--rate_usd_per_hr", "3.6")
    _, given, _ = planned("--rate_usd_per_hr", "3.6", "--mfu", "0.2")
    assert given["time"]["seconds"] == pytest.approx(2 * assumed["time"]["seconds"])
    assert given["time"]["usd"] == pytest.approx(given["time"]["seconds"] * 1e-3)
    _, by_bench, _ = planned(*bench(tokens_per_second=100.0))
    assert by_bench["time"]["seconds"] == pytest.approx(12 * 256 / 100)
    code, _, err = planned(*bench(tokens_per_second=100.0, parameters=1))
    assert code == 2 and "of another model" in err and err.count("\n") == 1


def test_any_other_device_is_given_by_its_memory_and_its_peak(planned):
    code, facts, _ = planned("--device", "auto", "--memory", "16GiB", "--peak_tflops", "120")
    assert code == 0 and facts["memory"]["device"] == 16 * 2**30 and facts["device"]["kernels"]
    rate = facts["time"]["tokens_per_second"] * facts["model"]["flops_per_token"]
    assert rate == pytest.approx(0.4 * 120e12)
    assert planned("--device", "4060-ti", "--memory", "16GB")[1]["memory"]["device"] == 16 * 10**9
    assert "--memory 16GiB --peak_tflops" in planned("--device", "mi250")[2]
    code, _, err = planned("--memory", "16")
    assert code == 2 and "expected a size with its unit, such as 16GiB, got '16'" in err and err.count("\n") == 1


def test_fit_prints_the_flag_to_take(planned, capsys):
    assert planned("--fit")[1]["fit"] == {"data.micro_batch_size": 8}  # all 8 samples of a step fit at once
    assert main(["plan", "--config", "small.yaml", "--fit", "--device", "t4"]) == 0
    assert capsys.readouterr().out == "--data.micro_batch_size 8\n"


def test_fit_finds_the_largest_of_all_where_no_global_batch_is_given(planned):
    """It fits and twice as much does not; what it does to a step is said."""
    unset = {"data.global_batch_tokens": None}
    best = planned(**unset)[1]["memory"]["largest_micro_batch"]
    facts = planned(**unset | {"data.micro_batch_size": best})[1]["memory"]
    twice = planned(**unset | {"data.micro_batch_size": 2 * best})
    assert best > 1000 and facts["total"] <= facts["device"] < twice[1]["memory"]["total"]
    (error,) = [text for text in found(twice, "error") if "a step takes" in text]
    tokens = f"{best * 32:,} tokens, because data.global_batch_tokens is not set"
    assert f"--data.micro_batch_size {best}: the largest that fits, and a step then has {tokens}" in error


@pytest.mark.parametrize("preset", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_preset_is_sound(preset, capsys):
    """Schema and algebra, and on the device that it is for there is nothing wrong but that the data is not here."""
    assert main(["plan", "--config", preset, "--strict", "--json"]) == 0
    assert main(["plan", "--config", preset, "--device", "h100", "--json"]) in (0, 2)
    strict, whole = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert strict["ready"]
    # The vocabulary of characters is known when the texts have been read.
    if preset not in ("char.yaml", "shakespeare.yaml", "shakespeare-10m.yaml"):
        assert whole["memory"]["total"] < whole["memory"]["device"]
    assert all("holds no manifest.json" in one["what"] for one in whole["findings"] if one["level"] == "error")


def test_what_presets_say_of_plan_is_what_it_prints(capsys):
    said = [line for path in sorted(CONFIGS.glob("*.yaml")) for line in path.read_text().splitlines()
            if line.startswith("#   lm plan") and "  # " in line]  # fmt: skip
    assert len(said) == 6
    for line in said:
        command, _, text = line.removeprefix("#   lm ").partition("  # ")
        main(command.split())
        assert text in capsys.readouterr().out, line


# ---- the same checks when a fit begins -------------------------------------------------------------------------------
@pytest.fixture
def cwd(tmp_path, prepared):
    """A folder of its own, with the texts and the data."""
    for name in ("texts", "data"):
        shutil.copytree(prepared / name, tmp_path / name)
    write_config(tmp_path, **{"trainer.callbacks": None, "trainer.max_steps": 2})
    return tmp_path


LARGE = ["--model.decoder.hidden_size", "8192", "--model.decoder.intermediate_size", "32768",
         "--model.decoder.num_hidden_layers", "20", "--model.schedule.warmup_steps", "0"]  # fmt: skip


def test_a_fit_refuses_what_plan_calls_an_error(cwd):
    """In lines with a cure each, which works when it is typed; no run is begun, no data made and no model built."""
    large = lm(cwd, "fit", "--config", "small.yaml", *LARGE, expect=2).stderr.splitlines()
    assert re.search(r"^a step takes about \d+ GiB of .*'s [\d.]+ GiB that are free, .* with --force$", large[-2])
    assert large[-1].startswith("lm fit: checkpoints of 225 GiB need 675 GiB at once, and")
    shutil.rmtree(cwd / "data")
    refused = lm(cwd, "fit", "--config", "small.yaml", expect=2).stderr
    said = "the warm-up of 2 steps is not over when the run of 2 ends: --model.schedule.warmup_steps 0, or"
    assert refused.splitlines()[-1] == f"lm fit: {said} `lm fit` with --force"
    assert not (cwd / "checkpoints").exists() and not (cwd / "data").exists()
    cured = lm(cwd, "fit", "--config", "small.yaml", "--model.schedule.warmup_steps", "0").stderr
    warning = "warning: validations take 17% as long as training: 512 tokens every 4 steps of 256"
    log = (cwd / "checkpoints" / "small" / "log.txt").read_text()
    assert warning in cured and warning in log and "error" not in cured


def test_force_trains_all_the_same_and_a_resume_does_not_check_the_warm_up(cwd):
    forced = lm(cwd, "fit", "--config", "small.yaml", "--force").stderr
    assert "error: the warm-up of 2 steps is not over" in forced and "2 steps in" in forced
    again = ["--ckpt_path", "auto", "--trainer.max_steps", "4", "--model.schedule.warmup_steps", "4"]
    assert "after step 2 of 4" in lm(cwd, "fit", "--config", "small.yaml", *again).stderr


def test_the_ranks_of_a_cpu_share_its_memory(planned):
    one, two = (planned("--device", "cpu", "--trainer.devices", devices)[1]["memory"]["device"] for devices in "12")
    assert two == pytest.approx(one / 2, rel=0.2)


TAKEN = """
import re
from pathlib import Path
from lightning.pytorch import Callback

def kibibytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

class Taken(Callback):
    def on_train_start(self, trainer, pl_module):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        self.before = kibibytes("VmRSS")

    def on_train_end(self, trainer, pl_module):
        Path("taken.txt").write_text(str((kibibytes("VmHWM") - self.before) * 1024))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak as Linux has it")
def test_a_fit_on_a_cpu_takes_the_memory_that_is_planned(planned, prepared):
    """With what the allocator keeps beside the tensors, which was left out: more than half as much again."""
    wide = {"model.decoder.hidden_size": 256, "model.decoder.intermediate_size": 512, "trainer.max_steps": 3,
            "data.micro_batch_size": 128, "data.global_batch_tokens": 8192, "model.decoder.dropout": 0.0,
            "trainer.accelerator": "cpu", "trainer.val_interval": 3, "data.val_tokens": 256}  # fmt: skip
    (prepared / "taken.py").write_text(TAKEN)
    fit(prepared, "wide", **wide, **{"trainer.callbacks": [{"class_path": "taken.Taken"}]})
    memory = planned("--device", "cpu", **wide)[1]["memory"]
    assert int((prepared / "taken.txt").read_text()) == pytest.approx(memory["total"], rel=0.25), memory


def test_checkpointing_is_a_cure_only_where_it_helps(planned):
    deep = {"model.decoder.num_hidden_layers": 24, "model.decoder.hidden_size": 1024, "data.global_batch_tokens": 2**14,
            "model.decoder.max_position_embeddings": 2**14, "model.decoder.num_attention_heads": 16,
            "model.decoder.intermediate_size": 1024, "data.micro_batch_size": 1,
            "model.decoder.vocab_size": 64, "data.val_tokens": 2**14}  # fmt: skip
    (said,) = [text for text in found(planned("--device", "t4", **deep), "error") if "a step takes" in text]
    cure = re.search(r"--model.activation_checkpointing block --data.micro_batch_size 1(?=,)", said)[0].split()
    assert "a step takes" not in str(found(planned("--device", "t4", *cure, **deep), "error"))
    deep |= {"model.decoder.num_hidden_layers": 640}
    (said,) = [text for text in found(planned("--device", "t4", **deep), "error") if "a step takes" in text]
    assert "take a smaller model" in said and "checkpointing" not in said


# ---- what it must catch ----------------------------------------------------------------------------------------------
def test_data_that_is_not_there(planned, prepared):
    run = planned(**{"data.path": "elsewhere", "data.prepare": None})
    assert run[0] == 2 and "elsewhere holds no manifest.json" in found(run, "error")[0] and "model" not in run[1]
    run = planned(**{"data.path": "elsewhere"})
    assert run[0] == 0 and run[1]["data"] == {"prepared": False, "from": ["texts"]}
    assert "before the tokenizer is made" in run[1]["model"]["unknown"]
    run = planned(**{"data.path": None, "data.prepare": None, "data.train": "data/small/train/nothing*.parquet",
                     "data.tokenizer": "data/small"})  # fmt: skip
    assert run[0] == 2 and "no file matches" in found(run, "error")[0]
    assert "model" not in run[1]  # the tokenizer is not to blame


def test_shards_of_another_tokenizer(planned, prepared):
    lm(prepared, "data", "prepare", "--input", "texts", "--output", "data/other", "--tokenizer", "bpe",
       "--vocab_size", "300")  # fmt: skip
    run = planned(**{"data.tokenizer": "data/other"})
    assert run[0] == 2 and any("tokenizer" in text for text in found(run, "error"))


STRICT = ["--strict"]
LONG_RUN = {"trainer.max_steps": 10_000, "model.optimizer.lr": 1e-3, "model.schedule.warmup_steps": 500}


@pytest.mark.parametrize("options, changes, level, words", [
    ([], {"model.schedule.warmup_steps": 10, "trainer.max_steps": 10}, "error", "is not over"),
    ([], {"model.schedule.name": "wsd", "model.schedule.decay_steps": 11}, "error", "warm-up 2 + decay 11 steps are"),
    (STRICT, {"data.global_batch_tokens": 200}, "error", "the nearest that fits is 256"),
    ([], {"trainer.val_interval": 1, "data.val_tokens": 4096}, "warning", "validations take"),
    (["--device", "v100"], {"trainer.precision": "bf16-mixed"}, "warning", "no bf16"),
    (STRICT, LONG_RUN | {"model.schedule.decay_steps": 5000}, "warning",
     "the decay ends at step 5,000, and the run ends at step 10,000 with 10% of"),
    (STRICT, LONG_RUN | {"model.schedule.decay_ratio": 0.5}, "warning", "the decay ends at step 5,000, and the run ends"),
    (STRICT, LONG_RUN | {"model.schedule.name": "linear", "model.schedule.decay_steps": 20_000}, "warning",
     "the decay ends at step 20,000, and the run ends at step 10,000 with 56% of the peak rate"),
    (STRICT, {"model.decoder.window_pattern": "SSSSL", "model.decoder.sliding_window": 8}, "warning",
     "of model.decoder.window_pattern SSSSL has full attention --model.decoder.window_pattern SL"),
    (STRICT, {"model.decoder.window_pattern": "SL", "model.decoder.sliding_window": 500}, "warning", "S layers are as L layers"),
    (STRICT, LONG_RUN | {"model.schedule.name": "wsd"}, "warning", "wsd has no decay, and the run ends at step 10,000 with 100%"),
])  # fmt: skip
def test_what_is_noted(planned, options, changes, level, words):
    run = planned(*options, **changes)
    assert any(words in text for text in found(run, level)), run[1]["findings"]
    assert (run[0], run[2].count("\n")) == ((2, 1) if level == "error" else (0, 0))


@pytest.mark.parametrize("options, words", [
    (["--fit", "--model.decoder.vocab_size", "null", "--data.path", "elsewhere", "--data.prepare.input", "texts"],
     "the size is not known before the tokenizer is made"),
    (["--fit", "--data.path", "elsewhere", "--data.prepare", "null"], "elsewhere holds no manifest.json"),
    (["--fit", "--model.decoder.hidden_size", "2Mi"], "not even a micro-batch of 1 fits"),
    (["--trainer.val_interval", "0"], "trainer.val_interval 0 must be at least 1"),
    (["--data.path", "null", "--data.prepare", "null"], "give one of data.path"),
    (["--data.train", "a.parquet"], "data.train needs data.tokenizer"),
    (["--bench", "broken.json"], "--bench broken.json is of another model"),
])  # fmt: skip
def test_a_question_that_has_no_answer_is_one_line(prepared, monkeypatch, capsys, options, words):
    monkeypatch.chdir(prepared)
    (prepared / "broken.json").write_text('{"parameters": 1, "seq_len": 32, "lightning": 3}')
    write_config(prepared, **PLAIN)
    assert main(["plan", "--config", "small.yaml", "--device", "h200", *options]) == 2
    assert words in capsys.readouterr().err


def test_fp8_is_not_taken_to_be_twice_as_fast(planned):
    """Of the time nothing is known before it is measured; a share of the peak that is given is of FP8's."""
    runs = [planned(**{"trainer.precision": precision})[1]["time"] for precision in ("bf16-mixed", "fp8-rowwise")]
    assert runs[0]["seconds"] == runs[1]["seconds"] and "40% MFU of bf16, assumed" in runs[1]["basis"]
    assert runs[1]["mfu"] == pytest.approx(runs[0]["mfu"] / 2, rel=0.01)
    given = planned("--mfu", "0.4", **{"trainer.precision": "fp8-rowwise"})[1]["time"]
    assert given["seconds"] == pytest.approx(runs[0]["seconds"] / 2, rel=0.01) and given["mfu"] == pytest.approx(0.4)


def test_activation_checkpointing_takes_more_time(planned):
    none, selective, block = (planned(**{"model.activation_checkpointing": mode})[1]["time"]
                              for mode in ("none", "selective", "block"))  # fmt: skip
    # The output matrix is not computed again.
    assert none["seconds"] < selective["seconds"] < block["seconds"] < 4 / 3 * none["seconds"]
    assert "more work for activation checkpointing" in block["basis"]


def test_tf32_has_a_peak_of_its_own(planned):
    plain, tf32 = (planned(**{"trainer.precision": "32-true", "trainer.matmul_precision": precision})[1]["time"]
                   for precision in ("highest", "high"))  # fmt: skip
    assert tf32["tokens_per_second"] == pytest.approx(494.5 / 67 * plain["tokens_per_second"])


def test_strict_is_schema_and_algebra_alone(planned):
    """It looks at no data and no device, so it runs in CI; any error is exit code 2."""
    code, facts, _ = planned("--strict", **{"data.path": "elsewhere", "data.prepare": None})
    assert code == 0 and "data" not in facts and "memory" not in facts and facts["steps"]["max_steps"] == 12
    for wrong, words in (("num_attention_heads", "num_attention_heads"), ("hiden_size", "hidden_size")):
        code, _, err = planned("--strict", **{f"model.decoder.{wrong}": 3})
        assert code == 2 and words in err and err.count("\n") == 1


# ---- what costs days -------------------------------------------------------------------------------------------------
def test_sound_settings_are_not_warned_of(planned):
    for changes in ({}, {"model.schedule.decay_steps": 9_800}, {"model.schedule.name": "constant"},
                    {"model.schedule.name": "wsd", "model.schedule.decay_ratio": 0.2},
                    {"trainer.max_steps": 9, "model.schedule.warmup_steps": 1}):  # fmt: skip
        assert planned("--strict", **LONG_RUN | changes)[1]["findings"] == []


def test_what_a_crash_loses_and_what_saving_takes(planned, bench):
    measured = bench(tokens_per_second=0.1, checkpoint={"stall_ms": 460_800.0})
    run = planned(*measured, "--rate_usd_per_hr", "3")
    facts = run[1]["checkpoints"]
    assert facts["lost_seconds"] == 3 * 256 / 0.1 and facts["lost_usd"] == pytest.approx(6.40)
    assert facts["saving_share"] == pytest.approx(0.06) and facts["saving_basis"] == "measured"
    facts = planned(*bench(tokens_per_second=0.1))[1]["checkpoints"]
    assert facts["lost_usd"] is None and "assumed" in facts["saving_basis"] and facts["saving_share"] < 1e-6


def test_the_budget_is_counted(planned, bench):
    """3,072 tokens at 1 a second are 0.85 h."""
    measured = bench(tokens_per_second=1.0)
    budget = {"guards.budget.cap_usd": 2, "guards.budget.rate_usd_per_hr": 3}
    run = planned(*measured, "--rate_usd_per_hr", "100", **budget)
    assert run[0] == 2 and run[1]["time"]["usd"] == pytest.approx(2.56)
    (error,) = found(run, "error")
    assert "takes 0.85 h x 3.00 USD/h = 2.56 USD, and guards.budget.cap_usd is 2.00" in error
    assert error.endswith("--guards.budget.cap_usd 3, or --trainer.max_steps 9, or `lm fit` with --force")
    assert planned(*measured, "--trainer.max_steps", "9", **budget)[0] == 0
    assert planned(*measured, **budget | {"guards.budget.cap_usd": 3})[0] == 0
    assert planned(*measured, **budget, **{"guards.budget.dry_run": True})[0] == 0
    hours = planned(*measured, **{"guards.budget.max_hours": 0.5})
    assert hours[0] == 2 and "the run takes 0.85 h, and guards.budget.max_hours is 0.50" in found(hours, "error")[0]
    assumed = planned("--device", "h200", **{"guards.budget.max_hours": 1e-12})
    assert assumed[0] == 2 and "guards.budget.max_hours is 1e-12" in str(found(assumed, "error"))


def test_what_another_program_has_counted_is_added_to_the_cost(planned, prepared, bench):
    measured = bench(tokens_per_second=1.0)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    file = {"spent_usd": 1.0, "rate_usd_per_hr": 2.0, "last_update_utc": now}
    (prepared / "budget.json").write_text(json.dumps(file))
    budget = {"guards.budget": {"cap_usd": 2.5, "file": "budget.json", "rate_usd_per_hr": 9}}
    run = planned(*measured, **budget)
    assert run[0] == 0 and run[1]["budget"]["rate_usd_per_hr"] == 2.0, "the file's rate is the newer one"
    assert "0.85 h x 2.00 USD/h = 1.71 USD after 1.00 before it" in str(found(run, "warning"))


def test_an_object_store_that_does_not_answer_is_an_error_and_not_a_long_wait(prepared):
    """Nobody listens at the port, or somebody who never says anything; the steps are there."""
    begun, plans = time.monotonic(), {}
    with socket.socket() as closed, socket.socket() as silent:
        for server in (closed, silent):
            server.bind(("127.0.0.1", 0))
            url = f"s3://bucket/train?endpoint_override=http://127.0.0.1:{server.getsockname()[1]}"
            config = write_config(prepared, f"at-{len(plans)}", **PLAIN, **{
                "data.path": None, "data.prepare": None, "data.train": url, "data.tokenizer": "data/small"})  # fmt: skip
            if server is silent:
                server.listen(64)
            plans[url] = start(prepared, "plan", "--config", config.name, "--device", "a100")
        shown = {url: plan.communicate(timeout=60) for url, plan in plans.items()}
    assert time.monotonic() - begun < 45  # 10 s of waiting, twice as long for the last attempt
    for url, (out, err) in shown.items():
        (line,) = [line for line in out.splitlines() if line.startswith("error   s3://")]
        assert url in line and "check the network and the credentials" in line and "is retried" in err
        assert any(line.startswith("steps ") for line in out.splitlines())
