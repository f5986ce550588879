"""0/1 Adam: the variance moves rarely, and the ranks agree rarely, in one bit an element.

    torchrun --nproc_per_node=2 tests/variants/zeroone_adam.py --lr-scale 0.125 --out runs/zeroone

Lu et al., arXiv 2202.06009, algorithm 1; microsoft/DeepSpeed, onebit/zoadam.py. The two stages are
those of onebit_adam.py.

First stage: in every k-th step (`variance_interval`) gradients are averaged exactly and v moves,
with b2^k in place of b2. In the other steps v stays, and m moves with g = average(g_i), in one bit.

Second stage: rank i steps alone, with its own gradient g_i. In every j-th step
(`agreement_interval`) all ranks agree on weights. With A the weights that they last agreed on, and
L the sum of the learning rates since then:

    K = (1 - L decay) A                     A after decay alone
    m = average((K - w) (sqrt(v) + eps) / L)            the mean momentum that led from K to w
    w = K - L m / (sqrt(v) + eps)

The published algorithm differs in three ways:
- v moves with b2 in a k-th step, too. Frozen after n steps, it has moved only about 16 log2(n / 16)
  times, so updates are up to 3 times as long.
- The ranks average -L m. An agreement soon after another, as before an evaluation, then divides the
  residual of the earlier one by its own short L.
- A takes the place of K. Decay then becomes a part of m and acts up to 1 / (1 - b1) times as
  strongly.

What is changed: the same as in onebit_adam.py, with this optimizer. Before train.py saves, the
ranks agree, also in the run that goes on. The bits after a save therefore depend on which steps
were saved, and a resume on the same number of ranks equals the run that saved there. With --hours,
j depends on the numbers of --steps, not on the clock.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

from tests.variants import common, onebit_adam
from tests.variants.synchronised import agree_before_save

VARIANCE_UPDATES = 16        # k doubles after this many updates
AGREEMENT_STEPS = 32678      # of 125,000: j doubles after this many steps


class ZeroOneAdam(onebit_adam.OneBitAdam):
    """The equations above."""
    DEFAULTS = onebit_adam.OneBitAdam.DEFAULTS | {"L": 0.0}
    bounded = False                          # else m would not be a mean of momenta

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for p, state in self.state.items():
            state["agreed"] = p.detach().clone()                         # A

    def connect(self, args, world, state):
        """Takes from a train.State what the optimizer needs. Call it before the first step."""
        super().connect(args, world, state)
        steps = sum(phase.steps for phase in args.phases)
        self.agreement_steps = max(1, steps * AGREEMENT_STEPS // 125000)

    def begin_step(self, frozen):
        """Begins a step; returns whether each rank keeps its own gradients in it."""
        super().begin_step(frozen)
        if self.param_groups[0]["L"] == 0:               # the ranks have equal weights
            for p, state in self.state.items():
                state["agreed"].copy_(p.detach())
        t = self.param_groups[0]["step"] + 1
        self.interval = variance_interval(t, VARIANCE_UPDATES)           # k
        self.learns = not frozen and t % self.interval == 0
        return not self.learns

    def share(self):
        """In the first stage, replaces gradients by one-bit means in the steps in which v stays."""
        if self.learns or self.param_groups[0]["frozen"]:
            return
        if not self.param_groups[0]["magnitudes"]:                       # in the first phase
            self.set_magnitudes()
        self.average([p.grad for p in self.all_params()])

    def move_variance(self, v, g, b2):
        """Moves v as far as `interval` steps would."""
        super().move_variance(v, g, b2 ** self.interval)

    def step(self):
        """Applies one update, in place. Collective if the ranks share anything in this step."""
        super().step()
        for group in self.param_groups:
            if group["frozen"]:
                group["L"] += group["lr"]
        t = self.param_groups[0]["step"]
        if t % agreement_interval(t, self.agreement_steps) == 0:
            self.agree()

    @torch.no_grad()
    def agree(self):
        """Makes the weights of all ranks equal, if they have stepped alone. Collective."""
        L = self.param_groups[0]["L"]
        if L == 0:
            return

        decayed = []                                                     # K
        denominators = []                                                # sqrt(v) + eps
        for group in self.param_groups:
            for p in group["params"]:
                decayed.append(self.state[p]["agreed"] * (1 - L * group["weight_decay"]))
                denominators.append(self.state[p]["exp_avg_sq"].sqrt() + group["eps"])
            group["L"] = 0.0

        momenta = []                                                     # this rank's, then m
        for p, K, d in zip(self.all_params(), decayed, denominators):
            momenta.append((K - p) * d / L)
        self.average(momenta)

        for p, K, d, m in zip(self.all_params(), decayed, denominators, momenta):
            p.copy_(torch.addcdiv(K, m, d, value=-L))                    # K - L m / d
            self.state[p]["exp_avg"].copy_(m)


def variance_interval(t, updates):
    """Returns k at step t = 1, 2, ... of a stage: 1 for `updates` updates, 2 for as many, 4, ..."""
    doublings = ((t - 1) // updates + 1).bit_length() - 1
    return 2 ** doublings


def agreement_interval(t, steps):
    """Returns j at step t = 1, 2, ... of a stage: 1 for `steps` steps, 2 for as many, up to 16."""
    return 2 ** min(4, (t - 1) // steps)


def install():
    """Makes 0/1 Adam the default of --optimizer; its name is in each checkpoint."""
    onebit_adam.install("zeroone-adam", ZeroOneAdam)
    agree_before_save(lambda state: state.optimizer.agree())


if __name__ == "__main__":
    install()
    common.main()
