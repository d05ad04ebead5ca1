"""Checks of the options for several devices; see `training/checks`."""

import os
from collections.abc import Iterator

from lm.system.process import under_torchrun
from lm.training.config import TrainerConfig
from lm.training.findings import LEAVE_OUT, Finding, error
from lm.training.world import srun_world


def check_ranks_options(trainer: TrainerConfig, devices: int) -> Iterator[Finding]:
    """Options without effect, or with a wrong one, on this number of devices over all nodes.

    Under torchrun the number may change with a restart, so options without effect are no errors there.
    """
    nodes, precision, options = trainer.num_nodes, trainer.precision, trainer.distributed
    restarts = under_torchrun()
    if nodes > 1 and not restarts and srun_world() is None and "MASTER_ADDR" not in os.environ:
        yield error(
            f"trainer.num_nodes {nodes}: the nodes do not find one another",
            f"start the command on each with `torchrun --nnodes {nodes}`, or with `srun --nodes {nodes}`, or "
            "give --trainer.num_nodes 1",
        )
    if options.reduce_dtype is not None and devices == 1 and not restarts:
        yield error(
            "trainer.distributed.reduce_dtype is for several devices, and this training is on one device", LEAVE_OUT
        )
    take_mixed = f"{LEAVE_OUT}, or give --trainer.precision bf16-mixed"
    if options.reduce_dtype is not None and precision == "bf16-true":
        yield error(
            "trainer.distributed.reduce_dtype is for gradients in fp32, and trainer.precision bf16-true has "
            "them in bf16",
            take_mixed,
        )
    if options.reduce_dtype == "bf16" and precision == "16-mixed":
        yield error(
            "trainer.distributed.reduce_dtype bf16 does not go with trainer.precision 16-mixed, whose scaled "
            "gradients need fp16's digits",
            take_mixed,
        )
