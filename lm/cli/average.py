"""`lm average`: the mean of the weights of several checkpoints of a run, as a checkpoint that every command takes.

Late in a training with a high learning rate the weights move around a minimum, and their mean is nearer to it than each
of them (Izmailov et al., 2018, "Averaging weights leads to wider optima and better generalization", arXiv:1803.05407;
of the last K checkpoints: Kaddour, 2022, "Stop wasting my time! Saving days of ImageNet and BERT training with latest
weight averaging", arXiv:2209.14981).
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lm.cli.convert import checkpoint_content
from lm.errors import RequestError
from lm.runs import registry
from lm.runs.checkpoint import TENSORS, find_damage, read_document, read_progress, write_files
from lm.runs.run import ROOT, STEP, Run
from lm.system.files import new_folder
from lm.system.units import Count

log = logging.getLogger(__name__)


def average(
    run: str | None = None,
    steps: list[Count] | None = None,
    last: int | None = None,
    output: str | None = None,
    root: str = str(ROOT),
) -> None:
    """Write the mean of the weights of several checkpoints of a run, as a checkpoint without optimizer state.

    Args:
        run: Name of the run, under the root or in the registry: `mine` means that one and not `mine-2`. If not given,
            the newest of all.
        steps: The optimizer steps of the checkpoints, such as 100 200 300.
        last: Take so many of the newest checkpoints, in place of --steps.
        output: The folder to make, which must be empty or not there; `average-FIRST-LAST-of-K` in the run's folder if
            not given.
        root: Folder of the runs.
    """
    found = registry.find_run(run, root)
    chosen = choose_checkpoints(found, steps, last)
    first, newest = min(chosen), max(chosen)
    target = Path(output) if output else found.path / f"average-{first}-{newest}-of-{len(chosen)}"
    if STEP.fullmatch(target.resolve().name) and (target.resolve().parent / "run.json").exists():
        raise RequestError(f"--output {target} would be taken for a checkpoint of the run's training; choose another")
    folders = list(chosen.values())
    for folder in folders:
        if damage := find_damage(folder):
            raise RequestError(f"checkpoint {folder}: {damage}; choose others with --steps")
    with new_folder(target) as folder:
        texts = read_document(chosen[newest])["digests"].keys() - set(TENSORS.values())
        files = {name: (chosen[newest] / name).read_text(encoding="utf-8") for name in sorted(texts)}
        of = {"steps": list(chosen), "samples": read_progress(chosen[newest]).samples}
        write_files(folder, checkpoint_content(mean_weights(folders), files) | {"average": of})
    log.info("the mean of the weights of run %s after steps %s", found.name, ", ".join(map(str, chosen)))
    inside = target.resolve().parent == found.path.resolve()
    log.info("its validation loss: %s", found.validate_command(target.name if inside else target.resolve()))
    print(target)


def choose_checkpoints(run: Run, steps: Sequence[int] | None, last: int | None) -> dict[int, Path]:
    """The checkpoints of a run to take, by optimizer step, ascending: those of `steps`, or the `last` newest."""
    there, newest = run.steps(), run.link("last")
    have = f"run {run.path} has checkpoints of steps {', '.join(map(str, there))}" if there else (
        f"run {run.path} has no checkpoint yet"
    )
    if (steps is None) == (last is None):
        raise RequestError(f"give the checkpoints with --steps, such as --steps 100 200, or with --last 3; {have}")
    if steps is None:
        # Later ones than `last` were left behind when the run was resumed from there.
        usable = [step for step, path in there.items() if newest is None or step <= int(newest.name.split("-")[-1])]
        if last > len(usable):
            raise RequestError(f"--last {last}: {have}; trainer.keep_checkpoints and trainer.keep_every keep more")
        steps = usable[-last:] if last > 0 else []
    if missing := [step for step in steps if step not in there]:
        raise RequestError(f"there is no checkpoint of step {missing[0]}: {have}")
    if len(set(steps)) < 2:
        raise RequestError(f"a mean takes two checkpoints or more; {have}")
    return {step: there[step] for step in sorted(steps)}


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each weight, computed in fp64 and rounded to the last folder's dtype.

    What is not a floating-point number, such as a count of steps in a buffer, is that of the last folder. Weights are
    read one by one, so that the memory is that of one model and of one weight in fp64.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(folder / TENSORS["state_dict"], "pt")) for folder in folders]
        shapes = [{name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} for file in files]
        for folder, own in zip(folders, shapes):
            for name in sorted(own.keys() | shapes[-1].keys()):
                if own.get(name) != shapes[-1].get(name):
                    raise RequestError(
                        f"the checkpoints are of different shapes: {name} is {own.get(name, 'absent')} in {folder} and "
                        f"{shapes[-1].get(name, 'absent')} in {folders[-1]}"
                    )
        mean = {}
        for name in shapes[-1]:
            weight = files[-1].get_tensor(name)
            if weight.is_floating_point():
                total = torch.zeros(weight.shape, dtype=torch.float64)
                for file, folder in zip(files, folders):
                    part = file.get_tensor(name)
                    if part.isnan().any():
                        raise RequestError(f"the weight {name} of {folder} has NaN in it: leave that checkpoint out")
                    total += part
                weight = (total / len(files)).to(weight.dtype)
            mean[name] = weight
        return mean
