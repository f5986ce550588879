"""Text is tokenized while it is trained on: a stream, in place of shards.

    TEXT=corpus python tests/variants/stream.py --data shards/my         # and any flag of train.py

TEXT: a file or folder, as data.py reads it; without it the demo's text. --data: a folder of shards
that data.py has made of this text, cut into the same documents, or of a part of it, say of its
first file. It gives the vocabulary and the held-out text, which is not trained on.

A window is a stretch of the text, WINDOW characters or more. It stands in the place of a shard: A
and B are both of it. A window is trained on until it has given about as many examples as fill it
(at 4 characters a token, as in English); then the next one; after the last the first again, which
goes on with other examples. Seed and phase choose with which window a phase begins. So example i
follows from i alone, and ranks and resumes are exact. Where all text is one window, training is
that of train.py on a single shard of the same text, bit for bit.

What it costs:
- Text is read in the order of the files, and what lies far apart is never in one step: where files
  differ, a phase ends with what it reads last. Shards are a mixture of all text.
- Before the first step each rank reads all text, to check it: half a minute a GB, without a word;
  --hours counts it. Where a phase begins, and where a run resumes, it reads up to all of it again.
- Training waits while a window is read: a second or two. Each rank reads and tokenizes all text.
- A rank needs about 300 MB more. KEPT windows stay in memory, tokenized. A step of more than that,
  60 million tokens (120,000 examples of 512), would read the text again for almost each example.
- A wrong B is of the same window. With windows of 256 documents the demo learned almost no NSP
  (59 % right, not 70): there A and a wrong B were mostly of one subject.

What is changed: data.PretrainingData, by a subclass whose `shard` is a window, and whose `pair`
says which. Held-out examples are as in train.py.
"""
import bisect
import functools
import itertools
import math
import os
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import numpy as np

import data
from tests.variants import common

WINDOW = 1 << 24            # characters
KEPT = 16                   # windows


class Corpus:
    """The text, in windows. Reads all of it when it is made: `sizes` are the characters of each
    window; `checksums` show a change later.

    Raises DataError if the text does not have the documents that the folder holds out: then it is
    cut into other ones, and parts of the held-out text could be trained on.
    """

    def __init__(self, folder, path):
        self.documents = data.TextFiles([path]) if path else data.machine_documentation()
        self.tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
        self.threads = min(data.usable_cores(), 16)
        self.window = functools.lru_cache(KEPT)(self.read)
        self.coming = math.inf                       # the number of what `reader` yields next
        self.reader = None

        tokens, documents = data.open_shard(f"{folder}/heldout")
        held_out = {tokens[begin:end].tobytes() for begin, end in itertools.pairwise(documents)}
        # data.write_shards knows documents by their CRC-32, and holds out some that are small.
        limit = min(0.2, max(0.01, 100 / data.load_manifest(folder)["documents"])) * 2 ** 32
        missing = set(held_out)
        self.held_out = set()                        # CRC-32
        self.sizes = []
        self.checksums = []
        for window in self.windows():
            self.sizes.append(sum(map(len, window)))
            self.checksums.append(data.checksum_of(window))
            candidates = [document for document in window if crc_of(document) < limit]
            for document, tokens in zip(candidates, self.encode(candidates)):
                if tokens.tobytes() in held_out:
                    missing.discard(tokens.tobytes())
                    self.held_out.add(crc_of(document))
        if missing:
            raise data.DataError(
                f"{path or 'the documentation here (TEXT is not set)'} lacks {len(missing)} of the "
                f"{len(held_out)} documents that {folder} holds out; it must be the text of this "
                "folder, or have all of it, cut into the same documents")

    def windows(self):
        """Yields windows, lists of documents, cleaned and cut as data.py does it. What is left at
        the end, less than a window, is in the last one."""
        ready = []
        window = []
        size = 0
        for document in self.documents:
            for part in data.cut_text(data.clean(document), data.LONGEST):
                window.append(part)
                size += len(part)
            if size >= WINDOW:
                if ready:
                    yield ready
                ready, window, size = window, [], 0
        yield ready + window

    def encode(self, documents):
        """Returns the tokens of each document, a list of arrays (n,)."""
        encoded = self.tokenizer.encode(documents, num_threads=self.threads)
        return [np.array(tokens, np.uint16) for tokens in encoded]

    def read(self, number):
        """Returns a window as a data.Shard (`window` remembers the last KEPT). Reads on or, if the
        window has gone by, from the beginning of the text. Raises DataError if the text is another
        one by now, or if the window has no second document for a wrong B."""
        if number < self.coming:
            self.reader = self.windows()
            self.coming = 0
        ahead = number - self.coming
        self.coming = math.inf                       # stays so if the text cannot be read
        window = next(itertools.islice(self.reader, ahead, None), [])
        self.coming = number + 1
        if data.checksum_of(window) != self.checksums[number]:
            raise data.DataError("TEXT has changed since the run started; bring it back")
        documents = [tokens for document, tokens in zip(window, self.encode(window))
                     if len(tokens) > 1 and crc_of(document) not in self.held_out]
        if len(documents) < 2:
            raise data.DataError(f"window {number} of TEXT has fewer than two documents to read")
        ends = np.cumsum([len(tokens) for tokens in documents])
        return data.Shard(np.concatenate(documents), np.append(0, ends))


def crc_of(document):
    """Returns the checksum by which data.write_shards knows a document."""
    return zlib.crc32(document.strip().encode())


corpus_of = functools.cache(Corpus)                  # all phases share one


class Stream(data.PretrainingData):
    """The examples of a phase, of windows in place of shards."""

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, **options):
        super().__init__(folder, seq_len, phase, seed, held_out, **options)
        self.corpus = None
        if held_out:
            return
        self.corpus = corpus_of(folder, os.environ.get("TEXT"))
        self.shard = self.corpus.window
        self.paths = range(len(self.corpus.sizes))               # a window has none, but is counted
        # Of each window how many examples fill it.
        self.each = [max(1, size // (4 * seq_len)) for size in self.corpus.sizes]
        self.ends = list(itertools.accumulate(self.each))
        first = int(self.walk_start * len(self.each))
        self.start = self.ends[first] - self.each[first]         # of the window to begin with

    def pair(self, i, draws):
        """Returns the Spans of example i."""
        if not self.corpus:
            return super().pair(i, draws)
        # The windows, one after another, give ends[-1] examples; then they come again.
        again, place = divmod(self.start + i, self.ends[-1])
        window = bisect.bisect(self.ends, place)
        k = again * self.each[window] + place - (self.ends[window] - self.each[window])
        # data.PretrainingData takes example n // S of shard n modulo S: here k, and window.
        number = k * len(self.paths) + window
        return super().pair(number, draws)._replace(index=i)


def install():
    """Makes train.py read a stream. A run is taken up only with the same text."""
    data.PretrainingData = Stream
    common.name_run("stream")
    run_settings = train.run_settings

    def with_text(args, manifest):
        corpus = corpus_of(args.data, os.environ.get("TEXT"))
        digest = zlib.crc32(str(corpus.checksums).encode())
        return run_settings(args, manifest) | {"text": f"{digest:08x}"}

    train.run_settings = with_text


if __name__ == "__main__":
    install()
    common.main()
