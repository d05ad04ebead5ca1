"""No kernel has a race, reads beyond a tensor, or needs what an earlier block left in shared memory."""

import re
import shutil

import pytest
import torch
from emulation.emulator import Program
from emulation.race_checker import CheckedProgram, Raced

from lm.kernels import cross_entropy, qk_norm_rope, rms_norm, runtime, swiglu
from lm.kernels.fp8 import mlp as fp8_mlp
from lm.kernels.fp8 import norm_linear as fp8_norm_linear
from lm.kernels.fp8 import quantization
from lm.kernels.fp8.quantization import E4M3

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the emulation with")
SOURCE = '#include "prelude.cuh"\nextern "C" __global__ void mistake(float* out) {{ {body} }}\n'


def norm(rows, width):
    x, residual, dy, dstream = (torch.randn(rows, width).bfloat16() for _ in range(4))
    weight = torch.rand(width)
    stream, y, rstd = rms_norm._cuda_forward(x, residual, weight, 1e-5)
    return [stream, y, rstd, *rms_norm._cuda_backward(dy, dstream, stream, weight, rstd, recompute=True)]


def gated(rows, width):
    gate_up, dz = torch.randn(rows, 2 * width).bfloat16(), torch.randn(rows, width).bfloat16()
    return [swiglu._cuda_forward(gate_up), *swiglu._cuda_backward(dz, gate_up)]


def norm_float8(rows, width, adds=True, source=torch.bfloat16):
    x, residual = (torch.randn(rows, width).to(source) for _ in range(2))
    return list(fp8_norm_linear._cuda_forward(x, residual if adds else None, torch.rand(width), 1e-5, rowwise=True))


def gated_float8(rows, width, source=torch.bfloat16, rowwise=True):
    gate_up = torch.randn(rows, 2 * width).to(source)
    return list(quantization._cuda(gate_up, E4M3, "SWIGLU", rowwise=rowwise, matrix=True, transpose=False))


def gradient_float8(rows, width, rowwise):
    dz, gate_up = (torch.randn(rows, n).bfloat16() for n in (width, 2 * width))
    return list(fp8_mlp._cuda_backward(dz, gate_up, rowwise=rowwise))


def normed_float8(rows, width, rowwise):
    x, weight, rstd = torch.randn(rows, width).bfloat16(), torch.rand(width), torch.rand(rows)
    flags = {"rowwise": rowwise, "matrix": not rowwise, "transpose": True}
    return list(quantization._cuda(x, E4M3, "NORMED", weight, rstd, **flags))


def rotated(tokens, normalised, head_dim=64, heads=4, kv_heads=2):
    qkv = torch.randn(1, tokens, (heads + 2 * kv_heads) * head_dim).bfloat16()
    weights = (torch.rand(head_dim), torch.rand(head_dim)) if normalised else (None, None)
    cos, sin = torch.rand(tokens, head_dim // 2), torch.rand(tokens, head_dim // 2)
    positions = torch.arange(tokens, dtype=torch.int32).flip(0)[None]
    parts = qk_norm_rope._cuda_forward(qkv, *weights, cos, sin, positions, heads, kv_heads, 1e-5)
    return [*parts, *qk_norm_rope._cuda_backward(*parts, qkv, *weights, cos, sin, positions, 1e-5)]


def loss(tokens, vocab):
    x, weight = torch.randn(tokens, 8).bfloat16(), torch.randn(vocab, 8).bfloat16()
    labels = torch.randint(vocab, (tokens,))
    labels[1] = -100
    return list(cross_entropy._cuda(x, weight, labels, -100, True))


def float8(rows, width, rowwise):
    x = torch.randn(rows, width).bfloat16()
    return list(quantization._cuda(x, E4M3, rowwise=rowwise, matrix=True, transpose=True))


# Source and case -> what launches its kernels; in widths that tests of results have too, so that each is compiled once.
LAUNCHES = {
    "rms_norm, a warp a row": lambda: norm(9, 97),
    "rms_norm, a block a row": lambda: norm(20, 1032),
    "swiglu": lambda: gated(5, 97),
    "qk_norm_rope": lambda: rotated(37, True),
    "qk_norm_rope, no norm": lambda: rotated(37, False),
    "cross_entropy, a warp a row": lambda: loss(3, 260),
    "cross_entropy, rows held in registers": lambda: loss(3, 4099),
    "cross_entropy, rows read twice": lambda: loss(2, 50257),
    "fp8, tensorwise": lambda: float8(65, 72, False),
    "fp8, rowwise": lambda: float8(65, 72, True),
    "rms_norm in FP8, a warp a row": lambda: norm_float8(9, 72),
    "rms_norm in FP8, a block a row": lambda: norm_float8(3, 1032),
    "rms_norm in FP8, no residual, no vectors, fp32": lambda: norm_float8(3, 997, False, torch.float32),
    "swiglu in FP8, a warp a row": lambda: gated_float8(9, 72),
    "swiglu in FP8, a block a row": lambda: gated_float8(3, 1032),
    "swiglu in FP8, no vectors, fp32": lambda: gated_float8(3, 997, torch.float32),
    "swiglu in FP8, tensorwise": lambda: gated_float8(65, 72, rowwise=False),
    "gradient of swiglu in FP8, rowwise": lambda: gradient_float8(65, 72, True),
    "gradient of swiglu in FP8, tensorwise": lambda: gradient_float8(65, 72, False),
    "a norm again in FP8, rowwise": lambda: normed_float8(65, 72, True),
    "a norm again in FP8, tensorwise": lambda: normed_float8(65, 72, False),
}  # fmt: skip


def launched(name, monkeypatch, make, sources=runtime.SOURCES):
    monkeypatch.setattr(runtime, "program", lambda name, device, **defines: make(sources / f"{name}.cu", defines))
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 1)  # several rows a block
    torch.manual_seed(0)
    return LAUNCHES[name]()


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_has_no_race_and_the_results_of_the_emulation(name, monkeypatch):
    checked = launched(name, monkeypatch, CheckedProgram)
    plain = launched(name, monkeypatch, lambda source, defines: Program(source, defines, False))
    for mine, theirs in zip(checked, plain, strict=True):
        assert torch.equal(*(one.view(-1).view(torch.uint8) for one in (mine, theirs)))


IN_FP8 = ["rms_norm in FP8, a block a row", "swiglu in FP8, a block a row"]


def barriers():
    """Every barrier of every source, and the launches that need it."""
    tiles = [["fp8, rowwise", "gradient of swiglu in FP8, rowwise"], ["gradient of swiglu in FP8, rowwise"],
             ["a norm again in FP8, tensorwise"]]  # fmt: skip
    need = {"qk_norm_rope.cu": [["qk_norm_rope"]] * 2, "fp8.cu": tiles, "prelude.cuh": [
        ["cross_entropy, a warp a row"], ["rms_norm, a block a row"], ["rms_norm, a block a row", *IN_FP8],
        ["rms_norm, a warp a row"]]}  # fmt: skip
    for path in sorted(runtime.SOURCES.iterdir()):
        found = [one.start() for one in re.finditer(r"__sync\w+\(\);", path.read_text())]
        for place, names in zip(found, need.get(path.name, []), strict=True):
            yield from ((path.name, place, name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("file, place, name", barriers())
def test_a_missing_barrier_is_found(file, place, name, monkeypatch, tmp_path):
    sources = changed(tmp_path, file, "__sync", "// __sync", place)
    with pytest.raises(Raced, match="data race"):
        launched(name, monkeypatch, CheckedProgram, sources)


def changed(folder, file, old, new, place=0):
    """A copy of the sources in which this text of a file was replaced, once from a place on."""
    sources = shutil.copytree(runtime.SOURCES, folder / "csrc")
    text = (sources / file).read_text()
    assert old in text[place:]
    (sources / file).write_text(text[:place] + text[place:].replace(old, new, 1))
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("name, file, bound", zip(IN_FP8, ["rms_norm.cu", "fp8.cu"], ["x < PIECES) h", "at >= WIDTH"]))
def test_a_bound_that_is_one_too_far_is_found(name, file, bound, monkeypatch, tmp_path):
    sources = changed(tmp_path, file, bound, bound.replace("<", "<=").replace(">=", ">"))
    with pytest.raises(Raced, match="SEGV"):
        launched(name, monkeypatch, CheckedProgram, sources)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FP8)
def test_what_is_not_written_to_shared_memory_is_found(name, monkeypatch, tmp_path):
    """It is NaN in place of the numbers of a block before, or of zeros, which a maximum would not show."""
    sources = changed(tmp_path, "prelude.cuh", "if (lane == 0) of_warp", "if (lane == 0 && warp != 1) of_warp")
    found = launched(name, monkeypatch, CheckedProgram, sources)
    assert all(value.isinf().all() or value.isnan().all() for value in found if value.shape == (3,))


@pytest.mark.parametrize("body, said", [
    ("out[64 - threadIdx.x] = 1.f;", "SEGV"),
    ("__shared__ float s[64]; if (threadIdx.x < 32) s[threadIdx.x] = 1.f; __syncthreads(); "
     "out[threadIdx.x] = s[threadIdx.x];", None),
    ("if (threadIdx.x < 7) __syncthreads();", "not reached by all threads"),
], ids=["beyond a tensor", "shared memory of nobody", "a barrier of some"])  # fmt: skip
def test_other_mistakes_are_found(tmp_path, body, said):
    (tmp_path / "mistake.cu").write_text(SOURCE.format(body=body))
    run, out = CheckedProgram(tmp_path / "mistake.cu", {}), torch.zeros(64)
    if said is None:
        run("mistake", 1, 64, out)
        assert out.isnan().sum() == 32
    else:
        with pytest.raises(Raced, match=said):
            run("mistake", 1, 64, out)
