"""A dataclass of options as the arguments of a call from Python."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_args, get_type_hints

from lm.errors import RequestError
from lm.system.units import Count, parse_count


def arguments_from(options: type, **types: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of `__init__(self, config)`: the class then takes the fields of the dataclass `options` as arguments.

    `Trainer(max_steps=10)` makes a `TrainerConfig` and gives it to the decorated function. `help()` and parsers see the
    fields. `types` are types that the dataclass names in quotes, because importing them takes seconds.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            init(self, build_options(options, init.__qualname__.partition(".")[0], *args, **values))

        hints = get_type_hints(options, localns=types)
        parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
        for field in fields(options):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            parameter = Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, annotation=hints[field.name])
            parameters.append(parameter if default is MISSING else parameter.replace(default=default))
        __init__.__signature__, __init__.__annotations__ = Signature(parameters), hints
        __init__.__doc__ = options.__doc__
        return __init__

    return decorate


def build_options(options: type, caller: str, *args: Any, **values: Any) -> Any:
    """Make a dataclass of options from the arguments of a call; a count may be a string, as in a config."""
    kinds = {field.name: field.type for field in fields(options)}
    if unknown := [name for name in values if name not in kinds]:
        from lm.system.other_names import nearest_option, unknown_options

        section = options.__name__.removesuffix("Config").lower()  # ModelConfig: `model`
        hints = {name: nearest_option(name, list(kinds), section) for name in unknown}
        raise RequestError(f"{caller}: {unknown_options(hints)}")
    for name, value in values.items():
        if isinstance(value, str | float) and Count in (kinds[name], *get_args(kinds[name])):
            try:
                values[name] = parse_count(value)
            except ValueError as error:
                raise RequestError(f"{caller}({name}={value!r}): {error}") from error
    return options(*args, **values)
