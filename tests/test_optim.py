"""optim.py against its equations in float64 numpy, against torch, and under overflow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import optim


def problem(seed=0):
    """Parameters of every kind (matrix, vector, zero tensor, tensor whose gradient stays zero) in
    float64, two groups, and the gradients of 20 steps."""
    rng = np.random.default_rng(seed)
    shapes = [(5, 7), (3, 4), (6,), (2, 3), (4,)]
    values = [rng.normal(size=shape) for shape in shapes]
    values[1] = np.zeros(shapes[1])
    grads = [[3 * rng.normal(size=shape) for shape in shapes] for _ in range(20)]
    for step in grads:
        step[3] = np.zeros(shapes[3])
    decays = [0.1, 0.1, 0.0, 0.1, 0.0]
    return values, decays, grads


def numpy_lamb(values, decays, grads, lr, b1, b2, eps, adapt_all, max_grad_norm):
    """LAMB as in papers' equations, one tensor and one operation at a time."""
    w = [v.copy() for v in values]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, step in enumerate(grads, 1):
        norm = np.sqrt(sum((g**2).sum() for g in step))
        for i, g in enumerate(step):
            if max_grad_norm is not None and norm > max_grad_norm:
                g = g / (norm / max_grad_norm)
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            u = (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + eps) + decays[i] * w[i]
            wn, un = np.linalg.norm(w[i]), np.linalg.norm(u)
            adapts = (decays[i] != 0 or adapt_all) and wn > 0 and un > 0
            w[i] = w[i] - lr * (wn / un if adapts else 1.0) * u
    return w


@pytest.mark.parametrize("adapt_all,max_grad_norm", [(False, None), (True, 1.0), (True, 1e6)])
def test_lamb_is_its_equations(adapt_all, max_grad_norm):
    values, decays, grads = problem()
    params = [torch.tensor(value, requires_grad=True) for value in values]
    groups = [
        {"params": [p for p, d in zip(params, decays) if d == decay], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]
    optimizer = optim.LAMB(groups, lr=0.02, adapt_all=adapt_all, max_grad_norm=max_grad_norm)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = torch.tensor(g)
        optimizer.step()
        assert all((p.grad.numpy() == g).all() for p, g in zip(params, step))
    expected = numpy_lamb(values, decays, grads, 0.02, 0.9, 0.999, 1e-6, adapt_all, max_grad_norm)
    for p, value, start in zip(params, expected, values):
        assert np.linalg.norm(p.detach().numpy() - value) <= 1e-9 * np.linalg.norm(value)
    assert np.linalg.norm(expected[0] - values[0]) > 0.1


def test_lamb_at_ratio_one_is_adamw(monkeypatch):
    values, _, grads = problem(1)
    ours = [torch.tensor(value, requires_grad=True) for value in values]
    theirs = [torch.tensor(value, requires_grad=True) for value in values]
    lamb = optim.LAMB(ours, lr=0.01, weight_decay=0.1)
    adamw = torch.optim.AdamW(theirs, lr=0.01, eps=1e-6, weight_decay=0.1)
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors: [torch.ones(()) for _ in tensors])
    for step in grads:
        for params in (ours, theirs):
            for p, g in zip(params, step):
                p.grad = torch.tensor(g)
        lamb.step()
        adamw.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_groups_put_every_bias_and_layer_norm_without_decay():
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    (decayed, decay), (free, none) = optim.parameter_groups(model, 0.01)
    assert decay == 0.01 and none == 0
    names = [name for name, _ in model.named_parameters()]
    assert sorted(decayed + free) == sorted(names)
    matrices = [n for n, p in model.named_parameters() if p.dim() == 2]
    assert sorted(decayed) == sorted(matrices)
    # 2 layers x (4 biases, 2 norms) + embeddings' norm, pooler, nsp, transform and its norm, output
    assert len(free) == 2 * (4 + 4) + 2 + 1 + 1 + 1 + 2 + 1


def test_group_of_a_layer_norm_with_a_matrix_of_weights():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm((2, 3)))
    (decayed, _), (free, _) = optim.parameter_groups(model, 0.01)
    assert decayed == ["0.weight"] and set(free) == {"0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_keep_what_16_bits_would_lose(dtype):
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    masters = optim.master_weights(model)
    assert masters["weight"].dtype == torch.float32
    for _ in range(1000):
        with torch.no_grad():
            masters["weight"] += 1e-4
        optim.copy_to_model(masters, model)
    assert abs(model.weight.item() - 1.1) < 0.01  # added to the model itself it stays 1


def test_master_weights_of_fp32_are_the_parameters():
    model = torch.nn.Linear(2, 2)
    assert optim.master_weights(model)["weight"] is model.weight
    model.bias.requires_grad_(False)
    assert set(optim.master_weights(model)) == {"weight"}


def test_loss_scaler_halves_doubles_and_is_bounded():
    scaler = optim.LossScaler(initial=8.0, growth_interval=3, smallest=2.0, largest=16.0)
    assert not scaler.update(True, 1, {})
    assert scaler.scale == 4.0 and scaler.skipped == 1
    assert [scaler.update(False, 2, {}) for _ in range(3)] == [True] * 3 and scaler.scale == 8.0
    scaler.update(False, 5, {})
    scaler.update(True, 6, {})  # the count of good steps starts again
    for _ in range(2):
        scaler.update(False, 7, {})
    assert scaler.scale == 4.0
    for _ in range(20):
        scaler.update(False, 9, {})
    assert scaler.scale == 16.0
    other = optim.LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert vars(other).items() >= scaler.state_dict().items()


def test_loss_scaler_stops_at_the_floor_and_names_the_parameter():
    scaler = optim.LossScaler(initial=4.0, smallest=2.0)
    gradients = {"fine": torch.ones(2), "broken": torch.tensor([1.0, float("nan")])}
    scaler.update(True, 41, gradients)
    with pytest.raises(optim.TrainingStopped, match="step 42.*broken.*floor of 2"):
        scaler.update(True, 42, gradients)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_unscale_and_clip_is_torchs(max_norm):
    torch.manual_seed(0)
    grads = [torch.randn(4, 3), torch.randn(5)]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    if max_norm:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaled = [1024 * g for g in grads]
    optim.unscale_and_clip_(scaled, float(optim.global_norm(scaled)), 1024.0, max_norm)
    for p, g in zip(params, scaled):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=0)


def test_global_norm_shows_inf_and_nan():
    for bad in (float("inf"), float("nan")):
        assert not torch.isfinite(optim.global_norm([torch.ones(3), torch.tensor([0.0, bad])]))


def test_polynomial_schedule_is_nvidias():
    phase = SimpleNamespace(steps=7038, lr=6e-3, warmup=0.2843, power=0.5)
    rates = [optim.warmup_polynomial(step, phase) for step in range(phase.steps)]
    top = rates.index(max(rates))
    assert abs(top - 2000) <= 2 and max(rates) == pytest.approx(6e-3, rel=1e-3)
    assert rates[top + 1] == pytest.approx(0.846 * 6e-3, rel=1e-3)  # papers.md, 3.2
    assert rates[0] > 0 and rates[-1] > 0
    assert rates[top + 1 :] == sorted(rates[top + 1 :], reverse=True)


def test_hold_schedule_warms_up_holds_and_decays_to_zero():
    phase = SimpleNamespace(steps=1000, lr=1.0, warmup=0.4, hold=0.3, power=1.0)
    rates = [optim.warmup_hold_decay(step, phase) for step in range(1000)]
    assert rates[:400] == sorted(rates[:400]) and rates[0] == pytest.approx(1 / 400, rel=0.01)
    assert all(rate == 1.0 for rate in rates[401:699])
    assert rates[849] == pytest.approx(0.5, abs=0.01) and 0 < rates[-1] < 0.01
    assert max(abs(a - b) for a, b in zip(rates, rates[1:])) < 0.01  # nowhere a jump
