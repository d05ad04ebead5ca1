"""lm: pretrain a small language model from one YAML file.

In Python two functions begin everything: `load_run` and `load_model`. Nothing heavy is imported before they are called.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lm.inference.pretrained import Pretrained
    from lm.runs.run import Run

__all__ = ["load_model", "load_run"]
__version__ = "0.1.0"


def load_run(path: "str | Path") -> "Run":
    """A run, to look at what it wrote down: metrics, config, checkpoints, alerts.

    Args:
        path: the run's folder; or its name, under `checkpoints/` or in the registry.

    Raises:
        RequestError: there is no such run; the message has the nearest names.
    """
    from lm.runs.registry import find_run

    return find_run(str(path))


def load_model(
    path: "str | Path", device: "str | torch.device | None" = None, dtype: "torch.dtype | None" = None
) -> "Pretrained":
    """A trained model with its tokenizer, to generate with or to look into.

    Args:
        path: the folder or name of a run, whose best checkpoint is taken; the folder of a checkpoint, or of a Llama,
            Qwen3 or Ministral in Hugging Face's format.
        device: where to; the GPU if there is one, else the CPU, if not given.
        dtype: of the weights; as they are stored if not given.

    Raises:
        RequestError: there is no model, it is damaged, or it is of another architecture.
    """
    from lm.inference.pretrained import load_pretrained

    return load_pretrained(path, device, dtype)
