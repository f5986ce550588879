"""optim.py against its equations in float64 NumPy, against torch, and under overflow."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import data
import optim
import train
from tests.conftest import SEED


# ----- A small problem, that test_variants.py uses, too -----

def problem(seed=0, steps=30):
    """Returns (values, decays, gradients of each step) in float64: parameters of every kind: a
    matrix, a zero tensor, a vector without decay, a tensor whose gradient stays zero."""
    rng = np.random.default_rng(seed + 100 * SEED)
    shapes = [(5, 7), (3, 4), (6,), (2, 3), (4,)]
    values = [rng.normal(size=shape) for shape in shapes]
    values[1] = np.zeros(shapes[1])
    grads = [[3 * rng.normal(size=shape) for shape in shapes] for _ in range(steps)]
    for step in grads:
        step[3] = np.zeros(shapes[3])
    return values, [0.05, 0.05, 0.0, 0.05, 0.0], grads


def parameters(values, decays):
    """Returns tensors of the values, and the optimizer's groups of them."""
    params = [torch.tensor(value, requires_grad=True) for value in values]
    groups = []
    for decay in (0.05, 0.0):
        chosen = [p for p, its_decay in zip(params, decays) if its_decay == decay]
        groups.append({"params": chosen, "weight_decay": decay})
    return params, groups


def apply(optimizer, params, grads):
    """One step on the given gradients."""
    for p, g in zip(params, grads):
        p.grad = torch.tensor(g)
    optimizer.step()


KINDS = {0: "a matrix", 1: "a tensor of zeros", 2: "a tensor without decay",
         3: "a tensor whose gradient is zero"}


def assert_equal(params, expected, tolerance, step=None):
    """Compares tensors or arrays with arrays, by the norm of their difference. KINDS: those of
    `problem`."""
    for number, (p, value) in enumerate(zip(params, expected)):
        ours = p if isinstance(p, np.ndarray) else p.detach().numpy()
        error = np.linalg.norm(ours - value)
        assert error <= tolerance * np.linalg.norm(value), (
            f"tensor {number} ({KINDS.get(number, 'another')}) is wrong after "
            f"{f'step {step}' if step else 'the last step'}: it differs by {error:.2g} (norm) from "
            f"what the equations give, whose norm is {np.linalg.norm(value):.4g}")


def assert_moved(params, values):
    """That the first tensor is not as it was."""
    assert not np.array_equal(params[0].detach(), values[0]), (
        "the weights did not change: update them in place")


# ----- LAMB and LANS: one tensor and one operation at a time, as in the papers -----

def ratio(a, b):
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    return norm_a / norm_b if norm_a > 0 and norm_b > 0 else 1.0


def from_equations(equations, values, decays, grads, lr=0.02, b1=0.9, b2=0.999, eps=1e-6):
    """Returns the weights after all steps; equations(w, g, m, v, t, decay, b1, b2, eps, lr) returns
    those of one tensor, and its m and v."""
    w, m, v = ([x.copy() for x in some] for some in (values, *[map(np.zeros_like, values)] * 2))
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, step in enumerate(grads, 1):
        for i, g in enumerate(step):
            w[i], m[i], v[i] = equations(w[i], g, m[i], v[i], t, decays[i], b1, b2, eps, lr)
    return w


def numpy_lamb(w, g, m, v, t, decay, b1, b2, eps, lr):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2
    u = (m / (1 - b1 ** t)) / (np.sqrt(v / (1 - b2 ** t)) + eps) + decay * w
    return w - lr * (ratio(w, u) if decay else 1.0) * u, m, v


def numpy_lans(w, g, m, v, t, decay, b1, b2, eps, lr):
    g = g / np.linalg.norm(g) if np.linalg.norm(g) > 0 else g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2
    d = np.sqrt(v / (1 - b2 ** t)) + eps
    r = m / (1 - b1 ** t) / d + decay * w
    s = g / d + decay * w
    return w - lr * (b1 * ratio(w, r) * r + (1 - b1) * ratio(w, s) * s), m, v
