"""Lightning's loggers beside TensorBoard: the same metrics and config, and a training that waits for none of them."""

import csv

import pytest
import yaml
from trainings import equipment, fit

LOGGERS = """
import time
from lightning.pytorch.loggers import CSVLogger
from lm.training.callbacks import call_thread

class Failing(CSVLogger):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the service is gone")

class Refusing(CSVLogger):
    def __init__(self):
        raise ValueError("this key is not valid")

class Hanging(CSVLogger):
    def log_metrics(self, metrics, step=None):
        call_thread.LAST_WAIT = 1.0
        time.sleep(600)
"""
CSV = equipment("lightning.pytorch.loggers.CSVLogger", save_dir="csv")


@pytest.fixture
def place(workplace):
    (workplace / "my_loggers.py").write_text(LOGGERS)
    return workplace


def test_a_csv_has_every_metric_and_the_config(place):
    _, run = fit(place, "csv", **{"trainer.logger": CSV})
    folder = place / "csv/lightning_logs/version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    for line in run.metrics():
        given = {name: value for name, value in line.items() if name not in ("step", "tokens", "time")}
        assert any(int(row["step"]) == line["step"] and
                   all(row[name] and float(row[name]) == pytest.approx(value) for name, value in given.items())
                   for row in rows), line["step"]  # fmt: skip
    kept = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert kept["run"] == "csv" and kept["model"]["decoder"]["hidden_size"] == 32
    assert list(run.path.glob("events.out.tfevents.*"))


def test_a_logger_that_fails_or_hangs_does_not_stop_the_others_or_the_training(place):
    """Each is said once."""
    broken = [equipment(f"my_loggers.{name}", save_dir=name) for name in ("Failing", "Hanging")]
    ended, run = fit(place, "broken", **{"trainer.logger": [*broken, {**CSV, "init_args": {"save_dir": "after"}}]})
    assert ended.stderr.count("logger Failing failed and gets no more metrics: the service is gone; the training") == 1
    assert ended.stderr.count("logger Hanging did not finish within 1 s") == 1
    assert run.metrics()[-1]["step"] == 12 and run.link("last")
    rows = list(csv.DictReader((place / "after/lightning_logs/version_0/metrics.csv").open()))
    assert max(int(row["step"]) for row in rows) == 12


def test_weights_and_biases_offline_and_mlflow_in_a_folder(place, monkeypatch):
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    offline = equipment("lightning.pytorch.loggers.WandbLogger", offline=True, save_dir="wandb-files", name="both")
    folder = equipment("lightning.pytorch.loggers.MLFlowLogger", save_dir="mlruns", run_name="both")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _, run = fit(place, "both", **{"trainer.logger": [offline, folder]})
    assert list((place / "wandb-files").rglob("run-*.wandb"))
    client = mlflow.MlflowClient((place / "mlruns").as_uri())
    [found] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert found.info.run_name == "both" and found.data.params["run"] == "both"
    logged = {one.step: one.value for one in client.get_metric_history(found.info.run_id, "train/loss")}
    assert logged == {line["step"]: line["train/loss"] for line in run.metrics("train/loss")}


@pytest.mark.parametrize(("logger", "message"), [
    ({"class_path": "lightning.pytorch.loggers.CSVLogger"}, "give --trainer.logger.init_args.save_dir VALUE"),
    ({"class_path": "torch.nn.Linear"}, "torch.nn.Linear"),
    ({"class_path": "my_logger.CSV"}, "my_logger.CSV: there is no module my_logger;"),
    ([{"class_path": "my_loggers.Refusing"}], "lm fit: trainer.logger: Refusing: this key is not valid\n"),
])  # fmt: skip
def test_what_is_no_logger_is_one_line(place, logger, message):
    refused, _ = fit(place, "wrong", expect=2, **{"trainer.logger": logger})
    assert message in refused.stderr and refused.stderr.count("\n") == 1
