"""Find the checkpoint that a command refers to, and check whether a run may be resumed with a changed config."""

import logging
import os
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm.errors import RequestError
from lm.runs.checkpoint import link_to, read_progress
from lm.runs.config_diff import differences, not_allowed
from lm.runs.find import find_run, nearest_runs, unknown_run
from lm.runs.run import REFERENCES, ROOT, STEP, Run, is_of_a_run
from lm.runs.trainer_json import find_damage
from lm.system.files import is_remote, restore_interrupted
from lm.system.process import rank

log = logging.getLogger(__name__)


def find_checkpoint(
    reference: str | None, name: str, root: str, *, named: bool, command: str
) -> tuple[Path | None, Run | None]:
    """Find the checkpoint folder that `--ckpt_path` refers to, and its run; None if there is none.

    The reference is a folder, `best`, `last`, `step-...` or `auto`; without one `fit` starts fresh, and other commands
    take the best checkpoint. If the name was `named` by `--run`, it means exactly that run, else the newest of `name`,
    `name-2` ... For a `fit`, and where the reference is a folder or `auto`, the checkpoint's files have been compared
    with their digests.
    """
    fit, auto = command == "fit", reference == "auto"
    if reference is None and fit:
        return None, None
    if not is_of_a_run(reference):
        path = checkpoint_folder(reference)
        if damage := find_damage(path):
            raise RequestError(f"--ckpt_path {reference}: {damage}{_hint(path)}")
        run = Run.of(path)
        if run is None or named and run.name != name:  # a model, or a checkpoint for a new run to begin from
            return path.resolve(), None
        if fit and rank() == 0:
            run.check_not_trained()
        return path.resolve(), run
    same = runs_of_name(root, name, named=named)
    run = same[-1] if same else None
    if auto and fit:
        _check_name_known(root, name, run)
    if run is None:
        if not (auto and fit):
            raise unknown_run(name, root)
        log.info("no run %r under %s yet: it starts%s", name, root, nearest_runs(name, root))
        return None, None
    if len(same) > 1:
        log.info(
            "the newest of the runs %s is %s; --run takes another", ", ".join(each.name for each in same), run.name
        )
    if fit and rank() == 0:  # rank zero takes the lock
        run.check_not_trained()
    path = _checkpoint_of(run, reference)
    if path is None and not (path := _beginning(run)) and not fit:
        raise run.no_checkpoint()
    if fit and not auto and (damage := find_damage(path)):  # the others find damage on reading
        raise RequestError(f"--ckpt_path {reference}: {path}: {damage}; `auto` takes the newest complete one")
    return path, run


def runs_of_name(root: str, name: str, *, named: bool) -> list[Run]:
    """The run named `name`, if `named` by `--run`; otherwise `name`, `name-2` ..., the newest last."""
    return [run for run in Run.all(root) if run.name == name] if named else Run.all(root, name)


def checkpoint_folder(reference: str) -> Path:
    """The folder of a `--ckpt_path` that is a path or a URL; for a URL, a copy on this machine."""
    if is_remote(reference):
        from lm.system.remote import fetch

        path = fetch(reference)
        if (path / "run.json").exists():
            raise RequestError(f"{reference} is a run: give one of its checkpoints, {reference.rstrip('/')}/step-...")
        return path
    path = Path(reference)
    if path.is_dir():
        return path
    if path.is_file():
        imported = f"lm import --input {path} --output models/{path.stem} makes a checkpoint of it"
        raise RequestError(
            f"{path} is a file: {imported if path.suffix == '.gguf' else f'give its folder {path.parent}'}"
        )
    if (path.parent / "run.json").exists():  # `best` without symbolic links, or a checkpoint that was removed
        return Run(path.parent).checkpoint(path.name)
    step = re.fullmatch(r"(?:step-)?(\d+)", reference)
    close = [f"step-{int(step[1]):08d}"] if step else get_close_matches(reference, REFERENCES, 1)
    hint = f"did you mean {close[0]}?" if close else f"give a folder, or best, last or auto{hub_hint(reference)}"
    with suppress(RequestError):
        find_run(reference)
        hint = f"it is a run: give --run {reference}, and best, last or auto as --ckpt_path"
    raise RequestError(f"--ckpt_path {reference}: there is no such folder; {hint}")


def hub_hint(name: str) -> str:
    """Advice to download a model, if a name looks like one of the Hugging Face Hub; otherwise empty."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).parent.exists():
        return ""
    return f"; if it is a model of the Hugging Face Hub: `hf download {name} --local-dir {Path(name).name}`"


def _hint(path: Path) -> str:
    """Advice for a folder that is a run or a model instead of a checkpoint."""
    if (path / "run.json").exists():
        return f"; it is a run: give one of its checkpoints, such as {path / 'last'}"
    if (path / "config.json").exists() and not (path / "trainer.json").exists():
        return f"; it is a model: `lm import --input {path} --output FOLDER` makes a checkpoint of it"
    return ""


def _checkpoint_of(run: Run, reference: str | None) -> Path | None:
    """The checkpoint of a run that a name refers to; None for `auto` if there is none yet."""
    if run.status() != "running":
        with suppress(OSError):  # a read-only disk
            restore_interrupted(run.path / "step-*")  # checkpoints left aside by a kill while they were being replaced
    return newest_complete(run) if reference == "auto" else run.checkpoint(reference)


def _check_name_known(root: str, name: str, run: Run | None) -> None:
    """Raise RequestError if a run has checkpoints but no readable `run.json`, so that its name is unknown."""
    for folder in sorted(Path(root).glob(f"{name}*")):
        of_this_name = re.fullmatch(re.escape(name) + r"(-\d+)?", folder.name)
        if of_this_name and not Run(folder).read("run.json").get("name") and (run is None or run.path != folder):
            if steps := list(Run(folder).steps().values()):
                raise RequestError(
                    f"{folder} has checkpoints, and its run.json is damaged or gone, so it is not clear what `auto` "
                    f"is to resume; give --ckpt_path {steps[-1]}, or another --run"
                )


def _beginning(run: Run) -> Path | None:
    """The checkpoint (of an imported model or another run) that a run started from; None if it started from scratch."""
    began_from = run.read("run.json").get("began_from")
    if began_from is None:
        log.info("run %s was stopped before its first checkpoint: it starts again at its first step", run.path)
        return None
    if damage := find_damage(Path(str(began_from))):
        raise RequestError(
            f"run {run.path} has no checkpoint of its own yet, and the one that it began from is damaged: "
            f"{began_from}: {damage}; put it back, or start a new run"
        )
    return Path(began_from)


def chosen_model(run: str | None, ckpt_path: str | None, root: str | Path = ROOT) -> Path:
    """The model folder that `--run` (default: the newest run) and `--ckpt_path` refer to; it is logged.

    Without a `ckpt_path` it is the best checkpoint of the run, or the last if none was validated.
    """
    if is_of_a_run(ckpt_path):
        trained = find_run(run, root, otherwise=", or give a --ckpt_path")
        path = _checkpoint_of(trained, ckpt_path)
        if path is None:
            raise trained.no_checkpoint()
    else:
        path = checkpoint_folder(ckpt_path)
        if run:
            raise RequestError(f"--ckpt_path {ckpt_path} names a folder, so there is no need for --run {run}: give one")
        path = Run(path).checkpoint() if (path / "run.json").exists() else path
    log.info("model %s", path)
    return path


def newest_complete(run: Run) -> Path | None:
    """The newest intact checkpoint of a run; None if there is no checkpoint. Damaged ones are logged.

    When a run is resumed from an earlier step, its later checkpoints are stale: `run.json` has their digests.
    They are considered last, however new they are. If all are damaged, raise RequestError: to start from scratch would
    be a silent loss.
    """
    last, stale = run.link("last"), run.stale_checkpoints()
    names = {path.name for path in run.path.glob("step-*")}
    if (link := run.path / "last").is_symlink():
        names.add(os.readlink(link))  # also of a checkpoint that is gone

    def newest_first(path: Path) -> tuple[bool, int]:
        return path != last and path in stale, -int(path.name.removeprefix("step-"))

    damaged = {}
    for path in sorted((run.path / name for name in names if STEP.fullmatch(name)), key=newest_first):
        damaged[path.name] = find_damage(path)
        if damaged[path.name] is None:
            if len(damaged) > 1:
                log.warning("%s is the newest complete checkpoint", path)
            return path
        log.warning("passing over %s: %s", path, damaged[path.name])
    if damaged:
        problems = "; ".join(f"{name}: {damage}" for name, damage in damaged.items())
        raise RequestError(
            f"run {run.path} has no complete checkpoint ({problems}), and would have to start from its first "
            "step: put one back, or start a new run without --ckpt_path"
        )
    return None


def repair_links(run: Run, checkpoint: Path) -> None:
    """Point the links of a finished run to its last and best checkpoints, in case it was killed before they moved."""
    if checkpoint.resolve().parent == run.path.resolve():
        link_to(run.path / checkpoint.name, read_progress(checkpoint).best_name)


def check_config_changes(run: Run, config: dict[str, Any], force: bool) -> dict[str, list[Any]]:
    """Compare a config with a run's: `{key: [before, now]}`; raise RequestError if a resume may not change a key."""
    settings = run.settings()
    if not force and not settings:
        state = "damaged" if run.config.exists() else "gone"
        raise RequestError(
            f"{run.config} is {state}, so it is not known what the run was trained with: put it back, or give --force "
            "to resume with the config of this command"
        )
    changed = {
        key: values
        for key, values in differences([settings, config]).items()
        if not key.startswith("data.prepare.") or values[1] is not None
    }  # null: then the shards are compared
    fixed = not_allowed("resume", changed)
    if fixed and not force:
        values = "; ".join(f"{key} was {before} and is {now} now" for key, (before, now) in fixed.items())
        fix = f"`{run.resume_command()}` resumes it as it was, or start a new run without --ckpt_path"
        name = run.read("run.json").get("name", run.name)
        others = [other for other in Run.all(run.path.parent, name) if other.path != run.path]
        fits = [other.name for other in others if not not_allowed("resume", differences([other.settings(), config]))]
        fix = f"give --run {fits[-1]}, which has these options, or {fix}" if fits else fix
        if not any(key.startswith("model.decoder") for key in not_allowed("branch", fixed)):
            fix += ", or give --force"
        raise RequestError(f"run {run.path} cannot be resumed with other options: {values}; {fix}")
    return changed
