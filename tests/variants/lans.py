r"""LANS: LAMB with a Nesterov term and normalised gradients, and its recipe for batches of 96K.

    python tests/variants/lans.py                            # and any flag of train.py
    torchrun --nproc_per_node=8 tests/variants/lans.py --data shards/wiki --model large \
        --recipe lans-96k

Zheng et al., arXiv 2006.13484, algorithm 2; its kernel is in dmlc/gluon-nlp. All tensors have
ratios, including those without decay. Ratios and 1 / ||g|| are 1 where a norm is 0; the kernel
divides by ||g|| + eps instead.

    g = g / ||g||                           so that its scale does not matter
    m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
    d = sqrt(v / (1 - b2^t)) + eps
    r = (m / (1 - b1^t)) / d + decay w      from the running mean
    s = g / d + decay w                     from the gradient alone
    w = w - lr (b1 (||w|| / ||r||) r + (1 - b1) (||w|| / ||s||) s)

What is changed: an entry in optim.OPTIMIZERS, and the default of --optimizer; a recipe "lans-96k"
in optim.RECIPES; and optim.learning_rate, because that recipe's rate holds between growth and
decay.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import optim
from tests.variants import common


@dataclasses.dataclass
class HoldingPhase(optim.Phase):
    """A phase whose rate grows linearly, holds and decays linearly (section 3.3)."""
    decay_from: float = 0.0        # the rate holds from warmup to this fraction of the phase


# BERT-large in 54 minutes. The batches of 96K and 33K are from the paper, 98,304 and the shape of
# the schedule from gluon-nlp; 33,792 is our guess. The steps, rates and fractions are from memory,
# not checked.
RECIPE = optim.RECIPES["nvidia-64k"] | {
    "optimizer": "lans",
    "phases": [
        HoldingPhase(128, 98304, 3519, lr=6.75e-3, warmup=0.4265, decay_from=0.7),
        HoldingPhase(512, 33792, 782, lr=5e-3, warmup=0.192, decay_from=0.3),
    ]}


class LANS(optim.Optimizer):
    """LANS, by the equations above."""

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        b1, b2 = group["betas"]
        t = group["step"]
        decay = group["weight_decay"]

        g_norm = g.norm()
        unit_g = g * common.ratio(torch.ones_like(g_norm), g_norm)
        common.move_moments(m, v, unit_g, b1, b2)
        d = (v / (1 - b2 ** t)).sqrt() + group["eps"]
        r = m / (1 - b1 ** t) / d + decay * w
        s = unit_g / d + decay * w

        # Both ratios use w from before the step.
        w_norm = w.norm()
        r.mul_(b1 * common.ratio(w_norm, r.norm()))
        s.mul_((1 - b1) * common.ratio(w_norm, s.norm()))
        w.sub_(r + s, alpha=group["lr"])


of_other_phases = optim.learning_rate


def learning_rate(done, phase):
    """Returns the learning rate as optim.learning_rate does; for a HoldingPhase, with the hold."""
    if not isinstance(phase, HoldingPhase):
        return of_other_phases(done, phase)
    return phase.lr * min(done / phase.warmup, 1, (1 - done) / (1 - phase.decay_from))


def install():
    """Makes LANS the default of --optimizer and adds its recipe."""
    optim.learning_rate = learning_rate
    common.use_optimizer("lans", LANS)
    optim.RECIPES = optim.RECIPES | {"lans-96k": RECIPE}


if __name__ == "__main__":
    install()
    common.main()
