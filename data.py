"""Text -> SentencePiece -> shards on disk -> masked sentence-pair batches.

    python data.py                             # this machine's own documentation
    python data.py corpus/*.txt.gz --out shards/wiki --vocab-size 30522 --shards 256
    python data.py --show shards/wiki          # what is in it, and three examples
    python data.py --split shards/wiki --nodes 32 --ranks-per-node 8

Input is files, folders of files and patterns of names; each file is text with one sentence a line
and a blank line between documents, plain prose with a blank line between documents, JSON lines with
a `text` field, or what wikiextractor writes; each also as .gz, .bz2 or .xz.

A folder of shards holds `tokenizer.model`, `manifest.json`, `unigrams.npy` (how often the training
text has each token) and, for each shard, three flat arrays:

    NAME.tokens.npy      uint16 or uint32, every token of the shard, no special symbols
    NAME.sentences.npy   int64, where each sentence begins in `tokens`, and their end
    NAME.documents.npy   int64, where each document begins in `sentences`, and their end

Masks and sentence pairs are made on the fly (BERT, arXiv 1810.04805, section 3.1 and appendix A.2),
so that both phases, at any length, read the same shards.

Shapes: B examples, T tokens, M masked tokens of a batch, n example numbers.
"""
import argparse
import bz2
import collections
import concurrent.futures
import contextlib
import functools
import glob
import gzip
import hashlib
import html
import inspect
import io
import itertools
import json
import lzma
import multiprocessing.forkserver
import os
import random
import re
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VERSION = 2                 # of the folder's format
HELD_OUT = "heldout"        # the name of the shard that training never reads
IGNORED = -100              # the label that torch's cross-entropy passes over
MASK_FRACTION = 0.15
SHORT_FRACTION = 0.10       # of the examples; so the model meets short inputs in pre-training too
ARRAYS = ("tokens", "sentences", "documents")
PIECE = 1 << 20             # bytes of text that are read and encoded at a time
SAMPLE = 32                 # pieces that a tokenizer is trained on, at most
LONGEST_SENTENCE = 8192     # characters; a longer one is cut at white space
LONGEST_LINE = 1 << 28      # bytes, of JSON
LONGEST_WORD = 8            # tokens, for --whole-words: some scripts have no spaces


class DataError(ValueError):
    """Input or shards that cannot be used; the message says which file, what and what to do."""


# ----- Reading: files -> pieces of a megabyte -> documents, each a list of sentences -----

WIKI_TAG = re.compile(r'<doc [^\n]*?(?:title="([^\n]*)")?>')
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class Piece(NamedTuple):
    """About a megabyte of a file, cut where a document ends."""
    path: str
    line: int                # the number of its first line in the file, from 1
    data: bytes
    kind: str                # "text", "json" or "wiki"
    prose: bool              # whether lines are joined and split at sentence ends
    continued: bool          # whether it begins inside a document too long for one piece


class Corpus:
    """Text that can be read again and again: files, or documents (lists of sentences) in memory.

    split: "lines" takes each line as a sentence, "prose" joins the lines of a document and splits
    them at sentence ends, "auto" decides for each file by its first thousand lines.
    Raises DataError where a path is nothing.
    """

    def __init__(self, paths=(), split="auto", documents=None):
        self.split, self.text = split, None
        found = [name for path in paths for name in files_at(str(path))]
        self.paths = list({os.path.realpath(name): name for name in found}.values())
        self.bytes = sum(os.path.getsize(path) for path in self.paths)    # compressed as they are
        if documents is not None:
            text = "\n\n".join("\n".join(document) for document in documents) + "\n"
            self.split, self.text = "lines", text.encode()
            self.bytes = len(self.text)

    def pieces(self, bar):
        """Yields the Pieces of all files in order; moves the bar by the bytes that were read."""
        if self.text is not None:
            yield from read_pieces("the corpus", CallbackIOWrapper(
                bar.update, io.BytesIO(self.text), "read"), self.split)
        for path in self.paths:
            with open(path, "rb") as raw:
                counted = CallbackIOWrapper(bar.update, raw, "read")
                opener = OPENERS.get(Path(path).suffix)
                yield from read_pieces(path, opener(counted) if opener else counted, self.split)


def files_at(path):
    """Returns the files of a path, sorted: itself, all under a folder, or those of a pattern; none
    that is hidden. Raises DataError if there are none."""
    def fail(error):
        raise error
    found = []
    for match in [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True)):
        walk = [("", [], [match])] if os.path.isfile(match) else os.walk(match, onerror=fail)
        for folder, folders, names in walk:
            folders[:] = sorted(name for name in folders if name[0] != ".")
            found += [os.path.join(folder, name) for name in sorted(names)
                      if name[0] != "." or not folder]
    if not found:
        raise DataError(f"{path}: no file" if os.path.isdir(path) or glob.has_magic(path) else
                        f"{path}: No such file or directory")
    return found


def read_pieces(path, file, split):
    """Yields the Pieces of an open binary file; memory holds one of them.

    Raises DataError with the path where an archive is broken or a line of JSON is without end.
    """
    data, line, continued, kind = b"", 1, False, None
    prose = {"lines": False, "prose": True, "auto": None}[split]
    try:
        more = True
        while more:
            block = file.read(PIECE)
            data, more = data + block, bool(block)
            if kind is None:
                data = data.removeprefix(b"\xef\xbb\xbf")
                kind = kind_of(path, data)
            end, whole = last_end(data, kind) if more else (len(data), True)
            if end:
                piece = Piece(path, line, data[:end], kind, prose, continued)
                if prose is None and piece.data.strip():
                    prose = is_prose(piece)
                yield piece._replace(prose=prose)
                line, data, continued = line + data.count(b"\n", 0, end), data[end:], not whole
            elif len(data) > LONGEST_LINE:
                raise DataError(f"{path}, line {line}: more than {LONGEST_LINE >> 20} MB of JSON "
                                "without a line end")
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        line += data.count(b"\n")
        raise DataError(f"{path}: the compressed file is damaged after line {line} ({error})") \
            from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def kind_of(path, data):
    """Returns the format of a file that begins with these bytes: "json", "wiki" or "text"; raises
    DataError for an array of JSON."""
    head = data[:4096].lstrip()
    if re.match(rb'\[\s*\{\s*"', head):
        raise DataError(f"{path}: an array of JSON; write one object a line instead")
    return "json" if re.match(rb'\{\s*["}]', head) else "wiki" if head.startswith(b"<doc ") \
        else "text"


def last_end(data, kind):
    """Returns (where the last whole document of these bytes ends, True), or 0 to read on. Of a
    document as long as a piece and longer, (the end of a line or word, False)."""
    if kind == "json":
        return data.rfind(b"\n") + 1, True
    if kind == "wiki":
        end = data.rfind(b"</doc>") + 1
        end = end and data.find(b"\n", end) + 1
    else:
        end = data.rfind(b"\n") + 1
        while end and data[(begin := data.rfind(b"\n", 0, end - 1) + 1):end].strip():
            end = begin                        # of a line that is not blank
    if end or len(data) < PIECE:
        return end, True
    for mark in b"\n", b" ":
        if end := data.rfind(mark) + 1:
            return end, False
    # Not inside a character, of which at most three bytes are not its first
    return len(data) - max([k for k in (1, 2, 3, 4) if data[-k] & 0xC0 != 0x80][:1] or [1]), False


def decoded(piece):
    """Returns the text of a piece, lines ended by "\\n"; raises DataError where it is not UTF-8,
    with file, line and the byte in the line, from 0 (or from where a piece was cut in the line)."""
    try:
        text = piece.data.decode()
    except UnicodeDecodeError as error:
        start = piece.data.rfind(b"\n", 0, error.start) + 1
        line = piece.line + piece.data.count(b"\n", 0, start)
        raise DataError(f"{piece.path}, line {line}, byte {error.start - start}: not UTF-8; "
                        "convert the file, for example with iconv") from None
    if "\0" in text:
        line = piece.line + text.count("\n", 0, text.index("\0"))
        raise DataError(f"{piece.path}, line {line}: a NUL byte; this is not a text file")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def documents_in(piece):
    """Returns (the documents of a piece as lists of lines, a Counter of what was skipped and why).

    The first one goes on with the document before where the piece is `continued`; it can be empty.
    Raises DataError, with file and line, where the text is not UTF-8 or not JSON with a `text`.
    """
    text, skipped, documents = decoded(piece), collections.Counter(), []
    if piece.kind == "json":
        for number, line in enumerate(text.split("\n"), piece.line):
            if line := line.strip():
                try:
                    content = json.loads(line)["text"] or ""
                    content = content.encode("utf-8", "replace").decode()
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise DataError(f"{piece.path}, line {number}: not a JSON object with a text in"
                                    f" its `text` field: {line[:60]!r}") from None
                documents.append(content.split("\n"))
                skipped["JSON records without text"] += not content
    elif piece.kind == "wiki":                 # <doc id=".." url=".." title="..">, its title, text
        for number, part in enumerate(text.split("</doc>")):
            tag = WIKI_TAG.search(part)
            if tag:
                title = html.unescape(tag[1] or "")
                lines = part[tag.end():].lstrip("\n").split("\n")
                has_title = bool(title) and lines[0].strip() == title
                skipped["lines of wikiextractor's tags and titles"] += 1 + has_title
                documents.append(lines[has_title:])
            elif piece.continued and number == 0:
                documents.append(part.split("\n"))
                continue
            outside = part[:tag.start() if tag else None].split()
            skipped["words outside of wikiextractor's documents"] += len(outside)
    else:
        blocks = re.split(r"\n[^\S\n]*\n\s*", "\n" + text if piece.continued else text)
        documents = [block.split("\n") for block in blocks]
    documents = [[line for line in map(str.strip, lines) if line] for lines in documents]
    first = documents[:1] if piece.continued else []
    return first + [document for document in documents[len(first):] if document], skipped


def sentences_in(piece):
    """Returns (the documents of a piece as lists of sentences, what was skipped); as documents_in.
    """
    documents, skipped = documents_in(piece)
    if piece.prose:
        documents = [split_sentences(" ".join(lines)) for lines in documents]
    return [shortened(document) for document in documents], skipped


def shortened(sentences):
    """Returns sentences with those of more than LONGEST_SENTENCE characters in parts, cut at white
    space if there is any: SentencePiece takes memory in proportion to the longest."""
    if max(map(len, sentences), default=0) <= LONGEST_SENTENCE:
        return sentences
    most = f".{{1,{LONGEST_SENTENCE}}}"
    return [part.strip() for sentence in sentences
            for part in re.findall(rf"{most}(?!\S)|{most}", sentence, re.DOTALL)]


def is_prose(piece):
    """Returns True if a file that begins with this piece is prose (wrapped or paragraphs), not a
    sentence a line; what wikiextractor writes always is.

    Prose shows sentence ends inside its lines, or lines broken in mid-sentence: no full stop, and
    the next line goes on in lower case.
    """
    if piece.kind == "wiki":
        return True
    count = inner = broken = 0
    for document in documents_in(piece)[0]:
        for line, following in zip(document, document[1:] + [""]):
            count += 1
            inner += len(split_sentences(line[:4096])) > 1
            broken += line[-1] not in ".!?…\"'”’):;" and following[:1].islower()
        if count > 1000:
            break
    return inner + broken > 0.2 * count


# ----- Prose -> sentences -----

# A full stop, its closing quotes, white space, and something that can open a sentence.
SENTENCE_END = re.compile(
    r"""[.!?…]["'”’)\]]*\s+(?=["'“‘(\[`]*[A-Z0-9À-ÖØ-ÞΑ-ΩА-Я])""")
NEVER_LAST = (         # a name or an example follows
    "mr mrs ms dr prof st gen col lt sgt capt rev hon sen rep gov pres messrs e.g i.e cf vs viz ca "
    "approx incl resp")
BEFORE_NUMBERS = (     # a sentence ends behind these unless a number follows
    "no nos vol vols fig figs eq eqs sec sect ch chap ed p pp art ser jan feb mar apr jun jul aug "
    "sep sept oct nov dec")
SOMETIMES_LAST = (     # a sentence ends behind these, and initials, if one of STARTERS follows
    "etc al inc ltd co corp bros jr sr dept est mt ft ph.d m.d b.a m.a a.m p.m")
ABBREVIATIONS = {word: words for words in (NEVER_LAST, BEFORE_NUMBERS, SOMETIMES_LAST)
                 for word in words.split()}
STARTERS = frozenset(
    "the a an this that these those it its he she they we i you his her their our my your there "
    "here in on at by for from with when while where who what why how if as but and so yet or "
    "after before since because although though however then thus not no all some many most both "
    "each every one two his also only even".split())
LETTERS = re.compile(r"(?:[A-Za-z]\.)*[A-Za-z]")                # an initial, or some: J, U.S, p.m
NEXT_WORD = re.compile(r"\W*(\w+)")


def split_sentences(text):
    """Returns the sentences of a piece of prose (str), white space around them removed.

    A full stop ends no sentence behind "Mr" or "e.g", nor before a number behind "No" or "Fig";
    behind initials ("J. Smith", "U.S. Army") and behind "etc" or "Inc" it does only if the next
    word is one that often opens a sentence.
    """
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        stop = end.start()
        if text[stop] == ".":
            word = text[max(start, stop - 9):stop].rpartition(" ")[2].lstrip("(\"'“‘[")
            rule = ABBREVIATIONS.get(word.lower())
            if rule is None and (len(word) == 1 or "." in word) and LETTERS.fullmatch(word):
                rule = SOMETIMES_LAST if word != "I" else None
            if rule is NEVER_LAST or rule is BEFORE_NUMBERS and text[end.end()].isdigit():
                continue
            if rule is SOMETIMES_LAST:
                following = NEXT_WORD.match(text, end.end())
                if following and following[1].lower() not in STARTERS:
                    continue
        sentences.append(text[start:end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


# ----- The corpus without a download: documentation that is on this machine already -----

MARKUP = [(re.compile(pattern), new) for pattern, new in [
    (r":\w+(?::\w+)*:`[~!]?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1"),      # :class:`~torch.Tensor`
    (r"`+([^`]*?)(?:\s*<[^>]*>)?`+_*", r"\1"),                       # ``code``, `link <url>`_
    (r"\*\*([^*]+)\*\*|(?<!\w)\*([^*]+)\*(?!\w)", r"\1\2"),          # **bold**, *emphasis*
    (r"\s+", " ")]]
TRIPLE_QUOTED = re.compile(r"""("{3}|'{3})(.*?)\1""", re.DOTALL)


def prose_sentences(text):
    """Returns the English sentences of a docstring: no code, tables, markup or short fragments."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if any(line.startswith((">>>", "..", "+--", "|", "==", "--")) for line in lines):
            continue
        paragraph = re.sub(r"\s[-*]\s+(?=[A-Z`])", ". ", " ".join(lines))      # list items
        for pattern, new in MARKUP:
            paragraph = pattern.sub(new, paragraph)
        for sentence in split_sentences(paragraph):
            letters = sum(c.isalpha() or c == " " for c in sentence)
            if sentence.count(" ") >= 5 and letters >= 0.85 * len(sentence) \
                    and not re.search(r">>>|::|__|[{}|\\]", sentence):
                sentences.append(sentence)
    return sentences


def machine_documentation():
    """Returns the default corpus, a list of documents (lists of sentences), and its size as a line.

    It is the language reference (pydoc_data) and the docstrings of the standard library, NumPy and
    PyTorch as installed here, filtered to English prose; no sentence occurs twice. It differs a
    little between versions of Python and of the packages.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [library, Path(np.__file__).parent, Path(torch.__file__).parent]
    files = [file for root in roots for file in sorted(root.rglob("*.py"))
             if root != library
             or not {"site-packages", "test", "tests"} & set(file.relative_to(root).parts)]
    try:
        from pydoc_data.topics import topics          # missing in some embedded Pythons
    except ImportError:
        topics = {}
    sources = (file.read_text(encoding="utf-8", errors="ignore")
               for file in tqdm(files, "reading documentation", unit=" files", leave=False,
                            disable=None))
    texts = (match[2] for source in sources for match in TRIPLE_QUOTED.finditer(source))
    seen, documents = set(), []
    for text in itertools.chain(topics.values(), map(inspect.cleandoc, texts)):
        fresh = [s for s in prose_sentences(text) if s not in seen and not seen.add(s)]
        if len(fresh) >= 2:
            documents.append(fresh)
    size = sum(len(sentence.encode()) + 1 for document in documents for sentence in document)
    return documents, f"{len(documents):,} documents, {size / 1e6:.1f} MB of Python documentation"


# ----- Preparing: pieces -> tokenizer.model, shards, manifest.json -----

@contextlib.contextmanager
def mapping(workers):
    """Gives a `map` that computes in worker processes, which end with this one, and holds a few
    items at a time; Python's own for one worker.

    Threads would wait for each other: a third of the work is Python's.
    """
    if workers == 1:
        yield map
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, start_workers(), end_with, (os.getpid(), None, signal.SIG_DFL))
    try:
        yield functools.partial(in_order, pool, 2 * workers)
    except concurrent.futures.process.BrokenProcessPool:
        raise DataError("a worker process died, perhaps for want of memory; set --workers lower") \
            from None
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(pool, ahead, function, items):
    """Yields function(item) of each item, in order, computed in the pool; at most `ahead` wait."""
    waiting = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def count_documents(piece):
    """Returns (how many documents begin in a piece, its bytes)."""
    documents = documents_in(piece)[0]
    return len(documents) - bool(piece.continued and documents), len(piece.data)


def survey(corpus, map):
    """Returns (the corpus's identity, a dict: documents, bytes, sha256 of its text; the pieces that
    a tokenizer is trained on, at most SAMPLE, drawn at random).

    Reads everything once, so that bad input is found before the long part begins. The digest is of
    the text as it is uncompressed. Raises DataError.
    """
    digest, count, sample = hashlib.sha256(), collections.Counter(documents=0, bytes=0), []
    draw = random.Random(0)

    def hashed(pieces):
        for number, piece in enumerate(pieces):
            digest.update(piece.data)
            place = number if number < SAMPLE else draw.randrange(number + 1)
            if place < SAMPLE:
                sample[place:place + 1] = [piece]
            yield piece

    with progress(corpus, "reading") as bar:
        for documents, size in map(count_documents, hashed(corpus.pieces(bar))):
            count.update(documents=documents, bytes=size)
    return {**count, "sha256": digest.hexdigest()}, sample


def train_tokenizer(documents, vocab_size, cased=False):
    """Returns a trained SentencePiece unigram model (bytes) of `vocab_size` pieces.

    The five special symbols are control symbols, ids 0 to 4: no text can spell them. Raises
    DataError if the text is too small.
    """
    # SentencePiece drops lines above 4,192 bytes without a word, so longer ones are cut; a
    # character has at most 4 bytes.
    lines = (sentence[i:i + 1024] for document in documents for sentence in document
             for i in range(0, len(sentence), 1024))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=vocab_size,
            model_type="unigram", character_coverage=0.9995,
            normalization_rule_name="nmt_nfkc" if cased else "nmt_nfkc_cf",
            pad_id=PAD, pad_piece="[PAD]", unk_id=UNK, unk_piece="[UNK]", bos_id=-1, eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            # A constant: another number of threads finds another vocabulary.
            num_threads=4, hard_vocab_limit=False, minloglevel=2)
    except RuntimeError as error:
        raise DataError(f"the vocabulary of {vocab_size} pieces does not suit this text: "
                        f"{str(error).strip().splitlines()[-1]}") from None
    pieces = load_tokenizer(model.getvalue()).get_piece_size()
    if pieces < vocab_size:
        raise DataError(f"a vocabulary of {vocab_size} pieces is too large for this text, which "
                        f"gives {pieces} at most; set --vocab-size lower or add text")
    return model.getvalue()


def load_tokenizer(model):
    """Returns the SentencePieceProcessor of a model given as bytes or as a path; raises DataError
    if it is none, or has other special symbols."""
    try:
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content)
        specials = [tokenizer.id_to_piece(i) for i in range(len(SPECIALS))]
    except (RuntimeError, IndexError):
        raise DataError(f"{model} is not a SentencePiece model") from None
    if specials != SPECIALS:
        raise DataError(f"{model} does not begin with {' '.join(SPECIALS)}; take a tokenizer.model "
                        "that data.py has made")
    return tokenizer


class ShardWriter:
    """Appends documents to the three arrays of one shard, buffered; `close` completes the files.

    A .npy file begins with its length, which is known only at the end: 128 bytes are kept for it.
    """
    HEADER, BUFFER = 128, 1 << 17

    def __init__(self, folder, name, token_type):
        self.paths = {array: folder / f"{name}.{array}.npy" for array in ARRAYS}
        self.types = {"tokens": np.dtype(token_type), "sentences": np.dtype(np.int64),
                      "documents": np.dtype(np.int64)}
        self.counts = dict.fromkeys(ARRAYS, 0)
        self.parts = {array: [] for array in ARRAYS}
        self.pending = 0
        for path in self.paths.values():
            path.write_bytes(bytes(self.HEADER))

    def write(self, tokens, lengths, sentences):
        """Adds documents: all their tokens, the length of each sentence, none of them 0, and the
        number of sentences of each document. Sentences before those go on with the last document.
        """
        begins = self.counts["sentences"] + len(lengths) - np.sum(sentences, dtype=int)
        self._add("documents", begins + np.cumsum(sentences) - sentences)
        self._add("sentences", self.counts["tokens"] + np.cumsum(lengths) - lengths)
        self._add("tokens", tokens)
        if self.pending > self.BUFFER:
            self._flush()

    def _add(self, array, values):
        self.parts[array].append(np.array(values, self.types[array]))   # no view of a whole piece
        self.counts[array] += len(values)
        self.pending += len(values)

    def _flush(self):
        for array, parts in self.parts.items():
            with open(self.paths[array], "ab") as file:
                file.write(np.concatenate(parts).tobytes() if parts else b"")
        self.parts, self.pending = {array: [] for array in ARRAYS}, 0

    def close(self):
        """Writes the ends and the headers; returns {file name: {"sha256": ..., "bytes": ...}}."""
        tokens, sentences = self.counts["tokens"], self.counts["sentences"]
        self._add("documents", [sentences])
        self._add("sentences", [tokens])
        self._flush()
        files = {}
        for array, path in self.paths.items():
            shape = {"descr": self.types[array].str, "fortran_order": False,
                     "shape": (self.counts[array],)}
            size = self.HEADER - 10
            with open(path, "r+b") as file:
                file.write(b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little"))
                file.write(repr(shape).encode().ljust(size - 1) + b"\n")
            files[path.name] = file_entry(path)
        return files

    def document_lengths(self):
        """Returns (documents,) the tokens of each document; after `close`."""
        sentences, documents = (np.load(self.paths[array], mmap_mode="r")
                                for array in ARRAYS[1:])
        return np.diff(sentences[documents])


def sha256_of(path):
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path):
    """Returns what the manifest holds of a file, to find it damaged later."""
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def prepare(corpus, folder, vocab_size=None, shards=8, cased=False, held_out=0.01, tokenizer=None,
            workers=None):
    """Writes a folder of shards; returns its manifest (dict). Nothing half-written stays behind.

    The corpus is read twice, to survey it and to encode it, in `workers` processes (default: one a
    core, or this one alone for less than 32 MB). tokenizer: the path of a model to take; without
    one a model of `vocab_size` pieces, 8,192 if not given, is trained. held_out: the share of the
    documents, evenly spread over the corpus, that go to a shard of their own; but at least 100 and
    at most half of them. A folder that holds the same text prepared in the same way is left as it
    is.
    Raises DataError if the folder holds something else or the text cannot be used, OSError where it
    cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    workers = workers or (os.cpu_count() or 1 if corpus.bytes > 32 * PIECE else 1)
    if tokenizer is not None:
        given = load_tokenizer(tokenizer).get_piece_size()
        if vocab_size not in (None, given):
            raise DataError(f"{tokenizer} has {given} pieces, not {vocab_size}")
    vocab_size = given if tokenizer is not None else vocab_size or 8192
    if not 1 <= shards < 1 << 15 or vocab_size < 16 or not 0 < held_out <= 0.5:
        raise DataError("1 to 32,767 shards, at least 16 pieces of vocabulary and a share of "
                        "held-out documents up to 0.5 are needed")
    if folder.exists() and any(folder.iterdir()) and not (folder / "manifest.json").exists():
        raise DataError(f"{folder} is not empty and holds no shards; choose another folder")
    settings = {"version": VERSION, "vocab_size": vocab_size, "shards": shards, "cased": cased,
                "split": corpus.split, "held_out": held_out,
                "tokenizer": sha256_of(tokenizer) if tokenizer is not None else None}
    found = load_manifest(folder) if (folder / "manifest.json").exists() else None
    with mapping(workers) as map:
        return _prepare(corpus, folder, settings, found, tokenizer, map)


def _prepare(corpus, folder, settings, found, tokenizer, map):
    """The part of `prepare` behind its checks; found: the manifest that is there, or None."""
    shards = settings["shards"]
    identity, sample = survey(corpus, map)
    if found:
        if found["corpus"] == identity and all(found[key] == settings[key] for key in settings):
            return found
        raise DataError(f"{folder} holds another corpus or other settings ("
                        f"{found['corpus']['documents']:,} documents, sha256 "
                        f"{found['corpus']['sha256'][:12]}, {found['vocab_size']} pieces, "
                        f"{found['shards']} shards); remove it or choose another folder")
    total = identity["documents"]
    apart = min(max(100, int(settings["held_out"] * total)), total // 2)
    if apart < 2 or total - apart < 2 * shards:
        raise DataError(f"the corpus has {total} documents, too few for {shards} shards and "
                        "held-out documents; documents are separated by blank lines")
    with replaced(folder) as temporary:
        if tokenizer is None:
            with progress(None, "training the tokenizer"):
                model = train_tokenizer(itertools.chain.from_iterable(
                    sentences_in(piece)[0] for piece in sample),
                    settings["vocab_size"], settings["cased"])
            (temporary / "tokenizer.model").write_bytes(model)
        else:
            shutil.copyfile(tokenizer, temporary / "tokenizer.model")
        del sample
        manifest = {**settings, "corpus": identity,
                    **write_shards(corpus, temporary, total, shards, apart, map)}
        manifest["files"]["tokenizer.model"] = file_entry(temporary / "tokenizer.model")
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


@contextlib.contextmanager
def replaced(folder):
    """Gives a temporary folder beside `folder` that takes its name at the end, if no exception
    comes; removes what a run that was killed on this machine left of its own."""
    mine = f"{folder.name}.partial-{socket.gethostname()}-"
    for rest in folder.parent.glob(f"{glob.escape(mine)}*"):
        pid = rest.name.removeprefix(mine)
        if pid.isdigit() and not alive(int(pid)):
            shutil.rmtree(rest)
    temporary = folder.with_name(f"{mine}{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            os.replace(temporary, folder)
        except OSError:                 # another node, on the same disk, was faster
            if load_manifest(folder) != load_manifest(temporary):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def alive(pid):
    """Returns True if a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Encoded(NamedTuple):
    """A piece as numbers."""
    tokens: np.ndarray       # all its tokens
    lengths: np.ndarray      # (sentences,) int64
    sentences: np.ndarray    # (documents,) int64, sentences of each
    sizes: np.ndarray        # (documents,) tokens of each
    continued: bool
    skipped: collections.Counter


@functools.lru_cache(1)
def cached_tokenizer(path, digest):
    """Returns the tokenizer of a path, loaded once in each worker; digest: its SHA-256, since
    another one can come to have the same path."""
    return load_tokenizer(path)


def encode(model, token_type, piece):
    """Returns the Encoded of a Piece by the tokenizer of (path, digest); sentences without a token
    are left out."""
    documents, skipped = sentences_in(piece)
    ids = cached_tokenizer(*model).encode(
        [sentence for document in documents for sentence in document], num_threads=1)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(itertools.chain.from_iterable(ids), token_type, int(lengths.sum()))
    of_document = np.repeat(np.arange(len(documents)), list(map(len, documents)))
    kept = lengths > 0
    skipped["sentences without a token"] += int((~kept).sum())
    return Encoded(tokens, lengths[kept], np.bincount(of_document[kept], minlength=len(documents)),
                   np.bincount(of_document, lengths, len(documents)), piece.continued, skipped)


def write_shards(corpus, folder, total, shards, held_out, map):
    """Encodes the corpus into `shards` shards and a held-out one; returns counts and digests.

    Document d of `total` is held out where d * held_out / total passes a whole number; the others
    go to the shards in turn. A document of less than two tokens cannot make an example and is left
    out.
    """
    model = folder / "tokenizer.model"
    vocab_size = load_tokenizer(model).get_piece_size()
    token_type = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    writers = [ShardWriter(folder, name, token_type)
               for name in [HELD_OUT] + [f"train-{s:05d}" for s in range(shards)]]
    begun, trained, last, skipped = 0, 0, -1, collections.Counter()
    unigrams = np.zeros(vocab_size, np.int64)
    encoder = functools.partial(encode, (model, sha256_of(model)), token_type)
    with progress(corpus, "encoding") as bar:
        for piece in map(encoder, corpus.pieces(bar)):
            first = int(piece.continued and last >= 0)
            number = begun + np.arange(len(piece.sizes) - first)
            is_held = number * held_out // total < (number + 1) * held_out // total
            new = deal(piece.sizes[first:], is_held, trained, shards)
            to = np.concatenate([np.full(first, last, np.int16), new])
            begun, trained, last = begun + len(new), trained + (new > 0).sum(), [last, *to][-1]
            of_sentence = np.repeat(to, piece.sentences)
            of_token = np.repeat(of_sentence, piece.lengths)
            parts = (by_number(piece.tokens, of_token), by_number(piece.lengths, of_sentence),
                     by_number(piece.sentences[first:], to[first:]))
            for w in {*parts[0]} - {-1}:
                writers[w].write(*(part.get(w, np.array([], int)) for part in parts))
            unigrams += np.bincount(piece.tokens[of_token > 0], minlength=vocab_size)
            skipped.update(piece.skipped)
            skipped["documents of less than two tokens"] += int((to < 0).sum())
            bar.set_postfix_str(f"{sum(writer.counts['tokens'] for writer in writers):,} tokens")
    counts = [writer.counts.copy() for writer in writers]
    if min(count["documents"] for count in counts) < 2:
        raise DataError(f"too few documents for {shards} shards, two in each; set --shards lower")
    np.save(folder / "unigrams.npy", unigrams)
    files, histogram = {"unigrams.npy": file_entry(folder / "unigrams.npy")}, np.zeros(64, int)
    for writer in writers:
        files |= writer.close()
        histogram += np.bincount(np.log2(writer.document_lengths()).astype(int), minlength=64)
    return {"sentences": sum(count["sentences"] for count in counts),
            "train_documents": sum(count["documents"] for count in counts[1:]),
            "train_tokens": sum(count["tokens"] for count in counts[1:]),
            "heldout_documents": counts[0]["documents"], "heldout_tokens": counts[0]["tokens"],
            "unknown_tokens": int(unigrams[UNK]), "skipped": dict(+skipped),
            "lengths": {str(2 ** k): int(n) for k, n in enumerate(histogram) if n}, "files": files}


def deal(sizes, is_held, turn, shards):
    """Returns (n,) int16, which writer takes each of n documents: 0 is the held-out one, 1 and on
    are the shards in turn, beginning at `turn`; -1 drops a document of less than two tokens."""
    to = np.where(sizes < 2, -1, np.where(is_held, 0, 1)).astype(np.int16)
    trained = np.flatnonzero(to > 0)
    to[trained] += ((turn + np.arange(len(trained))) % shards).astype(np.int16)
    return to


def by_number(values, numbers):
    """Returns {number: the values that have it, in order}; both (n,)."""
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    return dict(zip(found.tolist(), np.split(values[order], starts[1:])))


def progress(corpus, label):
    """Returns a bar on stderr: bytes read of a corpus, MB/s and the time left; or a label alone."""
    if corpus is None:
        return tqdm(desc=label, bar_format="{desc} ... {elapsed}", leave=False, disable=None)
    return tqdm(desc=label, total=corpus.bytes, unit="B", unit_scale=True, leave=False,
                disable=None, dynamic_ncols=True)


def split_folder(folder, nodes, ranks_per_node=1):
    """Writes, for each of `nodes`, the folder of what its ranks read: FOLDER-node-0 and so on,
    links where the disk allows them and else copies. Returns [(path, training shards in it)].

    Raises DataError where a file is missing or damaged, or a folder of that name is there already.
    """
    folder = Path(os.path.abspath(folder))
    verify(folder, everything=True)
    total, size, written = load_manifest(folder)["shards"], nodes * ranks_per_node, []
    for node in range(nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        names = {name for rank in ranks for name in files_of(total, rank, size)}
        target = folder.with_name(f"{folder.name}-node-{node}")
        if target.exists():
            raise DataError(f"{target} exists; remove it or give the shards another name")
        with replaced(target) as temporary:
            for name in sorted(names | {"manifest.json"}):
                try:
                    os.link(folder / name, temporary / name)
                except OSError:
                    shutil.copyfile(folder / name, temporary / name)
        written.append((target, sum(name.endswith(".tokens.npy") for name in names) - 1))
    return written


def files_of(shards, rank, size):
    """Returns the names of the files that rank `rank` of `size` reads: its own shards, the held-out
    one, the tokenizer and the counts of tokens. Example i is of shard i mod `shards` and of rank i
    mod `size`; both meet in some i where they agree modulo the greatest common divisor."""
    mine = [f"train-{s:05d}" for s in range(shards) if (s - rank) % np.gcd(shards, size) == 0]
    return ["tokenizer.model", "unigrams.npy"] + [
        f"{shard}.{array}.npy" for shard in [HELD_OUT] + mine for array in ARRAYS]


def load_manifest(folder):
    """Returns the manifest of a folder of shards (dict); raises DataError if there is none."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        version, _, _ = manifest["version"], manifest["files"], manifest["corpus"]
    except FileNotFoundError:
        raise DataError(f"{path} is missing: no prepared shards there; make them with data.py") \
            from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; prepare the folder again with data.py") from None
    if version != VERSION:
        raise DataError(f"{path} is of format {version}, this program reads "
                        f"{VERSION}; prepare the folder again with data.py")
    return manifest


def verify(folder, rank=0, size=1, everything=False):
    """Checks the digests of what rank `rank` of `size` reads, or of all files. Raises DataError
    that names the first file that is missing, cut or damaged."""
    shards = load_manifest(folder)["shards"]
    if everything:
        check_files(folder, files_of(shards, 0, 1), "all shards are needed")
    else:
        check_files(folder, files_of(shards, rank, size), f"rank {rank} needs it")


def check_files(folder, names, why):
    """Checks the digests of some files of a folder of shards; see `verify`."""
    folder, manifest = Path(folder), load_manifest(folder)
    for name in names:
        path, entry = folder / name, manifest["files"][name]
        if not path.exists():
            raise DataError(f"{path} is missing; {why}")
        if path.stat().st_size != entry["bytes"]:
            raise DataError(f"{path} has {path.stat().st_size:,} bytes, expected "
                            f"{entry['bytes']:,}; copy it again or prepare the folder again")
        if sha256_of(path) != entry["sha256"]:
            raise DataError(f"{path} is damaged (its sha256 is not the manifest's); copy it again "
                            "or prepare the folder again")


def unigram_losses(folder):
    """Returns (vocabulary,) float64: the loss, in nats, of each token for a predictor that knows
    nothing but how often the training text has it (with one added, so that none is infinite)."""
    counts = np.load(Path(folder) / "unigrams.npy") + 1
    return -np.log(counts / counts.sum())


# ----- Examples: (seed, phase, i) -> tokens with a sentence pair and masks -----

class Example(NamedTuple):
    """One example: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without pairs, its masks applied."""
    tokens: np.ndarray      # (T,) int64
    b_start: int            # where segment B begins; T without pairs
    positions: np.ndarray   # (m,) where tokens were chosen to be predicted, ascending
    labels: np.ndarray      # (m,) the tokens that stood there
    random_b: int           # 1 if B is not the true next of A, 0 if it is, IGNORED without pairs


class Batch(NamedTuple):
    """A micro-batch: B examples, T tokens, M masked tokens of all examples together, rounded up."""
    tokens: torch.Tensor     # (B, T) int64
    segments: torch.Tensor   # (B, T) int64: 0 for A and padding, 1 for B
    mask: torch.Tensor       # (B, T) bool: True where there is a token, False on padding
    positions: torch.Tensor  # (M,) int64, flat positions b * T + t of masked tokens, then zeros
    labels: torch.Tensor     # (M,) int64, the tokens that stood there, then IGNORED
    random_b: torch.Tensor   # (B,) int64: 0 where B is the true next, 1 where it is not, or IGNORED

    def to(self, device):
        """Returns the batch on another device."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


class Shard(NamedTuple):
    """The arrays of one shard and how its documents are cut into windows of one length."""
    tokens: np.ndarray        # (tokens,)
    sentences: np.ndarray     # (sentences + 1,) offsets into tokens
    documents: np.ndarray     # (documents + 1,) offsets into tokens
    windows: np.ndarray       # (documents + 1,) number of the first window of each document


class PretrainingData(torch.utils.data.Dataset):
    """Example i of a phase is a pure function of (seed, phase, i), for i = 0, 1, 2 ... without end.

    It comes from shard i mod S. Each document is cut into windows of about `seq_len` tokens; each
    epoch of a shard goes through all of its windows in an order of its own, and cuts documents
    longer than one at other places. An example is the text from the sentence at the window's begin
    on. `seq_len` counts the special symbols.

    pairs: "nsp" (BERT) cuts the text in two at a sentence boundary; for half of the examples the
    second part is replaced by as much text from another document of the same shard. "sop" (ALBERT,
    arXiv 1909.11942, section 3.1) exchanges the two parts for half of them. "none" leaves one text.

    `mask_fraction` of the tokens are chosen; of these 80 % become [MASK], 10 % a random token and
    10 % stay (BERT, appendix A.1). whole_words: all tokens of a word are chosen, or none.

    Workers map the files themselves. Raises DataError where the folder holds no shards.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, pairs="nsp",
                 mask_fraction=MASK_FRACTION, whole_words=False):
        manifest = load_manifest(folder)
        self.folder, self.key = Path(folder), (seed, phase)
        self.seq_len, self.pairs = seq_len, pairs
        self.mask_fraction, self.vocab_size = mask_fraction, manifest["vocab_size"]
        self.begins_word = None                       # (V,) bool, for whole words
        if whole_words:
            tokenizer = load_tokenizer(self.folder / "tokenizer.model")
            self.begins_word = np.array([tokenizer.id_to_piece(i).startswith("▁")
                                         for i in range(self.vocab_size)])
        self.names = [HELD_OUT] if held_out else \
            [f"train-{s:05d}" for s in range(manifest["shards"])]
        self.body = seq_len - (2 if pairs == "none" else 3)      # without the special symbols
        self.shards, self.orders = {}, {}             # opened and shuffled when first needed

    def __getstate__(self):
        return {**self.__dict__, "shards": {}, "orders": {}}      # a worker opens its own

    def shard(self, s):
        """Returns shard number s, opened at its first use."""
        if s not in self.shards:
            tokens, sentences, documents = (
                np.load(self.folder / f"{self.names[s]}.{array}.npy", mmap_mode="r")
                for array in ARRAYS)
            starts = np.asarray(sentences[documents])
            windows = np.maximum(1, -(-np.diff(starts) // self.body))
            self.shards[s] = Shard(np.asarray(tokens), np.asarray(sentences), starts,
                                   np.concatenate([[0], np.cumsum(windows)]))
        return self.shards[s]

    def order(self, s, epoch):
        """Returns (windows,) uint32, the order in which an epoch goes through shard s."""
        if self.orders.get(s, (None,))[0] != epoch:
            rng = np.random.default_rng((*self.key, s, epoch, 0))
            windows = int(self.shard(s).windows[-1])
            self.orders[s] = epoch, rng.permutation(windows).astype(np.uint32)
        return self.orders[s][1]

    def layout(self, numbers):
        """Returns what examples `numbers` (n,) are made of, [n] rows of (shard, where A begins and
        ends, where B does, label), int64 (n, 6); places are offsets into the shard's tokens."""
        numbers = np.asarray(numbers, np.int64)
        rows, (turns, of_shard) = np.empty((len(numbers), 6), np.int64), \
            np.divmod(numbers, len(self.names))
        chance = uniform(numbers, 5, self.key)
        for s in np.unique(of_shard):
            at, = np.nonzero(of_shard == s)
            epochs, places = np.divmod(turns[at], self.shard(s).windows[-1])
            for epoch in np.unique(epochs):
                some = epochs == epoch
                rows[at[some], 0] = s
                windows, shift = self.order(s, epoch)[places[some]], 0.618 * epoch % 1
                rows[at[some], 1:] = self._cut(self.shard(s), windows, shift, chance[at[some]].T)
        return rows

    def _cut(self, shard, window, shift, chance):
        """Returns layout's last five columns for examples of one shard; shift: by which part of a
        window all begin later, chance: (5, n)."""
        document = np.searchsorted(shard.windows, window, "right") - 1
        first, last = shard.documents[document], shard.documents[document + 1]
        length = np.where(chance[0] < SHORT_FRACTION,
                          2 + (chance[1] * (self.body - 1)).astype(np.int64), self.body)
        token = first + (window - shard.windows[document]) * self.body + int(shift * self.body)
        start = segment_start(shard, token, first, last, self.body)
        end = np.minimum(start + length, last)
        label = (chance[2] < 0.5).astype(np.int64)
        if self.pairs == "none":
            return np.stack([start, end, end, end, np.full_like(start, IGNORED)], 1)
        # A ends where a sentence does; in the middle if none does in between
        low = np.searchsorted(shard.sentences, start, "right")
        ends = np.searchsorted(shard.sentences, end, "left") - low
        cut = np.where(ends > 0, shard.sentences[low + (chance[3] * ends).astype(np.int64)],
                       (start + end) // 2)
        if self.pairs == "sop":
            a = np.where(label, (cut, end), (start, cut))
            b = np.where(label, (start, cut), (cut, end))
            return np.stack([*a, *b, label], 1)
        # A token drawn evenly from all others of the shard: long documents as often as in A
        elsewhere = (chance[4] * (shard.documents[-1] - (last - first))).astype(np.int64)
        elsewhere += np.where(elsewhere >= first, last - first, 0)
        other = np.searchsorted(shard.documents, elsewhere, "right") - 1
        low, high = shard.documents[other], shard.documents[other + 1]
        b = segment_start(shard, elsewhere, low, high, end - cut)
        return np.stack([start, cut, np.where(label, b, cut),
                         np.where(label, np.minimum(b + end - cut, high), end), label], 1)

    def lengths(self, numbers):
        """Returns (n,) how many tokens these examples have, special symbols included, without
        making them."""
        _, a, a_end, b, b_end, _ = self.layout(numbers).T
        return a_end - a + b_end - b + self.seq_len - self.body

    def __getitem__(self, i):
        """Returns Example i."""
        return self.__getitems__([i])[0]

    def __getitems__(self, numbers):
        """Returns the Examples of a list of numbers; what a DataLoader calls for a batch."""
        examples = []
        for i, (s, a, a_end, b, b_end, label) in zip(numbers, self.layout(numbers).tolist()):
            text = self.shards[s].tokens
            tokens = np.empty(a_end - a + b_end - b + self.seq_len - self.body, np.int64)
            b_start = a_end - a + 2
            tokens[0], tokens[b_start - 1], tokens[-1] = CLS, SEP, SEP
            tokens[1:b_start - 1], tokens[b_start:-1] = text[a:a_end], text[b:b_end]
            rng = np.random.default_rng((*self.key, i))
            positions, labels = mask_tokens(tokens, b_start, self.vocab_size, rng,
                                            self.mask_fraction, self.begins_word)
            examples.append(Example(tokens, b_start, positions, labels, label))
        return examples


def uniform(numbers, columns, key):
    """Returns (n, columns) float64 in [0, 1), each a function of its number, its column and the key
    (a tuple of numbers) only: SplitMix64 (Steele, Lea, Flood 2014) with counters."""
    x = np.asarray(numbers, np.uint64)[:, None] * np.uint64(columns) + np.arange(
        columns, dtype=np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.random.SeedSequence(key).generate_state(1, np.uint64)
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0 ** -53


def segment_start(shard, token, first, last, length):
    """Returns where segments of about `length` tokens begin that hold the given tokens of documents
    [first, last), all (n,): at the begin of a sentence where one is near, so that not more than
    half of the segment lies before the token; but the last one ends where its document does.
    """
    sentence = shard.sentences[np.searchsorted(shard.sentences, token, "right") - 1]
    start = np.where(token - sentence <= length // 2, sentence, token)
    latest = np.maximum(first, last - length)
    return np.where(token >= latest, latest, start)


def mask_tokens(tokens, b_start, vocab_size, rng, fraction=MASK_FRACTION, begins_word=None):
    """Masks `tokens` (T,), [CLS] A [SEP] B [SEP], in place; returns (positions, labels), each (m,).

    m is `fraction` of the tokens of A and B in the mean, but at least one token or word, which is
    more where the text is a few tokens; special symbols are never chosen. begins_word: (V,) bool,
    to choose whole words, of up to 8 tokens; None chooses tokens one by one.
    """
    places = np.arange(1, len(tokens) - 1)
    places = places[places != b_start - 1]             # not the [SEP] between A and B
    if begins_word is None:
        word, order = None, rng.permutation(len(places))
        ends = np.arange(1, len(places) + 1)
    else:
        begins = begins_word[tokens[places]] | (places == b_start)
        begins[0], at = True, np.arange(len(places))
        inside = at - np.maximum.accumulate(np.where(begins, at, 0))
        word = np.cumsum(inside % LONGEST_WORD == 0) - 1
        sizes = np.bincount(word)
        order = rng.permutation(len(sizes))
        ends = np.cumsum(sizes[order])
    # Words in random order, as many as fit; the next one by the chance that makes the mean right
    want = fraction * len(places)
    count = int(np.searchsorted(ends, want, "right"))
    before = ends[count - 1] if count else 0
    count += count < len(ends) and rng.random() * (ends[count] - before) < want - before
    chosen = order[:max(1, count)]
    positions = places[np.sort(chosen) if word is None else np.isin(word, chosen)]
    labels = tokens[positions]
    fate = rng.random(len(positions))
    other = rng.integers(len(SPECIALS), vocab_size, len(positions))
    tokens[positions] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels))
    return positions, labels


def collate(examples):
    """Returns the Batch of a list of examples, as long as the longest."""
    return Batch(*map(torch.from_numpy, arrays_of(examples)))


def arrays_of(examples):
    """Returns the arrays of a Batch of a list of examples.

    T is rounded up to a multiple of 8 and M to one of 64: a few shapes instead of hundreds, each of
    which would leave holes of its own in the heap (625 MB after 500 steps, 412 so) and its kernels.
    """
    longest = -(-max(len(example.tokens) for example in examples) // 8) * 8
    tokens = np.full((len(examples), longest), PAD, np.int64)
    segments, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    for b, example in enumerate(examples):
        end = len(example.tokens)
        tokens[b, :end] = example.tokens
        segments[b, example.b_start:end] = 1
        mask[b, :end] = True
    masked = sum(len(example.labels) for example in examples)
    positions = np.zeros(-(-masked // 64) * 64, np.int64)
    labels = np.full_like(positions, IGNORED)
    positions[:masked] = np.concatenate([b * longest + e.positions for b, e in enumerate(examples)])
    labels[:masked] = np.concatenate([example.labels for example in examples])
    random_b = np.array([example.random_b for example in examples])
    return tokens, segments, mask, positions, labels, random_b


def micro_batches(steps, global_batch, micro_batch, rank, size, lengths=None):
    """Yields the example numbers of each micro-batch of rank `rank` of `size`, step after step.

    Step s takes the examples s * global_batch up to (s + 1) * global_batch; a rank those that are
    `rank` modulo `size`. steps: a range. global_batch is divisible by micro_batch * size.

    lengths: a function of example numbers (n,), to deal the examples of a step by length in place
    of number: sorted, then to the ranks in snake order, so that each has as many tokens; a
    micro-batch takes neighbours, so that there is little padding, the longest last, whose backward
    hides the exchange. (Presorting: Kim et al., arXiv 2402.02447; padding exchange: Zeng et al.,
    arXiv 2208.08124. Since lengths follow from numbers, nothing needs to be exchanged.)
    """
    for step in steps:
        numbers = np.arange(step * global_batch, (step + 1) * global_batch)
        if lengths:
            dealt = numbers[np.argsort(lengths(numbers), kind="stable")].reshape(-1, size)
            dealt[1::2] = dealt[1::2, ::-1]
            numbers = dealt.flatten()
        mine = numbers[rank::size].tolist()
        for k in range(0, len(mine), micro_batch):
            yield mine[k:k + micro_batch]


def loader(dataset, batches, workers=1, prefetch=2, pin_memory=False):
    """Yields the Batch of each list of example numbers, in order.

    prefetch: batches that each worker makes ahead. Workers send arrays through a pipe, since to
    share a tensor's memory takes longer than to copy it. A SIGTERM to the whole process group
    (torchrun and batch systems send it) does not end them, so that the step can be finished.
    """
    options = {}
    if workers:
        options = {"num_workers": workers, "prefetch_factor": prefetch,
                   "multiprocessing_context": start_workers(),
                   "worker_init_fn": functools.partial(end_with, os.getpid())}
    for arrays in torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=arrays_of,
                                              **options):
        batch = Batch(*map(torch.from_numpy, arrays))
        yield Batch(*(tensor.pin_memory() for tensor in batch)) if pin_memory else batch


def start_workers():
    """Returns the context that worker processes are started in: fresh ones (forkserver), since a
    fork after threads have run can deadlock. A SIGTERM does not end them; our end does."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "sentencepiece"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)       # the workers' server inherits it
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)
    return context


def end_with(pid, worker=None, on_sigterm=signal.SIG_IGN):
    """Ends this worker process once the process `pid` is gone, however it went; not on SIGTERM,
    unless asked, nor on Ctrl-C, which that process gets as well."""
    signal.signal(signal.SIGTERM, on_sigterm)             # over the handler that torch has set
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    def watch():
        while alive(pid):
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


# ----- The program -----

def describe(manifest):
    """Returns a report on prepared shards, a few lines of text."""
    corpus = manifest["corpus"]
    documents = manifest["train_documents"] + manifest["heldout_documents"]
    tokens = manifest["train_tokens"] + manifest["heldout_tokens"]
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in manifest["skipped"].items())
    return (f"{corpus['documents']:,} documents, {manifest['sentences']:,} sentences, "
            f"{corpus['bytes'] / 1e6:.1f} MB, sha256 {corpus['sha256'][:16]}\n"
            f"{tokens:,} tokens, {tokens / documents:.0f} a document, of a vocabulary of "
            f"{manifest['vocab_size']:,} in {manifest['shards']} shards; "
            f"{manifest['heldout_documents']:,} documents held out; "
            f"[UNK] {manifest['unknown_tokens'] / manifest['train_tokens']:.2%}; "
            f"skipped: {skipped or 'nothing'}")


def show(folder):
    """Returns `describe`, the lengths of the documents as a histogram, and three held-out examples
    as words, behind each chosen token what stood there; lines of text."""
    check_files(folder, files_of(0, 0, 1), "every folder of shards has it")
    manifest, tokenizer = load_manifest(folder), load_tokenizer(Path(folder) / "tokenizer.model")
    lines = [describe(manifest), "", "tokens a document"]
    most = max(manifest["lengths"].values())
    for low, count in manifest["lengths"].items():
        bounds = f"{int(low):,} to {2 * int(low) - 1:,}"
        lines.append(f"{bounds:>24} {count:>12,} {'#' * -(-50 * count // most)}")
    examples = PretrainingData(folder, 64, held_out=True)
    for i in range(3):
        example = examples[i]
        words = [tokenizer.id_to_piece(token) for token in example.tokens.tolist()]
        for position, label in zip(example.positions, example.labels.tolist()):
            words[position] += f"({tokenizer.id_to_piece(label).replace('▁', '') or ' '})"
            if example.tokens[position] == MASK:
                words[position] = "▁" + words[position]
        words = [" " + word if word in SPECIALS else word for word in words]
        lines += ["", f"example {i}, B {'does not follow' if example.random_b else 'follows'} A:",
                  "   " + "".join(words).replace("▁", " ").replace("[SEP]", "[SEP] ")]
    return "\n".join(lines)


def positive(text):
    """Returns the number that a flag's text spells; raises ValueError unless it is 1 or more."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def main():
    parser = argparse.ArgumentParser(description="Prepare text for BERT pre-training.")
    add = parser.add_argument
    add("corpus", nargs="*", help="files, folders or patterns; none: this machine's documentation")
    add("--out", default="shards/docs", help="the folder to write; default: shards/docs")
    add("--vocab-size", type=int, metavar="N", help="pieces, special symbols included; default: "
        "8192, or those of --tokenizer")
    add("--tokenizer", metavar="FILE", help="take this tokenizer.model in place of a new one")
    add("--shards", type=int, default=8, metavar="N", help="a multiple of the ranks lets each read "
        "only its own; default: 8")
    add("--held-out", type=float, default=0.01, metavar="X", help="share of the documents that "
        "training never sees, but at least 100 documents; default: 0.01")
    add("--cased", action="store_true", help="keep upper case")
    add("--sentences", choices=["auto", "lines", "prose"], default="auto", help="what a line is: a "
        "sentence, a part of a paragraph; default: auto, seen from the first thousand lines")
    add("--workers", type=positive, metavar="N", help="processes that encode; default: one "
        "a core, for less than 32 MB none")
    add("--show", metavar="DIR", help="report on prepared shards, and show three examples")
    add("--split", metavar="DIR", help="write what each node needs of prepared shards, DIR-node-0 "
        "and so on")
    add("--nodes", type=positive, default=1, metavar="N", help="for --split")
    add("--ranks-per-node", type=positive, default=1, metavar="N", help="for --split: torchrun's "
        "--nproc_per_node")
    args = parser.parse_args()
    began = time.perf_counter()
    try:
        if args.show:
            print(show(args.show))
        elif args.split:
            for folder, shards in split_folder(args.split, args.nodes, args.ranks_per_node):
                print(f"{folder}: {shards} training shards; copy it to the node as {args.split}")
        else:
            manifest = prepare(corpus_of(args.corpus, args.sentences), args.out, args.vocab_size,
                               args.shards, args.cased, args.held_out, args.tokenizer, args.workers)
            print(show(args.out))
            seconds = time.perf_counter() - began
            print(f"\n{args.out} is ready: {seconds:.0f} s, "
                  f"{manifest['corpus']['bytes'] / 1e6 / seconds:.1f} MB/s")
    except DataError as error:
        sys.exit(f"data.py: {error}")
    except KeyboardInterrupt:
        sys.exit("data.py: stopped; nothing is left of it")
    except OSError as error:                           # a full disk does not tell which file
        sys.exit(f"data.py: {error.filename or args.out}: {error.strerror or error}")


def corpus_of(paths, split="auto"):
    """Returns the Corpus of these files, or of this machine's documentation where there are none.
    """
    if paths:
        return Corpus(paths, split)
    documents, summary = machine_documentation()
    print(summary)
    return Corpus(documents=documents)


if __name__ == "__main__":
    main()
