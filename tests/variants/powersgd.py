"""PowerSGD: sends only two thin factors of each matrix, which an all-reduce can average.

    torchrun --nproc_per_node=2 tests/variants/powersgd.py --out runs/powersgd

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
arXiv 1905.13727, algorithm 1. Rank r of W has a matrix V_r (a, b); the factors are P (a, k) and Q
(b, k). A power iteration makes one step in each training step, and continues from the last Q:

    P = mean_r V_r Q       P = orthonormal(P)       Q = mean_r V_r^T P       mean = P Q^T

Both means are linear in V_r, so an all-reduce gives the factors of the mean gradient. On any number
of ranks, each sends at most twice as much as on two, unlike in topk.py. Error feedback is in
dist.ErrorFeedback. A save drops Q.

What is changed: dist.COMPRESSORS gets an entry "powersgd", now the default of --compression; and
dist.Bucket is replaced by a class that gives the compressor the shapes of its tensors.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

from tests.variants import common
from tests.variants.common import mean_of_each, split

RANK = 4                     # k, the rank of the factors


def powersgd(world, value, state):
    """Sends two factors of each matrix; an `exchange` of dist.ErrorFeedback.

    The next step starts from this step's Q; the first Q is random, the same on every rank (seed 0).
    Vectors, and matrices with 2 k (a + b) >= a b, are sent in full and leave no residual. In the
    code p is P^T (k, a) and q is Q^T (k, b): products with rows read the matrix once. Every rank
    computes the QR decomposition; its bits are equal on equal machines only.
    """
    mean = torch.zeros_like(value)
    matrices = []
    matrix_means = []
    others = []
    other_means = []
    for v, v_mean in zip(split(value, state["shapes"]), split(mean, state["shapes"])):
        if v.dim() == 2 and 2 * RANK * sum(v.shape) < v.numel():
            matrices.append(v)
            matrix_means.append(v_mean)
        else:
            others.append(v)
            other_means.append(v_mean)

    right = state.get("factors") or first_factors(matrices, RANK)
    left, sent_left = mean_of_each(world, [q @ v.T for v, q in zip(matrices, right)])
    left = [torch.linalg.qr(p.T).Q.T.contiguous() for p in left]
    right = [p @ v for v, p in zip(matrices, left)]
    averaged, sent_right = mean_of_each(world, right + others)
    right = averaged[:len(matrices)]

    for v_mean, p, q in zip(matrix_means, left, right):
        torch.mm(p.T, q, out=v_mean)
    for v, v_mean, exact in zip(others, other_means, averaged[len(matrices):]):
        v.copy_(exact)                             # so that nothing is left of it below
        v_mean.copy_(exact)
    residual = value - mean
    return mean, residual, state | {"factors": right}, sent_left + sent_right


def first_factors(matrices, rank):
    """Returns a random q (rank, b) for each matrix (a, b), the same on every rank: torch.randn on
    the CPU, with one generator of seed 0 for all matrices."""
    generator = torch.Generator().manual_seed(0)
    factors = []
    for v in matrices:
        q = torch.randn(rank, v.shape[1], generator=generator)
        factors.append(q.to(v.device))
    return factors


def install():
    """Makes train.py send factors."""
    common.use_compression("powersgd", powersgd)
    common.tell_shapes()
    common.name_run("powersgd", "bucket_mb")         # each bucket draws a first Q


if __name__ == "__main__":
    install()
    common.main()
