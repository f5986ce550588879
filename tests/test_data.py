"""data.py: statistics of masks and pairs, dealing, workers; formats, bad input, shards on disk."""
import bz2
import contextlib
import functools
import gzip
import json
import lzma
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array

import numpy as np
import pytest
import torch

import data
from tests.conftest import ROOT, SEED, make_documents
from tests.ranks import run_script

OPTIONS = [{}, {"whole_words": True, "pairs": "sop"},
           {"pairs": "none", "mask_fraction": 0.3, "held_out": True}]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def near(count, of, p):
    """Whether `count` of `of` is what chance p gives, within four standard deviations."""
    return abs(count - p * of) < 4 * math.sqrt(p * (1 - p) * of)


def unmasked(example):
    """The tokens of A and of B."""
    tokens = example.tokens.copy()
    tokens[example.masked_positions] = example.labels
    return tokens[1:example.b_start - 1], tokens[example.b_start:-1]


def homes(shard, segment):
    """The documents (numbers) in which a run of tokens stands."""
    text, run = shard.tokens.tobytes(), segment.astype(np.uint16).tobytes()
    found, at = set(), text.find(run)
    while at >= 0:
        if at % 2 == 0:
            found.add(int(np.searchsorted(shard.documents, at // 2, "right")) - 1)
        at = text.find(run, at + 1)
    return found


def columns(dataset, indices):
    """The Spans of examples, each field an array."""
    return data.Spans(*np.array(dataset.spans(indices)).T)


# Examples

@pytest.mark.parametrize("seq_len", [32, 128])
def test_pairs_are_half_true_and_others_from_elsewhere(shards, seq_len):
    dataset, count, replaced = data.PretrainingData(shards, seq_len, 1, seed=3), 1500, 0
    for i in range(count):
        example, shard = dataset[i], dataset.shard(i % 4)
        tokens = example.tokens
        assert len(tokens) <= seq_len, f"example {i} has {len(tokens)} tokens, of {seq_len} at most"
        assert tokens[0] == data.CLS and tokens[-1] == tokens[example.b_start - 1] == data.SEP, (
            f"example {i} is not [CLS] A [SEP] B [SEP]")
        assert np.isin(tokens, [data.CLS, data.SEP, data.PAD]).sum() == 3, (
            f"example {i} has other special tokens than one [CLS] and two [SEP]")
        a, b = unmasked(example)
        assert len(a) and len(b), f"example {i} has {len(a)} tokens of A and {len(b)} of B"
        assert homes(shard, a), f"A of example {i} stands in no document of shard {i % 4}"
        if example.pair_label == 0:
            assert homes(shard, np.concatenate([a, b])), (
                f"B of example {i} is labelled true (0), but does not follow its A in a document")
        elif len(homes(shard, a)) == 1 and len(b) > 3:
            assert homes(shard, b) - homes(shard, a), (
                f"B of example {i} is labelled false (1), but is of A's own document or of none")
        replaced += example.pair_label
    assert near(replaced, count, 0.5), f"{replaced} of {count} pairs are false, not half of them"
    false = np.mean([spans.pair_label for spans in dataset.spans(range(20_000))])
    # Four standard errors
    assert abs(false - 0.5) < 0.014, f"{false:.1%} of 20,000 pairs are false, not half of them"


def test_both_parts_of_a_pair_are_of_the_same_epoch(shards, monkeypatch):
    dataset = data.PretrainingData(shards, 32)
    text, epochs = dataset.text, []
    monkeypatch.setattr(dataset, "text", lambda shard, epoch, *rest: (
        epochs.append(epoch) or text(shard, epoch, *rest)))
    windows = dataset.shard(0).windows[-1]
    dataset.spans(range(4 * 2 * windows, 4 * 3 * windows, 4))                # of shard 0
    assert set(epochs) == {2}, (
        f"texts of an example of epoch 2 are cut as in the epochs {sorted(set(epochs))}: windows "
        "shift from epoch to epoch, B's as A's")


def test_sentence_order_and_no_pairs(shards):
    sop, swapped = data.PretrainingData(shards, 48, pairs="sop"), 0
    single = data.PretrainingData(shards, 48, pairs="none")
    for i in range(500):
        (a, b), shard, label = unmasked(sop[i]), sop.shard(i % 4), sop[i].pair_label
        assert len(a) and len(b), f"sop: example {i} has {len(a)} tokens of A and {len(b)} of B"
        assert homes(shard, np.concatenate([b, a] if label else [a, b])), (
            f"sop: the two parts of example {i} are not neighbours in the order that {label} means")
        swapped += label
        example = single[i]
        assert example.pair_label == data.IGNORED, f"none: pair_label is {example.pair_label}"
        assert example.b_start == len(example.tokens) <= 48, f"none: example {i} has a B"
        assert example.tokens[0] == data.CLS and example.tokens[-1] == data.SEP, (
            f"none: example {i} is not [CLS] A [SEP]")
        assert homes(shard, unmasked(example)[0]), f"none: example {i} stands in no document"
    assert near(swapped, 500, 0.5), f"sop: {swapped} of 500 pairs are swapped, not half of them"
    batch = single.batch(range(4))
    assert not batch.segments.any() and (batch.pair_labels == data.IGNORED).all(), (
        "none: a batch has tokens of segment B, or labels of pairs")


def test_an_a_begins_and_ends_where_sentences_do(shards):
    dataset, inside, begins, cuts = data.PretrainingData(shards, 128), 0, 0, []
    for spans in dataset.spans(range(2000)):
        sentences = np.array(dataset.shard(spans.shard).sentences)
        end = spans.a_end + spans.b_end - spans.b
        possible = sentences[(sentences > spans.a) & (sentences < end)]
        inside += len(possible) and spans.a_end in sentences
        begins += spans.a in sentences
        if spans.pair_label == 0 and len(possible) > 1:
            cuts.append([spans.a_end == possible[0], spans.a_end == possible[-1]])
    assert inside > 1800 and begins > 1800
    first, last = np.mean(cuts, 0)
    assert 0.1 < first < 0.5 and 0.1 < last < 0.5


@pytest.mark.parametrize("seq_len", [64, 128])
def test_swapped_texts_end_where_others_do(shards, seq_len):
    dataset = data.PretrainingData(shards, seq_len, pairs="sop")
    spans = columns(dataset, range(0, 32000, 4))
    a_ends, b_ends = np.isin([spans.a_end, spans.b_end], dataset.shard(0).sentences)
    ends = []
    for label in 0, 1:
        own = spans.pair_label == label
        ends.append([a_ends[own].mean(), b_ends[own].mean()])
    assert np.abs(np.diff(ends, axis=0)).max() < 0.05


@pytest.mark.parametrize("seq_len", [64, 128])
def test_a_b_from_elsewhere_looks_like_a_true_one(shards, seq_len):
    dataset = data.PretrainingData(shards, seq_len)
    spans = columns(dataset, range(0, 64000, 4))             # of shard 0
    _, sentences, documents, windows = map(np.array, dataset.shard(0))
    uses, looks = np.diff(windows), []
    features = ("begins with a sentence in {:.1%} of the pairs", "fills {:.1%} of an example",
                "is of a long document in {:.1%}", "begins its document in {:.1%}",
                "ends with a sentence in {:.1%}")
    for label in 0, 1:
        own = spans.pair_label == label
        a, b, end = spans.a[own], spans.b[own], spans.b_end[own]
        home = np.searchsorted(documents, b, "right") - 1
        looks.append([np.isin(b, sentences).mean(), (end - b).mean() / seq_len,
                      (uses[home] > np.median(uses)).mean(), np.isin(b, documents).mean(),
                      np.isin(end, sentences).mean()])
    # Ends are not quite alike: a B from elsewhere ends where it is full, or with its document
    for feature, true, other, most in zip(features, *looks, (0.025, 0.035, 0.035, 0.02, 0.15)):
        assert abs(true - other) < most, (
            f"a true B {feature.format(true)}, one from elsewhere {feature.format(other)}: a model "
            "can tell them apart without reading")
    gaps = (home - np.searchsorted(documents, a, "right") + 1) % len(uses)       # from A's document
    counts = np.bincount(gaps, minlength=len(uses)) / len(gaps) * len(uses)
    assert counts[0] == 0, f"{np.mean(gaps == 0):.1%} of the false B are of A's own document"
    assert counts[1:].min() > 0.3 and counts.max() < 2, (
        f"of {len(uses)} documents one gives {counts.max():.1f} times as many B as the mean, and "
        f"one {counts[1:].min():.1f} times")


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks_are_15_percent_and_80_10_10(shards, whole_words):
    dataset = data.PretrainingData(shards, 64, whole_words=whole_words)
    chosen = masked = kept = words = 0
    where = np.zeros(64)
    for i in range(3000):
        e = dataset[i]
        m, text = len(e.labels), len(e.tokens) - 3
        more = data.LONGEST_WORD - 1 if whole_words else 0             # of the last word
        assert max(1, math.floor(0.15 * text)) <= m <= math.ceil(0.15 * text) + more
        assert m and (np.diff(e.masked_positions) > 0).all()
        assert not np.isin(e.labels, [data.PAD, data.CLS, data.SEP, data.MASK]).any()
        assert e.tokens.max() < 320
        found = e.tokens[e.masked_positions]
        chosen, words = chosen + m, words + text
        masked, kept = masked + (found == data.MASK).sum(), kept + (found == e.labels).sum()
        where[e.masked_positions] += 1
    assert -0.003 < chosen / words - 0.15 < (0.02 if whole_words else 0.003)
    assert near(masked, chosen, 0.8) and near(kept, chosen, 0.1 + 0.1 / 315)
    assert where[0] == 0 and where[1:60].min() > 0.5 * where[1:60].mean()


@pytest.mark.parametrize("whole_words", [False, True])
def test_the_masks_of_an_array(shards, whole_words):
    """`mask` alone, on random text in rows of many lengths."""
    dataset, count = data.PretrainingData(shards, 64, whole_words=whole_words), 2000
    rng, rows = np.random.default_rng(SEED), np.arange(count)
    ends, indices = rng.integers(4, 65, count), rng.permutation(count)     # from 1 token of text
    before = rng.integers(len(data.SPECIALS), 320, (count, 64))
    before[np.arange(64) >= ends[:, None]] = data.PAD
    before[:, 0], before[rows, ends // 2], before[rows, ends - 1] = data.CLS, data.SEP, data.SEP
    after, text = before.copy(), before >= len(data.SPECIALS)
    cells = dataset.mask(after, indices)
    chosen = cells != data.IGNORED
    labels = cells[chosen]
    assert same(before[chosen], labels), "a label is not the token that stood there"
    assert same(after[~chosen], before[~chosen]), "a token changed that has no label"
    counts, sizes = chosen.sum(1), text.sum(1)
    worst = (counts - sizes).argmax()
    assert counts[worst] <= sizes[worst], (
        f"{counts[worst]} tokens were chosen where the text has {sizes[worst]}: [CLS], [SEP] and "
        "padding are no text")
    assert text[chosen].all(), "[CLS], [SEP] or padding was chosen, which is no text"
    none = np.flatnonzero(~chosen.any(1))
    assert len(none) == 0, (
        f"in a text of {sizes[none].min()} token(s) none was chosen: at least one must be, "
        "however short it is")
    assert not same(after, before), (
        "labels are returned, but no token has changed: `tokens` itself must change, not a copy")
    due = np.maximum(0.15 * sizes, 1)
    share = (counts - due).sum() / sizes.sum()
    assert -0.003 < share < (0.02 if whole_words else 0.003), (
        f"{counts.sum() / sizes.sum():.1%} of the tokens of text were chosen, not "
        f"{due.sum() / sizes.sum():.1%}, which is 15 % with at least one in each text")
    for what, found, wanted in (("became [MASK]", after[chosen] == data.MASK, 0.8),
                                ("stayed", after[chosen] == labels, 0.1 + 0.1 / 315)):
        assert near(found.sum(), len(labels), wanted), (
            f"{found.mean():.1%} of the chosen tokens {what}, not {wanted:.1%}")
    assert np.isin(after[chosen], [*range(len(data.SPECIALS), 320), data.MASK]).all(), (
        "a random token is one of SPECIALS, or is none of the vocabulary")
    if whole_words:
        starts = dataset.word_starts(before, text)
        assert same(chosen, np.take_along_axis(chosen, starts, 1)), "a word was chosen in part"
    else:
        worst = np.abs(counts - due).argmax()
        assert abs(counts[worst] - due[worst]) < 1, (
            f"of {sizes[worst]} tokens {counts[worst]} were chosen, not {due[worst]:.2f} "
            "rounded up or down")
        for size in range(20, 50):
            found = set(counts[sizes == size].tolist())
            assert len(found) == 2 or not 0.3 < 0.15 * size % 1 < 0.7, (
                f"of {size} tokens always {found} were chosen: 15 % are {0.15 * size:.2f}, so it "
                "is sometimes one more, by chance")
    replacements = after[(after != before) & (after != data.MASK)]
    assert replacements.min() < 40 and replacements.max() > 285, (
        f"random tokens are only of {replacements.min()} to {replacements.max()}, not of 5 to 319: "
        "are they drawn with the number that decided that they are random?")
    some = np.flatnonzero(ends <= 60)[[1, 0]]          # as in another batch, of shorter examples
    alone = before[some, :60]
    assert same(dataset.mask(alone, indices[some]), cells[some, :60]), (
        "in another batch other tokens of an example are chosen: masks depend on its neighbours, "
        "its place or the width")
    assert same(alone, after[some, :60]), "in another batch other random tokens are taken"


def test_a_word_of_many_tokens_counts_as_several(shards):
    dataset = data.PretrainingData(shards, 32, whole_words=True)
    begins = [*dataset.begins_word]
    begin, inside = begins.index(True, data.MASK + 1), begins.index(False, data.MASK + 1)
    tokens = np.array([[data.CLS, begin, *[inside] * 18, begin, data.SEP]])
    starts = dataset.word_starts(tokens, tokens > data.MASK)
    assert starts[0, 1:-1].tolist() == [1] * 8 + [9] * 8 + [17] * 3 + [20]


def test_each_epoch_of_each_shard_has_an_order_of_its_own(shards):
    dataset = data.PretrainingData(shards, 32)
    dataset.shards = dict.fromkeys((0, 1), data.Shard(None, None, None, [100]))   # equal windows
    orders = [dataset.order(s, epoch).tolist() for s in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == [*range(100)] for order in orders)
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("spaces", [True, False])
def test_whole_words_are_masked_whole(shards, spaces):
    dataset, several = data.PretrainingData(shards, 64, whole_words=True, mask_fraction=0.2), 0
    begins = dataset.begins_word
    begins &= spaces                        # else each segment is one word, cut at LONGEST_WORD
    for i in range(500):
        example = dataset[i]
        picked = np.isin(np.arange(len(example.tokens)), example.masked_positions)
        for segment, at in zip(unmasked(example), (1, example.b_start)):
            starts = [k for k in range(len(segment)) if k == 0 or begins[segment[k]]]
            for first, end in zip(starts, [*starts[1:], len(segment)]):
                for k in range(first, end, data.LONGEST_WORD):
                    word = picked[at + k:at + min(k + data.LONGEST_WORD, end)]
                    assert word.all() or not word.any()
                    several += len(word) > 1 and word[0]
    assert several > 200


def test_ten_percent_are_short(shards):
    lengths = data.PretrainingData(shards, 16).lengths(range(4000))
    assert 0.80 < (lengths == 16).mean() < 0.93       # others end with their document


@pytest.mark.parametrize("options", OPTIONS)
def test_an_example_is_the_same_alone_and_in_any_batch(shards, options):
    """Also after any other and in any order; its length without making it."""
    dataset = data.PretrainingData(shards, 45, 1, seed=5, **options)
    rng = np.random.default_rng(0)
    indices = (rng.permutation(600) * rng.integers(1, 5000)).tolist()     # also far epochs
    alone = {i: dataset[i] for i in indices}
    assert dataset.lengths(indices).tolist() == [len(alone[i].tokens) for i in indices]
    fresh = data.PretrainingData(shards, 45, 1, seed=5, **options)
    for part in np.array_split(np.sort(indices), 37):
        batch, at = fresh.batch(part.tolist()), 0
        part = sorted(part.tolist(), key=lambda i: len(alone[i].tokens))
        ends = np.cumsum([len(alone[i].tokens) for i in part])
        assert batch.bounds.tolist() == [0, *ends, len(batch.tokens)]
        assert same(batch.lengths, np.diff(batch.bounds))
        for b, i in enumerate(part):
            e, rows = alone[i], slice(*batch.bounds[b:b + 2])
            assert same(batch.tokens[rows], e.tokens)
            assert batch.positions[rows].tolist() == [*range(len(e.tokens))]
            assert same(batch.segments[rows], np.arange(len(e.tokens)) >= e.b_start)
            span = slice(at, at := at + len(e.labels))
            assert same(batch.masked_positions[span] - batch.bounds[b], e.masked_positions)
            assert same(batch.labels[span], e.labels) and batch.pair_labels[b] == e.pair_label
        assert len(batch.tokens) % 64 == 0 and 0 <= batch.lengths[-1] < 64
        assert len(batch.labels) % 16 == 0 and 0 <= len(batch.labels) - at < 16
        assert (batch.labels[at:] == data.IGNORED).all() and not batch.masked_positions[at:].any()


def test_seed_and_phase_change_everything(shards):
    def examples(phase, seed):
        dataset = data.PretrainingData(shards, 32, phase, seed)
        return [tuple(map(str, dataset[i])) for i in range(200)]
    first = examples(0, 1)
    assert first == examples(0, 1)
    for other in examples(0, 2), examples(1, 1), examples(1, 0):
        assert sum(a == b for a, b in zip(first, other)) < 3
    orders = [tuple(data.PretrainingData(shards, 32, phase, seed).order(0, 0))
              for phase, seed in ((0, 1), (0, 2), (1, 1), (1, 0))]
    assert len({*orders}) == 4


def test_no_random_number_is_used_twice(shards, monkeypatch):
    drawn, uniform = [], data.uniform
    monkeypatch.setattr(data, "uniform", lambda counters, key: (
        drawn.append((key, counters)) or uniform(counters, key)))
    data.PretrainingData(shards, 32).batch(range(100))
    assert len({key for key, _ in drawn}) == len(drawn) == 4
    assert all(len(np.unique(counters)) == np.size(counters) for _, counters in drawn)


def test_an_epoch_takes_every_window_of_its_shard_and_the_next_differently(shards):
    dataset = data.PretrainingData(shards, 32)
    for s in range(4):
        _, _, documents, windows = dataset.shard(s)
        count, uses = windows[-1], np.diff(windows)         # uses of each document in an epoch
        first, second = dataset.order(s, 0).tolist(), dataset.order(s, 1).tolist()
        assert sorted(first) == sorted(second) == list(range(count)) and first != second
        starts = columns(dataset, range(s, s + 8 * count, 4)).a             # in two epochs
        used = np.searchsorted(documents, starts, "right") - 1
        assert (np.bincount(used[:count], minlength=len(uses)) == uses).all()
        # Neither in the order of the file nor twice in one order
        assert (np.diff(used[:count]) < 0).mean() > 0.4
        assert (used[:count] == used[count:]).mean() < 0.1
        assert (np.bincount(used[count:], minlength=len(uses)) == uses).all()


@pytest.mark.parametrize("seq_len", [16, 100])
def test_windows_reach_every_end_and_nearly_every_token(shards, seq_len, monkeypatch):
    monkeypatch.setattr(data, "SHORT_FRACTION", 0)
    dataset = data.PretrainingData(shards, seq_len, pairs="none")
    tokens, _, documents, windows = dataset.shard(0)
    seen = np.zeros(len(tokens))                             # how often, in five epochs
    for epoch in range(5):
        first = 4 * epoch * windows[-1]
        for spans in dataset.spans(range(first, first + 4 * windows[-1], 4)):
            assert 0 < spans.a_end - spans.a <= dataset.window_size
            seen[spans.a:spans.a_end] += 1
        assert seen[np.array(documents)[1:] - 1].all()
        assert (seen > 0).mean() > (0.92, 0.98, 0.99, 0.99, 0.99)[epoch]
    ends = [[seen[first:first + size // 5].mean(), seen[first:first + size][-(size // 5):].mean()]
            for first, size, uses in zip(documents, np.diff(documents), np.diff(windows))
            if uses > 1]
    begin, end = np.mean(ends, 0)
    assert begin > 0.8 * 5 and end < 1.6 * begin


def test_documents_of_one_sentence_or_one_long_line_make_true_pairs(tmp_path):
    documents = [document.split("\n")[0] for document in make_documents(300)]
    documents[0] = " ".join(make_documents(100)).replace("\n", " ")
    data.prepare(documents, tmp_path / "out", 300, 1, split="lines")
    dataset = data.PretrainingData(tmp_path / "out", 64)
    count = dataset.shard(0).windows[-1]
    starts = {tuple(unmasked(dataset[i])[0][:8]) for i in range(count)}
    assert all(len(part) for i in range(count) for part in unmasked(dataset[i]))
    assert len(starts) > 0.9 * count


# Dealing and workers

@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("balance", [False, True])
def test_a_step_has_the_same_examples_on_any_number_of_ranks(shards, size, balance):
    lengths = data.PretrainingData(shards, 32).lengths if balance else None
    for step in (0, 2, 5):
        ranks = [data.micro_batches(step, 33, 4, rank, size, lengths) for rank in range(size)]
        dealt = [sum(parts, []) for parts in ranks]
        assert sorted(sum(dealt, [])) == list(range(33 * step, 33 * step + 33)), (
            f"step {step} of {size} ranks does not have each of its 33 examples once")
        counts = [len(own) for own in dealt]
        assert max(counts) - min(counts) <= 1, f"the ranks of a step have {counts} examples"
        sizes = [[len(part) for part in parts] for parts in ranks]
        assert all(k == 4 for own in sizes for k in own[:-1]), (
            f"micro-batches of 4, but for a rank's last one: the ranks have {sizes}")
        assert balance or all(i % size == rank for rank, own in enumerate(dealt) for i in own), (
            f"of {size} ranks number r takes the examples that are r modulo {size}")
    found = data.micro_batches(0, 8, 2, 1, 2)
    assert found == [[1, 3], [5, 7]], f"rank 1 of 2 has {found} of 8 examples, 2 at a time"


@pytest.mark.parametrize("size", [4, 3])
def test_balance_evens_ranks_and_joins_equal_lengths(shards, size):
    dataset = data.PretrainingData(shards, 512)

    def work(lengths):
        """The padding that rectangles would have, and the largest ratio of a rank's tokens to
        the mean."""
        tokens, slots = np.zeros((3, size)), 0
        for step in range(3):
            for rank in range(size):
                parts = data.micro_batches(step, 256, 4, rank, size, lengths)
                longest = [dataset.lengths(part) for part in parts]
                tokens[step, rank] = sum(part.sum() for part in longest)
                slots += sum(len(part) * part.max() for part in longest)
                if lengths:
                    assert longest[-1].max() == max(part.max() for part in longest), (
                        "the longest example of a rank is not in its last micro-batch")
        return 1 - tokens.sum() / slots, (tokens.max(1) / tokens.mean(1)).max()

    (padding, _), (balanced, imbalance) = work(None), work(dataset.lengths)
    assert balanced < padding / 3, (
        f"by length, rectangles would be padded by {balanced:.1%}, as dealt by {padding:.1%}: a "
        "micro-batch does not have examples of one length")
    assert imbalance < 1.004, (
        f"the busiest of {size} ranks has {imbalance:.3f} times the mean of tokens: is each round "
        "of the snake dealt from the other end than the one before?")


def test_workers_give_the_same_batches_as_none(shards):
    dataset = data.PretrainingData(shards, 32, 1, seed=5)
    deal = functools.partial(data.micro_batches, global_batch=17, micro_batch=8, rank=1, size=2,
                             lengths=dataset.lengths)
    steps = [deal(step) for step in range(6)]
    expected = [[dataset.batch(indices) for indices in step] for step in steps]
    for found in (data.loader(dataset, list, steps, 0), data.loader(dataset, list, iter(steps), 2),
                  data.loader(dataset, deal, range(6), 1)):
        for ours, theirs in zip(found, expected, strict=True):
            assert len(ours) == len(theirs) and all(map(same, ours, theirs))


def test_a_batch_becomes_tensors_as_it_is(shards):
    batch = data.PretrainingData(shards, 32).batch(range(5))
    moved = batch.to("cpu")
    assert same(batch, moved) and all(isinstance(field, torch.Tensor) for field in moved)
    assert [str(field.dtype) for field in moved] == [f"torch.{field.dtype}" for field in batch]
    elsewhere = batch.to("meta")
    devices = {name: field.device.type for name, field in elsewhere._asdict().items()}
    assert devices.pop("lengths") == "cpu" and set(devices.values()) == {"meta"}


@pytest.mark.gpu
def test_a_batch_on_a_gpu_is_the_same(shards):
    batch = data.PretrainingData(shards, 32).batch(range(5))
    moved = batch.to("cuda")
    assert moved.tokens.is_cuda and not moved.lengths.is_cuda
    assert same(batch, [field.cpu() for field in moved])


@pytest.mark.parametrize("function,item,kind,message,note", [
    (os._exit, 1, data.DataError, "^a worker process died: no memory .set --workers lower", ""),
    (open, "/nowhere", FileNotFoundError, "'/nowhere'$", "in work"),
    (int, "x", ValueError, "invalid literal", "in work")])      # a bug: where it is
def test_what_fails_in_a_worker_is_said(function, item, kind, message, note):
    with pytest.raises(kind, match=message) as caught:
        list(data.in_workers(function, [item], 1))
    assert note in "".join(getattr(caught.value, "__notes__", []))


def test_items_are_read_one_a_worker_ahead_and_come_in_order():
    read = []
    items = (read.append(k) or -k for k in range(9))
    results = data.in_workers(abs, items, 2)
    assert not read and next(results) == 0 and read == [0, 1, 2]
    assert list(results) == [*range(1, 9)] and list(data.in_workers(abs, [-1], 3)) == [1]


def test_what_fails_in_reading_items_is_raised_as_it_is():
    def items():
        yield 1
        raise OSError("of the items")
    with pytest.raises(OSError, match="of the items"):
        list(data.in_workers(abs, items(), 1))
    for process in multiprocessing.active_children():        # the worker has ended
        process.join(5)
        assert not process.is_alive()


def die_amid_a_message(size):
    """Ends the worker after half a second: `size` numbers do not fit into its pipe till then."""
    threading.Timer(0.5, os._exit, [1]).start()
    return np.zeros(size)


def test_a_worker_that_dies_amid_a_message_is_said():
    results = data.in_workers(die_amid_a_message, [0, 10**7], 1)
    next(results)
    time.sleep(1)                        # nobody reads the second one
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("reads for ever"))
    signal.alarm(10)
    try:
        with pytest.raises(data.DataError, match="a worker process died"):
            next(results)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


LOOP = """
import multiprocessing, os, signal, sys, time
import data

def loop(then):
    steps = ([[i, i + 1]] for i in range(10**9))
    dataset = data.PretrainingData(sys.argv[1], 32)
    loader = data.loader(dataset, list, steps, 2)                              # alive to the end
    for number, batches in enumerate(loader):
        if number == 20:
            print(*(p.pid for p in multiprocessing.active_children()), flush=True)
            then()
        if number == 60:
            raise RuntimeError("after 40 more steps")

def terminate():
    for signum in signal.SIGTERM, signal.SIGHUP:
        signal.signal(signum, lambda *_: None)
        os.killpg(0, signum)
    time.sleep(0.5)

if __name__ == "__main__":
    {program}
"""
# Two programs. In the first: signals that go on, an exception that is caught, then Ctrl-C
FIRST = """try:
        loop(terminate)
    except RuntimeError as error:
        print(error, flush=True)
    while multiprocessing.active_children():
        time.sleep(0.05)
    loop(lambda: os.killpg(0, signal.SIGINT))"""
ENDS = [(FIRST, -signal.SIGINT, "KeyboardInterrupt"),
        ("loop(lambda: os.kill(os.getpid(), signal.SIGKILL))", -signal.SIGKILL, "")]


def test_workers_end_with_their_loop_and_not_before(shards, tmp_path):
    processes = []
    left = tmp_path / "left"                                 # for what a killed program leaves
    left.mkdir()
    for k, (program, _, _) in enumerate(ENDS):               # both at once, which takes less time
        (tmp_path / f"{k}.py").write_text(LOOP.format(program=program))
        processes.append(subprocess.Popen(
            [sys.executable, tmp_path / f"{k}.py", shards], stdout=subprocess.PIPE, text=True,
            stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(left)}))
    try:
        for process, (program, status, says) in zip(processes, ENDS):
            workers = process.stdout.readline().split()
            out, said = process.communicate(timeout=60)      # until the last worker has ended, too
            assert len(workers) == 2 and process.returncode == status and says in said
            rest = out.splitlines()
            assert (rest[:1] == ["after 40 more steps"] and len(rest) == 2) == (program == FIRST)
        assert not list(left.iterdir())
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# Sentences

SENTENCES = """
One.| Two!| Three?| Four.
Dr. Smith met Mr. J. R. Jones at 3.5 p.m. on Monday.
He met Mr. and Mrs. Smith.| They talked.
Use a list, e.g. Python's own.| It grows, i.e. CPython allocates more.
Use one (e.g. Python).| It works.
He said "Stop."| Then he left.
“Why not?”| She had no answer.
(He was late.)| [It rained.]| So we went in.
See Fig. 3 and No. 5, pp. 7 and Vol. 123.| The answer is no.| Then he left.
We used lists, tuples, etc. and so on.| We used lists, etc.| The rest is easy.
Smith et al. Nature 2010 found it.| Others did not.
The value is 3.14 or 2.71.| Both are close to 3. 4 is far.
Er kam am 21. März 1999 in Wien an.| Am 3. Mai ging er.| Im Jahr 1999.| Danach kam nichts.
Est-ce vrai ?| Oui.| « Non. »
It costs $3.50.| Buy it at 5 p.m. Monday.
Version 2.0 is out (really!).| It works...
The U.S. Army left.| He lives there.
George W. Bush and W. E. B. Du Bois spoke.| They left.
Apple Inc. Chairman Jobs spoke.| The firm grew.
In Jan. 2001 it came.| It ended in May.| June was late.
Ph.D. students work.| St. Paul and Gen. Lee did.
Был дождь.| Потом он ушёл.
no end
""".strip().splitlines()


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences(text):
    assert data.split_sentences(f" {text.replace('|', '')} ") == text.split("| ")


# Cut by hand, a line a sentence. Chinese and Japanese stand without spaces between sentences.
LANGUAGES = {
    "German": (" ", """
Johann Sebastian Bach wurde am 21. März 1685 in Eisenach geboren.
Er war das jüngste von acht Kindern.
Sein Vater, der Stadtpfeifer J. A. Bach, starb am 20. Februar 1695.
„Wohin soll ich gehen?“
Mit 15 Jahren kam er nach Lüneburg!
Dort sang er z. B. im Chor der Michaelisschule.
Im 18. Jahrhundert galt er als Meister der Orgel.
Er starb am 28. Juli 1750 in Leipzig."""),
    "Chinese": ("", """
李白字太白，号青莲居士。
他是唐代伟大的诗人！
你读过他的诗吗？
“床前明月光。”
这是他的名句。
「真的吗？」
他死于762年。"""),
    "Japanese": ("", """
夏目漱石は日本の小説家である。
「吾輩は猫である。」
これは彼の最初の小説だ！
あなたは読みましたか？
彼は1916年に亡くなった。"""),
    "Hindi": (" ", """
दिल्ली भारत की राजधानी है।
यह यमुना नदी के किनारे बसी है।
क्या आप वहाँ गए हैं?
लाल किला यहीं है।
यह नगर बहुत पुराना है।"""),
    "Arabic": (" ", """
القاهرة عاصمة مصر.
هل زرت القاهرة؟
تقع المدينة على نهر النيل.
إنها مدينة كبيرة!
يعيش فيها ملايين الناس."""),
    "Korean": (" ", """
세종은 조선의 왕이었다.
그는 한글을 만들었다!
당신은 읽을 수 있습니까?
많은 사람이 그를 기억한다."""),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_of_other_languages(language):
    space, lines = LANGUAGES[language]
    sentences = lines.strip().splitlines()
    assert data.split_sentences(space.join(sentences)) == sentences


@pytest.mark.parametrize("language,pieces", [("German", 110), ("Chinese", 53)])
def test_text_of_other_languages_goes_through_the_whole_program(language, pieces, tmp_path):
    space, lines = LANGUAGES[language]
    sentences = lines.strip().splitlines()
    rng = random.Random(0)
    documents = [space.join(rng.sample(sentences, 4)) for _ in range(150)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    shards = tmp_path / "shards"
    run = run_script(ROOT / "data.py", tmp_path / "text.txt", "--out", shards, "--sentences",
                     "prose", "--cased", "--vocab-size", pieces, "--shards", 2)
    assert run.returncode == 0, run.stderr
    assert " 600 sentences" in run.stdout and " 0.00% [UNK]" in run.stdout
    run = run_script(ROOT / "train.py", "--data", shards, "--out", tmp_path / "out", "--steps", 2,
                     1, "--batch", 4, "--precision", "fp32", "--workers", 0, "--pairs", "none")
    assert run.returncode == 0 and "Done after step 3 of 3" in run.stdout, run.stderr
    masked = sentences[0].replace("Sebastian", "[MASK]").replace("太白", "[MASK]")
    run = run_script(ROOT / "bert.py", tmp_path / "out" / "model", masked)
    assert run.returncode == 0 and run.stdout.count("%") == 5, run.stderr


# ----- From a dump of Wikipedia -----

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">
<siteinfo>
<sitename>Wikipedia</sitename>
<base>https://en.wikipedia.org/wiki/Main_Page</base>
<namespaces>
<namespace key="0" />
<namespace key="10">Template</namespace>
</namespaces>
</siteinfo>
"""
PAGE = """<page>
<title>Page {i}</title>
<ns>0</ns>
<id>{i}</id>
<revision>
<id>{i}</id>
<text xml:space="preserve">'''Page {i}''' is a [[page]] of the {{{{test}}}} dump. {words}.

== History ==
It was written in {year}. It has two paragraphs.</text>
</revision>
</page>
"""


def test_wikiextractor_makes_files_that_are_read(tmp_path, documents):
    pytest.importorskip("wikiextractor", reason="wikiextractor is not installed")
    pages = [PAGE.format(i=i, year=1900 + i, words=document.split("\n")[0].rstrip("."))
             for i, document in enumerate(documents[:60], 1)]
    with bz2.open(tmp_path / "dump.xml.bz2", "wt") as file:
        file.write(DUMP + "".join(pages) + "</mediawiki>\n")
    with pytest.raises(data.DataError, match="wikiextractor --json"):
        list(data.open_corpus([tmp_path / "dump.xml.bz2"]))
    subprocess.run([sys.executable, "-m", "wikiextractor.WikiExtractor", "dump.xml.bz2", "--json",
                    "-o", "wiki"], cwd=tmp_path, check=True, capture_output=True)
    found = list(data.open_corpus([tmp_path / "wiki"]))
    assert len(found) >= 60
    text = "\n".join(found)
    assert "Page 7 is a page of the" in text and "[[" not in text and "written in 1907" in text
    manifest = data.prepare(found, tmp_path / "shards", vocab_size=200, shards=2)
    assert manifest["prose"] and manifest["train"]["documents"] > 20


def test_datasets_make_json_that_is_read(tmp_path, documents):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    columns = {"id": [str(i) for i in range(len(documents))], "text": documents}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    read = datasets.load_dataset("parquet", data_files=str(tmp_path / "train.parquet"),
                                 split="train", cache_dir=str(tmp_path / "cache"))
    read.to_json(tmp_path / "wiki.jsonl")
    assert list(data.open_corpus([tmp_path / "wiki.jsonl"])) == documents


def test_prose_and_lines_are_told_apart(documents):
    wrapped, paragraphs, halves = [], [], []
    for document in documents:
        words = document.split()
        wrapped.append("\n".join(" ".join(words[i:i + 9]) for i in range(0, len(words), 9)))
        paragraphs.append(" ".join(words))
        halves.append("\n".join(s.replace(" ", "\n", 3).replace("\n", " ", 2)
                                for s in document.split("\n")))
    assert not data.is_prose(documents)
    for prose in wrapped, paragraphs, halves:
        assert data.is_prose(prose)
        for document, text in zip(documents, prose):
            assert data.sentences_in(text, True) == document.split("\n")
    assert data.sentences_in("One. Two.\nThree.", False) == ["One. Two.", "Three."]
    # A fourth of the lines; the blank ones between documents do not count
    assert data.is_prose(["One two. Three four."] * 25 + ["One two three."] * 75)


def test_the_default_corpus_is_english_prose():
    documents = data.open_corpus([])
    sentences = [sentence for document in documents for sentence in document.split("\n")]
    assert len(documents) > 3000 and len(set(sentences)) == len(sentences)
    assert not any(">>>" in s or "::" in s or "|" in s for s in sentences)
    assert sum(" the " in s.lower() for s in sentences) > 0.4 * len(sentences)
    assert not data.is_prose(documents)


# Files

FORMS = {
    "a.txt": lambda text, records: text.encode(),
    "windows.txt": lambda text, records: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    "spaces.txt": lambda text, records: (" \n\t\n" + text.replace("\n", " \n")).encode(),
    "a.jsonl": lambda text, records: records.encode(),
    "a.txt.gz": lambda text, records: gzip.compress(text.encode()),
    "a.jsonl.gz": lambda text, records: gzip.compress(records.encode()),
    "a.txt.bz2": lambda text, records: bz2.compress(text.encode()),
    "a.txt.xz": lambda text, records: lzma.compress(text.encode())}


def test_all_forms_of_a_text_are_the_same_corpus(documents, shards, tmp_path):
    records = "".join(json.dumps({"id": 1, "text": f"\n{d}\n\n", "title": "x"}) + "\n"
                      for d in [*documents, ""])
    for name, form in FORMS.items():
        (tmp_path / name).write_bytes(form("\n\n".join(documents), records))
        assert list(data.open_corpus([tmp_path / name])) == documents, name
    data.prepare(data.open_corpus([tmp_path / "a.jsonl.gz"]), tmp_path / "out", 320, 4)
    assert files_of(tmp_path / "out") == files_of(shards)


def test_a_folder_of_files_as_a_user_prepares_it(documents, tmp_path):
    for k, name in enumerate(["AA/wiki_00", "AA/wiki_01.gz", "BB/wiki_00"]):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"text": d}) + "\n" for d in documents[k::3]).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (tmp_path / "text" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "text" / ".git").mkdir()
    (tmp_path / "text" / ".git" / "config").write_bytes(b"\xff")
    (tmp_path / "text" / "loop").symlink_to(".")
    expected = documents[0::3] + documents[1::3] + documents[2::3]
    assert list(data.open_corpus([tmp_path / "text"])) == expected
    run = run_script(ROOT / "data.py", tmp_path / "text", "--vocab-size", 320, "--workers",
                     2, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    out = tmp_path / "shards" / "text"
    assert "400 documents" in run.stdout and run.stdout.count("[CLS]") == 3
    assert data.show(out) in run.stdout
    data.prepare(expected, tmp_path / "alone", 320, workers=0)
    assert files_of(tmp_path / "alone") == files_of(out)         # the same without workers


def main(monkeypatch, *arguments):
    """What the program, called in this process, ends with."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        data.main()
    return caught.value.code


def test_flags(shards, documents, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:133]))
    model, files = shards / "tokenizer.model", sorted(tmp_path.iterdir())
    run = functools.partial(main, monkeypatch, tmp_path / "a.txt", "--out", tmp_path / "out")
    assert "is not a tokenizer.model" in run("--tokenizer", tmp_path / "a.txt")
    for flags in ("--shards 0", "--shards x", "--workers -1", "--vocab-size 15"):
        capsys.readouterr()
        assert run(*flags.split()) == 2
        said = capsys.readouterr().err
        assert said.startswith("data.py: argument --") and said.count("\n") == 1
    said = run("--tokenizer", model, "--shards", 300)
    assert "too few for 300 shards (a shard needs two, and " in said and "held out): part" in said
    said = run("--vocab-size", 20)
    assert said.startswith("data.py: --vocab-size 20: ") and "Increase vocab_size" in said
    assert main(monkeypatch, tmp_path / "b.txt", "--out", tmp_path / "out").startswith(
        f"data.py: {tmp_path}/b.txt is no file or folder")
    assert main(monkeypatch, "--show", tmp_path).startswith(
        f"data.py: {tmp_path}/manifest.json is missing")
    assert sorted(tmp_path.iterdir()) == files
    corpus = data.open_corpus([tmp_path / "a.txt"])
    data.prepare(corpus, tmp_path / "out", shards=2, tokenizer=model, held_out=0.5)
    manifest = data.load_manifest(tmp_path / "out")
    assert 40 < manifest["heldout"]["documents"] < 90 and manifest["vocab_size"] == 320
    assert "133 documents" in data.describe(manifest)


@pytest.mark.parametrize("flags", [[], ["--cased", "--sentences", "prose"]])
def test_flags_reach_the_shards(documents, tmp_path, monkeypatch, capsys, flags):
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    monkeypatch.setattr(sys, "argv", [*map(str, (
        "data.py", tmp_path / "a.txt", "--out", tmp_path / "out", "--vocab-size", 320, *flags))])
    data.main()
    assert capsys.readouterr().out.endswith(f"{tmp_path}/out is ready\n")
    manifest = data.load_manifest(tmp_path / "out")
    assert manifest["cased"] == manifest["prose"] == bool(flags)
    encode = data.load_tokenizer(tmp_path / "out" / "tokenizer.model").encode
    assert (encode("School") != encode("school")) == bool(flags)


def test_default_folders():
    for paths, name in (([], "docs"), (["a/my.txt"], "my"), (["docs.txt"], "corpus"),
                        (["wiki-2.json.gz", "b"], "wiki-2"), ([".."], "corpus")):
        assert data.default_folder(paths).as_posix() == f"shards/{name}"


BAD = {
    "empty.txt": (b"", "no text in the corpus"),
    "few.txt": (b"One.\n\nTwo.\n", "--vocab-size 320: Vocabulary size too high"),
    "latin1.txt": (b"Un caf\xc3\xa9.\nUn caf\xe9.\n", "line 2: UnicodeDecodeError.*UTF-8"),
    "cut.txt.gz": (gzip.compress(b"word " * 9999)[:-9], "EOFError"),
    "no.txt.gz": (b"plain text", "BadGzipFile"),
    "no.txt.xz": (b"plain text", "LZMAError"),
    "no.txt.bz2": (b"plain text", "OSError"),
    "title.jsonl": (b'{"text": "One."}\n{"title": "x"}\n', "line 2: KeyError: 'text'"),
    "number.jsonl": (b'{"text": "One."}\n{"text": 5}\n', "line 2: .*`text`"),
    "list.jsonl": (b'{"text": "One."}\n[]\n', "line 2: .*`text`"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200000, "line 1: .*`text`"),
    "pretty.json": (b'{\n  "text": "One."\n}\n', "line 1: .*`text`"),
    "array.json": (b' [{"text": "One."}]', "line 1: .*`text`"),
    "wiki_00": (b'\n<doc id="1">\nOne.\n</doc>\n', "line 2: .*HTML or XML.*--json"),
    "dump.xml": (b'<mediawiki xmlns="x">\n<page>\n', "line 1: .*--json"),
    "page.xml": (b"  <page>\n    <title>", "line 1: .*--json"),
    "page.html": (b"<!DOCTYPE html>\n<html>\n", "line 1: .*--json"),
}


def test_a_pipe_is_refused_by_name_and_passed_over_in_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "a.txt").write_text("One.")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/null"):
        with pytest.raises(data.DataError, match=f"{path} is no file or folder.*pipe"):
            data.open_corpus([tmp_path / "a.txt", path])
    assert list(data.open_corpus([tmp_path])) == ["One."]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.prepare(data.open_corpus([tmp_path / name]), tmp_path / "out", 320, 4)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_any_flipped_byte_in_an_archive_is_one_line(documents, tmp_path):
    for suffix, compress in (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress):
        good = compress("\n\n".join(documents).encode())
        for at in range(20, len(good), len(good) // 30):
            content = bytearray(good)
            content[at] ^= 0x55
            (tmp_path / f"a{suffix}").write_bytes(content)
            with contextlib.suppress(data.DataError):         # nothing else may come out
                assert list(data.open_corpus([tmp_path / f"a{suffix}"])) == documents


def test_texts_that_look_like_something_else(tmp_path):
    for text, expected in (('{"text": "One \\ud800 two."}\n\n{}'[:28], ["One ? two."]),
                           ("{{Infobox}} is text.\n{\\bf So} is this.", None),
                           ("\\documentclass{a}\n\nText.", ["\\documentclass{a}", "Text."])):
        (tmp_path / "a").write_text(text)
        assert list(data.open_corpus([tmp_path / "a"])) == (expected or [text])


def test_texts_that_begin_behind_a_dot_are_empty_or_long(tmp_path):
    (folder := tmp_path / ".cache" / "text").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": null}\n{"text": "One."}\n')
    (folder / "b.txt").write_text("Two three.\n" * 25_000)   # no blank line: 10,000 at a time
    first, *others = data.open_corpus([folder])
    assert first == "One." and [text.count("\n") + 1 for text in others] == [10_000, 10_000, 5_000]


def test_a_document_on_one_endless_line_is_cut_at_spaces(tmp_path):
    words = "The quick brown fox. " * 150000                    # 3 MB
    (tmp_path / "a").write_text(f"One two.\n\n{words}\n\nThree four.\n")
    first, *long, last = data.open_corpus([tmp_path / "a"])
    assert (first, last) == ("One two.", "Three four.") and " ".join(long) == words.strip()
    assert len(long) == 3 + 1 and max(map(len, long)) <= data.BLOCK
    sentences = data.sentences_in(long[0], False)
    assert " ".join(sentences) == long[0] and max(map(len, sentences)) <= data.LONGEST_SENTENCE
    assert "".join(data.cut_text("é" * 30000, 8192)) == "é" * 30000      # without a single space


# Tokenizer

def test_the_tokenizer_sees_all_parts_of_a_corpus(monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 1)                # a block is then a document
    corpus = [str(number) for number in range(1000)]
    identity, sample = data.survey(corpus)
    drawn = sorted(int(number) for number, in sample)
    assert identity["documents"] == 1000 and len(set(drawn)) == data.SAMPLE
    assert 300 < np.mean(drawn) < 700 and drawn != sorted(map(int, corpus[:data.SAMPLE]))


def test_the_tokenizer_sees_sentences_as_long_as_they_get():
    sentence = " ".join(["слово", "дело", "число"] * 600)[:data.LONGEST_SENTENCE]
    model = data.train_tokenizer(iter([sentence] * 3), 16)
    tokenizer = data.sentencepiece.SentencePieceProcessor(model_proto=model)
    assert len(sentence.encode()) > 12_000 and data.UNK not in tokenizer.encode("слово дело")


# Shards on disk

def test_shards_hold_every_document_once(documents, shards):
    manifest, found = data.load_manifest(shards), []
    assert manifest["corpus"]["documents"] == 400 and 60 < manifest["heldout"]["documents"] < 140
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    for name in data.shard_names(4):
        tokens, sentences, ends = (
            np.fromfile(shards / f"{name}.{array}", kind)
            for array, kind in zip(data.ARRAYS, (manifest["token_type"], np.int64, np.int64)))
        assert tokens.dtype == np.uint16 and sentences[-1] == ends[-1] == len(tokens)
        for first, last in zip(ends, ends[1:]):
            inside = sentences[(sentences >= first) & (sentences <= last)]
            found.append([tokens[a:b].tolist() for a, b in zip(inside, inside[1:])])
    assert sorted(found) == sorted(tokenizer.encode(d.split("\n")) for d in documents)
    unigrams = np.fromfile(shards / "unigrams", np.int64)
    assert unigrams.sum() == manifest["train"]["tokens"]
    assert np.allclose(data.unigram_losses(shards), -np.log((unigrams + 1) / (unigrams + 1).sum()))


@pytest.mark.parametrize("count, repeats, least, most", [
    (60, 2000, 2, 18), (200, 350, 25, 60), (60, 30, 5, 20)])
def test_half_a_megabyte_is_enough_to_hold_out(shards, tmp_path, count, repeats, least, most):
    """Of few long documents 8 in the mean; of 200 of 12 kB those of half a megabyte; of few short
    ones a fifth."""
    corpus = [f"Number {k} has many words in it. " * repeats for k in range(count)]
    manifest = data.prepare(corpus, tmp_path / "out", shards=2, split="prose",
                            tokenizer=shards / "tokenizer.model")
    assert manifest["heldout"]["documents"] in range(least, most)


class Letters:
    """A tokenizer of 100,000 tokens: letters in the upper end, nothing for a full stop."""

    def get_piece_size(self):
        return 100_000

    def encode(self, sentences, num_threads):
        return [[99_900 + ord(c) % 100 for c in s if c != "."] for s in sentences]


def test_large_vocabularies_take_32_bits_and_short_documents_are_left_out(tmp_path, monkeypatch):
    documents = [f"ab{k}\n.\ncd" for k in range(300)] + ["a", "."] * 50
    blocks = [documents[k:k + 7] for k in range(0, 400, 7)]
    settings = {"vocab_size": 100_000, "shards": 3, "corpus": {"documents": 400}}
    folders = []
    for group in (1, 4, 1000):                     # whatever is written at a time
        monkeypatch.setattr(data, "GROUP", group)
        (tmp_path / str(group)).mkdir()
        encoded = (data.encode(Letters(), False, 0.3, 3, block) for block in blocks)
        counts = data.write_shards(encoded, tmp_path / str(group), settings)
        folders.append(files_of(tmp_path / str(group)))
    assert folders[0] == folders[1] == folders[2] and counts["token_type"] == "uint32"
    assert counts["train"]["documents"] + counts["heldout"]["documents"] == 300
    assert counts["train"]["sentences"] == 2 * counts["train"]["documents"]
    tokens = np.frombuffer(folders[0]["train-00001.tokens"], np.uint32)
    assert tokens.min() > 99_900 - 1 and near(counts["heldout"]["documents"], 300, 0.3)


def test_no_text_can_spell_a_special_symbol(shards):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    assert [tokenizer.id_to_piece(i) for i in range(5)] == data.SPECIALS
    tokens = tokenizer.encode("a [MASK] and [CLS][SEP] [PAD] here")
    assert not {data.PAD, data.CLS, data.SEP, data.MASK} & set(tokens)


def test_a_folder_of_something_else_is_refused_and_kept(documents, shards, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    before = files_of(folder)
    assert data.prepare(documents, folder, 320, 4) == data.load_manifest(folder)  # nothing to do
    with pytest.raises(data.DataError, match="prepared otherwise .corpus, shards.; remove it"):
        data.prepare(documents[1:], folder, 320, 2)
    assert files_of(folder) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(data.DataError, match="manifest.json is missing.*prepare a new folder"):
        data.prepare(documents, tmp_path / "full", 320, 4)
    with pytest.raises(data.DataError, match="--vocab-size 30000: .* <= "):
        data.prepare(documents, tmp_path / "new", 30000, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "shards"]


def test_a_folder_that_comes_meanwhile_is_kept(documents, tmp_path, monkeypatch):
    def write_shards(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")
        return write(*arguments)
    write = data.write_shards
    monkeypatch.setattr(data, "write_shards", write_shards)
    with pytest.raises(data.DataError, match="manifest.json is missing"):
        data.prepare(documents, tmp_path / "out", 320, 4)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_links_to_a_folder_are_followed(documents, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    data.prepare(documents, tmp_path / "link", 320, 4)
    assert (tmp_path / "link").is_symlink() and data.verify(tmp_path / "disk")


@pytest.mark.parametrize("setting, change", [
    ("cased", {"cased": True}), ("held_out", {"held_out": 0.2}), ("prose", {"split": "prose"}),
    ("tokenizer", {"tokenizer": "tokenizer.model"}), ("vocab_size", {"vocab_size": 319}),
    ("corpus", {})])
def test_each_setting_that_differs_is_named(documents, shards, setting, change):
    if setting == "tokenizer":
        change = {setting: shards / change[setting]}
    if setting == "corpus":                                  # as many bytes of as many documents
        documents = [documents[0].swapcase(), *documents[1:]]
    with pytest.raises(data.DataError, match=f"prepared otherwise .{setting}.; remove it first"):
        data.prepare(documents, shards, **{"vocab_size": 320, "shards": 4} | change)


def test_an_empty_folder_is_filled(documents, shards, tmp_path):
    (tmp_path / "out").mkdir()
    text = [f"{document} \u6f22" for document in documents]
    manifest = data.prepare(text, tmp_path / "out", shards=4, tokenizer=shards / "tokenizer.model")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "other").mkdir()             # others may read what is prepared as any new folder
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert manifest["unknown_tokens"] == manifest["train"]["documents"]      # one in each
    assert manifest["corpus"]["bytes"] == sum(len(document.encode()) + 2 for document in text)


def test_a_shard_of_one_document_is_too_small(tmp_path):
    """The second part of a false pair has to come from another one."""
    part = dict(zip(data.ARRAYS, (array("I", [7, 8]), array("I", [2]), array("I", [2]))))
    block = {0: part, 1: part}
    with pytest.raises(data.DataError, match="1 documents are too few for 1 shards"):
        data.write_shards(iter([block]), tmp_path, {"shards": 1, "vocab_size": 320})


def test_what_is_told_of_shards(shards):
    counts = {"tokens": 900, "sentences": 90, "documents": 8}
    assert data.describe({
        "corpus": {"documents": 10, "bytes": 2_500_000}, "vocab_size": 1000, "unknown_tokens": 9,
        "shards": 4, "train": counts, "heldout": dict(zip(counts, (99, 10, 1)))}) == (
        "9 of 10 documents have two tokens or more; 2.5 MB; 100 sentences\n"
        "999 tokens, 111 a document, 1,000 pieces, 1.00% [UNK]; 4 shards, 1 documents held out")
    dataset, shown = data.PretrainingData(shards, 64, held_out=True), data.show(shards)
    examples = [dataset[i] for i in range(3)]
    said = re.findall(r"B follows A: (\w+)\n(.*)", shown)
    assert [follows for follows, _ in said] == [str(not e.pair_label) for e in examples]
    assert [text.count("[MASK]") for _, text in said] == [
        (e.tokens == data.MASK).sum() for e in examples]     # not as what stood there, as well


def test_two_processes_that_prepare_the_same_folder(documents, tmp_path):
    context = multiprocessing.get_context("forkserver")
    both = [context.Process(target=data.prepare, args=(documents, tmp_path / "out", 320, 4))
            for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    data.verify(tmp_path / "out")


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_damaged_file_is_named_to_the_ranks_that_read_it(shards, tmp_path, how):
    shutil.copytree(shards, tmp_path / "copy")
    data.verify(tmp_path / "copy")
    path = tmp_path / "copy" / "train-00002.tokens"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink() if how == "missing" else path.write_bytes(content)
    for rank, size in ((0, 1), (0, 2), (2, 4), (0, 3)):
        with pytest.raises(data.DataError) as caught:
            data.verify(tmp_path / "copy", rank, size)
        assert f"{path} is missing or damaged on {os.uname().nodename}" in str(caught.value)
        assert f"rank {rank} of {size}" in str(caught.value)
    data.verify(tmp_path / "copy", 1, 2)               # these ranks never read shard 2
    data.verify(tmp_path / "copy", 3, 4)
    with pytest.raises(data.DataError, match="train-00002.tokens"):
        data.verify(tmp_path / "copy", 3, 4, everything=True)


def test_a_manifest_is_as_it_was_written_or_refused(shards, tmp_path):
    manifest, path = data.load_manifest(shards), tmp_path / "manifest.json"
    content = (shards / "manifest.json").read_bytes()
    changed = [b"", b"{", b"[]", json.dumps(manifest | {"version": 3}).encode()]
    changed += [json.dumps({**manifest, key: value}).encode() for key in manifest
                for value in (None, 10 ** 9, "1", {}, -1) if value != manifest[key]]
    for bit in range(0, 8 * len(content), 11):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    refused = 0
    for content in changed:
        path.write_bytes(content)
        try:
            assert data.load_manifest(tmp_path) == manifest          # white space
        except data.DataError as error:
            refused += str(error).endswith("not of format 4; prepare a new folder")
    assert refused > 0.8 * len(changed)


def test_a_rank_needs_no_other_ranks_shards(shards, tmp_path):
    """Where the ranks divide the shards."""
    everything = data.PretrainingData(shards, 32)
    for path in shards.iterdir():
        if path.stem not in ("train-00000", "train-00002"):
            shutil.copy(path, tmp_path)
    part = data.PretrainingData(tmp_path, 32)
    for rank in 1, 3:
        data.verify(tmp_path, rank, 4)
        assert all(same(part[i], everything[i]) for i in range(rank, 100, 4))
    assert data.show(tmp_path) == data.show(shards)          # needs no training shard


def test_an_empty_tokenizer_is_refused_before_anything_is_prepared(documents, tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(data.DataError, match="is not a tokenizer.model that data.py has made"):
        data.prepare(documents, tmp_path / "out", tokenizer=tmp_path / "tokenizer.model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["/dev/zero", "../../etc/passwd"])
def test_a_manifest_names_no_files_of_others(shards, tmp_path, name):
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    manifest = data.load_manifest(folder)
    manifest["files"][name] = {"sha256": "0"}
    manifest["sha256"] = data.manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(data.DataError, match=f"{folder}/{os.path.basename(name)} is missing"):
        data.verify(folder)
