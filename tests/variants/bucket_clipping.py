"""Each bucket clipped before its all-reduce, so that no clipping has to wait for the global norm.

    torchrun --nproc_per_node=2 tests/variants/bucket_clipping.py --out runs/clip

Kim et al., "Breaking MLPerf Training", arXiv 2402.02447. Clipping by the global norm needs all
gradients of all ranks first. With K buckets, rank r instead shrinks each of its own as soon as
backward has filled it:

    g_rb = min(1, c / sqrt(K) / ||g_rb||) g_rb       then averaged over the ranks, as ever

The norm of a mean is at most the mean of the norms, so each averaged bucket has a norm of at most
c / sqrt(K), and all K together one of at most c. (With --compression int8 or onebit, what earlier
steps did not send comes on top.) What differs from clipping by the global norm: a
large bucket is shrunk and the others are not, so the direction changes; and noise of one rank is
shrunk before it could cancel.

What is changed: dist.Reducer, by a subclass that puts the clipping before each bucket's `average`,
in the communication thread. train.py then finds a norm of at most c and shrinks nothing more. It
still computes that norm, for its log and to see an overflow; so the optimizer still waits for the
last bucket here, and what this file shows is the effect on the loss, not the time saved at scale.
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch

import dist
from tests.variants import common


class ClippingReducer(dist.Reducer):
    """A Reducer whose buckets are clipped to c / sqrt(K) each before they are averaged."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        bound = train.CLIP / len(self.buckets) ** 0.5
        for bucket in self.buckets:
            bucket.average = functools.partial(clip_and_average, bucket, bucket.average, bound)


def clip_and_average(bucket, average, bound, loss_scale):
    """Clips a bucket, which is times loss_scale, and averages it; returns the bytes sent."""
    # What is not finite stays so (inf times 0 is NaN), and train.py skips the step
    norm = torch.linalg.vector_norm(bucket.flat)
    bucket.flat.mul_((bound * loss_scale / norm).clamp(max=1.0))
    return average(loss_scale)


def install():
    """Makes train.py use it. Neither takes up a checkpoint of the other."""
    dist.Reducer = ClippingReducer
    # The size of the buckets decides how many there are, K.
    common.name_run("bucket clipping", "bucket_mb")


if __name__ == "__main__":
    install()
    common.main()
