"""Slow momentum: each rank steps alone, and a momentum that forgets slowly keeps them together.

    torchrun --nproc_per_node=2 tests/variants/slow_momentum.py --lr-scale 0.25 --out runs/slow

Iacob et al., MT-DAO, arXiv 2510.05361: within K local steps, Adam's momentum forgets what the ranks
last agreed on (0.9^32 = 0.03), so each rank follows its own noise. A second momentum with a longer
memory does not forget. On rank r, with its own g, m, s and v:

    m = b1 m + (1 - b1) g       s = b3 s + (1 - b3) g       v = b2 v + (1 - b2) g^2
    u = (1 - a) m / (1 - b1^t) + a s / (1 - b3^t)
    w = w - lr (u / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    every K steps:      w and s become their means over the ranks; m and v stay local

The convex combination in the numerator is taken from a summary of the paper. The paper also uses
the gradient in place of the fast momentum, and ADOPT in place of Adam. Local m and v, the bias
corrections and the constants are ours: with a = 0 and K = 1 on one rank this is AdamW.

What is changed: an entry of optim.OPTIMIZERS; dist.Reducer, replaced by one that leaves gradients
local. Before train.py saves, w, s, m and v become their means over the ranks, also in the run that
goes on. The bits after a save therefore depend on which steps were saved, and a resume on the same
number of ranks equals the run that saved there.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import dist
import optim
from tests.variants import common
from tests.variants.synchronised import LocalReducer, agree_before_save

PERIOD = 32                  # K
SLOW = 0.99                  # b3
WEIGHT = 0.5                 # a


class SlowMomentum(optim.Optimizer):
    """The equations above. `connect` sets `world` and `reducer`, which counts the bytes sent."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for p, state in self.state.items():
            state["slow"] = torch.zeros_like(p)                          # s

    def connect(self, world, reducer):
        """Takes what averaging over the ranks needs."""
        self.world = world
        self.reducer = reducer

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        """Applies one update to a parameter w; its moments change in place, too."""
        b1, b2 = group["betas"]
        t = group["step"]
        s = self.state[w]["slow"]
        common.move_moments(m, v, g, b1, b2)
        s.lerp_(g, 1 - SLOW)

        u = (1 - WEIGHT) / (1 - b1 ** t) * m + WEIGHT / (1 - SLOW ** t) * s
        # The rest is AdamW.
        d = (v / (1 - b2 ** t)).sqrt() + group["eps"]
        w.sub_(u / d + group["weight_decay"] * w, alpha=group["lr"])

    def step(self):
        """Applies one update, in place. Collective in every K-th step."""
        super().step()
        if self.param_groups[0]["step"] % PERIOD == 0:
            self.average("slow")

    @torch.no_grad()
    def average(self, *names):
        """Replaces w and the state's entries `names` by their means over the ranks. Collective."""
        tensors = list(self.state)
        for name in names:
            tensors += [state[name] for state in self.state.values()]
        means, sent = common.mean_of_each(self.world, tensors)
        torch._foreach_copy_(tensors, means)
        self.reducer.bytes_sent += sent


def prepare(args, world, state):
    """Connects the optimizer of a new State with its Reducer. Raises train.ConfigError if the flags
    choose another optimizer or a compression."""
    if args.optimizer != "slow-momentum" or args.compression != "none":
        raise train.ConfigError("slow momentum is an optimizer that sends no gradients: leave out "
                                "--optimizer and --compression")
    state.optimizer.connect(world, state.reducer)


def install():
    """Makes slow momentum the default of --optimizer."""
    dist.Reducer = LocalReducer
    common.use_optimizer("slow-momentum", SlowMomentum)
    common.after_build(prepare)
    common.name_run(f"K {PERIOD}, b3 {SLOW}, a {WEIGHT}")
    agree_before_save(lambda state: state.optimizer.average("slow", "exp_avg", "exp_avg_sq"))


if __name__ == "__main__":
    install()
    common.main()
