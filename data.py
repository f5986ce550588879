"""Makes batches of masked text from shards on disk; the second half makes the shards from text.

    python data.py my.txt --out shards/my
    python data.py corpus/*.txt.gz --out shards/wiki --vocab-size 30522 --shards 256

A token is a piece of a word, from a vocabulary that the SentencePiece library learns from the text.
A shard is one part of the documents. A folder of shards holds these files, the last two for each
shard; the arrays have no header:

    tokenizer.model  the SentencePiece model
    manifest.json    settings, counts and the checksums of the files
    unigrams         float64, how often each token occurs in the training text
    NAME.tokens      uint16, every token of the shard, no [CLS] and [SEP]
    NAME.documents   int64, where each document begins in `tokens`, and where the last one ends

Masks and pairs are made on the fly, so all phases read the same shards, at any sequence length.
"""
import argparse
import bz2
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import heapq
import io
import json
import lzma
import math
import mmap
import os
import random
import re
import string
import sys
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
IGNORED = -100              # torch's cross-entropy skips this label
SHORT_FRACTION = 0.10       # the fraction of examples with a random length, to make some short
GOLDEN = (5 ** 0.5 - 1) / 2     # 0.618..., the golden ratio minus 1, see PretrainingData
FORMAT = 2                  # part of a folder's digest. Raise it when the meaning of a file
                            # changes, so that old folders are refused


class DataError(ValueError):
    """Unusable input or shards; the message says which file, why and what to do."""


# ----- Examples: (seed, phase, i) -> one or two texts with masks -----

@dataclasses.dataclass
class Batch:
    """A micro-batch: the tokens of its examples one after another, each token a row, with padding
    only at the end. B examples have n rows, m of them masked, that is, to be predicted; with
    padding, N and M. Here, B = 3 examples have 5, 5 and 8 tokens, so n = 18 and N = 64:

        rows        0 ... 4 | 5 ... 9 | 10 ... 17 | 18 ... 63
                    [CLS] ..| [CLS] ..| [CLS] ..  | padding
        bounds      0         5         10          18          64
        lengths     5         5         8           46

    The last example is a pair of segments, A and B:

        rows         10  11 12 13  14  15 16  17
        tokens    [CLS]   A  A  A [SEP] B  B [SEP]
        segments      0   0  0  0   0   1  1   1
        positions     0   1  2  3   4   5  6   7

    `bounds` is the running sum of `lengths`. The CPU needs the lengths, to decide shapes; the
    model's device needs the bounds, to find the [CLS] rows and for FlashAttention, a fast GPU
    routine for attention.

    N is a multiple of 64 and M of 16, so that there are few shapes, not hundreds: GPU libraries
    choose a kernel and keep memory for each new shape. M is 0 if a small batch has no masked token.

    The fields are NumPy arrays until `to` turns them into tensors.
    """
    tokens: np.ndarray              # (N,) int64; the examples are sorted by length
    segments: np.ndarray            # (N,) int64, 0 in A, 1 in B
    positions: np.ndarray           # (N,) int64, each token's index in its example: 0, 1, 2 ...
    masked_rows: np.ndarray         # (M,) int64, the rows to predict, then zeros
    labels: dict                    # of each task; labels of IGNORED, -100, do not count:
                                    # "mlm": (M,) int64, the original tokens of masked_rows
                                    # "nsp": (B,) int64, 0 if segment B really follows A, 1 if not;
                                    # absent without pairs
    bounds: np.ndarray              # (B + 2,) int32, as FlashAttention requires: the first row of
                                    # each example and of the padding, then N
    lengths: np.ndarray             # (B + 1,) int64, the rows of each example and of the padding

    def to(self, device):
        """Returns the batch as tensors on a device; `lengths`, which decides shapes, stays on the
        CPU."""
        def move(value):
            if isinstance(value, dict):
                return {name: move(part) for name, part in value.items()}
            # non_blocking: the copy joins the GPU's queue and the CPU goes on; for arrays of more
            # than 64 KB the CPU waits.
            return torch.from_numpy(value).to(device, non_blocking=True)

        fields = dict(vars(self))
        lengths = torch.from_numpy(fields.pop("lengths"))
        return Batch(**move(fields), lengths=lengths)


class Shard(NamedTuple):
    """A memory-mapped shard: only the parts that are read are loaded."""
    tokens: np.ndarray      # every token
    documents: np.ndarray   # where each document begins in `tokens`, and where the last one ends


def open_shard(path):
    """Returns the Shard in the files PATH.tokens and PATH.documents."""
    return Shard(map_file(f"{path}.tokens", np.uint16), map_file(f"{path}.documents", np.int64))


def map_file(path, dtype):
    """Returns the array in a file, mapped into memory."""
    with open(path, "rb") as file:
        # Private, since some network disks (FUSE) refuse shared maps; for reading alone, since
        # Linux refuses maps for writing that are larger than all memory and swap.
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    return np.frombuffer(memory, dtype)


class Text(NamedTuple):
    """A stretch of a document, in two parts. The fields are offsets into the shard's tokens."""
    start: int              # where the first part begins
    middle: int             # where the first part ends and the second begins
    end: int                # where the second part ends
    document: int           # where the document begins
    document_end: int       # where the document ends


class Spans(NamedTuple):
    """The shard, segments and label of an example; `a` to `b_end` are offsets into the shard's
    tokens."""
    index: int              # i, the number of the example
    shard: int              # the number of the shard
    a: int                  # where segment A begins
    a_end: int              # where A ends
    b: int                  # where segment B begins
    b_end: int              # where B ends; equal to `b` without pairs
    pair_label: int         # 0 if B really follows A, 1 if not, IGNORED without pairs


# Sentences are found in the tokens themselves. A piece is the text of a token; SentencePiece writes
# a space as "▁". A sentence ends where a piece such as ".", "?" or '."' is followed by a piece that
# begins a word, such as "▁The".
# The marks are European, Chinese and Japanese, Urdu, Arabic, Armenian, Hindi and Bengali, Khmer,
# Burmese, Tibetan, Ethiopic. ";" ends Greek questions, and cuts other texts, too. `blocks` has
# already replaced "…" by "...". German closes quotations with “, which opens them in Chinese, so
# German is cut before it.
SENTENCE_END = re.compile("[.!?;。۔؟։।॥។៕။།༎።፧][\"'”’»)\\]」』]*$")
# In scripts without spaces any letter (\w) can follow a mark: Thai, Lao, Tibetan, Burmese; Khmer;
# Japanese, Chinese. Thai uses few marks, but does have "?" and "!".
SENTENCE_BEGIN = re.compile(r"▁|[“「『《]|(?=\w)[\u0e00-\u109f\u1780-\u17ff\u3040-\u9fff]")


def uniform(counters, key):
    """Returns a random float64 in [0, 1) for each counter. The number depends on the counter and
    the key alone, so example i needs nothing from earlier examples.

    The numbers are SplitMix64 hashes (Steele, Lea, Flood 2014), whose constants and shifts mix all
    bits of the counter. A NumPy generator for each example would make batches take 1.5 to 2
    times as long.
    """
    # uint64 arithmetic is modulo 2^64.
    x = np.asarray(counters, np.uint64) * 0x9E3779B97F4A7C15 + key
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11) * 2.0 ** -53           # the upper 53 bits, which float64 can hold


def pad(values, multiple, fill=0):
    """Returns an array (n,), extended with `fill` until `multiple` divides its length."""
    return np.append(values, np.full(-len(values) % multiple, fill, values.dtype))


class PretrainingData:
    """The examples of a phase, numbered i = 0, 1, 2 ... An example depends on seed, phase and i,
    the shards and the other arguments alone: any rank can make it, at any time.

    With S shards, example i is example k = i // S of shard i modulo S. Its text surrounds the token
    at the fraction

        (k * 0.618... + walk_start) modulo 1        GOLDEN, and a random number

    of the shard. With walk_start 0.3, the fractions are 0.30, 0.92, 0.54, 0.15, 0.77 ...: each
    falls into the largest gap so far, so texts cover the shard evenly. Once as many tokens are read
    as the shard has, a seventh of it is still unread if documents are long; with random places,
    over a third would be. With pairs it is a quarter, since a wrong B comes from a random place.
    There is no order of examples to shuffle and store.

    A text has as many tokens as fit into the example, half of them before that place if its
    document reaches so far. It never leaves its document. A tenth of the examples have a random
    length instead. The first and last tokens of a document are read half as often as others, those
    nearly a text from an end up to 1.5 times as often. Short documents are read less often: one
    half as long as a text is read half as often.

    pairs: "nsp" (BERT, arXiv 1810.04805, section 3.1) cuts the text in two, see `text`; in half of
    the examples B comes from another document of the same shard. "none" keeps the text whole.

    mask_fraction: the fraction of tokens that are chosen. Of these, 80 % become [MASK], 10 % a
    random token and 10 % stay (BERT, appendix A.1).

    Raises DataError if the folder holds no shards.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, pairs="nsp",
                 mask_fraction=0.15):
        manifest = load_manifest(folder)
        names = ["heldout"] if held_out else shard_names(manifest["shards"])
        paths = self.paths = [f"{folder}/{name}" for name in names]
        # Opens shard s on first use. The lambda must not contain `self`: Python is late to free an
        # object that refers to itself, and its files would stay open.
        self.shard = functools.cache(lambda s: open_shard(paths[s]))
        self.vocab_size = manifest["vocab_size"]
        self.seq_len = seq_len
        self.pairs = pairs
        self.mask_fraction = mask_fraction
        self.specials = 2 if pairs == "none" else 3     # [CLS] and one or two [SEP]

        tokenizer = load_tokenizer(f"{folder}/tokenizer.model")
        pieces = tokenizer.id_to_piece(list(range(self.vocab_size)))
        # (pieces,) bool: whether the expression matches the end, or the beginning, of each piece.
        self.ends_sentence = np.array(list(map(SENTENCE_END.search, pieces)), bool)
        self.begins_sentence = np.array(list(map(SENTENCE_BEGIN.match, pieces)), bool)

        # Five random keys, made from seed and phase: one for each use of `uniform`, so that the
        # draws are independent.
        keys = np.random.SeedSequence((seed, phase)).generate_state(5, np.uint64)
        walk_key, self.pair_key, self.mask_key, self.fate_key, self.token_key = keys
        self.walk_start = float(uniform([0], walk_key)[0])

    def text(self, shard, place, length, cut_draw):
        """Returns the Text around token number `place` of a shard: `length` tokens, or the whole
        document if it is shorter. The Text is cut before one of the sentences that begin in it, or
        before any token if none does; cut_draw in [0, 1) chooses which."""
        # The number of documents that begin at `place` or before it. The last of them contains it:
        # documents[number - 1] <= place < documents[number].
        number = int(shard.documents.searchsorted(place, "right"))
        document = int(shard.documents[number - 1])
        document_end = int(shard.documents[number])
        start = min(place - length // 2, document_end - length)
        start = max(start, document)
        end = min(start + length, document_end)

        tokens = shard.tokens[start:end]
        # True at t if token t ends a sentence and token t + 1 begins one.
        is_cut = self.ends_sentence[tokens[:-1]] & self.begins_sentence[tokens[1:]]
        cuts = np.flatnonzero(is_cut) + 1
        if len(cuts) == 0:
            cuts = range(1, len(tokens))
        middle = start + int(cuts[int(cut_draw * len(cuts))])
        return Text(start, middle, end, document, document_end)

    def pair(self, i, draws):
        """Returns the Spans of example i: A and its true B, or A and the B of another text, which
        fills up the length:

            the example's text    | A          | true B          |
                                  start        middle            end
            another document's    |                   | other B         |
                                  start               middle

        draws: five random numbers in [0, 1). They decide whether the example is short, and how
        short; where the text is cut; whether B is the true one, and where the other B comes from.
        """
        short_draw, length_draw, cut_draw, true_draw, place_draw = draws
        k, s = divmod(i, len(self.paths))
        shard = self.shard(s)
        size = len(shard.tokens)
        length = self.seq_len - self.specials
        if short_draw < SHORT_FRACTION:
            length = 2 + int(length_draw * (length - 1))

        fraction = (k * GOLDEN + self.walk_start) % 1.0
        own = self.text(shard, int(fraction * size), length, cut_draw)
        if self.pairs == "none":
            return Spans(i, s, own.start, own.end, own.end, own.end, IGNORED)
        if true_draw < 0.5:
            return Spans(i, s, own.start, own.middle, own.middle, own.end, 0)

        # The other B begins like a true one, with the second part of a text cut by the same draw,
        # and is about as long. Otherwise a model could tell them apart without reading; it still
        # can in some cases, if documents are short or sentences as long as a text.
        # The place is random, but not in A's document: it is counted from the end of that document
        # and wraps around at the end of the shard.
        outside = size - (own.document_end - own.document)
        place = (own.document_end + int(place_draw * outside)) % size
        other = self.text(shard, place, length, cut_draw)
        b_length = length - (own.middle - own.start)
        b_end = min(other.middle + b_length, other.document_end)
        return Spans(i, s, own.start, own.middle, other.middle, b_end, 1)

    def spans(self, indices):
        """Returns the Spans of the examples numbered `indices`, as a list."""
        # Example i uses draws 5 * i to 5 * i + 4.
        counters = np.array(indices)[:, None] * 5 + np.arange(5)             # (B, 5)
        draws = uniform(counters, self.pair_key).tolist()
        return [self.pair(int(i), row) for i, row in zip(indices, draws)]

    def length(self, spans):
        """Returns the number of tokens of an example, special tokens included, or an array if the
        fields of `spans` are arrays."""
        return spans.a_end - spans.a + spans.b_end - spans.b + self.specials

    def mask(self, tokens, counters):
        """Masks `tokens` (n,), a batch's examples one after another, in place. Returns two arrays
        (m,): the chosen rows, ascending, and their original tokens. counters (n,): a different
        number for each token of each example.

        A token is chosen if its draw is below mask_fraction. A second draw is its fate: below 0.8
        it becomes [MASK], below 0.9 a random token that is not one of SPECIALS; else it stays.
        [CLS] and [SEP] are never chosen; [UNK] is text like any other token. The masks of an
        example do not depend on its neighbours, which change with the number of ranks.
        """
        draws = uniform(counters, self.mask_key)
        is_text = (tokens != CLS) & (tokens != SEP)
        rows = np.flatnonzero(is_text & (draws < self.mask_fraction))
        labels = tokens[rows]

        ordinary = self.vocab_size - len(SPECIALS)         # the number of ordinary tokens
        random_draws = uniform(counters[rows], self.token_key)
        random_tokens = len(SPECIALS) + (random_draws * ordinary).astype(np.int64)

        fates = uniform(counters[rows], self.fate_key)
        tokens[rows] = np.select([fates < 0.8, fates < 0.9], [MASK, random_tokens], labels)
        return rows, labels

    def batch(self, indices):
        """Returns the Batch of the examples numbered `indices`, the shortest first, as arrays.

        Any other way to make batches must keep one rule: example i depends on i alone. Each rank
        gets different numbers i, and a resumed run continues with the next. A batch that ignores
        `indices` gives all ranks the same texts."""
        examples = sorted(self.spans(indices), key=self.length)
        parts = []                                                     # arrays of tokens
        for spans in examples:
            text = self.shard(spans.shard).tokens
            parts += [[CLS], text[spans.a:spans.a_end], [SEP]]
            if self.pairs != "none":
                parts += [text[spans.b:spans.b_end], [SEP]]
        tokens = np.concatenate(parts, dtype=np.int64)                 # (n,)

        # One Spans for all examples, in which each field is an array (B,).
        columns = Spans(*np.array(examples).T)
        lengths = self.length(columns)                                 # (B,)
        # In Python, -n % 64 is the gap from n to the next multiple of 64: the rows that `pad` adds.
        with_padding = np.append(lengths, -len(tokens) % 64)           # (B + 1,)
        bounds = np.cumsum([0, *with_padding], dtype=np.int32)         # (B + 2,)

        # Arrays (n,): `repeat` gives each row the value of its example.
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-2], lengths)
        a_lengths = columns.a_end - columns.a
        segments = positions >= np.repeat(a_lengths + 2, lengths)      # after [CLS] A [SEP]
        # Position t of example i has the counter i * seq_len + t in any batch.
        counters = np.repeat(columns.index * self.seq_len, lengths) + positions

        rows, labels = self.mask(tokens, counters)                     # (m,)
        tasks = {"mlm": pad(labels, 16, IGNORED)}
        if self.pairs != "none":
            tasks["nsp"] = columns.pair_label
        return Batch(
            tokens=pad(tokens, 64),
            segments=pad(segments.astype(np.int64), 64),
            positions=pad(positions, 64),
            masked_rows=pad(rows, 16),
            labels=tasks,
            bounds=bounds,
            lengths=with_padding)


# ----- Batches: dealt to the ranks, made ahead in a thread -----

def micro_batches(step, global_batch, micro_size, rank, size):
    """Returns the micro-batches of rank `rank` of `size` in a step, each a list of at most
    micro_size indices.

    The step has global_batch examples, from number step * global_batch on; a rank takes the numbers
    that are `rank` modulo `size`. Nothing has to divide evenly: a rank may have one example more
    than another, and so may a micro-batch.
    """
    first = step * global_batch
    mine = [i for i in range(first, first + global_batch) if i % size == rank]
    count = math.ceil(len(mine) / micro_size)
    # Every count-th example, so that sizes differ by at most one: 7 examples in 3 micro-batches are
    # 3, 2 and 2.
    return [mine[k::count] for k in range(count)]


def loader(dataset, step, global_batch, micro_size, rank, size):
    """Yields the list of Batches of each step from number `step` on, without end. While the caller
    works with one list, a thread makes the next. For other arguments see `micro_batches`."""
    def make(number):
        dealt = micro_batches(number, global_batch, micro_size, rank, size)
        return [dataset.batch(indices) for indices in dealt]

    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(make, step)
        while True:
            ready = ahead.result()
            step += 1
            ahead = thread.submit(make, step)
            yield ready


# ----- Preparing: corpus -> documents -> tokenizer -> tokens -> shards -> manifest -----

DOCUMENTS = 256             # documents in a block; text is encoded block by block
LONGEST = 1 << 16           # characters; a longer document becomes several. Documents of a text
                            # file end after a line that passes half of this, see `documents_in`
CHUNK = 1 << 10             # characters: SentencePiece skips texts of more than 4,192 bytes
SAMPLE = 1 << 14            # random chunks that train the tokenizer. Twice as many save 0.5 % of a
                            # text's tokens, and take twice the time

# Soft hyphens, direction marks and the like are removed, so that a word has the same tokens with
# and without them. U+200C and U+200D stay, since Persian and the scripts of India spell with them;
# SentencePiece treats U+200C as a space.
INVISIBLE = "[\0\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"


def prepare(corpus, folder, vocab_size=8192, shards=8, cased=False, tokenizer=None):
    """Writes a new folder of shards and returns its manifest, a dict. After an error its files
    are removed; a killed program leaves them without manifest.json.

    corpus: documents, each a string, that can be iterated repeatedly: once to count them, once to
    train the tokenizer and once to encode them.
    tokenizer: a path. Without one, it prints a line and trains a model of `vocab_size` pieces, or
    of fewer if the text has no more.

    All shards give equally many examples, since example i comes from shard i modulo S, so the text
    in a small shard is seen more often. If there are only a few hundred documents, make one shard.

    Raises DataError if the folder is not empty, or if the text is unusable or changes meanwhile;
    OSError if the folder cannot be written or a text cannot be opened.
    """
    folder = Path(folder).resolve()
    if any(folder.glob("*")):
        raise DataError(f"{folder} is not empty: wait if another program is writing it; else "
                        "remove it, or give another --out")
    # Fail before the long part begins: first if the folder cannot be written or another program is
    # writing it, then if text cannot be read.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "tokenizer.model").touch(exist_ok=False)
    except FileExistsError:
        raise DataError(f"another program has begun to write {folder}; wait until it is ready")
    try:
        if tokenizer:
            tokenizer = load_tokenizer(tokenizer)
        documents = checksum = 0
        for block in blocks(corpus):
            documents += len(block)
            checksum += checksum_of(block)           # each block comes again: a sum is enough
        if not documents:
            raise DataError("there is no text in the corpus")
        if not tokenizer:
            say("training a tokenizer (takes minutes if the text has few spaces)")
            tokenizer = train_tokenizer(corpus, documents, vocab_size, cased)
        (folder / "tokenizer.model").write_bytes(tokenizer.serialized_model_proto())
        manifest = write_shards(corpus, folder, tokenizer, shards, documents, checksum)
        files = file_names(shard_names(shards))
        manifest["files"] = {name: sha256_of(folder / name) for name in files}
        manifest["sha256"] = manifest_digest(manifest)
        # Written last: a folder without a manifest is not ready.
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    except BaseException as error:
        # Only its own files: there may be others by now.
        with contextlib.suppress(OSError):
            for name in [*file_names(shard_names(shards)), "manifest.json"]:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        # The error of a write, such as that of a full disk, names no file.
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(folder)
        raise
    return manifest


def blocks(corpus, total=None):
    """Yields lists of about 256 documents, cleaned, and shows how many of about `total` it has
    read. A document longer than LONGEST becomes several."""
    block = []
    # disable=None shows progress only if stderr is a terminal. A closed stderr can be None.
    for document in tqdm(corpus, "text", total, unit=" documents", leave=False,
                         disable=None if sys.stderr else True):
        block += cut_text(clean(document), LONGEST)
        if len(block) >= DOCUMENTS:
            yield block
            block = []
    yield block


def clean(text):
    """Returns a text without INVISIBLE, in Unicode's form NFKC: one spelling for each character
    that has several. bert.py does the same."""
    return unicodedata.normalize("NFKC", re.sub(INVISIBLE, "", text))


def checksum_of(block):
    """Returns a checksum of a list of documents."""
    return zlib.crc32("\n".join(block).encode())


def cut_text(text, n):
    """Returns a text in parts of at most n characters, cut at white space if there is any."""
    # (?s): a dot is any character. Takes as many as possible, up to n, so that white space or the
    # end of the text follows (no \S); if there is no such place, n.
    return re.findall(rf"(?s).{{1,{n}}}(?!\S)|.{{1,{n}}}", text)


def train_tokenizer(corpus, documents, vocab_size, cased=False):
    """Returns a SentencePieceProcessor of at most `vocab_size` pieces.

    The five special tokens have ids 0 to 4; no text can spell them. Raises DataError if the text
    has more different characters than vocab_size, or no word.
    """
    texts = map("\n".join, blocks(corpus, documents))
    chunks = (chunk for text in texts for chunk in cut_text(text, CHUNK))
    # Each chunk gets a random number, and the smallest numbers choose the sample. It is always the
    # same, whereas SentencePiece would draw a different sample in each process.
    rng = random.Random(0)
    sample = heapq.nsmallest(SAMPLE, chunks, key=lambda chunk: rng.random())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, vocab_size=vocab_size,
            hard_vocab_limit=False, minloglevel=2,
            num_threads=4,              # fixed, since the pieces depend on it
            normalization_rule_name="nmt_nfkc" if cased else "nmt_nfkc_cf",
            # The rarest 0.01 % of the text's characters become [UNK], but never ASCII punctuation.
            character_coverage=0.9999, required_chars=string.punctuation,
            pad_id=PAD, pad_piece="[PAD]", unk_id=UNK, unk_piece="[UNK]", bos_id=-1, eos_id=-1,
            control_symbols=SPECIALS[CLS:])
    except RuntimeError:
        raise DataError(f"no tokenizer of {vocab_size} pieces can be made of this text: it has "
                        "more different characters, or no word; raise --vocab-size")
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_shards(corpus, folder, tokenizer, shards, documents, checksum):
    """Writes the arrays of all shards of a corpus and returns their part of the manifest, a dict.
    documents: how many the corpus has. checksum: the sum of `checksum_of` over its blocks.

    Documents are dealt by the CRC-32 of their text, a checksum that serves as a random number. A
    repeated text is therefore either trained on or held out, and is held out once. The parts of a
    long document are dealt separately, so a book can be on both sides. Documents of fewer than two
    tokens are left out, since they have no A and B. Raises DataError if a shard has fewer than two
    documents, or if the checksum of the corpus has changed.
    """
    vocab_size = tokenizer.get_piece_size()
    names = ["heldout", *shard_names(shards)]
    token_files = [open(folder / f"{name}.tokens", "wb") for name in names]
    document_files = [open(folder / f"{name}.documents", "wb") for name in names]
    for file in document_files:
        file.write(np.int64(0))
    ends = np.zeros(len(names), np.int64)       # the number of tokens in each shard so far
    unigrams = np.zeros(vocab_size)

    # Hold out 1 % of the documents, or about 100 of a small corpus, but at most a fifth. In a small
    # corpus chance could take more, so the loop stops at a fifth.
    fraction = min(0.2, max(0.01, 100 / documents))
    held_out = set()                            # the CRC-32 of each held-out text
    threads = min(usable_cores(), 16)           # more would have little to do, and may be refused
    found = 0                                   # the checksum of this pass
    for block in blocks(corpus, documents):
        found += checksum_of(block)
        encoded = tokenizer.encode(block, num_threads=threads)
        for document, tokens in zip(block, encoded):
            crc = zlib.crc32(document.strip().encode())
            if len(tokens) < 2 or crc in held_out:
                continue
            tokens = np.array(tokens, np.uint16)
            if crc < fraction * 2 ** 32 and len(held_out) < documents // 5:
                shard = 0
                held_out.add(crc)
            else:
                shard = 1 + crc % shards
                np.add.at(unigrams, tokens, 1)
            ends[shard] += len(tokens)
            token_files[shard].write(tokens)
            document_files[shard].write(ends[shard])

    if found != checksum:
        raise DataError("the text changed while it was read; wait until it is complete")
    (folder / "unigrams").write_bytes(unigrams)
    # A number has 8 bytes; the first number, 0, ends no document.
    counts = [file.tell() // 8 - 1 for file in document_files]
    for file in token_files + document_files:
        file.close()
    if min(counts) < 2:
        raise DataError(f"{documents} documents are too few, or too often the same, for {shards} "
                        "shards (each needs two, and so does the held-out part, a fifth at most; 1 "
                        "shard needs about thirty): separate documents by blank lines, or lower "
                        "data.py's --shards")
    return {"shards": shards, "vocab_size": vocab_size,
            "tokens": int(ends.sum()), "documents": sum(counts), "held_out": counts[0],
            "left_out": documents - sum(counts), "unknown": unigrams[UNK] / unigrams.sum()}


def usable_cores():
    """Returns how many cores this process may use: torch's number of threads (OMP_NUM_THREADS, or
    what taskset and the like allow), or a container's CPU quota if that is less."""
    cores = torch.get_num_threads()
    with contextlib.suppress(OSError, ValueError):       # no such file, or no limit: "max 100000"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


# ----- Corpora: files -> documents, each one string -----

# The beginnings of files that are not plain text: HTML and XML, by a common tag, since a line of a
# chat may begin with "<name>"; web archives; PDF; mail, by a header line; and what git has in place
# of a large file that was not fetched.
MARKUP = re.compile(
    r"(?i)<([!?]|(html|head|body|div|p|doc|page|article|mediawiki|tei|rss)\b)|WARC/\d|%PDF-"
    r"|From \S+ .*\d:\d\d:|(Return-Path|Received|Delivered-To|Message-ID|MIME-Version):"
    r"|version https://git-lfs")
# A line that separates documents. It may hold marks that are not seen, as text from right to left
# and from the web does.
BLANK = re.compile(rf"[\s\u200b-\u200d{INVISIBLE[1:]}*")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class TextFiles:
    """The documents of text files; can be iterated repeatedly.

    A folder contributes all files that are neither hidden nor behind a link to another folder. A
    file is text with blank lines between documents, or JSON lines with a `text` field, and may be
    compressed as .gz, .bz2 or .xz. Raises DataError if something is not a file or folder, OSError
    if a folder cannot be read.
    """

    def __init__(self, paths):
        found = [file for path in paths for file in files_in(Path(path))]
        # A file that is given twice is read once.
        self.files = list({os.path.realpath(file): file for file in found}.values())

    def __iter__(self):
        for path in self.files:
            yield from documents_in(path)


def files_in(path):
    """Yields a file, or the files of a folder that are neither hidden nor behind a link to another
    folder. Raises DataError if a path is neither, and OSError if a folder cannot be read, which
    Path.rglob would skip."""
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if inner.name[0] != "." and not (inner.is_symlink() and inner.is_dir()):
                yield from files_in(inner)
    elif path.is_file():
        yield path
    else:
        raise DataError(f"{path} is not a file or folder (a pipe will not do: text is read more "
                        "than once)")


def begins_json(beginning):
    """Returns whether a file with this beginning is JSON lines. Raises ValueError if it is not
    plain text."""
    beginning = beginning.lstrip("\ufeff\n\t\f ")
    if MARKUP.match(beginning):
        raise ValueError("HTML, XML, WARC, PDF, mail or a git-lfs pointer: extract or fetch the "
                         "text first")
    # In UTF-16, one of the two bytes of a letter is 0 or another small number.
    if len(re.findall("[\0-\a\x0e-\x1f]", beginning)) > len(beginning) / 4:
        raise ValueError("UTF-16, or not text")
    # "{" begins JSON lines. "[{", '["' or a lone "[" begins a JSON array, which has no "text", so
    # `text_of` refuses it.
    return bool(re.match(r'{|\[\s*([{"]|$)', beginning))


def text_of(line, is_json):
    """Returns the text of a line, "" if there is none: the `text` of a line of JSON, otherwise the
    line itself. Can raise any exception if the line is not UTF-8, has consecutive null characters,
    or is not JSON with a `text` although is_json is true."""
    if not line.isascii():
        line = line.encode("utf-8", "surrogateescape").decode("utf-8-sig")
    if "\0\0" in line:
        raise ValueError("null characters: it is a tar file, or part of it is lost")
    if BLANK.fullmatch(line):
        return ""
    line = line.strip()
    if is_json:
        # JSON can spell characters that UTF-8 cannot encode, such as "\ud800": they become "?".
        text = json.loads(line)["text"] or ""
        return text.encode("utf-8", "replace").decode()
    return f"{line}\n"


def documents_in(path):
    """Yields the documents of a file. Raises OSError if the file cannot be opened, and DataError,
    which names file and line, if its contents cannot be used."""
    document = ""
    number = 1
    # Bytes that are not UTF-8 become lone surrogates, which `text_of` finds when the line number is
    # known. A line ends with \n, \r\n or \r.
    with OPENERS.get(path.suffix, open)(
            path, "rt", encoding="utf-8", errors="surrogateescape") as file:
        try:
            if path.suffix in OPENERS:
                if not path.stat().st_size:
                    raise ValueError("it has 0 bytes")
                # A .bz2 or .xz may be several streams, one after another. Python takes a later one
                # that is damaged for bytes after the end, and ignores the rest of the file, unless
                # there is no error to ignore. Only a private field says so. It also refuses bytes
                # that really come after the end.
                file.buffer._buffer.raw._trailing_error = ()
            is_json = begins_json(file.read(1 << 12))
            file.seek(0)
            # A text may be a single line, so it is read in parts of at most a few MB.
            limit = -1 if is_json else 1 << 21
            for line in iter(lambda: file.readline(limit), ""):
                text = text_of(line, is_json)
                document += text
                # A document ends after a line of JSON, at a blank line, or when it is long, so that
                # no file has to fit in memory. The limit is half of LONGEST, because a document
                # slightly longer than LONGEST would be cut once more by `blocks`.
                if document and (is_json or not text or len(document) > LONGEST // 2):
                    yield document
                    document = ""
                number += line.endswith("\n")
        # gzip, bz2, lzma, JSON and UTF-8 raise errors of their own.
        except Exception as error:
            raise DataError(f"{path}, line {number}: {type(error).__name__}: {error}; a file is "
                            "UTF-8 (see iconv), also as .gz, .bz2 or .xz (or a git-lfs pointer?); "
                            "if it begins with { or [, each line is JSON with a `text` "
                            "(wikiextractor --json)")
    if document:
        yield document


# ----- Prepared shards: what is there, and whether it is whole -----

def load_manifest(folder):
    """Returns the manifest of a folder of shards, a dict; raises DataError if it is missing or not
    as it was written."""
    path = Path(folder) / "manifest.json"
    with contextlib.suppress(
            FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        manifest = json.loads(path.read_text())
        if manifest["sha256"] == manifest_digest(manifest):
            return manifest
    raise DataError(f"{path} is missing, damaged or from an older program; data.py makes a new "
                    "folder (shards/demo: wait if another demo makes it; else remove it)")


def manifest_digest(manifest):
    """Returns the SHA-256 of FORMAT and of everything in a manifest except its own digest."""
    # FORMAT takes the place of the digest.
    content = json.dumps(manifest | {"sha256": FORMAT}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def load_tokenizer(path):
    """Returns the SentencePieceProcessor in a file. Raises OSError if the file cannot be read, and
    DataError if the tokenizer.json of a model folder would be wrong for it, see
    bert.tokenizer_json."""
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        tokenizer = sentencepiece.SentencePieceProcessor()
        tokenizer.LoadFromSerializedProto(Path(path).read_bytes())
        pieces = tokenizer.id_to_piece(list(range(len(tokenizer))))
        scores = tokenizer.get_score(list(range(len(SPECIALS), len(tokenizer))))
        # A token has 16 bits. A model of whole words has no piece "▁". Unigram scores are log
        # probabilities; BPE scores are 0, -1, -2 ...; byte pieces and user-defined pieces have 0.
        # Only the rules nmt_nfkc and nmt_nfkc_cf normalize the text to this result.
        if (len(pieces) <= 1 << 16 and pieces[:len(SPECIALS)] == SPECIALS and "▁" in pieces
                and max(scores) < 0 and tokenizer.normalize("ﬁ\u200b  x") == "▁fi▁x"):
            return tokenizer
    raise DataError(f"{path} is not a tokenizer.model that data.py made; give one from a folder of "
                    "shards")


def unigram_losses(folder):
    """Returns a tensor (pieces,), float64: the loss of each token, in nats, for a predictor that
    knows only how often each token occurs in the training text. One is added to the counts, so that
    no loss is infinite."""
    counts = torch.from_numpy(np.fromfile(f"{folder}/unigrams")) + 1
    return -torch.log(counts / counts.sum())


def shard_names(shards):
    """Returns the names of the shards to train on. Training never reads the other, "heldout"."""
    return [f"train-{s:05d}" for s in range(shards)]


def file_names(names):
    """Returns the names of all files but manifest.json in a folder with these training shards."""
    files = ["tokenizer.model", "unigrams"]
    for name in "heldout", *names:
        files += [f"{name}.tokens", f"{name}.documents"]
    return files


def verify(folder, rank=0, size=1):
    """Checks the digests of the files that rank `rank` of `size` reads, and returns the manifest.
    Raises DataError or OSError, which names the first file that is damaged or missing."""
    manifest = load_manifest(folder)
    names = shard_names(manifest["shards"])
    # Example i comes from shard i modulo the number of shards and goes to rank i modulo `size`, so
    # a rank reads every stride-th shard: with 8 shards and 6 ranks, rank 0 reads 0, 2, 4, 6.
    stride = math.gcd(len(names), size)
    for name in file_names(names[rank % stride::stride]):
        path = Path(folder, name)
        # Reading a pipe or a device in its place might never end.
        if not path.is_file() or sha256_of(path) != manifest["files"].get(name):
            raise DataError(f"{path} is missing or damaged on {os.uname().nodename}, where rank "
                            f"{rank} of {size} reads it; copy it again, or prepare a new folder")
    return manifest


def part_long_enough(folder, seq_len):
    """Returns the fraction of the text that is in documents long enough for examples of seq_len
    tokens. It is estimated from the first training shard, whose documents are a random sample."""
    sizes = np.diff(open_shard(f"{folder}/train-00000").documents)
    return sizes[sizes >= seq_len - 3].sum() / sizes.sum()       # [CLS] and two [SEP]


def sha256_of(path):
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----- The corpus without a download: documentation that is on this machine already -----

def machine_documentation():
    """Returns the default corpus: a list of documents, one sentence a line.

    The text is the language reference (pydoc_data) and the strings between \"\"\", mostly
    docstrings, of the installed standard library, NumPy and PyTorch, filtered to English prose; no
    sentence occurs twice. It differs a little between versions of Python and of the packages.
    """
    from pydoc_data.topics import topics
    texts = list(topics.values())
    for module in os, np, torch:                # os is in the standard library's folder
        root = Path(module.__file__).parent
        for file in sorted(root.rglob("*.py")):
            folders = file.relative_to(root).parts
            # An editor may have left a broken link.
            if file.is_file() and {"site-packages", "test", "tests"}.isdisjoint(folders):
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
    """Yields the English sentences of a docstring: six words or more, mostly letters, and no code,
    tables, markup or short fragments."""
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"(?m)^\s*(\.\.|\+--|==|--)|>>>|::|__|[<{}|\\]", paragraph):
            continue
        paragraph = re.sub(r":\w+(?::\w+)*:(?=`)|[`*~]", "", paragraph)         # :class:`~torch.T`
        paragraph = " ".join(paragraph.split())
        # Cut between . ! ? and a capital, quote or bracket, and at list items (" - The ...").
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(\[])|\s-\s+(?=[A-Z])", paragraph):
            others = re.findall("[^A-Za-z ]", sentence)
            if sentence.count(" ") >= 5 and len(others) <= 0.15 * len(sentence):
                yield sentence


# ----- The program -----

def describe(folder):
    """Returns a report on prepared shards: their sizes, the beginnings of some documents, and a
    line for each possible problem."""
    manifest = load_manifest(folder)
    unknown = manifest["unknown"]
    mean = manifest["tokens"] / manifest["documents"]
    long_enough = part_long_enough(folder, 128)
    held_out = manifest["held_out"]
    report = (f"{manifest['documents']:,} documents of {mean:.0f} tokens, {manifest['tokens']:,} "
              f"in all, {manifest['vocab_size']:,} pieces, {unknown:.2%} [UNK]; "
              f"{manifest['shards']} shards, {held_out:,} different documents held out, "
              f"{manifest['left_out']:,} left out (under two tokens, or copies of held-out ones)\n"
              f"{long_enough:.0%} of the text is long enough for examples of 128 tokens, "
              f"{part_long_enough(folder, 512):.0%} for those of 512\n"
              "documents begin so:")
    tokens, documents = open_shard(f"{folder}/heldout")
    tokenizer = load_tokenizer(f"{folder}/tokenizer.model")
    for number in sorted({0, held_out // 3, 2 * held_out // 3}):
        begin, end = documents[number:number + 2]
        report += f"\n    {tokenizer.decode(tokens[begin:min(begin + 20, end)].tolist())}"
    if unknown > 0.001:
        report += ("\nwarning: some of the text is [UNK], each for one letter or many that are "
                   "unknown to the tokenizer: train one on this text, without --tokenizer")
    if mean > 5000:
        report += ("\nwarning: documents are very long; if each line of a file is a document of "
                   "its own, put a blank line between them, or write JSON lines")
    if long_enough < 0.25:
        report += ("\nwarning: documents are short; if blank lines separate sentences or "
                   "paragraphs, remove the blank lines within a document")
    return report


def say(text):
    """Prints text. A terminal that is closed, lacks UTF-8 or writes to a full disk is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def end_terminal():
    """Drops output that the terminal does not accept. Call it last: otherwise Python would try once
    more at exit, and fail."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        sys.stdout = None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error as one line, under torchrun once per node. train.py
    uses it, too."""

    def error(self, message):
        # All ranks of a node have the same command line.
        if "TORCHELASTIC_RUN_ID" in os.environ and (os.environ.get("LOCAL_RANK") or "0") != "0":
            self.exit(2)
        self.exit(2, f"{self.prog}: {message}\n")


def number_in(kind, low, high=math.inf):
    """Returns a function for argparse's `type`: text -> a number, int or float, in [low, high)."""
    def number(text):                           # named for argparse's "invalid number value"
        value = kind(text)
        if not low <= value < high:             # written so that NaN is refused, too
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}), not {text}")
        return value
    return number


def path_of(text):
    """Returns the text of a flag as a Path, for argparse's `type`; refuses empty text. A shell does
    not replace the ~ of `--out=~/x`, so this does."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty (a variable that is not set?)")
    return Path(os.path.expanduser(text))


def main():
    """Runs the program. Unusable input ends it with one line on stderr and status 1, a bad flag
    with status 2."""
    parser = Parser(description="Prepare text for BERT.")
    add = parser.add_argument
    add("corpus", type=path_of, nargs="+", help="read these files and folders")
    add("--out", type=path_of, required=True, help="write this folder")
    add("--shards", type=number_in(int, 1, 1 << 16), default=8,
        help="deal the documents to this many shards (default: %(default)s)")
    add("--vocab-size", type=number_in(int, 16, 1 << 16), default=8192,
        help="train a tokenizer of this many pieces (default: %(default)s)")
    add("--cased", action="store_true", help="keep upper case in that tokenizer")
    add("--tokenizer", type=path_of, help="take this tokenizer.model, whatever its size and case")
    args = parser.parse_args()
    try:
        prepare(TextFiles(args.corpus), args.out, args.vocab_size, args.shards, args.cased,
                args.tokenizer)
    except (DataError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"data.py: {str(error) or 'stopped; nothing is left behind'}")
    say(f"{describe(args.out)}\n{args.out} is ready")
    end_terminal()


if __name__ == "__main__":
    main()
