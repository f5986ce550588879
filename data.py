"""Text -> SentencePiece -> shards on disk -> masked sentence-pair batches.

    python data.py                             # this machine's own documentation
    python data.py corpus/*.txt.gz --out shards/wiki --vocab-size 30522 --shards 256

Input files are text with one sentence a line and a blank line between documents, plain prose with a
blank line between documents, or JSON lines with a `text` field; each also as .gz, .bz2 or .xz.

A folder of shards holds `tokenizer.model`, `manifest.json`, `unigrams.npy` (how often the training
text has each token) and, for each shard, three flat arrays:

    NAME.tokens.npy      uint16 or uint32, every token of the shard, no special symbols
    NAME.sentences.npy   int64, where each sentence begins in `tokens`, and their end
    NAME.documents.npy   int64, where each document begins in `sentences`, and their end

Masks and sentence pairs are made on the fly (BERT, arXiv 1810.04805, section 3.1 and appendix A.2),
so that both phases, at any length, read the same shards.

Shapes: B examples, T tokens, M masked tokens of a batch.
"""
import argparse
import bz2
import collections
import functools
import gzip
import hashlib
import inspect
import io
import itertools
import json
import lzma
import multiprocessing.forkserver
import os
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

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VERSION = 1                 # of the folder's format
HELD_OUT = "heldout"        # the name of the shard that training never reads
IGNORED = -100              # the label that torch's cross-entropy passes over
MASK_FRACTION = 0.15
SHORT_FRACTION = 0.10       # of the examples; so the model meets short inputs in pre-training too
ARRAYS = ("tokens", "sentences", "documents")


class DataError(ValueError):
    """Input or shards that cannot be used; the message says which file, what and what to do."""


# ----- Reading: files -> documents, each a list of sentences -----

OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ABBREVIATIONS = frozenset(
    "e.g i.e etc vs cf al fig figs eq sec no vol ed eds pp mr mrs ms dr prof st jr sr inc ltd co "
    "corp dept est approx jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k a.m p.m".split())
# A full stop, its closing quotes, white space, and something that can open a sentence.
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s+(?=["'“‘(\[`]*[A-Z0-9À-Þ])""")


def split_sentences(text):
    """Returns the sentences of a piece of prose (str), white space around them removed.

    A full stop ends no sentence after an abbreviation or a single initial ("J. Smith").
    """
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        word = text[start:end.start()].rpartition(" ")[2].lstrip("(\"'“‘[")
        initial = len(word) == 1 and word.isupper() and word != "I"
        if text[end.start()] == "." and (initial or word.lower() in ABBREVIATIONS):
            continue
        sentences.append(text[start:end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def read_lines(path):
    """Yields the lines of a text file (str, stripped), decompressed by its ending.

    Raises DataError with file and line where the bytes are not UTF-8 or the archive is broken.
    """
    number = 0
    try:
        with OPENERS.get(Path(path).suffix, open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:
                    raise DataError(f"{path}, line {number}: a NUL byte; this is not a text file")
                yield text.strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}, byte {error.start}: not UTF-8; convert the file, "
                        "for example with iconv") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: the compressed file is damaged after line {number} ({error})") \
            from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def is_prose(blocks):
    """Returns True if blocks of lines are prose (wrapped or paragraphs), not a sentence a line.

    Prose shows sentence ends inside its lines, or lines broken in mid-sentence: no full stop, and
    the next line goes on in lower case.
    """
    lines = inner = broken = 0
    for block in blocks:
        for line, following in zip(block, block[1:] + [""]):
            lines += 1
            inner += len(split_sentences(line)) > 1
            broken += line[-1] not in ".!?…\"'”’):;" and following[:1].islower()
    return inner + broken > 0.2 * lines


def blocks_of(path):
    """Yields the documents of a file as lists of lines that are not blank; raises DataError where a
    line of JSON has no text, or where a million lines pass without the end of a document."""
    first = next(filter(None, read_lines(path)), "")
    if re.match(r"\{\s*[\"}]", first):
        for number, line in enumerate(read_lines(path), 1):
            try:
                text = json.loads(line)["text"].encode("utf-8", "replace").decode() if line else ""
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"{path}, line {number}: not a JSON object with a text in its "
                                f"`text` field: {line[:60]!r}") from None
            yield [part for part in map(str.strip, text.splitlines()) if part]
    else:
        for blank, block in itertools.groupby(read_lines(path), lambda line: not line):
            if not blank:
                document = list(itertools.islice(block, 1_000_000))
                if next(block, None) is not None:
                    raise DataError(f"{path}: a million lines without a blank one, which separates "
                                    f"documents, from {document[0][:60]!r} on")
                yield document


def read_documents(paths, split="auto"):
    """Yields the documents of text or JSON-lines files, each a list of sentences (str).

    split: "lines" takes each line as a sentence, "prose" joins the lines of a document and splits
    them at sentence ends, "auto" decides for each file by its first thousand lines.
    """
    for path in paths:
        blocks = filter(None, blocks_of(path))
        head, size = [], 0
        while split == "auto" and size < 1000 and (block := next(blocks, None)):
            head.append(block)
            size += len(block)
        prose = is_prose(head) if split == "auto" else split == "prose"
        for block in itertools.chain(head, blocks):
            yield split_sentences(" ".join(block)) if prose else block


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
# ----- Preparing: documents -> tokenizer.model, shards, manifest.json -----

def survey(documents):
    """Returns the corpus's identity, a dict: documents, sentences, bytes, sha256 of its text.

    The digest is of sentences and documents, not of files: the same text compressed or in another
    of the formats is the same corpus.
    """
    digest, count = hashlib.sha256(), collections.Counter(documents=0, sentences=0, bytes=0)
    for document in documents:
        text = ("\n".join(document) + "\n\n").encode()
        digest.update(text)
        count.update(documents=1, sentences=len(document), bytes=len(text) - 1)
    return {**count, "sha256": digest.hexdigest()}


def train_tokenizer(documents, vocab_size, cased=False):
    """Returns a trained SentencePiece unigram model (bytes) of `vocab_size` pieces.

    The five special symbols are control symbols, ids 0 to 4: no text can spell them. Training sees
    at most a million sentences, drawn at random. Raises DataError if the text is too small.
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
            input_sentence_size=1_000_000, shuffle_input_sentence=True,
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
    """Returns the SentencePieceProcessor of a model given as bytes or as a path."""
    if isinstance(model, bytes):
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


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

    def write(self, sentences):
        """Adds one document: a list of sentences, each a list of token ids, none of them empty."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        ends = self.counts["tokens"] + np.cumsum(lengths)
        self._add("documents", [self.counts["sentences"]])
        self._add("sentences", ends - lengths)
        self._add("tokens", list(itertools.chain.from_iterable(sentences)))
        if self.pending > self.BUFFER:
            self._flush()

    def _add(self, array, values):
        self.parts[array].append(np.asarray(values, self.types[array]))
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


def sha256_of(path):
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path):
    """Returns what the manifest holds of a file, to find it damaged later."""
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def encoded(documents, tokenizer, batch_bytes=1 << 20):
    """Yields each document as lists of token ids, in order; empty sentences are left out."""
    threads = os.cpu_count() or 1               # has no influence on the ids
    def flush(batch):
        ids = iter(tokenizer.encode(list(itertools.chain(*batch)), num_threads=threads))
        for document in batch:
            yield [sentence for sentence in itertools.islice(ids, len(document)) if sentence]
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size > batch_bytes:
            yield from flush(batch)
            batch, size = [], 0
    yield from flush(batch)


def prepare(documents, folder, vocab_size=8192, shards=8, cased=False):
    """Writes a folder of shards; returns its manifest (dict). Nothing half-written stays behind.

    documents: a function without arguments that returns an iterator of documents (lists of str);
    it is called three times, to survey, to train the tokenizer and to encode. A folder that holds
    the same text prepared in the same way is left as it is. 1 % of the documents, at least 100 but
    at most half, evenly spread over the corpus, go to a held-out shard of their own.
    Raises DataError if the folder holds something else or the text cannot be used.
    """
    if shards < 1 or vocab_size < 16:
        raise DataError("at least one shard and 16 pieces of vocabulary are needed")
    folder = Path(folder)
    settings = {"version": VERSION, "vocab_size": vocab_size, "shards": shards, "cased": cased}
    corpus = survey(progress(documents(), "reading"))
    if (folder / "manifest.json").exists():
        found = load_manifest(folder)
        if found["corpus"] == corpus and all(found[key] == settings[key] for key in settings):
            return found
        raise DataError(f"{folder} holds another corpus or other settings ("
                        f"{found['corpus']['documents']:,} documents, sha256 "
                        f"{found['corpus']['sha256'][:12]}, {found['vocab_size']} pieces, "
                        f"{found['shards']} shards); remove it or choose another folder")
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty and holds no shards; choose another folder")
    held_out = min(max(100, corpus["documents"] // 100), corpus["documents"] // 2)
    if held_out < 2 or corpus["documents"] - held_out < 2 * shards:
        raise DataError(f"the corpus has {corpus['documents']} documents, too few for {shards} "
                        "shards and held-out documents; documents are separated by blank lines")
    mine = f"{folder.name}.partial-{socket.gethostname()}-"
    for rest in folder.parent.glob(f"{mine}*"):               # of a run that was killed here
        if not alive(int(rest.name.removeprefix(mine))):
            shutil.rmtree(rest)
    temporary = folder.with_name(f"{mine}{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        tokenizer = train_tokenizer(progress(documents(), "training tokenizer"), vocab_size, cased)
        (temporary / "tokenizer.model").write_bytes(tokenizer)
        manifest = {**settings, "corpus": corpus,
                    **write_shards(documents(), temporary, tokenizer, corpus, shards, held_out)}
        manifest["files"]["tokenizer.model"] = file_entry(temporary / "tokenizer.model")
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            os.replace(temporary, folder)
        except OSError:                 # another node, on the same disk, was faster
            if load_manifest(folder) != manifest:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def alive(pid):
    """Returns True if a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_shards(documents, folder, tokenizer, corpus, shards, held_out):
    """Encodes the documents into `shards` shards and a held-out one; returns counts and digests.

    Document d of D is held out where d * held_out / D passes a whole number; the others go to the
    shards in turn. A document of less than two tokens cannot make an example and is left out.
    """
    tokenizer = load_tokenizer(tokenizer)
    token_type = np.uint16 if tokenizer.get_piece_size() <= 1 << 16 else np.uint32
    held = ShardWriter(folder, HELD_OUT, token_type)
    writers = [ShardWriter(folder, f"train-{s:05d}", token_type) for s in range(shards)]
    turn, dropped, total = itertools.cycle(writers), 0, corpus["documents"]
    unigrams = np.zeros(tokenizer.get_piece_size(), np.int64)
    for d, document in enumerate(encoded(progress(documents, "encoding", total), tokenizer)):
        if sum(map(len, document)) < 2:
            dropped += 1
            continue
        is_held = d * held_out // total < (d + 1) * held_out // total
        (held if is_held else next(turn)).write(document)
        if not is_held:
            np.add.at(unigrams, list(itertools.chain.from_iterable(document)), 1)
    counts = [writer.counts.copy() for writer in [held, *writers]]
    if min(count["documents"] for count in counts) < 2:
        raise DataError(f"too few documents for {shards} shards, two in each; set --shards lower")
    np.save(folder / "unigrams.npy", unigrams)
    files = {"unigrams.npy": file_entry(folder / "unigrams.npy")}
    for writer in [held, *writers]:
        files |= writer.close()
    return {"train_documents": sum(count["documents"] for count in counts[1:]),
            "train_tokens": sum(count["tokens"] for count in counts[1:]),
            "heldout_documents": counts[0]["documents"], "heldout_tokens": counts[0]["tokens"],
            "unknown_tokens": int(unigrams[UNK]), "dropped_documents": dropped, "files": files}


def progress(documents, label, total=None):
    """Yields the documents while a bar on stderr shows how many went by, and how fast."""
    return tqdm(documents, label, total, unit=" documents", leave=False, disable=None)


def load_manifest(folder):
    """Returns the manifest of a folder of shards (dict); raises DataError if there is none."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        version = manifest["version"]
    except FileNotFoundError:
        raise DataError(f"{path} is missing: no prepared shards there; make them with data.py") \
            from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; prepare the folder again with data.py") from None
    if version != VERSION:
        raise DataError(f"{path} is of format {version}, this program reads "
                        f"{VERSION}; prepare the folder again with data.py")
    return manifest


def verify(folder, rank=0, size=1):
    """Checks the digests of what rank `rank` of `size` reads: its own shards, the held-out one, the
    tokenizer and the counts of tokens. Raises DataError that names the first file that is missing,
    cut or damaged."""
    folder, manifest = Path(folder), load_manifest(folder)
    total = manifest["shards"]
    shards = [s for s in range(total) if shards_meet(s, total, rank, size)]
    names = ["tokenizer.model", "unigrams.npy"] + [
        f"{shard}.{array}.npy" for shard in [HELD_OUT] + [f"train-{s:05d}" for s in shards]
        for array in ARRAYS]
    for name in names:
        path, entry = folder / name, manifest["files"][name]
        if not path.exists():
            raise DataError(f"{path} is missing; rank {rank} needs it")
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


def shards_meet(shard, shards, rank, size):
    """Returns True if rank `rank` of `size` reads this shard: some i is `shard` mod `shards` and
    `rank` mod `size`, which is so where the two agree modulo the greatest common divisor."""
    return (shard - rank) % np.gcd(shards, size) == 0


# ----- Examples: (seed, phase, i) -> tokens with a sentence pair and masks -----

class Example(NamedTuple):
    """One example: [CLS] A [SEP] B [SEP], its masks applied."""
    tokens: np.ndarray      # (T,) int64
    b_start: int            # where segment B begins
    positions: np.ndarray   # (m,) where tokens were chosen to be predicted, ascending
    labels: np.ndarray      # (m,) the tokens that stood there
    random_b: int           # 1 if B is from another document, 0 if it is the true next


class Batch(NamedTuple):
    """A micro-batch: B examples, T tokens, M masked tokens of all examples together, rounded up."""
    tokens: torch.Tensor     # (B, T) int64
    segments: torch.Tensor   # (B, T) int64: 0 for A and padding, 1 for B
    mask: torch.Tensor       # (B, T) bool: True where there is a token, False on padding
    positions: torch.Tensor  # (M,) int64, flat positions b * T + t of masked tokens, then zeros
    labels: torch.Tensor     # (M,) int64, the tokens that stood there, then IGNORED
    random_b: torch.Tensor   # (B,) int64: 0 where B is the true next, 1 where it is not

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
    epoch of a shard goes through all of its windows in an order of its own. An example is the text
    from the sentence at the window's begin, cut in two at a sentence boundary; for half of the
    examples the second part is replaced by as much text from another document of the same shard.
    15 % of the tokens are chosen; of these 80 % become [MASK], 10 % a random token and 10 % stay
    (BERT, appendix A.1). `seq_len` counts the special symbols. Workers map the files themselves.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False):
        manifest = load_manifest(folder)
        self.folder, self.seq_len, self.phase, self.seed = Path(folder), seq_len, phase, seed
        self.vocab_size = manifest["vocab_size"]
        self.names = [HELD_OUT] if held_out else \
            [f"train-{s:05d}" for s in range(manifest["shards"])]
        self.body = seq_len - 3                       # without [CLS], [SEP], [SEP]
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

    def window(self, i):
        """Returns (shard, window number in it) of example i."""
        turn, s = divmod(i, len(self.names))
        shard = self.shard(s)
        epoch, k = divmod(turn, int(shard.windows[-1]))
        if self.orders.get(s, (None,))[0] != epoch:
            rng = np.random.default_rng((self.seed, self.phase, s, epoch, 0))
            self.orders[s] = epoch, rng.permutation(int(shard.windows[-1])).astype(np.uint32)
        return shard, int(self.orders[s][1][k])

    def __getitem__(self, i):
        """Returns Example i."""
        rng = np.random.default_rng((self.seed, self.phase, i))
        shard, window = self.window(i)
        document = int(np.searchsorted(shard.windows, window, "right")) - 1
        first, last = (int(edge) for edge in shard.documents[document:document + 2])
        short = rng.random() < SHORT_FRACTION
        length = int(rng.integers(2, self.body + 1)) if short else self.body

        start = segment_start(shard, first + (window - int(shard.windows[document])) * self.body,
                              first, last, self.body)
        end = min(start + length, last)
        inner = shard.sentences[np.searchsorted(shard.sentences, start, "right"):
                                np.searchsorted(shard.sentences, end, "left")]
        cut = int(rng.choice(inner)) if len(inner) else (start + end) // 2
        a, b = shard.tokens[start:cut], shard.tokens[cut:end]
        random_b = int(rng.random() < 0.5)
        if random_b:
            # A token drawn evenly from all others of the shard: long documents as often as in A
            elsewhere = int(rng.integers(int(shard.documents[-1]) - (last - first)))
            elsewhere += (last - first) if elsewhere >= first else 0
            other = int(np.searchsorted(shard.documents, elsewhere, "right")) - 1
            low, high = (int(edge) for edge in shard.documents[other:other + 2])
            b_first = segment_start(shard, elsewhere, low, high, end - cut)
            b = shard.tokens[b_first:min(b_first + end - cut, high)]
        tokens = np.concatenate([[CLS], a, [SEP], b, [SEP]]).astype(np.int64)
        positions, labels = mask_tokens(tokens, len(a), self.vocab_size, rng)
        return Example(tokens, len(a) + 2, positions, labels, random_b)


def segment_start(shard, token, first, last, length):
    """Returns where a segment of about `length` tokens begins that holds the given token of the
    document [first, last): at the begin of a sentence where one is near, so that not more than half
    of the segment lies before the token; early enough to fill the length if the document can.
    """
    token = min(token, max(first, last - length))
    sentence = int(shard.sentences[np.searchsorted(shard.sentences, token, "right") - 1])
    return sentence if token - sentence <= length // 2 else token


def mask_tokens(tokens, a_length, vocab_size, rng):
    """Masks `tokens` (T,), [CLS] A [SEP] B [SEP], in place; returns (positions, labels), each (m,).

    m is 15 % of the tokens of A and B, rounded up or down at random so that 15 % is the mean, but
    at least one; special symbols are never chosen.
    """
    count = len(tokens) - 3
    m = max(1, int(MASK_FRACTION * count + rng.random()))
    chosen = np.sort(rng.permutation(count)[:m])
    positions = chosen + 1 + (chosen >= a_length)     # over [CLS], and over [SEP] behind A
    labels = tokens[positions]
    fate = rng.random(len(positions))
    other = rng.integers(len(SPECIALS), vocab_size, len(positions))
    tokens[positions] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels))
    return positions, labels


def collate(examples):
    """Returns the Batch of a list of examples, as long as the longest.

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
    return Batch(*map(torch.from_numpy, (tokens, segments, mask, positions, labels, random_b)))


def micro_batches(steps, global_batch, micro_batch, rank, size):
    """Yields the example numbers of each micro-batch of rank `rank` of `size`, step after step.

    Step s takes the examples s * global_batch up to (s + 1) * global_batch; a rank those that are
    `rank` modulo `size`. steps: a range. global_batch is divisible by micro_batch * size.
    """
    for step in steps:
        numbers = range(step * global_batch + rank, (step + 1) * global_batch, size)
        for k in range(0, len(numbers), micro_batch):
            yield numbers[k:k + micro_batch]


def loader(dataset, batches, workers=1, prefetch=2, pin_memory=False):
    """Returns a DataLoader that yields the Batch of each list of example numbers, in order.

    prefetch: batches that each worker makes ahead. Workers are started fresh (forkserver), since a
    fork after threads have run can deadlock. A SIGTERM to the whole process group (torchrun and
    batch systems send it) does not end them, so that the step can be finished; our end does.
    """
    if not workers:
        return torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=collate,
                                           pin_memory=pin_memory)
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "sentencepiece"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)       # the workers' server inherits it
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers,
        prefetch_factor=prefetch, pin_memory=pin_memory, multiprocessing_context=context,
        worker_init_fn=functools.partial(end_with, os.getpid()))


def end_with(pid, worker):
    """Ends this worker process once the process `pid` is gone, however it went; not on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)         # over the handler that torch has set
    def watch():
        while alive(pid):
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


# ----- The program -----

def describe(manifest):
    """Returns a report on prepared shards, a few lines of text."""
    corpus = manifest["corpus"]
    tokens = manifest["train_tokens"] + manifest["heldout_tokens"]
    return (f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences, "
            f"{corpus['bytes'] / 1e6:.1f} MB, sha256 {corpus['sha256'][:16]}\n"
            f"{tokens:,} tokens of a vocabulary of {manifest['vocab_size']:,} in "
            f"{manifest['shards']} shards; {manifest['heldout_documents']:,} documents held out; "
            f"[UNK] {manifest['unknown_tokens'] / manifest['train_tokens']:.2%}; "
            f"{manifest['dropped_documents']:,} documents too short")


def main():
    parser = argparse.ArgumentParser(description="Prepare text for BERT pre-training.")
    add = parser.add_argument
    add("corpus", nargs="*", help="text or JSON-lines files; none: this machine's documentation")
    add("--out", default="shards/docs", help="the folder to write")
    add("--vocab-size", type=int, default=8192, help="pieces, five special symbols among them")
    add("--shards", type=int, default=8, help="a multiple of the ranks lets each read only its own")
    add("--cased", action="store_true", help="keep upper case")
    add("--split", choices=["auto", "lines", "prose"], default="auto", help="what a line is")
    args = parser.parse_args()
    began = time.perf_counter()
    try:
        manifest = prepare(corpus_reader(args.corpus, args.split), args.out, args.vocab_size,
                           args.shards, args.cased)
    except (DataError, OSError) as error:
        sys.exit(f"data.py: {error}")
    print(describe(manifest))
    print(f"{args.out} is ready ({time.perf_counter() - began:.0f} s)")


def corpus_reader(paths, split="auto"):
    """Returns the function that `prepare` calls for the documents of these files, or of the default
    corpus where there are none."""
    if not paths:
        documents, summary = machine_documentation()
        print(summary)
        return functools.partial(iter, documents)
    return functools.partial(read_documents, paths, split)


if __name__ == "__main__":
    main()
