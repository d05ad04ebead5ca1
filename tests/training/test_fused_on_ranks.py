"""The fused forward pass under DDP and FSDP2 has the gradients of one process, however a step is computed.

The ops run as plain PyTorch on a CPU; what is tested is how they meet sharded weights, hooks, and graphs.
"""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from trainings import in_ranks

import lm.model.compile
from lm.model.compile import checkpoint_activations, compile_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import fuse
from lm.model.low_precision import WeightCopies
from lm.training.config import DistributedConfig
from lm.training.distributed import FullyShardedStrategy

SHAPE = DecoderConfig(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, max_position_embeddings=64, qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip
# A block of more than one bucket of DDP's, at which dynamo would cut its graph.
LARGE = DecoderConfig(vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, qk_norm=True)


class Case(NamedTuple):
    strategy: str
    half: bool = False  # under autocast in bf16
    micro_batches: int = 2  # of a step
    compile: str = "none"
    checkpointing: str = "none"
    copies: bool = False  # of the weights in half precision, made once a step


CASES = [
    Case("fsdp2"), Case("fsdp2", half=True), Case("fsdp2", half=True, compile="triton_free"),
    Case("fsdp2", half=True, checkpointing="block"), Case("fsdp2", checkpointing="selective", compile="triton_free"),
    Case("ddp"), Case("ddp", half=True, copies=True), Case("ddp", half=True, copies=True, compile="triton_free"),
    Case("ddp", half=True, checkpointing="block", micro_batches=1), Case("ddp", checkpointing="selective"),
]  # fmt: skip


def fused(case: Case) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    fuse(decoder)
    checkpoint_activations(decoder, case.checkpointing)
    compile_decoder(decoder, case.compile)
    return decoder


def gradients(case: Case, ids: torch.Tensor, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Of the mean loss of all rows `(micro-batches, rows, T + 1)`, of which a rank has its share; unsharded."""
    decoder, rows = fused(case), ids.shape[1] // world
    model, no_sync = decoder, nullcontext
    if case.strategy == "fsdp2":
        strategy = FullyShardedStrategy(world, 60.0, DistributedConfig())
        strategy._device_mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu") if case.half else PrecisionPlugin()
        strategy.shard(decoder)
    elif case.strategy == "ddp":
        model = DistributedDataParallel(decoder, broadcast_buffers=False, gradient_as_bucket_view=True)
        no_sync = model.no_sync
    with WeightCopies(decoder, torch.bfloat16) if case.copies else nullcontext():
        for index, micro_batch in enumerate(ids[:, rank * rows : (rank + 1) * rows]):
            last = index == len(ids) - 1
            if case.strategy == "fsdp2":
                decoder.set_requires_gradient_sync(last)
            with nullcontext() if last else no_sync(), torch.autocast("cpu", torch.bfloat16, enabled=case.half):
                total = model(micro_batch[:, :-1], labels=micro_batch[:, 1:]).total
                (total * world / len(ids)).backward()
    return {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in decoder.named_parameters()}


def compare_on_a_rank(rank: int, rendezvous: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(5)
    ids = torch.randint(SHAPE.vocab_size, (2, 4, 33))
    for case in CASES:
        expected = gradients(Case("one", case.half, case.micro_batches), ids[: case.micro_batches], 0, 1)
        found = gradients(case, ids[: case.micro_batches], rank, world)
        apart = {name: ((found[name] - one).norm() / one.norm()).item() for name, one in expected.items()}
        assert max(apart.values()) < (1e-2 if case.half else 1e-5), (case, apart)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_have_the_gradients_of_one_process(tmp_path):
    in_ranks(tmp_path, 2, compare_on_a_rank, str(tmp_path / "rendezvous"), 2)


def test_a_block_stays_one_graph_under_ddp(tmp_path, monkeypatch):
    """Blocks exchange their gradients one after the other; to cut their graphs as well gains nothing."""
    graphs, compiler = [], lm.model.compile.triton_free
    monkeypatch.setattr("lm.model.compile.triton_free", lambda *given, **options: (
        graphs.append(given[0]), compiler(*given, **options))[1])  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        decoder = Decoder(LARGE)
        compile_decoder(decoder, "triton_free")
        ids = torch.randint(LARGE.vocab_size, (1, 8))
        DistributedDataParallel(decoder, bucket_cap_mb=1)(ids, labels=ids).total.backward()
        assert len(graphs) == 2  # the blocks, which share theirs, and the loss
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
