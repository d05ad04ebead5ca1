"""How many processes train together, if torchrun or srun started this one, and how long they wait for one another."""

import os

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lm.errors import RequestError
from lm.system.process import srun_tasks, under_torchrun
from lm.system.units import plural

EXIT_WAIT = 5.0  # seconds that one process gives another to end by itself


def torchrun_world() -> tuple[int, int] | None:
    """Processes of a node and nodes, where torchrun started this process; else None."""
    return (int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])) if under_torchrun() else None


def srun_world() -> tuple[int, int] | None:
    """Tasks of a node and nodes, where srun started this process as one of several; else None.

    In a job of one task `lm fit` starts the processes of the node itself.
    """
    tasks, nodes = srun_tasks(), int(os.environ.get("SLURM_NNODES", 1))
    if tasks == 1 or not SLURMEnvironment.detect():
        return None
    if "SLURM_NTASKS_PER_NODE" not in os.environ or tasks % nodes:
        raise RequestError(f"srun started {tasks} tasks on {plural(nodes, 'node')}: give it --ntasks-per-node, the "
                           "devices of a node")  # fmt: skip
    return tasks // nodes, nodes
