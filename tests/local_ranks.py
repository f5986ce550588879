"""Runs ranks as threads of one process, for notebooks, pdb and tests.

This example shows what each rank holds after an all-to-all, and asserts that nothing is lost:

    >>> def exchange(world):
    ...     rows = torch.tensor([0.0, 1.0]) + 10 * world.rank        # row r is for rank r
    ...     received = world.all_to_all(rows)
    ...     before = world.sum(x=float(rows.sum()))
    ...     assert before == world.sum(x=float(received.sum()))
    ...     return f"gave {rows.tolist()}, holds {received.tolist()}"
    >>> for rank, text in enumerate(on_threads(exchange, 2)):
    ...     print(f"rank {rank} {text}")
    rank 0 gave [0.0, 1.0], holds [0.0, 10.0]
    rank 1 gave [10.0, 11.0], holds [1.0, 11.0]

To stop in a rank, write `if world.rank == 0: breakpoint()` in the function. Before the call, set
local_ranks.SECONDS = None: the other ranks then wait as long as you look. on_threads raises the
rank's own error, so pdb.pm() shows where it happened.

Unlike processes, threads share:

- torch.manual_seed and everything that is set in a module. Draw random numbers from a
  torch.Generator of the rank instead.
- The arguments that on_threads passes on: all ranks get the same objects, not copies.
- torch.set_num_threads: a new thread begins with the last number set, in whatever thread. The ranks
  set 1.

As with Gloo, a rank takes part in one collective at a time. From backward to Reducer.finish, while
a Reducer's communication thread averages, the main thread must call no collective, such as
World.sum.
"""
import copy
import functools
import threading

import torch
from torch import distributed

import dist

SECONDS = 10                 # how long a rank waits for the others in a collective; None: forever


class Group(threading.Barrier):
    """Where the ranks of a group meet and show each other their values."""

    def __init__(self, size):
        super().__init__(size, timeout=SECONDS)
        self.given = [None] * size                             # each rank's (call, value)


class LocalWorld(dist.World):
    """The World of a rank that is a thread, on the CPU. `group` is its Group."""

    @torch.no_grad()                               # torch, too, overwrites trainable tensors
    def _run(self, collective, own, *sent, group_src=0):
        """Does what torch's collective does. Raises RankLost if a rank fails or does not come in
        time, and DistError on all ranks if they call different collectives.

        Sums are in order of rank, so all ranks have the same bits; on three ranks Gloo's differ."""
        if self.size == 1:
            return
        call = f"{collective.__name__} {list(getattr(own, 'shape', []))}"
        self.group.given[self.rank] = call, sent[-1] if sent else own
        self._wait(call)
        calls, values = zip(*self.group.given)
        if len(set(calls)) > 1:
            raise dist.DistError(f"ranks 0, 1, ... call different collectives: {', '.join(calls)}")

        if collective is distributed.all_gather_object:
            result = copy.deepcopy(values)
        elif collective is distributed.broadcast:
            result = values[group_src].clone()
        elif collective is distributed.all_to_all_single:
            result = torch.stack([rows[self.rank] for rows in values])
        elif collective is dist.ALL_GATHER:
            result = torch.cat(values)
        elif collective is distributed.all_reduce:
            result = functools.reduce(torch.add, values)
        else:
            raise NotImplementedError(call)

        self._wait(call)                           # until all have read: `own` may be a value
        if collective is distributed.all_gather_object:
            own[:] = result
        else:
            own.copy_(result)

    def _wait(self, call):
        """Waits for all ranks of the group."""
        try:
            self.group.wait()
        except threading.BrokenBarrierError:
            raise dist.RankLost(f"a rank failed, or did not come within {SECONDS} s; rank "
                                f"{self.rank} of {self.size} waited for it in {call}")


def local_worlds(size, local_size=None):
    """Returns (LocalWorlds in order of rank, all Groups). local_size: ranks of a node. With several
    nodes, each world has two levels, as from dist.two_levels."""
    local_size = local_size or size
    nodes = size // local_size
    everyone = Group(size)
    within = [Group(local_size) for _ in range(nodes)]
    across = [Group(nodes) for _ in range(local_size)]
    worlds = []
    for rank in range(size):
        node, local_rank = divmod(rank, local_size)
        worlds.append(LocalWorld(rank, size, local_size, group=everyone))
        if nodes > 1:
            worlds[rank].levels = [LocalWorld(local_rank, local_size, group=within[node]),
                                   LocalWorld(node, nodes, group=across[local_rank])]
    return worlds, [everyone, *within, *across]


def on_threads(function, size, *arguments, local_size=None):
    """Runs function(world, *arguments) on each rank, as tests.ranks.run_ranks does, but on threads.
    Returns the results in order of rank. Raises the error of the rank that failed first."""
    worlds, groups = local_worlds(size, local_size)
    outcomes = [None] * size
    errors = []                                    # the first is not caused by another rank's

    def run(world):
        torch.set_num_threads(1)                   # as run_ranks does, for the same bits
        try:
            outcomes[world.rank] = function(world, *arguments)
        except BaseException as error:             # pytest.fail's, too
            errors.append(error)
            for group in groups:                   # no rank waits for this one any longer
                group.abort()

    # Daemons, because Ctrl-C in a notebook must not wait for them.
    threads = [threading.Thread(target=run, args=[world], daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outcomes
