"""Shared by variants whose ranks keep gradients or step alone; neither a variant nor a program.

train.py averages gradients in every step, so all ranks have equal weights after it. Otherwise a
Reducer must leave gradients alone, all ranks must skip the same steps, and the ranks must agree on
weights and moments before a save, because a checkpoint holds those of rank 0.
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
    sent_late = 0            # bytes sent after a step was logged

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket.average = functools.partial(self.average_bucket, bucket, bucket.average)

    def average_bucket(self, bucket, average, loss_scale):
        """Takes the place of bucket.average, here `average`; returns the bytes sent."""
        if self.local:
            return 0
        return average(loss_scale)

    def finish(self):
        """As inherited. Bytes sent between two steps count for the second."""
        super().finish()
        self.bytes_sent += self.sent_late
        self.sent_late = 0

    def norm(self):
        """Returns the norm of the mean gradient, or an estimate of it if gradients are local.
        Collective.

        If noise dominates, the norm of the mean of W gradients is sqrt(W) times smaller than that
        of each. The estimate is therefore the root mean square of the ranks' norms, divided by
        sqrt(W).
        """
        norm = self.own_norm()
        if not self.local:
            return norm
        squares = self.world.sum(square=norm ** 2)["square"]
        return math.sqrt(squares) / self.world.size


def agree_before_save(agree):
    """Makes train.py call agree(state) before it saves and then evaluates; agree makes the weights
    and moments of all ranks equal. The Reducer must be a LocalReducer, which counts the bytes."""
    save = train.save

    def save_equal_weights(args, world, log, state):
        sent_before = state.reducer.bytes_sent
        agree(state)
        state.reducer.sent_late += state.reducer.bytes_sent - sent_before
        optim.copy_to_model(state.masters, state.model)
        save(args, world, log, state)

    train.save = save_equal_weights
