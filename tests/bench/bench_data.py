"""How fast does text become shards, in how much memory, and how fast do shards become batches?

    python tests/bench/bench_data.py                       # 3 minutes
    python tests/bench/bench_data.py --beside ../old       # 6 minutes
    python tests/bench/bench_data.py --megabytes 4000 --rounds 1     # does memory stay bounded?

Each document of the corpus is eight paragraphs, drawn at random from this machine's documentation.
The corpus goes to --folder and is removed at the end. "peak" is the most memory that data.py holds
at a time, with the processes that older versions start; shared memory counts once. "examples/s" is
the rate of one process. Needs Linux.
"""
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import beside

import data


def write_corpus(path, megabytes):
    """Writes documents of eight paragraphs, drawn at random."""
    documents = beside.documentation().read_text().split("\n\n")
    paragraphs = [text.replace("\n", " ") for text in documents]
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write("\n".join(rng.sample(paragraphs, 8)) + "\n\n")


def memory_of(session):
    """Returns the memory of all processes of a session, in MB."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += int(lines[2].split()[1]) / 977      # "Pss:    1234 kB", of 1,024 bytes
        except (OSError, IndexError):
            pass                                             # the process has just ended
    return total


def once(args):
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        corpus = Path(folder, "corpus")
        shards = Path(folder, "shards")
        write_corpus(corpus, args.megabytes)
        peak = 0
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "data.py", corpus, "--out", shards],
                                   cwd=beside.CODE, stdout=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            while process.poll() is None:
                peak = max(peak, memory_of(process.pid))
                time.sleep(0.2)
        finally:
            process.kill()
        if process.returncode:
            sys.exit("data.py failed")
        figures = {"prepared, MB/s": args.megabytes / (time.perf_counter() - began),
                   "peak, MB": peak}
        for length in 128, 512:
            dataset = data.PretrainingData(shards, length)
            dataset.batch(range(1000))                       # untimed: reads from the disk
            began = time.perf_counter()
            for k in range(200):
                dataset.batch(range(k * 32, (k + 1) * 32))
            figures[f"examples/s of {length} tokens"] = 6400 / (time.perf_counter() - began)
    return figures


def flags(add):
    add("--megabytes", type=float, default=100)
    add("--folder", help="where the corpus goes (default: a temporary folder)")


if __name__ == "__main__":
    beside.main(once, flags)
