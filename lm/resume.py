"""Which checkpoint a command means, and whether a changed config may go on from it."""

import logging
from pathlib import Path
from typing import Any

import yaml

from lm import registry
from lm.checkpoint import find_damage
from lm.errors import RequestError
from lm.runs import ROOT, STEP, Run, flatten

log = logging.getLogger(__name__)

# Changing these after the start would make the run's curves a lie: another model, other data, another order.
FIXED = ("seed_everything", "model.decoder", "model.document_mask", "data.path", "data.train", "data.tokenizer",
         "data.prepare", "data.column", "data.seq_len", "data.shuffle_buffer")


def find_checkpoint(
    reference: str | None, name: str, root: str, *, named: bool, command: str
) -> tuple[Path | None, Run | None]:
    """Resolve `--ckpt_path`.

    Args:
        reference: a folder, `best`, `last`, `auto` or None.
        name: of the run: `--run`, or the config's.
        root: folder of the runs.
        named: the name was given with `--run`, so it is exactly that run and not the newest of `name`, `name-2` ...
        command: `fit`, which starts fresh without a reference; the others take the best checkpoint then.

    Returns:
        The checkpoint folder or None, and the run that it belongs to or that is gone on with.

    Raises:
        RequestError: what was asked for is not there, or not whole.
    """
    if reference is None and command == "fit":
        return None, None
    if reference not in (None, "best", "last", "auto"):
        path = Path(reference).resolve()
        damage = find_damage(path)
        if damage:
            raise RequestError(f"--ckpt_path {reference}: {damage}")
        run = Run(Path(reference).parent if not Path(reference).is_symlink() else path.parent)
        belongs = (run.path / "run.json").exists() and (not named or run.name == name)
        return path, run if belongs else None
    if named:
        run = Run(Path(root) / name)
        run = run if (run.path / "run.json").exists() else None
    else:
        run = Run.newest(root, name)
    if run is None and reference == "auto" and command == "fit":
        return None, None
    if run is None:
        wanted = reference or "best"
        raise RequestError(f"no run {name!r} under {root}, so no checkpoint {wanted!r}; start one with `lm fit`")
    if reference == "auto":
        return newest_whole(run) or _beginning(run), run
    return run.checkpoint(reference), run


def _beginning(run: Run) -> Path | None:
    """The checkpoint that a run began from, of a model that was imported or of another run; None: from scratch.

    Raises:
        RequestError: it is gone or damaged, so that the run would begin anew as something else.
    """
    began_from = run.read("run.json").get("began_from")
    if began_from is None:
        return None
    if damage := find_damage(Path(began_from)):
        raise RequestError(
            f"run {run.path} has no checkpoint of its own yet, and the one that it began from is not whole: "
            f"{began_from}: {damage}; put it back, or start a new run"
        )
    return Path(began_from)


def chosen_model(run: str | None, ckpt_path: str | None, root: str | Path = ROOT) -> Path:
    """The folder that `--run` and `--ckpt_path` mean, for a command that uses a model and says which one it took.

    Args:
        run: a name under the root or in the registry, or a path; the newest run if not given.
        ckpt_path: a folder, which need not belong to a run; `best`, `last`, `step-...` or `auto` (the newest whole one)
            of the run; its best, or its last where none was validated, if not given.
        root: folder of the runs.

    Raises:
        RequestError: there is no such run, checkpoint or folder.
    """
    if ckpt_path not in (None, "best", "last", "auto") and not STEP.fullmatch(ckpt_path):
        if run:
            raise RequestError(f"--ckpt_path {ckpt_path} names a folder, so there is no need for --run {run}: give one")
        path = Path(ckpt_path)
        if not path.is_dir():
            raise RequestError(f"--ckpt_path {ckpt_path}: there is no such folder; or give best, last or auto")
        found = Run(path) if (path / "run.json").exists() else None
        path = found.checkpoint() if found else path
    else:
        found = registry.find(run, root) if run else Run.newest(root)
        if found is None:
            raise RequestError(f"no run under {root} yet: start one with `lm fit --config tiny.yaml`, or name a folder")
        path = newest_whole(found) if ckpt_path == "auto" else found.checkpoint(ckpt_path)
        if path is None:
            raise RequestError(f"run {found.path} has no whole checkpoint")
    log.info("model %s", path)
    return path


def newest_whole(run: Run) -> Path | None:
    """The newest checkpoint of a run that is not damaged; says which ones it passed over.

    The newest is `last`. Steps beyond it are from before the run was gone on with from an earlier step; they come
    after all others.
    """
    steps, last = run.steps(), run.link("last")
    newest = next((step for step, path in steps.items() if path == last), max(steps, default=0))
    for step in sorted(steps, key=lambda step: (step > newest, -step)):
        path = steps[step]
        damage = find_damage(path)
        if damage is None:
            return path
        log.warning("passing over %s: %s", path, damage)
    return None


def compare(run: Run, config: dict[str, Any], force: bool) -> list[str]:
    """Show what a config changes against the one a run was started with.

    Returns:
        The changed keys.

    Raises:
        RequestError: it changes what the run is, and that was not forced.
    """
    before = flatten(yaml.safe_load(run.config.read_text(encoding="utf-8")) or {}) if run.config.exists() else {}
    after = flatten(config)
    keys = sorted((before.keys() | after.keys()) - {"run"})
    changed = [key for key in keys if before.get(key) != after.get(key)]
    for key in changed:
        log.info("changed since the run was started: %s: %s -> %s", key, before.get(key), after.get(key))
    refused = [key for key in changed if any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED)]
    if refused and not force:
        raise RequestError(
            f"run {run.path} cannot go on with another {', '.join(refused)}: "
            + "; ".join(f"{key} was {before.get(key)}, now {after.get(key)}" for key in refused)
            + "; start a new run, or give --force"
        )
    return changed
