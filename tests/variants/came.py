"""CAME: factored second moments and a confidence, in place of LAMB.

    python tests/variants/came.py --lr-scale 0.125           # and any other flag of train.py
    torchrun --nproc_per_node=2 tests/variants/came.py --lr-scale 0.125 --out runs/came

Luo et al., arXiv 2307.02047, algorithm 2, as in the authors' code (yangluo7/CAME, CAME.py). For a
matrix (R, C), Adam keeps two moments of R x C elements. CAME keeps one, m, and two pairs of row and
column means, R + C elements each. A(r, c) is 1 / sqrt of the matrix that a pair approximates:

    A(r, c) = (r / mean(r))^-1/2 c^-1/2                     r (R, 1), c (1, C): the factors
    r, c = b2 (r, c) + (1 - b2) row and column means of g^2 + 1e-30
    u = g A(r, c)                       u = u / max(1, RMS(u) / d), d = 1
    m = b1 m + (1 - b1) u
    r', c' = b3 (r', c') + (1 - b3) row and column means of (u - m)^2 + 1e-16
    w = w - lr decay w - lr m A(r', c')

Where u strays from its mean m, confidence is low and the step is small. Vectors have a full second
moment and no confidence. As published, there is no bias correction.

What is changed: an entry in optim.OPTIMIZERS, and the default of --optimizer. train.py needs only
what `optim.Optimizer` has, and its checkpoints store any state. Unlike in the paper, b3 follows b2,
since the demo's b2 is 0.98: 1 - b3 is (1 - b2) / 10, as for the paper's 0.999 and 0.9999.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import optim
from tests.variants import common


class CAME(optim.Optimizer):
    """CAME, by the equations above."""
    DEFAULTS = optim.Optimizer.DEFAULTS | {"eps": (1e-30, 1e-16), "d": 1.0}

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for p, state in self.state.items():
            if p.dim() > 1:
                state["exp_avg_sq"] = p.new_zeros(sum(p.shape))          # r, then c: (R + C,)
                state["instability"] = p.new_zeros(sum(p.shape))

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        lr = group["lr"]
        b1, b2 = group["betas"]
        eps1, eps2 = group["eps"]
        b3 = 1 - (1 - b2) / 10
        w.mul_(1 - lr * group["weight_decay"])           # decoupled, as in AdamW
        u = g * moved_factors(v, g.square() + eps1, b2)
        rms = u.square().mean().sqrt()
        u /= (rms / group["d"]).clamp(min=1)
        m.lerp_(u, 1 - b1)                               # lerp(a, b, x) = a + x (b - a)
        step = m
        if w.dim() > 1:
            strays = (u - m).square() + eps2
            step = m * moved_factors(self.state[w]["instability"], strays, b3)
        w.sub_(step, alpha=lr)


def moved_factors(means, x, b):
    """Moves `means` towards x, in place, and returns A of them, of x's shape. means: (R + C,),
    the running row and column means of a matrix x (R, C); for a vector x, like x."""
    if x.dim() == 1:
        return means.lerp_(x, 1 - b).rsqrt()
    r, c = means.split(x.shape)                          # views, so the state itself moves
    r.lerp_(x.mean(1), 1 - b)
    c.lerp_(x.mean(0), 1 - b)
    return (r.mean() / r).sqrt()[:, None] * c.rsqrt()


def install():
    """Makes CAME the default of --optimizer."""
    common.use_optimizer("came", CAME)


if __name__ == "__main__":
    install()
    common.main()
