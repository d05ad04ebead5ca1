"""Tokens out of a decoder: those that transformers gives, the same alone and in a batch, from seeds that hold."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPES, SMALL, trained_like, write_huggingface, written_by
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from lm.errors import RequestError, RunError
from lm.inference import steps
from lm.inference.generation import generate
from lm.inference.kv_cache import CachedDecoder
from lm.inference.sampling import Sampling
from lm.model.compile import compile_decoder
from lm.model.decoder import Decoder
from lm.model.fused import fuse

UNEQUAL = [[5, 3, 8, 1, 90, 4, 7, 7, 2], [9], [40, 41, 42]]


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def config(request):
    return request.param


def greedy(count: int) -> Sampling:
    return Sampling(temperature=0, max_new_tokens=count)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("sizes", [[1] * 40, [17] + [1] * 23, [6, 1, 13, 20]], ids=["singly", "prompt", "pieces"])
def test_logits_with_a_cache_are_those_without(config, sizes, fused):
    """At every position, beyond the windows too, and however the tokens are divided."""
    decoder = trained_like(config)
    if fused:
        fuse(decoder)
    cached = CachedDecoder(decoder, 2, 40)
    ids = torch.randint(config.vocab_size, (2, 40))
    ends = torch.tensor(sizes).cumsum(0)
    with torch.no_grad():
        for piece, end in zip(ids.split(sizes, dim=1), ends, strict=True):
            length = piece.shape[1]
            got = cached.prefill(piece, torch.full((2,), length))
            torch.testing.assert_close(got, decoder(ids)[:, end - 1], atol=3e-5, rtol=1e-5)


def test_rows_of_unequal_length_are_continued_by_pieces_of_unequal_length(config):
    decoder = trained_like(config)
    cached = CachedDecoder(decoder, 2, 40)
    rows = torch.randint(config.vocab_size, (2, 40))
    begun = [0, 0]
    for counts in ([9, 3], [1, 6], [1, 1], [7, 4]):
        ids = torch.zeros(2, max(counts), dtype=torch.long)
        for row, count in enumerate(counts):
            ids[row, :count] = rows[row, begun[row] : begun[row] + count]
            begun[row] += count
        with torch.no_grad():
            got = cached.prefill(ids, torch.tensor(counts))
            expected = [decoder(rows[None, row, : begun[row]])[0, -1] for row in range(2)]
        torch.testing.assert_close(got, torch.stack(expected), atol=3e-5, rtol=1e-5)


def test_greedy_tokens_are_those_of_transformers(config, tmp_path):
    """Until a context of 64 is full."""
    decoder = trained_like(config)
    theirs = AutoModelForCausalLM.from_pretrained(write_huggingface(decoder, tmp_path)).eval()
    expected = [
        theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=55, eos_token_id=None, pad_token_id=0)
        [0, len(prompt):].tolist()
        for prompt in UNEQUAL
    ]  # fmt: skip
    got = written_by(decoder, UNEQUAL, greedy(55))
    assert got == [(tokens, "length") for tokens in expected]
    assert max(len(set(tokens)) for tokens in expected) > 5  # the comparison is of something


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_of_a_fixed_shape_gives_the_same_tokens(config, fused, monkeypatch):
    """As a graph replays it: with more slots in sight than are used, and where they must be doubled on the way."""
    monkeypatch.setattr(steps, "MIN_SLOTS", 16)
    monkeypatch.setattr(steps, "WARMUP", 1000)  # no graph is captured, as there is no GPU
    decoder = trained_like(config)
    if fused:
        fuse(decoder)
    dynamic, fixed = (list(generate(decoder, UNEQUAL, greedy(50), step=step)) for step in ("dynamic", "cuda_graph"))
    assert [new[:3] for new in dynamic] == [new[:3] for new in fixed]
    one, two = (torch.tensor([new.log_probability for new in news]) for news in (dynamic, fixed))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16", "float64"])
def test_every_precision_generates(precision):
    """Logits are those of the same precision without a cache, up to rounding, so greedy tokens are near its best."""
    decoder = trained_like(replace(SMALL, qk_norm=True, num_key_value_heads=2))
    decoder = decoder if precision == "mixed" else decoder.to(getattr(torch, precision))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"), torch.no_grad():
        [(tokens, _)] = written_by(decoder, [[1, 2, 3]], greedy(20))
        logits = decoder(torch.tensor([[1, 2, 3, *tokens]])).float()[0, 2:-1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= (1e-5 if precision.startswith("float") else 0.1)


@pytest.mark.parametrize("sampling", [greedy(20), Sampling(0.5, 10, 0.9, max_new_tokens=20, seed=0)])
@pytest.mark.parametrize("vocab_size", [None, 9])
def test_log_probabilities_are_those_of_the_model_itself(sampling, vocab_size):
    """At temperature 1 over the whole vocabulary, also where the tokenizer has fewer ids, of which all tokens are."""
    decoder, prompt = trained_like(SMALL), [5, 6, 7]
    news = list(generate(decoder, [prompt], sampling, vocab_size=vocab_size))
    assert (max(new.token for new in news) < 9) == (vocab_size == 9)
    with torch.no_grad():
        tokens = torch.tensor([prompt + [new.token for new in news]])
        expected = decoder(tokens)[0, 2:-1].log_softmax(-1)  # (20, V)
    got = torch.tensor([new.log_probability for new in news])
    torch.testing.assert_close(got, expected.gather(1, tokens[0, 3:, None])[:, 0], atol=1e-5, rtol=1e-5)


def test_seeds_reproduce_and_differ():
    decoder, sampling = trained_like(SMALL), Sampling(top_k=50, max_new_tokens=20)
    first, again, other = (written_by(decoder, UNEQUAL, replace(sampling, seed=seed)) for seed in (1, 1, 2))
    assert first == again and all(one != two for one, two in zip(first, other, strict=True))
    assert written_by(decoder, UNEQUAL, sampling) != written_by(decoder, UNEQUAL, sampling)


def test_a_document_or_the_caller_ends_a_row_and_the_others_continue():
    decoder, sampling = trained_like(SMALL), Sampling(max_new_tokens=12, seed=0)
    plain = written_by(decoder, UNEQUAL, sampling)
    eos, asked = plain[2][0][3], []

    def ended(row, token):
        asked.append((row, token))
        return row == 0 and sum(one == 0 for one, _ in asked) == 5

    news = list(generate(decoder, UNEQUAL, sampling, eos_id=eos, ended=ended))
    for row, (tokens, _) in enumerate(plain):
        ends = [place for place, token in enumerate(tokens) if token == eos or (row, place) == (0, 4)]
        assert [new.token for new in news if new.row == row] == tokens[: ends[0] + 1 if ends else None]
    reasons = {new.row: new.reason for new in news}  # of the last token of each
    assert (reasons[0], reasons[2]) == ("stop", "eos")
    assert asked == [(new.row, new.token) for new in news if new.reason != "eos"]  # not about the end of a document


def test_a_full_context_ends_a_row_and_says_so():
    decoder = trained_like(replace(SMALL, max_position_embeddings=16, window_pattern="SL", sliding_window=4))
    written = written_by(decoder, [[1] * 13, [2] * 4, [3] * 10], greedy(6))
    assert [(len(tokens), reason) for tokens, reason in written] == [(3, "context"), (6, "length"), (6, "length")]
    assert written[1] == written_by(decoder, [[2] * 4], greedy(6))[0]
    [(tokens, reason)] = written_by(decoder, [[2]], greedy(10**9))
    assert len(tokens) == 15 and reason == "context"


def test_a_prompt_that_fills_the_context_is_refused_before_anything_is_computed():
    with pytest.raises(RequestError, match="it has 64 tokens, and the context has 64; shorten it by 1"):
        next(generate(Decoder(SMALL), [[1] * 64]))


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_are_broken_are_said_to_be(temperature):
    decoder = trained_like(SMALL)
    decoder.norm.weight.data[0] = torch.nan
    with pytest.raises(RunError, match="not finite"):
        next(generate(decoder, [[1]], Sampling(temperature)))


def test_tokens_are_handed_out_one_by_one():
    decoder, calls, tokens = trained_like(SMALL), [], [[], []]
    decoder.register_forward_hook(lambda *_: calls.append(1))
    for new in generate(decoder, UNEQUAL[1:], greedy(5)):
        tokens[new.row].append(new.token)
        assert len(calls) == len(tokens[new.row])  # nothing was computed ahead
        assert new.reason == ("length" if len(calls) == 5 else None)


def test_generation_leaves_no_trace():
    """Modes of all modules, gradients, random numbers, and whether gradients are recorded between tokens."""
    decoder, sampling = Decoder(replace(SMALL, dropout=0.5)), Sampling(max_new_tokens=8, seed=0)
    decoder.layers[1].eval()
    modes = [module.training for module in decoder.modules()]
    before = torch.get_rng_state()
    first = written_by(decoder, UNEQUAL, sampling)
    assert [module.training for module in decoder.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert first == written_by(decoder.eval(), UNEQUAL, sampling)  # nothing was dropped
    decoder.train()
    broken_off = generate(decoder, UNEQUAL, sampling)
    next(broken_off)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    broken_off.close()
    assert all(module.training for module in decoder.modules())
    assert all(parameter.grad is None and not parameter.is_inference() for parameter in decoder.parameters())
    decoder(torch.tensor([[1, 2]]), labels=torch.tensor([[2, 3]])).total.backward()


def test_compiled_blocks_are_neither_compiled_again_nor_forgotten():
    torch._dynamo.reset()
    decoder = trained_like(replace(SMALL, window_pattern="SL", sliding_window=5)).train()
    expected = written_by(decoder, UNEQUAL, greedy(12))
    compile_decoder(decoder, "triton_free")
    forwards = [layer.forward for layer in decoder.layers]
    ids = torch.randint(101, (2, 32))
    decoder(ids, labels=ids).total.backward()
    graphs = counters["stats"]["unique_graphs"]
    assert written_by(decoder, UNEQUAL, greedy(12)) == expected
    decoder(ids, labels=ids).total.backward()
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert [layer.forward for layer in decoder.layers] == forwards
