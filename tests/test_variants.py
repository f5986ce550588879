"""The files of tests/variants: each against its equations, or a plain way to the same. Of the 1-bit
family here are only its whole programs: test_onebit.py has the rest."""
import contextlib
import copy
import gc
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
from tests.test_optim import apply, assert_equal, parameters, problem
from tests.training import assert_same, last_state, metrics, plan_of, random_batch, shrink
from tests.variants import (albert, bucket_clipping, came, gradientflow, local_steps, merit, modern,
                            modern_muon, muon, onebit_adam, onebit_lamb, powersgd, slow_momentum,
                            stacking, zeroone_adam)
from tests.variants.synchronised import LocalReducer

VARIANTS = (albert, bucket_clipping, came, gradientflow, local_steps, merit, modern, modern_muon,
            muon, onebit_adam, onebit_lamb, powersgd, slow_momentum, stacking, zeroone_adam)


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
    assert not np.allclose(params[0].detach(), values[0], atol=0.1)


def test_merit_where_a_row_or_column_is_zero():
    w, u = torch.tensor([[0.0, 0, 0], [3, 0, 1]]), torch.tensor([[0.1, 0.1, 0.2], [0.5, 0.3, 0.25]])
    assert merit.max_ratios(w, u).tolist() == [[1, 1, 1], [6, 1, 6]]
    assert merit.max_ratios(u[0], 0 * u[0]) == 1


def test_came_keeps_rows_and_columns_in_place_of_a_second_moment():
    p = torch.zeros(30, 50, requires_grad=True)
    state = came.CAME([p]).state[p]
    assert sum(x.numel() for x in state.values()) == 30 * 50 + 2 * (30 + 50)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_newton_schulz_brings_singular_values_near_1(precision):
    generator = torch.Generator().manual_seed(0)
    for rows, columns, least in (64, 64, 0.03), (96, 32, 0.01), (32, 128, 1.0):
        # Orthogonal times what the singular values are to be
        u = torch.linalg.qr(torch.randn(rows, rows, generator=generator)).Q
        v = torch.linalg.qr(torch.randn(columns, columns, generator=generator)).Q
        s = torch.logspace(0, np.log10(least), min(rows, columns))
        s = 7 * s / s.norm()
        g = u[:, :len(s)] * s @ v[:, :len(s)].T
        x = muon.newton_schulz(g, optim.PRECISIONS[precision]).float()
        assert x.shape == g.shape
        after = torch.linalg.svdvals(x)
        assert 0.5 < after.min() and after.max() < 1.5, (rows, columns)
        # The singular vectors stay: U^T x V is diagonal
        diagonal = u[:, :len(s)].T @ x @ v[:, :len(s)]
        assert (diagonal - diagonal.diag().diag()).abs().max() < 0.1, (rows, columns)


def muon_beside_torch(names, shapes):
    """Returns the weights after ten steps of our Muon on named matrices, and after those of torch's
    on each third of a `qkv` and on all other matrices whole."""
    generator = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(shape, generator=generator) for name, shape in zip(names, shapes)}
    thirds = [w.clone().chunk(3 if "qkv" in name else 1) for name, w in masters.items()]
    groups = [group | {"precision": "bf16"} for group in muon.groups_of(masters)]
    ours = muon.Muon(groups, lr=0.02)
    flat = [part for parts in thirds for part in parts]
    theirs = torch.optim.Muon(flat, lr=0.02, weight_decay=0.01, momentum=muon.MOMENTUM,
                              nesterov=True, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        for w, parts in zip(masters.values(), thirds):
            w.grad = torch.randn(w.shape, generator=generator)
            for part, gradient in zip(parts, w.grad.chunk(len(parts))):
                part.grad = gradient.clone()
        ours.step()
        theirs.step()
    return list(masters.values()), [torch.cat(parts) for parts in thirds]


def test_muon_is_torchs_on_the_matrices_of_blocks():
    names = [f"blocks.0.{name}.weight" for name in ("qkv", "attention_out", "up", "down")]
    ours, theirs = muon_beside_torch(names, [(96, 32), (32, 32), (128, 32), (32, 128)])
    for w, other, name in zip(ours, theirs, names):
        assert torch.allclose(w, other, rtol=1e-5, atol=1e-5), name


def test_muon_is_adamw_on_all_but_the_matrices_of_blocks():
    torch.manual_seed(0)
    config = bert.BertConfig(1, 64, heads=1, feed_forward=128, vocab_size=128)
    masters = optim.master_weights(bert.BertForPreTraining(config), torch.float32)
    others = {name: w.detach().clone() for name, w in masters.items()}
    with installed(muon):
        ours = optim.make_optimizer("muon", masters, (0.9, 0.98))
        theirs = optim.make_optimizer("adamw", others, (0.9, 0.98))
    for group in ours.param_groups + theirs.param_groups:
        group["lr"] = 0.01
    for _ in range(10):
        for name, w in masters.items():
            w.grad = torch.randn(w.shape)
            others[name].grad = w.grad.clone()
        ours.step()
        theirs.step()
    differ = {name for name, w in masters.items()
              if not torch.allclose(w, others[name], rtol=1e-5, atol=1e-5)}
    matrices = ("qkv", "attention_out", "up", "down")
    assert differ == {f"blocks.0.{name}.weight" for name in matrices}
    # No second moment is kept of those
    kept = {name for name, w in masters.items() if ours.state[w]["exp_avg_sq"].numel()}
    assert kept == masters.keys() - differ


def slow_optimizer(params, **options):
    """Returns slow momentum's optimizer on one rank."""
    optimizer = slow_momentum.SlowMomentum(params, **options)
    optimizer.connect(dist.World(), SimpleNamespace(bytes_sent=0))
    return optimizer


def test_slow_momentum_without_weight_and_period_is_adamw(monkeypatch):
    monkeypatch.setattr(slow_momentum, "WEIGHT", 0.0)
    monkeypatch.setattr(slow_momentum, "PERIOD", 1)
    values, _, grads = problem(1)
    ours, _ = parameters(values, [0.05] * 5)
    theirs, _ = parameters(values, [0.05] * 5)
    slow = slow_optimizer(ours, lr=0.01, weight_decay=0.1)
    adamw = optim.AdamW(theirs, lr=0.01, eps=1e-6, weight_decay=0.1)
    for step in grads:
        apply(slow, ours, step)
        apply(adamw, theirs, step)
    # What crosses the network is fp32, also between one rank
    assert_equal(ours, [p.detach().numpy() for p in theirs], 1e-6)


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
    losses = model(batch)
    return losses.mlm_sum + losses.nsp_sum


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
    assert len(batch.labels) > 0
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
    base, large = (bert.BertConfig.preset(name, 30522) for name in ("base", "large"))
    with torch.device("meta"):
        sizes = [[sum(p.numel() for p in kind(config).parameters()) for config in (base, large)]
                 for kind in (bert.BertForPreTraining, albert.Albert)]
    assert [round(many / few, 1) for many, few in zip(*sizes)] == [8.7, 17.4]


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
    assert not torch.allclose(hidden, model.encode(rows, tokens, None, 2 * positions, bounds,
                                                   lengths), atol=0.01)


def test_a_modern_block_without_its_changes_is_berts():
    torch.manual_seed(0)
    config = bert.BertConfig(1, 128, 2, feed_forward=192, vocab_size=128, dropout=0.0)
    ours = modern.Modern(config).blocks[0]
    theirs = bert.Block(SimpleNamespace(**vars(config) | {"feed_forward": 128}))
    # No norms and biases, every position 0, and a gate that is 1: it reads the column 0, in which
    # all x are 1 and stay so
    ours.attention_norm = ours.norm = theirs.attention_norm = theirs.norm = nn.Identity()
    with torch.no_grad():
        for name in "qkv", "attention_out", "up", "down":
            weight = nn.init.normal_(getattr(theirs, name).weight, std=0.1)
            getattr(theirs, name).bias.zero_()
            if name in ("attention_out", "down"):
                weight[0] = 0
            if name == "up":
                ours.up_and_gate.weight.zero_()
                ours.up_and_gate.weight[:128] = weight
                ours.up_and_gate.weight[128:, 0] = 1
            else:
                getattr(ours, name).weight.copy_(weight)
    x = torch.randn(64, 128)
    x[:, 0] = 1
    rest = torch.tensor([0, 40, 64], dtype=torch.int32), torch.tensor([40, 24]), torch.arange(9)
    turns = modern.cos_sin(torch.zeros(64, dtype=torch.int64), 64)
    assert torch.allclose(ours(x, turns, *rest), theirs(x, *rest), rtol=1e-5, atol=1e-5)


def test_a_modern_has_no_biases_and_about_as_many_parameters():
    kept = {"mlm_bias", "pooler.bias", "nsp.bias"}
    for name in bert.PRESETS:
        config = bert.BertConfig.preset(name, 8192)
        with torch.device("meta"):
            model = modern.Modern(config)
            theirs = bert.Block(config)
        assert {name for name, _ in model.named_parameters() if name.endswith("bias")} == kept
        ours, theirs = (sum(p.numel() for p in block.parameters())
                        for block in (model.blocks[-1], theirs))
        assert ours == pytest.approx(theirs, rel=0.07), name
    parts = {}
    for group in muon.groups_of(dict(model.named_parameters())):
        parts[group["parts"]] = parts.get(group["parts"], 0) + len(group["params"])
    # qkv; up_and_gate; attention_out and down; table, heads, norms and biases
    assert parts == {3: 24, 2: 24, 1: 48, 0: 1 + 1 + 1 + 1 + 4 + 24 + 23 + 2}


def stages(world):
    """Trains each stage for a step, in bf16; returns for each what trained, what changed, bytes."""
    torch.manual_seed(0)
    config = bert.BertConfig(2, 64, heads=1, feed_forward=128, vocab_size=128, dropout=0.0)
    flags = SimpleNamespace(bucket_mb=0.01, compression="none")
    plan = SimpleNamespace(config=config, flags=flags)
    model = stacking.GrowingBert(config)
    batch = random_batch(128, 8, 64)
    masters = optim.master_weights(model, torch.bfloat16)
    optimizer = optim.LAMB(masters.values(), lr=0.01)
    optimizer._update = stacking.only_with_gradient(optimizer._update)
    state = train.State(model, dist.Reducer(model, world), masters, optimizer, optim.LossScaler())
    told = []
    for stage in range(stacking.STAGES + 1):
        before = copy.deepcopy(model)
        stacking.begin_stage(plan, world, state, stage, grow=True)
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
    state.reducer.close()
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


def lamb(model):
    return optim.LAMB(model.parameters(), lr=0.01)


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def local_training(world, period, steps=9):
    """Returns the parameters that were equal on both ranks after each step's averaging, and all
    weights after each step; the same by one process that plays both ranks."""
    local_steps.PERIOD = period
    model, reducer, backward = toy(world, local_steps.WeightReducer)
    reducer.weights = dict(model.named_parameters())
    optimizer = lamb(model)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [lamb(replica) for replica in replicas]
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
        reducer.commit(True)
        optimizer.step()
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
    with torch.no_grad():
        reducer.agree(optimizer)
    bits = vector(model), *(state[key] for state in optimizer.state.values()
                            for key in ("exp_avg", "exp_avg_sq"))
    same = all(torch.equal(*world.all_gather(x)) for x in bits)
    reducer.close()
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
    optimizer = slow_momentum.SlowMomentum(model.parameters(), lr=0.01)
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
    optimizer.agree()
    optimizer.state_dict()
    bits = vector(model), *(x for state in optimizer.state.values() for x in state.values())
    same = all(torch.equal(*world.all_gather(x)) for x in bits)
    reducer.close()
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
            reducer.sends = False
            backward(model, world.rank, 0.5 * factor * scale)
            own = 2 * torch.stack(reducer.flats) / scale                 # after both halves
            reducer.sends = True
            backward(model, world.rank, 0.5 * factor * scale)
            reducer.finish()
            results[case] += [own, torch.stack(reducer.flats) / scale]
            reducer.close()
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


# ----- Whole programs: each variant by train.py, killed and resumed -----

@contextlib.contextmanager
def installed(variant):
    """While inside, train.py is the variant's."""
    before = [(module, dict(vars(module))) for module in (bert, data, dist, optim, train)]
    variant.install()
    try:
        yield
    finally:
        for module, names in before:
            vars(module).update(names)


def run_variants(world, shards, folder, half):
    """Trains train.py's own model and every second variant, whole and from step 7 of 9 on; returns
    what each said to train.py's checkpoint, and train.py to the variant's."""
    shrink()
    for module in local_steps, slow_momentum:
        module.PERIOD = 4

    def run(out, *argv, steps=(9, 0)):
        argv = ["--data", shards, "--out", folder / out, "--batch", 4, "--workers", 0,
                "--checkpoint-every", 7, "--eval-every", 4, "--steps", *steps, *argv]
        train.train(plan_of(*argv, world=world), world)

    def refusal(out, **options):
        with pytest.raises(train.ConfigError) as error:
            run(out, **options)
        told = str(error.value)
        del error
        gc.collect()                                       # its frames hold the folder's lock
        return told

    folder.mkdir(exist_ok=True)
    run("plain")
    told = {}
    for variant in VARIANTS[half::2]:
        name = variant.__name__.rpartition(".")[2]
        steps = (3, 3, 3, 0) if variant is stacking else (9, 0)
        with installed(variant):
            run(name, steps=steps)
            if world.rank == 0:                            # as if it had been killed after step 7
                shutil.copytree(folder / name, folder / f"{name}-killed")
                (folder / f"{name}-killed" / "checkpoints" / "step-00000009.pt").unlink()
            run(f"{name}-killed", steps=steps)
            told[name] = [refusal("plain", steps=steps)]
        told[name].append(refusal(name))
    return told


def test_variants_train_and_resume_bit_for_bit(shards, tmp_path):
    def train_and_resume(half):
        folder = tmp_path / f"half-{half}"
        told, _ = run_ranks(run_variants, 2, tmp_path, shards, folder, half)
        for name, refusals in told.items():
            assert_same(last_state(folder / name), last_state(folder / f"{name}-killed"), name)
            assert all("is of another run" in refusal for refusal in refusals), refusals
        return folder

    folder, _ = together(lambda: train_and_resume(0), lambda: train_and_resume(1))
    (run,), *_, last = metrics(folder / "albert", "run"), *metrics(folder / "albert")
    assert last["bytes_sent"] == 4 * run["parameters"]     # 2 (n - 1) / n of each, for n = 2
    # What is saved is a plain BERT, which anyone can load
    model = bert.load_huggingface(folder / "albert" / "model")
    assert isinstance(model, bert.BertForPreTraining) and len(model.blocks) == 2


@pytest.mark.parametrize("variant", ["came", "onebit_lamb", "slow_momentum"])
def test_variants_are_programs(shards, tmp_path, variant):
    done = run_script(f"tests/variants/{variant}.py", "--data", shards, "--out", tmp_path,
                      *"--steps 5 0 --max-steps 1 --workers 0 --batch 2".split())
    name = variant.replace("_", "-")
    assert done.returncode == 0 and f"optimizer {name}" in done.stdout, done.stderr


def test_every_variant_is_in_the_readme():
    folder = Path(__file__).parent / "variants"
    readme = (folder / "README.md").read_text()
    shared = {"__init__.py", "compressors.py", "modern_export.py", "synchronised.py"}
    files = {path.name for path in folder.glob("*.py")} - shared
    assert files == {f"{variant.__name__.rpartition('.')[2]}.py" for variant in VARIANTS}
    assert all(f"`{name}`" in readme for name in files)
