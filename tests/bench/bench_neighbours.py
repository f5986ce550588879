"""A baseline that reads: how well do its neighbours predict a masked token?

    python tests/bench/bench_neighbours.py shards/demo            # half a minute

Prints the mean loss, in nats, of trigrams on the masked tokens of train.py's `held out`, and their
number, for examples of 64 and of 128 tokens. The trigrams are counted in the training text, and see
what BERT sees:

- The two tokens on the left give probabilities, and so do the two on the right. Absolute
  discounting (Ney, Essen, Kneser, Comput. Speech Lang. 8, 1994) takes DISCOUNT from each count and
  gives it to the probabilities by the nearer token, which give theirs to the frequencies. A context
  with a [MASK] has no counts, so the shorter context replaces it.
- Left and right are combined as if they were independent: their product, divided by the frequency.
- A chosen token that is not [MASK] is the original or a random token. Bayes' rule weighs the two.
"""
import sys
from pathlib import Path

import beside  # noqa: F401 (finds the five files)
import numpy as np

import data

DISCOUNT = 0.75
BASE = 1 << 16               # larger than any token


def number(tokens, rows, offsets):
    """Returns a number for each row, which encodes the tokens at these offsets from it."""
    found = 0
    for offset in offsets:
        found = found * BASE + tokens[rows + offset]
    return found


def count(text, *offsets):
    """Counts each token of a text together with its context, the tokens at these offsets. Returns
    a function (tokens, row, lower), which returns the probabilities (V,) of the tokens at a row.
    lower: those by a shorter context."""
    rows = np.arange(2, len(text) - 2)
    keys, all_counts = np.unique(number(text, rows, [*offsets, 0]), return_counts=True)

    def mix(tokens, row, lower):
        begin = number(tokens, row, offsets) * BASE
        first, last = keys.searchsorted([begin, begin + BASE])
        counts = all_counts[first:last]
        if not len(counts):
            return lower
        mixed = lower * (DISCOUNT * len(counts) / counts.sum())
        mixed[keys[first:last] - begin] += (counts - DISCOUNT) / counts.sum()
        return mixed

    return mix


def guess(sides, frequency, tokens, row):
    """Returns the probabilities (V,) of the original token at a row."""
    p = 1 / frequency
    for near, far in sides:
        p = p * far(tokens, row, near(tokens, row, frequency))
    p /= p.sum()
    seen = tokens[row]
    if seen != data.MASK:
        # A tenth of the chosen tokens stays; a tenth becomes random, here any of V tokens.
        stays = p[seen]
        p /= len(p)
        p[seen] += stays
        p /= p.sum()
    return p


def main():
    folder = Path(sys.argv[1])
    parts = [np.fromfile(path, np.uint16) for path in folder.glob("train-*.tokens")]
    text = np.concatenate(parts).astype(np.int64)
    sides = [[count(text, side), count(text, side, 2 * side)] for side in (-1, 1)]
    frequency = np.exp(-data.unigram_losses(folder).numpy())
    for seq_len in 64, 128:
        batch = data.PretrainingData(folder, seq_len, held_out=True).batch(range(1024))
        tokens = np.append(batch.tokens, [data.PAD, data.PAD])
        losses = []
        for row, label in zip(batch.masked_rows, batch.labels["mlm"]):
            if label != data.IGNORED:
                losses.append(-np.log(guess(sides, frequency, tokens, row)[label]))
        print(f"{seq_len} tokens: {np.mean(losses):.3f}, of {len(losses):,}", flush=True)


if __name__ == "__main__":
    main()
