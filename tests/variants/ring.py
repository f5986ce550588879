"""All-reduce, built from send and receive alone: a sum that goes around a ring of ranks.

    torchrun --nproc_per_node=3 tests/variants/ring.py --out runs/ring

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. If
every rank sent its tensor to one rank that adds them up, that rank would receive (W - 1) n
elements. Instead, the tensor is cut into W chunks, and the ranks form a ring in which each sends
only to the next. Here three ranks have the tensors a, b, c; ab0 is the sum of a0 and b0:

                                     rank 0            rank 1            rank 2

                                     a0   a1   a2      b0   b1   b2      c0   c1   c2
    reduce-scatter: each adds the chunk that comes from the left
        0 sends a0, 1 b1, 2 c2       a0   a1   ac2     ab0  b1   b2      c0   bc1  c2
        0 sends ac2, 1 ab0, 2 bc1    a0   abc1 ac2     ab0  b1   abc2    abc0 bc1  c2
    all-gather: each keeps the chunk that comes from the left
        0 sends abc1, 1 abc2, 2 abc0 abc0 abc1 ac2     ab0  abc1 abc2    abc0 bc1  abc2
        0 sends abc0, 1 abc1, 2 abc2 abc0 abc1 abc2    abc0 abc1 abc2    abc0 abc1 abc2

Each half takes W - 1 rounds. In a round, each rank sends a chunk of about n / W elements:

    sent by each rank = 2 (W - 1) / W n          less than 2 n, for any number of ranks

No all-reduce sends less. Each chunk is summed once, by the ranks in turn, and then copied, so all
ranks end with the same bits.

What is changed: dist.World.all_reduce. Other libraries add in a different order, so with more than
two ranks results differ from train.py's by rounding, as with a different number of ranks. Any other
variant can run over the ring: call this install() after the variant's own.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch
from torch import distributed

import dist
from tests.variants import common


def all_reduce(world, tensor):
    """Sums a tensor over all ranks, in place on every rank. Replaces the method of dist.World."""
    world._run(sum_around_ring, tensor)            # raises RankLost; does nothing on a single rank


def sum_around_ring(tensor, group):
    """Sums a tensor over the ranks of a torch group, in place. None means all ranks."""
    rank = distributed.get_rank(group)
    size = distributed.get_world_size(group)
    # Views of W chunks. If W does not divide n, the first chunks have one element more.
    chunks = tensor.view(-1).tensor_split(size)
    # Reduce-scatter: in round k, chunk rank - k goes out and chunk rank - k - 1 comes in.
    for k in range(size - 1):
        outgoing = chunks[(rank - k) % size]
        own = chunks[(rank - k - 1) % size]
        incoming = torch.empty_like(own)
        pass_on(outgoing, incoming, group)
        own += incoming
    # Now this rank has the sum of chunk rank + 1. All-gather: that chunk goes out first.
    for k in range(size - 1):
        outgoing = chunks[(rank + 1 - k) % size]
        own = chunks[(rank - k) % size]
        pass_on(outgoing, own, group)


def pass_on(outgoing, incoming, group):
    """Sends a tensor to the next rank in the ring, and receives one from the previous rank."""
    rank = distributed.get_rank(group)
    size = distributed.get_world_size(group)
    # Both at once: if all ranks sent first, each would wait for the next to receive. The receive
    # comes first in the list, because Gloo then tells the sender that it may begin. Behind our own
    # data that message would be late, and the link between two ranks would work one way at a time.
    work = distributed.batch_isend_irecv([
        distributed.P2POp(distributed.irecv, incoming, group=group, group_peer=(rank - 1) % size),
        distributed.P2POp(distributed.isend, outgoing, group=group, group_peer=(rank + 1) % size)])
    for each in work:
        each.wait()


def install():
    """Makes train.py sum around the ring."""
    dist.World.all_reduce = all_reduce


if __name__ == "__main__":
    install()
    common.main()
