"""The options of `lm ladder`, and the recipes that it compares; nothing here imports PyTorch."""

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lm.cli.command_options import DeviceOptions
from lm.cli.config_files import find_config, read_config
from lm.cli.ladder_report import AGAINST, HALF
from lm.cli.scale import ScaleOptions
from lm.cli.scaling_rules import TOKENS_PER_PARAMETER
from lm.cli.settings import split_overrides
from lm.errors import RequestError
from lm.runs import scaling_laws
from lm.runs.run import ROOT, check_run_name
from lm.system.arguments import parse
from lm.system.parsing import flatten
from lm.system.units import Count

Overrides = list[tuple[str, Any]]  # options of a run, as typed


@dataclass(frozen=True)
class LadderRuns(DeviceOptions):
    """Which models are trained.

    Args:
        depths: Numbers of blocks to train, such as 2,4,6,8; width, heads, batch and learning rate as in `lm scale`.
        predict: Depths whose loss to predict. They are trained only if --depths lists them too; the report then
            compares the prediction with the measured loss.
        ratio: Training tokens per non-embedding parameter; 20 if neither this nor --max_steps is given.
        max_steps: Instead of --ratio: optimizer steps per run, the same for all sizes.
        seeds: Runs per size, with seeds 1, 2 and so on; three or more show the noise between seeds.
        against: Another recipe to compare with: the options it adds or changes, such as '--optimizer adamw', or a YAML
            file of them. It is trained at the same sizes, and the ladder's own recipe also at half of the length.
        name: Name of the ladder: its folder, and the prefix of its runs' names.
        plan_only: Print what would be trained, without training.
        json: Print one JSON object instead of tables.
        root: Folder of the runs; the ladder makes a folder of its own in it.
    """

    depths: list[str] = field(default_factory=list)
    predict: list[str] = field(default_factory=list)
    ratio: float | None = None
    max_steps: Count | None = None
    seeds: int = 1
    against: str | None = None
    name: str = "ladder"
    plan_only: bool = False
    json: bool = False
    root: str = str(ROOT)


@dataclass(frozen=True)
class LadderOptions(ScaleOptions, LadderRuns):
    """Train small models of several depths with configs from `lm scale`, fit scaling laws to their losses, and predict
    larger ones. The same command resumes it. Training options such as `--trainer.precision 32-true` apply to all runs.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes:
            raise RequestError("give the depths, such as --depths 2,4,6,8")
        fitted = set(self.sizes) - set(self.held_out)
        if self.held_out and len(fitted) < scaling_laws.MIN_SIZES:  # `ladder_report` says what is far from them
            raise RequestError(
                f"a prediction takes {scaling_laws.MIN_SIZES} other sizes or more, and --depths has {len(fitted)} that "
                "--predict has not: add some, such as --depths 2,4,6,8"
            )
        check_run_name(self.name)
        if self.max_steps and self.ratio is not None:
            raise RequestError("--ratio and --max_steps each give the length of the runs: give one of them")

    @property
    def sizes(self) -> list[int]:
        """Depths to train."""
        return _depths("--depths", self.depths)

    @property
    def held_out(self) -> list[int]:
        """Depths to predict."""
        return _depths("--predict", self.predict)

    @property
    def horizon(self) -> dict[str, Any]:
        """The length of a run, as an option of `lm scale`."""
        if self.max_steps:
            return {"max_steps": self.max_steps}
        return {"target_param_data_ratio": TOKENS_PER_PARAMETER if self.ratio is None else self.ratio}

    @property
    def length(self) -> str:  # in the names of runs
        [(name, value)] = self.horizon.items()
        return f"n{int(value)}" if name == "max_steps" else f"r{value:g}"

    @property
    def folder(self) -> Path:
        return Path(self.root) / self.name


def _depths(option: str, values: list[str]) -> list[int]:
    """Parse the depths of an option, separated by commas or spaces; returns them sorted, without duplicates."""
    typed = ",".join(values)
    words = typed.split(",") if values else []
    for word in words:
        if not word.isdecimal() or int(word) < 2:
            expected = "a number of blocks, 2 or more; give several as 2,4,6"
            raise RequestError(f"{option} {typed}: {word!r} is not {expected}")
    return sorted(set(map(int, words)))


def recipes(options: LadderOptions, overrides: Overrides) -> list[tuple[str, LadderOptions, Overrides]]:
    """The recipes of a ladder: its own, and those that --against adds: its own at half of the length, and the other."""
    own = ("", options, overrides)
    if options.against is None:
        return [own]
    if options.max_steps == 1:
        raise RequestError("--max_steps 1 has no half: --against trains the ladder's recipe with half of its steps too")
    if options.max_steps:
        half = replace(options, max_steps=Count(options.max_steps // 2))
    else:
        half = replace(options, ratio=options.horizon["target_param_data_ratio"] / 2)
    words = shlex.split(options.against)
    if len(words) == 1 and not words[0].startswith("-"):
        config = flatten(read_config(find_config(words[0])))
        words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in config.items()]
    typed, changed = split_overrides(words, LadderOptions)
    other = replace(options, **parse(LadderOptions, typed, "lm ladder --against", defaults=False))
    for name in ("sizes", "seeds", "folder", "against"):
        if getattr(other, name) != getattr(options, name):
            where = f"--against {options.against!r}"
            raise RequestError(f"{where}: depths, seeds and folder are those of the ladder: leave them out there")
    return [own, (HALF, half, overrides), (AGAINST, other, [*overrides, *changed])]
