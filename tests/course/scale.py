"""The functions of the exercises sharding and profile; those of plan are in tests/tools/plan.py."""
from torch.profiler import ProfilerActivity, profile

import optim

# ----- sharding: ZeRO, stage 1, on flat buckets -----

def scatter_mean(world, flat):
    """Returns this rank's part (n / W,) of the mean of flat (n,) over the W ranks: a
    reduce-scatter, with one world.all_to_all. Rank r gets part r of W; W divides n."""
    return world.all_to_all(flat.view(world.size, -1)).mean(0)


class ShardedAdamW:
    """AdamW for a bucket, divided over W ranks: rank r has the moments of part r and steps only the
    weights of this part. Then all ranks get all weights.

    weights, gradients: flat tensors (n,), where W divides n. The weights are the same on all ranks;
    the gradients are each rank's own, not averaged.
    """

    def __init__(self, world, weights, gradients, **options):
        """Makes `self.adam`, an optim.AdamW with these options, for only this rank's part of the
        weights. The part is a view, so that a step changes the bucket itself."""
        self.world = world
        self.weights = weights
        self.gradients = gradients
        self.part = weights.chunk(world.size)[world.rank]
        self.adam = optim.AdamW([self.part], **options)

    def step(self):
        """Applies one update with the mean of the gradients over all ranks. Changes all weights in
        place; afterwards they are the same on all ranks again. Collective."""
        self.part.grad = scatter_mean(self.world, self.gradients)
        self.adam.step()
        self.weights.copy_(self.world.all_gather(self.part).flatten())


# ----- profile: where does a step go? -----

def operations(step):
    """Returns {name: (calls, seconds)} of all events that torch.profiler finds on the CPU in
    step(): aten's operations, those of autograd and the optimizer, and named ranges. The seconds
    are an event's own, without those of the events in it, so they can be added up. step() is called
    twice, and the second call is profiled, because the first also prepares much."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return {event.key: (event.count, 1e-6 * event.self_cpu_time_total)
            for event in found.key_averages()}


def starts(step):
    """Returns the number of operations ("aten::...") that Python or autograd starts in step(),
    without those that another operation calls. A GPU runs about one kernel for each."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    count = 0
    for event in found.events():
        parent = getattr(event.cpu_parent, "name", "")
        count += event.name.startswith("aten::") and not parent.startswith("aten::")
    return count
