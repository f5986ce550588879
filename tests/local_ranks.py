"""Ranks that are threads of one process: to look into in a notebook or with pdb, and for tests.

What does each rank hold after an all-to-all? And the assertion: on its way nothing is lost.

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

To stop in a rank, write `if world.rank == 0: breakpoint()` in the function, and set
local_ranks.SECONDS = None before: then the others wait as long as you look. After an error, which
is that of the rank itself, pdb.pm() shows where it happened.

Threads share what processes do not:

- torch.manual_seed, and all that is set in a module. So draw by a torch.Generator of the rank.
- The arguments that on_threads passes on: they are the same objects on all ranks, no copies.
- torch.set_num_threads: a thread begins with what was set last, in any thread. The ranks set 1.

As with Gloo, a rank is in one collective at a time. While the communication thread of a Reducer
averages, from backward to Reducer.finish, the main thread calls none, such as World.sum.
"""
import copy
import functools
import threading

import torch
from torch import distributed

import dist

SECONDS = 10                 # that a rank waits for the others in a collective; None: for ever


class Group(threading.Barrier):
    """Where the ranks of a group meet, and show each other what they give."""

    def __init__(self, size):
        super().__init__(size, timeout=SECONDS)
        self.given = [None] * size                             # by each rank: (call, value)


class LocalWorld(dist.World):
    """A rank that is a thread, on the CPU. `group` is its Group."""

    @torch.no_grad()                               # torch, too, overwrites what requires a gradient
    def _run(self, collective, own, *sent, group_src=0, group_dst=0):
        """Does what this collective of torch does. Raises RankLost if a rank fails or does not
        come, and DistError, on all, if ranks call different collectives.

        Sums are in order of rank: all have the same bits. (Gloo's are others on three ranks.)"""
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
        else:
            result = functools.reduce(torch.add, values)

        self._wait(call)                           # until all have read, since `own` may be a value
        if collective is distributed.all_gather_object:
            own[:] = result
        elif collective is not distributed.reduce or self.rank == group_dst:
            own.copy_(result)

    def _wait(self, call):
        """Returns when all ranks of the group are here."""
        try:
            self.group.wait()
        except threading.BrokenBarrierError:
            raise dist.RankLost(f"a rank failed, or did not come within {SECONDS} s; rank "
                                f"{self.rank} of {self.size} waited for it in {call}")


def local_worlds(size, local_size=None):
    """Returns (the LocalWorld of each rank, all Groups). local_size: ranks of a node; if there are
    several nodes, each world has two levels, as of dist.two_levels."""
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
    """Returns what function(world, *arguments) returned on each rank, in order of rank: what
    tests.ranks.run_ranks does, on threads. Raises the error of the rank that failed first."""
    worlds, groups = local_worlds(size, local_size)
    outcomes = [None] * size
    errors = []                                    # the first is no consequence of another

    def run(world):
        torch.set_num_threads(1)                   # as on the ranks of run_ranks: the same bits
        try:
            outcomes[world.rank] = function(world, *arguments)
        except BaseException as error:             # pytest.fail's, too
            errors.append(error)
            for group in groups:                   # nobody shall wait for this rank
                group.abort()

    # Daemons: Ctrl-C in a notebook does not wait for them.
    threads = [threading.Thread(target=run, args=[world], daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outcomes
