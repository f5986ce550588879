"""The variants' models and data, each against a plain form of it."""
import copy

import numpy as np
import pytest
import torch
from torch import nn

import bert
import data
import dist
import optim
import train
from tests.local_ranks import on_threads
from tests.training import args_of, losses_of, random_batch
from tests.variants import albert, balance, modern, stacking, whole_words
from tests.variants.equations import installed


def loss_of(model, batch):
    return sum(losses_of(model(batch), batch).values())


# ----- Models -----

def test_an_albert_is_a_bert_with_equal_layers():
    torch.manual_seed(0)
    config = bert.BertConfig(3, 64, heads=1, feed_forward=128, vocab_size=192, dropout=0.0)
    shared = albert.Albert(config)
    batch = random_batch(192, examples=8, length=64)
    nn.init.normal_(shared.mlm_bias)
    plain = albert.written_out(shared)
    gradients = []
    losses = []
    for model in shared, plain:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    ours, theirs = gradients
    # The chain rule through W = table widen
    table, widen = (layer.weight.detach() for layer in shared.embeddings.tokens)
    of_product = theirs["embeddings.tokens.weight"]
    expected = {"embeddings.tokens.0.weight": of_product @ widen,
                "embeddings.tokens.1.weight": of_product.T @ table}
    for name, gradient in ours.items():
        of_layers = [theirs.get(name.replace("blocks.0", f"blocks.{n}")) for n in range(3)]
        if name not in expected:
            expected[name] = sum(of_layers) if name.startswith("blocks.") else theirs[name]
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4), (
            f"{name} has another gradient than the sum over its uses")


def test_an_albert_is_8_times_smaller_than_base():
    config = bert.BertConfig.preset("base", 30522)
    with torch.device("meta"):
        many, few = (sum(p.numel() for p in kind(config).parameters())
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
        inner, gate = (normal(x, block.norm) @ block.up_and_gate.weight.T).chunk(2, 1)
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
    torch.testing.assert_close(hidden, torch.cat(expected), rtol=1e-4, atol=1e-4)
    later = model.encode(rows, tokens, None, positions + 7, bounds, lengths)
    torch.testing.assert_close(hidden, later, rtol=1e-3, atol=1e-3,
                               msg="it matters where an example begins")


# ----- Stacking: a step of each stage -----

def step_in_each_stage(world, model, batch, trainable):
    """Takes a step in each stage, in bf16. trainable: the names of what trains in each."""
    model = copy.deepcopy(model)
    masters = optim.cast_with_masters(model, torch.bfloat16)
    reducer = dist.Reducer(model, world, masters=masters)
    optimizer = optim.LAMB(masters.values(), lr=0.01)
    state = train.State(model, masters, reducer, optimizer, optim.LossScaler(), train.Counters())
    args = args_of("--bucket-mb", 0.01)
    stacking.prepare(args, world, state)
    for stage, names in enumerate(trainable):
        before = copy.deepcopy(model)
        stacking.begin_stage(args, state, stage, grow=True)
        old = {name: master.clone() for name, master in masters.items()}
        reducer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        reducer.finish()
        optimizer.step()
        optim.copy_to_model(masters, model)
        with_gradient = {name for name, w in masters.items() if w.grad is not None}
        assert with_gradient == names, f"stage {stage} has other gradients"
        changed = {name for name, w in masters.items() if not torch.equal(w, old[name])}
        assert changed <= names, f"stage {stage} changes {changed - names}, which are frozen"
        assert len(changed) > 0.9 * len(names), f"stage {stage} changes {changed} alone"
        expected = 4 * sum(masters[name].numel() for name in names)
        assert reducer.bytes_sent == expected, f"stage {stage} does not send what it trains"
        if stage == 1:
            twice, once = loss_of(repeated(before), batch), loss_of(before, batch)
            assert torch.allclose(loss, twice), "the upper layers are no copies of the lower ones"
            assert not torch.allclose(twice, once), "this test cannot tell copies"
    assert torch.allclose(loss, loss_of(before, batch)), "to train all layers changes weights"


def repeated(model):
    """Returns a plain BERT of four layers, the first two of a model's twice."""
    plain = bert.BertForPreTraining(model.config).bfloat16()
    weights = model.state_dict()
    for name in weights:
        source = name.replace("blocks.2.", "blocks.0.").replace("blocks.3.", "blocks.1.")
        plain.get_parameter(name).data.copy_(weights[source])
    return plain


def test_what_each_stage_of_stacking_trains():
    torch.manual_seed(0)
    config = bert.BertConfig(4, 64, heads=1, feed_forward=128, vocab_size=128, dropout=0.0)
    model = stacking.GrowingBert(config)
    names = {name for name, _ in model.named_parameters()}
    lower = {name for name in names if name.startswith(("blocks.0.", "blocks.1."))}
    upper = {name for name in names if name.startswith(("blocks.2.", "blocks.3."))}
    embeddings = {name for name in names if name.startswith("embeddings.")}
    on_threads(step_in_each_stage, 2, model, random_batch(128, 8, 64),
               [names - upper, names - lower - embeddings, names])


def test_the_schedule_of_stacking():
    plain = args_of("--steps", 1000, 100).phases
    with installed(stacking.install):
        stages = args_of().phases
        first = [optim.learning_rate(done, stages[0]) / stages[0].lr for done in (0.5, 1)]
    assert first == [1, 1], "the rate of a stage decays"
    assert sum(phase.steps for phase in stages) == 2700, "the stages have other steps than the demo"
    assert stages[0].steps == stages[1].steps == 920 and len(stages) == len(plain) + 2


def test_every_stage_begins_one_without_steps_too(monkeypatch):
    """And that of a checkpoint, where no layers are copied."""
    told = []
    monkeypatch.setattr(stacking, "begin_stage", lambda *which, grow: told.append((which[2], grow)))
    for name in "begin_phase", "restore":
        monkeypatch.setattr(train, name, lambda *_: None)
    with installed(stacking.install):
        train.begin_phase(None, None, train.State(*[None] * 5, train.Counters()), 2)
        train.restore(None, None, None, train.State(*[None] * 5, train.Counters(phase=1)))
    assert told == [(1, True), (2, True), (1, False)], "(stage, whether layers are copied)"


# ----- Data -----

def test_albert_swaps_whole_sentences(shards):
    examples = albert.OrderedPairs(shards, 64)
    swapped = 0
    for spans in examples.spans(range(400)):
        a, middle, b, end = spans.a, spans.a_end, spans.b, spans.b_end
        if spans.pair_label:
            a, middle, b, end = b, end, a, middle
            swapped += 1
        assert a < middle == b < end, f"B does not follow A in {spans}"
        tokens, documents = examples.shard(spans.shard)
        cuts = 1 + np.flatnonzero(examples.ends_sentence[tokens[:-1]]
                                  & examples.begins_sentence[tokens[1:]])
        whole = {*cuts, *documents}
        assert {a, middle, end} <= whole or np.isin(range(a + 1, end), cuts).sum() < 3, (
            f"a part of a sentence is in {spans}")
    assert 160 < swapped < 240, f"{swapped} of 400 are swapped"
    assert [*albert.OrderedPairs(shards, 64, pairs="none").batch([1, 2]).labels] == ["mlm"]


def test_whole_words_are_masked(shards):
    tokens = np.random.default_rng(0).integers(5, 320, 10_000)
    whole = []
    for held_out in False, True:
        examples = whole_words.WholeWords(shards, 64, mask_fraction=0.3, held_out=held_out)
        rows, _ = examples.mask(tokens.copy(), np.arange(10_000))
        masked = np.isin(np.arange(10_000), rows)
        assert masked.mean() == pytest.approx(0.3, rel=0.05), f"{masked.mean():.1%} are masked"
        whole.append(np.array_equal(masked, masked[examples.word_starts(tokens)]))
    assert whole == [True, False], "whole words are masked in training, tokens in held-out text"


def test_where_a_word_begins(shards):
    examples = whole_words.WholeWords(shards, 64)
    begin = 5 + np.flatnonzero(examples.begins_word[5:])[0]
    inside = 5 + np.flatnonzero(~examples.begins_word[5:])[0]
    tokens = np.array([data.CLS, begin, *9 * [inside], begin, data.SEP, inside, inside, data.SEP])
    expected = [0, *8 * [1], 9, 9, 11, 12, 13, 13, 15]     # a word of ten in parts; a cut word
    assert examples.word_starts(tokens).tolist() == expected


def test_balance_deals_every_example_by_length(shards):
    plain = data.PretrainingData(shards, 64).batch(range(17, 34))
    balanced = balance.BalancedData(shards, 64)
    lengths = []
    for rank in range(3):
        batches = [balanced.batch(share) for share in balance.shares(1, 17, 4, rank, 3)]
        assert len(batches) == 2, f"rank {rank} has {len(batches)} micro-batches"
        lengths.append([n for batch in batches for n in batch.lengths[:-1].tolist()])
        assert lengths[-1] == sorted(lengths[-1]), f"rank {rank} does not end with its longest"
    assert sorted(sum(lengths, [])) == sorted(plain.lengths[:-1].tolist()), (
        "other examples than those of the step")


def test_balance_deals_in_snake_order():
    owners = [None] * 8                                    # from the longest on
    for rank in range(3):
        [share] = balance.shares(0, 8, 9, rank, 3)
        for place in share.places:
            owners[7 - place] = rank
    assert owners == [0, 1, 2, 2, 1, 0, 0, 1]


def test_with_balance_each_rank_checks_all_shards(shards, monkeypatch):
    """And they read all."""
    asked = []
    monkeypatch.setattr(data, "verify", lambda folder, *ranks: asked.append(ranks))
    with installed(balance.install):
        data.verify(shards, 1, 4)
    assert asked == [()], f"only the shards of {asked} are checked"
