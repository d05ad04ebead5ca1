"""How many processes train together on which devices: as torchrun or srun started them, or as the config says."""

import os

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lm.errors import RequestError
from lm.system.process import srun_tasks, under_torchrun
from lm.system.units import plural
from lm.training.config import TrainerConfig

Devices = int | str | list[int]  # as `trainer.devices`

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
        raise RequestError(
            f"srun started {tasks} tasks on {plural(nodes, 'node')}: give it --ntasks-per-node, the devices of a node"
        )
    return tasks // nodes, nodes


def device_count(devices: Devices) -> int | None:
    """How many devices of a node are named; None: all of them."""
    if isinstance(devices, str) and "," in devices:
        return sum(index.strip().isdigit() for index in devices.split(","))
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def devices_of_node(config: TrainerConfig, devices: Devices) -> int:
    on_gpu = config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return device_count(devices) or (torch.cuda.device_count() if on_gpu else 1)
