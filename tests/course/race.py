"""The race: which run reaches the baseline's final held-out loss first, on the same machine?

    python train.py --max-steps 1 --out runs/text            # the shards, once, for all runs
    python train.py --out runs/base
    python tests/variants/modern.py --steps 1400 300 --save-every 50 --out runs/mine
    python tests/course/race.py runs/base runs/mine          # and any number of other runs

The goal is the baseline's last held-out MLM loss. For each run it prints the time and the examples
until the run was at or below the goal, and both as fractions of the baseline's: the scores. They
hardly depend on the machine, since the baseline ran on it, too. Of a run that never reached the
goal it prints "never". Errors are one line.

How it counts:
- Only evaluations count, without interpolation: the first evaluation at or below the goal. A run
  that evaluates more often, with a smaller --save-every, can therefore seem faster, but it pays for
  each evaluation. The baseline's own time also ends at its first evaluation there.
- The time is `seconds` of metrics.jsonl: the whole program from its start, including the wait for
  data, evaluations and saving. If the run was stopped and resumed, the pause does not count.
- A loss is compared only with losses at the same length. The demo ends with 128 tokens, so a run
  needs a phase of that length.
- A log is a text file that anyone can write. What counts is the lecturer's own run of the code
  that was handed in, see README.md. That code runs with your rights: this is no sandbox.

You may change the model, optimizer, schedule, batches, masks in training, precision, lengths before
the last phase, and all code that trains. You may not change the shards, the held-out text,
`evaluate` and its task (--pairs), the machine, or its numbers of ranks and threads. No run begins
with trained weights, and no seed is chosen by its score.

This program checks that the first lines of metrics.jsonl have the same digest of the shards,
--pairs, device, ranks, torch and Python, and no --init; and that the loss of the unigram predictor
is the same at each evaluation, since other held-out tokens or masks would change it. It cannot
check what is not recorded: the machine, the number of threads, what else ran there, and whether the
evaluation code has changed.
"""
import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

SAME = "device", "ranks", "torch", "python", "shards", "pairs"       # equal in run and baseline


class RaceError(ValueError):
    """Runs that cannot race; the message says which run and why."""


class Point(NamedTuple):
    """An evaluation, and the time and examples that the run had used by then."""
    step: int
    seconds: float
    examples: int
    seq_len: int             # tokens of the held-out examples
    loss: float              # MLM, nats
    unigram: float           # the loss of the unigram predictor on the same tokens


class Run(NamedTuple):
    """A run, as recorded in its metrics.jsonl."""
    name: str                # its folder, as given
    start: dict              # the fields of the first line and of its field `flags`
    points: list             # Points, in the order of the log


def points_of(lines):
    """Returns the Points in the lines (dicts) of a metrics.jsonl, except those whose loss is not
    finite. Raises KeyError if a field is missing."""
    phases = lines[0]["phases"]
    points = []
    taken = {}                   # {step: its line}. After a restart, some steps occur twice
    for line in lines:
        if line["kind"] == "train":
            taken[line["step"]] = line
        elif line["kind"] == "eval" and line["step"] in taken and line["mlm_loss"] is not None:
            step = line["step"]
            # After a crash, `taken` also has later steps, which were lost.
            examples = sum(phases[other["phase"] - 1]["global_batch"]
                           for number, other in taken.items() if number <= step)
            length = phases[line["phase"] - 1]["seq_len"]
            points.append(Point(step, taken[step]["seconds"], examples, length,
                                line["mlm_loss"], line["unigram_loss"]))
    return points


def read(folder):
    """Returns the Run in a folder. Raises RaceError if there is no metrics.jsonl with an
    evaluation."""
    path = Path(folder, "metrics.jsonl")
    lines = []
    try:
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):      # half a line, of a killed run
                lines.append(json.loads(text))
        run = Run(str(folder), lines[0] | lines[0]["flags"], points_of(lines))
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise RaceError(f"{path} is no log of a run that has ended: {error!r}") from None
    if not run.points:
        raise RaceError(f"{path}: the run was never evaluated")
    return run


def check(base, run, goal):
    """Raises RaceError if a run cannot be compared with the baseline, whose last Point is goal."""
    for field in SAME:
        own, other = run.start.get(field), base.start.get(field)
        if own != other:
            raise RaceError(f"{run.name} has {field} {own}, the baseline {other}")
    if run.start.get("init") != "None":
        raise RaceError(f"{run.name} began with trained weights, --init")
    for point in run.points:
        # Both are sums of the same numbers, but their order depends on the micro-batches.
        if point.seq_len == goal.seq_len and abs(point.unigram - goal.unigram) > 1e-6:
            raise RaceError(f"{run.name} was evaluated on other tokens or masks: their unigram "
                            f"loss is {point.unigram:.6f}, the baseline's {goal.unigram:.6f}")


def first_reached(run, goal):
    """Returns the first Point of a run at the goal's length with at most its loss, or None."""
    there = (point for point in run.points
             if point.seq_len == goal.seq_len and point.loss <= goal.loss)
    return next(there, None)


def row(run, goal, took):
    """Returns the line of a run in the table. goal: the baseline's last Point; took: its first
    Point that is as good."""
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
    """Prints the table, or one line on stderr if the runs cannot be compared."""
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
