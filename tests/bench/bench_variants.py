"""What do variants that train differently cost or bring, beside what they replace?

    python tests/bench/bench_variants.py                   # an hour on two cores
    python tests/bench/bench_variants.py --runs lamb albert --steps 1200 --seeds 0
    python tests/bench/bench_variants.py --ranks 1 --minutes 4 --runs lamb adamw muon
    python tests/bench/bench_variants.py --stop 20 --steps 40 --seeds 0    # does each resume?

Ranks on this machine train the demo's model in its first phase, one run after another, seed by
seed. All runs take --steps, and therefore equally many examples, or all take --minutes.

    loss        held-out MLM loss at the end, mean over the seeds
    spread      the largest of these losses minus the smallest
    MB sent     what a rank sent as gradients, weights or moments, up to the last step
    ms          median time of a step
    of base     the column before it, divided by the baseline's
    state MB    size of the optimizer's moments

With --stop N, each run is made again, stopped after step N and resumed; a line reports whether it
ends with the same bits. Words after -- are flags of train.py for all runs.
"""
import argparse
import os
import statistics
import tempfile
from pathlib import Path

import beside
import torch

from tests.training import last_state

TRAIN = {        # runs of train.py: {name: (baseline, flags)}
    "lamb": ("lamb", ""),
    "adamw": ("adamw", "--optimizer adamw --lr-scale 0.25"),
    "fp32": ("fp32", "--precision fp32"),
    "bf16": ("fp32", "--precision bf16"),
    "fp16": ("fp32", "--precision fp16"),
    "int8": ("lamb", "--compression int8"),
}
VARIANTS = {     # runs of the files in tests/variants
    "lans": ("lamb", ""),
    "came": ("adamw", "--lr-scale 0.125"),
    "merit": ("lamb", ""),
    "muon": ("lamb", "--lr-scale 0.6"),
    "modern": ("lamb", ""),
    "modern_muon": ("lamb", "--lr-scale 0.6"),
    "albert": ("lamb", ""),
    "stacking": ("lamb", ""),
    "whole_words": ("lamb", ""),
    "balance": ("lamb", ""),
    "local_steps": ("lamb", ""),
    "slow_momentum": ("adamw", "--lr-scale 0.25"),
    "bucket_clipping": ("lamb", ""),
    "gradientflow": ("lamb", ""),
    "powersgd": ("lamb", ""),
    "topk": ("lamb", ""),
    "onebit": ("lamb", ""),
    "onebit_adam": ("adamw", "--lr-scale 0.125"),
    "onebit_lamb": ("lamb", ""),
    "zeroone_adam": ("adamw", "--lr-scale 0.125"),
}
RUNS = TRAIN | VARIANTS
COLUMNS = ("run", "baseline", "loss", "spread", "steps", "MB sent", "of base", "ms", "of base",
           "state MB")


def train(args, name, out, *more):
    """Runs the program of a run; `more` are additional flags."""
    _, flags = RUNS[name]
    program = f"tests/variants/{name}.py" if name in VARIANTS else "train.py"
    steps = [args.steps, 0]
    if name == "stacking":                           # as many examples, in three phases
        part = round(0.4 * args.steps)
        steps = [part, part, args.steps - 2 * part, 0]
    length = ["--steps", *steps]
    if args.minutes:
        length += ["--hours", args.minutes / 60]
    beside.program("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}",
                   program, "--data", args.data, "--out", out, *length, "--save-every",
                   args.stop or 10 ** 6, *flags.split(), *args.flags, *more)


def run(args, name, seed):
    """Trains one run and returns its measurements, {name: number}."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        parts = Path(folder, "parts")
        train(args, name, whole, "--seed", seed)
        tensors = last_state(whole)["tensors"]
        if args.stop:
            train(args, name, parts, "--seed", seed, "--max-steps", args.stop)
            train(args, name, parts, "--seed", seed)
            print(f"{name}, stopped after step {args.stop} and resumed:",
                  beside.other_bits(whole, parts) or "the same bits", flush=True)
        steps = beside.lines_of(whole, "train")
        loss = beside.lines_of(whole, "eval")[-1]["mlm_loss"]
    ends = [line["seconds"] for line in steps]
    moments = [tensor.nbytes for key, tensor in tensors.items() if " of " in key]
    return {"loss": loss, "steps": len(steps), "state": 1e-6 * sum(moments),
            "ms": 1e3 * statistics.median(b - a for a, b in zip(ends, ends[1:])),
            "sent": 1e-6 * sum(line["bytes_sent"] for line in steps)}


def show(results):
    """Prints the table. results: {run: [what `run` returns for each seed]}."""
    print("".join(f"{column:>16}" for column in COLUMNS))
    for name, seeds in results.items():
        baseline = RUNS[name][0]
        losses = [one["loss"] for one in seeds]
        cells = [name, baseline, f"{statistics.mean(losses):.3f}",
                 f"{max(losses) - min(losses):.3f}", seeds[0]["steps"]]
        for column in "sent", "ms":
            value = statistics.median(one[column] for one in seeds)
            ratio = "-"
            if baseline in results:
                base = statistics.median(one[column] for one in results[baseline])
                ratio = f"{value / base:.3f}" if base else "-"
            cells += [f"{value:.1f}", ratio]
        cells.append(f"{seeds[0]['state']:.2f}")
        print("".join(f"{cell:>16}" for cell in cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    add("--data", type=Path, help="shards (default: of this machine's documentation)")
    add("--steps", type=int, default=600)
    add("--minutes", type=float, help="the same time for all, in place of the same steps")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--ranks", type=int, default=2)
    add("--stop", type=int, metavar="N", help="compare with runs that stop after step N and resume")
    add("flags", nargs="*", help="more flags of train.py, after --")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"              # for each rank
    args.data = (args.data or beside.shards_of()).absolute()
    results = {name: [] for name in args.runs}
    for seed in args.seeds:
        for name in args.runs:
            results[name].append(run(args, name, seed))
            print(f"seed {seed}, {name}: MLM loss {results[name][-1]['loss']:.3f}", flush=True)
    print(f"\n{args.ranks} rank(s), seeds {args.seeds}, torch {torch.__version__}")
    show(results)


if __name__ == "__main__":
    main()
