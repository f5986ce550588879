"""Shows what an exercise is good for, with its solution. `check` runs this if all is right.

    python -m tests.course.rewards attention
"""
import sys
import timeit

import torch
from torch import nn

import bert
import data
import dist
import optim
import train
from tests.course.test_graders import measure
from tests.tools import show
from tests.variants import topk


def docs():
    """Returns the folder of shards that `python train.py` uses; makes it if there is none."""
    folder = train.DEMO_SHARDS
    if not folder.exists():
        print("text is prepared, once, in half a minute", flush=True)
        data.prepare(data.machine_documentation(), folder)
    return folder


def bars(values, unit):
    """Prints a bar for each of {name: value}; the largest value has the longest bar."""
    for name, value in values.items():
        length = round(40 * value / max(values.values()))
        print(f"{name:>16}  {'█' * length:<40} {value:10.4g} {unit}")


# ----- A function for each exercise, of the same name; some exercises have none -----

def masking():
    """Examples as words: which tokens were masked, and whether B follows A."""
    print(show.show(docs()))


pairs = masking


def attention():
    """Milliseconds with and without padding."""
    print("attention over 32 examples of 16 to 256 tokens:")
    packed = [16] * 12 + [32] * 12 + [64] * 6 + [256] * 2
    milliseconds = {}
    for name, lengths in ("padded to 256", [256] * 32), ("packed", packed):
        lengths = torch.tensor([*lengths, 0])
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        qkv = torch.randn(int(lengths.sum()), 3, 4, 64)
        times = timeit.repeat(lambda: bert.attention(qkv, bounds, lengths, 0.0), number=1)
        milliseconds[name] = 1e3 * min(times)
    bars(milliseconds, "ms")


def schedule():
    """The rates of three recipes."""
    for name, recipe in optim.RECIPES.items():
        phase = recipe["phases"][0]
        print(f"{name}, phase 1:")
        bars({f"{part}/25": optim.learning_rate(part / 25, phase) for part in range(1, 25)}, "")


def lamb():
    """How far a step moves matrices of small and of large weights."""
    for name in "lamb", "adamw":
        print(f"a step of {name} at the rate 0.001 moves a matrix by this part of its norm:")
        moved = {}
        for size in 0.003, 0.03, 0.3, 3.0:
            weights = size * torch.randn(64, 64)
            before = weights.clone()
            weights.grad = torch.randn(64, 64)
            optim.make_optimizer(name, {"weights": weights}, (0.9, 0.98)).step()
            distance = (weights - before).norm() / before.norm()
            moved[f"weights of {size:g}"] = distance.item()
        bars(moved, "")


def overlap():
    """The network after backward, and overlapped with it."""
    alone, network, wait = measure()
    bars({"backward alone": 1e3 * alone,
          "then the network": 1e3 * (alone + network),
          "overlapped": 1e3 * (alone + wait)}, "ms")


def feedback():
    """How much of a gradient is still missing, if each step sends one element in a hundred."""
    gradient = torch.randn(10_000)
    bucket = dist.Bucket({"weight": gradient.shape}, dist.World(), "none")
    bucket.wire = dist.ErrorFeedback(topk.topk)
    arrived = torch.zeros_like(gradient)
    missing = {}
    for step in range(1, 401):
        bucket.flat.copy_(gradient)
        bucket.average(1.0)
        bucket.wire.commit(step_taken=True)
        arrived += bucket.flat
        if step in (1, 10, 50, 100, 200, 400):
            distance = (arrived / step - gradient).norm() / gradient.norm()
            missing[f"after {step} steps"] = distance.item()
    bars(missing, "of a constant gradient is missing")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in filter(globals().get, sys.argv[1:]):
        print()
        try:
            globals()[name]()
        except NotImplementedError:
            print(f"What {name} is good for, another exercise that is blank has to show as well.")
