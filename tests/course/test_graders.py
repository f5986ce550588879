"""What the exercises are graded by: for each idea a test, which says in a sentence what is wrong.

Its name begins with that of the exercise, its docstring with the points: 10 for an exercise. What
is drawn at random depends on SEED.
"""
import copy
import math
import os
import resource
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

import bert
import data
import dist
import optim
import train
from tests.conftest import ROOT, SEED
from tests.course import scale
from tests.local_ranks import on_threads
from tests.ranks import one_of_two, run_ranks, together
from tests.training import (SHORT, assert_same, column, last_state, on_own_disk, random_batch, run,
                            spoil, steps_kept)
from tests.tools import test_flops, test_plan
from tests.variants import powersgd
from tests.variants.equations import powersgd_in_float64


@pytest.fixture(autouse=True)
def seeded():
    """Whatever torch draws depends on SEED."""
    torch.manual_seed(SEED)


SECONDS = float(os.environ.get("THRIFTBERT_SECONDS", 48))               # for a test
TOO_SLOW = set()                             # tests of which a case took longer


@pytest.fixture(autouse=True)
def limited(request):
    """Ends a test after SECONDS, and says where each thread stands; its other cases do not run."""
    name = request.node.originalname
    if name in TOO_SLOW:
        pytest.fail("not tested, since another case took too long", pytrace=False)

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


def assert_near(ours, exact, what, tolerance=1e-6):
    """Compares a tensor or an array with what it should be, by its largest error."""
    ours, exact = torch.as_tensor(ours).double(), torch.as_tensor(exact).double()
    assert ours.shape == exact.shape, f"{what} has the shape {[*ours.shape]}, not {[*exact.shape]}"
    error = (ours - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    assert error <= tolerance, (
        f"{what} is wrong: the largest error is {error:.2g} of the largest element")


# ----- masking -----

N = 100_000


@pytest.fixture
def masked(shards):
    """Random tokens, special ones among them, as `before`, and what `mask` makes of them."""
    rng = np.random.default_rng(SEED)
    before = rng.integers(5, 320, N)
    before[::25] = data.CLS
    before[7::25] = data.SEP
    before[11::1000] = data.UNK
    counters = rng.permutation(10 * N)[:N]
    dataset = data.PretrainingData(shards, 64, mask_fraction=0.2)
    after = before.copy()
    rows, labels = dataset.mask(after, counters)
    return SimpleNamespace(**locals())


def assert_part(chosen, part, what):
    """Whether about this part of some booleans is true: within four standard errors."""
    error = 4 * (part * (1 - part) / len(chosen)) ** 0.5
    assert abs(chosen.mean() - part) < error, f"{chosen.mean():.1%} {what}, not {part:.1%}"


def test_masking_chooses(masked):
    """4 points: tokens are chosen and labelled."""
    rows, before = masked.rows, masked.before
    assert (np.diff(rows) > 0).all(), "the rows that were chosen are not in ascending order"
    assert np.array_equal(before[rows], masked.labels), "a label is not the token that stood there"
    assert {data.CLS, data.SEP}.isdisjoint(masked.labels), "[CLS] or [SEP] was chosen, no text"
    assert data.UNK in masked.labels, "[UNK] is text: it can be chosen"
    assert_part(np.isin(np.arange(N), rows)[before > data.SEP], 0.2, "of the text are chosen")
    assert (masked.after != before).any(), "no token has changed: change `tokens`, not a copy"
    others = np.delete(np.arange(N), rows)
    assert (masked.after == before)[others].all(), "a token has changed that was not chosen"


def test_masking_replaces(masked):
    """3 points: 80 % become [MASK], 10 % random."""
    found = masked.after[masked.rows]
    assert_part(found == data.MASK, 0.8, "of the chosen tokens became [MASK]")
    assert_part(found == masked.labels, 0.1 + 0.1 / 315, "of the chosen tokens stayed")
    others = found[(found != data.MASK) & (found != masked.labels)]
    assert 5 <= others.min() < 15 and 310 < others.max() < 320, (
        f"random ones are of {others.min()} to {others.max()}, not of 5 to 319: do they come from "
        "the draw that decided that they are random?")


def test_masking_is_pure(masked):
    """3 points: the same in any batch."""
    some = np.random.default_rng(SEED).permutation(N)[:2000]             # as in another batch
    alone = masked.before[some]
    masked.dataset.mask(alone, masked.counters[some])
    assert np.array_equal(alone, masked.after[some]), (
        "among other tokens, in another order, others are chosen or other random ones taken")


# ----- pairs -----

def document_of(shard, places):
    """Returns the numbers of the documents that these tokens of a shard are in."""
    return np.searchsorted(shard.documents, places, "right") - 1


def test_pairs_are_half_true(shards):
    """3 points: half are true, others from another document."""
    dataset = data.PretrainingData(shards, 48, 1, seed=SEED)
    pairs = dataset.spans(range(20_000))
    for i, pair in enumerate(pairs[:3000]):
        assert (pair.index, pair.shard) == (i, i % 4), f"example {i} of 4 shards has {pair}"
        assert pair.a < pair.a_end and pair.b < pair.b_end, f"A or B is empty: {pair}"
        assert dataset.length(pair) <= 48, f"{pair} has {dataset.length(pair)} tokens, not 48"
        parts = [pair.a, pair.a_end - 1, pair.b, pair.b_end - 1]
        a, a_last, b, b_last = document_of(dataset.shard(pair.shard), parts)
        assert a == a_last and b == b_last, f"example {i} has parts of two documents in one"
        if pair.pair_label:
            assert a != b, f"B of example {i} is labelled false, but is of A's own document"
        else:
            assert pair.a_end == pair.b, f"B of example {i} is true, but does not follow A"
    assert_part(np.array([pair.pair_label for pair in pairs]) == 0, 0.5, "of 20,000 are true")
    without = data.PretrainingData(shards, 48, seed=SEED, pairs="none")
    alone = without.spans(range(20_000))
    for kind, of, spans in ("nsp", dataset, pairs), ("none", without, alone):
        lengths = list(map(of.length, spans))
        assert min(lengths) < 6, (
            f"a tenth is short: with pairs {kind} the shortest of 20,000 has {min(lengths)} tokens")
        assert np.median(lengths) == 48, (
            f"nine tenths are as long as fits, 48 tokens: with pairs {kind} half of 20,000 have "
            f"{np.median(lengths):g} or less")
    for text in alone:
        assert text.b == text.b_end and text.pair_label == data.IGNORED, f"without pairs: {text}"


def test_pairs_are_of_all_documents(shards):
    """3 points: a golden walk reads all documents evenly."""
    homes = []
    for phase in 0, 1:
        dataset = data.PretrainingData(shards, 64, phase, seed=SEED)
        shard = dataset.shard(1)
        starts = [pair.a for pair in dataset.spans(range(1, 8000, 4))]
        homes.append(document_of(shard, starts))
        counts = np.bincount(homes[phase], minlength=len(shard.documents) - 1)
        error = np.abs(counts - 2000 * np.diff(shard.documents) / len(shard.tokens)).max()
        assert error < 5, (
            f"of 2,000 texts a document has {error:.0f} more or less than its part of the shard: "
            "golden steps are spread evenly")
    assert (homes[0] != homes[1]).any(), "both phases read the same documents: where is walk_start?"


def test_pairs_look_alike(shards):
    """4 points: a B from elsewhere looks like a true one."""
    dataset = data.PretrainingData(shards, 64, seed=SEED)
    pairs = data.Spans(*np.array(dataset.spans(range(0, 64_000, 4))).T)
    shard = dataset.shard(0)
    sizes = np.diff(shard.documents)
    home = document_of(shard, pairs.b)
    false = pairs.pair_label == 1
    for feature, values in {
            "begins with a sentence": dataset.ends_sentence[shard.tokens[pairs.b - 1]],
            "fills an example": (pairs.b_end - pairs.b) / 64,
            "is of a long document": (sizes > np.median(sizes))[home],
            "begins its document": np.isin(pairs.b, shard.documents)}.items():
        means = values[~false].mean(), values[false].mean()
        assert abs(means[0] - means[1]) < 0.035, (
            f"a true B {feature} to {means[0]:.1%}, one from elsewhere to {means[1]:.1%}: a model "
            "can tell them apart without reading")
    gaps = (home - document_of(shard, pairs.a))[false] % len(sizes)      # from A's document
    rates = np.bincount(gaps, minlength=len(sizes))[1:] / len(gaps) * len(sizes)
    assert rates.min() > 0.3 and rates.max() < 2, (
        f"of the documents after A's, one gives {rates.max():.1f} times as many B as the mean, "
        f"and one {rates.min():.1f} times")


# ----- attention -----

def packed(lengths):
    """Returns qkv of examples of these lengths, in fp64, and their bounds and lengths."""
    lengths = torch.tensor(lengths)
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return torch.randn(int(bounds[-1]), 3, 2, 32, dtype=torch.float64), bounds, lengths


def attention_by_hand(qkv):
    """softmax(Q K^T / sqrt(D/H)) V of one example, one head after another."""
    heads = []
    for q, k, v in qkv.permute(2, 1, 0, 3):                              # (T, D/H) each
        powers = (q @ k.T / q.shape[1] ** 0.5).exp()                     # a row for each query
        heads.append((powers / powers.sum(1, keepdim=True)) @ v)
    return torch.stack(heads, 1)                                         # (T, H, D/H)


def test_attention_of_one_example():
    """4 points: one example alone."""
    qkv, _, _ = packed([7])
    assert_near(bert.plain_attention(qkv), attention_by_hand(qkv), "plain_attention of 7 tokens")


@pytest.mark.parametrize("lengths", [(16, 12, 12, 5, 19), (3, 1, 3, 57, 0)])
def test_attention_is_packed(lengths):                # the last are the rows that fill up
    """4 points: packed is the same as each example alone."""
    qkv, bounds, sizes = packed(lengths)
    exact = torch.cat([attention_by_hand(rows) for rows in qkv.split(lengths)])
    assert_near(bert.attention(qkv, bounds, sizes, 0.0), exact,
                f"attention of examples of {lengths} tokens")
    rounded = bert.attention(qkv.bfloat16(), bounds, sizes, 0.0)
    assert rounded.dtype == torch.bfloat16, f"attention of bfloat16 returns {rounded.dtype}"
    assert_near(rounded, exact, "attention in bfloat16", 0.05)


def test_attention_drops_weights():
    """2 points: dropout is of the weights."""
    qkv, bounds, sizes = packed([64, 40, 40, 48])
    qkv[:, 2] = 1.0                    # so that an output is the sum of the weights that are left
    sums = bert.attention(qkv, bounds, sizes, 0.5)
    assert sums.std() > 0.1, "a dropout of 0.5 drops no attention weights"
    assert_near(sums, sums[..., :1].expand(-1, -1, 32), "all V are equal, so a row of the output")
    assert 0.9 < sums.mean() < 1.1, f"what is left of the weights adds up to {sums.mean():.2f}"


# ----- schedule -----

@pytest.mark.parametrize("warmup, power, rates", [
    (0.4, 1, {0.1: 0.5, 0.3: 1.5, 0.4: 2, 0.7: 1, 0.85: 0.5, 0.97: 0.1}),
    (0.2, 0.5, {0.1: 1, 0.2: 2, 0.8: 1, 0.95: 0.5}),
    (0.36, 0.5, {0.64: 1.5})])
def test_schedule_rates(warmup, power, rates):
    """5 points: warm-up, and decay by a power."""
    phase = optim.Phase(128, 8, 99, 2.0, warmup, power)
    for done, rate in rates.items():
        found = optim.learning_rate(done, phase)
        assert found == pytest.approx(rate), (
            f"at {done} of a phase with lr 2, warmup {warmup} and power {power} the "
            f"rate is {rate:.4g}, not {found:.4g}")


# (--hours, --max-steps, hours that are over, phase, its steps that are over): what comes next
NEXT = {(None, 99, 0, 0, 0): (0, 0.1), (None, 99, 0, 0, 9): (2, 0.25),
        (None, 99, 0, 2, 3): (3, 0), (None, 5, 0, 0, 5): (3, 0), (None, 5, 0, 0, 6): (3, 0),
        (1, 99, 0.5, 0, 1): (0, 6 / 9), (1, 99, 0.9, 0, 6): (2, 0.6)}


@pytest.mark.parametrize("case", NEXT)
def test_schedule_progress(case):
    """5 points: phases go by steps or by the clock."""
    phases = [optim.Phase(64, 16, steps, lr=1, warmup=0) for steps in (9, 0, 3)]
    hours, max_steps, over, phase, phase_step = case
    args = SimpleNamespace(phases=phases, hours=hours, max_steps=max_steps)
    state = SimpleNamespace(phase=phase, phase_step=phase_step, seconds=over * 0.99 * 3600,
                            step=phase_step + 9 * (phase > 0))
    found = train.progress(args, state)
    assert found == pytest.approx(NEXT[case]), (
        f"phases of 9, 0, 3 steps; --hours {hours} --max-steps {max_steps}: after {phase_step} of "
        f"phase {phase} and {over} h `progress` is {NEXT[case]}, not {found}")


# ----- precision -----

def test_precision_scale():
    """4 points: the scale halves, doubles and has a floor."""
    scaler = optim.LossScaler(scale=8.0, growth_interval=3, smallest=2.0, largest=16.0)
    scales = [8, 8, 4, 4, 4, 8, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    for step, scale in enumerate(scales, 1):
        overflow = step in (3, 8)
        taken = scaler.update(overflow, step)
        assert taken != overflow, f"a step with overflow {overflow}: update returns {taken}"
        assert scaler.scale == scale, (
            f"from 8 on, growth_interval 3, largest 16, overflows in the steps 3 and 8: after step "
            f"{step} the scale is {scale}, not {scaler.scale:g}")
    assert scaler.skipped == 2, f"two steps were skipped, and `skipped` is {scaler.skipped}"
    scaler = optim.LossScaler(scale=4.0, smallest=2.0)
    assert not scaler.update(True, 41), "at `smallest` itself training goes on"
    with pytest.raises(optim.TrainingStopped) as caught:
        scaler.update(True, 42)
    assert "42" in str(caught.value), "the error does not name step 42, in which training stops"


@pytest.mark.parametrize("scale", [1024.0, 1.0, 0.125])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_precision_clips(scale, max_norm):
    """3 points: unscale, then clip."""
    weight = torch.zeros(12)
    weight.grad = torch.randn(12)
    scaled = scale * weight.grad
    optim.unscale_and_clip_([scaled], float(scaled.norm()), scale, max_norm)
    nn.utils.clip_grad_norm_([weight], max_norm)
    assert_near(scaled, weight.grad, f"a gradient of scale {scale:g}, clipped to {max_norm}", 1e-5)
    zeros = torch.zeros(3)
    optim.unscale_and_clip_([zeros], 0.0, scale, max_norm)
    assert not zeros.any(), f"gradients of zeros became {zeros.tolist()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_masters(dtype):
    """3 points: master weights."""
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    nn.init.constant_(model.weight, 1.001)
    masters = optim.cast_with_masters(model, dtype)
    assert model.weight.dtype == dtype, f"the model's weight is {model.weight.dtype}, not {dtype}"
    assert [*masters] == ["weight"], f"of weight and a frozen bias the masters are {[*masters]}"
    assert_near(masters["weight"], torch.full((1, 1), 1.001), "the master of 1.001", 1e-7)
    shared = masters["weight"].data_ptr() == model.weight.data_ptr()
    assert shared == (dtype == torch.float32), "in fp32 alone are master and weight one memory"
    for _ in range(1000):
        masters["weight"] += 1e-4
        optim.copy_to_model(masters, model)
    assert abs(model.weight.item() - 1.1) < 0.01, (
        f"1000 updates of 1e-4 took the weight from 1.001 to {model.weight.item():.4f}")


# ----- lamb -----

def test_lamb_without_decay_is_adam():
    """4 points: without decay it is Adam."""
    ours = torch.randn(5).double()
    theirs = ours.clone()
    lamb = optim.LAMB([ours], lr=0.02, betas=(0.9, 0.98), weight_decay=0.0)
    adam = torch.optim.Adam([theirs], lr=0.02, betas=(0.9, 0.98), eps=1e-6)
    for t in range(1, 31):
        ours.grad = theirs.grad = torch.randn(5).double()
        lamb.step()
        adam.step()
        assert_near(ours, theirs, f"a tensor without decay after step {t}", 1e-9)


def lamb_equations(w, m, v, g, t):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g ** 2
    u = (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-6) + 0.05 * w
    ratio = 0.3
    if w.norm() > 0 and u.norm() > 0:
        ratio = min(w.norm() / u.norm(), 0.3)
    return w - 0.02 * ratio * u, m, v


def test_lamb_is_its_equations():
    """6 points: with decay it is its equations."""
    tensors = [torch.randn(5, 7).double() / 10, torch.zeros(3, 4).double(),
               torch.randn(6).double(), torch.randn(4, 5).double()]
    lamb = optim.LAMB(tensors, lr=0.02, weight_decay=0.05)
    exact = [(w.clone(), 0 * w, 0 * w) for w in tensors]
    for t in range(1, 31):
        for k, w in enumerate(tensors):
            w.grad = 3 * torch.randn_like(w) * (k != 2)
            exact[k] = lamb_equations(*exact[k], w.grad, t)
        lamb.step()
        kinds = "of small weights", "of zeros", "without gradient", "of large weights"
        for what, w, right in zip(kinds, tensors, exact):
            assert_near(w, right[0], f"a tensor {what}, with decay, after step {t}", 1e-9)


# ----- dealing -----

@pytest.mark.parametrize("size", [1, 3, 4, 40])
def test_dealing_to_any_ranks(size):
    """3 points: the same examples on any number of ranks."""
    ranks = [data.micro_batches(5, 33, 4, rank, size) for rank in range(size)]
    dealt = [sum(parts, []) for parts in ranks]
    assert sorted(sum(dealt, [])) == [*range(165, 198)], (
        f"step 5 of batches of 33 has the examples 165 to 197 once each, also on {size} ranks")
    for rank, (own, parts) in enumerate(zip(dealt, ranks)):
        assert all(i % size == rank for i in own), f"rank {rank} of {size} takes {own}"
        sizes = sorted(map(len, parts)) or [0]
        assert sizes[-1] <= 4 and sizes[-1] - sizes[0] <= 1 and len(parts) == -(-len(own) // 4), (
            f"{len(own)} examples in even micro-batches of at most 4 are not {sizes}")


def test_dealing_ahead():
    """3 points: a thread makes one step ahead."""
    made = []

    def batch(indices):
        time.sleep(0.05)
        made.extend(indices)
        return 6 // (9 - max(indices))

    # Of two ranks with batches of 4 the second one: steps 1 3, 5 7, 9 11
    loader = data.loader(SimpleNamespace(batch=batch), 0, 4, 1, 1, 2)
    assert next(loader) == [0, 1], "the first step is that of the examples 1 and 3"
    deadline = time.monotonic() + 5              # as long as the caller's step may take
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(0.2)
    assert made == [1, 3, 5, 7], f"step 2 is made while step 1 runs, and no more; made is {made}"
    assert next(loader) == [1, 3], "the second step is that of the examples 5 and 7"
    with pytest.raises(ZeroDivisionError):       # what fails in the thread is raised here
        next(loader)
    later = data.loader(SimpleNamespace(batch=lambda indices: indices), 5, 2, 2, 0, 1)
    assert next(later) == [[10, 11]], "a resumed phase begins with the step that is given"


def counts_of(world, shards):
    """Rank r has r + 1 micro-batches. Returns the count of all ranks, and of this one."""
    examples = data.PretrainingData(shards, 32)
    batches = [examples.batch([0, 1, 2]), examples.batch([3])][:world.rank + 1]
    own = sum(int((batch.labels["mlm"] != data.IGNORED).sum()) for batch in batches)
    return train.count_labels(world, batches)["mlm"], own


def test_dealing_divisor(shards):
    """4 points: the divisor is that of the whole step."""
    (found, first), (other, second) = on_threads(counts_of, 2, shards)
    right = first + second
    assert right == found == other, (
        f"ranks have {first} and {second} masked tokens; the sum is {right}, not {found}")


# ----- buckets -----

def test_buckets_are_filled():
    """3 points: what is in which bucket."""
    sizes = {"bias": 1, "embeddings.a": 3, "embeddings.b": 4, "c": 2, "d": 5, "e": 3, "f": 6}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    buckets = dist.fill_buckets(tensors, dist.World(), "none", 8 * 4e-6)
    found = [[*bucket.shapes] for bucket in buckets]
    right = [["f", "e"], ["d", "c"], ["embeddings.b", "embeddings.a"], ["bias"]]
    assert found == right, f"sizes {sizes}, full with 8: the buckets are {right}, not {found}"


def send_stand_in(world, flat, scale):
    """Averages over the leaders; says that 1,000 bytes were sent."""
    assert scale == 4.0, f"average(4.0) gives the wire a loss_scale of {scale}"
    flat.div_(world.size)
    world.all_reduce(flat)
    return 1000


def means(world):
    """Returns means in fp16 of large numbers, which not all fit it, and what a dense bucket and one
    with a stand-in for its wire (exercise 12) make of the rank's number on two levels."""
    large = torch.full((4,), 80_000.0 * (world.rank % 2))
    sent = dist.Dense(torch.float16).average(world, large, 1.0)
    found = [large.tolist(), sent]
    for name in "none", "int8":
        bucket = dist.Bucket({"weight": (600,)}, world, name)
        bucket.flat.fill_(world.rank + 1.0)
        if name == "int8":
            bucket.wire.average = send_stand_in
        found.append((bucket.average(4.0), bucket.flat.clone()))
    return found


def test_buckets_stay_in_range():
    """3 points: a mean that stays in range."""
    for mean, sent, _, _ in on_threads(means, 2):
        assert mean == [40_000.0] * 4, f"the mean of 0 and 80000, sent in fp16, is {mean[0]:g}"
        assert sent == 8, f"each of two ranks sends 4 numbers of fp16, 8 bytes, not {sent}"


def test_buckets_on_two_levels():
    """4 points: two levels."""
    for rank, found in enumerate(on_threads(means, 4, local_size=2)):
        for name, (sent, mean), right in zip(("none", "int8"), found[2:], (2400, 1000)):
            assert_near(mean, torch.full((600,), 2.5), f"{name}: the mean of 1, 2, 3, 4 on 2 nodes")
            right *= rank % 2 == 0
            assert sent == right, f"{name}: rank {rank} sends {sent} bytes to others, not {right}"


# ----- overlap -----

def tower():
    """Six layers, of which the first is the last whose gradient is ready."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])


def reduced(world):
    """Gradients of 24 examples, by one process and by two steps of the Reducer, three micro-batches
    each; its bytes; what 600 gradients of 1 add up to in bf16."""
    examples = torch.randn(24, 32, generator=torch.Generator().manual_seed(SEED))
    exact = tower()
    (exact(examples).sum() / 12).backward()
    model = tower()
    reducer = dist.Reducer(model, world, bucket_mb=0.005)
    for _ in range(2):                           # the second step begins clean
        reducer.zero_grad()
        for number, part in enumerate(examples[world.rank::2].chunk(3)):
            reducer.last_micro_batch = number == 2
            (model(part).sum() / 6).backward()
        reducer.finish()
    bias = nn.ParameterList([torch.zeros(4)])
    masters = optim.cast_with_masters(bias, torch.bfloat16)
    small = dist.Reducer(bias, world, masters=masters)
    for number in range(600):
        small.last_micro_batch = number == 599
        bias[0].sum().backward()
    small.finish()
    return ({name: p.grad for name, p in exact.named_parameters()},
            {name: p.grad for name, p in model.named_parameters()},
            reducer.bytes_sent, masters["0"].grad)


def test_overlap_gradients(tmp_path):
    """3 points: gradients are those of one process."""
    for exact, ours, sent, small in run_ranks(reduced, 2, tmp_path):
        for name, gradient in exact.items():
            assert_near(ours[name], gradient, f"the gradient of {name}, on 2 ranks,", 1e-5)
        assert sent == 4 * 6 * 33 * 32, f"bytes_sent is {sent}, not the sum of all jobs"
        assert_near(small, torch.full((4,), 600.0), "the sum of 600 gradients of 1 in bf16")
    alone = dist.Reducer(tower(), dist.World(), "bf16")                  # without a thread
    alone.flats[0].fill_(1 + 2 ** -12)
    alone.missing.clear()
    alone.finish()
    assert (alone.flats[0] == 1).all(), "one rank does not average its buckets"


def events_of(world):
    """Returns how many buckets are averaged before backward ends; and the order of buckets whose
    gradients become ready in another order on each rank."""
    events = []
    dist.Bucket.average = lambda bucket, scale: events.append(len(bucket.flat)) or 0
    model = tower()
    reducer = dist.Reducer(model, world, bucket_mb=0.004)
    model[0].weight.register_hook(lambda gradient: time.sleep(0.3) or events.append("last"))
    model(torch.randn(8, 32)).sum().backward()
    reducer.finish()
    early = events.index("last")
    events.clear()
    layers = nn.ModuleList(nn.Linear(k, 1, bias=False) for k in (3, 5, 7))
    reducer = dist.Reducer(layers, world, bucket_mb=1e-9)
    for layer in [*layers][::(1, -1)[world.rank]]:
        layer(torch.ones(1, layer.in_features)).sum().backward()
    reducer.finish()
    return early, events


def test_overlap_in_order(tmp_path):
    """3 points: in order, while backward goes on."""
    for early, events in run_ranks(events_of, 2, tmp_path):
        assert early >= 4, f"{early} of 6 buckets were averaged during backward, not 4 or 5"
        assert events == [7, 5, 3], f"buckets of 7, 5, 3 elements start as {events} on one rank"


def test_overlap_errors():
    """2 points: what is missing or fails is said."""
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(2, 1)])
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=1e-9)

    def backward(layers):
        sum(layer(torch.ones(layer.in_features)) for layer in layers).backward()

    reducer.last_micro_batch = False
    backward(model)
    reducer.last_micro_batch = True
    backward(model[:1])
    with pytest.raises(dist.DistError) as caught:
        reducer.finish()
    names = {name for name in reducer.views if name in str(caught.value)}
    assert names == {"1.weight", "1.bias"}, (
        f"1.weight and 1.bias take no part in the loss; the error names {names or 'none'}")
    reducer.zero_grad()
    reducer.buckets[1].average = lambda scale: 1 / 0
    backward(model)                              # nothing is raised inside backward
    with pytest.raises(ZeroDivisionError):
        reducer.finish()
    with pytest.raises(KeyError):                # a second last micro-batch
        backward(model)
    reducer.zero_grad()
    model.zero_grad()                            # drops p.grad
    with pytest.raises(dist.DistError) as caught:
        backward(model)
    assert "1.bias" in str(caught.value) or "1.weight" in str(caught.value), (
        f"p.grad is no view of a bucket any longer; the error does not name it: {caught.value}")


def measure():
    """Returns (seconds of a backward alone, seconds on the network, seconds that `finish` waits for
    it), of the best of three steps of a model of 4 x 256.

    The network is a sleep in place of each bucket's average, all together half as long as backward
    takes on this machine: so a fast machine and a slow one find about the same.
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
    elements = sum(map(len, reducer.flats))
    for bucket in reducer.buckets:
        bucket.average = slow_network(alone / 2 * len(bucket.flat) / elements)
    waits = []
    for _ in range(3):
        reducer.zero_grad()
        backward_seconds()
        reducer.finish()
        waits.append(reducer.wait_seconds)
    return alone, alone / 2, min(waits)


def slow_network(seconds):
    """Returns a function in place of Bucket.average."""
    return lambda scale: time.sleep(seconds) or 0


def test_overlap_hides_half():
    """2 points: half of a network is hidden, since most gradients are on their way before the last;
    and what is not is told."""
    model = bert.BertForPreTraining(bert.BertConfig.preset("mini", 512))
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=1.0)
    launched = []
    last_ready = model.embeddings.positions.weight
    last_ready.register_post_accumulate_grad_hook(lambda _: launched.append(len(reducer.jobs)))
    # It starts after all others, when backward ends.
    reducer.buckets[-1].average = slow_network(0.6)
    logits = model(random_batch(512, examples=4))
    (logits["mlm"].sum() + logits["nsp"].sum()).backward()
    reducer.finish()
    assert reducer.wait_seconds > 0.1, (
        f"the last bucket takes 0.6 s, and wait_seconds is {reducer.wait_seconds:.3f}")
    sizes = [len(flat) for flat in reducer.flats]
    hidden = sum(sizes[:launched[0]]) / sum(sizes)
    assert hidden > 0.5, f"{hidden:.0%} of the gradients are sent while backward goes on, not half"


# ----- powersgd -----

def test_powersgd_is_algorithm_1(tmp_path):
    """8 points: four steps of algorithm 1."""
    run_ranks(powersgd_in_float64, 2, tmp_path)


def test_powersgd_keeps_the_state():
    """2 points: the state that it gets stays as it was."""
    state = {"shapes": [torch.Size([64, 48])]}
    for step in range(2):                        # the second step has factors
        before = copy.deepcopy(state)
        _, next_state, _ = powersgd.powersgd(dist.World(), torch.randn(64 * 48), state)
        assert_same(before, state, "after a step, from which a skipped one begins again, the state")
        state = next_state
    bad = torch.full((64 * 48,), torch.inf)
    mean, _, _ = powersgd.powersgd(dist.World(), bad, state)
    assert not mean.isfinite().all(), "gradients are inf, and their mean is finite"


# ----- feedback -----

@pytest.fixture(params=["int8", "onebit"])
def bucket(request):
    """A bucket of one rank, whose `mean` says that it has sent 1,000 bytes."""
    bucket = dist.Bucket({request.param: (1500,)}, dist.World(), request.param)
    mean = bucket.wire.mean
    bucket.wire.mean = lambda *arguments: (*mean(*arguments)[:2], 1000)
    return bucket


def send(bucket, gradient, scale=1.0):
    """Averages a gradient, which is times `scale`; returns the mean without it."""
    bucket.flat.copy_(gradient * scale)
    sent = bucket.average(scale)
    assert sent == 1000, f"`mean` has sent 1000 bytes, and `average` returns {sent}"
    return bucket.flat / scale


def kept(bucket):
    """Returns all that has not been sent yet, (1500,)."""
    residual, state = bucket.wire.kept
    return (residual + state["part_residual"].view(-1))[:1500]


def test_feedback_loses_nothing(bucket):
    """5 points: what came in went out or is kept."""
    went_in = went_out = torch.zeros(1500)
    for step in range(50):
        gradient = torch.randn(1500)
        went_out = went_out + send(bucket, gradient, 2.0 ** (step % 3))
        went_in = went_in + gradient
        bucket.wire.commit(True)
        assert_near(went_out + kept(bucket), went_in, f"{[*bucket.shapes]}: what went out and what "
                    f"is kept, after {step + 1} steps of loss scales 1, 2, 4,", 1e-4)


def test_feedback_of_a_skipped_step(bucket):
    """5 points: a skipped step leaves no trace."""
    send(bucket, torch.randn(1500))
    bucket.wire.commit(True)
    before = kept(bucket)
    for bad in torch.inf, torch.nan:
        mean = send(bucket, torch.full((1500,), bad))
        assert not mean.isfinite().all(), f"a gradient is {bad}, and the mean is finite"
        bucket.wire.commit(False)
    bucket.wire.commit(True)                     # of nothing: no step is under way
    assert torch.equal(kept(bucket), before), "a skipped step has changed what is kept"


# ----- resume -----

def kill_in_step(world, step):
    """kill -9 of the last rank when a step is over, before anything of it is saved."""
    write = train.Log.step

    def patched(log, figures):
        if figures["step"] == step and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(log, figures)

    train.Log.step = patched


def assert_resumes(shards, folder, size, step, *flags):
    """Trains without a kill and with one: all bits have to be the same."""
    argv = *SHORT, "--dropout", 0.1, *flags
    whole, killed = folder / "whole", folder / "killed"
    sabotage = kill_in_step, step
    sums, _ = together(
        lambda: run(shards, whole, *argv, size=size),
        lambda: run(shards, killed, *argv, size=size, sabotage=sabotage, check=False))
    before = steps_kept(killed)
    assert before == [step - step % 3 - 3, step - step % 3], (
        f"saved every 3 steps and killed in step {step}, a run has checkpoints of {before}")
    sums_killed = run(shards, killed, *argv, size=size)
    for name in "step", "lr", "loss_scale", "mlm_loss":
        for one, other in zip(column(whole, name), column(killed, name), strict=True):
            assert one == other, (
                f"after it was killed in step {step} and resumed, a run has in a step the `{name}` "
                f"{other}, and one that was not killed {one}")
    assert sums == sums_killed, "the weights of a run that was killed end with other bits"
    assert_same(last_state(whole), last_state(killed))


def test_resume_has_the_same_bits(shards, tmp_path):
    """4 points: a killed run ends with the same bits."""
    assert_resumes(shards, tmp_path, 2, 7, "--precision", "bf16", "--compression", "fp16")


def test_resume_of_lossy_compression(shards, tmp_path):
    """2 points: with a compression that keeps residuals, too."""
    assert_resumes(shards, tmp_path, 1, 13, "--precision", "fp32", "--compression", "onebit")


def no_room(world, room, action):
    """In step 6 a file has no room for more bytes: an error, or the program's end."""
    save = train.save

    def patched(args, world, log, state):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, action)
        if state.counters.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            save(args, world, log, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    train.save = patched


@pytest.mark.parametrize("room, action, steps", [
    (0, signal.SIG_IGN, [3, 8]), (10 ** 5, signal.SIG_IGN, [3, 8]), (10 ** 5, signal.SIG_DFL, [3])])
def test_resume_from_whole_files(shards, tmp_path, room, action, steps):
    """2 points: a checkpoint is whole or not there."""
    out = tmp_path / "out"
    run(shards, out, *SHORT, "--max-steps", 8, sabotage=(no_room, room, action), check=False)
    assert steps_kept(out) == steps, (
        f"in step 6 the disk is full or the program dies while it saves: then checkpoints of the "
        f"steps {steps} are there, not of {steps_kept(out)}")


def test_resume_refuses(shards, tmp_path):
    """2 points: NaN is not saved, and a later checkpoint elsewhere not passed over."""
    flags = *SHORT, "--max-steps", 3
    nan, = run(shards, tmp_path / "nan", *flags, sabotage=(spoil, 0, "weight", math.nan),
               check=False)
    assert isinstance(nan, optim.TrainingStopped) and not steps_kept(tmp_path / "nan"), (
        f"a weight is NaN: the run should end without a checkpoint, and ends with {nan!r}")
    run(shards, tmp_path / "out1", *flags)
    _, other = run(shards, tmp_path / "out", *flags, size=2, sabotage=(on_own_disk,), check=False)
    assert isinstance(other, train.ConfigError), (
        f"rank 1 has a later checkpoint than rank 0, and `restore` does not raise ConfigError: "
        f"rank 1 ends with {other!r}")


# ----- sharding -----

def sharded(world, weights, gradients):
    """Three steps, each rank with its own gradients. Returns the weights, the bytes that it sent,
    and those of its moments."""
    sent = []
    run = world._run

    def noted(collective, own, *others, **options):
        # What `own` gets is sent once, but by an all-reduce twice; no rank sends to itself.
        times = 1 + (collective is distributed.all_reduce)
        sent.append(times * own.nbytes * (world.size - 1) / world.size)
        run(collective, own, *others, **options)

    world._run = noted
    weights = weights.clone()
    flat = torch.zeros_like(weights)
    ours = scale.ShardedAdamW(world, weights, flat, lr=0.02, weight_decay=0.05)
    for gradient in gradients:
        flat.copy_(gradient[world.rank])
        ours.step()
    moments = [tensor for state in ours.adam.state.values() for tensor in state.values()]
    return weights, sum(sent), sum(tensor.untyped_storage().nbytes() for tensor in moments)


@pytest.fixture(params=[2, 3])
def shared_out(request):
    """What `sharded` returns on each of `size` ranks, and the weights that it should."""
    size = request.param
    weights = torch.randn(48)
    gradients = torch.randn(3, size, 48)
    ranks = on_threads(sharded, size, weights, gradients)
    adam = optim.AdamW([weights], lr=0.02, weight_decay=0.05)
    for gradient in gradients:
        weights.grad = gradient.mean(0)
        adam.step()
    return SimpleNamespace(size=size, exact=weights, ranks=ranks)


def test_sharding_is_adamw(shared_out):
    """5 points: all ranks get the weights of AdamW, on two ranks the same bits."""
    tolerance = 1e-6 * (shared_out.size > 2)
    for rank, (weights, _, _) in enumerate(shared_out.ranks):
        assert_near(weights, shared_out.exact, f"rank {rank} of {shared_out.size}: the weights "
                    "after three steps of AdamW with the mean of all gradients", tolerance)


def test_sharding_saves_memory(shared_out):
    """3 points: each rank has moments of its part alone."""
    for _, _, kept in shared_out.ranks:
        right = 8 * 48 / shared_out.size
        assert kept == right, (
            f"moments of 48 weights on {shared_out.size} ranks take {kept} bytes, not {right:g}")


def test_sharding_sends_no_more(shared_out):
    """2 points: no more bytes than an all-reduce."""
    for _, sent, _ in shared_out.ranks:
        right = 3 * 2 * 4 * 48 * (shared_out.size - 1) / shared_out.size
        assert sent == pytest.approx(right), (
            f"in 3 steps with 48 weights each of {shared_out.size} ranks sends {sent:g} bytes, and "
            f"with an all-reduce of the gradients {right:g}")


# ----- plan -----

@pytest.mark.parametrize("compression", dist.COMPRESSORS)
def test_plan_bytes(compression):
    """3 points: the bytes of a compression."""
    test_plan.test_the_bytes_are_those_that_a_bucket_sends(compression)


def test_plan_operations():
    """4 points: the operations of an example, as torch counts them."""
    test_flops.test_flops_are_those_that_torch_counts()


def test_plan_step(monkeypatch):
    """3 points: a step of which a part is hidden."""
    test_plan.test_a_step_hides_what_it_can(monkeypatch)


# ----- profile -----

def test_profile_of_a_step():
    """6 points: calls and their own seconds, of a second call."""
    matrix = torch.randn(500, 500)
    tooks = []

    def step():
        began = time.perf_counter()
        for _ in range(3 + SEED):
            nn.functional.linear(matrix, matrix)     # calls aten::t and aten::mm
        if not tooks:
            matrix.cumsum(0)
        tooks.append(time.perf_counter() - began)

    table = scale.operations(step)
    assert "aten::cumsum" not in table, "what only the first call of step() does is in the table"
    calls, _ = table.get("aten::mm", (0, 0))
    assert calls == 3 + SEED, f"aten::mm was called {3 + SEED} times, not {calls}"
    seconds = sum(own for _, own in table.values())
    assert 0.5 < seconds / tooks[-1] < 1.1, (
        f"a step took {tooks[-1]:.4f} s, and the seconds of its operations add up to {seconds:.4f}")


def test_profile_starts():
    """4 points: operations that Python starts."""
    tensors = [torch.randn(8, 8) for _ in range(5 + SEED)]

    def step():
        with torch.profiler.record_function("an optimizer's step"):
            tensors[0] @ tensors[1]                  # calls aten::mm
            torch._foreach_mul_(tensors, 2.0)        # on a CPU calls aten::mul_ for each
        for tensor in tensors:
            tensor.add_(1)

    found = scale.starts(step)
    assert found == 7 + SEED, (
        f"a product, a call for a list, and {5 + SEED} sums are {7 + SEED} starts, not {found}")
