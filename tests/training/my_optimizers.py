"""Test equipment: optimizers that a config names, with every kind of state that a class may keep."""

import torch


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675, with plain values in its state and in its groups, as some optimizers have them."""

    def __init__(self, params, lr, beta=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay, rounds=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 1 - group["beta"])
                state["seen"] = state.get("seen", 0) + 1
                rate = group["lr"] / (1 + 0.1 * state["seen"] + 0.01 * group["rounds"])
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * state["mean"].sign())


class Everything(torch.optim.Optimizer):
    """State of several dtypes and shapes, of large matrices only, of later steps, of no parameter, and of the whole."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, sums=torch.zeros(2)))
        self.steps = 0

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        shared = self.state["shared"]
        shared["count"] = shared.get("count", torch.zeros((), dtype=torch.int64)) + 1
        for group in self.param_groups:
            group["sums"] += 1  # in place
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["half"], state["kind"] = torch.zeros_like(p, dtype=torch.bfloat16), "first"
                    state["byte"] = torch.full((3,), 250, dtype=torch.uint8)
                    state["row"] = p.new_zeros(*p.shape[:-1], 1)
                state["half"].mul_(0.9).add_(p.grad.bfloat16())
                state["byte"] += 1
                state["row"].lerp_(p.grad.square().mean(-1, keepdim=True), 0.1)
                update = state["half"].float() + state["row"]
                update += int(state["byte"][0]) * 1e-3 * (state["kind"] == "first")
                if p.numel() >= 2000:
                    update += state.setdefault("large", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if self.steps == 2:
                    state["late"] = p.clone()
                if self.steps > 2:
                    update += state["late"].lerp_(p, 0.1)
                count = self.steps + int(shared["count"]) + int(group["sums"][0])
                p.sub_(update, alpha=group["lr"] / (1 + count % 7))


class Hoarder(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.keep(p)

    def keep(self, p):
        self.state[p]["kept"] = object()


class LateHoarder(torch.optim.SGD):
    count = 0

    def state_dict(self):
        return {**super().state_dict(), **({"queue": object()} if self.count > 1 else {})}

    def step(self, closure=None):
        self.count += 1
