"""Slow momentum: each rank steps alone, and a momentum that forgets slowly keeps them together.

    torchrun --nproc_per_node=2 tests/variants/slow_momentum.py --lr-scale 0.2 --out runs/slow

Iacob et al., MT-DAO, arXiv 2510.05361: in K local steps Adam's momentum forgets what the ranks last
agreed on (0.9^32 = 0.03), so each follows its own noise. A second momentum with a longer memory
does not. On rank r, with its own gradient g and what it holds of m, s and v:

    m = b1 m + (1 - b1) g       s = b3 s + (1 - b3) g       v = b2 v + (1 - b2) g^2
    u = (1 - a) m / (1 - b1^t) + a s / (1 - b3^t)
    w = w - lr (u / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    every K steps:      w and s become their means over the ranks; m and v stay local

The numerator as a convex combination is the paper's, by a summary of it; the paper also takes the
gradient in place of the fast momentum, and ADOPT in place of Adam. That m and v stay local, the
bias corrections and the constants are ours: with a = 0 and K = 1 on one rank this is AdamW.

What is changed: an entry of optim.OPTIMIZERS; dist.Reducer, by one that leaves gradients where they
are. Before train.py evaluates or saves, w and s become their means over the ranks, and in a save m
and v as well, in the run that goes on, too. So the bits after that depend on which steps were
evaluated and saved; and what resumes, on as many ranks, equals the run that saved there.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import dist  # noqa: E402
import optim  # noqa: E402
import train  # noqa: E402
from tests.variants.compressors import dense_list  # noqa: E402
from tests.variants.synchronised import LocalReducer, agree_before_use  # noqa: E402

PERIOD = 32                  # K
SLOW = 0.99                  # b3
WEIGHT = 0.5                 # a


class SlowMomentum(optim.Optimizer):
    """The equations above. `connect` sets `world` and `reducer`, which counts the bytes sent."""

    def add_param_group(self, group):
        """Adds parameters, with s."""
        super().add_param_group(group)
        for p in group["params"]:
            self.state[p]["slow"] = torch.zeros_like(p)

    def connect(self, world, reducer):
        """Takes what the optimizer needs to average over the ranks."""
        self.world = world
        self.reducer = reducer

    def _update(self, group, w, g, m, v):
        b1, b2 = group["betas"]
        lr = group["lr"]
        t = group["step"]
        s = [self.state[p]["slow"] for p in w]
        optim.move_moments(m, v, g, b1, b2)
        torch._foreach_lerp_(s, g, 1 - SLOW)

        u = torch._foreach_mul(m, (1 - WEIGHT) / (1 - b1 ** t))
        torch._foreach_add_(u, s, alpha=WEIGHT / (1 - SLOW ** t))
        # From here on as AdamW.
        d = optim.corrected_roots(v, t, b2, group["eps"])
        torch._foreach_mul_(w, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(w, u, d, value=-lr)

    def step(self):
        """Applies one update, in place. Collective in every K-th step."""
        super().step()
        if self.param_groups[0]["step"] % PERIOD == 0:
            self.agree()

    @torch.no_grad()
    def agree(self):
        """Makes w and s those of all ranks. Collective."""
        self.average([p for group in self.param_groups for p in group["params"]])
        self.average([state["slow"] for state in self.state.values()])

    def average(self, tensors):
        """Replaces tensors by their means over the ranks. Collective."""
        sent, means = dense_list(self.world, tensors)
        torch._foreach_copy_(tensors, means)
        self.reducer.bytes_sent += sent

    @torch.no_grad()
    def state_dict(self):
        """Returns the state, after m and v became those of all ranks. Collective."""
        self.average([state["exp_avg"] for state in self.state.values()])
        self.average([state["exp_avg_sq"] for state in self.state.values()])
        return super().state_dict()


def install():
    """Makes it the optimizer of every recipe. Its name is in each checkpoint, so that neither
    train.py takes up a run of this file nor this file one of train.py."""
    build = train.build
    same_run = train.same_run

    def build_slow(plan, world, checkpoint):
        if plan.optimizer != "slow-momentum" or plan.flags.compression != "none":
            raise train.ConfigError("slow momentum is an optimizer that sends no gradients: leave "
                                    "out --optimizer and --compression")
        state = build(plan, world, checkpoint)
        state.optimizer.connect(world, state.reducer)
        return state

    def same_slow_run(plan, manifest):
        return same_run(plan, manifest) | {"period": PERIOD, "slow": SLOW, "weight": WEIGHT}

    train.build = build_slow
    train.same_run = same_slow_run
    dist.Reducer = LocalReducer
    optim.OPTIMIZERS = optim.OPTIMIZERS | {"slow-momentum": SlowMomentum}
    optim.RECIPES = {name: recipe._replace(optimizer="slow-momentum")
                     for name, recipe in optim.RECIPES.items()}
    agree_before_use(lambda state: state.optimizer.agree())


if __name__ == "__main__":
    install()
    train.main()
