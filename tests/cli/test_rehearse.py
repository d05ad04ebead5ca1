"""`lm plan --rehearse`: what the guards of a config would log and do, on invented lines and without training."""

import json
from datetime import UTC, datetime

import pytest
from trainings import write_config

from lm.cli.main import main

CONFIG = {
    "trainer.callbacks": None, "trainer.accelerator": "auto", "trainer.max_steps": 1000, "trainer.log_interval": 10,
    "trainer.checkpoint_interval": 100, "model.decoder.vocab_size": 32_768,
}  # fmt: skip


@pytest.fixture
def rehearsed(tmp_path, monkeypatch, capsys):
    """Run `lm plan --strict --rehearse --json`: the events of every scenario."""
    monkeypatch.chdir(tmp_path)

    def run(guards, *options, **changes):
        write_config(tmp_path, guards=guards, **CONFIG | changes)
        before = sorted(tmp_path.iterdir())
        assert main(["plan", "--config", "small.yaml", "--strict", "--rehearse", "--json", *options]) == 0
        assert sorted(tmp_path.iterdir()) == before
        out, err = capsys.readouterr()
        assert err == ""
        return {one["scenario"]: one["events"] for one in json.loads(out)["rehearsal"]}

    return run


def scenario(played, start):
    (events,) = [events for name, events in played.items() if name.startswith(start)]
    return events


def outcomes(events):
    return [(event["action"], event["checkpoint"], event["exit_code"]) for event in events]


def test_every_alert_is_provoked(rehearsed):
    """Of all kinds, with a condition that only holds late, one with a window, and one that nothing makes true."""
    alerts = {
        "loss > 10": "stop", "grad_norm > 100": "warn",
        "val_loss > 4 and step > 500": "checkpoint", "loss > 1.5 * median(loss, 20)": "rollback", "loss > loss": "stop",
        "tokens_per_second < 10 or mfu < 0.01": "warn", "loss > 3 and step < 200": "warn",
    }  # fmt: skip
    played = rehearsed({"alerts": alerts, "max_rollbacks": 2})
    (stop,) = scenario(played, "alert `loss > 10`")
    assert stop["log"].startswith("alert: loss > 10: loss is 26") and stop["log"].endswith(": stop")
    assert outcomes([stop]) == [("stop", False, 3)]
    assert outcomes(scenario(played, "alert `grad_norm")) == [("warn", False, None)]
    assert outcomes(scenario(played, "alert `val_loss")) == [("checkpoint", True, None)]
    rollbacks = scenario(played, "alert `loss > 1.5")
    assert "weights and optimizer are those of step 900" in rollbacks[1]["log"] and rollbacks[1]["checkpoint"]
    assert rollbacks[-1]["action"] == "rollback" and rollbacks[-1]["exit_code"] == 3
    assert rollbacks[-1]["reason"].endswith("guards.max_rollbacks 2 are used up")
    assert scenario(played, "alert `loss > loss") == [] and scenario(played, "alert `tokens_per_second")
    assert [event["step"] for event in scenario(played, "nothing wrong")] == [110]  # true of the first ten lines too


def test_what_a_healthy_run_sets_off_is_shown(rehearsed):
    """Its loss begins at ln(32,768), that of an untrained model."""
    played = rehearsed({"alerts": {"loss < 5": "stop"}}, **{"trainer.max_steps": 100})
    assert next(iter(played)).startswith("nothing wrong: the loss falls from 10.4 to")
    (event,) = scenario(rehearsed({"alerts": {"loss < 5": "stop"}}), "nothing wrong")
    assert 10 < event["step"] < 1000 and event["exit_code"] == 3


def test_a_run_that_is_shorter_than_a_window_or_a_log_interval_ends(rehearsed):
    alerts = {"alerts": {"loss > 2 * median(loss, 100)": "stop"}}
    for interval in (1, 10):
        short = {"trainer.max_steps": 5, "trainer.log_interval": interval}
        assert scenario(rehearsed(alerts, **short), "alert") == []


@pytest.mark.parametrize(("policy", "first"), [("skip", ("warn", False, None)), ("stop", ("stop", True, 3))])
def test_steps_that_are_not_finite(rehearsed, policy, first):
    played = rehearsed({"not_finite": policy, "max_skipped": 25})
    assert outcomes(scenario(played, "a step is not finite")) == [first]
    last = scenario(played, "no step is finite any more")[-1]
    assert last["exit_code"] == 3 and last["checkpoint"]
    assert policy == "stop" or (last["step"] == 30 and "25 in a row" in last["log"])


def test_a_throughput_below_its_floor(rehearsed):
    throughput = {"floor": 1000, "patience": 4, "action": "stop"}
    (event,) = scenario(rehearsed({"throughput": throughput}), "500 tokens/s")
    assert event["step"] == 50 and "below 1K for 4 log lines" in event["log"] and event["exit_code"] == 3


def test_the_budget_is_played_through(rehearsed, tmp_path):
    """Steps take a second where nothing is known: 1000 s at $3.6 an hour cost a dollar."""
    played = rehearsed({"budget": {"cap_usd": 0.5, "rate_usd_per_hr": 3.6}})
    (planned,) = scenario(played, "budget: the run at the planned speed")
    assert planned["step"] == 130 and planned["checkpoint"] and planned["exit_code"] == 3
    assert planned["spent_usd"] == pytest.approx(0.13)
    (near,) = scenario(played, "budget: a run that takes 95%")
    assert 700 < near["step"] < 900 and "are spent, 8" in near["log"] and near["exit_code"] is None
    assert outcomes(scenario(played, "budget: a run that takes 150%")) == [("stop", True, 3)]
    assert outcomes(scenario(played, "budget: the machine stands still"))[-1] == ("stop", False, 3)
    dry = rehearsed({"budget": {"cap_usd": 0.5, "rate_usd_per_hr": 3.6, "dry_run": True}})
    assert "if not for the dry run" in scenario(dry, "budget: a run that takes 150%")[0]["log"]
    assert all(event["exit_code"] is None
               for name, events in dry.items() if name.startswith("budget") for event in events)  # fmt: skip


def test_a_budget_file_counts_from_what_it_says(rehearsed, tmp_path):
    file = {"spent_usd": 7.0, "rate_usd_per_hr": 36.0, "last_update_utc": datetime.now(UTC).isoformat()}
    (tmp_path / "budget.json").write_text(json.dumps(file))
    budget = {"cap_usd": 10, "file": "budget.json"}
    played = rehearsed({"budget": budget})
    assert 7 < scenario(played, "budget: a run that takes 150%")[0]["spent_usd"] < 10
    (tmp_path / "budget.json").write_text(json.dumps(file | {"spent_usd": 11.0}))
    (spent,) = scenario(rehearsed({"budget": budget}), "budget: the run at the planned")
    assert spent["step"] == 0 and "$11" in spent["log"] and outcomes([spent]) == [("stop", False, 3)]


def test_a_page_that_a_person_can_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    alerts = {"loss > 100": "stop", "loss > loss": "warn", "grad_norm > 9 and step > 500": "rollback"}
    budget = {"cap_usd": 0.005, "rate_usd_per_hr": 0.1}
    changes = {"trainer.checkpoint_interval": 1000, "guards": {"alerts": alerts, "budget": budget}}
    write_config(tmp_path, **CONFIG | changes)
    assert main(["plan", "--config", "small.yaml", "--strict", "--rehearse"]) == 0
    out = capsys.readouterr().out
    assert "alert `loss > 100`: loss " in out and "then  no checkpoint, the run ends with exit code 3" in out
    assert "nothing is logged or done" in out
    assert out.startswith("1.00 s a step (assumed: --peak_tflops N or --bench FILE gives the speed)")
    assert "exit code 3; there is no checkpoint of step 960 or before to return to" in out
    assert "$0.004 of $0.005 are spent, 8" in out
