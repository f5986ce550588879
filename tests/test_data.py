"""data.py: formats and bad input, the shards on disk, and the statistics of masks and pairs."""

import bz2
import contextlib
import gzip
import json
import lzma
import math
import os
import shutil
import socket

import numpy as np
import pytest
import torch
from tqdm import tqdm

import data
from tests.conftest import make_documents

PHASES = [(32, 0), (128, 1)]


def as_lines(documents):
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read(paths, split="auto"):
    """The documents of files, each a list of sentences; pieces of a long one put together."""
    documents = []
    for piece in data.Corpus(paths, split).pieces(tqdm(disable=True)):
        for k, sentences in enumerate(data.sentences_in(piece)[0]):
            if piece.continued and k == 0:
                documents[-1] += sentences
            else:
                documents.append(sentences)
    return documents


# Reading

SENTENCES = """
One.| Two!| Three?| Four.
Dr. Smith met Mr. J. R. Jones at 3.5 p.m. on Monday.
He met Mr. and Mrs. Smith.| They talked.
Use a list, e.g. Python's own.| It grows, i.e. CPython allocates more.
Use one (e.g. Python).| It works.
He said "Stop."| Then he left.
“Why not?”| She had no answer.
(He was late.)| [It rained.]| So we went in.
See Fig. 3 and No. 5, pp. 7 and Vol. 2.| The answer is no.| Then he left.
We used lists, tuples, etc. and so on.| We used lists, etc.| The rest is easy.
Smith et al. Nature 2010 found it.| Others did not.
The value is 3.14 or 2.71.| Both are close to 3.| 4 is far.
It costs $3.50.| Buy it at 5 p.m. Monday.| It opens at 9 a.m.| The doors are shut.
Version 2.0 is out (really!).| It works...
so did I.| Then we went.
The U.S. Army left.| He lives in the U.S.| He works in Washington, D.C.| It is hot.
George W. Bush and W. E. B. Du Bois spoke.| They left.
Vitamin C.| It is good for you.
Apple Inc. Chairman Jobs spoke.| He left Apple Inc.| The firm grew.
In Jan. 2001 it came.| It ended in May.| June was late.
Ph.D. students work.| St. Paul and Gen. Lee did.
Был дождь.| Потом он ушёл.
no end
""".strip().splitlines()


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences(text):
    assert data.split_sentences(text.replace("|", "")) == text.split("| ")


def test_nothing_has_no_sentence():
    assert data.split_sentences("  ") == []


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
            data.prepare(data.Corpus([tmp_path / name]), tmp_path / f"out-{name}", 320, 4)
        folders.append(files_of(tmp_path / f"out-{name}"))
    digests = [json.loads(folder.pop("manifest.json"))["corpus"]["sha256"] for folder in folders]
    assert len(set(digests)) == 3  # of the text, however it is compressed
    assert all(folder == folders[0] for folder in folders[1:])


def test_wrapped_prose_and_paragraphs_are_split_at_sentence_ends(documents, tmp_path):
    wrapped, paragraphs = [], []
    for document in documents:
        words = " ".join(document).split()
        wrapped.append("\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)))
        paragraphs.append(" ".join(document))
    for name, blocks in (("wrapped.txt", wrapped), ("paragraphs.txt", paragraphs)):
        (tmp_path / name).write_text("\n\n\n".join(blocks))
        assert read([tmp_path / name]) == documents


def test_lines_are_kept_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.\nThree. Four.\n\nFive. Six.\n")
    assert read([tmp_path / "a.txt"], "lines") == [
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
    "five.jsonl": (b'{"text": "One."}\n{"text": 5}\n', "five.jsonl, line 2: not a JSON object"),
    "few.txt": (b"One.\n\nTwo.\n", "too few"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200000, "deep.jsonl, line 1: not a JSON object"),
    "rest.txt": (b"\x80" * 3000000, "rest.txt, line 1, byte 0: not UTF-8"),
    "missing.txt": (None, "missing.txt: No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.prepare(data.Corpus([tmp_path / name]), tmp_path / "out", 320, 4)
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
        data.prepare(data.Corpus(documents=documents), tmp_path / "out", 30000, 4)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_corpus_is_refused_and_kept(documents, shards, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    before = files_of(folder)
    data.prepare(data.Corpus(documents=documents), folder, 320, 4)  # the same: nothing to do
    with pytest.raises(data.DataError, match="another corpus.*400 documents"):
        data.prepare(data.Corpus(documents=documents[1:]), folder, 320, 4)
    with pytest.raises(data.DataError, match="other settings"):
        data.prepare(data.Corpus(documents=documents), folder, 320, 2)
    assert files_of(folder) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(data.DataError, match="not empty"):
        data.prepare(data.Corpus(documents=documents), tmp_path / "full", 320, 4)


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
    documents = [([d, 7, 8] * (1 + d % 5), [3] * (1 + d % 5), [1 + d % 5]) for d in range(5, 300)]
    for size in (10, 1 << 20):
        monkeypatch.setattr(data.ShardWriter, "BUFFER", size)
        writer = data.ShardWriter(tmp_path, f"s{size}", np.uint32)
        for document in documents:
            writer.write(*document)
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
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
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
        shard = dataset.shard(s)
        count = int(shard.windows[-1])
        first, second = dataset.order(s, 0), dataset.order(s, 1)
        assert sorted(first) == sorted(second) == list(range(count))
        assert first.tolist() != second.tolist()
        rows = dataset.layout(s + 4 * np.arange(2 * count))  # two epochs, in one call
        assert (rows[:, 0] == s).all()
        homes = np.searchsorted(shard.documents, rows[:, 1], "right") - 1
        uses = np.diff(shard.windows)  # of each document in an epoch
        assert (np.bincount(homes[:count], minlength=len(uses)) == uses).all()
        assert (np.bincount(homes[count:], minlength=len(uses)) == uses).all()


@pytest.mark.parametrize("seq_len", [16, 32, 100])
def test_windows_reach_every_end_and_nearly_every_token(shards, seq_len):
    dataset = data.PretrainingData(shards, seq_len, pairs="none")
    shard, body = dataset.shard(0), dataset.body
    windows = np.arange(shard.windows[-1])
    seen = np.zeros(len(shard.tokens), bool)
    for epoch in range(3):
        no_short = np.full((5, len(windows)), 0.5)
        for start, end, *_ in dataset._cut(shard, windows, 0.618 * epoch % 1, no_short).tolist():
            assert 0 < end - start <= body
            seen[start:end] = True
        assert seen[shard.documents[1:] - 1].all() and seen.mean() > (0.93, 0.99, 0.999)[epoch]


def test_steps_hold_the_same_examples_on_any_number_of_ranks(shards):
    def step_sets(size, micro, lengths=None):
        rows = [list(data.micro_batches(range(2, 5), 16, micro, rank, size, lengths))
                for rank in range(size)]  # fmt: skip
        per_step = 16 // size // micro
        return [
            sorted(i for row in rows for part in row[s * per_step :][:per_step] for i in part)
            for s in range(3)
        ]

    lengths = data.PretrainingData(shards, 32).lengths
    for size, micro in ((1, 16), (1, 4), (2, 4), (4, 1), (4, 4)):
        for of in (None, lengths):
            assert step_sets(size, micro, of) == [
                list(range(16 * s, 16 * s + 16)) for s in (2, 3, 4)
            ]
    assert list(data.micro_batches(range(1), 8, 2, 1, 2)) == [[1, 3], [5, 7]]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


OPTIONS = [
    {},
    {"whole_words": True, "pairs": "sop"},
    {"pairs": "none", "mask_fraction": 0.3, "held_out": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_random_access(shards, options):
    """An example alone, in any batch, after any other: the same; its length without making it."""
    dataset = data.PretrainingData(shards, 32, 1, seed=5, **options)
    rng = np.random.default_rng(0)
    numbers = rng.permutation(2000) * rng.integers(1, 5000)  # epochs far from the first too
    alone = {i: dataset[i] for i in numbers.tolist()}
    assert dataset.lengths(numbers).tolist() == [len(alone[i].tokens) for i in numbers.tolist()]
    fresh = data.PretrainingData(shards, 32, 1, seed=5, **options)
    numbers = np.sort(numbers)
    for part in np.array_split(numbers, 37):
        for i, example in zip(part.tolist(), fresh.__getitems__(part.tolist()), strict=True):
            assert same(example, alone[i])


def test_workers_give_the_same_batches(shards):
    dataset = data.PretrainingData(shards, 32, 1, seed=5)
    batches = {
        workers: list(data.loader(dataset, data.micro_batches(range(6), 16, 8, 1, 2), workers))
        for workers in (0, 1, 2)
    }
    assert len(batches[0]) == 6
    expected = data.collate([dataset[i] for i in range(33, 48, 2)])  # of step 2
    assert all(torch.equal(a, b) for a, b in zip(batches[0][2], expected))
    for workers in batches:
        for ours, theirs in zip(batches[0], batches[workers], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_balance_evens_ranks_and_saves_padding(shards):
    dataset = data.PretrainingData(shards, 512)

    def work(lengths, size=4, micro=4, steps=range(3)):
        """The share of padding, and the largest ratio of a rank's tokens in a step to the mean."""
        tokens, slots = np.zeros((len(steps), size)), 0
        for rank in range(size):
            parts = list(data.micro_batches(steps, 256, micro, rank, size, lengths))
            for k, part in enumerate(parts):
                batch = data.collate(dataset.__getitems__(part))
                tokens[k * len(steps) // len(parts), rank] += int(batch.mask.sum())
                slots += batch.mask.numel()
        return 1 - tokens.sum() / slots, (tokens.max(1) / tokens.mean(1)).max()

    padding, _ = work(None)
    balanced, imbalance = work(dataset.lengths)
    assert balanced < padding / 3 and imbalance < 1.03


def test_sentence_order_and_no_pairs(shards):
    sop, swapped = data.PretrainingData(shards, 48, pairs="sop"), 0
    single = data.PretrainingData(shards, 48, pairs="none")
    for i in range(500):
        a, b = unmasked(sop[i])
        shard, label = sop.shard(i % 4), sop[i].random_b
        swapped += label
        assert len(a) and len(b)
        assert locate(shard, np.concatenate([b, a] if label else [a, b]))
        example = single[i]
        assert example.random_b == data.IGNORED and example.b_start == len(example.tokens) <= 48
        text = example.tokens.copy()
        text[example.positions] = example.labels
        assert text[0] == data.CLS and text[-1] == data.SEP and locate(shard, text[1:-1])
    assert abs(swapped - 250) < 4 * math.sqrt(125)
    batch = data.collate([single[i] for i in range(4)])
    assert not batch.segments.any() and (batch.random_b == data.IGNORED).all()


def test_whole_words_are_masked_whole_and_as_many_tokens(shards):
    dataset = data.PretrainingData(shards, 64, whole_words=True, mask_fraction=0.2)
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    chosen = total = several = 0
    for i in range(1500):
        example = dataset[i]
        tokens = example.tokens.copy()
        tokens[example.positions] = example.labels
        picked = np.isin(np.arange(len(tokens)), example.positions)
        words, inside = [], False
        for t, token in enumerate(tokens[1:-1].tolist(), 1):
            begins = tokenizer.id_to_piece(token).startswith("▁")
            if t == example.b_start - 1:
                inside = False
            elif begins or not inside:
                words.append([t])
                inside = True
            else:
                words[-1].append(t)
        for word in words:
            assert len({bool(picked[t]) for t in word}) == 1
            several += len(word) > 1 and picked[word[0]]
        chosen, total = chosen + picked.sum(), total + len(tokens) - 3
    assert several > 500
    assert abs(chosen / total - 0.2) < 0.01


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
    data.prepare(data.Corpus(documents=documents), tmp_path / "out", 300, 1)
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
                read([tmp_path / f"a.txt{suffix}"])


def test_lone_surrogates_in_json_become_question_marks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "One \\ud800 two."}\n')
    assert read([tmp_path / "a.jsonl"]) == [["One ? two."]]


def test_what_a_killed_preparation_left_is_removed(documents, tmp_path):
    rest = tmp_path / f"out.partial-{socket.gethostname()}-99999999"
    rest.mkdir()
    data.prepare(data.Corpus(documents=documents), tmp_path / "out", 320, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Files that hurt


FORMS = {
    "text": lambda documents: as_lines(documents),
    "json": lambda documents: "".join(json.dumps({"text": "\n".join(d)}) + "\n" for d in documents),
    "wiki": lambda documents: "".join(
        f'<doc id="{i}" url="u" title="A &amp; B">\nA & B\n\n' + "\n\n".join(d) + "\n\n</doc>\n"
        for i, d in enumerate(documents)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [400, 1000, 7777])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("blank", ["", " \t"])
def test_pieces_of_any_size_hold_the_same_documents(
    documents, tmp_path, monkeypatch, form, size, end, blank
):
    text = FORMS[form]([[s.replace("a", "ä€") for s in d] for d in documents])
    whole = [[s.replace("a", "ä€") for s in d] for d in documents]
    text = " \n\n" + text.replace("\n\n", f"\n{blank}\n").replace("\n", end)
    (tmp_path / "a").write_bytes(text.encode())
    assert read([tmp_path / "a"], "lines") == whole
    monkeypatch.setattr(data, "PIECE", size)
    assert read([tmp_path / "a"], "lines") == whole
    (tmp_path / "a").write_bytes(text.rstrip().encode())
    assert read([tmp_path / "a"], "lines") == whole


def test_the_form_of_a_file_is_seen_in_its_first_piece_with_text(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 64)
    record = {"text": "One two three. Four five six. Seven eight nine. " * 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    assert len(read([tmp_path / "a.jsonl"])[0]) == 9
    (tmp_path / "a.txt").write_text("\n" * 200 + record["text"] + "\n\nTen.\n")
    assert sum(map(len, read([tmp_path / "a.txt"]))) >= 10
    (tmp_path / "b.json").write_text(json.dumps([record]))
    with pytest.raises(data.DataError, match="an array of JSON; write one object a line"):
        read([tmp_path / "b.json"])


def test_wikiextractor_documents_in_odd_forms(tmp_path):
    (tmp_path / "a").write_text(
        ' <doc id="1" title="A > B">\nA > B\n\nText one.\n</doc>\nstray\n'
        '<doc id="2" url="u">Two here.</doc>\n<doc id="3" title="C">\nC\n\n</doc>\n'
    )
    piece = next(data.Corpus([tmp_path / "a"]).pieces(tqdm(disable=True)))
    documents, skipped = data.documents_in(piece)
    assert documents == [["Text one."], ["Two here."]]
    assert skipped["words outside of wikiextractor's documents"] == 1


def test_a_document_on_one_endless_line_is_cut_at_spaces(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 1 << 16)
    words = "The quick brown fox. " * 30000  # 630 kB
    (tmp_path / "a.txt").write_text("One two.\n\n" + words + "\n\nThree four.\n")
    first, long, last = read([tmp_path / "a.txt"], "lines")
    assert first == ["One two."] and last == ["Three four."]
    assert " ".join(long) == words.strip() and max(map(len, long)) <= data.LONGEST_SENTENCE
    (tmp_path / "a.txt").write_text("é" * 300000)  # without a single space
    assert "".join(read([tmp_path / "a.txt"], "lines")[0]) == "é" * 300000


def test_many_empty_documents_and_texts_that_spell_mask(documents, tmp_path):
    text = "\n \n\t\n" * 100000 + as_lines([d + ["A [MASK] is [SEP]."] for d in documents])
    (tmp_path / "a.txt").write_text(text)
    manifest = data.prepare(data.Corpus([tmp_path / "a.txt"]), tmp_path / "out", 320, 2)
    assert manifest["corpus"]["documents"] == 400
    records = '{"text": ""}\n{"text": null}\n{"text": "x"}\n' * 50 + FORMS["json"](documents)
    (tmp_path / "a.jsonl").write_text(records)
    manifest = data.prepare(data.Corpus([tmp_path / "a.jsonl"]), tmp_path / "json", 320, 2)
    assert manifest["skipped"]["JSON records without text"] == 100
    assert "100 JSON records without text" in data.describe(manifest)


def test_a_wikiextractor_tree(documents, tmp_path, program):
    for k, name in enumerate(["AA/wiki_00", "AA/wiki_01.gz", "BB/wiki_00"]):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = FORMS["wiki"](documents[k::3]).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "text" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "text" / ".git").mkdir()
    (tmp_path / "text" / ".git" / "config").write_bytes(b"\xff")
    (tmp_path / "text" / "latest").symlink_to("AA")
    (tmp_path / "text" / "loop").symlink_to(".")
    expected = documents[0::3] + documents[1::3] + documents[2::3]
    assert read([tmp_path / "text"]) == expected
    assert read([tmp_path / "text" / "A*", tmp_path / "text" / "?B" / "wiki*"]) == expected
    with pytest.raises(data.DataError, match="nothing.*: no file"):
        data.Corpus([tmp_path / "nothing*"])
    out = tmp_path / "out"
    run = program("data.py", tmp_path / "text", "--out", out, "--vocab-size", 320, "--workers", 3)
    assert run.returncode == 0, run.stderr
    assert "400 documents" in run.stdout and "1,200 lines of wikiextractor's" not in run.stdout
    assert "800 lines of wikiextractor's tags and titles" in run.stdout
    shown = program("data.py", "--show", out)
    assert shown.returncode == 0 and shown.stdout in run.stdout
    assert "[MASK](" in shown.stdout and shown.stdout.count("[CLS]") == 3
    again = program("data.py", tmp_path / "text" / "AA", "--out", tmp_path / "cut", "--shards", 2,
                    "--tokenizer", out / "tokenizer.model", "--held-out", 0.5)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "133 documents held out" in again.stdout
    for option, message in (
        (("--tokenizer", tmp_path / "text" / ".hidden"), "is not a SentencePiece model"),
        (("--tokenizer", out / "tokenizer.model", "--vocab-size", 300), "has 320 pieces, not 300"),
        (("--held-out", 0.7), "up to 0.5"),
    ):
        run = program("data.py", tmp_path / "text", "--out", tmp_path / "no", *option)
        assert run.returncode == 1 and message in run.stderr and run.stderr.count("\n") == 1


def test_a_nodes_share_holds_what_its_ranks_read(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "wiki")
    written = data.split_folder(tmp_path / "wiki", nodes=2, ranks_per_node=2)
    assert [(path.name, count) for path, count in written] == [
        ("wiki-node-0", 2),
        ("wiki-node-1", 2),
    ]
    everything = data.PretrainingData(tmp_path / "wiki", 32)
    for node, (path, _) in enumerate(written):
        share = data.PretrainingData(path, 32)
        for rank in (2 * node, 2 * node + 1):
            data.verify(path, rank, 4)
            for i in range(rank, 100, 4):
                assert same(share[i], everything[i])
        with pytest.raises(data.DataError, match="train-0000.*is missing; rank"):
            data.verify(path, (2 * node + 2) % 4, 4)
    with pytest.raises(data.DataError, match="wiki-node-0 exists"):
        data.split_folder(tmp_path / "wiki", 2)


def test_many_processes_prepare_the_same_shards_and_a_lost_one_is_told(documents, tmp_path):
    (tmp_path / "a.txt").write_text(as_lines(documents))
    folders = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        data.prepare(data.Corpus([tmp_path / "a.txt"]), out, 320, 4, workers=workers)
        folders.append(files_of(out))
    assert folders[0] == folders[1]
    with pytest.raises(data.DataError, match="a worker process died.*--workers lower"):
        with data.mapping(2) as map:
            list(map(os._exit, [1]))
