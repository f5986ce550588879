"""dictionaries.py: WordNet is read as wndb(5WN) says, and nothing of the task is in the text."""
import gzip
import sys
from collections import Counter

import pytest

from tests.bench import dictionaries

ENTRIES = r"""
00-database-info
   The licence of "all" \ of it.

Larix \La"rix\ (l[=a]"r[i^]ks), n. [NL., fr. Gr. la`rix [root]11.]
   1. The genus of {Larid[ae]}, i. e.
      larches [Obs.] ; trees.
      [1913 Webster]

   2. A plant of
      the Eleventh; common kind in gardens.
      [1913 Webster]

Lari \Lari\ prop. n.
   A suborder of birds.
        [WordNet 1.5]
"""


def noun(number, file, gloss):
    """Returns a line of data.noun."""
    return f"{number:08} {file:02} n 01 word{number} 0 001 @ 00000001 n 0000 | {gloss}  "


def test_a_line_of_wordnet():
    synset = dictionaries.read_synset(
        '00001740 29 v 0a breathe 0 take_a_breath 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 respire(ip) 3 002 '
        '* 00005041 v 0000 + 04201 n 0101 02 + 02 00 + 08 00 | draw air (in | out); "I breathe"  ')
    assert synset.file == 29 and synset.parent == "00005041"
    assert synset.words[:2] == ["breathe", "take a breath"] and synset.words[9:] == ["respire"]
    assert synset.gloss == 'draw air (in | out); "I breathe"'
    assert dictionaries.definition(synset.gloss) == "draw air (in | out)"
    alone = dictionaries.read_synset("00000007 03 n 01 entity 0 000 | that which is")
    assert alone.parent == "00000007"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the program writes from dictionaries of 20 plants, 14 animals and 5 acts, with two
    classes, of each three definitions to train and two to test."""
    numbers = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
    lines = ["  1 the licence"]
    for kind, file, count in ("plant", 20, 12), ("animal", 5, 9), ("act", 4, 5):
        for number, word in enumerate(numbers.split()[:count]):
            gloss = f'a {kind} of the {word}, common kind; "such a {kind}"'
            lines.append(noun(100 * file + number, file, gloss))
    for number in range(8):
        lines.append(noun(2050 + number, 20, "a plant that many others are like"))
    for number in range(5):
        lines.append(noun(550 + number, 5, f"too short {number}"))

    root = tmp_path / "root/usr/share"
    (root / "wordnet").mkdir(parents=True)
    (root / "dictd").mkdir()
    for part, content in ("noun", lines), ("verb", []), ("adj", []), ("adv", []):
        (root / "wordnet" / f"data.{part}").write_text("\n".join(content))
    with gzip.open(root / "dictd/gcide.dict.dz", "wb") as file:
        file.write(ENTRIES.encode())
    for name, value in ("CLASSES", 2), ("TRAIN", 6), ("TEST", 3):
        monkeypatch.setattr(dictionaries, name, value)
    monkeypatch.setattr(sys, "argv", ["dictionaries.py", "--out", str(tmp_path),
                                      "--root", str(tmp_path / "root")])
    dictionaries.main()
    return tmp_path


def test_the_task_has_the_largest_classes_and_each_definition_once(folder):
    task = {}
    for name, count in ("train", 6), ("test", 3):
        lines = (folder / "task" / f"{name}.tsv").read_text().splitlines()
        task[name] = [line.split("\t") for line in lines]
        assert Counter(label for _, label in task[name]) == {"plant": count, "animal": count}
    texts = [text for text, _ in task["train"] + task["test"]]
    assert len(set(texts)) == 18
    assert "a plant that many others are like" not in texts
    assert all(f"a {label} of" in text for text, label in task["train"] + task["test"])


def test_no_definition_of_the_task_is_in_the_text(folder):
    text = ""
    for name in "gcide", "wordnet":
        text += (folder / "text" / f"{name}.txt").read_text().lower().replace(";", "") + "\n"
    text = text.replace(",", "")
    for name in "train", "test":
        for line in (folder / "task" / f"{name}.tsv").read_text().splitlines():
            assert line.split("\t")[0].replace(",", "") not in text
    # Three plants are not taken. The text has these, and all of other classes.
    assert text.count("a plant of the") == 3 and text.count("a act of the") == 5
    assert text.count("many others") == 8 and text.count("too short") == 5


def test_gcide_without_markup(folder):
    text = (folder / "text/gcide.txt").read_text()
    assert text == "Larix, n. 1. The genus of Laridae, i. e. larches; trees.\n\n"
