"""The same minutes on this machine: train.py's demo, and Hugging Face's model with AdamW.

    python tests/bench/bench_minutes.py   # needs transformers; 13 minutes on two cores

Both train a 2x128 BERT on the same shards, 32 examples of 64 tokens a step, with a schedule that
ends with the minutes: theirs with the settings of BERT's paper (AdamW, linear decay, 15 % masks,
dropout 0.1; of the warm-up a tenth of the steps) at its rate, 1e-4, and at one ten times higher, in
the faster of fp32 and bf16; ours as `python train.py` does. The table has the loss on the same
held-out examples and masks after each tenth of the minutes. Evaluation does not count as time.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import bert  # noqa: E402
import data  # noqa: E402
import dist  # noqa: E402
import optim  # noqa: E402
import train  # noqa: E402
from tests.bench.bench_step import Theirs, padded  # noqa: E402

SHAPE = (32, 64)                     # examples of a step, tokens of each
PARTS = 10                           # evaluations, evenly spread


def ours(folder, minutes):
    """Returns (steps, the losses) of a run of train.py, phase 1 alone."""
    def run(steps, every, out):
        subprocess.run([sys.executable, "train.py", "--data", folder, "--out", out, "--steps",
                        str(steps), "0", "--eval-every", str(every)], cwd=ROOT,
                       check=True, capture_output=True)
        return [json.loads(line) for line in open(Path(out) / "metrics.jsonl")]

    with tempfile.TemporaryDirectory() as out:
        rates = [line["seconds"] for line in run(150, 1000, out) if line["kind"] == "train"]
    steps = round(60 * minutes / (rates[-1] - rates[49]) * 100)
    with tempfile.TemporaryDirectory() as out:
        lines = run(steps, -(-steps // PARTS), out)
    took = [line["seconds"] for line in lines if line["kind"] == "train"][-1]
    return f"{steps} steps, {took:.0f} s", [x["mlm_loss"] for x in lines if x["kind"] == "eval"]


def theirs(folder, minutes, rate):
    """Returns (steps, the losses) of Hugging Face's model."""
    world, examples = dist.World(), data.PretrainingData(folder, SHAPE[1])
    config = bert.BertConfig.preset("tiny", examples.vocab_size)

    def steps_of(side, numbers):
        for step in numbers:
            indices = range(SHAPE[0] * step, SHAPE[0] * (step + 1))
            side.step(padded(examples.batch(indices).to("cpu")))

    seconds = {}                     # of a step in each format
    for precision in ("fp32", "bf16"):
        side = Theirs(world, config, precision)
        steps_of(side, range(5))
        began = time.perf_counter()
        steps_of(side, range(30))
        seconds[precision] = (time.perf_counter() - began) / 30
    precision = min(seconds, key=seconds.get)
    side, steps = Theirs(world, config, precision), round(60 * minutes / seconds[precision])
    phase = optim.Phase(SHAPE[1], SHAPE[0], steps, rate, 0.1, 0.1)
    losses, took = [], 0.0
    size = -(-steps // PARTS)
    for first in range(0, steps, size):
        began = time.perf_counter()
        for step in range(first, min(first + size, steps)):
            for group in side.optimizer.param_groups:
                group["lr"] = optim.learning_rate(step, phase)
            steps_of(side, [step])
        took += time.perf_counter() - began
        losses.append(held_out(side.model, folder))
    return f"{steps} steps in {precision}, {took:.0f} s", losses


@torch.no_grad()
def held_out(model, folder):
    """Returns the MLM loss of Hugging Face's model on the examples of `train.evaluate`."""
    model.eval()
    examples, total, count = data.PretrainingData(folder, SHAPE[1], held_out=True), 0.0, 0
    for indices in data.micro_batches(0, train.EVAL_EXAMPLES, 64, 0, 1):
        inputs = padded(examples.batch(indices).to("cpu"))
        labels = inputs.pop("labels")
        inputs.pop("next_sentence_label")
        logits = model(**inputs).prediction_logits[labels != data.IGNORED]
        total += float(torch.nn.functional.cross_entropy(
            logits, labels[labels != data.IGNORED], reduction="sum"))
        count += len(logits)
    model.train()
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="shards/docs", help="prepared by python data.py")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3], help="of AdamW")
    args = parser.parse_args()
    folder = str(Path(args.data).absolute())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.minutes:g} minutes")
    print(f"{'held-out MLM loss after':<42}" + "".join(
        f"{args.minutes * k / PARTS:>7.1f}" for k in range(1, PARTS + 1)))
    sides = [("train.py", lambda: ours(folder, args.minutes))]
    for rate in args.rates:
        sides.append((f"Hugging Face, AdamW {rate:g}",
                      lambda rate=rate: theirs(folder, args.minutes, rate)))
    for name, side in sides:
        about, losses = side()
        print(f"{f'{name}: {about}':<42}" + "".join(f"{loss:>7.3f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()
