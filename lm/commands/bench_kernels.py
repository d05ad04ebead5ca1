"""`lm bench kernels`: how fast each op of a decoder is, beside plain PyTorch and inductor, and beside a plain copy.

`kernel_cases` has the ops and what they must move, `kernel_timing` the stopwatch.
"""

import json as json_format
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lm.commands.kernel_cases import SMALL, Case, Cases, Sizes, Traffic
from lm.commands.kernel_timing import Stopwatch, Turn
from lm.errors import RequestError
from lm.hardware import device_name
from lm.kernels import nvrtc
from lm.quantities import Count
from lm.run_facts import run_facts
from lm.runs import write_atomically

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100")  # whose machine code is looked at where there is no GPU
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
    if rounds < 1:
        raise RequestError(f"--rounds {rounds} must be at least 1")
    torch.manual_seed(0)
    cases = Cases(replace(sizes, tokens=tokens or sizes.tokens), DTYPES[dtype], device)
    found = report(cases, Stopwatch(device), rounds, inductor)
    if output:
        write_atomically(output, json_format.dumps(found, indent=2) + "\n")
    if json:
        print(json_format.dumps(found))
    else:
        show(found)


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
        "usage": usage(cases),
        "cases": {case.name: measure(case, stopwatch, rounds, inductor) for case in cases.all()},
        "formulas": FORMULAS,
    }


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
            sets = [case.inputs() for _ in range(stopwatch.sets(traffic.bytes if traffic else 0))]
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
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


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


def usage(cases: Cases) -> dict[str, Any] | str:
    """Registers and spilled bytes of every kernel, compiled now for the device, or without one for all that count."""
    if not nvrtc.available():
        return "unavailable: NVRTC is not installed"
    archs = ARCHITECTURES
    if cases.device.type == "cuda":
        archs = ("sm_{}{}".format(*torch.cuda.get_device_capability(cases.device)),)
    return {
        arch: {
            kernel: used._asdict()
            for source, constants in cases.programs().items()
            for kernel, used in nvrtc.compile_source(source, arch, **constants)[1].items()
        }
        for arch in archs
    }


# ---- for people ------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{found['device']}, {found['threads']} threads, torch {found['versions']['torch']}, {found['dtype']}; a copy "
        f"moves {found['copy']['gb_per_second']:,.1f} GB/s; ours: {found['ours']}"
    )
    moving = Table("op", "pass", "GB/s", "of the copy", "to eager", "to inductor", title="memory decides")
    multiplying = Table("op", "ms", "TFLOP/s", "to eager", "to inductor", title="matrix products decide")
    for name, case in found["cases"].items():
        for one in ("forward", "backward", "forward_backward"):
            if one not in case:
                continue
            ours = case[one]["ours"]
            ratios = [f"{case[one][who]['seconds'] / ours['seconds']:.2f}x" if who in case[one] else "-"
                      for who in ("eager", "inductor")]  # fmt: skip
            if one == "forward_backward":
                multiplying.add_row(name, f"{ours['seconds'] * 1e3:.3f}", f"{ours['tflops']:.3g}", *ratios)
            else:
                rate, share = ours["gb_per_second"], ours["of_copy_rate"]
                moving.add_row(name, one, f"{rate:,.1f}", f"{share:.1%}", *ratios)
    console.print(moving, multiplying)
    for reason in dict.fromkeys(case["inductor"] for case in found["cases"].values() if "inductor" in case):
        console.print(f"inductor is {reason}")
    if found["launch_us"] is not None:
        console.print(f"starting a kernel takes the host {found['launch_us']:.1f} us")
    if isinstance(found["usage"], str):
        console.print(f"registers are {found['usage']}")
        return
    for arch, kernels in found["usage"].items():
        most = max(kernels, key=lambda name: kernels[name]["registers"])
        spilled = [name for name, used in kernels.items() if used["spilled_bytes"]]
        console.print(
            f"{arch}: {len(kernels)} kernels, at most {kernels[most]['registers']} registers a thread ({most}); "
            f"spills: {', '.join(spilled) or 'none'}"
        )
