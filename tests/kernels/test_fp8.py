"""FP8 quantisation: the kernels in emulation are the plain version to the bit, on shapes and values of every kind."""

import pytest
import torch
from torch.library import opcheck

from lm.kernels import rms_norm, runtime, swiglu
from lm.kernels.fp8 import linear as fp8_linear
from lm.kernels.fp8 import mlp as fp8_mlp
from lm.kernels.fp8 import norm_linear as fp8_norm_linear
from lm.kernels.fp8.quantization import QUANTIZE, _cuda, quantize, quantize_on_cpu
from lm.kernels.linear import Weight, linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
SHAPES = [(BF16, 1, 1), (BF16, 1, 64), (BF16, 63, 97), (BF16, 129, 72), (BF16, 144, 200), (BF16, 3, 4104), (FP32, 5, 7),
          (FP32, 129, 68), (FP32, 288, 40), (FP16, 144, 72)]  # fmt: skip
both = pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])


def check(x, dtype, rowwise, matrix, transpose):
    """The kernels' results are those of the plain version bit for bit, but that a NaN is any NaN; returns them."""
    flags = {"rowwise": rowwise, "matrix": matrix, "transpose": transpose}
    got = _cuda(x, dtype, **flags)
    for mine, plain in zip(got, quantize_on_cpu(x, dtype, **flags), strict=True):
        assert mine.dtype == plain.dtype and mine.shape == plain.shape and mine.stride() == plain.stride()
        mine, plain = (t.view(torch.uint8 if t.itemsize == 1 else torch.int32) for t in (mine, plain))
        if mine.dtype == torch.uint8:
            lost = {E4M3: 0x7F, E5M2: 0x7D}[got[0].dtype if got[0].numel() else got[2].dtype]
            mine, plain = (torch.where((t & 0x7F) >= lost, 0x7F, t) for t in (mine, plain))
        assert torch.equal(mine, plain)
    return got


@both
@pytest.mark.parametrize("source, rows, width", SHAPES, ids=str)
def test_the_kernels_are_the_plain_version_to_the_bit(emulated, source, rows, width, rowwise):
    """Each row and each column is of its own size, so that every scale is another one."""
    spread = 3 if source == FP16 else 9  # orders of magnitude
    x = torch.randn(rows, width) * 10 ** (spread * (torch.rand(rows, 1) - 0.5) + spread * (torch.rand(width) - 0.5))
    x, dtype = x.to(source), E5M2 if rows == 144 else E4M3
    for matrix, transpose in ((True, True), (True, False), (False, True)):
        check(x, dtype, rowwise, matrix, transpose)


@pytest.mark.parametrize("place", [0, 270 * 1024, -1])
def test_the_largest_value_is_found_wherever_it_is(emulated, place, monkeypatch):
    """By more blocks than the next kernel has threads, as on a large GPU."""
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 148)
    x = torch.rand(639, 641)
    x.view(-1)[place] = -3e6
    check(x, E4M3, False, True, False)


@both
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_half_precision_value_is_rounded_as_torch_rounds_it(emulated, rowwise, dtype):
    """All finite values of bf16, in the order of their size, and halfway between two values of the format."""
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[: 0x7F80 // 48 * 48]
    every = torch.stack((every, -every), -1).view(-1, 48)
    values = torch.arange(0x7B, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    halfway = torch.cat(((values[1:] + values[:-1]) / 2, values[-1:], values[:5])).view(8, 16)
    for x in (every, halfway):
        check(x, dtype, rowwise, True, True)


# NaNs as GPUs write them (all bits of the mantissa), as CPUs do, and with the least mantissa
LOST = [0x7F800000, 0xFF800000, 0x7FFF0000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000, 0x7F810000]


@both
@pytest.mark.parametrize("source", [BF16, FP32], ids=str)
@pytest.mark.parametrize("bits", LOST, ids=hex)
def test_what_is_not_finite_makes_a_scale_infinite(emulated, bits, source, rowwise):
    x = torch.randn(40, 32)
    x[3, 7] = torch.tensor(bits).to(torch.uint32).view(torch.float32)
    x = x.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(source) if source == BF16 else x
    ours = check(x, E4M3, rowwise, True, True)
    check(x, E4M3, rowwise, True, False)
    assert torch.equal(ours[1].isinf(), torch.arange(40) == 3 if rowwise else torch.tensor(True))
    assert (ours[0].float() * ours[1][..., None])[3].isnan().all()
    assert (ours[2].float() * (ours[3] if rowwise else ours[1])[..., None])[7].isnan().all()


@both
def test_zeros_and_what_is_too_small_or_too_large(emulated, rowwise):
    x = torch.randn(48, 32)
    x[:, 5] = x[7] = 0
    x[8] = -0.0
    x[9:12] *= torch.tensor([1e-31, 1e-38, 1e-44])[:, None]
    x[12, 3] = torch.finfo(torch.float32).max  # no power of two brings it into the range
    x[13, 3] = -(2.0**127)
    for part in (x, x[:12], x[:9], x[7:9]):
        check(part, E4M3, rowwise, True, True)
        check(part, E4M3, rowwise, True, False)


@both
def test_rows_that_are_not_aligned_or_no_neighbours(emulated, rowwise):
    odd = torch.randn(32 * 48 + 1).bfloat16()[1:].view(32, 48)
    for x in (odd, odd.t(), odd[:, 8:40], odd[:1].expand(32, 48)):
        check(x, E4M3, rowwise, True, True)


@both
@pytest.mark.parametrize("source, rows, width", [
    (BF16, 129, 72), (BF16, 3, 1032), (FP32, 5, 7), (FP16, 144, 200), (BF16, 0, 16)], ids=str)  # fmt: skip
def test_what_norms_and_swiglu_quantise_is_what_would_be_made_of_their_results(emulated, source, rows, width, rowwise):
    """To the bit, in both passes, and so is all else that they return; of rows that are not finite, too."""
    x, residual, gate_up = (torch.randn(rows, n).to(source) for n in (width, width, 2 * width))
    gate_up *= 10 ** (2 * torch.rand(rows, 1) - 1)
    x[1:2], gate_up[1:2], x[2:3, :1], gate_up[2:3, :1] = 0, 0, torch.inf, torch.nan
    weight, dz = torch.randn(width), torch.randn(rows, width).to(source)
    stream, y, rstd = rms_norm._cuda_forward(x, residual, weight, 1e-5)
    matrix = E4M3, {"rowwise": rowwise, "matrix": True, "transpose": False}
    transpose = E4M3, {"rowwise": rowwise, "matrix": False, "transpose": True}
    gradient = E4M3 if rowwise else E5M2, {"rowwise": rowwise, "matrix": True, "transpose": True}
    z = swiglu._cuda_forward(gate_up)

    def check(got, plain, asked):
        dtype, flags = asked
        for mine, other in zip(got, quantize_on_cpu(plain, dtype, **flags), strict=True):
            assert mine.dtype == other.dtype and mine.shape == other.shape and mine.is_contiguous()
            lost = mine.float().isnan() & other.float().isnan()
            assert torch.equal(mine.float().masked_fill(lost, 0), other.float().masked_fill(lost, 0))

    for asked in (matrix, transpose, gradient) if rows else (matrix,) * rowwise:  # no row has no largest value
        dtype, flags = asked
        check(_cuda(stream, dtype, "NORMED", weight, rstd, **flags), y, asked)
        check(_cuda(gate_up, dtype, "SWIGLU", **flags), z, asked)
    for added in (residual, None) if rowwise else ():
        plain = rms_norm._cuda_forward(x, added, weight, 1e-5)
        mine = fp8_norm_linear._cuda_forward(x, added, weight, 1e-5, rowwise=True)
        assert all(torch.equal(mine[place], plain[place]) for place in (0, 2))
        nothing = quantize_on_cpu(x, E4M3, rowwise=True, matrix=False, transpose=False)[2:]
        check((mine[1], mine[3], *nothing), plain[1], matrix)
    if rows:
        dgate_up, z = swiglu._cuda_backward(dz, gate_up)
        *gradients, other, scale = fp8_mlp._cuda_backward(dz, gate_up, rowwise=rowwise)
        check(gradients, dgate_up, gradient)
        _, whole, _, columns = quantize_on_cpu(z, transpose[0], **transpose[1])
        nothing = torch.empty(0, dtype=E4M3)
        check((nothing, *((whole, other, scale) if rowwise else (scale, other, columns))), z, transpose)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("gradient", [False, True])
def test_the_transpose_is_that_of_the_matrix_quantised_by_itself(scaling, gradient):
    x = torch.randn(2, 3, 8, 32).bfloat16()
    ours = quantize(x, scaling, gradient=gradient, transpose=True)
    assert ours.matrix.values.shape == x.shape
    expected = quantize(x.flatten(0, -2).t(), scaling, gradient=gradient).matrix
    for mine, plain in zip(ours.transpose, expected, strict=True):
        assert torch.equal(mine.float(), plain.float()) and mine.is_contiguous()
    assert quantize(x, scaling, matrix=False, transpose=True).matrix is None
    assert quantize(x, scaling).transpose is None


@both
@pytest.mark.parametrize("dtype, matrix, transpose", [(E4M3, True, True), (E5M2, True, False), (E4M3, False, True)])
def test_torch_accepts_the_op(rowwise, dtype, matrix, transpose):
    for x in (torch.randn(6, 16).bfloat16(), torch.randn(16, 6).t()):
        flags = {"rowwise": rowwise, "matrix": matrix, "transpose": transpose}
        rstd, weight = torch.rand(x.shape[0]), torch.rand(x.shape[1])
        for source in ((), ("SWIGLU",), ("NORMED", weight, rstd)):
            opcheck(QUANTIZE, (x, dtype, *source), flags)


@pytest.mark.parametrize("scaling, activations, gradients", [("tensorwise", True, False), ("rowwise", True, True)])
def test_no_weight_s_gradient_is_added_up_with_fewer_digits(monkeypatch, scaling, activations, gradients):
    """Its sum is over all tokens of a micro-batch. What a GPU would be asked for, by tensors without values."""
    asked = []

    def scaled_mm(a, b, *scales, out_dtype, use_fast_accum):
        asked.append(use_fast_accum)
        return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(fp8_linear, "scaled_mm", scaled_mm)
    x, w = (torch.empty(64, 32, device="meta", dtype=BF16, requires_grad=True) for _ in range(2))
    linear(x, Weight(w, scaling)).backward(torch.empty(64, 64, device="meta", dtype=BF16))
    assert asked == [activations, gradients, False]  # forward, input, weight
