"""The 1-bit variants: their equations on simulated ranks, and runs of train.py with them."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import dist
import train
from tests.ranks import run_ranks
from tests.test_optim import apply, assert_equal, parameters, problem, ratio
from tests.test_variants import installed, train_here
from tests.training import args_of, column
from tests.variants import common, onebit_adam, onebit_lamb, zeroone_adam


# ----- The equations, on simulated ranks -----

def one_bit(x):
    """Returns what blocks (..., 512) become in one bit an element."""
    return np.abs(x).mean(-1, keepdims=True) * np.where(x >= 0, 1, -1)


class SimulatedMean:
    """The mean of N ranks in float64, each rank's share and the mean itself in one bit."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.forget()

    def forget(self):
        self.errors = 0, 0                             # of the ranks, of the mean

    def __call__(self, tensors):
        """tensors[i]: the list of rank i; returns the list of means."""
        flats = np.array([np.concatenate([t.ravel() for t in mine]) for mine in tensors])
        padding = -flats.shape[1] % (512 * self.ranks)
        x = np.pad(flats, ((0, 0), (0, padding))).reshape(self.ranks, -1, 512) + self.errors[0]
        sent = one_bit(x)
        y = sent.mean(0) + self.errors[1]
        mean = one_bit(y)
        self.errors = x - sent, y - mean
        parts = np.split(mean.ravel(), np.cumsum([t.size for t in tensors[0]]))
        return [part.reshape(t.shape) for part, t in zip(parts, tensors[0])]


ORDER = [0, 1, 3, 2, 4]                # of the tensors in the optimizer: first those with decay
LR = 0.005                             # so small that 1-bit LAMB comes to both bounds of its ratios


class NumpyRanks:
    """Weights, moments and masks of N ranks, as plain arrays; subclasses have the equations."""

    def __init__(self, values, decays, ranks, lr=LR, b1=0.9, b2=0.99, eps=1e-6):
        self.w = [[v.copy() for v in values] for _ in range(ranks)]
        self.m = [[np.zeros_like(v) for v in values] for _ in range(ranks)]
        self.v = [np.zeros_like(v) for v in values]
        self.decays = decays
        self.ranks = ranks
        self.frozen = False
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.compressed_mean = SimulatedMean(ranks)

    def magnitudes(self):
        scales = [np.sqrt((m ** 2).mean()) for m in self.m[0]]
        self.scaling = [np.mean(scales) / s if s > 0 else 1.0 for s in scales]
        self.compressed_mean.forget()

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
        b1, b2 = self.b1, self.b2
        old = self.m[0]
        if self.frozen:
            m = self.average([[b1 * m + (1 - b1) * g for m, g in zip(old, mine)] for mine in grads])
        else:
            m = [b1 * m + (1 - b1) * g for m, g in zip(old, mean)]
            self.v = [b2 * v + (1 - b2) * g ** 2 for v, g in zip(self.v, mean)]
        self.m = [m] * self.ranks
        return m

    def update(self, grads, mean):
        m = self.moments(grads, mean)
        most = 1 if self.frozen else np.inf
        w = [w - self.lr * (np.clip(m / (np.sqrt(v) + self.eps), -most, most) + d * w)
             for w, m, v, d in zip(self.w[0], m, self.v, self.decays)]
        self.w = [w] * self.ranks


class NumpyOneBitLAMB(NumpyOneBitAdam):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ratio = [1.0] * len(self.v)

    def begin_stage(self):
        self.fresh = [v.copy() for v in self.v]
        self.factor = [1.0] * len(self.v)

    def update(self, grads, mean):
        w, old, b1, b2 = self.w[0], self.m[0], self.b1, self.b2
        norm = np.linalg.norm
        m = self.moments(grads, mean)
        new = []
        for i, (v, decay) in enumerate(zip(self.v, self.decays)):
            d = np.sqrt(v) + self.eps
            p = np.clip(m[i] / d, -1, 1) if self.frozen else m[i] / d
            u = p + decay * w[i]
            if not self.frozen:
                c = min(max(ratio(w[i], u), 0.01), 0.3) if decay else 1.0
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
        self.scaling = None
        self.rates = 0.0
        self.begin_stage()

    def begin_stage(self):
        self.t = 0
        self.k, self.learned = 1, 0            # v's interval, its updates since that doubled
        self.j, self.alone = 1, 0              # the agreements' interval, steps since that doubled
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
    onebit_adam: (onebit_adam.OneBitAdam, NumpyOneBitAdam),
    onebit_lamb: (onebit_lamb.OneBitLAMB, NumpyOneBitLAMB),
    zeroone_adam: (zeroone_adam.ZeroOneAdam, NumpyZeroOneAdam)}
STAGES = [False] * 12 + [True] * 9 + [False] * 6 + [True] * 12             # two phases


class RankMean:
    """A rank's side of the simulated mean, with the interface of onebit_adam.CompressedMean."""

    def __init__(self, world):
        self.world = world
        self.simulated = SimulatedMean(world.size)
        self.forget = self.simulated.forget

    def __call__(self, tensors):
        everyone = self.world.all_gather_object([t.numpy().copy() for t in tensors])
        for tensor, mean in zip(tensors, self.simulated(everyone)):
            tensor.copy_(torch.from_numpy(mean))
        return 100


def phase_ends(step):
    return step + 1 == len(STAGES) or (STAGES[step] and not STAGES[step + 1])


def train_one_bit(world):
    """Trains with each of ONE_BIT as one of the ranks; returns (weights, bytes sent) after every
    step."""
    zeroone_adam.VARIANCE_UPDATES = 2
    histories = []
    for kind, _ in ONE_BIT.values():
        values, decays, _ = problem()
        params, groups = parameters(values, decays)
        grads = [problem(10 + rank, len(STAGES))[2] for rank in range(world.size)]
        optimizer = kind(groups, lr=LR, betas=(0.9, 0.99))
        optimizer.compressed_mean = RankMean(world)
        optimizer.agreement_steps = 3
        history = []
        for step, frozen in enumerate(STAGES):
            optimizer.reducer = SimpleNamespace(bytes_sent=0)
            local = optimizer.begin_step(frozen)
            assert local or not frozen
            assert optimizer.begin_step(frozen) == local         # asked again after a skipped step
            step_grads = []
            for i in range(len(params)):
                each = [mine[step][i] for mine in grads]
                step_grads.append(each[world.rank] if local else sum(each) / world.size)
            apply(optimizer, params, step_grads)
            if phase_ends(step) and hasattr(optimizer, "agree"):
                optimizer.agree()
            weights = [p.detach().numpy().copy() for p in params]
            history.append((weights, optimizer.reducer.bytes_sent))
        histories.append(history)
    return histories


def test_optimizers_are_their_equations(tmp_path):
    values, decays, _ = problem()
    grads = [problem(10 + rank, len(STAGES))[2] for rank in range(2)]
    ranks = run_ranks(train_one_bit, 2, tmp_path)
    for (variant, (_, oracle_of)), *histories in zip(ONE_BIT.items(), *ranks):
        oracle = oracle_of(values, decays, 2)
        for step, frozen in enumerate(STAGES):
            oracle.step([mine[step] for mine in grads], frozen)
            if phase_ends(step):
                oracle.agree()
            for history, expected in zip(histories, oracle.w):
                weights, sent = history[step]
                assert_equal(weights, expected, 1e-8, step)
                if variant is not zeroone_adam:
                    assert sent == 100 * frozen                  # bytes of this step alone
        assert_equal(histories[0][-1][0], histories[1][-1][0], 0.0)      # they agree at the end


SHAPES = {"a": (7, 33), "b": (5,), "c": (40, 33)}


def noise(rank, step):
    """Returns the tensors of a rank."""
    rng = np.random.default_rng((rank, step))
    return [rng.normal(size=shape) for shape in SHAPES.values()]


def real_means(world):
    """Five compressed means of odd shapes by CompressedMean, which forgets after the third."""
    masters = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    mean = onebit_adam.CompressedMean(masters, list(masters.values()), world)
    means = []
    for step in range(5):
        tensors = [torch.tensor(x, dtype=torch.float32) for x in noise(world.rank, step)]
        sent = mean(tensors)
        if step == 2:
            mean.forget()
        means.append([tensor.numpy() for tensor in tensors])
    return means, sent


def test_the_compressed_mean_is_the_simulated_one(tmp_path):
    simulated = SimulatedMean(3)
    ranks = run_ranks(real_means, 3, tmp_path)
    for step in range(5):
        # A bucket begins with the last tensor
        expected = simulated([noise(rank, step)[::-1] for rank in range(3)])[::-1]
        if step == 2:
            simulated.forget()
        for means, sent in ranks:
            for ours, theirs in zip(means[step], expected):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
            assert sent == 2 * 2 * 2 * (512 // 8 + 4)            # two blocks of signs, twice


def test_the_factor_of_one_bit_lamb_is_bounded(monkeypatch):
    monkeypatch.setattr(onebit_adam.OneBitAdam, "average", lambda self, tensors: None)
    w = torch.ones(4, requires_grad=True)
    optimizer = onebit_lamb.OneBitLAMB([w], betas=(0.9, 0.8), weight_decay=0.0)
    optimizer.compressed_mean = SimulatedMean(1)
    factors = []
    for t, size in enumerate([1.0] * 20 + [1e-3] * 60 + [1e3] * 30):
        optimizer.begin_step(t >= 20)
        apply(optimizer, [w], [np.full(4, size, np.float32)])
        factors.append(float(optimizer.state[w]["f"]))
    assert max(factors) == 4.0 and min(factors) == 0.5
    assert np.abs(np.diff(factors) / factors[:-1]).max() < 0.1001


# ----- In train.py -----

def test_where_the_variance_freezes():
    """After the warm-up, or a fifth of a phase."""
    with installed(onebit_lamb):
        args = args_of("--recipe", "nvidia-64k")
    assert args.optimizer == "onebit-lamb" and args.betas == (0.9, 0.999)
    counters = train.Counters()
    state = SimpleNamespace(counters=counters)
    for counters.phase, first_frozen in (0, 2001), (1, 312):
        for counters.phase_step in range(args.phases[counters.phase].steps):
            frozen = onebit_adam.is_frozen(args, state)
            assert frozen == (counters.phase_step >= first_frozen), counters


@pytest.mark.parametrize("argv, words", [
    ("--compression int8", "needs --compression none, fp16 or bf16, and no --optimizer"),
    ("--optimizer adamw", "needs --compression none, fp16 or bf16, and no --optimizer"),
    ("--steps 3 2", "frozen before its first update; take more --steps")])
def test_what_cannot_work_is_refused(shards, tmp_path, argv, words):
    with installed(onebit_lamb), pytest.raises((ValueError, ArithmeticError), match=words):
        train_here(dist.World(), shards, tmp_path / "out", *argv.split())


def spoiled_run(world, shards, out):
    """Trains three steps, then the fourth with an infinite loss on rank 1, then a fifth; after each
    part returns what the bits of this rank's weights and moments add up to."""
    onebit_adam.FREEZE = 0.1                               # from the third step on
    forward = bert.BertForPreTraining.forward
    last = 3

    def spoiled(self, batch):
        logits = forward(self, batch)
        if self.training and world.rank == 1 and last == 4:
            logits["mlm"] = logits["mlm"] * float("inf")
        return logits

    bert.BertForPreTraining.forward = spoiled
    states = []
    sums = []
    with installed(onebit_lamb):
        common.after_build(lambda args, world, state: states.append(state))
        for last in 3, 4, 5:
            train_here(world, shards, out, "--steps", 20, "--batch", 4, "--save-every", 1,
                       "--max-steps", last)
            tensors = train.tensors_of(states[-1]).values()
            sums.append(sum(int(tensor.view(torch.int32).long().sum()) for tensor in tensors))
    return sums


def test_an_overflow_in_the_second_stage_skips_the_step_on_all(shards, tmp_path):
    out = tmp_path / "out"
    first, second = run_ranks(spoiled_run, 2, tmp_path, shards, out)
    before, skipped, moved = first
    assert first == second and before == skipped != moved
    assert column(out, "skipped") == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("variant", ONE_BIT)
def test_16_bits_follow_fp32(shards, tmp_path, variant):
    """With accumulation, through both stages of two phases; fp16 with its loss scale."""
    # In bf16 some signs of 0/1 Adam turn, which large steps show.
    lr_scale = 0.002 if variant is zeroone_adam else 0.03
    for low, batch, lr, tolerance in ("fp16", 4, 0.03, 3e-3), ("bf16", 12, lr_scale, 1e-2):
        argv = f"--steps 4 2 --batch {batch} --micro-tokens {16 * batch} --lr-scale {lr}".split()
        losses = {}
        norms = {}
        for precision in "fp32", low:
            out = tmp_path / f"{low}-{precision}"
            with installed(variant):
                train_here(dist.World(), shards, out, "--precision", precision, *argv)
            losses[precision] = column(out, "mlm_loss")
            norms[precision] = column(out, "grad_norm")
            scale = 65536 if precision == "fp16" else 1
            assert column(out, "skipped", "loss_scale") == 6 * [0, scale]
        assert losses[low] == pytest.approx(losses["fp32"], rel=tolerance)
        assert losses[low] != losses["fp32"]
        assert norms[low] == pytest.approx(norms["fp32"], rel=0.1)
