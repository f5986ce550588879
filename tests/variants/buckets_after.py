"""Gradients averaged in buckets, but only after backward: the second rung of a ladder to train.py.

    torchrun --nproc_per_node=2 tests/variants/buckets_after.py --out runs/after

Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.2, gradient bucketing. Many tensors
are sent in one call, so that its latency is paid once a bucket. The ladder, and what a step takes
on each rung, is in one_by_one.py. What is still missing is section 3.2.3: backward and the network
at the same time.

Since there are buckets, there is --compression: it costs as much here as in train.py, but all of
it comes after backward.

What is changed: dist.Reducer, by a subclass that launches no bucket before `finish`. The results
are the same bits as those of train.py: each takes up a run of the other.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import dist
from tests.variants import common


class BucketsAfter(dist.Reducer):
    """A Reducer that averages no bucket while backward runs."""

    def _launch(self):
        """Launches nothing: `_ready` calls it during backward."""

    def finish(self):
        """Launches all buckets, then waits for them as inherited."""
        if self.thread:
            super()._launch()
        super().finish()


def install():
    """Makes train.py use it."""
    dist.Reducer = BucketsAfter


if __name__ == "__main__":
    install()
    common.main()
