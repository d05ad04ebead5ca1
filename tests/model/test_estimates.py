"""What a decoder costs is known from its config: parameters, operations and memory, as a built one really has them."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.model.compile import checkpoint_activations, compile_decoder
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.decoder import Decoder
from lm.model.estimates import checkpoint_bytes, describe_mfu, flops_per_token, parameters
from lm.model.fused import fuse
from lm.model.low_precision import WeightCopies
from lm.model.memory import Step, activations, block_working, casts, largest_micro_batch, training_memory
from lm.training.config import OptimizerConfig
from lm.training.optim import build_optimizer, state_size

BASE = DecoderConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
TIED = DecoderConfig(vocab_size=500, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, intermediate_size=384, max_position_embeddings=256,
                     tie_word_embeddings=True)  # fmt: skip
CONFIGS = {
    "tied": TIED,
    "normed": DecoderConfig(vocab_size=1000, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, head_dim=32,
                            num_key_value_heads=6, intermediate_size=200, max_position_embeddings=128,
                            tie_word_embeddings=False, qk_norm=True),
    "wide heads": DecoderConfig(vocab_size=300, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                                num_key_value_heads=1, head_dim=64, intermediate_size=512,
                                max_position_embeddings=128, tie_word_embeddings=True),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_counted_parameters_are_those_of_the_built_decoder(config):
    with torch.device("meta"):
        named = dict(Decoder(config).named_parameters())

    def held(*words):
        return sum(p.numel() for name, p in named.items() if any(word in name for word in words))

    counts = parameters(config)
    assert counts["total"] == sum(p.numel() for p in named.values())
    assert counts["embedding"] == held("embed_tokens")
    assert counts["attention"] == held("qkv_proj", "o_proj")
    assert counts["mlp"] == held("mlp.")
    assert counts["norms"] == held("norm")
    assert counts["lm_head"] == held("lm_head")
    assert counts["non_embedding"] == counts["total"] - counts["embedding"] - counts["lm_head"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_flops_are_those_that_torch_counts_in_a_training_step(config):
    """torch counts matmuls and the whole attention square; norms, which we count as parameters, are left out."""
    length = 32
    with torch.device("meta"):
        model = Decoder(replace(config, max_position_embeddings=length))
        ids = torch.zeros(2, length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(ids, labels=ids).total.backward()
    ours = flops_per_token(config, length, full_attention=True) - 6 * parameters(config)["norms"]
    assert counter.get_total_flops() / ids.numel() == pytest.approx(ours, rel=1e-9)


def test_the_formula_on_paper():
    config = replace(BASE, num_hidden_layers=1, num_attention_heads=2, head_dim=8, num_key_value_heads=2)
    weights = 64 * 1000 + 4 * 64 * 16 + 3 * 64 * 96 + 3 * 64
    assert flops_per_token(config, 7) == 6 * weights + 12 * 16 * 4
    assert flops_per_token(replace(config, tie_word_embeddings=False), 7) == flops_per_token(config, 7)
    with pytest.raises(RequestError, match="vocab_size is not known"):
        flops_per_token(DecoderConfig(), 7)


def test_windows_count_what_their_tokens_see_and_full_attention_what_the_causal_mask_hides():
    """Full: all positions, or all of a window, as nanochat's `estimate_flops` has it."""
    full = replace(BASE, num_hidden_layers=3)
    config = replace(full, window_pattern="SSL", sliding_window=3)
    seen = sum(min(t + 1, 3) for t in range(10)) / 10  # by a token, on average
    heads, counted = 12 * config.num_attention_heads * config.head_dim, flops_per_token(config, 10)
    assert flops_per_token(full, 10) - counted == pytest.approx(heads * 2 * (5.5 - seen))
    assert flops_per_token(config, 2) == pytest.approx(flops_per_token(full, 2))
    more = heads * (2 * (3 - seen) + 10 - 5.5)
    assert flops_per_token(config, 10, full_attention=True) == pytest.approx(counted + more)
    assert describe_mfu(0.44, 0.466).startswith("44.0% ") and "46.6%" in describe_mfu(0.44, 0.466)
    assert describe_mfu(None, None) == "unknown"


# ---- memory ----------------------------------------------------------------------------------------------------------
PRESET = DecoderConfig(vocab_size=32_768, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                       num_key_value_heads=4, intermediate_size=4096, max_position_embeddings=1024,
                       tie_word_embeddings=True)  # fmt: skip
GIB = 2**30


def kept_bytes(config, step):
    """Bytes of all storages that are there after the forward pass and were not before, but for the results."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder(config)
    if step.kernels:
        fuse(model)
    checkpoint_activations(model, step.checkpointing)
    compile_decoder(model, step.compile)
    half = step.item == 2
    copies = WeightCopies(model, torch.bfloat16) if step.kernels and half else nullcontext()
    existing = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *getattr(copies, "copies", ()))}
    kept = {}  # held, so that no address comes twice

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in existing:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def keep_arguments(function, *arguments, **options):  # which eager checkpointing holds by itself
        torch.utils._pytree.tree_map_only(torch.Tensor, pack, arguments)
        return checkpoint(function, *arguments, **options)

    for part in model.modules() if step.compile == "none" else ():
        for name in ("forward", "mlp_branch"):
            if isinstance(recomputed := getattr(part, name, None), functools.partial):
                setattr(part, name, functools.partial(keep_arguments, *recomputed.args, **recomputed.keywords))
    ids, labels = torch.randint(config.vocab_size, (2, step.micro_batch_size, step.seq_len)).unbind()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), copies:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            model(ids, labels=labels.clone())
    return sum(storage.nbytes() for storage in kept.values()) + sum(c.nbytes for c in getattr(copies, "copies", ()))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("compile, precision, name", [
    *(("none", precision, name) for precision in ("32-true", "bf16-mixed") for name in CONFIGS),
    ("triton_free", "bf16-mixed", "tied"), ("triton_free", "32-true", "normed")])  # fmt: skip
def test_what_is_kept_for_the_backward_pass_is_predicted(name, kernels, precision, compile):
    """Within 1 %, in every way to compute a step; 5 % were asked for."""
    config = CONFIGS[name]
    step = Step(4, 128, precision, kernels, compile)
    predicted = activations(config, step) + casts(config, step)
    assert predicted == pytest.approx(kept_bytes(config, step), rel=0.01)


@pytest.mark.parametrize("compile, precision, name, mode, kernels", [
    *product(["none"], ("32-true", "bf16-mixed"), CONFIGS, ("selective", "block"), (False, True)),
    ("triton_free", "bf16-mixed", "tied", "selective", False), ("triton_free", "bf16-mixed", "tied", "block", True),
])  # fmt: skip
def test_what_activation_checkpointing_keeps_is_predicted(name, kernels, precision, compile, mode):
    if kernels and compile != "none" and torch.__version__ < "2.13":
        pytest.skip("compiled code of our kernels is not recomputed")
    config, step = CONFIGS[name], Step(4, 128, precision, kernels, compile, checkpointing=mode)
    predicted = activations(config, step) + casts(config, step)
    assert predicted == pytest.approx(kept_bytes(config, step), rel=0.02)
    assert predicted < activations(config, replace(step, checkpointing="none")) + casts(config, step)


def without_code(graph, inputs):
    """Inductor up to where it has chosen what is kept; it compiles for much longer."""
    return compile_fx(graph, inputs, inner_compile=lambda graph, inputs, **options: graph.forward)


@pytest.mark.parametrize("precision, code", [
    ("32-true", False), ("bf16-mixed", False), pytest.param("bf16-mixed", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_inductor_keeps_what_is_predicted(precision, code, monkeypatch):
    compiled, backend = torch.compile, "inductor" if code else without_code
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled(*given, **options | {"backend": backend}))
    step = Step(4, 128, precision, False, "inductor")
    predicted = activations(TIED, step) + casts(TIED, step)
    assert predicted == pytest.approx(kept_bytes(TIED, step), rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision, dtype", [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_are_predicted(name, precision, dtype, optimizer):
    config = CONFIGS[name]
    model = Decoder(config).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = state_size(OptimizerConfig(optimizer))
    optimizer = build_optimizer(model, OptimizerConfig(name=optimizer), matrix_rows(config))
    optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    predicted = training_memory(config, Step(4, 128, precision), state)
    assert predicted["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    assert predicted["gradients"] == sum(parameter.grad.nbytes for parameter in model.parameters())
    assert predicted["optimizer"] == states
    assert checkpoint_bytes(config, 2 if dtype == torch.bfloat16 else 4, state) == predicted["weights"] + states


def test_one_micro_batch_a_step_needs_no_memory_for_both_gradients_and_activations():
    one, two = (training_memory(PRESET, Step(16, 1024, "bf16-mixed", True, accumulate=n)) for n in (1, 2))
    assert one["peak"] < two["peak"] == sum(two[part] for part in two if part != "peak")


def test_shards_divide_what_belongs_to_the_parameters():
    whole, share = (training_memory(PRESET, Step(16, 1024, "bf16-mixed", True, world_size=8, sharded=sharded))
                    for sharded in (False, True))  # fmt: skip
    for part in ("weights", "gradients", "optimizer"):
        assert share[part] == pytest.approx(whole[part] / 8)
    assert share["activations"] == whole["activations"]


def test_replicas_divide_the_momentum_of_muon_alone():
    muon = state_size(OptimizerConfig(name="muon"))
    alone, eight, shards = (training_memory(PRESET, Step(16, 1024, world_size=n, sharded=sharded), muon)["optimizer"]
                            for n, sharded in ((1, False), (8, False), (8, True)))  # fmt: skip
    counts = parameters(PRESET)
    hidden = counts["attention"] + counts["mlp"]
    assert alone - eight == pytest.approx(4 * hidden * 7 / 8) and shards == alone // 8


def test_shards_are_gathered_two_blocks_at_a_time():
    step = Step(16, 1024, "bf16-mixed", world_size=8, sharded=True)
    counts = parameters(PRESET)
    blocks = (counts["attention"] + counts["mlp"]) * 2 // PRESET.num_hidden_layers
    assert casts(PRESET, step) == 2 * (counts["embedding"] + blocks) < casts(PRESET, replace(step, sharded=False))


def test_gradients_of_several_devices_are_there_for_longer():
    """FSDP2 adds up whole ones where there are several micro-batches; DDP keeps the buckets that hold them."""
    step = Step(16, 1024, "bf16-mixed", True, world_size=8)
    alone, replicated = (training_memory(PRESET, replace(step, world_size=n)) for n in (1, 8))
    assert replicated["peak"] == sum(replicated[part] for part in replicated if part != "peak") > alone["peak"]
    assert training_memory(PRESET, replace(step, sharded=True, accumulate=4))["gradients"] == alone["gradients"]


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    step = Step(1, 1024, "bf16-mixed", True)
    best = largest_micro_batch(PRESET, step, 20 * GIB, samples=512)

    def peak(size):
        return training_memory(PRESET, replace(step, micro_batch_size=size, accumulate=512 // size))["peak"]

    assert 512 % best == 0 and peak(best) <= 20 * GIB < peak(2 * best)
    assert largest_micro_batch(PRESET, step, GIB, samples=512) is None
    assert largest_micro_batch(PRESET, step, 20 * GIB, samples=2**30) == 16  # found at once


def test_many_short_documents_need_memory_in_the_backward_pass_of_attention():
    """flash attention's fp32 sum has whole tiles of 128 rows for each sequence, empty ones too."""
    step = Step(16, 1024, "bf16-mixed", True)
    one, many, some = (replace(step, documents_per_token=n / 16_384) for n in (0, 496, 300))
    assert [one.sequences, many.sequences, some.sequences] == [16, 512, 512]
    for counted in (many, some):
        rows = Batch(torch.zeros(16, 1025), row_documents=(1 + round(counted.documents_per_token * 1024),) * 16)
        assert rows.max_documents == counted.sequences
    buffer = 4 * (16_384 + 128 * 512) * 16 * 65  # 64 values of a head's row, and its sum
    assert block_working(PRESET, many) == step.tokens * 2 * 7 * 1024 + buffer
    assert block_working(PRESET, one) == step.tokens * 2 * 3 * (4096 + 1024) < block_working(PRESET, many)
    small = replace(PRESET, vocab_size=4096)  # else the logits need more
    assert training_memory(small, many)["peak"] > training_memory(small, one)["peak"]
