"""Each file of tests/variants beside what it changes: loss, bytes, time, memory of the optimizer.

    python tests/bench_variants.py                                # 20 minutes on two idle cores
    python tests/bench_variants.py --runs lamb albert --steps 1200 --seeds 0
    sudo python tests/bench_variants.py --link 100mbit --steps 60 --seeds 0 --runs lamb albert

Two ranks on this machine train the demo's model for --steps steps of its first phase, all runs on
as many examples, one run after another, seed by seed. `loss` is the held-out MLM loss at the end,
the mean over the seeds, and `spread` the largest minus the smallest; MB are what a rank sent in
gradients, weights or moments, evaluation included; ms is the median step. With --link (Linux,
iproute2) each rank is on a host of its own, at the ends of a link of that rate: see bench_network.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # noqa: E402
from tests import bench_network as network  # noqa: E402

ROOT = Path(__file__).parent.parent
RUNS = {         # name: (its baseline, program, flags)
    "lamb": ("lamb", "train.py", []),
    "adamw": ("adamw", "train.py", ["--optimizer", "adamw", "--lr-scale", "0.2"]),
    "came": ("adamw", "came", ["--lr-scale", "0.2"]),
    "merit": ("lamb", "merit", []),
    "albert": ("lamb", "albert", []),
    "stacking": ("lamb", "stacking", []),
    "local_steps": ("lamb", "local_steps", []),
    "slow_momentum": ("adamw", "slow_momentum", ["--lr-scale", "0.2"]),
    "bucket_clipping": ("lamb", "bucket_clipping", []),
}
COLUMNS = "run", "baseline", "loss", "spread", "MB sent", "of base", "ms", "of base", "state MB"


def run(name, args, seed, hosts):
    """Returns a dict of what a run came to. hosts: names of two network namespaces, or None."""
    _, program, flags = RUNS[name]
    steps = [args.steps, 0]
    if name == "stacking":                             # the same examples, in three phases
        part = round(0.4 * args.steps)
        steps = [part, part, args.steps - 2 * part, 0]
    program = program if program.endswith(".py") else f"tests/variants/{program}.py"
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, program, "--out", out, "--seed", seed, "--steps", *steps,
                   "--eval-every", 10 ** 6, "--checkpoint-every", 10 ** 6, *flags, *args.flags]
        ranks = []
        for rank in range(2):
            local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if hosts else {
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            address = f"{network.ADDRESS}1" if hosts else "127.0.0.1"
            environment = os.environ | local | {
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address,
                "MASTER_PORT": "29512", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            prefix = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            ranks.append(subprocess.Popen([*prefix, *map(str, command)], cwd=ROOT, env=environment,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        errors = [process.communicate()[1].decode() for process in ranks]
        if any(process.returncode for process in ranks):
            sys.exit(f"bench_variants.py: {name} failed:\n{errors[0]}{errors[1]}")
        lines = [json.loads(line) for line in open(Path(out) / "metrics.jsonl")]
        checkpoints = train.checkpoints_in(Path(out) / "checkpoints")
        state = train.read_checkpoint(checkpoints[max(checkpoints)])["optimizer"]["state"]
    steps = [line for line in lines if line["kind"] == "train"]
    sizes = [x.nbytes for one in state.values() for x in one.values() if torch.is_tensor(x)]
    return {"loss": [line["mlm_loss"] for line in lines if line["kind"] == "eval"][-1],
            "MB": 1e-6 * sum(line["bytes_sent"] for line in steps),
            "first": steps[0]["bytes_sent"], "steps": [line["bytes_sent"] for line in steps],
            "ms": statistics.median(3.2e4 / line["examples_per_second"] for line in steps),
            "state": 1e-6 * sum(sizes)}


def show(results):
    """Prints the table of {run: [a dict for each seed]}."""
    print("".join(f"{column:>16}" for column in COLUMNS))
    for name, seeds in results.items():
        losses = [one["loss"] for one in seeds]
        sent, ms = (statistics.median(one[key] for one in seeds) for key in ("MB", "ms"))
        cells = [name, RUNS[name][0], f"{statistics.mean(losses):.3f}",
                 f"{max(losses) - min(losses):.3f}"]
        for key, value in ("MB", sent), ("ms", ms):
            base = results.get(RUNS[name][0])
            ratio = value / statistics.median(one[key] for one in base) if base else float("nan")
            cells += [f"{value:.1f}", f"{ratio:.3f}"]
        print("".join(f"{cell:>16}" for cell in [*cells, f"{seeds[0]['state']:.2f}"]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    add("--steps", type=int, default=600)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
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
