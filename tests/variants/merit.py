"""MERIT: LAMB with a ratio for each element, of maxima in place of 2-norms.

    python tests/variants/merit.py                           # and any flag of train.py
    torchrun --nproc_per_node=2 tests/variants/merit.py --out runs/merit --batch 512

Luo et al., arXiv 2508.20577, as in the authors' code. In large batches, a few large elements make
attention's logits explode. A 2-norm hides them, a maximum does not; and maxima of rows and columns
follow the weights more closely than one maximum of the whole matrix.

    m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
    u = m / (sqrt(v) + eps) + decay w
    a_i = max_j |w_ij| / max_j |u_ij|       of row i
    b_j = max_i |w_ij| / max_i |u_ij|       of column j
    q_ij = max(a_i, b_j, max |w| / max |u|)         1 where a maximum of its row or column is 0
    w = w - lr clamp(q u, -1, 1)

Vectors have one q, max |w| / max |u|, or 1 if either maximum is 0. As published, there is no bias
correction.

What is changed: an entry in optim.OPTIMIZERS, and the default of --optimizer.

A trap: positions beyond a phase's length get no gradients. Such a row has u = decay w, so that
a_i = 1 / decay, and loses a fraction lr of itself in every step; with LAMB it would be
lr decay ||w|| / ||u||. A later phase of longer texts begins with copies of other positions
(train.copy_positions). With --init it keeps the longer positions of that model, which are near 0 by
then.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import optim
from tests.variants import common


class MERIT(optim.Optimizer):
    """MERIT, by the equations above."""

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        common.move_moments(m, v, g, *group["betas"])
        u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
        u.mul_(max_ratios(w, u)).clamp_(-1.0, 1.0)
        w.sub_(u, alpha=group["lr"])


def max_ratios(w, u):
    """Returns q, (R, C) as w and u are, or () for vectors."""
    w = w.abs()
    u = u.abs()
    whole = common.ratio(w.max(), u.max())
    if w.dim() == 1:
        return whole
    row_w, row_u = w.amax(1, True), u.amax(1, True)                      # (R, 1)
    column_w, column_u = w.amax(0, True), u.amax(0, True)                # (1, C)
    q = torch.maximum(row_w / row_u, column_w / column_u).clamp(min=whole)
    # A row or column of zeros has no ratio.
    defined = (row_w > 0) & (row_u > 0) & (column_w > 0) & (column_u > 0)
    return torch.where(defined, q, 1.0)


def install():
    """Makes MERIT the default of --optimizer."""
    common.use_optimizer("merit", MERIT)


if __name__ == "__main__":
    install()
    common.main()
