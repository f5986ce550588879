"""Top-k: each rank sends its largest elements, with their places.

    torchrun --nproc_per_node=2 tests/variants/topk.py --out runs/topk

Deep Gradient Compression (Lin et al., arXiv 1712.01887), without its momentum correction, local
clipping and denser first steps. v_r is rank r's bucket with its padding, n elements, and S_r are
the places of its k = FRACTION n largest:

    mean = mean over r of (v_r on S_r, 0 elsewhere)

An all-gather gives every rank's elements to all ranks, at 8 bytes each. The bytes therefore grow
with the number of ranks, and beyond W = 1 / FRACTION ranks exceed those of fp32. Elements that are
not sent are the residual; error feedback is in dist.ErrorFeedback.

What is changed: dist.COMPRESSORS gets an entry "topk", now the default of --compression.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np
import torch

from tests.variants import common

FRACTION = 0.01              # the fraction of elements that is sent


def topk(world, value, state):
    """Sends the largest elements; an `exchange` of dist.ErrorFeedback."""
    sizes = value.abs()
    k = max(1, int(FRACTION * len(value)))
    # An inf or NaN is among the largest, so all ranks get it.
    if value.is_cpu:                               # NumPy finds them five times as fast as torch
        largest = np.argpartition(sizes.numpy(), -k)[-k:]
        places = torch.from_numpy(largest)
    else:
        places = sizes.topk(k, sorted=False).indices
    elements = value[places]                                             # (k,)
    residual = value.index_fill(0, places, 0)

    mean = torch.zeros_like(value)
    all_places = world.all_gather(places.int())                          # (W, k)
    all_elements = world.all_gather(elements)
    for places_of_rank, elements_of_rank in zip(all_places, all_elements):
        mean.index_add_(0, places_of_rank, elements_of_rank, alpha=1 / world.size)
    return mean, residual, state, (world.size - 1) * 8 * k


def install():
    """Makes train.py send the largest elements."""
    common.use_compression("topk", topk)
    common.name_run("topk", "bucket_mb")             # k is counted in each bucket


if __name__ == "__main__":
    install()
    common.main()
