"""optim.py against its equations in float64 NumPy and against torch. Rates, masters, loss scale and
clipping: course/test_graders.py."""
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bert
import optim
import train
from tests.training import losses_of, random_batch


# ----- A small problem -----

def problem(seed=0, steps=30):
    """Returns (values, decays, gradients of each step) in float64: parameters of every kind: a
    small matrix, a zero tensor, a vector without decay, a tensor whose gradient stays zero."""
    rng = np.random.default_rng(seed)
    shapes = [(5, 7), (3, 4), (6,), (2, 3), (4,)]
    values = [rng.normal(size=shape) for shape in shapes]
    values[0] *= 0.1                             # so that LAMB's ratio is below its bound
    values[1] = np.zeros(shapes[1])
    grads = [[3 * rng.normal(size=shape) for shape in shapes] for _ in range(steps)]
    for step in grads:
        step[3] = np.zeros(shapes[3])
    return values, [0.05, 0.05, 0.0, 0.05, 0.0], grads


def parameters(values, decays):
    """Returns tensors of the values, and the optimizer's groups of them."""
    params = [torch.tensor(value, requires_grad=True) for value in values]
    groups = []
    for decay in 0.05, 0.0:
        chosen = [p for p, its_decay in zip(params, decays) if its_decay == decay]
        groups.append({"params": chosen, "weight_decay": decay})
    return params, groups


def apply(optimizer, params, grads):
    """One step on the given gradients."""
    for p, g in zip(params, grads):
        p.grad = torch.tensor(g)
    optimizer.step()


def assert_equal(params, expected, tolerance, where=""):
    """Compares tensors or arrays with arrays, by the norm of their difference."""
    for number, (p, value) in enumerate(zip(params, expected)):
        ours = p if isinstance(p, np.ndarray) else p.detach().numpy()
        error = np.linalg.norm(ours - value)
        assert error <= tolerance * np.linalg.norm(value), f"tensor {number} {where}"


# ----- LAMB: one tensor and one operation at a time, as in the paper -----

def ratio(a, b):
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    return norm_a / norm_b if norm_a > 0 and norm_b > 0 else 1.0


def from_equations(equations, values, decays, grads, lr=0.02, b1=0.9, b2=0.999, eps=1e-6):
    """Returns the weights after all steps; equations(w, g, m, v, t, decay, b1, b2, eps, lr) returns
    those of one tensor, and its m and v."""
    w = [value.copy() for value in values]
    m = [np.zeros_like(value) for value in values]
    v = [np.zeros_like(value) for value in values]
    for t, step in enumerate(grads, 1):
        for i, g in enumerate(step):
            w[i], m[i], v[i] = equations(w[i], g, m[i], v[i], t, decays[i], b1, b2, eps, lr)
    return w


def numpy_lamb(w, g, m, v, t, decay, b1, b2, eps, lr):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2
    u = (m / (1 - b1 ** t)) / (np.sqrt(v / (1 - b2 ** t)) + eps) + decay * w
    return w - lr * (min(ratio(w, u), 0.3) if decay else 1.0) * u, m, v


@pytest.mark.parametrize("max_norm", [np.inf, 1.0])
def test_lamb_is_its_equations(max_norm):
    values, decays, grads = problem()
    params, groups = parameters(values, decays)
    optimizer = optim.LAMB(groups, lr=0.02)
    clipped = []
    for step in grads:                 # clipping by train.py is NVIDIA's pre-normalisation
        scaled = [torch.tensor(8 * g) for g in step]
        norm = float(torch.nn.utils.get_total_norm(scaled))
        optim.unscale_and_clip_(scaled, norm, 8.0, max_norm)
        apply(optimizer, params, [g.numpy() for g in scaled])
        clipped.append([g / max(1.0, norm / 8 / max_norm) for g in step])
    assert_equal(params, from_equations(numpy_lamb, values, decays, clipped), 1e-9)


def test_adamw_is_torchs():
    values, decays, grads = problem(4)
    ours, our_groups = parameters(values, decays)
    theirs, their_groups = parameters(values, decays)
    adamw = optim.AdamW(our_groups, lr=0.01, betas=(0.9, 0.98))
    torchs = torch.optim.AdamW(their_groups, lr=0.01, betas=(0.9, 0.98), eps=1e-6)
    for step in grads:
        apply(adamw, ours, step)
        apply(torchs, theirs, step)
    assert_equal(ours, [p.detach().numpy() for p in theirs], 1e-12)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_no_step_waits_for_a_gpu(name):
    """Meta tensors have no values: whoever asks for one, as for a GPU's, gets an error. train.py
    asks twice in a step, for the norm before these updates and for the losses after them."""
    with torch.device("meta"):
        model = bert.BertForPreTraining(bert.BertConfig.preset("mini", 192))
    masters = optim.cast_with_masters(model, torch.bfloat16)
    batch = random_batch(192, device="meta")
    sum(losses_of(model(batch), batch).values()).backward()
    for name_of, master in masters.items():
        master.grad = model.get_parameter(name_of).grad.float()
    optim.unscale_and_clip_([master.grad for master in masters.values()], 3.0, 2.0, 1.0)
    optim.make_optimizer(name, masters, (0.9, 0.98)).step()
    optim.copy_to_model(masters, model)


class Calls(TorchDispatchMode):
    """Counts what torch is asked to compute."""
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **options or {})


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_an_update_starts_as_many_calls_for_many_tensors_as_for_few(name):
    counts = []
    for layers in 2, 12:
        with torch.device("meta"):
            config = bert.BertConfig(layers, 64, heads=1, feed_forward=256, vocab_size=64)
            model = bert.BertForPreTraining(config)
        masters = optim.cast_with_masters(model, torch.bfloat16)
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        optimizer = optim.make_optimizer(name, masters, (0.9, 0.98))
        with Calls() as calls:
            optimizer.step()
            optim.unscale_and_clip_([master.grad for master in masters.values()], 3.0, 2.0, 1.0)
            optim.copy_to_model(masters, model)
        counts.append(calls.count)
    few, many = counts
    # A ratio of LAMB's is a tensor of its own, but a view: a GPU has nothing to do for it.
    assert many - few <= 1 and many < 40, f"{few} calls for 2 layers, {many} for 12"


def test_lists_are_large_but_not_too_large():
    tensors = [torch.empty(250_000 * mb) for mb in (3, 4, 3, 9, 1, 7, 1)]
    lists = optim.lists_of(tensors)
    sizes = [[len(tensor) // 250_000 for tensor in each] for each in lists]
    assert sizes == [[3, 4], [3], [9], [1, 7], [1]], f"lists of at most 8 MB on a CPU: {sizes}"
    assert [id(tensor) for each in lists for tensor in each] == [*map(id, tensors)]


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_bias_and_layer_norm_is_without_decay(name):
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    names = {p: its_name for its_name, p in model.named_parameters()}
    optimizer = optim.make_optimizer(name, dict(model.named_parameters()), (0.9, 0.98))
    decays = {}
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.98) and group["eps"] == 1e-6
        decays |= {names[p]: group["weight_decay"] for p in group["params"]}
    assert decays == {its_name: 0.0 if its_name.endswith("bias") or "norm" in its_name else 0.01
                      for its_name in names.values()}
