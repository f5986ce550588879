"""Local steps: each rank steps alone, and each part of the weights is averaged once in a period.

    torchrun --nproc_per_node=2 tests/variants/local_steps.py --out runs/local

Tang et al., DreamDDP, arXiv 2502.11058. Local SGD averages all weights after every H steps, and the
network idles in between. Here part b of B has a step of its own in each period of H; while the
backward of step t goes on, the ranks average the parts that are due, and only those:

    due at step t:      the parts b with floor(b H / B) = t mod H
    w_r = (mean over the ranks of w_r, if due at t, else w_r) - update of rank r's own gradient

So H times fewer bytes are sent, spread over the steps as far as there are parts, behind backward.
The paper's parts are layers, and a search over measured times makes the schedule; ours are the
Reducer's buckets (3 of tiny, 7 of mini, 14 of base), evenly spread. The paper (from memory, not
checked) updates a layer within backward and averages the result at once. train.py clips by the
global norm, which is known only after backward; so here what is averaged is what step t began with,
and the update is added to the mean: one step late. The norm is that of the ranks' own gradients, up
to sqrt(N) times that of their mean: so train.py clips harder than it does its baseline.

What is changed: dist.Reducer, by a subclass that averages weights where its parent averages
gradients. Before train.py evaluates or saves, the weights and moments of all ranks become their
means, in the run that goes on as well. So the bits after that depend on which steps were evaluated
and saved; and what resumes, on as many ranks, equals the run that saved there, bit for bit.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import dist  # noqa: E402
import train  # noqa: E402
from tests.variants.compressors import dense_list  # noqa: E402
from tests.variants.synchronised import LocalReducer, agree_before_use  # noqa: E402

PERIOD = 16                  # H


class WeightReducer(LocalReducer):
    """A Reducer that leaves gradients as they are, and averages the weights of its buckets in turn.
    `weights`, {name: tensor}, is set by `install`; `steps` counts those that were taken or skipped.
    """
    steps = 0
    norm = dist.Reducer.norm             # of this rank's own gradients

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.means = []                                  # of the weights due: (weight, mean)

    def average_bucket(self, bucket, average, scale):
        """Averages a bucket's weights if it is their step, in the communication thread, when the
        bucket's gradients are ready; returns the bytes sent."""
        number = self.buckets.index(bucket)
        due = number * PERIOD // len(self.buckets)
        if self.steps % PERIOD != due:
            return 0
        weights = [self.weights[name].detach() for name in bucket.shapes]
        # Into new tensors: backward may not be done with the weights themselves.
        sent, means = dense_list(self.world, weights)
        self.means += zip(weights, means)
        return sent

    def finish(self):
        """Waits for the means and puts them in the place of the weights, before the update."""
        super().finish()
        for weight, mean in self.means:
            weight.copy_(mean)
        self.means = []

    def commit(self, step_taken):
        """Ends a step."""
        super().commit(step_taken)
        self.steps += 1

    def state_dict(self):
        """Returns what a checkpoint keeps."""
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """Continues from a checkpoint."""
        self.steps = state["steps"]

    def agree(self, optimizer):
        """Replaces the weights and moments of all ranks by their means. Collective."""
        weights = [weight.detach() for weight in self.weights.values()]
        m = [moments["exp_avg"] for moments in optimizer.state.values()]
        v = [moments["exp_avg_sq"] for moments in optimizer.state.values()]
        for tensors in (weights, m, v):
            sent, means = dense_list(self.world, tensors)
            torch._foreach_copy_(tensors, means)
            self.bytes_sent += sent


def install():
    """Makes train.py use it. Neither takes up a checkpoint of the other."""
    build = train.build
    same_run = train.same_run

    def build_local(plan, world, checkpoint):
        if plan.flags.compression != "none":
            raise train.ConfigError("local steps send no gradients: leave out --compression")
        state = build(plan, world, checkpoint)
        # Of 16-bit models the fp32 masters are averaged, which the Reducer does not know of.
        state.reducer.weights = state.masters
        return state

    def same_local_run(plan, manifest):
        return same_run(plan, manifest) | {
            "variant": f"local steps of {PERIOD}", "bucket_mb": plan.flags.bucket_mb}

    train.build = build_local
    train.same_run = same_local_run
    dist.Reducer = WeightReducer
    agree_before_use(lambda state: state.reducer.agree(state.optimizer))


if __name__ == "__main__":
    install()
    train.main()
