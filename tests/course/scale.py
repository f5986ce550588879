"""What the exercises sharding and profile write. What plan writes is in tests/tools/plan.py."""
from torch.profiler import ProfilerActivity, profile

import optim

# ----- sharding: ZeRO, stage 1, on flat buckets -----

def scatter_mean(world, flat):
    """Returns this rank's part, (n / W,), of the mean of flat (n,) over the W ranks, which W
    divides: a reduce-scatter, by one world.all_to_all. Rank r has part r of W."""
    return world.all_to_all(flat.view(world.size, -1)).mean(0)


class ShardedAdamW:
    """AdamW of a bucket, of which each of W ranks keeps a part: rank r has the moments of part r,
    and steps its weights alone; then all ranks get all weights.

    weights, gradients: flat tensors (n,), where W divides n. All ranks have the same weights; the
    gradients are each rank's own, not averaged.
    """

    def __init__(self, world, weights, gradients, **options):
        """Makes `self.adam`, an optim.AdamW with these options, of this rank's part of the weights
        alone: a view, so that its step changes the bucket itself."""
        self.world = world
        self.weights = weights
        self.gradients = gradients
        self.part = weights.chunk(world.size)[world.rank]
        self.adam = optim.AdamW([self.part], **options)

    def step(self):
        """Applies one update by the mean of all gradients. Then all weights, changed in place, are
        the same on all ranks again. Collective."""
        self.part.grad = scatter_mean(self.world, self.gradients)
        self.adam.step()
        self.weights.copy_(self.world.all_gather(self.part).flatten())


# ----- profile: where does a step go? -----

def operations(step):
    """Returns {name: (calls, seconds)} of what torch.profiler finds on the CPU in step(). Seconds
    are an operation's own, without those of operations that it calls: so they can be added up. It
    calls step() twice, and profiles the second call, since the first one also prepares much."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return {event.key: (event.count, 1e-6 * event.self_cpu_time_total)
            for event in found.key_averages()}


def starts(step):
    """Returns how many operations ("aten::...") Python starts in step(): not those that another
    operation calls. A GPU starts about a kernel for each."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    count = 0
    for event in found.events():
        parent = getattr(event.cpu_parent, "name", "")
        count += event.name.startswith("aten::") and not parent.startswith("aten::")
    return count
