"""What `train.py --plan` foretells, beside what was published and what was measured.

    python tests/bench/bench_plan.py   # NVIDIA's DGX-1, and 12 days on T4 cards
    sudo python tests/bench/bench_network.py --vocab 8192 --methods none bf16 powersgd \\
        --json network.json
    OMP_NUM_THREADS=1 python tests/bench/bench_plan.py --network network.json

Published: sequences a second of BERT-large on nodes of 8 V100, 16 GB, four cards of 100 Gb/s each,
fp16, 16 examples of 128 tokens or 4 of 512 a GPU and step (NVIDIA DeepLearningExamples). Given is
the rate of one node, from which the TFLOP/s of a GPU follow; foretold is that of 4 and of 16.
Theirs averages when backward is over, so "in turn" adds the exchange up; the plan lets it overlap.

Measured: whole steps of bench_network.py between two hosts. Given is the step with compression none
over a link without a limit, from which TFLOP/s follow; foretold are the others.

12 days: which part of the recipe nvlamb-64k they buy on nodes of 8 T4. Assumed: 20 TFLOP/s a card
in training (65 is its peak in fp16), nothing lost but what the plan counts.
"""
import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import dist  # noqa: E402

DGX1 = {128: (16, {1: 874, 4: 3090, 16: 12145}), 512: (4, {1: 196, 4: 700, 16: 2746})}
LARGE = "--model large --vocab-size 30522 --recipe nvlamb-64k --precision fp16".split()


def plan(*flags):
    """Returns what train.py --plan prints with these flags, or a variant for its compression."""
    program = "tests/variants/powersgd.py" if "powersgd" in flags else "train.py"
    return subprocess.run([sys.executable, program, *map(str, flags)], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout


def step(*flags, phase=1):
    """Returns the seconds (compute, exchange, not hidden) of a step of a phase. The plan of one
    node does not tell the last two, which are 0."""
    exchange = r"\n.*exchanges (\S+) s, (\S+) s of it"
    printed = re.search(rf"phase {phase}: .*computes (\S+) s(?:{exchange})?", plan(*flags))
    return [float(figure or 0) for figure in printed.groups()]


def published():
    print(f"{'tokens':>6}{'nodes':>7}{'published':>11}{'the plan':>10}{'ratio':>7}{'in turn':>10}"
          f"{'ratio':>7}      scaling from 1 node: published, plan, in turn")
    for phase, (tokens, (examples, rates)) in enumerate(DGX1.items(), 1):
        one = 8 * examples / rates[1]                            # seconds of a step
        tflops = step("--plan", 1, "--batch", 8 * examples, "--tflops", 1, *LARGE,
                      phase=phase)[0] / one
        for nodes, rate in rates.items():
            batch = 8 * examples * nodes
            compute, exchange, late = step(
                "--plan", nodes, "--batch", batch, "--micro-batch", examples, "--tflops", tflops,
                "--gbps", 400, "--compression", "fp16", *LARGE, phase=phase)
            found = batch / (compute + late), batch / (compute + exchange)
            print(f"{tokens:>6}{nodes:>7}{rate:>11,}" + "".join(
                f"{r:>10,.0f}{r / rate:>7.2f}" for r in found)
                + "".join(f"{r / rates[1]:>10.2f}" for r in (rate, *found)), flush=True)


def network(path):
    print(f"\n{'link':<10}{'compression':<14}{'measured, ms':>14}{'the plan':>10}{'ratio':>7}")
    result, = json.loads(Path(path).read_text())
    base = ["--plan", 2, "--gpus-per-node", 1, "--model", "mini", "--vocab-size",
            result["vocabulary"], "--batch", 16, "--micro-batch", 8, "--steps", 0, 1,
            "--mask-fraction", 0.15, "--precision", "fp32"]
    given = result["rates"]["none"]["none"]["ms"] / 1e3          # seconds of a step
    tflops = step(*base, "--tflops", 1, phase=2)[0] / given
    for rate, methods in result["rates"].items():
        gbps = {"none": 100, "1gbit": 1, "100mbit": 0.1}[rate]
        for name, row in methods.items():
            compute, _, late = step(*base, "--tflops", tflops, "--gbps", gbps,
                                    "--compression", name, phase=2)
            foretold = 1e3 * (compute + late)
            print(f"{rate:<10}{name:<14}{row['ms']:>14.0f}{foretold:>10.0f}"
                  f"{foretold / row['ms']:>7.2f}", flush=True)


def twelve_days():
    counts = 2, 4, 8, 16, 32
    print(f"\nfraction of the recipe in 12 days, on T4 cards\n{'':<22}" + "".join(
        f"{8 * nodes:>8}" for nodes in counts))
    for gbps in 1, 10, 25:
        for name in dist.COMPRESSORS:
            days = [days_of("--plan", nodes, "--gbps", gbps, "--tflops", 20, "--gpu-memory", 16,
                            "--compression", name, *LARGE) for nodes in counts]
            print(f"{gbps:>4} Gb/s  {name:<11}" + "".join(
                f"{12 / each:>8.2f}" for each in days), flush=True)


def days_of(*flags):
    """Returns the days of a plan, all phases together."""
    return sum(float(hours) / 24 for hours in re.findall(r"steps take (\S+) h", plan(*flags)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", metavar="FILE", help="what bench_network.py --json wrote")
    args = parser.parse_args()
    if args.network:
        return network(args.network)
    published()
    twelve_days()


if __name__ == "__main__":
    main()
