"""A larger real text and a real task, from two dictionaries that Debian has as packages.

    apt-get install --no-install-recommends dict-gcide wordnet-base
    python tests/bench/dictionaries.py --out budget            # 6 seconds
    python data.py budget/text --out shards/dictionaries --sentences prose

Elsewhere, or without root: `apt-get download` both, `dpkg -x` each into one folder, and give that
as --root.

OUT/text/*.txt is for pre-training, with a blank line between documents. gcide.txt (GCIDE 0.48, of
Webster's dictionary of 1913) has an entry a document: without its pronunciation, all that is in
square brackets (sources, etymology) and accents. wordnet.txt (WordNet 3.0) has a document for all
synsets that have the same first pointer (mostly the same hypernym), a synset a line: its words, a
colon, its gloss. In all 34.5 MB in 146,144 documents.

OUT/task/train.tsv and test.tsv are for classification: a definition, that is a noun's gloss without
its examples, a tab, and the name of its lexicographer file, e.g. "animal". The classes are the 18
largest of the 26 noun files, all equally frequent: 322 definitions of each to train and 111 to
test, so 5,796 and 1,998; a guess is right in 5.6 %. Taken are definitions of at least five words
that no two synsets share, in the order of their SHA-1; the files are in the order of its digits
from last to first, so that their first thousand is a sample.

No definition of the task is in the text, of training neither. A line of the text is left out where
it has the words of one of them in a row, and so is each entry of GCIDE that cites WordNet, since it
may have the definition of an older WordNet.
"""
import argparse
import gzip
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

CLASSES = 18
TRAIN = 322                          # definitions of each class
TEST = 111
SHORTEST = 5                         # words of a definition that is taken
LEXNAMES = {                         # lexnames(5WN): the number of a file of nouns, its name
    3: "Tops", 4: "act", 5: "animal", 6: "artifact", 7: "attribute", 8: "body", 9: "cognition",
    10: "communication", 11: "event", 12: "feeling", 13: "food", 14: "group", 15: "location",
    16: "motive", 17: "object", 18: "person", 19: "phenomenon", 20: "plant", 21: "possession",
    22: "process", 23: "quantity", 24: "relation", 25: "shape", 26: "state", 27: "substance",
    28: "time"}


class Synset(NamedTuple):
    """A line of one of WordNet's data files."""
    file: int                # its lexicographer file
    words: list              # str, those that have this meaning
    parent: str              # what its first pointer points to; its own offset without pointers
    gloss: str               # the definition, then perhaps examples in quotes


def read_synset(line):
    """Returns the Synset of a line of a data file, as wndb(5WN) describes it:

        offset file type w_cnt word lex_id [word lex_id ...] p_cnt [symbol offset pos numbers ...]
            [verb frames] | gloss
    """
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    pointers = 4 + 2 * int(fields[3], 16)
    words = []
    for word in fields[4:pointers:2]:
        word = re.sub(r"\((?:a|p|ip)\)$", "", word)          # an adjective's place in a sentence
        words.append(word.replace("_", " "))
    parent = fields[0]
    if int(fields[pointers]) > 0:
        parent = fields[pointers + 2]
    return Synset(int(fields[1]), words, parent, gloss.strip())


def read_wordnet(folder):
    """Returns the synsets (list of Synset) of the four data files, nouns first."""
    synsets = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in Path(folder, f"data.{part}").read_text("utf-8").splitlines():
            if not line.startswith("  "):                    # the licence
                synsets.append(read_synset(line))
    return synsets


# ----- The task -----

def definition(gloss):
    """Returns a gloss without its examples."""
    return re.split(r"[;:,]? *\"", gloss)[0].strip(" ;:")


def words_of(text):
    """Returns the words of a text (list of str) in lower case, without punctuation."""
    return re.findall(r"[a-z0-9]+", text.lower())


def draw(example):
    """Returns 40 random digits that depend on an example's text alone."""
    return hashlib.sha1(example[0].encode()).hexdigest()


def choose_task(synsets):
    """Returns (train, test), lists of (definition, class) in the order of the file; see the top."""
    nouns = [synset for synset in synsets if synset.file in LEXNAMES]
    sizes = Counter(synset.file for synset in nouns)
    classes = [file for file, _ in sizes.most_common(CLASSES)]
    copies = Counter(" ".join(words_of(definition(synset.gloss))) for synset in nouns)

    candidates = []
    for synset in nouns:
        text = definition(synset.gloss)
        words = words_of(text)
        if synset.file in classes and len(words) >= SHORTEST and copies[" ".join(words)] == 1:
            candidates.append((text, LEXNAMES[synset.file]))
    train = []
    test = []
    taken = Counter()
    for text, name in sorted(candidates, key=draw):
        if taken[name] < TEST:
            test.append((text, name))
        elif taken[name] < TEST + TRAIN:
            train.append((text, name))
        taken[name] += 1
    # Those of a large class came first. The digits in reverse are another order.
    for examples in train, test:
        examples.sort(key=lambda example: draw(example)[::-1])
    return train, test


# ----- The text -----

class HeldOut:
    """The definitions that the text must not have."""

    def __init__(self, definitions):
        self.by_start = {}                   # {its first SHORTEST words: [all its words]}
        for text in definitions:
            words = words_of(text)
            self.by_start.setdefault(tuple(words[:SHORTEST]), []).append(words)

    def is_in(self, text):
        """Returns True if a text has the words of one of the definitions in a row."""
        words = words_of(text)
        for begin in range(len(words) - SHORTEST + 1):
            for wanted in self.by_start.get(tuple(words[begin:begin + SHORTEST]), []):
                if words[begin:begin + len(wanted)] == wanted:
                    return True
        return False


def wordnet_documents(synsets):
    """Returns the documents (lists of lines) of WordNet."""
    documents = {}
    for synset in synsets:
        line = f"{', '.join(synset.words)}: {synset.gloss}."
        documents.setdefault(synset.parent, []).append(line)
    return list(documents.values())


def gcide_documents(dictionary):
    """Returns the documents (lists of lines) of GCIDE, a paragraph a line."""
    documents = []
    for entry in re.split(r"\n\n+(?=\S)", dictionary):
        # An entry begins: Larker \Lark"er\, n. [See 3d {Lark} ...]. The licence does not.
        if re.match(r".+? \\", entry) and "WordNet" not in entry:
            paragraphs = re.split(r"\n\s*\n", plain(entry))
            lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
            documents.append(lines)
    return documents


def plain(entry):
    """Returns an entry of GCIDE without markup."""
    # [ae] [=o] ['e] [a^]: letters with their accents
    entry = re.sub(r"\[[^\w\s\[\]]{0,2}([A-Za-z]{1,2})[\^~]?\]", r"\1", entry)
    for _ in range(3):                       # brackets in brackets
        entry = re.sub(r"\[[^\[\]]*\]", "", entry)
    # The first \...\ is the pronunciation, with another one in parentheses
    entry = re.sub(r" \\[^\\]*\\(\s\([^)]*\))?", "", entry, count=1)
    entry = re.sub(r"[{}\\]", "", entry)
    return re.sub(r"\s+(?=[,.;:])", "", entry)


def write_text(path, documents, held_out):
    """Writes documents without the lines that have a held-out definition; returns how many, and how
    many lines were left out."""
    written = 0
    left_out = 0
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            lines = []
            for line in filter(None, document):
                if held_out.is_in(line):
                    left_out += 1
                else:
                    lines.append(line)
            if lines:
                file.write("\n".join(lines) + "\n\n")
                written += 1
    return written, left_out


# ----- The program -----

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("budget"), help="write text and task here")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages are")
    args = parser.parse_args()
    synsets = read_wordnet(args.root / "usr/share/wordnet")
    # .dz is gzip with an index
    with gzip.open(args.root / "usr/share/dictd/gcide.dict.dz") as file:
        dictionary = file.read().decode("utf-8", "replace")

    train, test = choose_task(synsets)
    (args.out / "task").mkdir(parents=True, exist_ok=True)
    for name, examples in ("train", train), ("test", test):
        lines = [f"{text}\t{label}\n" for text, label in examples]
        (args.out / "task" / f"{name}.tsv").write_text("".join(lines), "utf-8")
        print(f"task/{name}.tsv: {len(examples):,} definitions")

    held_out = HeldOut(text for text, _ in train + test)
    (args.out / "text").mkdir(exist_ok=True)
    for name, documents in (("gcide", gcide_documents(dictionary)),
                            ("wordnet", wordnet_documents(synsets))):
        path = args.out / "text" / f"{name}.txt"
        written, left_out = write_text(path, documents, held_out)
        print(f"text/{path.name}: {path.stat().st_size / 1e6:.1f} MB, {written:,} documents, "
              f"{left_out:,} lines left out")


if __name__ == "__main__":
    main()
