"""One bit for each element: signs, with error feedback, in every step.

    torchrun --nproc_per_node=2 tests/variants/onebit.py --out runs/signs

The compressor of 1-bit Adam (Tang et al., arXiv 2102.02888), in the blocks of Zheng et al. (arXiv
1905.10936): a block of 512 elements sends their signs and one scale, 68 bytes in place of 2,048.
dist.compressed_mean averages the blocks as it does int8's.

Alone, in every step, it learns much less: the demo ends at 5.64 in place of 4.12, because LAMB's v,
a mean of squares, then holds squares of scales. 1-bit Adam and 1-bit LAMB (onebit_adam.py,
onebit_lamb.py) use the same codes, but begin with full gradients and then freeze v.

What is changed: dist.COMPRESSORS gets an entry "onebit", now the default of --compression.
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np
import torch
import torch.nn.functional as F

import dist
from tests.variants import common

# Both tables are copied to the GPU on use; with non_blocking the CPU goes on meanwhile.
POWERS = (1 << torch.arange(7, -1, -1)).byte()               # 128, 64, ..., 1: the bits of a byte
# The eight signs that each of the 256 bytes stands for, (256, 8). A bit of 1 is -1: row 3, or
# 00000011, is 1 1 1 1 1 1 -1 -1.
SIGNS = 1 - 2.0 * ((torch.arange(256).view(256, 1) & POWERS) > 0)


def encode(blocks):
    """Returns the codes of blocks (..., 512), bytes (..., 68): a bit for each element and an fp32
    scale for the block. An inf or NaN is in the scale, so it makes the whole block inf or NaN.

        block_scale = mean |x|      bit = sign of x            C(x) = block_scale or -block_scale

    mean |x| has the smallest error (Karimireddy et al., arXiv 1901.09847). 1-bit Adam has one
    scale, ||x|| / sqrt(n), for a whole tensor. With it the residual of an embedding grows from step
    to step, since most of its rows have hardly any gradient in a step.
    """
    scales = blocks.abs().mean(-1, keepdim=True)
    if blocks.is_cpu:                              # NumPy packs several times faster than torch
        packed = torch.from_numpy(np.packbits(np.signbit(blocks.numpy()), axis=-1))
    else:
        eights = blocks.signbit().unflatten(-1, (-1, 8))
        bits = eights * POWERS.to(blocks.device, non_blocking=True)
        packed = bits.sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)], -1)


def decode(codes):
    """Returns the blocks (..., 512) that codes, bytes (..., 68), stand for."""
    table = SIGNS.to(codes.device, non_blocking=True)
    signs = F.embedding(codes[..., :-4].int(), table)                               # (..., 64, 8)
    return signs.flatten(-2).mul_(codes[..., -4:].view(torch.float32))


# An `exchange` of dist.ErrorFeedback.
onebit = functools.partial(dist.compressed_mean, encode, decode)


def install():
    """Makes train.py send signs."""
    common.use_compression("onebit", onebit)


if __name__ == "__main__":
    install()
    common.main()
