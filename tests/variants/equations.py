"""Helpers of the variants' tests: an optimizer compared with its equations in NumPy, a step of a
Reducer beside plain autograd, and train.py as a variant changes it."""
import contextlib
import copy
import importlib
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import bert
import data
import dist
import optim
import train
from tests.conftest import SEED
from tests.local_ranks import on_threads
from tests.training import args_of, shrink
from tests.variants import powersgd

FOLDER = Path(__file__).parent


# ----- Optimizers: one tensor at a time in float64, of all ranks at once -----
#
# The equations are a function (s, g). g (ranks, *shape) holds a tensor's gradients on all ranks. s
# is the tensor's state: w, m and v of the same shape, decay, the bytes `sent`, t and the other
# fields that `check_equations` sets, and whatever the function adds. A mean over the ranks is then
# the mean over the first axis, and is exact.

LR, B1, B2, EPS = 0.02, 0.9, 0.8, 1e-6


def problem(ranks, steps):
    """Returns (values, decays, gradients of each step and tensor, on all ranks).

    Parameters of every kind: a small matrix with a row and a column of zeros, a zero matrix,
    vectors without decay, a matrix whose gradient stays zero, a large matrix. Gradients grow and
    shrink a hundredfold, so that bounds are reached.
    """
    rng = np.random.default_rng(0)
    shapes = [(5, 7), (3, 4), (6,), (2, 3), (4,), (4, 2)]
    values = [rng.normal(size=shape) for shape in shapes]
    values[0] *= 0.1                             # keeps LAMB's ratio below its bound
    values[0][2] = values[0][:, 1] = 0
    values[1] *= 0
    values[5] *= 10                              # its decay is larger than its update
    grads = []
    for t in range(steps):
        size = 10 ** np.sin(t / 5)
        grads.append([size * rng.normal(size=(ranks, *shape)) for shape in shapes])
        grads[t][3] *= 0
    return values, [0.5, 0.5, 0.0, 0.5, 0.0, 0.5], grads


def ratio(a, b):
    """Returns the ratio of the norms of a and b, or 1 if either is 0."""
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    return norm_a / norm_b if norm_a > 0 and norm_b > 0 else 1.0


def trained(world, make, values, decays, grads, frozen):
    """Returns a rank's (weights, bytes sent so far) after each step; see `check_equations`."""
    params = [torch.tensor(value, requires_grad=True) for value in values]
    groups = []
    for decay in {*decays}:
        chosen = [p for p, its_decay in zip(params, decays) if its_decay == decay]
        groups.append({"params": chosen, "weight_decay": decay})
    reducer = SimpleNamespace(bytes_sent=0)
    optimizer = make(groups, world, reducer)
    history = []
    for t, step in enumerate(grads):
        local = True
        if hasattr(optimizer, "begin_step"):
            local = optimizer.begin_step(frozen[t])
            again = optimizer.begin_step(frozen[t])
            assert again == local, (
                f"begin_step returns {again}, not {local}, when it is called again after a skip")
        for p, g in zip(params, step):
            p.grad = torch.tensor(g[world.rank] if local else g.mean(0))
        optimizer.step()
        if phase_ends(frozen, t) and hasattr(optimizer, "agree"):
            optimizer.agree()
        weights = [p.detach().numpy().copy() for p in params]
        history.append((weights, reducer.bytes_sent))
    return history


def phase_ends(frozen, t):
    """Returns whether step t is the last of a phase, where the second stage ends."""
    return frozen[t] and (t + 1 == len(frozen) or not frozen[t + 1])


def check_equations(equations, make, ranks=1, frozen=[False] * 30):
    """Asserts after each step that an optimizer, on threads as ranks, agrees with its equations in
    weights and bytes sent. Returns the equations' last states, one for each tensor.

    make: a function (groups, world, reducer) -> optimizer. frozen: for each step, whether it is in
    the second stage of its phase, as in 1-bit Adam.
    """
    values, decays, grads = problem(ranks, len(frozen))
    histories = on_threads(trained, ranks, make, values, decays, grads, frozen)
    states = []
    for value, decay in zip(values, decays):
        zeros = np.zeros((ranks, *value.shape))
        states.append(SimpleNamespace(w=zeros + value, m=zeros, v=zeros, decay=decay, sent=0))
    for t, step in enumerate(grads):
        for number, (s, g) in enumerate(zip(states, step)):
            s.t, s.frozen, s.phase_ends = t + 1, frozen[t], phase_ends(frozen, t)
            s.stage_begins = frozen[t] != (t > 0 and frozen[t - 1])
            equations(s, g)
            for rank, history in enumerate(histories):
                error = np.linalg.norm(history[t][0][number] - s.w[rank])
                assert error <= 1e-8 * np.linalg.norm(s.w[rank]), (
                    f"tensor {number} of shape {g.shape[1:]} is off its equations by a norm of "
                    f"{error:.2g} after step {t + 1}, on rank {rank} of {ranks}")
        expected = sum(s.sent for s in states)
        sent = [history[t][1] for history in histories]
        assert sent == [expected] * ranks, (
            f"up to step {t + 1} the ranks have sent {sent} bytes, not {expected} each")
    return states


# ----- One step of a Reducer -----

def tower():
    """Returns a model of five layers and inputs (2 ranks, 2 micro-batches, 16, 8). With buckets of
    256 bytes, each layer has its own."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]), torch.randn(2, 2, 16, 8)


def one_step(world, tower, kind, dtype=torch.float32, factor=1.0, scale=1.0, before=None):
    """Takes a step of two micro-batches on one of two ranks, with the Reducer that `kind` makes.

    Returns a namespace of model, masters, reducer; `own`, {name: this rank's own gradient} by plain
    autograd, unscaled; and `early`, for each bucket whether it was launched during backward.
    factor: multiplies the loss. before: called with the namespace, before backward.
    """
    model, inputs = copy.deepcopy(tower)
    inputs = inputs[world.rank].to(dtype)
    for p in model.parameters():
        p.data.add_(world.rank)                  # the Reducer must send rank 0's weights
    masters = optim.cast_with_masters(model, dtype)
    reducer = kind(model, world, bucket_mb=256e-6, masters=masters)
    step = SimpleNamespace(model=model, masters=masters, reducer=reducer)
    reducer.zero_grad(scale)
    model(inputs[0]).sum().backward()            # an earlier step; nothing of it may be left
    reducer.finish()
    reducer.zero_grad(scale)
    if before:
        before(step)
    plain = copy.deepcopy(model)
    for number, batch in enumerate(inputs):
        reducer.last_micro_batch = number == 1
        (scale * factor * model(batch).square().mean()).backward()
    backward_ended = time.perf_counter()
    reducer.finish()
    step.early = [bucket.launched < backward_ended for bucket in getattr(reducer, "buckets", [])]
    for p in plain.parameters():
        p.grad = None
    for batch in inputs:
        (factor * plain(batch).square().mean()).backward()
    step.own = {name: p.grad for name, p in plain.named_parameters()}
    return step


# ----- PowerSGD, also for course/test_graders.py -----

DRAWN = random.Random(SEED)
A, B, VECTOR = DRAWN.randrange(60, 90), DRAWN.randrange(40, 60), DRAWN.randrange(150, 190)
K = DRAWN.choice([2, 3])                                   # for powersgd.RANK
# Of the second, the factors would have half of the matrix's elements: it is sent in full.
POWERSGD_SHAPES = [torch.Size([A, B]), torch.Size([4 * K, 4 * K]),
                   torch.Size([VECTOR - 16 * K * K])]
POWERSGD_BYTES = 4 * (K * A + K * B + VECTOR)              # 2 (W - 1) / W is 1 on two ranks


def gradient(rank, step):
    """Returns a random flat gradient of all POWERSGD_SHAPES."""
    seed = 1000 * SEED + 100 * step + rank
    return torch.randn(A * B + VECTOR, generator=torch.Generator().manual_seed(seed))


def powersgd_in_float64(world):
    """Asserts that four steps of the compressor match PowerSGD's algorithm 1, computed for all
    ranks in float64. Returns the bytes that the compressor reports for each step."""
    powersgd.RANK = K
    n = A * B                                              # the matrix; the vector goes dense
    state = {"shapes": POWERSGD_SHAPES}
    q = torch.randn(K, B, generator=torch.Generator().manual_seed(0)).double().T
    errors = [0.0] * world.size
    residual = torch.zeros(n + VECTOR + 9)      # 9 elements of padding
    all_sent = []
    for step in range(4):
        slopes = [gradient(rank, step) for rank in range(world.size)]
        value = residual + torch.nn.functional.pad(slopes[world.rank], (0, 9))
        mean, residual, state, sent = powersgd.powersgd(world, value, state)
        all_sent.append(sent)
        v = [g[:n].view(A, B).double() + e for g, e in zip(slopes, errors)]
        p = torch.linalg.qr(sum(v_r @ q for v_r in v) / world.size).Q
        q = sum(v_r.T @ p for v_r in v) / world.size
        errors = [v_r - p @ q.T for v_r in v]
        vector = sum(slopes)[n:] / world.size
        found = {"the mean of the matrix": (mean[:n], (p @ q.T).flatten()),
                 "the mean of the small matrix and the vector, which are sent in full,": (
                     mean[n:-9], vector),
                 "the residual of the matrix": (residual[:n], errors[world.rank].flatten()),
                 "the residual of the small matrix and the vector, which must be 0,": (
                     residual[n:], torch.zeros(VECTOR + 9))}
        for what, (ours, theirs) in found.items():
            error = (ours - theirs).abs().max()
            assert error <= 1e-4, f"{what} is wrong by up to {error:.2g} in step {step + 1} of 4"
    return all_sent


# ----- train.py as a variant -----

def variant_names():
    """Returns the names of all variants: the files with an install()."""
    files = sorted(FOLDER.glob("*.py"))
    return [path.stem for path in files if "\ndef install(" in path.read_text()]


def module_of(name):
    """Returns the module of a variant."""
    return importlib.import_module(f"tests.variants.{name}")


@contextlib.contextmanager
def installed(install=list):
    """A context in which train.py is small, see `shrink`, and changed by a variant's `install`.
    After it, the five files and their classes, all that a variant replaces, are as before."""
    places = []
    for module in bert, data, dist, optim, train:
        own = [value for value in vars(module).values()
               if isinstance(value, type) and value.__module__ == module.__name__]
        places += [module, *own]
    before = [(place, dict(vars(place))) for place in places]
    try:
        shrink()
        install()
        yield
    finally:
        for place, names in before:
            for name in vars(place).keys() - names.keys():
                delattr(place, name)
            for name, value in names.items():
                if vars(place)[name] is not value:
                    setattr(place, name, value)


def train_as(install, world, shards, out, *argv):
    """Trains in this process with train.py as `install` changes it."""
    with installed(install):
        train.train(args_of("--data", shards, "--out", out, *argv), world)
