"""GradientFlow's chunks: only the parts of the gradient that are large on average are sent.

    torchrun --nproc_per_node=2 tests/variants/gradientflow.py --out runs/chunks

Sun et al., "Optimizing Network Performance for Distributed DNN Training on GPU Clusters",
arXiv 1902.06855, section 3.2, coarse-grained sparse communication (CSC). The gradient is cut into
chunks of 1,024 elements. Their norms are averaged first, a thousandth of the bytes, so that all
ranks choose the same chunks, and a plain all-reduce of those is enough:

    S = the chunks c with the largest mean_r ||v_r[c]||_1      q = mean_r v_r on S, 0 elsewhere

What `topk` of dist.py sends grows with the number of ranks, since each chooses elements of its own
and must send their indices; this sends the same on any number. The paper's momentum correction and
its dense warm-up are left out; error feedback, as of all compressors, is in dist.Bucket.

What is changed: dist.COMPRESSORS gets a row "chunk", which --compression now means where it is not
given (or "none"); chunk:0.1 sends a tenth of the chunks, not a twentieth.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import dist  # noqa: E402
import train  # noqa: E402
from tests.variants.compressors import make_default  # noqa: E402

CHUNK = 1024                 # elements
FRACTION = 0.05              # of the chunks is sent


def chunk(world, value, mean, state, fraction):
    """Sends the chunks with the largest norms: a compressor, as dist.py defines it."""
    chunks = value.view(-1, CHUNK)                                       # (chunks, 1024)
    norms = torch.linalg.vector_norm(chunks, ord=1, dim=1)
    sent_norms = dist.dense(world, norms)
    # An inf or NaN makes its chunk's norm one on all ranks, and topk puts that first: it is sent.
    count = max(1, round(fraction * len(chunks)))
    chosen = norms.topk(count).indices
    means = chunks[chosen]
    chunks.index_fill_(0, chosen, 0)
    sent_chunks = dist.dense(world, means)
    mean.zero_().view(-1, CHUNK).index_copy_(0, chosen, means)
    return sent_norms + sent_chunks


def register():
    """Lets dist.py know the compressor."""
    dist.COMPRESSORS["chunk"] = (chunk, FRACTION, CHUNK)


def install():
    """Makes train.py use it. Its checkpoints name the compression, so neither takes the other's."""
    register()
    make_default("chunk")


if __name__ == "__main__":
    install()
    train.main()
