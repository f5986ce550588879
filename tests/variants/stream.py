"""Text is tokenized while training reads it: a stream, in place of shards.

    TEXT=corpus python tests/variants/stream.py --data shards/my         # and any flag of train.py

TEXT is a file or folder, as for data.py; without it, the demo's text. --data is a folder of shards
that data.py has made of this text, cut into the same documents, or of a part of it, such as its
first file. The folder gives the vocabulary and the held-out text, which is not trained on.

A window is a stretch of at least WINDOW characters, and takes the place of a shard: A and B both
come from it. Training stays in a window until it has given about as many examples as fill it, at 4
characters a token, as in English. Then comes the next window; after the last the first again, with
different examples. Seed and phase choose the first window of a phase. Example i depends on i alone,
so ranks and resumes are exact. If all text is one window, training equals that of train.py on a
single shard of the same text, bit for bit.

What it costs:
- Text is read in the order of the files, and distant texts never meet in one step. If files differ,
  a phase ends with the kind of text that it reads last; shards are a mixture of all text.
- Before the first step each rank silently reads all text, to check it. This takes half a minute a
  GB, which --hours counts. At the start of a phase and at a resume, it reads up to all of it again.
- Training waits a second or two while a window is read. Each rank reads and tokenizes all text.
- A rank needs about 300 MB more. KEPT windows stay in memory, tokenized. A step of more text than
  that, 67 million tokens (131,000 examples of 512), would read the text again for almost every
  example.
- A wrong B comes from the same window. With windows of 256 documents the demo learned almost no NSP
  (59 % right, not 70), because A and a wrong B mostly shared a subject.

What is changed: data.PretrainingData, replaced by a subclass whose `shard` is a window and whose
`pair` chooses it. Held-out examples are those of train.py.
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
import train  # first: it sets how torch's threads wait

import numpy as np

import data
from tests.variants import common

WINDOW = 1 << 24            # characters
KEPT = 16                   # windows


class Corpus:
    """The text, in windows. The constructor reads all of it; `sizes` are the characters of each
    window, and `checksums` reveal later changes.

    Raises DataError if the text lacks documents that the folder holds out: then it is cut
    differently, and parts of the held-out text could be trained on.
    """

    def __init__(self, folder, path):
        self.documents = data.TextFiles([path]) if path else data.machine_documentation()
        self.tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
        self.threads = min(data.usable_cores(), 16)
        self.window = functools.lru_cache(KEPT)(self.read)
        self.coming = math.inf                       # number of the next window of `reader`
        self.reader = None

        tokens, documents = data.open_shard(f"{folder}/heldout")
        held_out = {tokens[begin:end].tobytes() for begin, end in itertools.pairwise(documents)}
        # Only documents whose CRC-32 is below `limit` can be held out, see data.write_shards.
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
        """Yields windows, lists of documents, cleaned and cut as in data.py. A remainder of less
        than a window joins the last one."""
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
        """Returns the tokens of each document, as a list of arrays (n,)."""
        encoded = self.tokenizer.encode(documents, num_threads=self.threads)
        return [np.array(tokens, np.uint16) for tokens in encoded]

    def read(self, number):
        """Returns a window as a data.Shard; `window` caches the last KEPT. Reads on or, if the
        window has gone by, from the beginning of the text. Raises DataError if the text has
        changed, or if the window has no second document for a wrong B."""
        if number < self.coming:
            self.reader = self.windows()
            self.coming = 0
        ahead = number - self.coming
        self.coming = math.inf                       # stays so if reading fails
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
    """Returns the checksum by which data.write_shards identifies a document."""
    return zlib.crc32(document.strip().encode())


corpus_of = functools.cache(Corpus)                  # one for all phases


class Stream(data.PretrainingData):
    """The examples of a phase, from windows in place of shards."""

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, **options):
        super().__init__(folder, seq_len, phase, seed, held_out, **options)
        self.corpus = None
        if held_out:
            return
        self.corpus = corpus_of(folder, os.environ.get("TEXT"))
        self.shard = self.corpus.window
        self.paths = range(len(self.corpus.sizes))               # only their number counts
        # How many examples fill each window.
        self.each = [max(1, size // (4 * seq_len)) for size in self.corpus.sizes]
        self.ends = list(itertools.accumulate(self.each))
        first = int(self.walk_start * len(self.each))
        self.start = self.ends[first] - self.each[first]         # where that window begins

    def pair(self, i, draws):
        """Returns the Spans of example i."""
        if not self.corpus:
            return super().pair(i, draws)
        # All windows together give ends[-1] examples; then they come again.
        again, place = divmod(self.start + i, self.ends[-1])
        window = bisect.bisect(self.ends, place)
        k = again * self.each[window] + place - (self.ends[window] - self.each[window])
        # data.PretrainingData takes example n // S of shard n modulo S: here k and window.
        number = k * len(self.paths) + window
        return super().pair(number, draws)._replace(index=i)


def install():
    """Makes train.py read a stream. A run resumes only with the same text."""
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
