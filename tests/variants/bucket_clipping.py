"""Clips each bucket before its all-reduce, so that clipping does not wait for the global norm.

    torchrun --nproc_per_node=2 tests/variants/bucket_clipping.py --out runs/clip

Kim et al., "Breaking MLPerf Training", arXiv 2402.02447. Clipping to a global norm of c needs all
gradients of all ranks first. With K buckets, rank r instead shrinks its own gradients of bucket b,
as soon as backward has filled it:

    g_rb = min(1, c / sqrt(K) / ||g_rb||) g_rb       then averaged over the ranks, as usual

The norm of a mean is at most the mean of the norms, so each averaged bucket has a norm of at most
c / sqrt(K), and all K together of at most c. With --compression int8, the residuals of earlier
steps come on top. Unlike with the global norm, only large buckets shrink, which changes the
direction of the gradient, and the noise of a rank is shrunk before it can cancel.

What is changed: dist.Reducer, by a subclass that clips before each bucket's `average`, with several
ranks in the communication thread. train.py then finds a norm of at most c and clips no further. It
still computes that norm, for its log and to detect an overflow, so the optimizer still waits for
the last bucket. This file shows the effect on the loss, not the time saved at scale.
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import dist
from tests.variants import common


class ClippingReducer(dist.Reducer):
    """A Reducer that clips each bucket to a norm of c / sqrt(K) before it averages it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        bound = train.CLIP / len(self.buckets) ** 0.5
        for bucket in self.buckets:
            bucket.average = functools.partial(clip_and_average, bucket, bucket.average, bound)


def clip_and_average(bucket, average, bound, loss_scale):
    """Clips and averages a bucket, which is multiplied by loss_scale. Returns the bytes sent."""
    # An inf or NaN leaves a NaN (inf times 0 is NaN), so train.py skips the step.
    norm = torch.linalg.vector_norm(bucket.flat)
    bucket.flat.mul_((bound * loss_scale / norm).clamp(max=1.0))
    return average(loss_scale)


def install():
    """Makes train.py clip each bucket. Plain train.py refuses its checkpoints, and vice versa."""
    dist.Reducer = ClippingReducer
    # The size of the buckets determines their number, K.
    common.name_run("bucket clipping", "bucket_mb")


if __name__ == "__main__":
    install()
    common.main()
