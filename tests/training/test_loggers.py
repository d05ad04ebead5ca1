"""Lightning's loggers beside TensorBoard: the same metrics and config, and a training that waits for none of them."""

import csv
import json
import time

import pytest
import yaml
from trainings import lm, make_workplace, write_config

LOGGERS = '''
import time
from lightning.pytorch.loggers import CSVLogger

class Failing(CSVLogger):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the service is gone")

class Refusing(CSVLogger):
    def __init__(self):
        raise ValueError("this key is not valid")

class Hanging(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(600)
'''
CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("place"))
    (place / "my_loggers.py").write_text(LOGGERS)
    return place


def fit(place, name, logger, **environment):
    return lm(place, "fit", "--config", str(write_config(place, name, **{"trainer.logger": logger})), **environment)


def metrics(place, run):
    return [json.loads(line) for line in (place / "checkpoints" / run / "metrics.jsonl").read_text().splitlines()]


def test_a_csv_has_every_metric_and_the_config(place):
    fit(place, "csv", CSV)
    folder = place / "csv/lightning_logs/version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    for line in metrics(place, "csv"):
        given = {name: value for name, value in line.items() if name not in ("step", "tokens", "time")}
        assert any(int(row["step"]) == line["step"] and
                   all(row[name] and float(row[name]) == pytest.approx(value) for name, value in given.items())
                   for row in rows), line["step"]  # fmt: skip
    kept = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert kept["run"] == "csv" and kept["model"]["decoder"]["hidden_size"] == 32
    assert list((place / "checkpoints/csv").glob("events.out.tfevents.*"))


def test_a_logger_that_fails_or_hangs_does_not_stop_the_others_or_the_training(place):
    """Each is said once."""
    began = time.monotonic()
    broken = [{"class_path": f"my_loggers.{name}", "init_args": {"save_dir": name}} for name in ("Failing", "Hanging")]
    said = fit(place, "broken", [*broken, {**CSV, "init_args": {"save_dir": "after"}}]).stderr
    assert time.monotonic() - began < 120
    assert said.count("logger Failing failed and gets no more metrics: the service is gone; the training") == 1
    assert said.count("logger Hanging did not finish within 10 s") == 1
    steps = [line["step"] for line in metrics(place, "broken")]
    assert max(steps) == 12 and (place / "checkpoints/broken/last").exists()
    rows = list(csv.DictReader((place / "after/lightning_logs/version_0/metrics.csv").open()))
    assert max(int(row["step"]) for row in rows) == 12


def test_weights_and_biases_offline_and_mlflow_in_a_folder(place, monkeypatch):
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    offline = {"class_path": "lightning.pytorch.loggers.WandbLogger",
               "init_args": {"offline": True, "save_dir": "wandb-files", "name": "both"}}  # fmt: skip
    folder = {"class_path": "lightning.pytorch.loggers.MLFlowLogger",
              "init_args": {"save_dir": "mlruns", "run_name": "both"}}  # fmt: skip
    fit(place, "both", [offline, folder], MLFLOW_ALLOW_FILE_STORE="true")
    assert list((place / "wandb-files").rglob("run-*.wandb"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((place / "mlruns").as_uri())
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.run_name == "both" and run.data.params["run"] == "both"
    logged = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "train/loss")}
    assert logged == {line["step"]: line["train/loss"] for line in metrics(place, "both") if "train/loss" in line}


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ({"class_path": "lightning.pytorch.loggers.CSVLogger"}, "give save_dir under init_args"),
        ({"class_path": "torch.nn.Linear"}, "torch.nn.Linear"),
        ({"class_path": "my_logger.CSV"}, "class_path 'my_logger.CSV': No module named 'my_logger'"),
        ([{"class_path": "my_loggers.Refusing"}], "lm fit: trainer.logger: Refusing: this key is not valid\n"),
    ],
)
def test_what_is_no_logger_is_one_line(place, logger, message):
    config = str(write_config(place, "wrong", **{"trainer.logger": logger}))
    [line] = lm(place, "fit", "--config", config, expect=2).stderr.strip().splitlines()
    assert message in f"{line}\n"
