"""1-bit LAMB: LAMB whose ranks average momentum in one bit an element, in place of gradients.

    torchrun --nproc_per_node=2 tests/variants/onebit_lamb.py --out runs/onebit-lamb

Li et al., arXiv 2104.06069, algorithm 1; constants of microsoft/DeepSpeed, onebit/lamb.py. The two
stages, g and p are those of onebit_adam.py. The first stage is LAMB without bias correction. Its
ratio c is kept within [0.01, 0.3], as in DeepSpeed's settings for BERT; C is a running mean of each
tensor's ratios:

    c = ||w|| / ||u||                       C = 0.9 C + 0.1 c, starting at 1
    u = p + decay w                         w = w - lr c u

In the second stage C is frozen, like v. To let the ratio still follow the gradients, a fresh
variance V, at first a copy of v, keeps moving, and C is multiplied by a factor f:

    V = b2 V + (1 - b2) g^2
    f = max((sqrt(v) + eps) / (sqrt(V) + eps))
    f = r f + (1 - r)                       r = min(1, ||p|| / ||u||)
    f = f within [0.5, 4], and within 10 % of the previous f, which starts at 1
    w = w - lr C f u

DeepSpeed starts with C = 0, and also adapts c of tensors without decay, whose c and C are 1 here.

What is changed: the same as in onebit_adam.py, with this optimizer.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import optim
from tests.variants import common, onebit_adam


class OneBitLAMB(onebit_adam.OneBitAdam):
    """The equations above."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for p, state in self.state.items():
            state["fresh"] = torch.zeros_like(p)             # V
            state["C"] = p.new_tensor(1.0)
            state["f"] = p.new_tensor(1.0)

    def begin_stage(self, frozen):
        """Begins the first or the second stage of a phase."""
        super().begin_stage(frozen)
        for state in self.state.values():
            state["f"].fill_(1.0)
            state["fresh"].copy_(state["exp_avg_sq"])

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        b1, b2 = group["betas"]
        state = self.state[w]
        m.lerp_(g, 1 - b1)
        moving = v if self.learns else state["fresh"]
        self.move_variance(moving, g, b2)

        d = v.sqrt() + group["eps"]
        p = m / d
        if not self.learns:
            onebit_adam.bound(p)
        u = p + group["weight_decay"] * w

        if not self.learns:
            r = common.ratio(p.norm(), u.norm()).clamp(max=1.0)
            f = (d / (moving.sqrt() + group["eps"])).max()
            f = (r * f + 1 - r).clamp(0.5, 4.0)
            state["f"].copy_(f.clamp(0.9 * state["f"], 1.1 * state["f"]))
            ratio = state["C"] * state["f"]
        elif w.dim() > 1:
            ratio = common.ratio(w.norm(), u.norm()).clamp(0.01, optim.LARGEST_RATIO)        # c
            state["C"].lerp_(ratio, 0.1)
        else:
            ratio = state["C"]                               # stays 1
        w.sub_(ratio * u, alpha=group["lr"])


def install():
    """Makes 1-bit LAMB the default of --optimizer; its name is in each checkpoint."""
    onebit_adam.install("onebit-lamb", OneBitLAMB)


if __name__ == "__main__":
    install()
    common.main()
