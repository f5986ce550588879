"""Text -> SentencePiece -> shards on disk -> masked sentence-pair batches.

    python data.py                             # this machine's own documentation
    python data.py my.txt                      # writes shards/my
    python data.py corpus/*.txt.gz --out shards/wiki --vocab-size 30522 --shards 256
    python data.py --show shards/wiki          # what is in it, and three examples
    python data.py --list shards/wiki --node-rank 3 --nodes 32 --ranks-per-node 8

Read first `PretrainingData`, how an example is found, cut in two and masked, and `micro_batches`,
how examples are dealt to the ranks. From `prepare` on, text becomes shards: skip it at first.

A folder of shards holds `tokenizer.model`, `manifest.json`, `unigrams` (int64, how often the
training text has each token) and, for each shard, three flat arrays without any header:

    NAME.tokens      uint16 or uint32, every token of the shard, no special symbols
    NAME.sentences   int64, where each sentence begins in `tokens`, and where the last one ends
    NAME.documents   int64, where each document begins in `tokens`, and where the last one ends

Masks and pairs are made on the fly, so both phases, at any length, read the same shards.
Shapes: B examples, T tokens, M masked tokens of a whole batch, n indices of examples.
"""
import argparse
import bz2
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import sys
import threading
import zlib
from bisect import bisect_left, bisect_right
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IGNORED = -100              # the label that torch's cross-entropy passes over
SHORT_FRACTION = 0.10       # of the examples, so that short inputs are met in pre-training too
LONGEST_WORD = 8            # tokens, for whole-word masking: some scripts have no spaces
ARRAYS = ("tokens", "sentences", "documents")
VERSION = 4                 # of the folder's format


class DataError(ValueError):
    """Input or shards that cannot be used; the message says which file, what and what to do."""


# ----- Examples: (seed, phase, i) -> a sentence pair with masks -----

class Example(NamedTuple):
    """One example: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without pairs, its masks applied."""
    tokens: np.ndarray              # (T,) int64
    b_start: int                    # where segment B begins; T without pairs
    masked_positions: np.ndarray    # (m,) where tokens were chosen to be predicted, ascending
    labels: np.ndarray              # (m,) the tokens that stood there
    pair_label: int                 # 0 if B is the true next of A, 1 if not, IGNORED without pairs


class Batch(NamedTuple):
    """A micro-batch without padding: the tokens of B examples one after another, N rows, of which
    the last few only round N up to a multiple of 64; M masked tokens of all examples together."""
    tokens: torch.Tensor            # (N,) int64, of the shortest example first
    segments: torch.Tensor          # (N,) int64: 0 for A, 1 for B
    positions: torch.Tensor         # (N,) int64, of each token in its example: 0, 1, 2 ...
    masked_positions: torch.Tensor  # (M,) int64, rows that are to be predicted, then zeros
    labels: torch.Tensor            # (M,) int64, the tokens that stood there, then IGNORED
    bounds: torch.Tensor            # (B + 2,) int32, each example's first row, its [CLS]; the row
                                    # after the last token; N
    pair_labels: torch.Tensor       # (B,) int64, as in Example
    lengths: torch.Tensor           # (B + 1,) int64, the differences of `bounds`; on the CPU always

    def to(self, device):
        """Returns the batch on another device; `lengths`, which are shapes, stay on the CPU."""
        *tensors, lengths = self
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), lengths)


class PretrainingData:
    """The examples of a phase; number i is a pure function of (seed, phase, i), i = 0, 1, 2 ...

    It comes from shard i mod S. Each document is cut into windows of about `seq_len` tokens,
    special symbols included; an epoch of a shard takes all its windows in an order of its own. The
    text of an example begins around the start of its window, which moves from epoch to epoch, with
    a sentence if it can.

    pairs: "nsp" (BERT, arXiv 1810.04805, section 3.1) cuts the text in two at the end of a
    sentence, if one ends inside; for half of the examples the second part is that of another
    document's text in the same shard. "sop" (ALBERT, arXiv 1909.11942, section 3.1) swaps the two
    parts for half of them. "none" leaves one text.

    `mask_fraction` of the tokens are chosen; of these 80 % become [MASK], 10 % a random token and
    10 % stay (BERT, appendix A.1). whole_words: all tokens of a word are chosen, or none; a word is
    what stands between spaces, with its punctuation (in BERT's own masks without).

    What is in a small shard is seen more often. Of few documents the shards are unequal: of 300 in
    8 shards the largest has about twice the text of the smallest, of 60 four times.

    Raises DataError where the folder holds no shards.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, pairs="nsp",
                 mask_fraction=0.15, whole_words=False):
        manifest = load_manifest(folder)
        names = shard_names(manifest["shards"])
        self.folder, self.names = Path(folder), names[:1] if held_out else names[1:]
        self.token_type, self.vocab_size = manifest["token_type"], manifest["vocab_size"]
        self.seq_len, self.pairs, self.mask_fraction = seq_len, pairs, mask_fraction
        self.body = seq_len - (2 if pairs == "none" else 3)      # without the special symbols
        # A stream of random numbers for each use (cuts; which tokens; their fate; random tokens):
        # from one alone, masks would follow the cuts
        self.seed = (seed, phase)
        self.keys = np.random.SeedSequence(self.seed).generate_state(4, np.uint64)
        self.shards, self.orders = {}, {}             # opened and shuffled when first needed
        self.begins_word = None                       # (V,) bool
        if whole_words:
            tokenizer, ids = load_tokenizer(self.folder / "tokenizer.model"), range(self.vocab_size)
            self.begins_word = np.char.startswith(tokenizer.id_to_piece([*ids]), "▁")

    def __getstate__(self):
        return {**self.__dict__, "shards": {}, "orders": {}}     # a worker maps the files itself

    def __getitem__(self, i):
        """Returns Example i, the same as in any batch."""
        tokens, segments, _, positions, labels, bounds, pair_labels, _ = self.arrays([i])
        length, masked = bounds[1], (labels != IGNORED).sum()
        return Example(tokens[:length], int(length - segments.sum()), positions[:masked],
                       labels[:masked], int(pair_labels[0]))

    def batch(self, indices):
        """Returns the Batch of a list of examples, the shortest first."""
        return Batch(*map(torch.from_numpy, self.arrays(indices)))

    def arrays(self, indices):
        """Returns the parts of the Batch of a list of examples as NumPy arrays, which go to another
        process faster than tensors do.

        N is rounded up to a multiple of 64 and M to one of 16: a few shapes instead of hundreds, as
        each new shape takes kernels and memory of its own (in bf16 1,280 MB after 400 steps, 315
        so). More would be computed for nothing: 64 for M costs 3 % of a small model's step.
        """
        layout, indices = self.layout(indices), np.asarray(indices)
        order = (layout @ [0, -1, 1, -1, 1, 0]).argsort(kind="stable")     # by tokens of A and B
        layout, indices = layout[order], indices[order]
        _, a, a_end, b, b_end, pair_labels = layout.T                              # (B,) each
        b_start = a_end - a + 2
        length = b_start + b_end - b + (self.pairs != "none")
        tokens = np.full((len(order), length[-1]), PAD)                            # (B, T)
        for row, end, (s, a, a_end, b, b_end, _) in zip(tokens, length, layout.tolist()):
            text = self.shard(s)[0]          # without pairs there is neither B nor its [SEP]
            row[:end] = np.concatenate([[CLS], text[a:a_end], [SEP], text[b:b_end], [SEP]])[:end]
        masked_positions, labels = self.mask(tokens, indices)
        real = np.arange(tokens.shape[1]) < length[:, None]                        # (B, T)
        example, positions = np.nonzero(real)                                      # (N,) each
        segments = (positions >= b_start[example]).astype(np.int64)
        masked_positions = (np.cumsum(real) - 1)[masked_positions]       # from (B, T) to rows
        extra, unused = (0, -len(positions) % 64), (0, -len(labels) % 16)
        lengths = np.append(length, extra[1])
        return (*(np.pad(part, extra) for part in (tokens[real], segments, positions)),
                np.pad(masked_positions, unused), np.pad(labels, unused, constant_values=IGNORED),
                np.append(0, np.cumsum(lengths)).astype(np.int32), pair_labels, lengths)

    def lengths(self, indices):
        """Returns (n,) how many tokens these examples have, special symbols included."""
        return self.layout(indices) @ [0, -1, 1, -1, 1, 0] + self.seq_len - self.body

    def layout(self, indices):
        """Returns (n, 6) int64, what examples are made of: shard, where A begins and ends, where B
        does, pair_label; begins and ends are offsets into the shard's tokens."""
        chances = uniform(np.asarray(indices)[:, None] * 5 + np.arange(5), self.keys[0])    # (n, 5)
        return np.array([self.cut(*self.locate(int(i), short, fraction), *chance)
                         for i, (short, fraction, *chance) in zip(indices, chances.tolist())])

    def locate(self, i, short, fraction):
        """Returns the text of example i: (shard, epoch, window, how many tokens it may have).
        short, fraction: random numbers in [0, 1).

        A turn is a place in the order of an epoch; windows are counted in the shard.
        """
        earlier, s = divmod(i, len(self.names))              # texts of this shard before this one
        epoch, turn = divmod(earlier, self.shard(s)[-1][-1])
        length = 2 + int(fraction * (self.body - 1)) if short < SHORT_FRACTION else self.body
        return s, epoch, int(self.order(s, epoch)[turn]), length

    def cut(self, s, epoch, window, length, place, replace, other):
        """Returns `layout`'s row of a text of `length` tokens at most; place, replace and other are
        random numbers in [0, 1).

        By `replace` half of the pairs are true: B is the second part of the text. In the others it
        is that of a window of another document, drawn by `other`: it begins as true ones do, and
        ends nearly so, or a model could tell them apart without reading. A cue is left in short
        texts: A may end amid a sentence where B does not begin so. "sop", "none": see the class.
        """
        start, middle, end, document, _ = self.halves(s, epoch, window, length, place)
        if self.pairs == "none":
            return s, start, end, end, end, IGNORED
        if replace >= 0.5:
            return s, start, middle, middle, end, 0
        if self.pairs == "sop":
            return s, middle, end, start, middle, 1
        windows = self.shard(s)[-1]
        own, after = windows[document], windows[document + 1]
        window = (after + int(other * (windows[-1] - after + own))) % windows[-1]
        _, b, _, _, last = self.halves(s, epoch, window, length, place)
        return s, start, middle, b, min(b + length - (middle - start), last), 1

    def halves(self, s, epoch, window, length, place):
        """Returns the text of a window in two parts: (where the first begins, where the second
        does, where it ends, the number of their document, where that ends).

        The text begins with the next sentence, if that is less than half a window away. It is cut
        where a sentence ends, `place` in [0, 1) tells at which; in the middle if none ends inside.
        """
        _, sentences, documents, windows = self.shard(s)
        document = bisect_right(windows, window) - 1
        first, last = documents[document], documents[document + 1]
        # The window's number in its document, and a shift in [-0.75, 0.25) for the epoch, at first
        # 0: multiples of the golden ratio spread evenly. In three epochs of four windows begin
        # early, since the last one of a document moves back to fit
        at = window + ((0.618 * epoch + 0.75) % 1 - 0.75 - windows[document])
        token = max(first, min(first + int(at * self.body), last - self.body))
        sentence = sentences[bisect_left(sentences, token)]
        start = sentence if sentence - token < self.body / 2 else token
        end = min(start + length, last)
        low, high = bisect_right(sentences, start), bisect_left(sentences, end)
        # A text that ends amid a sentence would show that it is swapped: the one before is its last
        if self.pairs == "sop" and (k := bisect_right(sentences, end) - 1) > low:
            high, end = k, sentences[k]
        middle = sentences[low + int(place * (high - low))] if low < high else (start + end) // 2
        return start, middle, end, document, last

    def mask(self, tokens, indices):
        """Masks `tokens` (B, T) of examples `indices` (B,) in place; returns (masked_positions,
        labels) of the whole batch, (M,) each, ascending.

        An example's tokens are put into a random order, of which the first are chosen: as many as
        make `mask_fraction` of A and B in the mean, but at least one token or word.
        """
        text = (tokens != PAD) & (tokens != CLS) & (tokens != SEP)                 # (B, T)
        counters = indices[:, None] * self.seq_len + np.arange(tokens.shape[1])    # (B, T)
        draws = uniform(counters, self.keys[1])
        spare = draws[:, 0]                  # of [CLS], which is never chosen
        if self.begins_word is not None:     # all tokens of a word draw what its first one does
            draws = np.take_along_axis(draws, self.word_starts(tokens, text), 1)
        draws = np.where(text, draws, 2.0)
        want = self.mask_fraction * text.sum(1)                                    # (B,)
        bound = np.take_along_axis(np.sort(draws), want.astype(np.int64)[:, None], 1)
        chosen, next_word = draws < bound, draws == bound                          # (B, T)
        # The word or token at `bound` is taken too by a chance that makes the mean right, which is
        # (want - before) / size, or if nothing is chosen yet
        before, size = chosen.sum(1), next_word.sum(1)                             # (B,)
        chosen |= next_word & ((spare * size < want - before) | (before == 0))[:, None]
        positions = np.flatnonzero(chosen)                                         # (M,)
        labels, counters = tokens.flat[positions], counters.flat[positions]
        fate, other = uniform(counters, self.keys[2]), uniform(counters, self.keys[3])
        other = len(SPECIALS) + (other * (self.vocab_size - len(SPECIALS))).astype(np.int64)
        tokens.flat[positions] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels))
        return positions, labels

    def word_starts(self, tokens, text):
        """Returns (B, T), the position at which the word of each token begins; a word of more than
        LONGEST_WORD tokens counts as several."""
        begins = self.begins_word[tokens] | ~text
        begins[:, 1:] |= ~text[:, :-1]       # the first token of a segment
        t = np.arange(tokens.shape[1])
        return t - (t - np.maximum.accumulate(np.where(begins, t, 0), axis=1)) % LONGEST_WORD

    def shard(self, s):
        """Returns shard s, mapped at its first use: (its tokens, where sentences begin, where
        documents do, how many windows come before each document)."""
        if s not in self.shards:
            tokens, sentences, documents = (
                np.asarray(np.memmap(self.folder / f"{self.names[s]}.{array}", kind, "r"))
                for array, kind in zip(ARRAYS, (self.token_type, np.int64, np.int64)))
            windows = np.cumsum(-(-np.diff(documents, prepend=0) // self.body))
            # Memoryviews give Python's own integers, which bisect compares faster than NumPy's
            self.shards[s] = tokens, *map(memoryview, (sentences, documents, windows))
        return self.shards[s]

    def order(self, s, epoch):
        """Returns (windows,) uint32, the order in which an epoch goes through shard s."""
        if self.orders.get(s, (None,))[0] != epoch:
            rng, windows = np.random.default_rng((*self.seed, s, epoch)), self.shard(s)[-1][-1]
            self.orders[s] = epoch, rng.permutation(windows).astype(np.uint32)
        return self.orders[s][1]


def uniform(counters, key):
    """Returns a random float64 in [0, 1) for each counter, a function of it and the key alone
    (SplitMix64; Steele, Lea, Flood 2014): example i needs nothing of those before it."""
    x = np.asarray(counters, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0 ** -53


# ----- Batches: dealt to the ranks, made ahead in worker processes -----

def micro_batches(step, global_batch, micro_batch, rank, size, lengths=None):
    """Returns the micro-batches of rank `rank` of `size` in a step, each a list of indices.

    The step has the examples step * global_batch up to (step + 1) * global_batch; a rank takes
    those that are `rank` modulo `size`, or by length (below). Nothing has to divide: a rank may
    have one example more than another, and its last micro-batch may be smaller.

    lengths: a function of indices (n,), to deal the examples by length instead of by number:
    sorted, then to the ranks in snake order, so that each has about as many tokens; a micro-batch
    takes neighbours, since attention computes equal lengths together. Lengths follow from indices:
    ranks need not talk. (Presorting: Kim et al., arXiv 2402.02447; Zeng et al., 2208.08124.)
    """
    indices = np.arange(step * global_batch, (step + 1) * global_batch)
    owner = indices % size
    if lengths is not None:
        # The longest last, since the last backward pass hides the all-reduce; but dealt from there
        # on, so that where the ranks do not divide the step a short example is left over
        indices = indices[np.argsort(lengths(indices), kind="stable")]
        turn, place = np.divmod(np.arange(global_batch)[::-1], size)
        owner = np.where(turn % 2, size - 1 - place, place)
    mine = indices[owner == rank].tolist()
    return [mine[k:k + micro_batch] for k in range(0, len(mine), micro_batch)]


def loader(dataset, steps, workers=1, pin_memory=False, deal=list):
    """Yields the list of Batches of each step, in order, made ahead in `workers` processes (0: in
    this one). Each of `steps` is a list of lists of indices, or what `deal`, called in the worker,
    makes one of: a step's number, where dealing takes long (10 us an example, balanced)."""
    tensor = (lambda x: torch.from_numpy(x).pin_memory()) if pin_memory else torch.from_numpy
    for step in in_workers(functools.partial(make_step, dataset, deal), steps, workers):
        yield [Batch(*map(tensor, arrays)) for arrays in step]


def make_step(dataset, deal, step):
    """Returns the arrays of a step's micro-batches."""
    return [dataset.arrays(indices) for indices in deal(step)]


def in_workers(function, items, workers):
    """Yields function(item) for each item, in order, computed in `workers` processes at most two
    items each ahead; in this process if there are none. Raises DataError where a worker died or
    could not read a file; any other exception of a worker comes with its traceback there."""
    if workers:
        start_server()
    try:
        # A DataLoader wants a dataset; np.s_[item] is item: so what it yields is function(item)
        results = iter(torch.utils.data.DataLoader(
            np.s_, None, sampler=items, collate_fn=function, worker_init_fn=set_up_worker,
            num_workers=workers, multiprocessing_context="forkserver" if workers else None))
        if workers:
            # A worker that is killed amid a message would leave us reading for ever. Without our
            # end for writing the pipe ends with the last worker, and they all end with the first
            results._worker_result_queue._writer.close()
            threading.Thread(target=end_together, args=[results._workers]).start()
        yield from results
    except (RuntimeError, EOFError, OSError) as error:
        if re.search(r"EOFError|DataLoader worker \(pid|end of file during message", repr(error)):
            raise DataError("a worker process died (memory?); set --workers lower") from None
        if isinstance(error, OSError):  # in a worker: the last line of the traceback has the path
            raise DataError(str(error).rstrip().rpartition("\n")[2]) from None
        raise


def end_together(workers):
    """Waits until one of these processes, or this program, has ended, then ends all of them: before
    Python, at its own end, sends them a SIGTERM, which they ignore, and waits."""
    ends = [worker.sentinel for worker in workers]
    while threading.main_thread().is_alive() and not connection.wait(ends, 0.2):
        pass
    for worker in workers:
        worker.kill()


def start_server():
    """Starts the server that worker processes are forked from, if there is none: a plain fork can
    hang (it copies locks that other threads hold), and a spawn imports torch anew each time."""
    forkserver.set_forkserver_preload(["torch", "numpy", "sentencepiece"])
    # Batch systems and torchrun send SIGTERM, and a terminal Ctrl-C or SIGHUP, to all processes of
    # a run. The parent still needs its workers then, to finish the step and save it. They inherit
    # what the server that forks them ignores from its beginning.
    ignored = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ignored}
    forkserver.ensure_running()
    for signum, handler in before.items():
        signal.signal(signum, handler)


def set_up_worker(_):
    """Makes a worker process leave SIGTERM to its parent, and end with it, however that ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)        # over the handler that torch has set
    threading.Thread(target=lambda: parent_process().join() or os._exit(1), daemon=True).start()


# ----- Preparing: corpus -> documents -> sentences -> tokenizer -> shards -> manifest -----

BLOCK = 1 << 20             # characters: of text that is encoded at a time, of a document at most
SAMPLE = 32                 # blocks that a tokenizer is trained on, at most: of a small part of a
                            # large corpus, such as another script, it may see nothing
GROUP = 32                  # blocks that are written at a time
LONGEST_SENTENCE = 8192     # characters; SentencePiece takes memory in proportion to the longest


def prepare(corpus, folder, vocab_size=8192, shards=8, cased=False, held_out=0.01, tokenizer=None,
            workers=None, split=None):
    """Writes a folder of shards; returns its manifest (dict). Nothing half-written takes its name.

    corpus: documents, each one string, that can be iterated again and again; it is read twice, to
    survey it and to encode it, then in `workers` processes (default: one a core, none for less than
    32 MB). tokenizer: a path; without one a model of `vocab_size` pieces is trained. held_out: the
    fraction of the documents that goes to a shard of its own, but so many that one can measure:
    about 100 documents, or half a megabyte if that is fewer, at least 8, at most half. split:
    "lines" takes a line as a sentence, "prose" joins a document's lines and splits at sentence
    ends; by default the first thousand lines decide. The same prepared already is left as it is.
    Raises DataError if the folder holds something else or the text is of no use.
    """
    folder, model = Path(os.path.realpath(folder)), tokenizer and Path(tokenizer).read_bytes()
    # A mount point cannot be replaced by a folder, either
    found = load_manifest(folder) if any(folder.glob("*")) or folder.is_mount() else None
    vocab_size = load_tokenizer(tokenizer).get_piece_size() if model else vocab_size
    start_server()                      # which imports torch while the corpus is surveyed
    prose = split == "prose" if split else is_prose(corpus)
    identity, sample = survey(corpus)
    settings = {"version": VERSION, "corpus": identity, "vocab_size": vocab_size, "cased": cased,
                "shards": shards, "held_out": held_out, "prose": prose,
                "tokenizer": model and hashlib.sha256(model).hexdigest()}
    if found:
        if differ := ", ".join(key for key in settings if found[key] != settings[key]):
            raise DataError(f"{folder} was prepared with another {differ}; remove it first")
        return found
    n, size = identity["documents"], identity["bytes"]
    held_out = min(max(held_out, min(100, max(8, n * 5e5 / size)) / n), 0.5)
    if workers is None:                 # to start them takes seconds
        workers = os.cpu_count() if size > 32 * BLOCK else 0
    with replaced(folder) as temporary:
        if not model:
            sentences = (s for block in sample for d in block for s in sentences_in(d, prose))
            model = train_tokenizer(sentences, vocab_size, cased)
        (temporary / "tokenizer.model").write_bytes(model)
        tokenizer = load_tokenizer(temporary / "tokenizer.model")
        encoder = functools.partial(encode, tokenizer, prose, held_out, shards)
        counts = write_shards(in_workers(encoder, blocks(corpus, n), workers), temporary, settings)
        files = {path.name: {"sha256": sha256_of(path)} for path in sorted(temporary.iterdir())}
        manifest = {**settings, **counts, "files": files}
        manifest["sha256"] = manifest_digest(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def survey(corpus):
    """Returns (the corpus's identity: documents, bytes, sha256; SAMPLE blocks drawn at random).

    Reads everything once, so that bad input is found before the long part begins.
    """
    digest, documents, size, sample, rng = hashlib.sha256(), 0, 0, [], np.random.default_rng(0)
    for number, block in enumerate(blocks(corpus)):
        text = "".join(document + "\n\n" for document in block).encode()
        digest.update(text)
        documents, size = documents + len(block), size + len(text)
        # Reservoir sampling: each block has the same chance, however many are still to come
        place = number if number < SAMPLE else rng.integers(number + 1)
        if place < SAMPLE:
            sample[place:place + 1] = [block]
    if not documents:
        raise DataError("there is no text in the corpus")
    return {"documents": documents, "bytes": size, "sha256": digest.hexdigest()}, sample


def blocks(corpus, total=None):
    """Yields lists of documents, about a megabyte of text each, and shows how many of `total`
    documents it has read."""
    bar = tqdm(corpus, "text", total, unit=" documents", leave=False, disable=None)
    documents, again = itertools.tee(bar)
    ends = itertools.accumulate(map(len, again))
    # A document belongs to the megabyte of the corpus in which it ends
    for _, block in itertools.groupby(documents, lambda _: next(ends) // BLOCK):
        yield list(block)


@contextlib.contextmanager
def replaced(folder):
    """Yields a temporary folder beside `folder` that takes its name at the end, if no exception
    comes; removes what a run that was killed on this machine left of its own."""
    mine = f"{folder.name}.partial-{os.uname().nodename}@"
    temporary = folder.with_name(f"{mine}{os.getpid()}")
    for rest in folder.parent.glob(f"{mine}*") if os.path.exists("/proc/self") else ():
        if rest == temporary or not os.path.exists(f"/proc/{rest.name.removeprefix(mine)}"):
            shutil.rmtree(rest, ignore_errors=True)     # another process may do the same
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            os.replace(temporary, folder)
        except OSError:                 # another process did the same work and was faster
            if load_manifest(folder) != load_manifest(temporary):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ----- Corpora: files -> documents, each one string -----

def open_corpus(paths):
    """Returns a corpus for `prepare`: the documents of these files and folders, or, without any,
    this machine's documentation."""
    return TextFiles(paths) if paths else machine_documentation()


def default_folder(paths):
    """Returns the folder (Path) for the shards of a corpus, named after its first path."""
    if not paths:
        return Path("shards/docs")
    name = re.sub(r"\W+", "-", Path(os.path.abspath(paths[0])).name.split(".")[0]).strip("-")
    return Path("shards", name if name not in ("", "docs") else "corpus")


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
            if path.stat() and not (path.is_file() or path.is_dir()):   # stat: is it there at all?
                raise DataError(f"{path} is a pipe or a device; text is read twice: give a file")
            inside = [file for file in sorted(path.rglob("*"))
                      if file.is_file() and "/." not in f"/{file.relative_to(path)}"]
            self.files += inside if path.is_dir() else [path]

    def __iter__(self):
        for path in self.files:
            with self.OPENERS.get(path.suffix, open)(path, "rb") as file:
                # Its lines come faster than gzip's, bz2's and lzma's own
                yield from documents_in(lines_in(path, io.BufferedReader(file)))


def documents_in(lines):
    """Yields documents, each one string: lines up to a blank one; a long one as several."""
    for text, group in itertools.groupby(lines, key=bool):
        # Some files have no blank line at all; 10,000 lines at a time fit in any memory
        while text and (document := "\n".join(itertools.islice(group, 10_000))):
            yield from cut_text(document, BLOCK)


def lines_in(path, file):
    """Yields the lines of an open binary file without the white space around them; of JSON records
    those of the text, then a blank one. Raises DataError, with file and line, if it cannot."""
    number, is_json = 0, None
    try:
        for number, data in enumerate(file, 1):
            line = data.decode().lstrip("\ufeff").strip()        # no byte order mark
            if "\0" in line:
                raise ValueError("a NUL byte")
            if is_json is None and line:
                # Not "{" alone: templates and TeX files begin with it, too. An array of JSON, and
                # wikiextractor's <doc id=...> without --json, fail below instead of passing as text
                is_json = bool(re.match(r'\{\s*("|\}|$)|\[\s*(\{|$)|<doc ', line))
            if is_json and line:
                # "replace": half of a surrogate pair cannot be written as UTF-8
                text = (json.loads(line)["text"] or "").encode("utf-8", "replace").decode()
                yield from filter(None, map(str.strip, text.split("\n")))
                line = ""
            yield line
    except Exception as error:          # gzip, bz2, lzma, JSON and UTF-8 each have their own
        raise DataError(f"{path}, line {number}: {type(error).__name__}: {error}; a file is UTF-8 "
                        "text or has JSON with a `text` a line (wikiextractor --json)") from None


def cut_text(text, n):
    """Returns a text in parts of at most n characters, cut at white space if there is any."""
    return [text] if len(text) <= n else re.findall(
        rf"(?s)\S.{{,{n - 1}}}(?<=\S)(?!\S)|\S{{1,{n}}}", text)


# ----- Documents -> sentences -----

# A sentence ends at a full stop, its closing quotes, white space and something that can open a
# sentence; but not after an abbreviation, nor after one letter: "J. Smith", "the U.S. Army". Each
# look back (?<! has one width, so there is one for each length of abbreviation.
SENTENCE_END = re.compile(r"""[.!?…](?<!\b[A-Za-z]\.)
    (?<!\b(?:Mr|Ms|Dr|St|Lt|Jr|Sr|cf|vs|ca|No|Eq|eq|Ch|ch|ed|pp|al|Co|Mt)\.)
    (?<!\b(?:Mrs|Gen|Col|Sgt|Rev|Hon|Sen|Rep|Gov|e\.g|i\.e|Nos|Vol|Fig|fig|Eqs|Sec|Inc|Ltd)\.)
    (?<!\b(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\.)
    (?<!\b(?:Prof|Capt|Pres|Ph\.D|Vols|Figs|figs|Corp|Bros|Sept)\.)
    ["'”’)\]]*\s+(?=["'“‘(\[`]*[A-Z0-9À-ÖØ-ÞΑ-ΩА-Я])""", re.VERBOSE)


def split_sentences(text):
    """Returns the sentences of a piece of prose (str), white space around them removed. Where a
    script has no capitals, or other ones than SENTENCE_END knows, a paragraph is one sentence."""
    cuts = [0, *(end.end() for end in SENTENCE_END.finditer(text)), len(text)]
    return [*filter(None, (text[a:b].strip() for a, b in itertools.pairwise(cuts)))]


def sentences_in(document, prose):
    """Returns the sentences of a document; none is longer than LONGEST_SENTENCE."""
    sentences = split_sentences(document.replace("\n", " ")) if prose else document.split("\n")
    return [part for sentence in sentences for part in cut_text(sentence, LONGEST_SENTENCE)]


def is_prose(corpus):
    """Returns True if a corpus is prose (wrapped or paragraphs), not a sentence a line: its first
    thousand lines have sentence ends inside, or break in mid-sentence (no full stop, and the next
    line continues in lower case)."""
    lines = [*itertools.islice((line for text in corpus for line in f"{text}\n".split("\n")), 1000)]
    inside = sum(len(split_sentences(line[:4096])) > 1 for line in lines)
    broken = sum(line[-1:] not in ".!?…\"'”’):;" and following[:1].islower()
                 for line, following in itertools.pairwise(lines))
    return inside + broken > 0.2 * sum(map(bool, lines))


# ----- Sentences -> tokens -> shards -----

def train_tokenizer(sentences, vocab_size, cased=False):
    """Returns a trained SentencePiece unigram model (bytes) of `vocab_size` pieces.

    The five special symbols have ids 0 to 4; no text can spell them. Raises DataError if the text
    is too small.
    """
    model = io.BytesIO()
    try:
        # A longer sentence is left out without a word (bytes; a character has at most 4); another
        # number of threads finds another vocabulary
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=model, vocab_size=vocab_size,
            normalization_rule_name="nmt_nfkc" if cased else "nmt_nfkc_cf", minloglevel=2,
            pad_id=PAD, pad_piece="[PAD]", unk_id=UNK, unk_piece="[UNK]", bos_id=-1, eos_id=-1,
            control_symbols=SPECIALS[CLS:], max_sentence_length=4 * LONGEST_SENTENCE, num_threads=4)
    except RuntimeError as error:       # it also names a flag of a program of its own
        said = str(error).rpartition("] ")[2].partition(" or decrease")[0]
        raise DataError(f"--vocab-size {vocab_size}: {said}") from None
    return model.getvalue()


def load_tokenizer(path):
    """Returns the SentencePieceProcessor of a path; raises DataError if data.py has not made it."""
    with contextlib.suppress(RuntimeError, IndexError):
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        if tokenizer.id_to_piece([*range(len(SPECIALS))]) == SPECIALS:
            return tokenizer
    raise DataError(f"{path} is not a tokenizer.model that data.py has made; take one that is")


def encode(tokenizer, prose, held_out, shards, documents):
    """Returns {shard: (token ids, tokens a sentence, tokens a document)} of a block of documents.
    Shard 0 is the held-out one; documents of less than two tokens are left out."""
    texts = [sentences_in(document, prose) for document in documents]
    ids = iter(tokenizer.encode([sentence for text in texts for sentence in text], num_threads=1))
    parts = {}
    for document, text in zip(documents, texts):
        sentences = [*filter(None, itertools.islice(ids, len(text)))]
        if (size := sum(map(len, sentences))) >= 2:      # else there is no A and B
            # Dealt by content: the same document twice is never both trained on and held out
            draw = zlib.crc32(document.encode())
            shard = 0 if draw < held_out * 2 ** 32 else 1 + draw % shards
            own, sizes = parts.setdefault(shard, ([], []))
            own += sentences
            sizes.append(size)
    kind = np.uint16 if tokenizer.get_piece_size() <= 1 << 16 else np.uint32
    return {shard: (np.fromiter(itertools.chain.from_iterable(own), kind, sum(sizes)),
                    np.array(list(map(len, own))), np.array(sizes))
            for shard, (own, sizes) in parts.items()}


def write_shards(encoded, folder, settings):
    """Writes the arrays of all shards from what `encode` returns, block after block; returns what
    the manifest says of them."""
    names, unigrams = shard_names(settings["shards"]), np.zeros(settings["vocab_size"], np.int64)
    totals = np.zeros((len(names), len(ARRAYS)), np.int64)
    # Groups of blocks: to open all files for each would take longer than to encode it
    while group := list(itertools.islice(encoded, GROUP)):
        for shard, name in enumerate(names):
            if parts := [block[shard] for block in group if shard in block]:
                tokens, sentences, documents = map(np.concatenate, zip(*parts))
                append(folder / name, totals[shard], tokens, sentences, documents)
                unigrams += np.bincount(tokens, minlength=len(unigrams)) if shard else 0
    if totals[:, 2].min() < 2:
        raise DataError("too few documents: part them by blank lines, or lower data.py's --shards")
    unigrams.tofile(folder / "unigrams")
    return {"token_type": tokens.dtype.name, "unknown_tokens": int(unigrams[UNK]),
            "heldout": dict(zip(ARRAYS, totals[0].tolist())),
            "train": dict(zip(ARRAYS, totals[1:].sum(0).tolist()))}


def append(path, totals, tokens, sentences, documents):
    """Appends documents to a shard: their tokens, and how many each sentence and document has.
    totals (3,): the tokens, sentences and documents of the shard, which are added to."""
    first = np.zeros(0 if totals[0] else 1, np.int64)            # where the first of all begins
    ends = [np.append(first, totals[0] + np.cumsum(counts)) for counts in (sentences, documents)]
    for array, values in zip(ARRAYS, (tokens, *ends)):
        with open(f"{path}.{array}", "ab") as file:
            values.tofile(file)
    totals += len(tokens), len(sentences), len(documents)


# ----- Prepared shards: what is there, and whether it is whole -----

def load_manifest(folder):
    """Returns the manifest of a folder of shards (dict); raises DataError if there is none, or one
    that is not as it was written."""
    path = Path(folder) / "manifest.json"
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        manifest = json.loads(path.read_text())
        if manifest["version"] == VERSION and manifest["sha256"] == manifest_digest(manifest):
            return manifest
    raise DataError(f"{path} is missing, damaged or not of format {VERSION}; prepare a new folder")


def manifest_digest(manifest):
    """Returns the SHA-256 of all that a manifest says but for its own digest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def unigram_losses(folder):
    """Returns (vocabulary,) float64: the loss, in nats, of each token for a predictor that knows
    nothing but how often the training text has it (with one added, so that none is infinite)."""
    counts = np.fromfile(Path(folder) / "unigrams", np.int64) + 1
    return -np.log(counts / counts.sum())


def shard_names(shards):
    """Returns the names of the shard that training never reads and of those to train on."""
    return ["heldout"] + [f"train-{s:05d}" for s in range(shards)]


def files_of(manifest, rank, size):
    """Returns the names of the files that rank `rank` of `size` reads: its own shards, the held-out
    one, the tokenizer and the counts of tokens. rank None: what all ranks read."""
    # Example i is of shard i mod `shards` and of rank i mod `size`: a rank meets a shard in some i
    # if and only if the two agree modulo the greatest common divisor
    common = np.gcd(manifest["shards"], size)
    return [name for name in manifest["files"]
            if not name.startswith("train")
            or rank is not None and (int(name[6:].split(".")[0]) - rank) % common == 0]


def node_files(folder, node, nodes, ranks_per_node=1):
    """Returns the names of the files that the ranks of a node read, the manifest among them; raises
    DataError where there is no such node."""
    if node >= nodes:
        raise DataError(f"--node-rank {node} of --nodes {nodes}: they count from 0")
    manifest, first = load_manifest(folder), node * ranks_per_node
    return ["manifest.json", *sorted({
        name for rank in range(first, first + ranks_per_node)
        for name in files_of(manifest, rank, nodes * ranks_per_node)})]


def verify(folder, rank=0, size=1, everything=False):
    """Returns the manifest after checking the digests of what rank `rank` of `size` reads, or of
    all files. Raises DataError that names the first file that is missing or damaged."""
    manifest = load_manifest(folder)
    for name in manifest["files"] if everything else files_of(manifest, rank, size):
        path = Path(folder) / name
        if not path.exists():
            raise DataError(f"{path} is not on {os.uname().nodename}; rank {rank or 0} of {size}"
                            " reads it: is its --node_rank that of these shards?")
        if sha256_of(path) != manifest["files"][name]["sha256"]:
            raise DataError(f"{path} is damaged; copy it again or prepare the folder again")
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
    texts, seen, documents = [], set(), []
    with contextlib.suppress(ImportError):            # missing in some embedded Pythons
        from pydoc_data.topics import topics
        texts += topics.values()
    for root in (Path(module.__file__).parent for module in (os, np, torch)):
        for file in sorted(root.rglob("*.py")):
            if not {"site-packages", "test", "tests"} & set(file.relative_to(root).parts):
                texts += re.findall(r'(?s)"""(.*?)"""', file.read_text("utf-8", "ignore"))
    for text in texts:
        fresh = [s for s in english_sentences(text) if s not in seen and not seen.add(s)]
        documents += ["\n".join(fresh)] if len(fresh) >= 2 else []
    return documents


def english_sentences(text):
    """Returns the English sentences of a docstring: no code, tables, markup or short fragments."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^\s*(>>>|\.\.|\+--|\||==|--)", paragraph, re.MULTILINE):
            paragraph = re.sub(r"\s[-*]\s+(?=[A-Z`])", ". ", " ".join(paragraph.split()))   # lists
            paragraph = re.sub(r":\w+(?::\w+)*:(?=`)|[`*~]", "", paragraph)    # :class:`~torch.T`
            sentences += split_sentences(paragraph)
    return [s for s in sentences if s.count(" ") >= 5 and not re.search(r">>>|::|__|[<{}|\\]", s)
            and sum(map(str.isalpha, s)) + s.count(" ") >= 0.85 * len(s)]


# ----- The program -----

def describe(manifest):
    """Returns a report on prepared shards, two lines of text."""
    corpus, train, heldout = (manifest[part] for part in ("corpus", "train", "heldout"))
    tokens, sentences, documents = (train[array] + heldout[array] for array in ARRAYS)
    return (f"{documents:,} of {corpus['documents']:,} documents have two tokens or more; "
            f"{corpus['bytes'] / 1e6:.1f} MB; {sentences:,} sentences\n"
            f"{tokens:,} tokens, {tokens / documents:.0f} a document, {manifest['vocab_size']:,} "
            f"pieces, {manifest['unknown_tokens'] / train['tokens']:.2%} [UNK]; "
            f"{manifest['shards']} shards, {heldout['documents']:,} documents held out")


def show(folder):
    """Returns `describe` and three held-out examples as words, after each chosen token what stood
    there; lines of text."""
    report, tokenizer = describe(verify(folder, None)), load_tokenizer(f"{folder}/tokenizer.model")
    for example in itertools.islice(PretrainingData(folder, 64, held_out=True), 3):
        words = tokenizer.id_to_piece(example.tokens.tolist())
        for position, label in zip(example.masked_positions, example.labels.tolist()):
            words[position] += f"({tokenizer.id_to_piece(label)})"
        report += f"\n\nB follows A: {not example.pair_label}\n    {''.join(words)}"
    return report.replace("▁", " ")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed once a node."""

    def error(self, message):
        # A node has its own command line
        self.exit(2, f"{self.prog}: {message}\n" * (os.environ.get("LOCAL_RANK", "0") == "0"))


def number(kind, low, high=float("inf")):
    """Returns what argparse needs to know of a flag that takes a number in [low, high)."""
    def number(text):
        if not low <= (value := kind(text)) < high:          # so that NaN is refused as well
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}), not {text}")
        return value
    return {"type": number, "metavar": "N" if kind is int else "X"}


def main():
    """Runs the program; what cannot be used is one line on stderr and status 1, 2 for a flag."""
    parser = Parser(description="Prepare text for BERT.", usage=argparse.SUPPRESS)
    add = parser.add_argument_group("text in, shards out").add_argument
    add("corpus", nargs="*", help="read these files and folders; default: this machine's docs")
    add("--out", metavar="DIR", help="write this folder; default: shards/ and the corpus's name")
    add("--shards", **number(int, 1, 10 ** 6), default=8, help="deal to N shards; default: 8")
    add("--held-out", **number(float, 0, 0.5), default=0.01, help="hold out >= X; default: 0.01")
    add("--sentences", choices=["lines", "prose"], help="one a line or not; default: as they look")
    add("--workers", **number(int, 0, 1024), help="encode in N processes; default: one a core")
    add("--cased", action="store_true", help="keep upper case in a new tokenizer")
    add = parser.add_argument_group("tokenizer").add_mutually_exclusive_group().add_argument
    add("--vocab-size", **number(int, 16, 10 ** 9), default=8192, help="of N pieces; default: 8192")
    add("--tokenizer", metavar="FILE", help="take this tokenizer.model instead")
    add = parser.add_argument_group("shards that are there").add_argument
    add("--show", metavar="DIR", help="report on them and show three examples")
    add("--list", metavar="DIR", help="print the files that a node reads, for rsync --files-from")
    add("--node-rank", **number(int, 0), default=0, help="node N, as torchrun counts; default: 0")
    add("--nodes", **number(int, 1), default=1, help="of N nodes")
    add("--ranks-per-node", **number(int, 1), default=1, help="of N ranks each")
    args = parser.parse_args()
    out = args.show or args.list or args.out or default_folder(args.corpus)
    try:
        if args.show:
            print(show(out))
        elif args.list:
            print(*node_files(out, args.node_rank, args.nodes, args.ranks_per_node), sep="\n")
        else:
            prepare(open_corpus(args.corpus), out, args.vocab_size, args.shards, args.cased,
                    args.held_out, args.tokenizer, args.workers, args.sentences)
            print(f"{show(out)}\n\n{out} is ready")
    except (DataError, KeyboardInterrupt) as error:
        sys.exit(f"data.py: {str(error) or 'stopped; nothing is left of it'}")
    except OSError as error:                           # that of a full disk does not name the file
        sys.exit(f"data.py: {error.filename or out}: {error.strerror or error}")


if __name__ == "__main__":
    main()
