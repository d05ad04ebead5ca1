"""`count_launches.py` counts on meta tensors what a GPU would be told to do."""

import json

import pytest
import torch
from count_launches import Launches, count, main, multi_tensor_launches

from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.estimates import parameters

SHAPE = dict(vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=256, max_position_embeddings=64)  # fmt: skip
PRESET = {"model": {"decoder": SHAPE, "optimizer": {"lr": 1e-3}}, "data": {"micro_batch_size": 2}}


@pytest.fixture(scope="module")
def counted():
    return count(PRESET, copies=False), count(PRESET, copies=True)


def launches(counts):
    return {kind: found.launches for kind, found in counts["micro_batch"].kinds.items()}


def test_a_block_launches_what_its_code_says(counted):
    """Norms 2, and 2 each in the backward pass; rope and SwiGLU both ways; 4 products forward and 8 backward."""
    found = launches(counted[0])
    assert found["our kernels"] == 3 * (2 + 4 + 2 + 2) + 3 + 1  # the last norm, and the loss in one chunk
    assert found["matrix products"] == 3 * 12 + 3
    assert found["attention"] == 3 * (1 + 3 + 2)
    assert found["gradients added up"] == 3 * 6 + 2  # of every parameter


def test_copies_of_the_weights_replace_casts_of_every_micro_batch(counted):
    without, copies = (counts["micro_batch"].ops["_to_copy"] for counts in counted)
    assert without - copies >= 4 * 3 + 1  # every matrix of a block, and the output's
    assert [counts["optimizer_step"].ops["_foreach_copy_"] for counts in counted] == [0, 1]


def test_products_add_the_gradients_of_matrices_by_themselves(counted):
    """A sum is read and written, and the gradient itself is nowhere: two values of each weight less are moved."""
    without, copies = (launches(counts)["gradients added up"] for counts in counted)
    assert without - copies == 3 * 4 - 1  # the tied matrix's two gradients are added one by one, not as a sum
    one, other = (sum(counts["micro_batch"].kinds[kind].bytes for kind in ("gradients added up", "matrix products"))
                  for counts in counted)  # fmt: skip
    counts = parameters(DecoderConfig(**SHAPE))
    rounded = 3 * 128 * 128 * 2  # without copies the product for `o_proj` writes bf16, which a cast reads
    table = 3 * 4 * 512 * 128 + 4  # the sum of the output matrix's is read and written; its gradient and a factor read
    assert one - other == 2 * 4 * (counts["attention"] + counts["mlp"]) - rounded - table


def test_what_is_stored_is_not_written_again(counted):
    """The normalised rows of both norms, and SwiGLU's result; in bf16."""
    stored = count(PRESET, True, checkpointing="store_all")
    written = {way: counts["micro_batch"].total.bytes for way, counts in (("none", counted[1]), ("store_all", stored))}
    assert written["none"] - written["store_all"] == 3 * 2 * 64 * (2 * 128 + 256) * 2
    assert stored["micro_batch"].total.launches == counted[1]["micro_batch"].total.launches


@pytest.mark.parametrize("precision, both, matrix, inside", [("fp8-tensorwise", 2, 2, 0), ("fp8-rowwise", 3, 1, 1)])
def test_fp8_quantises_what_the_kernels_page_says(counted, precision, both, matrix, inside):
    """Of each block but the last: 4 weights; what goes in, in both passes; the gradient of what comes out. That of gate
    and up comes with the last matrix's input. With `rowwise` the norms return FP8 by themselves."""
    for copies in (False, True):
        found, bf16 = count(PRESET, copies, precision), counted[copies]
        step = both if copies else 0  # of the weight, once an optimizer step
        norms = 2 * inside * matrix
        assert found["micro_batch"].ops["fp8"] == 2 * (4 * (both - step) + 4 * matrix - norms + 3 * both + 3 * both)
        assert found["micro_batch"].ops["swiglu_backward_fp8"] == 2 * both
        assert found["optimizer_step"].ops["fp8"] == 2 * 4 * step
        assert launches(found)["matrix products"] == launches(bf16)["matrix products"]


def test_what_fp8_computes_twice_is_read_twice():
    """Values of bf16: gate and up and the gradient twice; and five results of a byte for each three."""
    dz, gate_up = (torch.empty(64, width, device="meta", dtype=torch.bfloat16) for width in (128, 256))
    with Launches() as found:
        torch.ops.lm.swiglu_backward_fp8(dz, gate_up, rowwise=False)
    assert found.total == (2, 2 * 2 * (64 * 128 * 3) + 64 * 128 * 5 + 2 * 4)


def test_the_optimizer_moves_seven_values_of_a_parameter(counted):
    """Weight, gradient and two means read, all but the gradient written; the norm and clipping move three more."""
    total = parameters(DecoderConfig(**SHAPE))["total"]
    moved = counted[0]["optimizer_step"].kinds["optimizer and norms"].bytes
    assert moved == pytest.approx(4 * (7 + 2 + 1) * total, rel=1e-3)


def test_views_and_reserved_memory_are_no_launches_and_bytes_are_read_and_written():
    x, y = torch.empty(8, 4, device="meta"), torch.empty(4, device="meta")
    with Launches() as found:
        torch.empty_like(x).view(4, 8).t()[1:].detach()
        assert found.total == (0, 0)
        torch.add(x, y.expand(8, 4))
        assert found.total == (1, 4 * (32 + 4 + 32))
        x.add_(y)
        x.copy_(y.expand(8, 4))
        assert found.total == (3, 4 * ((32 + 4 + 32) + (32 + 4 + 32) + (4 + 32)))


@pytest.mark.parametrize("sizes, lists, expected", [
    ([1] * 110, 1, 1), ([1] * 111, 1, 2), ([1] * 97, 2, 2), ([65_536 * 320], 4, 1), ([65_536 * 320 + 1], 4, 2),
    ([0, 5], 1, 1), ([], 1, 0)])  # fmt: skip
def test_lists_of_tensors_take_a_launch_for_320_blocks_or_a_full_table(sizes, lists, expected):
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assert multi_tensor_launches(tensors, lists) == expected


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    main(["--config", "pretrain-50m.yaml", "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["counts"]["pretrain-50m"]
    assert found.keys() == {"without copies", "WeightCopies", "store_all"}
    total = found["WeightCopies"]["micro_batch"]["total"]
    assert f"{total['launches']:,}" in capsys.readouterr().out and total["bytes"] > 10**6
    with pytest.raises(RequestError, match="tiny.yaml takes its vocabulary"):
        main(["--config", "tiny.yaml"])
