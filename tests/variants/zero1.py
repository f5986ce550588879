"""ZeRO, stage 1: each rank keeps the moments of its own part of the weights, and steps that alone.

    torchrun --nproc_per_node=2 tests/variants/zero1.py --out runs/zero1

Rajbhandari et al., arXiv 1910.02054, section 5.1, P_os. In train.py all ranks have the same
gradients after the all-reduce and the same moments, so all compute the same update. Here each
master belongs to one of the W ranks, its owner:

    rank r:             m, v and w of its own masters move as in train.py
    r = 0 ... W - 1:    rank r broadcasts its own masters to all

The norm, clipping and skipped steps depend on all gradients, which every rank has, so all losses
and weights are those of train.py, bit for bit. A checkpoint holds all moments, gathered on rank 0.
It resumes on any number of ranks, also in train.py, and this program resumes runs of train.py.

m and v take 8 bytes a parameter, of which a rank saves 8 (1 - 1 / W). Masters and gradients, 4
bytes each, and 16-bit weights are not divided; the paper divides masters in this stage, too, and
the rest in later stages. At its start a rank has all moments, as in train.py, to read a checkpoint
into; so has rank 0 during a save.

What it costs:
- W broadcasts after each step: 4 bytes a parameter, even with --compression. Nothing overlaps with
  them. GBPS of slow_network.py does not slow them.
- Masters are dealt out whole, since LAMB's ratio is that of a whole matrix; the paper cuts
  anywhere. The largest part is therefore no smaller than the largest tensor: the token embedding is
  a fifth of base.
- An owner with failing memory broadcasts wrong weights, which all ranks then share. In train.py its
  weights would differ from the others', and `check_weights` would stop the run at the next save.

What is changed: train.restore, after which ranks drop the moments of others; train.save, before
which rank 0 gets them back; and the optimizer's `step`. Any optimizer can be divided like this if
its update of a tensor needs no other tensor, and if nothing but its update reads the moments.
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch
from torch import distributed

from tests.variants import common


def deal_out(masters, size):
    """Returns the owner of each master, {name: rank}; masters: {name: tensor}. Deals the largest
    first, each to the rank with the fewest elements so far."""
    owners = {}
    elements = [0] * size
    for name in sorted(masters, key=lambda name: masters[name].numel(), reverse=True):
        owners[name] = elements.index(min(elements))
        elements[owners[name]] += masters[name].numel()
    return owners


def broadcast(world, tensor, owner):
    """Overwrites a tensor with that of rank `owner`, in place."""
    world._run(distributed.broadcast, tensor, group_src=owner)


def drop_moments(world, state, owners):
    """Replaces the moments of other ranks by zeros of the same shapes, which take the memory of one
    element: train.tensors_of needs the same names and shapes on every rank."""
    for name, master in state.masters.items():
        moments = state.optimizer.state[master]
        for moment, tensor in moments.items():
            if owners[name] != world.rank:
                moments[moment] = tensor.new_zeros(()).expand(tensor.shape)


def gather_moments(world, state, owners):
    """Gives rank 0 the moments of all ranks. Collective."""
    for name, master in state.masters.items():
        moments = state.optimizer.state[master]
        for moment, tensor in moments.items():
            if owners[name] > 0:
                tensor = tensor.contiguous()             # the owner's own; elsewhere new memory
                broadcast(world, tensor, owners[name])
            if world.rank == 0:
                moments[moment] = tensor


def step_and_share(step, world, state, owners):
    """Steps this rank's masters by the optimizer's own `step`, then gives all masters to all ranks.
    Collective."""
    step()
    world.barrier()                                      # before NCCL, see dist.World
    for rank in range(world.size):
        part = [state.masters[name] for name in owners if owners[name] == rank]
        if part:                                         # there may be more ranks than masters
            flat = torch.cat([master.flatten() for master in part])
            broadcast(world, flat, rank)
            torch._foreach_copy_(part, common.split(flat, [master.shape for master in part]))
            # In a ring nobody sends the next rank that one's own part.
            if rank != (world.rank + 1) % world.size:
                state.reducer.bytes_sent += flat.nbytes


def megabytes_of_moments(optimizer):
    """Returns the memory of this rank's moments, in MB."""
    each = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    return 1e-6 * sum(tensor.untyped_storage().nbytes() for tensor in each)


def divide(world, log, state):
    """Divides the optimizer of a State among the ranks; returns the owners, {name: rank}."""
    optimizer = state.optimizer
    owners = deal_out(state.masters, world.size)
    in_train_py = megabytes_of_moments(optimizer)
    drop_moments(world, state, owners)
    log.say(f"moments of {megabytes_of_moments(optimizer):.1f} MB on this rank; in train.py "
            f"{in_train_py:.1f} MB")
    own = {master for name, master in state.masters.items() if owners[name] == world.rank}
    for group in optimizer.param_groups:
        group["params"] = [master for master in group["params"] if master in own]
    optimizer.step = functools.partial(step_and_share, optimizer.step, world, state, owners)
    return owners


def install():
    """Makes train.py divide the optimizer among the ranks."""
    restore = train.restore
    save = train.save
    owners = {}

    def restore_and_divide(args, world, log, state):
        restore(args, world, log, state)
        owners.update(divide(world, log, state))

    def save_all_moments(args, world, log, state):
        gather_moments(world, state, owners)
        save(args, world, log, state)
        drop_moments(world, state, owners)

    train.restore = restore_and_divide
    train.save = save_all_moments


if __name__ == "__main__":
    install()
    common.main()
