"""Which model for which budget: the held-out loss that so many minutes of this machine buy.

    python tests/bench/bench_budget.py --minutes 4 --seeds 0 1 2
    python tests/bench/bench_budget.py --minutes 16 32 --seeds 0 1 --data shards/dictionaries

Each run is `train.py --hours MINUTES/60` with the demo's recipe, in a folder of --runs-folder. Run
it again to go on: a run that is complete is not run again. Take one core for it by
`taskset -c 0 env OMP_NUM_THREADS=1 python ...`.

A row has the steps of both phases; the loss (nats) on the masked tokens of the held-out documents
at the end of each, where examples have 64 and 128 tokens; at the end of all which part of these
tokens is right, and of the pairs; and the minutes from the start of the program to its end. Below
it stands the held-out loss after so many minutes; * marks the second phase.
"""
import argparse
import json
import shutil
import time
from pathlib import Path

import beside


def run_once(out, *flags):
    """Runs train.py with its results in a folder (Path), if that is not complete already; returns
    the minutes that it took."""
    wall = out / "wall.json"
    if not wall.exists():
        shutil.rmtree(out, ignore_errors=True)       # a run that was killed took other minutes
        began = time.monotonic()
        beside.program("train.py", "--out", out, *flags)
        wall.write_text(json.dumps((time.monotonic() - began) / 60))
    return json.loads(wall.read_text())


def show(name, out, wall):
    """Prints the row of a run, and its curve."""
    minutes = {}
    taken = [0, 0]
    for line in beside.lines_of(out, "train"):
        minutes[line["step"]] = line["seconds"] / 60
        taken[line["phase"] - 1] += 1
    ends = {}
    curve = []
    for line in beside.lines_of(out, "eval"):
        ends[line["phase"]] = line
        mark = "*" * (line["phase"] - 1)
        curve.append(f"{minutes[line['step']]:.2f} {line['mlm_loss']:.3f}{mark}")
    last = ends[max(ends)]
    losses = "".join(f"{end['mlm_loss']:>8.3f}" for end in ends.values())
    print(f"{name:<16}{taken[0]:>8,}{taken[1]:>8,}{losses}{last['mlm_accuracy']:>8.1%}"
          f"{last['nsp_accuracy']:>8.1%}{wall:>8.2f}")
    print("   ", "  ".join(curve), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="shards (default: of this machine's documentation)")
    add("--runs-folder", type=Path, default=Path("runs/budget"), help="a folder for each text")
    add("--models", nargs="+", default=["tiny", "mini"])
    add("--minutes", type=float, nargs="+", default=[4, 16, 32])
    add("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    shards = args.data or beside.shards_of()
    print(f"{'run':<16}{'steps':>16}{'at 64':>8}{'at 128':>8}{'tokens':>8}{'pairs':>8}"
          f"{'minutes':>8}", flush=True)
    for minutes in args.minutes:
        for model in args.models:
            for seed in args.seeds:
                name = f"{model}-{minutes:g}-{seed}"
                out = (args.runs_folder / name).absolute()
                wall = run_once(out, "--data", shards.absolute(), "--model", model, "--hours",
                                minutes / 60, "--seed", seed)
                show(name, out, wall)


if __name__ == "__main__":
    main()
