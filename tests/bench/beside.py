"""How a bench measures this checkout, and another one of this project beside it.

A bench has a function once(args), which returns what one process measures, {row: number}, and gives
it to `main`. That runs the bench once a round with the five files of this checkout and, after
--beside FOLDER, as often with those in FOLDER, in turns: so a machine that becomes slower does so
for both. A row shows the median of each, and of the ratios in a round (here / there) the median,
the least and the largest.

Import it first: `import bert` and the like then find the five files that are to be measured.
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
CODE = Path(os.environ.get("BENCH_CODE", ROOT))      # where these five files are
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
sys.path[:0] = [str(CODE), str(ROOT)]


def program(*words, cwd=CODE):
    """Runs Python with these words, as one of the five files and its flags. Returns what it prints;
    ends the bench if it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(f"{words} failed in {cwd}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def keep_freed_memory():
    """Does with freed memory what train.py does, where it does something."""
    import train

    if hasattr(train, "keep_freed_memory"):
        train.keep_freed_memory()


def seconds_of(function):
    """Returns how long a call takes, until a GPU has done its part."""
    began = time.perf_counter()
    function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def lines_of(out, kind):
    """Returns the lines of a kind of a run's metrics.jsonl, as far as it is written."""
    path = Path(out, "metrics.jsonl")
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):        # a line that is half written
            lines.append(json.loads(text))
    return [line for line in lines if line["kind"] == kind]


def other_bits(out, other):
    """Returns what differs between the newest checkpoints of two runs, a list of one text or none.
    """
    from tests.training import assert_same, last_state

    try:
        assert_same(last_state(out), last_state(other))
    except AssertionError as error:
        return [str(error)]
    return []


def documentation():
    """Returns the path of a text, this machine's documentation as this checkout selects it."""
    text = ROOT / "shards" / "documentation.txt"
    if not text.exists():
        text.parent.mkdir(exist_ok=True)
        script = r"import data; print(*data.machine_documentation(), sep='\n\n')"
        text.write_text(program("-c", script, cwd=ROOT))
    return text


def shards_of(vocab_size=8192):
    """Returns a folder with the shards that these five files make of `documentation`. It is kept:
    remove it when data.py has changed."""
    folder = ROOT / "shards" / f"bench-{'-'.join(CODE.parts[1:])}-{vocab_size}"
    if not folder.exists():
        program("data.py", documentation(), "--out", folder, "--vocab-size", vocab_size)
    return folder


def show(found):
    """Prints the table of {checkout: [{row: number} of each round]}."""
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
    """Runs the bench. add_flags(add) adds its flags. A process that bench_network.py has started
    measures once."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    add_flags(parser.add_argument)
    args = parser.parse_args()
    if "BENCH_CODE" in os.environ:
        figures = once(args)
        if figures is not None:              # of the first rank
            print(json.dumps(figures), flush=True)
        os._exit(0)                          # at its own end Python would abort with open groups

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
