"""`lm import`: a model of Hugging Face's as a checkpoint of ours, so that a new run can go on from its weights.

The folder is a checkpoint of step 0: weights in fp32, a tokenizer, no optimizer state and nothing seen yet. `lm fit`
takes the decoder's shape from the `model.yaml` in it.
"""

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as lightning
import torch
import yaml

from lm.checkpoint import sync, write_folder
from lm.errors import RequestError, RunError
from lm.leftovers import sweep
from lm.model.config import DecoderConfig
from lm.model.huggingface import to_huggingface
from lm.pretrained import Pretrained, load_pretrained
from lm.snapshot import model_files
from lm.tally import Tally

log = logging.getLogger(__name__)


def import_model(input: str = "", output: str = "", eos_token: str | None = None) -> None:
    """Make a checkpoint to train on from: of a Llama, Qwen3 or Ministral in Hugging Face's format, or of one of ours.

    Args:
        input: The model's folder, with safetensors and a `tokenizer.json`; or a run's or a checkpoint's, whose weights
            then make a fresh start.
        output: The folder to make, which must be empty or not there.
        eos_token: The token that ends a document, where the model's files do not tell.
    """
    if not input or not output:
        raise RequestError("give a model's folder with --input and the folder to make with --output")
    source, shown, target = Path(input), Path(output), Path(output).resolve()
    _refuse(source, target)
    model = load_pretrained(source, device="cpu", dtype=torch.float32, eos_token=eos_token)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    sweep(target)
    sweep(target.with_name(f".tmp-{target.name}-*"))  # what writing the temporary one left
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        write_folder(temporary, content(model))
        # Not under a digest, so that it may be changed: a person's dropout or context is no damage.
        (temporary / "model.yaml").write_text(describe(model.config, source, shown), encoding="utf-8")
        sync(temporary / "model.yaml")
        sync(temporary)
        os.rename(temporary, target)
        sync(target.parent)
    except OSError as error:
        raise RunError(f"could not write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("data for it: lm data prepare --input TEXTS --output DATA --tokenizer %s", shown)
    log.info("train on:    lm fit --config YOURS.yaml --config %s --ckpt_path %s --run NAME",
             shown / "model.yaml", shown)  # fmt: skip
    print(shown)


def content(model: Pretrained) -> dict[str, object]:
    """What `write_folder` is given: a checkpoint before the first step.

    Lightning counts from the beginning where there are no `loops`, and an optimizer without state begins anew.
    """
    weights = to_huggingface(model.decoder.state_dict(), model.config)
    return {
        "state_dict": {name: weight.contiguous() for name, weight in weights.items()},
        "optimizer": {},
        "files": model_files(model.config, model.tokenizer, "float32"),
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "lr_schedulers": [],
        "cursor": {"consumed": 0},
        "ranks": [],
        "tally": Tally().state_dict(),
    }


def describe(config: DecoderConfig, source: Path, target: Path) -> str:
    """The decoder's shape as the YAML that `lm fit` takes beside a config of one's own.

    Dropout is left to that: it belongs to the training and not to the model.
    """
    shape = {name: value for name, value in asdict(config).items() if name != "dropout"}
    head = (
        f"# The decoder of {source}. After a config of your own, whose shape it takes the place of:\n"
        f"# lm fit --config YOURS.yaml --config {target / 'model.yaml'} --ckpt_path {target} --run NAME\n"
    )
    return head + yaml.safe_dump({"model": {"decoder": shape}}, sort_keys=False)


def _refuse(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise RequestError(f"--input {source} is no folder; give one with a config.json and safetensors in it")
    if not any((source / name).exists() for name in ("config.json", "run.json")):
        raise RequestError(f"--input {source} is no model: it has no config.json")
    if not (source / "tokenizer.json").exists() and not (source / "run.json").exists():
        raise RequestError(
            f"{source} has no tokenizer.json; transformers makes one: "
            f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained({str(source)!r})"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {target} is there already and not an empty folder; choose another")
    if (target.parent / "run.json").exists():
        raise RequestError(f"--output {target} is in the folder of a run, which it would be taken for a checkpoint of")
