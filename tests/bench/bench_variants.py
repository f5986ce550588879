"""Each file of tests/variants beside what it changes: loss, bytes, time, memory of the optimizer.

    python tests/bench/bench_variants.py   # half an hour on two cores
    python tests/bench/bench_variants.py --runs lamb albert --steps 1200 --seeds 0
    sudo python tests/bench/bench_variants.py --link 100mbit --steps 60 --seeds 0 --runs lamb albert

Two ranks on this machine train the demo's model for --steps steps of its first phase, all runs on
as many examples, one run after another, seed by seed. `loss` is the held-out MLM loss at the end,
the mean over the seeds, and `spread` the largest minus the smallest. MB are what a rank sent in
gradients, weights or moments, evaluation included; ms is the mean step, without the first five.
With --link (Linux, iproute2) each rank is on a host of its own, at the ends of a link of that rate;
see bench_network.
"""
import argparse
import contextlib
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
COLUMNS = "run", "baseline", "loss", "spread", "MB sent", "of base", "ms", "of base", "state MB"


def run(name, args, seed, hosts):
    """Returns a dict of what a run came to. hosts: names of two network namespaces, or None."""
    every = args.stop or 10 ** 6
    flags = ["--seed", seed, "--steps", args.steps, 0, "--eval-every", every, "--checkpoint-every",
             every, *RUNS[name][2], *args.flags]
    if name == "stacking":                             # the same examples, in three phases
        part = round(0.4 * args.steps)
        flags[3:5] = part, part, args.steps - 2 * part, 0
    with tempfile.TemporaryDirectory() as folder:
        train_on_two_ranks(RUNS[name][1], ["--out", f"{folder}/whole", *flags], hosts)
        state = last_checkpoint(f"{folder}/whole")
        if args.stop:
            for stop in ["--max-steps", args.stop], []:
                train_on_two_ranks(RUNS[name][1], ["--out", f"{folder}/two", *flags, *stop], hosts)
            assert_same(state, last_checkpoint(f"{folder}/two"), name)
            print(f"{name}: stopped after step {args.stop} and resumed, the same bits at the end")
        lines = [json.loads(line) for line in open(f"{folder}/whole/metrics.jsonl")]
    steps = [line for line in lines if line["kind"] == "train"]
    sizes = [x.nbytes for one in state["optimizer"]["state"].values() for x in one.values()
             if torch.is_tensor(x)]
    return {"loss": [line["mlm_loss"] for line in lines if line["kind"] == "eval"][-1],
            "ms": 1e3 * (steps[-1]["seconds"] - steps[4]["seconds"]) / (len(steps) - 5),
            "steps": [line["bytes_sent"] for line in steps], "state": 1e-6 * sum(sizes)}


def train_on_two_ranks(program, flags, hosts):
    """Runs train.py or a file of tests/variants."""
    program = program if program.endswith(".py") else f"tests/variants/{program}.py"
    ranks = []
    for rank in range(2):
        local, size = (0, 1) if hosts else (rank, 2)
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(local),
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
    """Prints the table of {run: [a dict for each seed]}."""
    print("".join(f"{column:>16}" for column in COLUMNS))
    sent = {name: 1e-6 * sum(seeds[0]["steps"]) for name, seeds in results.items()}
    ms = {name: statistics.median(one["ms"] for one in seeds) for name, seeds in results.items()}
    for name, seeds in results.items():
        losses, (base, *_) = [one["loss"] for one in seeds], RUNS[name]
        cells = [name, base, f"{statistics.mean(losses):.3f}", f"{max(losses) - min(losses):.3f}"]
        for column in sent, ms:
            cells += [f"{column[name]:.1f}", f"{column[name] / column.get(base, math.nan):.3f}"]
        print("".join(f"{cell:>16}" for cell in [*cells, f"{seeds[0]['state']:.2f}"]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    add("--steps", type=int, default=600)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--stop", type=int, metavar="N", help="compare with runs that stop after step N and resume")
    add("--link", metavar="RATE", help="between two hosts at this rate, as tc spells it")
    add("--json", metavar="FILE", help="write all figures there as well")
    add("flags", nargs="*", help="more flags of train.py, after --")
    args = parser.parse_args()
    results, hosts = {name: [] for name in args.runs}, None
    with contextlib.ExitStack() as stack:
        if args.link:
            hosts = [f"bench{os.getpid()}{side}" for side in "ab"]
            for host in hosts:
                stack.callback(subprocess.run, ["ip", "netns", "delete", host])
            network.make_hosts(hosts)
            for host in hosts:
                network.run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "link0",
                            "root", "tbf", "rate", args.link, "burst", "32kb", "latency", "100ms")
        for seed in args.seeds:
            for name in args.runs:
                results[name].append(run(name, args, seed, hosts))
                print(f"seed {seed}, {name}: MLM loss {results[name][-1]['loss']:.3f}", flush=True)
    print(f"\ntwo ranks, link {args.link or 'none'}, {args.steps} steps, seeds {args.seeds}, torch "
          f"{torch.__version__}, {os.cpu_count()} cores")
    show(results)
    if args.json:
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
