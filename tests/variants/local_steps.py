"""Local steps: each rank steps alone, and each part of the weights is averaged once in a period.

    torchrun --nproc_per_node=2 tests/variants/local_steps.py --out runs/local

Tang et al., DreamDDP, arXiv 2502.11058. Local SGD averages all weights after every H steps, and the
network idles in between. Here part b of B has a step of its own in each period of H; while the
backward of step t goes on, the ranks average the parts that are due, and only those:

    due at step t:      the parts b with floor(b H / B) = t mod H
    w_r = (mean over the ranks of w_r, if due at t, else w_r) - update of rank r's own gradient

So H times fewer bytes are sent in the steps (a save sends more), spread over the steps as far as
there are parts, behind backward. The paper's parts are layers, and a search over measured times
makes the schedule; ours are the Reducer's buckets (on a CPU 3 of tiny, 8 of mini, 52 of base),
evenly spread. The paper (from memory, not checked) updates a layer within backward and averages the
result at once. train.py clips by the global norm, which is known only after backward; so here what
is averaged is what step t began with, and the update is added to the mean: one step late. The norm
is that of the ranks' own gradients, sqrt(N) times that of their mean where noise dominates: so
train.py clips harder than it does its baseline.

What is changed: dist.Reducer, by a subclass that averages weights where its parent averages
gradients. Before train.py saves, the weights and moments of all ranks become their means, in the
run that goes on as well. So the bits after that depend on which steps were saved; and what resumes,
on as many ranks, equals the run that saved there, bit for bit.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch

import dist
import optim
from tests.variants import common
from tests.variants.synchronised import LocalReducer, agree_before_save

PERIOD = 16                  # H


class WeightReducer(LocalReducer):
    """A Reducer that leaves gradients as they are, and averages the weights of its buckets in turn.
    `state`, whose step, masters and model it uses, is set by `prepare`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.means = {}                                  # of the weights due, {name: tensor}

    def average_bucket(self, bucket, average, loss_scale):
        """Averages a bucket's weights if it is their step, in the communication thread, when the
        bucket's gradients are ready; returns the bytes sent."""
        number = self.buckets.index(bucket)
        due = number * PERIOD // len(self.buckets)
        if self.state.counters.step % PERIOD != due:
            return 0
        weights = [self.state.masters[name] for name in bucket.shapes]
        # Into new tensors: backward may not be done with the weights themselves.
        means, sent = common.mean_of_each(self.world, weights)
        self.means.update(zip(bucket.shapes, means))
        return sent

    def finish(self):
        """Waits for the means and puts them in the place of the weights, before the update. Also in
        the model: a step that is skipped would leave it as it was."""
        super().finish()
        for name, mean in self.means.items():
            self.state.masters[name].copy_(mean)
        if self.means:
            optim.copy_to_model(self.means, self.state.model)
        self.means = {}

    def norm(self):
        """Returns the norm of this rank's own gradients. It is inf or NaN if that of any rank is,
        so that all skip the same steps. Collective."""
        norm = self.own_norm()
        total = self.world.sum(norm=norm)["norm"]
        return norm if math.isfinite(total) else total

    def agree(self):
        """Replaces the weights and moments of all ranks by their means. Collective."""
        tensors = list(train.tensors_of(self.state).values())
        means, sent = common.mean_of_each(self.world, tensors)
        torch._foreach_copy_(tensors, means)
        self.bytes_sent += sent


def prepare(args, world, state):
    """Shows the Reducer the masters: those are averaged, not the weights of a 16-bit model."""
    if args.compression != "none":
        raise train.ConfigError("local steps send no gradients: leave out --compression")
    state.reducer.state = state


def install():
    """Makes train.py use it. Neither takes up a checkpoint of the other."""
    dist.Reducer = WeightReducer
    common.after_build(prepare)
    common.name_run(f"local steps of {PERIOD}", "bucket_mb")
    agree_before_save(lambda state: state.reducer.agree())


if __name__ == "__main__":
    install()
    common.main()
