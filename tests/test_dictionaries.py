"""dictionaries.py: WordNet is read as wndb(5WN) says, GCIDE without its markup."""
import gzip
import sys

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
"""


def test_a_line_of_wordnet():
    parent, text = dictionaries.read_synset(
        '00001740 29 v 03 breathe 0 take_a_breath 0 respire(ip) 3 002 * 00005041 v 0000 + 04201 n '
        '0101 02 + 02 00 + 08 00 | draw air (in | out); "I breathe"  ')
    assert parent == "00005041"
    assert text == 'breathe, take a breath, respire: draw air (in | out); "I breathe".'
    assert dictionaries.read_synset("00000007 03 n 01 entity 0 000 | that which is") == (
        "00000007", "entity: that which is.")


def test_both_texts(tmp_path, monkeypatch):
    root = tmp_path / "usr/share"
    (root / "wordnet").mkdir(parents=True)
    (root / "dictd").mkdir()
    for part in "noun", "verb", "adj", "adv":
        lines = ["  1 the licence", f"00000007 03 n 01 {part} 0 001 @ 00000001 n 0000 | a word",
                 f"00000008 03 n 01 {part}s 0 001 @ 0000000{part[0]} n 0000 | words"]
        (root / "wordnet" / f"data.{part}").write_text("\n".join(lines))
    with gzip.open(root / "dictd/gcide.dict.dz", "wb") as file:
        file.write(ENTRIES.encode())
    monkeypatch.setattr(sys, "argv", ["dictionaries.py", "--out", str(tmp_path / "text"),
                                      "--root", str(tmp_path)])
    dictionaries.main()
    documents = (tmp_path / "text/wordnet.txt").read_text().split("\n\n")
    assert documents[0] == "noun: a word.\nverb: a word.\nadj: a word.\nadv: a word."
    assert documents[3:] == ["adjs: words.\nadvs: words.\n"]
    assert (tmp_path / "text/gcide.txt").read_text() == (
        "Larix, n. 1. The genus of Laridae, i. e. larches; trees.\n"
        "2. A plant of the Eleventh; common kind in gardens.\n")
