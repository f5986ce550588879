"""How well a few seconds of steps foretell the minutes after them: what --hours can know here.

    python train.py --hours 0.2 --out runs/steady
    python tests/bench/bench_trial.py runs/steady

`--hours` times steps for five seconds (TRIAL_SECONDS of train.py), and takes it that all others are
as fast. Here a trial of so many seconds ends at each third second of a run's longest phase. Of the
steps in the minutes after it, the columns have their mean time over the trial's: the median of all
trials, the least, the most; and the share of the trials that are within 5 %. Trials overlap, so few
of them are independent.
"""
import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

APART = 3                            # seconds between two trials
SETTLED = 20                         # steps in which workers start


def step_ends(folder):
    """Returns the seconds (array) after which each step of a run's longest phase ended, its first
    steps left out."""
    lines = map(json.loads, open(folder / "metrics.jsonl"))
    steps = [line for line in lines if line["kind"] == "train"]
    longest = Counter(line["phase"] for line in steps).most_common(1)[0][0]
    return np.array([line["seconds"] for line in steps if line["phase"] == longest][SETTLED:])


def ratios(ends, trial, after):
    """Returns, of each trial (array), the mean time of a step in the `after` seconds that follow it
    over that in its own `trial` seconds."""
    found = []
    for begin in np.arange(ends[0], ends[-1] - trial - after, APART):
        first, middle, last = np.searchsorted(ends, [begin, begin + trial, begin + trial + after])
        if middle == first:
            continue                             # one step takes longer than the trial
        timed = (ends[middle] - ends[first]) / (middle - first)
        later = (ends[last] - ends[middle]) / (last - middle)
        found.append(later / timed)
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="+", help="a folder of results")
    parser.add_argument("--trial", type=float, nargs="+", default=[5, 10, 20, 40], metavar="S")
    parser.add_argument("--after", type=float, nargs="+", default=[150, 300], metavar="S")
    args = parser.parse_args()

    print(f"{'run':<24}{'trial s':>8}{'after s':>8}{'trials':>8}{'median':>8}{'least':>7}"
          f"{'most':>7}{'within 5 %':>12}")
    for run in args.run:
        ends = step_ends(run)
        if len(ends) == 0:
            sys.exit(f"{run} has no more than {SETTLED} steps in a phase")
        for after in args.after:
            for trial in args.trial:
                each = ratios(ends, trial, after)
                if len(each) == 0:
                    continue                     # the run is too short
                near = np.mean(abs(each - 1) < 0.05)
                print(f"{run.name:<24}{trial:>8g}{after:>8g}{len(each):>8}{np.median(each):>8.3f}"
                      f"{each.min():>7.3f}{each.max():>7.3f}{near:>12.0%}")


if __name__ == "__main__":
    main()
