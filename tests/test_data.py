"""data.py: formats and bad input, the shards on disk, and the statistics of masks and pairs."""

import bz2
import contextlib
import gzip
import json
import lzma
import math
import shutil
import socket

import numpy as np
import pytest
import torch

import data
from tests.conftest import make_documents

PHASES = [(32, 0), (128, 1)]


def as_lines(documents):
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Reading

SENTENCES = [
    ("One. Two! Three? Four.", 4),
    ("Dr. Smith met Mr. J. R. Jones at 3.5 p.m. on Monday.", 1),
    ("Use a list, e.g. Python's own. It grows.", 2),
    ('He said "Stop." Then he left.', 2),
    ("See Fig. 3 and the others, etc. and so on.", 1),
    ("The value is 3.14 or 2.71. Both are close.", 2),
    ("Version 2.0 is out (really!). It works...", 2),
    ("so did I. Then we went.", 2),
    ("no end", 1),
    ("", 0),
]


@pytest.mark.parametrize("text,count", SENTENCES)
def test_sentences(text, count):
    sentences = data.split_sentences(text)
    assert len(sentences) == count and " ".join(sentences) == text


def test_text_json_lines_and_their_archives_give_the_same_shards(documents, tmp_path, program):
    text = as_lines(documents)
    jsonl = "".join(
        json.dumps({"id": i, "text": "\n".join(d)}) + "\n" for i, d in enumerate(documents)
    )
    inputs = {
        "a.txt": text.encode(),
        "b.jsonl": jsonl.encode(),
        "windows.txt": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    }
    inputs |= {
        "a.txt.gz": gzip.compress(inputs["a.txt"]),
        "b.jsonl.gz": gzip.compress(inputs["b.jsonl"]),
        "a.txt.bz2": bz2.compress(inputs["a.txt"]),
        "a.txt.xz": lzma.compress(inputs["a.txt"]),
    }
    folders = []
    for name, content in inputs.items():
        (tmp_path / name).write_bytes(content)
        if name in ("a.txt", "b.jsonl.gz"):  # as a user would; the others in this process
            run = program(
                "data.py",
                tmp_path / name,
                "--out",
                tmp_path / f"out-{name}",
                "--vocab-size",
                320,
                "--shards",
                4,
            )
            assert run.returncode == 0, run.stderr
            assert "400 documents" in run.stdout
        else:
            data.prepare(data.corpus_reader([tmp_path / name]), tmp_path / f"out-{name}", 320, 4)
        folders.append(files_of(tmp_path / f"out-{name}"))
    assert all(folder == folders[0] for folder in folders[1:])


def test_wrapped_prose_and_paragraphs_are_split_at_sentence_ends(documents, tmp_path):
    wrapped, paragraphs = [], []
    for document in documents:
        words = " ".join(document).split()
        wrapped.append("\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)))
        paragraphs.append(" ".join(document))
    for name, blocks in (("wrapped.txt", wrapped), ("paragraphs.txt", paragraphs)):
        (tmp_path / name).write_text("\n\n\n".join(blocks))
        assert list(data.read_documents([tmp_path / name])) == documents


def test_lines_are_kept_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.\nThree. Four.\n\nFive. Six.\n")
    assert list(data.read_documents([tmp_path / "a.txt"], "lines")) == [
        ["One. Two.", "Three. Four."],
        ["Five. Six."],
    ]


def test_the_default_corpus_is_english_prose():
    documents, summary = data.machine_documentation()
    assert len(documents) > 3000 and "MB" in summary
    sentences = [sentence for document in documents for sentence in document]
    assert len(set(sentences)) == len(sentences)
    assert not any(">>>" in s or "::" in s or "|" in s for s in sentences)
    assert sum(" the " in s.lower() for s in sentences) > 0.4 * len(sentences)


BAD = {
    "empty.txt": (b"", "0 documents"),
    "blank.txt": (b"\n\n \n", "0 documents"),
    "latin1.txt": (
        "Un café.\n".encode() + "Un café.\n".encode("latin-1"),
        "latin1.txt, line 2, byte 6: not UTF-8",
    ),
    "cut.txt.gz": (
        gzip.compress(b"word " * 9999)[:-9],
        "cut.txt.gz: the compressed file is damaged",
    ),
    "no.txt.gz": (b"plain text", "no.txt.gz: the compressed file is damaged"),
    "no.txt.xz": (b"plain text", "no.txt.xz: the compressed file is damaged"),
    "no.txt.bz2": (b"plain text", "no.txt.bz2"),
    "bad.jsonl": (b'{"text": "One."}\n{"title": "x"}\n', "bad.jsonl.*`text`"),
    "nul.txt": (b"One.\nTw\0o.\n", "nul.txt, line 2: a NUL byte"),
    "null.jsonl": (b'{"text": "One."}\n{"text": null}\n', "null.jsonl, line 2: not a JSON object"),
    "few.txt": (b"One.\n\nTwo.\n", "too few"),
    "missing.txt": (None, "missing.txt: No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.prepare(data.corpus_reader([str(tmp_path / name)]), tmp_path / "out", 320, 4)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if content is not None else [])


def test_program_ends_with_one_line_and_status_1(tmp_path, program):
    run = program("data.py", tmp_path / "missing.txt", "--out", tmp_path / "out")
    assert run.returncode == 1 and run.stdout == ""
    assert (
        run.stderr.strip().splitlines()[-1]
        == f"data.py: {tmp_path}/missing.txt: No such file or directory"
    )
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_too_large_is_refused(documents, tmp_path):
    with pytest.raises(data.DataError, match="vocabulary of 30000 pieces"):
        data.prepare(lambda: iter(documents), tmp_path / "out", 30000, 4)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_corpus_is_refused_and_kept(documents, shards, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    before = files_of(folder)
    data.prepare(lambda: iter(documents), folder, 320, 4)  # the same: nothing to do
    with pytest.raises(data.DataError, match="another corpus.*400 documents"):
        data.prepare(lambda: iter(documents[1:]), folder, 320, 4)
    with pytest.raises(data.DataError, match="other settings"):
        data.prepare(lambda: iter(documents), folder, 320, 2)
    assert files_of(folder) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(data.DataError, match="not empty"):
        data.prepare(lambda: iter(documents), tmp_path / "full", 320, 4)


def test_no_text_can_spell_a_special_symbol(shards):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    assert [tokenizer.id_to_piece(i) for i in range(5)] == data.SPECIALS
    tokens = tokenizer.encode("a [MASK] and [CLS][SEP] [PAD] here")
    assert not {data.PAD, data.CLS, data.SEP, data.MASK} & set(tokens)


# Shards


def test_shards_hold_every_document_once_and_1_percent_is_apart(documents, shards):
    manifest = data.load_manifest(shards)
    assert manifest["heldout_documents"] == 100 and manifest["train_documents"] == 300
    assert manifest["vocab_size"] == 320 and manifest["corpus"]["documents"] == 400
    tokenizer, found = data.load_tokenizer(shards / "tokenizer.model"), []
    for name in ["heldout"] + [f"train-{s:05d}" for s in range(4)]:
        tokens, sentences, offsets = (
            np.load(shards / f"{name}.{a}.npy", mmap_mode="r") for a in data.ARRAYS
        )
        assert (
            tokens.dtype == np.uint16
            and sentences[-1] == len(tokens)
            and offsets[-1] == len(sentences) - 1
        )
        found += [
            tuple(tuple(tokens[sentences[k] : sentences[k + 1]]) for k in range(*pair))
            for pair in zip(offsets, offsets[1:])
        ]
    assert sorted(found) == sorted(tuple(map(tuple, tokenizer.encode(d))) for d in documents)


def test_large_buffers_are_flushed_in_pieces(tmp_path, monkeypatch):
    documents = [[[d, s, 7] for s in range(1 + d % 5)] for d in range(5, 300)]
    for size in (10, 1 << 20):
        monkeypatch.setattr(data.ShardWriter, "BUFFER", size)
        writer = data.ShardWriter(tmp_path, f"s{size}", np.uint32)
        for document in documents:
            writer.write(document)
        writer.close()
    for array in data.ARRAYS:
        assert (tmp_path / f"s10.{array}.npy").read_bytes() == (
            tmp_path / f"s{1 << 20}.{array}.npy"
        ).read_bytes()
    assert np.load(tmp_path / "s10.tokens.npy").dtype == np.uint32


def damage(folder, name, how):
    path = folder / name
    if how == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-8] if how == "cut" else content)


@pytest.mark.parametrize(
    "how,message", [("flip", "damaged"), ("cut", "bytes, expected"), ("missing", "missing")]
)
def test_a_damaged_shard_is_named(shards, tmp_path, how, message):
    shutil.copytree(shards, tmp_path / "copy")
    data.verify(tmp_path / "copy")
    damage(tmp_path / "copy", "train-00002.tokens.npy", how)
    for rank, size in ((0, 1), (0, 2), (2, 4), (5, 3)):
        with pytest.raises(data.DataError, match=f"train-00002.tokens.npy.*{message}"):
            data.verify(tmp_path / "copy", rank, size)
    data.verify(tmp_path / "copy", 1, 2)  # these ranks never read shard 2
    data.verify(tmp_path / "copy", 3, 4)


def test_a_damaged_manifest_or_another_version_is_refused(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(data.DataError, match="format 99"):
        data.load_manifest(tmp_path / "copy")
    manifest.write_text("{")
    with pytest.raises(data.DataError, match="damaged"):
        data.load_manifest(tmp_path / "copy")
    with pytest.raises(data.DataError, match="no prepared shards"):
        data.load_manifest(tmp_path)


# Examples


def locate(shard, segment):
    """The documents (numbers) in which a run of tokens stands."""
    joined, run = (
        b"".join(t.to_bytes(2, "little") for t in map(int, shard.tokens)),
        b"".join(t.to_bytes(2, "little") for t in map(int, segment)),
    )
    found, at = set(), joined.find(run)
    while at >= 0:
        if at % 2 == 0:
            found.add(int(np.searchsorted(shard.documents, at // 2, "right")) - 1)
        at = joined.find(run, at + 1)
    return found


def unmasked(example):
    tokens = example.tokens.copy()
    tokens[example.positions] = example.labels
    return tokens[1 : example.b_start - 1], tokens[example.b_start : -1]


@pytest.mark.parametrize("seq_len,phase", PHASES)
def test_pairs_are_half_true_and_random_ones_from_elsewhere(shards, seq_len, phase):
    dataset, count = data.PretrainingData(shards, seq_len, phase, seed=3), 1500
    random_b = 0
    for i in range(count):
        example = dataset[i]
        tokens, shard = example.tokens, dataset.shard(i % 4)
        assert len(tokens) <= seq_len and tokens[0] == data.CLS
        assert tokens[-1] == tokens[example.b_start - 1] == data.SEP
        assert np.isin(tokens, [data.CLS, data.SEP, data.PAD]).sum() == 3
        a, b = unmasked(example)
        assert len(a) and len(b)
        homes = locate(shard, a)
        together = locate(shard, np.concatenate([a, b]))
        assert homes
        if example.random_b:
            random_b += 1
            if len(homes) == 1 and len(b) > 3:
                assert locate(shard, b) - homes  # stands in a document that A is not from
        else:
            assert together  # B goes on where A ends
    assert abs(random_b - count / 2) < 4 * math.sqrt(count / 4)


@pytest.mark.parametrize("seq_len,phase", PHASES)
def test_masks_are_15_percent_and_80_10_10(shards, seq_len, phase):
    dataset = data.PretrainingData(shards, seq_len, phase)
    chosen = masked = kept = words = 0
    where = np.zeros(seq_len)
    for i in range(3000):
        e = dataset[i]
        m = len(e.positions)
        assert abs(m - 0.15 * (len(e.tokens) - 3)) < 1 and len(set(e.positions)) == m
        assert not np.isin(e.labels, [data.PAD, data.CLS, data.SEP, data.MASK]).any()
        assert e.tokens.max() < 320
        chosen, words = chosen + m, words + len(e.tokens) - 3
        masked += (e.tokens[e.positions] == data.MASK).sum()
        kept += (e.tokens[e.positions] == e.labels).sum()
        where[e.positions] += 1
    sigma = lambda p: 4 * math.sqrt(p * (1 - p) * chosen)  # noqa: E731
    assert abs(chosen - 0.15 * words) < 4 * math.sqrt(0.15 * 0.85 * words)
    assert abs(masked - 0.8 * chosen) < sigma(0.8)
    assert abs(kept - (0.1 + 0.1 / 315) * chosen) < sigma(
        0.1
    )  # a random token may be the right one
    assert where[1] > 0 and where[0] == 0  # the first word, never [CLS]


def test_ten_percent_are_short(shards):
    long = data.PretrainingData(shards, 16)
    lengths = [len(long[i].tokens) for i in range(4000)]
    full = sum(length == 16 for length in lengths) / 4000
    assert 0.80 < full < 0.93  # 10 % are short, others end with their document


def test_an_example_is_a_function_of_seed_phase_and_number(shards):
    def text(example):
        return [
            list(map(int, part)) for part in (example.tokens, example.positions, example.labels)
        ]

    dataset = data.PretrainingData(shards, 32, 0, seed=1)
    there = [text(dataset[i]) for i in range(200)]
    back = {i: text(dataset[i]) for i in reversed(range(200))}
    assert all(back[i] == there[i] for i in range(200))
    other = data.PretrainingData(shards, 32, 0, seed=2)
    next_phase = data.PretrainingData(shards, 32, 1, seed=1)
    assert sum(text(other[i]) == there[i] for i in range(200)) < 3
    assert sum(text(next_phase[i]) == there[i] for i in range(200)) < 3


def test_an_epoch_goes_through_every_window_of_its_shard_and_then_differently(shards):
    dataset = data.PretrainingData(shards, 32)
    for s in range(4):
        count = int(dataset.shard(s).windows[-1])
        first = [dataset.window(s + 4 * k)[1] for k in range(count)]
        second = [dataset.window(s + 4 * k)[1] for k in range(count, 2 * count)]
        assert sorted(first) == sorted(second) == list(range(count)) and first != second
        for i in (s, s + 4 * 17):
            assert dataset.window(i)[0] is dataset.shard(i % 4)


def test_windows_reach_nearly_every_token(shards):
    dataset = data.PretrainingData(shards, 32)
    shard = dataset.shard(0)
    seen = np.zeros(len(shard.tokens), bool)
    for document in range(len(shard.documents) - 1):
        first, last = shard.documents[document : document + 2]
        for k in range(shard.windows[document + 1] - shard.windows[document]):
            start = data.segment_start(shard, first + k * dataset.body, first, last, dataset.body)
            assert first <= start <= last - 2
            seen[start : min(start + dataset.body, last)] = True
    assert seen.mean() > 0.9


def test_batches_are_equal_for_any_number_of_ranks_and_workers(shards):
    dataset = data.PretrainingData(shards, 32, 1, seed=5)

    def step_sets(size, micro):
        rows = []
        for rank in range(size):
            rows.append([])
            for numbers in data.micro_batches(range(2, 5), 16, micro, rank, size):
                rows[-1].append(list(numbers))
        per_step = 16 // size // micro
        return [
            sorted(
                i for row in rows for group in row[s * per_step : (s + 1) * per_step] for i in group
            )
            for s in range(3)
        ]

    for size, micro in ((1, 16), (1, 4), (2, 4), (4, 1), (4, 4)):
        assert step_sets(size, micro) == [list(range(16 * s, 16 * s + 16)) for s in (2, 3, 4)]
    batches = {
        workers: list(data.loader(dataset, data.micro_batches(range(6), 16, 8, 1, 2), workers))
        for workers in (0, 1, 4)
    }
    assert len(batches[0]) == 6
    for workers in batches:
        for ours, theirs in zip(batches[0], batches[workers], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_collate_says_where_everything_is(shards):
    dataset = data.PretrainingData(shards, 64)
    examples = [dataset[i] for i in range(7)]
    batch = data.collate(examples)
    longest = max(len(e.tokens) for e in examples)
    assert longest <= batch.tokens.shape[1] < longest + 8
    at = 0
    for b, e in enumerate(examples):
        end = len(e.tokens)
        assert (
            batch.tokens[b, :end].tolist() == e.tokens.tolist() and not batch.tokens[b, end:].any()
        )
        assert batch.mask[b].sum() == end and batch.mask[b, :end].all()
        assert batch.segments[b].nonzero().flatten().tolist() == list(range(e.b_start, end))
        positions = batch.positions[at : at + len(e.positions)]
        assert (positions - b * batch.tokens.shape[1]).tolist() == e.positions.tolist()
        assert batch.tokens.flatten()[positions].tolist() == e.tokens[e.positions].tolist()
        assert batch.labels[at : at + len(e.positions)].tolist() == e.labels.tolist()
        at += len(e.positions)
    assert len(batch.labels) == len(batch.positions) and len(batch.labels) % 64 == 0
    assert 0 <= len(batch.labels) - at < 64
    assert (batch.labels[at:] == data.IGNORED).all() and not batch.positions[at:].any()


def test_documents_of_one_sentence_or_one_long_line_make_true_pairs(tmp_path):
    documents = [[document[0]] for document in make_documents(300)]
    documents[0] = [" ".join(sentence for document in make_documents(100) for sentence in document)]
    data.prepare(lambda: iter(documents), tmp_path / "out", 300, 1)
    dataset = data.PretrainingData(tmp_path / "out", 64)
    starts = set()
    for i in range(int(dataset.shard(0).windows[-1])):
        example = dataset[i]
        a, b = unmasked(example)
        assert len(a) and len(b)
        starts.add(tuple(a[:8]))
    assert len(starts) > 0.9 * i


def test_any_flipped_byte_in_an_archive_is_one_line(documents, tmp_path):
    for suffix, compress in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ):
        good = compress(as_lines(documents).encode())
        for at in range(20, len(good), len(good) // 30):
            content = bytearray(good)
            content[at] ^= 0x55
            (tmp_path / f"a.txt{suffix}").write_bytes(content)
            with contextlib.suppress(data.DataError):  # nothing else may come out
                list(data.read_documents([tmp_path / f"a.txt{suffix}"]))


def test_lone_surrogates_in_json_become_question_marks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "One \\ud800 two."}\n')
    assert list(data.read_documents([tmp_path / "a.jsonl"])) == [["One ? two."]]


def test_what_a_killed_preparation_left_is_removed(documents, tmp_path):
    rest = tmp_path / f"out.partial-{socket.gethostname()}-99999999"
    rest.mkdir()
    data.prepare(lambda: iter(documents), tmp_path / "out", 320, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
