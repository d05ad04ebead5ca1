"""What only a CUDA device can say: `pytest -m gpu`. Everything here is skipped without one."""

import gc
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from device_errors import device_works  # noqa: F401
from plain_ops import (
    linear_cross_entropy_plain,
    norm_linear_plain,
    norm_mlp_plain,
    of_weights,
    qk_norm_rope_plain,
    results,
    rms_norm_plain,
)
from trainings import fit, losses, make_workplace, trace

from lm.data.loader import Batch
from lm.kernels.cross_entropy import linear_cross_entropy
from lm.kernels.fp8.linear import product
from lm.kernels.fp8.quantization import QUANTIZE, quantize
from lm.kernels.linear import Weight, linear
from lm.kernels.mlp import norm_mlp
from lm.kernels.norm_linear import norm_linear
from lm.kernels.qk_norm_rope import qk_norm_rope
from lm.kernels.rms_norm import rms_norm
from lm.model.attention import enter_kernels
from lm.model.attention_choice import kernel_names, use_attention, why_it_fails
from lm.model.compile import checkpoint_activations, compile_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, document_ids_from, rotary_table
from lm.model.fused import fuse
from lm.model.low_precision import LowPrecisionLinear, WeightCopies, use_low_precision
from lm.training.checkpoint_io import FolderCheckpointIO
from lm.training.checks import FP8_FROM

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first matrix product of the process
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_tokens_widen_on_the_device_as_on_the_host():
    tokens = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(64, 1024)
    there = Batch(tokens).pin_memory().to("cuda", non_blocking=True)
    assert torch.equal(there.input_ids.cpu(), Batch(tokens).input_ids)
    assert torch.equal(there.labels.cpu(), Batch(tokens).labels)


RECORDER = {"class_path": "recorder.Recorder"}
KILLER = {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGTERM", micro_batch=11)}
ON_GPU = {"trainer.accelerator": "gpu", "trainer.devices": 1}


def stopped_and_resumed(folder, **changes):
    """The losses of a run that was stopped after step 6 and resumed."""
    fit(folder, "stopped", expect=75, **{**changes, "trainer.callbacks": [RECORDER, KILLER]})
    fit(folder, "stopped", "--ckpt_path", "auto", **changes)
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_every_precision_learns_clips_and_resumes_exactly(tmp_path, precision):
    """Stopped and resumed: the losses of a run that was never stopped, to the bit."""
    folder, changes = make_workplace(tmp_path), {**ON_GPU, "trainer.precision": precision}
    _, run = fit(folder, "straight", **changes)
    straight, metrics = losses(folder), run.metrics()
    assert metrics[-1]["val/loss"] < 3.4 and all(entry.get("optim/grad_norm", 0) < 100 for entry in metrics)
    assert stopped_and_resumed(folder, **changes) == straight and len(trace(folder)) == 24


# ---- kernels --------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the norm of the exact values


def tensors(dtype, *shapes):
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def rotary(length, head_dim):
    return rotary_table(length, head_dim, 10000.0, "cuda")


def op(name, dtype, rows, width):
    """Two functions, ours and the plain one, and inputs for both."""
    heads, kv_heads, head_dim = 4, 2, max(2, width // 8 * 2)
    if name == "rms_norm":
        return rms_norm, rms_norm_plain, (*tensors(dtype, (rows, width), (rows, width), (width,)), 1e-5)
    if name == "first rms_norm":
        x, weight = tensors(dtype, (rows, width), (width,))
        return rms_norm, rms_norm_plain, (x, None, weight, 1e-5)
    if name == "norm_linear":
        x, residual, weight, matrix = tensors(dtype, (rows, width), (rows, width), (width,), (24, width))
        return of_weights(norm_linear), of_weights(norm_linear_plain), (x, residual, weight, 1e-5, matrix)
    if name == "norm_mlp":  # with matrices of their own
        x, weight, up, down = tensors(dtype, (rows, 24), (24,), (2 * width, 24), (24, width))
        return of_weights(norm_mlp), of_weights(norm_mlp_plain), (x, None, weight, 1e-5, up, down)
    if name.endswith("qk_norm_rope"):
        (qkv,) = tensors(dtype, (1, rows, (heads + 2 * kv_heads) * head_dim))
        norms = tensors(dtype, (head_dim,), (head_dim,)) if name == "qk_norm_rope" else (None, None)
        tail = (*rotary(rows, head_dim), None, heads, kv_heads, 1e-5)
        return qk_norm_rope, qk_norm_rope_plain, (qkv, *norms, *tail)
    x, weight = tensors(dtype, (rows, 16), (width, 16))
    labels = torch.randint(width, (rows,), device="cuda")
    labels[::3] = -100
    return linear_cross_entropy, linear_cross_entropy_plain, (x, weight, labels)


OPS = ["rms_norm", "first rms_norm", "norm_linear", "norm_mlp", "qk_norm_rope", "bare qk_norm_rope",
       "linear_cross_entropy"]  # fmt: skip


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 8), (7, 97), (33, 1024), (1023, 768), (5, 50257)])
def test_kernels_equal_plain_float64_and_repeat_to_the_bit(name, dtype, rows, width):
    torch.manual_seed(1)
    if "rope" in name:
        width = min(width, 1024)
    ours, plain, inputs = op(name, dtype, rows, width)
    got, again, exact = results(ours, inputs), results(ours, inputs), results(plain, inputs, torch.float64)
    for mine, repeated, true in zip(got, again, exact, strict=True):
        assert torch.equal(mine, repeated)
        error = (mine.double() - true.double()).norm() / true.double().norm().clamp(min=1e-12)
        assert error < TOLERANCE[dtype], (name, error)


SMALL = DecoderConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                      num_key_value_heads=2, intermediate_size=512, max_position_embeddings=256)  # fmt: skip
VARIANTS = {
    "plain": SMALL,
    "qk_norm": replace(SMALL, qk_norm=True),
    "windows": replace(SMALL, window_pattern="SL", sliding_window=64),
    "wide heads": replace(SMALL, head_dim=128),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What one test compiled does not count for the next."""
    torch._dynamo.reset()


@pytest.fixture
def deterministic():
    """Attention's backward pass otherwise adds in the order in which its blocks happen to end."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def built(config, fused=True):
    torch.manual_seed(0)
    model = Decoder(config).cuda()
    if fused:
        fuse(model)
    enter_kernels(model)
    return model


def gradients(model, documents=None, rows=2):
    torch.manual_seed(1)
    ids = torch.randint(1000, (rows, 257), device="cuda")
    model.zero_grad(set_to_none=False)
    with torch.autocast("cuda", torch.bfloat16):
        total, each = model(ids[:, :-1], labels=ids[:, 1:], document_ids=documents)
    total.backward()
    return [each, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("documents", [False, True])
def test_the_whole_decoder_agrees_with_plain_pytorch(config, documents):
    number = (torch.arange(256, device="cuda") // 50).expand(2, -1) if documents else None
    for ours, plain in zip(gradients(built(config), number), gradients(built(config, False), number), strict=True):
        assert (ours - plain).norm() / plain.norm() < 3e-2


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_triton_free_is_eager_to_the_bit(config, deterministic):
    model = built(config)
    eager = [t.clone() for t in gradients(model)]
    compile_decoder(model, "triton_free")
    torch.testing.assert_close(gradients(model), eager, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_inductor_agrees_with_eager_mode(fused):
    model = built(VARIANTS["windows"], fused)
    eager = [t.clone() for t in gradients(model)]
    compile_decoder(model, "inductor")
    for compiled, exact in zip(gradients(model), eager, strict=True):
        assert (compiled - exact).norm() / exact.norm() < 3e-2


def document_batches():
    """Batches of ids `(2, 257)` in which 7 ends a document, from 1 to 8 documents a row, and a limit for each batch."""
    torch.manual_seed(1)
    for number in range(8):
        ids = torch.randint(8, 1000, (2, 257))
        ids[:, 5 : 5 + number] = 7
        yield ids, 16 << number % 3


def test_documents_with_a_limit_are_computed_without_waiting_for_the_device():
    """And as without a limit, which the host then reads from the device; products add the gradients by themselves."""
    found = []
    for limited in (False, True):  # the first loads kernels and libraries, which may wait
        model, losses = built(VARIANTS["windows"]), []
        copies = WeightCopies(model, torch.bfloat16, adds=True)
        for ids, limit in document_batches():
            ids = ids.cuda()
            torch.cuda.set_sync_debug_mode("error" if limited else "default")
            try:
                numbers = document_ids_from(ids[:, :-1], 7)
                with copies, torch.autocast("cuda", torch.bfloat16):
                    total, each = model(ids[:, :-1], labels=ids[:, 1:], document_ids=numbers,
                                        max_documents=limit if limited else None)  # fmt: skip
                    total.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(each)
        found.append([*losses, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() / other.norm() < 1e-2


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("mode", ["selective", "block"])
def test_activation_checkpointing_changes_no_bit_and_takes_less_memory(mode, fused, deterministic):
    found, peaks = [], []
    for chosen in ("none", mode):
        model = built(VARIANTS["windows"], fused)
        checkpoint_activations(model, chosen)
        gradients(model, rows=16)  # allocates the weights' gradients
        gc.collect()  # what the model before kept
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        found.append([gradient.cpu() for gradient in gradients(model, rows=16)])
        peaks.append(torch.cuda.max_memory_allocated() - allocated)
        del model
    assert peaks[1] < peaks[0]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_every_attention_kernel_that_runs_gives_the_same_losses():
    config, device = VARIANTS["windows"], torch.device("cuda")
    run = [name for name in kernel_names(device) if why_it_fails(name, device, torch.bfloat16, config) is None]
    assert "flash" in run
    expected = gradients(built(config))[0]
    for name in run:
        model = built(config)
        use_attention(model, name, device, torch.bfloat16, config)
        got = gradients(model)[0]
        assert (got - expected).norm() / expected.norm() < 1e-2, name


def test_a_checkpoint_is_copied_into_page_locked_memory_that_is_kept(tmp_path):
    writer = FolderCheckpointIO()
    weight = torch.randn(300, 200, device="cuda")
    for _ in range(2):
        with writer.copying() as copy_to_host:
            copies = [copy_to_host(("optimizer", "a"), weight.t())]
        assert copies[0].is_pinned() and torch.equal(copies[0], weight.t().cpu())
        weight += 1
    assert len(writer._host_memory) == 1


# ---- FP8 ------------------------------------------------------------------------------------------------------------

needs_fp8 = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_FROM,
                               reason="no FP8 below compute capability 8.9")  # fmt: skip
scalings = pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])


def fp8_product(a, b, scaling, gradient=False, fast=True):
    return product(quantize(a, scaling, gradient=gradient).matrix, quantize(b, scaling).matrix, a.dtype, fast=fast)


@needs_fp8
@scalings
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (129, 97), (129, 72), (1000, 1024), (512, 11008), (16384, 1024)],
                         ids=lambda shape: "x".join(map(str, shape)))  # fmt: skip
def test_fp8_matrices_and_transposes_are_those_of_plain_pytorch_to_the_bit(scaling, dtype, source, shape):
    torch.manual_seed(1)
    x = torch.randn(shape) * 10 ** (9 * (torch.rand(shape[0], 1) - 0.5) + 9 * (torch.rand(shape[1]) - 0.5))
    for x in (x.to(source), x.to(source).index_fill(0, torch.tensor([0]), torch.nan)):
        for matrix, transpose in ((True, True), (True, False), (False, True)):
            flags = {"rowwise": scaling == "rowwise", "matrix": matrix, "transpose": transpose}
            plain, ours = QUANTIZE(x, dtype, **flags), QUANTIZE(x.cuda(), dtype, **flags)
            for there, here in zip(ours, plain, strict=True):
                assert there.stride() == here.stride()
                assert torch.equal(there.cpu().float().nan_to_num(7e6), here.float().nan_to_num(7e6))


@needs_fp8
@scalings
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sizes", [(1, 64, 32), (48, 96, 80), (1024, 4096, 1024), (4096, 1024, 2816), (256, 512, 65536)],
                         ids=str)  # fmt: skip
def test_fp8_products_are_those_of_the_emulation(scaling, gradient, sizes):
    """As far as the device's sum goes. The longest is a weight's gradient, over the tokens of a micro-batch."""
    rows, columns, inner = sizes
    fast = inner < 65536
    torch.manual_seed(1)
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, inner), (columns, inner)))
    a[0, 3] = 900.0
    got, again = (fp8_product(a, b, scaling, gradient, fast) for _ in range(2))
    emulated = fp8_product(a.cpu(), b.cpu(), scaling, gradient).cuda().float()
    assert got.dtype == torch.bfloat16 and torch.equal(got, again)
    assert (got.float() - emulated).norm() < 6e-3 * emulated.norm()


@needs_fp8
@scalings
def test_fp8_layers_of_a_device_are_those_of_the_emulation(scaling):
    """All three products; the gradient of an fp32 weight is fp32."""
    torch.manual_seed(1)
    x, w, dout = torch.randn(2, 64, 96).bfloat16(), torch.randn(48, 96), torch.randn(2, 64, 48).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        inputs = [t.to(device, copy=True).requires_grad_() for t in (x, w)]
        out = linear(inputs[0], Weight(inputs[1], scaling))
        out.backward(dout.to(device))
        found.append([t.cpu().float() for t in (out, *(t.grad for t in inputs))])
        assert inputs[1].grad.dtype == torch.float32
    for here, there in zip(*found, strict=True):
        assert (there - here).norm() < 6e-3 * here.norm()


@needs_fp8
@scalings
def test_fp8_products_of_fp32_are_fp32(scaling):
    torch.manual_seed(1)
    a, b = torch.randn(48, 80, device="cuda"), torch.randn(96, 80, device="cuda")
    got, emulated = fp8_product(a, b, scaling), fp8_product(a.cpu(), b.cpu(), scaling).cuda()
    assert got.dtype == torch.float32 and (got - emulated).norm() < 6e-3 * emulated.norm()


def in_fp8(model, scaling):
    use_low_precision(model)
    for part in model.layers[:-1].modules():
        if isinstance(part, LowPrecisionLinear):
            part.scaling = scaling
    return model


@needs_fp8
@scalings
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_an_fp8_decoder_is_near_bf16_and_compiled_the_same_to_the_bit(scaling, fused, deterministic):
    bf16 = gradients(built(SMALL, fused))
    model = in_fp8(built(SMALL, fused), scaling)
    eager = [t.clone() for t in gradients(model)]
    for mine, exact in zip(eager, bf16, strict=True):
        assert 0 < (mine - exact).norm() / exact.norm() < 0.3
    compile_decoder(model, "triton_free")
    torch.testing.assert_close(gradients(model), eager, rtol=0, atol=0)


@pytest.mark.slow
@needs_fp8
@scalings
def test_fp8_learns_and_resumes_exactly(tmp_path, scaling):
    """Stopped and resumed, as every other precision; what it trains to is near what bf16 does."""
    folder, changes = make_workplace(tmp_path), {**ON_GPU, "model.decoder.dropout": 0.0}
    _, bf16 = fit(folder, "bf16", **changes, **{"trainer.precision": "bf16-mixed"})
    changes |= {"trainer.precision": f"fp8-{scaling}"}
    ended, run = fit(folder, "straight", **changes)
    assert f"precision: fp8-{scaling} in 4 of the blocks' 8 matrices" in ended.stderr
    straight = losses(folder)
    assert run.metrics()[-1]["val/loss"] == pytest.approx(bf16.metrics()[-1]["val/loss"], rel=0.03)
    assert stopped_and_resumed(folder, **changes) == straight


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool):
    """Every tensor has an allocation of its own: within those of torch's cache nothing is out of bounds.

    `initcheck` is not among the tools: it only sees writes of the kernels that it watches, and so takes the inputs of
    ours, which torch's kernels write, for uninitialised.
    """
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    selected = ("(test_kernels_equal_plain_float64 and (7-97 or 33-1024) and bfloat16)"
                " or (test_fp8_matrices and 129x and bfloat16)")  # fmt: skip
    ended = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "99", "--kernel-regex", "kns=rms_norm", "--kernel-regex",
         "kns=swiglu", "--kernel-regex", "kns=qk_norm_rope", "--kernel-regex", "kns=cross_entropy",
         "--kernel-regex", "kns=fp8", sys.executable, "-m", "pytest", __file__, "-q", "-k", selected],
        capture_output=True, text=True, timeout=400, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:]
