"""Text -> SentencePiece -> shards on disk -> masked sentence-pair batches.

    python data.py                             # this machine's own documentation
    python data.py my.txt                      # writes shards/my
    python data.py corpus/*.txt.gz --out shards/wiki --vocab-size 30522 --shards 256
    python data.py --show shards/wiki          # what is in it, and three examples

Read first `PretrainingData`: how an example is found, cut in two and masked, and how examples
become a batch. Then `micro_batches`: how examples are dealt to the ranks. What follows can be
skipped at first: worker processes, and from `prepare` on how text becomes shards.

A shard is a part of the documents. A folder of shards holds `tokenizer.model`, `manifest.json`
(settings, counts and digests), `unigrams` (int64, how often the training text has each token)
and, for each shard, three arrays without any header:

    NAME.tokens      uint16 or uint32, every token of the shard, no special symbols
    NAME.sentences   int64, where each sentence begins in `tokens`, and where the last one ends
    NAME.documents   int64, where each document begins in `tokens`, and where the last one ends

Masks and pairs are made on the fly, so both phases, at any length, read the same shards.
Shapes: B examples, T tokens of the longest, N rows of a batch, M masked tokens, n indices.
"""
import argparse
import atexit
import bz2
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
import zlib
from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
IGNORED = -100              # torch's cross-entropy passes over this label
SHORT_FRACTION = 0.10       # so many examples are short: pre-training shall see short inputs, too
LONGEST_WORD = 8            # tokens; longer words are masked in parts: some scripts have no spaces
VERSION = 4                 # the number of the folder's format
ARRAYS = ("tokens", "sentences", "documents")


class DataError(ValueError):
    """Input or shards that cannot be used; the message says which file, what and what to do."""


# ----- Examples: (seed, phase, i) -> a sentence pair with masks -----

# The way to an example:  shard -> window of a document -> Text, a piece of it in two parts
#                         -> Spans, which parts are A and B -> tokens -> masks -> Example or Batch

class Example(NamedTuple):
    """One example with its masks, without padding:

        position      0   1 ...            b_start ...       T-1
        tokens      [CLS] A A A A A A [SEP] B B B B B B B B [SEP]
        segment       0   0 0 0 0 0 0   0   1 1 1 1 1 1 1 1   1

    Without pairs it ends at the first [SEP].
    """
    tokens: np.ndarray              # (T,) int64
    b_start: int                    # the position at which segment B begins; T without pairs
    masked_positions: np.ndarray    # (m,) the positions that are to be predicted, ascending
    labels: np.ndarray              # (m,) the tokens that stood there
    pair_label: int                 # as in Spans


class Batch(NamedTuple):
    """A micro-batch without padding between its examples: their tokens one after another, each
    token a row. Here are three examples of 5, 6 and 8 tokens:

        rows        0 ... 4 | 5 ... 10 | 11 ... 18 | 19 ... 63
                    [CLS] ..| [CLS] .. | [CLS] ..  | padding
        bounds      0         5          11          19          64
        lengths          5         6          8           45

    Padding at the end rounds N up to a multiple of 64 and M to one of 16. So there are a few shapes
    in place of hundreds, each of which takes kernels and memory of its own on a GPU.

    The fields are NumPy arrays, which go from a worker process to another faster than tensors do,
    until `to` makes tensors of them.
    """
    tokens: np.ndarray              # (N,) int64, of the shortest example first
    segments: np.ndarray            # (N,) int64, 0 in A, 1 in B
    positions: np.ndarray           # (N,) int64, of each token in its example: 0, 1, 2 ...
    masked_positions: np.ndarray    # (M,) int64, the rows that are to be predicted, then zeros
    labels: np.ndarray              # (M,) int64, the tokens that stood there, then IGNORED
    bounds: np.ndarray              # (B + 2,) int32, the first row of each example and of the
                                    # padding, then N
    pair_labels: np.ndarray         # (B,) int64, as in Spans
    lengths: np.ndarray             # (B + 1,) int64, the rows of each example and of the padding

    def to(self, device):
        """Returns the batch as tensors on a device; `lengths`, which are shapes, stay on the CPU.
        """
        def move(values):
            tensor = torch.from_numpy(values)
            if torch.device(device).type == "cuda":
                tensor = tensor.pin_memory()    # a GPU copies from there while the program goes on
            return tensor.to(device, non_blocking=True)

        moved = Batch(*map(move, self))
        return moved._replace(lengths=torch.from_numpy(self.lengths))


class Shard(NamedTuple):
    """A shard, mapped from the disk. Windows are explained at PretrainingData. The fields are
    memoryviews, since these give Python's own integers, which bisect compares faster than NumPy's.
    """
    tokens: memoryview      # every token, uint16 or uint32
    sentences: memoryview   # where each sentence begins in `tokens`, and where the last one ends
    documents: memoryview   # where each document begins in `tokens`, and where the last one ends
    windows: memoryview     # how many windows stand before each document, then how many in all


class Text(NamedTuple):
    """A piece of a document in two parts; all but `document` are offsets into a shard's tokens."""
    start: int              # where the first part begins
    middle: int             # where the first part ends and the second one begins
    end: int                # where the second part ends
    document: int           # the number of the document
    document_end: int       # where the document ends


class Spans(NamedTuple):
    """What an example is made of; begins and ends are offsets into the shard's tokens."""
    index: int              # i, the number of the example
    shard: int              # the number of the shard
    a: int                  # where segment A begins
    a_end: int              # where A ends
    b: int                  # where segment B begins
    b_end: int              # where B ends; `b` without pairs
    pair_label: int         # 0 if B is the true next of A, 1 if not, IGNORED without pairs


class PretrainingData:
    """The examples of a phase; number i is a pure function of (seed, phase, i), i = 0, 1, 2 ...

    Example i comes from shard i modulo the number of shards. Its text is found in three steps:

    1. Each document is cut into windows, as long as the text of an example can be. A window says
       about where the text of an example begins. An epoch of a shard takes each window once, in an
       order of its own.
    2. In each epoch the windows of all documents shift by a fraction of a window, so that texts
       begin at other tokens. None reaches over the end of its document.
    3. The text begins with the first sentence that begins in the first half of the window, if there
       is one, and is as long as a window, or ends with its document; SHORT_FRACTION of the texts
       are shorter.

    Where the windows 0 to 3 of 8 tokens begin in a document of 26 tokens:

        token          0       8       16        26
        epoch 0        0.......1.......2.3.......    shift  0.00 windows
        epoch 1        0...1.......2.....3.......    shift -0.38
        epoch 2        .0.......1.......23.......    shift +0.24

    In epoch 0 window 3 would begin at token 24; it is moved back to 18, so that it fits.

    pairs: "nsp" (BERT, arXiv 1810.04805, section 3.1) cuts the text in two where a sentence ends;
    for half of the examples B is a part of another document of the same shard. "sop" (ALBERT,
    arXiv 1909.11942, section 3.1) swaps the two parts for half of them. "none" leaves one text.

    `mask_fraction` of the tokens are chosen; of these 80 % become [MASK], 10 % a random token and
    10 % stay (BERT, appendix A.1). whole_words: all tokens of a word are chosen, or none; a word is
    what stands between spaces, with its punctuation (BERT splits that off).

    Raises DataError where the folder holds no shards.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, pairs="nsp",
                 mask_fraction=0.15, whole_words=False):
        manifest = load_manifest(folder)
        names = shard_names(manifest["shards"])
        self.folder = Path(folder)
        self.names = names[:1] if held_out else names[1:]
        self.token_type = manifest["token_type"]
        self.vocab_size = manifest["vocab_size"]
        self.seq_len = seq_len
        self.pairs = pairs
        self.mask_fraction = mask_fraction
        self.specials = 2 if pairs == "none" else 3     # [CLS] and one or two [SEP]
        self.window_size = seq_len - self.specials      # the most text that an example has, tokens

        # One key for each use of random numbers, so that the draws are independent: to cut a text,
        # to choose tokens, for what becomes of them ([MASK] or not), for the random ones of them.
        self.seed = (seed, phase)
        keys = np.random.SeedSequence(self.seed).generate_state(4, np.uint64)
        self.cut_key, self.choice_key, self.fate_key, self.token_key = keys

        self.begins_word = None                         # (V,) bool
        if whole_words:
            tokenizer = load_tokenizer(self.folder / "tokenizer.model")
            pieces = tokenizer.id_to_piece(list(range(self.vocab_size)))
            self.begins_word = np.char.startswith(pieces, "▁")

        self.shards = {}            # by their numbers, mapped when first needed
        self.orders = {}            # of each shard: (the epoch that it is in, the order of windows)

    def __getstate__(self):
        # Called when a data set is sent to a worker process, which maps the files itself.
        return {**self.__dict__, "shards": {}, "orders": {}}

    def shard(self, s):
        """Returns Shard s."""
        if s not in self.shards:
            path = self.folder / self.names[s]
            tokens = np.memmap(f"{path}.tokens", self.token_type, "r")
            sentences = np.memmap(f"{path}.sentences", np.int64, "r")
            documents = np.memmap(f"{path}.documents", np.int64, "r")
            windows_each = np.ceil(np.diff(documents) / self.window_size).astype(np.int64)
            windows = np.append(0, np.cumsum(windows_each))
            self.shards[s] = Shard(*map(memoryview, (tokens, sentences, documents, windows)))
        return self.shards[s]

    def order(self, s, epoch):
        """Returns (windows,) uint32, the order in which an epoch takes the windows of shard s."""
        known_epoch, order = self.orders.get(s, (None, None))
        if epoch != known_epoch:
            rng = np.random.default_rng((*self.seed, s, epoch))
            order = rng.permutation(self.shard(s).windows[-1]).astype(np.uint32)
            self.orders[s] = (epoch, order)
        return order

    def text(self, shard, epoch, window, length, place):
        """Returns the Text of a window in an epoch: at most `length` tokens, cut in two where a
        sentence ends, or in the middle if none does; `place` in [0, 1) says at which."""
        sentences = shard.sentences
        document = bisect_right(shard.windows, window) - 1
        first = shard.documents[document]
        last = shard.documents[document + 1]

        # Multiples of the golden ratio, 0.618, modulo 1 are spread evenly over [0, 1); so the
        # shifts, in windows, are over [-0.75, 0.25). A shift forward skips the document's begin; a
        # shift back is stopped there, and shows it. With three of four back, a begin is seen about
        # as often as an end, which is shown in every epoch.
        shift = (0.618 * epoch + 0.75) % 1 - 0.75
        number = window - shard.windows[document]       # of the window in its document: 0, 1, 2 ...
        start = first + int((number + shift) * self.window_size)
        start = max(first, min(start, last - self.window_size))

        # bisect_left: the first sentence that begins at `start` or later.
        next_sentence = sentences[bisect_left(sentences, start)]
        if next_sentence - start < self.window_size / 2:
            # It is in the same document: `start` is at least a window before the document's end,
            # or, in a short document, at its begin, where a sentence begins.
            start = next_sentence
        end = min(start + length, last)

        # Sentences low <= k < high begin inside of the text, after its start and before its end: it
        # can be cut there.
        low = bisect_right(sentences, start)
        if self.pairs == "sop":
            # It ends with a whole sentence, for half a sentence in the middle would show the swap.
            last_end = bisect_right(sentences, end) - 1
            if last_end > low:
                end = sentences[last_end]
        high = bisect_left(sentences, end)
        middle = (start + end) // 2
        if low < high:
            middle = sentences[low + int(place * (high - low))]
        return Text(start, middle, end, document, last)

    def pair(self, i, draws):
        """Returns the Spans of example i. draws: five random numbers in [0, 1), for these in turn:
        whether the text is short, how long it then is (2 tokens at least), where it is cut, whether
        B is the true next, and the window that another B comes from.

        A B from elsewhere is of the same shard and epoch, from any window but those of A's
        document, each as likely. It begins with the second part of that window's text, and ends
        where A and B together have the length that was drawn, or with its document.
        """
        short_draw, length_draw, cut_draw, truth_draw, window_draw = draws
        earlier, s = divmod(i, len(self.names))     # examples of shard s before this one
        shard = self.shard(s)
        windows = shard.windows[-1]
        epoch, turn = divmod(earlier, windows)
        window = int(self.order(s, epoch)[turn])
        length = self.window_size
        if short_draw < SHORT_FRACTION:
            length = 2 + int(length_draw * (length - 1))

        start, middle, end, document, _ = self.text(shard, epoch, window, length, cut_draw)
        if self.pairs == "none":
            return Spans(i, s, start, end, end, end, IGNORED)
        if truth_draw >= 0.5:
            return Spans(i, s, start, middle, middle, end, 0)
        if self.pairs == "sop":
            return Spans(i, s, middle, end, start, middle, 1)

        # B from elsewhere begins as true ones do, with the second part of a text, and is about as
        # long: else a model could tell them apart without reading. Its window is any but those of
        # A's document. They are counted from the end of that document on, and after the last one
        # from 0: if there are 5 windows and A's document has 1 and 2, they are 3, 4 and 0.
        own = shard.windows[document]
        after = shard.windows[document + 1]
        others = windows - (after - own)
        other_window = (after + int(window_draw * others)) % windows
        other = self.text(shard, epoch, other_window, length, cut_draw)
        b_length = length - (middle - start)
        b_end = min(other.middle + b_length, other.document_end)
        return Spans(i, s, start, middle, other.middle, b_end, 1)

    def spans(self, indices):
        """Returns the list of the Spans of these examples."""
        # Example i has the draws number 5 i to 5 i + 4.
        counters = np.asarray(indices)[:, None] * 5 + np.arange(5)
        draws = uniform(counters, self.cut_key).tolist()               # (n, 5)
        return [self.pair(int(i), row) for i, row in zip(indices, draws)]

    def length(self, spans):
        """Returns how many tokens an example has, special symbols included: an array if the fields
        of spans are arrays, as in `batch`."""
        return spans.a_end - spans.a + spans.b_end - spans.b + self.specials

    def lengths(self, indices):
        """Returns (n,) how many tokens these examples have, special symbols included."""
        return np.array(list(map(self.length, self.spans(indices))))

    def unmasked(self, spans):
        """Returns (T,) int64, the tokens of an example before they are masked."""
        tokens = self.shard(spans.shard).tokens
        parts = [[CLS], tokens[spans.a:spans.a_end], [SEP]]
        if self.pairs != "none":
            parts += [tokens[spans.b:spans.b_end], [SEP]]
        return np.concatenate(parts)

    def mask(self, tokens, indices):
        """Masks `tokens` (B, T) of examples `indices` (B,) in place; returns labels (B, T): what
        stood there where a token was chosen, IGNORED elsewhere. `tokens` itself changes.

        Position t of example i has the counter i * seq_len + t, in a batch of any width: it draws
        `uniform(counter, key)`, another number with each key. choice_key: whether it is chosen (see
        `choose`). fate_key: what becomes of it, below 0.8 [MASK], below 0.9 a random token, else it
        stays. token_key: which random token, of all but SPECIALS.
        """
        positions = np.arange(tokens.shape[1])                         # (T,)
        counters = indices[:, None] * self.seq_len + positions         # (B, T)
        chosen = self.choose(tokens, counters)                         # (B, T)
        labels = np.where(chosen, tokens, IGNORED)                     # (B, T)

        originals = tokens[chosen]                                     # (M,)
        fates = uniform(counters[chosen], self.fate_key)
        draws = uniform(counters[chosen], self.token_key)
        words = self.vocab_size - len(SPECIALS)
        random_tokens = len(SPECIALS) + (draws * words).astype(np.int64)
        not_masked = np.where(fates < 0.9, random_tokens, originals)
        tokens[chosen] = np.where(fates < 0.8, MASK, not_masked)
        return labels

    def choose(self, tokens, counters):
        """Returns (B, T) bool, which tokens are to be predicted: `mask_fraction` of the text, at
        least one token. With whole words, the last word can make it a few tokens more.

        Each token draws a random number by its counter (B, T); those with the smallest ones are
        chosen. A count that is not whole is rounded up or down by chance, so that its mean is
        right: of 25 tokens 3.75 in the mean, 3 or 4. An example has the same count in any batch.
        With whole words, the tokens of a word share the draw of its first one.

        Text is all but [PAD], [CLS] and [SEP]; [UNK] is text, too. Any random number of the example
        may decide about rounding, except those of text; we take the draw of position 0.
        """
        is_text = (tokens != PAD) & (tokens != CLS) & (tokens != SEP)   # (B, T)
        draws = uniform(counters, self.choice_key)                      # (B, T)

        # 15 % of 25 tokens are 3.75: in three cases of four 4, else 3, so that the mean is right.
        # The first draw decides: it is that of [CLS], which is never chosen.
        wanted = self.mask_fraction * is_text.sum(axis=1)               # (B,) 3.75
        round_up = draws[:, 0] < wanted % 1                             # (B,) three of four times
        count = wanted.astype(np.int64) + round_up                      # (B,) 4 or 3
        count = np.maximum(count, 1)

        if self.begins_word is not None:
            # All tokens of a word have the draw of its first one.
            draws = np.take_along_axis(draws, self.word_starts(tokens, is_text), axis=1)
        draws = np.where(is_text, draws, 2.0)                           # what is no text comes last
        last = count[:, None] - 1                                       # (B, 1)
        bound = np.take_along_axis(np.sort(draws), last, axis=1)        # (B, 1)
        return draws <= bound

    def word_starts(self, tokens, is_text):
        """Returns (B, T), the position at which the word of each token begins. A word of more than
        LONGEST_WORD tokens counts as several. For words of 1, 3 and 1 tokens:

            begins      1 1 0 0 1
            last_begin  0 1 1 1 4       what is returned, since no word is long
            into_word   0 0 1 2 0
        """
        begins = self.begins_word[tokens] | ~is_text
        begins[:, 1:] |= ~is_text[:, :-1]       # the first token of a segment
        positions = np.arange(tokens.shape[1])
        last_begin = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        into_word = positions - last_begin
        return positions - into_word % LONGEST_WORD

    def __getitem__(self, i):
        """Returns Example i, the same as in any batch."""
        spans = self.spans([i])[0]
        tokens = self.unmasked(spans)
        labels = self.mask(tokens[None], np.array([i]))[0]             # (T,)
        masked_positions = np.flatnonzero(labels != IGNORED)           # (m,)
        b_start = spans.a_end - spans.a + 2
        return Example(tokens, b_start, masked_positions, labels[masked_positions],
                       spans.pair_label)

    def batch(self, indices):
        """Returns the Batch of a list of examples, the shortest first, as arrays."""
        examples = sorted(self.spans(indices), key=self.length)
        spans = Spans(*np.array(examples).T)      # of all at once: each field is an array (B,)
        lengths = self.length(spans)                                   # (B,)
        b_starts = spans.a_end - spans.a + 2                           # (B,)

        # A rectangle only for a while: `mask` works on whole arrays.
        tokens = np.full((len(examples), lengths[-1]), PAD)            # (B, T)
        for row, length, example in zip(tokens, lengths, examples):
            row[:length] = self.unmasked(example)
        labels = self.mask(tokens, spans.index)                        # (B, T)

        # From (B, T) to N rows: the cells that are not padding, example after example
        is_real = tokens != PAD                                        # (B, T)
        example_of, positions = np.nonzero(is_real)                    # (N,), of each row
        segments = (positions >= b_starts[example_of]).astype(np.int64)      # (N,)
        row_labels = labels[is_real]                                   # (N,)
        masked_rows = np.flatnonzero(row_labels != IGNORED)            # (M,)
        masked_labels = row_labels[masked_rows]                        # (M,)

        padding = -len(positions) % 64                                 # up to a multiple of 64
        padded_lengths = np.append(lengths, padding)                   # (B + 1,)
        bounds = np.append(0, np.cumsum(padded_lengths)).astype(np.int32)    # (B + 2,)
        return Batch(pad(tokens[is_real], 64), pad(segments, 64), pad(positions, 64),
                     pad(masked_rows, 16), pad(masked_labels, 16, IGNORED), bounds,
                     spans.pair_label, padded_lengths)


def pad(values, multiple, fill=0):
    """Returns an array (n,), made longer with `fill` until `multiple` divides its length."""
    return np.append(values, np.full(-len(values) % multiple, fill, values.dtype))


def uniform(counters, key):
    """Returns a random float64 in [0, 1) for each counter, a function of it and the key alone
    (SplitMix64; Steele, Lea, Flood 2014): example i needs nothing of those before it. To make one
    of NumPy's generators for each example would take longer than all the rest."""
    # NumPy computes with uint64 modulo 2^64. The constants are SplitMix64's.
    x = np.asarray(counters, np.uint64) * 0x9E3779B97F4A7C15 + key
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11) * 2.0 ** -53           # the upper 53 bits, which float64 can hold


# ----- Batches: dealt to the ranks, made ahead in worker processes -----

def micro_batches(step, global_batch, micro_batch, rank, size, lengths=None):
    """Returns the micro-batches of rank `rank` of `size` in a step, each a list of indices.

    The step has the examples step * global_batch up to (step + 1) * global_batch; a rank takes
    those that are `rank` modulo `size`, or by length (below). Nothing has to divide: a rank may
    have one example more than another, and its last micro-batch may be smaller. By length, a rank's
    examples are in order, the longest last.

    lengths: a function of indices (n,), to deal the examples by length: sorted, then to the ranks
    in snake order from the longest on (0 1 2 | 2 1 0 | 0 1), so that each has about as many tokens;
    a micro-batch takes neighbours, since attention computes equal lengths together. Lengths follow
    from indices, so that ranks need not talk; each computes those of all examples, at about 8 us
    each, a step ahead. (Presorting: Kim et al., arXiv 2402.02447; Zeng et al., 2208.08124.)
    """
    first = step * global_batch
    indices = np.arange(first, first + global_batch)
    owner = indices % size
    if lengths is not None:
        indices = indices[np.argsort(lengths(indices), kind="stable")]
        # Dealt from the longest on, so that where a rank gets one example more, it is a short one:
        # 8 examples go to 3 ranks as  0 1 2 | 2 1 0 | 0 1.  The longest of a rank come last in its
        # list, since the backward pass of the last micro-batch hides the all-reduce.
        from_longest = np.arange(global_batch)[::-1]
        round_number, place = np.divmod(from_longest, size)
        owner = np.where(round_number % 2 == 1, size - 1 - place, place)
    mine = indices[owner == rank].tolist()
    return [mine[k:k + micro_batch] for k in range(0, len(mine), micro_batch)]


def loader(dataset, deal, steps, workers=1):
    """Yields the list of Batches of each step, in order, made ahead in `workers` processes (0: in
    this one). deal(step) returns the micro-batches of a step, each a list of indices; it is called
    in the worker. train.py gives `micro_batches` with all arguments but the step filled in."""
    return in_workers(functools.partial(make_step, dataset, deal), steps, workers)


def make_step(dataset, deal, step):
    """Returns the Batches of a step."""
    return [dataset.batch(indices) for indices in deal(step)]


def in_workers(function, items, workers):
    """Yields function(item) for each item, in order, computed ahead in `workers` processes, an item
    each; in this process if there are none. Raises the exceptions of a worker, with a note of the
    traceback there, and DataError if a worker has died. (torch's DataLoader can wait for ever for a
    worker that was killed amid a message, and its workers can outlive this program.)"""
    if not workers:
        yield from map(function, items)
        return
    items = iter(items)
    pipes = []
    try:
        for item in itertools.islice(items, workers):
            pipes.append(start_worker(function))
            send(pipes[-1], item)
        for item in items:
            # `pipes` is a queue, in which the first worker has had its item for the longest time.
            # It gets the next item before our caller uses the result, so that both work at once.
            pipe = pipes.pop(0)
            pipes.append(pipe)
            result = receive(pipe)
            send(pipe, item)
            yield result
        for pipe in pipes:
            yield receive(pipe)
    finally:
        for pipe in pipes:
            pipe.close()


def start_worker(function):
    """Returns our end of the pipe to a new worker process; the process ends when we close it, or
    when this program ends, however it does."""
    ours, theirs = multiprocessing.Pipe()
    # A new Python, which imports torch again in one or two seconds. A fork of this process could
    # hang, since it copies locks that other threads hold; a fork server leaves files behind when
    # this process is killed.
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=work, args=(function, theirs))
    # Batch systems and torchrun send SIGTERM, and a terminal Ctrl-C or SIGHUP, to all processes of
    # a run. We still need our workers then, to finish the step and save it. A process that starts
    # while these signals are ignored goes on ignoring them.
    handlers = {}
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        handlers[signum] = signal.signal(signum, signal.SIG_IGN)
    worker.start()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    theirs.close()                          # so that the pipe ends if the worker does
    # At exit Python waits for the worker, which ends when we close the pipe.
    atexit.register(ours.close)
    return ours


def work(function, pipe):
    """Runs in a worker process: answers each item with function(item), or with the exception, until
    the pipe ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            try:
                result = function(item)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)


def send(pipe, item):
    """Sends an item to a worker. If it is dead, `receive` will say so."""
    with contextlib.suppress(OSError):
        pipe.send(item)


def receive(pipe):
    """Returns what a worker has sent; raises it if it is an exception, or DataError if the worker
    has died."""
    try:
        result = pipe.recv()
    except (EOFError, OSError):             # OSError: it died amid a message
        raise DataError("a worker process died: no memory (set --workers lower), or a program "
                        'without if __name__ == "__main__"') from None
    if isinstance(result, Exception):
        raise result
    return result


# ----- Preparing: corpus -> documents -> sentences -> tokenizer -> shards -> manifest -----

BLOCK = 1 << 20             # characters; text is encoded block by block, longer documents are cut
SAMPLE = 32                 # so many blocks, drawn at random, train the tokenizer
GROUP = 16                  # so many blocks are written at a time
LONGEST_SENTENCE = 8192     # characters; SentencePiece takes memory in proportion to the longest


def prepare(corpus, folder, vocab_size=8192, shards=8, cased=False, held_out=0.01, tokenizer=None,
            workers=None, split=None):
    """Writes a folder of shards, which appears when it is complete; returns its manifest (dict).

    corpus: documents, each one string, that can be iterated again and again; it is read twice.
    tokenizer: a path; without one a model of `vocab_size` pieces is trained. held_out: the fraction
    of the documents that training never reads, at least; see `enough_to_measure`. workers: default
    one a core, none for less than 32 MB. split: "lines" takes a line as a sentence, "prose" joins a
    document's lines and splits at sentence ends; by default the first thousand lines decide.

    Every shard gives as many examples as any other, so what is in a small one is seen more often.
    With 300 documents in 8 shards the largest has about twice the text of the smallest, with 60
    documents four times.

    A folder that was prepared the same way already is left as it is. Raises DataError if the folder
    holds something else or the text is of no use.
    """
    folder = Path(folder).resolve()
    found = load_manifest(folder) if any(folder.glob("*")) else None
    digest = None
    if tokenizer:
        vocab_size = load_tokenizer(tokenizer).get_piece_size()
        digest = sha256_of(tokenizer)
    prose = split == "prose" if split else is_prose(corpus)
    identity, sample = survey(corpus)
    settings = {"version": VERSION, "corpus": identity, "vocab_size": vocab_size, "cased": cased,
                "shards": shards, "held_out": held_out, "prose": prose, "tokenizer": digest}
    if found:
        differ = ", ".join(key for key in settings if found[key] != settings[key])
        if differ:
            raise DataError(f"{folder} was prepared otherwise ({differ}); remove it first")
        return found

    if tokenizer:
        model = Path(tokenizer).read_bytes()
    else:
        documents = itertools.chain(*sample)
        sentences = (sentence for text in documents for sentence in sentences_in(text, prose))
        model = train_tokenizer(sentences, vocab_size, cased)
    return write_folder(corpus, folder, settings, model, workers)


def survey(corpus):
    """Returns (the corpus's identity: documents, bytes, sha256; SAMPLE blocks drawn at random).

    Reads everything once, so that bad input is found before the long part begins.
    """
    digest = hashlib.sha256()
    documents = 0
    size = 0
    sample = []
    rng = np.random.default_rng(0)
    for before, block in enumerate(blocks(corpus)):
        text = "".join(f"{document}\n\n" for document in block).encode()
        digest.update(text)
        documents += len(block)
        size += len(text)
        # Reservoir sampling: each block has the same chance, however many are still to come
        if before < SAMPLE:
            sample.append(block)
        else:
            place = rng.integers(before + 1)
            if place < SAMPLE:
                sample[place] = block
    if not documents:
        raise DataError("there is no text in the corpus")
    return {"documents": documents, "bytes": size, "sha256": digest.hexdigest()}, sample


def blocks(corpus, total=None):
    """Yields lists of documents, about a megabyte of text each, and shows how many of `total`
    documents it has read."""
    block = []
    size = 0
    for document in tqdm(corpus, "text", total, unit=" documents", leave=False, disable=None):
        if block and size + len(document) > BLOCK:
            yield block
            block = []
            size = 0
        block.append(document)
        size += len(document)
    if block:
        yield block


def train_tokenizer(sentences, vocab_size, cased=False):
    """Returns a SentencePiece unigram model (bytes) of `vocab_size` pieces.

    The five special symbols have ids 0 to 4; no text can spell them. Raises DataError if the text
    is too small.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=model, vocab_size=vocab_size,
            normalization_rule_name="nmt_nfkc" if cased else "nmt_nfkc_cf", minloglevel=2,
            pad_id=PAD, pad_piece="[PAD]", unk_id=UNK, unk_piece="[UNK]", bos_id=-1, eos_id=-1,
            control_symbols=SPECIALS[CLS:],
            max_sentence_length=4 * LONGEST_SENTENCE,   # bytes; longer ones would be left out
            num_threads=4)                              # another number finds another vocabulary
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]     # after SentencePiece's file, line, condition
        raise DataError(f"--vocab-size {vocab_size}: {reason}") from None
    return model.getvalue()


def write_folder(corpus, folder, settings, model, workers):
    """Writes all files of a folder of shards; returns its manifest. model: the tokenizer (bytes).

    They are written beside the folder and moved there in the end: nobody finds half of them.
    """
    identity = settings["corpus"]
    held_out = max(settings["held_out"], enough_to_measure(identity))
    if workers is None:                 # to start them takes seconds
        workers = os.cpu_count() if identity["bytes"] > 32 * BLOCK else 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as path:
        temporary = Path(path) / "shards"       # only we may read `path` itself
        temporary.mkdir()
        (temporary / "tokenizer.model").write_bytes(model)
        tokenizer = load_tokenizer(temporary / "tokenizer.model")
        encoder = functools.partial(encode, tokenizer, settings["prose"], held_out,
                                    settings["shards"])
        encoded = in_workers(encoder, blocks(corpus, identity["documents"]), workers)
        counts = write_shards(encoded, temporary, settings)
        files = {file.name: {"sha256": sha256_of(file)} for file in sorted(temporary.iterdir())}
        manifest = {**settings, **counts, "files": files}
        manifest["sha256"] = manifest_digest(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            os.replace(temporary, folder)
        except OSError:                 # another process did the same work and was faster
            if load_manifest(folder) != manifest:
                raise
    return manifest


def enough_to_measure(identity):
    """Returns the fraction of a corpus's documents on which one can measure: about 100 documents,
    or half a megabyte or a fifth of all if that is fewer, but at least 8, and at most half."""
    documents = identity["documents"]
    half_a_megabyte = documents * 5e5 / identity["bytes"]       # in documents
    enough = max(8, min(100, half_a_megabyte, documents / 5))
    return min(enough / documents, 0.5)


# ----- Corpora: files -> documents, each one string -----

def open_corpus(paths):
    """Returns a corpus for `prepare`: the documents of these files and folders, or, without any,
    this machine's documentation."""
    return TextFiles(paths) if paths else machine_documentation()


def default_folder(paths):
    """Returns the folder (Path) for the shards of a corpus, named after its first path."""
    if not paths:
        return Path("shards/docs")
    name = Path(paths[0]).absolute().name.split(".")[0]
    if name in ("", "docs"):                    # shards/docs is for this machine's documentation
        name = "corpus"
    return Path("shards", name)


class TextFiles:
    """The documents of text files; can be iterated again and again.

    Of a folder all files are taken that are not hidden, nor behind a link to another folder. A file
    is text with blank lines between documents, or JSON lines with a `text` field; each also as .gz,
    .bz2 or .xz. White space around lines and blank lines go, so that the same documents are the
    same corpus in any kind of file.
    """
    OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

    def __init__(self, paths):
        self.files = []
        for path in map(Path, paths):
            if path.is_dir():
                for file in sorted(path.rglob("*")):
                    hidden = "/." in f"/{file.relative_to(path)}"
                    if file.is_file() and not hidden:
                        self.files.append(file)
            elif path.is_file():
                self.files.append(path)
            else:
                raise DataError(f"{path} is no file or folder (nor can text be a pipe: it is read "
                                "twice)")

    def __iter__(self):
        for path in self.files:
            opener = self.OPENERS.get(path.suffix, open)
            with opener(path, "rb") as file:
                # Lines of a BufferedReader come faster than gzip's, bz2's and lzma's own
                yield from documents_in(lines_in(path, io.BufferedReader(file)))


# A file that begins so is JSON, or what wikiextractor without --json, Wikipedia and others export.
JSON = '{"', "{}", "[{"
MARKUP = "<doc", "<mediawiki", "<page", "<html", "<!doctype", "<?xml"


def lines_in(path, file):
    """Yields the lines of an open binary file without the white space around them; of a JSON record
    the lines of its text, then a blank one. Raises DataError, with file and line, if it cannot."""
    line_number = 0
    is_json = None                      # until the first line that is not blank
    try:
        for line_number, data in enumerate(file, 1):
            line = data.decode().lstrip("\ufeff").strip()        # no byte order mark
            if line and is_json is None:
                # A text can begin with {{ or {\bf, in templates and TeX. What begins as an array is
                # no text either; it fails below as JSON, and the message helps.
                begin = line.replace(" ", "").lower()
                if begin.startswith(MARKUP):
                    raise ValueError("HTML or XML, take the text out of it first")
                is_json = begin in ("{", "[") or begin.startswith(JSON)
            if line and is_json:
                text = json.loads(line)["text"] or ""
                # "replace": half of a surrogate pair cannot be written as UTF-8
                text = text.encode("utf-8", "replace").decode()
                yield from filter(None, map(str.strip, text.split("\n")))
                yield ""
            else:
                yield line
    except Exception as error:          # gzip, bz2, lzma, JSON and UTF-8 each have their own
        raise DataError(f"{path}, line {line_number}: {type(error).__name__}: {error}; a file is "
                        "UTF-8 text or has JSON with a `text` a line (wikiextractor --json)"
                        ) from None


def documents_in(lines):
    """Yields documents, each one string: lines up to a blank one; a long one as several."""
    document = []
    for line in itertools.chain(lines, [""]):
        if line:
            document.append(line)
        # Some files have no blank line at all; 10,000 lines at a time fit in any memory
        if document and (not line or len(document) == 10_000):
            yield from cut_text("\n".join(document), BLOCK)
            document = []


def cut_text(text, n):
    """Returns a text in parts of at most n characters, cut at white space if there is any."""
    if len(text) <= n:
        return [text]
    # Up to n characters, the first no space, that end where a word does; else a part of a word.
    words = rf"\S.{{,{n - 1}}}(?<=\S)(?!\S)"
    part_of_word = rf"\S{{1,{n}}}"
    return re.findall(f"{words}|{part_of_word}", text, re.DOTALL)


# ----- Documents -> sentences -----

# After these a full stop does not end a sentence. They are sorted by length, since each look-back
# (?<!...) of a regular expression has one width.
ABBREVIATIONS = [
    "Mr Ms Dr St Lt Jr Sr cf vs ca No Eq eq Ch ch ed pp al Co Mt",
    "Mrs Gen Col Sgt Rev Hon Sen Rep Gov e.g i.e Nos Vol Fig fig Eqs Sec Inc Ltd",
    "Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec",
    "Prof Capt Pres Ph.D Vols Figs figs Corp Bros Sept"]


def not_after(words):
    """Returns a regular expression that matches any place but right after one of these words and a
    full stop."""
    any_of_them = "|".join(map(re.escape, words.split()))
    return rf"(?<!\b(?:{any_of_them})\.)"


# A sentence ends at one of . ! ? ... with its closing quotes, then white space, then what can open
# a sentence: `He said "no." Then` is cut before Then. It does not end after one letter (`J. Ray`),
# one or two digits (German `21. Juni`) or an abbreviation, nor before lower case (`3.5 m. long`).
# Quotes open and close in more than one way: English “so”, German „so“.
NO_END = r"(?<!\b[A-Za-z]\.)(?<!\s\d\.)(?<!\s\d\d\.)" + "".join(map(not_after, ABBREVIATIONS))
# These begin a sentence: capitals, digits, and letters of scripts that know no capitals (Hebrew to
# Lao; Chinese, Japanese; Korean).
BEGIN = r"[A-Z0-9À-ÖØ-ÞΑ-ΩА-Я\u0590-\u0eff\u3000-\u9fff\uac00-\ud7a3]"
LATIN_END = rf"{NO_END}[\"'”’“‘»)\]]*\s+(?=[\"'“‘„‚«(\[`]*\s?{BEGIN})"
# Chinese, Japanese, Hindi and Arabic marks need no space after them.
OTHER_END = r"(?<=[。！？।؟])[。！？।؟\"'”’」』）)\]]*\s*"
SENTENCE_END = re.compile(f"[.!?…。！？।؟](?:{LATIN_END}|{OTHER_END})")


def split_sentences(text):
    """Returns the sentences of a piece of prose (str), white space around them removed. Where a
    script has neither capitals nor marks that SENTENCE_END knows, a paragraph is one sentence."""
    sentences = []
    start = 0
    for match in SENTENCE_END.finditer(text):
        sentences.append(text[start:match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return list(filter(None, sentences))


def sentences_in(document, prose):
    """Returns the sentences of a document; none is longer than LONGEST_SENTENCE."""
    sentences = split_sentences(document.replace("\n", " ")) if prose else document.split("\n")
    return [part for sentence in sentences for part in cut_text(sentence, LONGEST_SENTENCE)]


def is_prose(corpus):
    """Returns True if a corpus is prose (wrapped or paragraphs), not a sentence a line: its first
    thousand lines have sentence ends inside, or break in mid-sentence (no full stop, and the next
    line continues in lower case)."""
    every_line = (line for document in corpus for line in f"{document}\n".split("\n"))
    lines = list(itertools.islice(every_line, 1000))
    suspects = 0
    for line, following in itertools.pairwise(lines):
        suspects += len(split_sentences(line[:4096])) > 1
        suspects += following[:1].islower() and line[-1:] not in ".!?…\"'”’):;"
    return suspects > 0.2 * sum(map(bool, lines))


# ----- Sentences -> tokens -> shards -----

def encode(tokenizer, prose, held_out, shards, documents):
    """Returns what a block of documents adds to the shards, {number of the shard: {"tokens": ids,
    "sentences": how many tokens each sentence has, "documents": the same of each document}}.

    Shard 0 is the held-out one. Documents of less than two tokens are left out.
    """
    texts = [sentences_in(document, prose) for document in documents]
    # All at once: sentence by sentence would take two to four times as long
    encoded = iter(tokenizer.encode(list(itertools.chain(*texts)), num_threads=1))
    parts = {}
    for document, text in zip(documents, texts):
        # The next len(text) results are this document's.
        sentences = list(filter(None, itertools.islice(encoded, len(text))))
        tokens = list(itertools.chain(*sentences))
        if len(tokens) < 2:             # there is no A and B
            continue
        # Dealt by content: the same document twice is never both trained on and held out
        draw = zlib.crc32(document.encode())
        shard = 0 if draw < held_out * 2 ** 32 else 1 + draw % shards
        part = parts.setdefault(shard, {kind: array("I") for kind in ARRAYS})
        part["tokens"].extend(tokens)
        part["sentences"].extend(map(len, sentences))
        part["documents"].append(len(tokens))
    return parts


def write_shards(encoded, folder, settings):
    """Writes the arrays of all shards from what `encode` returns, block after block; returns what
    the manifest says of them."""
    names = shard_names(settings["shards"])
    token_type = "uint16" if settings["vocab_size"] <= 1 << 16 else "uint32"
    types = {"tokens": token_type, "sentences": "int64", "documents": "int64"}
    unigrams = np.zeros(settings["vocab_size"], np.int64)
    # Lengths follow these zeros. Their running sums are then where each one begins.
    for name in names:
        np.zeros(1, np.int64).tofile(folder / f"{name}.sentences")
        np.zeros(1, np.int64).tofile(folder / f"{name}.documents")
    while True:
        # Groups of blocks: to open all files for each would take longer than to encode it
        group = list(itertools.islice(encoded, GROUP))
        if not group:
            break
        for shard, name in enumerate(names):
            parts = [block[shard] for block in group if shard in block]
            for kind in ARRAYS:
                with open(folder / f"{name}.{kind}", "ab") as file:
                    for part in parts:
                        np.asarray(part[kind], types[kind]).tofile(file)
            if name != "heldout":
                for part in parts:
                    np.add.at(unigrams, part["tokens"], 1)

    unigrams.tofile(folder / "unigrams")
    counts = []                         # of each shard: tokens, sentences, documents
    for name in names:
        sentences = lengths_to_offsets(folder / f"{name}.sentences")
        documents = lengths_to_offsets(folder / f"{name}.documents")
        counts.append([int(documents[-1]), len(sentences) - 1, len(documents) - 1])
    train = np.sum(counts[1:], axis=0).tolist()
    if min(documents for _, _, documents in counts) < 2:
        raise DataError(f"{train[2]} documents are too few for {settings['shards']} shards (a "
                        f"shard needs two, and {counts[0][2]} more are held out): part them by "
                        "blank lines, or lower data.py's --shards")
    return {"token_type": token_type, "unknown_tokens": int(unigrams[UNK]),
            "heldout": dict(zip(ARRAYS, counts[0])), "train": dict(zip(ARRAYS, train))}


def lengths_to_offsets(path):
    """Turns a file of a zero and lengths into one of offsets: where each begins, and where the last
    one ends. Returns them."""
    offsets = np.memmap(path, np.int64, "r+")
    np.cumsum(offsets, out=offsets)
    return offsets


# ----- Prepared shards: what is there, and whether it is whole -----

def load_manifest(folder):
    """Returns the manifest of a folder of shards (dict); raises DataError if there is none, or one
    that is not as it was written."""
    path = Path(folder) / "manifest.json"
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        manifest = json.loads(path.read_text())
        if manifest["version"] == VERSION and manifest["sha256"] == manifest_digest(manifest):
            return manifest
    raise DataError(f"{path} is missing, damaged or not of format {VERSION}; prepare a new folder")


def manifest_digest(manifest):
    """Returns the SHA-256 of all that a manifest says but for its own digest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def load_tokenizer(path):
    """Returns the SentencePieceProcessor of a path; raises DataError if data.py has not made it."""
    with contextlib.suppress(RuntimeError, IndexError):
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        if tokenizer.id_to_piece(list(range(len(SPECIALS)))) == SPECIALS:
            return tokenizer
    raise DataError(f"{path} is not a tokenizer.model that data.py has made; take one that is")


def unigram_losses(folder):
    """Returns (vocabulary,) float64: the loss, in nats, of each token for a predictor that knows
    nothing but how often the training text has it (with one added, so that none is infinite)."""
    counts = np.fromfile(Path(folder) / "unigrams", np.int64) + 1
    return -np.log(counts / counts.sum())


def shard_names(shards):
    """Returns the names of the shard that training never reads and of those to train on."""
    return ["heldout"] + [f"train-{s:05d}" for s in range(shards)]


def verify(folder, rank=0, size=1, everything=False):
    """Returns the manifest after checking the digests of what rank `rank` of `size` reads, or of
    all files. Raises DataError that names the first file that is missing or damaged."""
    manifest = load_manifest(folder)
    shards = manifest["shards"]
    names = shard_names(shards)[1:]
    # This rank's examples are rank, rank + size, rank + 2 size ...; example i is of shard i modulo
    # the number of shards. From example shards * size on the pattern repeats.
    read_here = {names[i % shards] for i in range(rank, shards * size, size)}
    for name, file in manifest["files"].items():
        path = Path(folder, Path(name).name)                 # never a file outside of the folder
        if path.stem in names and path.stem not in read_here and not everything:
            continue
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise DataError(f"{path} is missing or damaged on {os.uname().nodename}, where rank "
                            f"{rank} of {size} reads it; copy it again, or prepare a new folder")
    return manifest


def sha256_of(path):
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----- The corpus without a download: documentation that is on this machine already -----

def machine_documentation():
    """Returns the default corpus, a list of documents of a sentence a line.

    It is the language reference (pydoc_data) and the docstrings of the standard library, NumPy and
    PyTorch as installed here, filtered to English prose; no sentence occurs twice. It differs a
    little between versions of Python and of the packages.
    """
    from pydoc_data.topics import topics
    texts = list(topics.values())
    for module in (os, np, torch):              # os lies where the standard library does
        root = Path(module.__file__).parent
        for file in sorted(root.rglob("*.py")):
            folders = file.relative_to(root).parts
            if {"site-packages", "test", "tests"}.isdisjoint(folders):
                source = file.read_text("utf-8", "ignore")
                texts += re.findall(r'"""(.*?)"""', source, re.DOTALL)

    seen = set()
    documents = []
    for text in texts:
        sentences = dict.fromkeys(english_sentences(text))      # each once, in order
        fresh = [sentence for sentence in sentences if sentence not in seen]
        seen.update(fresh)
        if len(fresh) >= 2:
            documents.append("\n".join(fresh))
    return documents


def english_sentences(text):
    """Returns the English sentences of a docstring: no code, tables, markup or short fragments."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^\s*(>>>|\.\.|\+--|\||==|--)", paragraph, re.MULTILINE):
            paragraph = " ".join(paragraph.split())
            paragraph = re.sub(r"\s[-*]\s+(?=[A-Z`])", ". ", paragraph)         # items of a list
            paragraph = re.sub(r":\w+(?::\w+)*:(?=`)|[`*~]", "", paragraph)     # :class:`~torch.T`
            sentences += split_sentences(paragraph)
    return list(filter(is_english, sentences))


def is_english(sentence):
    """Returns True if a sentence has six words, nearly all of them letters, and no code."""
    spaces = sentence.count(" ")
    if spaces < 5 or re.search(r">>>|::|__|[<{}|\\]", sentence):
        return False
    letters = sum(map(str.isalpha, sentence))
    return letters + spaces >= 0.85 * len(sentence)


# ----- The program -----

def describe(manifest):
    """Returns a report on prepared shards, two lines of text."""
    corpus = manifest["corpus"]
    train = manifest["train"]
    held_out = manifest["heldout"]
    all_of = {kind: train[kind] + held_out[kind] for kind in ARRAYS}
    tokens_each = all_of["tokens"] / all_of["documents"]
    unknown = manifest["unknown_tokens"] / train["tokens"]
    return (f"{all_of['documents']:,} of {corpus['documents']:,} documents have two tokens or "
            f"more; {corpus['bytes'] / 1e6:.1f} MB; {all_of['sentences']:,} sentences\n"
            f"{all_of['tokens']:,} tokens, {tokens_each:.0f} a document, "
            f"{manifest['vocab_size']:,} pieces, {unknown:.2%} [UNK]; "
            f"{manifest['shards']} shards, {held_out['documents']:,} documents held out")


def show(folder):
    """Returns `describe` and three held-out examples as words, after each chosen token what stood
    there; lines of text."""
    report = describe(load_manifest(folder))
    tokenizer = load_tokenizer(Path(folder) / "tokenizer.model")
    examples = PretrainingData(folder, 64, held_out=True)
    for i in range(3):
        example = examples[i]
        words = tokenizer.id_to_piece(example.tokens.tolist())
        for position, label in zip(example.masked_positions, example.labels.tolist()):
            words[position] += f"({tokenizer.id_to_piece(label)})"
        report += f"\n\nB follows A: {example.pair_label == 0}\n    {''.join(words)}"
    return report.replace("▁", " ")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed once a node: train.py uses it, too."""

    def error(self, message):
        # The ranks of a node have the same command line
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        self.exit(2)


def number(kind, low, high=math.inf):
    """Returns a function for argparse's `type`: text -> a number, int or float, in [low, high)."""
    def parse(text):
        value = kind(text)
        if not low <= value < high:             # so that NaN is refused as well
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}), not {text}")
        return value
    parse.__name__ = kind.__name__              # argparse's errors say "invalid int value"
    return parse


def path(text):
    """Returns the text of a flag that is a path, for argparse's `type`; refuses an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty (a variable that is not set?)")
    return text


def parse_arguments():
    """Returns the flags (Namespace). Wrong flags end the program with one line and status 2."""
    parser = Parser(description="Prepare text for BERT.")
    add = parser.add_argument
    add("corpus", type=path, nargs="*",
        help="read these files and folders; without any, this machine's docs")
    add("--out", type=path, help="write this folder; without it, shards/ and the corpus's name")
    add("--shards", type=number(int, 1), default=8,
        help="deal the documents to so many shards (default: %(default)s)")
    add("--sentences", choices=["lines", "prose"],
        help="read a sentence a line, or prose; without it, as the text looks")
    add("--workers", type=number(int, 0),
        help="encode in so many processes; without it, one a core")
    add("--vocab-size", type=number(int, 16), default=8192,
        help="train a tokenizer of so many pieces (default: %(default)s)")
    add("--cased", action="store_true", help="keep upper case in that tokenizer")
    add("--tokenizer", type=path, help="take this tokenizer.model instead")
    add("--show", type=path, help="only report on this folder of shards, and show three examples")
    return parser.parse_args()


def main():
    """Runs the program; what cannot be used is one line on stderr and status 1, 2 for a flag."""
    args = parse_arguments()
    out = args.show or args.out or default_folder(args.corpus)
    try:
        if args.show:
            print(show(out))
        else:
            prepare(open_corpus(args.corpus), out, args.vocab_size, args.shards, args.cased,
                    tokenizer=args.tokenizer, workers=args.workers, split=args.sentences)
            print(f"{show(out)}\n\n{out} is ready")
    except (DataError, KeyboardInterrupt) as error:
        sys.exit(f"data.py: {str(error) or 'stopped; nothing is left of it'}")
    except OSError as error:                    # that of a full disk does not name the file
        sys.exit(f"data.py: {error.filename or out}: {error.strerror or error}")


if __name__ == "__main__":
    main()
