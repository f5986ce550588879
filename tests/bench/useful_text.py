"""What bench_useful.py reads: shards without WordNet, WordNet's glosses, sentences to agree in.

    apt-get download dict-gcide wordnet-base && for p in *.deb; do dpkg -x $p root; done
    python tests/bench/useful_text.py --root root              # writes shards/useful, 40 seconds

OUT/shards holds GCIDE and this machine's documentation; with --tokenizer runs/demo/model's, for
--init, GCIDE alone. GCIDE has taken thousands of its entries from WordNet: they are left out.

OUT/train.tsv and test.tsv have a line for each synset of WordNet: its definition, without its words
and without the quoted examples, which contain them; and one of 45 labels, the lexicographer's file
that it stands in, as noun.05, animals. No definition comes twice. Synsets with the same first
hypernym (of adjectives: the same first similar one) are all in one of the files; a tenth is test.

OUT/agreement.tsv has a line for each place in WordNet's glosses and examples where the number of a
subject decides between two verbs: the sentence with [MASK]; the verb that stood there, the other
one, and "same" or "other" as the number of the noun that is nearest to the verb. There is no
parser: the subject is X in "the X is" and in "the X of the Y is". Where its number is not that of
the verb, the guess was wrong, and the place is left out.
"""
import argparse
import itertools
import re
import zlib
from pathlib import Path

import beside
import dictionaries

import data

VERBS = ["is", "are", "was", "were", "has", "have"]      # singular and plural in turns
# One word may stand before each noun.
SUBJECT = re.compile(
    r"\b(?:the|an?)( [a-z]+)?? (?P<subject>[a-z]+)"
    r"( (?:of|in|on|for|with|to|from|by|at|between)( the| an?)?( [a-z]+)?? (?P<nearest>[a-z]+))?"
    r" (?P<verb>is|are|was|were|has|have)\b")
QUOTE = r'[;:,]?\s*"'        # begins an example in a gloss, or ends it


def read_synset(part, line):
    """Returns (what its synsets share, the gloss, the label) of a synset of WordNet."""
    head, gloss = line.split(" | ", 1)
    offset, number = head.split()[:2]
    # A hypernym, or of an adjective a similar one; else the synset itself
    pointer = re.search(r" [@&]i? (\d{8}) ", f"{head} & {offset} ")
    return part + pointer[1], gloss.strip(), f"{part}.{number}"


def is_plural(word, nouns):
    """Returns whether a word is a plural, None for what is no noun."""
    if word in nouns:
        return False
    if word.endswith("s") and word[:-1] in nouns:
        return True
    return None


def place_in(sentence, nouns):
    """Returns the line of agreement.tsv of a sentence, None if it has none."""
    found = SUBJECT.search(sentence)
    if not found or len(sentence) > 150:
        return None
    number = VERBS.index(found["verb"])
    plural = number % 2
    nearest = is_plural(found["nearest"] or found["subject"], nouns)
    if nearest is None or is_plural(found["subject"], nouns) != plural:
        return None
    masked = f"{sentence[:found.start('verb')]}[MASK]{sentence[found.end('verb'):]}"
    kind = "same" if nearest == plural else "other"
    return f"{masked}\t{VERBS[number]} {VERBS[number - 2 * plural + 1]} {kind}"


def write_tables(root, out):
    """Writes train.tsv, test.tsv and agreement.tsv; prints how many lines they have."""
    index = (root / "usr/share/wordnet/index.noun").read_text()
    nouns = {line.split()[0] for line in index.splitlines()}
    tables = {"train": [], "test": [], "agreement": []}
    seen = set()
    for group, gloss, label in itertools.starmap(read_synset, dictionaries.synsets(root)):
        definition, *examples = re.split(QUOTE, gloss)
        if definition and definition not in seen:
            seen.add(definition)
            name = "train" if zlib.crc32(group.encode()) % 10 else "test"
            tables[name].append(f"{definition}\t{label}")
        for sentence in [definition, *examples]:
            tables["agreement"].append(place_in(sentence.lower(), nouns))
    for name, lines in tables.items():
        lines = [line for line in lines if line]
        (out / f"{name}.tsv").write_text("\n".join(lines), "utf-8")
        print(f"{name}.tsv: {len(lines):,} lines")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=beside.ROOT / "shards" / "useful")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages are")
    parser.add_argument("--tokenizer", help="of a model that has read the documentation")
    args = parser.parse_args()
    documents = dictionaries.gcide_documents(args.root, without="WordNet")
    if not args.tokenizer:
        documents += data.documents_in(beside.documentation())
    data.prepare(documents, args.out / "shards", 16384, tokenizer=args.tokenizer)
    print(data.describe(args.out / "shards"))
    write_tables(args.root, args.out)


if __name__ == "__main__":
    main()
