"""Measures this checkout, and a second checkout beside it, for all benchmarks.

A benchmark has a function once(args), which returns the measurements of one process, {row: number},
and passes it to `main`. In each round, `main` runs the benchmark once with the five files of this
checkout and, after --beside FOLDER, once with those of FOLDER. The order alternates, so a machine
that slows down slows both. A row shows the median of each, then the median, smallest and largest of
the ratios here / there within a round.

Import this module first: `import bert` and the like then find the five files to measure.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
CODE = Path(os.environ.get("BENCH_CODE", ROOT))      # the folder of the five files to measure
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
sys.path[:0] = [str(CODE), str(ROOT)]


def program(*words, cwd=CODE):
    """Runs Python with these words, such as one of the five files and its flags. Returns its
    output. If it fails, ends the benchmark."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(f"{words} failed in {cwd}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def keep_freed_memory():
    """Keeps freed memory, as train.py does on CPUs. Older checkouts may not."""
    import train

    if DEVICE.type == "cpu" and hasattr(train, "keep_freed_memory"):
        train.keep_freed_memory()


def seconds_of(function):
    """Returns the seconds that a call takes, including its work on a GPU."""
    began = time.perf_counter()
    function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def lines_of(out, kind):
    """Returns the lines of one kind in a run's metrics.jsonl, which may be unfinished."""
    path = Path(out, "metrics.jsonl")
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):        # half a line, still being written
            lines.append(json.loads(text))
    return [line for line in lines if line["kind"] == kind]


def other_bits(out, other):
    """Returns how the newest checkpoints of two runs differ, a list of at most one text."""
    from tests.training import assert_same, last_state

    try:
        assert_same(last_state(out), last_state(other))
    except AssertionError as error:
        return [str(error)]
    return []


def documentation():
    """Returns the path of a text: this machine's documentation, as this checkout selects it."""
    text = ROOT / "shards" / "documentation.txt"
    if not text.exists():
        text.parent.mkdir(exist_ok=True)
        script = r"import data; print(*data.machine_documentation(), sep='\n\n')"
        text.write_text(program("-c", script, cwd=ROOT))
    return text


def shards_of(vocab_size=8192):
    """Returns a folder with the shards that the measured data.py makes of `documentation`. The
    folder is kept: remove it after a change of data.py."""
    folder = ROOT / "shards" / f"bench-{'-'.join(CODE.parts[1:])}-{vocab_size}"
    if not folder.exists():
        program("data.py", documentation(), "--out", folder, "--vocab-size", vocab_size)
    return folder


def show(found):
    """Prints the table. found: {checkout: [{row: number} of each round]}."""
    here = found[ROOT]
    for row in here[0]:
        ours = [figures[row] for figures in here]
        line = f"{row:<44}{statistics.median(ours):>12.5g}"
        for checkout, rounds in found.items():
            if checkout != ROOT and row in rounds[0]:
                theirs = [figures[row] for figures in rounds]
                ratios = [a / b for a, b in zip(ours, theirs) if b]
                line += f"{statistics.median(theirs):>12.5g}"
                if ratios:
                    line += (f"{statistics.median(ratios):>9.3f}  ({min(ratios):.3f} to "
                             f"{max(ratios):.3f})")
        print(line, flush=True)


def main(once, add_flags, rounds=3):
    """Runs a benchmark; add_flags(add) adds its flags. In a process that has BENCH_CODE, it
    measures once."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    add_flags(parser.add_argument)
    args = parser.parse_args()
    if "BENCH_CODE" in os.environ:
        figures = once(args)
        if figures is not None:              # only on the first rank
            print(json.dumps(figures), flush=True)
        os._exit(0)                          # sys.exit would abort while groups are open

    found = {ROOT: []}
    if args.beside:
        found[args.beside.absolute()] = []
    print(f"{os.cpu_count()} cores, {args.rounds} round(s), here" + f", {args.beside}, ratio"
          * bool(args.beside), flush=True)
    for number in range(args.rounds):
        checkouts = list(found)
        if number % 2:
            checkouts.reverse()
        for checkout in checkouts:
            done = subprocess.run([sys.executable, *sys.argv], stdout=subprocess.PIPE,
                                  env=os.environ | {"BENCH_CODE": str(checkout)}, text=True)
            if done.returncode:
                sys.exit(f"the bench failed with the five files of {checkout}")
            found[checkout].append(json.loads(done.stdout.splitlines()[-1]))
    show(found)
