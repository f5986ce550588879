"""The race: who reaches the baseline's final held-out loss soonest, on the same machine?

    python train.py --max-steps 1 --out runs/text            # the shards, once, for all runs
    python train.py --out runs/base
    python tests/variants/modern.py --steps 1400 300 --save-every 50 --out runs/mine
    python tests/course/race.py runs/base runs/mine          # and any number of runs more

For each run it prints the time and the examples after which the run had a held-out MLM loss at most
as high as the baseline's last one, and both as a part of what the baseline took: the scores. They
hardly depend on the machine, since the baseline ran on it, too. A run that never came there is
said to have not. Errors are one line.

How it counts:
- Only evaluations count, nothing is read between two of them: the first one at or below the goal.
  So a run that evaluates more often, by a smaller --save-every, can be told to have been sooner,
  but it pays for each evaluation. The baseline's own time is that of its first one there, too.
- The time is `seconds` of metrics.jsonl: all of the program, from its start on, with the wait for
  data, evaluations and saving. If it was stopped in between, the pause does not count.
- A loss is compared with losses at the same length only. The demo ends with 128 tokens, so a run
  has to have a phase of that length.
- A log is a text file, which anyone can write. What counts is a run that the lecturer makes of the
  code that was handed in, see README.md. It runs with your rights: this is no sandbox.

May be changed: model, optimizer, schedule, batches, masks in training, precision, lengths before
the last phase, and all code that trains. May not: the shards, the held-out text, `evaluate` and
what it asks (--pairs), the machine and how many ranks and threads it runs. Nobody begins with
trained weights, and each run has a seed that was not chosen by its score.

What is checked: that the first lines of metrics.jsonl have the same digest of the shards, --pairs,
no --init, the same device, ranks, torch and Python; and that the loss of the unigram predictor is
the same at each evaluation, which no other held-out tokens or masks would give. What is not
recorded is not: which machine it was, how many threads, what else ran there, and whether the code
of evaluation has changed.
"""
import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

SAME = "device", "ranks", "torch", "python", "shards", "pairs"       # in a run and the baseline


class RaceError(ValueError):
    """Runs that cannot race; the message says which and why."""


class Point(NamedTuple):
    """An evaluation, and what the run had taken until then."""
    step: int
    seconds: float
    examples: int
    seq_len: int             # tokens of the held-out examples
    loss: float              # MLM, nats
    unigram: float           # the loss of the unigram predictor on the same tokens


class Run(NamedTuple):
    """What metrics.jsonl says of a run."""
    name: str                # its folder, as given
    start: dict              # the fields of the first line, and of its field `flags`
    points: list             # of Point, in the order of the log


def points_of(lines):
    """Returns the Points of the lines (dicts) of a metrics.jsonl. A loss that is not finite is left
    out. Raises KeyError for a field that is missing."""
    phases = lines[0]["phases"]
    points = []
    taken = {}                   # {step: its line}. After a restart some stand there twice
    for line in lines:
        if line["kind"] == "train":
            taken[line["step"]] = line
        elif line["kind"] == "eval" and line["step"] in taken and line["mlm_loss"] is not None:
            step = line["step"]
            # Later steps are there where a crash has lost them.
            examples = sum(phases[other["phase"] - 1]["global_batch"]
                           for number, other in taken.items() if number <= step)
            length = phases[line["phase"] - 1]["seq_len"]
            points.append(Point(step, taken[step]["seconds"], examples, length,
                                line["mlm_loss"], line["unigram_loss"]))
    return points


def read(folder):
    """Returns the Run in a folder. Raises RaceError if it has no metrics.jsonl of a run that was
    evaluated."""
    path = Path(folder, "metrics.jsonl")
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        run = Run(str(folder), lines[0] | lines[0]["flags"], points_of(lines))
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise RaceError(f"{path} is no log of a run that has ended: {error!r}") from None
    if not run.points:
        raise RaceError(f"{path}: the run was never evaluated")
    return run


def check(base, run, goal):
    """Raises RaceError if a run may not be compared with the baseline. goal: of it, a Point."""
    for field in SAME:
        own, other = run.start.get(field), base.start.get(field)
        if own != other:
            raise RaceError(f"{run.name} has {field} {own}, the baseline {other}")
    if run.start.get("init") != "None":
        raise RaceError(f"{run.name} began with trained weights, --init")
    for point in run.points:
        # The same numbers are added up, in an order that depends on micro-batches.
        if point.seq_len == goal.seq_len and abs(point.unigram - goal.unigram) > 1e-6:
            raise RaceError(f"{run.name} was evaluated on other tokens or masks: their unigram "
                            f"loss is {point.unigram:.6f}, the baseline's {goal.unigram:.6f}")


def first_reached(run, goal):
    """Returns the first Point of a run whose loss is at most the goal's, at its length; or None."""
    there = (point for point in run.points
             if point.seq_len == goal.seq_len and point.loss <= goal.loss)
    return next(there, None)


def row(run, goal, took):
    """Returns the line of a run in the table. goal: the baseline's last Point; took: its first one
    that is as good."""
    reached = first_reached(run, goal)
    if reached:
        return (f"{reached.step:>8,}{reached.seconds / 60:>10.2f}"
                f"{reached.seconds / took.seconds:>9.3f}{reached.examples:>12,}"
                f"{reached.examples / took.examples:>9.3f}{run.points[-1].loss:>9.3f}  {run.name}")
    losses = [point.loss for point in run.points if point.seq_len == goal.seq_len]
    if not losses:
        return f"   never: not evaluated at {goal.seq_len} tokens  {run.name}"
    return f"   never: its best is {min(losses):.3f}  {run.name}"


def main():
    """Prints the table; one line on stderr if the runs cannot be compared."""
    parser = argparse.ArgumentParser(description="Who reaches the baseline's loss soonest?")
    parser.add_argument("base", help="the folder of the baseline's run, for example runs/demo")
    parser.add_argument("runs", nargs="*", help="the folders of other runs")
    flags = parser.parse_args()
    try:
        base = read(flags.base)
        goal = base.points[-1]
        runs = [base] + [read(folder) for folder in flags.runs]
        for run in runs:
            check(base, run, goal)
    except RaceError as error:
        sys.exit(f"race.py: {error}")
    print(f"goal: a held-out MLM loss of {goal.loss:.3f} at {goal.seq_len} tokens, the last one of "
          f"{base.name}")
    print("    step   minutes  of base    examples  of base     last  run")
    took = first_reached(base, goal)
    for run in runs:
        print(row(run, goal, took))


if __name__ == "__main__":
    main()
