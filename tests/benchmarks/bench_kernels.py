"""How fast each op of a decoder is, beside plain PyTorch and inductor, and beside a plain copy:
`python tests/benchmarks/bench_kernels.py`.
"""

import itertools
import json as json_format
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]  # lm, which may not be installed; tests

import plain_ops

from lm.errors import RequestError, RunError, require_at_least
from lm.kernels import cross_entropy, qk_norm_rope, rms_norm, runtime, swiglu
from lm.kernels.mlp import norm_mlp
from lm.kernels.norm_linear import norm_linear
from lm.model import attention
from lm.model.decoder import rotary_table
from lm.system.arguments import call as call_with
from lm.system.files import write_atomically
from lm.system.hardware import device_name
from lm.system.process import run_facts
from lm.system.units import Count

# ---- kernel cases ----------------------------------------------------------------------------------------------------
# What is measured: each op with inputs of a training's shapes, the bytes it must move, its operations.

EPS = 1e-5
THETA = 10_000.0


@dataclass(frozen=True)
class Sizes:
    """A micro-batch of a decoder; the defaults are 16 sequences of `pretrain-350m.yaml`."""

    tokens: int = 16_384
    seq_len: int = 1_024
    hidden: int = 1_024
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    intermediate: int = 4_096
    vocab: int = 32_768


SMALL = Sizes(tokens=512, seq_len=128, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=2_048)


class Traffic(NamedTuple):
    """The bytes that a pass must move: each input read once, each output written once."""

    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Case(NamedTuple):
    """One op."""

    name: str  # of the public function, and what is special here
    ours: Callable[..., Any]
    plain: Callable[..., Any]  # the same in plain PyTorch
    inputs: Callable[[], tuple[Any, ...]]  # makes new random ones; gradients are taken of those that require them
    shape: dict[str, int]
    forward: Traffic | None = None  # None where a matrix product decides, not memory
    backward: Traffic | None = None
    operations: int | None = None  # of the matrix products, in forward and backward pass together


class Swiglu(torch.autograd.Function):
    """The activation's two kernels alone, without the layers that `norm_mlp` joins them with."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu.FORWARD(gate_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return swiglu.BACKWARD(dz, *ctx.saved_tensors)[0]


class Cases:
    """Every op of a decoder, for one micro-batch; norms' weights are fp32, as in mixed precision."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.item = torch.empty((), dtype=dtype).element_size()  # bytes

    def all(self) -> list[Case]:
        """One of each op, in the order of a block."""
        quarter = self.sizes.seq_len // 4
        return [self.rms_norm(), self.norm_linear(), self.qk_rope(normed=False), self.qk_rope(normed=True),
                self.attention(), self.attention(window=quarter), self.attention(document=quarter),
                self.swiglu(), self.norm_mlp(), self.cross_entropy()]  # fmt: skip

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers, of which a gradient can be taken."""
        return torch.randn(shape, device=self.device).mul(scale).to(dtype or self.dtype).requires_grad_()

    def norm_weight(self, size: int) -> Tensor:
        return self.random(size, dtype=torch.float32)

    def rms_norm(self) -> Case:
        tokens, hidden = self.sizes.tokens, self.sizes.hidden
        rows, weight, rstd = tokens * hidden * self.item, hidden * 4, tokens * 4
        return Case(
            "rms_norm", rms_norm.rms_norm, plain_ops.rms_norm_plain,
            lambda: (self.random(tokens, hidden), self.random(tokens, hidden), self.norm_weight(hidden), EPS),
            {"tokens": tokens, "hidden": hidden},
            forward=Traffic({"x": rows, "residual": rows, "weight": weight}, {"stream": rows, "y": rows, "rstd": rstd}),
            backward=Traffic(
                {"dstream": rows, "dy": rows, "stream": rows, "weight": weight, "rstd": rstd},
                {"dx": rows, "dweight": weight}),
        )  # fmt: skip

    def product(self, name: str, ours: Any, plain: Any, inputs: Callable[[], tuple[Any, ...]], **sizes: int) -> Case:
        """An op around one matrix product, which is forward one and backward two of as many operations."""
        return Case(name, ours, plain, inputs, sizes, operations=6 * math.prod(sizes.values()))

    def norm_linear(self) -> Case:
        tokens, hidden, out = self.sizes.tokens, self.sizes.hidden, 2 * self.sizes.intermediate
        return self.product(
            "norm_linear", plain_ops.of_weights(norm_linear), plain_ops.of_weights(plain_ops.norm_linear_plain),
            lambda: (self.random(tokens, hidden), self.random(tokens, hidden), self.norm_weight(hidden), EPS,
                     self.random(out, hidden, scale=0.02)),
            tokens=tokens, hidden=hidden, out=out,
        )  # fmt: skip

    def qk_rope(self, normed: bool) -> Case:
        sizes = self.sizes
        batch, heads, width = sizes.tokens // sizes.seq_len, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        rows, tables = sizes.tokens * heads * width * self.item, 2 * sizes.seq_len * width // 2 * 4
        turned = rows * (sizes.heads + sizes.kv_heads) // heads  # queries and keys alone
        weights = {"q_weight": width * 4, "k_weight": width * 4} if normed else {}

        def inputs() -> tuple[Any, ...]:
            qk_weights = [self.norm_weight(width) if normed else None for _ in range(2)]
            table = rotary_table(sizes.seq_len, width, THETA, self.device)
            return (self.random(batch, sizes.seq_len, heads * width), *qk_weights, *table, None,
                    sizes.heads, sizes.kv_heads, EPS)  # fmt: skip

        return Case(
            "qk_norm_rope" if normed else "qk_norm_rope, no norm",
            qk_norm_rope.qk_norm_rope, plain_ops.qk_norm_rope_plain, inputs,
            {"tokens": sizes.tokens, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": width},
            forward=Traffic({"qkv": rows, "tables": tables, **weights}, {"q, k, v": rows}),
            backward=Traffic(
                {"dq, dk, dv": rows, "tables": tables, **weights, **({"q, k of qkv": turned} if normed else {})},
                {"dqkv": rows, **{f"d{name}": size for name, size in weights.items()}}),
        )  # fmt: skip

    def attention(self, window: int | None = None, document: int | None = None) -> Case:
        """With a window, or documents of so many tokens; the reference is a dense mask, or torch's own choice."""
        sizes = self.sizes
        batch, length = sizes.tokens // sizes.seq_len, sizes.seq_len
        span = window or length
        attended = (document + 1) / 2 if document else span - span * (span - 1) / (2 * length)  # tokens, on average
        documents = None
        if document:
            ids = torch.arange(length, device=self.device) // document
            documents = attention.documents_from(ids.expand(batch, -1))

        def inputs() -> tuple[Tensor, ...]:
            heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
            return tuple(self.random(batch, length, n, sizes.head_dim) for n in heads)

        # As in training, the mask is made once and not in every layer.
        x = torch.empty(batch, length, 1, dtype=self.dtype, device=self.device)
        mask = attention.attention_mask(x, window, documents, sizes.head_dim)
        reference = attention.AttentionMask(None, None, None)
        if window or document:
            reference = attention.dense_mask(length, window, documents, self.device)

        def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with attention.chosen_kernels(q.device, [mask]):
                return attention.attend(q, k, v, mask)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(q, k, v, reference)

        return Case(
            f"attention{f', window {window}' * bool(window)}{f', documents of {document}' * bool(document)}",
            chosen, plain, inputs,
            {"tokens": sizes.tokens, "seq_len": length, "heads": sizes.heads, "kv_heads": sizes.kv_heads,
             "head_dim": sizes.head_dim},
            operations=round(12 * sizes.heads * sizes.head_dim * attended * sizes.tokens),
        )  # fmt: skip

    def swiglu(self) -> Case:
        tokens, width = self.sizes.tokens, self.sizes.intermediate
        half = tokens * width * self.item
        return Case(
            "swiglu", Swiglu.apply, lambda gate_up: F.silu(gate_up[..., :width]) * gate_up[..., width:],
            lambda: (self.random(tokens, 2 * width),),
            {"tokens": tokens, "intermediate": width},
            forward=Traffic({"gate_up": 2 * half}, {"z": half}),
            backward=Traffic({"dz": half, "gate_up": 2 * half}, {"dgate_up": 2 * half, "z": half}),
        )  # fmt: skip

    def norm_mlp(self) -> Case:
        tokens, hidden, width = self.sizes.tokens, self.sizes.hidden, self.sizes.intermediate
        return Case(
            "norm_mlp", plain_ops.of_weights(norm_mlp), plain_ops.of_weights(plain_ops.norm_mlp_plain),
            lambda: (self.random(tokens, hidden), self.random(tokens, hidden), self.norm_weight(hidden), EPS,
                     self.random(2 * width, hidden, scale=0.02), self.random(hidden, width, scale=0.02)),
            {"tokens": tokens, "hidden": hidden, "intermediate": width},
            operations=6 * tokens * hidden * 3 * width,
        )  # fmt: skip

    def cross_entropy(self) -> Case:
        tokens, hidden, vocab = self.sizes.tokens, self.sizes.hidden, self.sizes.vocab
        return self.product(
            "linear_cross_entropy", cross_entropy.linear_cross_entropy, plain_ops.linear_cross_entropy_plain,
            lambda: (self.random(tokens, hidden), self.random(vocab, hidden, scale=0.02),
                     torch.randint(vocab, (tokens,), device=self.device)),
            tokens=tokens, hidden=hidden, vocab=vocab,
        )  # fmt: skip


# ---- kernel timing ---------------------------------------------------------------------------------------------------
# How long the calls of an op take on a device, so that neither caches nor the host flatter or spoil the figure.

COPY_BYTES = 2**30  # of the copy whose rate is the yardstick; less where a sixteenth of the memory is less
TURN_SECONDS = 0.02  # what a contender's turn should last, so that the clock's grain does not count
MOST_CALLS = 40  # of a turn: few enough that all of them fit the device's queue
CACHE_TURNOVER = 4  # L2 caches that one round over the sets of inputs should move

Calls = Sequence[Callable[[], Any]]


class Turn(NamedTuple):
    """What a contender's turn found."""

    seconds: float  # a call, on the device
    fed: bool  # the host queued the calls faster than the device worked them off


class Stopwatch:
    """Times calls on one device.

    On a GPU a turn is timed by events, behind copies that keep the device busy until all its calls are queued: what
    the host needs for a call is then not in the figure. On a CPU the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = COPY_BYTES if device.type == "cuda" else 2**26
        self.cache_bytes: int | None = None  # of the L2 cache; None on a CPU
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.cache_bytes = found.L2_cache_size
            size = min(size, found.total_memory // 16)
        self._source = torch.randint(2**31, (size // 8,), device=device)  # random int64: zeros may run faster
        self._target = torch.empty_like(self._source)
        self._copy = lambda: self._target.copy_(self._source)
        self._copy_seconds = 0.0
        self._copy_seconds = self.median({"copy": [self._copy]}, 7)["copy"].seconds

    @property
    def copy_bytes(self) -> int:
        """Bytes that the copy reads and writes."""
        return 2 * self._source.nbytes

    @property
    def copy_rate(self) -> float:
        """Bytes a second of a large copy on the device, read and written ones counted."""
        return self.copy_bytes / self._copy_seconds

    def input_sets(self, traffic: Traffic | None) -> int:
        """How many sets of inputs to take in turn, so that none is still in the cache when its turn comes again.

        An op that a matrix product decides (no traffic is counted) has one: the cache is not what limits it.
        """
        if traffic is None:
            return 1
        return 2 if self.cache_bytes is None else max(1, -(-CACHE_TURNOVER * self.cache_bytes // traffic.bytes))

    def median(self, contenders: dict[str, Calls], rounds: int) -> dict[str, Turn]:
        """The median of each contender's turns, which go round by round; its calls are one for each set of inputs."""
        counts = {name: self._warm(calls) for name, calls in contenders.items()}
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, calls in contenders.items():
                turns[name].append(self._turn(calls, counts[name]))
        return {
            name: Turn(statistics.median(turn.seconds for turn in taken), all(turn.fed for turn in taken))
            for name, taken in turns.items()
        }

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most memory that a call needs beside what is there before it; None on a CPU."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def launch_seconds(self, rounds: int) -> float:
        """What the host needs to start one of our kernels, with next to nothing to do for it. On a GPU only."""
        x, z = (torch.randn(1, width, device=self.device) for width in (16, 8))
        run = runtime.program("swiglu", self.device, **swiglu.constants(x.dtype, width=8, vec=1))
        count = 200
        found = []
        for _ in range(rounds + 1):  # the first warms up
            self._wait()
            begun = time.perf_counter()
            for _ in range(count):
                run("swiglu_forward", 1, 256, x, z, 8)
            found.append((time.perf_counter() - begun) / count)
        self._wait()
        return statistics.median(found[1:])

    def _warm(self, calls: Calls) -> int:
        """Call everything, so that nothing is compiled or allocated for the first time later; the calls of a turn."""
        for call in [*calls, *calls]:
            call()
        self._wait()
        begun = time.perf_counter()
        for call in calls:
            call()
        self._wait()
        once = (time.perf_counter() - begun) / len(calls)
        return min(MOST_CALLS, max(1, round(TURN_SECONDS / once)))

    def _turn(self, calls: Calls, count: int) -> Turn:
        begun = time.perf_counter()
        self._run(calls, count)
        head_start = time.perf_counter() - begun
        if self.device.type != "cuda":
            return Turn(head_start / count, True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self._wait()
            if self._copy_seconds:
                for _ in range(1 + int(1.5 * head_start / self._copy_seconds)):
                    self._copy()
            start.record()
            self._run(calls, count)
            end.record()
            fed = not start.query()  # the copies still run, so the device has not begun on the calls
            self._wait()
            if fed:
                break
            head_start *= 2
        return Turn(start.elapsed_time(end) / 1e3 / count, fed)

    def _run(self, calls: Calls, count: int) -> None:
        # Results live for one round, so that the next ones are written elsewhere and not into the cache.
        kept: deque[Any] = deque(maxlen=len(calls))
        for call in itertools.islice(itertools.cycle(calls), count):
            kept.append(call())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---- bench kernels ---------------------------------------------------------------------------------------------------
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMULAS = {
    "gb_per_second": "bytes that the pass must move (each input read once, each output written once) / seconds / 1e9",
    "of_copy_rate": "gb_per_second / gb_per_second of a large copy on the same device, in the same run",
    "tflops": "operations of the matrix products in forward and backward pass, none of them twice / seconds / 1e12",
    "seconds": "median of the rounds, in which the contenders take turns",
}


def kernels(
    tokens: Count | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    inductor: bool = True,
    rounds: int = 7,
    json: bool = False,
    output: Path | None = None,
) -> None:
    """Time each op of a decoder of the 350M preset's shape; on a CPU a small one, and the ops' plain twins.

    Args:
        tokens: Tokens of a micro-batch, a multiple of the sequence's 1024 (128 on a CPU).
        dtype: Of activations and matrices.
        inductor: Compare with torch.compile's inductor, too.
        rounds: How often each contender takes its turn.
        json: Print one JSON object instead of tables.
        output: File to write the JSON object to.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    sizes = Sizes() if device.type == "cuda" else SMALL
    if tokens is not None and (tokens < 1 or tokens % sizes.seq_len):
        raise RequestError(f"--tokens {tokens} must be a multiple of {sizes.seq_len}, the length of a sequence")
    require_at_least(1, "--", rounds=rounds)
    torch.manual_seed(0)
    cases = Cases(replace(sizes, tokens=tokens or sizes.tokens), DTYPES[dtype], device)
    found = report(cases, Stopwatch(device), rounds, inductor)
    if output:
        write_atomically(output, json_format.dumps(found, indent=2) + "\n")
    if json:
        print(json_format.dumps(found))
    else:
        show(found)
    broken = [name for name, case in found["cases"].items() if "unavailable" in case]
    if broken:
        raise RunError(f"{', '.join(broken)} could not be measured")


# ---- measuring -------------------------------------------------------------------------------------------------------
def report(cases: Cases, stopwatch: Stopwatch, rounds: int, inductor: bool) -> dict[str, Any]:
    """The JSON object."""
    device, facts = cases.device, run_facts()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": facts["python"],
        "versions": facts["versions"],
        "dtype": str(cases.dtype).removeprefix("torch."),
        "ours": "CUDA kernels" if device.type == "cuda" else "the ops' reference, as the kernels need CUDA",
        "rounds": rounds,
        "copy": {"gb_per_second": stopwatch.copy_rate / 1e9, "bytes": stopwatch.copy_bytes},
        "launch_us": stopwatch.launch_seconds(rounds) * 1e6 if device.type == "cuda" else None,
        "cases": {case.name: attempt(case, stopwatch, rounds, inductor) for case in cases.all()},
        "formulas": FORMULAS,
    }


def attempt(case: Case, stopwatch: Stopwatch, rounds: int, inductor: bool) -> dict[str, Any]:
    """`measure`, or why that is impossible: an op that breaks does not take the figures of the others with it."""
    try:
        return measure(case, stopwatch, rounds, inductor)
    except Exception as error:
        return {"shape": case.shape, "unavailable": in_one_line(error)}


def measure(case: Case, stopwatch: Stopwatch, rounds: int, inductor: bool) -> dict[str, Any]:
    """One op: forward and backward pass apart where memory decides, together where matrix products do."""
    contenders = {"ours": case.ours, "eager": case.plain}
    found: dict[str, Any] = {"shape": case.shape}
    # Backward passes are repeated here, which inductor's refuse if they may reuse the memory of what was saved.
    with torch._functorch.config.patch(donated_buffer=False):
        if inductor:
            torch._dynamo.reset()
            contenders["inductor"] = torch.compile(case.plain, fullgraph=True, dynamic=False)
            reason = refuses(contenders["inductor"], case)
            if reason:
                found["inductor"] = f"unavailable: {reason}"
                del contenders["inductor"]
        passes = {"forward": case.forward, "backward": case.backward} if case.forward else {"forward_backward": None}
        for name, traffic in passes.items():
            sets = [case.inputs() for _ in range(stopwatch.input_sets(traffic))]
            calls = {who: [prepare(name, function, inputs) for inputs in sets] for who, function in contenders.items()}
            turns = stopwatch.median(calls, rounds)
            found[name] = {"bytes": traffic.bytes} if traffic else {"operations": case.operations}
            found[name] |= {
                who: figures(turn, traffic, case, stopwatch) | {"peak_bytes": stopwatch.peak_bytes(calls[who][0])}
                for who, turn in turns.items()
            }
    return found


def refuses(function: Callable[..., Any], case: Case) -> str | None:
    """Why a compiled function cannot be had here; None if it can."""
    try:
        prepare("forward_backward", function, case.inputs())()
    except Exception as error:  # whatever a compiler may run into
        return in_one_line(error)
    return None


def in_one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def prepare(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """A pass over some inputs, ready to be called again and again."""
    if name == "forward":
        return partial(function, *inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    results = differentiable(function, inputs)
    gradients = [torch.randn_like(result) for result in results]
    if name == "backward":
        return lambda: torch.autograd.grad(results, wanted, gradients, retain_graph=True)
    return lambda: torch.autograd.grad(differentiable(function, inputs), wanted, gradients)


def differentiable(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
    """The results that gradients can be taken of."""
    results = function(*inputs)
    return [result for result in (results if isinstance(results, tuple) else [results]) if result.requires_grad]


def figures(turn: Turn, traffic: Traffic | None, case: Case, stopwatch: Stopwatch) -> dict[str, Any]:
    """What a turn means, as `FORMULAS` says."""
    if traffic is None:
        speed = {"tflops": case.operations / turn.seconds / 1e12}
    else:
        rate = traffic.bytes / turn.seconds
        speed = {"gb_per_second": rate / 1e9, "of_copy_rate": rate / stopwatch.copy_rate}
    return {"seconds": turn.seconds, "host_kept_up": turn.fed, **speed}


# ---- for people ------------------------------------------------------------------------------------------------------
def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False, soft_wrap=True, width=120)
    console.print(
        f"{found['device']}, {found['threads']} threads, torch {found['versions']['torch']}, {found['dtype']}; a copy "
        f"moves {found['copy']['gb_per_second']:,.1f} GB/s; ours: {found['ours']}"
    )
    table = Table("op", "pass", "ms", "GB/s or TFLOP/s", "of the copy", "to eager", "to inductor")
    for name, case in found["cases"].items():
        for one in [one for one in ("forward", "backward", "forward_backward") if one in case]:
            ours = case[one]["ours"]
            rate, share = (f"{ours['tflops']:.3g} TFLOP/s", "-") if "tflops" in ours else (
                f"{ours['gb_per_second']:,.1f} GB/s", f"{ours['of_copy_rate']:.1%}")  # fmt: skip
            ratios = [f"{case[one][who]['seconds'] / ours['seconds']:.2f}x" if who in case[one] else "-"
                      for who in ("eager", "inductor")]  # fmt: skip
            table.add_row(name, one, f"{ours['seconds'] * 1e3:.3f}", rate, share, *ratios)
    console.print(table)
    for name, case in found["cases"].items():
        if "unavailable" in case:
            console.print(f"{name} is unavailable: {case['unavailable']}")
    for reason in dict.fromkeys(case["inductor"] for case in found["cases"].values() if "inductor" in case):
        console.print(f"inductor is {reason}")
    if found["launch_us"] is not None:
        console.print(f"starting a kernel takes the host {found['launch_us']:.1f} us")


if __name__ == "__main__":
    try:
        call_with(kernels, sys.argv[1:], prog="bench_kernels.py")
    except (RequestError, RunError) as error:
        print(f"bench_kernels.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
