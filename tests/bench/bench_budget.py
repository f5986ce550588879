"""Which model for which budget: the held-out loss that so many minutes of this machine buy.

    python data.py                                             # the machine's documentation
    python tests/bench/bench_budget.py                         # two hours and a half
    python tests/bench/bench_budget.py --data shards/dictionaries --runs-folder runs/dictionaries

Each run is `train.py --hours MINUTES/60` with the demo's recipe, the shortest first; the runs of
--several minutes with several seeds. Run it again to go on: a run that is complete is not run
again, one that is not begins anew. --table only prints what is there. Take one core for it by
`taskset -c 0 env OMP_NUM_THREADS=1 python ...`.

The first table has, for each run: the steps of both phases; those that `train.py --plan 1 --hours`
foretells, from the TFLOP/s of a short run of the same model; the loss (nats) on the masked tokens
of the held-out documents at the end of the first phase, where examples have 64 tokens, and at the
end of the second, where they have 128, and there the accuracy; the minutes from the start of the
program to its end, and those of the steps alone. The second has the held-out loss after so many
minutes of steps, a tenth of the foretold steps apart; * marks the second phase.
"""
import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIAL_STEPS = 200, 50                # of the short run that measures TFLOP/s
CURVE = 10                           # evaluations of a run
DONE = "wall.json"                   # in the folder of a run that is complete: {"minutes": ...}


def train(*flags):
    """Runs train.py to its end, here; returns what it printed. Exits with its last words if it
    fails."""
    command = [sys.executable, "train.py", *map(str, flags)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def run_once(out, *flags):
    """Runs train.py with its results in a folder (Path), if that is not complete already."""
    if (out / DONE).exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    train("--out", out, *flags)
    minutes = (time.monotonic() - began) / 60
    (out / DONE).write_text(json.dumps({"minutes": minutes}))


def lines_of(out, kind):
    """Returns the lines of a kind (list of dict) of a run's metrics.jsonl."""
    lines = map(json.loads, open(out / "metrics.jsonl"))
    return [line for line in lines if line["kind"] == kind]


def foretold(args, model, minutes):
    """Returns the steps of each phase (list) that --plan says, from the median TFLOP/s of a short
    run, which it makes if it is not there."""
    trial = args.runs_folder / f"trial-{model}"
    given = "--data", args.data, "--model", model
    run_once(trial, *given, "--steps", *TRIAL_STEPS, "--eval-every", 10 ** 6)
    tflops = statistics.median(line["tflops"] for line in lines_of(trial, "train"))
    printed = train(*given, "--plan", 1, "--gpus-per-node", 1, "--tflops", tflops,
                    "--hours", minutes / 60)
    counts = re.findall(r"([\d,]+) steps take", printed)
    return [int(count.replace(",", "")) for count in counts]


def row(out, model, minutes, seed, steps_foretold):
    """Returns the line of a run in the first table."""
    steps = lines_of(out, "train")
    evaluations = lines_of(out, "eval")
    last = evaluations[-1]
    of_phase_1 = [line["mlm_loss"] for line in evaluations if line["phase"] == 1]
    first_phase = sum(step["phase"] == 1 for step in steps)
    wall = json.loads((out / DONE).read_text())["minutes"]
    taken = f"{first_phase:,} + {len(steps) - first_phase:,}"
    planned = " + ".join(f"{count:,}" for count in steps_foretold)
    return (f"{minutes:>7g}  {model:<6} {seed:>4}  {taken:>15}  {planned:>15}  "
            f"{of_phase_1[-1]:>6.3f}  {last['mlm_loss']:>6.3f}  {last['mlm_accuracy']:>7.1%}  "
            f"{wall:>6.2f}  {steps[-1]['seconds'] / 60:>6.2f}")


def curve(out):
    """Returns a run's held-out losses as text: `minutes loss` for each evaluation."""
    minutes = {step["step"]: step["seconds"] / 60 for step in lines_of(out, "train")}
    points = []
    for line in lines_of(out, "eval"):
        mark = "*" if line["phase"] == 2 else ""
        points.append(f"{minutes[line['step']]:.2f} {line['mlm_loss']:.3f}{mark}")
    return "  ".join(points)


def runs_of(args):
    """Returns the runs that the flags ask for, list of (minutes, model, seed)."""
    runs = []
    for minutes in sorted(args.minutes):
        seeds = [0]
        if minutes in args.several:
            seeds = range(args.seeds)
        for model in args.models:
            runs += [(minutes, model, seed) for seed in seeds]
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("shards/docs"), help="train on these shards")
    add("--runs-folder", type=Path, default=Path("runs/budget"), help="a folder for each text")
    add("--models", nargs="+", default=["tiny", "mini"])
    add("--minutes", type=float, nargs="+", default=[2, 4, 8, 16, 32])
    add("--several", type=float, nargs="+", default=[4], help="minutes that take all seeds")
    add("--seeds", type=int, default=3, help="how many")
    add("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    # So that a kill ends the run of train.py, too, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    args.data = args.data.absolute()
    args.runs_folder = args.runs_folder.absolute()

    curves = []
    print(f"{'minutes':>7}  {'model':<6} {'seed':>4}  {'steps':>15}  {'foretold':>15}  "
          f"{'at 64':>6}  {'at 128':>6}  {'correct':>7}  {'wall':>6}  {'steps':>6}", flush=True)
    for minutes, model, seed in runs_of(args):
        out = args.runs_folder / f"{model}-{minutes:g}-{seed}"
        if args.table and not (out / DONE).exists():
            continue
        steps_foretold = foretold(args, model, minutes)
        run_once(out, "--data", args.data, "--model", model, "--hours", minutes / 60,
                 "--seed", seed, "--eval-every", max(1, sum(steps_foretold) // CURVE))
        print(row(out, model, minutes, seed, steps_foretold), flush=True)
        curves.append(f"{minutes:>7g}  {model:<6} {seed:>4}  {curve(out)}")
    print("\nminutes  model  seed  held-out loss after minutes of steps", *curves, sep="\n")


if __name__ == "__main__":
    main()
