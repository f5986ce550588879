"""GradientFlow's chunks: sends only those parts of a gradient whose norm is large on average.

    torchrun --nproc_per_node=2 tests/variants/gradientflow.py --out runs/chunks

Sun et al., "Optimizing Network Performance for Distributed DNN Training on GPU Clusters",
arXiv 1902.06855, section 3.2, coarse-grained sparse communication (CSC). Each bucket is cut into
chunks of 1,024 elements. The ranks first average the norms of the chunks, a thousandth of the
bytes. All ranks then choose the same chunks, and a plain all-reduce averages them:

    S = the chunks c with the largest mean_r ||v_r[c]||_1      q = mean_r v_r on S, 0 elsewhere

What topk.py sends grows with the number of ranks, since each rank chooses its own elements and must
send their indices. Here a rank sends at most twice what it sends on two ranks. The paper's momentum
correction and dense warm-up are left out; dist.ErrorFeedback adds the error feedback.

What is changed: dist.COMPRESSORS gets an entry "chunk", the default of --compression.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch
import torch.nn.functional as F

from tests.variants import common

CHUNK = 1024                 # elements
FRACTION = 0.05              # of the chunks are sent


def chunk(world, value, state):
    """Averages the chunks with the largest norms; an `exchange` of dist.ErrorFeedback."""
    n = len(value)
    chunks = F.pad(value, (0, -n % CHUNK)).view(-1, CHUNK)               # (chunks, 1024)
    [norms], sent_norms = common.mean_of_each(world, [chunks.abs().sum(1)])
    # An inf or NaN carries over to its chunk's norm, on all ranks; topk puts it first: it is sent.
    count = max(1, round(FRACTION * len(chunks)))
    chosen = norms.topk(count).indices
    [means], sent_chunks = common.mean_of_each(world, [chunks[chosen]])

    residual = chunks.index_fill(0, chosen, 0)
    mean = torch.zeros_like(chunks)
    mean[chosen] = means
    return mean.flatten()[:n], residual.flatten()[:n], state, sent_norms + sent_chunks


def install():
    """Makes train.py send chunks."""
    common.use_compression("chunk", chunk)
    common.name_run("chunk", "bucket_mb")            # chunks compete within a bucket


if __name__ == "__main__":
    install()
    common.main()
