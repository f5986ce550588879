"""optim.py against its equations in float64 NumPy, against torch, and under overflow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import data
import dist
import optim
from tests.ranks import run_ranks


# ----- LAMB and LANS: one tensor and one operation at a time, as in the papers -----

def problem(seed=0, steps=30):
    """Returns (values, decays, gradients of each step) in float64: parameters of every kind: a
    matrix, a zero tensor, a vector without decay, a tensor whose gradient stays zero."""
    rng = np.random.default_rng(seed)
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
    return params, [{"params": [p for p, d in zip(params, decays) if d == decay],
                     "weight_decay": decay} for decay in (0.05, 0.0)]


def apply(optimizer, params, grads):
    """One step on the given gradients."""
    for p, g in zip(params, grads):
        p.grad = torch.tensor(g)
    optimizer.step()


def assert_equal(params, expected, tolerance, step=None):
    for p, value in zip(params, expected):
        ours = p if isinstance(p, np.ndarray) else p.detach().numpy()
        assert np.linalg.norm(ours - value) <= tolerance * np.linalg.norm(value), step


def ratio(a, b):
    a, b = np.linalg.norm(a), np.linalg.norm(b)
    return a / b if a > 0 and b > 0 else 1.0


def numpy_lamb(values, decays, grads, adapt_all, max_norm, lr=0.02, b1=0.9, b2=0.999, eps=1e-6):
    w = [v.copy() for v in values]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, step in enumerate(grads, 1):
        norm = np.sqrt(sum((g ** 2).sum() for g in step))
        for i, g in enumerate(step):
            g = g / max(1.0, norm / max_norm)
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g ** 2
            u = (m[i] / (1 - b1 ** t)) / (np.sqrt(v[i] / (1 - b2 ** t)) + eps) + decays[i] * w[i]
            w[i] = w[i] - lr * (ratio(w[i], u) if decays[i] or adapt_all else 1.0) * u
    return w


@pytest.mark.parametrize("adapt_all, max_norm", [(False, np.inf), (True, 1.0), (True, 1e6)])
def test_lamb_is_its_equations(adapt_all, max_norm):
    values, decays, grads = problem()
    params, groups = parameters(values, decays)
    optimizer = optim.LAMB(groups, lr=0.02, adapt_all=adapt_all)
    for step in grads:                 # clipping by train.py is NVLAMB's pre-normalisation
        scaled = [torch.tensor(8 * g) for g in step]
        optim.unscale_and_clip_(scaled, float(optim.global_norm(scaled)), 8.0, max_norm)
        apply(optimizer, params, [g.numpy() for g in scaled])
    assert_equal(params, numpy_lamb(values, decays, grads, adapt_all, max_norm), 1e-9)
    assert not np.allclose(params[0].detach(), values[0], atol=0.1)


def test_lamb_at_ratio_one_is_adamw(monkeypatch):
    values, _, grads = problem(1)
    monkeypatch.setattr(optim, "safe_ratios", lambda a, b, otherwise: torch.full_like(a, otherwise))
    ours, theirs = (parameters(values, [0.05] * 5)[0] for _ in range(2))
    lamb = optim.LAMB(ours, lr=0.01, weight_decay=0.1)
    adamw = optim.AdamW(theirs, lr=0.01, eps=1e-6, weight_decay=0.1)
    for step in grads:
        apply(lamb, ours, step)
        apply(adamw, theirs, step)
    assert_equal(ours, [p.detach().numpy() for p in theirs], 1e-12)
    for optimizer in lamb, adamw:      # what train.py asks of every optimizer
        assert not optimizer.local_gradients(True) and optimizer.bytes_sent == 0
        optimizer.synchronise()


def numpy_lans(values, decays, grads, lr=0.02, b1=0.9, b2=0.999, eps=1e-6):
    w = [v.copy() for v in values]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, step in enumerate(grads, 1):
        for i, g in enumerate(step):
            g = g / np.linalg.norm(g) if np.linalg.norm(g) > 0 else g
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g ** 2
            d = np.sqrt(v[i] / (1 - b2 ** t)) + eps
            r = m[i] / (1 - b1 ** t) / d + decays[i] * w[i]
            c = g / d + decays[i] * w[i]
            w[i] = w[i] - lr * (b1 * ratio(w[i], r) * r + (1 - b1) * ratio(w[i], c) * c)
    return w


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_lans_is_its_equations_at_any_scale_of_the_gradients(factor):
    values, decays, grads = problem(2)
    params, groups = parameters(values, decays)
    optimizer = optim.LANS(groups, lr=0.02)
    for step in grads:
        apply(optimizer, params, [factor * g for g in step])
    assert_equal(params, numpy_lans(values, decays, grads), 1e-8)
    assert not np.allclose(params[0].detach(), values[0], atol=0.1)


def test_tensor_groups_are_bounded_and_change_nothing(monkeypatch):
    values, decays, grads = problem()
    results = []
    for most in 1 << 22, 1:
        monkeypatch.setattr(optim.Optimizer.add_param_group, "__defaults__", (most,))
        params, groups = parameters(values, decays)
        optimizer = optim.LAMB(groups, lr=0.02)
        for step in grads:
            apply(optimizer, params, step)
        results.append((len(optimizer.param_groups), [p.detach().numpy() for p in params]))
    assert [count for count, _ in results] == [2, 5]
    assert_equal(results[0][1], results[1][1], 0.0)


@pytest.mark.parametrize("name", ["lamb", "nvlamb", "lans"])
def test_no_step_waits_for_a_gpu(name):
    """Meta tensors have no values: whoever asks for one, as for a GPU's, gets an error. train.py
    asks once in a step, for the norm and the losses, between backward and these updates."""
    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    with torch.device("meta"):
        model = bert.BertForPreTraining(bert.BertConfig.preset("mini", 192)).bfloat16()
    batch = data.Batch(zeros(64), zeros(64), zeros(64), zeros(4), zeros(4), zeros(5), zeros(3),
                       torch.tensor([12, 16, 31, 5]))
    losses = model(batch.to("meta"))
    (losses.mlm_sum + losses.nsp_sum).backward()
    masters = optim.master_weights(model)
    for p, master in zip(model.parameters(), masters.values()):
        master.grad = p.grad.float()
    optim.unscale_and_clip_([master.grad for master in masters.values()], 3.0, 2.0, 1.0)
    optim.make_optimizer(name, masters, (0.9, 0.98), 100, None).step()
    optim.copy_to_model(masters, model)


# ----- 1-bit optimizers, on simulated ranks -----

class SimulatedMean:
    """The two-phase 1-bit mean of N ranks in float64, block by block."""

    def __init__(self, ranks):
        self.ranks, self.errors = ranks, None

    def reset(self):
        self.errors = None

    def __call__(self, tensors):
        """tensors[i]: the list of rank i; returns the list of means."""
        flats = [np.concatenate([t.ravel() for t in mine]) for mine in tensors]
        count = len(flats[0])
        if self.errors is None:
            self.errors = np.zeros((self.ranks, count)), np.zeros(count)
        worker, server = self.errors
        mean = np.zeros(count)
        for begin in range(0, count, 512):
            part = slice(begin, min(begin + 512, count))
            for i in range(self.ranks):
                x = flats[i][part] + worker[i][part]
                q = np.abs(x).mean() * np.where(x >= 0, 1, -1)
                worker[i][part] = x - q
                mean[part] += q / self.ranks
            y = mean[part] + server[part]
            mean[part] = np.abs(y).mean() * np.where(y >= 0, 1, -1)
            server[part] = y - mean[part]
        parts = np.split(mean, np.cumsum([t.size for t in tensors[0]])[:-1])
        return [part.reshape(t.shape) for part, t in zip(parts, tensors[0])]


ORDER = [0, 1, 3, 2, 4]                # of the tensors in the optimizer: first those with decay
LR = 0.005                             # so small that 1-bit LAMB comes to both bounds of its ratios


class NumpyRanks:
    """Weights, moments and masks of N ranks, as plain arrays; subclasses have the equations."""

    def __init__(self, values, decays, ranks, lr=LR, b1=0.9, b2=0.99, eps=1e-6):
        self.w = [[v.copy() for v in values] for _ in range(ranks)]
        self.m = [[np.zeros_like(v) for v in values] for _ in range(ranks)]
        self.v = [np.zeros_like(v) for v in values]
        self.decays, self.ranks, self.frozen = decays, ranks, False
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.compressed_mean = SimulatedMean(ranks)

    def magnitudes(self):
        scales = [np.sqrt((m ** 2).mean()) for m in self.m[0]]
        self.scaling = [np.mean(scales) / s if s > 0 else 1.0 for s in scales]
        self.compressed_mean.reset()

    def average(self, tensors):
        """Compressed means of tensors[rank][i], at one magnitude, masked where v is 0."""
        scaled = [[mine[i] * self.scaling[i] for i in ORDER] for mine in tensors]
        means = dict(zip(ORDER, self.compressed_mean(scaled)))
        return [means[i] / self.scaling[i] * (self.v[i] > 0) for i in range(len(self.v))]

    def step(self, grads, frozen):
        """grads[rank][i]"""
        if frozen != self.frozen:
            self.agree()
            self.magnitudes()
            self.begin_stage()
        self.frozen = frozen
        self.update(grads, [sum(g) / self.ranks for g in zip(*grads)])

    def begin_stage(self):
        pass

    def agree(self):
        pass


class NumpyOneBitAdam(NumpyRanks):
    def moments(self, grads, mean):
        """Moves m, and in the first stage v; returns m."""
        b1, b2, old = self.b1, self.b2, self.m[0]
        if self.frozen:
            m = self.average([[b1 * m + (1 - b1) * g for m, g in zip(old, mine)] for mine in grads])
        else:
            m = [b1 * m + (1 - b1) * g for m, g in zip(old, mean)]
            self.v = [b2 * v + (1 - b2) * g ** 2 for v, g in zip(self.v, mean)]
        self.m = [m] * self.ranks
        return m

    def update(self, grads, mean):
        m, most = self.moments(grads, mean), 1 if self.frozen else np.inf
        w = [w - self.lr * (np.clip(m / (np.sqrt(v) + self.eps), -most, most) + d * w)
             for w, m, v, d in zip(self.w[0], m, self.v, self.decays)]
        self.w = [w] * self.ranks


class NumpyOneBitLAMB(NumpyOneBitAdam):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ratio = [1.0] * len(self.v)

    def begin_stage(self):
        self.fresh, self.factor = [v.copy() for v in self.v], [1.0] * len(self.v)

    def update(self, grads, mean):
        w, old, b1, b2 = self.w[0], self.m[0], self.b1, self.b2
        m, new, norm = self.moments(grads, mean), [], np.linalg.norm
        for i, (v, decay) in enumerate(zip(self.v, self.decays)):
            d = np.sqrt(v) + self.eps
            p = np.clip(m[i] / d, -1, 1) if self.frozen else m[i] / d
            u = p + decay * w[i]
            if not self.frozen:
                c = min(max(ratio(w[i], u), 0.01), 10.0) if decay else 1.0
                self.ratio[i] = 0.9 * self.ratio[i] + 0.1 * c
                new.append(w[i] - self.lr * c * u)
                continue
            g = (m[i] - b1 * old[i]) / (1 - b1)
            self.fresh[i] = b2 * self.fresh[i] + (1 - b2) * g ** 2
            f = (d / (np.sqrt(self.fresh[i]) + self.eps)).max()
            r = min(1.0, norm(p) / norm(u)) if norm(u) > 0 else 1.0
            f = min(max(r * f + 1 - r, 0.5), 4.0)
            self.factor[i] = min(max(f, self.factor[i] * 0.9), self.factor[i] * 1.1)
            new.append(w[i] - self.lr * self.ratio[i] * self.factor[i] * u)
        self.w = [new] * self.ranks


class NumpyZeroOneAdam(NumpyRanks):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaling, self.rates = None, 0.0
        self.begin_stage()

    def begin_stage(self):
        self.t, self.k, self.learned, self.j, self.alone = 0, 1, 0, 1, 0
        self.agreed = self.w[0]

    def update(self, grads, mean):
        b1, b2, lr = self.b1, self.b2, self.lr
        self.t += 1
        if not self.frozen:
            if self.t % self.k == 0:
                c = b2 ** self.k                       # k steps in one
                self.v = [c * v + (1 - c) * g ** 2 for v, g in zip(self.v, mean)]
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
            self.w[r] = [w - lr * (m / x + decay * w)
                         for m, x, w, decay in zip(self.m[r], d, self.w[r], self.decays)]
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
        m = self.average([[(k - w) * x / self.rates for w, k, x in zip(mine, kept, d)]
                          for mine in self.w])
        self.agreed = [k - self.rates * s / x for k, s, x in zip(kept, m, d)]
        self.w = [list(self.agreed) for _ in range(self.ranks)]
        self.m = [m] * self.ranks
        self.rates = 0.0


ONE_BIT = {
    "OneBitAdam": (NumpyOneBitAdam, {}),
    "OneBitLAMB": (NumpyOneBitLAMB, {}),
    "ZeroOneAdam": (NumpyZeroOneAdam, {"variance_updates": 2, "interval_steps": 3}),
}
STAGES = [False] * 12 + [True] * 9 + [False] * 6 + [True] * 12             # two phases


class RankMean:
    """A rank's side of the simulated mean, with the interface of dist.CompressedMean."""

    def __init__(self, world):
        self.world, self.simulated = world, SimulatedMean(world.size)

    def __call__(self, tensors):
        everyone = self.world.all_gather_object([t.numpy().copy() for t in tensors])
        for tensor, mean in zip(tensors, self.simulated(everyone)):
            tensor.copy_(torch.from_numpy(mean))
        return 100

    def state_dict(self):
        return {"errors": self.simulated.errors}

    def load_state_dict(self, state):
        if state:
            self.simulated.errors = state["errors"]
        else:
            self.simulated.reset()


def train_one_bit(world, name):
    """Trains as one of the ranks; returns (weights, bytes sent) after every step."""
    values, decays, _ = problem()
    params, groups = parameters(values, decays)
    grads = [problem(10 + rank, len(STAGES))[2] for rank in range(world.size)]

    def make(groups):
        return getattr(optim, name)(groups, RankMean(world), lr=LR, betas=(0.9, 0.99),
                                    **ONE_BIT[name][1])

    optimizer, history = make(groups), []
    for step, frozen in enumerate(STAGES):
        local = optimizer.local_gradients(frozen)
        assert local or not frozen
        assert optimizer.local_gradients(frozen) == local        # asked again after a skipped step
        each = [[mine[step][i] for mine in grads] for i in range(len(params))]
        apply(optimizer, params, [g[world.rank] if local else sum(g) / world.size for g in each])
        if step + 1 == len(STAGES):
            optimizer.synchronise()
        if step in (7, 16):                                      # resumes, in each stage
            state = optimizer.state_dict()
            optimizer = make([{"params": g["params"]} for g in optimizer.param_groups])
            optimizer.load_state_dict(state)
        history.append(([p.detach().numpy().copy() for p in params], optimizer.bytes_sent))
    return history


@pytest.mark.parametrize("name", ONE_BIT)
@pytest.mark.parametrize("size", [1, 2])
def test_one_bit_optimizers_are_their_equations(tmp_path, name, size):
    values, decays, _ = problem()
    oracle = ONE_BIT[name][0](values, decays, size)
    grads = [problem(10 + rank, len(STAGES))[2] for rank in range(size)]
    histories = run_ranks(train_one_bit, size, tmp_path, name)
    for step, frozen in enumerate(STAGES):
        oracle.step([mine[step] for mine in grads], frozen)
        if step + 1 == len(STAGES):
            oracle.agree()
        for history, expected in zip(histories, oracle.w):
            assert_equal(history[step][0], expected, 1e-8, step)
            if name != "ZeroOneAdam" and step not in (7, 16):
                assert history[step][1] == 100 * frozen          # bytes of this step alone
    for history in histories:                                    # the ranks agree at the end
        assert_equal(history[-1][0], histories[0][-1][0], 0.0)


def real_means(world):
    """Five compressed means of odd shapes by dist.CompressedMean, and a reset after the third."""
    shapes = {"a": (7, 33), "b": (5,), "c": (40, 33)}
    mean = dist.CompressedMean([(k, torch.empty(s)) for k, s in shapes.items()], world)
    means = []
    for step in range(5):
        rng = np.random.default_rng((world.rank, step))
        tensors = [torch.tensor(rng.normal(size=s), dtype=torch.float32) for s in shapes.values()]
        sent = mean(tensors)
        if step == 2:
            mean.load_state_dict(None)
        means.append([tensor.numpy() for tensor in tensors])
    return means, sent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_compressed_mean_of_dist_is_the_simulated_one(tmp_path, size):
    simulated, expected = SimulatedMean(size), []
    for step in range(5):
        rngs = [np.random.default_rng((rank, step)) for rank in range(size)]
        expected.append(simulated([[rng.normal(size=s) for s in ((7, 33), (5,), (40, 33))]
                                   for rng in rngs]))
        if step == 2:
            simulated.reset()
    for means, sent in run_ranks(real_means, size, tmp_path):
        for ours, theirs in zip(means, expected):
            for a, b in zip(ours, theirs):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        blocks = -(-1556 // (512 * size))
        assert sent == 2 * (size - 1) * blocks * (512 // 8 + 4)  # two phases of signs and scales


@pytest.fixture
def exact_mean(monkeypatch):
    """On one rank, without compression: a mean that changes nothing."""
    monkeypatch.setattr(optim.OneBitAdam, "_average", lambda self, tensors: None)
    return SimpleNamespace(load_state_dict=lambda state: None)


def test_the_factor_of_one_bit_lamb_is_bounded(exact_mean):
    w, factors = torch.ones(4, requires_grad=True), []
    optimizer = optim.OneBitLAMB([w], exact_mean, betas=(0.9, 0.8), weight_decay=0.0)
    for t, size in enumerate([1.0] * 20 + [1e-3] * 60 + [1e3] * 30):
        optimizer.local_gradients(t >= 20)
        apply(optimizer, [w], [np.full(4, size, np.float32)])
        factors += optimizer.param_groups[0]["f"] if t >= 20 else [1.0]
    assert max(factors) == 4.0 and min(factors) == 0.5
    assert np.abs(np.diff(factors) / factors[:-1]).max() < 0.1001


def test_zero_one_adam_without_compression_goes_on_as_in_its_first_stage(monkeypatch, exact_mean):
    """Where all agree in every step, the second stage is the first with v at rest."""
    monkeypatch.setattr(optim, "variance_interval", lambda t, _: 1 if t <= 10 else 10 ** 9)
    values, decays, grads = problem(4)
    results = []
    for freezes in (False, True):
        params, groups = parameters(values, decays)
        optimizer = optim.ZeroOneAdam(groups, exact_mean, lr=0.02)
        for t, step in enumerate(grads):
            optimizer.local_gradients(freezes and t >= 10)
            apply(optimizer, params, step)
        results.append([p.detach().numpy() for p in params])
    assert_equal(*results, 1e-9)


def test_the_variance_of_zero_one_adam_forgets_with_time_not_with_its_updates(exact_mean):
    w = torch.ones(4, requires_grad=True)
    optimizer = optim.ZeroOneAdam([w], exact_mean, lr=0.01, betas=(0.9, 0.99))
    for t in range(1, 241):
        optimizer.local_gradients(False)
        apply(optimizer, [w], [np.full(4, 2, np.float32)])
        if optimizer.learns:
            assert_equal([optimizer.state[w]["exp_avg_sq"].numpy()], [4 * (1 - 0.99 ** t)], 1e-5)
    assert optimizer.k == 8


def test_intervals_of_zero_one_adam():
    moves = [t for t in range(1, 241) if t % optim.variance_interval(t, 16) == 0]
    assert np.diff([0, *moves]).tolist() == [1] * 16 + [2] * 16 + [4] * 16 + [8] * 16
    agrees = [t for t in range(1, 10 ** 4) if t % optim.agreement_interval(t, 100) == 0]
    gaps = np.diff([0, *agrees]).tolist()
    assert gaps == sorted(gaps) and set(gaps) == {1, 2, 4, 8, 16} and gaps.count(1) == 100
    for steps, interval in (125000, 32678), (3, 1):              # of a run
        made = optim.make_optimizer("zeroone-adam", {"w": torch.ones(2, 2), "b": torch.ones(2)},
                                    (0.9, 0.999), steps, lambda named: None)
        assert {group["interval_steps"] for group in made.param_groups} == {interval}


# ----- Around the update -----

def test_groups_put_every_bias_and_layer_norm_without_decay():
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    names = {p: name for name, p in model.named_parameters()}
    order = []                                   # what a CompressedMean is made of
    for optimizer in "adamw", "onebit-adam":
        made = optim.make_optimizer(optimizer, dict(model.named_parameters()), (0.9, 0.98), 100,
                                    lambda pairs: order.extend(name for name, _ in pairs))
        groups = [([names[p] for p in group["params"]], group["weight_decay"])
                  for group in made.param_groups]
        free = {name for part, decay in groups if decay == 0 for name in part}
        assert free == {name for name in names.values() if name.endswith("bias") or "norm" in name}
        assert {name for part, decay in groups if decay == 0.01 for name in part} == {
            *names.values()} - free
        assert made.param_groups[0]["betas"] == (0.9, 0.98) and made.param_groups[0]["eps"] == 1e-6
    assert order == [name for part, _ in groups for name in part]


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
    assert abs(model.weight.item() - 1.1) < 0.01       # added to the model itself it stays 1


def test_master_weights_of_fp32_are_the_parameters():
    model = torch.nn.Linear(2, 2)
    assert optim.master_weights(model)["weight"] is model.weight
    model.bias.requires_grad_(False)
    assert set(optim.master_weights(model)) == {"weight"}


def test_loss_scaler_halves_doubles_and_is_bounded():
    scaler = optim.LossScaler(scale=8.0, growth_interval=3, smallest=2.0, largest=16.0)
    assert not scaler.update(True, 1, {})
    assert scaler.scale == 4.0 and scaler.skipped == 1
    assert [scaler.update(False, 2, {}) for _ in range(3)] == [True] * 3 and scaler.scale == 8.0
    for _ in range(2):
        scaler.update(False, 5, {})
    scaler.update(True, 6, {})                         # the count of good steps starts again
    for scale in 4.0, 4.0, 8.0:
        scaler.update(False, 7, {})
        assert scaler.scale == scale
    for _ in range(20):
        scaler.update(False, 9, {})
    assert scaler.scale == 16.0 and scaler.skipped == 2
    other = optim.LossScaler()
    vars(other).update(vars(scaler))
    assert other == scaler


def test_loss_scaler_stops_at_the_floor_and_names_the_parameter():
    scaler = optim.LossScaler(scale=4.0, smallest=2.0)
    gradients = {"fine": torch.ones(2), "broken": torch.tensor([1.0, float("nan")])}
    scaler.update(True, 41, gradients)
    with pytest.raises(optim.TrainingStopped, match="step 42.*broken.*floor of 2"):
        scaler.update(True, 42, gradients)
    with pytest.raises(optim.TrainingStopped, match="gradient of a rank is not finite"):
        scaler.update(True, 43, {"fine": torch.ones(2)})


@pytest.mark.parametrize("scale", [1024.0, 1.0, 0.125])          # below 1 after overflows in bf16
@pytest.mark.parametrize("max_norm", [np.inf, 0.5, 1e6])
def test_unscale_and_clip_is_torchs(max_norm, scale):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,))]
    for p in params:
        p.grad = torch.randn_like(p)
    scaled = [scale * p.grad for p in params]
    optim.unscale_and_clip_(scaled, float(optim.global_norm(scaled)), scale, max_norm)
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    for p, g in zip(params, scaled):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=0)
    zeros = [torch.zeros(3)]
    optim.unscale_and_clip_(zeros, 0.0, scale, max_norm)
    assert not zeros[0].any()


def test_global_norm_shows_inf_and_nan():
    for bad in (float("inf"), float("nan")):
        assert not torch.isfinite(optim.global_norm([torch.ones(3), torch.tensor([0.0, bad])]))


def test_learning_rate_with_decay_from_0_is_nvidias():
    phase = SimpleNamespace(steps=7038, lr=6e-3, warmup=0.2843, decay_from=0.0, power=0.5)
    rates = [optim.learning_rate(step, phase) for step in range(phase.steps)]
    top = rates.index(max(rates))
    assert abs(top - 2000) <= 2 and max(rates) == pytest.approx(6e-3, rel=1e-3)
    assert rates[top + 1] == pytest.approx(6e-3 * (1 - 0.2843) ** 0.5, rel=1e-3)
    assert rates[0] > 0 and rates[-1] > 0
    assert rates[top + 1:] == sorted(rates[top + 1:], reverse=True)


def test_learning_rate_warms_up_holds_and_decays_to_zero():
    phase = SimpleNamespace(steps=1000, lr=1.0, warmup=0.4, decay_from=0.7, power=1.0)
    rates = [optim.learning_rate(step, phase) for step in range(1000)]
    assert rates[:400] == sorted(rates[:400]) and rates[0] == pytest.approx(1 / 400, rel=0.01)
    assert all(rate == 1.0 for rate in rates[401:699])
    assert rates[849] == pytest.approx(0.5, abs=0.01) and 0 < rates[-1] < 0.01
    assert max(abs(a - b) for a, b in zip(rates, rates[1:])) < 0.01            # nowhere a jump
