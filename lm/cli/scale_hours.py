"""`lm scale --hours`: depth, tokens and batch with the lowest expected loss that a device reaches in a given time.

For each depth, the device's speed gives the tokens that fit into this time, and a published scaling law the loss after
them. For a named device, the speed is that of `lm plan`; on this machine, `lm bench step` measures it at the chosen
depth. The measurement may change the choice, so this repeats until the chosen depth has been measured.
"""

import logging
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import yaml

from lm.cli import scale
from lm.cli.hours import FEW, measure_step
from lm.cli.plan_facts import memory_facts, memory_of_option
from lm.cli.scaling_rules import DEVICE_TOKENS, Recipe, batch_tokens, make_recipe, micro_batch, power_of_two
from lm.errors import RequestError
from lm.model.config import MAX_LAYERS
from lm.model.memory import Step
from lm.runs.expected_loss import published_loss
from lm.system.devices import ASSUMED_MFU, find_device
from lm.system.units import format_count, format_duration, format_figure
from lm.training.checks import has_kernels
from lm.training.config import OptimizerConfig
from lm.training.pace import steps_within
from lm.training.precision import precision_for_cpu

log = logging.getLogger(__name__)
FIRST = 4  # depth that is measured first, on a machine whose peak is not known
PRECISION = "bf16-mixed"  # of the config
STARTUP = 30.0  # seconds until the first step is done, on another machine's device; assumed


class Speed(NamedTuple):
    """The speed of training on one device."""

    flops: float  # FLOPs a second in forward and backward pass
    optimizer: float  # seconds of an optimizer step after them
    start: float  # seconds until the first step is done
    checkpoint: float  # seconds that training waits for a checkpoint
    basis: str  # source of these numbers


@dataclass(frozen=True)
class Candidate:
    """A recipe on so many devices."""

    recipe: Recipe
    fitting: int  # samples of a micro-batch that a device has memory for
    devices: int
    speed: Speed
    options: scale.ScaleOptions = scale.ScaleOptions()

    @property
    def loss(self) -> float:
        return published_loss(self.recipe.multiplied, self.recipe.tokens)

    @property
    def micro_batch(self) -> int:
        return micro_batch(self.recipe.batch, self.recipe.seq_len, self.devices, self.fitting)

    def sample_seconds(self, samples: float) -> float:
        """Seconds of the forward and backward passes of `samples` samples."""
        return samples * self.recipe.seq_len * self.recipe.flops_per_token / (self.speed.flops * self.devices)

    @property
    def step_seconds(self) -> float:
        return self.sample_seconds(self.recipe.batch) + self.speed.optimizer

    @property
    def interval_seconds(self) -> float:
        """Seconds of a validation (forward pass only: a third of the FLOPs) and a checkpoint."""
        return self.sample_seconds(scale.validated_samples(self.recipe)) / 3 + self.speed.checkpoint

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        intervals = math.ceil(self.recipe.steps / scale.interval(self.recipe.steps))
        return self.speed.start + self.recipe.steps * self.step_seconds + intervals * self.interval_seconds

    def fill(self, seconds: float) -> "Candidate":
        """Return a copy with as many steps as fit into `seconds`, and the best batch for that number of tokens."""
        one, seq_len = self, self.recipe.seq_len
        for _ in range(3):  # batch and steps follow from each other
            pauses = [(scale.interval(one.recipe.steps), one.interval_seconds)]
            tokens = steps_within(seconds - one.speed.start, one.step_seconds, pauses) * one.recipe.batch_tokens
            tokens = min(tokens, scale.EPOCHS * one.options.text_tokens)
            best = one.devices * power_of_two(batch_tokens(max(1.0, tokens)) / seq_len / one.devices)
            batch = one.options.batch or best
            steps = int(tokens / (batch * seq_len))
            if steps < 1:
                depth = one.recipe.decoder.num_hidden_layers
                raise RequestError(
                    f"{format_figure(seconds)} s are too few: at depth {depth} the start takes "
                    f"{format_figure(one.speed.start)} s, an optimizer step {format_figure(one.step_seconds)} s "
                    f"and a validation and a checkpoint {format_figure(one.interval_seconds)} s: give more time"
                )
            one = replace(one, recipe=replace(one.recipe, batch=batch, steps=steps))
        return one


def config_for_time(request: scale.ScaleRequest) -> tuple[Recipe, str]:
    """The recipe and its YAML, of the given depth or of the one with the lowest expected loss in the time."""
    for name in request.horizon:
        raise RequestError(f"--{name} gives the length of the run, and so does the time: give one of them")
    scaled = request if request.depth else scale.in_small_proportions(request)
    best = Search(scaled).best()
    recipe = best.recipe
    times = f", {recipe.tokens / scaled.text_tokens:.2g} times the text" if scaled.text_tokens < math.inf else ""
    devices = f"{best.devices} x " if best.devices > 1 else ""
    horizon = (
        f"{format_count(recipe.tokens)} tokens{times}, {recipe.tokens / recipe.multiplied:.3g} a parameter outside the "
        f"embedding: {format_duration(best.seconds)} at {format_figure(best.step_seconds)} s a step "
        f"({devices}{best.speed.basis})"
    )
    return recipe, scale.write_yaml(recipe, request.command(), horizon, scaled, best.micro_batch)


class Search:
    """Searches for the depth with the lowest expected loss, and keeps measured speeds."""

    def __init__(self, request: scale.ScaleRequest) -> None:
        if request.mfu is not None and request.mfu > 1:
            raise RequestError(f"--mfu {request.mfu} must lie in (0, 1]")
        self.request, self.seconds = request, request.seconds
        self.is_this_machine = request.device == "auto" and not (request.memory or request.peak_tflops or request.mfu)
        self.device, count = find_device(request.device, memory_of_option(request.memory), request.peak_tflops)
        self.precision = PRECISION if self.device.capability else precision_for_cpu(PRECISION)
        self.peak = self.device.peak_flops(self.precision) or 0.0
        if not self.is_this_machine and not self.peak:
            raise RequestError(f"the peak of {self.device.name} in {self.precision} is not known: give --peak_tflops N")
        self.devices = request.devices or (count if self.is_this_machine else 1)
        if request.batch and request.batch % self.devices:
            raise RequestError(
                f"--batch_tokens {request.batch_tokens:,}, {request.batch} samples, cannot be divided among "
                f"{self.devices} devices: give another, or --devices 1"
            )
        self.measured: dict[int, Speed] = {}

    def best(self) -> Candidate:
        depth = self.request.blocks or FIRST
        while True:
            if self.is_this_machine:
                self.measure(depth)
            best = min(self.candidates(), key=lambda one: one.loss)
            depth = best.recipe.decoder.num_hidden_layers
            if not self.is_this_machine or depth in self.measured:
                return best

    def candidates(self) -> Iterator[Candidate]:
        """Candidates of depth 2 and more, until the loss has risen twice, or memory, time or text do not suffice."""
        lowest, higher = math.inf, 0
        for depth in [self.request.blocks] if self.request.blocks else range(2, MAX_LAYERS):
            try:
                recipe = self.recipe(depth)
                one = Candidate(recipe, self.fitting(recipe), self.devices, self.speed(recipe), self.request)
                one = one.fill(self.seconds)
            except RequestError:
                if lowest == math.inf:
                    raise
                return
            yield one
            higher += one.loss > lowest
            lowest = min(lowest, one.loss)
            if higher == 2 or recipe.multiplied > scale.PARAMETERS_PER_TOKEN * self.request.text_tokens:
                return

    def recipe(self, depth: int) -> Recipe:
        """The recipe of a depth; its number of steps is a placeholder."""
        return make_recipe(scale.shape(depth, self.request), steps=1000, optimizer=self.request.optimizer)

    def fitting(self, recipe: Recipe) -> int:
        """Largest micro-batch that fits the device, in samples; `DEVICE_TOKENS` if its memory is not known."""
        step = Step(1, self.request.seq_len, self.precision, has_kernels(self.device, "auto"))
        memory = memory_facts(recipe.decoder, step, OptimizerConfig(recipe.optimizer), self.device, False)
        largest = memory.get("largest_micro_batch", DEVICE_TOKENS)
        if largest is None:
            sample = f"{self.request.seq_len:,} tokens at depth {recipe.decoder.num_hidden_layers}"
            raise RequestError(f"not even one sample of {sample} fits {self.device.name}")
        return largest

    def speed(self, recipe: Recipe) -> Speed:
        """The speed measured at this depth or the nearest one; for another device, a share of its peak."""
        if self.is_this_machine:
            depth = recipe.decoder.num_hidden_layers
            nearest = min(self.measured, key=lambda other: abs(math.log(other / depth)))
            speed = self.measured[nearest]
            return speed._replace(optimizer=speed.optimizer * recipe.parameters / self.recipe(nearest).parameters)
        mfu = self.request.mfu or ASSUMED_MFU
        basis = f"{self.device.name}, {mfu:.0%} MFU{'' if self.request.mfu else ', assumed'}"
        return Speed(mfu * self.peak, 0.0, STARTUP, 0.0, basis)

    def measure(self, depth: int) -> None:
        """Time steps of one micro-batch by `lm bench step`."""
        recipe = self.recipe(depth)
        batch = (self.request.batch or math.inf) / self.devices
        samples = power_of_two(min(DEVICE_TOKENS // self.request.seq_len, self.fitting(recipe), batch), down=True)
        log.info("measuring depth %d: %d steps of %d x %d tokens", depth, FEW, samples, self.request.seq_len)
        with tempfile.TemporaryDirectory() as folder:
            settings = yaml.safe_load(scale.write_yaml(recipe, "", "", self.request, samples))
            settings["trainer"]["default_root_dir"] = folder
            settings["data"]["global_batch_tokens"] = samples * self.request.seq_len
            times = measure_step(settings, self.seconds)
        optimizer, checkpoint = times["optimizer"]["ms_per_step"] / 1e3, times["checkpoint"]["stall_ms"] / 1e3
        flops = samples * self.request.seq_len / (times["ms_per_step"] / 1e3 - optimizer) * recipe.flops_per_token
        basis = f"{self.device.name}, measured"
        self.measured[depth] = Speed(flops, optimizer, times["first_step_s"], checkpoint, basis)
