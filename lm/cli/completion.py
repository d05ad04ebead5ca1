"""`lm completion bash`: a shell's completion of commands, options and their choices.

The script that is printed has all of them, so that nothing of this project runs when a person presses TAB.
"""

from importlib import import_module
from shlex import quote
from typing import Literal, get_args, get_origin

from lm.cli.command import TABLE, Command
from lm.cli.config_files import CONFIGS
from lm.cli.options import Option, all_options, options_of
from lm.system.arguments import options_of_function

RUNS = "(ls checkpoints 2> /dev/null)"  # in bash with a dollar sign before it
RUN_COMMANDS = ("branch", "monitor", "runs check", "runs compare", "runs export", "runs rm", "runs show")
WORDS = {**dict.fromkeys(RUN_COMMANDS, RUNS), "completion": "bash zsh fish"}  # what follows without an option
BASH = """\
_lm() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words="{commands}" names=
  case "${{COMP_WORDS[*]:1:3}}" in
{cases}
  esac
  if [[ $current == = ]]; then current=; fi  # `--name=value` is three words
  if [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [[ $previous == --* && $current != -* ]]; then
    case "$previous" in
    --run) words="${runs}" ;;
    --config) compopt -o filenames 2> /dev/null; words="{presets} $(compgen -f -- "$current")" ;;
{choices}
    *) words= ;;  # the names of files
    esac
  elif [[ $names && $current != -* ]]; then words=$names
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _lm lm
"""
ZSH = "autoload -U +X compinit && compinit; autoload -U +X bashcompinit && bashcompinit\n"


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the completion of commands and options: `source <(lm completion bash)`, or `lm completion fish | source`.

    Args:
        shell: The shell that is to read it.
    """
    table = {command.name: options_of_command(command) for command in TABLE}
    print(fish_script(table) if shell == "fish" else ZSH * (shell == "zsh") + bash_script(table), end="")


def options_of_command(command: Command) -> list[Option]:
    if command.kind == "request":
        return all_options(command.name)
    module, _, name = (command.options_class or command.target).partition(":")
    target = getattr(import_module(f"lm.cli.{module}"), name)
    if command.kind == "function":
        return [Option(name, kind, None, text) for name, kind, text in options_of_function(target)]
    overrides = [option for option in all_options("fit") if "." in option.name]  # of a run's config
    return [*options_of(target), *(overrides if command.kind == "overrides" else [])]


def choices_of(option: Option) -> list[str]:
    if option.kind == "bool":
        return ["true", "false"]
    kinds = (option.hint, *get_args(option.hint))
    return [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def presets() -> str:
    """The names of the configs that come along, which a command finds from anywhere."""
    return " ".join(sorted(path.name for folder in CONFIGS for path in folder.glob("*.yaml")))


def bash_script(table: dict[str, list[Option]]) -> str:
    cases = []
    for name, options in sorted(table.items(), key=lambda item: -len(item[0])):  # `data show` before `data`
        flags, names = " ".join(f"--{option.name}" for option in options), WORDS.get(name, "").replace("(", "$(")
        cases.append(f"    '{name} '*) words='{flags}' names=\"{names}\" ;;")
    choices = {option.name: choices_of(option) for options in table.values() for option in options}
    values = [f"    --{name}) words={quote(' '.join(words))} ;;" for name, words in choices.items() if words]
    families: dict[str, list[str]] = {}  # `data` -> `prepare`, `inspect` ...
    for name in table:
        first, *second = name.split()
        families.setdefault(first, []).extend(second)
    cases += [f"    '{name} '*) words={quote(' '.join(words))} ;;" for name, words in families.items() if words]
    return BASH.format(
        commands=" ".join(families), cases="\n".join(cases), choices="\n".join(values), runs=RUNS, presets=presets()
    )


def fish_script(table: dict[str, list[Option]]) -> str:
    lines = ["complete -c lm -n __fish_use_subcommand -f"]
    for command in TABLE:
        first, *second = command.name.split()
        where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        help = quote(command.help)
        lines.append(f"complete -c lm -n __fish_use_subcommand -a {first} -d {quote('') if second else help}")
        for word in second:
            others = " ".join(name.partition(" ")[2] for name in table if name.startswith(f"{first} "))
            here = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {others}"
            lines.append(f"complete -c lm -n {quote(here)} -f -a {word} -d {help}")
        if names := WORDS.get(command.name):
            lines.append(f"complete -c lm -n {quote(where)} -f -a {quote(names)}")
        for option in table[command.name]:
            offered = {"run": RUNS, "config": presets()}.get(option.name) or " ".join(choices_of(option))
            values = f" -r{' -f' * (option.name != 'config')} -a {quote(offered)}" if offered else " -r"
            text = quote(option.help.partition(". ")[0])
            lines.append(f"complete -c lm -n {quote(where)} -l {option.name}{values} -d {text}")
    return "\n".join(lines) + "\n"
