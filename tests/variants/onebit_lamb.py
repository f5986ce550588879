"""1-bit LAMB: LAMB whose ranks average momentum in one bit an element, in place of gradients.

    torchrun --nproc_per_node=2 tests/variants/onebit_lamb.py --out runs/onebit-lamb

Li et al., arXiv 2104.06069, algorithm 1; constants of microsoft/DeepSpeed, onebit/lamb.py. Its two
stages, g and p are those of onebit_adam.py. In the first stage it is LAMB without bias correction,
with its ratio c within [0.01, 10]; C is a mean of each tensor's ratios:

    c = ||w|| / ||u||                       C = 0.9 C + 0.1 c, from 1 on
    u = p + decay w                         w = w - lr c u

In the second stage C is frozen, as v is. So that the ratio can still follow the gradients, a fresh
variance V, a copy of v, keeps moving, and C is multiplied by a factor f:

    V = b2 V + (1 - b2) g^2
    f = max((sqrt(v) + eps) / (sqrt(V) + eps))
    f = r f + (1 - r)                       r = min(1, ||p|| / ||u||)
    f = f within [0.5, 4], and within 10 % of the former f, which is 1 at first
    w = w - lr C f u

DeepSpeed begins with C = 0, and adapts tensors without decay as well; here their c and C are 1.

What is changed: as in onebit_adam.py, with this optimizer.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import optim  # noqa: E402
import train  # noqa: E402
from tests.variants import onebit_adam  # noqa: E402


class OneBitLAMB(onebit_adam.OneBitAdam):
    """The equations above."""
    # After the first update a list, with a number for each tensor of the group.
    DEFAULTS = onebit_adam.OneBitAdam.DEFAULTS | {"C": 1.0, "f": 1.0}

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for p, state in self.state.items():
            state["fresh"] = torch.zeros_like(p)             # V

    def begin_stage(self, frozen):
        """Begins the first or the second stage of a phase."""
        super().begin_stage(frozen)
        for group in self.param_groups:
            group["f"] = 1.0
        for state in self.state.values():
            state["fresh"].copy_(state["exp_avg_sq"])

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group, in place."""
        b1, b2 = group["betas"]
        torch._foreach_lerp_(m, g, 1 - b1)
        moving = v if self.learns else [self.state[p]["fresh"] for p in w]
        self.move_variance(moving, g, b2)

        d = torch._foreach_sqrt(v)
        torch._foreach_add_(d, group["eps"])
        u = torch._foreach_div(m, d)                         # p
        if not self.learns:
            onebit_adam.bound(u)
        p_norms = optim.norms(u)
        torch._foreach_add_(u, w, alpha=group["weight_decay"])           # u
        u_norms = optim.norms(u)

        if self.learns:
            ratios = self.learn_ratios(group, optim.norms(w), u_norms)
        else:
            ratios = self.frozen_ratios(group, d, moving, p_norms, u_norms)
        torch._foreach_mul_(u, (-group["lr"] * ratios).tolist())
        torch._foreach_add_(w, u)

    def learn_ratios(self, group, w_norms, u_norms):
        """Returns c of each tensor, and moves C towards it."""
        C = u_norms.new_tensor(group["C"])
        if not group["weight_decay"]:
            return C                                         # 1
        c = optim.safe_ratios(w_norms, u_norms).clamp(0.01, 10.0)
        group["C"] = (0.9 * C + 0.1 * c).tolist()
        return c

    def frozen_ratios(self, group, d, V, p_norms, u_norms):
        """Returns C f of each tensor. d: sqrt(v) + eps, which is overwritten."""
        torch._foreach_div_(d, torch._foreach_add(torch._foreach_sqrt(V), group["eps"]))
        f = torch.stack(torch._foreach_max(d))
        r = optim.safe_ratios(p_norms, u_norms).clamp(max=1.0)
        f = (r * f + 1 - r).clamp(0.5, 4.0)
        former = f.new_tensor(group["f"])
        f = f.clamp(0.9 * former, 1.1 * former)
        group["f"] = f.tolist()
        return f.new_tensor(group["C"]) * f


def install():
    """Makes 1-bit LAMB the optimizer of every recipe; its name is in each checkpoint."""
    onebit_adam.install("onebit-lamb", OneBitLAMB)


if __name__ == "__main__":
    install()
    train.main()
