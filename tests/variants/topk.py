"""Top-k: each rank sends its largest elements, with their places.

    torchrun --nproc_per_node=2 tests/variants/topk.py --out runs/topk

Deep Gradient Compression (Lin et al., arXiv 1712.01887), without its momentum correction, its local
clipping and its first, denser steps. With v_r of rank r, a bucket of n elements, and S_r the places
of its k = FRACTION n largest:

    mean = mean over r of (v_r on S_r, 0 elsewhere)

All ranks get the elements of all by an all-gather, 8 bytes each: so what is sent grows with the
ranks, and from N = 1 / FRACTION ranks on it is more than in fp32. What was not sent stays in v_r;
error feedback is in dist.ErrorFeedback.

What is changed: dist.COMPRESSORS gets a row "topk", which --compression now means where it is not
given.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import numpy as np
import torch

from tests.variants import common

FRACTION = 0.01              # of the elements is sent


def topk(world, value, state):
    """Sends the largest elements: a `mean` of dist.ErrorFeedback."""
    sizes = value.abs()
    k = max(1, int(FRACTION * len(value)))
    # An inf or NaN is among the largest, so that all ranks get it.
    if value.is_cpu:                               # NumPy finds them five times as fast as torch
        largest = np.argpartition(sizes.numpy(), -k)[-k:]
        places = torch.from_numpy(largest)
    else:
        places = sizes.topk(k, sorted=False).indices
    elements = value[places]                                             # (k,)
    value.index_fill_(0, places, 0)

    mean = torch.zeros_like(value)
    all_places = world.all_gather(places.int())                          # (N, k)
    all_elements = world.all_gather(elements)
    for places_of_rank, elements_of_rank in zip(all_places, all_elements):
        mean.index_add_(0, places_of_rank, elements_of_rank, alpha=1 / world.size)
    return mean, state, (world.size - 1) * 8 * k


def install():
    """Makes train.py use it."""
    common.use_compression("topk", topk)
    common.name_run("topk", "bucket_mb")             # k counts in each bucket


if __name__ == "__main__":
    install()
    common.main()
