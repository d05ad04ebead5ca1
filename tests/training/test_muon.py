"""Muon against torch's own and against singular values; with groups, under a gradient scaler, divided among ranks."""

import math
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import fit, in_ranks

from lm.training.muon import COEFFICIENTS, ROUNDS, Muon, orthogonalize
from lm.training.muon_ranks import assign_owners
from lm.training.optim import AdamW

ALIKE = dict(lr=0.02, weight_decay=0.1)
SETTINGS = dict(**ALIKE, betas=(0.9, 0.95), eps=1e-8, momentum=0.95)
SHAPES = [(24, 16), (16, 24), (16, 16)]


def parameters(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(parameters, seed):
    """Gradients of unequal singular values, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * torch.logspace(-1.5, 0, p.shape[-1])


def groups_of(parameters):
    return [{"params": [p], "kind": "muon", "rows": p.shape[0]} for p in parameters]


# ---- one step -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_it_applies_the_polynomial_to_the_singular_values(rows, columns):
    """Matrices of known singular vectors and values, in a batch whose members differ in size by six orders."""
    generator = torch.Generator().manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(3, rows, 16, dtype=torch.float64, generator=generator))  # (3, rows, 16)
    v, _ = torch.linalg.qr(torch.randn(3, columns, 16, dtype=torch.float64, generator=generator))
    values = torch.logspace(-2.4, 0, 16, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [1e3]])  # (3, 16)
    matrices = u * values[:, None] @ v.mT
    values = values / values.norm(dim=1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        values = a * values + b * values**3 + c * values**5
    assert 0.67 < values.min() and values.max() < 1.21
    torch.testing.assert_close(orthogonalize(matrices), u * values[:, None] @ v.mT, rtol=0, atol=1e-9)
    torch.testing.assert_close(orthogonalize(matrices.float()), (u * values[:, None] @ v.mT).float(), rtol=0, atol=1e-4)


def test_a_matrix_without_a_gradient_stays_where_it_is():
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 8)), torch.zeros(2, 4, 8))


def test_it_steps_as_torchs_muon_does():
    """Within bfloat16's rounding, in which torch computes: over some steps, with momentum, decay and every shape."""
    ours = parameters(*SHAPES)
    theirs = deepcopy(ours)
    start = deepcopy(ours)
    optimizer = Muon(groups_of(ours), **SETTINGS)
    reference = torch.optim.Muon(theirs, **ALIKE, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for seed in range(5):
        for each in (ours, theirs):
            gradients(each, seed)
        optimizer.step()
        reference.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        moved = (other - before).norm()
        assert (mine - other).norm() < 0.01 * moved
        assert moved > 0.5 * 5 * 0.02 * 0.2 * math.sqrt(mine.numel())  # five updates that mostly agree


def test_parts_of_a_fused_matrix_move_as_if_they_were_apart():
    """Heads with gradients of very different size."""
    apart = parameters(*[(8, 16)] * 6)
    fused = [nn.Parameter(torch.cat([p.detach() for p in apart[i : i + 3]])) for i in (0, 3)]
    one = Muon(groups_of(apart), **SETTINGS)
    other = Muon([{"params": fused, "kind": "muon", "rows": 8}], **SETTINGS)
    for seed in range(3):
        gradients(apart, seed)
        for i, p in enumerate(apart):
            p.grad *= 10.0 ** (i - 3)
        for i, p in enumerate(fused):
            p.grad = torch.cat([part.grad for part in apart[3 * i : 3 * i + 3]])
        one.step()
        other.step()
    for i, p in enumerate(fused):
        torch.testing.assert_close(p.data, torch.cat([part.data for part in apart[3 * i : 3 * i + 3]]))


class NoWait(TorchDispatchMode):
    """Refuses to bring a value to the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Muon, AdamW])
def test_a_skipped_step_changes_nothing_and_the_host_does_not_wait(make):
    ours = parameters((24, 16), (16,))
    settings = {name: value for name, value in SETTINGS.items() if make is Muon or name != "momentum"}
    optimizer = make([{"params": ours[:1], "kind": "muon", "rows": 24}, {"params": ours[1:]}], **settings)
    gradients(ours, 1)
    optimizer.step()
    before = deepcopy(([p.detach() for p in ours], optimizer.state_dict()["state"]))
    for p in ours:
        p.grad[:] = torch.nan
    optimizer.skip = torch.tensor(True)
    with NoWait():
        optimizer.step()
    torch.testing.assert_close(([p.detach() for p in ours], optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    gradients(ours, 2)
    optimizer.skip = torch.tensor(False)
    optimizer.step()
    assert all((p != old).any() for p, old in zip(ours, before[0], strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_the_rest_is_adamw_to_the_bit(fused):
    ours = parameters((24, 16), (16,))
    theirs = deepcopy(ours)
    optimizer = Muon([{"params": ours}], **SETTINGS)
    optimizer.param_groups[0]["fused"] = fused
    settings = {name: value for name, value in SETTINGS.items() if name != "momentum"}
    reference = torch.optim.AdamW(theirs, **settings, fused=fused)
    for seed in range(3):
        for each in (ours, theirs):
            gradients(each, seed)
        optimizer.step()
        reference.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(optimizer.state[mine][slot], value) for slot, value in reference.state[other].items())


def test_under_a_gradient_scaler_it_takes_the_same_steps_and_none_from_infinity():
    plain = parameters((24, 16), (16,))
    scaled = deepcopy(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizers = [Muon([{"params": [w], "kind": "muon", "rows": 24}, {"params": [b]}], **SETTINGS)
                  for w, b in (plain, scaled)]  # fmt: skip
    for step in range(3):
        gradients(plain, step)
        optimizers[0].step()
        gradients(scaled, step)
        scaler.scale(torch.zeros(()))  # what a backward pass would have begun with
        for p in scaled:
            p.grad *= scaler.get_scale()
        scaler.unscale_(optimizers[1])  # before clipping
        scaler.step(optimizers[1])
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
    scaled[0].grad = torch.full_like(scaled[0], math.inf)
    scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


# ---- a training -----------------------------------------------------------------------------------------------------
def test_a_group_takes_its_own_rate_through_the_schedule(workplace):
    """An embedding whose rate is next to nothing stays where it began; the rest does not."""
    optimizer = {"name": "muon", "lr": 1e-2, "groups": {"embedding": {"lr": 1e-30, "weight_decay": 0.0}}}
    changes = {"trainer.max_steps": 4, "trainer.checkpoint_interval": 1, "trainer.keep_checkpoints": 9}
    _, run = fit(workplace, **changes, **{"model.optimizer": optimizer})
    first, final = (load_file(run.steps()[step] / "model.safetensors") for step in (1, 4))
    same = {name for name in first if torch.equal(first[name], final[name])}
    assert same == {"model.embed_tokens.weight"}
    assert run.metrics("optim/lr")[0]["optim/lr"] == 5e-3  # the optimizer's own, halfway through the warm-up


# ---- several ranks --------------------------------------------------------------------------------------------------
# Shape: rows. Over three ranks the first one's shards have 6, 6 and 4 rows, and its matrices begin somewhere else; one
# row leaves two ranks without.
MUON_GROUPS = {(16, 20): 4, (24, 16): 24, (1, 16): 1}
COPIES = 4  # parameters of each shape: more matrices than ranks, and not a multiple of them


def several_groups():
    muon = [{"params": parameters(*[shape] * COPIES), "kind": "muon", "rows": rows}
            for shape, rows in MUON_GROUPS.items()]  # fmt: skip
    return [*muon, {"params": parameters(*[(16,)] * COPIES)}]


def take_steps(groups, place=lambda tensor: tensor):
    """Three steps, the second of which is skipped: its gradients are NaN. Returns the optimizer and its parameters."""
    optimizer = Muon(groups, **SETTINGS)
    ours = [p for group in groups for p in group["params"]]
    for seed in range(3):
        whole = [nn.Parameter(torch.empty(p.shape)) for p in ours]
        gradients(whole, seed)
        for p, of in zip(ours, whole, strict=True):
            p.grad = place(of.grad * (torch.nan if seed == 1 else 1))
        optimizer.skip = torch.tensor(seed == 1)
        optimizer.step()
    return optimizer, ours


def steps_of_a_rank(rank: int, world: int, rendezvous: str, weights, state) -> None:
    """The same steps, by ranks with replicas and by ranks with shards; every rank compares what comes out."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    groups = several_groups()
    optimizer, replicas = take_steps(groups)
    torch.testing.assert_close([p.detach() for p in replicas], weights, rtol=0, atol=1e-6)
    kept = [index for index, p in enumerate(replicas) if "momentum_buffer" in optimizer.state[p]]
    numbers = torch.tensor([len(kept)])
    dist.all_reduce(numbers)
    assert numbers.item() == 3 * COPIES and len(kept) < 3 * COPIES  # a rank keeps that of its own matrices alone
    saved = optimizer.gathered_state_dict(lambda place, momentum: momentum.clone())["state"]
    if rank == 0:
        assert saved.keys() == state.keys()
        for index, slots in state.items():
            torch.testing.assert_close(saved[index], slots, rtol=0, atol=1e-6)
    again = Muon(groups, **SETTINGS)
    again.load_state_dict({**again.state_dict(), "state": state})
    assert [index for index, p in enumerate(replicas) if "momentum_buffer" in again.state[p]] == kept

    mesh = init_device_mesh("cpu", (world,))
    groups = several_groups()
    for group in groups:
        group["params"] = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in group["params"]]
    optimizer, shards = take_steps(groups, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    torch.testing.assert_close([p.full_tensor().detach() for p in shards], weights, rtol=0, atol=1e-6)
    adamw = AdamW([{"params": shards}], lr=1.0)
    for adamw.skip in (torch.tensor(True), torch.tensor(False)):
        before = [p.full_tensor().detach() for p in shards]
        with NoWait():
            adamw.step()
        equal = [torch.equal(p.full_tensor(), old) for p, old in zip(shards, before, strict=True)]
        assert all(equal) if adamw.skip else not any(equal)
    for p in shards[: 3 * COPIES]:
        assert optimizer.state[p]["momentum_buffer"].to_local().shape == p.to_local().shape
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_divide_the_matrices_and_step_as_one(tmp_path):
    """Also where a step is skipped, shards are not equal or empty, and matrices do not come out even."""
    optimizer, ours = take_steps(several_groups())
    weights, state = [p.detach() for p in ours], optimizer.state_dict()["state"]
    in_ranks(tmp_path, 3, steps_of_a_rank, 3, str(tmp_path / "rendezvous"), weights, state)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16, 64])
def test_owners_have_as_much_to_do_as_each_other(world):
    """Of a 350M model: gate and up, down, queries with keys and values, output; 24 of each."""
    costs, counts = [8, 4, 3, 2], [24, 24, 24, 24]
    owners = assign_owners(costs, counts, world)
    assert [len(ranks) for ranks in owners] == counts and all(ranks == sorted(ranks) for ranks in owners)
    for ranks in owners:
        shares = [ranks.count(rank) for rank in range(world)]
        assert max(shares) - min(shares) <= 1
    loads = [sum(cost * ranks.count(rank) for cost, ranks in zip(costs, owners, strict=True)) for rank in range(world)]
    assert max(loads) <= sum(loads) / world + max(costs)
