"""Tests that compare the variants' optimizers with their equations in float64, or with torch's."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import optim
import train
from tests.local_ranks import on_threads
from tests.training import args_of
from tests.variants import (came, lans, merit, modern, muon, onebit_adam, onebit_lamb,
                            slow_momentum, zeroone_adam)
from tests.variants.equations import B1, B2, EPS, LR, check_equations, installed, ratio


def mixed(old, new, b):
    """Returns the running mean, `old` so far, with the next value, `new`."""
    return b * old + (1 - b) * new


def plain(optimizer):
    """Returns a function that makes an optimizer of a single rank with the equations' constants."""
    return lambda groups, world, reducer: optimizer(groups, lr=LR, betas=(B1, B2))


# ----- On one rank -----

def came_step(s, g):
    def factors(name, x, b):
        """Updates the running means `name` and returns A: for a matrix from the means of its rows
        and columns, for a vector from all elements."""
        lines = [x] if x.ndim == 2 else [x.mean(2, keepdims=True), x.mean(1, keepdims=True)]
        old = vars(s).get(name, [0.0, 0.0])
        vars(s)[name] = [mixed(*pair, b) for pair in zip(old, lines)]
        r, *c = vars(s)[name]
        return 1 / np.sqrt(r / r.mean() * c[0] if c else r)

    u = g * factors("squares", g ** 2 + 1e-30, B2)
    u = u / max(1, np.sqrt(np.mean(u ** 2)))
    s.m = mixed(s.m, u, B1)
    b3 = 1 - (1 - B2) / 10
    confidence = factors("strays", (u - s.m) ** 2 + 1e-16, b3) if u.ndim == 3 else 1
    s.w = s.w - LR * s.decay * s.w - LR * s.m * confidence


def merit_step(s, g):
    s.m = mixed(s.m, g, B1)
    s.v = mixed(s.v, g ** 2, B2)
    u = s.m / (np.sqrt(s.v) + EPS) + s.decay * s.w
    q = np.full_like(u, -np.inf)
    defined = True
    for lines in [(0, 1)] if u.ndim == 2 else [(0, 1, 2), 2, 1]:         # the whole; rows; columns
        w_max, u_max = (abs(x).max(lines, keepdims=True) for x in (s.w, u))
        defined = defined & (w_max > 0) & (u_max > 0)
        q = np.maximum(q, w_max / np.where(u_max > 0, u_max, 1))
    s.w = s.w - LR * np.clip(np.where(defined, q, 1) * u, -1, 1)


def lans_step(s, g):
    g = g / np.linalg.norm(g) if g.any() else g
    s.m = mixed(s.m, g, B1)
    s.v = mixed(s.v, g ** 2, B2)
    d = np.sqrt(s.v / (1 - B2 ** s.t)) + EPS
    r = s.m / (1 - B1 ** s.t) / d + s.decay * s.w
    n = g / d + s.decay * s.w
    s.w = s.w - LR * (B1 * ratio(s.w, r) * r + (1 - B1) * ratio(s.w, n) * n)


@pytest.mark.parametrize("optimizer, step", [
    (came.CAME, came_step), (merit.MERIT, merit_step), (lans.LANS, lans_step)])
def test_an_optimizer_is_its_equations(optimizer, step):
    check_equations(step, plain(optimizer))


def test_the_recipe_of_lans():
    with installed(lans.install):
        args = args_of("--recipe", "lans-96k", "--lr-scale", "2")
        rates = [optim.learning_rate(done, args.phases[0]) for done in (0.4265 / 2, 0.5, 0.7, 0.85)]
        later = [optim.learning_rate(done, args.phases[1]) for done in (0.096, 0.3, 0.65)]
        other = optim.learning_rate(0.99, optim.Phase(64, 8, 9, 1, warmup=0))
    short, long = args.phases
    assert rates == pytest.approx([6.75e-3, 13.5e-3, 13.5e-3, 6.75e-3]), (
        "the rate of phase 1 does not grow, hold and decay")
    assert later == pytest.approx([5e-3, 10e-3, 5e-3])
    assert other == pytest.approx(0.1), "the schedule of other recipes changes"
    assert short.steps + long.steps == 4301
    assert (short.global_batch, long.global_batch, long.lr) == (98304, 33792, 10e-3)


def test_the_recipe_s_optimizer_stays_and_a_given_one_is_taken():
    """train.py needs both to warn, also of a variant's recipe, of rates for another optimizer."""
    with installed(lans.install):
        for argv, taken in ([], "lans"), (["--optimizer", "adamw"], "adamw"):
            assert args_of(*argv).optimizer == taken
        made_for = [recipe["optimizer"] for recipe in optim.RECIPES.values()]
    assert made_for == ["lamb", "adamw", "lamb", "lans"]


def test_came_keeps_rows_and_columns_in_place_of_a_second_moment():
    p = torch.zeros(30, 50, requires_grad=True)
    kept = [x.untyped_storage().nbytes() // 4 for x in came.CAME([p]).state[p].values()]
    assert sum(kept) == 30 * 50 + 2 * (30 + 50), (
        f"CAME's tensors have {kept} elements, which is not 1660 in all")


@pytest.mark.parametrize("kind, precision, tolerance", [
    (bert.BertForPreTraining, "bf16", 1e-5), (modern.Modern, "fp32", 3e-3)])
def test_muon_is_torchs_on_the_matrices_of_blocks_and_adamw_elsewhere(kind, precision, tolerance):
    """torch's Muon computes in bf16."""
    torch.manual_seed(0)
    model = kind(bert.BertConfig(1, 64, 1, 128, 128))
    masters = optim.cast_with_masters(model, torch.float32)
    groups = [group | {"precision": precision} for group in muon.groups_of(masters)]
    ours = muon.Muon(groups, betas=(0.9, 0.98))
    expected = {name: w.clone() for name, w in masters.items()}
    others = dict(expected)
    matrices = []                                          # of blocks; some are parts of a tensor
    for name, w in expected.items():
        masters[name].grad = w.grad = torch.zeros_like(w)
        if name.startswith("blocks.") and w.dim() > 1:
            count = {"qkv": 3, "up_and_gate": 2}.get(name.split(".")[2], 1)
            for matrix, gradient in zip(w.chunk(count), w.grad.chunk(count)):
                matrix.grad = gradient
                matrices.append(matrix)
            del others[name]
    optimizers = [
        ours, optim.make_optimizer("adamw", others, (0.9, 0.98)),
        torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95,
                         adjust_lr_fn="match_rms_adamw")]
    for _ in range(10):
        for w in masters.values():
            w.grad.normal_()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
    for name, w in masters.items():
        assert torch.allclose(w, expected[name], tolerance, tolerance), (
            f"{name} differs from torch's result")
        kept = ours.state[w]["exp_avg_sq"].numel()
        assert kept == (w.numel() if name in others else 0), (
            f"the second moment of {name} has {kept} elements")


@pytest.mark.parametrize("asked, agreed", [("auto", "bf16"), ("fp32", "fp32")])
def test_all_ranks_compute_muon_as_rank_0_does_or_as_asked(monkeypatch, asked, agreed):
    def build(args, world):
        group = {"precision": ["bf16", "fp32"][world.rank]}
        return SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group, {}]))

    monkeypatch.setattr(train, "build", build)
    with installed(muon.install):
        args = SimpleNamespace(precision=asked)
        states = on_threads(lambda world: train.build(args, world), 2)
    for state in states:
        assert state.optimizer.param_groups == [{"precision": agreed}, {}]


# ----- On ranks that step alone, or whose mean is compressed -----

def slow_step(s, g):
    s.m = mixed(s.m, g, B1)
    s.slow = mixed(vars(s).get("slow", 0.0), g, 0.99)
    s.v = mixed(s.v, g ** 2, B2)
    u = 0.5 * s.m / (1 - B1 ** s.t) + 0.5 * s.slow / (1 - 0.99 ** s.t)
    s.w = s.w - LR * (u / (np.sqrt(s.v / (1 - B2 ** s.t)) + EPS) + s.decay * s.w)
    if s.t % 4 == 0:
        s.w, s.slow = (x.mean(0) + 0 * x for x in (s.w, s.slow))
        s.sent += 2 * s.w[0].nbytes                        # 2 (W - 1) / W is 1 on two ranks


def slow(groups, world, reducer):
    optimizer = plain(slow_momentum.SlowMomentum)(groups, world, reducer)
    optimizer.connect(world, reducer)
    return optimizer


def test_slow_momentum_is_its_equations(monkeypatch):
    monkeypatch.setattr(slow_momentum, "PERIOD", 4)
    check_equations(slow_step, slow, ranks=2)


class Squashed:
    """Stands in for onebit_adam.CompressedMean: the n-th call since `forget` is an exact mean over
    the ranks of tanh(x - 0.1 n). Like a mean of signs, it turns 0 into something else, depends on
    the magnitude of x, and has a memory."""
    calls = 0

    def __init__(self, world):
        self.world = world

    def __call__(self, tensors):
        self.calls += 1
        for tensor in tensors:
            everyone = self.world.all_gather(tensor)
            tensor.copy_(torch.tanh(everyone - 0.1 * self.calls).mean(0))
        return sum(tensor.numel() for tensor in tensors)

    def forget(self):
        self.calls = 0


def average(s, x):
    """Returns a compressed mean of x at the magnitude that `set_magnitude` found last."""
    s.calls += 1
    s.sent += x[0].size
    mean = np.tanh(x * s.magnitude - 0.1 * s.calls).mean(0) + 0 * x
    return mean / s.magnitude * (s.v > 0)


def set_magnitude(s):
    rms = np.sqrt((s.m[0] ** 2).mean())
    s.magnitude = 1 / rms if rms > 0 else 1.0
    s.calls = 0


def one_bit_moments(s, g):
    """Updates m, and in the first stage v; returns p."""
    if s.stage_begins:
        set_magnitude(s)
    if s.frozen:
        s.m = average(s, mixed(s.m, g, B1))
        return np.clip(s.m / (np.sqrt(s.v) + EPS), -1, 1)
    mean = g.mean(0) + 0 * g
    s.m = mixed(s.m, mean, B1)
    s.v = mixed(s.v, mean ** 2, B2)
    return s.m / (np.sqrt(s.v) + EPS)


def one_bit_adam_step(s, g):
    s.w = s.w - LR * (one_bit_moments(s, g) + s.decay * s.w)


def one_bit_lamb_step(s, g):
    old = s.m
    if s.stage_begins:
        s.fresh, s.factor = s.v, 1.0
    p = one_bit_moments(s, g)
    u = p + s.decay * s.w
    s.ratio = vars(s).get("ratio", 1.0)
    if not s.frozen:
        c = np.clip(ratio(s.w, u), 0.01, 0.3) if s.decay else 1.0
        s.ratio = mixed(s.ratio, c, 0.9)
        s.w = s.w - LR * c * u
        return
    s.fresh = mixed(s.fresh, ((s.m - B1 * old) / (1 - B1)) ** 2, B2)
    f = ((np.sqrt(s.v) + EPS) / (np.sqrt(s.fresh) + EPS)).max()
    r = min(1.0, ratio(p, u))
    s.factor = np.clip(np.clip(r * f + 1 - r, 0.5, 4.0), 0.9 * s.factor, 1.1 * s.factor)
    s.w = s.w - LR * s.ratio * s.factor * u


def zero_one_adam_step(s, g):
    if s.t == 1:
        s.magnitude, s.rates = None, 0.0
    if s.t == 1 or s.stage_begins:
        s.since = 0                                        # steps of this stage
        s.agreed = s.w
        s.k, s.j = 1, 1                                    # intervals of v and of agreements
        s.learned, s.alone = 0, 0                          # updates and steps since they doubled
    if s.stage_begins:
        set_magnitude(s)
    s.since += 1
    if not s.frozen:
        mean = g.mean(0) + 0 * g
        if s.since % s.k == 0:
            s.v = mixed(s.v, mean ** 2, B2 ** s.k)         # k steps in one
            s.learned += 1
            if s.learned == 2:
                s.learned, s.k = 0, 2 * s.k
        else:
            if s.magnitude is None:
                set_magnitude(s)
            mean = average(s, g)
        g = mean
    d = np.sqrt(s.v) + EPS
    s.m = mixed(s.m, g, B1)
    s.w = s.w - LR * (s.m / d + s.decay * s.w)
    if s.frozen:
        s.rates += LR
        agree = s.since % s.j == 0
        s.alone += 1
        if s.alone == 3:
            s.alone, s.j = 0, min(16, 2 * s.j)
        if (agree or s.phase_ends) and s.rates:
            kept = (1 - s.rates * s.decay) * s.agreed
            s.m = average(s, (kept - s.w) * d / s.rates)
            s.agreed = s.w = kept - s.rates * s.m / d
            s.rates = 0.0


def one_bit(optimizer):
    def make(groups, world, reducer):
        made = plain(optimizer)(groups, world, reducer)
        made.compressed_mean = Squashed(world)
        made.reducer = reducer
        made.agreement_steps = 3
        return made

    return make


STAGES = [False] * 12 + [True] * 9 + [False] * 6 + [True] * 40             # two phases


@pytest.mark.parametrize("optimizer, step", [
    (onebit_adam.OneBitAdam, one_bit_adam_step), (onebit_lamb.OneBitLAMB, one_bit_lamb_step),
    (zeroone_adam.ZeroOneAdam, zero_one_adam_step)])
def test_a_one_bit_optimizer_is_its_equations(optimizer, step, monkeypatch):
    monkeypatch.setattr(zeroone_adam, "VARIANCE_UPDATES", 2)
    states = check_equations(step, one_bit(optimizer), ranks=2, frozen=STAGES)
    for s in states:
        assert np.array_equal(*s.w), "the ranks do not agree at the end"
