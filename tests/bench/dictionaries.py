"""Writes a larger real text, from two dictionaries that are Debian packages.

    apt-get install --no-install-recommends dict-gcide wordnet-base
    python tests/bench/dictionaries.py --out text              # 4 seconds
    python data.py text --out shards/dictionaries

On other systems, or without root: `apt-get download` both, unpack them with `dpkg -x` into one
folder, and pass that as --root.

OUT/gcide.txt (GCIDE 0.48, from Webster's dictionary of 1913) has a document for each entry, without
pronunciation, accents or anything in square brackets (sources, etymology). OUT/wordnet.txt
(WordNet 3.0) has one document for all synsets whose first pointers have the same target, mostly a
hypernym. Each synset is a line: its words, a colon, its gloss. A blank line ends a document.
"""
import argparse
import gzip
import re
from pathlib import Path


def read_synset(line):
    """Returns (target of the first pointer, text) of a line in a data file of WordNet. A synset
    without pointers has its own offset as the target. The format is that of wndb(5WN):

        offset file type w_cnt word lex_id [word lex_id ...] p_cnt [symbol offset pos numbers ...]
            [verb frames] | gloss
    """
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    pointers = 4 + 2 * int(fields[3], 16)
    words = []
    for word in fields[4:pointers:2]:
        word = re.sub(r"\((?:a|p|ip)\)$", "", word)          # the position of an adjective
        words.append(word.replace("_", " "))
    parent = fields[0]
    if int(fields[pointers]) > 0:
        parent = fields[pointers + 2]
    return parent, f"{', '.join(words)}: {gloss.strip()}."


def synsets(root):
    """Yields (part of speech, line) of each synset in WordNet's four data files."""
    for part in ("noun", "verb", "adj", "adv"):
        path = root / "usr/share/wordnet" / f"data.{part}"
        for line in path.read_text("utf-8").splitlines():
            if not line.startswith("  "):                    # the licence
                yield part, line


def wordnet_documents(root):
    """Returns the documents (list of str) of WordNet."""
    documents = {}
    for _, line in synsets(root):
        parent, text = read_synset(line)
        documents.setdefault(parent, []).append(text)
    return ["\n".join(lines) for lines in documents.values()]


def gcide_documents(root, without="\0"):
    """Returns the documents (list of str) of GCIDE, with each paragraph on a line. Entries that
    contain the string `without` are left out."""
    # .dz is gzip with an index.
    with gzip.open(root / "usr/share/dictd/gcide.dict.dz") as file:
        dictionary = file.read().decode("utf-8", "replace")
    documents = []
    for entry in re.split(r"\n\n+(?=\S)", dictionary):
        if without in entry:
            continue
        # An entry begins: Larker \Lark"er\, n. [See 3d {Lark} ...]. The licence does not.
        if re.match(r".+? \\", entry):
            paragraphs = re.split(r"\n\s*\n", plain(entry))
            lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
            documents.append("\n".join(filter(None, lines)))
    return documents


def plain(entry):
    """Returns an entry of GCIDE without markup."""
    # Letters with accents: [ae] [=o] ['e] [a^]
    entry = re.sub(r"\[[^\w\s\[\]]{0,2}([A-Za-z]{1,2})[\^~]?\]", r"\1", entry)
    for _ in range(3):                       # nested brackets
        entry = re.sub(r"\[[^\[\]]*\]", "", entry)
    # The first \...\ is the pronunciation; a second one may follow in parentheses.
    entry = re.sub(r" \\[^\\]*\\(\s\([^)]*\))?", "", entry, count=1)
    entry = re.sub(r"[{}\\]", "", entry)
    return re.sub(r"\s+(?=[,.;:])", "", entry)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("text"), help="write the texts here")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages are")
    args = parser.parse_args()
    texts = {"gcide.txt": gcide_documents(args.root), "wordnet.txt": wordnet_documents(args.root)}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, documents in texts.items():
        (args.out / name).write_text("\n\n".join(documents) + "\n", "utf-8")
        size = (args.out / name).stat().st_size
        print(f"{name}: {size / 1e6:.1f} MB, {len(documents):,} documents")


if __name__ == "__main__":
    main()
