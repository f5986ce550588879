"""What several variants share: no variant, not a program."""
import math
import os
import sys

import torch

import dist
import optim
import train
from tests.variants import slow_network


def main():
    """Runs train.py as a variant's install() has changed it: where GBPS is set, over the network of
    slow_network.py."""
    if "GBPS" in os.environ:
        slow_network.install()
    train.main()


def use_optimizer(name, optimizer):
    """Makes an optimizer the one that is taken where --optimizer is not given. Its name is in each
    checkpoint, so that neither train.py takes up a run of a variant nor the variant one of
    train.py. (The recipe keeps the name of its own: so train.py warns that its rates are for that
    one.)"""
    optim.OPTIMIZERS = optim.OPTIMIZERS | {name: optimizer}
    give("--optimizer", name)


def give(flag, value):
    """Gives a flag of train.py this value where the command line has none."""
    parse_arguments = train.parse_arguments

    def parse_with_default(argv=None):
        given = sys.argv[1:] if argv is None else argv
        return parse_arguments([flag, value, *given])            # of two the last one counts

    train.parse_arguments = parse_with_default


def one_by_one(update):
    """Makes the `_update` of an optimizer, which gets lists, of one for a parameter alone."""
    def update_lists(self, group, *lists):
        for tensors in zip(*lists):
            update(self, group, *tensors)

    return update_lists


def move_moments(m, v, g, b1, b2):
    """Moves m towards a gradient and v towards its square, in place."""
    m.lerp_(g, 1 - b1)                                           # lerp(a, b, x) = a + x (b - a)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)                      # v = b2 v + (1 - b2) g^2


def ratio(a, b):
    """Returns a / b of two norms, tensors of one number each, and 1 where one of them is 0."""
    return torch.where((a > 0) & (b > 0), a / b, 1.0)


def change_recipes(change):
    """Gives every recipe the fields of the dict change(recipe)."""
    optim.RECIPES = {name: recipe | change(recipe) for name, recipe in optim.RECIPES.items()}


def use_compression(name, compressor):
    """Lets dist.py know a compressor, a `mean` of dist.ErrorFeedback, and makes it the one that is
    taken where --compression is not given. Its name is in each checkpoint, as an optimizer's."""
    dist.COMPRESSORS = dist.COMPRESSORS | {name: lambda: dist.ErrorFeedback(compressor)}
    give("--compression", name)


def tell_shapes():
    """Gives a compressor the shapes of the tensors in its `value`, as "shapes" of its `state`."""
    class Bucket(dist.Bucket):
        def __init__(self, shapes, world, compression):
            super().__init__(shapes, world, compression)
            if isinstance(self.wire, dist.ErrorFeedback):
                mean = self.wire.mean
                told = {"shapes": list(shapes.values())}
                self.wire.mean = lambda world, value, state: mean(world, value, state | told)

    dist.Bucket = Bucket


def name_run(name, flag=None):
    """Adds a variant's name to what a checkpoint is compared by, and a flag of train.py which is
    free there, but changes the results of the variant."""
    run_settings = train.run_settings

    def run_settings_here(args, manifest):
        settings = run_settings(args, manifest) | {"variant": name}
        if flag:
            settings[flag] = str(getattr(args, flag))
        return settings

    train.run_settings = run_settings_here


def after_build(prepare):
    """Has train.py call prepare(args, world, state) when it has built a State."""
    build = train.build

    def build_and_prepare(args, world):
        state = build(args, world)
        prepare(args, world, state)
        return state

    train.build = build_and_prepare


def mean_of_each(world, tensors):
    """Returns (the means over the ranks of a list of tensors, bytes sent), by one all-reduce."""
    if not tensors:
        return [], 0
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sent = dist.Dense(flat.dtype).average(world, flat, loss_scale=1.0)
    return split(flat, [tensor.shape for tensor in tensors]), sent


def split(flat, shapes):
    """Returns the tensors of these shapes that lie in a flat one one after another, as views."""
    views = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].view(shape))
        start = end
    return views
