"""The help of the commands that take the options of a run, printed from `cli/options`."""

import shutil
import textwrap

from lm.cli.options import NAMES, Option, all_options, option_groups
from lm.errors import RequestError
from lm.system.units import Count, spelled_count
from lm.training.config import SECTIONS

# Options that a first run needs; `--help all` shows the others too.
FREQUENT = [f"{section.name}.{option}" for section in SECTIONS for option in section.frequent]
FREQUENT_WITHOUT_FIT = [
    *("trainer.precision", "trainer.accelerator"),
    *("data.val", "data.test", "data.texts", "data.val_tokens", "data.micro_batch_size"),
]
COLUMN = 38  # where the help of an option begins


def print_options(command: str, what: str, chosen: str | None = None) -> None:
    """Print what a command does and its options: the `chosen` one or group of them, `all`, or the frequent ones."""
    options = all_options(command)
    chosen = chosen and chosen.removeprefix("--")
    groups = option_groups(option.name for option in options)
    names = [*sorted(groups), *(option.name for option in options)]
    if chosen not in names:  # `optimizer` for `model.optimizer`
        chosen = next((name for name in names if name.endswith(f".{chosen}")), chosen)
    if chosen not in (None, "all", *names):
        raise RequestError(f"no option or group of options {chosen!r}: give all, or one of {', '.join(NAMES)}")
    width, frequent, usage = min(110, shutil.get_terminal_size().columns), FREQUENT, "--config FILE"
    if command in ("validate", "test", "predict"):
        frequent, usage = FREQUENT_WITHOUT_FIT, "[--run NAME] [--ckpt_path PATH]"
    print(f"lm {command}: {what}\n\nusage: lm {command} {usage} [--OPTION VALUE ...]\n")
    group = ""
    for option in options:
        section = option.name.partition(".")[0]
        if chosen is None and section in NAMES and option.name not in frequent:
            continue
        if chosen not in (None, "all", option.name) and not option.name.startswith(f"{chosen}."):
            continue
        if section in NAMES and section != group:
            group = section
            print(f"\n{group}:")
        _print_option(option, width, short=chosen is None)
    if chosen is None:
        print(f"\nAll options: lm {command} --help all; those of a group: lm {command} --help data")
        print("In the YAML an option has the same name, with a level for each dot.")


def _print_option(option: Option, width: int, short: bool) -> None:
    """With the first sentence of the help beside its name, or with all of it below."""
    value = spelled_count(option.default) if isinstance(option.default, Count) else option.default
    default = f" [{value}]" if option.default else ""
    if not short:
        print(f"  --{option.name}{'' if option.kind == 'bool' else f' {option.kind}'}{default}")
        print(textwrap.fill(option.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        return
    sentence = option.help.partition(". ")[0].partition("; ")[0].removesuffix(".")
    left, *others = textwrap.wrap(sentence[:1].upper() + sentence[1:] + default, max(20, width - COLUMN))
    name = f"  --{option.name}"
    print(f"{name:<{COLUMN}}{left}" if len(name) < COLUMN - 1 else f"{name}\n{'':{COLUMN}}{left}")
    for line in others:
        print(f"{'':{COLUMN}}{line}")
