"""Find runs by name: in the folder of runs, else in the registry."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from lm.errors import RequestError
from lm.runs.run import ROOT, Run


def find_run(name: str | None, root: str | Path = ROOT, otherwise: str = "") -> Run:
    """Find a run by name: in `root`, else in the registry, else as a path; without a name, the newest in `root`.

    RequestError if there is none, or several; `otherwise` is additional advice for the message if there is no run.
    """
    if name is None:
        if runs := Run.all(root):
            return runs[-1]
        raise no_run(root, otherwise)
    path = Path(root) / name
    if (path / "run.json").is_file():
        return Run(path)
    named = [path for path in known_folders() if path.name == name]
    if len(named) > 1:
        raise RequestError(f"several runs are named {name}; give the path of one: {', '.join(map(str, named))}")
    if named:
        return Run(named[0])
    if (Path(name) / "run.json").is_file():
        return Run(Path(name).resolve())
    raise unknown_run(name, root)


def find_runs(names: Iterable[str], root: str | Path = ROOT) -> list[Run]:
    """Find runs by name, each once; `lr-*` matches all such names under `root`, or else in the registry."""
    runs: dict[Path, Run] = {}
    for name in names:
        matches = []
        if re.search(r"[*?[]", name):
            matches = [run for run in Run.all(root) if fnmatchcase(run.name, name)]
            matches = matches or [Run(path) for path in known_folders() if fnmatchcase(path.name, name)]
        for run in matches or [find_run(name, root)]:
            runs.setdefault(run.path.resolve(), run)
    return list(runs.values())


def no_run(root: str | Path, otherwise: str = "") -> RequestError:
    """The error if there is no run at all; `otherwise` is additional advice."""
    return RequestError(f"no run under {root} yet: start one with `lm fit --config tiny.yaml`{otherwise}")


def unknown_run(name: str, root: str | Path) -> RequestError:
    folder = Path(root) / name
    if (folder / "last").is_dir():
        return RequestError(
            f"{folder} has lost its run.json, so it is no run any more; its model is --ckpt_path {folder}/last"
        )
    if (Path(name).parent / "run.json").is_file():
        return RequestError(f"{name} is in the folder of a run: give the run alone, {Path(name).parent}")
    hint = nearest_runs(name, root) or "; `lm runs ls` lists them"
    return RequestError(f"no run {name!r} under {root} or in the registry{hint}")


def nearest_runs(name: str, root: str | Path) -> str:
    """`; did you mean tiny or tiny-2?`: the names of runs under `root` similar to a name; empty if there is none."""
    names = sorted(run.name for run in Run.all(root))
    swapped = [known for known in names if sorted(known) == sorted(name)]  # swapped letters of a short name
    close = get_close_matches(Path(name).name, names, 3) or swapped
    return f"; did you mean {' or '.join(close)}?" if close else ""


def known_folders() -> list[Path]:
    """The folders of runs in the registry that exist."""
    from lm.runs.registry import known_runs

    return [path for row in known_runs() if ((path := Path(row["path"])) / "run.json").is_file()]
