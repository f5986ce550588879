"""Averages gradients in buckets, but only after backward: the second rung of a ladder to train.py.

    torchrun --nproc_per_node=2 tests/variants/buckets_after.py --out runs/after

Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.2, gradient bucketing: one call
sends many tensors, so its latency is paid once per bucket. one_by_one.py has the ladder and the
time of a step on each rung. Still missing is section 3.2.3, the overlap of backward and the
network.

With buckets, --compression works. It costs as much here as in train.py, but all of it comes after
backward.

What is changed: dist.Reducer, by a subclass that launches no bucket before `finish`. Results are
bit-identical to those of train.py, so each resumes the other's runs.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import dist
from tests.variants import common


class BucketsAfter(dist.Reducer):
    """A Reducer that averages no bucket during backward."""

    def _launch(self):
        """Launches nothing, because `_ready` calls it during backward."""

    def finish(self):
        """Launches all buckets, then waits for them as the parent class does."""
        if self.thread:
            super()._launch()
        super().finish()


def install():
    """Makes train.py average after backward."""
    dist.Reducer = BucketsAfter


if __name__ == "__main__":
    install()
    common.main()
