"""Which config counts: a file as typed or under configs/, or that of a run."""

from collections.abc import Mapping
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import Any

import lm
from lm.errors import RequestError
from lm.model.config import CUSTOM_MODEL_TYPE
from lm.runs.run import ROOT, Run, is_of_a_run
from lm.system import process
from lm.system.parsing import parse_yaml, read_object
from lm.system.removed_options import drop_removed
from lm.system.units import shown

CONFIGS = (Path("configs"), Path(lm.__file__).parent / "configs")


def find_config(name: str) -> Path:
    """A config as typed, else under `configs/`."""
    for path in (Path(name), *(folder / name for folder in CONFIGS), *(folder / f"{name}.yaml" for folder in CONFIGS)):
        if path.is_file():
            return path
    if name and Path(name).is_dir():
        inside = sorted(map(str, Path(name).glob("*.yaml")))
        raise RequestError(f"{name} is a folder, not a config; it has {', '.join(inside) or 'none'}")
    present = sorted({path.name for folder in CONFIGS for path in folder.glob("*.yaml")})
    folder = Path(name).parent
    nearby = {str(path) for path in (*folder.glob("*.y*ml"), *folder.parent.glob(f"*/{escape(Path(name).name)}"))}
    close = get_close_matches(name, [*sorted(nearby), *present], 3, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}?" if close else f"configs/ has: {', '.join(present) or 'none'}"
    raise RequestError(f"no config {name!r} here or in configs/; {hint}")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config, without the options that were removed from `lm`, if set to the default that they had."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:  # of a run
        raise RequestError(
            f"{path} is gone: give the config of the run with --config, and to resume --force too"
        ) from error
    except (OSError, ValueError) as error:
        raise RequestError(f"config {path} cannot be read: {error}") from error
    drop_removed(document)
    if document is None:
        raise RequestError(f"config {path} is empty; configs/tiny.yaml is one to begin with")
    if not isinstance(document, dict):
        raise RequestError(f"config {path} holds {shown(document)} where options such as `trainer:` belong")
    return document


def run_with_config(command: str, values: Mapping[str, Any]) -> Run | None:
    """The run whose config counts where none is given: that of `--run`, that of the checkpoint, or the newest."""
    resumes = command == "fit" and {"run", "ckpt_path"} <= values.keys()
    if not resumes and command not in ("validate", "test", "predict"):
        return None
    from lm.runs.find import find_run
    from lm.runs.resume import checkpoint_folder

    checkpoint, run = values.get("ckpt_path", "best"), None
    if "run" not in values and not is_of_a_run(checkpoint):
        folder = checkpoint_folder(checkpoint).resolve().parent
        run = Run(folder) if (folder / "run.json").exists() else None
    if run is None:
        root = values.get("trainer.default_root_dir", str(ROOT))
        run = find_run(values.get("run"), root, otherwise=", or give --config")
    check_model_class(run)
    return run


def check_model_class(run: Run) -> None:
    """Raise RequestError if the run's model is of a class that this process lacks, whose options would be unknown."""
    newest = run.link("last")
    document = read_object(newest / "config.json") if newest and (newest / "config.json").exists() else {}
    if document.get("model_type") == CUSTOM_MODEL_TYPE:
        from lm.model.custom import known_class

        known_class(document, process.module_class, str(run.path), run.script)


NEEDS_RUN = ("generate", "evaluate", "export", "branch")  # commands that take a run, not a config


def check_run_exists(command: str, options: Any) -> None:
    """Raise RequestError if a command takes a run and it is not there, before the seconds of importing PyTorch."""
    if command in NEEDS_RUN and is_of_a_run(getattr(options, "ckpt_path", None)):
        from lm.runs.find import find_run

        find_run(options.run, options.root, otherwise=", or give a --ckpt_path")
