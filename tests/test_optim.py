"""Tests the updates of optim.py, the number of their calls, and that they wait for no GPU.

Rates, masters, loss scale and clipping are tested in course/test_graders.py.
"""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bert
import optim
from tests.training import losses_of, random_batch

LR, BETAS, EPS = 0.02, (0.9, 0.98), 1e-6


# ----- An update in float64 -----

SHAPES = {"matrix": (4, 5), "small matrix": (5, 7), "matrix of zeros": (3, 4),
          "matrix without a gradient": (2, 3), "vector": (6,)}


def by_torch(name, w, gradients, decay):
    """Returns w after steps of torch's AdamW, or of LAMB's equations, see optim.LAMB. The u of both
    is what torch's AdamW subtracts at a rate of 1."""
    moved = w.clone()
    adamw = torch.optim.AdamW([moved], lr=1.0, betas=BETAS, eps=EPS, weight_decay=decay)
    for g in gradients:
        moved.copy_(w)
        moved.grad = g
        adamw.step()
        u = w - moved
        ratio = 1.0
        if name == "lamb" and w.dim() > 1:
            ratio = 0.3
            if w.any() and u.any():
                ratio = min(ratio, w.norm() / u.norm())
        w = w - LR * ratio * u
    return w


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_an_update_is_its_equations(name, decay):
    torch.manual_seed(0)
    weights = {kind: torch.randn(shape).double() for kind, shape in SHAPES.items()}
    weights["small matrix"] /= 10                            # LAMB's ratio is below its bound
    weights["matrix of zeros"].zero_()
    gradients = {kind: 3 * torch.randn(30, *shape).double() for kind, shape in SHAPES.items()}
    gradients["matrix without a gradient"].zero_()
    exact = {}
    for kind, w in weights.items():
        exact[kind] = by_torch(name, w, gradients[kind], decay if w.dim() > 1 else 0.0)

    optimizer = optim.make_optimizer(name, weights, BETAS)
    matrices, vectors = optimizer.param_groups
    assert matrices["weight_decay"] == 0.01
    matrices["weight_decay"] = decay
    matrices["lr"] = vectors["lr"] = LR
    for step in range(30):
        for kind, w in weights.items():
            w.grad = gradients[kind][step]
        optimizer.step()
    away = {}
    for kind, w in weights.items():
        error = (w - exact[kind]).norm() / exact[kind].norm()
        if not error < 1e-10:
            away[kind] = f"{error:.2g}"
    assert not away, (
        f"{name} or adam_update is wrong: the relative errors are {away}; right are "
        f"{sorted(exact.keys() - away)} (if only the vector is: vectors do not decay)")


def test_what_is_no_matrix_and_does_not_decay_are_biases_and_layer_norms():
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    for name, p in model.named_parameters():
        assert (p.dim() <= 1) == (name.endswith("bias") or "norm" in name), (
            f"{name} has shape {p.shape}: only biases and LayerNorm weights are vectors")


# ----- What a step asks of a GPU -----

class Calls(TorchDispatchMode):
    """Counts the calls of torch's operations."""
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **options or {})


def calls_of_an_update(name, layers):
    """Returns the number of torch calls in an update of a model with `layers` blocks.

    Meta tensors have no values: code that reads one, and would wait for a GPU, raises an error. In
    a step, train.py reads values twice: the norm before this update, and the losses after it.
    """
    with torch.device("meta"):
        model = bert.BertForPreTraining(bert.BertConfig(layers, 128, 2, 512, vocab_size=192))
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
    # Each ratio of LAMB is a separate tensor, but a view, which is no work for a GPU.
    assert many - few <= 1 and many < 40, (
        f"an update makes {few} calls for 2 layers and {many} for 12")


@pytest.mark.parametrize("device, factor", [("cpu", 1), ("meta", 8)])
def test_lists_are_large_but_not_too_large(device, factor):
    """Lists have at most 8 MB on a CPU and 64 MB elsewhere, or a single larger tensor."""
    tensors = [torch.empty(250_000 * factor * size, device=device)
               for size in (3, 4, 3, 9, 1, 7, 1)]
    sizes = [[len(tensor) // factor // 250_000 for tensor in each]
             for each in optim.lists_of(tensors)]
    assert sizes == [[3, 4], [3], [9], [1, 7], [1]], (
        f"on {device} the lists have these sizes, in units of {factor} MB: {sizes}")
