"""Muon: matrices of the blocks step along the nearest orthogonal matrix, the rest by AdamW.

    python tests/variants/muon.py --lr-scale 0.6             # and any other flag of train.py
    torchrun --nproc_per_node=2 tests/variants/muon.py --lr-scale 0.6 --out runs/muon

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. If G = U S V^T is a
singular value decomposition, U V^T is the orthogonal matrix nearest to G. All directions have the
same weight in it, while a few large ones dominate G. The step is scaled as in Liu et al., arXiv
2502.16982: an element moves as far as with AdamW, so both use the same rate. For a matrix w (R, C):

    m = b m + (1 - b) g                     b = 0.95
    d = b m + (1 - b) g                     Nesterov: the gradient once more
    w = w - lr decay w - lr 0.2 sqrt(max(R, C)) newton_schulz(d)

Embeddings, heads and vectors use AdamW at the same rate, with the recipe's betas. Q, K and V are
three matrices in one tensor. Newton-Schulz multiplies in bf16 if --precision auto would choose bf16
on rank 0; otherwise, and with --precision fp32, in fp32. A checkpoint keeps the choice for resumes.

What is changed: an entry of optim.OPTIMIZERS, --optimizer's default, and optim.make_optimizer,
since only names show which matrices belong to the blocks. These have no second moment.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import optim
from tests.variants import common

MOMENTUM = 0.95
# The number of matrices in a tensor, one below the other; 1 if not listed. `up_and_gate` is
# modern.py's.
PARTS = {"qkv": 3, "up_and_gate": 2}


def newton_schulz(g, dtype):
    """Returns approximately U V^T of g = U S V^T (R, C), computed and returned in `dtype`. Five
    steps bring singular values of g / ||g|| above 0.005 to between 0.5 and 1.5: each step maps a
    singular value s to a s + b s^3 + c s^5."""
    a, b, c = 3.4445, -4.7750, 2.0315                    # Jordan's
    x = g.to(dtype)
    if len(g) > g.shape[1]:
        x = x.T                                          # so that x x^T is the smaller product
    x = x / x.norm().clamp(min=1e-7)                     # now no singular value is above 1
    for _ in range(5):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    if len(g) > g.shape[1]:
        x = x.T
    return x


class Muon(optim.Optimizer):
    """The equations above. Options of a group: `parts`, the number of matrices in each of its
    tensors, or 0 for AdamW; `precision`, that of Newton-Schulz."""
    DEFAULTS = optim.Optimizer.DEFAULTS | {"parts": 0, "precision": "fp32"}

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            if group["parts"]:
                for p in group["params"]:
                    self.state[p]["exp_avg_sq"] = p.new_zeros(0)         # Muon has none

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        if not group["parts"]:
            [u] = optim.adam_update(group, [w], [g], [m], [v])
            w.sub_(u, alpha=group["lr"])
            return
        dtype = optim.PRECISIONS[group["precision"]]
        m.lerp_(g, 1 - MOMENTUM)                         # lerp(a, b, x) = a + x (b - a)
        direction = g.lerp(m, MOMENTUM)
        w.mul_(1 - group["lr"] * group["weight_decay"])  # decoupled, as in AdamW
        # The chunks are views, so the weight itself moves.
        for matrix, d in zip(w.chunk(group["parts"]), direction.chunk(group["parts"])):
            rate = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
            matrix.sub_(newton_schulz(d, dtype), alpha=rate)


def groups_of(masters):
    """Returns the optimizer's groups for master weights, {name: tensor}. All matrices decay."""
    precision = optim.choose_precision("auto", next(iter(masters.values())).device)
    if precision == "fp16":
        precision = "fp32"                               # in fp16 small numbers would become 0
    groups = {}
    for name, w in masters.items():
        parts = 0
        if name.startswith("blocks.") and w.dim() == 2:
            parts = PARTS.get(name.split(".")[2], 1)
        decay = 0.01 if w.dim() > 1 else 0.0
        group = {"params": [], "parts": parts, "weight_decay": decay, "precision": precision}
        groups.setdefault((parts, decay), group)["params"].append(w)
    return list(groups.values())


def agree_on_precision(args, world, state):
    """Makes all ranks compute Newton-Schulz in the precision of rank 0, since their CPUs may
    differ, and in fp32 if --precision is fp32. Collective."""
    for group in state.optimizer.param_groups:
        if "precision" in group:
            own = "fp32" if args.precision == "fp32" else group["precision"]
            group["precision"] = world.all_gather_object(own)[0]


def install():
    """Makes Muon the default of --optimizer."""
    make = optim.make_optimizer

    def make_optimizer(name, masters, betas):
        if name != "muon":
            return make(name, masters, betas)
        return Muon(groups_of(masters), betas=betas)

    optim.make_optimizer = make_optimizer
    common.use_optimizer("muon", Muon)
    common.after_build(agree_on_precision)


if __name__ == "__main__":
    install()
    common.main()
