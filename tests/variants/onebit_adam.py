"""1-bit Adam: the ranks average momentum in one bit an element, in place of gradients.

    torchrun --nproc_per_node=2 tests/variants/onebit_adam.py --lr-scale 0.125 --out runs/onebit

Tang et al., arXiv 2102.02888, algorithm 1; microsoft/DeepSpeed, onebit/adam.py. Gradients compress
badly, because Adam would divide by a v made of compression errors. Momentum m is smoother, and a
frozen v has no errors. A phase therefore has two stages. In the first, gradients are averaged as
usual and v learns. In the second, v is frozen, rank i keeps its own gradient g_i, and the ranks
average momentum. The mean M implies a gradient g, which moves m to M on all ranks:

    M = average(b1 m + (1 - b1) g_i)        g = (M - b1 m) / (1 - b1)
    m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2, only in the first stage
    p = m / (sqrt(v) + eps)                 in the second stage clipped to [-1, 1]
    w = w - lr (p + decay w)

A later phase of three steps or fewer has only the second stage.

As published, there is no bias correction: after n steps v is 1 - b2^n of the mean square, so steps
are longer than Adam's, 1.6 times at n = 500. b2 is 0.999 in every recipe, so that the frozen v is a
mean of many steps. Unlike in the paper, p is clipped, see `bound`, and tensors share the scales of
what is sent, see `set_magnitudes`, as in 1-bit LAMB.

What is changed: optim.OPTIMIZERS and --optimizer's default; dist.Reducer, replaced by one that asks
the optimizer at the start of each step whether gradients stay local. A save drops residuals, as in
dist.py. onebit_lamb.py and zeroone_adam.py build on this file.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import dist
import optim
from tests.variants import common, onebit
from tests.variants.synchronised import LocalReducer

FREEZE = 0.2                 # v is frozen after this fraction of a phase, or a longer warm-up
BETA2 = 0.999


# ----- The optimizer -----

class OneBitAdam(optim.Optimizer):
    """The equations above. Gradients are overwritten.

    A training step calls `begin_step` before backward and `step` after it. `connect` sets
    `compressed_mean` and `reducer`, which counts the bytes sent.
    """
    # "step" counts the updates since the stage began; `set_magnitudes` makes "magnitudes" a list.
    DEFAULTS = optim.Optimizer.DEFAULTS | {"frozen": False, "magnitudes": None}
    bounded = True

    def connect(self, args, world, state):
        """Takes from a train.State what the optimizer needs. Call it before the first step."""
        self.compressed_mean = CompressedMean(state.masters, self.all_params(), world)
        self.reducer = state.reducer

    def all_params(self):
        """Returns the parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def all_of(self, name):
        """Returns the state's entry `name` of each parameter, as a list."""
        return [self.state[p][name] for p in self.all_params()]

    def begin_step(self, frozen):
        """Begins a step; returns whether each rank keeps its own gradients in it. frozen: whether
        the step is in the second stage of its phase."""
        if frozen != self.param_groups[0]["frozen"]:
            self.begin_stage(frozen)
        self.learns = not frozen                             # whether v moves in this step
        return frozen

    def begin_stage(self, frozen):
        """Begins the first or the second stage of a phase. Raises optim.TrainingStopped if v would
        be frozen before its first update."""
        if frozen and self.param_groups[0]["step"] == 0:
            raise optim.TrainingStopped("v would be frozen before its first update; take more "
                                        "--steps")
        for group in self.param_groups:
            group["frozen"] = frozen
            group["step"] = 0
        self.set_magnitudes()

    @torch.no_grad()
    def step(self):
        """Applies one update, in place. Collective if gradients are local."""
        self.share()
        super().step()

    def share(self):
        """If gradients are local, replaces them by g, which is the same on all ranks."""
        if self.learns:
            return
        b1 = self.param_groups[0]["betas"][0]
        m = self.all_of("exp_avg")
        g = [p.grad for p in self.all_params()]              # g_i
        torch._foreach_lerp_(g, m, b1)                       # b1 m + (1 - b1) g_i, of each tensor
        self.average(g)                                      # M
        torch._foreach_lerp_(g, m, -b1 / (1 - b1))           # (M - b1 m) / (1 - b1)

    @common.one_by_one
    def _update(self, group, w, g, m, v):
        b1, b2 = group["betas"]
        m.lerp_(g, 1 - b1)
        if self.learns:
            self.move_variance(v, g, b2)

        p = m / (v.sqrt() + group["eps"])
        if group["frozen"] and self.bounded:
            bound(p)
        w.sub_(p + group["weight_decay"] * w, alpha=group["lr"])

    def move_variance(self, v, g, b2):
        """Moves v towards the square of g, in place."""
        v.mul_(b2).addcmul_(g, g, value=1 - b2)

    def set_magnitudes(self):
        """Sets a factor for each tensor that brings its momentum to a root mean square of 1.
        Tensors are sent in buckets, in which elements of several share a scale (1-bit LAMB, section
        4.2)."""
        for group in self.param_groups:
            group["magnitudes"] = []
            for p in group["params"]:
                norm = float(self.state[p]["exp_avg"].norm())
                magnitude = math.sqrt(p.numel()) / norm if norm > 0 else 1.0
                group["magnitudes"].append(magnitude)
        self.compressed_mean.forget()                        # residuals are in the old units

    def average(self, tensors):
        """Replaces tensors, one for each parameter, by their compressed means over the ranks, in
        place."""
        magnitudes = []
        for group in self.param_groups:
            magnitudes += group["magnitudes"]
        torch._foreach_mul_(tensors, magnitudes)
        self.reducer.bytes_sent += self.compressed_mean(tensors)
        torch._foreach_div_(tensors, magnitudes)
        # A sign cannot be 0. Elements whose v is 0 have never had a gradient, such as the rows of
        # positions that short sequences do not reach. They stay 0.
        for tensor, v in zip(tensors, self.all_of("exp_avg_sq")):
            tensor.mul_(v.sign())


def bound(update):
    """Clips an update m / (sqrt(v) + eps) to [-1, 1], in place.

    A v that learns keeps the update near this range: a constant gradient gives 1. A frozen v does
    not: the row of a token that first appears after the freeze would move a hundred times as far.
    Batches of 64K have seen all tokens by then, small batches have not.
    """
    update.clamp_(-1.0, 1.0)


class CompressedMean:
    """Averages the same tensors over the ranks in each call, in one bit an element, with error
    feedback (dist.ErrorFeedback). masters: {name: tensor}; params: these tensors in the order of a
    call."""

    def __init__(self, masters, params, world):
        # In buckets, because compression takes several times the memory of its input.
        self.buckets = dist.fill_buckets(masters, world, "int8", 25.0)
        views = {}
        for bucket in self.buckets:
            # In place of int8's wire, which makes a Bucket choose the same levels.
            bucket.wire = dist.ErrorFeedback(onebit.onebit)
            views.update(bucket.views)
        named = {master: views[name] for name, master in masters.items()}
        self.views = [named[p] for p in params]

    def __call__(self, tensors):
        """Replaces tensors by their means over the ranks, in place; returns the bytes sent."""
        torch._foreach_copy_(self.views, tensors)
        sent = 0
        for bucket in self.buckets:
            sent += bucket.average(1.0)
            bucket.wire.commit(True)
        torch._foreach_copy_(tensors, self.views)
        return sent

    def forget(self):
        """Drops the residuals."""
        for bucket in self.buckets:
            bucket.wire.forget()


# ----- The stages in train.py -----

class AskingReducer(LocalReducer):
    """A Reducer that asks the optimizer at the start of each step whether gradients are local."""
    local = False
    optimizer = None         # set by `prepare`, as is `is_frozen`, after the first zero_grad

    def zero_grad(self, loss_scale=1.0):
        """Begins a step."""
        super().zero_grad(loss_scale)
        if self.optimizer:
            self.local = self.optimizer.begin_step(self.is_frozen())

    def forget(self):
        """Drops everything that waits to be sent."""
        super().forget()
        self.optimizer.compressed_mean.forget()


def is_frozen(args, state):
    """Returns whether the next step is in the second stage of its phase."""
    index, done = train.progress(args, state.counters)
    return done > max(FREEZE, args.phases[index].warmup)


def prepare(args, world, state):
    """Connects the optimizer of a new State with its Reducer. Raises train.ConfigError if the flags
    choose another optimizer, or a compression that has residuals."""
    dense = isinstance(state.reducer.buckets[0].wire, dist.Dense)
    if not isinstance(state.optimizer, OneBitAdam) or not dense:
        raise train.ConfigError("a 1-bit optimizer needs --compression none, fp16 or bf16, and no "
                                "--optimizer")
    state.optimizer.connect(args, world, state)
    state.reducer.optimizer = state.optimizer
    state.reducer.is_frozen = lambda: is_frozen(args, state)


def install(name="onebit-adam", optimizer=OneBitAdam):
    """Makes the optimizer the default of --optimizer. This program and train.py do not resume each
    other's checkpoints."""
    dist.Reducer = AskingReducer
    common.use_optimizer(name, optimizer)
    common.change_recipes(lambda recipe: {"betas": (recipe["betas"][0], BETA2)})
    common.after_build(prepare)
    common.name_run(f"freeze {FREEZE}")


if __name__ == "__main__":
    install()
    common.main()
