"""The updates of optim.py, and what they ask of a GPU. Rates, masters, loss scale and clipping:
course/test_graders.py."""
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bert
import optim
from tests.training import losses_of, random_batch

LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.98), 1e-6, 0.01


# ----- An update in float64 -----

KINDS = {                                        # (shape, size of the weights, of the gradients)
    "matrix": ((4, 5), 1, 3),
    "small matrix": ((5, 7), 0.1, 3),            # LAMB's ratio is below its bound
    "matrix of zeros": ((3, 4), 0, 3),
    "matrix without a gradient": ((2, 3), 1, 0),
    "vector": ((6,), 1, 3)}


@pytest.fixture
def problem():
    """Returns ({kind: array}, their gradients in each of 30 steps)."""
    rng = np.random.default_rng(0)

    def draw(size):
        return {name: kind[size] * rng.normal(size=kind[0]) for name, kind in KINDS.items()}

    return draw(1), [draw(2) for _ in range(30)]


def stepped(make, weights, gradients):
    """Returns the weights after all steps of the optimizer that make(weights) returns."""
    weights = {name: torch.tensor(w) for name, w in weights.items()}
    optimizer = make(weights)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for step in gradients:
        for name, w in weights.items():
            w.grad = torch.tensor(step[name])
        optimizer.step()
    return {name: w.numpy() for name, w in weights.items()}


def assert_near(ours, exact, what):
    """Compares weights after some updates; what: which equations they should follow."""
    errors = {}
    for name, w in exact.items():
        errors[name] = float(np.linalg.norm(ours[name] - w) / np.linalg.norm(w))
    off = {name: f"{error:.2g}" for name, error in errors.items() if error > 1e-10}
    right = errors.keys() - off
    assert not off, (f"{what}: away from the exact weights, in parts of their norm: {off}; exact "
                     f"are {sorted(right)}")


def test_adamw_is_torchs(problem):
    def torchs(weights):
        groups = [{"params": [w], "weight_decay": DECAY * (w.dim() > 1)} for w in weights.values()]
        return torch.optim.AdamW(groups, betas=BETAS, eps=EPS)

    ours = stepped(lambda weights: optim.make_optimizer("adamw", weights, BETAS), *problem)
    kind = type(optim.make_optimizer("adamw", {"w": torch.zeros(1)}, BETAS)).__name__
    assert kind == "AdamW", f"OPTIMIZERS['adamw'] is {kind}"
    assert_near(ours, stepped(torchs, *problem), "adam_update and AdamW (if vectors alone are off: they do not decay)")


@pytest.mark.parametrize("decay", [DECAY, 0], ids=["", "no decay"])
def test_lamb_is_its_equations(problem, decay):
    weights, gradients = problem

    def make(weights):
        lamb = optim.make_optimizer("lamb", weights, BETAS)
        lamb.param_groups[0]["weight_decay"] = decay         # of the matrices
        return lamb

    ours = stepped(make, *problem)
    b1, b2 = BETAS
    for name, w in weights.items():
        m = v = np.zeros_like(w)
        for t, step in enumerate(gradients, 1):
            m = b1 * m + (1 - b1) * step[name]
            v = b2 * v + (1 - b2) * step[name] ** 2
            u = m / (1 - b1 ** t) / (np.sqrt(v / (1 - b2 ** t)) + EPS)
            ratio = 1.0
            if w.ndim > 1:
                u += decay * w
                ratio = 0.3
                if w.any() and u.any():
                    ratio = min(ratio, np.linalg.norm(w) / np.linalg.norm(u))
            w = w - LR * ratio * u
        assert_near(ours, {name: w}, "LAMB and adam_update")


def test_what_is_no_matrix_and_does_not_decay_are_biases_and_layer_norms():
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    for name, p in model.named_parameters():
        assert (p.dim() <= 1) == (name.endswith("bias") or "norm" in name), f"{name}: {p.shape}"


# ----- What a step asks of a GPU -----

class Calls(TorchDispatchMode):
    """Counts what torch is asked to compute."""
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **options or {})


def calls_of_an_update(name, layers):
    """Meta tensors have no values: whoever asks for one, as for a GPU's, gets an error. train.py
    asks twice in a step, for the norm before these updates and for the losses after them."""
    config = dataclasses.replace(bert.BertConfig.preset("tiny", 192), layers=layers)
    with torch.device("meta"):
        model = bert.BertForPreTraining(config)
    masters = optim.cast_with_masters(model, torch.bfloat16)
    batch = random_batch(192, device="meta")
    sum(losses_of(model(batch), batch).values()).backward()
    for key, master in masters.items():
        master.grad = model.get_parameter(key).grad.float()
    optimizer = optim.make_optimizer(name, masters, BETAS)
    with Calls() as calls:
        optim.unscale_and_clip_([master.grad for master in masters.values()], 3.0, 2.0, 1.0)
        optimizer.step()
        optim.copy_to_model(masters, model)
    return calls.count


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_an_update_waits_for_no_gpu_and_has_no_more_calls_for_more_tensors(name):
    few, many = calls_of_an_update(name, 2), calls_of_an_update(name, 12)
    # A ratio of LAMB's is a tensor of its own, but a view: a GPU has nothing to do for it.
    assert many - few <= 1 and many < 40, f"{few} calls for 2 layers, {many} for 12"


@pytest.mark.parametrize("device, factor", [("cpu", 1), ("meta", 8)])
def test_lists_are_large_but_not_too_large(device, factor):
    """At most 8 MB on a CPU, 64 MB elsewhere."""
    tensors = [torch.empty(250_000 * factor * size, device=device)
               for size in (3, 4, 3, 9, 1, 7, 1)]
    sizes = [[len(tensor) // factor // 250_000 for tensor in each]
             for each in optim.lists_of(tensors)]
    assert sizes == [[3, 4], [3], [9], [1, 7], [1]], f"{factor} MB times {sizes} on {device}"
