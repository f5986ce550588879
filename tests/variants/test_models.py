"""Tests that compare the variants' models and data with plain forms of them."""
import copy

import numpy as np
import pytest
import torch
from torch import nn

import bert
import data
import optim
import train
from tests.local_ranks import on_threads
from tests.training import args_of, assert_same, built, losses_of, random_batch
from tests.variants import albert, balance, modern, stacking, stream, whole_words
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
    assert plain.embeddings.tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)
    losses = [loss_of(model, batch) for model in (shared, plain)]
    sum(losses).backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    # The chain rule through W = table widen^T; torch stores `widen` as (D, E).
    table, widen = (layer.weight.detach() for layer in shared.embeddings.tokens)
    assert table.shape == (192, 32), f"the table is {table.shape}: E is at most half the width, 64"
    of_product = theirs["embeddings.tokens.weight"]
    expected = theirs | {"embeddings.tokens.0.weight": of_product @ widen,
                         "embeddings.tokens.1.weight": of_product.T @ table}
    for name, p in shared.named_parameters():
        if name.startswith("blocks."):
            expected[name] = sum(theirs[name.replace(".0.", f".{n}.", 1)] for n in range(3))
        assert torch.allclose(p.grad, expected[name], rtol=1e-4, atol=1e-4), (
            f"the gradient of {name} is not the sum over its uses")


def test_an_albert_is_8_times_smaller_than_base_and_a_modern_is_as_large():
    config = bert.BertConfig.preset("base", 30522)
    with torch.device("meta"):
        many, few, other = (sum(p.numel() for p in kind(config).parameters())
                            for kind in (bert.BertForPreTraining, albert.Albert, modern.Modern))
    assert round(many / few, 1) == 8.7
    assert 0.93 < many / other < 1.07


def plain_modern(model, tokens):
    """Returns the last hidden states (T, D) of one example by the equations, with pairs of columns
    as complex numbers."""
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
        nn.init.normal_(p, std=0.3)                        # including those of the norms
    lengths = torch.tensor([10, 10, 31, 13])               # the last rows are padding
    bounds = torch.tensor([0, 10, 20, 51, 64], dtype=torch.int32)
    tokens = torch.randint(128, (64,))
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(51)
    hidden = model.encode(rows, tokens, None, positions, bounds, lengths)
    expected = [plain_modern(model, example) for example in tokens[:51].split([10, 10, 31])]
    torch.testing.assert_close(hidden, torch.cat(expected), rtol=1e-4, atol=1e-4)
    later = model.encode(rows, tokens, None, positions + 7, bounds, lengths)
    torch.testing.assert_close(hidden, later, rtol=1e-3, atol=1e-3,
                               msg="a shift of all positions by 7 changes hidden states")


def test_a_modern_drops_embeddings_and_both_branches():
    model = modern.Modern(bert.BertConfig.preset("tiny", 192, dropout=1.0))
    rows = torch.arange(64)
    bounds, lengths = torch.tensor([0, 64, 64], dtype=torch.int32), torch.tensor([64, 0])
    x = torch.randn(64, 128)
    assert torch.equal(model.blocks[1](x, modern.cos_sin(rows, 64), bounds, lengths), x)
    assert not model.encode(rows, rows, None, rows, bounds, lengths).any(), (
        "a dropout of 1 does not drop the embeddings")


# ----- Stacking: a step of each stage -----

def step_in_each_stage(world, shards):
    """Takes a bf16 step in each stage of a model of two layers, and checks what it trains."""
    args = args_of("--data", shards, *"--precision bf16 --bucket-mb 0.01 --dropout 0".split())
    args.vocab_size = 320
    state = train.build(args, world)
    batch = random_batch(320, 8, 64)
    masters = state.masters
    lower = {name for name in masters if name.startswith(("embeddings.", "blocks.0."))}
    upper = {name for name in masters if name.startswith("blocks.1.")}
    for stage, names in enumerate([masters.keys() - upper, masters.keys() - lower, {*masters}]):
        before = copy.deepcopy(state.model)
        stacking.begin_stage(args, state, stage, grow=True)
        old = {name: master.clone() for name, master in masters.items()}
        state.reducer.zero_grad()
        loss = loss_of(state.model, batch)
        loss.backward()
        state.reducer.finish()
        for group in state.optimizer.param_groups:
            group["lr"] = 0.01
        state.optimizer.step()
        optim.copy_to_model(masters, state.model)
        with_gradient = {name for name, w in masters.items() if w.grad is not None}
        assert with_gradient == names, f"stage {stage} has the wrong gradients"
        changed = {name for name, w in masters.items() if not torch.equal(w, old[name])}
        assert changed <= names, f"stage {stage} changes {changed - names}, which are frozen"
        assert len(changed) > 0.9 * len(names), f"stage {stage} changes only {changed}"
        expected = 4 * sum(masters[name].numel() for name in names)
        assert state.reducer.bytes_sent == expected, (
            f"stage {stage} does not send exactly the gradients of what it trains")
        if stage == 1:
            once = loss_of(before, batch)
            before.depth = 2
            before.blocks[1] = before.blocks[0]
            twice = loss_of(before, batch)
            assert torch.allclose(loss, twice), "the upper layer is not a copy of the lower"
            assert not torch.allclose(twice, once), (
                "one layer and two give the same loss, so this test cannot detect a copy")
    assert torch.allclose(loss, loss_of(before, batch)), (
        "the beginning of the last stage changes weights")


def test_what_each_stage_of_stacking_trains(shards):
    with installed(stacking.install):
        on_threads(step_in_each_stage, 2, shards)


def test_the_upper_half_of_four_layers_begins_as_the_lower(shards):
    with installed(stacking.install):
        args, state = built(shards, "--model", "mini")
        stacking.begin_stage(args, state, 1, grow=True)
    lower, upper = (half.state_dict() for half in (state.model.blocks[:2], state.model.blocks[2:]))
    assert_same(lower, upper, "the upper half")


def test_the_schedule_of_stacking():
    plain = args_of("--steps", 1000, 100).phases
    with installed(stacking.install):
        stages = args_of().phases
        first = [optim.learning_rate(done, stages[0]) / stages[0].lr for done in (0.5, 1)]
    assert first == [1, 1], "the rate of the first stage decays"
    assert sum(phase.steps for phase in stages) == 2700, (
        "the stages together do not have the demo's 2700 steps")
    assert stages[0].steps == stages[1].steps == 920 and len(stages) == len(plain) + 2


def test_a_stage_without_steps_copies_its_layers_too(monkeypatch):
    told = []
    monkeypatch.setattr(train, "begin_phase", lambda *_: None)
    monkeypatch.setattr(stacking, "begin_stage", lambda args, state, *which, grow: told.append(
        (*which, grow)))
    with installed(stacking.install):
        train.begin_phase(None, None, train.State(*[None] * 5, train.Counters()), 2)
    assert told == [(1, True), (2, True)], (
        f"stages 1 and 2 are not both begun with copies: (stage, copies) are {told}")


# ----- Data -----

def test_albert_swaps_whole_sentences(shards):
    examples = albert.OrderedPairs(shards, 64)
    swapped, asked = 0, 0
    first, several = 0, 0
    for spans in examples.spans(range(400)):
        a, middle, b, end = spans.a, spans.a_end, spans.b, spans.b_end
        tokens, documents = examples.shard(spans.shard)
        cuts = 1 + np.flatnonzero(examples.ends_sentence[tokens[:-1]]
                                  & examples.begins_sentence[tokens[1:]])
        if spans.pair_label == data.IGNORED:
            assert b == end, f"{spans} has a B, and nobody asks for its order"
            assert np.isin(range(a + 1, middle), cuts).sum() < 3, f"{spans} has whole sentences"
            continue
        asked += 1
        if spans.pair_label:
            a, middle, b, end = b, end, a, middle
            swapped += 1
        assert a < middle == b < end, f"B does not follow A in {spans}"
        assert {a, middle, end} <= {*cuts, *documents}, f"{spans} has a part of a sentence"
        assert examples.ends_sentence[tokens[end - 1]], f"{spans} ends without a mark"
        within = cuts[(a < cuts) & (cuts < end)]
        if len(within) > 1:
            several += 1
            first += middle == within[0]
    assert 0.1 < first / several < 0.5, (
        f"{first} of {several} texts of several sentences are cut after the first, not 10 to 50 %")
    assert asked > 300 and 0.4 < swapped / asked < 0.6, (
        f"{swapped} of {asked} pairs are swapped, not about half")
    word, mark = map(np.argmax, (examples.begins_sentence, examples.ends_sentence))
    no_mark = data.Shard(np.array([word, mark] * 3 + [word]), np.array([0, 7]))
    assert examples.text(no_mark, 3, 60, 0.0).end == 6, (
        "a document's end without a mark tells that B is last")
    whole = data.PretrainingData(shards, 64, pairs="none").spans(range(50))
    assert albert.OrderedPairs(shards, 64, pairs="none").spans(range(50)) == whole
    assert [*albert.OrderedPairs(shards, 64, pairs="none").batch([1, 2]).labels] == ["mlm"]


def test_whole_words_are_masked(shards):
    tokens = np.random.default_rng(0).integers(5, 320, 10_000)
    whole = []
    for held_out in False, True:
        examples = whole_words.WholeWords(shards, 64, mask_fraction=0.3, held_out=held_out)
        rows, _ = examples.mask(tokens.copy(), np.arange(10_000))
        masked = np.isin(np.arange(10_000), rows)
        assert masked.mean() == pytest.approx(0.3, rel=0.05), (
            f"{masked.mean():.1%} of the tokens are masked, not 30 %")
        whole.append(np.array_equal(masked, masked[examples.word_starts(tokens)]))
    assert whole == [True, False], (
        f"whole words are masked in (training, held-out text): {whole}, not in training only")


def test_where_a_word_begins(shards):
    examples = whole_words.WholeWords(shards, 64)
    begin = 5 + np.flatnonzero(examples.begins_word[5:])[0]
    inside = 5 + np.flatnonzero(~examples.begins_word[5:])[0]
    tokens = np.array([data.CLS, begin, *9 * [inside], begin, data.SEP, inside, inside, data.SEP])
    expected = [0, *8 * [1], 9, 9, 11, 12, 13, 13, 15]     # ten tokens in two parts; a word's end
    assert examples.word_starts(tokens).tolist() == expected


@pytest.mark.parametrize("size", [1, 3, 20])
def test_balance_deals_every_example_in_snake_order(shards, size):
    """The longest example is dealt first, but a rank takes its longest last."""
    plain = data.PretrainingData(shards, 64).batch(range(17, 34))
    longest_first = sorted(plain.lengths[:-1].tolist(), reverse=True)
    snake = [*range(size), *reversed(range(size))]
    expected = [[] for _ in range(size)]
    for place, length in enumerate(longest_first):
        expected[snake[place % len(snake)]].insert(0, length)
    balanced = balance.BalancedData(shards, 64)
    for rank, lengths in enumerate(expected):
        batches = [balanced.batch(share) for share in balance.shares(1, 17, 4, rank, size)]
        assert len(batches) == -(-len(lengths) // 4), (
            f"rank {rank} has {len(batches)} micro-batches of up to 4 for {len(lengths)} examples")
        found = [n for batch in batches for n in batch.lengths[:-1].tolist()]
        assert found == lengths, f"rank {rank} does not have the right lengths in the right order"


def test_with_balance_each_rank_checks_all_shards(shards, monkeypatch):
    """Each rank reads all of them."""
    asked = []
    monkeypatch.setattr(data, "verify", lambda folder, *ranks: asked.append(ranks))
    with installed(balance.install):
        data.verify(shards, 1, 4)
    assert asked == [()], f"only the shards of (rank, size) {asked} are checked"


@pytest.fixture(scope="module")
def one_shard(documents, tmp_path_factory):
    """A folder with one shard to train on."""
    folder = tmp_path_factory.mktemp("one") / "shard"
    data.prepare(documents, folder, vocab_size=320, shards=1)
    return folder


@pytest.fixture
def streamed(one_shard, documents, tmp_path, monkeypatch):
    """The path of a file, now TEXT, with the text of `one_shard` in about ten windows. It also has
    soft hyphens and a document of one token, which must be left out."""
    path = tmp_path / "text.txt"
    tokenizer = data.load_tokenizer(one_shard / "tokenizer.model")
    pieces = tokenizer.id_to_piece(list(range(5, 320)))
    word = next(piece[1:] for piece in pieces if piece[0] == "▁" and len(piece) > 2)
    assert len(tokenizer.encode(word)) == 1
    path.write_text("\n\n".join([word, *documents]).replace("a", "\u00ada"))
    monkeypatch.setenv("TEXT", str(path))
    monkeypatch.setattr(stream, "corpus_of", stream.Corpus)
    monkeypatch.setattr(stream, "WINDOW", sum(map(len, documents)) // 11)
    return path


def same_batch(found, expected):
    fields = "tokens", "positions", "segments", "bounds"
    same = [np.array_equal(getattr(found, name), getattr(expected, name)) for name in fields]
    return all(same) and np.array_equal(found.labels["nsp"], expected.labels["nsp"])


@pytest.mark.parametrize("held_out", [False, True])
def test_a_stream_of_one_window_is_as_a_shard(one_shard, streamed, monkeypatch, held_out):
    monkeypatch.setattr(stream, "WINDOW", 10 ** 9)
    expected = data.PretrainingData(one_shard, 64, 1, 2, held_out, mask_fraction=0.3)
    found = stream.Stream(one_shard, 64, 1, 2, held_out, mask_fraction=0.3)
    indices = range(5000)                        # many times the text
    assert found.spans(indices) == expected.spans(indices)
    assert same_batch(found.batch(range(200)), expected.batch(range(200)))


def test_windows_have_the_documents_of_the_shard(one_shard, streamed):
    """They come in order, without those held out. A short remainder is not a window of its own."""
    parts = stream.Stream(one_shard, 64)
    windows = [parts.shard(number) for number in parts.paths]
    assert len(windows) in (9, 10) and min(parts.corpus.sizes) >= stream.WINDOW
    whole = data.PretrainingData(one_shard, 64).shard(0)
    tokens = np.concatenate([window.tokens for window in windows])
    sizes = np.concatenate([np.diff(window.documents) for window in windows])
    assert np.array_equal(tokens, whole.tokens), "the windows do not have the shard's tokens"
    assert np.array_equal(sizes, np.diff(whole.documents)), (
        "the windows do not have documents of the same lengths as the shard")


def test_documents_that_differ_in_case_alone(documents, streamed, tmp_path, monkeypatch):
    """data.py holds out both documents of a pair, or only one."""
    text = [*documents, *map(str.upper, documents)]
    data.prepare(text, tmp_path / "shard", vocab_size=320, shards=1)
    streamed.write_text("\n\n".join(text))
    monkeypatch.setattr(stream, "WINDOW", 10 ** 9)
    window = stream.Stream(tmp_path / "shard", 64).shard(0)
    whole = data.PretrainingData(tmp_path / "shard", 64).shard(0)
    assert np.array_equal(window.tokens, whole.tokens)


def test_a_window_gives_examples_as_it_has_text(one_shard, streamed, documents):
    """Windows come in order, from one that seed and phase choose, and each round gives different
    examples. The text has short documents, then long ones, one of them over data.LONGEST, then
    short ones again."""
    long = [" ".join(documents[n:n + 9]) for n in range(0, 300, 9)]
    text = [*documents, *long, " ".join(documents).replace("\n", " "), *documents]
    streamed.write_text("\n\n".join(text))
    parts = stream.Stream(one_shard, 64, phase=1, seed=2)
    sizes = parts.corpus.sizes
    count = len(sizes)
    assert sum(sizes) == pytest.approx(len("".join(text)), rel=0.01)
    spans = parts.spans(range(2 * parts.ends[-1]))
    assert [one.index for one in spans] == [*range(len(spans))]
    windows = [one.shard for one in spans]
    changes = [n for n, before in zip(windows[1:], windows) if n != before]
    order = [(windows[0] + n) % count for n in range(1, 2 * count + 1)]
    assert changes == order[:len(changes)] and len(changes) >= 2 * count - 1, (
        "the windows do not come in order through two rounds")
    assert [windows.count(n) for n in range(count)] == [2 * each for each in parts.each]
    often = [windows.count(n) / size for n, size in enumerate(sizes)]
    assert max(often) < 1.4 * min(often), (
        f"windows give {min(often):.3f} to {max(often):.3f} examples for each of their characters")
    assert parts.ends[-1] == pytest.approx(sum(sizes) / (4 * 64), rel=0.03)
    found = {(one.shard, one.a) for one in spans}
    assert len(found) > 0.8 * len(spans), "the second round repeats the first"
    begins = {stream.Stream(one_shard, 64, phase, seed).spans([0])[0].shard
              for phase in (0, 1) for seed in (0, 1)}
    assert len(begins) > 1, "all phases and seeds begin with the same window"
    assert max(map(len, sum(parts.corpus.windows(), []))) <= data.LONGEST


def test_an_example_of_a_stream_follows_from_its_number(one_shard, streamed, monkeypatch):
    """A micro-batch has every fourth example of its step, as in train.py."""
    read = []
    monkeypatch.setattr(stream.Corpus, "read", lambda corpus, number, read_it=stream.Corpus.read: (
        read.append(number) or read_it(corpus, number)))
    examples = stream.Stream(one_shard, 64)
    steps = examples.ends[-1] // 40
    batches = [examples.batch(range(40 * step + k, 40 * step + 40, 4))
               for step in range(steps) for k in range(4)]
    assert len(read) == len({*read}), f"one round reads a window twice: {read}"
    monkeypatch.setattr(stream, "KEPT", 1)
    again = stream.Stream(one_shard, 64)
    for step in steps - 1, 0, 3, 1:
        batch = again.batch(range(40 * step + 3, 40 * step + 40, 4))
        assert same_batch(batch, batches[4 * step + 3]), f"step {step} has different examples"


def test_a_stream_refuses_other_text(one_shard, streamed, documents, monkeypatch):
    examples = stream.Stream(one_shard, 64)
    settings = []
    last = documents[-1]
    changed = [*documents[:-1], last[1] + last[0] + last[2:]]
    for text in documents, changed:
        streamed.write_text("\n\n".join(text))
        with installed(stream.install):
            args = args_of("--data", one_shard)
            settings.append(train.run_settings(args, data.load_manifest(one_shard))["text"])
    assert settings[0] != settings[1], "a run resumes with different text"
    for text in changed, documents[:30]:
        streamed.write_text("\n\n".join(text))
        with pytest.raises(data.DataError, match="has changed since the run started"):
            examples.shard(len(examples.paths) - 1)
    streamed.write_text("\n\n".join(documents))
    monkeypatch.setattr(stream, "WINDOW", 1)
    with pytest.raises(data.DataError, match="window 2 of TEXT has fewer than two documents"):
        stream.Stream(one_shard, 64).shard(2)
    streamed.write_text("\n".join(documents))               # without blank lines
    with pytest.raises(data.DataError, match=r"lacks \d+ of the \d+ documents that .* holds out"):
        stream.Stream(one_shard, 64)


def test_all_phases_share_the_demos_text(one_shard, documents, monkeypatch):
    """This is the text if TEXT is not set."""
    monkeypatch.delenv("TEXT", raising=False)
    monkeypatch.setattr(data, "machine_documentation", lambda: documents)
    first, second = (stream.Stream(one_shard, 64, phase) for phase in (0, 1))
    assert first.corpus is second.corpus and first.corpus.documents is documents


def test_a_text_that_could_not_be_read_is_read_again(one_shard, streamed):
    corpus = stream.Corpus(one_shard, str(streamed))
    corpus.window(0)
    corpus.reader = map(lambda _: 1 / 0, [0])
    with pytest.raises(ZeroDivisionError):
        corpus.window(1)
    assert len(corpus.window(1).tokens)
