"""Plots runs from their metrics.jsonl: losses, learning rate, norm, speed and waits.

    python tests/tools/plot.py runs/demo --picture demo.png
    python tests/tools/plot.py runs/one runs/two --against hours --picture both.svg

Each run has a colour; each step is a dot. "tokens" counts every example at its phase's full length,
even if it is shorter. Steps lost in a crash are left out: a "train" line of step n replaces all
earlier lines of steps n and later. Needs matplotlib.
"""
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import data

PANELS = {
    "mlm_loss": "MLM loss, nats",
    "held_out": "MLM loss, held out",
    "nsp_loss": "NSP loss, nats",
    "lr": "learning rate",
    "grad_norm": "norm of all gradients",
    "examples_per_second": "examples a second",
    "data_share": "waiting for examples, part of a step",
    "wait_seconds": "waiting for the network, seconds a step"}


def read_run(folder):
    """Returns the steps of a run, {step: fields}. All have hours and tokens, and steps with an
    evaluation also held_out. A folder without a run can raise ValueError, LookupError, OSError."""
    phases = []
    steps = {0: {"tokens": 0}}
    for text in Path(folder, "metrics.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue                     # half a line, from a killed run or a full disk
        if line["kind"] == "run":
            phases = line["phases"]
        elif line["kind"] == "train":
            while next(reversed(steps), -1) >= line["step"]:
                steps.popitem()          # lost in a crash
            phase = phases[line["phase"] - 1]
            # A crash may have lost lines after this step: they count as if of this phase.
            last = next(reversed(steps))
            line["tokens"] = (line["step"] - last) * phase["global_batch"] * phase["seq_len"]
            line["tokens"] += steps[last]["tokens"]
            line["hours"] = line["seconds"] / 3600
            steps[line["step"]] = line
        elif line["kind"] == "eval" and line["step"] in steps:
            # Lines whose step a crash has lost are left out.
            steps[line["step"]]["held_out"] = line["mlm_loss"]
    del steps[0]
    if not steps:
        raise ValueError(f"no step is in {folder}/metrics.jsonl")
    return steps


def draw(runs, against, picture):
    """Draws runs, {name: steps from read_run}, into the file `picture`."""
    os.environ.pop("MPLBACKEND", None)   # set by notebooks; no display is needed
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 9), layout="constrained")
    panels = figure.subplots(4, 2).flat
    for axes, (field, title) in zip(panels, PANELS.items()):
        axes.set(title=title, xlabel=against)
        for number, (name, steps) in enumerate(runs.items()):
            points = [(line[against], line.get(field)) for line in steps.values()]
            axes.plot(*zip(*points), f".C{number}", markersize=3, label=name)
    figure.axes[0].legend()
    figure.savefig(picture)


def main():
    """Runs the program. An unusable run is one line on stderr and status 1; a wrong flag, 2."""
    parser = data.Parser(description="Draw the curves of runs.")
    parser.add_argument("runs", type=data.path_of, nargs="+",
                        help="folders that train.py has written")
    parser.add_argument("--against", choices=["step", "tokens", "hours"], default="step")
    parser.add_argument("--picture", type=data.path_of, required=True,
                        help="write this file, .png or .svg")
    args = parser.parse_args()
    try:
        runs = {str(folder): read_run(folder) for folder in args.runs}
        draw(runs, args.against, args.picture)
    except (ImportError, OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        sys.exit(f"plot.py: {type(error).__name__}: {error} (a run is a folder with the "
                 "metrics.jsonl of train.py)")


if __name__ == "__main__":
    main()
