"""data.py: examples and batches; languages, files, bad input, shards on disk. Of masks, pairs and
dealing is here what course/test_graders.py does not check."""
import bz2
import contextlib
import functools
import gzip
import io
import itertools
import json
import lzma
import os
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
import torch

import data
from tests.conftest import SEED, make_documents
from tests.ranks import CONTEXT

OPTIONS = [{}, {"pairs": "none", "mask_fraction": 0.3, "held_out": True}]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def arrays_of(batch):
    """{name: array or tensor} of all that is in a batch."""
    fields = vars(batch) | {f"labels of {task}": part for task, part in batch.labels.items()}
    del fields["labels"]
    return fields


def columns(dataset, indices):
    """The Spans of examples, each field an array."""
    return data.Spans(*np.array(dataset.spans(indices)).T)


# Examples

def test_a_batch_has_the_texts_of_its_spans(shards):
    """[CLS] A [SEP] B [SEP], the shortest example first."""
    dataset = data.PretrainingData(shards, 32, 1, seed=3)
    batch = dataset.batch(range(500))
    tokens = batch.tokens.copy()
    chosen = batch.labels["mlm"] != data.IGNORED
    tokens[batch.masked_rows[chosen]] = batch.labels["mlm"][chosen]        # before they were masked
    for b, spans in enumerate(sorted(dataset.spans(range(500)), key=dataset.length)):
        text = dataset.shard(spans.shard).tokens
        a, b_text = text[spans.a:spans.a_end], text[spans.b:spans.b_end]
        found = tokens[batch.bounds[b]:batch.bounds[b + 1]].tolist()
        assert found == [data.CLS, *a, data.SEP, *b_text, data.SEP]


def test_no_pairs(shards):
    dataset = data.PretrainingData(shards, 48, pairs="none")
    batch, spans = dataset.batch(range(500)), columns(dataset, range(500))
    assert [*batch.labels] == ["mlm"] and not batch.segments.any()
    assert (spans.b == spans.b_end).all() and batch.lengths[:-1].max() == 48
    assert (batch.tokens == data.SEP).sum() == (batch.tokens == data.CLS).sum() == 500


def test_texts_are_cut_before_any_of_their_sentences(shards):
    dataset, cuts = data.PretrainingData(shards, 128), []
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    for spans in dataset.spans(range(2000)):
        if spans.pair_label == 0:
            tokens = dataset.shard(spans.shard).tokens[spans.a:spans.b_end]
            pieces = tokenizer.id_to_piece(tokens.tolist())
            # A sentence of the fixture ends with a full stop, and the next one is a word.
            begins = [k for k in range(1, len(pieces)) if pieces[k - 1].endswith(".")]
            begins = [k for k in begins if pieces[k].startswith("▁")]
            assert not begins or spans.a_end - spans.a in begins
            if len(begins) > 1:
                cuts.append(begins.index(spans.a_end - spans.a) / (len(begins) - 1))
    assert len(cuts) > 500 and 0.4 < np.mean(cuts) < 0.6 and {0, 1} < set(cuts)


def test_masks_are_spread_over_a_text_and_can_be_none(shards):
    dataset = data.PretrainingData(shards, 64, mask_fraction=0.2)
    batch = dataset.batch(range(4000))
    chosen = batch.labels["mlm"] != data.IGNORED
    where = np.bincount(batch.positions[batch.masked_rows[chosen]], minlength=64)
    have = np.bincount(batch.positions[:batch.bounds[-2]], minlength=64)
    rates = where[1:60] / have[1:60]
    assert where[0] == 0 and 0.15 < rates.min() and rates.max() < 0.25
    batch = data.PretrainingData(shards, 64, mask_fraction=1e-9).batch(range(3))
    assert batch.labels["mlm"].shape == batch.masked_rows.shape == (0,)


@pytest.mark.parametrize("pairs", ["nsp", "none"])
def test_ten_percent_are_short(shards, pairs):
    dataset = data.PretrainingData(shards, 16, pairs=pairs)
    lengths = np.array([*map(dataset.length, dataset.spans(range(8000)))])
    assert 0.80 < (lengths == 16).mean() < 0.93       # others end with their document
    assert lengths.min() == 2 + dataset.specials


@pytest.mark.parametrize("options", OPTIONS)
def test_an_example_is_the_same_alone_and_in_any_batch(shards, options):
    """Also after any other and in any order."""
    make = functools.partial(data.PretrainingData, shards, 45, 1, seed=5, **options)
    dataset = make()
    rng = np.random.default_rng(0)
    indices = (rng.permutation(400) * rng.integers(1, 10 ** 9)).tolist()        # also far ones
    alone = {i: dataset.batch([i]) for i in indices}
    lengths = {i: int(batch.lengths[0]) for i, batch in alone.items()}
    for part in np.array_split(np.sort(indices), 37):
        batch, at = make().batch(part), 0
        part = sorted(part.tolist(), key=lengths.get)
        ends = np.cumsum([lengths[i] for i in part])
        assert batch.bounds.tolist() == [0, *ends, len(batch.tokens)]
        assert same(batch.lengths, np.diff(batch.bounds))
        for b, i in enumerate(part):
            one, rows = alone[i], slice(*batch.bounds[b:b + 2])
            for field in "tokens", "segments":
                assert same(getattr(batch, field)[rows], getattr(one, field)[:lengths[i]])
            assert batch.positions[rows].tolist() == [*range(lengths[i])]
            b_start = 1 + batch.tokens[rows].tolist().index(data.SEP)
            assert same(batch.segments[rows], batch.positions[rows] >= b_start)
            count = (one.labels["mlm"] != data.IGNORED).sum()
            span = slice(at, at := at + count)
            masked = batch.masked_rows[span] - batch.bounds[b]
            assert same(masked, one.masked_rows[:count])
            assert same(batch.labels["mlm"][span], one.labels["mlm"][:count])
            if "nsp" in batch.labels:
                assert batch.labels["nsp"][b] == one.labels["nsp"][0]
        assert len(batch.tokens) % 64 == 0 and 0 <= batch.lengths[-1] < 64
        assert len(batch.labels["mlm"]) % 16 == 0 and 0 <= len(batch.labels["mlm"]) - at < 16
        assert (batch.labels["mlm"][at:] == data.IGNORED).all() and not batch.masked_rows[at:].any()
        padding = batch.tokens[ends[-1]:], batch.segments[ends[-1]:], batch.positions[ends[-1]:]
        assert not np.concatenate(padding).any()
        kinds = {name: str(array.dtype) for name, array in arrays_of(batch).items()}
        assert kinds.pop("bounds") == "int32" and set(kinds.values()) == {"int64"}


def test_seed_and_phase_change_everything(shards):
    def examples(phase, seed):
        dataset = data.PretrainingData(shards, 32, phase, seed)
        batches = [dataset.batch([i]) for i in range(200)]
        return [array.tobytes() for batch in batches for array in (batch.tokens, batch.masked_rows)]

    first = examples(0, 1)
    assert first == examples(0, 1)
    for other in examples(0, 2), examples(1, 1), examples(1, 0):
        assert sum(a == b for a, b in zip(first, other)) < 6


def test_no_random_number_is_used_twice(shards, monkeypatch):
    drawn, uniform = [], data.uniform
    monkeypatch.setattr(data, "uniform", lambda counters, key: (
        drawn.append((key, counters)) or uniform(counters, key)))
    data.PretrainingData(shards, 32).batch(range(100))
    assert len({key for key, _ in drawn}) == len(drawn) == 5
    assert all(len(np.unique(counters)) == np.size(counters) for _, counters in drawn)


def test_uniform_numbers():
    numbers = data.uniform(np.arange(200_000), np.uint64(SEED + 1))
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs((numbers < 0.3).mean() - 0.3) < 0.004                     # four standard deviations
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.01


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
            spans = dataset.spans(range(first + k * epoch, first + (k + 1) * epoch))
            assert {span.a_end - span.a for span in spans} == {126}
            for span in spans:
                seen[span.a:span.a_end] += 1
            assert (seen == 0).mean() < unread, (
                f"{(seen == 0).mean():.1%} of the tokens are unread after {k + 1} epochs")
        assert 3.9 < seen.mean() <= 4 and np.quantile(seen, 0.99) <= 7


# Dealing, making ahead


def test_the_thread_of_a_loader_ends_with_it():
    before = set(threading.enumerate())
    fails = data.loader(SimpleNamespace(batch=lambda indices: 1 / 0), 0, 1, 1, 0, 1)
    with pytest.raises(ZeroDivisionError):
        next(fails)
    abandoned = data.loader(SimpleNamespace(batch=list), 0, 4, 4, 0, 1)
    next(abandoned)
    abandoned.close()
    assert set(threading.enumerate()) <= before


def test_a_batch_becomes_tensors_as_it_is(shards):
    batch = data.PretrainingData(shards, 32).batch(range(5))
    moved = batch.to("cpu")
    for (name, array), (other, tensor) in zip(arrays_of(batch).items(), arrays_of(moved).items(),
                                              strict=True):
        assert name == other and torch.equal(torch.from_numpy(array), tensor)
    devices = {name: field.device.type for name, field in arrays_of(batch.to("meta")).items()}
    assert devices.pop("lengths") == "cpu" and set(devices.values()) == {"meta"}


# Languages

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
    "Burmese": "ဤသည်စာအုပ်ဖြစ်သည်။ |သူအိမ်သို့သွားသည်။ |ငါတို့ဒီမှာရှိသည်။",
    "Amharic": "ይህ መጽሐፍ ነው።| እሱ ወደ ቤት ሄደ።| እኛ እዚህ ነን።",
    "Tibetan": "འདི་དཔེ་ཆ་རེད། |ཁོང་ནང་ལ་ཕྱིན། |ང་ཚོ་འདིར་ཡོད།",
    "Korean": "그는 집에 갔다!| 이것은 책이다.| 당신은 읽었습니까?",
    "Excited": "Is it true!?| It really is...| No way?!"}


@pytest.fixture(scope="module")
def babel(tmp_path_factory):
    """A data set of shards of these texts and of each of their sentences."""
    corpus = []
    for text in LANGUAGES.values():
        sentences = text.split("|")
        corpus += ["".join(sentences), *sentences] + ["".join(p) for p in
                                                     itertools.permutations(sentences, 2)]
    folder = tmp_path_factory.mktemp("babel") / "shards"
    data.prepare(3 * corpus, folder, vocab_size=900, shards=1)
    return data.PretrainingData(folder, 512)


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences(language, babel):
    text = LANGUAGES[language]
    tokenizer = data.load_tokenizer(babel.folder / "tokenizer.model")
    [block] = data.blocks([text.replace("|", "")])
    tokens = np.array(tokenizer.encode(block[0]))
    assert data.UNK not in tokens
    shard = data.Shard(tokens, np.array([0, len(tokens)]))
    found = {babel.text(shard, 0, 512, draw).middle for draw in np.arange(0, 1, 0.01)}
    parts = [tokenizer.decode(tokens[a:b].tolist()).replace(" ", "") for a, b in
             itertools.pairwise([0, *sorted(found), len(tokens)])]
    wanted = [tokenizer.normalize(unicodedata.normalize("NFKC", s)) for s in text.split("|")]
    assert parts == [sentence.replace("▁", "") for sentence in wanted]


def test_text_of_all_forms_has_the_same_tokens(babel):
    """Decomposed letters, soft hyphens, marks of direction; Persian keeps its zero-width space."""
    tokenizer = data.load_tokenizer(babel.folder / "tokenizer.model")

    def tokens(text):
        return [tokenizer.encode(document) for block in data.blocks([text]) for document in block]

    for text in LANGUAGES.values():
        wanted = tokens(text)
        assert tokens(unicodedata.normalize("NFD", text)) == wanted
        for mark in "\u00ad\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff":
            assert tokens(mark.join(text)) == wanted, f"U+{ord(mark):04X} changes tokens"
    assert tokens("می\u200cرود") == tokens("می رود") != tokens("میرود")


# From a dump of Wikipedia

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
    with pytest.raises(data.DataError, match="wikiextractor --json"):
        list(data.TextFiles([tmp_path / "dump.xml.bz2"]))
    subprocess.run([sys.executable, "-m", "wikiextractor.WikiExtractor", "dump.xml.bz2", "--json",
                    "--html-safe", "", "-o", "wiki"], cwd=tmp_path, check=True, capture_output=True)
    found = list(data.TextFiles([tmp_path / "wiki"]))
    assert len(found) >= 60
    text = "\n".join(found)
    assert "Page 7 is a page of the" in text and "[[" not in text and "in 1907 & now" in text


def test_datasets_make_json_that_is_read(tmp_path, documents):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    columns = {"id": [str(i) for i in range(len(documents))], "text": documents}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    read = datasets.load_dataset("parquet", data_files=str(tmp_path / "train.parquet"),
                                 split="train", cache_dir=str(tmp_path / "cache"))
    read.to_json(tmp_path / "wiki.jsonl")
    assert list(data.TextFiles([tmp_path / "wiki.jsonl"])) == documents


def test_the_default_corpus_is_english_prose(monkeypatch):
    monkeypatch.setattr(data, "torch", json)                 # which takes less time to read
    documents = data.machine_documentation()
    sentences = [sentence for document in documents for sentence in document.split("\n")]
    assert len(documents) > 2000 and len(set(sentences)) == len(sentences)
    assert not any(">>>" in s or "::" in s or "|" in s for s in sentences)
    assert sum(" the " in s.lower() for s in sentences) > 0.4 * len(sentences)


# Files

FORMS = {
    "a.txt": lambda text, records: text.encode(),
    "windows.txt": lambda text, records: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    "spaces.txt": lambda text, records: (" \n\t\n" + text.replace("\n", " \n")).encode(),
    "a.jsonl": lambda text, records: b"\n" + records.encode(),
    "a.jsonl.gz": lambda text, records: gzip.compress(records.encode()),
    "a.txt.bz2": lambda text, records: bz2.compress(text.encode()),
    "a.txt.xz": lambda text, records: lzma.compress(text.encode())}


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_a_text_are_the_same_corpus(name, documents, tmp_path):
    records = "".join(json.dumps({"id": 1, "text": d, "title": "x"}) + "\n" for d in documents)
    records += '{"text": null}\n\n{"text": ""}\n'
    (tmp_path / name).write_bytes(FORMS[name]("\n\n".join(documents), records))
    assert [text.strip() for text in data.TextFiles([tmp_path / name])] == documents


def main(monkeypatch, capsys, *arguments):
    """What the program, called in this process, prints and ends with."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, arguments)])
    try:
        data.main()
    except SystemExit as end:
        return capsys.readouterr().err, end.code
    return capsys.readouterr().out, None


def test_a_folder_of_files_as_a_user_prepares_it(documents, tmp_path, monkeypatch, capsys):
    for k, name in enumerate(["AA/wiki_00", "AA/wiki_01.gz", "BB/wiki_00"]):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"text": d}) + "\n" for d in documents[k::3]).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (tmp_path / "text" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "text" / ".git").mkdir()
    (tmp_path / "text" / ".git" / "config").write_bytes(b"\xff")
    (tmp_path / "text" / "loop").symlink_to(".")
    expected = documents[0::3] + documents[1::3] + documents[2::3]
    assert list(data.TextFiles([tmp_path / "text"])) == expected
    monkeypatch.chdir(tmp_path)
    said, status = main(
        monkeypatch, capsys, "text", "--out", "shards/text", "--vocab-size", 320, "--cased")
    assert status is None and said.startswith("400 documents of ")
    assert re.search(r" 320 pieces, 0...% \[UNK\]; 8 shards, \d+ different documents held out\n"
                     "'shards/text' is ready\n$", said)
    data.prepare(expected, tmp_path / "alone", 320, cased=True)
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "shards" / "text")
    encode = data.load_tokenizer(tmp_path / "alone" / "tokenizer.model").encode
    assert encode("School") != encode("school")


def test_flags(shards, documents, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:133]))
    files = sorted(tmp_path.iterdir())

    def run(*flags):
        return main(monkeypatch, capsys, tmp_path / "a.txt", "--out", tmp_path / "out", *flags)

    for flags in "--shards 0", "--shards x", "--vocab-size 15", "--vocab-size 65537", "--out=":
        said, status = run(*flags.split())
        assert status == 2 and said.startswith("data.py: argument --") and said.count("\n") == 1
    for flags, message in ((["--tokenizer", tmp_path / "a.txt"], "a.txt is not a tokenizer.model"),
                           (["--tokenizer", "/nowhere"], "No such file or directory: '/nowhere'"),
                           (["--shards", 300], "133 documents are too few, .* for 300 shards"),
                           (["--vocab-size", 20], "no tokenizer of 20 pieces.*raise --vocab")):
        _, said = run(*flags)
        assert re.match(f"data.py: .*{message}", said) and "\n" not in said
    assert sorted(tmp_path.iterdir()) == files
    _, said = main(monkeypatch, capsys, tmp_path / "b.txt", "--out", tmp_path / "out")
    assert said.startswith(f"data.py: {tmp_path}/b.txt is no file or folder")
    said, _ = run("--tokenizer", shards / "tokenizer.model", "--shards", 2)
    assert "133 documents" in said and " 320 pieces" in said and "2 shards" in said
    _, said = run("--shards", 2)
    assert said.startswith(f"data.py: {tmp_path}/out is not empty: wait if another program is")


BAD = {
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
    "wiki_00": (b'<doc id="1">\nOne.\n</doc>\n', "line 1: .*HTML, XML or tar.*--json"),
    "trec": (b"<DOC>\n", "HTML, XML or tar"),
    "page": (b"<!DOCTYPE html>\n", "HTML, XML or tar"),
    "wiki.tar.gz": (gzip.compress(b"wiki_00\0\0\0ustar\0\n"), "or tar, take the text out"),
    "dump.xml": (b'\xef\xbb\xbf  <mediawiki xmlns="x">\n', "line 1: .*--json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path, monkeypatch, capsys):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    _, said = main(monkeypatch, capsys, tmp_path / name, "--out", tmp_path / "out", "--shards", 4,
                   "--vocab-size", 320)
    assert re.match(f"data.py: .*{message}", said) and "\n" not in said
    assert "line" not in message or f"{tmp_path / name}, line" in said
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_chat_of_short_messages_on_a_terminal_without_utf_8(tmp_path, monkeypatch, capsys):
    (tmp_path / "chat.txt").write_text("\n\n".join(f"<tf> Number {k}." for k in range(300)))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii", write_through=True))
    assert main(monkeypatch, capsys, tmp_path / "chat.txt", "--out", tmp_path / "ü",
                "--vocab-size", 320)[1] is None
    assert b"documents are very short" in out.getvalue()


def test_a_pipe_is_refused_by_name_and_passed_over_in_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("One.")
    for path in tmp_path / "pipe", "/dev/null":
        with pytest.raises(data.DataError, match=f"{path} is no file or folder.*pipe"):
            data.TextFiles([tmp_path / "a.txt", path])
    assert list(data.TextFiles([tmp_path])) == ["One.\n"]


def test_any_flipped_byte_in_an_archive_is_one_line(documents, tmp_path):
    for suffix, compress in (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress):
        good = compress("\n\n".join(documents).encode())
        for at in range(20, len(good), len(good) // 8):
            content = bytearray(good)
            content[at] ^= 0x55
            (tmp_path / f"a{suffix}").write_bytes(content)
            with contextlib.suppress(data.DataError):         # nothing else may come out
                found = [text.strip() for text in data.TextFiles([tmp_path / f"a{suffix}"])]
                assert found == documents


def test_null_characters_are_dropped_and_a_bracket_is_text(tmp_path):
    (tmp_path / "a").write_text("[1] A t\0ext.\n")
    assert list(data.blocks(data.TextFiles([tmp_path / "a"]))) == [["[1] A text.\n"]]


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path):
    (tmp_path / "a").write_text('{"text": "One \\ud800 two."}\n')
    assert list(data.TextFiles([tmp_path / "a"])) == ["One ? two."]


def test_an_endless_line_and_one_without_spaces_are_cut(tmp_path):
    words = "The quick brown fox. " * 50_000                    # 1 MB
    (tmp_path / "a").write_text(f"One two.\n\n{words}\n\nThree four.\n" + "é" * 200_000)
    [block] = data.blocks(data.TextFiles([tmp_path / "a"]))
    assert max(map(len, block)) <= data.LONGEST and block[0] == "One two.\n"
    text = "".join(block).replace("\n", "")
    assert text == f"One two.{words.strip()}Three four." + "é" * 200_000
    assert all(part[0] == " " for part in block[2:16])


@pytest.fixture
def prepare_text(tmp_path, monkeypatch, capsys, shards):
    """Runs data.py on a text, into a folder; returns what `main` does."""
    def run(text, folder):
        (tmp_path / "a.txt").write_text(text)
        return main(monkeypatch, capsys, tmp_path / "a.txt", "--out", folder, "--shards", 1,
                    "--tokenizer", shards / "tokenizer.model")

    return run


def test_lines_without_a_blank_one_between_them_are_said(tmp_path, prepare_text):
    """60,000 documents, one a line: what to do is said, and most of the text is trained on."""
    lines = "".join(f"This is number {number} of many.\n" for number in range(60_000))
    for text, warned in (lines, True), (lines[:200_000].replace("\n", "\n\n"), False):
        said, _ = prepare_text(text, tmp_path / str(warned))
        assert ("put a blank line between them" in said) == warned
    counts = [data.PretrainingData(tmp_path / "True", 32, held_out=held_out).shard(0).tokens.size
              for held_out in (True, False)]
    assert counts[0] <= 0.25 * sum(counts)
    documents = data.PretrainingData(tmp_path / "True", 32).shard(0).documents
    assert np.diff(documents[:-1]).min() > 1000                  # no scraps where a text is cut


# Tokenizer

def trained(sample):
    """The model of a corpus of which 2 %, somewhere, are of another language, of so many pieces."""
    data.SAMPLE, corpus = sample, make_documents(3000)
    corpus[2000:2000] = 25 * [GEORGIAN]
    return data.train_tokenizer(corpus, len(corpus), 500).serialized_model_proto()


GEORGIAN = "თბილისი საქართველოს დედაქალაქია და უდიდესი ქალაქია " * 20


def test_the_tokenizer_knows_a_language_that_stands_together(tmp_path, monkeypatch):
    """Of a sample of an eighth of the text; which is the same in another process."""
    monkeypatch.setattr(data, "SAMPLE", data.SAMPLE)                     # is put back afterwards
    with CONTEXT.Pool(1) as pool:
        model, other = trained(243), pool.apply(trained, [243])
    assert model == other
    (tmp_path / "model").write_bytes(model)
    tokens = data.load_tokenizer(tmp_path / "model").encode(GEORGIAN)
    assert tokens.count(data.UNK) < 0.2 * len(tokens)                    # its rarest letters


def test_the_tokenizer_knows_marks_that_the_text_hardly_has(documents):
    tokenizer = data.train_tokenizer(documents, len(documents), 500)
    assert data.UNK not in tokenizer.encode('? ! % & = @ # " (,) [;] {:} ~')


def test_much_unknown_is_said(tmp_path, prepare_text):
    for words, warned in (1, True), (400, False):
        corpus = [f"Number {k}" + " and more" * words + " ქ" for k in range(300)]
        said, _ = prepare_text("\n\n".join(corpus), tmp_path / str(warned))
        assert (" is [UNK], letters that the tokenizer does not know: make " in said) == warned


def test_no_text_can_spell_a_special_symbol(shards):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    assert [tokenizer.id_to_piece(i) for i in range(5)] == data.SPECIALS
    tokens = tokenizer.encode("a [MASK] and [CLS][SEP] [PAD] here")
    assert not {data.PAD, data.CLS, data.SEP, data.MASK} & set(tokens)


def test_a_small_text_has_a_small_vocabulary(tmp_path):
    manifest = data.prepare(make_documents(60), tmp_path / "out", shards=1)
    assert 300 < manifest["vocab_size"] < 8192
    assert data.PretrainingData(tmp_path / "out", 32).batch(range(50)).tokens.max() < 8192


# Shards on disk

def test_shards_hold_every_document_once(documents, shards):
    manifest, found, texts = data.load_manifest(shards), [], []
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    for name in data.shard_names(4):
        shard = data.open_shard(shards / name)
        assert shard.tokens.dtype == np.uint16 and shard.documents[0] == 0
        found.append([shard.tokens[a:b].tolist() for a, b in itertools.pairwise(shard.documents)])
        texts.append(sum(found[-1], []))
    assert 60 < len(found[0]) == manifest["held_out"] <= 80           # of 400 a fifth
    assert sorted(sum(found, [])) == sorted(tokenizer.encode(documents))
    assert manifest["tokens"] == sum(map(len, texts)) and manifest["documents"] == 400
    unigrams = np.fromfile(shards / "unigrams")
    assert np.array_equal(unigrams, np.bincount(sum(texts[1:], []), minlength=320))
    expected = -np.log((unigrams + 1) / (unigrams + 1).sum())
    assert np.allclose(data.unigram_losses(shards).numpy(), expected)


def test_a_text_is_held_out_once_and_never_trained_on(tmp_path, prepare_text):
    """1,220 copies of a notice, and 5,000 replies of which 200 differ."""
    corpus = 25 * make_documents(200) + 1220 * make_documents(30, seed=1)[::30]
    said, _ = prepare_text("\n\n".join(corpus), tmp_path / "out")
    texts = []
    for held_out in True, False:
        shard = data.PretrainingData(tmp_path / "out", 32, held_out=held_out).shard(0)
        texts.append([bytes(shard.tokens[a:b]) for a, b in itertools.pairwise(shard.documents)])
    count = len(texts[0])
    assert 2 <= count == len(set(texts[0])) < 20 and f" {count} different documents held" in said
    assert not set(texts[0]) & set(texts[1]) and len(set(texts[1])) == 201 - count


def test_a_fifth_at_most_is_held_out(shards, tmp_path):
    for seed in range(6):
        documents = make_documents(40, seed=seed)
        manifest = data.prepare(documents, tmp_path / str(seed), shards=1,
                                tokenizer=shards / "tokenizer.model")
        assert 2 <= manifest["held_out"] <= 8


class Letters:
    """A tokenizer of 65,536 tokens: letters in the upper end, nothing for a full stop."""

    def get_piece_size(self):
        return 65_536

    def encode(self, documents, num_threads):
        return [[65_436 + ord(c) % 100 for c in text if c != "."] for text in documents]


def test_large_vocabularies_fit_and_short_documents_are_left_out(tmp_path):
    documents = [f"ab{k}\n.\ncd" for k in range(300)] + ["a", "."] * 50
    documents += [f"{text}\n" for text in documents[:300]]      # the same text, not held out twice
    counts = data.write_shards(documents, tmp_path, Letters(), 3, len(documents))
    assert counts["documents"] + counts["held_out"] == 600
    tokens = np.fromfile(tmp_path / "train-00001.tokens", np.uint16)
    assert tokens.min() > 65_436 - 1


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for count in 700, 2800:
        corpus = (f"{number} " + "is a number " * 15 for number in range(count))
        (tmp_path / str(count)).mkdir()
        tracemalloc.start()
        data.write_shards(corpus, tmp_path / str(count), Letters(), 8, count)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_a_folder_of_something_else_is_refused_and_kept(documents, shards, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(data.DataError, match="full is not empty: .* remove it"):
        data.prepare(documents, tmp_path / "full", 320, 4)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"
    (tmp_path / "disk").mkdir()                      # an empty one is filled, by a link, too
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    data.prepare(documents, tmp_path / "link", tokenizer=shards / "tokenizer.model", shards=4)
    assert (tmp_path / "link").is_symlink() and files_of(tmp_path / "disk") == files_of(shards)


def test_of_two_programs_that_write_one_folder_the_first_wins(tmp_path, monkeypatch):
    theirs = tmp_path / "tokenizer.model"
    theirs.write_text("of another")
    monkeypatch.setattr(data.Path, "glob", lambda *_: [])        # the other came after this look
    with pytest.raises(data.DataError, match=f"another program has begun to write {tmp_path};"):
        data.prepare(None, tmp_path)                             # before it reads any text
    assert theirs.read_text() == "of another"


def test_what_is_stopped_leaves_nothing(documents, tmp_path, monkeypatch, prepare_text):
    def stop(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "sha256_of", stop)
    _, said = prepare_text("\n\n".join(documents), tmp_path / "out")
    assert said == "data.py: stopped; nothing is left of it" and not (tmp_path / "out").exists()


def test_a_damaged_file_is_named_to_the_ranks_that_read_it(shards, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(shards, folder)
    data.verify(folder)
    path = folder / "train-00002.tokens"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for rank, size in ((0, 1), (0, 2), (2, 4), (0, 3), (6, 8)):
        where = f"{path} is damaged on {os.uname().nodename}, where rank {rank} of {size} "
        with pytest.raises(data.DataError, match=where):
            data.verify(folder, rank, size)
    for rank, size in ((1, 2), (3, 4), (4, 8)):        # these ranks never read shard 2
        data.verify(folder, rank, size)
    path.unlink()
    with pytest.raises(OSError, match="train-00002.tokens"):
        data.verify(folder, 0, 2)
    # A rank needs no other ranks' shards.
    (folder / "train-00000.documents").unlink()
    data.verify(folder, 1, 2)
    everything, part = data.PretrainingData(shards, 32), data.PretrainingData(folder, 32)
    assert all(same(arrays_of(part.batch([i])).values(), arrays_of(everything.batch([i])).values())
               for i in range(1, 50, 2))


def test_a_manifest_is_as_it_was_written_or_refused(shards, tmp_path, monkeypatch):
    manifest, path = data.load_manifest(shards), tmp_path / "manifest.json"
    content = (shards / "manifest.json").read_bytes()
    changed = [b"", b"{", b"[]"]
    changed += [json.dumps({**manifest, key: value}).encode() for key in manifest
                for value in (None, 10 ** 9, "1", {}, -1)]
    for bit in range(0, 8 * len(content), 37):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(flipped)
    refused = 0
    for content in changed:
        path.write_bytes(content)
        try:
            assert data.load_manifest(tmp_path) == manifest          # white space
        except data.DataError as error:
            refused += str(error).endswith("else remove it)")
    assert refused > 0.8 * len(changed)
    monkeypatch.setattr(data, "FORMAT", 0)
    with pytest.raises(data.DataError, match="of an older program"):
        data.load_manifest(shards)
