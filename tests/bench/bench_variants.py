"""Each file of tests/variants beside what it changes: loss, bytes, time, memory of the optimizer.

    python tests/bench/bench_variants.py   # half an hour on two cores
    python tests/bench/bench_variants.py --runs lamb albert --steps 1200 --seeds 0
    sudo python tests/bench/bench_variants.py --link 100mbit --steps 60 --seeds 0 --runs lamb albert
    python tests/bench/bench_variants.py --ranks 1 --steps 2300 --equal steps minutes \\
        --runs lamb adamw muon --results runs/variants.jsonl

Two ranks on this machine train the demo's model for --steps steps of its first phase, all runs on
as many examples, one run after another, seed by seed. `loss` is the held-out MLM loss at the end,
the mean over the seeds, and `spread` the largest minus the smallest. MB are what a rank sent in
gradients, weights or moments, evaluation included; ms is the mean step, without the first five.
With --link (Linux, iproute2) each rank is on a host of its own, at the ends of a link of that rate;
see bench_network.

With --equal minutes a run takes as many steps as fit into the time that the first of --runs takes
for --steps, with a schedule that ends there. The time of a step is measured first: in three rounds
each run takes 60 steps, one run after another, so that a machine that becomes slower does so for
all. It is the median of all steps but the first five of a round. The column `minutes` says what
came of it. --results is a file that gets each result when it is there; what it holds is not
computed again, so that a bench that was killed goes on. Remove it when the code has changed.
"""
import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import train  # noqa: E402
from tests.bench import bench_network as network  # noqa: E402
from tests.training import assert_same  # noqa: E402

ROOT = Path(__file__).parents[2]
RUNS = {         # name: (its baseline, program, flags)
    "lamb": ("lamb", "train.py", []),
    "adamw": ("adamw", "train.py", ["--optimizer", "adamw", "--lr-scale", "0.4"]),
    "came": ("adamw", "came", ["--lr-scale", "0.1"]),
    "merit": ("lamb", "merit", []),
    "muon": ("lamb", "muon", ["--lr-scale", "0.5"]),
    "modern": ("lamb", "modern", []),
    "modern_muon": ("lamb", "modern_muon", ["--lr-scale", "0.5"]),
    "albert": ("lamb", "albert", []),
    "stacking": ("lamb", "stacking", []),
    "local_steps": ("lamb", "local_steps", []),
    "slow_momentum": ("adamw", "slow_momentum", ["--lr-scale", "0.4"]),
    "bucket_clipping": ("lamb", "bucket_clipping", []),
    "gradientflow": ("lamb", "gradientflow", []),
    "powersgd": ("lamb", "powersgd", []),
    "onebit_adam": ("adamw", "onebit_adam", ["--lr-scale", "0.1"]),
    "onebit_lamb": ("lamb", "onebit_lamb", []),
    "zeroone_adam": ("adamw", "zeroone_adam", ["--lr-scale", "0.05"]),
}
COLUMNS = ("run", "baseline", "loss", "spread", "steps", "minutes", "MB sent", "of base", "ms",
           "of base", "state MB")
ROUNDS, ROUND_STEPS = 3, 60          # with --equal minutes: in which the time of a step is measured


def run(name, args, seed, steps, hosts):
    """Returns a dict of what a run of so many steps came to. hosts: names of two network
    namespaces, or None."""
    every = args.stop or 10 ** 6
    flags = ["--seed", seed, "--steps", steps, 0, "--eval-every", every, "--checkpoint-every",
             every, *RUNS[name][2], *args.flags]
    if name == "stacking":                             # the same examples, in three phases
        part = round(0.4 * steps)
        flags[3:5] = part, part, steps - 2 * part, 0
    with tempfile.TemporaryDirectory() as folder:
        train_on_ranks(args.ranks, RUNS[name][1], ["--out", f"{folder}/whole", *flags], hosts)
        state = last_checkpoint(f"{folder}/whole")
        if args.stop:
            for stop in ["--max-steps", args.stop], []:
                train_on_ranks(args.ranks, RUNS[name][1],
                               ["--out", f"{folder}/two", *flags, *stop], hosts)
            assert_same(state, last_checkpoint(f"{folder}/two"), name)
            print(f"{name}: stopped after step {args.stop} and resumed, the same bits at the end")
        lines = [json.loads(line) for line in open(f"{folder}/whole/metrics.jsonl")]
    steps = [line for line in lines if line["kind"] == "train"]
    sizes = [x.nbytes for one in state["optimizer"]["state"].values() for x in one.values()
             if torch.is_tensor(x)]
    return {"loss": [line["mlm_loss"] for line in lines if line["kind"] == "eval"][-1],
            "ms": 1e3 * (steps[-1]["seconds"] - steps[4]["seconds"]) / (len(steps) - 5),
            "steps": len(steps), "minutes": steps[-1]["seconds"] / 60,
            "sent": sum(line["bytes_sent"] for line in steps), "state": 1e-6 * sum(sizes)}


def step_ms(args):
    """Returns {run: the ms of a step}, see the docstring of this file."""
    durations = {name: [] for name in args.runs}
    for _ in range(ROUNDS):
        for name in args.runs:
            flags = ["--steps", args.steps, 0, "--max-steps", ROUND_STEPS, *RUNS[name][2],
                     *args.flags]
            with tempfile.TemporaryDirectory() as folder:
                train_on_ranks(args.ranks, RUNS[name][1], ["--out", folder, *flags], None)
                lines = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
            ends = [line["seconds"] for line in lines if line["kind"] == "train"]
            durations[name] += [1e3 * (b - a) for a, b in zip(ends[4:], ends[5:])]
    return {name: statistics.median(times) for name, times in durations.items()}


def steps_of_runs(args, equal):
    """Returns {run: its steps}, for "steps" or "minutes" that are equal."""
    if equal == "steps":
        return dict.fromkeys(args.runs, args.steps)
    ms = remembered(args, "ms", args.runs, lambda: step_ms(args))
    print("ms of a step:", ", ".join(f"{name} {each:.1f}" for name, each in ms.items()), flush=True)
    return {name: round(args.steps * ms[args.runs[0]] / each) for name, each in ms.items()}


def remembered(args, what, names, compute):
    """Returns compute(), or what it returned when it was last called for this, these runs and these
    flags, if --results holds it."""
    key = [what, [[name, *RUNS[name][1:]] for name in names], args.ranks, args.link, args.steps,
           args.flags]
    if args.results and args.results.exists():
        for line in args.results.read_text().splitlines():
            known, value = json.loads(line)
            if known == key:
                return value
    value = compute()
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with open(args.results, "a") as file:
            file.write(json.dumps([key, value]) + "\n")
    return value


def train_on_ranks(count, program, flags, hosts):
    """Runs train.py or a file of tests/variants, on one rank or on two."""
    program = program if program.endswith(".py") else f"tests/variants/{program}.py"
    ranks = []
    for rank in range(count):
        local, size = (0, 1) if hosts else (rank, count)
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": "29512", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": f"{network.ADDRESS}1" if hosts else "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR"}
        where = ["ip", "netns", "exec", hosts[rank]] if hosts else []
        ranks.append(subprocess.Popen([*where, sys.executable, program, *map(str, flags)],
                                      cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit(f"bench_variants.py: {program} {flags} failed:\n{''.join(errors)}")


def last_checkpoint(out):
    """Returns the state in the last checkpoint of a run."""
    return train.read_checkpoint(max(Path(out).glob("checkpoints/step-*.pt")))


def show(results):
    """Prints the table of {run: [a dict for each seed]}. Bytes, steps and memory are the first
    seed's, times are medians."""
    print("".join(f"{column:>16}" for column in COLUMNS))
    sent = {name: 1e-6 * seeds[0]["sent"] for name, seeds in results.items()}
    ms = {name: statistics.median(one["ms"] for one in seeds) for name, seeds in results.items()}
    for name, seeds in results.items():
        losses, (base, *_) = [one["loss"] for one in seeds], RUNS[name]
        minutes = statistics.median(one["minutes"] for one in seeds)
        cells = [name, base, f"{statistics.mean(losses):.3f}", f"{max(losses) - min(losses):.3f}",
                 f"{seeds[0]['steps']}", f"{minutes:.2f}"]
        for column in sent, ms:
            cells += [f"{column[name]:.1f}", f"{column[name] / (column.get(base) or math.nan):.3f}"]
        print("".join(f"{cell:>16}" for cell in [*cells, f"{seeds[0]['state']:.2f}"]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    add("--steps", type=int, default=600)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--equal", nargs="+", default=["steps"], choices=["steps", "minutes"],
        help="what all runs have as much of; both give two tables")
    add("--ranks", type=int, default=2, choices=[1, 2])
    add("--results", type=Path, metavar="FILE", help="keep results there, and take up from them")
    add("--stop", type=int, metavar="N", help="compare with runs that stop after step N and resume")
    add("--link", metavar="RATE", help="between two hosts at this rate, as tc spells it")
    add("--json", metavar="FILE", help="write all figures there as well")
    add("flags", nargs="*", help="more flags of train.py, after --")
    args = parser.parse_args()
    if args.link and (args.ranks != 2 or "minutes" in args.equal):
        parser.error("--link is between two ranks, and goes with equal steps only")
    results = {equal: {name: [] for name in args.runs} for equal in args.equal}
    hosts = None
    with contextlib.ExitStack() as stack:
        if args.link:
            hosts = [f"bench{os.getpid()}{side}" for side in "ab"]
            for host in hosts:
                stack.callback(subprocess.run, ["ip", "netns", "delete", host])
            network.make_hosts(hosts)
            for host in hosts:
                network.run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "link0",
                            "root", "tbf", "rate", args.link, "burst", "32kb", "latency", "100ms")
        steps = {equal: steps_of_runs(args, equal) for equal in args.equal}
        for seed, equal, name in itertools.product(args.seeds, args.equal, args.runs):
            number = steps[equal][name]
            result = remembered(args, [seed, number], [name],
                                lambda: run(name, args, seed, number, hosts))
            results[equal][name].append(result)
            print(f"seed {seed}, equal {equal}, {name}: MLM loss {result['loss']:.3f} after "
                  f"{number} steps, {result['minutes']:.2f} minutes", flush=True)
    for equal, table in results.items():
        print(f"\n{args.ranks} rank(s), link {args.link or 'none'}, {args.steps} steps, "
              f"equal {equal}, seeds {args.seeds}, torch {torch.__version__}, "
              f"{os.cpu_count()} cores")
        show(table)
    if args.json:
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
