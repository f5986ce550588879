"""The 1-bit variants: their equations on simulated ranks, and whole runs of train.py with them."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import dist
import optim
import train
from tests.ranks import run_ranks, together
from tests.test_optim import apply, assert_equal, parameters, problem, ratio
from tests.training import SHORT, assert_same, last_state, metrics, plan_of, run
from tests.variants import onebit_adam, onebit_lamb, synchronised, zeroone_adam


# ----- The equations, on simulated ranks -----

class SimulatedMean:
    """The two-phase 1-bit mean of N ranks in float64, block by block."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.forget()

    def forget(self):
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
    "onebit-adam": (onebit_adam.OneBitAdam, NumpyOneBitAdam),
    "onebit-lamb": (onebit_lamb.OneBitLAMB, NumpyOneBitLAMB),
    "zeroone-adam": (zeroone_adam.ZeroOneAdam, NumpyZeroOneAdam)}
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

    def state_dict(self):
        return {"errors": self.simulated.errors}

    def load_state_dict(self, state):
        self.simulated.errors = state["errors"]


def connected(optimizer, mean):
    """Returns an optimizer as `connect` makes it, with a mean of its own."""
    optimizer.compressed_mean = mean
    optimizer.reducer = SimpleNamespace(bytes_sent=0)
    optimizer.agreement_steps = 3
    return optimizer


def train_one_bit(world, name):
    """Trains as one of the ranks; returns (weights, bytes sent) after every step."""
    zeroone_adam.VARIANCE_UPDATES = 2
    values, decays, _ = problem()
    params, groups = parameters(values, decays)
    grads = [problem(10 + rank, len(STAGES))[2] for rank in range(world.size)]

    def make(groups):
        optimizer = ONE_BIT[name][0](groups, lr=LR, betas=(0.9, 0.99))
        return connected(optimizer, RankMean(world))

    optimizer = make(groups)
    history = []
    for step, frozen in enumerate(STAGES):
        optimizer.reducer.bytes_sent = 0
        local = optimizer.begin_step(frozen)
        assert local or not frozen
        assert optimizer.begin_step(frozen) == local             # asked again after a skipped step
        step_grads = []
        for i in range(len(params)):
            each = [mine[step][i] for mine in grads]
            step_grads.append(each[world.rank] if local else sum(each) / world.size)
        apply(optimizer, params, step_grads)
        phase_ends = step + 1 == len(STAGES) or (frozen and not STAGES[step + 1])
        if phase_ends and name == "zeroone-adam":
            optimizer.agree()
        if step in (7, 16):                                      # resumes, in each stage
            state = optimizer.state_dict()
            optimizer = make([{"params": g["params"]} for g in optimizer.param_groups])
            optimizer.load_state_dict(state)
        weights = [p.detach().numpy().copy() for p in params]
        history.append((weights, optimizer.reducer.bytes_sent))
    return history


@pytest.mark.parametrize("name", ONE_BIT)
@pytest.mark.parametrize("size", [1, 2])
def test_optimizers_are_their_equations(tmp_path, name, size):
    values, decays, _ = problem()
    oracle = ONE_BIT[name][1](values, decays, size)
    grads = [problem(10 + rank, len(STAGES))[2] for rank in range(size)]
    histories = run_ranks(train_one_bit, size, tmp_path, name)
    for step, frozen in enumerate(STAGES):
        oracle.step([mine[step] for mine in grads], frozen)
        if step + 1 == len(STAGES) or (frozen and not STAGES[step + 1]):
            oracle.agree()
        for history, expected in zip(histories, oracle.w):
            weights, sent = history[step]
            assert_equal(weights, expected, 1e-8, step)
            if name != "zeroone-adam" and step not in (7, 16):
                assert sent == 100 * frozen                      # bytes of this step alone
    for history in histories:                                    # the ranks agree at the end
        assert_equal(history[-1][0], histories[0][-1][0], 0.0)


def real_means(world):
    """Five compressed means of odd shapes by CompressedMean, which forgets after the third."""
    shapes = {"a": (7, 33), "b": (5,), "c": (40, 33)}
    named = [(name, torch.empty(shape)) for name, shape in shapes.items()]
    mean = onebit_adam.CompressedMean(named, world)
    means = []
    for step in range(5):
        rng = np.random.default_rng((world.rank, step))
        tensors = [torch.tensor(rng.normal(size=s), dtype=torch.float32) for s in shapes.values()]
        sent = mean(tensors)
        if step == 2:
            mean.forget()
        means.append([tensor.numpy() for tensor in tensors])
    return means, sent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_compressed_mean_is_the_simulated_one(tmp_path, size):
    simulated = SimulatedMean(size)
    expected = []
    for step in range(5):
        rngs = [np.random.default_rng((rank, step)) for rank in range(size)]
        expected.append(simulated([[rng.normal(size=s) for s in ((7, 33), (5,), (40, 33))]
                                   for rng in rngs]))
        if step == 2:
            simulated.forget()
    for means, sent in run_ranks(real_means, size, tmp_path):
        for ours, theirs in zip(means, expected):
            for a, b in zip(ours, theirs):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        blocks = train.ceil_div(1556, 512 * size)
        assert sent == 2 * (size - 1) * blocks * (512 // 8 + 4)  # two phases of signs and scales


# ----- On one rank, with a mean that changes nothing -----

@pytest.fixture
def exact_mean(monkeypatch):
    monkeypatch.setattr(onebit_adam.OneBitAdam, "average", lambda self, tensors: None)
    return SimpleNamespace(forget=lambda: None)


def test_the_factor_of_one_bit_lamb_is_bounded(exact_mean):
    w = torch.ones(4, requires_grad=True)
    optimizer = onebit_lamb.OneBitLAMB([w], betas=(0.9, 0.8), weight_decay=0.0)
    connected(optimizer, exact_mean)
    factors = []
    for t, size in enumerate([1.0] * 20 + [1e-3] * 60 + [1e3] * 30):
        optimizer.begin_step(t >= 20)
        apply(optimizer, [w], [np.full(4, size, np.float32)])
        factors += optimizer.param_groups[0]["f"] if t >= 20 else [1.0]
    assert max(factors) == 4.0 and min(factors) == 0.5
    assert np.abs(np.diff(factors) / factors[:-1]).max() < 0.1001


def test_zero_one_adam_without_compression_goes_on_as_in_its_first_stage(monkeypatch, exact_mean):
    """Where all agree in every step, the second stage is the first with v at rest."""
    def rests_after_ten(t, _):
        return 1 if t <= 10 else 10 ** 9

    monkeypatch.setattr(zeroone_adam, "variance_interval", rests_after_ten)
    values, decays, grads = problem(4)
    results = []
    for freezes in (False, True):
        params, groups = parameters(values, decays)
        optimizer = connected(zeroone_adam.ZeroOneAdam(groups, lr=0.02), exact_mean)
        optimizer.agreement_steps = 1000
        for t, step in enumerate(grads):
            optimizer.begin_step(freezes and t >= 10)
            apply(optimizer, params, step)
        results.append([p.detach().numpy() for p in params])
    assert_equal(*results, 1e-9)


def test_the_variance_of_zero_one_adam_forgets_with_time_not_with_its_updates(exact_mean):
    w = torch.ones(4, requires_grad=True)
    optimizer = zeroone_adam.ZeroOneAdam([w], lr=0.01, betas=(0.9, 0.99))
    connected(optimizer, exact_mean)
    for t in range(1, 241):
        optimizer.begin_step(False)
        apply(optimizer, [w], [np.full(4, 2, np.float32)])
        if optimizer.learns:
            assert_equal([optimizer.state[w]["exp_avg_sq"].numpy()], [4 * (1 - 0.99 ** t)], 1e-5)
    assert optimizer.interval == 8


def test_intervals_of_zero_one_adam():
    moves = [t for t in range(1, 241) if t % zeroone_adam.variance_interval(t, 16) == 0]
    assert np.diff([0, *moves]).tolist() == [1] * 16 + [2] * 16 + [4] * 16 + [8] * 16
    agrees = [t for t in range(1, 10 ** 4) if t % zeroone_adam.agreement_interval(t, 100) == 0]
    gaps = np.diff([0, *agrees]).tolist()
    assert gaps == sorted(gaps) and set(gaps) == {1, 2, 4, 8, 16} and gaps.count(1) == 100


# ----- In train.py: plans, refusals -----

@pytest.fixture
def installed(monkeypatch):
    """Installs a variant until the test ends."""
    def install(variant):
        for module in (bert, dist, optim, train):
            for name, value in vars(module).items():
                monkeypatch.setattr(module, name, value)
        variant.install()
    return install


def test_where_the_variance_freezes(installed, shards):
    installed(onebit_lamb)
    plan = plan_of("--data", shards, "--recipe", "nvlamb-64k")
    steps = [onebit_adam.freeze_step(phase) for phase in plan.phases]
    assert steps == [round(0.2843 * 7038), round(0.2 * 1563)]            # the warm-up, or a fifth
    assert plan.optimizer == "onebit-lamb" and plan.betas == (0.9, 0.999)
    frozen = [onebit_adam.is_frozen(plan, step) for step in range(plan.ends[-1])]
    stages = [frozen.index(True), frozen.index(False, 7000), frozen.index(True, 7038)]
    assert stages == [2001, 7038, 7038 + 313]
    demo = plan_of("--data", shards)
    assert [onebit_adam.freeze_step(phase) for phase in demo.phases] == [460, 80]


def test_0_1_adam_agrees_less_often_after_a_quarter_of_the_run(installed, shards, tmp_path):
    installed(zeroone_adam)
    plan = plan_of("--data", shards, "--out", tmp_path)
    state = train.build(plan, dist.World(), None)
    state.reducer.close()
    assert state.optimizer.agreement_steps == 2700 * 32678 // 125000


def test_a_plan_counts_the_memory_of_the_errors(installed, shards):
    plain = plan_of("--data", shards)
    before = sum(train.state_gigabytes(plain).values())
    installed(onebit_adam)
    now = sum(train.state_gigabytes(plan_of("--data", shards)).values())
    model = bert.BertForPreTraining(plain.config)
    assert now - before == pytest.approx(16e-9 * sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize("argv, words", [
    ("--compression topk", "onebit-lamb needs --compression none, fp16 or bf16"),
    ("--steps 9 2", "onebit-lamb cannot freeze after 0 of 2 steps; take more --steps"),
    ("--optimizer lans", "optimizer is onebit-lamb: leave out --optimizer")])
def test_what_cannot_work_is_refused(installed, shards, argv, words):
    installed(onebit_lamb)
    with pytest.raises(train.ConfigError) as error:
        plan_of("--data", shards, *argv.split())
    assert words in str(error.value)


# ----- In train.py: whole runs -----

FREEZES = *SHORT, "--precision", "fp32"


def one_bit(world, name, freeze=0.5, spoiled=None):
    """Makes this process's train.py one of the variants, which freezes at a fraction of each phase;
    the loss of rank 1 is infinite in the forward pass number `spoiled`."""
    onebit_adam.FREEZE = freeze
    {"onebit-adam": onebit_adam, "onebit-lamb": onebit_lamb, "zeroone-adam": zeroone_adam}[
        name].install()
    forward = bert.BertForPreTraining.forward
    calls = []

    def patched(self, batch):
        losses = forward(self, batch)
        if self.training:
            calls.append(1)
            if world.rank == 1 and len(calls) == spoiled:
                losses = losses._replace(mlm_sum=losses.mlm_sum * float("inf"))
        return losses

    bert.BertForPreTraining.forward = patched


def test_a_run_resumes_in_both_phases_with_the_same_bits(shards, tmp_path):
    """v freezes after 4 of 8 and 3 of 6 steps: the second stages are steps 5 to 8 and 12 to 14."""
    def in_one_and_in_three(name):
        whole, parts = tmp_path / name / "whole", tmp_path / name / "parts"
        whole.parent.mkdir()
        sums = run(shards, whole, *FREEZES, size=2, sabotage=(one_bit, name))
        for last in (6, 12, 14):
            sums_of_parts = run(shards, parts, *FREEZES, "--max-steps", last, size=2,
                                sabotage=(one_bit, name))
        assert sums == sums_of_parts and sums[0] == sums[1]
        assert_same(last_state(whole), last_state(parts))
        assert [line["loss"] for line in metrics(whole)] == [
            line["loss"] for line in metrics(parts)]
        sent = [line["bytes_sent"] for line in metrics(whole)]
        return sent[:4] + sent[8:11], sent[5:8] + sent[11:14]

    (dense, signs), (mixed, rare) = together(lambda: in_one_and_in_three("onebit-lamb"),
                                             lambda: in_one_and_in_three("zeroone-adam"))
    assert len(set(dense)) == 1 and len(set(signs)) == 1
    assert signs[0] < dense[0] / 25               # no gradient crosses the wire
    assert max(rare) < mixed[0] / 10


@pytest.mark.parametrize("save_every, evaluate_every", [(8, 100), (100, 8)])
def test_ranks_agree_before_a_save_and_an_evaluation(shards, tmp_path, save_every, evaluate_every):
    """0/1 Adam, frozen after step 3, agrees after steps 4, 5 and 7. After step 8 weights differ:
    a save, which compares them, makes them equal, and so does an evaluation."""
    argv = ["--steps", 9, 0, "--batch", 8, "--workers", 0, "--checkpoint-every", save_every,
            "--eval-every", evaluate_every]
    sums = run(shards, tmp_path / "out", *argv, size=2, sabotage=(one_bit, "zeroone-adam", 0.34))
    assert sums[0] == sums[1]
    # The bytes of that agreement are in the next step's line.
    sent = [line["bytes_sent"] for line in metrics(tmp_path / "out")]
    assert sent[5] == sent[7] == 0 and sent[8] == sent[6] > 0


def test_a_run_resumes_on_other_ranks(shards, tmp_path):
    argv = *FREEZES, "--dropout", 0, "--steps", 8, 0
    lamb = one_bit, "onebit-lamb"

    def two():
        run(shards, tmp_path / "two", *argv, "--max-steps", 6, size=2, sabotage=lamb)
        run(shards, tmp_path / "two", *argv, size=4, sabotage=lamb)

    together(lambda: run(shards, tmp_path / "one", *argv, sabotage=lamb), two)
    one, two = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert two[:5] == pytest.approx(one[:5], rel=1e-4)    # before the first compressed mean
    assert len(two) == 8 and two == pytest.approx(one, rel=0.05)
    moments = last_state(tmp_path / "two")["optimizer"]["state"].values()
    positions = [m["exp_avg"] for m in moments
                 if m["exp_avg"].shape == (512, 64) and not m["exp_avg"][32:].any()]
    assert len(positions) == 1 and positions[0][:32].any()    # those not seen stay masked


@pytest.mark.parametrize("name, precision", [("onebit-lamb", "fp32"), ("zeroone-adam", "bf16")])
def test_an_overflow_in_the_second_stage_skips_the_step_on_all(shards, tmp_path, name, precision):
    argv = "--steps 20 --batch 4 --micro-batch 2 --workers 0 --checkpoint-every 1".split()
    argv += ["--precision", precision]
    out = tmp_path / "out"
    plain = one_bit, name, 0.1                           # the fourth step is in the second stage
    before = run(shards, out, *argv, "--max-steps", 3, size=2, sabotage=plain)
    state = last_state(out)
    after = run(shards, out, *argv, "--max-steps", 4, size=2, sabotage=(*plain, 1))
    assert after == before and before[0] == before[1]    # the weights, on both ranks
    skipped = last_state(out)
    assert skipped["step"] == 4 and skipped["scaler"]["scale"] == state["scaler"]["scale"] / 2
    for key in ("weights", "optimizer", "residuals"):
        assert_same(skipped[key], state[key], key)
    moved = run(shards, out, *argv, "--max-steps", 5, size=2, sabotage=plain)
    assert moved != after and moved[0] == moved[1]
    assert [line["skipped"] for line in metrics(out)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", ONE_BIT)
def test_16_bits_follow_fp32(shards, tmp_path, name):
    """With accumulation, through both stages of two phases; fp16 with its loss scale."""
    argv = "--steps 4 2 --batch 4 --micro-batch 2 --workers 0 --lr-scale 0.03".split()
    losses = {}
    norms = {}
    for precision in ("fp32", "bf16", "fp16"):
        out = tmp_path / precision
        run(shards, out, *argv, "--precision", precision, sabotage=(one_bit, name))
        losses[precision] = [line["loss"] for line in metrics(out)]
        norms[precision] = [line["grad_norm"] for line in metrics(out)]
        scale = 65536 if precision == "fp16" else 1
        assert {(line["skipped"], line["loss_scale"]) for line in metrics(out)} == {(0, scale)}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=3e-3)
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert len(losses["fp16"]) == 6 and losses["fp16"] != losses["fp32"]


def local_norms(world):
    """Returns rank r's gradient, its norm and that of the reducer, bytes; local and averaged."""
    results = []
    for local in (True, False):
        model = torch.nn.Linear(3, 4, bias=False)
        reducer = synchronised.LocalReducer(model, world)
        reducer.local = local
        (model(torch.eye(3)) * (world.rank + 1)).sum().backward()
        reducer.finish()
        gradient = reducer.gradients["weight"].clone()
        results.append((gradient, reducer.norm(), reducer.bytes_sent))
        reducer.close()
    return results


def test_local_gradients_stay_and_their_norm_is_of_all_ranks(tmp_path):
    for rank, (local, averaged) in enumerate(run_ranks(local_norms, 2, tmp_path)):
        gradient, norm, sent = local
        assert torch.equal(gradient, torch.full((4, 3), rank + 1.0)) and sent == 0
        assert norm == pytest.approx(((12 + 48) / 2) ** 0.5 / 2 ** 0.5)
        gradient, norm, sent = averaged
        assert torch.equal(gradient, torch.full((4, 3), 1.5)) and sent == 4 * 12
        assert norm == pytest.approx(1.5 * 12 ** 0.5)
