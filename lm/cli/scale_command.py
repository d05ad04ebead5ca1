"""`lm scale`: the config of a depth, or of the depth that is best for some hours."""

from typing import Any

from lm.cli.scale import ScaleRequest, scaled_config
from lm.errors import RequestError


def scale(
    hours: float | None = None,
    usd: float | None = None,
    rate: float | None = None,
    device: str = "auto",
    devices: int | None = None,
    memory: str | None = None,
    peak_tflops: float | None = None,
    mfu: float | None = None,
    ladder: str | None = None,
    **options: Any,
) -> None:
    """Print a whole config from a depth or from the hours that there are, by published scaling rules.

    Args:
        hours: Time of the run, validations and the start of the program included. The depth with the lowest expected
            loss is taken, unless one is given.
        usd: In place of hours: US dollars, at `rate`.
        rate: US dollars an hour of the machine.
        device: Where the hours are spent: h200, a100, 4090, ..., or auto, this machine, which is measured.
        devices: How many of them; all of this machine, or one of another, if not given.
        memory: The device's memory, such as 16GiB.
        peak_tflops: The device's peak in bf16: dense TFLOP/s with fp32 accumulation.
        mfu: Share of the device's peak to count with.
        ladder: Folder of a ladder, whose law says what loss to expect.
        options: Those of `ScaleRequest`.
    """
    request = ScaleRequest(**options)
    time = {"hours": hours, "usd": usd, "rate": rate, "device": None if device == "auto" else device,
            "devices": devices, "memory": memory, "peak_tflops": peak_tflops, "mfu": mfu, "ladder": ladder}  # fmt: skip
    given = {name: value for name, value in time.items() if value is not None}
    if hours is not None or usd is not None:
        from lm.cli.scale_hours import TimeOptions, config_for_time

        print(config_for_time(TimeOptions(**given), request, request.command(given)), end="")
    elif given:
        raise RequestError(f"--{next(iter(given))} is for a run of some hours: give --hours too")
    else:
        print(scaled_config(request)[1], end="")
