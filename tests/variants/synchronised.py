"""What the variants share in which ranks keep gradients, or step alone: no variant, not a program.

In train.py every step averages the gradients, so all ranks have equal weights after it. Where that
is not so, a Reducer must leave gradients alone, all ranks must skip the same steps, and the ranks
must agree on weights and moments before these are saved: a checkpoint has those of rank 0.
"""
import functools
import math

import dist
import optim
import train


class LocalReducer(dist.Reducer):
    """A Reducer that leaves each rank its own gradients in the steps in which `local` is True."""
    local = True
    own_norm = dist.Reducer.norm         # of this rank's gradients
    sent_late = 0            # bytes that were sent after a step was logged

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket.average = functools.partial(self.average_bucket, bucket, bucket.average)

    def average_bucket(self, bucket, average, loss_scale):
        """Stands in the place of bucket.average, called `average` here; returns the bytes sent."""
        if self.local:
            return 0
        return average(loss_scale)

    def finish(self):
        """As inherited. What is sent between two steps is counted in the second one."""
        super().finish()
        self.bytes_sent += self.sent_late
        self.sent_late = 0

    def norm(self):
        """Returns the norm of the mean gradient, or an estimate of it where gradients are local.

        If noise dominates, the mean of W gradients has a norm sqrt(W) times smaller than each. So
        the estimate is the ranks' root mean square norm over sqrt(W). Collective.
        """
        norm = self.own_norm()
        if not self.local:
            return norm
        squares = self.world.sum(square=norm ** 2)["square"]
        return math.sqrt(squares) / self.world.size


def agree_before_save(agree):
    """Has train.py call agree(state), which makes the weights and moments of all ranks equal,
    before it saves them (and then evaluates). The Reducer must be a LocalReducer, which counts the
    bytes."""
    save = train.save

    def save_equal_weights(args, world, log, state):
        sent_before = state.reducer.bytes_sent
        agree(state)
        state.reducer.sent_late += state.reducer.bytes_sent - sent_before
        optim.copy_to_model(state.masters, state.model)
        save(args, world, log, state)

    train.save = save_equal_weights
