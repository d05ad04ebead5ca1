"""What holds for every kernel: RMSNorm and SwiGLU in emulation, registration, compilation for real architectures.

`test_qk_norm_rope` and `test_cross_entropy` have the larger ops, `test_gpu` runs all of them on a device.
"""

import multiprocessing
import os
import shutil
from collections import Counter

import pytest
import torch
from kernel_usage import compiled, instructions
from plain_ops import norm_linear_plain, norm_mlp_plain, of_weights, results, rms_norm_plain, traced
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from lm.errors import RequestError, RunError
from lm.kernels import cross_entropy, qk_norm_rope, rms_norm, runtime, swiglu
from lm.kernels.fp8 import mlp as fp8_mlp
from lm.kernels.fp8 import norm_linear as fp8_norm_linear
from lm.kernels.fp8 import quantization
from lm.kernels.linear import Weight, linear
from lm.kernels.mlp import norm_mlp
from lm.kernels.norm_linear import norm_linear
from lm.model.build import choose_kernels

DTYPES = [torch.float32, torch.bfloat16]  # to a kernel fp16 is bf16 with another conversion, so it takes one shape
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value
EPS = 1e-5


def close(got, exact, dtype, scale=1.0, terms=0.0):
    """Within rounding of the largest of the exact values, or of the terms that they are sums of; no NaN passes."""
    assert got.shape == exact.shape
    worst = (got.double() - exact).abs().max().item()
    assert worst <= TOLERANCE[dtype] * scale * max(exact.abs().max().item(), terms, 1e-30), worst


def exact_norm(x, residual, weight, dstream, dy, dtype):
    """stream, y, dx, dweight in float64, of a stream that is rounded as it is stored."""
    stream = (x if residual is None else x + residual).detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    y = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * weight
    torch.autograd.backward([y, stream], [dy.double(), dstream.double()])
    return stream.detach(), y.detach(), stream.grad, weight.grad


# ---- parity ---------------------------------------------------------------------------------------------------------
def in_dtypes(*shapes):
    """Every shape in fp32 and bf16, the last one in fp16, too."""
    cases = [(dtype, *shape) for dtype in DTYPES for shape in shapes]
    return pytest.mark.parametrize("dtype, rows, width", [*cases, (torch.float16, *shapes[-1])], ids=str)


@in_dtypes((1, 1), (7, 97), (27, 1032), (4, 4104), (33, 96))
@pytest.mark.parametrize("adds", [True, False])
def test_rms_norm_equals_float64(emulated, dtype, rows, width, adds):
    x, residual, dy, dstream = (torch.randn(rows, width).to(dtype) for _ in range(4))
    weight = 1 + 0.2 * torch.randn(width)  # fp32, as under mixed precision
    residual = residual if adds else None
    stream, y, dx, dweight = exact_norm(x, residual, weight, dstream, dy, dtype)
    got, normed, rstd = rms_norm._cuda_forward(x, residual, weight, EPS)
    if adds:
        assert torch.equal(got, x + residual)
    else:
        assert got.numel() == 0
        got = x
    close(normed, y, dtype)
    ours, again, ours_weight = rms_norm._cuda_backward(dy, dstream, got, weight, rstd, recompute=True)
    assert torch.equal(again, normed)
    close(ours, dx, dtype, terms=1)
    close(ours_weight, dweight, torch.float32, scale=4)
    without, nothing, _ = rms_norm._cuda_backward(dy, None, got, weight, rstd, recompute=False)
    close(without, dx - dstream.double(), dtype, scale=2, terms=1)
    assert nothing.numel() == 0


@pytest.mark.parametrize("value", [0.0, 1e-18, 3e4])
def test_rms_norm_of_extreme_rows_is_finite(emulated, value):
    x = torch.full((3, 40), value)
    _, y, rstd = rms_norm._cuda_forward(x, None, torch.ones(40), EPS)
    dx, _, dweight = rms_norm._cuda_backward(torch.ones_like(x), None, x, torch.ones(40), rstd, recompute=True)
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    close(y, expected, torch.float32)
    assert torch.isfinite(dx).all() and torch.isfinite(dweight).all()


def test_rms_norm_weights_of_the_activations_precision(emulated):
    x, dy = torch.randn(9, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    weight = torch.randn(64).bfloat16()
    _, y, rstd = rms_norm._cuda_forward(x, None, weight, EPS)
    _, _, dweight = rms_norm._cuda_backward(dy, None, x, weight, rstd, recompute=False)
    _, exact, _, exact_weight = exact_norm(x, None, weight, torch.zeros_like(dy), dy, torch.bfloat16)
    assert dweight.dtype == torch.bfloat16
    close(y, exact, torch.bfloat16)
    close(dweight, exact_weight, torch.bfloat16)


@in_dtypes((1, 1), (5, 97), (37, 512))
def test_swiglu_equals_float64(emulated, dtype, rows, width):
    gate_up, dz = torch.randn(rows, 2 * width).to(dtype) * 3, torch.randn(rows, width).to(dtype)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    z = torch.nn.functional.silu(gate) * up
    z.backward(dz.double())
    ours = swiglu._cuda_forward(gate_up)
    close(ours, z.detach(), dtype)
    dgate_up, again = swiglu._cuda_backward(dz, gate_up)
    close(dgate_up, exact.grad, dtype)
    assert torch.equal(again, ours)


@pytest.mark.parametrize("value", [-1e4, -90.0, 0.0, 90.0, 1e4])
def test_swiglu_of_extreme_gates_is_finite(emulated, value):
    gate_up = torch.tensor([[value, 2.0]])
    exact = torch.nn.functional.silu(torch.tensor([[value]], dtype=torch.float64)) * 2
    close(swiglu._cuda_forward(gate_up), exact, torch.float32)
    assert torch.isfinite(swiglu._cuda_backward(torch.ones(1, 1), gate_up)[0]).all()


def test_rows_that_do_not_start_at_16_bytes(emulated):
    """A view into the middle of other memory is loaded one by one, and is right."""
    x = torch.randn(4 * 64 + 1).bfloat16()[1:].view(4, 64)
    aligned = x.clone()
    normed, expected = (rms_norm._cuda_forward(rows, None, torch.ones(64), EPS)[1] for rows in (x, aligned))
    assert torch.equal(normed, expected)
    assert torch.equal(swiglu._cuda_forward(x), swiglu._cuda_forward(aligned))


@pytest.mark.parametrize("which", ["dy", "dstream", "stream"])
def test_rms_norm_takes_rows_that_are_no_neighbours(emulated, which):
    """Such as a batch with tokens first; its results lie as they should, too."""
    given = {name: torch.randn(3, 5, 16) for name in ("dy", "dstream", "stream")}
    weight, rstd = torch.randn(16), torch.rand(3, 5)
    given[which] = torch.randn(5, 3, 16).transpose(0, 1)
    ours = rms_norm._cuda_backward(*given.values(), weight, rstd, recompute=True)
    plain = rms_norm._cpu_backward(*given.values(), weight, rstd, recompute=True)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert all(mine.is_contiguous() for mine in ours)
    x, residual = given[which], torch.randn(5, 3, 16).transpose(0, 1)
    ours, plain = (forward(x, residual, weight, EPS) for forward in (rms_norm._cuda_forward, rms_norm._cpu_forward))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


# ---- the same through torch -----------------------------------------------------------------------------------------
def norm_arguments(dtype=torch.float32):
    return torch.randn(2, 5, 16, dtype=dtype), torch.randn(2, 5, 16, dtype=dtype), torch.randn(16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_every_op(dtype):
    x, residual, weight = norm_arguments(dtype)
    rstd = torch.rand(2, 5)
    opcheck(rms_norm.FORWARD, (x, None, weight, EPS))
    opcheck(rms_norm.FORWARD, (x.transpose(0, 1), None, weight, EPS))
    opcheck(rms_norm.FORWARD, (x, residual, weight, EPS))
    for added in (None, residual.transpose(0, 1)):
        for rowwise in (True, False):
            opcheck(fp8_norm_linear.FORWARD, (x.transpose(0, 1), added, weight, EPS), {"rowwise": rowwise})
    for recompute in (True, False):
        opcheck(rms_norm.BACKWARD, (x, residual, residual, weight, rstd), {"recompute": recompute})
        opcheck(rms_norm.BACKWARD, (x, None, residual, weight, rstd), {"recompute": recompute})
    opcheck(swiglu.FORWARD, (x,))
    opcheck(swiglu.BACKWARD, (x[..., :8], x))
    for rowwise in (True, False):
        opcheck(fp8_mlp.BACKWARD, (x[..., :8], x), {"rowwise": rowwise})


PAIRS = {
    "rms_norm": (lambda x, r, w, m: rms_norm.rms_norm(x, r, w, EPS),
                 lambda x, r, w, m: rms_norm_plain(x, r, w, EPS)),
    "first rms_norm": (lambda x, r, w, m: rms_norm.rms_norm(x, None, w, EPS)[1],
                       lambda x, r, w, m: rms_norm_plain(x, None, w, EPS)[1]),
    "norm_linear": (lambda x, r, w, m: of_weights(norm_linear)(x, r, w, EPS, m),
                    lambda x, r, w, m: of_weights(norm_linear_plain)(x, r, w, EPS, m)),
    "first norm_linear": (lambda x, r, w, m: of_weights(norm_linear)(x, None, w, EPS, m),
                          lambda x, r, w, m: of_weights(norm_linear_plain)(x, None, w, EPS, m)),
    "norm_mlp": (lambda x, r, w, m: of_weights(norm_mlp)(x, r, w, EPS, m, m[:, :3]),
                 lambda x, r, w, m: of_weights(norm_mlp_plain)(x, r, w, EPS, m, m[:, :3])),
    "first norm_mlp": (lambda x, r, w, m: of_weights(norm_mlp)(x, None, w, EPS, m, m[:, :3]),
                       lambda x, r, w, m: of_weights(norm_mlp_plain)(x, None, w, EPS, m, m[:, :3])),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_plain_pytorch(name, compiled):
    """Through autograd as written here, in eager mode and traced without a break."""
    ours, plain = PAIRS[name]
    given = [t.requires_grad_() for t in (*norm_arguments(), torch.randn(6, 16))]
    found = results(traced(ours) if compiled else ours, given)
    torch.testing.assert_close(found, results(plain, given), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["rms_norm", "norm_linear", "norm_mlp", "fp8 norm_linear", "fp8 norm_mlp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_stream_alone_may_be_used(name, compiled):
    """Its gradient is that of both summands; the norm and what follows it have none."""
    scaling = "rowwise" if "fp8" in name else None
    up, down = Weight(torch.randn(32, 16), scaling), Weight(torch.randn(16, 16), scaling)
    op = {"rms_norm": rms_norm.rms_norm, "norm_linear": lambda *inputs: norm_linear(*inputs, up),
          "norm_mlp": lambda *inputs: norm_mlp(*inputs, up, down)}[name.removeprefix("fp8 ")]  # fmt: skip
    x, residual, norm = (torch.randn(*shape, requires_grad=True) for shape in ((6, 16), (6, 16), (16,)))

    def stream_of(x, residual, norm):
        return op(x, residual, norm, EPS)[0]

    (traced(stream_of) if compiled else stream_of)(x, residual, norm).square().sum().backward()
    assert torch.equal(x.grad, 2 * (x + residual)) and torch.equal(residual.grad, x.grad)
    assert norm.grad is None or not norm.grad.any()


@pytest.mark.parametrize("name", ["norm_linear", "norm_mlp", "linear"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_fp32_weights_are_not_rounded_to_half_precision(name, compiled):
    """Mixed precision: the product of half-precision factors is the gradient, as it is summed in fp32."""
    wide = {"norm_linear": lambda x, w, copy: norm_linear(x, None, torch.ones(16), EPS, Weight(w, None, copy))[1],
            "norm_mlp": lambda x, w, copy: norm_mlp(
                x, None, torch.ones(16), EPS, Weight(w, None, copy), Weight(w[:, :12], None, None if copy is None else copy[:, :12])
            )[1],
            "linear": lambda x, w, copy: linear(x, Weight(w, copy=copy))}[name]  # fmt: skip
    function = traced(wide) if compiled else wide
    x, w = torch.randn(40, 16).bfloat16(), torch.randn(24, 16, requires_grad=True)
    gradients = []
    for copy in (None, w.detach().bfloat16()):
        w.grad = None
        function(x, w, copy).sum().backward()
        gradients.append(w.grad)
    assert gradients[0].dtype == torch.float32 and torch.equal(*gradients)
    assert not torch.equal(gradients[0], gradients[0].bfloat16().float())


def test_a_frozen_weight_has_no_gradient_and_costs_no_product():
    """The norm before it, and what comes before that, still learn."""
    x, norm, weight = torch.randn(6, 16, requires_grad=True), torch.ones(16, requires_grad=True), torch.randn(24, 16)

    def products(weight):
        with Products() as counted:
            stream, out = norm_linear(x, None, norm, EPS, Weight(weight))
            (out.sum() + stream.sum()).backward()
        return counted.number

    frozen = products(weight)
    assert x.grad is not None and norm.grad is not None and weight.grad is None
    assert products(weight.requires_grad_()) == frozen + 1


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("residual, weight, words", [
    (torch.zeros(2, 16), torch.zeros(16), r"\(2, 16\) in torch.bfloat16, and residual \(2, 16\) in torch.float32"),
    (torch.zeros(1, 16).bfloat16(), torch.zeros(16), r"residual \(1, 16\)"),
    (None, torch.zeros(15), r"weight is \(15,\)"),
])  # fmt: skip
def test_shapes_and_precisions_that_do_not_fit_are_refused(residual, weight, words):
    x = torch.zeros(2, 16).bfloat16()
    for function in (rms_norm.rms_norm, lambda *inputs: norm_linear(*inputs, Weight(torch.zeros(8, 16)))):
        with pytest.raises(TypeError, match=words):
            function(x, residual, weight, EPS)


def test_where_a_kernel_does_not_load_plain_pytorch_is_taken_and_the_reason_said(monkeypatch):
    """As with a driver that is older than the NVRTC that torch brings."""

    def refuse(*arguments, **constants):
        raise RunError("CUDA driver: cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runtime, "available", lambda: True)
    monkeypatch.setattr(runtime, "program", refuse)
    fused, words = choose_kernels("auto", torch.device("cuda"))
    assert not fused and "UNSUPPORTED_PTX_VERSION" in words
    with pytest.raises(RequestError, match="UNSUPPORTED_PTX_VERSION"):
        choose_kernels("on", torch.device("cuda"))


# ---- compiled for real architectures --------------------------------------------------------------------------------
needs_nvrtc = pytest.mark.skipif(not runtime.available(), reason="NVRTC is not installed")


def most_registers(name, constants):
    if name == "fp8":
        return {"MATRIX": 64, "NORMED": 85, "SWIGLU": 96, "SWIGLU_GRADIENT": 128}[constants["SOURCE"]]
    return {"rms_norm": 128 if constants.get("FP8") else 96, "swiglu": 96}.get(name, 255)


def compiled_without_spills(name, arch, constants):
    """The machine code of a source, whose kernels leave enough registers for the threads that a multiprocessor takes."""
    cubin, usage = compiled(name, arch, constants)
    most = most_registers(name, constants)
    assert all(use.spilled_bytes == 0 and use.registers <= most for use in usage.values()), (constants, usage)
    return cubin


def sources(dtype, arch):
    """Each source and its constants for the sizes that take the fewest and the most registers."""
    vec, fp8 = 16 // dtype.itemsize, arch != "sm_80"  # which has no FP8
    for width in (1024, 4096, 997):
        vectors = 1 if width % 8 else vec
        yield "swiglu", swiglu.constants(dtype, width, vectors)
        for float8 in (False, True) if fp8 else (False,):
            yield "rms_norm", rms_norm.constants(dtype, torch.float32, width, vectors, float8=float8)
    for vocab in (32768, 50257, 64):
        yield "cross_entropy", cross_entropy.constants(dtype, vocab, True)
    for dim, norm in [(64, True), (128, True)] + [(2, True), (250, True), (256, True), (80, False)] * (arch == "sm_90"):
        vectors, weight = vec if dim // 2 % vec == 0 else 1, torch.float32 if norm else None
        yield "qk_norm_rope", qk_norm_rope.constants(dtype, weight, 16, 4, dim, vectors)
    for rowwise in (False, True) if fp8 else ():
        for rows, width in [(16384, 16384), (61, 997)]:
            vectors = 1 if width % 8 else vec
            yield "fp8", quantization.constants(dtype, torch.float8_e5m2, rows, width, vectors, rowwise=rowwise)
        for source in ("NORMED", "SWIGLU", "SWIGLU_GRADIENT") if dtype == torch.float32 else ():  # in bf16: ACCESSES
            chosen = dtype, torch.float8_e4m3fn, 16384, 4096, vec, source
            yield "fp8", quantization.constants(*chosen, rowwise=rowwise)


@needs_nvrtc
@pytest.mark.parametrize("dtype, arch", [
    (torch.float32, "sm_80"), (torch.float32, "sm_90"), *((torch.bfloat16, f"sm_{n}") for n in (80, 89, 90, 100)),
], ids=str)  # fmt: skip
def test_every_architecture_compiles_without_spills(dtype, arch):
    for name, constants in sources(dtype, arch):
        compiled_without_spills(name, arch, constants)


# Of each kernel its 16-byte stores (a compiler may repeat some), whether it stores numbers one by one too, and how many
# 16-byte loads come before anything is stored or exchanged, so that they are in flight together.
BF16 = torch.bfloat16
ACCESSES = [
    ("qk_norm_rope", qk_norm_rope.constants(BF16, torch.float32, 16, 4, 64, 8),
     {"qk_norm_rope_forward": (6, False, 2), "qk_norm_rope_backward": (2, True, 10)}),
    ("rms_norm", rms_norm.constants(BF16, torch.float32, 2048, 8),
     {"rms_norm_forward": (4, True, 4), "rms_norm_backward": (2, True, 4)}),
    ("swiglu", swiglu.constants(BF16, 4096, 8), {"swiglu_forward": (1, False, 2), "swiglu_backward": (3, False, 3)}),
    ("cross_entropy", cross_entropy.constants(BF16, 32768, True), {"cross_entropy": (5, True, 0)}),
    ("rms_norm", rms_norm.constants(BF16, torch.float32, 2048, 8, float8=True), {"rms_norm_forward": (2, True, 4)}),
    *[("fp8", quantization.constants(BF16, torch.float8_e4m3fn, 16384, 4096, 8, source, rowwise=rowwise),
       {"fp8_quantize": (2, True, loads),
        "fp8_largest_of_rows_and_columns" if rowwise else "fp8_largest": (0, not rowwise, ahead)})
      for source, rowwise, loads, ahead in [
          ("MATRIX", True, 4, 4), ("NORMED", True, 6, 6), ("NORMED", False, 6, 9), ("SWIGLU", False, 8, 4),
          ("SWIGLU_GRADIENT", True, 12, 12), ("SWIGLU_GRADIENT", False, 12, 3)]],
    ("fp8", quantization.constants(BF16, torch.float8_e4m3fn, 16384, 4096, 8, "SWIGLU", rowwise=True),
     {"fp8_rows": (0, True, 4)}),
]  # fmt: skip
# All where it was measured, and each on one more architecture; without FP8 on the first.
CHECKED = [("sm_80", ACCESSES[:4]), ("sm_89", ACCESSES[4::2]), ("sm_90", ACCESSES), ("sm_100", ACCESSES[1::2])]


@needs_nvrtc
@pytest.mark.parametrize("arch, name, constants, expected", [
    pytest.param(arch, *access, id="-".join([arch, *access[2], access[1].get("SOURCE", "")]))
    for arch, accesses in CHECKED for access in accesses])  # fmt: skip
def test_vectors_are_moved_by_one_instruction_and_loaded_together(arch, name, constants, expected):
    code = instructions(compiled_without_spills(name, arch, constants))
    for kernel, (stores, scalars, loads) in expected.items():
        kinds = Counter(each for each in code[kernel] if each.startswith("STG"))
        ends = [place for place, each in enumerate(code[kernel]) if each.startswith(("STG", "SHFL", "BAR", "RED"))]
        first = [each for each in code[kernel][: ends[0]] if each.startswith("LDG.E.128")]
        assert kinds["STG.E.128"] >= stores and len(first) >= loads, (kernel, kinds, first)
        narrow = ["STG.E.64"] * (name == "fp8" or bool(constants.get("FP8")))  # eight numbers in FP8
        assert kinds.keys() <= {"STG.E.128", *narrow, *["STG.E"] * scalars}, (kernel, kinds)
        assert not [each for each in code[kernel] if each.startswith(("LDL", "STL"))], kernel


@needs_nvrtc
def test_a_mistake_in_a_kernel_is_an_error_that_says_where():
    with pytest.raises(RunError, match=r"swiglu.cu does not compile for sm_90 .*swiglu.cu\(\d+\)"):
        runtime.compile_source("swiglu", "sm_90", T="nonsense", WIDTH=8, VEC=8)


def compile_one(folder):
    os.environ["LM_KERNEL_CACHE"] = folder
    return runtime.cubin("swiglu", "sm_90", T="bf16", WIDTH=512, VEC=8)


@needs_nvrtc
def test_many_processes_share_one_cache(tmp_path, monkeypatch):
    """Ranks that start together leave one whole file; later starts read it, and a damaged one is made again."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        codes = pool.map(compile_one, [str(tmp_path)] * 4)
    (file,) = tmp_path.iterdir()
    assert len(set(codes)) == 1 and file.read_bytes().endswith(codes[0])
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode  # those whom the umask lets read may read it
    (tmp_path / "other").unlink()
    monkeypatch.setattr(runtime, "compile_source", None)  # nothing is compiled any more
    assert compile_one(str(tmp_path)) == codes[0]
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:-100])
    assert compile_one(str(tmp_path)) == codes[0]
    assert file.read_bytes().endswith(codes[0])


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    assert compile_one(str(tmp_path / "file" / "folder"))[:4] == b"\x7fELF"


@needs_nvrtc
def test_the_cache_key_knows_sources_constants_and_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "compile_source", lambda *names, **constants: (b"code", ""))
    monkeypatch.setattr(runtime, "SOURCES", shutil.copytree(runtime.SOURCES, tmp_path / "csrc"))

    def files(arch="sm_90", width=512):
        runtime.cubin("swiglu", arch, T="bf16", WIDTH=width, VEC=8)
        return len(list(tmp_path.glob("*.cubin")))

    assert [files(), files(), files("sm_80"), files(width=1024)] == [1, 1, 2, 3]
    for count, name in enumerate(("swiglu.cu", runtime.PRELUDE), start=4):
        with open(tmp_path / "csrc" / name, "a") as file:
            file.write("// \n")
        assert files() == count, name
