"""`lm branch`: a new run that begins at a checkpoint of another one, with another schedule or other data.

The new run's folder has the weights and the optimizer's state of that checkpoint as hard links, so it needs neither
space nor the other run any more, and the rest is a resume like any other.
"""

import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

from lm.cli.command_options import BranchOptions
from lm.cli.fit import fit
from lm.cli.request import make_request, override
from lm.data.mixture import continued_mixture
from lm.errors import RequestError
from lm.runs.checkpoint import read_progress
from lm.runs.config_diff import differences, not_allowed
from lm.runs.find import find_run
from lm.runs.run import Run
from lm.runs.trainer_json import find_damage, read_document
from lm.system.files import atomic_folder, dump_checksummed
from lm.system.process import other_arguments, under_srun, under_torchrun
from lm.training.config import ScheduleConfig
from lm.training.schedule import lr_fraction

log = logging.getLogger(__name__)


def branch(options: BranchOptions, overrides: list[tuple[str, Any]]) -> None:
    """Make the run, with options of a run as they are typed, and train it."""
    if (under_torchrun() or under_srun()) and not options.make_only:
        raise RequestError(
            "every process would make a run: give --make_only to one process, and train it then with the `lm fit` that "
            "it prints"
        )
    trunk = find_run(options.run, options.root)
    at = options.at or "last"
    checkpoint = trunk.checkpoint(f"step-{int(at):08d}" if at.isdigit() else at).resolve()
    if damage := find_damage(checkpoint):
        raise RequestError(f"{checkpoint}: {damage}")
    progress, before = read_progress(checkpoint), trunk.settings()
    step = progress.step
    settings, root = trunk.settings(), trunk.path.parent
    settings["trainer"]["default_root_dir"] = str(root)
    if options.tokens:
        if any(name in ("trainer.max_steps", "trainer.max_tokens") for name, _ in overrides):
            raise RequestError("--decay and --constant give the length of the branch: leave trainer.max_steps out")
        data = override(settings, overrides).settings["data"]  # of the branch, whose steps may be larger
        change_schedule(settings, step, options, tokens_of_a_step(data))
    after = override(settings, overrides).settings
    old, new = before["data"], after["data"]
    mixtures = [(data["sources"], data["phases"]) for data in (old, new)]
    if all(sources for sources, _ in mixtures) and mixtures[0] != mixtures[1]:
        new |= continued_mixture(old, new, progress.samples * old["seq_len"])
        after = override(after, []).settings
    changes = check_branch_changes(trunk, before, after)
    if (after["trainer"]["max_steps"] or math.inf) <= step:
        raise RequestError(f"step {step} is the last of {trunk.path}: give --decay TOKENS or --constant TOKENS")
    name = options.name or f"{trunk.name}-{step}-{'decay' if options.decay else 'branch'}"
    if (run := Run(root / name)).path.exists():
        raise RequestError(f"there is a run {run.path}: give another --name; `{run.resume_command()}` resumes it")
    run = Run.create(name, root)
    try:
        pin_checkpoint(checkpoint, run.path / checkpoint.name, before["data"]["seq_len"], after["data"]["seq_len"])
        request = make_request("fit", {**after, "run": run.name, "ckpt_path": "auto"})
        run.config.write_text(request.config_yaml, encoding="utf-8")  # with its name: enough to resume it
        origin = {"run": trunk.name, "path": str(trunk.path.resolve()), "step": step, "changes": changes}
        turn = Run.next_start(root)
        run.describe(id=run.name, name=run.name, status="interrupted", step=step, branch=origin, turn=turn)
        low = after["model"]["schedule"]["begin_fraction"]
        messages = [
            f"run {run.path} begins at step {step} of {trunk.path}",
            *(f"changed: {key}: {old} -> {new}" for key, (old, new) in changes.items()),
        ]
        if options.decay and not options.rewarm and low < 0.5:
            messages.append(f"the rate begins at {low:.2g} of its peak: --rewarm TOKENS lets it rise first")
        if not changes:
            messages.append("nothing is changed: it trains on with that run's config; --decay, for example, changes it")
        if options.make_only:
            log.info("%s", "\n".join(messages))
            print(run.resume_command())
            return
        with other_arguments(["fit", f"--config={run.config}", f"--run={run.name}", "--ckpt_path=auto"]):
            fit(request, messages=messages)
    except RequestError:
        if not (run.path / "metrics.jsonl").exists():  # it has not begun, and the name is free again
            run.release()
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def change_schedule(settings: dict[str, Any], step: int, options: BranchOptions, tokens: int) -> None:
    """Set, in place, the schedule of a branch at a step and its number of steps, which take `tokens` each."""
    trainer, schedule = settings["trainer"], settings["model"]["schedule"]
    length, rise = round(options.tokens / tokens), round((options.rewarm or 0) / tokens)
    if length < 1 or (options.rewarm and rise < 1):
        raise RequestError(
            f"a length is a number of tokens, at least those of a step, {tokens:,}: {10 * tokens} are 10 steps"
        )
    max_steps = trainer["max_steps"] or -(-trainer["max_tokens"] // tokens_of_a_step(settings["data"]))
    rate = lr_fraction(max(0, step - 1), max(max_steps, step), ScheduleConfig(**schedule))
    if not rate and not rise:
        raise RequestError(
            f"the learning rate of the run at step {step} is 0, and would stay 0: let it rise with --rewarm TOKENS, to "
            "its peak, or begin at an earlier step with --at"
        )
    if options.decay and not rise and (end := options.final_fraction) > rate:
        raise RequestError(
            f"the learning rate at step {step} is {rate:.3g} of the peak, and --final_fraction {end:g} is more: give a "
            "smaller one, let the rate rise first with --rewarm TOKENS, or begin at an earlier step"
        )
    trainer["max_steps"], trainer["max_tokens"] = step + length, None
    shape = {"name": "wsd", "decay_steps": length - rise} if options.decay else {"name": "constant"}
    shape |= {"warmup_steps": rise, "final_fraction": options.final_fraction}
    settings["model"]["schedule"] = vars(ScheduleConfig()) | shape | {"begin_step": step, "begin_fraction": rate}


def tokens_of_a_step(data: dict[str, Any]) -> int:  # on one device, where the config leaves them to the devices
    return data["global_batch_tokens"] or data["micro_batch_size"] * data["seq_len"]


def check_branch_changes(trunk: Run, before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """What differs between two configs, `{key: [before, after]}`, if its weights and optimizer can stay the same."""
    changes = differences([before, after])
    changes.pop("trainer.default_root_dir", None)
    if fixed := not_allowed("branch", changes):
        values = ", ".join(f"{key} was {old}, now {new}" for key, (old, new) in fixed.items())
        what = f"a branch of {trunk.path} begins with its weights and its optimizer"
        raise RequestError(f"{what}: {values}; leave it as it was, or start a new run")
    return changes


def pin_checkpoint(source: Path, target: Path, seq_len: int, new_seq_len: int) -> None:
    """Make a checkpoint of another run the first of a branch: its files as hard links, without its callbacks' states.

    Samples, of `seq_len` tokens there and `new_seq_len` here, count by the tokens that were trained on.
    """
    document = read_document(source)
    document["callbacks"], document["kept_for_good"] = {}, False
    document["cursor"]["consumed"] = document["cursor"]["consumed"] * seq_len // new_seq_len
    with atomic_folder(target) as folder:
        for name in document["digests"]:
            try:
                os.link(source / name, folder / name)
            except OSError:  # a file system without hard links
                shutil.copy2(source / name, folder / name)
        (folder / "trainer.json").write_bytes(dump_checksummed(document))
