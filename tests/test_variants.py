"""The files of tests/variants: each against its equations, or a plain way to the same. Of the 1-bit
family and the compressors here are only the whole programs."""
import contextlib
import copy
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import bert
import data
import dist
import optim
import train
from tests.ranks import run_ranks, run_script, together
from tests.test_optim import apply, assert_equal, from_equations, parameters, problem, ratio
from tests.training import args_of, assert_same, column, last_state, losses_of, random_batch, shrink
from tests.variants import (albert, balance, bucket_clipping, came, gradientflow, lans,
                            local_steps, merit, modern, modern_muon, muon, onebit_adam, onebit_lamb,
                            powersgd, slow_momentum, stacking, topk, whole_words, zeroone_adam)
from tests.variants.synchronised import LocalReducer

# By the number of ranks on which they are tried.
VARIANTS = {1: (albert, came, lans, merit, modern, modern_muon, onebit_adam, whole_words),
            2: (balance, bucket_clipping, gradientflow, local_steps, muon, onebit_lamb, powersgd,
                slow_momentum, stacking, topk, zeroone_adam)}
ALL = VARIANTS[1] + VARIANTS[2]


@contextlib.contextmanager
def installed(variant):
    """While inside, train.py is the variant's, and small."""
    before = [(module, dict(vars(module))) for module in (bert, data, dist, optim, train)]
    shrink()
    variant.install()
    try:
        yield
    finally:
        for module, names in before:
            vars(module).update(names)


def train_here(world, shards, out, *argv):
    """Runs train.py in this process, without the end of the program."""
    train.train(args_of("--data", shards, "--out", out, *argv), world)


# ----- Optimizers: one tensor at a time, in float64 -----

def rms(x):
    return np.sqrt(np.mean(x ** 2))


def factors(state, x, b):
    """CAME's A, by outer products; state: [r, c] of a matrix, [v] of a vector."""
    state[0] = b * state[0] + (1 - b) * (x.mean(1) if x.ndim > 1 else x)
    if x.ndim == 1:
        return 1 / np.sqrt(state[0])
    state[1] = b * state[1] + (1 - b) * x.mean(0)
    return 1 / np.sqrt(np.outer(state[0] / state[0].mean(), state[1]))


def numpy_came(values, decays, grads, lr=0.02, b1=0.9, b2=0.999, b3=0.9999):
    w = [v.copy() for v in values]
    m = [np.zeros_like(v) for v in w]
    squares = [[np.zeros(n) for n in v.shape] for v in w]
    strays = [[np.zeros(n) for n in v.shape] for v in w]
    for step in grads:
        for i, g in enumerate(step):
            u = g * factors(squares[i], g ** 2 + 1e-30, b2)
            u = u / max(1, rms(u))
            m[i] = b1 * m[i] + (1 - b1) * u
            confidence = factors(strays[i], (u - m[i]) ** 2 + 1e-16, b3) if u.ndim > 1 else 1
            w[i] = w[i] - lr * decays[i] * w[i] - lr * m[i] * confidence
    return w


def numpy_merit(values, decays, grads, lr=0.02, b1=0.9, b2=0.999, eps=1e-6):
    w = [v.copy() for v in values]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for step in grads:
        for i, g in enumerate(step):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g ** 2
            u = m[i] / (np.sqrt(v[i]) + eps) + decays[i] * w[i]
            q = np.ones_like(u)
            for at in np.ndindex(u.shape):
                lines = [abs(w[i]).max(), abs(u).max()]
                if u.ndim > 1:
                    lines += [abs(x[at[0]]).max() for x in (w[i], u)]
                    lines += [abs(x[:, at[1]]).max() for x in (w[i], u)]
                if min(lines) > 0:
                    q[at] = max(a / b for a, b in zip(lines[::2], lines[1::2]))
            w[i] = w[i] - lr * np.clip(q * u, -1, 1)
    return w


@pytest.mark.parametrize("optimizer, expected", [(came.CAME, numpy_came),
                                                 (merit.MERIT, numpy_merit)])
def test_optimizers_are_their_equations(optimizer, expected):
    values, decays, grads = problem()
    values[0][2], values[0][:, 1] = 0, 0                   # a row and a column of zeros
    params, groups = parameters(values, decays)
    ours = optimizer(groups, lr=0.02)
    for step in grads:
        apply(ours, params, step)
    assert_equal(params, expected(values, decays, grads), 1e-9)


def numpy_lans(w, g, m, v, t, decay, b1, b2, eps, lr):
    g = g / np.linalg.norm(g) if np.linalg.norm(g) > 0 else g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2
    d = np.sqrt(v / (1 - b2 ** t)) + eps
    r = m / (1 - b1 ** t) / d + decay * w
    s = g / d + decay * w
    return w - lr * (b1 * ratio(w, r) * r + (1 - b1) * ratio(w, s) * s), m, v


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_lans_is_its_equations_at_any_scale_of_the_gradients(factor):
    values, decays, grads = problem(2)
    params, groups = parameters(values, decays)
    optimizer = lans.LANS(groups, lr=0.02)
    for step in grads:
        apply(optimizer, params, [factor * g for g in step])
    assert_equal(params, from_equations(numpy_lans, values, decays, grads), 1e-8)


def test_the_recipe_of_lans():
    with installed(lans):
        args = args_of("--recipe", "lans-96k", "--dropout", "0", "--lr-scale", "2")
        rates = [optim.learning_rate(done, args.phases[0]) for done in (0.4265 / 2, 0.5, 0.7, 0.85)]
        assert optim.learning_rate(0.99, optim.Phase(64, 8, 9, 1, warmup=0)) == pytest.approx(0.1)
    short, long = args.phases
    assert rates == pytest.approx([6.75e-3, 13.5e-3, 13.5e-3, 6.75e-3])
    assert short.steps + long.steps == 4301
    assert (short.global_batch, long.global_batch, long.lr) == (98304, 33792, 10e-3)
    assert args.optimizer == "lans"


def test_came_keeps_rows_and_columns_in_place_of_a_second_moment():
    p = torch.zeros(30, 50, requires_grad=True)
    state = came.CAME([p]).state[p]
    assert sum(x.numel() for x in state.values()) == 30 * 50 + 2 * (30 + 50)


@pytest.mark.parametrize("precision,tolerance", [("bf16", 1e-5), ("fp32", 3e-3)])
def test_muon_is_torchs_on_the_matrices_of_blocks_and_adamw_elsewhere(precision, tolerance):
    """torch's computes in bf16."""
    torch.manual_seed(0)
    config = bert.BertConfig(1, 64, 1, 128, 128)
    masters = optim.cast_with_masters(bert.BertForPreTraining(config), torch.float32)
    others = {name: w.clone() for name, w in masters.items()}
    thirds = {}                                            # of matrices of blocks; Q, K, V apart
    for name, w in masters.items():
        if name.startswith("blocks.") and w.dim() > 1:
            thirds[name] = w.clone().chunk(3 if "qkv" in name else 1)
    groups = [group | {"precision": precision} for group in muon.groups_of(masters)]
    optimizers = [
        muon.Muon(groups, betas=(0.9, 0.98)),
        optim.make_optimizer("adamw", others, (0.9, 0.98)),
        torch.optim.Muon([part for parts in thirds.values() for part in parts], weight_decay=0.01,
                         momentum=muon.MOMENTUM, adjust_lr_fn="match_rms_adamw")]
    for _ in range(10):
        for name, w in masters.items():
            w.grad = others[name].grad = torch.randn(w.shape)
            parts = thirds.get(name, [w])
            for part, gradient in zip(parts, w.grad.clone().chunk(len(parts))):
                part.grad = gradient
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
    assert len(thirds) == 4
    for name, w in masters.items():
        expected = torch.cat(thirds[name]) if name in thirds else others[name]
        assert torch.allclose(w, expected, tolerance, tolerance), name
        # No second moment is kept where Muon steps
        kept = optimizers[0].state[w]["exp_avg_sq"].numel()
        assert kept == (0 if name in thirds else w.numel())


def slow_optimizer(params, **options):
    """Returns slow momentum's optimizer on one rank."""
    optimizer = slow_momentum.SlowMomentum(params, **options)
    optimizer.connect(dist.World(), SimpleNamespace(bytes_sent=0))
    return optimizer


def test_slow_momentum_is_its_equations():
    values, decays, grads = problem(2)
    params, groups = parameters(values, decays)
    slow = slow_optimizer(groups, lr=0.02)
    w = [x.copy() for x in values]
    m, s, v = ([np.zeros_like(x) for x in values] for _ in range(3))
    for t, step in enumerate(grads, 1):
        apply(slow, params, step)
        for i, g in enumerate(step):
            m[i] = 0.9 * m[i] + 0.1 * g
            s[i] = 0.99 * s[i] + 0.01 * g
            v[i] = 0.999 * v[i] + 0.001 * g ** 2
            u = 0.5 * m[i] / (1 - 0.9 ** t) + 0.5 * s[i] / (1 - 0.99 ** t)
            w[i] = w[i] - 0.02 * (u / (np.sqrt(v[i] / (1 - 0.999 ** t)) + 1e-6) + decays[i] * w[i])
    assert_equal(params, w, 1e-9)


# ----- Models -----

def loss_of(model, batch):
    return sum(losses_of(model(batch), batch).values())


def test_an_albert_is_a_bert_with_equal_layers():
    torch.manual_seed(0)
    config = bert.BertConfig(3, 64, heads=1, feed_forward=128, vocab_size=192, dropout=0.0)
    shared = albert.Albert(config)
    batch = random_batch(192, examples=8, length=64)
    nn.init.normal_(shared.mlm_bias)
    plain = albert.written_out(shared)
    losses = [loss_of(model, batch) for model in (shared, plain)]
    for loss in losses:
        loss.backward()
    assert len(batch.labels["mlm"]) > 0
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    ours, theirs = ({name: p.grad for name, p in model.named_parameters()}
                    for model in (shared, plain))
    # The chain rule through W = table widen
    table, widen = (layer.weight.detach() for layer in shared.embeddings.tokens)
    expected = {"embeddings.tokens.0.weight": theirs["embeddings.tokens.weight"] @ widen,
                "embeddings.tokens.1.weight": theirs["embeddings.tokens.weight"].T @ table}
    for name in ours.keys() - expected.keys():
        expected[name] = theirs[name]
        if name.startswith("blocks.0."):
            expected[name] = sum(theirs[name.replace("0", str(layer), 1)] for layer in range(3))
    for name, gradient in ours.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4), name
    base = bert.BertConfig.preset("base", 30522)
    with torch.device("meta"):
        many, few = (sum(p.numel() for p in kind(base).parameters())
                     for kind in (bert.BertForPreTraining, albert.Albert))
    assert round(many / few, 1) == 8.7


def plain_modern(model, tokens):
    """Returns the last hidden states (T, D) of one example: the equations, with pairs of columns as
    complex numbers."""
    config = model.config
    half = config.width // config.heads // 2
    angles = torch.outer(torch.arange(len(tokens)), modern.THETA ** -(torch.arange(half) / half))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]             # (T, 1, half)

    def normal(x, module):
        x = x - x.mean(1, keepdim=True)
        return x / x.square().mean(1, keepdim=True).sqrt() * module.weight

    def turned(x):                                         # (T, H, 2 half)
        x = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([x.real, x.imag], -1)

    x = normal(model.embeddings.tokens.weight[tokens], model.embeddings.norm)
    for layer, block in enumerate(model.blocks):
        read = normal(x, block.attention_norm) if layer else x
        q, k, v = (read @ block.qkv.weight.T).view(len(x), 3, config.heads, 2 * half).unbind(1)
        attended = bert.plain_attention(torch.stack([turned(q), turned(k), v], 1))
        x = x + attended.flatten(1) @ block.attention_out.weight.T
        both = normal(x, block.norm) @ block.up_and_gate.weight.T
        inner, gate = both[:, :both.shape[1] // 2], both[:, both.shape[1] // 2:]
        x = x + (nn.functional.gelu(inner) * gate) @ block.down.weight.T
    return normal(x, model.final_norm)


def test_a_modern_is_its_equations_on_packed_rows():
    torch.manual_seed(0)
    model = modern.Modern(bert.BertConfig(3, 128, 2, feed_forward=192, vocab_size=128)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)                        # the weights of norms, too
    lengths = torch.tensor([10, 10, 31, 13])               # the last rows only pad
    bounds = torch.tensor([0, 10, 20, 51, 64], dtype=torch.int32)
    tokens = torch.randint(128, (64,))
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(51)
    hidden = model.encode(rows, tokens, None, positions, bounds, lengths)
    expected = [plain_modern(model, example) for example in tokens[:51].split([10, 10, 31])]
    assert torch.allclose(hidden, torch.cat(expected), rtol=1e-4, atol=1e-4)
    # Where an example begins does not matter
    later = model.encode(rows, tokens, None, positions + 7, bounds, lengths)
    assert torch.allclose(hidden, later, rtol=1e-3, atol=1e-3)


def test_muon_knows_the_matrices_of_a_modern():
    with torch.device("meta"):
        model = modern.Modern(bert.BertConfig.preset("base", 8192))
    # Q, K and V are three matrices to Muon, gate and input two
    parts = {group["parts"]: len(group["params"])
             for group in muon.groups_of(dict(model.named_parameters())) if group["parts"]}
    assert parts == {3: 12, 2: 12, 1: 24}


# ----- Data -----

def test_albert_swaps_whole_sentences(shards):
    examples = albert.OrderedPairs(shards, 64)
    swapped = 0
    for spans in examples.spans(range(400)):
        a, middle, b, end = spans[2:6]
        if spans.pair_label:
            a, middle, b, end = b, end, a, middle
            swapped += 1
        assert a < middle == b < end                       # B follows A
        tokens, documents = examples.shard(spans.shard)
        cuts = 1 + np.flatnonzero(examples.ends_sentence[tokens[:-1]]
                                  & examples.begins_sentence[tokens[1:]])
        whole = np.union1d(cuts, documents)
        assert {a, middle, end} <= {*whole} or np.isin(range(a + 1, end), cuts).sum() < 3
    assert 160 < swapped < 240
    assert [*albert.OrderedPairs(shards, 64, pairs="none").batch([1, 2]).labels] == ["mlm"]


def test_whole_words_are_masked(shards):
    examples = whole_words.WholeWords(shards, 64, mask_fraction=0.3)
    batch = examples.batch(list(range(200)))
    tokens = batch.tokens.copy()
    chosen = np.zeros(len(tokens), bool)
    labels = batch.labels["mlm"][batch.labels["mlm"] != data.IGNORED]
    rows = batch.masked_rows[:len(labels)]
    tokens[rows] = labels                                  # what stood there
    chosen[rows] = True
    special = np.isin(tokens, [data.PAD, data.CLS, data.SEP])
    word = np.cumsum(examples.begins_word[tokens] | special | np.roll(special, 1))
    for number in np.unique(word[~special]):
        of_word = chosen[(word == number) & ~special]
        assert len(set(of_word)) == 1 or len(of_word) > whole_words.LONGEST_WORD
    assert chosen.sum() == pytest.approx(0.3 * (~special).sum(), rel=0.05)


def test_balance_deals_every_example_by_length(shards):
    plain = data.PretrainingData(shards, 64).batch(range(17, 34))
    balanced = balance.BalancedData(shards, 64)
    lengths = []
    for rank in range(3):
        batches = [balanced.batch(share) for share in balance.shares(1, 17, 4, rank, 3)]
        lengths.append([n for batch in batches for n in batch.lengths[:-1].tolist()])
        assert lengths[-1] == sorted(lengths[-1]) and len(batches) == 2
    assert sorted(sum(lengths, [])) == plain.lengths[:-1].tolist()
    totals = [sum(mine[-5:]) for mine in lengths]          # where a rank has six, one is short
    assert max(totals) - min(totals) <= np.ptp(plain.lengths[:-1])


def stages(world):
    """Trains each stage for a step, in bf16; returns for each what trained, what changed, bytes."""
    torch.manual_seed(0)
    config = bert.BertConfig(2, 64, heads=1, feed_forward=128, vocab_size=128, dropout=0.0)
    args = SimpleNamespace(bucket_mb=0.01, compression="none", init=None)
    model = stacking.GrowingBert(config)
    batch = random_batch(128, 8, 64)
    masters = optim.cast_with_masters(model, torch.bfloat16)
    reducer = dist.Reducer(model, world, masters=masters)
    optimizer = optim.LAMB(masters.values(), lr=0.01)
    state = train.State(model, masters, reducer, optimizer, optim.LossScaler(),
                        train.Counters())
    stacking.prepare(args, world, state)
    told = []
    for stage in range(stacking.STAGES + 1):
        before = copy.deepcopy(model)
        stacking.begin_stage(args, state, stage, grow=True)
        trains = [name for name, p in model.named_parameters() if p.requires_grad]
        old = {name: master.clone() for name, master in masters.items()}
        state.reducer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        state.reducer.finish()
        optimizer.step()
        optim.copy_to_model(masters, model)
        told.append({
            "trains": trains,
            "bytes": state.reducer.bytes_sent,
            "loss": loss.item(),
            "before": loss_of(before, batch).item(),
            "twice": loss_of(repeated(before), batch).item(),
            "gradients": [name for name, w in masters.items() if w.grad is not None],
            "changed": [name for name, w in masters.items() if not torch.equal(w, old[name])],
            "size": sum(masters[name].numel() for name in trains)})
    return told


def repeated(model):
    """Returns the plain BERT of two layers, both the first of a model's."""
    plain = bert.BertForPreTraining(model.config).bfloat16()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name.replace("blocks.1.", "blocks.0.")]
                           for name in weights})
    return plain


def check_stages(first, second, joint):
    modules = "pooler", "nsp", "mlm_transform", "mlm_norm"
    heads = {"mlm_bias", *(f"{name}.{kind}" for name in modules for kind in ("weight", "bias"))}
    below = {name for name in joint["trains"] if name.startswith(("embeddings.", "blocks.0."))}
    above = {name for name in joint["trains"] if name.startswith("blocks.1.")}
    assert set(first["trains"]) == heads | below and set(second["trains"]) == heads | above
    assert set(joint["trains"]) == heads | below | above
    for told in first, second, joint:                      # what is frozen: no gradient, no byte
        assert told["trains"] == told["gradients"] and set(told["changed"]) <= set(told["trains"])
        assert len(told["changed"]) > 0.9 * len(told["trains"])
        assert told["bytes"] == 4 * told["size"]           # 2 (n - 1) / n of each, for n = 2
    # The new layer is a copy of the one below; to train all layers changes no weight
    assert second["loss"] == pytest.approx(second["twice"], rel=1e-6)
    assert second["loss"] != pytest.approx(second["before"], rel=1e-6)
    assert joint["loss"] == pytest.approx(joint["before"], rel=1e-6)


# ----- Reducers, on two ranks beside one process that plays both -----

def toy(world, reducer=dist.Reducer):
    """Returns a model of five layers, its Reducer of five buckets, its gradient: f(model, rank)."""
    torch.manual_seed(world.rank)                          # the Reducer sends rank 0's weights
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    inputs = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(7))

    def backward(model, rank, factor=100):
        (factor * model(inputs[rank]).square().mean()).backward()

    return model, reducer(model, world, bucket_mb=256e-6), backward


def masters_of(model, reducer):
    """Returns the model's weights as train.build makes masters of them."""
    masters = optim.cast_with_masters(model, torch.float32)
    for name, master in masters.items():
        master.grad = reducer.views[name]
    return masters


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def local_training(world, period, steps=9):
    """Returns the parameters that were equal on both ranks after each step's averaging, and all
    weights after each step; the same by one process that plays both ranks."""
    local_steps.PERIOD = period
    model, reducer, backward = toy(world, local_steps.WeightReducer)
    masters = masters_of(model, reducer)
    optimizer = optim.LAMB(masters.values(), lr=0.01)
    state = train.State(model, masters, reducer, optimizer, None, train.Counters())
    local_steps.prepare(SimpleNamespace(compression="none"), world, state)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [optim.LAMB(replica.parameters(), lr=0.01) for replica in replicas]
    order = [list(bucket.shapes) for bucket in reducer.buckets]
    met = []
    weights = []
    expected = []
    for step in range(steps):
        reducer.zero_grad()
        backward(model, world.rank)
        reducer.finish()
        both = world.all_gather(vector(model))
        met.append((both[0] == both[1]).tolist())
        optimizer.step()
        state.counters.step += 1
        weights.append(vector(model))
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            backward(replica, rank)
        for number, names in enumerate(order):
            if number * period // 5 == step % period:
                for name in names:
                    pair = [replica.get_parameter(name).data for replica in replicas]
                    torch._foreach_copy_(pair, [sum(pair) / 2] * 2)
        for each in optimizers:
            each.step()
        expected.append(vector(replicas[world.rank]))
    reducer.flats[0].fill_(torch.inf if world.rank else 1)
    assert not np.isfinite(reducer.norm())                # all skip what one has to skip
    reducer.agree()
    same = all(torch.equal(*world.all_gather(x)) for x in train.tensors_of(state).values())
    return met, weights, expected, same


def check_local_steps(every_step, in_turn):
    for met, weights, expected, same in every_step, in_turn:
        assert same
        for ours, theirs in zip(weights, expected):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    # Period 1: the weights that all ranks step from are the mean of their single steps
    assert all(all(met) for met in every_step[0])
    # Period 3: every element once in every three steps, some in each. (Not the first three: equal
    # weights take an equal first step where the signs of gradients are equal.)
    met = torch.tensor(in_turn[0])                         # (9, elements)
    assert (met[3:6].sum(0) == 1).all() and (met[6:].sum(0) == 1).all()
    assert (met.sum(1) > 0).all()


def slow_training(world, steps=5):
    """Returns whether weights were equal on both ranks after each step, and the last weights; the
    same by one process that plays both ranks; whether all are equal at the end; bytes by step."""
    slow_momentum.PERIOD = 2
    model, reducer, backward = toy(world, LocalReducer)
    masters = masters_of(model, reducer)
    optimizer = slow_momentum.SlowMomentum(masters.values(), lr=0.01)
    optimizer.connect(world, reducer)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    alone = [slow_optimizer(replica.parameters(), lr=0.01) for replica in replicas]
    met = []
    sent = []
    for step in range(steps):
        reducer.zero_grad()
        backward(model, world.rank)
        reducer.finish()
        optimizer.step()
        sent.append(reducer.bytes_sent)
        met.append(torch.equal(*world.all_gather(vector(model))))
        for rank, (replica, other) in enumerate(zip(replicas, alone)):
            replica.zero_grad()
            backward(replica, rank)
            other.step()
        if step % 2:
            for p, q in zip(*(replica.parameters() for replica in replicas)):
                slow = alone[0].state[p]["slow"], alone[1].state[q]["slow"]
                for pair in (p.data, q.data), slow:
                    torch._foreach_copy_(pair, [sum(pair) / 2] * 2)
    optimizer.average("slow", "exp_avg", "exp_avg_sq")
    tensors = train.tensors_of(train.State(model, masters, reducer, optimizer, None, None))
    same = all(torch.equal(*world.all_gather(x)) for x in tensors.values())
    return met, vector(model), sum(map(vector, replicas)) / 2, same, sent


def clipped(world):
    """Returns {case: [own gradient, mean] of the Reducer, then of the clipping one}, unscaled, each
    (buckets, elements), for a large gradient, the same scaled, a small one."""
    cases = {"large": (1000.0, 1.0), "scaled": (1000.0, 1024.0), "small": (0.1, 1.0)}
    results = {}
    for case, (factor, scale) in cases.items():
        results[case] = []
        for kind in dist.Reducer, bucket_clipping.ClippingReducer:
            model, reducer, backward = toy(world, kind)
            reducer.zero_grad(scale)
            reducer.last_micro_batch = False
            backward(model, world.rank, 0.5 * factor * scale)
            own = 2 * torch.stack(reducer.flats) / scale                 # after both halves
            reducer.last_micro_batch = True
            backward(model, world.rank, 0.5 * factor * scale)
            reducer.finish()
            results[case] += [own, torch.stack(reducer.flats) / scale]
    return results


def check_clipping(ranks):
    for case in "large", "scaled":
        ours, plain = ranks[0][case][3], ranks[0][case][1]
        bound = train.CLIP / len(ours) ** 0.5
        each = [own * (bound / own.norm(dim=1, keepdim=True)).clamp(max=1.0)
                for own, *_ in (outcome[case] for outcome in ranks)]     # then the mean over ranks
        assert torch.allclose(ours, sum(each) / 2, rtol=1e-4, atol=1e-6)
        assert ours.norm() <= train.CLIP < plain.norm()
    own, plain, _, ours = ranks[0]["small"]
    assert 0 < plain.norm() and own.norm(dim=1).max() < bound            # every bucket is below
    assert torch.equal(plain, ours)


def reducers(world):
    return ([local_training(world, period) for period in (1, 3)], slow_training(world),
            clipped(world), stages(world))


def test_reducers_and_stages_on_two_ranks(tmp_path):
    outcomes = run_ranks(reducers, 2, tmp_path)
    for local, (met, weights, expected, same, sent), _, told in outcomes:
        check_local_steps(*local)
        assert met == [False, True, False, True, False] and same
        assert sent == [0, 8 * 360, 0, 8 * 360, 0]         # w and s of five layers of 72
        assert torch.allclose(weights, expected, rtol=1e-5, atol=1e-7)
        check_stages(*told)
    check_clipping([outcome[2] for outcome in outcomes])


# ----- Whole programs: each variant by train.py, stopped and resumed -----

def test_stacking_begins_every_stage(monkeypatch):
    """One without steps, too, and that of a checkpoint."""
    told = []
    monkeypatch.setattr(stacking, "begin_stage", lambda *which, grow: told.append((which[2], grow)))
    for name in "begin_phase", "restore":
        monkeypatch.setattr(train, name, lambda *_: None)
    with installed(stacking):
        train.begin_phase(0, 0, SimpleNamespace(counters=train.Counters()), 2)
        train.restore(0, 0, 0, SimpleNamespace(counters=train.Counters(phase=1)))
    assert told == [(1, True), (2, True), (1, False)]


def run_variants(world, shards, folder):
    """Trains variants through two phases, at once and in two parts."""
    for module in local_steps, slow_momentum:
        module.PERIOD = 4
    for variant in VARIANTS[world.size]:
        steps = (2, 3, 2, 2) if variant is stacking else (5, 4)
        out = folder / name_of(variant)
        with installed(variant):
            for run in "whole", "parts":
                train_here(world, shards, out / run, "--batch", 4, "--lr-scale", 0.1,
                           "--save-every", 7, "--steps", *steps)
                if world.rank == 0 and run == "whole":         # the part to step 7
                    shutil.copytree(out / "whole", out / "parts")
                    (out / "parts" / "step-00000009.pt").unlink()
                world.barrier()


def name_of(variant):
    return variant.__name__.rpartition(".")[2]


def test_variants_train_and_resume_bit_for_bit(shards, tmp_path):
    together(lambda: run_ranks(run_variants, 2, tmp_path, shards, tmp_path),
             lambda: run_ranks(run_variants, 1, tmp_path, shards, tmp_path))
    for variant in ALL:
        out = tmp_path / name_of(variant)
        assert_same(last_state(out / "whole"), last_state(out / "parts"), name_of(variant))
        losses = column(out / "whole", "mlm_loss")
        assert losses == column(out / "parts", "mlm_loss") and len(losses) == 9
    # Bytes. The second stages of 1-bit LAMB are the steps 2 to 5 and 7 to 9
    sent = column(tmp_path / "onebit_lamb" / "whole", "bytes_sent")
    assert sent[0] == sent[5] and max(sent[1:5] + sent[6:]) < sent[0] / 25
    # 0/1 Adam sends nothing in the steps 4 and 9, but agrees before the save after step 9, which
    # compares the ranks' weights
    sent = column(tmp_path / "zeroone_adam" / "whole", "bytes_sent")
    assert sent[3] == sent[8] == 0 and 0 < sent[4] < sent[0] / 25
    # What is saved of an Albert is a plain BERT, which anyone can load
    model = bert.load_huggingface(tmp_path / "albert" / "whole" / "model")
    assert isinstance(model, bert.BertForPreTraining) and len(model.blocks) == 2


def test_no_program_takes_up_a_run_of_another(shards):
    manifest = data.load_manifest(shards)
    counts = []
    for variant in (SimpleNamespace(install=list), *ALL):
        with installed(variant):
            counts.append(train.run_settings(args_of(), manifest))
    assert all(counts.count(each) == 1 for each in counts)


@pytest.mark.parametrize("variant", [albert, modern])
def test_the_weights_of_a_bert_are_refused(variant, shards, tmp_path):
    with installed(variant), pytest.raises(bert.ModelError, match="leave out --init"):
        train_here(dist.World(), shards, tmp_path / "out", "--init", tmp_path)


def test_a_variant_is_a_program(shards, tmp_path):
    done = run_script("tests/variants/onebit_lamb.py", "--data", shards, "--out", tmp_path / "out",
                      *"--steps 9 0 --max-steps 2 --batch 2".split())
    assert done.returncode == 0 and "optimizer onebit-lamb" in done.stdout, done.stderr


def test_every_variant_is_in_the_readme():
    folder = Path(__file__).parent / "variants"
    readme = (folder / "README.md").read_text()
    shared = {"__init__.py", "common.py", "modern_export.py", "synchronised.py"}
    files = {path.name for path in folder.glob("*.py")} - shared
    # compiled.py is tested in test_train_loop.py, by a compiler that is fast.
    in_test_ladder = {"one_by_one.py", "buckets_after.py", "ring.py", "slow_network.py"}
    here = {f"{name_of(variant)}.py" for variant in ALL}
    assert files == here | in_test_ladder | {"compiled.py"}
    assert all(f"`{name}`" in readme for name in files)
