"""`lm scale`: the config of a depth, or of the depth that is best for some hours."""

import logging
from pathlib import Path
from shlex import quote
from typing import Any

from lm.cli.scale import ScaleOptions, ScaleRequest, manifest, scaled_config
from lm.cli.scaling_rules import rare_entries
from lm.errors import RequestError
from lm.runs.expected_loss import expected_loss, ladder_loss
from lm.system.files import write_new_file
from lm.system.units import format_count

log = logging.getLogger(__name__)
MANY = 50  # parameters for each token of the text, of which 33 gain little over 10 (tests/benchmarks/README.md)


def scale(**options: Any) -> None:
    """Print a complete config for a depth or for a time budget, by published scaling rules.

    Args:
        options: Those of `ScaleRequest`.
    """
    request = ScaleRequest(**options)
    file = Path(request.output) if request.output else None
    if file and file.exists():  # before the minutes of measuring
        raise RequestError(f"--output {file} is there already; give another name, or remove it")
    if request.seconds:
        from lm.cli.scale_hours import config_for_time

        recipe, config = config_for_time(request)
    elif request.timing:
        raise RequestError(f"--{next(iter(request.timing))} is for a run of some hours: give --hours too")
    else:
        recipe, config = scaled_config(request)
        if not Path(request.data).exists() and request.data != ScaleOptions().data:
            log.info("%s is not there yet: `lm data prepare` makes it, as the config says", request.data)
        if recipe.multiplied > MANY * request.text_tokens:
            size, text = (
                format_count(recipe.multiplied),
                f"{format_count(request.text_tokens)} tokens of {request.data}",
            )
            log.warning("warning: %s parameters for %s; without --depth the size follows from the text", size, text)
    if (prepared := manifest(request.data)) and (
        warning := rare_entries(prepared["vocab_size"], prepared["splits"]["train"]["tokens"])
    ):
        log.warning("warning: %s: %s", request.data, warning)
    if request.ladder:
        expected = ladder_loss(Path(request.ladder), recipe.flops)
    else:
        expected = expected_loss(recipe.multiplied, recipe.tokens, recipe.flops, request.data)
    if expected.loss is not None:
        title, body = config.split("\n", 1)
        config = f"{title}\n# Expected loss: {expected}.\n{body}"
    if file is None:
        print(config, end="")
        return
    write_new_file(file, config)
    log.info("wrote %s; next: lm plan --config %s, then lm fit --config %s", file, *[quote(str(file))] * 2)
