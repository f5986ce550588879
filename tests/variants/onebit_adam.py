"""1-bit Adam: the ranks average momentum in one bit an element, in place of gradients.

    torchrun --nproc_per_node=2 tests/variants/onebit_adam.py --lr-scale 0.1 --out runs/onebit-adam

Tang et al., arXiv 2102.02888, algorithm 1; microsoft/DeepSpeed, onebit/adam.py. Gradients compress
badly, since Adam divides by a v that would be made of their errors. Momentum m is smoother, and a v
that is frozen has no errors. So a phase of training has two stages. In the first, gradients are
averaged as ever, and v learns. In the second v is frozen, rank i keeps its own gradient g_i, and
the ranks average momentum. The gradient g that the mean M implies then moves m to M on all ranks:

    M = average(b1 m + (1 - b1) g_i)        g = (M - b1 m) / (1 - b1)
    m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2, only in the first stage
    p = m / (sqrt(v) + eps)                 in the second stage clipped to [-1, 1]
    w = w - lr (p + decay w)

As published there is no bias correction: after n steps v is 1 - b2^n of the mean square, so steps
are longer than Adam's, 1.6 times at n = 500. b2 is 0.999 in every recipe, so that what is frozen is
the mean of many steps. Not as published: p is clipped, see `bound`, and all tensors travel together
(`set_magnitudes`), as in 1-bit LAMB.

What is changed: optim.OPTIMIZERS and the recipes' choice; dist.Reducer, by one that asks the
optimizer at the start of each step whether gradients stay where they are. onebit_lamb.py and
zeroone_adam.py build on this file.
"""
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import dist  # noqa: E402
import optim  # noqa: E402
import train  # noqa: E402
from tests.variants.synchronised import LocalReducer  # noqa: E402

FREEZE = 0.2                 # the fraction of a phase after which v is frozen, or the warm-up's end
BETA2 = 0.999


# ----- The optimizer -----

class OneBitAdam(optim.Optimizer):
    """The equations above. Gradients are overwritten.

    A step calls `begin_step` before backward and `step` after it. `connect` sets `compressed_mean`,
    and `reducer`, which counts the bytes that are sent.
    """
    # "step" counts the updates since the stage began.
    DEFAULTS = optim.Optimizer.DEFAULTS | {"frozen": False}
    bounded = True

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.params = [p for group in self.param_groups for p in group["params"]]

    def connect(self, plan, world, state):
        """Takes what the optimizer needs of a train.State, before the first step."""
        names = {master: name for name, master in state.masters.items()}
        self.compressed_mean = CompressedMean([(names[p], p) for p in self.params], world)
        self.reducer = state.reducer

    def begin_step(self, frozen):
        """Returns True if each rank is to keep its own gradients in this step. frozen: whether the
        step is in the phase's second stage."""
        if frozen != self.param_groups[0]["frozen"]:
            self.begin_stage(frozen)
        self.learns = not frozen                             # whether v moves in this step
        return frozen

    def begin_stage(self, frozen):
        """Begins the first or the second stage of a phase."""
        for group in self.param_groups:
            group["frozen"] = frozen
            group["step"] = 0
        self.set_magnitudes()

    @torch.no_grad()
    def step(self):
        """Applies one update, in place. Collective where gradients are local."""
        self.share()
        super().step()

    def share(self):
        """Replaces a rank's own gradients by g, which is the same on all ranks."""
        if self.learns:
            return
        b1 = self.param_groups[0]["betas"][0]
        m = self.all_of("exp_avg")
        g = [p.grad for p in self.params]                    # g_i
        torch._foreach_lerp_(g, m, b1)                       # b1 m + (1 - b1) g_i
        self.average(g)                                      # M
        torch._foreach_lerp_(g, m, -b1 / (1 - b1))           # (M - b1 m) / (1 - b1)

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group, in place."""
        b1, b2 = group["betas"]
        torch._foreach_lerp_(m, g, 1 - b1)
        if self.learns:
            self.move_variance(v, g, b2)

        # m / d as m times 1 / d, in the memory of d: on a CPU new memory costs more than a pass.
        p = torch._foreach_sqrt(v)
        torch._foreach_add_(p, group["eps"])
        torch._foreach_reciprocal_(p)
        torch._foreach_mul_(p, m)
        if group["frozen"] and self.bounded:
            bound(p)
        torch._foreach_add_(p, w, alpha=group["weight_decay"])
        torch._foreach_add_(w, p, alpha=-group["lr"])

    def move_variance(self, v, g, b2):
        """Moves v towards the squares of g, in place."""
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, value=1 - b2)

    def set_magnitudes(self):
        """Sets for each tensor the factor that brings its momentum to a root mean square of 1. All
        tensors travel as one, and elements of several share a scale (1-bit LAMB, section 4.2)."""
        norms = optim.norms(self.all_of("exp_avg")).tolist()
        for p, norm in zip(self.params, norms):
            self.state[p]["magnitude"] = math.sqrt(p.numel()) / norm if norm > 0 else 1.0
        self.compressed_mean.forget()                        # its errors are in the former units

    def average(self, tensors):
        """Replaces tensors, one for each parameter, in place by compressed means over the ranks."""
        magnitudes = self.all_of("magnitude")
        torch._foreach_mul_(tensors, magnitudes)
        self.reducer.bytes_sent += self.compressed_mean(tensors)
        torch._foreach_div_(tensors, magnitudes)
        # A sign cannot say 0. Elements whose v is 0 have never had a gradient, such as the rows of
        # positions that short sequences do not reach: they stay 0.
        for tensor, v in zip(tensors, self.all_of("exp_avg_sq")):
            tensor.mul_(v.sign())

    def all_of(self, name):
        """Returns what the state has under a name, for each parameter."""
        return [self.state[p][name] for p in self.params]

    def state_dict(self):
        """Returns the state, with the errors of compression. Collective."""
        return super().state_dict() | {"errors": self.compressed_mean.state_dict()}

    def load_state_dict(self, state):
        """Continues from a checkpoint, on any number of ranks."""
        super().load_state_dict(state)
        self.compressed_mean.load_state_dict(state["errors"])


def bound(updates):
    """Clips updates m / (sqrt(v) + eps) to [-1, 1] in place. A v that learns keeps them near that:
    a constant gradient gives 1. A frozen one does not: the row of a token that is first seen after
    the freeze would move a hundredfold. Batches of 64K have seen all by then, small ones have not.
    """
    torch._foreach_clamp_min_(updates, -1.0)
    torch._foreach_clamp_max_(updates, 1.0)


class CompressedMean:
    """Averages the same tensors over the ranks at each call, in one bit an element, with error
    feedback (dist.Bucket). named: list of (name, tensor)."""

    def __init__(self, named, world):
        # In buckets, because compressing takes several times the memory of what is compressed.
        self.buckets = dist.fill_buckets([named], 25.0, world, "onebit")

    def __call__(self, tensors):
        """Replaces tensors, in the order of `named`, by their means; returns the bytes sent."""
        views = []
        for bucket in self.buckets:
            views += bucket.views(bucket.flat).values()
        torch._foreach_copy_(views, tensors)
        sent = 0
        for bucket in self.buckets:
            sent += bucket.average(1.0)
            bucket.commit(True)
        torch._foreach_copy_(tensors, views)
        return sent

    def state_dict(self):
        """Returns what is not sent yet, {name: tensor}, averaged over the ranks. Collective."""
        return dist.fold_buckets(self.buckets)

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks."""
        for bucket in self.buckets:
            bucket.restart(state)

    def forget(self):
        """Forgets what is not sent yet."""
        for bucket in self.buckets:
            bucket.restart()


# ----- The stages in train.py -----

class AskingReducer(LocalReducer):
    """A Reducer that asks, when a step begins, whether gradients are local in it."""
    local = False
    asks = None              # the question; None until it is set, after the first zero_grad

    def zero_grad(self, scale=1.0):
        """Begins a step."""
        super().zero_grad(scale)
        if self.asks:
            self.local = self.asks()


def freeze_step(phase):
    """Returns the number of steps in a phase's first stage."""
    return round(phase.steps * max(FREEZE, phase.warmup))


def is_frozen(plan, step):
    """Returns True if the step that follows `step` finished ones is in a phase's second stage."""
    index = plan.phase_at(step)
    phase = plan.phases[index]
    phase_begin = plan.ends[index] - phase.steps
    return step - phase_begin >= freeze_step(phase)


def check_plan(plan, name):
    """Raises train.ConfigError if this optimizer cannot follow the plan."""
    if plan.optimizer != name:
        raise train.ConfigError(f"this program's optimizer is {name}: leave out --optimizer")
    if dist.is_lossy(plan.flags.compression):
        raise train.ConfigError(f"{name} needs --compression none, fp16 or bf16")
    for phase in plan.phases:
        if phase.steps and not 0 < freeze_step(phase) < phase.steps:
            raise train.ConfigError(f"{name} cannot freeze after {freeze_step(phase)} of "
                                    f"{phase.steps} steps; take more --steps")


def install(name="onebit-adam", optimizer=OneBitAdam):
    """Makes it the optimizer of every recipe. Neither train.py takes up a checkpoint of this
    program nor this program one of train.py."""
    build = train.build
    make_plan = train.make_plan
    same_run = train.same_run
    state_gigabytes = train.state_gigabytes

    def make_checked_plan(flags, world):
        plan = make_plan(flags, world)
        check_plan(plan, name)
        return plan

    def build_connected(plan, world, checkpoint):
        state = build(plan, world, checkpoint)
        state.optimizer.connect(plan, world, state)
        state.reducer.asks = lambda: state.optimizer.begin_step(is_frozen(plan, state.step))
        return state

    def gigabytes_with_errors(plan):
        # An element has four fp32 numbers: in the bucket, the residual, the next one, the server's.
        elements = sum(math.prod(shape) for shape in bert.parameter_shapes(plan.config))
        return state_gigabytes(plan) | {"1-bit errors": 16e-9 * elements}

    train.build = build_connected
    train.make_plan = make_checked_plan
    train.same_run = lambda *arguments: same_run(*arguments) | {"variant": name, "freeze": FREEZE}
    train.state_gigabytes = gigabytes_with_errors
    dist.Reducer = AskingReducer
    optim.OPTIMIZERS = optim.OPTIMIZERS | {name: optimizer}
    recipes = {}
    for recipe_name, recipe in optim.RECIPES.items():
        recipes[recipe_name] = recipe._replace(optimizer=name, betas=(recipe.betas[0], BETA2))
    optim.RECIPES = recipes


if __name__ == "__main__":
    install()
    train.main()
