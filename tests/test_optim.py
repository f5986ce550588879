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
    small matrix, a zero tensor, a vector without decay, a tensor whose gradient stays zero."""
    rng = np.random.default_rng(seed + 100 * SEED)
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
    assert_moved(params, values)
    assert_equal(params, from_equations(numpy_lamb, values, decays, clipped), 1e-9)


def test_fast_lamb_computes_what_the_plain_function_does():
    values, decays, grads = problem(3)
    params, groups = parameters(values, decays)
    fast = optim.LAMB(groups, lr=0.02, betas=(0.9, 0.98))
    plain = [(torch.tensor(value), torch.zeros(value.shape), torch.zeros(value.shape))
             for value in values]
    with_ratio = [i for i, decay in enumerate(decays) if decay]
    for t, step in enumerate(grads, 1):
        apply(fast, params, step)
        assert_moved(params, values)
        for i, (w, m, v) in enumerate(plain):
            plain[i] = optim.lamb_equations(w, torch.tensor(step[i]), m, v, t, lr=0.02, b1=0.9,
                                            b2=0.98, eps=1e-6, decay=decays[i])
        assert_equal([params[i] for i in with_ratio], [plain[i][0].numpy() for i in with_ratio],
                     1e-12, t)


def test_lamb_without_decay_is_adam():
    values, _, grads = problem(1)
    ours, _ = parameters(values, [0.0] * 5)
    theirs, _ = parameters(values, [0.0] * 5)
    lamb = optim.LAMB(ours, lr=0.01, weight_decay=0.0)
    adamw = torch.optim.AdamW(theirs, lr=0.01, eps=1e-6, weight_decay=0.0)
    for step in grads:
        apply(lamb, ours, step)
        apply(adamw, theirs, step)
    assert_moved(ours, values)
    assert_equal(ours, [p.detach().numpy() for p in theirs], 1e-12)


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
    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    with torch.device("meta"):
        model = bert.BertForPreTraining(bert.BertConfig.preset("mini", 192))
    masters = optim.cast_with_masters(model, torch.bfloat16)
    batch = data.Batch(
        tokens=zeros(64), segments=zeros(64), positions=zeros(64), masked_positions=zeros(4),
        labels=zeros(4), bounds=zeros(5), pair_labels=zeros(3),
        lengths=torch.tensor([12, 16, 31, 5]))
    mlm_logits, nsp_logits = model(batch)
    loss = train.loss_sum(mlm_logits, batch.labels) + train.loss_sum(nsp_logits, batch.pair_labels)
    loss.backward()
    for name_of, master in masters.items():
        master.grad = model.get_parameter(name_of).grad.float()
    optim.unscale_and_clip_([master.grad for master in masters.values()], 3.0, 2.0, 1.0)
    optim.make_optimizer(name, masters, (0.9, 0.98)).step()
    optim.copy_to_model(masters, model)


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


# ----- Around the update -----

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_keep_what_16_bits_would_lose(dtype):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.001)
    masters = optim.cast_with_masters(model, dtype)
    assert model.weight.dtype == dtype, f"the model's weight is {model.weight.dtype}, not {dtype}"
    assert masters["weight"].dtype == torch.float32, f"the master is {masters['weight'].dtype}"
    assert masters["weight"].item() == pytest.approx(1.001, rel=1e-7), (
        f"the master of 1.001 is {masters['weight'].item():.6f}: it was rounded to 16 bits")
    for _ in range(1000):
        masters["weight"] += 1e-4
        optim.copy_to_model(masters, model)
    # Added to the model itself it stays 1
    assert abs(model.weight.item() - 1.1) < 0.01, (
        f"1000 updates of 1e-4 took the model's weight from 1.001 to {model.weight.item():.4f}")


def test_master_weights_of_fp32_are_the_parameters():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    masters = optim.cast_with_masters(model, torch.float32)
    assert set(masters) == {"weight"}, (
        f"of weight and a frozen bias the masters are {sorted(masters)}")
    assert masters["weight"].data_ptr() == model.weight.data_ptr(), (
        "in fp32 the master has other memory than the parameter, which is as large again")


def test_loss_scaler_halves_doubles_and_is_bounded():
    scaler = optim.LossScaler(scale=8.0, growth_interval=3, smallest=2.0, largest=16.0)
    assert not scaler.update(True, 1), "a step with an overflow is taken"
    assert scaler.scale == 4.0, f"an overflow takes the scale from 8 to {scaler.scale}, not to 4"
    assert scaler.skipped == 1, f"one step was skipped, and `skipped` is {scaler.skipped}"
    assert all([scaler.update(False, 2) for _ in range(3)]), "a good step is not taken"
    assert scaler.scale == 8.0, f"growth_interval is 3: then 4 becomes {scaler.scale}, not 8"
    for overflow in (False, False, True):
        scaler.update(overflow, 5)
    for count, scale in (1, 4.0), (2, 4.0), (3, 8.0):
        scaler.update(False, 7)
        assert scaler.scale == scale, (
            f"{count} good steps after an overflow the scale is {scaler.scale}, not {scale}: the "
            "three steps that double it are in a row")
    for _ in range(20):
        scaler.update(False, 9)
    assert scaler.scale == 16.0, f"the scale is {scaler.scale}, and `largest` 16"
    assert scaler.skipped == 2, f"two steps were skipped, and `skipped` is {scaler.skipped}"
    assert optim.LossScaler(**vars(scaler)) == scaler, (
        "a checkpoint of vars(scaler) does not bring the scaler back")


def test_loss_scaler_stops_at_the_floor_and_names_the_step():
    scaler = optim.LossScaler(scale=4.0, smallest=2.0)
    assert not scaler.update(True, 41), "at `smallest` itself training goes on"
    with pytest.raises(optim.TrainingStopped) as raised:
        scaler.update(True, 42)
    for part in "step 42", "floor of 2":
        assert part in str(raised.value), f"the message lacks '{part}': {raised.value}"


@pytest.mark.parametrize("scale", [1024.0, 1.0, 0.125])          # below 1 after overflows in bf16
@pytest.mark.parametrize("max_norm", [np.inf, 0.5, 100.0])
def test_unscale_and_clip_is_torchs(max_norm, scale):
    torch.manual_seed(SEED)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,))]
    for p in params:
        p.grad = torch.randn_like(p)
    total_norm = torch.nn.utils.get_total_norm
    scaled = [scale * p.grad for p in params]
    optim.unscale_and_clip_(scaled, float(total_norm(scaled)), scale, max_norm)
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    for p, g in zip(params, scaled):
        assert torch.allclose(p.grad, g, rtol=1e-5, atol=0), (
            f"gradients times {scale:g}, unscaled and clipped to {max_norm:g}, have the norm "
            f"{float(total_norm(scaled)):.4g} in place of "
            f"{float(total_norm([p.grad for p in params])):.4g}")
    zeros = [torch.zeros(3)]
    optim.unscale_and_clip_(zeros, 0.0, scale, max_norm)
    assert not zeros[0].any(), f"gradients of zeros became {zeros[0].tolist()}"


def rates_of(steps, **fields):
    """Returns the learning rates of a phase, as train.py asks for them step by step."""
    phase = optim.Phase(seq_len=128, global_batch=8, steps=steps, **fields)
    args = SimpleNamespace(phases=[phase], hours=None, max_steps=None)
    states = [SimpleNamespace(phase=0, phase_step=step, step=step) for step in range(steps)]
    return [optim.learning_rate(train.progress(args, state)[1], phase) for state in states]


def test_learning_rate_with_decay_from_0_is_nvidias():
    rates = rates_of(7038, lr=6e-3, warmup=0.2843, decay_from=0.0, power=0.5)
    top = rates.index(max(rates))
    assert abs(top - 2000) <= 2, f"the highest rate is that of step {top}, not of 2000 (0.2843)"
    assert max(rates) == pytest.approx(6e-3, rel=1e-3), f"the highest rate is {max(rates):.3g}"
    after = 6e-3 * (1 - 0.2843) ** 0.5
    assert rates[top + 1] == pytest.approx(after, rel=1e-3), (
        f"after the warm-up the rate is {rates[top + 1]:.4g}; lr (1 - warmup)^power is {after:.4g}")
    assert rates[0] > 0 and rates[-1] > 0, (
        f"the first rate is {rates[0]:.2g} and the last {rates[-1]:.2g}: neither may be 0 or less")
    assert rates[top + 1:] == sorted(rates[top + 1:], reverse=True), "in the decay the rate rises"


def test_learning_rate_decays_by_a_power_of_what_is_left():
    phase = optim.Phase(128, 8, 999, lr=2.0, warmup=0.1, decay_from=0.6, power=0.5)
    rate = optim.learning_rate(0.8, phase)
    assert rate == pytest.approx(2.0 * 0.5 ** 0.5), (
        f"where 0.8 of the phase is over and the decay began at 0.6, half of it is left: with the "
        f"power 0.5 the rate is lr 0.5^0.5, 1.414, not {rate:.4g}")


def test_learning_rate_warms_up_holds_and_decays_to_zero():
    rates = rates_of(1000, lr=1.0, warmup=0.4, decay_from=0.7)
    assert rates[:400] == sorted(rates[:400]), "in the warm-up the rate falls"
    assert rates[0] == pytest.approx(1 / 400, rel=0.01), (
        f"the warm-up has 400 steps, and the first rate is {rates[0]:.4g}, not lr / 400")
    held = rates[401:699]
    assert all(rate == 1.0 for rate in held), f"the hold has {min(held):.4g} to {max(held):.4g}"
    assert rates[849] == pytest.approx(0.5, abs=0.01), (
        f"in the middle of the decay the rate is {rates[849]:.4g}, not half of lr")
    assert 0 < rates[-1] < 0.01, f"the last rate is {rates[-1]:.4g}: near 0, but not 0"
    jump = max(abs(a - b) for a, b in zip(rates, rates[1:]))
    assert jump < 0.01, f"from one step to the next the rate jumps by {jump:.2g}"
