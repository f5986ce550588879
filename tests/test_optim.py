"""optim.py against its equations in float64 numpy, against torch, and under overflow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import dist
import optim
from tests.ranks import run_ranks


def problem(seed=0, steps=30):
    """Parameters of every kind (matrix, vector, zero tensor, tensor whose gradient stays zero) in
    float64, two groups, and the gradients of some steps."""
    rng = np.random.default_rng(seed)
    shapes = [(5, 7), (3, 4), (6,), (2, 3), (4,)]
    values = [rng.normal(size=shape) for shape in shapes]
    values[1] = np.zeros(shapes[1])
    grads = [[3 * rng.normal(size=shape) for shape in shapes] for _ in range(steps)]
    for step in grads:
        step[3] = np.zeros(shapes[3])
    decays = [0.1, 0.1, 0.0, 0.1, 0.0]
    return values, decays, grads


def parameters(values, decays):
    """Tensors of the values, and the optimizer's groups of them."""
    params = [torch.tensor(value, requires_grad=True) for value in values]
    return params, [
        {"params": [p for p, d in zip(params, decays) if d == decay], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]


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
    params, groups = parameters(values, decays)
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
    monkeypatch.setattr(optim.LAMB, "_ratio", lambda self, p, ratio: 1.0)
    for step in grads:
        for params in (ours, theirs):
            for p, g in zip(params, step):
                p.grad = torch.tensor(g)
        lamb.step()
        adamw.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def numpy_lans(values, decays, grads, lr, b1, b2, eps):
    w = [v.copy() for v in values]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    norm = np.linalg.norm
    for t, step in enumerate(grads, 1):
        for i, g in enumerate(step):
            g = g / norm(g) if norm(g) > 0 else g
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            d = np.sqrt(v[i] / (1 - b2**t)) + eps
            r = m[i] / (1 - b1**t) / d + decays[i] * w[i]
            c = g / d + decays[i] * w[i]
            ratio_r = norm(w[i]) / norm(r) if norm(w[i]) > 0 and norm(r) > 0 else 1.0
            ratio_c = norm(w[i]) / norm(c) if norm(w[i]) > 0 and norm(c) > 0 else 1.0
            w[i] = w[i] - lr * (b1 * ratio_r * r + (1 - b1) * ratio_c * c)
    return w


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_lans_is_its_equations_at_any_scale_of_the_gradients(factor):
    values, decays, grads = problem(2)
    params, groups = parameters(values, decays)
    optimizer = optim.LANS(groups, lr=0.02)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = torch.tensor(factor * g)
        optimizer.step()
    expected = numpy_lans(values, decays, grads, 0.02, 0.9, 0.999, 1e-6)
    for p, value in zip(params, expected):
        assert np.linalg.norm(p.detach().numpy() - value) <= 1e-8 * np.linalg.norm(value)
    assert np.linalg.norm(expected[0] - values[0]) > 0.1


# Optimizers that exchange momentum, on simulated ranks


class SimulatedExchange:
    """The two-phase 1-bit exchange of N ranks in float64, block by block."""

    def __init__(self, ranks):
        self.ranks, self.errors = ranks, None

    def reset(self):
        self.errors = None

    def __call__(self, tensors):
        """tensors[i]: the list of rank i; returns the list of means."""
        n, flats = self.ranks, [np.concatenate([t.ravel() for t in mine]) for mine in tensors]
        count = len(flats[0])
        if self.errors is None:
            self.errors = np.zeros((n, count)), np.zeros(count)
        worker, server = self.errors
        mean = np.zeros(count)
        for begin in range(0, count, 512):
            part = slice(begin, min(begin + 512, count))
            for i in range(n):
                x = flats[i][part] + worker[i][part]
                q = np.abs(x).mean() * np.where(x >= 0, 1, -1)
                worker[i][part] = x - q
                mean[part] += q / n
            y = mean[part] + server[part]
            mean[part] = np.abs(y).mean() * np.where(y >= 0, 1, -1)
            server[part] = y - mean[part]
        parts = np.split(mean, np.cumsum([t.size for t in tensors[0]])[:-1])
        return [part.reshape(t.shape) for part, t in zip(parts, tensors[0])]


ORDER = [0, 1, 3, 2, 4]  # of the tensors in the optimizer: those with decay come first


class NumpyRanks:
    """Weights, moments and masks of N ranks, as plain arrays; subclasses have the equations."""

    def __init__(self, values, decays, ranks, lr=0.02, b1=0.9, b2=0.99, eps=1e-6):
        self.w = [[v.copy() for v in values] for _ in range(ranks)]
        self.m = [[np.zeros_like(v) for v in values] for _ in range(ranks)]
        self.v = [np.zeros_like(v) for v in values]
        self.decays, self.ranks, self.frozen = decays, ranks, False
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.exchange = SimulatedExchange(ranks)

    def magnitudes(self):
        scales = [np.sqrt((m**2).mean()) for m in self.m[0]]
        self.scaling = [np.mean(scales) / s if s > 0 else 1.0 for s in scales]
        self.exchange.reset()

    def average(self, tensors):
        """Means of tensors[rank][i] by the exchange, at one magnitude, masked where v is 0."""
        scaled = [[mine[i] * self.scaling[i] for i in ORDER] for mine in tensors]
        means = dict(zip(ORDER, self.exchange(scaled)))
        return [means[i] / self.scaling[i] * (self.v[i] > 0) for i in range(len(self.v))]

    def step(self, grads, frozen):
        """grads[rank][i]"""
        if frozen and not self.frozen:
            self.freeze()
        if self.frozen and not frozen:
            self.thaw()
        self.frozen = frozen
        self.update(grads, [sum(g) / self.ranks for g in zip(*grads)])

    def freeze(self):
        self.magnitudes()

    def thaw(self):
        pass


class NumpyOneBitAdam(NumpyRanks):
    def update(self, grads, mean):
        b1, b2 = self.b1, self.b2
        if self.frozen:
            m = self.average(
                [[b1 * m + (1 - b1) * g for m, g in zip(self.m[0], mine)] for mine in grads]
            )
        else:
            m = [b1 * m + (1 - b1) * g for m, g in zip(self.m[0], mean)]
            self.v = [b2 * v + (1 - b2) * g**2 for v, g in zip(self.v, mean)]
        self.m = [m] * self.ranks
        most = 1 if self.frozen else np.inf
        w = [
            w - self.lr * (np.clip(m / (np.sqrt(v) + self.eps), -most, most) + d * w)
            for w, m, v, d in zip(self.w[0], m, self.v, self.decays)
        ]
        self.w = [w] * self.ranks


class NumpyOneBitLAMB(NumpyRanks):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ratio = [0.0] * len(self.v)

    def freeze(self):
        super().freeze()
        self.fresh, self.factor = [v.copy() for v in self.v], [1.0] * len(self.v)

    def update(self, grads, mean):
        b1, b2, norm, w = self.b1, self.b2, np.linalg.norm, self.w[0]
        old = self.m[0]
        if self.frozen:
            m = self.average([[b1 * m + (1 - b1) * g for m, g in zip(old, mine)] for mine in grads])
        else:
            m = [b1 * m + (1 - b1) * g for m, g in zip(old, mean)]
            self.v = [b2 * v + (1 - b2) * g**2 for v, g in zip(self.v, mean)]
        self.m = [m] * self.ranks
        new = []
        for i, (d, decay) in enumerate(zip((np.sqrt(v) + self.eps for v in self.v), self.decays)):
            p = m[i] / d
            if self.frozen:
                p = np.clip(p, -1, 1)
            u = p + decay * w[i]
            if not self.frozen:
                ratio = 1.0
                if decay and norm(w[i]) > 0 and norm(u) > 0:
                    ratio = min(max(norm(w[i]) / norm(u), 0.01), 10.0)
                    self.ratio[i] = 0.9 * self.ratio[i] + 0.1 * ratio
                new.append(w[i] - self.lr * ratio * u)
                continue
            g = (m[i] - b1 * old[i]) / (1 - b1)
            self.fresh[i] = b2 * self.fresh[i] + (1 - b2) * g**2
            f = (d / (np.sqrt(self.fresh[i]) + self.eps)).max()
            if decay:
                r = min(1.0, norm(p) / norm(u)) if norm(u) > 0 else 1.0
                f = r * f + 1 - r
            f = min(max(min(max(f, 0.5), 4.0), self.factor[i] * 0.9), self.factor[i] * 1.1)
            self.factor[i] = f
            new.append(w[i] - self.lr * (self.ratio[i] if decay else 1.0) * f * u)
        self.w = [new] * self.ranks


class NumpyZeroOneAdam(NumpyRanks):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.thaw()
        self.scaling = None

    def thaw(self):
        self.t, self.k, self.learned, self.j, self.alone = 0, 1, 0, 1, 0
        self.exchange.reset()

    def freeze(self):
        super().freeze()
        self.agreed, self.rates = self.w[0], 0.0

    def update(self, grads, mean):
        b1, b2, lr = self.b1, self.b2, self.lr
        self.t += 1
        if not self.frozen:
            if self.t % self.k == 0:
                self.v = [b2 * v + (1 - b2) * g**2 for v, g in zip(self.v, mean)]
                self.learned += 1
                if self.learned == 2:
                    self.learned, self.k = 0, 2 * self.k
            else:
                if self.scaling is None:
                    self.magnitudes()
                mean = self.average(grads)
            grads = [mean] * self.ranks
        d = [np.sqrt(v) + self.eps for v in self.v]
        for r in range(self.ranks):
            self.m[r] = [b1 * m + (1 - b1) * g for m, g in zip(self.m[r], grads[r])]
            self.w[r] = [
                w - lr * (m / x + decay * w)
                for m, x, w, decay in zip(self.m[r], d, self.w[r], self.decays)
            ]
        if self.frozen:
            self.rates += lr
            if self.t % self.j == 0:
                self.agree()
            self.alone += 1
            if self.alone == 3:
                self.alone, self.j = 0, min(16, 2 * self.j)

    def agree(self):
        if not self.rates:
            return
        d = [np.sqrt(v) + self.eps for v in self.v]
        kept = [(1 - self.rates * decay) * w for w, decay in zip(self.agreed, self.decays)]
        u = self.average([[(w - k) * x for w, k, x in zip(mine, kept, d)] for mine in self.w])
        self.agreed = [k + s / x for k, s, x in zip(kept, u, d)]
        self.w = [list(self.agreed) for _ in range(self.ranks)]
        self.m = [[-s / self.rates for s in u] for _ in range(self.ranks)]
        self.rates = 0.0


COMMUNICATING = {
    "OneBitAdam": (NumpyOneBitAdam, {}),
    "OneBitLAMB": (NumpyOneBitLAMB, {}),
    "ZeroOneAdam": (NumpyZeroOneAdam, {"variance_updates": 2, "interval_steps": 3}),
}
STAGES = [False] * 12 + [True] * 9 + [False] * 4 + [True] * 5  # two phases


class RankExchange:
    """What a rank passes to the optimizer: the simulated exchange, of all ranks' tensors."""

    def __init__(self, world):
        self.world, self.simulated = world, SimulatedExchange(world.size)
        self.reset = self.simulated.reset

    def __call__(self, tensors):
        everyone = self.world.gather([t.numpy().copy() for t in tensors])
        for tensor, mean in zip(tensors, self.simulated(everyone)):
            tensor.copy_(torch.from_numpy(mean))


def thirty_steps(world, name, resume):
    """Trains as one of the ranks; returns the weights after every step."""
    values, decays, _ = problem()
    params, groups = parameters(values, decays)
    grads = [problem(10 + rank)[2] for rank in range(world.size)]

    def make():
        betas, options = (0.9, 0.99), COMMUNICATING[name][1]
        return getattr(optim, name)(groups, RankExchange(world), lr=0.02, betas=betas, **options)

    optimizer, history = make(), []
    for step, frozen in enumerate(STAGES):
        local = optimizer.local_gradients(frozen)
        assert local or not frozen
        for i, p in enumerate(params):
            each = [mine[step][i] for mine in grads]
            p.grad = torch.tensor(each[world.rank] if local else sum(each) / world.size)
        optimizer.step()
        if step + 1 in (21, 30) and name == "ZeroOneAdam":
            optimizer.synchronise()  # the phase ends
        if resume and step in (7, 16):  # in each stage
            state, exchange = optimizer.state_dict(), optimizer.exchange
            groups = [{"params": group["params"]} for group in optimizer.param_groups]
            optimizer = make()
            optimizer.load_state_dict(state)
            optimizer.exchange = exchange
        history.append([p.detach().numpy().copy() for p in params])
    return history


@pytest.mark.parametrize("name", COMMUNICATING)
@pytest.mark.parametrize("size", [1, 2])
def test_exchanging_optimizers_are_their_equations(tmp_path, name, size):
    values, decays, _ = problem()
    oracle = COMMUNICATING[name][0](values, decays, size)
    grads = [problem(10 + rank)[2] for rank in range(size)]
    histories = run_ranks(thirty_steps, size, tmp_path, name, size == 2)
    for step, frozen in enumerate(STAGES):
        oracle.step([mine[step] for mine in grads], frozen)
        if step + 1 in (21, 30) and name == "ZeroOneAdam":
            oracle.agree()
        for rank, history in enumerate(histories):
            for ours, expected in zip(history[step], oracle.w[rank]):
                assert np.linalg.norm(ours - expected) <= 1e-8 * np.linalg.norm(expected), step
    for tensors in zip(*(history[-1] for history in histories)):
        assert all((tensor == tensors[0]).all() for tensor in tensors)  # the ranks agree at the end


def fp32_exchange(world):
    """Five exchanges of odd shapes by dist.Exchange, and a reset after the third."""
    shapes = {"a": (7, 33), "b": (5,), "c": (40, 33)}
    exchange = dist.Exchange([(k, torch.empty(s)) for k, s in shapes.items()], world)
    means = []
    for step in range(5):
        rng = np.random.default_rng((world.rank, step))
        tensors = [torch.tensor(rng.normal(size=s), dtype=torch.float32) for s in shapes.values()]
        exchange.take_bytes()
        exchange(tensors)
        if step == 2:
            exchange.reset()
        means.append([tensor.numpy() for tensor in tensors])
    return means, exchange.take_bytes()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_exchange_of_train_is_the_simulated_one(tmp_path, size):
    simulated, expected = SimulatedExchange(size), []
    for step in range(5):
        rngs = [np.random.default_rng((rank, step)) for rank in range(size)]
        expected.append(
            simulated([[rng.normal(size=s) for s in ((7, 33), (5,), (40, 33))] for rng in rngs])
        )
        if step == 2:
            simulated.reset()
    for means, sent in run_ranks(fp32_exchange, size, tmp_path):
        for ours, theirs in zip(means, expected):
            for a, b in zip(ours, theirs):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        blocks = -(-1556 // (512 * size))
        assert sent == 2 * (size - 1) * blocks * (512 // 8 + 4)  # two phases of signs and scales


def test_one_bit_lamb_before_the_freeze_is_lamb_without_bias_correction(monkeypatch):
    values, decays, grads = problem(3)
    values[1] += 1.0  # a ratio of a zero tensor that has moved once lies outside of the bounds
    ours, our_groups = parameters(values, decays)
    theirs, their_groups = parameters(values, decays)
    one_bit, lamb = optim.OneBitLAMB(our_groups, None, lr=0.02), optim.LAMB(their_groups, lr=0.02)
    monkeypatch.setattr(optim.LAMB, "bias_correction", False)
    for step in grads:
        for params, optimizer in (ours, one_bit), (theirs, lamb):
            for p, g in zip(params, step):
                p.grad = torch.tensor(g)
            optimizer.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Exact:
    """An exchange without compression, on one rank."""

    def __call__(self, tensors):
        pass

    def reset(self):
        pass


def test_zero_one_adam_at_interval_one_without_compression_is_its_first_stage():
    values, decays, grads = problem(4)
    results = []
    for step in grads:
        step[3] += 1.0  # without a variance, the second stage does not even decay
    for freezes in (False, True):
        params, groups = parameters(values, decays)
        optimizer = optim.ZeroOneAdam(groups, Exact(), lr=0.02)
        for t, step in enumerate(grads):
            if t == 10:  # from here on neither learns the variance
                optimizer.param_groups[0]["clock"]["variance_every"] = 10**9
            optimizer.local_gradients(freezes and t >= 10)
            for p, g in zip(params, step):
                p.grad = torch.tensor(g)
            optimizer.step()
        results.append(params)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


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
