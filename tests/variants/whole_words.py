"""Whole words are masked: all tokens of a word are to be predicted, or none of them.

    python tests/variants/whole_words.py                     # and any flag of train.py

google-research/bert of 2019 (its README, "Whole Word Masking"). The rest of a word gives a token
away: who reads "philam" and "on" needs no text to see what stood between them. A word is what
stands between spaces, with its punctuation, which BERT's tokenizer splits off. As many tokens are
masked as in train.py. In Google's code each token of a chosen word draws for itself whether it
becomes [MASK], a random token or stays, and which random one; here they share that, too.

What is changed: data.PretrainingData, by a subclass that gives all tokens of a word the random
numbers of its first one. In held-out text tokens are masked as in train.py, so that losses compare.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import numpy as np

import data
from tests.variants import common

LONGEST_WORD = 8             # tokens; longer words are masked in parts: some scripts have no spaces


class WholeWords(data.PretrainingData):
    """Examples in which whole words are masked."""

    def __init__(self, folder, *arguments, held_out=False, **options):
        super().__init__(folder, *arguments, held_out=held_out, **options)
        self.held_out = held_out
        tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
        pieces = tokenizer.id_to_piece(list(range(self.vocab_size)))
        self.begins_word = np.char.startswith(pieces, "▁")               # (V,)

    def mask(self, tokens, counters):
        """Masks words as train.py's data does tokens: all tokens of one have one counter. Held-out
        tokens are masked one by one."""
        if not self.held_out:
            counters = counters[self.word_starts(tokens)]
        return super().mask(tokens, counters)

    def word_starts(self, tokens):
        """Returns (N,) the row in which the word of each row begins. A segment begins a word. For
        words of 1, 3 and 1 tokens:

            begins      1 1 0 0 1
            start       0 1 1 1 4       what is returned, since no word is long
            into_word   0 0 1 2 0
        """
        is_special = (tokens == data.CLS) | (tokens == data.SEP)
        begins = self.begins_word[tokens] | is_special
        begins[1:] |= is_special[:-1]
        rows = np.arange(len(tokens))
        start = np.maximum.accumulate(np.where(begins, rows, 0))
        into_word = rows - start
        return rows - into_word % LONGEST_WORD


def install():
    """Makes train.py mask whole words. Neither takes up a checkpoint of the other."""
    data.PretrainingData = WholeWords
    common.name_run("whole words")


if __name__ == "__main__":
    install()
    common.main()
