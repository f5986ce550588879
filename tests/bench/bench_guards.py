"""What the guards cost: digests, comparisons, questions whether to stop, as a share of training.

    python tests/bench/bench_guards.py   # two ranks of `mini`, 100 steps, two minutes

Each guard is timed inside a training of two ranks of one thread each that saves every 10 steps; the
time that it takes is what leaving it out would save. The last column is for the demo's save every
300 steps and a start every 3,000. The question between micro-batches whether to stop also waits for
the slower rank, which would be waited for later in the step: so every other step goes without it,
and the steps are compared.
"""
import collections
import functools
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import data  # noqa: E402
import dist  # noqa: E402
import train  # noqa: E402
from tests.conftest import make_documents  # noqa: E402
from tests.ranks import run_ranks, start_server  # noqa: E402

STEPS, EVERY = 100, 10
GUARDS = {                       # name: (owner, function, how often: in steps)
    "all files' digests, at the start": (data, "verify", 3000),
    "flags and code of all ranks, at the start": (dist.World, "all_gather_object", 3000),
    "the digest of a checkpoint": (hashlib, "sha256", 300),
    "weights and moments, finite and the same": (train, "check_weights", 300),
    "asked to stop?": (dist, "asked_to_stop", 1),
}


def timed(function, times, name):
    @functools.wraps(function)
    def wrapper(*arguments, **options):
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            times[name].append(time.perf_counter() - began)
    return wrapper


def training(world, argv):
    """Returns {guard: seconds of each call}, and the median seconds of a step, of one rank."""
    times = collections.defaultdict(list)
    for name, (owner, function, _) in GUARDS.items():
        setattr(owner, function, timed(getattr(owner, function), times, name))
    ask, totals, steps = dist.World.max, train.step_totals, []
    train.step_totals = lambda *arguments: steps.append(1) or totals(*arguments)
    dist.World.max = lambda world, value: 0.0 if len(steps) % 2 else ask(world, value)
    train.train(train.make_plan(train.parse_arguments(argv), world), world)
    return times


def main():
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data.prepare(make_documents(2000), folder / "shards", vocab_size=2000)
        argv = (f"--data {folder / 'shards'} --out {folder / 'out'} --model mini --steps 0 {STEPS} "
                f"--batch 32 --micro-batch 8 --precision fp32 --checkpoint-every {EVERY}").split()
        times = run_ranks(training, 2, folder, argv, timeout=600)[0]
        lines = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
        steps = [line["seconds"] for line in lines if line["kind"] == "train"]
        step = (steps[-1] - steps[9]) / (len(steps) - 10)
        seconds = [b - a for a, b in zip(steps, steps[1:])][9:]
        asking, silent = (statistics.median(seconds[k::2]) for k in (1, 0))    # step 11 is silent
    print(f"a step takes {1e3 * step:.0f} ms, two ranks of one thread, mini, 32 x 128, fp32")
    print(f"{'guard':<70}{'calls':>6}{'ms a call':>11}{'of training':>13}")
    total = 0
    for name, (_, _, every) in GUARDS.items():
        seconds = sum(times[name]) / (STEPS if every == 1 else max(1, len(times[name])))
        calls_a_step = 1 if every == 1 else 1 / every
        total += (share := seconds * calls_a_step / step)
        each = 1e3 * sum(times[name]) / max(1, len(times[name]))
        print(f"{name:<70}{len(times[name]):>6}{each:>11.2f}{share:>13.3%}")
    print(f"{'together':<87}{total:>13.3%}")
    print(f"median step with the sums between micro-batches {1e3 * asking:.0f} ms, without "
          f"{1e3 * silent:.0f} ms: {asking / silent - 1:+.1%}")


if __name__ == "__main__":
    main()
