"""The same training in several precisions: losses, loss scale, skipped steps, speed.

    python tests/bench/bench_precision.py --model small --precisions fp32 bf16 fp16   # on a GPU
    python tests/bench/bench_precision.py --precisions fp32 bf16   # on a CPU

Each precision runs `train.py` with the demo's first phase; every loss is the mean over the 50 steps
before, and stands beside its ratio to the first precision's.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def train(args, precision, out):
    """Returns the lines of metrics.jsonl of one run."""
    command = ["train.py", "--model", args.model, "--precision", precision, "--out", out,
               "--steps", str(args.steps), "0", "--eval-every", "100000"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(Path(out) / "metrics.jsonl")]
    return [line for line in lines if line["kind"] == "train"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(args, name, f"{folder}/{name}") for name in args.precisions}
    marks = range(args.steps // 5, args.steps + 1, args.steps // 5)
    print(f"{'precision':<11}" + "".join(f"{f'loss @{mark}':>18}" for mark in marks)
          + f"{'scale':>9}{'skipped':>9}{'examples/s':>12}")

    def loss(name, mark):
        return statistics.mean(line["loss"] for line in runs[name][max(0, mark - 50):mark])

    for name, lines in runs.items():
        cells = [f"{loss(name, mark):.3f} ({loss(name, mark) / loss(args.precisions[0], mark):.3f})"
                 for mark in marks]
        rate = statistics.median(line["examples_per_second"] for line in lines)
        print(f"{name:<11}" + "".join(f"{cell:>18}" for cell in cells)
              + f"{lines[-1]['loss_scale']:>9g}{lines[-1]['skipped']:>9}{rate:>12.0f}")


if __name__ == "__main__":
    main()
