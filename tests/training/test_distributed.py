"""Two real processes train as one does: same samples, same losses, same checkpoints, and they end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.plugins.environments import LightningEnvironment
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainings import (
    CONFIG,
    PLACES,
    equipment,
    fit,
    in_ranks,
    lm,
    processes_of,
    rows_by_step,
    start,
    wait_until,
    write_config,
)

from lm.errors import RequestError, RunError
from lm.model.build import BuildOptions, build
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.decoder import Decoder, Losses, losses_of
from lm.runs.run import Run
from lm.training.checkpoint_content import index_state, name_state, parameter_names
from lm.training.checkpoint_io import FolderCheckpointIO
from lm.training.config import DistributedConfig, OptimizerConfig
from lm.training.distributed import FullyShardedStrategy
from lm.training.optim import build_optimizer

DDP, FSDP2 = ({"trainer.devices": 2, "trainer.strategy": strategy} for strategy in ("ddp", "fsdp2"))
DIVISIONS = {
    "one": {"trainer.devices": 1, "data.micro_batch_size": 4},  # 2 micro-batches a step
    "ddp": DDP | {"data.micro_batch_size": 2},  # 2 a rank
    "ddp-whole": DDP | {"data.micro_batch_size": 4},  # 1 a rank
    "fsdp2": FSDP2 | {"data.micro_batch_size": 2},
    "fsdp2-whole": FSDP2 | {"data.micro_batch_size": 4},
    "fsdp2-compiled": FSDP2 | {"data.micro_batch_size": 4, "model.compile": "triton_free"},
}
# The order of additions differs between divisions, and training widens the difference of 1e-7 with every step.
TOLERANCE = 2e-5
MASK, FAIL = equipment("test_distributed.Mask"), equipment("test_distributed.Fail")
PLAIN = {
    "model.decoder.dropout": 0.0, "model.document_mask": True, "model.optimizer.lr": 3e-3,
    "model.schedule.name": "constant", "trainer.gradient_clip_val": 0.5, "trainer.max_steps": 14,
    "trainer.val_interval": 7, "trainer.checkpoint_interval": 100,
}  # fmt: skip


# ---- what a config names ---------------------------------------------------------------------------------------------
class Fail(Callback):
    """Rank one fails, while rank zero does not listen, as one that waits for a GPU."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1 and trainer.global_rank == 1:
            raise RunError("shard 7 is gone")
        if trainer.global_step == 1:
            time.sleep(600)


class Mask(Callback):
    """Leaves out labels by their ids: another number of them in every micro-batch and on every rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        object.__setattr__(batch, "mask", batch.tokens[:, 1:].to(torch.int64) % 3 > 0)


OPTIMIZERS = {"adamw": {}, "muon": {"model.optimizer.name": "muon", "model.decoder.qk_norm": True}}
TWO_STEPS = {"trainer.max_steps": 2, "model.schedule.warmup_steps": 1}
ENDLESS = {"trainer.max_steps": 100_000, "trainer.val_interval": 100_000}
ENVIRONMENT = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}


# ---- how it is looked at ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def alone(workplace):
    """By optimizer, the run of one process without a stop, and the samples of its steps."""
    return {name: (train(workplace, f"one-{name}", "one", **changes)[1], seen(workplace))
            for name, changes in OPTIMIZERS.items()}  # fmt: skip


def changed(division: str, *callbacks: dict, **changes) -> dict:
    """The changes of a config for this division."""
    named = [MASK, equipment("recorder.Recorder"), *callbacks]
    return {**PLAIN, **DIVISIONS[division], "trainer.callbacks": named, **changes}


def train(folder: Path, run: str, division: str, *callbacks: dict, expect: int = 0, **changes):
    """Train `run`, or resume it; returns the ended process and the run."""
    for old in folder.glob("trace*.jsonl"):
        old.unlink()
    return fit(folder, run, "--ckpt_path", "auto", expect=expect, **changed(division, *callbacks, **changes))


def seen(folder: Path) -> dict[int, list[list[int]]]:
    """Each step's rows of tokens."""
    return rows_by_step(*folder.glob("trace*.jsonl"))


def curves(run: Run, names=("train/loss", "val/loss", "val/bpb", "optim/grad_norm", "optim/lr")):
    """What the run logged that must not depend on the division: (step, name) -> value."""
    return {(entry["step"], name): entry[name] for entry in run.metrics() for name in names if name in entry}


def complaints(text: str) -> list[str]:
    """The lines of a program's standard error that are neither the run's log nor empty."""
    log = r"step \d|run checkpoints|curves:|from another|preparing|learning|\d+ x \d+ tokens|changed since|passing over"
    log += r"|kernels:|no run '|model:|data:|training:|optimizer:|weights:|\d+ steps in|best |sample:"
    log += r"|SIG\w+: stopping after this step|(lm|\S+ -m lm) (generate|runs|export)|device:|time left, |compil"
    log += r"|warning: validations take|warning: the run of [\d,]+ steps reads the data"  # of plan
    return [line for line in text.splitlines() if line.strip() and not re.match(log, line)]


# ---- the same training -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("division, optimizer", [("ddp", "muon"), ("fsdp2-whole", "muon"), ("fsdp2-compiled", "adamw")])
def test_two_ranks_train_as_one_process(workplace, alone, division, optimizer):
    """With accumulation and without, with clipping, attention inside documents, and labels left out: ranks and
    micro-batches hold different numbers of counted tokens, and every token weighs the same all the same."""
    done, run = train(workplace, f"{division}-{optimizer}", division, **OPTIMIZERS[optimizer])
    one, samples = alone[optimizer]
    assert seen(workplace) == samples
    assert curves(run) == pytest.approx(curves(one), rel=TOLERANCE)
    shared, whole = (load_file(each.checkpoint("last") / "optimizer.safetensors") for each in (run, one))
    assert shared.keys() == whole.keys()
    for key, tensor in whole.items():
        assert (shared[key] - tensor).norm() <= 1e-4 * tensor.norm(), key
    assert complaints(done.stderr) == []  # each line once, and no warning from any rank
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) == len(set(warned))  # those of `lm plan`, by rank zero alone
    assert max(curves(run, ["optim/grad_norm"]).values()) > 0.5  # clipping had something to do
    state = json.loads((run.checkpoint("last") / "trainer.json").read_text())
    zero, one = (json.dumps(rank["rng"]["cpu"]) for rank in state["ranks"])
    assert zero != one  # same initial weights on every rank, and other random numbers afterwards


class Collectives(TorchDispatchMode):
    """Counts what ranks exchange: (name of the operation, precision, ranks that take part)."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            group = next(dist.ProcessGroup.unbox(leaf) for leaf in args if isinstance(leaf, torch.ScriptObject))
            self.seen[function._opname.strip("_"), tensor.dtype, group.size()] += 1
        return function(*args, **(kwargs or {}))


class TensorCopies(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._opname in ("copy_", "_to_copy", "clone")
        return function(*args, **(kwargs or {}))


SMALL = DecoderConfig(**{**CONFIG["model"]["decoder"], "vocab_size": 50, "dropout": 0.0})


class OwnWeights(nn.Module):
    """A custom model whose first weights nobody else knows."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        nn.init.trunc_normal_(self.embed.weight, std=0.1)
        self.register_buffer("angles", torch.rand(8).cos())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | Losses:
        logits = self.head(self.embed(input_ids))
        return logits if labels is None else losses_of(logits, labels)


def built(make: Callable[[DecoderConfig], nn.Module], strategy: FullyShardedStrategy | None = None) -> nn.Module:
    """A model with the first weights of seed 0, which of ours rank zero alone needs."""
    torch.manual_seed(0 if make is OwnWeights or strategy is None else dist.get_rank())
    with nullcontext() if strategy is None else strategy.tensor_init_context():
        return build(SMALL, BuildOptions(kernels="off"), torch.device("cpu"), torch.float32, make=make,
                     on_made=lambda model, builtin: devices.append(next(model.parameters()).device.type),
                     shard=None if strategy is None else strategy.shard).decoder  # fmt: skip


devices: list[str] = []  # where models were made


def save_and_load(strategy: FullyShardedStrategy, folder: Path) -> None:
    """Rank zero alone has memory for checkpoints, the same for each, and alone reads one."""
    [optimizer], decoder, io = strategy.optimizers, strategy.model, strategy.checkpoint_io
    places: set[int] = set()
    for _ in range(2):
        weights, state = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
        named = name_state(state["state"], parameter_names(decoder, optimizer)) if state else {}
        with TensorCopies() as copies:
            strategy.save_checkpoint({"state_dict": weights, "optimizer": named, "files": {}}, folder)
        assert copies.count == 0  # beside those of `_gathered`
        assert not places or places == {tensor.data_ptr() for tensor in [*weights.values(), *named.values()]}
        places = {tensor.data_ptr() for tensor in [*weights.values(), *named.values()]}
    io.drain()
    assert len(io._host_memory) == len(places) and bool(places) == strategy.is_global_zero
    before = {name: tensor.full_tensor() for name, tensor in decoder.state_dict().items()}
    slots = of_parameters(optimizer)
    with torch.no_grad():
        for tensor in [*decoder.parameters(), *(slot for state in optimizer.state.values() for slot in state.values())]:
            tensor.zero_()
    if not strategy.is_global_zero:
        io.load_checkpoint = None
    strategy.broadcast(None)  # it is written
    content = strategy.load_checkpoint(folder)
    state = index_state(content.pop("optimizer"), parameter_names(decoder, optimizer))
    strategy.load_model_state_dict(content)
    strategy.load_optimizer_state_dict({"optimizer_states": [{**optimizer.state_dict(), "state": state}]})
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
    torch.testing.assert_close(of_parameters(optimizer), slots, rtol=0, atol=0)
    io.load_checkpoint = raise_damage
    with pytest.raises(RequestError, match="damaged"):  # on all ranks
        strategy.load_checkpoint(folder)


def of_parameters(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The whole state of each parameter."""
    return [{name: slot.full_tensor() if slot.ndim else slot.clone() for name, slot in optimizer.state[p].items()}
            for group in optimizer.param_groups for p in group["params"]]  # fmt: skip


def raise_damage(folder: Path) -> None:
    raise RequestError("model.safetensors is damaged")


def shard_on_a_rank(rank: int, rendezvous: str, world: int, precision: str, options, expected) -> None:
    """A step under FSDP2 with Muon; what ranks exchange in its forward and backward pass is `expected`."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    strategy = FullyShardedStrategy(world, 60.0, DistributedConfig(**options))
    strategy._device_mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    strategy.precision_plugin = MixedPrecision(precision, "cpu") if "mixed" in precision else PrecisionPlugin()
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")], LightningEnvironment()
    strategy.cluster_environment.set_global_rank(rank)
    for make in (OwnWeights, Decoder):
        whole, generator = built(make), torch.get_rng_state()
        decoder = built(make, strategy)
        for name, first in decoder.state_dict().items():
            gathered = first.full_tensor() if isinstance(first, DTensor) else first
            assert torch.equal(gathered, whole.state_dict()[name]), name
        assert rank or torch.equal(torch.get_rng_state(), generator)
    assert devices == ["cpu", "cpu", "cpu", "meta"]  # ours has no memory before it is sharded
    strategy.on_train_start()
    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    assert len(backends) > 1 and {each.options._timeout for each in backends} == {timedelta(seconds=60)}
    angles = []
    decoder.layers[0].register_forward_pre_hook(lambda _, args: angles.append(args[1].cos.dtype))
    ids = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(0))
    with Collectives() as collectives, strategy.precision_plugin.forward_context():
        decoder(ids, labels=ids).total.backward()
    assert collectives.seen == expected
    assert angles == [torch.float32]
    assert {p.dtype for p in decoder.parameters()} == {p.grad.dtype for p in decoder.parameters()} == {torch.float32}
    whole(ids, labels=ids).total.backward()
    optimizers = [build_optimizer(model, OptimizerConfig(name="muon", lr=1e-2), matrix_rows(model.config))
                  for model in (whole, decoder)]  # fmt: skip
    for optimizer in optimizers:
        optimizer.step()
    strategy.optimizers, strategy.model = optimizers[1:], decoder
    strategy._lightning_module, strategy._checkpoint_io = decoder, FolderCheckpointIO()
    save_and_load(strategy, Path(rendezvous).with_name("saved"))
    if precision == "32-true":
        full = {name: p.full_tensor() for name, p in decoder.named_parameters()}
        torch.testing.assert_close(full, dict(whole.named_parameters()), rtol=0, atol=1e-4)
    dist.barrier()
    dist.destroy_process_group()


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("precision, options, expected", [
    ("bf16-mixed", {}, {("allgather_base", BF16, 2): 5, ("reduce_scatter_base", FP32, 2): 3}),
    ("bf16-mixed", {"reduce_dtype": "bf16"}, {("allgather_base", BF16, 2): 5, ("reduce_scatter_base", BF16, 2): 3}),
    ("32-true", {}, {("allgather_base", FP32, 2): 5, ("reduce_scatter_base", FP32, 2): 3}),
], ids=["half", "summed in half", "whole"])  # fmt: skip
def test_shards_exchange_what_the_options_say(tmp_path, precision, options, expected):
    """Two blocks and the rest: weights of a block are gathered twice, those of the rest once."""
    in_ranks(tmp_path, 2, shard_on_a_rank, str(tmp_path / "rendezvous"), 2, precision, options, expected)


@pytest.mark.slow
def test_what_is_rounded_to_bf16_trains_as_far_as_bf16_goes(workplace, alone):
    """Sums of gradients over replicas, which are rounded indeed; weights and activations of shards."""
    names = ["train/loss", "optim/grad_norm"]
    _, run = train(workplace, "bf16-sums", "ddp-whole", **{"trainer.distributed": {"reduce_dtype": "bf16"}})
    rounded, whole = curves(run, names), curves(alone["adamw"][0], names)
    assert rounded == pytest.approx(whole, rel=1e-2) and rounded != pytest.approx(whole, rel=TOLERANCE)
    half = {"trainer.precision": "bf16-mixed", "trainer.max_steps": 7}
    one, shards = (curves(train(workplace, f"half-{division}", division, **half)[1], ["train/loss", "val/loss"])
                   for division in ("one", "fsdp2-whole"))  # fmt: skip
    assert shards == pytest.approx(one, rel=1e-3)


def shapes(file: Path) -> dict[str, tuple] | None:
    if file.suffix != ".safetensors":
        return None
    return {key: (tensor.shape, tensor.dtype) for key, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_checkpoint_resumes_under_every_strategy(workplace, alone, optimizer):
    """SIGTERM to one rank every second step, and on under another strategy: all six changes, and the curve of a run
    that was never stopped, though losses that were not logged yet cross every stop."""
    order = ["one", "ddp-whole", "fsdp2", "one", "fsdp2", "ddp-whole", "one"]
    for index, division in enumerate(order):
        step, rank = 2 * index + 1, index % 2 if division != "one" else 0
        last = index == len(order) - 1
        stop = equipment("recorder.KillAt", signal_name="SIGTERM", hook="on_train_batch_start", step=step, rank=rank)
        changes = {"trainer.keep_checkpoints": 20, "trainer.log_interval": 7, **OPTIMIZERS[optimizer]}
        done, run = train(workplace, f"relay-{optimizer}", division, *([] if last else [stop]),
                          expect=0 if last else 75, **changes)  # fmt: skip
        if not last:
            assert len(complaints(done.stderr)) == 1 and f"stopped after step {step + 1} " in done.stderr
    one, samples = alone[optimizer]
    reference, logged = curves(one), curves(run)
    assert {step for step, _ in logged} == {7, 14} and not (workplace / "checkpoints" / f"{run.name}-2").exists()
    counted = {step: sum(token % 3 > 0 for row in rows for token in row[1:]) for step, rows in samples.items()}
    for (step, name), value in logged.items():
        steps = range(step - 6, step + 1) if name == "train/loss" else [step]  # since the last log line, per token
        want = sum(reference[s, name] * counted[s] for s in steps) / sum(counted[s] for s in steps)
        assert value == pytest.approx(want, rel=TOLERANCE), (step, name)
    stretches = [stretch["step"] for stretch in run.read("run.json")["stretches"]]
    assert stretches == [0, 2, 4, 6, 8, 10, 12]  # each resumed from where the one before it stopped, and says so
    folders = [run.path / f"step-{step:08d}" for step in (2, 4, 6, 14)]
    made = [{path.name: shapes(path) for path in folder.iterdir()} for folder in folders]
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.slow
def test_validate_counts_every_window_once(workplace, alone):
    """As many windows as one process counts, though they do not divide evenly into ranks and batches."""
    windows = ("--data.val_tokens", "416", "--data.micro_batch_size", "3")  # 13 of them
    arguments = ("validate", "--run", "one-adamw", *windows)
    one = lm(workplace, *arguments).stdout
    assert one.startswith("val/loss ")
    for strategy in ("ddp", "fsdp2"):
        two = lm(workplace, *arguments, "--trainer.devices", "2", "--trainer.strategy", strategy).stdout
        assert re.sub(r"[\d.]+", "", two) == re.sub(r"[\d.]+", "", one)
        values = [[float(number) for number in re.findall(r"[\d.]+", text)] for text in (two, one)]
        assert values[0] == pytest.approx(values[1], abs=1.5e-4)  # the last digit that is printed


# ---- one start -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_tasks_of_srun_are_two_ranks_of_one_run(workplace):
    """Without `trainer.devices`, which is one on a CPU; only rank zero speaks."""
    path = write_config(workplace, "srun", **changed("ddp", **TWO_STEPS, **{"trainer.devices": "auto"}))
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "lm", "SLURM_NTASKS": "2",
           "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost",
           "SLURM_NODEID": "0"}  # fmt: skip
    tasks = [start(workplace, "fit", "--config", str(path), SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **job)
             for rank in (0, 1)]  # fmt: skip
    said = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "2 ranks" in said[0] and ", ddp" in said[0] and said[1] == ""
    assert [path.name for path in (workplace / "checkpoints").glob("srun*")] == ["srun"]
    assert Run(workplace / "checkpoints" / "srun").read("run.json")["world_size"] == 2


# ---- one end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("changes", "message"), [
    ({"data.global_batch_tokens": 250}, "250 / 128 = 1.953"),  # before the other rank is started
    ({"model.decoder.vocab_size": 3}, "smaller than the tokenizer's"),  # on both ranks
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_exit_code_2(workplace, changes, message):
    done, run = train(workplace, "wrong", "ddp", expect=2, **changes)
    lines = complaints(done.stderr)
    assert len(lines) == 1 and lines[0].startswith("lm fit: ") and message in lines[0]
    assert not run.path.exists() and processes_of(workplace) == []


@pytest.mark.slow
def test_a_signal_to_the_process_group_stops_both_with_one_checkpoint(workplace):
    path = write_config(workplace, "group", **changed("ddp", **ENDLESS))
    process = subprocess.Popen([sys.executable, "-m", "lm", "fit", "--config", str(path)], cwd=workplace, text=True,
                               env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    run = Run(workplace / "checkpoints" / "group")
    wait_until((run.path / "metrics.jsonl").exists, process)
    os.killpg(process.pid, signal.SIGTERM)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 75, err
    assert len(complaints(err)) == 1 and "SIGTERM: stopped after step" in err
    assert processes_of(workplace) == [] and len(run.steps()) == 1
    assert run.read("run.json")["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_rank_that_fails_alone_is_named_and_ends_the_training(workplace):
    done, run = train(workplace, "broken", "ddp", FAIL, expect=1)
    assert "shard 7 is gone" in done.stderr and "local rank 1 failed with exit code 1" in done.stderr
    assert len(complaints(done.stderr)) == 2 and processes_of(workplace) == []
    assert run.status() == "failed"
