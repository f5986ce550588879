"""How fast text becomes shards and shards become batches, and how long ranks wait.

    python tests/bench/bench_data.py   # 5 minutes on 2 cores
    python tests/bench/bench_data.py --megabytes 1000 4000 --rounds 1   # does memory stay bounded?

The corpus is this machine's documentation as paragraphs of prose, shuffled and repeated, eight to a
document; it is written to --folder and removed in the end. Hugging Face's fast WordPiece tokenizer
(where `transformers` is installed) learns as many pieces from the same text and encodes its
paragraphs from memory with as many threads; it neither reads nor splits nor writes.
"""
import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import data  # noqa: E402


def write_corpus(path, paragraphs, megabytes):
    """Writes documents of eight paragraphs, drawn at random."""
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            document = "\n".join(rng.sample(paragraphs, 8)) + "\n\n"
            size += len(document.encode())
            file.write(document)


def memory_of(session):
    """Returns the MB that the processes of a session hold; what they share counts once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                pss = next(line for line in open(folder / "smaps_rollup") if line[:4] == "Pss:")
                total += int(pss.split()[1]) / 1024
        except (OSError, StopIteration):
            pass                             # it has just ended
    return total


def prepare(corpus, out, *options):
    """Runs data.py; returns (seconds, the most MB that it and its workers held at a time)."""
    shutil.rmtree(out, ignore_errors=True)
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "data.py", corpus, "--out", out, "--shards", "16",
                                *options], cwd=ROOT, stdout=subprocess.DEVNULL,
                               start_new_session=True)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.2)
    if process.returncode:
        sys.exit("bench_data.py: data.py failed")
    return time.perf_counter() - began, peak


def word_piece(paragraphs, vocab_size, threads):
    """Returns MB/s of Hugging Face's fast WordPiece tokenizer by name: as `tokenizers` encodes and
    as `transformers` returns the ids; {} where they are not installed."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    try:
        from tokenizers import BertWordPieceTokenizer
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return {}
    bare, rates = BertWordPieceTokenizer(lowercase=True), {}
    bare.train_from_iterator(paragraphs, vocab_size=vocab_size, show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bare._tokenizer)
    size = sum(len(paragraph.encode()) for paragraph in paragraphs)
    for name, call in (
            ("tokenizers, encode_batch alone", bare.encode_batch),
            ("transformers, ids", lambda part: fast(part, add_special_tokens=False)["input_ids"])):
        began = time.perf_counter()
        for start in range(0, len(paragraphs), 5000):
            call(paragraphs[start:start + 5000])
        rates[name] = size / 1e6 / (time.perf_counter() - began)
    return rates


def load(shards, seq_len, size=32, seconds=5):
    """Returns examples/s of one worker process whose batches nobody keeps waiting."""
    steps = ([list(range(k * size, (k + 1) * size))] for k in range(10 ** 9))
    batches = data.loader(data.PretrainingData(shards, seq_len), list, steps)
    for _ in range(200):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        count += len(next(batches)[0].pair_labels)
    return count / (time.perf_counter() - began)


def balance(shards, seq_len, size, on, steps=20):
    """Returns the mean over steps of the most tokens of a rank over the mean of all, of a global
    batch of 256 in micro-batches of 8."""
    length_of = data.PretrainingData(shards, seq_len).lengths
    balanced = length_of if on else None
    tokens = np.zeros((steps, size))
    for step in range(steps):
        for rank in range(size):
            for part in data.micro_batches(step, 256, 8, rank, size, balanced):
                tokens[step, rank] += length_of(part).sum()
    return (tokens.max(1) / tokens.mean(1)).mean()


def measure(args, folder):
    """Prints all tables."""
    paragraphs = [document.replace("\n", " ") for document in data.machine_documentation()]
    small, corpus, out, first = (folder / name for name in ("small", "corpus", "shards", "first"))
    small.write_text("\n\n".join(paragraphs))
    prepare(small, first, "--vocab-size", args.vocab_size)
    model, cores = first / "tokenizer.model", os.cpu_count()
    print(f"{cores} cores, vocabulary {args.vocab_size}; peak is the memory of all processes\n")
    print(f"{'':<42}{'MB':>7}{'s':>8}{'MB/s':>8}{'peak, MB':>10}")
    for megabytes in args.megabytes:
        write_corpus(corpus, paragraphs, megabytes)
        for label, options in (("data.py, with its tokenizer", ("--vocab-size", args.vocab_size)),
                               ("data.py, --tokenizer FILE", ("--tokenizer", model))):
            runs = [prepare(corpus, out, *options) for _ in range(args.rounds)]
            seconds, peak = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
            ours = megabytes / seconds
            print(f"{label:<42}{megabytes:>7.0f}{seconds:>8.1f}{ours:>8.1f}{peak:>10.0f}")
    runs = [word_piece(paragraphs * 4, int(args.vocab_size), cores) for _ in range(args.rounds)]
    for name in runs[0]:
        rate = statistics.median(run[name] for run in runs)
        print(f"{name:<42}{'':>15}{rate:>8.1f}   data.py: {ours / rate:.1f} times that")
    print("\none worker process, batches of 32")
    for seq_len in 128, 512:
        rate = statistics.median(load(out, seq_len) for _ in range(args.rounds))
        print(f"length {seq_len}: {rate:,.0f} examples/s", flush=True)
    print("\nglobal batch 256, micro-batches of 8, the documentation (mean of 20 steps)")
    print(f"{'length':>6}{'ranks':>7}{'imbalance':>11}{'--balance':>11}")
    for seq_len in 128, 512:
        for size in 2, 8:
            uneven, even = (balance(first, seq_len, size, on) for on in (0, 1))
            print(f"{seq_len:>6}{size:>7}{uneven:>11.3f}{even:>11.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[200], help="of text")
    parser.add_argument("--vocab-size", default="8192")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--folder", help="where the corpora go; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=args.folder) as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
