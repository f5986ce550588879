"""Local steps: each rank steps alone, and each part of the weights is averaged once per period.

    torchrun --nproc_per_node=2 tests/variants/local_steps.py --out runs/local

Tang et al., DreamDDP, arXiv 2502.11058. Local SGD averages all weights after every H steps, and the
network is idle in between. Here each of B parts has its own step in every period of H steps. During
the backward pass of step t, the ranks average only the parts that are due:

    due at step t:      the parts b with floor(b H / B) = t mod H
    w_r = (mean over the ranks of w_r, if due at t, else w_r) - update from rank r's own gradient

Steps send H times fewer bytes, hidden behind backward and spread over min(B, H) steps of a period;
a save sends more. The paper's parts are layers, scheduled by a search over measured times. Ours are
the Reducer's buckets, evenly spread; on a CPU, tiny has 3, mini 8 and base 52.

The paper (from memory, not checked) updates a layer within backward and averages the result at
once. train.py clips by the global norm, which is known only after backward. Here the ranks
therefore average the weights that step t began with, and add the update to the mean: the average is
one step late. The norm is that of a rank's own gradients. Where noise dominates, it is sqrt(N)
times the norm of the mean over N ranks, so train.py clips harder than with averaged gradients.

What is changed: dist.Reducer, by a subclass that averages weights where its parent averages
gradients. Before train.py saves, the weights and moments of all ranks are replaced with their
means, also in the run that goes on. Later bits therefore depend on which steps were saved; a run
that resumes on as many ranks equals the run that saved there, bit for bit.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import dist
import optim
from tests.variants import common
from tests.variants.synchronised import LocalReducer, agree_before_save

PERIOD = 16                  # H


class WeightReducer(LocalReducer):
    """A Reducer that leaves gradients as they are and averages the weights of its buckets in turn.
    `prepare` sets `state`, whose step, masters and model it uses."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.means = {}                                  # of the weights due, {name: tensor}

    def average_bucket(self, bucket, average, loss_scale):
        """Averages a bucket's weights if they are due, and returns the bytes sent. With several
        ranks it runs in the communication thread when the bucket's gradients are ready."""
        number = self.buckets.index(bucket)
        due = number * PERIOD // len(self.buckets)
        if self.state.counters.step % PERIOD != due:
            return 0
        weights = [self.state.masters[name] for name in bucket.shapes]
        # Into new tensors: backward may still read the weights themselves.
        means, sent = common.mean_of_each(self.world, weights)
        self.means.update(zip(bucket.shapes, means))
        return sent

    def finish(self):
        """Waits for the means and replaces the weights with them, before the update. The model's
        weights are replaced, too, because a skipped step would not copy them."""
        super().finish()
        for name, mean in self.means.items():
            self.state.masters[name].copy_(mean)
        if self.means:
            optim.copy_to_model(self.means, self.state.model)
        self.means = {}

    def norm(self):
        """Returns the norm of this rank's own gradients; inf or NaN if any rank's is, so that all
        ranks skip the same steps. Collective."""
        norm = self.own_norm()
        total = self.world.sum(norm=norm)["norm"]
        return norm if math.isfinite(total) else total

    def agree(self):
        """Replaces the weights and moments of all ranks with their means. Collective."""
        tensors = list(train.tensors_of(self.state).values())
        means, sent = common.mean_of_each(self.world, tensors)
        torch._foreach_copy_(tensors, means)
        self.bytes_sent += sent


def prepare(args, world, state):
    """Gives the Reducer the State: it averages the masters, not the weights of a 16-bit model."""
    if args.compression != "none":
        raise train.ConfigError("local steps send no gradients: leave out --compression")
    state.reducer.state = state


def install():
    """Makes train.py take local steps. Plain train.py refuses its checkpoints, and vice versa."""
    dist.Reducer = WeightReducer
    common.after_build(prepare)
    common.name_run(f"local steps of {PERIOD}", "bucket_mb")
    agree_before_save(lambda state: state.reducer.agree())


if __name__ == "__main__":
    install()
    common.main()
