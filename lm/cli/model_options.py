"""The options of the commands that load a model: generate, evaluate, export and import; their docstrings are the help.

Nothing here imports PyTorch, so a wrong value is answered at once.
"""

from dataclasses import dataclass, field, replace
from random import getrandbits
from typing import Literal

from lm.cli.command_options import take_fields
from lm.data.tokenizer import Begin
from lm.errors import require, require_at_least
from lm.inference.sampling import Sampling
from lm.model.config import DTypeName
from lm.runs.run import ROOT
from lm.system.units import Count

Compile = Literal["auto", "none", "cuda_graphs"]


@dataclass(frozen=True)
class ModelChoice:
    """Which model is loaded, and how.

    Args:
        run: Name under the root or in the registry, or a path; the newest run if not given.
        ckpt_path: `best` (the default), `last`, `auto` (the newest intact one), `step-00000100`, or a model's folder.
        dtype: Data type of the weights; as stored if not given.
        root: Folder of the runs.
    """

    run: str | None = None
    ckpt_path: str | None = None
    dtype: DTypeName | None = None
    root: str = str(ROOT)


@dataclass(frozen=True)
class PromptOptions(ModelChoice):
    """The options of `lm generate` besides those of sampling.

    Args:
        prompt: Texts to continue; an empty one starts a new document.
        num_samples: Number of texts to generate per prompt.
        device: Device to compute on; the GPU if there is one.
        compile: How decoding steps run: `cuda_graphs`: captured as CUDA graphs; `auto`: that on a GPU, else `none`.
        json: Print one JSON object instead of texts.
        chat: Answer prompts as the assistant of a conversation, by the model's chat template; each continues the one
            before. Without prompts, those of standard input, line by line.
    """

    prompt: list[str] = field(default_factory=list)
    num_samples: Count = Count(1)
    device: str | None = None
    compile: Compile = "auto"
    json: bool = False
    chat: bool = False


@dataclass(frozen=True)
class GenerateOptions(Sampling, PromptOptions):
    """Continue prompts. Without prompts, continue standard input or, on a terminal, ask for one prompt after another.

    Args:
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Sample from this many of the most likely tokens; `null`: from all.
    """

    temperature: float = 0.8
    top_k: Count | None = Count(50)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_text = not self.json and self.num_samples == 1
        require(one_text or not self.chat, "--chat answers one text at a time: leave --json and --num_samples out")

    @property
    def sampling(self) -> Sampling:
        """The options of sampling, with a new random seed if none was given."""
        sampling = take_fields(Sampling, self)
        return replace(sampling, seed=getrandbits(32)) if sampling.seed is None else sampling


@dataclass(frozen=True)
class EvaluateOptions(ModelChoice):
    """Evaluate a checkpoint on tasks or texts, and store the result with its run.

    Args:
        tasks: Task files: a YAML in the format of DCLM, a `.jsonl` or `.parquet` of items, `embedded:sotu`,
            or public benchmarks by name, such as hellaswag,arc_easy, downloaded from the Hugging Face hub.
        texts: Files, folders, globs or URLs of text; bits per byte are computed for each.
        text_key: Key or column of the text in JSON lines and Parquet of `texts`.
        max_items: Most items per task, or documents per text; all of them if not given.
        num_fewshot: Number of few-shot examples before each question; that of the task files if not given.
        batch_tokens: Most tokens per batch; the result does not depend on it.
        begin: Token before a question: `eos`, as before a document in training, or `nothing`.
        device: Device to compute on; the GPU if there is one.
        json: Print one JSON object instead of lines.
    """

    tasks: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_key: str = "text"
    max_items: Count | None = None
    num_fewshot: int | None = None
    batch_tokens: Count = Count(16_384)
    begin: Begin = "eos"
    device: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        require(bool(self.tasks or self.texts), "give something to evaluate on: --tasks embedded:sotu or --texts FILE")
        require_at_least(1, "--", max_items=self.max_items, batch_tokens=self.batch_tokens)


@dataclass(frozen=True)
class ExportOptions(ModelChoice):
    """Export a model to a folder with weights, tokenizer and a model card: in Hugging Face's format, or for llama.cpp.

    Args:
        output: Folder to create; it must be empty or not exist.
        format: huggingface; or gguf: one file that llama.cpp, Ollama and LM Studio run, with a Modelfile for Ollama.
        dtype: Data type of the weights; as stored if not given. q8_0, of gguf alone, has 8.5 bits for each.
        name: Name of the model on its card; the folder's name if not given.
        license: Licence of the model, by its identifier on the Hugging Face Hub, such as apache-2.0.
        language: Languages of the training texts, by ISO 639 code, such as en.
    """

    output: str = ""
    format: Literal["huggingface", "gguf"] = "huggingface"
    dtype: DTypeName | Literal["q8_0"] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    name: str | None = None
    license: str = "unknown"
    language: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(bool(self.output), "give the folder to make with --output")
        require(
            self.dtype != "q8_0" or self.format == "gguf", "--dtype q8_0 is a format of llama.cpp: give --format gguf"
        )


@dataclass(frozen=True)
class ImportOptions:
    """Convert a Llama, Qwen or Ministral in Hugging Face's format, or one of ours, to a checkpoint to train from.

    Args:
        input: Folder of the model, with safetensors and a `tokenizer.json`; or of a run or a checkpoint, to start
            afresh from its weights; or a `.gguf` file, which transformers reads with the packages gguf and accelerate.
        output: Folder to create; it must be empty or not exist.
        eos_token: Token that ends a document, if the model's files do not name it.
    """

    input: str = ""
    output: str = ""
    eos_token: str | None = None

    def __post_init__(self) -> None:
        complete = bool(self.input and self.output)
        require(complete, "give a model's folder with --input and the folder to make with --output")
