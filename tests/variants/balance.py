"""Balance: deals examples to the ranks by length, so that all have about as many tokens.

    torchrun --nproc_per_node=2 tests/variants/balance.py --out runs/balance

The padding exchange of Zeng et al., arXiv 2208.08124, in the snake order of the code of Kim et al.,
arXiv 2402.02447. Where lengths differ, all ranks wait for the rank with the long examples. Here the
examples of a step are sorted by length and dealt in snake order, the longest first; 8 examples
go to 3 ranks as

    0 1 2 | 2 1 0 | 0 1

If a rank has one example more than another, the extra one is short. A micro-batch takes examples of
neighbouring lengths, because attention computes equal lengths together. A rank's longest examples
come last, because the backward pass of the last micro-batch hides the all-reduce.

Lengths follow from the numbers of the examples, so ranks need not communicate. Each rank computes
the lengths of all examples in the loader thread, at 10 to 20 us each; every node therefore needs
all shards.

What is changed: data.micro_batches, which leaves the dealing to that thread; data.PretrainingData,
by a subclass that deals; and data.verify, because each rank reads all shards. A step has the
examples of train.py, so results change no more than they do with the number of ranks.
"""
import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np

import data
from tests.variants import common


class Share(NamedTuple):
    """A micro-batch before the examples are dealt."""
    step: int
    global_batch: int
    places: np.ndarray       # of its examples in the step, sorted from the shortest


def shares(step, global_batch, micro_size, rank, size):
    """Returns a rank's micro-batches in a step, a list of Shares."""
    from_longest = np.arange(global_batch)[::-1]
    turn, place = np.divmod(from_longest, size)
    owner = np.where(turn % 2 == 1, size - 1 - place, place)
    mine = np.flatnonzero(owner == rank)
    count = math.ceil(len(mine) / micro_size)
    if count == 0:
        return []                                        # more ranks than examples
    return [Share(step, global_batch, places) for places in np.array_split(mine, count)]


@functools.lru_cache(maxsize=1)                          # all micro-batches of a step use it
def ordered(dataset, step, global_batch):
    """Returns the numbers of a step's examples (global_batch,), the shortest first."""
    indices = np.arange(step * global_batch, (step + 1) * global_batch)
    lengths = [dataset.length(spans) for spans in dataset.spans(indices)]
    return indices[np.argsort(lengths, kind="stable")]


class BalancedData(data.PretrainingData):
    """PretrainingData whose examples are dealt to the ranks by length."""

    def batch(self, share):
        """Returns the Batch of a Share."""
        return super().batch(ordered(self, share.step, share.global_batch)[share.places])


def install():
    """Makes train.py deal by length. Plain train.py refuses its checkpoints, and vice versa."""
    verify = data.verify
    data.verify = lambda folder, *_: verify(folder)                  # all shards
    data.micro_batches = shares
    data.PretrainingData = BalancedData
    common.name_run("balance")


if __name__ == "__main__":
    install()
    common.main()
