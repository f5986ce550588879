"""Writes what bench_useful.py reads: shards without WordNet, glosses, and masked verbs.

    apt-get download dict-gcide wordnet-base && for p in *.deb; do dpkg -x $p root; done
    python tests/bench/useful_text.py --root root              # writes shards/useful, 40 seconds

OUT/shards holds GCIDE, without its thousands of entries from WordNet, and this machine's
documentation. With --tokenizer runs/demo/model/tokenizer.model, for --init, it holds GCIDE alone.

OUT/train.tsv and test.tsv have a line for each synset of WordNet: its definition, and as label its
lexicographer file, one of 45, such as noun.05, animals. The words of the synset are left out, and
so are the quoted examples, which contain them. No definition occurs twice. Synsets with the same
first hypernym, or for adjectives the same first similar one, are in the same file; a tenth of these
groups are in test.tsv.

OUT/agreement.tsv has a line for each sentence in WordNet's glosses and examples where the number of
the subject, singular or plural, decides between two verbs: the sentence with [MASK], the original
verb, the alternative, and "same" or "other" for the number of the noun nearest to the verb. There
is no parser: the subject is X in "the X is" and in "the X of the Y is". If X and the verb differ in
number, X is not the subject, and the sentence is left out.
"""
import argparse
import itertools
import re
import zlib
from pathlib import Path

import beside
import dictionaries

import data

VERBS = ["is", "are", "was", "were", "has", "have"]      # singular and plural alternate
# A word may precede each noun.
SUBJECT = re.compile(
    r"\b(?:the|an?)( [a-z]+)?? (?P<subject>[a-z]+)"
    r"( (?:of|in|on|for|with|to|from|by|at|between)( the| an?)?( [a-z]+)?? (?P<nearest>[a-z]+))?"
    r" (?P<verb>is|are|was|were|has|have)\b")
QUOTE = r'[;:,]?\s*"'        # the beginning or end of an example in a gloss


def read_synset(part, line):
    """Returns (group, gloss, label) of a line of WordNet. A group is in one file, train or test."""
    head, gloss = line.split(" | ", 1)
    offset, number = head.split()[:2]
    # The first hypernym or similar adjective; without one, the synset itself.
    pointer = re.search(r" [@&]i? (\d{8}) ", f"{head} & {offset} ")
    return part + pointer[1], gloss.strip(), f"{part}.{number}"


def is_plural(word, nouns):
    """Returns whether a noun is a plural; None if the word is not a noun."""
    if word in nouns:
        return False
    if word.endswith("s") and word[:-1] in nouns:
        return True
    return None


def place_in(sentence, nouns):
    """Returns the line of a sentence in agreement.tsv, or None."""
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
    """Writes train.tsv, test.tsv and agreement.tsv, and prints the number of lines in each."""
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
