"""Number formats: what FP8 rounds and what it leaves alone, which matrices it takes, and what is refused.

On a CPU the products of the same eight bits are summed in fp32; `test_gpu` compares that with what a device gives.
"""

import itertools
import logging
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import equipment, fit

from lm.kernels import swiglu
from lm.kernels.fp8.linear import product as product_of_quantised
from lm.kernels.fp8.quantization import QUANTIZE, Scaled, quantize
from lm.kernels.linear import Weight, linear
from lm.kernels.mlp import norm_mlp
from lm.kernels.norm_linear import norm_linear
from lm.model.build import NOT_BUILT
from lm.model.compile import compile_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import fuse
from lm.model.low_precision import LowPrecisionLinear, WeightCopies
from lm.training.config import DistributedConfig
from lm.training.distributed import ReplicatedStrategy
from lm.training.fp8 import Float8Precision
from lm.training.lightning_step import weight_copies
from lm.training.precision import choose_precision

pytestmark = pytest.mark.usefixtures("one_thread")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # the largest relative error of rounding to 3 and to 2 bits of mantissa
LEAST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # the smallest value above zero
SCALINGS = ["tensorwise", "rowwise"]
SMALL = DecoderConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=32,
)  # fmt: skip


# ---- the numbers ----------------------------------------------------------------------------------------------------
def scaled(x, dtype, scaling):
    return Scaled(*QUANTIZE(x, dtype, rowwise=scaling == "rowwise", matrix=True, transpose=False)[:2])


def product(a, b, scaling, *, gradient=False):
    left, right = quantize(a, scaling, gradient=gradient), quantize(b, scaling)
    return product_of_quantised(left.matrix, right.matrix, a.dtype)


def uncertainty(x, scale, dtype):
    """The most by which each value may differ once it is in FP8, in float64."""
    return torch.maximum(x.double().abs() * HALF_STEP[dtype], scale.double() * LEAST[dtype] / 2)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_rounded_to_the_format_and_use_its_range(scaling, dtype, source):
    """Over 60 orders of magnitude, with outliers; scales are powers of two, and the least that fit."""
    x = (torch.randn(64, 48) * torch.logspace(-30, 30, 64)[:, None]).to(source)
    x = x if scaling == "rowwise" else x[20:22] * torch.tensor([[1.0], [1e4]], dtype=source)
    values, scale = scaled(x, dtype, scaling)
    assert scale.shape == (x.shape[:1] if scaling == "rowwise" else ()) and scale.dtype == torch.float32
    assert (torch.frexp(scale).mantissa == 0.5).all()
    error = (values.double() * scale[..., None].double() - x.double()).abs()
    assert (error <= uncertainty(x, scale[..., None], dtype)).all()
    largest = values.float().abs().amax(-1 if scaling == "rowwise" else None)
    end = torch.finfo(dtype).max
    assert (largest <= end).all() and (largest > end / 2 * (1 - HALF_STEP[dtype])).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_product_is_float64s_within_what_the_formats_round(scaling, gradient, rows):
    a, b = torch.randn(rows, 80).bfloat16(), torch.randn(48, 80).bfloat16()
    got, exact = product(a, b, scaling, gradient=gradient), a.double() @ b.double().t()
    left = E5M2 if gradient and scaling == "tensorwise" else E4M3
    da = uncertainty(a, scaled(a, left, scaling).scale[..., None], left)
    db = uncertainty(b, scaled(b, E4M3, scaling).scale[..., None], E4M3)
    bound = da @ b.double().abs().t() + a.double().abs() @ db.t() + da @ db.t()
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound + got.double().abs() * 2**-8).all()
    typical = 2.0 if left == E5M2 else 1.0  # on average it is far less than that, and no less than the formats imply
    assert 0.02 * typical < (got.double() - exact).norm() / exact.norm() < 0.04 * typical


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_emulation_is_torchs_own_scaled_product(scaling):
    """To the bit, where this CPU's torch has one: the factors are integers, whose sums are exact in any order."""
    a, b = (torch.randint(-127, 128, (rows, 80)).bfloat16() for rows in (32, 48))
    a, b = a * 8, b / 256
    left, right = scaled(a, E4M3, scaling), scaled(b, E4M3, scaling)
    scales = left.scale.view(-1, 1), right.scale.view(1, -1)
    try:
        exact = torch._scaled_mm(left.values, right.values.t(), *scales, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(str(error))
    assert torch.equal(product(a, b, scaling), exact)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(scaling, value):
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    a[2, 7] = value
    lost = product(a, b, scaling).isnan()
    assert lost[2].all() and lost.all() == (scaling == "tensorwise") and lost[0].any() == (scaling == "tensorwise")


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_device_is_asked_for_what_it_can_give_and_the_product_is_like_its_factor(scaling, source):
    """Most devices give bf16 alone where rows have scales."""
    a, b = (torch.empty(32, 64, dtype=source, device="meta") for _ in range(2))
    traced = make_fx(lambda a, b: product(a, b, scaling))(a, b)
    (asked,) = [node for node in traced.graph.nodes if node.target == torch.ops.aten._scaled_mm.default]
    assert torch.bfloat16 in asked.args if scaling == "rowwise" else source in asked.args
    assert traced(a, b).dtype == source


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_a_device_runs_is_traced_in_one_graph(scaling):
    """Torch's scaled product is in it, three times, and nothing that waits for the device."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    called = []

    def note(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(linear, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    x = torch.empty(32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = compiled(x, Weight(torch.empty(96, 64, device="meta", requires_grad=True), scaling))
    out.backward(torch.empty_like(out))
    assert [name for name in called if "mm" in name] == ["aten._scaled_mm.default"] * 3
    assert not [name for name in called if "local_scalar" in name or name.endswith(".item")]


class Quantised(TorchDispatchMode):
    """Notes of each matrix that is quantised: its shape, and whether it and its transpose were asked for."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is QUANTIZE and len(args) == 2:  # a matrix that is in memory
            self.seen.append((tuple(args[0].shape), kwargs["matrix"], kwargs["transpose"]))
        return function(*args, **(kwargs or {}))


# A product, with what is joined with it: `(x, weight, scaling, copy of the weight, weight of the norm) -> out`.
JOINED = {
    "linear": lambda x, w, scaling, copy, norm: linear(x, Weight(w, scaling, copy)),
    "norm_linear": lambda x, w, scaling, copy, norm: norm_linear(x, None, norm, 1e-5, Weight(w, scaling, copy))[1],
    "norm_mlp": lambda x, w, scaling, copy, norm: norm_mlp(
        x, None, norm, 1e-5, Weight(w, scaling, copy), Weight(w.reshape(-1, w.shape[0] // 2), scaling))[1],
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("joined", JOINED)
def test_each_matrix_is_quantised_once_for_all_of_its_products(scaling, joined):
    """But for the activation of a linear layer alone, of which the backward pass takes the transpose. Norm and SwiGLU
    quantise what they return, and SwiGLU its gradient, as they compute them."""
    x, w = torch.randn(48, 32), torch.randn(80, 32)

    def quantised(w, copy=None, backward=True):
        with Quantised() as found, torch.set_grad_enabled(backward):
            out = JOINED[joined](x.requires_grad_(), w, scaling, copy, torch.ones(32))
            if backward:
                out.sum().backward()
        return sorted(found.seen)

    mlp, alone = joined == "norm_mlp", joined == "linear"
    weight, down, gradient = (80, 32), [(64, 40)] * mlp, (48, 64 if mlp else 80)
    activation, transposed = [((48, 32), True, False)] * alone, [((48, 32), False, True)] * alone
    both, in_backward = [(each, True, True) for each in down], [(gradient, True, True), *transposed]
    assert quantised(w.requires_grad_()) == sorted([(weight, True, True), *both, *activation, *in_backward])
    copy = quantize(w.detach(), scaling, transpose=True)
    assert quantised(w, copy) == sorted([*both, *activation, *in_backward])
    assert quantised(w, backward=False) == sorted([*((each, True, False) for each in (weight, *down)), *activation])
    frozen = quantised(w.detach())
    assert frozen == sorted([*activation, (weight, True, True), *both, (gradient, True, False)])


class Swiglu(torch.autograd.Function):
    """The activation alone."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return swiglu.FORWARD(gate_up)

    @staticmethod
    def backward(ctx, dz):
        return swiglu.BACKWARD(dz, *ctx.saved_tensors)[0]


@pytest.mark.parametrize("scalings", itertools.product((*SCALINGS, None), repeat=2), ids=str)
def test_an_mlp_is_its_parts_to_the_bit(scalings):
    """Also where only one of its matrices is in FP8."""
    torch.manual_seed(1)
    given = [torch.randn(size).bfloat16() for size in ((2, 16, 64), (2, 16, 64), (64,), (96, 64), (64, 48))]

    def parts(x, residual, norm, up, down):
        stream, gate_up = norm_linear(x, residual, norm, 1e-5, Weight(up, scalings[0]))
        return stream, linear(Swiglu.apply(gate_up), Weight(down, scalings[1]))

    def joined(x, residual, norm, up, down):
        return norm_mlp(x, residual, norm, 1e-5, Weight(up, scalings[0]), Weight(down, scalings[1]))

    found = []
    for function in (parts, joined):
        inputs = [each.clone().requires_grad_() for each in given]
        stream, out = function(*inputs)
        (out * 3 + stream).sum().backward()
        found.append([stream, out, *(each.grad for each in inputs)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_gradient_of_a_weight_is_rounded_to_bf16_only_where_rows_have_scales(scaling):
    x, w = torch.randn(48, 32).bfloat16(), torch.randn(80, 32, requires_grad=True)
    linear(x, Weight(w, scaling)).sum().backward()
    assert w.grad.dtype == torch.float32
    assert torch.equal(w.grad, w.grad.bfloat16().float()) == (scaling == "rowwise")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("joined", JOINED)
def test_gradients_are_those_of_bf16_within_rounding(scaling, joined):
    """The matrix's own, and that of what goes into it."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, 16, 64), torch.randn(48, 64), torch.randn(64)]

    def run(scaling, dtype):
        x, weight, norm = (t.to(dtype, copy=True).requires_grad_() for t in inputs)
        out = JOINED[joined](x, weight, scaling, None, norm)
        torch.manual_seed(2)
        out.backward(torch.randn(out.shape).to(dtype))
        return out.detach(), *(t.grad for t in (x, weight, norm) if t.grad is not None)

    most = 0.13 if joined == "norm_mlp" else 0.09  # of two products, or one
    for got, exact in zip(run(scaling, torch.bfloat16), run(None, torch.float32), strict=True):
        assert got.dtype == torch.bfloat16 and 0.01 < (got.float() - exact).norm() / exact.norm() < most


# ---- the decoder ----------------------------------------------------------------------------------------------------
def built(scaling=None, in_bf16=None, fused=False, config=SMALL):
    """A decoder; with a scaling its matrices are marked as under Lightning, or all but those with these names."""
    torch.manual_seed(0)
    decoder = Decoder(config)
    if fused:
        fuse(decoder)
    if scaling is not None:
        Float8Precision(scaling, "cpu").convert_module(SimpleNamespace(decoder=decoder))
    if in_bf16 is not None:
        for name, part in decoder.named_modules():
            if isinstance(part, LowPrecisionLinear):
                part.scaling = None if any(fnmatchcase(name, pattern) for pattern in in_bf16) else scaling
    return decoder


def results(decoder):
    """The losses of a batch and the gradients of all weights, as under `bf16-mixed`."""
    torch.manual_seed(1)
    ids = torch.randint(64, (2, 33))
    decoder.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        total, each = decoder(ids[:, :-1], labels=ids[:, 1:])
    total.backward()
    return [each, *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("scaling, fused", [("tensorwise", False), ("rowwise", True)])
def test_compiled_it_is_eager_to_the_bit_in_one_graph(scaling, fused):
    decoder = built(scaling, fused=fused)
    eager = [t.clone() for t in results(decoder)]
    torch._dynamo.reset()
    compile_decoder(decoder, "triton_free")  # whole graphs or an error
    for mine, before in zip(results(decoder), eager, strict=True):
        assert torch.equal(mine, before)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiled_backward_pass_is_outside_of_autocast_as_in_eager_mode(scaling):
    """In fp32 the products of the backward pass show it on any processor; rounded to bf16 they differ widely."""

    class Block(torch.nn.Linear):
        def forward(self, x):
            return linear(x, Weight(self.weight, scaling))

    block = Block(64, 48, bias=False)
    x, dout = torch.randn(32, 64), torch.randn(32, 48)
    found = []
    for mode in ("none", "triton_free"):
        torch._dynamo.reset()
        compile_decoder(SimpleNamespace(layers=[block], cross_entropy=block.forward), mode)
        x.grad = block.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = block(x.requires_grad_())
        out.backward(dout)
        found.append((out, x.grad, block.weight.grad))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.slow
def test_inductor_is_nearer_to_eager_than_fp8_is_to_bf16():
    """It rounds less often to bf16 on the way, and so some values fall to the other side in FP8."""
    bf16 = results(built(fused=True))
    decoder = built("rowwise", fused=True)
    eager = [t.clone() for t in results(decoder)]
    torch._dynamo.reset()
    compile_decoder(decoder, "inductor")
    for mine, before, exact in zip(results(decoder), eager, bf16, strict=True):
        assert (mine - before).norm() <= (before - exact).norm()


@pytest.mark.parametrize("scaling, mode", [("tensorwise", "none"), ("rowwise", "triton_free")])
def test_weights_that_are_quantised_once_a_step_compute_the_same_to_the_bit(scaling, mode):
    """Their copies stay where they are, and follow the weights from step to step."""
    shallow = DecoderConfig(**{**vars(SMALL), "num_hidden_layers": 1})
    decoder = built(scaling, ["*.down_proj"], True, shallow)
    torch._dynamo.reset()
    compile_decoder(decoder, mode)
    copies = WeightCopies(decoder, torch.bfloat16)
    places = None
    for _ in range(2):
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        without = [t.clone() for t in results(decoder)]
        with copies:
            kept = [part.copy for part in decoder.modules() if hasattr(part, "copy")]
            tensors = torch.utils._pytree.tree_leaves(kept)
            assert len(tensors) == 3 * 4 + 1 and places in (None, [t.data_ptr() for t in tensors])
            places = [t.data_ptr() for t in tensors]
            for mine, before in zip(results(decoder), without, strict=True):
                assert torch.equal(mine, before)
    assert not [part for part in decoder.modules() if getattr(part, "copy", None) is not None]


@pytest.mark.parametrize("strategy, compile, adds", [
    (SingleDeviceStrategy(), "none", True), (SingleDeviceStrategy(), "inductor", False),
    (ReplicatedStrategy(60.0, DistributedConfig()), "none", False),
])  # fmt: skip
def test_gradients_are_added_by_products_where_nothing_waits_for_them(strategy, compile, adds):
    trainer = SimpleNamespace(precision="bf16-mixed", strategy=strategy)
    decoder, options = built("tensorwise", fused=True), SimpleNamespace(compile=compile)
    of_fused = NOT_BUILT._replace(fused=True)
    with weight_copies(SimpleNamespace(trainer=trainer, decoder=decoder, options=options, built=of_fused)):
        # The last block is not in FP8, for which torch's product adds nothing.
        assert [layer.mlp.down_proj.adds for layer in decoder.layers] == [False, False, adds]


# ---- which matrices -------------------------------------------------------------------------------------------------
MATRICES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def in_fp8(decoder):
    return [name for name, part in decoder.named_modules() if getattr(part, "scaling", None)]


def test_the_matrices_of_all_blocks_but_the_last_are_in_fp8():
    untied = built("rowwise", config=DecoderConfig(**{**vars(SMALL), "tie_word_embeddings": False}))
    for decoder in (built("rowwise"), untied):
        assert in_fp8(decoder) == [f"layers.{i}.{part}" for i in (0, 1) for part in MATRICES]
        assert not hasattr(decoder.embed_tokens, "scaling") and decoder.norm.weight.dtype == torch.float32
    assert type(untied.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("part", MATRICES)
def test_each_kind_of_matrix_is_multiplied_in_fp8(part, fused):
    """One alone: the losses change, and its own gradient changes by more than bf16 rounds."""
    in_bf16 = ["layers.[02].*", *(f"layers.1.{other}" for other in MATRICES if other != part)]
    bf16, ours = built(None, fused=fused), built("rowwise", in_bf16, fused)
    assert not torch.equal(results(ours)[0], results(bf16)[0])
    exact, rounded = (decoder.get_parameter(f"layers.1.{part}.weight").grad for decoder in (bf16, ours))
    assert 0.015 < (rounded - exact).norm() / exact.norm() < 0.15


# ---- what is asked for ----------------------------------------------------------------------------------------------
def test_on_a_cpu_a_half_precision_becomes_what_it_does_well_and_fp8_becomes_nothing_else(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for half, expected in {"bf16": "bf16-mixed", None: "32-true"}.items():
        monkeypatch.setattr("lm.training.precision.cpu_half_precision", lambda half=half: half)
        assert choose_precision("16-mixed", "cpu") == expected
        assert caplog.messages.pop() == f"precision 16-mixed -> {expected}: this CPU has no fast 16-mixed arithmetic"
        caplog.clear()
    assert choose_precision("32-true", "cpu") == "32-true"
    assert choose_precision("16-mixed", "gpu") == "16-mixed"
    assert not caplog.messages
    assert choose_precision("fp8-rowwise", "cpu").scaling == "rowwise"


# ---- through Lightning ----------------------------------------------------------------------------------------------
class Emulated(Callback):
    """FP8 on a CPU, which a config cannot ask for."""

    def setup(self, trainer, pl_module, stage):
        trainer.strategy.precision_plugin = Float8Precision("rowwise", "cpu")


EMULATED = [equipment("test_precision.Emulated")]


def test_a_run_trains_and_validates(workplace):
    said, run = fit(workplace, callbacks=EMULATED)
    assert said.stderr.count("precision: fp8-rowwise in the matrices of the blocks, but bf16 in the last block") == 1
    metrics = run.metrics()
    assert metrics[-1]["val/loss"] < 3.4 and metrics[-1]["val/loss"] < metrics[0]["train/loss"]


@pytest.mark.slow
def test_shards_compute_what_whole_models_do(workplace):
    """FSDP2: matrices are whole where they are multiplied, and their scales those of the whole matrix."""
    changes = {"model.decoder.dropout": 0.0, "trainer.devices": 2, "data.micro_batch_size": 2, "trainer.max_steps": 6}
    found = []
    for strategy in ("ddp", "fsdp2"):
        _, run = fit(workplace, strategy, callbacks=EMULATED, **changes, **{"trainer.strategy": strategy})
        found.append([line["train/loss"] for line in run.metrics("train/loss")])
    assert found[1] == pytest.approx(found[0], rel=1e-3) and len(found[0]) == 6
