"""Whole words are masked: the model predicts all tokens of a word, or none of them.

    python tests/variants/whole_words.py                     # and any flag of train.py

google-research/bert, 2019 (its README, "Whole Word Masking"). The rest of a word gives a masked
token away: of "philammon", "phil" and "mon" are enough to guess the "am" between them. A word is
the text between two spaces, including punctuation, which BERT's tokenizer splits off. As many
tokens are masked as in train.py. In Google's code each token of a chosen word draws for itself
whether it becomes [MASK], a random token or stays, and which random token; here all tokens of a
word share these draws, too.

What is changed: data.PretrainingData, replaced by a subclass that gives all tokens of a word the
random numbers of its first token. Held-out tokens are masked as in train.py, to keep losses
comparable.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np

import data
from tests.variants import common

LONGEST_WORD = 8             # tokens. Longer words, as in scripts without spaces, are masked in
                             # parts


class WholeWords(data.PretrainingData):
    """Examples in which whole words are masked."""

    def __init__(self, folder, *arguments, held_out=False, **options):
        super().__init__(folder, *arguments, held_out=held_out, **options)
        self.held_out = held_out
        tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
        pieces = tokenizer.id_to_piece(list(range(self.vocab_size)))
        self.begins_word = np.char.startswith(pieces, "▁")               # (V,)

    def mask(self, tokens, counters):
        """Masks words as data.PretrainingData masks tokens: all tokens of a word have one counter.
        Held-out tokens are masked one by one."""
        if not self.held_out:
            counters = counters[self.word_starts(tokens)]
        return super().mask(tokens, counters)

    def word_starts(self, tokens):
        """Returns, as (n,), the row in which the word of each row begins. A segment begins a word.
        For words of 1, 3 and 1 tokens:

            begins      1 1 0 0 1
            start       0 1 1 1 4       the result, since no word is long
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
    """Makes train.py mask whole words. The two programs do not resume each other's checkpoints."""
    data.PretrainingData = WholeWords
    common.name_run("whole words")


if __name__ == "__main__":
    install()
    common.main()
