"""data.py: batches beside ones made in lists, example by example; sentences, files, the tokenizer,
shards.

Masks, pairs and dealing: course/test_graders.py.
"""
import bz2
import contextlib
import functools
import gzip
import itertools
import json
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch

import data
from tests.conftest import SEED, make_documents
from tests.ranks import CONTEXT

# ----- Batches -----


def arrays_of(batch):
    """Returns {name: array or tensor} of all that is in a batch; a task's name is that of its
    labels."""
    fields = vars(batch) | batch.labels
    del fields["labels"]
    return fields


def plain_batch(dataset, indices):
    """Returns what a Batch must hold, {name: list}, made example by example."""
    examples = []
    for i in indices:
        [spans] = dataset.spans([i])
        text = dataset.shard(spans.shard).tokens
        a = [data.CLS, *text[spans.a:spans.a_end], data.SEP]
        b = [*text[spans.b:spans.b_end], data.SEP] if dataset.pairs == "nsp" else []
        tokens, positions = np.array(a + b), np.arange(len(a + b))
        before = tokens.copy()
        rows, labels = dataset.mask(tokens, i * dataset.seq_len + positions)
        assert np.array_equal(labels, before[rows]), "mask: labels are not the tokens before it"
        chosen = set(before[rows])
        assert chosen.isdisjoint({data.CLS, data.SEP}), "mask: [CLS] or [SEP] is chosen"
        examples.append({"tokens": tokens, "segments": [0] * len(a) + [1] * len(b),
                         "positions": positions, "masked_rows": rows, "mlm": labels,
                         "nsp": [spans.pair_label]})
    examples.sort(key=lambda example: len(example["tokens"]))
    lengths = [len(example["tokens"]) for example in examples]
    for example, first in zip(examples, itertools.accumulate(lengths, initial=0)):
        example["masked_rows"] += first

    fields = {}
    for name in examples[0]:
        fields[name] = np.concatenate([example[name] for example in examples]).tolist()
    for name, multiple, fill in [("tokens", 64, 0), ("segments", 64, 0), ("positions", 64, 0),
                                 ("masked_rows", 16, 0), ("mlm", 16, data.IGNORED)]:
        fields[name] += [fill] * (-len(fields[name]) % multiple)
    lengths.append(len(fields["tokens"]) - sum(lengths))
    return fields | {"lengths": lengths, "bounds": [*itertools.accumulate(lengths, initial=0)]}


@pytest.mark.parametrize("options", [
    {}, {"mask_fraction": 1e-9}, {"pairs": "none", "mask_fraction": 0.3, "held_out": True}])
def test_a_batch_is_its_examples_one_after_another(shards, options):
    dataset = data.PretrainingData(shards, 45, 1, seed=5, **options)
    far = np.random.default_rng(0).integers(10 ** 12, size=60).tolist()
    for indices in [7], range(500), far:
        found = arrays_of(dataset.batch(indices))
        expected_fields = plain_batch(dataset, indices)
        if dataset.pairs == "none":
            del expected_fields["nsp"]
            assert "nsp" not in found, "there are labels, and no pairs"
        for name, expected in expected_fields.items():
            ours = found[name].tolist()
            off = [k for k, (one, other) in enumerate(zip(ours, expected)) if one != other]
            assert ours == expected, (
                f"{name} of {len(indices)} examples: the first wrong values are at {off[:3]}, "
                f"where the tokens are {[expected_fields['tokens'][k] for k in off[:3]]} (2 is "
                f"[CLS], 3 [SEP]); it has {len(ours)} of {len(expected)} values")
            kind = "int32" if name == "bounds" else "int64"
            assert found[name].dtype == kind, f"{name} is {found[name].dtype}, not {kind}"


def test_seeds_phases_and_uses_have_random_numbers_of_their_own(shards, monkeypatch):
    keys, uniform = [], data.uniform

    def noted(counters, key):
        keys.append(int(key))
        assert len(np.unique(counters)) == np.size(counters), "a random number is used twice"
        return uniform(counters, key)

    monkeypatch.setattr(data, "uniform", noted)
    for phase, seed in (0, 1), (0, 2), (1, 1), (1, 0):
        data.PretrainingData(shards, 32, phase, seed).batch(range(100))
    assert len(keys) == len(set(keys)), "two uses, phases or seeds have the same random numbers"


def test_uniform_numbers():
    numbers = data.uniform(np.arange(200_000), np.uint64(SEED + 1))
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs((numbers < 0.3).mean() - 0.3) < 0.004                     # four standard deviations
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.01


@pytest.mark.parametrize("pairs", ["nsp", "none"])
def test_ten_percent_are_short(shards, pairs):
    dataset = data.PretrainingData(shards, 16, pairs=pairs)
    lengths = np.array([*map(dataset.length, dataset.spans(range(8000)))])
    assert 0.80 < (lengths == 16).mean() < 0.93       # others end with their document
    assert lengths.min() == 2 + dataset.specials


def test_texts_are_cut_at_any_place(shards):
    spans = data.Spans(*np.array(data.PretrainingData(shards, 128).spans(range(2000))).T)
    true = spans.pair_label == 0
    places = (spans.a_end - spans.a)[true] / (spans.b_end - spans.a)[true]
    assert 0.45 < places.mean() < 0.55 and 0.2 < places.std() < 0.35, "not of all places"


def test_every_token_is_read_about_equally_often(tmp_path, shards, monkeypatch):
    """Of long documents as many tokens as there are in a shard, read 1, 2 and 4 times over."""
    monkeypatch.setattr(data, "SHORT_FRACTION", 0)
    documents = make_documents(2400)
    corpus = ["\n".join(documents[k:k + 60]) for k in range(0, 2400, 60)]
    data.prepare(corpus, tmp_path / "out", shards=1, tokenizer=shards / "tokenizer.model")
    dataset = data.PretrainingData(tmp_path / "out", 128, seed=SEED, pairs="none")
    size = len(dataset.shard(0).tokens)
    epoch = size // 126
    for first in 0, 10 ** 12:                        # a walk goes on evenly, however far it is
        seen = np.zeros(size, int)
        for k, unread in enumerate([0.2, 0.03, 0.01, 0.01]):    # 0.38, 0.15, 0.06, 0.02 by chance
            for span in dataset.spans(range(first + k * epoch, first + (k + 1) * epoch)):
                assert span.a_end - span.a == 126, "a text is short, and its document long"
                seen[span.a:span.a_end] += 1
            share = (seen == 0).mean()
            assert share < unread, f"{share:.1%} of the tokens are unread after {k + 1} epochs"
        assert np.quantile(seen, 0.99) <= 7, "some tokens are read too often"


def test_a_batch_becomes_tensors_and_lengths_stay_on_the_cpu(shards):
    batch = data.PretrainingData(shards, 32).batch(range(5))
    tensors, moved = arrays_of(batch.to("cpu")), arrays_of(batch.to("meta"))
    for name, array in arrays_of(batch).items():
        assert torch.equal(tensors[name], torch.from_numpy(array)), f"{name} has changed"
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
    assert set(threading.enumerate()) <= before, "a thread goes on"


# ----- Sentences -----

# Three sentences of each, as one text; "|" is where one ends.
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
    """Returns the data set and the tokenizer of these texts and of one or two of their sentences.
    """
    corpus = []
    for text in LANGUAGES.values():
        sentences = text.split("|")
        corpus += ["".join(sentences), *sentences]
        corpus += map("".join, itertools.permutations(sentences, 2))
    folder = tmp_path_factory.mktemp("babel") / "shards"
    data.prepare(3 * corpus, folder, vocab_size=900, shards=1)
    return data.PretrainingData(folder, 512), data.load_tokenizer(folder / "tokenizer.model")


def blocks_of(text):
    """Returns what a text becomes before it is encoded."""
    return "".join(itertools.chain(*data.blocks([text])))


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences(language, babel):
    dataset, tokenizer = babel
    sentences = LANGUAGES[language].split("|")
    tokens = np.array(tokenizer.encode(blocks_of("".join(sentences))))
    assert data.UNK not in tokens
    shard = data.Shard(tokens, np.array([0, len(tokens)]))
    cuts = {dataset.text(shard, 0, 512, draw).middle for draw in np.arange(0, 1, 0.01)}
    parts = itertools.pairwise([0, *sorted(cuts), len(tokens)])
    found = [tokenizer.decode(tokens[a:b].tolist()).strip() for a, b in parts]
    assert found == [tokenizer.decode(tokenizer.encode(blocks_of(s))).strip() for s in sentences]


@pytest.mark.parametrize("language", LANGUAGES)
def test_text_of_all_forms_has_the_same_tokens(language, babel):
    """Decomposed letters, soft hyphens, marks of direction."""
    text, (_, tokenizer) = LANGUAGES[language], babel
    wanted = tokenizer.encode(blocks_of(text))
    assert tokenizer.encode(blocks_of(unicodedata.normalize("NFD", text))) == wanted, "decomposed"
    for mark in "\u00ad\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff":
        found = tokenizer.encode(blocks_of(mark.join(text)))
        assert found == wanted, f"U+{ord(mark):04X} changes tokens"


# ----- Text files -----

@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Runs data.py in this process and tmp_path; returns what it prints, or an error's only line.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["data.py", *map(str, words)])
        try:
            data.main()
        except SystemExit as end:
            line = capsys.readouterr().err or f"{end}\n"
            assert re.fullmatch("data.py: .*\n", line), f"no error in one line: {line}"
            return line
        return capsys.readouterr().out

    return run


def lines(documents):
    return "\n\n".join(documents).encode()


def json_lines(documents):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents).encode()


FORMS = {                                   # in the order of their names
    "AA/wiki_00": json_lines,
    "AA/wiki_01.gz": lambda documents: gzip.compress(json_lines(documents)),
    "a.txt": lines,
    "b.txt.bz2": lambda documents: bz2.compress(lines(documents)),
    "c.txt.xz": lambda documents: lzma.compress(lines(documents)),
    "null.jsonl": lambda documents: b'\n{"text": null}\n\n{"text": ""}\n' + json_lines(documents),
    "spaces.txt": lambda documents: b" \n\t\n" + lines(documents).replace(b"\n", b" \n"),
    "windows.txt": lambda documents: b"\xef\xbb\xbf" + lines(documents).replace(b"\n", b"\r\n")}


def test_a_folder_of_files_of_all_forms(documents, tmp_path, program):
    expected = []
    for k, (name, form) in enumerate(FORMS.items()):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = documents[k::len(FORMS)]
        path.write_bytes(form(mine))
        found = [text.strip() for text in data.TextFiles([path])]
        assert found == mine, f"{name} has other documents"
        expected += mine
    for name in ".hidden", ".git/config":
        (tmp_path / "text" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "text" / name).write_bytes(b"\xff")
    (tmp_path / "text/loop").symlink_to(".")
    os.mkfifo(tmp_path / "text/pipe")
    corpus = [text.strip() for text in data.TextFiles(["text"])]
    assert corpus == expected, "a folder is not its files, each once, in the order of their names"
    (tmp_path / "text/nowhere").symlink_to("gone")
    with pytest.raises(OSError, match="nowhere"):
        list(data.TextFiles(["text"]))
    (tmp_path / "text/nowhere").unlink()

    said = program("text", "--out", "shards/ü", "--vocab-size", 320, "--cased")
    assert re.match(r"400 documents .* 320 pieces, 0...% \[UNK\]; 8 shards, \d+ different ", said)
    assert said.endswith("\nshards/ü is ready\n"), said
    manifest = data.prepare(data.TextFiles(["text"]), tmp_path / "alone", 320, cased=True)
    assert data.load_manifest("shards/ü") == manifest, "the program has prepared other shards"
    encode = data.load_tokenizer("shards/ü/tokenizer.model").encode
    assert encode("School") != encode("school"), "--cased makes no difference"


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


REFUSED = {
    "empty.txt": (b"", "no text in the corpus"),
    "blank.txt": (b" \n\n\t\n", "no text in the corpus"),
    "signs.txt": ("▁▁ ▁\n\n▁".encode(), "no tokenizer of 320 pieces"),
    "few.txt": (b"One.\n\nTwo.\n", "2 documents are too few, .* for 4 shards"),
    "chinese.txt": ("\n\n".join(map(chr, range(0x4e00, 0x5200))).encode(), "raise --vocab-size"),
    "latin1.txt": (b"Un caf\xc3\xa9.\nUn caf\xe9.\n", "line 2: UnicodeDecodeError.*UTF-8"),
    "cut.txt.gz": (gzip.compress(b"word " * 9999)[:-9], "EOFError"),
    "no.txt.gz": (b"plain text", "BadGzipFile"),
    "no.txt.xz": (b"plain text", "LZMAError"),
    "no.txt.bz2": (b"plain text", "OSError"),
    "title.jsonl": (b'{"text": "One."}\n{"title": "x"}\n', "line 2: KeyError: 'text'"),
    "number.jsonl": (b'{"text": "One."}\n{"text": 5}\n', "line 2: .*`text`"),
    "list.jsonl": (b'{"text": "One."}\n[]\n', "line 2: .*`text`"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200000, "line 1: .*`text`"),
    "pretty.json": (b'{\n  "text": "One."\n}\n', "line 1: .*`text`"),
    "array.json": (b' [ {"text": "One."}]', "line 1: .*`text`"),
    "indented.json": (b'[\n  {"text": "One."}\n]\n', "line 1: JSONDecodeError.*`text`"),
    "wiki_00": (b'<doc id="1">\nOne.\n</doc>\n', "line 1: .*HTML, XML.*--json"),
    "trec": (b"<DOC>\n", ".*HTML, XML"),
    "page": (b"<!DOCTYPE html>\n", ".*HTML, XML"),
    "wiki.tar.gz": (gzip.compress(b"wiki_00\0\0\0ustar\0\n"), ".*it is a tar"),
    "text-then-tar": (b"One.\n\nTwo.\nwiki_00\0\0\0ustar\0\n", "line 4: .*it is a tar"),
    "hole": (b"One.\n" + bytes(5000) + b"\nTwo.\n", "line 2: .*a part of it is lost"),
    "crawl.wet": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "line 1: .*WARC"),
    "paper.pdf": (b"%PDF-1.4\nOne.\n", "line 1: .*PDF"),
    "paper.nxml": (b"\n<article xmlns='x'>\n", "line 1: .*XML"),
    "list.mbox": (b"From ann@x.org Thu Jan  1 00:00:00 2020\nSubject: One\n", "line 1: .*mail"),
    "one.eml": (b"Received: from x.org\nSubject: One\n", "line 1: .*mail"),
    "empty.txt.gz": (b"", "line 1: .*0 bytes"),
    "long.txt": (b"One.\n" + b"word " * 10**6 + b"\nCaf\xe9.\n", "line 3: UnicodeDecodeError"),
    "dump.xml": (b'\xef\xbb\xbf  <mediawiki xmlns="x">\n', "line 1: .*--json")}




@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path, program):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    said = program(name, "--out", "out", "--shards", 4, "--vocab-size", 320)
    place = f"{name}, " if message.startswith("line") else ".*"
    assert re.match(f"data.py: {place}{message}", said), f"said is {said}"
    assert os.listdir() == [name], "something is left"


@pytest.mark.parametrize("flags, message", [
    ("a.txt --shards 0", "argument --shards: must be in"),
    ("a.txt --shards x", "argument --shards: invalid number"),
    ("a.txt --vocab-size 15", "argument --vocab-size: must be in"),
    ("a.txt --vocab-size 65536", "argument --vocab-size: must be in"),
    ("a.txt --out=", "argument --out: the path is empty"),
    ("a.txt --tokenizer a.txt", "a.txt is not a tokenizer.model"),
    ("a.txt --tokenizer /nowhere", ".*No such file or directory: '/nowhere'"),
    ("a.txt --shards 300", "133 documents are too few, .* for 300 shards"),
    ("a.txt --vocab-size 20", "no tokenizer of 20 pieces.*raise --vocab"),
    ("b.txt", "b.txt is no file or folder"),
    ("a.txt /dev/null", "/dev/null is no file .*pipe")])
def test_flags_that_cannot_be_used(flags, message, documents, tmp_path, program):
    (tmp_path / "a.txt").write_bytes(lines(documents[:133]))
    said = program("--out", "out", *flags.split())
    assert re.match(f"data.py: {message}", said), f"said is {said}"
    assert os.listdir() == ["a.txt"], "something is left"


def refuse_one(read, path):
    if str(path).endswith("locked"):
        raise PermissionError(13, "Permission denied", str(path))
    return read(path)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, program, monkeypatch):
    (tmp_path / "text" / "locked").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("One.\n")
    for name in "listdir", "scandir":                        # root may read everything
        monkeypatch.setattr(os, name, functools.partial(refuse_one, getattr(os, name)))
    assert "text/locked" in program("text", "--out", "out"), "a folder is left out in silence"


class Growing(list):
    """A corpus to which a document is added, or in which one is changed, before its last pass."""

    def __init__(self, documents, last):
        super().__init__(documents)
        self.last = last
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        if self.passes == 3:
            self[-1:] = self.last
        return super().__iter__()


@pytest.mark.parametrize("last", [["Another text."], [], ["One text.", "Another text."]])
def test_a_text_that_changes_while_it_is_read_is_refused(documents, tmp_path, last):
    with pytest.raises(data.DataError, match="has changed while it was read"):
        data.prepare(Growing(documents, last), tmp_path / "out", 320, 1)
    assert not (tmp_path / "out").exists(), "shards of a text that changed stay"


def test_files_that_a_desktop_adds_are_no_part_of_the_shards(documents, shards, tmp_path):
    class Touched(list):
        def __iter__(self):
            (tmp_path / "out" / "@eaDir").mkdir(exist_ok=True)
            (tmp_path / "out" / ".DS_Store").write_text("x")
            return super().__iter__()

    data.prepare(Touched(documents), tmp_path / "out", tokenizer=shards / "tokenizer.model")
    (tmp_path / "out" / ".DS_Store").write_text("y")
    data.verify(tmp_path / "out")


ODD = {
    "One.\rTwo.\r\rThree.\r\n": ["One.\nTwo.", "Three."],
    "[1] A t\0ext.\n": ["[1] A text."],
    '{"text": "One \\ud800 two."}\n': ["One ? two."],
    "<tf> Hi.\n\n\n<tf> You.": ["<tf> Hi.", "<tf> You."],
    "Vie\u0302\u0323t ﬁ ½ Ｗ": ["Việt fi 1⁄2 W"]}             # SentencePiece leaves the first


@pytest.mark.parametrize("text", ODD)
def test_odd_text(text, tmp_path, shards):
    (tmp_path / "a").write_text(text)
    [block] = data.blocks(data.TextFiles([tmp_path / "a"]))
    assert [document.strip() for document in block] == ODD[text]


def test_an_endless_line_and_one_without_spaces_are_cut(tmp_path):
    words = "The quick brown fox. " * 50_000                    # 1 MB
    (tmp_path / "a").write_text(f"One two.\n\n{words}\n\nThree four.\n" + "é" * 200_000)
    [block] = data.blocks(data.TextFiles([tmp_path / "a"]))
    assert max(map(len, block)) <= data.LONGEST and block[0] == "One two.\n"
    text = "".join(block).replace("\n", "")
    assert text == f"One two.{words.strip()}Three four." + "é" * 200_000, "text is lost or moved"
    assert all(part[0] == " " for part in block[2:16]), "words are cut"


@pytest.mark.parametrize("suffix, compress", [
    (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_any_flipped_byte_in_an_archive_is_one_line(documents, tmp_path, suffix, compress):
    good = compress(lines(documents))
    for at in range(20, len(good), len(good) // 8):
        content = bytearray(good)
        content[at] ^= 0x55
        (tmp_path / f"a{suffix}").write_bytes(content)
        with contextlib.suppress(data.DataError):             # nothing else may come out
            assert [text.strip() for text in data.TextFiles([tmp_path])] == documents


WARNED = {                                                      # what is said: of which text
    "put a blank line between them": lambda documents: "\n".join(8 * documents),
    "if blank lines part sentences": lambda documents: "\n\n".join(text[:30] for text in documents),
    " is [UNK], letters that the tokenizer does not know: make ":
        lambda documents: "\n\n".join(f"{text} ქ ქ ქ ქ" for text in documents)}


@pytest.mark.parametrize("warning", WARNED)
def test_odd_documents_are_said(warning, documents, tmp_path, program, shards):
    (tmp_path / "a.txt").write_text(WARNED[warning](documents))
    said = program("a.txt", "--out", "out", "--shards", 1, "--tokenizer",
                   shards / "tokenizer.model")
    for other in WARNED:
        assert (other in said) == (other == warning), f"{other!r} is, or is not, in {said}"


def test_a_report_says_how_much_text_is_long_enough(documents, tmp_path, program, shards):
    """Half of the tokens are in documents of 200 tokens, half in those of 20."""
    encode = data.load_tokenizer(shards / "tokenizer.model").encode
    words = sorted({word for text in documents for word in text.split()}, key=len)
    texts = []
    for size, count in (200, 40), (20, 400):
        for number in range(count):
            text = ""
            while len(encode(text)) < size:
                text += words[(number * 7 + len(text)) % len(words)] + " "
            texts.append(text)
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    said = program("a.txt", "--out", "out", "--shards", 1, "--tokenizer",
                   shards / "tokenizer.model")
    full, none = re.search(r"\n(\d+)% of the text is .* 128 .* (\d+)% in", said).groups()
    assert 40 < int(full) < 60 and none == "0", said
    begins = re.findall(r"\n    (.+)", said)
    assert len(begins) == 3 and all(begin.strip() in "\n".join(texts).lower() for begin in begins)


def test_of_one_endless_document_most_is_trained_on(documents, tmp_path, shards):
    (tmp_path / "a.txt").write_text("\n".join(8 * documents))
    data.prepare(data.TextFiles([tmp_path / "a.txt"]), tmp_path / "out", shards=1,
                 tokenizer=shards / "tokenizer.model")
    held_out, trained = (texts_of(tmp_path / "out", name) for name in data.shard_names(1))
    assert len(held_out) < len(trained) / 3
    assert sorted(map(len, trained))[1] > 1000, "cuts leave scraps"       # the first is the end


def test_the_default_corpus_is_english_prose(monkeypatch):
    monkeypatch.setattr(data, "torch", json)                 # which takes less time to read
    documents = data.machine_documentation()
    sentences = "\n".join(documents).split("\n")
    assert len(documents) > 2000
    assert len(set(sentences)) == len(sentences), "a sentence occurs twice"
    code = [sentence for sentence in sentences if re.search(r">>>|::|\|", sentence)]
    assert not code, f"code is no prose: {code[:3]}"
    assert sum(" the " in s.lower() for s in sentences) > 0.4 * len(sentences)


# ----- The tokenizer -----

GEORGIAN = "თბილისი საქართველოს დედაქალაქია და უდიდესი ქალაქია " * 20


def trained(sample):
    """Returns the model of a text of which 2 %, at one place, are of another language."""
    data.SAMPLE, corpus = sample, make_documents(3000)
    corpus[2000:2000] = 25 * [GEORGIAN]
    return data.train_tokenizer(corpus, len(corpus), 500).serialized_model_proto()


def test_the_tokenizer_knows_a_language_that_stands_together(tmp_path, monkeypatch):
    """Of a sample of an eighth of the text; which is the same in another process."""
    monkeypatch.setattr(data, "SAMPLE", data.SAMPLE)                     # is put back afterwards
    with CONTEXT.Pool(1) as pool:
        model, other = trained(243), pool.apply(trained, [243])
    assert model == other, "another process has made another model"
    (tmp_path / "model").write_bytes(model)
    tokens = data.load_tokenizer(tmp_path / "model").encode(GEORGIAN)
    assert tokens.count(data.UNK) < 0.2 * len(tokens)                    # its rarest letters


def test_the_tokenizer_has_all_marks_and_fewer_pieces_for_a_small_text():
    tokenizer = data.train_tokenizer(make_documents(60), 60, 8192)
    assert 300 < len(tokenizer) < 8192
    assert tokenizer.id_to_piece(list(range(5))) == data.SPECIALS
    tokens = tokenizer.encode('? ! % & = @ # " (,) [;] {:} ~ a [MASK] and [CLS][SEP] [PAD]')
    assert min(tokens) >= 5, "a mark is [UNK], or a text spells a special symbol"


@pytest.mark.parametrize("options", [
    {"pad_id": -1},
    {"model_type": "bpe"},
    {"model_type": "word"},
    {"byte_fallback": True},
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "nfkc"},
    {"user_defined_symbols": ["time"]}], ids=str)
def test_a_tokenizer_that_a_model_folder_cannot_describe_is_refused(
        tmp_path, options):
    ours = {"normalization_rule_name": "nmt_nfkc_cf", "pad_id": 0, "pad_piece": "[PAD]",
            "unk_id": 1, "unk_piece": "[UNK]", "bos_id": -1, "eos_id": -1,
            "control_symbols": data.SPECIALS[2:]}
    for path, changes in ("good", {}), ("bad", options):
        with open(tmp_path / path, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(make_documents(20)), vocab_size=400, hard_vocab_limit=False,
                model_writer=file, minloglevel=2, **ours | changes)
    data.load_tokenizer(tmp_path / "good")
    with pytest.raises(data.DataError, match="bad is not a tokenizer.model that data.py"):
        data.load_tokenizer(tmp_path / "bad")


# ----- Shards on disk -----

def texts_of(folder, name):
    """Returns the documents of a shard, a list of tuples of tokens."""
    tokens, documents = data.open_shard(folder / name)
    return [tuple(tokens[a:b].tolist()) for a, b in itertools.pairwise(documents)]


def test_shards_hold_every_document_once(documents, shards):
    manifest = data.load_manifest(shards)
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    held_out, *rest = (texts_of(shards, name) for name in data.shard_names(4))
    trained = list(itertools.chain(*rest))
    everything = sorted(held_out + trained)
    assert everything == sorted(map(tuple, tokenizer.encode(documents))), "texts are lost or new"
    assert 60 < len(held_out) == manifest["held_out"] <= 80             # of 400 a fifth
    assert (manifest["tokens"], manifest["documents"]) == (sum(map(len, everything)), 400)
    counts = np.bincount(list(itertools.chain(*trained)), minlength=320)
    assert np.array_equal(np.fromfile(shards / "unigrams"), counts), "unigrams are miscounted"
    losses = -np.log((counts + 1) / (counts + 1).sum())
    assert np.allclose(data.unigram_losses(shards).numpy(), losses)


def test_a_text_is_held_out_once_and_never_trained_on(tmp_path, shards):
    """1,220 copies of a notice, and 5,000 replies of which 200 differ."""
    corpus = 25 * make_documents(200) + 1220 * make_documents(1, seed=1)
    manifest = data.prepare(corpus, tmp_path / "out", shards=1,
                            tokenizer=shards / "tokenizer.model")
    held_out, trained = (texts_of(tmp_path / "out", name) for name in data.shard_names(1))
    assert 2 <= len(held_out) == len(set(held_out)) == manifest["held_out"] < 20
    assert not set(held_out) & set(trained), "a text is held out and trained on"
    assert len({*held_out, *trained}) == 201


@pytest.mark.parametrize("seed", range(6))
def test_a_fifth_at_most_is_held_out(shards, tmp_path, seed):
    manifest = data.prepare(make_documents(40, seed=seed), tmp_path / "out", shards=1,
                            tokenizer=shards / "tokenizer.model")
    assert 2 <= manifest["held_out"] <= 8


class Letters:
    """A tokenizer of 65,536 tokens: letters in the upper end, nothing for a full stop."""

    def get_piece_size(self):
        return 65_536

    def encode(self, documents, num_threads):
        return [[65_436 + ord(c) % 100 for c in text if c != "."] for text in documents]


def test_large_vocabularies_fit_short_documents_are_left_out_and_memory_does_not_grow(tmp_path):
    peaks = []
    for count in 700, 2800:
        corpus = [f"{number} " + "is a number " * 15 for number in range(count)] + ["a", "."] * 50
        folder = tmp_path / str(count)
        folder.mkdir()
        tracemalloc.start()
        checksum = sum(map(data.checksum_of, data.blocks(corpus)))
        counts = data.write_shards(corpus, folder, Letters(), 3, len(corpus), checksum)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert counts["documents"] == count, "documents of one token, or none, are kept"
        assert np.fromfile(folder / "train-00001.tokens", np.uint16).min() >= 65_436
    assert peaks[1] < 1.1 * peaks[0], f"four times the text takes {peaks} bytes"


def test_a_folder_of_something_else_is_refused_and_kept(documents, shards, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()                      # an empty one is filled, by a link, too
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    tokenizer = shards / "tokenizer.model"
    manifest = data.prepare(documents, tmp_path / "link", tokenizer=tokenizer, shards=4)
    assert manifest == data.load_manifest(shards) and (tmp_path / "link").is_symlink()
    with pytest.raises(data.DataError, match="disk is not empty: wait if .* remove it"):
        data.prepare(documents, tmp_path / "link", tokenizer=tokenizer)
    monkeypatch.setattr(data.Path, "glob", lambda *_: [])        # as if all of it came after a look
    with pytest.raises(data.DataError, match="another program has begun to write"):
        data.prepare(None, tmp_path / "disk")                    # before it reads any text
    monkeypatch.undo()
    assert data.verify(tmp_path / "disk") == manifest, "what was refused has changed"


def test_what_is_stopped_leaves_nothing(documents, tmp_path, monkeypatch, program):
    def stop(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "sha256_of", stop)
    (tmp_path / "a.txt").write_bytes(lines(documents))
    assert "stopped; nothing is left of it" in program("a.txt", "--out", "out", "--shards", 1)
    assert os.listdir() == ["a.txt"]


def test_a_damaged_shard_is_named_to_the_ranks_that_read_it(shards, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(shards, folder)
    path = folder / "train-00002.tokens"
    path.write_bytes(path.read_bytes()[::-1])
    for rank, size in (0, 1), (0, 2), (2, 4), (0, 3), (6, 8):
        host = os.uname().nodename
        where = f"{path} is missing or damaged on {host}, where rank {rank} of {size} "
        with pytest.raises(data.DataError, match=where):
            data.verify(folder, rank, size)
    path.unlink()
    with pytest.raises(data.DataError, match=f"{path.name} is missing"):
        data.verify(folder, 0, 2)
    for rank, size in (1, 2), (3, 4), (4, 8):               # these ranks need no shard 2
        data.verify(folder, rank, size)
        data.PretrainingData(folder, 32).batch(range(rank, 50, size))


def test_a_pipe_in_place_of_a_file_is_refused(shards, tmp_path):
    path = shutil.copytree(shards, tmp_path / "copy") / "unigrams"
    path.unlink()
    os.mkfifo(path)                                          # to read it would take for ever
    with pytest.raises(data.DataError, match="unigrams is missing"):
        data.verify(tmp_path / "copy")
    manifest = data.load_manifest(shards) | {"files": {}}          # one that checks nothing
    manifest["sha256"] = data.manifest_digest(manifest)
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(data.DataError, match="tokenizer.model is missing or damaged"):
        data.verify(tmp_path / "copy")


def test_shards_made_anew_in_one_process_are_read_anew(documents, shards, tmp_path):
    for count in 200, 300:
        data.prepare(documents[:count], tmp_path / "out", shards=1,
                     tokenizer=shards / "tokenizer.model")
        held_out, trained = (texts_of(tmp_path / "out", name) for name in data.shard_names(1))
        assert len(held_out) + len(trained) == count, "shards of before are read"
        shutil.rmtree(tmp_path / "out")


def test_a_manifest_is_as_it_was_written_or_refused(shards, tmp_path, monkeypatch):
    path, content = tmp_path / "manifest.json", (shards / "manifest.json").read_bytes()
    manifest, rng, refused = json.loads(content), random.Random(0), 0
    changed = [b"", b"{", b"[]"]
    changed += [json.dumps(manifest | {key: None}).encode() for key in manifest]
    for _ in range(200):
        changed.append(bytearray(content))
        changed[-1][rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    for content in changed:
        path.write_bytes(content)
        try:
            assert data.load_manifest(tmp_path) == manifest, content    # white space has changed
        except data.DataError as error:
            refused += str(error).endswith("else remove it)")
    assert refused > 0.8 * len(changed)
    monkeypatch.setattr(data, "FORMAT", 0)
    with pytest.raises(data.DataError, match="of an older program"):
        data.load_manifest(shards)
