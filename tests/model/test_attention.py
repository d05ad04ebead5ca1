"""Attention masks, and which library kernel runs for each."""

import copy
from contextlib import contextmanager

import pytest
import torch
from test_gpu import document_batches
from torch.nn.attention import SDPBackend

from lm.model import attention
from lm.model.attention import (
    attend,
    attention_mask,
    backends,
    describe_attention,
    documents_from,
    enter_kernels,
    kernel_for,
)
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, document_ids_from

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3]])


def heads(heads=4, kv_heads=2, length=11, dtype=torch.float64, width=8):
    return [torch.randn(2, length, n, width, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def exact(q, k, v, window, ids, scale=None):
    """A loop over rows, heads and tokens."""
    scale = scale or q.shape[3] ** -0.5
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            group = h // (q.shape[2] // k.shape[2])
            for t in range(q.shape[1]):
                first = 0 if window is None else max(0, t + 1 - window)
                seen = [s for s in range(first, t + 1) if ids is None or ids[b, s] == ids[b, t]]
                weights = (k[b, seen, group] @ q[b, t, h] * scale).softmax(0)
                out[b, t, h] = weights @ v[b, seen, group]
    return out


def assert_same(ours, true, out, expected):
    """Also the gradients."""
    weights = torch.randn_like(out)
    found, wanted = ((result, *torch.autograd.grad((result * weights).sum(), inputs))
                     for result, inputs in ((out, ours), (expected, true)))  # fmt: skip
    torch.testing.assert_close(found, wanted)


def mask_of(q, window, ids, limit=None):
    documents = None if ids is None else documents_from(ids, limit)
    return attention_mask(q.flatten(2), window, documents, q.shape[-1])


@pytest.mark.parametrize("window", [None, 1, 5, 11, 30])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("groups", [(4, 4), (4, 2)])
def test_a_cpu_sees_exactly_the_window_and_the_document(window, ids, groups):
    ours = heads(*groups)
    true = [t.detach().clone().requires_grad_() for t in ours]
    assert_same(ours, true, attend(*ours, mask_of(ours[0], window, ids)), exact(*true, window, ids))


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("groups_known", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("width, limit", [(8, None), (20, 7), (8, 32)])
def test_sequences_for_flash_say_the_same(monkeypatch, window, ids, groups_known, width, limit):
    """Flash attention over sequences by its documentation: keys of the query's own sequence, up to window_size[0]
    before it, heads of whole 16 bytes. It runs on no CPU, so a loop stands in for it here."""

    def varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and len(k) == len(v) == len(q)
        assert k.shape[1] == 2  # keys are not repeated for every query head
        assert starts_q.dtype == torch.int32 and torch.equal(starts_q, starts_k) and window_size[1] == 0
        assert (starts_q.diff() <= longest_q).all() and starts_q[0] == 0 and starts_q[-1] == len(q)
        assert enable_gqa == (groups_known and q.shape[1] != k.shape[1])
        out = []
        for start, end in zip(starts_q, starts_q[1:], strict=False):
            left = None if window_size[0] == -1 else window_size[0] + 1
            out.append(exact(q[None, start:end], k[None, start:end], v[None, start:end], left, None, scale)[0])
        return torch.cat(out)

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "GROUPS_IN_VARLEN", groups_known)
    ampere = "cuda", (8, 0), torch.bfloat16
    monkeypatch.setattr(attention, "kernel_for", lambda device, capability, dtype, *mask: kernel_for(*ampere, *mask))
    ours = heads(width=width)
    true = [t.detach().clone().requires_grad_() for t in ours]
    chosen = mask_of(ours[0], window, ids, limit=limit)
    assert ids is None or limit is None or len(chosen.offsets) == limit + 1
    assert (chosen.offsets is None) == (ids is None and window in (None, 30))
    assert_same(ours, true, attend(*ours, chosen), exact(*true, window, ids))


def test_a_device_is_not_waited_for_where_the_host_knows_how_many_documents_there_may_be(monkeypatch):
    """On `meta` there is nothing to wait for: whatever needs a value from the device is an error."""
    monkeypatch.setattr(attention, "kernel_for", lambda *arguments: "varlen")
    x, ids = torch.empty(2, 11, 16, device="meta"), IDS.to("meta")
    assert attention_mask(x, None, documents_from(ids, 9), 8).offsets.shape == (10,)
    with pytest.raises(RuntimeError):
        attention_mask(x, None, documents_from(ids), 8)


def test_a_mask_that_all_layers_share_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr("lm.model.decoder.attention_mask", lambda *a: calls.append(a[1]) or attention_mask(*a))
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = DecoderConfig(**sizes, window_pattern="SSL", sliding_window=5)
    Decoder(config)(torch.randint(50, (2, 40)))
    assert sorted(calls, key=str) == [5, None]


HALF = torch.bfloat16
CHOICES = [
    (("cpu", (0, 0), HALF, None, False, 64), "causal"),
    (("cuda", (9, 0), HALF, None, False, 64), "causal"),
    (("cuda", (9, 0), HALF, 128, False, 64), "varlen"),
    (("cuda", (8, 0), torch.float16, None, True, 64), "varlen"),
    (("cuda", (10, 0), HALF, 128, True, 64), "varlen"),
    (("cuda", (7, 5), torch.float16, 128, False, 64), "masked"),  # flash does not run before Ampere
    (("cuda", (9, 0), torch.float32, 128, False, 64), "masked"),
    (("cuda", (9, 0), HALF, 128, False, 256), "varlen"),
    (("cuda", (9, 0), HALF, 128, False, 264), "masked"),  # flash refuses wider heads
    (("cpu", (0, 0), HALF, 128, True, 64), "masked"),
    (("mps", (0, 0), HALF, 128, False, 64), "masked"),
]


@pytest.mark.parametrize("facts, kernel", CHOICES)
def test_the_choice(facts, kernel):
    assert kernel_for(*facts) == kernel


def test_cudnn_comes_first_on_hopper_only_and_never_with_a_mask():
    assert backends((9, 0), False)[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    for capability, masked in (((9, 0), True), ((8, 0), False), ((8, 9), False), ((10, 0), False), ((12, 0), True)):
        assert SDPBackend.CUDNN_ATTENTION not in backends(capability, masked)
        assert backends(capability, masked)[0] == SDPBackend.FLASH_ATTENTION
    assert backends((7, 5), False) == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("device, capability, dtype, windows, words", [
    ("cpu", None, HALF, [None], "scaled_dot_product_attention"),
    ("cpu", None, HALF, [None, 8], "scaled_dot_product_attention and masked"),
    ("cuda:0", (9, 0), HALF, [None], "cudnn, then flash"),
    ("cuda:0", (9, 0), HALF, [None, 8], "cudnn, then flash and flash over sequences"),
    ("cuda:0", (9, 0), torch.float32, [None], "efficient, then math"),
    ("cuda:0", (7, 5), torch.float16, [8], "masked"),
])  # fmt: skip
def test_the_choice_is_described_in_words(monkeypatch, device, capability, dtype, windows, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert describe_attention(torch.device(device), dtype, windows, False, 64) == words


def test_kernels_are_entered_around_the_blocks_also_of_a_copy(monkeypatch):
    """Once a forward pass; compiled blocks enter none themselves. A copy runs its own blocks."""
    entered = []

    @contextmanager
    def noted(device, masks, first=None):
        entered.append(first)
        yield

    monkeypatch.setattr(attention, "chosen_kernels", noted)
    decoder = Decoder(DecoderConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)).eval()
    ids = torch.arange(6)[None]
    plain = decoder(ids)
    enter_kernels(decoder, SDPBackend.FLASH_ATTENTION)
    other = copy.deepcopy(decoder)
    torch.nn.init.zeros_(decoder.norm.weight)
    assert entered == [] and torch.equal(other(ids), plain) and not decoder(ids).any()
    assert entered == [SDPBackend.FLASH_ATTENTION] * 2


def test_the_documents_of_the_gpu_tests_are_within_their_limits():
    """On a GPU nothing checks the limit: more documents would be written past the end of the offsets."""
    for ids, limit in document_batches():
        documents = documents_from(document_ids_from(ids[:, :-1], 7), limit)
        offsets = attention._offsets(documents)  # on a CPU `scatter_` checks the indices
        assert len(offsets) == limit + 1 and offsets[-1] == ids[:, :-1].numel()
