"""Tests data.py: batches, against ones made example by example; sentences; text files; the
tokenizer; shards on disk.

For masks, pairs and dealing see course/test_graders.py.
"""
import bz2
import contextlib
import functools
import gc
import gzip
import itertools
import json
import lzma
import os
import random
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import tracemalloc
import unicodedata
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import torch

import data
from tests.conftest import SEED, make_documents
from tests.ranks import CONTEXT, no_room

# ----- Batches -----

# The padded fields of a batch: (the multiple to which they are padded, the value of the padding)
PADDING = {"tokens": (64, 0), "segments": (64, 0), "positions": (64, 0),
           "masked_rows": (16, 0), "mlm": (16, data.IGNORED)}


def arrays_of(batch):
    """Returns all arrays or tensors of a batch, {name: value}; labels have the name of their task.
    """
    fields = vars(batch) | batch.labels
    del fields["labels"]
    return fields


def plain_batch(dataset, indices):
    """Returns the expected contents of a Batch, {name: list}, made example by example."""
    fields = {name: [] for name in [*PADDING, "nsp", "lengths"]}
    examples = [dataset.spans([i])[0] for i in indices]
    for spans in sorted(examples, key=dataset.length):
        text = dataset.shard(spans.shard).tokens
        a = [data.CLS, *text[spans.a:spans.a_end], data.SEP]
        b = []
        if dataset.pairs == "nsp":
            b = [*text[spans.b:spans.b_end], data.SEP]
        before = np.array(a + b)
        tokens = before.copy()
        positions = np.arange(len(tokens))
        rows, _ = dataset.mask(tokens, spans.index * dataset.seq_len + positions)
        first = len(fields["tokens"])
        chosen = before[rows].tolist()
        assert {data.CLS, data.SEP}.isdisjoint(chosen), "`mask` has chosen [CLS] or [SEP]"
        fields["tokens"] += tokens.tolist()
        fields["segments"] += [0] * len(a) + [1] * len(b)
        fields["positions"] += positions.tolist()
        fields["masked_rows"] += (first + rows).tolist()
        fields["mlm"] += chosen
        fields["nsp"].append(spans.pair_label)
        fields["lengths"].append(len(tokens))

    for name, (multiple, fill) in PADDING.items():
        values = fields[name]
        values += [fill] * (-len(values) % multiple)
    fields["lengths"].append(len(fields["tokens"]) - sum(fields["lengths"]))
    fields["bounds"] = [*itertools.accumulate(fields["lengths"], initial=0)]
    if dataset.pairs == "none":
        del fields["nsp"]
    return fields


@pytest.mark.parametrize("options", [
    {}, {"mask_fraction": 1e-9}, {"pairs": "none", "mask_fraction": 0.3, "held_out": True}])
def test_a_batch_is_its_examples_one_after_another(shards, options):
    dataset = data.PretrainingData(shards, 45, 1, seed=5, **options)
    far = np.random.default_rng(0).integers(10 ** 12, size=60).tolist()
    for indices in [7], range(500), far:
        found = arrays_of(dataset.batch(indices))
        expected = plain_batch(dataset, indices)
        assert found.keys() == expected.keys(), "fields or tasks are missing or added"
        for name, values in expected.items():
            what = f"the field {name} of {len(indices)} examples"
            assert found[name].tolist() == values, (
                f"{what} has wrong values: see the first index that differs")
            kind = "int32" if name == "bounds" else "int64"
            assert found[name].dtype == kind, f"{what} is {found[name].dtype}, not {kind}"


def test_seeds_phases_and_uses_have_random_numbers_of_their_own(shards, monkeypatch):
    keys = []
    uniform = data.uniform

    def noted(counters, key):
        keys.append(int(key))
        assert len(np.unique(counters)) == np.size(counters), "a random number is drawn twice"
        return uniform(counters, key)

    monkeypatch.setattr(data, "uniform", noted)
    for phase, seed in (0, 1), (0, 2), (1, 1), (1, 0):
        data.PretrainingData(shards, 32, phase, seed).batch(range(100))
    assert len(keys) == len(set(keys)), "two uses, phases or seeds share their random numbers"


def test_uniform_numbers_are_spread_evenly_and_do_not_depend_on_their_neighbours():
    numbers = data.uniform(np.arange(200_000), np.uint64(SEED + 1))
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs((numbers < 0.3).mean() - 0.3) < 0.004                     # four standard deviations
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.01


@pytest.mark.parametrize("pairs", ["nsp", "none"])
def test_ten_percent_are_short(shards, pairs):
    dataset = data.PretrainingData(shards, 16, pairs=pairs)
    lengths = np.array([*map(dataset.length, dataset.spans(range(8000)))])
    full = (lengths == 16).mean()                     # some documents are shorter
    assert 0.80 < full < 0.93, f"{full:.0%} of the examples have seq_len, 16 tokens, not 80 to 93 %"
    assert lengths.min() == 2 + dataset.specials, "the shortest text does not have two tokens"
    assert lengths.max() == 16, "the longest example does not have seq_len, 16 tokens"
    middle = (2 + dataset.specials + 15) / 2
    assert lengths[lengths < 16].mean() == pytest.approx(middle, rel=0.06), (
        "the mean length of short examples is wrong: they must have all lengths equally often")


def test_a_text_lies_around_its_place_within_its_document(shards):
    shard = data.Shard(np.full(1200, 7), np.array([0, 1000, 1200]))
    for place, expected in (500, (450, 550)), (10, (0, 100)), (990, (900, 1000)):
        text = data.PretrainingData(shards, 64).text(shard, place, 100, 0.5)
        assert (text.start, text.end) == expected, f"the text around token {place} is misplaced"


def test_texts_are_cut_at_any_place(shards):
    spans = data.Spans(*np.array(data.PretrainingData(shards, 128).spans(range(2000))).T)
    places = (spans.a_end - spans.a) / (spans.b_end - spans.b + spans.a_end - spans.a)
    places = places[spans.pair_label == 0]
    assert 0.45 < places.mean() < 0.55 and 0.2 < places.std() < 0.35, (
        "the cuts are not spread over the whole text")


def test_files_are_closed_with_the_examples_that_were_read_from_them(shards):
    gc.disable()                                     # it would close the files at some point
    before = set(os.listdir("/proc/self/fd"))
    batches = data.loader(data.PretrainingData(shards, 64), 0, 16, 8, 0, 1)
    next(batches)
    opened = set(os.listdir("/proc/self/fd")) - before
    batches.close()
    del batches
    left = set(os.listdir("/proc/self/fd")) - before
    gc.enable()
    assert len(opened) >= 4, "the files are not open, or not seen here"
    assert not left, "files stay open: each phase would keep those of the previous one"


def test_every_token_is_read_about_equally_often(tmp_path, prepared, monkeypatch):
    """Reads long documents for four epochs, each with as many tokens as the shard has."""
    monkeypatch.setattr(data, "SHORT_FRACTION", 0)
    documents = make_documents(2400)
    prepared(["\n".join(documents[k:k + 60]) for k in range(0, 2400, 60)])
    dataset = data.PretrainingData(tmp_path / "out", 128, seed=SEED, pairs="none")
    shard = dataset.shard(0)
    dataset.paths, dataset.shard = 8 * dataset.paths, lambda s: shard        # as the first of 8
    size = len(shard.tokens)
    epoch = size // 126
    for first in 0, 10 ** 11:                        # a walk stays even, however long it is
        seen = np.zeros(size, int)
        # With texts at random places, 0.38, 0.15, 0.06 and 0.02 would be unread.
        for k, unread in enumerate([0.2, 0.03, 0.01, 0.01]):
            ks = range(first + k * epoch, first + (k + 1) * epoch)
            for span in dataset.spans([8 * k for k in ks]):
                assert span.a_end - span.a == 126, "a text of a long document is short"
                seen[span.a:span.a_end] += 1
            share = (seen == 0).mean()
            assert share < unread, f"{share:.1%} of the tokens are unread after {k + 1} epochs"
        assert np.quantile(seen, 0.99) <= 7, (
            "1 % of the tokens are read more than 7 times in 4 epochs")


def test_a_batch_becomes_tensors_and_lengths_stay_on_the_cpu(shards):
    batch = data.PretrainingData(shards, 32).batch(range(5))
    tensors = arrays_of(batch.to("cpu"))
    moved = arrays_of(batch.to("meta"))
    for name, array in arrays_of(batch).items():
        assert torch.equal(tensors[name], torch.from_numpy(array)), f"the tensor {name} differs"
        device = "cpu" if name == "lengths" else "meta"
        assert moved[name].device.type == device, f"{name} is not on {device}"


def test_the_thread_of_a_loader_ends_with_it():
    before = set(threading.enumerate())
    fails = data.loader(SimpleNamespace(batch=lambda indices: 1 / 0), 0, 1, 1, 0, 1)
    with pytest.raises(ZeroDivisionError):
        next(fails)
    abandoned = data.loader(SimpleNamespace(batch=list), 0, 4, 4, 0, 1)
    next(abandoned)
    abandoned.close()
    assert set(threading.enumerate()) <= before, "the thread of a loader is still running"


# ----- Sentences -----

# Three sentences in each language, as one text; "|" marks the end of a sentence.
LANGUAGES = {
    "English": "He said it was late.| “Why not?”| She had no answer.",
    "Polish": "To jest Łódź!| Świat jest duży.| Żaden z nich nie wie.",
    "Spanish": "¿Qué hora es?| ¡Vamos ya!| Él no está aquí…",
    "Ukrainian": "Де ти був?| Їжак спить.| Єдина мова.",
    "Greek": "Τι κάνεις;| Έλα εδώ.| Όλα είναι καλά.",
    "Greek mark": "Τι κάνεις\u037e| Έλα εδώ.| Όλα είναι καλά.",
    "Dialogue": "— Кто там?| — Это я.| Она открыла дверь.",
    "Arabic": "هل زرت القاهرة؟| تقع المدينة على النهر.| إنها مدينة كبيرة!",
    "Urdu": "یہ ایک کتاب ہے۔| وہ گھر گیا۔| کیا تم آؤ گے؟",
    "Persian": "او می‌رود.| کتاب را خواند؟| هوا سرد است.",
    "Armenian": "Նա գնաց տուն։| Արևը շողում է։| Մենք այստեղ ենք։",
    "Hindi": "यह एक नदी है।| वह घर गया।| क्या तुम आओगे?",
    "Bengali": "এটি একটি নদী।| সে বাড়ি গেল।| তুমি কি আসবে?",
    "Chinese": "李白是唐代的诗人。|你读过他的诗吗？|他死于那一年！",
    "Japanese": "夏目漱石は小説家である。|これは彼の作品だ！|あなたは読みましたか？",
    "Khmer": "នេះជាសៀវភៅ។ |គាត់ទៅផ្ទះ។ |យើងនៅទីនេះ។",
    "Burmese": "ဤသည်စာအုပ်ဖြစ်သည်။|သူအိမ်သို့သွားသည်။ |ငါတို့ဒီမှာရှိသည်။",
    "Amharic": "ይህ መጽሐፍ ነው።| እሱ ወደ ቤት ሄደ።| እኛ እዚህ ነን።",
    "Tibetan": "འདི་དཔེ་ཆ་རེད། |ཁོང་ནང་ལ་ཕྱིན། |ང་ཚོ་འདིར་ཡོད།",
    "Korean": "그는 집에 갔다!| 이것은 책이다.| 당신은 읽었습니까?",
    "Excited": "Is it true!?| It really is...| No way?!"}


@pytest.fixture(scope="module")
def babel(tmp_path_factory):
    """Returns the dataset and tokenizer of these texts and of one or two of their sentences."""
    corpus = []
    for text in LANGUAGES.values():
        sentences = text.split("|")
        corpus += ["".join(sentences), *sentences]
        corpus += map("".join, itertools.permutations(sentences, 2))
    folder = tmp_path_factory.mktemp("babel") / "shards"
    data.prepare(3 * corpus, folder, vocab_size=900, shards=1)
    return data.PretrainingData(folder, 512), data.load_tokenizer(folder / "tokenizer.model")


def encoded(tokenizer, text):
    """Returns the tokens of a text, cleaned as `prepare` does it."""
    [[clean]] = data.blocks([text])
    return tokenizer.encode(clean)


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_are_found(language, babel):
    dataset, tokenizer = babel
    sentences = LANGUAGES[language].split("|")
    tokens = encoded(tokenizer, "".join(sentences))
    assert data.UNK not in tokens
    shard = data.Shard(np.array(tokens), np.array([0, len(tokens)]))
    cuts = {dataset.text(shard, 0, 512, draw).middle for draw in np.arange(0, 1, 0.01)}
    parts = itertools.pairwise([0, *sorted(cuts), len(tokens)])
    found = [tokenizer.decode(tokens[a:b]).strip() for a, b in parts]
    alone = [tokenizer.decode(encoded(tokenizer, sentence)).strip() for sentence in sentences]
    assert found == alone, "the text is not cut exactly between its sentences"


@pytest.mark.parametrize("language", LANGUAGES)
def test_text_of_all_forms_has_the_same_tokens(language, babel):
    """Decomposed letters, soft hyphens and direction marks do not change the tokens."""
    _, tokenizer = babel
    text = LANGUAGES[language]
    forms = {"decomposed": unicodedata.normalize("NFD", text)}
    for mark in "\u00ad\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff":
        forms[f"U+{ord(mark):04X}"] = mark.join(text)
    wanted = encoded(tokenizer, text)
    for form, changed in forms.items():
        assert encoded(tokenizer, changed) == wanted, f"{form} changes the tokens"


# ----- Text files -----

@pytest.fixture
def program(documents, monkeypatch, capsys, tmp_path):
    """Returns a function that runs data.py in this process, in tmp_path with a file a.txt, and
    returns the output, or an error's only line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join(documents))

    def run(words):
        monkeypatch.setattr(sys, "argv", ["data.py", *words.split()])
        before = os.listdir()
        try:
            data.main()
        except SystemExit as end:
            line = capsys.readouterr().err or f"{end}\n"
            assert re.fullmatch("data.py: .*\n", line), f"the error is not one line: {line}"
            assert os.listdir() == before, f"files are left, or gone, after the error {line}"
            return line
        return capsys.readouterr().out

    return run


PLAIN = "One.\nTwo.\n\nThree / é.\n".encode()
# A line as wikiextractor 3.1.0 writes it, and a line of the datasets library; see the tests below.
JSON = (b'{"id": "1", "revid": "1", "url": "x", "title": "One", "text": "One.\\nTwo."}\n'
        b'{"id":"2","text":"Three \\/ \\u00e9."}\n')
DOCUMENTS = ["One.\nTwo.", "Three / é."]
READ = {
    "a.txt": (PLAIN, DOCUMENTS),
    "a.txt.gz": (gzip.compress(PLAIN), DOCUMENTS),
    "a.txt.bz2": (bz2.compress(PLAIN), DOCUMENTS),
    "a.txt.xz": (lzma.compress(PLAIN), DOCUMENTS),
    "wiki_00": (JSON, DOCUMENTS),
    "windows.jsonl": (b"\xef\xbb\xbf" + JSON, DOCUMENTS),
    "printer.jsonl": (b"\f\n" + JSON, DOCUMENTS),
    "null.jsonl": (b'\n{"text": null}\n\n{"text": ""}\n' + JSON, DOCUMENTS),
    "spaces.txt": (b" \n\t\n" + PLAIN.replace(b"\n", b" \n"), DOCUMENTS),
    "windows.txt": (b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"), DOCUMENTS),
    "mac.txt": (PLAIN.replace(b"\n", b"\r"), DOCUMENTS),
    "null": (b"[1] A t\0ext.\n", ["[1] A text."]),
    "surrogate": (b'{"text": "One \\ud800 two."}\n', ["One ? two."]),
    "chat": (b"<tf> Hi.\n\n\n<tf> You.", ["<tf> Hi.", "<tf> You."]),
    # NFKC. SentencePiece alone would keep the dot of the first word a separate character.
    "forms": ("Vie\u0302\u0323t ﬁ ½ Ｗ".encode(), ["Việt fi 1⁄2 W"])}


@pytest.mark.parametrize("name", READ)
def test_text_of_many_forms_is_read(name, tmp_path):
    content, documents = READ[name]
    (tmp_path / name).write_bytes(content)
    [block] = data.blocks(data.TextFiles([tmp_path / name]))
    assert [document.strip() for document in block] == documents


def test_a_line_of_json_may_be_long(tmp_path):
    text = "word " * 500_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert list(data.TextFiles([tmp_path])) == [text]


DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">
<siteinfo>
<sitename>Wikipedia</sitename>
<base>https://en.wikipedia.org/wiki/Main_Page</base>
<namespaces>
<namespace key="0" />
<namespace key="10">Template</namespace>
</namespaces>
</siteinfo>
"""
PAGE = """<page>
<title>Page {i}</title>
<ns>0</ns>
<id>{i}</id>
<revision>
<id>{i}</id>
<text xml:space="preserve">'''Page {i}''' is a [[page]] of the {{{{test}}}} dump. {words}.

== History ==
It was written in {year} &amp; now. It has two paragraphs.</text>
</revision>
</page>
"""


def test_wikiextractor_makes_files_that_are_read(tmp_path, documents):
    pytest.importorskip("wikiextractor", reason="wikiextractor is not installed")
    pages = [PAGE.format(i=i, year=1900 + i, words=document.split("\n")[0].rstrip("."))
             for i, document in enumerate(documents[:60], 1)]
    with bz2.open(tmp_path / "dump.xml.bz2", "wt") as file:
        file.write(DUMP + "".join(pages) + "</mediawiki>\n")
    subprocess.run([sys.executable, "-m", "wikiextractor.WikiExtractor", "dump.xml.bz2", "--json",
                    "--html-safe", "", "-o", "wiki"], cwd=tmp_path, check=True, capture_output=True)
    found = list(data.TextFiles([tmp_path / "wiki"]))
    assert len(found) >= 60
    text = "\n".join(found)
    assert "Page 7 is a page of the" in text and "[[" not in text and "in 1907 & now" in text


def test_datasets_make_json_that_is_read(tmp_path, documents):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = {"id": [str(i) for i in range(len(documents))], "text": documents}
    datasets.Dataset.from_dict(rows).to_json(tmp_path / "wiki.jsonl")
    assert list(data.TextFiles([tmp_path / "wiki.jsonl"])) == documents


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    for name in "a.txt", "b/c.txt", "AA/wiki_00", ".hidden", ".git/config":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / ".nowhere").symlink_to("gone")
    (tmp_path / "empty.txt").touch()
    read = [*data.TextFiles([tmp_path, tmp_path / "a.txt", tmp_path / "b/../a.txt"])]
    assert read == ["AA/wiki_00\n", "a.txt\n", "b/c.txt\n"], "a file is lost or read twice"
    (tmp_path / "nowhere").symlink_to("gone")
    with pytest.raises(data.DataError, match="nowhere is not a file"):
        data.TextFiles([tmp_path])
    (tmp_path / "nowhere").unlink()
    os.mknod(tmp_path / "socket", stat.S_IFSOCK)
    with pytest.raises(data.DataError, match="socket is not a file"):
        data.TextFiles([tmp_path])


def test_a_line_of_marks_that_are_not_seen_is_blank(tmp_path):
    (tmp_path / "a.txt").write_text("שלום \u200fעולם\n\u200f \nשוב\n\u200b\u2060\nסוף\n")
    assert [*data.TextFiles([tmp_path])] == ["שלום \u200fעולם\n", "שוב\n", "סוף\n"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    def refuse(read, path):
        if str(path).startswith(str(tmp_path)):      # programs of other tests run meanwhile
            raise PermissionError(f"{path} is locked")
        return read(path)

    for name in "listdir", "scandir":                        # chmod would not stop root
        monkeypatch.setattr(os, name, functools.partial(refuse, getattr(os, name)))
    with pytest.raises(PermissionError):
        data.TextFiles([tmp_path])


REFUSED = {
    "blank.txt": (b" \n\n\t\n", "no text in the corpus"),
    "signs.txt": ("▁▁ ▁\n\n▁".encode(), "no tokenizer of 320 pieces"),
    "latin1.txt": (b"Un caf\xc3\xa9.\nUn caf\xe9.\n",
                   "latin1.txt, line 2: UnicodeDecodeError.*UTF-8"),
    "cut.txt.gz": (gzip.compress(b"word " * 9999)[:-9], "line 1: EOFError"),
    "empty.txt.gz": (b"", "line 1: .*0 bytes"),
    "title.jsonl": (b'{"text": "One."}\n{"title": "x"}\n', "line 2: KeyError: 'text'"),
    "number.jsonl": (b'{"text": "One."}\n{"text": 5}\n', "line 2: .*`text`"),
    "list.jsonl": (b'{"text": "One."}\n[]\n', "line 2: .*`text`"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200000, "line 1: .*`text`"),
    "array.json": (b' [ {"text": "One."}]', "line 1: .*`text`"),
    "strings.json": (b'["One.", "Two."]', "line 1: .*`text`"),
    "indented.json": (b'[\n  {"text": "One."}\n]\n', "line 1: JSONDecodeError.*`text`"),
    "wiki_00": (b'<doc id="1">\nOne.\n</doc>\n', "line 1: .*HTML, XML.*--json"),
    "trec": (b"<DOC>\n", "line 1: .*HTML, XML"),
    "page": (b"<!DOCTYPE html>\n", "line 1: .*HTML, XML"),
    "dump.xml": (b'\xef\xbb\xbf  <mediawiki xmlns="x">\n', "line 1: .*--json"),
    "paper.nxml": (b"\n<article xmlns='x'>\n", "line 1: .*XML"),
    "crawl.wet": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "line 1: .*WARC"),
    "paper.pdf": (b"%PDF-1.4\nOne.\n", "line 1: .*PDF"),
    "list.mbox": (b"From ann@x.org Thu Jan  1 00:00:00 2020\nSubject: One\n", "line 1: .*mail"),
    "one.eml": (b"Received: from x.org\nSubject: One\n", "line 1: .*mail"),
    "not-fetched.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "line 1: .*git-lfs"),
    "utf-16": ("One word.\n\nТекст.\n".encode("utf-16-le"), "line 1: .*UTF-16"),
    "text-then-tar": (b"One.\n\nTwo.\nwiki_00\0\0\0ustar\0\n", "line 4: .*it is a tar"),
    "long.txt": (b"One.\n" + b"word " * 10**6 + b"\nCaf\xe9.\n", "line 3: UnicodeDecodeError")}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path, program):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    said = program(f"{name} --out out --vocab-size 320")
    assert re.search(message, said), f"the message for {name} is wrong: {said}"


@pytest.mark.parametrize("flags, message", [
    ("a.txt --shards 0", "argument --shards: must be in"),
    ("a.txt --shards 65536", "argument --shards: must be in"),
    ("a.txt --vocab-size 15", "argument --vocab-size: must be in"),
    ("a.txt --vocab-size 65536", "argument --vocab-size: must be in"),
    ("a.txt --out=", "argument --out: the path is empty"),
    ("a.txt --out /dev/null/out", "Not a directory: '/dev/null/out'"),
    ("a.txt --tokenizer a.txt", "a.txt is not a tokenizer.model"),
    ("a.txt --tokenizer /nowhere", "No such file or directory: '/nowhere'"),
    ("a.txt --shards 300", "400 documents are too few, .* for 300 shards"),
    ("a.txt --vocab-size 20", "no tokenizer of 20 pieces.*raise --vocab"),
    ("b.txt", "b.txt is not a file or folder"),
    ("a.txt /dev/null", "/dev/null is not a file .*pipe")])
def test_flags_that_cannot_be_used_are_one_line(flags, message, program):
    said = program(f"--out out {flags}")
    assert re.search(message, said), f"the message for {flags} is wrong: {said}"


def test_what_is_stopped_leaves_nothing(monkeypatch, program):
    def stop(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "sha256_of", stop)
    assert "stopped; nothing is left behind" in program("a.txt --out out --shards 1")


def test_an_error_without_a_number_keeps_its_words(monkeypatch, program):
    monkeypatch.setattr(data, "sha256_of", Mock(side_effect=OSError("as some libraries say")))
    assert "as some libraries say" in program("a.txt --out out --shards 1")


def test_a_full_disk_is_one_line_that_names_the_folder(program):
    with no_room(20_000):
        said = program("a.txt --out out --shards 1 --vocab-size 320")
    assert re.search("File too large: '.*/out'", said), said


def test_what_others_have_put_into_the_folder_stays(monkeypatch, documents, shards, tmp_path):
    def stop(path):
        (path.parent / "notes.txt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "sha256_of", stop)
    with pytest.raises(KeyboardInterrupt):
        data.prepare(documents, tmp_path / "out", tokenizer=shards / "tokenizer.model")
    assert os.listdir(tmp_path / "out") == ["notes.txt"]


@pytest.mark.parametrize("suffix, compress", [
    (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_any_flipped_byte_in_an_archive_is_one_line(documents, tmp_path, suffix, compress):
    first = compress("\n\n".join(documents[:9]).encode())             # two streams
    good = first + compress("\n\n".join(["", *documents[9:]]).encode())
    for at in [*range(20, len(good), len(good) // 8), *range(len(first), len(first) + 12)]:
        content = bytearray(good)
        content[at] ^= 0x55
        (tmp_path / f"a{suffix}").write_bytes(content)
        with contextlib.suppress(data.DataError):             # any other error fails the test
            assert [text.strip() for text in data.TextFiles([tmp_path])] == documents


ENDLESS = {
    "a line": "The quick brown fox. " * 50_000,                # 1 MB
    "lines": "\n".join(8 * make_documents()),
    "no spaces": "é" * 200_000}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_document_is_cut_between_words_and_leaves_no_scraps(name, tmp_path):
    text = ENDLESS[name].strip()
    (tmp_path / "a").write_text(f"One two.\n\n{text}\n\nThree four.")
    [block] = data.blocks(data.TextFiles([tmp_path / "a"]))
    first, *parts, last = block
    assert [first, last] == ["One two.\n", "Three four.\n"], "the other documents have changed"
    assert "".join(parts).strip() == text, "text is lost or out of order"
    *sizes, _ = map(len, parts)
    assert data.LONGEST // 2 <= min(sizes), (
        f"a part, not the last, has fewer than {data.LONGEST // 2} characters: {sizes}")
    assert max(sizes) <= data.LONGEST, f"a part has over {data.LONGEST} characters: {sizes}"
    for before, after in itertools.pairwise(parts):
        assert re.search(r"\s", before[-1] + after[0]) or name == "no spaces", "a word is cut"


# ----- What the program says -----

def test_the_program_says_what_it_has_prepared(documents, tmp_path, program):
    said = program("a.txt --out shards/ü --vocab-size 320 --shards 2 --cased")
    assert said.startswith("training a tokenizer"), said
    assert re.search(
        r"\n400 documents .* 320 pieces, 0...% \[UNK\]; 2 shards, \d+ different ", said), said
    assert "documents held out, 0 left out" in said, said
    assert said.endswith("\nshards/ü is ready\n"), said
    folder = tmp_path / "shards/ü"
    encode = data.load_tokenizer(folder / "tokenizer.model").encode
    assert encode("School") != encode("school"), "--cased has no effect"

    sizes = [len(tokens) for tokens in texts_of(folder, "train-00000")]
    told = re.search(r"\n(\d+%) of the text is .* 128 tokens, (\d+%) for .* 512\n", said)
    for length, part in zip([128, 512], told.groups()):
        full = [size for size in sizes if size >= length - 3]
        assert part == f"{sum(full) / sum(sizes):.0%}", (
            f"the part of the text for examples of {length} tokens is wrong: {said}")

    begins = re.findall(r"\n    (.+)", said)
    texts = "\n" + "\n".join(document.replace("\n", " ") for document in documents)
    assert len(begins) == 3 and all(f"\n{begin}" in texts for begin in begins), said


WARNED = {                                                      # a warning: the text that causes it
    "put a blank line between them": "\n".join(8 * make_documents()),
    "if blank lines separate sentences": "\n\n".join(text[:30] for text in make_documents()),
    "unknown to the tokenizer: train one on this text, without --tokenizer":
        "\n\n".join(text + " ქქქქქ" * (i % 4 == 0) for i, text in enumerate(make_documents()))}


@pytest.mark.parametrize("warning", WARNED)
def test_odd_documents_are_said(warning, tmp_path, program, shards):
    (tmp_path / "a.txt").write_text(WARNED[warning])
    said = program(f"a.txt --out out --shards 1 --tokenizer {shards}/tokenizer.model")
    for other in WARNED:
        assert (other in said) == (other == warning), (
            f"the only warning must be {warning!r}; {other!r} is missing or extra: {said}")


def test_the_default_corpus_is_english_prose(monkeypatch, tmp_path):
    # In place of torch, which is large: a package with a link to a file that is gone.
    monkeypatch.setattr(data, "torch", SimpleNamespace(__file__=tmp_path / "__init__.py"))
    (tmp_path / "gone.py").symlink_to("nowhere")
    documents = data.machine_documentation()
    sentences = "\n".join(documents).split("\n")
    assert len(documents) > 2000
    assert len(set(sentences)) == len(sentences), "a sentence occurs twice"
    code = [sentence for sentence in sentences if re.search(r">>>|::|\|", sentence)]
    assert not code, f"these are code, not prose: {code[:3]}"
    assert sum(" the " in s.lower() for s in sentences) > 0.4 * len(sentences)


# ----- The tokenizer -----

GEORGIAN = "თბილისი საქართველოს დედაქალაქია და უდიდესი ქალაქია " * 20


def trained(sample):
    """Returns a tokenizer's model, trained on `sample` chunks of a text in which one passage, 1.3 %
    of the characters, is in another language."""
    data.SAMPLE = sample
    corpus = make_documents(3000)
    corpus[2000:2000] = 25 * [GEORGIAN]
    return data.train_tokenizer(corpus, len(corpus), 500).serialized_model_proto()


def test_the_tokenizer_knows_a_language_that_stands_together(tmp_path, monkeypatch):
    """The sample is an eighth of the text, and the same in another process."""
    monkeypatch.setattr(data, "SAMPLE", data.SAMPLE)                     # restored after the test
    with CONTEXT.Pool(1) as pool:
        other = pool.apply_async(trained, [243])
        model = trained(243)
        assert model == other.get(), "another process made another model"
    (tmp_path / "model").write_bytes(model)
    tokens = data.load_tokenizer(tmp_path / "model").encode(GEORGIAN)
    assert tokens.count(data.UNK) < 0.2 * len(tokens)                    # only its rarest letters


def test_the_tokenizer_has_all_marks_and_fewer_pieces_for_a_small_text():
    tokenizer = data.train_tokenizer(make_documents(60), 60, 8192)
    assert 300 < len(tokenizer) < 8192
    assert tokenizer.id_to_piece(list(range(5))) == data.SPECIALS
    tokens = tokenizer.encode('? ! % & = @ # " (,) [;] {:} ~ a [MASK] and [CLS][SEP] [PAD]')
    assert min(tokens) >= 5, "a mark is [UNK], or text spells a special token"


@pytest.mark.parametrize("options", [
    {"pad_id": -1},
    {"model_type": "bpe"},
    {"model_type": "word"},
    {"byte_fallback": True},
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "nfkc"}], ids=str)
def test_a_tokenizer_that_a_model_folder_cannot_describe_is_refused(
        tmp_path, monkeypatch, options):
    own_train = sentencepiece.SentencePieceTrainer.train

    def train(**own_options):
        own_train(**own_options | options)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", train)
    tokenizer = data.train_tokenizer(make_documents(20), 20, 400)
    (tmp_path / "bad").write_bytes(tokenizer.serialized_model_proto())
    with pytest.raises(data.DataError, match="bad is not a tokenizer.model that data.py"):
        data.load_tokenizer(tmp_path / "bad")


def test_an_empty_tokenizer_is_one_line(tmp_path, capfd):
    (tmp_path / "empty").touch()                     # as a killed data.py leaves it
    with pytest.raises(data.DataError, match="empty is not a tokenizer.model that data.py"):
        data.load_tokenizer(tmp_path / "empty")
    assert not capfd.readouterr().err, "SentencePiece has printed lines of its own"


# ----- Shards on disk -----

def texts_of(folder, name):
    """Returns the documents of a shard, a list of tuples of tokens."""
    tokens, documents = data.open_shard(folder / name)
    return [tuple(tokens[a:b].tolist()) for a, b in itertools.pairwise(documents)]


def test_a_shard_may_be_larger_than_the_memory(tmp_path):
    limits = [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    if limits != [resource.RLIM_INFINITY] * 2:
        pytest.skip("memory or the size of files is limited")
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in "a.tokens", "a.documents":
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)                     # a hole: it takes no room
    shard = data.open_shard(tmp_path / "a")
    assert (shard.tokens.nbytes, shard.documents.nbytes) == (size, size)
    assert shard.tokens[-1] == shard.documents[-1] == 0
    for name in "a.tokens", "a.documents":
        (tmp_path / name).unlink()


@pytest.fixture
def prepared(shards, tmp_path):
    """Returns a function that makes one shard in tmp_path/out and returns the manifest, the
    held-out documents and the training documents."""
    def prepare(corpus):
        folder = tmp_path / "out"
        manifest = data.prepare(corpus, folder, shards=1, tokenizer=shards / "tokenizer.model")
        return manifest, texts_of(folder, "heldout"), texts_of(folder, "train-00000")

    return prepare


def test_shards_hold_every_document_once(documents, shards):
    manifest = data.load_manifest(shards)
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    held_out, *rest = (texts_of(shards, name) for name in ["heldout", *data.shard_names(4)])
    trained = sum(rest, [])
    everything = sorted(held_out + trained)
    assert everything == sorted(map(tuple, tokenizer.encode(documents))), "texts are lost or added"
    assert 60 < len(held_out) == manifest["held_out"] <= 80, "not about a fifth of 400 is held out"
    assert (manifest["tokens"], manifest["documents"]) == (sum(map(len, everything)), 400)
    counts = np.bincount(sum(trained, ()), minlength=320)
    assert np.array_equal(np.fromfile(shards / "unigrams"), counts), "unigrams are miscounted"
    losses = -np.log((counts + 1) / (counts + 1).sum())
    assert np.allclose(data.unigram_losses(shards).numpy(), losses)


def test_the_part_of_unknown_tokens_is_that_of_all_shards(shards, tmp_path):
    texts = [f"{text} ქ ქ ქ ქ" for text in make_documents()]
    manifest = data.prepare(texts, tmp_path / "out", shards=2, tokenizer=shards / "tokenizer.model")
    counts = np.fromfile(tmp_path / "out/unigrams")
    assert manifest["unknown"] == pytest.approx(counts[data.UNK] / counts.sum())


def test_a_text_is_held_out_once_and_never_trained_on(prepared):
    """The corpus has 1,220 copies of a notice, and 5,000 replies, only 200 of them different."""
    replies = make_documents(200)
    corpus = 24 * replies + [f"{reply}\n" for reply in replies] + 1220 * make_documents(1, seed=1)
    manifest, held_out, trained = prepared(corpus)
    assert 2 <= len(held_out) == len(set(held_out)) == manifest["held_out"] < 20
    assert not set(held_out) & set(trained), "a text is both held out and trained on"
    assert len({*held_out, *trained}) == 201
    assert manifest["documents"] + manifest["left_out"] == 6220, "what is left out is miscounted"


def test_no_document_is_lost_and_a_fifth_at_most_is_held_out(prepared, tmp_path):
    """Folders of the same name are made one after another, as in a notebook, and must not mix."""
    for count in range(5, 10):                               # at most one would be held out
        with pytest.raises(data.DataError, match="too few"):
            prepared(make_documents(count))
    for count in range(40, 46):
        _, held_out, trained = prepared(make_documents(count, seed=count))
        assert len(held_out) + len(trained) == count, "documents are lost, or an old one is left"
        assert 2 <= len(held_out) <= count / 5
        shutil.rmtree(tmp_path / "out")


class Letters:
    """A tokenizer of 65,536 tokens; each letter becomes the last token."""

    def get_piece_size(self):
        return 65_536

    def encode(self, documents, num_threads):
        return [[65_535] * len(text) for text in documents]

    def serialized_model_proto(self):
        return b"letters"


def test_large_vocabularies_fit_short_documents_are_left_out_and_memory_does_not_grow(
        tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_tokenizer", lambda path: Letters())
    peaks = []
    for count in 700, 2800:
        corpus = [f"{number} " + "is a number " * 15 for number in range(count)] + ["a"] * 50
        folder = tmp_path / str(count)
        tracemalloc.start()
        manifest = data.prepare(corpus, folder, shards=1, tokenizer="letters")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (manifest["documents"], manifest["left_out"]) == (count, 50), (
            "documents of one token are kept, or not counted")
        assert set(np.fromfile(folder / "train-00000.tokens", np.uint16)) == {65_535}
    assert peaks[1] < 1.1 * peaks[0], (
        f"memory grows with the text: the peaks for 1 and 4 times as much are {peaks} bytes")


class Passes(list):
    """A corpus that changes between passes: each pass reads the next item of this list."""

    def __iter__(self):
        return iter(self.pop(0))


@pytest.mark.parametrize("change", [
    lambda texts: texts + ["one more"], lambda texts: texts[:-1], lambda texts: texts[::-1],
    lambda texts: texts[:-1] + ["another one"]], ids=["more", "less", "other order", "changed"])
def test_a_text_that_changes_while_it_is_read_is_refused(documents, tmp_path, prepared, change):
    with pytest.raises(data.DataError, match="changed while it was read"):
        prepared(Passes([documents, change(documents)]))
    assert not (tmp_path / "out").exists(), "the shards of a changed text are kept"


def test_files_that_a_desktop_adds_are_no_part_of_the_shards(documents, tmp_path, prepared):
    def documents_while_files_are_added():
        (tmp_path / "out/@eaDir").mkdir()
        (tmp_path / "out/.DS_Store").write_text("x")
        yield from documents

    prepared(Passes([documents, documents_while_files_are_added()]))
    (tmp_path / "out/.DS_Store").write_text("y")
    data.verify(tmp_path / "out")


def test_a_folder_of_something_else_is_refused_and_kept(documents, shards, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()                      # an empty folder is used, also by a link
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    tokenizer = shards / "tokenizer.model"
    manifest = data.prepare(documents, tmp_path / "link", tokenizer=tokenizer, shards=4)
    assert manifest == data.load_manifest(shards) and (tmp_path / "link").is_symlink()
    with pytest.raises(data.DataError, match="disk is not empty: wait if .* remove it"):
        data.prepare(documents, tmp_path / "link", tokenizer=tokenizer)
    monkeypatch.setattr(data.Path, "glob", lambda *_: [])        # as if files came after the check
    with pytest.raises(data.DataError, match="another program has begun to write"):
        data.prepare(None, tmp_path / "disk")                    # before any text is read
    monkeypatch.undo()
    assert data.verify(tmp_path / "disk") == manifest, "the refused folder has changed"


@pytest.fixture
def copy(shards, tmp_path):
    """Returns a copy of the folder of shards, to be damaged by a test."""
    return shutil.copytree(shards, tmp_path / "copy")


def test_a_damaged_shard_is_named_to_the_ranks_that_read_it(copy):
    host = os.uname().nodename
    path = copy / "train-00002.tokens"
    path.write_bytes(path.read_bytes()[::-1])
    for size in range(1, 9):
        for rank in range(size):
            read = {i % 4 for i in range(rank, 32, size)}              # the shards of its examples
            said = ""
            try:
                data.verify(copy, rank, size)
            except data.DataError as error:
                said = str(error)
            told = f"{path} is missing or damaged on {host}, where rank {rank} of {size} " in said
            assert told == (2 in read), (
                f"shard 2 is damaged, rank {rank} of {size} reads {read}, and its error is: {said}")
    path.unlink()
    with pytest.raises(data.DataError, match=f"{path.name} is missing"):
        data.verify(copy)
    data.verify(copy, 1, 2)
    data.PretrainingData(copy, 32).batch(range(1, 50, 2))            # from shards 1 and 3 only


def test_a_damaged_held_out_shard_is_named_to_every_rank(copy):
    (copy / "heldout.tokens").write_bytes(b"")
    for rank in range(4):
        with pytest.raises(data.DataError, match="heldout.tokens is missing or damaged"):
            data.verify(copy, rank, 4)


def test_what_is_no_file_is_not_opened(copy):
    """Reading a pipe might never end. The test uses a socket, which fails at once when opened."""
    (copy / "unigrams").unlink()
    os.mknod(copy / "unigrams", stat.S_IFSOCK)
    with pytest.raises(data.DataError, match="unigrams is missing"):
        data.verify(copy)


def test_a_file_that_a_manifest_does_not_list_is_refused(copy):
    manifest = data.load_manifest(copy) | {"files": {}}
    manifest["sha256"] = data.manifest_digest(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(data.DataError, match="tokenizer.model is missing or damaged"):
        data.verify(copy)


def test_a_manifest_is_as_it_was_written_or_refused(copy, monkeypatch):
    path = copy / "manifest.json"
    content = path.read_bytes()
    rng = random.Random(0)
    changed = [b"", b"[]", b"{}"]
    for _ in range(200):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        changed.append(flipped)
    for wrong in changed:
        path.write_bytes(wrong)
        with contextlib.suppress(data.DataError):              # any other error fails the test
            found = data.load_manifest(copy)
            assert found == json.loads(content), "a damaged manifest is accepted"
    path.write_bytes(content)
    monkeypatch.setattr(data, "FORMAT", 0)
    with pytest.raises(data.DataError, match="from an older program; .*; else remove it"):
        data.load_manifest(copy)
