"""Grades the exercises: each idea has a test, which says in one sentence what is wrong.

The name of a test begins with the name of its exercise, its docstring with its points, 10 for each
exercise. An idea of 1 point is a slip, something that an otherwise right solution may lack, so a
slip must make no other test fail. Random draws depend on SEED, and so do numbers that a solution
could otherwise hard-code.
"""
import copy
import math
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bert
import data
import dist
import optim
import train
from tests.conftest import ROOT, SEED
from tests.course import scale
from tests.local_ranks import on_threads
from tests.ranks import no_room, one_of_two, run_ranks, together
from tests.training import (SHORT, assert_same, built, by_the_clock, column, last_state,
                            on_own_disk, power_fails, random_batch, run, spoil, steps_kept)
from tests.tools import test_flops, test_plan
from tests.variants import onebit, powersgd
from tests.variants.equations import (POWERSGD_BYTES, POWERSGD_SHAPES, gradient,
                                      powersgd_in_float64)


# Draws numbers when this file is imported, so they are the same in all tests and on all ranks.
DRAW = random.Random(SEED)


@pytest.fixture(autouse=True)
def seeded():
    """Makes the random numbers of torch depend on SEED."""
    torch.manual_seed(SEED)


SECONDS = float(os.environ.get("THRIFTBERT_SECONDS", 48))               # for one test
TOO_SLOW = set()                             # tests with a case that took longer


@pytest.fixture(autouse=True)
def limited(request):
    """Ends a test after SECONDS and reports where its threads are. Its other cases do not run."""
    name = request.node.originalname
    if name in TOO_SLOW:
        pytest.fail("not tested because another case took too long", pytrace=False)

    def stop(*_):
        TOO_SLOW.add(name)
        lines = [f"{Path(at.filename).name}:{at.lineno} ({at.name})"
                 for stack in map(traceback.extract_stack, sys._current_frames().values())
                 for at in stack if at.filename.startswith(f"{ROOT}/") and at.name != "stop"]
        pytest.fail(f"after {SECONDS:g} s it stands at {', '.join(lines)}", pytrace=False)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def rng():
    """Returns the generator of a test's random numbers."""
    return random.Random(SEED)


def error_of(ours, exact):
    """Returns the largest error of a tensor, as a fraction of the largest exact element."""
    error = (ours.double() - exact.double()).abs().max()
    return error / exact.abs().max().clamp(min=1e-30)


def assert_near(ours, exact, what, tolerance=1e-6, slips={}):
    """Asserts that a tensor is near `exact`; `what` is the subject of the message. slips: {a
    typical mistake: the tensor that it gives}; the message names it if it fits."""
    assert ours.shape == exact.shape, f"{what} has shape {[*ours.shape]}, not {[*exact.shape]}"
    error = error_of(ours, exact)
    causes = [slip for slip, wrong in slips.items() if error_of(ours, wrong) <= tolerance]
    if error.isnan():
        causes = ["it has a NaN; is something divided by 0?"]
    assert error <= tolerance, ": ".join([
        f"{what} is wrong: the largest error is {error:.2g} times the largest element", *causes])


# ----- masking -----

N = 300_000                  # enough for each random token to occur
FRACTION = DRAW.uniform(0.2, 0.3)
V = 320 + SEED % 37          # pieces


@pytest.fixture
def masked(shards):
    """Returns random tokens, some of them special, as `before`, and the results of `mask`."""
    rng = np.random.default_rng(SEED)
    before = rng.integers(5, 300, N)             # without the last 20 of the vocabulary
    before[::25] = data.CLS
    before[7::25] = data.SEP
    before[11::1000] = data.UNK
    counters = rng.permutation(10 * N)[:N] + 2 ** 40
    dataset = data.PretrainingData(shards, 64, mask_fraction=FRACTION)
    dataset.vocab_size = V
    after = before.copy()
    rows, labels = dataset.mask(after, counters)
    fates = data.uniform(counters[rows], dataset.fate_key)
    return SimpleNamespace(**locals())


def assert_part(chosen, part, what):
    """Asserts that this fraction of some booleans is true, within four standard errors."""
    error = 4 * (part * (1 - part) / len(chosen)) ** 0.5
    assert abs(chosen.mean() - part) < error, f"{chosen.mean():.1%} {what}, not {part:.1%}"


def test_masking_chooses(masked):
    """4 points: tokens are chosen and labelled."""
    rows, before = masked.rows, masked.before
    assert (np.diff(rows) > 0).all(), "the chosen rows are not in ascending order"
    assert before[rows].tobytes() == masked.labels.tobytes(), (
        "the labels are not the original tokens of the chosen rows, or not int64 like these tokens")
    assert {data.CLS, data.SEP}.isdisjoint(masked.labels), (
        "[CLS] or [SEP] was chosen, but they are not text")
    assert data.UNK in masked.labels, "no [UNK] was chosen, but [UNK] is text, too"
    is_chosen = np.isin(np.flatnonzero(before > data.SEP), rows)
    assert_part(is_chosen, FRACTION, "of the text tokens were chosen")
    changed = np.flatnonzero(masked.after != before)
    assert changed.any(), "no token has changed: change `tokens` itself, not a copy"
    assert np.isin(changed, rows).all(), "a token that was not chosen has changed"
    _, none = masked.dataset.mask(before[::25], masked.counters[::25])   # [CLS] alone
    assert getattr(none, "dtype", None) == np.int64, (
        "where nothing is chosen, the labels are no empty array of int64")


def test_masking_replaces(masked):
    """3 points: 80 % become [MASK], 10 % a random token."""
    found = masked.after[masked.rows]
    assert_part(found == data.MASK, 0.8, "of the chosen tokens became [MASK]")
    stays = found == masked.labels
    assert_part(stays, 0.1 + 0.1 / (V - 5), "of the chosen tokens stayed as they were")
    # A fate may come from a key other than fate_key; then a tenth of these tokens stay.
    assert stays[masked.fates > 0.9].mean() > 0.05, (
        "tokens with a fate below 0.9 stay, and tokens with a fate above it do not")
    assert set(found[~stays]) == {*range(4, V)}, (
        f"the random tokens must be all tokens from 5 to V - 1, here {V - 1}, and no others: is "
        "their draw multiplied by V - 5, and is it a different draw from their fate?")
    others = found[~stays & (found != data.MASK)]
    assert_part(np.isin(others, range(5, 10)), 5 / (V - 5), "of the random tokens are 5 to 9")


def test_masking_is_pure(masked):
    """3 points: the masks of an example are the same in any batch."""
    # As in different batches: some examples, of 5 tokens each, one by one, in a different order.
    some = masked.rng.permutation(np.arange(N).reshape(-1, 5))[:400]
    alone = masked.before[some]
    for tokens, rows in zip(alone, some):
        masked.dataset.mask(tokens, masked.counters[rows])
    assert np.array_equal(alone, masked.after[some]), (
        "among different examples, in a different order, different tokens are chosen, or replaced "
        "by different random tokens")
    for what, arguments in ("phase", {"phase": 1}), ("seed", {"seed": 1}):
        other = data.PretrainingData(masked.shards, 64, mask_fraction=FRACTION, **arguments)
        other.vocab_size = V
        after = masked.before.copy()
        rows, _ = other.mask(after, masked.counters)
        both = np.intersect1d(rows, masked.rows)             # chosen with either
        assert len(both) < 0.5 * len(rows), f"another {what} chooses the same tokens"
        ours, theirs = masked.after[both], after[both]
        assert ((ours == data.MASK) == (theirs == data.MASK)).mean() < 0.9, (
            f"another {what} replaces the same tokens by [MASK]")
        same = (ours == theirs)[np.minimum(ours, theirs) > data.MASK]
        assert same.mean() < 0.38, f"another {what} has the same random tokens"


# ----- pairs -----

LENGTH = DRAW.randrange(44, 56)


def document_of(shard, places):
    """Returns the numbers of the documents that these tokens of a shard belong to."""
    return np.searchsorted(shard.documents, places, "right") - 1


def test_pairs_are_half_true(shards):
    """3 points: half of the pairs are true; in the others, B comes from another document."""
    dataset = data.PretrainingData(shards, LENGTH, 1, seed=SEED)
    pairs = dataset.spans(range(20_000))
    for i, pair in enumerate(pairs[:3000]):
        assert (pair.index, pair.shard) == (i, i % 4), (
            f"with 4 shards, example {i} has a wrong index or shard: {pair}")
        assert pair.a < pair.a_end and pair.b < pair.b_end, f"A or B of an example is empty: {pair}"
        assert dataset.length(pair) <= LENGTH, (
            f"an example has {dataset.length(pair)} tokens, more than {LENGTH}: {pair}")
        parts = [pair.a, pair.a_end - 1, pair.b, pair.b_end - 1]
        a, a_last, b, b_last = document_of(dataset.shard(pair.shard), parts)
        assert a == a_last and b == b_last, f"A or B of example {i} has text of two documents"
        if pair.pair_label:
            assert a != b, f"B of example {i} is labelled false, but comes from A's document"
        else:
            assert pair.a_end == pair.b, f"B of example {i} is labelled true, but does not follow A"
    assert_part(np.array([pair.pair_label for pair in pairs]) == 0, 0.5, "of 20,000 pairs are true")
    assert dataset.spans(range(99, 9, -1)) == pairs[99:9:-1], (
        "examples 99 to 10, asked for again, are different pairs")
    without = data.PretrainingData(shards, LENGTH, seed=SEED, pairs="none")
    alone = without.spans(range(20_000))
    for kind, of, spans in ("nsp", dataset, pairs), ("none", without, alone):
        lengths = list(map(of.length, spans))
        short = sum(length < 12 for length in lengths)         # 270 to 440
        assert min(lengths) < 6 and 150 < short < 650, (
            "a tenth of the examples should be short, and a few of these very short; with pairs "
            f"{kind}, {short} of 20,000 have fewer than 12 tokens, the shortest {min(lengths)}")
        assert np.median(lengths) == LENGTH, (
            f"nine tenths of the examples should be as long as fits, {LENGTH} tokens; with pairs "
            f"{kind}, the median of 20,000 is {np.median(lengths):g}")
    few = data.PretrainingData(shards, 5, seed=SEED, pairs="none")       # 3 tokens of text, or 2
    assert_part(np.array(list(map(few.length, few.spans(range(20_000))))) == 5, 0.95,
                "of 20,000 examples with room for 3 tokens of text have 3")
    for text in alone:
        assert text.b == text.b_end and text.pair_label == data.IGNORED, (
            f"without pairs, B must be empty and the label IGNORED, not {text}")


def test_pairs_are_of_all_documents(shards):
    """3 points: a golden walk reads all documents evenly."""
    homes = []
    for phase in 0, 1:
        dataset = data.PretrainingData(shards, 64, phase, seed=SEED)
        shard = dataset.shard(1)
        dataset.paths *= 2                       # eight shards, so 8 k + 1 is no golden walk
        starts = [pair.a for pair in dataset.spans(range(1, 16_000, 8))]
        homes.append(document_of(shard, starts))
        counts = np.bincount(homes[phase], minlength=len(shard.documents) - 1)
        error = np.abs(counts - 2000 * np.diff(shard.documents) / len(shard.tokens)).max()
        assert error < 3, (
            f"of 2,000 texts, a document has {error:.0f} more or fewer than its share of the "
            "shard; golden steps would spread them evenly")
    assert (homes[0] != homes[1]).any(), (
        "both phases read the same documents: is walk_start missing?")


def test_pairs_look_alike(shards):
    """4 points: a false B looks like a true B."""
    dataset = data.PretrainingData(shards, 64, seed=SEED)
    pairs = data.Spans(*np.array(dataset.spans(range(0, 64_000, 4))).T)
    shard = dataset.shard(0)
    sizes = np.diff(shard.documents)
    home = document_of(shard, pairs.b)
    false = pairs.pair_label == 1
    for feature, values in {
            "how often B begins a sentence": dataset.ends_sentence[shard.tokens[pairs.b - 1]],
            "how much of an example B fills": (pairs.b_end - pairs.b) / 64,
            "how often an example is short": dataset.length(pairs) < 50,
            "how often B is in a long document": (sizes > np.median(sizes))[home],
            "how often B begins its document": np.isin(pairs.b, shard.documents)}.items():
        means = values[~false].mean(), values[false].mean()
        assert abs(means[0] - means[1]) < 0.035, (
            f"{feature} is {means[0]:.1%} for true pairs and {means[1]:.1%} for false pairs: a "
            "model can tell them apart without reading")
    # The part of the shard that lies between A's text and the false B.
    way = (pairs.b - pairs.a_end)[false] % shard.documents[-1]
    same = np.corrcoef(way, (pairs.a_end - pairs.a)[false])[0, 1]
    assert abs(same) < 0.2, (
        f"how long A is tells where the false B comes from: their correlation is {same:.2f}")
    long = data.PretrainingData(shards, 128, seed=SEED)
    room = []                                    # of false Bs that end before their document
    for pair in long.spans(range(4000)):
        documents = long.shard(pair.shard).documents
        if pair.pair_label and pair.b_end < documents[documents.searchsorted(pair.b, "right")]:
            room.append(long.length(pair) < 128)
    assert np.mean(room) < 0.25, (
        f"of the false Bs that end before their document does, {np.mean(room):.0%} do not fill up "
        "the example; a tenth of the examples are short, so about 15 % would be right")
    gaps = (home - document_of(shard, pairs.a))[false] % len(sizes)      # documents after A's
    rates = np.bincount(gaps, minlength=len(sizes))[1:] / len(gaps) * len(sizes)
    assert rates.min() > 0.3 and rates.max() < 2, (
        "false B should come equally often from all other documents; counted on from A's document, "
        f"one gives {rates.max():.1f} times as many as the mean, and one {rates.min():.1f} times")


# ----- attention -----

HEADS = DRAW.randrange(2, 5), DRAW.choice([16, 24, 40, 48])    # H, D/H


def packed(lengths):
    """Returns random qkv in fp64 for examples of these lengths, with their bounds and lengths."""
    lengths = torch.tensor(lengths)
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    qkv = torch.randn(int(bounds[-1]), 3, *HEADS, dtype=torch.float64, requires_grad=True)
    return qkv, bounds, lengths


def attention_by_hand(qkv):
    """Returns softmax(Q K^T / sqrt(d)) V of one example, for queries s, keys t and heads h."""
    q, k, v = qkv.unbind(1)                                              # (T, H, d) each
    scores = torch.einsum("shd, thd -> hst", q, k) / HEADS[1] ** 0.5
    return torch.einsum("hst, thd -> shd", scores.softmax(2), v)         # (T, H, d)


def assert_attends(ours, exact, qkv, what):
    """Asserts that results are equal, and that qkv gets the same gradients from both."""
    assert_near(ours, exact, what)
    (ours - exact).sum().backward()              # the gradients cancel if they are equal
    assert qkv.grad.norm() < 1e-3, f"{what} gives Q, K or V a gradient unlike that of its equations"


def test_attention_of_one_example():
    """4 points: attention of one example alone."""
    qkv, _, _ = packed([7])
    assert_attends(bert.plain_attention(qkv), attention_by_hand(qkv), qkv, "plain_attention")
    large = 30 * qkv.detach()                    # exp(S) would be inf
    assert_near(bert.plain_attention(large), attention_by_hand(large),
                "plain_attention of Q, K and V around 30", 1e-3)


@pytest.mark.parametrize("fills_up", [19, 0])         # rows of padding at the end
def test_attention_is_packed(fills_up, rng):
    """4 points: packed examples have the same results as each alone, without extra work."""
    a = rng.randrange(16, 26)
    lengths = 1, a, a + 4, a + 4, 30, fills_up
    qkv, bounds, sizes = packed(lengths)
    # The results of the padding do not matter.
    exact = torch.cat([attention_by_hand(rows) for rows in qkv.split(lengths)[:-1]])
    # MATH uses matrix products, which are counted: two products of length d for each pair of
    # tokens in each head.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
        torch.use_deterministic_algorithms(True, warn_only=True)       # fills new memory with NaN
        found = bert.attention(qkv, bounds, sizes, 0.0)
        torch.use_deterministic_algorithms(False)
    assert len(found) == len(qkv) and found.isfinite().all(), (
        f"attention returns {len(found)} rows, not {len(qkv)} finite ones, {fills_up} of padding")
    what = f"attention of examples of {lengths} tokens, the last of them padding,"
    assert_attends(found[:len(exact)], exact, qkv, what)
    scores = count.get_total_flops() / (4 * math.prod(HEADS))
    needed = sizes @ sizes
    assert scores < 1.05 * needed, (
        f"{what} computes {scores:.0f} numbers of S in a head, not {needed}: the others belong to "
        "two different examples, or to padding")
    for dtype in torch.bfloat16, torch.float16:
        rounded = bert.attention(qkv.to(dtype), bounds, sizes, 0.0)
        assert rounded.dtype == dtype, f"attention of {dtype} returns {rounded.dtype}"
        assert rounded.requires_grad, f"attention of {dtype} gives Q, K and V no gradient"
        assert_near(rounded[:len(exact)], exact, f"attention in {dtype}", 0.05)
    large = bert.attention(30 * qkv.detach(), bounds, sizes, 0.0)        # exp(S) would be inf
    assert large.isfinite().all(), "attention of Q, K and V around 30 is not finite"


def test_attention_drops_weights(rng):
    """2 points: dropout drops attention weights, each by itself."""
    qkv, bounds, sizes = packed([40, 50, 50, 50])        # the last 50 are padding
    dropout = rng.uniform(0.1, 0.2)

    def drop():
        # With ones, all weights are equal, and an output is the sum of the weights that remain.
        alone, sums = bert.attention(torch.ones_like(qkv), bounds, sizes, dropout).split([40, 150])
        return alone, sums.unflatten(0, (3, 50))[:2]

    alone, sums = drop()
    right = (dropout / (1 - dropout) / 50) ** 0.5
    for dim in range(3):
        assert 0.2 * right < sums.std(dim).max() < 6.4 * right, (
            f"a dropout of {dropout:.2f} drops too many or no attention weights, or the same "
            "weights in all examples of one length, in all rows of an example, or in all heads; or "
            "it drops elements of the output, or the weights that remain are made to add up to 1")
    assert sums.std() == pytest.approx(right, rel=0.25), (
        f"with a dropout of {dropout:.2f}, the sums of weights spread by {sums.std():.3f}, not "
        f"{right:.3f}")
    assert alone.std() > 0.01, "where an example is alone with its length, no weight is dropped"
    assert (sums != drop()[1]).any(), "each call drops the same weights"
    assert_near(sums, sums[..., :1].expand_as(sums), "with equal V, a row of the output in a head")
    assert 0.95 < sums.mean() < 1.05, f"the remaining weights add up to {sums.mean():.2f}, not to 1"


# ----- schedule -----

@pytest.mark.parametrize("power", [1, 0.7, 0])
def test_schedule_rates(power, rng):
    """5 points: warm-up, and decay by a power."""
    lr, warmup = rng.uniform(1, 3), rng.uniform(0.2, 0.5)
    phase = optim.Phase(128, 8, 99, lr, warmup, power)
    rates = {part * warmup: part * lr for part in (0.1, 0.25, 0.75, 1)}
    for left in 1, 0.81, 0.64, 0.25, 0.04:
        rates[1 - left * (1 - warmup)] = lr * left ** power
    for done, rate in rates.items():
        found = optim.learning_rate(done, phase)
        assert found == pytest.approx(rate), (
            f"at {done:.4g} of a phase with lr {lr:.4g}, warmup {warmup:.4g} and power {power}, "
            f"the rate should be {rate:.4g}; yours is {found:.4g}")
    without = optim.learning_rate(0, optim.Phase(128, 8, 99, lr, warmup=0, power=power))
    assert without == lr, f"without warmup, the rate begins at {lr:.4g}; yours is {without:.4g}"


N_A, N_B = DRAW.randrange(7, 12), DRAW.choice([3, 4])
HOURS = DRAW.uniform(1, 9)
# With phases of N_A, 0 and N_B steps, {(--hours, --max-steps, fraction of the time that is over,
# phase, steps taken in it): the result of `progress`}
NOTHING = None, 0
NEXT = {(None, 99, 0, 0, 6): (0, 7 / (N_A + 1)), (None, 99, 0, 2, 1): (2, 2 / (N_B + 1)),
        (None, 99, 0, 0, 0): (0, 1 / (N_A + 1)), (None, 99, 0, 0, N_A): (2, 1 / (N_B + 1)),
        (None, 99, 0, 2, N_B): NOTHING, (None, 5, 0, 0, 5): NOTHING, (None, 5, 0, 2, 1): NOTHING,
        (None, 7, 0, 0, 6): (0, 7 / (N_A + 1)), (HOURS, 6, 0.5, 0, 6): NOTHING,
        (HOURS, 99, 1.01, 2, 1): NOTHING, (HOURS, 5, 0.5, 0, 6): NOTHING,
        (HOURS, 99, 0.4, 0, 1): (0, 0.4 * (N_A + 2 * N_B) / N_A),
        (HOURS, 99, 0.9, 0, 60): (2, (0.9 * (N_A + 2 * N_B) - N_A) / (2 * N_B))}


@pytest.mark.parametrize("case", NEXT)
def test_schedule_progress(case):
    """5 points: phases advance by steps or by the clock."""
    phases = [optim.Phase(seq_len, 16, steps, lr=1, warmup=0)
              for seq_len, steps in ((64, N_A), (64, 0), (128, N_B))]
    hours, max_steps, over, phase, phase_step = case
    args = SimpleNamespace(phases=phases, hours=hours, max_steps=max_steps)
    seconds = over * 0.99 * 3600 * HOURS
    state = SimpleNamespace(phase=phase, phase_step=phase_step, seconds=seconds,
                            step=phase_step + N_A * (phase > 0))
    before = {**vars(state)}, [*phases]
    found = train.progress(args, state)
    assert (vars(state), args.phases) == before, (
        "`progress` changes the counters or the phases, but may only read them")
    assert found == pytest.approx(NEXT[case]), (
        f"with phases of {N_A}, 0 and {N_B} steps, --hours {hours} and --max-steps {max_steps}, "
        f"after {state.step} steps, {phase_step} of them of phase {phase}, and {seconds:.0f} s, "
        f"`progress` should return {NEXT[case]}; yours is {found}")


# ----- precision -----

def test_precision_scale(rng):
    """3 points: the loss scale halves, doubles and has a floor."""
    growth = rng.randrange(4, 9)
    scaler = optim.LossScaler(scale=8.0, growth_interval=growth, smallest=2.0, largest=12.0)
    quiet = growth - 1                           # good steps that leave the scale unchanged
    scales = [8] * quiet + [4] * growth + [8, 4] + [4] * quiet + [8] * growth + [12] * (growth + 1)
    for step, scale in enumerate(scales, 1):
        overflow = step in (growth, 2 * growth + 1)
        taken = scaler.update(overflow, step)
        assert bool(taken) != overflow, f"with overflow {overflow}, update must not return {taken}"
        assert scaler.scale == scale, (
            f"from a scale of 8, with growth_interval {growth}, largest 12 and overflows in steps "
            f"{growth} and {2 * growth + 1}, the scale after step {step} should be {scale}; yours "
            f"is {scaler.scale:g}")
    assert (scaler.good_steps, scaler.skipped) == (3 * growth, 2), (
        f"the last {3 * growth} steps were good and two were skipped, but good_steps and skipped "
        f"are {scaler.good_steps} and {scaler.skipped}")
    scaler = optim.LossScaler(scale=1.0, smallest=0.5)
    floor = "an overflow that halves the scale to `smallest` still skips the step: "
    try:
        assert not scaler.update(True, 41), f"{floor}update must return False"
    except optim.TrainingStopped as error:
        pytest.fail(f"{floor}it must not raise {error!r}")
    with pytest.raises(optim.TrainingStopped):
        scaler.update(True, 42)
    assert scaler.skipped == 2, f"after the last overflow, skipped is {scaler.skipped}, not 2"


def test_precision_names_the_step(rng):
    """1 points: the error that stops training names the step."""
    step = rng.randrange(1000, 9999)
    with pytest.raises(optim.TrainingStopped) as caught:
        optim.LossScaler(scale=2.0, smallest=2.0).update(True, step)
    assert str(step) in str(caught.value), f"the error of step {step} does not name the step"


@pytest.mark.parametrize("scale", [1024.0, 1.0, 0.125])
@pytest.mark.parametrize("size, max_norm", [(1.0, 0.5), (1.0, 100.0), (0.0, 0.5)])
def test_precision_clips(scale, size, max_norm, rng):
    """3 points: gradients are unscaled, then clipped by the norm of all."""
    max_norm *= rng.uniform(0.5, 2)
    weights = [torch.zeros(12), torch.zeros(3, 5), torch.zeros(1)]
    for weight in weights:
        weight.grad = size * torch.randn(weight.shape)
    scaled = [scale * weight.grad for weight in weights]
    # A list of its own: the tensors must change, not what is in the list.
    optim.unscale_and_clip_([*scaled], float(nn.utils.get_total_norm(scaled)), scale, max_norm)
    norm = nn.utils.clip_grad_norm_(weights, max_norm)
    for ours, weight in zip(scaled, weights):
        assert_near(ours, weight.grad, f"gradient {[*ours.shape]} of three, with scale {scale:g}, "
                    f"unscaled norm {norm:.3g} of all and max_norm {max_norm:.3g},", 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_masters(dtype, rng):
    """3 points: master weights in fp32."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    begin = 1 + rng.uniform(0.0012, 0.0018)      # not exact in 16 bits
    for p in model.parameters():
        nn.init.constant_(p, begin)
    masters = optim.cast_with_masters(model, dtype)
    names = ["0.weight", "1.weight", "1.bias"]
    assert [*masters] == names, f"masters are {[*masters]}, not {names}: 0.bias is frozen"
    for _ in range(1000):
        torch._foreach_add_([masters[name] for name in names], 1e-4)
        optim.copy_to_model(masters, model)
    places = [p.data_ptr() for p in model.parameters()]
    optim.copy_to_model({name: master.clone() for name, master in masters.items()}, model)
    assert [p.data_ptr() for p in model.parameters()] == places, (
        "copy_to_model gives parameters other memory, but may only write into theirs")
    for name, p in model.named_parameters():
        assert p.dtype == dtype, f"{name} is {p.dtype}, not cast to {dtype}"
        if name in names:
            right = torch.full(p.shape, begin + 0.1)
            what = f"{name}, which was {begin:.5f}, after 1000 updates of 1e-4,"
            assert_near(masters[name], right, f"the master of {what}", 1e-4)
            assert_near(p.detach(), right, what, 0.01)
            shared = masters[name].data_ptr() == p.data_ptr()
            assert shared == (dtype == torch.float32), (
                f"{name} in {dtype}: master and weight share memory in fp32, and only in fp32")
    # In another order; all but the first are exact in fp16, not in bf16.
    others = {name: torch.full_like(masters[name], k + 2 ** -9)
              for k, name in enumerate(names[::-1])}
    optim.copy_to_model(others, model)
    for name, p in model.named_parameters():
        assert name not in names or torch.equal(p, others[name].to(dtype)), (
            f"{name} in {dtype} is not {others[name].max():.8g}, its weight among masters in "
            "another order, rounded once")


# ----- lamb -----

@pytest.fixture
def options(rng):
    """Returns options that an optimizer must not hard-code."""
    return {"lr": rng.uniform(0.01, 0.03), "eps": rng.uniform(1e-4, 1e-2),
            "betas": (rng.uniform(0.8, 0.95), rng.uniform(0.98, 0.995)),
            "weight_decay": rng.uniform(0.02, 0.08)}


@pytest.mark.parametrize("name", ["LAMB", "AdamW"])
def test_lamb_of_vectors_is_adam(options, name):
    """4 points: for vectors, which have no decay, LAMB is Adam; and AdamW is right, too."""
    ours = torch.randn(5).double()
    theirs = ours.clone()
    if name == "LAMB":
        options["weight_decay"] = 0
    lamb = getattr(optim, name)([ours], **options)
    adam = torch.optim.AdamW([theirs], **options)
    for t in range(1, 31):
        ours.grad = theirs.grad = torch.randn(5).double()
        b1, b2 = options["betas"]
        u = (1 - b1) * ours.grad / ((1 - b2) ** 0.5 * ours.grad.abs() + options["eps"])
        without_t = ours - options["lr"] * u               # right in the first step only
        adam.step()
        lamb.step()                                        # last, because it may change g
        assert_near(ours, theirs, f"a vector with decay {options['weight_decay']:.3g}, after step "
                    f"{t} of {name}, which calls adam_update,", 1e-9,
                    {"m and v are not divided by 1 - b^t": without_t})


def lamb_equations(w, m, v, g, t, lr, eps, betas, weight_decay):
    b1, b2 = betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2
    u = (m / (1 - b1 ** t)) / ((v / (1 - b2 ** t)).sqrt() + eps) + weight_decay * w
    ratio = w.norm() / u.norm() or 0.3           # 0.3 if w is 0, inf if u is 0
    return w - lr * min(ratio, 0.3) * u, m, v


def test_lamb_is_its_equations(options):
    """6 points: for matrices, LAMB follows its equations."""
    tensors = [torch.randn(5, 7).double() / 200, torch.zeros(3, 4).double(),
               torch.randn(6, 1).double(), torch.randn(4, 5).double(),
               torch.randn(1100, 1000).double() / 5]
    lamb = optim.LAMB([options | {"params": tensors}])     # not its `defaults`, as in training
    exact = [(w.clone(), 0 * w, 0 * w) for w in tensors]
    places = [w.data_ptr() for w in tensors]
    for t in range(1, 31):
        for k, w in enumerate(tensors):
            w.grad = 3 * torch.randn_like(w) * (k != 2)
            exact[k] = lamb_equations(*exact[k], w.grad, t, **options)
        lamb.step()
        assert [w.data_ptr() for w in tensors] == places, "w has other memory than before the step"
        kinds = ("of small weights", "of zeros", "with gradient 0", "of large weights",
                 "of 1.1 million weights")
        for what, w, right in zip(kinds, tensors, exact):
            assert_near(w, right[0], f"a matrix {what}, after step {t},", 1e-7)
    w = torch.ones(2, 3).double()
    w.grad = 0 * w
    optim.LAMB([w], **options | {"weight_decay": 0}).step()
    assert (w == 1).all(), "a matrix of ones without decay, with gradient 0, has moved"


# ----- dealing -----

@pytest.mark.parametrize("size", [1, 3, 4, 40])
def test_dealing_to_any_ranks(size, rng):
    """3 points: a step has the same examples on any number of ranks."""
    step, batch, most = rng.randrange(2, 9), rng.randrange(31, 39), 4
    ranks = [data.micro_batches(step, batch, most, rank, size) for rank in range(size)]
    dealt = [sum(parts, []) for parts in ranks]
    right = [*range(step * batch, (step + 1) * batch)]
    assert sorted(sum(dealt, [])) == right, (
        f"on {size} ranks, step {step} with batches of {batch} must have examples {right[0]} to "
        f"{right[-1]} once each")
    for rank, (own, parts) in enumerate(zip(dealt, ranks)):
        assert all(i % size == rank for i in own), (
            f"rank {rank} of {size} takes examples i with i modulo {size} = {rank}, not {own}")
        sizes = sorted(map(len, parts)) or [0]
        count = math.ceil(len(own) / most)
        assert sizes[-1] <= most and sizes[-1] - sizes[0] <= 1 and len(parts) == count, (
            f"{len(own)} examples must be in {count} even micro-batches of at most {most}, not in "
            f"sizes {sizes}")


def test_dealing_ahead(rng):
    """3 points: a thread makes the batches of one step ahead."""
    made = []
    step = rng.randrange(1, 50)
    begins = threading.Event()                   # the caller's first step

    def batch(indices):
        time.sleep(0.05)
        if len(made) == len(steps[0]) + 1 and not begins.wait(3):
            made.append("too late")
        made.append([i - 8 * step for i in indices])
        if made[-1][0] >= 16:                    # of the third step
            raise ZeroDivisionError
        return made[-1]

    # The second of two ranks, with batches of 8 in micro-batches of 2. Examples are counted from
    # the first one of `step`.
    steps = [[[i - 8 * step for i in part] for part in data.micro_batches(number, 8, 2, 1, 2)]
             for number in (step, step + 1, step + 2)]       # such as [[1, 5], [3, 7]]
    loader = data.loader(SimpleNamespace(batch=batch), step, 8, 2, 1, 2)
    end = time.monotonic() + 5
    first = next(loader)
    begins.set()
    assert "too late" not in made, "the first step must begin before the second is made"
    first_example = f"counted from example {8 * step}, the first of step {step},"
    assert first == steps[0], (
        f"{first_example} this step must have micro-batches {steps[0]}, not {first}")
    while len(made) < len(steps[0] + steps[1]) and time.monotonic() < end:        # the caller's step runs
        time.sleep(0.2)
    time.sleep(0.2)
    assert made == steps[0] + steps[1], (
        f"while the first step runs, the second must be made, and no more: of {steps}, {made} are "
        "made")
    assert [first, next(loader)] == steps[:2], (
        f"{first_example} the next one must have micro-batches {steps[1]}, in a list of its own")
    with pytest.raises(ZeroDivisionError):       # the thread's error is raised here
        next(loader)


@pytest.mark.parametrize("pairs, right", [("nsp", {"nsp": 5}), ("none", {})])
def test_dealing_divisor(shards, pairs, right):
    """4 points: the divisor counts the labels of the whole step."""
    examples = data.PretrainingData(shards, 32, pairs=pairs)
    batches = [examples.batch([i, i + 9]) for i in range(3)]
    if pairs == "nsp":
        batches[2].labels["nsp"][1] = data.IGNORED         # so five of six count
    else:
        batches[0].labels["mlm"][:] = data.IGNORED         # so rank 0 has no label at all
    counts = [int((batch.labels["mlm"] != data.IGNORED).sum()) for batch in batches]
    parts = batches[:1], batches[1:]
    for found in on_threads(lambda world: train.count_labels(world, parts[world.rank]), 2):
        assert found == {"mlm": sum(counts)} | right, (
            f"with pairs {pairs}, one micro-batch of rank 0 and two of rank 1 have {counts} masked "
            f"tokens, in all {sum(counts)}, and pairs that count: {right}; yours is {found}")


# ----- buckets -----

# Full before the embeddings; after them; a tensor that fills a bucket alone, after another one.
@pytest.mark.parametrize("a, c", [(3, 4), (5, 2), (9, 2)])
def test_buckets_are_filled(a, c, rng):
    """3 points: buckets are filled with the right tensors."""
    unit = rng.randrange(1, 9)
    sizes = {"bias": 1, "embeddings.a": a, "embeddings.b": 4, "embeddings_c": c,
             "d.embeddings.d": 5, "e": 3, "f": 6}
    tensors = {name: torch.zeros(size, unit).half() for name, size in sizes.items()}
    buckets = dist.fill_buckets(tensors, dist.World(), "none", 8.9 * unit * 4e-6)
    assert [*tensors] == [*sizes], "`fill_buckets` changes its argument"
    found = [[*bucket.shapes] for bucket in buckets]
    right = [["f", "e"], ["d.embeddings.d", "embeddings_c"], ["embeddings.b", "embeddings.a"],
             ["bias"]]
    assert found == right, (
        f"with fp16 tensors of sizes {sizes}, and full with 8.9 at 4 bytes an element, the buckets "
        f"are {right}, not {found}")


LARGE = 64.0 * DRAW.randrange(1100, 1900)             # above 65,504; half is exact in fp16
NUMBERS = [float(DRAW.randrange(99)) for _ in range(4)]
SCALE = 2.0 ** DRAW.randrange(1, 9)


def means(world):
    """Returns the means by Dense in fp16 of 4096 and 2, and of 0 and LARGE, and in fp32 of LARGE;
    the bytes in fp16; the mean of NUMBERS by a bucket on two levels, and its bytes; and the scales
    and numbers with which the bucket calls its wire. A stand-in replaces the wire, a part of
    exercise 12."""
    large = torch.full((4,), LARGE * (world.rank % 2))
    large[0] = (4096, 2)[world.rank % 2]         # 2048 + 1 is 2048 in fp16
    large[1] = (0, torch.inf)[world.rank % 2]
    sent_large = dist.Dense(torch.float16).average(world, large, 1.0)
    exact = torch.tensor([LARGE])
    dist.Dense(torch.float32).average(world, exact, 1.0)
    bucket = dist.Bucket({"weight": (600,)}, world, "int8")
    bucket.flat.fill_(NUMBERS[world.rank])
    calls = []

    def average(world, flat, scale):
        calls.append((scale, float(flat[0])))
        flat.div_(world.size)
        world.all_reduce(flat)
        return 1000

    bucket.wire.average = average
    sent = bucket.average(SCALE)
    return torch.cat([large, exact]), sent_large, bucket.flat, sent, calls


def test_buckets_stay_in_range():
    """3 points: the mean stays in the range of fp16."""
    for mean, *_ in on_threads(means, 2):
        assert mean.tolist() == [2048, torch.inf] + [LARGE / 2] * 2 + [LARGE], (
            f"sent and summed in fp16, 4096 and 2 have the mean 2048, 0 and inf the mean inf, and "
            f"0 and {LARGE:g} the mean {LARGE / 2:g}, not {mean[:3].tolist()}; in fp32, {LARGE:g} "
            f"on each rank has this mean, not {mean[4]:g}")
    alone = torch.tensor([1 + 2 ** -12])
    dist.Dense(torch.bfloat16).average(dist.World(), alone, 1.0)
    assert alone == 1, "a single rank must round, too: so it shows what bf16 does to the loss"


def test_buckets_on_two_levels():
    """3 points: gradients are averaged on two levels of network."""
    right = torch.full((600,), sum(NUMBERS) / 4)
    for rank, (_, _, mean, _, found) in enumerate(on_threads(means, 4, local_size=2)):
        assert_near(mean, right, f"the mean of {NUMBERS}, with two ranks on each of 2 nodes,",
                    slips={"the ranks of a node are summed, not averaged": 2 * right})
        calls = [(SCALE, sum(NUMBERS[rank:rank + 2]) / 2)] * (rank % 2 == 0)
        assert found == calls, (
            f"in average({SCALE:g}), rank {rank} calls the wire with (scale, number) {found}, not "
            f"{calls}: only the leaders, ranks 0 and 2, call it, once each, with their node's mean")


def test_buckets_count_bytes():
    """1 points: the bytes sent are returned."""
    for _, dense, *_ in on_threads(means, 2):
        assert dense == 8, f"each of 2 ranks sends 8 bytes of 4 numbers in fp16, not {dense}"
    for rank, (_, dense, _, bucket, _) in enumerate(on_threads(means, 4, local_size=2)):
        right = 12, 1000 * (rank % 2 == 0)
        assert (dense, bucket) == right, (
            f"rank {rank} of 4, on 2 nodes, returns {dense} and {bucket} bytes, not {right}: for "
            "Dense, with 4 numbers in fp16, and for a bucket whose wire returns 1000 on a leader")


# ----- overlap -----

def tower():
    """Returns six layers; backward makes the gradient of the first layer last."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])


def reduced(world):
    """Returns the gradients of 24 examples by one process, and by the Reducer after two steps of
    three micro-batches each."""
    examples = torch.randn(24, 32, generator=torch.Generator().manual_seed(SEED))
    exact = tower()
    (exact(examples).sum() / 12).backward()
    model = tower()
    reducer = dist.Reducer(model, world, bucket_mb=0.005)
    for _ in range(2):                           # nothing of the first step may be left
        reducer.zero_grad()
        for number, part in enumerate(examples[world.rank::2].chunk(3)):
            reducer.last_micro_batch = number == 2
            (model(part).sum() / 6).backward()
        reducer.finish()
    return {name: p.grad for name, p in exact.named_parameters()}, reducer.views


def test_overlap_gradients(tmp_path):
    """3 points: the gradients are those of one process."""
    for exact, ours in run_ranks(reduced, 2, tmp_path):
        for name, gradient in exact.items():
            slips = {"it is 0: is p.grad a tensor other than the view?": torch.zeros_like(gradient),
                     "it is doubled: p.grad is the view, so add nothing to it": 2 * gradient}
            assert_near(ours[name], gradient, f"the bucket's view of the gradient of {name}, on 2 "
                        "ranks,", 1e-5, slips)
    model = tower()
    alone = dist.Reducer(model, dist.World(), "bf16")                    # without a thread
    model(torch.ones(1, 32)).sum().backward()
    alone.flats[0].fill_(1 + 2 ** -12)
    alone.finish()
    assert (alone.flats[0] == 1).all(), "a single rank does not average its buckets"


SIZES = sorted(DRAW.sample(range(2, 20), 3))


def events_of(world):
    """Returns how many buckets are launched when each layer's weight gets its gradient, from the
    last layer on; the order in which buckets start if their gradients become ready in a different
    order on each rank; and whether backward goes on, and ends, while another thread averages."""
    launched = []
    events = []
    threads = set()
    ended = threading.Event()

    def average(bucket, scale):
        threads.add(threading.current_thread())
        events.append((len(bucket.flat), ended.wait(3)))
        return 0

    dist.Bucket.average = average
    model = tower()
    reducer = dist.Reducer(model, world, bucket_mb=0.004)
    for layer in model:
        layer.weight.register_hook(lambda gradient: launched.append(len(reducer.jobs)))
    model(torch.randn(8, 32)).sum().backward()
    ended.set()
    assert len(reducer.jobs) == 6, f"after backward, {len(reducer.jobs)} of 6 buckets are launched"
    reducer.finish()
    beside = all(done for _, done in events)
    events.clear()
    layers = nn.ModuleList(nn.Linear(k, 1, bias=False) for k in SIZES)
    reducer = dist.Reducer(layers, world, bucket_mb=1e-9)
    for layer in [*layers][::(1, -1)[world.rank]]:
        layer(torch.ones(1, layer.in_features)).sum().backward()
    reducer.finish()
    beside = beside and threading.main_thread() not in threads
    return launched, [length for length, _ in events], beside


def test_overlap_in_order(tmp_path):
    """4 points: buckets start in order, in the communication thread, while backward goes on."""
    right = SIZES[::-1]
    for launched, events, beside in run_ranks(events_of, 2, tmp_path):
        assert launched == [*range(6)], (
            "each of six buckets must be launched during backward, as soon as it is complete: when "
            "the weights get their gradients, [0, 1, 2, 3, 4, 5] buckets are launched, not "
            f"{launched}")
        assert events == right, (
            f"buckets of {right} elements must start in this order on each rank, not as {events}")
        assert beside, "backward waits while a bucket is averaged, or averages in its own thread"


def must_raise(kind, function, when):
    """Fails unless function() raises an error of this kind. `when` begins the message."""
    raised = "nothing"
    try:
        function()
    except kind:
        return
    except Exception as error:
        raised = repr(error)
    pytest.fail(f"{when} must raise {kind.__name__}, but raises {raised}", pytrace=False)


def test_overlap_errors():
    """2 points: missing gradients and failures are errors."""
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(2, 1)])
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=5e-6)          # a layer in each bucket
    reducer.buckets[0].average = lambda scale: 1 / 0

    def backward(layers, rest=0):
        (sum(layer(torch.ones(layer.in_features)) for layer in layers) + rest).backward()

    reducer.last_micro_batch = False
    backward(model)
    reducer.last_micro_batch = True
    backward(model[1:], model[0].weight.sum())
    must_raise(dist.DistError, reducer.finish, "if 0.bias took no part in the loss of the last "
               "micro-batch, `finish`, before it waits for any job,")
    assert len(reducer.jobs) == 1, (
        f"while 0.bias has no gradient, 1 of 2 buckets must be launched, not {len(reducer.jobs)}")
    must_raise(dist.DistError, dist.Reducer(tower(), dist.World()).finish,
               "`finish` of a single rank without any gradient")
    reducer.zero_grad()
    backward(model)                              # backward itself raises nothing
    must_raise(ZeroDivisionError, reducer.finish, "`finish` after a job in the thread has failed")
    must_raise(KeyError, lambda: backward(model),
               "`_ready` in a second backward after that of the last micro-batch")
    many = nn.ParameterList([torch.ones(1) for _ in range(5)])
    reducer_of_many = dist.Reducer(many, one_of_two(), bucket_mb=1e-9)
    for bucket in reducer_of_many.buckets:
        bucket.average = lambda scale: 0
    reducer_of_many.buckets[2].average = lambda scale: 1 / 0
    sum(many).backward()
    must_raise(ZeroDivisionError, reducer_of_many.finish,
               "`finish` after the third of five jobs has failed")
    five = nn.ParameterList([torch.ones(1) for _ in range(5)])
    whole = dist.Reducer(five, one_of_two(), bucket_mb=1)    # one bucket
    for absent in range(5):
        whole.zero_grad()
        sum(p for k, p in enumerate(five) if k != absent).backward()
        assert not whole.jobs, f"a bucket is launched though gradient {absent} of its 5 is missing"
    alone = nn.ModuleList([nn.Linear(4, 1)])
    reducer_alone = dist.Reducer(alone, dist.World())
    backward(alone)
    reducer_alone.finish()
    must_raise(KeyError, lambda: backward(alone), "`_ready` in a second backward, after `finish`,")
    reducer.zero_grad()
    model[0].bias.grad = reducer.views["0.weight"][0, :1]
    must_raise(dist.DistError, lambda: backward(model),
               "`_ready` with a p.grad at another place of its bucket")
    for last in False, True:
        reducer.zero_grad()
        reducer.last_micro_batch = last
        model.zero_grad()                        # drops p.grad
        must_raise(dist.DistError, lambda: backward(model), "`_ready` with a p.grad that is no "
                   f"view of its bucket, and with last_micro_batch = {last},")


def test_overlap_tells():
    """1 points: the error names the parameters, and the numbers for the log are right."""
    model = nn.ParameterDict({name: torch.ones(1) for name in ("first", "second", "third")})
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=1e-9)
    for bucket in reducer.buckets:
        bucket.average = lambda scale: time.sleep(0.3) or 7
    began = time.perf_counter()
    sum(model.values()).backward()
    time.sleep(0.2)
    finishes = time.perf_counter()
    reducer.finish()
    took = time.perf_counter() - finishes
    launched = getattr(bucket, "launched", None)
    assert launched and began <= launched <= finishes, (
        f"bucket.launched is {launched}, not the time when `_launch` launched the bucket")
    seconds, sent = getattr(reducer, "wait_seconds", 0), getattr(reducer, "bytes_sent", 0)
    assert 0.7 * took < seconds < took and sent == 21, (
        f"three buckets take 0.3 s and send 7 bytes each, and `finish` waits {took:.2f} s for "
        f"them; your wait_seconds is {seconds:.2f}, your bytes_sent {sent}")
    reducer.zero_grad()
    sum(model.values()).backward()
    time.sleep(0.6)
    finishes = time.perf_counter()
    reducer.finish()
    took = time.perf_counter() - finishes
    assert reducer.wait_seconds < took and reducer.bytes_sent == 21, (
        f"in a second step `finish` takes {took:.2f} s, and 21 bytes are sent; wait_seconds and "
        f"bytes_sent must be of this step alone, but are {reducer.wait_seconds:.2f} and "
        f"{reducer.bytes_sent}")
    reducer.zero_grad()
    model["second"].backward()
    with pytest.raises(dist.DistError) as caught:
        reducer.finish()
    names = [name for name in model if name in str(caught.value)]
    assert names == ["first", "third"], (
        f"first and third take no part in the loss, but the error names {names or 'none'}")
    alone = dist.Reducer(nn.Linear(1, 1), dist.World())
    alone.missing.clear()
    alone.buckets[0].average = lambda scale: time.sleep(0.3) or 0
    began = time.perf_counter()
    alone.finish()
    took = time.perf_counter() - began
    assert hasattr(alone.buckets[0], "ended"), "a single rank does not call `_average`"
    assert alone.wait_seconds <= took - 0.3 and alone.bytes_sent == 0, (
        "a single rank waits or sends")


def measure():
    """Returns the seconds of backward alone, of the network, and of the wait in `finish`. Backward
    and wait are each the shortest of three, with a model of 4 x 256.

    The network is a sleep in place of each bucket's average. All sleeps together take half as long
    as backward alone, so fast and slow machines find about the same.
    """
    model = bert.BertForPreTraining(bert.BertConfig.preset("mini", 512))
    batch = random_batch(512, examples=4)

    def backward_seconds():
        logits = model(batch)
        began = time.perf_counter()
        (logits["mlm"].sum() + logits["nsp"].sum()).backward()
        return time.perf_counter() - began

    alone = min(backward_seconds() for _ in range(3))
    reducer = dist.Reducer(model, one_of_two())
    seconds = alone / 2 / sum(map(len, reducer.flats))                   # for one element
    for bucket in reducer.buckets:
        took = seconds * len(bucket.flat)
        bucket.average = lambda scale, took=took: time.sleep(took) or 0
    waits = []
    for _ in range(3):
        reducer.zero_grad()
        backward_seconds()
        reducer.finish()
        waits.append(reducer.wait_seconds)
    return alone, alone / 2, min(waits)


# ----- powersgd -----

def test_powersgd_is_algorithm_1(tmp_path):
    """7 points: four steps follow algorithm 1."""
    run_ranks(powersgd_in_float64, 2, tmp_path)
    draws = torch.Generator().manual_seed(0)
    before = torch.get_rng_state()
    for number, q in enumerate(powersgd.first_factors([torch.zeros(9, 5), torch.zeros(7, 5)], 3)):
        assert torch.equal(q, torch.randn(3, 5, generator=draws)), (
            f"first_factors for two matrices: q number {number} is not the next draw of one "
            "generator with seed 0")
    assert torch.equal(before, torch.get_rng_state()), (
        "first_factors changes torch's own generator: it needs one of its own")
    sizes = 7, 3000, 5, 3500                     # two matrices, each after a vector, then padding
    value = torch.randn(6600)
    mean, residual, *_ = powersgd.powersgd(dist.World(), value.clone(), {
        "shapes": [torch.Size(shape) for shape in ([7], [60, 50], [5], [70, 50])]})
    zero, *_ = powersgd.powersgd(dist.World(), torch.zeros(3000), {
        "shapes": [torch.Size([60, 50])]})
    assert not zero.any(), "gradients that are all 0 have a mean other than 0"
    line = torch.outer(torch.randn(60), torch.randn(50)).flatten()       # of a rank below k
    found, *_ = powersgd.powersgd(dist.World(), line.clone(), {"shapes": [torch.Size([60, 50])]})
    assert_near(found, line, "the mean of a matrix of rank 1, on one rank,", 1e-4)
    assert_near((mean + residual)[:6512], value[:6512], "mean plus residual, on one rank,")
    for part, size, left in zip(mean.split([*sizes, 88]), sizes, residual.split([*sizes, 88])):
        rank = 0 if size < 9 else torch.linalg.matrix_rank(part.view(-1, 50), rtol=1e-4)
        assert rank <= powersgd.RANK and (size > 9 or not left.any()), (
            "in [7], [60, 50], [5], [70, 50] each tensor must be treated in its place")


def test_powersgd_keeps_the_state():
    """2 points: the state of the step before stays unchanged."""
    _, _, state, _ = powersgd.powersgd(dist.World(), gradient(0, 0), {"shapes": POWERSGD_SHAPES})
    before = copy.deepcopy(state)                # has factors
    bad = torch.full_like(gradient(0, 0), torch.inf)
    for mean, *_ in on_threads(lambda world: powersgd.powersgd(
            world, bad if world.rank else gradient(0, 1), state), 2):
        assert not mean.isfinite().all(), "a rank's gradients are inf, but their mean is finite"
    assert_same(before, state, "after a step, which may still be skipped, the old state")


def test_powersgd_counts_bytes():
    """1 points: the bytes sent are returned."""
    for sent in on_threads(powersgd_in_float64, 2):
        assert sent == [POWERSGD_BYTES] * 4, (
            f"four steps return {sent} bytes, but P, Q and the vector have {POWERSGD_BYTES}")


# ----- feedback -----

N_BUCKET = DRAW.randrange(1100, 1500)


def send(bucket, gradient, scale=1.0):
    """Averages a gradient times `scale`; returns the mean divided by `scale`."""
    bucket.flat.copy_(gradient * scale)
    torch.use_deterministic_algorithms(True, warn_only=True)       # fills new memory with NaN
    bucket.average(scale)
    torch.use_deterministic_algorithms(False)
    return bucket.flat / scale


def kept(bucket):
    """Returns the part of the mean over the ranks that has not been sent yet, (n,)."""
    residual, state = bucket.wire.kept
    assert residual is not None, "nothing is kept of what earlier steps have not sent"
    residuals = bucket.across_nodes.all_gather(residual)
    parts = bucket.across_nodes.all_gather(state["part_residual"])
    return residuals.mean(0)[:N_BUCKET] + parts.view(-1)[:N_BUCKET]


def lossy_bucket(world, compression):
    """Returns a bucket of int8, or of tests/variants/onebit.py."""
    bucket = dist.Bucket({"weight": (N_BUCKET,)}, world, "int8")
    if compression == "onebit":
        bucket.wire = dist.ErrorFeedback(onebit.onebit)
    return bucket


def fed_back(world, compression):
    """Returns sums over 30 steps, of the means sent and of the exact means, and what is kept."""
    bucket = lossy_bucket(world, compression)
    went_in = went_out = torch.zeros(N_BUCKET)
    for step in range(30):
        slopes = [gradient(rank, step)[:N_BUCKET] for rank in range(world.size)]
        went_out = went_out + send(bucket, slopes[world.rank], 2.0 ** (step % 3))
        went_in = went_in + sum(slopes) / world.size
        bucket.wire.commit(True)
    return went_out, went_in, kept(bucket)


@pytest.mark.parametrize("compression", ["int8", "onebit"])
@pytest.mark.parametrize("size", [1, 2])
def test_feedback_loses_nothing(compression, size):
    """5 points: gradients are sent or kept, and all ranks get the same mean."""
    ranks = on_threads(fed_back, size, compression)
    what = (f"{compression} on {size} ranks: the sum of the means of 30 steps, with loss scales 1, "
            "2 and 4,")
    for went_out, went_in, stays in ranks:
        same = torch.equal(went_out.nan_to_num(), ranks[-1][0].nan_to_num())
        assert same, f"{what} is not the same on all ranks: did it leave the rank?"
        assert_near(went_out + stays, went_in, f"{what} plus what is kept", 1e-4)


def test_feedback_tells_bytes(rng):
    """1 points: the bytes sent are returned."""
    told = rng.randrange(1000, 9000)
    wire = dist.ErrorFeedback(lambda world, value, state: (value, value, state, told))
    sent = wire.average(dist.World(), torch.zeros(N_BUCKET), 1.0)
    wire = dist.ErrorFeedback(lambda world, value, state: (value, value, state, told))
    wire.average(dist.World(), torch.zeros(1024, device="meta"), 1.0)    # on the bucket's device
    assert len(wire.next[0]) == 1024, (
        f"for 1024 elements and one rank, `value` has {len(wire.next[0])} with its padding")
    assert sent == told, f"`exchange` returns {told} bytes, but `average` returns {sent}"


@pytest.mark.parametrize("compression", ["int8", "onebit"])
def test_feedback_of_a_skipped_step(compression):
    """4 points: a skipped step leaves no trace."""
    on_threads(skips, 2, compression)


def skips(world, compression):
    """Skips steps whose gradients are not finite on rank 1."""
    bucket = lossy_bucket(world, compression)
    send(bucket, torch.randn(N_BUCKET))
    bucket.wire.commit(True)
    before = kept(bucket)
    for bad in torch.inf, torch.nan:
        mean = send(bucket, torch.full((N_BUCKET,), (1.0, bad)[world.rank]))
        assert not mean.isfinite().all(), f"a gradient of rank 1 is {bad}, but the mean is finite"
        bucket.wire.commit(False)
    assert torch.equal(kept(bucket), before), "a skipped step has changed what is kept"
    bucket.wire.commit(True)
    assert torch.equal(kept(bucket), before), (
        "after a skipped step, a commit without an `average` has changed what is kept")


# ----- resume -----

NAMED = train.checkpoints_in


def named_otherwise(folder):
    """Returns train.checkpoints_in or, if there are none, checkpoints with different names."""
    paths = {int(re.sub(r"\D", "", path.stem)): path for path in folder.glob("step*[0-9].pt")}
    return NAMED(folder) or paths


@pytest.fixture(autouse=True)
def any_name(monkeypatch):
    """Accepts wrongly named checkpoints in this process, as in `resume_run`: it is only a slip."""
    monkeypatch.setattr(train, "checkpoints_in", named_otherwise)


def with_any_name(world, sabotage=bool, *arguments):
    train.checkpoints_in = named_otherwise
    sabotage(world, *arguments)


def resume_run(shards, out, *flags, sabotage=(), **options):
    """Trains like tests.training.run, with SEED as the seed and with `any_name` on each rank."""
    return run(shards, out, *SHORT, "--dropout", 0.1, "--seed", SEED, *flags,
               sabotage=(with_any_name, *sabotage), **options)


def assert_resumes(shards, folder, size, step, *flags, damaged=False):
    """Asserts that a run that is killed and resumed has the same bits as an uninterrupted run, also
    if its newest checkpoint is damaged."""
    whole, killed = folder / "whole", folder / "killed"
    together(
        lambda: resume_run(shards, whole, *flags, size=size, sabotage=(by_the_clock,)),
        lambda: resume_run(shards, killed, *flags, size=size, sabotage=(by_the_clock, step),
                           check=False))
    before = steps_kept(killed)
    last = step - 1 - (step - 1) % 3
    assert before == [last - 3, last], (
        f"a run that saves every 3 steps and is killed in step {step} has checkpoints of {before}, "
        f"not {[last - 3, last]}")
    if damaged:
        newest = train.checkpoints_in(killed)[last]
        newest.write_bytes(newest.read_bytes()[:-99])      # goes on from the one before
    resume_run(shards, killed, *flags, size=size, sabotage=(by_the_clock,))
    for name in "step", "lr", "loss_scale", "mlm_loss", "seconds":
        for one, other in zip(column(whole, name), column(killed, name), strict=True):
            assert one == other, (
                f"a run that was killed in step {step} and resumed has `{name}` {other} in a step "
                f"where an uninterrupted run has {one}")
    assert_same(last_state(whole), last_state(killed), "the last checkpoint after a kill")


def assert_restores_all(shards, out):
    """Asserts that in one process all numbers are restored, and tensors in place, and that
    the latest steps are kept whatever the clock says."""
    world, log = dist.World(), SimpleNamespace(say=print, number="")
    args, state = built(shards, "--out", out)
    args.out.mkdir()
    state.counters = train.Counters(3, 0, 3, 5.0, 9)
    state.scaler = optim.LossScaler(8.0, 7, 2.0, 16.0, 3, 5)
    for k, group in enumerate(state.optimizer.param_groups):
        group["of a variant"] = k
    train.save(args, world, log, state)
    _, other = built(shards, "--out", out)
    places = [tensor.data_ptr() for tensor in train.tensors_of(other).values()]
    train.restore(args, world, log, other)
    assert train.numbers_of(other) == train.numbers_of(state), (
        f"of the numbers {train.numbers_of(state)}, `restore` gives {train.numbers_of(other)}")
    assert places == [tensor.data_ptr() for tensor in train.tensors_of(other).values()], (
        "`restore` gives masters or moments other memory, but may only write into theirs")
    for step in 4, 5:                            # the clock is set back before each save
        for path in args.out.glob("*.pt"):
            os.utime(path, (4e9, 4e9))
        state.counters.step = step
        train.save(args, world, log, state)
    found = sorted(train.checkpoints_in(args.out))
    assert found == [4, 5], f"after saves of steps 3, 4 and 5 there are {found}: is it the clock?"


def test_resume_has_the_same_bits(shards, tmp_path, rng):
    """3 points: a killed and resumed run has the bits and seconds of an uninterrupted run."""
    assert_resumes(shards, tmp_path, 2, rng.choice([7, 8]),
                   "--precision", "bf16", "--compression", "fp16")
    assert_restores_all(shards, tmp_path / "alone")


def test_resume_of_lossy_compression(shards, tmp_path, rng):
    """2 points: a resumed run has the same bits with a compression that keeps residuals, too, and
    after its newest checkpoint was damaged."""
    assert_resumes(shards, tmp_path, 2, rng.choice([13, 14]),
                   "--precision", "fp32", "--compression", "int8", damaged=True)


def disk_is_full(world, room, action, step=6):
    """In this step, no file can grow beyond `room` bytes: as `action` says, the write raises an
    error, or the program ends."""
    save = train.save

    def patched(args, world, log, state):
        if state.counters.step != step:
            return save(args, world, log, state)
        signal.signal(signal.SIGXFSZ, action)
        with no_room(room):
            save(args, world, log, state)

    train.save = patched


def other_run(world):
    """Another run claims the folder at once."""
    claim = train.Log.claim
    train.Log.claim = lambda log, folder: (claim(log, folder), (folder / "run").write_text("b"))


def number_becomes(world, number):
    """After the save of step 1 the file `run` has another content, after later ones it is gone."""
    save = train.save

    def patched(args, world, log, state):
        save(args, world, log, state)
        (args.out / "run").unlink(missing_ok=True)
        if state.counters.step == 1:
            (args.out / "run").write_text(number)

    train.save = patched


# {what goes wrong: (sabotage, the steps that have a checkpoint after at most 8 steps)}
TROUBLE = {
    "in step 1 the disk is full": ((disk_is_full, 0, signal.SIG_IGN, 1), []),
    "another run has begun at once": ((other_run,), []),
    "another run has begun": ((number_becomes, "b"), [1]),
    "the file `run` is empty, then not there": ((number_becomes, ""), [6, 8]),
    "in step 6 the disk is full": ((disk_is_full, 0, signal.SIG_IGN), [3, 8]),
    "in step 8, the last, the disk is full": ((disk_is_full, 4096, signal.SIG_IGN, 8), [3, 6]),
    "in step 6 the disk is full after 100 KB": ((disk_is_full, 10 ** 5, signal.SIG_IGN), [3, 8]),
    "the program dies as it saves to disk in step 6": ((disk_is_full, 0, signal.SIG_DFL), [1, 3]),
    "the power fails after each save": ((power_fails,), [6, 8]),
    "a weight is NaN": ((spoil, 0, "weight", math.nan), [])}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_resume_from_whole_files(shards, tmp_path, trouble):
    """2 points: a checkpoint is whole and finite, or absent."""
    out = tmp_path / "out"
    sabotage, steps = TROUBLE[trouble]
    outcome, = resume_run(shards, out, "--max-steps", 8, sabotage=sabotage, check=False)
    assert steps_kept(out) == steps, (
        f"if {trouble}, there should be checkpoints of steps {steps}, not {steps_kept(out)}")
    assert len(steps) == 2 or isinstance(outcome, (train.ConfigError, optim.TrainingStopped)), (
        f"if {trouble}, the run must end with an error of `save`, not with {outcome!r}")
    if "dies" in trouble:                        # the next run overwrites what is left
        resume_run(shards, out, "--max-steps", 8, "--save-every", 4)
        trouble += " and the next run ends"
    left = {path.name for path in out.iterdir() if path.is_file()} - {"metrics.jsonl", "run"}
    assert "disk" not in trouble or len(left) == len(steps), (
        f"if {trouble}, nothing but {len(steps)} checkpoints may be left over, not {sorted(left)}")


def test_resume_without_a_shared_disk(shards, tmp_path):
    """2 points: rank 0 reads for all ranks, and a later checkpoint of another rank is an error."""
    outcomes = []
    for place in 0, 1:                           # the rank that has a checkpoint
        resume_run(shards, tmp_path / f"{place}-of-{place}", "--max-steps", 3)
        outcomes += resume_run(shards, tmp_path / f"{place}-of-", "--max-steps", 5, size=2,
                               sabotage=(on_own_disk,), check=place == 0)
    assert outcomes[0] == outcomes[1], "ranks with disks of their own end with different weights"
    assert isinstance(outcomes[3], train.ConfigError), (
        "`restore` must raise ConfigError if rank 1 has a later checkpoint than rank 0, but rank 1 "
        f"ends with {outcomes[3]!r}")


def test_resume_names_files(shards, tmp_path):
    """1 points: checkpoints have the right file names, and say of which code they are."""
    resume_run(shards, tmp_path / "out", "--max-steps", 3)
    names = sorted(path.name for path in tmp_path.glob("out/*.pt"))
    right = ["step-00000001.pt", "step-00000003.pt"]
    assert names == right, f"the checkpoints of steps 1 and 3 are {right}, not {names}"
    args, state = built(shards, "--out", tmp_path / "changed")
    args.out.mkdir()
    said = []
    log = SimpleNamespace(say=said.append, number="")
    train.save(args, dist.World(), log, state)
    args.code = args.code | {"train.py": "another"}
    train.restore(args, dist.World(), log, state)
    assert "code" in " ".join(said), "`restore` does not warn that the code has changed since"
    code = last_state(tmp_path / "out")["code"]
    assert code.get("train.py") == train.code_digests()["train.py"], (
        f"a checkpoint's \"code\" must be args.code, not {code}")


# ----- sharding -----

ADAM = {"lr": 0.02, "weight_decay": 0.05, "eps": 1e-3, "betas": (0.8, 0.95)}


def sharded(world, weights, gradients):
    """Takes three steps, with each rank's own gradients. Returns the weights, the bytes that this
    rank sent, the bytes of its moments, and whether its part is a view."""
    sent = []
    run = world._run

    def noted(collective, own, *others, **options):
        # The bytes of `own` are sent once, in an all-reduce twice; no rank sends to itself.
        times = 1 + (collective is distributed.all_reduce)
        sent.append(times * own.nbytes * (world.size - 1) / world.size)
        run(collective, own, *others, **options)

    world._run = noted
    weights = weights.clone()
    flat = torch.zeros_like(weights)
    ours = scale.ShardedAdamW(world, weights, flat, **ADAM)
    for gradient in gradients:
        flat.copy_(gradient[world.rank])
        ours.step()
    moments = [tensor for state in ours.adam.state.values() for tensor in state.values()]
    is_view = all(part.untyped_storage().data_ptr() == weights.data_ptr()
                  for part in ours.adam.param_groups[0]["params"])
    kept = sum(tensor.untyped_storage().nbytes() for tensor in moments)
    return weights, sum(sent), kept, is_view


@pytest.fixture(params=[2, 3])
def shared_out(request):
    """Returns what `sharded` returns on each of `size` ranks, and the exact weights."""
    size = request.param
    weights = torch.randn(48)
    gradients = torch.randn(3, size, 48)
    ranks = on_threads(sharded, size, weights, gradients)
    adam = optim.AdamW([weights], **ADAM)
    for gradient in gradients:
        weights.grad = gradient.mean(0)
        adam.step()
    return SimpleNamespace(size=size, exact=weights, ranks=ranks)


def test_sharding_is_adamw(shared_out):
    """5 points: all ranks get the weights of AdamW, with the same bits on two ranks."""
    size = shared_out.size
    flats = torch.arange(2.0 * size * size).view(size, -1)               # rank r has row r
    # Each rank gets a copy, because scatter_mean may change it.
    means = on_threads(lambda world: scale.scatter_mean(world, flats[world.rank].clone()), size)
    assert_near(torch.cat(means), flats.mean(0), f"the mean by scatter_mean on {size} ranks, all "
                "parts concatenated,", slips={"it is the sum": flats.sum(0)})
    for rank, (weights, *_) in enumerate(shared_out.ranks):
        assert_near(weights, shared_out.exact, f"rank {rank} of {size}: the weights after three "
                    "steps of AdamW with the mean of all gradients", 1e-6 * (size > 2))


def test_sharding_saves_memory(shared_out):
    """3 points: each rank has moments of its own part only."""
    for _, _, kept, is_view in shared_out.ranks:
        right = 8 * 48 / shared_out.size
        assert kept == right, (
            f"with 48 weights on {shared_out.size} ranks, the moments of a rank take {kept} bytes, "
            f"not {right:g}")
        assert is_view, "the part that AdamW updates is a copy, not a view of the weights"


def test_sharding_sends_no_more(shared_out):
    """2 points: a step sends no more bytes than an all-reduce."""
    for _, sent, *_ in shared_out.ranks:
        right = 3 * 2 * 4 * 48 * (shared_out.size - 1) / shared_out.size
        assert sent == pytest.approx(right), (
            f"in 3 steps with 48 weights, each of {shared_out.size} ranks sends {sent:g} bytes; an "
            f"all-reduce of the gradients sends {right:g}")


# ----- plan -----

@pytest.mark.parametrize("compression", dist.COMPRESSORS)
def test_plan_bytes(compression):
    """3 points: the bytes that each compression sends."""
    test_plan.test_the_bytes_are_those_that_a_bucket_sends(compression)


def test_plan_operations():
    """4 points: the operations of an example, as torch counts them."""
    test_flops.test_flops_are_those_that_torch_counts()


def test_plan_step(monkeypatch):
    """3 points: a step hides what it can of the exchange."""
    test_plan.test_a_step_hides_what_it_can(monkeypatch)


# ----- profile -----

def test_profile_of_a_step():
    """6 points: calls and own seconds, from a second call of step()."""
    matrix = torch.randn(500, 500)
    tooks = []

    def step():
        began = time.perf_counter()
        with torch.profiler.record_function("a part of the step"):
            for _ in range(3 + SEED):
                nn.functional.linear(matrix, matrix)     # calls aten::t and aten::mm
        if not tooks:
            matrix.cumsum(0)
        tooks.append(time.perf_counter() - began)

    table = scale.operations(step)
    assert "aten::cumsum" not in table, (
        "the table has an operation that only the first call of step() runs")
    assert "a part of the step" in table, (
        "the table lacks what is no aten operation, such as ranges and the optimizer")
    calls, _ = table.get("aten::mm", (0, 0))
    assert calls == 3 + SEED, f"aten::mm was called {3 + SEED} times, not {calls}"
    seconds = sum(own for _, own in table.values())
    assert 0.5 < seconds / tooks[-1] < 1.1, (
        f"a step took {tooks[-1]:.4f} s, but the seconds of its operations add up to {seconds:.4f}")


def test_profile_starts():
    """4 points: only operations that Python starts are counted."""
    tensors = [torch.randn(8, 8) for _ in range(5 + SEED)]

    def step():
        with torch.profiler.record_function("an optimizer's step"):
            tensors[0] @ tensors[1]                  # calls aten::mm
            torch._foreach_mul_(tensors, 2.0)        # on a CPU, calls aten::mul_ for each
        for tensor in tensors:
            tensor.add_(1)

    found = scale.starts(step)
    assert found == 7 + SEED, (
        f"a product, a call for a list, and {5 + SEED} sums are {7 + SEED} starts, not {found}")
