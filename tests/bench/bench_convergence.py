"""Optimizers at growing batches, for a fixed number of examples: who still learns?

    python tests/bench/bench_convergence.py   # 15 minutes on 2 cores
    python tests/bench/bench_convergence.py --model small --batches 256 1024 4096 16384 \\
        --examples 2000000   # on a GPU

Every run sees the same number of examples of 64 tokens with the demo's schedule. The rate of each
optimizer is given at the first batch and grows with the square root of the batch; a loss of inf is
a run that diverged. The last table is 1-bit LAMB (tests/variants/onebit_lamb.py) beside LAMB on two
ranks at the first batch: loss and bytes that each rank sent.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
RATES = {"adamw": 2e-3, "lamb": 1e-2, "lans": 1e-2}  # at batches of --batches[0]
DEMO_RATE = 1e-2                                     # of the recipe that --lr-scale multiplies


def train(args, batch, scale, options, program="train.py", ranks=1):
    """Returns (the last held-out MLM loss, bytes that a rank sent) of a run of a program."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [program, "--model", args.model, "--batch", str(batch),
                "--steps", str(args.examples // batch), "0", "--lr-scale", str(scale),
                "--eval-every", "1000000", "--checkpoint-every", "1000000", *options]
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run([*command, "--out", out], cwd=ROOT, capture_output=True, text=True)
        if "is not finite" in done.stderr:
            return float("inf"), 0
        if done.returncode:
            sys.exit(f"bench_convergence.py: {' '.join(command)} failed:\n{done.stderr}")
        lines = [json.loads(line) for line in open(Path(out) / "metrics.jsonl")]
    loss = next(line["mlm_loss"] for line in reversed(lines) if line["kind"] == "eval")
    sent = sum(line["bytes_sent"] for line in lines if line["kind"] == "train")
    return float("inf") if loss is None else loss, sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="tiny")
    add("--batches", type=int, nargs="+", default=[32, 128, 512], help="growing by 4")
    add("--examples", type=int, default=30000)
    add("--rates", type=float, nargs="+", default=[1.0], help="tries, as multiples of the rates")
    add("--skip-ranks", action="store_true", help="leave out 1-bit LAMB on two ranks")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{args.model}, {args.examples:,} examples of 64 tokens, held-out MLM loss, {where}, "
          f"torch {torch.__version__}")
    print(f"{'batch':>7}{'steps':>8}" + "".join(f"{name:>18}" for name in RATES))
    for batch in args.batches:
        cells = []
        for name, rate in RATES.items():
            rates = [factor * rate * (batch / args.batches[0]) ** 0.5 for factor in args.rates]
            tries = [(train(args, batch, rate / DEMO_RATE, ["--optimizer", name])[0], rate)
                     for rate in rates]
            cells.append(f"{min(tries)[0]:.3f} ({min(tries)[1]:.0e})")
        print(f"{batch:>7}{args.examples // batch:>8}" + "".join(f"{c:>18}" for c in cells),
              flush=True)
    if args.skip_ranks:
        return
    print(f"\ntwo ranks, batch {args.batches[0]}\n{'program':<60}{'MLM loss':>10}{'MB sent':>10}")
    one_bit = "tests/variants/onebit_lamb.py"
    for program, options in ("train.py", ""), (one_bit, ""), (one_bit, "--compression bf16"):
        loss, sent = train(args, args.batches[0], 1.0, options.split(), program, ranks=2)
        print(f"{f'{program} {options}':<60}{loss:>10.3f}{sent / 1e6:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
