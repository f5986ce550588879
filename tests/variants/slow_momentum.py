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

What is changed: an entry of optim.OPTIMIZERS. `local_gradients`, which the loop asks before each
backward because of the 1-bit optimizers, says that nothing is to be averaged; what an optimizer
sends by itself it may add to `bytes_sent`. `synchronise` is called before weights are evaluated or
saved, `state_dict` on all ranks: there w and s, and m and v, become their means over the ranks, in
the run that goes on as well. So the bits after that depend on which steps were evaluated and saved;
and what resumes, on as many ranks, equals the run that saved there, bit for bit.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import dist  # noqa: E402
import optim  # noqa: E402
import train  # noqa: E402

PERIOD = 32                  # K
SLOW, WEIGHT = 0.99, 0.5     # b3 and a


class SlowMomentum(optim.Optimizer):
    """The equations above. `world`, a dist.World, is set by `install`."""
    world = dist.World()

    def add_param_group(self, group):
        """Adds parameters, with s."""
        super().add_param_group(group)
        for p in group["params"]:
            self.state[p]["slow"] = torch.zeros_like(p)

    def local_gradients(self, frozen):
        """Returns True: gradients are never averaged."""
        self.bytes_sent = 0                              # the loop adds it to what gradients took
        return True

    def _update(self, group, w, g, m, v):
        (b1, b2), lr, t = group["betas"], group["lr"], group["step"] + 1
        slow, = self._state(w, "slow")
        optim.move_moments(m, v, g, b1, b2)
        optim.move_moments(slow, None, g, SLOW, None)                    # s, without a variance
        u = torch._foreach_mul(m, (1 - WEIGHT) / (1 - b1 ** t))
        torch._foreach_add_(u, slow, alpha=WEIGHT / (1 - SLOW ** t))
        # From here on as AdamW
        d = optim.denominator(torch._foreach_div(v, 1 - b2 ** t), group["eps"])
        torch._foreach_mul_(w, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(w, u, d, value=-lr)

    def step(self):
        """Applies one update, in place. Collective in every K-th step."""
        super().step()
        if self.param_groups[0]["step"] % PERIOD == 0:
            self.synchronise()

    @torch.no_grad()
    def average(self, *lists):
        """Replaces tensors by their means over the ranks, one list at a time. Collective."""
        for tensors in lists:
            sent, means = dist.dense_list(self.world, tensors)
            torch._foreach_copy_(tensors, means)
            self.bytes_sent += sent

    def synchronise(self):
        """Makes w and s those of all ranks. Collective."""
        w = [p for group in self.param_groups for p in group["params"]]
        self.average(w, *self._state(w, "slow"))

    def state_dict(self):
        """Returns the state, after m and v became those of all ranks. Collective."""
        w = [p for group in self.param_groups for p in group["params"]]
        self.average(*self._state(w, "exp_avg", "exp_avg_sq"))
        return super().state_dict()


def install():
    """Makes it the optimizer of every recipe. Its name is in each checkpoint, so that neither
    train.py takes up a run of this file nor this file one of train.py."""
    build, same_run = train.build, train.same_run

    def build_slow(plan, world):
        parts = build(plan, world)
        parts[3].world = world
        return parts

    train.build, optim.OPTIMIZERS = build_slow, optim.OPTIMIZERS | {"slow-momentum": SlowMomentum}
    optim.RECIPES = {name: r._replace(optimizer="slow-momentum")
                     for name, r in optim.RECIPES.items()}
    constants = {"period": PERIOD, "slow": SLOW, "weight": WEIGHT}
    train.same_run = lambda *arguments: same_run(*arguments) | constants


if __name__ == "__main__":
    install()
    train.main()
