"""lm: pretrain a small language model from one YAML file.

`prepare`, `fit`, `evaluate` and `generate` do in Python what the commands do; `load_run` and `load_model` load the
results; `Trainer`, `LanguageModule`, `DataModule` and their options are the building blocks. Modules are imported when
they are first used.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from lm.cli.functions import evaluate, fit, generate, prepare
    from lm.cli.trainer import Trainer
    from lm.data.datamodule import DataModule
    from lm.inference.pretrained import Pretrained
    from lm.inference.sampling import Sampling
    from lm.model.config import DecoderConfig
    from lm.runs.run import Run
    from lm.training.callback import Callback
    from lm.training.config import OptimizerConfig, ScheduleConfig
    from lm.training.module import LanguageModule

# name -> the module that has it, which is imported when it is asked for
ELSEWHERE = {
    "fit": "lm.cli.functions", "prepare": "lm.cli.functions", "evaluate": "lm.cli.functions",
    "generate": "lm.cli.functions", "Trainer": "lm.cli.trainer", "DataModule": "lm.data.datamodule",
    "Sampling": "lm.inference.sampling", "DecoderConfig": "lm.model.config", "Callback": "lm.training.callback",
    "LanguageModule": "lm.training.module", "OptimizerConfig": "lm.training.config",
    "ScheduleConfig": "lm.training.config",
}  # fmt: skip

__all__ = ["Callback", "DataModule", "DecoderConfig", "LanguageModule", "OptimizerConfig", "Sampling", "ScheduleConfig",
           "Trainer", "evaluate", "fit", "generate", "load_model", "load_run", "prepare", "run"]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ELSEWHERE:
        raise AttributeError(f"module 'lm' has no {name!r}")
    return getattr(import_module(ELSEWHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *ELSEWHERE]


def load_run(path: "str | Path") -> "Run":
    """Load a run, to read what it recorded: metrics, config, checkpoints, alerts.

    Args:
        path: the run's folder; or its name, under `checkpoints/` or in the registry.
    """
    from lm.runs.find import find_run

    return find_run(str(path))


def load_model(
    path: "str | Path", device: "str | torch.device | None" = None, dtype: "str | torch.dtype | None" = None,
    module: "type[LanguageModule] | None" = None,
) -> "Pretrained":  # fmt: skip
    """Load a trained model with its tokenizer, to generate text with it or to inspect it.

    Args:
        path: the folder or name of a run, whose best checkpoint is used; the folder of a checkpoint, or of a Llama,
            Qwen3 or Ministral in Hugging Face's format.
        device: the device to load to; if not given, the GPU if there is one, else the CPU.
        dtype: data type of the weights, such as `bfloat16`; as stored if not given.
        module: for a custom model, the class that was passed to `run`.
    """
    from lm.inference.pretrained import load_pretrained

    return load_pretrained(path, device, dtype, module=module)


def run(module: "type[LanguageModule]") -> "NoReturn":
    """Run the command line for a custom model; call it at the end of the file that defines the model.

        if __name__ == "__main__":
            lm.run(MyModule)      # python my_model.py fit --config tiny.yaml

    Args:
        module: its `build_decoder` returns the model, and its additional arguments become options under `model:`.
    """
    from lm.system import process
    from lm.training.module import LanguageModule

    if not (isinstance(module, type) and issubclass(module, LanguageModule)):
        raise TypeError(f"lm.run takes a subclass of lm.training.module.LanguageModule, and this is {module!r}")
    process.module_class, process.script = module, Path(sys.argv[0])

    from lm.__main__ import main

    main()
