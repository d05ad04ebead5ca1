"""A guard of the smallest acceptable throughput, which names the causes of a lower one."""

from collections.abc import Mapping

from lm.kernels.torch_private import compiled_graphs
from lm.system.units import format_count, plural
from lm.training.callbacks.guards import Finding, Guard
from lm.training.config import ThroughputConfig
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

DATA_WAIT = 0.1  # part of the time without data from which on data is named as a cause


class ThroughputFloor(Guard):
    """Names the causes when training is below its floor for some log lines, and again only after it was above it.

    The first log line of a session is not judged: in it kernels are compiled and caches are cold.
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        built = pl_module.built
        self.begin(f"attention {built.attention}, kernels {built.kernels}")

    def begin(self, computed: str = "") -> None:
        """A session begins, with these kernels, in words."""
        self._computed = computed
        self._first = True
        self._below = 0  # log lines in a row
        self._graphs = 0  # that torch.compile had made when the first of them began

    def observe(self, trainer: Trainer, metrics: Mapping[str, float]) -> list[Finding]:
        rate, floor = metrics.get("perf/tokens_per_second"), self.config.floor
        if floor is None or rate is None:
            return []
        graphs, reason = compiled_graphs()
        if self._first or rate >= floor:
            self._first, self._below, self._graphs = False, 0, graphs
            return []
        self._below += 1
        if self._below != self.config.patience:
            return []
        lines = plural(self._below, "log line")
        causes = self._causes(metrics.get("perf/data_wait"), graphs - self._graphs, reason, lines)
        message = f"{format_count(rate)} tokens/s, below {format_count(floor)} for {lines}: {'; '.join(causes)}"
        action = self.config.action if trainer.global_step < trainer.max_steps else "warn"
        return [Finding("throughput", action, message, save=action != "warn")]

    def _causes(self, data_wait: float | None, graphs: int, reason: str, lines: str) -> list[str]:
        """Every known cause: part of the time without data, and graphs that were compiled in these lines."""
        causes = []
        if data_wait is not None and data_wait >= DATA_WAIT:
            causes.append(f"waiting for data {data_wait:.0%} of the time; is the storage of the shards slow?")
        if graphs:
            why = f", the last time because {reason}" if reason else ""
            causes.append(f"torch.compile made {graphs} new graphs in {lines}{why}")
        wait = "not measured" if data_wait is None else f"{data_wait:.1%}"
        causes = causes or [f"no cause found (data wait {wait}, no new graphs)"]
        return [*causes, self._computed]
