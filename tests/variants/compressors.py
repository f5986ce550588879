"""What the variants of compression share: no variant, not a program."""
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import dist  # noqa: E402
import train  # noqa: E402


def split(flat, shapes):
    """Returns the tensors of these shapes that lie in a flat one one after another, as views."""
    views = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].view(shape))
        start = end
    return views


def dense_list(world, tensors):
    """Returns (bytes sent, the means over the ranks of a list of tensors), by one all-reduce."""
    if not tensors:
        return 0, []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sent = dist.dense(world, flat)
    return sent, split(flat, [tensor.shape for tensor in tensors])


def make_default(compression):
    """Makes this --compression of train.py what it is where it is not given (or "none")."""
    parse_arguments = train.parse_arguments

    def parse_with_default(argv=None):
        flags = parse_arguments(argv)
        if flags.compression == "none":
            flags.compression = compression
        return flags

    train.parse_arguments = parse_with_default
