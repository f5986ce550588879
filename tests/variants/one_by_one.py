"""Gradients averaged one tensor at a time after backward: the first rung of a ladder to train.py.

    torchrun --nproc_per_node=2 tests/variants/one_by_one.py --out runs/one

Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.1, the naive solution. When backward
is done, there is one all-reduce for each parameter p:

    g_p = 1/W sum_r g_rp

The ladder, with what a step takes. B is the time of backward; n are the bytes of all gradients; b
bytes a second go over the network, and each call costs a latency l as well:

    1. one_by_one.py       B + T l + 2 (W - 1) / W n / b        T tensors, 158 of BERT base
    2. buckets_after.py    B + K l + 2 (W - 1) / W n / b        K buckets
    3. train.py            about the larger of B and the rest, since both run at once

All three average the same gradients. A step of `mini`, 8 x 128, on two hosts took 729, 636 and 556
ms at 1 Gb/s (bench_network.py). Set GBPS to see it on one machine, see slow_network.py.

What is changed: dist.Reducer, by a class that has what train.py uses of it, and that calls
dist.average_gradients. Like --bucket-mb it changes results only by rounding, of the norm, and on
more than two ranks of the sums: so it takes up a run of train.py, and train.py one of it. But it
does not notice a parameter that takes no part in the loss, with which train.py stops.
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch
from torch import nn

import dist
from tests.variants import common


class OneByOne:
    """What train.py uses of a Reducer, without buckets, hooks and threads.

    As there, micro-batches add up in p.grad, which is fp32 and the gradient of p's master as well.
    """

    def __init__(self, module, world, compression="none", bucket_mb=2.0, masters=None):
        if compression != "none":
            raise train.ConfigError("one by one, tensors are sent in full: leave out --compression")
        # Are all ranks there?
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
        """Begins a step: all gradients are 0. loss_scale: not used, since nothing is rounded."""
        torch._foreach_zero_(self.flats)

    def finish(self):
        """Averages all gradients. Sets `bytes_sent` and `wait_seconds`."""
        on_gpu = self.world.device.type == "cuda"
        if on_gpu:
            # First let backward end: wait_seconds shall count the averaging alone.
            torch.cuda.current_stream().synchronize()
            # Are all ranks there? NCCL would wait for one that died in backward.
            self.world.barrier()
        began = time.perf_counter()
        dist.average_gradients(self.module, self.world)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.wait_seconds = time.perf_counter() - began
        gradient_bytes = sum(flat.nbytes for flat in self.flats)
        self.bytes_sent = 2 * (self.world.size - 1) * gradient_bytes // self.world.size

    def norm(self):
        """Returns the 2-norm of all gradients, as a float; NaN or inf if any of them is."""
        return float(nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Does nothing: all has been sent."""

    def forget(self):
        """Does nothing, as `commit`."""


def install():
    """Makes train.py use it."""
    dist.Reducer = OneByOne


if __name__ == "__main__":
    install()
    common.main()
