"""Text is tokenized while it is trained on: a stream, in place of shards.

    TEXT=corpus/ python tests/variants/stream.py --data shards/my        # and any flag of train.py

TEXT: files and folders as data.py reads them, with ":" between them; without it the demo's text.
--data: a folder of shards that data.py has made of this text, or of a part of it. Vocabulary and
held-out text are of it. No document that it holds out is trained on.

A window of WINDOW documents is read, dealt to S shards as data.py would do it, where S is the
number of shards of the folder, and trained on until it has given about as many examples as it has
texts; then the next one. With the names of data.PretrainingData, example i is of shard i modulo S,
k = i // S, and of the window k // each. After the last window comes the first again, and gives
other texts. Seed and phase say with which one a phase begins. As example i follows from i alone,
ranks and resumes are exact. Where all text is one window, training is that of train.py on shards of
this text, bit for bit.

What it costs:
- The whole text is read once as a run starts, to count and check it, and from its beginning again
  where a phase begins or a run resumes. For a large text make shards.
- Training waits while a window is read (16,384 pages of Wikipedia, 50 MB: some seconds). Each rank
  reads all text, and tokenizes what it reads of: of 8 ranks and 8 shards an eighth.
- Batches, and wrong B's, are of one window. With windows of 256 documents the demo learns almost
  no NSP (59 % right, not 70): there A and a wrong B are mostly of one subject.

What is changed: data.PretrainingData, by a subclass whose `shard` is of a window, and whose `pair`
says of which one. Held-out examples are as in train.py.
"""
import functools
import itertools
import os
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import numpy as np

import data
from tests.variants import common

WINDOW = 1 << 14            # documents; the last window has up to twice as many
KEPT = 4                    # so many windows stay in memory, tokenized. A step must not have
                            # examples of more: each micro-batch would read the text again


class Corpus:
    """The text of TEXT, in windows.

    Reads it once: `checksums` has one of each window, by which a change is found later. A held-out
    document is known by its tokens. Raises DataError if the text lacks one: then it is cut
    otherwise than that of the folder, and its parts could be trained on.
    """

    def __init__(self, folder, text):
        if text:
            self.documents = data.TextFiles(text.split(os.pathsep))
        else:
            self.documents = data.machine_documentation()
        self.tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
        self.threads = min(data.usable_cores(), 16)
        manifest = data.load_manifest(folder)
        self.shards = manifest["shards"]
        mean = manifest["tokens"] / manifest["documents"]
        self.shard_tokens = int(WINDOW * mean / self.shards)    # of a window's shard, about

        tokens, documents = data.open_shard(f"{folder}/heldout")
        self.held_out = {tokens[begin:end].tobytes()
                         for begin, end in itertools.pairwise(documents)}
        # Only texts whose CRC-32 is a small number are held out, see data.write_shards.
        limit = min(0.2, max(0.01, 100 / manifest["documents"])) * 2 ** 32
        self.checksums = []
        missing = set(self.held_out)
        for window in self.windows():
            self.checksums.append(data.checksum_of(window))
            candidates = [text for text in window if crc_of(text) < limit]
            missing -= {tokens.tobytes() for tokens in self.encode(candidates)}
        if missing:
            raise data.DataError(f"TEXT lacks {len(missing)} of the {len(self.held_out)} documents "
                                 f"that {folder} holds out; make a folder of this text, or of a "
                                 "part of it, with data.py")

    def windows(self):
        """Yields lists of WINDOW documents, cleaned and cut as data.py does it."""
        window = []
        for document in self.documents:
            window += data.cut_text(data.clean(document), data.LONGEST)
            while len(window) > 2 * WINDOW:
                yield window[:WINDOW]
                window = window[WINDOW:]
        yield window

    def deal(self, window):
        """Returns the documents of each shard, a list of lists, as data.write_shards deals them."""
        dealt = [[] for _ in range(self.shards)]
        for text in window:
            dealt[crc_of(text) % self.shards].append(text)
        return dealt

    def encode(self, texts):
        """Returns the tokens of each text, arrays (n,)."""
        encoded = self.tokenizer.encode(texts, num_threads=self.threads)
        return [np.array(tokens, np.uint16) for tokens in encoded]

    def shard(self, texts):
        """Returns the data.Shard of these documents, without those that are held out or have no A
        and B. Raises DataError if less than two are left."""
        documents = [tokens for tokens in self.encode(texts)
                     if len(tokens) > 1 and tokens.tobytes() not in self.held_out]
        if len(documents) < 2:
            raise data.DataError("TEXT has too few documents, or too often the same, for "
                                 f"{self.shards} shards; make a folder with less, by data.py's "
                                 "--shards")
        ends = np.cumsum([len(tokens) for tokens in documents])
        return data.Shard(np.concatenate(documents), np.append(0, ends))


def crc_of(text):
    """Returns the checksum by which data.write_shards deals a document."""
    return zlib.crc32(text.strip().encode())


corpus_of = functools.cache(Corpus)         # what all phases of a run share


class Stream(data.PretrainingData):
    """The examples of a phase. Number window * S + s of `paths` and `shard` is shard s of a window.
    """

    def __init__(self, folder, seq_len, phase=0, seed=0, held_out=False, **options):
        super().__init__(folder, seq_len, phase, seed, held_out, **options)
        self.held_out = held_out
        if held_out:
            return
        self.corpus = corpus_of(folder, os.environ.get("TEXT"))
        self.windows = len(self.corpus.checksums)
        self.paths = range(self.windows * self.corpus.shards)       # they are not on a disk
        self.first = int(self.walk_start * self.windows)            # the phase begins with this one
        self.each = max(1, self.corpus.shard_tokens // seq_len)     # examples of a window's shard
        self.next_window = self.windows                             # what `reader` yields next
        self.reader = iter(())
        self.dealt = functools.lru_cache(1)(self.read)
        self.shard = functools.lru_cache(KEPT * self.corpus.shards)(self.tokenize)

    def read(self, number):
        """Returns a window, dealt to shards: by reading on or, if it has gone by, from the text's
        beginning. Raises DataError if it is not what it was at the start of the run."""
        if number < self.next_window:
            self.reader = self.corpus.windows()
            self.next_window = 0
        window = next(itertools.islice(self.reader, number - self.next_window, None), [])
        self.next_window = number + 1
        if data.checksum_of(window) != self.corpus.checksums[number]:
            raise data.DataError("TEXT has changed since the run started; bring it back")
        return self.corpus.deal(window)

    def tokenize(self, number):
        """Returns the data.Shard of this number."""
        window, s = divmod(number, self.corpus.shards)
        return self.corpus.shard(self.dealt(window)[s])

    def pair(self, i, draws):
        """Returns the Spans of example i."""
        if self.held_out:
            return super().pair(i, draws)
        k, s = divmod(i, self.corpus.shards)
        turn, k = divmod(k, self.each)
        again, window = divmod(self.first + turn, self.windows)
        # When it comes again, the window goes on where it has ended.
        k += again * self.each
        number = window * self.corpus.shards + s
        return super().pair(k * len(self.paths) + number, draws)._replace(index=i)


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
