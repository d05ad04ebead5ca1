"""The emulation is trustworthy: its number formats are torch's, and it finds the mistakes it is there to find."""

import pytest
import torch
from emulation.emulator import Program

from lm.kernels import runtime

SOURCE = '#include "prelude.cuh"\nextern "C" __global__ void {name}({parameters}) {{ {body} }}\n'


def program(folder, name, parameters, body, reversed=False, **defines):
    path = folder / f"{name}.cu"
    path.write_text(SOURCE.format(name=name, parameters=parameters, body=body))
    return Program(path, defines, reversed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_number_formats_are_those_of_torch(tmp_path, dtype):
    """Every value widens, and floats of every size and their halfway points narrow, as in torch."""
    body = "const int i = blockIdx.x * blockDim.x + threadIdx.x; out[i] = widen(x[i]); narrow(f[i], y[i]);"
    run = program(tmp_path, "convert", "const T* x, float* out, const float* f, T* y", body, T=runtime.TYPES[dtype])
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    torch.manual_seed(0)
    floats = torch.randint(-(2**31), 2**31, (65536,)).to(torch.int32).view(torch.float32)
    floats[:30000] = torch.randn(30000) * 10.0 ** torch.randint(-9, 6, (30000,))
    ordered = every.float()
    floats[30000:60000] = (ordered[1:30001] + ordered[:30000]) / 2
    out, narrowed = torch.empty(65536), torch.empty(65536, dtype=dtype)
    run("convert", 64, 1024, every, out, floats, narrowed)
    assert torch.equal(out.nan_to_num(7), every.float().nan_to_num(7)) and torch.equal(out.isnan(), every.isnan())
    expected = floats.to(dtype)
    assert torch.equal(narrowed.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(narrowed.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype, name", [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")])
def test_fp8_is_that_of_torch_within_its_range_and_its_largest_value_beyond(tmp_path, dtype, name):
    """Every value, floats of every size, and halfway between two values; also the two numbers' order in memory."""
    body = """const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
              const unsigned two = narrow_two<F>(f[i], f[i + 1]); y[i] = two & 255; y[i + 1] = two >> 8;"""
    run = program(tmp_path, "convert", "const float* f, unsigned char* y", body, F=name)
    end = torch.finfo(dtype).max
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    halfway = (values[1:] + values[:-1]) / 2
    exact = torch.cat((values, halfway, halfway.nextafter(values[1:]), halfway.nextafter(values[:-1])))
    floats = torch.randn(65536) * 10.0 ** torch.randint(-9, 6, (65536,))
    floats[: len(exact)] = exact
    floats[-6:] = torch.tensor([torch.inf, -torch.inf, 1e30, -0.0, 1e-40, torch.nan])
    narrowed = torch.empty(65536, dtype=torch.uint8)
    run("convert", 32, 1024, floats, narrowed)
    narrowed, expected = narrowed.view(dtype).float(), floats.clamp(-end, end).to(dtype).float()
    assert narrowed[-1].isnan() and torch.equal(narrowed[:-1].view(torch.int32), expected[:-1].view(torch.int32))


def test_a_missing_barrier_shows_in_one_of_the_two_orders(tmp_path):
    """Every thread writes, then reads what its neighbour in the other warp wrote."""
    body = "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; {barrier} out[threadIdx.x] = s[63 - threadIdx.x];"
    expected = torch.arange(63, -1, -1, dtype=torch.float32)
    right = {}
    for barrier in ("", "__syncthreads();"):
        for reversed in (False, True):
            name = f"exchange{len(barrier)}{int(reversed)}"
            run = program(tmp_path, name, "float* out", body.format(barrier=barrier), reversed)
            out = torch.empty(64)
            run(name, 1, 64, out)
            right[barrier, reversed] = torch.equal(out, expected)
    assert right["__syncthreads();", False] and right["__syncthreads();", True]
    assert not (right["", False] and right["", True])


MISTAKES = {
    "barrier": ("if (threadIdx.x < 7) __syncthreads();", "barrier was not reached by all"),
    "early": ("if (threadIdx.x > 40) return; __syncthreads();", "barrier was not reached by all"),
    "shuffled": ("if (threadIdx.x < 7) return; if (threadIdx.x < 9) __syncwarp(); else __syncthreads();",
                 "shuffle was not reached by all"),
    "misaligned": ("out[0] = load<4>(out + 1).v[0];", "vector that is not aligned"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_errors_and_the_next_launch_is_fine(tmp_path, name):
    body, words = MISTAKES[name]
    out = torch.zeros(64)
    with pytest.raises(RuntimeError, match=words):
        program(tmp_path, name, "float* out", body)(name, 1, 64, out)
    good = program(tmp_path, "good", "float* out", "out[threadIdx.x] = warp_sum(1.f);")
    good("good", 1, 64, out)
    assert torch.all(out == 32)


def test_a_wrong_number_of_arguments_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="wrong number of arguments"):
        program(tmp_path, "one", "float* out", "out[0] = 1.f;")("one", 1, 32, torch.zeros(1), 3)
