"""From a command line and YAML files to one tree of settings: the files are merged, options are set over them, and
every name is checked.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from lm.cli.cleared_options import NULL, clear_earlier
from lm.cli.command_options import FitOptions, RunChoice
from lm.cli.config_files import find_config, read_config, run_with_config
from lm.cli.options import CONFIG, PRINT_CONFIG, SEED, all_options, command_options, option_groups
from lm.errors import RequestError
from lm.system.arguments import typed_options
from lm.system.parsing import parse_yaml
from lm.system.units import listed, shown


def read_settings(command: str, arguments: list[str]) -> tuple[dict[str, Any], str]:
    """The settings that a command line and its configs give, and the name of the run: that of the config's file."""
    typed = read_options(command, arguments)
    files = [find_config(value) for name, value in typed if name == "config" and value is not None]
    configs = {path: read_config(path) for path in files}
    check_names(command, typed, configs)
    typed = [(name, value) for name, value in typed if name != "config"]
    check_one_length(command, dict(typed))
    if not configs and (run := run_with_config(command, dict(typed))):
        configs = {run.config: read_config(run.config)}
        check_names(command, [], configs)
        typed += [("run", run.name), ("trainer.default_root_dir", str(run.path.parent))]
    if not configs:
        check_config_not_needed(command, dict(typed))
    return combine(command, configs.values(), typed), next((path.stem for path in configs), "run")


def check_one_length(command: str, values: Mapping[str, Any]) -> None:
    lengths = [name for name in ("trainer.max_steps", "trainer.max_tokens") if values.get(name) not in NULL]
    if lengths and command == "fit" and values.get("hours") not in NULL:
        raise RequestError(f"--{lengths[0]} gives the length of the run, and so does --hours: give one of them")


def check_config_not_needed(command: str, values: Mapping[str, Any]) -> None:
    """Raise RequestError unless a fit is given its data, or the defaults are printed."""
    with_data = command == "fit" and any(name.startswith("data.") for name in values)
    if not with_data and "print_config" not in values:
        if run := values.get("run"):
            raise RequestError(f"a new run needs a config, by --config; to resume one: --run {run} --ckpt_path auto")
        raise RequestError(f"give a config with --config, such as `lm {command} --config tiny.yaml`")


def split_overrides(arguments: list[str], options_class: type) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into arguments for a command's dataclass and options of a run, for `override`."""
    fit_only = {option.name for kind in (RunChoice, FitOptions) for option in fields(kind)} | {"config"}
    of_run = {option.name for option in all_options("fit")} - fit_only
    of_run |= option_groups(of_run) - {option.name for option in fields(options_class)} | {"seed"}
    if "--against" in arguments[:-1]:  # its value looks like options
        place = arguments.index("--against")
        arguments = [*arguments[:place], "=".join(arguments[place : place + 2]), *arguments[place + 2 :]]
    command_arguments: list[str] = []
    overrides: list[str] = []
    part = command_arguments
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0].removesuffix("+")
            part = overrides if "." in name or name in of_run else command_arguments
        part.append(argument)
    return command_arguments, read_options("fit", overrides)


def read_options(command: str, arguments: list[str]) -> list[tuple[str, Any]]:
    """The options of a command line by their full names, with the values as typed; None where there is none."""
    if arguments and arguments[0][:1] != "-" and "=" not in arguments[0]:  # `lm fit tiny.yaml`
        arguments = ["--config", *arguments]
    options = all_options(command)
    groups = option_groups(option.name for option in options)
    kinds = {option.name: option.kind for option in options}
    flags = [option.name for option in options if option.kind == "bool"]
    lists = [option.name + plus for option in options if "list of str" in option.kind for plus in ("", "+")]
    typed: list[tuple[str, Any]] = []
    for option, value in typed_options(arguments, flags, lists):
        if not option:
            hint = f"; did you mean --{value}?" if "=" in str(value) else ""
            if typed and kinds.get(typed[-1][0], "").startswith("tuple"):
                name, first = typed[-1]
                hint = f"; did you mean --{name} '[{first}, {value}]'?"
            elif typed and kinds.get(typed[-1][0]) == "bool":
                hint = f": --{typed[-1][0]} takes true or false"
            elif typed and str(typed[-1][1]).startswith(("[", "{")):
                hint = "; a list or mapping needs quotes around it"
            raise RequestError(f"{shown(value)} belongs to no option{hint}")
        name = SHORT.get(option) or option.removeprefix("--")
        is_mapping = name in groups or name.endswith(".init_args")  # as in `--model.schedule '{name: wsd}'`
        if is_mapping and isinstance(value, str) and value not in NULL:
            value = load_yaml(value, option)
        typed += dotted(value, groups, f"{name}.") if name in groups and isinstance(value, Mapping) else [(name, value)]
    return typed


SHORT = {"-c": "config", "--seed": SEED.name}


def combine(command: str, configs: Iterable[Mapping[str, Any]], typed: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Merge configs, of which later ones override earlier ones, and set the options of a command line over them.

    A group of options that is null has its defaults.
    """
    names = [option.name for option in all_options(command)]
    groups = option_groups(names)
    settings: dict[str, Any] = {}
    for options in [*(list(dotted(config, groups)) for config in configs), list(typed)]:
        for name, value in options:
            if name in groups and value not in NULL:
                option = _option_for(name, value, names)
                raise RequestError(f"{name} is a group of options and not {shown(value)}: {option}")
        for name in clear_earlier(settings, options):
            remove_option(settings, name)
        for name, value in options:
            if value in NULL and name in groups:
                remove_option(settings, name)
            else:
                set_option(settings, name, value)
    return settings


def _option_for(group: str, value: Any, options: Collection[str]) -> str:
    """What to give in place of a value for a group of options."""
    name = "class_path" if "." in str(value) else "name"
    if isinstance(value, str) and f"{group}.{name}" in options:
        return f"give --{group}.{name} {value}, or in a config {group.rpartition('.')[2]}: {{{name}: {value}}}"
    first = next(option for option in options if option.startswith(f"{group}."))
    *path, last = first.removeprefix(f"{group}.").split(".")
    value = value if type(value) in (int, float) else "..."
    entry = "".join(f"{{{part}: " for part in (*path, last)) + str(value) + "}" * (len(path) + 1)
    return f"write {group.rpartition('.')[2]}: {entry} in a config, or give --{first} {value}; null is for the defaults"


def dotted(settings: Mapping[str, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value; an empty group has none."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, Mapping):
            yield from dotted(value, groups, f"{name}.")
        else:
            yield name, value


def set_option(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set an option in nested settings, in place, by its dotted name; `trainer.callbacks+` adds to a list."""
    *groups, last = insert_init_args(name).split(".")
    for group in groups:
        settings = _group_of(settings, group)
    if last.endswith("+"):
        last = last.removesuffix("+")
        added = load_yaml(value, f"--{name}") if isinstance(value, str) else value
        present = [] if settings.get(last) in NULL else settings[last]
        value = [*_as_list(present), *_as_list(added)]
    settings[last] = value


def remove_option(settings: dict[str, Any], name: str) -> None:
    """Remove an option, or a group of them, from nested settings, in place: it has its default again."""
    *groups, last = name.split(".")
    for group in groups:
        settings = settings.get(group) or {}
    settings.pop(last, None)


def _group_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A group in settings, made where it is missing; of several callbacks or loggers, the last one."""
    group = settings.get(name)
    if isinstance(group, list) and group and name in ("callbacks", "logger"):
        group[-1] = _with_class_path(group[-1])
        return group[-1]
    settings[name] = _with_class_path(group)
    return settings[name]


def _with_class_path(group: Any) -> dict[str, Any]:
    """A group as it is; of a class that is given by its name alone, or where there is none, a new one."""
    if isinstance(group, dict):
        return group
    return {"class_path": group} if isinstance(group, str) and group not in NULL else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def load_yaml(text: str, option: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise RequestError(f"{option} {shown(text)} cannot be read: {error}") from error


def insert_init_args(name: str) -> str:
    """`trainer.logger.save_dir`, an argument of the logger's class, is `trainer.logger.init_args.save_dir`."""
    for option in ("trainer.callbacks", "trainer.logger"):
        argument = name.removeprefix(f"{option}.")
        if argument != name and argument.partition(".")[0] not in ("class_path", "init_args", "dict_kwargs"):
            return f"{option}.init_args.{argument}"
    return name


def check_names(command: str, typed: Iterable[tuple[str, Any]], configs: Mapping[Any, Mapping[str, Any]] = {}) -> None:
    """Raise RequestError for names that no option has, in a command line and in configs, and for a missing value."""
    options = {option.name for option in all_options(command)}
    groups = option_groups(options)
    values = {name.removesuffix("+"): value for name, value in typed}
    unknown = {"": {name: value for name, value in values.items() if not _is_known(name, options, groups)}}
    command_line_only = {option.name for option in (CONFIG, PRINT_CONFIG, *command_options(command))}
    in_config = (options | {option.name for option in fields(RunChoice)}) - command_line_only  # as in a run's config
    for path, config in configs.items():
        given = list(dotted(config, groups))
        names = [name for name, _ in given]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise RequestError(f"config {path}: {twice} is there twice, with a dot in its name and in its group")
        unknown[f"config {path}: "] = {name: value for name, value in given if not _is_known(name, in_config, groups)}
    if any(unknown.values()):
        from lm.system.other_names import nearest_option, unknown_options

        known = sorted(options | groups)

        def hint(name: str, value: Any) -> str:
            if name in command_line_only:
                return f"give --{name} on the command line"
            last = name.rpartition(".")[2]  # of a group in a wrong place
            if isinstance(value, Mapping) and (group := next((one for one in groups if one.endswith(f".{last}")), "")):
                return f"did you mean {group!r}?"
            return nearest_option(name, known) or f"`lm {command} --help all` lists them"

        messages = []
        for source, names in reversed(unknown.items()):
            hints = {name: hint(name, value) for name, value in names.items()}
            if names:
                messages.append(source + (_misplaced(names, known) or unknown_options(hints)))
        raise RequestError("; ".join(messages))
    if missing := [name for name, value in values.items() if value is None]:
        raise RequestError(f"--{missing[0]} needs a value")


def _misplaced(names: Iterable[str], known: Collection[str]) -> str:
    """The message for options of a config that all stand in one wrong group, such as the decoder's in `model`."""
    parents = {name.rpartition(".")[0] for name in names}
    own = [name.rpartition(".")[2] for name in names]
    homes = [group for group in option_groups(known) if all(f"{group}.{name}" in known for name in own)]
    if len(own) < 2 or len(parents) > 1 or not homes:
        return ""
    return f"{listed(own, 3)} stand under {parents.pop() or 'no group'}: write them under {min(homes, key=len)}"


def _is_known(name: str, options: Collection[str], groups: Collection[str]) -> bool:
    """Whether a name is an option or a group of them, or is within the value of an option."""
    parts = name.split(".")
    return name in groups or any(".".join(parts[:count]) in options for count in range(1, len(parts) + 1))
