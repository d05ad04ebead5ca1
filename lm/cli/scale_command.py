"""`lm scale`: the config of a depth, or of the depth that is best for some hours."""

from typing import Any

from lm.cli.scale import TimedRequest, scaled_config
from lm.errors import RequestError


def scale(**options: Any) -> None:
    """Print a complete config for a depth or for a time budget, by published scaling rules.

    Args:
        options: Those of `TimedRequest`.
    """
    request = TimedRequest(**options)
    if request.seconds:
        from lm.cli.scale_hours import config_for_time

        print(config_for_time(request), end="")
    elif request.timing:
        raise RequestError(f"--{next(iter(request.timing))} is for a run of some hours: give --hours too")
    else:
        print(scaled_config(request)[1], end="")
