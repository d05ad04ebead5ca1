"""Launches and bytes of a training step by our kernels in bf16 or FP8, counted without a GPU.

    python tests/benchmarks/count_launches.py [--config NAME.yaml ...] [--precision NAME] [--output FILE]

The decoder runs on meta tensors, which have shapes and no values, and every op is seen on its way to a device. An op
that only makes a view, or reserves memory, is none; any other is a launch, with these exceptions: an op of ours counts
as the kernels that it starts, attention as flash's (`ATTENTION`), and an op over lists of tensors as torch's
multi-tensor kernels, which take 320 blocks at once. Bytes are inputs read and outputs written, each once, but what FP8
reads twice, to find the largest value first; what a cache saves, or a matrix product reads twice, is not known here.
The counts are of one micro-batch's forward and backward pass, its gradients added to those of micro-batches before it,
and of what follows the last one: norm, clipping, AdamW.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # lm, which may not be installed

from lm.errors import RequestError
from lm.kernels import cross_entropy, linear
from lm.model.compile import checkpoint_activations
from lm.model.config import ActivationCheckpointing, DecoderConfig, matrix_rows
from lm.model.decoder import Decoder
from lm.model.fused import fuse
from lm.model.low_precision import LowPrecisionLinear, WeightCopies
from lm.training.config import OptimizerConfig
from lm.training.optim import build_optimizer
from lm.training.step import total_norm

DTYPE = torch.bfloat16
# Kernels of our ops, but for `linear_cross_entropy`, see `Launches._cross_entropy`. The backward passes of norms with
# weights have a second kernel that adds up the gradients of the weights.
KERNELS = {
    "rms_norm": 1,
    "rms_norm_fp8": 1,
    "rms_norm_backward": 2,
    "swiglu": 1,
    "swiglu_backward": 1,
    "qk_norm_rope": 1,
}
# Flash 2: forward one kernel; backward three: the rows' products with the gradient, the gradients, and those of the
# queries rounded; with grouped heads the gradients of keys and of values are summed over each group, too.
ATTENTION = {"forward": 1, "backward": 3, "groups": 2}
OVERWRITES = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")  # their first argument is not read
KINDS = {
    **dict.fromkeys(("mm", "bmm", "addmm", "_scaled_mm"), "matrix products"),
    **dict.fromkeys(("_to_copy", "copy_", "clone"), "copies and casts"),
    "embedding_dense_backward": "embedding", "add_": "gradients added up", "addcmul_": "gradients added up",
}  # fmt: skip
PRECISIONS = ("bf16-mixed", "fp8-tensorwise", "fp8-rowwise")  # as `trainer.precision`
CHUNK, BLOCKS = 65_536, 320  # elements of a block, and blocks of a launch, in torch's MultiTensorApply.cuh
PRESETS = ["published/pretrain-50m-adamw.yaml", "published/pretrain-350m-adamw.yaml"]
TITLES = {"micro_batch": "a micro-batch", "optimizer_step": "the rest of an optimizer step"}
LISTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # lists of tensors -> tensors of a launch, there


class Count(NamedTuple):
    """What some ops cost."""

    launches: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(*(one + another for one, another in zip(self, other, strict=True)))


class Launches(TorchDispatchMode):
    """Counts by kind of op while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, Count] = {}
        self.ops: Counter[str] = Counter()  # launches by name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        # It has no kernel for meta tensors; it returns nothing and changes its arguments in place.
        result = None if name == "_fused_adamw_" else func(*args, **kwargs)
        if not (is_view(func) or "empty" in name or func.namespace == "profiler" or name == "detach"):
            self._count(func.namespace, name, args, kwargs, result)
        return result

    def _count(self, namespace: str, name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        read, written = args, result
        if name.endswith("_"):  # in place: `_foreach` ops return nothing
            read, written = args[1:] if name in OVERWRITES else args, args[0]
        moved = bytes_of(read) + bytes_of({**kwargs, "out": None}) + bytes_of(written)
        if name == "linear_cross_entropy":
            self._cross_entropy(*args)
        elif name in ("fp8", "swiglu_backward_fp8"):  # read twice, the largest values first, or a row once and held
            rowwise = kwargs["rowwise"]
            held = name == "fp8" and rowwise and not kwargs["transpose"]
            given = args[:2] if name == "swiglu_backward_fp8" else args[0]
            self._add("our kernels", name, 1 if held else 2 + rowwise, moved + (0 if held else bytes_of(given)))
        elif namespace == "lm":
            kernels = 1 + (args[4] is not None) if name == "qk_norm_rope_backward" else KERNELS[name]
            self._add("our kernels", name, kernels, moved)
        elif "flash_attention" in name:
            backward = "backward" in name
            groups = ATTENTION["groups"] if args[backward].shape[1] != args[backward + 1].shape[1] else 0
            kernels = ATTENTION["backward"] + groups if backward else ATTENTION["forward"]
            self._add("attention", name, kernels, moved)
        elif name == "_fused_adamw_":  # weights, gradients and two means are read, all but the gradients written
            weights, gradients, *means = args[:4]
            moved = 2 * bytes_of([weights, *means]) + bytes_of(gradients)
            self._add("optimizer and norms", name, multi_tensor_launches(weights, lists=4), moved)
        elif name.startswith("_foreach"):  # a norm has a second kernel that adds up the blocks' sums
            lists = [arg for arg in args if isinstance(arg, list | tuple) and all(isinstance(t, Tensor) for t in arg)]
            kind = "copies and casts" if name == "_foreach_copy_" else "optimizer and norms"
            self._add(kind, name, multi_tensor_launches(lists[0], len(lists)) + ("norm" in name), moved)
        elif name == "embedding":
            self._add("embedding", name, 1, bytes_of(args[1]) + 2 * bytes_of(result))
        else:
            self._add(KINDS.get(name, "others"), name, 1, moved)

    def _cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, gradient: bool
    ) -> None:
        """In chunks of tokens: logits by a product, their gradient in their place, and two products with it."""
        item, tokens, width, vocab = x.element_size(), *x.shape, weight.shape[0]
        rows = max(1, min(tokens, cross_entropy.CHUNK_BYTES // (cross_entropy._stride(vocab, x.dtype) * item)))
        rows = rows // 128 * 128 if 128 <= rows < tokens else rows
        chunks, logits, sums = -(-tokens // rows), tokens * vocab * item, 4 * vocab * width
        hidden = tokens * width * item
        products = 3 * (logits + hidden) + chunks * (2 * weight.nbytes + 2 * sums)
        self._add("matrix products", "of linear_cross_entropy", 3 * chunks, products)
        self._add("our kernels", "cross_entropy", chunks, 2 * logits + labels.nbytes + 8 * tokens)
        self._add("others", "zeros", 1, sums)

    def _add(self, kind: str, name: str, launches: int, moved: int) -> None:
        self.kinds[kind] = self.kinds.get(kind, Count()) + Count(launches, moved)
        self.ops[name] += launches

    @property
    def total(self) -> Count:
        return sum(self.kinds.values(), Count())


def is_view(func: Any) -> bool:
    """Whether an op returns its argument's memory under another shape and changes nothing."""
    returned = [value.alias_info for value in func._schema.returns]
    return func._schema.name.endswith("_unsafe_view") or any(a is not None and not a.is_write for a in returned)


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in a structure; what is repeated by a stride of zero counts once."""
    if isinstance(value, Tensor):
        sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride or not size]
        return torch.Size(sizes).numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(bytes_of, values))


def multi_tensor_launches(tensors: list[Tensor], lists: int) -> int:
    """How many launches torch needs for ops over lists of tensors, one of which is this."""
    most, launches, held, blocks = LISTS[min(lists, 5)], 0, 0, 0
    for tensor in tensors:
        chunks = -(-tensor.numel() // CHUNK)
        held += chunks > 0
        for chunk in range(chunks):
            blocks, last = blocks + 1, chunk == chunks - 1
            if blocks == BLOCKS or (last and held == most):
                launches, blocks, held = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` by flash; torch takes it apart for meta tensors."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def count(
    preset: dict[str, Any], copies: bool, precision: str = "bf16-mixed", checkpointing: ActivationCheckpointing = "none"
) -> dict[str, Launches]:
    """The launches of a micro-batch and of an optimizer step of a config, with `WeightCopies` or without.

    FP8 leaves the last block in bf16, as `trainer.fp8_keep` does by default.
    """
    config = DecoderConfig(**preset["model"]["decoder"])
    with torch.device("meta"):
        decoder = Decoder(config)
        ids = torch.zeros(preset["data"]["micro_batch_size"], config.max_position_embeddings, dtype=torch.long)
    fuse(decoder)
    checkpoint_activations(decoder, checkpointing)
    if precision != "bf16-mixed":
        for matrix in decoder.layers[:-1].modules():
            if isinstance(matrix, LowPrecisionLinear):
                matrix.scaling = precision.removeprefix("fp8-")
    embed = decoder.embed
    decoder.embed = lambda input_ids: embed(input_ids).to(DTYPE)  # autocast knows no meta tensors
    parameters = list(decoder.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = build_optimizer(decoder, OptimizerConfig(), matrix_rows(config))
    for group in optimizer.param_groups:  # its constructor knows no meta tensors
        group["fused"], group["foreach"] = True, False
    optimizer.defaults["fused"] = True
    for parameter in parameters:  # there from the first step on
        optimizer.state[parameter] = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter]["step"] = torch.empty((), device="meta")
    cast = WeightCopies(decoder, DTYPE, adds=True) if copies else nullcontext()
    micro_batch, step = Launches(), Launches()
    with step:
        cast.__enter__()
    usual, F.scaled_dot_product_attention = F.scaled_dot_product_attention, flash
    linear.adds_in_place = lambda *_: True  # which is tried out with numbers
    try:
        with micro_batch:
            total = decoder(ids, labels=ids).total
            (total / ids.numel() / 4).backward()
    finally:
        F.scaled_dot_product_attention = usual
    with step:
        cast.__exit__(None, None, None)
        gradients = [parameter.grad for parameter in parameters]
        norm = total_norm(gradients)
        optimizer.skip = ~norm.isfinite()
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
    return {"micro_batch": micro_batch, "optimizer_step": step}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Count launches and bytes of a training step.", allow_abbrev=False)
    parser.add_argument("--config", nargs="+", default=PRESETS, help="presets")
    parser.add_argument("--output", type=Path, help="file to write the JSON object to")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed", help="as trainer.precision")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__,
                             "precision": options.precision, "counts": {}}  # fmt: skip
    for name in options.config:
        file = Path(name) if Path(name).exists() else ROOT / "configs" / name
        preset = yaml.safe_load(file.read_text())
        if "vocab_size" not in preset["model"]["decoder"]:
            raise RequestError(f"{name} takes its vocabulary from a tokenizer: it has no model.decoder.vocab_size")
        ways = {"without copies": (False, "none"), "WeightCopies": (True, "none"), "store_all": (True, "store_all")}
        counted = {way: count(preset, copies, options.precision, mode) for way, (copies, mode) in ways.items()}
        show(f"{file.stem}, {preset['data']['micro_batch_size']} x "
             f"{preset['model']['decoder']['max_position_embeddings']} tokens, {options.precision}",
             counted)  # fmt: skip
        found["counts"][file.stem] = {
            way: {
                part: {"total": launches.total._asdict(),
                       "kinds": {kind: found._asdict() for kind, found in launches.kinds.items()},
                       "ops": dict(launches.ops.most_common())}
                for part, launches in parts.items()
            }
            for way, parts in counted.items()
        }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


def show(title: str, counted: dict[str, dict[str, Launches]]) -> None:
    """Print launches and GB by part of the step and kind of op."""
    headers = [header for way in counted for header in (f"{way}\nlaunches", "\nGB")]
    table = Table("", *headers, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in TITLES:
        kinds = dict.fromkeys(kind for parts in counted.values() for kind in parts[part].kinds)
        rows = {kind: [parts[part].kinds.get(kind, Count()) for parts in counted.values()] for kind in kinds}
        rows[TITLES[part]] = [parts[part].total for parts in counted.values()]
        for kind, counts in rows.items():
            cells = [(f"{c.launches:,}", f"{c.bytes / 1e9:,.2f}") for c in counts]
            table.add_row(kind, *itertools.chain(*cells))
        table.add_section()
    Console(highlight=False, soft_wrap=True).print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (RequestError, OSError) as error:
        print(f"count_launches.py: {error}", file=sys.stderr)
        sys.exit(2)
