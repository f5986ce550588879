"""Balance: examples are dealt to the ranks by length, so that each has about as many tokens.

    torchrun --nproc_per_node=2 tests/variants/balance.py --out runs/balance

The padding exchange of Zeng et al., arXiv 2208.08124, in the snake order of the code of Kim et al.,
arXiv 2402.02447. Where lengths differ, all ranks wait for the one whose examples are long. Here
those of a step are sorted by length, then dealt in snake order from the longest on. So 8 examples
go to 3 ranks as

    0 1 2 | 2 1 0 | 0 1

where a rank that has one example more has a short one more. A micro-batch takes neighbours, since
attention computes equal lengths together. The longest of a rank come last, since the backward pass
of the last micro-batch hides the all-reduce.

Lengths follow from the numbers of examples, so ranks need not talk; each computes those of all
examples, at some 10 us each, in the thread that makes batches ahead. So every node needs all
shards.

What is changed: data.micro_batches, which leaves the dealing to that thread; data.PretrainingData,
by a subclass that deals; and data.verify, since each rank reads all shards. A step has the same
examples as in train.py: this changes no more than the number of ranks does.
"""
import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import numpy as np

import data
from tests.variants import common


class Share(NamedTuple):
    """A micro-batch before the examples are dealt."""
    step: int
    global_batch: int
    places: np.ndarray       # of its examples, in the order from the shortest of the step to the
                             # longest


def shares(step, global_batch, micro_size, rank, size):
    """Returns the micro-batches of a rank in a step, each a Share."""
    from_longest = np.arange(global_batch)[::-1]
    turn, place = np.divmod(from_longest, size)
    owner = np.where(turn % 2 == 1, size - 1 - place, place)
    mine = np.flatnonzero(owner == rank)
    count = math.ceil(len(mine) / micro_size)
    if count == 0:
        return []                                        # of more ranks than examples
    return [Share(step, global_batch, places) for places in np.array_split(mine, count)]


@functools.lru_cache(maxsize=1)                          # for the other micro-batches of the step
def ordered(dataset, step, global_batch):
    """Returns the examples of a step, the shortest first (global_batch,)."""
    indices = np.arange(step * global_batch, (step + 1) * global_batch)
    lengths = [dataset.length(spans) for spans in dataset.spans(indices)]
    return indices[np.argsort(lengths, kind="stable")]


class BalancedData(data.PretrainingData):
    """Examples that are dealt by length."""

    def batch(self, share):
        """Returns the Batch of a Share."""
        return super().batch(ordered(self, share.step, share.global_batch)[share.places])


def install():
    """Makes train.py deal by length. Neither takes up a checkpoint of the other."""
    verify = data.verify
    data.verify = lambda folder, rank, size: verify(folder)          # all that is there
    data.micro_batches = shares
    data.PretrainingData = BalancedData
    common.name_run("balance")


if __name__ == "__main__":
    install()
    common.main()
