"""Gradients averaged one tensor at a time after backward: the first rung of a ladder to train.py.

    torchrun --nproc_per_node=2 tests/variants/one_by_one.py --out runs/one

The naive solution of Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.1, calls one
all-reduce for each parameter p when backward is done:

    g_p = 1/W sum_r g_rp

The ladder, with the time of a step, where B is the time of backward, n the bytes of all gradients,
b the network's bytes per second, and l the latency of a call:

    1. one_by_one.py       B + T l + 2 (W - 1) / W n / b        T tensors, 158 in BERT base
    2. buckets_after.py    B + K l + 2 (W - 1) / W n / b        K buckets
    3. train.py            about the larger of B and the rest, since both run at once

All three average the same gradients. A step of `mini`, 8 x 128, on two hosts took 729, 636 and 556
ms at 1 Gb/s (bench_network.py). To see this on one machine, set GBPS, see slow_network.py.

What is changed: dist.Reducer, replaced by a class that calls dist.average_gradients. Like
--bucket-mb, it changes results only by rounding: of the norm, and on more than two ranks of the
sums. It therefore resumes runs of train.py, and train.py its runs. Unlike train.py, it does not
stop if a parameter takes no part in the loss.
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch
from torch import nn

import dist
from tests.variants import common


class OneByOne:
    """The parts of a Reducer that train.py uses, without buckets, hooks and threads.

    As there, micro-batches add up in p.grad, which is fp32 and also the gradient of p's master.
    """

    def __init__(self, module, world, compression="none", bucket_mb=2.0, masters=None):
        if compression != "none":
            raise train.ConfigError("one by one, tensors are sent in full: leave out --compression")
        # Check that all ranks are there, see dist.World.
        world.barrier()
        self.module = module
        self.world = world
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        masters = masters or {name: p.detach() for name, p in parameters.items()}
        for tensor in [*module.state_dict().values(), *masters.values()]:
            world.broadcast(tensor)
        for name, p in parameters.items():
            masters[name].grad = torch.zeros_like(masters[name])
            p.grad_dtype = None                    # p.grad may be fp32 where p has 16 bits
            p.grad = masters[name].grad.detach()
        self.flats = [master.grad for master in masters.values()]

    def zero_grad(self, loss_scale=1.0):
        """Begins a step: sets all gradients to 0. loss_scale is unused: nothing is rounded."""
        torch._foreach_zero_(self.flats)

    def finish(self):
        """Averages all gradients; sets `bytes_sent` and `wait_seconds`."""
        on_gpu = self.world.device.type == "cuda"
        if on_gpu:
            # Let backward end first, so that wait_seconds counts the averaging alone.
            torch.cuda.current_stream().synchronize()
            # Check that all ranks are there: NCCL would wait for a rank that died in backward.
            self.world.barrier()
        began = time.perf_counter()
        dist.average_gradients(self.module, self.world)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.wait_seconds = time.perf_counter() - began
        gradient_bytes = sum(flat.nbytes for flat in self.flats)
        self.bytes_sent = 2 * (self.world.size - 1) * gradient_bytes // self.world.size

    def norm(self):
        """Returns the 2-norm of all gradients, as a float; NaN or inf if any element is."""
        return float(nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Does nothing: everything has been sent."""

    def forget(self):
        """Does nothing, like `commit`."""


def install():
    """Makes train.py average one tensor at a time."""
    dist.Reducer = OneByOne


if __name__ == "__main__":
    install()
    common.main()
