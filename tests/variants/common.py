"""Helpers that several variants share; neither a variant nor a program."""
import math
import os
import sys

import torch

import dist
import optim
import train
from tests.variants import slow_network


def main():
    """Runs train.py as a variant's install() has changed it."""
    use_network()
    train.main()


def use_network():
    """Makes the network that of slow_network.py if GBPS is set."""
    if "GBPS" in os.environ:
        slow_network.install()


def use_optimizer(name, optimizer):
    """Adds an optimizer under a name and makes it the default of --optimizer.

    The name is in each checkpoint, so train.py and the variant refuse each other's runs. The recipe
    keeps the name of its own optimizer, so train.py warns that the rates are for that one.
    """
    optim.OPTIMIZERS = optim.OPTIMIZERS | {name: optimizer}
    give("--optimizer", name)


def give(flag, value):
    """Makes a value the default of a flag of train.py."""
    parse_arguments = train.parse_arguments

    def parse_with_default(argv=None):
        given = sys.argv[1:] if argv is None else argv
        return parse_arguments([flag, value, *given])            # the last one counts

    train.parse_arguments = parse_with_default


def one_by_one(update):
    """Turns an `_update` of a single parameter into an optimizer's `_update`, which gets lists."""
    def update_lists(self, group, *lists):
        for tensors in zip(*lists):
            update(self, group, *tensors)

    return update_lists


def move_moments(m, v, g, b1, b2):
    """Moves m towards the gradient g and v towards its square, in place."""
    m.lerp_(g, 1 - b1)                                           # lerp(a, b, x) = a + x (b - a)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)                      # v = b2 v + (1 - b2) g^2


def ratio(a, b):
    """Returns a / b for two norms, which are tensors of one number, or 1 if either is 0."""
    return torch.where((a > 0) & (b > 0), a / b, 1.0)


def change_recipes(change):
    """Updates every recipe with the fields of the dict change(recipe)."""
    optim.RECIPES = {name: recipe | change(recipe) for name, recipe in optim.RECIPES.items()}


def use_compression(name, exchange):
    """Adds a compressor, an `exchange` of dist.ErrorFeedback, under a name, and makes it the
    default of --compression. The name is in each checkpoint, like an optimizer's."""
    dist.COMPRESSORS = dist.COMPRESSORS | {name: lambda: dist.ErrorFeedback(exchange)}
    give("--compression", name)


def tell_shapes():
    """Passes a compressor the shapes of the tensors in its `value`, as "shapes" in its `state`."""
    class Bucket(dist.Bucket):
        def __init__(self, shapes, world, compression):
            super().__init__(shapes, world, compression)
            if isinstance(self.wire, dist.ErrorFeedback):
                exchange = self.wire.exchange
                told = {"shapes": list(shapes.values())}
                self.wire.exchange = (
                    lambda world, value, state: exchange(world, value, state | told))

    dist.Bucket = Bucket


def name_run(name, flag=None):
    """Adds a variant's name to the settings that a checkpoint must match, and a flag, if given,
    that train.py lets differ on a resume but that changes the variant's results."""
    run_settings = train.run_settings

    def run_settings_here(args, manifest):
        settings = run_settings(args, manifest) | {"variant": name}
        if flag:
            settings[flag] = str(getattr(args, flag))
        return settings

    train.run_settings = run_settings_here


def after_build(prepare):
    """Makes train.py call prepare(args, world, state) after it has built a State."""
    build = train.build

    def build_and_prepare(args, world):
        state = build(args, world)
        prepare(args, world, state)
        return state

    train.build = build_and_prepare


def mean_of_each(world, tensors):
    """Returns (means of a list of tensors over the ranks, bytes sent), by one all-reduce."""
    if not tensors:
        return [], 0
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sent = dist.Dense(flat.dtype).average(world, flat, loss_scale=1.0)
    return split(flat, [tensor.shape for tensor in tensors]), sent


def split(flat, shapes):
    """Returns a flat tensor as views of these shapes, one after another."""
    views = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].view(shape))
        start = end
    return views
