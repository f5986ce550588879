"""ZeRO, stage 1: each rank keeps the moments of its own part of the weights, and steps that alone.

    torchrun --nproc_per_node=2 tests/variants/zero1.py --out runs/zero1

Rajbhandari et al., arXiv 1910.02054, section 5.1, P_os. In train.py all ranks have the same
gradients after the all-reduce, the same moments, and so compute the same update. Here every master
has one rank that owns it. With W ranks:

    rank r:             m, v and w of its own masters move as in train.py
    r = 0 ... W - 1:    rank r broadcasts its own masters to all

Norm, clipping and skipped steps go by all gradients, which every rank has. So all numbers are those
of train.py, bit for bit. A checkpoint holds the moments of all ranks, gathered on rank 0: it
resumes on any number of ranks, and by train.py, too, as this program takes up a run of train.py.

Saved are 8 (1 - 1 / W) bytes a parameter, of 8 for m and v. Not saved: the masters and gradients,
4 bytes each, and 16-bit weights (the paper's later stages divide these, too). At its start a rank
has all moments, as in train.py, for a checkpoint to be read into; and rank 0 in a save.

What it costs:
- W broadcasts after each step: 4 bytes a parameter, also with --compression. Nothing hides them.
  (GBPS of slow_network.py does not slow them.)
- Masters are dealt out whole, since LAMB's ratio is of a whole matrix (the paper cuts everywhere).
  So no part is smaller than the largest tensor: the token embedding is a fifth of base.
- An owner whose memory fails broadcasts wrong weights, which all ranks then share. In train.py
  they would differ from those of the others, and `check_weights` would stop the run at the next
  save.

What is changed: train.restore, after which ranks drop the moments of others; train.save, before
which rank 0 gets them back; and `step` of the optimizer. Any optimizer may be so divided whose
update of a tensor asks for no other tensor.
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch
from torch import distributed

from tests.variants import common


def deal_out(masters, size):
    """Returns the owner of each master, {name: rank}; masters: {name: tensor}. The largest come
    first, each to the rank that has the fewest elements."""
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
    """Replaces the moments of other ranks by tensors of their shapes that take no memory: of one
    element, 0. (train.tensors_of wants the same names and shapes on every rank.)"""
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
                tensor = tensor.contiguous()             # of the owner itself; elsewhere new memory
                broadcast(world, tensor, owners[name])
            if world.rank == 0:
                moments[moment] = tensor


def step_and_share(step, world, state, owners):
    """Steps this rank's masters, by the optimizer's own `step`; then gives all ranks all masters.
    Collective."""
    step()
    world.barrier()                                      # before NCCL, see dist.World
    for rank in range(world.size):
        part = [state.masters[name] for name in owners if owners[name] == rank]
        if part:                                         # there may be more ranks than masters
            flat = torch.cat([master.flatten() for master in part])
            broadcast(world, flat, rank)
            torch._foreach_copy_(part, common.split(flat, [master.shape for master in part]))
    # Around a ring: each rank passes on all parts but that of the next one.
    all_bytes = sum(master.nbytes for master in state.masters.values())
    state.reducer.bytes_sent += (world.size - 1) * all_bytes // world.size


def megabytes_of_moments(optimizer):
    """Returns the memory of this rank's moments, MB."""
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
