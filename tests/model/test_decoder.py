"""The decoder: what attends to what, losses, gradients, initial weights, compilation; and both its forward passes."""

import copy
import itertools
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from emulation.flash_on_cpu import flash_on_cpu  # noqa: F401
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lm.errors import RequestError
from lm.model import attention
from lm.model.attention import kernel_for
from lm.model.compile import checkpoint_activations, compile_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, RMSNorm, document_ids_from, initialize, rotary_table
from lm.model.fused import fuse
from lm.model.low_precision import WeightCopies

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = DecoderConfig(
    vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
VARIANTS = {
    "plain": SMALL,
    "untied": replace(SMALL, tie_word_embeddings=False, num_key_value_heads=4),
    "qk_norm": replace(SMALL, qk_norm=True, head_dim=16),
    "dropout": replace(SMALL, dropout=0.1),
    "windows": replace(SMALL, window_pattern="SL", sliding_window=7),
}
EOS = 5


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def config(request):
    return request.param


both = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])  # forward passes


def built(config, fused):
    model = Decoder(config)
    if fused:
        fuse(model)
    return model


def batch(rows=3, length=24, vocab=53):
    window = torch.randint(vocab, (rows, length + 1))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


# ---- what comes out -------------------------------------------------------------------------------------------------
def test_every_parameter_receives_a_gradient(config):
    model = Decoder(config)
    ids, labels = batch()
    model(ids, labels=labels).total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_losses_are_fp32_cross_entropy_of_the_logits_and_zero_where_ignored(config):
    model = Decoder(config).eval()
    ids, labels = batch()
    labels[0, 3:7] = -100
    total, losses = model(ids, labels=labels)
    expected = -model(ids).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert losses.shape == labels.shape and losses.dtype == torch.float32
    assert torch.all(losses[0, 3:7] == 0)
    torch.testing.assert_close(losses, expected.where(labels != -100, 0.0))
    torch.testing.assert_close(total, losses.sum())


@pytest.mark.parametrize("documents", [False, True])
def test_the_future_does_not_change_the_past(config, documents):
    model = Decoder(config).eval()
    ids, _ = batch(rows=1)
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 53
    number = torch.zeros_like(ids) if documents else None
    before, after = model(ids, document_ids=number), model(changed, document_ids=number)
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=0, atol=1e-5)
    assert (after[:, 15:] - before[:, 15:]).abs().amax(-1).min() > 1e-3


def test_dropout_acts_only_while_training_on_embeddings_and_residual_branches():
    model, plain = Decoder(replace(SMALL, dropout=0.5)).eval(), Decoder(SMALL)
    plain.load_state_dict(model.state_dict())
    ids, _ = batch()
    expected = model(ids)
    assert torch.equal(plain(ids), expected) and torch.equal(plain.eval()(ids), expected)
    for place in ("dropout", "layers.0.dropout"):
        model.get_submodule(place).train()
        assert not torch.equal(model(ids), expected), place
        model.eval()


# ---- documents ------------------------------------------------------------------------------------------------------
def test_document_ids_step_at_the_end_token_and_positions_restart():
    """It predicts the first token of the next document, and is its first context."""
    ids = torch.tensor([[1, 2, EOS, 3, EOS, EOS, 4, 4], [EOS, 1, 1, 1, 1, 1, 1, EOS]])
    documents = document_ids_from(ids, EOS)
    assert documents.tolist() == [[0, 0, 1, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 1]]
    model, rotations = Decoder(SMALL), []
    model.layers[0].register_forward_pre_hook(lambda _module, inputs: rotations.append(inputs[1]))
    model(ids, document_ids=documents)  # attention sees only distances, so the logits alone would not show it
    assert rotations[0].positions.tolist() == [[0, 1, 0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0]]


def test_masked_documents_give_the_logits_and_losses_of_each_document_alone(config):
    model = Decoder(config).eval()
    ids, labels = batch(rows=2, length=40)
    ids[ids == EOS] = 6
    ids[0, 9] = ids[0, 10] = ids[0, 30] = ids[1, 22] = EOS
    documents = document_ids_from(ids, EOS)
    together, losses = model(ids, document_ids=documents), model(ids, labels=labels, document_ids=documents).per_token
    for row, cuts in ((0, (0, 9, 10, 30, 40)), (1, (0, 22, 40))):
        for start, end in zip(cuts, cuts[1:], strict=False):
            part = slice(start, end)
            alone, targets = ids[row : row + 1, part], labels[row : row + 1, part]
            expected = model(alone)[0], model(alone, labels=targets).per_token[0]
            torch.testing.assert_close((together[row, part], losses[row, part]), expected, atol=1e-5, rtol=1e-5)
    assert (together - model(ids)).abs().max() > 1e-2  # without the mask they do see each other


# ---- numbers --------------------------------------------------------------------------------------------------------
def test_rms_norm_keeps_fp32_statistics_in_bf16():
    x = (torch.randn(64, 512) * 3).bfloat16()
    normed = RMSNorm(512, 1e-5)(x)
    exact = F.rms_norm(x.double(), (512,), eps=1e-5).bfloat16()
    assert normed.dtype == torch.bfloat16
    assert (normed == exact).float().mean() > 0.999  # one rounding, at the end


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_rotary_angles_are_fp32_whatever_the_default_precision(default):
    exact = torch.arange(4096)[:, None].double() / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.set_default_dtype(default)
    try:
        cos, sin = rotary_table(4096, 64, 10000.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, exact.cos().float(), atol=2e-3, rtol=0)
    torch.testing.assert_close(sin, exact.sin().float(), atol=2e-3, rtol=0)


@both
@pytest.mark.parametrize("way", ["true", "mixed"])
@pytest.mark.parametrize("documents", [False, True])
def test_bf16_is_close_to_fp32_and_its_losses_are_fp32(config, fused, way, documents):
    model = built(config, fused).eval()
    ids, labels = batch()
    number = document_ids_from(ids, EOS) if documents else None
    wide = model(ids, labels=labels, document_ids=number).per_token
    if way == "true":
        total, losses = model.bfloat16()(ids, labels=labels, document_ids=number)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            total, losses = model(ids, labels=labels, document_ids=number)
    total.backward()
    assert losses.dtype == torch.float32 and not torch.equal(losses, wide)
    torch.testing.assert_close(losses, wide, atol=0.15, rtol=0.05)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("zero", [False, True])
def test_initial_weights_have_the_documented_spread(zero):
    model = Decoder(DecoderConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        tie_word_embeddings=False, qk_norm=True, zero_init_residual=zero,
    ))  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.all(weight == 1), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = (0.0 if zero else 0.02 / math.sqrt(6)) if residual else 0.02
        assert weight.std().item() == pytest.approx(expected, rel=0.02), name
        assert abs(weight.mean().item()) <= expected / 50, name


# ---- the fused forward pass -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("documents", [False, True])
def test_the_fused_forward_pass_is_the_plain_one(config, documents):
    """Logits, losses and gradients, with norms that are not all one, ignored labels and the same dropout."""
    plain = Decoder(config)
    for parameter in plain.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    fused = copy.deepcopy(plain)
    fuse(fused)
    ids, labels = batch()
    ids[0, 9] = ids[1, 3] = ids[1, 4] = EOS
    labels[0, 3:7] = -100
    number = document_ids_from(ids, EOS) if documents else None
    results = []
    for model in (plain, fused):
        torch.manual_seed(1)
        total, per_token = model(ids, labels=labels, document_ids=number)
        total.backward()
        logits = model.eval()(ids, document_ids=number)
        results.append([total, per_token, logits, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name, compile", [("plain", "none"), ("untied", "none"), ("untied", "triton_free")])
def test_copies_of_the_weights_in_half_precision_follow_the_weights_and_change_no_bit(name, compile):
    """But for the gradients of attention's output matrices, which without copies are rounded to half precision."""
    torch._dynamo.reset()
    model = built(VARIANTS[name], True)
    compile_decoder(model, compile)
    copies = WeightCopies(model, torch.bfloat16)
    ids, labels = batch()
    for _ in range(2):  # optimizer steps
        results = []
        for copied in (nullcontext(), copies):
            model.zero_grad()
            with copied:
                for _ in range(2):  # micro-batches
                    with torch.autocast("cpu", torch.bfloat16):
                        total = model(ids, labels=labels).total
                    total.backward()
            results.append([total, *(p.grad for n, p in model.named_parameters() if "o_proj" not in n)])
            rounded = model.layers[0].self_attn.o_proj.weight.grad.bfloat16().float()
            assert torch.equal(rounded, model.layers[0].self_attn.o_proj.weight.grad) == (copied is not copies)
            table = (model.embed_tokens if name == "plain" else model.lm_head).weight.grad
            assert not torch.equal(table, table.bfloat16().float())  # nothing rounds the output matrix's
            assert model.output_copy is None and model.layers[0].mlp.down_proj.copy is None
        for plain, with_copies in zip(*results, strict=True):
            assert plain.dtype == torch.float32 and torch.equal(plain, with_copies)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_products_add_gradients_to_those_of_earlier_micro_batches(checkpointing):
    """In place, with the numbers of autograd's own sum; a weight that has a hook gets its gradient as usual."""
    model = built(VARIANTS["qk_norm"], True)
    checkpoint_activations(model, checkpointing)
    hooked, seen = model.layers[0].mlp.down_proj.weight, []
    hooked.register_hook(seen.append)
    ids, labels = batch()
    found = []
    for adds in (False, True):
        model.zero_grad()
        with WeightCopies(model, torch.bfloat16, adds):
            for _ in range(3):  # micro-batches
                with torch.autocast("cpu", torch.bfloat16):
                    total = model(ids, labels=labels).total
                with Products() as products:
                    total.backward()
        found.append([p.grad for p in model.parameters()])
        assert products.adding == (4 * 2 - 1) * adds  # one matrix has the hook
        assert products.scaled == adds  # the output matrix's
    assert len(seen) == 6
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert not any(block.mlp.down_proj.adds for block in model.layers)


class Products(TorchDispatchMode):
    """Counts matrix products that add to what is there, and tensors that are scaled and added to what is there."""

    adding = scaled = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.adding += function is torch.ops.aten.addmm_.default
        self.scaled += function is torch.ops.aten.addcmul_.default
        return function(*args, **(kwargs or {}))


# Compiled, each pair of a variant, a mode and a forward pass is there once.
CHECKPOINTED = [
    *itertools.product(("qk_norm", "dropout"), ("selective", "block"), ["none"], (False, True)),
    ("qk_norm", "block", "triton_free", True), ("qk_norm", "selective", "triton_free", False),
    ("dropout", "selective", "triton_free", True), ("dropout", "block", "triton_free", False),
]  # fmt: skip


@pytest.mark.parametrize("name, mode, compile, fused", CHECKPOINTED)
def test_activation_checkpointing_changes_no_bit_and_saves_memory(name, mode, compile, fused):
    if fused and compile != "none" and torch.__version__ < "2.13":
        pytest.skip("compiled code of our kernels is not recomputed")
    results, kept = [], []
    for chosen in ("none", mode):
        torch.manual_seed(0)
        model = built(VARIANTS[name], fused)
        checkpoint_activations(model, chosen)
        torch._dynamo.reset()
        compile_decoder(model, compile)
        ids, labels = batch()
        torch.manual_seed(1)
        storages = {}  # held, so that no address comes twice

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.hidden_states(ids)
        kept.append(sum(storage.nbytes() for storage in storages.values()))
        model.cross_entropy(hidden, model.output_weight, labels)[0].backward()
        results.append([hidden, *(parameter.grad for parameter in model.parameters())])
    assert kept[1] < kept[0]
    torch.testing.assert_close(*results, rtol=0, atol=0)


# ---- how it may be built and run ------------------------------------------------------------------------------------
@both
def test_a_model_built_on_meta_is_whole_after_initialize(config, fused):
    torch.manual_seed(1)
    model = built(config, fused).eval()
    with torch.device("meta"):
        other = built(config, fused)
    assert all(tensor.is_meta for tensor in other.state_dict().values()) and not list(other.buffers())
    other = other.to_empty(device="cpu").eval()
    for parameter in other.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    initialize(other)
    ids, _ = batch()
    assert torch.isfinite(other(ids)).all()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))


@pytest.mark.parametrize("name, fused", [("windows", True), ("qk_norm", False)])
def test_compiled_blocks_share_a_graph_and_are_eager_to_the_bit(name, fused):
    """Names, weights and gradients stay; and a second block of a kind costs no second compilation."""
    torch._dynamo.reset()
    model = built(replace(VARIANTS[name], num_hidden_layers=5), fused)
    ids, labels = batch()
    results, names = [], list(model.state_dict())
    for mode in ("none", "triton_free"):
        compile_decoder(model, mode)
        model.zero_grad()
        counters.clear()
        model(ids, labels=labels).total.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert list(model.state_dict()) == names
    # the blocks with the same window; the loss; the first fused block, which has no stream yet
    assert counters["stats"]["unique_graphs"] == len(set(model.config.windows)) + 1 + fused
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("fused, training", [(False, True), (True, True), (True, False)])
def test_compiled_blocks_take_any_number_of_documents(fused, training, flash_on_cpu, monkeypatch):  # noqa: F811
    """On a GPU documents become sequences, in other numbers in every batch. The blocks are compiled once for the first
    number and once for all others, and what they compute is what masks give."""
    torch._dynamo.reset()
    model = built(replace(SMALL, num_hidden_layers=3, window_pattern="SSL", sliding_window=7), fused).train(training)
    compiled = copy.deepcopy(model)
    compile_decoder(compiled, "triton_free")
    graphs = []
    for documents in (2, 3, 5, 48):
        ids = torch.randint(EOS + 1, 53, (2, 24))
        ends = torch.randperm(2 * 23)[: documents - 2]
        ids[ends // 23, ends % 23] = EOS  # never the last of a row, which has no document after it
        numbers = document_ids_from(ids, EOS)
        results = []
        counters.clear()
        for decoder in (compiled, model):
            with monkeypatch.context() as patch, torch.inference_mode(not training):
                if decoder is model:
                    patch.setattr(attention, "kernel_for", kernel_for)
                decoder.zero_grad()
                total, per_token = decoder(ids, labels=ids, document_ids=numbers)
            if training:
                total.backward()
            results.append([per_token, *(parameter.grad for parameter in decoder.parameters() if training)])
        graphs.append(counters["stats"]["unique_graphs"])
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    assert 0 < graphs[0] <= 4 and graphs[1] < graphs[0] and not any(graphs[2:])


def test_a_sequence_beyond_the_context_is_refused():
    model = Decoder(SMALL)
    with pytest.raises(RequestError, match="65 tokens is longer than max_position_embeddings 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    assert model(torch.zeros(1, 64, dtype=torch.long)).shape == (1, 64, 53)


# ---- the request ----------------------------------------------------------------------------------------------------
def test_what_is_left_open_follows_from_the_rest():
    """Also after `dataclasses.replace` with another width, which keeps what was given."""
    config = DecoderConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (6, 16, None)
    with pytest.raises(RequestError, match="vocab_size is not known"):
        Decoder(config)
    assert replace(DecoderConfig(hidden_size=512), hidden_size=1024) == DecoderConfig(hidden_size=1024)
    assert replace(DecoderConfig(head_dim=32), hidden_size=1024).head_dim == 32


@pytest.mark.parametrize("width, inside", [(512, 1408), (768, 2048), (100, 320), (16, 64), (96, 256)])
def test_the_mlp_is_8_3_of_the_width_unless_it_is_given(width, inside):
    assert DecoderConfig(hidden_size=width, num_attention_heads=2).intermediate_size == inside
    assert DecoderConfig(hidden_size=width, num_attention_heads=2, intermediate_size=96).intermediate_size == 96


@pytest.mark.parametrize("given, words", [
    ({"hidden_size": 100, "num_attention_heads": 8}, "does not divide hidden_size 100.* fits is 96 or 112"),
    ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    ({"hidden_size": 24, "num_attention_heads": 8}, "head_dim 3 is odd"), ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"dropout": 1.0}, r"dropout 1.0 must lie in \[0, 1\)"), ({"dropout": -0.1}, "dropout"),
    ({"window_pattern": "SSX"}, "window_pattern 'SSX' must be made of S"),
    ({"window_pattern": ""}, "window_pattern '' must be made of S"), ({"window_pattern": "SL"}, "give model.decoder.sliding_window"),
    ({"window_pattern": "LL", "sliding_window": 4}, "sliding_window 4 needs layers with an S"),
    ({"sliding_window": 4}, "sliding_window 4 needs layers with an S: give model.decoder.window_pattern"),
    *(({name: 0}, f"{name} 0 must be above 0") for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "initializer_range",
        "sliding_window",
    )),
])  # fmt: skip
def test_contradictions_are_refused(given, words):
    with pytest.raises(RequestError, match=words):
        DecoderConfig(**given)
