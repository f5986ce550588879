"""A slow network on one machine, without root: collectives that wait as long as a link would take.

    GBPS=0.1 torchrun --nproc_per_node=2 tests/variants/slow_network.py --compression int8
    GBPS=0.1 torchrun --nproc_per_node=2 tests/variants/one_by_one.py

Ranks on one machine exchange gradients through its memory, so fast that nothing in dist.py pays
off. GBPS is the speed of the link between two nodes, in Gb/s. Each collective first sleeps

    seconds = 8 bytes / (10^9 GBPS)         bytes: what this rank sends, for a tensor of n bytes:

    all_reduce      2 (W - 1) / W n         in a ring, see ring.py
    all_to_all      (W - 1) / W n           longer between two ranks, see IN_TURNS
    all_gather      (W - 1) n               the same
    broadcast       n

and then does its work. It sleeps in the thread that calls it. For a bucket that is the
communication thread, so backward runs on meanwhile, as with a real link. No bit changes. Steps of
`mini` on two ranks, with none, int8 and onebit, took 0.98 to 1.06 times as long as over real links
of 1 and 0.1 Gb/s (bench_network.py). The latency of a call is not modelled.

On a single node every rank counts as a node of its own. On several nodes, set GBPS on each; ranks
within a node do not wait for each other (dist.Bucket's `within_node`).

What is changed: the methods of dist.World that send tensors. If GBPS is set, `common.main` calls
install() after the variant's own.
"""
import functools
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

from torch import distributed

import data
import dist

GBPS = math.inf              # set by `install`
SENT = {                     # method of World: what one of W ranks sends, in sizes of its tensor
    "all_reduce": lambda W: 2 * (W - 1) / W,
    "all_to_all": lambda W: (W - 1) / W,
    "all_gather": lambda W: W - 1,
    "broadcast": lambda W: 1,
}
# How much longer these two take over Gloo between two ranks, measured on links of 0.1 Gb/s: the
# ranks send in turns, not both at once, see `ring.pass_on`. Three or more ranks do not.
IN_TURNS = {"all_to_all": 2.0, "all_gather": 1.4}


def slow(name):
    """Returns a method of dist.World that sleeps and then calls the current method `name`."""
    collective = getattr(dist.World, name)

    @functools.wraps(collective)
    def wait_and_call(world, tensor, *arguments, **options):
        # A broadcast over levels calls itself across nodes, and sleeps there.
        in_levels = name == "broadcast" and world.levels and tensor.is_cpu
        if crosses_nodes(world) and not in_levels:
            seconds = 8e-9 * SENT[name](world.size) * tensor.nbytes / GBPS
            if world.size == 2 and tensor.is_cpu:
                seconds *= IN_TURNS.get(name, 1)
            # Before the work, so that a late rank delays all others, too.
            time.sleep(seconds)
        return collective(world, tensor, *arguments, **options)

    return wait_and_call


def crosses_nodes(world):
    """Returns whether the collectives of a World send to other nodes."""
    if world.size == 1:
        return False
    if world.group is None or world.size == int(os.environ["WORLD_SIZE"]):       # all ranks
        return True
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = distributed.get_process_group_ranks(world.group)
    return len({rank // local_size for rank in ranks}) > 1


def install():
    """Makes the network as slow as GBPS. Ends the program with one line if GBPS is missing or
    invalid."""
    global GBPS
    parser = data.Parser()
    parser.add_argument("GBPS", type=data.number_in(float, 1e-6))
    GBPS = parser.parse_args([os.environ.get("GBPS", "")]).GBPS
    slow_down()


def slow_down():
    """Makes the collectives of dist.World sleep first. They read GBPS in each call."""
    for name in SENT:
        setattr(dist.World, name, slow(name))


if __name__ == "__main__":
    install()
    train.main()
